"""Nested values: arguments and outputs of modules, in any structure.

`children` and `rebuild` define what a container is. Everything else here is written in terms of them: `get_part` and
`put_part` for one part, `map_tensors` and `leaves` for all tensors. Nothing the caller holds is modified, unless it
passes another `rebuild`, such as that of `Exchange` in containers.py.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import re
import types
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from hookline._values.tokens import find_columns, find_tokens, put_columns, take_columns
from hookline.errors import EditError, HooklineError, SiteError, did_you_mean


class _Star:
    def __repr__(self) -> str:
        return "*"


Arguments = tuple[tuple[Any, ...], dict[str, Any]]  # The arguments of a call: by position, and by name.
STAR = _Star()  # In a parsed subscript: every index of that dimension.
DEEPEST = 40  # How many levels of nesting hookline looks into.
WRITTEN_BITS = 14_000  # The most bits of an integer to write in decimal: Python refuses over 4,300 digits.
ATOMS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, type)
CLOSED = (nn.Module, types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType, torch.Generator)
ITERATORS = (Iterator, AsyncIterator, Coroutine)
USUAL = (tuple, list, dict)  # Checked by `type()` first: an isinstance check takes longer than all the rest.


def children(value: Any) -> dict[Any, Any] | None:
    """Return the parts of a container by key, or None for anything that is not one."""
    if type(value) in (tuple, list):
        return dict(enumerate(value))
    if isinstance(value, (Tensor, *ATOMS)):
        return None
    if isinstance(value, (tuple, list, deque)):
        return dict(enumerate(value))
    if isinstance(value, Mapping):
        return dict(value)
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        return {name: getattr(value, name) for name in names if hasattr(value, name)}
    return None


def rebuild(value: Any, parts: Mapping[Any, Any]) -> Any:
    """Return a container like `value` that holds `parts`."""
    if isinstance(value, tuple):
        items = list(parts.values())
        # For named tuples, `_make` bypasses the constructor. Integers have no gradient, so the batch sizes in the
        # gradient of a PackedSequence are None, and its constructor refuses that.
        if hasattr(value, "_make"):
            return value._make(items)
        try:
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        except TypeError:  # A subclass with another constructor.
            raise HooklineError(
                f"a {type(value).__name__} passes here, which can't be rebuilt from its items"
            ) from None
    if type(value) is list:
        return list(parts.values())
    if type(value) in (dict, types.MappingProxyType):
        return type(value)(dict(parts))
    try:
        new = _copied_output(value) if _is_output(value) else copy.copy(value)
    except Exception as error:
        raise HooklineError(f"a {type(value).__name__} passes here, which can't be copied: {error}") from None
    for key, part in parts.items():
        if isinstance(value, (list, deque, Mapping)):
            new[key] = part
        else:
            object.__setattr__(new, key, part)  # Frozen dataclasses refuse setattr.
    return new


def _is_output(value: Any) -> bool:
    """Return True for an output of transformers, or one made like it: both a dict and a dataclass."""
    return isinstance(value, OrderedDict) and hasattr(value, "__dataclass_fields__") and not hasattr(value, "__copy__")


def _copied_output(value: Any) -> Any:
    """Return a shallow copy of an output of transformers. `copy.copy` takes many times as long."""
    new: Any = OrderedDict.__new__(type(value))
    for name, held in vars(value).items():
        object.__setattr__(new, name, held)
    for key, part in value.items():
        OrderedDict.__setitem__(new, key, part)
    return new


_rebuild = rebuild


def object_parts(value: Any) -> dict[str, Any] | None:
    """Return the attributes of an object that holds tensors, lists or dicts, such as a KV cache; None for any other."""
    if isinstance(value, (Tensor, *ATOMS, *CLOSED)):
        return None
    attributes = _own_attributes(value)
    holds = any(isinstance(part, (list, dict, deque)) or _holds_tensor(part, depth=6) for part in attributes.values())
    return attributes if holds else None


def parts_of(value: Any) -> dict[Any, Any] | None:
    """Return the parts of a container, or the attributes of an object: see `object_parts`."""
    parts = children(value)
    return object_parts(value) if parts is None else parts


def held_by(value: Any) -> dict[Any, Any] | None:
    """Return the parts of a container or the attributes of any other object; None for types that are not searched."""
    parts = children(value)
    if parts is not None or isinstance(value, (Tensor, *ATOMS, *CLOSED, *ITERATORS)):
        return parts
    return _own_attributes(value)


def attributes_of(module: nn.Module) -> list[Any]:
    """Return the attributes of a module, without its parameters, buffers, submodules and the tables of nn.Module."""
    return [one for name, one in module.__dict__.items() if name not in _TORCHS_OWN]


def get_part(value: Any, subscripts: Iterable[Any]) -> Any:
    """Return the part of `value` at `subscripts`."""
    for subscript in subscripts:
        value = _get_one(value, subscript)
    return value


def put_part(
    value: Any,
    subscripts: tuple[Any, ...],
    new: Any,
    rebuild: Callable[[Any, Mapping[Any, Any]], Any] = rebuild,
) -> Any:
    """Return `value` with `new` at `subscripts`; see `map_tensors` for `rebuild`."""
    if len(subscripts) == 0:  # Not `if not subscripts`: see `act_traced` in compiled.py.
        return new
    if isinstance(value, Tensor):
        return _put_in_tensor(value, subscripts, new)
    first, rest = subscripts[0], subscripts[1:]
    if isinstance(value, (tuple, list)) and isinstance(first, slice):
        return _put_slice(value, first, rest, new, rebuild)
    part = put_part(_get_one(value, first), rest, new, rebuild)
    parts = held_by(value)
    if not parts:
        raise EditError(f"{describe(value)} passes here, of which no part can be changed; change it as a whole")
    key = _key_of(value, parts, first)
    if isinstance(value, Mapping) and key not in parts:  # A ModelOutput has no keys for its fields that are None.
        raise EditError(
            f"{describe(value)} passes here, and {first!r} is not one of its keys; if the model makes it only when "
            "asked, ask for it, as with output_hidden_states=True"
        )
    return rebuild(value, {**parts, key: part})


def is_empty(value: Any) -> bool:
    """Return True for a tensor without elements, or a list or tuple without items."""
    if isinstance(value, Tensor):
        return value.numel() == 0
    return isinstance(value, (tuple, list)) and len(value) == 0


def selects_nothing(value: Any, subscripts: Iterable[Any]) -> bool:
    """Return True if a slice among the subscripts selects nothing of a value that is not empty."""
    for subscript in subscripts:
        part = _get_one(value, subscript)
        slices = [one for one in (subscript if isinstance(subscript, tuple) else (subscript,)) if type(one) is slice]
        if slices and is_empty(part) and not is_empty(value):
            return True
        value = part
    return False


def take_part(value: Any, subscripts: tuple[Any, ...]) -> tuple[Any, bool]:
    """Return the part of a value at some subscripts, and whether they select anything of it."""
    part = get_part(value, subscripts)
    return part, not (is_empty(part) and selects_nothing(value, subscripts))


def split(value: Any, subscripts: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """Follow `subscripts` into the containers; return the value there and the subscripts left for a tensor."""
    for position, subscript in enumerate(subscripts):
        if isinstance(value, Tensor):
            return value, subscripts[position:]
        value = _get_one(value, subscript)
    return value, ()


def expand(value: Any, subscripts: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """Return the subscripts that a `[*]` stands for on this value; without a `[*]`, only `subscripts`."""
    for position, subscript in enumerate(subscripts):
        items = subscript if isinstance(subscript, tuple) else (subscript,)
        if STAR not in items:
            continue
        head, tail = subscripts[:position], subscripts[position + 1 :]
        here = get_part(value, head)
        found = []
        for choice in _choices(here, items):
            one = choice if isinstance(subscript, tuple) else choice[0]
            rests = expand(_get_one(here, one), tail) if tail else [()]
            found += [(*head, one, *rest) for rest in rests]
        return found
    return [subscripts]


def map_tensors(
    function: Callable[[Tensor], Any],
    value: Any,
    _inside: tuple[int, ...] = (),
    in_objects: bool = False,
    rebuild: Callable[[Any, Mapping[Any, Any]], Any] = rebuild,
) -> Any:
    """Return `value` with every tensor in it, at any depth, replaced by `function(tensor)`.

    Args:
        in_objects: Whether to copy every object in `value`, also one without tensors.
        rebuild: Puts the results into a container. The default builds a new container.
    """
    if isinstance(value, Tensor):
        return function(value)
    if type(value) not in USUAL:
        if isinstance(value, ATOMS):
            return value
        _refuse_unreadable(value)
    if id(value) in _inside:
        return value
    parts = children(value)
    if parts is None:
        # Inside a copied object copy every object, even one without tensors: an empty key-value cache will get some.
        parts = (
            _own_attributes(value) if in_objects and not isinstance(value, (*ATOMS, *CLOSED)) else object_parts(value)
        )
        in_objects = parts is not None
    if parts is None or len(_inside) > DEEPEST:
        is_buffer = type(value) is bytearray or type(value).__name__ == "ndarray"  # Somebody may write into it.
        return copy.copy(value) if is_buffer and rebuild is _rebuild else value
    inside = (*_inside, id(value))
    mapped = {key: map_tensors(function, part, inside, in_objects, rebuild) for key, part in parts.items()}
    return rebuild(value, mapped)


def _refuse_unreadable(value: Any) -> None:
    if isinstance(value, ITERATORS):
        raise HooklineError(f"a {type(value).__name__} passes here, and reading it would use it up; hook what makes it")
    if isinstance(value, (set, frozenset)) and any(isinstance(part, Tensor) for part in value):
        raise HooklineError(f"a {type(value).__name__} of tensors passes here, which has no order to name its parts by")


def leaves(value: Any, _inside: tuple[int, ...] = ()) -> list[Tensor]:
    """Return every tensor in `value`, in order."""
    if isinstance(value, Tensor):
        return [value]
    inside = (*_inside, id(value))
    return [tensor for part in _parts(value, _inside).values() for tensor in leaves(part, inside)]


def leaf_places(value: Any, _inside: tuple[int, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the subscripts of each tensor in `leaves(value)`."""
    if isinstance(value, Tensor):
        return [()]
    inside = (*_inside, id(value))
    return [(key, *rest) for key, part in _parts(value, _inside).items() for rest in leaf_places(part, inside)]


