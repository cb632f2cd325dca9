"""`Hook`, and `Hooks`: an ordered set of hooks on one model, with one life cycle.

Each method that adds hooks declares its options once: the default in the signature, the meaning in the docstring, the
check right below. The short form `hl.capture` takes its parameters from `Hooks.capture`.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from hookline._cache.budget import Budget, Folder
from hookline._cache.cache import Cache, refuse_several_calls, values_by_call
from hookline._cache.record import Record, spread
from hookline._engine.action import NOTHING, Action, Apply, Set, SetByCall, Skip, Stop
from hookline._engine.capture_action import USUAL_SAVE, CaptureOptions, Save
from hookline._engine.compiled import number_tensor
from hookline._engine.tap import (
    IGNORE,
    RAISE,
    WARN,
    ChangingTap,
    KeepingTap,
    StopTap,
    Tap,
    plain_taps,
    tap_at,
)
from hookline._hooks.calls_and_tokens import calls_at, is_open_ended, refuse_latest, refuse_options_of_tokens
from hookline._hooks.lifecycle import GENERATOR, Lifecycle, OpenBlock, yielding
from hookline._open_blocks import Blocks, open_blocks
from hookline._option_checks import bytes_of, device_here, dtype_of, refuse_flags, refuse_flags_or_none, refuse_texts
from hookline._sites.language import Site, matches_name
from hookline._sites.resolve import Found, Modules, Where, find_modules, find_places
from hookline._sites.tree import refuse_other_model, unwrap
from hookline._tables import Table, Tabular, count
from hookline._torch import frame_at, is_running
from hookline._why_nothing_passed import why_none_returned
from hookline.errors import EditError, HooklineError, SiteError, add_note, did_you_mean, warn
from hookline.parallel.gather import gathering_of
from hookline.parallel.ranks import is_sharded

PLAIN = ("output", "", None, "", None)  # The fields of a site after its path, for a module's output at every call.
PLAIN_GRADIENT = ("grad_output", *PLAIN[1:])
KINDS = ("capture", "patch", "edit", "skip", "stop")


class Hook:
    """One action at one site."""

    __slots__ = ("_lifecycle", "_tap")

    def __init__(self, tap: Tap, lifecycle: Lifecycle) -> None:
        self._tap = tap
        self._lifecycle = lifecycle

    @property
    def site(self) -> Site:
        """The site it acts at."""
        return self._tap.site

    @property
    def action(self) -> Action:
        """The action it performs."""
        return self._tap.action

    @property
    def kind(self) -> str:
        """One of capture, patch, edit, skip, stop."""
        return self._tap.action.kind

    @property
    def name(self) -> str:
        """Its name, or ""."""
        return self._tap.name

    @property
    def active(self) -> bool:
        """Whether it acts here: everywhere, or in a block that is open on this thread."""
        return self._tap.acts(open_blocks.get()) and not self._tap.removed

    @property
    def fired(self) -> bool:
        """Whether a value passed since the hook was attached or entered.

        For a hook at a gradient, this is the value in the forward, not its gradient.
        """
        return self._tap.fired

    def activate(self) -> None:
        """Activate it on all threads."""
        self._lifecycle.activate([self._tap])

    def deactivate(self) -> None:
        """Pause it. A paused hook costs nothing."""
        self._lifecycle.deactivate([self._tap])

    def remove(self) -> None:
        """Remove it from the model for good."""
        self._lifecycle.remove([self._tap])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Hook) and other._tap is self._tap

    def __hash__(self) -> int:
        return id(self._tap)

    def __repr__(self) -> str:
        name = f" {self.name!r}" if self.name else ""
        return f"<{self.kind}{name} at '{self.site}': {self.action!r}, {'active' if self.active else 'inactive'}>"


class Leaving(partial[None]):
    """The bound `__exit__` of one `with` statement, which leaves the block even if Ctrl-C keeps Python from calling it.

    Only the statement holds this object. If Ctrl-C comes just before the call, or just before `__enter__` returns,
    Python frees the object, and its `__del__` leaves the block. A stored traceback holds the `Hooks`, but not this.
    """

    before: Blocks | None = None  # The blocks that were open before the statement.

    def __del__(self) -> None:
        hooks: Hooks = self.args[0]
        if not hooks._open or self.before is None:
            return
        here = open_blocks.get() - self.before
        for block in [block for block in hooks._still_open() if block in here]:
            hooks._lifecycle.leave(block, KeyboardInterrupt, over=hooks._brief)


class Exit:
    """A descriptor that turns a function into `__exit__`: each `with` statement gets a new `Leaving`."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function

    def __get__(self, hooks: Hooks | None, _kind: type | None = None) -> Callable[..., None]:
        if hooks is None:
            return self.function
        leaving = Leaving(self.function, hooks)
        leaving.before = open_blocks.get()
        return leaving


