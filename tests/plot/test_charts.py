"""Curves, bars and histograms: gradient flow, dead units, values over depth."""

from __future__ import annotations

import pytest
import torch

import hookline as hl
from hookline._plot.plot import plot
from hookline._plot.plot_data import extremes
from hookline.errors import HooklineError
from tests.errors.wording import says
from tests.support.plots import INF, NAN, captured, drawn, labels_of, text_of


def test_gradients_stand_at_their_layers_though_they_pass_backwards():
    acts = captured()
    figure = drawn(acts.plot("h.*", "flow"))
    value, gradient = figure.axes[0].get_lines()[:2]
    assert list(value.get_xdata()) == list(gradient.get_xdata()) == [0, 1, 2]
    assert gradient.get_ydata()[2] == pytest.approx(acts["h.2:grad_output"].norm().item())
    alone = drawn(acts.plot("h.*:grad_output")).axes[0]
    assert list(alone.get_lines()[0].get_ydata()) == list(gradient.get_ydata())
    assert labels_of(alone.xaxis) == ["0", "1", "2"]


def test_layers_that_vanish_or_explode_are_marked():
    values = {f"h.{layer}": torch.full((2,), 20.0**layer) for layer in range(6)}
    gradients = {f"h.{layer}:grad_output": torch.full((2,), 20.0 ** (layer - 5)) for layer in reversed(range(6))}
    gradients["h.0:grad_output"] = torch.zeros(2)
    gradients["h.3:grad_output"] = torch.full((2,), NAN)
    text = text_of(plot({**values, **gradients}))
    assert "3 vanishing, 3 exploding, 1 not finite" in text
    assert {"vanishing", "exploding", "not finite"} <= set(text.splitlines())
    assert extremes([1.0, 1e4, INF, 0.0], "first") == ["", "exploding", "not finite", "vanishing"]
    assert extremes([1e4, 1.0, 1e-2], "last") == ["exploding", "", ""]


def test_flow_without_gradients_says_what_to_capture():
    cache = hl.Cache({"h.0": torch.ones(2), "h.1": torch.ones(2)})
    with pytest.raises(HooklineError, match=says("capture them too", "h.0:grad_output")):
        cache.plot("h.*", "flow")


def test_dead_units_are_shown_by_their_share():
    maps = torch.ones(2, 4, 3, 3)
    maps[:, 0] = 0
    figure = plot({"conv1": maps, "conv2": torch.ones(2, 4, 3, 3), "attn": torch.ones(1, 2, 2, 2) / 2}, "dead")
    assert [bar.get_height() for bar in figure.axes[0].patches] == [0.25, 0.0]
    assert "most at 'conv1': 25.0%" in text_of(figure)
    assert "1 sites have no units" in text_of(figure)
    with pytest.raises(HooklineError, match=says("it has no units that")):
        plot({"attn": torch.ones(1, 2, 2, 2) / 2}, "dead")


def test_a_histogram_counts_all_elements_and_says_what_is_not_in_it():
    value = torch.tensor([0.0, 1.0, 1.0, 2.0, NAN, INF, 0.0, 3.0])
    figure = plot({"fc": value}, "histogram")
    assert figure.axes[0].patches[0].get_data().values.sum() == 6
    assert "25.00% are 0, 12.50% are NaN, 12.50% are Inf" in text_of(figure)


def test_histograms_of_several_sites_stand_in_the_order_of_depth():
    values = {f"h.{layer}": torch.randn(1000) + layer for layer in range(3)}
    ax = drawn(plot(values, "histogram")).axes[0]
    assert labels_of(ax.yaxis) == ["0", "1", "2"]
    assert ax.get_xlim()[0] < -2
    assert ax.get_xlim()[1] > 4
    many = drawn(plot({f"h.{layer}": torch.randn(50) for layer in range(200)}, "histogram"))
    assert many.axes[0].images


def test_names_in_several_families_are_lines_of_their_own():
    names = [f"h.{layer}{part}" for layer in range(4) for part in (".attn", ".ln_1", ".ln_2", "")]
    ax = drawn(plot({name: torch.randn(2, 3) for name in names})).axes[0]
    assert [line.get_label() for line in ax.get_lines()] == ["h.*.attn", "h.*.ln_1", "h.*.ln_2", "h.*"]
    assert labels_of(ax.xaxis) == ["0", "1", "2", "3"]


def test_hundreds_of_layers_have_few_labels():
    ax = drawn(plot({f"layers.{layer}": torch.randn(2, 3) for layer in range(400)}, "depth")).axes[0]
    assert 4 <= len(labels_of(ax.xaxis)) <= 30
    tall = drawn(plot({f"layers.{layer}": torch.randn(1, 4, 3) for layer in range(400)})).axes[0]
    assert 4 <= len(labels_of(tall.yaxis)) <= 60


def test_numbers_are_drawn_as_they_are_beside_the_unchanged_one():
    figure = plot({"conv1": 0.5, "conv2": torch.tensor(0.25), "fc": 1}, base=0.9, label="accuracy")
    line, base = figure.axes[0].get_lines()
    assert list(line.get_ydata()) == [0.5, 0.25, 1.0]
    assert list(base.get_ydata()) == [0.9, 0.9]
    assert figure.axes[0].get_ylabel() == "accuracy"
    assert "unchanged: 0.9" in text_of(figure)
