"""Fingerprints: short texts by which a resumed job recognizes models, functions, tensors and data.

`checksum` is for a tensor, `digest` for any nested value, `function_text` for a function (its code and the values it
uses), and `model_digest` for a model (modules, code, every bit of its weights, attributes). `without_writes`,
`reconcile` and `names_written` deal with attributes that a model writes while it runs.
"""

from __future__ import annotations

import ctypes
import dis
import functools
import hashlib
import inspect
import json
import logging
import re
import sys
import sysconfig
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor, nn

from hookline._kernel import children, is_of_hookline, unwrap
from hookline._torch import DYNAMO, non_persistent_buffers, saved_by_itself, stored_indices, stored_values

DIGESTS = [2, "Python {}.{}".format(*sys.version_info)]  # Their version. Bytecode is in them, so they depend on Python.
_SMALL = 1 << 14  # Tensors of at most this many bytes are hashed whole. Larger ones are hashed by sums.
_ROW = 1 << 16  # 64-bit numbers that go into one sum.
_ROWS = 64  # Rows summed at once on a GPU. A CPU takes fewer, so that they stay in its cache.
_SPARSE = {
    torch.sparse_coo: (stored_indices, stored_values),
    torch.sparse_csr: (Tensor.crow_indices, Tensor.col_indices, Tensor.values),
    torch.sparse_csc: (Tensor.ccol_indices, Tensor.row_indices, Tensor.values),
    torch.sparse_bsr: (Tensor.crow_indices, Tensor.col_indices, Tensor.values),
    torch.sparse_bsc: (Tensor.ccol_indices, Tensor.row_indices, Tensor.values),
}


def checksum(tensor: Tensor) -> bytes:
    """Return 16 bytes that change with the dtype, the shape or any value of a tensor.

    >>> x = torch.arange(50_000)
    >>> checksum(x) == checksum(x.clone()), checksum(x) == checksum(x.flip(0))
    (True, False)
    """
    return checksums([("", tensor)])[0][1]


@torch.no_grad()
def checksums(named: Iterable[tuple[str, Tensor]]) -> list[tuple[str, bytes]]:
    """Return the names of some tensors with their checksums. A GPU gets all the work before anything waits for it."""
    pieces = [(name, list(_pieces(tensor))) for name, tensor in named]
    summed = iter(_bytes_of_each([piece for _, some in pieces for piece in some if isinstance(piece, Tensor)]))
    found = []
    for name, some in pieces:
        one = hashlib.blake2b(digest_size=16)
        for piece in some:
            data = next(summed) if isinstance(piece, Tensor) else piece
            one.update(len(data).to_bytes(8, "little"))
            one.update(data)
        found.append((name, one.digest()))
    return found


def _bytes_of_each(flat: list[Tensor]) -> list[bytes]:
    """Return the bytes of small tensors of uint8. Those on one device are copied to the host together."""
    parts = {}
    for device in {one.device for one in flat}:
        alike = [one for one in flat if one.device == device]
        parts[device] = iter(torch.cat(alike).cpu().split([len(one) for one in alike]))
    return [tensor_bytes(next(parts[one.device])) for one in flat]


def tensor_bytes(tensor: Tensor) -> bytes:
    """Return the bytes of a tensor's elements."""
    if tensor.is_nested:
        return b"".join([tensor_bytes(one) for one in tensor.unbind()])
    plain = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach()
    plain = plain.cpu().resolve_conj().resolve_neg().contiguous()
    if not plain.numel():
        return b""
    return ctypes.string_at(plain.data_ptr(), plain.nbytes)


def _pieces(tensor: Tensor) -> Iterator[bytes | Tensor]:
    """Yield dtype, shape and layout of a tensor, then its elements or sums as uint8, for each part of it."""
    if hasattr(tensor, "full_tensor"):  # A DTensor. All ranks have to call this together.
        tensor = tensor.full_tensor()
    yield f"{tensor.dtype} {'nested' if tensor.is_nested else tuple(tensor.shape)} {tensor.layout}".encode()
    parts: list[Tensor] = []
    if tensor.is_nested:
        parts = list(tensor.unbind())
    elif hasattr(tensor, "__tensor_flatten__"):  # A quantized weight of torchao consists of several tensors.
        parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    elif tensor.is_meta:
        pass  # A meta tensor has no values.
    elif tensor.is_quantized:
        about, parts = _quantized(tensor)
        yield repr(about).encode()
    elif tensor.layout in _SPARSE:
        parts = [part(tensor) for part in _SPARSE[tensor.layout]]
    else:
        yield from _sums(tensor.detach().as_subclass(Tensor))
        return
    for part in parts:
        yield from _pieces(part)


