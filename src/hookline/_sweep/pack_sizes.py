"""How many cells share a run: as many as memory allows, and no more than make it cheaper.

A run takes some time however many copies it has, and then some for each copy. Where the time of the run itself is the
larger part, as on a GPU that waits for Python, cells at several places share one: that costs more computation, since
less of what comes before is left out, and saves runs.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

import torch

_FIRST = 8  # The cells of the first run on a CPU, before anything was measured.
_SHARE = 16  # Runs grow until the time of the run itself is this small a part of the whole.
_LONGEST = 5.0  # Seconds that a run on a CPU may take, since progress is shown between runs.
_MOST = 1024


class PackSizes:
    """Says how many cells share a run.

    Args:
        device: Where the model runs.
        needed: The bytes that a copy needs.
        fixed: How many cells the caller wants; None leaves it to memory and time.
    """

    def __init__(self, device: torch.device, needed: int, fixed: int | None) -> None:
        self._is_fixed = fixed is not None
        self._room = fixed or max(1, min(_MOST, free_memory(device) // max(needed, 1)) - 1)
        self._on_cpu = device.type == "cpu"
        self.most = min(self._room, _FIRST) if self._on_cpu and fixed is None else self._room
        self._alone = math.inf  # The seconds of a run of one copy.
        self._shared: tuple[float, int] | None = None  # The seconds of a run with several cells, and how many.
        self.fewest = min(self.most, _FIRST)  # Fewer cells than this share a run with cells at the next place.

    def halve(self, cells: int) -> None:
        """Note that a run with so many cells did not fit into memory."""
        self._room = max(1, cells // 2)
        self.most = min(self.most, self._room)
        self.fewest = min(self.fewest, self.most)

    def note_alone(self, seconds: float) -> None:
        """Note the seconds of a run of one copy."""
        self._alone = min(self._alone, seconds)
        self._choose()

    def note_shared(self, seconds: float, cells: int) -> None:
        """Note the seconds of a run with so many cells and an unchanged copy."""
        self._shared = seconds, cells
        self._choose()

    def _choose(self) -> None:
        if self._shared is None or self._alone == math.inf:
            return
        seconds, cells = self._shared
        each = max((seconds - self._alone) / cells, 1e-3 * self._alone)
        copies = max(1.0, (self._alone - each) / each)  # The time of a run itself is that of so many copies.
        if self._on_cpu and not self._is_fixed:
            self.most = int(min(self._room, max(1, _SHARE * copies), max(1, _LONGEST / each)))
        self.fewest = int(min(self.most, copies))

    def next_pack(self, starts: Sequence[int]) -> int:
        """Return how many of the next cells share a run, given when the value of each passes, in this order."""
        number = self.fewest
        while number < len(starts) and starts[number] == starts[number - 1]:
            number += 1
        number = min(number, len(starts))
        runs = -(-number // self.most)
        return -(-number // runs)


def free_memory(device: torch.device) -> int:
    """Return how many bytes a run may take on a device."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(0.6 * (free + unused))
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):  # Not on this system.
        free = 1 << 32
    return min(free, _free_in_container()) // 4


def _free_in_container() -> int:
    """Return how many bytes the container of this process has left; where none limits it, a large number."""
    folder = Path("/sys/fs/cgroup")
    try:
        return max(0, int((folder / "memory.max").read_text()) - int((folder / "memory.current").read_text()))
    except (OSError, ValueError):  # "max" stands for no limit.
        return 1 << 60
