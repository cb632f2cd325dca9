"""What is kept of one layer: the feature of each of its calls, and the handle that takes the hook off."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

import hookline as hl
from hookline._torch import known_version
from hookline.compat.torchhook.gradient import WithGradient
from hookline.compat.warning import warn

CustomHook = Callable[[nn.Module, Any, Any], Any]
Transform = Callable[[Any], Any]


class Handle:
    """Takes one hook off; the manager keeps its features. It keeps neither the manager nor the hook alive."""

    def __init__(self, hooks: hl.Hooks) -> None:
        self._hooks = weakref.ref(hooks)
        self._is_idle = len(hooks) == 0  # Of a layer that is never called.

    @property
    def is_on(self) -> bool:
        """Whether the hook is on its layer."""
        hooks = self._hooks()
        return hooks is not None and (self._is_idle or len(hooks) > 0)

    def remove(self) -> None:
        """Take the hook off its layer."""
        self._is_idle = False
        hooks = self._hooks()
        if hooks is not None:
            hooks.remove()

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


class Feature:
    """Makes the feature of one call of a layer. What hangs on the layer does not hold it: see `weakly`."""

    def __init__(self, key: str, custom_hook: CustomHook | None, output_transform: Transform | None) -> None:
        self.key = key
        self.custom_hook = custom_hook
        self.output_transform = output_transform
        self.is_plain = custom_hook is None and output_transform is None
        self.has_run = False
        self._has_warned = False

    def __call__(self, output: Any, call: Any) -> Any:
        """Return the feature, or None if there is none."""
        self.has_run = True
        if self.custom_hook is None and (self.output_transform is None or output is None):
            return self._first(output)
        what = "output_transform" if self.custom_hook is None else "custom_hook"
        before = _versions(output)
        try:
            kept = self._transformed(output) if self.custom_hook is None else self._returned(output, call)
        except Exception as error:
            self._add_notes(error, what, output)
            raise
        if _versions(output) != before:
            raise hl.EditError(
                f"'{self.key}': {what} wrote into the output, which is the model's own; write into a copy of it, "
                "such as output.clone()"
            )
        return WithGradient.of(kept) if kept is output and isinstance(kept, Tensor) else kept

    def _returned(self, output: Any, call: Any) -> Tensor | None:
        kept = self.custom_hook(call.module, call.args, output)  # type: ignore[misc]
        if kept is None or isinstance(kept, Tensor):
            return kept
        warn(f"custom_hook for key '{self.key}' returned a non-Tensor value ({type(kept)}). Ignoring.")
        return None

    def _transformed(self, output: Any) -> Any:
        if _starts_with_tensor(output) and not self._has_warned:
            self._has_warned = True
            warn(
                f"output_transform for key '{self.key}' is given the whole output, a {type(output).__name__}; "
                "TorchHook gave it the first element, which is output[0]"
            )
        return _parted(self.output_transform(output))  # type: ignore[misc]

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


def weakly(feature: Feature) -> Callable[[Any, Any], Any]:
    """Return a function that makes a feature, and does not hold what does.

    The layer holds it: a custom_hook may be a method of an object that has the manager.
    """
    found = weakref.ref(feature)

    def make(output: Any, call: Any) -> Any:
        here = found()
        return None if here is None else here(output, call)

    return make


def _starts_with_tensor(output: Any) -> bool:
    return isinstance(output, list | tuple) and bool(output) and isinstance(output[0], Tensor)


def _versions(value: Any) -> list[int]:
    """Return what changes when somebody writes into the tensors of an output."""
    if isinstance(value, Tensor):
        return [known_version(value)]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [version for part in parts for version in _versions(part)]


def _parted(value: Any) -> Any:
    """Return what a transform gave with its arrays copied: numpy shares the memory of the model, which writes on."""
    if isinstance(value, Tensor):
        return value
    if hasattr(value, "__array_interface__"):
        return copy.deepcopy(value)
    if type(value) is dict:
        return {key: _parted(part) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_parted, value))
    rebuild = getattr(value, "_make", None)  # Of a named tuple.
    return value if rebuild is None else rebuild(map(_parted, value))
