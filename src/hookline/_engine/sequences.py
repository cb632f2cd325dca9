"""Token sequences: which tokens pass in a forward of a model, known from what the model is called with.

`begin` is called before each forward of a model whose hooks name tokens, look at the call, or keep several calls. A
`Sequence` counts what passes; a `Passing` (passing.py) says which tokens pass in one forward. Padding (padding.py) is
read only when somebody asks for tokens.

How many columns passed before a forward is told by the first of these:

| | for |
|---|---|
| the length of the cache among its arguments | the caches of transformers, tuples of keys and values |
| what has passed, if the same `generate()`, cache or positions go on | caches that know no length |
| the length of the mask | other caches |
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Mapping
from threading import current_thread
from typing import Any

import torch
from torch import Tensor, nn

from hookline._cache.record import ticks
from hookline._engine import call_arguments
from hookline._engine.generate_call import GenerateCall, generate_call, has_encoder, holds_encoder
from hookline._engine.padding import Padding
from hookline._engine.passing import Passing, RowsOfTokens, passing_of_encoder
from hookline._open_blocks import Session, current_task
from hookline._sites.tree import refuse_other_model, unwrap
from hookline._torch import current_transform
from hookline._values import copy_or_share
from hookline._values.copy_or_share import RunningForward
from hookline._values.nested import Arguments, describe, leaves
from hookline.errors import HooklineError

# Names of arguments that tell how many tokens pass, that hold what passed before, and that say how many of the last
# tokens the head gets.
_OF_DECODER = ("decoder_input_ids", "decoder_inputs_embeds")
_IDS = ("input_ids", "inputs_embeds", "ids", "idx", "tokens")
_CACHES = (
    "past_key_values",
    "cache_params",
    "past_key_value",
    "layer_past",
    "past",
    "mems",
    "kv_cache",
    "cache",
    "inference_params",
)
_STATES = ("hidden", "hidden_state", "hx", "h0", "state")  # Of a recurrent model: they tell no number of tokens.
_POSITIONS = ("position_ids", "cache_position", "input_pos", "start_pos")
_LOGITS = ("logits_to_keep", "num_logits_to_keep")
_UNKNOWN = Passing(0, 0, 0, None)  # For forwards whose arguments don't tell which tokens pass.
Tell = Callable[..., Any]
_told: weakref.WeakKeyDictionary[nn.Module, Callable[[], Tell | None]] = weakref.WeakKeyDictionary()


def tell_tokens(model: nn.Module, function: Tell | None) -> None:
    """Tell hookline which tokens a model is given, where its arguments don't say so in a usual way.

    The function is kept as long as the model, so it must not hold the model itself; a method of the model may be given.
    A copy of the model has to be told again.

    Args:
        function: Called with the arguments of each forward of the model. It returns the indices of the tokens in their
            sequences, an integer tensor (batch, tokens) with -1 for padding, or with them the number of tokens of the
            prompt, for all rows or for each: `(indices, prompt)`. Without that number, what passes first is the prompt,
            so a loop without a cache has to give it. Where it returns None, hookline looks at the arguments itself.
            None in place of the function takes it away.
    """
    refuse_other_model(model)
    if function is not None and not callable(function):
        raise HooklineError(f"{describe(function)} does not tell tokens; give a function of the model's arguments")
    if function is None:
        _told.pop(unwrap(model), None)
    elif isinstance(getattr(function, "__self__", None), nn.Module):
        _told[unwrap(model)] = weakref.WeakMethod(function)
    else:
        _told[unwrap(model)] = lambda: function


class Sequence:
    """What has passed of the sequences that a model is given on one thread or in one task."""

    def __init__(self) -> None:
        self.number = -1
        self.step = 0
        self.total = 0  # Columns so far.
        self.rows = 0
        self.prompt: int | None = None  # The columns of the prompt.
        self.prompt_reason = ""
        self.prompt_end_used = 0  # The columns of the prompt when tokens were counted from its end.
        self.reason = ""
        self.padding = Padding(0)
        self.prompts: list[int] | None = None  # For each row the tokens of the prompt, if a function told them.
        self.beams = 1  # How many continuations of each row pass side by side.
        self.ids: Tensor | None = None  # What the model was given without a cache, to see whether it grows.
        self.cache: Callable[[], Any] = _nothing
        self.earlier: list[Callable[[], Any]] = []  # The caches before it.
        self.generating: Callable[[], Any] = _nothing  # The identity of the `generate()` that runs the model.
        self.has_encoder: bool | None = None  # Whether an encoder-decoder is in the model; None if not yet known.
        self.lost_rows = False  # Whether the number of rows changed since it began.

    def next(self, model: nn.Module, passed: Arguments) -> Passing:
        """Count a forward, and return the tokens that pass in it."""
        tell = _told[model]() if model in _told else None
        answer = None if tell is None else tell(*passed[0], **passed[1])
        if answer is not None:
            return self._as_told(answer)
        named = _arguments_by_name(model, passed)
        if self.has_encoder is None:
            self.has_encoder = holds_encoder(model)
        cache = _cache_of(named)
        name, ids = _tokens_of(named, self.has_encoder, cache)
        if ids is None:
            self.step = self.step + 1 if self.number >= 0 else 0
            self.number = max(0, self.number)
            return Passing(self.number, self.step, 0, None, reason="" if cache is None else _NO_TOKENS)
        if self._is_next_token(ids, cache):
            return self._next_token(named)
        cache = _state_of(named) if cache is None else cache
        generating = generate_call(model)
        positions = next((named[name] for name in _POSITIONS if named.get(name) is not None), None)
        if isinstance(positions, Tensor) and not positions.dim() and _is_readable(positions):
            positions = int(positions)
        is_decoder = has_encoder(model) or name in _OF_DECODER
        mask = named.get("decoder_attention_mask" if is_decoder else "attention_mask")
        first = self._count(name, ids, cache, mask, positions, generating)
        if generating is not None:
            mask = None if self.step else generating.mask
        known = max(self.total - first, (self.prompt or 0) if generating is not None else 0)
        self.padding.note(mask, positions, first, known, self.rows)
        self.beams = 1 if generating is None else generating.beams
        return self._passing(named, first, int(ids.shape[1]), name != "")

    def _is_next_token(self, ids: Tensor, cache: Any) -> bool:
        """Return True for a step of `generate()`: the usual case, in which nothing has to be looked up."""
        is_known = cache is not None and cache is self.cache() and self.generating() is not None
        return is_known and ids.shape[1] == 1 and ids.shape[0] == self.rows and _length_of(cache) == self.total > 0

    def _next_token(self, named: Mapping[str, Any]) -> Passing:
        first = self.total
        self.step += 1
        self.total += 1
        return self._passing(named, first, 1, True)

    def _passing(self, named: Mapping[str, Any], first: int, width: int, is_certain: bool) -> Passing:
        kept = next((int(named[one]) for one in _LOGITS if isinstance(named.get(one), int)), 0)
        return Passing(
            self.number, self.step, first, width, self.rows, self.prompt, self.padding, self.reason,
            self.prompt_reason, kept, self.beams, is_certain,
            passing_of_encoder(named.get("attention_mask")) if self.has_encoder else None, self,
        )  # fmt: skip

    def _count(
        self, name: str, ids: Tensor, cache: Any, mask: Any, positions: Any, generating: GenerateCall | None
    ) -> int:
        """Count the columns of a forward. Return how many passed before."""
        rows, width = int(ids.shape[0]), int(ids.shape[1])
        own = None
        if cache is None and generating is None and _is_readable(ids):
            own = _to_compare(name, ids)
        same_run = generating is not None and self.generating() is generating.identity
        is_first = generating is not None and not same_run
        reason, self.reason = self.reason, ""
        past = self._past(cache, mask, positions, width, same_run)
        if cache is None and ((same_run and width == 1) or (not is_first and _count_on(positions, self.total))):
            past = self.total  # The model keeps a cache of its own.
        elif cache is None and isinstance(positions, int):
            past = positions
        before = self.cache()
        is_earlier = cache is not None and cache is not before and any(one() is cache for one in self.earlier)
        is_other_cache = is_earlier or (cache is not None and self.cache is not _nothing and cache is not before)
        is_whole_again = past == 0 and (cache is None or same_run) and not is_first and self._grows(ids, own, same_run)
        if is_whole_again:
            self.step += 1
            self.total = width
        elif 0 < past == self.total and not is_first and not is_other_cache:
            self._go_on(width, generating)
        else:
            goes_on = past and (cache is before or isinstance(cache, (tuple, list)))
            reason = reason if goes_on else ""
            self._start(past, width, rows, generating)
            if past and is_earlier and generating is None:
                self.reason = self.reason or _IN_TURNS
        self.reason = self.reason or reason
        self.lost_rows = self.step > 0 and (self.lost_rows or rows != self.rows)
        self.rows = rows
        if before is not None and before is not cache:
            self.earlier = [one for one in (*self.earlier, self.cache) if one() is not None]
        self.cache = _weakly(cache)
        self.generating = _nothing if generating is None else _weakly(generating.identity)
        self.ids = own
        return past

    def _past(self, cache: Any, mask: Any, positions: Any, width: int, same_run: bool) -> int:
        """Return how many columns the cache holds."""
        if cache is None:
            return 0
        length = _length_of(cache)
        is_unused = length == 0 and same_run and width == 1  # The model keeps another one itself.
        if length is not None and not is_unused:
            is_known = not isinstance(cache, (tuple, list)) or length in (0, self.total)
            if not is_known or (cache is self.cache() and 0 < length < self.total):
                taken_back = "tokens were taken back from the cache, so it is unknown which tokens pass"
                self.reason = taken_back if is_known else _UNTOLD
                return self.total
            return length
        is_same = cache is self.cache()
        if self.total and (same_run or (is_same and width == 1) or _count_on(positions, self.total)):
            return self.total
        if isinstance(mask, Tensor) and mask.dim() == 2 and mask.shape[1] > width:
            return int(mask.shape[1]) - width
        if self.total and (width == 1 or is_same) and not _begin(positions):
            self.reason = _UNTOLD
        return 0

    def _grows(self, ids: Tensor, own: Tensor | None, same_run: bool) -> bool:
        """Return True if a model without a cache is given its sequence again, with one more token."""
        before = self.ids
        is_longer = ids.shape[1] == self.total + 1 and ids.shape[0] <= self.rows
        if self.total and same_run and is_longer:
            return True
        if not self.total or before is None or own is None or before.device != own.device:
            return False
        if own.shape == before.shape and own.shape[1] > 1 and torch.equal(own[:, :-1], before[:, 1:]):
            self.reason = "the model is given a window that moves over its sequence, so it is unknown which tokens pass"
            return True
        if not is_longer or own.shape[2:] != before.shape[2:]:
            return False
        if len(own) == self.rows:
            return torch.equal(own[:, :-1], before)
        rows, kept = before.flatten(1), own[:, :-1].flatten(1)
        return bool((kept[:, None] == rows).all(-1).any(1).all())  # Finished rows are gone.

    def _go_on(self, width: int, generating: GenerateCall | None) -> None:
        self.step += 1
        is_prompt = self.prompt is not None and self.total == self.prompt and generating is None
        self.total += width
        if width > 1 and is_prompt:
            self.prompt = self.total  # The prompt comes in several pieces.
            if self.prompt_end_used:
                raise HooklineError(
                    f"the prompt goes on after {self.prompt_end_used} tokens, and tokens were counted from its end "
                    "there; hl.tell_tokens(model, function) tells where a prompt ends"
                )
        elif width > 1 and self.prompt is not None and self.total > self.prompt and generating is None:
            self.prompt_reason = (
                "several tokens passed at once after single ones, so it is unknown which are the prompt"
            )

    def _start(self, past: int, width: int, rows: int, generating: GenerateCall | None) -> None:
        self.number += 1
        self.step, self.prompt_end_used, self.padding = 0, 0, Padding(rows)
        self.total = past + width
        self.prompt = past + width if past == 0 else None
        self.prompt_reason = (
            "" if past == 0 else "the prompt passed before these hooks were added, or with another cache"
        )
        if generating is None:
            return
        known = generating.width
        if isinstance(generating.mask, Tensor) and generating.mask.dim() == 2:
            known = max(known, int(generating.mask.shape[1]))
        if known >= past + width:
            self.prompt, self.prompt_reason = known, ""
        elif width == generating.width > 1:  # It was given the tokens behind those in its cache, without a mask.
            self.prompt, self.prompt_reason = past + width, ""
        self.reason = self.reason or generating.reason

    def _as_told(self, answer: Any) -> Passing:
        """Return the tokens that the user's function tells."""
        indices, prompt = answer if isinstance(answer, tuple) else (answer, None)
        if not isinstance(indices, Tensor) or indices.dim() != 2 or indices.is_floating_point():
            raise HooklineError(
                f"the function given to tell_tokens returned {describe(indices)}; it must return the index of each "
                "token, an integer tensor (batch, tokens)"
            )
        table: list[list[int]] = indices.tolist()
        ends = _ends_of_prompts(prompt, len(table))
        counts = [max(row, default=-1) + 1 for row in table]
        if self.number < 0 or any(0 in row for row in table):
            self.number, self.step, self.total = self.number + 1, -1, 0
            is_whole = all(0 in row or not any(one >= 0 for one in row) for row in table)
            self.prompts = counts if is_whole else None
        self.step += 1
        first, self.total = self.total, self.total + indices.shape[1]
        prompts = ends or self.prompts
        columns = None if prompts is None else max(prompts, default=0)
        return Passing(
            self.number, self.step, first, int(indices.shape[1]), len(table), columns, owner=self,
            told=RowsOfTokens(table, counts, prompts),
        )  # fmt: skip


