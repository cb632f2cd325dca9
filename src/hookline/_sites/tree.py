"""A model's modules by name, without the names that wrappers add: `torch.compile`, DDP, FSDP, PEFT."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from hookline.errors import HooklineError, SiteError

# Wrappers that hold one model and change its names: the name of the child, and those of the wrapper's classes.
_WRAPPERS = {
    "_orig_mod": {"OptimizedModule"},
    "module": {"DistributedDataParallel", "DataParallel", "AveragedModel"},
    "_fsdp_wrapped_module": {"FullyShardedDataParallel"},
    "_checkpoint_wrapped_module": {"ActivationWrapper"},
    "_hooked_model": {"HookedModel"},
    "base_model": {"PeftModel"},
    "model": {"BaseTuner"},
}
_name_of = operator.attrgetter("__name__")

Children = Mapping[str, nn.Module | None]
Link = tuple[dict[str, Any], str, Any]  # A table of children or attributes, a key, and the object there.
Named = tuple[str, nn.Module, Children | None]  # A module, its name and its siblings.
MANY = 16  # From this many names on, one walk through the model is cheaper than a search for each name.


def wrapped_model(module: nn.Module) -> nn.Module | None:
    """Return the model inside a known wrapper, or None."""
    held: Children = module._modules
    if len(held) > 2:
        return None
    if not isinstance(held, dict):
        held = children_of(module)
    for key in held:
        if key in _WRAPPERS and not _WRAPPERS[key].isdisjoint(map(_name_of, type(module).__mro__)):
            return held[key]
    return None


def wrapping(module: nn.Module) -> str:
    """Return the prefix that known wrappers add to every name of the model inside: "module.", or "" without one."""
    found = wrapped_model(module)
    if found is None:
        return ""
    return next(f"{key}." for key, held in children_of(module).items() if held is found) + wrapping(found)


def unwrap(module: nn.Module) -> nn.Module:
    """Return the model inside all known wrappers."""
    while len(module._modules) < 3 and (found := wrapped_model(module)) is not None:
        module = found
    return module


def locate_plain(model: nn.Module, path: str) -> Named | None:
    """Return a module of a model by its name if nothing on the way there is wrapped; None if not, and for ""."""
    if not path or (len(model._modules) < 3 and wrapped_model(model) is not None):
        return None
    children: Any = model._modules
    module: Any = None
    for key in path.split("."):
        siblings = children
        module = siblings.get(key) if type(siblings) is dict else None
        if module is None:
            return None
        children = module._modules
        if 0 < len(children) < 3 and wrapped_model(module) is not None:
            return None
    return path, module, siblings


def replaced_by(path: str, module: nn.Module, siblings: Children | None) -> nn.Module | None:
    """Return the module that has replaced another one at its path, or None if nothing has changed."""
    if siblings is None:
        return None
    now = siblings.get(path.rpartition(".")[2])
    return None if now is None or now is module or unwrap(now) is module else now


def way_to(path: str, model: nn.Module) -> list[Link]:
    """Return the links from a model down to the module of that name, as far as they exist."""
    found: list[Link] = []
    module = unwrap(model)
    for key in path.split(".") if path else ():
        held: Any = children_of(module)
        if held.get(key) is None and isinstance(module.__dict__.get(key), nn.Module):
            held = module.__dict__  # A second name for a module, or a module outside the tree.
        child = held.get(key)
        found.append((held, key, child))
        if child is None:
            break
        module = unwrap(child)
    return found


def leads_to(module: nn.Module, path: str, model: nn.Module) -> bool:
    """Return True if `path` leads to this module."""
    way = way_to(path, model)
    last = way[-1][2] if len(way) == path.count(".") + 1 else None
    return last is module or (last is not None and unwrap(last) is module)


def is_at(path: str, module: nn.Module, model: nn.Module) -> bool:
    """Return True if `path` leads to this module, and nothing on the way there is wrapped: see `leads_to`."""
    place = locate_plain(model, path)
    return place is not None and place[1] is module


class Names:
    """The modules of one model by name, held weakly."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)

    def walk(self, kind: type = nn.Module) -> list[Named]:
        """Return the name, the module and its siblings, for each module of a kind; the model itself first.

        A tied module is listed under each of its names.
        """
        model = self._model()
        found: list[Named] = []
        if model is not None:
            model = unwrap(model)
            if isinstance(model, kind):
                found.append(("", model, None))
            _collect("", model, set(), kind, found)
        return found

    def once(self) -> list[tuple[str, nn.Module]]:
        """Return every module once, under its first name."""
        found: dict[int, tuple[str, nn.Module]] = {}
        for name, module, _ in self.walk():
            found.setdefault(id(module), (name, module))
        return list(found.values())

    def holders(self, tensor: Tensor) -> list[tuple[nn.Module, str]]:
        """Return every module that holds a tensor, and under which name."""
        return [(module, name) for module, name, held in self.tensors() if held is tensor]

    def tensors(self) -> list[tuple[nn.Module, str, Tensor | None]]:
        """Return every parameter and buffer with its module and name, in one loop: a call for each module is slow."""
        found: list[tuple[nn.Module, str, Tensor | None]] = []
        seen = set[int]()
        waiting: list[Any] = [self._model()]
        while waiting:
            module = waiting.pop()
            if module is None or id(module) in seen:
                continue
            seen.add(id(module))
            held = module.__dict__
            children = held.get("_modules")
            if not isinstance(children, dict):  # A ScriptModule keeps them in C++.
                continue
            for tensors in (held["_parameters"], held["_buffers"]):
                if tensors:
                    found += [(module, name, one) for name, one in tensors.items()]
            if children:
                waiting += children.values()
        return found

    def find(self, path: str) -> nn.Module | None:
        """Return the module of that name, with or without the names that wrappers add; None if there is none."""
        place = self.locate(path)
        return None if place is None else place[1]

    def locate(self, path: str) -> Named | None:
        """Return the module of that name, as: its name without what wrappers add, the module, its siblings; or None."""
        model = self._model()
        if model is None:
            return None
        place = _descend(model, path.split(".") if path else [], (), None)
        return None if place is None else (".".join(place[0]), place[1], place[2])

    def locate_plain(self, path: str) -> Named | None:
        """Return a module by its name if nothing on the way there is wrapped: the usual case of `locate`."""
        model = self._model()
        return None if model is None else locate_plain(model, path)

    def locate_each(self, paths: Sequence[str]) -> list[Named] | None:
        """Return different modules by their names; None if `locate_plain` can't find one, or two names mean one."""
        found: list[Named] = []
        parents: dict[str, Children | None] = {}
        for path in paths:
            above, _, key = path.rpartition(".")
            if above not in parents:
                parent = self.locate_plain(above) if above else None
                module = parent[1] if parent is not None else None if above else self._model()
                is_plain = module is not None and wrapped_model(module) is None
                parents[above] = children_of(module) if module is not None and is_plain else None
            siblings = parents[above]
            module = None if siblings is None else siblings.get(key)
            if module is None or (module._modules and wrapped_model(module) is not None):
                return None
            found.append((path, module, siblings))
        return found if len({id(module) for _, module, _ in found}) == len(found) else None

    def of(self, module: nn.Module) -> list[str]:
        """Return every name of a module object; for one outside the module tree, a name made of its class."""
        target = unwrap(module)
        return [name for name, found, _ in self.walk() if found is target] or [_name_outside_tree(target)]


