"""The writer threads: bounded memory, and errors that reach the caller."""

from __future__ import annotations

import threading
import time

import pytest
import torch

import hookline as hl
from hookline._harvest import run_units, writer_threads
from hookline._store.writer import Unit
from tests.support.harvest_models import X, expected, net


def test_what_goes_wrong_while_writing_reaches_the_caller_at_once(to, monkeypatch):
    model, seen = net(), []
    model[0].register_forward_hook(lambda *_: seen.append(time.sleep(0.02)))

    def fail(*_):
        raise hl.StoreError("the disk is full")

    monkeypatch.setattr(Unit, "append", fail)
    with pytest.raises(hl.StoreError, match="the disk is full"):
        hl.harvest(model, X.repeat(20, 1), "0", to=to, batch_size=10)
    assert len(seen) < 20
    assert not [thread for thread in threading.enumerate() if thread.name == "hookline.harvest"]


def test_a_slow_disk_holds_the_model_back_so_that_memory_stays_bounded():
    held, most = [0], [0]

    def work() -> None:
        time.sleep(0.002)
        held[0] -= 1

    with writer_threads.WriterThreads(2, limit=100) as threads:
        for number in range(60):
            held[0] += 1
            threads.put(number, work, 30)
            most[0] = max(most[0], held[0])
        threads.finish()
    assert held[0] == 0
    assert most[0] <= 4


def test_a_lane_takes_what_is_larger_than_the_limit_alone():
    done = []
    with writer_threads.WriterThreads(1, limit=10) as threads:
        for number in range(3):
            threads.put(0, lambda number=number: done.append(number), 1000)
        threads.finish()
    assert done == [0, 1, 2]


def test_an_interrupted_run_leaves_no_threads_and_no_unfinished_files(to):
    model = net()
    handle = model[0].register_forward_hook(
        lambda _module, args, _output: stop() if args[0][0, 0] == X[30, 0] else None
    )

    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hl.harvest(model, X, "0", "1", to=to, batch_size=10, unit=10)
    assert not [thread for thread in threading.enumerate() if thread.name == "hookline.harvest"]
    handle.remove()
    partial = hl.Store(to, partial=True)
    assert len(list(to.glob("data/*/*"))) == 2 * len(list(to.glob("units/*")))
    assert torch.equal(partial["0"][:], expected(model, 1, batch=10)[: len(partial["0"])])


def test_many_sites_do_not_use_up_the_files_of_a_process():
    import resource

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert run_units._most_open(1) == run_units.MOST_OPEN
    assert run_units._most_open(limit) == 1
