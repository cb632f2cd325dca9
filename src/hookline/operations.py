"""Torch's functions by the names that users write: `matmul` for `@`, `add_` for `+=`, `T` for `.T`."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

# What Python's operators are called where torch has no function of the operator's own name.
_OPERATORS = {
    "rsub": "sub", "rdiv": "div", "rtruediv": "div", "truediv": "div", "itruediv": "div_", "idiv": "div_",
    "floordiv": "floor_divide", "rfloordiv": "floor_divide", "ifloordiv": "floor_divide_", "mod": "remainder",
    "rmod": "remainder", "imod": "remainder_", "rpow": "pow", "ipow": "pow_", "radd": "add", "iadd": "add_",
    "rmul": "mul", "imul": "mul_", "isub": "sub_", "rmatmul": "matmul", "and": "bitwise_and", "rand": "bitwise_and",
    "iand": "bitwise_and_", "or": "bitwise_or", "ror": "bitwise_or", "ior": "bitwise_or_", "xor": "bitwise_xor",
    "rxor": "bitwise_xor", "ixor": "bitwise_xor_", "invert": "bitwise_not", "lshift": "bitwise_left_shift",
    "rshift": "bitwise_right_shift", "rlshift": "bitwise_left_shift", "rrshift": "bitwise_right_shift",
    "ilshift": "bitwise_left_shift_", "irshift": "bitwise_right_shift_", "pos": "positive",
}  # fmt: skip
_REFLECTED = (
    "__rsub__",
    "__rdiv__",
    "__rtruediv__",
    "__rpow__",
    "__rfloordiv__",
    "__rmod__",
    "__rlshift__",
    "__rrshift__",
)
_ITEMS = {"getitem": ("input", "index"), "setitem": ("input", "index", "value"), "einsum": ("equation",)}
_NAMESPACES = ("linalg_", "fft_", "special_")
_TENSORS = ("T", "H", "mT", "mH", "data", "real", "imag")  # The properties of a tensor that are tensors.

# Those that give their argument again: as a view, a copy, in another order or dtype.
FOLLOWED = frozenset((
    "T", "H", "mT", "mH", "data", "real", "imag", "t", "adjoint", "transpose", "permute", "swapaxes", "swapdims",
    "movedim", "moveaxis", "view", "view_as", "reshape", "reshape_as", "expand", "expand_as", "broadcast_to",
    "squeeze", "unsqueeze", "flatten", "unflatten", "ravel", "narrow", "select", "chunk", "split",
    "split_with_sizes", "tensor_split", "hsplit", "vsplit", "dsplit", "unbind", "diagonal", "as_strided", "unfold",
    "detach", "detach_", "alias", "contiguous", "clone", "to", "type", "type_as", "float", "double", "half",
    "bfloat16", "cfloat", "cdouble", "chalf", "int", "long", "short", "char", "byte", "bool", "cpu", "cuda",
    "requires_grad_", "retain_grad", "pin_memory", "rename", "refine_names", "align_to", "align_as", "as_subclass",
    "unsafe_chunk", "unsafe_split", "view_as_real", "view_as_complex", "resolve_conj", "resolve_neg", "t_",
    "transpose_", "squeeze_", "unsqueeze_", "atleast_1d", "atleast_2d", "atleast_3d",
))  # fmt: skip

# Those that give no tensor, and would only be in the way of a pattern.
_TELLING = frozenset((
    "size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "element_size", "data_ptr", "item",
    "tolist", "numpy", "is_contiguous", "is_floating_point", "is_complex", "is_signed", "is_conj", "is_neg",
    "is_nonzero", "is_inference", "is_pinned", "is_same_size", "is_set_to", "is_shared", "is_coalesced",
    "get_device", "storage", "untyped_storage", "backward", "register_hook", "register_post_accumulate_grad_hook",
    "allclose", "equal", "result_type", "can_cast", "promote_types", "is_tensor", "is_storage",
    "is_autocast_enabled", "set_grad_enabled", "_set_grad_enabled", "is_grad_enabled", "dim_order", "__len__",
    "__bool__", "__int__", "__long__", "__float__", "__complex__", "__index__", "__repr__", "__format__", "__hash__",
    "__contains__", "__array__", "__deepcopy__", "__reduce_ex__", "__setstate__", "__dlpack__", "__dlpack_device__",
    "__set__",
))  # fmt: skip


def is_reflected(function: Any) -> bool:
    """Whether a function is an operator that Python asks of its right side, with its arguments the other way round."""
    return getattr(function, "__name__", "") in _REFLECTED


def read_name(function: Any) -> str:
    """Return the name of a torch function, tensor method, operator or property, as a user would write it."""
    name = str(getattr(function, "__name__", "") or type(function).__name__)
    if name in ("__get__", "__set__"):  # Of a property, such as `.T`.
        return str(getattr(getattr(function, "__self__", None), "__name__", name))
    name = name.partition(".")[0]  # The overload of an operator in torch.ops.
    if name.startswith("__") and name.endswith("__"):
        name = name.strip("_")
        return _OPERATORS.get(name, name)
    return next((name.removeprefix(space) for space in _NAMESPACES if name.startswith(space)), name)


def may_give_tensors(function: Any) -> bool:
    """Whether a function may give a tensor, and does not just tell something about one."""
    name = str(getattr(function, "__name__", ""))
    return read_name(function) in _TENSORS if name == "__get__" else name not in _TELLING


name_of = lru_cache(maxsize=8192)(read_name)
gives_tensors = lru_cache(maxsize=8192)(may_give_tensors)  # Dynamo warns of what has a cache: it traces the other.


def is_followed(name: str, args: tuple[Any, ...]) -> bool:
    """Whether an operation gives its first argument's numbers again: a view, a cast, a copy."""
    return name in FOLLOWED or (name == "getitem" and not any(map(_gathers, args[1:])))


