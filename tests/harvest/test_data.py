"""The data that a harvest accepts: iterables, datasets, loaders, mappings."""

from __future__ import annotations

import time
import warnings
import weakref
import zlib

import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import hookline as hl
from tests.errors.wording import says
from tests.support.harvest_models import BATCHES, Broken, Endless, Fussy, Tagger, Texts, X, expected, net


@pytest.mark.parametrize(
    "data",
    [
        BATCHES,
        [(batch,) for batch in BATCHES],
        [{"input": batch} for batch in BATCHES],
        (batch for batch in BATCHES),
        lambda: iter(BATCHES),
    ],
    ids=["tensors", "tuples", "keywords", "generator", "function"],
)
def test_any_iterable_of_batches_will_do(data, to):
    model = net()
    store = hl.harvest(model, data, "1", to=to, unit=3)
    assert torch.equal(store["1"][:], torch.cat([expected(model, 2, batch, 99) for batch in BATCHES]))
    assert store.samples == 50


@pytest.mark.process
def test_a_loader_is_passed_over_as_its_dataset_and_its_workers_load(to):
    model = net()
    data = TensorDataset(X)
    store = hl.harvest(model, DataLoader(data, batch_size=8, num_workers=2), "1", to=to, unit=24)
    assert torch.equal(store["1"][:], expected(model, 2))


def test_a_loader_that_leaves_the_last_samples_out_does_so_here(to):
    store = hl.harvest(net(), DataLoader(TensorDataset(X), batch_size=8, drop_last=True), "1", to=to)
    assert len(store["1"]) == 48


def test_a_mapping_of_tensors_is_samples_too(to):
    model = Tagger().eval()
    ids = torch.randint(0, 20, (10, 5))
    store = hl.harvest(model, {"input_ids": ids}, "mix", to=to, batch_size=4)
    with torch.no_grad():
        assert torch.equal(store["mix"][:], torch.cat([model.mix(model.embed(part)) for part in ids.split(4)]))


def test_a_loader_takes_the_batch_size_that_it_has(to):
    store = hl.harvest(net(), DataLoader(TensorDataset(X), batch_size=8), "1", to=to, batch_size=8)
    assert len(store["1"]) == len(X)


def test_sorting_by_length_makes_batches_of_like_length(to):
    widths = []

    class Watched(Texts):
        def collate(self, samples):
            widths.append(max(map(len, samples)) - min(map(len, samples)))
            return super().collate(samples)

    hl.harvest(Tagger().eval(), Watched(64), "mix", to=to / "a", batch_size=8, unit=64, rows="tokens")
    plain, widths[:] = sum(widths), []
    hl.harvest(
        Tagger().eval(), Watched(64), "mix", to=to / "b", batch_size=8, unit=64, rows="tokens", sort_by_length=True
    )
    assert sum(widths) < plain / 2


def slow_disk(monkeypatch) -> None:
    """Writing takes long: a store has a checksum of all that is written."""
    crc32 = zlib.crc32
    monkeypatch.setattr(zlib, "crc32", lambda *args: (time.sleep(0.02), crc32(*args))[1])


def test_memory_that_is_used_again_is_not_what_is_written(to, monkeypatch):
    slow_disk(monkeypatch)
    model, buffer, doubled = net(), torch.empty(5, 4), torch.empty(5, 8)

    def refilled():
        for batch in X.split(5):
            yield {"input": buffer.copy_(batch)}

    store = hl.harvest(model, refilled(), "0", to=to, unit=2, columns={"x": lambda batch: batch["input"]},
                       transform=lambda value: torch.mul(value, 2, out=doubled))  # fmt: skip
    assert torch.equal(store["x"][:], X)
    assert torch.equal(store["0"][:], expected(model, 1, batch=5) * 2)
    plan = hl.Harvest(model, refilled, "1", to=to / "b", unit=2)
    plan.run_unit(0)
    plan.run_unit(3)
    assert len(hl.harvest(model, refilled(), "1", to=to / "b")["1"]) == 50  # The skipped batches were compared.


