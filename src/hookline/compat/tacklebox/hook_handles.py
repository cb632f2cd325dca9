"""HookFunction, a function and its kind of hook, and HookHandle, its registration on one module."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

from hookline.compat.registrar import BackwardCall, register, warn, weakly

ARGUMENTS = {
    "forward_hook": ("module", "inputs", "outputs"),
    "backward_hook": ("module", "grad_in", "grad_out"),
    "forward_pre_hook": ("module", "inputs"),
}


def increment_name(name: str) -> str:
    """Return the next name in a numbered series: "conv_1" after "conv", "conv_10" after "conv_9"."""
    base, mark, number = name.rpartition("_")
    return f"{base}_{int(number) + 1}" if mark and number.isdecimal() else f"{name}_1"


def unique(name: str, taken: Container[str]) -> str:
    """Return a name that is not taken: this one, or the first free one of its numbered series."""
    while name in taken:
        name = increment_name(name)
    return name


def detach_hook(module: nn.Module, input: tuple[Any, ...], output: Tensor) -> Tensor:
    """Detach the output from the graph. This is a plain torch forward hook."""
    return output.detach()


class HookFunction:
    """A function, its kind of hook, and its handle for each module."""

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
        if retain_forward_cache and hook_type != "backward_hook":
            raise AssertionError("retain_forward_cache option is exclusively for backward hooks")
        if not callable(hook_fn):
            raise TypeError(f"a hook is a function, not {type(hook_fn).__name__}")
        self.function = hook_fn
        self.hook_type = hook_type
        self.name = repr(hook_fn) if name is None else name
        self.pass_by_pos = pass_by_pos
        self.retain_forward_cache = retain_forward_cache
        self.module_to_handle: dict[nn.Module, HookHandle] = {}
        self.register(*modules or ())

    @property
    def handles(self) -> list[HookHandle]:
        """The handles of this function, in the order of registration."""
        return list(self.module_to_handle.values())

    def register(self, *modules: nn.Module, activate: bool = True) -> list[HookHandle]:
        """Hook modules that have a `name`, without a manager."""
        for module in modules:
            if not hasattr(module, "name"):
                raise AssertionError("Module must be given name before hook registration")
        self.refuse_again(modules)
        return [HookHandle(self, module, f"{self.name}[{module.name}]", activate) for module in modules]

    def refuse_again(self, modules: Sequence[nn.Module]) -> None:
        """Raise if this function is already on one of these modules, or if a module is listed twice."""
        for number, module in enumerate(modules):
            if module in self.module_to_handle or module in modules[:number]:
                name = getattr(module, "name", repr(module))
                raise AssertionError(f"Hook function {self.name} was already registered with module {name}")

    def deactivate_all_handles(self) -> None:
        """Deactivate the function on every module."""
        for handle in self.handles:
            handle.deactivate()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        names = ARGUMENTS[self.hook_type] + (("inputs", "outputs") if self.retain_forward_cache else ())
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if len(args) + len(kwargs) != len(names) or set(given) != set(names):
            raise TypeError(f"{self.hook_type} {self.name!r} is called with ({', '.join(names)})")
        if self.pass_by_pos:
            return self.function(*(given[name] for name in names))
        wanted = inspect.signature(self.function).parameters.values()
        takes_all = any(one.kind is one.VAR_KEYWORD for one in wanted)
        return self.function(
            **(given if takes_all else {one.name: given[one.name] for one in wanted if one.name in given})
        )


class HookHandle:
    """One hook function on one module, which can be switched on and off and removed."""

    def __init__(self, hook_fn: HookFunction, module: nn.Module, name: str, activate: bool = True) -> None:
        self.hook_fn = hook_fn
        self.module = module
        self.name = name
        self.active = activate
        self.when_removed: list[Callable[[HookHandle], None]] = []
        self._register()
        hook_fn.module_to_handle[module] = self

    def _register(self) -> None:
        kinds: dict[str, tuple[str, Any]] = {
            "forward_hook": ("forward", self._forward),
            "forward_pre_hook": ("forward_pre", self._before),
            "backward_hook": ("backward", self._backward),
        }
        kind, function = kinds[self.hook_fn.hook_type]
        if self.hook_fn.retain_forward_cache:
            kind = "backward_values"
        # The function may be a method of the object that owns the manager, so the module holds this handle weakly.
        self.handle = register(self.module, kind, weakly(function), self.active)

    @property
    def _is_registered(self) -> bool:
        return self.hook_fn.module_to_handle.get(self.module) is self

    def is_active(self) -> bool:
        """Return True if the hook is active."""
        return self.active

    def activate(self, raise_on_active: bool = False) -> None:
        """Activate the hook."""
        if self.active and raise_on_active:
            raise AssertionError("Cannot activate hook: Hook is already active")
        if not self._is_registered:
            warn(f"{self.name} was removed, and can't be activated; register the function again")
        self.switch(True)

    def deactivate(self, raise_on_inactive: bool = False) -> None:
        """Deactivate the hook."""
        if not self.active and raise_on_inactive:
            raise AssertionError("Cannot deactivate hook: Hook is already inactive")
        self.switch(False)

    def switch(self, on: bool) -> None:
        """Activate or deactivate the hook, if it has not been removed."""
        if self._is_registered:
            self.active = on
            (self.handle.activate if on else self.handle.deactivate)()

    def remove(self) -> None:
        """Remove the hook from its module permanently."""
        if not self._is_registered:
            return
        del self.hook_fn.module_to_handle[self.module]
        self.active = False
        self.handle.remove()
        for forget in self.when_removed:
            forget(self)

    def renew(self) -> None:
        """Move the hook behind those that were registered later."""
        self.handle.remove()
        self._register()

    def set_name(self, name: str) -> None:
        """Change the id of the handle."""
        self.name = name

    def __repr__(self) -> str:
        state = "active" if self.active else "inactive"
        return f"<{self.name} {type(self)} registered to {getattr(self.module, 'name', '')} ({state})>"

    def _before(self, inputs: tuple[Any, ...], call: Any) -> Any:
        new = self.hook_fn(self.module, inputs)
        if not isinstance(new, tuple | None):
            raise AssertionError("when altering module inputs, must return result as a tuple")
        return new

    def _forward(self, output: Any, call: Any) -> Any:
        outputs = output if isinstance(output, tuple) else (output,)
        new = self.hook_fn(self.module, tuple(call.args), outputs)
        if new is None or new is outputs:
            return None
        if not isinstance(new, tuple):
            raise AssertionError("when altering module outputs, must return result as a tuple")
        if isinstance(output, tuple):
            kind: Any = type(output)  # A named tuple stays a named tuple.
            return new if type(new) is kind else getattr(kind, "_make", kind)(new)
        if len(new) != 1:
            raise ValueError(f"{len(new)} outputs returned for 1")
        return new[0]

    def _backward(self, passed: BackwardCall) -> None:
        if self.active:  # A gradient may arrive after the hook was switched off.
            kept = (passed.inputs, passed.outputs) if self.hook_fn.retain_forward_cache else ()
            self.hook_fn(self.module, passed.grad_inputs, passed.grad_outputs, *kept)
