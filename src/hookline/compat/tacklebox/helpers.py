"""Find modules by name, run a network over a loader, contexts that call functions, and settings with defaults."""

from __future__ import annotations

import json
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Sequence, ValuesView
from contextlib import AbstractContextManager, ExitStack, nullcontext
from itertools import chain, islice
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

import hookline as hl
from hookline.compat.registrar import warn

Functions = Sequence[Callable[..., Any]]


def find_network_modules_by_name(network: nn.Module, module_names: Iterable[str]) -> list[nn.Module]:
    """Return the modules with these names, in the network's order."""
    wanted = [module_names] if isinstance(module_names, str) else list(module_names)
    found = {name: module for name, module in network.named_modules() if name in wanted}
    missing = [name for name in wanted if name not in found]
    if missing or not wanted:
        raise AssertionError(f"Could not find the following modules in the passed network: {', '.join(missing)}")
    return list(found.values())


def get_named_modules_from_network(network: nn.Module, include_bn: bool = False) -> dict[str, nn.Module]:
    """Return the modules that have a weight, by name. BatchNorm2d is included only with `include_bn`."""
    return {
        name: module
        for name, module in network.named_modules()
        if hasattr(module, "weight") and (include_bn or type(module) is not nn.BatchNorm2d)
    }


def set_torchvision_network_module(network: nn.Module, module_name: str, new_module: nn.Module) -> nn.Module:
    """Replace the module with this name and return the network."""
    path, _, name = module_name.rpartition(".")
    parent = network.get_submodule(path)
    if not hasattr(parent, name):  # A name that exists but is None is an optional module.
        if name.isdecimal():
            raise IndexError(f"index {name} is out of range")
        try:
            hl.sites(network, module_name)
        except hl.SiteError as error:
            warn(f"{error}: a new module was added, and nothing calls it")
    setattr(parent, name, new_module)
    return network


def data_pass(
    loader: Iterable[Any],
    network: nn.Module,
    device: torch.device | str | int | None = None,
    backward_fn: Callable[[Any, Any], Tensor] | None = None,
    early_stop: int | None = None,
    pre_backward_hooks: Functions = (),
    pre_zero_grad_hooks: Functions = (),
) -> None:
    """Run the network on each batch `(i, x, y)` or `(x, y)` of a loader, with a progress bar if tqdm is installed.

    Args:
        device: The device to move batches to; None is the device of the network.
        backward_fn: `backward_fn(network(x), y)` is the loss to backpropagate; without it no graph is built.
        early_stop: How many batches to run; None and 0 run all.
        pre_zero_grad_hooks: Called after each backward, so never without a `backward_fn`.
    """
    if device is None:
        device = next((tensor.device for tensor in chain(network.parameters(), network.buffers())), None)
    with torch.no_grad() if backward_fn is None else nullcontext(), _progress(loader) as bar:
        for *_, x, y in islice(loader, early_stop or None):
            output = network(_move(x, device))
            for hook in pre_backward_hooks:
                hook()
            if backward_fn is not None:
                backward_fn(output, _move(y, device)).backward()
                for hook in pre_zero_grad_hooks:
                    hook()
                network.zero_grad()
            if bar is not None:
                bar.update()


def flatten_activations(activations: Tensor) -> Tensor:
    """Return activations of shape (N, C, H, W) or (N, C) with one row for each channel."""
    if activations.dim() == 4:
        return activations.transpose(0, 1).flatten(1)
    if activations.dim() == 2:
        return activations.T
    raise TypeError(f"Output type unknown for Tensor: \n{activations}")


