"""`Cache`: a mapping from site to captured value."""

from __future__ import annotations

import operator
import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Concatenate, Generic, NoReturn, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from hookline import _why_nothing_passed as why
from hookline._cache.arithmetic import Operation, combined, divide_into, is_number, scaled
from hookline._cache.file import read_cache, write_file
from hookline._cache.record import EMPTY, Record, read_value, spread
from hookline._cache.several_calls import (
    calls_along,
    cat_calls,
    check_paired,
    parts_of,
    passed_at,
    refuse_calls,
    same_columns,
    shared_along,
    stack_calls,
    stack_sites,
    why_not_by_call,
    with_several,
)
from hookline._cache.token_pieces import join_calls
from hookline._open_blocks import Session, no_model
from hookline._option_checks import device_here, refuse_flags, refuse_numbers, short_text
from hookline._plot.plot import Curves, Plottable, PlotValues, note_of, one_call, statistic_of
from hookline._plot.plot_data import is_drawable
from hookline._sites import members
from hookline._sites.language import Site, parse, parse_subscripts
from hookline._sites.tree import Names
from hookline._stats import Stats
from hookline._tables import Table, Tabular, count
from hookline._values.copy_or_share import address, share_tensor, versions
from hookline._values.fit import same_values
from hookline._values.nested import (
    describe,
    leaves,
    map_tensors,
    shape_of,
)
from hookline._values.tokens import tokens_in
from hookline.errors import (
    EditError,
    HooklineError,
    NotCaptured,
    SiteError,
    StaleValue,
    StoreError,
    did_you_mean,
    first_line,
    warn,
)

Key = str | Site | nn.Module
Selected = str | Site | nn.Module | Iterable[Any]
Arguments = ParamSpec("Arguments")
Value = TypeVar("Value")


class _OfClassOnly(Generic[Arguments, Value]):
    """A classmethod that raises when it is called on an instance: a user may expect it to change the instance."""

    def __init__(self, method: Callable[Concatenate[Any, Arguments], Value]) -> None:
        self.method: Any = method  # A classmethod; mypy sees only its function.
        self.__doc__ = method.__doc__

    def __get__(self, instance: object, owner: type) -> Callable[Arguments, Value]:
        bound: Callable[Arguments, Value] = self.method.__get__(None, owner)
        return bound if instance is None else _refuse_load


def _refuse_load(*_: object, **__: object) -> NoReturn:
    raise HooklineError("load makes a new cache, and leaves this one as it is; write acts = hl.Cache.load(path)")


