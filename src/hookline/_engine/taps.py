"""A tap: one action at one site, and when it acts."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from types import MethodType
from typing import TYPE_CHECKING, Any, NoReturn

from torch import Tensor, nn

from hookline._blocks import RESTING, Blocks, Rest, acting
from hookline._cache.budget import Budget
from hookline._cache.record import EMPTY, Record, Session
from hookline._engine import operands
from hookline._engine.actions import NOTHING, Action, Apply, Call, Save, Set
from hookline._engine.operands import plain
from hookline._sites.language import Alternatives, Site, alternatives_of, is_pattern, match_name, write_subscripts
from hookline._sites.members import Holders
from hookline._sites.tree import Children, Named
from hookline._values import copies
from hookline._values.containers import Exchange
from hookline._values.nested import (
    STAR,
    describe,
    expand,
    get_part,
    is_empty,
    leaves,
    put_part,
    rebuild,
    selects_nothing,
    split,
)
from hookline.errors import EditError, HooklineError, SiteError, warn
from hookline.parallel.gather import Gathering

if TYPE_CHECKING:
    from hookline._engine.checkpoints import Event
    from hookline._engine.parameters import Reads
    from hookline._engine.shadow import Watch


class Sequences:
    """What the calls that one hook has seen say about sequences."""

    length = 0  # Tokens in the latest forward of the model.
    generates = False  # Whether one token came after several.
    is_second = False  # Whether several came after that.

    def number(self, number: int) -> int:
        """Return the number of the call that runs, as one that can't be compared by a range if that would mislead."""
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
            "and the model has begun a second sequence in it; open a block for each generate()"
        )

    __lt__ = __le__ = __gt__ = __ge__ = __bool__ = _refuse


def _tokens() -> int:
    """Return how many tokens the running forward of the model was given, 0 if that is unknown."""
    run = copies.running.get()
    if run is None:
        return 0
    args, kwargs = run.given
    # Floats are tokens only beside a cache: the second dimension of other data may be the batch, or channels.
    has_cache = any(["past" in name or "cache" in name for name in kwargs])
    for value in (kwargs.get("input_ids"), *args, *kwargs.values()):
        if isinstance(value, Tensor) and value.dim() > 1 and (has_cache or not value.is_floating_point()):
            return value.size(1)
    return 0


NO_BLOCKS: Blocks = frozenset()
RAISE, WARN, IGNORE = "raise", "warn", "ignore"
TOGETHER = "together"  # Raise if nothing passes at any place of a pattern, else warn of those where nothing does.


