"""Parallel models, in two processes: a captured value is whole, or is reported to be a part."""

from __future__ import annotations

import copy
import datetime
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import hookline as hl
from hookline.parallel import gather as parallel
from hookline.parallel import ranks
from tests.errors.wording import says
from tests.support.parallel_models import HIDDEN, WIDTH, Net, batch, cut, shard
from tests.support.ranks import on_two_ranks

MARKED = ["h.*.mlp.up", "h.*.mlp.up:input", "h.*.mlp.down:input", "h.*.mlp.down", "h.*.mlp", "h.*", "head", "h.*.norm"]


@pytest.mark.process
@on_two_ranks
def test_what_tensor_parallelism_cuts_is_gathered_on_every_rank(rank: int) -> None:
    for bias in (True, False):  # Without a bias, the output of `down` is a partial sum.
        bare, x = Net(bias=bias), batch()
        _, expected = hl.run(bare, x, capture=MARKED)
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                output, acts = hl.run(cut(bare), x, capture=MARKED)
            assert set(acts) == set(expected)
            for site, value in acts.items():
                assert type(value) is Tensor, site
                torch.testing.assert_close(value, expected[site], msg=site)
            torch.testing.assert_close(output, bare(x))


@pytest.mark.process
@on_two_ranks
def test_a_part_can_be_kept_with_its_placement(rank: int) -> None:
    model, x = cut(Net(bias=False)), batch()
    with hl.capture(model, "h.0.mlp.up", "h.0.mlp.down", "h.0.mlp.act", "h.0", gather=False) as acts, torch.no_grad():
        model(x)
    assert isinstance(acts["h.0.mlp.up"], DTensor)
    assert acts["h.0.mlp.up"].placements == (Shard(2),)
    assert acts["h.0.mlp.up"].to_local().shape == (2, 6, HIDDEN // 2)
    assert acts["h.0.mlp.down"].placements == (Partial("sum"),)
    assert acts["h.0.mlp.act"].shape == (2, 6, HIDDEN // 2)
    told = json.loads(parallel.placement(acts["h.0.mlp.up"]))
    assert told["placements"] == ["Shard(dim=2)"]
    assert (told["shape"], told["mesh"], told["names"]) == ([2, 6, HIDDEN], [0, 1], ["tp"])
    assert parallel.placement(acts["h.0"]) == "null"
    torch.testing.assert_close(
        parallel.whole(acts["h.0.mlp.up"]), hl.run(model, x, capture="h.0.mlp.up")[1]["h.0.mlp.up"]
    )


@pytest.mark.process
@on_two_ranks
def test_a_part_that_nothing_marks_is_refused_in_words(rank: int) -> None:
    model, x = cut(Net()), batch()
    for options in (
        {"capture": "h.0.mlp.act"},
        {"patch": {"h.0.mlp.act[..., 3]": 0.0}},
        {"edit": {"h.0.mlp.act": torch.relu}},
    ):
        with pytest.raises(hl.HooklineError, match=says("not the same on ranks and", "'h.0.mlp.act…'")):
            hl.run(model, x, **options)  # type: ignore[call-overload]
    tokens = cut(Net(), down=RowwiseParallel(output_layouts=Shard(1)))
    with pytest.raises(hl.HooklineError, match=says("not the same on ranks", "'mlp'")):
        hl.run(tokens.h[0], x, capture="mlp")  # type: ignore[index]
    with pytest.raises(hl.HooklineError, match=says("passes on rank", f"({2 + rank}, 6, 4)", f"({3 - rank}, 6, 4)")):
        hl.run(model, batch(2 + rank), capture="h.0.norm")
    with pytest.raises(hl.HooklineError, match="different batches"):
        torch.manual_seed(rank)
        hl.run(model, batch(), capture="h.0.norm")


@pytest.mark.process
@on_two_ranks
def test_sequence_parallelism_is_seen_whole(rank: int) -> None:
    bare, x = Net(), batch()
    model = copy.deepcopy(bare)
    plan = {
        "h.*.norm": SequenceParallel(),
        "h.*": PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),)),
        "h.*.mlp.up": ColwiseParallel(input_layouts=Shard(1)),
        "h.*.mlp.down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    for index in range(1, len(model.h)):
        plan[f"h.{index}"] = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Shard(1),))
    del plan["h.*"]
    plan["h.0"] = PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),))
    parallelize_module(model, init_device_mesh("cpu", (2,)), plan)
    where = ["h.*", "h.*.norm", "h.*.mlp.up", "h.*.mlp", "head"]
    with torch.no_grad():
        _, expected = hl.run(bare, x, capture=where)
        _, acts = hl.run(model, x, capture=where)
        changed = hl.run(model, x, patch={"h.0[:, 1:3]": 0.0})
        torch.testing.assert_close(changed, hl.run(bare, x, patch={"h.0[:, 1:3]": 0.0}))
    for site, value in expected.items():
        assert type(acts[site]) is Tensor, site
        torch.testing.assert_close(acts[site], value, msg=site)


