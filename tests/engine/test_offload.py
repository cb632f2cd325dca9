"""Asynchronous copies to host memory, tested without a CUDA device; test_gpu_offload.py tests them on one.

What stands in for CUDA here is torch's own: streams, events and pinned memory.
"""

from __future__ import annotations

import copy
import os
import pickle
import threading
import time
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookline as hl
from hookline._kernel import offload
from tests.errors.wording import says
from tests.support.quick_python import quick_python
from tests.support.running import python

HERE = hl.Site("h")


class Stream:
    """Stands in for a CUDA stream. On the host everything runs in order anyway."""

    def wait_stream(self, _stream: Stream) -> None:
        """Return at once."""


class Event:
    """Stands in for an event of a CUDA stream, which raises in a forked process."""

    made: weakref.WeakSet[Event]

    def __init__(self) -> None:
        self.waits = 0
        self.made.add(self)

    def record(self, _stream: Stream) -> None:
        self.process = os.getpid()

    def synchronize(self) -> None:
        self.waits += 1
        if self.process != os.getpid():
            raise RuntimeError("CUDA error: initialization error")

    def query(self) -> bool:
        return True


class Memory:
    """The pinned memory that somebody holds."""

    def __init__(self) -> None:
        self.held: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self.empty_like = torch.empty_like

    def take(self, like: Tensor, device: str, pin_memory: bool) -> Tensor:
        assert (device, pin_memory) == ("cpu", True)
        tensor = self.empty_like(like, device=device)
        self.held.add(tensor.untyped_storage())
        return tensor

    def sizes(self) -> list[int]:
        return sorted(storage.nbytes() for storage in self.held)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    """Pretend that the host is a CUDA device: copies are sent, batched and counted as with CUDA."""
    made = Memory()
    for name, stand_in in {
        "current_device": lambda: -1,
        "current_stream": lambda _index=None: Stream(),
        "is_current_stream_capturing": lambda: False,
        "device": lambda _index: nullcontext(),
        "stream": lambda _stream: nullcontext(),
        "Stream": lambda _index: Stream(),
        "Event": Event,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    # A torch that is built with CUDA would look for a device. hookline has this function from torch.
    monkeypatch.setattr(offload, "raw_stream", lambda _index: 0, raising=False)
    monkeypatch.setattr(Event, "made", weakref.WeakSet(), raising=False)
    monkeypatch.setattr(torch, "empty_like", made.take)
    monkeypatch.setattr(Tensor, "record_stream", lambda _self, _stream: None)
    return made


def sent(tensor: Tensor, *options: Any) -> offload.Copy:
    """Send a value, and return it as it is kept."""
    kept = offload.send(tensor, *options)
    assert kept is not None
    return kept


SIZES = pytest.mark.parametrize("size", [4, 100000])


KINDS: dict[str, Tensor] = {
    "one number": torch.tensor(3.0),
    "one number expanded": torch.tensor(3.0).expand(500, 500),
    "small": torch.arange(6.0).view(2, 3),
    "small and transposed": torch.arange(6.0).view(2, 3).t(),
    "small and expanded": torch.arange(6.0)[:, None].expand(6, 4),
    "small, with gaps": torch.arange(100.0)[::7],
    "small, of another dtype": torch.tensor([True, False]),
    "small, complex": torch.tensor([1 + 2j]),
    "large": torch.arange(100000.0),
    "large and transposed": torch.arange(100000.0).view(100, 1000).t(),
    "large, with gaps": torch.arange(300000.0)[::3],
    "large, and small when cast": torch.arange(100000.0).view(100, 1000).t(),
}


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.float16, torch.float64])
def test_a_value_of_any_kind_is_sent_as_it_was(memory: Memory, dtype: torch.dtype | None, together: bool) -> None:
    kinds = {name: tensor for name, tensor in KINDS.items() if dtype is None or tensor.is_floating_point()}
    kept: dict[str, Any] = {}
    for name, tensor in kinds.items():
        kept[name] = sent(tensor, dtype)
        if not together:
            offload.flush()
    offload.flush()
    assert memory.sizes()
    for name, tensor in kinds.items():
        value = kept[name].read(HERE)
        assert value.equal(tensor.to(dtype or tensor.dtype)), name
        assert value.dtype is (dtype or tensor.dtype)
        assert [at for at, step in enumerate(value.stride()) if not step] == [
            at for at, step in enumerate(tensor.stride()) if not step
        ]
    kept.clear()
    del value
    assert not memory.sizes()


