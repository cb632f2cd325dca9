"""The forwards of a whole model: `run_model_forward` runs one, counts it, and ends it early once stops are reached.

This file also notices modules that were replaced, wrapped or added since the hooks were made.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from itertools import compress
from types import MethodType
from typing import Any

from torch import nn

from hookline import _why_nothing_passed as why
from hookline._cache.record import INSIDE_TRANSFORM, Record
from hookline._engine import parameter_operations, sequences
from hookline._engine.action import NOTHING, Observer, Skip
from hookline._engine.capture_action import Save
from hookline._engine.gradients import following_gradients
from hookline._engine.stop import STOPPED, run_until
from hookline._engine.tap import IGNORE, NO_BLOCKS, RAISE, Placement, Tap
from hookline._open_blocks import Blocks, current_runner, resting
from hookline._sites.tree import Children, Names, leads_to, replaced_by, way_to
from hookline._torch import (
    REHEARSAL,
    current_transform,
    frame_at,
    frames,
    has_given_up,
    is_dynamo_loaded,
    is_running,
    microbatch,
    reshard_after_stop,
)
from hookline._values.copy_or_share import RunningForward, current_forward
from hookline._values.nested import Arguments, leaves
from hookline.errors import HooklineError, StopForward, add_note, warn

# The errors that a model's code raises for a value that does not fit. Subclasses, such as torch's OutOfMemoryError, are
# raised for other reasons.
_OF_MODELS = (RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError)
_UNFOLLOWED = nullcontext()  # For a forward without hooks at gradients.
_is, _get = operator.is_, dict.get
Links = tuple[tuple[list[dict[str, Any]], list[str]], list[Any]]
UNKNOWN: Links = ([{}], [""]), [object()]  # Never matches, so that everything is looked up again.
NO_TAPS: dict[Tap, Any] = {}  # Never written to: a dict of its own replaces it before the first entry.
Covered = tuple["ModelTap", Tap, Any, bool]  # A tap whose shadow was replaced, with its `seen` and `fired`.


class ModelTap(Tap):
    """The tap on the model itself, for all hooks of one `Hooks`. It follows the model's forwards and changes none.

    Its only subclass is `Lifecycle`: they are two classes because the engine may not import `_hooks`. Every block makes
    one, so its attributes have defaults and no `__init__`.
    """

    __slots__ = ()

    action = Observer()
    path = ""
    missing = IGNORE
    record: Record | None = None
    siblings: Children | None = None
    acts_in: Blocks | None = None
    shadow: Placement | MethodType | None = None
    active = fired = False
    blocks = NO_BLOCKS
    order = 0
    taps: dict[Tap, Any]  # All taps of the `Hooks`, in order.
    stops: dict[Tap, None] = NO_TAPS  # All of these have to fire before the forward may be ended early.
    everywhere: dict[Tap, None] = NO_TAPS  # The taps that act everywhere, not only in a block.
    # The wrapper that replaced a shadow, once it is known whether the wrapper calls the shadow.
    known_wrappers: dict[Tap, Any] = NO_TAPS
    is_attached = False  # Whether hooks are attached to the model.
    has_gradients = False
    changes_gradients = False
    follows_tokens = False  # Whether any of the taps asks which tokens pass.
    # For the taps that act everywhere: the dicts and keys that hold their modules and shadows, and the objects last
    # found there.
    links, held = UNKNOWN
    linked: Sequence[Tap | None] = ()  # For each link: the tap of a shadow, None for a module.
    # If there are patterns: the children of each module, and in `sizes` their last known number.
    parents: Sequence[Children] = ()
    sizes: Sequence[int] = ()

    def warn_of_new(self) -> None:
        """Warn about new modules that match a pattern of these hooks but have none."""
        raise NotImplementedError

    def follow_everywhere(self, changed: Iterable[Tap]) -> None:
        """Update the taps that act everywhere. Their modules and shadows are checked before each forward."""
        for tap in changed:
            if not tap.active:
                self.everywhere.pop(tap, None)
                self.known_wrappers.pop(tap, None)
            elif tap not in self.everywhere:
                if not self.everywhere:
                    self.everywhere, self.known_wrappers = {}, {}
                self.everywhere[tap] = None
                self.links, self.held = UNKNOWN
        if not self.everywhere:
            self.links, self.held = UNKNOWN

    def is_linked(self) -> bool:
        """Return True if every module and shadow is where it was. Called before each forward, so it runs in C alone."""
        return all(map(_is, map(_get, *self.links), self.held))

    def is_relinked(self) -> bool:
        """Return True if the only changes are hookline's own shadows, and remember the new ones."""
        links = self.links
        if links is UNKNOWN[0]:
            return False
        held = list(map(_get, *links))
        changed = compress(self.linked, map(operator.is_not, held, self.held))
        if any([tap is None or tap.is_covered for tap in changed]):
            return False
        if links is self.links:  # Else another thread has set new links.
            self.held = held
        return True

    def link(self, model: nn.Module) -> tuple[list[Tap], list[Tap]]:
        """Note where everything is. Return taps whose module has left the model, and taps whose shadow was replaced."""
        taps = list(self.everywhere)  # Another thread may add to them meanwhile.
        lost = departed(taps, model)
        links: list[Any] = [(*link, None) for path in {tap.path for tap in taps} for link in way_to(path, model)]
        shadowed = [tap for tap in taps if tap.shadow is not None and not tap.holders]
        links += [(tap.module.__dict__, tap.method, tap.module.__dict__.get(tap.method), tap) for tap in shadowed]
        each = {(id(link[0]), link[1]): link for link in links}.values()  # Paths share their first links.
        holders, keys, held, self.linked = map(list, zip(*each, strict=True)) if each else ([], [], [], [])
        self.links, self.held = (holders, keys), held
        covered = [tap for tap in shadowed if tap.is_covered and tap not in lost]
        return lost, [tap for tap in covered if self.known_wrappers.get(tap) is not tap.module.__dict__.get(tap.method)]

    def has_grown(self) -> bool:
        """Return True if a module has gained children since the hooks were made, or since the last warning."""
        sizes = list(map(len, self.parents))
        return sizes != self.sizes and any(map(operator.gt, sizes, self.sizes))

    def left(self, opened: Blocks) -> set[Tap]:
        """Return the stops that a forward has to reach here, without those at a '#n' that has passed already."""
        stops = [stop for stop in list(self.stops) if stop.acts(opened)]
        return {stop for stop in stops if not (stop.fired and (stop.tokens or stop.site.call is not None))}


