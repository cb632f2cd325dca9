"""Weights that are found by their numbers at another place than the names say."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import hookline as hl

X = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))


class Attention(nn.Module):
    def __init__(self, names: tuple[str, str, str]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.names = names
        for name in names:
            setattr(self, name, nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (getattr(self, name)(x) for name in self.names)
        return torch.softmax(q @ k.mT, -1) @ v


def port(*swapped: str) -> Attention:
    b = Attention(("query", "key", "value"))
    if swapped:
        one, two = (getattr(b, name) for name in swapped)
        kept = copy.deepcopy(one.state_dict())
        one.load_state_dict(two.state_dict())
        two.load_state_dict(kept)
    return b


def test_swapped_weights_under_other_names_are_named():
    a = Attention(("q", "k", "v"))
    assert hl.compare(a, port()).ok
    assert hl.compare(a, port(), run=(X,)).ok
    report = hl.compare(a, port("key", "value"))
    assert not report.ok
    assert report.verdict == "k.weight: its numbers are in 'value.weight' of b, and not in 'key.weight'"
    report = hl.compare(a, port("key", "value"), run=(X,))
    assert not report.ok
    assert "the numbers of 'k.weight' are in 'value.weight' of b" in report.verdict or "it is that of" in report.verdict


class Named(nn.Module):
    """Linear layers by path, made of a seed and a size."""

    def __init__(self, layers: dict[str, tuple[int, int]]) -> None:
        super().__init__()
        for path, (seed, size) in layers.items():
            torch.manual_seed(seed)
            holder = self
            *around, name = path.split(".")
            for part in around:
                if not hasattr(holder, part):
                    holder.add_module(part, nn.Module())
                holder = getattr(holder, part)
            holder.add_module(name, nn.Linear(4, size, bias=False))


@pytest.mark.parametrize(
    ("in_b", "moved"),
    [
        ({"query": "q", "key": "k", "value": "v"}, {}),
        ({"query": "v", "value": "q"}, {"q": "query", "v": "value"}),
        ({"l.0.y": "h.1.x", "l.1.y": "h.0.x"}, {"h.0.x": "l.0.y", "h.1.x": "l.1.y"}),
        ({"a": "up", "b": "norm"}, {}),  # b only has them in another order.
    ],
    ids=range(4),
)
@pytest.mark.parametrize("is_one_size", [True, False])
def test_pairs_that_cross_against_their_names_are_moved(in_b, moved, is_one_size):
    """`in_b` says which weight of a has the numbers of one of b, `moved` where they should be."""
    in_a = sorted(in_b.values())
    size = {name: 4 if is_one_size else 4 + number for number, name in enumerate(in_a)}
    a = Named({name: (number, size[name]) for number, name in enumerate(in_a)})
    b = Named({name: (in_a.index(one), size[one]) for name, one in in_b.items()})
    found = {one.name: one.what for one in hl.compare(a, b).weights if "its numbers are in" in one.what}
    assert found.keys() == {f"{name}.weight" for name in moved if is_one_size}
    assert all(what.endswith(f"not in '{moved[name.removesuffix('.weight')]}.weight'") for name, what in found.items())
