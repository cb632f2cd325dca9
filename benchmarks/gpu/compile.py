"""Cost of hooks on a compiled model on a GPU, with and without CUDA graphs, and a check of the values.

    python benchmarks/gpu/compile.py         prints the tables and writes them to benchmarks/gpu/compile.txt

Every contender waits for the device before the clock is read.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import transformers
from harness import compare, machine, report
from torch import Tensor, nn

import hookline as hl

MODES = ("default", "reduce-overhead")
Run = Callable[[], object]


def large() -> tuple[nn.Module, Tensor]:
    """Return a Llama-shaped model of 1.3 billion parameters in bfloat16 and 8 x 1024 tokens: little overhead."""
    config = transformers.LlamaConfig(
        vocab_size=32000, hidden_size=2048, intermediate_size=5504, num_hidden_layers=24, num_attention_heads=16
    )
    with torch.device("cuda"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval()
    return model, torch.randint(32000, (8, 1024), device="cuda")


def small() -> tuple[nn.Module, Tensor]:
    """Return GPT-2 with 12 layers in bfloat16 and 1 x 32 tokens: the device waits for Python."""
    with torch.device("cuda"):
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config()).to(torch.bfloat16).eval()
    return model, torch.randint(50000, (1, 32), device="cuda")


def forward(model: Any, ids: Tensor) -> None:
    """Run a model and wait for the device."""
    model(input_ids=ids, use_cache=False)
    torch.cuda.synchronize()


class Case:
    """A model compiled twice: bare, and with every block captured in the graph."""

    def __init__(self, name: str, make: Callable[[], tuple[nn.Module, Tensor]], blocks: str, mode: str) -> None:
        self.name, self.blocks, self.mode = name, blocks, mode
        self.model, self.ids = make()
        twin = copy.deepcopy(self.model)
        self.bare: Any = torch.compile(self.model, mode=mode)
        self.hooked: Any = torch.compile(twin, mode=mode)
        self.hooks = hl.Hooks(self.hooked)
        self.acts = self.hooks.capture(blocks)

    def warm_up(self) -> None:
        """Compile and record the CUDA graphs, which takes three runs of each model."""
        for model in (self.bare, self.hooked):
            for _ in range(4):
                forward(model, self.ids)

    def one_shot(self) -> None:
        """Attach, run, detach. At its end, the block copies the values that are in the memory of a CUDA graph."""
        with hl.capture(self.bare, self.blocks):
            forward(self.bare, self.ids)

    def check(self) -> str:
        """Compare the values captured in the graph with those of an uncompiled run."""
        with hl.capture(self.model, self.blocks) as eager:
            forward(self.model, self.ids)
        forward(self.hooked, self.ids)
        seen = dict(self.acts)
        forward(self.bare, self.ids.flip(-1))  # Another run must not change values read before it.
        pairs = [(seen[site].flatten().float(), eager[site].flatten().float()) for site in eager]
        alike = min(float(torch.cosine_similarity(one, other, dim=0)) for one, other in pairs)
        return f"captured against uncompiled: {len(seen)} of {len(eager)} values, least cosine {alike:.5f}\n"

    def table(self, rounds: int) -> str:
        """Return the table of this case."""
        runs: dict[str, Run] = {
            "compiled, bare": lambda: forward(self.bare, self.ids),
            "hookline, every block": lambda: forward(self.hooked, self.ids),
            "hookline, attach, every block, detach": self.one_shot,
        }
        ratios = compare(runs, rounds=rounds, repeat=2)
        # Measured separately: it leaves the device partly idle, and the next contender would be a few per cent faster.
        eager = {"bare": runs["compiled, bare"], "not compiled, bare": lambda: forward(self.model, self.ids)}
        ratios["not compiled, bare"] = compare(eager, rounds=rounds, repeat=2)["not compiled, bare"]
        return report(f"{self.name}, mode={self.mode!r}: ratio to the compiled model", ratios) + self.check()


CASES: list[tuple[str, Callable[[], tuple[nn.Module, Tensor]], str, int]] = [
    ("1.3B Llama, bfloat16, 8x1024 tokens, 24 blocks", large, "model.layers.*", 15),
    ("12-layer GPT-2, bfloat16, 1x32 tokens, 12 blocks", small, "transformer.h.*", 60),
]


def measure(number: int, mode: str, ready: Callable[[], object] = lambda: None) -> str:
    """Measure one case. `ready` is called after compiling: it lets cases that compile in parallel be timed in turn."""
    name, make, blocks, rounds = CASES[number]
    case = Case(name, make, blocks, mode)
    case.warm_up()
    ready()
    found = case.table(rounds)
    case.hooks.remove()
    return found


def version() -> str:
    """Return the versions and the device of this run."""
    device = f"{torch.cuda.get_device_name()}, transformers {transformers.__version__}"
    return f"{machine()}, {device}, no_grad\n"


def main() -> None:
    """Run everything, and print and save the tables."""
    with torch.no_grad():
        found = [measure(number, mode) for number in range(len(CASES)) for mode in MODES]
    text = "\n".join([version(), *found])
    print(text)
    Path(__file__).with_suffix(".txt").write_text(text)


if __name__ == "__main__":
    main()
