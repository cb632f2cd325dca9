"""The harness of all benchmarks. It runs every contender in turn, round after round, in one process.

A figure is the ratio to the first contender in the same round, as the median over rounds. The first contender runs a
second time in every round: the distance of `bare again` from 1.00 is the noise. A script that ends with

    publish(__file__, tables)

prints the tables that `tables()` yields and writes them next to itself. With `--quick` it runs a short version and
writes nothing.

Without a GPU the clock is the processor time of this process. Other work on a shared machine, which may be several
times as much as is measured here, does not count. A measurement that waits for a disk or a device needs
`time.perf_counter`.
"""

from __future__ import annotations

import datetime
import gc
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch

Contenders = Mapping[str, Callable[[], object]]

QUICK = "--quick" in sys.argv  # A short run, with which tests/test_benchmarks.py checks that a script works.
CLOCK = time.perf_counter if torch.cuda.is_available() else time.process_time


def usual(number: int, quick: int) -> int:
    """Return `number`, or `quick` in a quick run."""
    return quick if QUICK else number


def measure(
    contenders: Contenders,
    rounds: int = 60,
    repeat: int = 3,
    clock: Callable[[], float] = CLOCK,
    after: Callable[[], object] = lambda: None,
    warm_up: int = 2,
) -> dict[str, list[float]]:
    """Return the seconds of each contender in every round, each the best of `repeat` runs. The first comes twice.

    In a round, every contender runs `repeat` times in a row: the first run brings its model and code into the caches,
    as in any loop. The order changes from round to round, so that no contender always has the same neighbour. The
    garbage collector is on, as it is where models run, but ignores older objects. `after` is called after each run,
    untimed. Before the first round, each contender runs `warm_up` times.
    """
    first = next(iter(contenders))
    again = f"{first.partition(',')[0]} again"
    contenders = {first: contenders[first], again: contenders[first], **contenders}
    runs = list(contenders.items())
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _, run in runs:
        for _ in range(warm_up):
            run()
            after()
    shuffle = random.Random(0).shuffle
    gc.collect()
    gc.freeze()
    try:
        for _ in range(usual(rounds, 2)):
            shuffle(runs)
            for name, run in runs:
                seconds[name].append(best_of(run, usual(repeat, 1), clock, after))
    finally:
        gc.unfreeze()
    return seconds


def best_of(
    run: Callable[[], object],
    repeat: int,
    clock: Callable[[], float] = CLOCK,
    after: Callable[[], object] = lambda: None,
) -> float:
    """Return the seconds of the fastest of a few runs."""
    best = float("inf")
    for _ in range(repeat):
        start = clock()
        run()
        best = min(best, clock() - start)
        after()
    return best


def ratios(seconds: Mapping[str, list[float]]) -> dict[str, list[float]]:
    """Return the ratio of each contender to the first, round by round."""
    first = next(iter(seconds.values()))
    return {name: [one / base for one, base in zip(taken, first, strict=True)] for name, taken in seconds.items()}


def extra(seconds: Mapping[str, list[float]]) -> str:
    """Return a line with the seconds that the last contender takes more than the first, as the median over rounds."""
    (name, taken), base = list(seconds.items())[-1], next(iter(seconds.values()))
    more = statistics.median(one - other for one, other in zip(taken, base, strict=True))
    return f"{name}: {more:.3f} s more than bare\n"


def compare(
    contenders: Contenders, rounds: int = 60, repeat: int = 3, clock: Callable[[], float] = CLOCK
) -> dict[str, list[float]]:
    """Time the contenders interleaved, and return their ratios to the first, round by round."""
    return ratios(measure(contenders, rounds, repeat, clock))


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the lower quartile, the median and the upper quartile."""
    low, middle, high = statistics.quantiles(values, n=4)
    return low, middle, high


def report(
    title: str, ratios: Mapping[str, Sequence[float]], seconds: Mapping[str, Sequence[float]] | None = None
) -> str:
    """Return a table of medians and quartiles, with milliseconds if `seconds` are given."""
    lines = [title, f"{'':44s} {'median':>7s} {'quartiles':>15s}" + (f" {'ms':>9s}" if seconds else "")]
    for name, values in ratios.items():
        low, middle, high = quartiles(values)
        taken = f" {1000 * statistics.median(seconds[name]):8.3f}" if seconds else ""
        lines.append(f"{name:44s} {middle:7.3f} {low:7.3f}–{high:<7.3f}{taken}".rstrip())
    return "\n".join(lines) + "\n"


def machine() -> str:
    """Return the date, the versions and the machine of this run."""
    return (
        f"{datetime.date.today()}, torch {torch.__version__}, Python {platform.python_version()}, "
        f"{torch.get_num_threads()} thread(s), {processor()}, "
        f"{'wall clock' if CLOCK is time.perf_counter else 'processor time'}"
    )


def processor() -> str:
    """Return the processor's model name as the system reports it."""
    listing = Path("/proc/cpuinfo")
    lines = listing.read_text().splitlines() if listing.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def publish(script: str, tables: Callable[[], Iterable[str]]) -> None:
    """Print a script's tables as they arrive, and write them next to the script."""
    torch.set_num_threads(1)
    text = machine() + "\n"
    print(text)
    for table in tables():
        print(table, flush=True)
        text += "\n" + table
    if not QUICK:
        Path(script).with_suffix(".txt").write_text(text.rstrip() + "\n", encoding="utf-8")
