"""Errors and warnings for a block that ends, for unused hooks, and for a hook that is added twice.

`never_fired` and the functions next to it check the hooks of a block that ends and return `Message`s; `speak` raises or
warns. The texts are in `_why_nothing_passed.py`.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

from hookline import _why_nothing_passed as why
from hookline._engine.action import Skip, Stop
from hookline._engine.attach import same_taps, taps_on
from hookline._engine.model_forward import departed
from hookline._engine.tap import IGNORE, RAISE, TOGETHER, Tap
from hookline._open_blocks import Session
from hookline._sites.resolve import Where, find_places
from hookline._sites.tree import Names
from hookline._torch import Line, is_given_up, is_thrown_away, line_text, most_graphs, version_of
from hookline.errors import HooklineError, NeverFired, warn

Gradients = dict[int, tuple[Callable[[], Any], int]]  # id of a gradient -> (weak reference, version).


class Message(NamedTuple):
    """A message for the end of a block: an error if it is certain, otherwise a warning."""

    is_certain: bool
    text: str
    has_remedy: bool = False  # Such a message is shown first. Of the others, only the number is shown.


def speak(messages: list[Message]) -> None:
    """Raise the first certain message, or warn with the first one if none is certain. The others are only counted."""
    messages.sort(key=lambda message: not message.has_remedy)
    certain = [message.text for message in messages if message.is_certain]
    if certain:
        more = f" (and {len(certain) - 1} more)" if len(certain) > 1 else ""
        raise NeverFired(certain[0] + more)
    if messages:
        more = f" (and {len(messages) - 1} more that the pattern matches)" if len(messages) > 1 else ""
        warn(messages[0].text + more)


def never_fired(
    taps: list[Tap],
    session: Session,
    model: nn.Module,
    has_stops: bool,
    failed: type[BaseException] | None,
    skipped: frozenset[int],
) -> list[Message]:
    """Record why sites did not fire. Return the messages: none if the model never ran or something failed."""
    missing = [tap for tap in taps if not tap.fired]
    called = [not tap.is_hot and (tap.count or tap.ran is not None) for tap in missing]
    was_called = len(missing) < len(taps) or any(called)
    ran = session.any_forward or (not session.failed and was_called)
    messages = []
    if not ran and failed is None and not session.failed:
        if session.rested or session.recomputed:
            return _passed_over(missing, why.RESTED if session.rested else why.RECOMPUTED)
        # The model did not run, so there is nothing to complain about.
        return _passed_over(missing, f"was passed over: {why.ran_elsewhere(model)}") if session.others.ran else []
    if has_stops and ran and not session.since:
        messages.append(Message(False, why.nothing_stopped(model)))
    fired = {tap.group for tap in taps if tap.fired and tap.group is not None} if missing else set()
    for tap in missing:
        if tap.function == "*" and tap.ran is not None and _ran_in_another(tap, taps):
            continue  # The module ran, but called no function; others that the pattern matches did.
        if failed is not None or session.failed:
            text = why.why_failed(tap.site, failed)
        elif ran:
            text = _skipped_above(tap, model, skipped) or why.why_never_fired(tap, model)
        else:
            continue
        if tap.record is not None:
            tap.record.explain(text)
        is_certain = tap.missing == RAISE or (tap.missing == TOGETHER and tap.group not in fired)
        has_warned = tap.has_warned and not is_certain
        if not (tap.missing == IGNORE or has_warned or _needs_no_message(tap, missing) or _ran_in_another(tap, taps)):
            messages.append(Message(is_certain, text, why.fused_instead(tap) != ""))
    return messages if ran else []


def _passed_over(missing: list[Tap], reason: str) -> list[Message]:
    """Record why these hooks were passed over, and return the messages."""
    for tap in missing:
        if tap.record is not None:
            tap.record.explain(f"'{tap.site}' {reason}")
    said = [tap for tap in missing if tap.missing != IGNORE]
    return [Message(tap.missing in (RAISE, TOGETHER), f"'{tap.site}' {reason}") for tap in said]


def _needs_no_message(tap: Tap, missing: list[Tap]) -> bool:
    """Return True for a stop that needs no message: it came from a pattern, or a capture at its site is reported."""
    if not isinstance(tap.action, Stop):
        return False
    return tap.missing != RAISE or any(one.site == tap.site for one in missing if not isinstance(one.action, Stop))


def _ran_in_another(tap: Tap, taps: list[Tap]) -> bool:
    """Return True if the function ran in another module that the same pattern matches, as with `**/softmax`."""
    if tap.exact or not tap.is_inside:
        return False
    return any(one.fired and one.action is tap.action and one.function == tap.function for one in taps)


def _skipped_above(tap: Tap, model: nn.Module, skipped: frozenset[int]) -> str:
    """Return the message that a module was not called because a parent is skipped, or was skipped in this block."""
    names = Names(model)
    parts = tap.path.split(".")
    last = len(parts) + (tap.is_inside or tap.site.method != "")  # For a function or method, its module counts as well.
    for above in (".".join(parts[:length]) for length in range(1, last)):
        module = names.find(above)
        if module is None:
            continue
        skips = [one for one in taps_on(module) if isinstance(one.action, Skip) and not one.site.member]
        if skips or id(module) in skipped:
            return why.why_skipped(tap.site, above)
    return ""


def gradients_of(model: nn.Module) -> Gradients:
    """Return the gradients of a model's parameters, held weakly."""
    grads = [one.grad for _, _, one in Names(model).tensors() if one is not None and one.is_leaf]
    return {id(grad): (weakref.ref(grad), version_of(grad)) for grad in grads if grad is not None}


