"""Speed of hl.sweep on a GPU, compared with a loop of forwards and with batches of cells, both with torch's hooks.

    python benchmarks/gpu/sweep.py           prints the tables and writes them to benchmarks/gpu/sweep.txt

The loop waits for Python, and batches let the device work. Every contender waits for the device before the clock is
read.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import transformers
from harness import QUICK, machine, usual
from patching import Residual, compare, contenders_for, gpt2

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # Without a GPU, a quick run checks that this works.
TINY = {"n_layer": 2, "n_embd": 48, "vocab_size": 100, "bos_token_id": 0, "eos_token_id": 0}
TOKENS = usual(32, quick=4)
ROUNDS = 7
EVERY = usual(4, quick=2)


def tables() -> Iterator[str]:
    """Measure everything."""
    model = gpt2(**(TINY if QUICK else {})).to(DEVICE)
    clean, corrupted = torch.randint(100, (2, 1, TOKENS), device=DEVICE)
    for dtype, tolerance in ((torch.float32, 1e-3), (torch.bfloat16, 0.5)):  # A bfloat16 has 8 bits.
        one, other = ({"input_ids": ids, "use_cache": False} for ids in (corrupted, clean))
        grid = Residual(model.to(dtype), one, other)
        size = f"{len(model.transformer.h)} × {grid.size}"
        title = f"GPT-2, {str(dtype).partition('.')[2]}, {TOKENS} tokens: residual stream, layer × position, {size}"
        yield compare(title, grid, contenders_for(grid), EVERY, ROUNDS, tolerance)


def main() -> None:
    """Run everything, and print and save the tables."""
    device = torch.cuda.get_device_name() if DEVICE == "cuda" else "no GPU"
    text = f"{machine()}, {device}, transformers {transformers.__version__}\n"
    with torch.no_grad():
        for table in tables():
            text += "\n" + table
    print(text)
    if not QUICK:
        Path(__file__).with_suffix(".txt").write_text(text)


if __name__ == "__main__":
    main()
