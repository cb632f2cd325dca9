"""A second look: one module run again to see which function in it made a bad value, or a whole forward, waited for."""

from __future__ import annotations

import contextvars
import math
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hookline.actions import Apply, Call, Set, Skip
from hookline.context import open_blocks
from hookline.copies import share
from hookline.errors import BadValue
from hookline.listing import line_of
from hookline.members import method_names
from hookline.ranks import is_running
from hookline.records import Session
from hookline.sites import Site
from hookline.stats import numbers_of_pieces
from hookline.tree import Names, is_scripted, unwrap
from hookline.trial import left_as_found, observed, undisturbed
from hookline.values import describe, leaves
from hookline.watching.checks import Finding, Rule, checkable, examine, numbers_in, pieces
from hookline.wiring.modules import attached_to
from hookline.wiring.taps import Tap


class Inside(NamedTuple):
    """The first function inside a forward that gave something bad."""

    site: Site
    line: str
    inputs: list[str]


class First:
    """An action that notes the first bad value that passes."""

    kind = "watch"
    observes = True
    gathering = None

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.found: Inside | None = None

    def __call__(self, value: Any, call: Call, _is_whole: bool) -> Any:
        """Look at a value."""
        if self.found is None and any(examine(plain, self.rule) is not None for plain in checkable(value)):
            given = [*call.args, *call.kwargs.values()]
            inputs = [_described(one) for tensor in given for one in leaves(tensor)]
            self.found = Inside(call.site, line_of(sys._getframe(1)), inputs[:4])
        return value


class Origin(NamedTuple):
    """Where a bad value was made that came in with the arguments of a module, as the calls that are running tell it."""

    entered: Call  # The outermost call that it came in with.
    around: Call | None  # The call around that one, in which it was made; None if no module is around it.
    is_sure: bool = True  # Whether that one was given nothing bad: what is written into may have been bad before.


def origin(model: nn.Module, call: Call, calls: list[Call]) -> Origin | None:
    """Return where something bad that went into a call was made; None if nothing bad went into it."""
    if not _bad_arguments(call):
        return None
    paths = {id(module): name for name, module in model.named_modules()}
    entered = call
    for one in calls:
        is_wrapper = id(one.module) not in paths and unwrap(one.module) is model
        if is_wrapper or (one.module is entered.module and one.site.member == entered.site.member):
            continue
        one = one._replace(site=Site(paths.get(id(one.module), ""), member=one.site.member))
        given = _bad_arguments(one)
        if all(map(_is_written, given)):
            return Origin(entered, one, not given)
        entered = one
    return Origin(entered, None)


def changes(call: Call, origin: Origin | None) -> list[str]:
    """Name the hooks that have changed something where a bad value was made."""
    came_in = origin is not None and origin.around is None  # Then only a hook on the arguments can have made it.
    made_in = call if origin is None else origin.around or origin.entered
    modules = [made_in.module] if came_in else list(made_in.module.modules())
    here, taps = open_blocks.get(), [tap for module in modules for tap in attached_to(module)]
    taps = [tap for tap in taps if isinstance(tap.action, (Set, Apply, Skip)) and tap.fired and tap.acts(here)]
    ports = ("input", "inputs") if came_in else ("input", "inputs", "output", "param")
    return list(dict.fromkeys(f"{tap.action.kind} at '{tap.site}'" for tap in taps if tap.site.port in ports))


def _bad_arguments(call: Call) -> list[Tensor]:
    """Return the arguments of a call that are bad now; -Inf alone is a mask."""
    given = leaves((call.args, dict(call.kwargs)))
    return [one for one in given if any(examine(plain, Rule(below=False)) is not None for plain in checkable(one))]


def _is_written(tensor: Tensor) -> bool:
    """Whether somebody has written into a tensor, so that it may not have been bad when it was given."""
    return not tensor.is_inference() and tensor._version > 0


