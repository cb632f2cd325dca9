from __future__ import annotations

import functools
import logging
import operator
import pickle
import re
import shutil
import threading
import time
import warnings
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import hookline as hl
from hookline._harvest import units, writing
from hookline._harvest.fingerprints import digest, function_text, model_digest
from hookline._store.writer import Unit
from tests.harvest import small

X = torch.randn(50, 4, generator=torch.Generator().manual_seed(1))
IDS = torch.randint(20, (6, 5), generator=torch.Generator().manual_seed(2))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval()


class Tagger(nn.Module):
    """A tiny model of token sequences, with the words of transformers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(20, 6)
        self.mix = nn.Linear(6, 6)

    def forward(self, input_ids, attention_mask=None):
        return {"logits": self.mix(self.embed(input_ids))}


class Texts:
    """Samples of several lengths, padded on one side."""

    def __init__(self, number: int = 23, left: bool = False) -> None:
        self.number, self.left = number, left

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> torch.Tensor:
        if not 0 <= index < self.number:
            raise IndexError(index)
        generator = torch.Generator().manual_seed(index)
        return torch.randint(0, 20, (int(torch.randint(1, 9, (1,), generator=generator)),), generator=generator)

    def collate(self, samples):
        ids = torch.zeros(len(samples), max(map(len, samples)), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, sample in enumerate(samples):
            place = slice(-len(sample), None) if self.left else slice(len(sample))
            ids[row, place], mask[row, place] = sample, 1
        return {"input_ids": ids, "attention_mask": mask}


def expected(model: nn.Sequential, layers: int, x: torch.Tensor = X, batch: int = 8) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([model[:layers](part) for part in x.split(batch)])


@pytest.fixture
def to(tmp_path):
    return tmp_path / "acts"


def test_rows_are_those_that_passed(to):
    model = net()
    store = hl.harvest(model, X, "0", "1", "2[:, 1]", "2:input", to=to, batch_size=8, unit=16)
    assert torch.equal(store["0"][:], expected(model, 1))
    assert torch.equal(store["2:input"][:], expected(model, 2))
    assert torch.equal(store["2[:, 1]"][:], expected(model, 3)[:, 1])
    assert torch.equal(store.rows("1", sample=17), expected(model, 2)[17:18])
    assert store["0"].samples[:].tolist() == list(range(50))


BATCHES = [X[:8], X[8:20], X[20:21], X[21:]]


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


@pytest.mark.parametrize(
    ("data", "options", "problem"),
    [
        (DataLoader(TensorDataset(X), batch_size=8, shuffle=True), {}, "the loader shuffles"),
        (
            DataLoader(TensorDataset(X), sampler=DistributedSampler(TensorDataset(X), 2, 0)),
            {},
            "DistributedSampler repeats samples",
        ),
        (DataLoader(TensorDataset(X), batch_size=4), {"batch_size": 2}, "batch_size=2, but .* makes batches of 4"),
        (DataLoader(TensorDataset(X), batch_size=4), {"batch_size": 0}, "batch_size=0, but .* makes batches of 4"),
        (X, {}, "give batch_size="),
        (iter([X]), {"batch_size": 4}, "has no length and index"),
        ([X], {"sort_by_length": True}, "give a dataset and batch_size="),
        (X, {"batch_size": 0}, "from 1 on"),
        (X[:0], {"batch_size": 4}, "no samples to harvest"),
        ([], {}, "no batches to harvest"),
        (iter([]), {}, "no batches to harvest"),
        (X, {"batch_size": 4, "rows": "token"}, 'rows= is "batch", "tokens"'),
        (X, {"batch_size": 4, "on_error": "ignore"}, "on_error= is one of 'raise', 'skip'"),
        (X, {"batch_size": 4, "calls": "all"}, "calls= is one of"),
        (X, {"batch_size": 4, "unit": 0}, "unit=0 is not a whole number from 1 on"),
        ({"a": X, "b": X[:3]}, {"batch_size": 4}, "'a' 50, 'b' 3"),
        ([torch.tensor(1.0)], {}, "with the samples in front"),
    ],
)  # fmt: skip
def test_what_can_not_be_harvested_is_refused_in_words(data, options, problem, to):
    with pytest.raises(hl.HooklineError, match=problem):
        hl.harvest(net(), data, "0", to=to, **options)
    assert not to.exists() or not list(to.iterdir())


def test_a_place_that_is_not_there_is_refused_before_anything_runs(to):
    with pytest.raises(hl.SiteError, match="did you mean"):
        hl.harvest(Tagger(), X, "mixx", to=to, batch_size=4)
    with pytest.raises(hl.SiteError, match="harvest what"):
        hl.harvest(net(), X, to=to, batch_size=4)


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("by_length", [False, True])
def test_tokens_are_rows_without_padding_in_the_order_of_the_samples(left, by_length, to):
    model, texts = Tagger().eval(), Texts(left=left)
    store = hl.harvest(model, texts, "embed", "mix", to=to, batch_size=4, unit=8, rows="tokens",
                       columns=["input_ids"], sort_by_length=by_length)  # fmt: skip
    samples = [texts[index] for index in range(len(texts))]
    assert torch.equal(store["input_ids"][:], torch.cat(samples))
    assert torch.equal(store["embed"][:], model.embed.weight.detach()[torch.cat(samples)])
    assert torch.equal(store.rows("input_ids", sample=9), samples[9])
    assert store["mix"].samples[:].tolist() == [index for index, one in enumerate(samples) for _ in one]
    assert store["mix"].positions[:].tolist() == [position for one in samples for position in range(len(one))]


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


def test_a_function_of_the_batch_may_choose_the_rows(to):
    model, texts = Tagger().eval(), Texts(left=True)
    store = hl.harvest(model, texts, "embed", to=to, batch_size=4, unit=8, columns=["input_ids"],
                       rows=lambda batch: (batch["input_ids"] % 3 == 1) & batch["attention_mask"].bool())  # fmt: skip
    chosen = [(texts[index] % 3 == 1).nonzero().flatten().tolist() for index in range(len(texts))]
    assert store["embed"].positions[:].tolist() == [position for one in chosen for position in one]
    assert store["embed"].samples[:].tolist() == [index for index, one in enumerate(chosen) for _ in one]
    assert bool((store["input_ids"][:] % 3 == 1).all())


def test_each_place_may_have_rows_of_its_own(to):
    model, texts = Tagger().eval(), Texts()
    rows = {"embed": "tokens", "input_ids": "tokens"}
    store = hl.harvest(model, texts, "embed", "mix[:, 0]", to=to, batch_size=4, rows=rows, columns=["input_ids"])
    assert len(store["mix[:, 0]"]) == len(texts)
    assert len(store["embed"]) == len(store["input_ids"]) == sum(len(texts[index]) for index in range(len(texts)))


def test_sequences_of_several_lengths_need_tokens_as_rows(to):
    with pytest.raises(hl.HooklineError, match='need rows="tokens"'):
        hl.harvest(Tagger().eval(), Texts(), "mix", to=to, batch_size=4)


def test_a_value_without_the_batch_in_front_is_refused(to):
    with pytest.raises(hl.HooklineError, match="the first dimension must be the batch"):
        hl.harvest(net(), X, "0", to=to, batch_size=8, transform=lambda value: value.T)
    with pytest.raises(
        hl.HooklineError, match=r"is dict of logits, no tensor; name the part to keep, '\[\"logits\"\]'"
    ):
        hl.harvest(Tagger().eval(), Texts(), "", to=to, batch_size=4)


def test_floats_are_cast_and_other_numbers_are_not(to):
    store = hl.harvest(Tagger().eval(), Texts(), "mix", to=to, batch_size=4, rows="tokens", dtype=torch.bfloat16,
                       columns=["input_ids"])  # fmt: skip
    assert (store["mix"].dtype, store["input_ids"].dtype) == (torch.bfloat16, torch.int64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float64])
def test_every_dtype_is_kept_to_the_bit(dtype, to):
    model = net()
    store = hl.harvest(model, X, "1", to=to, batch_size=8, dtype=dtype)
    assert torch.equal(store["1"][:].view(torch.uint8), expected(model, 2).to(dtype).view(torch.uint8))


def test_whole_numbers_and_truth_values_are_kept_too(to):
    model = net()
    store = hl.harvest(model, X, "1", to=to, batch_size=8, transform=lambda value: value > 0)
    assert torch.equal(store["1"][:], expected(model, 2) > 0)
    store = hl.harvest(model, X, "1", to=to / "b", batch_size=8, transform=lambda value: (value * 9).to(torch.int8))
    assert torch.equal(store["1"][:], (expected(model, 2) * 9).to(torch.int8))


def test_gradients_are_harvested_and_the_model_s_own_stay_as_they_were(to):
    model = net()
    before = torch.ones_like(model[0].weight)
    model[0].weight.grad = before
    store = hl.harvest(
        model, X, "0", "0:grad_output", to=to, batch_size=8, loss=lambda output, batch: output.pow(2).sum()
    )
    x = X.clone()
    hidden = model[0](x)
    hidden.retain_grad()
    model[1:](hidden).pow(2).sum().backward()
    assert torch.allclose(store["0:grad_output"][:], hidden.grad, atol=1e-6)
    model[0].weight.grad = before
    hl.harvest(model, X, "0:grad_output", to=to / "b", batch_size=8, loss=lambda output, batch: output.sum())
    assert model[0].weight.grad is before
    assert model[2].weight.grad is not None  # That of the lines above, not of the harvest.
    with pytest.raises(hl.HooklineError, match="gradients need a loss"):
        hl.harvest(model, X, "0:grad_output", to=to / "c", batch_size=8)
    with pytest.raises(hl.SiteError, match="before any gradient"):
        hl.harvest(
            model, X, "0:grad_output", to=to / "d", batch_size=8, stop=True, loss=lambda output, batch: output.sum()
        )


def test_nothing_after_the_last_place_is_computed(to):
    model, seen = net(), []
    model[2].register_forward_hook(lambda *_: seen.append(1))
    hl.harvest(model, X, "0", to=to, batch_size=10)
    assert len(seen) == 1  # The first batch is tried to its end, to see how often each place is called.
    hl.harvest(model, X, "0", to=to / "b", batch_size=10, stop=False)
    assert len(seen) == 1 + 1 + 5


def test_a_module_that_is_called_twice_is_no_row_twice(to):
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(4, 4)

        def forward(self, x):
            return self.one(self.one(x))

    model = Twice().eval()
    with pytest.raises(hl.HooklineError, match=r"'one' was called 2 times for one batch; name one, as in 'one#0'"):
        hl.harvest(model, X, "one", to=to, batch_size=8)
    store = hl.harvest(model, X, "one#1", to=to, batch_size=8)
    with torch.no_grad():
        assert torch.allclose(store["one#1"][:], model(X))
    with pytest.raises(hl.HooklineError, match=r"have shape \(8, 4\), without a sequence to join them along"):
        hl.harvest(model, X, "one", to=to / "b", batch_size=8, calls="sequence")
    x = X.reshape(10, 5, 4)
    store = hl.harvest(model, x, "one", to=to / "b", batch_size=8, calls="sequence")
    with torch.no_grad():
        once = model.one(x)
        assert torch.allclose(store["one"][:], torch.cat([once, model.one(once)], 1))


def test_a_call_may_give_the_batch_in_its_own_way(to):
    model, labels = net(), torch.arange(50)
    store = hl.harvest(model, TensorDataset(X, labels), "1", to=to, batch_size=8, columns={"label": lambda one: one[1]},
                       call=lambda model, batch: model(batch[0]))  # fmt: skip
    assert torch.equal(store["label"][:], labels)
    assert torch.equal(store["1"][:], expected(model, 2))


def test_the_model_is_left_as_it_was_and_so_are_random_numbers(to):
    model = net()
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    state = torch.get_rng_state()
    hl.harvest(model, X, "*", to=to, batch_size=8)
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    assert not len(hl.attached(model))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_model_in_training_is_warned_of(to):
    with pytest.warns(hl.HooklineWarning, match="training mode"):
        hl.harvest(net().train(), X, "0", to=to, batch_size=8)


class Broken:
    """A dataset of which one sample can't be loaded, and one is too much for the model."""

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 7:
            raise ValueError("no such picture")
        return torch.full((4,), float("inf") if index == 13 else float(index))