@pytest.mark.parametrize("look", [lambda kept: kept.read(HERE), lambda kept: kept.peek()])
@SIZES
def test_a_value_on_its_way_is_waited_for_once(memory: Memory, size: int, look: Any) -> None:
    kept = sent(torch.arange(float(size)))
    offload.flush()
    (event,) = Event.made
    assert event.waits == 0
    first = look(kept)
    assert first.equal(torch.arange(float(size)))
    assert kept.read(HERE) is first is kept.peek()
    assert event.waits == 1


@SIZES
def test_a_value_that_is_sent_and_read_in_inference_mode_is_of_use_outside(memory: Memory, size: int) -> None:
    with torch.inference_mode():
        kept = [sent(torch.arange(float(size))), sent(torch.arange(size).int(), torch.float32)]
        kept[0].read(HERE)
    for one in kept:
        value = one.read(HERE)
        assert not value.is_inference()
        (value.requires_grad_() ** 2).sum().backward()


@SIZES
def test_what_is_written_into_a_value_later_does_not_matter(memory: Memory, size: int) -> None:
    tensor = torch.ones(size)
    kept = sent(tensor)
    tensor.zero_()
    assert kept.read(HERE).equal(torch.ones(size))


def test_small_values_wait_for_each_other_and_large_ones_for_nobody(memory: Memory) -> None:
    small = [sent(torch.full((4,), float(number))) for number in range(3)]
    large = sent(torch.ones(100000))
    gone = sent(torch.ones(5))
    assert memory.sizes() == [400_000]
    del gone
    offload.flush()
    assert memory.sizes() == [48, 400_000]  # `gone` is freed.
    assert len(Event.made) == 2
    values = [kept.read(HERE) for kept in small[1:]]
    del small, large
    assert not memory.sizes()  # Small values that were read have memory of their own.
    assert [value[0].item() for value in values] == [1, 2]


def test_enough_small_values_leave_by_themselves(memory: Memory) -> None:
    kept = [sent(torch.ones(10000)) for _ in range(200)]
    assert 200 * 40_000 - (5 << 20) < sum(memory.sizes()) < 200 * 40_000
    assert all(one.read(HERE).all() for one in kept)


def test_what_can_not_leave_together_is_copied_one_by_one(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_tensors: list[Tensor]) -> Tensor:
        raise torch.cuda.OutOfMemoryError

    kept = [sent(torch.full((4,), float(number))) for number in range(3)]
    monkeypatch.setattr(torch, "cat", full)
    offload.flush()
    assert [one.read(HERE)[0].item() for one in kept] == [0, 1, 2]


def test_the_limit_of_pinned_memory_is_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hl.pinned, "limit", "1 MiB")
    assert hl.pinned.limit == 1 << 20
    for given in ("x", -1, None, True):
        with pytest.raises(hl.HooklineError, match=says("is not a number of bytes nor")):
            hl.pinned.limit = given  # type: ignore[assignment]
    assert hl.pinned.limit == 1 << 20


