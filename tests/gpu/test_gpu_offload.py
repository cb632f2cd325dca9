"""capture(device="cpu") on a CUDA device: values are right, the forward never waits, and memory is bounded."""

from __future__ import annotations

import copy
import itertools
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hookline as hl
from hookline._kernel import offload
from tests.errors.wording import says
from tests.support.gpu import WRITES, Overwrites, held, small_gpt, stages_of, wide_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning"),
    pytest.mark.filterwarnings("ignore:Casting complex values to real:UserWarning"),
]

DEVICE = "cuda"
MEBIBYTE = 1 << 20
LONG = 100_000_000  # Cycles: about 50 ms.


def aside() -> torch.cuda.Stream:
    """Return the stream on which large values are copied."""
    return offload._asides.setdefault(0, torch.cuda.Stream(0))


def hold_up(stream: torch.cuda.Stream, cycles: int = LONG) -> None:
    """Delay the next work on a stream."""
    with torch.cuda.stream(stream):
        torch.cuda._sleep(cycles)


def copy_of(acts: hl.Cache, site: str) -> Any:
    """Return the stored object of a site without reading its value."""
    return acts._find(site).value


@contextmanager
def limited_to(size: int) -> Iterator[None]:
    before, offload.pinned.limit = offload.pinned.limit, size
    try:
        yield
    finally:
        offload.pinned.limit = before


def pinned_bytes() -> int:
    """Return the bytes of pinned memory that hookline's values hold."""
    return offload.pinned.count()


