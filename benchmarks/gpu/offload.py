"""Cost of capturing to host memory on a CUDA device, as ratios to the bare forward.

    python benchmarks/gpu/offload.py    # Two minutes; prints the tables and writes them to benchmarks/gpu/offload.txt

Every contender waits for the device, and therefore for its copies, before the clock is read.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))

import torch
import transformers
from harness import compare, machine, report
from overhead import Run, first_tensor, forward, large, raw_hooks, small
from torch import Tensor, nn

import hookline as hl
from hookline._engine import offload

Kept = dict[str, object]


def hooks_to_host(model: nn.Module, names: list[str], kept: Kept) -> list[torch.utils.hooks.RemovableHandle]:
    """Store the outputs of these modules on the host, as tutorials do."""

    def keeper(name: str) -> Callable[..., None]:
        def keep(_module: nn.Module, _args: object, output: Tensor | tuple[Tensor, ...]) -> None:
            kept[name] = first_tensor(output).detach().cpu()

        return keep

    return [model.get_submodule(name).register_forward_hook(keeper(name)) for name in names]


class ByHand:
    """An expert's version: reused pinned buffers and a second stream. It relies on the model to overwrite nothing."""

    def __init__(self) -> None:
        self.aside = torch.cuda.Stream()
        self.buffers: dict[str, Tensor] = {}

    def __call__(self, model: nn.Module, names: list[str], kept: Kept) -> list[torch.utils.hooks.RemovableHandle]:
        def keeper(name: str) -> Callable[..., None]:
            def keep(_module: nn.Module, _args: object, output: Tensor | tuple[Tensor, ...]) -> None:
                tensor = first_tensor(output).detach()
                if name not in self.buffers:
                    self.buffers[name] = torch.empty_like(tensor, device="cpu", pin_memory=True)
                self.aside.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(self.aside):
                    self.buffers[name].copy_(tensor, non_blocking=True)
                tensor.record_stream(self.aside)
                kept[name] = self.buffers[name], self.aside.record_event()

            return keep

        return [model.get_submodule(name).register_forward_hook(keeper(name)) for name in names]


def raw(model: nn.Module, ids: Tensor, names: list[str], hook: Callable[..., object]) -> Run:
    """Register, run, remove."""

    def run() -> None:
        handles = hook(model, names, {})
        forward(model, ids)
        for handle in handles:  # type: ignore[attr-defined]
            handle.remove()

    return run


def hookline(model: nn.Module, ids: Tensor, names: list[str], read: bool = False, **options: object) -> Run:
    """Attach, run, detach."""

    def run() -> None:
        with hl.capture(model, names, **options) as acts:
            forward(model, ids)
        if read:
            list(acts.values())

    return run


def one_shot(model: nn.Module, ids: Tensor, names: list[str]) -> Mapping[str, Run]:
    """Return runs that attach hooks for one forward each."""
    return {
        "bare": lambda: forward(model, ids),
        "bare again": lambda: forward(model, ids),
        "raw torch hooks, kept on the device": raw(model, ids, names, raw_hooks),
        "raw torch hooks, .cpu()": raw(model, ids, names, hooks_to_host),
        "raw torch hooks, pinned, by hand": raw(model, ids, names, ByHand()),
        "hookline, kept on the device": hookline(model, ids, names),
        'hookline, device="cpu"': hookline(model, ids, names, device="cpu"),
        'hookline, device="cpu", all values read': hookline(model, ids, names, read=True, device="cpu"),
        'hookline, device="cpu", [:, -1]': hookline(model, ids, _last(model, ids, names), device="cpu"),
    }


def _last(model: nn.Module, ids: Tensor, names: list[str]) -> list[str]:
    """Return the site of the last token of each block. Some models' blocks return a tuple."""
    _, acts = hl.run(model, capture=names[0], input_ids=ids, use_cache=False)
    return [f"{name}{'' if isinstance(acts[names[0]], Tensor) else '[0]'}[:, -1]" for name in names]


def attached(model: nn.Module, ids: Tensor, names: list[str]) -> Mapping[str, Run]:
    """Return runs with hooks that stay attached, each on its own model."""
    kinds: dict[str, Callable[[nn.Module], object]] = {
        "raw torch hooks, kept on the device": lambda twin: raw_hooks(twin, names, {}),
        "raw torch hooks, .cpu()": lambda twin: hooks_to_host(twin, names, {}),
        "raw torch hooks, pinned, by hand": lambda twin: ByHand()(twin, names, {}),
        "hookline, kept on the device": lambda twin: _hooks(twin, names),
        'hookline, device="cpu"': lambda twin: _hooks(twin, names, device="cpu"),
    }
    contenders: dict[str, Run] = {"bare": lambda: forward(model, ids), "bare again": lambda: forward(model, ids)}
    for name, hook in kinds.items():
        twin = copy.deepcopy(model)
        hook(twin)
        contenders[name] = lambda twin=twin: forward(twin, ids)
    return contenders


_alive: list[hl.Hooks] = []  # Hooks are removed when they are garbage-collected.


def _hooks(model: nn.Module, names: list[str], **options: object) -> None:
    hooks = hl.Hooks(model)
    hooks.capture(names, **options)
    _alive.append(hooks)


def many(
    model: nn.Module, ids: Tensor, names: list[str], limit: int, forwards: int = 8, rounds: int = 6
) -> dict[str, list[float]]:
    """Time several forwards that keep every value, with a limit on pinned memory. Freeing the values is not timed."""

    def seconds() -> float:
        start = time.perf_counter()
        for _ in range(forwards):
            forward(model, ids)
        return time.perf_counter() - start

    ratios: dict[str, list[float]] = {"bare": [], "bare again": [], 'hookline, device="cpu", keep="all"': []}
    before, offload.pinned.limit = offload.pinned.limit, limit
    for _ in range(rounds):
        first = seconds()
        again = seconds()
        with hl.capture(model, names, device="cpu", keep="all") as acts:
            kept = seconds()
        del acts
        for name, taken in zip(ratios, (first, again, kept), strict=True):
            ratios[name].append(taken / first)
    offload.pinned.limit = before
    return ratios


def pinned_since(title: str) -> str:
    """Return the peak of the memory that torch has pinned since the last call, and reset it."""
    found = torch.cuda.host_memory_stats()["allocated_bytes.peak"]
    torch._C._host_emptyCache()
    torch.cuda.reset_peak_host_memory_stats()
    offload.pinned.most.clear()
    return f"{title}: pinned memory, at most {found >> 20} MiB\n"


def tables() -> list[str]:
    """Measure everything."""
    model, ids = large()
    blocks = [f"model.layers.{number}" for number in range(24)]
    size = "1.3B Llama, bfloat16, 8x1024 tokens, all 24 blocks"
    found = [report(f"{size}: attach, run, detach", compare(one_shot(model, ids, blocks), 12, 2))]
    _ = pinned_since(size)
    hookline(model, ids, blocks, device="cpu")()
    found += [pinned_since(f"{size}, one forward")]
    for limit in (512 << 20, 2 << 30):
        what = f"{size}: 8 forwards, 6 GiB, limit {limit >> 20} MiB"
        found += [report(what, many(model, ids, blocks, limit)), pinned_since(what)]
    del model
    torch.cuda.empty_cache()
    model, ids = small()
    blocks = [f"transformer.h.{number}" for number in range(12)]
    size = "12-layer GPT-2, bfloat16, 1x32 tokens, all 12 blocks"
    found += [report(f"{size}: attach, run, detach", compare(one_shot(model, ids, blocks)))]
    found += [report(f"{size}: attached", compare(attached(model, ids, blocks)))]
    return found


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
