"""A unit is there whole or not at all, and a finished one holds the given rows, bit for bit."""

from __future__ import annotations

import errno
import json
import os
import resource
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from hookline import Store, StoreError
from hookline._store.disk_format import Array
from tests.errors.wording import says
from tests.support.stores import Writing, leftovers_removed

ARRAYS = (Array("h.0", torch.bfloat16, (4,)), Array("loss", torch.complex64, ()), Array("é" * 3000, torch.bool, (2, 3)))


@pytest.fixture
def acts(tmp_path):
    return tmp_path / "acts"


def write(writing, unit, rows=3, **options):
    attempt = writing.unit(unit)
    for number, array in enumerate(writing.arrays):
        attempt.append(number, torch.zeros(rows, *array.shape, dtype=array.dtype))
    options = {"first": unit * rows, "samples": rows, "lengths": [1] * len(writing.arrays), **options}
    return attempt, attempt.commit(**options)


def files(acts):
    return sorted(path.relative_to(acts / "data").as_posix() for path in (acts / "data").glob("*/*"))


def records(acts):
    return sorted(path.name for path in (acts / "units").glob("*.json"))


def stored(acts, attempt, array=0, unit=0):
    """Return the rows of a file, as safetensors reads them."""
    (path,) = (acts / "data").glob(f"{array:04d}/{unit:08d}-{attempt.attempt}.safetensors")
    return load_file(path)["rows"]


def test_a_finished_file_is_a_standard_safetensors_file(acts):
    writing = Writing(acts, ARRAYS, 2)
    values = torch.randn(5, 4).bfloat16(), torch.randn(3, dtype=torch.complex64)
    unit = writing.unit(0)
    unit.append(0, values[0][:2])
    unit.append(0, values[0].t().contiguous().t()[2:])
    unit.append(1, values[1].conj())
    assert unit.commit(first=0, samples=3, lengths=[[2, 1, 2], 1, 0])
    rows = [stored(acts, unit, array) for array in range(3)]
    assert rows[0].equal(values[0])
    assert torch.view_as_complex(rows[1]).equal(values[1].conj())
    assert rows[2].shape == (0, 2, 3)
    assert rows[2].dtype is torch.bool


def test_of_two_attempts_the_second_leaves_nothing(acts):
    writing = Writing(acts, ARRAYS, 2)
    late = writing.unit(0)
    late.append(0, torch.zeros(1, 4, dtype=torch.bfloat16))
    winner, committed_first = write(writing, 0)
    assert committed_first
    assert not late.commit(first=0, samples=1, lengths=[1, 0, 0])
    assert records(acts) == ["00000000.json"]
    assert all(winner.attempt in name for name in files(acts))


def test_a_store_of_something_else_is_refused_in_words(acts):
    Writing(acts, ARRAYS, 2, data="a")
    with pytest.raises(StoreError, match=says("holds another harvest", "a", "b")):
        Writing(acts, ARRAYS, 2, data="b")
    with pytest.raises(StoreError, match=says("which this run is to", "h.1", "h.0")):
        Writing(acts, [Array("h.1", torch.bfloat16, (4,))], 2)


def test_a_part_is_begun_once_and_after_a_complete_store(acts):
    writing = Writing(acts, ARRAYS, 2, data="a")
    write(writing, 0)
    with pytest.raises(StoreError, match=says("finish it before appending", 1, 2)):
        Writing(acts, ARRAYS, 2, part=True, data="b")
    write(writing, 1)
    for _ in range(2):
        assert Writing(acts, ARRAYS, 2, part=True, data="b").path == str(acts / "more/0001")
    assert json.loads((acts / "more/0001/harvest.json").read_bytes())["spec"]["data"] == "b"
    assert Writing(acts, ARRAYS, 2, part=True, data="a").path == str(acts)


def test_copy_on_write_tensors_stay_shared(acts):
    writing = Writing(acts, [Array("h", torch.float32, (256,))])
    source = torch.randn(100, 256)
    shared = torch._lazy_clone(source)
    unit = writing.unit(0)
    unit.append(0, shared)
    unit.append(0, shared[50:])
    assert torch._C._data_address(shared) == torch._C._data_address(source)
    assert unit.commit(first=0, samples=150, lengths=[1])
    rows = stored(acts, unit, 0)
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
    writing = Writing(acts, [Array("h", torch.float32, (8,))])
    rows = change(torch.randn(10, 8))
    with writing.unit(0) as unit:
        unit.append(0, rows)
        assert unit.commit(first=0, samples=len(rows), lengths=[1])
    assert stored(acts, unit, 0).equal(rows)


