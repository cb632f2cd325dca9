"""Modules that are wrapped, lazy, unnamed, or used by other tools at the same time."""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookline as hl
from tests.errors.wording import says
from tests.support.models import GPT, mlp, tokens
from tests.support.states import state_of


def test_lazy_modules_are_captured_on_the_call_that_makes_them_real() -> None:
    """B13"""
    model = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())
    x = torch.randn(6, 4)
    assert "LazyLinear" in repr(hl.sites(model))
    with hl.capture(model, "*", "0:input") as acts, hl.edit(model, "0", lambda value: value + 1):
        output = model(x)
    assert type(model[0]) is nn.Linear
    assert torch.equal(acts["0"], model[0](x))
    assert torch.equal(acts["0:input"], x)
    assert torch.equal(acts["1"], output)
    assert not model[0]._forward_pre_hooks, "the hook that initialized the lazy module came back"
    assert "forward" not in vars(model[0])
    assert torch.equal(hl.run(model.eval(), x), model(x))


class Unnamed(nn.Module):
    """Holds one layer in a plain list, and creates another in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Linear(4, 4)]

    def forward(self, x: Tensor) -> Tensor:
        return nn.ReLU()(self.layers[0](x))


def test_a_module_outside_the_tree_is_hooked_by_the_object_itself() -> None:
    """B15"""
    model, x = Unnamed(), torch.ones(2, 4)
    layer = model.layers[0]
    output, acts = hl.run(model, x, capture=[layer, (layer, ":input")])
    assert torch.equal(acts[layer].relu(), output)
    assert len(acts) == 2
    assert "Linear" in next(iter(acts))
    assert torch.equal(hl.run(model, x, patch={layer: 0.0}), torch.zeros(2, 4))


def test_a_module_outside_the_tree_has_no_name() -> None:
    """B15"""
    with pytest.raises(hl.SiteError, match=says("matches nothing", "Unnamed", "layers.0")):
        hl.capture(Unnamed(), "layers.0")


def test_a_module_of_another_model_never_fires() -> None:
    """B15"""
    model, other = mlp(), mlp()
    with pytest.raises(hl.NeverFired, match=says("was not called in forward of Sequential", 1)):
        hl.run(model, torch.ones(2, 4), capture=other[0])


class Yielding(nn.Module):
    """Returns an object that can be read only once."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        if self.kind == "generator":
            return (part for part in x)
        if self.kind == "coroutine":
            return self.later(x)
        if self.kind == "nested":
            return {"parts": iter(x)}
        kinds = {"iterator": iter, "chain": itertools.chain, "enumerate": enumerate, "reversed": reversed}
        return kinds[self.kind](list(x))

    async def later(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize("kind", ["generator", "iterator", "chain", "enumerate", "reversed", "nested"])
def test_what_can_be_read_only_once_is_refused_and_not_used_up(kind: str) -> None:
    """B16"""
    model, x = Yielding(kind), torch.ones(3, 4)
    outputs = []
    with hl.capture(model, ""), pytest.raises(hl.HooklineError, match=says("use it up")):
        model(x)
    with hl.edit(model, "", lambda value: value), pytest.raises(hl.HooklineError, match=says("use it up")):
        model(x)
    with hl.capture(model, ":input"):
        outputs.append(model(x))
    parts = outputs[0]["parts"] if kind == "nested" else outputs[0]
    assert len(list(parts)) == 3


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
def test_a_coroutine_is_refused_and_still_runs_unhooked() -> None:
    """B16"""
    model, x = Yielding("coroutine"), torch.ones(3, 4)
    with pytest.raises(hl.HooklineError, match=says("a coroutine passes here")):
        hl.run(model, x, capture="")
    with hl.capture(model, ":input") as acts:
        assert torch.equal(asyncio.run(model(x)), x)
    assert torch.equal(acts[":input"], x)


class WithoutWeights(nn.Module):
    """Attention that returns None for its weights, as with fused kernels."""

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return x, None


def test_a_part_that_is_none_is_not_kept_in_silence() -> None:
    """B18"""
    model = nn.Sequential(WithoutWeights())
    with pytest.raises((hl.HooklineError, hl.HooklineWarning), match=r"'0\[1\]'.*None"):
        _, acts = hl.run(model, torch.ones(2, 4), capture="0[1]")
        acts["0[1]"]
    _, whole = hl.run(model, torch.ones(2, 4), capture="0")
    assert whole["0"][1] is None


def test_attention_weights_that_a_fused_kernel_does_not_make_are_not_kept_in_silence() -> None:
    """B18"""
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 8, "vocab_size": 11, "n_positions": 8}
    model = transformers.GPT2Model(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).eval()
    model.set_attn_implementation("sdpa")
    tokens = torch.tensor([[1, 2, 3]])
    with pytest.raises((hl.HooklineError, hl.HooklineWarning), match=r"'h\.0\.attn\[1\]'.*None"):
        _, acts = hl.run(model, tokens, capture="h.0.attn[1]")
        acts["h.0.attn[1]"]
    model.set_attn_implementation("eager")
    _, acts = hl.run(model, tokens, capture="h.0.attn[1]")
    assert acts["h.0.attn[1]"].shape == (1, 2, 3, 3)


