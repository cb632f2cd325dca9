"""Asynchronous copies to host memory, tested without a CUDA device; test_gpu_offload.py tests them on one."""

from __future__ import annotations

import copy
import os
import pickle
import time
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookline as hl
from hookline._cache.record import Guarded, Record
from hookline._engine import offload
from hookline._engine.capture_action import CaptureOptions, Save
from hookline._sites.language import Site
from tests.support.running import python

HERE = Site("h")


class Event:
    """Stands in for the event of a CUDA stream. The copy happens when somebody waits for it."""

    def __init__(self, tensor: Tensor, value: Tensor) -> None:
        self.tensor = tensor
        self.value = value
        self.waits = 0

    def synchronize(self) -> None:
        self.waits += 1
        self.tensor.copy_(self.value)


def on_its_way(value: Tensor, **options: Any) -> tuple[offload.Copy, Event]:
    """Return a copy that has not arrived yet, and its event."""
    tensor = torch.zeros_like(value)
    event = Event(tensor, value)
    kept = offload.Copy(tensor, options.get("dtype"), options.get("shape"))
    kept.event = event  # type: ignore[assignment]
    offload.pinned.enter(kept)
    return kept, event


def test_a_value_on_its_way_is_waited_for_once() -> None:
    kept, event = on_its_way(torch.arange(3.0))
    assert event.waits == 0
    first = kept.read(HERE)
    assert first.tolist() == [0, 1, 2]
    assert kept.read(HERE) is first is kept.peek()
    assert event.waits == 1


def test_looking_at_a_value_waits_for_it_too() -> None:
    kept, event = on_its_way(torch.arange(3.0))
    record = Record(HERE)
    record.put(kept, 1, 1)
    assert record.peek().tolist() == [0, 1, 2]
    assert event.waits == 1


def test_what_is_left_to_do_is_done_on_reading() -> None:
    kept, _ = on_its_way(torch.arange(3).int()[:, None], dtype=torch.float64, shape=torch.Size((3, 4)))
    value = kept.read(HERE)
    assert value.dtype is torch.float64
    assert value.equal(torch.arange(3.0, dtype=torch.float64)[:, None].expand(3, 4))
    assert value.stride() == (1, 0)


def test_a_value_that_is_read_in_inference_mode_is_of_use_outside() -> None:
    kept, _ = on_its_way(torch.arange(3).int(), dtype=torch.float32)
    moved, _ = on_its_way(torch.arange(3.0))
    with torch.inference_mode():
        kept.read(HERE)
        moved.move()
    for value in (kept.read(HERE), moved.read(HERE)):
        assert not value.is_inference()
        (value.requires_grad_() ** 2).sum().backward()


def test_a_value_that_has_moved_leaves_the_memory_it_was_in() -> None:
    kept, event = on_its_way(torch.arange(3.0))
    before = kept.tensor.data_ptr()
    kept.move()
    kept.move()
    assert event.waits == 1
    assert kept.read(HERE).tolist() == [0, 1, 2]
    assert kept.read(HERE).data_ptr() != before


def test_a_value_that_was_read_never_moves() -> None:
    kept, _ = on_its_way(torch.arange(3.0))
    value = kept.read(HERE)
    kept.move()
    value.add_(1)
    assert kept.read(HERE) is value


def test_only_what_nobody_has_read_may_move() -> None:
    kept, _ = on_its_way(torch.arange(3.0))
    assert offload.pinned.unread.get(kept.number) is kept
    kept.read(HERE)
    assert kept.number not in offload.pinned.unread
    gone, _ = on_its_way(torch.arange(3.0))
    number = gone.number
    del gone
    assert number not in offload.pinned.unread


def test_a_nested_value_is_put_together_when_all_of_it_is_there() -> None:
    (one, first), (two, second) = on_its_way(torch.ones(2)), on_its_way(torch.zeros(3))
    stand_ins = [torch.empty(0), torch.empty(0)]
    here = torch.full((2,), 5.0)
    value = {"a": stand_ins[0], "b": (here, stand_ins[1], "text")}
    kept = offload.together(value, {id(stand_ins[0]): one, id(stand_ins[1]): two})
    assert (first.waits, second.waits) == (0, 0)
    read = kept.read(HERE)
    assert read["a"].tolist() == [1, 1]
    assert [part if isinstance(part, str) else part.tolist() for part in read["b"]] == [[5, 5], [0, 0, 0], "text"]
    assert kept.peek()["a"] is read["a"] is one.read(HERE)


def test_a_nested_value_of_which_a_part_was_overwritten_says_so() -> None:
    on_device, _ = on_its_way(torch.ones(2))
    here, stand_in = torch.zeros(2), torch.empty(0)
    guarded = Guarded((here, stand_in), [(here, here._version, None)])
    kept = offload.together(guarded, {id(stand_in): on_device})
    assert kept.read(HERE)[1].tolist() == [1, 1]
    here.add_(1)
    with pytest.raises(hl.StaleValue, match="'h' was overwritten"):
        kept.read(HERE)
    assert kept.peek()[0].tolist() == [1, 1]


