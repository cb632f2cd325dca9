"""Speed of hl.sweep on GPT-2, compared with a loop of forwards and with batches of cells, both with torch's hooks.

    python benchmarks/sweep.py               prints the tables and writes them to benchmarks/sweep.txt

Each cell of the first two tables patches the residual stream before one layer at one position, from a clean prompt into
a corrupted one; each of the third zeroes a head. Measurements of all contenders are compared with those of the loop.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from harness import QUICK, publish, usual
from patching import Grid, Heads, Residual, compare, contenders_for, gpt2

TINY = {"n_layer": 2, "n_embd": 48, "vocab_size": 100, "bos_token_id": 0, "eos_token_id": 0}
TOKENS = usual(15, quick=4)
ROUNDS = 3
EVERY = usual(5, quick=2)  # A forward for each cell takes long, so it is timed on some positions, or heads.


def tables() -> Iterator[str]:
    """Measure everything."""
    model = gpt2(**(TINY if QUICK else {}))
    clean, corrupted = torch.randint(100, (2, 1, TOKENS))
    for options, of in (({}, "all logits"), ({"logits_to_keep": 1}, "logits of the last position only")):
        one, other = ({"input_ids": ids, "use_cache": False, **options} for ids in (corrupted, clean))
        grids: dict[str, Grid] = {f"residual stream, layer × position, {of}": Residual(model, one, other)}
        if options:
            grids[f"zeroed heads, layer × head, {of}"] = Heads(model, one)
        for what, grid in grids.items():
            contenders = contenders_for(grid)
            del contenders["packed by hand"]
            title = f"GPT-2, {TOKENS} tokens: {what}, {len(model.transformer.h)} × {grid.size}"
            yield compare(title, grid, contenders, EVERY, ROUNDS)


def main() -> None:
    """Run everything, and print and save the tables."""
    with torch.no_grad():
        publish(__file__, tables)


if __name__ == "__main__":
    main()
