"""Tokens on a GPU: the same ones are changed whatever cache a model generates with, also where it compiles itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookline as hl

transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
    # Where the graph breaks at a hook, a part of it may hold no kernels.
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning"),
]

CACHES: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "none": {"use_cache": False},
    "static, compiled": {"cache_implementation": "static"},
    "in chunks": {"prefill_chunk_size": 3},
}
PLACE = "model.layers.1"


def llama() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=40, pad_token_id=0, bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval().cuda()


def prompts(padded: bool) -> tuple[Tensor, Tensor]:
    ids = torch.tensor([[5, 6, 7, 8, 9, 3, 4], [9, 8, 7, 6, 5, 4, 3]], device="cuda")
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :2] = 0
    return ids, mask


def generate(model: Any, ids: Tensor, mask: Tensor, **options: Any) -> Tensor:
    return model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False, **options)


def expected(model: Any, site: str, ids: Tensor, mask: Tensor) -> Tensor:
    """Generate without a cache by hand, and change the tokens with a hook that counts them by itself."""
    chosen = {"@2:9": range(2, 9), "@new": None, "@prompt[-1]": -1}[site]

    def hook(_module: nn.Module, _args: Any, output: Any) -> Any:
        value = (output[0] if isinstance(output, tuple) else output).clone()
        for row in range(len(value)):
            start = int((mask[row] == 0).sum())
            columns = range(ids.shape[1], value.shape[1]) if chosen is None else [ids.shape[1] - 1]
            if isinstance(chosen, range):
                columns = [start + index for index in chosen if start + index < value.shape[1]]
            value[row, [*columns]] += 3.0
        return (value, *output[1:]) if isinstance(output, tuple) else value

    handle = model.model.layers[1].register_forward_hook(hook)
    whole, known = ids, mask
    for _ in range(6):
        positions = (known.cumsum(1) - 1).clamp(min=0)
        logits = model(whole, attention_mask=known, position_ids=positions, use_cache=False).logits
        whole = torch.cat([whole, logits[:, -1:].argmax(-1)], 1)
        known = torch.cat([known, torch.ones_like(known[:, :1])], 1)
    handle.remove()
    return whole


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("site", ["@2:9", "@new", "@prompt[-1]"])
@pytest.mark.parametrize("cache", CACHES)
def test_the_same_tokens_are_changed_with_every_cache(cache: str, site: str, padded: bool) -> None:
    model, (ids, mask) = llama(), prompts(padded)
    with torch.no_grad():
        right = expected(model, site, ids, mask)
        with hl.edit(model, f"{PLACE}[:, {site}]", lambda value: value + 3.0):
            words = generate(model, ids, mask, **CACHES[cache])
        plain = generate(model, ids, mask, **CACHES[cache])
    assert words.equal(right)
    assert not words.equal(plain)


@pytest.mark.parametrize("cache", CACHES)
def test_the_tokens_of_a_generation_are_those_of_one_forward(cache: str) -> None:
    model, (ids, mask) = llama(), prompts(padded=True)
    with torch.no_grad():
        with hl.capture(model, PLACE, keep="all") as acts:
            words = generate(model, ids, mask, **CACHES[cache])
        known = torch.cat([mask, torch.ones_like(mask[:, :5])], 1)
        positions = (known.cumsum(1) - 1).clamp(min=0)
        _, whole = hl.run(model, words[:, :-1], attention_mask=known, position_ids=positions, capture=PLACE)
    torch.testing.assert_close(acts.tokens(PLACE)[known != 0], whole[PLACE][known != 0], atol=1e-4, rtol=1e-4)
