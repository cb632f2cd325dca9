"""Harvests as a whole: the stored rows, resuming, appending, estimates, plans."""

from __future__ import annotations

import pickle
import shutil

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    TensorDataset,
)

import hookline as hl
from tests.errors.wording import says
from tests.support.harvest_models import BATCHES, Tagger, Texts, X, changed, expected, net


def test_rows_are_those_that_passed(to):
    model = net()
    store = hl.harvest(model, X, "0", "1", "2[:, 1]", "2:input", to=to, batch_size=8, unit=16)
    assert torch.equal(store["0"][:], expected(model, 1))
    assert torch.equal(store["2:input"][:], expected(model, 2))
    assert torch.equal(store["2[:, 1]"][:], expected(model, 3)[:, 1])
    assert torch.equal(store.rows("1", sample=17), expected(model, 2)[17:18])
    assert store["0"].samples[:].tolist() == list(range(50))


@pytest.mark.parametrize(
    ("data", "options", "problem"),
    [
        (DataLoader(TensorDataset(X), batch_size=8, shuffle=True), {}, says("the loader shuffles")),
        (
            DataLoader(TensorDataset(X), sampler=DistributedSampler(TensorDataset(X), 2, 0)),
            {},
            says("DistributedSampler repeats samples"),
        ),
        (DataLoader(TensorDataset(X), batch_size=4), {"batch_size": 2}, says("makes batches of", 2, 4)),
        (DataLoader(TensorDataset(X), batch_size=4), {"batch_size": 0}, says("makes batches of", 0, 4)),
        (X, {}, says("give batch_size=")),
        (iter([X]), {"batch_size": 4}, says("has no length and index")),
        ([X], {"sort_by_length": True}, says("give a dataset and batch_size=")),
        (X, {"batch_size": 0}, "from 1 on"),
        (X[:0], {"batch_size": 4}, says("no samples to harvest")),
        ([], {}, says("no batches to harvest")),
        (iter([]), {}, says("no batches to harvest")),
        (X, {"batch_size": 4, "rows": "token"}, says("rows= is batch")),
        (X, {"batch_size": 4, "on_error": "ignore"}, says("on_error= is one of", "raise", "skip")),
        (X, {"batch_size": 4, "calls": "all"}, says("calls= is one of")),
        (X, {"batch_size": 4, "unit": 0}, says("is not a whole number from on", 0, 1)),
        ({"a": X, "b": X[:3]}, {"batch_size": 4}, "'a' 50, 'b' 3"),
        ([torch.tensor(1.0)], {}, says("with samples in the first")),
    ],
)  # fmt: skip
def test_what_can_not_be_harvested_is_refused_in_words(data, options, problem, to):
    with pytest.raises(hl.HooklineError, match=problem):
        hl.harvest(net(), data, "0", to=to, **options)
    assert not to.exists() or not list(to.iterdir())


def test_a_place_that_is_not_there_is_refused_before_anything_runs(to):
    with pytest.raises(hl.SiteError, match=says("did you mean")):
        hl.harvest(Tagger(), X, "mixx", to=to, batch_size=4)
    with pytest.raises(hl.SiteError, match="harvest what"):
        hl.harvest(net(), X, to=to, batch_size=4)


def test_a_model_in_training_is_warned_of(to):
    with pytest.warns(hl.HooklineWarning, match="training mode"):
        hl.harvest(net().train(), X, "0", to=to, batch_size=8)


def test_a_run_goes_on_where_it_was_and_ends_at_once_when_done(to):
    model, seen = net(), []
    model[0].register_forward_pre_hook(lambda _module, args: seen.append(len(args[0])))
    plan = hl.Harvest(model, X, "0", to=to, batch_size=10, unit=10)
    assert plan.run_unit(3)
    assert not plan.run_unit(3)
    assert (plan.status().done, plan.status().units, plan.status().rows) == (1, 5, 10)
    assert plan.pending() == [0, 1, 2, 4]
    with pytest.raises(hl.StoreError, match=says("run its harvest again to", "1 of 5")):
        hl.Store(to)
    assert len(hl.Store(to, partial=True)["0"]) == 10
    seen.clear()
    store = hl.harvest(model, X, "0", to=to, batch_size=10)
    assert len(seen) == 4  # The trial of the first batch gives the rows of unit 0.
    assert torch.equal(store["0"][:], expected(model, 1, batch=10))
    seen.clear()
    hl.harvest(model, X, "0", to=to, batch_size=10)
    assert len(seen) == 1


