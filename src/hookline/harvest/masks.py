"""Which positions of a batch are real tokens, and which only fill it up: the mask that belongs to a site.

A batch is what transformers' models take: keywords. In an encoder-decoder model each side has a mask of its own, and
the site's name tells the side, never the shape: two lengths that happen to be equal must not change what is stored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hookline.errors import HooklineError
from hookline.sites import Site

NO_LABEL = -100  # What every loss of torch and transformers ignores.

_OF_A_DECODER = ("decoder_input_ids", "decoder_inputs_embeds", "decoder_attention_mask")
_OF_IMAGES = ("pixel_values", "pixel_values_videos")
_OF_SOUND = ("input_features", "input_values")
_FIX = "pass rows= a function of the batch that returns a [batch, sequence] mask"

_VISION = re.compile(r"vision|visual|image|pixel")
_CROSS_ATTENTION = re.compile(
    r"(encdec|encoder_attn|cross_?att)\w*\.(\w+\.)*(k|v|k_proj|v_proj|key|value|c_attn)$", re.I
)
_OF_THE_ENCODER = re.compile(r"encoder_(last_hidden_state|hidden_states)|key_value_states")


def token_mask(
    site: Site, batch: Mapping[str, Any] | None, shape: tuple[int, int], *, encoder_decoder: bool | None = None
) -> Tensor | None:
    """Return where real tokens are in a value of [batch, sequence, ...], or None if nothing in the batch says.

    >>> padded = {"attention_mask": torch.tensor([[0, 0, 1], [1, 1, 1]])}
    >>> token_mask(Site("h.3"), padded, (2, 3))
    tensor([[False, False,  True],
            [ True,  True,  True]])

    Args:
        encoder_decoder: whether the model is one (`model.config.is_encoder_decoder`); None judges by the batch.
    """
    if batch is None:
        return None
    if encoder_decoder is None:
        encoder_decoder = any(name in batch for name in _OF_A_DECODER)
    if encoder_decoder and _is_of_the_decoder(site):
        return _mask_of_the_decoder(site, batch, shape)
    if _sees_images(site, batch):
        return _mask_of_patches(site, batch)
    mask = batch.get("attention_mask")
    return None if mask is None else _fitted(site, "attention_mask", torch.as_tensor(mask) != 0, batch, shape)


def token_positions(selected: Tensor, real: Tensor | None = None) -> Tensor:
    """Return the position of each selected token in its sample, row after row: 0 is the first real one.

    >>> real = torch.tensor([[False, False, True, True], [True, True, True, True]])
    >>> token_positions(torch.tensor([[False, False, False, True], [True, False, False, True]]), real)
    tensor([1, 0, 3])
    """
    counted = torch.ones_like(selected) if real is None else real
    return (counted.long().cumsum(1) - 1)[selected]


def _sees_images(site: Site, batch: Mapping[str, Any]) -> bool:
    """Whether images pass here, and not text: of two inputs, the name tells which."""
    if not any(name in batch for name in _OF_IMAGES):
        return False
    return "input_ids" not in batch or _VISION.search(site.path) is not None


def _mask_of_patches(site: Site, batch: Mapping[str, Any]) -> Tensor | None:
    """Every patch of an image is real, unless the processor filled images up."""
    filled = [name for name in ("pixel_attention_mask", "pixel_mask") if name in batch]
    if filled:
        found = tuple(batch[filled[0]].shape)
        raise HooklineError(
            f"{str(site)!r}: the batch has {filled[0]} {found}, which is of pixels and not of positions; {_FIX}"
        )
    return None


def _is_of_the_decoder(site: Site) -> bool:
    """Whether a site of an encoder-decoder model lies on the decoder's side; so does what comes after both."""
    if _OF_THE_ENCODER.search(site.index) or _CROSS_ATTENTION.search(site.path):
        return False
    names = site.path.split(".")
    return "encoder" not in names or "decoder" in names[: names.index("encoder")]


def _mask_of_the_decoder(site: Site, batch: Mapping[str, Any], shape: tuple[int, int]) -> Tensor | None:
    """The decoder's own mask, or where there are labels; without either, it may be padded as the encoder is."""
    mask, labels = batch.get("decoder_attention_mask"), batch.get("labels")
    if mask is not None:
        return _fitted(site, "decoder_attention_mask", torch.as_tensor(mask) != 0, batch, shape)
    given = any(name in batch for name in _OF_A_DECODER)
    if labels is not None and not given:  # The model makes its decoder's input of them, shifted by one.
        return _fitted(site, "labels", torch.as_tensor(labels) != NO_LABEL, batch, shape)
    if batch.get("attention_mask") is None or shape[1] == 1:
        return None
    raise HooklineError(
        f"{str(site)!r} is of the decoder, and the batch has a mask of the encoder only; add "
        f"decoder_attention_mask {shape} (ones where nothing is filled up), or {_FIX}"
    )


def _fitted(site: Site, name: str, mask: Tensor, batch: Mapping[str, Any], shape: tuple[int, int]) -> Tensor:
    """Return the mask as it lies over a value of this shape, or refuse it."""
    found, length = tuple(mask.shape), shape[1]
    if found == tuple(shape):
        return mask
    if mask.ndim == 2 and found[0] == shape[0] and 0 < length < found[1]:
        if batch.get("past_key_values") is not None:  # The mask covers what came before as well.
            return mask[:, -length:]
        if found[1] % length == 0 and any(one in batch for one in _OF_SOUND):  # A convolution took each k-th frame.
            return mask[:, :: found[1] // length]
    raise HooklineError(
        f"{str(site)!r} has a value of [batch, sequence] {tuple(shape)}, and {name} is {found}: rows='tokens' can't "
        f"tell its real tokens from padding; {_FIX}, or rows='batch' to keep a sample's value whole"
    )
