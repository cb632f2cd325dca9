"""The life of a set of hooks: which of them act, in which blocks, and what happens when a block or the set ends.

A tap is attached to its module exactly while it acts somewhere: everywhere (`active`), or in an open block. So a hook
that rests costs nothing, and the end of a block leaves the model as it was found.

| a set of hooks | `Lifecycle` |
|---|---|
| is added to, acts, rests | `add`, `activate`, `deactivate`, `remove` |
| acts in a block | `enter` opens an `OpenBlock`, `leave` closes it and says what did not fire (diagnose.py) |
| is on the model | `_wire` attaches and detaches its taps, `_follow` follows the model's forwards meanwhile |
| is forgotten | an `Owner` notices that nobody holds the `Hooks` any more, and `drop`s all hooks |
| is copied by a fork | `leave_all` takes all hooks off in the child process |
"""

from __future__ import annotations

import atexit
import gc
import inspect
import itertools
import os
import sys
import weakref
from collections.abc import Callable, Iterable
from functools import cache
from types import FrameType

from torch import nn

from hookline import _why_nothing_passed as why
from hookline._cache.record import EMPTY, Record
from hookline._engine import offload
from hookline._engine.action import Stop
from hookline._engine.attach import attach, copy_as_before, detach, forget_locks, model_taps
from hookline._engine.capture_action import Save
from hookline._engine.model_forward import Forward, ModelTap
from hookline._engine.tap import NO_BLOCKS, RAISE, Tap
from hookline._engine.unsupported_tracing import refuse_opening
from hookline._hooks import diagnose
from hookline._hooks.diagnose import Gradients, Message
from hookline._open_blocks import (
    RESTING,
    Generating,
    Session,
    Token,
    close_block,
    current_runner,
    follow_collector,
    not_left,
    open_blocks,
    overlap,
)
from hookline._sites.language import Site
from hookline._sites.resolve import Where
from hookline._sites.tree import unwrap
from hookline._torch import Line, frames, is_any_compiled, is_dynamo_loaded, user_line
from hookline.errors import HooklineError, warn

NO_HOOKS = "there are no hooks here: they were removed, or none were added"
GENERATOR = inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR
_DRIVERS = ("contextlib", "_pytest", "pytest_asyncio", "anyio", "pluggy")

_order = itertools.count(1)
_living: dict[int, weakref.ref[Lifecycle]] = {}  # The sets that have hooks on a model now.


class OpenBlock(Token):
    """One entering of some taps: the token of a `with` block, and what to restore at its end."""

    unfollowed: list[Tap] | None = None  # The taps at gradients that had seen no forward when it was entered.
    grads: Gradients | None = None  # The parameters' gradients then.

    def __init__(self, taps: list[Tap], session: Session, brief: bool) -> None:
        self.taps, self.model = taps, session.model
        # A short form has nothing to restore, unless it is entered a second time inside itself.
        self.restores = not brief or bool(taps[0].blocks)
        self.before = [(tap, tap.active, tap.count, tap.fired) for tap in (taps if self.restores else ())]
        self.session_before = session.began, session.failed
        self.hides_values = False  # Whether values of an earlier block wait to be written over.

    def is_on(self, model: nn.Module) -> bool:
        """Return True if the block is open on this model, on a part of it or on a model that holds it."""
        own = self.model()
        return bool(self.taps) and own is not None and overlap(own, model)

    def restore(self) -> None:
        """Give the taps back the state they had before the block: those that acted already go on counting."""
        while self.before:  # One after the other, so that a second attempt goes on where Ctrl-C stopped the first.
            tap, active, count, fired = self.before[-1]
            tap.active = active and not tap.removed
            tap.count += count
            tap.fired = tap.fired or fired
            del self.before[-1]
        for tap in self.taps if self.hides_values else ():
            if tap.record is not None and tap.record.reason is why.NOT_YET:
                tap.record.reason = ""  # The model did not run, so there is nothing to complain about.


