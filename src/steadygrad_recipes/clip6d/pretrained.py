"""A folder of a CLIP model, as transformers or OpenCLIP saves it -> its image and text encoders, and its tokenizer.

Weights are read from safetensors, nothing is downloaded, and no code of the folder runs. The sizes of the model are its
own: settings that contradict them are refused, with the values to write.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from steadygrad.errors import ConfigError
from steadygrad.extras import import_extra
from steadygrad_recipes.clip6d.config import ModelConfig
from steadygrad_recipes.clip6d.openclip import is_openclip, read_openclip, read_pixels

GAP = -1
"""Fills rows of tokens; no tokenizer has it."""
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
"""Of the pixels that CLIP was trained on."""


class ClipImage(nn.Module):
    """[B, 3, S, S] of bytes -> [B, D], by CLIP's vision model."""

    mean: Tensor
    std: Tensor

    def __init__(self, model: Any, mean: Sequence[float] = MEAN, std: Sequence[float] = STD) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("mean", torch.tensor(mean).view(3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std).view(3, 1, 1), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        embeds: Tensor = self.model(pixel_values=(images.float() / 255 - self.mean) / self.std).image_embeds
        return embeds


class ClipText(nn.Module):
    """[B, T] of the tokenizer's ids, filled with GAP -> [B, D], by CLIP's text model."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        is_token = tokens != GAP
        # CLIP pools at the first end token, so further ones behind it change nothing
        ids = torch.where(is_token, tokens, int(self.model.config.eos_token_id))
        embeds: Tensor = self.model(input_ids=ids, attention_mask=is_token.long()).text_embeds
        return embeds


def open_encoders(config: ModelConfig) -> tuple[ClipImage, ClipText]:
    """Return both encoders with their weights."""
    folder = _require_folder(config)
    pixels = None
    if is_openclip(folder):
        (image, text), pixels = read_openclip(folder), read_pixels(folder)
    else:
        image, text = _open_transformers(folder)
    _require_sizes(config, {"image_size": image.config.image_size, "embed_dim": image.config.projection_dim})
    return ClipImage(image, *(pixels or (MEAN, STD))), ClipText(text)


def _open_transformers(folder: Path) -> tuple[Any, Any]:
    transformers = import_extra("transformers", "transformers", what="model.pretrained", error=ConfigError)
    from safetensors import SafetensorError

    safely: dict[str, Any] = {"local_files_only": True, "use_safetensors": True}  # no network, no pickle
    try:
        # CLIPModel has one length of vectors for both; each half alone would take its own config's, often the default
        whole = transformers.CLIPConfig.from_pretrained(folder, local_files_only=True)
        halves = whole.vision_config, whole.text_config
        for half in halves:
            half.projection_dim = whole.projection_dim
        with _quiet(transformers):
            image = transformers.CLIPVisionModelWithProjection.from_pretrained(folder, config=halves[0], **safely)
            text = transformers.CLIPTextModelWithProjection.from_pretrained(folder, config=halves[1], **safely)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise ConfigError(f"model.pretrained: {folder} cannot be read as a CLIP model: {reason}.") from None
    return image, text


@contextlib.contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Silence the report that the other half's weights are unexpected in each half."""
    log, words = logging.getLogger("transformers"), transformers.utils.logging
    level, has_bars = log.level, words.is_progress_bar_enabled()
    log.setLevel(logging.ERROR)
    words.disable_progress_bar()
    try:
        yield
    finally:
        log.setLevel(level)
        if has_bars:
            words.enable_progress_bar()


@functools.cache
def open_tokenizer(folder: str) -> Any:
    """Return the tokenizer in the folder."""
    transformers = import_extra("transformers", "transformers", what="model.pretrained", error=ConfigError)
    try:
        return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"model.pretrained: {folder} has no tokenizer: {reason}. Save it there too.") from None


def require_tokenizer(config: ModelConfig, text: ClipText) -> None:
    """Raise ConfigError unless the tokenizer in the folder is that of the text model."""
    tokenizer, model = open_tokenizer(str(config.pretrained)), text.model.config
    problem = ""
    if len(tokenizer) > model.vocab_size:
        problem = f"has {len(tokenizer)} tokens, and its text model {model.vocab_size}"
    # By this id the model finds the end of a text; with 2, as the first published ones have it, by the largest id
    elif tokenizer.eos_token_id != model.eos_token_id != 2:
        problem = f"ends texts with {tokenizer.eos_token_id}, and its text model with {model.eos_token_id}"
    if problem:
        raise ConfigError(
            f"model.pretrained: the tokenizer in {config.pretrained} {problem}. Save the model's own there."
        )


def encode_texts(texts: Sequence[str], folder: str, context: int) -> Tensor:
    """Return [B, T] of ids for the longest of them, cut at `context`; each ends with the tokenizer's end."""
    tokenizer = open_tokenizer(folder)
    longest = min(context, int(tokenizer.model_max_length))
    end = tokenizer.eos_token_id
    rows = [list(tokenizer(text)["input_ids"]) for text in texts]
    rows = [row if row and row[-1] == end else [*row, end] for row in rows]
    # The end stays when a text is cut: CLIP takes its vector from there
    rows = [row if len(row) <= longest else [*row[: longest - 1], end] for row in rows]
    width = max(map(len, rows))
    return torch.tensor([row + [GAP] * (width - len(row)) for row in rows])


def _require_folder(config: ModelConfig) -> Path:
    folder = Path(str(config.pretrained))
    if not (folder / "config.json").is_file() and not is_openclip(folder):
        raise ConfigError(
            f"model.pretrained: {folder} has no config.json. Give a folder of CLIPModel.save_pretrained, or one of "
            "OpenCLIP with its open_clip_config.json."
        )
    return folder


def _require_sizes(config: ModelConfig, sizes: dict[str, int]) -> None:
    wrong = {name: size for name, size in sizes.items() if getattr(config, name) != size}
    if wrong:
        flags = " ".join(f"--model.{name.replace('_', '-')} {size}" for name, size in wrong.items())
        raise ConfigError(f"model.pretrained: {config.pretrained} has other sizes than the settings. Give {flags}.")
