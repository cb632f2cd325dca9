"""`Script`: a module whose forward is a list of steps, with methods of every kind and bare parameters."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.properties.modules import SHAPE, fail_if_armed, use
from tests.properties.seams import call, method, read, segment
from tests.properties.seams import function as do
from tests.properties.steps import STEPS, Step, step


def squash(value: Tensor, *, amount: float = 0.5) -> Tensor:
    """Stand in for a user's function that is stored on a module."""
    return do("mul", operator.mul, do("tanh", torch.tanh, value), amount)


def is_plain_linear(child: nn.Module) -> bool:
    """Return True if a child is a linear layer without hooks and without a replaced forward."""
    return type(child) is nn.Linear and "forward" not in vars(child) and not child._forward_hooks


class Tools(nn.Module):
    """The base class of Script, with methods to inherit."""

    FACTOR = 0.75

    def damped(self, value: Tensor, factor: float = 0.5) -> Tensor:
        return do("mul", operator.mul, value, factor)

    def mixed(self, value: Tensor, other: Tensor, *, share: float = 0.25) -> Tensor:
        part = do("mul", operator.mul, other, share)
        return do("add", operator.add, value, part)

    def halves(self, value: Tensor) -> dict[str, Any]:
        left, right = do("chunk", Tensor.chunk, value, 2, -1)
        return {"left": do("mul", operator.mul, left, 0.5), "rest": (right, None)}

    @staticmethod
    def shifted(value: Tensor, by: float = 0.1) -> Tensor:
        return do("add", operator.add, value, by)

    @classmethod
    def scaled(cls, value: Tensor) -> Tensor:
        return do("mul", operator.mul, value, cls.FACTOR)


class Script(Tools):
    """Runs its steps one after the other."""

    def __init__(self, *children: nn.Module, steps: tuple[str, ...], tied: bool) -> None:
        super().__init__()
        self.inner = nn.ModuleList(children)
        self.steps = steps
        self.act, self.squash = F.gelu, squash
        self.W, self.V = nn.Parameter(torch.randn(4, 4) * 0.4), nn.Parameter(torch.randn(4, 4) * 0.4)
        self.U = self.W if tied else nn.Parameter(torch.randn(4, 4) * 0.4)
        self.row, self.table = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(5, 4), requires_grad=not tied)
        self.rows = nn.ParameterList([torch.randn(4), torch.randn(4)])
        self.register_buffer("mask", torch.linspace(0.5, 1.5, 4))
        self.register_buffer("count", torch.zeros(()))
        self.plain = tuple(index for index, child in enumerate(children) if is_plain_linear(child))
        if tied and self.plain:
            children[self.plain[0]].weight = self.V

    def forward(self, x: Tensor) -> Tensor:
        h = do("mul", operator.mul, x, 0.5)
        for name in self.steps:
            h = STEPS[name](self, h, x)
        return h

    def mixed(self, value: Tensor, other: Tensor, *, share: float = 0.25) -> Tensor:
        return super().mixed(do("tanh", torch.tanh, value), other, share=share)

    def countdown(self, value: Tensor, depth: int) -> Tensor:
        value = do("mul", operator.mul, value, 0.9)
        return value if depth == 0 else method(self, "countdown", value, depth - 1)

    def through_children(self, value: Tensor) -> Tensor:
        for child in self.inner:
            value = use(child, value)
        return value

    def offset(self) -> Tensor:
        return read(self, "row")

    def fragile(self, value: Tensor) -> Tensor:
        return method(self, "damped", fail_if_armed(value))


@step
def inherited_method(script: Script, h: Tensor, x: Tensor) -> Tensor:
    h = method(script, "damped", h)
    h = method(script, "damped", h, factor=1.5)
    return method(script, "damped", value=h)


@step
def overridden_method(script: Script, h: Tensor, x: Tensor) -> Tensor:
    return method(script, "mixed", h, x, share=0.3)


@step
def method_that_returns_a_structure(script: Script, h: Tensor, x: Tensor) -> Tensor:
    halves = method(script, "halves", h)
    return do("cat", torch.cat, (halves["left"], halves["rest"][0]), -1)


@step
def static_and_class_methods(script: Script, h: Tensor, x: Tensor) -> Tensor:
    return method(script, "scaled", method(script, "shifted", h, by=0.2))


@step
def stored_callables(script: Script, h: Tensor, x: Tensor) -> Tensor:
    return method(script, "squash", method(script, "act", h), amount=0.7)


@step
def recursive_method(script: Script, h: Tensor, x: Tensor) -> Tensor:
    return method(script, "countdown", h, 2)


@step
def fragile_method(script: Script, h: Tensor, x: Tensor) -> Tensor:
    return method(script, "fragile", h)


