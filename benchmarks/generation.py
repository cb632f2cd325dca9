"""Cost of naming tokens while a model generates, as ratios to the same edit without a selector.

    python benchmarks/generation.py          prints the tables and writes them to benchmarks/generation.txt

All edits of one table change the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from harness import QUICK, compare, publish, report, usual
from torch import Tensor

import hookline as hl

TOKENS = usual(24, quick=3)


def language_model(width: int) -> Any:
    """Return a GPT-2 with 12 layers and random weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": width, "n_head": width // 16, "n_layer": 12, "vocab_size": 1000}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=None)).eval()


def runs_of(model: Any, ids: Tensor, mask: Tensor) -> dict[str, Callable[[], object]]:
    """Return the contenders: each generates and changes a layer at some tokens."""

    def generate() -> None:
        model.generate(ids, attention_mask=mask, max_new_tokens=TOKENS, do_sample=False, pad_token_id=0)

    def edit(where: str) -> Callable[[], object]:
        def run() -> None:
            with hl.edit(model, where, lambda value: value + 1.0):
                generate()

        return run

    def new_by_step() -> None:
        def change(value: Tensor, call: hl.Call) -> Tensor | None:
            return value + 1.0 if call.step else None

        with hl.edit(model, "transformer.h.6", change, with_call=True):
            generate()

    def capture() -> None:
        with hl.capture(model, "transformer.h.6", keep="all"):
            generate()

    return {
        "edit h.6": edit("transformer.h.6"),
        "edit h.6[:, @:]": edit("transformer.h.6[:, @:]"),
        "edit h.6, where call.step > 0": new_by_step,
        "edit h.6[:, @new]": edit("transformer.h.6[:, @new]"),
        "edit h.6[:, @prompt[-1]]": edit("transformer.h.6[:, @prompt[-1]]"),
        'capture h.6, keep="all"': capture,
        "bare": generate,
    }


def tables() -> Iterator[str]:
    """Measure everything."""
    torch.manual_seed(0)
    ids = torch.randint(1, 1000, (2, 32))
    padded = torch.ones_like(ids)
    padded[0, :5] = 0
    with torch.no_grad():
        for width in (64,) if QUICK else (64, 768):
            model = language_model(width)
            for mask, what in ((torch.ones_like(ids), "no padding"), (padded, "one row padded")):
                title = f"GPT-2, 12 layers of width {width}, {TOKENS} new tokens behind 2×32, {what}; ratio to the edit"
                yield report(title, compare(runs_of(model, ids, mask), rounds=usual(12, quick=2), repeat=1))


if __name__ == "__main__":
    publish(__file__, tables)
