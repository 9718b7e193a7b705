"""Generates a small data set in exactly the format of real data: coloured shapes, captions in five languages, vectors.

432 images: every combination of colour, shape, size and corner once, so that each caption belongs to one image only
and the validation samples were never seen. The vectors are a noisy linear map of the same facts. Same seed, same bytes.
"""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from steadygrad.extras import import_extra

SIDE = 48
COLOURS = ((220, 40, 40), (40, 170, 60), (50, 90, 220), (230, 200, 40), (150, 60, 180), (240, 240, 240))
SHAPES = ("circle", "square", "triangle", "cross", "diamond", "bar")
SIZES = (5, 8, 11)
CORNERS = ((0.28, 0.28), (0.72, 0.28), (0.28, 0.72), (0.72, 0.72))
VECTOR_DIM = 32

WORDS: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    "en": (
        ("red", "green", "blue", "yellow", "purple", "white"),
        ("circle", "square", "triangle", "cross", "diamond", "bar"),
        ("small", "middling", "large"),
        ("top left", "top right", "bottom left", "bottom right"),
    ),
    "de": (
        ("rot", "grün", "blau", "gelb", "violett", "weiß"),
        ("Kreis", "Quadrat", "Dreieck", "Kreuz", "Raute", "Balken"),
        ("klein", "mittelgroß", "groß"),
        ("oben links", "oben rechts", "unten links", "unten rechts"),
    ),
    "es": (
        ("rojo", "verde", "azul", "amarillo", "morado", "blanco"),
        ("círculo", "cuadrado", "triángulo", "cruz", "rombo", "barra"),
        ("pequeño", "mediano", "grande"),
        ("arriba a la izquierda", "arriba a la derecha", "abajo a la izquierda", "abajo a la derecha"),
    ),
    "fr": (
        ("rouge", "vert", "bleu", "jaune", "violet", "blanc"),
        ("cercle", "carré", "triangle", "croix", "losange", "barre"),
        ("petit", "moyen", "grand"),
        ("en haut à gauche", "en haut à droite", "en bas à gauche", "en bas à droite"),
    ),
    "zh": (
        ("红色", "绿色", "蓝色", "黄色", "紫色", "白色"),
        ("圆", "正方形", "三角形", "十字", "菱形", "长条"),
        ("小", "中", "大"),
        ("左上", "右上", "左下", "右下"),
    ),
}
TEMPLATES: dict[str, tuple[str, str]] = {
    "en": ("a {size} {colour} {shape}, {corner}", "{corner}: one {shape}, {colour} and {size}"),
    "de": ("{shape}, {size} und {colour}, {corner}", "{corner}: {shape}, {colour}, {size}"),
    "es": ("{shape} {size} de color {colour}, {corner}", "{corner}: {shape}, {colour}, {size}"),
    "fr": ("{shape} {size} de couleur {colour}, {corner}", "{corner} : {shape}, {colour}, {size}"),
    "zh": ("{corner}有一个{size}的{colour}{shape}", "{shape}，{colour}，{size}，在{corner}"),
}

Facts = tuple[int, int, int, int]
"""Colour, shape, size, corner."""


def write_synthetic(folder: Path, *, num: int, seed: int) -> Path:
    """Write the set unless it exists, so that a resumed run finds the one it made."""
    done = folder / "vectors.safetensors"  # written last
    if done.is_file():
        return folder
    chosen = _choose_facts(num, seed)
    (folder / "images").mkdir(parents=True, exist_ok=True)
    for number, facts in enumerate(chosen):
        _draw(facts).save(folder / "images" / f"{number:04d}.png")
    for language in WORDS:
        content = json.dumps(_caption_all(chosen, language), ensure_ascii=False)
        (folder / f"captions_{language}.json").write_text(content, encoding="utf-8")
    _write_vectors(done, chosen, seed)  # last: its file marks the set as complete
    return folder


def _choose_facts(num: int, seed: int) -> list[Facts]:
    every = list(itertools.product(range(len(COLOURS)), range(len(SHAPES)), range(len(SIZES)), range(len(CORNERS))))
    return random.Random(seed).sample(every, num)


def caption(facts: Facts, language: str, template: int) -> str:
    """Return one sentence.

    >>> caption((0, 1, 2, 3), "en", 0)
    'a large red square, bottom right'
    """
    words = [names[number] for names, number in zip(WORDS[language], facts)]
    return TEMPLATES[language][template].format(**dict(zip(("colour", "shape", "size", "corner"), words)))


def _caption_all(chosen: Sequence[Facts], language: str) -> dict[str, object]:
    texts = [(n, caption(facts, language, t)) for n, facts in enumerate(chosen) for t in range(2)]
    return {
        "images": [{"id": n, "file_name": f"{n:04d}.png"} for n in range(len(chosen))],
        "annotations": [{"id": i, "image_id": n, "caption": text} for i, (n, text) in enumerate(texts)],
    }


def _write_vectors(path: Path, chosen: Sequence[Facts], seed: int) -> None:
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    sizes = (len(COLOURS), len(SHAPES), len(SIZES), len(CORNERS))
    facts = torch.tensor(chosen)
    hot = torch.cat([torch.nn.functional.one_hot(facts[:, i], n) for i, n in enumerate(sizes)], 1).float()
    mixed = hot @ torch.randn(sum(sizes), VECTOR_DIM, generator=generator)
    noise = 0.1 * torch.randn(mixed.shape, generator=generator)
    save_file({"ids": torch.arange(len(chosen)), "vectors": mixed + noise}, path)


def _draw(facts: Facts) -> Any:
    image_module = import_extra("recipes", "PIL.Image", what="drawing images")
    draw_module = import_extra("recipes", "PIL.ImageDraw", what="drawing images")
    colour, shape, size, corner = facts
    image = image_module.new("RGB", (SIDE, SIDE), (20, 20, 24))
    x, y = (round(part * SIDE) for part in CORNERS[corner])
    pen, paint = draw_module.Draw(image), COLOURS[colour]
    for points in _outline(SHAPES[shape], x, y, SIZES[size]):
        pen.polygon(points, fill=paint)
    return image


def _outline(shape: str, x: int, y: int, r: int) -> list[list[tuple[float, float]]]:
    """Return the polygons that make up a shape of half-width r around (x, y)."""

    def box(wide: float, high: float) -> list[tuple[float, float]]:
        return [(x - wide, y - high), (x + wide, y - high), (x + wide, y + high), (x - wide, y + high)]

    thin = max(1.0, r / 3)
    outlines: dict[str, list[list[tuple[float, float]]]] = {
        "circle": [[(x + r * math.cos(a / 8 * math.pi), y + r * math.sin(a / 8 * math.pi)) for a in range(16)]],
        "square": [box(r, r)],
        "triangle": [[(x, y - r), (x + r, y + r), (x - r, y + r)]],
        "cross": [box(r, thin), box(thin, r)],
        "diamond": [[(x, y - r), (x + r, y), (x, y + r), (x - r, y)]],
        "bar": [box(r, thin)],
    }
    return outlines[shape]
