"""Pictures: which is drawn of what, what is in it, and that nothing else is touched."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from matplotlib.figure import Figure
from torch import nn

import hookline as hl
from hookline._plot.plot import KINDS, plot
from hookline._plot.plot_data import extremes, token_labels
from hookline.errors import HooklineError, NotCaptured
from tests.support.models import GPT, tokens

matplotlib = pytest.importorskip("matplotlib")


NAN, INF = float("nan"), float("inf")


def drawn(figure):
    """Lay a figure out and draw it, if not into a file: whatever warns or fails does so here."""
    figure.draw_without_rendering()
    return figure


def text_of(figure):
    """Return every text of a figure."""
    drawn(figure)
    return "\n".join(text.get_text() for text in figure.findobj(matplotlib.text.Text))


def labels_of(axis):
    return [label.get_text() for label in axis.get_ticklabels()]


def captured():
    torch.manual_seed(0)
    model = GPT()
    with hl.capture(model, "h.*", "h.*.mlp.1", "head", "h.*:grad_output") as acts:
        model(tokens()).square().mean().backward()
    return acts


@pytest.mark.parametrize(
    ("values", "kind", "axes"),
    [
        ({"conv": torch.randn(2, 6, 5, 5)}, "maps", ("each 5 rows × 5 columns", "first channel")),
        ({"attn": torch.randn(2, 1, 5, 5).softmax(-1)}, "attention", ("key", "query")),
        ({"h.0": torch.randn(2, 5, 8)}, "tokens", ("unit", "token")),
        ({"fc": torch.randn(4, 8)}, "units", ("unit", "sample")),
        ({"fc": torch.randn(8)}, "units", ("unit", "value")),
        ({"pool": torch.randn(4, 8, 1, 1)}, "units", ("unit", "sample")),
        ({"loss": torch.tensor(0.5)}, "units", ("unit", "value")),
        ({f"h.{layer}": torch.randn(2, 5, 8) for layer in range(3)}, "layers", ("token", "layer h.*")),
        ({f"h.{layer}": torch.randn(2, 5 + layer, 8) for layer in range(3)}, "depth", ("layer h.*", "norm")),
        ({f"conv{layer}": torch.randn(2, 3, 8, 8) for layer in range(3)}, "depth", ("layer conv*", "norm")),
        ({f"h.{layer}": torch.randn(1, 2, 5, 5).softmax(-1) for layer in range(3)}, "attention", ("head", "layer h.*")),
        ({"h.0": torch.ones(2, 3), "h.0:grad_output": torch.ones(2, 3)}, "flow", ("site, in order", "norm, log scale")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_picture_is_chosen_by_the_values_and_named_by_its_axes(values, kind, axes):
    chosen, told = plot(values), plot(values, kind)
    for figure in (chosen, told):
        first = drawn(figure).axes[0]
        assert (first.get_xlabel(), first.get_ylabel()) == axes


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_draws_into_the_axes_that_are_given_and_returns_them(kind):
    acts = captured()
    values = {
        **dict.fromkeys(("tokens", "units", "histogram"), ("h.0", acts["h.0"])),
        "maps": ("conv", torch.randn(1, 4, 5, 5)),
        "attention": ("attn[:, 0]", torch.randn(2, 5, 5).softmax(-1)[:1]),
    }
    figure = Figure()
    ax = figure.subplots(1, 2)[1]
    if kind in values:
        assert plot(dict([values[kind]]), kind, ax=ax) is ax
    else:
        assert acts.plot("h.*", kind, ax=ax) is ax
    assert ax.get_title(loc="left")
    drawn(figure)


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
    with pytest.raises(HooklineError, match=r"4 heads, a panel for each, and ax= is one: .* as in 'attn\[:, 0\]'"):
        plot({"attn": torch.randn(2, 4, 3, 3).softmax(-1)}, ax=Figure().subplots())


def test_averaged_heads_of_multihead_attention_are_attention():
    model = nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(2, 5, 8)
    with hl.capture(model, "") as acts:
        model(x, x, x)
    figure = drawn(acts.plot("[1]", sample=1, tokens=[[*"abcde"], [*"fghij"]]))
    first, _colour_bar = figure.axes  # The two are samples, of which one is drawn with its own tokens, and not heads.
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
    with pytest.raises(HooklineError, match="no gradients; capture them too, as in 'h.0:grad_output'; what fits is"):
        cache.plot("h.*", "flow")


def test_dead_units_are_shown_by_their_share():
    maps = torch.ones(2, 4, 3, 3)
    maps[:, 0] = 0
    figure = plot({"conv1": maps, "conv2": torch.ones(2, 4, 3, 3), "attn": torch.ones(1, 2, 2, 2) / 2}, "dead")
    assert [bar.get_height() for bar in figure.axes[0].patches] == [0.25, 0.0]
    assert "most at 'conv1': 25.0%" in text_of(figure)
    assert "1 sites have no units" in text_of(figure)
    with pytest.raises(HooklineError, match="it has no units that may be dead"):
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


@pytest.mark.parametrize("signs", ["both", "one"])
def test_nan_and_infinity_have_colours_of_their_own_and_are_counted(signs):
    value = torch.randn(1, 4, 5)
    value = value if signs == "both" else value.abs()
    value[0, 1, 2], value[0, 2, :2] = NAN, INF
    figure = plot({"h.0": value})
    names = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert names == ["1 NaN", "2 Inf"]
    shown, nan, infinite = (image.to_rgba(image.get_array()) for image in figure.axes[0].images)
    assert shown[1, 2, 3] == 0  # Nothing is drawn there but the mark.
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


@pytest.mark.parametrize(
    "value",
    [
        torch.full((1, 3, 4), 2.0),
        torch.zeros(1, 3, 4),
        torch.full((1, 3, 4), -2.0),
        torch.full((1, 3, 4), NAN),
        torch.full((1, 3, 4), INF),
        torch.randn(1, 3, 1),
        torch.randn(1, 1, 1),
        torch.randn(2, 3, 4).bfloat16(),
        torch.randn(2, 3, 4).half(),
        torch.randn(2, 3, 4).to(torch.float8_e4m3fn),
        torch.randint(0, 9, (2, 3, 4)),
        torch.randn(2, 3, 4) > 0,
        torch.randn(2, 3, 4, dtype=torch.complex64),
        torch.randn(3, 4).to_sparse(),
        torch.randn(2, 3, 4, 5, 6),
        torch.randn(2, 3, 4, requires_grad=True),
        torch.randn(1, 2, 900),
    ],
    ids=["constant", "zero", "negative", "nan", "inf", "unit", "element", "bfloat16", "half", "float8", "int", "bool",
         "complex", "sparse", "five", "graph", "wide"],
)  # fmt: skip
def test_any_values_can_be_drawn(value):
    for kind in (None, "units", "histogram"):
        drawn(plot({"h.0": value}, kind))
    both = {"h.0": value, "h.1": value}
    for kind in ("depth", "histogram", "dead"):
        drawn(plot(both, kind))


def test_values_without_elements_are_left_out_or_refused():
    with pytest.raises(HooklineError, match=r"'h.0' is float32 \(0, 4\): it has no elements to draw"):
        plot({"h.0": torch.zeros(0, 4)})
    figure = plot({"h.0": torch.zeros(0, 4), "h.1": torch.ones(2, 4), "h.2": torch.ones(2, 4)}, "depth")
    assert "1 site without elements left out" in text_of(figure)
    figure = plot(
        {"h.0": None, "h.1": torch.ones(2, 4), "h.2": torch.zeros(0), "h.3": torch.ones(2), "h.4": "text"}, "depth"
    )
    assert "2 sites without a tensor left out · 1 site without elements left out" in text_of(figure)
    with pytest.raises(NotCaptured, match="nothing to draw"):
        plot({})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.empty(2, device="meta"), "is on the meta device, where tensors have no values"),
        ("text", "is str: there is no tensor in it to draw"),
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "is a nested tensor of 2: draw one of them"),
    ],
    ids=["meta", "text", "nested"],
)
def test_what_can_not_be_drawn_says_why(value, message):
    with pytest.raises(HooklineError, match=message):
        plot({"h.0": value})


def test_of_several_tensors_the_first_is_drawn_and_a_subscript_chooses_another():
    model = nn.LSTM(4, 6, batch_first=True)
    with hl.capture(model, "") as acts:
        model(torch.randn(2, 5, 4))
    assert "the first of 3 tensors, [0]" in text_of(acts.plot(""))
    assert "tensors" not in text_of(acts.plot("[1][0]"))


def test_of_several_calls_the_latest_is_drawn_and_call_chooses_another():
    model = nn.Linear(2, 2)
    with hl.capture(model, "", keep="all") as acts:
        for size in (1.0, 5.0, 9.0):
            model(torch.full((1, 2), size))
    latest, first = acts.plot(""), acts.plot("", call=0)
    assert "the latest of 3 calls" in text_of(latest)
    heights = [[bar.get_height() for bar in figure.axes[0].patches] for figure in (latest, first)]
    assert heights == [acts.calls("")[call][0].tolist() for call in (2, 0)]
    with pytest.raises(NotCaptured, match="has 3 calls kept, and call=3 is not among them"):
        acts.plot("", call=3)


@pytest.mark.parametrize(
    ("values", "kind", "message"),
    [
        ({"fc": torch.ones(3)}, "maps", r"'fc' is float32 \(3,\), and it needs \(sample, channel, .*; what fits is"),
        ({"h.0": torch.ones(3), "h.1": torch.ones(3)}, "units", "one value, and there are 2; choose one, as in 'h.0'"),
        ({"h.0": torch.ones(1, 2, 3), "h.1": torch.ones(1, 4, 3)}, "layers", "'h.0' has 2 tokens and 'h.1' has 4"),
        ({"c.0": torch.ones(1, 2, 3, 3)}, "layers", r"needs \(sample, token, unit\); what fits is maps"),
        ({"fc": torch.ones(3)}, "hist", "'hist' is not a kind of picture; .*there are maps, attention"),
    ],
)  # fmt: skip
def test_a_kind_that_does_not_fit_says_why_and_what_does(values, kind, message):
    with pytest.raises(HooklineError, match=message):
        plot(values, kind)


def test_wrong_samples_tokens_and_statistics_are_refused():
    values = {"h.0": torch.ones(2, 3, 4)}
    with pytest.raises(HooklineError, match="'h.0' has 2 samples: sample=2 is not among them"):
        plot(values, sample=2)
    for kind in ("depth", "histogram", "dead"):
        with pytest.raises(HooklineError, match=rf"sample=1 has no meaning for '{kind}'.*as in 'h.0\[1\]'"):
            plot(values, kind, sample=1)
    with pytest.raises(HooklineError, match="sample=50 has no meaning for 'units'"):
        plot({"h.0": torch.ones(2, 8)}, sample=50)
    with pytest.raises(HooklineError, match="tokens= has 2 labels, but 'h.0' has 3 tokens"):
        plot(values, tokens=["a", "b"])
    with pytest.raises(HooklineError, match="tokens= has those of 1 samples"):
        plot(values, tokens=[["a", "b", "c"]], sample=1)
    with pytest.raises(HooklineError, match="'nrm' is not a statistic; did you mean 'norm'"):
        plot({**values, "h.1": torch.ones(2, 3, 4)}, statistic="nrm")


@pytest.mark.parametrize("most", [0, -1])
def test_no_channel_at_all_is_no_picture(most):
    with pytest.raises(HooklineError, match=f"most={most} is not a whole number from 1 on"):
        plot({"conv": torch.randn(1, 4, 5, 5)}, most=most)


def test_any_token_can_be_a_label():
    odd = ["$x$", "日本", "\n", "a_very_long_token_indeed", "😀", "_x^2", ""]
    ax = drawn(plot({"h.0": torch.randn(1, 7, 3)}, tokens=odd)).axes[0]
    labels = labels_of(ax.yaxis)
    assert labels[0] == "$x$"
    assert labels[2] == "\\n"
    assert labels[3] == "a_very_long_tok…"
    assert token_labels(torch.tensor([[3, 4]]), 0, 2, "h") == ["3", "4"]


def test_numbers_are_drawn_as_they_are_beside_the_unchanged_one():
    figure = plot({"conv1": 0.5, "conv2": torch.tensor(0.25), "fc": 1}, base=0.9, label="accuracy")
    line, base = figure.axes[0].get_lines()
    assert list(line.get_ydata()) == [0.5, 0.25, 1.0]
    assert list(base.get_ydata()) == [0.9, 0.9]
    assert figure.axes[0].get_ylabel() == "accuracy"
    assert "unchanged: 0.9" in text_of(figure)


def test_numbers_by_layer_and_position_are_a_heat_map():
    values = {f"h.{layer}[:, {place}]": 10.0 * layer + place for layer in range(3) for place in range(12)}
    figure = plot(values, base=1.0, label="logit difference", tokens=[f"t{place}" for place in range(12)])
    ax = drawn(figure).axes[0]
    assert ax.images[0].get_array()[2, 11] == 30.0
    assert labels_of(ax.xaxis)[11] == "t11"
    assert ax.get_ylabel() == "layer h.*[:, *]"
    assert figure.axes[1].get_ylabel() == "change of logit difference"


def test_a_title_of_ones_own_replaces_what_is_said():
    text = text_of(plot({"h.0": torch.ones(2, 3)}, title="Mine"))
    assert "Mine" in text
    assert "h.0" not in text


def test_a_figure_shows_itself_in_a_notebook():
    data, size = plot({"h.0": torch.ones(2, 3)})._repr_png_()
    assert data.startswith(b"\x89PNG")
    assert size["width"] > size["height"] > 100


def test_a_store_is_drawn_from_rows_that_are_evenly_spaced_or_of_one_sample(tmp_path):
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU()).eval()
    data = torch.randn(10_000, 4)
    store = hl.harvest(model, data, "0", "1", to=tmp_path / "acts", batch_size=2_000)
    assert "3,334 of 10,000 rows, evenly spaced" in text_of(store.plot("1"))
    assert len(drawn(store.plot("*", "dead")).axes[0].patches) == 2
    one = drawn(store.plot("0", sample=9_999)).axes[0]
    assert [bar.get_height() for bar in one.patches] == pytest.approx(store["0"][9_999].tolist())
    with pytest.raises(NotCaptured, match=r"'h\.\*' matches nothing in this store"):
        store.plot("h.*")
    with pytest.raises(HooklineError, match="call= has no meaning here"):
        store.plot("1", call=0)


def test_tokens_of_one_sample_of_a_store_are_drawn_as_such(tmp_path):
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU()).eval()
    store = hl.harvest(model, torch.randn(8, 5, 4), "0", "1", to=tmp_path / "acts", batch_size=4)
    ax = drawn(store.plot("0", sample=3)).axes[0]
    assert torch.allclose(torch.from_numpy(ax.images[0].get_array().data), store["0"][3].double())
    assert ax.get_ylabel() == "token"
    assert drawn(store.plot(sample=3)).axes[0].get_ylabel() == "layer *"


def test_nothing_global_is_touched():
    code = """
