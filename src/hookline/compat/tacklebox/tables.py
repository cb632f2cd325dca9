"""The tables of a manager: its functions, modules and handles by name, and each by the other.

They don't know the manager, so that one that nobody holds any more goes, and takes its hooks along.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from hookline.compat.tacklebox.handles import Holding, HookFunction, HookHandle, warn_of_never_called
from hookline.compat.tacklebox.helpers import CustomContext
from hookline.compat.tacklebox.lookup import check_category, look_up, refuse_other
from hookline.compat.tacklebox.naming import unique
from hookline.compat.warning import warn

Function = Callable[..., Any]
Functions = Sequence[Function]
RETAIN = "retain_forward_cache"


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
        """Hook modules, those without a name by their repr. Of what is refused nothing stays."""
        given: list[tuple[str | None, nn.Module]] = [(None, module) for module in modules]
        given += [pair for pair in named_modules.items() if pair[0] != RETAIN]
        retains = named_modules.get(RETAIN, retain_forward_cache)  # Of a hook that can't: it is refused.
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
            known = unique(repr(module) if name is None else name, self.name_to_module, self._latest)
            self.names[module] = known
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
        others = self.module_to_hookhandle[handle.module]
        if handle in others:
            return
        handle.set_name(unique(handle.name, self.name_to_hookhandle))
        self.name_to_hookhandle[handle.name] = handle
        handle.when_removed.append(self.forget)
        for other in others:
            if other.hook_fn.hook_type == "backward_hook" != handle.hook_fn.hook_type:
                other.renew()  # Its gradients are those of what the other hooks make of inputs and outputs.
        others.append(handle)

    def forget(self, handle: HookHandle) -> None:
        """Leave out a handle that was removed."""
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
        """Remove everything, for nobody holds the manager any more; say so if that is likely a mistake."""
        handles = self.name_to_hookhandle.values()
        idle = [name for name, handle in self.name_to_hookhandle.items() if handle.active and handle.handle]
        try:
            if idle and not any(handle.was_called for handle in handles):
                more = f" and {len(idle) - 1} more" if len(idle) > 1 else ""
                warn(f"a HookManager is dropped before its hooks were called ({idle[0]}{more}): keep it in a variable")
        finally:
            self.clear()

    def select(self, modules: Iterable[nn.Module], functions: Functions, category: str) -> list[HookHandle]:
        """Return the handles on these modules, of these functions if any are named, and of a kind."""
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
        """Raise for what is not a module, or is hooked with this function already."""
        if isinstance(hook_fn.function, nn.Module) and not given:
            kind = type(hook_fn.function).__name__
            raise TypeError(f"a hook is a function, not a {kind}; the modules come after it")
        names: dict[nn.Module, str] = {}
        for name, module in given:
            refuse_other(name, module)
            names.setdefault(module, self.names.get(module, repr(module) if name is None else name))
        hook_fn.refuse_again((module, names[module]) for _, module in given)

    def _known(self, made: HookFunction) -> HookFunction | None:
        """Return the same function as the same kind of hook, if there is one."""
        if made.function not in self.function_to_hookfn:
            return None
        kind = made.function, made.hook_type, made.retain_forward_cache
        alike = (one for one in self.name_to_hookfn.values() if one.hook_type == made.hook_type)
        return next((one for one in alike if (one.function, one.hook_type, one.retain_forward_cache) == kind), None)

    def _rename(self, hook_fn: HookFunction, name: str) -> None:
        """Give a function a name in the place of its repr; one that was given stays."""
        if hook_fn.name == name:
            return
        if hook_fn.name != repr(hook_fn.function):
            warn(f"this function is registered as {hook_fn.name!r} already, so the name {name!r} is not used")
            return
        _leave_out(self.name_to_hookfn, hook_fn.name, hook_fn)
        hook_fn.name = unique(name, self.name_to_hookfn)
        self.name_to_hookfn[hook_fn.name] = hook_fn
        for handle in hook_fn.handles:
            if self.name_to_hookhandle.get(handle.name) is handle:  # Else it was registered without the manager.
                del self.name_to_hookhandle[handle.name]
                handle.set_name(f"{hook_fn.name}[{self.names[handle.module]}]")
                self.name_to_hookhandle[handle.name] = handle


def context_of(handles: Callable[[], Iterable[HookHandle]], enter_fns: Functions, exit_fns: Functions) -> CustomContext:
    """Return a context in which handles act; then they are as before."""
    return CustomContext(enter_fns, exit_fns).merge_context(Holding(handles), inplace=True)


def remove_all(handles: Iterable[HookHandle]) -> None:
    """Remove handles."""
    for handle in list(handles):
        handle.remove()


def _leave_out(table: dict[str, Any], name: str, gone: object) -> None:
    """Take an entry out of a table, where it may be under an older name: a second manager may have given it another."""
    if table.get(name) is not gone:
        name = next(other for other, one in table.items() if one is gone)
    del table[name]
