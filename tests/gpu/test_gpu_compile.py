"""On a CUDA device: compiled models with and without CUDA graphs, whose memory the next run reuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import hookline as hl
from tests.support.models import GPT, tokens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("fresh_compiler"),
    # Dynamo asks every tensor that enters a graph for its `.grad`.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning"),
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match:UserWarning"),
]

MODES = ["default", "reduce-overhead"]
RUNS = 5  # Two runs to warm up and record a CUDA graph, then three replays.


def made(mode: str) -> tuple[GPT, Any, Tensor]:
    model = GPT(depth=2).to("cuda")
    return model, torch.compile(model, mode=mode, fullgraph=True), tokens().to("cuda")


def other() -> tuple[Any, Tensor]:
    """Return another compiled function, whose CUDA graph uses the same memory, and its input."""
    return torch.compile(lambda x: (x.sin(), x * 3, x - 1, x + 7), mode="reduce-overhead"), torch.randn(2, 5, 8).cuda()


def assert_close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def eager(model: nn.Module, x: Tensor, where: str = "h.*") -> dict[str, Tensor]:
    with hl.capture(model, where) as acts:
        model(x)
    return dict(acts)


@pytest.mark.parametrize("mode", MODES)
def test_one_graph_serves_a_block_however_often_it_is_entered_and_whatever_number_is_put_in(mode: str) -> None:
    model, compiled, x = made(mode)
    with torch.no_grad():
        compiled(x)
        for time in range(12):
            with hl.patch(compiled, {"h.0[:, 0]": time / 4}), hl.capture(compiled, "h.*") as acts:
                output = compiled(x).clone()
            with hl.patch(model, {"h.0[:, 0]": time / 4}), hl.capture(model, "h.*") as expected:
                assert_close(output, model(x))
            assert_close(dict(acts), dict(expected))
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["inductor"]["cudagraph_skips"]


@pytest.mark.parametrize("mode", MODES)
def test_training_under_compile_has_the_values_and_gradients_of_the_model(mode: str) -> None:
    model, compiled, x = made(mode)
    expected = eager(model, x)
    model(x).sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    for _ in range(RUNS):
        model.zero_grad()
        with hl.capture(compiled, "h.*") as acts:
            compiled(x).sum().backward()
        assert_close(dict(acts), expected)
        assert_close([parameter.grad for parameter in model.parameters()], gradients)


def test_what_a_block_captured_stays_when_the_cuda_graph_is_replayed() -> None:
    model, compiled, x = made("reduce-overhead")
    another, y = other()
    with torch.no_grad():
        expected = eager(model, x)
        for _ in range(RUNS):
            with hl.capture(compiled, "h.*") as acts:
                compiled(x)
            another(y)
            compiled(x * 2)
            with hl.capture(compiled, "h.*"):
                compiled(x * 3)
            assert_close(dict(acts), expected)


def test_what_hooks_that_rest_captured_stays_when_other_graphs_are_replayed() -> None:
    model, compiled, x = made("reduce-overhead")
    hooks = hl.Hooks(compiled)
    acts = hooks.capture("h.*")
    with torch.no_grad():
        hooks.deactivate()
        expected = eager(model, x)
        for _ in range(RUNS):
            hooks.activate()
            compiled(x)
            hooks.deactivate()
            compiled(x * 2)
            assert_close(dict(acts), expected)
    hooks.remove()


def test_every_way_to_read_a_value_takes_it_out_of_the_cuda_graph() -> None:
    model, compiled, x = made("reduce-overhead")
    with torch.no_grad():
        expected = eager(model, x)["h.1"]
        for _ in range(RUNS):
            with hl.capture(compiled, "h.*") as acts:
                compiled(x)
                read = [acts["h.1"], acts.calls("h.1")[0], acts.select("h.1")["h.1"], dict(acts)["h.1"]]
                read.append(acts.to("cpu")["h.1"].cuda())
                compiled(x * 2)
            for value in read:
                assert_close(value, expected)


def test_a_value_that_another_compiled_run_has_overwritten_before_it_was_read_is_refused() -> None:
    model, compiled, x = made("reduce-overhead")
    another, y = other()
    told = []
    with torch.no_grad():
        expected = eager(model, x)
        for _ in range(RUNS):
            with hl.capture(compiled, "h.*") as acts:
                compiled(x)
                first = acts["h.0"]
                kept = another(y)
            assert_close(first, expected["h.0"])
            assert "(2, 5, 8)" in repr(acts)
            try:
                assert_close(acts["h.1"], expected["h.1"])
            except hl.StaleValue as error:
                told.append(str(error))
        del kept
    assert len(told) >= 2
    assert all("'h.1' is gone: it was in the memory of a CUDA graph" in text for text in told)


def test_a_forward_in_several_cuda_graphs_keeps_the_values_of_each() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 8)
            self.b = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            torch._dynamo.graph_break()
            return self.b(x).relu()

    model, x = Broken().to("cuda"), tokens().to("cuda")
    compiled: Any = torch.compile(model, mode="reduce-overhead")
    with torch.no_grad():
        expected = eager(model, x, "*")
        for _ in range(RUNS):
            with hl.capture(compiled, "*") as acts:
                compiled(x)
            assert_close(dict(acts), expected)


def test_a_patch_of_another_tensor_each_time_is_replayed_with_that_tensor() -> None:
    model, compiled, x = made("reduce-overhead")
    with torch.no_grad():
        for _ in range(RUNS):
            value = torch.randn_like(x)
            with hl.patch(compiled, {"h.0": value}):
                output = compiled(x).clone()
            with hl.patch(model, {"h.0": value}):
                assert_close(output, model(x))
    assert counters["stats"]["unique_graphs"] == 1
