"""Models that tell their tokens in odd ways, or have none: counting must not get in their way, nor guess."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookline as hl
from tests.errors.wording import says
from tests.support.running import said

transformers = pytest.importorskip("transformers")
IDS = torch.tensor([[3, 4, 5, 6, 7, 8], [2, 9, 4, 1, 3, 5]])
MASK = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])


class Net(nn.Module):
    """Takes whatever a model may be called with beside its ids."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, 4)
        self.layer = nn.Linear(4, 4)

    def forward(self, ids: Any, attention_mask: Any = None, past: Any = None, position_ids: Any = None) -> Tensor:
        return self.layer(self.embed(ids) if not ids.is_floating_point() else ids)


def tokens_of(model: nn.Module, *calls: dict[str, Any], where: str = "layer") -> list[Any]:
    """Call a model, and return the step and the tokens of each call."""
    found: list[Any] = []

    def look(_value: Tensor, call: Any) -> None:
        found.append((call.step, None if call.tokens is None else call.tokens.tolist()))

    with hl.edit(model, where, look, with_call=True):
        for one in calls:
            model(**one)
    return found


@pytest.fixture(scope="module")
def llama() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=30,
        pad_token_id=0, bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("options", [{"keep": "all"}, {"transform": lambda value, _: value, "with_call": True}])
def test_hooks_that_name_no_tokens_read_no_numbers(options: dict[str, Any]) -> None:
    model = Net()
    with hl.capture(model, "layer", **options):
        model(IDS, attention_mask=MASK)
        model.to("meta")(IDS.to("meta"), attention_mask=MASK.to("meta"))
    model = Net()
    with hl.capture(model, "layer", **options):
        model(torch.nested.nested_tensor([IDS[0], IDS[1]], layout=torch.jagged).float().unsqueeze(-1).expand(2, -1, 4))
    edited = hl.Hooks(model)
    edited.edit("layer", lambda value, _: value, with_call=True)
    torch.vmap(lambda ids, mask: model(ids, attention_mask=mask))(IDS[:, None], MASK[:, None])
    edited.remove()


def test_what_is_noted_of_forwards_goes_with_the_calls_that_are_kept() -> None:
    model = Net()
    hooks = hl.Hooks(model)
    acts = hooks.capture("layer", keep="all")
    hooks.edit("embed", lambda value, _: value, with_call=True)

    def grown_by(run: Callable[[], object]) -> int:
        """Return how many objects there are more after many runs."""
        run()
        gc.collect()
        before = len(gc.get_objects())
        for _ in range(50):
            run()
        gc.collect()
        return len(gc.get_objects()) - before

    assert grown_by(lambda: (model(IDS), acts.clear())) < 50
    model(IDS)
    hooks.of("capture").remove()
    assert grown_by(lambda: model(IDS)) < 50
    assert acts.tokens("layer").shape == (2, 6, 4)
    hooks.remove()


def test_images_of_integers_are_not_kept() -> None:
    model, images = nn.Sequential(nn.Flatten(), nn.ReLU()), torch.zeros(2, 3, 4, 4, dtype=torch.uint8)
    with hl.capture(model, "1", keep="all") as acts:
        model(images)
    found = [one for one in gc.get_objects() if isinstance(one, Tensor) and one.dtype is torch.uint8 and one.dim() == 4]
    assert all(one is images for one in found)
    assert len(acts.calls("1")) == 1


def test_two_generations_of_a_model_whose_cache_tells_no_length_are_two_sequences() -> None:
    torch.manual_seed(0)
    config = transformers.MambaConfig(
        hidden_size=16,
        num_hidden_layers=2,
        vocab_size=30,
        state_size=4,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )
    model = transformers.MambaForCausalLM(config).eval()
    found: list[Any] = []

    def look(_value: Tensor, call: Any) -> None:
        found.append((call.step, call.tokens[0].tolist()))

    with hl.edit(model, "backbone.layers.0", look, with_call=True):
        for _ in range(2):
            model.generate(IDS, max_new_tokens=3, do_sample=False)
    assert found == [(0, [0, 1, 2, 3, 4, 5]), (1, [6]), (2, [7])] * 2


