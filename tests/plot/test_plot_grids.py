"""Pictures of numbers along named axes: one, two, three and more."""

from __future__ import annotations

import pytest
import torch

from hookline._plot.plot import plot_grid
from hookline.errors import HooklineError
from tests.errors.wording import says
from tests.support.plots import NAN, Figure, drawn, labels_of, text_of

WORDS = ["<bos>", "The", "quick", "fox"]


def test_one_axis_is_a_curve_over_its_labels_with_a_line_for_no_change():
    figure = drawn(plot_grid(torch.tensor([3.0, 1.0, 2.0]), {"head": [0, 4, 5]}, base=2.5, pattern="h.0[:, *]"))
    (ax,) = figure.axes
    curve, unchanged = ax.get_lines()
    assert (ax.get_xlabel(), ax.get_ylabel(), labels_of(ax.xaxis)) == ("head", "measured", ["0", "4", "5"])
    assert (list(curve.get_ydata()), list(unchanged.get_ydata())) == ([3.0, 1.0, 2.0], [2.5, 2.5])
    assert "measured by head\nh.0[:, *]" in text_of(figure)
    assert "unchanged: 2.5" in text_of(figure)


def test_two_axes_are_a_map_of_changes_around_0():
    values = torch.tensor([[0.5, 0.4], [0.3, NAN], [0.2, 0.1]])
    figure = drawn(plot_grid(values, {"layer": [0, 1, 11], "head": [2, 3]}, base=0.5))
    ax, bar = figure.axes
    assert (ax.get_xlabel(), ax.get_ylabel(), bar.get_ylabel()) == ("head", "layer", "change")
    assert (labels_of(ax.xaxis), labels_of(ax.yaxis)) == (["2", "3"], ["0", "1", "11"])
    assert ax.images[0].get_array()[2, 1] == pytest.approx(-0.4)
    assert ax.images[0].get_clim() == pytest.approx((-0.4, 0.4))
    assert "change by layer and head" in text_of(figure)
    assert "1 NaN" in text_of(figure)


def test_one_large_change_among_many_keeps_its_colour():
    values = torch.zeros(10, 100)
    values[3, 7] = 50.0
    figure = plot_grid(values, {"layer": list(range(10)), "position": list(range(100))}, base=0.0)
    assert figure.axes[0].images[0].get_clim() == (-50.0, 50.0)


def test_three_axes_are_a_map_for_each_layer_on_one_scale():
    values = torch.arange(2 * 3 * 4).reshape(2, 3, 4).double()
    axes = {"layer": [0, 5], "head": [0, 1, 2], "position": [0, 1, 2, 3]}
    figure = drawn(plot_grid(values, axes, base=1.0, tokens=WORDS))
    first, second, bar = figure.axes
    assert [first.get_title(), second.get_title()] == ["layer 0", "layer 5"]
    assert (first.get_ylabel(), first.get_xlabel(), bar.get_ylabel()) == ("head", "token", "change")
    assert (labels_of(first.xaxis), labels_of(first.yaxis)) == (WORDS, ["0", "1", "2"])
    assert second.images[0].get_array()[2, 3] == 22.0
    assert first.images[0].get_clim() == second.images[0].get_clim() == (-22.0, 22.0)
    assert "change by layer, head and token" in text_of(figure)


def test_more_axes_are_a_map_for_each_pair_and_too_many_are_left_out_with_a_note():
    axes = {"layer": list(range(20)), "module": ["attn", "mlp"], "head": [0, 1], "position": [0, 1, 2]}
    figure = plot_grid(torch.rand(20, 2, 2, 3), axes, base=0.0)
    titles = [ax.get_title() for ax in figure.axes if ax.get_title()]
    assert (len(titles), titles[1]) == (32, "layer 0, module mlp")
    assert "the first 32 of 40" in text_of(figure)


@pytest.mark.parametrize(("layers", "heads", "positions"), [(2, 1, 3), (12, 12, 11), (24, 16, 128), (3, 64, 4)])
def test_no_text_of_a_picture_is_cut_off(layers, heads, positions):
    axes = {"layer": list(range(layers)), "head": list(range(heads)), "position": list(range(positions))}
    figure = drawn(plot_grid(torch.randn(layers, heads, positions), axes, base=0.0, pattern="h.*.attn.z[:, *, *]"))
    width, height = figure.bbox.size
    for ax in figure.axes:
        box = ax.get_tightbbox()
        assert (box.x0 >= -1, box.y0 >= -1, box.x1 <= width + 1, box.y1 <= height + 1) == (True, True, True, True)


@pytest.mark.parametrize(
    ("labels", "tokens", "shown"),
    [
        ([0, 1, 2, 3], WORDS, WORDS),
        ([1, 3], WORDS, ["The", "fox"]),
        ([0, -1], WORDS, ["<bos>", "fox"]),
        ([7, 8, 9, 10], WORDS, WORDS),
        (["prompt[-1]", "new"], ["a", "b"], ["a", "b"]),
        ([0, 1], [["a", "b"], ["c", "d"]], ["a", "b"]),
    ],
)
def test_tokens_are_those_of_all_positions_or_of_the_ones_in_the_picture(labels, tokens, shown):
    figure = plot_grid(torch.rand(len(labels)), {"position": labels}, base=0.0, tokens=tokens)
    assert labels_of(drawn(figure).axes[0].xaxis) == shown


def test_what_does_not_fit_raises_with_the_reason():
    values = torch.rand(2, 2, 2)
    axes = {"layer": [0, 1], "head": [0, 1], "position": [0, 9]}
    with pytest.raises(HooklineError, match=says("a map for each layer")):
        plot_grid(values, axes, base=0.0, ax=Figure().subplots())
    with pytest.raises(HooklineError, match=says("but there are", 4, 2, 9)):
        plot_grid(values, axes, base=0.0, tokens=WORDS)
    with pytest.raises(HooklineError, match=says("labels of positions")):
        plot_grid(values[0], {"layer": [0, 1], "head": [0, 1]}, base=0.0, tokens=WORDS)
    with pytest.raises(HooklineError, match=says("ax= takes one of matplotlib's axes")):
        plot_grid(values, axes, base=0.0, ax=Figure())


def test_the_axes_of_the_user_are_drawn_into():
    one, two = Figure().subplots(2)
    assert plot_grid(torch.rand(3), {"layer": [0, 1, 2]}, base=0.0, ax=one, title="mine") is one
    assert plot_grid(torch.rand(2, 3), {"layer": [0, 1], "head": [0, 1, 2]}, base=0.0, ax=two) is two
    assert one.get_title(loc="left") == "mine"
