"""A harvest may be killed at any moment: after 200 kills its stores equal an undisturbed one byte for byte."""

from __future__ import annotations

import json
import os

import pytest

from hookline._harvest.run_units import MOST_OPEN
from tests.support.quick_python import quick_python
from tests.support.running import python

KILLS = 200

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="forks what it kills")


@pytest.mark.slow
def test_a_harvest_killed_at_200_moments_is_the_undisturbed_one_byte_for_byte():
    done = python("-m", "tests.support.script_kill_harvest", KILLS, 6, command=quick_python())
    seen = json.loads(done)
    assert seen["timed"] + seen["aimed"] >= KILLS
    # The kills were varied: timed and aimed, in runs that had finished a unit and in runs that had not.
    assert min(seen["timed"], seen["aimed"]) >= KILLS // 4
    assert KILLS // 5 <= seen["fruitful"] <= KILLS * 4 // 5
    assert seen["stores"] >= 10
    assert seen["orphans"] >= KILLS // 10
    assert seen["lost"] <= MOST_OPEN + 1  # One more unit was loaded, but not begun.


def test_so_is_one_of_batches_that_nobody_counted():
    done = python("-m", "tests.support.script_kill_harvest", 40, 7, "--batches", command=quick_python())
    seen = json.loads(done)
    assert seen["timed"] + seen["aimed"] >= 40
    assert seen["stores"] >= 3
