"""Statistics of whole values: exact for any size, and independent of how the value is cut into pieces."""

from __future__ import annotations

import gc

import pytest
import torch

from hookline._explore import excerpts
from hookline._explore.excerpts import FullValue, Pick, Summary, kind_of_source, of_tokens, pick_all
from hookline._plot.plot_data import dead_share, dense
from hookline._stats import histogram, numbers


def summary_of(value, minus=None):
    return Summary(FullValue(value, kind_of_source(value), minus))


VALUES = {
    "maps": torch.randn(3, 4, 5, 6).relu(),
    "five dimensions": torch.randn(2, 3, 4, 5, 6),
    "attention": torch.randn(2, 3, 4, 4).softmax(-1),
    "averaged attention": torch.randn(3, 4, 4).softmax(-1),
    "tokens": torch.randn(3, 5, 7).relu() * (torch.arange(7) % 3 > 0),
    "units": torch.randn(6, 9),
    "line": torch.randn(50).relu(),
    "number": torch.tensor(3.5),
    "transposed": torch.randn(7, 5, 3).transpose(0, 2),
    "half": torch.randn(4, 6).half(),
    "boolean": torch.randn(4, 6) > 0,
    "not finite": torch.tensor([[1.0, float("nan"), 2.0], [float("-inf"), 5.0, 0.0]]),
}


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("piece", [1, 7, 1 << 20])
def test_they_are_those_of_all_elements_however_it_is_cut(name, piece, monkeypatch):
    monkeypatch.setattr(excerpts, "PIECE", piece)
    value = VALUES[name]
    summary, expected = summary_of(value), numbers([value])
    assert summary.numbers == pytest.approx(expected, rel=1e-12, abs=1e-12)
    assert tuple(summary.counts) == histogram([value]).counts
    assert summary.dead == pytest.approx(dead_share(value, kind_of_source(value)))
    finite = value.double()[value.double().isfinite()]
    assert summary.stats()["abs"] == pytest.approx(finite.abs().mean().item())
    assert summary.stats()["rms"] == pytest.approx(finite.square().mean().sqrt().item())
    assert summary.stats()["elements"] == value.numel()


def test_no_copy_of_a_value_outlives_its_numbers():
    whole = FullValue(torch.randn(41, 83), "units")
    Summary(whole)
    gc.collect()
    wide = [one for one in gc.get_objects() if type(one) is torch.Tensor and one.dtype is torch.float64]
    assert [one for one in wide if one.shape == (41, 83)] == []


def test_a_difference_is_computed_before_it_is_rounded():
    one = torch.full((4, 8), 1000.0).half()
    other = one + torch.tensor(0.5, dtype=torch.half)
    found = summary_of(other, minus=one)
    assert found.numbers.mean == 0.5
    large = torch.tensor([2**60, 2**60 + 1]) % 2**40
    assert summary_of(large, minus=torch.zeros(2, dtype=torch.int64)).numbers.max == 1
    assert summary_of(torch.tensor([True, False]), minus=torch.tensor([True, True])).numbers.min == -1


def test_complex_numbers_go_by_their_size():
    one, other = torch.tensor([3 + 4j, 0j]), torch.tensor([0j, 0j])
    assert summary_of(one).numbers.max == 5
    assert summary_of(other, minus=one).numbers.max == 5


@pytest.mark.parametrize(
    "value",
    [
        torch.eye(4).to_sparse(),
        torch.eye(4).to_sparse_csr(),
        torch.quantize_per_tensor(torch.randn(3, 3), 0.5, 0, torch.qint8),
        torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)]),
        torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged),
    ],
    ids=["sparse", "csr", "quantised", "nested", "jagged"],
)
def test_other_layouts_are_read_too(value):
    found = dense(value)
    summary = summary_of(found)
    assert summary.elements == found.numel() > 0
    assert summary.numbers.max == pytest.approx(found.double().max().item())


def test_an_empty_value_has_no_numbers():
    stats = summary_of(torch.zeros(0, 4)).stats()
    assert stats["elements"] == 0
    assert stats["mean"] == "nan"
    assert stats["dead"] is None


def test_numbers_of_tokens_are_over_all_units_also_where_few_are_shown():
    value = torch.randn(3, 5, 7)
    picks = [Pick(0, 2, 1), Pick(0, 4, 1), Pick(0, 2, 3)]
    found = of_tokens(FullValue(value, "tokens"), picks)
    assert torch.tensor(found["norm"]) == pytest.approx(value.norm(dim=2)[:2, :4], rel=1e-5)
    assert len(found["max"]) == 2


@pytest.mark.parametrize("name", VALUES)
def test_a_part_of_everything_is_everything(name):
    value = VALUES[name]
    whole = FullValue(value, kind_of_source(value))
    part = whole.part(pick_all(whole.shape))
    assert torch.equal(part.reshape(-1).nan_to_num(), value.reshape(-1).double().nan_to_num())
