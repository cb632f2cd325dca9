"""`hl.Sweep`: reading, selecting, ranking and scaling what was measured; its tables, grids and pictures."""

from __future__ import annotations

import math

import pytest
import torch

import hookline as hl
from tests.errors.wording import says
from tests.support.models import GPT, tokens

NAN = float("nan")
HEADS = ("sample", "head", "query", "key")


def by_head(layers: int = 2, heads: int = 3, base: float = 0.5, **options) -> hl.Sweep:
    """Return a sweep whose measurements are 0, 1, 2, ... tenths, by layer and head."""
    sites = [f"h.{layer}.attn/softmax[:, {head}]" for layer in range(layers) for head in range(heads)]
    values = {site: number / 10 for number, site in enumerate(sites)}
    return hl.Sweep(base, values, "set to 0.0", dimensions=dict.fromkeys(sites, HEADS), **options)


def in_pairs() -> hl.Sweep:
    return hl.Sweep(
        torch.tensor([1.0, 2.0]), {"h.0": torch.tensor([1.0, 3.0]), "h.1": torch.tensor([0.0, 1.0])}, "skipped"
    )


def test_a_real_sweep_has_its_axes_and_says_how_it_was_measured():
    model, x = GPT(), tokens()
    found = hl.sweep(model, "h.*[:, *]", lambda output: output.sum(), run=(x,))
    assert isinstance(found, hl.Sweep)
    grid = found.grid()
    assert grid.axes == {"layer": [0, 1, 2], "position": [0, 1, 2, 3, 4]}
    assert grid.values[2, 3] == found["h.2[:, 3]"]
    assert "an unchanged copy in each" in found.notes[0]


def test_the_grid_has_the_measurements_by_layer_and_head_and_nan_where_nothing_was_measured():
    found = by_head()
    assert found.grid().axes == {"layer": [0, 1], "head": [0, 1, 2]}
    assert found.grid().values.tolist() == [[0.0, 0.1, 0.2], [0.3, 0.4, 0.5]]
    some = found.select("h.0.attn/softmax[:, 0]", "h.1.attn/softmax[:, 2]").grid()
    assert (some.axes, some.values[0, 0], some.values[1, 1]) == ({"layer": [0, 1], "head": [0, 2]}, 0.0, 0.5)
    assert some.values.isnan().tolist() == [[False, True], [True, False]]
    assert in_pairs().grid().values.tolist() == [2.0, 0.5]


def test_a_selection_has_the_places_that_match_in_their_order():
    found = by_head(notes=["alone"])
    assert list(found.select("h.1.attn/softmax[:, *]")) == [f"h.1.attn/softmax[:, {head}]" for head in range(3)]
    assert list(found.select("h.*.attn/softmax[:, 2]")) == ["h.0.attn/softmax[:, 2]", "h.1.attn/softmax[:, 2]"]
    assert list(found.select(hl.Site.parse("h.0.attn/softmax[:, 1]"))) == ["h.0.attn/softmax[:, 1]"]
    assert list(found.select()) == list(found)
    one = found.select("h.1.attn/softmax[:, *]")
    assert (one.base, one.notes, one.grid().axes) == (0.5, ("alone",), {"head": [0, 1, 2]})


def test_a_selection_of_nothing_says_what_is_there():
    with pytest.raises(hl.NotCaptured, match=says("matches nothing in this sweep", "h.7.attn/softmax[:, *]")):
        by_head().select("h.7.attn/softmax[:, *]")
    with pytest.raises(hl.NotCaptured, match=says("matches nothing in this sweep", "h.0.attn/softmax[:, 0]")):
        by_head().select("mlp")
    with pytest.raises(hl.NotCaptured, match="matches nothing"):  # The place was measured as a whole.
        in_pairs().select("h.0[:, 1]")
    with pytest.raises(hl.SiteError, match=says("knows its places by name")):
        by_head().select(torch.nn.Linear)


def test_the_top_has_the_largest_changes_first_and_what_is_no_number_before_all():
    found = hl.Sweep(1.0, {"a": 1.5, "b": 0.0, "c": NAN, "d": 1.1})
    assert list(found.top(3)) == ["c", "b", "a"]
    assert list(found.top()) == ["c", "b", "a", "d"]
    assert list(in_pairs().top(1)) == ["h.1"]


def test_a_normalised_sweep_is_0_where_corrupted_and_1_where_clean():
    found = hl.Sweep(2.0, {"h.0": 2.0, "h.1": 4.0, "h.2": 3.0}, "set to what another run had")
    scaled = found.normalised(clean=4.0, corrupted=2.0)
    assert (scaled.base, dict(scaled)) == (0.0, {"h.0": 0.0, "h.1": 1.0, "h.2": 0.5})
    assert "what another run had (0 is corrupted, 1 is clean)" in str(scaled)
    assert found["h.1"] == 4.0
    pairs = in_pairs().normalised(clean=torch.tensor([3.0, 4.0]), corrupted=torch.tensor([1.0, 2.0]))
    assert (pairs.base.tolist(), pairs["h.0"].tolist(), pairs["h.1"].tolist()) == ([0, 0], [0, 0.5], [-0.5, -0.5])
    assert in_pairs().normalised(clean=3, corrupted=torch.tensor([1.0, 2.0]))["h.0"].tolist() == [0.0, 1.0]


@pytest.mark.parametrize(
    ("clean", "corrupted", "message"),
    [
        (1.0, 1.0, says("clean= and corrupted= are equal")),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0]), says("clean= and corrupted= are equal", 1, 2)),
        (NAN, 1.0, says("clean= has to be finite")),
        (torch.ones(3), 0.0, says("clean= is float32", "(3,)", "(2,)")),
        ("high", 0.0, says("clean= has to be a")),
    ],
)
def test_ends_of_a_scale_that_make_no_sense_raise(clean, corrupted, message):
    with pytest.raises(hl.HooklineError, match=message):
        in_pairs().normalised(clean=clean, corrupted=corrupted)


