"""Faults during a harvest: each has one defined outcome, and the same call resumes the harvest."""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest
import torch
from torch.utils.data import DataLoader

import hookline as hl
from tests.errors.wording import says
from tests.support import harvests
from tests.support.deep import IS_DEEP
from tests.support.quick_python import quick_python
from tests.support.running import ROOT, environment, python
from tests.support.script_harvest_on_ranks import Dying, allow

SLOW = """
import sys
from pathlib import Path
from tests.support import harvests
from tests.support.script_harvest_on_ranks import Dying
folder = Path(sys.argv[1])
harvests.harvest(folder / "store", Dying(folder))
"""

IGNORING = f"import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n{SLOW}"

FULL = """
import resource, sys, threading
from pathlib import Path
import hookline as hl
from tests.support import harvests
from tests.support.script_harvest_on_ranks import Dying
folder = Path(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (7800, resource.RLIM_INFINITY))
try:
    harvests.harvest(folder / "store", Dying(folder))
except hl.StoreError as error:
    print(error, threading.active_count())
"""


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> dict:
    """The contents of the store of an undisturbed run."""
    folder = tmp_path_factory.mktemp("undisturbed")
    harvests.harvest(folder / "store", Dying(folder, seconds=0))
    return harvests.contents(folder / "store")


@pytest.fixture(autouse=True)
def _quick_to_end(monkeypatch):
    """Let torch wait less than five seconds for the other processes of a loader when one has died."""
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.5)


def start(code: str, folder: Path, errors: int | TextIO = subprocess.PIPE) -> subprocess.Popen[str]:
    """Start Python with some code, without waiting for it."""
    command = [*quick_python(), "-c", code, str(folder)]
    options = {"stdout": subprocess.PIPE, "stderr": errors, "text": True}
    process = subprocess.Popen(command, env=environment(), cwd=ROOT, **options)
    started.append(process)
    return process


started: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    """Kill the processes that a failed test left waiting."""
    yield
    while started:
        with started.pop() as process:
            process.kill()


def until(condition, seconds: float = 300) -> None:
    """Wait until a condition is true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"the condition is still false after {seconds} s"
        time.sleep(0.01)


@pytest.mark.process
@pytest.mark.slow
def test_a_full_disk_is_an_error_at_once_and_leaves_whole_units_only(tmp_path, expected):
    told = python("-c", FULL, tmp_path, command=quick_python())
    assert "was not written: File too large; take smaller units, or raise the limit" in told
    assert told.endswith(" 1\n")  # Only the main thread is left.
    done = harvests.committed(tmp_path / "store")
    assert 0 < len(done) < 23
    assert len(harvests.loaded(tmp_path / "notes-alone")) < len(done) + 6  # It stopped at the error.
    assert len(list(tmp_path.glob("store/data/*/*"))) == 4 * len(done)
    harvests.harvest(tmp_path / "store", Dying(tmp_path, seconds=0))
    assert harvests.contents(tmp_path / "store") == expected


@pytest.mark.process
def test_ctrl_c_ends_it_at_once_and_the_same_call_goes_on(tmp_path, expected):
    allow(tmp_path, 64)
    process = start(SLOW, tmp_path)
    until(lambda: len(harvests.committed(tmp_path / "store")) > 3)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode in (1, -signal.SIGINT)
    assert errors.strip().endswith("KeyboardInterrupt")
    done = harvests.committed(tmp_path / "store")
    assert 3 < len(done) < 24
    assert len(list(tmp_path.glob("store/data/*/*"))) == 4 * len(done)
    allow(tmp_path, 96)
    harvests.harvest(tmp_path / "store", Dying(tmp_path, seconds=0))
    assert harvests.contents(tmp_path / "store") == expected


@pytest.mark.process
def test_where_ctrl_c_is_ignored_it_is_said_what_stops_it_and_the_same_call_goes_on(tmp_path, expected):
    allow(tmp_path, 32)
    with (tmp_path / "errors").open("w") as errors:
        process = start(IGNORING, tmp_path, errors)
    until(lambda: harvests.committed(tmp_path / "store"))
    process.send_signal(signal.SIGINT)
    allow(tmp_path, 64)
    until(lambda: len(harvests.committed(tmp_path / "store")) > 8)  # It goes on.
    said = (tmp_path / "errors").read_text()
    found = re.findall(r"Ctrl-C is ignored in this process.* run `kill (\d+)`; the same call resumes it", said)
    assert (len(found), said.count("HooklineWarning")) == (1, 1)
    os.kill(int(found[0]), signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGTERM
    assert 8 < len(harvests.committed(tmp_path / "store")) < 24
    allow(tmp_path, 96)
    harvests.harvest(tmp_path / "store", Dying(tmp_path, seconds=0))
    assert harvests.contents(tmp_path / "store") == expected


@pytest.mark.process
def test_two_processes_at_the_same_store_make_each_unit_once(tmp_path, expected):
    processes = [start(SLOW, tmp_path) for _ in range(2)]
    for process in processes:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
    assert harvests.contents(tmp_path / "store") == expected
    assert len(harvests.committed(tmp_path / "store")) == 24


@pytest.mark.process
def test_another_harvest_can_not_write_to_a_store_that_is_being_written(tmp_path, expected):
    allow(tmp_path, 48)
    process = start(SLOW, tmp_path)
    until(lambda: harvests.committed(tmp_path / "store"))
    with pytest.raises(hl.StoreError, match=says("holds another harvest")):
        harvests.harvest(tmp_path / "store", harvests.Sentences(96), dtype=torch.float16)
    allow(tmp_path, 96)
    process.communicate(timeout=300)
    assert process.returncode == 0
    assert harvests.contents(tmp_path / "store") == expected


@pytest.mark.process
def test_a_store_is_read_while_it_is_written(tmp_path, expected):
    whole = harvests.harvest(tmp_path / "whole", harvests.Sentences(96))
    allow(tmp_path, 24)
    process = start(SLOW, tmp_path)
    until(lambda: harvests.committed(tmp_path / "store"))
    seen = [0]
    while process.poll() is None:
        store = hl.Store(tmp_path / "store", partial=True)
        if store.samples == seen[-1]:
            time.sleep(0.005)
            continue
        seen.append(store.samples)
        allow(tmp_path, store.samples + 24)  # More than it has loaded and not yet finished.
        for number in store["head[:, 0]"].samples[:].tolist():
            assert torch.equal(store.rows("layers.1", sample=number), whole.rows("layers.1", sample=number))
    process.communicate()
    assert len(seen) > 4
    assert harvests.contents(tmp_path / "store") == expected


def damaged(to: Path, how: str) -> Path:
    """Damage a data file of unit 5, and return its path."""
    path = next(to.glob("data/0001/00000005-*"))
    data = bytearray(path.read_bytes())
    if how == "truncated":
        data = data[:-8]
    elif how == "altered":
        data[-3] ^= 64
    path.unlink() if how == "missing" else path.write_bytes(data)
    return path


@pytest.mark.parametrize("how", ["truncated", "altered", "missing"])
def test_a_damaged_file_is_named_and_its_unit_can_be_made_anew(tmp_path, how):
    harvests.harvest(tmp_path / "store")
    undisturbed = harvests.contents(tmp_path / "store")
    path = damaged(tmp_path / "store", how)
    with pytest.raises(hl.StoreError, match=says("run the harvest again", path.name)):
        hl.Store(tmp_path / "store").verify()
    (tmp_path / "store/units/00000005.json").unlink()
    assert harvests.harvest(tmp_path / "store").verify().units == 16
    assert harvests.contents(tmp_path / "store") == undisturbed


class Killed(harvests.Sentences):
    """Sentences of which one kills the loader's worker process that loads it."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 50 and torch.utils.data.get_worker_info() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