class Fussy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 2)

    def forward(self, x):
        if x.isinf().any():
            raise RuntimeError("too large")
        return self.one(x)


def test_a_bad_sample_is_raised_with_its_number(to):
    with pytest.raises(hl.BadSample, match="sample 7 failed: ValueError: no such picture"):
        hl.harvest(Fussy().eval(), Broken(), "one", to=to, batch_size=4, unit=8)


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_samples_are_skipped_and_listed_when_asked(workers, to):
    model = Fussy().eval()
    loader = DataLoader(Broken(), batch_size=4, num_workers=workers)
    store = hl.harvest(model, loader, "one", to=to, unit=8, on_error="skip")
    assert store.skipped.keys() == {7, 13}
    assert "no such picture" in store.skipped[7]
    assert "too large" in store.skipped[13]
    assert store["one"].samples[:].tolist() == [index for index in range(30) if index not in (7, 13)]
    with torch.no_grad():
        assert torch.allclose(store.rows("one", sample=20), model(torch.full((1, 4), 20.0)))


def test_bad_samples_in_batches_that_were_given_are_found_too(to):
    batches = [torch.zeros(4, 4), torch.full((4, 4), 2.0), torch.ones(3, 4)]
    batches[1][2] = float("inf")
    model = Fussy().eval()
    with pytest.raises(hl.BadSample, match="sample 6 failed: RuntimeError: too large"):
        hl.harvest(model, batches, "one", to=to)
    store = hl.harvest(model, batches, "one", to=to, on_error="skip")
    assert list(store.skipped) == [6]
    assert store["one"].samples[:].tolist() == [0, 1, 2, 3, 4, 5, 7, 8, 9, 10]


