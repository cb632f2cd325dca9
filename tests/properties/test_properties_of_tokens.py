"""Any tokens of any batch, in any pieces: named with hookline, against an oracle that works on whole sequences.

The model is a small causal transformer whose cache is a tuple of keys and values, passed by keyword.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import hookline as hl
from hookline._kernel import is_wanted
from tests.errors.wording import says

WIDTH, WORDS = 4, 11
PORTS = ("input", "inputs", "grad_output", "grad_input", "grad_inputs")
drawn = settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


class Layer(nn.Module):
    """Causal attention over everything in the cache and in the value."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.keys, self.values = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, real: Tensor, past: Any) -> tuple[Tensor, Any]:
        keys, values = self.keys(x)[:, None], self.values(x)[:, None]
        if past is not None:
            keys, values = torch.cat([past[0], keys], 2), torch.cat([past[1], values], 2)
        scores = (self.queries(x)[:, None] @ keys.transpose(-1, -2))[:, 0]
        columns, width = scores.shape[-1], scores.shape[-2]
        seen = torch.ones(width, columns, dtype=torch.bool).tril(columns - width) & real[:, None, :]
        seen = seen | torch.eye(columns, dtype=torch.bool)[columns - width :]  # A column of padding sees itself.
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return x + weights @ values[:, 0], (keys, values)


class Causal(nn.Module):
    """A language model with two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(
        self, ids: Tensor, attention_mask: Tensor | None = None, past_key_values: Any = None
    ) -> tuple[Tensor, Any]:
        past = (None, None) if past_key_values is None else past_key_values
        before = 0 if past_key_values is None else past[0][0].shape[2]
        mask = torch.ones(len(ids), before + ids.shape[1]) if attention_mask is None else attention_mask
        x, now = self.embed(ids), []
        for layer, own in zip(self.layers, past, strict=True):
            x, kept = layer(x, mask != 0, own)
            now.append(kept)
        return self.head(x), tuple(now)


class Named(NamedTuple):
    """Tokens that a text names."""

    part: str  # "" for the whole sequence, "prompt", "new", "rows" or "mask".
    index: int | None = None  # One token.
    bounds: tuple[int | None, int | None, int | None] = (None, None, None)  # Else these.
    rows: tuple[tuple[int, ...], ...] = ()  # For "rows", the tokens of each row; for "mask", its columns.

    @property
    def is_one(self) -> bool:
        return self.index is not None

    @property
    def count(self) -> int | None:
        """How many tokens of a long sequence it names in each row; None if that depends on the sequence."""
        start, stop, step = self.bounds
        if self.part == "rows":
            return len(self.rows[0])
        if self.is_one:
            return 1 if self.index >= 0 else None
        return None if stop is None or stop < 0 or (start or 0) < 0 else len(range(start or 0, stop, step or 1))

    def __str__(self) -> str:
        """Return the text in the form in which hookline writes it."""
        if self.part == "mask":
            return f"@mask({'|'.join(map(written_columns, self.rows))})"
        if self.part == "rows":
            texts = [", ".join(map(str, row)) for row in self.rows]
            return f"@({', '.join(texts if self.is_one else map('({})'.format, texts))})"
        start, stop, step = ("" if bound is None else str(bound) for bound in self.bounds)
        inside = str(self.index) if self.is_one else f"{start}:{stop}" + (f":{step}" if step else "")
        if not self.part:
            return f"@{inside}"
        return f"@{self.part}" if inside == ":" else f"@{self.part}[{inside}]"


def written_columns(columns: tuple[int, ...]) -> str:
    """Return the columns of one row of a mask as they are written: neighbours as a range."""
    groups: list[list[int]] = []
    for column in columns:
        groups[-1].append(column) if groups and groups[-1][-1] == column - 1 else groups.append([column])
    return ",".join(f"{group[0]}:{group[-1] + 1}" if len(group) > 1 else str(group[0]) for group in groups)


class Run(NamedTuple):
    """A batch, and how it is given to the model: in which pieces, and with or without a cache."""

    ids: Tensor
    mask: Tensor
    pieces: tuple[int, ...]  # The columns of each piece of the prompt.
    new: int
    cached: bool

    @property
    def prompt(self) -> int:
        return sum(self.pieces)

    @property
    def is_padded(self) -> bool:
        return not bool(self.mask.all())

    def calls(self) -> Iterator[tuple[int, int]]:
        """Return the columns that each forward gets: the first, and where they end."""
        at = 0
        for piece in (*self.pieces, *[1] * self.new):
            yield (at if self.cached else 0), at + piece
            at += piece

    def columns(self, row: int) -> tuple[list[int], list[int], list[int]]:
        """Return the columns of the tokens of a row, of its prompt and of its new tokens."""
        whole = self.mask[row].nonzero().flatten().tolist()
        return whole, [one for one in whole if one < self.prompt], [one for one in whole if one >= self.prompt]

    def chosen(self, tokens: Named) -> list[list[int]]:
        """Return the columns of each row that tokens name, found with Python's slices of lists."""
        if tokens.part == "mask":
            return [[one for one in row if one < self.ids.shape[1]] for row in tokens.rows]
        found = []
        for row in range(len(self.ids)):
            whole, prompt, new = self.columns(row)
            own = {"": whole, "rows": whole, "prompt": prompt, "new": new}[tokens.part]
            if tokens.part == "rows":
                found.append([own[one] for one in tokens.rows[row] if one < len(own)])
            elif tokens.index is not None:
                found.append([own[tokens.index]] if -len(own) <= tokens.index < len(own) else [])
            else:
                found.append(own[slice(*tokens.bounds)])
        return found