class Tap:
    """One action at one site. It acts everywhere while `active`, and in the blocks that hold it.

    What is the same for every new tap stands on the class: one is made for each hooked module.
    """

    __slots__ = (
        "__dict__",
        "__weakref__",
        "action",
        "active",
        "blocks",
        "fired",
        "here",
        "is_plain",
        "missing",
        "module",
        "order",
        "path",
        "record",
        "session",
        "siblings",
        "watch",
    )

    module: nn.Module
    action: Action
    session: Session
    path: str  # Of its module.
    record: Record | None
    siblings: Children | None  # Where its module was found: by this a replaced one is noticed.
    active: bool
    blocks: Blocks
    is_plain: bool  # Whether it captures the whole output of every call: see plain_taps.
    here: Blocks | None  # Blocks in which it is known to act: see the hot path in shadow.py.
    watch: Watch | Reads | MethodType | None  # While it is attached; on the hot path, the shadow itself.
    order: int  # Taps of one module act in this order.
    fired: bool
    missing: str  # What happens when nothing passes here.
    exact = False
    name = ""
    holders: Holders = ()  # Of a parameter: all who hold it.
    method = "forward"  # Of its module: what is shadowed.
    function = ""  # The name of a function, or a pattern of names.
    names: Alternatives = ()  # What that pattern stands for.
    subscripts: tuple[Any, ...] = ()
    star = False  # Whether a `[*]` is among its subscripts.
    is_inside = False  # Whether it is at a function that runs inside the forward of its module.
    is_family = False  # Whether it is a pattern of functions, each of which has a site of its own.
    removed = False
    count = 0  # Calls of the module since the hooks were attached or entered.
    sequences: Sequences | None = None  # What its calls say about sequences, if its function sees the calls.
    group: object = None  # Shared by those of one pattern that changes something.
    reached = False  # Of a change of a gradient: whether one came since the hooks were attached or entered.
    skipped_in = -1  # Of a skip: the forward of the model in which it last acted.
    has_warned = False  # Of a gradient that can't come, or a part that is not there.
    problem = ""  # Why it could do nothing with what passed, the last time that it could not.
    hint = ""  # What may be the reason for that, and what to write instead.
    misses = 0  # How often its subscripts selected nothing, since the hooks were attached or entered.
    helpers: list[Tap] | None = None  # What one on a function needs at other places: see functions.py.
    counts: dict[str, int] | None = None  # Of operations on a parameter: how often each, in this forward.
    counted = -1  # The forward that those counts are of.
    ran: dict[str, None] | None = None  # The functions that ran while it waited for one of its own.
    often = 0  # How often its own function ran, at most, in one call of the module or forward of the model.

    def __init__(self, site: Site, module: nn.Module, action: Action, session: Session, exact: bool, name: str) -> None:
        self.site = site
        self.path = site.path
        self.module = module
        self.action = action
        self.session = session
        self.record = self.siblings = self.here = self.watch = None
        self.active = self.fired = self.is_plain = False
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

    def hold(self, holders: Holders) -> None:
        """Be at a parameter, not at a module."""
        self.holders = holders
        self.is_inside = False
        self.path = self.site.path.rpartition(".")[0]

    @cached_property
    def site(self) -> Site:
        """Where it is. That of a plain tap is made when first asked for, which is seldom."""
        return Site(self.path)

    @property
    def is_covered(self) -> bool:
        """Whether something else has taken the place of its shadow on the module. That may call the shadow."""
        watch: Any = self.watch
        if watch is None or self.holders:
            return False
        own = watch if type(watch) is MethodType else watch.method
        return self.module.__dict__.get(self.method) is not own

    @property
    def why_covered(self) -> str:
        """Say that its shadow was replaced."""
        whose = f"{self.method!r} of this {type(self.module).__name__}"
        advice = "make the hooks again, unless the new one calls the old one"
        return f"{whose} was replaced on the instance after the hooks were made; {advice}"

    @property
    def seen(self) -> tuple[int, int]:
        """How often something has passed here, to compare with an earlier time."""
        return self.count, 0 if self.record is None else self.record.count

    def acts(self, here: Blocks) -> bool:
        """Whether this tap acts where these blocks are open."""
        if RESTING in here:
            acts = acting(self.blocks, self.active, self.module, here)
            would = self.active or not self.blocks.isdisjoint(here)
            if would and not acts and all(rest.is_of_user for rest in here if isinstance(rest, Rest)):
                self.session.rested = True
            return acts
        return self.active or not self.blocks.isdisjoint(here)

    def pass_by(self, here: Blocks) -> None:
        """Note a call where it does not act, if that is because its blocks are open elsewhere."""
        model = self.session.model()
        if model is not None and self.blocks and self.blocks.isdisjoint(here):
            self.session.others.note(model, here)

    def wants(self, name: str) -> bool:
        """Whether it is at the function of that name."""
        return match_name(name, self.names) if self.is_family else name == self.function

    @property
    def wanted_call(self) -> int | None:
        """The only call of its module, method or parameter that it acts on, if one was named."""
        return self.site.within if self.is_inside else self.site.call

    def next_call(self) -> tuple[int, bool]:
        """Count a call of its module, method or parameter: return the number, and whether it acts on this one."""
        number = self.count
        self.count = number + 1
        wanted = self.wanted_call
        return number, wanted is None or wanted == number

    def next_operation(self, name: str) -> tuple[int, bool]:
        """Count an operation on its parameter, within one forward of the model: see next_call."""
        if self.counts is None or self.counted != self.session.forwards:
            self.counts = {}
            self.counted = self.session.forwards
        number = self.counts.get(name, 0)
        self.counts[name] = number + 1
        self.count += 1
        self.often = max(self.often, number + 1)
        return number, self.site.call is None or self.site.call == number

    @property
    def changes(self) -> bool:
        """Whether it may change what passes, or has to be there again when a forward is recomputed."""
        return not self.action.observes or self.site.is_gradient

    @property
    def is_traceable(self) -> bool:
        """Whether dynamo can trace it: nothing to count, nothing to raise, no tensor hook."""
        action, site = self.action, self.site
        if site.is_gradient or site.call is not None or self.star or self.is_inside:
            return False
        if isinstance(action, Save):
            simple = action.is_traceable and not action.with_call and action.budget is None and not self.is_family
            return simple and self.record is not None and self.record.keep == 1
        if action.gathering is not None and action.gathering.alike:
            return False
        if isinstance(action, Apply):
            return not action.with_call
        return isinstance(action, Set) or getattr(action, "is_traceable", False)

    def act(self, value: Any, call: Call, event: Event) -> Any:
        """Take the part that the subscripts name, give it to the action, put what comes back in its place."""
        action = self.action
        try:
            if isinstance(action, Save):
                self.fired = True
                self._save(action, value, call, event)
                return value
            seen = plain(value) if operands.in_use else value
            new = self._changed(seen, call, event)
            return value if new is seen else new
        except SiteError as error:
            short = self._why_short(value) if self.subscripts else ""
            blame(call.site, SiteError(f"{error}{short}") if short else error)
        except EditError as error:
            blame(call.site, EditError(f"{error}{self._why_short(value)}") if error.is_longer else error)
        except Exception as error:
            blame(call.site, error)

    def _changed(self, value: Any, call: Call, event: Event) -> Any:
        action = self.action
        if action.gathering is not None:
            return self._changed_whole(action.gathering, value, call, event)
        if not self.subscripts and isinstance(value, Tensor):
            self.fired = True
            return action(value, call, True)  # type: ignore[operator]
        exchange = event.exchange(self.site.port)
        given, found = value, False
        for subscripts in expand(value, self.subscripts) if self.star else (self.subscripts,):
            whole, rest = split(value, subscripts)
            part = get_part(whole, rest)
            if is_empty(part) and selects_nothing(given, subscripts):
                continue
            self.fired = found = True
            new = action(part, self._at(call, subscripts), not rest)  # type: ignore[operator]
            if new is not part:
                value = put_part(value, subscripts, exchange.merge(new, part), exchange.rebuild)
        if not found:
            self.miss(given)
        return value

    def miss(self, value: Any) -> None:
        """Note that the subscripts select nothing of a value, which passes as it is; an empty one is not a mistake."""
        if not any([tensor.numel() for tensor in leaves(value)]):
            self.fired = True
            return
        did = "captured" if isinstance(self.action, Save) else "changed"
        self.problem = f"{did} nothing: {self.site.index} selects nothing of {describe(value)}"
        self.hint = self._why_short(value)
        self.misses += 1
        self.session.missed = True
        if self.active and not self.blocks and not self.has_warned and self.missing != IGNORE:
            self.has_warned = True
            warn(f"'{self.site}' {self.problem}{self.hint}")

    def _why_short(self, value: Any) -> str:
        """Say why a value of a later call may be of one position: in the first call, the prompt passed."""
        shapes = [tensor.shape for tensor in leaves(value)[:1] if not tensor.is_nested]
        if self.count < 2 or self.wanted_call is not None or not shapes or len(shapes[0]) < 2 or shapes[0][1] != 1:
            return ""
        prompt = self.site._replace(within=0) if self.is_inside else self.site._replace(call=0)
        return (
            "; a model that generates with a cache is given one token a call after the prompt: "
            f"'{prompt}' is the prompt's call alone, and call.number tells an edit which call it is"
        )

    def _changed_whole(self, gathering: Gathering, value: Any, call: Call, event: Event) -> Any:
        """The same where a value may be one rank's part: it is made whole first, and cut again afterwards."""
        exchange = event.exchange(self.site.port)
        given, found = value, False
        for subscripts in expand(value, self.subscripts) if self.star else (self.subscripts,):
            held, rest = split(value, subscripts)

            def change(seen: Any, subscripts: tuple[Any, ...] = subscripts, rest: tuple[Any, ...] = rest) -> Any:
                nonlocal found
                part = get_part(seen, rest)
                if is_empty(part) and selects_nothing(seen, rest):
                    return seen
                self.fired = found = True
                new = self.action(part, self._at(call, subscripts), not rest)  # type: ignore[operator]
                return seen if new is part else put_part(seen, rest, new)

            new = gathering.change(held, call.site, change)
            if new is not held:
                where = subscripts[: len(subscripts) - len(rest)]
                value = put_part(value, where, exchange.merge(new, held), exchange.rebuild)
        if not found:
            self.miss(given)
        return value

    def _at(self, call: Call, subscripts: tuple[Any, ...]) -> Call:
        """Return the call with the very place that a `[*]` stands for, if the user's function sees it."""
        if not self.star or not getattr(self.action, "with_call", False):
            return call
        return call._replace(site=call.site._replace(index=write_subscripts(subscripts)))

    def trace(self, value: Any, exchange: Exchange | None = None) -> Any:
        """Act inside a graph that dynamo is tracing: no counting, no clock, no other thread."""
        self.fired = True
        action = self.action
        whole, rest = split(value, self.subscripts)
        part = get_part(whole, rest)
        if isinstance(action, Save):
            kept = action.keep_part(part, False)
            if kept is not NOTHING:
                self.record.value = kept  # type: ignore[union-attr]
                self.record.is_traced = True  # type: ignore[union-attr]
                if action.clone is False:
                    self.record.version = -1  # type: ignore[union-attr]  # It is a copy, whatever was there before.
            return value
        # With dynamic=True the numbers in subscripts are symbols, and dynamo can't tell whether such a tuple is empty.
        new = action(part, None, len(rest) == 0)  # type: ignore[operator]
        if exchange is not None and not isinstance(part, Tensor):
            new = exchange.merge(new, part)
        if len(self.subscripts) == 0:
            return new
        if isinstance(new, Tensor) and new is part:  # Dynamo can't compare tuples so.
            return value
        return put_part(value, self.subscripts, new, rebuild if exchange is None else exchange.rebuild)

    def _save(self, action: Save, value: Any, call: Call, event: Event) -> None:
        forward, site, stamp = self.session.forwards, call.site, event.stamp
        if not self.subscripts:
            whole = value if action.gathering is None else action.whole(value, site)
            _put(self.record_at(site), action.keep(whole, call, whole is event.new), stamp, forward, action.budget)
            return
        found = False
        for subscripts in expand(value, self.subscripts) if self.star else (self.subscripts,):
            whole, rest = split(value, subscripts)
            part = get_part(action.whole(whole, site), rest)
            found = found or not is_empty(part) or not selects_nothing(value, subscripts)
            if part is None and self.star:
                continue
            if part is None:
                raise HooklineError(f"None passes here: {type(self.module).__name__} did not make this value")
            kept = action.keep_part(part, bool(rest), self._at(call, subscripts))
            _put(self.record_at(site, subscripts), kept, stamp, forward, action.budget)
        if not found:
            self.miss(value)

    def record_at(self, site: Site, subscripts: tuple[Any, ...] | None = None) -> Record:
        """Return the record of a site: for a `[*]` or a pattern of functions, one for each it stands for."""
        record = self.record
        assert record is not None
        if record.family is None:
            return record
        if self.star and subscripts is not None:
            site = site._replace(index=write_subscripts(subscripts))
        if site not in record.family:
            record.family[site] = Record(site, record.keep)
        return record.family[site]


