"""The tasks with torch's hooks, as tutorials write them. The other contenders are checked against these results."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

if TYPE_CHECKING:
    from tasks import Contender, Job


class Enough(Exception):
    """Raised to leave a forward after the last module that is needed."""


def keeper(kept: dict[str, Tensor], name: str) -> Callable[..., None]:
    """Return a forward hook that stores the output."""

    def keep(_module: nn.Module, _args: object, output: Tensor) -> None:
        kept[name] = output.detach()

    return keep


def hook_all(job: Job, kept: dict[str, Tensor]) -> list[RemovableHandle]:
    """Store the output of every module of the job."""
    places = [(name, module) for name, module in job.model.named_modules() if isinstance(module, job.kind)]
    return [module.register_forward_hook(keeper(kept, name)) for name, module in places]


def one_shot(job: Job) -> Contender:
    def run() -> dict[str, Tensor]:
        kept: dict[str, Tensor] = {}
        handles = hook_all(job, kept)
        job.model(job.inputs)
        for handle in handles:
            handle.remove()
        return kept

    return run


def attached(job: Job) -> Contender:
    kept: dict[str, Tensor] = {}
    hook_all(job, kept)

    def run() -> dict[str, Tensor]:
        job.model(job.inputs)
        return kept

    return run


def one(job: Job) -> Contender:
    def run() -> dict[str, Tensor]:
        kept: dict[str, Tensor] = {}
        handle = job.model.get_submodule(job.middle).register_forward_hook(keeper(kept, job.middle))
        job.model(job.inputs)
        handle.remove()
        return kept

    return run


def patch(job: Job) -> Contender:
    def zeros(_module: nn.Module, _args: object, output: Tensor) -> Tensor:
        return torch.zeros_like(output)

    def run() -> Any:
        handle = job.model.get_submodule(job.middle).register_forward_hook(zeros)
        output = job.model(job.inputs)
        handle.remove()
        return output[0] if not isinstance(output, Tensor) else output

    return run


def set_up(job: Job) -> Contender:
    def run() -> None:
        for handle in hook_all(job, {}):
            handle.remove()

    return run


def gradients(job: Job) -> Contender:
    """Put a hook on each output tensor, which costs less than `register_full_backward_hook`."""

    def keep_gradient(kept: dict[str, Tensor], name: str) -> Callable[..., None]:
        def keep(gradient: Tensor) -> None:
            kept[name] = gradient

        def watch(_module: nn.Module, _args: object, output: Tensor) -> None:
            output.register_hook(keep)

        return watch

    def run() -> dict[str, Tensor]:
        kept: dict[str, Tensor] = {}
        places = [(name, module) for name, module in job.model.named_modules() if isinstance(module, job.kind)]
        handles = [module.register_forward_hook(keep_gradient(kept, name)) for name, module in places]
        job.loss(job.model(job.inputs)).backward()
        for handle in handles:
            handle.remove()
        return kept

    return run


def stop(job: Job) -> Contender:
    def run() -> dict[str, Tensor]:
        kept: dict[str, Tensor] = {}

        def keep(_module: nn.Module, _args: object, output: Tensor) -> None:
            kept[job.middle] = output.detach()
            raise Enough

        handle = job.model.get_submodule(job.middle).register_forward_hook(keep)
        with contextlib.suppress(Enough):
            job.model(job.inputs)
        handle.remove()
        return kept

    return run


TASKS = {
    "one shot": one_shot,
    "attached": attached,
    "one": one,
    "patch": patch,
    "set-up": set_up,
    "gradients": gradients,
    "stop": stop,
}
