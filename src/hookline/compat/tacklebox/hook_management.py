"""HookManager: hooks on any number of modules, switched and removed by module, by function and by kind."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn

from hookline.compat.tacklebox.calling import detach_hook
from hookline.compat.tacklebox.handles import HookFunction, HookHandle
from hookline.compat.tacklebox.helpers import CustomContext
from hookline.compat.tacklebox.lookup import check_category, look_up, no_module, validate_hook_category
from hookline.compat.tacklebox.naming import increment_name
from hookline.compat.tacklebox.tables import Function, Functions, Tables, context_of

__all__ = ["HookFunction", "HookHandle", "HookManager", "detach_hook", "increment_name", "validate_hook_category"]


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

    def __init__(self, wrap_calls: bool = True, recursion_depth: int = 0) -> None:
        tables = self._tables = Tables()
        self.wrap_calls = no_module(wrap_calls)
        self.max_recursion_depth = recursion_depth
        self.hook_fns, self.modules = tables.hook_fns, tables.modules
        self.name_to_hookfn, self.function_to_hookfn = tables.name_to_hookfn, tables.function_to_hookfn
        self.name_to_module, self.module_to_hookhandle = tables.name_to_module, tables.module_to_hookhandle
        self.name_to_hookhandle = tables.name_to_hookhandle

    def __del__(self, _is_over: Callable[[], bool] = sys.is_finalizing) -> None:  # Then `sys` may be gone.
        if not _is_over():
            self._tables.drop()

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
        """Hook modules: a keyword is the module's name, and one without is named by its repr."""
        options = hook_fn_name, activate, retain_forward_cache
        self._tables.register(hook_type, function, modules, named_modules, self.wrap_calls, *options)

    def register_forward_hook(
        self,
        function: Function,
        *modules: nn.Module,
        hook_fn_name: str | None = None,
        activate: bool = True,
        **named_modules: nn.Module,
    ) -> None:
        """Call `function(module, inputs, outputs)` at the end of a module's forward; see `register_hook`."""
        self._tables.register("forward_hook", function, modules, named_modules, self.wrap_calls, hook_fn_name, activate)

    def register_forward_pre_hook(
        self,
        function: Function,
        *modules: nn.Module,
        hook_fn_name: str | None = None,
        activate: bool = True,
        **named_modules: nn.Module,
    ) -> None:
        """Call `function(module, inputs)` before a module's forward; see `register_hook`."""
        self._tables.register(
            "forward_pre_hook", function, modules, named_modules, self.wrap_calls, hook_fn_name, activate
        )

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

        With `retain_forward_cache` it is given the inputs and outputs of the forward too.
        """
        options = hook_fn_name, activate, retain_forward_cache
        self._tables.register("backward_hook", function, modules, named_modules, self.wrap_calls, *options)

    def get_module_hooks(
        self,
        module: nn.Module,
        hook_types: Functions = (),
        category: str = "all",
        include_active: bool = True,
        include_inactive: bool = True,
        include_base_hooks: bool = False,
    ) -> Iterator[HookHandle]:
        """Return the handles on a module: `hook_types` are functions; there are no base hooks."""
        chosen = self._tables.select([module], hook_types, category)
        return (handle for handle in chosen if (include_active if handle.active else include_inactive))

    def get_module_hooks_by_name(
        self, module_name: str, hook_types: Functions = (), **kwargs: Any
    ) -> Iterator[HookHandle]:
        """Return the handles on the module of this name."""
        return self.get_module_hooks(look_up(self.name_to_module, module_name), hook_types, **kwargs)

    def is_module_hooked(self, module: nn.Module) -> bool:
        """Whether any hook is active on a module."""
        return any(self.get_module_hooks(module, include_inactive=False))

    def is_module_hooked_backward(self, module: nn.Module) -> bool:
        """Whether any backward hook is active on a module."""
        return any(self.get_module_hooks(module, category="backward_hook", include_inactive=False))

    def activate_all_hooks(self, hook_types: Functions = (), category: str = "all") -> None:
        """Let hooks act on all modules."""
        self.activate_module_hooks(*self.module_to_hookhandle, hook_types=hook_types, category=category)

    activate_all_hook = activate_all_hooks  # As one line of the README has it.

    def deactivate_all_hooks(self, hook_types: Functions = (), category: str = "all") -> None:
        """Let hooks rest on all modules."""
        self.deactivate_module_hooks(*self.module_to_hookhandle, hook_types=hook_types, category=category)

    def activate_module_hooks(self, *modules: nn.Module, hook_types: Functions = (), category: str = "all") -> None:
        """Let hooks act on these modules."""
        for handle in self._tables.select(modules, hook_types, category):
            handle.activate()

    def deactivate_module_hooks(self, *modules: nn.Module, hook_types: Functions = (), category: str = "all") -> None:
        """Let hooks rest on these modules."""
        for handle in self._tables.select(modules, hook_types, category):
            handle.deactivate()

    def activate_module_hooks_by_name(
        self, *module_names: str, hook_types: Functions = (), category: str = "all"
    ) -> None:
        """Let hooks act on the modules of these names."""
        self.activate_module_hooks(*self._named(module_names), hook_types=hook_types, category=category)

    def deactivate_module_hooks_by_name(
        self, *module_names: str, hook_types: Functions = (), category: str = "all"
    ) -> None:
        """Let hooks rest on the modules of these names."""
        self.deactivate_module_hooks(*self._named(module_names), hook_types=hook_types, category=category)

    def activate_hook_by_name(self, hook_name: str) -> None:
        """Let one hook act, by its id `function[module]`."""
        look_up(self.name_to_hookhandle, hook_name).activate()

    def deactivate_hook_by_name(self, hook_name: str) -> None:
        """Let one hook rest, by its id `function[module]`."""
        look_up(self.name_to_hookhandle, hook_name).deactivate()

    def hook_all_context(
        self,
        hook_types: Functions = (),
        add_enter_fns: Functions = (),
        add_exit_fns: Functions = (),
        category: str = "all",
    ) -> CustomContext:
        """Return a context in which hooks act on all modules; then they are as before."""
        check_category(category)
        everywhere = self.module_to_hookhandle
        return context_of(lambda: self._tables.select(everywhere, hook_types, category), add_enter_fns, add_exit_fns)

    def hook_module_context(
        self,
        *modules: nn.Module,
        hook_types: Functions = (),
        add_enter_fns: Functions = (),
        add_exit_fns: Functions = (),
        category: str = "all",
    ) -> CustomContext:
        """Return a context in which hooks act on these modules; then they are as before."""
        self._tables.select(modules, hook_types, category)  # What is not registered is said here.
        return context_of(lambda: self._tables.select(modules, hook_types, category), add_enter_fns, add_exit_fns)

    def hook_module_context_by_name(
        self,
        *module_names: str,
        hook_types: Functions = (),
        add_enter_fns: Functions = (),
        add_exit_fns: Functions = (),
        category: str = "all",
    ) -> CustomContext:
        """Return a context in which hooks act on the modules of these names; then they are as before."""
        options = {"add_enter_fns": add_enter_fns, "add_exit_fns": add_exit_fns, "hook_types": hook_types}
        return self.hook_module_context(*self._named(module_names), category=category, **options)

    def remove_hook(self, handle: HookHandle) -> None:
        """Remove one hook."""
        if look_up(self.name_to_hookhandle, handle.name) is not handle:
            raise KeyError(handle.name)
        handle.remove()

    def remove_hook_by_name(self, handle_name: str) -> None:
        """Remove one hook, by its id `function[module]`."""
        look_up(self.name_to_hookhandle, handle_name).remove()

    def remove_hook_function(self, function: Function) -> None:
        """Remove a function from all modules, of whatever kind it is."""
        first = look_up(self.function_to_hookfn, function)
        self._tables.remove_functions(one for one in self.hook_fns if one.function == first.function)

    def remove_hook_function_by_name(self, hook_fn_name: str) -> None:
        """Remove a function from all modules, by its name."""
        self._tables.remove_functions([look_up(self.name_to_hookfn, hook_fn_name)])

    def remove_module(self, module: nn.Module) -> None:
        """Remove a module with all its hooks. Their functions stay known by their names."""
        self._tables.remove_module(module)

    def remove_module_by_name(self, module_name: str) -> None:
        """Remove the module of this name with all its hooks."""
        self._tables.remove_module(look_up(self.name_to_module, module_name))

    def cleanup(self) -> None:
        """Remove everything, as happens when nobody holds the manager any more."""
        self._tables.clear()

    def add_hook_fn(self, *hook_fns: HookFunction) -> None:
        """Take in functions that were made elsewhere."""
        for hook_fn in hook_fns:
            self._tables.add_function(hook_fn)

    def add_hook_handle(self, *hook_handles: HookHandle) -> None:
        """Take in handles that were made elsewhere, with their functions and modules."""
        for handle in hook_handles:
            self._tables.add_handle(handle)

    def _named(self, names: Iterable[str]) -> list[nn.Module]:
        return [look_up(self.name_to_module, name) for name in names]
