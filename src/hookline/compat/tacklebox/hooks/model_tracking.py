"""ModuleTracker: keep the inputs and outputs of modules, and the gradients of both, over many passes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hookline.compat.registrar import warn, weakly
from hookline.compat.tacklebox.helpers import (
    CustomContext,
    Protocol,
    data_pass,
    find_network_modules_by_name,
    get_named_modules_from_network,
)
from hookline.compat.tacklebox.hook_handles import unique
from hookline.compat.tacklebox.hook_management import HookManager

__all__ = [
    "ALL_VARS",
    "BACKWARD_VARS",
    "DEFAULT_TRACKING_PROTOCOL",
    "FORWARD_VARS",
    "GRAPH_VARS",
    "CustomContext",
    "HookManager",
    "ModuleTracker",
    "Protocol",
    "TrackingProtocol",
    "data_pass",
    "find_network_modules_by_name",
    "get_named_modules_from_network",
    "validate_vars",
]

FORWARD_VARS = ["inp", "out"]
BACKWARD_VARS = ["inp_grad", "out_grad"]
ALL_VARS = FORWARD_VARS + BACKWARD_VARS
GRAPH_VARS = list(ALL_VARS)
DEFAULT_TRACKING_PROTOCOL: dict[str, Any] = {
    **{f"track_{var}": True for var in ALL_VARS},
    **{f"record_every_{var}": 1 for var in ALL_VARS},
    **{f"buffer_len_{var}": 1 for var in ALL_VARS},
    "save": False,
    "save_protocol": "npz",
    "save_file_base": "",
    **{f"suffix_{var}": var for var in ALL_VARS},
}
T = TypeVar("T")


def check_vars(given: Iterable[str], valid_vars: Sequence[str] = ALL_VARS) -> None:
    """Raise for an unknown variable."""
    for var in given:
        if var not in valid_vars:
            raise AssertionError(f"Invalid var, {var}, passed to tracker. Use a valid var key: {', '.join(valid_vars)}")


def validate_vars(
    var_idx: int = 0, multiple: bool = False, keyword: str | None = None, valid_vars: Sequence[str] = ALL_VARS
) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Decorate a function so that it first checks its variables.

    The variables are the argument at `var_idx`, all arguments from there on (`multiple`), or those of `keyword`.
    """

    def wrap(fn: Callable[..., T]) -> Callable[..., T]:
        @wraps(fn)
        def validated(*args: Any, **kwargs: Any) -> T:
            given = args[var_idx:] if multiple else args[var_idx : var_idx + 1]
            if keyword is not None:
                named = kwargs.get(keyword) or ()
                given = (named,) if isinstance(named, str) else tuple(named)
            check_vars(given, valid_vars)
            return fn(*args, **kwargs)

        return validated

    return wrap


class TrackingProtocol(Protocol):
    """The settings of a tracker: which variables, of every n-th pass (`record_every`), and how many (`buffer_len`)."""

    DEFAULT_PROTOCOL = DEFAULT_TRACKING_PROTOCOL

    @validate_vars(var_idx=1, multiple=True)
    def __init__(
        self,
        *vars_: str,
        record_every: int | None = None,
        buffer_len: int | None = None,
        protocol_json: str | None = None,
        namespace: object | None = None,
        **overwrite_protocol: Any,
    ) -> None:
        super().__init__()
        if protocol_json is not None:
            self.add_from_json(protocol_json)
        if namespace is not None:
            self.add_from_namespace(namespace)
        for var in ALL_VARS:
            self[f"track_{var}"] = self[f"track_{var}"] and (not vars_ or var in vars_)
            if record_every:  # 0 means None, as in the original.
                self[f"record_every_{var}"] = record_every
            if buffer_len:
                self[f"buffer_len_{var}"] = buffer_len
        self.overwrite_protocol(**overwrite_protocol)
        self["track_forward"] = True
        self["track_backward"] = any(self[f"track_{var}"] for var in BACKWARD_VARS)


