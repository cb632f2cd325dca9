"""The options of a capture: the values they accept, and the values they refuse."""

from __future__ import annotations

from typing import Any

import pytest

import hookline as hl
from hookline._kernel import bytes_of
from tests.errors.wording import says
from tests.support.models import mlp


@pytest.mark.parametrize("keep", [0, -1, 1.5, True, "first", None])
def test_keep_is_last_all_or_a_number(keep: Any) -> None:
    with pytest.raises(hl.HooklineError, match=says("is not last")):
        hl.capture(mlp(), "0", keep=keep)


@pytest.mark.parametrize(
    ("option", "value"),
    [("dtype", "float17"), ("dtype", float), ("device", "nowhere"), ("transform", 3), ("clone", "yes")],
)
def test_options_that_mean_nothing_are_refused_at_once(option: str, value: Any) -> None:
    with pytest.raises(hl.HooklineError, match=f"{option}="):
        hl.capture(mlp(), "0", **{option: value})


@pytest.mark.parametrize(
    ("limit", "expected"),
    [(0, 0), (7, 7), (2e9, 2_000_000_000), ("7B", 7), ("1 B", 1), ("500 MB", 500_000_000), ("2 GiB", 2 << 30),
     ("1.5 kB", 1500), ("1 KB", 1000), ("1 KiB", 1024), ("0.1 GB", 100_000_000), ("3TB", 3 * 10**12)],
)  # fmt: skip
def test_bytes_may_be_written_with_their_unit(limit, expected):
    assert bytes_of(limit) == expected


@pytest.mark.parametrize("text", ["GB", "2", "2gb", "2 gB", "-1 MB", "1e9 B", "2  GB", "2 GB ", "0.5 B", "1,000 B"])
def test_what_could_mean_something_else_is_no_number_of_bytes(text):
    with pytest.raises(hl.HooklineError, match=says("is not a number of bytes nor")):
        bytes_of(text)
