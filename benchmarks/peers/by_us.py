"""The tasks with hookline."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

import hookline as hl

if TYPE_CHECKING:
    from tasks import Contender, Job


def one_shot(job: Job) -> Contender:
    def run() -> Any:
        with hl.capture(job.model, job.kind) as acts:
            job.model(job.inputs)
        return acts

    return run


def attached(job: Job) -> Contender:
    hooks = hl.Hooks(job.model)
    acts = hooks.capture(job.kind)

    def run(_hooks: hl.Hooks = hooks) -> Any:  # Holds the `Hooks`, whose hooks would go with it.
        job.model(job.inputs)
        return acts

    return run


def one(job: Job) -> Contender:
    def run() -> Any:
        with hl.capture(job.model, job.middle) as acts:
            job.model(job.inputs)
        return acts

    return run


def patch(job: Job) -> Contender:
    def run() -> Any:
        with hl.patch(job.model, {job.middle: 0.0}):
            output = job.model(job.inputs)
        return output[0] if not isinstance(output, Tensor) else output

    return run


def set_up(job: Job) -> Contender:
    def run() -> None:
        with hl.capture(job.model, job.kind):
            pass

    return run


def gradients(job: Job) -> Contender:
    def run() -> Any:
        with hl.capture(job.model, (job.kind, ":grad_output")) as acts:
            job.loss(job.model(job.inputs)).backward()
        return lambda: {name: acts[f"{name}:grad_output"] for name in job.names}

    return run


def stop(job: Job) -> Contender:
    def run() -> Any:
        with hl.capture(job.model, job.middle, stop=True) as acts:
            job.model(job.inputs)
        return acts

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