def _quantized(tensor: Tensor) -> tuple[tuple[Any, ...], list[Tensor]]:
    """Return the quantization parameters of a tensor, and the tensors that it consists of."""
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return (tensor.qscheme(), tensor.q_scale(), tensor.q_zero_point()), [tensor.int_repr()]
    scales = [tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()]
    return (tensor.qscheme(), tensor.q_per_channel_axis()), [tensor.int_repr(), *scales]


def _sums(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the last bytes, which don't fill a 64-bit number, then a sum for each row of 64-bit numbers."""
    plain = tensor if tensor.device.type in ("cpu", "cuda") else tensor.cpu()  # Other devices may lack an operation.
    plain = plain.to_dense() if plain.layout is not torch.strided else plain
    plain = plain.resolve_conj().resolve_neg().contiguous()
    if plain.nbytes > _SMALL and plain.data_ptr() % 8:  # A view that is not aligned.
        plain = plain.clone()
    bits = plain.view(-1).view(torch.uint8)
    if len(bits) <= _SMALL:
        yield bits
        return
    whole = len(bits) // 8
    yield bits[whole * 8 :].clone()  # A view would keep all of `bits` in memory.
    numbers = bits[: whole * 8].view(torch.int64)
    rows = whole // _ROW
    factors = _factors(str(plain.device))
    if rows:
        yield _of_rows(numbers[: rows * _ROW].view(rows, _ROW), factors).view(torch.uint8)
    rest = numbers[rows * _ROW :]
    if len(rest):
        yield _of_rows(rest[None], factors[: len(rest)]).view(torch.uint8)


def _of_rows(numbers: Tensor, factors: Tensor) -> Tensor:
    """Return a sum for each row: of the numbers times their factors, with the upper bits mixed into the lower."""
    step = _ROWS if numbers.is_cuda else torch.get_num_threads()
    product = torch.empty_like(numbers[:step])
    upper = torch.empty_like(product)
    sums = []
    for some in numbers.split(step):
        torch.mul(some, factors, out=product[: len(some)])
        torch.bitwise_right_shift(product[: len(some)], 32, out=upper[: len(some)])
        sums.append(product[: len(some)].bitwise_xor_(upper[: len(some)]).sum(1))
    return torch.cat(sums)


@cache
def _factors(device: str) -> Tensor:
    """Return an odd pseudo-random number for each position of a row, the same on every machine."""
    chance = bytearray(hashlib.shake_128(b"hookline").digest(_ROW * 8))
    return (torch.frombuffer(chance, dtype=torch.int64) | 1).to(device)


_ROUNDS = 20  # Levels of nested data that `digest` looks into.


def digest(value: Any, before: str = "") -> str:
    """Return the digest of a value. If `before` is the digest of a series, return that of the series with the value.

    >>> import torch
    >>> digest(torch.ones(2)) == digest(torch.ones(2)), digest(torch.ones(2)) == digest(torch.zeros(2))
    (True, False)
    """
    found = hashlib.blake2b(before.encode(), digest_size=16)
    for piece in _pieces_of_text(value, 0):
        found.update(len(piece).to_bytes(8, "little"))
        found.update(piece)
    return found.hexdigest()


def _pieces_of_text(value: Any, depth: int) -> Iterator[bytes]:
    """Yield the bytes that make up a nested value."""
    if isinstance(value, Tensor):
        yield f"{value.dtype} {'nested' if value.is_nested else tuple(value.shape)}".encode()
        yield tensor_bytes(value)
        return
    parts = children(value) if depth < _ROUNDS else None
    if parts is not None:
        yield f"{len(parts)} parts".encode()
        for key, part in parts.items():
            yield repr(key).encode()
            yield from _pieces_of_text(part, depth + 1)
        return
    if isinstance(value, (str, bytes, int, float, bool, complex, type(None))):
        yield repr(value).encode()
        return
    array = getattr(value, "tobytes", None)  # numpy arrays and PIL images have this method.
    yield f"{type(value).__qualname__} {getattr(value, 'shape', getattr(value, 'size', ''))}".encode()
    if callable(array):
        yield array()
    elif isinstance(value, (set, frozenset)):
        yield repr(sorted(map(repr, value))).encode()
    elif " object at 0x" not in (text := repr(value)):
        yield re.sub(r" at 0x[0-9a-fA-F]+", "", text).encode()
    elif depth < _ROUNDS:
        yield from _pieces_of_text(vars(value) if hasattr(value, "__dict__") else None, depth + 1)


_DEEPEST = 60  # Levels of objects inside objects that a Fingerprinter looks into.
_ATOMS = (str, bytes, int, float, complex, torch.dtype, torch.Size, torch.layout, torch.memory_format)
_DEVICE = re.compile(r"(cpu|cuda|xpu|mps|hpu|npu|meta)(:\d+)?")
_SLOT = (types.MemberDescriptorType, types.GetSetDescriptorType, types.WrapperDescriptorType)
_MAIN = ("__main__", "__mp_main__")  # A notebook or script. In a worker process, another file is `__main__`.
_BY_NAME = ("torch", "numpy", "hookline", "accelerate")  # Packages whose code is identified by name and version.
_ABOUT = ("__annotate__", "__annotate_func__")  # Functions of a class that only return annotations.
_WALKED = ("types", "argparse", "functools", "collections")  # Standard modules whose objects hold a user's values.
_STANDARD = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib")})


class Fingerprinter:
    """Returns a text that identifies any value: an object, a function, a class, a module.

    Args:
        model: A function that returns the texts of a model.
        opaque: A set, to which the names of classes are added whose contents can't be compared.
    """

    def __init__(
        self, model: Callable[[nn.Module, Fingerprinter], Iterable[str]], opaque: set[str] | None = None
    ) -> None:
        self.model = model
        self.variables: dict[str, set[str]] = {}  # Texts of the global and class variables that code uses, by name.
        self.opaque = set() if opaque is None else opaque
        self._seen: dict[int, tuple[Any, str]] = {}  # By id. Holding the value keeps its id from being reused.
        self._depth = 0

    def name(self, value: Any, text: str) -> None:
        """Set the text for a value, wherever it occurs."""
        self._seen[id(value)] = value, text

    def text(self, value: Any) -> str:
        """Return a text that identifies a value."""
        if value is None or isinstance(value, _ATOMS):
            return "a device" if isinstance(value, str) and _DEVICE.fullmatch(value) else repr(value)
        if id(value) in self._seen:
            return self._seen[id(value)][1]
        if self._depth > _DEEPEST:
            return "deeper"
        self._depth += 1
        self.name(value, "itself")
        try:
            text = hash_texts(self._parts(value))
        except Exception:  # Reading an object may raise anything.
            text = type(value).__qualname__ + self._unknown(value)
        finally:
            self._depth -= 1
        self.name(value, text)
        return text

    def _parts(self, value: Any) -> Iterator[str]:
        """Yield the texts of the parts of a value."""
        yield type(value).__qualname__
        if isinstance(value, Tensor):
            yield checksum(value).hex()
        elif isinstance(value, torch.device):
            return  # The same model on another device has the same fingerprint.
        elif inspect.isfunction(value):
            yield from self._function(value)
        elif inspect.iscode(value):
            yield from self._code(value)
        elif inspect.ismethod(value):
            yield from map(self.text, (value.__func__, value.__self__))
        elif isinstance(value, type):
            yield from self._class(value)
        elif isinstance(value, (staticmethod, classmethod)):
            yield self.text(value.__func__)
        elif isinstance(value, property):
            yield from map(self.text, (value.fget, value.fset, value.fdel))
        elif isinstance(value, functools.partial):
            yield from map(self.text, (value.func, value.args, value.keywords))
        elif isinstance(value, (set, frozenset)):
            yield from sorted(map(self.text, value))
        elif isinstance(value, Mapping):
            yield from (self.text(one) for pair in value.items() for one in pair)
        elif isinstance(value, (list, tuple, deque)):
            is_flat = {*map(type, value)} <= {int, float, bool}  # There may be millions of numbers: no text for each.
            yield from [repr(list(value))] if is_flat else map(self.text, value)
        else:
            yield from self._object(value)

    def _function(self, function: types.FunctionType) -> Iterator[str]:
        """Yield texts for a function: its closure, code and defaults, and the globals that it uses."""
        home = function.__globals__.get("__name__", "")
        yield function.__qualname__
        yield self.text([cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)])
        yield self.text(vars(function))
        if origin_of_code(home) == "named":
            yield f"{home} {version(home)}"
            return
        yield from self._code(function.__code__, function.__doc__)
        if origin_of_code(home) == "ours":
            yield self.text([function.__defaults__, function.__kwdefaults__])
            yield from self._outside(function)

    def _code(self, code: types.CodeType, docstring: str | None = None) -> Iterator[str]:
        """Yield the instructions, names and constants of code, without the docstring."""
        constants = code.co_consts[1:] if docstring and code.co_consts[:1] == (docstring,) else code.co_consts
        yield from (code.co_code.hex(), getattr(code, "co_exceptiontable", b"").hex(), repr(code.co_names))
        yield from map(self.text, constants)

    def _outside(self, function: types.FunctionType) -> Iterator[str]:
        """Yield texts for the functions and classes that a function uses, and add its variables to `variables`."""
        found = function.__globals__
        used = {name: found[name] for name in _names(function.__code__, "LOAD_GLOBAL", "LOAD_NAME") if name in found}
        for key, module in list(used.items()):
            if isinstance(module, types.ModuleType) and origin_of_code(module.__name__) == "ours":
                names = _names(function.__code__, "LOAD_ATTR", "LOAD_METHOD")
                used |= {f"{key}.{name}": vars(module)[name] for name in names if name in vars(module)}
        for name, value in sorted(used.items()):
            if isinstance(value, types.ModuleType) or type(value).__module__ == "typing":
                continue
            if isinstance(value, type) or inspect.isroutine(value):
                yield name + self.text(value)
            else:
                self.variables.setdefault(name, set()).add(self.text(value))

    def _class(self, found: type) -> Iterator[str]:
        """Yield texts for the code of a class and of its bases, and add their variables to `variables`."""
        yield found.__qualname__.removeprefix("FSDP")  # fully_shard renames classes like this.
        for base in found.__mro__:
            if origin_of_code(base.__module__) == "named":
                continue
            for name, value in sorted((name, value) for name, value in vars(base).items() if name not in _ABOUT):
                is_code = isinstance(value, (staticmethod, classmethod, property, functools.partial, type))
                if is_code or inspect.isfunction(value) or hasattr(type(value), "__get__"):
                    yield "" if isinstance(value, _SLOT) else name + self.text(value)
                elif not name.startswith(("__", "_abc_")) and origin_of_code(base.__module__) == "ours":
                    self.variables.setdefault(f"{base.__qualname__}.{name}", set()).add(self.text(value))

    def _object(self, value: Any) -> Iterator[str]:
        """Yield texts for the class and the attributes of an object."""
        home = type(value).__module__
        if callable(getattr(value, "fingerprint", None)) and not isinstance(value, nn.Module):
            yield str(value.fingerprint())
            return
        if isinstance(value, nn.Module):
            yield from self.model(value, self)
            return
        yield self.text(type(value))
        state = dict(attributes_of(value))
        if hasattr(value, "tobytes"):  # A numpy array or a PIL image.
            is_of_objects = getattr(getattr(value, "dtype", None), "hasobject", False)
            yield f"{getattr(value, 'dtype', '')} {getattr(value, 'shape', '')}"
            yield self.text(value.tolist()) if is_of_objects else hashlib.blake2b(value.tobytes()).hexdigest()
        elif inspect.isroutine(value):
            yield f"{getattr(value, '__module__', '')} {value.__qualname__}"
            owner = getattr(value, "__self__", None)
            yield "" if isinstance(owner, types.ModuleType) else self.text(owner)
        elif isinstance(value, torch.ScriptObject):
            yield self._scripted(value)
        elif _is_standard(home) and home.partition(".")[0] not in _WALKED:
            text = repr(value)
            is_plain = " at 0x" not in text and not isinstance(value, logging.Logger)
            yield text if is_plain else self._unknown(value)
        elif state and not home.startswith(("torch.distributed", DYNAMO)):
            yield from (name + self.text(one) for name, one in sorted(state.items()) if name not in ORIGIN_NAMES)
        elif not hasattr(value, "__dict__") and " at 0x" in repr(value):
            yield self._unknown(value)
        elif not state:
            yield re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))

    def _scripted(self, value: Any) -> str:
        try:
            return self.text(value.__getstate__())
        except Exception:  # Some TorchScript classes can't be pickled.
            return self._unknown(value)

    def _unknown(self, value: Any) -> str:
        if not _is_standard(type(value).__module__):
            self.opaque.add(f"{type(value).__module__}.{type(value).__qualname__}")
        return ""


