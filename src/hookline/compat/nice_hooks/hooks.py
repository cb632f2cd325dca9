"""Add the user's hooks as hookline hooks: for each kind, how the hook is added and how it is called.

hookline omits the parts that wrappers add to names, so each function knows the user's name for a module where the two
differ. Each function also holds the Hooks that it belongs to: as in torch, a hook acts even if its handle is not kept.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

import hookline as hl
from hookline._torch import forward_hooks
from hookline.compat.backward_hooks import BackwardCall, add_backward
from hookline.compat.backward_hooks import add_backward_pre as add_before
from hookline.compat.nice_hooks.paths import ModulePath, PathPlace, name_of, path_of
from hookline.compat.registrar import warn

Hook = Callable[..., Any]
Key = tuple[str, str]  # The path and the member of a site.
Names = dict[Key, str]
Add = Callable[[list[hl.Site], Names, str], hl.Hooks]

SAME: Names = {}  # The user's names are hookline's. It is one object, so that a hook registered twice is recognized.


class Handle(AbstractContextManager["Handle"]):
    """The hooks at one place, which are removed together."""

    def __init__(self, hooks: list[hl.Hook]) -> None:
        self.hooks = hooks

    def remove(self) -> None:
        """Remove the hooks."""
        for hook in self.hooks:
            hook.remove()

    def __exit__(self, *_: object) -> None:
        self.remove()


def add_forward(hooks: hl.Hooks, places: list[PathPlace], hook: Hook, owner: hl.Hooks | None = None) -> list[Handle]:
    """Call `hook(module, path, args, output)`."""

    def add(sites: list[hl.Site], names: Names, missing: str) -> hl.Hooks:
        def after(output: Any, call: Any) -> Any:
            return _written(hook(call.module, path_in(names, call.site), call.args, output), output, call.site)

        function = _holding(owner, after)
        return hooks.edit(sites, function, _name(hooks), True, check=False, clone=False).when_missing(missing)

    return spread(places, add)


def add_forward_pre(
    hooks: hl.Hooks, places: list[PathPlace], hook: Hook, owner: hl.Hooks | None = None
) -> list[Handle]:
    """Call `hook(module, path, args)`."""

    def add(sites: list[hl.Site], names: Names, missing: str) -> hl.Hooks:
        def before(_inputs: Any, call: Any) -> Any:
            return _arguments(hook(call.module, path_in(names, call.site), call.args), call)

        inputs, function = [site._replace(port="inputs") for site in sites], _holding(owner, before)
        return hooks.edit(inputs, function, _name(hooks), True, check=False, clone=False).when_missing(missing)

    return spread(_without_index(places, "forward pre-hook"), add)


def add_backward_pre(
    hooks: hl.Hooks, places: list[PathPlace], hook: Hook, owner: hl.Hooks | None = None
) -> list[Handle]:
    """Call `hook(module, path, grad_output)`."""

    def add(sites: list[hl.Site], names: Names, missing: str) -> hl.Hooks:
        def arrived(passed: BackwardCall) -> Any:
            new = hook(passed.module, path_in(names, passed.site), passed.grad_outputs)
            return (new,) if isinstance(new, Tensor) else new

        return add_before(hooks, sites, _holding(owner, arrived), _name(hooks), missing=missing)

    return spread(_without_index(places, "backward pre-hook"), add)


def add_full_backward(
    hooks: hl.Hooks, places: list[PathPlace], hook: Hook, owner: hl.Hooks | None = None
) -> list[Handle]:
    """Call `hook(module, path, grad_input, grad_output)`."""

    def add(sites: list[hl.Site], names: Names, missing: str) -> hl.Hooks:
        def through(passed: BackwardCall) -> Any:
            grad_input, by_keyword = passed.grad_inputs[: passed.positional], passed.grad_inputs[passed.positional :]
            new = hook(passed.module, path_in(names, passed.site), grad_input, passed.grad_outputs)
            return None if new is None else (*((new,) if isinstance(new, Tensor) else new), *by_keyword)

        return add_backward(hooks, sites, _holding(owner, through), _name(hooks), changes=True, missing=missing)

    return spread(_without_index(places, "backward hook"), add)


def add_values(hooks: hl.Hooks, given: list[tuple[PathPlace, Any]]) -> None:
    """Replace outputs, or the parts selected by an index, with the given values. None changes nothing."""
    hooked = [place.name for place, _ in given if _has_hooks_of_torch(place)]
    if hooked:
        more = f" (and {len(hooked) - 1} more)" if hooked[1:] else ""
        warn(f"'{hooked[0]}' has a torch forward hook{more}, which gets the new value and may change it again")
    pairs = [(place, value) for place, value in given if value is not None]
    for (index, is_named, _), group in groupby(pairs, _kind_of_value):
        values = {place.site: value for place, value in group}
        if index:
            added = hooks.edit(list(values), _part(next(iter(values.values()))), with_call=True, check=False)
        else:
            added = hooks.patch(values, check=False)
        added.when_missing("warn" if is_named else "ignore")


def spread(places: list[PathPlace], add: Add) -> list[Handle]:
    """Add hooks at places, with as few calls of `add(sites, names, missing)` as possible. Return a handle per place."""
    groups = [(is_named, list(group)) for (_, is_named), group in groupby(places, _kind)]
    return [handle for is_named, group in groups for handle in _add(group, add, "warn" if is_named else "ignore")]


def path_in(names: Names, site: hl.Site) -> ModulePath:
    """Return the path of a site, with the user's name for its module."""
    return path_of(names.get((site.path, site.member)) or name_of(site), site)


