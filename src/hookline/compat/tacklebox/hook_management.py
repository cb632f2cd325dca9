"""HookManager: hooks on any number of modules, which can be switched and removed by module, function or kind."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import wraps
from typing import Any, TypeVar

from torch import nn

from hookline.compat.registrar import warn, weakly
from hookline.compat.tacklebox.helpers import CustomContext
from hookline.compat.tacklebox.hook_handles import HookFunction, HookHandle, detach_hook, increment_name, unique

__all__ = ["HookFunction", "HookHandle", "HookManager", "detach_hook", "increment_name", "validate_hook_category"]

CATEGORIES = (*HookFunction.HOOK_TYPES, "all")
Function = Callable[..., Any]
Functions = Sequence[Function]
T = TypeVar("T")


def check_category(category: str) -> None:
    """Raise for an unknown hook category."""
    if category not in CATEGORIES:
        raise AssertionError(f"{category} is not a valid hook category. Choices are: {', '.join(CATEGORIES)}")


def validate_hook_category(fn: Callable[..., T]) -> Callable[..., T]:
    """Decorate a function so that it first checks its keyword `category`."""

    @wraps(fn)
    def validated(*args: Any, category: str = "all", **kwargs: Any) -> T:
        check_category(category)
        return fn(*args, category=category, **kwargs)

    return validated


class HookManager:
    """Hooks on any number of modules, with tables to look them up.

    >>> import torch
    >>> manager = HookManager()
    >>> layer = nn.Linear(2, 2)
    >>> manager.register_forward_hook(lambda module, inputs, outputs: print(module.name), first=layer)
    >>> output = layer(torch.ones(1, 2))
    first
    >>> manager.cleanup()
    """

    def __init__(self) -> None:
        self.hook_fns: set[HookFunction] = set()
        self.modules: set[nn.Module] = set()
        self.name_to_hookfn: dict[str, HookFunction] = {}
        self.name_to_hookhandle: dict[str, HookHandle] = {}
        self.module_to_hookhandle: dict[nn.Module, list[HookHandle]] = {}
        self.name_to_module: dict[str, nn.Module] = {}
        self.function_to_hookfn: dict[Function, HookFunction] = {}
        self._named_here: set[nn.Module] = set()  # Modules whose `name` was set by this manager.

    def __del__(self, _is_over: Callable[[], bool] = sys.is_finalizing) -> None:  # At exit, `sys` may be gone.
        if not _is_over():
            self.cleanup()

    def register_hook(
        self,
        hook_type: str,
        function: Function,
        *modules: nn.Module,
        hook_fn_name: str | None = None,
        activate: bool = True,
        retain_forward_cache: bool = False,
        **named_modules: nn.Module,
    ) -> None:
        """Hook modules. A keyword is the module's name; a positional module is named by its repr."""
        given: list[tuple[str | None, nn.Module]] = [(None, module) for module in modules]
        given += named_modules.items()
        for name, module in given:
            if not isinstance(module, nn.Module):
                raise TypeError(f"{name or 'a module'} is a torch.nn.Module, not {type(module).__name__}")
        made = HookFunction(function, hook_type, hook_fn_name, retain_forward_cache=retain_forward_cache)
        kind = function, hook_type, retain_forward_cache
        known = (one for one in self.hook_fns if (one.function, one.hook_type, one.retain_forward_cache) == kind)
        hook_fn = next(known, made)
        hook_fn.refuse_again([module for _, module in given])
        self.add_hook_fn(hook_fn)
        if hook_fn is not made and hook_fn_name is not None:
            self._rename(hook_fn, hook_fn_name)
        for name, module in given:
            handle_name = f"{hook_fn.name}[{self._add_module(module, name)}]"
            self.add_hook_handle(HookHandle(hook_fn, module, handle_name, activate))

    def register_forward_hook(
        self,
        function: Function,
        *modules: nn.Module,
        hook_fn_name: str | None = None,
        activate: bool = True,
        **named_modules: nn.Module,
    ) -> None:
        """Call `function(module, inputs, outputs)` at the end of a module's forward; see `register_hook`."""
        options: dict[str, Any] = {"hook_fn_name": hook_fn_name, "activate": activate, **named_modules}
        self.register_hook("forward_hook", function, *modules, **options)

    def register_forward_pre_hook(
        self,
        function: Function,
        *modules: nn.Module,
        hook_fn_name: str | None = None,
        activate: bool = True,
        **named_modules: nn.Module,
    ) -> None:
        """Call `function(module, inputs)` before a module's forward; see `register_hook`."""
        options: dict[str, Any] = {"hook_fn_name": hook_fn_name, "activate": activate, **named_modules}
        self.register_hook("forward_pre_hook", function, *modules, **options)

    def register_backward_hook(
        self,
        function: Function,
        *modules: nn.Module,
        hook_fn_name: str | None = None,
        activate: bool = True,
        retain_forward_cache: bool = False,
        **named_modules: nn.Module,
    ) -> None:
        """Call `function(module, grad_in, grad_out)` in a module's backward; see `register_hook`.

        With `retain_forward_cache` the function also gets the inputs and outputs of the forward.
        """
        options: dict[str, Any] = {"hook_fn_name": hook_fn_name, "activate": activate, **named_modules}
        options["retain_forward_cache"] = retain_forward_cache
        self.register_hook("backward_hook", function, *modules, **options)

    def get_module_hooks(
        self,
        module: nn.Module,
        hook_types: Functions = (),
        category: str = "all",
        include_active: bool = True,
        include_inactive: bool = True,
        include_base_hooks: bool = False,
    ) -> Iterator[HookHandle]:
        """Return the handles on a module. `hook_types` are functions; `include_base_hooks` has no effect."""
        chosen = self._select([module], hook_types, category)
        return (handle for handle in chosen if (include_active if handle.active else include_inactive))

    def get_module_hooks_by_name(
        self, module_name: str, hook_types: Functions = (), **kwargs: Any
    ) -> Iterator[HookHandle]:
        """Return the handles on the module with this name."""
        return self.get_module_hooks(self.name_to_module[module_name], hook_types, **kwargs)

    def is_module_hooked(self, module: nn.Module) -> bool:
        """Return True if any hook is active on a module."""
        return any(self.get_module_hooks(module, include_inactive=False))

    def is_module_hooked_backward(self, module: nn.Module) -> bool:
        """Return True if any backward hook is active on a module."""
        return any(self.get_module_hooks(module, category="backward_hook", include_inactive=False))

    def activate_all_hooks(self, hook_types: Functions = (), category: str = "all") -> None:
        """Activate hooks on all modules."""
        self.activate_module_hooks(*self.module_to_hookhandle, hook_types=hook_types, category=category)

    activate_all_hook = activate_all_hooks  # One line of tacklebox's README spells it like this.

    def deactivate_all_hooks(self, hook_types: Functions = (), category: str = "all") -> None:
        """Deactivate hooks on all modules."""
        self.deactivate_module_hooks(*self.module_to_hookhandle, hook_types=hook_types, category=category)

    def activate_module_hooks(self, *modules: nn.Module, hook_types: Functions = (), category: str = "all") -> None:
        """Activate hooks on these modules."""
        for handle in self._select(modules, hook_types, category):
            handle.activate()

    def deactivate_module_hooks(self, *modules: nn.Module, hook_types: Functions = (), category: str = "all") -> None:
        """Deactivate hooks on these modules."""
        for handle in self._select(modules, hook_types, category):
            handle.deactivate()

    def activate_module_hooks_by_name(
        self, *module_names: str, hook_types: Functions = (), category: str = "all"
    ) -> None:
        """Activate hooks on the modules with these names."""
        self.activate_module_hooks(*self._named(module_names), hook_types=hook_types, category=category)

    def deactivate_module_hooks_by_name(
        self, *module_names: str, hook_types: Functions = (), category: str = "all"
    ) -> None:
        """Deactivate hooks on the modules with these names."""
        self.deactivate_module_hooks(*self._named(module_names), hook_types=hook_types, category=category)

    def activate_hook_by_name(self, hook_name: str) -> None:
        """Activate one hook, by its id `function[module]`."""
        self.name_to_hookhandle[hook_name].activate()

    def deactivate_hook_by_name(self, hook_name: str) -> None:
        """Deactivate one hook, by its id `function[module]`."""
        self.name_to_hookhandle[hook_name].deactivate()

    def hook_all_context(
        self,
        hook_types: Functions = (),
        add_enter_fns: Functions = (),
        add_exit_fns: Functions = (),
        category: str = "all",
    ) -> CustomContext:
        """Return a context in which hooks are active on all modules. Leaving it restores their previous state."""
        check_category(category)
        handles = Active(lambda: self._select(self.module_to_hookhandle, hook_types, category))
        return CustomContext(add_enter_fns, add_exit_fns).merge_context(handles, inplace=True)

    def hook_module_context(
        self,
        *modules: nn.Module,
        hook_types: Functions = (),
        add_enter_fns: Functions = (),
        add_exit_fns: Functions = (),
        category: str = "all",
    ) -> CustomContext:
        """Return a context in which hooks are active on these modules. Leaving it restores their previous state."""
        self._select(modules, hook_types, category)  # Raises here if a module is not registered.
        handles = Active(lambda: self._select(modules, hook_types, category))
        return CustomContext(add_enter_fns, add_exit_fns).merge_context(handles, inplace=True)

    def hook_module_context_by_name(
        self,
        *module_names: str,
        hook_types: Functions = (),
        add_enter_fns: Functions = (),
        add_exit_fns: Functions = (),
        category: str = "all",
    ) -> CustomContext:
        """Return the context of `hook_module_context` for the modules with these names."""
        options = {"add_enter_fns": add_enter_fns, "add_exit_fns": add_exit_fns, "hook_types": hook_types}
        return self.hook_module_context(*self._named(module_names), category=category, **options)

    def remove_hook(self, handle: HookHandle) -> None:
        """Remove one hook."""
        if self.name_to_hookhandle[handle.name] is not handle:
            raise KeyError(handle.name)
        handle.remove()

    def remove_hook_by_name(self, handle_name: str) -> None:
        """Remove one hook, by its id `function[module]`."""
        self.name_to_hookhandle[handle_name].remove()

    def remove_hook_function(self, function: Function) -> None:
        """Remove a function from all modules, for every kind of hook."""
        first = self.function_to_hookfn[function]
        for hook_fn in [one for one in self.name_to_hookfn.values() if one.function == first.function]:
            self.remove_hook_function_by_name(hook_fn.name)

    def remove_hook_function_by_name(self, hook_fn_name: str) -> None:
        """Remove the function with this name from all modules."""
        hook_fn = self.name_to_hookfn.pop(hook_fn_name)
        for handle in hook_fn.handles:
            handle.remove()
        self.hook_fns.discard(hook_fn)
        del self.function_to_hookfn[hook_fn.function]
        for other in self.name_to_hookfn.values():
            if other.function == hook_fn.function:
                self.function_to_hookfn.setdefault(other.function, other)

    def remove_module(self, module: nn.Module) -> None:
        """Remove a module with all its hooks. Their functions stay registered under their names."""
        for handle in list(self.module_to_hookhandle[module]):
            handle.remove()
        del self.module_to_hookhandle[module], self.name_to_module[self._name_of(module)]
        self.modules.remove(module)
        if module in self._named_here:
            self._named_here.remove(module)
            vars(module).pop("name", None)

    def remove_module_by_name(self, module_name: str) -> None:
        """Remove the module with this name and all its hooks."""
        self.remove_module(self.name_to_module[module_name])

    def cleanup(self) -> None:
        """Remove everything. This also happens when the manager is garbage-collected."""
        for module in list(self.modules):
            self.remove_module(module)
        for name in list(self.name_to_hookfn):
            self.remove_hook_function_by_name(name)

    def add_hook_fn(self, *hook_fns: HookFunction) -> None:
        """Add functions that were created elsewhere."""
        for hook_fn in hook_fns:
            if hook_fn not in self.hook_fns:
                hook_fn.name = unique(hook_fn.name, self.name_to_hookfn)
                self.hook_fns.add(hook_fn)
                self.name_to_hookfn[hook_fn.name] = hook_fn
                self.function_to_hookfn.setdefault(hook_fn.function, hook_fn)

    def add_hook_handle(self, *hook_handles: HookHandle) -> None:
        """Add handles that were created elsewhere, with their functions and modules."""
        for handle in hook_handles:
            self.add_hook_fn(handle.hook_fn)
            self._add_module(handle.module, getattr(handle.module, "name", None))
            others = self.module_to_hookhandle[handle.module]
            if handle in others:
                continue
            handle.set_name(unique(handle.name, self.name_to_hookhandle))
            self.name_to_hookhandle[handle.name] = handle
            handle.when_removed.append(weakly(self._forget))
            for other in others if handle.hook_fn.hook_type != "backward_hook" else ():
                if other.hook_fn.hook_type == "backward_hook":
                    other.renew()  # A backward hook gets the gradients of the values that other hooks returned.
            others.append(handle)

    def _add_module(self, module: nn.Module, name: str | None) -> str:
        """Add a module to the tables under a unique name, and return that name. A known module keeps its first name."""
        if module in self.modules:
            known = self._name_of(module)
            if name not in (None, known, getattr(module, "name", None)):
                warn(f"this module is registered as {known!r} already, so the name {name!r} is not used")
            return known
        name = unique(repr(module) if name is None else name, self.name_to_module)
        self.modules.add(module)
        self.name_to_module[name] = module
        self.module_to_hookhandle[module] = []
        if not hasattr(module, "name"):  # Hooks read it, as in the README's examples.
            self._named_here.add(module)
            vars(module)["name"] = name
        return name

    def _name_of(self, module: nn.Module) -> str:
        return next(name for name, one in self.name_to_module.items() if one is module)

    def _forget(self, handle: HookHandle) -> None:
        for name in [name for name, one in self.name_to_hookhandle.items() if one is handle]:
            del self.name_to_hookhandle[name]
        self.module_to_hookhandle[handle.module].remove(handle)

    def _rename(self, hook_fn: HookFunction, name: str) -> None:
        """Rename a function that is still named by its repr. A name that was given earlier stays."""
        if hook_fn.name == name:
            return
        if hook_fn.name != repr(hook_fn.function):
            warn(f"this function is registered as {hook_fn.name!r} already, so the name {name!r} is not used")
            return
        del self.name_to_hookfn[hook_fn.name]
        hook_fn.name = unique(name, self.name_to_hookfn)
        self.name_to_hookfn[hook_fn.name] = hook_fn
        for handle in [one for one in self.name_to_hookhandle.values() if one.hook_fn is hook_fn]:
            del self.name_to_hookhandle[handle.name]
            handle.set_name(f"{hook_fn.name}[{self._name_of(handle.module)}]")
            self.name_to_hookhandle[handle.name] = handle

    def _named(self, names: Iterable[str]) -> list[nn.Module]:
        return [self.name_to_module[name] for name in names]

    def _select(self, modules: Iterable[nn.Module], functions: Functions, category: str) -> list[HookHandle]:
        """Return the handles of this category on these modules; if there are `functions`, only handles of these."""
        check_category(category)
        return [
            handle
            for module in modules
            for handle in self.module_to_hookhandle[module]
            if category in ("all", handle.hook_fn.hook_type) and (not functions or handle.hook_fn.function in functions)
        ]


class Active:
    """A context in which some handles are active. Leaving it restores their previous state. It can be entered again."""

    def __init__(self, handles: Callable[[], Iterable[HookHandle]]) -> None:
        self._handles = handles
        self._entered: list[ExitStack] = []

    def __enter__(self) -> None:
        with ExitStack() as stack:
            for handle in self._handles():
                stack.callback(handle.switch, handle.active)
                handle.switch(True)
            self._entered.append(stack.pop_all())

    def __exit__(self, *_: object) -> None:
        self._entered.pop().close()