class Passes(nn.Module):
    """Returns the result of a function of its input."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


def kept_of(function: Callable[[Tensor], Any], x: Tensor, **options: Any) -> Any:
    """Return the captured copy of function(x)."""
    model = nn.Sequential(Passes(function))
    with hl.capture(model, "0", device="cpu", **options) as acts:
        model(x)
    return acts["0"]


SHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "as it is": lambda x: x,
    "small": lambda x: x[:3],
    "one number": lambda x: x.sum(),
    "empty": lambda x: x[:0],
    "transposed": lambda x: x.t(),
    "a small transposed one": lambda x: x[:4, :5].t(),
    "with gaps": lambda x: x[:, ::2],
    "small, with gaps": lambda x: x[:4, ::2],
    "one column": lambda x: x[:, 0],
    "expanded": lambda x: x[:1].expand(700, -1),
    "expanded between": lambda x: x[:, None].expand(-1, 3, -1),
    "one number expanded": lambda x: x.sum().expand(1000, 1000),
    "two dimensions of one number": lambda x: x[:1, :1].expand(5, 1),
    "permuted, with gaps": lambda x: x.view(8, 64, 512)[:, ::2].permute(2, 0, 1),
    "channels last": lambda x: x.view(1, 8, 64, 512).contiguous(memory_format=torch.channels_last),
    "a diagonal": lambda x: x.diagonal(),
    "as strided, overlapping": lambda x: x.as_strided((500, 512), (1, 1)),
    "conjugate": lambda x: torch.complex(x, x).conj(),
    "negative": lambda x: torch.complex(x, x).conj().imag,
    "sparse": lambda x: x[:4].to_sparse(),
}


@pytest.mark.parametrize("shape", SHAPES)
@torch.no_grad()
def test_a_value_of_any_shape_is_what_a_plain_copy_is(shape: str) -> None:
    x = torch.randn(512, 512, device=DEVICE)
    expected = SHAPES[shape](x).to("cpu")
    kept = kept_of(SHAPES[shape], x)
    assert kept.device.type == "cpu"
    assert kept.shape == expected.shape
    assert torch.equal(kept.to_dense(), expected.to_dense())
    assert kept.is_sparse == expected.is_sparse


DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64),
]


@pytest.mark.parametrize("size", [64, 1 << 20])
@pytest.mark.parametrize("source", DTYPES, ids=str)
@torch.no_grad()
def test_a_value_is_cast_as_torch_casts_it(source: torch.dtype, size: int) -> None:
    values = torch.randn(size) * 300
    values[:8] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e30, -1e30, 65519.0])
    if not source.is_floating_point and not source.is_complex:
        values = values.nan_to_num(0, 0, 0).clamp(-1e9, 1e9)
    x = values.to(source).to(DEVICE)
    for target in (None, *DTYPES):
        expected = x.to("cpu", target or source)
        kept = kept_of(lambda value: value, x, dtype=target)
        assert kept.dtype is expected.dtype
        assert torch.equal(
            kept.nan_to_num(1.5) if kept.is_complex() else kept.double().nan_to_num(1.5),
            expected.nan_to_num(1.5) if kept.is_complex() else expected.double().nan_to_num(1.5),
        ), target


@pytest.mark.parametrize("dtype", [None, torch.float16, torch.float64])
@torch.no_grad()
def test_a_forward_waits_for_nothing(dtype: torch.dtype | None) -> None:
    model, x = wide_model(nn.ReLU(inplace=True))
    with hl.capture(model, "*", "*[0]", device="cpu", dtype=dtype):  # The first capture pins memory.
        model(x)
    torch.cuda.synchronize()
    hold_up(torch.cuda.current_stream())
    try:
        torch.cuda.set_sync_debug_mode("error")
        with hl.capture(model, "*", "*[0]", device="cpu", dtype=dtype) as acts:
            model(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not torch.cuda.current_stream().query()
    assert all(isinstance(copy_of(acts, site), offload.Copy) for site in ("0", "2[0]"))
    assert torch.equal(acts["0"], model[0](x).to("cpu", dtype or torch.float32))
    assert torch.equal(acts["1[0]"], model[0](x).relu()[0].to("cpu", dtype or torch.float32))


@torch.no_grad()
def test_reading_waits_for_its_own_copy_alone() -> None:
    model, x = wide_model()
    expected = model[0](x).cpu()
    torch.cuda.synchronize()
    with hl.capture(model, "0", "0[0]", device="cpu") as acts:
        model(x)
    hold_up(torch.cuda.current_stream(), 10 * LONG)
    assert torch.equal(acts["0"], expected)
    assert torch.equal(acts["0[0]"], expected[0])
    assert not torch.cuda.current_stream().query()
    torch.cuda.synchronize()


FOREACH: dict[str, Callable[[Tensor], object]] = {
    "_foreach_mul_": lambda y: torch._foreach_mul_([y], 2.0),
    "_foreach_zero_": lambda y: torch._foreach_zero_([y]),
    "_foreach_add_": lambda y: torch._foreach_add_([y], 1.0),
}


@pytest.mark.parametrize("width", [8, 1024])
@pytest.mark.parametrize("write", [*WRITES, *FOREACH])
@torch.no_grad()
def test_what_the_model_overwrites_before_the_copy_is_made_is_kept(write: str, width: int) -> None:
    model = Overwrites({**WRITES, **FOREACH}[write], width).to(DEVICE)
    x = torch.randn(width, width, device=DEVICE)
    expected = model.first(x).cpu()
    torch.cuda.synchronize()
    hold_up(aside())
    with hl.capture(model, "first", device="cpu") as acts:
        model(x)
    assert isinstance(copy_of(acts, "first"), offload.Copy)
    torch.cuda.current_stream().synchronize()
    assert torch.equal(acts["first"], expected)


@torch.no_grad()
def test_memory_that_the_model_uses_again_before_the_copy_is_made_does_not_matter() -> None:
    model, x = wide_model(*(nn.Linear(1024, 1024, bias=False) for _ in range(6)))
    expected = [x]
    for layer in model:
        expected.append(layer(expected[-1]))
    torch.cuda.synchronize()
    for _ in range(3):
        hold_up(aside())
        with hl.capture(model, "*", device="cpu") as acts:
            model(x)
        torch.cuda.current_stream().synchronize()
        junk = [torch.full_like(x, torch.nan) for _ in range(8)]
        torch.cuda.current_stream().synchronize()
        assert all(torch.equal(acts[str(at)], value.cpu()) for at, value in enumerate(expected[1:]))
        del junk


@pytest.mark.parametrize("captured_twice", [False, True])
@torch.no_grad()
def test_a_value_that_is_captured_on_the_device_too_is_right_in_both_places(captured_twice: bool) -> None:
    model, x = wide_model(nn.ReLU(inplace=True))
    expected = model[0](x)
    hold_up(aside())
    with hl.capture(model, "0") as first, hl.capture(model, "0", device="cpu") as second:
        with hl.capture(model, "0", device="cpu") if captured_twice else hl.capture(model, "1"):
            model(x)
    assert torch.equal(first["0"], expected)
    assert torch.equal(second["0"], expected.cpu())


@pytest.mark.parametrize("width", [16, 1024])
@torch.no_grad()
def test_a_model_on_another_stream_is_followed(width: int) -> None:
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(inplace=True), nn.Linear(width, width)).to(DEVICE)
    x = torch.randn(width, width, device=DEVICE)
    expected = model[0](x).cpu()
    torch.cuda.synchronize()
    for _ in range(3):
        stream = torch.cuda.Stream()
        hold_up(stream)
        hold_up(aside(), LONG // 2)
        with torch.cuda.stream(stream), hl.capture(model, "0", "1", device="cpu") as acts:
            model(x)
        assert not stream.query()
        assert torch.cuda.current_stream() == torch.cuda.default_stream()
        assert torch.equal(acts["0"], expected)
        assert torch.equal(acts["1"], expected.relu())


@pytest.mark.parametrize("width", [16, 1024])
def test_what_is_captured_in_inference_mode_is_of_use_outside(width: int) -> None:
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(inplace=True)).to(DEVICE)
    x = torch.randn(width, width, device=DEVICE)
    for dtype in (None, torch.float16, torch.float64):
        with torch.inference_mode(), hl.capture(model, "0", "0[0]", device="cpu", dtype=dtype) as acts:
            model(x)
            first = acts["0[0]"]
        assert isinstance(copy_of(acts, "0"), offload.Copy)
        with torch.no_grad():
            assert torch.equal(acts["0"], model[0](x).to("cpu", dtype or torch.float32))
        for value in (first, acts["0"]):
            assert not value.is_inference()
            (value.requires_grad_() ** 2).sum().backward()


def test_values_under_autocast_keep_their_dtype() -> None:
    model, x = wide_model()
    with torch.autocast(DEVICE, torch.bfloat16), hl.capture(model, "0", "1", "0:grad_output", device="cpu") as acts:
        model(x).float().sum().backward()
    assert acts["0"].dtype is acts["1"].dtype is torch.bfloat16
    with torch.no_grad(), torch.autocast(DEVICE, torch.bfloat16):
        assert torch.equal(acts["0"], model[0](x).cpu())
    model.zero_grad()


@torch.no_grad()
def test_a_default_device_does_not_matter() -> None:
    model, x = wide_model()
    with torch.device(DEVICE), hl.capture(model, "0", "0[0]", device="cpu") as acts:
        model(x)
        assert acts["0"].device.type == acts["0[0]"].device.type == "cpu"
    assert torch.equal(acts["0"], model[0](x).cpu())


@torch.no_grad()
def test_nested_values_parts_and_transforms_go_the_same_way() -> None:
    x = torch.randn(512, 512, device=DEVICE)
    here = torch.randn(3)

    def nested(value: Tensor) -> dict[str, Any]:
        return {"a": value, "b": (value[:2] * 2, here, None, "text"), "c": [value.sum()]}

    hold_up(torch.cuda.current_stream())
    kept = kept_of(nested, x)
    assert torch.equal(kept["a"], x.cpu())
    assert torch.equal(kept["b"][0], x[:2].cpu() * 2)
    assert torch.equal(kept["b"][1], here)
    assert kept["b"][2:] == (None, "text")
    assert torch.equal(kept["c"][0], x.sum().cpu())
    model = nn.Sequential(Passes(nested))
    with hl.capture(model, '0["a"][:, -1]', '0["a"][*]', '0["c"][0]', device="cpu") as acts:
        model(x)
    assert torch.equal(acts['0["a"][:, -1]'], x[:, -1].cpu())
    assert torch.equal(acts['0["a"][7]'], x[7].cpu())
    assert torch.equal(acts['0["c"][0]'], x.sum().cpu())
    doubled = kept_of(lambda value: value, x, transform=lambda value: (value * 2, value.mean()))
    assert torch.equal(doubled[0], x.cpu() * 2)
    assert torch.equal(doubled[1], x.mean().cpu())
    assert torch.equal(kept_of(lambda value: value, x, transform=lambda value: value), x.cpu())


def test_a_part_of_a_nested_value_on_the_host_that_is_overwritten_is_told() -> None:
    here = torch.zeros(3)
    model = nn.Sequential(Passes(lambda value: (value, here)))
    x = torch.randn(4, device=DEVICE)
    with hl.capture(model, "0", device="cpu", clone=False) as acts:
        model(x)
    assert torch.equal(acts["0"][0], x.cpu())
    here.add_(1)
    with pytest.raises(hl.StaleValue, match="overwritten"):
        acts["0"]


@torch.no_grad()
def test_values_that_were_read_stay_right_for_ever() -> None:
    model, x = wide_model()
    expected = model[0](x).cpu()
    hooks = hl.Hooks(model)
    cache = hooks.capture("0", device="cpu")
    model(x)
    value, view = cache["0"], cache["0"][5]
    pickled = pickle.dumps(copy.deepcopy(value[:2]))
    for number in range(5):
        model(torch.full_like(x, float(number)))
    torch.cuda.synchronize()
    assert torch.equal(value, expected)
    del value
    for number in range(5):
        model(torch.full_like(x, float(number)))
    torch.cuda.synchronize()
    assert torch.equal(view, expected[5])
    assert torch.equal(pickle.loads(pickled), expected[:2])
    assert cache["0"] is cache["0"]
    hooks.remove()


@pytest.mark.parametrize("again", [copy.deepcopy, lambda acts: pickle.loads(pickle.dumps(acts))])
@torch.no_grad()
def test_a_cache_is_copied_and_saved_with_what_is_on_its_way(again: Any, tmp_path: Path) -> None:
    model, x = wide_model()
    expected = model[0](x).cpu()
    hold_up(aside())
    with hl.capture(model, "0", "0[0]", device="cpu", keep="all") as acts:
        model(x)
        model(x)
    other = again(acts)
    for cache in (other, acts):
        assert torch.equal(cache["0"], expected)
        assert torch.equal(cache.calls("0[0]")[0], expected[0])
    acts.save(tmp_path / "acts.safetensors")
    assert torch.equal(hl.Cache.load(tmp_path / "acts.safetensors")["0"], expected)
    assert "float32" in repr(acts)


@pytest.mark.parametrize("size", [8, 1024])
def test_gradients_come_to_the_host_too(size: int) -> None:
    x = torch.randn(size, size, device=DEVICE, requires_grad=True)
    model = nn.Sequential(nn.Linear(size, size), Passes(lambda y: y * y + y.sin()), Passes(lambda y: y * 1)).to(DEVICE)
    with hl.capture(model, "0:grad_output", "0:grad_input", "2:grad_output[0]") as expected:
        model(x).square().sum().backward()
    with hl.capture(model, "0:grad_output", "0:grad_input", "2:grad_output[0]", device="cpu") as acts:
        model(x).square().sum().backward()
    torch._foreach_mul_([x.grad, *(parameter.grad for parameter in model.parameters())], 0.0)
    for site in expected:
        assert acts[site].device.type == "cpu"
        assert torch.equal(acts[site], expected[site].cpu())


def test_a_gradient_that_comes_in_two_parts_is_summed_on_the_host() -> None:
    def used_and_overwritten(y: Tensor) -> Tensor:
        first = y.sum()
        return y.add_(1).square().sum() + first

    model = nn.Sequential(nn.Linear(8, 8), Passes(used_and_overwritten)).to(DEVICE)
    x = torch.randn(4, 8, device=DEVICE)
    with hl.capture(model, "0:grad_output") as expected:
        model(x).backward()
    with hl.capture(model, "0:grad_output", device="cpu") as acts:
        model(x).backward()
    assert torch.equal(acts["0:grad_output"], expected["0:grad_output"].cpu())


def test_a_value_of_the_graph_goes_with_its_graph() -> None:
    model, x = wide_model()
    with hl.capture(model, "0", device="cpu", detach=False) as acts:
        model(x)
    assert acts["0"].device.type == "cpu"
    acts["0"].sum().backward()
    assert model[0].weight.grad is not None
    assert model[0].weight.grad.any()
    model.zero_grad()


def test_a_recomputed_forward_is_seen_once() -> None:
    model, x = wide_model()
    x.requires_grad_()
    with hl.capture(model, "0", device="cpu", keep="all") as acts:
        checkpoint(model, x, use_reentrant=False).sum().backward()
    assert len(acts.calls("0")) == 1
    assert torch.equal(acts["0"], model[0](x).detach().cpu())
    model.zero_grad()


@torch.no_grad()
def test_many_forwards_hold_no_more_pinned_memory_than_the_limit() -> None:
    model, x = wide_model()
    inputs = [torch.randn(4096, 1024, device=DEVICE) for _ in range(6)]
    before = pinned_bytes()
    with limited_to(80 * MEBIBYTE):
        most = 0
        with hl.capture(model, "0", "1", "1[0]", device="cpu", keep="all") as acts:
            for x in inputs:
                model(x)
                most = max(most, pinned_bytes())
        assert 32 * MEBIBYTE <= most <= 80 * MEBIBYTE
        for at, x in enumerate(inputs):
            assert torch.equal(acts.calls("0")[at], model[0](x).cpu())
            assert torch.equal(acts.calls("1")[at], model(x).cpu())
            assert torch.equal(acts.calls("1[0]")[at], model(x)[0].cpu())
        values = acts.calls("0") + acts.calls("1")
        assert sum(value.is_pinned() for value in values) <= 5
        del acts, values
    assert pinned_bytes() == before


@torch.no_grad()
def test_what_somebody_holds_counts_and_the_rest_is_copied_plainly() -> None:
    model, x = wide_model()
    expected = model[0](x).cpu()
    before = pinned_bytes()
    with limited_to(48 * MEBIBYTE):
        values = []
        for _ in range(6):
            with hl.capture(model, "0", device="cpu") as acts:
                model(x)
            values.append(acts["0"][:2])
            assert pinned_bytes() <= 48 * MEBIBYTE
        assert [value.is_pinned() for value in values] == [True, True, True, False, False, False]
        assert all(torch.equal(value, expected[:2]) for value in values)
    with limited_to(MEBIBYTE), hl.capture(model, "0", device="cpu") as acts:
        model(x)
    assert torch.equal(acts["0"], expected)
    del values, acts
    assert pinned_bytes() == before


@torch.no_grad()
def test_torch_keeps_no_more_of_the_memory_than_twice_the_limit() -> None:
    torch._C._host_emptyCache()
    offload.pinned.most.clear()
    torch.cuda.reset_peak_host_memory_stats()
    before = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    with limited_to(64 * MEBIBYTE):
        for power in range(19, 26):
            x = torch.zeros((1 << power) // 4, device=DEVICE)
            model = nn.Sequential(Passes(lambda value: value + 1))
            with hl.capture(model, "0", device="cpu", keep="all") as acts:
                for _ in range(64 * MEBIBYTE >> power):
                    model(x)
            assert all(value[-1] == 1 for value in acts.calls("0"))
            del acts
    after = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    assert after - before <= 128 * MEBIBYTE


@torch.no_grad()
def test_a_slow_link_is_waited_for_before_the_device_is_full() -> None:
    model, x = wide_model(*(nn.Linear(1024, 1024, bias=False) for _ in range(10)))
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    with limited_to(256 * MEBIBYTE):
        torch.cuda.reset_peak_memory_stats()
        before = held()
        hold_up(aside())
        with hl.capture(model, "*", device="cpu") as acts:
            model(x)
        # Three values of the model and at most four in transit. Memory freed while a stream reads it is not reused.
        assert torch.cuda.memory_reserved() / MEBIBYTE - before < 16 * 9
    assert torch.equal(acts["5"], torch.nn.Sequential(*model[:6])(x).cpu())


@torch.no_grad()
def test_a_device_that_is_full_needs_no_room_for_a_copy() -> None:
    x = torch.zeros(64 * MEBIBYTE, device=DEVICE)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 16 * MEBIBYTE) / total)
    try:
        with pytest.raises(torch.cuda.OutOfMemoryError):
            x.clone()
        kept = kept_of(lambda value: value, x)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert kept.shape == x.shape
    assert not kept.any()


@torch.no_grad()
def test_what_is_let_go_before_it_came_is_freed() -> None:
    model, x = wide_model()
    before = pinned_bytes()
    for _ in range(20):
        hold_up(aside(), LONG // 20)
        with hl.capture(model, "*", device="cpu"):
            model(x)
    assert pinned_bytes() == before
    assert len(offload.pinned.unread) == 0


def test_a_recording_of_a_graph_is_refused() -> None:
    model, x = wide_model()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), hl.capture(model, "0", device="cpu").when_missing("ignore"):
        with pytest.raises(hl.HooklineError, match=says("a CUDA graph is being", "0")), torch.cuda.graph(graph):
            model(x)
    torch.cuda.synchronize()


def test_a_value_inside_vmap_is_refused() -> None:
    model, x = wide_model()
    for options in ({}, {"device": "cpu"}):
        with hl.capture(model, "0", **options).when_missing("ignore"):
            with pytest.raises(hl.HooklineError, match="inside vmap"):
                torch.func.vmap(model)(x)


@torch.no_grad()
def test_a_compiled_graph_gives_its_values_to_the_host() -> None:
    model, x = small_gpt()
    compiled = torch.compile(model)
    expected = stages_of(model, x)
    for _ in range(2):
        with hl.capture(compiled, "h.*", device="cpu") as acts:
            compiled(x)
        for number, value in enumerate(expected):
            assert acts[f"h.{number}"].device.type == "cpu"
            assert torch.allclose(acts[f"h.{number}"], value.cpu(), rtol=1e-3, atol=1e-4)
    with hl.capture(model, "h.*", device="cpu") as acts:
        model(x)
    assert torch.equal(acts["h.1"], expected[1].cpu())


@torch.no_grad()
def test_threads_get_their_own_values() -> None:
    model, x = wide_model()
    failures: list[str] = []

    @torch.no_grad()
    def work(number: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for turn in range(8):
                value = torch.full_like(x, number + turn / 16)
                with hl.capture(model, "0", "0[0]", device="cpu", keep="all") as acts:
                    model(value)
                    model(value)
                expected = model[0](value).cpu()
                right = all(torch.equal(one, expected) for one in acts.calls("0"))
                if not right or not torch.equal(acts["0[0]"], expected[0]):
                    failures.append(f"thread {number}, turn {turn}")

    torch.cuda.synchronize()
    with limited_to(160 * MEBIBYTE):
        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures


@torch.no_grad()
def test_two_threads_that_read_one_value_get_the_same() -> None:
    def read(acts: hl.Cache, found: list[Tensor]) -> None:
        found.append(acts["0"])

    model, x = wide_model()
    for _ in range(5):
        hold_up(aside(), LONG // 10)
        with hl.capture(model, "0", device="cpu", dtype=torch.float64) as acts:
            model(x)
        found: list[Tensor] = []
        threads = [threading.Thread(target=read, args=(acts, found)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(value is found[0] for value in found)
        assert len(found) == 4


@torch.no_grad()
def test_a_forward_that_fails_leaves_what_came_before_and_the_stream() -> None:
    def fail(value: Tensor) -> Tensor:
        raise ValueError("on purpose")

    model = nn.Sequential(nn.Linear(1024, 1024), Passes(fail)).to(DEVICE)
    x = torch.randn(512, 1024, device=DEVICE)
    with pytest.raises(ValueError, match="on purpose"), hl.capture(model, "0", device="cpu") as acts:
        model(x)
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert torch.equal(acts["0"], model[0](x).cpu())


def test_a_process_may_end_while_values_are_on_their_way() -> None:
    code = """
