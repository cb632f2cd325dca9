"""Which module of one model stands for which of another: by name, by given patterns, or by what they hold and return.

Modules that are alike in name come first. The others are put side by side in the order in which they ran: two may be a
pair if their outputs have the same number of elements and their weights the same shapes; it counts most if the outputs
or the weights are equal. Modules that hold others are a pair if those inside them are.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hookline._compare.apart import sums
from hookline._compare.moved import moved
from hookline._compare.paired_values import tensors_of
from hookline._compare.recording import ModuleCall, Recording
from hookline._tables import Table, Tabular, count
from hookline.errors import HooklineError, did_you_mean

NAME, GIVEN, LIKE = "name", "match=", "like"
_SAME_OUTPUT = 1e-3  # Outputs that are no further apart, as a share, speak for a pair.
_SAMPLE = 4096  # About how many of their elements are compared.


@dataclass
class Matching(Tabular):
    """The pairs of modules, and what is left over on both sides; prints as a table."""

    pairs: dict[str, str] = field(default_factory=dict)  # Path in a: path in b.
    how: dict[str, str] = field(default_factory=dict)  # Path in a: how the pair was found.
    only_a: list[str] = field(default_factory=list)
    only_b: list[str] = field(default_factory=list)
    with_weights: list[str] = field(default_factory=list)  # Those of the last two that hold weights themselves.

    def add(self, path: str, other: str, how: str) -> None:
        """Add a pair."""
        self.pairs[path], self.how[path] = other, how

    def left_over(self) -> list[str]:
        """Say in words what has no counterpart."""
        return [
            f"only in {side}: {', '.join(names[:4])}{f' and {len(names) - 4} more' if len(names) > 4 else ''}"
            for side, names in (("a", self.only_a), ("b", self.only_b))
            if names
        ]

    def _table(self) -> Table:
        rows = [(path or '""', other or '""', self.how[path]) for path, other in self.pairs.items()]
        rows += [(path, "", "only in a") for path in self.only_a] + [("", path, "only in b") for path in self.only_b]
        left = len(self.only_a) + len(self.only_b)
        title = f"{count(len(self.pairs), 'pair')} of modules, {left} left over"
        return Table(("a", "b", "found by"), rows, title, names="a")


def match_modules(a: Recording, b: Recording, match: Mapping[str, str | None] | None) -> Matching:
    """Return which of the modules that ran in a stand for which in b."""
    found = Matching()
    in_a, in_b = list(a.calls), list(b.calls)
    if match is not None:
        _match_given(found, in_a, in_b, match)
    left_out = {path for path in in_a if match is not None and renamed(path, match) is None and path}
    taken = set(found.pairs.values())
    for path in in_a:
        is_free = path not in found.pairs and path not in left_out and path in b.calls and path not in taken
        if is_free and _have_one_name(path, a, b):
            found.add(path, path, NAME)
            taken.add(path)
    _match_like(found, a, b, left_out)
    found.only_a = [path for path in in_a if path not in found.pairs and path not in left_out]
    taken = set(found.pairs.values())
    found.only_b = [path for path in in_b if path not in taken]
    for names, ran, side in ((found.only_a, a, "a"), (found.only_b, b, "b")):
        holding = (path for path in names if any(True for _ in ran.calls[path][0].module.parameters(recurse=False)))
        found.with_weights += [f"{path!r} of {side}" for path in holding]
    found.pairs = {path: found.pairs[path] for path in in_a if path in found.pairs}
    return found


def _match_given(found: Matching, in_a: Sequence[str], in_b: Sequence[str], match: Mapping[str, str | None]) -> None:
    refuse_unused(in_a, match)
    for path in in_a:
        if _pattern_of(path, match) is None:
            continue
        other = renamed(path, match)
        if other is not None and other in in_b:
            found.add(path, other, GIVEN)
    for pattern, other in match.items():
        if other is not None and not any(
            found.how.get(path) == GIVEN for path in in_a if _pattern_of(path, match) == pattern
        ):
            first = next(path for path in in_a if _pattern_of(path, match) == pattern)
            made = renamed(first, match) or ""
            raise HooklineError(
                f"match={{{pattern!r}: {other!r}}} makes {made!r} of {first!r}, and no such module of b ran"
                f"{did_you_mean(made, in_b)}"
            )


def refuse_unused(in_a: Sequence[str], match: Mapping[str, str | None] | None) -> None:
    """Raise for a pattern in match= that fits nothing in a."""
    for pattern, other in (match or {}).items():
        if not any(_regex(pattern).match(path) for path in in_a):
            raise HooklineError(
                f"match={{{pattern!r}: {other!r}}}: a has nothing of this name{did_you_mean(pattern, in_a)}"
            )


def _pattern_of(path: str, match: Mapping[str, str | None]) -> str | None:
    """Return the longest pattern that names a module or one around it."""
    fitting = [pattern for pattern in match if _regex(pattern).match(path)]
    return max(fitting, key=lambda pattern: (pattern.count("."), len(pattern)), default=None)


def renamed(path: str, match: Mapping[str, str | None]) -> str | None:
    """Return a path of a as it is called in b; None if patterns leave it out."""
    pattern = _pattern_of(path, match)
    if pattern is None:
        return path
    other = match[pattern]
    if other is None:
        return None
    fitting = _regex(pattern).match(path)
    assert fitting is not None
    stars = iter(fitting.groups())
    start = re.sub(r"\*\*?", lambda star: next(stars, None) or star.group(), other)
    rest = path[fitting.end() :]
    return ".".join(part for part in (start, rest.removeprefix(".")) if part)


def renamed_start(path: str, match: Mapping[str, str | None]) -> str:
    """Return what the part of a path that a pattern names is called in b; "" if none does."""
    pattern = _pattern_of(path, match)
    fitting = _regex(pattern).match(path) if pattern is not None else None
    return (renamed(path[: fitting.end()], match) or "") if fitting is not None else ""


def _regex(pattern: str) -> re.Pattern[str]:
    """Return what matches a path that begins with a pattern, with a group for each star."""
    parts = re.split(r"(\*\*|\*)", pattern)
    text = "".join({"*": r"([^.]+)", "**": r"(.+)"}.get(part, re.escape(part)) for part in parts)
    return re.compile(f"{text}(?=\\.|$)" if pattern else "")


def _match_like(found: Matching, a: Recording, b: Recording, left_out: set[str]) -> None:
    """Add pairs of modules that are alike: first those that hold no others, then those around them."""
    taken = set(found.pairs.values())
    in_a = [path for path in a.calls if path not in found.pairs and path not in left_out]
    in_b = [path for path in b.calls if path not in taken]
    given = {path: other for path, other in found.pairs.items() if found.how[path] == GIVEN}
    groups: dict[str, tuple[dict[str, _Traits], dict[str, _Traits]]] = {}  # By the given module of b around.
    for side, ran, paths, around in ((0, a, in_a, given), (1, b, in_b, {other: other for other in given.values()})):
        for path in _innermost(paths, ran):
            outer = max((one for one in around if path in _inside(one, [path])), key=len, default=None)
            group = groups.setdefault("" if outer is None else around[outer], ({}, {}))
            group[side][path] = _traits(path, ran.calls[path][0])
    for traits in groups.values():
        for path, other in _with_one_weight(*traits):
            found.add(path, other, LIKE)
            del traits[0][path], traits[1][other]
        for path, other in _aligned(*traits):
            found.add(path, other, LIKE)
    free = [path for path in in_b if path not in set(found.pairs.values())]
    for path in sorted((one for one in in_a if one not in found.pairs), key=_outermost_last):
        wanted = {found.pairs[one] for one in _inside(path, found.pairs)}
        for other in sorted(free, key=_outermost_last) if wanted else ():
            is_around = set(_inside(other, found.pairs.values())) == wanted
            if is_around and _may_be_pair(_traits(path, a.calls[path][0]), _traits(other, b.calls[other][0])):
                found.add(path, other, LIKE)
                free.remove(other)
                break


def _outermost_last(path: str) -> int:
    return -path.count(".") - bool(path)


def _innermost(paths: Sequence[str], recording: Recording) -> list[str]:
    return [path for path in paths if not _inside(path, recording.calls)]


def _inside(path: str, paths: Iterable[str]) -> list[str]:
    start = f"{path}." if path else ""
    return [one for one in paths if one != path and one.startswith(start)]


def _with_one_weight(a: Mapping[str, _Traits], b: Mapping[str, _Traits]) -> list[tuple[str, str]]:
    """Return the modules that hold the same numbers as one of b, and no other of a does, unless the names deny it."""
    alike = [
        (path, other)
        for path, one in a.items()
        for other, two in b.items()
        if _same_numbers(one, two) and _may_be_pair(one, two)
    ]
    often = [Counter(pair[side] for pair in alike) for side in (0, 1)]
    pairs = {path: other for path, other in alike if often[0][path] == often[1][other] == 1}
    elsewhere = moved(pairs, b, {path: tuple(sorted(a[path].matrices.items())) for path in pairs})
    return [(path, other) for path, other in pairs.items() if path not in elsewhere]


def _aligned(a: Mapping[str, _Traits], b: Mapping[str, _Traits]) -> list[tuple[str, str]]:
    """Put two sequences of modules side by side, so that the pairs are as much alike as possible."""
    in_a, in_b = list(a), list(b)
    scores = [[_likeness(one, two) for two in b.values()] for one in a.values()]
    best = [[0.0] * (len(in_b) + 1) for _ in range(len(in_a) + 1)]
    for row in range(len(in_a) - 1, -1, -1):
        for column in range(len(in_b) - 1, -1, -1):
            both = best[row + 1][column + 1] + scores[row][column] if scores[row][column] else 0.0
            best[row][column] = max(best[row + 1][column], best[row][column + 1], both)
    pairs, row, column = [], 0, 0
    while row < len(in_a) and column < len(in_b):
        score = scores[row][column]
        if score and best[row][column] == best[row + 1][column + 1] + score:
            pairs.append((in_a[row], in_b[column]))
            row, column = row + 1, column + 1
        elif best[row][column] == best[row + 1][column]:
            row += 1
        else:
            column += 1
    return pairs


class _Traits(NamedTuple):
    """What is compared of a module that ran, to tell whether it may stand for another."""

    name: str  # The last part of its path.
    kind: type[nn.Module]
    is_innermost: bool
    matrices: Counter[tuple[int, ...]]  # The shapes of its matrices, regardless of the order of their dimensions.
    numbers: tuple[int, float, float] | None  # The size of its first parameter, its sum and that without signs.
    elements: int | None  # The number of elements that it returns.
    sample: Tensor | None  # Some of them.


@torch.no_grad()
def _traits(path: str, call: ModuleCall) -> _Traits:
    parameters = list(call.module.parameters(recurse=False))
    numbers = None
    if parameters and not parameters[0].is_meta:
        numbers = next(((one.numel(), *sums(one)) for one in tensors_of(parameters[0])), None)
    output = tensors_of(call.output)[:1]
    elements = output[0].numel() if output else None
    sample = output[0].flatten()[:: 1 + output[0].numel() // _SAMPLE].to("cpu", torch.float64) if output else None
    is_innermost = not any(True for _ in call.module.children())
    name = path.rpartition(".")[2]
    return _Traits(name, type(call.module), is_innermost, _matrices(call.module), numbers, elements, sample)


def _likeness(one: _Traits, two: _Traits) -> float:
    """Return how much speaks for a pair; 0 if they can't be one."""
    if not _may_be_pair(one, two):
        return 0.0
    score = 1.0 + 0.5 * (one.kind is two.kind) + 0.5 * (one.name == two.name) + 2.0 * _same_numbers(one, two)
    if one.sample is not None and two.sample is not None:
        score += 3.0 * bool((one.sample - two.sample).norm() < _SAME_OUTPUT * one.sample.norm())
    return score


