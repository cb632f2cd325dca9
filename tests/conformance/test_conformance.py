"""What all results share: they print, show themselves in notebooks, are read, compared, copied, saved and drawn."""

from __future__ import annotations

import ast
import html
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import hookline as hl
from hookline._kernel import same_values
from hookline._tables import Tabular
from hookline._tables.terminal import width
from tests.conformance.offers import are_equal, copies, offers, without
from tests.conformance.subjects import (
    BY_NAME,
    COPIES,
    EQUALITY,
    FEATURES,
    FRAME,
    LONG,
    NEEDS,
    NO_MAPPING,
    PARTS,
    PLOT,
    REFUSES_LOAD,
    SAVE,
    SPELLINGS,
    STRANGE,
    STRANGERS,
    SUBJECTS,
    Subject,
    each,
)
from tests.errors.wording import says
from tests.support.quick_python import run_forked

NARROW = 44


def are_alike(subject: Subject, one: Any, other: Any) -> bool:
    """Return True if two results have the same entries, print the same, and have the same parts."""
    parts = [(getattr(one, name), getattr(other, name)) for name in subject.parts]
    return (
        type(one) is type(other)
        and [*map(subject.name_of, one)] == [*map(subject.name_of, other)]
        and f"{one:all}" == f"{other:all}"
        and all(same_values(*pair) for pair in parts)
        and (EQUALITY in subject.lacks or are_equal(one, other))
    )


# The table of subjects


@pytest.mark.parametrize("feature", FEATURES)
@each()
def test_a_result_offers_what_its_entry_says_and_lacks_what_is_marked(subject, result, feature, folder):
    assert offers(feature, subject, result, folder) == (not subject.why_not(feature)), subject.why_not(feature)


def test_the_marks_are_about_features_and_give_a_reason():
    for subject in SUBJECTS:
        assert {*subject.lacks} <= {*FEATURES}
        assert all(subject.lacks.values())
        assert not [name for name in subject.lacks if NEEDS.get(name) in subject.lacks], "this goes without saying"


def test_every_class_that_prints_as_a_table_is_a_subject():
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in Path(hl.__file__).parent.rglob("*.py")]
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    kinds = {one.name for one in classes if "Tabular" in map(ast.unparse, one.bases)}
    assert kinds == {subject.kind.__name__ for subject in SUBJECTS} | {*PARTS}
    assert all(issubclass(subject.kind, Tabular) for subject in SUBJECTS)


# Printing


@each()
def test_it_prints_as_a_table_with_a_line_for_each_entry(subject, result):
    lines = str(result).splitlines()
    header = next(number for number, line in enumerate(lines) if line.startswith("─")) - 1
    assert lines[header].split() == [word for name in subject.header for word in name.split()]
    rows = [row.split() for row in lines[header + 2 :]]
    assert len(rows) == len(result) == len(subject.names)
    for name in subject.names:
        assert sum((name or '""') in row for row in rows) == 1
    assert not [line for line in lines if line != line.rstrip()]


@each()
def test_what_it_prints_is_always_the_same_and_names_no_place_in_memory(subject, result, folder):
    text = repr(result)
    assert text == repr(result) == str(result) == f"{result}" == f"{result:all}"
    anew = subject.again(folder)
    assert text == repr(anew)
    if subject.close is not None:
        subject.close(anew)
    for shown in (text, result._repr_html_()):
        assert not re.search(r"0x[0-9a-f]{4}|object at", shown)


@each()
def test_a_format_that_means_nothing_is_refused(subject, result):
    with pytest.raises(ValueError, match=says("for every row", "all", ">10")):
        f"{result:>10}"


@each()
def test_in_a_terminal_no_line_is_wider_and_long_names_are_cut(subject, result, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(NARROW))
    text = str(result)
    assert max(map(width, text.splitlines())) <= NARROW
    assert LONG not in text
    assert "…" in text
    assert LONG in f"{result:all}"


@each()
def test_a_notebook_shows_the_same_rows_as_escaped_html(subject, result):
    shown = result._repr_html_()
    assert shown == result._repr_html_()
    assert "hookline-table" in shown
    assert "<b>" not in shown
    assert "&lt;b&gt;" in shown
    assert "<script" not in shown
    for word in (*subject.header, *(name.rpartition(".")[2] for name in subject.names)):
        assert html.escape(word) in shown
    rows = str(result).partition("─\n")[2].split()
    assert all(html.escape(word) in shown for word in rows if word != LONG)


# Reading


@each()
def test_it_has_as_many_entries_as_it_yields_each_time_in_one_order(subject, result):
    assert [subject.name_of(one) for one in result] == [*subject.names]
    assert [subject.name_of(one) for one in result] == [*subject.names]
    assert len(result) == len(subject.names)
    assert bool(result)
    assert all(one in result for one in result)


