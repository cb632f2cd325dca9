"""Run a module or a whole forward a second time, to find the function that made a bad value."""

from __future__ import annotations

import contextvars
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hookline import Site
from hookline._kernel import (
    Call,
    Found,
    Names,
    Observer,
    describe,
    is_scripted,
    leaves,
    share,
)
from hookline._scan.fake_run import observed, undisturbed
from hookline._scan.list_sites import user_line_text
from hookline._scan.restore_modules import buffers_as_found, left_as_found
from hookline._stats import numbers_of_pieces
from hookline._torch import graph_task, is_running
from hookline._watch.bad_values import Finding, Rule, checkable, examine, numbers_in, pieces
from hookline.errors import BadValue


class BadFunction(NamedTuple):
    """The first function inside a forward that returned a bad value."""

    site: Site
    line: str
    inputs: list[str]


class FirstBadValue(Observer):
    """Note the first bad value that passes."""

    kind = "watch"

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.found: BadFunction | None = None

    def __call__(self, value: Any, call: Call, _is_whole: bool) -> Any:
        """Check a value."""
        if self.found is None and any(examine(plain, self.rule) is not None for plain in checkable(value)):
            given = [*call.args, *call.kwargs.values()]
            inputs = [_with_numbers(one) for tensor in given for one in leaves(tensor)]
            self.found = BadFunction(call.site, user_line_text(), inputs[:4])
        return value


def bad_function(model: nn.Module, call: Call, rule: Rule, finding: Finding) -> BadFunction | None:
    """Run one call again, and return the first function in the module or its submodules that returns a bad value."""
    if is_running() or torch.compiler.is_compiling():
        return None  # In distributed training, the other ranks would have to run the module too.
    # Attention masks are full of -Inf, so -Inf counts as bad only if there was no NaN and the first bad value was -Inf.
    below = not finding.nan and finding.value == -math.inf
    first = FirstBadValue(rule._replace(below=below))
    parts = [(name, part) for name, part in Names(call.module).once() if not is_scripted(part)]
    sites = [(Site(".".join(filter(None, (call.site.path, name))), member="/*"), part) for name, part in parts]
    places = [(Found(site, part, False, None), first) for site, part in sites]
    try:
        with observed(model, places), torch.no_grad():
            run = getattr(call.module, call.site.method) if call.site.method else call.module
            run(*share(call.args), **share(dict(call.kwargs)))
    except Exception:
        return first.found
    return first.found


class Arguments(NamedTuple):
    """What is needed to run a forward of the model again."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    random: list[Tensor]
    autocast: list[tuple[str, bool, torch.dtype]]

    @classmethod
    def of(cls, call: Call) -> Arguments:
        """Keep references to the arguments, and the state of the random generators and of autocast."""
        devices = sorted({tensor.device.index for tensor in leaves((call.args, dict(call.kwargs))) if tensor.is_cuda})
        random = [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in devices)]
        kinds = ("cpu", "cuda")
        autocast = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
        return cls(call.args, dict(call.kwargs), random, autocast)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the state of the random generators and of autocast."""
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
    """Run a forward of the model again under a watch that reads each value at once; return the error it raises."""
    if is_running():
        return None
    found: list[BadValue] = []

    def run() -> None:
        try:
            with (
                undisturbed(),
                watched(),
                left_as_found(model),
                buffers_as_found(model),
                began.restored(),
                torch.no_grad(),
            ):
                model(*began.args, **began.kwargs)
        except BadValue as error:
            found.append(error)
        except Exception:
            return  # The model can't run twice on the same arguments; the error has fewer details.

    if graph_task() == -1:
        run()
    else:  # On another thread: inside a backward, hooks would take this forward for a recomputation.
        thread = threading.Thread(target=contextvars.copy_context().run, args=(run,))
        thread.start()
        thread.join()
    return found[0] if found else None


def _with_numbers(tensor: Tensor) -> str:
    plain = numbers_in(tensor)
    if plain is None:
        return describe(tensor)
    found = numbers_of_pieces(pieces(plain))
    shares = f", nan {found.nan:.4g}, inf {found.inf:.4g}" if found.nan or found.inf else ""
    return f"{describe(tensor)}: min {found.min:.4g}, max {found.max:.4g}, mean {found.mean:.4g}{shares}"
