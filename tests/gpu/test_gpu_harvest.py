"""hl.harvest on a CUDA device: the same rows as on the host, and the forward never waits."""

from __future__ import annotations

import threading
import time
import zlib

import pytest
import torch
from torch import nn

import hookline as hl
from hookline._kernel import offload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning"),
]

DEVICE = "cuda"


class Tokens(nn.Module):
    """A small token model with an in-place activation."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(100, width)
        self.mix = nn.Linear(width, width)
        self.act = nn.ReLU(inplace=True)
        self.out = nn.Linear(width, 4)

    def forward(self, input_ids, attention_mask=None):
        return self.out(self.act(self.mix(self.embed(input_ids))))


def batches(number: int = 12, samples: int = 8, tokens: int = 16, device: str = "cpu"):
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(number):
        lengths = torch.randint(1, tokens + 1, (samples, 1), generator=generator)
        ids = torch.randint(0, 100, (samples, tokens), generator=generator)
        mask = (torch.arange(tokens) < lengths).long()
        found.append({"input_ids": ids.to(device), "attention_mask": mask.to(device)})
    return found


def expected(model: Tokens, data, layer: str) -> torch.Tensor:
    rows = []
    with torch.no_grad():
        for batch in data:
            _, acts = hl.run(model, capture=layer, **{name: value.to(DEVICE) for name, value in batch.items()})
            rows.append(acts[layer][batch["attention_mask"].bool().to(DEVICE)].cpu())
    return torch.cat(rows)


@pytest.mark.parametrize("where", ["cpu", "cuda"])
@pytest.mark.parametrize("width", [8, 64, 4096])
def test_rows_are_those_that_passed_whatever_the_model_overwrites(width, where, tmp_path):
    model = Tokens(width).to(DEVICE).eval()
    data = batches(device=where)
    store = hl.harvest(model, data, "embed", "mix", to=tmp_path / "acts", rows="tokens", unit=5, columns=["input_ids"])
    for layer in ("embed", "mix"):
        assert torch.equal(store[layer][:], expected(model, data, layer))
    ids = torch.cat([batch["input_ids"][batch["attention_mask"].bool()] for batch in data])
    assert torch.equal(store["input_ids"][:], ids.cpu())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_rows_are_cast_on_the_device(dtype, tmp_path):
    model, data = Tokens().to(DEVICE).eval(), batches()
    store = hl.harvest(model, data, "mix", to=tmp_path / "acts", rows="tokens", dtype=dtype)
    found, right = store["mix"][:], expected(model, data, "mix").to(dtype)
    assert torch.equal(found.view(torch.uint8), right.view(torch.uint8))


def test_a_batch_from_the_host_makes_nothing_wait_for_the_device(tmp_path):
    model = Tokens(1024).to(DEVICE).eval()
    data = batches(8, samples=64, tokens=32)

    def coming():
        try:
            for number, batch in enumerate(data):
                if number == 2:
                    torch.cuda.set_sync_debug_mode("error")
                yield batch
        finally:
            torch.cuda.set_sync_debug_mode("default")

    store = hl.harvest(model, coming(), "mix", to=tmp_path / "acts", rows="tokens", dtype=torch.bfloat16)
    assert torch.equal(store["mix"][:], expected(model, data, "mix").bfloat16())


def test_a_slow_disk_bounds_pinned_memory(tmp_path, monkeypatch):
    most, crc32 = [0], zlib.crc32

    def slow(*given):  # The checksum of what is written.
        time.sleep(0.01)
        most[0] = max(most[0], offload.pinned.count())
        return crc32(*given)

    model = Tokens(4096).to(DEVICE).eval()
    data = batches(80, samples=64, tokens=64)  # 5 GiB in all.
    before = offload.pinned.count()
    monkeypatch.setattr(zlib, "crc32", slow)
    hl.harvest(model, data, "mix", to=tmp_path / "acts", transform=lambda value: value[:, :1])
    hl.harvest(model, data, "mix", to=tmp_path / "all")
    assert 0 < most[0] - before <= 5 << 28
    assert not [thread for thread in threading.enumerate() if thread.name == "hookline.harvest"]


def test_gradients_are_harvested(tmp_path):
    model, data = Tokens().to(DEVICE).eval(), batches()
    store = hl.harvest(model, data, "mix:grad_output", to=tmp_path / "acts", rows="tokens",
                       loss=lambda output, batch: output.pow(2).sum())  # fmt: skip
    batch = {name: value.to(DEVICE) for name, value in data[0].items()}
    with hl.capture(model, "mix:grad_output") as acts:
        model(**batch).pow(2).sum().backward()
    right = acts["mix:grad_output"][batch["attention_mask"].bool()].cpu()
    assert torch.allclose(store["mix:grad_output"][: len(right)], right, atol=1e-5)


def test_a_model_is_known_again_on_another_device(tmp_path):
    model = Tokens().eval()
    hl.Harvest(model, batches(), "out", to=tmp_path / "acts", unit=6).run_unit(0)
    store = hl.harvest(model.to(DEVICE), batches(), "out", to=tmp_path / "acts")
    assert len(store["out"]) == 12 * 8


@pytest.mark.parametrize("device", [None, "cuda", "cuda:0"])
def test_a_model_may_write_into_batches_that_are_on_the_device(device, tmp_path):
    class Greedy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(4, 4)

        def forward(self, x):
            return self.one(x.add_(1))

    model = Greedy().to(DEVICE).eval()
    data = list(torch.randn(6, 5, 4, device=DEVICE))
    before = torch.stack(data)
    store = hl.harvest(model, data, "one", to=tmp_path / "acts", device=device, columns={"x": lambda batch: batch})
    assert torch.equal(torch.stack(data), before)
    assert torch.equal(store["x"][:], before.flatten(0, 1).cpu())
    with torch.no_grad():
        assert torch.allclose(store["one"][:], model.one(before.flatten(0, 1) + 1).cpu(), atol=1e-5)