def held_by(copies: list[offload.Copy], size: int) -> None:
    """Count these copies as if they were in pinned memory of this size."""
    for kept in copies:
        offload.pinned.hold(kept.tensor, size)


def test_the_limit_of_pinned_memory_is_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hl.pinned, "limit", "1 MiB")
    assert hl.pinned.limit == 1 << 20
    for given in ("x", -1, None, True):
        with pytest.raises(hl.HooklineError, match=r"limit=.* is not a number of bytes"):
            hl.pinned.limit = given  # type: ignore[assignment]
    assert hl.pinned.limit == 1 << 20


def test_the_oldest_values_that_nobody_has_read_move_until_half_the_limit_is_held(monkeypatch: Any) -> None:
    monkeypatch.setattr(offload.pinned, "limit", 1024)
    before = offload.pinned.count()
    found = [on_its_way(torch.full((4,), float(number))) for number in range(8)]
    copies = [kept for kept, _ in found]
    addresses = [kept.tensor.data_ptr() for kept in copies]
    held_by(copies, 128)
    value = copies[1].read(HERE)
    del found
    with offload.pinned.changed:
        offload.pinned._relieve(128)
        assert offload.pinned.is_moving
        while offload.pinned.is_moving:
            offload.pinned.changed.wait(10)
    assert offload.pinned.count() - before == 512
    moved = [kept.tensor.data_ptr() != address for kept, address in zip(copies, addresses, strict=True)]
    assert moved == [True, False, True, True, True, False, False, False]
    assert copies[1].read(HERE) is value
    assert [kept.read(HERE)[0].item() for kept in copies] == [*range(8)]
    del copies, value
    assert offload.pinned.count() == before


def test_a_value_that_moves_while_somebody_reads_it_is_one_and_the_same(monkeypatch: Any) -> None:
    monkeypatch.setattr(offload.pinned, "limit", 0)
    for _ in range(50):
        copies = [on_its_way(torch.arange(1000.0))[0] for _ in range(4)]
        held_by(copies, 64)
        with offload.pinned.changed:
            offload.pinned._relieve(0)
        first = [kept.read(HERE) for kept in copies]
        while offload.pinned.is_moving:
            time.sleep(0.001)
        assert all(kept.read(HERE) is value for kept, value in zip(copies, first, strict=True))
        assert all(value.equal(torch.arange(1000.0)) for value in first)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda kept: pickle.loads(pickle.dumps(kept))])
def test_a_copy_of_what_is_kept_has_the_value(again: Any) -> None:
    kept, _ = on_its_way(torch.arange(3.0))
    stand_in = torch.empty(0)
    nested = offload.together([stand_in], {id(stand_in): kept})
    assert again(nested).read(HERE)[0].tolist() == [0, 1, 2]
    other = again(kept).read(HERE)
    assert other.tolist() == [0, 1, 2]
    other.add_(1)
    assert kept.read(HERE).tolist() == [0, 1, 2]


class Stream:
    """Stands in for a CUDA stream. On the host everything runs in order anyway."""

    def wait_stream(self, _stream: Stream) -> None:
        """Return at once."""


