"""A second run that finds the source of a bad value: with the same inputs and random numbers, and only on request."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hookline as hl
from hookline._watch.watch import Watcher
from tests.errors.wording import says
from tests.support.models import Gives, mlp
from tests.support.watch_models import INF, Bursts, X, bad, net


class TestWaiting:
    """The way a watch works on a GPU, tested on the CPU: values are recorded, and read together after the pass."""

    @pytest.fixture(autouse=True)
    def device(self, monkeypatch):
        monkeypatch.setattr(Watcher, "reads_later", lambda watcher, tensor: not watcher.at_once)

    def test_a_bad_forward_is_seen_again_with_all_that_went_in(self):
        with torch.no_grad():
            error = bad(net(), X)
        assert (str(error.site), str(error.function)) == ("root", "root/sqrt#0")
        assert list(error.inputs) == ['root:inputs["x"]']

    def test_a_bad_forward_before_a_backward_is_seen_after_it_and_before_the_optimizer(self):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(hl.BadValue) as raised:
            with hl.watch(model):
                for parameter in model.parameters():
                    parameter.data.abs_()
                model(X.abs()).sum().backward()
                optimizer.step()
                loss = model(-X.abs() * 9).sum()
                with pytest.raises(hl.BadValue):
                    loss.backward()
                loss = model(-X.abs() * 9).sum()
                loss.backward()
        assert (str(raised.value.function), raised.value.step, raised.value.forward) == ("root/sqrt#0", 1, 2)
        assert all(parameter.isfinite().all() for parameter in model.parameters())

    def test_a_second_run_draws_the_same_random_numbers_and_leaves_buffers_alone(self):
        class Chance(nn.Module):
            def forward(self, x):
                return x / (torch.rand(()) > 0.5)

        model, outcomes = nn.Sequential(nn.BatchNorm1d(4), Chance()), set()
        for seed in range(6):
            torch.manual_seed(seed)
            is_fine = bool(torch.rand(()) > 0.5)
            torch.manual_seed(seed)
            with torch.no_grad():
                if is_fine:
                    with hl.watch(model):
                        model(X)
                else:
                    error = bad(model, X)
                    assert (str(error.site), len(error.inputs)) == ("1", 1)
            outcomes.add(is_fine)
            assert model[0].num_batches_tracked == seed + 1
        assert outcomes == {True, False}

    def test_a_forward_that_no_backward_comes_after_is_read_when_the_next_begins(self):
        model = net()
        with pytest.raises(hl.BadValue) as raised:
            with hl.watch(model):
                model(X)
                model(X.abs())
        assert str(raised.value.function) == "root/sqrt#0"
        assert raised.value.forward == 0

    def test_without_a_second_run_the_place_is_told_and_how_to_see_more(self):
        with torch.no_grad():
            error = bad(net(), X, again=False)
        assert str(error).startswith("'root' gave NaN: float32 (3, 4); forward, step 0, call #0")
        assert "at_once=True" in str(error)
        assert list(error.inputs) == []

    def test_a_bad_gradient_is_the_first_in_the_order_of_the_backward(self):
        model = mlp()
        with pytest.raises(hl.BadValue, match=says("got NaN float32", "2:grad_output")):
            with hl.watch(model):
                (model(X) * 0).sqrt().sum().backward()

    def test_limits_and_allowed_infinities_hold(self):
        model = nn.Sequential(Gives(torch.tensor([1.0, -INF])), Gives(torch.tensor([50.0])))
        with torch.no_grad():
            with hl.watch(model, inf=False, limit=51):
                model(X)
            assert str(bad(model, X).site) == "0"
            assert str(bad(model, X, inf=False, limit=49).site) == "1"
            model = nn.Sequential(Gives(torch.tensor([50.0, -INF, INF])))
            assert str(bad(model, X, inf=False, limit=49).site) == "0"
            with hl.watch(model, inf=False, limit=51):
                model(X)

    def test_a_part_of_the_model_that_runs_alone_is_read_at_the_end(self):
        model = net()
        with pytest.raises(hl.BadValue, match="'root' gave NaN"):
            with hl.watch(model):
                model.root(X)

    def test_more_values_than_there_is_room_for_are_read_meanwhile(self):
        model = nn.Sequential(*(nn.Identity() for _ in range(1100)), net())  # There is room for about a thousand.
        with torch.no_grad():
            assert str(bad(model, X).function) == "1100.root/sqrt#0"
            model[1100] = mlp()
            with hl.watch(model):
                model(X)

    def test_statistics_are_the_same(self):
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with hl.watch(model, every=1) as watch:
            model(X).sum().backward()
            optimizer.step()
        assert {'0["rms"]', '0["gradient"]', '0["update"]'} <= set(watch.log)


def test_a_module_is_not_run_again_if_that_is_not_wanted():
    class Counts(nn.Module):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return x.log()

    model = nn.Sequential(Counts())
    assert str(bad(model, X, again=True).function) == "0/log#0"
    assert model[0].calls == 1  # The second run's changes to a module are undone.
    assert bad(model, X, again=False).function is None
    assert model[0].calls == 2


class Halved(nn.Module):
    """A module whose child produces Inf, which its own forward passes on. Its mask of -Inf is not a bad value."""

    def __init__(self):
        super().__init__()
        self.inner = Bursts()

    def forward(self, x):
        masked = x.masked_fill(x > 1, -INF).softmax(-1)
        return self.inner(x) + masked


def test_of_chosen_places_the_function_is_found_in_what_they_hold_and_no_mask_is_blamed():
    model = nn.Sequential(Halved(), Halved())
    with pytest.raises(hl.BadValue) as raised, hl.watch(model, "*"):
        model(torch.tensor([[1.0, 2.0], [3.0, 1.0]]))
    error = raised.value
    assert (str(error.site), str(error.function)) == ("0", "0.inner/div#0")
