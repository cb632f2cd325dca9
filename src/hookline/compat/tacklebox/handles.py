"""HookFunction, and HookHandle, its registration on one module. Each holds the other, so they share a file."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

from torch import nn

import hookline as hl
from hookline.compat.tacklebox.calling import Caller, TypedFunction
from hookline.compat.tacklebox.naming import claim, release
from hookline.compat.warning import warn

NO_FORWARD = "there is no forward to call; register the modules inside"

_switching = threading.RLock()


class HookFunction(TypedFunction):
    """A function, the kind of hook that it is, and its handle for each module."""

    def __init__(
        self,
        hook_fn: Callable[..., Any],
        hook_type: str,
        name: str | None = None,
        modules: Iterable[nn.Module] | None = None,
        pass_by_pos: bool = True,
        retain_forward_cache: bool = False,
    ) -> None:
        super().__init__(hook_fn, hook_type, name, pass_by_pos, retain_forward_cache)
        self.module_to_handle: dict[nn.Module, HookHandle] = {}
        self.register(*modules or ())

    @property
    def handles(self) -> list[HookHandle]:
        """Its handles, in the order in which they were registered."""
        return list(self.module_to_handle.values())

    def register(self, *modules: nn.Module, activate: bool = True, register_to_module: bool = True) -> list[HookHandle]:
        """Hook modules that have a `name`, without a manager.

        Args:
            register_to_module: Call the function as torch would, and not with tuples of all inputs and outputs.
        """
        for module in modules:
            if not hasattr(module, "name"):
                raise AssertionError("Module must be given name before hook registration")
        self.refuse_again((module, module.name) for module in modules)
        handles = [
            HookHandle(self, module, f"{self.name}[{module.name}]", activate, register_to_module) for module in modules
        ]
        warn_of_never_called(handles)
        return handles

    def deactivate_all_handles(self) -> None:
        """Let it rest on every module."""
        for handle in self.handles:
            handle.deactivate()

    def refuse_again(self, named: Iterable[tuple[nn.Module, object]]) -> None:
        """Raise if this function is on one of these modules already, or would be twice."""
        names: dict[nn.Module, object] = {}
        for module, name in named:
            if module in self.module_to_handle or module in names:
                first = names.get(module, name)
                raise AssertionError(f"Hook function {self.name} was already registered with module {first}")
            names[module] = name


class HookHandle:
    """One hook function on one module: it is switched on and off, and taken away, with hooks of its own there."""

    def __init__(
        self,
        hook_fn: HookFunction,
        module: nn.Module,
        name: str,
        activate: bool = True,
        register_to_module: bool = True,
    ) -> None:
        self._put_on(hook_fn, module, name, None, register_to_module)
        if activate:
            self.activate()

    @classmethod
    def of_manager(cls, hook_fn: HookFunction, module: nn.Module, module_name: str, as_torch: bool) -> HookHandle:
        """Return a handle that rests yet. Its module has the name that a manager gave it, and does not hold it."""
        handle = object.__new__(cls)
        handle._put_on(hook_fn, module, f"{hook_fn.name}[{module_name}]", module_name, as_torch)
        return handle

    def _put_on(
        self, hook_fn: HookFunction, module: nn.Module, name: str, module_name: str | None, as_torch: bool
    ) -> None:
        self.hook_fn = hook_fn
        self.module = module
        self.name = name
        self.handle = hl.Hooks(module, active=False)
        self.when_removed: list[Callable[[HookHandle], None]] = []
        self.module_name = str(getattr(module, "name", "")) if module_name is None else module_name
        self.why_never_called = ""
        hook_fn.refuse_again([(module, self.module_name)])
        self._caller = Caller(hook_fn, module, module_name, name, as_torch)
        self._on = False
        self._open: set[object] = set()  # The contexts that are open, and those of them that hold it on.
        self._held: set[object] = set()
        self._is_removed = False
        self._is_to_be_renewed = False
        self._hook()
        self._is_named = module_name is not None and claim(module, module_name)
        hook_fn.module_to_handle[module] = self

    @property
    def active(self) -> bool:
        """Whether the hook acts."""
        return self._on or bool(self._held)

    @property
    def was_called(self) -> bool:
        """Whether the function was ever called."""
        return self._caller.was_called

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
        del self.hook_fn.module_to_handle[self.module]
        if self._is_named:
            release(self.module, self.module_name)
        for forget in self.when_removed:
            forget(self)

    def renew(self) -> None:
        """Let the hook act after those that were registered since."""
        if self.handle:
            self._is_to_be_renewed = True
            self._switch(self._on, self._held)

    def set_name(self, name: str) -> None:
        """Give it another id."""
        self.name = self._caller.id = name

    def __repr__(self) -> str:
        state = "active" if self.active else "inactive"
        return f"<{self.name} {type(self)} registered to {self.module_name} ({state})>"

    def _hook(self) -> None:
        try:
            self._caller.add_to(self.handle)
        except hl.SiteError as error:  # Of a ModuleList, say, or what torch.jit made.
            has_forward = inspect.getattr_static(type(self.module), "forward") is not nn.Module.forward
            self.why_never_called = str(error).replace("''", "it", 1) if has_forward else NO_FORWARD

    def _switch(self, on: bool, held: set[object]) -> None:
        with _switching:
            self._on, self._held = (False, set()) if self._is_removed else (on, held)
            self._caller.is_active = self.active
            if not self.handle:
                return
            if not self.active:
                self.handle.deactivate()
                return
            if self._is_to_be_renewed:
                self.handle.remove()
                self._hook()
                self._is_to_be_renewed = False
            self.handle.activate()


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


def warn_of_never_called(handles: Sequence[HookHandle]) -> None:
    """Warn of hooks that can't be called, but not of containers if modules inside them were hooked with them."""
    hooked = {handle.module for handle in handles if not handle.why_never_called}
    reasons: dict[str, list[HookHandle]] = {}
    for handle in handles:
        why = handle.why_never_called
        if why and not (why == NO_FORWARD and hooked.intersection(handle.module.modules())):
            reasons.setdefault(why, []).append(handle)
    for why, those in reasons.items():
        hook_fn = those[0].hook_fn
        is_named = hook_fn.name != repr(hook_fn.function)
        label = hook_fn.name if is_named else getattr(hook_fn.function, "__name__", hook_fn.name)
        modules = ", ".join(f"{handle.module_name!r} ({type(handle.module).__name__})" for handle in those)
        warn(f"{label} will never be called for {modules}: {why}")
