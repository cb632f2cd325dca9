"""Units of a harvest, run in any process of a pool as with Dask, Spark or Slurm, and their progress."""

from __future__ import annotations

import logging
import pickle
import re
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

import pytest
import torch

import hookline as hl
from tests.errors.wording import says
from tests.support import harvests
from tests.support.harvest_models import X, expected, net
from tests.support.prepared_processes import prepared_processes
from tests.support.script_harvest_on_ranks import Dying


def run_unit(data: bytes, unit: int) -> bool:
    """Run a unit as a worker of another tool does: unpickle the plan, and keep it for the next unit."""
    if data not in PLANS:
        PLANS[data] = pickle.loads(data)
    return PLANS[data].run_unit(unit)


PLANS: dict[bytes, hl.Harvest] = {}


@pytest.mark.process
def test_units_run_in_a_pool_of_processes_and_the_status_follows(tmp_path):
    plan = hl.Harvest(harvests.model, Dying(tmp_path), *harvests.SITES, **harvests.options(tmp_path / "store"))
    assert str(plan.status()) == "0 of 24 units done, 0 rows"
    data, pending = pickle.dumps(plan), plan.pending()
    seen = []
    with ProcessPoolExecutor(2, mp_context=prepared_processes()) as pool:
        done = [pool.submit(run_unit, data, unit) for unit in [*pending, *pending[:4]]]
        while not all(one.done() for one in done):
            seen.append(plan.status().done)
            time.sleep(0.02)
    assert sum(one.result() for one in done) == 24  # Four were submitted twice, and done once.
    assert seen == sorted(seen)
    assert len({*seen}) > 3
    assert str(plan.status()).startswith("24 of 24 units done, ")
    assert plan.pending() == []
    harvests.harvest(tmp_path / "alone", Dying(tmp_path, seconds=0))
    assert harvests.contents(tmp_path / "store") == harvests.contents(tmp_path / "alone")


def test_a_unit_leaves_no_hook_and_is_done_once(tmp_path):
    model = harvests.model()
    plan = hl.Harvest(model, harvests.Sentences(), *harvests.SITES, **harvests.options(tmp_path / "store"))
    assert plan.run_unit(3)
    assert not hl.attached(model)
    assert not plan.run_unit(3)
    assert plan.pending() == [unit for unit in range(16) if unit != 3]
    assert plan.run().samples == 64
    assert not hl.attached(model)


@pytest.mark.parametrize("unit", [-1, 16])
def test_a_unit_that_is_not_there_is_refused(tmp_path, unit):
    plan = hl.Harvest(harvests.model, harvests.Sentences(), *harvests.SITES, **harvests.options(tmp_path / "store"))
    with pytest.raises(hl.HooklineError, match=says("there is no unit", unit, 0, 15)):
        plan.run_unit(unit)


def test_a_plan_that_travels_keeps_its_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = pickle.dumps(hl.Harvest(harvests.model, harvests.Sentences(), *harvests.SITES, **harvests.options("store")))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert pickle.loads(data).run_unit(0)
    assert harvests.committed(tmp_path / "store") == {0}


def test_progress_goes_to_the_log_where_there_is_no_terminal(to, caplog):
    with caplog.at_level(logging.INFO, logger="hookline"):
        hl.harvest(net(), X, "0", to=to, batch_size=8)
    assert re.search(r"50 of 50 samples, \S+/s, 0:00 left, 50 rows, 1.6 kB, \S+ kB/s, 0:\d\d in all", caplog.text)
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="hookline"):
        hl.harvest(net(), X, "1", to=to / "b", batch_size=8, progress=False)
    assert not caplog.text


def test_progress_is_a_bar_when_asked(to, capsys):
    hl.harvest(net(), X, "0", to=to, batch_size=8, progress=True)
    shown = capsys.readouterr()
    assert "50 of 50 samples" in shown.err
    assert not shown.out


def test_units_of_one_plan_may_be_asked_for_by_several_threads(to):
    model = net()
    plan = hl.Harvest(model, X, "0", to=to, batch_size=5, unit=5)
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(plan.run_unit, plan.pending()))
    assert torch.equal(plan.run()["0"][:], expected(model, 1, batch=5))
