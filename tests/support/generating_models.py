"""Tiny causal models that generate, what `generate()` is given, and an oracle that works on whole sequences.

The oracle knows nothing of calls and caches: it runs the model once over a whole sequence, and finds tokens with
Python's own slices of the list of a row's columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tests.support.architectures import small, transformers

WIDTH, WINDOW = 16, 4
# The name of an architecture in transformers, and its first layer.
CAUSAL = {
    "gpt2": "transformer.h.0",
    "llama": "model.layers.0",
    "mistral": "model.layers.0",
    "gemma2": "model.layers.0",
    "gemma3_text": "model.layers.0",
    "qwen2": "model.layers.0",
    "qwen3": "model.layers.0",
    "phi": "model.layers.0",
    "gpt_neox": "gpt_neox.layers.0",
    "opt": "model.decoder.layers.0",
    "bloom": "transformer.h.0[0]",  # A layer returns a tuple.
    "falcon": "transformer.h.0[0]",
    "mixtral": "model.layers.0",
    "mamba": "backbone.layers.0",
}
ENCODER_DECODERS = {
    "t5": ("encoder.block.{}[0]", "decoder.block.{}[0]"),
    "bart": ("model.encoder.layers.{}", "model.decoder.layers.{}"),
}
TAKES_POSITIONS = {
    "gpt2",
    "llama",
    "mistral",
    "gemma2",
    "gemma3_text",
    "qwen2",
    "qwen3",
    "phi",
    "gpt_neox",
    "opt",
    "falcon",
    "mixtral",
}


def generating(name: str) -> Any:
    """Return a model whose weights are large enough that every token matters, and which never ends a sequence."""
    auto = transformers.AutoModelForSeq2SeqLM if name in ENCODER_DECODERS else transformers.AutoModelForCausalLM
    config = small(transformers.CONFIG_MAPPING[name])
    if getattr(config, "sliding_window", None):
        config.sliding_window = WINDOW
    config.dropout_rate = 0.0
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = auto.from_config(config).eval()
    for parameter in model.parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=0.3)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = model.generation_config.decoder_start_token_id = 0
    return model


class Prompt(NamedTuple):
    """The token ids of a batch, and where real ones are."""

    ids: Tensor
    mask: Tensor


def prompt(padding: str, lengths: Sequence[int] = (6, 4, 5)) -> Prompt:
    """Return a batch of prompts with padding on the "left" or "right", or prompts of one length for "none"."""
    columns = max(lengths)
    mask = torch.ones(len(lengths), columns, dtype=torch.long)
    for row, length in enumerate(lengths):
        if padding == "left":
            mask[row, : columns - length] = 0
        elif padding == "right":
            mask[row, length:] = 0
    ids = torch.randint(3, 64, mask.shape, generator=torch.Generator().manual_seed(1))
    return Prompt(ids * mask, mask)


# What a row's oracle is given: the columns of its tokens, of its prompt, and of its new tokens.
Pick = Callable[[list[int], list[int], list[int]], list[int]]
SELECTORS: dict[str, Pick] = {
    "@2": lambda whole, prompt, new: [whole[2]],
    "@5": lambda whole, prompt, new: [whole[5]],
    "@7": lambda whole, prompt, new: whole[7:8],
    "@3:9": lambda whole, prompt, new: whole[3:9],
    "@:": lambda whole, prompt, new: whole,
    "@:4": lambda whole, prompt, new: whole[:4],
    "@5:": lambda whole, prompt, new: whole[5:],
    "@1:8:3": lambda whole, prompt, new: whole[1:8:3],
    "@::2": lambda whole, prompt, new: whole[::2],
    "@prompt": lambda whole, prompt, new: prompt,
    "@prompt[0]": lambda whole, prompt, new: [prompt[0]],
    "@prompt[-1]": lambda whole, prompt, new: [prompt[-1]],
    "@prompt[2:5]": lambda whole, prompt, new: prompt[2:5],
    "@prompt[-3:]": lambda whole, prompt, new: prompt[-3:],
    "@prompt[:-1]": lambda whole, prompt, new: prompt[:-1],
    "@prompt[-4:-1:2]": lambda whole, prompt, new: prompt[-4:-1:2],
    "@new": lambda whole, prompt, new: new,
    "@new[0]": lambda whole, prompt, new: [new[0]],
    "@new[1]": lambda whole, prompt, new: [new[1]],
    "@new[0:2]": lambda whole, prompt, new: new[0:2],
    "@new[1:]": lambda whole, prompt, new: new[1:],
    "@new[::2]": lambda whole, prompt, new: new[::2],
}


class Sequences(NamedTuple):
    """Whole sequences as the model is given them: without the last new token."""

    ids: Tensor
    mask: Tensor
    prompt: int  # The columns of the prompt.

    def columns(self, row: int, pick: Pick) -> list[int]:
        """Return the columns of the tokens that an oracle picks."""
        whole = self.mask[row].nonzero().flatten().tolist()
        ends = int(self.mask[row, : self.prompt].sum())
        return pick(whole, whole[:ends], whole[ends:])

    def chosen(self, pick: Pick) -> list[list[int]]:
        """Return the columns of each row."""
        return [self.columns(row, pick) for row in range(len(self.ids))]


def whole_sequences(given: Prompt, ids: Tensor) -> Sequences:
    """Return the sequences that passed when `generate()` returned these ids."""
    passed = ids[:, :-1]
    new = passed.shape[1] - given.ids.shape[1]
    mask = torch.cat([given.mask, torch.ones(len(ids), new, dtype=torch.long)], 1)
    return Sequences(passed, mask, given.ids.shape[1])


def of_whole(model: Any, name: str, sequences: Sequences, **more: Any) -> Tensor:
    """Return the logits of one forward over whole sequences, without a cache."""
    if (
        name in TAKES_POSITIONS
    ):  # As generate() counts them: on from the last column of the prompt, which may be padding.
        given = sequences.mask[:, : sequences.prompt]
        positions = (given.cumsum(1) - 1).masked_fill(given == 0, 0)
        later = torch.arange(1, sequences.ids.shape[1] - sequences.prompt + 1)
        more["position_ids"] = torch.cat([positions, positions[:, -1:] + later], 1)
    with torch.no_grad():
        output = model(input_ids=sequences.ids, attention_mask=sequences.mask, use_cache=False, **more)
    return output.logits


Write = Callable[[Tensor], None]  # Writes into the value of a layer.


@contextmanager
def oracle(model: nn.Module, writes: dict[str, Sequence[Write]]) -> Iterator[dict[str, Tensor]]:
    """Let plain torch hooks write into the outputs of layers, and keep what the outputs are then."""
    kept: dict[str, Tensor] = {}
    with ExitStack() as stack:
        for site, some in writes.items():
            path, bracket, _ = site.partition("[")

            def hook(
                _module: Any, _args: Any, output: Any, site: str = site, some: Any = some, bracket: str = bracket
            ) -> Any:
                value = (output[0] if bracket else output).clone()
                for write in some:
                    write(value)
                kept[site] = value.detach().clone()
                return (value, *output[1:]) if bracket else value

            stack.callback(model.get_submodule(path).register_forward_hook(hook).remove)
        yield kept


def adding(vector: Tensor, columns: list[list[int]]) -> Write:
    """Return a write that adds a vector to the tokens in these columns, for each row its own."""

    def write(value: Tensor) -> None:
        for row, own in enumerate(columns):
            for column in own:
                value[row, column] += vector.to(value.dtype)

    return write


def putting(values: Any, columns: list[list[int]]) -> Write:
    """Return a write that sets the tokens in these columns. `values` is (row, token, width)."""

    def write(value: Tensor) -> None:
        for row, own in enumerate(columns):
            for slot, column in enumerate(own):
                value[row, column] = values[row][slot]

    return write


def gathered(value: Tensor, columns: list[list[int]], is_one: bool = False) -> Tensor:
    """Return the tokens in these columns: (row, token, width), or (row, width) for one token."""
    found = torch.stack([torch.stack([value[row, column] for column in own]) for row, own in enumerate(columns)])
    return found[:, 0] if is_one else found


def second(site: str) -> str:
    """Return the second layer, for the first."""
    return site.replace(".0", ".1")


def at(site: str, selector: str) -> str:
    """Return the site of a token selector at a layer's value of shape (batch, tokens, width)."""
    return f"{site}[:, {selector}]"


def directions(many: int) -> list[Tensor]:
    """Return vectors that are linearly independent, so that none can stand for others."""
    return list(torch.linalg.qr(torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(2)))[0][:many])


def adds(vector: Tensor) -> Callable[[Tensor], Tensor]:
    """Return an edit that adds a vector."""
    return lambda value: value + vector


def close(found: Tensor, expected: Tensor, note: str = "") -> None:
    """Assert that two tensors are equal up to rounding, and have no NaN."""
    assert found.shape == expected.shape, f"{note}: {tuple(found.shape)} and {tuple(expected.shape)}"
    assert bool(found.isfinite().all()), note
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-3, msg=lambda text: f"{note}: {text}")
