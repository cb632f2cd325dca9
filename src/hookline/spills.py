"""Tensors on disk: each is a file of its own, in a folder that goes when nothing in it is needed any more.

These are scratch files: only the process that wrote them reads them, and they are gone at its end.
"""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
import weakref
from contextlib import suppress

import torch
from torch import Tensor

from hookline import files
from hookline.errors import StoreError
from hookline.nodes import Later, Problem, check


class Unwritable(Exception):
    """Why a tensor can't be on disk, whatever the disk."""


class Folder:
    """A folder of our own inside another one, made when the first tensor comes."""

    def __init__(self, parent: str | None) -> None:
        self.parent = parent  # None: wherever this system has its temporary files.
        self.path = ""
        self._numbers = itertools.count()

    def write(self, tensor: Tensor) -> OnDisk:
        """Write a tensor to a file; raise Unwritable, or a StoreError if the disk is at fault."""
        _check(tensor)
        if not self.path:
            self._make()
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)  # Another stream than this one may have yet to write it.
        path = os.path.join(self.path, f"{next(self._numbers)}.safetensors")
        files.write(path, {"": [_packed(tensor)]}, scratch=True)
        return OnDisk(self, path, tensor)

    def _make(self) -> None:
        try:
            self.path = tempfile.mkdtemp(prefix="hookline-", dir=self.parent)
        except OSError as error:
            raise StoreError(f"no folder can be made there: {error.strerror or error}") from error
        weakref.finalize(self, _remove, self.path, os.getpid())  # Also when the interpreter ends.

    def __repr__(self) -> str:
        return repr(self.path or self.parent or tempfile.gettempdir())


class OnDisk(Later):
    """A tensor that is on disk. The file goes when nobody needs it any more."""

    def __init__(self, folder: Folder, path: str, tensor: Tensor) -> None:
        super().__init__(tensor.dtype, tensor.shape)
        self.folder = folder  # It stays as long as something in it.
        self.path = path
        self.device = tensor.device
        self.order = _order(tensor)
        self.packed = _packed(tensor).shape
        weakref.finalize(self, _unlink, path, os.getpid()).atexit = False  # The whole folder goes then.

    def read(self) -> Tensor:
        """Return the tensor, with the memory order that it had."""
        packed = next(iter(files.read(self.path).get("", ())), None)
        if not isinstance(packed, Tensor) or (packed.dtype, packed.shape) != (self.dtype, self.packed):
            raise StoreError(f"{self.path!r} is damaged: it is not what was moved to disk; run the forward again")
        with torch.inference_mode(False):
            places = [self.order.index(dimension) for dimension in range(len(self.order))]
            return packed.permute(places).expand(self.shape).to(self.device)


def _check(tensor: Tensor) -> None:
    try:
        check(tensor)
    except Problem as problem:
        raise Unwritable(str(problem).partition(", but")[0]) from None


def _order(tensor: Tensor) -> list[int]:
    """Return the dimensions of a tensor as they lie in memory, the outermost first."""
    return sorted(range(tensor.dim()), key=tensor.stride().__getitem__, reverse=True)


def _packed(tensor: Tensor) -> Tensor:
    """Return the elements in the order of their memory, those of an expanded dimension once."""
    if tensor.numel():
        tensor = tensor[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())]
    return tensor.permute(_order(tensor))


def _unlink(path: str, process: int) -> None:
    if os.getpid() == process:  # A forked process has copies of the objects, but the files are not its own.
        with suppress(OSError):
            os.unlink(path)


def _remove(path: str, process: int) -> None:
    if os.getpid() == process:
        shutil.rmtree(path, ignore_errors=True)
