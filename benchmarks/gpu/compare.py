"""How long `hl.compare` takes on a GPU, beside one forward, and how much memory.

python benchmarks/gpu/compare.py         prints the table and writes it to benchmarks/gpu/compare.txt
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import transformers
from harness import QUICK, machine
from torch import Tensor

import hookline as hl
from hookline._tables import Table


def llama(layers: int) -> tuple[Any, Tensor]:
    """Return a Llama-shaped model in float32 and 4 x 512 tokens."""
    config = transformers.LlamaConfig(
        vocab_size=32000, hidden_size=2048, intermediate_size=5504, num_hidden_layers=layers, num_attention_heads=16
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = transformers.LlamaForCausalLM(config).eval()
    return model, torch.randint(32000, (4, 512), device="cuda")


def seconds(run: Callable[[], Any]) -> float:
    """Return how long a function takes, the second time."""
    run()
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def row(layers: int, dtype: torch.dtype) -> tuple[object, ...]:
    """Compare a model with itself in another dtype."""
    model, ids = llama(layers)
    other = copy.deepcopy(model).to(dtype)
    with torch.no_grad():
        forward = seconds(lambda: model(ids))
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    report = hl.compare(model, other, run=(ids,))
    peak = torch.cuda.max_memory_allocated() - before
    taken = seconds(lambda: hl.compare(model, other, run=(ids,)))
    size = sum(one.numel() for one in model.parameters()) / 1e9
    name = f"{size:.1f}B, {layers} layers, float32 against {str(dtype)[6:]}"
    said = "ok" if report.ok else report.first.site
    return (
        name,
        len(report),
        said,
        f"{forward:.3f} s",
        f"{taken:.2f} s",
        f"{taken / forward:.0f}",
        f"{peak / 1e9:.1f} GB",
    )


def main() -> None:
    """Run everything, and print and save the table."""
    rows = [row(layers, dtype) for layers in (4, 24) for dtype in (torch.float32, torch.bfloat16)]
    header = ("Llama", "places", "result", "a forward", "hl.compare", "forwards' time", "more memory")
    device = f"{torch.cuda.get_device_name()}, transformers {transformers.__version__}"
    text = f"{machine()}, {device}\n\n{Table(header, rows, 'cost', names='Llama').text(whole=True)}\n"
    print(text)
    if not QUICK:
        Path(__file__).with_suffix(".txt").write_text(text)


if __name__ == "__main__":
    main()
