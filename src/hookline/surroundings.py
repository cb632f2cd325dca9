"""What the code of a model can reach outside of its modules: globals, classes, closures, other objects and caches.

A trial run makes tensors that nobody may keep: fake ones, and copies of the parameters. What it leaves on the modules
is put back anyway. This file is for the rest, such as a table that a function makes once and keeps for the next calls.
"""

from __future__ import annotations

import functools
import gc
import operator
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from types import BuiltinFunctionType, CellType, CodeType, FrameType, FunctionType, GetSetDescriptorType, ModuleType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from hookline.errors import HooklineError
from hookline.values import ATOMS

_CONTAINERS = (list, dict, set, deque)
_LARGEST, _MOST = 10_000, 300_000  # Entries of a container, and objects in all, that are looked at: data is not code.
_PLAIN = tuple(kind for kind in ATOMS if kind is not type)
_EMPTY = object()  # In a slot without a value.
_NOT_ENTERED = (*_PLAIN, BuiltinFunctionType, CodeType, FrameType, ModuleType)
# The code of these packages keeps nothing of a model's run; objects of a few modules hold what others put there.
_FOREIGN = frozenset((*sys.stdlib_module_names, "torch", "hookline"))
_HOLDING = frozenset(("builtins", "collections", "functools", "types", "weakref", "_thread"))


class Run(Protocol):
    """A run whose tensors nobody may keep."""

    def lives(self) -> bool:
        """Return True if something still holds one of them."""

    def kept(self) -> list[Tensor]:
        """Return those that something still holds."""


class Held(NamedTuple):
    """Something that a run can change, the name it is reached by, and what was in it."""

    name: str
    holder: Any
    before: Any


class Surroundings:
    """What the code of a model can reach outside of its modules, as it was when this was made."""

    def __init__(self, model: nn.Module) -> None:
        self._held = list(_reached(model))

    def free(self, run: Run) -> list[str]:
        """Put everything back if a run left tensors here; return the names of the places that kept them."""
        if not _lives(run):
            return []
        places = self.put_back(run)
        torch.clear_autocast_cache()
        if _lives(run) and (owner := _owner(run.kept())):
            raise HooklineError(
                f"a tensor of a trial run is kept by {owner}, and what was there before is not known: clear it or "
                f"start Python again, and run the model once for real before hl.scan or hl.sites(run=)"
            )
        return places

    def put_back(self, run: Run) -> list[str]:
        """Put back whatever changed and empty caches, if any of them keeps a tensor of a run; return their names.

        All that changed goes back, not only what keeps a tensor: a flag may say that a table is there.
        """
        wanted = {id(tensor) for tensor in run.kept()}
        changed = [held for held in self._held if not is_same(_content(held.holder), held.before)]
        keeping = [held for held in changed if _keeps(held, wanted)]
        caches = [one for one in gc.get_objects() if type(one) is functools._lru_cache_wrapper]
        caches = [cache for cache in caches if _leads_to(wanted, gc.get_referents(cache))]
        for held in changed if keeping or caches else ():
            _restore(held)
        for cache in caches:
            cache.cache_clear()
        return [held.name for held in keeping] + [f"the cache of {_name(cache)}" for cache in caches]


def is_same(container: Any, content: Any) -> bool:
    """Return True if two containers of one kind hold the very same objects."""
    if len(container) != len(content):
        return False
    if isinstance(container, dict):
        return all(key in content and one is content[key] for key, one in container.items())
    return container == content if isinstance(container, set) else all(map(operator.is_, container, content))


