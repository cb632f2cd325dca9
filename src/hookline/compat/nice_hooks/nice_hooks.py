"""`run` and the `register_*` functions: record and change activations, selected by paths."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

import hookline as hl
from hookline.compat.nice_hooks.hooks import (
    Add,
    Hook,
    add_forward,
    add_forward_pre,
    add_full_backward,
    add_full_backward_pre,
    add_value,
)
from hookline.compat.nice_hooks.paths import (
    AnySlice,
    ModulePath,
    ModulePathsLike,
    PathPlace,
    Tree,
    expand_module_path,
    patch_method_to_module,
    path_of,
    to_paths,
)

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

ActivationCacheLike = dict[str, Tensor]


class ActivationCache(dict[str, Tensor]):
    """Activations by path. Arithmetic uses the keys that both sides have."""

    def __add__(self, other: Mapping[str, Tensor]) -> ActivationCache:
        return self._with(other, operator.add)

    def __sub__(self, other: Mapping[str, Tensor]) -> ActivationCache:
        return self._with(other, operator.sub)

    def __mul__(self, factor: float | Tensor) -> ActivationCache:
        return ActivationCache({path: value * factor for path, value in self.items()})

    def __truediv__(self, divisor: float | Tensor) -> ActivationCache:
        return ActivationCache({path: value / divisor for path, value in self.items()})

    def __or__(self, other: Mapping[str, Tensor]) -> ActivationCache:  # type: ignore[override]
        return ActivationCache({**self, **other})

    def copy(self) -> ActivationCache:
        """Return another cache with the same tensors."""
        return ActivationCache(self)

    def to(self, *args: Any, **kwargs: Any) -> ActivationCache:
        """Return the activations on another device or with another dtype."""
        return ActivationCache({path: value.to(*args, **kwargs) for path, value in self.items()})

    def index(self, key: Any) -> ActivationCache:
        """Return `value[key]` for each activation."""
        return ActivationCache({path: value[key] for path, value in self.items()})

    def _with(self, other: Mapping[str, Tensor], operation: Callable[[Tensor, Tensor], Tensor]) -> ActivationCache:
        if not isinstance(other, Mapping):
            return NotImplemented
        return ActivationCache({path: operation(value, other[path]) for path, value in self.items() if path in other})


def _capture(hooks: hl.Hooks, places: list[PathPlace]) -> Callable[[], ActivationCache]:
    """Capture at places. Return a function that returns the activations in the order in which they passed."""
    hooks.capture(*dict.fromkeys(place.site for place in places), detach=False)
    captures = hooks.of("capture").when_missing("ignore")
    named = [place.site for place in places if place.is_named]
    if named:
        captures.at(*named).when_missing("warn")

    def activations() -> ActivationCache:
        sites = [hl.Site.parse(text) for text in hooks.cache]
        names: dict[tuple[str, str], str] = {}
        for place in places:
            names.setdefault((place.site.path, place.site.member), place.name)
        if any((site.path, site.member) not in names for site in sites):  # hookline leaves out the names of wrappers.
            for place in places:
                for site in hl.sites(hooks.model, place.site):
                    names.setdefault((site.path, site.member), place.name)
        keys = [str(path_of(names[site.path, site.member], site)) for site in sites]
        return ActivationCache(zip(keys, [hooks.cache.calls(site)[-1] for site in sites], strict=True))

    return activations


class RemovableHandleCollection:
    """The hooks of one registration. As a context manager it removes them at the end."""

    def __init__(self, handles: Iterable[Any]) -> None:
        self.handles = list(handles)

    def remove(self) -> None:
        """Remove all hooks."""
        for handle in self.handles:
            handle.remove()

    def __enter__(self) -> RemovableHandleCollection:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def register_forward_hook(module: nn.Module, path: ModulePathsLike, hook: Hook) -> RemovableHandleCollection:
    """Call `hook(module, path, args, output)` after these modules. Its result replaces the output or its part."""
    return _register(add_forward, module, path, hook)


def register_forward_pre_hook(module: nn.Module, path: ModulePathsLike, hook: Hook) -> RemovableHandleCollection:
    """Call `hook(module, path, args)` before these modules. Its result replaces the positional arguments."""
    return _register(add_forward_pre, module, path, hook)


def register_full_backward_hook(module: nn.Module, path: ModulePathsLike, hook: Hook) -> RemovableHandleCollection:
    """Call `hook(module, path, grad_input, grad_output)` in backward. Its result replaces `grad_input`."""
    return _register(add_full_backward, module, path, hook)


def register_full_backward_pre_hook(module: nn.Module, path: ModulePathsLike, hook: Hook) -> RemovableHandleCollection:
    """Call `hook(module, path, grad_output)` when the gradient arrives. Its result replaces the gradient."""
    return _register(add_full_backward_pre, module, path, hook)


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
    """Call the model with hooks and given activations. Return its result, or (result, cache) with `return_activations`.

    Forward hooks see outputs before they are replaced; the cache has the replaced outputs.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    >>> result, cache = run(model, torch.ones(1, 2), with_activations={"0[:, 1]": 5.0}, return_activations=["*"])
    >>> list(cache), cache["0"][0, 1].item()
    (['0', '1', ''], 5.0)
    """
    hooks_given: list[tuple[str, Any, Add]] = [
        ("forward_hooks", forward_hooks, add_forward),
        ("forward_pre_hooks", forward_pre_hooks, add_forward_pre),
        (
            "full_backward_pre_hooks",
            full_backward_pre_hooks,
            add_full_backward_pre,
        ),  # Backward hooks see their results.
        ("full_backward_hooks", full_backward_hooks, add_full_backward),
    ]
    if not (return_activations or with_activations or any(given for _, given, _ in hooks_given)):
        return module(*args, **kwargs)
    hooks, tree = hl.Hooks(module, active=False), Tree(module)
    with ExitStack() as stack:
        for keyword, given, add in hooks_given:
            for paths, hook in _items(keyword, given):
                for place in tree.places(paths):
                    stack.callback(add(hooks, place, hook).remove)
        for paths, value in _items("with_activations", with_activations):
            for place in tree.places(paths):
                add_value(hooks, place, value)
        wanted = tree.places(return_activations or False)
        activations = _capture(hooks, wanted) if wanted else ActivationCache
        if hooks:
            stack.enter_context(hooks)
        result = module(*args, **kwargs)
    return (result, activations()) if return_activations else result


def _items(keyword: str, given: Mapping[Any, Any] | None) -> Iterable[tuple[Any, Any]]:
    if given is not None and not isinstance(given, Mapping):
        raise TypeError(f"{keyword} is a mapping, as in {{'h.0': ...}}, not {type(given).__name__}")
    return (given or {}).items()


def _register(add: Add, model: nn.Module, paths: ModulePathsLike, hook: Hook) -> RemovableHandleCollection:
    # Each hook has hl.Hooks of its own, which it holds: as in torch, it acts even if its handle is not kept.
    handles = RemovableHandleCollection([])
    try:
        for place in Tree(model).places(paths):
            hooks = hl.Hooks(model)
            handles.handles.append(add(hooks, place, _holding(hooks, hook)))
    except BaseException:
        handles.remove()
        raise
    return handles


def _holding(hooks: hl.Hooks, hook: Hook) -> Hook:
    return lambda *args, _hooks=hooks: hook(*args)
