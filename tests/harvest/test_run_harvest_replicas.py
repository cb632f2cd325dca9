"""Harvests of a model that two processes hold together: each row of the single-process model is stored once."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import hookline as hl
from hookline.parallel import ranks
from tests.errors.wording import says
from tests.support.parallel_models import HIDDEN, Net, cut
from tests.support.ranks import on_two_ranks


def folder() -> Path:
    """Return one folder, the same on both ranks."""
    told = ranks.meet((0, 1), tempfile.mkdtemp(), "a folder")
    return Path(told[0])


def together(said: str = "") -> None:
    """Wait for the other rank."""
    ranks.meet((0, 1), said, "the other rank")


def samples(number: int = 22) -> Tensor:
    return torch.randn(number, 6, 4, generator=torch.Generator().manual_seed(3))


def right(bare: nn.Module, site: str, x: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.cat([hl.run(bare, part, capture=site)[1][site] for part in x.split(2)])


def net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


SITES = ("h.0.mlp.up", "h.0.mlp.down", "h.1")


@pytest.mark.process
@on_two_ranks
def test_what_tensor_parallelism_cuts_is_stored_whole_and_once(rank: int) -> None:
    bare, to, x = net(), folder() / "acts", samples()
    store = hl.harvest(cut(bare), x, *SITES, to=to, batch_size=2, unit=4, rows="tokens")
    for site in SITES:
        assert torch.allclose(store[site][:], right(bare, site, x).flatten(0, 1), atol=1e-6)
    assert len(list(to.glob("data/*/*"))) == 3 * 6
    together()


@pytest.mark.process
@on_two_ranks
def test_a_part_is_stored_as_one_when_asked_and_no_sum_that_is_yet_to_be_made(rank: int) -> None:
    bare, to, x = net(), folder(), samples()
    store = hl.harvest(cut(bare), x, "h.0.mlp.up", to=to / str(rank), batch_size=2, unit=8, gather=False)
    half = slice(rank * HIDDEN // 2, (rank + 1) * HIDDEN // 2)
    assert torch.allclose(store["h.0.mlp.up"][:], right(bare, "h.0.mlp.up", x)[..., half], atol=1e-6)
    assert store.spec["part"]["rank"] == rank
    assert "Shard(dim=" in store.spec["part"]["placements"]["h.0.mlp.up"]
    with pytest.raises(hl.HooklineError, match=says("a sum that the ranks")):
        hl.harvest(cut(bare), x, "h.0.mlp.down", to=to / f"sum{rank}", batch_size=2, gather=False)
    together()


@pytest.mark.process
@on_two_ranks
def test_ranks_that_are_to_store_parts_in_one_place_are_refused(rank: int) -> None:
    to = folder() / "one"
    try:
        plan = hl.Harvest(cut(net()), samples(), "h.0.mlp.up", to=to, batch_size=2, gather=False)
        plan.pending()
        said = "begun"
    except hl.StoreError as error:
        said = str(error)
    heard = sorted(ranks.meet((0, 1), said, "what came of it").values())
    assert any("its part.rank is" in one for one in heard), heard


@pytest.mark.process
@on_two_ranks
def test_sharded_ranks_share_the_units_and_run_as_often_as_each_other(rank: int) -> None:
    bare, to, x = net(), folder() / "acts", samples()
    model = copy.deepcopy(bare)
    for block in model.h:
        fully_shard(block)
    fully_shard(model)
    counted: list[int] = []
    handle = model.h[0].register_forward_pre_hook(lambda *_: counted.append(1))
    store = hl.harvest(model, x, *SITES, to=to, batch_size=2, unit=4)
    handle.remove()
    for site in SITES:
        assert torch.allclose(store[site][:], right(bare, site, x), atol=1e-6)
    assert len(set(ranks.meet((0, 1), str(len(counted)), "the count").values())) == 1
    assert len(counted) < 11  # Fewer than all eleven batches, even with the trial of the first.
    store = hl.harvest(model, x, *SITES, to=to, batch_size=2)  # Nothing is left to do.
    assert len(store["h.1"]) == 22
    together()


@pytest.mark.process
@on_two_ranks
def test_sharded_weights_are_known_again_as_whole_ones(rank: int) -> None:
    bare, to, x = net(), folder() / "acts", samples()
    model = copy.deepcopy(bare)
    fully_shard(model)
    plan = hl.Harvest(model, x, "h.1", to=to, batch_size=2, unit=4)
    plan.run_unit(2)
    together()
    if rank == 0:
        store = hl.harvest(bare, x, "h.1", to=to, batch_size=2, share=False)
        assert torch.allclose(store["h.1"][:], right(bare, "h.1", x), atol=1e-6)
    together()


@pytest.mark.process
@on_two_ranks
def test_bad_samples_can_not_be_skipped_by_ranks_in_step(rank: int) -> None:
    with pytest.raises(hl.HooklineError, match=says("on_error= skip is not for")):
        hl.harvest(cut(net()), samples(), "h.1", to=folder() / "acts", batch_size=2, on_error="skip")
    together()


@pytest.mark.process
@on_two_ranks
def test_ranks_of_ddp_share_the_units_and_wait_for_nobody(rank: int) -> None:
    bare, to, x = net(), folder() / "acts", samples()
    model = DistributedDataParallel(copy.deepcopy(bare))
    store = hl.harvest(model, x, "h.1", to=to, batch_size=2, unit=2)
    assert torch.allclose(store["h.1"][:], right(bare, "h.1", x), atol=1e-6)
    together()


@pytest.mark.process
@on_two_ranks
def test_the_stages_of_a_pipeline_store_what_passes_in_each(rank: int) -> None:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe  # Imported only in the ranks' processes.

    bare, to, x = net(), folder(), samples(24)
    stage = nn.Sequential(bare.h[rank], *([bare.head] if rank else [])).eval()
    pipe = PipelineStage(stage, rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(pipe, n_microbatches=2)

    def step(_model: nn.Module, batch: Any) -> None:
        schedule.step(*([batch] if rank == 0 else []))

    store = hl.harvest(stage, x, "0", to=to / str(rank), batch_size=4, unit=8, call=step, calls="batch")
    assert torch.allclose(store["0"][:], right(bare, f"h.{rank}", x), atol=1e-6)
    together()