@st.composite
def runs(draw: Any) -> Run:
    rows, columns, new = draw(st.integers(1, 3)), draw(st.integers(1, 7)), draw(st.integers(0, 4))
    mask = torch.ones(rows, columns + new, dtype=torch.long)
    side = draw(st.sampled_from(["none", "left", "right"]))
    for row in range(rows if side != "none" else 0):
        padding = draw(st.integers(0, columns - 1))
        mask[row, :padding] = 0 if side == "left" else 1
        mask[row, columns - padding : columns] = 0 if side == "right" else 1
        if side == "left":
            mask[row, :padding] = 0
    cached = draw(st.booleans())
    pieces, left = [], columns
    while left and cached:  # A single token after the first piece is a new one for hookline.
        piece = draw(st.integers(1, left))
        if (pieces and piece == 1) or left - piece == 1:
            piece = left
        pieces.append(piece)
        left -= piece
    ids = torch.randint(WORDS, mask.shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
    return Run(ids, mask, tuple(pieces) or (columns,), new, cached)


def indices(low: int = 0) -> st.SearchStrategy[int | None]:
    return st.none() | st.integers(low, 12)


@st.composite
def named_tokens(draw: Any, rows: int | None = None) -> Named:
    """Return tokens that a text can name."""
    part = draw(st.sampled_from(["", "prompt", "new", *(["rows", "mask"] if rows else [])]))
    if part == "mask":
        return Named(
            part, rows=tuple(tuple(sorted(draw(st.sets(st.integers(0, 12), max_size=6)))) for _ in range(rows))
        )
    if part == "rows":
        many = draw(st.integers(0, 3))
        own = [
            draw(st.lists(st.integers(0, 12), min_size=max(1, many), max_size=max(1, many), unique=True))
            for _ in range(rows)
        ]
        return Named(part, None if many else 0, rows=tuple(tuple(sorted(one)) for one in own))
    low = -12 if part == "prompt" else 0
    if draw(st.booleans()):
        return Named(part, draw(st.integers(low, 12)))
    start, stop, step = draw(indices(low)), draw(indices(low)), draw(st.none() | st.integers(2, 4))
    first = start or 0
    assume(stop is None or (stop != 0 and not (first >= stop and (first < 0) == (stop < 0))))
    return Named(part, None, (start or None, stop, step))


def in_pieces(model: Causal, run: Run, masked: bool = True) -> Tensor:
    """Run the model on the pieces, and return the logits of all columns."""
    logits, cache = [], None
    for first, end in run.calls():
        given = {"attention_mask": run.mask[:, :end]} if masked else {}
        found, cache = model(run.ids[:, first:end], past_key_values=cache if run.cached else None, **given)
        logits = [*logits, found] if run.cached else [found]
    return torch.cat(logits, 1)


def of_whole(model: Causal, run: Run, write: Any) -> tuple[Tensor, Tensor]:
    """Return the logits of one forward over the whole sequences, and the first layer's value, which `write` changes."""
    kept = []

    def hook(_layer: Any, _args: Any, output: Any) -> Any:
        value = output[0].clone()
        write(value)
        kept.append(value.clone())
        return value, output[1]

    handle = model.layers[0].register_forward_hook(hook)
    try:
        logits, _ = model(run.ids, run.mask)
    finally:
        handle.remove()
    return logits, kept[0]


def write_columns(value: Tensor, columns: list[list[int]], change: Any) -> None:
    for row, own in enumerate(columns):
        for slot, column in enumerate(own):
            value[row, column] = change(value[row, column], row, slot)


def is_refused(run: Run, tokens: Named) -> bool:
    """Whether tokens are counted from the end of a prompt that comes in pieces."""
    counted = (tokens.index, *tokens.bounds[:2])
    counts_back = tokens.part == "prompt" and any(one is not None and one < 0 for one in counted)
    return counts_back and len(run.pieces) > 1


@pytest.fixture(scope="module")
def model() -> Causal:
    torch.manual_seed(0)
    return Causal().double().requires_grad_(False)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-8, rtol=1e-8)


