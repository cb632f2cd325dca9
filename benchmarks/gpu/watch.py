"""Cost of hl.watch on a GPU in training and inference, compared with hooks written by hand, as ratios to bare.

    python benchmarks/gpu/watch.py           prints the tables and writes them to benchmarks/gpu/watch.txt

Every contender waits for the device before the clock is read. A run is some steps inside one block; entering and
leaving the block is part of the time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import transformers
from harness import QUICK, compare, machine, report, usual
from torch import Tensor, nn
from watch import anomaly, isnan_hooks

import hookline as hl

Watch = Callable[[nn.Module], AbstractContextManager[Any]]

WATCHES: dict[str, Watch] = {
    "bare": lambda model: nullcontext(),
    "isnan in forward hooks": isnan_hooks,
    "hl.watch, backward=False": lambda model: hl.watch(model, backward=False),
    "hl.watch": hl.watch,
    "hl.watch, at_once=True": lambda model: hl.watch(model, at_once=True),
    "hl.watch, every=1": lambda model: hl.watch(model, every=1),
}
OF_TRAINING: dict[str, Watch] = {
    **WATCHES,
    "isnan in forward and backward hooks": lambda model: isnan_hooks(model, True),
    "torch.autograd.set_detect_anomaly": anomaly,
}


def large() -> tuple[nn.Module, Tensor]:
    """Return a Llama-shaped model of 1.3 billion parameters in bfloat16 and 8 x 1024 tokens: little overhead."""
    config = transformers.LlamaConfig(
        vocab_size=32000, hidden_size=2048, intermediate_size=5504, num_hidden_layers=24, num_attention_heads=16
    )
    with torch.device("cuda"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    return model, torch.randint(32000, (8, 1024), device="cuda")


def small() -> tuple[nn.Module, Tensor]:
    """Return GPT-2 with 12 layers in bfloat16 and 1 x 32 tokens: the device waits for Python."""
    with torch.device("cuda"):
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config()).to(torch.bfloat16)
    return model, torch.randint(50000, (1, 32), device="cuda")


def training(model: nn.Module, ids: Tensor, steps: int, watch: Watch) -> Callable[[], None]:
    """Return a run of some training steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)

    def run() -> None:
        with watch(model):
            for _ in range(steps):
                optimizer.zero_grad()
                model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
                optimizer.step()
        torch.cuda.synchronize()

    return run


def inference(model: nn.Module, ids: Tensor, steps: int, watch: Watch) -> Callable[[], None]:
    """Return a run of some forwards."""

    def run() -> None:
        with torch.no_grad(), watch(model):
            for _ in range(steps):
                model(input_ids=ids, use_cache=False)
        torch.cuda.synchronize()

    return run


def peaks(model: nn.Module, ids: Tensor) -> str:
    """Return a table of the peak memory of a training step."""
    lines = ["peak memory of a training step; ratio to bare"]
    found: dict[str, int] = {}
    for name in ("bare", "hl.watch", "hl.watch, every=1"):
        run = training(model, ids, 1, WATCHES[name])
        run()
        torch.cuda.reset_peak_memory_stats()
        run()
        found[name] = torch.cuda.max_memory_allocated()
        lines.append(f"{name:44s} {found[name] / found['bare']:7.3f}   {found[name] / 1e9:6.2f} GB")
    return "\n".join(lines) + "\n"


def tables() -> list[str]:
    """Measure everything."""
    found = []
    cases = {
        "1.3B Llama, bfloat16, 8x1024 tokens": (large, 1, 5),
        "12-layer GPT-2, bfloat16, 1x32 tokens": (small, 10, 10),
    }
    for case, (make, steps, rounds) in cases.items():
        model, ids = make()
        steps = usual(steps, 1)
        runs = {name: inference(model.eval(), ids, steps, watch) for name, watch in WATCHES.items()}
        found.append(report(f"{case}: inference", compare(runs, rounds, 2)))
        model.train()
        runs = {name: training(model, ids, steps, watch) for name, watch in OF_TRAINING.items()}
        found.append(report(f"{case}: training step", compare(runs, rounds, 1)))
        found.append(peaks(model, ids))
        del model, runs
        torch.cuda.empty_cache()
    return found


def main() -> None:
    """Run everything, and print and save the tables."""
    device = f"{torch.cuda.get_device_name()}, transformers {transformers.__version__}"
    text = "\n".join([f"{machine()}, {device}\n", *tables()])
    print(text)
    if not QUICK:
        Path(__file__).with_suffix(".txt").write_text(text)


if __name__ == "__main__":
    main()
