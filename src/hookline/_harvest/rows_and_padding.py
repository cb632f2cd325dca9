"""Choose the rows of a value that a harvest keeps (`rows=`), without padding; note each row's sample and position."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hookline import Site
from hookline._jobs.fingerprints import tensor_bytes
from hookline._kernel import children, describe, tokens_in, write_subscripts
from hookline.errors import HooklineError

NO_LABEL = -100  # The label that the losses of torch and transformers ignore.
_OF_A_DECODER = ("decoder_input_ids", "decoder_inputs_embeds", "decoder_attention_mask")
_OF_IMAGES = ("pixel_values", "pixel_values_videos")
_OF_SOUND = ("input_features", "input_values")
_FIX = "pass rows= a function of the batch that returns a [batch, sequence] mask"
_VISION = re.compile(r"vision|visual|image|pixel")
_CROSS_ATTENTION = re.compile(
    r"(encdec|encoder_attn|cross_?att)\w*\.(\w+\.)*(k|v|k_proj|v_proj|key|value|c_attn)$", re.I
)
_OF_THE_ENCODER = re.compile(r"encoder_(last_hidden_state|hidden_states)|key_value_states")
Rule = str | Callable[..., Any]
Mask = Callable[[Site, Any, Any, tuple[int, int]], Tensor | None]  # From site, batch, output and shape to a mask.
RULES = ("batch", "tokens")


def check_rule(rule: Any) -> None:
    """Refuse anything that is not a row rule."""
    for one in rule.values() if isinstance(rule, Mapping) else [rule]:
        if not callable(one) and one not in RULES:
            raise HooklineError(
                f'rows= is "batch", "tokens", a function of the batch, or a mapping of site to these, not {one!r}'
            )


class RowChooser:
    """Chooses the rows of the values of one batch. Values with the same mask share one choice."""

    def __init__(self, batch: Any, samples: int, output: Any, mask: Mask) -> None:
        self._batch = batch
        self._samples = samples
        self._output = output
        self._mask = mask
        self._choices: dict[Any, Choice] = {}

    def choose(self, name: str, site: Site | None, side: Site, value: Any, rule: Rule) -> tuple[Tensor, Choice]:
        """Return the rows of a value, and the choice they come from.

        Args:
            site: The site of the value; None for a column.
            side: The site whose padding mask applies.
        """
        if not isinstance(value, Tensor):
            parts = tuple(children(value) or ())
            named = f"name the part to keep, '{name}{write_subscripts(parts[:1])}', or " if parts else ""
            raise HooklineError(f"{name!r} is {describe(value)}, not a tensor; {named}make one of it with transform=")
        if value.layout is not torch.strided:
            raise HooklineError(f"{name!r} is a tensor of layout {value.layout}; make it dense with transform=")
        if rule == "tokens" and site is not None and _takes_one_position(site):
            rule = "batch"  # Each sample has one row.
        if value.dim() == 0 or ((rule == "batch" or value.dim() == 1) and len(value) != self._samples):
            raise HooklineError(f"{name!r} has shape {tuple(value.shape)} for {self._samples} samples: the first "
                                "dimension must be the batch; bring it there with transform=, or, if the data are "
                                "single samples, give batch_size=")  # fmt: skip
        if rule == "batch" or value.dim() == 1:
            return value, self._choice("batch", lambda: Choice([1] * self._samples, None, None))
        choice = self._of_positions(name, side, value, rule)
        flat = value.flatten(0, 1)
        return (
            flat if choice.index is None else flat.index_select(0, index_to_device(choice.index, flat.device))
        ), choice

    def _choice(self, key: Any, make: Callable[[], Choice]) -> Choice:
        if key not in self._choices:
            self._choices[key] = make()
        return self._choices[key]

    def _of_positions(self, name: str, side: Site, value: Tensor, rule: Rule) -> Choice:
        """Return which positions are kept: those in the mask of the user's function, or in the batch's mask."""
        shape = (value.shape[0], value.shape[1])
        if shape[0] != self._samples:
            raise HooklineError(f"{name!r} has shape {tuple(value.shape)} for {self._samples} samples: rows by "
                                "position need [samples, positions, ...]; bring it there with transform=")  # fmt: skip
        try:
            real = self._mask(side, self._batch, self._output, shape)
        except HooklineError:
            if not callable(rule):
                raise
            real = None  # A function works without the batch's mask.
        key = (rule, shape, None if real is None else tensor_bytes(real))
        if not callable(rule):
            return self._choice(key, lambda: _rows_under_mask(real, real, shape))
        return self._choice(key, lambda: _rows_under_mask(self._chosen_by(name, rule, shape), real, shape))

    def _chosen_by(self, name: str, rule: Callable[..., Any], shape: tuple[int, int]) -> Tensor:
        """Call the user's function for a mask, and check its shape."""
        mask = rule(self._batch, self._output) if takes_output(rule) else rule(self._batch)
        if not isinstance(mask, Tensor) or tuple(mask.shape) != shape:
            found = describe(mask)
            raise HooklineError(f"{name!r}: the rows= function gives a mask {list(shape)} for this value, not {found}")
        return mask.bool()


