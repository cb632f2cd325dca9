"""A browser and pages written by hl.explore. Every page must load without errors and fetch nothing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from filelock import FileLock

from tests.browser import example_pages
from tests.browser.window import Window
from tests.support.needs import needs

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
QUIET = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@pytest.fixture(scope="package")
def browser() -> Iterator[object]:
    """Start a browser for the tests of this folder. Its event loop would disturb the asyncio tests of others."""
    program = os.environ.get("HOOKLINE_BROWSER") or next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None and os.environ.get("CI", "").lower() == "true":
        pytest.fail("no Chromium is installed, but CI must test the explorer page: see .ci/run")
    if program is None:
        pytest.skip("needs Chromium, or the name of a browser in HOOKLINE_BROWSER")
    api = needs("playwright.sync_api")

    with api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=program, args=list(QUIET))
        yield running
        running.close()


@pytest.fixture(scope="package")
def free_windows(browser) -> list[Window]:
    """The windows that no test is using."""
    return []


@pytest.fixture
def look(browser, free_windows) -> Iterator[Callable[..., Window]]:
    """Return a function that opens pages. At the end, check that none logged an error or fetched anything."""
    windows: list[Window] = []

    def open_page(path: os.PathLike[str] | str, **options) -> Window:
        windows.append(free_windows.pop() if free_windows else Window(browser))
        windows[-1].open(Path(path), **options)
        return windows[-1]

    yield open_page
    for window in windows:
        errors, requests = window.leave()
        assert errors == []
        assert requests == [window.address]
        free_windows.append(window)


@pytest.fixture(scope="session")
def pages(tmp_path_factory, worker_id) -> Path:
    """A folder shared by all workers of a run."""
    base = tmp_path_factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / "explorer-pages"
    folder.mkdir(exist_ok=True)
    return folder


def once(make: Callable[[Path], object], path: Path) -> Path:
    """Make a page unless another worker has."""
    with FileLock(f"{path}.lock"):
        if not path.exists():
            make(path.with_suffix(".new"))
            path.with_suffix(".new").rename(path)
    return path


@pytest.fixture(scope="session")
def gpt2(pages) -> Path:
    return once(example_pages.gpt2, pages / "gpt2.html")


@pytest.fixture(scope="session")
def digits(pages) -> Path:
    return once(example_pages.digits, pages / "digits.html")
