"""The rank of this process, and the number of processes: from torch.distributed, or from the launcher."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from hookline import HooklineError
from hookline.parallel.ranks import ranks


@pytest.mark.parametrize(
    "told",
    [
        {"RANK": "1", "WORLD_SIZE": "4"},
        {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4"},
        {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"},
    ],
)
def test_a_launcher_tells_the_rank(told):
    assert ranks(told) == (1, 4)


def test_without_a_launcher_there_is_one_process():
    assert ranks({"RANK": "3"}) == (0, 1)


@pytest.mark.parametrize("told", [("4", "4"), ("-1", "4"), ("one", "4"), ("0", "0")])
def test_a_rank_that_can_not_be_is_refused(told):
    with pytest.raises(HooklineError, match="RANK=.* are not a rank and a number"):
        ranks(dict(zip(("RANK", "WORLD_SIZE"), told, strict=True)))


def test_a_batch_script_of_slurm_is_one_process():
    assert ranks({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}) == (0, 1)


def test_torch_distributed_goes_before_the_launcher(monkeypatch, tmp_path):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert ranks() == (1, 4)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        assert ranks() == (0, 1)
    finally:
        dist.destroy_process_group()
