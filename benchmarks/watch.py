"""Cost of hl.watch in training and inference, compared with torch's detect_anomaly and hooks written by hand.

python benchmarks/watch.py               prints the tables and writes them to benchmarks/watch.txt

A run is ten steps inside one block; entering and leaving the block is part of the time.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from baseline import DEPTH, gpt, model_of, sample
from harness import compare, publish, report, usual
from torch import Tensor, nn

import hookline as hl

STEPS = usual(10, quick=1)
Watch = Callable[[nn.Module], AbstractContextManager[Any]]


def first_tensor(output: Any) -> Tensor:
    """Return a module's output, or the first tensor if there are several."""
    return output if isinstance(output, Tensor) else output[0]  # type: ignore[no-any-return]


@contextmanager
def isnan_hooks(model: nn.Module, backward: bool = False) -> Iterator[None]:
    """Check every output for NaN with torch's hooks, as people write them. With `backward`, check the gradients too."""

    def look(_module: nn.Module, _args: object, output: Any) -> None:
        if torch.isnan(first_tensor(output)).any():
            raise ArithmeticError

    def look_back(_module: nn.Module, _grad_input: object, grad_output: tuple[Tensor | None, ...]) -> None:
        if any(torch.isnan(one).any() for one in grad_output if one is not None):
            raise ArithmeticError

    handles = [module.register_forward_hook(look) for module in model.modules()]
    if backward:
        handles += [module.register_full_backward_hook(look_back) for module in model.modules()]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns where its full backward hooks can't see a gradient.
            yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def anomaly(_model: nn.Module) -> Iterator[None]:
    """Turn on torch's anomaly mode: each graph node stores its stack trace, and its gradient is checked for NaN."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autograd.set_detect_anomaly(True):
            yield


WATCHES: dict[str, Watch] = {
    "bare": lambda model: nullcontext(),
    "isnan in forward hooks": isnan_hooks,
    "hl.watch, backward=False": lambda model: hl.watch(model, backward=False),
    "hl.watch, backward=False, limit": lambda model: hl.watch(model, backward=False, limit=1e9),
    "isnan in forward and backward hooks": lambda model: isnan_hooks(model, True),
    "torch.autograd.set_detect_anomaly": anomaly,
    "hl.watch": hl.watch,
    "hl.watch, limit": lambda model: hl.watch(model, limit=1e9),
    "hl.watch, every=10": lambda model: hl.watch(model, every=10),
    "hl.watch, every=1": lambda model: hl.watch(model, every=1),
}
OF_INFERENCE = ("bare", "isnan in forward hooks", "hl.watch", "hl.watch, limit", "hl.watch, every=10")


def training(make: Callable[[], nn.Module], x: Tensor, watch: Watch) -> Callable[[], None]:
    """Return a run of some training steps on a new model."""
    model = make().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)

    def run() -> None:
        with watch(model):
            for _ in range(STEPS):
                optimizer.zero_grad()
                first_tensor(model(x)).sum().backward()
                optimizer.step()

    return run


def inference(make: Callable[[], nn.Module], x: Tensor, watch: Watch) -> Callable[[], None]:
    """Return a run of some forwards of a new model."""
    model = make().eval()

    def run() -> None:
        with torch.inference_mode(), watch(model):
            for _ in range(STEPS):
                model(x)

    return run


def tables() -> Iterator[str]:
    """Measure everything."""
    width = usual(256, quick=32)
    ids = torch.randint(100, (usual(4, quick=1), usual(64, quick=8)))
    cases = {
        f"{2 * DEPTH} tiny modules, all overhead": (lambda: model_of(DEPTH), sample(), 10),
        f"12-layer GPT-2 of width {width}, {'×'.join(map(str, ids.shape))} tokens": (lambda: gpt(width), ids, 5),
    }
    for case, (make, x, rounds) in cases.items():
        runs = {name: training(make, x, watch) for name, watch in WATCHES.items()}
        yield report(f"training step of {case}; ratio to bare", compare(runs, rounds=rounds, repeat=1))
        runs = {name: inference(make, x, WATCHES[name]) for name in OF_INFERENCE}
        yield report(f"inference of {case}; ratio to bare", compare(runs, rounds=rounds, repeat=1))


if __name__ == "__main__":
    publish(__file__, tables)
