"""Models with replaced weights, classes or tensors: torch.func, parametrizations, pruning, dual tensors."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jacrev, jvp, vmap
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm, weight_norm
from torch.utils.hooks import RemovableHandle

import hookline as hl
from tests.errors.wording import says
from tests.support.models import mlp
from tests.support.states import state_of

OLD_WEIGHT_NORM = pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")


class Doubled(nn.Module):
    """A parametrization that counts its computations."""

    def __init__(self) -> None:
        super().__init__()
        self.computed = 0

    def forward(self, weight: Tensor) -> Tensor:
        self.computed += 1
        return weight * 2


def test_a_functional_call_is_captured_with_the_weights_it_was_given() -> None:
    """E10"""
    model, x = mlp(), torch.randn(3, 4)
    swapped = {name: parameter * 2 for name, parameter in model.named_parameters()}
    before = state_of(model)
    with hl.capture(model, "0", "2") as acts:
        output = functional_call(model, swapped, (x,))
    assert torch.equal(acts["0"], nn.functional.linear(x, swapped["0.weight"], swapped["0.bias"]))
    assert torch.equal(acts["2"], output)
    assert state_of(model) == before


def test_the_weights_of_a_functional_call_get_their_gradients_through_a_patch() -> None:
    """E10"""
    model, x = mlp(), torch.randn(3, 4)
    weights = {name: parameter.detach().clone().requires_grad_() for name, parameter in model.named_parameters()}
    with hl.edit(model, "0", lambda value: value * 2):
        functional_call(model, weights, (x,)).sum().backward()
    assert weights["0.weight"].grad is not None
    assert model[0].weight.grad is None


TRANSFORMS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "vmap": lambda model, x: vmap(model)(x),
    "grad": lambda model, x: grad(lambda value: model(value).sum())(x),
    "jacrev": lambda model, x: jacrev(model)(x),
    "jvp": lambda model, x: jvp(model, (x,), (torch.ones_like(x),)),
    "vmap of grad": lambda model, x: vmap(grad(lambda value: model(value).sum()))(x),
}
CAPTURES: dict[str, dict[str, Any]] = {
    "as usual": {},
    "a copy": {"clone": True},
    "by reference": {"clone": False},
    "with its graph": {"detach": False},
    "transformed": {"transform": torch.mean},
    "cast": {"dtype": torch.float64},
}


@pytest.mark.parametrize("options", CAPTURES.values(), ids=CAPTURES)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_value_inside_a_torch_func_transform_is_refused(transform: str, options: dict[str, Any]) -> None:
    """E11: the value would be a wrapper that is invalid once the transform is over."""
    model, x = mlp(), torch.randn(3, 4)
    before = state_of(model)
    with pytest.raises(hl.HooklineError, match="'0'.*vmap, grad"), hl.capture(model, "0", **options):
        TRANSFORMS[transform](model, x)
    assert state_of(model) == before


@pytest.mark.parametrize("where", ["0[0]", "0:input", ":inputs", "0:grad_output"])
def test_parts_inputs_and_gradients_inside_a_transform_are_refused_too(where: str) -> None:
    """E11"""
    model, x = mlp(), torch.randn(3, 4)
    with pytest.raises(hl.HooklineError, match="vmap, grad"), hl.capture(model, where):
        TRANSFORMS["vmap of grad"](model, x)


CHANGES: dict[str, Callable[[nn.Module], hl.Hooks]] = {
    "number": lambda model: hl.patch(model, {"1": 3.0}),
    "tensor": lambda model: hl.patch(model, {"1": torch.arange(8.0)}),
    "part": lambda model: hl.patch(model, {"1[..., 0]": 3.0}),
    "edit": lambda model: hl.edit(model, "0", lambda value: value * 2),
    "skip": lambda model: hl.skip(model, "1"),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_changes_act_inside_vmap_as_they_do_outside(kind: str) -> None:
    """E11"""
    model, x = mlp(), torch.randn(3, 4)
    with CHANGES[kind](model):
        inside, outside = vmap(model)(x), model(x)
    assert torch.allclose(inside, outside)
    assert not torch.allclose(inside, model(x))


def test_an_edit_is_differentiated_by_torch_func_like_any_operation() -> None:
    """E11"""
    model, x = mlp(), torch.randn(3, 4)
    leaf = x.clone().requires_grad_()
    with hl.edit(model, "0", lambda value: value * 2):
        functional = grad(lambda value: model(value).sum())(x)
        model(leaf).sum().backward()
    assert torch.allclose(functional, leaf.grad)


def test_a_model_that_was_unpickled_with_hooks_of_others_keeps_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """E16: hook ids restart at 0 in a new process, where registering a torch hook would overwrite the old one."""
    model = mlp()
    monkeypatch.setattr(RemovableHandle, "next_id", 0)
    model[0].register_forward_hook(counting)
    model[0].register_full_backward_hook(counting)
    revived = pickle.loads(pickle.dumps(model))
    monkeypatch.setattr(RemovableHandle, "next_id", 0)
    counted.clear()
    with hl.capture(revived, "*", "*:grad_output", "*:grad_input") as acts:
        revived(torch.ones(2, 4, requires_grad=True)).sum().backward()
    assert len(acts) == 9
    assert counted == ["Linear", "Linear"]
    assert list(revived[0]._forward_hooks.values()) == [counting]
    assert list(revived[0]._backward_hooks.values()) == [counting]


counted: list[str] = []


def counting(module: nn.Module, _args: Any, _output: Any) -> None:
    counted.append(type(module).__name__)


def test_hooks_survive_a_change_of_dtype_and_say_which_cast_a_patch_needs() -> None:
    """E17"""
    model, x = mlp(), torch.randn(3, 4)
    with hl.capture(model, "0") as acts:
        model.double()(x.double())
        assert acts["0"].dtype is torch.float64
        model.half()(x.half())
        assert acts["0"].dtype is torch.float16
    model.float()
    with pytest.raises(hl.EditError, match=says("float16 given where torch float32", "0")):
        hl.run(model, x, patch=acts)
    hl.run(model, x, patch=acts.to(torch.float32))


def test_a_parametrized_weight_is_computed_once_for_each_call_and_by_nobody_else() -> None:
    """E18"""
    model, x = mlp(), torch.randn(3, 4)
    doubled = Doubled()
    parametrize.register_parametrization(model[0], "weight", doubled)
    plain = model(x)
    doubled.computed = 0
    hl.sites(model)
    hl.attached(model)
    block = hl.capture(model, "**", "0:input")
    assert doubled.computed == 0
    with block as acts:
        output = model(x)
    assert doubled.computed == 1
    assert torch.equal(output, plain)
    assert torch.equal(acts["0.parametrizations.weight.0"], model[0].weight)
    repr(acts), repr(hl.sites(model)), repr(block)
    assert doubled.computed == 2  # `model[0].weight` above computed it.


def test_a_module_that_is_parametrized_while_hooked_runs_as_its_new_class() -> None:
    """E18"""
    model, x = mlp(), torch.randn(3, 4)
    with hl.capture(model, "0") as acts:
        parametrize.register_parametrization(model[0], "weight", Doubled())
        model(x)
        assert torch.equal(acts["0"], nn.functional.linear(x, model[0].weight, model[0].bias))
        parametrize.remove_parametrizations(model[0], "weight")
        model(x)
        assert torch.equal(acts["0"], model[0](x))
    assert "forward" not in vars(model[0])


NORMS: dict[str, Callable[[nn.Module], Any]] = {
    "parametrized weight norm": parametrizations.weight_norm,
    "parametrized spectral norm": parametrizations.spectral_norm,
    "weight norm": weight_norm,
    "spectral norm": spectral_norm,
    "pruning": lambda module: prune.l1_unstructured(module, "weight", amount=0.5),
}


@OLD_WEIGHT_NORM
@pytest.mark.parametrize("norm", NORMS)
def test_observing_changes_nothing_where_a_pre_hook_makes_the_weight(norm: str) -> None:
    """E21, E18"""
    x = torch.randn(3, 4)
    torch.manual_seed(1)
    plain, hooked = mlp(), mlp()
    hooked.load_state_dict(plain.state_dict())
    for model in (plain, hooked):
        torch.manual_seed(2)
        NORMS[norm](model[0])
    order = list(hooked[0]._forward_pre_hooks.values())
    seen: list[Tensor] = []
    plain[0].register_forward_hook(lambda _module, _args, output: seen.append(output))
    with hl.capture(hooked, "*", "0:input") as acts:
        for _ in range(3):
            assert torch.equal(hooked(x), plain(x))
    assert torch.equal(acts["0"], seen[-1])
    assert list(hooked[0]._forward_pre_hooks.values()) == order
    for name, value in plain.state_dict().items():
        assert torch.equal(hooked.state_dict()[name], value), name


def test_pruning_can_be_made_permanent_inside_a_block() -> None:
    """E21"""
    model, x = mlp(), torch.randn(3, 4)
    prune.l1_unstructured(model[0], "weight", amount=0.5)
    plain = model(x)
    with hl.capture(model, "0"):
        prune.remove(model[0], "weight")
        assert torch.equal(model(x), plain)
    assert len(hl.attached(model)) == 0


def test_a_captured_dual_tensor_is_its_primal_value_and_the_tangent_goes_on() -> None:
    """E22"""
    model, x, direction = mlp(), torch.randn(3, 4), torch.randn(3, 4)

    def tangent() -> Tensor:
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(model(forward_ad.make_dual(x, direction))).tangent

    plain = tangent()
    with hl.capture(model, "*") as acts:
        assert torch.equal(tangent(), plain)
    assert torch.equal(acts["0"], model[0](x))
    with forward_ad.dual_level():
        assert forward_ad.unpack_dual(acts["0"]).tangent is None
    with hl.edit(model, "2", lambda value: value * 2):
        assert torch.equal(tangent(), plain * 2)


def test_a_dual_tensor_kept_with_its_graph_does_not_lose_its_tangent_in_silence() -> None:
    """E22: the tangent is freed with its dual level."""
    model, x, direction = mlp(), torch.randn(3, 4), torch.randn(3, 4)
    with pytest.raises(hl.HooklineError, match=says("tangent with detach=False", "0")), forward_ad.dual_level():
        dual = forward_ad.make_dual(x, direction)
        with hl.capture(model, "0", detach=False):
            model(dual)


def test_the_remedy_for_a_tangent_works() -> None:
    model, x, direction = mlp(), torch.randn(3, 4), torch.randn(3, 4)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, direction)
        with hl.capture(model, "0", detach=False, transform=lambda v: forward_ad.unpack_dual(v).tangent) as acts:
            model(dual)
    torch.testing.assert_close(acts["0"], direction @ model[0].weight.T)