def _parts(value: Any, inside: tuple[int, ...]) -> dict[Any, Any]:
    """Return the parts of a value that may hold tensors. Don't follow a cycle, or an iterator: that would use it up."""
    if id(value) in inside or (type(value) not in USUAL and isinstance(value, ITERATORS)):
        return {}
    return parts_of(value) or {}


def subscript_text(subscript: Any) -> str:
    """Return a subscript as it is written: `[:, -1]`, `["mask"]`."""
    if isinstance(subscript, str):
        return '["' + re.sub(r'[\\"]', r"\\\g<0>", subscript) + '"]'
    items = subscript if isinstance(subscript, tuple) else (subscript,)
    return f"[{', '.join(map(_item_text, items))}]"


def shape_of(tensor: Tensor) -> str:
    """Return a tensor's shape as text; for a nested tensor, its number of parts."""
    if tensor.is_nested:
        return f"{tensor.size(0)} nested"
    return str(tuple(tensor.shape))


def describe(value: Any) -> str:
    """Say in a few words what `value` is: "float32 (2, 5)", "a tuple of 2"."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {shape_of(value)}"
    if isinstance(value, Mapping):
        keys = ", ".join(map(str, value))
        return f"{type(value).__name__} of {keys}" if len(keys) < 60 else f"{type(value).__name__} of {len(value)}"
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__} of {len(value)}"
    if isinstance(value, int) and value.bit_length() > WRITTEN_BITS:
        return f"int of {value.bit_length():,} bits"
    if isinstance(value, (bool, int, float, complex)) or value is None:
        return repr(value)
    return type(value).__name__


def _item_text(item: Any) -> str:
    if item is Ellipsis:
        return "..."
    if not isinstance(item, slice):
        return str(item)
    start, stop, step = ("" if bound is None else str(bound) for bound in (item.start, item.stop, item.step))
    return f"{start}:{stop}" + (f":{step}" if step else "")


def _get_one(value: Any, subscript: Any) -> Any:
    try:
        if isinstance(subscript, str) and not (isinstance(value, Mapping) and subscript in value):
            return _attributes(value)[subscript]
        if isinstance(subscript, str) and isinstance(value, Tensor):
            raise KeyError(subscript)
        at = find_columns(subscript) if type(subscript) is tuple else None
        return value[subscript] if at is None else take_columns(value, subscript, at)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        if find_tokens(subscript) is not None and not isinstance(value, Tensor):
            raise SiteError(
                f"tokens are a dimension of a tensor, and {describe(value)} passes here{_of_an_item(value, subscript)}"
            ) from None
        if find_tokens(subscript) is not None:
            raise SiteError(
                f"{subscript_text(subscript)} names tokens, and which they are is known only while the model runs: "
                "name them where a value is captured, or read them with cache.tokens(site)"
            ) from None
        near = did_you_mean(subscript, _attributes(value)) if isinstance(subscript, str) else ""
        problem = f": {error}" if isinstance(error, (IndexError, ValueError)) and error.args else ""
        problem = _out_of_range(value, subscript) or problem
        text = f"[{subscript!r}]" if isinstance(subscript, str) else subscript_text(subscript)
        near = near or _in_an_item(value, subscript, text)
        raise SiteError(f"{text} is not a part of {describe(value)}{problem}{near}") from None


def _of_an_item(value: Any, subscript: Any) -> str:
    """Return a hint if a tuple or list has a tensor with several dimensions: "; did you mean [0][:, @new]?"."""
    items = value if isinstance(value, (tuple, list)) else ()
    numbers = [number for number, item in enumerate(items) if isinstance(item, Tensor) and item.dim() > 1]
    return f"; did you mean [{numbers[0]}]{subscript_text(subscript)}?" if numbers else ""


def _in_an_item(value: Any, subscript: Any, text: str) -> str:
    """Return a hint if a tuple or list has an item with this part: "; did you mean [0][:, -1]?"."""
    for number, item in enumerate(value if isinstance(value, (tuple, list)) and not isinstance(subscript, int) else ()):
        with suppress(SiteError):
            _get_one(item, subscript)
            return f"; did you mean [{number}]{text}?"
    return ""


def _out_of_range(value: Any, subscript: Any) -> str:
    """Say which index of a tensor is too large. Torch does not count the dimensions that `...` stands for."""
    items = subscript if isinstance(subscript, tuple) else (subscript,)
    taken = [item for item in items if item is not None and item is not Ellipsis]
    if not isinstance(value, Tensor) or value.is_nested or len(taken) > value.dim():
        return ""
    dimension = 0
    for item in items:
        if item is Ellipsis:
            dimension += value.dim() - len(taken)
        elif item is not None:
            size = value.shape[dimension]
            if type(item) is int and not -size <= item < size:
                return f": index {item} is out of bounds for dimension {dimension} with size {size}"
            dimension += 1
    return ""


def _attributes(value: Any) -> dict[str, Any]:
    """Return the parts that a string can name: keys, fields and plain attributes, but no properties and no methods."""
    found = _own_attributes(value)
    found |= {name: getattr(value, name) for name in fields(value)}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        found |= children(value) or {}
    if isinstance(value, Mapping):
        found |= {key: part for key, part in value.items() if isinstance(key, str)}
    return found


def _own_attributes(value: Any) -> dict[str, Any]:
    """Return an object's attributes, in its `__dict__` or in slots."""
    declared = [getattr(base, "__slots__", ()) for base in type(value).__mro__]
    slots = [name for names in declared for name in ((names,) if isinstance(names, str) else names)]
    found = {name: getattr(value, name) for name in slots if not name.startswith("__") and hasattr(value, name)}
    return {**found, **getattr(value, "__dict__", {})}


