"""Report and live page checked by axe: no serious finding, in both themes, wide and narrow, open and closed."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import pytest
from view_runs import add_update_ratios, write_run
from watched_page import Watched

from steadygrad.view.render.report import write_report
from steadygrad.view.serve.listen import serve_in_thread

pytest.importorskip("axe_playwright_python", reason="axe judges the pages: pip install axe-playwright-python")


def find_faults(watched: Watched) -> list[str]:
    """Return the serious and critical findings of axe on the current page."""
    watched.page.evaluate(files("axe_playwright_python").joinpath("axe.min.js").read_text(encoding="utf-8"))
    found = watched.page.evaluate("axe.run(document, { resultTypes: ['violations'] })")
    return [
        f"{one['id']}: {node['target']} {node['failureSummary']}"
        for one in found["violations"]
        if one["impact"] in ("serious", "critical")
        for node in one["nodes"]
    ]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1400])
def test_a_report_has_no_serious_accessibility_fault(watched: Watched, tmp_path: Path, scheme: str, width: int) -> None:
    add_update_ratios(write_run(tmp_path / "faulty"))
    write_run(tmp_path / "calm", 100, calm=True)
    write_report([tmp_path / "faulty", tmp_path / "calm"], tmp_path / "report.html")
    watched.page.emulate_media(color_scheme=scheme)
    watched.page.set_viewport_size({"width": width, "height": 900})
    page = watched.open((tmp_path / "report.html").as_uri())
    page.eval_on_selector_all("details", "all => all.forEach(one => { one.open = true; })")
    assert find_faults(watched) == []


@pytest.mark.parametrize("path", ["/", "/runs/faulty", "/compare?run=faulty&run=calm"])
def test_the_live_page_has_no_serious_accessibility_fault(watched: Watched, tmp_path: Path, path: str) -> None:
    pytest.importorskip("uvicorn")
    write_run(tmp_path / "runs" / "faulty", 450)
    write_run(tmp_path / "runs" / "calm", 100, calm=True)
    with serve_in_thread(tmp_path / "runs") as address:
        watched.page.goto(f"{address}{path}")
        watched.wait_for("document.body.dataset.progress === '1'")
        assert find_faults(watched) == []
