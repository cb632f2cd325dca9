"""Growth of the cost with the number of hooks, modules and calls. Cases that grow faster than linearly are reported.

python benchmarks/growth.py            prints the table and writes it to benchmarks/growth.txt

Each case is timed at growing sizes, and log(time) is fitted against log(size). The slope is the exponent: 1 is linear,
2 is quadratic, and fixed costs make it smaller. The last two columns are microseconds per item at the smallest and the
largest size. Where these agree, the growth is linear and no fit is needed.
"""

from __future__ import annotations

import gc
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

import torch
from baseline import model_of, sample
from harness import QUICK, best_of, publish
from torch import nn

import hookline as hl
from hookline._hooks.short_forms import short_form

Run = Callable[[], object]

HOOKS = (25, 50, 100, 200, 400, 800, 1600)
CALLS = (100, 200, 400, 800, 1600, 3200, 6400)
MODULES = (100, 400, 1600, 6400, 20_000)
SECONDS = 1.5  # The time for each case, unless one round takes longer.
LINEAR = 1.1  # A case with a larger exponent is reported.


class Growth(NamedTuple):
    """The slope and the quality of the fit, and the seconds at each size."""

    exponent: float
    r_squared: float
    seconds: dict[int, float]


def fit(seconds: dict[int, float]) -> Growth:
    """Fit a line to the logarithms by least squares."""
    xs, ys = [math.log(size) for size in seconds], [math.log(taken) for taken in seconds.values()]
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    xx, yy = sum((one - x) ** 2 for one in xs), sum((one - y) ** 2 for one in ys)
    xy = sum((one - x) * (other - y) for one, other in zip(xs, ys, strict=True))
    return Growth(xy / xx, xy * xy / (xx * yy), seconds)


def grow(prepare: Callable[[int], Run], sizes: tuple[int, ...]) -> Growth:
    """Time every size in turn, round after round, and fit the best time of each."""
    runs = {size: prepare(size) for size in (sizes[:3] if QUICK else sizes)}
    best = {size: best_of(run, 1) for size, run in runs.items()}
    gc.collect()
    end = time.process_time() + SECONDS
    while True:
        for size, run in runs.items():
            best[size] = min(best[size], best_of(run, 1))
        if QUICK or time.process_time() > end:
            return fit(best)


_kept: list[object] = []  # Hooks are removed when they are garbage-collected.


def linear_names(count: int) -> list[str]:
    return [str(2 * number) for number in range(count)]


def forward(count: int) -> Run:
    """Run a forward with all `count` layers captured."""
    model, x = model_of(count), sample()
    hooks = hl.Hooks(model)
    hooks.capture(nn.Linear)
    _kept.append(hooks)
    return lambda: model(x)


def functions(count: int) -> list[Callable[[torch.Tensor], torch.Tensor]]:
    """Return `count` different functions: adding the same hook twice would warn."""
    return [lambda value, number=number: value for number in range(count)]  # type: ignore[misc]


def hooks_of_one_module(count: int) -> Run:
    """Run a forward of one module with `count` edits on it."""
    model, x = nn.Sequential(nn.Identity()), sample()
    hooks = hl.Hooks(model)
    for function in functions(count):
        hooks.edit("0", function)
    _kept.append(hooks)
    return lambda: model(x)


def attach_and_detach(count: int) -> Run:
    model = model_of(count)

    def run() -> None:
        with hl.capture(model, nn.Linear):
            pass

    return run


def one_by_one(count: int) -> Run:
    """Add `count` hooks in `count` calls, and remove them one by one."""
    model, names = model_of(count), linear_names(count)

    def run() -> None:
        hooks = hl.Hooks(model)
        for name in names:
            hooks.capture(name)
        for hook in list(hooks):
            hook.remove()

    return run


def switch_one_by_one(count: int) -> Run:
    """Deactivate `count` hooks one by one, and activate them again."""
    hooks = hl.Hooks(model_of(count))
    hooks.capture(nn.Linear)
    _kept.append(hooks)

    def run() -> None:
        for hook in hooks:
            hook.deactivate()
        for hook in hooks:
            hook.activate()

    return run


def on_one_module(count: int) -> Run:
    """Add `count` edits to one module, and remove them all."""
    model = nn.Sequential(nn.Identity())
    different = functions(count)

    def run() -> None:
        hooks = hl.Hooks(model)
        for function in different:
            hooks.edit("0", function)
        hooks.remove()

    return run


def open_blocks(count: int) -> Run:
    """Enter `count` nested blocks on one model."""
    model, names = model_of(count), linear_names(count)

    def run() -> None:
        with ExitStack() as stack:
            for name in names:
                stack.enter_context(hl.capture(model, name))

    return run


