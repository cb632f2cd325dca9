"""A sample that fails raises an error with its number, or is skipped and listed."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn
from torch.utils.data import (
    DataLoader,
    TensorDataset,
)

import hookline as hl
from tests.errors.wording import says
from tests.support.harvest_models import Broken, Fussy, X, net


def test_a_bad_sample_is_raised_with_its_number(to):
    with pytest.raises(hl.BadSample, match=says("no such picture", 7)):
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
    with pytest.raises(hl.BadSample, match=says("sample failed RuntimeError too large", 6)):
        hl.harvest(model, batches, "one", to=to)
    store = hl.harvest(model, batches, "one", to=to, on_error="skip")
    assert list(store.skipped) == [6]
    assert store["one"].samples[:].tolist() == [0, 1, 2, 3, 4, 5, 7, 8, 9, 10]


def test_samples_that_make_no_batch_say_so(to):
    with pytest.raises(hl.HooklineError, match=says("samples to don't go into one batch", 0, 3)):
        hl.harvest(net(), [torch.ones(3), torch.ones(4), torch.ones(5), torch.ones(6)], "0", to=to, batch_size=4)


@pytest.mark.parametrize("bad", [3, 33])
def test_a_bad_sample_is_found_in_the_first_batch_too(bad, to):
    model, ids = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 4)).eval(), torch.randint(50, (40, 5))
    ids[bad, 2] = 99
    with pytest.raises(hl.BadSample, match=says("sample failed IndexError", bad)):
        hl.harvest(model, ids, "1", to=to, batch_size=8)
    store = hl.harvest(model, ids, "1", to=to, batch_size=8, on_error="skip")
    assert list(store.skipped) == [bad]
    assert len(store["1"]) == 39


def test_a_batch_that_the_model_does_not_take_says_what_is_often_wrong(to):
    with pytest.raises(hl.HooklineError, match=says("failed on the first batch", 2)):
        hl.harvest(net(), DataLoader(TensorDataset(X, X), batch_size=7), "0", to=to)
    with pytest.raises(hl.HooklineError, match=says("data= is give hl Texts", "corpus.txt")):
        hl.harvest(net(), "corpus.txt", "0", to=to)


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


def test_gradients_are_not_skipped(to):
    with pytest.raises(hl.HooklineError, match=says("is not for gradients")):
        hl.harvest(
            net(), X, "0:grad_output", to=to, batch_size=8, on_error="skip", loss=lambda output, _: output.mean()
        )


def test_skipped_samples_count_as_passed(to, caplog):
    with caplog.at_level(logging.INFO, logger="hookline"):
        hl.harvest(Fussy().eval(), Broken(), "one", to=to, batch_size=4, on_error="skip")
    assert "30 of 30 samples" in caplog.text


def test_a_batch_with_labels_is_cut_to_find_the_bad_sample(to):
    class Labelled(Fussy):
        def forward(self, x, labels):
            return super().forward(x)

    x = torch.zeros(6, 4)
    x[2] = float("inf")
    batches = [{"x": x, "labels": torch.arange(6)}]
    assert list(hl.harvest(Labelled().eval(), batches, "one", to=to, on_error="skip").skipped) == [2]
