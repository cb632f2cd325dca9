"""By what a model is known again: modules, code, every bit of its weights, attributes. The same for a function."""

from __future__ import annotations

import hashlib
import inspect
import json
import re
import weakref
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from hookline.harvesting.checksums import checksum
from hookline.harvesting.known import ORIGIN_NAMES, Known, hashed, kind, version
from hookline.tree import unwrap
from hookline.wiring.watches import is_shadow

WRITTEN = "written as it runs"  # The value of an attribute that can't be compared.
_LONGEST = 40  # Letters of a value that a message shows as it is.
_WRAPPING = ("OptimizedModule", "CheckpointWrapper", "FullyShardedDataParallel", "DistributedDataParallel")
_OWN = {*vars(nn.Module()), "_compiled_call_impl", "_hf_hook", "_old_forward"}  # Not the model's maker's.
_ELSEWHERE = ("torch.distributed", "torch._dynamo", "accelerate", "hookline")  # They hook, shard or move a model.
_SHARDED = ("__", "_fsdp", "_is_fsdp")  # How attributes begin that fully_shard sets.
_STATE = ("attributes", "variables")  # The parts that a forward may write.
_wrote: weakref.WeakKeyDictionary[nn.Module, set[str]] = weakref.WeakKeyDictionary()  # What a model has written so far.


class ModelDigest:
    """What is known of a model, part by part."""

    def __init__(self, model: nn.Module, known: Known) -> None:
        self.known = known
        self.model = unwrap(model)
        named = [(_plain_name(path), module) for path, module in self.model.named_modules()]
        self.modules = [(path, module) for path, module in named if type(module).__name__ not in _WRAPPING]
        for path, module in self.modules:
            self.known.name(module, f"module {path}")
            for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
                if tensor is not None and name not in module._non_persistent_buffers_set:
                    self.known.name(tensor, f"weight {path}.{name}")

    def told(self) -> dict[str, Any]:
        """Return all of it, as plain JSON."""
        modes = {module.training for _, module in self.modules}
        training: Any = modes.pop() if len(modes) == 1 else hashed([f"{one.training}" for _, one in self.modules])
        told = {"class": _class(self.model), "weights": self.weights(), "training": training}
        return {**told, **self.state(), "code": self.code()}

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
        """Return a text of the modules, all bits of their parameters and buffers, and what else they save."""
        found = hashlib.blake2b(digest_size=16)
        for path, module in self.modules:
            found.update(f"{path} {_class(module)}({module.extra_repr()})\n".encode())
        for name, tensor in self._tensors():
            found.update(name.encode())
            found.update(checksum(tensor))
        for path, module in self.modules:
            for name, value in _saved(module):
                found.update(f"{path}.{name} {self.known.text(value)}".encode())
        return found.hexdigest()

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Return parameters, and the buffers that are part of the model's state; each once."""
        seen: set[int] = set()
        for path, module in self.modules:
            for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
                if tensor is not None and id(tensor) not in seen and name not in module._non_persistent_buffers_set:
                    seen.add(id(tensor))
                    yield f"{path}.{name}", _at_hand(module, name, tensor)

    def code(self) -> dict[str, str]:
        """Return the versions of the packages that made the model's classes, and a text of the code of each class."""
        homes = {home for some in self.classes.values() for home in _homes(some) if kind(home) != "ours"}
        versions = {home.partition(".")[0]: version(home) for home in homes if not home.startswith(_ELSEWHERE)}
        made = [name for name, some in self.classes.items() if any(kind(home) != "named" for home in _homes(some))]
        return {
            **{name: found for name, found in sorted(versions.items()) if found},
            **{name: _joined(sorted(map(self.known.text, self.classes[name]))) for name in made},
        }

    def state(self) -> dict[str, dict[str, str]]:
        """Return the attributes of modules and the variables that their code names: what a forward may write."""
        groups: dict[str, list[str]] = {}
        for path, module in self.modules:
            for name, value in self._attributes(module):
                group = re.sub(r"\d+", "*", f"{path}.{name}".lstrip("."))
                groups.setdefault(group, []).append(_readable(self.known.text(value)))
        for some in self.classes.values():
            if any(kind(home) == "ours" for home in _homes(some)):
                sorted(map(self.known.text, some))  # It notes the variables that it meets.
        variables = {name: _joined([_readable(text) for text in sorted(texts)]) for name, texts in
                     sorted(self.known.variables.items())}  # fmt: skip
        return {"attributes": {name: _joined(texts) for name, texts in groups.items()}, "variables": variables}

    def _attributes(self, module: nn.Module) -> Iterator[tuple[str, Any]]:
        """Return what a module holds beside parameters, persistent buffers and other modules."""
        own = getattr(module, "fingerprint", None)
        if inspect.ismethod(own):
            yield "fingerprint()", own()
            return
        for name in sorted(module._non_persistent_buffers_set):
            yield name, module._buffers.get(name)
        forward = vars(module).get("_old_forward", vars(module).get("forward"))
        for name, value in sorted({**vars(module), "forward": forward}.items()):
            is_own = not name.startswith(_SHARDED) and name not in _OWN | ORIGIN_NAMES
            if is_own and value is not None and not _is_of_wrapping(value, module):
                yield name, value


