"""Cost of writing and reading rows in hookline's store and in other formats, as ratios to the store.

python benchmarks/store.py               prints the tables and writes them to benchmarks/store.txt

All formats get the same rows: 200,000 of 768 bfloat16, in ragged sequences, in batches of 32. The rows that are read
are compared once with those that were written. The files are in the page cache, as when a dataset is read repeatedly.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
from formats import FORMATS, PIECE, WIDTH, CheckedNpy, CheckedParquet, Format, installed
from harness import measure, publish, ratios, report, usual
from torch import Tensor

ROWS = usual(200_000, quick=2_000)
SOME = 1024
Run = Callable[[], object]


def sequences() -> list[Tensor]:
    """Return sequences of 8 to 240 rows with heavy-tailed values, as activations have."""
    torch.manual_seed(0)
    lengths = torch.randint(8, 241, (ROWS,))
    lengths = lengths[: int((lengths.cumsum(0) <= ROWS).sum())]
    rows = torch.randn(int(lengths.sum()), WIDTH) * torch.randn(WIDTH).exp()
    return list(rows.bfloat16().split(lengths.tolist()))


def check(format: Format, truth: Tensor, starts: Tensor) -> None:
    """Check that a format returns the rows that were written."""
    rows = torch.randperm(len(truth))[:SOME]
    begin, end = starts[5:7].tolist()
    assert format.gather(rows).equal(truth[rows])
    assert format.sequence(5, begin, end).equal(truth[begin:end])
    assert torch.cat([piece.clone() for piece in format.scan()]).equal(truth)


def gathering(format: Format, rows: int) -> Run:
    """Return a run that gathers random rows, different each time."""
    chance = torch.Generator().manual_seed(0)

    def run() -> None:
        format.gather(torch.randint(rows, (SOME,), generator=chance))

    return run


def picking(format: Format, starts: Tensor) -> Run:
    """Return a run that reads random sequences, different each time."""
    chance, edges = torch.Generator().manual_seed(0), starts.tolist()

    def run() -> None:
        for number in torch.randint(len(edges) - 1, (32,), generator=chance).tolist():
            format.sequence(number, edges[number], edges[number + 1])

    return run


def scanning(format: Format) -> Run:
    """Return a run that copies every row to another place in memory."""
    target = torch.empty(4 * PIECE, WIDTH, dtype=torch.bfloat16)

    def run() -> None:
        for piece in format.scan():
            target[: len(piece)] = piece

    return run


def writing(format: type[Format], folder: Path, batches: list[list[Tensor]]) -> Run:
    """Return a run that writes all rows."""

    def run() -> None:
        folder.mkdir()
        format.write(folder, batches)

    return run


def size_of(folder: Path) -> int:
    """Return the total size of all files in bytes."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def quiet() -> None:
    """Set every library to one thread, and turn off progress bars and warnings."""
    os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = os.environ["LANCE_CPU_THREADS"] = "1"
    os.environ["RAYON_NUM_THREADS"] = os.environ["TOKIO_WORKER_THREADS"] = "1"
    warnings.filterwarnings("ignore")
    if installed(FORMATS["Parquet"]):
        import pyarrow

        pyarrow.set_cpu_count(1)
        pyarrow.set_io_thread_count(1)


def tables() -> Iterator[str]:
    """Measure everything."""
    quiet()
    contenders = {name: format for name, format in FORMATS.items() if installed(format)}
    left_out = [name for name in FORMATS if name not in contenders]
    samples = sequences()
    truth, starts = torch.cat(samples), torch.tensor([0, *map(len, samples)]).cumsum(0)
    batches = [samples[start : start + 32] for start in range(0, len(samples), 32)]
    folder = Path(tempfile.mkdtemp(prefix="hookline-benchmark-"))
    about = f"{len(truth):,} rows of {WIDTH} bfloat16 in {len(samples):,} sequences"
    try:
        opened: dict[str, Format] = {}
        sizes = [f"{about}, {truth.nbytes / 1e6:.0f} MB: the size on disk"]
        for name, format in contenders.items():
            writing(format, folder / name, batches)()
            opened[name] = format(folder / name)
            check(opened[name], truth, starts)
            sizes.append(f"{name:44s} {size_of(folder / name) / truth.nbytes:7.3f}")
        sizes += [f"{name:44s} not installed, left out" for name in left_out]
        yield "\n".join(sizes) + "\n"
        yield from written(contenders, folder / "again", batches)
        yield from read(opened, starts)
        yield scanned(contenders, folder, batches)
        yield opening(contenders, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def written(contenders: dict[str, type[Format]], folder: Path, batches: list[list[Tensor]]) -> Iterator[str]:
    """Measure writing with both clocks."""
    checked = {"npy": CheckedNpy, "Parquet": CheckedParquet}
    formats = [*contenders.items(), *((name, format) for name, format in checked.items() if installed(format))]
    runs = {f"{name}{' (checksums)' * format.checks}": writing(format, folder, batches) for name, format in formats}
    about = "writing all rows until they are on disk (the store's with a record of each file)"
    for clock, told in ((time.perf_counter, "wall clock"), (time.process_time, "processor time")):
        seconds = measure(runs, rounds=8, repeat=1, clock=clock, after=lambda: shutil.rmtree(folder))
        yield report(f"{about}; {told}", ratios(seconds), seconds)


def read(opened: dict[str, Format], starts: Tensor) -> Iterator[str]:
    """Measure reading random rows and sequences."""
    gathers = {name: gathering(one, int(starts[-1])) for name, one in opened.items()}
    seconds = measure(gathers, rounds=40, repeat=2)
    yield report(f"gathering {SOME:,} random rows; processor time", ratios(seconds), seconds)
    picks = {name: picking(one, starts) for name, one in opened.items()}
    seconds = measure(picks, rounds=12, repeat=2)
    yield report("reading 32 random sequences, one by one; processor time", ratios(seconds), seconds)


def scanned(contenders: dict[str, type[Format]], folder: Path, batches: list[list[Tensor]]) -> str:
    """Measure scans. The files are rewritten several times, since their place in memory changes the time by a third."""
    seconds: dict[str, list[float]] = {}
    for _ in range(usual(6, quick=1)):
        for name, format in contenders.items():
            shutil.rmtree(folder / name)
            writing(format, folder / name, batches)()
        runs = {name: scanning(format(folder / name)) for name, format in contenders.items()}
        for name, taken in measure(runs, rounds=2, repeat=2).items():
            seconds.setdefault(name, []).extend(taken)
    return report("scanning all rows; processor time", ratios(seconds), seconds)


def opening(contenders: dict[str, type[Format]], folder: Path) -> str:
    """Measure opening. When it is opened, the store reads its records and checks the length of every file."""
    runs = {name: lambda name=name, format=format: format(folder / name) for name, format in contenders.items()}
    seconds = measure(runs, rounds=12, repeat=2)  # type: ignore[arg-type]
    return report("opening, which is not in the figures above; processor time", ratios(seconds), seconds)


if __name__ == "__main__":
    publish(__file__, tables)
