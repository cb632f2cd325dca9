"""Values of a device on which nobody waits: the largest element of each is noted there, and all are read together."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hookline.sites import Site
from hookline.watching.checks import Rule, extreme, is_bad, judged

ROOM = 1024  # Notes of one buffer.


class Note(NamedTuple):
    """What is known of one value without waiting for it."""

    site: Site
    number: int  # Of the call.
    rule: Rule
    is_gradient: bool
    what: str


class Buffer:
    """Room on one device for the largest elements of some values."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        with torch.inference_mode(False), torch.no_grad():  # It is written to in any mode.
            self.numbers = torch.zeros(ROOM, device=device, dtype=dtype)
            self.slots = self.numbers.unbind()
        self.notes: list[tuple[int, Note]] = []


class Flags:
    """The notes of all devices, in the order in which the values passed."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[torch.device, torch.dtype], Buffer] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, plain: Tensor, note: Note) -> bool:
        """Note the largest element of plain numbers; return whether there is no room for another."""
        key = plain.device, torch.float64 if plain.dtype is torch.float64 else torch.float32
        buffer = self._buffers.get(key)
        if buffer is None:
            buffer = self._buffers[key] = Buffer(*key)
        with torch.no_grad():
            extreme(judged(plain, note.rule), note.rule.below, buffer.slots[len(buffer.notes)])
        self._count += 1
        buffer.notes.append((self._count, note))
        return len(buffer.notes) == ROOM

    def read(self, scale: float = 1.0) -> list[tuple[Note, float]]:
        """Wait for the devices; return the notes of bad values, first things first, and forget all."""
        bad: list[tuple[int, Note, float]] = []
        for (device, _), buffer in self._buffers.items():
            notes, buffer.notes = buffer.notes, []
            if not notes:
                continue
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # Values may have passed on any of its streams.
            for (order, note), number in zip(notes, buffer.numbers[: len(notes)].tolist(), strict=True):
                if is_bad(number / scale if note.is_gradient else number, note.rule):
                    bad.append((order, note, number))
        self._count = 0
        return [(note, number) for _, note, number in sorted(bad, key=lambda one: one[0])]

    def forget(self) -> None:
        """Forget all without waiting."""
        for buffer in self._buffers.values():
            buffer.notes = []
        self._count = 0