class Done:
    """Stands in for an event of a CUDA stream, which raises in a forked process."""

    def record(self, _stream: Stream) -> None:
        self.process = os.getpid()

    def synchronize(self) -> None:
        if self.process != os.getpid():
            raise RuntimeError("CUDA error: initialization error")

    def query(self) -> bool:
        return True


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that the host is a CUDA device: copies are sent, batched and counted as with CUDA."""
    empty_like = torch.empty_like
    for name, stand_in in {
        "current_device": lambda: -1,
        "current_stream": lambda _index=None: Stream(),
        "is_current_stream_capturing": lambda: False,
        "device": lambda _index: nullcontext(),
        "stream": lambda _stream: nullcontext(),
        "Stream": lambda _index: Stream(),
        "Event": Done,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(offload, "raw_stream", lambda _index: 0)
    monkeypatch.setattr(offload, "_asides", {})
    monkeypatch.setattr(offload, "_waiting", offload._Waiting())
    monkeypatch.setattr(torch, "empty_like", lambda like, device, pin_memory: empty_like(like, device=device))
    monkeypatch.setattr(Tensor, "record_stream", lambda _self, _stream: None)


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


@pytest.mark.usefixtures("pretended")
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.float16, torch.float64])
def test_a_value_of_any_kind_is_sent_as_it_was(dtype: torch.dtype | None, together: bool) -> None:
    kinds = {name: tensor for name, tensor in KINDS.items() if dtype is None or tensor.is_floating_point()}
    sent: dict[str, Any] = {}
    for name, tensor in kinds.items():
        sent[name] = offload.send(tensor, dtype)
        if not together:
            offload.flush()
    offload.flush()
    assert all(isinstance(copy.event, Done) for copy in sent.values())
    for name, tensor in kinds.items():
        value = sent[name].read(HERE)
        assert value.equal(tensor.to(dtype or tensor.dtype)), name
        assert value.dtype is (dtype or tensor.dtype)
    sent.clear()
    del value
    assert offload.pinned.count() == 0


@pytest.mark.usefixtures("pretended")
@pytest.mark.parametrize("size", [4, 100000])
def test_what_is_written_into_a_value_later_does_not_matter(size: int) -> None:
    tensor = torch.ones(size)
    sent = offload.send(tensor)
    tensor.zero_()
    assert sent is not None
    assert sent.read(HERE).equal(torch.ones(size))


@pytest.mark.usefixtures("pretended")
def test_small_values_wait_for_each_other_and_large_ones_for_nobody() -> None:
    small = [offload.send(torch.full((4,), float(number))) for number in range(3)]
    large = offload.send(torch.ones(100000))
    gone = offload.send(torch.ones(5))
    assert large is not None
    assert large.event is not None
    assert all(copy is not None and copy.event is None for copy in small)
    del gone
    offload.flush()
    assert len({id(copy.event) for copy in small if copy is not None}) == 1
    sizes = sorted(size for _, size in offload.pinned.held.values())
    assert sizes == [64, 1 << 19]  # 3 values of 16 bytes, rounded up as torch does; `gone` is freed.
    values = [copy.read(HERE) for copy in small[1:] if copy is not None]
    del small, large
    assert offload.pinned.count() == 0  # Values that were read have memory of their own.
    assert [value[0].item() for value in values] == [1, 2]


@pytest.mark.usefixtures("pretended")
def test_enough_small_values_leave_by_themselves() -> None:
    copies = [offload.send(torch.ones(10000)) for _ in range(200)]
    left = [copy for copy in copies if copy is not None and copy.event is not None]
    assert 90 < len(left) < 200
    assert sum(copy.tensor.nbytes for copy in copies if copy is not None and copy.event is None) < offload.ENOUGH


@pytest.mark.usefixtures("pretended")
def test_what_can_not_leave_together_is_copied_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_tensors: list[Tensor]) -> Tensor:
        raise torch.cuda.OutOfMemoryError

    copies = [offload.send(torch.full((4,), float(number))) for number in range(3)]
    monkeypatch.setattr(torch, "cat", full)
    offload.flush()
    assert [copy.read(HERE)[0].item() for copy in copies if copy is not None] == [0, 1, 2]


@pytest.mark.usefixtures("pretended")
def test_no_more_than_the_limit_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload.pinned, "limit", 4 << 20)
    copies, most = [], 0
    for number in range(40):
        copies.append(offload.send(torch.full((100000,), float(number))))  # Half a MiB each.
        most = max(most, offload.pinned.count())
    assert 1 << 20 < most <= 4 << 20
    assert [copy.read(HERE)[-1].item() for copy in copies if copy is not None] == [*range(40)]
    assert offload.send(torch.ones(2 << 20)) is None  # Larger than the limit.
    held = [copy.read(HERE) for copy in map(offload.send, [torch.ones(100000)] * 20) if copy is not None]
    assert len(held) < 9  # Values that were read stay in pinned memory and use up the limit.


@pytest.mark.usefixtures("pretended")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_reads_what_was_on_its_way() -> None:
    copies = [offload.send(torch.full((size,), float(size))) for size in (3, 4, 100000)]
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)  # OpenMP's threads do not survive a fork.
        right = [copy is not None and bool((copy.read(HERE) == copy.tensor.numel()).all()) for copy in copies]
        os._exit(0 if right == [True] * 3 and offload.pinned.immortal else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert [len(copy.read(HERE)) for copy in copies if copy is not None] == [3, 4, 100000]


@pytest.mark.parametrize("device", ["cpu", "cpu:0", torch.device("cpu")])
def test_every_spelling_of_the_host_is_meant(device: Any) -> None:
    assert Save(CaptureOptions(device=device)).offloads
    assert not Save(CaptureOptions(device=device, detach=False)).offloads  # The graph must include the copy.
    assert not Save(CaptureOptions(device="cuda")).offloads
    assert not Save().offloads


def test_a_value_that_is_on_the_host_already_is_kept_as_ever() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True))
    x = torch.randn(2, 3)
    with torch.no_grad(), hl.capture(model, "*", device="cpu") as acts:
        model(x)
    assert torch.equal(acts["0"], nn.functional.linear(x, model[0].weight, model[0].bias))
    assert torch.equal(acts["1"], acts["0"].relu())
    assert acts["0"].dtype is torch.float32


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
    assert python("-c", code) == "untouched\n"
