"""The modules of a model, their names, and the number of their calls."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
from torch import Tensor, nn

import hookline as hl
from tests.errors.wording import says
from tests.support.models import GPT


class Tied(nn.Module):
    """One linear layer under three names, called twice in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(4, 4)
        self.decode = self.encode
        self.stack = nn.Sequential(self.encode)

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x) + 1)


@pytest.mark.parametrize("asked", ["encode", "decode", "stack.0"])
@pytest.mark.filterwarnings("ignore:.*several times:hookline.HooklineWarning")
def test_a_tied_module_answers_to_each_of_its_names(asked: str) -> None:
    """B01"""
    model, x = Tied(), torch.ones(2, 4)
    with hl.capture(model, asked, keep="all") as acts:
        output = model(x)
    assert list(acts) == [asked]
    for name in ("encode", "decode", "stack.0", model.encode):
        assert torch.equal(acts[name], output)
        assert len(acts.calls(name)) == 2
    assert torch.equal(acts.select("encode")["encode"], output)


def test_a_tied_module_is_hooked_once_however_it_is_named() -> None:
    """B01"""
    model, x = Tied(), torch.ones(2, 4)
    with hl.capture(model, "encode", "decode", nn.Linear, "stack.*", keep="all") as acts:
        model(x)
    assert len(acts) == 1
    assert len(acts.calls("encode")) == 2
    with hl.edit(model, ["encode", "decode"], lambda value: value + 1):
        assert torch.equal(model(x), model.encode(model.encode(x) + 2) + 1) is False
        edited = model(x)
    assert torch.allclose(edited, model.encode(model.encode(x) + 2) + 1)


def test_the_other_names_of_a_tied_module_are_shown() -> None:
    """B01"""
    model = Tied()
    assert [str(site) for site in hl.sites(model)] == ["", "encode", "stack"]
    row = next(line for line in repr(hl.sites(model, "**")).splitlines() if line.startswith("encode"))
    assert "decode, stack.0" in row


class Loop(nn.Module):
    """Calls its cell `steps` times."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(4, 4)

    def forward(self, x: Tensor, steps: int = 3) -> Tensor:
        for _ in range(steps):
            x = self.cell(x)
        return x


def test_the_latest_of_several_calls_comes_with_a_warning_that_names_what_to_do() -> None:
    """B02"""
    model, x = Loop(), torch.ones(2, 4)
    with hl.capture(model, "cell") as acts:
        output = model(x)
    with pytest.warns(
        hl.HooklineWarning, match=says("fired several times in one forward", "cell", "keep='all'", "'#n'")
    ):
        latest = acts["cell"]
    assert torch.equal(latest, output)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        acts["cell"]  # It warns once.


def test_one_call_in_each_of_several_forwards_is_no_reason_to_warn() -> None:
    """B02"""
    model = Loop()
    with hl.capture(model, "cell") as acts:
        model(torch.ones(2, 4), steps=1)
        model(torch.zeros(2, 4), steps=1)
    assert torch.equal(acts["cell"], model.cell(torch.zeros(2, 4)))


def test_several_calls_are_a_list_and_each_can_be_chosen_by_number() -> None:
    """B02"""
    model, x = Loop(), torch.ones(2, 4)
    with hl.capture(model, "cell", keep="all") as acts, hl.capture(model, "cell#1", "cell#2:input") as one:
        model(x)
    expected = [model(x, steps=number) for number in (1, 2, 3)]
    assert all(torch.equal(*pair) for pair in zip(acts.calls("cell"), expected, strict=True))
    assert torch.equal(one["cell#1"], expected[1])
    assert torch.equal(one["cell:input#2"], expected[1])


class Recursive(nn.Module):
    """Calls itself on half of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        if depth:
            x = x + self(x / 2, depth - 1)
        return self.layer(x)