def test_samples_that_make_no_batch_say_so(to):
    with pytest.raises(hl.HooklineError, match="samples 0 to 3 don't go into one batch"):
        hl.harvest(net(), [torch.ones(3), torch.ones(4), torch.ones(5), torch.ones(6)], "0", to=to, batch_size=4)


def test_a_run_goes_on_where_it_was_and_ends_at_once_when_done(to):
    model, seen = net(), []
    model[0].register_forward_pre_hook(lambda _module, args: seen.append(len(args[0])))
    plan = hl.Harvest(model, X, "0", to=to, batch_size=10, unit=10)
    assert plan.run_unit(3)
    assert not plan.run_unit(3)
    assert (plan.status().done, plan.status().units, plan.status().rows) == (1, 5, 10)
    assert plan.pending() == [0, 1, 2, 4]
    with pytest.raises(hl.StoreError, match="1 of 5"):
        hl.Store(to)
    assert len(hl.Store(to, partial=True)["0"]) == 10
    seen.clear()
    store = hl.harvest(model, X, "0", to=to, batch_size=10)
    assert len(seen) == 1 + 4
    assert torch.equal(store["0"][:], expected(model, 1, batch=10))
    seen.clear()
    hl.harvest(model, X, "0", to=to, batch_size=10)
    assert len(seen) == 1


def test_an_iterator_goes_on_too_and_other_data_are_refused(to):
    model = net()

    def batches(last=X[21:]):
        yield from [*BATCHES[:3], last]

    plan = hl.Harvest(model, batches, "0", to=to, unit=1)
    assert plan.run_unit(0)
    assert plan.run_unit(2)
    other = [BATCHES[0] + 0, BATCHES[1], BATCHES[2] + 1, BATCHES[3]]
    with pytest.raises(hl.StoreError, match="batches 2 to 2 were others"):
        hl.harvest(model, iter(other), "0", to=to, unit=1)
    store = hl.harvest(model, batches(), "0", to=to)
    assert torch.equal(store["0"][:], torch.cat([expected(model, 1, batch, 99) for batch in BATCHES]))


def changed(model: nn.Sequential) -> nn.Sequential:
    with torch.no_grad():
        model[2].weight[1, 5] += 1e-3  # Not even one that the harvest sees.
    return model