def find_pattern(where: str) -> Callable[[int], Run]:
    def prepare(count: int) -> Run:
        blocks = [nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)) for _ in range(count // 4)]
        model = nn.Sequential(*blocks)
        return lambda: short_form(model).capture(where)

    return prepare


def find_exact(end: str) -> Callable[[int], Run]:
    """Find `count` places by their names."""

    def prepare(count: int) -> Run:
        model, names = model_of(count), [name + end for name in linear_names(count)]
        return lambda: short_form(model).capture(names)

    return prepare


def find_objects(count: int) -> Run:
    """Find `count` places by their module objects."""
    model = model_of(count)
    modules = list(model)[::2]
    return lambda: short_form(model).capture(modules)


def never_fired(count: int) -> Run:
    """Enter a block with `count` sites that the forward never reaches."""
    model = nn.Sequential(nn.Identity())
    model.add_module("unused", model_of(count))
    x = sample()
    model.forward = lambda value: model[0](value)  # type: ignore[assignment]

    def run() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", hl.HooklineWarning)
            with hl.capture(model, "unused.*"):
                model(x)

    return run


def patch_from(count: int) -> Run:
    """Patch `count` values from another run."""
    model, x = model_of(count), sample()
    _, acts = hl.run(model, x, capture=nn.Linear)

    def run() -> None:
        with hl.patch(model, acts):
            model(x)

    return run


def parameters(count: int) -> Run:
    """Attach to `count` parameters, run, and detach."""
    model, x = model_of(count), sample()

    def run() -> None:
        with hl.capture(model, "*.weight:param"):
            model(x)

    return run


def calls(keep: str | int) -> Callable[[int], Run]:
    """Call one captured module `count` times."""

    def prepare(count: int) -> Run:
        model, x = nn.Sequential(nn.Identity()), sample()

        def run() -> None:
            with hl.capture(model, "0", keep=keep):
                for _ in range(count):
                    model(x)

        return run

    return prepare


def calls_in_one_forward(count: int) -> Run:
    """Run a model that calls one captured module `count` times in one forward."""
    layer, x = nn.Identity(), sample()
    model = nn.Sequential(*[layer] * count)

    def run() -> None:
        with hl.capture(model, layer, keep="all"):
            model(x)

    return run


def of_a_cache(use: Callable[[hl.Cache], object]) -> Callable[[int], Run]:
    def prepare(count: int) -> Run:
        _, acts = hl.run(model_of(count), sample(), capture=nn.Linear)
        return lambda: use(acts)

    return prepare


def gradients(count: int) -> Run:
    """Run a forward and backward with the gradients of `count` layers captured."""
    model, x = model_of(count), sample()

    def run() -> None:
        with hl.capture(model, (nn.Linear, ":grad_output")):
            model(x).sum().backward()

    return run


CASES: dict[str, tuple[Callable[[int], Run], tuple[int, ...]]] = {
    "forward of n layers, all captured": (forward, HOOKS),
    "forward and backward, n gradients": (gradients, HOOKS[:-1]),
    "forward of one module with n edits": (hooks_of_one_module, HOOKS[:-1]),
    "forward with n values patched": (patch_from, HOOKS),
    "forward with n parameters captured": (parameters, HOOKS[:-1]),
    "n sites that never fire": (never_fired, HOOKS),
    "attach and detach n": (attach_and_detach, HOOKS),
    "add n in n calls, remove one by one": (one_by_one, HOOKS),
    "deactivate and activate n, one by one": (switch_one_by_one, HOOKS),
    "add n edits to one module, remove": (on_one_module, HOOKS[:-1]),
    "n blocks open at once": (open_blocks, HOOKS),
    'find "*.2" among n modules': (find_pattern("*.2"), MODULES),
    'find "**.2" among n modules': (find_pattern("**.2"), MODULES),
    "find n exact names": (find_exact(""), HOOKS),
    "find n exact names with ports": (find_exact(":input[0]"), HOOKS),
    'find n exact names with "/linear"': (find_exact("/linear"), HOOKS),
    'find n parameters, "name:param"': (find_exact(".weight:param"), HOOKS),
    'find n parameters, "name/*"': (find_exact(".weight/*"), HOOKS),
    "find n module objects": (find_objects, HOOKS),
    'n calls, keep="all"': (calls("all"), CALLS),
    "n calls, keep=16": (calls(16), CALLS),
    'n calls in one forward, keep="all"': (calls_in_one_forward, CALLS),
    "read n values of a cache": (of_a_cache(lambda acts: [acts[name] for name in acts]), HOOKS),
    "read n values, items()": (of_a_cache(lambda acts: dict(acts.items())), HOOKS),
    "stack n values": (of_a_cache(lambda acts: acts.stack()), HOOKS),
    "select n values by pattern": (of_a_cache(lambda acts: acts.select("*")), HOOKS),
    "print a cache of n": (of_a_cache(repr), HOOKS),
}


def tables() -> Iterator[str]:
    """Measure everything."""
    title = "growth; an exponent of 1 is linear"
    yield f"{title:40s} {'sizes':>12s} {'exponent':>9s} {'R²':>6s} {'µs each, from':>14s} {'to':>8s}"
    steeper = []
    for name, (prepare, sizes) in CASES.items():
        with torch.enable_grad() if prepare is gradients else torch.no_grad():
            growth = grow(prepare, sizes)
        _kept.clear()
        each = [1e6 * taken / size for size, taken in growth.seconds.items()]
        span = f"{min(growth.seconds)}–{max(growth.seconds)}"
        yield (f"{name:40s} {span:>12s} {growth.exponent:9.2f} {growth.r_squared:6.3f} {each[0]:14.2f} {each[-1]:8.2f}")
        steeper += [name] if growth.exponent > LINEAR else []
    yield f"\nsteeper than {LINEAR}: {', '.join(steeper) or 'none'}"


if __name__ == "__main__":
    publish(__file__, tables)
