"""Each run of a sweep begins in the state of the first one: see `_sweep/start_state.py`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import hookline as hl
from hookline._sweep.start_state import StartState


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.seen: list[float] = []
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(float(x.sum()))
        return self.norm(x)


def test_attributes_buffers_and_random_numbers_are_put_back() -> None:
    model = Model()
    start = StartState(model)
    assert not start.put_back()
    assert not start.are_buffers_written

    random = torch.get_rng_state()
    torch.rand(3)
    assert start.put_back()
    assert torch.get_rng_state().equal(random)

    model(torch.randn(2, 4))
    assert start.put_back()
    assert (model.calls, model.seen, int(model.norm.num_batches_tracked)) == (0, [], 0)
    assert torch.equal(model.norm.running_var, torch.ones(4))
    assert start.are_buffers_written
    assert not start.put_back()


def test_hooks_that_are_attached_meanwhile_stay() -> None:
    model = nn.Sequential(Model().eval(), nn.Linear(4, 4))
    start = StartState(model)
    with hl.capture(model, "*", keep="all") as acts:
        assert not start.put_back()
        model(torch.randn(2, 4))
        assert start.put_back()
        model(torch.randn(2, 4))
    assert len(acts.calls("1")) == 2
    assert model[0].calls == 1
