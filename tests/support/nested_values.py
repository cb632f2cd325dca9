"""Nested values of every kind: drawn at random, and compared bit for bit."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, namedtuple
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

Pair = namedtuple("Pair", "left right")


@dataclasses.dataclass
class Result:
    first: Any
    second: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    first: Any


class Holder:
    """An object that is not a container, like a distribution or a key-value cache."""

    def __init__(self, inside: Any) -> None:
        self.inside = inside


def photo(value: Any) -> Any:
    """Return the types, shapes and bits of a value, as an object that can be compared."""
    if isinstance(value, Tensor):
        return (value.dtype, tuple(value.shape), value.detach().contiguous().numpy().tobytes())
    if isinstance(value, dict):
        return (type(value), [(key, photo(part)) for key, part in value.items()])
    if isinstance(value, (tuple, list)):
        return (type(value), [photo(part) for part in value])
    if isinstance(value, (Result, Frozen)):
        return (type(value), [photo(getattr(value, field.name)) for field in dataclasses.fields(value)])
    return (type(value), photo(value.inside)) if isinstance(value, Holder) else value


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    shape = draw(st.lists(st.integers(1, 3), max_size=3))
    dtype = draw(st.sampled_from([torch.float32, torch.int64, torch.bool]))
    seed = draw(st.integers(0, 2**16))
    return torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def trees() -> st.SearchStrategy[Any]:
    keys = st.text("abc.:[]\"'", min_size=1, max_size=3)
    return st.recursive(
        tensors() | st.sampled_from([None, 3, 0.5, "text"]),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
            st.dictionaries(keys, inner, max_size=3),
            st.dictionaries(keys, inner, max_size=3).map(OrderedDict),
            st.builds(Pair, inner, inner),
            st.builds(Result, inner, inner),
            st.builds(Frozen, inner),
            st.builds(Holder, inner),
        ),
        max_leaves=6,
    )
