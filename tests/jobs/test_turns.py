"""Processes divide the units of a job, and help each other at the end."""

from __future__ import annotations

import threading
import time

import pytest

from hookline._jobs.turns import turns


@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_ranks_at_one_pace_do_every_unit_once_or_nearly(world):
    done: set[int] = {2, 3, 11}
    began: list[int] = []
    coming = {rank: turns(20, lambda: done, rank, world) for rank in range(world)}
    while coming:
        now = {rank: next(units, None) for rank, units in coming.items()}
        coming = {rank: coming[rank] for rank, unit in now.items() if unit is not None}
        began += [unit for unit in now.values() if unit is not None]
        done |= {*began}
    assert {*began} == {*range(20)} - {2, 3, 11}
    assert len(began) < 17 + world


def test_a_rank_does_the_share_of_one_that_never_came():
    done: set[int] = set()
    for unit in turns(9, lambda: done, rank=1, world=3):
        done.add(unit)
    assert done == {*range(9)}


def test_helpers_of_one_slow_rank_take_different_units():
    helpers = [turns(40, lambda: {*range(10, 40)}, rank, 4) for rank in (1, 2, 3)]
    assert len({next(helper) for helper in helpers}) == 3


def test_processes_that_know_nothing_of_each_other_part_when_they_meet():
    done: set[int] = set()
    began: list[int] = []
    losses = [False, False]
    coming = [turns(200, lambda: done, lost=lambda process=process: losses[process]) for process in range(2)]
    while len(done) < 200:
        now = [next(units, None) for units in coming]
        losses = [losses[0], losses[1] or now[0] == now[1]]
        began += [unit for unit in now if unit is not None]
        done |= {*began}
    assert len(began) < 220


def test_a_rank_that_is_done_waits_for_what_others_are_at():
    done = {2, 3}
    other = threading.Timer(0.2, done.add, [0])
    other.start()
    assert list(turns(4, lambda: {*done}, rank=1, world=2, patience=lambda: 60.0)) == [1]
    other.join()


def test_a_rank_without_news_from_others_waits_and_then_does_their_share():
    began = time.monotonic()
    assert list(turns(6, set, rank=1, world=2, patience=lambda: 0.2)) == [3, 4, 5, 1, 0, 2]
    assert time.monotonic() - began > 0.2
