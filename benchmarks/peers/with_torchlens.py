"""torchlens: `tl.record`, the fastest way according to its performance guide; `halt` stops, `intervene` replaces."""

from __future__ import annotations

import functools
import operator
import warnings
from typing import Any

import torchlens as tl
from tasks import Contender, Job, Peer, main, output_of
from torch import Tensor, nn

warnings.filterwarnings("ignore", "TorchLens observed")  # In each run, about a scalar that GPT-2 reads.


def every(job: Job) -> Any:
    """Return a selector for all places."""
    if job.kind is nn.Linear:
        return tl.func("linear")
    return functools.reduce(operator.or_, [tl.module(name) for name in job.names])


def value_at(recording: Any, name: str) -> Tensor:
    """Return a module's output, which is the value of its last operation."""
    return recording.records[recording.by_address[name][-1]].ram_payload  # type: ignore[no-any-return]


def one_shot(job: Job) -> Contender:
    def run() -> Any:
        recording = tl.record(job.model, job.inputs, save=every(job))
        return lambda: {name: value_at(recording, name) for name in job.names}

    return run


def one(job: Job) -> Contender:
    def run() -> Any:
        recording = tl.record(job.model, job.inputs, save=tl.module(job.middle))
        return lambda: {job.middle: value_at(recording, job.middle)}

    return run


def patch(job: Job) -> Contender:
    def run() -> Tensor:
        place = tl.module(job.middle)
        zeros = tl.when(place, tl.zero_ablate())
        output, _ = tl.record(job.model, job.inputs, save=place, intervene=zeros, return_output=True)
        return output_of(output)

    return run


def gradients(job: Job) -> Contender:
    def run() -> Any:
        places = every(job)
        output, recording = tl.record(
            job.model, job.inputs, save=places, save_grads=places, backward_ready=True, return_output=True
        )
        recording.log_backward(job.loss(output))

        def values() -> dict[str, Tensor]:
            found: dict[str, Tensor] = {}
            for record in recording.grad_records:  # In backward order, a module's output comes first.
                found.setdefault(record.ctx.module_stack[-1].address, record.ram_payload)
            return found

        return values

    return run


def stop(job: Job) -> Contender:
    following = job.names[job.names.index(job.middle) + 1 :]
    halt = tl.in_module(following[0] if following else "lm_head")  # A halt is at the first operation of a module.

    def run() -> Any:
        recording = tl.record(job.model, job.inputs, save=tl.module(job.middle), halt=halt)
        return lambda: {job.middle: value_at(recording, job.middle)}

    return run


PEER = Peer(
    name="torchlens",
    package="torchlens",
    tasks={
        "one shot": one_shot,
        "attached": "each record is a run of its own; nothing stays attached",
        "one": one,
        "patch": patch,
        "set-up": "a record runs the model",
        "gradients": gradients,
        "stop": stop,
    },
    note="it logs every operation, and wraps torch's functions for the rest of the process",
)

if __name__ == "__main__":
    main(PEER)