def test_several_ends_for_one_number_raise():
    with pytest.raises(hl.HooklineError, match=says("the metric gave", "0.5")):
        by_head().normalised(clean=torch.ones(2), corrupted=0.0)


def test_a_frame_has_a_row_for_each_place_with_its_axes():
    pytest.importorskip("pandas")
    frame = by_head().to_frame()
    assert list(frame.columns) == ["site", "layer", "head", "measured", "change"]
    assert frame.iloc[5].tolist() == ["h.1.attn/softmax[:, 2]", 1, 2, 0.5, 0.0]
    assert list(in_pairs().to_frame()["spread"]) == [0.5, 0.0]
    no_grid = hl.Sweep(0.0, {"embed": 1.0, "h.0": 2.0}).to_frame()
    assert list(no_grid.columns) == ["site", "measured", "change"]


def test_several_measurements_print_as_their_mean_and_spread():
    assert str(in_pairs()).splitlines() == [
        "2 places, one at a time skipped; mean of what was measured without: 1.5",
        "site  measured  change  spread",
        "────  ────────  ──────  ──────  ────────────────────",
        "h.0          2    +0.5  ±0.5    ██████████",
        "h.1        0.5      -1  ±0      ████████████████████",
    ]


def test_many_places_print_a_line_for_each_layer_and_all_on_request():
    lines = str(by_head(4, 12, base=0.0)).splitlines()
    assert lines[0] == "48 places h.*.attn/softmax[:, *], one at a time set to 0.0; measured without: 0"
    assert lines[1].split("  ")[:2] == ["layer", "size of the change by head"]
    assert lines[3].split() == ["0", "▁▁▁▁▂▂▂▂▂▂▂▃", "+1.1", "11"]
    assert lines[6].split() == ["3", "▆▇▇▇▇▇▇▇████", "+4.7", "11"]
    assert len(lines) == 7
    assert len(f"{by_head(4, 12):all}".splitlines()) == 51
    assert "h.3.attn/softmax[:, 11]" in f"{by_head(4, 12):all}"


def test_few_places_and_those_along_one_axis_print_a_row_each():
    assert len(str(by_head(3, 13)).splitlines()) == 42
    assert len(str(by_head(1, 50)).splitlines()) == 53
    assert len(str(by_head(20, 3)).splitlines()) == 63  # Three heads make no line.


def test_a_line_keeps_its_width_and_shows_the_largest_of_neighbours_and_what_is_missing():
    sites = {f"h.{layer}[:, {place}]": 0.0 for layer in range(2) for place in range(400)}
    del sites["h.1[:, 399]"]
    found = hl.Sweep(0.0, {**sites, "h.0[:, 123]": -2.0, "h.1[:, 5]": NAN})
    first, second = str(found).splitlines()[3:]
    assert first.split() == ["0", "▁" * 12 + "█" + "▁" * 27, "-2", "123"]
    assert second.split() == ["1", "█" + "▁" * 39, "+nan", "5"]
    few = {f"h.{layer}[:, {place}]": 1.0 for layer in range(4) for place in range(11) if layer or place != 4}
    assert str(hl.Sweep(0.0, few)).splitlines()[3].startswith("0      ████ ██████ ")


def test_a_picture_has_the_axes_of_the_grid_and_without_one_the_places_in_order():
    pytest.importorskip("matplotlib")
    ax = by_head().plot().axes[0]
    assert (ax.get_xlabel(), ax.get_ylabel(), ax.images[0].get_array()[1, 0]) == ("head", "layer", pytest.approx(-0.2))
    no_grid = hl.Sweep(0.0, {"embed": 1.0, "h.0": 2.0, "h.1": 1.0})
    assert no_grid.plot().axes[0].get_xlabel() == "site, in order"
    with pytest.raises(hl.HooklineError, match=says("has no number in its", "embed")):
        no_grid.plot(tokens=["a", "b"])
    assert list(in_pairs().plot(title="mine").axes[0].get_lines()[0].get_ydata()) == [2.0, 0.5]


def test_a_sweep_of_tensors_is_shown_by_the_explorer_with_its_means(tmp_path):
    model, x = GPT(), tokens()
    found = hl.sweep(model, "h.*", lambda output: output.sum((1, 2)), run=(x,))
    assert found["h.0"].shape == (2,)
    hl.explore(model, run=(x,), to=tmp_path / "page.html", measured=found)
    assert f'"name":"h.1","value":{found["h.1"].double().mean().item()}' in (tmp_path / "page.html").read_text("utf-8")


@pytest.mark.parametrize("value", [None, "high", True, 1j, [1.0], torch.ones(0), torch.ones(2) * 1j])
def test_only_numbers_are_measurements(value):
    with pytest.raises(hl.HooklineError, match=says("has to be a number", "h.0")):
        hl.Sweep(0.0, {"h.0": value})
    with pytest.raises(hl.HooklineError, match=says("has to be a number")):
        hl.Sweep(value, {"h.0": 1.0})


def test_an_empty_sweep_prints_and_has_no_grid():
    found = hl.Sweep(1.0, {})
    assert str(found).startswith("0 places")
    assert len(found.top(3)) == 0
    with pytest.raises(hl.HooklineError, match=says("no places in this sweep")):
        found.grid()
    assert math.isclose(found.normalised(clean=2, corrupted=0).base, 0.5)
