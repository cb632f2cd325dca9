"""A case run under the oracle."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.properties.containers import KeyValues
from tests.properties.oracle import Oracle
from tests.properties.places import Place, Point
from tests.properties.programs import FUNCTIONS, TRANSFORMS, WITH_CALL, Action
from tests.properties.structures import CONTAINERS, each, parts
from tests.properties.survey import Survey
from tests.properties.under_hookline import short_names
from tests.properties.watches import EditError, Gradients, NeverFired, Spot, Watch
from tests.properties.worlds import Case, Run, value_of


@dataclasses.dataclass
class Call:
    """The argument `call` of an edit function."""

    module: nn.Module
    number: int


@dataclasses.dataclass
class Open:
    """The state to restore when a block ends."""

    token: object
    forwards: int
    failures: int
    before: list[tuple[bool, int, int]]


class OracleRun(Run):
    """The program under the oracle."""

    def __init__(self, case: Case, survey: Survey) -> None:
        super().__init__(case)
        self.survey = survey
        self.oracle = Oracle(self.model)
        self.watches: dict[int, list[list[Watch]]] = {}
        self.entered: dict[int, list[Open]] = {}
        self.missed: set[Watch] = set()  # Watches that the latest forward did not reach, because it failed.
        self.silent: dict[Watch, int] = {}  # Watches that did not fire in a block, with their number of values.
        self.unread: set[int] = set()  # Calls of hl.run that raised, and returned no cache.
        self.forwards = self.failures = 0

    def call(self, *args: Any, **kwargs: Any) -> Any:
        following = [watches for watches in map(self._all, self.watches) if any(watch.acts for watch in watches)]
        followed = {watch for watches in following for watch in watches}
        try:
            output = self.oracle.forward(self.callable, self.case.method, *args, **kwargs)
        except BaseException:
            self.failures += 1
            self.missed -= followed
            self.missed |= {watch for watch in followed if not watch.fired_in_forward}
            raise
        self.missed -= followed
        self.forwards += 1  # A failed forward does not show which watches would have fired.
        return output

    def run_backward(self, loss: Tensor, retain: bool) -> None:
        self.oracle.backward(loss, retain)

    def open(self, block: int) -> None:
        spec = self.case.program.blocks[block]
        self.watches[block] = [self._make(block, number, action) for number, action in enumerate(spec.actions)]
        for action, watches in zip(spec.actions, self.watches[block], strict=True):
            self.oracle.watches += watches
            if action.stop:
                self.oracle.stops += watches
        if spec.kept:
            for watch in self._all(block):
                watch.active = True
        else:
            self.enter(block)
        self.note(f"open {block}", "")

    def run_line(self, block: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.open(block)
        self.trace.pop()
        failed = True
        try:
            output = self.call(*args, **kwargs)
            failed = False
        finally:
            self.close(block, failed)
            _, outcome = self.trace.pop()
            if failed or outcome:
                self.unread.add(block)
        if outcome:
            raise NeverFired(outcome)
        return output

    def enter(self, block: int) -> None:
        token = object()
        before = [(watch.active, watch.calls, watch.fired) for watch in self._all(block)]
        self.entered.setdefault(block, []).append(Open(token, self.forwards, self.failures, before))
        for watch in self._all(block):
            watch.blocks.add(token)
            watch.calls = watch.fired = 0
            self.silent.pop(watch, None)

    def leave(self, block: int, failing: bool) -> None:
        entered = self.entered[block].pop()
        silent = [watch for watch in self._all(block) if entered.token in watch.blocks and watch.is_silent]
        ran = self.forwards > entered.forwards
        never = ran and not failing and any(watch.exact for watch in silent)
        self.note(f"end of block {block}", "NeverFired" if never else "")
        if ran or failing or self.failures > entered.failures:
            self.silent |= {watch: len(watch.values) for watch in silent}
        for watch, (active, calls, fired) in zip(self._all(block), entered.before, strict=True):
            watch.blocks.discard(entered.token)
            watch.active = active
            watch.calls += calls
            watch.fired += fired

    def close(self, block: int, failing: bool) -> None:
        if not self.case.program.blocks[block].kept:
            self.leave(block, failing)
        gone = self._all(block)
        for watch in gone:
            watch.active = False
        self.oracle.watches = [watch for watch in self.oracle.watches if watch not in gone]
        self.oracle.stops = [watch for watch in self.oracle.stops if watch not in gone]

    def switch(self, block: int, action: int, on: bool) -> None:
        for watch in self.watches[block][action]:
            watch.active = on
            if not on:
                watch.blocks.clear()

    def read(self) -> None:
        for block in sorted(self.watches.keys() - self.unread):
            readable = []
            actions = self.case.program.blocks[block].actions
            for action, watches in zip(actions, self.watches[block], strict=True):
                for watch in watches if action.kind == "capture" else ():
                    calls = kept(watch, action.keep)
                    self.note(f"captured {block} {watch.text}", calls)
                    is_there = bool(calls) and not self._is_gone(watch)
                    self.note(f"latest {block} {watch.text}", calls[-1] if is_there else None)
                    readable += [watch] if is_there and not watch.is_gradient and calls[-1] is not None else []
            fired = {watch.text: watch for watch in self._all(block) if watch.kind == "capture" and watch.values}
            places = [place for action in actions if action.kind == "capture" for place in action.places]
            for short, meant in short_names(places, [point.text for place in places for point in place.points()]):
                only = [fired[text] for text in meant if text in fired]
                if len(only) == 1:
                    self.note(f"short {block} {short}", None if self._is_gone(only[0]) else kept(only[0], "last")[0])
            readable.sort(key=lambda watch: watch.first)
            if any(action.kind == "capture" for action in actions):
                self.note(f"order {block}", [watch.text for watch in readable])

    def _is_gone(self, watch: Watch) -> bool:
        """Return True if a later run did not pass here, so that the latest value is out of date."""
        missed = not watch.is_gradient and watch in self.missed
        return missed or len(watch.values) in (self.silent.get(watch), watch.hopeless)

    def _all(self, block: int) -> list[Watch]:
        return [watch for watches in self.watches[block] for watch in watches]

    def _make(self, block: int, number: int, action: Action) -> list[Watch]:
        """Make the watches of an action, one for each site."""
        owners = self.oracle.owners()
        made = []
        for index, place in enumerate(action.places):
            if action.kind in ("patch", "skip") and action.option is not None:
                self.leaves[block, number, index] = value_of(action, self.survey, index)
            families: dict[str, list[Watch]] = {}
            for point in place.points():
                spot = Spot(owners[point.name], ":param" if place.port == "param" else point.member)
                function = self._function(action, spot.owner, self.leaves.get((block, number, index)))
                made.append(_watch(place, point, spot, action.kind, function))
                made[-1].family = families.setdefault(point.name + place.member, [])
                made[-1].family.append(made[-1])
        return made

    def _function(self, action: Action, module: nn.Module, value: Any) -> Callable[[Any, int], Any]:
        if action.kind == "capture":
            return lambda part, _: transformed(action.option, part)
        if action.kind == "patch":
            return lambda part, _: fitted(value, part)
        if action.kind == "skip":
            return lambda first, _: each(torch.clone, first if action.option is None else value)
        return lambda part, number: edited(action.option, part, Call(module, number))


def _watch(place: Place, point: Point, spot: Spot, kind: str, function: Any) -> Watch:
    meant = (point.text, spot, place.port, place.keys, point.indices, point.number)
    return Watch(*meant, kind, function, exact=place.exact, within=place.within)


def fitted(value: Any, part: Any) -> Any:
    """Return a copy of a patch's value in the shape of the part it replaces."""
    if isinstance(value, Tensor):
        return value.expand(part.shape).clone()
    if isinstance(part, Tensor):
        return torch.full_like(part, value)
    refuse_another_structure(value, part)
    return each(torch.clone, value)


