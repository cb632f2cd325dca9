"""The `generate()` of transformers that runs a model: its prompt and its options, read from its variables."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

from torch import Tensor, nn

from hookline._sites.tree import Names
from hookline._torch import frame_at, variables_of
from hookline.errors import HooklineError

# The modules of each model that was asked for, by id.
_parts: weakref.WeakKeyDictionary[nn.Module, frozenset[int]] = weakref.WeakKeyDictionary()


class GenerateCall(NamedTuple):
    """A running `generate()`."""

    identity: Any  # An object that this call made for itself.
    width: int  # The columns of the prompt.
    mask: Any  # The mask of the prompt.
    speculates_with: str  # The option with which it tries tokens that it may throw away, or "".
    beams: int  # How many continuations of each row it follows.


def generate_call(model: nn.Module) -> GenerateCall | None:
    """Return the `generate()` that runs a model or its parent; None if there is none."""
    found = _variables_of_generate(model)
    held, given = found if found is not None else ({}, {})
    prompt, config = held.get("input_ids"), held.get("generation_config")
    if not isinstance(prompt, Tensor):  # Not yet: it runs the encoder.
        return None
    embeddings = given.get("inputs_embeds")
    width = embeddings.shape[1] if not prompt.shape[1] and isinstance(embeddings, Tensor) else prompt.shape[1]
    looks_up = getattr(config, "prompt_lookup_num_tokens", None) is not None
    assisted = held.get("assistant_model") is not None
    option = "assistant_model" if assisted else "prompt_lookup_num_tokens" if looks_up else ""
    mask = given.get("decoder_attention_mask" if has_encoder(held["self"]) else "attention_mask")
    identity = prompt if config is None else config
    return GenerateCall(identity, int(width), mask, option, getattr(config, "num_beams", None) or 1)


def encoder_mask(model: nn.Module, size: int) -> Any:
    """Return the mask of the encoder's tokens, where `generate()` runs the encoder without the model."""
    found = _variables_of_generate(model)
    mask = None if found is None else found[1].get("attention_mask")
    return mask if isinstance(mask, Tensor) and mask.dim() == 2 and mask.shape[1] == size else None


def refuse_part_of_model(model: nn.Module) -> None:
    """Raise where a part of a model runs without the model, which does not see what the part is given."""
    for held in variables_of("generate", frame_at(1)):
        writer = held.get("self")
        if isinstance(writer, nn.Module) and writer is not model and is_part(writer, model):
            name = next(iter(Names(model).of(writer)))
            raise HooklineError(
                f"generate() runs a part of {type(model).__name__}, and not itself, so it is unknown which tokens "
                f"pass; add the hooks to that part, {name!r}"
            )
    raise HooklineError(
        f"no forward of {type(model).__name__} is running, so it is unknown which tokens pass; add the hooks to the "
        "module that you call, or name places in the value, as in '[:, 3]'"
    )


def has_encoder(model: Any) -> bool:
    """Return True for an encoder-decoder model of transformers."""
    config = getattr(model, "config", None)
    return bool(getattr(config, "is_encoder_decoder", False)) and callable(getattr(model, "get_encoder", None))


def is_in_encoder(model: Any, module: nn.Module) -> bool:
    """Return True if a module is in the encoder of an encoder-decoder model, where all tokens pass at once."""
    return model is not None and has_encoder(model) and is_part(module, model.get_encoder())


def is_part(part: nn.Module, model: nn.Module) -> bool:
    """Return True if one model is another, or a part of it."""
    if part is model:
        return True
    if model not in _parts:
        _parts[model] = frozenset(map(id, model.modules()))
    return id(part) in _parts[model]


def _variables_of_generate(model: nn.Module) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Return the variables of the `generate()` that runs a model or its parent, and its `model_kwargs`."""
    for held in variables_of("generate", frame_at(1)):
        writer, given = held.get("self"), held.get("model_kwargs")
        if isinstance(writer, nn.Module) and isinstance(given, dict) and is_part(model, writer):
            return held, given
    return None
