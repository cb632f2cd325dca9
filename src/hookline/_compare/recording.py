"""What passes in a run: the inputs and the output of each call of a module."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hookline import Hooks, Site
from hookline._compare.random_numbers import RandomState, random_state
from hookline._kernel import (
    Arguments,
    Call,
    Found,
    Names,
    Observer,
    add_observers,
    find_places,
    is_container,
    map_tensors,
    share,
    short_form,
    unwrap,
)
from hookline._torch import known_version
from hookline.errors import NeverFired


@dataclass
class ModuleCall:
    """What passed in one call of a module."""

    start: int  # How many values had passed before.
    module: nn.Module
    inputs: Mapping[str, Any]
    output: Any = None
    is_over: bool = False
    random: RandomState | None = None  # The random numbers at its beginning, if it is in train mode.


class Recording:
    """The calls of modules in a run, by path, in the order in which they began."""

    def __init__(self, with_inputs: bool = True) -> None:
        self.calls: dict[str, list[ModuleCall]] = {}
        self._with_inputs = with_inputs
        self.output: Any = None
        self._order = itertools.count()
        self._copies: dict[int, tuple[weakref.ref[Tensor], int, Tensor]] = {}

    def began(self, call: Call, inputs: Any) -> None:
        """Note the inputs of a call that begins."""
        one = ModuleCall(next(self._order), call.module, self._kept(inputs) if self._with_inputs else {})
        if self._with_inputs and call.module.training:
            one.random = random_state()
        self.calls.setdefault(call.site.path, []).append(one)

    def ended(self, call: Call, output: Any) -> None:
        """Note the output of a call."""
        waiting = [one for one in self.calls.get(call.site.path, ()) if not one.is_over]
        if waiting:  # The innermost of calls that are running, where a module calls itself.
            waiting[-1].output, waiting[-1].is_over = self._kept(output), True

    def _kept(self, value: Any) -> Any:
        """Return a value with copies of its tensors. What passes at several places is copied once."""
        return map_tensors(self._copy, value)

    def _copy(self, tensor: Tensor) -> Tensor:
        known = self._copies.get(id(tensor))
        version = known_version(tensor)
        if known is not None and known[0]() is tensor and known[1] == version >= 0:
            return known[2]
        copy: Tensor = share(tensor)
        self._copies[id(tensor)] = weakref.ref(tensor), version, copy
        return copy

    def outputs(self, path: str) -> list[Any]:
        """Return the output of each call of a module."""
        return [one.output for one in self.calls.get(path, ()) if one.is_over]

    def starts(self) -> dict[str, int]:
        """Return when the first call of each module began."""
        return {path: calls[0].start for path, calls in self.calls.items()}


class _AtStart(Observer):
    with_call = True

    def __init__(self, recording: Recording) -> None:
        self.recording = recording

    def __call__(self, value: Any, call: Call, _is_whole: bool, /) -> Any:
        """Note the inputs."""
        self.recording.began(call, value)
        return value


class _AtEnd(Observer):
    with_call = True

    def __init__(self, recording: Recording) -> None:
        self.recording = recording

    def __call__(self, value: Any, call: Call, _is_whole: bool, /) -> Any:
        """Note the output."""
        self.recording.ended(call, value)
        return value


def record(
    model: nn.Module, arguments: Arguments, paths: Iterable[str], prepare: Callable[[Hooks], None] | None = None
) -> Recording:
    """Run a model and return what passes at these modules; only the outputs if `prepare` adds hooks to the run."""
    recording = Recording(with_inputs=prepare is None)
    hooks = short_form(model)
    if prepare is not None:
        prepare(hooks)
    at_start, at_end = _AtStart(recording), _AtEnd(recording)
    places: list[tuple[Found, Observer]] = []
    for path in paths:
        for port, observer in (("inputs", at_start), ("output", at_end)):
            for place in find_places(model, [Site(path, port=port)]):
                places.append((place._replace(exact=False), observer))
    add_observers(hooks, places)
    args, kwargs = map_tensors(torch.clone, arguments, in_objects=True)
    never = (NeverFired,) if prepare is not None else ()  # On other inputs, a model may call other modules.
    with suppress(*never), torch.no_grad(), hooks if len(hooks) else nullcontext():
        recording.output = model(*args, **kwargs)
    return recording


def paths_of(model: nn.Module) -> list[str]:
    """Return the paths of the modules that may be called; "" is the model itself."""
    return [path for path, module in Names(unwrap(model)).once() if not is_container(module)]
