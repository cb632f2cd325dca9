"""The `generate()` of transformers that runs a model: its prompt and its options, read from its variables."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from hookline._sites.tree import Names
from hookline._torch import frame_at, variables_of
from hookline.errors import HooklineError

# The modules of each model that was asked for, by id.
_parts: weakref.WeakKeyDictionary[nn.Module, frozenset[int]] = weakref.WeakKeyDictionary()
# The encoders of the encoder-decoder models in each model that was asked for.
_encoders_of: weakref.WeakKeyDictionary[nn.Module, list[Callable[[], Any]]] = weakref.WeakKeyDictionary()


# Options of a generation config with which tokens are tried that may be thrown away.
_TRIES = ("assistant_early_exit", "prompt_lookup_num_tokens", "use_mtp", "speculation_type")


class GenerateCall(NamedTuple):
    """A running `generate()`."""

    identity: Any  # An object that this call made for itself.
    width: int  # The columns of the prompt.
    mask: Any  # The mask of the prompt.
    reason: str  # Why it is unknown which tokens pass, or "".
    beams: int  # How many continuations of each row it follows.


def generate_call(model: nn.Module) -> GenerateCall | None:
    """Return the `generate()` that runs a model or its parent; None if there is none."""
    held: dict[str, Any] = next(_all_of_generate(model), {})
    given = held.get("model_kwargs", {})
    prompt, config = held.get("input_ids"), held.get("generation_config")
    if not isinstance(prompt, Tensor):  # Not yet: it runs the encoder.
        return None
    embeddings = given.get("inputs_embeds")
    width = embeddings.shape[1] if not prompt.shape[1] and isinstance(embeddings, Tensor) else prompt.shape[1]
    mask = given.get("decoder_attention_mask" if has_encoder(held["self"]) else "attention_mask")
    identity = prompt if config is None else config
    reason = next(filter(None, map(_reason, _all_of_generate(model))), "")
    return GenerateCall(identity, int(width), mask, reason, getattr(config, "num_beams", None) or 1)


def _reason(held: dict[str, Any]) -> str:
    """Return why it is unknown which tokens pass in a `generate()` with these variables, or ""."""
    config = held.get("generation_config")
    options = {"assistant_model": held.get("assistant_model")}
    options |= {name: getattr(config, name, None) for name in _TRIES}
    if getattr(held.get("generation_mode"), "value", "") == "contrastive_search":
        options["penalty_alpha"] = True
    option = next((name for name, value in options.items() if value), "")
    if option:
        return f"generate() runs with {option}, and tries tokens that it may throw away"
    processors = held.get("prepared_logits_processor") or ()
    if any(type(one).__name__ == "UnbatchedClassifierFreeGuidanceLogitsProcessor" for one in processors):
        return "generate() runs with guidance_scale, so a second sequence passes through the model in turns"
    return ""


def encoder_mask(model: nn.Module, size: int) -> Any:
    """Return the mask of the encoder's tokens, where `generate()` runs the encoder without the model."""
    held = next(_all_of_generate(model), None)
    mask = None if held is None else held["model_kwargs"].get("attention_mask")
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
    config, encoder = getattr(model, "config", None), getattr(model, "get_encoder", None)
    if not getattr(config, "is_encoder_decoder", False) or not callable(encoder):
        return False
    return encoder() is not model  # The decoder has the same config, and is its own "encoder".


def holds_encoder(model: nn.Module) -> bool:
    """Return True if a model is an encoder-decoder model of transformers, or has one in it."""
    return bool(_encoders(model))


def is_in_encoder(model: nn.Module | None, module: nn.Module) -> bool:
    """Return True if a module is in the encoder of an encoder-decoder model, where all tokens pass at once."""
    return model is not None and any(is_part(module, encoder) for encoder in _encoders(model))


def _encoders(model: nn.Module) -> list[Any]:
    if model not in _encoders_of:
        writers: list[Any] = list(filter(has_encoder, model.modules()))
        found = {writer.get_encoder() for writer in writers}
        _encoders_of[model] = [weakref.ref(one) for one in found if isinstance(one, nn.Module)]
    return [encoder for one in _encoders_of[model] if (encoder := one()) is not None]


def is_part(part: nn.Module, model: nn.Module) -> bool:
    """Return True if one model is another, or a part of it."""
    if part is model:
        return True
    if model not in _parts:
        _parts[model] = frozenset(map(id, model.modules()))
    return id(part) in _parts[model]


def _all_of_generate(model: nn.Module) -> Iterator[dict[str, Any]]:
    """Yield the variables of each `generate()` that runs a model or its parent, the innermost first."""
    for held in variables_of("generate", frame_at(1)):
        writer = held.get("self")
        if isinstance(writer, nn.Module) and isinstance(held.get("model_kwargs"), dict) and is_part(model, writer):
            yield held
