"""Models spread over devices and processes: DataParallel, DDP, FSDP, tensor parallelism, accelerate."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp, tensor
from torch.nn.parallel import DataParallel, DistributedDataParallel

import hookline as hl
from tests.support.models import GPT, Block, mlp, tokens
from tests.support.ranks import on_two_ranks
from tests.support.states import state_of

HAS_FSDP2 = hasattr(fsdp, "fully_shard")
NO_SHARDING = pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`:UserWarning")
# FSDP1 causes this warning after any forward that did not run to its end.
AFTER_A_STOP = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
VIEWS = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning")
EVERYWHERE = ("h.*", "h.*.mlp", "h.1:input", "head", "h.*:grad_output")


def values_of(model: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
    with hl.capture(model, *EVERYWHERE) as acts:
        output = model(x)
        output.sum().backward()
    return output, dict(acts)


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert list(found) == list(expected)
    for site, value in expected.items():
        assert torch.equal(found[site], value), site


def assert_changes_alike(model: nn.Module, bare: nn.Module, x: Tensor) -> None:
    """Check that the outputs of both models stay equal under the same changes."""
    ways: list[Callable[[nn.Module], hl.Hooks]] = [
        lambda target: hl.patch(target, {"h.1": 0.0}),
        lambda target: hl.edit(target, "h.*.mlp", lambda value: value * 2),
        lambda target: hl.skip(target, "h.1"),
    ]
    for way in ways:
        with way(model), way(bare):
            assert torch.equal(model(x), bare(x))
    stopped, acts = hl.run(model, x, capture="h.1", stop=True)
    assert stopped is None
    assert torch.equal(acts["h.1"], hl.run(bare, x, capture="h.1")[1]["h.1"])
    assert torch.equal(model(x), bare(x))


def test_data_parallel_on_one_device_answers_to_the_names_of_the_model_inside() -> None:
    """E12"""
    bare, x = GPT(depth=2), tokens()
    model = DataParallel(copy.deepcopy(bare))
    expected = values_of(bare, x)[1]
    assert_same(values_of(model, x)[1], expected)
    assert "h.1" in hl.run(model, x, capture="module.h.1")[1]
    assert_changes_alike(model, bare, x)


def test_data_parallel_on_several_devices_is_refused_with_what_to_use_instead() -> None:
    """E12: DataParallel's replicas are shallow copies that run on other threads."""
    model = DataParallel(GPT(depth=2))
    model.device_ids = [0, 1]
    for where in ("h.1", "module.h.1", "**"):
        with pytest.raises(hl.HooklineError, match="DataParallel.*DistributedDataParallel"):
            hl.capture(model, where)


@pytest.mark.usefixtures("one_process")
def test_ddp_is_seen_through_and_its_gradients_are_those_of_the_bare_model() -> None:
    """E13"""
    bare, x = GPT(depth=2), tokens()
    model = DistributedDataParallel(copy.deepcopy(bare))
    before = state_of(model)
    output, expected = values_of(bare, x)
    found_output, found = values_of(model, x)
    assert torch.equal(found_output, output)
    assert_same(found, expected)
    model.zero_grad()
    assert [key for key in state_of(model) if "forward" in key] == [key for key in before if "forward" in key]
    assert_changes_alike(model, bare, x)
    with hl.capture(model, "module.head", model.module.h[1].mlp) as acts:
        model(x)
    assert list(acts) == ["h.1.mlp", "head"]


@NO_SHARDING
@AFTER_A_STOP
@pytest.mark.skipif(not HAS_FSDP2, reason="needs torch 2.6: older FSDP1 fails after a forward that did not end")
@pytest.mark.usefixtures("one_process")
def test_fsdp1_is_seen_through_and_keeps_its_own_hooks() -> None:
    """E13"""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    bare, x = GPT(depth=2), tokens()
    device = torch.device("cpu")
    model = FullyShardedDataParallel(
        copy.deepcopy(bare), device_id=device, auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True
    )
    _, expected = values_of(bare, x)
    model(x)
    hooks = [list(module._forward_hooks) + list(module._forward_pre_hooks) for module in model.modules()]
    assert_same(values_of(model, x)[1], expected)
    assert hooks == [list(module._forward_hooks) + list(module._forward_pre_hooks) for module in model.modules()]
    assert_changes_alike(model, bare, x)


@VIEWS
@pytest.mark.skipif(not HAS_FSDP2, reason="needs torch 2.6, which brought torch.distributed.fsdp.fully_shard")
@pytest.mark.usefixtures("one_process")
def test_fsdp2_gathers_and_shards_around_our_values_as_without_us() -> None:
    """E13"""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    bare, x = GPT(depth=2), tokens()
    model = copy.deepcopy(bare)
    for block in model.h:
        fully_shard(block)
    fully_shard(model)
    output, expected = values_of(bare, x)
    found_output, found = values_of(model, x)
    assert torch.equal(found_output, output)
    assert_same(found, expected)
    assert not any(isinstance(value, DTensor) for value in found.values())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad.full_tensor(), bare.get_parameter(name).grad)
    assert_changes_alike(model, bare, x)
    model(x).sum().backward()
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())