@pytest.mark.parametrize(
    ("again", "problem"),
    [
        (lambda to: hl.harvest(changed(net()), X, "0", to=to, batch_size=8), "model.weights"),
        (lambda to: hl.harvest(net(), X, "0", "1", to=to, batch_size=8), "it has no '1'"),
        (lambda to: hl.harvest(net(), X, "1", to=to, batch_size=8), "it has no '1'"),
        (lambda to: hl.harvest(net(), X + 1, "0", to=to, batch_size=8), "data"),
        (lambda to: hl.harvest(net(), X[:49], "0", to=to, batch_size=8), "data"),
        (lambda to: hl.harvest(net(), X, "0", to=to, batch_size=8, dtype=torch.float16), "float16"),
        (lambda to: hl.harvest(net(), X, "0", to=to, batch_size=8, transform=lambda value: value * 2), "transform"),
        (lambda to: hl.harvest(net(), X, "0", to=to, batch_size=8, unit=7), "has units of"),
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
    with pytest.warns(hl.HooklineWarning, match="holds these data already, so append=True added nothing"):
        again = hl.harvest(model, more, "0", to=to, batch_size=8, append=True)  # As after a crash: nothing is doubled.
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

    with pytest.raises(hl.StoreError, match="has no room"):
        hl.harvest(Tagger().eval(), Endless(1 << 50), "mix", to=to, batch_size=4, rows="tokens")


def test_a_plan_can_be_pickled_and_its_weights_stay_behind_if_a_function_makes_them(to):
    data = pickle.dumps(hl.Harvest(net, X, "0", to=to, batch_size=8))
    assert len(data) < 4000
    assert pickle.loads(data).run()["0"].shape == (50, 8)
    plan = hl.Harvest(net(), X, "0", to=to, batch_size=8)
    plan.status()
    assert pickle.loads(pickle.dumps(plan)).status().done == 1


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

    with writing.Lanes(2, limit=100) as threads:
        for number in range(60):
            held[0] += 1
            threads.put(number, work, 30)
            most[0] = max(most[0], held[0])
        threads.finish()
    assert held[0] == 0
    assert most[0] <= 4


def test_a_lane_takes_what_is_larger_than_the_limit_alone():
    done = []
    with writing.Lanes(1, limit=10) as threads:
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


def test_a_model_is_known_by_every_bit_of_its_weights():
    model = nn.Sequential(OrderedDict(one=nn.Linear(100, 100), two=nn.BatchNorm1d(100)))
    before = model_digest(model)
    assert before == model_digest(model)
    with torch.no_grad():
        model.one.weight[41, 43] = torch.nextafter(model.one.weight[41, 43], torch.tensor(9.0))
    after = model_digest(model)
    assert after != before
    model.two.running_mean[3] += 1
    assert model_digest(model) != after
    assert model_digest(torch.compile(model)) ["weights"] == model_digest(model)["weights"]  # fmt: skip


def test_functions_are_known_by_their_code_and_what_they_close_over():
    def scaled(by):
        return lambda value: value * by

    assert function_text(scaled(2)) == function_text(scaled(2))
    assert function_text(scaled(2)) != function_text(scaled(3))
    assert function_text(lambda value: value + 1) != function_text(lambda value: value + 2)
    assert function_text(lambda value: value.abs()) != function_text(lambda value: value.neg())
    assert function_text(scaled(torch.ones(2))) != function_text(scaled(torch.zeros(2)))
    assert function_text("tokens") == "tokens"
    assert function_text(None) is None


def test_functions_are_known_by_the_functions_inside_them():
    one, other = (lambda value: (lambda x: x + 1)(value)), (lambda value: (lambda x: x + 2)(value))
    assert function_text(one) != function_text(other)


def test_a_function_is_known_again_in_another_process(tmp_path):
    (tmp_path / "kept.py").write_text(
        'def kept(value):\n    return value if "x" in {"a", "b", "c", "d", "e"} else -value\n'
    )
    code = "from kept import kept; from hookline._harvest.fingerprints import function_text; print(function_text(kept))"
    paths = f"{small.environment()['PYTHONPATH']}:{tmp_path}"
    found = {small.python("-c", code, PYTHONHASHSEED=seed, PYTHONPATH=paths) for seed in "12"}
    assert len(found) == 1


def test_data_are_known_by_all_that_is_in_them():
    assert digest({"a": [1, "x", torch.ones(2)]}) == digest({"a": [1, "x", torch.ones(2)]})
    assert digest({"a": [1, "x", torch.ones(2)]}) != digest({"a": [1, "y", torch.ones(2)]})
    assert digest([torch.ones(2), torch.ones(1)]) != digest([torch.ones(1), torch.ones(2)])
    assert digest(torch.ones(2)) != digest(torch.ones(2, dtype=torch.float64))
    assert digest(torch.ones(2), "before") != digest(torch.ones(2))


def slow_disk(monkeypatch) -> None:
    append = Unit.append
    monkeypatch.setattr(Unit, "append", lambda *args: (time.sleep(0.02), append(*args))[1])


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
    assert len(hl.harvest(model, refilled(), "1", to=to / "b")["1"]) == 50  # What was passed over was compared.


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


def test_other_batches_are_not_taken_for_those_of_a_finished_store(to):
    model = net()
    hl.harvest(model, X[:16].split(8), "0", to=to, unit=1)
    with pytest.raises(hl.StoreError, match="data"):
        hl.harvest(model, X.split(8), "0", to=to)
    with pytest.raises(hl.StoreError, match="batches 1 to 1 were others"):
        hl.harvest(model, [X[:8], X[16:24]], "0", to=to)
    with pytest.raises(hl.StoreError, match="batches 1 to 1 were others"):
        hl.harvest(model, [X[:8], X[16:24]], "0", to=to, append=True)
    assert len(hl.harvest(model, X[:16].split(8), "0", to=to)["0"]) == 16


def test_an_iterable_that_reads_on_is_refused(to):
    class Stream:
        def __init__(self) -> None:
            self.left = list(X.split(8))

        def __iter__(self):
            while self.left:
                yield self.left.pop(0)

    with pytest.raises(hl.HooklineError, match="give other batches each time"):
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
    with pytest.raises(hl.HooklineError, match="the loader shuffles"):
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
        with pytest.raises(hl.HooklineError, match="the first dimension must be the batch"):
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
    with pytest.warns(
        hl.HooklineWarning, match="numbered 0, 1, ... as they come.*harvest the dataset with batch_size="
    ):
        store = hl.harvest(model, loader, "0", to=to)
    assert store["0"].samples[:].tolist() == list(range(len(numbers)))
    assert torch.allclose(store["0"][:], expected(model, 1)[numbers], atol=1e-6)
    meant = hl.harvest(model, lambda: iter(loader), "0", to=to.with_name("meant"))
    assert torch.equal(meant["0"][:], store["0"][:])


def scaled(value, by=1, *, plus=0):
    return value * by + plus


class Scale(nn.Module):
    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.tensor(by))

    def forward(self, value):
        return value * self.by


class Held:
    def __init__(self, by: float) -> None:
        self.by = by

    def __call__(self, value):
        return value * self.by

    def method(self, value):
        return value * self.by


def closed(over):
    return lambda value: over(value)


@pytest.mark.parametrize(
    "made",
    [
        lambda by: functools.partial(scaled, by=by),
        lambda by: functools.partial(scaled, plus=by),
        Scale,
        Held,
        lambda by: Held(by).method,
        lambda by: closed(Scale(by)),
        lambda by: closed(functools.partial(scaled, by=by)),
        lambda by: lambda value, k=by: value * k,
        lambda by: lambda value, *, k=by: value * k,
    ],
    ids=["partial", "keyword", "module", "object", "method", "closure", "nested", "default", "keyword default"],
)
def test_a_function_with_other_values_is_another_one(made, to):
    assert function_text(made(2.0)) == function_text(made(2.0))
    assert function_text(made(2.0)) != function_text(made(3.0))
    hl.Harvest(net(), X, "0", to=to, batch_size=8, unit=8, transform=made(2.0)).run_unit(0)
    with pytest.raises(hl.StoreError, match="its transform is another"):
        hl.harvest(net(), X, "0", to=to, batch_size=8, transform=made(3.0))


def test_collate_is_known_again_too(to):
    def half(samples):
        return torch.stack(samples) / 2

    hl.Harvest(net(), X, "0", to=to, batch_size=8, unit=8).run_unit(0)
    with pytest.raises(hl.StoreError, match="collate"):
        hl.harvest(net(), X, "0", to=to, batch_size=8, collate=half)


def test_only_data_may_differ_in_what_is_appended(to):
    hl.harvest(net(), X, "0", to=to, batch_size=8)
    with pytest.raises(hl.StoreError, match="can't be appended to: its transform"):
        hl.harvest(net(), X[:9], "0", to=to, batch_size=8, append=True, transform=lambda value: value * 2)


def test_a_plan_looks_again_at_a_model_and_a_folder_that_changed(to):
    model = net()
    plan = hl.Harvest(model, X, "0", to=to, batch_size=8, unit=8)
    plan.run_unit(0)
    with torch.no_grad():
        model[0].weight.add_(1)
    with pytest.raises(hl.StoreError, match="model.weights"):
        plan.run()
    shutil.rmtree(to)
    assert torch.equal(plan.run()["0"][:], expected(model, 1))
    shutil.rmtree(to)
    assert len(plan.run()["0"]) == 50


def test_swapped_weights_and_other_layers_make_another_model():
    model = nn.Sequential(nn.Linear(128, 128), nn.ReLU())
    before = model_digest(model)
    with torch.no_grad():
        model[0].weight[:, [1, 2]] = model[0].weight[:, [2, 1]]
    assert model_digest(model) != before
    with torch.no_grad():
        model[0].weight[:, [1, 2]] = model[0].weight[:, [2, 1]]
    assert model_digest(model) == before
    assert model_digest(nn.Sequential(model[0], nn.GELU())) != before


def test_columns_may_be_functions_of_any_kind(to):
    data = [{"input": batch, "y": batch[:, 0].double()} for batch in X.split(8)]
    columns = {name: lambda batch, name=name: batch[name] for name in ("input", "y")}
    store = hl.harvest(net(), data, "0", to=to, columns={**columns, "again": operator.itemgetter("y")},
                       call=lambda model, batch: model(batch["input"]), dtype=torch.float16)  # fmt: skip
    assert torch.equal(store["y"][:], X[:, 0].double())  # Columns are not cast.
    assert torch.equal(store["again"][:], store["y"][:])
    assert store["0"].dtype is torch.float16


def test_a_mask_to_be_added_is_refused(to):
    batches = [
        {"input_ids": torch.ones(2, 3).long(), "attention_mask": torch.tensor([[0.0, 0.0, -1e9], [0.0, 0.0, 0.0]])}
    ]
    with pytest.raises(hl.HooklineError, match="attention_mask is one to be added"):
        hl.harvest(Tagger().eval(), batches, "mix", to=to, rows="tokens")


def test_one_position_of_each_sample_is_a_row_for_each_sample(to):
    ids = torch.randint(0, 20, (6, 6))
    store = hl.harvest(Tagger().eval(), {"input_ids": ids}, "mix", "mix[:, -1]", to=to, batch_size=3, rows="tokens")
    assert store["mix"].shape == (36, 6)
    assert torch.equal(store["mix[:, -1]"][:], store["mix"][:].view(6, 6, 6)[:, -1])


def test_a_parameter_is_no_sample(to):
    with pytest.raises(hl.HooklineError, match="has no samples"):
        hl.harvest(net(), X[:16], "0.weight:param", to=to, batch_size=8)


def test_empty_batches_are_passed_over(to):
    model = net()
    batches = [X[:4], X[:0], X[4:8]]
    plan = hl.Harvest(model, batches, "0", to=to, unit=1)
    plan.run_unit(1)
    assert torch.equal(plan.run()["0"][:], expected(model, 1, X[:8], 4))


@pytest.mark.parametrize("bad", [3, 33])
def test_a_bad_sample_is_found_in_the_first_batch_too(bad, to):
    model, ids = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 4)).eval(), torch.randint(50, (40, 5))
    ids[bad, 2] = 99
    with pytest.raises(hl.BadSample, match=f"sample {bad} failed: IndexError"):
        hl.harvest(model, ids, "1", to=to, batch_size=8)
    store = hl.harvest(model, ids, "1", to=to, batch_size=8, on_error="skip")
    assert list(store.skipped) == [bad]
    assert len(store["1"]) == 39