def fields(value: Any) -> tuple[str, ...]:
    """Return the names of a tuple's items, for a namedtuple or a result of torch.max and the like; () for any other."""
    if not isinstance(value, tuple):
        return ()
    fields: Any = getattr(value, "_fields", None) or getattr(type(value), "__match_args__", ())
    return tuple(fields)


def _key_of(value: Any, parts: Mapping[Any, Any], subscript: Any) -> Any:
    """Return the key among `parts` that a subscript means."""
    if isinstance(subscript, int) and isinstance(value, (tuple, list, deque)):
        return range(len(parts))[subscript]
    if isinstance(subscript, str) and subscript in fields(value):
        return fields(value).index(subscript)
    if isinstance(subscript, int) and isinstance(value, Mapping) and subscript not in value:
        return list(parts)[subscript]  # A ModelOutput accepts integers too.
    return subscript


def _put_in_tensor(tensor: Tensor, subscripts: tuple[Any, ...], new: Any) -> Tensor:
    result = tensor.clone()
    part = result
    for subscript in subscripts[:-1]:
        part = _get_one(part, subscript)
    old = _get_one(part, subscripts[-1])
    check_fits(new, old)
    last = subscripts[-1]
    at = find_columns(last) if type(last) is tuple else None
    if at is None:
        part[last] = new
    else:
        put_columns(part, last, at, new)
    return result


