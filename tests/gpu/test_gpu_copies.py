"""On a CUDA device: whatever is written later, a captured value stays the same, or reading it raises StaleValue."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookline as hl
from tests.errors.wording import says
from tests.support.gpu import DEVICE, WRITES, Overwrites, foreach_add, is_right_or_told

pytestmark = [
    pytest.mark.gpu,
    # Dynamo asks every tensor that enters a graph for its `.grad`.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
    # Torch records an empty graph to create the memory pool of others, and warms modules up on a separate stream.
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning"),
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match:UserWarning"),
]


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_captured_value_stays_what_it_was_whatever_writes_into_it_later(write: str, mode: Callable[[], Any]) -> None:
    model = Overwrites(WRITES[write]).to(DEVICE)
    x = torch.randn(5, 8, device=DEVICE)
    with mode():
        expected = model.first(x)
        torch.manual_seed(1)
        plain = model(x)
        with hl.capture(model, "first", "second:input") as acts:
            torch.manual_seed(1)
            output = model(x)
        assert torch.equal(acts["first"], expected)
        assert torch.equal(model.second(acts["second:input"]), plain)
        assert not torch.equal(acts["first"], acts["second:input"])
        assert torch.equal(output, plain)


def foreach_copy(y: Tensor) -> None:
    torch._foreach_copy_([y], [torch.ones_like(y)])


FOREACH = pytest.mark.parametrize("write", [foreach_add, foreach_copy])


@FOREACH
def test_a_foreach_function_that_writes_through_is_told_when_the_value_is_read(write: Callable[[Tensor], None]) -> None:
    model, x = Overwrites(write).to(DEVICE), torch.randn(5, 8, device=DEVICE)
    with torch.no_grad():
        expected = model.first(x)
        with hl.capture(model, "first") as acts:
            model(x)
        with hl.capture(model, "first", clone=True) as copied:
            model(x)
    with pytest.raises(hl.StaleValue, match=says("may have been overwritten foreach", "first")):
        acts["first"]
    assert torch.equal(copied["first"], expected)


@pytest.mark.parametrize("count", [lambda y: y.copy_(y), lambda y: y.t_().t_()], ids=["copy_", "t_"])
def test_a_write_that_changes_nothing_is_not_called_an_overwrite(count: Callable[[Tensor], object]) -> None:
    model, x = Overwrites(count).to(DEVICE), torch.randn(5, 8, device=DEVICE)
    with torch.no_grad():
        expected = model.first(x)
        with hl.capture(model, "first") as acts:
            model(x)
        with hl.capture(model, "first", clone=True) as copied:
            model(x)
    with pytest.raises(hl.StaleValue, match=says("may have been overwritten", "first")):
        acts["first"]
    assert torch.equal(copied["first"], expected)


def test_torch_shows_nothing_by_which_a_foreach_write_differs_from_a_copy_onto_itself() -> None:
    """If this fails, torch can now tell the two apart, and a copy onto itself need not raise StaleValue any more."""

    def left_by(write: Callable[[Tensor], object]) -> tuple[Any, ...]:
        own = torch.ones(5, 8, device=DEVICE)
        kept = torch._lazy_clone(own)
        write(own)
        shares = torch._C._data_address(own) == torch._C._data_address(kept)
        is_cow = torch._C._is_cow_tensor(own), torch._C._is_cow_tensor(kept)
        uses = torch._C._storage_Use_Count(own.untyped_storage()._cdata), own._use_count()
        return own._version, kept._version, shares, is_cow, uses, own.grad_fn, own.shape, own.stride()

    writes, copies = left_by(foreach_add), left_by(lambda y: y.copy_(y))
    assert writes == copies
    assert writes[2]


def test_a_buffer_copied_onto_itself_can_be_read() -> None:
    """Tensors that the model held before the forward are copied when they are captured."""

    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("buffer", torch.arange(64.0 * 1024).reshape(64, 1024))
            self.reads = nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            y = self.reads(self.buffer)
            self.buffer.copy_(self.buffer)
            return x + y

    model = Reads().to(DEVICE)
    with torch.no_grad(), hl.capture(model, "reads") as acts:
        model(torch.ones(64, 1024, device=DEVICE))
    assert torch.equal(acts["reads"], model.buffer)


def test_a_real_copy_stays_what_it_was_also_where_torch_counts_no_write() -> None:
    """`_foreach_zero_`, unlike other foreach functions, does not count up the version, so the write is undetectable."""
    model, x = Overwrites(lambda y: torch._foreach_zero_([y])).to(DEVICE), torch.randn(5, 8, device=DEVICE)
    with torch.no_grad():
        expected = model.first(x)
        with hl.capture(model, "first", "first[:2]", clone=True) as acts:
            model(x)
    assert torch.equal(acts["first"], expected)
    assert torch.equal(acts["first[:2]"], expected[:2])


class ReturnsParameter(nn.Module):
    """Returns a part of a parameter, as learned position embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(5, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.positions[: x.shape[0]]


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("kind", ["foreach", "fused", "plain"])
def test_a_captured_part_of_a_parameter_stays_what_it_was_when_an_optimizer_steps(kind: str, grad: bool) -> None:
    """The fused optimizers write through a copy-on-write tensor and do not count up its version."""
    model = nn.Sequential(ReturnsParameter()).to(DEVICE)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, foreach=kind == "foreach", fused=kind == "fused")
    x = torch.randn(3, 8, device=DEVICE)
    with torch.set_grad_enabled(grad), hl.capture(model, "0") as acts:
        model(x)
    expected = model[0].positions[:3].detach().clone()
    model(x).sum().backward()
    optimizer.step()
    assert not torch.equal(model[0].positions[:3], expected)
    assert is_right_or_told(lambda: acts["0"], expected, "clone=True")


