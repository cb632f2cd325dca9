"""Parameters and buffers side by side, in words."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hookline._compare.weight_differences import EQUAL, ROUNDED, SHAPE, difference_of
from hookline._compare.weights import EXTRA, MISSING, compare_weights
from hookline.errors import HooklineError

W = torch.randn(16, 16, generator=torch.Generator().manual_seed(0))
HEADS = torch.arange(16).reshape(4, 4)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (W.T, "transposed"),
        (W.flip(0), "reversed along dimension 0"),
        (W.flip(1), "reversed along dimension 1"),
        (W[HEADS[[2, 0, 3, 1]].flatten()], "its rows are in another order, in blocks of 4, as heads are"),
        (W[:, torch.randperm(16, generator=torch.Generator().manual_seed(1))], "its columns are in another order"),
        (W + 1, "b's is a's plus 1"),
        (W - 1, "b's is a's minus 1"),
        (torch.zeros(16, 16), "all zeros in b"),
        (W / 2, "a's is 2 times b's"),
        (W.bfloat16().float(), "rounded to bfloat16 in b"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_a_difference_is_named(other, words):
    kind, said = difference_of(W, other)
    assert said == words
    assert kind not in (EQUAL, ROUNDED)


def test_interleaved_rows_are_named():
    order = torch.arange(16).reshape(2, 8).T.flatten()
    assert "interleaved by 8" in difference_of(W, W[order])[1]


def test_equal_and_rounded_weights():
    assert difference_of(W, W.clone()) == (EQUAL, "")
    assert difference_of(W, W.bfloat16())[0] == ROUNDED
    assert difference_of(W, W[:4])[0] == SHAPE
    share = W.clone()
    share[0, :8] += 1
    assert difference_of(W, share)[1] == "3.12 % of its elements differ, up to 1"


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


def test_numbers_that_are_not_finite_are_said():
    other = W.clone()
    other[0, :8] = torch.nan
    assert difference_of(W, other)[1] == "3.12 % of its elements are not finite in b"
    assert difference_of(other, other.clone()) == (EQUAL, "")
    assert difference_of(torch.zeros(4), torch.ones(4))[1] == "b's is a's plus 1"