def plain_taps(places: Iterable[Named], exact: bool, action: Save, session: Session, name: str) -> list[Tap]:
    """Make a tap for each of these modules that captures its whole output, at every call, and keeps the latest.

    Most hooks are that, and there may be thousands: so this is a loop of stores, without a call for each.
    """
    new = object.__new__
    missing = RAISE if exact else WARN
    taps: list[Tap] = []
    for path, module, siblings in places:
        tap = new(Tap)
        tap.path = path
        tap.module = module
        tap.siblings = siblings
        tap.action = action
        tap.session = session
        tap.here = tap.watch = None
        tap.is_plain = True
        tap.missing = missing
        tap.active = tap.fired = False
        tap.blocks = NO_BLOCKS
        tap.order = 0
        tap.record = record = new(Record)
        record.path = path
        record.value = EMPTY
        record.stamp = record.seen = record.version = -1
        record.count = record.order = 0
        taps.append(tap)
        if name:
            tap.name = name
    return taps


def _put(record: Record, kept: Any, stamp: Any, forward: int, budget: Budget | None) -> None:
    if kept is not NOTHING:
        record.put(kept if budget is None else budget.hold(kept, record, stamp), stamp, forward)
    elif record.value is EMPTY or record.reason:
        record.explain(f"the transform has kept nothing of '{record.site}'")


def blame(site: Site, error: Exception) -> NoReturn:
    """Raise an error that came up at a site: hookline's own with the site in it, a user's as it is with a note."""
    if isinstance(error, HooklineError) and not str(error).startswith("'"):
        raise type(error)(f"'{site}': {error}") from None
    told = any(note.startswith("hookline: ") for note in getattr(error, "__notes__", ()))  # By a hook inside this one.
    if hasattr(error, "add_note") and not isinstance(error, HooklineError) and not told:  # Python 3.11.
        error.add_note(f"hookline: raised at '{site}'")
    try:
        raise error
    finally:
        del error  # Its traceback holds this frame, which would hold it, and with it the model.