def _may_be_pair(one: _Traits, two: _Traits) -> bool:
    if one.is_innermost and two.is_innermost:
        fits = one.matrices == two.matrices and (one.numbers is None) == (two.numbers is None)
    else:
        fits = not (one.matrices and two.matrices) or one.matrices == two.matrices
    return one.elements == two.elements and fits


def _same_numbers(one: _Traits, two: _Traits) -> bool:
    """Return True if two modules hold the same numbers, in any layout."""
    if one.numbers is None or two.numbers is None:
        return False
    (size, total, absolute), (other_size, other_total, other_absolute) = one.numbers, two.numbers
    near = _SAME_OUTPUT * absolute
    return size == other_size and abs(total - other_total) <= near and abs(absolute - other_absolute) <= near


def _have_one_name(path: str, a: Recording, b: Recording) -> bool:
    """Return True if a path means a pair in both. What they return may differ in size, as with another batch."""
    one, two = a.calls[path][0], b.calls[path][0]
    if not path:
        return True
    if bool(tensors_of(one.output)) != bool(tensors_of(two.output)):
        return False
    matrices = [_matrices(call.module) for call in (one, two)]
    return type(one.module) is type(two.module) or matrices[0] == matrices[1] or not all(matrices)


def _matrices(module: nn.Module) -> Counter[tuple[int, ...]]:
    return Counter(tuple(sorted(one.shape)) for one in module.parameters(recurse=False) if one.dim() > 1)
