"""Parameters and buffers side by side, in words."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hookline as hl
from tests.errors.wording import says

W = torch.randn(16, 16, generator=torch.Generator().manual_seed(0))
HEADS = torch.arange(16).reshape(4, 4)


def test_what_one_has_alone_is_said():
    a, b = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
    b.weight = a.weight
    assert [(one.kind, one.what) for one in hl.compare(a, b).weights] == [
        ("missing", "b has no bias, which is (4,) in a")
    ]
    assert [(one.kind, one.what) for one in hl.compare(b, a).weights] == [
        ("extra", "a has no bias, which is (4,) in b")
    ]


def test_another_name_is_matched_by_its_shape():
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gamma = nn.Parameter(torch.ones(8))

    other = nn.RMSNorm(8)
    assert hl.compare(other, Scaled()).weights == []


class Renamed(nn.Module):
    """Holds layers under other names."""

    def __init__(self, **layers: nn.Module) -> None:
        super().__init__()
        for name, layer in layers.items():
            setattr(self, name, layer)


def layers() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    return {"words": nn.Embedding(9, 8), "up": nn.Linear(8, 16), "down": nn.Linear(16, 8), "last": nn.Linear(8, 8)}


def renamed() -> nn.Module:
    return Renamed(**{f"x{number}": layer for number, layer in enumerate(layers().values())})


def test_weights_with_other_names_are_paired_by_their_numbers_and_shapes():
    a, b = Renamed(**layers()), renamed()
    assert hl.compare(a, b).weights == []
    with torch.no_grad():
        b.x3.weight.copy_(b.x3.weight.T.clone())
        b.x1.weight.normal_()
    found = hl.compare(a, b).weights
    assert [(one.name, one.other) for one in found] == [("up.weight", "x1.weight"), ("last.weight", "x3.weight")]
    assert "of its elements differ" in found[0].what
    assert found[1].what == "transposed"


def test_what_is_left_over_is_missing_or_extra():
    a, b = Renamed(**layers(), one=nn.Linear(3, 3)), renamed()
    b.more = nn.ParameterList([torch.ones(5)])
    found = {(one.name, one.other): one.kind for one in hl.compare(a, b).weights}
    assert found == {("one.weight", ""): "missing", ("one.bias", ""): "missing", ("", "more.0"): "extra"}
    assert [one.other for one in hl.compare(a, b, match={"one": None}).weights] == ["more.0"]


@pytest.mark.parametrize("order", [("first", "second"), ("second", "first")])
def test_weights_stay_inside_the_modules_that_match_names(order):
    def linear(size: int = 4) -> nn.Linear:
        return nn.Linear(4, size, bias=False)

    a = Renamed(one=nn.Sequential(linear()), two=nn.Sequential(linear()), head=linear(3))
    b = Renamed(**{name: Renamed(inner=linear()) for name in order}, head=linear(3))
    found = hl.compare(a, b, match={"one": "first", "two": "second"}).weights
    pairs = {one.name.partition(".")[0]: one.other.partition(".")[0] for one in found if one.name}
    assert pairs["head"] == "head"
    assert pairs["one"] in ("first", "")
    assert pairs["two"] in ("second", "")
    in_their_order = {one.name: one.other for one in hl.compare(a, b).weights}
    assert in_their_order["one.0.weight"] == f"{order[0]}.inner.weight"


def test_tied_weights_that_one_model_unties_are_compared():
    a, b = Renamed(words=nn.Embedding(9, 8), head=nn.Linear(8, 9, bias=False)), None
    a.head.weight = a.words.weight
    b = Renamed(words=nn.Embedding(9, 8), head=nn.Linear(8, 9, bias=False))
    b.words.load_state_dict(a.words.state_dict())
    assert [one.name for one in hl.compare(a, b).weights] == ["head.weight"]
    del b.head
    assert hl.compare(a, b).weights == []


def test_models_without_a_common_weight_are_refused():
    with pytest.raises(hl.HooklineError, match=says("no weight of b has")):
        hl.compare(Renamed(x=nn.Linear(2, 3)), Renamed(y=nn.Linear(5, 7)))
