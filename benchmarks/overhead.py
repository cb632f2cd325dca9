"""Cost of a hooked forward with hookline and with torch's hooks, as ratios to the bare forward.

python benchmarks/overhead.py            prints the tables and writes them to benchmarks/overhead.txt
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
from baseline import DEPTH, Enough, gpt, model_of, raw_hooks, sample, shadow, stop_raw
from harness import QUICK, compare, publish, report
from torch import nn
from torch.overrides import TorchFunctionMode

import hookline as hl

Run = Callable[[], object]

_kept: list[object] = []  # Hooks are removed when they are garbage-collected.


def twin_with(hook: Callable[[nn.Module], object]) -> Run:
    """Return the forward of a new model with these hooks on it."""
    model, x = model_of(DEPTH), sample()
    _kept.append(hook(model))
    return lambda: model(x)


def hooked(capture: Callable[[hl.Hooks], object]) -> Run:
    """Return the forward of a new model with these hookline hooks on it."""

    def hook(model: nn.Module) -> hl.Hooks:
        hooks = hl.Hooks(model)
        capture(hooks)
        return hooks

    return twin_with(hook)


def attached() -> dict[str, list[float]]:
    """Compare forwards with hooks that stay attached to every linear layer."""

    def rest(hooks: hl.Hooks) -> None:
        hooks.capture(nn.Linear)
        hooks.deactivate()

    return compare(
        {
            "bare": twin_with(lambda model: None),
            "bare again": twin_with(lambda model: None),  # Another model: its place in memory is noise.
            "raw torch hooks, detached": twin_with(lambda model: raw_hooks(model, {})),
            "raw torch hooks, live": twin_with(lambda model: raw_hooks(model, {}, detach=False)),
            "a forward shadowed by hand, references": twin_with(lambda model: shadow(model, {})),
            "hookline, safe (copy on write)": hooked(lambda hooks: hooks.capture(nn.Linear)),
            "hookline, clone=False": hooked(lambda hooks: hooks.capture(nn.Linear, clone=False)),
            "hookline, clone=True": hooked(lambda hooks: hooks.capture(nn.Linear, clone=True)),
            "hookline, detach=False": hooked(lambda hooks: hooks.capture(nn.Linear, detach=False)),
            "hookline, deactivated": hooked(rest),
        }
    )


def one_attached() -> dict[str, list[float]]:
    """Compare forwards with one hook that stays attached."""
    middle = str(DEPTH)
    return compare(
        {
            "bare": twin_with(lambda model: None),
            "bare again": twin_with(lambda model: None),
            "raw torch hook": twin_with(lambda model: model[DEPTH].register_forward_hook(lambda *_: None)),
            "hookline, capture": hooked(lambda hooks: hooks.capture(middle)),
            "hookline, patch": hooked(lambda hooks: hooks.patch({middle: 0.0})),
            "hookline, edit": hooked(lambda hooks: hooks.edit(middle, torch.tanh)),
        }
    )


def stopped() -> dict[str, list[float]]:
    """Compare a forward that stops at half its depth with the first half alone."""
    model, x = model_of(DEPTH), sample()
    half, last = model[:DEPTH], str(DEPTH - 1)
    raw, held, stopping = model_of(DEPTH), model_of(DEPTH), hl.Hooks(model_of(DEPTH))
    _kept.append(stop_raw(raw[DEPTH - 1]))
    stopping.capture(last, stop=True)

    def raw_attached() -> None:
        with suppress(Enough):
            raw(x)

    def one_shot() -> None:
        with hl.capture(held, last, stop=True):
            held(x)

    return compare(
        {
            "bare, the half that runs": lambda: half(x),
            "the whole model": lambda: model(x),
            "raw torch hook that raises, attached": raw_attached,
            "hookline, stop=True, attached": lambda: stopping.model(x),
            "hookline, attach, stop, detach": one_shot,
        }
    )


class EveryFunction(TorchFunctionMode):
    """Sees every function of a forward and does nothing: the least cost of logging each function."""

    def __torch_function__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return function(*args, **(kwargs or {}))


def inside(width: int) -> dict[str, list[float]]:
    """Compare captures of a function, a parameter and a module inside a layer."""
    model, ids = gpt(width), torch.arange(32)[None]

    def capture(*where: str) -> Run:
        def run() -> None:
            with hl.capture(model, *where):
                model(ids)

        return run

    def every_function() -> None:
        with EveryFunction():
            model(ids)

    return compare(
        {
            "bare": lambda: model(ids),
            "h.5.attn/softmax": capture("h.5.attn/softmax"),
            "h.*.attn/softmax": capture("h.*.attn/softmax"),
            "h.5.attn/*": capture("h.5.attn/*"),
            "h.5.attn.c_attn.weight/addmm": capture("h.5.attn.c_attn.weight/addmm"),
            "h.5.attn.c_attn.weight:param": capture("h.5.attn.c_attn.weight:param"),
            "h.5.mlp, a module": capture("h.5.mlp"),
            "a mode that sees every function": every_function,
        },
        rounds=20,
    )


def tables() -> Iterator[str]:
    """Measure everything."""
    with torch.no_grad():
        yield report(f"attached: all {DEPTH} linear layers captured, no_grad; ratio to the bare forward", attached())
    yield report("the same with autograd on: outputs require grad", attached())
    with torch.no_grad():
        yield report(f"attached: 1 of {DEPTH}, no_grad; ratio to the bare forward", one_attached())
        yield report("stopped at half the depth, no_grad; ratio to a forward of that half alone", stopped())
        for width in (64,) if QUICK else (64, 768):
            title = f"inside: attach, run a 12-layer GPT-2 of width {width} on 32 words, detach; ratio to bare, no_grad"
            yield report(title, inside(width))


if __name__ == "__main__":
    publish(__file__, tables)