@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_no_more_than_the_limit_is_held_and_the_oldest_that_nobody_has_read_move(
    memory: Memory, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype | None
) -> None:
    monkeypatch.setattr(hl.pinned, "limit", 4 << 20)
    kept, most = [], 0
    for number in range(40):
        kept.append(sent(torch.full((100000,), float(number)), dtype))  # Half a MiB each.
        first = kept[0].read(HERE)
        most = max(most, sum(memory.sizes()))
    assert 1 << 20 < most <= 4 << 20
    assert kept[0].read(HERE) is first, "a value that was read has moved"
    for number, one in enumerate(kept):
        value = one.read(HERE)
        assert value[-1].item() == number
        assert not value.is_inference()
    assert offload.send(torch.ones(2 << 20)) is None  # Larger than the limit.
    held = [one.read(HERE) for one in map(offload.send, [torch.ones(100000)] * 20) if one is not None]
    assert len(held) < 9  # Values that were read stay in pinned memory and use up the limit.


def test_a_value_that_moves_while_somebody_reads_it_is_one_and_the_same(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    clone, here = Tensor.clone, threading.get_ident()

    def slowly(tensor: Tensor, **options: Any) -> Tensor:
        time.sleep(0.001 if threading.get_ident() != here else 0)
        return clone(tensor, **options)

    monkeypatch.setattr(hl.pinned, "limit", 16 << 20)
    monkeypatch.setattr(Tensor, "clone", slowly)
    size = 500_000
    for _ in range(10):
        kept = [sent(torch.arange(float(size))) for _ in range(4)]
        first = []
        for number in range(4):
            kept.append(sent(torch.arange(float(size))))  # This lets the oldest that is unread move.
            first.append(kept[number].read(HERE))
        time.sleep(0.005)  # What moves has moved.
        assert all(one.read(HERE) is value for one, value in zip(kept, first, strict=False))
        assert all(value.equal(torch.arange(float(size))) for value in first)
        del kept, first  # They would use up the limit.


@pytest.mark.parametrize("again", [copy.deepcopy, lambda kept: pickle.loads(pickle.dumps(kept))])
@SIZES
def test_a_copy_of_what_is_kept_has_the_value(memory: Memory, size: int, again: Any) -> None:
    kept = sent(torch.arange(float(size)))
    other = again(kept).read(HERE)
    assert other.equal(torch.arange(float(size)))
    other.add_(1)
    assert kept.read(HERE).equal(torch.arange(float(size)))


@pytest.mark.process
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_reads_what_was_on_its_way(memory: Memory) -> None:
    kept = [sent(torch.full((size,), float(size))) for size in (3, 4, 100000)]
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)  # OpenMP's threads do not survive a fork.
        right = [bool((one.read(HERE) == one.peek().numel()).all()) for one in kept]
        os._exit(0 if right == [True] * 3 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert [len(one.read(HERE)) for one in kept] == [3, 4, 100000]


@pytest.mark.parametrize("device", ["cpu", "cpu:0", torch.device("cpu")])
def test_a_value_that_is_on_the_host_already_is_kept_as_ever(device: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True))
    x = torch.randn(2, 3)
    with torch.no_grad(), hl.capture(model, "*", device=device) as acts:
        model(x)
    assert torch.equal(acts["0"], nn.functional.linear(x, model[0].weight, model[0].bias))
    assert torch.equal(acts["1"], acts["0"].relu())
    assert acts["0"].dtype is torch.float32


@pytest.mark.process
def test_no_cuda_is_touched_where_the_values_are_on_the_host() -> None:
    code = """
import torch
def touched(*args, **kwargs):
    raise AssertionError("CUDA was touched")
for name in ("Stream", "Event", "current_stream", "current_device", "stream", "device", "_lazy_init"):
    setattr(torch.cuda, name, touched)
torch.Tensor.pin_memory = touched
import hookline as hl
model = torch.nn.Linear(3, 3)
for dtype in (None, torch.float16):
    with hl.capture(model, "", device="cpu", dtype=dtype) as acts:
        model(torch.ones(2, 3))
    acts[""]
    with hl.capture(model, "[0]", ":grad_output", device="cpu", dtype=dtype) as acts:
        model(torch.ones(2, 3)).sum().backward()
    acts[":grad_output"]
assert not torch.cuda.is_initialized()
print("untouched")
"""
    assert python("-c", code, command=quick_python()) == "untouched\n"
