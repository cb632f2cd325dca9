"""Small models of real architectures with random weights, an input for each, and a tokenizer of a few words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import hookline as hl

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

TEXT = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
GENERATES = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}


class Real(NamedTuple):
    """One architecture: how to build it, its inputs, and a layer that outputs hidden states."""

    build: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Tensor]]
    layer: str


def ids(length: int = 7) -> Tensor:
    return torch.arange(1, length + 1)[None]


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=2, n_head=2, **GENERATES)
    return transformers.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=64, num_key_value_heads=1, max_position_embeddings=32, **TEXT, **GENERATES
    )
    return transformers.LlamaForCausalLM(config)


def bert() -> nn.Module:
    return transformers.BertModel(transformers.BertConfig(vocab_size=64, max_position_embeddings=32, **TEXT))


def vit() -> nn.Module:
    return transformers.ViTModel(transformers.ViTConfig(image_size=16, patch_size=4, **TEXT))


def resnet() -> nn.Module:
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2], layer_type="basic")
    return transformers.ResNetModel(config)


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0,
        eos_token_id=None,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def whisper() -> nn.Module:
    config = transformers.WhisperConfig(
        vocab_size=64, d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, num_mel_bins=8, max_source_positions=16,
        max_target_positions=16, decoder_start_token_id=0, pad_token_id=0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.WhisperForConditionalGeneration(config)


def mixtral() -> nn.Module:
    config = transformers.MixtralConfig(
        vocab_size=64, num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2, **TEXT, **GENERATES
    )
    return transformers.MixtralForCausalLM(config)


def mamba() -> nn.Module:
    config = transformers.MambaConfig(vocab_size=64, hidden_size=16, state_size=4, num_hidden_layers=2, **GENERATES)
    return transformers.MambaForCausalLM(config)


def text() -> dict[str, Tensor]:
    return {"input_ids": ids()}


def translation() -> dict[str, Tensor]:
    return {"input_ids": ids(), "decoder_input_ids": ids(4)}


def speech() -> dict[str, Tensor]:
    return {"input_features": torch.randn(1, 8, 32), "decoder_input_ids": ids(4)}


def picture(size: int) -> Callable[[], dict[str, Tensor]]:
    return lambda: {"pixel_values": torch.randn(2, 3, size, size)}


REAL_MODELS = {
    "GPT-2": Real(gpt2, text, "transformer.h.1"),
    "Llama": Real(llama, text, "model.layers.1"),
    "BERT": Real(bert, text, "encoder.layer.1"),
    "ViT": Real(vit, picture(16), "layers.1"),
    "ResNet": Real(resnet, picture(32), "encoder.stages.0.layers.1"),
    "T5": Real(t5, translation, "decoder.block.1.layer.2"),
    "Whisper": Real(whisper, speech, "model.encoder.layers.1"),
    "Mixtral": Real(mixtral, text, "model.layers.1"),
    "Mamba": Real(mamba, text, "backbone.layers.1"),
}


def prepared(name: str) -> tuple[nn.Module, dict[str, Any], str]:
    """Return a model in eval mode, its inputs and the name of a layer."""
    torch.manual_seed(0)
    real = REAL_MODELS[name]
    return real.build().eval(), real.inputs(), real.layer


WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "dog", "ran", "to", "it", "now"]
SENTENCES = ["the cat sat on a mat", "a dog ran", "it", "the dog sat on the cat and ran to a mat now", "now the cat"]


def tokenizer(side: str = "right", pad: str | None = "[PAD]", **options: Any) -> Any:
    """Return a tokenizer of words; token 0 is the padding, if there is any."""
    model = tokenizers.models.WordLevel({word: at for at, word in enumerate(["[PAD]", "[UNK]", *WORDS])}, "[UNK]")
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="[UNK]", pad_token=pad, padding_side=side, **options
    )


def numbers(text: str) -> list[int]:
    return [WORDS.index(word) + 2 for word in text.split()]


def of(build: Callable[[], nn.Module], seed: int = 0) -> Any:
    """Return a model whose weights are large enough that every position matters."""
    torch.manual_seed(seed)
    model = build().eval()
    for parameter in model.parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=0.3)
    return model


def alone(model: nn.Module, site: str, text: str, **more: Any) -> Tensor:
    """Return the value at a site when one text runs by itself, without padding."""
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


TEXT_MODELS = {
    "GPT-2": (gpt2, "transformer.h.1"),
    "Llama": (llama, "model.layers.1"),
    "BERT": (bert, "encoder.layer.1"),
    "RoBERTa": (roberta, "encoder.layer.1"),
    "OPT": (opt, "model.decoder.layers.1"),
}
