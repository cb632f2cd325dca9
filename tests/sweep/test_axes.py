"""The axes of a sweep: how sites become a grid, and what the dimensions of values are called."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import hookline as hl
from tests.errors.wording import says
from tests.support.compared_blocks import Computes

HEADS = ("sample", "head", "query", "key")
TOKENS = ("sample", "position", "neuron")


def swept(sites: list[str], dimensions: dict[str, tuple[str, ...]] | None = None) -> hl.Sweep:
    """Return a sweep of these places with measurements 0, 1, 2, ..."""
    return hl.Sweep(0.0, {site: float(number) for number, site in enumerate(sites)}, dimensions=dimensions or {})


def measured(grid: Any) -> list[float]:
    """Return the numbers of a grid without the cells of places that were not measured."""
    return grid.values[~grid.values.isnan()].tolist()


@pytest.mark.parametrize(
    ("sites", "dimensions", "axes"),
    [
        (["h.0.mlp", "h.1.mlp"], (), {"layer": [0, 1]}),
        (["h.10", "h.9"], (), {"layer": [9, 10]}),
        (["conv1", "conv2"], (), {"layer": [1, 2]}),
        (["conv1", "conv2", "fc"], (), {"module": ["conv1", "conv2", "fc"]}),
        (["h.5.mlp.0", "h.5.mlp.2"], (), {"mlp": [0, 2]}),
        (["h.0.experts.3", "h.1.experts.2"], (), {"layer": [0, 1], "experts": [2, 3]}),
        (["h.0.attn", "h.0.mlp", "h.1.attn"], (), {"layer": [0, 1], "module": ["attn", "mlp"]}),
        (["h.0:input", "h.0", "h.1"], (), {"layer": [0, 1], "module": [":input", "h.*"]}),
        (["enc.0.a.x", "dec.0.a.x"], (), {"module": ["enc", "dec"]}),
        (["h.0.attn/softmax[:, 3]", "h.1.attn/softmax[:, 0]"], HEADS, {"layer": [0, 1], "head": [0, 3]}),
        (["h.0.attn/softmax[:, 1]", "h.0.attn/softmax[:, 2]"], (), {"head": [1, 2]}),
        (["h.0[:, 2]", "h.0[:, -1]", "h.0[:, 0]"], TOKENS, {"position": [0, 2, -1]}),
        (["h.0[:, 1:3]", "h.0[:, 4]"], TOKENS, {"position": ["1:3", 4]}),
        (["h.0[..., 7]", "h.0[..., 8]"], TOKENS, {"neuron": [7, 8]}),
        (["h.0[:, 1, 5]", "h.0[:, 2, 6]"], TOKENS, {"position": [1, 2], "neuron": [5, 6]}),
        (["h.0[:, 1]", "h.0[:, 2]"], (), {"dim 1": [1, 2]}),
        (["h.0[0][:, 1]", "h.0[1][:, 1]"], TOKENS, {"part": [0, 1]}),
        (['h.0["a"]', 'h.0["b"]'], (), {"part": ["a", "b"]}),
        (["h.0[:, @3]", "h.0[:, @4]"], (), {"position": [3, 4]}),
        (["h.0[:, @prompt[-1]]", "h.0[:, @new]"], (), {"position": ["prompt[-1]", "new"]}),
        (["h.0#0", "h.0#1"], (), {"call": [0, 1]}),
        (["h.0#0/relu", "h.0#1/relu"], (), {"outer call": [0, 1]}),
        (["embed"], (), {"site": ["embed"]}),
        (["h.0.a.1[:, 1]", "h.1.a.2[:, 2]"], TOKENS, {"layer": [0, 1], "a": [1, 2], "position": [1, 2]}),
    ],
)
def test_the_axes_of_a_grid_are_named_by_what_varies(sites, dimensions, axes):
    grid = swept(sites, dict.fromkeys(sites, dimensions) if dimensions else None).grid()
    assert grid.axes == axes
    assert list(grid.values.shape) == [len(labels) for labels in axes.values()]
    assert sorted(measured(grid)) == list(range(len(sites)))


@pytest.mark.parametrize(
    ("sites", "pattern"),
    [
        (
            [f"h.{layer}.attn/matmul#1[:, {head}]" for layer in range(2) for head in range(2)],
            "h.*.attn/matmul#1[:, *]",
        ),
        (["h.5.mlp.0", "h.5.mlp.2"], "h.5.mlp.*"),
        (["h.0#0", "h.0#1"], "h.0"),
        (["h.0.attn", "h.0.mlp"], ""),
    ],
    ids=range(4),
)
def test_a_picture_names_the_pattern_with_a_star_for_what_varies_and_the_call_that_all_have(sites, pattern):
    figure = swept(sites).plot()
    texts = [figure.get_suptitle(), *(axes.get_title() for axes in figure.axes)]
    assert any(pattern in text for text in texts)
    assert pattern or not any("h." in text for text in texts)


def test_two_axes_never_have_one_name():
    grid = swept(["h.0.h.1", "h.1.h.0", "h.0.h.0"]).grid()
    assert list(grid.axes) == ["layer", "h"]
    grid = swept(["a.0.layer.1.layer.5", "a.1.layer.0.layer.6"]).grid()
    assert list(grid.axes) == ["layer", "layer 2", "layer 3"]


@given(st.permutations([*itertools.product(range(3), range(2), range(11))]), st.integers(1, 66))
def test_each_place_has_its_own_cell_whatever_the_order_and_whatever_is_missing(cells, number):
    sites = {f"h.{layer}.attn.z[:, {head}, {place}]": (layer, head, place) for layer, head, place in cells[:number]}
    names = ("sample", "head", "position", "neuron")
    grid = swept(list(sites), dict.fromkeys(sites, names)).grid()
    for value, labels in enumerate(sites.values()):
        places = dict(zip(("layer", "head", "position"), labels, strict=True))
        where = tuple(labels.index(places[name]) for name, labels in grid.axes.items() if name in places)
        assert grid.axes.keys() <= {*places, "site"}
        assert grid.values[where if "site" not in grid.axes else 0].item() == value


@pytest.mark.parametrize(
    ("sites", "message"),
    [
        (
            ["embed", "h.0.mlp", "h.1.mlp"],
            says("has no number in its", "embed", "h.0.mlp", 1, "h.*.mlp"),
        ),
        (["h.0.mlp", "h.1.mlp", "h.1.mlp.2"], says("numbers in its name", "h.1.mlp.2", 2)),
        (
            ["h.0[:, 0]", "h.0[:, 1]", "h.0"],
            says("has no subscript", "h.0", "h.0[:, 0]", "h.*[:, *]"),
        ),
    ],
)
def test_places_that_form_no_grid_are_named_with_what_to_select(sites, message):
    with pytest.raises(hl.HooklineError, match=message):
        swept(sites).grid()


def test_subscripts_that_mean_different_things_form_no_grid():
    dimensions = {"h.0.attn/softmax[:, 1]": HEADS, "h.0.mlp[:, 1]": TOKENS, "h.0.mlp[:, 2]": TOKENS}
    with pytest.raises(hl.HooklineError, match=says("has a subscript for its")):
        swept(list(dimensions), dimensions).grid()


def test_a_sweep_without_places_has_no_grid():
    with pytest.raises(hl.HooklineError, match=says("no places in this sweep")):
        swept([]).grid()


class Returns(nn.Module):
    """Two modules, `h.0` and `conv1`, that return a tensor of a shape, also through functions."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        numbers = torch.randn(shape)

        def value(x: Tensor) -> Tensor:
            if numbers.dim() < 3:
                return numbers * 2
            return nn.functional.scaled_dot_product_attention(*[numbers.softmax(-1)] * 3)

        self.embed = Computes(torch.Tensor.float)
        self.h, self.conv1 = nn.ModuleList([Computes(value)]), Computes(value)

    def forward(self, x: Tensor) -> Tensor:
        return self.embed(x).sum() + self.h[0](x).norm() + self.conv1(x).norm()


