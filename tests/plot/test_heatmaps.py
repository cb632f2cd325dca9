"""Heat maps: feature maps, attention, tokens by layer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hookline as hl
from hookline._plot.plot import plot
from hookline.errors import HooklineError
from tests.errors.wording import says
from tests.support.plots import NAN, Figure, captured, drawn, labels_of, text_of


def test_attention_has_a_panel_for_each_head_with_the_tokens_at_its_sides():
    value = torch.randn(2, 4, 3, 3).softmax(-1)
    figure = drawn(plot({"attn": value}, tokens=[["a", "b", "c"], ["d", "$e$", "f"]], sample=1))
    panels = [ax for ax in figure.axes if ax.get_title().startswith("head")]
    assert [ax.get_title() for ax in panels] == ["head 0", "head 1", "head 2", "head 3"]
    assert labels_of(panels[0].yaxis) == labels_of(panels[0].xaxis) == ["d", "$e$", "f"]
    assert torch.allclose(torch.from_numpy(panels[2].images[0].get_array().data), value[1, 2].double())
    assert "sample 1 of 2" in text_of(figure)
    assert "attention weight" in text_of(figure)
    assert all(ax.images[0].get_clim() == panels[0].images[0].get_clim() for ax in panels)


def test_many_panels_are_not_drawn_into_one_axes():
    with pytest.raises(HooklineError, match=says("a panel for each", 4, "attn[:, 0]")):
        plot({"attn": torch.randn(2, 4, 3, 3).softmax(-1)}, ax=Figure().subplots())


def test_averaged_heads_of_multihead_attention_are_attention():
    model = nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(2, 5, 8)
    with hl.capture(model, "") as acts:
        model(x, x, x)
    figure = drawn(acts.plot("[1]", sample=1, tokens=[[*"abcde"], [*"fghij"]]))
    first, _colour_bar = figure.axes  # The first dimension is samples, not heads: one is drawn.
    assert torch.equal(torch.from_numpy(first.images[0].get_array().data), acts[""][1][1].double())
    assert labels_of(first.xaxis) == [*"fghij"]
    assert "sample 1 of 2" in text_of(figure)


def test_a_head_that_was_chosen_is_one_picture_for_a_sample():
    value = torch.randn(2, 4, 3, 3).softmax(-1)
    ax = Figure().subplots()
    assert plot({"attn[:, 3]": value[:, 3]}, sample=1, ax=ax) is ax
    assert torch.equal(torch.from_numpy(ax.images[0].get_array().data), value[1, 3].double())


def test_maps_are_the_channels_of_one_sample_and_as_many_as_are_wanted():
    value = torch.randn(3, 100, 4, 4)
    figure = plot({"conv": value}, sample=2, most=8)
    sheet = torch.from_numpy(figure.axes[0].images[0].get_array().filled(NAN))
    assert torch.equal(sheet[:4, :4], value[2, 0].double())
    assert torch.equal(sheet[:4, 5:9], value[2, 1].double())
    assert sheet[4].isnan().all()
    assert "the first 8 of 100 channels" in text_of(figure)
    assert "sample 2 of 3" in text_of(figure)


def test_a_sheet_that_is_finer_than_pixels_is_averaged():
    value = torch.rand(1, 4, 700, 700)
    value[0, 1, 0, :2] = NAN
    figure = plot({"conv": value})
    sheet = torch.from_numpy(figure.axes[0].images[0].get_array().filled(NAN))
    assert max(sheet.shape) < 2000
    assert sheet[5, 5].item() == pytest.approx(value[0, 0, 10:12, 10:12].mean().item())
    assert "2 NaN" in text_of(figure)


def test_token_by_layer_has_the_statistic_of_each_token_first_layer_below():
    acts = captured()
    figure = drawn(acts.plot("h.*", statistic="mean", tokens=list("abcde"), sample=1))
    ax = figure.axes[0]
    expected = torch.stack([acts[f"h.{layer}"][1].double().mean(-1) for layer in range(3)])
    assert torch.allclose(torch.from_numpy(ax.images[0].get_array().data), expected)
    assert labels_of(ax.xaxis) == list("abcde")
    assert labels_of(ax.yaxis) == ["0", "1", "2"]
    assert ax.get_ylim() == (-0.5, 2.5)
    assert figure.axes[1].get_ylabel() == "mean"


@pytest.mark.parametrize("most", [0, -1])
def test_no_channel_at_all_is_no_picture(most):
    with pytest.raises(HooklineError, match=says("is not a whole number from", most, 1)):
        plot({"conv": torch.randn(1, 4, 5, 5)}, most=most)


def test_numbers_by_layer_and_position_are_a_heat_map():
    values = {f"h.{layer}[:, {place}]": 10.0 * layer + place for layer in range(3) for place in range(12)}
    figure = plot(values, label="logit difference", tokens=[f"t{place}" for place in range(12)])
    ax = drawn(figure).axes[0]
    assert ax.images[0].get_array()[2, 11] == 31.0
    assert labels_of(ax.xaxis)[11] == "t11"
    assert ax.get_ylabel() == "layer h.*[:, *]"
    assert figure.axes[1].get_ylabel() == "logit difference"
