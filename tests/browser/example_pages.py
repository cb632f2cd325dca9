"""The pages that the tests open, written by hl.explore."""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn

import hookline as hl
from tests.support.command_line import said
from tests.support.needs import needs

SENTENCE = "The cat sat on the mat and looked at the dog that was eating its food"
TOKENS = [f" {word}" for word in SENTENCE.split()]


def _language_model() -> tuple[nn.Module, Tensor, Tensor]:
    """Return a GPT-2 of 12 layers, two sentences, and the same with one word changed."""
    transformers = needs("transformers")

    torch.manual_seed(0)
    sizes = {"n_embd": 192, "n_layer": 12, "n_head": 12, "vocab_size": 500, "bos_token_id": 0, "eos_token_id": 0}
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**sizes, initializer_range=0.11, attn_implementation="eager", use_cache=False)
    )
    ids = torch.randint(500, (2, len(TOKENS)))
    other = ids.clone()
    other[:, 5] = 11
    return model.eval(), ids, other


def gpt2(to: str | os.PathLike[str]) -> None:
    model, ids, other = _language_model()
    hl.explore(
        model,
        to=to,
        run=(ids,),
        against=(other,),
        at=[lambda name, module: "attn_dropout" not in name, "transformer.h.*.attn/softmax"],
        loss=lambda output: nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()),
        names=["clean", "corrupted"],
        tokens=[TOKENS, TOKENS],
        title="GPT-2, 12 layers",
    )


def digits(to: str | os.PathLike[str]) -> None:
    """Write the page of `hookline demo`."""
    needs("typer")
    needs("sklearn")
    said("demo", "--epochs", "2", "--to", os.fspath(to))
