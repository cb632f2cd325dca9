"""Tokens of fifteen architectures: named while they generate, against an oracle that works on whole sequences."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import hookline as hl
from tests.errors.wording import says
from tests.support.generating_models import (
    CAUSAL,
    ENCODER_DECODERS,
    SELECTORS,
    WIDTH,
    adding,
    adds,
    at,
    close,
    directions,
    gathered,
    generating,
    of_whole,
    oracle,
    prompt,
    putting,
    second,
    whole_sequences,
)

NEW = 4  # Tokens, of which the last is never given to the model.
ONE = {"@2", "@5", "@7", "@prompt[0]", "@prompt[-1]", "@new[0]", "@new[1]", "one"}  # Each names one token.
# For each row its own tokens, and a mask of columns.
ROWS = {
    "one": torch.tensor([1, 3, 7]),
    "two": torch.tensor([[0, 2], [3, 6], [2, 3]]),
    "mask": torch.rand(3, 6 + NEW, generator=torch.Generator().manual_seed(4)) > 0.6,
}
PATCHED = {
    "@prompt[-2:]": lambda whole, prompt, new: prompt[-2:],
    "@8": lambda whole, prompt, new: whole[8:9],
    "@new[1:3]": lambda whole, prompt, new: new[1:3],
}
WAYS: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "without": {"use_cache": False},
    "static": {"cache_implementation": "static"},  # Mistral, Gemma 2 and Gemma 3: its sliding layers.
    "chunks-of-4": {"prefill_chunk_size": 4},
    "chunks-of-5": {"prefill_chunk_size": 5},  # The last one has one token.
    "chunks-of-1": {"prefill_chunk_size": 1},
    "static-chunks": {"cache_implementation": "static", "prefill_chunk_size": 5},
}
# What transformers does not do: no static cache of Falcon takes several tokens twice, and Mamba's prompt has one piece.
UNSUPPORTED = {("falcon", "static-chunks"), *(("mamba", way) for way in WAYS if "chunks" in way)}
CASES = [
    (name, padding, way)
    for name, padding, way in itertools.product(CAUSAL, ["none", "left", "right"], WAYS)
    if (name, way) not in UNSUPPORTED
]


@cache
def model_of(name: str) -> Any:
    return generating(name)


def generate(model: Any, given: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """Return the ids and the logits (batch, new token, word) of a greedy generation."""
    found = model.generate(
        input_ids=given.ids, attention_mask=given.mask, max_new_tokens=NEW, do_sample=False,
        return_dict_in_generate=True, output_logits=True, **options,
    )  # fmt: skip
    return found.sequences, torch.stack(found.logits, 1)


def picks_of_rows(positions: Tensor, whole: Any) -> list[list[int]]:
    """Return the columns that `hl.tokens` names."""
    columns = whole.ids.shape[1]
    if positions.dtype is torch.bool:
        return [row.nonzero().flatten().tolist() for row in positions[:, :columns]]
    found = []
    for row, own in enumerate(positions.reshape(len(positions), -1).tolist()):
        real = whole.columns(row, lambda all_columns, *_: all_columns)
        found.append([real[one] for one in own if one < len(real)])
    return found


def add_hooks(model: Any, first: str, vectors: list[Tensor], values: dict[str, Tensor]) -> hl.Hooks:
    """Return hooks that add a vector at each selector, patch the second layer, and capture what passes then."""
    hooks = hl.Hooks(model, active=False)
    sites: list[Any] = [*(at(first, text) for text in SELECTORS), *((first, hl.tokens(own)) for own in ROWS.values())]
    for site, vector in zip(sites, vectors, strict=True):
        hooks.edit(site, adds(vector))
    hooks.patch({at(second(first), text): value for text, value in values.items()})
    hooks.capture(*sites)
    hooks.capture(first, second(first), keep="all")
    return hooks


@pytest.mark.slow
@pytest.mark.parametrize(("name", "padding", "way"), CASES)
def test_tokens_of_a_generation_are_those_of_one_forward_over_the_whole_sequence(name, padding, way):
    model, first, given = model_of(name), CAUSAL[name], prompt(padding)
    vectors = directions(len(SELECTORS) + len(ROWS))
    values = {text: torch.randn(3, 2, WIDTH) for text in PATCHED}
    values["@8"] = values["@8"][:, 0]
    hooks = add_hooks(model, first, vectors, values)
    with hooks as acts:
        ids, logits = generate(model, given, **WAYS[way])

    whole = whole_sequences(given, ids)
    places = {text: whole.chosen(pick) for text, pick in SELECTORS.items()}
    named = {name: picks_of_rows(own, whole) for name, own in ROWS.items()}
    writes = [adding(vector, own) for vector, own in zip(vectors, [*places.values(), *named.values()], strict=True)]
    patches = [putting(values[text], whole.chosen(pick)) for text, pick in PATCHED.items()]
    with oracle(model, {first: writes, second(first): patches}) as kept:
        expected = of_whole(model, name, whole)

    is_real = whole.mask.bool()
    for site in (first, second(first)):
        found = acts.tokens(site)
        assert found.shape == kept[site].shape
        close(found[is_real], kept[site][is_real], site)
    close(logits, expected[:, given.ids.shape[1] - 1 :], "logits")
    assert ids[:, given.ids.shape[1] :].equal(logits.argmax(-1))

    sites = [str(hook.site) for hook in hooks.of("capture")]
    for site, (text, own) in zip(sites, [*places.items(), *named.items()], strict=False):
        if text == "mask":  # The value at a column of padding depends on how the model is run.
            assert len(acts[site]) == sum(map(len, own))
        elif len(set(map(len, own))) > 1:
            with pytest.raises(hl.HooklineError, match=says("the rows have")):
                acts[site]
        else:
            close(acts[site], gathered(kept[first], own, text in ONE), site)


ENCODED = [text for text in SELECTORS if "new" not in text]


@pytest.mark.parametrize("way", ["dynamic", "without", "static"])
@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_tokens_of_an_encoder_and_a_decoder_are_those_of_one_forward_over_whole_sequences(name, padding, way):
    model, given, start = model_of(name), prompt(padding, (9, 7, 8)), prompt("left" if padding == "left" else "none")
    start.ids[:, 0] = model.generation_config.decoder_start_token_id
    encoder, decoder = (site.format(0) for site in ENCODER_DECODERS[name])
    vectors = directions(len(SELECTORS) + 2)
    hooks = hl.Hooks(model, active=False)
    for text, vector in zip(SELECTORS, vectors, strict=False):
        hooks.edit(at(decoder, text), adds(vector))
        if text in ENCODED:
            hooks.edit(at(encoder, text), adds(vector))
    for site in (encoder, decoder):
        hooks.edit((site, hl.tokens(ROWS["one"] - 1)), adds(vectors[-2]))
        hooks.edit((site, hl.tokens(ROWS["mask"])), adds(vectors[-1]))
        hooks.capture(at(site, "@prompt[-1]"), at(site, "@2:5"))
    hooks.capture(encoder, decoder, keep="all")
    with hooks as acts:
        ids, logits = generate(
            model, given, decoder_input_ids=start.ids, decoder_attention_mask=start.mask, **WAYS[way]
        )

    encoded = whole_sequences(given, torch.cat([given.ids, given.ids[:, :1]], 1))
    decoded = whole_sequences(start, ids)
    writes = {encoder: [], decoder: []}
    for site, whole, texts in ((encoder, encoded, ENCODED), (decoder, decoded, SELECTORS)):
        for text, vector in zip(SELECTORS, vectors, strict=False):
            writes[site] += [adding(vector, whole.chosen(SELECTORS[text]))] if text in texts else []
        writes[site].append(adding(vectors[-2], picks_of_rows(ROWS["one"] - 1, whole)))
        writes[site].append(adding(vectors[-1], picks_of_rows(ROWS["mask"], whole)))
    with oracle(model, writes) as kept, torch.no_grad():
        expected = model(
            input_ids=given.ids, attention_mask=given.mask, use_cache=False,
            decoder_input_ids=decoded.ids, decoder_attention_mask=decoded.mask,
        ).logits  # fmt: skip

    close(logits, expected[:, start.ids.shape[1] - 1 :], "logits")
    for site, whole in ((encoder, encoded), (decoder, decoded)):
        is_real = whole.mask.bool()
        close(acts.tokens(site)[is_real], kept[site][is_real], site)
        last = whole.chosen(SELECTORS["@prompt[-1]"])
        close(acts[at(site, "@prompt[-1]")], gathered(kept[site], last, is_one=True), site)
        close(acts[at(site, "@2:5")], gathered(kept[site], whole.chosen(lambda one, *_: one[2:5])), site)


def test_the_edits_change_what_is_generated():
    """Otherwise every comparison of logits would hold without an edit."""
    for name, first in CAUSAL.items():
        given = prompt("left")
        _, without = generate(model_of(name), given)
        for text in ("@prompt[-1]", "@new[0]"):
            with hl.edit(model_of(name), at(first, text), adds(5 * directions(1)[0])):
                _, edited = generate(model_of(name), given)
            step = 0 if text == "@prompt[-1]" else 1
            changed = [
                not one.allclose(other, atol=1e-3)
                for one, other in zip(without.unbind(1), edited.unbind(1), strict=True)
            ]
            assert changed.index(True) == step, name
