"""How much of a value a picture shows: the bytes are shared out fairly, and what is left out is said."""

from __future__ import annotations

import os
from math import prod

import pytest
import torch

import hookline as hl
from tests.support.explorer_pages import data_of, pixels, shown


@pytest.mark.parametrize(
    "value",
    [
        torch.randn(4, 160, 768),
        torch.randn(2, 12, 100, 100).softmax(-1),
        torch.randn(8, 40, 33, 33),
        torch.randn(30_000, 7),
        torch.randn(100_000),
    ],
    ids=["tokens", "attention", "maps", "units", "line"],
)
@pytest.mark.parametrize("room", [12_000, 40_000])
def test_a_picture_keeps_to_its_bytes_and_covers_each_dimension(value, room, path, size_of_page):
    page = data_of(hl.explore({"h": value}, to=path, most=size_of_page + room))
    assert os.path.getsize(path) <= size_of_page + room
    (picture,) = page["sites"][0]["picture"]
    assert picture["left_out"] != ""
    assert prod(picture["shape"]) > 1
    for (start, count, step), size in zip(picture["pick"], picture["of"], strict=True):
        assert count >= 1
        assert start + (count - 1) * step < size
        assert step == 1 or start + count * step >= size - step
    assert (pixels(picture) - shown(value.double(), picture)).abs().max() <= picture["error"] + 1e-12


def test_all_pictures_together_take_no_more_than_there_is_and_small_ones_stay_whole(path, size_of_page):
    values = {"small": torch.randn(4, 8), **{f"h.{number}": torch.randn(8, 60, 50) for number in range(6)}}
    page = data_of(hl.explore(values, to=path, most=size_of_page + 60_000))
    assert os.path.getsize(path) <= size_of_page + 60_000
    small, *large = (site["picture"][0] for site in page["sites"])
    assert small["left_out"] == ""
    assert len({tuple(map(tuple, one["pick"])) for one in large}) == 1  # Values of one size have pictures of one size.


def test_samples_go_first_then_units_evenly(path, size_of_page):
    page = data_of(hl.explore({"h": torch.randn(4, 16, 768)}, to=path, most=size_of_page + 16_000))
    samples, tokens, units = page["sites"][0]["picture"][0]["pick"]
    assert samples == [0, 1, 1]
    assert tokens == [0, 16, 1]
    assert units[2] > 1
    assert units[1] * units[2] >= 768 - units[2]


def test_what_is_left_out_is_said(path, size_of_page):
    page = data_of(hl.explore({"h": torch.randn(2, 12, 100, 100).softmax(-1)}, to=path, most=size_of_page + 10_000))
    (picture,) = page["sites"][0]["picture"]
    (_, heads, _), (_, queries, _), (_, keys, _) = picture["pick"][1:]
    said = {"samples": (1, 2), "heads": (12 - heads, 12), "queries": (100 - queries, 100), "keys": (100 - keys, 100)}
    assert picture["left_out"] == ", ".join(f"{few} of {all} {name}" for name, (few, all) in said.items() if few)
