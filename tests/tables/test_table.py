"""Tables as text: columns line up, numbers are right-aligned, and a long table is cut where it loses least."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hookline as hl
from hookline._tables import Table, Tabular, count
from hookline._tables.table import ENOUGH_ROWS, MOST_ROWS
from hookline._tables.terminal import bar, clean, cut, cut_name, pad, width, wrap
from tests.support.models import mlp


def table(header: tuple[str, ...], rows: list[tuple[object, ...]], title: str = "") -> str:
    return str(Table(header, rows, title))


def unlike(number: int) -> str:
    """Return a name in which letters stand for the digits of a number."""
    return f"h.{''.join('abcdefghij'[int(digit)] for digit in str(number))}"


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


def test_a_table_without_rows_is_its_header_or_what_is_said_instead() -> None:
    assert table(("site", "calls"), []).splitlines() == ["site  calls", "────  ─────"]
    assert str(Table(("site",), [], empty="no hooks")) == "no hooks"


@pytest.mark.parametrize("rows", [MOST_ROWS, MOST_ROWS + 1, 1_000])
def test_a_long_table_is_cut_in_the_middle_and_says_by_how_much(rows: int) -> None:
    names = [(unlike(number),) for number in range(rows)]
    lines = table(("site",), names).splitlines()[2:]
    assert lines[0] == unlike(0)
    assert lines[-1] == unlike(rows - 1)
    shown = [line for line in lines if line.startswith("h.")]
    more = [line for line in lines if "more" in line]
    assert len(shown) == min(rows, MOST_ROWS)
    assert more == ([] if rows <= MOST_ROWS else [f"… {rows - MOST_ROWS} more …"])
    if more:
        assert lines.index(more[0]) == MOST_ROWS // 2
    assert Table(("site",), names).text(whole=True).splitlines()[2:] == [name for (name,) in names]


def test_of_too_many_rows_that_all_count_the_heaviest_are_shown_in_their_order() -> None:
    rows = [(f"h.{number}", number % 100) for number in range(200)]
    shown = Table(("site", "change"), rows, weights=[change for _, change in rows]).text()
    heaviest = [rows[number] for number in (*range(85, 100), *range(185, 200))]
    assert [line.split() for line in shown.splitlines()[2:-1]] == [[name, str(change)] for name, change in heaviest]
    assert shown.endswith('the 30 of 200 rows that matter most; f"{x:all}" has each')


def test_a_line_break_in_a_cell_does_not_break_the_table() -> None:
    assert len(table(("site", "calls"), [("line\nbreak", 1), ("h", 2)]).splitlines()) == 4


@pytest.mark.parametrize(("number", "text"), [(0, "0 calls"), (1, "1 call"), (2, "2 calls"), (12345, "12,345 calls")])
def test_counts_read_as_english(number: int, text: str) -> None:
    assert count(number, "call") == text


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


ROWS = [
    ("model.decoder.layers.0.self_attn.k_proj", "MultiheadAttention", 1, "", "12"),
    ("model.decoder.layers.0.self_attn.v_proj", "Linear", 1, "never called: it reads its weight directly", "7"),
    ("head", "Linear", 1, "", "3"),
]
HEADER = ("site", "module", "calls", "hazards", "parameters")


@pytest.mark.parametrize("limit", [1, 2, 7, 20, 24, 40, 60, 80, 100, 200])
def test_a_table_is_never_wider_than_the_terminal(limit: int) -> None:
    lines = Table(HEADER, ROWS, "a title that is longer than some terminals are").text(limit).splitlines()
    assert max(map(width, lines)) <= limit
    names = ["".join(chr(97 + ord(digit) - 48) for digit in str(number)) for number in range(600)]
    long = Table(("site", "calls"), [(name, "1") for name in names]).text(limit).splitlines()
    assert len(long) < 600
    assert max(map(width, long)) <= limit


@pytest.mark.parametrize("limit", [40, 60, 80, 100])
def test_names_stay_apart_and_keep_their_end(limit: int) -> None:
    shown = Table(HEADER, ROWS).text(limit)
    assert "k_proj" in shown
    assert "v_proj" in shown
    assert "\nhead" in shown


def test_names_that_would_be_the_same_when_cut_are_wrapped() -> None:
    rows = [(f"model.{name}.layers.{'x' * 15}.mlp",) for name in ("vision", "text")]
    shown = Table(("site",), rows).text(24).splitlines()[2:]
    assert "".join(shown) == "".join(name for (name,) in rows)


def test_texts_are_wrapped_and_nothing_of_them_is_lost() -> None:
    shown = Table(HEADER, ROWS, spare=("parameters",)).text(70)
    words = [word for line in shown.splitlines() for word in line.split()]
    assert {"never", "called:", "it", "reads", "its", "weight", "directly"} <= set(words)


def test_a_column_that_says_one_thing_goes_into_a_line_below() -> None:
    shown = Table(HEADER, ROWS).text(60)
    assert "calls" not in shown.splitlines()[0]
    assert "in every row: calls 1" in shown


def test_what_has_no_room_is_named_in_the_order_of_the_columns() -> None:
    rows = [(f"h.{name}", name * 12, name * 13, name * 14) for name in "ab"]
    shown = Table(("site", "one", "two", "three"), rows, spare=("two",)).text(30)
    assert shown.splitlines()[0].split() == ["site", "one"]
    assert shown.splitlines()[-1] == "too narrow for: two, three"


def test_bars_are_the_first_to_go_and_nobody_is_told() -> None:
    shown = Table(("site", "norm", ""), [("h.0", 3, "█" * 30), ("h.1", 1, "█" * 10)]).text(30)
    assert shown.splitlines() == ["site  norm", "────  ────", "h.0      3", "h.1      1"]


def test_wide_characters_line_up() -> None:
    lines = table(("site", "calls"), [("層.注意", 1), ("h.🔥", 22), ("e\u0301.é", 3)]).splitlines()
    assert {width(line) for line in lines} == {14}
    assert [width(text) for text in ("層", "🔥", "e\u0301", "👩‍💻", "")] == [2, 2, 1, 4, 0]


def test_what_can_not_be_seen_is_written_out() -> None:
    assert clean("a\x1b[31mb\x07\t") == r"a\x1b[31mb\x07\t"
    assert clean("two\r\nlines\u2028three") == "two lines three"
    assert clean("\u202eright to left") == r"\u202eright to left"
    assert clean("\ud800") == r"\ud800"
    assert clean("\x9b31m") == r"\x9b31m"
    assert clean("層 👩‍💻") == "層 👩‍💻"


@given(st.text(), st.integers(1, 30))
def test_any_text_is_cut_wrapped_and_padded_to_any_width(text: str, columns: int) -> None:
    seen = clean(text)
    assert seen.encode() is not None
    assert clean(seen) == seen
    for short in (cut(seen, columns), cut_name(seen, columns)):
        assert width(short) <= columns
    lines = wrap(seen, columns)
    assert all(width(line) <= max(columns, 2) for line in lines)
    assert "".join("".join(lines).split()) == "".join(seen.split())
    assert width(pad(cut(seen, columns), columns)) == columns


@given(st.text(max_size=40), st.integers(2, 40))
def test_a_cut_name_keeps_its_end(text: str, columns: int) -> None:
    seen = clean(text)
    short = cut_name(seen, columns)
    assert short == seen or seen.endswith(short.rpartition("…")[2])


def test_a_bar_is_as_long_as_the_share() -> None:
    assert bar(0.0, 30) == ""
    assert len(bar(0.5, 30)) == 15
    assert bar(1.0, 30) == bar(7.0, 30) == "█" * 30
    assert bar(float("nan"), 30) == ""


def test_short_tables_keep_their_rows_whatever_they_are() -> None:
    rows = [(f"h.{number}", 1) for number in range(ENOUGH_ROWS)]
    assert len(table(("site", "calls"), rows).splitlines()) == ENOUGH_ROWS + 2
    assert len(table(("site", "calls"), [*rows, (f"h.{ENOUGH_ROWS}", 1)]).splitlines()) == 4


def test_what_is_tabular_shows_itself_to_rich() -> None:
    console = pytest.importorskip("rich.console")

    class One(Tabular):
        def _table(self) -> Table:
            return Table(("site", "hazards"), [("h.0.mlp", "[bold]never called[/bold]")])

    with (drawing := console.Console(width=40)).capture() as captured:
        drawing.print(One())
    assert captured.get() == f"{One()}\n"
    with (drawing := console.Console(width=20, color_system="standard", force_terminal=True)).capture() as captured:
        drawing.print(One()._table())
    assert "\x1b[36mh.0.mlp" in captured.get()


def test_every_row_of_a_long_table_takes_time_in_proportion():
    rows = [(f"layers.{number}", number) for number in range(4000)]
    began = time.process_time()
    assert len(Table(("site", "calls"), rows).text(whole=True).splitlines()) == 4002
    assert time.process_time() - began < 2  # It took 10 s when each cell read its whole column.
