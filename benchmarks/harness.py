"""One way to measure: every contender in turn, round after round, in one process.

A figure is a ratio to the first contender, and the median over rounds. `bare again` is the first contender a second
time: how far it is from 1.00 is the noise.
"""

from __future__ import annotations

import gc
import platform
import statistics
import time
from collections.abc import Callable, Mapping

import torch


def compare(
    contenders: Mapping[str, Callable[[], object]], rounds: int = 60, repeat: int = 3
) -> dict[str, list[float]]:
    """Time each contender `rounds` times, interleaved; return their ratios to the first one, round by round."""
    for run in contenders.values():
        run()
        run()
    ratios: dict[str, list[float]] = {name: [] for name in contenders}
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            seconds = {name: _best_of(run, repeat) for name, run in contenders.items()}
            first = next(iter(seconds.values()))
            for name, taken in seconds.items():
                ratios[name].append(taken / first)
    finally:
        gc.enable()
    return ratios


def _best_of(run: Callable[[], object], repeat: int) -> float:
    best = float("inf")
    for _ in range(repeat):
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best


def report(title: str, ratios: Mapping[str, list[float]]) -> str:
    """Return a table of medians and quartiles."""
    lines = [f"{title}", f"{'':44s} {'median':>7s} {'quartiles':>15s}"]
    for name, values in ratios.items():
        low, middle, high = statistics.quantiles(values, n=4)
        lines.append(f"{name:44s} {middle:7.3f} {low:7.3f}–{high:.3f}")
    return "\n".join(lines) + "\n"


def machine() -> str:
    """Say what this ran on."""
    return f"torch {torch.__version__}, Python {platform.python_version()}, {torch.get_num_threads()} thread(s)"
