"""Features that hookline.compat needs, on a CUDA device: values attached to the graph, copies, backward passes."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookline as hl
from hookline.compat import nice_hooks
from hookline.compat.tacklebox.hook_management import HookManager as Tackle
from hookline.compat.torch_hook_utils import get_layer_outputs, save_maxpool_indices, use_indices_in_maxunpool
from hookline.compat.torchhook import HookManager

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICE = "cuda"


def model_and_input() -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 2)).to(DEVICE)
    return model, torch.randn(3, 4, device=DEVICE)


class Overwrites(nn.Module):
    """Writes into the output of its layer."""

    def __init__(self, write: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        self.write(y)
        return y


@pytest.mark.parametrize("write", [lambda y: y.add_(1), lambda y: y[0].mul_(2), torch.Tensor.relu_])
def test_a_value_of_the_graph_is_what_it_was_after_a_write(write: Callable[[Tensor], Any]) -> None:
    model, x = Overwrites(write).to(DEVICE), torch.randn(5, 4, device=DEVICE)
    before = model.first(x)
    with hl.capture(model, "first", detach=False) as acts:
        model(x)
    assert torch.equal(acts["first"], before)
    acts["first"].sum().backward()
    assert model.first.bias.grad.eq(5).all()


def test_a_foreach_write_into_a_value_of_the_graph_is_told_or_does_not_reach_it() -> None:
    def write(y: Tensor) -> None:
        with torch.no_grad():
            torch._foreach_add_([y], 1.0)

    model, x = Overwrites(write).to(DEVICE), torch.randn(5, 4, device=DEVICE)
    with hl.capture(model, "first", detach=False) as acts:
        model(x)
    with contextlib.suppress(hl.StaleValue):  # Raised if the captured copy shares its memory with the output.
        assert acts["first"].equal(model.first(x))


def test_the_graphs_own_value_is_given_while_nobody_overwrote_it() -> None:
    model, x = model_and_input()
    with hl.capture(model, "1", detach=False) as acts:
        output = model(x)
    (gradient,) = torch.autograd.grad(output.sum(), acts["1"])
    assert torch.equal(gradient, model[2].weight.sum(0).expand(3, 8))


def test_an_edit_on_the_models_own_tensor() -> None:
    model, x = model_and_input()
    with hl.edit(model, "0", lambda value: value.data.zero_(), clone=False):
        output = model(x)
    assert torch.equal(output, model[2].bias.expand(3, 2))


def test_layer_outputs_and_pool_indices() -> None:
    model, x = model_and_input()
    before = model[0](x)
    with get_layer_outputs([("first", model[0])]) as outputs:
        model(x)
    assert torch.equal(outputs["first"], before)
    pool, unpool = nn.Sequential(nn.MaxPool2d(2)), nn.Sequential(nn.MaxUnpool2d(2))
    image = torch.randn(1, 2, 4, 4, device=DEVICE)
    with save_maxpool_indices(pool) as indices:
        pooled = pool(image)
    with use_indices_in_maxunpool(unpool, indices):
        image_again = unpool(pooled)
    assert torch.equal(image_again, torch.where(image_again != 0, image, 0.0))


def test_features_are_on_the_cpu_and_what_passed() -> None:
    model, x = model_and_input()
    before = model[0](x)
    with HookManager(model, max_size=1) as manager:
        manager.add("0")
        model(x)
    (feature,) = manager.get_features("0")
    assert feature.device.type == "cpu"
    assert torch.equal(feature, before.detach().cpu())


def test_activations_and_backward_hooks() -> None:
    model, x = model_and_input()
    seen: list[Any] = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        output, cache = nice_hooks.run(
            model,
            x,
            return_activations=["0", "2[:,0]"],
            full_backward_hooks={
                "2": lambda module, path, grad_input, grad_output: seen.append((grad_input, grad_output))
            },
        )
    output.sum().backward()
    assert torch.equal(cache["0"], model[0](x))
    ((grad_input, grad_output),) = seen
    assert torch.equal(grad_output[0], torch.ones(3, 2, device=DEVICE))
    torch.testing.assert_close(grad_input[0], model[2].weight.sum(0).expand(3, 8))


def test_a_managers_backward_hook_has_the_gradients_of_its_own_use_of_the_input() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.linear(x)

    model, x = Residual().to(DEVICE), torch.randn(2, 4, device=DEVICE, requires_grad=True)
    seen: list[Any] = []
    manager = Tackle()
    manager.register_backward_hook(lambda module, grad_in, grad_out: seen.append(grad_in[0]), linear=model.linear)
    model(x).sum().backward()
    manager.cleanup()
    torch.testing.assert_close(seen[0], model.linear.weight.sum(0).expand(2, 4))
