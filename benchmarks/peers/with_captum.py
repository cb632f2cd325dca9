"""Captum: `LayerActivation` on a list of layers; `LayerGradientXActivation` unmultiplied for gradients."""

from __future__ import annotations

from typing import Any

from captum.attr import LayerActivation, LayerGradientXActivation
from tasks import Contender, Job, Peer, main
from torch import Tensor


def layers_of(job: Job) -> list[Any]:
    """Return the modules of the job, found in one pass."""
    return [module for _, module in job.model.named_modules() if isinstance(module, job.kind)]


def one_shot(job: Job) -> Contender:
    def run() -> Any:
        values = LayerActivation(job.model, layers_of(job)).attribute(job.inputs)
        return lambda: dict(zip(job.names, values, strict=True))

    return run


def attached(job: Job) -> Contender:
    activation = LayerActivation(job.model, layers_of(job))

    def run() -> Any:
        values = activation.attribute(job.inputs)
        return lambda: dict(zip(job.names, values, strict=True))

    return run


def one(job: Job) -> Contender:
    def run() -> dict[str, Tensor]:
        layer = job.model.get_submodule(job.middle)
        return {job.middle: LayerActivation(job.model, layer).attribute(job.inputs)}

    return run


def gradients(job: Job) -> Contender:
    def forward(inputs: Tensor) -> Tensor:
        return job.loss(job.model(inputs))[None]

    def run() -> Any:
        values = LayerGradientXActivation(forward, layers_of(job), multiply_by_inputs=False).attribute(job.inputs)
        return lambda: dict(zip(job.names, values, strict=True))

    return run


PEER = Peer(
    name="Captum",
    package="captum",
    tasks={
        "one shot": one_shot,
        "attached": attached,
        "one": one,
        "patch": "its ablations replace inputs, and attribute the effect; a layer's output can't be set",
        "set-up": "hooks live inside one call of attribute()",
        "gradients": gradients,
        "stop": "attribute() runs the whole model",
    },
    note="attached: the LayerActivation is made before; its hooks come and go in each call",
)

if __name__ == "__main__":
    main(PEER)