@each()
def test_an_object_that_is_no_name_is_not_among_its_entries(subject, result):
    others = ("haed", "", *STRANGE) if STRANGERS not in subject.lacks else ("haed", "")
    for other in others:
        assert (other in result) == (other in subject.names)


@each(of=Mapping)
def test_a_mapping_agrees_with_itself(subject, result):
    assert [*result.keys()] == [*result] == [*dict(result)] == [*subject.names]
    assert [name for name, _ in result.items()] == [*result]
    assert all(one is result[name] for name, one in result.items())
    assert all(one is result[name] for name, one in zip(result, result.values(), strict=True))
    assert result.get("haed", "nothing") == "nothing"
    assert result.get("haed") is None


@each(of=Sequence)
def test_a_sequence_is_read_by_numbers_and_slices(subject, result):
    assert [result[number] for number in range(len(result))] == [*result]
    assert result[-1] == [*result][-1]
    assert result[1:] == [*result][1:]
    assert [*reversed(result)] == [*result][::-1]
    assert (result.index(result[1]), result.count(result[1])) == (1, 1)
    with pytest.raises(IndexError):
        result[len(result)]


@each(BY_NAME)
def test_a_name_is_read_again_and_again_and_an_unknown_one_says_what_is_near(subject, result):
    for name in subject.names:
        assert name in result
        assert repr(result[name]) == repr(result[name])
    with pytest.raises(subject.error, match=says("did you mean", "haed", "head")):
        result["haed"]
    assert issubclass(subject.error, hl.HooklineError)
    assert issubclass(subject.error, LookupError)


@each(BY_NAME, of=Mapping)
def test_an_unknown_name_in_a_mapping_is_a_key_error(subject, result):
    with pytest.raises(KeyError):
        result["haed"]


@each(SPELLINGS)
def test_a_site_and_any_spelling_of_it_read_what_its_text_reads(subject, result):
    for name in subject.names:
        for key in (hl.Site.parse(name), *([f"{name}:output"] if name else [])):
            assert key in result
            assert repr(result[key]) == repr(result[name])


# Comparing and copying


@each(EQUALITY)
def test_results_of_the_same_content_are_equal_and_have_no_hash(subject, result, other, folder):
    anew = subject.again(folder)
    assert anew is not result
    assert are_equal(anew, result)
    assert not are_equal(result, other)
    with pytest.raises(TypeError, match="unhashable"):
        hash(result)


@each()
def test_a_result_is_equal_to_itself_and_to_nothing_of_another_kind(subject, result):
    assert are_equal(result, result)
    for thing in (None, 3, "head", object()):
        assert not are_equal(result, thing)


@each(NO_MAPPING)
def test_a_plain_dict_or_list_of_the_same_content_is_something_else(subject, result):
    plain = dict(result) if isinstance(result, Mapping) else [*result]
    assert not are_equal(result, plain)


@pytest.mark.parametrize("subject", [one for one in SUBJECTS if one.kind.__eq__ is object.__eq__], ids=str)
def test_what_is_compared_by_identity_has_a_hash(subject, result, other):
    assert hash(result) == hash(result)
    assert {result: 1, other: 2}[result] == 1


@each(COPIES)
def test_a_copy_or_a_pickle_is_whole(subject, result):
    for one in copies(result):
        assert one is not result
        assert are_alike(subject, one, result)
        assert one._repr_html_() == result._repr_html_()


# Files


@each(SAVE)
def test_a_file_gives_back_what_was_saved(subject, result, tmp_path):
    for path in (tmp_path / "saved", str(tmp_path / "again")):
        assert result.save(path) is None
        loaded = type(result).load(path)
        assert are_alike(subject, loaded, result)
    loaded.save(tmp_path / "third")
    assert (tmp_path / "third").read_bytes() == (tmp_path / "saved").read_bytes()


@each(SAVE)
def test_a_file_is_replaced_only_on_request_and_a_folder_never(subject, result, other, tmp_path):
    result.save(tmp_path / "saved")
    before = (tmp_path / "saved").read_bytes()
    with pytest.raises(hl.StoreError, match=says("it exists overwrite=True")):
        other.save(tmp_path / "saved")
    assert (tmp_path / "saved").read_bytes() == before
    other.save(tmp_path / "saved", overwrite=True)
    assert str(type(other).load(tmp_path / "saved")) == str(other)
    for overwrite in (False, True):
        with pytest.raises(hl.StoreError, match=says("only files are replaced")):
            result.save(tmp_path, overwrite=overwrite)
    with pytest.raises(hl.HooklineError, match="overwrite"):
        result.save(tmp_path / "new", overwrite="yes")
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


