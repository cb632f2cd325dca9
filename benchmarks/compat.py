"""Cost of the older libraries in hookline.compat, compared with torch's hooks and with hookline's own functions.

python benchmarks/compat.py            prints the table and writes it to benchmarks/compat.txt
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
from baseline import model_of, raw_hooks, sample
from harness import compare, publish, report, usual
from torch import nn

import hookline as hl
from hookline.compat import nice_hooks
from hookline.compat.torch_hook_utils import get_layer_outputs, named_modules_of_type
from hookline.compat.torchhook import HookManager

DEPTH = usual(100, quick=10)


def one_shot() -> dict[str, list[float]]:
    """Compare hooking, running and unhooking."""
    model, x = model_of(DEPTH), sample()
    names = [name for name, _ in named_modules_of_type(model, nn.Linear)]

    def raw() -> None:
        handles = raw_hooks(model, {})
        model(x)
        for handle in handles:
            handle.remove()

    def layer_outputs() -> None:
        with get_layer_outputs(named_modules_of_type(model, nn.Linear)):
            model(x)

    def torchhook() -> None:
        with HookManager(model) as manager:
            for name in names:
                manager.add(name)
            model(x)

    return compare(
        {
            "raw torch hooks": raw,
            "hl.run": lambda: hl.run(model, x, capture=nn.Linear),
            "nice_hooks.run(return_activations=names)": lambda: nice_hooks.run(model, x, return_activations=names),
            "torch_hook_utils.get_layer_outputs": layer_outputs,
            "torchhook.HookManager, add, run": torchhook,
        },
        rounds=30,
    )


def tables() -> Iterator[str]:
    """Measure everything."""
    with torch.no_grad():
        yield report(f"one shot: hook {DEPTH} layers, run, unhook, no_grad; ratio to raw torch hooks", one_shot())


if __name__ == "__main__":
    publish(__file__, tables)
