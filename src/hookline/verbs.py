"""The short forms: capture, patch, edit, skip, and run, which does any of them in one line."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any, cast, overload

import torch
from torch import nn

from hookline.actions import NOTHING
from hookline.cache import Cache
from hookline.context import open_blocks
from hookline.errors import EditError, HooklineError, SiteError, did_you_mean
from hookline.hooks import Hooks
from hookline.options import refuse_flags
from hookline.ranks import after_stop, is_running
from hookline.where import Where
from hookline.wiring.forwards import STOPPED, run_until
from hookline.wiring.watches import is_shadow

OPTIONS_OF_CAPTURE = (
    "keep",
    "detach",
    "clone",
    "device",
    "dtype",
    "transform",
    "with_call",
    "limit",
    "spill",
    "gather",
)
KEYWORDS = ("capture", "patch", "edit", "skip", "stop")


def capture(
    model: nn.Module,
    *where: Where,
    keep: str | int = "last",
    detach: bool = True,
    clone: bool | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    transform: Callable[..., Any] | None = None,
    with_call: bool = False,
    limit: int | str | None = None,
    spill: bool | str | os.PathLike[str] = False,
    gather: bool = True,
    stop: bool = False,
) -> Hooks:
    """See what passes at these places. The options are those of `Hooks.capture`.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> with capture(model, "*", "2:input") as acts:
    ...     output = model(torch.ones(3, 4))
    >>> acts
    4 sites, 216 bytes
    site     calls  dtype    shape
    ───────  ─────  ───────  ──────
    0            1  float32  (3, 8)
    1            1  float32  (3, 8)
    2:input      1  float32  (3, 8)
    2            1  float32  (3, 2)
    """
    hooks = brief(model)
    hooks.capture(
        *where,
        keep=keep,
        detach=detach,
        clone=clone,
        device=device,
        dtype=dtype,
        transform=transform,
        with_call=with_call,
        limit=limit,
        spill=spill,
        gather=gather,
        stop=stop,
    )
    hooks._ledger.verb = "capture"
    return hooks


def patch(model: nn.Module, values: Mapping[Any, Any], check: bool = True) -> Hooks:
    """Put given values in the place of what passes: numbers, tensors, any object, or a cache from another run.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
    >>> with patch(model, {"0": 0.0, "1[:, 0]": 7.0}):
    ...     model(torch.ones(1, 4))
    tensor([[7., 0., 0., 0., 0., 0., 0., 0.]])
    """
    hooks = brief(model)
    hooks.patch(values, check=check)
    hooks._ledger.verb = "patch"
    return hooks


def edit(
    model: nn.Module,
    where: Where,
    function: Callable[..., Any] = NOTHING,
    with_call: bool = False,
    check: bool = True,
    clone: bool | None = None,
    gather: bool = True,
) -> Hooks:
    """Put `function(value)` in the place of what passes. The options are those of `Hooks.edit`.

    >>> model = nn.Sequential(nn.Identity(), nn.Identity())
    >>> with edit(model, "0", lambda value: value + 1):
    ...     model(torch.zeros(2))
    tensor([1., 1.])
    """
    hooks = brief(model)
    hooks.edit(where, function, with_call=with_call, check=check, clone=clone, gather=gather)
    hooks._ledger.verb = "edit"
    return hooks


def skip(model: nn.Module, where: Where, value: Any = NOTHING, check: bool = True) -> Hooks:
    """Don't run these modules: they pass their first argument on, or give `value`. `check` is as in `Hooks.skip`.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Softmax(-1))
    >>> with skip(model, "0"):
    ...     model(torch.zeros(2))
    tensor([0.5000, 0.5000])
    """
    hooks = brief(model)
    hooks.skip(where, value, check=check)
    hooks._ledger.verb = "skip"
    return hooks


@overload
def run(
    model: Callable[..., Any],
    /,
    *args: Any,
    capture: None = None,
    patch: Mapping[Any, Any] | None = None,
    edit: Mapping[Any, Callable[..., Any]] | None = None,
    skip: Where | Mapping[Any, Any] | None = None,
    stop: bool = False,
    **kwargs: Any,
) -> Any: ...
@overload
def run(
    model: Callable[..., Any],
    /,
    *args: Any,
    capture: Where,
    patch: Mapping[Any, Any] | None = None,
    edit: Mapping[Any, Callable[..., Any]] | None = None,
    skip: Where | Mapping[Any, Any] | None = None,
    stop: bool = False,
    **kwargs: Any,
) -> tuple[Any, Cache]: ...
def run(
    model: Callable[..., Any],
    /,
    *args: Any,
    capture: Where | None = None,
    patch: Mapping[Any, Any] | None = None,
    edit: Mapping[Any, Callable[..., Any]] | None = None,
    skip: Where | Mapping[Any, Any] | None = None,
    stop: bool = False,
    **kwargs: Any,
) -> Any:
    """Call a model, or a bound method of one, once; return its output, or (output, cache) when `capture` is given.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> output, acts = run(model, torch.ones(3, 4), capture="1", stop=True)
    >>> output, acts["1"].shape
    (None, torch.Size([3, 8]))
    """
    owner = model if isinstance(model, nn.Module) else getattr(model, "__self__", None)
    if not isinstance(owner, nn.Module):
        raise SiteError(f"run takes a model or a method of one, not {getattr(model, '__name__', model)!r}")
    refuse_flags(stop=stop)
    if stop and capture is None:
        raise SiteError("stop=True ends the forward when every captured site has fired; give capture= too")
    _refuse_options(model, kwargs)
    hooks = brief(owner)
    if patch is not None:
        hooks.patch(patch)
    if edit is not None and not isinstance(edit, Mapping):
        raise EditError(f"edit= takes a mapping of site to function, not {type(edit).__name__}")
    for name, given in (("edit", edit), ("skip", skip)):
        if isinstance(given, Mapping) and not given:
            raise EditError(f"{name}= is empty; give places, as in {name}={{site: ...}}, or leave it out")
    for where, function in (edit or {}).items():
        hooks.edit(where, function)
    if skip is not None:
        for where, value in skip.items() if isinstance(skip, Mapping) else [(skip, NOTHING)]:
            hooks.skip(where, value)
    if capture is not None:
        hooks.capture(capture, stop=stop)
    if not len(hooks):
        return model(*args, **kwargs)
    with hooks as cache:
        output = _run_method(hooks, model, args, kwargs) if owner is not model else model(*args, **kwargs)
    return output if capture is None else (output, cache)


def _refuse_options(model: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse what is meant for hookline, but would go to the model: options of `capture`, and misspelt keywords."""
    function = model.forward if isinstance(model, nn.Module) else model
    try:
        taken = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return
    for name in kwargs:
        if name in taken:
            continue
        if name in OPTIONS_OF_CAPTURE:
            raise HooklineError(f"run has no option {name!r}; write `with hl.capture(model, ..., {name}=...) as acts:`")
        near = did_you_mean(name, KEYWORDS)
        if near and name[:4] in [keyword[:4] for keyword in KEYWORDS]:
            raise HooklineError(f"run has no option {name!r}{near}")


def _run_method(hooks: Hooks, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a method of the model inside a block; it ends, and gives None, when the stops of the block are reached."""
    ledger = hooks._ledger
    shadow = ledger.model.__dict__.get(getattr(method, "__name__", ""))  # It was read before the block was entered.
    if is_shadow(shadow) and getattr(method, "__self__", None) is ledger.model:
        method = cast(Callable[..., Any], shadow)
    output = run_until(ledger.forward.left(open_blocks.get()), lambda: method(*args, **kwargs), ledger.model)
    if output is STOPPED and is_running():
        after_stop(ledger.model, is_over=True)
    if not ledger.session.since:
        ledger.session.forwards += 1  # A method that does not call the model itself has run it all the same.
    return None if output is STOPPED else output


def brief(model: nn.Module) -> Hooks:
    """Make hooks that are attached on entering and detached on leaving."""
    hooks = Hooks(model, active=False)
    hooks._brief = True
    return hooks
