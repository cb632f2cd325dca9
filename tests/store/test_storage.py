"""A store in a folder: files appear whole or not at all, and leftovers of dead writers are told from live ones."""

from __future__ import annotations

import errno
import multiprocessing
import os
import re
import signal
import subprocess
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from hookline import Store, StoreError
from hookline._store.disk_format import Array
from tests.errors.wording import says
from tests.support.quick_python import quick_python
from tests.support.running import python
from tests.support.stores import Writing, leftovers_removed

ARRAY = Array("h", torch.int64, (1024,))
TEMPORARY = ".hookline-temporary"  # How the names of files end that are not whole yet.


def names(path):
    return sorted(
        os.path.relpath(os.path.join(folder, name), path) for folder, _, found in os.walk(path) for name in found
    )


def run(script, *arguments):
    command = [*quick_python(), "-c", textwrap.dedent(script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def refuse_links(*arguments):
    raise OSError(errno.EPERM, "Operation not permitted")


def filled(writing, number=0, value=1):
    """Return an attempt at a unit that holds three rows and is not finished."""
    unit = writing.unit(number)
    unit.append(0, torch.full((3, 1024), value))
    return unit


def finished(unit, number=0):
    return unit.commit(first=3 * number, samples=3, lengths=[1])


@pytest.mark.parametrize("links", [True, False])
def test_of_many_that_finish_a_unit_one_does(tmp_path, monkeypatch, links):
    if not links:
        monkeypatch.setattr(os, "link", refuse_links)
    with ThreadPoolExecutor(8) as pool:
        writing = list(pool.map(lambda _: Writing(tmp_path / "acts", [ARRAY]), range(8)))
        units = [filled(writing[number % 8], 0, number) for number in range(24)]
        created = list(pool.map(finished, units))
    assert sum(created) == 1
    assert int(Store(tmp_path / "acts")["h"][:][0, 0]) == created.index(True)
    assert len(names(tmp_path / "acts/data")) == 1


def test_without_links_and_locks_nothing_is_claimed(tmp_path, monkeypatch):
    def refuse(*arguments):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(os, "link", refuse_links)
    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.raises(StoreError, match=says("json' was not written")):
        Writing(tmp_path, [ARRAY])
    assert names(tmp_path) == [f".lock{TEMPORARY}"]


def test_a_link_whose_answer_was_lost_counts(tmp_path, monkeypatch):
    def lost(source, target, link=os.link):
        link(source, target)
        raise FileExistsError(errno.EEXIST, "File exists")

    unit = filled(Writing(tmp_path, [ARRAY]))
    monkeypatch.setattr(os, "link", lost)
    assert finished(unit)


def test_a_place_that_does_not_exist_is_no_store_and_is_not_made(tmp_path):
    with pytest.raises(StoreError, match=says("is not a store")):
        Store(tmp_path / "a" / "b")
    assert leftovers_removed(tmp_path / "a" / "b") == []
    assert not (tmp_path / "a").exists()


def test_a_relative_place_stays_where_it_was(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    unit = filled(Writing("acts", [ARRAY]))
    monkeypatch.chdir("/")
    assert finished(unit)
    monkeypatch.chdir(tmp_path)
    store = Store("acts")
    monkeypatch.chdir("/")
    assert store["h"][:].sum() == 3 * 1024


def test_a_file_stands_in_the_way(tmp_path):
    (tmp_path / "acts").write_text("x")
    with pytest.raises(StoreError, match=says("was not written")):
        Writing(tmp_path / "acts", [ARRAY])


WRITER = """
    import os, sys, time, torch
    from hookline._store.disk_format import Array
    from tests.support.stores import Writing
    unit = Writing(sys.argv[1], [Array("h", torch.int64, (1024,))], 3).unit(int(sys.argv[2]))
    unit.append(0, torch.zeros(10, 1024, dtype=torch.int64))
    print(unit.attempt, os.getpid(), flush=True)
    time.sleep(60)
"""


@pytest.mark.process
def test_a_sweep_takes_the_files_of_the_killed_and_leaves_those_of_the_living(tmp_path):
    writing = Writing(tmp_path, [ARRAY], 3)
    assert finished(filled(writing))
    command = [*quick_python(), "-c", textwrap.dedent(WRITER), str(tmp_path)]
    writers = [subprocess.Popen([*command, str(number)], stdout=subprocess.PIPE, text=True) for number in (1, 2, 2)]
    try:
        (dead, process), (living, _), (late, other) = (writer.stdout.readline().split() for writer in writers)
        assert leftovers_removed(tmp_path) == []
        assert finished(filled(writing, 2), 2)
        for number, killed in ((0, process), (2, other)):
            os.kill(int(killed), signal.SIGKILL)
            writers[number].wait()
        # Of a unit that is not done, and of one that is.
        assert sorted(leftovers_removed(tmp_path)) == [
            f"data/0000/00000001-{dead}.safetensors",
            f"data/0000/00000002-{late}.safetensors",
        ]
        assert [name for name in names(tmp_path / "data") if living in name]
    finally:
        for writer in writers:
            writer.terminate()
            writer.communicate()
    assert leftovers_removed(tmp_path) == [f"data/0000/00000002-{living}.safetensors"]
    assert Store(tmp_path, partial=True).verify().files == 2


def test_a_sweep_takes_no_file_of_a_unit_that_is_finished_meanwhile(tmp_path):
    writing = Writing(tmp_path, [ARRAY], 60)
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(lambda: [finished(filled(writing, number), number) for number in range(60)])
        while not done.done():
            assert leftovers_removed(tmp_path) == []
        assert all(done.result())
    assert Store(tmp_path).verify().units == 60


def test_where_locks_can_not_tell_age_does(tmp_path, monkeypatch):
    def refuse(*arguments):
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", refuse)
    with filled(Writing(tmp_path, [ARRAY])) as unit:
        assert leftovers_removed(tmp_path) == []
        (path,) = (tmp_path / "data" / "0000").iterdir()
        os.utime(path, (time.time() - 7200,) * 2)
        assert len(leftovers_removed(tmp_path)) == 1
        with pytest.raises(StoreError, match=says("was removed while it was")):
            finished(unit)
    assert not (tmp_path / "units").exists() or names(tmp_path / "units") == []


WITHOUT_LOCKS = """
    import sys
    sys.modules["fcntl"] = None
    import torch
    import hookline as hl
    model, x = torch.nn.Sequential(torch.nn.Linear(2, 2)).eval(), torch.ones(8, 2)
    hl.Harvest(model, x, "0", to=sys.argv[1], batch_size=2, unit=4, progress=False).run_unit(0)
    print(len(hl.harvest(model, x, "0", to=sys.argv[1], batch_size=2, progress=False)["0"]))
"""


@pytest.mark.process
@pytest.mark.deep
def test_where_files_have_no_locks_units_are_written_and_read_too(tmp_path):
    assert python("-c", textwrap.dedent(WITHOUT_LOCKS), tmp_path / "acts") == "8\n"


def test_a_sweep_takes_old_temporary_files(tmp_path):
    Writing(tmp_path, [ARRAY])
    (tmp_path / "units").mkdir()
    for name in ("old", "new"):
        (tmp_path / "units" / f".{name}{TEMPORARY}").write_text("x")
    os.utime(tmp_path / "units" / f".old{TEMPORARY}", (time.time() - 7200,) * 2)
    (tmp_path / "units" / "notes.txt").write_text("x")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "notes.txt").write_text("x")
    assert leftovers_removed(tmp_path) == [f"units/.old{TEMPORARY}"]


FULL = """
    import resource, sys, torch
    from hookline import StoreError
    from hookline._store.disk_format import Array
    from tests.support.stores import Writing
    writing = Writing(sys.argv[1], [Array("h", torch.int64, (1024,)), Array("g", torch.int64, ())])
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
    unit = writing.unit()
    unit.append(1, torch.zeros(5, dtype=torch.int64))
    try:
        for _ in range(100):
            unit.append(0, torch.zeros(10, 1024, dtype=torch.int64))
    except StoreError as error:
        print(error)
    try:
        unit.append(1, torch.zeros(5, dtype=torch.int64))
    except StoreError as error:
        print(error)
"""


@pytest.mark.process
def test_a_file_that_may_not_grow_is_said_and_nothing_is_left(tmp_path):
    done = run(FULL, tmp_path / "acts")
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert re.search(r"data/0000/00000000-\w+.safetensors' was not written: File too large; take smaller units", first)
    assert "takes no more rows" in second
    assert names(tmp_path / "acts") == ["harvest.json"]


def test_a_unit_of_many_pieces_and_many_bytes_is_written_whole(tmp_path):
    rows = torch.arange(2600 * 1024).view(2600, 1024)  # 20 MiB: the disk begins to write before the unit is finished.
    unit = Writing(tmp_path, [ARRAY]).unit()
    for piece in rows.split([5, 1, 2000, 594]):
        unit.append(0, piece)
    unit.commit(first=0, samples=2600, lengths=[1])
    assert Store(tmp_path)["h"][:].equal(rows)
    Store(tmp_path).verify()


def test_a_full_disk_is_said_and_nothing_is_left(tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    unit = filled(Writing(tmp_path, [ARRAY]))
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreError, match=says("No space left on device make")):
        finished(unit)
    assert names(tmp_path) == ["harvest.json"]


def attempt_all(path, name, barrier, queue):
    writing = Writing(path, [ARRAY], 12)
    won = []
    for number in range(12):
        barrier.wait()
        unit = writing.unit(number)
        for _ in range(3):
            unit.append(0, torch.full((5, 1024), name))
        if unit.commit(first=15 * number, samples=15, lengths=[1]):
            won.append(number)
    queue.put(won)


@pytest.mark.process
def test_two_processes_at_the_same_units_write_each_once(tmp_path):
    context = multiprocessing.get_context("fork")
    barrier, queue = context.Barrier(2), context.SimpleQueue()
    writers = [context.Process(target=attempt_all, args=(tmp_path, name, barrier, queue)) for name in (1, 2)]
    for writer in writers:
        writer.start()
    won = [queue.get(), queue.get()]
    for writer in writers:
        writer.join()
    assert sorted(won[0] + won[1]) == list(range(12))
    assert len(names(tmp_path / "data")) == len(names(tmp_path / "units")) == 12
    store = Store(tmp_path)
    store.verify()
    units = store["h"][:].view(12, -1)
    assert (units == units[:, :1]).all()  # Each unit comes from one writer.
    assert leftovers_removed(tmp_path) == []


def begin_one(path, name, barrier, queue):
    barrier.wait()
    part = Writing(path, [ARRAY], 0, part=True, data=name)
    queue.put((name, os.path.relpath(part.path, path)))


@pytest.mark.process
def test_processes_that_append_the_same_share_a_part_and_others_have_their_own(tmp_path):
    Writing(tmp_path, [ARRAY], 0, data="first")
    context = multiprocessing.get_context("fork")
    barrier, queue = context.Barrier(4), context.SimpleQueue()
    given = ("a", "a", "b", "b")
    writers = [context.Process(target=begin_one, args=(tmp_path, name, barrier, queue)) for name in given]
    for writer in writers:
        writer.start()
    found = {queue.get() for _ in writers}
    for writer in writers:
        writer.join()
    assert len(found) == 2
    assert {part for _, part in found} == {"more/0001", "more/0002"}
