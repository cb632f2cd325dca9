"""tacklebox: one hook function on many modules through a `HookManager`."""

from __future__ import annotations

import copy
from typing import Any

import torch
from tacklebox.hook_management import HookManager
from tasks import Contender, Job, Peer, main, output_of
from torch import Tensor


def keep_in(kept: dict[str, Tensor]) -> Any:
    """Return a hook function that keeps the output under tacklebox's name for the module."""

    def keep(module: Any, _inputs: Any, outputs: Any) -> None:
        kept[module.name] = outputs[0] if isinstance(outputs, (tuple, list)) else outputs

    return keep


def manager_on(job: Job, kept: dict[str, Tensor]) -> HookManager:
    """Return a manager with a hook on every place."""
    manager = HookManager()
    places = {name: module for name, module in job.model.named_modules() if isinstance(module, job.kind)}
    manager.register_forward_hook(keep_in(kept), **places)
    return manager


def one_shot(job: Job) -> Contender:
    def run() -> dict[str, Tensor]:
        kept: dict[str, Tensor] = {}
        manager = manager_on(job, kept)
        job.model(job.inputs)
        manager.cleanup()
        return kept

    return run


def attached(job: Job) -> Contender:
    kept: dict[str, Tensor] = {}
    manager = manager_on(job, kept)

    def run(_manager: HookManager = manager) -> dict[str, Tensor]:
        job.model(job.inputs)
        return kept

    return run


def one(job: Job) -> Contender:
    def run() -> dict[str, Tensor]:
        kept: dict[str, Tensor] = {}
        manager = HookManager()
        manager.register_forward_hook(keep_in(kept), **{job.middle: job.model.get_submodule(job.middle)})
        job.model(job.inputs)
        manager.cleanup()
        return kept

    return run


def patch(job: Job) -> Contender:
    def zeros(_module: Any, _inputs: Any, outputs: Any) -> tuple[Tensor, ...]:
        return tuple([torch.zeros_like(output) for output in outputs])

    def run() -> Tensor:
        manager = HookManager()
        manager.register_forward_hook(zeros, **{job.middle: job.model.get_submodule(job.middle)})
        output = output_of(job.model(job.inputs))
        manager.cleanup()
        return output

    return run


def set_up(job: Job) -> Contender:
    def run() -> None:
        manager_on(job, {}).cleanup()

    return run


def gradients(job: Job) -> Contender:
    model = copy.deepcopy(job.model).requires_grad_()  # Its backward hooks fail where parameters are frozen.

    def run() -> dict[str, Tensor]:
        kept: dict[str, Tensor] = {}

        def keep(module: Any, _grad_in: Any, grad_out: Any) -> None:
            kept[module.name] = grad_out[0]

        manager = HookManager()
        places = {name: module for name, module in model.named_modules() if isinstance(module, job.kind)}
        manager.register_backward_hook(keep, **places)
        job.loss(model(job.inputs)).backward()
        manager.cleanup()
        return kept

    return run


PEER = Peer(
    name="tacklebox",
    package="tacklebox",
    tasks={
        "one shot": one_shot,
        "attached": attached,
        "one": one,
        "patch": patch,
        "set-up": set_up,
        "gradients": gradients,
        "stop": "no early stop",
    },
    note="gradients: of the parameters too, because its hooks fail on frozen ones",
)

if __name__ == "__main__":
    main(PEER)
