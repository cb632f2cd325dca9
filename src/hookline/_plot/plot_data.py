"""The data of a plot, before anything is drawn: tensors with names, the numbers to draw, and the labels of an axis.

PlotOptions, NamedTensor and MaskedNumbers are the arguments of the functions that draw.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from hookline._option_checks import short_text
from hookline._sites.language import Site, write_subscripts
from hookline._tables import count
from hookline._values.nested import describe, get_part, leaf_places
from hookline.errors import HooklineError, SiteError, did_you_mean

# The kinds of values, and the names of their dimensions.
DIMENSIONS = {
    "maps": ("sample", "channel", "row", "column"),
    "attention": ("sample", "head", "query", "key"),
    "tokens": ("sample", "token", "unit"),
    "units": ("sample", "unit"),
    "line": ("unit",),
    "number": (),
}
UNIT = {"maps": 1, "tokens": 2, "units": 1, "line": 0}  # The dimension of a layer's units.
_SCALARS = (bool, int, float, complex)


class PlotOptions(NamedTuple):
    """The options of a picture except its kind: see `Plottable.plot`."""

    statistic: str = "norm"
    tokens: Any = None
    sample: int = 0
    most: int = 64
    log: bool | None = None
    title: str | None = None
    note: str = ""
    base: float | None = None
    label: str | None = None


class NamedTensor(NamedTuple):
    """A tensor to draw, the name of its site, and a note on which tensor of the value it is."""

    name: str
    tensor: Tensor
    note: str = ""

    @property
    def what(self) -> str:
        """Describe the tensor in a few words."""
        return " · ".join(filter(None, (describe(self.tensor), self.note)))


class MaskedNumbers(NamedTuple):
    """Elements as float64, with NaN in place of infinity, and masks that tell NaN and infinity apart."""

    values: Tensor
    nan: Tensor
    infinite: Tensor
    counts: tuple[str, str]  # How many elements are NaN, and how many are infinite, as text.

    def part(self, index: int) -> MaskedNumbers:
        """Return the numbers at one index of the first dimension."""
        return MaskedNumbers(self.values[index], self.nan[index], self.infinite[index], self.counts)


def is_drawable(value: Any) -> bool:
    """Return True if a value is a number or contains a tensor."""
    return isinstance(value, _SCALARS) or bool(leaf_places(value))


def tensor_to_draw(name: str, value: Any) -> NamedTensor:
    """Return the tensor of a value to draw: the first one if there are several."""
    if isinstance(value, _SCALARS):
        return NamedTensor(name, torch.tensor(value))
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
    return NamedTensor(name, tensor, note)


def sample_of(one: NamedTensor, kind: str, sample: int) -> tuple[Tensor, str]:
    """Return one sample of a value with the dimensions of a kind, and a text that says which sample it is."""
    tensor = shaped(dense(one.tensor), kind)
    samples = tensor.shape[0]
    if not -samples <= sample < samples:
        raise HooklineError(f"{one.name!r} has {count(samples, 'sample')}: sample={sample} is not among them")
    return tensor[sample], f"sample {sample % samples} of {samples}" if samples > 1 else ""


def about(many: Mapping[str, NamedTensor]) -> str:
    """Describe the values if all have the same description, otherwise say how many there are."""
    what = {one.what for one in many.values()}
    return what.pop() if len(what) == 1 and any(one.tensor.dim() for one in many.values()) else count(len(many), "site")


def dense(tensor: Tensor, complex_as_size: bool = True) -> Tensor:
    """Return a tensor of any layout as a dense one, complex numbers as their magnitudes; a nested one becomes flat."""
    tensor = tensor.detach()
    if tensor.is_nested:
        parts = [part.reshape(-1) for part in tensor.unbind()]
        tensor = torch.cat(parts) if parts else torch.zeros(0, dtype=tensor.dtype)
    tensor = tensor.to_dense() if tensor.layout is not torch.strided else tensor
    tensor = tensor.dequantize() if tensor.is_quantized else tensor
    return tensor.abs() if complex_as_size and tensor.is_complex() else tensor


def value_name(tensor: Tensor) -> str:
    """Return the label for a tensor's numbers."""
    return "size of the complex value" if tensor.is_complex() else "value"