import sys, warnings
warnings.simplefilter("error")
import torch, hookline as hl
assert "matplotlib" not in sys.modules
import matplotlib
before = matplotlib.rcParams.copy()  # Reading all as a dict would import pyplot.
cache = hl.Cache({"h.0": torch.randn(2, 3, 4), "h.1": torch.randn(2, 3, 4), "a": torch.randn(1, 2, 3, 3).softmax(-1)})
for where, kind in (("h.0", None), ("h.*", None), ("h.*", "depth"), ("a", None), ("h.0", "histogram")):
    cache.plot(where, kind).savefig(sys.stderr.buffer, format="png")
assert matplotlib.rcParams.copy() == before
assert "matplotlib.pyplot" not in sys.modules
import matplotlib.pyplot
print(matplotlib.pyplot.get_fignums())
"""
    environment = {"PYTHONPATH": ":".join(sys.path), "PATH": ""}  # No display either.
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment, timeout=120)
    assert done.stdout == b"[]\n", done.stderr
    assert done.stderr.count(b"\x89PNG") == 5


def test_without_matplotlib_one_line_says_what_to_install():
    code = """
import sys
sys.modules["matplotlib"] = None
import torch, hookline as hl
try:
    hl.Cache({"h.0": torch.ones(2, 3)}).plot()