def _add(places: list[PathPlace], add: Add, missing: str, names: Names = SAME) -> list[Handle]:
    added = add([place.site for place in places], names, missing)
    by_place: dict[Key, list[hl.Hook]] = {}
    for hook in added:
        by_place.setdefault((hook.site.path, hook.site.member), []).append(hook)
    are_same = all((place.site.path, place.site.member) in by_place for place in places)
    parts = [places]
    if len(by_place) < len(places):  # Some places are names of the same module, which one call of `add` hooks once.
        parts = [places[: len(places) // 2], places[len(places) // 2 :]]
    if len(parts) > 1 or (names is SAME and not are_same):
        added.remove()
        return [handle for part in parts for handle in _add(part, add, missing, SAME if are_same else {})]
    if not are_same:
        names.update(zip(by_place, [place.name for place in places], strict=True))
    return [Handle(found) for found in by_place.values()]


def _kind(place: PathPlace) -> tuple[str, bool]:
    """Return the key that places must share to be hooked with one call."""
    return place.site.index, place.is_named


def _kind_of_value(pair: tuple[PathPlace, Any]) -> tuple[str, bool, int | None]:
    """Return the key that places must share to be set with one call: whole outputs, or parts with the same value."""
    place, value = pair
    return *_kind(place), id(value) if place.site.index else None


def _name(hooks: hl.Hooks) -> str:
    """Return a unique name for hooks, so that the same function can be added twice."""
    return f"nice_hooks {len(hooks)}"


def _holding(owner: hl.Hooks | None, function: Callable[..., Any]) -> Callable[..., Any]:
    vars(function)["owner"] = owner
    return function


def _has_hooks_of_torch(place: PathPlace) -> bool:
    return place.module is not None and not place.site.method and bool(forward_hooks(place.module))


def _part(value: Any) -> Callable[..., Any]:
    return lambda output, call: _written(value, output, call.site)


def _written(new: Any, old: Any, site: hl.Site) -> Any:
    """Return the new value. For a part, broadcast and cast it to the old value as torch does."""
    if new is None or new is old or not site.index or not isinstance(old, Tensor):
        return new
    written = torch.empty_like(old)
    written[...] = new
    return written


def _arguments(new: Any, call: Any) -> dict[str, Any] | None:
    """Return all arguments of a call by name, with new positional arguments."""
    if new is None:
        return None
    new = new if isinstance(new, tuple) else (new,)
    method = call.site.method or "forward"
    signature = inspect.signature(getattr(call.module, method))
    try:
        signature.bind_partial(*new, **call.kwargs)
    except TypeError as error:
        raise TypeError(f"{type(call.module).__name__}.{method}() got {error}") from None
    return {**signature.bind_partial(*new).arguments, **call.kwargs}


def _without_index(places: list[PathPlace], what: str) -> list[PathPlace]:
    for place in places:
        if place.site.index:
            path = path_of(place.name, place.site)
            raise ValueError(f"'{path}': a {what} takes no index; take the part inside the hook")
    return places
