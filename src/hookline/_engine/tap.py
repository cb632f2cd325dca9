"""A tap: one action at one site, and when it acts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from types import MethodType
from typing import Any, NoReturn, Protocol

from torch import Tensor, nn

from hookline import _why_nothing_passed as why
from hookline._cache.record import EMPTY, GradientRecord, Record
from hookline._engine.action import Action, Apply, Call, KeepingAction, Set
from hookline._engine.capture_action import Save
from hookline._engine.passing import Passing
from hookline._open_blocks import RESTING, Blocks, Rest, Session, acting
from hookline._sites.calls import Calls, Wanted, is_wanted
from hookline._sites.language import (
    Alternatives,
    Site,
    SiteOnDemand,
    alternatives_of,
    is_pattern,
    match_name,
    write_subscripts,
)
from hookline._sites.members import Holders
from hookline._sites.resolve import Found, Modules
from hookline._sites.tree import Children
from hookline._torch import cell_content
from hookline._values import copy_or_share
from hookline._values.nested import STAR, expand, leaves
from hookline._values.tokens import Tokens, tokens_in
from hookline.errors import HooklineError, warn


class Placement(Protocol):
    """What a tap is attached to: a `Shadow` of a method, or the `Reads` of a module's parameters."""

    method: Any  # The callable that shadows the module's method.


class Sequences:
    """What is known about token sequences from the calls that one hook has seen."""

    length = 0  # Tokens in the latest forward of the model.
    generates = False  # Whether a forward with one token followed one with several.
    is_second = False  # Whether a forward with several tokens followed that.

    def number(self, number: int) -> int:
        """Return the number of the call. Once a second sequence has begun it is a `_Number`, which refuses < and >."""
        length = _tokens()
        self.is_second = self.is_second or (self.generates and length > 1)
        self.generates = self.generates or length == 1 < self.length
        self.length = length
        return _Number(number) if self.is_second else number


class _Number(int):
    """The number of a call in a second sequence."""

    def _refuse(self, other: object = 0) -> NoReturn:  # `if call.number:` compares it with 0.
        raise HooklineError(
            f"call.number {int(self)} can't be compared with {other!r} by a range: it counts all calls in this block, "
            "and the model has begun a second sequence in it; call.step counts from 0 in each, and '[:, @new]' names "
            "the new tokens"
        )

    __lt__ = __le__ = __gt__ = __ge__ = __bool__ = _refuse


def _tokens() -> int:
    """Return how many tokens the running forward of the model was given, 0 if that is unknown."""
    run = copy_or_share.current_forward.get()
    if run is None:
        return 0
    args, kwargs = run.given
    # Floats are tokens only if a cache is passed: the second dimension of other data may be the batch, or channels.
    has_cache = any(["past" in name or "cache" in name for name in kwargs])
    for value in (kwargs.get("input_ids"), *args, *kwargs.values()):
        if isinstance(value, Tensor) and value.dim() > 1 and (has_cache or not value.is_floating_point()):
            return value.size(1)
    return 0


NO_BLOCKS: Blocks = frozenset()
RAISE, WARN, IGNORE = "raise", "warn", "ignore"
TOGETHER = "together"  # Raise if nothing passes at any site of a pattern; else warn about the sites without a value.