_NO_TOKENS = (
    "the model is given a cache, and no token ids of shape (batch, tokens), so it is unknown which tokens pass; "
    "hl.tell_tokens(model, function) tells"
)
_IN_TURNS = (
    "sequences pass in turns, each with its own cache, so it is unknown which tokens pass; run one after the other"
)
_UNTOLD = "the cache does not tell how many tokens it holds; hl.tell_tokens(model, function) does"


def begin(session: Session, run: RunningForward) -> None:
    """Count a forward of a model for the hooks of a session, before it runs."""
    if session.sequences is None:
        session.sequences = weakref.WeakKeyDictionary()
    runner = current_task() or current_thread()
    sequence = session.sequences.get(runner)
    if sequence is None:
        sequence = session.sequences[runner] = Sequence()
    passing: Passing = sequence.next(run.model, run.given)
    run.passing = {**run.passing, session: passing}
    forwards = session.passed
    if isinstance(forwards, deque) and (passing.width is not None or not forwards or forwards[-1][1] is not _UNKNOWN):
        if forwards:
            forwards[-1][1].forget_rows()
        forwards.append((next(ticks), _UNKNOWN if passing.width is None else passing))


def passing_here() -> Mapping[Session, Passing]:
    """Return the tokens that pass in the running forwards, for each session whose hooks ask for them."""
    found: Mapping[Session, Passing] = {}
    run = copy_or_share.current_forward.get()
    while run is not None:
        if run.passing:
            found = {**run.passing, **found} if found else run.passing
        run = run.outer
    return found


