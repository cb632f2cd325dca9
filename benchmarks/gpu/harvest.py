"""Cost of harvesting one middle layer on a CUDA device, as ratios to the bare forward up to that layer.

    python benchmarks/gpu/harvest.py    # Five minutes; prints the tables and writes them to benchmarks/gpu/harvest.txt

Every contender runs the same batches from host memory. A harvest is timed as a whole: the trial run of the first batch,
the fingerprints of model and data, the files, their checksums, and the wait for the disk.
"""

from __future__ import annotations

import copy
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))

import torch
import transformers
from harness import extra, machine, measure, ratios, report
from overhead import Run, first_tensor, large
from torch import Tensor, nn

import hookline as hl

BATCHES, SHORT, LAYER = 160, 40, 11
MEMORY = Path("/dev/shm")  # A folder in memory, not on disk.
Batch = Mapping[str, object]


def truncated(model: nn.Module) -> nn.Module:
    """Return a model that ends after the harvested layer."""
    layers, model.layers = model.layers, nn.ModuleList()
    half = copy.deepcopy(model)
    model.layers = layers
    half.layers = layers[: LAYER + 1]
    return half


def bare(model: nn.Module, batches: list[Batch]) -> Run:
    """Run every batch and keep nothing."""

    def run() -> None:
        for batch in batches:
            model(**{name: _there(value) for name, value in batch.items()})
        torch.cuda.synchronize()

    return run


def _there(value: object) -> object:
    return value.pin_memory().cuda(non_blocking=True) if isinstance(value, Tensor) else value


def by_hand(model: nn.Module, batches: list[Batch], folder: Path) -> Run:
    """Keep all outputs in a list on the host and save it at the end, as tutorials do."""

    def run() -> None:
        kept: list[Tensor] = []
        hook = lambda _module, _args, output: kept.append(first_tensor(output).cpu())  # noqa: E731
        handle = model.layers[LAYER].register_forward_hook(hook)  # type: ignore[union-attr]
        bare(model, batches)()
        handle.remove()
        torch.save(torch.cat(kept), folder / "acts.pt")

    return run


def harvested(model: nn.Module, batches: list[Batch], folder: Path, *where: str, **options: object) -> Run:
    """Run the whole harvest."""

    def run() -> None:
        hl.harvest(model, batches, *where, to=folder / "acts", progress=False, **options)

    return run


def clear(*folders: Path) -> None:
    """Remove the written files."""
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()


def tables(folder: Path, memory: Path) -> list[str]:
    """Measure everything."""
    model, ids = large()
    model = model.model  # The harvest of a layer never runs the head.
    half = truncated(model)
    batches: list[Batch] = [{"input_ids": ids.roll(number).cpu(), "use_cache": False} for number in range(BATCHES)]
    site = f"layers.{LAYER}"
    contenders = {
        "bare, up to that layer": bare(half, batches),
        "hook, .cpu(), list, torch.save": by_hand(half, batches, memory),
        "hl.harvest, to memory": harvested(model, batches, memory, site, rows="tokens"),
        "hl.harvest, to disk": harvested(model, batches, folder, site, rows="tokens"),
        "hl.harvest, to disk, the last token": harvested(model, batches, folder, f"{site}[:, -1]"),
    }
    seconds = measure(contenders, rounds=3, repeat=1, after=lambda: clear(folder, memory))
    size = BATCHES * ids.numel() * 2048 * 2 / 1e9
    title = f"1.3B Llama, bfloat16, layer {LAYER} of 24, {BATCHES} batches of 8x1024 tokens, {size:.1f} GB"
    few = {
        "bare, up to that layer": bare(half, batches[:SHORT]),
        "hl.harvest, a short run to memory": harvested(model, batches[:SHORT], memory, site, rows="tokens"),
        "hl.harvest, a short run to disk": harvested(model, batches[:SHORT], folder, site, rows="tokens"),
    }
    taken = measure(few, rounds=5, repeat=1, after=lambda: clear(folder, memory))
    short = report(f"{SHORT} of these batches", ratios(taken), taken) + extra(taken)
    return [report(title, ratios(seconds), seconds), short, disk(folder)]


def disk(folder: Path) -> str:
    """Return the speed of the disk alone: 1 GiB in files of 128 MiB, with a wait for each file."""
    data = bytes(128 << 20)

    def write() -> None:
        for number in range(8):
            with open(folder / f"{number}.bin", "wb", buffering=0) as file:
                file.write(data)
                os.fsync(file.fileno())

    taken = measure({"bare write": write}, rounds=3, repeat=1)["bare write"]
    return f"the disk takes {8 * 128 / 1024 / min(taken):.2f} GiB/s from one thread that waits for it\n"


def main() -> None:
    """Run everything, and print and save the tables."""
    device = f"{torch.cuda.get_device_name()}, transformers {transformers.__version__}"
    title = f"{machine()}, {device}\nratios to the bare forward up to the layer\n"
    folders = [Path(tempfile.mkdtemp(dir=parent)) for parent in (None, MEMORY)]
    try:
        with torch.no_grad():
            text = "\n".join([title, *tables(*folders)])
    finally:
        for folder in folders:
            shutil.rmtree(folder)
    print(text)
    Path(__file__).with_suffix(".txt").write_text(text)


if __name__ == "__main__":
    main()
