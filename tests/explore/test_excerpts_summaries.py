"""Statistics of whole values: exact for any size."""

from __future__ import annotations

import pytest
import torch

import hookline as hl
from hookline._plot.plot_data import dense
from hookline._stats import histogram, numbers
from tests.support.explorer_pages import data_of

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


def site_for(path, value, minus=None):
    """Return what a page says of a value; with `minus`, also of its difference to another."""
    return data_of(hl.explore({"h": value if minus is None else minus}, to=path,
                              **({} if minus is None else {"against": {"h": value}})))["sites"][0]  # fmt: skip


@pytest.mark.parametrize("name", VALUES)
def test_they_are_those_of_all_elements(name, path):
    value = VALUES[name]
    site, expected = site_for(path, value), numbers([value])
    (stats,), (counts,) = site["stats"], site["histogram"]
    for key in ("mean", "std", "min", "max", "norm"):
        assert float(stats[key]) == pytest.approx(getattr(expected, key), rel=1e-6, abs=1e-12, nan_ok=True), key
    assert tuple(counts["counts"]) == histogram([value]).counts
    finite = value.double()[value.double().isfinite()]
    assert float(stats["abs"]) == pytest.approx(finite.abs().mean().item())
    assert float(stats["rms"]) == pytest.approx(finite.square().mean().sqrt().item())
    assert stats["elements"] == value.numel()


def test_those_of_a_large_value_are_exact_too(path):
    value = torch.randn(3000, 1000)
    (stats,) = site_for(path, value)["stats"]
    assert stats["mean"] == pytest.approx(value.double().mean().item(), rel=1e-9, abs=1e-12)
    assert stats["rms"] == pytest.approx(value.double().square().mean().sqrt().item())
    assert stats["max"] == value.max().item()


def test_a_difference_is_computed_before_it_is_rounded(path):
    one = torch.full((4, 8), 1000.0).half()
    other = one + torch.tensor(0.5, dtype=torch.half)
    assert site_for(path, other, minus=one)["stats"][2]["mean"] == 0.5
    large = torch.tensor([2**40 + 1, 2**40 + 2])
    assert site_for(path, large, minus=large - 1)["stats"][2]["max"] == 1
    found = site_for(path, torch.tensor([True, False]), minus=torch.tensor([True, True]))
    assert found["stats"][2]["min"] == -1


def test_complex_numbers_go_by_their_size(path):
    one, other = torch.tensor([3 + 4j, 0j]), torch.tensor([0j, 0j])
    assert site_for(path, one)["stats"][0]["max"] == 5
    assert site_for(path, other, minus=one)["stats"][2]["max"] == 5


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
def test_other_layouts_are_read_too(value, path):
    found = dense(value)
    (stats,) = site_for(path, value)["stats"]
    assert stats["elements"] == found.numel() > 0
    assert stats["max"] == pytest.approx(found.double().max().item())


def test_an_empty_value_has_no_numbers(path):
    (stats,) = site_for(path, torch.zeros(0, 4))["stats"]
    assert stats["elements"] == 0
    assert stats["mean"] == "nan"
    assert stats["dead"] is None


def test_numbers_of_tokens_are_over_all_units_also_where_few_are_shown(path, size_of_page):
    value = torch.randn(3, 50, 700)
    page = data_of(hl.explore({"h": value}, to=path, most=size_of_page + 12_000))
    (site,) = page["sites"]
    assert site["picture"][0]["pick"][2][1] < 700
    norms = torch.tensor(site["tokens"][0]["norm"])
    assert norms == pytest.approx(value.norm(dim=2)[: norms.shape[0], : norms.shape[1]], rel=1e-4)