@pytest.mark.parametrize(
    "rows",
    [torch.zeros(2, 4), torch.zeros(2, 5, dtype=torch.bfloat16), torch.zeros((), dtype=torch.bfloat16),
     torch.zeros(2, 4, dtype=torch.bfloat16, device="meta")],
)  # fmt: skip
def test_rows_of_another_kind_are_refused(acts, rows):
    writing = Writing(acts, ARRAYS, 2)
    with (
        writing.unit(0) as unit,
        pytest.raises(StoreError, match=says("rows of bfloat16 rows of", "(4,)", "h.0")),
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
    writing = Writing(acts, ARRAYS, 2)
    with pytest.raises(StoreError, match=says("can't be committed", 0, message)):
        write(writing, 0, **options)
    assert files(acts) == []
    assert records(acts) == []


def test_what_is_over_takes_no_more_rows(acts):
    writing = Writing(acts, ARRAYS, 2)
    unit, _ = write(writing, 0)
    kept = files(acts)
    for _ in range(2):
        unit.discard()
        with pytest.raises(StoreError, match=says("takes no more rows")):
            unit.append(0, torch.zeros(1, 4, dtype=torch.bfloat16))
        with pytest.raises(StoreError, match=says("takes no more rows")):
            unit.positions(3, torch.zeros(1))
    assert files(acts) == kept


def test_arrays_are_fed_by_threads_of_their_own(acts):
    arrays = tuple(Array(f"h.{number}", torch.int64, (300,)) for number in range(8))
    writing = Writing(acts, arrays)
    with writing.unit(0) as unit, ThreadPoolExecutor(8) as pool:

        def feed(number):
            for piece in range(50):
                unit.append(number, torch.full((7, 300), number * 100 + piece))

        list(pool.map(feed, range(8)))
        assert unit.commit(first=0, samples=350, lengths=[1] * 8)
    for number in range(8):
        rows = stored(acts, unit, number)
        assert rows.equal((torch.arange(50) + number * 100).repeat_interleave(7).view(-1, 1).expand(350, 300))


def test_a_unit_that_is_given_up_while_threads_write_leaves_nothing(acts):
    arrays = tuple(Array(f"h.{number}", torch.int64, (300,)) for number in range(4))
    writing = Writing(acts, arrays)
    for _ in range(5):
        unit = writing.unit(0)

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
    writing = Writing(acts, [Array("h", torch.float32, (1024,))])
    rows = torch.randn(1000, 1024)
    with writing.unit(0) as unit:
        unit.append(0, rows)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for _ in range(30):
            unit.append(0, rows)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 8_000  # Kilobytes; 120,000 were written.


def test_a_spec_that_is_no_json_is_refused(acts):
    with pytest.raises(StoreError, match=says("a spec or plan must")):
        Writing(acts, ARRAYS, data=object())


@pytest.mark.parametrize("dtype", [torch.quint8, torch.uint4], ids=str)
def test_a_dtype_that_no_file_holds_is_refused(dtype):
    with pytest.raises(StoreError, match=says("a store can't hold torch", "h")):
        Array("h", dtype, ())


def test_the_rows_of_every_file_begin_on_a_page(acts):
    write(Writing(acts, ARRAYS), 0)
    for name in files(acts):
        with (acts / "data" / name).open("rb") as file:
            assert (int.from_bytes(file.read(8), "little") + 8) % 4096 == 0


@pytest.fixture
def interrupted(monkeypatch):
    """Return a function that lets an error come just before or just after a record is created."""
    link = os.link

    def interrupt(error, before=False):
        def linked(source, target, **options):
            if not before:
                link(source, target, **options)
            raise error

        monkeypatch.setattr(os, "link", linked)

    return interrupt


def test_a_record_that_was_created_keeps_its_files_whatever_comes_then(acts, interrupted, monkeypatch):
    writing = Writing(acts, ARRAYS, 2)
    with monkeypatch.context():
        interrupted(KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            write(writing, 0)
        interrupted(FileExistsError(errno.EEXIST, "the answer was lost"))
        _, is_committed = write(writing, 1)
    assert is_committed
    assert len(Store(acts)["h.0"]) == 6
    assert leftovers_removed(acts) == []


def test_a_record_that_was_not_created_leaves_nothing_whatever_comes_then(acts, interrupted, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    writing = Writing(acts, ARRAYS)
    monkeypatch.setattr("fcntl.flock", refuse)  # Where files can't be linked, they are locked.
    for error, raised in ((KeyboardInterrupt(), KeyboardInterrupt), (OSError(errno.EPERM, "no link"), StoreError)):
        interrupted(error, before=True)
        with pytest.raises(raised):
            write(writing, 0)
        assert files(acts) == []


def test_a_unit_that_another_thread_gives_up_while_its_record_is_created_keeps_its_files(acts, monkeypatch):
    unit, link = Writing(acts, ARRAYS).unit(), os.link
    for number, array in enumerate(ARRAYS):
        unit.append(number, torch.zeros(3, *array.shape, dtype=array.dtype))
    monkeypatch.setattr(os, "link", lambda *given, **options: unit.discard() or link(*given, **options))
    assert unit.commit(first=0, samples=3, lengths=[1] * 3)
    assert Store(acts).verify().units == 1
