"""Where the statistics of a watch go: a function, TensorBoard, Weights & Biases."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from hookline.errors import HooklineError

Numbers = Mapping[str, float]
STEP = "watch/step"  # What Weights & Biases draws them over: its own steps are the user's.


class Target(NamedTuple):
    """Somewhere to write to, and how to end that."""

    write: Callable[[int, Numbers], object]
    close: Callable[[], object]


def targets_of(to: Any) -> list[Target]:
    """Return what `to=` means: nothing, one place or several."""
    if to is None:
        return []
    if isinstance(to, Iterable) and not isinstance(to, (str, os.PathLike)) and not callable(to):
        return [target for one in to for target in targets_of(one)]
    if isinstance(to, (str, os.PathLike)):
        return [_folder(to)]
    if hasattr(to, "add_scalar"):
        return [Target(_tensorboard(to), to.flush)]
    if hasattr(to, "log") and hasattr(to, "define_metric"):
        return [Target(_wandb(to), _nothing)]
    if callable(to):
        return [Target(to, _nothing)]
    raise HooklineError(
        f"to={to!r} is not a place for statistics; a folder for TensorBoard, a SummaryWriter, a run of wandb or a "
        "function of (step, {name: number}) is"
    )


def _folder(path: str | os.PathLike[str]) -> Target:
    """Write TensorBoard's files into a folder of our own."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise HooklineError("to= a folder writes for TensorBoard: pip install 'hookline[tensorboard]'") from None
    writer = SummaryWriter(os.fspath(path))
    return Target(_tensorboard(writer), writer.close)


def _tensorboard(writer: Any) -> Callable[[int, Numbers], object]:
    def write(step: int, numbers: Numbers) -> None:
        for name, number in numbers.items():
            writer.add_scalar(name, number, step)

    return write


def _wandb(run: Any) -> Callable[[int, Numbers], object]:
    defined = set[str]()

    def write(step: int, numbers: Numbers) -> None:
        for quantity in {name.partition("/")[0] for name in numbers} - defined:
            run.define_metric(f"{quantity}/*", step_metric=STEP)
            defined.add(quantity)
        run.log({**numbers, STEP: step})

    return write


def _nothing() -> None: ...
