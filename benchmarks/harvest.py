"""Cost of harvesting one middle layer to disk, as ratios to the bare forward up to that layer.

python benchmarks/harvest.py             prints the tables and writes them to benchmarks/harvest.txt

Every contender runs the same batches. A harvest is timed as a whole: the trial run of the first batch, the fingerprints
of model and data, the files, their checksums and the wait for the disk. The processor time is that of all threads.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
from harness import extra, measure, publish, ratios, report, usual
from torch import Tensor, nn

import hookline as hl

DEPTH, WIDTH, HEADS, TOKENS, BATCH = 8, usual(512, quick=64), 8, 64, 2
BATCHES, SHORT = usual(100, quick=3), usual(40, quick=2)
MIDDLE = DEPTH // 2 - 1
Run = Callable[[], object]


def model_of(depth: int) -> nn.Sequential:
    """Return transformer blocks, with the same weights in each model."""
    torch.manual_seed(0)
    blocks = [nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, batch_first=True, dropout=0) for _ in range(depth)]
    return nn.Sequential(*blocks).eval()


def bare(model: nn.Module, batches: list[Tensor]) -> Run:
    """Run every batch and keep nothing."""

    def run() -> None:
        with torch.no_grad():
            for batch in batches:
                model(batch)

    return run


def by_hand(model: nn.Sequential, batches: list[Tensor], folder: Path) -> Run:
    """Keep all outputs in a list and save it at the end, as tutorials do."""

    def run() -> None:
        kept: list[Tensor] = []
        handle = model[MIDDLE].register_forward_hook(lambda _module, _args, output: kept.append(output.cpu()))
        bare(model[: MIDDLE + 1], batches)()
        handle.remove()
        torch.save(torch.cat(kept), folder / "acts.pt")

    return run


def harvested(model: nn.Module, batches: list[Tensor], folder: Path, *where: str, **options: object) -> Run:
    """Run the whole harvest."""

    def run() -> None:
        hl.harvest(model, batches, *where, to=folder / "acts", progress=False, **options)

    return run


def contenders(folder: Path) -> dict[str, Run]:
    """Return the runs to compare."""
    whole, half = model_of(DEPTH), model_of(MIDDLE + 1)
    batches = list(torch.randn(BATCHES, BATCH, TOKENS, WIDTH))
    site = str(MIDDLE)
    return {
        "bare, up to that layer": bare(half, batches),
        "hook, list, torch.save": by_hand(whole, batches, folder),
        "hl.harvest, rows are samples": harvested(whole, batches, folder, site),
        "hl.harvest, rows are tokens, bfloat16": harvested(
            whole, batches, folder, site, rows="tokens", dtype=torch.bfloat16
        ),
        "hl.harvest, the last token": harvested(whole, batches, folder, f"{site}[:, -1]"),
        f"hl.harvest, all {MIDDLE + 1} layers up to it": harvested(
            whole, batches, folder, f"{{{','.join(map(str, range(MIDDLE + 1)))}}}"
        ),
    }


def short(folder: Path) -> dict[str, Run]:
    """Return the runs to compare over few batches, where the part that does not grow with the data shows."""
    batches = list(torch.randn(SHORT, BATCH, TOKENS, WIDTH))
    return {
        "bare, up to that layer": bare(model_of(MIDDLE + 1), batches),
        "hl.harvest, a short run": harvested(model_of(DEPTH), batches, folder, str(MIDDLE)),
    }


def clear(folder: Path) -> None:
    """Remove the written files."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()


def tables() -> Iterator[str]:
    """Measure with both clocks."""
    folder = Path(tempfile.mkdtemp(prefix="hookline-benchmark-"))
    size = BATCHES * BATCH * TOKENS * WIDTH * 4
    about = (
        f"{BATCHES} batches of {BATCH} × {TOKENS} tokens, width {WIDTH}: {size / 1e6:.0f} MB of float32 for each layer"
    )
    try:
        for name, clock in (("processor time", time.process_time), ("wall clock", time.perf_counter)):
            seconds = measure(contenders(folder), rounds=3, repeat=1, clock=clock, after=lambda: clear(folder))
            yield report(f"{about}; {name}", ratios(seconds))
        seconds = measure(short(folder), rounds=9, repeat=1, clock=time.perf_counter, after=lambda: clear(folder))
        yield report(f"{SHORT} batches; wall clock", ratios(seconds)) + extra(seconds)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    publish(__file__, tables)
