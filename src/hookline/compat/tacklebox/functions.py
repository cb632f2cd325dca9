"""HookFunction: a function, and the kind of hook that it is."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from hookline.compat.tacklebox.handles import HookHandle, warn_of_never_called

ARGUMENTS = {
    "forward_hook": ("module", "inputs", "outputs"),
    "backward_hook": ("module", "grad_in", "grad_out"),
    "forward_pre_hook": ("module", "inputs"),
}


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
        self._names = ARGUMENTS[hook_type] + (("inputs", "outputs") if retain_forward_cache else ())
        self.register(*modules or ())

    @property
    def handles(self) -> list[HookHandle]:
        """Its handles, in the order in which they were registered."""
        return list(self.module_to_handle.values())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        names = self._names
        if self.pass_by_pos and len(args) == len(names) and not kwargs:
            return self.function(*args)
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


def detach_hook(module: nn.Module, input: tuple[Any, ...], output: Tensor) -> Tensor:
    """Cut the output off the graph: a forward hook of torch's own kind."""
    return output.detach()