import torch
import hookline as hl
model = torch.nn.Sequential(torch.nn.Linear(2048, 2048), torch.nn.ReLU(inplace=True)).cuda()
x = torch.randn(4096, 2048, device="cuda")
hooks = hl.Hooks(model)
hooks.capture("*", "*[0]", device="cpu", keep="all")
model(x)
torch.cuda._sleep(500_000_000)
for _ in range(4):
    model(x)
print("over")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "over\n", "")


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@torch.no_grad()
def test_a_process_that_is_forked_reads_what_was_on_its_way() -> None:
    model, x = wide_model()
    expected = model[0](x).cpu()
    hooks = hl.Hooks(model)
    cache = hooks.capture("0", "0[0]", "0[0, 0]", device="cpu")
    for _ in range(2):
        hold_up(torch.cuda.current_stream())
        hold_up(aside())
        model(x)
        copies = [copy_of(cache, site) for site in ("0", "0[0]", "0[0, 0]")]
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            torch.set_num_threads(1)  # OpenMP's threads do not survive a fork.
            right = [torch.equal(kept.peek(), expected[at]) for kept, at in zip(copies, (..., 0, (0, 0)), strict=True)]
            del copies, hooks, cache  # Free them in this process.
            os._exit(0 if right == [True, True, True] else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert torch.equal(cache["0"], expected)
        assert torch.equal(cache["0[0]"], expected[0])
    hooks.remove()


@torch.no_grad()
def test_small_values_leave_together() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6))).to(DEVICE)
    x = torch.randn(4, 8, device=DEVICE)
    expected = {}
    hooks = hl.Hooks(model)
    cache = hooks.capture("*", "*[0]", device="cpu", keep="all")
    inputs = [torch.randn(4, 8, device=DEVICE).to(torch.float32) for _ in range(3)]
    for x in inputs:
        model(x)
    groups = {id(copy_of(cache, site).group) for site in cache}
    assert len(groups) == 1
    assert all(copy_of(cache, site).event is None for site in cache)
    first = cache["3[0]"]
    assert len({id(copy_of(cache, site).event) for site in cache if site != "3[0]"}) == 1
    assert copy_of(cache, "2").event is not None
    before = pinned_bytes()
    del hooks
    for number, x in enumerate(inputs):
        for at in range(6):
            expected[at] = x = model[at](x)
            assert torch.equal(cache.calls(str(at))[number], expected[at].cpu())
            assert torch.equal(cache.calls(f"{at}[0]")[number], expected[at][0].cpu())
    assert torch.equal(first, expected[3][0].cpu())
    assert pinned_bytes() < before  # The memory of the shared transfer is free again.


