"""Copies of tensors are equal, and a write to one does not change the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn

import hookline as hl
from hookline._kernel import leaves, share
from tests.support.nested_values import photo, trees


def patched(value: Any) -> Any:
    """Return what a model returns whose output is replaced with a value."""
    return hl.run(nn.Identity(), value, patch={"": value})


@settings(deadline=None)
@given(trees())
def test_a_shared_or_patched_value_is_equal_and_a_write_on_either_side_leaves_the_other_alone(value: Any) -> None:
    before = photo(value)
    for copied in (share(value), patched(value)):
        assert photo(copied) == before
        for tensor in leaves(copied):
            tensor.zero_()
        assert photo(value) == before
    shared, fitted = share(value), patched(value)
    for tensor in leaves(value):
        tensor.fill_(1)
    assert photo(shared) == photo(fitted) == before


def test_an_expanded_tensor_is_copied_without_filling_its_memory() -> None:
    model = nn.Identity()
    with hl.capture(model, "", clone=True) as acts:
        model(torch.ones(1, 3).expand(1000, 3))
    copied = acts[""]
    assert copied.shape == (1000, 3)
    assert copied.untyped_storage().nbytes() == 12


class Parts(nn.Module):
    """Two layers, with a large value between them that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 256)
        self.last = nn.Linear(256, 1)

    def forward(self, x: Tensor) -> Tensor:
        middle = self.first(x)
        return self.last(middle.relu() + middle.tanh())


WRITES = {
    "nothing": lambda gradient: None,
    "in place": lambda gradient: gradient.zero_(),
    "through .data": lambda gradient: gradient.data.zero_(),
    "through numpy": lambda gradient: gradient.numpy().fill(0),
    "by a foreach function": lambda gradient: torch._foreach_zero_([gradient]) and None,
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_large_gradient_stays_right_when_a_later_hook_writes_into_it(write: Callable[[Tensor], Any]) -> None:
    model, x = Parts(), torch.randn(128, 64)
    true: list[Tensor] = []
    with hl.capture(model, "first:grad_output") as acts:
        middle = model.first(x)
        middle.retain_grad()
        model.last(middle.relu() + middle.tanh()).sum().backward()
        true.append(middle.grad.clone())
    with hl.capture(model, "first:grad_output") as acts:
        handle = model.first.register_forward_hook(lambda _module, _args, output: output.register_hook(write) and None)
        model(x).sum().backward()
        handle.remove()
    assert acts["first:grad_output"].equal(true[0])


def test_a_large_gradient_that_became_the_grad_of_a_parameter_stays_right_when_an_optimizer_writes_into_it() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.Parameter(torch.randn(128, 256))

        def forward(self) -> Tensor:
            return self.rows.view(256, 128).view(128, 256)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = Table()

        def forward(self) -> Tensor:
            return self.table().square().sum()

    model = Model()
    with hl.capture(model, "table:grad_output") as acts:
        model().backward()
    true = 2 * model.table.rows.detach()
    assert model.table.rows.grad is not None
    model.table.rows.grad.mul_(0)
    torch._foreach_add_([model.table.rows.grad], 7.0)
    assert acts["table:grad_output"].equal(true)


def test_a_large_gradient_is_shared_if_only_autograd_holds_it_and_copied_otherwise() -> None:
    def is_shared(rows: int) -> bool:
        """Capture a gradient. Return whether the model goes on with the same memory."""
        addresses: list[int] = []

        def hook(_module: nn.Module, _args: Any, output: Tensor) -> None:
            output.register_hook(lambda gradient: addresses.append(torch._C._data_address(gradient)))

        model = Parts()
        handle = model.first.register_forward_hook(hook)
        with hl.capture(model, "first:grad_output") as acts:
            model(torch.randn(rows, 64)).sum().backward()
        handle.remove()
        return [torch._C._data_address(acts["first:grad_output"])] == addresses

    assert is_shared(rows=128)
    assert not is_shared(rows=2)


@pytest.mark.parametrize("lend", [torch.utils.dlpack.to_dlpack, lambda tensor: tensor.__dlpack__()])
def test_a_large_gradient_that_was_lent_through_dlpack_is_copied_at_once(lend: Callable[[Tensor], Any]) -> None:
    lent: list[Any] = []

    class Lend(torch.autograd.Function):
        @staticmethod
        def forward(_context: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(_context: Any, gradient: Tensor) -> Tensor:
            made = torch.ones_like(gradient)
            lent.append(lend(made))
            return made

    class Lends(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Lend.apply(x)

    model, x = nn.Sequential(nn.Softplus(), Lends()), torch.randn(1 << 15, requires_grad=True)
    with hl.capture(model, "0:grad_output") as acts:
        model(x).sum().backward()
    torch.from_dlpack(lent[0]).fill_(7)
    assert acts["0:grad_output"].eq(1).all()


def test_the_gradient_of_a_layer_that_returns_a_view_can_be_used_like_any_tensor() -> None:
    model, x = nn.Sequential(nn.Linear(64, 64), nn.GELU()), torch.randn(8, 64, 64)
    with hl.capture(model, "0:grad_output") as acts:
        model(x).sum().backward()
    gradient = acts["0:grad_output"]
    assert gradient.shape == (8, 64, 64)
    assert not gradient._is_view()
    gradient.add_(torch.randn(64, requires_grad=True)).detach_()
