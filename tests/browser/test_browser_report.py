"""The report in a real browser: it opens by itself, draws the record, and works by mouse, touch, keyboard and print.

Tests read what a user reads: texts of the page and of the charts, and their positions.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from view_runs import (
    HOSTILE,
    NAMES,
    add_update_ratios,
    make_gradients,
    make_incident,
    make_step,
    open_directory,
    write_run,
)
from watched_page import Watched

from steadygrad.record.encode import to_json
from steadygrad.record.rank_file import RankFile
from steadygrad.view.render.report import write_report


@pytest.fixture
def report(tmp_path: Path) -> str:
    add_update_ratios(write_run(tmp_path / "faulty"))
    write_report([tmp_path / "faulty"], tmp_path / "report.html")
    return (tmp_path / "report.html").as_uri()


def read_range(page: Any, chart: str) -> list[float]:
    """Return the first and the last step that a chart shows."""
    script = (
        "(name) => { const s = document.querySelector(`[data-chart='${name}'] .plot`).state; return [s.from, s.to]; }"
    )
    return page.evaluate(script, chart)  # type: ignore[no-any-return]


def read_legend(page: Any, chart: str) -> list[str]:
    return page.locator(f"[data-chart='{chart}'] .legend .item").all_text_contents()  # type: ignore[no-any-return]


def bring(page: Any, chart: str) -> Any:
    """Return a chart, scrolled into view and drawn."""
    figure = page.locator(f"figure[data-chart='{chart}']")
    figure.scroll_into_view_if_needed()
    page.wait_for_selector(f"figure[data-chart='{chart}'] .plot > svg")
    return figure


def find_box(page: Any, chart: str) -> dict[str, float]:
    """Return the position of a chart's curve on the screen."""
    bring(page, chart)
    script = """(name) => { const plot = document.querySelector(`[data-chart='${name}'] .plot`);
        const box = plot.getBoundingClientRect(), f = plot.state.frame;
        return { x: box.left + f.left, y: box.top + f.top, width: f.right - f.left, height: f.bottom - f.top }; }"""
    return page.evaluate(script, chart)  # type: ignore[no-any-return]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_opens_by_itself_without_errors_and_draws_everything(watched: Watched, report: str, scheme: str) -> None:
    watched.page.emulate_media(color_scheme=scheme)
    page = watched.open(report)
    shown = page.eval_on_selector_all("figure.chart:not([hidden])", "all => all.map(one => one.dataset.chart)")
    assert shown == ["loss", "norm", "rate", "share", "layers", "ratios"]
    for chart in shown:
        bring(page, chart)
    assert read_legend(page, "loss") == [
        "not finite 1×",
        "skipped 1×",
        "jumped 1×",
        "learning rate changed 1×",
        "rolled back 1×",
    ]
    assert read_legend(page, "norm") == ["norm", "after clipping", "clip threshold"]
    assert page.locator("[data-chart='layers'] .tick.name").count() == 14
    page.locator("details.incident").first.evaluate("one => { one.open = true; }")
    watched.keep_picture(f"report-{scheme}", full_page=True)
    assert watched.complaints == []
    assert watched.requests == [report]


def test_the_failure_is_on_the_first_screen(watched: Watched, report: str) -> None:
    page = watched.open(report)
    story = page.locator(".story")
    assert story.bounding_box()["y"] < 400
    assert "model.py:41" in story.inner_text()
    assert "scale = x.var(dim=-1).sqrt()" in story.inner_text()
    assert "Healthy since step 421" in story.inner_text()
    story.locator("a").first.click()
    assert page.locator("details.incident[open]").get_attribute("data-step") == "200"


