"""Values that hl.harvest stores while a model generates, compared with one forward over the generated tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookline as hl
from tests.errors.wording import says
from tests.support.real_models import SENTENCES, TEXT_MODELS, alone, gpt2, llama, near, numbers, of, t5, tokenizer


def continued(model: Any, site: str, text: str, **options: Any) -> tuple[Tensor, list[int]]:
    """Return a causal model's values at a site in one forward over its output but the last token, and those tokens."""
    ids = torch.tensor([numbers(text)])
    with torch.no_grad():
        written = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)[:, :-1]
        with hl.capture(model, site) as acts:
            model(input_ids=written, attention_mask=torch.ones_like(written))
    return acts[site][0], written[0].tolist()


def ends_early(model: Any) -> None:
    """Set an end token that the model generates at different steps for different texts, and never for some."""
    firsts: dict[int, list[int]] = {}
    for text in SENTENCES:
        ids = torch.tensor([numbers(text)])
        written = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)[
            0
        ]
        written = written[1 if model.config.is_encoder_decoder else len(ids[0]) :].tolist()
        for token in set(written):
            firsts.setdefault(token, []).append(written.index(token))
    suits = [token for token, steps in firsts.items() if min(steps) < 5 and (len(set(steps)) > 1 or len(steps) < 5)]
    model.generation_config.eos_token_id = suits[0]
    model.generation_config.pad_token_id = 0


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize(("build", "site"), [TEXT_MODELS["GPT-2"], TEXT_MODELS["Llama"]], ids=["GPT-2", "Llama"])
def test_generation_has_a_row_for_each_token_that_passed_and_none_after_the_end(build, site, use_cache, tmp_path):
    model = of(build, seed=3)
    ends_early(model)
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "use_cache": use_cache}
    call = hl.Generation(**options)
    data = hl.Texts(SENTENCES, tokenizer("left"))
    columns = {"token": call.tokens}
    store = hl.harvest(
        model, data, site, "lm_head", to=tmp_path / "acts", rows="tokens", batch_size=3, call=call, columns=columns
    )
    lengths = []
    for sample, text in enumerate(SENTENCES):
        expected, written = continued(model, site, text, **options)
        near(store.rows(site, sample=sample), expected)
        assert len(store.rows("lm_head", sample=sample)) == 1 + len(written) - len(numbers(text))
        assert store.rows("token", sample=sample).tolist() == written
        lengths.append(len(written) - len(numbers(text)))
    assert min(lengths) < max(lengths) == 5  # Some ended early.


def test_generation_of_an_encoder_decoder(tmp_path):
    model = of(t5, seed=1)
    model.generation_config.eos_token_id = None
    ends_early(model)
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    encoder, decoder = "encoder.block.1.layer.1", "decoder.block.1.layer.2"
    data = hl.Texts(SENTENCES, tokenizer("right"))
    store = hl.harvest(
        model, data, encoder, decoder, to=tmp_path / "acts", rows="tokens", batch_size=3, call=hl.Generation(**options)
    )
    lengths = []
    for sample, text in enumerate(SENTENCES):
        ids = torch.tensor([numbers(text)])
        with torch.no_grad():
            written = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)[:, :-1]
        near(store.rows(encoder, sample=sample), alone(model, encoder, text, decoder_input_ids=written))
        near(store.rows(decoder, sample=sample), alone(model, decoder, text, decoder_input_ids=written))
        lengths.append(written.shape[1])
    assert min(lengths) < max(lengths) == 6


