"""HookManager: keeps the outputs of layers, call by call, under a key for each layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

import hookline as hl
from hookline.compat.registrar import register, warn, weakly
from hookline.compat.torchhook.utils import WIDTH, count_parameters, format_parameter_count

CustomHook = Callable[[nn.Module, Any, Any], Any]
Transform = Callable[[Any], Any]


class Layer:
    """The hook on one layer, and the function that makes a feature from each output."""

    def __init__(self, key: str, custom_hook: CustomHook | None, transform: Transform | None) -> None:
        self.key = key
        self.custom_hook = custom_hook
        self.transform = transform
        self.hooks: hl.Hooks

    def hook(self, layer: nn.Module, max_size: int) -> None:
        """Put the hook on the layer. The layer does not keep this object alive."""
        is_plain = self.custom_hook is None and self.transform is None
        keep = int(max_size) if max_size > 0 else "all"
        self.hooks = register(layer, "capture", weakly(self.feature_of), detach=is_plain, keep=keep)

    @property
    def features(self) -> list[Any]:
        """The features, oldest first."""
        try:
            return self.hooks.cache.calls("")
        except hl.NotCaptured:  # The layer has not run.
            return []

    def feature_of(self, output: Any, call: Any) -> Any:
        """Return the feature of one call, or None if there is none."""
        if self.custom_hook is not None:
            kept = self.custom_hook(call.module, call.args, output)
            if kept is None or isinstance(kept, Tensor):
                return kept
            warn(f"custom_hook for key '{self.key}' returned a non-Tensor value ({type(kept)}). Ignoring.")
            return None
        if self.transform is not None and output is not None:
            return self.transform(output)
        if isinstance(output, Tensor):
            return output.cpu()
        about = f"Output for key '{self.key}' is"
        if isinstance(output, list | tuple) and output and isinstance(output[0], Tensor):
            warn(f"{about} a sequence; processing the first element. Use 'output_transform' for custom handling.")
            return output[0].cpu()
        warn(f"{about} not a Tensor or a sequence starting with a Tensor ({type(output)}). Cannot store.")
        return None


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
        self._layers: dict[str, Layer] = {}
        _refuse_unless(isinstance(model, nn.Module), "'model' must be an instance of torch.nn.Module.")
        _refuse_unless(isinstance(max_size, int), "'max_size' must be an integer.")
        if max_size < -1:
            raise ValueError("'max_size' cannot be less than -1.")
        self.model = model
        self.max_size = max_size

    def register_forward_hook(
        self,
        layer_name: str | None = None,
        layer: nn.Module | None = None,
        custom_hook: CustomHook | None = None,
        output_transform: Transform | None = None,
    ) -> hl.Hooks:
        """Keep the outputs of the layer `layer_name`. If `layer` is given, `layer_name` is only the key.

        Args:
            custom_hook: Called as `custom_hook(module, inputs, output)`. Its result, a tensor, is kept; None is not.
            output_transform: Called with the output. Its result is kept; None is not.
        """
        _refuse_unless(isinstance(layer_name, str | None), "'layer_name' must be a string or None.")
        _refuse_unless(isinstance(layer, nn.Module | None), "'layer' must be an instance of torch.nn.Module or None.")
        _refuse_unless(custom_hook is None or callable(custom_hook), "'custom_hook' must be a callable or None.")
        is_transform = output_transform is None or callable(output_transform)
        _refuse_unless(is_transform, "'output_transform' must be a callable or None.")
        if layer is None:
            layer = self._find(layer_name)
        key = self._free_key(layer) if layer_name is None else layer_name
        if key in self.hooks:
            raise ValueError(f"Hook for key '{key}' already exists.")
        self._layers[key] = Layer(key, custom_hook, output_transform)
        self._layers[key].hook(layer, self.max_size)
        return self._layers[key].hooks

    add = register_forward_hook

    @property
    def hooks(self) -> dict[str, hl.Hooks]:
        """The handle of each key whose hook is on its layer."""
        return {key: layer.hooks for key, layer in self._layers.items() if layer.hooks}

    @property
    def features(self) -> dict[str, list[Any]]:
        """The features under each key, oldest first."""
        return {key: layer.features for key, layer in self._layers.items()}

    def get_features(self, key: str) -> list[Any]:
        """Return the features under a key, oldest first."""
        _refuse_unless(isinstance(key, str), "'key' must be a string.")
        if key not in self._layers:
            raise ValueError(f"No hook registered with key '{key}'.")
        return self._layers[key].features

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
        self._layers.pop(key).hooks.remove()

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
            layer.hooks.remove()

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


def _row(key: str, count: object, shape: str) -> str:
    return f"{key:<30}{count:<20}{shape:<30}"


def _shape(feature: Any) -> str:
    return str(tuple(feature.shape)) if isinstance(feature, Tensor) else type(feature).__name__


def _refuse_unless(is_right: bool, message: str) -> None:
    if not is_right:
        raise TypeError(message)
