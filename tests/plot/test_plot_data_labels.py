"""Names of sites and tokens as labels."""

from __future__ import annotations

import math

import pytest

from hookline._plot.plot_data import along_depth, depth_of, families, thinned


def test_names_are_families_by_their_numbers():
    assert [one.template for one in families(["layer1.0.conv1", "layer1.1.conv1", "fc"])] == ["layer1.*.conv1", "fc"]
    assert depth_of(["h.10", "h.2"]).labels == ["10", "2"]  # In the order they fired.
    assert depth_of(["a", "b"]).title == "site, in order"
    assert list(along_depth(["b", "a", "a:grad_output", "b:grad_output"])) == [
        "b",
        "a",
        "b:grad_output",
        "a:grad_output",
    ]
    assert along_depth(["no site [", "h.0"]) == {"no site [": "no site [", "h.0": "h.0"}


@pytest.mark.parametrize(("count", "most"), [(1, 1), (5, 0), (12, 12), (13, 12), (997, 10), (10, 1000)])
def test_labels_are_thinned_to_as_many_as_there_is_room_for(count, most):
    chosen = thinned(count, most)
    assert chosen[0] == 0
    assert len(chosen) <= max(most, 1)
    assert math.log10(chosen.step) % 1 == 0 or str(chosen.step)[0] in "25"