def test_a_forward_that_another_tool_replaced_is_called_and_put_back() -> None:
    """B19"""
    tool = pytest.importorskip("accelerate.hooks")

    class Double(tool.ModelHook):
        def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return tuple(arg * 2 for arg in args), kwargs

    model, x = mlp(), torch.ones(2, 4)
    plain = model[0](2 * x)
    tool.add_hook_to_module(model[0], Double())
    before = state_of(model)
    with hl.capture(model, "0", "0:input") as acts, hl.edit(model, "0", lambda value: value + 1):
        model(x)
    assert torch.equal(acts["0"], plain)
    assert state_of(model) == before
    tool.remove_hook_from_module(model[0])
    assert torch.equal(model[0](2 * x), plain)


def test_a_forward_that_another_tool_replaces_meanwhile_stays_theirs() -> None:
    """B19"""
    tool = pytest.importorskip("accelerate.hooks")

    model, x = mlp(), torch.ones(2, 4)
    plain = model(x)
    with hl.edit(model, "0", lambda value: value * 0):
        tool.add_hook_to_module(model[0], tool.ModelHook())
        assert torch.equal(model(x), model[2](torch.zeros(2, 8)))
    assert torch.equal(model(x), plain)
    assert model[0]._hf_hook is not None
    tool.remove_hook_from_module(model[0])
    assert torch.equal(model(x), plain)
    with hl.capture(model, "0") as acts:
        model(x)
    assert torch.equal(acts["0"], model[0](x))


class OwnForward(nn.Module):
    """Chooses its forward in `__init__`, as models with several modes do."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.forward = self.double

    def double(self, x: Tensor) -> Tensor:
        return x * self.scale * 2


def test_a_copy_of_a_module_with_a_forward_of_its_own_runs_that_with_its_own_weights() -> None:
    """B19"""
    model, x = nn.Sequential(OwnForward()), torch.ones(2, 4)
    before = state_of(model)
    with hl.capture(model, "0", "0:input") as acts:
        model(x)
        twin = copy.deepcopy(model)
    assert state_of(model) == before
    assert acts["0"].eq(2).all()
    with torch.no_grad():
        twin[0].scale.fill_(10)
    assert twin(x).eq(20).all()
    assert model(x).eq(2).all()


@pytest.fixture
def process_group(tmp_path: Any) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def check_names(wrapped: nn.Module, bare: nn.Module, prefix: str) -> None:
    """Check that a wrapped model accepts the names of the inner model, and the names with the wrapper's prefix."""
    x = torch.ones(2, 4)
    expected = bare[0](x)
    assert [str(site) for site in hl.sites(wrapped, nn.Linear)] == ["0", "2"]
    for name in ("0", f"{prefix}0"):
        output, acts = hl.run(wrapped, x, capture=[name, "*"])
        assert output.shape == (2, 2)
        for key in ("0", f"{prefix}0", bare[0]):
            assert torch.equal(acts[key], expected)
    zeros = hl.run(wrapped, x, patch={"0": 0.0})
    assert torch.equal(zeros, bare[2](torch.zeros(2, 8)))


def test_data_parallel_models_answer_to_the_names_of_the_model_inside() -> None:
    """B20"""
    bare = mlp()
    check_names(nn.DataParallel(bare), bare, "module.")


def test_averaged_models_answer_to_the_names_of_the_model_inside() -> None:
    """B20"""
    averaged = torch.optim.swa_utils.AveragedModel(mlp())
    check_names(averaged, averaged.module, "module.")


@pytest.mark.usefixtures("process_group")
def test_distributed_models_answer_to_the_names_of_the_model_inside() -> None:
    """B20"""
    bare = mlp()
    check_names(nn.parallel.DistributedDataParallel(bare), bare, "module.")


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo reads it of what passes between two graphs.
def test_compiled_models_answer_to_the_names_of_the_model_inside() -> None:
    """B20"""
    bare = mlp()
    check_names(torch.compile(bare, backend="eager"), bare, "_orig_mod.")


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo reads it of what passes between two graphs.
def test_a_compiled_block_inside_a_model_answers_to_both_names() -> None:
    """B20"""
    model = GPT(depth=1)
    model.h[0] = torch.compile(model.h[0], backend="eager")
    for name in ("h.0.mlp.0", "h.0._orig_mod.mlp.0"):
        _, acts = hl.run(model, tokens(), capture=name)
        assert acts["h.0.mlp.0"].shape == acts["h.0._orig_mod.mlp.0"].shape == (2, 5, 8)


def test_checkpoint_wrappers_inside_a_model_do_not_show() -> None:
    """B20"""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = GPT(depth=1)
    model.h[0] = checkpoint_wrapper(model.h[0])
    _, acts = hl.run(model, tokens(), capture=["h.0", "h.0.mlp"])
    assert list(acts) == ["h.0.mlp", "h.0"]


@pytest.mark.filterwarnings("ignore")
def test_adapted_models_answer_to_the_names_of_the_model_inside() -> None:
    """B20"""
    peft = pytest.importorskip("peft")
    bare = GPT(depth=1)
    x = tokens()
    adapted = peft.get_peft_model(bare, peft.LoraConfig(target_modules=["attn"], init_lora_weights=False))
    output, acts = hl.run(adapted, x, capture=["h.0.attn", "h.0.mlp", "head", "base_model.model.h.0.norm"])
    assert torch.equal(acts["head"], output)
    assert acts["h.0.norm"].shape == (2, 5, 8)
    layer = adapted.base_model.model.h[0].attn
    assert torch.equal(acts["h.0.attn"], layer(acts["h.0.norm"]))
    assert not torch.equal(acts["h.0.attn"], layer.base_layer(acts["h.0.norm"]))