@torch.no_grad()
def test_a_value_that_is_small_only_when_cast_may_have_any_strides() -> None:
    x = torch.randn(200, 400, device=DEVICE)  # 320000 bytes.
    kept = kept_of(lambda value: value.t(), x, dtype=torch.float16)
    assert torch.equal(kept, x.t().cpu().half())


@torch.no_grad()
def test_many_small_values_do_not_wait_for_ever() -> None:
    model = nn.Sequential(nn.Linear(256, 256)).to(DEVICE)
    x = torch.randn(128, 256, device=DEVICE)  # 128 KiB.
    hooks = hl.Hooks(model)
    cache = hooks.capture("0", device="cpu", keep="all")
    before = held()
    for _ in range(100):
        model(x)
    assert held() - before < 6
    assert all(torch.equal(value, model[0](x).cpu()) for value in cache.calls("0"))
    hooks.remove()


@torch.no_grad()
def test_random_programs_agree_with_plain_copies() -> None:
    generator = torch.Generator().manual_seed(0)

    def choose(count: int) -> int:
        return int(torch.randint(count, (), generator=generator))

    writes = list(WRITES.values())
    for turn in range(60):
        width = (8, 64, 300, 512, 1024)[choose(5)]
        layers = [Overwrites(writes[choose(len(writes))], width) for _ in range(3)]
        model = nn.Sequential(*layers).to(DEVICE)
        x = torch.randn(width, width, device=DEVICE)
        sites = [
            f"{at}.{name}{part}"
            for at, name, part in itertools.product(range(3), ("first", "second"), ("", ":input", "[0]", "[:, ::3]"))
            if choose(3)
        ]
        options = {"dtype": (None, torch.float16, torch.float64)[choose(3)], "keep": ("last", "all")[choose(2)]}
        torch.manual_seed(turn)
        with hl.capture(model, *sites, clone=True, dtype=options["dtype"]) as expected:
            model(x)
        stream = torch.cuda.current_stream() if choose(2) else torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        torch.manual_seed(turn)
        hold_up(aside(), choose(LONG // 4) + 1)
        with torch.cuda.stream(stream), limited_to(offload.pinned.limit if choose(2) else 5 * MEBIBYTE):
            with hl.capture(model, *sites, device="cpu", **options) as acts:
                model(x)
        for site in sites:
            assert torch.allclose(acts[site], expected[site].cpu(), rtol=1e-3, atol=1e-3, equal_nan=True), (turn, site)
        torch.cuda.synchronize()  # The other stream may still use tensors of this turn.
