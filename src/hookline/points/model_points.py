"""All hook points of one model, by name, and blocks in which hook functions act on them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import nn

from hookline import Hooks, Site
from hookline._kernel import NOTHING, Names, describe, is_container, is_scripted, short_form, unwrap
from hookline.errors import HooklineError, NeverFired, SiteError, did_you_mean
from hookline.points.point import PORTS, RAISES, Applied, Handle, HookFunction, HookPoint
from hookline.points.transformer_lens import as_point, is_lens_point

NameOrFilter = str | Callable[[str], bool]


class Wanted(NamedTuple):
    """A hook function for one point, in a block, and what happens when nothing passes there."""

    point: Any  # A HookPoint, or one of transformer_lens that stands in the model.
    function: HookFunction
    dir: str
    otherwise: str


class Points:
    """The hook points of one model, by name. Only the hooks that are on it hold the model."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._found: dict[str, HookPoint] = {}
        self._sites: dict[str, Site] = {}
        self._hooks: Hooks | None = None
        self._closed = False
        self._names: dict[Any, str | None] = {}  # What the points were called that stand in the model itself.
        self._levels: list[int] = []
        self._reading = threading.Lock()

    @property
    def model(self) -> nn.Module:
        """The model itself."""
        model = self._model()
        if model is None or self._closed:
            raise HooklineError("this model was unwrapped, or is gone; hook it again with hl.auto_hook(model)")
        return model

    @property
    def level(self) -> int:
        """How many blocks are open on it."""
        return max(self._levels, default=0)

    def belongs_to(self, model: nn.Module) -> bool:
        """Whether these are the points of that very model, and not of one it was copied from."""
        return self._model() is model and not self._closed

    def read(self) -> dict[str, HookPoint]:
        """Return every point by name, as the model is now: new modules have one, those of old ones are gone."""
        with self._reading:
            before = self._found
            places = {name: (site, manual) for name, site, manual in _places(self.model)}
            found = {}
            for name, (_, manual) in places.items():
                point = manual if manual is not None else before.get(name)
                if point is None or (manual is None and is_manual(point)):
                    point = self._make()
                elif manual is not None:
                    self._names.setdefault(point, point.name)
                point.name = name
                found[name] = point
            self._sites = {name: site for name, (site, _) in places.items()}
            self._found = found  # At once: other threads may read it meanwhile.
        for name, point in before.items():
            if found.get(name) is not point:
                point.remove_hooks("both", including_permanent=True)
        return dict(found)

    def site(self, point: HookPoint, port: str = "output") -> Site:
        """Return the site of a point."""
        name = point.name or ""
        if self._found.get(name) is not point:
            raise HooklineError(f"{name!r} is not in the model any more")
        return self._sites[name]._replace(port=port)

    def choose(self, where: NameOrFilter) -> list[HookPoint]:
        """Return the points that a name or a filter of names means."""
        found = self.read()
        if isinstance(where, str):
            if where not in found:
                raise SiteError(f"{where!r} is not a hook point of {self._title}{_near(where, found)}")
            return [found[where]]
        if not callable(where):
            raise SiteError(f"hooks are added by name or by a filter of names, not by {type(where).__name__}")
        chosen = [point for name, point in found.items() if where(name)]
        if not chosen:
            raise SiteError(f"the filter takes none of the {len(found)} hook points of {self._title}; see hook_dict")
        return chosen

    @contextmanager
    def opened(self, wanted: list[Wanted], reset: bool = True, clear_contexts: bool = False) -> Iterator[None]:
        """Let hook functions act for a while on this thread, one level deeper; without `reset` they stay."""
        level = self.level + 1
        self._levels.append(level)
        try:
            if reset:
                with self._block(wanted, level):
                    yield
            else:
                for point, function, dir, _ in wanted:
                    point.add_hook(function, dir=dir, level=level)
                yield
        finally:
            for point in list(self._found.values()) if reset else ():
                if point.fwd_hooks or point.bwd_hooks:
                    point.remove_hooks("both", level=level)
                if clear_contexts:
                    point.clear_context()
            self._levels.remove(level)

    @contextmanager
    def _block(self, wanted: list[Wanted], level: int) -> Iterator[None]:
        block = short_form(self.model)
        placed: list[tuple[Wanted, Applied]] = []
        for one in wanted:
            if not isinstance(one.point, HookPoint):  # It calls its functions by itself.
                one.point.add_hook(one.function, dir=one.dir, level=level)
                continue
            applied = Applied(one.function, one.point, one.dir)
            added = block.edit(self.site(one.point, PORTS[one.dir]), applied, with_call=True)
            one.point.handles(one.dir).append(Handle(added.when_missing(one.otherwise), False, level, one.function))
            placed.append((one, applied))
        if not placed:
            yield
            return
        with block:
            yield
        for one, applied in placed:
            if one.otherwise == RAISES and applied.passed is not NOTHING and not applied.called:
                raise NeverFired(f"{one.point.name!r} gives no tensor to hook, but {describe(applied.passed)}")

    def close(self) -> None:
        """Take everything off the model, for good."""
        for point in self._found.values():
            point.remove_hooks("both", including_permanent=True)
        for point, name in self._names.items():
            point.name = name
        self._closed = True

    def _make(self) -> HookPoint:
        point: HookPoint = as_point(HookPoint)()
        home = weakref.ref(self)

        def place(point: HookPoint, port: str, applied: Applied) -> Hooks:
            points = home()
            if points is None:
                raise HooklineError(f"{point.name!r} belongs to a hooked model that is gone; keep it in a variable")
            return points._stay(points.site(point, port), applied)

        point._place = place
        return point

    def _stay(self, site: Site, applied: Applied) -> Hooks:
        if self._hooks is None or not len(self._hooks):
            self._hooks = Hooks(self.model)
        return self._hooks.edit(site, applied, with_call=True)

    @property
    def _title(self) -> str:
        return type(unwrap(self.model)).__name__

    def __reduce__(self) -> tuple[Any, ...]:
        return _no_points, ()  # A copy of a model makes its own.


def is_manual(point: nn.Module) -> bool:
    """Whether a point stands in the model itself, where its author put it."""
    return point._place is None if isinstance(point, HookPoint) else is_lens_point(point)


def _near(where: str, found: dict[str, HookPoint]) -> str:
    if where + ".hook_point" in found:
        return f"; did you mean {where + '.hook_point'!r}?"
    return did_you_mean(where, found) or "; hook_dict has all of them"


def _places(model: nn.Module) -> Iterator[tuple[str, Site, Any]]:
    """Yield the name and the site of every point, and the point itself where its author put one there."""
    seen: set[int] = set()
    for path, module in Names(model).once():
        prefix = path + "." if path else ""
        if is_scripted(module):
            continue
        if isinstance(module, HookPoint) or is_lens_point(module):
            yield path, Site(path), module
            continue
        if not is_container(module) and not (path and type(module).forward is nn.Sequential.forward):
            yield prefix + "hook_point", Site(path), None
        for key, parameter in module._parameters.items() if not _is_layer(module) else ():
            if parameter is not None and id(parameter) not in seen:  # A tied one has one point, as a tied module has.
                seen.add(id(parameter))
                yield f"{prefix}{key}.hook_point", Site(prefix + key, member="/*"), None


def _is_layer(module: nn.Module) -> bool:
    """Whether a module is one of torch.nn's own, which uses its parameters by itself."""
    forward = type(module).forward
    return forward is not nn.Module.forward and str(getattr(forward, "__module__", "")).startswith("torch.")


def _no_points() -> None:
    return None