def _nothing() -> None:
    return None


def _weakly(value: Any) -> Callable[[], Any]:
    """Return a weak reference; for a tuple or None, which can't have one, a function that returns None."""
    try:
        return weakref.ref(value) if value is not None else _nothing
    except TypeError:
        return _nothing


def _arguments_by_name(model: nn.Module, passed: Arguments) -> Mapping[str, Any]:
    """Return the arguments of a model by name, with those in a `*args` or in a batch that is a mapping."""
    args, kwargs = passed
    found: dict[str, Any] = dict(kwargs)
    if args:
        found = call_arguments.bind(passed, call_arguments.parameters_of(type(model).forward))
        rest = found.get("args")
        if isinstance(rest, tuple):
            found |= {f"args[{number}]": one for number, one in enumerate(rest)}
    for value in [*found.values()]:
        if type(value) is dict or isinstance(value, Mapping):  # The first is usual, and asked faster.
            found |= {key: one for key, one in value.items() if isinstance(key, str) and found.get(key) is None}
    return found


def _cache_of(named: Mapping[str, Any]) -> Any:
    """Return the cache among the arguments of a model, or None."""
    for name in _CACHES:
        value = named.get(name)
        if value is not None and not isinstance(value, (bool, int, str)):
            return value
    return None


def _state_of(named: Mapping[str, Any]) -> Tensor | None:
    """Return a tensor of the state that a recurrent model is given, or None."""
    for name in _STATES:
        value = named.get(name)
        if isinstance(value, (Tensor, tuple, list)):
            return next(iter(leaves(value)), None)
    return None


