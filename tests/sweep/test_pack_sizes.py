"""How many cells share a run: see `_sweep/pack_sizes.py`."""

from __future__ import annotations

import pytest
import torch

from hookline._sweep import pack_sizes
from hookline._sweep.pack_sizes import PackSizes

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def memory(monkeypatch) -> None:
    monkeypatch.setattr(pack_sizes, "free_memory", lambda _device: 1000)


def packs_of(sizes: PackSizes, starts: list[int]) -> list[int]:
    """Return the sizes of the packs of cells whose values pass at these times."""
    found = []
    while starts:
        found.append(sizes.next_pack(starts))
        starts = starts[found[-1] :]
    return found


def note(sizes: PackSizes, alone: float, shared: float, cells: int) -> None:
    sizes.note_shared(shared, cells)
    sizes.note_alone(alone)


def test_memory_and_the_caller_limit_a_run() -> None:
    assert PackSizes(GPU, 10, None).most == 99  # And the unchanged copy.
    assert PackSizes(GPU, 10, 7).most == 7
    assert PackSizes(GPU, 10_000, None).most == 1
    assert PackSizes(GPU, 0, None).most == 999
    assert PackSizes(CPU, 10, None).most == 8


def test_cells_at_one_place_are_divided_evenly() -> None:
    assert packs_of(PackSizes(GPU, 10, None), [0] * 150) == [75, 75]
    assert packs_of(PackSizes(GPU, 10, 4), [0] * 10) == [4, 3, 3]


def test_few_cells_share_a_run_with_those_at_the_next_place() -> None:
    assert packs_of(PackSizes(GPU, 10, None), [*[0] * 12, *[1] * 12]) == [12, 12]
    assert packs_of(PackSizes(GPU, 10, None), [0, 1, 2, 3, 4, 5, 6, 7, 8, 8, 9]) == [8, 3]


def test_where_runs_cost_more_than_copies_more_places_share_one() -> None:
    sizes = PackSizes(GPU, 1, None)
    note(sizes, alone=1.0, shared=1.0, cells=20)
    assert packs_of(sizes, [place for place in range(10) for _ in range(30)]) == [300]
    note(sizes, alone=1.0, shared=1.0 + 20 / 41, cells=20)  # A run takes as long as 40 copies.
    assert packs_of(sizes, [place for place in range(10) for _ in range(30)]) == [60] * 5


def test_where_copies_cost_more_each_place_has_a_run_of_its_own() -> None:
    sizes = PackSizes(GPU, 1, None)
    note(sizes, alone=1.0, shared=20.0, cells=20)
    assert packs_of(sizes, [0, 1, 1, 2]) == [1, 2, 1]


def test_runs_on_a_cpu_grow_while_that_makes_cells_cheaper() -> None:
    sizes = PackSizes(CPU, 1, None)
    note(sizes, alone=1.0, shared=3.0, cells=8)  # A copy takes 1/4, and a run as long as 3.
    assert (sizes.fewest, sizes.most) == (3, 20)  # 5 seconds are the limit.
    sizes = PackSizes(CPU, 1, None)
    note(sizes, alone=0.01, shared=0.03, cells=8)
    assert (sizes.fewest, sizes.most) == (3, 48)
    sizes = PackSizes(CPU, 1, 5)
    note(sizes, alone=0.01, shared=0.01, cells=5)
    assert sizes.most == 5


def test_a_run_that_did_not_fit_halves_all_later_ones() -> None:
    sizes = PackSizes(GPU, 10, None)
    sizes.halve(50)
    assert packs_of(sizes, [0] * 50) == [25, 25]
    note(sizes, alone=1.0, shared=1.0, cells=25)
    assert sizes.most == 25
    sizes.halve(1)
    assert sizes.most == sizes.fewest == 1


def test_free_memory_is_known_on_a_cpu(monkeypatch) -> None:
    monkeypatch.undo()
    assert pack_sizes.free_memory(CPU) > 1 << 20