class Lifecycle:
    """The taps of one `Hooks`, in order, and the blocks in which they are open. It does not know the `Hooks`."""

    verb = ""  # What the user called to make a short form, which has to be entered.
    added_at: Line | None = None  # Where hooks were added, until they are entered.

    def __init__(self, model: nn.Module, session: Session) -> None:
        self.wrapped = model
        self.model = unwrap(model) if model.__dict__ else model  # A copy that holds its hooks is still empty here.
        self.session = session
        session.model = weakref.ref(self.model)
        session.lifecycle = weakref.ref(self)
        self.taps: list[Tap] = []
        self.asked: list[tuple[list[Where], list[Tap]]] = []  # What hooks that stay were asked for, and the hooks.
        self.hooked: set[int] = set()  # The ids of all modules that they were put on, also if they were removed since.
        self.blocks: list[OpenBlock] = []
        self.may_have_fired = False
        self.is_dropped = False  # Whether nobody holds the `Hooks` any more, and its hooks are off.
        self.forward = Forward()
        self.around = ModelTap(Site(""), self.model, self.forward, session, False, "")

    def add(self, taps: list[Tap], active: bool, brief: bool, asked: Iterable[Where] = ()) -> None:
        """Add taps, and activate them if asked; the taps of a short form get their order when it is entered."""
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
        if any([not tap.is_hot and tap.site.is_gradient for tap in taps]):
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
            diagnose.warn_of_same_hook(taps)
            self.activate(taps)
        except BaseException:
            self.remove(taps)
            raise

    def is_inactive(self, record: Record) -> bool:
        """Return True if the hook that fills this record acts nowhere."""
        return any(tap.record is record and not (tap.active or tap.blocks) for tap in self.taps)

    def activate(self, taps: Iterable[Tap]) -> None:
        """Let taps act everywhere."""
        taps = list(taps)
        if not taps or any([tap.removed for tap in taps]):
            raise HooklineError(NO_HOOKS)
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
                tap.record.explain(tap.record.reason or why.REMOVED)
        self._wire(taps)
        for tap in taps:
            tap.removed = True
        self.taps = self.forward.taps = [tap for tap in self.taps if not tap.removed]
        self.forward.stops = [tap for tap in self.forward.stops if not tap.removed]
        self._forget_removed()

    def _forget_removed(self) -> None:
        """Forget the patterns whose hooks were all removed."""
        self.asked = [one for one in self.asked if not all([tap.removed for tap in one[1]])]

    def enter(self, taps: list[Tap], renew: bool) -> OpenBlock:
        """Open a block: these taps act here, from call 0 on, until it is left."""
        self.verb, self.added_at = "", None
        if not taps:
            raise HooklineError(NO_HOOKS)
        refuse_opening()
        self._refuse_second_thread(taps)
        block = OpenBlock(taps, self.session, renew)
        here = not_left() | {block}
        try:
            self.blocks.append(block)
            if self.forward.has_gradients:
                block.unfollowed = [tap for tap in taps if not tap.fired and not tap.is_hot and tap.site.is_gradient]
                block.grads = diagnose.gradients_of(self.model)
            self._open(block, renew)
            self.session.restart()
            self._follow()
            attach(taps, None if RESTING in here else here)
            open_blocks.set(here)
        except BaseException:
            self._close(block)
            raise
        return block

    def _refuse_second_thread(self, taps: list[Tap]) -> None:
        here = open_blocks.get()
        elsewhere = [block for block in self.blocks if block not in here]
        if any(tap in taps for block in elsewhere for tap in block.taps if isinstance(tap.action, Save)):
            raise HooklineError(
                "these hooks are open on another thread or task, and captures would mix; make a Hooks for each"
            )
        if not is_dynamo_loaded():
            return
        others = any([not tap.blocks <= here for tap in model_taps(self.model)])
        if others and is_any_compiled(self.wrapped):
            raise HooklineError("a compiled graph acts for all threads, and another one has a block open on this model")

    def _open(self, block: OpenBlock, renew: bool) -> None:
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
                tap.record.explain(why.NOT_YET)
                block.hides_values = True

    def leave(self, block: OpenBlock, failed: type[BaseException] | None = None, over: bool = False) -> None:
        """Close a block, restore what was before it, and say what did not fire."""
        try:
            messages = self._explain(block, failed)
            self._close(block)
        except BaseException:
            self._close(block)  # Goes on where a Ctrl-C stopped the first attempt.
            raise
        if over:
            self.session.over = why.BLOCK_OVER
        began, failures = block.session_before
        self.session.began = began
        self.session.failed += failures
        if failed is None:
            offload.flush()
            diagnose.speak(messages)

    def _explain(self, block: OpenBlock, failed: type[BaseException] | None) -> list[Message]:
        """Note why sites of a block that ends did not fire; return what to say about the block."""
        taps = [tap for tap in block.taps if tap.shadow is not None]
        session, model = self.session, self.model
        messages = diagnose.never_fired(taps, session, model, bool(self.forward.stops), failed, block.skipped)
        if failed is not None:
            return []
        if block.unfollowed:
            messages += diagnose.forward_before_block(block.unfollowed, block.grads, session, model)
        if session.backward:
            messages += diagnose.cut_off(taps)
        if session.since:
            messages += diagnose.ran_uncompiled(session, model)
        if session.missed:
            messages += diagnose.selected_nothing(taps)
        if session.since:
            messages += diagnose.replaced(taps, model)
            if self.forward.parents and self.forward.has_grown():
                messages += self._added_since()
        return messages

    def _close(self, block: OpenBlock) -> None:
        close_block(block)
        if block in self.blocks:
            self.blocks.remove(block)
        for tap in block.taps:
            tap.blocks = tap.blocks - {block} if self.blocks else NO_BLOCKS
        is_over = not (self.blocks or block.restores or self.around.active)  # A short form: nothing acts any more.
        block.restore()
        if is_over:
            self._copy_out_of_graphs(block.taps)
            self.around.blocks = NO_BLOCKS
            self._unfollow(block.taps)
        else:
            self._wire(block.taps)
        block.taps = []  # Other contexts, and taps that know in which blocks they act, may still hold it.

    def _wire(self, taps: list[Tap]) -> None:
        """Attach the taps that act somewhere, detach the others."""
        self._copy_out_of_graphs(taps)
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

    def _copy_out_of_graphs(self, taps: list[Tap]) -> None:
        """Copy what compiled graphs have stored: what runs next may use their memory again."""
        for tap in taps if is_dynamo_loaded() else ():
            if tap.record is not None and tap.record.is_traced:
                tap.record.copy_out_of_graph()

    def _follow(self) -> None:
        """Follow the model's forwards while any tap acts."""
        around = self.around
        around.blocks = frozenset(self.blocks)
        if around.active or around.blocks:
            if self.forward.owner is None:
                self.forward.owner = self
                key = id(self)
                _living[key] = weakref.ref(self, lambda _: _living.pop(key, None))
                _follow_process()
            attach((around,))
        else:
            self._unfollow()

    def detach_all(self) -> None:
        """Take everything off the model, whatever state it is in."""
        self._unfollow(self.taps)

    def _unfollow(self, taps: Iterable[Tap] = ()) -> None:
        """Detach the taps, then the tap that follows the model's forwards: it was attached first."""
        detach((*taps, self.around))
        self.forward.owner = None
        _living.pop(id(self), None)
        copy_as_before(self.session)

    def warn_of_new(self) -> None:
        """Warn about modules that were added where hooks that act everywhere are by a pattern."""
        diagnose.speak(self._added_since())

    def _added_since(self) -> list[Message]:
        """Say which modules were added that a pattern of these hooks matches: they have no hooks."""
        self.forward.sizes = list(map(len, self.forward.parents))
        self._forget_removed()  # hl.clear may have removed some.
        return diagnose.added_since([where for wheres, _ in self.asked for where in wheres], self.hooked, self.wrapped)

    def drop(self) -> None:
        """Take everything off: nobody holds the hooks any more."""
        if self.blocks:
            warn("hooks were dropped while their block was open", ResourceWarning)
        for block in self.blocks:
            close_block(block)
            block.taps, block.before = [], []  # Another context may still hold the block.
        self.blocks = []
        self.session.over = self.session.over or why.HOOKS_GONE
        if self.forward.owner is not None:
            self.detach_all()
        self.is_dropped = True
        self.warn_of_unused()

    def warn_of_unused(self) -> None:
        """Warn about hooks that go without having done anything: never entered, or not kept until the model runs."""
        if self.session.forked or not self.taps:
            return
        if self.verb and not self.may_have_fired:
            diagnose.warn_of_unentered(self.taps, self.verb, self.added_at)
        elif self.added_at is not None and self.forward.active and not self.session.any_forward:
            diagnose.warn_of_unkept(self.taps, self.session, self.added_at)


