"""A CLIP model as OpenCLIP publishes it: the encoders that are read compute what its own towers compute."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from steadygrad.errors import ConfigError
from steadygrad_recipes.clip6d.config import ModelConfig
from steadygrad_recipes.clip6d.pretrained import GAP, MEAN, STD, open_encoders

pytest.importorskip("transformers")

NUM_TOKENS = 40
SETTINGS: dict[str, Any] = {
    "embed_dim": 12,
    "vision_cfg": {"image_size": 16, "layers": 2, "width": 32, "patch_size": 8, "head_width": 16},
    "text_cfg": {"context_length": 8, "vocab_size": NUM_TOKENS, "width": 16, "heads": 2, "layers": 2},
}


class Block(nn.Module):
    """OpenCLIP's residual block, under its names."""

    def __init__(self, width: int, heads: int, act: Any) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(width, 4 * width), "c_proj": nn.Linear(4 * width, width)})
        self.act = act

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        y = self.ln_1(x)
        x = x + self.attn(y, y, y, need_weights=False, attn_mask=mask)[0]
        return x + self.mlp["c_proj"](self.act(self.mlp["c_fc"](self.ln_2(x))))


class Towers(nn.Module):
    """Both towers, with the state_dict of OpenCLIP's CLIP."""

    def __init__(self, act: Any) -> None:
        super().__init__()
        vision, text, dim = SETTINGS["vision_cfg"], SETTINGS["text_cfg"], SETTINGS["embed_dim"]
        wide, narrow = vision["width"], text["width"]
        self.visual = nn.Module()
        self.visual.class_embedding = nn.Parameter(torch.randn(wide))
        self.visual.positional_embedding = nn.Parameter(torch.randn(5, wide))
        self.visual.proj = nn.Parameter(torch.randn(wide, dim))
        self.visual.conv1 = nn.Conv2d(3, wide, 8, 8, bias=False)
        self.visual.ln_pre, self.visual.ln_post = nn.LayerNorm(wide), nn.LayerNorm(wide)
        self.visual.transformer = nn.Module()
        self.visual.transformer.resblocks = nn.ModuleList(Block(wide, 2, act) for _ in range(2))
        self.transformer = nn.Module()
        self.transformer.resblocks = nn.ModuleList(Block(narrow, 2, act) for _ in range(2))
        self.token_embedding = nn.Embedding(NUM_TOKENS, narrow)
        self.positional_embedding = nn.Parameter(torch.randn(8, narrow))
        self.ln_final = nn.LayerNorm(narrow)
        self.text_projection = nn.Parameter(torch.randn(narrow, dim))
        self.logit_scale = nn.Parameter(torch.zeros(()))

    def encode_image(self, pixels: Tensor) -> Tensor:
        tower: Any = self.visual
        x = tower.conv1(pixels).flatten(2).mT
        x = torch.cat([tower.class_embedding.expand(len(x), 1, -1), x], 1) + tower.positional_embedding
        x = tower.ln_pre(x)
        for block in tower.transformer.resblocks:
            x = block(x, None)
        return tower.ln_post(x[:, 0]) @ tower.proj

    def encode_text(self, tokens: Tensor) -> Tensor:
        num = tokens.shape[1]
        x = self.token_embedding(tokens) + self.positional_embedding[:num]
        mask = torch.full((num, num), -torch.inf).triu(1)
        for block in self.transformer.resblocks:
            x = block(x, mask)
        return self.ln_final(x)[torch.arange(len(x)), tokens.argmax(1)] @ self.text_projection


def quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def write_folder(folder: Path, towers: nn.Module, **more: Any) -> None:
    folder.mkdir(exist_ok=True)
    about = {"model_cfg": {**SETTINGS, **more}, "preprocess_cfg": {"mean": MEAN, "std": STD}}
    (folder / "open_clip_config.json").write_text(json.dumps(about))
    save_file({name: t.contiguous() for name, t in towers.state_dict().items()}, folder / "open_clip_model.safetensors")


@pytest.mark.parametrize("quick", [False, True])
def test_the_encoders_compute_what_openclip_computes(tmp_path: Path, quick: bool) -> None:
    torch.manual_seed(0)
    towers = Towers(quick_gelu if quick else F.gelu).eval()
    write_folder(tmp_path, towers, **({"quick_gelu": True} if quick else {}))
    images = torch.randint(0, 256, (3, 3, 16, 16), dtype=torch.uint8)
    end = NUM_TOKENS - 1
    tokens = torch.tensor([[1, 5, 7, end, GAP, GAP], [1, 2, 3, 4, 5, end]])

    image, text = open_encoders(ModelConfig(pretrained=str(tmp_path), image_size=16, embed_dim=12))
    pixels = (images.float() / 255 - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)

    torch.testing.assert_close(image.eval()(images), towers.encode_image(pixels))
    torch.testing.assert_close(text.eval()(tokens), towers.encode_text(tokens.clamp(min=0)))


def test_openclips_own_model_is_read(tmp_path: Path) -> None:
    open_clip = pytest.importorskip("open_clip")
    towers = open_clip.CLIP(**SETTINGS).eval()
    write_folder(tmp_path, towers)
    tokens = torch.tensor([[1, 5, 7, 2, 3, 4, 5, NUM_TOKENS - 1]])

    _, text = open_encoders(ModelConfig(pretrained=str(tmp_path), image_size=16, embed_dim=12))

    torch.testing.assert_close(text.eval()(tokens), towers.encode_text(tokens))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"vision_cfg": {"timm_model_name": "vit_base"}},
            r"that transformers' CLIP lacks: vision_cfg\.timm_m",
        ),
        ({"vision_cfg": {**SETTINGS["vision_cfg"], "layers": 3}}, r"do not fit its own settings: Missing key"),
        ({"text_cfg": {"width": 16}}, r"open_clip_config\.json cannot be read: KeyError"),
    ],
)
def test_a_folder_that_does_not_fit_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    write_folder(tmp_path, Towers(F.gelu), **change)

    with pytest.raises(ConfigError, match=message):
        open_encoders(ModelConfig(pretrained=str(tmp_path), image_size=16, embed_dim=12))


def test_a_pickle_is_not_read(tmp_path: Path) -> None:
    write_folder(tmp_path, Towers(F.gelu))
    (tmp_path / "open_clip_model.safetensors").rename(tmp_path / "open_clip_pytorch_model.bin")

    with pytest.raises(ConfigError, match=r"Files of torch\.save can hold code and are not read"):
        open_encoders(ModelConfig(pretrained=str(tmp_path), image_size=16, embed_dim=12))