@pytest.mark.parametrize("make", [lambda: X, lambda: iter(BATCHES), lambda: list(BATCHES)])
def test_every_batch_runs_once(make, to):
    model, seen = net(), []
    model[0].register_forward_pre_hook(lambda _module, args: seen.append(args[0].clone()))
    data = make()
    store = hl.harvest(model, data, "0", to=to, batch_size=7 if data is X else None)
    assert torch.equal(torch.cat(seen), X)
    assert torch.equal(store["0"][:], torch.cat([model[0](batch) for batch in list(seen)]))


def test_a_plan_that_was_looked_at_before_holds_no_rows_and_runs_the_first_batch_again(to):
    model, data, seen = net(), X.clone(), []
    model[0].register_forward_pre_hook(lambda *_: seen.append(1))
    plan = hl.Harvest(model, data, "0", to=to, batch_size=10)
    plan.estimate()
    data[:] = X.flip(0)  # The rows of the trial would be those of other data.
    store = plan.run()
    assert len(seen) == 1 + 5
    assert torch.equal(store["0"][:], expected(model, 1, batch=10).flip(0))


def test_an_iterator_goes_on_too_and_other_data_are_refused(to):
    model = net()

    def batches(last=X[21:]):
        yield from [*BATCHES[:3], last]

    plan = hl.Harvest(model, batches, "0", to=to, unit=1)
    assert plan.run_unit(0)
    assert plan.run_unit(2)
    other = [BATCHES[0] + 0, BATCHES[1], BATCHES[2] + 1, BATCHES[3]]
    with pytest.raises(hl.StoreError, match=says("batches to have changed", "2 to 2")):
        hl.harvest(model, iter(other), "0", to=to, unit=1)
    store = hl.harvest(model, batches(), "0", to=to)
    assert torch.equal(store["0"][:], torch.cat([expected(model, 1, batch, 99) for batch in BATCHES]))


@pytest.mark.parametrize(
    ("again", "problem"),
    [
        (
            lambda to: hl.harvest(changed(net()), X, "0", to=to, batch_size=8),
            says("holds another harvest", "model.weights"),
        ),
        (lambda to: hl.harvest(net(), X, "0", "1", to=to, batch_size=8), says("lacks what this run keeps", "'1'")),
        (lambda to: hl.harvest(net(), X, "1", to=to, batch_size=8), says("lacks what this run keeps", "'1'")),
        (lambda to: hl.harvest(net(), X + 1, "0", to=to, batch_size=8), says("holds another harvest", "data")),
        (lambda to: hl.harvest(net(), X[:49], "0", to=to, batch_size=8), says("holds another harvest", "data")),
        (lambda to: hl.harvest(net(), X, "0", to=to, batch_size=8, dtype=torch.float16), "float16"),
        (lambda to: hl.harvest(net(), X, "0", to=to, batch_size=8, transform=lambda value: value * 2), "transform"),
        (lambda to: hl.harvest(net(), X, "0", to=to, batch_size=8, unit=7), says("has units of")),
    ],
    ids=["weights", "more sites", "sites", "data", "fewer", "dtype", "transform", "unit"],
)  # fmt: skip
def test_going_on_with_something_else_is_refused_in_words(again, problem, to):
    hl.Harvest(net(), X, "0", to=to, batch_size=8, unit=16).run_unit(0)
    with pytest.raises(hl.StoreError, match=problem):
        again(to)


def test_a_store_is_appended_to(to):
    model, more = net(), torch.randn(11, 4)
    hl.harvest(model, X, "0", to=to, batch_size=8)
    store = hl.harvest(model, more, "0", to=to, batch_size=8, append=True)
    assert torch.equal(store["0"][:], torch.cat([expected(model, 1), expected(model, 1, more)]))
    with pytest.warns(hl.HooklineWarning, match=says("holds these data already")):
        again = hl.harvest(model, more, "0", to=to, batch_size=8, append=True)  # As after a crash: no duplicates.
    assert again["0"].shape == (61, 8)
    assert store["0"].samples[:].tolist() == list(range(61))


def test_the_estimate_says_rows_and_bytes_before_anything_is_written(to):
    plan = hl.Harvest(net(), X, "0", "1[:, 0]", to=to, batch_size=8, unit=16)
    told = plan.estimate()
    assert (told.samples, told.rows, told.bytes, told.units) == (50, 100, 50 * 8 * 4 + 50 * 4, 4)
    assert told.free > 0
    assert not to.exists()
    assert "50 samples, about 100 rows in 2 arrays, 1.8 kB" in str(told)