def test_a_batch_that_the_model_does_not_take_says_what_is_often_wrong(to):
    with pytest.raises(
        hl.HooklineError, match=r"failed on the first batch: TypeError.*was given as 2 arguments: call="
    ):
        hl.harvest(net(), DataLoader(TensorDataset(X, X), batch_size=7), "0", to=to)
    with pytest.raises(hl.HooklineError, match="data= is 'corpus.txt'; .*give hl.Texts"):
        hl.harvest(net(), "corpus.txt", "0", to=to)


def test_to_ask_for_the_status_begins_nothing(to):
    plan = hl.Harvest(net(), X, "0", to=to, batch_size=8, unit=10)
    assert str(plan.status()) == "0 of 5 units done, 0 rows"
    assert not to.exists()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"dtype": "bfloat17"}, "dtype='bfloat17' is not a dtype; did you mean .*'bfloat16'"),
        ({"transform": 3}, "transform= is a function, not 3"),
        ({"loss": "sum"}, "loss= is a function"),
    ],
)
def test_options_are_checked_at_once(options, problem, to):
    with pytest.raises(hl.HooklineError, match=problem):
        hl.Harvest(net(), X, "0", to=to, batch_size=8, **options)


def test_a_dtype_may_be_given_by_its_name(to):
    assert hl.harvest(net(), X, "0", to=to, batch_size=8, dtype="bfloat16")["0"].dtype is torch.bfloat16