@step
def bypassing_the_instance(script: Script, h: Tensor, x: Tensor) -> Tensor:
    return Script.shifted(Tools.damped(script, h, 0.8))


@step
def children(script: Script, h: Tensor, x: Tensor) -> Tensor:
    return method(script, "through_children", h)


@step
def method_of_a_child(script: Script, h: Tensor, x: Tensor) -> Tensor:
    for child in script.inner:
        h = method(child, "mixed", h, x) if isinstance(child, Script) else h
    return h


@step
def parameter_product(script: Script, h: Tensor, x: Tensor) -> Tensor:
    weight = read(script, "W")
    return do("matmul", operator.matmul, do("matmul", torch.matmul, h, weight), weight)


@step
def parameter_linear(script: Script, h: Tensor, x: Tensor) -> Tensor:
    return do("linear", F.linear, h, read(script, "U"), read(script, "row"))


@step
def parameter_transposed(script: Script, h: Tensor, x: Tensor) -> Tensor:
    weight = do("T", lambda tensor: tensor.T, read(script, "V"))
    return do("matmul", operator.matmul, h, do("clone", Tensor.clone, weight))


@step
def parameter_contracted(script: Script, h: Tensor, x: Tensor) -> Tensor:
    return do("einsum", torch.einsum, "bij,jk->bik", h, read(script, "W"))


@step
def parameter_cast(script: Script, h: Tensor, x: Tensor) -> Tensor:
    weight = do("to", Tensor.to, read(script, "V"), torch.float64)
    product = do("matmul", operator.matmul, do("double", Tensor.double, h), weight)
    return do("to", Tensor.to, product, h.dtype)


@step
def parameter_row(script: Script, h: Tensor, x: Tensor) -> Tensor:
    row = do("getitem", operator.getitem, read(script, "W"), 1)
    wide = do("expand", Tensor.expand, read(script, "row"), SHAPE)
    return do("add", operator.add, do("mul", operator.mul, h, row), wide)


@step
def parameter_looked_up(script: Script, h: Tensor, x: Tensor) -> Tensor:
    order = do("tensor", torch.tensor, [2, 0, 1])
    found = do("getitem", operator.getitem, read(script, "W"), order)
    return do(
        "add",
        operator.add,
        do("add", operator.add, h, found),
        do("embedding", F.embedding, order, read(script, "table")),
    )


@step
def parameters_together(script: Script, h: Tensor, x: Tensor) -> Tensor:
    both = do("stack", torch.stack, [read(script, "W"), read(script, "V")])
    both = do("mul", operator.mul, both, 0.5)  # Otherwise the gradients of W and V would share memory.
    return do("matmul", operator.matmul, h, do("sum", Tensor.sum, both, 0))


@step
def parameter_from_a_method(script: Script, h: Tensor, x: Tensor) -> Tensor:
    return do("add", operator.add, h, method(script, "offset"))


@step
def parameter_of_a_child(script: Script, h: Tensor, x: Tensor) -> Tensor:
    for index in script.plain:
        h = do("linear", F.linear, h, read(script.inner[index], "weight"))
    return h


@step
def parameter_given_to_a_child(script: Script, h: Tensor, x: Tensor) -> Tensor:
    wide = do("expand", Tensor.expand, read(script, "row"), SHAPE)
    for index in script.plain:
        h = do("add", operator.add, h, call(script.inner[index], wide))
    return h


@step
def parameters_in_a_list(script: Script, h: Tensor, x: Tensor) -> Tensor:
    for index in range(len(script.rows)):
        h = do("mul", operator.mul, h, read(script.rows, str(index)))
    return h


@step
def buffers(script: Script, h: Tensor, x: Tensor) -> Tensor:
    return do("mul", operator.mul, h, read(script, "mask"))


@step
def buffer_written(script: Script, h: Tensor, x: Tensor) -> Tensor:
    with torch.no_grad():
        do("add_", Tensor.add_, read(script, "count"), 1.0)
    return do("sub", operator.sub, h, do("mul", operator.mul, read(script, "count"), 0.01))


@step
def buffer_replaced(script: Script, h: Tensor, x: Tensor) -> Tensor:
    script.mask = do("mul", operator.mul, read(script, "mask"), 0.9)
    return do("add", operator.add, h, read(script, "mask"))


def _segment(reentrant: bool) -> Step:
    def run(script: Script, h: Tensor, x: Tensor) -> Tensor:
        def inside(y: Tensor) -> Tensor:
            y = method(script, "damped", do("matmul", operator.matmul, y, read(script, "V")))
            return do("add", operator.add, y, method(script, "mixed", y, y))

        return segment(inside, h, reentrant)

    return run


STEPS |= {"checkpointed_members": _segment(False), "checkpointed_members_reentrant": _segment(True)}