class Survey(Names):
    """The names of a model during one search, in which the model does not change.

    From the second time on, a lookup that needs a walk through the whole model uses an index: a search may be for
    thousands of names.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._asked = set[str]()
        self._located = 0

    def locate(self, path: str) -> Named | None:
        """Return a module by its name; see Names."""
        self._located += 1
        place = self.locate_plain(path) if self._located < MANY else self._by_name.get(path)
        return place or super().locate(path)

    def holders(self, tensor: Tensor) -> list[tuple[nn.Module, str]]:
        """Return every module that holds a tensor, and under which name."""
        return self._by_tensor.get(id(tensor), []) if self._is_asked_again("tensor") else super().holders(tensor)

    def of(self, module: nn.Module) -> list[str]:
        """Return every name of a module object; see Names."""
        if not self._is_asked_again("module"):
            return super().of(module)
        target = unwrap(module)
        return self._by_module.get(id(target)) or [_name_outside_tree(target)]

    def _is_asked_again(self, what: str) -> bool:
        again = what in self._asked
        self._asked.add(what)
        return again

    @cached_property
    def _by_name(self) -> dict[str, Named]:
        return {place[0]: place for place in self.walk()}

    @cached_property
    def _by_tensor(self) -> dict[int, list[tuple[nn.Module, str]]]:
        found: dict[int, list[tuple[nn.Module, str]]] = {}
        for module, name, tensor in self.tensors():
            found.setdefault(id(tensor), []).append((module, name))
        return found

    @cached_property
    def _by_module(self) -> dict[int, list[str]]:
        found: dict[int, list[str]] = {}
        for name, module, _ in self.walk():
            found.setdefault(id(module), []).append(name)
        return found


def _name_outside_tree(module: nn.Module) -> str:
    return f"<{type(module).__name__} {id(module):x}>"


def children_of(module: nn.Module) -> Children:
    """Return a module's direct children."""
    found: object = module._modules
    return found if isinstance(found, dict) else dict(module.named_children())  # A ScriptModule keeps them in C++.


