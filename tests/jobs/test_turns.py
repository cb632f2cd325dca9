"""Processes divide the units of a job, and help each other at the end."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from hookline._jobs.turns import turns
from tests.support import harvests

UNITS = 40  # More samples than are loaded to know the data again.


def units_of(folder: Path, rank: int, world: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Harvest as one rank of several, of which no other comes; return the units in the order in which it does them."""
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(world))
    notes = folder / f"notes-{rank}-{world}"
    assert harvests.harvest(folder / "store", harvests.Sentences(4 * UNITS, notes)).samples == 4 * UNITS
    return harvests.loaded(notes)


@pytest.mark.parametrize(("rank", "world"), [(0, 1), (1, 2), (1, 3), (6, 7)])
def test_a_rank_begins_with_its_own_share_and_does_that_of_those_that_never_come(rank, world, tmp_path, monkeypatch):
    units = units_of(tmp_path, rank, world, monkeypatch)
    share = list(range(UNITS * rank // world, UNITS * (rank + 1) // world))
    assert units[: len(share)] == share
    assert sorted(units) == list(range(UNITS))


def test_helpers_of_one_slow_rank_take_different_units(tmp_path, monkeypatch):
    after = []
    for rank in (1, 2, 3):
        (tmp_path / str(rank)).mkdir()
        after.append(units_of(tmp_path / str(rank), rank, 4, monkeypatch)[UNITS // 4])
    assert len({*after}) == 3


def test_what_is_left_is_shared_and_no_unit_is_done_again(tmp_path, monkeypatch):
    units_of(tmp_path, 0, 1, monkeypatch)
    for unit in (2, 11, 25, 38):
        (tmp_path / f"store/units/{unit:08d}.json").unlink()
    units = units_of(tmp_path, 1, 2, monkeypatch)
    assert units[:2] == [25, 38]
    assert sorted(units[2:]) == [2, 11]


def test_ranks_at_one_pace_do_every_unit_once_or_nearly():
    done: set[int] = {2, 3, 11}
    began: list[int] = []
    coming = {rank: turns(20, lambda: done, rank, 7) for rank in range(7)}
    while coming:
        now = {rank: next(units, None) for rank, units in coming.items()}
        coming = {rank: coming[rank] for rank, unit in now.items() if unit is not None}
        began += [unit for unit in now.values() if unit is not None]
        done |= {*began}
    assert {*began} == {*range(20)} - {2, 3, 11}
    assert len(began) < 17 + 7


@pytest.mark.parametrize("losses", [[False, False], [True, True]])
def test_processes_that_know_nothing_of_each_other_part_when_they_meet(losses):
    done: set[int] = set()
    began: list[int] = []
    coming = [turns(200, lambda: done, lost=lambda process=process: losses[process]) for process in range(2)]
    while len(done) < 200:
        now = [next(units, None) for units in coming]
        losses = [losses[0], losses[1] or now[0] == now[1]]
        began += [unit for unit in now if unit is not None]
        done |= {*began}
    assert len(began) < 220


def test_a_rank_without_news_from_others_waits_and_then_does_their_share():
    began = time.monotonic()
    assert list(turns(6, set, rank=1, world=2, patience=lambda: 0.2)) == [3, 4, 5, 1, 0, 2]
    assert time.monotonic() - began > 0.2
