"""What torch allocates on the CPU, to the byte: the allocator itself says so, to torch's profiler.

So memory that is shared copy-on-write counts when it is copied, not before, and nothing that Python or the operating
system do is in the figures. (`ru_maxrss` is in pages and never falls; `tracemalloc` does not see tensors at all.)
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import NamedTuple

from torch.profiler import ProfilerActivity, profile


class Bytes(NamedTuple):
    """Bytes beyond those that were there before."""

    peak: int
    left: int  # While what was returned is still held.


def allocated_by(run: Callable[[], object]) -> Bytes:
    """Run something and return what it allocated."""
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
