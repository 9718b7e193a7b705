"""The report in a real browser: it opens alone, draws what was written, and obeys mouse, keyboard and paper."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from view_runs import HOSTILE, add_update_ratios, make_incident, make_step, open_directory, write_run
from watched_page import Watched

from steadygrad.record.encode import to_json
from steadygrad.record.rank_file import RankFile
from steadygrad.view.render.report import write_report

POINTS = "(name) => document.querySelector(`[data-chart='${name}'] .plot`).data.map((trace) => trace.x.length)"
RANGE = "(name) => document.querySelector(`[data-chart='${name}'] .plot`).layout.xaxis.range.map(Number)"


@pytest.fixture
def report(tmp_path: Path) -> str:
    add_update_ratios(write_run(tmp_path / "faulty"))
    write_report([tmp_path / "faulty"], tmp_path / "report.html")
    return (tmp_path / "report.html").as_uri()


def find_plot(page: Any, chart: str) -> Any:
    return page.locator(f"[data-chart='{chart}'] .nsewdrag[data-subplot='xy']")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_opens_alone_without_a_complaint_and_draws_everything(watched: Watched, report: str, scheme: str) -> None:
    watched.page.emulate_media(color_scheme=scheme)
    page = watched.open(report)
    shown = page.eval_on_selector_all("figure.chart:not([hidden])", "all => all.map(one => one.dataset.chart)")
    assert shown == ["loss", "norm", "rate", "share", "layers", "ratios"]
    assert page.evaluate(POINTS, "loss") == [599, 1, 1, 1, 1]
    assert page.evaluate(POINTS, "norm")[0] == 599
    assert page.evaluate(POINTS, "layers") == [60, 60]
    assert page.locator("[data-chart='loss'] .scatterlayer .trace").count() == 5
    page.locator("details.incident").first.evaluate("one => { one.open = true; }")
    watched.keep_picture(f"report-{scheme}", full_page=True)
    assert watched.complaints == []
    assert watched.requests == [report]


def test_nothing_on_the_page_offers_to_send_it_anywhere(watched: Watched, report: str) -> None:
    page = watched.open(report)
    titles = page.eval_on_selector_all(".modebar-btn", "all => all.map(one => one.dataset.title || one.dataset.attr)")
    assert len(titles) == 30
    assert {title for title in titles if title} == {"Download plot as a PNG", "Zoom", "Pan", "Zoom in", "Zoom out"}
    assert page.locator("a[href^='http']").count() == 0


def test_colours_follow_the_reader(watched: Watched, report: str) -> None:
    page = watched.open(report)
    ink = "() => [getComputedStyle(document.body).backgroundColor, document.querySelector('.plot').layout.font.color]"
    light = page.evaluate(ink)
    page.keyboard.press("t")
    dark = page.evaluate(ink)
    assert light[0] != dark[0]
    assert light[1] != dark[1]
    page.click("#theme")
    assert page.evaluate(ink) == light


def test_hover_tells_step_and_loss(watched: Watched, report: str) -> None:
    page = watched.open(report)
    box = find_plot(page, "loss").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.2, box["y"] + 3)  # the spike at step 120
    page.wait_for_selector("[data-chart='loss'] .hoverlayer .hovertext")
    label = page.locator("[data-chart='loss'] .hoverlayer .hovertext").first.text_content()
    assert "step 120" in label
    assert "loss 14.5" in label
    watched.keep_picture("report-hover")


def test_a_zoom_in_one_chart_moves_the_others_and_double_click_shows_all(watched: Watched, report: str) -> None:
    page = watched.open(report)
    whole = page.evaluate(RANGE, "loss")
    box = find_plot(page, "loss").bounding_box()
    middle = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + box["width"] * 0.3, middle)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.6, middle, steps=5)
    page.mouse.up()
    watched.wait_for(f"({RANGE})('loss')[0] > 100")
    zoomed = page.evaluate(RANGE, "loss")
    assert zoomed == pytest.approx([0.3 * 612 - 6, 0.6 * 612 - 6], abs=8)
    watched.wait_for(f"({RANGE})('norm')[0] > 100 && ({RANGE})('layers')[0] > 100")
    assert page.evaluate(RANGE, "norm") == pytest.approx(zoomed)
    watched.keep_picture("report-zoomed", full_page=True)
    page.mouse.dblclick(box["x"] + box["width"] * 0.5, middle)
    watched.wait_for(f"({RANGE})('loss')[0] < 10")
    assert page.evaluate(RANGE, "loss") == pytest.approx(whole)
    assert watched.complaints == []


def test_the_key_for_the_scale_turns_what_is_shown(watched: Watched, tmp_path: Path) -> None:
    directory = open_directory(tmp_path / "jumped")
    for step in range(60):
        rate = 0.9 if 20 <= step < 25 else 3e-3
        directory.write_step(make_step(step, loss=500.0 if step == 21 else 1.0, learning_rates=(rate,)))
    directory.close()
    write_report([tmp_path / "jumped"], tmp_path / "report.html")
    page = watched.open((tmp_path / "report.html").as_uri())
    scale = "(name) => document.querySelector(`[data-chart='${name}'] .plot`).layout.yaxis.type"
    assert page.evaluate(scale, "rate") == "log"  # or the jump would flatten the rest
    shown = [page.evaluate(scale, "loss")]
    for _ in range(2):
        page.keyboard.press("l")
        shown.append(page.evaluate(scale, "loss"))
    assert shown == ["log", "linear", "log"]
    assert watched.complaints == []


def test_a_narrow_screen_breaks_no_name_into_letters(watched: Watched, report: str) -> None:
    watched.page.set_viewport_size({"width": 390, "height": 800})
    page = watched.open(report)
    heights = page.eval_on_selector_all("tbody th", "all => all.map(one => one.getBoundingClientRect().height)")
    assert heights
    assert max(heights) < 80  # three lines at most
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    watched.keep_picture("report-phone", full_page=True)


def test_a_chart_is_moved_by_keys(watched: Watched, report: str) -> None:
    page = watched.open(report)
    page.locator("[data-chart='norm'] .plot").focus()
    whole = page.evaluate(RANGE, "norm")
    page.keyboard.press("+")
    watched.wait_for(f"({RANGE})('norm')[0] > 50")
    page.keyboard.press("ArrowRight")
    watched.wait_for(f"({RANGE})('norm')[1] > 500")
    page.keyboard.press("0")
    watched.wait_for(f"({RANGE})('norm')[0] < 10")
    assert page.evaluate(RANGE, "norm") == pytest.approx(whole)


def test_a_click_on_a_mark_opens_its_incident(watched: Watched, report: str) -> None:
    page = watched.open(report)
    assert page.locator("details.incident[open]").count() == 0
    mark = page.locator("[data-chart='loss'] .scatterlayer .trace").nth(2).locator("path.point")
    box = mark.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.wait_for_selector("[data-chart='loss'] .hoverlayer .hovertext")
    page.mouse.down()
    page.mouse.up()
    page.wait_for_selector("details.incident[open]")
    opened = page.locator("details.incident[open]")
    assert opened.get_attribute("data-step") == "200"
    assert opened.locator(".source code").inner_text() == "scale = x.var(dim=-1).sqrt()"
    assert opened.locator(".body").is_visible()


def test_incidents_open_by_keys_alone(watched: Watched, report: str) -> None:
    page = watched.open(report)
    page.keyboard.press("n")
    page.keyboard.press("n")
    assert page.evaluate("document.activeElement.closest('details').dataset.step") == "350"
    page.keyboard.press("p")
    assert page.evaluate("document.activeElement.closest('details').dataset.step") == "200"
    page.keyboard.press("Enter")
    assert page.locator("details.incident").first.get_attribute("open") is None


def test_html_in_names_is_text_in_charts_too(watched: Watched, tmp_path: Path) -> None:
    write_run(tmp_path / "run", 30, names=[HOSTILE, "<a href='javascript:1'>w</a>", "<b>bold</b>"])
    directory = open_directory(tmp_path / "run")
    directory.write_incident(make_incident(3, kind=HOSTILE, message=HOSTILE))
    directory.close()
    write_report([tmp_path / "run"], tmp_path / "report.html")
    page = watched.open((tmp_path / "report.html").as_uri())
    page.wait_for_selector("[data-chart='layers'] .ytick text")
    labels = page.locator("[data-chart='layers'] .ytick text").all_text_contents()
    assert labels[:2] == ["<b>bold</b>", "<a href='javascript:1'>w</a>"]
    assert page.evaluate("window.hacked") is None
    assert page.locator("img, [data-chart='layers'] a[href]").count() == 0
    assert watched.complaints == []
    assert len(watched.requests) == 1


def test_paper_gets_light_charts_and_open_incidents(watched: Watched, report: str) -> None:
    watched.page.emulate_media(color_scheme="dark")
    page = watched.open(report)
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator("details.incident[open]").count() == 3
    assert page.evaluate("document.documentElement.dataset.theme") == "light"
    watched.wait_for("document.querySelector('.plot').layout.width === 680")
    page.emulate_media(media="print")
    watched.keep_picture("report-print", full_page=True)
    page.emulate_media(media="screen")
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.locator("details.incident[open]").count() == 0
    assert page.pdf()[:4] == b"%PDF"


def test_runs_are_compared_in_one_chart(watched: Watched, tmp_path: Path) -> None:
    write_run(tmp_path / "faulty")
    write_run(tmp_path / "calm", 400, calm=True)
    write_report([tmp_path / "faulty", tmp_path / "calm"], tmp_path / "two.html")
    page = watched.open((tmp_path / "two.html").as_uri())
    assert page.evaluate(POINTS, "compare_loss") == [599, 400]
    assert page.locator("[data-chart='compare_loss'] .legendtext").all_text_contents() == ["faulty", "calm"]
    watched.keep_picture("comparison")
    assert watched.complaints == []


@pytest.mark.parametrize("kind", ["empty", "torn", "only incidents"])
def test_a_run_with_little_in_it_is_shown_without_a_complaint(watched: Watched, tmp_path: Path, kind: str) -> None:
    run = tmp_path / "run"
    if kind == "only incidents":
        run.mkdir()
        (run / "incidents.jsonl").write_text("".join(to_json(make_incident(i)) + "\n" for i in range(3000)))
    else:
        open_directory(run).close()
    if kind == "torn":
        (run / "steps.jsonl").write_text(f'{to_json(make_step(0))}\n{{"step":1,"lo')
    write_report([run], tmp_path / "report.html")
    watched.page.goto((tmp_path / "report.html").as_uri())
    text = watched.page.inner_text("main")
    expected = {
        "empty": "No step has been written yet",
        "torn": "1 line of steps.jsonl",
        "only incidents": "2,984 more",
    }
    assert expected[kind] in text
    watched.keep_picture(f"report-{kind.replace(' ', '-')}")
    assert watched.complaints == []


def test_terms_of_the_loss_and_ranks_are_shown_when_they_are_there(watched: Watched, tmp_path: Path) -> None:
    directory = open_directory(tmp_path / "job")
    ranks = [RankFile(tmp_path / "job", rank, 2) for rank in range(2)]
    for step in range(40):
        directory.write_step(dataclasses.replace(make_step(step), extra={"mse": 1 / (1 + step), HOSTILE: 0.5}))
        for rank in ranks:
            rank.write_own(step, 1.0)
    ranks[1].write_incident(make_incident(20, kind="nonfinite_input", message="the batch holds NaN"))
    for sink in (directory, *ranks):
        sink.close()
    write_report([tmp_path / "job"], tmp_path / "report.html")
    page = watched.open((tmp_path / "report.html").as_uri())
    assert page.evaluate(POINTS, "extra") == [40, 40]
    assert page.locator("[data-chart='extra'] .legendtext").all_text_contents()[0] == "mse"
    assert page.locator(".ranks tbody tr").count() == 2
    assert page.locator("details.incident .badge.rank").all_text_contents() == ["rank 1"]
    watched.keep_picture("report-ranks", full_page=True)
    assert watched.complaints == []


def test_evaluations_are_drawn_over_the_training_loss_and_compared(watched: Watched, tmp_path: Path) -> None:
    for name in ("first", "second"):
        write_run(tmp_path / name, 120, calm=True)
        lines = (f'{{"step": {s}, "val_loss": {9 / s}, "val_f1": 0.5}}' for s in (40, 80, 120))
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    write_report([tmp_path / "first", tmp_path / "second"], tmp_path / "report.html")
    page = watched.open((tmp_path / "report.html").as_uri())
    assert page.evaluate(POINTS, "validation") == [120, 3]
    assert page.evaluate(POINTS, "metrics") == [3]
    assert page.evaluate(POINTS, "compare_validation") == [3, 3]
    watched.keep_picture("validation", full_page=True)
    assert watched.complaints == []
