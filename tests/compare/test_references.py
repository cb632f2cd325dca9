"""A model against saved values: a cache, a store, a dict and a file of another framework."""

from __future__ import annotations

import copy

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import hookline as hl
from tests.errors.wording import says

X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)).eval()


@pytest.fixture
def faulty(model):
    b = copy.deepcopy(model)
    with torch.no_grad():
        b[2].bias.add_(0.5)
    return b


def test_a_cache_is_compared_by_its_sites(model, faulty):
    values = hl.run(model, X, capture=["*", "2:input"])[1]
    assert hl.compare(values, copy.deepcopy(model), run=(X,)).ok
    report = hl.compare(values, faulty, run=(X,))
    assert report.first.site == "2"
    assert report.first.local is None
    assert report["2:input"].seen.is_none
    assert "Only seen errors are known" in str(report)
    assert "'2' is the first place with another value" in report.verdict


def test_a_saved_cache_and_a_store_are_read(model, faulty, tmp_path):
    hl.run(model, X, capture="*")[1].save(tmp_path / "acts.safetensors")
    assert hl.compare(tmp_path / "acts.safetensors", faulty, run=(X,)).first.site == "2"
    hl.harvest(model, X, "*", to=tmp_path / "store", batch_size=2, progress=False)
    assert hl.compare(hl.Store(tmp_path / "store"), model, run=(X,)).ok
    assert hl.compare(str(tmp_path / "store"), faulty, run=(X,)).first.site == "2"


def test_a_file_of_another_framework_is_read_with_its_own_names(model, faulty, tmp_path):
    values = hl.run(model, X, capture=["0", "2", "4"])[1]
    save_file({f"layer_{site}": values[site].clone() for site in values}, tmp_path / "jax.safetensors")
    report = hl.compare(tmp_path / "jax.safetensors", faulty, run=(X,), match={"layer_*": "*"})
    assert (report.first.site, report.first.other) == ("layer_2", "2")
    assert report.matching.pairs == {"layer_0": "0", "layer_2": "2", "layer_4": "4"}
    with pytest.raises(hl.HooklineError, match=says("name places with match=", "layer_0")):
        hl.compare(tmp_path / "jax.safetensors", faulty, run=(X,))


def test_values_in_a_coarser_dtype_are_explained_by_it(model, faulty):
    values = {
        site: value.bfloat16()
        for site, value in hl.run(copy.deepcopy(model).bfloat16(), X.bfloat16(), capture="*")[1].items()
    }
    assert hl.compare(values, model, run=(X,)).ok
    assert hl.compare(values, faulty, run=(X,)).first.site == "2"


def test_names_that_are_no_places_are_said(model):
    values = dict(hl.run(model, X, capture="*")[1].items())
    report = hl.compare({**values, "other": X}, model, run=(X,))
    assert report.matching.only_a == ["other"]
    assert report.notes[1] == "only in a: other"


def test_outputs_in_another_layout_are_mapped(model):
    values = {"0": model[0](X).T}
    assert hl.compare(values, model, run=(X,), to_a=lambda tensor: tensor.T).ok
    report = hl.compare(values, model, run=(X,))
    assert not report.ok
    assert "output is (8, 2) in a, (2, 8) in b" in report.verdict


def test_a_value_of_which_nothing_is_finite_is_not_ok(model):
    with torch.no_grad():
        model[0].weight.fill_(torch.nan)
    values = {"0": model[0](X).detach()}
    assert "nothing in a is finite" in hl.compare(values, model, run=(X,)).verdict


@pytest.mark.parametrize("odd", [3, {}, {1: X}, ["0"]])
def test_other_things_are_refused(model, odd):
    with pytest.raises(hl.HooklineError, match=says("hl compare takes")):
        hl.compare(odd, model, run=(X,))


def test_a_damaged_file_and_a_missing_run_are_refused(model, tmp_path):
    (tmp_path / "no.safetensors").write_bytes(b"nothing")
    with pytest.raises(hl.StoreError, match=says("not a safetensors file")):
        hl.compare(tmp_path / "no.safetensors", model, run=(X,))
    with pytest.raises(hl.HooklineError, match="needs run="):
        hl.compare({"0": X}, model)


def test_a_value_that_does_not_fit_is_not_ok(model):
    values = dict(hl.run(model, X, capture="*")[1].items())
    assert hl.compare({name: one.numpy() for name, one in values.items()}, model, run=(X,)).ok
    report = hl.compare({**values, "2": values["2"][:, :3]}, model, run=(X,))
    assert not report.ok
    assert "output is (2, 3) in a, (2, 8) in b" in report.verdict
    model[0].never = nn.Linear(2, 2)
    report = hl.compare({**values, "0.never": X}, model, run=(X,))
    assert not report.ok
    assert "b never calls '0.never'" in report.verdict


def test_a_file_of_weights_is_refused(model, tmp_path):
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    with pytest.raises(hl.HooklineError, match=says("it is a weight")):
        hl.compare(tmp_path / "weights.safetensors", model, run=(X,))