class Endless(IterableDataset):
    """Batches of which nobody knows how many there are; its length is a guess, and wrong."""

    def __iter__(self):
        return iter(X[:40])

    def __len__(self) -> int:
        return 1000


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
    assert len(begun) == 2  # For the first batch, and for all.
    begun.clear()
    hl.harvest(net(), lambda: iter(Counted()), "0", to=to / "b")
    assert len(begun) == 2


def test_a_small_view_does_not_hold_what_it_is_of(to, monkeypatch):
    parts = []
    append = Unit.append
    monkeypatch.setattr(
        Unit,
        "append",
        lambda unit, array, rows: (parts.append(rows.untyped_storage().nbytes()), append(unit, array, rows)),
    )
    data = torch.randn(6, 1, 500, 4)
    model = nn.Sequential(nn.Linear(4, 4)).eval()
    hl.harvest(model, list(data), "0", to=to, transform=lambda value: value[:, -1])
    assert max(parts) <= 64


def test_a_vector_that_may_not_be_of_the_samples_is_not_cut(to):
    class Placed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(4, 4)

        def forward(self, x, places):
            if x.isinf().any():
                raise RuntimeError("too large")
            return self.one(x + places[:, None])

    batches = [{"x": torch.zeros(4, 4), "places": torch.arange(4.0)} for _ in range(3)]
    batches[1]["x"] = torch.tensor([[0.0] * 4, [float("inf")] * 4, [0.0] * 4, [0.0] * 4])
    store = hl.harvest(Placed().eval(), batches, "one", to=to, on_error="skip")
    assert list(store.skipped) == [4, 5, 6, 7]


class BothSides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(is_encoder_decoder=True)
        self.encoder = nn.Embedding(9, 3)
        self.decoder = nn.Embedding(9, 3)

    def forward(self, input_ids, attention_mask, decoder_input_ids, decoder_attention_mask):
        return self.encoder(input_ids).sum() + self.decoder(decoder_input_ids)


def test_a_column_is_masked_as_its_side_of_the_model(to):
    mask, other = torch.tensor([[1, 1, 0], [1, 0, 0]]), torch.tensor([[1, 1, 1], [1, 1, 0]])
    ids = torch.arange(6).view(2, 3)
    batch = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": ids, "decoder_attention_mask": other}
    store = hl.harvest(BothSides().eval(), [batch], "encoder", "decoder", to=to, rows="tokens",
                       columns=["input_ids", "decoder_input_ids"])  # fmt: skip
    assert store["input_ids"][:].tolist() == ids[mask.bool()].tolist()
    assert store["decoder_input_ids"][:].tolist() == ids[other.bool()].tolist()
    assert (len(store["encoder"]), len(store["decoder"])) == (3, 5)


def test_many_sites_do_not_use_up_the_files_of_a_process():
    import resource

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert units._most_open(1) == units.MOST_OPEN
    assert units._most_open(limit) == 1


def test_objects_are_known_by_what_is_in_them():
    assert digest(Path("a")) != digest(Path("b"))
    assert digest(SimpleNamespace(a=1)) != digest(SimpleNamespace(a=2))
    assert digest(Held(1.0)) == digest(Held(1.0))
    assert digest(Held(1.0)) != digest(Held(2.0))
    assert digest({"x", "y", "z"}) == digest({"z", "y", "x"})


def test_a_rule_is_asked_once_for_all_places_that_share_a_mask(to):
    asked = []

    def odd(batch):
        asked.append(1)
        return batch["input_ids"] % 2 == 1

    store = hl.harvest(Tagger().eval(), {"input_ids": torch.arange(12).view(4, 3)}, "embed", "mix", to=to, batch_size=4,
                       rows=odd)  # fmt: skip
    assert len(asked) == 2  # For the first batch, which is tried, and for the run.
    assert len(list(to.glob("data/positions/*"))) == 1
    assert store["mix"].positions[:].tolist() == [1, 0, 2, 1, 0, 2]


def test_a_name_wins_over_a_pattern(to):
    data = {"input_ids": torch.ones(4, 3).long()}
    store = hl.harvest(Tagger().eval(), data, "embed", "mix", to=to, batch_size=2, rows={"*": "tokens", "mix": "batch"})
    assert (len(store["embed"]), len(store["mix"])) == (12, 4)


