"""Padding: which positions of a batch hold real tokens, by its masks, and which only fill it up.

A mask is found by the site's side of an encoder-decoder model, and by what passes there: text, images or sound.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hookline import Site
from hookline.errors import HooklineError

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
    decodes = _is_decoded(site, batch, encoder_decoder)
    found = _mask_of(site, batch, decodes)
    if found is not None:
        return _fitted(site, *found, batch, shape)
    if decodes and batch.get("attention_mask") is not None and shape[1] > 1:
        raise HooklineError(
            f"{str(site)!r} is of the decoder, and the batch has a mask of the encoder only; add "
            f"decoder_attention_mask {shape} (ones where nothing is filled up), or {_FIX}"
        )
    if not decodes and _sees_images(site, batch):
        _refuse_filled_images(site, batch)
    return None


def refuse_padding(
    site: Site, batch: Mapping[str, Any] | None, value: Tensor, *, encoder_decoder: bool | None = None
) -> None:
    """Refuse a site that names positions, as "h.3[:, -1]" does, where those of some samples are padding.

    >>> refuse_padding(Site.parse("h.3[:, -1]"), {"attention_mask": torch.tensor([[1, 0], [1, 1]])}, torch.ones(2, 8))
    Traceback (most recent call last):
        ...
    hookline.HooklineError: 'h.3[:, -1]' is padding in 1 of 2 samples; pad on the left, and the last token is there
    """
    named = named_positions(site)
    if batch is None or named is None or value.ndim != (2 if isinstance(named, int) else 3):
        return  # Of a value with more dimensions, the second may be heads.
    found = _mask_of(site, batch, _is_decoded(site, batch, encoder_decoder))
    if found is None or found[1].ndim != 2 or len(found[1]) != len(value):
        return
    real = found[1][:, named].reshape(len(value), -1).all(1)
    if not bool(real.all()):
        first = named if isinstance(named, int) else named.start or 0
        side = "left, and the last token" if first < 0 else "right, and the first token"
        raise HooklineError(
            f"{str(site)!r} is padding in {int((~real).sum())} of {len(real)} samples; pad on the {side} is there"
        )


def named_positions(site: Site) -> int | slice | None:
    """Return which positions of [batch, sequence, ...] a site takes, unless it takes all of them."""
    for one in site.subscripts:
        if isinstance(one, tuple) and len(one) > 1 and one[0] == slice(None) and one[1] != slice(None):
            return one[1] if isinstance(one[1], (int, slice)) else None
    return None


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


def _refuse_filled_images(site: Site, batch: Mapping[str, Any]) -> None:
    """Every patch of an image is real, unless the processor filled images up."""
    filled = [name for name in ("pixel_attention_mask", "pixel_mask") if name in batch]
    if filled:
        found = tuple(batch[filled[0]].shape)
        raise HooklineError(
            f"{str(site)!r}: the batch has {filled[0]} {found}, which is of pixels and not of positions; {_FIX}"
        )


def _is_decoded(site: Site, batch: Mapping[str, Any], encoder_decoder: bool | None) -> bool:
    """Whether the model has an encoder and a decoder, and the site lies on the decoder's side."""
    if encoder_decoder is None:
        encoder_decoder = any(name in batch for name in _OF_A_DECODER)
    return encoder_decoder and is_of_the_decoder(site)


def is_of_the_decoder(site: Site) -> bool:
    """Whether a site of an encoder-decoder model lies on the decoder's side; so does what comes after both."""
    if _OF_THE_ENCODER.search(site.index) or _CROSS_ATTENTION.search(site.path):
        return False
    names = site.path.split(".")
    return "encoder" not in names or "decoder" in names[: names.index("encoder")]


def _mask_of(site: Site, batch: Mapping[str, Any], decodes: bool) -> tuple[str, Tensor] | None:
    """Return the mask of the site's side, and what it is called."""
    if not decodes and _sees_images(site, batch):
        return None
    name = "decoder_attention_mask" if decodes else "attention_mask"
    mask, labels = batch.get(name), batch.get("labels")
    if mask is not None:
        mask = torch.as_tensor(mask)
        if mask.is_floating_point() and bool((mask < 0).any()):
            raise HooklineError(
                f"{name} is one to be added, with 0 for tokens; give 1 for tokens and 0 elsewhere, or {_FIX}"
            )
        return name, mask != 0
    given = any(one in batch for one in _OF_A_DECODER)
    if decodes and labels is not None and not given:  # The model makes its decoder's input of them, shifted by one.
        return "labels", torch.as_tensor(labels) != NO_LABEL
    return None


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
        f"tell its real tokens from padding; {_FIX}, or rows={{'...': 'tokens'}} for "
        f"the places that have tokens: others are kept sample by sample"
    )