@pytest.mark.process
# Torch opens temporary files once its pipe breaks, and may raise in the middle, from its signal handler.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_loader_s_process_that_dies_is_an_error_and_the_same_call_goes_on(tmp_path):
    data = Killed()
    loader = DataLoader(data, batch_size=2, collate_fn=data.collate, num_workers=2)
    with pytest.raises(RuntimeError, match="DataLoader worker"):
        hl.harvest(harvests.model, loader, *harvests.SITES, **harvests.options(tmp_path / "store", batch_size=None))
    assert 0 < len(harvests.committed(tmp_path / "store")) < 16
    assert not [thread for thread in threading.enumerate() if thread.name == "hookline.harvest"]
    harvests.harvest(tmp_path / "store", data)
    harvests.harvest(tmp_path / "undisturbed")
    assert harvests.contents(tmp_path / "store") == harvests.contents(tmp_path / "undisturbed")


@pytest.mark.process
@pytest.mark.parametrize("error", [ConnectionResetError(104, "Connection reset by peer"), EOFError()])
def test_a_loader_s_process_that_dies_while_it_is_read_from_is_named(tmp_path, monkeypatch, error):
    def dying(batches):
        raise error

    monkeypatch.setattr("torch.utils.data.dataloader._MultiProcessingDataLoaderIter._next_data", dying)
    loader = DataLoader(harvests.Sentences(), batch_size=2, collate_fn=harvests.Sentences().collate, num_workers=2)
    with pytest.raises(RuntimeError, match=says("DataLoader worker died")):
        hl.harvest(harvests.model, loader, *harvests.SITES, **harvests.options(tmp_path / "store", batch_size=None))


def unreachable(_):
    raise ConnectionRefusedError("no data base here")


@pytest.mark.process
def test_a_loader_s_process_that_fails_at_its_start_is_not_said_to_have_died(tmp_path):
    loader = DataLoader(
        harvests.Sentences(),
        batch_size=2,
        collate_fn=harvests.Sentences().collate,
        num_workers=1,
        worker_init_fn=unreachable,
    )
    with pytest.raises(ConnectionRefusedError, match="no data base here"):
        hl.harvest(harvests.model, loader, *harvests.SITES, **harvests.options(tmp_path / "store", batch_size=None))


def test_the_error_that_torch_raises_in_the_middle_of_a_forward_is_not_taken_for_the_model_s(tmp_path):
    forwards = itertools.count()

    def interrupted(module, args):
        if next(forwards) == 5:
            raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed.")

    model = harvests.model()
    model.register_forward_pre_hook(interrupted)
    with pytest.raises(RuntimeError, match="^DataLoader worker"):
        harvests.harvest(tmp_path / "store", model=model)


def test_a_file_where_the_store_should_be_is_refused(tmp_path):
    (tmp_path / "store").write_text("mine")
    with pytest.raises(hl.StoreError, match=says("was not written")):
        harvests.harvest(tmp_path / "store")
    assert (tmp_path / "store").read_text() == "mine"


@pytest.mark.process
def test_ctrl_c_at_any_moment_does_not_leave_the_threads_that_write_waiting_for_each_other():
    step = 1 if IS_DEEP else 50
    told = python("-m", "tests.support.script_interrupt_writer_threads", step, command=quick_python())
    assert int(told.split()[0]) > 25
