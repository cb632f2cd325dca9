"""What must come out: the same network with recording and intervening written by hand at its call sites.

While an `Oracle` runs its model, `Composite.call` leads to `Oracle.call`: it counts the calls, deep-copies what goes in
and out at that moment, and applies the interventions with plain code. Checkpointed segments run as they are, without
recomputation. A gradient is followed by `Tap`, an identity put into the graph at the place itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tests.properties.modules import Composite
from tests.properties.structures import at, copied, each, flat, picked, replaced, written

Receiver = Callable[[Tensor], Tensor]


class Halt(BaseException):
    """Ends a forward of the oracle."""


class NeverFired(Exception):
    """A gradient was asked for by name where none can be."""


class Tap(torch.autograd.Function):
    """An identity whose gradient goes through some functions, one after the other."""

    @staticmethod
    def forward(context: Any, tensor: Tensor, receivers: list[Receiver]) -> Tensor:
        context.receivers = receivers
        context.set_materialize_grads(False)
        return tensor.clone()

    @staticmethod
    def backward(context: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:
        for receive in context.receivers if grad is not None else ():
            grad = receive(grad)
        return grad, None


@dataclasses.dataclass(eq=False)
class Watch:
    """One action at one place of one module. `function(part, number)` gives what is kept, or what goes on instead."""

    text: str
    module: nn.Module
    port: str
    keys: tuple[Any, ...]
    indices: tuple[Any, ...]
    number: int | None
    kind: str
    function: Callable[[Any, int], Any]
    exact: bool = True
    family: list[Watch] = dataclasses.field(default_factory=list, repr=False)  # Those that one `[*]` stands for.
    active: bool = False
    blocks: set[object] = dataclasses.field(default_factory=set)
    calls: int = 0
    fired: int = 0
    fired_in_forward: bool = False
    first: int = 0  # When it first kept a value.
    hopeless: int = -1  # How many values there were when it was last found that no gradient can come.
    values: dict[tuple[int, int], Any] = dataclasses.field(default_factory=dict)

    @property
    def acts(self) -> bool:
        return self.active or bool(self.blocks)

    @property
    def is_silent(self) -> bool:
        return not any(watch.fired for watch in self.family)

    @property
    def is_gradient(self) -> bool:
        return self.port.startswith("grad")

    @property
    def is_before(self) -> bool:
        return self.kind != "skip" and "input" in self.port


@dataclasses.dataclass
class Gradients:
    """The gradients in one nested value, as they arrive."""

    value: Any
    tensors: dict[int, Tensor] = dataclasses.field(default_factory=dict)

    def whole(self) -> Any:
        """Return a value of the same structure, None where there is no gradient."""
        positions = iter(range(len(flat(self.value))))
        return each(lambda _: self.tensors.get(next(positions)), self.value)


@dataclasses.dataclass
class Call:
    """One call of a module: the functions that each tapped tensor's gradient goes through."""

    module: nn.Module
    stamp: int
    taps: list[tuple[Tensor, list[Receiver]]] = dataclasses.field(default_factory=list)


class Arguments:
    """What a module is called with."""

    def __init__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args, self.kwargs = args, kwargs
        forward = module.__dict__.get("forward")
        bound_forward = forward if forward is not None else type(module).forward.__get__(module)
        self.signature = inspect.signature(bound_forward)

    def first(self) -> Any:
        """Return the first argument, however it was passed."""
        return self.args[0] if self.args else self.kwargs[self._first_name()]

    def by_name(self) -> dict[str, Any]:
        """Return all arguments by the names of their parameters."""
        return {**self.signature.bind_partial(*self.args).arguments, **self.kwargs}

    def change(self, port: str, function: Callable[[Any], Any]) -> None:
        """Replace the first argument, or all of them, by what `function` gives for it."""
        if port.endswith("inputs"):
            self._replace_all(function(self.by_name()))
        elif self.args:
            self.args = (function(self.args[0]), *self.args[1:])
        else:
            name = self._first_name()
            self.kwargs = {**self.kwargs, name: function(self.kwargs[name])}

    def _first_name(self) -> str:
        return next(name for name in self.signature.parameters if name in self.kwargs)

    def _replace_all(self, values: dict[str, Any]) -> None:
        positional: list[Any] = []
        for name, parameter in self.signature.parameters.items():
            if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
                positional += values.get(name, ())
            elif len(positional) < len(self.args):
                positional.append(values[name])
        self.args = tuple(positional)
        taken = list(self.signature.parameters)[: len(positional)]
        variadic = [name for name, one in self.signature.parameters.items() if one.kind is one.VAR_POSITIONAL]
        self.kwargs = {name: value for name, value in values.items() if name not in (*taken, *variadic)}


