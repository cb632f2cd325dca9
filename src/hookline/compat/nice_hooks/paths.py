"""Paths: patterns of module names with an index, read here, and what they mean in a model."""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import hookline as hl
from hookline.compat.warning import warn

AnySlice = int | slice | list[Any] | tuple[Any, ...] | Tensor | None
ModulePathsLike = str | list[str] | bool

_PATH = re.compile(r"([^\[\]]*)(?:\[([^\[\]]*)\])?")
_BOUND = re.compile(r"\s*(-?\d+)?\s*")
_STARS = re.compile(r"(\*\*|\*)")
_WORDS = {"*": "*", "...": ..., "None": None}

_methods: weakref.WeakKeyDictionary[type, dict[str, None]] = weakref.WeakKeyDictionary()


@dataclass
class ModulePath:
    """The name of a module, or a pattern of names, and an index into its output, or None.

    >>> ModulePath.parse("h.*[:, -1]")
    ModulePath(name='h.*', slice=(slice(None, None, None), -1))
    """

    name: str
    slice: AnySlice

    @staticmethod
    def parse(path: str) -> ModulePath:
        """Read a path; its index, if it has one, is a tuple."""
        match = _PATH.fullmatch(path)
        if match is None:
            raise ValueError(f"{path!r} is no path: a name, and at most one index behind it, as in 'h.0[0, :]'")
        name, index = match.groups()
        return ModulePath(name, None if index is None else tuple(_item(text, path) for text in index.split(",")))

    def __str__(self) -> str:
        return self.name + _index_text(self.slice, ",")

    def __iter__(self) -> Iterator[Any]:
        return iter((self.name, self.slice))


def to_paths(paths: ModulePathsLike) -> list[str]:
    """Return the paths that are meant: True is every module, False is none."""
    if isinstance(paths, bool):
        return ["**"] if paths else []
    return [str(path) for path in ([paths] if isinstance(paths, (str, ModulePath)) else paths)]


def expand_module_path(model: nn.Module, path: ModulePathsLike) -> list[tuple[ModulePath, nn.Module]]:
    """Return the modules that paths mean, each with its path. `*` is any text without a dot, `**` any text.

    >>> [str(path) for path, _ in expand_module_path(nn.Sequential(nn.ReLU(), nn.ReLU()), "*[0]")]
    ['[0]', '0[0]', '1[0]']
    """
    wanted = [ModulePath.parse(text) for text in to_paths(path)]
    return [(ModulePath(name_of(site), one.slice), module) for one in wanted for site, module in _matches(model, one)]


def patch_method_to_module(cls: type[nn.Module], fname: str) -> None:
    """Let paths name a method of a class as if it were a module: `path.method`, of every instance.

    >>> class Twice(nn.Module):
    ...     def double(self, x):
    ...         return x * 2
    ...
    ...     def forward(self, x):
    ...         return self.double(x) + 1
    >>> patch_method_to_module(Twice, "double")
    >>> [str(path) for path, _ in expand_module_path(nn.Sequential(Twice()), "**")]
    ['', '0', '0.double']
    """
    if fname == "forward" or fname.startswith("__") or not callable(getattr(cls, fname)):
        raise ValueError(f"{cls.__name__}.{fname} is no method with calls of its own; a forward is the module itself")
    _methods.setdefault(cls, {})[fname] = None


def sites_of(model: nn.Module, paths: ModulePathsLike) -> list[hl.Site]:
    """Return the sites that paths mean, of what can be hooked; warn of a path that means none."""
    found = []
    for text in to_paths(paths):
        path = ModulePath.parse(text)
        called = [site for site, module in _matches(model, path) if site.method or _is_called(module)]
        found += called or _other_names(model, path)
    return found


def index_of(site: hl.Site) -> tuple[Any, ...] | None:
    """Return the index of a site as a path has it."""
    items = [item for one in site.subscripts for item in (one if isinstance(one, tuple) else (one,))]
    return tuple(items) if site.index else None


def name_of(site: hl.Site) -> str:
    """Return the name of a module, or that of a method below it."""
    return f"{site.path}.{site.method}".strip(".")


def _matches(model: nn.Module, path: ModulePath) -> list[tuple[hl.Site, nn.Module]]:
    """Return the sites that a path means, of modules and of methods that stand for one."""
    pieces = (".*" if text == "**" else "[^.]*" if text == "*" else re.escape(text) for text in _STARS.split(path.name))
    matches = re.compile("".join(pieces)).fullmatch
    found = []
    for name, module in model.named_modules():
        methods = dict.fromkeys(f"{method}()" for base in type(module).__mro__ for method in _methods.get(base, ()))
        sites = [hl.Site(name, index=_index_text(path.slice), member=member) for member in ("", *methods)]
        found += [(site, module) for site in sites if matches(name_of(site))]
    return found


def _other_names(model: nn.Module, path: ModulePath) -> list[hl.Site]:
    """Return the sites of a name that hookline knows: of a tied module, inside a wrapper, of a method with its `()`."""
    try:
        found = hl.sites(model, path.name)
    except hl.SiteError as error:
        warn(str(error))
        return []
    if any(site.function or site != hl.Site(site.path, member=site.member) for site in found):
        warn(f"'{path}' names no module and no method")  # But a port, a call or a function, in hookline's language.
        return []
    return [hl.Site(site.path, index=_index_text(path.slice), member=site.member) for site in found]


def _is_called(module: nn.Module) -> bool:
    """Whether a module runs where it can be seen: no ModuleList, and nothing inside a torch.jit graph."""
    if isinstance(module, torch.jit.ScriptModule):
        return False
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def _item(text: str, path: str) -> Any:
    """Read one item of an index."""
    text = text.strip()
    if text in _WORDS:
        return _WORDS[text]
    bounds = text.split(":")
    if not text or len(bounds) > 3 or not all(map(_BOUND.fullmatch, bounds)):
        raise ValueError(f"{path!r}: {text!r} is no index; integers, slices, '...', None and '*' are")
    numbers = [int(bound) if bound.strip() else None for bound in bounds]
    return numbers[0] if len(bounds) == 1 else slice(*numbers)


def _index_text(index: AnySlice, comma: str = ", ") -> str:
    """Return an index as it is written; hookline has a blank after the comma."""
    items = index if isinstance(index, tuple) else (index,)
    return "" if index is None else f"[{comma.join(map(_item_text, items))}]"


def _item_text(item: Any) -> str:
    if not isinstance(item, slice):
        return "..." if item is Ellipsis else str(item)
    start, stop, step = ("" if bound is None else str(bound) for bound in (item.start, item.stop, item.step))
    return f"{start}:{stop}" + (f":{step}" if step else "")
