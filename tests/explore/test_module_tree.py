"""The tree of modules on a page, from a model or from the names of sites alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hookline as hl
from tests.errors.wording import says
from tests.support.explorer_pages import data_of, module_of, site_of


def test_modules_come_as_a_tree_with_what_a_scan_tells(model, ids, path):
    page = data_of(hl.explore(model, run=(ids,), to=path))
    paths = [module["path"] for module in page["modules"]]
    assert paths == [name for name, _ in model.named_modules()]
    mlp = module_of(page, "h.0.mlp")
    assert (mlp["type"], mlp["parameters"], mlp["own"], mlp["calls"]) == ("Sequential", 280, 0, 1)
    assert mlp["shape"] == "(2, 5, 8)"
    assert module_of(page, "h")["calls"] is None
    order = [
        module["path"]
        for module in sorted(page["modules"], key=lambda one: one["order"] or 0)
        if module["order"] is not None
    ]
    assert order[:5] == ["", "embed", "h.0", "h.0.attn", "h.0.mlp"]
    silent = module_of(page, "h.0.attn.out_proj")
    assert silent["calls"] == 0
    assert silent["hazards"][0].startswith("never called: MultiheadAttention reads its weight directly")
    assert silent["order"] is None


def test_a_tied_module_stands_once_with_its_other_names(path):
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    model.append(model[0])
    page = data_of(hl.explore(model, run=(torch.ones(1, 2),), to=path))
    assert module_of(page, "0")["also"] == ["2"]
    assert site_of(page, "0")["calls"] == [2]
    assert module_of(page, "0")["calls"] == 2


def test_a_cache_alone_gives_a_tree_by_its_names(model, ids, path):
    _, acts = hl.run(model, ids, capture=["h.*.mlp", "head"])
    page = data_of(hl.explore(acts, to=path))
    assert [module["path"] for module in page["modules"]] == [
        "",
        "h",
        "h.0",
        "h.0.mlp",
        "h.1",
        "h.1.mlp",
        "h.2",
        "h.2.mlp",
        "head",
    ]
    unknown = {"type": "", "parameters": None, "own": None, "hazards": [], "also": []}
    known = {"path": "h.1.mlp", "calls": 1, "order": 1, "shape": "(2, 5, 8)", "dtype": "float32", "sites": [1]}
    assert module_of(page, "h.1.mlp") == {**unknown, **known}
    assert module_of(page, "h.1")["calls"] is None


def test_a_cache_with_its_model_tells_types_and_what_was_never_called(model, ids, path):
    with pytest.warns(hl.HooklineWarning, match=says("was not called")), hl.capture(model, "**") as acts:
        model(ids)
    page = data_of(hl.explore(acts, model=model, to=path))
    assert module_of(page, "h.2.mlp.1")["type"] == "ReLU"
    assert module_of(page, "h.0.attn.out_proj")["calls"] == 0
    (never,) = [warning for warning in page["warnings"] if warning["what"] == "never"]
    assert never["module"] == "h.0.attn.out_proj"
    assert "and 2 more: never called: MultiheadAttention reads its weight directly" in never["text"]