class Cache(Tabular, Plottable, Mapping[str, Any]):
    """The values that passed at each site, in the order in which the sites first fired.

    >>> cache = Cache({"h.0": torch.ones(2, 3), "h.1": torch.zeros(2, 3)})
    >>> cache
    2 sites, 48 bytes
    site  calls  dtype    shape
    ────  ─────  ───────  ──────
    h.0       1  float32  (2, 3)
    h.1       1  float32  (2, 3)
    >>> (cache - cache).stack("h.*").shape
    torch.Size([2, 2, 3])
    """

    __array_ufunc__ = None  # Makes numpy leave `number * cache` to the cache.
    _model: Callable[[], nn.Module | None] = staticmethod(no_model)  # The model whose values it holds, held weakly.
    _along: tuple[str, Sequence[int]] | None = None  # What the calls stand for, such as "step", and their numbers.

    def __init__(self, values: Mapping[Any, Any] | Iterable[tuple[Any, Any]] | None = None) -> None:
        self._asked: list[Record] = []
        self._index: dict[Site, Record] = {}
        self._session = Session()
        self._passed: dict[Site, list[Any]] = {}  # In a cache made from others: see `_passed_at`.
        if values is None:
            return
        if isinstance(values, (str, os.PathLike)):
            raise EditError(f"a Cache is made of {{site: value}}; to read a file, write hl.Cache.load({str(values)!r})")
        if not isinstance(values, Mapping):
            raise EditError(f"a Cache is made of {{site: value}}, not of {describe(values)}")
        if hasattr(values, "as_cache"):
            raise EditError(f"the rows of a Store are on disk; to read them all into memory, write {values.as_cache}")
        keys: dict[Site, Any] = {}
        for key, value in values.items():
            site = key if isinstance(key, Site) else Site.parse(key)
            if site in keys:
                raise SiteError(f"{str(keys[site])!r} and {str(key)!r} are the same site; give one value for it")
            keys[site] = key
            self._keep(site, [value])

    def __getitem__(self, key: Key) -> Any:
        record = self._find(key)
        if not self._is_readable(record):
            raise NotCaptured(self._why_empty(record))
        if self._session.others.take_mixed() and record.keep == 1 < record.count:
            # Two forwards at the same time look like two calls in one forward. Don't warn about these as well.
            record.repeated = False
            warn(
                f"'{record.site}' was captured by several asyncio tasks or threads in one block, and only the latest "
                "value is kept; keep='all' keeps every call, a block in each task keeps them apart"
            )
        if record.read_at != self._session.forwards:
            self._warn_of_old(record)
        return record.latest()

    def _warn_of_old(self, record: Record) -> None:
        """Warn if this value was already read before the latest forward, and that forward did not pass the site."""
        forwards = self._session.forwards
        is_old = -1 < record.read_at < forwards and record.stamp == record.read_stamp and record.keep == 1
        if is_old and not record.is_traced and not record.site.is_gradient:
            warn(why.same_as_before(record.site))
        record.read_at, record.read_stamp = forwards, record.stamp

    def __iter__(self) -> Iterator[str]:
        return (str(record.site) for record in self._fired())

    def __eq__(self, other: object) -> bool:
        """Return True if both hold the same sites and calls, in any order, with the same values: a NaN equals a NaN."""
        if not isinstance(other, Cache):
            return NotImplemented
        try:
            return {*self} == {*other} and all(same_values(self.calls(site), other.calls(site)) for site in self)
        except (RuntimeError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, HooklineError):
                raise
            raise HooklineError(f"these caches can't be compared: {first_line(error)}") from error

    def __reversed__(self) -> Iterator[str]:
        return reversed(list(self))

    def __len__(self) -> int:
        return len(self._fired())

    def __contains__(self, key: Any) -> bool:
        try:
            return self._is_readable(self._find(key))
        except (NotCaptured, SiteError):
            return False

    def calls(self, key: Key) -> list[Any]:
        """Return every value kept of a site, oldest call first; an empty list if the site has not fired."""
        return list(self._find(key).each())

    def select(self, *where: Selected) -> Cache:
        """Return a cache of the sites that match, with further subscripts applied: `cache.select("h.*[:, -1]")`.

        It has all calls of these sites. Without arguments, return all sites.
        """
        if not where:
            return self | {}
        result = self._like()
        for text in self._texts(where):
            pattern = parse(text)
            chosen = [(record, rest) for record in self._fired() if (rest := pattern.beyond(record.site)) is not None]
            if not chosen and pattern.path is not None:
                tied = pattern._replace(index="").at(pattern.path)  # It may be another name of a tied module.
                chosen = [(self._find(tied), parse_subscripts(pattern.index))] if str(tied) in self else []
            if not chosen:
                raise NotCaptured(f"{text!r} matches nothing in this cache{self._near(text, self)}")
            known = [one for one in chosen if tokens_in(one[1]) is None]  # The tokens were named when it was captured.
            for record, rest in known or chosen:
                for index, found in parts_of(record, rest).items():
                    site = record.site._replace(index=record.site.index + index)
                    result._keep_of(self, record, site, found)
        return result

    def _texts(self, where: Iterable[Any]) -> Iterator[str]:
        """Yield the name of each place; a place is text, a site, a module, or a list of these."""
        for one in where:
            if isinstance(one, (str, Site)):
                yield str(one)
            elif isinstance(one, nn.Module):
                yield str(self._find(one).site)
            elif isinstance(one, Iterable) and not isinstance(one, (type, Mapping, Tensor)):
                inside = list(self._texts(one))
                if not inside:
                    raise SiteError(
                        f"{short_text(one)} names no site; give text ('h.*'), or leave it out for all sites"
                    )
                yield from inside
            else:
                named = one.__name__ if isinstance(one, type) else repr(one)
                raise SiteError(
                    f"{named}: a cache knows its sites by name only; give text ('h.*'), a Site, a module, or a list"
                )

    def map(self, function: Callable[[Any], Any]) -> Cache:
        """Return a new cache with `function(value)` in place of each value, for every call."""
        if not callable(function):
            raise TypeError(f"map takes a function of a value, not {function!r:.80}")
        return self._map(lambda value, site: _called(function, value, site))

    def _map(self, function: Callable[[Any, Site], Any]) -> Cache:
        result = self._like()
        for record in self._fired():
            values = (function(value, record.site) for value in record.each())
            result._keep_of(self, record, record.site, dict(enumerate(values)))
        return result

    def to(self, target: torch.device | torch.dtype | str | int) -> Cache:
        """Return a cache of all calls on another device or in another dtype; integers and booleans keep their dtype."""
        if isinstance(target, str):
            target = _device_or_dtype(target)
        if isinstance(target, torch.dtype):
            return self._map(lambda value, _: map_tensors(lambda tensor: _cast(tensor, target), value))
        device = device_here(target, "target")
        return self._map(lambda value, _: map_tensors(lambda tensor: tensor.to(device), value))

    def stack(self, *where: Selected, call: int | None = None, calls: bool = False) -> Tensor:
        """Return the values of the sites that match (default: all) as one tensor (site, ...). Shapes must be equal.

        Sites are sorted by name, so that stacked values and gradients have the same order of layers.

        Args:
            call: Which call to take if a site has several, as an index of `calls()`.
            calls: Take all calls, for a tensor (site, call, ...). The sites must have equally many.
        """
        refuse_flags(calls=calls)
        if calls and call is not None:
            raise HooklineError(f"stack takes one call or all of them: give call={short_text(call)} or calls=True")
        chosen = self.select(*where) if where else self
        if not len(chosen):
            raise NotCaptured("nothing to stack: this cache is empty")
        sites = sorted(chosen, key=_natural)
        if calls:
            return stack_calls({site: chosen._every_call(site) for site in sites})
        if call is None and (several := with_several(chosen._fired())) is not None:
            raise HooklineError(
                f"'{several.site}' has {count(len(several.stamps()), 'call')} here, and stack takes one value of each "
                "site: stack(..., call=-1) takes the latest call, call=0 the first, and calls=True takes them all"
            )
        return stack_sites(
            {site: chosen[site] if call is None else one_call(site, chosen.calls(site), call) for site in sites}
        )

    def cat(self, site: Key, dim: int = 1) -> Tensor:
        """Return all calls of one site, which may have further subscripts, as one tensor: joined along a dimension.

        For values of the shape (batch, tokens, ...), dimension 1 is that of the tokens.
        """
        refuse_numbers(dim=dim)
        is_named = isinstance(site, (str, Site))
        record = next((one for one in self._all() if is_named and str(one.site) == str(site)), None)
        if record is not None and not self._is_readable(record):
            raise NotCaptured(self._why_empty(record))
        chosen = self if record is not None else self.select(site)
        name = str(site) if record is not None else next(iter(chosen))
        if record is None and len(chosen) > 1:
            raise SiteError(f"cat joins the calls of one site, and {str(site)!r} is {', '.join(map(repr, chosen))}")
        return cat_calls(name, chosen._every_call(name), dim)

    def tokens(self, key: Key, dim: int = 1, sequence: int = -1) -> Tensor:
        """Return the values of a site in a whole sequence as one tensor (batch, tokens, ...), with each token once.

        The site is captured with `keep="all"`. The tokens are lined up with the ids that `generate` returns, padding
        included; the last new token is never given to the model, so it is not there.

        Args:
            dim: The dimension of the value that counts tokens.
            sequence: Which sequence, if the model was given several: an index, from the first one kept.
        """
        refuse_numbers(dim=dim, sequence=sequence)
        record = self._find(key)
        if not self._is_readable(record):
            raise NotCaptured(self._why_empty(record))
        passed = self._passed_at(record)
        if not passed:
            it = "it" if record.site.call is None else f"'{record.site._replace(call=None)}'"
            raise HooklineError(
                f"'{record.site}' has no calls here that could be put together; capture {it} with keep='all', and read "
                "tokens before the cache is saved or pickled"
            )
        return join_calls(list(record.each()), passed, record.site, dim, sequence)

    def _passed_at(self, record: Record) -> list[Any]:
        """Return for each call of a site the tokens that passed in its forward, a `Passing` or None; [] if unknown."""
        found = self._passed.get(record.site)
        return passed_at(record.stamps(), list(self._session.passed or ())) if found is None else found

    def stats(self) -> Stats:
        """Return mean, std, min, max, norm and the shares of zeros, NaN and Inf of each site, as a table.

        All calls kept are included.
        """
        return Stats((str(record.site), self._tensors(record)) for record in self._fired())

    def _tensors(self, record: Record) -> Iterable[Tensor]:
        """Return the tensors of all calls of a site. Several calls are read one at a time, as they may be on disk."""
        if len(record.stamps()) == 1:
            return _countable(self[record.site])
        return (tensor for value in record.each() for tensor in _countable(value))

    def _to_draw(self, where: Sequence[str | Site], call: int | None, sample: int | None) -> PlotValues:
        chosen = self.select(*where) if where else self
        values = {site: chosen[site] if call is None else one_call(site, chosen.calls(site), call) for site in chosen}
        calls = max((record.count for record in chosen._fired()), default=1)
        return PlotValues(values, sample, note_of(call, calls))

    def _over_calls(self, where: Sequence[str | Site], statistic: str | None) -> Curves | None:
        chosen = self.select(*where) if where else self
        records = [record for record in chosen._fired() if statistic is None or is_drawable(record.peek())]
        if statistic is None and not all(len(record.stamps()) > 1 and _is_real(record.peek()) for record in records):
            return None
        if not records or all(len(record.stamps()) < 2 for record in records):
            return None
        values = {
            str(one.site): [statistic_of(str(one.site), each, statistic) for each in one.each()] for one in records
        }
        several = [along_calls(chosen, one.site) for one in records if len(one.stamps()) > 1]
        return Curves(values, *shared_along(several))  # An encoder runs once: its value stands at step 0.

    def clear(self) -> None:
        """Forget every value. The hooks that fill this cache stay active."""
        self._session.began, self._session.failed = self._session.forwards, 0
        if isinstance(self._session.passed, deque):
            self._session.passed.clear()
        for record in self._records.values():
            record.clear()

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write every call of every site to one safetensors file. It is written completely or not at all."""
        refuse_flags(overwrite=overwrite)
        found = self._fired()
        gaps = [str(record.site) for record in found if self._has_gaps(record)]
        write_file(path, {str(record.site): record.stored() for record in found}, gaps, overwrite=overwrite)

    @_OfClassOnly
    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Cache:
        """Read a cache that `save` wrote. Nothing is unpickled; a damaged or foreign file raises StoreError."""
        cache, name = cls(), repr(os.fspath(path))
        entries, gaps = read_cache(path)
        for text, values in entries.items():
            try:
                if values:
                    cache._keep(Site.parse(text), values, text in gaps)
            except SiteError as error:
                raise StoreError(f"{name} is damaged: it has a site that can't be read ({first_line(error)})") from None
        if len(cache._asked) != len(cache._records):
            raise StoreError(f"{name} is damaged: it has two spellings of one site")
        return cache

    def with_gradients(self) -> tuple[Cache, Cache]:
        """Return values and their gradients as two caches with the same sites: `values * gradients` is an attribution.

        They hold all calls of the sites whose value and gradient were both captured. The gradient "h.0:grad_output" is
        named "h.0".
        """
        gradients = {
            record.site._replace(port=record.site.port.removeprefix("grad_")): record
            for record in self._all()
            if record.site.is_gradient
        }
        found, theirs = self._like(), self._like()
        for record in self._fired():
            gradient = gradients.get(record.site)
            if gradient is None:
                continue
            if not self._is_readable(gradient):
                raise NotCaptured(self._why_empty(gradient))
            check_paired(record, gradient)
            found._keep_of(self, record, record.site, dict(enumerate(record.unread())))
            theirs._keep_of(self, gradient, record.site, dict(enumerate(gradient.unread())))
        if not len(found):
            raise NotCaptured(
                "no value here has its gradient beside it; capture both, as in capture(model, 'h.*', 'h.*:grad_output')"
            )
        return found, theirs

    def __add__(self, other: Mapping[str, Any]) -> Cache:
        return self._combine(other, operator.add)

    def __radd__(self, other: Any) -> Cache:
        """Add to a mapping, or to the 0 that sum() starts with."""
        return self | {} if is_number(other) and other == 0 else self._combine(other, operator.add)

    def __sub__(self, other: Mapping[str, Any]) -> Cache:
        return self._combine(other, operator.sub)

    def __mul__(self, other: Any) -> Cache:
        return self._computed_with(other, operator.mul)

    __rmul__ = __mul__

    def __neg__(self) -> Cache:
        return self * -1

    def __truediv__(self, other: Any) -> Cache:
        return self._computed_with(other, operator.truediv)

    def __rtruediv__(self, other: Any) -> Cache:
        return self._computed_with(other, divide_into)

    def __or__(self, other: Any) -> Cache:
        """Return the sites of both caches. If both have a site, the right side wins, as with dicts."""
        if not isinstance(other, Mapping):
            return NotImplemented
        return self._merged(self, other)

    def __ror__(self, other: Any) -> Cache:
        if not isinstance(other, Mapping):
            return NotImplemented
        return self._merged(other, self)

    def _merged(self, *sides: Mapping[Any, Any]) -> Cache:
        caches = [side if isinstance(side, Cache) else Cache(side) for side in sides]
        found = {record.site: (record, cache) for cache in caches for record in cache._fired()}
        result = self._like()
        for site, (record, cache) in found.items():
            result._keep_of(cache, record, site, dict(enumerate(record.unread())), stamped=False)
        return result

    @property
    def _records(self) -> dict[Site, Record]:
        """The records by site. Built on first access: a cache that is never read should not pay for it."""
        if len(self._index) < len(self._asked):
            self._index = {record.site: record for record in self._asked}
            self._asked = list(self._index.values())  # A site that was captured again counts once.
        return self._index

    def _like(self) -> Cache:
        """Return an empty cache that knows the same names."""
        result = Cache()
        result._model, result._along = self._model, self._along
        return result

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_model"} | {"_passed": {}}

    @property
    def _names(self) -> Names | None:
        """The names of the model, unless it is gone, or unknown as in a cache from a file."""
        model = self._model()
        return None if model is None else Names(model)

    def _keep(self, site: Site, values: list[Any], has_gaps: bool = False, stamps: Sequence[Any] = ()) -> Record:
        record = Record(site, 1 if len(values) == 1 else None)
        record.has_gaps = has_gaps
        for stamp, value in zip(stamps or range(len(values)), values, strict=True):
            record.put(value, stamp, 0)
        self._asked.append(record)
        return record

    def _keep_of(
        self, source: Cache, record: Record, site: Site, values: Mapping[int, Any], stamped: bool = True
    ) -> None:
        """Keep values that were made of the calls of a record in another cache, and what is known of these calls.

        Args:
            values: By the number of the call, among those kept.
            stamped: Whether the calls keep the times at which they began: all records of a cache follow one clock.
        """
        stamps, passed = record.stamps(), source._passed_at(record)
        has_gaps = source._has_gaps(record) or [*values] != [*range(len(values))]
        made = self._keep(site, [*values.values()], has_gaps, [stamps[number] for number in values] if stamped else ())
        made.count += record.count - len(stamps)
        if passed:
            self._passed[site] = [passed[number] for number in values]

    def _all(self) -> Iterator[Record]:
        for record in self._records.values():
            if record.family is None:
                yield record
            else:
                yield from record.family.values()

    def _fired(self) -> list[Record]:
        found = {record.site: record for record in self._all() if self._is_readable(record)}
        return sorted(found.values(), key=lambda record: record.order)

    def _has_gaps(self, record: Record) -> bool:
        """Return True if calls of a site are missing, so that it is unknown which call each value belongs to."""
        if record.has_gaps or self._records.get(record.site) is record:
            return record.has_gaps or record.keep == 1 < record.count
        family = next((one.family for one in self._records.values() if one.family and record.site in one.family), None)
        if family is None:
            return False
        calls = next(iter(family.values())).stamps()  # The first part of a `[*]` is in every call, the last may not be.
        return record.stamps() != calls[: len(record.stamps())]

    def _every_call(self, site: str) -> list[Any]:
        """Return the values of a site; raise if only the latest call was kept of several."""
        calls = self.calls(site)
        if len(calls) == 1 and self._has_gaps(self._find(site)):
            raise HooklineError(f"'{site}' has one call here, and others were not kept; capture it with keep='all'")
        return calls

    def _find(self, key: Key) -> Record:
        """Find a record by the text of its site in any spelling, by a Site, or by a module."""
        if isinstance(key, nn.Module):
            wanted = [Site(name) for name in names.of(key)] if (names := self._names) is not None else []
        elif isinstance(key, Site):
            wanted = [key]
        elif isinstance(key, str):
            wanted = [Site(key)]  # Text that equals a module's name means that module.
            if wanted[0] not in self._records and (pattern := parse(key)).path is not None:
                wanted.append(pattern.at(pattern.path))
        else:
            raise NotCaptured(f"a cache is read by site, not by {type(key).__name__}")
        for site in wanted:
            record = self._records.get(site)
            if record is not None and record.family is None:
                return record
        records = {record.site: record for record in self._all()}
        for site in wanted:
            if site in records:
                return records[site]
            numbered = [record for one, record in records.items() if site.function and one._replace(call=None) == site]
            if len(numbered) > 1:
                first = ", ".join(f"'{record.site}'" for record in numbered[:3])
                more = " …" if len(numbered) > 3 else ""
                raise NotCaptured(f"'{site}' stands for {len(numbered)} calls: read {first}{more}")
            if numbered:
                return numbered[0]
        tied = next(
            (record for site in wanted for record in records.values() if self._is_tied(record.site, site)), None
        )
        if tied is None:
            raise NotCaptured(self._why_unknown(key))
        return tied

    def _is_readable(self, record: Record) -> bool:
        return not (record.value is EMPTY or record.reason or self._session.forked or self._was_missed(record))

    def _was_missed(self, record: Record) -> bool:
        """Return True if the value is older than the latest forward, which failed before it reached this site."""
        session = self._session
        if session.was_full and record.keep != 1:
            return False  # Several calls were requested, and those that fitted are valid.
        return 0 < session.broke == session.forwards != record.seen and not record.site.is_gradient

    def _is_tied(self, one: Site, other: Site) -> bool:
        """Return True if two sites are the same place under two names of one module."""
        names = self._names
        if names is None or one._replace(path="") != other._replace(path=""):
            return False
        module = names.find(one.path)
        if module is None:
            held, others = (members.locate(names, site.path) for site in (one, other))
            return held is not None and others is not None and {*held.holders} == {*others.holders}
        return module is names.find(other.path)

    def _why_unknown(self, key: Key) -> str:
        name = f"{type(key).__name__}" if isinstance(key, nn.Module) else repr(str(key))
        path = parse(key).path if isinstance(key, str) else key.path if isinstance(key, Site) else None
        for site, record in self._records.items():
            if record.family == {} and site.path == path:
                return why.why_unmet(name, site, record.reason)
            if record.family is not None and str(site) == str(key):
                first, each = next(iter(record.family.values())).site, "call" if "#*" in str(site) else "index"
                return f"{name} is one site for each {each}: read '{first}' and so on, or select('{site}')"
        if isinstance(key, str) and any(parse(key).beyond(record.site) is not None for record in self._fired()):
            return f"{name} is not one site that was captured; select({key!r}) takes patterns, and parts of values"
        return f"{name} was not captured{'' if isinstance(key, nn.Module) else self._near(str(key), self._records)}"

    def _near(self, text: str, known: Iterable[Any]) -> str:
        """Return what a text may have meant that names nothing in this cache; "" if that is unknown."""
        pattern = parse(text)
        whole = None if pattern.path is None else pattern._replace(call=None).at(pattern.path)
        if pattern.call is not None and whole in self._records:
            return f"; the calls kept of '{whole}' are in the list cache.calls('{whole}')"
        return did_you_mean(text, map(str, known))

    def _why_empty(self, record: Record) -> str:
        lifecycle = self._session.lifecycle()
        is_inactive = lifecycle is not None and lifecycle.is_inactive(record)
        return why.why_empty(record.site, self._session, record.reason, record.value is not EMPTY, is_inactive)

    def _combine(self, other: Mapping[str, Any], operation: Operation) -> Cache:
        if not isinstance(other, Mapping):
            return NotImplemented
        differ = sorted(set(self) ^ set(other))
        if differ:
            has_gradients = any(Site.parse(name).is_gradient for name in differ)
            hint = "; values, gradients = acts.with_gradients() gives both the same sites" if has_gradients else ""
            raise HooklineError(
                f"the two caches don't hold the same sites; only one has {', '.join(map(repr, differ[:5]))}{hint}"
            )
        result = self._like()
        for site in self:
            record, ours = self._find(site), self.calls(site)
            theirs = other.calls(site) if isinstance(other, Cache) else [other[site]]
            if len(ours) != len(theirs):
                raise HooklineError(f"'{site}' has {len(ours)} calls in one cache and {len(theirs)} in the other")
            pairs = zip(ours, theirs, strict=True)
            values = (combined(operation, one, other_one, site) for one, other_one in pairs)
            result._keep_of(self, record, record.site, dict(enumerate(values)))
            if isinstance(other, Cache):
                made, others = result._asked[-1], other._find(site)
                made.has_gaps = made.has_gaps or other._has_gaps(others)
                if not same_columns(self._passed_at(record), other._passed_at(others)):
                    result._passed.pop(record.site, None)
        return result

    def _computed_with(self, other: Any, operation: Operation) -> Cache:
        if is_number(other) or (isinstance(other, Tensor) and other.dim() == 0 and other.dtype is not torch.bool):
            return self._map(lambda value, site: scaled(operation, value, other, str(site)))
        return self._combine(other, operation)

    def _table(self) -> Table:
        rows: list[tuple[object, ...]] = []
        found = self._fired()
        for record in found:
            value = record.peek()
            tensors = leaves(value)
            shapes = ", ".join(map(shape_of, tensors[:4])) + (", …" if len(tensors) > 4 else "")
            dtypes = ", ".join(dict.fromkeys(str(tensor.dtype).removeprefix("torch.") for tensor in tensors))
            rows.append((str(record.site) or '""', record.count or "?", dtypes or describe(value), shapes))
        header = ("site", "calls", "dtype", "shape")
        return Table(header, rows, self._title(), pictures=lambda row: spread(found[row]))

    def _title(self) -> str:
        tensors = [tensor for record in self._fired() for tensor in leaves(record.peek_all())]
        on_disk = sum(tensor.nbytes for tensor in tensors if hasattr(tensor, "is_on_disk"))
        sizes = {address(tensor): _size(tensor) for tensor in tensors if not hasattr(tensor, "is_on_disk")}
        found = f"{count(len(self), 'site')}, {count(sum(sizes.values()), 'byte')}"
        return f"{found}, {count(on_disk, 'byte')} on disk" if on_disk else found


def _natural(site: str) -> list[tuple[int, int | str]]:
    """Return a sort key that puts "h.2" before "h.10"."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", site) if part]


