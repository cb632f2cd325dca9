"""The whole page: it is ready quickly, fits the window, and keeps its state in the address."""

from __future__ import annotations

import pytest

SOFTMAX = "transformer.h.3.attn/softmax"


def test_the_page_of_a_twelve_layer_model_is_ready_within_two_seconds(look, gpt2):
    assert gpt2.stat().st_size < 10e6
    times = [look(gpt2).ready for _ in range(3)]
    assert 0 < min(times) < 2000


def test_the_overview_shows_titles_totals_runs_and_charts(look, gpt2):
    window = look(gpt2)
    assert window.page.text_content("h1") == "GPT-2, 12 layers"
    assert window.page.title() == "GPT-2, 12 layers · hookline"
    assert window.texts(".top .runs > span") == ["clean", "corrupted"]
    assert "164 modules" in window.page.text_content(".totals")
    assert {"Over depth", "Gradient flow"} <= {*window.texts("main h3")}
    assert any(title.startswith("Tokens × layers") for title in window.texts("main h3"))
    assert window.page.locator(".line-chart path.line").count() == 3 + 4


def test_warnings_come_first_and_lead_to_their_site(look, digits):
    window = look(digits)
    first = window.page.locator("main article > *").first
    assert "warning" in first.locator("h3").text_content()
    window.page.locator(".warnings .link", has_text="h.").first.click()
    assert window.heading.startswith("h.")
    assert window.page.locator(".warnings.here").count() == 1


def test_what_was_measured_is_drawn_as_bars_that_lead_to_their_site(look, digits):
    window = look(digits)
    assert "accuracy with one layer zeroed" in window.texts("main h3")
    assert window.texts(".bars .bar-name") == ["stem", "h.0.conv", "h.1.conv", "h.2.conv", "h.3.conv", "head"]
    window.page.locator(".bars .link", has_text="h.2.conv").click()
    assert window.heading == "h.2.conv"


def test_a_click_in_the_tree_shows_a_site(look, gpt2):
    window = look(gpt2)
    window.row("transformer.h.2").locator(".twist").click()
    window.row("transformer.h.2.mlp").click()
    assert window.heading == "transformer.h.2.mlp"
    assert window.page.locator(".row.chosen .name").text_content() == "mlp"
    assert window.texts(".panels h3") == ["Value", "Gradient"]
    assert "2 × 16 × 192" in window.page.text_content(".facts")


def test_the_address_keeps_what_is_looked_at_and_back_goes_back(look, gpt2):
    window = look(gpt2)
    window.row("transformer.wte").click()
    window.row("transformer.h.0").click()
    window.page.click(".switches >> text=difference")
    window.wait_for_state(site="transformer.h.0", view="difference")
    again = look(gpt2, **dict(part.split("=") for part in window.hash[1:].split("&")))
    assert again.heading == "transformer.h.0"
    assert again.page.locator('.switches [aria-pressed="true"]').text_content() == "difference"
    window.page.go_back()
    window.wait_for_state(view=None)
    assert window.heading == "transformer.h.0"
    window.page.go_back()
    window.page.wait_for_selector(".crumb.last:text('wte')")
    window.page.go_back()
    window.page.wait_for_selector(".overview")
    window.page.go_forward()
    window.page.wait_for_selector(".crumb.last:text('wte')")


@pytest.mark.parametrize(("view", "panels"), [("all", 3), ("a", 1), ("b", 1), ("difference", 1)])
def test_runs_are_shown_alone_beside_each_other_and_as_a_difference(look, gpt2, view, panels):
    window = look(gpt2, site=SOFTMAX, view=view)
    names = {
        "all": ["clean", "corrupted", "difference"],
        "a": ["clean"],
        "b": ["corrupted"],
        "difference": ["difference"],
    }
    assert window.texts(".panels >> nth=0 >> h4") == names[view]
    assert window.page.locator(".panels").first.locator("canvas").count() == panels
    assert window.texts(".statistics >> nth=0 >> thead th")[1:] == ["clean", "corrupted", "difference"]


def test_gradients_stand_beside_values_or_not(look, gpt2):
    window = look(gpt2, site="transformer.h.1.mlp")
    assert window.texts(".panels h3") == ["Value", "Gradient"]
    assert window.page.locator(".statistics").count() == 2
    window.page.click("text=gradient beside the value")
    assert window.texts(".panels h3") == ["Value"]
    assert look(gpt2, site="transformer.h.1.mlp:grad_output").heading == "transformer.h.1.mlp"


def test_rows_stand_in_the_order_of_the_tree_or_of_the_calls(look, digits):
    window = look(digits)
    assert window.rows[:5] == ["model", "stem", "h", "0", "norm"]
    window.page.click("text=call order")
    assert window.rows[:5] == ["model", "stem", "h", "h.0", "h.0.norm"]
    window.wait_for_state(order="calls")


def test_everything_can_be_opened_and_closed(look, gpt2):
    window = look(gpt2)
    window.page.click("text=close all")
    assert window.rows[0] == "model"
    few = len(window.rows)
    window.page.click("text=open all")
    assert "ln_1" in window.rows
    assert len(window.rows) > few


@pytest.mark.parametrize("width", [900, 1200, 2500])
def test_the_page_fits_windows_from_narrow_to_wide(look, gpt2, width):
    window = look(gpt2, size=(width, 800))
    for state in ("", f"site={SOFTMAX}", "site=transformer.h.3.mlp"):
        window.page.evaluate("hash => { location.hash = hash }", state)
        window.page.wait_for_function(
            "text => !text || document.querySelector('h2')?.textContent === text", arg=state[5:]
        )
        assert window.page.evaluate("document.documentElement.scrollWidth") <= width
        assert window.page.evaluate(
            "document.querySelector('main').scrollWidth <= document.querySelector('main').clientWidth"
        )
        assert all(box["x"] + box["width"] <= width for box in window.boxes("main canvas"))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_is_as_light_or_dark_as_the_system_until_it_is_switched(look, gpt2, scheme):
    def lightness(window):
        colour = window.page.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(map(int, colour.removeprefix("rgb(").removesuffix(")").split(","))) / 765

    window = look(gpt2, scheme=scheme)
    assert (lightness(window) > 0.9) if scheme == "light" else (lightness(window) < 0.1)
    window.page.click("[aria-label='Light or dark']")
    assert (lightness(window) < 0.1) if scheme == "light" else (lightness(window) > 0.9)
    window.page.reload()
    window.requests.clear()
    window.requests.append(window.address)
    assert (lightness(window) < 0.1) if scheme == "light" else (lightness(window) > 0.9)
