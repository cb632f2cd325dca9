"""What can hold a tensor for later: what is in it, whether a tensor is, and putting back what was there before."""

from __future__ import annotations

import gc
import inspect
import operator
from collections import OrderedDict, deque
from collections.abc import Callable
from types import BuiltinFunctionType, CellType, CodeType, FrameType, FunctionType, MemberDescriptorType, ModuleType
from typing import Any, NamedTuple

from torch import Tensor

from hookline.values import ATOMS

CONTAINERS = (list, dict, set, deque)
_PLAIN = tuple(kind for kind in ATOMS if kind is not type)
_EMPTY = object()  # In a slot without a value.
NOT_ENTERED = (*_PLAIN, BuiltinFunctionType, CodeType, FrameType, ModuleType)


class Held(NamedTuple):
    """Something that a run can change, the name it is reached by, and what was in it."""

    name: str
    holder: Any
    before: Any
    is_foreign: bool = False  # Any run may change it for good reasons, so only what keeps a tensor is put back.


def is_same(container: Any, content: Any) -> bool:
    """Return True if two containers of one kind hold the very same objects."""
    if len(container) != len(content):
        return False
    if isinstance(container, dict):
        return all(key in content and one is content[key] for key, one in container.items())
    return container == content if isinstance(container, set) else all(map(operator.is_, container, content))


def base_of(kind: type) -> Any:
    """Return the kind of container that a class is; its own methods may do anything: load, create, refuse."""
    return next((base for base in CONTAINERS if issubclass(kind, base)), None)


def content(holder: Any) -> Any:
    """Return what is in a holder now, as a container of its own."""
    kind = type(holder)
    if issubclass(kind, Tensor):
        return [holder.grad_fn] if holder.requires_grad else []
    if issubclass(kind, type):
        return dict(vars(holder))
    if kind is CellType:
        return gc.get_referents(holder)
    if issubclass(kind, dict):
        return dict(dict.items(holder))
    if base := base_of(kind):
        return (set if base is set else list)(base.__iter__(holder))
    return {name: _slot(holder, name) for name in slots(holder)}


def restore(held: Held, wanted: set[int]) -> None:
    """Give a holder back what was in it; one of others, only where it holds a tensor with one of these ids."""
    holder, before = held.holder, held.before
    kind = type(holder)
    if issubclass(kind, Tensor):
        holder.detach_()
    elif kind is CellType:
        del holder.cell_contents
        if before:
            holder.cell_contents = before[0]
    elif issubclass(kind, (list, deque, set)):
        base = base_of(kind)
        base.clear(holder)
        base.update(holder, before) if base is set else base.extend(holder, before)
    else:
        put, remove = _writers(kind)
        now = content(holder)
        for name in now | before:
            old, new = before.get(name, _EMPTY), now.get(name, _EMPTY)
            if new is not old and (not held.is_foreign or leads_to(wanted, [new])):
                remove(holder, name) if old is _EMPTY else put(holder, name, old)


def _writers(kind: type) -> tuple[Callable[..., None], Callable[..., None]]:
    """Return what writes and what removes an entry or an attribute, past any method of the class."""
    if issubclass(kind, dict):
        table = OrderedDict if issubclass(kind, OrderedDict) else dict
        return table.__setitem__, table.__delitem__
    owner = type if issubclass(kind, type) else object
    return owner.__setattr__, owner.__delattr__


def slots(one: Any) -> list[str]:
    """Return the names of the attributes of an object that are in `__slots__`, and that no property hides."""
    names = [
        _mangled(base, name)
        for base in type(one).__mro__
        if (declared := vars(base).get("__slots__"))
        for name in ([declared] if isinstance(declared, str) else declared)
    ]
    return [name for name in names if type(inspect.getattr_static(type(one), name, None)) is MemberDescriptorType]


def _mangled(owner: type, name: str) -> str:
    """Return the name under which Python keeps an attribute that a class calls by this name."""
    is_private = name.startswith("__") and not name.endswith("__") and owner.__name__.strip("_")
    return f"_{owner.__name__.lstrip('_')}{name}" if is_private else name


def _slot(one: Any, name: str) -> Any:
    try:
        return object.__getattribute__(one, name)
    except AttributeError:
        return _EMPTY


def keeps(held: Held, wanted: set[int]) -> bool:
    """Return True if something new in a holder leads to one of these tensors."""
    if isinstance(held.holder, Tensor):
        return True
    before = {id(part) for part in values(held.before)}
    return leads_to(wanted, [part for part in values(content(held.holder)) if id(part) not in before])


def leads_to(wanted: set[int], waiting: list[Any]) -> bool:
    """Return True if one of these objects is, or holds at any depth, one of the tensors with these ids."""
    seen = set[int]()
    while waiting:
        one = waiting.pop()
        if id(one) in wanted:
            return True
        if id(one) in seen or issubclass(type(one), (*NOT_ENTERED, type, Tensor)):
            continue
        seen.add(id(one))
        waiting += _of_function(one) if type(one) is FunctionType else gc.get_referents(one)
    return False


def _of_function(function: FunctionType) -> list[Any]:
    """Return what a function holds, but for its globals."""
    return [function.__closure__, function.__defaults__, function.__kwdefaults__, function.__dict__]


def values(container: Any) -> list[Any]:
    """Return what is in a container, without the keys."""
    return list(container.values() if isinstance(container, dict) else container)