SITE = "layers.0[0][:, {}]"


@pytest.mark.filterwarnings("ignore:.*did not change all its tokens:hookline.HooklineWarning")
@drawn
@given(st.data())
def test_an_edit_changes_the_tokens_that_it_names_and_no_others(model, data):
    run = data.draw(runs())
    tokens = data.draw(named_tokens(len(run.ids)))
    columns = run.chosen(tokens)
    hooks = hl.Hooks(model, active=False)
    hooks.edit(SITE.format(tokens), lambda value: value * 2 + 1)
    hooks.capture("layers.0[0]", keep="all")
    if is_refused(run, tokens):
        with pytest.raises(hl.HooklineError, match=says("the prompt goes on after")), hooks:
            in_pieces(model, run)
        return
    expected, value = of_whole(model, run, lambda value: write_columns(value, columns, lambda one, *_: one * 2 + 1))
    if not any(columns):
        with pytest.raises(hl.NeverFired, match=says("no such token passed")), hooks:
            in_pieces(model, run)
        return
    with hooks as acts:
        logits = in_pieces(model, run)
    real = run.mask.bool()
    close(logits[real], expected[real])
    close(acts.tokens("layers.0[0]")[real], value[real])


@pytest.mark.filterwarnings("ignore:.*did not change all its tokens:hookline.HooklineWarning")
@drawn
@given(st.data())
def test_a_patch_puts_a_number_or_a_value_for_each_token_there(model, data):
    run = data.draw(runs())
    tokens = data.draw(named_tokens(len(run.ids)))
    columns = run.chosen(tokens)
    assume(any(columns) and not is_refused(run, tokens))
    kind = data.draw(st.sampled_from(["number", "vector", "tokens", "rows"]))
    many = 1 if tokens.is_one else max(map(len, columns)) if tokens.part != "rows" else len(tokens.rows[0])
    assume(tokens.part != "mask" or kind in ("number", "vector"))
    values = torch.randn(len(run.ids), many, WIDTH, dtype=torch.double)
    if kind == "vector":
        values = values[:1, :1].expand_as(values)
    elif kind == "tokens":
        values = values[:1].expand_as(values)
    elif kind == "number":
        values = torch.full_like(values, 0.5)
    new: Any = {"number": 0.5, "vector": values[0, 0], "tokens": values[0], "rows": values}[kind]
    if tokens.is_one and kind in ("tokens", "rows"):
        new = new[..., 0, :]

    def given_to(_one: Tensor, row: int, slot: int) -> Tensor:
        return values[row, slot] if tokens.part != "mask" else values[0, 0]

    expected, _ = of_whole(model, run, lambda value: write_columns(value, columns, given_to))
    with hl.patch(model, {SITE.format(tokens): new}):
        logits = in_pieces(model, run)
    close(logits[run.mask.bool()], expected[run.mask.bool()])


@drawn
@given(st.data())
def test_a_capture_holds_the_tokens_that_it_names_in_their_order(model, data):
    run = data.draw(runs())
    some = data.draw(st.lists(named_tokens(len(run.ids)), min_size=1, max_size=4, unique=True))
    refused = [tokens for tokens in some if is_refused(run, tokens) and tokens.index != -1]
    if refused:
        with pytest.raises(hl.HooklineError, match=says("the prompt goes on after")):
            hl.run(in_pieces, model, run, capture=SITE.format(refused[0]), model=model)
        return
    hooks = hl.Hooks(model, active=False)
    sites = [SITE.format(tokens) for tokens in some]
    hooks.capture(*sites, "layers.0[0]", keep="all")
    _, value = of_whole(model, run, lambda value: None)
    hooks.when_missing("ignore")
    with hooks as acts:
        in_pieces(model, run)
    for site, tokens in zip(sites, some, strict=True):
        columns = run.chosen(tokens)
        if not any(columns):
            assert site not in acts
        elif tokens.part == "mask":
            close(acts[site], torch.stack([value[row, one] for row, own in enumerate(columns) for one in own]))
        elif len(set(map(len, columns))) > 1:
            with pytest.raises(hl.HooklineError, match=says("the rows have")):
                acts[site]
        else:
            found = torch.stack([value[row, own] for row, own in enumerate(columns)])
            close(acts[site], found[:, 0] if tokens.is_one else found)