def test_all_charts_of_a_run_share_their_ticks_and_no_labels_overlap(watched: Watched, report: str) -> None:
    page = watched.open(report)
    steps = {}
    for chart in ("loss", "norm"):
        bring(page, chart)
        script = """(name) => [...document.querySelectorAll(`[data-chart='${name}'] .plot .tick`)].map(
            (one) => [one.textContent, one.getBoundingClientRect().toJSON()])"""
        ticks = page.evaluate(script, chart)
        steps[chart] = [
            text for text, _ in ticks if text.replace(",", "").isdigit() and int(text.replace(",", "")) >= 50
        ]
        boxes = [box for _, box in ticks]
        for i, one in enumerate(boxes):
            for other in boxes[i + 1 :]:
                apart_x = one["right"] <= other["left"] + 1 or other["right"] <= one["left"] + 1
                apart_y = one["bottom"] <= other["top"] + 3 or other["bottom"] <= one["top"] + 3
                assert apart_x or apart_y
    assert steps["loss"] == steps["norm"] == ["100", "200", "300", "400", "500", "600"]


def test_no_link_leaves_the_page(watched: Watched, report: str) -> None:
    page = watched.open(report)
    assert page.locator("a[href^='http']").count() == 0
    saves = page.locator("[data-chart='loss'] .tools button").all_text_contents()
    assert saves == ["◂", "▸", "+", "−", "all", "SVG", "PNG", "CSV"]


def test_colours_follow_the_readers_preference(watched: Watched, report: str) -> None:
    page = watched.open(report)
    ink = """() => [getComputedStyle(document.body).backgroundColor,
        getComputedStyle(document.querySelector('.plot path.line')).stroke]"""
    light = page.evaluate(ink)
    page.keyboard.press("t")
    dark = page.evaluate(ink)
    assert light[0] != dark[0]
    assert light[1] != dark[1]
    page.click("#theme")
    assert page.evaluate(ink) == light


def test_hovering_shows_step_and_loss(watched: Watched, report: str) -> None:
    page = watched.open(report)
    box = find_box(page, "loss")
    start, end = read_range(page, "loss")
    page.mouse.move(box["x"] + box["width"] * (120 - start) / (end - start), box["y"] + 20)  # the spike at step 120
    tip = page.locator("[data-chart='loss'] .tip")
    assert tip.locator("b").inner_text() == "step 120"
    assert "loss 14.5" in tip.inner_text()
    watched.keep_picture("report-hover")


def test_a_zoom_in_one_chart_moves_the_others_and_double_click_shows_all(watched: Watched, report: str) -> None:
    page = watched.open(report)
    whole = read_range(page, "loss")
    box = find_box(page, "loss")
    middle = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + box["width"] * 0.3, middle)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.6, middle, steps=5)
    page.mouse.up()
    watched.wait_for("document.querySelector(\"[data-chart='loss'] .plot\").state.from > 100")
    zoomed = read_range(page, "loss")
    size = whole[1] - whole[0]
    assert zoomed == pytest.approx([whole[0] + 0.3 * size, whole[0] + 0.6 * size], abs=8)
    for chart in ("norm", "layers"):
        bring(page, chart)
        watched.wait_for(f"document.querySelector(\"[data-chart='{chart}'] .plot\").state.from > 100")
        assert read_range(page, chart) == pytest.approx(zoomed)
    watched.keep_picture("report-zoomed", full_page=True)
    # By the element: on a busy machine the page still moves after a picture of all of it, and a fixed point would miss.
    bring(page, "loss").locator(".plot").dblclick()
    watched.wait_for("document.querySelector(\"[data-chart='loss'] .plot\").state.from < 10")
    assert read_range(page, "loss") == pytest.approx(whole)
    assert watched.complaints == []


def test_buttons_zoom_move_and_reset_without_a_mouse(watched: Watched, report: str) -> None:
    page = watched.open(report)
    whole = read_range(page, "loss")
    tools = page.locator("[data-chart='loss'] .tools")
    assert tools.locator("[data-move='0']").is_disabled()
    tools.locator("[data-move='+']").click()
    watched.wait_for("document.querySelector(\"[data-chart='loss'] .plot\").state.from > 50")
    before = read_range(page, "loss")
    tools.locator("[data-move='ArrowRight']").click()
    watched.wait_for(f"document.querySelector(\"[data-chart='loss'] .plot\").state.from > {before[0] + 10}")
    tools.locator("[data-move='0']").click()
    watched.wait_for("document.querySelector(\"[data-chart='loss'] .plot\").state.from < 10")
    assert read_range(page, "loss") == pytest.approx(whole)


