"""A folder of a CLIP model, as OpenCLIP publishes it -> the same model of transformers.

Read are `open_clip_config.json` and the weights in safetensors. Both libraries compute the same; the names differ, and
OpenCLIP keeps queries, keys and values in one matrix and its projections transposed. Towers of other libraries (timm,
transformers) are refused, and so is whatever else does not map to the last tensor.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from steadygrad.errors import ConfigError
from steadygrad.extras import import_extra

CONFIG, WEIGHTS = "open_clip_config.json", ("open_clip_model.safetensors", "model.safetensors")
PLAIN = {
    "visual": {"image_size", "layers", "width", "patch_size", "head_width", "mlp_ratio"},
    "text": {"context_length", "vocab_size", "width", "heads", "layers", "mlp_ratio"},
}
"""Settings of a tower that transformers' CLIP has too."""
BLOCK = {
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "attn.out_proj": "self_attn.out_proj",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}
VISION = {
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.conv1.weight": "vision_model.embeddings.patch_embedding.weight",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "visual.ln_pre.weight": "vision_model.pre_layrnorm.weight",
    "visual.ln_pre.bias": "vision_model.pre_layrnorm.bias",
    "visual.ln_post.weight": "vision_model.post_layernorm.weight",
    "visual.ln_post.bias": "vision_model.post_layernorm.bias",
    "visual.proj": "visual_projection.weight",
}
TEXT = {
    "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "ln_final.weight": "text_model.final_layer_norm.weight",
    "ln_final.bias": "text_model.final_layer_norm.bias",
    "text_projection": "text_projection.weight",
}
TRANSPOSED = {"visual.proj", "text_projection"}


def is_openclip(folder: Path) -> bool:
    """Whether a folder holds a model of OpenCLIP and none of transformers."""
    return (folder / CONFIG).is_file() and not (folder / "config.json").is_file()


def read_openclip(folder: Path) -> tuple[Any, Any]:
    """Return transformers' vision and text model, each with its projection."""
    transformers = import_extra("transformers", "transformers", what="model.pretrained", error=ConfigError)
    try:
        settings = json.loads((folder / CONFIG).read_text(encoding="utf-8"))["model_cfg"]
        vision, text = settings["vision_cfg"], settings["text_cfg"]
        _require_plain(folder, vision, text)
        shared = {
            "hidden_act": "quick_gelu" if settings.get("quick_gelu") else "gelu",
            "projection_dim": settings["embed_dim"],
        }
        image_model = transformers.CLIPVisionModelWithProjection(_make_vision(transformers, vision, shared))
        text_model = transformers.CLIPTextModelWithProjection(_make_text(transformers, text, shared))
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"model.pretrained: {folder / CONFIG} cannot be read: {error!r}.") from None
    weights = _read_weights(folder)
    _load(folder, image_model, _rename(weights, "visual.", "vision_model", VISION))
    _load(folder, text_model, _rename(weights, "", "text_model", TEXT))
    return image_model, text_model


def read_pixels(folder: Path) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """Return mean and standard deviation that its images are normalised by; None if the folder does not say."""
    given = json.loads((folder / CONFIG).read_text(encoding="utf-8")).get("preprocess_cfg", {})
    return (tuple(given["mean"]), tuple(given["std"])) if {"mean", "std"} <= given.keys() else None


def _require_plain(folder: Path, vision: Mapping[str, Any], text: Mapping[str, Any]) -> None:
    more = [f"vision_cfg.{name}" for name in vision if name not in PLAIN["visual"]]
    more += [f"text_cfg.{name}" for name in text if name not in PLAIN["text"]]
    if more:
        raise ConfigError(
            f"model.pretrained: {folder} has settings that transformers' CLIP lacks: {', '.join(more)}. Give a ViT of "
            "OpenAI's form, or the model as transformers saves it."
        )


def _make_vision(transformers: Any, vision: Mapping[str, Any], shared: Mapping[str, Any]) -> Any:
    width = vision["width"]
    return transformers.CLIPVisionConfig(
        hidden_size=width,
        intermediate_size=int(width * vision.get("mlp_ratio", 4.0)),
        num_hidden_layers=vision["layers"],
        num_attention_heads=width // vision.get("head_width", 64),
        image_size=vision["image_size"],
        patch_size=vision["patch_size"],
        **shared,
    )


def _make_text(transformers: Any, text: Mapping[str, Any], shared: Mapping[str, Any]) -> Any:
    width, num_tokens = text["width"], text.get("vocab_size", 49408)
    return transformers.CLIPTextConfig(
        hidden_size=width,
        intermediate_size=int(width * text.get("mlp_ratio", 4.0)),
        num_hidden_layers=text["layers"],
        num_attention_heads=text["heads"],
        max_position_embeddings=text.get("context_length", 77),
        vocab_size=num_tokens,
        bos_token_id=num_tokens - 2,
        eos_token_id=num_tokens - 1,  # the largest id, by which OpenCLIP finds the end of a text
        **shared,
    )


def _read_weights(folder: Path) -> dict[str, Tensor]:
    file = next((folder / name for name in WEIGHTS if (folder / name).is_file()), None)
    if file is None:
        raise ConfigError(
            f"model.pretrained: {folder} has no {WEIGHTS[0]}. Files of torch.save can hold code and are not read: "
            "save the weights as safetensors."
        )
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"model.pretrained: {file} cannot be read: {error}.") from None


def _rename(
    weights: Mapping[str, Tensor], prefix: str, tower: str, names: Mapping[str, str]
) -> Iterator[tuple[str, Tensor]]:
    """Yield a tower's tensors under transformers' names; a tensor without one keeps its own, to be reported."""
    blocks = f"{prefix}transformer.resblocks."
    for name, tensor in weights.items():
        if name.startswith(blocks):
            number, _, rest = name.removeprefix(blocks).partition(".")
            yield from _rename_block(f"{tower}.encoder.layers.{number}", rest, tensor)
        elif name in names:
            # OpenCLIP multiplies x @ proj, nn.Linear by the transpose
            yield names[name], tensor.T.contiguous() if name in TRANSPOSED else tensor
        elif prefix and name.startswith(prefix):
            yield name, tensor


def _rename_block(layer: str, rest: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    if rest.startswith("attn.in_proj_"):
        kind = rest.removeprefix("attn.in_proj_")
        for letter, part in zip("qkv", tensor.chunk(3)):  # in_proj stacks them in this order
            yield f"{layer}.self_attn.{letter}_proj.{kind}", part.contiguous()
    else:
        stem, _, kind = rest.rpartition(".")
        yield f"{layer}.{BLOCK.get(stem, stem)}.{kind}", tensor


def _load(folder: Path, model: Any, weights: Iterator[tuple[str, Tensor]]) -> None:
    try:
        # Strict: a tensor that was not renamed raises here instead of staying random
        model.load_state_dict({name: tensor.float() for name, tensor in weights})
    except RuntimeError as error:
        reason = " ".join(line.strip() for line in str(error).splitlines()[1:3])
        raise ConfigError(f"model.pretrained: the weights in {folder} do not fit its own settings: {reason}") from None
