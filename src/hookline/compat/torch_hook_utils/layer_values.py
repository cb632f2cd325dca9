"""The dict that the blocks give: what passed at each layer."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from functools import wraps
from typing import Any

from torch import nn

import hookline as hl

NONE = object()  # What a capture keeps of a None, which a transform can't give.


def _reading(method: Any, of_one: bool = False) -> Any:
    """Make a method of dict see what has passed by then, under the one name that it reads or under all."""

    @wraps(method)
    def read(self: LayerValues, *args: Any) -> Any:
        self.refresh(*args[:1] if of_one else ())
        if args and isinstance(args[0], LayerValues):
            args[0].refresh()
        return method(self, *args)

    return read


def _changing(method: Any) -> Any:
    """Make a method of dict keep what has passed by then as it is: only what passes later is written over it."""

    @wraps(method)
    def change(self: LayerValues, *args: Any, **kwargs: Any) -> Any:
        self.refresh()
        self.forget()
        return method(self, *args, **kwargs)

    return change


class Collected(dict[Any, Any]):
    """A dict that says why it has no value for a name that it waits for. It is saved and loaded as a dict."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._why_not: dict[Any, str] = {}

    def expect(self, name: Any, why_not: str) -> None:
        """Wait for a value of this name; it has none because of this."""
        self._why_not[name] = why_not

    def __missing__(self, name: Any) -> Any:
        if name not in self._why_not:
            raise KeyError(name)
        raise hl.NotCaptured(f"{name!r} has no value: {self._why_not[name]}")

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, (), None, None, iter(self.items())  # Which torch.load() allows by default, unlike a dict.


class LayerValues(Collected):
    """What passed at each layer, in the order they first ran. It is brought up to date when it is read.

    A value is the layer's own, or a copy from before it was overwritten in place. Once the dict is changed by hand, the
    values in it stay as they are, and only calls after that are kept.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._cache = hl.Cache()
        self._sites: dict[str, hl.Site] = {}
        self._names: Mapping[str, Iterable[Any]] = {}
        self._latest: dict[hl.Site, int] = {}  # The number of the latest call, of those that have ended.
        self._outer: dict[hl.Site, hl.Cache] = {}  # What a call gave that ended after one within it.
        self._site_of: dict[Any, hl.Site] = {}  # Of several layers with one name, the one that ran last.

    def follow(self, hooks: hl.Hooks, names: Mapping[str, Iterable[Any]]) -> None:
        """Show what these hooks capture, under the names of each path."""
        self._cache, self._names = hooks.cache, names
        self._sites = {str(hook.site): hook.site for hook in hooks if hook.site.path in names}

    def note(self, value: Any, call: Any) -> Any:
        """Note which call has ended, as the transform of a capture, for which the latest is the one that began last."""
        site, number = call.site, int(call.number)
        if number < self._latest.get(site, 0):
            self._outer[site] = _captured(value)
        else:
            self._latest[site] = number
            self._outer.pop(site, None)
        for name in self._names.get(site.path, ()):
            self._site_of[name] = site
        return NONE if value is None else value

    def calls(self, name: Any) -> list[Any]:
        """Return every value of a layer that is kept, oldest call first."""
        sites = [site for site in self._sites.values() if name in self._names[site.path]]
        return [None if value is NONE else value for site in sites for value in self._cache.calls(site)]

    def refresh(self, *names: Any) -> None:
        """Write down what has passed by now: under these names if they are there, else under all, in their order."""
        if names and all(map(super().__contains__, names)):
            sites = [self._site_of[name] for name in names if name in self._site_of]
        else:
            sites = [self._sites[text] for text in self._cache if text in self._sites]
        for site in sites:
            found = self._outer[site].calls("") if site in self._outer else self._cache.calls(site)
            for name in self._names[site.path] if found else ():
                if self._site_of.setdefault(name, site) == site:
                    self._why_not.pop(name, None)
                    super().__setitem__(name, None if found[-1] is NONE else found[-1])

    def forget(self) -> None:
        """Keep only the values that are written down."""
        self._cache.clear()
        self._outer.clear()

    __getitem__, get = _reading(dict.__getitem__, of_one=True), _reading(dict.get, of_one=True)
    __contains__ = _reading(dict.__contains__, of_one=True)
    __len__, __iter__, __reversed__ = map(_reading, (dict.__len__, dict.__iter__, dict.__reversed__))
    __eq__, __ne__, __or__, __ror__ = map(_reading, (dict.__eq__, dict.__ne__, dict.__or__, dict.__ror__))
    keys, values, items, copy = map(_reading, (dict.keys, dict.values, dict.items, dict.copy))
    __repr__ = _reading(dict.__repr__)
    __setitem__, __delitem__, __ior__ = map(_changing, (dict.__setitem__, dict.__delitem__, dict.__ior__))
    pop, popitem, setdefault = map(_changing, (dict.pop, dict.popitem, dict.setdefault))
    update, clear = map(_changing, (dict.update, dict.clear))
    __hash__ = None  # type: ignore[assignment]


def _captured(value: Any) -> hl.Cache:
    """Return a cache with one value, kept as a capture keeps it."""
    layer = nn.Identity()
    with hl.capture(layer, "", detach=False) as cache:
        layer(value)
    return cache
