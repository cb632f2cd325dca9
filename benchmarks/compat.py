"""What the older libraries' names cost on hookline: beside torch's own hooks, and beside hookline's own words.

python benchmarks/compat.py            prints the table and writes it to benchmarks/compat.txt
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
from harness import compare, machine, report
from overhead import model_of, raw_hooks
from torch import nn

import hookline as hl
from hookline.compat import nice_hooks
from hookline.compat.torch_hook_utils import get_layer_outputs, named_modules_of_type
from hookline.compat.torchhook import HookManager

DEPTH = 100


def main() -> None:
    """Run everything, print it, and keep it."""
    torch.set_num_threads(1)
    model, x = model_of(DEPTH), torch.randn(1, 16)
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

    with torch.no_grad():
        ratios = compare(
            {
                "raw torch hooks": raw,
                "raw again": raw,
                "hl.run": lambda: hl.run(model, x, capture=nn.Linear),
                "nice_hooks.run(return_activations=names)": lambda: nice_hooks.run(model, x, return_activations=names),
                "torch_hook_utils.get_layer_outputs": layer_outputs,
                "torchhook.HookManager, add, run": torchhook,
            }
        )
    title = f"one shot: hook {DEPTH} layers, run, unhook, ratio to raw torch hooks"
    text = machine() + ", no_grad\n\n" + report(title, ratios)
    print(text)
    Path(__file__).with_suffix(".txt").write_text(text)


if __name__ == "__main__":
    main()