def method_around(model: nn.Module) -> Site | None:
    """Return the method of a module in which a part of the model is called; None if a forward is around that."""
    paths = {id(module): name for name, module in model.named_modules()}
    found: Site | None = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        owner = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if isinstance(owner, nn.Module) and id(owner) in paths:
            is_method = code.co_name in method_names(owner)
            found = Site(paths[id(owner)], member=f"{code.co_name}()") if is_method else None
        frame = frame.f_back
    return found


def inside(model: nn.Module, call: Call, rule: Rule, finding: Finding) -> Inside | None:
    """Run one call again, and return the first function that gives something bad, in the module or in its parts."""
    if is_running() or torch.compiler.is_compiling():
        return None  # Others would have to take part.
    below = not finding.nan and finding.value == -math.inf  # Masks are full of -Inf: it is seen only if it was found.
    first, session = First(rule._replace(below=below)), Session()
    parts = [(name, part) for name, part in Names(call.module).once() if not is_scripted(part)]
    sites = [(Site(".".join(filter(None, (call.site.path, name))), member="/*"), part) for name, part in parts]
    taps = [Tap(site, part, first, session, False, "") for site, part in sites]  # type: ignore[arg-type]
    try:
        with observed(model, taps), torch.no_grad():
            run = getattr(call.module, call.site.method) if call.site.method else call.module
            run(*share(call.args), **share(dict(call.kwargs)))
    except Exception:
        return first.found
    return first.found


class Arguments(NamedTuple):
    """What a forward of the model began with, to run it again."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    random: list[Tensor]
    autocast: list[tuple[str, bool, torch.dtype]]

    @classmethod
    def of(cls, call: Call) -> Arguments:
        """Note what is needed to run a forward again: references, and the state of the random numbers."""
        devices = sorted({tensor.device.index for tensor in leaves((call.args, dict(call.kwargs))) if tensor.is_cuda})
        random = [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in devices)]
        kinds = ("cpu", "cuda")
        autocast = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
        return cls(call.args, dict(call.kwargs), random, autocast)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Let the random numbers and autocast be what they were."""
        with ExitStack() as stack:
            for kind, enabled, dtype in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            torch.set_rng_state(self.random[0])
            tensors = leaves((self.args, self.kwargs))
            devices = sorted({tensor.device.index for tensor in tensors if tensor.is_cuda})
            for device, state in zip(devices, self.random[1:], strict=True):
                torch.cuda.set_rng_state(state, device)
            yield


def again(model: nn.Module, began: Arguments, watched: Callable[[], Any]) -> BadValue | None:
    """Run a forward of the model again under a watch that waits for each value; return what it raises."""
    if is_running():
        return None
    found: list[BadValue] = []

    def run() -> None:
        try:
            with (
                undisturbed(),
                watched(),
                left_as_found(model),
                _buffers_kept(model),
                began.restored(),
                torch.no_grad(),
            ):
                model(*began.args, **began.kwargs)
        except BadValue as error:
            found.append(error)
        except Exception:
            return  # It can't run twice on the same arguments: what is known is told.

    if torch._C._current_graph_task_id() == -1:
        run()
    else:  # Within a backward, hooks take a forward for a recomputation: so on a thread where none is.
        thread = threading.Thread(target=contextvars.copy_context().run, args=(run,))
        thread.start()
        thread.join()
    return found[0] if found else None


@contextmanager
def _buffers_kept(model: nn.Module) -> Iterator[None]:
    """Give the buffers of a model back what they held: batch norms would count the second run too."""
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        for buffer, held in before:
            buffer.copy_(held)


def _described(tensor: Tensor) -> str:
    plain = numbers_in(tensor)
    if plain is None:
        return describe(tensor)
    found = numbers_of_pieces(pieces(plain))
    shares = f", nan {found.nan:.4g}, inf {found.inf:.4g}" if found.nan or found.inf else ""
    return f"{describe(tensor)}: min {found.min:.4g}, max {found.max:.4g}, mean {found.mean:.4g}{shares}"
