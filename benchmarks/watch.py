"""What a watch costs: hl.watch beside torch's detect_anomaly and hooks written by hand, training and inference.

python benchmarks/watch.py               prints the tables and writes them to benchmarks/watch.txt

A run is ten steps, within one block that is entered and left.
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
    """Return the tensor that a module gives, or the first of several."""
    return output if isinstance(output, Tensor) else output[0]  # type: ignore[no-any-return]


@contextmanager
def isnan_hooks(model: nn.Module, backward: bool = False) -> Iterator[None]:
    """Look for NaN in every output with torch's own hooks, as people write it; and in every gradient of an output."""

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
            warnings.simplefilter("ignore")  # Of what torch's own backward hooks can't see.
            yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def anomaly(_model: nn.Module) -> Iterator[None]:
    """Torch's own mode: every node of the graph remembers where it was made, and its gradient is searched for NaN."""
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
    """Return some steps of training a model of its own."""
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
    """Return some forwards of a model of its own."""
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