def test_buttons_select_smoothing_scale_and_axis(watched: Watched, report: str) -> None:
    page = watched.open(report)
    assert page.locator("[data-chart='loss'] path.line").count() == 1
    page.click("[data-set='smooth'][data-value='0.9']")
    assert page.locator("[data-chart='loss'] path.line").count() == 2  # the raw line stays behind the smoothed one
    assert page.get_attribute("[data-set='smooth'][data-value='0.9']", "aria-pressed") == "true"
    page.click("[data-set='scale'][data-value='log']")
    assert page.evaluate("document.querySelector(\"[data-chart='loss'] .plot\").state.spec.log")
    page.click("[data-set='across'][data-value='time']")
    assert "time" in page.locator("[data-chart='loss'] .plot .tick").all_text_contents()
    assert read_range(page, "loss")[1] == pytest.approx(599 * 0.25, rel=0.05)
    assert "min" in " ".join(page.locator("[data-chart='loss'] .plot .tick").all_text_contents())
    assert watched.complaints == []


def test_a_chart_can_be_saved_as_picture_and_as_numbers(watched: Watched, report: str, tmp_path: Path) -> None:
    page = watched.open(report)
    saved = {}
    for kind in ("svg", "png", "csv"):
        with page.expect_download() as found:
            page.click(f"[data-chart='loss'] [data-save='{kind}']")
        assert found.value.suggested_filename == f"faulty-loss.{kind}"
        found.value.save_as(tmp_path / f"saved.{kind}")
        saved[kind] = (tmp_path / f"saved.{kind}").read_bytes()
    assert saved["png"].startswith(b"\x89PNG")
    assert b"var(--" not in saved["svg"]
    assert b"skipped" in saved["svg"]
    rows = saved["csv"].decode().splitlines()
    assert rows[0] == "step,loss"
    assert len(rows) == 600
    assert rows[121].startswith("120,14.5")


def test_the_key_for_the_scale_toggles_the_current_one(watched: Watched, tmp_path: Path) -> None:
    directory = open_directory(tmp_path / "jumped")
    for step in range(60):
        rate = 0.9 if 20 <= step < 25 else 3e-3
        directory.write_step(make_step(step, loss=500.0 if step == 21 else 1.0, learning_rates=(rate,)))
    directory.close()
    write_report([tmp_path / "jumped"], tmp_path / "report.html")
    page = watched.open((tmp_path / "report.html").as_uri())
    scale = "(name) => document.querySelector(`[data-chart='${name}'] .plot`).state.spec.log"
    bring(page, "rate")
    assert page.evaluate(scale, "rate")  # otherwise the jump would flatten the rest
    shown = [page.evaluate(scale, "loss")]
    for _ in range(2):
        page.keyboard.press("l")
        bring(page, "loss")
        shown.append(page.evaluate(scale, "loss"))
    assert shown == [True, False, True]
    assert watched.complaints == []


@pytest.mark.parametrize("width", [400, 900, 1400])
def test_nothing_is_cut_off_at_any_width(watched: Watched, report: str, width: int) -> None:
    watched.page.set_viewport_size({"width": width, "height": 800})
    page = watched.open(report)
    heights = page.eval_on_selector_all("tbody th", "all => all.map(one => one.getBoundingClientRect().height)")
    assert max(heights, default=0) < 80  # at most three lines
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    cut = "all => all.filter(one => one.scrollWidth > one.clientWidth + 1).map(one => one.textContent)"
    assert page.eval_on_selector_all(".tiles dd, .headline, .story p, summary", cut) == []
    watched.keep_picture(f"report-{width}", full_page=True)


