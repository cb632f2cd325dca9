"""Values at tokens, which pass piece by piece: put together when they are read, and cut up when they are patched.

A site such as `h.5[:, @3:9]` has one value for each sequence, though a cache lets the model see a few tokens a call.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hookline._cache.record import Record, StoredValue, read_value
from hookline._sites.language import Site
from hookline._values.nested import describe
from hookline._values.tokens import Chosen, Tokens, tokens_in
from hookline.errors import EditError, HooklineError


class Piece(NamedTuple):
    """The tokens of one call."""

    value: Any  # A tensor, or a `StoredValue` that holds one.
    rows: tuple[int, ...] | None  # The rows that have them; None for all.
    slots: range | tuple[tuple[int, ...], ...]  # Which of the named tokens they are.
    batch: int = 0  # How many rows there are, if some may not have them.


class Pieces(StoredValue):
    """The tokens of one sequence that a site names."""

    __slots__ = ("dim", "pieces", "sequence", "tokens")

    def __init__(self, sequence: Any, tokens: Tokens, dim: int, pieces: list[Piece]) -> None:
        self.sequence = sequence  # Identifies the sequence.
        self.tokens = tokens
        self.dim = dim  # The dimension that counts the tokens.
        self.pieces = pieces

    def add(self, piece: Piece) -> None:
        """Add the tokens of another call. Where a token comes again, as without a cache, its last value stays."""
        last = self.pieces[-1]
        is_next = last.rows is piece.rows is None and _last_slot(last) < _first_slot(piece)
        left = self.pieces if is_next else [one for one in self.pieces if not _covers(piece, one)]
        left.append(piece)
        self.pieces = left

    def kept(self) -> Pieces:
        """Return these pieces without those that will come."""
        return Pieces(None, self.tokens, self.dim, [*self.pieces])

    def read(self, site: Site) -> Any:
        """Return one tensor with the tokens of all calls."""
        values = [read_value(piece.value, site) for piece in self.pieces]
        if self.tokens.part == "mask":
            _check_alike(values, site, self.dim)
            return self._by_rows(values, site)
        if len(values) == 1 and self.pieces[0].rows is None:
            return values[0]
        _check_alike(values, site, None if self.tokens.is_one else self.dim)
        return torch.cat(values, self.dim) if self._are_in_order() else self._by_rows(values, site)

    def _are_in_order(self) -> bool:
        """Return True if every piece has all rows, and each goes on where the one before it ended."""
        if self.tokens.is_one or not all(type(piece.slots) is range and piece.rows is None for piece in self.pieces):
            return False
        spans: list[Any] = [piece.slots for piece in self.pieces]
        return all(one.stop <= other.start for one, other in itertools.pairwise(spans))

    def _by_rows(self, values: list[Tensor], site: Site) -> Tensor:
        """Put the tokens together row by row."""
        found: dict[int, dict[int, Tensor]] = {}
        for value, piece in zip(values, self.pieces, strict=True):
            rows = piece.rows if piece.rows is not None else range(len(value))
            for number, row in enumerate(rows):
                slots = piece.slots if isinstance(piece.slots, range) else piece.slots[number]
                own = value[number].unsqueeze(self.dim - 1) if self.tokens.is_one else value[number]
                parts = own.unbind(self.dim - 1)
                found.setdefault(row, {}).update(zip(slots, parts, strict=True))
        each = [[one for _, one in sorted(found[row].items())] for row in sorted(found)]
        if self.tokens.part == "mask":
            return torch.stack([one for row in each for one in row])
        counts = [len(found.get(row, {})) for row in range(self._count_rows())]
        if len(set(counts)) > 1:
            raise HooklineError(
                f"'{site}': the rows have {', '.join(map(str, counts[:8]))}{', …' if counts[8:] else ''} of these "
                "tokens, which make no tensor; capture the whole value with keep='all' and read cache.tokens(site), or "
                "name tokens that every row has, as in '@prompt[-1]'"
            )
        if self.tokens.is_one:
            return torch.stack([row[-1] for row in each])
        return torch.stack([torch.stack(row, self.dim - 1) for row in each])

    def _count_rows(self) -> int:
        """Return how many rows the batch has, as far as its tokens show."""
        whole = [len(self.peek_one(piece)) for piece in self.pieces if piece.rows is None]
        return max([piece.batch for piece in self.pieces] + whole)

    def peek_one(self, piece: Piece) -> Any:
        """Return the value of one piece, unchecked."""
        return piece.value.peek() if isinstance(piece.value, StoredValue) else piece.value

    def peek(self) -> Any:
        """Return the value for a description; the pieces if they make no tensor."""
        pieces = [one._replace(value=self.peek_one(one)) for one in self.pieces]
        try:
            return Pieces(None, self.tokens, self.dim, pieces).read(Site(""))
        except HooklineError:
            return [piece.value for piece in pieces]

    def __reduce__(self) -> tuple[Any, ...]:
        pieces = [one._replace(value=read_value(one.value, Site(""))) for one in self.pieces]
        return Pieces, (None, self.tokens, self.dim, pieces)


def _first_slot(piece: Piece) -> int:
    return piece.slots[0] if isinstance(piece.slots, range) else min(row[0] for row in piece.slots)


def _last_slot(piece: Piece) -> int:
    return piece.slots[-1] if isinstance(piece.slots, range) else max(row[-1] for row in piece.slots)


def _check_alike(values: list[Tensor], site: Site, dim: int | None) -> None:
    """Raise if the tokens of several calls have different sizes, apart from the dimension that counts them."""
    shapes = [[size for at, size in enumerate(value.shape) if at and at != dim] for value in values]
    if any(shape != shapes[0] for shape in shapes):
        found = " and ".join(str(tuple(value.shape)) for value in (values[0], values[-1]))
        raise HooklineError(
            f"'{site}' has the shapes {found} in two calls, which don't join; if another dimension counts keys, name "
            "those too, as in '[:, :, @new, :4]'"
        )


def _covers(piece: Piece, other: Piece) -> bool:
    """Return True if a piece has every token of another."""
    if piece.rows != other.rows or type(piece.slots) is not type(other.slots):
        return False
    each: list[Any] = [piece.slots, other.slots]
    if isinstance(piece.slots, range):
        return bool(each[0][0] <= each[1][0] and each[1][-1] <= each[0][-1])
    return all(set(own) >= set(others) for own, others in zip(*each, strict=True))


def put_tokens(
    record: Record, value: Any, chosen: Chosen, tokens: Tokens, dim: int, passing: Any, stamp: int, forward: int
) -> None:
    """Keep the tokens of one call: beside those of the same sequence, or as the first of another."""
    piece = Piece(value, chosen.rows, chosen.slots, chosen.batch)
    sequence = None if passing is None or passing.owner is None else (passing.owner, passing.sequence)
    before = record.value
    if sequence is None or not isinstance(before, Pieces) or before.sequence != sequence or record.reason:
        record.put(Pieces(sequence, tokens, dim, [piece]), stamp, forward)
        record.repeated = False
        return
    before.add(piece)
    record.seen = forward


def given_tokens(given: Tensor, part: Tensor, tokens: Tokens, chosen: Chosen, dim: int) -> Tensor:
    """Return what a patch gives to the tokens that pass in one call, out of its value for all tokens that are named."""
    rows = chosen.rows
    if tokens.part == "mask" and given.dim() == part.dim() - 1 and isinstance(chosen.slots, tuple):
        starts = [sum(map(len, tokens.rows[:row])) for row in range(len(tokens.rows))]
        if len(given) == starts[-1] + len(tokens.rows[-1]):
            members = rows if rows is not None else range(len(chosen.slots))
            flat = [[starts[row] + slot for slot in slots] for row, slots in zip(members, chosen.slots, strict=True)]
            return given[torch.tensor(flat, device=given.device)].movedim(1, dim)
    if rows is not None and given.dim() == part.dim() and len(given) > 1:
        given = given[list(rows)]
    at = dim - (part.dim() - given.dim())
    if tokens.is_one or at < 0 or given.shape[at] == 1:
        return given
    last = chosen.slots[-1] if isinstance(chosen.slots, range) else max(map(max, chosen.slots))
    named = len(tokens.rows[0]) if tokens.part == "rows" else None
    if tokens.part == "" and tokens.last is not None:
        named = len(tokens.wanted(tokens.last + 1))
    if last >= given.shape[at] or (named is not None and given.shape[at] > named):
        passing = f"{named} are named" if named is not None else f"at least {last + 1} pass"
        raise EditError(f"the value is for {given.shape[at]} tokens, and {passing}")
    if isinstance(chosen.slots, range):
        return given.narrow(at, chosen.slots.start, len(chosen.slots))
    index = torch.tensor(chosen.slots, device=given.device)
    if at == 0 or given.dim() < part.dim():
        given = given.expand(len(index), *given.shape) if given.dim() < part.dim() else given
        at = dim
    shape = [1] * given.dim()
    shape[0], shape[at] = index.shape
    return given.expand(len(index), *given.shape[1:]).take_along_dim(index.view(shape), at)


def join_calls(values: list[Any], passed: list[Any], site: Site, dim: int, sequence: int) -> Tensor:
    """Return the calls of a site as one tensor, with each token of one sequence once.

    Args:
        passed: For each call the tokens that passed in its forward of the model: a `Passing`, or None.
        sequence: Which sequence, as an index of those that the calls belong to.
    """
    if len(values) == 1 and passed == [None] and isinstance(values[0], Tensor):
        return values[0]  # An encoder runs once, before the first forward of the model.
    if any(one is None or one.width is None for one in passed):
        raise HooklineError(
            f"'{site}': the model was not given its tokens in a way that tells which they are; hl.tell_tokens does"
        )
    sequences = list(dict.fromkeys((one.owner, one.sequence) for one in passed))
    if not -len(sequences) <= sequence < len(sequences):
        raise HooklineError(f"'{site}' has values of {len(sequences)} sequences, and there is no number {sequence}")
    chosen = sequences[sequence]
    calls = [(one, value) for one, value in zip(passed, values, strict=True) if (one.owner, one.sequence) == chosen]
    found: dict[int, Tensor] = {}
    for number, (one, value) in enumerate(calls):
        if any(one is other for other, _ in calls[:number]):
            raise HooklineError(
                f"'{site}' passes several times in one forward, or threads ran at the same time, so its calls are no "
                "sequence of tokens"
            )
        _check_call(site, one, value, dim)
        skipped = one.width - value.shape[dim]
        found.update({one.first + skipped + at: part for at, part in enumerate(value.split(1, dim))})
    first, last = min(found), max(found)
    begins_early = calls[0][1].shape[dim] == calls[0][0].width  # Else the head gets only the last tokens.
    if len(found) != last - first + 1 or (first and begins_early):
        raise HooklineError(
            f"'{site}': of {last + 1} tokens only {len(found)} were kept; capture all calls of a sequence, with "
            "keep='all'"
        )
    if len({one.rows for one, _ in calls}) > 1:
        raise HooklineError(f"'{site}': the number of rows changed, so it is unknown which row is which")
    if calls[0][0].beams > 1:
        raise HooklineError(
            f"'{site}': beam search goes on from other rows at each step, so the calls of a row are no sequence; run "
            "the model once more on the ids that it returned"
        )
    return torch.cat([found[column] for column in sorted(found)], dim)


def _check_call(site: Site, passing: Any, value: Any, dim: int) -> None:
    if passing.reason:
        raise HooklineError(f"'{site}': {passing.reason}")
    if "@" in site.index and tokens_in(site.subscripts) is not None:
        raise HooklineError(
            f"'{site}' is put together already: read it as cache['{site}'], or capture the whole value for tokens"
        )
    if not isinstance(value, Tensor) or value.dim() <= dim or value.shape[dim] not in (passing.width, passing.kept):
        raise HooklineError(
            f"'{site}' is {describe(value)}, and {passing.width} tokens passed in this forward; name the part whose "
            f"dimension {dim} counts tokens, or another dim="
        )
