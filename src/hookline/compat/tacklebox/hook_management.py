"""HookManager: hooks on any number of modules, which can be switched and removed by module, function or kind."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from typing import Any, TypeVar

from torch import nn

from hookline.compat.shared import warn
from hookline.compat.tacklebox.helpers import CustomContext
from hookline.compat.tacklebox.hook_handles import (
    Holding,
    HookFunction,
    HookHandle,
    detach_hook,
    increment_name,
    unique,
    warn_of_never_called,
)

__all__ = ["HookFunction", "HookHandle", "HookManager", "detach_hook", "increment_name", "validate_hook_category"]

CATEGORIES = (*HookFunction.HOOK_TYPES, "all")
OPTIONS = ("hook_fn_name", "activate", "retain_forward_cache")
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


def look_up(table: Mapping[Any, T], key: Hashable) -> T:
    """Return an entry of a table. Raise KeyError for a missing key, with a note that names similar keys."""
    if key not in table:
        raise _missing(table, key)
    return table[key]


def no_module(value: T) -> T:
    """Return `wrap_calls`. Raise if it is a module: TorchHook's manager takes the model as this argument."""
    if isinstance(value, nn.Module):
        kind = type(value).__name__
        raise TypeError(f"wrap_calls is True or False, not a {kind}; pass modules to register_forward_hook")
    return value