def test_a_chart_can_be_moved_with_keys(watched: Watched, report: str) -> None:
    page = watched.open(report)
    page.locator("[data-chart='loss'] .plot").focus()
    whole = read_range(page, "loss")
    page.keyboard.press("+")
    watched.wait_for("document.querySelector(\"[data-chart='loss'] .plot\").state.from > 50")
    page.keyboard.press("ArrowRight")
    watched.wait_for("document.querySelector(\"[data-chart='loss'] .plot\").state.to > 500")
    page.keyboard.press("0")
    watched.wait_for("document.querySelector(\"[data-chart='loss'] .plot\").state.from < 10")
    assert read_range(page, "loss") == pytest.approx(whole)


def test_a_click_on_a_mark_opens_its_incident(watched: Watched, report: str) -> None:
    page = watched.open(report)
    bring(page, "loss")
    assert page.locator("details.incident[open]").count() == 0
    page.locator("[data-chart='loss'] .mark[data-kind='skip']").click()
    page.wait_for_selector("details.incident[open]")
    opened = page.locator("details.incident[open]")
    assert opened.get_attribute("data-step") == "200"
    assert opened.locator(".source code").inner_text() == "scale = x.var(dim=-1).sqrt()"
    assert opened.locator(".body").first.is_visible()


def test_incidents_open_with_keys_alone_and_no_title_is_hidden_by_the_bar(watched: Watched, report: str) -> None:
    watched.page.emulate_media(reduced_motion="reduce")
    page = watched.open(report)
    page.keyboard.press("n")
    page.keyboard.press("n")
    assert page.evaluate("document.activeElement.closest('details').dataset.step") == "350"
    bar = page.locator("header").bounding_box()
    title = page.evaluate("document.activeElement.getBoundingClientRect().top")
    assert bar["y"] + bar["height"] <= title < 900
    page.keyboard.press("p")
    assert page.evaluate("document.activeElement.closest('details').dataset.step") == "200"
    page.keyboard.press("Enter")
    assert page.locator("details.incident").first.get_attribute("open") is None


def test_parameters_can_be_searched_and_sorted_in_a_map(watched: Watched, report: str) -> None:
    page = watched.open(report)
    figure = bring(page, "layers")
    figure.locator("input.find").fill("attention.bias")
    assert figure.locator(".tick.name").all_text_contents() == [f"blocks.{i}.attention.bias" for i in range(4)]
    figure.locator("input.find").fill("")
    figure.locator("select.order").select_option("bad")
    assert figure.locator(".tick.name").first.text_content() == "blocks.1.attention.bias"  # the one that had the NaN


def test_html_in_names_is_shown_as_text_in_charts_too(watched: Watched, tmp_path: Path) -> None:
    write_run(tmp_path / "run", 30, names=[HOSTILE, "<a href='javascript:1'>w</a>", "<b>bold</b>"])
    directory = open_directory(tmp_path / "run")
    directory.write_incident(make_incident(3, kind=HOSTILE, message=HOSTILE))
    directory.close()
    write_report([tmp_path / "run"], tmp_path / "report.html")
    page = watched.open((tmp_path / "report.html").as_uri())
    bring(page, "layers")
    labels = page.locator("[data-chart='layers'] .tick.name").all_text_contents()
    assert labels[1:] == ["<a href='javascript:1'>w</a>", "<b>bold</b>"]
    assert page.evaluate("window.hacked") is None
    assert page.locator("img, [data-chart='layers'] a[href]").count() == 0
    assert watched.complaints == []
    assert len(watched.requests) == 1


def test_a_printed_page_has_light_charts_and_open_incidents(watched: Watched, report: str) -> None:
    watched.page.emulate_media(color_scheme="dark")
    page = watched.open(report)
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator("details.incident[open]").count() == 3
    assert page.evaluate("document.documentElement.dataset.theme") == "light"
    widths = page.eval_on_selector_all("figure:not([hidden]) .plot > svg", "all => all.map(one => one.clientWidth)")
    assert set(widths) == {680}
    page.emulate_media(media="print")
    watched.keep_picture("report-print", full_page=True)
    page.emulate_media(media="screen")
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.locator("details.incident[open]").count() == 0
    assert page.pdf()[:4] == b"%PDF"


