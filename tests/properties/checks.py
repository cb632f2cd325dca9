"""Comparisons of runs, and of a model before and after a run."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from tests.properties.programs import Program
from tests.properties.structures import difference, flat

HOOK_TABLES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks")
Anatomy = dict[tuple[str, str], Any]


def divergence(expected: list[tuple[str, Any]], found: list[tuple[str, Any]], exact: bool, tolerance: float) -> str:
    """Return the first difference between two traces, or "". If `exact`, only gradients may differ by rounding."""
    for (label, value), (found_label, found_value) in zip(expected, found, strict=False):
        if label != found_label:
            return f"{found_label!r} came where {label!r} was expected"
        if found_value == "refused by torch" or value == "refused by torch":
            return ""
        problem = difference(found_value, value, 0.0 if exact and "grad" not in label else tolerance)
        if problem:
            return f"{label}: {problem}"
    return "" if len(expected) == len(found) else f"{len(found)} observations where {len(expected)} were expected"


def is_nothing(value: Any) -> bool:
    """Return True if a gradient is missing, or zero in one of its calls."""
    calls = value if isinstance(value, list) else [value]
    return not calls or any(
        all(not isinstance(leaf, Tensor) or not leaf.any() for leaf in flat(call)) for call in calls
    )


def may_be_stale(program: Program) -> set[str]:
    """Return the labels of captures by reference, which may refuse to be read after an in-place write."""
    return {
        f"{what} {number} {text}"
        for what in ("captured", "latest", "short")
        for number, block in enumerate(program.blocks)
        for action in block.actions
        if action.clone is False
        for place in action.places
        for text in (*(point.text for point in place.points()), *place.short_names())
    }


def anatomy(model: nn.Module) -> Anatomy:
    """Return the classes, attributes in order, hook tables and flags of a model's modules."""
    found: Anatomy = {}
    for name, module in model.named_modules(remove_duplicate=False):
        found[name, "class"] = type(module)
        found[name, "order"] = tuple(module.__dict__)
        for key, value in module.__dict__.items():
            found[name, key] = value
            if key in HOOK_TABLES:
                found[name, f"{key} content"] = tuple((number, id(hook)) for number, hook in value.items())
        for table in ("_parameters", "_buffers", "_modules"):
            for key, value in module.__dict__[table].items():
                found[name, f"{table} {key}"] = value
            found[name, f"{table} order"] = tuple(module.__dict__[table])
    return found


def changes(before: Anatomy, after: Anatomy) -> dict[tuple[str, str], str]:
    """Return the entries that are no longer the same object or the same plain value."""
    found = {}
    for key in before.keys() | after.keys():
        if key not in after or key not in before:
            found[key] = "gone" if key not in after else "new"
        elif before[key] is not after[key] and not _equal(before[key], after[key]):
            found[key] = "changed"
    return found


def _equal(one: Any, other: Any) -> bool:
    plain = (int, float, str, bool, tuple, type(None))
    return isinstance(one, plain) and type(one) is type(other) and one == other
