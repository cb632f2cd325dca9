"""The expected results: the same network, with recording and changes written by hand at its call sites.

While an `Oracle` runs its model, the seams call it. It counts the calls, deep-copies the values that go in and out, and
applies the changes with plain code. Checkpointed segments run without recomputation. `Tap`, an identity in the graph at
the place, follows a gradient.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.properties import arguments, layers, seams
from tests.properties.arguments import Arguments
from tests.properties.lending import Loan, settled, stuck_in, substituted, tensors_in
from tests.properties.structures import at, copied, each, flat, picked, replaced, written
from tests.properties.watches import (
    Call,
    Frame,
    Gradients,
    Halt,
    NeverFired,
    Occurrence,
    Receiver,
    SiteError,
    Spot,
    Tap,
    Watch,
)

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList)


class Oracle:
    """Runs one model with watches on it."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.watches: list[Watch] = []
        self.stops: list[Watch] = []  # The forward ends when all of these have fired in it.
        self.stamps = self.passes = self.seen = 0
        self.suspended = False
        self.holders = holders(model)
        self._restart()

    def _restart(self) -> None:
        self.frames: list[Frame] = []
        self.calls_of: Counter[nn.Module] = Counter()
        self.uses: Counter[Spot] = Counter()  # Uses of parameters in this forward of the model.
        self.followed: list[tuple[Tensor, Any]] = []  # Values read from parameters, and views of them; their parameter.

    def names(self) -> dict[str, nn.Module]:
        """Return every callable module by every name, except parametrizations, which the oracle can't see."""
        return {
            name: module
            for name, module in self.model.named_modules(remove_duplicate=False)
            if not isinstance(module, CONTAINERS) and "parametrizations" not in name
        }

    def owners(self) -> dict[str, Any]:
        """Return everything that a path may name: modules, and the holders of each parameter and buffer."""
        found: dict[str, Any] = self.names()
        for path, module in self.model.named_modules(remove_duplicate=False):
            for name in (*module._parameters, *module._buffers):
                if (module, name) in self.holders:
                    found[f"{path}.{name}".lstrip(".")] = self.holders[module, name]
        return found

    def forward(self, run: Callable[..., Any], method: str, *args: Any, **kwargs: Any) -> Any:
        """Run the model once through `run`, or run its method; return None if a stop ended it."""
        for watch in self.watches:
            watch.fired_in_forward = False
        self._restart()
        with self._instead():
            try:
                if method:
                    return self.method(self.model, method, args, kwargs)
                return self.call(self.model, run, args, kwargs)
            except Halt:
                return None

    def backward(self, loss: Tensor, retain: bool) -> None:
        """Run one backward pass."""
        self.passes += 1
        loss.backward(retain_graph=retain)

    def call(self, child: nn.Module, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle a call of a module."""
        if self.suspended:
            return run(*args, **kwargs)
        if isinstance(child, nn.LazyLinear) and child.has_uninitialized_params():
            child._infer_parameters(child, args, kwargs)  # Torch does this before any forward.
        frame = self._new_frame(child)
        given = Arguments(arguments.of_module(child), args, kwargs)
        return self._around([Occurrence(Spot(child))], given, lambda: self._in_frame(frame, run, given))

    def _new_frame(self, module: nn.Module) -> Frame:
        frame = Frame(module, self.calls_of[module])
        self.calls_of[module] += 1
        for watch in self.watches:
            if watch.spot.owner is module and watch.spot.member.startswith("/") and watch.acts:
                frame.numbers[watch] = watch.calls
                watch.calls += 1
        return frame

    def _in_frame(self, frame: Frame, run: Callable[..., Any], given: Arguments) -> Any:
        self.frames.append(frame)
        try:
            return layers.forward_of(frame.module, run)(*given.args, **given.kwargs)
        finally:
            self.frames.pop()

    def method(self, owner: nn.Module, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle a call of a method."""
        stored = getattr(owner, name)
        run = (lambda *args: self.function("gelu", stored, args, {})) if stored is F.gelu else stored
        if self.suspended:
            return run(*args, **kwargs)
        given = Arguments(arguments.of_method(stored), args, kwargs)
        return self._around([Occurrence(Spot(owner, f"{name}()"))], given, lambda: run(*given.args, **given.kwargs))

    def function(self, name: str, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle a torch function, which belongs to the innermost forward and to the parameters that it takes."""
        if self.suspended:
            return run(*args, **kwargs)
        sources = self._sources((args, kwargs))
        follows = bool(sources) and is_followed(name, args)
        here = self._occurrences(name, [] if follows else sources)
        given = Arguments(arguments.of_function(name), args, kwargs)
        target = written_by(name, args, kwargs)
        if target is None:
            output = self._around(here, given, lambda: run(*given.args, **given.kwargs))
        elif not self._concerned(here):
            output = self._around(here, given, lambda: (run(*given.args, **given.kwargs), target)[1])
        else:
            output = self._write(target, here, given, lambda: on_a_copy(run, given))
        if follows:
            self.followed += [(output, source) for source in sources]
        return output

    def _write(self, target: Tensor, here: list[Occurrence], given: Arguments, run: Callable[[], Any]) -> Tensor:
        """Write the result of a function, or its replacement, into the tensor that the function writes into."""
        try:
            return target.copy_(self._around(here, given, run, lambda value: target.clone().copy_(value)))
        except Halt as halt:
            if halt.passing is not None:
                target.copy_(halt.passing)
            raise

    def _occurrences(self, name: str, sources: list[Any]) -> list[Occurrence]:
        """Count a function in the running forward and for each parameter that it takes."""
        found = []
        if self.frames:
            frame = self.frames[-1]
            found.append(Occurrence(Spot(frame.module, f"/{name}"), frame.functions[name], frame))
            frame.functions[name] += 1
        for spot in (Spot(source, f"/{name}") for source in sources):
            found.append(Occurrence(spot, self.uses[spot]))
            self.uses[spot] += 1
        return found

    def read(self, owner: nn.Module, name: str) -> Tensor:
        """Handle a read of a parameter or buffer."""
        value = getattr(owner, name)
        source = self.holders.get((owner, name))
        if self.suspended or source is None:
            return value
        call = self._new_call()
        for watch, number in self._concerned([Occurrence(Spot(source, ":param"))], counting=True):
            value = self._pass(watch, number, call, value)
        self.followed.append((value, source))
        return value

    def segment(self, function: Callable[..., Any], x: Tensor, reentrant: bool) -> Any:
        """Handle a checkpointed segment."""
        return function(x)

    def _around(
        self,
        here: list[Occurrence],
        given: Arguments,
        run: Callable[[], Any],
        stand_in: Callable[[Any], Any] = lambda value: value,
    ) -> Any:
        """Pass the arguments through the watches, run the call or use a skip's value, and pass the result through."""
        call = self._new_call()
        call.given = given.args, given.kwargs
        watches = self._concerned(here, counting=True)
        skips = [watch for watch, _ in watches if watch.kind == "skip"]
        for watch, number in watches:
            watch.fired += watch.kind == "skip"
            if watch.is_before and not (given.is_empty and watch.port.endswith("input")):
                given.change(watch.port, lambda value, w=watch, n=number: self._pass(w, n, call, value))
                given.args, given.kwargs = substituted((given.args, given.kwargs), call.tapped)
        loan = Loan(call.given, (given.args, given.kwargs))
        call.entered = tensors_in((call.given, given.args, given.kwargs))
        try:
            output = stand_in(skips[-1].function(given.first(), 0)) if skips else run()
        finally:
            loan.bring_home()
        output = loan.home(output)
        call.taps.clear()  # A tapped argument that comes out again may have been written to, and is another value.
        call.tapped.clear()
        for watch, number in watches:
            if not watch.is_before and watch.kind != "skip":
                try:
                    output = self._pass(watch, number, call, output)
                except Halt as halt:
                    halt.passing = output
                    raise
        return output

    def _concerned(self, here: list[Occurrence], counting: bool = False) -> list[tuple[Watch, int]]:
        """Return the watches for a call with its number for each; if `counting`, count a call without a number."""
        found = []
        for watch in self.watches:
            occurrence = next((one for one in here if one.spot == watch.spot), None)
            if occurrence is None or not watch.acts:
                continue
            number = watch.calls if occurrence.number is None else occurrence.number
            within = None if occurrence.frame is None else occurrence.frame.numbers.get(watch)
            if watch.number in (None, number) and watch.within in (None, within):
                found.append((watch, number))
            if counting and occurrence.number is None:
                watch.calls += 1
        return found

    def _new_call(self) -> Call:
        self.stamps += 1
        return Call(self.stamps)

    def _sources(self, value: Any) -> list[Any]:
        """Return the parameters among the arguments of a function, each once."""
        tensors = tensors_in(value)
        found = [source for tensor, source in self.followed if any(tensor is one for one in tensors)]
        return list(dict.fromkeys(found))

    def _pass(self, watch: Watch, number: int, call: Call, value: Any) -> Any:
        """Pass a value through a watch; return the value to go on with."""
        try:
            part = at(value, watch.keys)
        except KeyError:
            watch.fired += 1
            raise SiteError(watch.text) from None
        if part is None and watch.indices:
            watch.fired += 1
            raise SiteError(watch.text)
        if watch.is_gradient and watch.is_before:
            return replaced(value, watch.keys, self._tapped(watch, number, call, part, []))
        if watch.is_gradient:
            stuck = stuck_in(value, call.given, call.entered)
            tapped = replaced(value, watch.keys, self._tapped(watch, number, call, part, stuck))
            return self._put_in_place(value, tapped, call)
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
        return value if new is None else settled(value, replaced(value, watch.keys, written(part, watch.indices, new)))

    def _put_in_place(self, value: Any, tapped: Any, call: Call) -> Any:
        """Write tapped tensors into the output's containers, and those made in the call into the arguments'."""
        tapped = substituted(tapped, call.tapped)
        loan = Loan(value, tapped)
        loan.bring_home(restoring=False)
        made = [(old, new) for old, new in call.tapped if not any(old is one for one in call.entered)]
        Loan(call.given, substituted(call.given, made)).bring_home(restoring=False)
        return loan.home(tapped)

    def _stop_if_complete(self, watch: Watch) -> None:
        if watch in self.stops and all(one.fired_in_forward for one in self.stops if one.acts):
            raise Halt

    def _tapped(self, watch: Watch, number: int, call: Call, part: Any, stuck: list[Tensor]) -> Any:
        """Return the part with a tap on every tensor that a gradient can reach, except the stuck ones."""
        tensors = tensors_in(part)
        free = [tensor for tensor in tensors if not any(tensor is one for one in stuck)]
        watch.fired += 1
        if not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in free)):
            if watch.exact:
                raise NeverFired(watch.text)
            watch.hopeless = len(watch.values)
            return part
        positions = iter(range(len(tensors)))
        structure = each(lambda _: torch.empty(0), part)

        own: list[tuple[Tensor, Tensor]] = []  # A tensor that occurs several times stays one tensor.

        def tap(tensor: Tensor) -> Tensor:
            receive = self._receiver(watch, number, call, structure, next(positions))
            if not tensor.requires_grad or not any(tensor is one for one in free):
                return tensor
            tensor = next((tapped for original, tapped in own if original is tensor), tensor)
            for tapped, receivers in call.taps:
                if tapped is tensor:
                    receivers.append(receive)
                    return tensor
            receivers = [receive]
            tapped = Tap.apply(tensor, receivers)
            self.followed += [(tapped, source) for source in self._sources(tensor)]
            call.taps.append((tapped, receivers))
            call.tapped.append((tensor, tapped))
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
        """Make the seams call this oracle."""
        before, seams.oracle = seams.oracle, self
        try:
            yield
        finally:
            seams.oracle = before


