"""hl.sites: the places that a pattern matches, as a sequence and as a table."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hookline as hl
from tests.support.models import GPT, mlp


def test_the_table_shows_module_parameters_and_other_names() -> None:
    assert repr(hl.sites(mlp(), nn.Linear, "1:input")) == (
        "site     module  parameters  also named\n"
        "───────  ──────  ──────────  ──────────\n"
        "0        Linear          40\n"
        "2        Linear          18\n"
        "1:input  ReLU             0"
    )


def test_sites_are_a_sequence() -> None:
    found = hl.sites(mlp(), "*")
    assert len(found) == 3
    assert found[0] == hl.Site("0")
    assert found[-2:] == [hl.Site("1"), hl.Site("2")]
    assert hl.Site("1") in found


def test_sites_tell_whether_a_place_is_among_them_by_its_text_too() -> None:
    found = hl.sites(GPT(), "h.*")
    assert "h.0" in found
    assert "h.0:output" in found
    assert hl.Site("h.0") in found
    assert "head" not in found


def test_sites_with_calls_and_tokens_are_listed_and_run_on_fake_tensors() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 20, "bos_token_id": 0, "eos_token_id": None}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval()
    run = {"input_ids": torch.randint(20, (2, 5)), "attention_mask": torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]])}
    names = [f"transformer.h.1{part}" for part in ("[:, @prompt[-1]]", "[:, @new]", "#1:", "#{0,2}")]
    assert [*map(str, hl.sites(model, *names))] == names
    found = hl.sites(model, *names, run=run)
    assert [*map(str, found)] == [names[0], names[3], names[1], names[2]]
    assert [row.split()[-1] for row in str(found).splitlines()[-2:]] == ["0", "0"]  # Neither passes in one forward.
    assert [*map(str, hl.sites(model, "transformer.h.*#*", run=run))] == ["transformer.h.0#0", "transformer.h.1#0"]
    with pytest.raises(hl.SiteError, match="'@' names tokens: '@17', '@3:9'"):
        hl.sites(model, "transformer.h.1[:, @*]")
