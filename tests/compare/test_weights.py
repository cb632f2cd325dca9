"""Parameters and buffers side by side, in words."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hookline._compare.weights import EXTRA, MISSING, compare_weights, pair_weights
from hookline.errors import HooklineError

W = torch.randn(16, 16, generator=torch.Generator().manual_seed(0))
HEADS = torch.arange(16).reshape(4, 4)


def test_what_one_has_alone_is_said():
    a, b = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
    b.weight = a.weight
    assert [(one.kind, one.what) for one in compare_weights(a, b, {"": ""})] == [
        (MISSING, "b has no bias, which is (4,) in a")
    ]
    assert [(one.kind, one.what) for one in compare_weights(b, a, {"": ""})] == [
        (EXTRA, "a has no bias, which is (4,) in b")
    ]


def test_another_name_is_matched_by_its_shape():
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gamma = nn.Parameter(torch.ones(8))

    other = nn.RMSNorm(8)
    assert compare_weights(other, Scaled(), {"": ""}) == []


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
    assert compare_weights(a, b) == []
    with torch.no_grad():
        b.x3.weight.copy_(b.x3.weight.T.clone())
        b.x1.weight.normal_()
    found = compare_weights(a, b)
    assert [(one.name, one.other) for one in found] == [("up.weight", "x1.weight"), ("last.weight", "x3.weight")]
    assert "of its elements differ" in found[0].what
    assert found[1].what == "transposed"


def test_what_is_left_over_is_missing_or_extra():
    a, b = Renamed(**layers(), one=nn.Linear(3, 3)), renamed()
    b.more = nn.ParameterList([torch.ones(5)])
    found = {(one.name, one.other): one.kind for one in compare_weights(a, b)}
    assert found == {("one.weight", ""): MISSING, ("one.bias", ""): MISSING, ("", "more.0"): EXTRA}
    assert [one.other for one in compare_weights(a, b, match={"one": None})] == ["more.0"]


def test_weights_stay_inside_the_modules_that_match_names():
    a = Renamed(one=nn.Sequential(nn.Linear(4, 4, bias=False)), two=nn.Sequential(nn.Linear(4, 4, bias=False)))
    b = Renamed(second=Renamed(x=nn.Linear(4, 4, bias=False)), first=Renamed(y=nn.Linear(4, 4, bias=False)))
    names = pair_weights(a, b, match={"one": "first", "two": "second"})
    assert all(other.startswith("first") == name.startswith("one") for name, other in names.items())


def test_tied_weights_that_one_model_unties_are_compared():
    a, b = Renamed(words=nn.Embedding(9, 8), head=nn.Linear(8, 9, bias=False)), None
    a.head.weight = a.words.weight
    b = Renamed(words=nn.Embedding(9, 8), head=nn.Linear(8, 9, bias=False))
    b.words.load_state_dict(a.words.state_dict())
    assert [one.name for one in compare_weights(a, b)] == ["head.weight"]
    del b.head
    assert compare_weights(a, b) == []


def test_models_without_a_common_weight_are_refused():
    with pytest.raises(HooklineError, match="no weight of b has the name, the numbers or the shape"):
        compare_weights(Renamed(x=nn.Linear(2, 3)), Renamed(y=nn.Linear(5, 7)))
