"""Host memory that is used again and again for what waits to be written.

A forward that gets its own memory back at once takes no new pages. If what it made were held until another thread has
written it, the system would have to find pages for every batch, which costs more than this copy.

Nothing here holds a lock: a Ctrl-C between two instructions of one thread could leave it held for the others.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor


class Staging:
    """Buffers of sizes that are powers of two; as many as were ever needed at one time."""

    def __init__(self) -> None:
        self._free: dict[int, deque[Tensor]] = {}

    def copy(self, tensor: Tensor) -> Staged:
        """Return a copy of a tensor of the host, in memory that is to be given back."""
        size = 1 << max(tensor.nbytes - 1, 0).bit_length()
        try:
            buffer = self._of(size).pop()
        except IndexError:
            buffer = torch.empty(size, dtype=torch.uint8)
        own = buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        return Staged(own.copy_(tensor), buffer, self)

    def give_back(self, buffer: Tensor) -> None:
        """Let others use this memory."""
        self._of(len(buffer)).append(buffer)

    def _of(self, size: int) -> deque[Tensor]:
        return self._free.setdefault(size, deque())


class Staged:
    """A copy, and the memory in which it is."""

    def __init__(self, tensor: Tensor, buffer: Tensor, staging: Staging) -> None:
        self.tensor = tensor
        self._buffer = buffer
        self._staging = staging

    def give_back(self) -> None:
        """Give the memory back; the tensor is nobody's from now on."""
        self._staging.give_back(self._buffer)