def _put_slice(value: Any, where: slice, rest: tuple[Any, ...], new: Any, rebuild: Callable[..., Any]) -> Any:
    items = list(value)
    part = put_part(value[where], rest, new)  # A slice is a new list.
    if isinstance(part, (Tensor, int, float)) or len(part) != len(items[where]):
        raise EditError(f"{describe(part)} given where {describe(value[where])} passes")
    items[where] = part
    return rebuild(value, dict(enumerate(items)))


def _choices(value: Any, items: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """Replace each STAR among the items of one subscript by every index it can take."""
    if not isinstance(value, Tensor):
        keys = list(value) if isinstance(value, Mapping) else range(len(children(value) or ()))
        return [(key,) for key in keys]
    consumed = [item for item in items if item is not None and item is not Ellipsis]
    if len(consumed) > value.dim():
        raise SiteError(f"{len(consumed)} indices for {describe(value)}")
    found: list[tuple[Any, ...]] = [()]
    dimension = 0
    for item in items:
        if item is Ellipsis:
            dimension += value.dim() - len(consumed)
        indices: Iterable[Any] = range(value.shape[dimension]) if item is STAR else [item]
        found = [(*chosen, index) for chosen in found for index in indices]
        dimension += item is not None and item is not Ellipsis
    return found


def _holds_tensor(value: Any, depth: int) -> bool:
    if isinstance(value, Tensor):
        return True
    if depth == 0 or isinstance(value, (*ATOMS, *CLOSED)):
        return False
    parts = children(value)
    if parts is None:
        parts = _own_attributes(value)
    return any(_holds_tensor(part, depth - 1) for part in list(parts.values()))


def check_fits(new: Any, old: Tensor) -> None:
    """Raise unless `new` can be written over `old`: a number it can hold, or a tensor of its kind that broadcasts."""
    if not isinstance(new, Tensor):
        check_number(new, old)
        return
    check_kind(new, old)
    offset = old.dim() - new.dim()
    if offset < 0 or any(size not in (1, old.shape[offset + i]) for i, size in enumerate(new.shape)):
        raise other_shape(new, old, "does not fit")


def check_kind(new: Tensor, old: Tensor) -> None:
    """Raise unless a new tensor has the layout, dtype and device of the old one."""
    if new.layout != old.layout:
        raise EditError(f"a {new.layout} tensor given where a {old.layout} one passes")
    if new.dtype != old.dtype:
        raise EditError(f"{new.dtype} given where {old.dtype} passes; cast it with .to({old.dtype})")
    if new.device != old.device:
        raise EditError(
            f"a value on {new.device} given where one on {old.device} passes; move it with .to('{old.device}')"
        )


def other_shape(new: Tensor, old: Tensor, did: str) -> EditError:
    """Return the error for a tensor of another shape."""
    error = EditError(f"shape {tuple(new.shape)} {did} where {tuple(old.shape)} passes")
    sizes = zip(reversed(new.shape), reversed(old.shape), strict=False)
    error.is_longer = any([size > 1 == before for size, before in sizes])
    return error


def check_number(new: Any, old: Tensor, instead: str = "a tensor or a number") -> None:
    """Raise unless `new` is a number that `old` can hold; `instead` names, for the error, what to give."""
    if not isinstance(new, (int, float, complex)) or (isinstance(new, bool) and old.dtype is not torch.bool):
        raise EditError(f"{describe(new)} given where {describe(old)} passes; give {instead}")
    whole = isinstance(new, (bool, int)) or (isinstance(new, float) and new.is_integer())
    if isinstance(new, complex) and not old.is_complex():
        raise EditError(f"{new!r} given where {describe(old)} passes; it can't hold a complex number")
    if old.is_floating_point() or old.is_complex() or isinstance(new, complex):
        if 1 < abs(new) < math.inf and abs(new) > (most := torch.finfo(old.dtype).max):
            raise EditError(f"{new!r} given where {describe(old)} passes; it can't hold more than {most:g}")
        return
    if not whole:
        raise EditError(f"{new!r} given where {describe(old)} passes; it can't hold a fraction")
    if old.dtype is not torch.bool and not torch.iinfo(old.dtype).min <= new <= torch.iinfo(old.dtype).max:
        raise EditError(f"{new!r} given where {describe(old)} passes; it can't hold a number of that size")


_TORCHS_OWN = frozenset(nn.Module().__dict__)