def numbers_of(tensor: Tensor) -> MaskedNumbers:
    """Return the elements as numbers for a scale.

    Numbers near the largest of their dtype count as infinite: attention masks are made of them.
    """
    limit = torch.finfo(tensor.dtype).max / 2 if tensor.dtype.is_floating_point else float("inf")
    values = dense(tensor).to("cpu", torch.float64)
    nan, infinite = values.isnan(), values.abs() >= limit
    infinity = "Inf" if bool(values[infinite].isinf().all()) else "Inf or masked"
    counts = f"{int(nan.sum()):,} NaN", f"{int(infinite.sum()):,} {infinity}"
    return MaskedNumbers(values.masked_fill(infinite, float("nan")), nan, infinite, counts)


def kind_of(tensor: Tensor) -> str:
    """Return the kind of a value. With more than four dimensions, the first ones count as one.

    >>> value = Tensor(2, 8, 5, 5).fill_(3.0)
    >>> kind_of(value), kind_of(value.softmax(-1)), kind_of(value[0, 0])
    ('maps', 'attention', 'units')
    """
    if is_attention(tensor):
        return "attention"
    return ("number", "line", "units", "tokens", "maps")[min(tensor.dim(), 4)]


def is_attention(tensor: Tensor) -> bool:
    """Return True if the last dimension sums to 1, as after a softmax over keys.

    Without a dimension for heads (MultiheadAttention averages them), there must be as many queries as keys.
    """
    has_heads = tensor.dim() == 4 or (tensor.dim() == 3 and tensor.shape[-1] == tensor.shape[-2])
    if not has_heads or not tensor.is_floating_point() or tensor.shape[-1] < 2 or not tensor.numel():
        return False
    sums = tensor.detach().float().sum(-1)
    shared = (sums - 1).abs() < 0.02  # Half precision has two reliable digits.
    empty = sums == 0  # A query that is padding attends to nothing.
    return bool((shared | empty).all() and shared.any() and (tensor >= 0).all())


def shaped(tensor: Tensor, kind: str) -> Tensor:
    """Return a value with the dimensions of its kind: see `full_shape`."""
    return tensor.reshape(full_shape(tensor.shape, kind)) if DIMENSIONS[kind] else tensor


def full_shape(shape: Sequence[int], kind: str) -> tuple[int, ...]:
    """Return a shape with the dimensions of a kind: leading ones joined if too many, added if too few.

    Attention with three dimensions has no heads: they were averaged, or one was selected.

    >>> full_shape((2, 3, 4, 4, 4), "maps"), full_shape((5, 6), "tokens"), full_shape((3, 7, 7), "attention")
    ((6, 4, 4, 4), (1, 5, 6), (3, 1, 7, 7))
    """
    wanted, given = len(DIMENSIONS[kind]), tuple(shape)
    if kind == "attention" and len(given) == 3:
        return (given[0], 1, *given[1:])
    joined = len(given) - wanted + 1
    return (1,) * (wanted - len(given)) + given if joined < 2 else (prod(given[:joined]), *given[joined:])


# Each function takes float64 values and the dimensions to reduce.
MEASURES: dict[str, Callable[[Tensor, tuple[int, ...]], Tensor]] = {
    "norm": lambda value, dims: torch.linalg.vector_norm(value, dim=dims),
    "rms": lambda value, dims: value.square().mean(dims).sqrt(),
    "mean": lambda value, dims: value.mean(dims),
    "std": lambda value, dims: value.std(dims, unbiased=False),
    "min": lambda value, dims: value.amin(dims),
    "max": lambda value, dims: value.amax(dims),
    "abs": lambda value, dims: value.abs().mean(dims),
    "zeros": lambda value, dims: (value == 0).double().mean(dims),
    "nan": lambda value, dims: value.isnan().double().mean(dims),
    "inf": lambda value, dims: value.isinf().double().mean(dims),
}