def _tokens_of(named: Mapping[str, Any], has_encoder: bool, cache: Any) -> tuple[str, Tensor | None]:
    """Return the tensor whose second dimension counts the tokens, or None, and its name if that says so, else ""."""
    # Without ids for the decoder, an encoder-decoder makes them of the labels, or of the encoder's.
    for name in (*_OF_DECODER, "labels", *_IDS) if has_encoder else (*_OF_DECODER, *_IDS):
        value = named.get(name)
        if isinstance(value, Tensor) and value.dim() > 1 and not value.is_nested:
            return name, value
    # Floats count tokens only beside a cache or a mask: the second dimension of other data may count channels.
    beside = "attention_mask" if named.get("attention_mask") is not None else "" if cache is None else "cache"
    for value in named.values():
        if isinstance(value, Tensor) and value.dim() > 1 and not value.is_nested:
            if value.is_floating_point() and not beside and value.dim() < 3:
                continue
            is_text = beside or (value.dim() == 2 and not value.is_floating_point())
            return (beside, value) if is_text and value.dtype is not torch.bool else ("", None)
    return "", None


def _to_compare(name: str, ids: Tensor) -> Tensor | None:
    """Return a copy by which ids or embeddings are known again; None for what may be no tokens."""
    if ids.is_floating_point():
        return ids.detach()[..., :8].clone() if name and ids.dim() == 3 else None
    return ids.detach().clone() if ids.dim() == 2 else None


