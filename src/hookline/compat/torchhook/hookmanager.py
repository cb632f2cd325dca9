"""HookManager: keeps the outputs of layers and their gradients, call by call, under a key for each layer."""

from __future__ import annotations

import copy
import inspect
import sys
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn

import hookline as hl
from hookline._torch import known_version
from hookline.compat.registrar import warn, weakly
from hookline.compat.torchhook.utils import WIDTH, count_parameters, format_parameter_count


class WithGradient(NamedTuple):
    """A kept output, or the copy that hookline makes before it is overwritten, and the function that reads it."""

    tensor: Tensor
    read: Callable[[Tensor], Tensor]

    @classmethod
    def of(cls, output: Tensor) -> Any:
        """Wrap an output that has a graph in a `WithGradient`. Return any other output as it is."""
        return output if output.grad_fn is None else cls(output, _Gradient(output).read)


class _Gradient:
    """Sets the `.grad` of the copy of an output. torch's `.grad` would be that of the value written over the output."""

    def __init__(self, output: Tensor) -> None:
        self._is_wanted = output.retains_grad
        self._output = weakref.ref(output)
        self._copy: Callable[[], Tensor | None] = lambda: (
            None
        )  # This becomes a weak reference: the copy holds the graph, so the graph must not hold the copy.
        self._came: Tensor | None = None
        output.register_hook(self._take)

    def read(self, kept: Tensor) -> Tensor:
        """Return the kept tensor. If it is a copy, it gets the gradient of the output, now or when it is computed."""
        if kept is not self._output() and kept is not self._copy():
            self._copy = weakref.ref(kept)
            if self._is_wanted:
                kept.retain_grad()
                kept.grad, self._came = self._came, None
        return kept

    def _take(self, gradient: Tensor) -> None:
        copy = self._copy()
        if copy is not None and copy.retains_grad:
            copy.grad = _sum(copy.grad, gradient)
        elif self._is_wanted and copy is None:
            self._came = _sum(self._came, gradient)


def _sum(one: Tensor | None, other: Tensor) -> Tensor:
    return other.clone() if one is None else one + other


CustomHook = Callable[[nn.Module, Any, Any], Any]
Transform = Callable[[Any], Any]


class Handle:
    """Removes one hook; the manager keeps the features. The handle keeps neither the manager nor the hook alive."""

    def __init__(self, hooks: hl.Hooks) -> None:
        self._hooks = weakref.ref(hooks)
        self._is_idle = len(hooks) == 0  # The layer is never called.

    @property
    def is_on(self) -> bool:
        """True while the hook is on its layer."""
        hooks = self._hooks()
        return hooks is not None and (self._is_idle or len(hooks) > 0)

    def remove(self) -> None:
        """Remove the hook from its layer."""
        self._is_idle = False
        hooks = self._hooks()
        if hooks is not None:
            hooks.remove()

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


class Feature:
    """Makes a feature from each output of a layer. The hook on the layer does not keep this object alive (`weakly`)."""

    def __init__(self, key: str, custom_hook: CustomHook | None, output_transform: Transform | None) -> None:
        self.key = key
        self.custom_hook = custom_hook
        self.output_transform = output_transform
        self.is_plain = custom_hook is None and output_transform is None
        self.has_run = False
        self._has_warned = False

    def __call__(self, output: Any, call: Any) -> Any:
        """Return the feature of one call, or None if there is none."""
        self.has_run = True
        if self.custom_hook is None and (self.output_transform is None or output is None):
            return self._first(output)
        what = "output_transform" if self.custom_hook is None else "custom_hook"
        before = _versions(output)
        try:
            if self.custom_hook is not None:
                kept = self._returned(self.custom_hook(call.module, call.args, output))
            else:
                assert self.output_transform is not None
                kept = self._transformed(self.output_transform, output)
        except Exception as error:
            self._add_notes(error, what, output)
            raise
        if _versions(output) != before:
            raise hl.EditError(
                f"'{self.key}': {what} wrote into the output, which is the model's own; write into a copy of it, "
                "such as output.clone()"
            )
        return WithGradient.of(kept) if kept is output and isinstance(kept, Tensor) else kept

    def _returned(self, kept: Any) -> Tensor | None:
        if kept is None or isinstance(kept, Tensor):
            return kept
        warn(f"custom_hook for key '{self.key}' returned a non-Tensor value ({type(kept)}). Ignoring.")
        return None

    def _transformed(self, transform: Transform, output: Any) -> Any:
        if _starts_with_tensor(output) and not self._has_warned:
            self._has_warned = True
            warn(
                f"output_transform for key '{self.key}' is given the whole output, a {type(output).__name__}; "
                "TorchHook gave it the first element, which is output[0]"
            )
        return _parted(transform(output))

    def _first(self, output: Any) -> Tensor | None:
        if isinstance(output, Tensor):
            return output.cpu()
        about = f"Output for key '{self.key}' is"
        if _starts_with_tensor(output):
            warn(f"{about} a sequence; processing the first element. Use 'output_transform' for custom handling.")
            first: Tensor = output[0]
            return first.cpu()
        warn(f"{about} not a Tensor or a sequence starting with a Tensor ({type(output)}). Cannot store.")
        return None

    def _add_notes(self, error: Exception, what: str, output: Any) -> None:
        if not hasattr(error, "add_note"):  # Python 3.11.
            return
        if what == "output_transform" and not isinstance(output, Tensor):
            kind = type(output).__name__
            error.add_note(f"output_transform for key '{self.key}' is given the whole output, a {kind}")
        error.add_note(f"hookline: raised by {what} for key '{self.key}'")