def _reached(model: nn.Module) -> Iterator[Held]:
    """Walk from the modules of a model to everything their code names, and that their attributes hold."""
    waiting: deque[tuple[str, Any]] = deque((type(module).__qualname__, module) for module in model.modules())
    seen = {id(module.__dict__) for module in model.modules()}  # Others put back what is on the modules themselves.
    while waiting and len(seen) < _MOST:
        name, one = waiting.popleft()
        kind = type(one)  # Never `isinstance`: a proxy may load what it stands for when it is asked for its class.
        if id(one) in seen or issubclass(kind, _NOT_ENTERED) or (_base(kind) and _base(kind).__len__(one) > _LARGEST):
            continue
        seen.add(id(one))
        if kind is FunctionType:
            for space, names in _namespaces(one):
                home = space.get("__name__", "?")
                if id(space) not in seen:
                    seen.add(id(space))
                    yield Held(f"the globals of {home}", space, space.copy())
                waiting += [(f"{home}.{key}", space[key]) for key in names]
        elif _can_change(one):
            yield Held(name, one, _content(one))
        waiting += _inside(name, one)


def _can_change(one: Any) -> bool:
    kind = type(one)
    if issubclass(kind, Tensor):  # A write to a tensor gives it a history, and that holds tensors of the run.
        return not one.requires_grad
    if _base(kind) or kind is CellType:
        return True
    return not _is_foreign(one) and (issubclass(kind, type) or bool(_slots(one)))


def _base(kind: type) -> Any:
    """Return the kind of container that a class is; its own methods may do anything: load, create, refuse."""
    return next((base for base in _CONTAINERS if issubclass(kind, base)), None)


def _content(holder: Any) -> Any:
    kind = type(holder)
    if issubclass(kind, Tensor):
        return [holder.grad_fn] if holder.requires_grad else []
    if issubclass(kind, type):
        return dict(vars(holder))
    if kind is CellType:
        return gc.get_referents(holder)
    if issubclass(kind, dict):
        return dict(dict.items(holder))
    if base := _base(kind):
        return (set if base is set else list)(base.__iter__(holder))
    return {name: _slot(holder, name) for name in _slots(holder)}


def _restore(held: Held) -> None:
    holder, before = held.holder, held.before
    kind = type(holder)
    if issubclass(kind, Tensor):
        holder.detach_()
    elif kind is CellType:
        del holder.cell_contents
        if before:
            holder.cell_contents = before[0]
    elif issubclass(kind, (list, deque, set)):
        base = _base(kind)
        base.clear(holder)
        base.update(holder, before) if base is set else base.extend(holder, before)
    else:
        put, remove = _writers(kind)
        now = _content(holder)
        for name in now | before:
            old = before.get(name, _EMPTY)
            if now.get(name, _EMPTY) is not old:
                remove(holder, name) if old is _EMPTY else put(holder, name, old)


def _writers(kind: type) -> tuple[Callable[..., None], Callable[..., None]]:
    """Return what writes and what removes an entry or an attribute, past any method of the class."""
    if issubclass(kind, dict):
        table = OrderedDict if issubclass(kind, OrderedDict) else dict
        return table.__setitem__, table.__delitem__
    owner = type if issubclass(kind, type) else object
    return owner.__setattr__, owner.__delattr__


def _slots(one: Any) -> list[str]:
    """Return the names of the attributes of an object that are in `__slots__`."""
    declared = [vars(base).get("__slots__", ()) for base in type(one).__mro__]
    names = [name for slots in declared for name in ([slots] if isinstance(slots, str) else slots)]
    return [name for name in names if not name.startswith("__")]


def _slot(one: Any, name: str) -> Any:
    try:
        return object.__getattribute__(one, name)
    except AttributeError:
        return _EMPTY


def _inside(name: str, one: Any) -> Iterator[tuple[str, Any]]:
    """Yield what something holds, by name."""
    kind = type(one)
    if issubclass(kind, nn.Module):
        yield from ((f"{name}.{key}", part) for key, part in dict(one.__dict__).items())
        yield kind.__qualname__, kind
    elif kind is FunctionType:
        # Decorators of torch and of the standard library hold the function they decorate.
        parts = (one.__closure__,) if _is_foreign(one) else (one.__closure__, one.__defaults__, one.__kwdefaults__)
        yield from ((f"the closure of {_name(one)}", part) for container in parts for part in _values(container or ()))
        yield name, one.__dict__.get("__wrapped__")
    elif issubclass(kind, Tensor) or _is_foreign(one):
        return
    elif issubclass(kind, type):
        yield from ((f"{one.__qualname__}.{key}", part) for key, part in dict(vars(one)).items())
        yield from ((base.__qualname__, base) for base in one.__mro__)
    elif kind in _CONTAINERS:
        yield from ((name, part) for part in _values(one))
    else:  # Among them containers with attributes.
        yield name, _attributes(one)
        yield from ((name, part) for part in gc.get_referents(one))