class Oracle:
    """Runs one model with watches on it."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.watches: list[Watch] = []
        self.stops: list[Watch] = []  # The forward ends when all of these have fired in it.
        self.stamps = self.passes = self.seen = 0
        self.suspended = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model once; None if a stop ended it."""
        for watch in self.watches:
            watch.fired_in_forward = False
        with self._instead():
            try:
                return self.call(self.model, self.model, args, kwargs)
            except Halt:
                return None

    def backward(self, loss: Tensor, retain: bool) -> None:
        """Run one backward pass."""
        self.passes += 1
        loss.backward(retain_graph=retain)

    def call(self, child: nn.Module, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Stand at a call site."""
        if self.suspended:
            return run(*args, **kwargs)
        if isinstance(child, nn.LazyLinear) and child.has_uninitialized_params():
            child._infer_parameters(child, args, kwargs)  # As torch does before it calls any forward.
        self.stamps += 1
        call = Call(child, self.stamps)
        here = self._watches_at(child)
        arguments = Arguments(child, args, kwargs)
        for watch, number in here:
            if watch.is_before:
                arguments.change(watch.port, lambda value, w=watch, n=number: self._pass(w, n, call, value))
        output = self._result(child, run, arguments, here)
        call.taps.clear()  # What was tapped as an argument may come out again, written to: that is another value.
        for watch, number in here:
            if not watch.is_before and watch.kind != "skip":
                output = self._pass(watch, number, call, output)
        return output

    def _watches_at(self, child: nn.Module) -> list[tuple[Watch, int]]:
        """Count the call for each watch on the module; return those that it concerns, with its number."""
        here = []
        for watch in self.watches:
            if watch.module is child and watch.acts:
                if watch.number in (None, watch.calls):
                    here.append((watch, watch.calls))
                watch.calls += 1
        return here

    def _result(self, child: nn.Module, run: Callable[..., Any], arguments: Arguments, here: list[Any]) -> Any:
        skips = [watch for watch, _ in here if watch.kind == "skip"]
        for watch in skips:
            watch.fired += 1
        if skips:
            return skips[-1].function(arguments.first(), 0)
        if type(child) is not nn.Sequential:
            return run(*arguments.args, **arguments.kwargs)
        value = arguments.first()
        for step in child:
            value = self.call(step, step, (value,), {})
        return value

    def _pass(self, watch: Watch, number: int, call: Call, value: Any) -> Any:
        """Let a value pass a watch; return what goes on."""
        part = at(value, watch.keys)
        if watch.is_gradient:
            return replaced(value, watch.keys, self._tapped(watch, number, call, part))
        watch.fired += 1
        watch.fired_in_forward = True
        if watch.kind == "capture":
            seen = picked(part, watch.indices) if watch.indices else part
            watch.values[0, call.stamp] = watch.function(copied(seen), number)
            self.seen += 1
            watch.first = watch.first or self.seen
            self._stop_if_complete(watch)
            return value
        with self._suspension():
            new = watch.function(picked(part, watch.indices) if watch.indices else part, number)
        return value if new is None else replaced(value, watch.keys, written(part, watch.indices, new))

    def _stop_if_complete(self, watch: Watch) -> None:
        if watch in self.stops and all(one.fired_in_forward for one in self.stops if one.acts):
            raise Halt

    def _tapped(self, watch: Watch, number: int, call: Call, part: Any) -> Any:
        """Return the part with a tap on every tensor that a gradient can reach."""
        tensors = [leaf for leaf in flat(part) if isinstance(leaf, Tensor)]
        watch.fired += 1
        if not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)):
            if watch.exact:
                raise NeverFired(watch.text)
            watch.hopeless = len(watch.values)
            return part
        positions = iter(range(len(tensors)))
        structure = each(lambda _: torch.empty(0), part)

        own: list[tuple[Tensor, Tensor]] = []  # A tensor that is there several times stays one tensor.

        def tap(tensor: Tensor) -> Tensor:
            receive = self._receiver(watch, number, call, structure, next(positions))
            if not tensor.requires_grad:
                return tensor
            tensor = next((tapped for original, tapped in own if original is tensor), tensor)
            for tapped, receivers in call.taps:
                if tapped is tensor:
                    receivers.append(receive)
                    return tensor
            receivers = [receive]
            tapped = Tap.apply(tensor, receivers)
            call.taps.append((tapped, receivers))
            own.append((tensor, tapped))
            return tapped

        return each(tap, part)

    def _receiver(self, watch: Watch, number: int, call: Call, structure: Any, position: int) -> Receiver:
        def receive(grad: Tensor) -> Tensor:
            chosen = picked(grad, watch.indices)
            if watch.kind == "capture":
                gradients = watch.values.setdefault((self.passes, call.stamp), Gradients(structure))
                gradients.tensors[position] = watch.function(chosen.detach().clone(), number)
                return grad
            with self._suspension():
                new = watch.function(chosen, number)
            return grad if new is None else written(grad, watch.indices, new)

        return receive

    @contextlib.contextmanager
    def _suspension(self) -> Iterator[None]:
        before, self.suspended = self.suspended, True
        try:
            yield
        finally:
            self.suspended = before

    @contextlib.contextmanager
    def _instead(self) -> Iterator[None]:
        """Stand at every call site of every composite."""
        before = Composite.call, Composite.call_forward, Composite.checkpoint
        Composite.call = lambda _, child, *args, **kwargs: self.call(child, child, args, kwargs)
        Composite.call_forward = lambda _, child, *args, **kwargs: self.call(child, child.forward, args, kwargs)
        Composite.checkpoint = lambda _, function, x, reentrant: function(x)
        try:
            yield
        finally:
            Composite.call, Composite.call_forward, Composite.checkpoint = before