@drawn
@given(st.data())
def test_stop_ends_the_run_when_the_last_token_has_passed(model, data):
    run = data.draw(runs())
    tokens = data.draw(named_tokens(len(run.ids)))
    columns = run.chosen(tokens)
    many = tokens.count
    assume(many and tokens.part in ("", "new", "rows") and all(len(own) == many for own in columns))
    ran: list[int] = []
    handle = model.layers[1].register_forward_hook(lambda *_: ran.append(1))
    try:
        _, acts = hl.run(in_pieces, model, run, capture=SITE.format(tokens), stop=True, model=model)
    finally:
        handle.remove()
    _, value = of_whole(model, run, lambda value: None)
    found = torch.stack([value[row, own] for row, own in enumerate(columns)])
    close(acts[SITE.format(tokens)], found[:, 0] if tokens.is_one else found)
    last = max(max(own) for own in columns)
    assert len(ran) == next(number for number, (_, end) in enumerate(run.calls()) if end > last)


def test_the_drawn_runs_and_tokens_are_of_every_kind():
    kinds: dict[str, int] = {}

    @settings(drawn, max_examples=300)
    @given(runs(), named_tokens(2))
    def note(run: Run, tokens: Named) -> None:
        for kind in (f"part {tokens.part}", f"one {tokens.is_one}", f"padded {run.is_padded}", f"cached {run.cached}",
                     f"pieces {min(3, len(run.pieces))}", f"new {min(run.new, 2)}"):  # fmt: skip
            kinds[kind] = kinds.get(kind, 0) + 1

    note()
    assert len(kinds) == 5 + 2 + 2 + 2 + 3 + 3
    assert min(kinds.values()) >= 5


@drawn
@given(st.integers(1, 4).flatmap(named_tokens), st.text(" ", max_size=2))
def test_any_tokens_are_read_as_they_are_written(tokens, space):
    assume(not (tokens.index is not None and tokens.index < -1 and tokens.part != "prompt"))
    site = f"h[:, {tokens}]"
    assert str(hl.Site.parse(site)) == str(hl.Site.parse(f"h[:, @{space}{str(tokens)[1:]}]")) == site


numbers = st.integers(0, 12)


def written_call(start: int | None, stop: int | None, step: int | None) -> str:
    return ":".join("" if bound is None else str(bound) for bound in (start, stop, step)[: 2 + (step is not None)])


calls = st.one_of(
    st.sampled_from(["", "#*", "#-1"]),
    numbers.map("#{}".format),
    st.sets(numbers, min_size=2, max_size=4).map(lambda some: f"#{{{','.join(map(str, sorted(some)))}}}"),
    st.tuples(st.none() | st.integers(1, 12), st.none() | st.integers(13, 20), st.none() | st.integers(2, 3)).map(
        lambda one: f"#{written_call(*one)}"
    ),
)


@drawn
@given(st.none() | numbers, st.none() | numbers, st.none() | st.integers(0, 3))
def test_calls_are_those_of_pythons_slices(start, stop, step):
    text = f"h#{written_call(start, stop, step)}"
    if step == 0 or (stop is not None and stop <= (start or 0)):
        with pytest.raises(hl.SiteError):
            hl.Site.parse(text)
        return
    call = hl.Site.parse(text).call
    assert [number for number in range(16) if is_wanted(call, number)] == [*range(16)][start:stop:step]


@drawn
@given(st.data())
def test_a_site_is_read_as_it_is_written(data):
    member = data.draw(st.sampled_from(["", "/softmax", ".split_heads()", "/matmul"]))
    port = data.draw(st.sampled_from(["", *(f":{name}" for name in PORTS)]))
    items = data.draw(st.lists(st.sampled_from(["0", ":", "1::2", "None"]), max_size=3))
    items.insert(data.draw(st.integers(0, len(items))), str(data.draw(named_tokens(3))))
    index = data.draw(st.sampled_from(["", "[0]", '["k"]'])) + data.draw(st.sampled_from(["", f"[{', '.join(items)}]"]))
    within = data.draw(calls) if member.startswith("/") else ""
    path = data.draw(st.sampled_from(["h.0.attn", "h", "0"]))
    text = f"{path}{within}{member}{data.draw(calls)}{port}{index}"
    site = hl.Site.parse(text)
    assert str(site) == text
    assert hl.Site.parse(str(site)) == site
    assert hl.Site(*site) == site