def _size(tensor: Tensor) -> int:
    """Return the bytes that a tensor holds: its whole storage, even if it is a view of a part."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta or address(tensor) == 0:
        return tensor.numel() * tensor.element_size()
    return tensor.untyped_storage().nbytes()


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() or tensor.is_complex() else tensor


def _called(function: Callable[[Any], Any], value: Any, site: Site) -> Any:
    """Call a user's function on a copy of a value: it may write to its argument."""
    try:
        lent = map_tensors(_lend, value)
    except HooklineError:  # The value can't be copied.
        lent = value
    before = versions(value)
    result = function(lent)
    if versions(value) != before:
        raise EditError(
            f"'{site}': the function wrote into this cache's own value, which is part of the graph (detach=False) or "
            "can't be copied; let it return a new one"
        )
    return result


def _lend(tensor: Tensor) -> Tensor:
    """Copy a tensor, on write if possible; return a tensor in the graph as it is.

    A loss that was computed from the tensor does not depend on a copy, so the copy would get no gradient.
    """
    return tensor if tensor.requires_grad else share_tensor(tensor)


def _countable(value: Any) -> list[Tensor]:
    """Return the tensors of a value; a number counts as a tensor."""
    if not isinstance(value, (int, float, complex)):
        return leaves(value)
    try:
        return [torch.tensor(value)]
    except (OverflowError, RuntimeError, ValueError):  # The integer has too many bits for torch.
        return []


