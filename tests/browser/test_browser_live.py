"""The live page in a real browser: it paints at once, follows a run, and keeps open what the reader opened."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from view_runs import make_incident, make_step, open_directory, write_run
from watched_page import Watched

from steadygrad.record.encode import to_json
from steadygrad.record.run_folder import RunFolder

pytest.importorskip("uvicorn", reason="the live page needs uvicorn: pip install 'steadygrad[view]'")

from steadygrad.view.serve.listen import PageServer, serve_in_thread

PLOT = "document.querySelector(\"[data-chart='loss'] .plot\")"
LAST = f"Math.max(...({PLOT}.state?.spec.lines[0].series.x.slice(-1) ?? [-1]))"


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    write_run(tmp_path / "runs" / "faulty")
    write_run(tmp_path / "runs" / "calm", 80, calm=True)
    with serve_in_thread(tmp_path / "runs") as address:
        yield address


def test_the_list_leads_to_a_run_and_back(watched: Watched, address: str) -> None:
    page = watched.page
    page.goto(address)
    assert sorted(page.locator("tbody a").all_inner_texts()) == ["calm", "faulty"]
    watched.keep_picture("live-list")
    page.click("text=faulty")
    page.wait_for_selector("[data-chart='loss'] .plot > svg")
    assert "Survived." in page.inner_text("[data-part='headline']")
    page.click("text=all runs")
    page.wait_for_selector("tbody a")
    assert watched.complaints == []


def test_a_checkbox_in_the_list_stays_the_same_while_the_runs_grow(
    watched: Watched, address: str, tmp_path: Path
) -> None:
    page = watched.page
    page.goto(address)
    box = page.get_by_label("Compare calm").element_handle()
    page.get_by_label("Compare faulty").focus()
    directory = open_directory(tmp_path / "runs" / "calm")
    for step in range(80, 140):
        directory.write_step(make_step(step))
    directory.close()
    page.wait_for_selector("td:text-is('139')")
    assert box.evaluate("one => one.isConnected")  # a click that started before the list changed still counts
    assert page.evaluate("document.activeElement.value") == "faulty"
    write_run(tmp_path / "runs" / "new", 20, calm=True)
    page.wait_for_selector("tbody a:text-is('new')")
    assert page.locator("tbody tr").count() == 3
    assert watched.complaints == []


def test_new_steps_and_incidents_appear_and_what_is_open_stays_open(
    watched: Watched, address: str, tmp_path: Path
) -> None:
    page = watched.open(f"{address}/runs/faulty")
    watched.wait_for(f"{LAST} === 599")
    assert page.locator("[data-chart='loss'] .legend .item").count() == 5
    page.locator("details.incident summary").first.click()

    directory = open_directory(tmp_path / "runs" / "faulty")
    for step in range(600, 700):
        directory.write_step(make_step(step))
    directory.write_incident(make_incident(699, kind="a_new_kind", message="a new message"))
    directory.close()

    watched.wait_for(f"{LAST} === 699")
    page.wait_for_selector("details.incident .what:text('a new message')")
    assert "700" in page.inner_text("[data-part='tiles']")
    assert page.locator("details.incident[open]").count() == 1
    watched.keep_picture("live-run", full_page=True)
    assert watched.complaints == []
    assert {urlsplit(url).netloc for url in watched.requests} == {urlsplit(address).netloc}


def test_a_zoom_survives_new_steps(watched: Watched, address: str, tmp_path: Path) -> None:
    page = watched.open(f"{address}/runs/calm")
    watched.wait_for(f"{LAST} === 79")
    page.locator("[data-chart='loss'] .plot").focus()
    page.keyboard.press("+")
    zoomed = f"{PLOT}.state.from"
    watched.wait_for(f"{zoomed} > 5")
    before = page.evaluate(zoomed)
    directory = open_directory(tmp_path / "runs" / "calm")
    for step in range(80, 140):
        directory.write_step(make_step(step))
    directory.close()
    watched.wait_for(f"{LAST} === 139")
    assert page.evaluate(zoomed) == before


def test_selected_runs_are_compared_and_followed(watched: Watched, address: str, tmp_path: Path) -> None:
    page = watched.page
    page.goto(address)
    page.get_by_label("Find a run").fill("cal")
    assert page.locator("tbody tr:visible").count() == 1
    page.get_by_label("Find a run").fill("")
    for name in ("calm", "faulty"):
        page.get_by_label(f"Compare {name}").check()
    watched.keep_picture("live-list-ticked")
    page.get_by_role("button", name="Compare the ticked runs").click()
    page.wait_for_selector("[data-chart='compare_loss'] .plot > svg")
    assert sorted(page.locator("[data-chart='compare_loss'] .legend .item").all_text_contents()) == ["calm", "faulty"]
    directory = open_directory(tmp_path / "runs" / "calm")
    for step in range(80, 900):
        directory.write_step(make_step(step))
    directory.close()
    watched.wait_for("document.querySelector(\"[data-chart='compare_loss'] .plot\").state.to > 890")
    page.get_by_label("Show calm in the charts").uncheck()
    assert page.locator("[data-chart='compare_loss'] .legend .item").count() == 0  # a single line needs no legend
    watched.keep_picture("live-comparison", full_page=True)
    assert watched.complaints == []


def test_a_killed_run_is_shown_as_such_without_a_new_line(watched: Watched, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "job"
    folder = RunFolder(run)
    directory = open_directory(run)
    directory.write_step(make_step(0))
    directory.flush()
    with serve_in_thread(tmp_path / "runs") as address:
        page = watched.open(f"{address}/runs/job")
        assert "Running." in page.inner_text("[data-part='headline']")
        lock = json.loads((run / "run.lock").read_text())
        (run / "run.lock").write_text(json.dumps({**lock, "process": 2**22 + 5}))  # as if that process had held it
        watched.wait_for("document.querySelector(\"[data-part='headline']\").textContent.includes('Killed.')")
    directory.close()
    folder.release()


def test_a_long_run_is_read_to_its_end_while_the_page_is_open(watched: Watched, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "long"
    run.mkdir(parents=True)
    line = to_json(make_step(0)).removeprefix('{"step":0,')
    (run / "steps.jsonl").write_text("".join(f'{{"step":{step},{line}\n' for step in range(150_000)))
    with serve_in_thread(tmp_path / "runs") as address:
        watched.open(f"{address}/runs/long")
        watched.wait_for("document.body.dataset.progress === '1'")
        watched.wait_for(f"{LAST} > 149000")
    assert watched.complaints == []


def test_with_a_token_the_link_is_sufficient(watched: Watched, tmp_path: Path) -> None:
    import threading

    write_run(tmp_path / "runs" / "calm", 30, calm=True)
    server = PageServer(tmp_path / "runs", port=0, token="a-token")
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        watched.page.goto(server.link)
        assert "token" not in watched.page.url
        watched.page.click("text=calm")
        watched.page.wait_for_selector("[data-chart='loss'] .plot > svg")
    finally:
        server.stop()
        thread.join(timeout=10)
