"""Cost of hooks on a GPU with hookline and with torch's hooks, as ratios to the bare forward.

    python benchmarks/gpu/overhead.py        prints the tables and writes them to benchmarks/gpu/overhead.txt

Every contender waits for the device before the clock is read.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import transformers
from harness import compare, machine, report
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import hookline as hl

MATRICES = (nn.Linear, Conv1D)
Run = Callable[[], object]


class Enough(Exception):
    """Raised by a raw hook to end a forward."""


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


def forward(model: nn.Module, ids: Tensor) -> None:
    """Run a model and wait for the device."""
    model(input_ids=ids, use_cache=False)
    torch.cuda.synchronize()


def matrices(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, MATRICES)]


def first_tensor(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


def raw_hooks(
    model: nn.Module, names: list[str], kept: dict[str, Tensor], clone: bool = False
) -> list[torch.utils.hooks.RemovableHandle]:
    """Store the outputs of these modules with torch's hooks, as tutorials do."""

    def keeper(name: str) -> Callable[..., None]:
        def keep(_module: nn.Module, _args: object, output: Tensor | tuple[Tensor, ...]) -> None:
            tensor = first_tensor(output).detach()
            kept[name] = tensor.clone() if clone else tensor

        return keep

    return [model.get_submodule(name).register_forward_hook(keeper(name)) for name in names]


def raw_run(model: nn.Module, ids: Tensor, names: list[str], clone: bool) -> Run:
    """Register, run, remove."""

    def run() -> None:
        handles = raw_hooks(model, names, {}, clone)
        forward(model, ids)
        for handle in handles:
            handle.remove()

    return run


def hookline_run(model: nn.Module, ids: Tensor, names: list[str], clone: bool | None = None) -> Run:
    """Attach, run, detach."""

    def run() -> None:
        with hl.capture(model, names, clone=clone):
            forward(model, ids)

    return run


def one_shot(model: nn.Module, ids: Tensor, names: list[str]) -> Mapping[str, Run]:
    """Return runs that attach hooks for one forward each."""
    return {
        "bare": lambda: forward(model, ids),
        "bare again": lambda: forward(model, ids),
        "raw torch hooks, references": raw_run(model, ids, names, clone=False),
        "raw torch hooks, copies": raw_run(model, ids, names, clone=True),
        "hookline, safe (copy on write)": hookline_run(model, ids, names),
        "hookline, clone=False": hookline_run(model, ids, names, clone=False),
        "hookline, clone=True": hookline_run(model, ids, names, clone=True),
    }


def attached(model: nn.Module, ids: Tensor, names: list[str]) -> Mapping[str, Run]:
    """Return runs with hooks that stay attached, each on its own model."""
    kinds: dict[str, Callable[[nn.Module], object]] = {
        "raw torch hooks, references": lambda twin: raw_hooks(twin, names, {}),
        "raw torch hooks, copies": lambda twin: raw_hooks(twin, names, {}, clone=True),
        "hookline, safe (copy on write)": lambda twin: _hooks(twin, names),
        "hookline, clone=False": lambda twin: _hooks(twin, names, clone=False),
        "hookline, clone=True": lambda twin: _hooks(twin, names, clone=True),
        "hookline, deactivated": lambda twin: _hooks(twin, names).deactivate(),
    }
    contenders: dict[str, Run] = {
        "bare": lambda: forward(model, ids),
        "bare again": lambda: forward(model, ids),
    }
    for name, hook in kinds.items():
        twin = copy.deepcopy(model)
        hook(twin)
        contenders[name] = lambda twin=twin: forward(twin, ids)
    return contenders


_alive: list[hl.Hooks] = []  # Hooks are removed when they are garbage-collected.


def _hooks(model: nn.Module, names: list[str], clone: bool | None = None) -> hl.Hooks:
    hooks = hl.Hooks(model)
    hooks.capture(names, clone=clone)
    _alive.append(hooks)
    return hooks


def stopped(model: nn.Module, ids: Tensor, name: str) -> Mapping[str, Run]:
    """Return runs that stop at one module."""

    def leave(*_: object) -> None:
        raise Enough

    def raw() -> None:
        handle = model.get_submodule(name).register_forward_hook(leave)
        try:
            forward(model, ids)
        except Enough:
            torch.cuda.synchronize()
        finally:
            handle.remove()

    def hookline() -> None:
        with hl.capture(model, name, stop=True):
            forward(model, ids)

    return {
        "bare": lambda: forward(model, ids),
        "bare again": lambda: forward(model, ids),
        "raw torch hook that raises": raw,
        "hookline, stop=True": hookline,
    }


def inside(model: nn.Module, ids: Tensor, attention: str, weight: str) -> Mapping[str, Run]:
    """Return runs that capture inside one layer, and inside every layer."""
    where = {
        "softmax of 1 layer": f"{attention.replace('*', '5')}/softmax",
        "softmax of every layer": f"{attention}/softmax",
        "every function of 1 layer": f"{attention.replace('*', '5')}/*",
        "what is made of 1 weight": f"{weight}/*",
        "1 weight as it is read": f"{weight}:param",
    }
    runs = {f"hookline, {name}": hookline_run(model, ids, [place]) for name, place in where.items()}
    return {"bare": lambda: forward(model, ids), "bare again": lambda: forward(model, ids), **runs}


def tables() -> list[str]:
    """Measure everything."""
    model, ids = large()
    blocks = [f"model.layers.{number}" for number in range(24)]
    linear = matrices(model)
    size = "1.3B Llama, bfloat16, 8x1024 tokens"
    cases = {
        "all 24 blocks, attach, run, detach": one_shot(model, ids, blocks),
        f"all {len(linear)} linear layers, attach, run, detach": one_shot(model, ids, linear),
        "stopped after 12 of 24 blocks": stopped(model, ids, "model.layers.11"),
    }
    found = [report(f"{size}: {case}", compare(contenders, 15, 2)) for case, contenders in cases.items()]
    model.set_attn_implementation("eager")
    contenders = inside(model, ids, "model.layers.*.self_attn", "model.layers.5.self_attn.q_proj.weight")
    found.append(report(f"{size}, eager attention: attach, run, detach", compare(contenders, 15, 2)))
    del cases, contenders
    del model
    torch.cuda.empty_cache()
    model, ids = small()
    every = matrices(model)
    size = "12-layer GPT-2, bfloat16, 1x32 tokens"
    cases = {
        f"all {len(every)} matrix layers, attached": attached(model, ids, every),
        f"all {len(every)} matrix layers, attach, run, detach": one_shot(model, ids, every),
        "all 12 blocks, attach, run, detach": one_shot(model, ids, [f"transformer.h.{number}" for number in range(12)]),
    }
    found += [report(f"{size}: {case}", compare(contenders)) for case, contenders in cases.items()]
    model.set_attn_implementation("eager")
    contenders = inside(model, ids, "transformer.h.*.attn", "transformer.h.5.attn.c_attn.weight")
    return [*found, report(f"{size}, eager attention: attach, run, detach", compare(contenders))]


def main() -> None:
    """Run everything, and print and save the tables."""
    device = f"{torch.cuda.get_device_name()}, transformers {transformers.__version__}"
    title = f"{machine()}, {device}, no_grad\nratios to the bare forward\n"
    with torch.no_grad():
        text = "\n".join([title, *tables()])
    print(text)
    Path(__file__).with_suffix(".txt").write_text(text)


if __name__ == "__main__":
    main()
