"""A case run under hookline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import hookline as hl
from tests.properties.modules import Boom
from tests.properties.places import Place
from tests.properties.programs import FUNCTIONS, TRANSFORMS, WITH_CALL, Action
from tests.properties.structures import copied, each
from tests.properties.survey import Survey
from tests.properties.worlds import Case, Run, value_of


class HooklineRun(Run):
    """The program under hookline."""

    def __init__(self, case: Case, survey: Survey, model: nn.Module | None = None) -> None:
        super().__init__(case, model)
        self.survey = survey
        self.hooks: dict[int, hl.Hooks] = {}
        self.caches: dict[int, hl.Cache] = {}

    def open(self, block: int) -> None:
        spec = self.case.program.blocks[block]
        try:
            if spec.kept:
                self.hooks[block] = hl.Hooks(self.model)
                for number, action in enumerate(spec.actions):
                    self._add(self.hooks[block], block, number, action)
                self.caches[block] = self.hooks[block].cache
            else:
                self.hooks[block] = self._short(block, spec.actions[0])
                self.caches[block] = self.hooks[block].__enter__()
            self.note(f"open {block}", "")
        except hl.HooklineError as error:
            self.note(f"open {block}", f"{type(error).__name__}: {error}")

    def close(self, block: int, failing: bool) -> None:
        if block not in self.hooks:
            return  # Opening the block failed, which is in the trace.
        if not self.case.program.blocks[block].kept:
            self._exit(block, failing)
        elif failing:
            del self.hooks[block]
        else:
            self.hooks[block].remove()

    def run_line(self, block: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given: dict[str, Any] = {}
        for number, action in enumerate(self.case.program.blocks[block].actions):
            places = [place.where(self.model) for place in action.places]
            values = self._values(block, number, action) if action.kind in ("patch", "skip") else []
            if action.kind == "capture":
                given |= {"capture": places, "stop": action.stop}
            elif action.kind == "edit":
                given["edit"] = {places[0]: FUNCTIONS[action.option]}
            else:
                given[action.kind] = dict(zip(places, values, strict=True)) if values else places
        result = hl.run(self.callable, *args, **given, **kwargs)
        if "capture" not in given:
            return result
        self.caches[block] = result[1]
        return result[0]

    def enter(self, block: int) -> None:
        self.hooks[block].__enter__()

    def leave(self, block: int, failing: bool) -> None:
        self._exit(block, failing)

    def _exit(self, block: int, failing: bool) -> None:
        how = (Boom, Boom("on its way"), None) if failing else (None, None, None)
        try:
            self.hooks[block].__exit__(*how)
            self.note(f"end of block {block}", "")
        except hl.HooklineError as error:
            self.note(f"end of block {block}", type(error).__name__)

    def switch(self, block: int, action: int, on: bool) -> None:
        chosen_hooks = self.hooks[block][f"a{action}"]
        if on:
            chosen_hooks.activate()
        else:
            chosen_hooks.deactivate()

    def read(self) -> None:
        for block, cache in sorted(self.caches.items()):
            actions = [action for action in self.case.program.blocks[block].actions if action.kind == "capture"]
            places = [place for action in actions for place in action.places]
            texts = list(dict.fromkeys(point.text for place in places for point in place.points()))
            for text in texts:
                self.note(f"captured {block} {text}", copied(_attempt(cache.calls, text)) or [])
                self.note(f"latest {block} {text}", copied(_attempt(cache.__getitem__, text)))
            for short, meant in short_names(places, texts):
                if len([text for text in meant if _attempt(cache.calls, text)]) == 1:
                    self.note(f"short {block} {short}", copied(_attempt(cache.__getitem__, short)))
            # The oracle can't see parametrizations, and the order of gradients is unspecified.
            order = [text for text in cache if "parametrizations" not in text and ":grad_" not in text]
            if texts:
                self.note(f"order {block}", [text for text in order if _attempt(cache.__getitem__, text) is not None])

    def captured_tensors(self) -> list[torch.Tensor]:
        """Return every tensor that only a cache holds."""
        found: list[torch.Tensor] = []
        for block, cache in self.caches.items():
            actions = self.case.program.blocks[block].actions
            by_reference = any(action.clone is False or not action.detach for action in actions)
            for site in cache if not by_reference else ():
                each(found.append, cache.calls(site))
        return found

    def _short(self, block: int, action: Action) -> hl.Hooks:
        places = [place.where(self.model) for place in action.places]
        if action.kind == "capture":
            return hl.capture(self.model, *places, **_options(action))
        if action.kind == "patch":
            return hl.patch(self.model, dict(zip(places, self._values(block, 0, action), strict=True)))
        if action.kind == "skip":
            return hl.skip(self.model, places[0], *self._values(block, 0, action))
        return hl.edit(self.model, places[0], FUNCTIONS[action.option], with_call=action.option in WITH_CALL)

    def _add(self, hooks: hl.Hooks, block: int, number: int, action: Action) -> None:
        places, name = [place.where(self.model) for place in action.places], f"a{number}"
        if action.kind == "capture":
            hooks.capture(*places, name=name, **_options(action))
        elif action.kind == "patch":
            hooks.patch(dict(zip(places, self._values(block, number, action), strict=True)), name=name)
        elif action.kind == "skip":
            hooks.skip(places[0], *self._values(block, number, action), name=name)
        else:
            hooks.edit(places[0], FUNCTIONS[action.option], name=name, with_call=action.option in WITH_CALL)

    def _values(self, block: int, number: int, action: Action) -> list[Any]:
        if action.option is None:
            return []
        keys = [(block, number, place) for place in range(len(action.places))]
        self.leaves |= {key: value_of(action, self.survey, key[2]) for key in keys}
        return [self.leaves[key] for key in keys]


def short_names(places: list[Place], texts: list[str]) -> list[tuple[str, list[str]]]:
    """Return the names without a number that a cache may accept, each with the sites it may stand for."""
    found = [pair for place in places for pair in place.short_names().items()]
    short = [name for name, _ in found]
    return [(name, meant) for name, meant in found if name not in texts and short.count(name) == 1]


def _attempt(read: Callable[[str], Any], site: str) -> Any:
    """Return the value read, "StaleValue" if it was overwritten, or None if it was not captured."""
    try:
        return read(site)
    except hl.NotCaptured:
        return None
    except hl.StaleValue:
        return "StaleValue"


def _options(action: Action) -> dict[str, Any]:
    transform = TRANSFORMS[action.option] if action.option else None
    given = {"keep": action.keep, "clone": action.clone, "detach": action.detach, "stop": action.stop}
    return {**given, "transform": transform}
