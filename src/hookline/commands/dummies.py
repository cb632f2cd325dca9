"""What a model of transformers can be tried with where nobody gave an input: numbers of the shape it expects."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hookline.commands.inputs import Given, arguments_of
from hookline.errors import HooklineError

_TOKENS = 8


def dummy(model: nn.Module) -> Given:
    """Return an input that a model says to take, or refuse and say what to give."""
    config = getattr(model, "config", None)
    main = getattr(model, "main_input_name", None)
    makers = {"input_ids": _tokens, "pixel_values": _pixels, "input_features": _features, "input_values": _sound}
    made = makers[main](config) if main in makers and config is not None else {}
    if not made:
        raise HooklineError(f"{arguments_of(model)}: give --input FILE, or --shape 1,3,224,224 for the first of them")
    return Given(kwargs=_begun(made, config), is_processed=True).without_cache(model)


def _tokens(config: Any) -> dict[str, Tensor]:
    """Some token numbers; for a model of texts and images, an image beside them."""
    texts = config if hasattr(config, "vocab_size") else getattr(config, "text_config", config)
    ids = torch.arange(1, _TOKENS + 1)[None] % getattr(texts, "vocab_size", 2)
    return {"input_ids": ids, **(_pixels(config) if hasattr(config, "vision_config") else {})}


def _pixels(config: Any) -> dict[str, Tensor]:
    pictures = getattr(config, "vision_config", config)
    size = getattr(pictures, "image_size", None) or 224
    sizes = (size, size) if isinstance(size, int) else tuple(size)
    return {"pixel_values": torch.zeros(1, getattr(pictures, "num_channels", 3), *sizes)}


def _features(config: Any) -> dict[str, Tensor]:
    if not (hasattr(config, "num_mel_bins") and hasattr(config, "max_source_positions")):
        return {}
    return {"input_features": torch.zeros(1, config.num_mel_bins, 2 * config.max_source_positions)}


def _sound(_config: Any) -> dict[str, Tensor]:
    return {"input_values": torch.zeros(1, 16_000)}


def _begun(made: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    if not getattr(config, "is_encoder_decoder", False):
        return made
    start = getattr(config, "decoder_start_token_id", None) or 0
    return {**made, "decoder_input_ids": torch.full((1, 1), start)}
