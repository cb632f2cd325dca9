"""Which picture suits a value, told by its shape, and by its numbers where the shape is not enough."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from torch import Tensor

# What a picture shows of a value, and the names of its dimensions.
DIMENSIONS = {
    "maps": ("sample", "channel", "row", "column"),
    "attention": ("sample", "head", "query", "key"),
    "tokens": ("sample", "token", "unit"),
    "units": ("sample", "unit"),
    "line": ("unit",),
    "number": (),
}
UNIT = {"maps": 1, "tokens": 2, "units": 1, "line": 0}  # The dimension along which a layer has units.


def kind_of(tensor: Tensor) -> str:
    """Return the kind of picture for a value; of more than four dimensions, the first ones are taken together.

    >>> value = Tensor(2, 8, 5, 5).fill_(3.0)
    >>> kind_of(value), kind_of(value.softmax(-1)), kind_of(value[0, 0])
    ('maps', 'attention', 'units')
    """
    if is_attention(tensor):
        return "attention"
    return ("number", "line", "units", "tokens", "maps")[min(tensor.dim(), 4)]


def is_attention(tensor: Tensor) -> bool:
    """Whether each row of the last dimension shares out 1, as a softmax over keys does.

    Without a dimension for heads, as MultiheadAttention averages them, there must be as many queries as keys.
    """
    has_heads = tensor.dim() == 4 or (tensor.dim() == 3 and tensor.shape[-1] == tensor.shape[-2])
    if not has_heads or not tensor.is_floating_point() or tensor.shape[-1] < 2 or not tensor.numel():
        return False
    sums = tensor.detach().float().sum(-1)
    shared = (sums - 1).abs() < 0.02  # Half precision is good for two digits.
    empty = sums == 0  # A query that is all padding looks nowhere.
    return bool((shared | empty).all() and shared.any() and (tensor >= 0).all())


def shaped(tensor: Tensor, kind: str) -> Tensor:
    """Return a value with the dimensions of its kind: see `full_shape`."""
    return tensor.reshape(full_shape(tensor.shape, kind)) if DIMENSIONS[kind] else tensor


def full_shape(shape: Sequence[int], kind: str) -> tuple[int, ...]:
    """Return a shape with the dimensions of a kind: leading ones joined if too many, added if too few.

    Attention of three dimensions lacks the heads: they were averaged, or one was chosen.

    >>> full_shape((2, 3, 4, 4, 4), "maps"), full_shape((5, 6), "tokens"), full_shape((3, 7, 7), "attention")
    ((6, 4, 4, 4), (1, 5, 6), (3, 1, 7, 7))
    """
    wanted, given = len(DIMENSIONS[kind]), tuple(shape)
    if kind == "attention" and len(given) == 3:
        return (given[0], 1, *given[1:])
    joined = len(given) - wanted + 1
    return (1,) * (wanted - len(given)) + given if joined < 2 else (prod(given[:joined]), *given[joined:])