def test_a_cache_that_does_not_tell_its_length_is_refused() -> None:
    model, cache = Net(), torch.zeros(2, 2, 6, 4)
    for past in (cache, (torch.zeros(2, 6, 2, 4),), [torch.zeros(2, 3)]):
        with pytest.raises(hl.HooklineError, match=says("the cache does not tell")):
            with hl.edit(model, "layer[:, @0]", torch.neg):
                model(IDS)
                model(IDS[:, :1], past=past)


@pytest.mark.parametrize("past", [(torch.zeros(2, 2, 6, 4),), [torch.zeros(2, 6, 4)]])
def test_keys_and_values_tell_how_many_tokens_they_are_of(past: Any) -> None:
    assert tokens_of(Net(), {"ids": IDS}, {"ids": IDS[:, :1], "past": past})[1] == (1, [[6], [6]])


def test_positions_tell_where_a_model_goes_on_that_keeps_its_cache_itself() -> None:
    later = {"ids": IDS[:, :1], "position_ids": torch.tensor([[6]])}
    first = {"ids": IDS, "position_ids": torch.arange(6)[None]}
    assert tokens_of(Net(), first, later, first)[1:] == [(1, [[6], [6]]), (0, [[0, 1, 2, 3, 4, 5]] * 2)]


def test_a_start_tells_where_a_model_goes_on_that_keeps_its_cache_itself() -> None:
    class Decoder(Net):
        def forward(self, tokens: Tensor, start_pos: Any = None, input_pos: Any = None) -> Tensor:
            return super().forward(tokens)

    whole, tokens = [[*range(6)]] * 2, {"tokens": IDS[:, :1]}
    for positions in ([0, 6, 7], [torch.tensor(one) for one in (0, 6, 7)]):
        first, *later = [{"start_pos": one} for one in positions]
        calls = [{"tokens": IDS, **first}, *({**tokens, **one} for one in later), {"tokens": IDS, **first}]
        assert tokens_of(Decoder(), *calls) == [(0, whole), (1, [[6]] * 2), (2, [[7]] * 2), (0, whole)]
        assert tokens_of(Decoder(), *calls[2:]) == [(0, [[7]] * 2), (0, whole)]  # Hooks that were added later.
    calls = [{"tokens": IDS, "input_pos": torch.arange(6)}, {**tokens, "input_pos": torch.tensor([6])}]
    assert tokens_of(Decoder(), *calls) == [(0, whole), (1, [[6]] * 2)]


def test_the_offset_of_a_cache_tells_how_many_tokens_passed() -> None:
    class State:
        seqlen_offset = 0

    class Decoder(Net):
        def forward(self, input_ids: Tensor, inference_params: Any = None) -> Tensor:
            return super().forward(input_ids)

    model, state, found = Decoder(), State(), []
    with hl.edit(model, "layer", lambda _, call: found.append(call.tokens[0].tolist()), with_call=True):
        for width in (6, 1, 1):
            model(IDS[:, :width], inference_params=state)
            state.seqlen_offset += width
    assert found == [[*range(6)], [6], [7]]


def test_a_part_that_runs_without_its_model_is_refused(llama: Any) -> None:
    with pytest.raises(hl.HooklineError, match=says("no forward of LlamaForCausalLM is")):
        with hl.edit(llama, "model.layers.0[:, @0]", torch.neg):
            llama.model(IDS)


