"""Tokens while transformers generates: several calls, beams, threads, gradients, functions, and what is refused."""

from __future__ import annotations

import asyncio
import copy
import pickle
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

import hookline as hl
from tests.errors.wording import says
from tests.support.real_models import gpt2, near, of, transformers

LAYER = "transformer.h.0"
IDS = torch.tensor([[3, 4, 5, 6], [7, 8, 9, 10]])
MASK = torch.ones_like(IDS)
PUSH = torch.linspace(-4, 4, 16)


@pytest.fixture
def model() -> Any:
    return of(gpt2)


def generate(model: Any, ids: Tensor = IDS, **options: Any) -> Any:
    options = {"max_new_tokens": 4, "do_sample": False, **options}
    if "inputs_embeds" in options:
        return model.generate(**options)
    return model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)


def pushed(value: Tensor) -> Tensor:
    return value + PUSH


def whole(model: Any, ids: Tensor, start: int, end: int | None = None) -> Tensor:
    """Return the logits of one forward in which columns were pushed by a plain hook."""

    def hook(_layer: Any, _args: Any, value: Tensor) -> Tensor:
        return torch.cat([value[:, :start], value[:, start:end] + PUSH, value[:, end:] if end else value[:, :0]], 1)

    handle = model.transformer.h[0].register_forward_hook(hook)
    try:
        with torch.no_grad():
            return model(ids).logits
    finally:
        handle.remove()


def is_greedy(model: Any, ids: Tensor, start: int, end: int | None = None, prompt: int = 4) -> bool:
    """Whether the new ids are the likeliest ones when columns are pushed."""
    return ids[:, prompt:].equal(whole(model, ids[:, :-1], start, end)[:, prompt - 1 :].argmax(-1))


def test_several_generations_in_one_block_are_several_sequences(model):
    steps: list[int] = []
    with (
        hl.edit(model, f"{LAYER}[:, @new]", pushed),
        hl.edit(model, "transformer.h.1", lambda _, call: steps.append(call.step), with_call=True),
        hl.capture(model, LAYER, keep="all") as acts,
    ):
        first, second, third = generate(model), generate(model), generate(model, IDS[:, :2], max_new_tokens=2)
    assert first.equal(second)
    assert is_greedy(model, first, 4)
    assert is_greedy(model, third, 2, prompt=2)
    assert steps == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
    assert [acts.tokens(LAYER, sequence=one).shape[1] for one in (0, 1, 2, -1)] == [7, 7, 3, 3]
    near(acts.tokens(LAYER, sequence=0), acts.tokens(LAYER, sequence=1))


def test_hooks_without_a_block_follow_one_generation_after_another(model):
    hooks = hl.Hooks(model)
    hooks.edit(f"{LAYER}[:, @prompt[-1]]", pushed)
    found = [generate(model), generate(model, use_cache=False), generate(model, IDS[:, :3])]
    hooks.remove()
    assert is_greedy(model, found[0], 3, 4)
    assert found[0].equal(found[1])
    assert is_greedy(model, found[2], 2, 3, prompt=3)


def test_hooks_that_are_added_while_it_generates_do_not_know_its_prompt(model):
    hooks: list[hl.Hooks] = []

    def adding(selector: str) -> Any:
        def add(_ids: Tensor, scores: Tensor) -> Tensor:
            if not hooks:
                hooks.append(hl.Hooks(model))
                hooks[0].edit(f"{LAYER}[:, {selector}]", pushed)
            return scores

        return transformers.LogitsProcessorList([add])

    with pytest.raises(hl.HooklineError, match=says("the prompt passed before these")):
        generate(model, logits_processor=adding("@new"))
    hooks.pop().remove()
    found = generate(model, logits_processor=adding("@5:"))
    hooks.pop().remove()
    assert is_greedy(model, found, 5)


def test_a_generation_may_be_given_the_tokens_behind_those_in_its_cache(model):
    for mask in ({}, {"attention_mask": torch.ones(2, 4, dtype=torch.long)}):
        cache = transformers.DynamicCache()
        with torch.no_grad():
            model(IDS[:, :2], past_key_values=cache)
        passed: list[list[int]] = []
        new = hl.Hooks(model, active=False)
        new.edit(
            f"{LAYER}[:, @new]", lambda _, call, passed=passed: passed.append(call.tokens[0].tolist()), with_call=True
        )
        with new:
            model.generate(input_ids=IDS[:, 2:], past_key_values=cache, max_new_tokens=3, do_sample=False, **mask)
        assert passed == [[4], [5]]