def departed(taps: Iterable[Tap], model: nn.Module) -> list[Tap]:
    """Return the taps whose module was replaced where it was found, or is no longer in the model."""
    missing = [tap for tap in taps if tap.siblings is not None and not leads_to(tap.module, tap.path, model)]
    there = set(map(id, model.modules())) if missing else set()
    return [
        tap
        for tap in missing
        if id(tap.module) not in there or replaced_by(tap.path, tap.module, tap.siblings) is not None
    ]


def acting_here(around: Iterable[ModelTap], opened: Blocks) -> list[ModelTap]:
    """Return the taps that follow a forward that runs here. Note for the others that it ran outside their blocks."""
    found = []
    for tap in around:
        if tap.acts(opened):
            found.append(tap)
        elif tap.blocks:
            tap.pass_by(opened)
    return found


def run_model_forward(
    around: Iterable[ModelTap], opened: Blocks, model: nn.Module, passed: Arguments, run: Callable[[], Any]
) -> Any:
    """Run the forward of a model for the hooks that act here; `run` calls the model itself."""
    following = acting_here(around, opened)
    if not following:
        return run()
    forward = RunningForward(model, *passed)
    token = current_forward.set(forward)
    try:
        for tap in following:
            if tap.follows_tokens and microbatch() != REHEARSAL:
                sequences.begin(tap.session, forward)
        output = _run_followed(following, opened, run)
    finally:
        current_forward.reset(token)
    return parameter_operations.plain(output) if parameter_operations.in_use else output


def _run_followed(following: list[ModelTap], opened: Blocks, run: Callable[[], Any]) -> Any:
    """Run and count a forward for the taps that follow it. End it early when all their stops are reached."""
    waiting: set[Tap] = set()
    has_gradients = False
    covered: list[Covered] = []
    chunk = microbatch()
    if chunk == REHEARSAL:
        with resting():
            return run()
    for tap in following:
        if current_transform() is not None:
            _refuse_transforms(tap)
        tap.session.forwards += not chunk or not tap.session.since  # The microbatches of one step are one forward.
        if is_dynamo_loaded() and has_given_up():
            tap.session.gave_up = True
        if tap.stops:
            waiting |= tap.left(opened)
            _refuse_stage(chunk, waiting)
        if tap.everywhere and not tap.is_linked() and not tap.is_relinked():
            covered += _look_through(tap)
        if tap.parents and tap.active and tap.has_grown() and tap.is_attached:
            tap.warn_of_new()
        has_gradients = has_gradients or tap.has_gradients
        if tap.blocks:
            tap.session.begin_forward()
            if tap.session.generator is not None:
                warn_of_generator(tap)
    try:
        with following_gradients() if has_gradients else _UNFOLLOWED:
            output = run_until(waiting, run, following[0].module) if waiting else run()
    except BaseException as error:
        for tap in following:
            note_failure(tap, error)
        raise
    finally:
        for tap in following:
            tap.session.running_on = 0
        if covered:
            covered = _passed_by(covered)
    if output is not STOPPED:
        if has_gradients:
            _note_backward(output, following)
        if covered:
            _warn_of_covered(covered)
        return output
    note_stop(following)
    return None


def note_stop(following: Sequence[ModelTap]) -> None:
    """Note that a forward was ended early."""
    for tap in following:
        tap.session.stopped = True
    if is_running():
        reshard_after_stop(following[0].module, is_over=False)