def test_a_wrapper_that_takes_anything_tells_what_it_is_given() -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def forward(self, *args: Any, **kwargs: Any) -> Tensor:
            given = dict(args[0]) if isinstance(args[0], dict) else {"ids": args[0]}
            return self.net(**given, **kwargs)

    model, past = Wrapper(), (torch.zeros(2, 2, 6, 4),)
    found: list[Any] = []
    with hl.edit(model, "net.layer", lambda _, call: found.append(call.tokens.tolist()), with_call=True):
        model(IDS)
        model(IDS[:, :1], past=past)
        model({"ids": IDS, "attention_mask": MASK})
    assert found[1:] == [[[6], [6]], [[-1, -1, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5]]]


def test_a_step_of_another_cache_is_another_sequence(llama: Any) -> None:
    one = llama(IDS).past_key_values
    found: list[Any] = []
    with hl.edit(llama, "model.layers.0", lambda _, call: found.append(call.tokens.tolist()), with_call=True):
        llama(IDS, attention_mask=MASK, past_key_values=transformers.DynamicCache())
        llama(IDS[:, :1], past_key_values=one)
    assert found[1] == [[6], [6]]


def test_sequences_that_pass_in_turns_are_refused(llama: Any) -> None:
    for other in ({"past_key_values": transformers.DynamicCache()}, {"use_cache": False}):
        with pytest.raises(hl.HooklineError, match=says("sequences pass in turns")):
            with hl.edit(llama, "model.layers.0[:, @7]", torch.neg):
                cache = llama(IDS, attention_mask=MASK, past_key_values=transformers.DynamicCache()).past_key_values
                llama(IDS, **other)
                llama(IDS[:, :1], past_key_values=cache)
    found: list[Any] = []
    caches = [transformers.DynamicCache(), transformers.DynamicCache()]
    with hl.edit(llama, "model.layers.0", lambda _, call: found.append(call.tokens[0].tolist()), with_call=True):
        for length in (6, 10):  # Two chats, each with a second turn.
            for cache in caches:
                ids = IDS[:, :1].repeat(1, length)
                llama.generate(ids, past_key_values=cache, max_new_tokens=2, do_sample=False)
    assert found == [[*range(6)], [6]] * 2 + [[7, 8, 9], [10]] * 2


def test_a_third_cache_does_not_hide_the_first(llama: Any) -> None:
    with pytest.raises(hl.HooklineError, match=says("sequences pass in turns")):
        with hl.edit(llama, "model.layers.0[:, @7]", torch.neg):
            caches = [llama(IDS, past_key_values=transformers.DynamicCache()).past_key_values for _ in range(3)]
            llama(IDS[:, :1], past_key_values=caches[0])


def test_the_padding_of_one_row_is_that_of_all_rows_made_of_it() -> None:
    class Heads(Net):
        def forward(self, ids: Tensor, attention_mask: Any = None) -> Tensor:
            return self.layer(self.embed(ids).expand(3, -1, -1))

    with hl.edit(model := Heads(), "layer[:, @0]", lambda value: value * 0):
        output = model(IDS[:1], attention_mask=MASK[:1])
    assert (output == 0).all(-1).nonzero().tolist() == [[0, 2], [1, 2], [2, 2]]


def test_a_mask_of_other_numbers_is_refused() -> None:
    with pytest.raises(hl.HooklineError, match=says("does not tell which tokens")):
        with hl.edit(Net(), "layer[:, @0]", torch.neg) as _:
            model = Net()
            with hl.edit(model, "layer[:, @0]", torch.neg):
                model(IDS, attention_mask=(1.0 - MASK) * -1e4)


def test_a_window_that_moves_over_its_sequence_is_refused() -> None:
    model = Net()
    with pytest.raises(hl.HooklineError, match=says("a window that moves over")):
        with hl.edit(model, "layer[:, @0]", torch.neg):
            model(IDS)
            model(torch.cat([IDS[:, 1:], IDS[:, :1]], 1))