@pytest.mark.process
@on_two_ranks
def test_patches_hit_the_units_that_were_named(rank: int) -> None:
    for bias in (True, False):
        bare, x = Net(bias=bias), batch()
        model = cut(bare)
        _, other = hl.run(bare, batch(), capture=["h.0.mlp.up", "h.1.mlp.down"])
        with hl.capture(model, "h.0.mlp.up", gather=False) as parts:
            model(batch())
        patches: list[Any] = [
            {"h.0.mlp.up": 0.5},
            {"h.0.mlp.up[..., 3]": 7.0, "h.1.mlp.up[0, :, 5:7]": -1.0},
            {"h.0.mlp.up": torch.ones(2, 6, HIDDEN)},
            {"h.0.mlp.up[..., 6]": torch.ones(6)},
            {"h.0.mlp.down": 2.0},
            {"h.0.mlp.down[..., 0]": 2.0},
            {"h.0.mlp.down:input[..., 5]": 2.0},
            {"h.0[:, 2]": 1.0},
            {"h.0.mlp.up[*]": 1.0},
            other,
            other.select("h.0.mlp.up[..., 3]"),
        ]
        for patch in patches:
            torch.testing.assert_close(hl.run(model, x, patch=patch), hl.run(bare, x, patch=patch), msg=str(patch))
        whole = {"h.0.mlp.up": parallel.whole(parts["h.0.mlp.up"])}
        torch.testing.assert_close(hl.run(model, x, patch=parts), hl.run(bare, x, patch=whole))
        part = {"h.0.mlp.up[0]": parts["h.0.mlp.up"][0]}
        whole = {"h.0.mlp.up[0]": whole["h.0.mlp.up"][0]}
        torch.testing.assert_close(hl.run(model, x, patch=part), hl.run(bare, x, patch=whole))
        with pytest.raises(hl.EditError, match=says("does not fit where passes", "(2, 6, 4)", "(2, 6, 8)")):
            hl.run(model, x, patch={"h.0.mlp.up": torch.ones(2, 6, HIDDEN // 2)})


@pytest.mark.process
@on_two_ranks
def test_functions_see_the_whole_value_and_gradients_flow_through_them(rank: int) -> None:
    def halved(value: Tensor) -> Tensor:
        assert type(value) is Tensor
        return value * torch.linspace(0, 1, value.shape[-1])

    edits: list[dict[str, Callable[..., Any]]] = [
        {"h.0.mlp.up": halved},
        {"h.0.mlp.up[..., 2:6]": halved},
        {"h.0.mlp.down": torch.relu, "h.1.mlp.up": halved},
        {"h.1.mlp.down:input": halved},
        {"h.0.mlp.up:grad_output": halved, "h.1.mlp.down:grad_input[..., 5]": torch.zeros_like},
        {"h.0": halved},
        {"h.1.mlp.up": lambda value: None},
    ]
    for bias in (True, False):
        bare, x = Net(bias=bias), batch()
        for edit in edits:
            model = cut(bare)
            bare.zero_grad()
            expected = hl.run(bare, x, edit=edit)
            expected.square().sum().backward()
            output = hl.run(model, x, edit=edit)
            torch.testing.assert_close(output, expected, msg=str(edit))
            output.square().sum().backward()
            for name, parameter in bare.named_parameters():
                gradient = parallel.whole(model.get_parameter(name).grad)
                torch.testing.assert_close(gradient, parameter.grad, msg=f"{edit} {name}")


@pytest.mark.process
@on_two_ranks
def test_a_function_gets_this_ranks_part_if_it_asks(rank: int) -> None:
    bare, x = Net(), batch()
    model = cut(bare)
    seen = []

    def own(value: Tensor) -> Tensor:
        seen.append(value)
        return value * 2

    with hl.edit(model, "h.0.mlp.up", own, gather=False), hl.edit(model, "h.0.mlp.act", own, gather=False):
        output = model(x)
    assert isinstance(seen[0], DTensor)
    assert seen[1].shape == (2, 6, HIDDEN // 2)
    doubled = {"h.0.mlp.up": lambda value: value * 2, "h.0.mlp.act": lambda value: value * 2}
    torch.testing.assert_close(output, hl.run(bare, x, edit=doubled))


@pytest.mark.process
@on_two_ranks
def test_what_differs_between_ranks_can_not_be_put_in(rank: int) -> None:
    model, x = cut(Net()), batch()
    torch.manual_seed(rank)
    for site in ("h.0.mlp.up", "h.0"):
        with pytest.raises(hl.EditError, match=says("not the same on ranks seed", site)):
            hl.run(model, x, edit={site: lambda value: value + torch.randn_like(value)})
        with pytest.raises(hl.EditError, match="every rank"):
            hl.run(model, x, patch={f"{site}[0]": torch.randn(6, HIDDEN if "up" in site else WIDTH)})


@pytest.mark.process
@on_two_ranks
def test_gradients_of_what_is_cut_are_whole(rank: int) -> None:
    where = ["h.*.mlp.up:grad_output", "h.*.mlp.down:grad_input", "h.*:grad_output", "h.*.norm:grad_output"]
    for bias in (True, False):
        bare, x = Net(bias=bias), batch()
        with hl.capture(bare, *where) as expected:
            bare(x).square().sum().backward()
        model = cut(bare)
        with hl.capture(model, *where) as acts:
            model(x).square().sum().backward()
        for site, value in expected.items():
            assert type(acts[site]) is Tensor, site
            torch.testing.assert_close(acts[site], value, msg=site)


@pytest.mark.process
@on_two_ranks
def test_parts_subscripts_transforms_and_parameters_are_of_the_whole(rank: int) -> None:
    bare, x = Net(), batch()
    model = cut(bare)
    where = ["h.0.mlp.up[..., 6]", "h.0.mlp.up[0]", "h.0.mlp.up.weight:param", "h.0.mlp.up[*]"]
    _, expected = hl.run(bare, x, capture=where)
    _, acts = hl.run(model, x, capture=where)
    assert set(acts) == set(expected)
    for site, value in expected.items():
        torch.testing.assert_close(acts[site], value, msg=site)
    with hl.capture(
        model, "h.*.mlp.up", transform=lambda value: value.amax(-1), keep="all", dtype=torch.float64
    ) as acts:
        model(x)
        model(x)
    assert [value.shape for value in acts.calls("h.1.mlp.up")] == [(2, 6), (2, 6)]
    patch = {"h.0.mlp.up.weight:param[6]": 0.0, "h.1.mlp.down.weight:param[:, 5]": 1.0}
    torch.testing.assert_close(hl.run(model, x, patch=patch), hl.run(bare, x, patch=patch))
    with hl.capture(model, "h.0.mlp.up", gather=False, keep="all", limit="1 kB") as acts, torch.no_grad():
        model(x)
        model(x)
        with pytest.raises(hl.CacheFull):
            [model(x) for _ in range(20)]
    assert len(acts.calls("h.0.mlp.up")) == 5  # Each rank holds half of 384 bytes per call.
    with pytest.raises(hl.StoreError, match=says("is or holds a")):
        acts.save("acts.safetensors")
    with (
        hl.capture(model, "h.0.mlp.up", detach=False),
        pytest.raises(hl.HooklineError, match=says("sharded gather=False")),
    ):
        model(x)
    with hl.capture(model, "h.0.mlp.up", detach=False, gather=False) as acts:
        (gradient,) = torch.autograd.grad(model(x).sum(), acts["h.0.mlp.up"])
    assert gradient.placements == (Shard(2),)


@pytest.mark.process
@on_two_ranks
def test_a_value_on_its_way_is_waited_for(rank: int) -> None:
    class Reduces(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            from torch.distributed import _functional_collectives as collectives

            return collectives.all_reduce(x, "sum", dist.group.WORLD)

    model, x = nn.Sequential(Reduces(), nn.Identity()), torch.ones(3)
    assert type(model[0](x)) is not Tensor
    for options in ({}, {"clone": False}, {"clone": True}, {"gather": False}, {"keep": "all"}, {"device": "cpu"}):
        with hl.capture(model, "0", "1:input[:2]", **options) as acts:  # type: ignore[arg-type]
            model(x)
        assert type(acts["0"]) is Tensor
        assert acts["0"].tolist() == [2.0, 2.0, 2.0]
        assert acts["1:input[:2]"].tolist() == [2.0, 2.0]


@pytest.mark.process
@on_two_ranks
def test_modules_that_are_cut_can_be_skipped(rank: int) -> None:
    bare, x = Net(), batch()
    model = cut(bare)
    for skip in ({"h.0.mlp.up": torch.ones(2, 6, HIDDEN)}, {"h.0.mlp.down": torch.ones(2, 6, WIDTH)}, "h.1.mlp", "h.1"):
        torch.testing.assert_close(hl.run(model, x, skip=skip), hl.run(bare, x, skip=skip), msg=str(skip))


@pytest.mark.process
@on_two_ranks
def test_a_rank_that_does_not_come_is_missed_in_words(rank: int) -> None:
    model, x = cut(Net()), batch()
    hl.run(model, x, capture="h.0.mlp.up")
    store: Any = dist.distributed_c10d._get_default_store()
    before, patience, ranks.PATIENCE = store.timeout, ranks.PATIENCE, 0.2
    if rank == 0:
        store.set_timeout(datetime.timedelta(seconds=0.5))
        with (
            pytest.warns(hl.HooklineWarning, match=says("waited for rank every", "h.0.mlp.up", 1)),
            pytest.raises(hl.HooklineError, match=says("waited for rank", "h.0.mlp.up", 1)),
            hl.capture(model, "h.0.mlp.up"),
        ):
            model(x)
        store.set_timeout(before)
    ranks.PATIENCE = patience
    dist.barrier()
    site, other = ("h.0.mlp.up", "h.0.mlp.up:input")[:: 1 if rank == 0 else -1]
    with pytest.raises(hl.HooklineError, match=says("rank is at while", f"'{site}':", f"'{other}'")):
        hl.run(model, x, capture=site)
    dist.barrier()
    torch.testing.assert_close(hl.run(model, x, capture="h.0")[1]["h.0"], hl.run(model, x, capture="h.0")[1]["h.0"])


@pytest.mark.process
@on_two_ranks
def test_models_made_parallel_or_compiled_after_their_hooks_are_seen_whole(rank: int) -> None:
    bare, x = Net(), batch()
    _, expected = hl.run(bare, x, capture=["h.0.mlp.up", "h.0"])
    model = copy.deepcopy(bare)
    hooks = hl.Hooks(model)
    acts = hooks.capture("h.0.mlp.up", "h.0")
    unmarked = hl.Hooks(model, active=False)
    unmarked.capture("h.0.mlp.act")
    plan = {"h.*.mlp.up": ColwiseParallel(), "h.*.mlp.down": RowwiseParallel()}
    parallelize_module(model, init_device_mesh("cpu", (2,)), plan)
    with torch.no_grad():
        model(x)
        met = ranks._meetings.total()
        model(x)
        assert ranks._meetings.total() == met  # The ranks meet once for each place.
        with pytest.raises(hl.HooklineError, match=says("not the same on ranks")), unmarked:
            model(x)
        unmarked.remove()
        model(x)
        for run in (model, torch.compile(model, backend="eager")):
            for site in ("h.0.mlp.up", "h.0"):
                assert type(acts[site]) is Tensor
                torch.testing.assert_close(acts[site], expected[site])
            hooks.remove()
            with pytest.raises(hl.HooklineError, match=says("not the same on ranks")), hl.capture(model, "h.0.mlp.act"):
                run(x)
            _, acts = hl.run(run, x, capture=["h.0.mlp.up", "h.0"])
    torch._dynamo.reset()


@pytest.mark.process
@on_two_ranks
def test_sharded_data_parallelism_passes_whole_values_of_this_ranks_batch(rank: int) -> None:
    bare = Net()
    torch.manual_seed(rank + 1)
    x = batch()
    where = ["**", "h.1:input", "h.0.mlp.up.weight:param", "h.*:grad_output"]
    bare(x).sum().backward()
    with hl.capture(bare, *where) as expected:
        bare(x).sum().backward()
    model = shard(bare)
    hooks = hl.Hooks(model)
    acts = hooks.capture(*where)
    model(x).sum().backward()
    model(x).sum().backward()
    assert set(acts) == set(expected)
    for site, value in expected.items():
        assert type(acts[site]) is Tensor, site
        torch.testing.assert_close(acts[site], value, msg=site)
    assert hooks.at("h.0").of("capture")  # Nothing is sharded, so the hooks are on the hot path.
    assert all(hook.action.copies_on_write for hook in hooks)  # type: ignore[union-attr]
    hooks.remove()
    assert ranks.replica(model) == ranks.Replica((0, 1))
    patches: list[dict[str, Any]] = [{"h.0.mlp.up[..., 3]": 1.0}, {"h.0.mlp.up.weight:param[3]": 0.0}]
    for patch in patches:
        torch.testing.assert_close(hl.run(model, x, patch=patch), hl.run(bare, x, patch=patch))


@pytest.mark.process
@on_two_ranks
def test_values_under_mixed_precision_have_the_dtype_they_pass_with(rank: int) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    model = fully_shard(Net(), mp_policy=policy)
    with torch.no_grad():
        _, acts = hl.run(model, batch(), capture=[":input", "h.0", "head", ""])
    assert {site: value.dtype for site, value in acts.items()} == {
        ":input": torch.bfloat16,
        "h.0": torch.bfloat16,
        "head": torch.bfloat16,
        "": torch.bfloat16,  # FSDP casts the model's output.
    }


@pytest.mark.process
@on_two_ranks
def test_a_forward_that_ends_early_leaves_the_parameters_sharded(rank: int) -> None:
    bare, x = Net(depth=3), batch()
    model = shard(bare)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (bare, model)]
    for site in ("h.1", "h.1.mlp.up"):
        for run in (model, model.forward):
            with torch.no_grad():
                _, acts = hl.run(run, x, capture=site, stop=True)
                torch.testing.assert_close(acts[site], hl.run(bare, x, capture=site)[1][site])
            assert all(isinstance(parameter, DTensor) for block in model.h for parameter in block.parameters())  # type: ignore[union-attr]
            for one, optimizer in zip((bare, model), optimizers, strict=True):
                optimizer.zero_grad()
                one(x).square().mean().backward()
                _ = hl.run(one, x, capture=site, stop=True)
                optimizer.step()
            with torch.no_grad():
                torch.testing.assert_close(model(x), bare(x))
    with pytest.raises(hl.HooklineError, match=says("FSDP detach=False")):
        hl.capture(model, "h.1", stop=True, detach=False)


@pytest.mark.process
@on_two_ranks
def test_ddp_is_whole_on_each_rank_and_asks_nobody(rank: int) -> None:
    bare = Net()
    torch.manual_seed(rank)
    x = batch()
    model = DistributedDataParallel(copy.deepcopy(bare))
    _, expected = hl.run(bare, x, capture="h.*.mlp")
    _, acts = hl.run(model, x, capture="module.h.*.mlp")
    assert list(acts) == list(expected)
    assert all(torch.equal(acts[site], expected[site]) for site in expected)
    assert ranks.replica(model) is None
    assert ranks.replica(bare) is None
    if rank == 0:
        with torch.no_grad():
            hl.run(model.module, x, capture="h.0", patch={"h.1": 0.0})