def test_beams_are_edited_at_the_tokens_that_are_named(model):
    options = {"num_beams": 3, "return_dict_in_generate": True, "output_scores": True}
    for selector, start, end in (("@prompt", 0, 4), ("@new", 4, None), ("@5", 5, 6), ("@prompt[-1]", 3, 4)):
        with hl.edit(model, f"{LAYER}[:, {selector}]", pushed):
            found = generate(model, **options)
        likely = whole(model, found.sequences[:, :-1], start, end)[:, 3:].log_softmax(-1)
        own = likely.gather(2, found.sequences[:, 4:, None])[..., 0].sum(1)
        near(found.sequences_scores * 4, own)
    with hl.capture(model, LAYER, keep="all") as acts:
        generate(model, num_beams=3)
    with pytest.raises(hl.HooklineError, match=says("beam search goes on from other")):
        acts.tokens(LAYER)


def test_several_sequences_for_each_row_are_rows_of_their_own(model):
    with hl.edit(model, f"{LAYER}[:, @new]", pushed), hl.capture(model, LAYER, keep="all") as acts:
        found = generate(model, do_sample=True, num_return_sequences=2)
    assert acts.tokens(LAYER).shape == (4, 7, 16)
    assert found.shape == (4, 8)


def test_decoding_that_throws_tokens_away_is_refused(model):
    for option in ({"assistant_model": of(gpt2, seed=1)}, {"prompt_lookup_num_tokens": 2}):
        with (
            pytest.raises(hl.HooklineError, match=says("generate() runs with", next(iter(option)))),
            hl.edit(model, f"{LAYER}[:, @new]", pushed),
        ):
            generate(model, IDS[:1].repeat(1, 3), **option)


def test_decoding_with_a_second_sequence_or_with_fewer_layers_is_refused(model):
    for option, match in (
        ({"assistant_early_exit": 1}, says("and tries tokens")),
        ({"guidance_scale": 1.5}, says("so a second sequence passes")),
    ):
        with pytest.raises(hl.HooklineError, match=match), hl.edit(model, f"{LAYER}[:, @5]", pushed):
            generate(model, IDS[:1].repeat(1, 3), **option)


def test_a_model_that_keeps_its_cache_itself_goes_on_in_a_generation():
    torch.manual_seed(0)
    config = transformers.RecurrentGemmaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2, vocab_size=64,
        bos_token_id=1, eos_token_id=None, pad_token_id=0, lru_width=16,
    )  # fmt: skip
    keeper = transformers.RecurrentGemmaForCausalLM(config).eval()
    passed: list[Any] = []
    with hl.edit(
        keeper, "model.layers.0", lambda _, call: passed.append((call.step, call.tokens[0].tolist())), with_call=True
    ):
        for length in (4, 1):
            keeper.generate(IDS[:, :length], max_new_tokens=3, do_sample=False)
    assert passed == [(0, [0, 1, 2, 3]), (1, [4]), (2, [5]), (0, [0]), (1, [1]), (2, [2])]


def test_padding_on_the_right_of_a_prompt_is_no_padding_of_new_tokens(model):
    passed: list[Any] = []
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    with hl.edit(model, LAYER, lambda _, call: passed.append(call.tokens[:, -1].tolist()), with_call=True):
        model.generate(IDS, attention_mask=mask, use_cache=False, max_new_tokens=4, do_sample=False)
    assert passed == [[3, -1], [4, 2], [5, 3], [6, 4]]


def test_tokens_taken_back_from_the_cache_of_a_generation_are_refused(model):
    cache = transformers.DynamicCache()

    def take_back(ids: Tensor, scores: Tensor) -> Tensor:
        if ids.shape[1] == 6:
            cache.crop(-2)
        return scores

    with (
        pytest.raises(hl.HooklineError, match=says("tokens were taken back from")),
        hl.edit(model, f"{LAYER}[:, @6]", pushed),
    ):
        generate(model, past_key_values=cache, logits_processor=[take_back])