def refuse_another_structure(value: Any, part: Any) -> None:
    """Raise unless a value has the same parts as the one it replaces; a plain object counts as a leaf."""
    if isinstance(part, KeyValues):
        return
    held, there = dict(parts(value)), dict(parts(part))
    if (isinstance(part, CONTAINERS) and held.keys() != there.keys()) or (
        isinstance(part, Tensor) and not isinstance(value, Tensor)
    ):
        raise EditError
    for key, one in there.items():
        refuse_another_structure(held[key], one)


def transformed(name: str | None, part: Any) -> Any:
    """Return a part as a capture's transform keeps it, without drawing from the model's random numbers."""
    if name is None:
        return part
    with torch.random.fork_rng([]):
        return TRANSFORMS[name](part)


def edited(name: str, part: Any, call: Call) -> Any:
    """Return the result of an edit function for a part, or None if it changes nothing."""
    if name in ("same", "none"):
        return None
    own = each(torch.clone, part)
    return FUNCTIONS[name](own, call) if name in WITH_CALL else FUNCTIONS[name](own)


def kept(watch: Watch, keep: Any) -> list[Any]:
    """Return the calls that a capture keeps, oldest first."""
    values = [watch.values[stamp] for stamp in sorted(watch.values)]
    values = [value.whole() if isinstance(value, Gradients) else value for value in values]
    return values if keep == "all" else values[-(1 if keep == "last" else keep) :]