def forward_before_block(
    unfollowed: list[Tap], before: Gradients | None, session: Session, model: nn.Module
) -> list[Message]:
    """Return messages about gradients that were not followed because only the backward ran in the block."""
    missing, before = [tap for tap in unfollowed if not tap.fired], before or {}
    if session.any_forward or session.failed or session.others.ran or session.rested:
        return []
    now = gradients_of(model) if missing else {}
    if any([key not in before or before[key][0]() is None for key in now]):
        return _passed_over(missing, why.FORWARD_BEFORE)
    if any([now[key][1] != before[key][1] for key in now]):  # A backward added to them, or they were clipped.
        return [Message(False, f"'{tap.site}' {why.GRADIENTS_WRITTEN}") for tap in missing if tap.missing != IGNORE]
    return []


def cut_off(taps: list[Tap]) -> list[Message]:
    """Return messages about gradient edits that got no gradient, though a backward went through the model's output."""
    changes = [tap for tap in taps if not tap.action.observes and tap.is_gradient]
    found = [tap for tap in changes if tap.fired and not tap.reached and tap.missing != IGNORE]
    return [Message(False, f"'{tap.site}' {why.CUT_OFF}") for tap in found]


def ran_uncompiled(session: Session, model: nn.Module) -> list[Message]:
    """Return a message if a compiled model ran uncompiled because torch compiles no further graph of it."""
    reason = f"torch makes at most {most_graphs()} graphs of one function, and each set of hooks takes one"
    advice = "raise torch._dynamo.config.recompile_limit, or compile the blocks of the model instead of the whole"
    return [Message(False, f"{type(model).__name__} ran uncompiled: {reason}; {advice}")]


def selected_nothing(taps: list[Tap]) -> list[Message]:
    """Return messages about hooks whose subscripts selected nothing in some calls."""
    found = [tap for tap in taps if tap.fired and tap.misses and tap.missing != IGNORE]
    return [
        Message(False, why.selected_nothing(tap.site, tap.problem, tap.hint, tap.misses, tap.count)) for tap in found
    ]


def rows_left_out(taps: list[Tap]) -> list[Message]:
    """Return messages about changes of tokens that were named for each row and did not pass in some rows."""
    found = [tap for tap in taps if tap.fired and tap.rows_left and tap.missing != IGNORE]
    return [
        Message(False, why.rows_left_out(tap.site, sorted({row for row, _ in tap.rows_left or ()}))) for tap in found
    ]


def replaced(taps: list[Tap], model: nn.Module) -> list[Message]:
    """Return messages about taps whose module was replaced, or wrapped in another, while the block was open."""
    changes = [tap for tap in taps if not tap.action.observes]
    # If only a parent of a captured module was replaced, the captured value is still right.
    captures = [(tap, tap.siblings) for tap in taps if tap.action.observes and tap.siblings is not None]
    moved = [tap for tap, held in captures if held.get(tap.path.rpartition(".")[2]) is not tap.module]
    doubtful = changes + moved
    if not doubtful:
        return []
    messages, names = [], Names(model)
    for tap in departed(doubtful, model):
        now = names.find(tap.path)
        if now is not None and tap.missing != IGNORE:
            places = [name for name in names.of(tap.module) if not name.startswith("<")]
            messages.append(Message(tap.missing == RAISE, why.replaced_while_hooked(tap.site, now, places)))
    return messages


def added_since(asked: list[Where], hooked: set[int], model: nn.Module) -> list[Message]:
    """Return messages about modules that a pattern matches now but that were added after its hooks."""
    try:
        new = [place.site for place in find_places(model, asked) if id(place.module) not in hooked]
    except HooklineError:  # The pattern matches nothing any more.
        return []
    return [Message(False, f"'{site}' {why.ADDED}") for site in new]


def warn_of_unentered(taps: list[Tap], verb: str, made_at: Line | None) -> None:
    """Warn about a short form that was never entered."""
    warn(why.never_entered(_where(taps), verb, "" if made_at is None else line_text(made_at)))


def warn_of_unkept(taps: list[Tap], session: Session, made_at: Line) -> None:
    """Warn about hooks without a `with` block that were freed before the model ran because no variable held them."""
    if all([tap.fired or tap.missing == IGNORE for tap in taps]):
        return
    if is_thrown_away(made_at):
        warn(why.held_by_nothing(_where(taps)))
        return
    changes = any([tap.active and not tap.action.observes for tap in taps])
    has_run = session.forwards or any([tap.fired for tap in taps])
    if changes and not has_run and not is_given_up() and sys.exc_info()[1] is None:
        warn(why.gone_too_early(_where(taps), line_text(made_at)))


def _where(taps: list[Tap]) -> str:
    first, *others = taps
    return f"'{first.site}' and {len(others)} more" if others else f"'{first.site}'"


def warn_of_same_hook(taps: list[Tap]) -> None:
    """Warn about a second hook that does the same at the same place, e.g. after running a notebook cell twice."""
    for tap in taps:
        is_watched = tap.holders or tap.method in tap.module.__dict__
        for other in same_taps(tap) if is_watched else ():
            is_of_others = other.session is not tap.session
            if other.active and (is_of_others or (other not in taps and other.name == tap.name)):
                whose = " from another Hooks" if is_of_others else ""
                warn(
                    f"'{tap.site}' has the same {tap.action.kind} hook{whose} already; "
                    "hl.attached(model) lists all hooks, hl.clear(model) removes hookline's"
                )
                return
