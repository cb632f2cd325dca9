"""A unit is there whole or not at all, and a finished one holds the given rows, bit for bit."""

from __future__ import annotations

import os
import resource
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from hookline._store.disk_format import Array, Manifest, committed, data_name
from hookline._store.storage import open_storage
from hookline._store.store import Store
from hookline._store.writer import Unit, begin, begin_part, remove_leftovers
from hookline.errors import StoreError

ARRAYS = (Array("h.0", torch.bfloat16, (4,)), Array("loss", torch.complex64, ()), Array("é" * 3000, torch.bool, (2, 3)))


@pytest.fixture
def acts(tmp_path):
    return open_storage(tmp_path / "acts")


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
        assert remove_leftovers(acts) == []
        unit._shards[0].close()  # The operating system does this when a process dies.
        assert len(remove_leftovers(acts)) == 1
    assert files(acts) == kept


def test_a_sweep_takes_another_attempt_at_a_unit_that_is_done(acts, monkeypatch):
    told = begin(acts, manifest())
    write(acts, told, 0)
    write(acts, told, 1)
    kept = files(acts)
    late = Unit(acts, told, 1)
    late.append(0, torch.zeros(1, 4, dtype=torch.bfloat16))
    late._shards[0].close()
    read: list[str] = []
    own = acts.read
    monkeypatch.setattr(acts, "read", lambda name: read.append(name) or own(name))
    assert len(remove_leftovers(acts)) == 1
    assert files(acts) == kept
    assert {*read} == {"units/00000001.json"}  # Not all records of a store are read.


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


def test_copy_on_write_tensors_stay_shared(acts):
    told = begin(acts, manifest((Array("h", torch.float32, (256,)),)))
    source = torch.randn(100, 256)
    shared = torch._lazy_clone(source)
    unit = Unit(acts, told, 0)
    unit.append(0, shared)
    unit.append(0, shared[50:])
    assert torch._C._data_address(shared) == torch._C._data_address(source)
    assert unit.commit(first=0, samples=150, lengths=[1])
    rows = load_file(os.path.join(acts.path, data_name(0, 0, unit.attempt)))["rows"]
    assert rows.equal(torch.cat([source, source[50:]]))


@pytest.mark.parametrize(
    "change",
    [
        lambda rows: rows.requires_grad_(),
        lambda rows: rows.t().contiguous().t(),
        lambda rows: rows[::2],
        lambda rows: rows[:1].expand(9, 8),
        torch._neg_view,
        lambda rows: nn.Parameter(rows),
        lambda rows: rows[:0],
    ],
)
def test_whatever_way_rows_lie_in_memory_they_are_written_right(acts, change):
    told = begin(acts, manifest((Array("h", torch.float32, (8,)),)))
    rows = change(torch.randn(10, 8))
    with Unit(acts, told, 0) as unit:
        unit.append(0, rows)
        assert unit.commit(first=0, samples=len(rows), lengths=[1])
    assert load_file(os.path.join(acts.path, data_name(0, 0, unit.attempt)))["rows"].equal(rows)


@pytest.mark.parametrize(
    "rows",
    [torch.zeros(2, 4), torch.zeros(2, 5, dtype=torch.bfloat16), torch.zeros((), dtype=torch.bfloat16),
     torch.zeros(2, 4, dtype=torch.bfloat16, device="meta")],
)  # fmt: skip
def test_rows_of_another_kind_are_refused(acts, rows):
    told = begin(acts, manifest())
    with (
        Unit(acts, told, 0) as unit,
        pytest.raises(StoreError, match=r"rows of 'h.0' \(bfloat16, rows of \(4,\)\) were"),
    ):
        unit.append(0, rows)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"samples": 4}, "'h.0' has 3 rows, its samples 4"),
        ({"lengths": [[1, 1, 2], 1, 1]}, "'h.0' has 3 rows, its samples 4"),
        ({"lengths": [[1, 2], 1, 1]}, "2 lengths for 3 samples"),
        ({"lengths": [1, 1]}, "not a file for each array"),
        ({"order": [0, 1, 1]}, "its order"),
        ({"skipped": {7: "bad"}}, "skipped sample is not in this unit"),
        ({"first": -1}, "a number"),
    ],
)
def test_a_unit_that_can_not_be_is_not_committed_and_leaves_nothing(acts, options, message):
    told = begin(acts, manifest())
    with pytest.raises(StoreError, match=f"unit 0 can't be committed: .*{message}"):
        write(acts, told, 0, **options)
    assert files(acts) == []
    assert committed(acts) == set()


def test_what_is_over_takes_no_more_rows(acts):
    told = begin(acts, manifest())
    unit, _ = write(acts, told, 0)
    kept = files(acts)
    for _ in range(2):
        unit.discard()
        with pytest.raises(StoreError, match="takes no more rows"):
            unit.append(0, torch.zeros(1, 4, dtype=torch.bfloat16))
        with pytest.raises(StoreError, match="takes no more rows"):
            unit.positions(3, torch.zeros(1))
    assert files(acts) == kept


