"""Short texts by which a model, a function and data are known again when a run goes on."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import inspect
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from hookline.tree import unwrap
from hookline.values import children

_ROUNDS = 20  # Levels of nested data.
_SMALL = 4096  # Elements of a weight that is looked at whole.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WRAPPING = ("OptimizedModule", "CheckpointWrapper", "FullyShardedDataParallel", "DistributedDataParallel")


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
        yield f"{value.dtype} {'nested' if value.is_nested else tuple(value.shape)}".encode()
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
    elif isinstance(value, (set, frozenset)):
        yield repr(sorted(map(repr, value))).encode()
    elif " object at 0x" not in (text := repr(value)):
        yield re.sub(r" at 0x[0-9a-fA-F]+", "", text).encode()
    elif depth < _ROUNDS:
        yield from _pieces(vars(value) if hasattr(value, "__dict__") else None, depth + 1)


def bytes_of(tensor: Tensor) -> bytes:
    """Return the bytes of a tensor's elements."""
    if tensor.is_nested:
        return b"".join([bytes_of(one) for one in tensor.unbind()])
    plain = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach()
    plain = plain.cpu().resolve_conj().resolve_neg().contiguous()
    if not plain.numel():
        return b""
    return ctypes.string_at(plain.data_ptr(), plain.nbytes)


def model_digest(model: nn.Module) -> dict[str, Any]:
    """Return a model's class, and a text of its modules and all bits of its weights."""
    model, found = unwrap(model), hashlib.blake2b(digest_size=16)
    with torch.no_grad():
        for name, module in model.named_modules():
            if type(module).__name__ not in _WRAPPING:
                found.update(f"{_plain_name(name)} {_class(module)}({module.extra_repr()})\n".encode())
        for name, tensor in _state(model):
            found.update(f"{_plain_name(name)} {tensor.dtype} {tuple(tensor.shape)} ".encode())
            found.update(_of_weight(tensor))
    return {"class": _class(model), "weights": found.hexdigest()}


def _class(module: nn.Module) -> str:
    return type(module).__qualname__.removeprefix("FSDP")  # So does fully_shard rename them.


def _plain_name(name: str) -> str:
    """Return a name as it is in the model that nobody has wrapped."""
    return re.sub(r"(^|\.)(_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)(?=\.|$)", "", name).lstrip(".")


def _state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Return parameters, and the buffers that are part of the model's state; others a forward may write as it likes."""
    seen: set[int] = set()
    for path, module in model.named_modules():
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is None or id(tensor) in seen or name in module._non_persistent_buffers_set:
                continue
            seen.add(id(tensor))
            yield f"{path}.{name}", _at_hand(module, name, tensor)


def _at_hand(module: nn.Module, name: str, tensor: Tensor) -> Tensor:
    """Return a weight with its values, which accelerate keeps elsewhere until the module runs."""
    hook = getattr(module, "_hf_hook", None)
    for one in [hook, *getattr(hook, "hooks", ())] if tensor.is_meta else ():
        held = getattr(one, "weights_map", None)
        if held is not None:
            with suppress(KeyError):
                found: Tensor = held[name]
                return found
    return tensor


def _of_weight(tensor: Tensor) -> bytes:
    """Return the sums of all bits along two dimensions: the same on every device, and as fast as memory."""
    if hasattr(tensor, "full_tensor"):  # A DTensor: every rank takes part.
        tensor = tensor.full_tensor()
    if hasattr(tensor, "__tensor_flatten__"):  # A quantized weight, say, is made of several.
        names = tensor.__tensor_flatten__()[0]
        return b"".join([_of_weight(getattr(tensor, name)) for name in names])
    if tensor.is_meta or not tensor.numel() or tensor.is_quantized or tensor.layout is not torch.strided:
        return b""  # Its values are not here.
    plain = tensor.detach().as_subclass(Tensor)
    plain = torch.view_as_real(plain.resolve_conj()) if plain.is_complex() else plain
    if plain.numel() <= _SMALL:
        return bytes_of(plain)
    bits = plain.view(_BITS[plain.element_size()]) if plain.dtype is not torch.bool else plain
    if bits.dim() == 1:  # A part of it is left over that fits in no square.
        width = math.isqrt(bits.numel())
        rest = bytes_of(bits[width * width :])
        return rest + _sums(bits[: width * width].reshape(width, width))
    return _sums(bits.reshape(len(bits), -1))


def _sums(bits: Tensor) -> bytes:
    return bytes_of(bits.sum(0, dtype=torch.int64)) + bytes_of(bits.sum(1, dtype=torch.int64))


def function_text(function: Any) -> str | None:
    """Return a text by which a function is told from another: its code, what it closes over, its object's values."""
    if function is None or isinstance(function, str):
        return function
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{name} {digest(_told(function, ()))}"


def _told(value: Any, inside: tuple[int, ...]) -> Any:
    """Return what makes a function or a value, as plain data that are the same in every process."""
    if id(value) in inside or len(inside) > _ROUNDS:
        return "itself"
    inside = (*inside, id(value))
    if value is None or isinstance(value, (Tensor, str, bytes, int, float, complex)):
        return value
    if isinstance(value, nn.Module):
        return model_digest(value)
    if isinstance(value, functools.partial):
        return [_told(part, inside) for part in (value.func, value.args, value.keywords)]
    if inspect.ismethod(value):
        return [_told(value.__func__, inside), _told(value.__self__, inside)]
    if inspect.isfunction(value):
        return _of_function(value, inside)
    if isinstance(value, (set, frozenset)):
        return sorted(repr(_told(one, inside)) for one in value)
    if isinstance(value, Mapping):
        return {str(key): _told(one, inside) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_told(one, inside) for one in value]
    if inspect.iscode(value):
        return [value.co_code, value.co_names, _told(value.co_consts, inside)]
    return _of_object(value, inside)


def _of_function(function: Any, inside: tuple[int, ...]) -> list[Any]:
    """Return the code of a function, and what it finds outside of it: defaults, cells, and what its module has."""
    code, module = function.__code__, function.__globals__.get("__name__")
    cells = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
    used = {name: function.__globals__[name] for name in code.co_names if name in function.__globals__}
    own = {name: one for name, one in used.items() if _is_plain(one) or getattr(one, "__module__", "") == module}
    outside = [cells, function.__defaults__, function.__kwdefaults__, own]
    return [_told(code, inside), *(_told(one, inside) for one in outside)]


def _of_object(value: Any, inside: tuple[int, ...]) -> list[Any]:
    """Return an object's class and those of its values that can be told."""
    name = getattr(value, "__qualname__", type(value).__qualname__)
    if callable(getattr(value, "fingerprint", None)) and not isinstance(value, type):
        return [name, value.fingerprint()]
    if hasattr(value, "tobytes"):  # numpy's.
        return [name, str(value.dtype), value.tobytes()] if hasattr(value, "dtype") else [name, value.tobytes()]
    held = {} if isinstance(value, type) else getattr(value, "__dict__", {})
    kept = {key: one for key, one in held.items() if _is_plain(one) or callable(one) or isinstance(one, nn.Module)}
    return [name, _told(kept, inside)]


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(_is_plain, value))
    if isinstance(value, Mapping):
        return all(map(_is_plain, value.values()))
    return value is None or isinstance(value, (Tensor, str, bytes, int, float, complex)) or hasattr(value, "tobytes")


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
