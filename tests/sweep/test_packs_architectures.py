"""`hl.sweep(run=)` on real architectures: packed runs give what a run for each place gives."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.real_models import REAL_MODELS, ids, of, opt, prepared, roberta
from tests.support.sweeps import both, is_packed


@pytest.mark.parametrize("name", REAL_MODELS)
def test_every_linear_layer_and_its_units(name) -> None:
    model, inputs, _ = prepared(name)
    kinds = [(nn.Linear, "[..., 3]"), (nn.LayerNorm, "[..., 3]"), (nn.Conv2d, "[:, *]")]
    where = [kind for kind in kinds if any(isinstance(one, kind[0]) for one in model.modules())]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*dt_proj.* was not called")  # Mamba reads its weights.
        found = both(model, where, inputs)
    assert is_packed(found), found.notes


@pytest.mark.parametrize(("build", "site"), [(opt, "model.decoder.layers.*"), (roberta, "encoder.layer.*")])
def test_tokens_may_be_named(build, site) -> None:
    model = of(build)
    torch.manual_seed(0)
    given: dict[str, Any] = {"input_ids": ids().repeat(2, 1), "attention_mask": torch.ones(2, 7, dtype=torch.long)}
    for where in (f"{site}[:, @prompt[-1]]", f"{site}[:, @2:4]"):
        assert is_packed(both(model, where, given))
    given["attention_mask"][0, :3] = 0
    found = both(model, f"{site}[:, @prompt[-1]]", given)
    assert is_packed(found), found.notes


def test_patterns_of_attention_are_places_head_by_head() -> None:
    model, inputs, _ = prepared("Llama")
    model.set_attn_implementation("eager")
    found = both(model, "model.layers.*.self_attn/softmax[:, *]", inputs)
    assert is_packed(found)
    assert len(found) == 2 * 2


def test_generation_runs_place_by_place() -> None:
    model, inputs, _ = prepared("GPT-2")
    run = {**inputs, "max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    with pytest.warns(UserWarning, match="run alone"):
        found = both(model.generate, "transformer.h.*[:, @new]", run, lambda output: float(output[0, -1]))
    assert not is_packed(found)
