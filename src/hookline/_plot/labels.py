"""Labels of an axis: sites by layer or one by one, in the order of depth, and tokens. Knows no matplotlib."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from hookline._sites.language import Site
from hookline.errors import HooklineError, SiteError

_LONGEST = 16  # Characters of a token's label.
_INDEX = re.compile(r"(?<!\w)(\d+)(?!\w)")  # A number that is a name of its own, as in "h.0" and "[:, 3]".
_NUMBER = re.compile(r"(\d+)")  # Any, for names such as "conv1".


class Family(NamedTuple):
    """Names that differ in numbers only: "h.*.mlp", and for each name what stands for its `*`s."""

    template: str
    members: dict[str, tuple[str, ...]]


class Depth(NamedTuple):
    """Where each name stands along an axis, the labels of the places, and what the axis is."""

    places: dict[str, int]
    labels: list[str]
    title: str
    by_layer: bool = True

    @staticmethod
    def one_by_one(names: Sequence[str]) -> Depth:
        """Give each name a place of its own."""
        places = {name: place for place, name in enumerate(names)}
        return Depth(places, [name or '""' for name in names], "site, in order", by_layer=False)


def families(names: Iterable[str]) -> list[Family]:
    """Group names that differ in numbers only.

    >>> [family.template for family in families(["conv1", "conv2", "h.0.ln_1", "h.1.ln_1", "h.0.ln_2", "h.1.ln_2"])]
    ['conv*', 'h.*.ln_1', 'h.*.ln_2']
    """
    groups: dict[tuple[str, ...], list[tuple[str, list[str]]]] = {}
    for name in names:
        pieces = (_INDEX if _INDEX.search(name) else _NUMBER).split(name)
        groups.setdefault(tuple(pieces[::2]), []).append((name, pieces[1::2]))
    return [_family(words, group) for words, group in groups.items()]


def _family(words: tuple[str, ...], group: list[tuple[str, list[str]]]) -> Family:
    columns = list(zip(*(numbers for _, numbers in group), strict=True))
    varying = [len(set(column)) > 1 for column in columns]
    between = ["*" if varies else column[0] for column, varies in zip(columns, varying, strict=True)]
    template = "".join(word + mark for word, mark in zip(words, [*between, ""], strict=True))
    parts = [tuple(number for number, varies in zip(numbers, varying, strict=True) if varies) for _, numbers in group]
    return Family(template, {name: part for (name, _), part in zip(group, parts, strict=True)})


def depth_of(names: Sequence[str]) -> Depth:
    """Say where names stand along an axis of depth: by layer if one number tells them apart, else one by one.

    >>> depth_of(["h.0.attn", "h.0.mlp", "h.1.attn", "h.1.mlp"]).places
    {'h.0.attn': 0, 'h.0.mlp': 0, 'h.1.attn': 1, 'h.1.mlp': 1}
    >>> depth_of(["embed", "h.0", "h.1", "head"]).places
    {'embed': 0, 'h.0': 1, 'h.1': 2, 'head': 3}
    """
    found = families(names)
    stems = {family.template.partition("*")[0] for family in found}
    if len(stems) == 1 and all({len(parts) for parts in family.members.values()} == {1} for family in found):
        layer = {name: parts[0] for family in found for name, parts in family.members.items()}
        order = list(dict.fromkeys(layer[name] for name in names))
        title = found[0].template if len(found) == 1 else f"{stems.pop()}*"
        return Depth({name: order.index(layer[name]) for name in names}, order, f"layer {title}")
    return Depth.one_by_one(names)


def along_depth(names: Iterable[str]) -> dict[str, str]:
    """Return names in the order of depth, each with the name of the value there: a gradient has that of its value.

    Gradients pass in the opposite order, so where no values say how deep they are, that is turned round.

    >>> along_depth(["h.1:grad_output", "h.0:grad_output"])
    {'h.0:grad_output': 'h.0', 'h.1:grad_output': 'h.1'}
    """
    sites = {name: _site(name) for name in names}
    values = {name: name for name, site in sites.items() if site is None or not site.is_gradient}
    gradients = {name: _value_of(site) for name, site in sites.items() if site is not None and site.is_gradient}
    known = {name: place for place, name in enumerate(values)}
    backwards = dict(reversed(gradients.items()))
    ordered = sorted(backwards.items(), key=lambda pair: known.get(pair[1], len(known)))
    return {**values, **dict(ordered)}


def is_gradient(name: str) -> bool:
    """Whether a name is the site of a gradient."""
    site = _site(name)
    return site is not None and site.is_gradient


def _site(name: str) -> Site | None:
    try:
        return Site.parse(name)
    except SiteError:  # Somebody's own names are names too.
        return None


def _value_of(site: Site) -> str:
    return str(site._replace(port=site.port.removeprefix("grad_")))


def thinned(count: int, most: int) -> range:
    """Return which of so many labels to show, if there is room for `most`: evenly, from the first on, in round steps.

    >>> thinned(12, 20), thinned(100, 12)
    (range(0, 12), range(0, 100, 10))
    """
    steps = (factor * 10**power for power in range(12) for factor in (1, 2, 5))
    return range(0, count, next(step for step in steps if count <= step * max(most, 1)))[: max(count, 1)]


def token_labels(tokens: Any, sample: int, count: int, name: str) -> list[str] | None:
    """Return the labels of one sample's tokens: `tokens` are its own, or those of every sample."""
    if tokens is None:
        return None
    given = tokens.tolist() if hasattr(tokens, "tolist") else list(tokens)
    if given and not isinstance(given[0], (str, int, float)):
        if not -len(given) <= sample < len(given):
            raise HooklineError(f"tokens= has those of {len(given)} samples, and sample={sample} is not among them")
        given = list(given[sample])
    if len(given) != count:
        raise HooklineError(f"tokens= has {len(given)} labels, but {name!r} has {count} tokens")
    return [_readable(str(token)) for token in given]


def _readable(text: str) -> str:
    plain = "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)
    return plain if len(plain) <= _LONGEST else plain[: _LONGEST - 1] + "…"
