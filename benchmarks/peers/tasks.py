"""The tasks that every peer does: one shot, attached, one of many, patch, set-up, gradients, stop.

A library is a `Peer`: for each task it has either a function that makes the contender, or the reason why it has none.
The contender is the function that is timed. Its result is checked against torch's hooks before anything is measured.
The result may be a function that returns a dict by name; that function is not timed. Bare, bare again, raw hooks, the
peer and hookline take turns in one process, so that their ratios can be compared.
"""

from __future__ import annotations

import argparse
import copy
import importlib.metadata
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

import by_torch
import by_us
import torch
from harness import compare
from questions import Chain, answers, yardsticks
from sweeping import WayMaker, sweep_table
from table import TASKS
from torch import Tensor, nn

Contender = Callable[[], Any]
Maker = Callable[["Job"], "Contender | str"]

ON_GPT2 = ("one shot", "patch", "gradients", "stop")  # Set-up costs nothing compared with this forward.


@dataclass(frozen=True)
class Job:
    """One model as the peer has adopted it, its inputs, and the names of the modules to capture."""

    model: Any
    inputs: Tensor
    keyword: str
    kind: type[nn.Module]
    names: list[str]
    middle: str
    probe: Tensor

    def loss(self, output: Any) -> Tensor:
        """Return a number whose gradient differs at every place."""
        return (output_of(output) * self.probe).sum()


@dataclass(frozen=True)
class Peer:
    """A library: how it adopts a model, and how it does each task or, as text, why it can't."""

    name: str
    package: str
    tasks: Mapping[str, Maker | str]
    adopt: Callable[[nn.Module], Any] = lambda model: model  # What a user does once per model, at the start.
    note: str = ""
    sweeps: Mapping[str, WayMaker] = field(default_factory=dict)  # The ways to sweep, by what they are called.
    adopt_to_sweep: Callable[[nn.Module], Any] = lambda model: model

    @property
    def version(self) -> str:
        """The installed version."""
        return importlib.metadata.version(self.package) if self.package else ""


def output_of(result: Any) -> Tensor:
    """Return the output tensor of a model. transformers wraps it in a dataclass."""
    return result if isinstance(result, Tensor) else result[0]


def mlp(depth: int = 200) -> Chain:
    """Return `depth` small linear layers with a ReLU after each: almost all overhead, little computation."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(depth):
        linear = nn.Linear(16, 16)
        nn.init.orthogonal_(linear.weight, gain=2**0.5)  # Otherwise values and gradients would vanish.
        layers += [linear, nn.ReLU()]
    return Chain(*layers).eval()


def gpt2(depth: int = 12, width: int = 768) -> nn.Module:
    """Return a GPT-2 of the usual size with a small vocabulary."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"n_layer": depth, "n_embd": width, "n_head": 12, "vocab_size": 100, "bos_token_id": 0, "eos_token_id": 0}
    config = GPT2Config(**sizes, use_cache=False, tie_word_embeddings=False)
    config._attn_implementation = "eager"  # TransformerLens requires it, so all peers get it.
    return GPT2LMHeadModel(config).eval()  # type: ignore[no-any-return]


