"""Add the user's hooks at a place that a path matches: for each kind, how it is registered and how it is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import hookline as hl
from hookline.compat.nice_hooks.paths import ModulePath, PathPlace, path_of
from hookline.compat.registrar import register

Hook = Callable[..., Any]
Add = Callable[[hl.Hooks, PathPlace, Hook], Any]


def add_forward(hooks: hl.Hooks, place: PathPlace, hook: Hook) -> hl.Hooks:
    """Call `hook(module, path, args, output)`."""

    def after(output: Any, call: Any) -> Any:
        new = hook(call.module, path_of(place.name, call.site), call.args, output)
        return written(new, output, call.site)

    return register(hooks, "forward", after, site=place.site, missing=missing_at(place))


def add_forward_pre(hooks: hl.Hooks, place: PathPlace, hook: Hook) -> hl.Hooks:
    """Call `hook(module, path, args)`."""
    path = _whole(place, "forward pre-hook")

    def before(args: Any, call: Any) -> Any:
        return _tuple(hook(call.module, path, args))

    return register(hooks, "forward_pre", before, site=place.site, missing=missing_at(place))


def add_full_backward(hooks: hl.Hooks, place: PathPlace, hook: Hook) -> Any:
    """Call `hook(module, path, grad_input, grad_output)`, as torch's own full backward hook."""
    path = _whole(place, "backward hook")
    return _module(hooks, place).register_full_backward_hook(
        lambda module, grad_input, grad_output: _tuple(hook(module, path, grad_input, grad_output))
    )


def add_full_backward_pre(hooks: hl.Hooks, place: PathPlace, hook: Hook) -> Any:
    """Call `hook(module, path, grad_output)`, as torch's own full backward pre-hook."""
    path = _whole(place, "backward pre-hook")
    return _module(hooks, place).register_full_backward_pre_hook(
        lambda module, grad_output: _tuple(hook(module, path, grad_output))
    )


def add_value(hooks: hl.Hooks, place: PathPlace, value: Any) -> None:
    """Replace an output, or the part selected by an index, with a value. None changes nothing."""
    if value is None:
        return
    if place.site.index:
        register(
            hooks,
            "forward",
            lambda output, call: written(value, output, call.site),
            site=place.site,
            missing=missing_at(place),
        )
    else:
        hooks.patch({place.site: value}, check=False).when_missing(missing_at(place))


def missing_at(place: PathPlace) -> str:
    """Return what to do if a place does not run: a name that was written out may be a mistake."""
    return "warn" if place.is_named else "ignore"


def written(new: Any, old: Any, site: hl.Site) -> Any:
    """Return the new value. For a part, broadcast and cast it to the old value as torch does."""
    if new is None or new is old or not site.index or not isinstance(old, Tensor):
        return new
    part = torch.empty_like(old)
    part[...] = new
    return part


def _tuple(new: Any) -> Any:
    return new if new is None or isinstance(new, tuple) else (new,)


def _whole(place: PathPlace, what: str) -> ModulePath:
    if place.site.index:
        raise ValueError(f"'{path_of(place.name, place.site)}': a {what} takes no index; take the part inside the hook")
    return ModulePath(place.name, None)


def _module(hooks: hl.Hooks, place: PathPlace) -> nn.Module:
    if place.site.method:
        raise ValueError(f"'{place.name}' is a method, which takes no backward hooks; use hl.edit at its grad_output")
    return hooks.model.get_submodule(place.name) if place.module is None else place.module