class Tap:
    """One action at one site. It acts everywhere while `active`, and in the blocks that hold it.

    Defaults are class attributes, so that making a tap is fast: each hooked module needs one.
    """

    __slots__ = (
        "__dict__", "__weakref__", "action", "active", "acts_in", "blocks", "fired", "missing", "module", "order",
        "path", "record", "session", "shadow", "siblings",
    )  # fmt: skip

    module: nn.Module
    action: Action
    session: Session
    path: str  # The path of its module.
    record: Record | None
    siblings: Children | None  # Where its module was found, to notice if it is replaced.
    active: bool
    blocks: Blocks
    acts_in: Blocks | None  # The set of open blocks in which it is known to act: see `hot_path`.
    shadow: Placement | MethodType | None  # What it is attached to; on the hot path, the bound method on the module.
    order: int  # Taps of one module act in this order.
    fired: bool
    missing: str  # What happens when nothing passes here.
    site = SiteOnDemand()
    port = "output"  # The port of the taps that `plain_taps` makes.
    is_hot = False  # Whether it is a `HotTap`.
    is_traceable = False  # Whether dynamo can trace it on its hot path, if it can trace its action.
    beside: Tap | None = None  # The tap that shares its hot shadow: see `hot_gradient_path` and `keeping_path`.
    exact = False
    name = ""
    holders: Holders = ()  # For a parameter: all modules that hold it.
    method = "forward"  # The method of its module that is shadowed.
    function = ""  # The name of a function, or a pattern of names.
    names: Alternatives = ()  # The alternatives of that pattern.
    subscripts: tuple[Any, ...] = ()
    star = False  # Whether a `[*]` is among its subscripts.
    tokens: Tokens | None = None  # The tokens that its subscripts name.
    is_each = False  # Whether each call is a site of its own.
    rows_left: set[tuple[int, int]] | None = None  # Tokens that were named for each row and have not passed.
    is_inside = False  # Whether it is at a function that runs inside the forward of its module.
    is_family = False  # Whether it is at a pattern of functions, each of which has its own site.
    removed = False
    count = 0  # Calls of the module since the hooks were attached or entered.
    sequences: Sequences | None = None  # What is known about sequences, if its function gets the call.
    group: object = None  # Shared by the taps of one pattern that changes something.
    reached = False  # For an edit of a gradient: whether a gradient came since the hooks were attached or entered.
    skipped_in = -1  # For a skip: the forward of the model in which it last acted.
    has_warned = False  # Whether it warned about a gradient that can't come, or a part that is not there.
    problem = ""  # Why it could not act on a value, the last time that this happened.
    hint = ""  # The likely reason for the problem, and what to write instead.
    misses = 0  # How often its subscripts selected nothing, since the hooks were attached or entered.
    helpers: list[Tap] | None = None  # The taps at other places that it needs: see functions.py.
    # Makes the function that shadows the forward if this is the module's only tap: see shadowed_forward.py. None if
    # there is no such function.
    make_shadow: Callable[..., Any] | None = None
    # Attaches taps for a while, for a recomputation in which they are detached. Set in attach.py, which imports this.
    attach_for_now: Callable[[list[Tap]], AbstractContextManager[None]]
    counts: dict[str, int] | None = None  # How often each operation on its parameter ran, in this forward.
    counted = -1  # The forward that `counts` belongs to.
    ran: dict[str, None] | None = None  # The functions that ran before it first acted.
    often = 0  # The most times that its function ran in one call of the module or one forward of the model.

    def __init__(self, site: Site, module: nn.Module, action: Action, session: Session, exact: bool, name: str) -> None:
        self.site = site
        self.path = site.path
        self.module = module
        self.action = action
        self.session = session
        self.record = self.siblings = self.acts_in = self.shadow = None
        self.active = self.fired = False
        self.blocks = NO_BLOCKS
        self.order = 0
        self.exact = exact
        self.missing = RAISE if exact else WARN if action.observes else TOGETHER
        self.name = name
        if site.member:
            self.function = site.function
            self.method = site.method or "forward"
            self.is_inside = self.function != ""
            self.is_family = is_pattern(self.function)
            self.names = alternatives_of(self.function) if self.is_family else ()
        if site.index:
            self.subscripts = site.subscripts
            self.star = "*" in site.index and any(
                STAR in (one if isinstance(one, tuple) else (one,)) for one in self.subscripts
            )
            self.tokens = tokens_in(self.subscripts) if "@" in site.index else None
        if site.call is not None:
            self.is_each = isinstance(site.call, Calls) and site.call.is_each

    def hold(self, holders: Holders) -> None:
        """Put the tap at a parameter, not at a module."""
        self.holders = holders
        self.is_inside = False
        self.path = self.site.path.rpartition(".")[0]

    @property
    def is_gradient(self) -> bool:
        """Whether it follows gradients."""
        return self.site.is_gradient

    @property
    def is_covered(self) -> bool:
        """Whether a wrapper has replaced its shadow on the module. The wrapper may call the shadow."""
        shadow = self.shadow
        if shadow is None or self.holders:
            return False
        own = shadow if isinstance(shadow, MethodType) else shadow.method
        return self.module.__dict__.get(self.method) is not own

    @property
    def seen(self) -> tuple[int, int]:
        """How often a value has passed here, to compare with an earlier time."""
        return self.count, 0 if self.record is None else self.record.count

    def acts(self, opened: Blocks) -> bool:
        """Return True if this tap acts where these blocks are open."""
        if RESTING in opened:
            acts = acting(self.blocks, self.active, self.module, opened)
            would = self.active or not self.blocks.isdisjoint(opened)
            if would and not acts and all(rest.is_of_user for rest in opened if isinstance(rest, Rest)):
                self.session.rested = True
            return acts
        return self.active or not self.blocks.isdisjoint(opened)

    def pass_by(self, opened: Blocks) -> None:
        """Note a call on which the tap does not act, if its blocks are open on another thread or task."""
        model = self.session.model()
        if model is not None and self.blocks and self.blocks.isdisjoint(opened):
            self.session.others.note(model, opened)

    def wants(self, name: str) -> bool:
        """Return True if the tap is at a function of this name."""
        return match_name(name, self.names) if self.is_family else name == self.function

    @property
    def purpose(self) -> tuple[Any, ...]:
        """Where it acts and what it does there. Two functions that the same code has defined do the same."""
        function = self.action.function
        code = getattr(function, "__code__", None)
        if code is None:  # For a callable object there is no code to compare.
            return self.site, self.action.kind, repr(self.action) if function is None else id(function)
        cells = getattr(function, "__closure__", None) or ()
        defaults = getattr(function, "__defaults__", None) or ()
        named = getattr(function, "__kwdefaults__", None) or {}
        held = *(id(cell_content(cell)) for cell in cells), *map(id, defaults), *map(id, named.values())
        owner = getattr(function, "__self__", None)
        return self.site, self.action.kind, code.co_code, code.co_consts, code.co_names, held, id(owner)

    @property
    def wanted_call(self) -> Wanted:
        """The calls of its module, method or parameter that it acts on; None for all."""
        return self.site.within if self.is_inside else self.site.call

    def next_call(self) -> tuple[int, bool]:
        """Count a call of its module, method or parameter: return the number, and whether it acts on this one."""
        number = self.count
        self.count = number + 1
        return number, is_wanted(self.wanted_call, number)

    def next_operation(self, name: str) -> tuple[int, bool]:
        """Count an operation on its parameter, within one forward of the model: see `next_call`."""
        if self.counts is None or self.counted != self.session.forwards:
            self.counts = {}
            self.counted = self.session.forwards
        number = self.counts.get(name, 0)
        self.counts[name] = number + 1
        self.count += 1
        self.often = max(self.often, number + 1)
        return number, is_wanted(self.site.call, number)

    @property
    def changes(self) -> bool:
        """Whether it may change a value or follows a gradient, and so has to act again when a forward is recomputed."""
        return not self.action.observes or self.is_gradient

    def places(self, value: Any) -> Iterable[tuple[Any, ...]]:
        """Return the subscripts of each part of a value that it acts on: one, or all that a `[*]` stands for."""
        return expand(value, self.subscripts) if self.star else (self.subscripts,)

    def call_at(self, call: Call, subscripts: tuple[Any, ...]) -> Call:
        """Return the call with the exact place that a `[*]` stands for, if the user's function gets the call."""
        if not self.star or not self.action.with_call:
            return call
        return call._replace(site=call.site._replace(index=write_subscripts(subscripts)))

    def pass_over(self, passing: Passing | None) -> None:
        """Note a call in which none of its tokens pass."""
        if not self.fired:
            found = "no forward of the model was running" if passing is None else passing.describe()
            self.problem, self.hint = f"did not fire: no such token passed; {found}", ""

    def miss(self, value: Any) -> None:
        """Note that the subscripts select nothing in a value, which passes unchanged. An empty value is all right."""
        if not any([tensor.numel() for tensor in leaves(value)]):
            self.fired = True
            return
        did = "captured" if isinstance(self.action, Save) else "changed"
        self.problem = why.selects_nothing_problem(did, self.site.index, value)
        self.hint = why.why_short(self, value)
        self.misses += 1
        self.session.missed = True
        if self.active and not self.blocks and not self.has_warned and self.missing != IGNORE:
            self.has_warned = True
            warn(f"'{self.site}' {self.problem}{self.hint}")

    def record_at(self, site: Site, subscripts: tuple[Any, ...] | None = None) -> Record:
        """Return the record of a site. A `[*]` or a pattern of functions has one for each place or function."""
        record = self.record
        assert record is not None
        if record.family is None:
            return record
        if self.star and subscripts is not None:
            site = site._replace(index=write_subscripts(subscripts))
        if site not in record.family:
            record.family[site] = Record(site, record.keep)
        return record.family[site]


