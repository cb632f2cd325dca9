"""Attention patterns of real architectures: captured, patched, differentiated, and seen step by step."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import hookline as hl
from hookline._kernel import leaves
from tests.support.real_models import ids, prepared
from tests.support.states import state_of

transformers = pytest.importorskip("transformers")


class Attentive(NamedTuple):
    """The attention modules of an architecture, and the numbers of the transpose calls for query, key and value."""

    layers: str
    query: int
    key: int
    value: int

    def at(self, layer: int | str) -> str:
        return self.layers.format(layer)


ATTENTION = {
    "GPT-2": Attentive("transformer.h.{}.attn", 2, 0, 1),
    "Llama": Attentive("model.layers.{}.self_attn", 0, 1, 2),
    "BERT": Attentive("encoder.layer.{}.attention.self", 0, 1, 2),
    "ViT": Attentive("layers.{}.attention", 0, 1, 2),
}
EVERY_MODEL = pytest.mark.parametrize("name", ATTENTION)
GREEDY = {"max_new_tokens": 4, "do_sample": False}


def eager(name: str) -> tuple[nn.Module, dict[str, Tensor], Attentive]:
    model, inputs, _ = prepared(name)
    model.set_attn_implementation("eager")
    return model, inputs, ATTENTION[name]


def first_tensor(output: Any) -> Tensor:
    return leaves(output)[0]


@EVERY_MODEL
def test_the_captured_pattern_is_the_one_that_the_model_itself_returns(name: str) -> None:
    model, inputs, attention = eager(name)
    with torch.no_grad():
        expected = model(**inputs, output_attentions=True)
        before = state_of(model)  # After the first such call, which installs transformers' own hooks.
        with hl.capture(model, attention.at("*") + "/softmax") as acts:
            output = model(**inputs)
    assert list(acts) == [f"{attention.at(layer)}/softmax" for layer in (0, 1)]
    assert all(torch.equal(*pair) for pair in zip(acts.values(), expected.attentions, strict=True))
    assert first_tensor(output).equal(first_tensor(expected))
    assert state_of(model) == before


@EVERY_MODEL
def test_the_pattern_is_found_by_looking_before_anything_runs(name: str) -> None:
    model, inputs, attention = eager(name)
    sites = [str(site) for site in hl.sites(model, "**/softmax", run=inputs)]
    assert sites == [f"{attention.at(layer)}/softmax" for layer in (0, 1)]
    listed = hl.sites(model, attention.at(0) + "/*", run=inputs)
    names = [str(site).rpartition("/")[2] for site in listed]
    assert names.index("matmul#0") < names.index("softmax") < names.index("matmul#1")
    heads = first_tensor(model(**inputs, output_attentions=True).attentions[0]).shape
    (row,) = [row for row in repr(listed).splitlines() if "/softmax " in row]
    assert str(tuple(heads)) in row
    assert f"modeling_{type(model).__module__.split('.')[-2]}.py" in row


@EVERY_MODEL
def test_a_patched_head_gives_what_the_models_own_attention_gives_when_it_is_rewritten(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs, attention = eager(name)
    target = model.get_submodule(attention.at(1))
    source = sys.modules[type(target).__module__]
    own = source.eager_attention_forward

    def rewritten(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
    ) -> Any:
        if module is not target:
            return own(module, query, key, value, mask, **options)
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        scores = query @ key.mT * options["scaling"]
        pattern = torch.softmax(scores if mask is None else scores + mask, -1)
        pattern[:, 0] = 1 / pattern.shape[-1]
        return (pattern @ value).transpose(1, 2), pattern

    with torch.no_grad():
        plain = first_tensor(model(**inputs))
        length = hl.run(model, **inputs, capture=attention.at(1) + "/softmax")[1][attention.at(1) + "/softmax"].shape[
            -1
        ]
        with hl.patch(model, {attention.at(1) + "/softmax[:, 0]": 1 / length}):
            patched = first_tensor(model(**inputs))
        edited = hl.run(
            model, **inputs, edit={attention.at(1) + "/softmax[:, 0]": lambda value: torch.full_like(value, 1 / length)}
        )
        assert first_tensor(model(**inputs)).equal(plain)
        monkeypatch.setattr(source, "eager_attention_forward", rewritten)
        expected = first_tensor(model(**inputs))
    torch.testing.assert_close(patched, expected)
    assert patched.equal(first_tensor(edited))
    assert not torch.allclose(patched, plain)


@EVERY_MODEL
def test_query_key_and_value_are_captured_after_their_reshape(name: str) -> None:
    model, inputs, attention = eager(name)
    at = attention.at(1)
    sites = {part: f"{at}/transpose#{getattr(attention, part)}" for part in ("query", "key", "value")}
    projections = {
        "GPT-2": {"query": ".c_attn[..., :16]", "key": ".c_attn[..., 16:32]", "value": ".c_attn[..., 32:]"},
        "BERT": {"query": ".query", "key": ".key", "value": ".value"},
    }.get(name, {"query": ".q_proj", "key": ".k_proj", "value": ".v_proj"})
    where = [*sites.values(), *(at + site for site in projections.values()), f"{at}/matmul#1", f"{at}/softmax"]
    with torch.no_grad():
        acts = hl.run(model, **inputs, capture=[*where, f"{at}/view#0"])[1]
    for part, site in sites.items():
        projected = acts[at + projections[part]]
        assert acts[site].equal(projected.unflatten(-1, (-1, 8)).transpose(1, 2)), part
        assert acts[site].shape[-1] == 8
    value = acts[sites["value"]]
    value = value.repeat_interleave(acts[f"{at}/softmax"].shape[1] // value.shape[1], 1)
    torch.testing.assert_close(acts[f"{at}/matmul#1"], acts[f"{at}/softmax"] @ value)
    assert acts[f"{at}/view#0"].shape[-2:] == (acts[f"{at}/transpose#0"].shape[1], 8)


@EVERY_MODEL
def test_the_gradient_of_a_pattern_is_that_of_the_models_own(name: str) -> None:
    model, inputs, attention = eager(name)
    sites = [f"{attention.at(layer)}/softmax:grad_output" for layer in (0, 1)]
    output = model(**inputs, output_attentions=True)
    expected = torch.autograd.grad((first_tensor(output) ** 2).sum(), output.attentions)
    with hl.capture(model, *sites) as acts:
        (first_tensor(model(**inputs)) ** 2).sum().backward()
    model.zero_grad(set_to_none=True)
    for site, gradient in zip(sites, expected, strict=True):
        assert gradient.count_nonzero() > 0
        torch.testing.assert_close(acts[site], gradient)


@EVERY_MODEL
def test_a_fused_attention_names_the_eager_implementation_to_choose(name: str) -> None:
    model, inputs, _ = prepared(name)
    model.set_attn_implementation("sdpa")
    site = ATTENTION[name].at(1) + "/softmax"
    says = r"scaled_dot_product_attention.*set_attn_implementation\(.eager.\), or attn_implementation=.eager"
    with pytest.raises(hl.NeverFired, match=f"'{site}'.*{says}"), torch.no_grad():
        hl.run(model, **inputs, capture=site)
    with pytest.warns(hl.HooklineWarning, match=says), torch.no_grad():
        acts = hl.run(model, **inputs, capture=ATTENTION[name].at("*") + "/softmax")[1]
    with pytest.raises(hl.NotCaptured, match=says):
        acts[site]
    fused = ATTENTION[name].at(1) + "/scaled_dot_product_attention"
    with torch.no_grad():
        acts = hl.run(model, **inputs, capture=[fused, f'{fused}:inputs["query"]'])[1]
    assert acts[fused].shape == acts[f'{fused}:inputs["query"]'].shape


@pytest.mark.parametrize("name", ["GPT-2", "Llama"])
def test_a_step_of_a_generation_is_seen_and_patched(name: str) -> None:
    model, _, attention = eager(name)
    site, step = attention.at(1) + "/softmax", attention.at(1) + "#2/softmax"
    expected = model.generate(ids(), output_attentions=True, return_dict_in_generate=True, **GREEDY)
    output, acts = hl.run(model.generate, ids(), capture=[step], **GREEDY)
    assert output.equal(expected.sequences)
    assert acts[step].equal(expected.attentions[2][1])
    with hl.capture(model, site, keep="all") as acts:
        model.generate(ids(), **GREEDY)
    assert [value.shape[-1] for value in acts.calls(site)] == [7, 8, 9, 10]
    assert all(value.equal(step[1]) for value, step in zip(acts.calls(site), expected.attentions, strict=True))
    with hl.patch(model, {step: 0.0}), hl.capture(model, attention.at(1) + "/matmul#1", keep="all") as acts:
        model.generate(ids(), **GREEDY)
    assert [bool(value.count_nonzero()) for value in acts.calls(attention.at(1) + "/matmul#1")] == [
        True, True, False, True,
    ]  # fmt: skip
    stopped, acts = hl.run(model.generate, ids(), capture=step, stop=True, **GREEDY)
    assert stopped is None
    assert acts[step].equal(expected.attentions[2][1])


def test_a_pattern_is_patched_from_another_run() -> None:
    model, inputs, attention = eager("GPT-2")
    other = {"input_ids": inputs["input_ids"].flip(1)}
    pattern, mixed, value = (f"{attention.at(1)}/{name}" for name in ("softmax", "matmul#1", "transpose#1"))
    with torch.no_grad():
        clean = hl.run(model, **inputs, capture=attention.at("*") + "/softmax")[1]
        corrupted = hl.run(model, **other, capture=pattern)[1]
        with hl.patch(model, clean.select(pattern)), hl.capture(model, pattern, mixed, value) as acts:
            model(**other)
    assert acts[pattern].equal(clean[pattern])
    assert not acts[pattern].allclose(corrupted[pattern])
    torch.testing.assert_close(acts[mixed], clean[pattern] @ acts[value])


def test_gradient_checkpointing_of_a_model_edits_its_patterns_alike() -> None:
    model, inputs, attention = eager("Llama")
    model.train()
    site = attention.at(0) + "/softmax[:, 1]"

    def gradients() -> list[Tensor]:
        with (
            hl.edit(model, site, lambda value: value * 0.5),
            hl.capture(model, attention.at(0) + "/softmax", keep="all") as acts,
        ):
            (model(**inputs, use_cache=False).logits ** 2).sum().backward()
        assert len(acts.calls(attention.at(0) + "/softmax")) == 1
        found = [parameter.grad for parameter in model.parameters()]
        model.zero_grad(set_to_none=True)
        return found

    expected = gradients()
    for reentrant in (False, True):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        torch.testing.assert_close(gradients(), expected)
