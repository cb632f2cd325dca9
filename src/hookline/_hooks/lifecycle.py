"""The life of a set of hooks: which of them act, in which blocks, and what is said when a block ends.

A tap is attached to its module exactly while it acts somewhere: everywhere (`active`), or in an open block. So a hook
that rests costs nothing, and the end of a block leaves the model as it was found.
"""

from __future__ import annotations

import atexit
import gc
import inspect
import itertools
import os
import sys
import weakref
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, _GeneratorContextManager
from functools import cache, partial, wraps
from types import CellType, FrameType
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar

from torch import nn

from hookline._blocks import (
    RESTING,
    Blocks,
    Token,
    close_block,
    current_runner,
    follow_collector,
    not_left,
    open_blocks,
    overlap,
)
from hookline._cache.records import EMPTY, Generating, Record, Session
from hookline._engine import offload
from hookline._engine.actions import Save, Skip, Stop
from hookline._engine.attach import attach, attached_to, copy_as_before, detach, following, forget_locks
from hookline._engine.guards import refuse_opening
from hookline._engine.stop import Forward, departed
from hookline._engine.taps import IGNORE, NO_BLOCKS, RAISE, TOGETHER, Tap
from hookline._hooks.diagnose import RECOMPUTED, RESTED, fused_instead, ran_elsewhere, why_never_fired
from hookline._sites.language import Site
from hookline._sites.resolve import Where, find_places
from hookline._sites.tree import Names, unwrap
from hookline._tables import count
from hookline._torch import frames, is_any_compiled, is_dynamo_loaded, most_graphs, version_of
from hookline.errors import HooklineError, Line, NeverFired, is_given_up, is_thrown_away, line_text, user_line, warn

if TYPE_CHECKING:
    from hookline._hooks.hooks import Hooks


def warn_of_twins(taps: list[Tap]) -> None:
    """Warn when a hook does the same at the same place already, as after a notebook cell that was run twice."""
    for tap in taps:
        is_watched = tap.holders or tap.method in tap.module.__dict__
        for other in attached_to(tap.module) if is_watched else ():
            same = other.active and other.site == tap.site and other.action.kind == tap.action.kind
            added_before = other.session is not tap.session or (other not in taps and other.name == tap.name)
            if same and added_before and _label(other) == _label(tap):
                whose = " from another Hooks" if other.session is not tap.session else ""
                warn(
                    f"'{tap.site}' has the same {tap.action.kind} hook{whose} already; "
                    "hl.attached(model) lists all hooks, hl.clear(model) removes hookline's"
                )
                return


def _label(tap: Tap) -> object:
    """Return what a tap does, the same for a function that was defined twice by the same lines."""
    function = getattr(tap.action, "function", None)
    code = getattr(function, "__code__", None)
    if function is not None and code is None:
        return id(function)  # An object that is called: what it does can't be told.
    if code is None:
        return repr(tap.action)
    cells = getattr(function, "__closure__", None) or ()
    owner = getattr(function, "__self__", None)
    defaults = [
        *(getattr(function, "__defaults__", None) or ()),
        *(getattr(function, "__kwdefaults__", None) or {}).values(),
    ]
    held = [*map(_held_by, cells), *map(id, defaults)]
    return code.co_code, code.co_consts, code.co_names, held, id(owner)


def _held_by(cell: CellType) -> int:
    try:
        return id(cell.cell_contents)
    except ValueError:  # Nothing yet.
        return 0


GENERATOR = inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR
_DRIVERS = ("contextlib", "_pytest", "pytest_asyncio", "anyio", "pluggy")
Parameters = ParamSpec("Parameters")
Value = TypeVar("Value")

_living: dict[int, weakref.ref[Ledger]] = {}