def _device_or_dtype(name: str) -> torch.device | torch.dtype:
    """Return the device or dtype that a text names, such as "cuda:1" or "float16"."""
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if isinstance(dtype, torch.dtype):
        return dtype
    try:
        return torch.device(name)
    except RuntimeError:
        raise HooklineError(f"{name!r} is neither a device nor a dtype of torch's") from None


def _is_real(value: Any) -> bool:
    """Return True if a value is a single real number."""
    return isinstance(value, (int, float)) or (
        isinstance(value, Tensor) and value.dim() == 0 and not value.is_complex() and not value.is_meta
    )


def refuse_several_calls(cache: Cache, *keys: Key) -> None:
    """Raise if one of these sites (default: all) has several calls: a skip or a sweep uses one value in every call."""
    record = with_several(map(cache._find, keys) if keys else cache._fired())
    if record is not None:
        refuse_calls(record, "and a skip or a sweep puts one value into every call")


def values_by_call(cache: Cache) -> dict[str, list[Any]]:
    """Return the values of each site with several calls, to be put in call by call; raise where that is not possible.

    They are checked and loaded by `read_value`.
    """
    found = [record for record in cache._fired() if len(record.stamps()) > 1]
    for record in found:
        if reason := why_not_by_call(record, cache._has_gaps(record)):
            refuse_calls(record, reason)
    return {str(record.site): record.unread() for record in found}