@each(SAVE)
def test_what_can_not_be_written_or_read_is_said(subject, result, tmp_path):
    kind = type(result)
    with pytest.raises(hl.StoreError, match=says("was not written save", f"{kind.__name__.lower()}.select")):
        result.save(tmp_path / "nowhere" / "saved")
    (tmp_path / "foreign").write_bytes(b"something else")
    for name in ("missing", "foreign", ""):
        with pytest.raises(hl.StoreError):
            kind.load(tmp_path / name)
    result.save(tmp_path / "saved")
    (tmp_path / "short").write_bytes((tmp_path / "saved").read_bytes()[:-3])
    with pytest.raises(hl.StoreError, match="short"):
        kind.load(tmp_path / "short")


@each(REFUSES_LOAD)
def test_load_makes_a_new_result_and_is_refused_where_it_looks_as_if_it_changed_one(subject, result, tmp_path):
    result.save(tmp_path / "saved")
    with pytest.raises(hl.HooklineError, match=says("load makes a new", f"hl.{type(result).__name__}.load(path)")):
        result.load(tmp_path / "saved")


def test_a_file_of_one_type_is_refused_by_the_others_which_name_its_reader(folder, tmp_path):
    saving = {one.kind: one for one in SUBJECTS if SAVE not in one.lacks}
    for kind, subject in saving.items():
        with subject.example(folder) as result:
            result.save(tmp_path / kind.__name__)
        for reader in {*saving} - {kind}:
            said = rf"holds a {kind.__name__}, not a {reader.__name__}; read it with hl\.{kind.__name__}\.load\(path\)"
            with pytest.raises(hl.StoreError, match=f"(?i){said}"):
                reader.load(tmp_path / kind.__name__)


# Frames


@each(FRAME)
def test_a_frame_has_a_row_for_each_entry_in_their_order(subject, result):
    pandas = pytest.importorskip("pandas")
    before = str(result)
    frame = result.to_frame()
    assert isinstance(frame, pandas.DataFrame)
    assert [*frame.columns] == [*subject.columns]
    assert [*frame["site"]] == [*subject.names]
    assert [*frame.index] == [*range(len(result))]
    assert frame.equals(result.to_frame())
    frame.loc[:, "site"] = "changed"
    assert str(result) == before


@each(FRAME)
def test_a_frame_without_pandas_says_what_to_install(subject, result):
    with without("pandas"), pytest.raises(hl.HooklineError, match=says("to_frame() needs pandas")):
        result.to_frame()


# Pictures


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Matplotlib's figures, on no screen. Whoever shows one or leaves one to pyplot fails the test."""
    pytest.importorskip("matplotlib").use("Agg")
    from matplotlib import figure, pyplot

    def show(*_: object, **__: object) -> None:
        raise AssertionError("a picture was shown")

    monkeypatch.setattr(pyplot, "show", show)
    monkeypatch.setattr(figure.Figure, "show", show)
    before = pyplot.get_fignums()
    yield figure
    assert pyplot.get_fignums() == before


@each(PLOT)
def test_a_picture_is_a_figure_of_its_own_which_shows_itself_in_a_notebook(subject, result, figures):
    before = str(result)
    found = result.plot()
    assert isinstance(found, figures.Figure)
    assert found.axes[0].has_data()
    assert result.plot() is not found
    data, size = found._repr_png_()
    assert data.startswith(b"\x89PNG")
    assert min(size["width"], size["height"]) > 100
    assert str(result) == before


@each(PLOT)
def test_a_picture_is_drawn_into_the_axes_that_are_given(subject, result, figures):
    left, right = figures.Figure().subplots(1, 2)
    assert result.plot(ax=right, title="Mine") is right
    assert right.has_data()
    assert not left.has_data()
    assert "Mine" in {right.get_title(loc) for loc in ("left", "center", "right")}


@each(PLOT)
def test_a_picture_refuses_what_is_no_axes_and_no_title(subject, result, figures):
    for wrong in (figures.Figure(), figures.Figure().subplots(1, 2), 3):
        with pytest.raises(hl.HooklineError, match=says("ax= takes one of matplotlib's axes")):
            result.plot(ax=wrong)
    with pytest.raises(hl.HooklineError, match="title=3"):
        result.plot(title=3)


@pytest.mark.process
def test_a_picture_without_matplotlib_says_what_to_install():
    code = """
import sys, tempfile
from pathlib import Path
sys.modules["matplotlib"] = None
from tests.conformance.subjects import PLOT, SUBJECTS
import hookline as hl
with tempfile.TemporaryDirectory() as folder:
    for subject in SUBJECTS:
        if PLOT not in subject.lacks:
            with subject.example(Path(folder)) as result:
                try:
                    result.plot()
                except hl.HooklineError as error:
                    print(error)
"""
    done = run_forked(code)
    drawn = sum(PLOT not in subject.lacks for subject in SUBJECTS)
    assert done.stdout.splitlines() == ["plots need matplotlib: pip install 'hookline[plot]'"] * drawn, done.stderr