def job_of(which: str, quick: bool) -> Job:
    """Return the job on one of the two models."""
    if which == "mlp":
        model: nn.Module = mlp(6 if quick else 200)
        inputs, keyword, kind = torch.randn(1, 16), "input", nn.Linear
    else:
        from transformers.models.gpt2.modeling_gpt2 import GPT2Block

        model = gpt2(2, 24) if quick else gpt2()
        inputs, keyword, kind = torch.arange(32)[None], "input_ids", GPT2Block
    names = [name for name, module in model.named_modules() if isinstance(module, kind)]
    with torch.no_grad():
        probe = torch.randn_like(output_of(model(inputs)))
    return Job(model, inputs, keyword, kind, names, names[len(names) // 2], probe)


def twin(job: Job, adopt: Callable[[nn.Module], Any] = lambda model: model) -> Job:
    """Return the job on a copy of the model that shares its parameters."""
    shared = {id(parameter): parameter for parameter in job.model.parameters()}
    return Job(**{**vars(job), "model": adopt(copy.deepcopy(job.model, shared))})


def for_gradients(job: Job) -> Job:
    """Return the job set up so that backward reaches every place and computes nothing else."""
    model = copy.deepcopy(job.model).requires_grad_(False)
    if job.inputs.is_floating_point():
        return Job(**{**vars(job), "model": model, "inputs": job.inputs.clone().requires_grad_()})
    model.get_input_embeddings().requires_grad_()
    return Job(**{**vars(job), "model": model})


def bare(task: str, job: Job) -> Contender:
    """Return the run that ratios refer to: the forward alone, with the backward if that is the task."""
    if task == "gradients":
        return lambda: job.loss(job.model(job.inputs)).backward()
    if task == "set-up":
        return by_torch.TASKS[task](job)
    return lambda: job.model(job.inputs)


def wrong(found: Any, expected: Any) -> str:
    """Return how a result differs from that of torch's hooks, or "" if it does not."""
    found, expected = found() if callable(found) else found, expected() if callable(expected) else expected
    if expected is None:
        return ""
    if isinstance(expected, Tensor):
        found, expected = {"output": found}, {"output": expected}
    for name, value in expected.items():
        if name not in found:
            return f"{name} is missing"
        if not isinstance(found[name], Tensor) or found[name].shape != value.shape:
            return f"{name} is {getattr(found[name], 'shape', found[name])!r}, not {tuple(value.shape)}"
        if not torch.allclose(found[name], value, rtol=1e-3, atol=1e-5):
            return f"{name} is off by {(found[name] - value).abs().max():.2g}"
    return ""


def measure(task: str, peer: Peer, job: Job, seconds: float) -> dict[str, Any]:
    """Check and time one task on one model. Return medians and quartiles of ratios to bare, or the reason for none."""
    maker = peer.tasks[task]
    if task == "gradients":
        job = for_gradients(job)
    with torch.set_grad_enabled(task == "gradients"):
        raw, ours = by_torch.TASKS[task](twin(job)), by_us.TASKS[task](twin(job))
        expected = raw()
        contenders = {"bare": bare(task, job), "bare again": bare(task, job), "raw torch hooks": raw}
        cell: dict[str, Any] = {}
        try:
            theirs = maker if isinstance(maker, str) else maker(twin(job, peer.adopt))
            if isinstance(theirs, str):
                cell["cannot"] = theirs
            else:
                cell["wrong"] = wrong(theirs(), expected)
                theirs()  # Some fail only the second time.
                contenders["peer"] = theirs
        except Exception as error:
            cell["failed"] = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
        contenders["hookline"] = ours
        if found := wrong(ours(), expected):
            raise AssertionError(f"hookline, {task}: {found}")
        cell["ratios"] = {name: quartiles(values) for name, values in timed(contenders, seconds).items()}
    return cell


def timed(contenders: Mapping[str, Contender], seconds: float) -> dict[str, list[float]]:
    """Compare the contenders in as many rounds as fit into the time."""
    taken = {name: duration(run) for name, run in contenders.items()}
    if not seconds:
        return {name: [second / taken["bare"]] for name, second in taken.items()}
    if taken.get("peer", 0.0) > 20 * taken["bare"]:
        # After such a slow peer the others would find cold caches, so it takes turns only with bare.
        ratios = timed({name: run for name, run in contenders.items() if name != "peer"}, seconds)
        pair = {"bare": contenders["bare"], "peer": contenders["peer"]}
        rounds = max(3, min(60, int(seconds / taken["peer"])))
        return {**ratios, "peer": compare(pair, rounds=rounds, repeat=1)["peer"]}
    together = sum(taken.values())
    repeat = 3 if together * 3 * 12 < seconds else 1
    return compare(contenders, rounds=max(4, min(60, int(seconds / together / repeat))), repeat=repeat)


def duration(run: Contender) -> float:
    """Return the seconds of one call. Every contender has been called before."""
    start = time.process_time()
    run()
    return time.process_time() - start


def quartiles(values: list[float]) -> list[float]:
    """Return the median and the two quartiles."""
    ordered = sorted(values)
    return [median(ordered), ordered[len(ordered) // 4], ordered[(3 * len(ordered)) // 4]]


def main(peer: Peer) -> None:
    """Run all tasks and questions for one peer, and print or save the result as JSON."""
    parser = argparse.ArgumentParser(description=f"Measure {peer.name}, torch's hooks and hookline.")
    parser.add_argument("--quick", action="store_true", help="tiny models and one run of each task, as a check")
    parser.add_argument("--model", action="append", choices=["mlp", "gpt2"], help="the model to use; both by default")
    parser.add_argument("--skip", action="append", default=[], help="a question to skip")
    parser.add_argument("--json", type=Path, help="write the result here instead of printing it")
    parser.add_argument("--seconds", type=float, default=2.0, help="approximate time for each task")
    parser.add_argument("--only", choices=["sweep"], help="measure only this: a grid of patches, by layer and position")
    options = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {
        "peer": peer.name,
        "version": peer.version,
        "note": peer.note,
        "machine": f"torch {torch.__version__}, Python {platform.python_version()}, {torch.get_num_threads()} thread",
    }
    if options.only == "sweep":
        result["sweep"] = sweep_table(peer.name, peer.sweeps, peer.adopt_to_sweep, options.quick)
    else:
        result |= measured(peer, options)
    text = json.dumps(result, indent=1)
    if options.json:
        options.json.write_text(text)
    else:
        print(text)


def measured(peer: Peer, options: argparse.Namespace) -> dict[str, Any]:
    """Return the answers of a peer, and its figures for each task on each model."""
    result: dict[str, Any] = {
        "answers": answers(peer, options.skip),
        "yardsticks": {} if peer.package else yardsticks(options.skip),
        "cells": {},
    }
    for which in options.model or ("mlp", "gpt2"):
        job = job_of(which, options.quick)
        seconds = 0.0 if options.quick else options.seconds
        tasks = ON_GPT2 if which == "gpt2" else tuple(TASKS)
        result["cells"][which] = {task: measure(task, peer, job, seconds) for task in tasks}
    return result
