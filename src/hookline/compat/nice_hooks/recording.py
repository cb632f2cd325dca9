"""What passes in a run, by the user's paths: hookline captures it, and here it gets its names."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

import hookline as hl
from hookline.compat.nice_hooks.activations import ActivationCache
from hookline.compat.nice_hooks.hooks import Names, path_in, spread
from hookline.compat.nice_hooks.paths import Place, path_of
from hookline.compat.warning import warn


class Recording:
    """Captures at places; of a module that is called several times, the call that ended last counts.

    hookline keeps the call that began last, and each module under one name. Where that may differ, notes are taken.
    """

    def __init__(self, hooks: hl.Hooks, places: list[Place]) -> None:
        self.hooks = hooks
        self.places = places
        self.notes = Notes()
        self.names: Names = {}
        hooks.capture(*[place.site for place in places], detach=False)
        found = [hook.site for hook in hooks.of("capture").when_missing("ignore")]
        self.names_agree = len(found) == len(places) and all(
            self.names.setdefault((site.path, site.member), place.name) == place.name
            for site, place in zip(found, places, strict=True)
        )
        if len(self.names) < len(places) and any("*" in place.site.index for place in places):
            self.names_agree = False  # One part may come by two places.
        noted = [place for place in places if not self.names_agree or _may_call_itself(place)]
        spread(noted, self._add_notes)

    def activations(self) -> ActivationCache:
        """Return what has passed, in that order; warn of what was named and has not."""
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

    def _reason(self, place: Place) -> str:
        try:
            self.hooks.cache[place.site]
        except hl.NotCaptured as error:
            return str(error)
        return f"nothing passed '{place.name}'"


class Notes:
    """The paths at which something has passed, and what was given by calls inside which the same module was called."""

    def __init__(self) -> None:
        self.seen: dict[str, hl.Site] = {}
        self.numbers: dict[str, int] = {}  # Of the call that began last, of those that have ended.
        self.outer: dict[str, hl.Cache] = {}

    def take(self, names: Names, value: Any, call: Any) -> None:
        """Take a note of a call that ends."""
        path = str(path_in(names, call.site))
        self.seen.setdefault(path, call.site)
        number = int(call.number)
        if number < self.numbers.get(path, 0):
            self.outer[path] = _kept(value)
        else:
            self.numbers[path] = number
            self.outer.pop(path, None)


def _may_call_itself(place: Place) -> bool:
    """Whether a module can be called inside its own call; torch's own can't, but for those that hold others."""
    module = place.module
    if module is None or place.site.method or not type(module).__module__.startswith("torch.nn."):
        return True
    return bool(module._modules)


def _kept(value: Any) -> hl.Cache:
    """Return a cache of one value under "", which shows it as it is now, whatever is written into it later."""
    keeper = nn.Identity()
    with hl.capture(keeper, "", detach=False) as cache:
        keeper(value)
    return cache
