"""The keyboard: everything can be reached without a mouse, and the focus is visible."""

from __future__ import annotations


def active(window) -> str:
    return window.page.evaluate("document.querySelector('.tree').getAttribute('aria-activedescendant')")


def test_a_whole_walk_without_a_mouse(look, gpt2):
    window = look(gpt2)
    window.press("/")
    assert window.page.evaluate("document.activeElement.id") == "search"
    window.page.keyboard.type("transformer.h.*.attn/softmax")
    assert window.page.text_content(".search-status") == "pattern: 12 sites"
    window.press("ArrowDown")
    assert window.page.evaluate("document.activeElement.id") == "tree"
    window.press("End", "Enter")
    assert window.heading == "transformer.h.11.attn/softmax"
    window.press("k")
    assert window.heading == "transformer.h.10.attn/softmax"
    window.press("j")
    assert window.heading == "transformer.h.11.attn/softmax"
    window.press("d")
    window.wait_for_state(view="difference")
    window.press("d")
    window.wait_for_state(view=None)
    window.press("g")
    assert window.texts(".panels h3") == ["Value"]
    window.press("Escape")
    assert window.heading == ""
    assert window.page.locator(".overview").count() == 1
    window.press("Escape")
    assert window.page.input_value("#search") == ""


def test_the_arrow_keys_open_close_and_walk_the_tree(look, digits):
    window = look(digits)
    window.press("t", "Home", "ArrowDown", "ArrowDown")
    row = window.page.locator(f"#{active(window)}")
    assert row.locator(".name").text_content() == "h"
    assert row.get_attribute("aria-expanded") == "true"
    window.press("ArrowLeft")
    assert window.page.locator(f"#{active(window)}").get_attribute("aria-expanded") == "false"
    assert "norm" not in window.rows
    window.press("ArrowRight", "ArrowRight")
    assert window.page.locator(f"#{active(window)} .name").text_content() == "0"
    window.press("ArrowLeft", "ArrowLeft")
    assert window.page.locator(f"#{active(window)} .name").text_content() == "h"
    window.press("Enter")
    assert window.heading == "h"


def test_a_key_held_down_leaves_the_address_where_the_reader_is(look, gpt2):
    window = look(gpt2, search="transformer.h.**")
    window.press(*["j"] * 30)
    site = window.heading
    window.wait_for_state(site=site)


def test_the_tree_says_what_it_is(look, gpt2):
    window = look(gpt2, site="transformer.h.0")
    row = window.page.locator(".row.chosen")
    assert window.page.get_attribute(".tree", "role") == "tree"
    facts = {name: row.get_attribute(name) for name in ("role", "aria-level", "aria-selected", "aria-expanded")}
    assert facts == {"role": "treeitem", "aria-level": "4", "aria-selected": "true", "aria-expanded": "true"}


def test_tab_reaches_everything_and_the_focus_is_seen(look, digits):
    window = look(digits, site="h.1.conv")
    seen, outlines = set(), set()
    for _ in range(40):
        window.press("Tab")
        kind, style = window.page.evaluate(
            "(() => { const one = document.activeElement; const style = getComputedStyle(one);"
            " return [one.tagName + '.' + (one.id || one.className), style.outlineStyle] })()"
        )
        seen.add(kind.split(" ")[0])
        outlines.add((kind.split(" ")[0], style))
    assert {"INPUT.search", "DIV.tree", "CANVAS.picture", "BUTTON.icon"} <= seen
    assert {kind for kind, style in outlines if style == "none"} <= {"DIV.tree", "BODY."}  # The tree outlines a row.
    window.press("t")
    window.press("ArrowDown")
    assert window.page.eval_on_selector(".row.active", "row => getComputedStyle(row).outlineStyle") == "solid"


def test_numbers_are_read_aloud_as_the_arrow_keys_move(look, digits):
    window = look(digits, site="h.0.conv", view="a")
    window.page.locator(".panels canvas").first.focus()
    window.press("ArrowRight", "ArrowRight")
    spoken = window.page.text_content("[aria-live=polite]")
    assert spoken.startswith("sample 0 · channel 0 · row 0 · column 1, ")


def test_help_lists_the_keys_and_closes(look, gpt2):
    window = look(gpt2)
    window.press("?")
    assert window.page.locator("dialog.help").is_visible()
    assert {"/", "j", "k", "d", "?"} <= {*window.texts("dialog kbd")}
    window.press("Escape")
    window.page.locator("dialog.help").wait_for(state="detached", timeout=5000)


def test_letters_in_the_search_are_letters(look, gpt2):
    window = look(gpt2)
    window.press("/")
    window.page.keyboard.type("jd?")
    assert window.page.input_value("#search") == "jd?"
    assert window.heading == ""