class CustomContext:
    """A context that calls functions when it is entered and left. `+` joins it with any other context."""

    def __init__(self, enter_fns: Functions = (), exit_fns: Functions = (), handle_exc_vars: bool = False) -> None:
        self.enter_fns = list(enter_fns)
        self.exit_fns = list(exit_fns)
        self.handle_exc_vars = handle_exc_vars
        self.contexts: list[AbstractContextManager[Any]] = []
        self._entered: list[ExitStack] = []

    def __enter__(self) -> None:
        with ExitStack() as stack:
            for function in self.enter_fns:
                function()
            for function in reversed(self.exit_fns):
                stack.push(self._exit_with(function))
            for context in self.contexts:
                stack.enter_context(context)
            self._entered.append(stack.pop_all())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._entered.pop().__exit__(kind, error, trace)

    def __add__(self, other: AbstractContextManager[Any]) -> CustomContext:
        return self.merge_context(other)

    def __radd__(self, other: AbstractContextManager[Any]) -> CustomContext:
        return CustomContext().merge_context(other, inplace=True).merge_context(self, inplace=True)

    def merge_context(self, context: AbstractContextManager[Any], inplace: bool = False) -> CustomContext:
        """Return a context that enters this one and then the other. With `inplace`, change this one instead."""
        if not (hasattr(context, "__enter__") and hasattr(context, "__exit__")):
            raise AssertionError(f"context object '{context}' is missing '__enter__' or '__exit__' methods")
        if not inplace:
            return CustomContext().merge_context(self, inplace=True).merge_context(context, inplace=True)
        self.contexts.append(context)
        return self

    @staticmethod
    def wrap_exit_fn(fn: Callable[[], Any]) -> Callable[..., Any]:
        """Return a function that accepts the exception of a block and calls `fn` without it."""
        return lambda *exc_vars: fn()

    def _exit_with(self, function: Callable[..., Any]) -> Callable[..., None]:
        leave = function if self.handle_exc_vars else self.wrap_exit_fn(function)

        def leave_only(*error: Any) -> None:  # Returns None: a true value would swallow the exception.
            leave(*error)

        return leave_only


class Protocol:
    """Settings that can be read as keys or attributes. A subclass defines the defaults."""

    DEFAULT_PROTOCOL: dict[str, Any] | None = None
    proto_dict: dict[str, Any]

    def __init__(self, **overwrite_protocol: Any) -> None:
        if self.DEFAULT_PROTOCOL is None:
            raise TypeError(f"cannot create object of abstract class '{type(self).__name__}'")
        self.__dict__["proto_dict"] = dict(self.DEFAULT_PROTOCOL)
        self.overwrite_protocol(**overwrite_protocol)

    def overwrite_protocol(self, **overwrite_protocol: Any) -> None:
        """Change existing settings."""
        for key, value in overwrite_protocol.items():
            if key not in self.proto_dict:
                raise AssertionError(f"cannot overwrite protocol '{key}'. '{key}' is not contained in proto_dict.")
            self.proto_dict[key] = value

    def keys(self) -> KeysView[str]:
        """The names of the settings."""
        return self.proto_dict.keys()

    def values(self) -> ValuesView[Any]:
        """The settings."""
        return self.proto_dict.values()

    def items(self) -> ItemsView[str, Any]:
        """The settings with their names."""
        return self.proto_dict.items()

    def __iter__(self) -> Iterator[str]:
        return iter(self.proto_dict)

    def __getitem__(self, item: str) -> Any:
        return self.proto_dict[item]

    def __setitem__(self, key: str, value: Any) -> None:
        self.proto_dict[key] = value

    def __getattr__(self, item: str) -> Any:
        settings = self.__dict__.get("proto_dict", {})
        if item not in settings:
            raise AttributeError(f"{type(self).__name__} has no setting '{item}'")
        return settings[item]

    def __setattr__(self, key: str, value: Any) -> None:
        (self.proto_dict if key in self.proto_dict else self.__dict__)[key] = value

    def add_from_json(self, path: str) -> None:
        """Read settings from a JSON file. A name that is not among the defaults is kept, with a warning."""
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
        unknown = [key for key in found if key not in self.proto_dict]
        if unknown:
            warn(f"{path} has settings that are not in the protocol: {', '.join(unknown)}")
        self.proto_dict.update(found)

    def add_from_namespace(self, namespace: object) -> None:
        """Read the settings from the attributes of an object, such as parsed arguments."""
        self.proto_dict.update({key: value for key, value in vars(namespace).items() if key in self.proto_dict})


def _move(value: Any, device: torch.device | str | int | None) -> Any:
    return value if device is None or not hasattr(value, "to") else value.to(device)


def _progress(loader: Iterable[Any]) -> AbstractContextManager[Any]:
    try:
        from tqdm import tqdm
    except ImportError:  # Only the progress bar needs tqdm.
        return nullcontext()
    bar: AbstractContextManager[Any] = tqdm(loader)
    return bar
