"""Paths: patterns of module names with an optional index, and their matches in a model."""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

import hookline as hl
from hookline.compat.registrar import is_called, warn

AnySlice = int | slice | list[Any] | tuple[Any, ...] | Tensor | None
ModulePathsLike = str | list[str] | bool

_PATH = re.compile(r"([^\[\]]*)(?:\[([^\[\]]*)\])?")
_BOUND = re.compile(r"\s*(-?\d+)?\s*")
_STARS = re.compile(r"(\*\*|\*)")
_WORDS = {"*": "*", "...": ..., "None": None}

_methods: weakref.WeakKeyDictionary[type, dict[str, None]] = weakref.WeakKeyDictionary()


@dataclass
class ModulePath:
    """The name of a module, or a pattern of names, with an index into its output (or None).

    >>> ModulePath.parse("h.*[:, -1]")
    ModulePath(name='h.*', slice=(slice(None, None, None), -1))
    """

    name: str
    slice: AnySlice

    @staticmethod
    def parse(path: str) -> ModulePath:
        """Parse a path. Its index, if it has one, is a tuple."""
        match = _PATH.fullmatch(path)
        if match is None:
            raise ValueError(f"{path!r} is not a path: a name, and at most one index behind it, as in 'h.0[0, :]'")
        name, index = match.groups()
        return ModulePath(name, None if index is None else tuple(_item(text, path) for text in index.split(",")))

    def __str__(self) -> str:
        return self.name + _index_text(self.slice, ",")

    def __iter__(self) -> Iterator[Any]:
        return iter((self.name, self.slice))


def to_paths(paths: ModulePathsLike) -> list[str]:
    """Return a list of paths: True means every module, False means none."""
    if isinstance(paths, bool):
        return ["**"] if paths else []
    if isinstance(paths, (str, ModulePath)):
        return [str(paths)]
    if not isinstance(paths, Iterable):
        raise TypeError(f"a path is text, a list of texts, or True for every module, not {type(paths).__name__}")
    return [str(path) for path in paths]


def expand_module_path(model: nn.Module, path: ModulePathsLike) -> list[tuple[ModulePath, nn.Module]]:
    """Return the modules that paths match, each with its path. `*` matches any text without a dot, `**` any text.

    >>> [str(path) for path, _ in expand_module_path(nn.Sequential(nn.ReLU(), nn.ReLU()), "*[0]")]
    ['[0]', '0[0]', '1[0]']
    """
    tree = Tree(model)
    wanted = [ModulePath.parse(text) for text in to_paths(path)]
    return [(ModulePath(name, one.slice), tree.named[name][1]) for one in wanted for name in tree.match(one.name)]


def patch_method_to_module(cls: type[nn.Module], fname: str) -> None:
    """Let paths name a method of a class as if it were a module: `path.method`, on every instance.

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
    given: object = cls
    if not isinstance(given, type):
        kind = type(given).__name__
        raise TypeError(f"give the class, not an object of type {kind}: patch_method_to_module({kind}, {fname!r})")
    if fname == "forward" or fname.startswith("__") or not callable(getattr(cls, fname)):
        raise ValueError(
            f"{cls.__name__}.{fname} is not a method that can be named separately; a forward is the module itself"
        )
    _methods.setdefault(cls, {})[fname] = None


class PathPlace(NamedTuple):
    """One match of a path in a model: the user's name for it and hookline's site."""

    name: str
    site: hl.Site
    module: nn.Module | None  # None if only hookline knows the module under this name.
    is_named: bool  # True if the name was written out, not matched by a wildcard.


class Tree:
    """The names in a model that paths can match: its modules, and methods given to `patch_method_to_module`."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.named: dict[str, tuple[hl.Site, nn.Module]] = {}
        methods: dict[type, list[str]] = {}
        for path, module in model.named_modules():
            self.named[path] = hl.Site(path), module
            kind = type(module)
            if kind not in methods:
                methods[kind] = [method for base in kind.__mro__ for method in _methods.get(base, ())]
            for method in methods[kind]:
                site = hl.Site(path, member=f"{method}()")
                self.named[name_of(site)] = site, module

    def match(self, pattern: str) -> list[str]:
        """Return the names that a pattern matches."""
        if "*" not in pattern:
            return [pattern] if pattern in self.named else []
        words = {"**": ".*", "*": "[^.]*"}
        matches = re.compile("".join(words.get(text) or re.escape(text) for text in _STARS.split(pattern))).fullmatch
        return [name for name in self.named if matches(name)]

    def places(self, paths: ModulePathsLike) -> list[PathPlace]:
        """Return the places that paths match and that can be hooked. Warn about a path without a match."""
        found = []
        for path in map(ModulePath.parse, to_paths(paths)):
            index, is_named = _index_text(path.slice), "*" not in path.name
            known = [(name, *self.named[name]) for name in self.match(path.name)]
            places = [
                PathPlace(name, site._replace(index=index) if index else site, module, is_named)
                for name, site, module in known
                if site.method or is_called(module)
            ]
            other = [] if places else self._other_names(path)
            found += places or [PathPlace(name_of(one), one._replace(index=index), None, is_named) for one in other]
        return found

    def _other_names(self, path: ModulePath) -> list[hl.Site]:
        """Return hookline's sites for a name: a tied module, a module inside a wrapper, or a method with its `()`."""
        try:
            found = list(hl.sites(self.model, path.name))
        except hl.SiteError as error:
            warn(str(error))
            return []
        if any(site.function or site != hl.Site(site.path, member=site.member) for site in found):
            warn(f"'{path}' names no module and no method")  # In hookline's syntax it is a port, a call or a function.
            return []
        return found


def path_of(name: str, site: hl.Site) -> ModulePath:
    """Return the path of a value at a site, with the user's name for its module."""
    if not site.index:
        return ModulePath(name, None)
    items = [item for one in site.subscripts for item in (one if isinstance(one, tuple) else (one,))]
    if any(isinstance(item, str) for item in items):
        raise hl.SiteError(f"'{site}': the value is a dict, but '*' only selects items of tensors, tuples and lists")
    return ModulePath(name, tuple(items))


def name_of(site: hl.Site) -> str:
    """Return the name of a module, or of a method of it."""
    return f"{site.path}.{site.method}".strip(".")


def _item(text: str, path: str) -> Any:
    """Parse one item of an index."""
    text = text.strip()
    if text in _WORDS:
        return _WORDS[text]
    bounds = text.split(":")
    if not text or len(bounds) > 3 or not all(map(_BOUND.fullmatch, bounds)):
        raise ValueError(f"{path!r}: {text!r} is not an index; integers, slices, '...', None and '*' are")
    numbers = [int(bound) if bound.strip() else None for bound in bounds]
    return numbers[0] if len(bounds) == 1 else slice(*numbers)


def _index_text(index: AnySlice, comma: str = ", ") -> str:
    """Return an index as text. nice_hooks writes a comma alone, hookline a comma and a space."""
    items = index if isinstance(index, tuple) else (index,)
    return "" if index is None else f"[{comma.join(map(_item_text, items))}]"


def _item_text(item: Any) -> str:
    if not isinstance(item, slice):
        return "..." if item is Ellipsis else str(item)
    start, stop, step = ("" if bound is None else str(bound) for bound in (item.start, item.stop, item.step))
    return f"{start}:{stop}" + (f":{step}" if step else "")
