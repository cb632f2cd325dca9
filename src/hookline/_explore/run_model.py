"""Run a model for a page: capture what every module gives, and gradients. The model is left as it was found."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hookline import Cache, Hooks
from hookline._kernel import Where, describe, find_places, leaves, short_form, unwrap
from hookline._scan.restore import left_as_found
from hookline._scan.scan import Scan, scan
from hookline.errors import HooklineError, NeverFired

Loss = Callable[[Any], Tensor]


def arguments(run: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a model, given as a tuple, as a mapping of keywords, or as the only one."""
    if isinstance(run, Mapping):
        return (), dict(run)
    return (run if isinstance(run, tuple) else (run,)), {}


def captured(model: nn.Module, run: Any, at: Any, loss: Loss | None, call: Callable[..., Any] | None = None) -> Cache:
    """Run a model once, or a function that runs it; return what passed, and with a loss of its output the gradients."""
    if any(map(is_lazy, model.parameters())):
        raise HooklineError(
            f"{type(model).__name__} has parameters without a shape yet: run the model once, then explore"
        )
    if loss is not None and not callable(loss):
        raise HooklineError(f"loss= takes a function from the output to one number, not {loss!r}")
    if loss is not None and torch.is_inference_mode_enabled():
        raise HooklineError("no gradient can come of this loss: torch.inference_mode is on; explore outside it")
    args, kwargs = arguments(run)
    where = (_everything,) if at is None else tuple(at) if isinstance(at, (list, tuple)) else (at,)
    hooks = short_form(model)
    if loss is not None:
        _watch_gradients(hooks, model, where)
    hooks.capture(*where)
    if at is None:
        hooks.when_missing("ignore")  # The page lists what is never called.
    with put_back(model), hooks as acts, torch.set_grad_enabled(loss is not None or torch.is_grad_enabled()):
        output = (model if call is None else call)(*args, **kwargs)
        if loss is not None:
            _backward(model, loss(output), (args, kwargs))
    if not acts and call is not None and at is None:
        name = getattr(call, "__name__", type(call).__name__)
        raise NeverFired(f"{name} did not run {type(model).__name__}, nor a part of it, so there is no page to write")
    if not acts:
        raise NeverFired(
            f"nothing passed at any place of at={at!r}, so there is no page to write; the warning says why"
        )
    return acts


def scanned(model: nn.Module, run: Any) -> Scan | None:
    """Return what each module would do with these arguments; None for a model that can't be tried out."""
    args, kwargs = arguments(run)
    try:
        return scan(model, *args, **kwargs)
    except Exception:  # The real run has worked: what a scan adds is not worth an error.
        return None


@contextmanager
def put_back(model: nn.Module) -> Iterator[None]:
    """Put back what a run leaves behind: attributes, buffers such as a BatchNorm's, and the random numbers."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    devices = {tensor.device.index or 0 for tensor in (*model.parameters(), *model.buffers()) if tensor.is_cuda}
    try:
        with left_as_found(unwrap(model)), torch.random.fork_rng(devices=sorted(devices)):
            yield
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                if not torch.equal(buffer, before):  # Batch norm writes where torch does not count it.
                    buffer.copy_(before)


def _everything(_name: str, _module: nn.Module) -> bool:
    return True


def _watch_gradients(hooks: Hooks, model: nn.Module, where: tuple[Where, ...]) -> None:
    """Capture the gradient wherever a value is captured that can have one."""
    values = [
        place.site for place in find_places(model, where) if not place.site.is_gradient and place.site.port != "param"
    ]
    gradients = [site._replace(port=f"grad_{site.port}") for site in values]
    if gradients:
        hooks.capture(*gradients)
        hooks.when_missing("ignore")  # Integers have none, nor what depends on nothing that is learned.


def _backward(model: nn.Module, loss: Any, given: Any) -> None:
    """Send gradients back through the values, without a trace in the parameters' `grad`."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise HooklineError(
            f"loss= takes a function from the output to one number as a tensor; it gave {describe(loss)}"
        )
    ends = [tensor for tensor in (*model.parameters(), *leaves(given)) if tensor.requires_grad]
    if not ends:
        raise HooklineError("no gradient can come of this loss: no parameter and no input of the model requires one")
    if not loss.requires_grad:
        raise HooklineError(
            "no gradient can come of this loss: it does not depend on the model; leave out .detach() and no_grad"
        )
    torch.autograd.grad(loss, ends, allow_unused=True)
