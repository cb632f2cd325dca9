"""Small models of transformers, a tokenizer of a few words, and what passes when a text runs by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookline as hl
from tests.support.real_models import TEXT, bert, gpt2, llama

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "dog", "ran", "to", "it", "now"]
SENTENCES = ["the cat sat on a mat", "a dog ran", "it", "the dog sat on the cat and ran to a mat now", "now the cat"]


def tokenizer(side: str = "right", pad: str | None = "[PAD]", **options: Any) -> Any:
    """A tokenizer of words; number 0 is padding if there is any."""
    model = tokenizers.models.WordLevel({word: at for at, word in enumerate(["[PAD]", "[UNK]", *WORDS])}, "[UNK]")
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="[UNK]", pad_token=pad, padding_side=side, **options
    )


def numbers(text: str) -> list[int]:
    return [WORDS.index(word) + 2 for word in text.split()]


def of(build: Callable[[], nn.Module], seed: int = 0) -> Any:
    """A model whose weights are large enough that every position matters."""
    torch.manual_seed(seed)
    model = build().eval()
    for parameter in model.parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=0.3)
    return model


def alone(model: nn.Module, site: str, text: str, **more: Any) -> Tensor:
    """What passes at a site when one text runs by itself, with no padding."""
    ids = torch.tensor([numbers(text)])
    with torch.no_grad(), hl.capture(model, site) as acts:
        model(input_ids=ids, attention_mask=torch.ones_like(ids), **more)
    return acts[site][0]


def near(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


def roberta() -> nn.Module:
    return transformers.RobertaModel(
        transformers.RobertaConfig(vocab_size=64, max_position_embeddings=34, pad_token_id=0, **TEXT)
    )


def opt() -> nn.Module:
    return transformers.OPTForCausalLM(
        transformers.OPTConfig(
            vocab_size=64, hidden_size=16, word_embed_proj_dim=16, ffn_dim=32, num_hidden_layers=2,
            num_attention_heads=2, max_position_embeddings=32, pad_token_id=0, bos_token_id=None, eos_token_id=None,
        )
    )  # fmt: skip


MODELS = {
    "GPT-2": (gpt2, "transformer.h.1"),
    "Llama": (llama, "model.layers.1"),
    "BERT": (bert, "encoder.layer.1"),
    "RoBERTa": (roberta, "encoder.layer.1"),
    "OPT": (opt, "model.decoder.layers.1"),
}
