"""End a forward early, once every site that it has to reach has fired."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from torch import nn

from hookline._engine.tap import Tap
from hookline._sites.tree import Names
from hookline._torch import AnyBatchNorm, version_of
from hookline.errors import HooklineError, StopForward, warn

STOPPED: Any = object()
_waiting: ContextVar[tuple[set[Tap], ...]] = ContextVar("waiting", default=())  # Innermost last.


def run_until(stops: set[Tap], run: Callable[[], Any], model: nn.Module) -> Any:
    """Call `run` until these stops are reached. Return its result, or STOPPED."""
    stacked = _waiting.get()
    waiting = {stop for stop in stops if not any(stop in outer for outer in stacked)}
    if not waiting:  # An outer forward waits for them.
        return run()
    counters = _counters(model)
    try:
        _waiting.set((*stacked, waiting))
        output = run()
    except StopForward as stop:
        if stop.owner is not waiting:
            raise
        _warn_of_batchnorm(counters)
        return STOPPED
    finally:
        _waiting.set(stacked)
    if not waiting:
        raise HooklineError(
            f"{type(model).__name__} caught the signal that ends its forward (a bare `except:`, or one of "
            "BaseException), so it ran on; leave stop=True out"
        )
    return output


def reached(tap: Tap) -> None:
    """Note that a stop's site has fired. If it was the last that a forward waits for, end that forward."""
    tap.fired = True
    for waiting in reversed(_waiting.get()):
        if tap in waiting:
            waiting.discard(tap)
            if not waiting:
                raise StopForward(waiting)


def _counters(model: nn.Module) -> list[tuple[Any, int]]:
    """Return the batch counters of BatchNorm layers in train mode, each with its version, to tell later if any ran."""
    if not model.training:
        return []
    layers: list[Any] = [layer for _, layer, _ in Names(model).walk(AnyBatchNorm)]
    counters = [layer.num_batches_tracked for layer in layers if layer.training and layer.track_running_stats]
    return [(counter, version_of(counter)) for counter in counters if counter is not None]


def _warn_of_batchnorm(counters: list[tuple[Any, int]]) -> None:
    if any(version_of(counter) != version for counter, version in counters):
        warn(
            "a forward was ended early in train mode: the BatchNorm layers before the stop have updated their running "
            "statistics; call model.eval() first if that is not intended"
        )