def _starts_with_tensor(output: Any) -> bool:
    return isinstance(output, list | tuple) and bool(output) and isinstance(output[0], Tensor)


def _versions(value: Any) -> list[int]:
    """Return the version of each tensor in an output. A write into the tensor changes its version."""
    if isinstance(value, Tensor):
        return [known_version(value)]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [version for part in parts for version in _versions(part)]


def _parted(value: Any) -> Any:
    """Return the result of a transform with its numpy arrays copied: they share memory that the model reuses."""
    if isinstance(value, Tensor):
        return value
    if hasattr(value, "__array_interface__"):
        return copy.deepcopy(value)
    if type(value) is dict:
        return {key: _parted(part) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_parted, value))
    rebuild = getattr(value, "_make", None)  # A named tuple has this.
    return value if rebuild is None else rebuild(map(_parted, value))


class HookManager:
    """Keeps the outputs of layers.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True))
    >>> with HookManager(model, max_size=1) as manager:
    ...     _ = manager.add("0")
    ...     output = model(torch.ones(3, 4))
    >>> manager.get_features("0")[0].shape
    torch.Size([3, 8])

    Args:
        max_size: How many of the latest features each key keeps; -1 and 0 keep all.
    """

    def __init__(self, model: nn.Module, max_size: int = -1) -> None:
        self._layers: dict[str, _Layer] = {}
        _refuse_unless(isinstance(model, nn.Module), "'model' must be an instance of torch.nn.Module.")
        _refuse_unless(isinstance(max_size, int), "'max_size' must be an integer.")
        if max_size < -1:
            raise ValueError("'max_size' cannot be less than -1.")
        self.model = model
        self._max_size = max_size

    def __del__(self, _is_over: Callable[[], bool] = sys.is_finalizing) -> None:  # At exit, `sys` may be gone.
        layers = self._layers.values()
        waiting = [f"'{layer.feature.key}'" for layer in layers if len(layer.hooks) > 0]
        if waiting and not _is_over() and not any(layer.feature.has_run for layer in layers):
            warn(f"a HookManager is dropped before its layers ran ({', '.join(waiting[:3])}): keep it in a variable")

    @property
    def max_size(self) -> int:
        """How many of the latest features each key keeps."""
        return self._max_size

    @max_size.setter
    def max_size(self, size: int) -> None:
        if self._layers:
            warn("max_size applies to layers that are added from now on; layers added earlier keep their limit")
        self._max_size = size

    def register_forward_hook(
        self,
        layer_name: str | None = None,
        layer: nn.Module | None = None,
        custom_hook: CustomHook | None = None,
        output_transform: Transform | None = None,
    ) -> Handle:
        """Keep the outputs of the layer `layer_name`. If `layer` is given, `layer_name` is only the key.

        Args:
            custom_hook: Called as `custom_hook(module, inputs, output)`. Its result, a tensor, is kept; None is not.
            output_transform: Called with the output. Its result is kept; None is not.
        """
        _refuse_unless(isinstance(layer_name, str | None), "'layer_name' must be a string or None.", layer_name)
        _refuse_unless(isinstance(layer, nn.Module | None), "'layer' must be an instance of torch.nn.Module or None.")
        _refuse_unless(custom_hook is None or callable(custom_hook), "'custom_hook' must be a callable or None.")
        is_transform = output_transform is None or callable(output_transform)
        _refuse_unless(is_transform, "'output_transform' must be a callable or None.")
        if layer is None:
            layer = self._find(layer_name)
        key = self._free_key(layer) if layer_name is None else layer_name
        if key in self.hooks:
            raise ValueError(f"Hook for key '{key}' already exists.")
        self._layers[key] = self._hooked(layer, Feature(key, custom_hook, output_transform))
        return self._layers[key].handle

    add = register_forward_hook

    @property
    def hooks(self) -> dict[str, Handle]:
        """The handle of each key whose hook is on its layer."""
        return {key: layer.handle for key, layer in self._layers.items() if layer.handle.is_on}

    @property
    def features(self) -> dict[str, list[Any]]:
        """The features under each key, oldest first."""
        return {key: layer.features for key, layer in self._layers.items()}

    def get_features(self, key: str) -> list[Any]:
        """Return the features under a key, oldest first."""
        _refuse_unless(isinstance(key, str), "'key' must be a string.")
        if key not in self._layers:
            raise ValueError(f"No hook registered with key '{key}'.")
        layer = self._layers[key]
        if not layer.feature.has_run:
            kind = type(layer.hooks.model).__name__
            warn(f"no features for key '{key}': its layer, {kind}, has not run; read them after a forward that runs it")
        return layer.features

    get = get_features

    def get_all(self) -> dict[str, list[Any]]:
        """Return the features under each key, oldest first."""
        return self.features

    def get_keys(self) -> list[str]:
        """Return the keys whose hooks are on their layers."""
        return list(self.hooks)

    def remove(self, key: str) -> None:
        """Remove the hook of a key from its layer, and drop its features."""
        _refuse_unless(isinstance(key, str), "'key' must be a string.")
        if key not in self._layers:
            raise ValueError(f"No hook or features found for key '{key}'.")
        self._layers.pop(key).handle.remove()

    def clear_hooks(self) -> None:
        """Remove every hook from the model, and drop all features."""
        self._take_off()
        self._layers.clear()

    def clear_features(self) -> None:
        """Drop all features. The hooks stay."""
        for layer in self._layers.values():
            layer.hooks.cache.clear()

    def summary(self) -> None:
        """Print the keys with the number of features and their shape."""
        print(self)  # noqa: T201

    def __enter__(self) -> HookManager:
        return self

    def __exit__(self, *_: object) -> None:
        self._take_off()

    def __str__(self) -> str:
        keys, features = self.get_keys(), {key: kept for key, kept in self.features.items() if kept}
        count = format_parameter_count(count_parameters(self.model))
        lines = [f"Model: {type(self.model).__name__} | Total Parameters: {count}"]
        if not keys and not features:
            return "\n".join([*lines, "No hooks have been registered."])
        if not features:
            names = ", ".join(keys)
            return "\n".join(
                [*lines, f"{len(keys)} hooks registered ({names}), but no features have been captured yet."]
            )
        limit = self.max_size if self.max_size > 0 else "unlimited"
        rule = "-" * WIDTH
        lines += [f"Registered Hooks: {len(keys)} (max_size={limit})", rule, "Captured Features Summary:"]
        lines += [_row("Layer Key", "Feature Count", "Feature Shape"), rule]
        lines += [_row(key, len(kept), _shape(kept[0])) for key, kept in features.items()]
        lines.append(rule)
        waiting = [f"- {key}" for key in keys if key not in features]
        if waiting:
            lines += ["Hooks Registered but Not Triggered Yet:", *waiting, rule]
        return "\n".join(lines)

    __repr__ = __str__

    def _take_off(self) -> None:
        for layer in self._layers.values():
            layer.handle.remove()

    def _hooked(self, layer: nn.Module, feature: Feature) -> _Layer:
        hooks = hl.Hooks(layer)
        keep = int(self.max_size) if self.max_size > 0 else "all"
        try:
            hooks.capture("", transform=weakly(feature.__call__), with_call=True, detach=feature.is_plain, keep=keep)
        except hl.SiteError as error:
            has_forward = inspect.getattr_static(type(layer), "forward") is not nn.Module.forward
            reason = str(error).replace("''", "it", 1) if has_forward else "it has no forward; add the layers in it"
            warn(f"no features will come for key '{feature.key}', a {type(layer).__name__}: {reason}")
        return _Layer(hooks, feature, Handle(hooks))

    def _find(self, name: str | None) -> nn.Module:
        if name is None:
            raise ValueError("Either 'layer_name' or 'layer' must be specified.")
        missing = ValueError(f"Layer '{name}' not found in the model.")
        try:
            return self.model.get_submodule(name)
        except AttributeError:
            pass
        try:
            hl.sites(self.model, name)
        except hl.SiteError as near:  # Its message lists similar names.
            raise missing from near
        raise missing

    def _free_key(self, layer: nn.Module) -> str:
        start = f"{type(layer).__name__}_"
        number = sum(key.startswith(start) for key in self._layers)
        while f"{start}{number}" in self._layers:
            number += 1
        return f"{start}{number}"


class _Layer(NamedTuple):
    """The hooks, the feature function and the handle of one key."""

    hooks: hl.Hooks
    feature: Feature
    handle: Handle

    @property
    def features(self) -> list[Any]:
        kept = self.hooks.cache.calls("") if self.feature.has_run else []
        return [one.read(one.tensor) if isinstance(one, WithGradient) else one for one in kept]


def _row(key: str, count: object, shape: str) -> str:
    return f"{key:<30}{count:<20}{shape:<30}"


def _shape(feature: Any) -> str:
    return str(tuple(feature.shape)) if isinstance(feature, Tensor) else type(feature).__name__


def _refuse_unless(is_right: bool, message: str, given: object = None) -> None:
    if not is_right:
        raise _type_error(message, "give a module as layer=" if isinstance(given, nn.Module) else "")


def _type_error(message: str, hint: str) -> TypeError:
    """Return an error with the original's message, and with the hint as a note."""
    error = TypeError(message)
    if hint and hasattr(error, "add_note"):  # Python 3.11.
        error.add_note(f"hookline: {hint}")
    return error
