"""The script that torchrun runs, the same for any number of ranks. One rank dies once, in the middle."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

from tests.support import harvests


class Dying(harvests.Sentences):
    """Sentences that once, after `units` units are done, kill the process that loads one. Each rank notes its loads."""

    def __init__(self, folder: Path, units: int | None = None, seconds: float = 0.004) -> None:
        super().__init__(96)
        self.folder = folder
        self.units = units
        self.seconds = seconds  # How long it takes to load one.

    def __getitem__(self, index: int) -> torch.Tensor:
        rank = os.environ.get("RANK", "alone")
        with (self.folder / f"notes-{rank}").open("a") as notes:
            notes.write(f"{index}\n")
        died = self.folder / "died"
        if (
            self.units is not None
            and len(harvests.committed(self.folder / "store")) >= self.units
            and not died.exists()
        ):
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        is_begun = (self.folder / "store/data").exists()  # Until then, single samples are loaded to know them again.
        deadline = time.monotonic() + 300
        while is_begun and index >= allowed(self.folder):
            assert time.monotonic() < deadline, f"nobody allowed sample {index}"
            time.sleep(0.01)
        time.sleep(self.seconds)
        return super().__getitem__(index)


class Broken(Dying):
    """Sentences of which number 50 can't be loaded, or kills the process that loads it."""

    def __init__(self, folder: Path, units: int | None = None, seconds: float = 0.004, kills: bool = False) -> None:
        super().__init__(folder, units, seconds)
        self.kills = kills

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 50 and self.kills:
            os.kill(os.getpid(), signal.SIGKILL)
        if index == 50:
            raise ValueError("no such sentence")
        return super().__getitem__(index)


def made() -> nn.Module:
    """Return the model, and note in a file that this process built it."""
    folder = os.environ.get("HOOKLINE_TEST_FOLDER")
    if folder is not None:
        open(os.path.join(folder, f"made-{os.getpid()}"), "w").close()
    return harvests.model()


def allow(folder: Path, samples: int) -> None:
    """Let whoever loads sentences wait before they load more than these."""
    (folder / "allowed").write_text(str(samples))


def allowed(folder: Path) -> float:
    """Return how many samples may be loaded."""
    path = folder / "allowed"
    return int(path.read_text() or 0) if path.exists() else float("inf")


def wait_for_all(folder: Path) -> None:
    """Wait until every rank is here, so that they work at the same time even on a busy machine."""
    run = os.environ["TORCHELASTIC_RUN_ID"] + os.environ["TORCHELASTIC_RESTART_COUNT"]
    (folder / f"here-{run}-{os.environ['RANK']}").touch()
    deadline = time.monotonic() + 300
    while len(list(folder.glob(f"here-{run}-*"))) < int(os.environ["WORLD_SIZE"]) and time.monotonic() < deadline:
        time.sleep(0.01)


if __name__ == "__main__":
    where = Path(sys.argv[1])
    wait_for_all(where)
    harvests.harvest(where / "store", Dying(where, int(sys.argv[2]) if len(sys.argv) > 2 else None))
