"""Layers that another library puts in place of the original ones: quantized layers and LoRA's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import hookline as hl
from tests.errors.wording import says
from tests.support.models import mlp

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

QUERY = "model.layers.0.self_attn.q_proj"
QUANTIZATION = pytest.mark.skipif(
    not hasattr(torch.ao.quantization, "quantize_dynamic"), reason="needs a torch with eager quantization"
)


def llama() -> nn.Module:
    """Return a Llama with two small layers."""
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def with_lora(model: nn.Module) -> Any:
    """Return the model with LoRA layers whose weights are not zero."""
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, config).eval()


def quantized(model: nn.Module, inplace: bool = False) -> nn.Module:
    """Return the model with its linear layers in int8."""
    return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8, inplace=inplace)


@QUANTIZATION
def test_quantized_layers_are_captured_patched_and_edited_like_others() -> None:
    """E19"""
    model, x = quantized(mlp()), torch.randn(3, 4)
    plain = model(x)
    with hl.capture(model, "0", "1", "2", "2:input") as acts:
        assert torch.equal(model(x), plain)
    assert torch.equal(acts["0"], model[0](x))
    assert torch.equal(acts["2"], plain)
    with hl.patch(model, acts.select("0")):
        assert torch.equal(model(x), plain)
    with hl.edit(model, "0", lambda value: value * 0):
        assert torch.equal(model(x), model[2](torch.zeros(3, 8)))


@QUANTIZATION
def test_the_packed_weights_of_a_quantized_layer_are_said_not_to_be_called() -> None:
    """E19"""
    model, x = quantized(mlp()), torch.randn(3, 4)
    with pytest.raises(hl.NeverFired, match=says("was not called", "0._packed_params")):
        hl.run(model, x, capture="0._packed_params")


@QUANTIZATION
def test_a_layer_that_was_quantized_while_hooked_is_said_to_be_another_one() -> None:
    """E19"""
    model, x = mlp(), torch.randn(3, 4)
    with pytest.raises(hl.NeverFired, match=says("was not called replaced", "0")), hl.capture(model, "0"):
        quantized(model, inplace=True)
        model(x)


@QUANTIZATION
def test_a_tensor_of_a_quantized_type_is_captured_whole() -> None:
    """E19"""
    model = nn.Sequential(nn.Identity(), nn.Identity())
    value = torch.quantize_per_tensor(torch.randn(3, 4), 0.1, 0, torch.qint8)
    with hl.capture(model, "0") as acts:
        model(value)
    assert acts["0"].is_quantized
    assert torch.equal(acts["0"].int_repr(), value.int_repr())


def test_a_lora_layer_is_captured_with_its_delta_under_the_name_of_the_bare_model() -> None:
    """E20"""
    ids = torch.arange(6)[None]
    model = with_lora(llama())
    plain = model(ids).logits
    with hl.capture(model, QUERY, f"{QUERY}.base_layer", f"{QUERY}:input", "model.layers.*") as acts:
        assert torch.equal(model(ids).logits, plain)
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    assert torch.equal(acts[QUERY], layer(acts[f"{QUERY}:input"]))
    assert torch.equal(acts[f"{QUERY}.base_layer"], layer.base_layer(acts[f"{QUERY}:input"]))
    assert not torch.equal(acts[QUERY], acts[f"{QUERY}.base_layer"])
    assert torch.equal(acts[layer], acts[QUERY])


def test_a_lora_model_answers_to_its_full_names_too() -> None:
    """E20"""
    ids = torch.arange(6)[None]
    model = with_lora(llama())
    _, acts = hl.run(model, ids, capture=[f"base_model.model.{QUERY}", "base_model.model.lm_head"])
    assert list(acts) == [QUERY, "lm_head"]


def test_a_layer_that_lora_wrapped_while_hooked_is_not_passed_off_as_the_new_one() -> None:
    """E20: the hook is on the layer that is now the base layer, and misses the delta."""
    ids = torch.arange(6)[None]
    model = llama()
    with pytest.raises(hl.HooklineError, match=f"'{QUERY}'.*(another|replaced|wrapped)"), hl.capture(model, QUERY):
        with_lora(model)(ids)


def test_hooks_that_stay_say_that_lora_wrapped_their_layer() -> None:
    """E20"""
    ids = torch.arange(6)[None]
    model = llama()
    hooks = hl.Hooks(model)
    acts = hooks.capture(QUERY)
    adapted = with_lora(model)
    with pytest.raises((hl.HooklineError, hl.HooklineWarning), match=f"'{QUERY}'.*(another|replaced|wrapped)"):
        adapted(ids)
        acts[QUERY]
    hooks.remove()


def test_an_edit_on_a_lora_layer_acts_and_merging_brings_the_old_names_back() -> None:
    """E20"""
    ids = torch.arange(6)[None]
    bare = llama()
    model = with_lora(copy.deepcopy(bare))
    with model.disable_adapter():
        assert torch.allclose(model(ids).logits, bare(ids).logits)
    with hl.patch(model, {QUERY: 0.0}), hl.patch(bare, {QUERY: 0.0}):
        one, other = model(ids).logits, bare(ids).logits
    assert one.shape == other.shape
    _, expected = hl.run(model, ids, capture=QUERY)
    merged = model.merge_and_unload()
    _, acts = hl.run(merged, ids, capture=QUERY)
    assert torch.allclose(acts[QUERY], expected[QUERY], atol=1e-6)


def test_gradients_reach_lora_weights_through_hooked_layers() -> None:
    """E20"""
    ids = torch.arange(6)[None]
    model = with_lora(llama()).train()
    model(ids, labels=ids).loss.backward()
    plain = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    assert all("lora" in name for name in plain)
    model.zero_grad()
    with hl.capture(model, f"{QUERY}:grad_output", "model.layers.*") as acts:
        model(ids, labels=ids).loss.backward()
    assert acts[f"{QUERY}:grad_output"].count_nonzero() > 0
    for name, weight in model.named_parameters():
        assert name not in plain or torch.equal(weight.grad, plain[name])


def test_an_adapter_that_is_not_used_is_given_as_the_reason_why_its_layers_do_not_fire() -> None:
    model = peft.get_peft_model(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), peft.LoraConfig(target_modules=["0"]))
    x = torch.ones(2, 4)
    with pytest.raises(hl.NeverFired, match=says("the adapters are disabled at", "0.lora_A.default", "0", "0")):
        with model.disable_adapter():
            hl.run(model, x, capture="0.lora_A.default")
    model.add_adapter("other", peft.LoraConfig(target_modules=["0"]))
    with pytest.raises(hl.NeverFired, match=says("is not active at", "other", "0")):
        hl.run(model, x, patch={"0.lora_B.other": 0.0})
    model.merge_adapter()
    with pytest.raises(hl.NeverFired, match=says("the adapters are merged into", "0")):
        hl.run(model, x, capture="0.lora_A.default")
    model.unmerge_adapter()
    assert list(hl.run(model, x, capture="0.lora_A.default")[1]) == ["0.lora_A.default"]