@pytest.mark.parametrize("batches", [list(X.split(8)), iter(X.split(8)), X], ids=["list", "iterator", "samples"])
def test_a_model_may_write_into_its_input(batches, to):
    class Greedy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.one = nn.Linear(4, 4)

        def forward(self, x):
            return self.one(x.add_(1))

    model = Greedy().eval()
    size = 8 if isinstance(batches, torch.Tensor) else None
    store = hl.harvest(model, batches, "one", to=to, batch_size=size, columns={"x": lambda batch: batch})
    with torch.no_grad():
        assert torch.allclose(store["one"][:], model.one(X + 1), atol=1e-6)
    assert torch.equal(store["x"][:], X)


def test_an_iterable_that_reads_on_is_refused(to):
    class Stream:
        def __init__(self) -> None:
            self.left = list(X.split(8))

        def __iter__(self):
            while self.left:
                yield self.left.pop(0)

    with pytest.raises(hl.HooklineError, match=says("give other batches each time")):
        hl.harvest(net(), Stream(), "0", to=to)
    assert len(hl.harvest(net(), iter(Stream()), "0", to=to)["0"]) == 50


@pytest.mark.parametrize(
    "options",
    [
        {"batch_sampler": BatchSampler(RandomSampler(range(50)), 4, False)},
        {"sampler": SubsetRandomSampler(range(40)), "batch_size": 8},
        {"sampler": WeightedRandomSampler([1.0] * 50, 50), "batch_size": 8},
    ],
    ids=["batch sampler", "subset", "weighted"],
)
def test_every_loader_that_shuffles_is_refused(options, to):
    with pytest.raises(hl.HooklineError, match=says("the loader shuffles")):
        hl.harvest(net(), DataLoader(TensorDataset(X), **options), "0", to=to)


@pytest.mark.parametrize(
    ("options", "numbers"),
    [
        ({"batch_sampler": [[0, 1], [2, 3, 4]]}, [0, 1, 2, 3, 4]),
        ({"sampler": SequentialSampler(range(10)), "batch_size": 4}, list(range(10))),
        ({"sampler": range(9), "batch_size": 4}, list(range(9))),
        ({"batch_size": None}, []),
    ],
    ids=["batches", "sampler", "range", "none"],
)
def test_a_loader_with_samples_of_its_own_choice_gives_those(options, numbers, to):
    model = net()
    loader = DataLoader(TensorDataset(X), **options)
    if not numbers:
        with pytest.raises(hl.HooklineError, match=says("if the data are single")):
            hl.harvest(model, loader, "0", to=to)
        return
    assert torch.allclose(hl.harvest(model, loader, "0", to=to)["0"][:], expected(model, 1)[numbers], atol=1e-6)


class Backwards(Sampler):
    def __iter__(self):
        return iter([[49, 48], [47]])


@pytest.mark.parametrize(
    ("options", "numbers"),
    [
        ({"sampler": [5, 4, 3], "batch_size": 2}, [5, 4, 3]),
        ({"batch_sampler": BatchSampler([5, 6, 7, 8], 2, False)}, [5, 6, 7, 8]),
        ({"batch_sampler": [[0, 2], [1]]}, [0, 2, 1]),
        ({"batch_sampler": Backwards()}, [49, 48, 47]),
    ],
    ids=["sampler", "batch sampler", "batches", "own class"],
)
def test_a_loader_with_an_order_of_its_own_says_what_the_numbers_of_samples_mean(options, numbers, to):
    model = net()
    loader = DataLoader(TensorDataset(X), **options)
    with pytest.warns(hl.HooklineWarning, match=says("as they come", 0, 1)):
        store = hl.harvest(model, loader, "0", to=to)
    assert store["0"].samples[:].tolist() == list(range(len(numbers)))
    assert torch.allclose(store["0"][:], expected(model, 1)[numbers], atol=1e-6)
    meant = hl.harvest(model, lambda: iter(loader), "0", to=to.with_name("meant"))
    assert torch.equal(meant["0"][:], store["0"][:])


def test_collate_is_known_again_too(to):
    def half(samples):
        return torch.stack(samples) / 2

    hl.Harvest(net(), X, "0", to=to, batch_size=8, unit=8).run_unit(0)
    with pytest.raises(hl.StoreError, match=says("holds another harvest")):
        hl.harvest(net(), X, "0", to=to, batch_size=8, collate=half)


def test_empty_batches_are_passed_over(to):
    model = net()
    batches = [X[:4], X[:0], X[4:8]]
    plan = hl.Harvest(model, batches, "0", to=to, unit=1)
    plan.run_unit(1)
    assert torch.equal(plan.run()["0"][:], expected(model, 1, X[:8], 4))