def test_runs_are_compared_in_one_chart_and_can_be_hidden_by_a_checkbox(watched: Watched, tmp_path: Path) -> None:
    write_run(tmp_path / "faulty")
    write_run(tmp_path / "calm", 400, calm=True)
    write_report([tmp_path / "faulty", tmp_path / "calm"], tmp_path / "two.html")
    page = watched.open((tmp_path / "two.html").as_uri())
    assert read_legend(page, "compare_loss") == ["faulty", "calm"]
    assert page.locator("[data-chart='compare_loss'] path.line").count() == 2
    watched.keep_picture("comparison")
    page.get_by_label("Show faulty in the charts").uncheck()
    assert page.locator("[data-chart='compare_loss'] path.line").count() == 1
    page.get_by_role("button", name="steps", exact=True).first.click()
    assert page.locator("table.compared tbody th").all_inner_texts()[0].strip() == "calm"  # 400 steps, then 600
    page.get_by_label("Find a run").fill("fau")
    assert page.locator("table.compared tbody tr:visible").count() == 1
    assert watched.complaints == []


@pytest.mark.parametrize("kind", ["empty", "torn", "only incidents"])
def test_a_run_with_little_data_is_shown_without_errors(watched: Watched, tmp_path: Path, kind: str) -> None:
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
        "only incidents": "3,000 incidents, 1 problem.",
    }
    assert expected[kind] in text
    watched.keep_picture(f"report-{kind.replace(' ', '-')}")
    assert watched.complaints == []


def test_terms_of_the_loss_and_ranks_are_shown_if_present(watched: Watched, tmp_path: Path) -> None:
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
    bring(page, "extra")
    assert read_legend(page, "extra") == ["mse", HOSTILE]
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
    bring(page, "compare_validation")
    assert read_legend(page, "compare_validation") == ["first", "second"]
    page.locator("[data-run='run0'][data-chart='validation']").scroll_into_view_if_needed()
    assert page.locator("[data-run='run0'][data-chart='validation'] .legend .item").all_text_contents() == [
        "training loss",
        "val_loss",
    ]
    watched.keep_picture("validation", full_page=True)
    assert watched.complaints == []


def test_a_million_points_are_drawn_within_a_frame_without_losing_a_spike(watched: Watched, report: str) -> None:
    page = watched.open(report)
    script = """() => {
        const n = 1_000_000, x = new Float64Array(n), y = new Float64Array(n);
        for (let i = 0; i < n; i++) { x[i] = i; y[i] = Math.sin(i / 5e4) + ((i * 7919) % 1000) / 5000; }
        y[654321] = 50;
        const series = Series.make(x, y);
        const whole = Series.pick(series, 0, n, 800), part = Series.pick(series, 600000, 700000, 800);
        const times = [];
        for (let i = 0; i < 60; i++) {
            const start = performance.now();
            Series.pick(series, i * 5000, n - i * 5000, 800);
            times.push(performance.now() - start);
        }
        const near = Series.pick(series, 654000, 654500, 800);
        return { whole: whole.length, part: part.length, near: near.length,
            kept: [whole, part, near].every((one) => one.includes(654321)), median: times.sort((a, b) => a - b)[30] };
    }"""
    found = page.evaluate(script)
    assert found["kept"]
    assert max(found["whole"], found["part"]) <= 4 * 800 + 4
    assert found["near"] == 502


def test_a_spike_is_drawn_at_any_position_of_the_visible_part(watched: Watched, report: str) -> None:
    page = watched.open(report)
    script = """() => {
        const n = 4000, from = 101, to = 3903, lost = [], x = Float64Array.from({ length: n }, (_, i) => i);
        for (let spike = from; spike <= to; spike++) {
            const y = new Float64Array(n);
            y[spike] = 50;
            y[to + 3] = 99;  // beyond the part, in the block of its end
            const picked = Series.pick(Series.make(x, y), from, to, 50);
            const isInOrder = picked.every((at, i) => i === 0 || picked[i - 1] < at);
            if (!picked.includes(spike) || !isInOrder || picked.length > 4 * 50 + 4) lost.push(spike);
        }
        return lost;
    }"""
    assert page.evaluate(script) == []


