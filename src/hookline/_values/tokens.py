"""Tokens as a subscript: `Tokens` names some tokens of a sequence, `Columns` are where they are in one value.

`Tokens` stands in a subscript in the place of the token dimension, as in `h.5[:, @3:9]`. When a value passes,
_engine/passing.py works out which of its columns hold these tokens, and puts an integer, a slice or `Columns` there.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hookline.errors import SiteError

Bounds = tuple[int | None, int | None, int | None]  # Start, stop and step.

_BOUND = r"\s*(-?\d{1,10})?\s*"
_SPAN = rf"{_BOUND}(:)?{_BOUND}(?:(:){_BOUND})?"
_NAMED = re.compile(rf"@\s*(prompt|new)(?:\s*\[{_SPAN}\])?")
_INDEXED = re.compile(rf"@(){_SPAN}")
_ROWS = re.compile(r"@\s*(\(|mask\()([\d\s,():|]*)\)")
_OPEN = (None, None, None)
_MOST_DIMENSIONS = 64


@dataclass(frozen=True)
class Tokens:
    """Tokens of a sequence: by index in the whole sequence, in the prompt or among the new tokens, or for each row."""

    part: str = ""  # "" for the whole sequence, "prompt", "new", "rows" or "mask".
    index: int | None = None  # One token.
    bounds: Bounds = _OPEN  # Else these.
    rows: tuple[tuple[int, ...], ...] = ()  # For "rows", the tokens of each row; for "mask", its columns.

    @property
    def is_one(self) -> bool:
        """Whether it names one token of each row, so that the token dimension goes."""
        return self.index is not None

    @property
    def is_latest(self) -> bool:
        """Whether it counts back from the end of a sequence that may still grow."""
        return self.part in ("", "new") and self.index is not None and self.index < 0

    @property
    def counts_back(self) -> bool:
        """Whether it counts from the end of the prompt."""
        counted = (self.index, *self.bounds[:2])
        return self.part == "prompt" and any(one is not None and one < 0 for one in counted)

    @property
    def last(self) -> int | None:
        """The index of the last token it names in its part of the sequence; None if that is not known."""
        if self.part in ("rows", "mask"):
            return max((max(row, default=-1) for row in self.rows), default=-1)
        if self.index is not None:
            return self.index if self.index >= 0 else None
        start, stop, step = self.bounds
        if stop is None or stop < 0 or (start or 0) < 0:
            return None
        return max(range(start or 0, stop, step or 1), default=-1)

    def slots_of_row(self, row: int) -> dict[int, int]:
        """Return for each token, or column of a mask, of a row its number among those named."""
        return self._slots[row]

    @cached_property
    def _slots(self) -> list[dict[int, int]]:
        return [{one: slot for slot, one in enumerate(row)} for row in self.rows]

    @cached_property
    def _hash(self) -> int:
        return hash((self.part, self.index, self.bounds, self.rows))

    def __hash__(self) -> int:  # There may be very many rows.
        return self._hash

    def wanted(self, length: int) -> range:
        """Return the tokens among the first `length` of its part of the sequence."""
        if self.index is not None:
            at = self.index + length if self.index < 0 else self.index
            return range(at, at + 1) if 0 <= at < length else range(0)
        return range(*slice(*self.bounds).indices(length))

    def __str__(self) -> str:
        if self.part == "mask":
            return f"@mask({'|'.join(map(_ranges, self.rows))})"
        if self.part == "rows":
            texts = [str(row[0]) if self.is_one else f"({', '.join(map(str, row))})" for row in self.rows]
            return f"@({', '.join(texts)})"
        inside = str(self.index) if self.index is not None else _slice_text(self.bounds)
        if not self.part:
            return f"@{inside}"
        return f"@{self.part}" if inside == ":" else f"@{self.part}[{inside}]"


def read_tokens(text: str, position: int) -> tuple[Tokens | None, int, str]:
    """Read the tokens that a text names from its `@` on. Return them, where they end, and what is wrong otherwise."""
    rows = _ROWS.match(text, position)
    if rows is not None:
        return _read_rows(rows)
    match = _NAMED.match(text, position) or _INDEXED.match(text, position)
    assert match is not None  # Every part of `_INDEXED` may be missing.
    part, start, colon, stop, _, step = match.groups()
    first, last, by = (None if bound is None else int(bound) for bound in (start, stop, step))
    if colon is None and first is None and (part == "" or "[" in match.group()):
        return None, match.end(), "'@' names tokens: '@17', '@3:9', '@prompt', '@prompt[-1]', '@new', '@new[0:8]'"
    if colon is not None and (by is not None and by < 1):
        return None, match.end(), "tokens are counted forwards, in steps of 1 or more"
    if colon is None and first is not None:
        if first < 0 and part != "prompt" and first != -1:
            return None, match.end(), _FROM_THE_END
        return Tokens(part, first), match.end(), ""
    if part != "prompt" and any(bound is not None and bound < 0 for bound in (first, last)):
        return None, match.end(), _FROM_THE_END
    if last == 0 or (last is not None and (first or 0) >= last and ((first or 0) < 0) == (last < 0)):
        return None, match.end(), "no token is in there"
    return Tokens(part, None, (first or None, last, by if by != 1 else None)), match.end(), ""


_FROM_THE_END = "a sequence may still grow, so tokens are counted from its end only in the prompt, as in '@prompt[-3:]'"


def without_rows(text: str) -> str:
    """Return a text without the tokens of each row in it."""
    return _ROWS.sub("", text)


def _read_rows(match: re.Match[str]) -> tuple[Tokens | None, int, str]:
    inside = match.group(2).strip()
    problem = None, match.end(), "tokens of each row are written '@(3, 5)' or '@((3, 4), (5, 6))', in their order"
    if match.group(1) == "mask(":
        try:
            return Tokens("mask", rows=tuple(map(_columns, inside.split("|")))), match.end(), ""
        except ValueError:
            return None, match.end(), "a mask is written '@mask(0:3,5|2:4)', a list of columns for each row"
    several = re.findall(r"\(([\d\s,]*)\)", inside)
    try:
        rows = [[int(one) for one in map(str.strip, row.split(",")) if one] for row in several or inside.split(",")]
    except ValueError:
        return problem
    if re.sub(r"[\d\s,]" if not several else r"\([\d\s,]*\)|[\s,]", "", inside) or len(set(map(len, rows))) != 1:
        return problem
    if not rows[0] or any(sorted(set(row)) != row for row in rows):
        return problem
    return Tokens("rows", None if several else 0, rows=tuple(map(tuple, rows))), match.end(), ""


def _ranges(columns: tuple[int, ...]) -> str:
    """Return the text of a row of a mask: "0:3,5"."""
    texts: list[str] = []
    at = 0
    while at < len(columns):
        end = at
        while end + 1 < len(columns) and columns[end + 1] == columns[end] + 1:
            end += 1
        texts.append(str(columns[at]) if end == at else f"{columns[at]}:{columns[end] + 1}")
        at = end + 1
    return ",".join(texts)


def _columns(text: str) -> tuple[int, ...]:
    found: set[int] = set()
    for one in text.split(","):
        start, colon, stop = map(str.strip, one.strip().partition(":"))
        if start or colon:
            if colon and int(stop) > 1 << 24:
                raise ValueError
            found.update(range(int(start), int(stop)) if colon else [int(start)])
    return tuple(sorted(found))


def _slice_text(bounds: Bounds) -> str:
    start, stop, step = ("" if bound is None else str(bound) for bound in bounds)
    return f"{start}:{stop}" + (f":{step}" if step else "")


def tokens(positions: Any, dim: int = 1) -> str:
    """Return the subscript that names tokens for each row of a batch, as the second part of a pair.

    >>> tokens([3, 5])
    '[:, @(3, 5)]'
    >>> import hookline as hl
    >>> model = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Linear(4, 4))
    >>> _, acts = hl.run(model, torch.zeros(2, 6, dtype=torch.long), capture=("1", tokens([3, 5])))
    >>> acts["1[:, @(3, 5)]"].shape
    torch.Size([2, 4])

    Args:
        positions: Integers of shape (batch,) or (batch, k): indices that count real tokens, as in `@17`. Or a boolean
            mask of shape (batch, columns), with a column for each token, padding included.
        dim: The dimension of the value that counts tokens.
    """
    if type(dim) is not int or not 0 <= dim < _MOST_DIMENSIONS:
        raise SiteError(f"dim={str(dim)[:40]} is not a dimension of a value")
    try:
        named = torch.as_tensor(positions)
    except (RuntimeError, TypeError, ValueError):
        raise SiteError(
            f"{str(positions)[:40]} are no positions of tokens; give integers, equally many for each row, or a mask"
        ) from None
    return f"[{':, ' * dim}{_for_each_row(named)}]"


def _for_each_row(positions: Tensor) -> Tokens:
    if positions.dtype is torch.bool:
        if positions.dim() != 2:
            raise SiteError(f"a mask of tokens has the shape (batch, tokens), not {tuple(positions.shape)}")
        return Tokens("mask", rows=tuple(tuple(row.nonzero().flatten().tolist()) for row in positions))
    is_whole = not (positions.is_floating_point() or positions.is_complex())
    if not is_whole or positions.dim() not in (1, 2) or not positions.numel():
        found = f"{str(positions.dtype).removeprefix('torch.')} {tuple(positions.shape)}"
        raise SiteError(f"tokens are integers of shape (batch,) or (batch, k), or a mask (batch, tokens), not {found}")
    if bool((positions < 0).any()):
        raise SiteError(
            "tokens of each row are counted from the first one, 0; '@prompt[-1]' is the last of each prompt"
        )
    rows = positions.tolist()
    if positions.dim() == 1:
        return Tokens("rows", 0, rows=tuple((row,) for row in rows))
    if any(sorted(set(row)) != row for row in rows):
        raise SiteError("the tokens of a row are named once each, in their order")
    return Tokens("rows", rows=tuple(map(tuple, rows)))


def find_tokens(subscript: Any) -> int | None:
    """Return the position of the `Tokens` among the items of a subscript; None if there are none."""
    items = subscript if isinstance(subscript, tuple) else (subscript,)
    for at, item in enumerate(items):
        if isinstance(item, Tokens):
            return at
    return None


def tokens_in(subscripts: tuple[Any, ...]) -> Tokens | None:
    """Return the tokens that subscripts name, or None."""
    for one in subscripts:
        at = find_tokens(one)
        if at is not None:
            found: Tokens = one[at] if isinstance(one, tuple) else one
            return found
    return None


class Columns:
    """Where some tokens are in one value: for each of some rows, the columns of the token dimension."""

    def __init__(self, rows: Sequence[int] | None, columns: Tensor, is_one: bool) -> None:
        self.rows = rows  # None for all rows.
        self.columns = columns  # Of shape (row, token).
        self.is_one = is_one


class Chosen(NamedTuple):
    """The part of a value that holds tokens of a site: what to put into the subscript, and which tokens these are."""

    item: int | slice | Columns
    rows: tuple[int, ...] | None = None  # The rows of the batch that have them; None for all.
    # Which of the tokens that the site names these are, from 0: the same for all rows, or for each row.
    slots: range | tuple[tuple[int, ...], ...] = range(1)
    batch: int = 0  # How many rows there are, if some may not have them.


def find_columns(subscript: Any) -> int | None:
    """Return the position of the `Columns` among the items of a subscript; None if there are none."""
    items = subscript if isinstance(subscript, tuple) else (subscript,)
    return next((at for at, item in enumerate(items) if isinstance(item, Columns)), None)


def take_columns(tensor: Tensor, subscript: tuple[Any, ...], at: int) -> Tensor:
    """Return the part of a tensor at a subscript whose item `at` is `Columns`. The first dimension counts rows."""
    held, base, dim = _prepare(tensor, subscript, at)
    if held.rows is not None:
        base = base[list(held.rows)]
    part = base.take_along_dim(_spread(held.columns, base, dim), dim)
    return part.squeeze(dim) if held.is_one else part


def put_columns(tensor: Tensor, subscript: tuple[Any, ...], at: int, new: Any) -> None:
    """Write into the part of a tensor at a subscript whose item `at` is `Columns`."""
    held, base, dim = _prepare(tensor, subscript, at)
    own = base if held.rows is None else base[list(held.rows)]
    index = _spread(held.columns, own, dim)
    given = new if isinstance(new, Tensor) else torch.as_tensor(new, dtype=tensor.dtype, device=tensor.device)
    if held.is_one and given.dim() >= own.dim() - dim:
        given = given.unsqueeze(given.dim() - (own.dim() - dim - 1))
    written = own.scatter(dim, index, given.expand(index.shape))
    base[... if held.rows is None else list(held.rows)] = written


def _prepare(tensor: Tensor, subscript: tuple[Any, ...], at: int) -> tuple[Columns, Tensor, int]:
    """Return the `Columns`, a view with all other items applied, and the dimension of the view that counts tokens."""
    before, after = subscript[:at], subscript[at + 1 :]
    whole = *before, slice(None), *after
    base = tensor[whole]
    dim = token_dim(tensor, subscript, at) - sum(isinstance(item, int) for item in before)
    return subscript[at], base, dim + before.count(None)


def token_dim(tensor: Tensor, subscript: tuple[Any, ...], at: int) -> int:
    """Return the dimension of a tensor that the item `at` of a subscript is for."""
    before = [item for item in subscript[:at] if item is not None]
    if Ellipsis not in before:
        return len(before)
    after = [item for item in subscript[at:] if item is not None]
    return tensor.dim() - len(after)


def _spread(columns: Tensor, base: Tensor, dim: int) -> Tensor:
    """Return columns (row, token) as an index into a tensor whose dimension 0 counts rows and `dim` counts tokens."""
    shape = [1] * base.dim()
    shape[0], shape[dim] = columns.shape
    target = list(base.shape)
    target[dim] = columns.shape[1]
    return columns.to(base.device).view(shape).expand(target)
