"""What hooks cost: hookline beside torch's own hooks, as ratios to the bare forward.

python benchmarks/overhead.py            prints the tables and writes them to benchmarks/overhead.txt
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
from harness import compare, machine, report
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import hookline as hl

DEPTH = 200


def model_of(depth: int) -> nn.Sequential:
    """`depth` small linear layers with a ReLU after each: all overhead, little work."""
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(16, 16), nn.ReLU()]
    return nn.Sequential(*layers).eval()


def raw_hooks(model: nn.Module, kept: dict[str, Tensor]) -> list[torch.utils.hooks.RemovableHandle]:
    """Store the output of every linear layer with torch's own hooks, as tutorials do."""

    def keeper(name: str) -> Callable[..., None]:
        def keep(_module: nn.Module, _args: object, output: Tensor) -> None:
            kept[name] = output.detach()

        return keep

    linear = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return [module.register_forward_hook(keeper(name)) for name, module in linear]


def attached(model: nn.Module, x: Tensor) -> str:
    """Hooks that are there already: what each forward costs."""
    twins = {name: model_of(DEPTH) for name in ("raw", "cow", "reference", "clone", "resting")}
    raw_hooks(twins["raw"], {})
    sets = {name: hl.Hooks(twin) for name, twin in twins.items() if name != "raw"}
    sets["cow"].capture(nn.Linear)
    sets["reference"].capture(nn.Linear, clone=False)
    sets["clone"].capture(nn.Linear, clone=True)
    sets["resting"].capture(nn.Linear)
    sets["resting"].deactivate()
    ratios = compare(
        {
            "bare": lambda: model(x),
            "bare again": lambda: model(x),
            "raw torch hooks, references": lambda: twins["raw"](x),
            "hookline, safe (copy on write)": lambda: twins["cow"](x),
            "hookline, clone=False": lambda: twins["reference"](x),
            "hookline, clone=True": lambda: twins["clone"](x),
            "hookline, deactivated": lambda: twins["resting"](x),
        }
    )
    return report(f"attached: all {DEPTH} linear layers captured, ratio to the bare forward", ratios)


def one_shot(model: nn.Module, x: Tensor) -> str:
    """Attach, capture, detach, every time."""

    def raw_all() -> None:
        handles = raw_hooks(model, {})
        model(x)
        for handle in handles:
            handle.remove()

    def raw_one() -> None:
        handle = model[100].register_forward_hook(lambda *_: None)
        model(x)
        handle.remove()

    def hookline_all() -> None:
        with hl.capture(model, nn.Linear):
            model(x)

    def hookline_one() -> None:
        with hl.capture(model, "100"):
            model(x)

    def hookline_patch() -> None:
        with hl.patch(model, {"100": 0.0}):
            model(x)

    ratios = compare(
        {
            "bare": lambda: model(x),
            "bare again": lambda: model(x),
            f"raw torch hooks, all {DEPTH}": raw_all,
            f"hookline, all {DEPTH}": hookline_all,
            "raw torch hooks, 1": raw_one,
            "hookline, 1": hookline_one,
            "hookline, patch 1": hookline_patch,
        }
    )
    return report("one shot: attach, run, detach, ratio to the bare forward", ratios)


def set_up(model: nn.Module) -> str:
    """Attaching and detaching alone."""

    def raw() -> None:
        for handle in raw_hooks(model, {}):
            handle.remove()

    def hookline() -> None:
        with hl.capture(model, nn.Linear):
            pass

    ratios = compare({"raw register and remove": raw, "raw again": raw, "hookline": hookline})
    return report(f"set-up and tear-down for {DEPTH} modules, ratio to torch's own", ratios)


def gpt(width: int) -> nn.Module:
    """A GPT-2 of 12 layers whose attention makes its pattern."""
    from transformers import GPT2Config, GPT2Model

    config = GPT2Config(n_embd=width, n_head=width // 16, n_layer=12, vocab_size=100, bos_token_id=0, eos_token_id=0)
    config._attn_implementation = "eager"
    return GPT2Model(config).eval()  # type: ignore[no-any-return]


class EveryFunction(TorchFunctionMode):
    """Sees every function of a forward, and does nothing: the least that logging each one costs."""

    def __torch_function__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return function(*args, **(kwargs or {}))


def inside(width: int) -> str:
    """One place inside one layer: a function, a method, a parameter."""
    model, ids = gpt(width), torch.arange(32)[None]

    def capture(*where: str) -> Callable[[], None]:
        def run() -> None:
            with hl.capture(model, *where):
                model(ids)

        return run

    def every_function() -> None:
        with EveryFunction():
            model(ids)

    ratios = compare(
        {
            "bare": lambda: model(ids),
            "bare again": lambda: model(ids),
            "h.5.attn/softmax": capture("h.5.attn/softmax"),
            "h.*.attn/softmax": capture("h.*.attn/softmax"),
            "h.5.attn/*": capture("h.5.attn/*"),
            "h.5.attn.c_attn.weight/addmm": capture("h.5.attn.c_attn.weight/addmm"),
            "h.5.attn.c_attn.weight:param": capture("h.5.attn.c_attn.weight:param"),
            "h.5.mlp, a module": capture("h.5.mlp"),
            "a mode that sees every function": every_function,
        },
        rounds=40,
    )
    return report(f"inside: attach, run a 12-layer GPT-2 of width {width} on 32 words, detach; ratio to bare", ratios)


def main() -> None:
    """Run everything, print it, and keep it."""
    torch.set_num_threads(1)
    model, x = model_of(DEPTH), torch.randn(1, 16)
    with torch.no_grad():
        tables = [attached(model, x), one_shot(model, x), set_up(model), inside(64), inside(768)]
    text = "\n".join([machine() + ", no_grad\n", *tables])
    print(text)
    Path(__file__).with_suffix(".txt").write_text(text)


if __name__ == "__main__":
    main()
