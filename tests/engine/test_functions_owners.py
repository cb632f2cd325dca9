"""Which functions belong to a module: those called in its helpers and methods do, those in other forwards do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hookline as hl
from tests.support.models import Returns, Transformer, words
from tests.support.states import same


def helper(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


class Forwards:
    """Has a forward, but is not a module."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x, -1)


class Shared(nn.Module):
    """Its forward and a helper method are called by its parent."""

    def help(self, x: Tensor) -> Tensor:
        return torch.softmax(x, -1)

    def forward(self, x: Tensor) -> Tensor:
        return self.help(x)


class Renamed(Shared):
    """Its forward is a function of another name."""

    forward = Shared.help


class Parent(nn.Module):
    """Reaches a softmax in one of many ways."""

    def __init__(self, way: Callable[[Parent, Tensor], Any]) -> None:
        super().__init__()
        self.child = Shared()
        self.renamed = Renamed()
        self.sequence = nn.Sequential(nn.Softmax(-1), nn.Identity())
        self.way = way

    def own(self, x: Tensor) -> Tensor:
        return torch.softmax(x, -1)

    def forward(self, x: Tensor) -> Tensor:
        self.way(self, x)
        return torch.relu(x)


OWN: dict[str, Callable[[Parent, Tensor], Any]] = {
    "helper function": lambda parent, x: helper(x),
    "method": lambda parent, x: parent.own(x),
    "nested function": lambda parent, x: (lambda y: torch.softmax(y, -1))(x),
    "generator": lambda parent, x: next(torch.softmax(row, -1) for row in [x]),
    "method of a child": lambda parent, x: parent.child.help(x),
    "forward of another class": lambda parent, x: Forwards().forward(x),
    "after a child": lambda parent, x: torch.softmax(parent.sequence(x), -1),
}
OTHERS: dict[str, Callable[[Parent, Tensor], Any]] = {
    "child": lambda parent, x: parent.child(x),
    "forward of a child": lambda parent, x: parent.child.forward(x),
    "class of a child": lambda parent, x: type(parent.child).forward(parent.child, x),
    "module of torch": lambda parent, x: parent.sequence[0](x),
    "grandchild": lambda parent, x: parent.sequence(x),
    "forward of another name": lambda parent, x: parent.renamed(x),
    "module that is not a child": lambda parent, x: nn.Softmax(-1)(x),
}


@pytest.mark.parametrize("way", OWN)
def test_what_helpers_run_belongs_to_the_module_whose_forward_called_them(way: str) -> None:
    model, x = Parent(OWN[way]), torch.randn(2, 3)
    with hl.capture(model, "/softmax", keep="all") as acts:
        model(x)
    assert len(acts.calls("/softmax")) == 1
    torch.testing.assert_close(acts["/softmax"].sum(-1), torch.ones(2))
    with pytest.raises(hl.NeverFired, match="'child/softmax'"):
        hl.run(model, x, capture="child/softmax")


def test_a_forward_that_calls_that_of_its_base_class_is_one_forward() -> None:
    class Heir(Shared):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * torch.softmax(x, 0)

    x = torch.randn(2, 3)
    _, acts = hl.run(Heir(), x, capture="/*")
    assert list(acts) == ["/softmax#0", "/softmax#1", "/mul#0"]
    assert acts["/softmax#0"].equal(torch.softmax(x, -1))


@pytest.mark.parametrize("way", OTHERS)
@pytest.mark.parametrize("hooked", [True, False], ids=["child hooked", "child not hooked"])
def test_what_the_forward_of_another_module_runs_is_not_the_callers(way: str, hooked: bool) -> None:
    model, x = Parent(OTHERS[way]), torch.randn(2, 3)
    with hl.capture(model, "/*", keep="all") as acts, hl.edit(model, "/*", lambda value: value):
        if hooked:
            with hl.edit(model, ["child/*", "sequence.0/*"], lambda value: value + 0, check=False):
                model.child(x), model.sequence(x), model(x)
        else:
            model(x)
    assert list(acts) == ["/relu#0"]
    assert len(acts.calls("/relu#0")) == 1


def test_a_child_of_the_same_class_has_functions_of_its_own() -> None:
    class Node(nn.Module):
        def __init__(self, child: nn.Module | None = None) -> None:
            super().__init__()
            self.child = child

        def forward(self, x: Tensor) -> Tensor:
            x = torch.softmax(x, -1)
            return x if self.child is None else self.child.forward(x)

    x = torch.randn(2, 3)
    with hl.capture(model := Node(Node()), "/softmax", keep="all") as acts:
        model(x)
    assert same(acts.calls("/softmax"), [torch.softmax(x, -1)])


def test_parent_and_child_are_hooked_at_once() -> None:
    model, x = Parent(lambda parent, x: parent.child(parent.child.help(x))), torch.randn(2, 3)
    with hl.capture(model, "/softmax", "child/softmax", "child:input", keep="all") as acts:
        with hl.edit(model, "child/softmax", lambda value: value * 2), hl.edit(model, "/softmax", torch.neg):
            model(x)
    expected = torch.softmax(x, -1)
    assert acts["/softmax"].equal(expected)
    assert acts["child:input"].equal(-expected)
    assert acts["child/softmax"].equal(torch.softmax(-expected, -1))
    assert [len(acts.calls(site)) for site in acts] == [1, 1, 1]


def test_what_edits_and_transforms_compute_is_not_counted() -> None:
    model, x = Transformer(), words()

    def busy(value: Tensor) -> Tensor:
        return torch.softmax(torch.softmax(value, -1) + 1, -1)

    with hl.capture(model, "h.0.attn/softmax", "h.0/add", "h.0/*", keep="all", transform=busy) as acts:
        with (
            hl.edit(model, "h.0.attn/softmax", busy),
            hl.edit(model, "h.0.attn", busy),
            hl.edit(model, "h.0/add", busy),
        ):
            model(x)
    assert [site for site in acts if "#" in site] == ["h.0/add#0", "h.0/gelu#0", "h.0/add#1"]
    assert [len(acts.calls(site)) for site in ("h.0.attn/softmax", "h.0/add", "h.0/gelu#0")] == [1, 2, 1]


def test_only_the_outermost_function_counts() -> None:
    model, x = Returns(lambda x: F.softmax(F.gumbel_softmax(x, dim=-1), dim=-1)), torch.randn(2, 3)
    with hl.capture(model, "/*", keep="all") as acts:
        model(x)
    assert list(acts) == ["/gumbel_softmax#0", "/softmax#0"]


@pytest.mark.parametrize("direct", [False, True], ids=["called", "forward called"])
def test_each_level_of_a_recursion_counts_for_itself(direct: bool) -> None:
    class Recursive(nn.Module):
        def forward(self, x: Tensor, depth: int) -> Tensor:
            x = torch.softmax(x, -1)
            return x * 2 if depth == 0 else (self.forward if direct else self)(x, depth - 1) * 3

    model, x = Recursive(), torch.randn(2, 3)
    with hl.capture(model, "/softmax", "/mul#0", "#2/mul", "#0/mul", keep="all") as acts:
        output = model(x, 2)
    seen = [torch.softmax(x, -1)]
    seen += [torch.softmax(seen[0], -1)]
    seen += [torch.softmax(seen[1], -1)]
    assert same(acts.calls("/softmax"), seen)
    assert same(acts.calls("/mul#0"), [seen[2] * 2, seen[2] * 2 * 3, output])
    assert acts["#2/mul"].equal(seen[2] * 2)
    assert acts["#0/mul"].equal(output)
