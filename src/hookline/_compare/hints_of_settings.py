"""Reasons that lie in the settings of a module: its mode, its attributes, its config, and how it multiplies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hookline._compare.recording import ModuleCall
from hookline._compare.rounding import copied, run_alone, run_in
from hookline._compare.suspect import Suspect
from hookline._kernel import leaves, map_tensors
from hookline._torch import AnyDropout

NUMBERS = (bool, int, float, str)


def other_mode(suspect: Suspect) -> str | None:
    for name, module in (("b", suspect.b), ("a", suspect.a)):
        active = [one for one in module.modules() if isinstance(one, AnyDropout) and one.training and one.p > 0]
        if not active and not (module.training and _drops(module)):
            continue
        if name == "b" and suspect.explained_by(copied(module).eval()):
            return "dropout is on in b, which is in train mode: call b.eval()"
        if name == "a":
            output = run_alone(copied(module).eval(), map_tensors(torch.clone, suspect.inputs, in_objects=True))
            if suspect.are_same(output, suspect.convert(suspect.of_b)[1]):
                return "dropout is on in a, which is in train mode: call a.eval()"
    if suspect.a.training != suspect.b.training:
        changed = copied(suspect.b).train(suspect.a.training)
        if suspect.explained_by(changed):
            return f"b is in {'train' if suspect.b.training else 'eval'} mode, and a is not"
    return None


def _drops(module: nn.Module) -> bool:
    rates = [held for name, held in vars(module).items() if "drop" in name and isinstance(held, float)]
    return any(0 < rate < 1 for rate in rates)


def other_settings(suspect: Suspect) -> str | None:
    """Give a copy of b's module the numbers that a's module has as attributes."""
    for path, one in suspect.a.named_modules():
        try:
            two = suspect.changeable.get_submodule(path)
        except AttributeError:
            continue
        differing = list(_differing_settings(one, two))
        for name, from_a, other, from_b in differing:
            with _set(two, {other: from_a}):
                if suspect.explained_by(suspect.changeable):
                    full = f"{path}.{name}" if path else name
                    return f"{full} is {from_a!r} in a and {from_b!r} in b"
        if len(differing) > 1:
            with _set(two, {other: from_a for _, from_a, other, _ in differing}):
                if suspect.explained_by(suspect.changeable):
                    return "; ".join(
                        f"{name} is {from_a!r} in a and {from_b!r} in b"
                        for name, from_a, _, from_b in differing
                        if name[0] != "_"
                    )
    return None


def other_config(suspect: Suspect) -> str | None:
    """Give a copy of b's module the numbers of a's config, if both have one."""
    for name, from_a, other, from_b in _differing_settings(suspect.a, suspect.changeable, "config"):
        with _set(suspect.changeable.config, {other: from_a}):
            if suspect.explained_by(suspect.changeable):
                return f"config.{name} is {from_a!r} in a and {from_b!r} in b"
    return None


def other_precision(suspect: Suspect) -> str | None:
    """Find out whether a's module in another dtype returns what b's does."""
    own = {one.dtype for one in suspect.a.parameters()}
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        if own != {dtype}:
            output = run_in(ModuleCall(0, suspect.a, suspect.inputs, random=suspect.random), dtype)
            if output is not None and suspect.are_same(output, suspect.convert(suspect.of_b)[1]):
                return f"b computes in {str(dtype)[6:]}, and a does not"
    return None


def tensor_cores(suspect: Suspect) -> str | None:
    """Find out whether b's module returns what a's does if its GPU multiplies all 24 bits of a float32."""
    on = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    if not any(one.is_cuda for one in leaves(suspect.given)) or not any(on):
        return None
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        explains = suspect.explained_by(suspect.changeable)
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = on
    names = [
        f"torch.backends.{name}.allow_tf32" for name, is_on in zip(("cuda.matmul", "cudnn"), on, strict=True) if is_on
    ]
    return f"b multiplies in TF32 on its GPU, since {' and '.join(names)} is True" if explains else None


def _differing_settings(one: nn.Module, two: nn.Module, of: str = "") -> Iterator[tuple[str, Any, str, Any]]:
    """Yield the names and values of numbers that differ in two modules, or in an object that both hold."""
    held = [getattr(module, of, None) if of else module for module in (one, two)]
    in_a, in_b = (dict(_numbers(vars(each))) if hasattr(each, "__dict__") else {} for each in held)
    for name, from_a in in_a.items():
        if name in in_b and in_b[name] != from_a:
            yield name, from_a, name, in_b[name]
    eps = [[name for name in numbers if "eps" in name] for numbers in (in_a, in_b)]
    if len(eps[0]) == len(eps[1]) == 1 and eps[0] != eps[1] and in_a[eps[0][0]] != in_b[eps[1][0]]:
        yield eps[0][0], in_a[eps[0][0]], eps[1][0], in_b[eps[1][0]]


def _numbers(attributes: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, held in attributes.items():
        is_tuple = isinstance(held, tuple) and all(isinstance(one, int) for one in held)
        if (isinstance(held, NUMBERS) or is_tuple or held is None) and name != "training":
            yield name, held


@contextmanager
def _set(module: Any, settings: Mapping[str, Any]) -> Iterator[None]:
    """Set attributes of a module, for a while."""
    before = {name: getattr(module, name) for name in settings}
    try:
        for name, value in settings.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)
