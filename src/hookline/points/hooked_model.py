"""Hook points on every module: `auto_hook`, which gives any model or class the interface of TransformerLens.

`HookedRoot` is that interface. A `HookedModel` wraps it around a model and leaves the model as it is; a decorated class
inherits from it.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping, ValuesView
from contextlib import AbstractContextManager, _GeneratorContextManager
from typing import Any, ParamSpec, TypeVar, overload

import torch
from torch import nn

from hookline._kernel import Names, describe, is_scripted, refuse_flags, unwrap
from hookline.errors import EditError, HooklineError, warn
from hookline.points.caching import CacheOptions, NamesFilter, Saver, caching_hooks, loss_of, run_with_cache
from hookline.points.hook_points import (
    RAISES,
    WARNS,
    HookFunction,
    HookPoint,
    HookToAdd,
    NameOrFilter,
    Points,
    as_root,
    refuse_other,
)

Pairs = Iterable[tuple[NameOrFilter, HookFunction]]
Kind = TypeVar("Kind", bound=type[nn.Module])
Options = ParamSpec("Options")
Yielded = TypeVar("Yielded")
KEY = "_hookline_points"  # Where an instance of a decorated class keeps its points.
CHAINED = (  # Methods that return the model itself.
    *("apply", "bfloat16", "cpu", "cuda", "double", "eval", "float", "half", "ipu", "mtia", "requires_grad_"),
    *("share_memory", "to", "to_empty", "train", "type", "xpu"),
)
DELEGATED = ("__len__", "__iter__", "__getitem__", "__setitem__", "__delitem__", "__contains__", "__reversed__")


class Unstarted(_GeneratorContextManager[Any, None, None]):
    """A `with` block made from a generator. It warns if it is garbage-collected without having been entered."""

    is_used = False

    def __enter__(self) -> Any:
        self.is_used = True
        return super().__enter__()

    def __call__(self, function: Any) -> Any:
        self.is_used = True  # Used as a decorator, which enters a new block for each call.
        return super().__call__(function)

    def __del__(self, _is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not self.is_used and not _is_finalizing():
            name = self.func.__name__
            warn(f"{name} was never entered and did nothing; write `with {name}(...):`")


def must_enter(
    function: Callable[Options, Generator[Yielded, None, None]],
) -> Callable[Options, AbstractContextManager[Yielded]]:
    """Turn a generator function into a `with` block, as contextlib.contextmanager does; warn if it is never entered."""

    @functools.wraps(function)
    def make(*args: Options.args, **kwargs: Options.kwargs) -> AbstractContextManager[Yielded]:
        return Unstarted(function, args, kwargs)

    return make


class HookedRoot(nn.Module):
    """A model with hook points."""

    __jit_unused_properties__ = ("hook_dict", "mod_dict", "context_level")
    is_caching = False  # transformer_lens has this attribute; nothing here depends on it.

    @property
    def hook_dict(self) -> dict[str, HookPoint]:
        """Every hook point of the model's current modules, by name."""
        return points_of(self).read()

    @property
    def mod_dict(self) -> dict[str, nn.Module]:
        """Every module and every hook point by name."""
        points = points_of(self)
        modules = {name: module for name, module in Names(points.model).once() if name}
        return {**modules, **points.read()}

    @property
    def context_level(self) -> int:
        """The level of the innermost open `hooks` block; 0 if none is open."""
        return points_of(self).level

    @context_level.setter
    def context_level(self, level: int) -> None:
        """Ignore the value: transformer_lens's constructor sets it, but the level is computed here."""

    def hook_points(self) -> ValuesView[HookPoint]:
        """Return every hook point."""
        return points_of(self).read().values()

    def add_hook(
        self,
        name: NameOrFilter,
        hook: HookFunction,
        dir: str = "fwd",
        is_permanent: bool = False,
        level: int | None = None,
        prepend: bool = False,
    ) -> None:
        """Call `hook(tensor, hook=point)` at the point of that name, or at all points that a filter of names accepts.

        If it returns anything but None, that replaces the tensor. The hook stays until `reset_hooks`.
        """
        refuse_other(hook)
        for point in points_of(self).choose(name):
            point.add_hook(hook, dir=dir, is_permanent=is_permanent, level=level, prepend=prepend)

    def add_perma_hook(self, name: NameOrFilter, hook: HookFunction, dir: str = "fwd") -> None:
        """Add a hook that only `including_permanent=True` removes."""
        HookedRoot.add_hook(self, name, hook, dir=dir, is_permanent=True)

    @must_enter
    def hooks(
        self,
        fwd_hooks: Pairs = (),
        bwd_hooks: Pairs = (),
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
    ) -> Generator[Any, None, None]:
        """Add hooks for a `with` block on this thread: pairs of a name, or a filter of names, and a function."""
        refuse_flags(reset_hooks_end=reset_hooks_end, clear_contexts=clear_contexts)
        points = points_of(self)
        pairs = [*_pairs("fwd", fwd_hooks), *_pairs("bwd", bwd_hooks)]
        wanted = [
            HookToAdd(point, function, dir, _when_missing(where, function))
            for where, function, dir in pairs
            for point in points.choose(where)
        ]
        with points.opened(wanted, reset_hooks_end, clear_contexts):
            yield self

    def run_with_hooks(
        self,
        *args: Any,
        fwd_hooks: Pairs = (),
        bwd_hooks: Pairs = (),
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Run the model once under hooks. Backward hooks act in the backward pass that follows."""
        with HookedRoot.hooks(self, fwd_hooks, bwd_hooks, reset_hooks_end, clear_contexts):
            return points_of(self).model(*args, **kwargs)

    def run_with_cache(
        self,
        *args: Any,
        names_filter: NamesFilter = None,
        device: torch.device | str | None = None,
        remove_batch_dim: bool = False,
        incl_bwd: bool = False,
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
        pos_slice: Any = None,
        **kwargs: Any,
    ) -> tuple[Any, dict[str, Any]]:
        """Run the model once, and return its output and the values at the points, by name.

        Args:
            names_filter: A name, a list of names, or a function of a name; None means all points.
            remove_batch_dim: Store values without their first dimension, for a batch of one.
            incl_bwd: Also call backward() on the output, and store gradients under the name plus "_grad".
            pos_slice: The positions to keep in the second to last dimension: a number, a slice, or a list.
        """
        refuse_flags(incl_bwd=incl_bwd, reset_hooks_end=reset_hooks_end, clear_contexts=clear_contexts)
        points = points_of(self)
        options = CacheOptions(device, remove_batch_dim, pos_slice)
        options.refuse()
        if reset_hooks_end:
            return run_with_cache(points, args, kwargs, names_filter, incl_bwd, options, clear_contexts)
        cache, forward, backward = caching_hooks(points, names_filter, incl_bwd, options, None)
        with HookedRoot.hooks(self, forward, backward, reset_hooks_end=False):
            output = points.model(*args, **kwargs)
            if incl_bwd:
                loss_of(output).backward()
        return output, cache

    def get_caching_hooks(
        self,
        names_filter: NamesFilter = None,
        incl_bwd: bool = False,
        device: torch.device | str | None = None,
        remove_batch_dim: bool = False,
        cache: dict[str, Any] | None = None,
        pos_slice: Any = None,
    ) -> tuple[dict[str, Any], list[tuple[str, Saver]], list[tuple[str, Saver]]]:
        """Return a dict, and the forward and backward hooks that fill it, for `hooks` and `run_with_hooks`."""
        options = CacheOptions(device, remove_batch_dim, pos_slice)
        return caching_hooks(points_of(self), names_filter, incl_bwd, options, cache)

    def add_caching_hooks(
        self,
        names_filter: NamesFilter = None,
        incl_bwd: bool = False,
        device: torch.device | str | None = None,
        remove_batch_dim: bool = False,
        cache: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Add hooks that stay until `reset_hooks` and store values in a dict; return the dict."""
        options = CacheOptions(device, remove_batch_dim)
        points = points_of(self)
        kept, forward, backward = caching_hooks(points, names_filter, incl_bwd, options, cache)
        for dir, hooks in (("fwd", forward), ("bwd", backward)):
            for name, hook in hooks:
                points.read()[name].add_hook(hook, dir=dir)
        return kept

    def reset_hooks(
        self,
        clear_contexts: bool = True,
        direction: str = "both",
        including_permanent: bool = False,
        level: int | None = None,
    ) -> None:
        """Remove the hooks of every point, and empty their `ctx`."""
        refuse_flags(clear_contexts=clear_contexts)
        if clear_contexts:
            HookedRoot.clear_contexts(self)
        HookedRoot.remove_all_hook_fns(self, direction, including_permanent, level)

    def remove_all_hook_fns(
        self, direction: str = "both", including_permanent: bool = False, level: int | None = None
    ) -> None:
        """Remove the hooks of every point, or only those of one direction or level."""
        for point in points_of(self).read().values():
            point.remove_hooks(direction, including_permanent=including_permanent, level=level)

    def clear_contexts(self) -> None:
        """Empty the `ctx` of every point."""
        for point in points_of(self).read().values():
            point.clear_context()

    def setup(self) -> None:
        """Do nothing: `hook_dict` is always up to date. Models written for transformer_lens call this."""

    def unwrap(self) -> Any:
        """Remove every hook, including permanent ones, and return the original model."""
        return _close(self)


class HookedModel(HookedRoot):
    """The interface around a model. Every other attribute is the model's, under the same name."""

    _own: frozenset[str] = frozenset()
    # The class that the user called. An instance's class is a subclass with extra methods for its model.
    _named: type[HookedModel]
    _hooked_model: nn.Module
    _hook_points: Points

    def __new__(cls, model: nn.Module, *_args: Any, **_kwargs: Any) -> HookedModel:
        if not isinstance(model, nn.Module):
            raise HooklineError(f"{cls.__name__} takes a torch.nn.Module, not {type(model).__name__}")
        bare = unwrap(model)
        if is_scripted(bare):
            raise HooklineError(f"{type(bare).__name__} is compiled by torch.jit, and nothing inside it can be hooked")
        if isinstance(bare, HookedRoot) or id(bare) in _wrapped:
            raise HooklineError(
                f"this {type(bare).__name__} has hook points already; use those, or remove them with unwrap() first"
            )
        held = {name: _delegate(name) for name in DELEGATED if hasattr(type(model), name)}
        bases: Any = (as_root(cls),)  # type: ignore[arg-type]
        hooked: HookedModel = object.__new__(type(cls.__name__, bases, {**held, "_named": cls}))
        _wrapped[id(bare)] = hooked
        return hooked

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        named = {name for kind in cls.__mro__ if kind not in nn.Module.__mro__ for name in vars(kind)}
        cls._own = frozenset(named | {"_hooked_model", "_hook_points", "_modules"})

    def __init__(self, model: nn.Module) -> None:  # Does not call nn.Module's: parameters and buffers are the model's.
        object.__setattr__(self, "_hooked_model", model)
        object.__setattr__(self, "_hook_points", Points(model))
        object.__setattr__(self, "_modules", {"_hooked_model": model})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._hooked_model(*args, **kwargs)

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("__") or name in type(self)._own:
            return object.__getattribute__(self, name)
        value = getattr(self._hooked_model, name)
        return _chained(self, value) if name in CHAINED and inspect.ismethod(value) else value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # The model's __deepcopy__, for instance, would lose the points.
            raise AttributeError(f"'HookedModel' object has no attribute {name!r}")
        return getattr(self._hooked_model, name)  # Asked again, so that the error is the model's.

    def __setattr__(self, name: str, value: Any) -> None:
        if name in type(self)._own:
            object.__setattr__(self, name, value)
        else:
            setattr(self._hooked_model, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._hooked_model, name)

    def __dir__(self) -> list[str]:
        return sorted({*type(self)._own, *dir(self._hooked_model)})

    def __repr__(self) -> str:
        return f"HookedModel({self._hooked_model!r})"

    def __reduce_ex__(self, _protocol: Any) -> tuple[Any, ...]:
        return self._named, (self._hooked_model,)  # A copy has no hooks, and creates its own points.

    def __copy__(self) -> HookedModel:
        return self._named(copy.copy(self._hooked_model))


_wrapped: weakref.WeakValueDictionary[int, HookedModel] = weakref.WeakValueDictionary()


@overload
def auto_hook(model: Kind) -> Kind: ...
@overload
def auto_hook(model: nn.Module) -> HookedModel: ...
def auto_hook(model: Any) -> Any:
    """Add hook points to every module and every bare parameter of a model or, as a decorator, of a class.

    >>> model = auto_hook(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
    >>> list(model.hook_dict)
    ['hook_point', '0.hook_point', '1.hook_point', '2.hook_point']
    >>> output, cache = model.run_with_cache(torch.ones(3, 4))
    >>> cache["1.hook_point"].shape
    torch.Size([3, 8])
    """
    if isinstance(model, type) and issubclass(model, nn.Module):
        return _decorate(model)
    if not isinstance(model, nn.Module):
        raise HooklineError(f"auto_hook takes a torch.nn.Module or a class of them, not {type(model).__name__}")
    return HookedModel(model)


def _decorate(kind: type[nn.Module]) -> type[nn.Module]:
    """Add the interface to the bases of a class. The class stays the same object, so its `super()` calls still work."""
    if issubclass(kind, HookedRoot):
        raise HooklineError(f"{kind.__name__} has hook points already, its own or inherited")
    if kind.__module__.partition(".")[0] == "torch":
        raise HooklineError(
            f"{kind.__name__} is a torch class, and every model that uses it would change; hook an instance"
        )
    root = as_root(HookedRoot)
    interface = {name for base in root.__mro__ if base not in nn.Module.__mro__ for name in vars(base)}
    own = {name for base in kind.__mro__ if base not in nn.Module.__mro__ for name in vars(base)}
    taken = sorted(name for name in interface & own if not name.startswith("_"))
    if taken:
        raise HooklineError(
            f"{kind.__name__} has {', '.join(map(repr, taken))} of its own, which hook points need; rename it, or hook "
            "an instance with hl.auto_hook(model)"
        )
    bases = tuple(root if base is nn.Module else base for base in kind.__bases__)
    try:
        kind.__bases__ = bases if root in bases else (*bases, root)
    except TypeError as error:
        raise HooklineError(f"{kind.__name__} can't get another base ({error}); hook an instance of it") from None
    return kind


def _delegate(name: str) -> Any:
    def method(self: HookedModel, *args: Any) -> Any:
        return getattr(type(self._hooked_model), name)(self._hooked_model, *args)

    method.__name__ = name
    return method


def _chained(hooked: HookedModel, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method, but with the hooked model as its result instead of the model: `hooked.eval().cuda()`."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        return hooked if result is hooked._hooked_model else result

    return call


def _pairs(dir: str, given: Pairs) -> list[tuple[Any, Any, str]]:
    """Return (name, function, direction) for each pair; raise for anything else."""
    found = [given] if isinstance(given, (str, Mapping, torch.Tensor)) else list(given)
    for pair in found:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise EditError(f"{dir}_hooks takes pairs, [(name, function), ...], not {describe(pair)}")
        refuse_other(pair[1])
    return [(where, function, dir) for where, function in found]


def _when_missing(where: NameOrFilter, function: HookFunction) -> str:
    if isinstance(function, Saver):
        return function.when_missing
    return RAISES if isinstance(where, str) else WARNS


def points_of(hooked: HookedRoot) -> Points:
    """Return the points of a hooked model. An instance of a decorated class gets them on first use."""
    if isinstance(hooked, HookedModel):
        return hooked._hook_points
    points = hooked.__dict__.get(KEY)
    if points is None or not points.belongs_to(hooked):
        points = Points(hooked)
        object.__setattr__(hooked, KEY, points)
    return points


def _close(hooked: HookedRoot) -> nn.Module:
    points_of(hooked).close()
    if not isinstance(hooked, HookedModel):
        object.__delattr__(hooked, KEY)
        return hooked
    _wrapped.pop(id(unwrap(hooked._hooked_model)), None)
    return hooked._hooked_model
