"""HookFunction and HookHandle: a hook function, and its registration on one module."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any, ClassVar

from torch import nn

import hookline as hl
from hookline.compat.tacklebox.calling import Caller
from hookline.compat.tacklebox.naming import claim, release
from hookline.compat.warning import warn

ARGUMENTS = {
    "forward_hook": ("module", "inputs", "outputs"),
    "backward_hook": ("module", "grad_in", "grad_out"),
    "forward_pre_hook": ("module", "inputs"),
}
_switching = threading.RLock()


class HookFunction:
    """A function, the kind of hook that it is, and its handle for each module."""

    HOOK_TYPES: ClassVar[list[str]] = list(ARGUMENTS)

    def __init__(
        self,
        hook_fn: Callable[..., Any],
        hook_type: str,
        name: str | None = None,
        modules: Iterable[nn.Module] | None = None,
        pass_by_pos: bool = True,
        retain_forward_cache: bool = False,
    ) -> None:
        if hook_type not in ARGUMENTS:
            raise AssertionError(f"invalid hook type: {hook_type}")
        if not callable(hook_fn):
            raise TypeError(f"a hook is a function, not {type(hook_fn).__name__}")
        self.function = hook_fn
        self.hook_type = hook_type
        self.name = repr(hook_fn) if name is None else name
        self.pass_by_pos = pass_by_pos
        self.retain_forward_cache = retain_forward_cache
        self.handles: list[HookHandle] = []
        self.module_to_handle: dict[nn.Module, HookHandle] = {}
        self.register(*modules or ())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        names = ARGUMENTS[self.hook_type] + (("inputs", "outputs") if self.retain_forward_cache else ())
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if len(args) + len(kwargs) != len(names) or set(given) != set(names):
            raise TypeError(
                f"invalid number of positional args passed to {self.hook_type} {self.name!r}. "
                f"Call signature should be ({', '.join(names)}) but got {len(args)} positional args."
            )
        if self.pass_by_pos:
            return self.function(*(given[name] for name in names))
        return self.function(**self._wanted(given))

    def register(self, *modules: nn.Module, activate: bool = True, register_to_module: bool = True) -> list[HookHandle]:
        """Hook modules that have a `name`, without a manager.

        Args:
            register_to_module: Call the function as torch would, and not with tuples of all inputs and outputs.
        """
        for module in modules:
            if not hasattr(module, "name"):
                raise AssertionError("Module must be given name before hook registration")
        return [
            HookHandle(self, module, f"{self.name}[{module.name}]", activate, register_to_module) for module in modules
        ]

    def deactivate_all_handles(self) -> None:
        """Let it rest on every module."""
        for handle in self.handles:
            handle.deactivate()

    def refuse_again(self, module: nn.Module, name: object) -> None:
        """Raise if this function is on that module already."""
        if module in self.module_to_handle:
            raise AssertionError(f"Hook function {self.name} was already registered with module {name}")

    def _wanted(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return those arguments that the function names."""
        parameters = inspect.signature(self.function).parameters.values()
        if any(one.kind is one.VAR_KEYWORD for one in parameters):
            return dict(given)
        for one in parameters:
            if one.name not in given and one.default is one.empty and one.kind is not one.VAR_POSITIONAL:
                raise TypeError(
                    f"hook method {self.name!r} requested parameter {one.name!r} that is unavailable. "
                    f"Available parameters are [{', '.join(given)}]."
                )
        return {one.name: given[one.name] for one in parameters if one.name in given}


class HookHandle:
    """One hook function on one module: it is switched on and off, and taken away, with hooks of its own there."""

    def __init__(
        self,
        hook_fn: HookFunction,
        module: nn.Module,
        name: str,
        activate: bool = True,
        register_to_module: bool = True,
        module_name: str | None = None,
    ) -> None:
        self.hook_fn = hook_fn
        self.module = module
        self.name = name
        self.handle = hl.Hooks(module, active=False)
        self.when_removed: Callable[[HookHandle], None] | None = None
        self.module_name = str(getattr(module, "name", "")) if module_name is None else module_name
        hook_fn.refuse_again(module, self.module_name)
        self._caller = Caller(hook_fn, module, module_name, register_to_module, hook_fn.retain_forward_cache)
        self._on = False
        self._open: set[object] = set()  # The contexts that are open, and those of them that hold it on.
        self._held: set[object] = set()
        self._is_removed = False
        self._hook()
        self._is_named = module_name is not None and claim(module, module_name)
        hook_fn.handles.append(self)
        hook_fn.module_to_handle[module] = self
        if activate:
            self.activate()

    @property
    def active(self) -> bool:
        """Whether the hook acts."""
        return self._on or bool(self._held)

    def is_active(self) -> bool:
        """Whether the hook acts."""
        return self.active

    def activate(self, raise_on_active: bool = False) -> None:
        """Let the hook act."""
        if self.active and raise_on_active:
            raise AssertionError("Cannot activate hook: Hook is already active")
        if self._is_removed:
            warn(f"{self.name} was removed, and can't be activated; register the function again")
        self._switch(True, self._held)

    def deactivate(self, raise_on_inactive: bool = False) -> None:
        """Let the hook rest, also in the contexts that are open."""
        if not self.active and raise_on_inactive:
            raise AssertionError("Cannot deactivate hook: Hook is already inactive")
        self._switch(False, set())

    def hold(self) -> Callable[[], None]:
        """Let the hook act until the function that is returned is called: it restores the state from before."""
        context = object()
        with _switching:
            was_on, held = self._on, self._held
            self._open.add(context)
            self._switch(was_on, held | {context})

        def restore() -> None:
            with _switching:
                self._open.remove(context)
                self._switch(was_on, (held | self._held) & self._open)

        return restore

    def remove(self) -> None:
        """Take the hook off its module for good."""
        if self._is_removed:
            return
        self.deactivate()
        self._is_removed = True
        self.handle.remove()
        self.hook_fn.handles.remove(self)
        del self.hook_fn.module_to_handle[self.module]
        if self._is_named:
            release(self.module, self.module_name)
        if self.when_removed is not None:
            self.when_removed(self)

    def renew(self) -> None:
        """Let the hook act after those that were registered since."""
        if not self.handle:
            return
        self.handle.remove()
        self._hook()
        self._switch(self._on, self._held)

    def set_name(self, name: str) -> None:
        """Give it another id."""
        self.name = name

    def __repr__(self) -> str:
        state = "active" if self.active else "inactive"
        return f"<{self.name} {type(self)} registered to {self.module_name} ({state})>"

    def _hook(self) -> None:
        try:
            self._caller.add_to(self.handle, self.hook_fn.hook_type)
        except hl.SiteError as error:  # Of a ModuleList, say.
            warn(f"{self.name} will never be called: {error}")

    def _switch(self, on: bool, held: set[object]) -> None:
        with _switching:
            self._on, self._held = (False, set()) if self._is_removed else (on, held)
            self._caller.is_active = self.active
            if not self.handle:
                return
            if self.active:
                self.handle.activate()
            else:
                self.handle.deactivate()


class Holding:
    """A context in which some handles act, each restored at its end to what it was. It can be entered again."""

    def __init__(self, handles: Callable[[], Iterable[HookHandle]]) -> None:
        self._handles = handles
        self._entered: list[ExitStack] = []

    def __enter__(self) -> None:
        with ExitStack() as stack:
            for handle in self._handles():
                stack.callback(handle.hold())
            self._entered.append(stack.pop_all())

    def __exit__(self, *_: object) -> None:
        self._entered.pop().close()
