"""Cost of captures in memory, to the byte, and cost of a memory limit in time.

python benchmarks/memory.py              prints the tables and writes them to benchmarks/memory.txt
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
from allocations import allocated_by
from baseline import model_of as small_model_of
from harness import compare, publish, report, usual
from torch import Tensor, nn

import hookline as hl

DEPTH, WIDTH, BATCH = 12, 512, usual(2048, quick=64)
VALUE = 4 * BATCH * WIDTH  # The bytes of each activation: 4 MB.
Run = Callable[[nn.Module, Tensor], object]


def model_of(inplace: bool) -> nn.Sequential:
    """Return linear layers with a ReLU after each. With `inplace`, the ReLU overwrites its input."""
    return nn.Sequential(*[one for _ in range(DEPTH) for one in (nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace))])


def references(model: nn.Module, x: Tensor) -> object:
    """Keep the output of every module with torch's hooks, as tutorials do."""
    kept: dict[str, Tensor] = {}

    def keeper(name: str) -> Callable[..., None]:
        def keep(_module: nn.Module, _args: object, output: Tensor) -> None:
            kept[name] = output.detach()

        return keep

    handles = [module.register_forward_hook(keeper(name)) for name, module in model.named_children()]
    output = model(x)
    for handle in handles:
        handle.remove()
    return output, kept


def captured(**options: object) -> Run:
    """Capture the output of every module with hookline."""

    def run(model: nn.Module, x: Tensor) -> object:
        with hl.capture(model, "*", **options) as acts:  # type: ignore[arg-type]
            output = model(x)
        return output, acts

    return run


RUNS: dict[str, Run] = {
    "bare": lambda model, x: (model(x), None),
    "raw torch hooks, references": references,
    "hookline, safe (copy on write)": captured(),
    "hookline, clone=False": captured(clone=False),
    "hookline, clone=True": captured(clone=True),
    'hookline, limit="1 GB"': captured(limit="1 GB"),
    'hookline, limit="20 MiB", spill=True': captured(limit="20 MiB", spill=True),
}


def forward(run: Run, model: nn.Module, x: Tensor) -> object:
    """Run without gradients. Return the captured values, but not the output."""
    with torch.no_grad():
        return run(model, x)[1]  # type: ignore[index]


def backward(run: Run, model: nn.Module, x: Tensor) -> object:
    """Run forward and backward. Return the captured values, but not the output and the gradients."""
    output, kept = run(model, x)  # type: ignore[misc]
    torch.autograd.grad(output.square().mean(), list(model.parameters()))
    return kept


def bytes_of(title: str, way: Callable[[Run, nn.Module, Tensor], object], inplace: bool) -> str:
    """Return a table of the memory that each way to capture allocates."""
    model, x = model_of(inplace), torch.randn(BATCH, WIDTH)
    lines = [title, f"{'':44s} {'peak':>9s} {'left':>9s}   (each activation is 1)"]
    for name, run in RUNS.items():
        peak, left = allocated_by(lambda run=run: way(run, model, x))  # type: ignore[misc]
        lines.append(f"{name:44s} {peak / VALUE:9.3f} {left / VALUE:9.3f}")
    return "\n".join(lines) + "\n"


def time_of() -> str:
    """Return two tables: the cost of counting bytes on a model of little work, and of the disk on a larger one."""
    x = torch.randn(1, 16)
    twins = {name: small_model_of(200) for name in ("bare", "free", "calls", "limit", "spill")}
    for name, options in {
        "free": {},
        "calls": {"keep": 2},
        "limit": {"limit": "1 GB"},
        "spill": {"limit": 200 * 64, "spill": True},
    }.items():
        hooks = hl.Hooks(twins[name])
        hooks.capture(nn.Linear, **options)
        twins[name].hooks = lambda hooks=hooks: hooks  # Keep the hooks alive.
    names = {
        "bare": "bare",
        "bare again": "bare",
        "hookline": "free",
        "hookline, keep=2 (off the hot path too)": "calls",
        "hookline, limit far away": "limit",
        "hookline, limit just enough": "spill",
    }
    ratios = compare({label: lambda name=name: twins[name](x) for label, name in names.items()}, rounds=40)
    model, x = model_of(False), torch.randn(BATCH, WIDTH)
    runs = {name: lambda run=run: run(model, x) for name, run in RUNS.items()}
    large = compare(runs, rounds=5, repeat=1, clock=time.perf_counter)  # Wall clock, since it waits for the disk.
    small = report("attached: 200 small linear layers captured, ratio of the time to the bare forward", ratios)
    title = "one shot: 24 activations of 4 MB captured, ratio of the wall clock to the bare forward"
    return small + "\n" + report(title, large)


def tables() -> Iterator[str]:
    """Measure everything."""
    subject = f"{2 * DEPTH} activations captured"
    yield bytes_of(f"{subject}, no_grad", forward, inplace=False)
    yield bytes_of(f"{subject}, no_grad, of which the model overwrites half", forward, inplace=True)
    yield bytes_of(f"{subject}, forward and backward", backward, inplace=False)
    with torch.no_grad():
        yield time_of()


if __name__ == "__main__":
    publish(__file__, tables)
