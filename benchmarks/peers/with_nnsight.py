"""nnsight: `trace`, with `tracer.cache` for many places."""

from __future__ import annotations

from typing import Any

import nnsight
import torch
from tasks import Contender, Job, Peer, main, output_of
from torch import Tensor, nn


def adopt(model: nn.Module) -> nnsight.NNsight:
    """Wrap the model once, as nnsight's documentation does."""
    return nnsight.NNsight(model)


def envoys_of(job: Job) -> list[Any]:
    """Return nnsight's objects for the places."""
    return [job.model.get(name) for name in job.names]


def one_shot(job: Job) -> Contender:
    envoys = envoys_of(job)

    def run() -> Any:
        with job.model.trace(job.inputs) as tracer:
            cache = tracer.cache(modules=envoys)
        return lambda: {name: cache[f"model.{name}"].output for name in job.names}

    return run


def one(job: Job) -> Contender:
    envoy = job.model.get(job.middle)

    def run() -> dict[str, Tensor]:
        with job.model.trace(job.inputs):
            value = envoy.output.save()
        return {job.middle: value}

    return run


def patch(job: Job) -> Contender:
    envoy = job.model.get(job.middle)

    def run() -> Tensor:
        with job.model.trace(job.inputs):
            envoy.output = torch.zeros_like(envoy.output)
            output = job.model.output.save()
        return output_of(output)

    return run


def gradients(job: Job) -> Contender:
    envoys = envoys_of(job)

    def run() -> Any:
        with job.model.trace(job.inputs):
            values = [envoy.output for envoy in envoys]
            with job.loss(job.model.output).backward():
                kept = nnsight.save([value.grad for value in reversed(values)])
        return lambda: dict(zip(reversed(job.names), kept, strict=True))

    return run


def stop(job: Job) -> Contender:
    envoy = job.model.get(job.middle)

    def run() -> dict[str, Tensor]:
        with job.model.trace(job.inputs) as tracer:
            value = envoy.output.save()
            tracer.stop()
        return {job.middle: value}

    return run


PEER = Peer(
    name="nnsight",
    package="nnsight",
    adopt=adopt,
    tasks={
        "one shot": one_shot,
        "attached": "values are asked for in each trace; nothing stays attached",
        "one": one,
        "patch": patch,
        "set-up": "a trace runs the model",
        "gradients": gradients,
        "stop": stop,
    },
    note="the model is wrapped once, before; not timed",
)

if __name__ == "__main__":
    main(PEER)
