"""The methods, parameters and buffers of a module by name, and the reasons why one can't be hooked."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hookline._sites.language import is_pattern, matches_name
from hookline._sites.tree import Children, Names, children_of, is_scripted
from hookline.errors import SiteError, did_you_mean

Holders = tuple[tuple[nn.Module, str], ...]  # A parameter's modules and names: several if it is tied.


class ParameterPlace(NamedTuple):
    """A parameter or buffer: its path, and all modules that hold it, the one at that path first."""

    path: str
    holders: Holders
    siblings: Children | None = None  # The siblings of its module, to notice when that module is replaced.


def methods(path: str, module: nn.Module, name: str) -> list[str]:
    """Return the methods of a module that a name or pattern matches; raise for a name that is not a method."""
    if not is_pattern(name):
        problem = _why_no_method(path, module, name)
        if problem:
            raise SiteError(problem)
        return [name]
    return [one for one in method_names(module) if matches_name(one, name)]


def method_names(module: nn.Module) -> list[str]:
    """Return the methods of a module's classes and the callables among its attributes, without torch's own."""
    written: dict[str, Any] = {}
    for base in type(module).__mro__:
        if base is not object and not base.__module__.startswith("torch."):
            written = {**vars(base), **written}
    written |= vars(module)
    return [name for name, held in written.items() if _is_method(name, held) and not hasattr(nn.Module, name)]


def has_method(module: nn.Module, name: str) -> bool:
    """Return True if a module has a method of that name that can be hooked."""
    return _why_no_method("", module, name) == ""


def _why_no_method(path: str, module: nn.Module, name: str) -> str:
    kind, full = type(module).__name__, f"{path}.{name}".lstrip(".")
    if name in ("forward", "__call__"):
        return f"'{full}()' is the module itself; name it without '.{name}()': {path!r}"
    if name.startswith("__") and name.endswith("__"):
        return f"'{full}()' can't be seen: Python looks special methods up on the class, not on the instance"
    if name in children_of(module):
        return f"'{full}' is a module, not a method; name it without '()'"
    if name in module._parameters or name in module._buffers:
        return f"'{full}()' is a parameter or buffer, not a method; did you mean '{full}:param' or '{full}/*'?"
    missing = object()
    held = vars(module).get(name, inspect.getattr_static(type(module), name, missing))
    if isinstance(held, (property, functools.cached_property)):
        what = type(held).__name__.replace("_", " ")
        return f"'{full}' is a {what} of {kind}: it is read, not called, so nothing passes there"
    if held is missing or isinstance(held, Tensor) or not _is_callable(held):
        prefix = f"{path}." if path else ""
        near = did_you_mean(f"{full}()", [f"{prefix}{one}()" for one in method_names(module)])
        found = "has no such method" if held is missing else f"has no method there, but a {type(held).__name__} value"
        every = f"{prefix}*()"
        return f"'{full}()': {kind} {found}{near or f'; hl.sites(model, {every!r}) lists them'}"
    return ""


def _is_method(name: str, held: object) -> bool:
    if name.startswith("__") or isinstance(held, (type, nn.Module, Tensor, property, functools.cached_property)):
        return False
    held = getattr(held, "__wrapped__", held)  # While it is hooked, a wrapper is in its place.
    return inspect.isroutine(held) or isinstance(held, (staticmethod, classmethod, functools.partial))


def _is_callable(held: object) -> bool:
    return callable(held) or isinstance(held, (staticmethod, classmethod)) or hasattr(held, "__get__")


def parameters(
    names: Names, matches: Callable[[str], bool] = lambda path: True, buffers: bool = False
) -> Iterator[ParameterPlace]:
    """Yield every parameter, or every buffer, once, under the first of its names that matches."""
    holders: dict[int, list[tuple[str, nn.Module, str]]] = {}
    for path, module, _ in names.walk():
        tensors: Any = {} if is_scripted(module) else module._buffers if buffers else module._parameters
        for name, tensor in tensors.items():
            if tensor is not None and not isinstance(module, nn.RNNBase) and not is_lazy(tensor):
                holders.setdefault(id(tensor), []).append((f"{path}.{name}".lstrip("."), module, name))
    for found in holders.values():
        chosen = next((path for path, _, _ in found if matches(path)), None)
        if chosen is not None:
            found.sort(key=lambda one: one[0] != chosen)
            yield ParameterPlace(chosen, tuple(dict.fromkeys((module, name) for _, module, name in found)))


def locate(names: Names, path: str) -> ParameterPlace | None:
    """Return the parameter or buffer at a path, None if there is none; raise for one that can't be hooked."""
    above, _, name = path.rpartition(".")
    place = names.locate(above)
    if place is None or not name:
        return None
    above, module, siblings = place
    if is_scripted(module):
        raise SiteError(f"{path!r} belongs to a module compiled by torch.jit, and nothing inside its graph can be seen")
    path = f"{above}.{name}".lstrip(".")
    tensor: Any = module._parameters.get(name, module._buffers.get(name))
    if tensor is not None:
        _refuse_tensor(path, module, tensor)
        others = [one for one in names.holders(tensor) if one != (module, name)]
        return ParameterPlace(path, ((module, name), *others), siblings)
    if name in module._parameters or name in module._buffers:
        raise SiteError(f"{path!r} is None: this {type(module).__name__} has no {name}")
    _refuse_computed(path, above, module, name)
    return None


def _refuse_tensor(path: str, module: nn.Module, tensor: Tensor) -> None:
    if isinstance(module, torch.fx.GraphModule):
        raise SiteError(f"{path!r} is of a torch.fx graph, which makes its own class; hook its functions, '/name'")
    if isinstance(module, nn.RNNBase):
        kind = type(module).__name__
        raise SiteError(
            f"{path!r}: {kind} keeps its weights in a list of its own, and a hooked value would stay in it; "
            "hook the module itself"
        )
    if is_lazy(tensor):
        raise SiteError(f"{path!r} has no shape yet: run the model once, then hook it")


def _refuse_computed(path: str, above: str, module: nn.Module, name: str) -> None:
    """Refuse a weight that is computed when it is read, and say what to hook instead."""
    parametrizations = children_of(module).get("parametrizations")
    if parametrizations is not None and name in children_of(parametrizations):
        source = f"{above}.parametrizations.{name}".lstrip(".")
        raise SiteError(f"{path!r} is parametrized: it is the output of the module {source!r}; hook that")
    if isinstance(vars(module).get(name), Tensor):
        made_of = [key for key in module._parameters if key.startswith(f"{name}_")]
        names = " and ".join(repr(f"{above}.{key}".lstrip(".")) for key in made_of)
        hint = f"; it is made of {names}, which are" if made_of else ""
        raise SiteError(f"{path!r} is a plain tensor, not a parameter or buffer{hint}")
