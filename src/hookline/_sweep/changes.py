"""The change that a sweep makes at each place: a value, a mean, other rows, another run, a function, or a skip."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hookline import Cache, Hooks, Site, Store
from hookline._kernel import (
    NOTHING,
    Apply,
    Set,
    describe,
    get_part,
    refuse_several_calls,
    short_form,
    split,
    tokens_in,
    write_subscripts,
)
from hookline.errors import EditError, HooklineError, NotCaptured, did_you_mean

MEAN, RESAMPLE = "mean", "resample"  # The words that `patch=` takes.
Action = Callable[[Any, Any, bool], Any]  # Returns what replaces a part of a value: see `Set` and `Apply`.
Run = Callable[[Hooks], object]  # Runs the model under hooks, for the values of that run.


class Change:
    """The change to make at each place, and the requested places."""

    def __init__(
        self, where: Any, patch: Any, edit: Callable[[Any], Any] | None, skip: bool, against: Any = None
    ) -> None:
        if not isinstance(skip, bool):
            raise EditError(f"skip= of a sweep is True or False, not {describe(skip)}; patch= puts a value in")
        if edit is not None and not callable(edit):
            raise EditError(f"edit= takes a function of the value, not {describe(edit)}; patch= puts a value in")
        given = {"patch": patch is not NOTHING, "edit": edit is not None, "skip": skip}
        several = [name for name, is_given in given.items() if is_given]
        if isinstance(where, Mapping) and (several or against is not None):
            raise EditError(
                f"where= has the values to put in; with {(*several, 'against')[0]}=, give its sites alone: list(where)"
            )
        if len(several) > 1:
            raise EditError(f"a sweep makes one change: {' or '.join(f'{name}=' for name in several)}")
        if isinstance(where, Mapping) and not where:
            raise EditError(f"sweep what? This {type(where).__name__} is empty; give {{site: value}}, or sites")
        if isinstance(where, Cache):
            refuse_several_calls(where)
        if isinstance(patch, str) and patch not in (MEAN, RESAMPLE):
            raise EditError(f'patch={patch!r} is not "mean" or "resample"{did_you_mean(patch, (MEAN, RESAMPLE))}')
        if against is not None and (edit is not None or skip or not (patch is NOTHING or isinstance(patch, str))):
            raise EditError(
                'against= says where the values come from that are put in, so it goes alone, or with patch="mean" or '
                '"resample"'
            )
        if isinstance(against, Store) and patch != MEAN:
            raise EditError('the rows of a store are not those of this run; patch="mean" puts in their mean')
        where = list(where) if isinstance(where, Iterator) else where  # It is read several times.
        self.values = where if isinstance(where, Mapping) else None
        self.asked = list(where) if isinstance(where, Mapping) else [where]
        self.patch = 0.0 if patch is NOTHING and against is None else patch
        self.edit = edit
        self.skip = skip
        self.against = against
        self._sources: dict[Site, Any] = {}  # The values to put in, if they come from a run or a store.
        self._holders: dict[Site, Any] = {}  # The tensors of another run, and which part of which is for a site.
        self._parts: dict[Site, tuple[Site, tuple[Any, ...]]] = {}
        self.does_edit = False  # Whether the edit function has returned anything but None.

    @property
    def needs_sources(self) -> bool:
        """Whether the values to put in come from a run or a store."""
        return self.against is not None or isinstance(self.patch, str)

    @property
    def name(self) -> str:
        """The name of the edit function."""
        return getattr(self.edit, "__name__", None) or type(self.edit).__name__

    def find_sources(self, model: nn.Module, sites: list[Site], run: Run) -> None:
        """Get the value that is put in at each of these sites. `run` runs the model on the inputs of `against`."""
        if isinstance(self.against, (Store, Cache)):
            for site in sites:
                self._add_from_mapping(self.against, site)
            return
        hooks = short_form(model)
        whole = {site: _without_subscripts(site) for site in sites}
        acts = hooks.capture(list(dict.fromkeys(whole.values())), keep="all")
        run(hooks)
        several = next((site for site in acts if len(acts.calls(site)) > 1 and "@" not in site), None)
        if several is not None:
            raise EditError(
                f"{several!r} is passed {len(acts.calls(several))} times in a run; name one of them, as in "
                f"'{Site.parse(several)._replace(call=0)}', or each with '#*'"
            )
        for site, held in whole.items():
            self._add_source(site, acts[held])

    def _add_from_mapping(self, held: Mapping[str, Any], site: Site) -> None:
        """Keep the value for a site out of the rows of a store, or of a cache."""
        place = _without_subscripts(site)
        name = next((one for one in (site, place) if str(one) in held), None)
        if name is None:
            raise NotCaptured(f"'{site}' is not in against={describe(held)}{did_you_mean(str(place), held)}")
        if isinstance(held, Store):
            if name not in self._holders:
                self._holders[name] = _mean_of_rows(held[str(name)])
            mean = self._holders[name]
            self._sources[site] = mean if name == site else get_part(mean[None], site.subscripts)
        elif name == site:
            self._sources[site] = self._of_rows(held[str(name)])
        else:
            self._add_source(site, held[str(name)])

    def _add_source(self, site: Site, value: Any) -> None:
        """Keep the value to put in at a site, given the whole value there in another run."""
        if tokens_in(site.subscripts) is not None:  # What was captured is the tokens already.
            self._sources[site] = self._of_rows(value)
            return
        held, rest = split(value, site.subscripts)
        holder = whole_site(site, site.subscripts[: len(site.subscripts) - len(rest)])
        if holder not in self._holders:
            self._holders[holder] = self._of_rows(held)
        self._parts[site] = holder, rest

    def value_for(self, holder: Site) -> Any:
        """Return the number to put in, or the tensor whose parts to put into parts of `holder`; None for others."""
        if self.edit is not None or self.skip or self.values is not None:
            return None
        if self.needs_sources:
            return self._holders.get(holder)
        return self.patch if isinstance(self.patch, (int, float)) else None

    def _of_rows(self, value: Any) -> Any:
        if not isinstance(self.patch, str):
            return value
        if not isinstance(value, Tensor) or value.dim() == 0:
            raise EditError(f'patch="{self.patch}" needs rows, and {describe(value)} passes here')
        if self.patch == MEAN:
            mean = value.mean(0, keepdim=True) if value.is_floating_point() else value.double().mean(0, keepdim=True)
            return mean.to(value.dtype).expand_as(value)
        return value[_shifted(len(value), value.device)]

    def add(self, hooks: Hooks, site: Site, key: Any) -> None:
        """Add the hook that makes the change at one place, which matches `key`."""
        if self.edit is not None:
            hooks.edit(site, self._noted(self.edit))
        elif self.skip:
            hooks.skip(site)
        else:
            hooks.patch({site: self._value(site, key)})

    def action(self, site: Site, key: Any) -> Action:
        """Return what replaces a part of a value there. A skip is no change of a part."""
        return Apply(self._noted(self.edit)) if self.edit is not None else Set(self._value(site, key))

    def _value(self, site: Site, key: Any) -> Any:
        if self.needs_sources:
            if site not in self._sources:
                holder, rest = self._parts[site]
                return get_part(self._holders[holder], rest)
            return self._sources[site]
        return self.patch if self.values is None else self.values[key]

    def _noted(self, edit: Callable[[Any], Any]) -> Callable[[Any], Any]:
        @functools.wraps(edit, updated=())
        def noted(*args: Any) -> Any:
            result = edit(*args)
            self.does_edit = self.does_edit or result is not None
            return result

        return noted

    def refuse_idle(self) -> None:
        """Raise if the edit function returned None at every place."""
        if self.edit is not None and not self.does_edit:
            raise EditError(
                f"{self.name} returned None at every place, which leaves the value as it is; return the new one"
            )

    def __str__(self) -> str:
        if self.edit is not None:
            return f"edited by {self.name}"
        if self.skip:
            return "skipped"
        if isinstance(self.patch, str):
            source = "the rows of the store" if isinstance(self.against, Store) else "the batch"
            source = "the other run" if self.against is not None and not isinstance(self.against, Store) else source
            return f"set to {'the mean' if self.patch == MEAN else 'other rows'} of {source}"
        if self.values is not None or self.against is not None:
            of_run = self.against is not None or isinstance(self.values, Cache)
            return "set to what another run had" if of_run else "set to a value of its own"
        return f"set to {describe(self.patch)}"


def _without_subscripts(site: Site) -> Site:
    """Return the site of the whole value; for tokens, the site itself, since only a run knows which they are."""
    return site if tokens_in(site.subscripts) is not None else site._replace(index="")


def whole_site(site: Site, subscripts: tuple[Any, ...]) -> Site:
    """Return a site with other subscripts."""
    return site._replace(index=write_subscripts(subscripts))


def _shifted(rows: int, device: Any) -> Tensor:
    """Return for each row the number of another one."""
    if rows < 2:
        raise HooklineError('patch="resample" takes the values of other rows, and this batch has one; give more rows')
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(rows, generator=generator)
    return order[(torch.argsort(order) + 1) % rows].to(device)


def _mean_of_rows(rows: Any) -> Tensor:
    """Return the mean of the rows of a store."""
    total, number = torch.zeros((), dtype=torch.float64), 0
    for some in rows.scan():
        total = total + some.double().sum(0)
        number += len(some)
    if not number:
        raise HooklineError("this store has no rows to take the mean of")
    return (total / number).to(rows.dtype)
