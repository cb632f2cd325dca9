"""The tables of a manager: its functions, modules and handles by name, and each by the other.

They don't know the manager, so that one that nobody holds any more goes, and takes its hooks along.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn

from hookline.compat.tacklebox.handles import HookFunction, HookHandle
from hookline.compat.tacklebox.naming import unique
from hookline.compat.warning import warn

CATEGORIES = (*HookFunction.HOOK_TYPES, "all")
Function = Callable[..., Any]


class Tables:
    """What is registered, in the order in which it was."""

    def __init__(self) -> None:
        self.hook_fns: set[HookFunction] = set()
        self.modules: set[nn.Module] = set()
        self.name_to_hookfn: dict[str, HookFunction] = {}
        self.name_to_hookhandle: dict[str, HookHandle] = {}
        self.module_to_hookhandle: dict[nn.Module, list[HookHandle]] = {}
        self.name_to_module: dict[str, nn.Module] = {}
        self.function_to_hookfn: dict[Function, HookFunction] = {}
        self.names: dict[nn.Module, str] = {}

    def hook_fn(self, function: Function, hook_type: str, name: str | None, retain_forward_cache: bool) -> HookFunction:
        """Return the function as this kind of hook: the one that is known, or a new one."""
        for known in self.name_to_hookfn.values():
            kind = known.function, known.hook_type, known.retain_forward_cache
            if kind == (function, hook_type, retain_forward_cache):
                if name is not None:
                    self._rename(known, name)
                return known
        hook_fn = HookFunction(function, hook_type, name, retain_forward_cache=retain_forward_cache)
        self.add_function(hook_fn)
        return hook_fn

    def add_function(self, hook_fn: HookFunction) -> None:
        """Take in a function, under a name of its own."""
        if hook_fn in self.hook_fns:
            return
        hook_fn.name = unique(hook_fn.name, self.name_to_hookfn)
        self.hook_fns.add(hook_fn)
        self.name_to_hookfn[hook_fn.name] = hook_fn
        self.function_to_hookfn.setdefault(hook_fn.function, hook_fn)

    def add_module(self, module: nn.Module, name: str | None) -> str:
        """Take in a module, under a name of its own, and return that. One that is known keeps its first."""
        known = self.names.get(module)
        if known is None:
            known = self.names[module] = unique(repr(module) if name is None else name, self.name_to_module)
            self.modules.add(module)
            self.name_to_module[known] = module
            self.module_to_hookhandle[module] = []
        elif name not in (None, known):
            warn(f"this module is registered as {known!r} already, so the name {name!r} is not used")
        return known

    def add_handle(self, handle: HookHandle) -> None:
        """Take in a handle, with its function and its module."""
        self.add_function(handle.hook_fn)
        self.add_module(handle.module, None if handle.module in self.names else handle.module_name)
        handle.set_name(unique(handle.name, self.name_to_hookhandle))
        self.name_to_hookhandle[handle.name] = handle
        self.module_to_hookhandle[handle.module].append(handle)
        handle.when_removed = self.forget
        for other in self.module_to_hookhandle[handle.module]:
            if other.hook_fn.hook_type == "backward_hook" != handle.hook_fn.hook_type:
                other.renew()  # Its gradients are those of what the other hooks make of inputs and outputs.

    def forget(self, handle: HookHandle) -> None:
        """Leave out a handle that was removed."""
        for name in [name for name, one in self.name_to_hookhandle.items() if one is handle]:
            del self.name_to_hookhandle[name]
        self.module_to_hookhandle[handle.module].remove(handle)

    def remove_functions(self, hook_fns: Iterable[HookFunction]) -> None:
        """Remove functions, with all their hooks."""
        for hook_fn in list(hook_fns):
            remove_all(hook_fn.handles)
            self.hook_fns.discard(hook_fn)
            del self.name_to_hookfn[hook_fn.name]
            others = [one for one in self.name_to_hookfn.values() if one.function == hook_fn.function]
            if others:
                self.function_to_hookfn[hook_fn.function] = others[0]
            else:
                del self.function_to_hookfn[hook_fn.function]

    def remove_module(self, module: nn.Module) -> None:
        """Remove a module, with all its hooks; their functions stay known."""
        remove_all(self.module_to_hookhandle[module])
        del self.module_to_hookhandle[module], self.name_to_module[self.names.pop(module)]
        self.modules.remove(module)

    def clear(self) -> None:
        """Remove everything."""
        for module in list(self.modules):
            self.remove_module(module)
        self.remove_functions(self.hook_fns)

    def select(self, modules: Iterable[nn.Module], functions: Sequence[Function], category: str) -> list[HookHandle]:
        """Return the handles on these modules, of these functions if any are named, and of a kind."""
        check_category(category)
        for function in functions:
            if function not in self.function_to_hookfn:
                warn(f"hook_types has {function!r}, which is not registered here")
        return [
            handle
            for module in modules
            for handle in self.module_to_hookhandle[module]
            if category in ("all", handle.hook_fn.hook_type) and (not functions or handle.hook_fn.function in functions)
        ]

    def _rename(self, hook_fn: HookFunction, name: str) -> None:
        """Give a function a name in the place of its repr; one that was given stays."""
        if hook_fn.name == name:
            return
        if hook_fn.name != repr(hook_fn.function):
            warn(f"this function is registered as {hook_fn.name!r} already, so the name {name!r} is not used")
            return
        del self.name_to_hookfn[hook_fn.name]
        hook_fn.name = unique(name, self.name_to_hookfn)
        self.name_to_hookfn[hook_fn.name] = hook_fn
        for handle in hook_fn.handles:
            del self.name_to_hookhandle[handle.name]
            handle.set_name(f"{hook_fn.name}[{self.names[handle.module]}]")
            self.name_to_hookhandle[handle.name] = handle


def check_category(category: str) -> None:
    """Raise for a kind of hook that there is not."""
    if category not in CATEGORIES:
        raise AssertionError(f"{category} is not a valid hook category. Choices are: {', '.join(CATEGORIES)}")


def remove_all(handles: Iterable[HookHandle]) -> None:
    """Remove handles."""
    for handle in list(handles):
        handle.remove()