def note_failure(model_tap: ModelTap, error: BaseException) -> None:
    """Note that a forward ends with an exception, or with the signal that ends a forward around it early."""
    if isinstance(error, StopForward):
        model_tap.session.stopped = True
        return
    model_tap.session.fail(error)
    # The values in place of the results of skipped modules may not fit.
    skips = [
        (tap.site, tap.action.value)
        for tap in list(model_tap.taps)
        if isinstance(tap.action, Skip) and tap.skipped_in == tap.session.forwards
    ]
    if not skips or type(error) not in _OF_MODELS:
        return
    (site, value), more = skips[0], f" and {len(skips) - 1} more" if len(skips) > 1 else ""
    what = "its first argument" if value is NOTHING else "the given value"
    advice = f"if that does not fit, give one that does: skip={{'{site}': value}}"
    add_note(error, f"'{site}'{more} was skipped, and {what} was used as its result; {advice}")


def _note_backward(output: Any, following: list[ModelTap]) -> None:
    """Note when a backward goes through the model's output, in the sessions that change gradients."""
    changing = [tap.session for tap in following if tap.changes_gradients]
    sessions = [(session, session.forwards) for session in changing]
    if not sessions or current_transform() is not None:
        return

    def arrived(_: Any) -> None:
        for session, forward in sessions:
            session.backward = session.backward or forward > session.began  # Else the forward ran in an earlier block.

    for tensor in leaves(output):
        if tensor.grad_fn is not None:
            tensor.grad_fn.register_prehook(arrived)


def _refuse_stage(chunk: int | None, waiting: Iterable[Tap]) -> None:
    """Raise if the forward of a pipeline stage is to end early: the stage has to send its output on."""
    for tap in waiting if chunk is not None else ():
        raise HooklineError(f"'{tap.site}': a stage of a pipeline has to run to its end; leave stop=True out")


def _refuse_transforms(model_tap: ModelTap) -> None:
    """Raise if there are captures: values of a torch.func transform are gone after it."""
    for tap in list(model_tap.taps):
        if isinstance(tap.action, Save):
            raise HooklineError(f"'{tap.site}': {INSIDE_TRANSFORM}")


def _look_through(model_tap: ModelTap) -> list[Covered]:
    """Warn about active hooks whose module has left its place. Return the taps whose shadow may be bypassed."""
    model = model_tap.module
    lost, covered = model_tap.link(model)
    names = Names(model)
    places = {id(module): name for name, module in names.once()} if lost else {}
    found: list[why.LostModule] = []
    for tap in lost:
        tap.siblings = None
        now = names.find(tap.path)
        if now is not None or tap.exact or tap.missing == RAISE:  # A pattern may lose a module without a warning.
            found.append(why.LostModule(tap.site, now, places.get(id(tap.module), "")))
        if tap.record is not None:
            tap.record.clear()
            tap.record.explain(why.why_replaced(tap.site, now))
    for text in why.hooks_left_behind(found):
        warn(text)
    if covered:
        model_tap.links, model_tap.held = UNKNOWN  # Looks again next time, in case this forward fails or is stopped.
    doubtful = [(model_tap, tap, tap.seen, tap.fired) for tap in covered]
    for tap in covered:
        tap.fired = False  # A compiled graph counts nothing, but sets this when a value passes.
    return doubtful


def _passed_by(covered: list[Covered]) -> list[Covered]:
    """Return the taps that saw nothing in this forward: the wrapper over their shadow does not call it."""
    found = []
    for one in covered:
        model_tap, tap, seen, fired = one
        if tap.fired or tap.seen != seen:
            model_tap.known_wrappers[tap] = tap.module.__dict__.get(tap.method)
        else:
            found.append(one)
        tap.fired = tap.fired or fired
    return found


def _warn_of_covered(covered: list[Covered]) -> None:
    """Warn about hooks that saw nothing, because somebody replaced their shadow on the module."""
    for model_tap, tap, *_ in covered:
        model_tap.known_wrappers[tap] = tap.module.__dict__.get(tap.method)
    for _, tap, *_ in covered:
        if tap.active and tap.is_covered and tap.missing != IGNORE:
            warn(f"nothing passed '{tap.site}': {why.why_covered(tap)}")


def warn_of_generator(tap: Tap) -> None:
    """Warn if a generator was suspended inside a block: until it continues, the block acts on everything."""
    generator = tap.session.generator
    if generator is None or generator.runner != current_runner():
        return  # The generator may wait for this thread or task, which runs the model for it.
    if not any((id(frame), frame.f_code) == generator[:2] for frame in frames(frame_at(1))):
        tap.session.generator = None  # Warn only once.
        warn(
            f"{type(tap.module).__name__} runs under a block of a generator that has yielded inside it: the block acts "
            "on its consumer too; leave the block before `yield`"
        )
