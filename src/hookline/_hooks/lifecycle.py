"""The life cycle of a set of hooks: which of them act, in which blocks, and what happens when a block or the set ends.

A tap is attached to its module only while it acts: everywhere (`active`), or in an open block. A paused hook therefore
costs nothing, and the end of a block leaves the model as it was found.

| a set of hooks | `Lifecycle` |
|---|---|
| is extended, activated, paused | `add`, `activate`, `deactivate`, `remove` |
| acts in a block | `enter` opens an `OpenBlock`, `leave` closes it and reports what did not fire (diagnose.py) |
| is on the model | `_wire` attaches and detaches its taps, `_follow` watches the model's forwards meanwhile |
| is freed | `_when_freed` is called when nothing holds the `Hooks` any more, and `drop`s all hooks |
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
from collections import deque
from collections.abc import Callable, Iterable
from functools import cache
from types import FrameType
from typing import Any

from torch import nn

from hookline import _why_nothing_passed as why
from hookline._cache.record import EMPTY, Record
from hookline._engine import offload
from hookline._engine.action import Stop
from hookline._engine.attach import attach, detach, forget_locks, model_taps
from hookline._engine.capture_action import Save
from hookline._engine.model_forward import ModelTap
from hookline._engine.tap import NO_BLOCKS, RAISE, HotTap, Tap
from hookline._engine.unsupported_tracing import refuse_opening
from hookline._hooks import diagnose
from hookline._hooks.diagnose import Gradients, Message
from hookline._open_blocks import (
    RESTING,
    Blocks,
    Generating,
    Session,
    Token,
    close_block,
    current_runner,
    follow_collector,
    left_blocks,
    no_model,
    not_left,
    open_blocks,
    overlap,
)
from hookline._sites.language import Site
from hookline._sites.resolve import Where
from hookline._sites.tree import is_at, unwrap
from hookline._torch import (
    Line,
    frames,
    has_compiled,
    is_any_compiled,
    is_dynamo_loaded,
    is_traced_by_fx,
    is_traced_now,
    user_line,
)
from hookline.errors import HooklineError, warn

NO_HOOKS = "there are no hooks here: they were removed, or none were added"
GENERATOR = inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR
_DRIVERS = ("contextlib", "_pytest", "pytest_asyncio", "anyio", "pluggy")

_order = itertools.count(1)
_living: dict[int, Callable[[], Lifecycle | None]] = {}  # Every lifecycle that has hooks on a model now, held weakly.


class OpenBlock(Token):
    """One open `with` block of some taps: its token, and the state to restore when it ends."""

    unfollowed: list[Tap] | None = None  # Taps at gradients that had not fired when the block was entered.
    grads: Gradients | None = None  # The parameters' gradients when the block was entered.
    hides_values = False  # Whether values of an earlier block are hidden until new ones come.
    restores = False
    before: list[tuple[Tap, bool, int, bool]] = []  # noqa: RUF012  # Replaced, never extended.
    session_before = 0, 0

    def __init__(self, taps: list[Tap], session: Session, brief: bool) -> None:
        self.taps = taps
        self.model = session.model
        if session.forwards:
            self.session_before = session.began, session.failed
        if not brief or taps[0].blocks:  # A short form has nothing to restore, unless it is entered again in its block.
            self.restores = True
            self.before = [(tap, tap.active, tap.count, tap.fired) for tap in taps]

    def is_on(self, model: nn.Module) -> bool:
        """Return True if the block is open on this model, on a part of it or on a model that contains it."""
        own = self.model()
        return bool(self.taps) and own is not None and overlap(own, model)

    def restore(self) -> None:
        """Restore the state that the taps had before the block, and add their earlier counts to those of the block."""
        while self.before:  # One at a time, so that a second attempt continues where Ctrl-C stopped the first.
            tap, active, count, fired = self.before[-1]
            tap.active = active and not tap.removed
            tap.count += count
            tap.fired = tap.fired or fired
            del self.before[-1]
        for tap in self.taps if self.hides_values else ():
            if tap.record is not None and tap.record.reason is why.NOT_YET:
                tap.record.reason = ""  # The model did not run, so there is nothing to complain about.


class Asked:
    """The places that one call of `Hooks` was given, and how many of its taps are left."""

    def __init__(self, where: Iterable[Where], left: int) -> None:
        self.where, self.left = list(where), left


class Lifecycle(ModelTap):
    """The taps of one `Hooks`, in order, and their open blocks. It holds no reference to the `Hooks`.

    It is itself the tap on the model. While hooks are attached, the model keeps it alive.
    """

    verb = ""  # The name of the short form, such as "capture", until it is entered.
    added_at: Line | None = None  # The line that added the hooks, until they are entered.
    may_have_fired = False
    # The patterns of these hooks, and the ids of all modules that ever had one of them. Not kept for short forms.
    asked: dict[Asked, None] | None = None
    hooked: set[int] | None = None
    hooks: Callable[[], object] = staticmethod(no_model)  # The `Hooks`, held weakly.
    # Weak references to the `Hooks` that call `_when_freed`. Empty if there is nothing left to do then.
    on_freed: tuple[weakref.ref[Any], ...] = ()
    sites: set[Site] | None = None  # The sites that these hooks capture, once somebody has asked for them.

    def __init__(self, model: nn.Module, session: Session) -> None:
        self.wrapped = model
        # If a model holds its own `Hooks`, they are copied with it, while the `__dict__` of the copy is still empty.
        self.module = model = unwrap(model) if model.__dict__ else model
        self.session = session
        session.model = weakref.ref(model)
        session.lifecycle = weakref.ref(self)
        self.taps: dict[Tap, Asked | None] = {}
        self.opened: list[OpenBlock] = []

    def add(self, taps: list[Tap], active: bool, brief: bool, asked: Iterable[Where] = ()) -> None:
        """Add taps, and activate them if `active`. The taps of a short form get their order when it is entered."""
        if brief and self.opened:
            raise HooklineError("this block is open already; add hooks before it is entered, or use hl.Hooks(model)")
        if not (active or brief) and not open_blocks.get().isdisjoint(self.opened):
            raise HooklineError(
                "hooks that are added inactive would not act in this block, which is open already; add them before it "
                "is entered, or make them with hl.Hooks(model), which acts at once"
            )
        group = None if brief else Asked(asked, len(taps))
        for tap in taps:
            self.taps[tap] = group
            if type(tap) is not HotTap:
                self._look_at(tap)
        if self.sites is not None:
            self.sites.update([tap.site for tap in taps if tap.record is not None])
        if group is None:
            return
        if self.asked is None or self.hooked is None:
            self.asked, self.hooked = {}, set()
        if taps:
            self.asked[group] = None
        self.hooked.update([id(tap.module) for tap in taps])
        for tap in taps:
            tap.order = next(_order)
        if any([tap.missing != RAISE for tap in taps]):
            self.parents = [module._modules for module in self.module.modules()]
            self.sizes = list(map(len, self.parents))
        if not active:
            return
        self.added_at = user_line()
        try:
            diagnose.warn_of_same_hook(taps)
            self.activate(taps)
        except BaseException:
            self.remove(taps)
            raise

    def _look_at(self, tap: Tap) -> None:
        """Note if a tap needs something to be done in every forward of the model."""
        if isinstance(tap.action, Stop):
            if not self.stops:
                self.stops = {}
            self.stops[tap] = None
        if tap.is_gradient:
            self.has_gradients = True
            self.changes_gradients |= not tap.action.observes
        self._look_at_calls((tap,))

    def _look_at_calls(self, taps: Iterable[Tap]) -> None:
        """Note how many forwards these taps need to know: those whose calls are kept."""
        for tap in taps:
            keeps_calls = _keeps_calls(tap)
            if tap.tokens or tap.action.with_call or keeps_calls:
                self.follows_tokens = True
            before = self.session.passed
            is_bounded = not isinstance(before, deque) or before.maxlen is not None
            if keeps_calls and is_bounded and tap.record is not None:
                kept, held = tap.record.keep, len(before or ()) if not isinstance(before, deque) else before.maxlen or 0
                self.session.passed = deque(before or (), maxlen=None if kept is None else max(kept, held))

    def is_inactive(self, record: Record) -> bool:
        """Return True if the hook that fills this record acts nowhere."""
        return any(tap.record is record and not (tap.active or tap.blocks) for tap in list(self.taps))

    def activate(self, taps: Iterable[Tap]) -> None:
        """Activate taps everywhere."""
        taps = list(taps)
        if not taps or any([tap.removed for tap in taps]):
            raise HooklineError(NO_HOOKS)
        self.may_have_fired = True
        for tap in taps:
            tap.active = True
        self._wire(taps)

    def deactivate(self, taps: Iterable[Tap]) -> None:
        """Pause taps everywhere, and in the blocks that are open here."""
        taps = list(taps)
        here = open_blocks.get()
        for tap in taps:
            tap.active = False
            tap.blocks -= here
        self._wire(taps)

    def remove(self, taps: Iterable[Tap]) -> None:
        """Remove taps for good. They leave `self.taps` last, so that `remove` can be repeated after a Ctrl-C."""
        taps = list(taps)
        for tap in taps:
            tap.active = False
            tap.blocks = NO_BLOCKS
            if tap.record is not None and tap.record.value is EMPTY and not tap.record.family:
                tap.record.explain(tap.record.reason or why.REMOVED)
        self._wire(taps)
        for tap in taps:
            tap.removed = True
            self.forget(tap)
        if self.follows_tokens:
            self.follows_tokens = False
            self._look_at_calls(list(self.taps))
            if isinstance(self.session.passed, deque) and not any([_keeps_calls(tap) for tap in list(self.taps)]):
                self.session.passed = tuple(self.session.passed)  # What was captured stays readable; no more comes.

    def forget(self, tap: Tap) -> None:
        """Forget a tap that was removed."""
        if self.sites is not None and tap.record is not None:
            self.sites.discard(tap.site)
        self.stops.pop(tap, None)
        self.everywhere.pop(tap, None)
        asked = self.taps.pop(tap, None)
        if asked is not None and self.asked is not None:
            asked.left -= 1
            if not asked.left:
                self.asked.pop(asked, None)

    def captured(self) -> set[Site]:
        """Return the sites that these hooks capture."""
        if self.sites is None:
            self.sites = {tap.site for tap in list(self.taps) if tap.record is not None}
        return self.sites

    def enter(self, taps: list[Tap], renew: bool) -> OpenBlock:
        """Open a block: these taps act here until it is left, and count calls from 0."""
        self.verb, self.added_at = "", None
        if not taps:
            raise HooklineError(NO_HOOKS)
        if is_traced_by_fx() or is_traced_now():
            refuse_opening()
        if self.opened or (is_dynamo_loaded() and has_compiled()):
            self._refuse_second_thread(taps)
        block = OpenBlock(taps, self.session, renew)
        token = frozenset((block,))
        before = not_left() if left_blocks else open_blocks.get()
        here = before | token
        try:
            self.opened.append(block)
            if self.has_gradients:
                block.unfollowed = [tap for tap in taps if not tap.fired and tap.is_gradient]
                block.grads = diagnose.gradients_of(self.module)
            if renew and not self.may_have_fired:  # No tap needs a reset. There may be thousands.
                for tap, order in zip(taps, _order):  # noqa: B905  # `_order` is infinite.
                    tap.blocks = token
                    tap.order = order
                self.may_have_fired = True
            else:
                self._reopen(block, token, renew)
            self.blocks = token if len(self.opened) == 1 else frozenset(self.opened)
            if not self.is_attached:
                self._begin_to_follow()
            attach([self, *taps], None if RESTING in here else here)
            block.opened = here, before
            open_blocks.set(here)
        except BaseException:
            self._close(block)
            raise
        return block

    def _refuse_second_thread(self, taps: list[Tap]) -> None:
        here = open_blocks.get()
        elsewhere = [block for block in self.opened if block not in here]
        if any(tap in taps for block in elsewhere for tap in block.taps if isinstance(tap.action, Save)):
            raise HooklineError(
                "these hooks are open on another thread or task, and captures would mix; make a Hooks for each"
            )
        if not has_compiled():
            return
        others = any([not tap.blocks <= here for tap in model_taps(self.module)])
        if others and is_any_compiled(self.wrapped):
            raise HooklineError(
                "a compiled graph acts for all threads, and another thread has a block open on this model"
            )

    def _reopen(self, block: OpenBlock, token: Blocks, renew: bool) -> None:
        """Let the taps of a block count from 0, and hide their earlier values while it is open."""
        if self.may_have_fired:
            self.session.restart()
        self.may_have_fired = True
        for tap in block.taps:
            tap.blocks = token if not tap.blocks else tap.blocks | token
            tap.count = 0
            tap.fired = False
            if renew:
                tap.order = next(_order)
            if tap.reached:
                tap.reached = False
            if tap.rows_left is not None:
                tap.rows_left = None
            if tap.problem or tap.ran is not None:
                tap.problem, tap.hint, tap.misses, tap.ran = "", "", 0, None
            if tap.record is not None and tap.record.keep != 1:
                tap.record.restart()
            if tap.record is not None and tap.record.value is not EMPTY and not tap.is_gradient:
                tap.record.explain(why.NOT_YET)
                block.hides_values = True

    def leave(self, block: OpenBlock, failed: type[BaseException] | None = None, over: bool = False) -> None:
        """Close a block, restore the earlier state, and report what did not fire."""
        try:
            messages = [] if failed is None and self._went_well(block) else self._explain(block, failed)
            self._close(block)
        except BaseException:
            self._close(block)  # Continues where a Ctrl-C stopped the first attempt.
            raise
        if over:
            self.session.over = why.BLOCK_OVER
        began, failures = block.session_before
        self.session.began = began
        self.session.failed += failures
        if failed is None:
            if offload.in_use:
                offload.flush()
            if messages:
                diagnose.speak(messages)

    def _went_well(self, block: OpenBlock) -> bool:
        """Return True if there is nothing to report about a block. False may also mean that it is not certain."""
        session = self.session
        if session.forwards == session.began or session.failed or session.missed or session.gave_up:
            return False
        if session.backward or block.unfollowed or self.parents or self.follows_tokens:
            return False
        for tap in block.taps:
            if not tap.fired or tap.shadow is None:
                return False
            if not tap.action.observes:
                if not is_at(tap.path, tap.module, self.module):
                    return False
            elif tap.siblings is not None and tap.siblings.get(tap.path.rpartition(".")[2]) is not tap.module:
                return False
        return True

    def _explain(self, block: OpenBlock, failed: type[BaseException] | None) -> list[Message]:
        """Record why sites of a block that ends did not fire, and return the messages about the block."""
        session, model = self.session, self.module
        since = session.forwards - session.began
        taps = [tap for tap in block.taps if tap.shadow is not None]
        messages: list[Message] = []
        if failed is not None or not since or session.failed or not all([tap.fired for tap in taps]):
            messages = diagnose.never_fired(taps, session, model, bool(self.stops), failed, block.skipped)
        if failed is not None:
            return []
        if block.unfollowed:
            messages += diagnose.forward_before_block(block.unfollowed, block.grads, session, model)
        if session.backward:
            messages += diagnose.cut_off(taps)
        if session.gave_up and since:
            messages += diagnose.ran_uncompiled(session, model)
        if session.missed:
            messages += diagnose.selected_nothing(taps)
        if self.follows_tokens:
            messages += diagnose.rows_left_out(taps)
        if since:
            messages += diagnose.replaced(taps, model)
            if self.parents and self.has_grown():
                messages += self._added_since()
        return messages

    def _close(self, block: OpenBlock) -> None:
        close_block(block)
        if block in self.opened:
            self.opened.remove(block)
        for tap in block.taps:
            tap.blocks = tap.blocks - {block} if self.opened else NO_BLOCKS
        is_over = not (self.opened or block.restores or self.active)  # The last block of a short form.
        if block.restores or block.hides_values:
            block.restore()
        if is_over:
            self.session.sequences = None
            if is_dynamo_loaded() and has_compiled():
                self._copy_out_of_graphs(block.taps)
            self.blocks = NO_BLOCKS
            self._unfollow(block.taps)
            self.on_freed = ()
        else:
            self._wire(block.taps)
        block.taps = []  # Other contexts, and taps that remember their blocks, may still hold this block.

    def _wire(self, taps: list[Tap]) -> None:
        """Attach the taps that act somewhere, detach the others."""
        if has_compiled():
            self._copy_out_of_graphs(taps)
        if self.everywhere or any([tap.active for tap in taps]):
            self.follow_everywhere(taps)
        self.active = bool(self.everywhere)
        acting = [tap for tap in taps if tap.active or tap.blocks]
        if acting:
            self._follow(acting)
        if len(acting) < len(taps):
            detach([tap for tap in taps if not (tap.active or tap.blocks)])
        if not acting:
            self._follow()

    def _copy_out_of_graphs(self, taps: list[Tap]) -> None:
        """Copy the values that compiled graphs have stored: the next run may reuse their memory."""
        for tap in taps:
            if tap.record is not None and tap.record.is_traced:
                tap.record.copy_out_of_graph()

    def _follow(self, taps: Iterable[Tap] = ()) -> None:
        """Follow the model's forwards while any tap acts, and attach these taps."""
        self.blocks = frozenset(self.opened)
        if self.active or self.blocks:
            if not self.is_attached:
                self._begin_to_follow()
            attach([self, *taps])
        else:
            self._unfollow()

    def _begin_to_follow(self) -> None:
        self.is_attached = True
        _living[id(self)] = self.session.lifecycle
        if not self.on_freed and (hooks := self.hooks()) is not None:
            self.notice_end_of(hooks)
        _follow_process()

    def detach_all(self) -> None:
        """Detach all taps from the model, whatever state they are in."""
        self._unfollow(list(self.taps))

    def _unfollow(self, taps: Iterable[Tap] = ()) -> None:
        """Detach the taps, then the tap that watches the model's forwards, which was attached first."""
        self.is_attached = False
        detach([*taps, self], self.session)
        _living.pop(id(self), None)

    def warn_of_new(self) -> None:
        """Warn about new modules that match a pattern of these hooks but have none."""
        diagnose.speak(self._added_since())

    def _added_since(self) -> list[Message]:
        """Return messages about new modules that match a pattern of these hooks but have none."""
        self.sizes = list(map(len, self.parents))
        places = [where for asked in list(self.asked or ()) for where in asked.where]
        return diagnose.added_since(places, self.hooked or set(), self.wrapped)

    def notice_end_of(self, hooks: object) -> None:
        """Let `_when_freed` be called when nothing holds the `Hooks` any more.

        A `__del__` would not do. While hooks are attached, the model holds the lifecycle; and a Ctrl-C in the `__del__`
        of the `Hooks` would keep the `Hooks` alive. The call comes twice: if a Ctrl-C comes in the first, Python
        ignores it, and the second finishes the work.
        """
        self.hooks = weakref.ref(hooks)
        self.on_freed = weakref.ref(hooks, self._when_freed), weakref.ref(hooks, self._when_freed)

    def _when_freed(self, _end: object, _is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # `_is_finalizing` is a default argument because modules are already empty when Python exits.
        if self.on_freed and not _is_finalizing():
            self.drop()

    def __del__(self, _is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # The garbage collector does not call `_when_freed` if it frees this object with the `Hooks`.
        if (self.is_attached or self.verb) and not _is_finalizing():
            self.drop()

    def drop(self) -> None:
        """Detach all taps, because nothing holds the `Hooks` any more."""
        # Python closes a generator that nobody holds, and with it the block: that is no mistake.
        was_open = bool(self.opened) and self.session.generator is None
        for block in self.opened:
            close_block(block)
            block.taps, block.before = [], []  # Another context may still hold the block.
        self.opened = []
        self.session.over = self.session.over or why.HOOKS_GONE
        self.detach_all()
        self.on_freed = ()  # These refer to this lifecycle: the cycle would keep it alive.
        self.warn_of_unused()
        self.verb = ""
        if was_open:
            warn("hooks were dropped while their block was open", ResourceWarning)

    def warn_of_unused(self) -> None:
        """Warn about hooks that did nothing: they were never entered, or freed before the model ran."""
        if self.session.forked or not self.taps:
            return
        if self.verb and not self.may_have_fired:
            diagnose.warn_of_unentered(list(self.taps), self.verb, self.added_at)
        elif self.added_at is not None and self.everywhere and not self.session.any_forward:
            diagnose.warn_of_unkept(list(self.taps), self.session, self.added_at)


def _keeps_calls(tap: Tap) -> bool:
    """Return True if a tap captures several calls of values."""
    return tap.record is not None and not tap.is_gradient and tap.record.keep != 1


@cache
def look_at_exit() -> None:
    """When Python exits, warn about short forms that a variable still holds but that were never entered."""
    atexit.register(_warn_of_waiting, os.getpid())


def _warn_of_waiting(process: int) -> None:
    if os.getpid() != process or hasattr(sys, "last_value"):
        return  # In a fork, the parent may still enter them. After an error, the program had no chance to.
    # The garbage collector finds them once, at exit. Keeping a list would cost time in every block.
    for lifecycle in [one for one in gc.get_objects() if type(one) is Lifecycle]:
        if lifecycle.verb:
            lifecycle.warn_of_unused()
            lifecycle.verb = ""


def yielding(frame: FrameType) -> Generating | None:
    """Return the generator that a frame belongs to; None in a context manager or fixture, whose `yield` is fine."""
    # With `yield from`, the outer generator runs the inner one: look for the first frame that is not a generator.
    driver = next((one for one in frames(frame) if not one.f_code.co_flags & GENERATOR), None)
    name = driver.f_globals.get("__name__", "") if driver is not None else ""
    return None if name.split(".")[0] in _DRIVERS else Generating(id(frame), frame.f_code, current_runner())


def lifecycles() -> list[Lifecycle]:
    """Return every lifecycle that has hooks on a model now."""
    return [lifecycle for reference in list(_living.values()) if (lifecycle := reference()) is not None]


def leave_all() -> None:
    """Detach every hook in a forked process: the hooks belong to its parent."""
    forget_locks()
    for lifecycle in lifecycles():
        lifecycle.session.forked = True
        lifecycle.detach_all()


@cache
def _follow_process() -> None:
    """Register callbacks for garbage collection and forks: with the first hooks, not when hookline is imported."""
    follow_collector()
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=leave_all)