def cache_of_calls(values: Mapping[Site, list[Any]], along: str, numbers: Sequence[int]) -> Cache:
    """Return a cache with several calls of each site. Plots draw them over these numbers, labelled `along` ("step")."""
    cache = Cache()
    cache._along = along, numbers
    for site, calls in values.items():
        if calls:
            cache._keep(site, calls)
    return cache


def sites_without_values(cache: Cache) -> list[Site]:
    """Return the sites to capture where nothing passed, though the model ran."""
    if not cache._session.any_forward:
        return []
    fired = {record.site for record in cache._fired()}
    return [site for site, record in cache._records.items() if record.family is None and site not in fired]


def along_calls(cache: Cache, site: Site) -> tuple[str, Sequence[int]]:
    """Return what the calls kept of a site are, such as "step", and the number of each."""
    record = cache._find(site)
    return cache._along or calls_along(record, cache._passed_at(record), cache._has_gaps(record))


def latest_value(cache: Cache, site: Site) -> tuple[Any, int]:
    """Return the latest value of a site and the number of calls. If it was overwritten, return the error as value.

    Unlike `cache[site]`, it does not warn that there were several calls.
    """
    record = cache._find(site)
    try:
        return read_value(record._held()[-1], site), record.count
    except StaleValue as error:
        return error, record.count
