"""On a CUDA device: methods, functions and parameters, eager and compiled, with autograd's threads."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hookline as hl
from tests.errors.wording import says

pytestmark = [
    pytest.mark.gpu,
    # Dynamo asks every tensor that enters a graph for its `.grad`.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
]


class Attention(nn.Module):
    """Attention with bare parameters, a helper method and a function that writes in place."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.W_in = nn.Parameter(torch.randn(width, 3 * width) / width**0.5)
        self.W_out = nn.Parameter(torch.randn(width, width) / width**0.5)

    def split_heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (4, -1)).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split_heads(part) for part in (x @ self.W_in).chunk(3, dim=-1))
        scores = q @ k.mT
        scores *= 0.5
        pattern = F.softmax(scores, dim=-1)
        return self.attend(pattern, v) @ self.W_out

    def attend(self, pattern: Tensor, v: Tensor) -> Tensor:
        return (pattern @ v).transpose(1, 2).flatten(-2)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(Attention() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.h:
            x = x + block(x)
        return x


PLACES = ("h.0/softmax", "h.1.split_heads()#1", "h.0.W_in/matmul", "h.1.W_out:param", "h.0/mul_", "h.1/matmul#1:input")
EDITS: dict[str, Any] = {"h.0/softmax": 0.25, "h.1.W_out:param": 0.1, "h.0.W_in/*": 0.5, "h.1/mul_": 0.0}


def twins() -> tuple[Model, Model, Tensor]:
    """Return the same model on the device and on the CPU, both in double precision, and an input."""
    torch.manual_seed(0)
    model = Model().double()
    return copy.deepcopy(model).cuda(), model, torch.randn(2, 5, 32, dtype=torch.float64)


def gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad.cpu() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("place", PLACES)
def test_what_passes_on_the_device_is_what_passes_on_the_cpu_and_the_output_stays_the_same(place: str) -> None:
    model, twin, x = twins()
    bare = model(x.cuda())
    with hl.capture(model, place) as acts:
        output = model(x.cuda())
    _, expected = hl.run(twin, x, capture=place)
    assert torch.equal(output, bare)
    torch.testing.assert_close(acts[place].cpu(), expected[place])


@pytest.mark.parametrize("place", EDITS)
@pytest.mark.parametrize("checkpointed", [False, True])
def test_patches_and_their_gradients_are_those_of_the_cpu(place: str, checkpointed: bool) -> None:
    found = []
    for model, x in zip(twins()[:2], (twins()[2].cuda(), twins()[2]), strict=True):
        with hl.patch(model, {place: EDITS[place]}):
            output = checkpoint(model, x, use_reentrant=False) if checkpointed else model(x)
        (output**2).sum().backward()  # On CUDA, autograd's threads run this, after the block.
        found.append((output.detach().cpu(), gradients(model)))
    torch.testing.assert_close(found[0], found[1])


def test_gradients_of_functions_and_operations_arrive_from_autograds_threads() -> None:
    model, twin, x = twins()
    places = ("h.0/softmax:grad_output", "h.1.W_in/matmul:grad_output", "h.0/mul_:grad_output")
    caches = []
    for one, value in ((model, x.cuda()), (twin, x)):
        with hl.capture(one, *places) as acts:
            (one(value) ** 2).sum().backward()
        caches.append(acts.to("cpu"))
    for place in places:
        torch.testing.assert_close(caches[0][place], caches[1][place])


@pytest.mark.parametrize("place", ["h.1.attend()", "h.0.W_in/matmul", "h.1.W_out:param"])
def test_methods_and_parameters_are_in_the_graph_that_inductor_compiles(place: str) -> None:
    model, _, x = twins()
    model, x = model.float(), x.float().cuda()
    compiled = torch.compile(model, fullgraph=True)
    with hl.capture(model, place) as expected:
        bare = model(x)
    compiled(x)
    with hl.capture(compiled, place) as acts:
        output = compiled(x)
    torch.testing.assert_close(output, bare, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(acts[place], expected[place], rtol=1e-3, atol=1e-3)
    with hl.edit(compiled, place, lambda value: value * 0), hl.edit(model, place, lambda value: value * 0):
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-3, atol=1e-3)


def test_a_captured_parameter_keeps_its_memory_and_a_fused_optimizer_does_not_reach_the_copy() -> None:
    model, _, x = twins()
    weight = model.h[0].W_in
    address, before = weight.data_ptr(), weight.detach().clone()
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    with hl.capture(model, "h.0.W_in:param", "h.0/matmul#0:inputs") as acts:
        model(x.cuda()).sum().backward()
    optimizer.step()
    assert weight.data_ptr() == address
    assert torch.equal(acts["h.0.W_in:param"], before)
    assert torch.equal(acts["h.0/matmul#0:inputs"]["other"], before)
    assert not torch.equal(weight, before)


def test_a_fused_kernel_on_the_device_names_the_eager_implementation() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 64, "vocab_size": 50, "bos_token_id": 0, "eos_token_id": 0}
    model = transformers.GPT2Model(transformers.GPT2Config(**sizes)).cuda().half().eval()
    ids = torch.arange(6, device="cuda")[None]
    with (
        pytest.raises(hl.NeverFired, match=says("scaled_dot_product_attention eager")),
        hl.capture(model, "h.0.attn/softmax"),
    ):
        model(ids)
    model.set_attn_implementation("eager")
    _, acts = hl.run(model, ids, capture="h.0.attn/softmax")
    torch.testing.assert_close(
        acts["h.0.attn/softmax"].sum(-1), torch.ones(1, 2, 6).cuda().half(), rtol=1e-2, atol=1e-2
    )
