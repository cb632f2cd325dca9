"""The sweep that peers do: patch the residual stream before each layer at each position, from a clean run.

A peer has a function for each way that its documentation shows; it gets a `SweepJob` and returns a `Way`. The
clean run and the set-up are its own, and not timed; those of hookline are inside `hl.sweep`. All measurements are
compared with those of a loop with torch's hooks, which takes turns with the peer and with hookline in one process.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from harness import usual
from patching import Residual, Way, compare, contenders_for, difference, gpt2
from torch import Tensor, nn

TINY = {"n_layer": 2, "n_embd": 48, "vocab_size": 100, "bos_token_id": 0, "eos_token_id": 0}
EVERY = usual(5, quick=2)
ROUNDS = 3


@dataclass(frozen=True)
class SweepJob:
    """The model as the peer has adopted it, and the tokens of the two prompts."""

    model: Any
    corrupted: Tensor
    clean: Tensor

    def metric(self, output: Any) -> Tensor:
        """Return the measurement of each row."""
        return difference(output)


WayMaker = Callable[[SweepJob], Way]


def sweep_table(name: str, ways: Mapping[str, WayMaker], adopt: Callable[[nn.Module], Any], quick: bool) -> str:
    """Check and time the ways of a peer, and return a table."""
    model = gpt2(attn_implementation="eager", **(TINY if quick else {}))  # TransformerLens requires it, so all get it.
    clean, corrupted = torch.randint(2, 100, (2, 1, 4 if quick else 15))
    with torch.no_grad():
        given = [{"input_ids": ids, "use_cache": False} for ids in (corrupted, clean)]
        ours = contenders_for(Residual(model, *given))
        contenders = {"loop by hand": ours["loop by hand"]}
        for way, make in ways.items():
            contenders[f"{name}: {way}"] = make(SweepJob(adopt(twin_of(model)), corrupted, clean))
        contenders["hl.sweep(model, where, metric, run=)"] = ours["hl.sweep(model, where, metric, run=)"]
        what = f"residual stream, {len(model.transformer.h)} layers × {corrupted.shape[1]} positions"
        return compare(f"{name}; {what}", Residual(model, *given), contenders, EVERY, ROUNDS)


def twin_of(model: nn.Module) -> nn.Module:
    """Return a copy of a model that shares its parameters, since some peers change what they adopt."""
    return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