def _attributes(one: Any) -> Any:
    """Return the attributes of an object, if it holds them in the usual way."""
    slot = next((vars(base)["__dict__"] for base in type(one).__mro__ if "__dict__" in vars(base)), None)
    return slot.__get__(one) if type(slot) is GetSetDescriptorType else None


def _is_foreign(one: Any) -> bool:
    """Return True for what belongs to Python, torch or hookline."""
    is_code = issubclass(type(one), (type, FunctionType))
    home = one.__globals__.get("__name__") if type(one) is FunctionType else (one if is_code else type(one)).__module__
    root = str(home).partition(".")[0]
    return root in _FOREIGN and (is_code or root not in _HOLDING)


def _namespaces(function: FunctionType) -> Iterator[tuple[dict[str, Any], set[str]]]:
    """Yield the globals of a function, and of the modules it names there, each with the names that its code uses."""
    if _is_foreign(function):
        return
    used = set(_names(function.__code__))
    spaces = {id(function.__globals__): function.__globals__}
    waiting = [function.__globals__]
    while waiting:
        space = waiting.pop()
        names = used & space.keys()
        yield space, names
        modules = [vars(space[name]) for name in names if issubclass(type(space[name]), ModuleType)]
        others = [other for other in modules if str(other.get("__name__")).partition(".")[0] not in _FOREIGN]
        waiting += [other for other in others if id(other) not in spaces]
        spaces |= {id(other): other for other in others}


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for part in code.co_consts:
        if isinstance(part, CodeType):
            yield from _names(part)


def _keeps(held: Held, wanted: set[int]) -> bool:
    """Return True if something new in a holder leads to one of these tensors."""
    if isinstance(held.holder, Tensor):
        return True
    before = {id(part) for part in _values(held.before)}
    return _leads_to(wanted, [part for part in _values(_content(held.holder)) if id(part) not in before])


def _leads_to(wanted: set[int], waiting: list[Any]) -> bool:
    """Return True if one of these objects is, or holds at any depth, one of the tensors with these ids."""
    seen = set[int]()
    while waiting:
        one = waiting.pop()
        if id(one) in wanted:
            return True
        if id(one) in seen or issubclass(type(one), (*_NOT_ENTERED, type, Tensor)):
            continue
        seen.add(id(one))
        waiting += one.__closure__ or () if type(one) is FunctionType else gc.get_referents(one)
    return False


def _values(container: Any) -> list[Any]:
    return list(container.values() if isinstance(container, dict) else container)


def _name(function: Any) -> str:
    return str(getattr(function, "__qualname__", None) or type(function).__qualname__)


def _owner(kept: list[Tensor]) -> str:
    """Say in words what holds these tensors; nothing, if that is a traceback that somebody kept."""
    holders = [one for one in gc.get_referrers(*kept) if one is not kept]
    if not kept or any(type(one) is FrameType for one in holders):
        return ""
    if not holders:
        return "something outside of Python, such as the history of another tensor"
    owners = [one for one in gc.get_referrers(holders[0]) if one is not holders and type(one) is not FrameType]
    return f"a {type(holders[0]).__qualname__}" + (f" of {_name(owners[0])}" if owners else "")


def _lives(run: Run) -> bool:
    """Return True if something holds a tensor of a run, other than garbage, which is collected."""
    return all(run.lives() and gc.collect(generation) >= 0 for generation in range(3)) and run.lives()