def test_a_few_bad_steps_are_marks_in_a_map_and_do_not_cover_it(watched: Watched, tmp_path: Path) -> None:
    directory = open_directory(tmp_path / "run")
    for step in range(400):
        directory.write_step(make_step(step))
        if step % 50 == 0:
            directory.write_layers(step, make_gradients(step))
        if step in (101, 205, 303):  # each is recorded separately, and the next record is 49 steps later
            directory.write_layers(step, make_gradients(step, bad=NAMES[4]))
    directory.close()
    write_report([tmp_path / "run"], tmp_path / "report.html")
    page = watched.open((tmp_path / "report.html").as_uri())
    bring(page, "layers")
    share = page.evaluate(
        """async () => {
        const image = new Image();
        image.src = document.querySelector("[data-chart='layers'] image").getAttribute("href");
        await image.decode();
        const canvas = document.createElement("canvas");
        canvas.width = image.width; canvas.height = image.height;
        const context = canvas.getContext("2d");
        context.drawImage(image, 0, 0);
        const row = Math.floor(canvas.height / 14 * 4.5);
        const { data } = context.getImageData(0, row, canvas.width, 1);
        let purple = 0, empty = 0;
        for (let i = 0; i < data.length; i += 4) {
            purple += data[i] === 0x8b && data[i + 1] === 0x2f && data[i + 2] === 0xc9;
            empty += data[i + 3] === 0;
        }
        return [purple / canvas.width, empty / canvas.width];
    }"""
    )
    assert 0.003 < share[0] < 0.05  # three steps out of 400
    assert share[1] == 0


def test_lines_are_drawn_over_the_grid(watched: Watched, report: str) -> None:
    page = watched.open(report)
    order = page.evaluate(
        """() => [...document.querySelectorAll("[data-chart='loss'] .plot .grid, [data-chart='loss'] .plot path.line")]
            .map((one) => one.getAttribute("class"))"""
    )
    assert order.index("line") > max(i for i, name in enumerate(order) if name == "grid")


def test_the_legend_of_marks_appears_only_with_marks(watched: Watched, tmp_path: Path) -> None:
    write_run(tmp_path / "calm", 80, calm=True)
    write_report([tmp_path / "calm"], tmp_path / "calm.html")
    page = watched.open((tmp_path / "calm.html").as_uri())
    assert not page.locator("[data-chart='loss'] figcaption > span").is_visible()
    write_run(tmp_path / "faulty")
    write_report([tmp_path / "faulty"], tmp_path / "faulty.html")
    page = watched.open((tmp_path / "faulty.html").as_uri())
    assert "mark" in page.locator("[data-chart='loss'] figcaption > span").inner_text()


def test_the_names_of_compared_runs_stay_in_one_line(watched: Watched, tmp_path: Path) -> None:
    for name in ("rate-0.001-cosine", "rate-0.003-cosine"):
        write_run(tmp_path / name, 120)
        (tmp_path / name / "metrics.jsonl").write_text('{"step": 40, "val_loss": 0.00123}\n')
    write_report([tmp_path], tmp_path / "report.html")
    watched.page.set_viewport_size({"width": 1400, "height": 900})
    page = watched.open((tmp_path / "report.html").as_uri())
    heights = page.eval_on_selector_all(
        "table.compared tbody th, table.compared tbody td", "all => all.map(one => one.getBoundingClientRect().height)"
    )
    assert max(heights) < 45


def test_distant_learning_rates_are_compared_on_a_logarithmic_scale(watched: Watched, tmp_path: Path) -> None:
    for rate in (1e-3, 1e-1):
        directory = open_directory(tmp_path / f"{rate:g}")
        for step in range(40):
            directory.write_step(make_step(step, learning_rates=(rate,)))
        directory.close()
    write_report([tmp_path], tmp_path / "report.html")
    page = watched.open((tmp_path / "report.html").as_uri())
    bring(page, "compare_rate")
    assert page.evaluate("document.querySelector(\"[data-chart='compare_rate'] .plot\").state.spec.log")
