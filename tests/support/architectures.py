"""Every architecture of which transformers can build a small model from its config alone, with a fitting input.

There is no list of these models here: the sizes are set by the names that configs share.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")
from transformers.models.auto import modeling_auto  # noqa: E402

WIDTH, HEADS, LAYERS, WORDS, IMAGE = 16, 2, 2, 64, 32
SMALL: dict[str, Any] = {
    "hidden_size": WIDTH, "d_model": WIDTH, "n_embd": WIDTH, "dim": WIDTH, "embed_dim": WIDTH, "embedding_size": WIDTH,
    "emb_dim": WIDTH, "model_dim": WIDTH, "hidden_dim": WIDTH, "encoder_hidden_size": WIDTH,
    "decoder_hidden_size": WIDTH,
    "word_embed_proj_dim": WIDTH, "projection_dim": WIDTH, "lru_width": WIDTH, "attention_hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH, "ffn_dim": 2 * WIDTH, "d_ff": 2 * WIDTH, "n_inner": 2 * WIDTH, "d_inner": 2 * WIDTH,
    "encoder_ffn_dim": 2 * WIDTH, "decoder_ffn_dim": 2 * WIDTH, "ffn_hidden_size": 2 * WIDTH, "mlp_dim": 2 * WIDTH,
    "moe_intermediate_size": WIDTH, "shared_expert_intermediate_size": WIDTH, "decoder_intermediate_size": 2 * WIDTH,
    "encoder_intermediate_size": 2 * WIDTH, "hidden_dims": None,
    "num_hidden_layers": LAYERS, "n_layer": LAYERS, "n_layers": LAYERS, "num_layers": LAYERS, "encoder_layers": LAYERS,
    "decoder_layers": LAYERS, "num_decoder_layers": LAYERS, "num_encoder_layers": LAYERS, "depth": LAYERS,
    "encoder_num_hidden_layers": LAYERS, "decoder_num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "n_head": HEADS, "n_heads": HEADS, "num_heads": HEADS, "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS, "encoder_num_attention_heads": HEADS, "decoder_num_attention_heads": HEADS,
    "num_key_value_heads": 1, "head_dim": WIDTH // HEADS, "d_kv": WIDTH // HEADS, "kv_channels": WIDTH // HEADS,
    "vocab_size": WORDS, "text_vocab_size": WORDS, "max_position_embeddings": 64, "n_positions": 64, "n_ctx": 64,
    "max_source_positions": 64, "max_target_positions": 64, "seq_length": 64, "image_size": IMAGE, "patch_size": 8,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_num_experts": 4,
    "moe_topk": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "state_size": 4, "mamba_d_state": 4,
    "mamba_n_heads": 2, "mamba_d_head": 16, "time_step_rank": 4, "num_mel_bins": 8, "sliding_window": 8,
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0,
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2, "vocab_size_per_layer_input": WORDS,
    "hidden_size_per_layer_input": 8, "laurel_rank": 4, "num_kv_shared_layers": 0,
}  # fmt: skip


def small(kind: Any) -> Any:
    """Return a config of a class in which every size that SMALL names is small."""
    usual = kind()
    chosen: dict[str, Any] = {}
    for name, size in SMALL.items():
        now = getattr(usual, name, None)
        if type(now) in (int, float) and size is not None:
            chosen[name] = size
    for name in getattr(kind, "sub_configs", {}):
        part = getattr(usual, name, None)
        if part is not None:
            chosen[name] = small(type(part)).to_dict()
    for name in ("layer_types", "mlp_layer_types"):
        layers = getattr(usual, name, None)
        if isinstance(layers, list):
            chosen[name] = layers[:1] + layers[-1:]
    return kind(**{name: size for name, size in chosen.items() if not isinstance(getattr(kind, name, None), property)})


def model_of(name: str) -> nn.Module:
    """Build the model of an architecture, with a language head where there is one."""
    config_class = transformers.CONFIG_MAPPING[name]
    mappings = (modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING, modeling_auto.MODEL_MAPPING)
    found = next(mapping[config_class] for mapping in mappings if config_class in mapping)
    torch.manual_seed(0)
    config = small(config_class)
    config._attn_implementation = "eager"
    return (found[0] if isinstance(found, tuple) else found)(config).eval()


def inputs_of(model: nn.Module) -> dict[str, Any]:
    """Return the inputs for a model: words, an image, or sound."""
    taken = inspect.signature(type(model).forward).parameters
    given: dict[str, Any] = {}
    if "input_ids" in taken:
        given["input_ids"] = torch.arange(3, 10)[None].repeat(2, 1)
    if "decoder_input_ids" in taken:
        given["decoder_input_ids"] = torch.arange(3, 8)[None].repeat(2, 1)
    config = model.config
    if "pixel_values" in taken and "input_ids" not in taken:
        size = getattr(config, "image_size", IMAGE)
        size = size if isinstance(size, int) else IMAGE
        given["pixel_values"] = _noise(1, getattr(config, "num_channels", 3), size, size)
    if "input_values" in taken:
        given["input_values"] = _noise(1, 2000)
    if "input_features" in taken and "input_ids" not in taken:
        given["input_features"] = _noise(1, getattr(config, "num_mel_bins", 8), 128)
    if "use_cache" in taken:
        given["use_cache"] = True
    return given


def names() -> list[str]:
    """Return the names of all architectures that have a causal language model or a base model."""
    with_model = [*modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *modeling_auto.MODEL_MAPPING_NAMES]
    return sorted(dict.fromkeys(name for name in with_model if name in transformers.CONFIG_MAPPING))


def again(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return a deep copy of the inputs."""
    return copy.deepcopy(inputs)


def _noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))