@pytest.mark.parametrize(
    ("site", "shape", "width", "names"),
    [
        ("h.0", (2, 9, 8), 9, TOKENS),
        ("h.0", (9, 2, 8), 9, ("position", "sample", "neuron")),
        ("h.0", (2, 8), None, ("sample", "neuron")),
        ("h.0", (2, 3, 9, 4), 9, ("sample", "head", "position", "neuron")),
        ("h.0", (2, 9, 3, 4), 9, ("sample", "position", "head", "neuron")),
        ("h.0", (2, 3, 9, 9), 9, HEADS),
        ("h.0/softmax", (2, 3, 5, 7), None, HEADS),
        ("h.0/softmax", (2, 5, 5), None, ("sample", "query", "key")),
        ("h.0/scaled_dot_product_attention", (2, 3, 9, 4), None, ("sample", "head", "position", "neuron")),
        ("conv1", (2, 3, 5, 5), None, ("sample", "channel", "row", "column")),
        ("h.0", (3,), None, ("dim 0",)),
    ],
)
def test_the_dimensions_of_a_value_are_named_by_the_site_its_shape_and_the_tokens(site, shape, width, names):
    given = torch.ones(2, width, dtype=torch.long) if width else torch.ones(2, 3, 2)
    corners = [f"{site}[{', '.join([index] * len(shape))}]" for index in "01"]
    found = hl.sweep(Returns(shape), corners, lambda output: output, run=(given,), batch=1)
    assert tuple(found.grid().axes) == names


def test_a_grid_prints_as_a_table_and_a_wide_one_without_its_middle():
    sites = ["h.0[:, 1]", "h.0[:, 2]", "h.3[:, 1]", "h.3[:, 2]"]
    heads = dict.fromkeys(sites, ("sample", "head"))
    small = hl.Sweep(0.0, dict(zip(sites, [1.0, 2.5, float("nan"), 4.0], strict=True)), dimensions=heads).grid()
    assert str(small).splitlines() == [
        "grid of 2 layers × 2 heads", "layer    1    2", "─────  ───  ───", "0        1  2.5", "3      nan    4",
    ]  # fmt: skip
    sites = [f"h.{layer}[:, {place}]" for layer in range(2) for place in range(40)]
    wide = swept(sites, dict.fromkeys(sites, TOKENS)).grid()
    assert str(wide).splitlines()[1].split() == ["layer", *"012345", "…", "35", "36", "37", "38", "39"]
    sites = ["h.0[:, 0]", "h.0[:, 1]"]
    assert str(swept(sites, dict.fromkeys(sites, HEADS)).grid()).splitlines()[0] == "grid of 2 heads"
    sites = [f"h.{layer}[:, {head}, {place}]" for layer in (0, 1) for head in (0, 1) for place in (0, 1, 2)]
    deep = swept(sites, dict.fromkeys(sites, ("sample", "head", "position"))).grid()
    assert str(deep).startswith("grid of 2 layers × 2 heads × 3 positions; grid.values is a tensor")
