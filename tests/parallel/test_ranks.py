"""The rank of this process, and the ranks that run one model together."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import hookline as hl
from hookline import HooklineError
from hookline.parallel import gather as parallel
from hookline.parallel import ranks
from tests.errors.wording import says
from tests.support.parallel_models import HIDDEN, Net, batch, cut
from tests.support.ranks import on_two_ranks


@pytest.mark.parametrize(
    "told",
    [
        {"RANK": "1", "WORLD_SIZE": "4"},
        {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4"},
        {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"},
    ],
)
def test_a_launcher_tells_the_rank(told):
    assert ranks.rank_and_world(told) == (1, 4)


def test_without_a_launcher_there_is_one_process():
    assert ranks.rank_and_world({"RANK": "3"}) == (0, 1)


@pytest.mark.parametrize("told", [("4", "4"), ("-1", "4"), ("one", "4"), ("0", "0")])
def test_a_rank_that_can_not_be_is_refused(told):
    with pytest.raises(HooklineError, match=says("are not a rank and")):
        ranks.rank_and_world(dict(zip(("RANK", "WORLD_SIZE"), told, strict=True)))


def test_a_batch_script_of_slurm_is_one_process():
    assert ranks.rank_and_world({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}) == (0, 1)


def test_torch_distributed_goes_before_the_launcher(monkeypatch, tmp_path):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert ranks.rank_and_world() == (1, 4)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        assert ranks.rank_and_world() == (0, 1)
    finally:
        dist.destroy_process_group()


@pytest.mark.process
@on_two_ranks
def test_the_ranks_of_a_replica_are_found(rank: int) -> None:
    for shape, alike in (((1, 2), (0, 1)), ((2, 1), ())):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        model = Net()
        plan = {"h.*.mlp.up": ColwiseParallel(), "h.*.mlp.down": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)
        for block in model.h:
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        found = ranks.replica(model)
        assert found == ranks.Replica((0, 1), alike)
        assert found.is_first == (rank == 0)
        torch.manual_seed(0)
        x = batch()
        with torch.no_grad():
            _, acts = hl.run(model, x, capture=["h.0.mlp.up", "h.0"])
        assert type(acts["h.0.mlp.up"]) is Tensor
        assert acts["h.0.mlp.up"].shape == (2, 6, HIDDEN)
    assert ranks.replica(cut(Net())) == ranks.Replica((0, 1), (0, 1))


@pytest.mark.process
@on_two_ranks
def test_ranks_can_meet_and_agree(rank: int) -> None:
    for turn in range(3):
        assert ranks.meet((0, 1), f"{rank} at {turn}") == {0: f"0 at {turn}", 1: f"1 at {turn}"}
    torch.manual_seed(0)
    value = {"a": torch.randn(300, 40), "b": torch.arange(5), "c": (torch.tensor([True]), torch.empty(0), 3)}
    state = torch.get_rng_state()
    parallel.agree((0, 1), value, "'x'")
    parallel.agree((0, 1), {"a": value["a"] * (1 + 1e-4 * rank)}, "'x'")  # type: ignore[operator]
    parallel.agree((0, 1), torch.full((3,), float("nan")), "'x'")
    for other in (torch.randn(300, 40) if rank else value["a"], torch.ones(3) + rank, torch.eye(5)[[rank, 1]]):
        with pytest.raises(hl.HooklineError, match=says("not the same on ranks")):
            parallel.agree((0, 1), other, "'x'")
        torch.set_rng_state(state)
    large = torch.zeros(1 << 20, dtype=torch.bfloat16)
    large[rank :: 1 << 16] = 1  # Like a sparse activation: nearly equal on both ranks.
    with pytest.raises(hl.HooklineError, match=says("not the same on ranks")):
        parallel.agree((0, 1), large, "'x'")
    shown = (f"{rank + 1} tensors", f"rank {rank},", f"{2 - rank} on rank {1 - rank}")
    with pytest.raises(hl.HooklineError, match=says("tensors pass on rank", *shown)):
        parallel.agree((0, 1), [torch.zeros(1)] * (rank + 1), "'x'")


class Stage(nn.Module):
    """The first or the second half of a Net. The modules keep their names in the Net."""

    def __init__(self, net: Net, rank: int) -> None:
        super().__init__()
        half = len(net.h) // 2
        indices = range(half) if rank == 0 else range(half, 2 * half)
        self.h = nn.ModuleDict({str(index): net.h[index] for index in indices})
        self.register_module("head", net.head if rank else None)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.h.values():
            x = block(x)
        return x if self.head is None else self.head(x)


def steps(stage: Any, rank: int, x: Tensor) -> Callable[[], Any]:
    """Return a function that runs one step of a two-stage pipeline. On the last rank it returns the output."""
    from torch.distributed.pipelining import ScheduleGPipe

    schedule = ScheduleGPipe(stage, n_microbatches=2)
    return lambda: schedule.step(x) if rank == 0 else schedule.step()


@pytest.mark.process
@on_two_ranks
def test_a_stage_of_a_pipeline_passes_microbatches_and_its_rehearsal_is_not_seen(rank: int) -> None:
    from torch.distributed.pipelining import PipelineStage  # Imported only in the ranks' processes.

    net, x = Net(depth=4), batch(4)
    here, there = ("h.1", "h.2")[:: 1 if rank == 0 else -1]
    with torch.no_grad():
        _, expected = hl.run(net, x, capture=here)
        for inside in (False, True):  # True: the hooks are on a part of the stage.
            module = Stage(copy.deepcopy(net), rank)
            step = steps(PipelineStage(module, rank, 2, torch.device("cpu")), rank, x)
            hooked: nn.Module = module.h if inside else module
            site = here.removeprefix("h.") if inside else here
            all_calls, hooks = hl.Hooks(hooked), hl.Hooks(hooked)
            acts, last = all_calls.capture(site, keep="all"), hooks.capture(site + ".mlp")
            seen: list[Tensor] = []
            hooks.edit(site + ".norm", seen.append)
            before = 0 if inside else 1
            for _ in range(before):
                module(x[:2])  # Outside the pipeline. This shows the hooks that they act on this rank.
            for _ in range(2):
                step()
            assert [value.shape[0] for value in acts.calls(site)] == [2] * (before + 4)
            assert len(seen) == before + 4
            assert re.search(rf"mlp +{before + 4} ", repr(last))  # The number of calls.
            for first in (before, before + 2):
                torch.testing.assert_close(torch.cat(acts.calls(site)[first : first + 2]), expected[here])
            if not inside:
                with pytest.warns(hl.HooklineWarning, match=says("fired several times in one forward", "keep='all'")):
                    assert last[site + ".mlp"].shape[0] == 2
            hooks.remove()
            all_calls.remove()
        with pytest.raises(hl.SiteError, match=says("matches nothing in Stage", there)):
            hl.capture(module, there)
        if rank == 0:
            with pytest.raises(hl.SiteError, match=says("is None in this model", "head")):
                hl.capture(module, "head")


@pytest.mark.process
@on_two_ranks
def test_a_patch_in_one_stage_reaches_the_next(rank: int) -> None:
    from torch.distributed.pipelining import PipelineStage

    net, x = Net(depth=4), batch(4)
    module = Stage(copy.deepcopy(net), rank)
    step = steps(PipelineStage(module, rank, 2, torch.device("cpu")), rank, x)
    with torch.no_grad():
        expected = hl.run(net, x, patch={"h.0.mlp.up[..., 3]": 2.0})
        with hl.patch(module, {"h.0.mlp.up[..., 3]": 2.0}) if rank == 0 else nullcontext():
            output = step()
    if rank == 1:
        torch.testing.assert_close(output, expected)


@pytest.mark.process
@on_two_ranks
def test_a_stage_that_was_traced_is_hooked_by_the_names_of_the_model(rank: int) -> None:
    from torch.distributed.pipelining import SplitPoint, pipeline

    net, x = Net(depth=4), batch(4)
    here = ("h.1", "h.2")[rank]
    traced = pipeline(copy.deepcopy(net), mb_args=(x[:2],), split_spec={"h.2": SplitPoint.BEGINNING})
    stage = traced.build_stage(rank, torch.device("cpu"))
    step = steps(stage, rank, x)
    with torch.no_grad():
        _, expected = hl.run(net, x, capture=here)
        for _ in range(2):
            with hl.capture(stage.submod, here, keep="all") as acts:
                step()
            torch.testing.assert_close(torch.cat(acts.calls(here)), expected[here])