def _ends_of_prompts(prompt: Any, rows: int) -> list[int] | None:
    """Return the tokens of the prompt in each row, as the user's function told them."""
    if prompt is None:
        return None
    ends = torch.as_tensor(prompt)
    if ends.is_floating_point() or ends.dim() > 1 or ends.numel() not in (1, rows):
        raise HooklineError(
            f"the function given to tell_tokens returned {describe(prompt)} beside the indices; it must be the number "
            "of tokens of the prompt, one for all rows or one for each"
        )
    found: list[int] = ends.expand(rows).tolist()
    return found


def _is_readable(ids: Tensor) -> bool:
    """Return True if token ids have numbers that can be compared: not on meta, not inside a torch.func transform."""
    return type(ids) is Tensor and not ids.is_meta and current_transform() is None


def _count_on(positions: Any, total: int) -> bool:
    """Return True if position ids go on behind some columns, by one each, and don't begin again."""
    if not isinstance(positions, Tensor) or not total or not _is_readable(positions) or not positions.numel():
        return False
    rows = positions.reshape(-1, positions.shape[-1]).tolist()
    return all(0 < row[0] <= total and row == [*range(row[0], row[0] + len(row))] for row in rows)


def _begin(positions: Any) -> bool:
    """Return True if position ids begin at 0 in a row."""
    return isinstance(positions, Tensor) and _is_readable(positions) and bool((positions[..., :1] == 0).any())


def _length_of(cache: Any) -> int | None:
    """Return how many columns a cache holds; None if it does not tell."""
    passed = getattr(cache, "seqlen_offset", None)
    if isinstance(passed, int):
        return passed
    count = getattr(cache, "get_seq_length", None)
    if callable(count):
        try:
            return int(count())
        except (ValueError, TypeError, NotImplementedError, IndexError, AttributeError):
            return None
    if isinstance(cache, (tuple, list)):
        first = next(iter(leaves(cache)), None)
        return 0 if first is None else int(first.shape[-2]) if first.dim() > 2 else -1
    return None
