"""The dict that the blocks give: what passed at each layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from functools import partial
from typing import Any

import hookline as hl


class LayerValues(dict[str, Any]):
    """What passed at each layer, in the order they first ran: a dict whose values are read when they are asked for.

    By then the model may have overwritten the tensor itself, and a copy from before stands in for it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._watched: dict[str, tuple[hl.Cache, hl.Site]] = {}
        self._reads: dict[str, Callable[[], Any]] = {}

    def watch(self, name: str, hooks: hl.Hooks, site: hl.Site, read: Callable[[hl.Cache, hl.Site], Any]) -> None:
        """Show what these hooks capture at a site under this name, as soon as the layer runs."""
        self._watched[name] = hooks.cache, site
        hooks.edit(site, partial(self._show, name, partial(read, hooks.cache, site)), clone=False)

    def calls(self, name: str) -> list[Any]:
        """Return every value of a layer that is kept, oldest call first."""
        cache, site = self._watched[name]
        return cache.calls(site)

    def _show(self, name: str, read: Callable[[], Any], _value: Any) -> None:
        self._reads[name] = read
        super().__setitem__(name, None)

    def __getitem__(self, name: str) -> Any:
        if name in self._reads:
            return self._reads[name]()
        if name in self or name not in self._watched:
            return super().__getitem__(name)
        cache, site = self._watched[name]
        try:
            return cache[site]
        except hl.NotCaptured as error:
            raise hl.NotCaptured(f"{name!r} has no value: {error}") from None

    def __setitem__(self, name: str, value: Any) -> None:
        self._reads.pop(name, None)
        super().__setitem__(name, value)

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        if self._reads.pop(name, None) is not None:
            self._watched[name][0].clear()

    def __iter__(self) -> Iterator[str]:
        return super().__iter__()  # Said here so that dict(values) and {**values} read each value, too.

    get, pop, popitem = MutableMapping.get, MutableMapping.pop, MutableMapping.popitem  # type: ignore[assignment]
    values, items, clear = MutableMapping.values, MutableMapping.items, MutableMapping.clear  # type: ignore[assignment]
    setdefault, update, __eq__ = MutableMapping.setdefault, MutableMapping.update, MutableMapping.__eq__
    __hash__ = None

    def copy(self) -> dict[str, Any]:
        """Return a plain dict of the values."""
        return dict(self)

    def __or__(self, other: Any) -> Any:
        return dict(self) | other

    def __ror__(self, other: Any) -> Any:
        return other | dict(self)

    def __repr__(self) -> str:
        return repr(dict(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)
