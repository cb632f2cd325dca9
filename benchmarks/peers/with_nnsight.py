"""nnsight: `trace`, with `tracer.cache` for many places."""

from __future__ import annotations

from typing import Any

import nnsight
import torch
from nnsight import TransformersModel
from sweeping import SweepJob, Way
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


def adopt_to_sweep(model: nn.Module) -> Any:
    """Wrap the model as one of transformers, which can batch invokes. It requires a tokenizer, which nothing uses."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<end>": 0, "word": 1}, unk_token="<end>"))
    special = {"eos_token": "<end>", "bos_token": "<end>", "pad_token": "<end>", "unk_token": "<end>"}
    return TransformersModel(model, tokenizer=PreTrainedTokenizerFast(tokenizer_object=words, **special))


def clean_inputs(job: SweepJob) -> list[Tensor]:
    """Return what goes into each block in the clean run."""
    found: list[Tensor] = []
    with job.model.trace(job.clean, use_cache=False):
        found += nnsight.save([block.input for block in job.model.transformer.h])
    return found


def trace_each_cell(job: SweepJob) -> Way:
    blocks, clean, corrupted = job.model.transformer.h, clean_inputs(job), job.corrupted

    def run(cells: Any) -> list[float]:
        values = []
        for layer, place in cells:
            with job.model.trace(corrupted, use_cache=False):
                blocks[layer].input[:, place] = clean[layer][:, place]
                value = job.metric(job.model.output).save()
            values.append(value)
        return torch.cat(values).tolist()  # type: ignore[no-any-return]

    return Way(run, packs=False)


def invoke_each_position(job: SweepJob) -> Way:
    """Batch the positions of each layer: the documentation shows several invokes in a trace."""
    blocks, clean, corrupted = job.model.transformer.h, clean_inputs(job), job.corrupted

    def run(_cells: Any) -> list[float]:
        values = []
        for layer in range(len(blocks)):
            with job.model.trace(use_cache=False) as tracer:
                found = nnsight.save([])
                for place in range(corrupted.shape[1]):
                    with tracer.invoke(corrupted):
                        blocks[layer].input[:, place] = clean[layer][:, place]
                        found.append(job.metric(job.model.output))
            values += found
        return torch.cat(values).tolist()  # type: ignore[no-any-return]

    return Way(run)


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
    sweeps={"a trace for each cell": trace_each_cell, "an invoke for each position": invoke_each_position},
    adopt_to_sweep=adopt_to_sweep,
    note="the model is wrapped once, before; not timed",
)

if __name__ == "__main__":
    main(PEER)
