"""Tables: columns line up, numbers stand right, long ones are cut in the middle, HTML is escaped."""

from __future__ import annotations

import pytest

import hookline as hl
from hookline.tables import MOST_ROWS, count, html_table, table
from tests.models import GPT, mlp


def test_columns_line_up_and_numbers_stand_to_the_right() -> None:
    shown = table(("site", "calls", "share"), [("h.0", 1, "0.5"), ("h.10.mlp", 1_000, "-")])
    assert shown.splitlines() == [
        "site      calls  share",
        "────────  ─────  ─────",
        "h.0           1    0.5",
        "h.10.mlp   1000      -",
    ]


def test_a_title_stands_above_and_lines_have_no_trailing_blanks() -> None:
    shown = table(("site", "note"), [("h", "")], title="one site")
    assert shown.splitlines() == ["one site", "site  note", "────  ────", "h"]


def test_numbers_with_thousands_are_numbers_and_text_among_them_is_not() -> None:
    assert table(("", "n", "m"), [("a", "1,000", "1"), ("b", "2", "x")]).splitlines()[-1] == "b      2  x"


def test_a_table_without_rows_is_its_header() -> None:
    assert table(("site", "calls"), []).splitlines() == ["site  calls", "────  ─────"]


@pytest.mark.parametrize("rows", [MOST_ROWS, MOST_ROWS + 1, 1_000])
def test_a_long_table_is_cut_in_the_middle_and_says_by_how_much(rows: int) -> None:
    lines = table(("site",), [(f"h.{number}",) for number in range(rows)]).splitlines()[2:]
    assert lines[0] == "h.0"
    assert lines[-1] == f"h.{rows - 1}"
    shown = [line for line in lines if line.startswith("h.")]
    cut = [line for line in lines if "more" in line]
    assert len(shown) == min(rows, MOST_ROWS)
    assert cut == ([] if rows <= MOST_ROWS else [f"… {rows - MOST_ROWS} more …"])
    if cut:
        assert lines.index(cut[0]) == MOST_ROWS // 2


def test_a_line_break_in_a_cell_does_not_break_the_table() -> None:
    assert len(table(("site", "calls"), [("line\nbreak", 1), ("h", 2)]).splitlines()) == 4


def test_html_is_escaped() -> None:
    shown = html_table(("site",), [("<script>alert(1)</script>",)], title="a & b")
    assert "<script>" not in shown
    assert "&lt;script&gt;" in shown
    assert "<caption>a &amp; b</caption>" in shown


@pytest.mark.parametrize(("number", "text"), [(0, "0 calls"), (1, "1 call"), (2, "2 calls"), (12345, "12,345 calls")])
def test_counts_read_as_english(number: int, text: str) -> None:
    assert count(number, "call") == text


def test_the_same_rows_are_shown_as_text_and_in_a_notebook() -> None:
    model = GPT(depth=1)
    hooks = hl.Hooks(model)
    hooks.edit("h.0.mlp", lambda value: value, name="<mine>")
    for thing, words in (
        (hl.sites(model, "h.0.*"), ["h.0.mlp", "Sequential", "also named"]),
        (hooks, ["h.0.mlp", "edit", "active"]),
        (hl.attached(model), ["h.0.mlp", "edit", "hookline"]),
    ):
        for word in words:
            assert word in repr(thing)
            assert word in thing._repr_html_()
    assert "&lt;mine&gt;" in hooks._repr_html_()
    hooks.remove()


def test_the_root_is_shown_as_empty_quotes() -> None:
    model = mlp()
    assert '\n""  ' in repr(hl.sites(model))
    hooks = hl.Hooks(model)
    hooks.edit("", lambda value: value)
    assert '""' in repr(hooks)
    assert '""' in repr(hl.attached(model))
    hooks.remove()


def test_names_that_are_numbers_stand_to_the_left() -> None:
    assert repr(hl.sites(mlp(), "*")).splitlines()[2].startswith("0 ")
