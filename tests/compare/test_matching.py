"""Which module stands for which: equal names, patterns, and what modules hold and return."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import hookline as hl
from tests.errors.wording import says
from tests.support.planted_faults import Wrapped, model_and_inputs

X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))


class Model(nn.Module):
    """Layers with an attention, and another one behind the last."""

    def __init__(self, layers: str, attention: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.extra, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
        blocks = [nn.ModuleDict({attention: nn.Linear(4, 4), "mlp": nn.Linear(4, 4)}) for _ in range(2)]
        self.names = layers, attention
        setattr(self, layers, nn.ModuleList(blocks))

    def forward(self, x: Tensor) -> Tensor:
        layers, attention = self.names
        for layer in getattr(self, layers):
            x = x + layer["mlp"](layer[attention](x))
        return self.head(self.extra(x))


def test_patterns_name_what_stands_for_what():
    a, b = Model("h", "attn"), Wrapped(Model("layers", "self_attn"))
    match = {"h.*": "inner.layers.*", "h.*.attn": "inner.layers.*.self_attn", "extra": None, "": "inner"}
    matching = hl.compare(a, b, run={"x": X}, match=match).matching
    assert matching.pairs == {
        "": "inner",
        "h.0.attn": "inner.layers.0.self_attn",
        "h.0.mlp": "inner.layers.0.mlp",
        "h.1.attn": "inner.layers.1.self_attn",
        "h.1.mlp": "inner.layers.1.mlp",
        "head": "inner.head",
    }
    assert set(matching.how.values()) == {"match="}


class Ported(nn.Module):
    """The layers of a sequence under other names, and in other containers."""

    def __init__(self, first: nn.Module, second: nn.Module, last: nn.Module) -> None:
        super().__init__()
        self.body = nn.ModuleDict({"down": first, "up": second})
        self.out = last

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.body["up"](torch.relu(self.body["down"](x))))


def sequence() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), nn.Linear(6, 6))


def ported(model: nn.Sequential) -> Ported:
    return Ported(*(copy.deepcopy(model[number]) for number in (0, 2, 3)))


def test_renamed_modules_are_found_by_what_they_hold_and_return():
    a = sequence()
    report = hl.compare(a, ported(a), run=(X,))
    assert report.ok
    assert report.matching.pairs == {"": "", "0": "body.down", "2": "body.up", "3": "out"}
    assert report.matching.how["2"] == "like"
    assert report.matching.only_a == ["1"]
    assert "3" in str(report.matching)
    assert report.notes == ("only in a: 1",)


def test_a_fault_in_a_renamed_module_is_named_on_both_sides():
    a = sequence()
    b = ported(a)
    with torch.no_grad():
        b.body["up"].bias.add_(1)
    report = hl.compare(a, b, run=(X,))
    assert (report.first.site, report.first.other) == ("2", "body.up")
    assert "'2' ('body.up' in b)" in report.verdict


def test_a_given_pair_is_taken_even_if_it_does_another_thing():
    a = sequence()
    b = ported(a)
    report = hl.compare(a, b, run=(X,), match={"0": "body.up", "2": "body.down", "3": None})
    assert report.matching.how["0"] == "match="
    assert report.matching.pairs["2"] == "body.down"
    assert "3" not in report


def test_a_pattern_that_leads_nowhere_is_refused():
    a = sequence()
    with pytest.raises(hl.HooklineError, match=says("and no such module of", "body.ups", "2", "body.up")):
        hl.compare(a, ported(a), run=(X,), match={"2": "body.ups"})


def test_a_wrapped_model_is_matched_inside():
    a, run = model_and_inputs("gpt2")
    report = hl.compare(a, Wrapped(copy.deepcopy(a)), run=run)
    assert report.ok
    assert report.matching.pairs["transformer.h.1.attn"] == "inner.transformer.h.1.attn"
    assert len(report.matching.pairs) > 20
    again = hl.compare(a, Wrapped(copy.deepcopy(a)), run=run, match={"transformer": "inner.transformer"})
    assert again.matching.how["transformer.h.0"] == "match="


def test_equal_names_come_first():
    a = sequence()
    report = hl.compare(a, copy.deepcopy(a), run=(X,))
    assert not report.matching.left_over()
    assert set(report.matching.how.values()) == {"name"}


def test_an_attention_that_returns_its_pattern_too_is_matched_by_name():
    a, run = model_and_inputs("llama")
    b = copy.deepcopy(a)
    b.set_attn_implementation("sdpa")
    matching = hl.compare(a, b, run=run).matching
    assert not matching.left_over()
    assert "model.layers.0.self_attn" in matching.pairs
