"""Cost of values and gradients in a training step on a GPU, as ratios to the bare step.

    python benchmarks/gpu/training.py        prints the tables and writes them to benchmarks/gpu/training.txt

A step is a forward, a backward, and setting the gradients of the parameters to None. Every contender waits for the
device before the clock is read. The last table is a profile: how long the device is busy, and with what.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))

import torch
import transformers
from harness import compare, machine, report
from overhead import Run, first_tensor, large, matrices, small
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import hookline as hl


def step(model: Any, ids: Tensor) -> None:
    """Run one training step and wait for the device."""
    model(input_ids=ids, use_cache=False).logits.float().mean().backward()
    model.zero_grad(set_to_none=True)
    torch.cuda.synchronize()


def raw(model: nn.Module, ids: Tensor, names: list[str], copy: bool = False) -> Run:
    """Keep values and gradients with torch's hooks, as tutorials do."""

    def keeper(values: dict[str, Tensor], gradients: dict[str, Tensor], name: str) -> Callable[..., None]:
        def arrived(gradient: Tensor) -> None:
            gradients[name] = gradient.clone() if copy else gradient

        def keep(_module: nn.Module, _args: object, output: Tensor | tuple[Tensor, ...]) -> None:
            tensor = first_tensor(output)
            values[name] = tensor.detach().clone() if copy else tensor.detach()
            tensor.register_hook(arrived)

        return keep

    def run() -> None:
        values: dict[str, Tensor] = {}
        gradients: dict[str, Tensor] = {}
        handles = [model.get_submodule(name).register_forward_hook(keeper(values, gradients, name)) for name in names]
        step(model, ids)
        for handle in handles:
            handle.remove()

    return run


def hookline(model: nn.Module, ids: Tensor, names: list[str], *ports: str, **options: Any) -> Run:
    """Attach, run a step, detach."""
    where = [f"{name}{port}" for port in ports for name in names]

    def run() -> None:
        with hl.capture(model, where, **options):
            step(model, ids)

    return run


def contenders(model: nn.Module, ids: Tensor, names: list[str]) -> Mapping[str, Run]:
    both = "", ":grad_output"
    return {
        "bare": lambda: step(model, ids),
        "raw torch hooks, references": raw(model, ids, names),
        "raw torch hooks, copies": raw(model, ids, names, copy=True),
        "hookline, values": hookline(model, ids, names, ""),
        "hookline, gradients": hookline(model, ids, names, ":grad_output"),
        "hookline, values and gradients": hookline(model, ids, names, *both),
        "the same, clone=False": hookline(model, ids, names, *both, clone=False),
    }


def busy(runs: Mapping[str, Run]) -> str:
    """Return how long the device works in one step, and how much of that is copying."""
    lines = []
    for name in ("bare", "raw torch hooks, references", "hookline, values and gradients"):
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            runs[name]()
        events = trace.key_averages()
        total = sum(event.self_device_time_total for event in events)
        copies = sum(event.self_device_time_total for event in events if "copy" in event.key.lower())
        lines.append(f"{name:40s}{total / 1e3:10.2f}{copies / 1e3:14.2f}")
    return "\n".join([f"{'':40s}{'device, ms':>10s}{'copies in it':>14s}", *lines, ""])


def tables() -> list[str]:
    """Measure everything."""
    model, ids = large()
    ids = ids[:2]
    linear = matrices(model)
    size = "1.3B Llama, bfloat16, 2x1024 tokens, a training step"
    runs = contenders(model, ids, linear)
    found = [report(f"{size}: all {len(linear)} linear layers", compare(runs, 8, 2))]
    found.append(f"{size}: all {len(linear)} linear layers, a profile\n{busy(runs)}")
    blocks = [f"model.layers.{number}" for number in range(24)]
    found.append(report(f"{size}: all 24 blocks", compare(contenders(model, ids, blocks), 8, 2)))
    del model, runs
    torch.cuda.empty_cache()
    model, ids = small()
    every = matrices(model)
    size = "12-layer GPT-2, bfloat16, 1x32 tokens, a training step"
    return [*found, report(f"{size}: all {len(every)} matrix layers", compare(contenders(model, ids, every), 30, 2))]


def main() -> None:
    """Run everything, and print and save the tables."""
    device = f"{torch.cuda.get_device_name()}, transformers {transformers.__version__}"
    text = "\n".join([f"{machine()}, {device}\nratios to the bare step\n", *tables()])
    print(text)
    Path(__file__).with_suffix(".txt").write_text(text)


if __name__ == "__main__":
    main()
