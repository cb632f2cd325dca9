"""The verbs: register_*, which return a RemovableHandleCollection, and run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from types import TracebackType
from typing import Any

from torch import nn

import hookline as hl
from hookline.compat.nice_hooks.activations import ActivationCache, ActivationCacheLike
from hookline.compat.nice_hooks.hooks import (
    Handle,
    Hook,
    add_backward_pre,
    add_forward,
    add_forward_pre,
    add_full_backward,
    add_values,
)
from hookline.compat.nice_hooks.paths import (
    AnySlice,
    ModulePath,
    ModulePathsLike,
    Tree,
    expand_module_path,
    patch_method_to_module,
    to_paths,
)
from hookline.compat.nice_hooks.recording import Recording

__all__ = [
    "ActivationCache",
    "ActivationCacheLike",
    "AnySlice",
    "ModulePath",
    "ModulePathsLike",
    "RemovableHandleCollection",
    "expand_module_path",
    "patch_method_to_module",
    "register_forward_hook",
    "register_forward_pre_hook",
    "register_full_backward_hook",
    "register_full_backward_pre_hook",
    "run",
    "to_paths",
]


class RemovableHandleCollection:
    """The hooks of one registration. As a context manager it removes them at the end."""

    def __init__(self, handles: Iterable[Any], hooks: hl.Hooks | None = None) -> None:
        self.handles = list(handles)
        self._all = hooks  # All of them: at the end of a block they know which never ran.

    def remove(self) -> None:
        """Take all of them off."""
        if self._all is not None:
            self._all.remove()
        for handle in self.handles if self._all is None else ():
            handle.remove()

    def __enter__(self) -> RemovableHandleCollection:
        if self._all:
            self._all.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._all is not None:
                self._all.__exit__(kind, error, trace)
        finally:
            self.remove()


def register_forward_hook(module: nn.Module, path: ModulePathsLike, hook: Hook) -> RemovableHandleCollection:
    """Call `hook(module, path, args, output)` after these modules; what it returns replaces the output, or its part."""
    return _register(add_forward, module, path, hook)


def register_forward_pre_hook(module: nn.Module, path: ModulePathsLike, hook: Hook) -> RemovableHandleCollection:
    """Call `hook(module, path, args)` before these modules; what it returns replaces the positional arguments."""
    return _register(add_forward_pre, module, path, hook)


def register_full_backward_hook(module: nn.Module, path: ModulePathsLike, hook: Hook) -> RemovableHandleCollection:
    """Call `hook(module, path, grad_input, grad_output)` in backward; what it returns replaces `grad_input`."""
    return _register(add_full_backward, module, path, hook)


def register_full_backward_pre_hook(module: nn.Module, path: ModulePathsLike, hook: Hook) -> RemovableHandleCollection:
    """Call `hook(module, path, grad_output)` when the gradient comes; what it returns replaces it."""
    return _register(add_backward_pre, module, path, hook)


def run(
    module: nn.Module,
    *args: Any,
    return_activations: ModulePathsLike | None = None,
    with_activations: Mapping[Any, Any] | None = None,
    forward_hooks: Mapping[Any, Hook] | None = None,
    forward_pre_hooks: Mapping[Any, Hook] | None = None,
    full_backward_hooks: Mapping[Any, Hook] | None = None,
    full_backward_pre_hooks: Mapping[Any, Hook] | None = None,
    **kwargs: Any,
) -> Any:
    """Call the model with hooks and given activations; return its result, or (result, cache) to `return_activations`.

    Forward hooks see outputs before they are replaced, the cache has them after.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    >>> result, cache = run(model, torch.ones(1, 2), with_activations={"0[:, 1]": 5.0}, return_activations=["*"])
    >>> list(cache), cache["0"][0, 1].item()
    (['0', '1', ''], 5.0)
    """
    hooks_given: list[tuple[str, Any, Callable[..., Any]]] = [
        ("forward_hooks", forward_hooks, add_forward),
        ("forward_pre_hooks", forward_pre_hooks, add_forward_pre),
        ("full_backward_pre_hooks", full_backward_pre_hooks, add_backward_pre),  # Before those that see its result.
        ("full_backward_hooks", full_backward_hooks, add_full_backward),
    ]
    if not (return_activations or with_activations or any(given for _, given, _ in hooks_given)):
        return module(*args, **kwargs)
    hooks, tree = hl.Hooks(module, active=False), Tree(module)
    for keyword, given, add in hooks_given:
        for paths, hook in _items(keyword, given):
            add(hooks, tree.places(paths), hook)
    values = _items("with_activations", with_activations)
    add_values(hooks, [(place, value) for paths, value in values for place in tree.places(paths)])
    wanted = tree.places(return_activations or False)
    recording = Recording(hooks, wanted) if wanted else None
    with hooks if hooks else nullcontext():
        result = module(*args, **kwargs)
    if not return_activations:
        return result
    return result, recording.activations() if recording is not None else ActivationCache()


def _items(keyword: str, given: Mapping[Any, Any] | None) -> Iterable[tuple[Any, Any]]:
    if given is not None and not isinstance(given, Mapping):
        raise TypeError(f"{keyword} is a mapping, as in {{'h.0': ...}}, not {type(given).__name__}")
    return (given or {}).items()


def _register(
    add: Callable[..., list[Handle]], model: nn.Module, paths: ModulePathsLike, hook: Hook
) -> RemovableHandleCollection:
    hooks = hl.Hooks(model)
    try:
        return RemovableHandleCollection(add(hooks, Tree(model).places(paths), hook, hooks), hooks)
    except BaseException:
        hooks.remove()
        raise
