"""Composites: each uses its modules in one of the ways in which real models do."""

from __future__ import annotations

import inspect
import operator
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.properties.containers import append, recall
from tests.properties.memories import use_with
from tests.properties.modules import SHAPE, Composite, Pair, Result, arguments, blend, use
from tests.properties.seams import call, call_forward, segment
from tests.properties.seams import function as do


class Root(Composite):
    """The model itself."""

    def __init__(self, body: nn.Module, packed: bool) -> None:
        super().__init__()
        self.body, self.packed = body, packed

    def forward(self, x: Tensor, bias: Tensor | None = None, memory: Any = None, *, scale: float = 1.0) -> Any:
        x = do("mul", operator.mul, x, scale)
        if bias is not None:
            x = do("add", operator.add, x, bias)
        y = use(self.body, x) if memory is None else self._remembered(x, memory)
        if not self.packed:
            return y
        return {"hidden": do("mul", operator.mul, y, 1.0), "pooled": (do("sum", Tensor.sum, y, -1), None)}

    def _remembered(self, x: Tensor, memory: Any) -> Tensor:
        """Read the caller's container, pass it to the body and write into it."""
        for earlier in recall(memory):
            x = do("add", operator.add, x, earlier)
        y = use_with(self.body, x, memory)
        append(memory, do("mul", operator.mul, y, 0.4))
        return y

    def encode(self, x: Tensor, bias: Tensor | None = None, memory: Any = None, *, scale: float = 1.0) -> Tensor:
        """A method that some cases call instead of the model."""
        return use(self.body, do("mul", operator.mul, x, scale))


class Residual(Composite):
    """x + child(x): the child's input has another consumer."""

    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.inner = child

    def forward(self, x: Tensor) -> Tensor:
        return do("add", operator.add, x, use(self.inner, x))