def test_gradients_are_not_skipped(to):
    with pytest.raises(hl.HooklineError, match="is not for gradients"):
        hl.harvest(
            net(), X, "0:grad_output", to=to, batch_size=8, on_error="skip", loss=lambda output, _: output.mean()
        )


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


def test_a_plan_shows_what_it_is_of_and_stays_where_it_was_made(to, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan = hl.Harvest(net(), X, "0", to="here", batch_size=8)
    assert repr(plan).startswith("Harvest(Sequential, Tensor, '0', to=")
    (tmp_path / "else").mkdir()
    monkeypatch.chdir(tmp_path / "else")
    assert len(plan.run()["0"]) == 50
    assert (tmp_path / "here").exists()


def test_skipped_samples_count_as_passed(to, caplog):
    with caplog.at_level(logging.INFO, logger="hookline"):
        hl.harvest(Fussy().eval(), Broken(), "one", to=to, batch_size=4, on_error="skip")
    assert "30 of 30 samples" in caplog.text


def test_help_on_the_function_has_the_options():
    assert "sort_by_length:" in hl.harvest.__doc__


def test_a_batch_with_labels_is_cut_to_find_the_bad_sample(to):
    class Labelled(Fussy):
        def forward(self, x, labels):
            return super().forward(x)

    x = torch.zeros(6, 4)
    x[2] = float("inf")
    batches = [{"x": x, "labels": torch.arange(6)}]
    assert list(hl.harvest(Labelled().eval(), batches, "one", to=to, on_error="skip").skipped) == [2]


def test_sparse_and_nested_batches_go_in_but_sparse_values_are_refused(to):
    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(4, 2)

        def forward(self, edges, x):
            return self.one(edges @ x)

    batches = [{"edges": torch.eye(5).to_sparse(), "x": X[:5]}, {"edges": torch.eye(5).to_sparse(), "x": X[5:10]}]
    model = Graph().eval()
    store = hl.harvest(model, batches, "one", to=to)
    with torch.no_grad():
        assert torch.allclose(store["one"][:], model.one(X[:10]), atol=1e-6)
    with pytest.raises(hl.HooklineError, match="make it dense with transform="):
        hl.harvest(model, batches, "one", to=to / "b", transform=lambda value: value.to_sparse())
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    assert digest(nested) != digest(nested * 2)


class Sized:
    """Batches that say how many they are, and may be wrong."""

    def __init__(self, said: int) -> None:
        self.said = said

    def __len__(self) -> int:
        return self.said

    def __iter__(self):
        return iter(X.split(10))


@pytest.mark.parametrize(("said", "came"), [(4, "more than 4"), (7, "5")])
def test_data_with_a_wrong_length_are_refused(said, came, to):
    with pytest.raises(hl.HooklineError, match=rf"len\(\) of the data is {said}, but {came} batches came"):
        hl.harvest(net(), Sized(said), "0", to=to, unit=1)


class Unpicklable(Exception):
    def __reduce__(self):
        raise TypeError("no")


class Failing(Broken):
    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 7:
            raise Unpicklable("no such picture")
        return torch.ones(4)


def test_an_error_that_can_not_be_pickled_comes_from_a_loading_process(to):
    loader = DataLoader(Failing(), batch_size=4, num_workers=1)
    with pytest.raises(hl.BadSample, match="sample 7 failed: .*Unpicklable: no such picture"):
        hl.harvest(Fussy().eval(), loader, "one", to=to)


def test_what_has_no_room_leaves_nothing_that_another_call_would_have_to_be_like(to):
    class Huge(Texts):
        def fingerprint(self) -> str:
            return "a great deal"

    with pytest.raises(hl.StoreError, match="has no room"):
        hl.harvest(Tagger().eval(), Huge(1 << 50), "mix", to=to, batch_size=4, rows="tokens")
    assert not to.exists()


def test_units_of_one_plan_may_be_asked_for_by_several_threads(to):
    model = net()
    plan = hl.Harvest(model, X, "0", to=to, batch_size=5, unit=5)
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(plan.run_unit, plan.pending()))
    assert torch.equal(plan.run()["0"][:], expected(model, 1, batch=5))


def test_a_model_whose_weights_are_elsewhere_is_harvested_and_known_by_them(to):
    accelerate = pytest.importorskip("accelerate")

    def offloaded(model: nn.Module) -> nn.Module:
        return accelerate.cpu_offload(model, execution_device=torch.device("cpu"))

    store = hl.harvest(offloaded(net()), X, "0", "1", to=to, batch_size=8)
    assert torch.equal(store["1"][:], expected(net(), 2))
    assert len(hl.harvest(net(), X, "0", "1", to=to, batch_size=8)["1"]) == 50  # The same model, all of it here.
    with pytest.raises(hl.StoreError, match="model.weights"):
        hl.harvest(offloaded(changed(net())), X, "0", "1", to=to, batch_size=8)


def test_a_row_rule_for_a_place_that_is_not_kept_is_refused(to):
    model = Tagger().eval()
    with pytest.raises(hl.HooklineError, match="rows= names 'mix', which this harvest does not keep; it keeps 'embed'"):
        hl.harvest(model, IDS, "embed", to=to, batch_size=4, rows={"mix": "tokens"})
    with pytest.raises(hl.SiteError, match="'mux' matches nothing"):
        hl.harvest(model, IDS, "embed", to=to, batch_size=4, rows={"mux": "tokens"})
    store = hl.harvest(model, IDS, "embed", to=to, batch_size=4, rows={"*": "tokens", "side": "batch"},
                       columns={"side": lambda batch: batch})  # fmt: skip
    assert len(store["embed"]) == IDS.numel()


def test_a_loss_without_a_gradient_to_keep_is_refused(to):
    with pytest.raises(hl.HooklineError, match=r"loss= is for gradients, and none is kept; .*'0:grad_output'"):
        hl.harvest(net(), X, "0", to=to, batch_size=8, loss=lambda output, batch: output.sum())


