"""Short texts by which a model, a function and data are known again when a run goes on."""

from __future__ import annotations

import ctypes
import hashlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hookline.values import children

_SAMPLE = 256  # Elements of each tensor of a model that are looked at one by one.
_ROUNDS = 20  # Levels of nested data.
_WRAPPERS = re.compile(r"(^module\.|\b_orig_mod\.|\b_checkpoint_wrapped_module\.|\b_fsdp_wrapped_module\.)")
_PLAIN = (Tensor, nn.Parameter, getattr(nn, "Buffer", Tensor))


def digest(value: Any, before: str = "") -> str:
    """Return a text that another value would not have; with what came before it, of the whole series.

    >>> digest(torch.ones(2)) == digest(torch.ones(2)), digest(torch.ones(2)) == digest(torch.zeros(2))
    (True, False)
    """
    found = hashlib.blake2b(before.encode(), digest_size=16)
    for piece in _pieces(value, 0):
        found.update(len(piece).to_bytes(8, "little"))
        found.update(piece)
    return found.hexdigest()


def _pieces(value: Any, depth: int) -> Iterator[bytes]:
    """Return the bytes that make up a nested value."""
    if isinstance(value, Tensor):
        yield f"{value.dtype} {tuple(value.shape)}".encode()
        yield bytes_of(value)
        return
    parts = children(value) if depth < _ROUNDS else None
    if parts is not None:
        yield f"{len(parts)} parts".encode()
        for key, part in parts.items():
            yield repr(key).encode()
            yield from _pieces(part, depth + 1)
        return
    if isinstance(value, (str, bytes, int, float, bool, complex, type(None))):
        yield repr(value).encode()
        return
    array = getattr(value, "tobytes", None)  # numpy arrays and images.
    yield f"{type(value).__qualname__} {getattr(value, 'shape', getattr(value, 'size', ''))}".encode()
    if callable(array):
        yield array()


def bytes_of(tensor: Tensor) -> bytes:
    """Return the bytes of a tensor's elements."""
    plain = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach()
    plain = plain.cpu().resolve_conj().resolve_neg().contiguous()
    if not plain.numel():
        return b""
    return ctypes.string_at(plain.data_ptr(), plain.nbytes)


def model_digest(model: nn.Module) -> dict[str, Any]:
    """Return a model's class and a text of its weights: of each some elements and the sum of all bits."""
    found = hashlib.blake2b(digest_size=16)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            found.update(f"{_WRAPPERS.sub('', name)} {tensor.dtype} {tuple(tensor.shape)} ".encode())
            found.update(_of_weight(tensor))
    return {"class": type(model).__qualname__.removeprefix("FSDP"), "weights": found.hexdigest()}


def _of_weight(tensor: Tensor) -> bytes:
    """Return some elements and the sum of all bits: whole, the same on every device, and as fast as memory."""
    if hasattr(tensor, "full_tensor"):  # A DTensor: every rank takes part.
        tensor = tensor.full_tensor()
    if type(tensor) not in _PLAIN or tensor.layout is not torch.strided:
        return repr(type(tensor)).encode()
    if tensor.is_meta or not tensor.numel() or tensor.is_quantized:
        return b""  # Offloaded: its values are not here.
    flat = tensor.detach().reshape(-1)
    bits = _bits(flat)
    step = max(len(flat) // _SAMPLE, 1)
    return bytes_of(flat[::step]) + int(bits.sum(dtype=torch.int64)).to_bytes(8, "little", signed=True)


def _bits(flat: Tensor) -> Tensor:
    """Return elements as integers."""
    if flat.dtype is torch.bool:
        return flat
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return flat.view(sizes.get(flat.element_size(), torch.uint8))


def function_text(function: Any) -> str | None:
    """Return a text of a function by which another one is told from it: its name, its code and what it closes over."""
    if function is None or isinstance(function, str):
        return function
    inner = inspect.unwrap(function)
    code = getattr(inner, "__code__", None)
    name = getattr(inner, "__qualname__", type(inner).__qualname__)
    if code is None:
        text = repr(function)
        return f"{name} {text if ' at 0x' not in text else ''}".strip()
    return f"{name} {digest(_code(inner))}"


def _code(function: Any) -> list[Any]:
    """Return what makes a function, wherever it stands."""
    code = function.__code__
    cells = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
    plain = [cell for cell in cells if isinstance(cell, (Tensor, str, int, float, tuple, list, dict, type(None)))]
    constants = [_constant(one) for one in code.co_consts]
    return [code.co_code, list(code.co_names), repr(constants), plain, list(function.__defaults__ or ())]


def _constant(value: Any) -> Any:
    """Return a constant of a function as it is in every process: sets have no order of their own."""
    if inspect.iscode(value):
        return [value.co_code, value.co_names, [_constant(one) for one in value.co_consts]]
    if isinstance(value, (tuple, frozenset)):
        inner = [_constant(one) for one in value]
        return inner if isinstance(value, tuple) else sorted(inner, key=repr)
    return value


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
