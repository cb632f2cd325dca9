"""hookline.compat.nice_hooks: forward pre-hooks and both kinds of backward hooks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hookline.compat import nice_hooks
from hookline.compat.nice_hooks import ModulePath, run
from tests.errors.wording import says
from tests.support.compat_models import X

# Pre-hooks.


def test_a_forward_pre_hook_replaces_the_arguments(model: nn.Module) -> None:
    seen: list[Any] = []

    def double(module: nn.Module, path: ModulePath, args: tuple[Any, ...]) -> Any:
        seen.append((module, path, args))
        return args[0] * 2

    with nice_hooks.register_forward_pre_hook(model, "mod2", double):
        result = model(X)
    assert result.equal(model.blocks[0](model.mod2(model.mod1(X) * 2)))
    assert seen[0][:2] == (model.mod2, ModulePath("mod2", None))
    assert len(seen[0][2]) == 1
    assert run(model, X, scale=2.0, forward_pre_hooks={"": lambda module, path, args: (args[0] * 2,)}).equal(
        model(X * 2, scale=2.0)
    )
    assert run(model, X, forward_pre_hooks={"": lambda module, path, args: (*args, 3.0)}).equal(model(X, 3.0))
    assert run(model, X, 2.0, forward_pre_hooks={"": lambda module, path, args: args[:1]}).equal(model(X))
    assert run(model, X, 2.0, forward_pre_hooks={"": lambda module, path, args: None}).equal(model(X, 2.0))


def test_a_forward_pre_hook_of_a_module_with_any_arguments() -> None:
    class Sum(nn.Module):
        def forward(self, first: float, *others: float, factor: float = 1.0) -> float:
            return (first + sum(others)) * factor

    seen: list[Any] = []
    total = Sum()
    for args, keywords in (((1.0,), {}), ((1.0, 2.0), {}), ((1.0, 2.0, 3.0), {"factor": 2.0}), ((), {"first": 1.0})):
        hook = {"": lambda module, path, args: seen.append(args)}
        assert run(total, *args, **keywords, forward_pre_hooks=hook) == total(*args, **keywords)  # type: ignore[arg-type]
        assert seen[-1] == args
    hook = {"": lambda module, path, args: (*args, 10.0, 10.0)}  # type: ignore[dict-item]
    assert run(total, 1.0, 2.0, factor=2.0, forward_pre_hooks=hook) == 46.0


def test_a_forward_pre_hook_that_gives_an_argument_twice_or_too_many_is_refused() -> None:
    class Scaled(nn.Linear):
        def forward(self, input: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            return super().forward(input) * scale

    layer = Scaled(4, 2)
    instead = {"": lambda module, path, args: (X * 0,)}
    with pytest.raises(TypeError, match=r"^Scaled.forward\(\) got multiple values for argument 'input'"):
        run(layer, input=X, forward_pre_hooks=instead)
    with pytest.raises(TypeError, match=r"^Scaled.forward\(\) got too many positional arguments"):
        run(layer, X, forward_pre_hooks={"": lambda module, path, args: (X, 1.0, 2.0)})
    assert run(layer, X, scale=2.0, forward_pre_hooks=instead).equal(layer(X * 0, scale=2.0))


# Backward hooks.


def test_a_backward_hook_gets_both_gradients(model: nn.Module) -> None:
    seen: dict[str, Any] = {}

    def hook(module: nn.Module, path: ModulePath, grad_input: Any, grad_output: Any) -> None:
        assert str(path) not in seen
        assert module is dict(model.named_modules())[str(path)]
        seen[str(path)] = grad_input, grad_output

    with nice_hooks.register_full_backward_hook(model, ["mod2", "blocks.0"], hook):
        model(X).sum().backward()
    grad = torch.ones(2, 5) @ model.blocks[0].weight
    assert list(seen) == ["blocks.0", "mod2"]
    assert seen["blocks.0"][0][0].allclose(grad)
    assert seen["blocks.0"][1][0].equal(torch.ones(2, 5))
    assert seen["mod2"][1][0].allclose(grad)
    assert seen["mod2"][0][0].allclose(grad @ model.mod2.weight)


@pytest.mark.parametrize("wrap", [lambda gradient: gradient, lambda gradient: (gradient,)])
def test_what_a_backward_hook_returns_replaces_the_gradient_of_the_input(model: nn.Module, wrap: Any) -> None:
    result = run(model, X, full_backward_hooks={"mod2": lambda module, path, inputs, outputs: wrap(inputs[0] * 3)})
    result.sum().backward()
    thrice = model.mod1[0].weight.grad.clone()
    model.zero_grad()
    model(X).sum().backward()
    assert thrice.allclose(model.mod1[0].weight.grad * 3)
    assert thrice.any()


def test_backward_hooks_of_a_run_fire_after_it(model: nn.Module) -> None:
    calls: list[str] = []
    result = run(
        model,
        X,
        full_backward_hooks={
            ("mod2", "blocks.0"): lambda module, path, grad_input, grad_output: calls.append(f"{path}")
        },
        full_backward_pre_hooks={
            ("mod2", "blocks.0"): lambda module, path, grad_output: calls.append(f"before {path}")
        },
    )
    assert not any("forward" in vars(module) for module in model.modules())
    result.sum().backward()
    assert calls == ["before blocks.0", "blocks.0", "before mod2", "mod2"]


@pytest.mark.parametrize("wrap", [lambda gradient: gradient, lambda gradient: (gradient,)])
def test_a_backward_pre_hook_replaces_the_gradient(model: nn.Module, wrap: Any) -> None:
    seen: list[Any] = []

    def hook(module: nn.Module, path: ModulePath, grad_output: Any) -> Any:
        seen.append((module, str(path), len(grad_output)))
        return wrap(grad_output[0] * 0)

    with nice_hooks.register_full_backward_pre_hook(model, "mod2", hook):
        model(X).sum().backward()
    assert seen == [(model.mod2, "mod2", 1)]
    assert not model.mod2.weight.grad.any()
    assert model.blocks[0].weight.grad.any()


def test_a_backward_hook_sees_what_a_pre_hook_returned(model: nn.Module) -> None:
    seen: list[torch.Tensor] = []
    run(
        model,
        X,
        full_backward_hooks={"mod2": lambda module, path, grad_input, grad_output: seen.extend(grad_output)},
        full_backward_pre_hooks={"mod2": lambda module, path, grad_output: grad_output[0] * 0},
    ).sum().backward()
    assert not seen[0].any()


def test_a_backward_pre_hook_gets_the_gradients_of_a_tuple_together() -> None:
    gru, seen = nn.GRU(4, 3), []

    def note(_module: nn.Module, path: nice_hooks.ModulePath, grad: Any) -> None:
        seen.append((str(path), grad))

    with nice_hooks.register_full_backward_pre_hook(gru, "", note):
        output, last = gru(X.clone().requires_grad_())
        (output.sum() + 2 * last.sum()).backward()
    ((path, (of_output, of_last)),) = seen
    assert path == ""
    assert of_output.equal(torch.ones(2, 3))
    assert of_last.equal(torch.full((1, 3), 2.0))


def test_a_backward_hook_may_change_the_gradients_of_several_inputs() -> None:
    module = nn.Bilinear(2, 3, 1)
    one, two = torch.ones(1, 2, requires_grad=True), torch.ones(1, 3, requires_grad=True)
    with nice_hooks.register_full_backward_hook(
        module, "", lambda module, path, grad_input, grad_output: tuple(grad * 0 + 5 for grad in grad_input)
    ):
        module(one, two).sum().backward()
    assert one.grad is not None
    assert two.grad is not None
    assert one.grad.eq(5).all()
    assert two.grad.eq(5).all()


def test_a_backward_hook_gets_and_changes_the_gradients_of_positional_inputs() -> None:
    module, seen = nn.Bilinear(2, 3, 1), []

    def double(module: nn.Module, path: ModulePath, grad_input: Any, grad_output: Any) -> Any:
        seen.append(grad_input)
        return (grad_input[0] * 2,)

    one, two = torch.ones(1, 2, requires_grad=True), torch.ones(1, 3, requires_grad=True)
    run(module, one, input2=two, full_backward_hooks={"": double}).sum().backward()
    assert [len(gradients) for gradients in seen] == [1]
    assert one.grad is not None
    assert one.grad.allclose(2 * module.weight.sum(2)[0])
    assert two.grad is not None
    assert two.grad.allclose(module.weight.sum(1)[0])


@pytest.mark.parametrize(
    ("register", "what"),
    [
        (nice_hooks.register_forward_pre_hook, "forward pre-hook"),
        (nice_hooks.register_full_backward_hook, "backward hook"),
        (nice_hooks.register_full_backward_pre_hook, "backward pre-hook"),
    ],
)
def test_an_index_is_refused_where_it_means_nothing(chain: nn.Sequential, register: Any, what: str) -> None:
    with pytest.raises(ValueError, match=says("takes no index", "0[:,1]", what)):
        register(chain, "0[:, 1]", print)


def test_gradients_are_those_of_the_module_alone() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.inner(x)  # type: ignore[no-any-return]

    model, seen = Residual(), []
    x = X.clone().requires_grad_()
    hook = {"inner": lambda module, path, grad_input, grad_output: seen.append(grad_input[0])}
    run(model, x, full_backward_hooks=hook).sum().backward()
    assert seen[0].allclose(torch.ones(2, 4) @ model.inner.weight)