@pytest.mark.skipif(not hasattr(tensor, "DTensor"), reason="needs torch 2.5, for torch.distributed.tensor")
@pytest.mark.usefixtures("one_process")
def test_a_tensor_parallel_value_is_whole_or_as_asked_the_dtensor_with_its_placement() -> None:
    """E13"""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    bare, x = mlp(), torch.randn(3, 4)
    model = copy.deepcopy(bare)
    plan = {"0": ColwiseParallel(use_local_output=False), "2": RowwiseParallel()}
    parallelize_module(model, init_device_mesh("cpu", (1,)), plan)
    _, expected = hl.run(bare, x, capture="*")
    output, acts = hl.run(model, x, capture="*")
    for site, value in expected.items():
        assert type(acts[site]) is Tensor
        assert torch.allclose(acts[site], value), site
    assert torch.allclose(output, bare(x))
    with hl.capture(model, "0", gather=False) as acts:
        model(x)
    assert isinstance(acts["0"], DTensor)
    assert acts["0"].placements == (Shard(1),)


@pytest.mark.process
@on_two_ranks
def test_two_ranks_of_ddp_each_see_their_own_values_and_agree_on_gradients(rank: int) -> None:
    """E13"""
    where, bare = ("h.*", "h.1:grad_output"), GPT(depth=2)
    torch.manual_seed(rank + 1)
    x = tokens()
    with hl.capture(bare, *where) as expected:
        bare(x).sum().backward()
    bare.zero_grad()
    model = DistributedDataParallel(bare)
    with hl.capture(model, *where) as acts:
        model(x).sum().backward()
    assert_same(dict(acts), dict(expected))
    gradient = bare.head.weight.grad
    gathered = [torch.empty_like(gradient) for _ in range(2)]
    dist.all_gather(gathered, gradient)
    assert torch.equal(*gathered)
    with hl.edit(model, "h.0", lambda value: value * 2):
        model(x).sum().backward()


class TestAccelerate:
    """B19, E12: accelerate replaces the forward of each module."""

    @property
    def accelerate(self) -> Any:
        return pytest.importorskip("accelerate")

    def doubling(self) -> Any:
        """Return a hook of accelerate that doubles the output."""

        class Doubling(self.accelerate.hooks.ModelHook):  # type: ignore[misc, name-defined]
            def post_forward(self, module: nn.Module, output: Tensor) -> Tensor:
                return output * 2

        return Doubling()

    def test_what_accelerate_put_there_before_is_called_and_put_back(self) -> None:
        model, x = mlp(), torch.randn(3, 4)
        self.accelerate.hooks.add_hook_to_module(model[0], self.doubling())
        before, plain = state_of(model), model(x)
        with hl.capture(model, "0", "0:input", '0:inputs["input"]') as acts:
            assert torch.equal(model(x), plain)
        assert torch.equal(acts["0"], nn.functional.linear(x, model[0].weight, model[0].bias) * 2)
        assert torch.equal(acts['0:inputs["input"]'], x)
        assert state_of(model) == before

    def test_what_accelerate_puts_there_inside_a_block_stays_after_it(self) -> None:
        model, x = mlp(), torch.randn(3, 4)
        with hl.capture(model, "0", "2") as acts:
            self.accelerate.hooks.add_hook_to_module(model[0], self.doubling())
            inside = model(x)
        assert torch.equal(acts["2"], inside)
        assert torch.equal(model(x), inside)
        self.accelerate.hooks.remove_hook_from_module(model[0])
        assert torch.equal(model(x), model[2](model[0](x).relu()))
        assert len(hl.attached(model)) == 0

    def test_a_model_offloaded_to_disk_and_memory_is_captured_and_changed(self, tmp_path: Path) -> None:
        bare, x = GPT(depth=3), tokens()
        model = self.accelerate.dispatch_model(
            copy.deepcopy(bare), {"h.0": "cpu", "h.1": "disk", "h.2": "cpu", "head": "disk"},
            main_device="cpu", offload_dir=str(tmp_path),
        )  # fmt: skip
        before = [set(vars(module)) for module in model.modules()]
        where = ("**", "h.1:input", 'h.1:inputs["scale"]')
        with torch.no_grad(), hl.capture(bare, *where) as expected:
            bare(x)
        with torch.no_grad(), hl.capture(model, *where) as acts:
            model(x)
        assert list(acts) == list(expected)
        for site, value in expected.items():
            assert torch.equal(torch.as_tensor(acts[site]), torch.as_tensor(value)), site
        with torch.no_grad():
            assert_changes_alike(model, bare, x)
        assert [set(vars(module)) for module in model.modules()] == before
        assert all(parameter.is_meta for parameter in model.h[1].parameters())