def test_embeddings_are_a_prompt(model):
    embedded = model.transformer.wte(IDS).detach()
    with hl.edit(model, f"{LAYER}[:, @new]", pushed), hl.capture(model, LAYER, keep="all") as acts:
        found = generate(model, inputs_embeds=embedded, attention_mask=MASK)
    assert acts.tokens(LAYER).shape == (2, 7, 16)
    assert is_greedy(model, torch.cat([IDS, found[:, -4:]], 1), 4)


def test_a_cache_that_holds_a_first_turn_goes_on_in_the_second(model):
    cache = transformers.DynamicCache()
    with hl.edit(model, f"{LAYER}[:, @new]", pushed):
        first = generate(model, past_key_values=cache)
        longer = torch.cat([first, IDS[:, :2]], 1)
        second = generate(model, longer, past_key_values=cache)
    logits = []
    handle = model.transformer.h[0].register_forward_hook(
        lambda _layer, _args, value: (
            value + PUSH * torch.tensor([4 <= at < 7 or at >= 10 for at in range(value.shape[1])])[:, None]
        )
    )
    with torch.no_grad():
        logits = model(second[:, :-1]).logits[:, 9:]
    handle.remove()
    assert second[:, 10:].equal(logits.argmax(-1))


def test_a_stop_ends_a_generation_after_its_last_token(model):
    ran: list[int] = []
    handle = model.transformer.h[1].register_forward_hook(lambda *_: ran.append(1))
    output, acts = hl.run(model.generate, IDS, max_new_tokens=9, do_sample=False, capture=f"{LAYER}[:, @5]", stop=True)
    assert output is None
    assert len(ran) == 2
    handle.remove()
    expected = generate(model)
    _, one = hl.run(model, expected[:, :6], capture=LAYER)
    near(acts[f"{LAYER}[:, @5]"], one[LAYER][:, 5])
    for selector in ("@5:", "@new", "@new[2:]", "@:"):
        with pytest.raises(hl.SiteError, match=says("more of it may always come")):
            hl.run(model, IDS, capture=f"{LAYER}[:, {selector}]", stop=True)


def test_threads_that_generate_at_the_same_time_have_sequences_of_their_own(model):
    prompts = [IDS[:1], torch.cat([IDS[1:], IDS[1:, :2]], 1)]
    turn = threading.Barrier(2)
    found: dict[int, Tensor] = {}

    class Wait(transformers.LogitsProcessor):
        def __call__(self, _ids: Tensor, scores: Tensor) -> Tensor:
            turn.wait(60)
            return scores

    hooks = hl.Hooks(model)
    hooks.edit(f"{LAYER}[:, @prompt[-1]]", pushed)
    hooks.edit(f"{LAYER}[:, @new[1:]]", lambda value: value - PUSH)
    together = transformers.LogitsProcessorList([Wait()])

    def work(number: int) -> None:
        found[number] = generate(model, prompts[number], logits_processor=together)

    workers = [threading.Thread(target=work, args=(number,)) for number in (0, 1)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    alone = [generate(model, prompt) for prompt in prompts]
    hooks.remove()
    assert found[0].equal(alone[0])
    assert found[1].equal(alone[1])
    assert not alone[0].equal(generate(model, prompts[0]))


def test_tasks_that_step_in_turns_have_sequences_of_their_own(model):
    async def steps(ids: Tensor) -> list[Tensor]:
        cache = transformers.DynamicCache()
        logits = []
        for piece in (ids[:, :2], ids[:, 2:3], ids[:, 3:]):
            logits.append(model(piece, past_key_values=cache).logits)
            await asyncio.sleep(0)
        return logits

    async def both() -> list[list[Tensor]]:
        return list(await asyncio.gather(steps(IDS[:1]), steps(IDS[1:])))

    hooks = hl.Hooks(model)
    hooks.edit(f"{LAYER}[:, @new]", pushed)
    with torch.no_grad():
        found = asyncio.run(both())
    hooks.remove()
    for row, logits in enumerate(found):
        near(torch.cat(logits, 1), whole(model, IDS[row : row + 1], 2))


def test_values_of_threads_that_run_at_the_same_time_are_not_mixed(model):
    inside = threading.Barrier(2)
    ids = [IDS[:1], IDS[1:]]
    hooks = hl.Hooks(model)
    acts = hooks.capture("transformer.h.1", keep="all")
    handle = model.transformer.h[0].register_forward_hook(lambda *_: (inside.wait(60), None)[1])
    workers = [threading.Thread(target=model, args=(one,)) for one in ids]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    handle.remove()
    hooks.remove()
    with pytest.raises(hl.HooklineError, match=says("or threads ran at the")):
        acts.tokens("transformer.h.1")


@pytest.mark.parametrize("reentrant", [True, False])
def test_tokens_are_edited_again_when_a_checkpointed_layer_is_recomputed(model, reentrant):
    def gradients() -> Tensor:
        model.zero_grad()
        with (
            hl.edit(model, f"{LAYER}.mlp[:, @1:3]", lambda value: value * 3 + 1),
            hl.edit(model, f"{LAYER}[:, @prompt[-1]]", pushed),
        ):
            model(IDS).logits.sin().sum().backward()
        return model.transformer.wte.weight.grad.clone()

    plain = gradients()
    model.train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    near(gradients(), plain)
    model.zero_grad()
    model(IDS).logits.sin().sum().backward()
    assert not model.transformer.wte.weight.grad.allclose(plain, atol=1e-3)


def test_gradients_at_tokens_are_those_of_the_whole_value(model):
    mask = torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1]])
    sites = [f"{LAYER}:grad_output[:, @prompt[-1]]", f"{LAYER}:grad_output[:, @1:3]", f"{LAYER}:grad_output"]
    with hl.capture(model, *sites) as acts:
        model(IDS, attention_mask=mask).logits.sin().sum().backward()
    one, some, every = (acts[site] for site in sites)
    assert one.equal(every[:, -1])
    assert some.equal(torch.stack([every[0, 1:3], every[1, 2:4]]))