POSITIVE = ("norm", "rms", "std", "abs")  # Statistics that suit a logarithmic scale.
_NAMES = {
    "abs": "mean of |value|",
    "std": "standard deviation",
    "zeros": "share of zeros",
    "nan": "share of NaN",
    "inf": "share of Inf",
}
FAR = 1000.0  # A signal explodes or vanishes if it grows or shrinks by this factor over depth.


def refuse_statistic(name: Any) -> None:
    """Raise for an unknown statistic."""
    if not isinstance(name, str) or name not in MEASURES:
        raise HooklineError(
            f"{short_text(name)} is not a statistic{did_you_mean(str(name), MEASURES)}; there are {', '.join(MEASURES)}"
        )


def statistic_name(name: str) -> str:
    """Return the label of a statistic on an axis."""
    return _NAMES.get(name, name)


def measure(tensor: Tensor, name: str) -> float:
    """Return a statistic of a whole value.

    >>> measure(torch.tensor([3.0, 4.0]), "norm")
    5.0
    """
    return float(_measured(tensor.reshape(-1), name, (0,)))


def by_token(tensor: Tensor, name: str) -> Tensor:
    """Return a statistic of each token of a value (sample, token, unit), as (sample, token).

    >>> by_token(torch.ones(2, 3, 4), "norm").shape
    torch.Size([2, 3])
    """
    return _measured(tensor, name, (tensor.dim() - 1,))


def dead_share(tensor: Tensor, kind: str) -> float | None:
    """Return the share of units that are zero everywhere; None if a value has no units.

    >>> dead_share(torch.tensor([[0.0, 1.0], [0.0, 0.0]]), "units")
    0.5
    """
    if kind not in UNIT or not tensor.numel():
        return None
    units = shaped(tensor, kind).movedim(UNIT[kind], 0)
    return float((units == 0).reshape(len(units), -1).all(1).double().mean())


def extremes(numbers: Sequence[float], source: Literal["first", "last"]) -> list[str]:
    """Return for each number along depth whether it has vanished or exploded, compared with the signal's source.

    The source of values is the first layer, the source of gradients the last.

    >>> extremes([1e-5, 0.1, 0.5, float("nan")], source="last")
    ['vanishing', '', '', 'not finite']
    """
    along = numbers if source == "first" else numbers[::-1]
    reference = next((number for number in along if math.isfinite(number) and number > 0), 0.0)
    return [_extreme(number, reference) for number in numbers]


def _extreme(number: float, reference: float) -> str:
    if not math.isfinite(number):
        return "not finite"
    if number * FAR < reference or number == 0:
        return "vanishing"
    return "exploding" if number > FAR * reference else ""


def _measured(tensor: Tensor, name: str, dims: tuple[int, ...]) -> Tensor:
    refuse_statistic(name)
    value = tensor.detach()
    value = (value.abs() if value.is_complex() else value).to("cpu", torch.float64)
    return MEASURES[name](value, dims) if value.numel() else value.new_full((), float("nan"))


_LONGEST = 16  # The most characters of a token's label.
_INDEX = re.compile(r"(?<!\w)(\d+)(?!\w)")  # A number between separators, as in "h.0" and "[:, 3]".
_NUMBER = re.compile(r"(\d+)")  # Any number, as in "conv1".


class Family(NamedTuple):
    """Names that differ only in numbers: the template "h.*.mlp", and for each name the numbers in place of the `*`s."""

    template: str
    members: dict[str, tuple[str, ...]]


class Depth(NamedTuple):
    """The position of each name along an axis, the labels of the positions, and the title of the axis."""

    places: dict[str, int]
    labels: list[str]
    title: str
    by_layer: bool = True

    @staticmethod
    def one_by_one(names: Sequence[str]) -> Depth:
        """Give each name its own position."""
        places = {name: place for place, name in enumerate(names)}
        return Depth(places, [name or '""' for name in names], "site, in order", by_layer=False)


def families(names: Iterable[str]) -> list[Family]:
    """Group names that differ only in numbers.

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
    """Return the positions of names along an axis of depth: by layer if they differ in one number, else one by one.

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
        kind = "call" if "#*" in title else "layer"
        return Depth({name: order.index(layer[name]) for name in names}, order, f"{kind} {title}")
    return Depth.one_by_one(names)


