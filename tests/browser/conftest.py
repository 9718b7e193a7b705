"""A real browser for the tests of report and live page. Without one they are skipped, with what to install.

Screenshots are saved in the folder named by STEADYGRAD_SCREENSHOTS, or in pytest's temporary one.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from watched_page import Watched

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))  # the runs that the other tests of views use

VIEWPORT = {"width": 1280, "height": 900}
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Start Chromium once for all tests."""
    playwright = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install playwright")
    path = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip(f"no browser on this machine (looked for {', '.join(BROWSERS)}): apt-get install chromium")
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def page(browser: Any) -> Any:
    """Return one page for all tests: a new one starts another browser process."""
    context = browser.new_context(viewport=VIEWPORT, color_scheme="light")
    context.set_default_timeout(120_000)
    yield context.new_page()
    context.close()


@pytest.fixture
def watched(page: Any, tmp_path: Path) -> Iterator[Watched]:
    """Return an empty page in light colours, without anything from the previous test."""
    folder = Path(os.environ.get("STEADYGRAD_SCREENSHOTS") or tmp_path / "screenshots")
    folder.mkdir(parents=True, exist_ok=True)
    page.set_viewport_size(VIEWPORT)
    page.emulate_media(media="screen", color_scheme="light")
    watched = Watched(page, folder)
    yield watched
    watched.leave()