def test_a_loss_may_be_a_function_of_the_output_alone(to):
    model = net()
    of_both = hl.harvest(model, X, "0:grad_output", to=to / "a", batch_size=8, loss=lambda output, batch: output.sum())
    alone = hl.harvest(model, X, "0:grad_output", to=to / "b", batch_size=8, loss=lambda output: output.sum())
    module = hl.harvest(model, X, "0:grad_output", to=to / "c", batch_size=8, loss=Sum())
    assert of_both["0:grad_output"][:].equal(alone["0:grad_output"][:])
    assert of_both["0:grad_output"][:].equal(module["0:grad_output"][:])


class Sum(nn.Module):
    """A loss that is a module, whose call takes anything."""

    def forward(self, output, _batch):
        return output.sum()


@pytest.mark.parametrize("column", [torch.arange(50), torch.arange(50).numpy(), list(range(50))])
def test_a_column_of_all_samples_is_refused_with_the_way_to_give_it(to, column):
    with pytest.raises(hl.HooklineError, match="column 'label' is .* an entry of the batch, or a function"):
        hl.harvest(net(), X, "0", to=to, batch_size=50, columns={"label": column})


def test_a_harvest_at_which_nothing_passes_keeps_nothing_and_says_so(to):
    model = nn.Sequential(OrderedDict(used=nn.Linear(4, 4), spare=nn.ModuleDict({"a": nn.ReLU()}))).eval()
    model.forward = model.used.forward
    with (
        pytest.warns(hl.HooklineWarning, match="'spare.a'"),
        pytest.raises(hl.NeverFired, match=r"nothing passed at any place of 'spare\.\*', so there is nothing to keep"),
    ):
        hl.harvest(model, X, "spare.*", to=to, batch_size=8)
    assert not to.exists()


def test_texts_and_names_in_the_wrong_place_are_told_where_they_go(to):
    with pytest.raises(hl.HooklineError, match="the samples are texts: .*give hl.Texts"):
        hl.harvest(Tagger().eval(), ["the cat", "sat"], "mix", to=to, batch_size=2)
    with pytest.raises(hl.HooklineError, match="harvest takes a model or a function that makes one, not str"):
        hl.harvest("gpt2", X, "0", to=to, batch_size=8)
    with pytest.raises(hl.HooklineError, match="unit='0' is not a whole number"):
        hl.Harvest(net(), X, "0", to=to, batch_size=8).run_unit("0")


@pytest.mark.parametrize("site", ["0[:, 20:]", "{0,1}[:, 20:]"])
def test_a_harvest_whose_subscripts_select_nothing_is_refused(to, site):
    with pytest.raises(hl.HooklineError, match=r"captured nothing: \[:, 20:\] selects nothing of float32 \(4, 8\)"):
        hl.harvest(net(), X, site, to=to, batch_size=4)


def test_rows_by_token_of_values_without_positions_are_refused(to):
    with pytest.raises(hl.HooklineError, match=r"'0' has shape \(4, 8\), .*nothing in the batch.*rows=\"batch\" keeps"):
        hl.harvest(net(), X, "0", to=to, batch_size=4, rows="tokens")


def test_one_number_for_each_token_is_kept_by_token(to):
    store = hl.harvest(Tagger().eval(), {"input_ids": IDS}, "mix", "mix[:, :, 0]", to=to, batch_size=3, rows="tokens",
                       transform=lambda value: value if value.dim() == 2 else value.norm(dim=-1))  # fmt: skip
    assert store["mix"].shape == store["mix[:, :, 0]"].shape == (30,)
    model = nn.Sequential(nn.Embedding(20, 1), nn.Flatten(1))
    store = hl.harvest(model.eval(), IDS, "1", to=to / "flat", batch_size=3, rows="tokens")
    assert store["1"].shape == (30,)


def test_a_list_of_single_samples_points_at_batch_size(to):
    square = nn.Sequential(nn.Linear(4, 4)).eval()
    with pytest.warns(hl.HooklineWarning, match=r"shape \(4,\), taken for 4 samples .*give batch_size="):
        hl.harvest(square, list(X[:3]), "0", to=to)
    with pytest.raises(hl.HooklineError, match=r"if the data are single samples, give batch_size="):
        hl.harvest(nn.Conv2d(3, 4, 3).eval(), list(torch.ones(2, 3, 8, 8)), "", to=to / "images")
    assert hl.harvest(square, list(X[:3]), "0", to=to / "right", batch_size=3)["0"].shape == (3, 4)


def test_a_harvest_takes_the_model_itself_as_a_place_beside_others(to):
    model = net()
    assert list(hl.harvest(model, X, model, "0", to=to, batch_size=25)) == ["0", ""]


def test_a_batch_that_is_too_short_for_the_positions_gives_no_rows_and_is_told_of_once(to):
    batches = [{"input_ids": IDS[:2]}, {"input_ids": IDS[2:4, :3]}, {"input_ids": IDS[4:, :2]}]
    with pytest.warns(hl.HooklineWarning, match=r"'mix\[:, 3:\]' captured nothing.*a batch without rows") as found:
        store = hl.harvest(Tagger().eval(), batches, "mix[:, 3:]", to=to, rows="tokens")
    assert len(found) == 1
    assert store.samples == 6
    assert store["mix[:, 3:]"].shape == (4, 6)
    with pytest.raises(hl.HooklineError, match=r"captured nothing: \[:, :, 7:\] selects nothing"):
        hl.harvest(Tagger().eval(), batches, "mix[:, :, 7:]", to=to / "features", rows="tokens")
    with pytest.raises(hl.HooklineError, match=r"captured nothing: \[:, 3:\] selects nothing"):
        hl.harvest(Tagger().eval(), batches, "mix[:, 3:]", to=to / "batch")