class Axis(NamedTuple):
    """The labels along one side of a picture, and their title."""

    labels: Sequence[str]
    title: str


def layer_labels(names: list[str]) -> Axis:
    """Return a label for each name: its layer, or the whole name if two names have the same layer."""
    values = list(along_depth(names).values())
    places = depth_of(values if len({*values}) == len(names) else names)
    if len(places.labels) < len(names):
        places = Depth.one_by_one(names)
    return Axis(places.labels, places.title)


def along_depth(names: Iterable[str]) -> dict[str, str]:
    """Return names in the order of depth, each with the name of its value: itself, or the value of a gradient.

    Gradients pass in the opposite order. If no value says where a gradient belongs, the order is reversed.

    >>> along_depth(["h.1:grad_output", "h.0:grad_output"])
    {'h.0:grad_output': 'h.0', 'h.1:grad_output': 'h.1'}
    """
    sites = {name: site_of(name) for name in names}
    values = {name: name for name, site in sites.items() if site is None or not site.is_gradient}
    gradients = {name: _value_of(site) for name, site in sites.items() if site is not None and site.is_gradient}
    known = {name: place for place, name in enumerate(values)}
    backwards = dict(reversed(gradients.items()))
    ordered = sorted(backwards.items(), key=lambda pair: known.get(pair[1], len(known)))
    return {**values, **dict(ordered)}


def is_gradient(name: str) -> bool:
    """Return True if a name is the site of a gradient."""
    site = site_of(name)
    return site is not None and site.is_gradient


def site_of(name: str) -> Site | None:
    try:
        return Site.parse(name)
    except SiteError:  # A mapping may have names that are not sites.
        return None


def _value_of(site: Site) -> str:
    return str(site._replace(port=site.port.removeprefix("grad_")))


def thinned(count: int, most: int) -> range:
    """Return the positions of the labels to show out of `count` if there is room for `most`, in round steps from 0.

    >>> thinned(12, 20), thinned(100, 12)
    (range(0, 12), range(0, 100, 10))
    """
    steps = (factor * 10**power for power in range(12) for factor in (1, 2, 5))
    return range(0, count, next(step for step in steps if count <= step * max(most, 1)))[: max(count, 1)]


POSITIONS = ("position", "query", "key")  # The names of axes along which tokens lie.


def grid_labels(name: str, labels: Sequence[int | str], tokens: Any) -> Axis:
    """Return the labels of an axis of a grid as text. `tokens` has those of all positions, or of those in the grid."""
    texts = [str(label) for label in labels]
    if tokens is None or name not in POSITIONS:
        return Axis(texts, name)
    given = token_labels(tokens, 0, None, name)
    assert given is not None
    numbers = [label for label in labels if isinstance(label, int)]
    if len(numbers) == len(labels) and all(-len(given) <= number < len(given) for number in numbers):
        return Axis([given[number] for number in numbers], "token" if name == "position" else name)
    if len(given) == len(labels):
        return Axis(given, "token" if name == "position" else name)
    raise HooklineError(f"tokens= has {len(given)} labels, but there are {len(labels)} positions, up to {texts[-1]}")


def token_labels(tokens: Any, sample: int, count: int | None, name: str) -> list[str] | None:
    """Return the labels of one sample's tokens; `tokens` has those of this sample, or of every sample.

    Raise if there are not `count`.
    """
    if tokens is None:
        return None
    given = tokens.tolist() if hasattr(tokens, "tolist") else list(tokens)
    if given and not isinstance(given[0], (str, int, float)):
        if not -len(given) <= sample < len(given):
            raise HooklineError(f"tokens= has labels of {len(given)} samples, and sample={sample} is not among them")
        given = list(given[sample])
    if count is not None and len(given) != count:
        raise HooklineError(f"tokens= has {len(given)} labels, but {name!r} has {count} tokens")
    return [_readable(str(token)) for token in given]


def _readable(text: str) -> str:
    plain = "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)
    return plain if len(plain) <= _LONGEST else plain[: _LONGEST - 1] + "…"
