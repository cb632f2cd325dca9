"""Tables in a real browser: they open and close, run nothing, and can be read on light and on dark pages."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import hookline as hl
from tests.support.models import GPT

PICTURE = Path(__file__).parent.parent.parent / "docs" / "images" / "notebook.png"
SWITCHES = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update")
COLOURS = (("#ffffff", "#1b1b1b"), ("#111418", "#dddddd"))


@pytest.fixture(scope="module")
def page() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("needs chromium")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=[*SWITCHES, "--disable-sync"])
        yield browser.new_page(viewport={"width": 1240, "height": 410})
        browser.close()


@pytest.fixture(scope="module")
def table() -> str:
    torch.manual_seed(0)
    model = GPT(width=32, depth=12)
    with hl.capture(model, "**", "h.*.mlp.1:input") as acts:
        model(torch.randn(8, 20, 32))
    return acts._repr_html_()


def test_modules_open_and_close_by_a_click(page: Any, table: str) -> None:
    page.set_content(table)
    row = page.get_by_text("h.5.mlp.2")
    assert not row.is_visible()
    for name in ("h.5 ", "h.5.mlp"):
        page.locator("summary", has_text=name).first.click()
    assert row.is_visible()
    page.locator("summary").first.click()
    assert not row.is_visible()


def test_a_script_in_a_name_is_shown_and_not_run(page: Any) -> None:
    said: list[str] = []
    page.once("dialog", lambda dialog: (said.append(dialog.message), dialog.dismiss()))
    evil = "</details><script>alert(1)</script>"
    page.set_content(hl.Cache({hl.Site(evil): torch.ones(3)})._repr_html_())
    assert evil in page.locator(".r").nth(1).inner_text().replace("\\", "")
    assert not said


def test_a_picture_of_it_on_light_and_dark_is_in_the_documentation(page: Any, table: str) -> None:
    halves = [
        f"<div style='background:{back};color:{text};flex:1;padding:12px'>{table}</div>" for back, text in COLOURS
    ]
    page.set_content(f"<body style='margin:0'><div style='display:flex'>{''.join(halves)}</div>")
    for half in range(2):
        page.locator("body > div > div").nth(half).locator("summary", has_text="h.1 ").first.click()
    made = page.screenshot()
    if os.environ.get("HOOKLINE_IMAGES"):
        PICTURE.write_bytes(made)
    kept = PICTURE.read_bytes()
    assert len(kept) < 100_000
    assert _size(made) == _size(kept)
    assert len(made) == pytest.approx(len(kept), rel=0.3)  # Other fonts change the pixels, but hardly the bytes.


def _size(png: bytes) -> tuple[int, int]:
    return int.from_bytes(png[16:20], "big"), int.from_bytes(png[20:24], "big")