def test_a_foreach_function_in_inference_mode_does_not_change_a_captured_value_in_silence() -> None:
    """Inference tensors have no version counter, so the write is undetectable."""
    model, x = Overwrites(foreach_add).to(DEVICE), torch.randn(5, 8, device=DEVICE)
    with torch.inference_mode():
        expected = model.first(x)
        with hl.capture(model, "first") as acts:
            model(x)
        assert is_right_or_told(lambda: acts["first"], expected, "clone=True")


def test_a_foreach_function_does_not_write_into_what_the_caller_holds() -> None:
    model, x = Overwrites(foreach_add).to(DEVICE), torch.randn(5, 8, device=DEVICE)
    given, before = torch.randn(5, 8, device=DEVICE), x.clone()
    kept = given.clone()
    with torch.no_grad():
        with hl.patch(model, {"first": given}):
            model(x)
        assert torch.equal(given, kept)
        with hl.skip(model, "first", given):
            model(x)
        assert torch.equal(given, kept)
        with hl.edit(model, "first", lambda value: given):
            model(x)
        assert torch.equal(given, kept)
        with hl.skip(model, "first"):
            model(x)
        assert torch.equal(x, before)


class Residual(nn.Module):
    """Passes its first layer's input to both sides of a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + x


def double_data(value: Tensor) -> Tensor:
    value.data.mul_(2)
    return value


def double_foreach(value: Tensor) -> Tensor:
    torch._foreach_mul_([value], 2.0)
    return value


IN_PLACE: dict[str, Callable[[Tensor], Tensor]] = {
    "mul_": lambda value: value.mul_(2),
    ".data": double_data,
    "foreach": double_foreach,
}


@pytest.mark.parametrize("way", IN_PLACE)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("streams", [False, True], ids=["default stream", "another stream"])
def test_an_edit_in_place_takes_effect_and_reaches_nobody_else(
    way: str, mode: Callable[[], Any], streams: bool
) -> None:
    model, x = Residual().to(DEVICE), torch.randn(5, 8, device=DEVICE)
    stream = torch.cuda.Stream() if streams else torch.cuda.current_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with mode():
        expected = model.inner(x * 2) + x
        torch.cuda.synchronize()
        try:
            with torch.cuda.stream(stream), hl.edit(model, "inner:input", IN_PLACE[way]):
                output = model(x)
        except hl.EditError:
            assert way == "foreach"
            return
        torch.cuda.synchronize()
        torch.testing.assert_close(output, expected)


def test_a_value_inside_a_transform_of_torch_func_is_refused() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8)).to(DEVICE), torch.randn(5, 8, device=DEVICE)
    with pytest.raises(hl.HooklineError, match=says("a value inside vmap", "0")), hl.capture(model, "0"):
        torch.func.vmap(model)(x)


def test_a_gradient_that_clipping_writes_into_later_is_right_or_told() -> None:
    """Clipping uses foreach functions, and a leaf's gradient may share memory with the captured one."""
    model, x = nn.Linear(8, 8, device=DEVICE), torch.randn(5, 8, device=DEVICE, requires_grad=True)
    with hl.capture(model, ":grad_input") as acts:
        model(x).square().sum().backward()
    assert x.grad is not None
    expected = x.grad.clone()
    torch.nn.utils.clip_grad_norm_([x], 1e-3, foreach=True)
    assert is_right_or_told(lambda: acts[":grad_input"], expected, "clone=True")


def test_an_empty_value_is_never_stale() -> None:
    """An expert that gets no token returns such a value."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True)).to(DEVICE)
    with torch.no_grad(), hl.capture(model, "0") as acts:
        model(torch.empty(0, 8, device=DEVICE))
    assert acts["0"].shape == (0, 8)


def test_a_sparse_value_that_is_overwritten_later_stays_what_it_was() -> None:
    model = nn.Sequential(nn.Identity())
    x = torch.eye(3, device=DEVICE).to_sparse()
    with torch.no_grad(), hl.capture(model, "0") as acts:
        model(x)
    x.mul_(2)
    assert torch.equal(acts["0"].to_dense(), torch.eye(3, device=DEVICE))


def test_a_kernel_that_inductor_made_writes_into_the_models_value_and_not_the_captured_one() -> None:
    double = torch.compile(lambda y: y.mul_(2))
    model, x = Overwrites(double).to(DEVICE), torch.randn(5, 8, device=DEVICE)
    with torch.no_grad():
        expected = model.first(x)
        plain = model(x)
        with hl.capture(model, "first") as acts:
            output = model(x)
    assert torch.equal(acts["first"], expected)
    assert torch.equal(output, plain)
