"""Cost of hooks while a model generates on a GPU, as ratios to the bare generation.

    python benchmarks/gpu/generate.py        prints the table and writes it to benchmarks/gpu/generate.txt

Generation of one sequence is bound by launches: the device waits for Python.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))

import torch
import transformers
from harness import compare, machine, report
from overhead import Run, first_tensor, small
from torch import Tensor, nn

import hookline as hl

TOKENS = 48
BLOCKS = "transformer.h.*"


def generate(model: Any, ids: Tensor) -> None:
    """Generate and wait for the device."""
    model.generate(ids, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False, pad_token_id=0)
    torch.cuda.synchronize()


def raw(model: Any, ids: Tensor, hook: Callable[..., object], *modules: nn.Module) -> Run:
    """Register a hook, generate, remove it."""

    def run() -> None:
        handles = [module.register_forward_hook(hook) for module in modules]
        generate(model, ids)
        for handle in handles:
            handle.remove()

    return run


def table() -> str:
    """Measure everything."""
    model, ids = small()
    held: Any = model
    blocks = list(held.transformer.h)
    kept: dict[int, list[Tensor]] = {}
    vector = torch.zeros(768, device="cuda", dtype=torch.bfloat16)

    def keep_last(module: nn.Module, _args: object, output: Any) -> None:
        kept[id(module)] = [first_tensor(output).detach()]

    def keep_all(module: nn.Module, _args: object, output: Any) -> None:
        kept.setdefault(id(module), []).append(first_tensor(output).detach())

    def steer(_module: nn.Module, _args: object, output: Any) -> Any:
        return output + vector if isinstance(output, Tensor) else (output[0] + vector, *output[1:])

    def captured(**options: Any) -> Run:
        def run() -> None:
            with hl.capture(model, BLOCKS, **options):
                generate(model, ids)

        return run

    def raw_all() -> None:
        kept.clear()
        raw(model, ids, keep_all, *blocks)()

    def steered() -> None:
        with hl.edit(model, "transformer.h.6", lambda value: steer(model, (), value)):
            generate(model, ids)

    def steered_new() -> None:
        with hl.edit(model, "transformer.h.6[:, @new]", lambda value: value + vector):
            generate(model, ids)

    runs: dict[str, Run] = {
        "bare": lambda: generate(model, ids),
        "raw torch hooks, 12 blocks, last": raw(model, ids, keep_last, *blocks),
        "hookline, 12 blocks, last": captured(),
        "raw torch hooks, 12 blocks, all": raw_all,
        'hookline, 12 blocks, keep="all"': captured(keep="all"),
        "raw torch hook, steering": raw(model, ids, steer, blocks[6]),
        "hookline, steering by edit": steered,
        "hookline, steering the new tokens": steered_new,
    }
    return report(f"12-layer GPT-2, bfloat16, {TOKENS} new tokens behind 32", compare(runs, 12, 1))


def main() -> None:
    """Run everything, and print and save the table."""
    device = f"{torch.cuda.get_device_name()}, transformers {transformers.__version__}"
    with torch.no_grad():
        text = "\n".join([f"{machine()}, {device}\nratios to the bare generation\n", table()])
    print(text)
    Path(__file__).with_suffix(".txt").write_text(text)


if __name__ == "__main__":
    main()
