"""What is kept of one layer: the feature of each of its calls, and the handle that takes the hook off."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

import hookline as hl
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
    """Makes the feature of one call of a layer. The layer holds it while it is hooked, so it holds no manager."""

    def __init__(self, key: str, custom_hook: CustomHook | None, output_transform: Transform | None) -> None:
        self.key = key
        self.custom_hook = custom_hook
        self.output_transform = output_transform
        self.is_plain = custom_hook is None and output_transform is None
        self.has_run = False

    def __call__(self, output: Any, call: Any) -> Any:
        """Return the feature, or None if there is none."""
        self.has_run = True
        if self.custom_hook is not None:
            kept = self.custom_hook(call.module, call.args, output)
            if kept is None or isinstance(kept, Tensor):
                return kept
            warn(f"custom_hook for key '{self.key}' returned a non-Tensor value ({type(kept)}). Ignoring.")
            return None
        if self.output_transform is None or output is None:
            return self._first(output)
        try:
            return self.output_transform(output)
        except Exception as error:
            if not isinstance(output, Tensor) and hasattr(error, "add_note"):  # Python 3.11.
                kind = type(output).__name__
                error.add_note(f"output_transform for key '{self.key}' is given the whole output, a {kind}")
            raise

    def _first(self, output: Any) -> Tensor | None:
        if isinstance(output, Tensor):
            return output.cpu()
        about = f"Output for key '{self.key}' is"
        if isinstance(output, list | tuple) and output and isinstance(output[0], Tensor):
            warn(f"{about} a sequence; processing the first element. Use 'output_transform' for custom handling.")
            return output[0].cpu()
        warn(f"{about} not a Tensor or a sequence starting with a Tensor ({type(output)}). Cannot store.")
        return None
