"""A watch on models that several processes run: each process checks its own part, and waits for no other."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import hookline as hl
from tests.errors.wording import says
from tests.support.models import mlp
from tests.support.ranks import on_two_ranks

NAN = float("nan")


def train(model: nn.Module, rank: int):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.full((3, 4), rank + 1.0)
    with hl.watch(model, every=1) as watch:
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
    return watch


@pytest.mark.process
@on_two_ranks
def test_ddp_is_watched_on_each_rank_and_the_one_with_the_bad_value_raises(rank):
    model = DistributedDataParallel(mlp())
    watch = train(model, rank)
    assert watch.logged == [0, 1, 2]
    assert len(watch.log.calls('0["update"]')) == 3
    with torch.no_grad():
        if rank == 0:
            with hl.watch(model):
                model(torch.ones(3, 4))
        else:
            with pytest.raises(hl.BadValue, match=says("It came in with the arguments")):
                with hl.watch(model):
                    model(torch.ones(3, 4) * NAN)


@pytest.mark.process
@on_two_ranks
def test_fsdp_is_watched_in_its_parts(rank):
    model = mlp()
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    watch = train(model, rank)
    assert watch.logged == [0, 1, 2]
    assert {'0["rms"]', '0["gradient"]', '0["weight"]', '0["update"]'} <= set(watch.log)
    model[0].weight._local_tensor.fill_(NAN)
    with pytest.raises(hl.BadValue, match="'0' gave NaN") as raised:
        with hl.watch(model), torch.no_grad():
            model(torch.ones(3, 4))
    assert raised.value.function is None  # A second run would need the other processes.
