"""`run` and the `register_*` functions: record and change activations, selected by paths."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from functools import partial
from types import TracebackType
from typing import Any

from torch import Tensor, nn

import hookline as hl
from hookline.compat.nice_hooks.hooks import (
    Handle,
    Hook,
    Names,
    add_backward_pre,
    add_forward,
    add_forward_pre,
    add_full_backward,
    add_values,
    path_in,
    spread,
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
from hookline.compat.registrar import warn
from hookline.compat.shared import cache_of, may_call_itself

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


class Recording:
    """Captures at places. If a module is called several times, it keeps the call that ended last.

    hookline keeps the call that began last, and stores each module under one name. Where this may give another result,
    extra hooks record which calls ended.
    """

    def __init__(self, hooks: hl.Hooks, places: list[PathPlace]) -> None:
        self.hooks = hooks
        self.places = places
        self.notes = CallsSeen()
        self.names: Names = {}
        hooks.capture(*[place.site for place in places], detach=False)
        found = [hook.site for hook in hooks.of("capture").when_missing("ignore")]
        self.names_agree = len(found) == len(places) and all(
            self.names.setdefault((site.path, site.member), place.name) == place.name
            for site, place in zip(found, places, strict=True)
        )
        if len(self.names) < len(places) and any("*" in place.site.index for place in places):
            self.names_agree = False  # Two places may capture the same part.
        noted = [place for place in places if not self.names_agree or _may_end_late(place)]
        spread(noted, self._add_notes)

    def activations(self) -> ActivationCache:
        """Return the recorded activations in the order they passed. Warn about written-out names that never ran."""
        cache, outer = self.hooks.cache, self.notes.outer
        paths = self.notes.seen
        if self.names_agree:
            sites = [(self.names[site.path, site.member], site) for site in map(hl.Site.parse, cache)]
            paths = {str(path_of(name, site)) if site.index else name: site for name, site in sites}
        kept = {path: outer[path][""] if path in outer else cache.calls(site)[-1] for path, site in paths.items()}
        came = {path.partition("[")[0] for path in kept}
        missing = [place for place in self.places if place.is_named and place.name not in came]
        if missing:
            more = f" (and {len(missing) - 1} more)" if missing[1:] else ""
            warn(f"{self._reason(missing[0])}{more}")
        return ActivationCache(kept)

    def _add_notes(self, sites: list[hl.Site], names: Names, _missing: str) -> hl.Hooks:
        take = partial(self.notes.take, names)
        return self.hooks.edit(sites, take, with_call=True, clone=False).when_missing("ignore")

    def _reason(self, place: PathPlace) -> str:
        try:
            self.hooks.cache[place.site]
        except hl.NotCaptured as error:
            return str(error)
        return f"nothing passed '{place.name}'"


def _may_end_late(place: PathPlace) -> bool:
    """Return True if a call at a place may end after a call that began later."""
    return place.module is None or bool(place.site.method) or may_call_itself(place.module)


class CallsSeen:
    """The paths that ran, and the outputs of calls that ended after another call inside them."""

    def __init__(self) -> None:
        self.seen: dict[str, hl.Site] = {}
        self.numbers: dict[str, int] = {}  # The highest number among the calls that have ended, by path.
        self.outer: dict[str, hl.Cache] = {}

    def take(self, names: Names, value: Any, call: Any) -> None:
        """Record the end of a call."""
        path = str(path_in(names, call.site))
        self.seen.setdefault(path, call.site)
        number = int(call.number)
        if number < self.numbers.get(path, 0):
            self.outer[path] = cache_of(value)
        else:
            self.numbers[path] = number
            self.outer.pop(path, None)


class RemovableHandleCollection:
    """The hooks of one registration. As a context manager it removes them at the end."""

    def __init__(self, handles: Iterable[Any], hooks: hl.Hooks | None = None) -> None:
        self.handles = list(handles)
        self._all = hooks  # All hooks together: at the end of a block they report which of them never ran.

    def remove(self) -> None:
        """Remove all hooks."""
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
    """Call the model with hooks and given activations. Return its result, or (result, cache) with `return_activations`.

    Forward hooks see outputs before they are replaced; the cache has the replaced outputs.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    >>> result, cache = run(model, torch.ones(1, 2), with_activations={"0[:, 1]": 5.0}, return_activations=["*"])
    >>> list(cache), cache["0"][0, 1].item()
    (['0', '1', ''], 5.0)
    """
    hooks_given: list[tuple[str, Any, Callable[..., Any]]] = [
        ("forward_hooks", forward_hooks, add_forward),
        ("forward_pre_hooks", forward_pre_hooks, add_forward_pre),
        ("full_backward_pre_hooks", full_backward_pre_hooks, add_backward_pre),  # Backward hooks see their results.
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
