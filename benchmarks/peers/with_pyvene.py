"""pyvene: an `IntervenableModel` with one `CollectIntervention` or `ZeroIntervention` for each place."""

from __future__ import annotations

from typing import Any

import pyvene
from tasks import Contender, Job, Peer, main, output_of
from torch import Tensor


def place_of(name: str) -> str:
    """Return pyvene's component name for a module's output: `transformer.h[3].output`."""
    *path, last = name.split(".")
    return f"{'.'.join(path)}[{last}].output" if path else f"{last}.output"


def collector(job: Job, names: list[str]) -> Any:
    """Return a model that collects the outputs at these places."""
    options = {"embed_dim": job.model.config.hidden_size, "keep_last_dim": True}
    places = [{"component": place_of(name), "intervention": pyvene.CollectIntervention(**options)} for name in names]
    return pyvene.IntervenableModel(places, model=job.model)


def one_shot(job: Job) -> Contender:
    def run() -> Any:
        (_, collected), _ = collector(job, job.names)({job.keyword: job.inputs})
        return lambda: dict(zip(job.names, collected, strict=True))

    return run


def attached(job: Job) -> Contender:
    model = collector(job, job.names)

    def run() -> Any:
        (_, collected), _ = model({job.keyword: job.inputs})
        return lambda: dict(zip(job.names, collected, strict=True))

    return run


def one(job: Job) -> Contender:
    def run() -> dict[str, Tensor]:
        (_, collected), _ = collector(job, [job.middle])({job.keyword: job.inputs})
        return {job.middle: collected[0]}

    return run


def patch(job: Job) -> Contender:
    def run() -> Tensor:
        zero = pyvene.ZeroIntervention(embed_dim=job.model.config.hidden_size, keep_last_dim=True)
        model = pyvene.IntervenableModel({"component": place_of(job.middle), "intervention": zero}, model=job.model)
        _, output = model({job.keyword: job.inputs})
        return output_of(output)

    return run


def set_up(job: Job) -> Contender:
    def run() -> None:
        collector(job, job.names)

    return run


PEER = Peer(
    name="pyvene",
    package="pyvene",
    tasks={
        "one shot": one_shot,
        "attached": attached,
        "one": one,
        "patch": patch,
        "set-up": set_up,
        "gradients": "it trains interventions; gradients of values are not given",
        "stop": "no early stop",
    },
    note="attached: the IntervenableModel is made before; its hooks come and go in each call. "
    "set-up: making the IntervenableModel, which hooks nothing yet",
)

if __name__ == "__main__":
    main(PEER)