def test_a_loader_that_only_guesses_its_length_is_passed_over_to_its_end(to):
    model = net()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        store = hl.harvest(model, DataLoader(Endless(), batch_size=8), "0", to=to, unit=2)
    assert torch.equal(store["0"][:], expected(model, 1, X[:40]))


def test_data_are_passed_over_no_more_often_than_needed(to):
    begun = []

    class Counted:
        def __iter__(self):
            begun.append(1)
            return iter(X.split(8))

    hl.harvest(net(), Counted(), "0", to=to / "a")
    assert len(begun) == 2  # Once for the first batch, and once for the whole run.
    begun.clear()
    hl.harvest(net(), lambda: iter(Counted()), "0", to=to / "b")
    assert len(begun) == 2


def test_a_small_view_does_not_hold_what_it_is_of(to, monkeypatch):
    slow_disk(monkeypatch)
    values, alive = [], []

    def last(value):
        alive.append(sum(one() is not None for one in values))
        values.append(weakref.ref(value.untyped_storage()))
        return value[:, -1]

    model = nn.Sequential(nn.Linear(4, 4)).eval()
    hl.harvest(model, list(torch.randn(12, 1, 500, 4)), "0", to=to, transform=last)
    assert len(alive) >= 12
    assert max(alive) <= 2


def test_what_loads_is_let_go_when_the_run_ends(to):
    ended = []

    def batches():
        try:
            yield from X.split(8)
        finally:
            ended.append(1)

    def stop(*_):
        raise KeyboardInterrupt

    model = net()
    hl.Harvest(model, batches, "0", to=to).estimate()
    with pytest.raises(KeyboardInterrupt):
        plan = hl.Harvest(model, batches, "0", to=to)
        plan.estimate()
        ended.clear()
        model[0].register_forward_pre_hook(stop)
        plan.run()
    assert ended


class Sized:
    """Batches with a stated number, which may be wrong."""

    def __init__(self, said: int) -> None:
        self.said = said

    def __len__(self) -> int:
        return self.said

    def __iter__(self):
        return iter(X.split(10))


@pytest.mark.parametrize(("said", "came"), [(4, "more than 4"), (7, "5")])
def test_data_with_a_wrong_length_are_refused(said, came, to):
    with pytest.raises(hl.HooklineError, match=says("len() of the data is", said, came)):
        hl.harvest(net(), Sized(said), "0", to=to, unit=1)


class Unpicklable(Exception):
    def __reduce__(self):
        raise TypeError("no")


class Failing(Broken):
    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 7:
            raise Unpicklable("no such picture")
        return torch.ones(4)


@pytest.mark.process
def test_an_error_that_can_not_be_pickled_comes_from_a_loading_process(to):
    loader = DataLoader(Failing(), batch_size=4, num_workers=1)
    with pytest.raises(hl.BadSample, match=says("sample failed Unpicklable no such picture", 7)):
        hl.harvest(Fussy().eval(), loader, "one", to=to)


def test_texts_and_names_in_the_wrong_place_are_told_where_they_go(to):
    with pytest.raises(hl.HooklineError, match=says("the samples are texts")):
        hl.harvest(Tagger().eval(), ["the cat", "sat"], "mix", to=to, batch_size=2)
    with pytest.raises(hl.HooklineError, match=says("harvest takes a model or")):
        hl.harvest("gpt2", X, "0", to=to, batch_size=8)
    with pytest.raises(hl.HooklineError, match=says("is not a whole number", "0")):
        hl.Harvest(net(), X, "0", to=to, batch_size=8).run_unit("0")


def test_a_list_of_single_samples_points_at_batch_size(to):
    square = nn.Sequential(nn.Linear(4, 4)).eval()
    with pytest.warns(hl.HooklineWarning, match=says("shape taken for samples give", "(4,)", 4)):
        hl.harvest(square, list(X[:3]), "0", to=to)
    with pytest.raises(hl.HooklineError, match=says("if the data are single")):
        hl.harvest(nn.Conv2d(3, 4, 3).eval(), list(torch.ones(2, 3, 8, 8)), "", to=to / "images")
    assert hl.harvest(square, list(X[:3]), "0", to=to / "right", batch_size=3)["0"].shape == (3, 4)
