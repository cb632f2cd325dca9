"""Pictures: which kind suits which value, what it shows, and that drawing has no side effects."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

import hookline as hl
from hookline._plot.plot import KINDS, plot
from hookline.errors import HooklineError, NotCaptured
from tests.errors.wording import says
from tests.support.models import GPT, tokens
from tests.support.plots import INF, NAN, Figure, captured, drawn, text_of
from tests.support.quick_python import quick_python


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


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "calls"])
def test_every_kind_of_picture_says_which_of_several_calls_it_shows(kind):
    model = nn.ModuleDict({f"h{layer}": nn.Identity() for layer in range(2)})
    with hl.capture(model, "*", "*:grad_output", keep="all") as acts:
        for _ in range(3):
            for module in model.values():
                module(torch.rand(2, 3, 4, 4).requires_grad_() * 2).sum().backward()
    where = "h*" if KINDS[kind].many else "h0"
    where += "[:, 0]" if kind in ("tokens", "layers") else ""
    assert "the latest of 3 calls" in text_of(acts.plot(where, kind))
    assert "call 1 of those kept" in text_of(acts.plot(where, kind, call=1))


def test_numbers_of_several_calls_are_drawn_as_curves_over_the_calls():
    model = GPT()
    with hl.capture(model, "h.*", keep="all", transform=torch.norm) as acts:
        for _ in range(3):
            model(tokens())
    axes = acts.plot().axes[0]
    assert (axes.get_xlabel(), len(axes.lines)) == ("call", 3)
    assert [*axes.lines[1].get_ydata()] == [value.item() for value in acts.calls("h.1")]
    with hl.capture(model, "h.*", keep=2, transform=torch.norm) as latest:
        for _ in range(3):
            model(tokens())
    assert latest.plot().axes[0].get_xlabel() == "kept call"
    assert "values over kept calls" in text_of(latest.select("h.*").plot())


def test_a_statistic_is_drawn_over_the_calls_of_each_site():
    model = GPT()
    with hl.capture(model, "h.*", "h.1:grad_output", keep="all") as acts:
        for _ in range(3):
            model(tokens()).sum().backward()
    ax = Figure().subplots()
    assert acts.plot("h.*", "calls", statistic="rms", ax=ax) is ax
    assert (ax.get_xlabel(), ax.get_ylabel(), len(ax.lines)) == ("call", "rms", 3)
    assert [*ax.lines[1].get_xdata()] == [0, 1, 2]
    rms = [value.double().square().mean().sqrt().item() for value in acts.calls("h.1")]
    assert [*ax.lines[1].get_ydata()] == pytest.approx(rms)
    norms = acts.plot(["h.1[:, -1]", "h.1:grad_output"], "calls").axes[0]
    assert [line.get_label() for line in norms.lines] == ["h.1[:, -1]", "h.1:grad_output"]
    assert [*norms.lines[0].get_ydata()] == pytest.approx([one[:, -1].norm().item() for one in acts.calls("h.1")])


def test_the_calls_of_one_generation_are_drawn_as_its_steps():
    transformers = pytest.importorskip("transformers")
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 20, "bos_token_id": 0, "eos_token_id": None}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval()
    asked = {"max_new_tokens": 4, "attention_mask": torch.ones(2, 3, dtype=torch.long), "pad_token_id": 0}
    with hl.capture(model, "transformer.h.*", "lm_head", keep="all") as acts:
        model.generate(torch.ones(2, 3, dtype=torch.long), **asked)
        once = acts.select("transformer.h.*", "lm_head").plot(kind="calls")
        model.generate(torch.ones(2, 3, dtype=torch.long), **asked)
    axes = once.axes[0]
    assert (axes.get_xlabel(), [*axes.lines[0].get_xdata()]) == ("step", [0, 1, 2, 3])
    assert "norm over steps" in text_of(once)
    assert acts.plot("transformer.h.1[..., 3]", "calls").axes[0].get_xlabel() == "call"  # Of two generations.


def test_calls_that_a_site_names_are_drawn_at_their_numbers():
    model = nn.Sequential(cell := nn.Linear(2, 2), *[cell] * 8)
    with hl.capture(model, "0#1:9:2", "0#{0,2}", "0#:4", "0#:", keep="all") as acts:
        model(torch.ones(1, 2))
    drawn = {site: acts.plot(site, "calls").axes[0] for site in acts}
    assert {axes.get_xlabel() for axes in drawn.values()} == {"call"}
    numbers = {site: [int(number) for number in axes.lines[0].get_xdata()] for site, axes in drawn.items()}
    assert numbers == {"0#1:9:2": [1, 3, 5, 7], "0#{0,2}": [0, 2], "0#:4": [0, 1, 2, 3], "0#:": [*range(9)]}
    assert acts.plot(["0#:", "0#:4"], "calls").axes[0].get_xlabel() == "call"
    together = acts.plot(["0#1:9:2", "0#{0,2}"], "calls").axes[0]
    assert (together.get_xlabel(), [*together.lines[0].get_xdata()]) == ("kept call", [0, 1, 2, 3])
    with hl.capture(model, "0#*") as each:
        model(torch.ones(1, 2))
    assert each.plot(kind="depth").axes[0].get_xlabel() == "call 0#*"
    with pytest.raises(HooklineError, match=says("has one call here", "0#0", "0", "all")):
        each.plot(kind="calls")


def test_calls_of_a_function_are_drawn_in_order_since_each_call_of_its_module_counts_from_0():
    model = nn.Softmax(-1)
    with hl.capture(model, "/softmax#:1", "/softmax#0::2", keep="all") as acts:
        for _ in range(3):
            model(torch.randn(2, 3))
    assert [[*acts.plot(site, "calls").axes[0].lines[0].get_xdata()] for site in acts] == [[0, 1, 2]] * 2


def test_a_site_with_one_call_stands_at_the_first_step_of_the_others():
    model = nn.Sequential(nn.Embedding(9, 2), nn.Identity())
    with hl.capture(model, "0", "1#0", keep="all") as acts:
        for length in (3, 4, 5):
            model(torch.arange(length)[None])
    axes = acts.plot(kind="calls").axes[0]
    assert (axes.get_xlabel(), [[*line.get_xdata()] for line in axes.lines]) == ("step", [[0, 1, 2], [0]])


def test_calls_are_drawn_only_where_there_are_several():
    acts = captured()
    with pytest.raises(HooklineError, match=says("has one call here capture", "h.0", "all")):
        acts.plot("h.*", "calls")
    for option in ({"call": 0}, {"sample": 0}, {"tokens": ["a"]}):
        with pytest.raises(HooklineError, match=says("has no meaning for", next(iter(option)), "calls")):
            acts.plot("h.*", "calls", **option)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "calls"])
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
    with pytest.raises(HooklineError, match=says("it has no elements to", "(0, 4)", "h.0")):
        plot({"h.0": torch.zeros(0, 4)})
    figure = plot({"h.0": torch.zeros(0, 4), "h.1": torch.ones(2, 4), "h.2": torch.ones(2, 4)}, "depth")
    assert "1 site without elements left out" in text_of(figure)
    figure = plot(
        {"h.0": None, "h.1": torch.ones(2, 4), "h.2": torch.zeros(0), "h.3": torch.ones(2), "h.4": "text"}, "depth"
    )
    assert "2 sites without a tensor left out · 1 site without elements left out" in text_of(figure)
    with pytest.raises(NotCaptured, match=says("nothing to draw")):
        plot({})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.empty(2, device="meta"), says("is on the meta device")),
        ("text", says("there is no tensor in")),
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), says("is a nested tensor of", 2)),
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


def test_a_picture_of_a_part_of_a_cache_says_how_many_calls_there_were():
    model = GPT()
    with hl.capture(model, "h.*") as latest, hl.capture(model, "h.*", keep=2) as two:
        for _ in range(3):
            model(tokens())
    for acts in (latest, two):
        for derived in (acts, acts * 2, acts.select("h.*[:, 0]"), acts - acts, acts | {}):
            for where in (None, [*derived]):
                assert "the latest of 3 calls" in text_of(derived.plot(where, "histogram"))


def test_of_several_calls_the_latest_is_drawn_and_call_chooses_another():
    model = nn.Linear(2, 2)
    with hl.capture(model, "", keep="all") as acts:
        for size in (1.0, 5.0, 9.0):
            model(torch.full((1, 2), size))
    latest, first = acts.plot(""), acts.plot("", call=0)
    assert "the latest of 3 calls" in text_of(latest)
    heights = [[bar.get_height() for bar in figure.axes[0].patches] for figure in (latest, first)]
    assert heights == [acts.calls("")[call][0].tolist() for call in (2, 0)]
    with pytest.raises(NotCaptured, match=says("has calls kept and call= is not among them", 3, 3)):
        acts.plot("", call=3)


@pytest.mark.parametrize(
    ("values", "kind", "message"),
    [
        ({"fc": torch.ones(3)}, "maps", says("and it needs sample", "(3,)", "fc")),
        ({"h.0": torch.ones(3), "h.1": torch.ones(3)}, "units", says("and there are", 2, "h.0")),
        ({"h.0": torch.ones(1, 2, 3), "h.1": torch.ones(1, 4, 3)}, "layers", says("has tokens and has", "h.0", "h.1")),
        ({"c.0": torch.ones(1, 2, 3, 3)}, "layers", says("what fits is maps")),
        ({"fc": torch.ones(3)}, "hist", says("is not a kind of picture", "hist")),
    ],
)  # fmt: skip
def test_a_kind_that_does_not_fit_says_why_and_what_does(values, kind, message):
    with pytest.raises(HooklineError, match=message):
        plot(values, kind)


def test_wrong_samples_tokens_and_statistics_are_refused():
    values = {"h.0": torch.ones(2, 3, 4)}
    with pytest.raises(HooklineError, match=says("is not among them", "h.0", 2, 2)):
        plot(values, sample=2)
    for kind in ("depth", "histogram", "dead"):
        with pytest.raises(HooklineError, match=says("has no meaning for as", 1, kind, "h.0[1]")):
            plot(values, kind, sample=1)
    with pytest.raises(HooklineError, match=says("sample= has no meaning for", 50, "units")):
        plot({"h.0": torch.ones(2, 8)}, sample=50)
    with pytest.raises(HooklineError, match=says("tokens= has labels but has", 2, "h.0", 3)):
        plot(values, tokens=["a", "b"])
    with pytest.raises(HooklineError, match=says("tokens= has labels of", 1)):
        plot(values, tokens=[["a", "b", "c"]], sample=1)
    with pytest.raises(HooklineError, match=says("is not a statistic did", "nrm", "norm")):
        plot({**values, "h.1": torch.ones(2, 3, 4)}, statistic="nrm")


def test_a_store_is_drawn_from_rows_that_are_evenly_spaced_or_of_one_sample(tmp_path):
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU()).eval()
    data = torch.randn(10_000, 4)
    store = hl.harvest(model, data, "0", "1", to=tmp_path / "acts", batch_size=2_000)
    assert "3,334 of 10,000 rows, evenly spaced" in text_of(store.plot("1"))
    assert len(drawn(store.plot("*", "dead")).axes[0].patches) == 2
    one = drawn(store.plot("0", sample=9_999)).axes[0]
    assert [bar.get_height() for bar in one.patches] == pytest.approx(store["0"][9_999].tolist())
    with pytest.raises(NotCaptured, match=says("matches nothing in this store", "h.*")):
        store.plot("h.*")
    with pytest.raises(HooklineError, match=says("call= has no meaning here")):
        store.plot("1", call=0)


def test_tokens_of_one_sample_of_a_store_are_drawn_as_such(tmp_path):
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU()).eval()
    store = hl.harvest(model, torch.randn(8, 5, 4), "0", "1", to=tmp_path / "acts", batch_size=4)
    ax = drawn(store.plot("0", sample=3)).axes[0]
    assert torch.allclose(torch.from_numpy(ax.images[0].get_array().data), store["0"][3].double())
    assert ax.get_ylabel() == "token"
    assert drawn(store.plot(sample=3)).axes[0].get_ylabel() == "layer *"


@pytest.mark.process
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
    environment = {"PYTHONPATH": ":".join(sys.path), "PATH": ""}  # No display.
    done = subprocess.run([*quick_python(), "-c", code], capture_output=True, env=environment, timeout=120)
    assert done.stdout == b"[]\n", done.stderr
    assert done.stderr.count(b"\x89PNG") == 5


@pytest.mark.gpu
def test_values_of_a_cuda_device_are_drawn():
    for kind in (None, "histogram", "depth", "dead"):
        drawn(plot({"h.0": torch.randn(2, 3, 4, device="cuda"), "h.1": torch.randn(2, 3, 4, device="cuda")}, kind))
    drawn(plot({"a": torch.randn(2, 4, 5, 5, device="cuda", dtype=torch.half).softmax(-1)}))


@pytest.mark.parametrize(
    ("kind", "options", "problem"),
    [
        ("histogram", {"tokens": list("abcde")}, says("tokens= has no meaning for", "histogram")),
        ("depth", {"tokens": list("abcde")}, says("tokens= has no meaning for", "depth")),
        (
            "histogram",
            {"statistic": "mean"},
            says("statistic= has no meaning"),
        ),
        ("dead", {"log": True}, says("log=True has no meaning for", "dead")),
        ("histogram", {"log": True}, says("log=True has no meaning for of", "histogram")),
        ("layers", {"statistic": "mean", "log": True}, says("log=True is for positive numbers")),
    ],
)
def test_an_option_that_a_picture_has_no_use_for_is_refused(kind, options, problem):
    with pytest.raises(HooklineError, match=problem):
        captured().plot("h.*", kind, **options)


def test_places_may_be_modules_and_what_can_not_be_drawn_says_so():
    model = GPT()
    _, acts = hl.run(model, tokens(), capture="h.*")
    assert "h.1" in text_of(acts.plot(model.h[1]))
    for wrong, problem in (
        ({"where": nn.ReLU}, says("a cache knows its sites by")),
        ({"where": "flow"}, says("is a kind of picture", "flow", "flow")),
        ({"statistic": torch.mean}, says("is not a statistic")),
        ({"sample": "0"}, says("sample= is not a whole number", "0")),
        ({"ax": Figure()}, says("ax= takes one of matplotlib's axes")),
        ({"ax": Figure().subplots(1, 2)}, says("ax= takes one of matplotlib's")),
    ):
        with pytest.raises(HooklineError, match=problem):
            acts.plot(**{"where": "h.*", **wrong})