class ModuleTracker:
    """Keeps the first input and output of modules, and their gradients, while `track()` is open."""

    def __init__(
        self,
        *modules: nn.Module,
        protocol: TrackingProtocol | None = None,
        hook_manager: HookManager | None = None,
        network: nn.Module | None = None,
        **named_modules: nn.Module,
    ) -> None:
        self.network = network
        self.hook_manager = HookManager() if hook_manager is None else hook_manager
        self.protocol = TrackingProtocol() if protocol is None else protocol
        self.modules: dict[str, nn.Module] = dict(named_modules)
        for module in modules:
            self.modules[unique(repr(module), self.modules)] = module
        self.module_names = list(self.modules)
        tracked = [var for var in ALL_VARS if self.protocol[f"track_{var}"]]
        self.data_buffer: dict[str, dict[str, list[Tensor]]] = {
            name: {var: [] for var in tracked} for name in self.modules
        }
        self._name_of = {module: name for name, module in self.modules.items()}
        self._last = "backward_hook" if self.protocol.track_backward else "forward_hook"
        self._passes: dict[tuple[str, str], int] = {}
        # These functions don't keep the tracker alive. Its own manager is freed with it, and so are the hooks. In a
        # shared manager the hooks stay and do nothing.
        self._functions: dict[str, Callable[..., None]] = {}
        self.register_all()

    @property
    def pass_count(self) -> int:
        """The number of passes that have gone through every module since tracking began."""
        return min((self._passes.get((self._last, name), 0) for name in self.modules), default=0)

    @property
    def modules_passed(self) -> dict[str, bool]:
        """True for each module that the current pass has gone through."""
        passes = self.pass_count
        return {name: self._passes.get((self._last, name), 0) > passes for name in self.modules}

    def forward_hook(self, module: nn.Module, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> None:
        """Keep the inputs and outputs of a module."""
        self._keep("forward_hook", module, inp=inputs, out=outputs)

    def backward_hook(self, module: nn.Module, grad_in: tuple[Any, ...], grad_out: tuple[Any, ...]) -> None:
        """Keep the gradients of the inputs and outputs of a module."""
        self._keep("backward_hook", module, inp_grad=grad_in, out_grad=grad_out)

    def register_forward(self) -> None:
        """Register the forward hook, inactive."""
        self._register("forward_hook")

    def register_backward(self) -> None:
        """Register the backward hook, inactive."""
        self._register("backward_hook")

    def register_all(self) -> None:
        """Register the hooks that the protocol needs."""
        if self.protocol.track_forward:
            self.register_forward()
        if self.protocol.track_backward:
            self.register_backward()

    @validate_vars(keyword="vars_")
    def clear_data_buffer_module(self, *module_names: str, vars_: Sequence[str] | None = None) -> None:
        """Drop the values of these modules."""
        chosen = ALL_VARS if vars_ is None else [vars_] if isinstance(vars_, str) else vars_
        for name in module_names:
            for var, kept in self.data_buffer[name].items():
                if var in chosen:
                    kept.clear()

    def clear_data_buffer_all(self, vars_: Sequence[str] | None = None) -> None:
        """Drop the values of all modules."""
        self.clear_data_buffer_module(*self.modules, vars_=vars_)

    def gather_module_var(self, module_name: str, var: str) -> Tensor:
        """Return the values of one variable of one module, joined along the first dimension."""
        check_vars([var])
        kept = self.data_buffer[module_name][var]
        if not kept:
            raise ValueError(f"no values of '{var}' were kept for module '{module_name}': run it inside track()")
        return torch.cat(kept)

    def gather_module(self, module_name: str) -> dict[str, Tensor]:
        """Return the values of each variable of one module, with an empty tensor for a variable without values."""
        kept = self.data_buffer[module_name]
        return {var: torch.cat(values) if values else torch.empty(0) for var, values in kept.items()}

    def gather_var(self, var_name: str) -> dict[str, Tensor]:
        """Return the values of one variable of each module."""
        return {name: self.gather_module_var(name, var_name) for name in self.modules}

    def gather(self) -> dict[str, dict[str, Tensor]]:
        """Return all values, by module and variable."""
        return {name: self.gather_module(name) for name in self.modules}

    def track(self, clear_on_exit: bool = True) -> CustomContext:
        """Return a context in which values are kept. With `clear_on_exit`, entering and leaving it drop all values."""
        clears = [self.clear_data_buffer_all] if clear_on_exit else []
        return self.hook_manager.hook_module_context(
            *self.modules.values(),
            hook_types=list(self._functions.values()),
            add_enter_fns=clears,
            add_exit_fns=[*clears, self._passes.clear],
        )

    def collect_vars(
        self,
        dataloader: Iterable[Any],
        network: nn.Module | None = None,
        device: torch.device | str | int | None = None,
    ) -> None:
        """Keep the variables of a pass over a loader. The gradients are those of a cross entropy loss."""
        network = self.network if network is None else network
        if network is None:
            raise AssertionError("network must be passed to aggregate_vars if one was not passed to __init__")
        loss = nn.functional.cross_entropy if self.protocol.track_backward else None
        with self.track(clear_on_exit=False):
            data_pass(dataloader, network, device=device, backward_fn=loss)

    def aggregate_vars(
        self,
        dataloader: Iterable[Any],
        network: nn.Module | None = None,
        device: torch.device | str | int | None = None,
        clear: bool = True,
    ) -> dict[str, dict[str, Tensor]]:
        """Run a pass over a loader and return all values. With `clear`, drop them afterwards."""
        self.collect_vars(dataloader, network, device)
        gathered = self.gather()
        if clear:
            self.clear_data_buffer_all()
        return gathered

    def _register(self, kind: str) -> None:
        function = self._functions.setdefault(kind, weakly(getattr(self, kind)))
        known = [module for module in self.modules.values() if module in self.hook_manager.modules]
        new: dict[str, Any] = {name: module for name, module in self.modules.items() if module not in known}
        name = f"ModuleTracker.{kind}"
        self.hook_manager.register_hook(kind, function, *known, hook_fn_name=name, activate=False, **new)

    def _keep(self, kind: str, module: nn.Module, **values: tuple[Any, ...]) -> None:
        name = self._name_of[module]
        count = self._passes.get((kind, name), 0)
        self._passes[kind, name] = count + 1
        for var, given in values.items():
            if var in self.data_buffer[name] and given and count % self.protocol[f"record_every_{var}"] == 0:
                self._insert(name, var, given[0])

    def _insert(self, name: str, var: str, value: Any) -> None:
        if value is None:
            return
        if not isinstance(value, Tensor):
            warn(f"{var} of module {name} is not kept: it is not a tensor but {type(value).__name__}")
            return
        kept, length = self.data_buffer[name][var], self.protocol[f"buffer_len_{var}"]
        kept.append(value.detach().to("cpu", copy=True))  # The model may overwrite its tensor.
        if len(kept) > length:
            del kept[0]
            warn(
                f"Cached {var} data for module {name} exceeded buffer length of {length}. "
                "Discarding earliest cached data."
            )