def test_what_a_function_tells_may_have_padding() -> None:
    model = Net()
    indices = torch.where(MASK != 0, MASK.cumsum(1) - 1, -1)

    def tell(ids: Tensor, position_ids: Any = None) -> Tensor:
        return indices if ids.shape[1] == 6 else indices[:, -1:] + position_ids

    hl.tell_tokens(model, tell)
    with (
        hl.capture(model, "layer[:, @prompt[-1]]", "layer[:, @new]") as acts,
        hl.capture(model, "layer", keep="all") as whole,
    ):
        model(IDS)
        for step in (1, 2):
            model(IDS[:, :1] + step, position_ids=step)
    assert whole.tokens("layer").shape == (2, 8, 4)
    assert acts["layer[:, @prompt[-1]]"].equal(whole.tokens("layer")[:, 5])
    assert acts["layer[:, @new]"].equal(whole.tokens("layer")[:, 6:])
    hl.tell_tokens(model, lambda *_, **__: None)
    assert tokens_of(model, {"ids": IDS}) == [(0, [[0, 1, 2, 3, 4, 5]] * 2)]


def test_a_method_that_tells_does_not_keep_its_model_alive() -> None:
    class Telling(Net):
        def tell(self, ids: Tensor) -> Tensor:
            return torch.arange(ids.shape[1]).expand(ids.shape)

    model = Telling()
    hl.tell_tokens(model, model.tell)
    assert tokens_of(model, {"ids": IDS}) == [(0, [[0, 1, 2, 3, 4, 5]] * 2)]
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_tokens_that_a_head_does_not_get_are_refused(llama: Any) -> None:
    with pytest.raises(hl.HooklineError, match=says("tokens the head gets the", 6, 1)):
        with hl.capture(llama, "lm_head[:, @prompt]"):
            llama.generate(IDS, max_new_tokens=2, do_sample=False)
    with hl.capture(llama, "lm_head[:, @prompt[-1]]", "lm_head[:, @new]") as acts:
        llama.generate(IDS, max_new_tokens=3, do_sample=False)
    assert [value.shape[1] for value in acts.values()] == [30, 2]


def test_captures_of_new_tokens_in_a_beam_search_are_refused(llama: Any) -> None:
    options = {"max_new_tokens": 3, "do_sample": False, "num_beams": 2}
    with pytest.raises(hl.HooklineError, match=says("beam search goes on from", "model.layers.0[:, @new]")):
        with hl.capture(llama, "model.layers.0[:, @new]"):
            llama.generate(IDS, **options)
    with hl.capture(llama, "model.layers.0[:, @prompt]") as acts:
        llama.generate(IDS, **options)
    assert acts["model.layers.0[:, @prompt]"].shape == (4, 6, 16)


def test_a_transform_of_several_tokens_needs_every_call(llama: Any) -> None:
    with pytest.raises(hl.HooklineError, match=says("transform= gets the tokens of", "all")):
        hl.capture(llama, "model.layers.0[:, @new]", transform=torch.abs)
    with hl.capture(llama, "model.layers.0[:, @new]", transform=lambda value: value.sum(-1), keep="all") as acts:
        llama.generate(IDS, max_new_tokens=3, do_sample=False)
    assert [value.shape for value in acts.calls("model.layers.0[:, @new]")] == [(2, 1), (2, 1)]


def test_a_stop_behind_tokens_that_some_rows_lack_says_so(llama: Any) -> None:
    with pytest.raises(hl.NeverFired, match=says("did not fire not", 8)):
        options = {"attention_mask": MASK, "max_new_tokens": 3, "do_sample": False}
        hl.run(llama.generate, IDS, **options, capture="model.layers.0[:, @7]", stop=True)


def test_a_change_says_which_rows_lack_a_token_that_was_named_for_them() -> None:
    model = Net()

    def run() -> None:
        with hl.patch(model, {("layer", hl.tokens([3, 30])): 0.0}):
            model(IDS)

    (message,) = said(run)
    assert message == "'layer[:, @(3, 30)]' did not change all its tokens in row 1: their sequences have fewer tokens"