class Hooks(Tabular):
    """An ordered set of hooks on one model.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> hooks = Hooks(model)
    >>> acts = hooks.capture("0", "2")
    >>> _ = hooks.edit("1", lambda value: value * 2, name="double")
    >>> output = model(torch.ones(3, 4))
    >>> acts["2"].equal(output)
    True
    >>> hooks["double"].deactivate()
    >>> hooks.of("capture").remove()
    >>> len(hooks)
    1

    Args:
        active: Whether hooks act as soon as they are added. With False they wait until they are activated or entered.
    """

    _chosen: list[Tap] | None = None  # None: all taps of the lifecycle.
    _parent: Hooks | None = None
    _brief = False  # Whether this is a short form: attached on entering, detached on leaving.

    def __init__(self, model: nn.Module, active: bool = True) -> None:
        refuse_other_model(model)
        if active is not False:
            refuse_flags(active=active)
        self._model = model
        self._active = active
        self._cache = cache = Cache()
        cache._model = weakref.ref(model)
        self._lifecycle = lifecycle = Lifecycle(model, cache._session)
        self._open: dict[OpenBlock, None] = {}
        lifecycle.notice_end_of(self)

    @property
    def model(self) -> nn.Module:
        """The model these hooks are on."""
        return self._model

    @property
    def cache(self) -> Cache:
        """The values that these hooks have captured."""
        return self._cache

    def capture(
        self,
        *where: Where,
        name: str = "",
        keep: str | int = "last",
        detach: bool = True,
        clone: bool | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | str | None = None,
        transform: Callable[..., Any] | None = None,
        with_call: bool = False,
        limit: int | str | None = None,
        spill: bool | str | os.PathLike[str] = False,
        gather: bool = True,
        stop: bool = False,
    ) -> Cache:
        """Capture the values that pass at these places, and return the cache that will hold them.

        Args:
            keep: "last", "all", or how many of the latest calls.
            detach: Detach the value from the graph. False keeps the graph's own tensor, or a copy if it is overwritten.
            clone: None copies on write, True at once, False never. With False, reading an overwritten value raises.
            transform: Keep `transform(value)` instead of the value. If it returns None, nothing of this call is kept.
            with_call: Call `transform(value, call)`; see `edit`.
            limit: How many bytes these captures may keep in memory, as a number or "2 GB". More raises CacheFull.
            spill: A folder to move the oldest values to instead of raising; True for a temporary one.
            gather: Gather values that are sharded over ranks; all ranks must do so. False keeps this rank's part, as a
                DTensor.
            stop: End the forward once all these places have fired.
        """
        if not where:
            raise SiteError('capture what? Give sites, as in capture("h.*.mlp"); hl.sites(model) lists every name')
        if len(where) > 1 and not self._brief:
            _refuse_model(self._model, where[0], "capture")
        is_usual = detach is True and clone is None and device is None and dtype is None and transform is None
        is_usual = is_usual and with_call is False and limit is None and spill is False and keep == "last"
        is_usual = is_usual and gather is True and name == ""
        if is_usual and stop is False and self._capture_plainly(where):
            return self._cache
        if is_usual and stop is True and not is_running():
            return self._capture(where, USUAL_SAVE, 1, "", stop=True)
        if not (detach is True and with_call is False and gather is True and stop is False and type(name) is str):
            refuse_flags(detach=detach, with_call=with_call, gather=gather, stop=stop)
            refuse_texts(name=name)
        if clone is not None:
            refuse_flags_or_none(clone=clone)
        if transform is not None and not callable(transform):
            raise HooklineError(f"transform={transform!r} is not a function of the value")
        if with_call and transform is None:
            raise HooklineError("with_call=True passes the call to transform=, which is missing; give one")
        if device is not None:
            device_here(device)
        dtype = None if dtype is None else dtype_of(dtype)
        options = CaptureOptions(detach, clone, device, dtype, transform, with_call)
        action = Save(options, _budget_of(limit, spill, detach), gathering_of(self._model, gather))
        return self._capture(where, action, _calls_of(keep), name, stop)

    def _capture_plainly(self, where: tuple[Where, ...]) -> bool:
        """Capture whole outputs, or their gradients, without options: the usual case. Return False for all others."""
        found = find_modules(self._model, where) if where and not is_running() else None
        if found is not None:
            self._add_captures(plain_taps(found, USUAL_SAVE, self._lifecycle.session), where)
        return found is not None

    def _capture(self, where: tuple[Where, ...], action: Save, calls: int | None, name: str, stop: bool) -> Cache:
        found = find_modules(self._model, where) if action.is_plain else None
        is_output = found is not None and all([modules.port == "output" for modules in found])
        keeps_latest = calls == 1 and not stop
        if found is not None and (is_output or keeps_latest):
            if stop:
                _refuse_stop(self._model, (), action.options.detach)
            session = self._lifecycle.session
            self._add_captures(
                plain_taps(found, action, session, name, None if keeps_latest else KeepingTap, calls), where
            )
            if stop:
                self._add(plain_taps(found, Stop(), session, name, StopTap))
            return self._cache
        places = find_places(self._model, where)
        refuse_options_of_tokens(places, action, calls)
        if stop:
            _refuse_stop(self._model, [place.site for place in places], action.options.detach)
        self._add_captures([self._capture_at(place, action, calls, name, stop) for place in places], where)
        if stop:
            self._add(self._stops(places, name))
        return self._cache

    def patch(self, values: Mapping[Any, Any], name: str = "", check: bool = True) -> Hooks:
        """Replace the values that pass at these places with given ones: `{site: value}`, or a cache.

        A value goes into every call. If a cache has several calls of a site, each goes into the call of its number.

        Args:
            check: Raise if a value does not fit. With False, any object can replace any other.
        """
        return self._narrow(self._patch(values, name, check))

    def _patch(self, values: Mapping[Any, Any], name: str = "", check: bool = True) -> list[Tap]:
        model = self._model
        _refuse_model(model, values, "patch")
        if type(values) is not dict and not isinstance(values, Mapping):
            raise EditError(f"patch takes a mapping, as in {{'h.0': 0.0}}, or a Cache, not {type(values).__name__}")
        if not values:
            raise EditError(
                f"patch what? This {type(values).__name__} is empty; give values, as in patch({{site: value}})"
            )
        if check is not True or name != "":
            refuse_flags(check=check)
            refuse_texts(name=name)
        gathering = gathering_of(model, True)
        by_call = values_by_call(values) if isinstance(values, Cache) else {}
        made: list[Set | SetByCall] = []
        for where in values:
            if where in by_call:
                made.append(SetByCall(by_call[where], check, gathering))
            else:
                one = values[where]
                if isinstance(one, Cache):
                    raise EditError(
                        f"{where!r} is given a Cache in place of a value; give the cache itself, as in "
                        "patch(model, cache.select(...)), or one of its values, as in {'h.0': cache['h.0']}"
                    )
                made.append(Set(one, check, number_tensor(one, model), gathering))
        if len(made) == 1 and isinstance(made[0], Set):
            return self._add(self._change(where, made[0], name), values)
        places = [find_places(model, [where]) for where in values]
        _refuse_replaced(values, places)
        actions = zip(places, made, strict=True)
        return self._add([tap for found, action in actions for tap in self._make(found, action, name)], values)

    def edit(
        self,
        where: Where,
        function: Callable[..., Any] = NOTHING,
        name: str = "",
        with_call: bool = False,
        check: bool = True,
        clone: bool | None = None,
        gather: bool = True,
    ) -> Hooks:
        """Replace each value that passes with `function(value)`. If that is None, the value stays as it is.

        Args:
            with_call: Call `function(value, call)`. `call` has site, model, module, args, kwargs, number, step, tokens,
                parent, and notes, a dict that all hooks on this call share, including those on its gradients.
            check: Raise if the result differs from the value in structure, shape, dtype or device.
            clone: False passes the model's own tensors to the function, so the model sees its in-place changes.
            gather: Gather values that are sharded over ranks, and shard the result again. False passes this rank's
                part.
        """
        return self._narrow(self._edit(where, function, name, with_call, check, clone, gather))

    def _edit(
        self,
        where: Where,
        function: Callable[..., Any],
        name: str = "",
        with_call: bool = False,
        check: bool = True,
        clone: bool | None = None,
        gather: bool = True,
    ) -> list[Tap]:
        if function is NOTHING:
            raise EditError(
                "edit takes a place and a function of the value, as in edit('h.0', torch.relu); "
                "hl.run takes several: edit={site: function}"
            )
        _refuse_model(self._model, where, "edit", is_place=callable(function))
        if not callable(function):
            raise EditError(f"edit takes a function of the value, not {type(function).__name__}; patch puts values in")
        if not (with_call is False and check is True and clone is None and gather is True and name == ""):
            refuse_flags(with_call=with_call, check=check, gather=gather)
            refuse_texts(name=name)
            refuse_flags_or_none(clone=clone)
        action = Apply(function, with_call, check, clone, gathering_of(self._model, gather))
        return self._add(self._change(where, action, name), [where])

    def skip(self, where: Where, value: Any = NOTHING, name: str = "", check: bool = True) -> Hooks:
        """Don't run these modules. Each returns its first argument, or `value` if there is one.

        Args:
            value: The result. If it is a cache, each module returns the cached value of its own site.
            check: Raise if a layer of torch.nn is known to return something different from the value.
        """
        refuse_flags(check=check)
        refuse_texts(name=name)
        if isinstance(value, (str, Site)):
            _refuse_model(self._model, where, "skip")
        places = find_places(self._model, [where])
        for place in places:
            _refuse_skip(place.site)
        if not isinstance(value, Cache):
            return self._narrow(self._add(self._make(places, Skip(value, check), name), [where]))
        refuse_several_calls(value, *(place.site for place in places))
        given, group = [(place, value[place.site]) for place in places], object()
        # A value that is not a tensor, such as None, is not checked: the module has returned it before.
        actions = [(place, Skip(one, check and isinstance(one, Tensor))) for place, one in given]
        session = self._lifecycle.session
        return self._narrow(
            self._add([tap_at(place, action, session, name, group) for place, action in actions], [where])
        )

    def stop_after(self, *where: Where, name: str = "") -> Hooks:
        """End the forward once all these places have fired. The model's call returns None."""
        refuse_texts(name=name)
        if len(where) > 1:
            _refuse_model(self._model, where[0], "stop_after")
        places = find_places(self._model, where)
        if any(place.site.is_gradient for place in places):
            raise SiteError("a forward can't wait for a gradient, which comes after it")
        return self._narrow(self._add(self._stops(places, name), where))

    def __getitem__(self, name: str) -> Hooks:
        chosen = [tap for tap in self._taps if tap.name == name]
        if not chosen:
            if self._brief:
                self._lifecycle.verb = ""  # This error is enough: don't warn as well.
                raise SiteError("captured values are in the cache: `with hl.capture(...) as acts:`, then acts[site]")
            names = sorted({tap.name for tap in self._taps if tap.name})
            near = did_you_mean(str(name), names) or (f"; there are {', '.join(map(repr, names))}" if names else "")
            if name in self:
                near = f"; hooks.at({name!r}) has the hooks at that place, hooks.cache the captured values"
            raise SiteError(f"no hook here is named {name!r}{near}")
        return self._narrow(chosen)

    def at(self, *where: Where) -> Hooks:
        """Return the hooks at these places. A place without port and subscripts means all hooks at that module."""
        self._lifecycle.verb = ""  # The caller uses these hooks, so don't warn if they are never entered.
        every = [one for given in where for one in (given if isinstance(given, list) else [given])]
        taps = self._taps
        chosen: set[int] = set()
        for one in every or [[]]:  # `find_places` refuses an empty list.
            places, is_output = find_places(self._model, [one]), _names_output(one)
            found = [tap for tap in taps if any(_is_at(tap, place, is_output) for place in places)]
            if not found:
                raise SiteError(f"no hook here is at {', '.join(repr(str(place.site)) for place in places[:3])}")
            chosen.update(map(id, found))
        return self._narrow([tap for tap in taps if id(tap) in chosen])

    def of(self, kind: str) -> Hooks:
        """Return the hooks of one kind: capture, patch, edit, skip or stop."""
        if kind not in KINDS:
            raise SiteError(f"{kind!r} is not a kind of hook{did_you_mean(kind, KINDS) or ': ' + ', '.join(KINDS)}")
        return self._narrow([tap for tap in self._taps if tap.action.kind == kind])

    def activate(self) -> None:
        """Activate these hooks on all threads."""
        self._lifecycle.activate(self._taps)

    def deactivate(self) -> None:
        """Pause these hooks. A paused hook costs nothing."""
        self._lifecycle.deactivate(self._taps)

    def remove(self) -> None:
        """Remove these hooks from the model for good. Captured values stay readable."""
        self._lifecycle.remove(self._taps)

    def when_missing(self, what: str) -> Hooks:
        """Set what happens if nothing passes here: "raise" (default for exact names), "warn" (patterns) or "ignore"."""
        if what not in (RAISE, WARN, IGNORE):
            self._lifecycle.verb = ""  # This error is enough: don't warn that the hooks were never entered.
            raise HooklineError(f'when_missing takes "raise", "warn" or "ignore", not {what!r}')
        if not self._taps:
            raise HooklineError("when_missing applies to existing hooks, and there are none; add them first")
        for tap in self._taps:
            tap.missing = what
        return self

    def activated(self) -> AbstractContextManager[Cache]:
        """Return a context manager that activates these hooks on this thread, then restores their earlier state."""
        return self

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model under these hooks."""
        if args:
            _refuse_call(self._model, args[0])
        with self:
            return self._model(*args, **kwargs)

    def __enter__(self) -> Cache:
        lifecycle, chosen = self._lifecycle, self._chosen
        self._open[lifecycle.enter(list(lifecycle.taps) if chosen is None else self._taps, renew=self._brief)] = None
        opener = frame_at(1)
        if opener.f_code.co_flags & GENERATOR:
            lifecycle.session.generator = yielding(opener)
        return self._cache

    @Exit
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        lifecycle = self._lifecycle
        if (
            error is not None
            and isinstance(error, (TypeError, AttributeError))
            and lifecycle.session.stopped
            and "None" in str(error)
        ):
            add_note(error, why_none_returned(type(lifecycle.module).__name__))
        blocks = list(self._open)
        if len(blocks) != 1 or blocks[0] not in lifecycle.opened:
            blocks = self._still_open()
        if not blocks:
            return
        block = blocks[-1]
        if len(blocks) > 1:
            here = open_blocks.get()
            block = next((one for one in reversed(blocks) if one in here), block)
        lifecycle.leave(block, failed=kind, over=self._brief)
        self._open.pop(block, None)

    def _still_open(self) -> list[OpenBlock]:
        """Return the blocks of `with hooks` that are still open, and forget the others."""
        found = list(self._open)
        for block in found:
            if block not in self._lifecycle.opened:
                self._open.pop(block, None)  # Another thread may have removed it already.
                found = list(self._open)
        return found

    def __iter__(self) -> Iterator[Hook]:
        self._lifecycle.verb = ""  # The caller uses these hooks, so don't warn if they are never entered.
        return (Hook(tap, self._lifecycle) for tap in self._taps)

    def __len__(self) -> int:
        self._lifecycle.verb = ""  # The caller uses these hooks, so don't warn if they are never entered.
        return len(self._taps)

    def __reduce_ex__(self, _protocol: Any) -> tuple[Any, ...]:
        if self._taps:
            here = f"here {len(self)}, on {type(unwrap(self._model)).__name__}"
            warn(f"a copy of a Hooks has none of its hooks ({here}); add them to the copy, as to hl.Hooks(model)")
        return Hooks, (self._model, self._active)

    def __contains__(self, item: Any) -> bool:
        if isinstance(item, Hook):
            return any(tap is item._tap for tap in self._taps)
        if isinstance(item, str) and any(item == tap.name for tap in self._taps):
            return True
        try:
            return len(self.at(item)) > 0
        except SiteError:
            return False

    @property
    def _taps(self) -> list[Tap]:
        chosen = self._chosen
        return list(self._lifecycle.taps) if chosen is None else [tap for tap in chosen if not tap.removed]

    def _table(self) -> Table:
        rows = [
            (hook.name, hook.kind, str(hook.site) or '""', repr(hook.action), "yes" if hook.active else "no")
            for hook in self
        ]
        title = f"{count(len(rows), 'hook')} on {type(unwrap(self._model)).__name__}"
        records = [tap.record for tap in self._taps]
        pictures = (lambda row: spread(records[row])) if any(records) else None
        return Table(("name", "kind", "site", "action", "active"), rows, title, pictures=pictures)

    def _narrow(self, taps: list[Tap]) -> Hooks:
        narrow = object.__new__(Hooks)
        narrow._model, narrow._cache, narrow._lifecycle = self._model, self._cache, self._lifecycle
        narrow._chosen, narrow._parent, narrow._brief = taps, self._parent or self, self._brief
        narrow._open, narrow._active = {}, self._active
        return narrow

    def _make(self, places: list[Found], action: Action, name: str) -> list[Tap]:
        group, session = object(), self._lifecycle.session
        if not action.observes:
            refuse_latest(places)
        plain = ChangingTap if isinstance(action, (Set, Apply)) else StopTap if isinstance(action, Stop) else None
        return [
            tap_at(place, action, session, name, group, plain if place.site[1:] == PLAIN else None) for place in places
        ]

    def _change(self, where: Where, action: Set | Apply, name: str) -> list[Tap]:
        """Make the taps of a change. Whole outputs of modules are the usual case, and the fastest."""
        found = find_modules(self._model, (where,))
        if found is None or any([modules.port != "output" for modules in found]):
            return self._make(find_places(self._model, [where]), action, name)
        taps = plain_taps(found, action, self._lifecycle.session, name, ChangingTap)
        group = object()
        for tap in taps:
            tap.group = group
            if action.gathering is not None:
                tap.is_traceable = not action.gathering.alike
        return taps

    def _stops(self, places: list[Found], name: str) -> list[Tap]:
        taps = self._make(places, Stop(), name)
        for tap in taps:
            if is_open_ended(tap.site):
                raise SiteError(
                    f"'{tap.site}': more of it may always come, so it is unknown where to stop; name the last call or "
                    "token"
                )
            if tap.is_family:
                raise SiteError(
                    f"'{tap.site}': it is unknown which of its functions runs last; name the functions to stop after"
                )
        return taps

    def _capture_at(self, place: Found, action: Save, calls: int | None, name: str, stop: bool) -> Tap:
        session = self._lifecycle.session
        if action.is_plain and place.site[1:] in (PLAIN, PLAIN_GRADIENT):
            modules = Modules([(place.site.path, place.module, place.siblings)], place.exact, place.site.port)
            if calls == 1 and not stop:
                return plain_taps([modules], action, session, name)[0]
            if modules.port == "output":
                return plain_taps([modules], action, session, name, KeepingTap, calls)[0]
        tap = tap_at(place, action, session, name)
        has_calls = place.site.call is not None or place.site.within is not None
        tap.record = Record(place.site, calls_at(tap, calls) if has_calls else calls)
        if tap.star or tap.is_family or tap.is_each:
            tap.record.family = {}
        return tap

    def _add_captures(self, taps: list[Tap], asked: Iterable[Where]) -> Cache:
        if self._lifecycle.taps:
            self._refuse_captured(taps)
        self._lifecycle.add(taps, self._active, self._brief, asked)
        self._cache._asked += [tap.record for tap in taps if tap.record is not None]
        return self._cache

    def _refuse_captured(self, taps: list[Tap]) -> None:
        """Raise if one of these captures is at a site that these hooks capture already."""
        captured = self._lifecycle.captured()
        for tap in taps:
            if tap.site in captured:
                raise SiteError(
                    f"'{tap.site}' is captured by these hooks already; use a second Hooks, or remove that one"
                )

    def _add(self, taps: list[Tap], asked: Iterable[Where] = ()) -> list[Tap]:
        self._lifecycle.add(taps, self._active, self._brief, asked)
        return taps


def _calls_of(keep: str | int) -> int | None:
    """Return how many calls `keep` keeps; None for all."""
    if keep == "last":
        return 1
    if keep == "all":
        return None
    if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
        raise HooklineError(f'keep={keep!r} is not "last", "all" or a number of calls')
    return keep


def _budget_of(limit: Any, spill: Any, detach: bool) -> Budget | None:
    """Return the budget for values in memory; None for no limit."""
    if spill is not False and not (isinstance(spill, (bool, str, os.PathLike)) and spill != ""):
        raise HooklineError(f"spill={spill!r} is not a folder; True is a temporary one")
    if limit is None:
        if spill:
            raise HooklineError("spill= says where to keep values over the limit; give limit= too, in bytes")
        return None
    size = bytes_of(limit)
    if not spill:
        return Budget(size)
    if not detach:
        raise HooklineError("spill= can't move a value of the graph to disk; leave detach=False out")
    if spill is not True and not os.path.isdir(spill):
        raise HooklineError(f"spill={os.fspath(spill)!r} is not a folder; make it first, or use spill=True")
    return Budget(size, Folder(None if spill is True else os.path.abspath(spill)))


def _refuse_model(model: nn.Module, given: Any, verb: str, is_place: bool = False) -> None:
    """Raise if the first argument of a method of `Hooks` is the model: only short forms take it.

    Args:
        is_place: Whether the model is meant as a place, which is allowed.
    """
    if given is model and not is_place:
        raise SiteError(
            f"these hooks know their model; leave it out, as in hooks.{verb}(...). Its output is the place ''"
        )


def _refuse_stop(model: nn.Module, sites: Iterable[Site], detach: bool) -> None:
    """Raise if captures at these sites don't allow the forward to end early."""
    if any(site.is_gradient for site in sites):
        raise SiteError("stop=True ends the forward before any gradient can come; capture gradients without it")
    if not detach and is_sharded(model):
        raise HooklineError(
            "stop=True shards the weights of FSDP again at the stop, and a backward from there would need them; leave "
            "stop=True or detach=False out"
        )


