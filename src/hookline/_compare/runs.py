"""The runs of a comparison: one of each model, and those of b in which some of its modules get what a's got."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from hookline import Hooks, Site
from hookline._compare.apart import (
    Apart,
    Convert,
    MeasuredPart,
    MeasuredValue,
    OtherShape,
    difference,
    in_one_layout,
    worst,
)
from hookline._compare.filled_inputs import Filled
from hookline._compare.matching import match_modules
from hookline._compare.paired_values import Paired
from hookline._compare.random_numbers import random_numbers
from hookline._compare.recording import ModuleCall, Recording, paths_of, record
from hookline._compare.report import ComparedPlace, Pair
from hookline._compare.rounding import Limit, Rounding, dtype_of_run, uncovered
from hookline._kernel import Arguments, Call, map_tensors
from hookline._scan.restore_modules import buffers_as_found, left_as_found
from hookline._tables import count
from hookline._torch import known_version
from hookline.errors import HooklineError


class _Measured(NamedTuple):
    """How far outputs are apart in the call of a module in which it is most."""

    error: Apart | None
    parts: Mapping[str, MeasuredPart]
    values: Pair | None
    call: int
    note: str
    odd: Sequence[str] = ()
    besides: Sequence[str] = ()
    reshaped: Sequence[str] = ()
    unequal: Sequence[str] = ()


class Runs:
    """Two models that ran on one batch, and the pairs of their modules."""

    def __init__(
        self,
        models: tuple[nn.Module, nn.Module],
        arguments: tuple[Arguments, Arguments],
        match: Mapping[str, str | None] | None,
        to_b: Convert | None,
        to_a: Convert | None,
        tolerance: float | None,
    ) -> None:
        self.a, self.b = models
        self.arguments = arguments
        self.to_b, self.to_a = to_b, to_a
        self.of_a = _record(self.a, arguments[0], paths_of(self.a))
        self.of_b = _record(self.b, arguments[1], paths_of(self.b))
        self.matching = match_modules(self.of_a, self.of_b, match)
        dtypes = dtype_of_run(self.a, self.of_a), dtype_of_run(self.b, self.of_b)
        self.rounding = Rounding(*dtypes, tolerance)
        self._kept: dict[str, set[str]] = {}  # The inputs of b's modules for which a has none.

    @property
    def in_own_layout(self) -> bool:
        """Whether nothing maps the values of one model into the layout of the other."""
        return self.to_a is None and self.to_b is None

    def seen(self, path: str, other: str) -> ComparedPlace:
        """Compare what a pair of modules returned, each in its own run."""
        call = self.of_a.calls[path][0]
        place = ComparedPlace(path, other, type(call.module).__name__)
        found = self._measured(self.of_a.outputs(path), self.of_b.outputs(other))
        place.seen, place.seen_values, place.seen_parts = found.error, found.values, found.parts
        place.parts, place.call, place.note = found.parts, found.call, found.note
        if not path:
            place.odd, place.besides = [*found.odd, *found.reshaped], found.besides
        if not path and not other:  # The inputs of the model are the same.
            place.local, place.local_values = place.seen, place.seen_values
        return place

    def given(self, path: str, number: int) -> Mapping[str, Any] | None:
        """Return a's inputs of a call in the form in which b's module takes them; None if b made no such call."""
        other = self.matching.pairs[path]
        from_a, from_b = self.of_a.calls[path], self.of_b.calls[other]
        if number >= len(from_b):
            return None
        is_model = not path and not other
        return (
            from_b[number].inputs
            if is_model
            else Filled(from_a[number].inputs, from_b[number].inputs, self.to_b).inputs
        )

    def measure_local(self, pairs: dict[str, str], places: dict[str, ComparedPlace]) -> None:
        """Run b with the inputs of each of these modules replaced by those of its counterpart in a."""

        def prepare(hooks: Hooks) -> None:
            for path, other in pairs.items():
                hooks.edit(Site(other, port="inputs"), self._replacement(path), with_call=True, check=False)

        recording = self._run_b(list(pairs.values()), prepare)
        for path, other in pairs.items():
            place, kept = places[path], self._kept.get(path)
            found = self._measured(self.of_a.outputs(path), recording.outputs(other))
            place.local, place.local_values = found.error, found.values
            place.parts, place.call = found.parts, found.call
            one, two = self.of_a.calls[path][0].module, self.of_b.calls[other][0].module
            if found.unequal and type(one) is type(two) and not kept and self.in_own_layout:
                place.odd = found.unequal  # Another shape, of one class on the same inputs.
            if uncovered(place.parts, self.free_limits(place)) is None:
                place.local_values = None  # Equal up to rounding: they would only take memory.
            place.note = found.note or (f"with b's own {', '.join(sorted(kept))}" if kept else place.note)

    def free_limits(self, place: ComparedPlace) -> dict[str, Limit]:
        """Return the errors at a place that need no explanation."""
        return self.rounding.free(place.parts)

    def _replacement(self, path: str) -> Callable[[Any, Call], Any]:
        calls: list[ModuleCall] = self.of_a.calls[path]

        def replace(inputs: Mapping[str, Any], call: Call) -> Any:
            number = int(call.number)
            if number >= len(calls):
                return None
            filled = Filled(calls[number].inputs, inputs, self.to_b)
            self._kept.setdefault(path, set()).update(filled.kept)
            return map_tensors(torch.clone, filled.inputs)

        return replace

    def measure_with_outputs(
        self, tested: Mapping[str, Iterable[str]], pairs: Mapping[str, str]
    ) -> dict[str, tuple[Apart, Mapping[str, MeasuredPart]]]:
        """Return the errors of modules of b that get a's inputs, and in which modules inside return a's outputs."""

        def prepare(hooks: Hooks) -> None:
            for around, paths in tested.items():
                if around:
                    hooks.edit(
                        Site(pairs[around], port="inputs"), self._replacement(around), with_call=True, check=False
                    )
                for path in paths:
                    hooks.edit(Site(self.matching.pairs[path]), self._output_of(path), with_call=True, check=False)

        recording = self._run_b([pairs[around] for around in tested], prepare)
        found = {one: self._measured(self.of_a.outputs(one), recording.outputs(pairs[one])) for one in tested}
        return {around: (one.error, one.parts) for around, one in found.items() if one.error is not None}

    def _output_of(self, path: str) -> Callable[[Any, Call], Any]:
        outputs = self.of_a.outputs(path)

        def replace(output: Any, call: Call) -> Any:
            number = int(call.number)
            return Filled({"": outputs[number]}, {"": output}, self.to_b).inputs[""] if number < len(outputs) else None

        return replace

    def _measured(self, of_a: list[Any], of_b: list[Any]) -> _Measured:
        pairs: list[Pair] = []
        found: list[MeasuredValue] = []
        for pair in zip(of_a, of_b, strict=False):
            pairs.append(self.in_one_layout(*pair))
            try:
                found.append(difference(*pairs[-1]))
            except OtherShape as error:
                paired = Paired(*pairs[-1])
                note = f"not compared: {error}"
                return _Measured(None, {}, pairs[-1], len(found), note, paired.odd, unequal=paired.unequal)
        if not found:
            return _Measured(None, {}, None, 0, "never returned")
        number = worst([one.whole for one in found])
        calls = f"{count(len(of_a), 'call')} in a, {len(of_b)} in b" if len(of_a) != len(of_b) else ""
        odd = next((one.odd for one in found if one.odd), [])
        note = calls or (f"not compared: {odd[0]}" if odd else "")
        one = found[number]
        return _Measured(one.whole, one.parts, pairs[number], number, note, odd, one.besides, one.reshaped, one.unequal)

    def in_one_layout(self, of_a: Any, of_b: Any) -> tuple[Any, Any]:
        """Return a value of a and one of b in one layout."""
        return in_one_layout(of_a, of_b, self.to_b, self.to_a)

    def levels(self) -> list[dict[str, str]]:
        """Return the pairs of each nesting level of b, without those of the model itself."""
        levels: dict[int, dict[str, str]] = {}
        paired = set(self.matching.pairs.values())
        for path, other in self.matching.pairs.items():
            if path or other:
                ends = [end for end, letter in enumerate(other) if letter == "."]
                around = {"", *(other[:end] for end in ends)} - {other}
                levels.setdefault(len(around & paired), {})[path] = other
        return [levels[depth] for depth in sorted(levels)]

    def all_levels(self) -> list[dict[str, str]]:
        """Return the pairs of each nesting level of b, with that of the model itself."""
        return [{"": self.matching.pairs[""]} if "" in self.matching.pairs else {}, *self.levels()]

    def _run_b(self, paths: list[str], prepare: Callable[[Hooks], None]) -> Recording:
        return _record(self.b, self.arguments[1], paths, prepare)


def _record(
    model: nn.Module, arguments: Any, paths: list[str], prepare: Callable[[Hooks], None] | None = None
) -> Recording:
    before = _versions(model)
    with left_as_found(model), buffers_as_found(model), random_numbers():
        recording = record(model, arguments, paths, prepare)
    changed = [name for name, version in _versions(model).items() if before.get(name, version) != version]
    if changed:
        raise HooklineError(
            f"the forward of {type(model).__name__} writes to its parameter {changed[0]!r}, "
            "so that no two runs are the same: make it a buffer"
        )
    return recording


def _versions(model: nn.Module) -> dict[str, int]:
    """Return how often each parameter was written to."""
    parameters: Iterable[tuple[str, Any]] = model.named_parameters()
    return {name: known_version(one) for name, one in parameters if not is_lazy(one)}