def refuse_other(name: str | None, value: object) -> None:
    """Raise if an argument given as a module, by position or by name, is not a module."""
    if isinstance(value, nn.Module):
        return
    if name is None:
        raise TypeError(f"a module is a torch.nn.Module, not {type(value).__name__}")
    near = difflib.get_close_matches(name, OPTIONS, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise TypeError(f"{name}={value!r}: a module is a torch.nn.Module, not {type(value).__name__}{hint}")


def _missing(table: Mapping[Any, Any], key: Hashable) -> KeyError:
    error = KeyError(key)
    near = difflib.get_close_matches(key, table, n=3) if isinstance(key, str) else []
    if hasattr(error, "add_note"):  # Python 3.11.
        hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
        error.add_note(f"hookline: not registered with this manager{hint}")
    return error


Function = Callable[..., Any]
Functions = Sequence[Function]
RETAIN = "retain_forward_cache"


class Tables:
    """The registered functions, modules and handles, in the order of registration."""

    def __init__(self) -> None:
        self.hook_fns: set[HookFunction] = set()
        self.modules: set[nn.Module] = set()
        self.name_to_hookfn: dict[str, HookFunction] = {}
        self.name_to_hookhandle: dict[str, HookHandle] = {}
        self.module_to_hookhandle: dict[nn.Module, list[HookHandle]] = {}
        self.name_to_module: dict[str, nn.Module] = {}
        self.function_to_hookfn: dict[Function, HookFunction] = {}
        self.names: dict[nn.Module, str] = {}
        self._latest: dict[str, str] = {}

    def register(
        self,
        hook_type: str,
        function: Function,
        modules: Iterable[nn.Module],
        named_modules: Mapping[str, Any],
        wrap_calls: bool,
        name: str | None,
        activate: bool,
        retain_forward_cache: bool = False,
    ) -> None:
        """Hook modules. A module without a name is named by its repr. A refused registration leaves nothing behind."""
        given: list[tuple[str | None, nn.Module]] = [(None, module) for module in modules]
        given += [pair for pair in named_modules.items() if pair[0] != RETAIN]
        retains = named_modules.get(RETAIN, retain_forward_cache)  # HookFunction refuses it for other kinds.
        made = HookFunction(function, hook_type, name, retain_forward_cache=retains)
        hook_fn = self._known(made) or made
        self._refuse(hook_fn, given)
        if hook_fn is not made and name is not None:
            self._rename(hook_fn, name)
        self.add_function(hook_fn)
        handles: list[HookHandle] = []
        try:
            for module_name, module in given:
                known = self.add_module(module, module_name)
                handles.append(HookHandle.of_manager(hook_fn, module, known, not wrap_calls))
                self.add_handle(handles[-1])
        except BaseException:
            remove_all(handles)
            raise
        for handle in handles if activate else ():
            handle.activate()
        warn_of_never_called(handles)

    def add_function(self, hook_fn: HookFunction) -> None:
        """Add a function to the tables under a unique name."""
        if hook_fn in self.hook_fns:
            return
        hook_fn.name = unique(hook_fn.name, self.name_to_hookfn)
        self.hook_fns.add(hook_fn)
        self.name_to_hookfn[hook_fn.name] = hook_fn
        self.function_to_hookfn.setdefault(hook_fn.function, hook_fn)

    def add_module(self, module: nn.Module, name: str | None) -> str:
        """Add a module to the tables under a unique name, and return that name. A known module keeps its first name."""
        known = self.names.get(module)
        if known is None:
            known = unique(repr(module) if name is None else name, self.name_to_module, self._latest)
            self.names[module] = known
            self.modules.add(module)
            self.name_to_module[known] = module
            self.module_to_hookhandle[module] = []
        elif name not in (None, known):
            warn(f"this module is registered as {known!r} already, so the name {name!r} is not used")
        return known

    def add_handle(self, handle: HookHandle) -> None:
        """Add a handle to the tables, with its function and its module."""
        self.add_function(handle.hook_fn)
        self.add_module(handle.module, None if handle.module in self.names else handle.module_name)
        others = self.module_to_hookhandle[handle.module]
        if handle in others:
            return
        handle.set_name(unique(handle.name, self.name_to_hookhandle))
        self.name_to_hookhandle[handle.name] = handle
        handle.when_removed.append(self.forget)
        for other in others:
            if other.hook_fn.hook_type == "backward_hook" != handle.hook_fn.hook_type:
                # A backward hook acts last: it gets the gradients of the inputs and outputs that other hooks returned.
                other.renew()
        others.append(handle)

    def forget(self, handle: HookHandle) -> None:
        """Remove a handle from the tables."""
        _leave_out(self.name_to_hookhandle, handle.name, handle)
        self.module_to_hookhandle[handle.module].remove(handle)

    def remove_functions(self, hook_fns: Iterable[HookFunction]) -> None:
        """Remove functions, with all their hooks."""
        for hook_fn in list(hook_fns):
            remove_all(hook_fn.handles)
            self.hook_fns.discard(hook_fn)
            _leave_out(self.name_to_hookfn, hook_fn.name, hook_fn)
            others = [one for one in self.name_to_hookfn.values() if one.function == hook_fn.function]
            if others:
                self.function_to_hookfn[hook_fn.function] = others[0]
            else:
                del self.function_to_hookfn[hook_fn.function]

    def remove_module(self, module: nn.Module) -> None:
        """Remove a module, with all its hooks; their functions stay known."""
        remove_all(look_up(self.module_to_hookhandle, module))
        del self.module_to_hookhandle[module], self.name_to_module[self.names.pop(module)]
        self.modules.remove(module)
        self._latest.clear()

    def clear(self) -> None:
        """Remove everything."""
        for module in list(self.modules):
            self.remove_module(module)
        self.remove_functions(self.hook_fns)

    def drop(self) -> None:
        """Remove everything because the manager was garbage-collected; warn if that was probably a mistake."""
        handles = self.name_to_hookhandle.values()
        idle = [name for name, handle in self.name_to_hookhandle.items() if handle.active and handle.handle]
        try:
            if idle and not any(handle.was_called for handle in handles):
                more = f" and {len(idle) - 1} more" if len(idle) > 1 else ""
                warn(f"a HookManager is dropped before its hooks were called ({idle[0]}{more}): keep it in a variable")
        finally:
            self.clear()

    def select(self, modules: Iterable[nn.Module], functions: Functions, category: str) -> list[HookHandle]:
        """Return the handles of this category on these modules; if there are `functions`, only handles of these."""
        check_category(category)
        for function in functions:
            if function not in self.function_to_hookfn:
                warn(f"hook_types has {function!r}, which is not registered here")
        return [
            handle
            for module in modules
            for handle in look_up(self.module_to_hookhandle, module)
            if category in ("all", handle.hook_fn.hook_type) and (not functions or handle.hook_fn.function in functions)
        ]

    def _refuse(self, hook_fn: HookFunction, given: Sequence[tuple[str | None, nn.Module]]) -> None:
        """Raise if an argument is not a module, or is a module that already has this function."""
        if isinstance(hook_fn.function, nn.Module) and not given:
            kind = type(hook_fn.function).__name__
            raise TypeError(f"a hook is a function, not a {kind}; the modules come after it")
        names: dict[nn.Module, str] = {}
        for name, module in given:
            refuse_other(name, module)
            names.setdefault(module, self.names.get(module, repr(module) if name is None else name))
        hook_fn.refuse_again((module, names[module]) for _, module in given)

    def _known(self, made: HookFunction) -> HookFunction | None:
        """Return the registered hook with the same function and kind, if there is one."""
        if made.function not in self.function_to_hookfn:
            return None
        kind = made.function, made.hook_type, made.retain_forward_cache
        alike = (one for one in self.name_to_hookfn.values() if one.hook_type == made.hook_type)
        return next((one for one in alike if (one.function, one.hook_type, one.retain_forward_cache) == kind), None)

    def _rename(self, hook_fn: HookFunction, name: str) -> None:
        """Rename a function that is still named by its repr. A name that was given earlier stays."""
        if hook_fn.name == name:
            return
        if hook_fn.name != repr(hook_fn.function):
            warn(f"this function is registered as {hook_fn.name!r} already, so the name {name!r} is not used")
            return
        _leave_out(self.name_to_hookfn, hook_fn.name, hook_fn)
        hook_fn.name = unique(name, self.name_to_hookfn)
        self.name_to_hookfn[hook_fn.name] = hook_fn
        for handle in hook_fn.handles:
            if self.name_to_hookhandle.get(handle.name) is handle:  # Otherwise it was registered without a manager.
                del self.name_to_hookhandle[handle.name]
                handle.set_name(f"{hook_fn.name}[{self.names[handle.module]}]")
                self.name_to_hookhandle[handle.name] = handle


def context_of(handles: Callable[[], Iterable[HookHandle]], enter_fns: Functions, exit_fns: Functions) -> CustomContext:
    """Return a context in which handles are active. Leaving it restores their previous state."""
    return CustomContext(enter_fns, exit_fns).merge_context(Holding(handles), inplace=True)


def remove_all(handles: Iterable[HookHandle]) -> None:
    """Remove handles."""
    for handle in list(handles):
        handle.remove()


def _leave_out(table: dict[str, Any], name: str, gone: object) -> None:
    """Remove an entry from a table. It may be there under an older name, since a second manager may have renamed it."""
    if table.get(name) is not gone:
        name = next(other for other, one in table.items() if one is gone)
    del table[name]


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

    def __del__(self, _is_over: Callable[[], bool] = sys.is_finalizing) -> None:  # At exit, `sys` may be gone.
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
        """Hook modules. A keyword is the module's name; a positional module is named by its repr."""
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

        With `retain_forward_cache` the function also gets the inputs and outputs of the forward.
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
        """Return the handles on a module. `hook_types` are functions; `include_base_hooks` has no effect."""
        chosen = self._tables.select([module], hook_types, category)
        return (handle for handle in chosen if (include_active if handle.active else include_inactive))

    def get_module_hooks_by_name(
        self, module_name: str, hook_types: Functions = (), **kwargs: Any
    ) -> Iterator[HookHandle]:
        """Return the handles on the module with this name."""
        return self.get_module_hooks(look_up(self.name_to_module, module_name), hook_types, **kwargs)

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
        for handle in self._tables.select(modules, hook_types, category):
            handle.activate()

    def deactivate_module_hooks(self, *modules: nn.Module, hook_types: Functions = (), category: str = "all") -> None:
        """Deactivate hooks on these modules."""
        for handle in self._tables.select(modules, hook_types, category):
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
        look_up(self.name_to_hookhandle, hook_name).activate()

    def deactivate_hook_by_name(self, hook_name: str) -> None:
        """Deactivate one hook, by its id `function[module]`."""
        look_up(self.name_to_hookhandle, hook_name).deactivate()

    def hook_all_context(
        self,
        hook_types: Functions = (),
        add_enter_fns: Functions = (),
        add_exit_fns: Functions = (),
        category: str = "all",
    ) -> CustomContext:
        """Return a context in which hooks are active on all modules. Leaving it restores their previous state."""
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
        """Return a context in which hooks are active on these modules. Leaving it restores their previous state."""
        self._tables.select(modules, hook_types, category)  # Raises here if a module is not registered.
        return context_of(lambda: self._tables.select(modules, hook_types, category), add_enter_fns, add_exit_fns)

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
        if look_up(self.name_to_hookhandle, handle.name) is not handle:
            raise KeyError(handle.name)
        handle.remove()

    def remove_hook_by_name(self, handle_name: str) -> None:
        """Remove one hook, by its id `function[module]`."""
        look_up(self.name_to_hookhandle, handle_name).remove()

    def remove_hook_function(self, function: Function) -> None:
        """Remove a function from all modules, for every kind of hook."""
        first = look_up(self.function_to_hookfn, function)
        self._tables.remove_functions(one for one in self.hook_fns if one.function == first.function)

    def remove_hook_function_by_name(self, hook_fn_name: str) -> None:
        """Remove the function with this name from all modules."""
        self._tables.remove_functions([look_up(self.name_to_hookfn, hook_fn_name)])

    def remove_module(self, module: nn.Module) -> None:
        """Remove a module with all its hooks. Their functions stay registered under their names."""
        self._tables.remove_module(module)

    def remove_module_by_name(self, module_name: str) -> None:
        """Remove the module with this name and all its hooks."""
        self._tables.remove_module(look_up(self.name_to_module, module_name))

    def cleanup(self) -> None:
        """Remove everything. This also happens when the manager is garbage-collected."""
        self._tables.clear()

    def add_hook_fn(self, *hook_fns: HookFunction) -> None:
        """Add functions that were created elsewhere."""
        for hook_fn in hook_fns:
            self._tables.add_function(hook_fn)

    def add_hook_handle(self, *hook_handles: HookHandle) -> None:
        """Add handles that were created elsewhere, with their functions and modules."""
        for handle in hook_handles:
            self._tables.add_handle(handle)

    def _named(self, names: Iterable[str]) -> list[nn.Module]:
        return [look_up(self.name_to_module, name) for name in names]
