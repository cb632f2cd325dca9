"""`Generation` harvests while a model generates text: `hl.harvest(..., call=hl.Generation(max_new_tokens=20))`.

The prompt takes one forward, and each new token except the last takes one more. A sample has a row for each token of
its prompt and for each generated token except the last. An end-of-sequence token is always the last. How many rows a
sample has does not depend on the other samples of its batch.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hookline import Site
from hookline._harvest.rows_and_padding import is_decoder_site, token_mask
from hookline._jobs.fingerprints import tensor_bytes
from hookline._kernel import Tokens, tokens_in, unwrap
from hookline.errors import HooklineError

# Options with which a sample runs more than once, or for a token that may not be the next one.
_REFUSED = {
    "num_beams": "several continuations of a sample run at once",
    "num_return_sequences": "a sample would have several continuations",
    "assistant_model": "tokens are tried that may be thrown away",
    "prompt_lookup_num_tokens": "tokens are tried that may be thrown away",
    "penalty_alpha": "tokens are tried that may be thrown away",
    "stop_strings": "only an end-of-sequence token tells where a sample ends",
    "stopping_criteria": "only an end-of-sequence token tells where a sample ends",
}


class Generated(NamedTuple):
    """The token numbers that a model generated, with the settings needed to find the tokens of each sample."""

    ids: Tensor  # Prompt and continuation; in an encoder-decoder model, the decoder's sequence.
    prompt: int  # How many positions of `ids` are the prompt.
    ends: tuple[int, ...]  # The end-of-sequence tokens.
    encoder_decoder: bool


class Generation:
    """A `call` for a harvest that lets the model continue each batch. The options are those of `model.generate`.

    Args:
        seed: With `do_sample=True`, a batch gets the same continuations each time, wherever it runs.
    """

    calls = "tokens"  # The calls of a site in one batch are joined to one sequence, with each token once.
    stop = False  # The forward can't end early: the next token comes from the last layer.

    def __init__(self, *, seed: int = 0, **options: Any) -> None:
        self.seed = seed
        self.options = options
        _refuse_options(options, "")

    def __call__(self, model: nn.Module, batch: Mapping[str, Any]) -> Generated:
        """Continue the samples of a batch."""
        writer: Any = unwrap(model)
        defaults = getattr(writer, "generation_config", None)
        if defaults is None or not callable(getattr(writer, "generate", None)):
            raise HooklineError(f"{type(writer).__name__} has no generate(); load it with its language-model head")
        if not isinstance(batch, Mapping):
            raise HooklineError(f"generate() takes a batch of keywords, not {type(batch).__name__}")
        settings = self._settings(defaults)
        _refuse_options(settings, " (it is in the model's generation_config)")
        both = bool(writer.config.is_encoder_decoder)
        _check_prompt(batch, both)
        given = {name: value for name, value in batch.items() if name != "labels"}
        with self._randomness(settings, batch):
            ids: Tensor = writer.generate(**given, **self.options, return_dict_in_generate=False)
        prompt = 1 if both else int(batch["input_ids"].shape[1])
        return Generated(ids, prompt, _ends(settings), both)

    def token_mask(self, site: Site, batch: Any, output: Generated, shape: tuple[int, int]) -> Tensor | None:
        """Return where real tokens are in the joined calls of a site."""
        if output.encoder_decoder and not is_decoder_site(site):
            return token_mask(site, batch, shape, encoder_decoder=True)
        whole = torch.cat([_prompt_mask(batch, output), _before_the_end(output)[:, :-1].cpu()], 1)
        named = tokens_in(site.subscripts)
        if named is not None:
            rows = _of_named(named, whole, output.prompt)
            whole = torch.stack(rows) if len(set(map(len, rows))) == 1 else whole
        if whole.shape == shape:
            return whole
        last = whole[:, output.prompt - 1 :]  # Of the prompt, the head gets only the last position.
        if last.shape == shape:
            return last
        raise HooklineError(
            f"{str(site)!r} has values of [batch, sequence] {tuple(shape)} in all its calls, and generate() passed "
            f"{tuple(whole.shape)} tokens; harvest a site through which each token passes once"
        )

    def refuse_after_the_end(self, site: Site, batch: Any, output: Generated) -> None:
        """Refuse a site that names tokens, if some samples end before these: rows="batch" would keep what follows."""
        named = tokens_in(site.subscripts)
        if named is None or (output.encoder_decoder and not is_decoder_site(site)):
            return
        whole = torch.cat([_prompt_mask(batch, output), _before_the_end(output)[:, :-1].cpu()], 1)
        rows = _of_named(named, whole, output.prompt)
        early = sum(not bool(row.all()) for row in rows)
        if early:
            raise HooklineError(
                f"{str(site)!r}: {early} of {len(rows)} samples end before these tokens; rows='tokens' keeps those "
                "before the end"
            )

    def tokens(self, batch: Any, output: Generated) -> Tensor:
        """Return the token number at each position, for `columns={"token": generation.tokens}`."""
        return output.ids[:, :-1]

    def __repr__(self) -> str:
        options = [f"{name}={value!r}" for name, value in sorted(self.options.items())]
        return f"Generation({', '.join([*options, f'seed={self.seed}'])})"

    def fingerprint(self) -> str:
        """Return a text that identifies the options."""
        return repr(self)

    def _settings(self, defaults: Any) -> dict[str, Any]:
        """Return the options in force: the user's, and the model's defaults for the rest."""
        own = self.options.get("generation_config")
        asked = {**({} if own is None else own.to_dict()), **self.options}
        return {**defaults.to_dict(), **{name: value for name, value in asked.items() if value is not None}}

    @contextlib.contextmanager
    def _randomness(self, settings: Mapping[str, Any], batch: Mapping[str, Any]) -> Iterator[None]:
        """Seed the random generators for a batch, and restore their state at the end."""
        if not settings.get("do_sample"):
            yield
            return
        tensors = [value for _, value in sorted(batch.items()) if isinstance(value, Tensor)]
        found = hashlib.sha256(b"".join(map(tensor_bytes, tensors)) + str(self.seed).encode()).digest()
        devices = sorted({tensor.device.index for tensor in tensors if tensor.is_cuda})
        seed = int.from_bytes(found[:8], "little") >> 1
        with torch.random.fork_rng(devices=devices):
            for generator in (torch.default_generator, *(torch.cuda.default_generators[index] for index in devices)):
                generator.manual_seed(seed)  # torch.manual_seed would seed all devices.
            yield


def _refuse_options(settings: Mapping[str, Any], whose: str) -> None:
    """Refuse options that would make rows for tokens that are not in the sample."""
    for name, reason in _REFUSED.items():
        value = settings.get(name)
        if value is not None and value != 1 and value != []:
            raise HooklineError(f"generate({name}={value!r}) can't be harvested{whose}: {reason}; leave it out")


def _check_prompt(batch: Mapping[str, Any], both: bool) -> None:
    """Refuse a batch whose prompt does not end right before the first generated token."""
    if both and "decoder_input_ids" in batch:
        raise HooklineError(
            "generate() begins the decoder's sequence by itself; leave decoder_input_ids out of the batch"
        )
    if not both and "input_ids" not in batch:
        raise HooklineError(f"generate() continues input_ids, and the batch has {', '.join(map(repr, batch))}")
    mask = batch.get("attention_mask")
    if not both and mask is not None and not bool(mask[:, -1].all()):
        raise HooklineError(
            "generate() would continue after the padding of this batch, or after an empty text; pad on the left: "
            'tokenizer.padding_side = "left"'
        )


def _prompt_mask(batch: Mapping[str, Any], output: Generated) -> Tensor:
    """Return a mask of the prompt's real tokens."""
    mask = None if output.encoder_decoder else batch.get("attention_mask")
    if mask is None:
        return torch.ones(len(output.ids), output.prompt, dtype=torch.bool)
    return torch.as_tensor(mask).cpu() != 0


def _ends(settings: Mapping[str, Any]) -> tuple[int, ...]:
    ends = settings.get("eos_token_id")
    if ends is None:
        return ()
    return tuple(map(int, ends.reshape(-1) if isinstance(ends, Tensor) else ends if isinstance(ends, list) else [ends]))


def _before_the_end(output: Generated) -> Tensor:
    """Return a mask of the generated tokens that come before the end-of-sequence token."""
    written = output.ids[:, output.prompt :]
    ended = torch.isin(written, torch.tensor(output.ends, device=written.device, dtype=written.dtype))
    return ended.cumsum(1) == 0


def _of_named(named: Tokens, whole: Tensor, prompt: int) -> list[Tensor]:
    """Return for each row which of the tokens that a site names come before its end.

    Args:
        whole: Where real tokens are, of all that passed.
    """
    rows = []
    for row in whole:
        tokens = row[:prompt][row[:prompt]], row[prompt:]  # Padding of the prompt does not count.
        part = {"prompt": tokens[0], "new": tokens[1]}.get(named.part, torch.cat(tokens))
        rows.append(part[[at for at in named.wanted(len(part)) if at < len(part)]])
    return rows