def holders(model: nn.Module) -> dict[tuple[nn.Module, str], Any]:
    """Map each (module, name) of a parameter or buffer to all pairs that hold the same tensor."""
    tied: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                tied.setdefault(id(tensor), []).append((module, name))
    return {one: tuple(all_of_it) for all_of_it in tied.values() for one in all_of_it}


# Functions that make a view, a cast or a copy of a parameter. Their result counts as the parameter.
FOLLOWED = ("T", "to", "double", "clone", "detach", "expand", "transpose", "view", "reshape", "getitem")


def is_followed(name: str, args: tuple[Any, ...]) -> bool:
    """Return True if the result of a function on a parameter counts as the parameter; not if a tensor is the index."""
    return name in FOLLOWED and not any(isinstance(leaf, Tensor) for leaf in flat(args[1:]))


def written_by(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Return the tensor that a function writes into, or None."""
    if "out" in kwargs:
        return kwargs["out"]
    return args[0] if name.endswith("_") or name == "setitem" or kwargs.get("inplace") else None


def on_a_copy(run: Callable[..., Any], given: Arguments) -> Tensor:
    """Run a function that writes into a tensor on a copy of that tensor; return the copy."""
    if "out" in given.kwargs:
        own = torch.empty_like(given.kwargs["out"]).requires_grad_(given.kwargs["out"].requires_grad)
        run(*given.args, **{**given.kwargs, "out": own})
    else:
        own = given.args[0].clone()
        run(own, *given.args[1:], **given.kwargs)
    return own