except hl.HooklineError as error:
    print(error)
"""
    environment = {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120)
    assert done.stdout == "plots need matplotlib: pip install 'hookline[plot]'\n", done.stderr


@pytest.mark.gpu
def test_values_of_a_cuda_device_are_drawn():
    for kind in (None, "histogram", "depth", "dead"):
        drawn(plot({"h.0": torch.randn(2, 3, 4, device="cuda"), "h.1": torch.randn(2, 3, 4, device="cuda")}, kind))
    drawn(plot({"a": torch.randn(2, 4, 5, 5, device="cuda", dtype=torch.half).softmax(-1)}))


@pytest.mark.parametrize(
    ("kind", "options", "problem"),
    [
        ("histogram", {"tokens": list("abcde")}, "tokens= has no meaning for 'histogram'; it is for attention, tokens"),
        ("depth", {"tokens": list("abcde")}, "tokens= has no meaning for 'depth'"),
        (
            "histogram",
            {"statistic": "mean"},
            "statistic= has no meaning .*; it is for layers, depth, flow",
        ),
        ("dead", {"log": True}, "log=True has no meaning for 'dead'"),
        ("histogram", {"log": True}, "log=True has no meaning for 'histogram' of several"),
        ("layers", {"statistic": "mean", "log": True}, "log=True is for positive numbers, and the least here is -"),
    ],
)
def test_an_option_that_a_picture_has_no_use_for_is_refused(kind, options, problem):
    with pytest.raises(HooklineError, match=problem):
        captured().plot("h.*", kind, **options)


def test_a_log_scale_is_drawn_if_it_is_asked_for_or_refused():
    relu = torch.tensor([[0.0, 1.0, 100.0], [0.5, 0.0, 20.0]])
    assert "log scale" in text_of(hl.Cache({"relu": relu}).plot(log=True))
    with pytest.raises(HooklineError, match=r"log=True is for positive numbers, and the least here is -1; .*torch.abs"):
        hl.Cache({"a": -relu.sign()}).plot(log=True)


def test_places_may_be_modules_and_what_can_not_be_drawn_says_so():
    model = GPT()
    _, acts = hl.run(model, tokens(), capture="h.*")
    assert "h.1" in text_of(acts.plot(model.h[1]))
    for wrong, problem in (
        ({"where": nn.ReLU}, "a cache knows its sites by name only"),
        ({"where": "flow"}, "'flow' is a kind of picture, and no site here; write plot\\(kind='flow'\\)"),
        ({"statistic": torch.mean}, "is not a statistic"),
        ({"sample": "0"}, "sample='0' is not a whole number"),
        ({"ax": Figure()}, "ax= takes one of matplotlib's axes, as in figure.subplots\\(\\), not Figure"),
        ({"ax": Figure().subplots(1, 2)}, "ax= takes one of matplotlib's axes, .*not ndarray"),
    ):
        with pytest.raises(HooklineError, match=problem):
            acts.plot(**{"where": "h.*", **wrong})
