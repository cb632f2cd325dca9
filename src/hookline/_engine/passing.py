"""The tokens that pass in one forward of a model, and the columns of a value that hold the tokens of a site."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hookline._engine.generate_call import encoder_mask, is_in_encoder, refuse_part_of_model
from hookline._engine.padding import Padding
from hookline._values.nested import describe, get_part, split
from hookline._values.tokens import Chosen, Columns, Tokens, find_tokens, token_dim
from hookline.errors import HooklineError, SiteError

_ALL = (slice(None), Ellipsis)  # Subscripts that leave nothing out.
Indices = list[list[int]]  # For each row and column the index of the token, -1 for padding.


class RowsOfTokens(NamedTuple):
    """The tokens of each row."""

    indices: Indices
    counts: list[int]  # The tokens of each row that have passed by the end of this forward.
    prompts: list[int] | None  # The tokens of the prompt in each row; None if it is not known where the prompt ends.


@dataclass(eq=False)
class Passing:
    """The tokens that pass in one forward of a model."""

    sequence: int  # The number of the sequence.
    step: int  # Forwards since the sequence began.
    first: int  # The columns that passed before.
    width: int | None  # The columns that pass now; None if the arguments don't tell.
    rows: int = 0
    prompt: int | None = None  # The columns of the prompt.
    padding: Padding | None = None
    reason: str = ""  # Why tokens can't be named, or "".
    prompt_reason: str = ""  # Why the prompt is not known, or "".
    kept: int = 0  # How many of the last tokens the head gets; 0 for all.
    beams: int = 1  # How many continuations of each row pass side by side.
    is_certain: bool = True  # Whether an argument with a usual name told how many tokens pass.
    encoder: Passing | None = None  # In an encoder-decoder model: the tokens of the encoder.
    owner: Any = None  # The `Sequence` that this belongs to.
    told: RowsOfTokens | None = None  # What the user's function told.
    _counted: set[Any] | None = None  # The places where a value had as many columns as tokens pass.
    _rows: RowsOfTokens | None = None
    _chosen: dict[tuple[Tokens, int, int], list[Chosen]] | None = None  # What was chosen in this forward.

    def check_size(self, place: Any, size: int) -> None:
        """Raise if a place has as many columns as tokens pass, and another number later in the same forward."""
        if self._counted is None:
            self._counted = set()
        if size == self.width:
            self._counted.add(place)
        elif place in self._counted:
            raise HooklineError(
                f"{self.width} columns pass here and later {size}, in one forward of the hooked model: it runs a "
                "sequence of its own; add the hooks to the part that is called for each piece"
            )

    def choose(self, tokens: Tokens, size: int, rows: int) -> list[Chosen]:
        """Return the columns of a value that hold these tokens.

        Args:
            size: The size of the value's token dimension.
            rows: The size of its first dimension.
        """
        key = tokens, size, rows
        if self._chosen is None:
            self._chosen = {}
        if key not in self._chosen:
            self._chosen[key] = self._choose(tokens, size, rows)
        return self._chosen[key]

    def _choose(self, tokens: Tokens, size: int, rows: int) -> list[Chosen]:
        if self.reason:
            raise HooklineError(self.reason)
        if self.width is None or (size != self.width and not self.is_certain):
            return _of_whole_value(tokens, size, rows)
        if size not in (self.width, self.kept):
            raise SiteError(
                f"'{tokens}' stands at a dimension of size {size}, and {self.width} tokens pass in this forward; put "
                "it in the place of the dimension that counts them"
            )
        if tokens.part in ("prompt", "new") and (self.prompt_reason or self.prompt is None):
            raise HooklineError(self.prompt_reason or "it is unknown where the prompt of this sequence ends")
        skipped = self.width - size
        if tokens.part == "prompt" and self.told is None and self.first + skipped >= (self.prompt or 0):
            return []
        known = None if tokens.part == "new" and self._has_no_padding_in_new() else self.rows_of_tokens()
        if known is None and not tokens.rows:
            return _of_equal_rows(tokens, self.first + skipped, size, self.prompt)
        indices = [[*range(self.first, self.first + self.width)]] * rows if known is None else known.indices
        prompts = None if known is None else known.prompts
        if len(indices) == 1:  # The rows of the value were made of one, as for heads.
            indices, prompts = indices * rows, prompts and prompts * rows
        if len(indices) != rows:
            raise HooklineError(f"{rows} rows pass here, and the mask of the model has {len(indices)}")
        if prompts is None:
            prompts = [self.first + self.width if self.prompt is None else self.prompt] * rows
        return _of_each_row(tokens, [row[skipped:] for row in indices], prompts, self.first + skipped)

    def cut_off(self, tokens: Tokens, size: int, rows: int) -> bool:
        """Return True if the head does not get some of these tokens, which pass in this forward."""
        if self.width is None or size != self.kept:
            return False
        here, all_of_them = self.choose(tokens, size, rows), self.choose(tokens, self.width, rows)
        return sum(map(_count, here)) < sum(map(_count, all_of_them))

    def rows_of_tokens(self) -> RowsOfTokens | None:
        """Return the tokens of each row; None if there is no padding, so that they are columns."""
        if self.told is not None or self.padding is None or self.width is None:
            return self.told
        if self._rows is None:
            self._rows = _rows_of(self.padding, self.first, self.width, self.rows, self.prompt)
        return self._rows or None

    def _has_no_padding_in_new(self) -> bool:
        """Return True if no padding follows the prompt, so that each row has its new tokens in the same columns."""
        if self.told is not None or self.padding is None:
            return False
        self.padding.read()
        return self.prompt is not None and self.prompt >= self.padding.known

    def forget_rows(self) -> None:
        """Forget what was worked out of the tokens of each row, of which there may be very many."""
        self._rows = self._chosen = None

    def note_end_of_prompt(self) -> None:
        """Note that tokens were counted from the end of the prompt, which must not go on then."""
        if self.owner is not None:
            self.owner.prompt_end_used = self.first + (self.width or 0)

    def has_passed(self, tokens: Tokens) -> bool:
        """Return True if no later call can carry any of these tokens."""
        last, length = tokens.last, self.first + (self.width or 0)
        if tokens.part == "mask":
            return last is not None and length > last
        if tokens.part == "prompt" and (last is None or (self.prompt is not None and length > self.prompt)):
            return self.prompt is None or length >= self.prompt
        if last is None:
            return False
        known = self.rows_of_tokens()
        counts = [length] * max(1, len(tokens.rows)) if known is None else known.counts
        before = [0] * len(counts)
        if tokens.part == "new":
            before = (known.prompts if known is not None else None) or [self.prompt or 0] * len(counts)
        lasts = [row[-1] for row in tokens.rows] or [last] * len(counts)
        return all(count - old > one for count, old, one in zip(counts, before, lasts, strict=False))

    def table(self) -> Indices | None:
        """Return the index of each token, for each row; None if it is unknown."""
        if self.width is None or self.reason:
            return None
        known = self.rows_of_tokens()
        if known is not None:
            return known.indices
        return [[*range(self.first, self.first + self.width)]] * (self.rows or 1)

    def describe(self) -> str:
        """Say how many tokens have passed."""
        if self.width is None:
            return "its arguments don't tell which tokens it was given"
        total = self.first + self.width
        known = self.prompt is not None and not self.prompt_reason
        of_prompt = f", {min(self.prompt or 0, total)} of them the prompt" if known else ""
        others = ""
        if self.sequence and not self.first:
            begun = f"{self.sequence + 1} sequences began, as far as the model's arguments tell"
            others = f"; {begun}: hl.tell_tokens(model, function) tells more"
        return f"{total} tokens had passed{of_prompt}{others}"


def passing_of_encoder(mask: Any) -> Passing:
    """Return the tokens of an encoder, which all pass at once."""
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return Passing(0, 0, 0, None)
    rows, width = mask.shape
    padding = Padding(rows)
    padding.note(mask, None, 0, width, rows)
    return Passing(0, 0, 0, width, rows, prompt=width, padding=padding)


def choose(
    value: Any,
    subscripts: tuple[Any, ...],
    passing: Passing | None,
    module: nn.Module,
    model: nn.Module | None,
    place: Any = None,
) -> Iterator[tuple[tuple[Any, ...], Chosen, int, bool]]:
    """Yield subscripts with the columns of tokens that pass, which tokens they are, and their dimension in the part.

    The last item is True if some of the tokens that pass are not in this value.

    Args:
        place: Identifies the place in the model.
    """
    held, rest = split(value, subscripts)
    number, at = next((number, at) for number, one in enumerate(rest) if (at := find_tokens(one)) is not None)
    base = get_part(held, rest[:number]) if number else held
    items = rest[number] if isinstance(rest[number], tuple) else (rest[number],)
    dim = token_dim(base, items, at) if isinstance(base, Tensor) else 0
    if not isinstance(base, Tensor):
        get_part(base, (rest[number],))  # Raises with a hint.
    if not isinstance(base, Tensor) or dim >= base.dim():
        raise SiteError(f"{describe(base)} passes here, which has no dimension {dim} for tokens")
    tokens: Tokens = items[at]
    size, rows = int(base.shape[dim]), int(base.shape[0]) if dim else 1
    before, after = items[:at], items[at + 1 :]
    passing = _passing_at(passing, module, model, size)
    passing.check_size(place, size)
    found = passing.choose(tokens, size, rows)
    is_cut = size != passing.width and passing.cut_off(tokens, size, rows)
    for chosen in found:
        if isinstance(chosen.item, Columns) and (not before or before[0] not in _ALL):
            raise SiteError(
                f"'{tokens}': the rows have these tokens in different columns, so the first subscript is ':' or '...'"
            )
        numbers = len([item for item in before if isinstance(item, int)])
        part_dim = dim - numbers if Ellipsis in before else len(before) - numbers
        where = subscripts[: len(subscripts) - len(rest)] + rest[:number]
        is_all = chosen.item == slice(0, size, 1) and all(one in _ALL for one in (*before, *after))
        if not is_all or rest[number + 1 :]:
            where = *where, (*before, chosen.item, *after), *rest[number + 1 :]
        yield where, chosen, part_dim, is_cut


def _passing_at(passing: Passing | None, module: nn.Module, model: nn.Module | None, size: int) -> Passing:
    """Return the tokens that pass at a module, given those that pass in the forward of its model."""
    if model is None or (passing is not None and passing.encoder is None):
        return passing or Passing(0, 0, 0, None)
    if is_in_encoder(model, module):
        found = None if passing is None else passing.encoder
        return found or passing_of_encoder(encoder_mask(model, size))
    if passing is None:
        refuse_part_of_model(model)
        raise AssertionError
    return passing


def _count(chosen: Chosen) -> int:
    return len(chosen.slots) if isinstance(chosen.slots, range) else sum(map(len, chosen.slots))


def _rows_of(padding: Padding, first: int, width: int, rows: int, prompt: int | None) -> RowsOfTokens | None:
    real = padding.read()
    if real is None:
        return None
    if len(real) != rows:
        raise HooklineError(f"the mask has {len(real)} rows and {rows} pass here: it is unknown which ended")
    known, end = real.shape[1], first + width
    counted = real.long().cumsum(1) if first < known else None
    totals = padding.totals()
    here: Indices = [[] for _ in totals]
    if counted is not None:
        here = torch.where(real, counted - 1, -1)[:, first:end].tolist()
    later = range(max(first, known) - known, max(end, known) - known)
    indices = [[*row, *range(total + later.start, total + later.stop)] for row, total in zip(here, totals, strict=True)]
    counts = [total + end - known for total in totals] if end >= known else real[:, :end].sum(1).tolist()
    if prompt is None:
        return RowsOfTokens(indices, counts, None)
    prompts = [total + prompt - known for total in totals] if prompt >= known else real[:, :prompt].sum(1).tolist()
    return RowsOfTokens(indices, counts, prompts)


def _of_whole_value(tokens: Tokens, size: int, rows: int) -> list[Chosen]:
    """Return the columns where nothing is known but the value: it counts as one prompt."""
    if tokens.rows:
        return _of_each_row(tokens, [[*range(size)]] * rows, [size] * rows, 0)
    return _of_equal_rows(tokens, 0, size, size)


def _of_equal_rows(tokens: Tokens, first: int, size: int, prompt: int | None) -> list[Chosen]:
    """Return the columns where no row has padding: they are counted, not looked up."""
    total = first + size
    end = total if prompt is None else prompt
    offset, length = 0, total
    if tokens.part == "prompt":
        length = end
    elif tokens.part == "new":
        offset, length = end, max(0, total - end)
    wanted = tokens.wanted(length)
    here = _overlap(wanted, first - offset, total - offset)
    if not here:
        return []
    start = wanted.index(here[0])
    begin = here[0] + offset - first
    item = begin if tokens.is_one else slice(begin, begin + here[-1] - here[0] + 1, here.step)
    return [Chosen(item, None, range(start, start + len(here)))]


def _overlap(wanted: range, start: int, stop: int) -> range:
    """Return the numbers of a range that are from `start` on and below `stop`."""
    skipped = max(0, -((wanted.start - start) // wanted.step)) if wanted.start < start else 0
    return range(wanted.start + skipped * wanted.step, min(wanted.stop, stop), wanted.step)


def _of_each_row(tokens: Tokens, indices: Indices, prompts: list[int], first: int) -> list[Chosen]:
    """Return the columns where rows differ: groups of rows that have equally many of the tokens here.

    Args:
        prompts: The tokens of the prompt in each row.
        first: The column of the sequence that the first column here is.
    """
    rows = len(indices)
    if tokens.rows and len(tokens.rows) != rows:
        raise SiteError(f"'{tokens}' names the tokens of {len(tokens.rows)} rows, and {rows} pass here")
    found = [_of_row(tokens, row, own, prompts[row], first) for row, own in enumerate(indices)]
    groups: dict[int, list[int]] = {}
    for row, one in enumerate(found):
        if one:
            groups.setdefault(len(one), []).append(row)
    chosen = []
    for members in groups.values():
        some = None if len(members) == rows else tuple(members)
        columns = [[column for column, _ in found[row]] for row in members]
        slots = tuple(tuple(slot for _, slot in found[row]) for row in members)
        item: int | slice | Columns | None = _evenly(columns, tokens.is_one) if some is None else None
        if item is None:
            item = Columns(some, torch.tensor(columns), tokens.is_one)
        chosen.append(Chosen(item, some, slots, rows))
    return chosen


def _evenly(columns: Indices, is_one: bool) -> int | slice | None:
    """Return an integer or slice for columns that are the same in each row; None if they are not."""
    own = columns[0]
    step = own[1] - own[0] if len(own) > 1 else 1
    if own != [*range(own[0], own[-1] + 1, step)] or any(one != own for one in columns):
        return None
    return own[0] if is_one else slice(own[0], own[-1] + 1, step)


def _of_row(tokens: Tokens, row: int, indices: list[int], prompt: int, first: int) -> list[tuple[int, int]]:
    """Return the columns of one row that hold these tokens, each with its number among the tokens."""
    if tokens.part == "mask":
        slots = tokens.slots_of_row(row)
        return [(at, slots[at + first]) for at in range(len(indices)) if at + first in slots]
    if tokens.part == "rows":
        slots = tokens.slots_of_row(row)
        return [(at, slots[index]) for at, index in enumerate(indices) if index in slots]
    total = max(indices, default=-1) + 1
    offset = prompt if tokens.part == "new" else 0
    length = prompt if tokens.part == "prompt" else max(0, total - offset)
    wanted = tokens.wanted(length)
    return [
        (at, wanted.index(index - offset))
        for at, index in enumerate(indices)
        if index >= 0 and index - offset in wanted
    ]