def test_a_patch_with_too_many_values_for_its_tokens_is_refused() -> None:
    for count in (2, 4):
        with pytest.raises(hl.EditError, match=says("the value is for", count, 3)):
            hl.run(Net(), IDS, patch={"layer[:, @1:4]": torch.zeros(2, count, 4)})


def test_gradients_of_tokens_that_pass_in_several_calls_are_refused(llama: Any) -> None:
    with pytest.raises(hl.HooklineError, match=says("these tokens pass in several")):
        with hl.capture(llama, "model.layers.0:grad_output[:, @1:6]"):
            cache = llama(IDS[:, :3]).past_key_values
            llama(IDS[:, 3:], past_key_values=cache)


def test_a_range_of_calls_keeps_all_of_them_also_of_a_function() -> None:
    class Twice(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(torch.relu(x) - 1)

    model = nn.Sequential(Twice())
    with hl.capture(model, "0#1:/relu#0", "0/relu#:") as acts:
        for _ in range(3):
            model(torch.ones(2))
    assert [len(acts.calls(site)) for site in ("0#1:/relu#0", "0/relu#:")] == [2, 6]
    with pytest.raises(hl.SiteError, match=says("goes behind the function", "#*", "0/relu#*")):
        hl.capture(model, "0#*/relu")


def test_a_mismatch_with_labels_that_only_look_like_tokens_tells_nothing() -> None:
    class Labelled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, labels: Tensor, x: Tensor) -> Tensor:
            return self.layer(x)

    model = Labelled()
    with hl.capture(model, "layer[:, @3]") as acts:
        output = model(torch.zeros(2, 1, dtype=torch.long), torch.randn(2, 8, 4))
    assert acts["layer[:, @3]"].equal(output[:, 3])
    with hl.capture(model, "layer", keep="all") as acts:
        model(torch.zeros(2, 1, dtype=torch.long), torch.randn(2, 8, 4))
    assert len(copy.deepcopy(acts)) == 1