def test_an_edit_of_gradients_at_tokens_reaches_what_is_before(model):
    def first(*edits: Any) -> Tensor:
        with (
            hl.capture(model, "transformer.wte:grad_output") as acts,
            hl.edit(model, f"{LAYER}:grad_output[:, @2:]", *edits),
        ):
            model(IDS).logits.sin().sum().backward()
        return acts["transformer.wte:grad_output"]

    kept = first(lambda gradient: gradient)
    cut = first(lambda gradient: gradient * 0)
    assert cut[:, 2:].abs().max() == 0
    assert kept[:, 2:].abs().max() > 0
    near(first(lambda gradient: gradient * 2)[:, 2:], kept[:, 2:] * 2)


def test_rows_of_a_function_are_queries_and_its_columns_are_keys():
    config = transformers.GPT2Config(
        vocab_size=64, n_positions=32, n_embd=16, n_layer=2, n_head=2, attn_implementation="eager", bos_token_id=None,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = of(lambda: transformers.GPT2LMHeadModel(config))
    site = "transformer.h.0.attn/softmax"
    seen: list[tuple[int, ...]] = []
    with hl.edit(model, f"{site}[:, :, @new]", lambda value: seen.append(tuple(value.shape))):
        generate(model)
    assert seen == [(2, 2, 1, 5), (2, 2, 1, 6), (2, 2, 1, 7)]
    with hl.capture(model, f"{site}[:, :, @prompt[-1]]", f"{site}[:, 0, @3]") as acts:
        ids = generate(model)
    _, alone = hl.run(model, ids[:, :4], capture=site)
    near(acts[f"{site}[:, :, @prompt[-1]]"], alone[site][:, :, 3])
    near(acts[f"{site}[:, 0, @3]"], alone[site][:, 0, 3])


def test_inputs_methods_and_every_part_take_tokens(model):
    sites = [f"{LAYER}:input[:, @1:3]", f"{LAYER}.mlp.act:input[:, @0]", f"{LAYER}[*, @3]"]
    _, acts = hl.run(model, IDS, capture=sites)
    _, every = hl.run(model, IDS, capture=[f"{LAYER}:input", f"{LAYER}.mlp.act:input", LAYER])
    near(acts[f"{LAYER}:input[:, @1:3]"], every[f"{LAYER}:input"][:, 1:3])
    near(acts[f"{LAYER}.mlp.act:input[:, @0]"], every[f"{LAYER}.mlp.act:input"][:, 0])
    near(acts[f"{LAYER}[1, @3]"], every[LAYER][1, 3])


def test_tokens_in_a_compiled_model_are_those_of_the_plain_one(model, fresh_compiler):
    with torch.no_grad(), hl.edit(model, f"{LAYER}[:, @1:3]", pushed), hl.capture(model, f"{LAYER}[:, @2]") as acts:
        expected, kept = model(IDS).logits, acts[f"{LAYER}[:, @2]"]
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad(), hl.edit(compiled, f"{LAYER}[:, @1:3]", pushed):
        with hl.capture(compiled, f"{LAYER}[:, @2]") as acts:
            near(compiled(IDS).logits, expected)
        near(acts[f"{LAYER}[:, @2]"], kept)


def test_caches_with_tokens_are_copied_pickled_saved_and_patched_in(model, tmp_path):
    sites = [f"{LAYER}[:, @2:6]", f"{LAYER}[:, @prompt[-1]]", f"{LAYER}[:, @new]"]
    with hl.capture(model, *sites, (LAYER, hl.tokens([[1, 5], [0, 4]]))) as acts:
        ids = generate(model)
    acts.save(tmp_path / "acts.safetensors")
    copies = [copy.deepcopy(acts), pickle.loads(pickle.dumps(acts)), hl.Cache.load(tmp_path / "acts.safetensors")]
    for one in copies:
        assert list(one) == list(acts)
        assert all(one[site].equal(acts[site]) for site in acts)
    values = {site: value * 0 + 3 for site, value in acts.items()}
    for given in (values, copies[2]):
        with hl.patch(model, given), hl.capture(model, LAYER, keep="all") as seen:
            found = generate(model)
        if given is values:
            assert bool((seen.tokens(LAYER)[:, 2:] == 3).all())
        else:
            assert found.equal(ids)


def test_a_cache_of_several_calls_is_put_in_from_the_first_that_is_named(model):
    with hl.capture(model, f"{LAYER}#1:") as acts:
        ids = generate(model)
    assert len(acts.calls(f"{LAYER}#1:")) == 3
    doubled = acts * 0
    with hl.patch(model, acts):
        assert generate(model).equal(ids)
    with hl.patch(model, doubled), hl.capture(model, LAYER, keep="all") as seen:
        generate(model)
    assert [bool((one == 0).all()) for one in seen.calls(LAYER)] == [False, True, True, True]
    with pytest.raises(hl.EditError, match=says("has no value the", 4, 3)), hl.patch(model, acts):
        generate(model, max_new_tokens=6)


@pytest.mark.parametrize(
    ("selector", "message"),
    [
        ("[:, @-1]", says("each new token is the", "@prompt[-1]")),
        ("[:, @new[-1]]", says("each new token is the")),
        ("#-1", says("which call is the latest")),
    ],
)
def test_what_is_the_latest_is_captured_and_not_changed(model, selector, message):
    for add in (lambda: hl.edit(model, LAYER + selector, pushed), lambda: hl.patch(model, {LAYER + selector: 0.0})):
        with pytest.raises(hl.SiteError, match=message), add():
            pass
    with hl.capture(model, LAYER + selector) as acts:
        ids = generate(model)
    _, every = hl.run(model, ids[:, :-1], capture=LAYER)
    near(acts[LAYER + selector].reshape(2, 16), every[LAYER][:, -1])


def test_tokens_are_not_kept_under_a_limit(model):
    with pytest.raises(hl.HooklineError, match=says("tokens are put together in")):
        hl.Hooks(model).capture(f"{LAYER}[:, @2]", limit="1 MB")


def test_tokens_of_a_cache_need_all_calls_of_that_cache(model):
    with hl.capture(model, LAYER) as acts:
        generate(model)
    with pytest.raises(hl.HooklineError, match=says("has no calls here that", "all")):
        acts.tokens(LAYER)
    with hl.capture(model, LAYER, keep=2) as acts:
        generate(model)
    with pytest.raises(hl.HooklineError, match=says("capture all calls", 7, 2)):
        acts.tokens(LAYER)
    with hl.capture(model, f"{LAYER}#1:") as acts:
        generate(model)
    with pytest.raises(hl.HooklineError, match=says("only some tokens were kept", 7, 3)):
        acts.tokens(f"{LAYER}#1:")
