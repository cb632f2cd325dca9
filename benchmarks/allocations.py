"""Measure what torch allocates on the CPU, to the byte, as its allocator reports it to torch's profiler.

Memory that is shared copy-on-write counts only once it is copied, and the figures leave out everything that Python and
the operating system allocate. (`ru_maxrss` is in pages and never falls; `tracemalloc` does not see tensors at all.)
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import NamedTuple

from torch.profiler import ProfilerActivity, profile


class Bytes(NamedTuple):
    """Bytes in addition to those allocated before the run."""

    peak: int
    left: int  # At the end, while the result is still held.


def allocated_by(run: Callable[[], object]) -> Bytes:
    """Call `run` and return the bytes it allocated."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as measured:
        held = run()
    events = [event for event in measured.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    del held
    return Bytes(peak, now)