# Attributes that say where a model came from or where it is. They don't change what it computes.
ORIGIN_NAMES = frozenset(
    {"name_or_path", "_name_or_path", "_commit_hash", "transformers_version", "hf_device_map", "_is_hf_initialized"}
)


def hash_texts(texts: Iterable[str]) -> str:
    """Return a hash of some texts."""
    found = hashlib.blake2b(digest_size=16)
    for text in texts:
        found.update(f"{len(text)} {text}".encode(errors="surrogatepass"))
    return found.hexdigest()


def attributes_of(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of an object's attributes, including those in slots."""
    yield from (getattr(value, "__dict__", None) or {}).items()
    for base in type(value).__mro__:
        slots = vars(base).get("__slots__", ())
        for name in [slots] if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield name, getattr(value, name)


@functools.cache
def origin_of_code(module: str) -> str:
    """Return where the code of a Python module comes from.

    "ours" is the user's code, "installed" a package, and "named" a package that its name and version identify.
    """
    top = module.partition(".")[0]
    if top in _MAIN:
        return "ours"
    if top in _BY_NAME or _is_standard(module):
        return "named"
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return "installed" if re.search(r"[/\\](site|dist)-packages[/\\]", file) else "ours"


@functools.cache
def _is_standard(module: str) -> bool:
    """Return True if a Python module is in the standard library."""
    found = sys.modules.get(module)
    file = getattr(found, "__file__", None)
    if file is None:
        return module.partition(".")[0] in sys.stdlib_module_names
    return file.startswith(_STANDARD) and not re.search(r"[/\\](site|dist)-packages[/\\]", file)


def version(module: str) -> str:
    """Return the version of a Python module's package, without its build tag."""
    found = sys.modules.get(module.partition(".")[0])
    return str(getattr(found, "__version__", "")).partition("+")[0]


def _names(code: types.CodeType, *instructions: str) -> set[str]:
    """Return the names that these instructions use, including those in inner functions and comprehensions."""
    found = {one.argval for one in dis.get_instructions(code) if one.opname in instructions}
    return found.union(*(_names(one, *instructions) for one in code.co_consts if inspect.iscode(one)))


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


WRITTEN = "written as it runs"  # In a digest, the text of an attribute that the model writes as it runs.
_LONGEST = 40  # The longest text that a digest keeps for a message to show. Longer ones are hashed.
_WRAPPING = ("OptimizedModule", "CheckpointWrapper", "FullyShardedDataParallel", "DistributedDataParallel")
# Attributes that torch and accelerate set, and those that only say where a model came from.
_NOT_COMPARED = {*vars(nn.Module()), "_compiled_call_impl", "_hf_hook", "_old_forward", *ORIGIN_NAMES}
_ELSEWHERE = ("torch.distributed", DYNAMO, "accelerate", "hookline")  # Packages that hook, shard or move a model.
_SHARDED = ("__", "_fsdp", "_is_fsdp")  # Prefixes of the attributes that fully_shard sets.
_STATE = ("attributes", "variables")  # The parts of a digest that a forward may change.
_wrote: weakref.WeakKeyDictionary[nn.Module, set[str]] = weakref.WeakKeyDictionary()  # Names each model has written.


class ModelDigest:
    """The fingerprint of a model, part by part."""

    def __init__(self, model: nn.Module, known: Fingerprinter) -> None:
        self.known = known
        self.model = unwrap(model)
        named = [(_plain_name(path), module) for path, module in self.model.named_modules()]
        self.modules = [(path, module) for path, module in named if type(module).__name__ not in _WRAPPING]
        for path, module in self.modules:
            self.known.name(module, f"module {path}")
            for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
                if tensor is not None and name not in non_persistent_buffers(module):
                    self.known.name(tensor, f"weight {path}.{name}")

    def as_json(self) -> dict[str, Any]:
        """Return the whole fingerprint, as plain JSON."""
        modes = {module.training for _, module in self.modules}
        training: Any = modes.pop() if len(modes) == 1 else hash_texts([f"{one.training}" for _, one in self.modules])
        found = {"class": _class(self.model), "weights": self.weights(), "training": training}
        return {**found, **self.state(), "code": self.code()}

    @cached_property
    def classes(self) -> dict[str, set[type]]:
        """The classes of the modules, by name."""
        found: dict[str, set[type]] = {}
        for _, module in self.modules:
            made = next(base for base in type(module).__mro__ if not base.__module__.startswith(_ELSEWHERE))
            found.setdefault(_class(module), set()).add(made)
        return found

    @torch.no_grad()
    def weights(self) -> str:
        """Return a hash of the modules, every bit of their parameters and buffers, and their other saved state."""
        found = hashlib.blake2b(digest_size=16)
        for path, module in self.modules:
            found.update(f"{path} {_class(module)}({module.extra_repr()})\n".encode())
        for name, one in checksums(self._tensors()):
            found.update(name.encode())
            found.update(one)
        for path, module in self.modules:
            for name, value in _saved(module):
                found.update(f"{path}.{name} {self.known.text(value)}".encode())
        return found.hexdigest()

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the names and values of parameters and persistent buffers, each tensor once."""
        seen: set[int] = set()
        for path, module in self.modules:
            for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
                if tensor is not None and id(tensor) not in seen and name not in non_persistent_buffers(module):
                    seen.add(id(tensor))
                    yield f"{path}.{name}", _loaded_weight(module, name, tensor)

    def code(self) -> dict[str, str]:
        """Return the versions of the packages that define the model's classes, and a hash of each class's code."""
        homes = {home for some in self.classes.values() for home in _homes(some) if origin_of_code(home) != "ours"}
        versions = {home.partition(".")[0]: version(home) for home in homes if not home.startswith(_ELSEWHERE)}
        made = [
            name for name, some in self.classes.items() if any(origin_of_code(home) != "named" for home in _homes(some))
        ]
        return {
            **{name: found for name, found in sorted(versions.items()) if found},
            **{name: _joined(sorted(map(self.known.text, self.classes[name]))) for name in made},
        }

    def state(self) -> dict[str, dict[str, str]]:
        """Return the state that a forward may write: attributes of modules, and variables that their code uses."""
        groups: dict[str, list[str]] = {}
        for path, module in self.modules:
            for name, value in self._attributes(module):
                group = re.sub(r"\d+", "*", f"{path}.{name}".lstrip("."))
                groups.setdefault(group, []).append(_readable(self.known.text(value)))
        for some in self.classes.values():
            if any(origin_of_code(home) == "ours" for home in _homes(some)):
                sorted(map(self.known.text, some))  # Adds the variables that the code uses to `known.variables`.
        variables = {name: _joined([_readable(text) for text in sorted(texts)]) for name, texts in
                     sorted(self.known.variables.items())}  # fmt: skip
        return {"attributes": {name: _joined(texts) for name, texts in groups.items()}, "variables": variables}

    def _attributes(self, module: nn.Module) -> Iterator[tuple[str, Any]]:
        """Yield the attributes of a module without its parameters, persistent buffers and submodules."""
        own = getattr(module, "fingerprint", None)
        if inspect.ismethod(own):
            yield "fingerprint()", own()
            return
        for name in sorted(non_persistent_buffers(module)):
            yield name, module._buffers.get(name)
        found = vars(module)
        for name in sorted({*found, "forward"} - _NOT_COMPARED):
            value = found.get("_old_forward", found.get(name)) if name == "forward" else found[name]
            if value is not None and not name.startswith(_SHARDED) and not _is_of_wrapping(value, module):
                yield name, value


def model_digest(model: nn.Module, opaque: set[str] | None = None) -> dict[str, Any]:
    """Return the fingerprint of a model, as plain JSON. Names of classes that can't be compared go to `opaque`."""
    return ModelDigest(model, Fingerprinter(_texts_of_model, opaque)).as_json()


def function_text(function: Any, opaque: set[str] | None = None, model: nn.Module | None = None) -> str | None:
    """Return a text that identifies a function by its code, its closure and the attributes of its object.

    If it holds `model`, that is not looked into.
    """
    if function is None or isinstance(function, str):
        return function
    name, known = getattr(function, "__qualname__", type(function).__qualname__), Fingerprinter(_texts_of_model, opaque)
    if model is not None:
        known.name(model, "the model")
    text = known.text(function)
    variables = [f"{key} {sorted(texts)}" for key, texts in sorted(known.variables.items())]
    return f"{name} {hash_texts([text, *variables])}"


def _texts_of_model(model: nn.Module, known: Fingerprinter) -> Iterator[str]:
    """Yield the text of a model that another object holds."""
    yield json.dumps(ModelDigest(model, known).as_json())


def without_writes(before: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """Return the digest with `WRITTEN` for every attribute that the model changed as it ran."""
    after, digest, wrote = (
        ModelDigest(model, Fingerprinter(_texts_of_model)).state(),
        dict(before),
        _wrote.setdefault(model, set()),
    )
    for part in _STATE:
        one, other = before[part], after[part]
        wrote |= {name for name in {**one, **other} if one.get(name) not in (other.get(name), WRITTEN)}
        digest[part] = {name: WRITTEN if name in wrote else one[name] for name in {**one, **other}}
    return digest


def reconcile(digest: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the digest with the values of `found`, the store's digest, where either of them has `WRITTEN`."""
    new = dict(digest)
    for part in _STATE:
        one, other = digest[part], found.get(part, {})
        loose = [name for name in {**one, **other} if WRITTEN in (one.get(name), other.get(name))]
        kept = {name: value for name, value in one.items() if name not in loose}
        new[part] = {**kept, **{name: other[name] for name in loose if name in other}}
    return new


def names_written(digest: Mapping[str, Any]) -> list[str]:
    """Return the names of attributes that can't be compared because the model writes them."""
    return sorted(name for part in _STATE for name, value in digest[part].items() if value == WRITTEN)


def _saved(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield what a module saves besides its parameters and buffers, such as packed weights and extra state."""
    for name, value in saved_by_itself(module).items():
        if name not in module._parameters and name not in module._buffers:
            yield name, value


def _readable(text: str) -> str:
    """Return a short text unchanged, for messages to show, and the hash of a long one."""
    return text if len(text) <= _LONGEST else hash_texts([text])


def _homes(classes: set[type]) -> set[str]:
    """Return the Python modules that define these classes and their bases."""
    return {base.__module__ for one in classes for base in one.__mro__}


def _joined(texts: list[str]) -> str:
    """Return one text for a group of attributes: their common text, or else a hash of all."""
    return texts[0] if len({*texts}) == 1 else hash_texts(texts)


def _is_of_wrapping(value: Any, module: nn.Module) -> bool:
    """Return True if an attribute belongs to code that hooks, shards or moves the model."""
    if isinstance(value, (int, float, str)):
        return False
    function = getattr(value, "func", value)  # accelerate sets a functools.partial as forward.
    code = getattr(function, "__globals__", {}).get("__name__", "") or type(value).__module__
    is_own = getattr(value, "__self__", None) is module and getattr(value, "__func__", None) is type(module).forward
    return is_of_hookline(value) or is_own or code.startswith(_ELSEWHERE)


def _class(module: nn.Module) -> str:
    return type(module).__qualname__.removeprefix("FSDP")  # fully_shard renames classes like this.


def _plain_name(name: str) -> str:
    """Return a module's name without the parts that wrappers add."""
    return re.sub(r"(^|\.)(_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)(?=\.|$)", "", name).lstrip(".")


def _loaded_weight(module: nn.Module, name: str, tensor: Tensor) -> Tensor:
    """Return a weight with its values. Until the module runs, accelerate may keep a meta tensor in its place."""
    hook = getattr(module, "_hf_hook", None)
    for one in [hook, *getattr(hook, "hooks", ())] if tensor.is_meta else ():
        weights = getattr(one, "weights_map", None)
        if weights is not None:
            with suppress(KeyError):
                found: Tensor = weights[name]
                return found
    return tensor
