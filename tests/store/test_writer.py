from __future__ import annotations

import os

import pytest
import torch
from safetensors.torch import load_file

from hookline.errors import StoreError
from hookline.store.places import place
from hookline.store.records import Array, Manifest, data_name
from hookline.store.writer import Unit, begin, begin_part, committed, sweep

ARRAYS = (Array("h.0", torch.bfloat16, (4,)), Array("loss", torch.complex64, ()), Array("é" * 3000, torch.bool, (2, 3)))


@pytest.fixture
def acts(tmp_path):
    return place(tmp_path / "acts")


def manifest(arrays=ARRAYS, units=2, **spec):
    return Manifest({"model": "tiny", **spec}, arrays, units)


def write(acts, told, unit, rows=3, **options):
    attempt = Unit(acts, told, unit)
    for number, array in enumerate(told.arrays):
        attempt.append(number, torch.zeros(rows, *array.shape, dtype=array.dtype))
    options = {"first": unit * rows, "samples": rows, "lengths": [1] * len(told.arrays), **options}
    return attempt, attempt.commit(**options)


def files(acts):
    return sorted(f"{folder}/{name}" for folder in acts.names("data") for name in acts.names(f"data/{folder}"))


def test_a_finished_file_is_a_standard_safetensors_file(acts):
    told = begin(acts, manifest())
    values = torch.randn(5, 4).bfloat16(), torch.randn(3, dtype=torch.complex64)
    unit = Unit(acts, told, 0)
    unit.append(0, values[0][:2])
    unit.append(0, values[0].t().contiguous().t()[2:])
    unit.append(1, values[1].conj())
    assert unit.commit(first=0, samples=3, lengths=[[2, 1, 2], 1, 0])
    rows = [load_file(os.path.join(acts.path, data_name(array, 0, unit.attempt)))["rows"] for array in range(3)]
    assert rows[0].equal(values[0])
    assert torch.view_as_complex(rows[1]).equal(values[1].conj())
    assert rows[2].shape == (0, 2, 3)
    assert rows[2].dtype is torch.bool


def test_of_two_attempts_the_second_leaves_nothing(acts):
    told = begin(acts, manifest())
    late = Unit(acts, told, 0)
    late.append(0, torch.zeros(1, 4, dtype=torch.bfloat16))
    winner, committed_first = write(acts, told, 0)
    assert committed_first
    assert not late.commit(first=0, samples=1, lengths=[1, 0, 0])
    assert committed(acts) == {0}
    assert all(winner.attempt in name for name in files(acts))


def test_a_sweep_takes_what_nobody_holds(acts):
    told = begin(acts, manifest())
    write(acts, told, 0)
    kept = files(acts)
    with Unit(acts, told, 1) as unit:
        unit.append(0, torch.zeros(1, 4, dtype=torch.bfloat16))
        assert sweep(acts) == []
        unit._shards[0].close()  # As the system does when a process dies.
        assert len(sweep(acts)) == 1
    assert files(acts) == kept


def test_a_store_of_something_else_is_refused_in_words(acts):
    begin(acts, manifest(data="a"))
    with pytest.raises(StoreError, match="its data is 'a', that of this run 'b'"):
        begin(acts, manifest(data="b"))
    with pytest.raises(StoreError, match="has no 'h.1', which this run is to keep; did you mean 'h.0'"):
        begin(acts, manifest((Array("h.1", torch.bfloat16, (4,)),)))


def test_a_part_is_begun_once_and_after_a_complete_store(acts):
    told = begin(acts, manifest(data="a"))
    write(acts, told, 0)
    with pytest.raises(StoreError, match="1 of 2 units; finish it before appending"):
        begin_part(acts, manifest(data="b"))
    write(acts, told, 1)
    part, found = begin_part(acts, manifest(data="b"))
    assert (str(part), found.spec["data"]) == (os.path.join(acts.path, "more/0001"), "b")
    assert str(begin_part(acts, manifest(data="b"))[0]) == str(part)
    assert str(begin_part(acts, manifest(data="a"))[0]) == str(acts)
