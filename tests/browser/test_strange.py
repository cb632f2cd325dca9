"""Names that look like HTML, data that is damaged, and very large models."""

from __future__ import annotations

import json
import time

import pytest
import torch
from torch import nn

import hookline as hl

HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "</script><h1>",
    "javascript:alert(1)",
    "{{7*7}}",
    "<b>bold</b>",
]


def test_hostile_names_are_shown_and_not_run(look, tmp_path):
    model = nn.ModuleDict({name.replace(".", ""): nn.ReLU() for name in HOSTILE})
    model.forward = lambda x: [one(x) for one in model.values()][-1]
    acts = {hl.Site(name.replace(".", "")): torch.randn(2, 3, 4) for name in HOSTILE}
    page = hl.explore(
        {str(site): value for site, value in acts.items()},
        to=tmp_path / "hostile.html",
        model=model,
        title=HOSTILE[0],
        names=[HOSTILE[1], HOSTILE[0]],
        against={str(site): value + 1 for site, value in acts.items()},
        tokens=[HOSTILE[:3], HOSTILE[3:]],
        measured={HOSTILE[1]: {str(site): 1.0 for site in acts}},
    )
    window = look(page)
    assert window.page.text_content("h1") == HOSTILE[0]
    assert {*HOSTILE} <= {*window.rows}
    for site in acts:
        window.search(str(site))
        assert window.page.text_content(".search-status") == "pattern: 1 site"
        window.press("Enter")
        assert window.heading == site.path
        window.page.locator(".panels canvas").first.focus()
        window.press("ArrowDown")
        assert HOSTILE[1] in window.page.text_content(".tip")
        assert window.page.locator("main img, main h1, main b, #page script").count() == 0
        window.press("Escape")
        assert window.page.locator("main img, main h1, main b, #page script").count() == 0


def replaced(page, tmp_path, change):
    """Return a page whose data were passed through `change`."""
    text = page.read_text("utf-8")
    head, mark, rest = text.partition('id="hookline-data">')
    data, end, tail = rest.partition("</script>")
    other = tmp_path / "other.html"
    other.write_text(head + mark + change(data) + end + tail, "utf-8")
    return other


def without(key):
    def change(data):
        found = json.loads(data)
        del found[key]
        return json.dumps(found)

    return change


def version(data):
    return json.dumps({**json.loads(data), "format": ["hookline page", 99]})


DAMAGE = {
    "cut off": (lambda data: data[: len(data) // 2], "can't be read"),
    "empty": (lambda data: "", "holds no data"),
    "the form": (lambda data: "/*HOOKLINE-DATA*/", "holds no data"),
    "something else": (lambda data: "[1, 2]", "is not a hookline page"),
    "of the future": (version, "has format 99, and this page shows format 1"),
    "without sites": (without("sites"), "lacks its sites"),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_damaged_data_is_said_and_not_a_blank_page(look, digits, tmp_path, how):
    change, message = DAMAGE[how]
    window = look(replaced(digits, tmp_path, change))
    assert message in window.page.text_content(".failure p")
    assert "hl.explore(...)" in window.page.text_content(".failure p")


def test_a_damaged_picture_is_said_at_its_site_and_the_rest_works(look, digits, tmp_path):
    def spoil(data):
        found = json.loads(data)
        site = next(one for one in found["sites"] if one["name"] == "h.1.conv")
        site["picture"][0]["codes"] = site["picture"][0]["codes"][:40]
        return json.dumps(found)

    window = look(replaced(digits, tmp_path, spoil), site="h.1.conv")
    assert "This picture is damaged" in window.page.text_content(".failure p")
    window.press("j")
    assert window.page.locator(".panels canvas").count() > 0


def test_an_address_that_names_nothing_says_so(look, digits):
    window = look(digits, site="h.99")
    assert window.page.text_content(".failure p").startswith("There is no “h.99” on this page.")
    window.press("Escape")
    assert window.page.locator(".overview").count() == 1


def test_one_run_without_gradients_tokens_or_a_model_is_a_page_too(look, tmp_path):
    page = hl.explore({"h.0": torch.randn(2, 3), "note": "no tensor"}, to=tmp_path / "small.html")
    window = look(page, site="h.0")
    assert window.page.locator(".switches .segments").count() == 0
    assert window.page.locator(".panels canvas").count() == 1
    assert "“" not in look(page).page.text_content(".calm")


def test_three_thousand_modules_stay_quick(look, tmp_path):
    values = {f"h.{layer}.part.{part}": torch.randn(2, 4) for layer in range(100) for part in range(29)}
    page = hl.explore(values, to=tmp_path / "large.html", most="9 MB")
    window = look(page)
    assert window.ready < 2000
    assert window.page.locator(".row").count() < 150
    window.page.click("text=open all")
    assert window.page.locator(".row").count() < 150
    started = time.perf_counter()
    for text in ("h.*.part.3", "h.1*.**", "**", "part.2"):
        window.search(text)
    window.press("ArrowDown", "End", "Enter")
    assert window.page.locator(".row.chosen").count() == 1
    assert time.perf_counter() - started < 5