def tap_at(
    place: Found, action: Action, session: Session, name: str = "", group: object = None, kind: type[Tap] | None = None
) -> Tap:
    """Make a tap at a place in a model."""
    tap = (kind or Tap)(place.site, place.module, action, session, place.exact, name)
    tap.siblings, tap.group = place.siblings, group
    if kind is ChangingTap and action.gathering is not None:
        tap.is_traceable = not action.gathering.alike
    if place.holders:
        tap.hold(place.holders)
    return tap


class ChangingTap(Tap):
    """A tap that changes the whole output of every call of a module.

    If it is the only tap of its module, it takes a short path: see `changing_path`.
    """

    __slots__ = ()

    is_gradient = False
    is_traceable = True
    action: Set | Apply


class HotTap(Tap):
    """A tap at the whole output of every call of a module, whose record keeps the latest value.

    Most taps are of this kind. If it is the only tap of its module, it takes the hot path: see `hot_path`.
    """

    __slots__ = ()

    is_hot = True
    is_gradient = False
    is_traceable = True
    action: KeepingAction
    record: Record


class KeepingTap(HotTap):
    """A `HotTap` whose record keeps several calls, or which has a stop beside it: see `keeping_path`."""

    __slots__ = ()

    is_traceable = False


class StopTap(Tap):
    """A stop at the whole output of a module. It may share the shadow of a `KeepingTap`: see `keeping_path`."""

    __slots__ = ()

    is_gradient = False