class Chain(Composite):
    """Children in a ModuleList, one after the other."""

    def __init__(self, *children: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(children)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = use(layer, x)
        return x


class Branches(Composite):
    """Children in a ModuleDict, called on the same input; returns a dict of their outputs."""

    def __init__(self, *children: nn.Module) -> None:
        super().__init__()
        self.branch = nn.ModuleDict({f"b{index}": child for index, child in enumerate(children)})

    def forward(self, x: Tensor) -> dict[str, Any]:
        outputs = {}
        for name, child in self.branch.items():
            args, kwargs = arguments(child, x)
            outputs[name] = call(child, *args, **kwargs)
        return outputs


class Repeat(Composite):
    """One child called several times in one forward."""

    def __init__(self, child: nn.Module, times: int) -> None:
        super().__init__()
        self.cell, self.times = child, times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = do("mul", operator.mul, use(self.cell, x), 0.5)
        return x


class Recursive(Composite):
    """Calls itself."""

    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.leaf = child

    def forward(self, x: Tensor, depth: int = 0) -> Tensor:
        if depth == 0:
            return use(self.leaf, x)
        half = do("mul", operator.mul, x, 0.5)
        deeper = call(self, do("mul", operator.mul, x, 0.9), depth=depth - 1)
        return do("add", operator.add, half, deeper)

    def arguments(self, x: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (x, 2), {}


class Pack(Composite):
    """Returns a structure of some form. No part depends on another, so their gradients are independent."""

    def __init__(self, child: nn.Module, form: str) -> None:
        super().__init__()
        self.inside, self.form = child, form

    def forward(self, x: Tensor) -> Any:
        made = use(self.inside, x)
        y = made * 1.0
        forms: dict[str, Callable[[], Any]] = {
            "tuple": lambda: (y, None, "text", made * 2),
            "list": lambda: [y, [made.sum(-1), 3]],
            "dict": lambda: {"hidden": y, "mask": y.detach() > 0, "none": None},
            "ordered": lambda: OrderedDict(z=y, a=made * 0.5),
            "dataclass": lambda: Result(y, extra=made.sum(0)),
            "named": lambda: Pair(y, (made * 0.5, {"deep": made.sum()})),
            "nested": lambda: ((y, {"states": [made * 0.1, None], "n": 7}), Result(made * 3, extra=(made.sum(1),))),
        }
        return forms[self.form]()


class Options(Composite):
    """Keyword-only arguments in addition to a positional one."""

    def __init__(self, child: nn.Module, shifted: bool) -> None:
        super().__init__()
        self.inner, self.shifted = child, shifted

    def forward(self, x: Tensor, power: int = 1, *, scale: float, shift: Tensor | None = None) -> Tensor:
        y = use(self.inner, x) * scale**power
        return y if shift is None else y + shift

    def arguments(self, x: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self.shifted:
            return (x, 2), {"shift": do("mul", operator.mul, x, 0.1), "scale": 0.5}
        return (x,), {"scale": 0.9}


class KeywordOnly(Composite):
    """No positional argument at all."""

    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.inner = child

    def forward(self, *, x: Tensor, gate: Tensor | None = None) -> Tensor:
        y = use(self.inner, x)
        return y if gate is None else y * gate

    def arguments(self, x: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (), {"x": x, "gate": do("tanh", Tensor.tanh, do("mul", operator.mul, x, 0.1))}


class Variadic(Composite):
    """*args and **kwargs."""

    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.inner = child

    def forward(self, *parts: Tensor, **named: Tensor) -> Tensor:
        total = parts[0]
        for part in (*parts[1:], *named.values()):
            total = total + part
        return use(self.inner, total)

    def arguments(self, x: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (x, do("mul", operator.mul, x, 0.1)), {"other": do("mul", operator.mul, x, 0.2)}


class ByName(Composite):
    """Passes the first argument to its child by keyword."""

    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.inner = child

    def forward(self, x: Tensor) -> Tensor:
        args, kwargs = arguments(self.inner, x)
        if args and not isinstance(self.inner, Variadic):
            names = list(inspect.signature(type(self.inner).forward).parameters)[1:]
            kwargs = {**dict(zip(names, args, strict=False)), **kwargs}
            args = ()
        return blend(call(self.inner, *args, **kwargs))


class Direct(Composite):
    """Calls child.forward instead of the child."""

    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.inner = child

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.inner, nn.LazyLinear):
            return use(self.inner, x)  # Torch initializes a lazy module in __call__.
        args, kwargs = arguments(self.inner, x)
        return blend(call_forward(self.inner, *args, **kwargs))


class Viewing(Composite):
    """Returns a view of its child's output."""

    def __init__(self, child: nn.Module, form: str) -> None:
        super().__init__()
        self.inner, self.form = child, form

    def forward(self, x: Tensor) -> Tensor:
        y = use(self.inner, x)
        if self.form == "transpose":
            return y.transpose(1, 2).transpose(1, 2)
        return y[:] if self.form == "slice" else y.reshape(2, 12).view(SHAPE)


class InPlace(Composite):
    """Overwrites its child's output."""

    def __init__(self, child: nn.Module, operation: str) -> None:
        super().__init__()
        self.target, self.operation = child, operation

    def forward(self, x: Tensor) -> Tensor:
        y = use(self.target, x)
        OVERWRITE[self.operation](y)
        return y


def _slice(y: Tensor) -> None:
    y[:, 0] = 0.25


def _out(y: Tensor) -> None:
    torch.mul(y.detach(), 2.0, out=y.detach())


def _numpy(y: Tensor) -> None:
    y.detach().numpy()[...] *= 0.5


OVERWRITE: dict[str, Callable[[Tensor], Any]] = {
    "add": lambda y: y.add_(1.0),
    "relu": torch.relu_,
    "slice": _slice,
    "out": _out,
    "data": lambda y: y.data.mul_(0.5),
    "numpy": _numpy,
    "foreach": lambda y: torch._foreach_mul_([y], 0.5),
}


class Mutated(Composite):
    """Gives its child a tensor to write into, and returns that tensor if `rereads`, otherwise the child's result."""

    def __init__(self, child: nn.Module, rereads: bool) -> None:
        super().__init__()
        self.writer, self.rereads = child, rereads

    def forward(self, x: Tensor) -> Tensor:
        own = x * 0.7
        result = call(self.writer, own)
        return own if self.rereads else result


class Reusing(Composite):
    """Calls a child that returns the same buffer each time."""

    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.reuser = child

    def forward(self, x: Tensor) -> Tensor:
        x = x + call(self.reuser, x)
        return x + call(self.reuser, x * 0.3)


class Segment(Composite):
    """Runs its child under activation checkpointing."""

    def __init__(self, child: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = child, reentrant

    def forward(self, x: Tensor) -> Tensor:
        return segment(lambda y: use(self.inner, y), x, self.reentrant)


class Unused(Composite):
    """Has a child that it never calls."""

    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.dead = child

    def forward(self, x: Tensor) -> Tensor:
        return x * 0.9