def test_arrays_are_fed_by_threads_of_their_own(acts):
    arrays = tuple(Array(f"h.{number}", torch.int64, (300,)) for number in range(8))
    told = begin(acts, manifest(arrays))
    with Unit(acts, told, 0) as unit, ThreadPoolExecutor(8) as pool:

        def feed(number):
            for piece in range(50):
                unit.append(number, torch.full((7, 300), number * 100 + piece))

        list(pool.map(feed, range(8)))
        assert unit.commit(first=0, samples=350, lengths=[1] * 8)
    for number in range(8):
        rows = load_file(os.path.join(acts.path, data_name(number, 0, unit.attempt)))["rows"]
        assert rows.equal((torch.arange(50) + number * 100).repeat_interleave(7).view(-1, 1).expand(350, 300))


def test_a_unit_that_is_given_up_while_threads_write_leaves_nothing(acts):
    arrays = tuple(Array(f"h.{number}", torch.int64, (300,)) for number in range(4))
    told = begin(acts, manifest(arrays))
    for _ in range(5):
        unit = Unit(acts, told, 0)

        def feed(number, unit=unit):
            with suppress(StoreError):
                for _ in range(1000):
                    unit.append(number, torch.zeros(7, 300, dtype=torch.int64))

        with ThreadPoolExecutor(4) as pool:
            fed = [pool.submit(feed, number) for number in range(4)]
            unit.discard()
            assert [one.result() for one in fed] == [None] * 4
        assert files(acts) == []


def test_memory_does_not_grow_with_the_unit(acts):
    told = begin(acts, manifest((Array("h", torch.float32, (1024,)),)))
    rows = torch.randn(1000, 1024)
    with Unit(acts, told, 0) as unit:
        unit.append(0, rows)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for _ in range(30):
            unit.append(0, rows)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 8_000  # Kilobytes; 120,000 were written.


def test_a_spec_that_is_no_json_is_refused(acts):
    with pytest.raises(StoreError, match="a spec or plan must be plain JSON"):
        begin(acts, manifest(data=object()))


@pytest.mark.parametrize("dtype", [torch.quint8, torch.uint4], ids=str)
def test_a_dtype_that_no_file_holds_is_refused(dtype):
    with pytest.raises(StoreError, match=r"'h': a store can't hold torch.*; cast it"):
        Array("h", dtype, ())


def test_the_rows_of_every_file_begin_on_a_page(acts):
    write(acts, begin(acts, manifest()), 0)
    for name in files(acts):
        with open(os.path.join(acts.path, "data", name), "rb") as file:
            assert (int.from_bytes(file.read(8), "little") + 8) % 4096 == 0


class Interrupted:
    """A storage that raises an error just before or just after it creates a record."""

    def __init__(self, inner, error, before=False):
        self.inner, self.error, self.before = inner, error, before

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def create(self, name, data):
        if not self.before:
            self.inner.create(name, data)
        raise self.error


def test_a_record_that_was_created_keeps_its_files_whatever_comes_then(acts):
    told = begin(acts, manifest())
    with pytest.raises(KeyboardInterrupt):
        write(Interrupted(acts, KeyboardInterrupt()), told, 0)
    _, is_committed = write(Interrupted(acts, StoreError("the answer was lost")), told, 1)
    assert is_committed
    assert len(Store(acts.path)["h.0"]) == 6
    assert remove_leftovers(acts) == []


def test_a_record_that_was_not_created_leaves_nothing_whatever_comes_then(acts):
    told = begin(acts, manifest())
    for error in (KeyboardInterrupt(), StoreError("no way there")):
        with pytest.raises(type(error)):
            write(Interrupted(acts, error, before=True), told, 0)
        assert files(acts) == []


def test_a_unit_that_another_thread_gives_up_before_its_record_is_created_is_not_committed(acts, monkeypatch):
    monkeypatch.setattr(Unit, "_check", lambda unit, record: unit.discard())  # Its files are finished by then.
    with pytest.raises(StoreError, match="unit 0 can't be committed: it was discarded"):
        write(acts, begin(acts, manifest()), 0)
    assert committed(acts) == set()
    assert files(acts) == []


def test_a_unit_that_another_thread_gives_up_while_its_record_is_created_keeps_its_files(acts, monkeypatch):
    told, create = begin(acts, manifest(units=1)), type(acts).create
    unit = Unit(acts, told, 0)
    monkeypatch.setattr(type(acts), "create", lambda *given: unit.discard() or create(*given))
    for number, array in enumerate(told.arrays):
        unit.append(number, torch.zeros(3, *array.shape, dtype=array.dtype))
    assert unit.commit(first=0, samples=3, lengths=[1] * len(told.arrays))
    assert Store(acts.path).verify().units == 1