@dataclass(frozen=True)
class Choice:
    """The rows that are kept of values [samples, positions, ...]."""

    counts: list[int]  # The number of rows of each sample.
    index: Tensor | None  # The rows as an index into samples × positions; None for all of them.
    positions: Tensor | None  # The position of each row in its sample; None if they are 0, 1, ... in every sample.

    def all_positions(self) -> Tensor:
        """Return the position of each row."""
        return positions_from_zero(torch.tensor(self.counts)) if self.positions is None else self.positions


def _rows_under_mask(mask: Tensor | None, real: Tensor | None, shape: tuple[int, int]) -> Choice:
    """Return the choice of the rows where a mask is True. Positions count real tokens only."""
    if mask is None:
        return Choice([shape[1]] * shape[0], None, None)
    mask = mask.to("cpu", torch.bool)
    counts = mask.sum(1)
    index = None if bool(mask.all()) else mask.reshape(-1).nonzero().reshape(-1)
    at = token_positions(mask, None if real is None else real.to("cpu"))
    return Choice(counts.tolist(), index, None if torch.equal(at, positions_from_zero(counts)) else at)


def positions_from_zero(counts: Tensor) -> Tensor:
    """Return 0, 1, ..., count - 1 for each count, joined: the positions of samples that are kept whole."""
    return torch.arange(int(counts.sum())) - (counts.cumsum(0) - counts).repeat_interleave(counts)


def token_positions(selected: Tensor, real: Tensor | None = None) -> Tensor:
    """Return the position of each selected token in its sample, where 0 is the first real token.

    >>> real = torch.tensor([[False, False, True, True], [True, True, True, True]])
    >>> token_positions(torch.tensor([[False, False, False, True], [True, False, False, True]]), real)
    tensor([1, 0, 3])
    """
    counted = torch.ones_like(selected) if real is None else real
    return (counted.long().cumsum(1) - 1)[selected]


def takes_output(function: Callable[..., Any]) -> bool:
    """Return True if a function takes the model's output besides the batch."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # A function in C has no signature.
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return len([one for one in parameters if one.kind in positional and one.default is one.empty]) > 1


def index_to_device(index: Tensor, device: torch.device) -> Tensor:
    """Copy an index to a device, without waiting for the device."""
    if device.type != "cuda":
        return index.to(device)
    return index.pin_memory().to(device, non_blocking=True)


def cast(rows: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return rows in another dtype, if they are floats."""
    return rows.to(dtype) if dtype is not None and rows.is_floating_point() else rows


def token_mask(
    site: Site, batch: Mapping[str, Any] | None, shape: tuple[int, int], *, encoder_decoder: bool | None = None
) -> Tensor | None:
    """Return where the real tokens are in a value of [batch, sequence, ...], or None if the batch has no mask.

    >>> padded = {"attention_mask": torch.tensor([[0, 0, 1], [1, 1, 1]])}
    >>> token_mask(Site("h.3"), padded, (2, 3))
    tensor([[False, False,  True],
            [ True,  True,  True]])

    Args:
        encoder_decoder: True for an encoder-decoder model (`model.config.is_encoder_decoder`). None tells by the batch.
    """
    if batch is None or tokens_in(site.subscripts) is not None:
        return None  # Tokens that a site names are real ones.
    decodes = _takes_decoder_mask(site, batch, encoder_decoder)
    found = _mask_of(site, batch, decodes)
    if found is not None:
        return _fit_mask(site, *found, batch, shape)
    if decodes and batch.get("attention_mask") is not None and shape[1] > 1:
        raise HooklineError(
            f"{str(site)!r} is in the decoder, but the batch has only a mask for the encoder; add "
            f"decoder_attention_mask {shape} (ones where there is no padding), or {_FIX}"
        )
    if not decodes and _sees_images(site, batch):
        _refuse_filled_images(site, batch)
    return None


