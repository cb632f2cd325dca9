"""On a CUDA device: how much memory captures hold, and when it is free again."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

import hookline as hl
from tests.support.gpu import DEVICE, about, held, wide_model

pytestmark = [
    pytest.mark.gpu,
    # Dynamo asks every tensor that enters a graph for its `.grad`.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
    # Torch records an empty graph to create the memory pool of others, and warms modules up on a separate stream.
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning"),
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match:UserWarning"),
]


@torch.no_grad()
def test_ten_captures_of_one_activation_hold_it_once() -> None:
    model, x = wide_model(*(nn.Identity() for _ in range(9)))
    before = held()
    with hl.capture(model, *(str(number) for number in range(10))) as acts:
        model(x)
    assert held() - before == about(16)
    del acts
    assert held() == before


@torch.no_grad()
def test_an_activation_that_is_overwritten_later_is_held_once() -> None:
    model, x = wide_model(nn.ReLU(inplace=True))
    before = held()
    with hl.capture(model, "0") as acts:
        model(x)
    assert acts["0"].min() < 0
    assert held() - before == about(16)


@torch.no_grad()
def test_a_part_holds_only_its_part() -> None:
    model, x = wide_model()
    before = held()
    with hl.capture(model, "0[:256]", "1:input[:, :256]") as acts:
        model(x)
    assert held() - before == about(5)
    assert acts["0[:256]"].shape == (256, 1024)


@torch.no_grad()
def test_what_is_kept_on_the_cpu_holds_nothing_on_the_device() -> None:
    model, x = wide_model()
    before = held()
    with hl.capture(model, "0", "1", device="cpu"):
        model(x)
    assert held() == before


@torch.no_grad()
def test_a_stop_computes_and_frees_the_rest() -> None:
    model, x = wide_model(*(nn.Linear(1024, 1024, bias=False) for _ in range(6)))
    before = held()
    torch.cuda.reset_peak_memory_stats()
    with hl.capture(model, "2", stop=True) as acts:
        assert model(x) is None
    assert held() - before == about(16)
    assert torch.cuda.max_memory_allocated() / 2**20 - before == about(32)
    assert acts["2"].shape == (4096, 1024)


def test_the_graph_is_not_held_and_the_model_is_freed_by_counting_alone() -> None:
    model, x = wide_model(nn.GELU(), nn.Linear(1024, 1024, bias=False))
    before = held()
    with hl.capture(model, "0", "0:grad_output") as acts:
        model(x).sum().backward()
    model.zero_grad(set_to_none=True)
    assert held() - before == about(32)
    gone = weakref.ref(model)
    del model
    assert gone() is None
    assert acts["0"].shape == acts["0:grad_output"].shape


def test_memory_that_came_in_from_outside_does_not_move() -> None:
    model = nn.Sequential(nn.Identity(), nn.Linear(1 << 10, 1 << 10, device=DEVICE), nn.Identity())
    x = torch.ones(1 << 10, 1 << 10, device=DEVICE)
    alias = torch.from_dlpack(torch.utils.dlpack.to_dlpack(x))
    before = x.data_ptr()
    with hl.capture(model, "0", "0:input", "1:input") as acts:
        model(x)
    x.add_(1)
    assert x.data_ptr() == before
    assert alias[0, 0] == 2
    assert all(acts[site][0, 0] == 1 for site in ("0", "0:input", "1:input"))


def test_what_the_forward_made_is_shared_there_too() -> None:
    model = nn.Sequential(nn.Linear(1 << 10, 1 << 10), nn.ReLU(), nn.Linear(1 << 10, 1 << 10)).to(DEVICE)
    x = torch.ones(2, 1 << 10, 1 << 10, device=DEVICE)
    for mode in (torch.enable_grad, torch.no_grad):
        with mode(), hl.capture(model, "*") as acts:
            model(x)
        shared = [torch._C._is_cow_tensor(acts[site]) for site in acts]
        assert shared == [True, True, True]
