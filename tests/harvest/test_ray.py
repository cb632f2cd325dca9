"""A harvest on a real local Ray cluster: two actors, of which one dies."""

from __future__ import annotations

import builtins
import os
import pickle
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import hookline as hl
from tests.errors.wording import says
from tests.support import harvests
from tests.support.script_harvest_on_ranks import Broken, allow, made

ray = pytest.importorskip("ray")

UNITS = 24


@pytest.fixture(autouse=True)
def _own_print(monkeypatch):
    """Restore `print` after each test: Ray replaces it in builtins."""
    monkeypatch.setattr(builtins, "print", print)


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> dict:
    """The contents of a store that one process wrote."""
    folder = tmp_path_factory.mktemp("alone")
    harvests.harvest(folder / "store", Broken(folder, seconds=0), on_error="skip")
    return harvests.contents(folder / "store")


@pytest.fixture(scope="module")
def cluster():
    """A Ray cluster that the user has started."""
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    yield
    ray.shutdown()


def sentences() -> harvests.Sentences:
    """Return the data; each process calls this function."""
    return harvests.Sentences()


def makers(folder: Path) -> set[int]:
    """Return the processes that made the model."""
    return {int(path.name.removeprefix("made-")) for path in folder.glob("made-*")}


def allow_all_after(folder: Path, number: int) -> None:
    """Let the harvest end when so many processes have made the model, or after two minutes."""
    deadline = time.monotonic() + 120
    while len(makers(folder)) < number and time.monotonic() < deadline:
        time.sleep(0.05)
    allow(folder, 96)


@pytest.mark.slow
def test_two_actors_of_which_one_dies_write_what_one_process_does(tmp_path, expected, monkeypatch):
    monkeypatch.setenv("HOOKLINE_TEST_FOLDER", str(tmp_path))
    allow(tmp_path, 48)
    threading.Thread(target=allow_all_after, args=(tmp_path, 3), daemon=True).start()
    data = Broken(tmp_path, units=6)
    store = harvests.harvest(tmp_path / "store", data, model=made, engine="ray", workers=2, on_error="skip")
    assert (tmp_path / "died").exists()
    assert harvests.contents(tmp_path / "store") == expected
    assert store.samples == 96
    assert list(store.skipped) == [50]
    assert os.getpid() not in makers(tmp_path)
    assert len(makers(tmp_path)) >= 3  # Two actors, and the replacement of the one that died.
    assert not ray.is_initialized()  # The harvest started Ray, and shut it down.


@pytest.mark.process
@pytest.mark.deep
def test_what_ray_was_interrupted_in_another_engine_goes_on_with(tmp_path, expected, cluster):
    def interrupt() -> None:
        end = time.monotonic() + 300
        while len(harvests.committed(tmp_path / "store")) < 4 and time.monotonic() < end:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    allow(tmp_path, 48)
    threading.Thread(target=interrupt, daemon=True).start()
    data, options = Broken(tmp_path), {"engine": "ray", "workers": 1, "on_error": "skip"}
    with pytest.raises(KeyboardInterrupt):
        harvests.harvest(tmp_path / "store", lambda: data, model=lambda: harvests.model(), **options)
    assert 4 <= len(harvests.committed(tmp_path / "store")) < UNITS
    assert ray.is_initialized()  # The user started it, so it stays.
    allow(tmp_path, 96)
    harvests.harvest(tmp_path / "store", data, on_error="skip")
    assert harvests.contents(tmp_path / "store") == expected


@pytest.mark.process
@pytest.mark.deep
def test_a_bad_sample_on_ray_is_raised_with_its_number(tmp_path, expected, cluster):
    with pytest.raises(hl.BadSample, match=says("no such sentence", 50)):
        harvests.harvest(tmp_path / "store", Broken(tmp_path), engine="ray", workers=1)
    harvests.harvest(tmp_path / "store", Broken(tmp_path), on_error="skip")
    assert harvests.contents(tmp_path / "store") == expected


@pytest.mark.process
@pytest.mark.deep
def test_a_unit_that_kills_every_worker_is_given_up_by_name(tmp_path, cluster):
    with pytest.raises(hl.HooklineError, match=says("has killed its worker", 12, 4)):
        harvests.harvest(tmp_path / "store", Broken(tmp_path, kills=True), engine="ray", workers=1)


@pytest.mark.process
@pytest.mark.deep
def test_another_harvest_on_ray_is_refused_in_words(tmp_path, cluster):
    harvests.harvest(tmp_path / "store", harvests.Sentences(8))
    with pytest.raises(hl.StoreError, match="it has 'embed' .float32.* this run 'embed' .bfloat16"):
        harvests.harvest(tmp_path / "store", harvests.Sentences(8), engine="ray", workers=1, dtype=torch.bfloat16)


def test_a_model_itself_does_not_travel(tmp_path):
    with pytest.raises(hl.HooklineError, match=says("sends a function that makes")):
        harvests.harvest(tmp_path / "store", model=harvests.model(), engine="ray")


def test_a_plan_travels_without_weights_and_data(tmp_path):
    plan = hl.Harvest(made, sentences, *harvests.SITES, **harvests.options(tmp_path / "store"))
    assert plan.estimate().samples == 64
    data = pickle.dumps(plan)
    assert len(data) < 2000
    found, expected = pickle.loads(data).estimate(), plan.estimate()
    assert replace(found, free=expected.free) == expected  # Other processes write to the disk meanwhile.


@pytest.mark.parametrize("workers", [0, -1, 1.5, "two"])
def test_a_number_of_workers_that_can_not_be_is_refused(tmp_path, workers):
    with pytest.raises(hl.HooklineError, match=says("workers= is a number of", 1)):
        harvests.harvest(tmp_path / "store", engine="ray", workers=workers)


def test_workers_without_ray_and_other_engines_are_refused(tmp_path):
    with pytest.raises(hl.HooklineError, match=says("is for engine= ray", 2)):
        harvests.harvest(tmp_path / "store", workers=2)
    with pytest.raises(hl.HooklineError, match=says("engine= is one of None", "ray", "spark")):
        harvests.harvest(tmp_path / "store", engine="spark")


def test_without_ray_it_is_said_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(hl.HooklineError, match=says("pip install hookline ray")):
        harvests.harvest(tmp_path / "store", engine="ray")