def refuse_padding(
    site: Site, batch: Mapping[str, Any] | None, value: Tensor, *, encoder_decoder: bool | None = None
) -> None:
    """Refuse a site that names positions, as "h.3[:, -1]" does, if they are padding in some samples.

    >>> refuse_padding(Site.parse("h.3[:, -1]"), {"attention_mask": torch.tensor([[1, 0], [1, 1]])}, torch.ones(2, 8))
    Traceback (most recent call last):
        ...
    hookline.HooklineError: 'h.3[:, -1]' is padding in 1 of 2 samples; pad on the left, and the last token is there
    """
    named = named_positions(site)
    if batch is None or named is None or value.ndim != (2 if isinstance(named, int) else 3):
        return  # The second dimension of a larger value may be heads.
    found = _mask_of(site, batch, _takes_decoder_mask(site, batch, encoder_decoder))
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
    """Return the positions of [batch, sequence, ...] that a site takes, or None if it takes all."""
    for one in site.subscripts:
        if isinstance(one, tuple) and len(one) > 1 and one[0] == slice(None) and one[1] != slice(None):
            return one[1] if isinstance(one[1], (int, slice)) else None
    return None


def _takes_one_position(site: Site) -> bool:
    """Return True if a site takes one position of each sample."""
    tokens = tokens_in(site.subscripts)
    return tokens.is_one if tokens is not None else isinstance(named_positions(site), int)


def _sees_images(site: Site, batch: Mapping[str, Any]) -> bool:
    """Return True if the values at a site come from images, not text. If the batch has both, the name decides."""
    if not any(name in batch for name in _OF_IMAGES):
        return False
    return "input_ids" not in batch or _VISION.search(site.path) is not None


def _refuse_filled_images(site: Site, batch: Mapping[str, Any]) -> None:
    """Refuse images that the processor padded: their mask is for pixels. Without such a mask, every patch is real."""
    filled = [name for name in ("pixel_attention_mask", "pixel_mask") if name in batch]
    if filled:
        found = tuple(batch[filled[0]].shape)
        raise HooklineError(
            f"{str(site)!r}: the batch has {filled[0]} {found}, a mask for pixels and not for positions; {_FIX}"
        )


def _takes_decoder_mask(site: Site, batch: Mapping[str, Any], encoder_decoder: bool | None) -> bool:
    """Return True if the model is an encoder-decoder model, and the site is in the decoder or after it."""
    if encoder_decoder is None:
        encoder_decoder = any(name in batch for name in _OF_A_DECODER)
    return encoder_decoder and is_decoder_site(site)


def is_decoder_site(site: Site) -> bool:
    """Return True if a site of an encoder-decoder model is in the decoder or after it."""
    if _OF_THE_ENCODER.search(site.index) or _CROSS_ATTENTION.search(site.path):
        return False
    names = site.path.split(".")
    return "encoder" not in names or "decoder" in names[: names.index("encoder")]


def _mask_of(site: Site, batch: Mapping[str, Any], decodes: bool) -> tuple[str, Tensor] | None:
    """Return the name and the values of the mask for the encoder or decoder, whichever the site is in."""
    if not decodes and _sees_images(site, batch):
        return None
    name = "decoder_attention_mask" if decodes else "attention_mask"
    mask, labels = batch.get(name), batch.get("labels")
    if mask is not None:
        mask = torch.as_tensor(mask)
        if mask.is_floating_point() and bool((mask < 0).any()):
            raise HooklineError(
                f"{name} is an additive mask, with 0 for tokens; give 1 for tokens and 0 elsewhere, or {_FIX}"
            )
        return name, mask != 0
    given = any(one in batch for one in _OF_A_DECODER)
    if decodes and labels is not None and not given:  # The model shifts the labels by one for its decoder's input.
        return "labels", torch.as_tensor(labels) != NO_LABEL
    return None


def _fit_mask(site: Site, name: str, mask: Tensor, batch: Mapping[str, Any], shape: tuple[int, int]) -> Tensor:
    """Return the mask cut to fit a value of this shape; raise if it can't fit."""
    found, length = tuple(mask.shape), shape[1]
    if found == tuple(shape):
        return mask
    if mask.ndim == 2 and found[0] == shape[0] and 0 < length < found[1]:
        if batch.get("past_key_values") is not None:  # The mask covers the cached tokens as well.
            return mask[:, -length:]
        if found[1] % length == 0 and any(one in batch for one in _OF_SOUND):  # A convolution took each k-th frame.
            return mask[:, :: found[1] // length]
    raise HooklineError(
        f"{str(site)!r} has a value of [batch, sequence] {tuple(shape)}, and {name} is {found}: rows='tokens' can't "
        f"tell its real tokens from padding; {_FIX}, or rows={{'...': 'tokens'}} for "
        f"the places that have tokens: others are kept sample by sample"
    )