def _refuse_skip(site: Site) -> None:
    """Raise if a site is not a whole module, method or function."""
    if site.port == "param":
        raise SiteError(f"'{site}': a parameter is read, and there is nothing to skip; patch puts a value in its place")
    if site.port != "output" or site.index:
        what = "method" if site.method else "function" if site.function else "module"
        raise SiteError(f"'{site}': a {what} is skipped as a whole; name it without a port or subscripts")


def _refuse_call(model: nn.Module, given: Any) -> None:
    """Raise if the first argument of hooks.run is its model or a method of it: only hl.run takes that."""
    own = [id(model), id(unwrap(model))]
    if id(given) in own:
        raise HooklineError("hooks.run calls the model that the hooks are on; leave it out, as in hooks.run(x)")
    if callable(given) and id(getattr(given, "__self__", None)) in own:
        call = f"model.{getattr(given, '__name__', 'method')}(...)"
        raise HooklineError(f"hooks.run calls the model itself, not a method of it; write `with hooks: {call}`")


def _names_output(where: Any) -> bool:
    """Return True if a place has an explicit ":output"; a place without a port means any port."""
    return ":output" in str(where[-1] if type(where) is tuple else where)


def _is_at(tap: Tap, place: Found, only_output: bool) -> bool:
    """Return True if a hook is at a place. A place without port and subscripts means any hook at that module."""
    if tap.module is not place.module or not {*map(_key, tap.holders)} >= {*map(_key, place.holders)}:
        return False
    site = place.site
    if site == Site(site.path) and not only_output:
        return True
    same = tap.site._replace(path="", member="") == site._replace(path="", member="")
    return same and matches_name(tap.site.member, site.member)


def _key(holder: tuple[nn.Module, str]) -> tuple[int, str]:
    return id(holder[0]), holder[1]


def _refuse_replaced(values: Iterable[Where], places: list[list[Found]]) -> None:
    """Raise if a patch has a value for an exactly named place and a later value replaces it there."""
    exact: dict[tuple[Any, ...], tuple[Where, Site]] = {}
    for where, found in zip(values, places, strict=True):
        for place in found:
            key = (place.module, place.holders, *place.site[1:])  # Not the path: a tied module has several.
            if key in exact:
                first, site = exact[key]
                if site.path != place.site.path:
                    hint = f"; '{site.path}' and '{place.site.path}' are one module: '#n' tells its calls apart"
                else:
                    hint = "" if place.exact else f"; put {_label(where)} first, and {_label(first)} after it"
                raise EditError(
                    f"'{place.site}' is given two values, by {_label(first)} and {_label(where)}, and only the last "
                    f"would be left{hint}"
                )
            if place.exact:
                exact[key] = where, place.site


def _label(where: Where) -> str:
    return repr(str(where)) if isinstance(where, (str, Site)) else getattr(where, "__name__", type(where).__name__)
