"""Suggestions for a name that matches nothing in a model: a missing prefix, or the spelling of another library."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from hookline._sites.language import PORTS, is_pattern, parse
from hookline._sites.tree import Named, children_of, is_container
from hookline.errors import SiteError, did_you_mean

EVERY_NAME = "; hl.sites(model) lists every name"
_HOOK = re.compile(r"(^|\.)hook_(\w+)$")  # A name of a hook point in TransformerLens.


def near(text: str, places: list[Named], parameters: Iterable[str] = ()) -> str:
    """Return "; did you mean 'a'?" for the text of a path, or how to list every name."""
    names = [name for name, _, _ in places if name]
    every = [*names, *parameters]
    below = {name: f"{name}.*" for name, module, _ in places if is_container(module) and children_of(module)}
    found = (
        _with_nearest_number(text, places, every)
        or _with_prefix(text, every)
        or _without_prefix(text, every)
        or _written_otherwise(text, {name: module for name, module, _ in places})
        or _of_a_hook(text, places)
    )
    if found:
        return f"; did you mean {below.get(found, found)!r}?"
    return (
        did_you_mean(text, every, below)
        or _of_a_class(text, places)
        or (f"; did you mean {tail!r}?" if (tail := _by_tail(text, places)) else "")
        or _by_misspelt_tail(text, every)
        or EVERY_NAME
    )


def _with_nearest_number(text: str, places: list[Named], names: list[str]) -> str:
    """Return the text with a number that exists: `h.11.mlp` for `h.12.mlp` where `h` has 12 blocks."""
    modules = {name: module for name, module, _ in places}
    parts = text.split(".")
    start = next((start for start in range(len(parts)) if ".".join(parts[: start + 1]) not in modules), len(parts))
    above = modules.get(".".join(parts[:start]))
    keys = list(children_of(above)) if above is not None else []
    if not keys or start == len(parts) or not all(key.isdecimal() for key in [*keys, parts[start].removeprefix("-")]):
        return ""
    wanted = int(parts[start])
    key = keys[-1] if wanted < 0 else min(keys, key=lambda one: abs(int(one) - wanted))
    found = ".".join([*parts[:start], key, *parts[start + 1 :]])
    return found if _matches(found, names) else ""


def _matches(text: str, names: list[str]) -> bool:
    """Return True if a suggested text matches any of these names."""
    try:
        pattern = parse(text)
    except SiteError:
        return False
    return pattern.path in names if pattern.path is not None else any(map(pattern.matches, names))


def _with_prefix(text: str, names: list[str]) -> str:
    """Return the text with its missing prefix: `transformer.h.1.mlp` for `h.1.mlp`, or `**.mlp` if several fit."""
    try:
        pattern = parse(text)
    except SiteError:
        return ""
    length = len(pattern.segments)
    if None in pattern.segments or pattern.member.endswith("()") or all(map(is_pattern, text.split("."))):
        return ""
    prefixes: dict[str, None] = {}
    for name in names:
        parts = name.split(".")
        rest = ".".join(parts[-length:])
        if len(parts) > length and (pattern.matches(rest) if pattern.path is None else rest == pattern.path):
            prefixes[".".join(parts[:-length])] = None
    return f"{next(iter(prefixes)) if len(prefixes) == 1 else '**'}.{text}" if prefixes else ""


def _without_prefix(text: str, names: list[str]) -> str:
    """Return the text without leading names that this model does not have, such as those of a wrapper."""
    parts = text.split(".")
    tails = (".".join(parts[start:]) for start in range(1, len(parts)))
    return next((tail for tail in tails if tail in names), "")


def _written_otherwise(text: str, modules: dict[str, nn.Module]) -> str:
    """Return the site of a port or function written like a module: `mlp.output`, `layer1.0.relu_1`, `flatten`.

    A module that is written the same without the underscore goes first: `norm1` for `norm_1`.
    """
    above, _, last = text.rpartition(".")
    if above not in modules:
        return ""
    base, _, number = last.rpartition("_")
    name, call = (base, f"#{number}") if base and number.isdigit() else (last, "")
    if last in PORTS:
        return f"{above}:{last}"
    joined = f"{above}.{base}{number}".lstrip(".")
    if joined in modules:
        return joined
    if call and f"{above}.{name}".lstrip(".") in modules:
        return f"{above}.{name}{call}".lstrip(".")
    is_function = name.islower() and any(callable(getattr(one, name, None)) for one in (torch, nn.functional, Tensor))
    return f"{above}/{name}{call}" if is_function and not is_container(modules[above]) else ""


def _of_a_hook(text: str, places: list[Named]) -> str:
    """Return the place that a name of TransformerLens means: the module beside it, or the one that holds it."""
    match = _HOOK.search(text)
    if match is None:
        return ""
    above, what = text[: match.start()], match.group(2)
    names = [name for name, _, _ in places if name]
    beside = f"{above}.{what.removesuffix('_out')}".lstrip(".") if what.endswith("_out") else ""
    found = beside in names and beside
    found = found or (beside and _by_tail(beside, places, shortest=2))
    found = found or (above if above in names else _by_tail(above, places) if above else "")
    return f"{found}:input" if found and what.endswith("resid_pre") else found or ""


def _by_tail(text: str, places: list[Named], shortest: int = 1) -> str:
    """Return the place that ends like the text: `transformer.h.1.mlp` for `blocks.1.mlp`, or a block for `blocks.1`."""
    parts, names = text.split("."), [name for name, _, _ in places if name]
    for start in range(1, len(parts) - shortest + 1):
        tail = parts[start:]
        if all(part.isdigit() or is_pattern(part) for part in tail):
            block = f"{_blocks(places)}.{tail[0]}".lstrip(".")
            return block if len(tail) == 1 and block != text and _matches(block, names) else ""
        found = _with_prefix(".".join(tail), names) or (".".join(tail) if ".".join(tail) in names else "")
        if found and (len(tail) > 1 or not found.startswith("**")):
            return found
    return ""


def _by_misspelt_tail(text: str, names: list[str]) -> str:
    """Return "; did you mean 'a'?" for the names that end almost like the text."""
    length = text.count(".") + 1
    tails = {".".join(name.split(".")[-length:]): name for name in reversed(names)}
    close = difflib.get_close_matches(text, tails, n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(repr(tails[one]) for one in close)}?" if close else ""


def _blocks(places: list[Named]) -> str:
    """Return the name of the longest list of modules."""
    lists = [(name, len(children_of(module))) for name, module, _ in places if isinstance(module, nn.ModuleList)]
    return max(lists, key=lambda one: one[1], default=("", 0))[0]


def _of_a_class(text: str, places: list[Named]) -> str:
    found = [name for name, module, _ in places if type(module).__name__ == text]
    return f", but {text} is the class of {found[0]!r}: give the class itself" if found else ""


def in_list(path: str, module: nn.Module, index: str, subscripts: tuple[object, ...]) -> str:
    """Return the pattern of a container's children, or of the child that its subscript names."""
    first = subscripts[0] if subscripts else None
    children = list(children_of(module))
    chosen = children[first] if isinstance(first, slice) else [first]
    if isinstance(first, int) and -len(children) <= first < len(children):
        chosen = [children[first]]
    if not subscripts or not chosen or any(one not in children for one in chosen):
        return f"{path}.*".lstrip(".")
    name = str(chosen[0]) if len(chosen) == 1 else "{" + ",".join(map(str, chosen)) + "}"
    return f"{path}.{name}".lstrip(".") + "".join(index.partition("]")[2:])
