"""Errors for values that can't be kept or changed, because something traces or transforms the model."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from hookline._cache.record import INSIDE_TRANSFORM
from hookline._sites.language import Site
from hookline._torch import is_in_forward_ad, is_traced, is_traced_by_fx, is_transformed
from hookline._values.nested import leaves
from hookline.errors import HooklineError


def refuse_opening() -> None:
    """Raise if a forward opens a block while it is traced or exported. The user can't leave that block first."""
    if is_traced_by_fx() or is_traced():
        raise HooklineError(
            "a block is opened inside a forward that is being traced or exported, and the result would keep the hooks; "
            "let that forward return or change the value in its own code, or use torch.compile, which breaks the graph "
            "there"
        )


def refuse_tracing() -> None:
    """Raise while the model is being traced or exported: the result would contain the hooks for good."""
    if is_traced():
        raise HooklineError(
            "the model is being traced or exported, and the result would keep the hooks; leave the block first"
        )


def refuse_scripting() -> NoReturn:
    """Raise if torch.jit.script is about to compile the model: it would use the source of the shadows."""
    raise HooklineError("the model is being scripted, and hooks can't be; leave the block first, or remove the hooks")


def refuse_fx(site: Site) -> None:
    """Raise while torch.fx traces the model. For places where no value is a `Proxy` that shows it."""
    if is_traced_by_fx():
        raise HooklineError(f"'{site}': the model is being traced by torch.fx; leave the block first")


def refuse_tracers(value: Any) -> None:
    """Raise if a value is or holds a tracer's stand-in for a tensor, such as a `Proxy`."""
    if type(value) is Tensor:
        return
    for part in leaves(value) if not isinstance(value, torch.fx.Proxy) else [value]:
        name = type(part).__name__
        if isinstance(part, torch.fx.Proxy) or name in ("FakeTensor", "FunctionalTensor"):
            raise HooklineError(f"the model is being traced or exported (a {name} passes); leave the block first")


def refuse_transforms(value: Any) -> None:
    """Raise if a value belongs to a torch.func transform, and can't be kept beyond it."""
    if any(is_transformed(tensor) for tensor in leaves(value)):
        raise HooklineError(INSIDE_TRANSFORM)


def refuse_tangent(tensor: Tensor) -> None:
    """Raise if detach=False would keep a tensor whose tangent is gone once its level of forward-mode AD ends."""
    if is_in_forward_ad() and forward_ad.unpack_dual(tensor).tangent is not None:
        raise HooklineError(
            "a tangent of forward-mode AD can't outlive its level; to keep it with detach=False, add "
            "transform=lambda value: torch.autograd.forward_ad.unpack_dual(value).tangent"
        )