def _gathers(index: Any) -> bool:
    if isinstance(index, tuple):
        return any(map(_gathers, index))
    return isinstance(index, (Tensor, list)) or type(index).__module__ == "numpy"


def written_by(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what a function of that name is known to write into: the `out=` it was given, or its first argument."""
    if kwargs.get("out") is not None:
        return kwargs["out"]
    writes = name == "setitem" or (name.endswith("_") and not name.endswith("__")) or kwargs.get("inplace")
    return args[0] if writes and args else None


def parameter_names(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, ...] | None:
    """Return the names of a builtin's parameters, for these arguments; None where torch has none for it."""
    if name_of(function) in _ITEMS:
        return _ITEMS[name_of(function)]
    for schema in _schemas(function):
        positional = [one for one in schema.arguments if not one.kwarg_only]
        names = {one.name for one in schema.arguments} | {"out", "input"}
        if len(args) <= len(positional) and set(kwargs) <= names and all(map(_takes, positional, args)):
            return tuple("input" if one.name == "self" else str(one.name) for one in positional)
    return ("input",) if args and isinstance(args[0], Tensor) else None


def _takes(parameter: Any, value: Any) -> bool:
    """Whether a parameter in a schema of torch's takes a value, as far as its type tells."""
    kind = str(parameter.type)
    if isinstance(value, torch.dtype):
        return bool(parameter.name == "dtype")
    for type_of_value, words in _KINDS.items():
        if isinstance(value, type_of_value):
            return any(word in kind for word in words)
    return True


# By which words in the type of a parameter it is known to take a value.
_KINDS: dict[type, tuple[str, ...]] = {
    Tensor: ("Tensor",),
    type(None): ("Optional",),
    bool: ("bool", "number"),
    int: ("int", "number", "float"),
    float: ("float", "number"),
    str: ("str",),
    torch.device: ("Device",),
    tuple: ("List",),
    list: ("List",),
}


@lru_cache(maxsize=1024)
def _schemas(function: Any) -> tuple[Any, ...]:
    """Return what torch knows of a builtin's overloads."""
    if isinstance(function, torch._ops.OpOverload):
        return (function._schema,)
    name = str(getattr(function, "__name__", "")).partition(".")[0]
    return tuple(torch._C._jit_get_schemas_for_operator(f"aten::{name}")) if name else ()