def is_container(module: nn.Module) -> bool:
    """Return True if the module has no forward of its own, like ModuleList and ModuleDict."""
    return "forward" not in module.__dict__ and type(module).forward is nn.Module.forward


def is_scripted(module: nn.Module) -> bool:
    """Return True if the module runs inside a torch.jit graph, where nothing can be seen."""
    return isinstance(module, torch.jit.ScriptModule)


def may_be_blind(kind: type[nn.Module]) -> bool:
    """Return True if modules of this class may be containers or scripted. Asking per class saves a check per module."""
    return issubclass(kind, torch.jit.ScriptModule) or kind.forward is nn.Module.forward


def parameter_count(module: nn.Module) -> int:
    """Return the number of elements in a module's parameters, without those of lazy modules that have not run yet."""
    return sum(one.numel() for one in module.parameters() if not isinstance(one, UninitializedParameter))


def _collect(name: str, module: nn.Module, above: set[int], kind: type, found: list[Named]) -> None:
    """Add all modules of a kind below `module`. Most are leaves, which cost no call."""
    above.add(id(module))
    prefix = name + "." if name else ""
    siblings = children_of(module)
    for key, child in siblings.items():
        if child is None:
            continue
        if not child._modules:
            if isinstance(child, kind):
                found.append((prefix + key, child, siblings))
            continue
        child = unwrap(child)
        if id(child) not in above:  # Otherwise the modules hold each other in a cycle.
            if isinstance(child, kind):
                found.append((prefix + key, child, siblings))
            _collect(prefix + key, child, above, kind, found)
    above.discard(id(module))


def _descend(
    module: nn.Module, parts: list[str], above: tuple[str, ...], siblings: Children | None
) -> tuple[tuple[str, ...], nn.Module, Children | None] | None:
    """Follow `parts` through children and plain attributes that hold a module. No property runs."""
    wrapped, module = module, unwrap(module)
    if not parts:
        return above, module, siblings
    held = children_of(module)
    child = held.get(parts[0])
    if child is None and isinstance(module.__dict__.get(parts[0]), nn.Module):
        held = module.__dict__  # A second name for a module, or a module outside the tree.
        child = held[parts[0]]
    place = _descend(child, parts[1:], (*above, parts[0]), held) if child is not None else None
    inside = wrapped_model(wrapped)
    if place is None and inside is not None and children_of(wrapped).get(parts[0]) is inside:
        return _descend(inside, parts[1:], above, siblings)  # The name that a wrapper gives its child.
    return place


def refuse_other_model(model: object) -> None:
    """Raise for a model that is not a torch.nn.Module."""
    if not isinstance(model, nn.Module):
        raise SiteError(f"a model is a torch.nn.Module, not {type(model).__name__}")


def refuse_data_parallel(*_: nn.Module) -> NoReturn:
    """Raise for a model that DataParallel runs in copies, on several devices."""
    raise HooklineError(
        "DataParallel runs copies of the model on other threads and devices; use DistributedDataParallel, or hook "
        "model.module on one device"
    )