class Owner:
    """Held by the `Hooks` of a lifecycle alone: when nobody holds that any more its hooks come off.

    The lifecycle can't know by itself: while hooks are attached the model holds it. A `Hooks` has two: Python ignores a
    Ctrl-C in the `__del__` of the first, and the second does what is left to do.
    """

    lifecycle: Lifecycle | None = None

    def __init__(self, lifecycle: Lifecycle) -> None:
        self.lifecycle = lifecycle

    def __del__(self, _is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        lifecycle = self.lifecycle
        # Bound early: at the end of Python modules are empty.
        if lifecycle is not None and not lifecycle.is_dropped and not _is_finalizing():
            lifecycle.drop()


@cache
def look_at_exit() -> None:
    """Let Python warn at its end of short forms that a variable still holds, and that nobody has entered."""
    atexit.register(_warn_of_waiting, os.getpid())


def _warn_of_waiting(process: int) -> None:
    if os.getpid() != process or hasattr(sys, "last_value"):
        return  # This is a fork, whose parent may enter them yet, or the program has failed before it could.
    # Asking the garbage collector once costs no block anything: a list of those that wait would.
    found = {
        id(one.lifecycle): one.lifecycle for one in gc.get_objects() if type(one) is Owner and one.lifecycle is not None
    }
    for lifecycle in found.values():
        if lifecycle.verb:
            lifecycle.warn_of_unused()
            lifecycle.verb = ""


def yielding(frame: FrameType) -> Generating | None:
    """Return the generator that a frame is of, unless a context manager, a fixture or the like runs it: on purpose."""
    # A generator that another one yields from is run by that one.
    driver = next((one for one in frames(frame) if not one.f_code.co_flags & GENERATOR), None)
    name = driver.f_globals.get("__name__", "") if driver is not None else ""
    return None if name.split(".")[0] in _DRIVERS else Generating(id(frame), frame.f_code, current_runner())


def lifecycles() -> list[Lifecycle]:
    """Return the life cycles of all hooks that are on a model now."""
    return [lifecycle for reference in list(_living.values()) if (lifecycle := reference()) is not None]


def leave_all() -> None:
    """Take every hook off, in a process that was forked from one with hooks: they belong to the other one."""
    forget_locks()
    for lifecycle in lifecycles():
        lifecycle.session.forked = True
        lifecycle.detach_all()


@cache
def _follow_process() -> None:
    """Follow what happens to the process, from the first hooks on: importing hookline changes nothing."""
    follow_collector()
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=leave_all)