class Wrapper(nn.Module):
    """Gives a model the arguments in a batch."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: dict[str, Any]) -> Any:
        return self.model(**batch)


def test_a_batch_is_looked_into_also_as_a_keyword() -> None:
    batch = {"ids": IDS, "attention_mask": MASK}
    for given in ({"batch": batch}, {"batch": batch, "attention_mask": None}):
        model = Wrapper(Net())
        model.forward = lambda batch, attention_mask=None, model=model: model.model(**batch)  # type: ignore[method-assign]
        assert tokens_of(model, given, where="model.layer")[0][1] == [[-1, -1, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5]]


def test_a_model_that_generates_in_its_own_forward_is_refused(llama: Any) -> None:
    class Writer(Wrapper):
        def forward(self, words: Any) -> Any:
            return self.model.generate(words, max_new_tokens=3, do_sample=False)

    for selector in ("@0", "@prompt", "@new"):
        with pytest.raises(hl.HooklineError, match=says("columns pass here and later", 6, 1)):
            writer = Writer(llama)
            with hl.edit(writer, f"model.model.layers.0[:, {selector}]", torch.neg):
                writer(IDS)


def test_a_cache_that_is_used_again_for_another_prompt_is_refused() -> None:
    class Cache:
        """Tells no length, as it may have been emptied."""

    cache, positions = Cache(), torch.arange(6)[None]
    first = {"ids": IDS, "past": cache}
    with pytest.raises(hl.HooklineError, match=says("the cache does not tell")):
        with hl.edit(model := Net(), "layer[:, @2]", torch.neg):
            model(**first)
            model(**first)
    one = {"ids": IDS[:, :1], "past": cache}
    told = [{**first, "position_ids": positions}, {**first, "position_ids": positions + 6}, one]
    whole = [[*range(6)]] * 2
    assert [rows[0] for _, rows in tokens_of(Net(), *told)] == [[*range(6)], [*range(6, 12)], [12]]
    assert tokens_of(Net(), told[0], one, told[0]) == [(0, whole), (1, [[6], [6]]), (0, whole)]
    assert tokens_of(Net(), told[0], {**told[1], "past": Cache()})[1] == (0, [[*range(6, 12)]] * 2)


def test_steps_behind_a_padded_prompt_count_on_without_a_mask() -> None:
    pasts = [(torch.zeros(2, 2, held, 4),) for held in (6, 7, 8)]
    steps = [{"ids": IDS[:, :1], "past": past} for past in pasts]
    assert [rows for _, rows in tokens_of(Net(), {"ids": IDS, "attention_mask": MASK}, *steps)[1:]] == [
        [[4], [6]], [[5], [7]], [[6], [8]],
    ]  # fmt: skip


def test_what_is_unknown_of_one_sequence_does_not_matter_for_the_next() -> None:
    model = Net()
    with hl.edit(model, "layer[:, @0]", lambda value: value * 0):
        model(IDS)
        with pytest.raises(hl.HooklineError, match=says("the cache does not tell")):
            model(IDS[:, :1], past=object())
        assert bool((model(IDS, past=(torch.zeros(2, 2, 0, 4),))[:, 0] == 0).all())


def test_the_state_of_a_recurrent_model_does_not_tell_how_many_tokens_passed() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.cell, self.head = nn.Embedding(30, 4), nn.GRU(4, 4, batch_first=True), nn.Linear(4, 4)

        def forward(self, words: Tensor, hidden: Tensor | None = None) -> Any:
            value, hidden = self.cell(self.embed(words), hidden)
            return self.head(value), hidden

    model = Recurrent()
    with pytest.raises(hl.HooklineError, match=says("the cache does not tell")):
        with hl.edit(model, "head[:, @0]", torch.neg):
            _, hidden = model(IDS)
            model(IDS[:, :1], hidden)


def test_ids_of_one_row_beside_a_cache_are_refused() -> None:
    with pytest.raises(hl.HooklineError, match=says("is given a cache")):
        with hl.edit(model := Net(), "layer[@0]", torch.neg):
            model(IDS[0, :1], past=transformers.DynamicCache())
    with hl.capture(model, "layer[@0]") as acts:
        output = model(IDS[0], past=False)
    assert acts["layer[@0]"].equal(output[0])


def test_masks_of_other_forms_are_read_or_refused() -> None:
    padded = [[-1, -1, 0, 1, 2, 3]] * 2
    assert tokens_of(Net(), {"ids": IDS, "attention_mask": MASK[:1]}) == [(0, padded)]
    before = {"ids": IDS, "attention_mask": MASK}
    window = {"ids": IDS[:, :1], "past": (torch.zeros(2, 2, 6, 4),), "attention_mask": MASK[:, :4]}
    assert tokens_of(Net(), before, window)[1] == (1, [[4], [6]])
    for mask in (torch.zeros(2, 6), MASK[:, :3]):
        with pytest.raises(hl.HooklineError, match=says("does not tell which tokens")):
            with hl.edit(model := Net(), "layer[:, @0]", torch.neg):
                model(IDS, attention_mask=mask)


def test_a_mask_that_is_reordered_with_its_cache_tells_the_padding_of_each_row() -> None:
    steps = [{"ids": IDS, "attention_mask": MASK}]
    for step, order in ((1, [0, 1]), (2, [1, 0])):
        more = torch.ones(2, step, dtype=torch.long)
        past = (torch.zeros(2, 2, 5 + step, 4),)
        steps.append({"ids": IDS[:, :1], "past": past, "attention_mask": torch.cat([MASK, more], 1)[order]})
    assert [rows for _, rows in tokens_of(Net(), *steps)[1:]] == [[[4], [6]], [[7], [5]]]


def test_masks_of_four_dimensions_are_not_kept() -> None:
    model, mask = Net(), torch.zeros(2, 1, 6, 6)
    gone = weakref.ref(mask)
    with hl.capture(model, "layer", keep="all"):
        model(IDS, attention_mask=mask)
        del mask
        gc.collect()
        assert gone() is None


def test_a_function_tells_the_prompt_of_each_row() -> None:
    model, indices = Net(), torch.arange(6).expand(2, 6)
    for prompt, expected in ((torch.tensor([2, 4]), [2, 4]), ([3, 5], [3, 5]), (4, [4, 4])):
        hl.tell_tokens(model, lambda ids, prompt=prompt: (indices[:, : ids.shape[1]], prompt))
        with hl.edit(model, "layer[:, @new]", lambda value: value * 0 + 100):
            for end in (5, 6):  # Without a cache.
                value = model(IDS[:, :end])[..., 0]
                assert [(row == 100).nonzero().flatten().tolist() for row in value] == [
                    [*range(start, end)] for start in expected
                ]
    for prompt in ([1, 2, 3], 1.5, torch.zeros(2, 1, dtype=torch.long)):
        hl.tell_tokens(model, lambda ids, prompt=prompt: (indices, prompt))
        with pytest.raises(hl.HooklineError, match=says("it must be the number")):
            tokens_of(model, {"ids": IDS})


@pytest.fixture(scope="module")
def t5() -> Any:
    torch.manual_seed(0)
    config = transformers.T5Config(
        d_model=16, d_kv=8, d_ff=16, num_layers=2, num_heads=2, vocab_size=30, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config).eval()


def test_the_labels_of_an_encoder_decoder_tell_the_tokens_of_its_decoder(t5: Any) -> None:
    given = {"input_ids": IDS, "attention_mask": MASK, "labels": IDS[:, :3].contiguous()}
    assert tokens_of(t5, given, where="decoder.block.0[0][:, @2]") == [(0, [[0, 1, 2]] * 2)]


def test_an_encoder_decoder_in_another_model_has_two_sequences(t5: Any) -> None:
    model = Wrapper(t5)
    for length in (3, 6):
        given = {"input_ids": IDS, "attention_mask": MASK, "decoder_input_ids": IDS[:, :length]}
        sites = [f"model.{part}.block.0[0][:, @prompt[-2:]]" for part in ("encoder", "decoder")]
        with hl.capture(model, sites, "model.encoder.block.0[0]", "model.decoder.block.0[0]") as acts:
            model(given)
        for site in sites:
            assert acts[site].equal(acts[site.partition("[:")[0]][:, -2:])


def test_captures_of_tokens_behind_a_cache_need_those_in_it(llama: Any) -> None:
    with torch.no_grad():
        cache = llama(IDS[:, :4]).past_key_values
    with pytest.raises(hl.HooklineError, match=says("these tokens passed before", "@4:")):
        hl.run(llama, IDS[:, 4:], past_key_values=copy.deepcopy(cache), capture="model.layers.0[:, @2:6]")
    _, acts = hl.run(llama, IDS[:, 4:], past_key_values=cache, capture="model.layers.0[:, @4:]")
    assert acts["model.layers.0[:, @4:]"].shape == (2, 2, 16)


def test_captures_of_tokens_of_rows_that_are_dropped_are_refused(llama: Any) -> None:
    for selector in ("@:", "@6"):
        with pytest.raises(hl.HooklineError, match=says("the number of rows changed in")):
            with hl.capture(llama, f"model.layers.0[:, {selector}]"):
                cache = llama(IDS).past_key_values
                cache.batch_select_indices(torch.tensor([1]))
                llama(IDS[1:, :1], past_key_values=cache)
    with hl.capture(llama, "model.layers.0[:, @7]") as acts:
        cache = llama(IDS).past_key_values
        cache.batch_select_indices(torch.tensor([1]))
        cache = llama(IDS[1:, :2]).past_key_values
        llama(IDS[1:], past_key_values=cache)
    assert acts["model.layers.0[:, @7]"].shape == (1, 16)
