"""`hl.watch`: its options, and what is refused of them. The watch itself is a `Watcher`."""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any

import torch
from torch import nn

from hookline._kernel import Where, refuse_flags, warn_unless_entered
from hookline._watch.bad_values import Rule
from hookline._watch.watcher import Watcher
from hookline.errors import HooklineError, SiteError, calling_line


def watch(
    model: nn.Module,
    *where: Where,
    limit: float | None = None,
    inf: bool = True,
    ignore: Where | None = None,
    backward: bool = True,
    every: int | None = None,
    to: Any = None,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
    scaler: Any = None,
    at_once: bool = False,
    again: bool = True,
) -> Watcher:
    """Stop at the first NaN, Inf or value over a limit, forward or backward, and say where it came from.

    >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    >>> with torch.no_grad():
    ...     _ = model[2].weight.fill_(float("nan"))
    >>> with watch(model):
    ...     model(torch.ones(3, 4))
    Traceback (most recent call last):
        ...
    hookline.BadValue: '2' gave NaN: 6 of 6 elements (100%), the first at [0, 0]; forward, step 0, call #0
                 dtype    shape       min      max     mean  nan  inf
    ───────────  ───────  ──────  ───────  ───────  ───────  ───  ───
    output       float32  (3, 2)        -        -        -    1    0
    input input  float32  (3, 4)        0   0.6281    0.157    0    0
    weight       float32  (2, 4)        -        -        -    1    0
    bias         float32  (2,)    -0.3148  -0.1266  -0.2207    0    0
    'weight' of Linear is bad already: an earlier update did it, or it was loaded so.

    Args:
        where: The places to look at; without any, the output of every module.
        limit: The largest size that a value or a gradient may have.
        inf: Whether Inf is bad, and not only NaN.
        ignore: Places to leave out, such as a module that gives masks of -Inf.
        backward: Whether to look at gradients too: of these places, and of the parameters there.
        every: Keep statistics of each place every so many steps: see `Watcher.log`.
        to: Where they go too: a folder or SummaryWriter (TensorBoard), a run of wandb, a function of (step, numbers).
        optimizer: Whose steps count; without, that of any which holds the model's parameters.
        scaler: A GradScaler. It may make gradients overflow: while it can lower its scale, that is not an error.
        at_once: Look at each value of a device as it passes, and wait for it, instead of once for each pass.
        again: Whether a module that gave a bad value, or on a device the model, may be run again to see what made it.
    """
    if not _is_a(nn.Module, model):
        raise SiteError(f"a model is a torch.nn.Module, not {type(model).__name__}")
    if limit is not None and not (_is_a(Real, limit) and limit > 0 and math.isfinite(limit)):
        raise HooklineError(f"limit={limit!r} is not a size that a value may have; give a positive number")
    if every is not None and (not _is_a(Integral, every) or every < 1):
        raise HooklineError(f"every={every!r} is not a number of steps; every=100 keeps statistics of each hundredth")
    if to is not None and every is None:
        raise HooklineError("to= says where statistics go; every= says how often there are any: give it too")
    refuse_flags(inf=inf, backward=backward, at_once=at_once, again=again)
    optimizers = _listed(optimizer)
    if scaler is not None and not hasattr(scaler, "get_scale"):
        raise HooklineError(f"scaler= takes a GradScaler, not {scaler!r}")
    rule = Rule(limit, inf)
    watcher = Watcher(model, where, rule, ignore, backward, at_once, again, every, to, optimizers, scaler)
    warn_unless_entered(watcher._hooks, "watch", calling_line())
    return watcher


def _is_a(kind: type, given: Any) -> bool:
    """Return True for an object of a kind, but not for True and False, which count as numbers in Python."""
    return isinstance(given, kind) and not isinstance(given, bool)


def _listed(optimizer: Any) -> list[torch.optim.Optimizer]:
    """Return what was given as optimizer=: none, one or several."""
    is_several = isinstance(optimizer, Iterable) and not isinstance(optimizer, str)
    given = [] if optimizer is None else list(optimizer) if is_several else [optimizer]
    for one in given:
        if not isinstance(one, torch.optim.Optimizer):
            raise HooklineError(f"optimizer= takes optimizers of torch's, not {one!r}; watch.step() counts by hand")
    return given
