"""Each run of a sweep begins in the state of the first one."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import hookline as hl
from tests.support.models import tokens
from tests.support.sweeps import total


class Model(nn.Module):
    """What it returns depends on its runs before: on an attribute, a list, a buffer or random numbers."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.norm, self.kind = nn.Linear(8, 8), nn.Linear(8, 8), nn.BatchNorm1d(5), kind
        self.seen: list[float] = []
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(float(x.sum()))
        self.norm(x)
        before = {
            "attribute": self.calls,
            "list": len(self.seen),
            "buffer": self.norm.running_var.mean() + int(self.norm.num_batches_tracked),
            "random": torch.rand(()),
        }
        return self.two(self.one(x) * before[self.kind])


@pytest.mark.parametrize("batch", [1, None])
@pytest.mark.parametrize("kind", ["attribute", "list", "buffer", "random"])
@pytest.mark.filterwarnings("ignore::hookline.HooklineWarning")
def test_attributes_buffers_and_random_numbers_are_put_back(kind, batch) -> None:
    model, x = Model(kind), tokens()
    fresh = copy.deepcopy(model)
    torch.manual_seed(3)
    found = hl.sweep(model, "one[:, *]", total, run=(x,), batch=batch)
    after = torch.rand(3)
    assert (model.calls, model.seen, int(model.norm.num_batches_tracked)) == (0, [], 0)
    assert torch.equal(model.norm.running_var, torch.ones(5))
    for site, value in found.items():
        torch.manual_seed(3)
        assert value == pytest.approx(total(hl.run(copy.deepcopy(fresh), x, patch={site: 0.0})).item(), rel=1e-4)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(3), after)


def test_hooks_that_are_attached_meanwhile_stay() -> None:
    model = Model("list").eval()
    with hl.capture(model, "two", keep="all") as acts:
        hl.sweep(model, "one[:, *]", total, run=(tokens(),), batch=1)
        during = len(acts.calls("two"))
        model(tokens())
    assert during > 2
    assert len(acts.calls("two")) == during + 1
    assert model.calls == 1