class Owner:
    """Held by the `Hooks` of a ledger alone: when nobody holds that any more its hooks come off.

    The ledger can't know by itself: while hooks are attached the model holds it. A `Hooks` has two: Python ignores a
    Ctrl-C in the `__del__` of the first, and the second does what is left to do.
    """

    ledger: Ledger | None = None

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    def __del__(self, _is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        ledger = self.ledger
        # Bound early: at the end of Python modules are empty.
        if ledger is not None and not ledger.is_dropped and not _is_finalizing():
            ledger.drop()


@cache
def look_at_exit() -> None:
    """Let Python warn at its end of short forms that a variable still holds, and that nobody has entered."""
    atexit.register(_warn_of_waiting, os.getpid())


def _warn_of_waiting(process: int) -> None:
    if os.getpid() != process or hasattr(sys, "last_value"):
        return  # This is a fork, whose parent may enter them yet, or the program has failed before it could.
    # Asking the garbage collector once costs no block anything: a list of those that wait would.
    found = {id(one.ledger): one.ledger for one in gc.get_objects() if type(one) is Owner and one.ledger is not None}
    for ledger in found.values():
        if ledger.verb:
            ledger.warn_of_unused()
            ledger.verb = ""


class Leaving(partial[None]):
    """What a `with` statement calls at its end: a bound `__exit__` that leaves the block even if it is never called.

    Only the statement holds it. If Ctrl-C comes just before it is called, or just before `__enter__` returns, Python
    drops it. A traceback that somebody keeps holds the `Hooks`, but not this.
    """

    before: Blocks | None = None  # The blocks that were open before the statement.

    def __del__(self) -> None:
        hooks: Hooks = self.args[0]
        if not hooks._open or self.before is None:
            return
        here = open_blocks.get() - self.before
        for block in [block for block in still_open(hooks) if block in here]:
            hooks._ledger.leave(block, KeyboardInterrupt, over=hooks._brief)


class Unstarted(_GeneratorContextManager[Any, None, None]):
    """A block made of a generator. It warns if it is dropped without having been entered."""

    is_used = False

    def __enter__(self) -> Any:
        self.is_used = True
        return super().__enter__()

    def __call__(self, function: Any) -> Any:
        self.is_used = True  # As a decorator: each call enters a block like this one.
        return super().__call__(function)

    def __del__(self, _is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not self.is_used and not _is_finalizing():
            name = self.func.__name__
            warn(f"{name} was never entered and did nothing; write `with {name}(...):`")


def must_enter(
    function: Callable[Parameters, Generator[Value, None, None]],
) -> Callable[Parameters, AbstractContextManager[Value]]:
    """Make a `with` block of a generator function, as contextlib.contextmanager does; it has to be entered."""

    @wraps(function)
    def make(*args: Parameters.args, **kwargs: Parameters.kwargs) -> AbstractContextManager[Value]:
        return Unstarted(function, args, kwargs)

    return make


class Exit:
    """Makes an `__exit__` of a function: each `with` statement gets a `Leaving` of its own."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function

    def __get__(self, hooks: Hooks | None, _kind: type | None = None) -> Callable[..., None]:
        if hooks is None:
            return self.function
        leaving = Leaving(self.function, hooks)
        leaving.before = open_blocks.get()
        return leaving


def still_open(hooks: Hooks) -> list[Block]:
    """Return the blocks that were entered by `with hooks` and not left yet, and forget the others."""
    for block in list(hooks._open):
        if block not in hooks._ledger.blocks:
            hooks._open.pop(block, None)  # Another thread may have done so.
    return list(hooks._open)


def yielding(frame: FrameType) -> Generating | None:
    """Return the generator that a frame is of, unless a context manager, a fixture or the like runs it: on purpose."""
    # A generator that another one yields from is run by that one.
    driver = next((one for one in frames(frame) if not one.f_code.co_flags & GENERATOR), None)
    name = driver.f_globals.get("__name__", "") if driver is not None else ""
    return None if name.split(".")[0] in _DRIVERS else Generating(id(frame), frame.f_code, current_runner())


def note(ledger: Ledger) -> None:
    """Remember a ledger that has hooks on a model, as long as it lives."""
    key = id(ledger)
    _living[key] = weakref.ref(ledger, lambda _: _living.pop(key, None))
    _follow_process()


def forget(ledger: Ledger) -> None:
    """Forget a ledger whose hooks are off."""
    _living.pop(id(ledger), None)
    copy_as_before(ledger.session)


def ledgers() -> list[Ledger]:
    """Return those that have hooks on a model now."""
    return [ledger for reference in list(_living.values()) if (ledger := reference()) is not None]


def leave_all() -> None:
    """Take every hook off, in a process that was forked from one with hooks: they belong to the other one."""
    forget_locks()
    for ledger in ledgers():
        ledger.session.forked = True
        ledger.detach_all()


@cache
def _follow_process() -> None:
    """Follow what happens to the process, from the first hooks on: importing hookline changes nothing."""
    follow_collector()
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=leave_all)


NOT_YET = "nothing passed '{site}' in this block; the stored value is from an earlier one"
REMOVED = "nothing passed '{site}' before its hook was removed"  # The site is put in when somebody reads it.
NO_HOOKS = "there are no hooks here: they were removed, or none were added"

Grads = dict[int, tuple[Callable[[], Any], int]]  # By the id of each: the tensor, held weakly, and its version.
_order = itertools.count(1)


class Message(NamedTuple):
    """What is said at the end of a block: as an error if it is certain, else as a warning."""

    is_certain: bool
    text: str
    has_remedy: bool = False  # It is said before the others, which only count.


class Block(Token):
    """One entering of some taps: the token of a `with` block, and what to restore at its end."""

    unfollowed: list[Tap] | None = None  # The taps at gradients that had seen no forward when it was entered.
    grads: Grads | None = None  # The parameters' gradients then.

    def __init__(self, taps: list[Tap], session: Session, brief: bool) -> None:
        self.taps, self.model = taps, session.model
        # A short form has nothing to restore, but when it is entered a second time inside itself.
        self.restores = not brief or bool(taps[0].blocks)
        self.before = [(tap, tap.active, tap.count, tap.fired) for tap in (taps if self.restores else ())]
        self.session_before = session.began, session.failed
        self.hides_values = False  # Whether values of an earlier block wait to be written over.

    def is_on(self, model: nn.Module) -> bool:
        """Whether it is open on this model, on a part of it or on one that it is a part of."""
        own = self.model()
        return bool(self.taps) and own is not None and overlap(own, model)

    def restore(self) -> None:
        """Give the taps back the state they had: those that acted already go on counting where they were."""
        while self.before:  # One after the other, so that a second attempt goes on where Ctrl-C stopped the first.
            tap, active, count, fired = self.before[-1]
            tap.active = active and not tap.removed
            tap.count += count
            tap.fired = tap.fired or fired
            del self.before[-1]
        for tap in self.taps if self.hides_values else ():
            if tap.record is not None and tap.record.reason is NOT_YET:
                tap.record.reason = ""  # No forward, no complaint.


class Ledger:
    """The taps of one `Hooks`, in order, and the blocks in which they are open. It does not know the `Hooks`."""

    verb = ""  # Of a short form: what the user called. It has to be entered.
    added_at: Line | None = None  # Where hooks were added, until they are entered.

    def __init__(self, model: nn.Module, session: Session) -> None:
        self.wrapped = model
        self.model = unwrap(model) if model.__dict__ else model  # A copy that holds its hooks is still empty here.
        self.session = session
        session.model = weakref.ref(self.model)
        session.ledger = weakref.ref(self)
        self.taps: list[Tap] = []
        self.asked: list[tuple[list[Where], list[Tap]]] = []  # What hooks that stay were asked for, and the hooks.
        self.hooked: set[int] = set()  # The ids of all modules that they were put on, also if they were removed since.
        self.blocks: list[Block] = []
        self.may_have_fired = False
        self.is_dropped = False  # Whether nobody holds the `Hooks` any more, and its hooks are off.
        self.forward = Forward()
        self.around = Tap(Site(""), self.model, self.forward, session, False, "")  # type: ignore[arg-type]

    def add(self, taps: list[Tap], active: bool, brief: bool, asked: Iterable[Where] = ()) -> None:
        """Take new taps in, and let them act, or not yet; those of a short form get their order when it is entered."""
        if brief and self.blocks:
            raise HooklineError("this block is open already; add hooks before it is entered, or use hl.Hooks(model)")
        if not (active or brief) and not open_blocks.get().isdisjoint(self.blocks):
            raise HooklineError(
                "hooks that are added inactive would not act in this block, which is open already; add them before it "
                "is entered, or make them with hl.Hooks(model), which acts at once"
            )
        self.taps += taps
        self.forward.taps = self.taps
        if taps and isinstance(taps[0].action, Stop):
            self.forward.stops += taps
        if any([not tap.is_plain and tap.site.is_gradient for tap in taps]):
            self.forward.has_gradients = True
            self.forward.changes_gradients |= any([not tap.action.observes for tap in taps])
        if brief:
            return
        self.asked.append((list(asked), taps))
        self.hooked.update([id(tap.module) for tap in taps])
        for tap in taps:
            tap.order = next(_order)
        if any([tap.missing != RAISE for tap in taps]):
            self.forward.parents = [module._modules for module in self.model.modules()]
            self.forward.sizes = list(map(len, self.forward.parents))
        if not active:
            return
        self.added_at = user_line()
        try:
            warn_of_twins(taps)
            self.activate(taps)
        except BaseException:
            self.remove(taps)
            raise

    def acts_here(self, tap: Tap) -> bool:
        """Whether a tap acts on this thread now."""
        return tap.acts(open_blocks.get()) and not tap.removed

    def is_inactive(self, record: Record) -> bool:
        """Whether what would fill this record acts nowhere."""
        return any(tap.record is record and not (tap.active or tap.blocks) for tap in self.taps)

    def activate(self, taps: Iterable[Tap]) -> None:
        """Let taps act everywhere."""
        taps = _living_taps(taps)
        self.may_have_fired = True
        for tap in taps:
            tap.active = True
        self._wire(taps)

    def deactivate(self, taps: Iterable[Tap]) -> None:
        """Let taps rest everywhere, and in the blocks that are open here."""
        taps = list(taps)
        here = open_blocks.get()
        for tap in taps:
            tap.active = False
            tap.blocks -= here
        self._wire(taps)

    def remove(self, taps: Iterable[Tap]) -> None:
        """Take taps off for good. They are forgotten last: after a Ctrl-C they can be removed again."""
        taps = list(taps)
        for tap in taps:
            tap.active = False
            tap.blocks = NO_BLOCKS
            if tap.record is not None and tap.record.value is EMPTY and not tap.record.family:
                tap.record.explain(tap.record.reason or REMOVED)
        self._wire(taps)
        for tap in taps:
            tap.removed = True
        self.taps = self.forward.taps = [tap for tap in self.taps if not tap.removed]
        self.forward.stops = [tap for tap in self.forward.stops if not tap.removed]
        self._forget_removed()

    def _forget_removed(self) -> None:
        """Forget what was asked for of which all hooks were removed."""
        self.asked = [one for one in self.asked if not all([tap.removed for tap in one[1]])]

    def drop(self) -> None:
        """Take everything off: nobody holds the hooks any more."""
        if self.blocks:
            warn("hooks were dropped while their block was open", ResourceWarning)
        for block in self.blocks:
            close_block(block)
            block.taps, block.before = [], []  # Another context may still hold the block.
        self.blocks = []
        self.session.say_dropped()
        self.detach_all()
        self.is_dropped = True
        if self.verb or self.added_at is not None:
            self.warn_of_unused()

    def warn_of_unused(self) -> None:
        """Warn of hooks that go without having done anything: never entered, or not kept until the model runs."""
        verb = self.verb
        if self.session.forked or not self.taps:
            return
        if verb and not self.may_have_fired:
            made = f", made in {line_text(self.added_at)}," if self.added_at is not None else ""
            stays = f"; hooks = hl.Hooks(model), then hooks.{verb}(...) acts at once" if verb != "watch" else ""
            advice = f"write `with hl.{verb}(...):`{stays}"
            warn(f"hl.{verb} at {self._where()}{made} was never entered and did nothing; {advice}")
        elif self.forward.active and not self.session.any_forward:
            if all([tap.fired or tap.missing == IGNORE for tap in self.taps]):
                return
            if is_thrown_away(self.added_at):
                warn(
                    f"the hooks at {self._where()} are gone before the model ran: nothing holds them; keep them in a "
                    "variable, as in hooks = hl.Hooks(model)"
                )
            elif self._has_changed_nothing() and not is_given_up() and sys.exc_info()[1] is None:
                warn(
                    f"the hooks at {self._where()}, made in {line_text(self.added_at)}, are gone before the model ran, "  # type: ignore[arg-type]
                    "and changed nothing: hooks go with the last variable that holds them. If a function makes them, "
                    "let it return them, and keep them while the model runs"
                )

    def _has_changed_nothing(self) -> bool:
        """Whether hooks are here to change something, and nothing has passed any of them, nor the model failed."""
        changes = any([tap.active and not tap.action.observes for tap in self.taps])
        return changes and not self.session.forwards and not any([tap.fired for tap in self.taps])

    def _where(self) -> str:
        first, *others = self.taps
        return f"'{first.site}' and {len(others)} more" if others else f"'{first.site}'"

    def detach_all(self) -> None:
        """Take everything off the model, whatever state it is in."""
        if self.around.watch is not None:  # It is attached before any other, and detached after them.
            detach(self.taps)
            self.unfollow()

    def enter(self, taps: list[Tap], renew: bool) -> Block:
        """Open a block: these taps act here, from call 0 on, until it is left."""
        self.verb, self.added_at = "", None
        if not taps:
            raise HooklineError(NO_HOOKS)
        refuse_opening()
        self._refuse_second_thread(taps)
        block = Block(taps, self.session, renew)
        here = not_left() | {block}
        try:
            self.blocks.append(block)
            if self.forward.has_gradients:
                block.unfollowed = [tap for tap in taps if not tap.fired and not tap.is_plain and tap.site.is_gradient]
                block.grads = _grads(self.model)
            self._open(block, renew)
            self.session.restart()
            self._follow()
            attach(taps, None if RESTING in here else here)
            open_blocks.set(here)
        except BaseException:
            self._close(block)
            raise
        return block

    def _open(self, block: Block, renew: bool) -> None:
        """Let the taps of a block count from 0, and forget for its time what they saw before."""
        token = frozenset((block,))
        if renew and not self.may_have_fired:  # Nothing has passed: there may be thousands.
            for tap, order in zip(block.taps, _order):  # noqa: B905  # The second has no end.
                tap.blocks = token
                tap.order = order
            self.may_have_fired = True
            return
        for tap in block.taps:
            tap.blocks = token if not tap.blocks else tap.blocks | token
            tap.count = 0
            tap.fired = False
            if renew:
                tap.order = next(_order)
            if tap.reached:
                tap.reached = False
            if tap.problem or tap.ran is not None:
                tap.problem, tap.hint, tap.misses, tap.ran = "", "", 0, None
            if tap.record is not None and tap.record.value is not EMPTY and not tap.site.is_gradient:
                tap.record.explain(NOT_YET)
                block.hides_values = True

    def leave(self, block: Block, failed: type[BaseException] | None = None, over: bool = False) -> None:
        """Close a block, restore what was before it, and say what did not fire."""
        try:
            taps = [tap for tap in block.taps if tap.watch is not None]
            missing = [tap for tap in taps if not tap.fired]
            messages = self._explain(missing, taps, failed, block.skipped)
            messages += self._explain_backward(block) if block.unfollowed and failed is None else []
            messages += _explain_cut_off(taps) if self.session.backward and failed is None else []
            messages += self._explain_limit() if self.session.since and failed is None else []
            messages += _explain_misses(taps) if self.session.missed else []
            self._close(block)
        except BaseException:
            self._close(block)  # Goes on where a Ctrl-C stopped the first attempt.
            raise
        if over:
            self.session.over = "its block is over"
        if failed is None and self.session.since:
            messages += self._find_replaced(taps)
            messages += self._find_new() if self.forward.has_grown() else []
        began, failures = block.session_before
        self.session.began = began
        self.session.failed += failures
        if failed is None:
            offload.flush()
            _speak(messages)

    def _close(self, block: Block) -> None:
        close_block(block)
        if block in self.blocks:
            self.blocks.remove(block)
        for tap in block.taps:
            tap.blocks = tap.blocks - {block} if self.blocks else NO_BLOCKS
        is_over = not (self.blocks or block.restores or self.around.active)  # A short form: nothing acts any more.
        block.restore()
        if is_over:
            self._settle(block.taps)
            detach(block.taps)
            self._follow()
        else:
            self._wire(block.taps)
        block.taps = []  # Other contexts, and taps that know in which blocks they act, may still hold it.

    def _explain(
        self, missing: list[Tap], taps: list[Tap], failed: type[BaseException] | None, skipped: frozenset[int]
    ) -> list[Message]:
        """Note why these sites did not fire; return what to say, unless the model never ran or something failed."""
        session = self.session
        called = [not tap.is_plain and (tap.count or tap.ran is not None) for tap in missing]
        was_called = len(missing) < len(taps) or any(called)
        ran = session.any_forward or (not session.failed and was_called)
        messages = []
        if not ran and failed is None and not session.failed:
            if session.rested or session.recomputed:
                return _tell(missing, RESTED if session.rested else RECOMPUTED)
            # No forward, no complaint.
            return _tell(missing, f"was passed over: {ran_elsewhere(self.model)}") if session.others.ran else []
        if self.forward.stops and ran and not session.since:
            name = type(self.model).__name__
            advice = "hl.run(model.method, ...) can stop a method"
            messages.append(Message(False, f"nothing was stopped: {name} itself was not called; {advice}"))
        fired = {tap.group for tap in taps if tap.fired and tap.group is not None} if missing else set()
        for tap in missing:
            if tap.function == "*" and tap.is_inside and tap.ran is not None:
                continue  # It called no function itself.
            if failed is not None or session.failed:
                message = f"nothing passed '{tap.site}' before {failed.__name__ if failed else 'the forward failed'}"
            elif ran:
                message = self._skipped_above(tap, skipped) or why_never_fired(tap, self.model)
            else:
                continue
            if tap.record is not None:
                tap.record.explain(message)
            is_certain = tap.missing == RAISE or (tap.missing == TOGETHER and tap.group not in fired)
            is_told = tap.has_warned and not is_certain
            if not (_is_told_of(tap, missing) or tap.missing == IGNORE or is_told or _ran_elsewhere(tap, taps)):
                messages.append(Message(is_certain, message, fused_instead(tap) != ""))
        return messages if ran else []

    def _explain_backward(self, block: Block) -> list[Message]:
        """Say that a backward ran in a block, and the forward before the block: its gradients were not followed."""
        session, missing = self.session, [tap for tap in block.unfollowed or () if not tap.fired]
        if session.any_forward or session.failed or session.others.ran or session.rested:
            return []
        before, now = block.grads or {}, _grads(self.model) if missing else {}
        why = "gradients are followed from the forward on; run it inside the block too"
        if any([key not in before or before[key][0]() is None for key in now]):
            return _tell(missing, f"was passed over: backward() ran in this block, and the forward before it; {why}")
        if any([now[key][1] != before[key][1] for key in now]):  # By a backward that adds to them, or by clipping.
            problem = "got no gradient, though those of parameters were written in this block. If backward() did that:"
            return [Message(False, f"'{tap.site}' {problem} {why}") for tap in missing if tap.missing != IGNORE]
        return []

    def _explain_limit(self) -> list[Message]:
        """Say that a compiled model ran uncompiled, since torch makes no further graph of it."""
        if not self.session.gave_up:
            return []
        name, limit = type(self.model).__name__, most_graphs()
        why = f"torch makes at most {limit} graphs of one function, and each set of hooks takes one"
        advice = "raise torch._dynamo.config.recompile_limit, or compile the blocks of the model instead of the whole"
        return [Message(False, f"{name} ran uncompiled: {why}; {advice}")]

    def _skipped_above(self, tap: Tap, skipped: frozenset[int]) -> str:
        """Say that a module was not called because one that holds it is skipped, or was in this block."""
        names = Names(self.model)
        parts = tap.path.split(".")
        last = len(parts) + (tap.is_inside or tap.site.method != "")  # The module itself, for what runs inside it.
        for above in (".".join(parts[:length]) for length in range(1, last)):
            module = names.find(above)
            if module is None:
                continue
            skips = [one for one in attached_to(module) if isinstance(one.action, Skip) and not one.site.member]
            if skips or id(module) in skipped:
                return f"'{tap.site}' was not called: {above!r}, which holds it, is skipped"
        return ""

    def _find_replaced(self, taps: list[Tap]) -> list[Message]:
        """Say of which taps the module was replaced, or wrapped in another, while they were open."""
        messages, names = [], Names(self.model)
        # What holds the module of a capture may be replaced: what was captured is right.
        doubtful = [tap for tap in taps if not tap.action.observes or _is_elsewhere(tap)]
        for tap in departed(doubtful, self.model) if doubtful else ():
            now = names.find(tap.path)
            if now is not None and tap.missing != IGNORE:
                found = [name for name in names.of(tap.module) if not name.startswith("<")]
                hint = f"; what was hooked is now {found[0]!r}" if found else ""
                text = f"'{tap.site}' was replaced while hooked: it is another {type(now).__name__} now{hint}"
                messages.append(Message(tap.missing == RAISE, text))
        return messages

    def warn_of_new(self) -> None:
        """Warn of modules that were added where hooks that act everywhere are by a pattern."""
        _speak(self._find_new())

    def _find_new(self) -> list[Message]:
        """Say which modules were added that a pattern of these hooks matches: they have no hooks."""
        self.forward.sizes = list(map(len, self.forward.parents))
        self._forget_removed()  # hl.clear may have removed some.
        asked = [where for wheres, _ in self.asked for where in wheres]
        try:
            new = [place.site for place in find_places(self.wrapped, asked) if id(place.module) not in self.hooked]
        except HooklineError:  # What was asked for is not there any more.
            return []
        why = "was added after the hooks were made, and has none; make the hooks again"
        return [Message(False, f"'{site}' {why}") for site in new]

    def _wire(self, taps: list[Tap]) -> None:
        """Attach the taps that act somewhere, detach the others."""
        self._settle(taps)
        forward = self.forward
        if forward.active or any([tap.active for tap in taps]):
            forward.follow_active(taps)
        self.around.active = any(tap.active for tap in list(forward.active))  # The first, unless they were cleared.
        acting = [tap for tap in taps if tap.active or tap.blocks]
        if acting:
            self._follow()
            attach(acting)
        if len(acting) < len(taps):
            detach([tap for tap in taps if not (tap.active or tap.blocks)])
        if not acting:
            self._follow()

    def _settle(self, taps: list[Tap]) -> None:
        """Take what compiled graphs have stored out of their memory: what runs next may use that."""
        for tap in taps if is_dynamo_loaded() else ():
            if tap.record is not None and tap.record.is_traced:
                tap.record.settle()

    def _follow(self) -> None:
        """Follow the model's forwards while any tap acts."""
        around = self.around
        around.blocks = frozenset(self.blocks)
        if around.active or around.blocks:
            if self.forward.owner is None:
                self.forward.owner = self
                note(self)
            attach((around,))
        else:
            self.unfollow()

    def unfollow(self) -> None:
        """Don't follow the model's forwards any more."""
        detach((self.around,))
        self.forward.owner = None
        forget(self)

    def _refuse_second_thread(self, taps: list[Tap]) -> None:
        here = open_blocks.get()
        elsewhere = [block for block in self.blocks if block not in here]
        if any(tap in taps for block in elsewhere for tap in block.taps if isinstance(tap.action, Save)):
            raise HooklineError(
                "these hooks are open on another thread or task, and captures would mix; make a Hooks for each"
            )
        if not is_dynamo_loaded():
            return
        others = any([not tap.blocks <= here for tap in following(self.model)])
        if others and is_any_compiled(self.wrapped):
            raise HooklineError("a compiled graph acts for all threads, and another one has a block open on this model")


def _living_taps(taps: Iterable[Tap]) -> list[Tap]:
    taps = list(taps)
    if not taps or any([tap.removed for tap in taps]):
        raise HooklineError(NO_HOOKS)
    return taps


def _ran_elsewhere(tap: Tap, taps: list[Tap]) -> bool:
    """Whether a function did not run here, but in another module that the same pattern means: `**/softmax`."""
    if tap.exact or not tap.is_inside:
        return False
    return any(one.fired and one.action is tap.action and one.function == tap.function for one in taps)


def _grads(model: nn.Module) -> Grads:
    """Return the gradients of a model's parameters, without holding them."""
    grads = [parameter.grad for parameter in model.parameters() if parameter.is_leaf]
    return {id(grad): (weakref.ref(grad), version_of(grad)) for grad in grads if grad is not None}


def _is_elsewhere(tap: Tap) -> bool:
    """Whether the module of a tap is not where it was found."""
    return tap.siblings is not None and tap.siblings.get(tap.path.rpartition(".")[2]) is not tap.module


def _is_told_of(tap: Tap, missing: list[Tap]) -> bool:
    """Whether nothing is said of a stop: those of a pattern may be missed, and a capture at its site says it."""
    if not isinstance(tap.action, Stop):
        return False
    return tap.missing != RAISE or any(one.site == tap.site for one in missing if not isinstance(one.action, Stop))


def _tell(missing: list[Tap], why: str) -> list[Message]:
    """Note and say of hooks why they were passed over."""
    for tap in missing:
        if tap.record is not None:
            tap.record.explain(f"'{tap.site}' {why}")
    told = [tap for tap in missing if tap.missing != IGNORE]
    return [Message(tap.missing in (RAISE, TOGETHER), f"'{tap.site}' {why}") for tap in told]


def _explain_cut_off(taps: list[Tap]) -> list[Message]:
    """Say which changes of gradients saw none, though a backward went through what the model returned."""
    changes = [tap for tap in taps if not (tap.is_plain or tap.action.observes) and tap.site.is_gradient]
    found = [tap for tap in changes if tap.fired and not tap.reached and tap.missing != IGNORE]
    why = "changed nothing: a backward ran in this block, and no gradient came here"
    reasons = "the loss may not depend on this value, detach() may cut it off, or torch.autograd.grad() was not asked"
    return [Message(False, f"'{tap.site}' {why}: {reasons} for anything before it") for tap in found]


def _explain_misses(taps: list[Tap]) -> list[Message]:
    """Say which hooks had nothing to change or to capture in some calls, where their subscripts select nothing."""
    found = [tap for tap in taps if tap.fired and tap.misses and tap.missing != IGNORE]
    return [
        Message(False, f"'{tap.site}' {tap.problem}, in {count(tap.misses, 'call')}{_advice(tap)}") for tap in found
    ]


def _advice(tap: Tap) -> str:
    some = "; '#n' names the calls that are meant"
    every = "; hl.scan(model, ...) shows the shapes"
    return (tap.hint or (some if tap.misses < tap.count else every)) + "; when_missing('ignore') leaves this unsaid"


def _speak(messages: list[Message]) -> None:
    messages.sort(key=lambda message: not message.has_remedy)
    certain = [message.text for message in messages if message.is_certain]
    if certain:
        more = f" (and {len(certain) - 1} more)" if len(certain) > 1 else ""
        raise NeverFired(certain[0] + more)
    if messages:
        more = f" (and {len(messages) - 1} more that the pattern matches)" if len(messages) > 1 else ""
        warn(messages[0].text + more)
