"""The user's hooks as hookline's: for each kind, how it is added and how it is called."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import hookline as hl
from hookline.compat.backward import Pass, add_backward
from hookline.compat.backward import add_backward_pre as add_before
from hookline.compat.nice_hooks.paths import ModulePath, index_of, name_of

Hook = Callable[..., Any]


class Called:
    """A user's hook at one site, and the function by which hookline calls it.

    It holds the Hooks it is one of: a registration acts though nobody keeps what it returned, as torch's own does.
    """

    def __init__(self, function: Callable[..., Any], hook: Any, site: hl.Site, owner: hl.Hooks | None) -> None:
        self.function = function
        self.hook = hook
        self.name = name_of(site)  # As the user has it: in a wrapper, hookline's names are those of the model inside.
        self.owner = owner

    def __call__(self, *args: Any) -> Any:
        return self.function(self, *args)

    def path(self, site: hl.Site) -> ModulePath:
        """Return the path of a value, with the index it has."""
        return ModulePath(self.name, index_of(site))

    def __repr__(self) -> str:
        return repr(self.hook)


def add_forward(hooks: hl.Hooks, site: hl.Site, hook: Hook, owner: hl.Hooks | None = None) -> hl.Hooks:
    """Call `hook(module, path, args, output)`."""
    function = Called(_after, hook, site, owner)
    return hooks.edit(site, function, with_call=True, check=False, clone=False).when_missing("warn")


def add_value(hooks: hl.Hooks, site: hl.Site, value: Any) -> hl.Hooks:
    """Put a given value in the place of an output, or of the part of it that the index names."""
    return hooks.edit(site, Called(_instead, value, site, None), with_call=True, check=False).when_missing("warn")


def add_note(hooks: hl.Hooks, site: hl.Site, seen: dict[str, hl.Site]) -> hl.Hooks:
    """Note the path and the site of what passes. A capture knows a module by one name, not always by the user's."""
    return hooks.edit(site, Called(_note, seen, site, None), with_call=True, clone=False).when_missing("ignore")


def add_forward_pre(hooks: hl.Hooks, site: hl.Site, hook: Hook, owner: hl.Hooks | None = None) -> hl.Hooks:
    """Call `hook(module, path, args)`."""
    function = Called(_before, hook, site, owner)
    place = _port(site, "inputs", "forward pre-hook")
    return hooks.edit(place, function, with_call=True, check=False, clone=False).when_missing("warn")


def add_backward_pre(hooks: hl.Hooks, site: hl.Site, hook: Hook, owner: hl.Hooks | None = None) -> hl.Hooks:
    """Call `hook(module, path, grad_output)`."""
    place = _port(site, "output", "backward pre-hook")
    added = add_before(hooks, site, Called(_arrived, hook, site, owner), name=str(len(hooks)))
    added.at(place).when_missing("warn")
    return added


def add_full_backward(hooks: hl.Hooks, site: hl.Site, hook: Hook, owner: hl.Hooks | None = None) -> hl.Hooks:
    """Call `hook(module, path, grad_input, grad_output)`."""
    place = _port(site, "inputs", "backward hook")
    function = Called(_through, hook, site, owner)
    added = add_backward(hooks, site, function, name=str(len(hooks)), changes=True)  # Nobody else's name.
    added.at(place).when_missing("warn")
    return added


def _after(called: Called, output: Any, call: Any) -> Any:
    return _written(called.hook(call.module, called.path(call.site), call.args, output), output, call.site)


def _instead(called: Called, output: Any, call: Any) -> Any:
    return _written(called.hook, output, call.site)


def _note(called: Called, _output: Any, call: Any) -> None:
    called.hook.setdefault(str(called.path(call.site)), call.site)


def _written(new: Any, old: Any, site: hl.Site) -> Any:
    """Write a new value over a part as torch does, which broadcasts and casts; what replaces a whole is left alone."""
    if new is None or new is old or not site.index or not isinstance(old, Tensor):
        return new
    written = torch.empty_like(old)
    written[...] = new
    return written


def _before(called: Called, _inputs: Mapping[str, Any], call: Any) -> Any:
    new = called.hook(call.module, called.path(call.site), call.args)
    if new is None:
        return None
    signature = inspect.signature(getattr(call.module, call.site.method or "forward"))
    return {**signature.bind_partial(*(new if isinstance(new, tuple) else (new,))).arguments, **call.kwargs}


def _arrived(called: Called, module: nn.Module, grad_output: tuple[Any, ...]) -> Any:
    new = called.hook(module, ModulePath(called.name, None), grad_output)
    return (new,) if isinstance(new, Tensor) else new


def _through(called: Called, passed: Pass) -> Any:
    grad_input, by_keyword = passed.grad_inputs[: passed.positional], passed.grad_inputs[passed.positional :]
    new = called.hook(passed.module, ModulePath(called.name, None), grad_input, passed.grad_outputs)
    return None if new is None else (*((new,) if isinstance(new, Tensor) else new), *by_keyword)


def _port(site: hl.Site, port: str, what: str) -> hl.Site:
    if site.index:
        path = ModulePath(name_of(site), index_of(site))
        raise ValueError(f"'{path}': a {what} takes no index; take the part inside the hook")
    return hl.Site(site.path, port, member=site.member)
