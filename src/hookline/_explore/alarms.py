"""The warnings on a page, most serious first: NaN, Inf, exploding, vanishing, constant, dead, never called.

Many layers with the same problem (`h.0.mlp` ... `h.11.mlp`) get one warning, which points at the worst layer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from math import log10
from typing import Any, NamedTuple

import torch

from hookline._explore.excerpts import Summary
from hookline._explore.module_tree import Node
from hookline._explore.run_or_load import SiteValue
from hookline._plot.plot_data import FAR
from hookline._tables import count

LEVELS = ("error", "warning", "note")
KINDS = ("nan", "inf", "exploding", "vanishing", "constant", "dead", "never", "same")
AT_ONCE = 100.0  # The growth from one layer to the next that is worth a warning. Over all layers, `FAR` is.
FEWEST_LAYERS = 3
FEWEST_SEEN = 16  # How often a unit must have been seen before it is called dead.
DEAD, MANY_DEAD = 0.1, 0.5
_NUMBER = re.compile(r"(\d+)(?![^\[]*\])")  # A number in a name, but not in brackets, which select a part of a value.
_NEAR_LIMIT = 0.1  # The share of a dtype's largest number from which a value is close to overflow.


class Alarm(NamedTuple):
    """One warning, with the fields that the page reads."""

    level: str
    what: str
    site: int | None
    module: str | None
    run: int
    text: str

    def as_json(self) -> dict[str, Any]:
        """Return the warning for JSON."""
        return self._asdict()


class SiteSummary(NamedTuple):
    """A site of one run, and the summary of its value."""

    number: int
    entry: SiteValue
    summary: Summary


def alarms(runs: Sequence[Sequence[SiteSummary]], modules: Sequence[Node]) -> list[Alarm]:
    """Return all warnings, most serious first."""
    found: list[Alarm] = []
    types = {name: node.type for node in modules for name in (node.path, *node.also)}
    for run, seen in enumerate(runs):
        for is_gradient in (False, True):
            sites = [one for one in seen if one.entry.site.is_gradient == is_gradient]
            found += [*_not_finite(sites, run), *_over_depth(sites, run, types), *_constant(sites, run)]
        found += _dead([one for one in seen if not one.entry.site.is_gradient], run)
    found += _never(modules)
    return sorted(found, key=lambda one: (LEVELS.index(one.level), KINDS.index(one.what), one.run))


def family(name: str) -> str:
    """Return a name with `*` in place of each number. Names of one family are the same place in many layers.

    >>> family("h.10.mlp"), family("layer2.0.conv1")
    ('h.*.mlp', 'layer*.*.conv*')
    """
    return re.sub(r"\d+", "*", name)


def _not_finite(sites: Sequence[SiteSummary], run: int) -> Iterator[Alarm]:
    """Warn about NaN and Inf. They spread, so the warning names only the first site and counts the others."""
    for what, word in (("nan", "NaN"), ("inf", "Inf")):
        bad = [one for one in sites if getattr(one.summary.numbers, what)]
        masks = [one for one in bad if what == "inf" and not one.summary.has_plus_inf]
        bad = [one for one in bad if one not in masks]
        if bad:
            share = getattr(bad[0].summary.numbers, what)
            more = f"; {count(len(bad) - 1, 'later site')} too" if len(bad) > 1 else ""
            yield _alarm(
                "error", what, bad[0], run, f"{word} first in '{bad[0].entry.site}': {_percent(share)} of it{more}"
            )
        if masks:
            more = f" and {count(len(masks) - 1, 'other site')}" if len(masks) > 1 else ""
            text = f"-Inf, and no +Inf, in '{masks[0].entry.site}'{more}: as in a mask"
            yield _alarm("note", "inf", masks[0], run, text)


class _Growth(NamedTuple):
    """How the magnitude of values changes over the layers of a chain."""

    orders: float  # The change in orders of magnitude, over the whole chain or in its largest single step.
    text: str
    at: SiteSummary


def _over_depth(sites: Sequence[SiteSummary], run: int, types: Mapping[str, str]) -> Iterator[Alarm]:
    """Warn about magnitudes that explode or vanish over layers; gradients are followed from the last to the first."""
    for members in _families(sites).values():
        sized = [one for one in members if one.summary.finite and 0 < one.summary.rms < float("inf")]
        yield from _near_limit(sized, run)
        changes = [change for chain in _chains(sized, types) if (change := _growth(chain)) is not None]
        if changes:
            worst = max(changes, key=lambda change: abs(change.orders))
            yield _alarm("warning", "exploding" if worst.orders > 0 else "vanishing", worst.at, run, worst.text)


def _chains(members: Sequence[SiteSummary], types: Mapping[str, str]) -> list[list[SiteSummary]]:
    """Return chains of members that differ in one number of their name and have the same type.

    If the types are unknown, only the first number that varies counts: the block's, not that of a layer inside it.
    """
    parts = [_NUMBER.split(str(one.entry.site)) for one in members]
    varying = [place for place, numbers in enumerate(zip(*parts, strict=True)) if place % 2 and len(set(numbers)) > 1]
    kinds = [types.get(one.entry.site.path, "") for one in members]
    found: dict[tuple[object, ...], list[SiteSummary]] = {}
    for place in varying if all(kinds) else varying[:1]:
        for one, part, kind in zip(members, parts, kinds, strict=True):
            found.setdefault((place, kind, *part[:place], *part[place + 1 :]), []).append(one)
    return [chain for chain in found.values() if len(chain) >= FEWEST_LAYERS]


def _growth(chain: Sequence[SiteSummary]) -> _Growth | None:
    """Return how a chain explodes or vanishes; None if it does not."""
    first, last = chain[0], chain[-1]
    jumps = [(_orders(before, after), before, after) for before, after in pairwise(chain)]
    through, sign = _orders(first, last), 1 if first.summary.rms <= last.summary.rms else -1
    what = "the gradient's size (rms)" if first.entry.site.is_gradient else "the size (rms)"
    if abs(through) >= log10(FAR):
        orders, _, after = max(jumps, key=lambda jump: sign * jump[0])
        most = f"most at '{after.entry.site}' ({_times(orders)})"
        return _Growth(through, f"{what} {_grows(through)} from {_sized(first)} to {_sized(last)}, {most}", after)
    orders, before, after = max(jumps, key=lambda jump: abs(jump[0]))
    if abs(orders) < log10(AT_ONCE):
        return None
    return _Growth(orders, f"{what} {_grows(orders)} at once, from {_sized(before)} to {_sized(after)}", after)


def _orders(before: SiteSummary, after: SiteSummary) -> float:
    return log10(after.summary.rms) - log10(before.summary.rms)


def _grows(orders: float) -> str:
    return f"{'grows' if orders > 0 else 'shrinks'} {_times(orders)}"


def _times(orders: float) -> str:
    return f"{10 ** abs(orders):.3g} times"


def _sized(seen: SiteSummary) -> str:
    return f"'{seen.entry.site}' ({seen.summary.rms:.2g})"


def _near_limit(sites: Sequence[SiteSummary], run: int) -> Iterator[Alarm]:
    """Warn about float16 numbers that are close to overflow."""
    near = [
        one
        for one in sites
        if one.entry.dtype == "float16" and _size(one) > _NEAR_LIMIT * torch.finfo(torch.float16).max
    ]
    if near:
        worst = max(near, key=_size)
        text = f"{_named(near)} up to {_size(worst):.3g}: float16 ends at {torch.finfo(torch.float16).max:.0f}"
        yield _alarm("warning", "exploding", worst, run, text)


def _constant(sites: Sequence[SiteSummary], run: int) -> Iterator[Alarm]:
    """Warn about constant values. A constant gradient is normal (the gradient of a sum), except 0."""
    constant = [one for one in sites if one.summary.is_constant]
    constant = [one for one in constant if not one.entry.site.is_gradient or not one.summary.numbers.norm]
    for members in _families(constant).values():
        numbers = {one.summary.numbers.min for one in members}
        what = f"{numbers.pop():.4g}" if len(numbers) == 1 else "one number each"
        verb = "is" if len(members) == 1 else "are"
        yield _alarm("warning", "constant", members[0], run, f"{_named(members)} {verb} {what} everywhere")


def _dead(sites: Sequence[SiteSummary], run: int) -> Iterator[Alarm]:
    """Warn about units that are zero wherever they were seen, if they were seen often enough."""
    dead = [one for one in sites if (one.summary.dead or 0) >= DEAD and one.summary.seen >= FEWEST_SEEN]
    dead = [one for one in dead if not one.summary.is_constant]
    for members in _families(dead).values():
        shares = sorted((one.summary.dead or 0.0) for one in members)
        worst = max(members, key=lambda one: one.summary.dead or 0.0)
        # A single share if both read the same.
        span = " to ".join(dict.fromkeys((_percent(shares[0]), _percent(shares[-1]))))
        level = "warning" if shares[-1] >= MANY_DEAD else "note"
        text = f"{_named(members)}: {span} of the units are zero wherever they were seen"
        yield _alarm(level, "dead", worst, run, text)


def _never(modules: Sequence[Node]) -> Iterator[Alarm]:
    """Note modules that were never called, and in which no module was called."""
    called = {node.path for node in modules if node.calls}
    # The paths of modules that contain a called module.
    used = {path[:end] for path in called for end in range(len(path)) if path[end] == "."}
    silent = [node for node in modules if any(hazard.startswith("never called") for hazard in node.hazards)]
    silent = [node for node in silent if node.path not in used]
    found: dict[tuple[str, str], list[Node]] = {}
    for node in silent:
        why = next(hazard for hazard in node.hazards if hazard.startswith("never called"))
        found.setdefault((family(node.path), family(why)), []).append(node)
    for nodes in found.values():
        why = next(hazard for hazard in nodes[0].hazards if hazard.startswith("never called"))
        more = f" and {count(len(nodes) - 1, 'more')}".replace("mores", "more") if len(nodes) > 1 else ""
        yield Alarm("note", "never", None, nodes[0].path, 0, f"'{nodes[0].path}'{more}: {why}")


def _families(sites: Sequence[SiteSummary]) -> dict[str, list[SiteSummary]]:
    found: dict[str, list[SiteSummary]] = {}
    for one in sites:
        found.setdefault(family(str(one.entry.site)), []).append(one)
    return found


def _named(members: Sequence[SiteSummary]) -> str:
    """Name one site, or a family by its first and its last site."""
    first, last = (f"'{one.entry.site}'" for one in (members[0], members[-1]))
    return first if len(members) == 1 else f"{len(members)} sites, {first} … {last}"


def _alarm(level: str, what: str, seen: SiteSummary, run: int, text: str) -> Alarm:
    return Alarm(level, what, seen.number, seen.entry.site.path, run, text)


def _size(seen: SiteSummary) -> float:
    return max(abs(seen.summary.numbers.min), abs(seen.summary.numbers.max))


def _percent(share: float) -> str:
    """Write a share in percent. Only a share of 1 is written as 100 %.

    >>> _percent(0.125), _percent(0.999), _percent(1.0)
    ('12 %', 'over 99 %', '100 %')
    """
    if 0.99 < share < 1:
        return "over 99 %"
    return "100 %" if share == 1 else f"{100 * share:.2g} %"
