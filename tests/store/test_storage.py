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

from hookline import StoreError
from hookline._store import storage
from hookline._store.disk_format import Array, Manifest, committed
from hookline._store.storage import open_storage
from hookline._store.store import Store
from hookline._store.writer import Unit, begin, begin_part, remove_leftovers
from tests.support.quick_python import quick_python

ARRAY = Array("h", torch.int64, (1024,))


def names(path):
    return sorted(
        os.path.relpath(os.path.join(folder, name), path) for folder, _, found in os.walk(path) for name in found
    )


def run(script, *arguments):
    command = [*quick_python(), "-c", textwrap.dedent(script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def refuse_links(*arguments):
    raise OSError(errno.EPERM, "Operation not permitted")


@pytest.mark.parametrize("links", [True, False])
def test_of_many_that_create_a_file_one_does(tmp_path, monkeypatch, links):
    if not links:
        monkeypatch.setattr(os, "link", refuse_links)
    root = open_storage(tmp_path / "acts")
    with ThreadPoolExecutor(8) as pool:
        created = list(pool.map(lambda number: root.create("units/x.json", b"%d" % number * 1000), range(40)))
    assert sum(created) == 1
    assert root.read("units/x.json") == b"%d" % created.index(True) * 1000
    assert root.names("units") == ["x.json"]


def test_without_links_and_locks_nothing_is_claimed(tmp_path, monkeypatch):
    def refuse(*arguments):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(os, "link", refuse_links)
    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.raises(StoreError, match="x.json' was not written: Operation not permitted"):
        open_storage(tmp_path).create("x.json", b"1")
    assert names(tmp_path) == [".lock" + storage._TEMPORARY]


def test_a_link_whose_answer_was_lost_counts(tmp_path, monkeypatch):
    def lost(source, target, link=os.link):
        link(source, target)
        raise FileExistsError(errno.EEXIST, "File exists")

    monkeypatch.setattr(os, "link", lost)
    assert open_storage(tmp_path).create("x.json", b"1")


def test_a_place_need_not_exist_yet(tmp_path):
    root = open_storage(tmp_path / "a" / "b")
    assert root.names("data") == []
    assert root.sizes("data") == {}
    assert root.free() > 0
    root.remove("x")
    with pytest.raises(FileNotFoundError):
        root.read("x")
    assert not (tmp_path / "a").exists()
    assert root.child("c").path == str(tmp_path / "a" / "b" / "c")


def test_a_relative_place_stays_where_it_was(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    root = open_storage("acts")
    monkeypatch.chdir("/")
    assert root.path == str(tmp_path / "acts")


def test_a_file_stands_in_the_way(tmp_path):
    (tmp_path / "acts").write_text("x")
    with pytest.raises(StoreError, match="was not written: Not a directory"):
        begin(open_storage(tmp_path / "acts"), Manifest({}, (ARRAY,), 1))


WRITER = """
    import os, sys, time, torch
    from hookline._store.storage import open_storage
    from hookline._store.disk_format import read_manifest
    from hookline._store.writer import Unit
    root = open_storage(sys.argv[1])
    unit = Unit(root, read_manifest(root), int(sys.argv[2]))
    unit.append(0, torch.zeros(10, 1024, dtype=torch.int64))
    print(unit.attempt, os.getpid(), flush=True)
    time.sleep(60)
"""


def test_a_sweep_takes_the_files_of_the_killed_and_leaves_those_of_the_living(tmp_path):
    root = open_storage(tmp_path)
    told = begin(root, Manifest({}, (ARRAY,), 3))
    with Unit(root, told, 0) as unit:
        unit.append(0, torch.ones(3, 1024, dtype=torch.int64))
        unit.commit(first=0, samples=3, lengths=[1])
    command = [*quick_python(), "-c", textwrap.dedent(WRITER), str(tmp_path)]
    writers = [subprocess.Popen([*command, str(number)], stdout=subprocess.PIPE, text=True) for number in (1, 2)]
    try:
        (dead, process), (living, _) = (writer.stdout.readline().split() for writer in writers)
        assert remove_leftovers(root) == []
        os.kill(int(process), signal.SIGKILL)
        writers[0].wait()
        assert remove_leftovers(root) == [f"data/0000/00000001-{dead}.safetensors"]
        assert [name for name in names(tmp_path / "data") if living in name]
    finally:
        for writer in writers:
            writer.terminate()
            writer.communicate()
    assert remove_leftovers(root) == [f"data/0000/00000002-{living}.safetensors"]
    assert Store(tmp_path, partial=True).verify().files == 1


def test_a_sweep_sees_a_record_that_came_just_now(tmp_path, monkeypatch):
    root = open_storage(tmp_path)
    told = begin(root, Manifest({}, (ARRAY,), 1))
    unit = Unit(root, told, 0)
    unit.append(0, torch.ones(3, 1024, dtype=torch.int64))
    listed = root.names("data/0000")
    assert unit.commit(first=0, samples=3, lengths=[1])
    monkeypatch.setattr(type(root), "names", lambda self, folder: listed if folder == "data/0000" else ["0000"])
    assert remove_leftovers(root) == []


def test_where_locks_can_not_tell_age_does(tmp_path, monkeypatch):
    def refuse(*arguments):
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", refuse)
    root = open_storage(tmp_path)
    told = begin(root, Manifest({}, (ARRAY,), 1))
    with Unit(root, told, 0) as unit:
        unit.append(0, torch.ones(3, 1024, dtype=torch.int64))
        assert remove_leftovers(root) == []
        path = tmp_path / "data" / "0000" / root.names("data/0000")[0]
        os.utime(path, (time.time() - 7200,) * 2)
        assert len(remove_leftovers(root)) == 1
        with pytest.raises(StoreError, match="was removed while it was written; run this unit again"):
            unit.commit(first=0, samples=3, lengths=[1])
    assert committed(root) == set()


def test_without_fcntl_units_are_written_and_read_too(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "fcntl", None)
    root = open_storage(tmp_path)
    told = begin(root, Manifest({}, (ARRAY,), 1))
    unit = Unit(root, told, 0)
    unit.append(0, torch.ones(3, 1024, dtype=torch.int64))
    assert remove_leftovers(root) == []
    assert unit.commit(first=0, samples=3, lengths=[1])
    assert Store(tmp_path)["h"][:].sum() == 3 * 1024


def test_a_sweep_takes_old_temporary_files(tmp_path):
    root = open_storage(tmp_path)
    begin(root, Manifest({}, (ARRAY,), 1))
    (tmp_path / "units").mkdir()
    for name in ("old", "new"):
        (tmp_path / "units" / f".{name}{storage._TEMPORARY}").write_text("x")
    os.utime(tmp_path / "units" / f".old{storage._TEMPORARY}", (time.time() - 7200,) * 2)
    (tmp_path / "units" / "notes.txt").write_text("x")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "notes.txt").write_text("x")
    assert remove_leftovers(root) == [f"units/.old{storage._TEMPORARY}"]


FULL = """
    import resource, sys, torch
    from hookline import StoreError
    from hookline._store.storage import open_storage
    from hookline._store.disk_format import Array, Manifest
    from hookline._store.writer import begin
    from hookline._store.writer import Unit
    root = open_storage(sys.argv[1])
    told = begin(root, Manifest({}, (Array("h", torch.int64, (1024,)), Array("g", torch.int64, ())), 1))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
    unit = Unit(root, told, 0)
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


def test_a_file_that_may_not_grow_is_said_and_nothing_is_left(tmp_path):
    done = run(FULL, tmp_path / "acts")
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert re.search(r"data/0000/00000000-\w+.safetensors' was not written: File too large; take smaller units", first)
    assert "takes no more rows" in second
    assert names(tmp_path / "acts") == ["harvest.json"]


@pytest.mark.parametrize("system", ["Linux", "another system"])
def test_the_disk_begins_to_write_before_a_unit_is_finished(tmp_path, monkeypatch, system):
    spans = []
    note = (lambda file, start, size, flags: spans.append((start.value, size.value))) if system == "Linux" else None
    monkeypatch.setattr(storage, "_sync_file_range", note)
    monkeypatch.setattr(storage, "_EARLY", 1 << 16)  # 8 rows; they begin at 4096.
    root, rows = open_storage(tmp_path), torch.arange(40 * 1024).view(40, 1024)
    unit = Unit(root, begin(root, Manifest({}, (ARRAY,), 1)), 0)
    for piece in rows.split([5, 1, 20, 14]):
        unit.append(0, piece)
    assert spans == ([(0, 3 << 16), (3 << 16, 2 << 16)] if system == "Linux" else [])
    unit.commit(first=0, samples=40, lengths=[1])
    assert Store(tmp_path)["h"][:].equal(rows)
    Store(tmp_path).verify()


@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_full_disk_is_said_and_nothing_is_left(tmp_path, monkeypatch, call):
    root = open_storage(tmp_path)
    told = begin(root, Manifest({}, (ARRAY,), 1))

    def full(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    unit = Unit(root, told, 0)
    unit.append(0, torch.zeros(10, 1024, dtype=torch.int64))
    monkeypatch.setattr(storage, "_write", full) if call == "write" else monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreError, match="No space left on device; make room on this disk, or give another path"):
        unit.append(0, torch.zeros(10, 1024, dtype=torch.int64))
        unit.commit(first=0, samples=20, lengths=[1])
    assert names(tmp_path) == ["harvest.json"]


def attempt_all(path, name, barrier, queue):
    root = open_storage(path)
    told = begin(root, Manifest({"model": "m"}, (ARRAY,), 12))
    won = []
    for number in range(12):
        barrier.wait()
        unit = Unit(root, told, number)
        for _ in range(3):
            unit.append(0, torch.full((5, 1024), name))
        if unit.commit(first=15 * number, samples=15, lengths=[1]):
            won.append(number)
    queue.put(won)


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
    assert remove_leftovers(open_storage(tmp_path)) == []


def begin_one(path, name, barrier, queue):
    barrier.wait()
    part, _ = begin_part(open_storage(path), Manifest({"model": "m", "data": name}, (ARRAY,), 0))
    queue.put((name, os.path.relpath(str(part), path)))


def test_processes_that_append_the_same_share_a_part_and_others_have_their_own(tmp_path):
    begin(open_storage(tmp_path), Manifest({"model": "m", "data": "first"}, (ARRAY,), 0))
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
