"""Pictures that a training saved in RUN/pictures are shown in the report; the others are reported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from view_runs import write_run

from steadygrad.view.read.pictures import MAX_BYTES, MAX_PICTURES, SIGNATURE, read_pictures
from steadygrad.view.read.run import RunReader
from steadygrad.view.render.parts import render_parts, render_run


def put(run: Path, name: str, data: bytes = SIGNATURE + b"rest") -> None:
    (run / "pictures").mkdir(exist_ok=True)
    (run / "pictures" / name).write_bytes(data)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    write_run(folder)
    return folder


def test_a_picture_is_in_the_page_with_its_caption_escaped(run: Path) -> None:
    put(run, "a.png")
    (run / "pictures" / "captions.json").write_text(json.dumps({"a.png": "<b>bold</b>"}))
    page = render_run(RunReader(run).read_all(), "run0")
    assert '<img src="data:image/png;base64,iVBORw0KGgpyZXN0" alt="&lt;b&gt;bold&lt;/b&gt;"' in page
    assert "<figcaption>&lt;b&gt;bold&lt;/b&gt;</figcaption>" in page
    assert "<b>bold</b>" not in page


def test_a_run_without_pictures_does_not_mention_them(run: Path) -> None:
    assert render_parts(RunReader(run).read_all())["pictures"] == ""


def test_a_picture_without_a_caption_is_shown_with_its_name(run: Path) -> None:
    put(run, "epoch-3.png")
    (run / "pictures" / "captions.json").write_text("[not json")
    assert [(one.name, one.caption) for one in read_pictures(run).shown] == [("epoch-3.png", "epoch-3")]


def test_files_that_are_not_png_or_too_large_are_reported_and_not_shown(run: Path) -> None:
    put(run, "bad.png", b"<svg onload=alert(1)>")
    put(run, "large.png", SIGNATURE + bytes(MAX_BYTES))
    found = read_pictures(run)
    assert found.shown == ()
    assert [text.split(":")[0] for text in found.left_out] == ["bad.png", "large.png"]
    assert "bad.png: no readable PNG" in render_parts(RunReader(run).read_all())["pictures"]


def test_surplus_pictures_are_counted_and_not_shown(run: Path) -> None:
    for number in range(MAX_PICTURES + 2):
        put(run, f"{number:03d}.png")
    found = read_pictures(run)
    assert len(found.shown) == MAX_PICTURES
    assert len(found.left_out) == 2


def test_a_link_that_leaves_the_served_folder_is_not_followed(run: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret.png"
    secret.write_bytes(SIGNATURE + b"secret")
    put(run, "own.png")
    (run / "pictures" / "link.png").symlink_to(secret)
    found = read_pictures(run, within=run.resolve())
    assert [one.name for one in found.shown] == ["own.png"]
    assert [text.split(":")[0] for text in found.left_out] == ["link.png"]