def test_sampled_continuations_are_the_same_each_time_and_leave_random_numbers_alone(tmp_path):
    model = of(llama)
    data = hl.Texts(SENTENCES, tokenizer("left"))
    found = []
    for name, seed, unit in [("a", 0, 2), ("b", 0, 5), ("c", 1, 2)]:
        call = hl.Generation(max_new_tokens=4, do_sample=True, seed=seed)
        torch.manual_seed(seed + unit)
        store = hl.harvest(
            model, data, "model.layers.1", to=tmp_path / name, rows="tokens", batch_size=1, call=call, unit=unit
        )
        found.append(store["model.layers.1"][:])
    assert found[0].equal(found[1])
    assert not found[0].equal(found[2])
    before = torch.get_rng_state()
    call(model, data.collate([data[0]]))
    assert torch.get_rng_state().equal(before)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"num_beams": 3}, "several continuations of a sample run at once"),
        ({"num_return_sequences": 2}, "a sample would have several continuations"),
        ({"prompt_lookup_num_tokens": 3}, "tokens are tried"),
        ({"stop_strings": ["it"]}, "only an end-of-sequence token"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_ways_to_write_that_give_no_rows_of_tokens_are_refused(options, reason):
    with pytest.raises(hl.HooklineError, match=says("can't be harvested", next(iter(options)), reason)):
        hl.Generation(max_new_tokens=3, **options)


def test_beams_that_the_model_itself_asks_for_are_refused_too(tmp_path):
    model = of(gpt2)
    model.generation_config.num_beams = 2
    data = hl.Texts(SENTENCES, tokenizer("left"))
    with pytest.raises(hl.HooklineError, match=says("num_beams=2 can't be harvested it")):
        hl.harvest(
            model, data, "lm_head", to=tmp_path, rows="tokens", batch_size=2, call=hl.Generation(max_new_tokens=2)
        )


def test_generation_after_padding_or_without_a_head_is_refused(tmp_path):
    right = hl.Texts(SENTENCES, tokenizer("right"))
    options: dict[str, Any] = {
        "to": tmp_path,
        "rows": "tokens",
        "batch_size": 2,
        "call": hl.Generation(max_new_tokens=2),
    }
    with pytest.raises(hl.HooklineError, match=says("continue after the padding")):
        hl.harvest(of(gpt2), right, "lm_head", **options)
    with pytest.raises(hl.HooklineError, match=says("Linear has no generate()")):
        hl.harvest(nn.Linear(1, 1).eval(), right, "", **options)


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("rows", ["batch", "tokens"])
@pytest.mark.parametrize(
    ("tokens", "part"),
    [
        ("@prompt[-1]", lambda n: slice(n - 1, n)),
        ("@prompt[-1:]", lambda n: slice(n - 1, n)),
        ("@0", lambda n: slice(0, 1)),
        ("@new", lambda n: slice(n, None)),
        ("@new[0]", lambda n: slice(n, n + 1)),
        ("@new[1:3]", lambda n: slice(n + 1, n + 3)),
    ],
)
def test_a_site_can_name_tokens_of_a_generation(tokens, part, rows, use_cache, tmp_path):
    model = of(llama, seed=3)
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "use_cache": use_cache, "eos_token_id": None}
    site = f"model.layers.1[:, {tokens}]"
    data = hl.Texts(SENTENCES, tokenizer("left"))
    call = hl.Generation(**options)
    store = hl.harvest(model, data, site, to=tmp_path / "acts", rows=rows, batch_size=2, call=call)
    (name,) = store
    for sample, text in enumerate(SENTENCES):
        expected = continued(model, "model.layers.1", text, **options)[0][part(len(numbers(text)))]
        near(store.rows(name, sample=sample).flatten(0, -2), expected)


def test_tokens_after_the_end_of_a_sample_are_left_out_or_refused(tmp_path):
    model = of(gpt2, seed=3)
    ends_early(model)
    site, asked = "transformer.h.1", {"max_new_tokens": 6, "do_sample": False}
    data = hl.Texts(SENTENCES, tokenizer("left"))
    options: dict[str, Any] = {"batch_size": 5, "call": hl.Generation(**asked)}
    store = hl.harvest(model, data, f"{site}[:, @new]", to=tmp_path / "new", rows="tokens", **options)
    for sample, text in enumerate(SENTENCES):
        expected = continued(model, site, text, **asked)[0][len(numbers(text)) :]
        near(store.rows(f"{site}[:, @new]", sample=sample), expected)
    for named in ("@new", "@new[3]"):
        with pytest.raises(hl.HooklineError, match=says("samples end before these tokens", 5, "tokens")):
            hl.harvest(model, data, f"{site}[:, {named}]", to=tmp_path / "one", **options)


def test_the_latest_token_of_a_generation_is_refused(tmp_path):
    options: dict[str, Any] = {"to": tmp_path, "batch_size": 2, "call": hl.Generation(max_new_tokens=3)}
    data = hl.Texts(SENTENCES, tokenizer("left"))
    with pytest.raises(hl.HooklineError, match=says("the token that came last", "@prompt[-1]")):
        hl.harvest(of(gpt2), data, "transformer.h.1[:, @-1]", **options)
    with pytest.raises(hl.HooklineError, match=says("a harvest keeps every call", "transformer.h.1#-1")):
        hl.harvest(of(gpt2), data, "transformer.h.1#-1", **options)
