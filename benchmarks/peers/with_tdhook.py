"""tdhook: `ActivationCaching` for many places, a `HookSession` for one, for replacing and for stopping."""

from __future__ import annotations

import re
from typing import Any

from tasks import Contender, Job, Peer, main, output_of
from tdhook.latent.activation_caching import ActivationCaching
from tdhook.session import HookSession
from tdhook.targets import Target
from tensordict import TensorDict
from torch import Tensor


def caching(job: Job, names: list[str]) -> ActivationCaching:
    """Return the method that caches these modules."""
    return ActivationCaching("^(" + "|".join([re.escape(name) for name in names]) + ")$")


def inputs_of(job: Job) -> TensorDict:
    """Return the inputs in tdhook's form."""
    return TensorDict({"input": job.inputs}, batch_size=[1])


def target_of(job: Job, kind: str = "activation") -> Target:
    """Return the whole output of the middle module as a target. A target is a selection of features."""
    return Target(job.middle, kind, feature_axis=-1, indices=tuple(range(job.model.config.hidden_size)))


def one_shot(job: Job) -> Contender:
    def run() -> Any:
        with caching(job, job.names).prepare(job.model, in_keys=["input"], out_keys=["output"]) as hooked:
            result = hooked(inputs_of(job))
        return lambda: result["cache"]

    return run


def attached(job: Job) -> Contender:
    context = caching(job, job.names).prepare(job.model, in_keys=["input"], out_keys=["output"])
    hooked = context.__enter__()

    def run(_context: Any = context) -> Any:
        result = hooked(inputs_of(job))
        return lambda: result["cache"]

    return run


def one(job: Job) -> Contender:
    target = target_of(job)

    def run() -> dict[str, Tensor]:
        with HookSession(job.model) as session:
            captured = session.capture(target)
            job.model(job.inputs)
        return {job.middle: captured.values[0]}

    return run


def patch(job: Job) -> Contender:
    target = target_of(job)

    def run() -> Tensor:
        with HookSession(job.model) as session:
            session.replace(target, 0.0)
            return output_of(job.model(job.inputs))

    return run


def set_up(job: Job) -> Contender:
    def run() -> None:
        with caching(job, job.names).prepare(job.model, in_keys=["input"], out_keys=["output"]):
            pass

    return run


def gradients(job: Job) -> Contender:
    width = tuple(range(job.model.config.hidden_size))
    targets = [Target(name, "gradient", feature_axis=-1, indices=width, output_path=(0,)) for name in job.names]

    def run() -> Any:
        with HookSession(job.model) as session:
            captured = [session.capture(target) for target in targets]
            job.loss(job.model(job.inputs)).backward()
        return lambda: {name: kept.values[0] for name, kept in zip(job.names, captured, strict=True)}

    return run


def stop(job: Job) -> Contender:
    def run() -> dict[str, Tensor]:
        with HookSession(job.model) as session:
            stopped = session.stop(job.middle)
            job.model(job.inputs)
        return {job.middle: stopped.output}  # type: ignore[dict-item]

    return run


PEER = Peer(
    name="tdhook",
    package="tdhook",
    tasks={
        "one shot": one_shot,
        "attached": attached,
        "one": one,
        "patch": patch,
        "set-up": set_up,
        "gradients": gradients,
        "stop": stop,
    },
)

if __name__ == "__main__":
    main(PEER)
