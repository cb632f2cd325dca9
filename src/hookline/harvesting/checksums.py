"""Checksums of tensors: the same on every device, and nearly as fast as memory.

The bits are read as numbers of 64 bits. Each is multiplied by an odd number that belongs to its position, folded and
added up, modulo 2 ** 64. So a change of one number is seen, and several changes (a swap, flipped signs) hide each other
with a chance of about 2 ** -64. Every 512 kB have a sum of their own, and the sums are hashed in their order.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

_SMALL = 1 << 14  # Bytes of a tensor that is hashed as it is.
_ROW = 1 << 16  # Numbers that are added up.
_ROWS = 64  # Of a GPU at once; a processor takes what stays in its cache.
_SPARSE = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


def checksum(tensor: Tensor) -> bytes:
    """Return bytes that a tensor with another dtype, shape or value would not have.

    >>> x = torch.arange(50_000)
    >>> checksum(x) == checksum(x.clone()), checksum(x) == checksum(x.flip(0))
    (True, False)
    """
    found = hashlib.blake2b(digest_size=16)
    with torch.no_grad():
        for piece in _pieces(tensor):
            found.update(len(piece).to_bytes(8, "little"))
            found.update(piece)
    return found.digest()


def bytes_of(tensor: Tensor) -> bytes:
    """Return the bytes of a tensor's elements."""
    if tensor.is_nested:
        return b"".join([bytes_of(one) for one in tensor.unbind()])
    plain = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach()
    plain = plain.cpu().resolve_conj().resolve_neg().contiguous()
    if not plain.numel():
        return b""
    return ctypes.string_at(plain.data_ptr(), plain.nbytes)


def _pieces(tensor: Tensor) -> Iterator[bytes]:
    """Return what a tensor is, and the bytes of its elements, or of their sums: of every part that it is made of."""
    if hasattr(tensor, "full_tensor"):  # A DTensor: every rank takes part.
        tensor = tensor.full_tensor()
    yield f"{tensor.dtype} {'nested' if tensor.is_nested else tuple(tensor.shape)} {tensor.layout}".encode()
    parts: list[Tensor] = []
    if tensor.is_nested:
        parts = list(tensor.unbind())
    elif hasattr(tensor, "__tensor_flatten__"):  # A quantized weight of torchao, say, is made of several.
        parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    elif tensor.is_meta:
        pass  # Its values are not here.
    elif tensor.is_quantized:
        about, parts = _quantized(tensor)
        yield repr(about).encode()
    elif tensor.layout in _SPARSE:
        parts = [getattr(tensor, name)() for name in _SPARSE[tensor.layout]]
    else:
        yield from _sums(tensor.detach().as_subclass(Tensor))
        return
    for part in parts:
        yield from _pieces(part)


def _quantized(tensor: Tensor) -> tuple[tuple[Any, ...], list[Tensor]]:
    """Return how a quantized tensor is to be read, and its numbers."""
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return (tensor.qscheme(), tensor.q_scale(), tensor.q_zero_point()), [tensor.int_repr()]
    scales = [tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()]
    return (tensor.qscheme(), tensor.q_per_channel_axis()), [tensor.int_repr(), *scales]


def _sums(tensor: Tensor) -> Iterator[bytes]:
    """Return a sum for each row of a tensor's bits, and the few that fill no number."""
    plain = tensor if tensor.device.type in ("cpu", "cuda") else tensor.cpu()  # Others may lack an operation.
    plain = plain.to_dense() if plain.layout is not torch.strided else plain
    plain = plain.resolve_conj().resolve_neg().contiguous()
    if plain.nbytes <= _SMALL:
        yield bytes_of(plain)
        return
    if plain.data_ptr() % 8:  # A part of something larger.
        plain = plain.clone()
    bits = plain.view(-1).view(torch.uint8)
    whole = len(bits) // 8
    yield bytes_of(bits[whole * 8 :])
    numbers = bits[: whole * 8].view(torch.int64)
    rows = whole // _ROW
    factors = _factors(str(plain.device))
    if rows:
        yield bytes_of(_of_rows(numbers[: rows * _ROW].view(rows, _ROW), factors))
    rest = numbers[rows * _ROW :]
    if len(rest):
        yield bytes_of(_of_rows(rest[None], factors[: len(rest)]))


def _of_rows(numbers: Tensor, factors: Tensor) -> Tensor:
    """Return the sum of each row."""
    step = _ROWS if numbers.is_cuda else torch.get_num_threads()
    product = torch.empty_like(numbers[:step])
    upper = torch.empty_like(product)
    sums = []
    for some in numbers.split(step):
        torch.mul(some, factors, out=product[: len(some)])
        torch.bitwise_right_shift(product[: len(some)], 32, out=upper[: len(some)])
        sums.append(product[: len(some)].bitwise_xor_(upper[: len(some)]).sum(1))  # The upper bits count below too.
    return torch.cat(sums)


@cache
def _factors(device: str) -> Tensor:
    """Return an odd number for each position of a row, the same on every machine."""
    chance = bytearray(hashlib.shake_128(b"hookline").digest(_ROW * 8))
    return (torch.frombuffer(chance, dtype=torch.int64) | 1).to(device)