class HotGradientTap(Tap):
    """A tap at the gradient of the whole output of every call of a module, whose record keeps the latest one.

    If its module has no other tap, or only a `HotTap`, it takes a short path: see `hot_gradient_path`.
    """

    __slots__ = ()

    is_gradient = True
    port = "grad_output"
    action: Save
    record: Record


def plain_taps(
    found: Iterable[Modules],
    action: Action,
    session: Session,
    name: str = "",
    kind: type[Tap] | None = None,
    keep: int | None = 1,
) -> list[Tap]:
    """Make a tap at the whole output of each of these modules, or at its gradient for the port "grad_output".

    There may be thousands, so this loop sets attributes without a call for each tap. It sets the same ones as
    `Tap.__init__` and `Record.__init__`, but for the site, which is made when it is asked for, and for two that are set
    before anybody reads them: keep the three in step.

    Args:
        kind: The class of the taps. The default is `HotTap`, or `HotGradientTap` for a gradient.
        keep: How many calls the records of captures keep; None for all.
    """
    new = object.__new__
    taps: list[Tap] = []
    for places, exact, port in found:
        made, kind_of_record = _HOT[port] if kind is None else (kind, Record if kind is KeepingTap else None)
        missing = RAISE if exact else WARN if action.observes else TOGETHER
        for path, module, siblings in places:
            tap = new(made)
            tap.path = path
            tap.module = module
            tap.siblings = siblings
            tap.action = action
            tap.session = session
            tap.shadow = None
            tap.missing = missing
            tap.active = tap.fired = False
            tap.blocks = NO_BLOCKS
            taps.append(tap)
            if name:
                tap.name = name
            if exact:
                tap.exact = True
            if kind_of_record is None:
                tap.record = None
                continue
            tap.record = record = new(kind_of_record)
            record.path = path
            record.value = EMPTY
            record.stamp = record.seen = record.version = -1
            record.count = record.order = 0
            if keep != 1:
                record.keep = keep
                record.calls = []
    return taps


# The classes of the tap and its record, for each port.
_HOT: dict[str, tuple[type[Tap], type[Record] | None]] = {
    "output": (HotTap, Record),
    "grad_output": (HotGradientTap, GradientRecord),
}