def model_digest(model: nn.Module, opaque: set[str] | None = None) -> dict[str, Any]:
    """Return by what a model is known again, as plain JSON. What nobody can look into is added to `opaque`."""
    return ModelDigest(model, Known(_texts, opaque)).told()


def function_text(function: Any, opaque: set[str] | None = None) -> str | None:
    """Return a text by which a function is told from another: its code, what it closes over, its object's values."""
    if function is None or isinstance(function, str):
        return function
    name, known = getattr(function, "__qualname__", type(function).__qualname__), Known(_texts, opaque)
    text = known.text(function)
    variables = [f"{key} {sorted(texts)}" for key, texts in sorted(known.variables.items())]
    return f"{name} {hashed([text, *variables])}"


def _texts(model: nn.Module, known: Known) -> Iterator[str]:
    """Return the texts of which a model is made that something else holds."""
    yield json.dumps(ModelDigest(model, known).told())


def steady(before: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """Return what is known of a model that has run since, without what it wrote as it ran."""
    after, told, wrote = ModelDigest(model, Known(_texts)).state(), dict(before), _wrote.setdefault(model, set())
    for part in _STATE:
        one, other = before[part], after[part]
        wrote |= {name for name in {**one, **other} if one.get(name) not in (other.get(name), WRITTEN)}
        told[part] = {name: WRITTEN if name in wrote else one[name] for name in {**one, **other}}
    return told


def agreed(told: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is known of a model, with what a store knows where either of them can't compare."""
    new = dict(told)
    for part in _STATE:
        one, other = told[part], found.get(part, {})
        loose = [name for name in {**one, **other} if WRITTEN in (one.get(name), other.get(name))]
        kept = {name: value for name, value in one.items() if name not in loose}
        new[part] = {**kept, **{name: other[name] for name in loose if name in other}}
    return new


def written(told: Mapping[str, Any]) -> list[str]:
    """Return the names of what can't be compared since the model writes it."""
    return sorted(name for part in _STATE for name, value in told[part].items() if value == WRITTEN)


def _saved(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Return what a module saves that is neither a parameter nor a buffer: packed weights, say, and any extra state."""
    base, one = nn.Module, type(module)
    if one._save_to_state_dict is base._save_to_state_dict and one.get_extra_state is base.get_extra_state:
        return
    found: dict[str, Any] = {}
    module._save_to_state_dict(found, "", keep_vars=True)
    for name, value in found.items():
        if name not in module._parameters and name not in module._buffers:
            yield name, value


def _readable(text: str) -> str:
    """Return a short text as it is, so that a message can show it."""
    return text if len(text) <= _LONGEST else hashed([text])


def _homes(classes: set[type]) -> set[str]:
    """Return the Python modules in which classes were made, and those that they inherit from."""
    return {base.__module__ for one in classes for base in one.__mro__}


def _joined(texts: list[str]) -> str:
    """Return one text for those of a group of attributes, which mostly are equal."""
    return texts[0] if len({*texts}) == 1 else hashed(texts)


def _is_of_wrapping(value: Any, module: nn.Module) -> bool:
    """Return whether an attribute belongs to code that hooks, shards or moves the model."""
    if isinstance(value, (int, float, str)):
        return False
    function = getattr(value, "func", value)  # accelerate's forward is a partial one.
    code = getattr(function, "__globals__", {}).get("__name__", "") or type(value).__module__
    is_own = getattr(value, "__self__", None) is module and getattr(value, "__func__", None) is type(module).forward
    return is_shadow(value) or is_own or code.startswith(_ELSEWHERE)


def _class(module: nn.Module) -> str:
    return type(module).__qualname__.removeprefix("FSDP")  # So does fully_shard rename them.


def _plain_name(name: str) -> str:
    """Return a name as it is in the model that nobody has wrapped."""
    return re.sub(r"(^|\.)(_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)(?=\.|$)", "", name).lstrip(".")


def _at_hand(module: nn.Module, name: str, tensor: Tensor) -> Tensor:
    """Return a weight with its values, which accelerate keeps elsewhere until the module runs."""
    hook = getattr(module, "_hf_hook", None)
    for one in [hook, *getattr(hook, "hooks", ())] if tensor.is_meta else ():
        weights = getattr(one, "weights_map", None)
        if weights is not None:
            with suppress(KeyError):
                found: Tensor = weights[name]
                return found
    return tensor