def test_what_can_not_fit_is_refused_before_it_starts(to):
    class Endless(Texts):
        def fingerprint(self) -> str:
            return "a great deal"

    with pytest.raises(hl.StoreError, match=says("has no room")):
        hl.harvest(Tagger().eval(), Endless(1 << 50), "mix", to=to, batch_size=4, rows="tokens")


def test_a_plan_can_be_pickled_and_its_weights_stay_behind_if_a_function_makes_them(to):
    data = pickle.dumps(hl.Harvest(net, X, "0", to=to, batch_size=8))
    assert len(data) < 4000
    assert pickle.loads(data).run()["0"].shape == (50, 8)
    plan = hl.Harvest(net(), X, "0", to=to, batch_size=8)
    plan.status()
    assert pickle.loads(pickle.dumps(plan)).status().done == 1


def test_other_batches_are_not_taken_for_those_of_a_finished_store(to):
    model = net()
    hl.harvest(model, X[:16].split(8), "0", to=to, unit=1)
    with pytest.raises(hl.StoreError, match=says("holds another harvest", "data")):
        hl.harvest(model, X.split(8), "0", to=to)
    with pytest.raises(hl.StoreError, match=says("batches to have changed", "1 to 1")):
        hl.harvest(model, [X[:8], X[16:24]], "0", to=to)
    with pytest.raises(hl.StoreError, match=says("batches to have changed", "1 to 1")):
        hl.harvest(model, [X[:8], X[16:24]], "0", to=to, append=True)
    assert len(hl.harvest(model, X[:16].split(8), "0", to=to)["0"]) == 16


def test_only_data_may_differ_in_what_is_appended(to):
    hl.harvest(net(), X, "0", to=to, batch_size=8)
    with pytest.raises(hl.StoreError, match=says("can't be appended to")):
        hl.harvest(net(), X[:9], "0", to=to, batch_size=8, append=True, transform=lambda value: value * 2)


def test_a_plan_looks_again_at_a_model_and_a_folder_that_changed(to):
    model = net()
    plan = hl.Harvest(model, X, "0", to=to, batch_size=8, unit=8)
    plan.run_unit(0)
    with torch.no_grad():
        model[0].weight.add_(1)
    with pytest.raises(hl.StoreError, match=says("holds another harvest", "model.weights")):
        plan.run()
    shutil.rmtree(to)
    assert torch.equal(plan.run()["0"][:], expected(model, 1))
    shutil.rmtree(to)
    assert len(plan.run()["0"]) == 50


def test_to_ask_for_the_status_begins_nothing(to):
    plan = hl.Harvest(net(), X, "0", to=to, batch_size=8, unit=10)
    assert str(plan.status()) == "0 of 5 units done, 0 rows"
    assert not to.exists()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"dtype": "bfloat17"}, says("is not a dtype did", "bfloat17", "bfloat16")),
        ({"transform": 3}, says("transform= is a function", 3)),
        ({"loss": "sum"}, says("loss= is a function")),
    ],
)
def test_options_are_checked_at_once(options, problem, to):
    with pytest.raises(hl.HooklineError, match=problem):
        hl.Harvest(net(), X, "0", to=to, batch_size=8, **options)


def test_a_dtype_may_be_given_by_its_name(to):
    assert hl.harvest(net(), X, "0", to=to, batch_size=8, dtype="bfloat16")["0"].dtype is torch.bfloat16


def test_a_plan_shows_what_it_is_of_and_stays_where_it_was_made(to, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan = hl.Harvest(net(), X, "0", to="here", batch_size=8)
    assert repr(plan).startswith("Harvest(Sequential, Tensor, '0', to=")
    (tmp_path / "else").mkdir()
    monkeypatch.chdir(tmp_path / "else")
    assert len(plan.run()["0"]) == 50
    assert (tmp_path / "here").exists()


def test_help_on_the_function_has_the_options():
    assert "sort_by_length:" in hl.harvest.__doc__


def test_what_has_no_room_leaves_nothing_that_another_call_would_have_to_be_like(to):
    class Huge(Texts):
        def fingerprint(self) -> str:
            return "a great deal"

    with pytest.raises(hl.StoreError, match=says("has no room")):
        hl.harvest(Tagger().eval(), Huge(1 << 50), "mix", to=to, batch_size=4, rows="tokens")
    assert not to.exists()


def test_a_harvest_takes_the_model_itself_as_a_place_beside_others(to):
    model = net()
    assert list(hl.harvest(model, X, model, "0", to=to, batch_size=25)) == ["0", ""]
