"""Colour scales, labels and titles, which all pictures share."""

from __future__ import annotations

import pytest
import torch

import hookline as hl
from hookline._plot.plot import plot
from hookline._plot.plot_data import token_labels
from hookline.errors import HooklineError
from tests.errors.wording import says
from tests.support.plots import INF, NAN, drawn, labels_of, text_of


@pytest.mark.parametrize("signs", ["both", "one"])
def test_nan_and_infinity_have_colours_of_their_own_and_are_counted(signs):
    value = torch.randn(1, 4, 5)
    value = value if signs == "both" else value.abs()
    value[0, 1, 2], value[0, 2, :2] = NAN, INF
    figure = plot({"h.0": value})
    names = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert names == ["1 NaN", "2 Inf"]
    shown, nan, infinite = (image.to_rgba(image.get_array()) for image in figure.axes[0].images)
    assert shown[1, 2, 3] == 0  # Transparent: only the NaN mark is drawn there.
    assert nan[1, 2, 3] == infinite[2, 0, 3] == 1
    colours = {tuple(nan[1, 2, :3]), tuple(infinite[2, 0, :3])}
    assert len(colours) == 2
    drawn(figure)


def test_a_mask_of_the_largest_numbers_does_not_drown_the_rest():
    scores = torch.randn(1, 2, 6, 6).masked_fill(torch.ones(6, 6).triu(1).bool(), torch.finfo(torch.float32).min)
    figure = plot({"attn": scores})
    assert max(map(abs, figure.axes[0].images[0].get_clim())) < 10
    assert "30 Inf or masked" in text_of(figure)


def test_a_few_outliers_leave_colours_for_the_rest():
    value = torch.randn(1, 30, 64)
    value[0, 0, 3] = 900
    figure = drawn(plot({"h.0": value}))
    assert figure.axes[0].images[0].get_clim()[1] < 10
    assert figure.axes[0].images[0].colorbar.extend == "both"


def test_colours_diverge_around_zero_only_where_both_signs_are():
    signed = plot({"h.0": torch.tensor([[[-1.0, 3.0]]])}).axes[0].images[0]
    assert (signed.cmap.name, signed.get_clim()) == ("RdBu_r", (-3, 3))
    positive = plot({"h.0": torch.tensor([[[1.0, 3.0]]])}).axes[0].images[0]
    assert (positive.cmap.name, positive.get_clim()) == ("viridis", (1, 3))


def test_any_token_can_be_a_label():
    odd = ["$x$", "日本", "\n", "a_very_long_token_indeed", "😀", "_x^2", ""]
    ax = drawn(plot({"h.0": torch.randn(1, 7, 3)}, tokens=odd)).axes[0]
    labels = labels_of(ax.yaxis)
    assert labels[0] == "$x$"
    assert labels[2] == "\\n"
    assert labels[3] == "a_very_long_tok…"
    assert token_labels(torch.tensor([[3, 4]]), 0, 2, "h") == ["3", "4"]


def test_a_title_of_ones_own_replaces_what_is_said():
    text = text_of(plot({"h.0": torch.ones(2, 3)}, title="Mine"))
    assert "Mine" in text
    assert "h.0" not in text


def test_a_log_scale_is_drawn_if_it_is_asked_for_or_refused():
    relu = torch.tensor([[0.0, 1.0, 100.0], [0.5, 0.0, 20.0]])
    assert "log scale" in text_of(hl.Cache({"relu": relu}).plot(log=True))
    with pytest.raises(HooklineError, match=says("log=True is for positive numbers and")):
        hl.Cache({"a": -relu.sign()}).plot(log=True)