def test_inputs_and_outputs_of_a_recursive_module_stay_paired() -> None:
    """B03"""
    model = nn.Sequential(Recursive())
    x = torch.ones(2, 4)
    with hl.capture(model, "0", "0:input", keep="all") as acts, hl.capture(model, "0#1", "0:input#1") as second:
        model(x)
    depths = (2, 1, 0)
    for depth, given, output in zip(depths, acts.calls("0:input"), acts.calls("0"), strict=True):
        assert torch.equal(given, x / 2 ** (2 - depth))
        assert torch.equal(output, model[0](given, depth))
    assert torch.equal(second["0:input#1"], x / 2)
    assert torch.equal(second["0#1"], acts.calls("0")[1])


@pytest.mark.filterwarnings("ignore:.*several times:hookline.HooklineWarning")
def test_the_latest_input_and_output_of_a_recursive_module_belong_to_one_call() -> None:
    """B03"""
    model = nn.Sequential(Recursive())
    with hl.capture(model, "0", "0:input") as acts:
        model(torch.ones(2, 4))
    assert torch.equal(acts["0"], model[0](acts["0:input"], 0))


class Generator(nn.Module):
    """Generates vectors: the whole prompt in the first step, then one vector per step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def generate(self, x: Tensor, steps: int) -> Tensor:
        found = [self(x)[-1:]]
        for _ in range(steps - 1):
            found.append(self(found[-1]))
        return torch.cat(found)


def test_the_steps_of_a_generation_are_kept_apart() -> None:
    """B04"""
    model, prompt = Generator(), torch.ones(5, 4)
    with hl.capture(model, "layer", keep="all") as acts:
        output = model.generate(prompt, steps=4)
    shapes = [tuple(value.shape) for value in acts.calls("layer")]
    assert shapes == [(5, 4), (1, 4), (1, 4), (1, 4)]
    assert torch.equal(acts["layer"], output[-1:])


def test_one_step_of_a_generation_is_chosen_by_number_and_memory_is_bounded_by_keep() -> None:
    """B04"""
    model, prompt = Generator(), torch.ones(5, 4)
    with hl.capture(model, "layer", keep=2) as acts, hl.capture(model, "layer#2") as third:
        output = model.generate(prompt, steps=50)
    assert len(acts.calls("layer")) == 2
    assert torch.equal(torch.cat(acts.calls("layer")), output[-2:])
    assert torch.equal(third["layer#2"], output[2:3])


def test_a_container_is_refused_with_the_pattern_to_use() -> None:
    """B09"""
    model = GPT()
    with pytest.raises(hl.SiteError, match=says("is a ModuleList", "'h'", "'h.*'?")):
        hl.capture(model, "h")
    with pytest.raises(hl.SiteError, match=says("is a ModuleList", "'h'")):
        hl.edit(model, model.h, lambda value: value)
    with pytest.raises(hl.SiteError, match=says("did you mean", "'*'?")):
        hl.capture(nn.ModuleDict({"a": nn.ReLU()}), "")


@pytest.mark.parametrize("container", [nn.ParameterList([torch.ones(1)]), nn.ModuleList(), nn.ModuleDict()])
def test_an_empty_container_is_refused_without_a_pattern_that_would_match_nothing(container: nn.Module) -> None:
    """B09"""
    model = nn.Sequential(nn.ReLU())
    model.add_module("held", container)
    with pytest.raises(hl.SiteError, match=f"'held' is a {type(container).__name__}") as said:
        hl.capture(model, "held")
    assert "held.*" not in str(said.value)


def test_patterns_types_and_predicates_pass_over_containers() -> None:
    """B09"""
    model = GPT(depth=1)
    everything = [str(site) for site in hl.sites(model, "**")]
    assert "h" not in everything
    assert "h.0" in everything
    assert "h" not in [str(site) for site in hl.sites(model, lambda name, module: True)]
    with pytest.raises(hl.SiteError, match=says("matches nothing but is never called", "GPT", "h")):
        hl.sites(model, nn.ModuleList)


ODD_NAMES = [
    "a:input", "a:output", "*", "**", "h[0]", "h[", "#0", "a#1", "x/y", "{a,b}", "split()", "a b", " ", "größe", "层",
    "line\nbreak", "tab\t", "back\\slash", "\\", 'quo"te', "it's", "-1", "None", "...", "x" * 300, "🙂",
]  # fmt: skip


@pytest.mark.parametrize("name", [name for name in ODD_NAMES if "." not in name])
def test_names_that_look_like_syntax_are_the_modules_that_bear_them(name: str) -> None:
    """B14"""
    model = nn.Sequential()
    model.add_module("a", nn.Linear(4, 4))
    model.add_module(name, nn.Linear(4, 4))
    x = torch.ones(2, 4)
    output, acts = hl.run(model, x, capture=[name, (model._modules[name], ":input")])
    assert torch.equal(acts[name], output)
    assert torch.equal(acts[model._modules[name]], output)
    sites = [hl.Site.parse(text) for text in acts]
    assert [site.path for site in sites] == [name, name]
    assert [str(site) for site in sites] == list(acts)
    _, copy = hl.run(model, x, capture=sites)
    assert torch.equal(copy[sites[0]], acts[sites[0]])
    assert [site.path for site in hl.sites(model, str(hl.Site(name)), "a")] == [name, "a"]


def test_a_backslash_makes_any_mark_a_part_of_the_name() -> None:
    """B14"""
    model = nn.ModuleDict({"a": nn.ReLU(), "*": nn.ReLU(), "b:input": nn.ReLU()})
    assert [site.path for site in hl.sites(model, r"\*")] == ["*"]
    assert [site.path for site in hl.sites(model, r"b\:input:input")] == ["b:input"]
    assert [site.port for site in hl.sites(model, r"b\:input:input")] == ["input"]
    assert [site.path for site in hl.sites(model, r"b\:*")] == ["b:input"]
    assert hl.sites(model, "b:input")[0] == hl.Site("b:input")


class Numbered(nn.Module):
    """Has children whose names are prefixes of each other."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(nn.Sequential(nn.Linear(2, 2)) for _ in range(12))
        self.hx1 = nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("h.1", ["h.1"]),
        ("h.1*", ["h.10", "h.11"]),
        ("h.*", [f"h.{number}" for number in range(12)]),
        ("*", ["hx1"]),
        ("h*1", ["hx1"]),
        ("h.1.*", ["h.1.0"]),
        ("**.1", ["h.1"]),
        ("h.{1,11}.**", ["h.1.0", "h.11.0"]),
    ],
)
def test_patterns_match_whole_names_and_dots_are_dots(pattern: str, expected: list[str]) -> None:
    """B17"""
    assert [str(site) for site in hl.sites(Numbered(), pattern)] == expected


def test_regular_expressions_match_whole_names() -> None:
    """B17"""
    model = Numbered()
    assert [str(site) for site in hl.sites(model, re.compile(r"h\.1"))] == ["h.1"]
    assert [str(site) for site in hl.sites(model, re.compile(r"h\.1\d"))] == ["h.10", "h.11"]
    with pytest.raises(hl.SiteError, match=says("matches nothing but is never called", "Numbered", "^h$", "h")):
        hl.sites(model, re.compile("^h$"))


@pytest.mark.parametrize(
    ("wrong", "near"),
    [
        ("h.1.mpl", "h.1.mlp"),
        ("h.*.atn", "h.0.attn"),
        ("hed", "head"),
        ("blocks.0", "h.0"),
        ("stem", "hl.sites"),
    ],
)
def test_a_pattern_that_matches_nothing_says_what_is_near(wrong: str, near: str) -> None:
    """B17"""
    with pytest.raises(hl.SiteError, match=says("matches nothing", "GPT", repr(wrong), near)):
        hl.capture(GPT(), wrong)
