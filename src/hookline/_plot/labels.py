"""Names of sites and tokens as the labels of an axis. Knows no matplotlib."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hookline._plot.measures import shaped
from hookline._sites.language import Site, write_subscripts
from hookline._tables import count
from hookline._values.nested import describe, get_part, leaf_places
from hookline.errors import HooklineError, SiteError

_SCALARS = (bool, int, float, complex)


class Options(NamedTuple):
    """What can be told of a picture, beside its kind: see `plot`."""

    statistic: str = "norm"
    tokens: Any = None
    sample: int = 0
    most: int = 64
    log: bool | None = None
    title: str | None = None
    note: str = ""
    base: float | None = None
    label: str | None = None


class Shown(NamedTuple):
    """The tensor of a value that is drawn, and which of several it is."""

    name: str
    tensor: Tensor
    note: str = ""

    @property
    def what(self) -> str:
        """Say what it is, in a few words."""
        return " · ".join(filter(None, (describe(self.tensor), self.note)))


class Numbers(NamedTuple):
    """Elements as floats of 64 bits, in which those that have no place on a scale are NaN; and where these are."""

    values: Tensor
    nan: Tensor
    infinite: Tensor
    told: tuple[str, str]  # How many these are, and what.

    def part(self, index: int) -> Numbers:
        """Return one of the first dimension."""
        return Numbers(self.values[index], self.nan[index], self.infinite[index], self.told)


def is_drawable(value: Any) -> bool:
    """Whether there is a number or a tensor in a value."""
    return isinstance(value, _SCALARS) or bool(leaf_places(value))


def shown(name: str, value: Any) -> Shown:
    """Return the tensor of a value to draw: the first, if it has several."""
    if isinstance(value, _SCALARS):
        return Shown(name, torch.tensor(value))
    found = leaf_places(value)
    if not found:
        raise HooklineError(f"{name!r} is {describe(value)}: there is no tensor in it to draw")
    tensor = get_part(value, found[0])
    if tensor.is_meta:
        raise HooklineError(f"{name!r} is on the meta device, where tensors have no values")
    if tensor.is_nested:
        raise HooklineError(
            f"{name!r} is a nested tensor of {tensor.size(0)}: draw one of them, as in {name + '[0]'!r}"
        )
    note = f"the first of {len(found)} tensors, {write_subscripts(found[0])}" if len(found) > 1 else ""
    return Shown(name, tensor, note)


def sample_of(one: Shown, kind: str, sample: int) -> tuple[Tensor, str]:
    """Return one sample of a value with the dimensions of a kind, and which of how many it is."""
    tensor = shaped(dense(one.tensor), kind)
    samples = tensor.shape[0]
    if not -samples <= sample < samples:
        raise HooklineError(f"{one.name!r} has {count(samples, 'sample')}: sample={sample} is not among them")
    return tensor[sample], f"sample {sample % samples} of {samples}" if samples > 1 else ""


def about(many: Mapping[str, Shown]) -> str:
    """Say what values are if they are all the same, else how many."""
    what = {one.what for one in many.values()}
    return what.pop() if len(what) == 1 and any(one.tensor.dim() for one in many.values()) else count(len(many), "site")


def dense(tensor: Tensor) -> Tensor:
    """Return a tensor whose elements can be read one by one; complex ones by their size."""
    tensor = tensor.detach()
    tensor = tensor.to_dense() if tensor.layout is not torch.strided else tensor
    tensor = tensor.dequantize() if tensor.is_quantized else tensor
    return tensor.abs() if tensor.is_complex() else tensor


def numbers_of(tensor: Tensor) -> Numbers:
    """Return the elements as numbers for a scale.

    What is as large as its dtype allows stands for infinity: attention masks are made of that.
    """
    limit = torch.finfo(tensor.dtype).max / 2 if tensor.dtype.is_floating_point else float("inf")
    values = dense(tensor).to("cpu", torch.float64)
    nan, infinite = values.isnan(), values.abs() >= limit
    infinity = "Inf" if bool(values[infinite].isinf().all()) else "Inf or masked"
    told = f"{int(nan.sum()):,} NaN", f"{int(infinite.sum()):,} {infinity}"
    return Numbers(values.masked_fill(infinite, float("nan")), nan, infinite, told)


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
    told = tokens.tolist() if hasattr(tokens, "tolist") else list(tokens)
    if told and not isinstance(told[0], (str, int, float)):
        if not -len(told) <= sample < len(told):
            raise HooklineError(f"tokens= has those of {len(told)} samples, and sample={sample} is not among them")
        told = list(told[sample])
    if len(told) != count:
        raise HooklineError(f"tokens= has {len(told)} labels, but {name!r} has {count} tokens")
    return [_readable(str(token)) for token in told]


def _readable(text: str) -> str:
    plain = "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)
    return plain if len(plain) <= _LONGEST else plain[: _LONGEST - 1] + "…"
