"""Kill a harvest at many moments, and restart it each time. A script, so that it loads everything once, then forks.

Half of the kills come from outside after a random time. The others are aimed: the child counts its calls of the
functions that write files, and kills itself just before or just after one of them.

    python -m tests.support.script_kill_harvest 200 6                 # the number of kills, and the seed
    python -m tests.support.script_kill_harvest 200 6 --batches       # a harvest of an unknown number of batches
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tests.support import harvests

# In memory, if there is room, since no kill waits for the disk: a process dies there as it does on a disk.
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) and shutil.disk_usage("/dev/shm").free > 1 << 30 else None
FILES = ("open", "write", "pwrite", "writev", "fsync", "fdatasync", "link", "rename", "replace", "unlink", "mkdir")


class Aim(NamedTuple):
    """The call of a file function at which the process dies, and whether it dies after the call or before."""

    function: str
    call: int
    after: bool


class Deaths:
    """Counts the calls of each function that writes files, and kills the process before or after one of them."""

    def __init__(self, aim: Aim | None = None) -> None:
        self.calls: Counter[str] = Counter()
        self.aim = aim
        for name in FILES:
            if hasattr(os, name):
                setattr(os, name, self._counted(name, getattr(os, name)))

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.calls[name] += 1
            is_aim = self.aim is not None and (name, self.calls[name]) == self.aim[:2]
            if is_aim and not self.aim.after:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                return function(*args, **kwargs)
            finally:
                if is_aim:
                    os.kill(os.getpid(), signal.SIGKILL)

        return counted


def resume(to: Path, notes: Path | None = None) -> None:
    """Run the harvest, or what is left of it."""
    if "--batches" in sys.argv:
        harvests.harvest(to, harvests.Batches(), batch_size=None, unit=2)
    else:
        harvests.harvest(to, harvests.Sentences(notes=notes))


def child(to: Path, notes: Path, aim: Aim | None = None) -> tuple[int, int]:
    """Start the harvest in a forked process; return its pid, and a pipe that gets its counted calls at the end."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, reading
    status = 1
    try:
        tell = os.write
        tell(writing, b"!")
        deaths = Deaths(aim)
        resume(to, notes)
        tell(writing, json.dumps(deaths.calls).encode())
        status = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(status)


def ended(pid: int, pipe: int) -> tuple[bool, str]:
    """Wait for a child; return True if it was killed, and what it wrote to the pipe."""
    _, status = os.waitpid(pid, 0)
    told = os.read(pipe, 10000).decode()
    os.close(pipe)
    if not os.WIFSIGNALED(status) and os.WEXITSTATUS(status):
        raise SystemExit("a harvest failed without being killed")
    return os.WIFSIGNALED(status), told


def begun(pipe: int) -> None:
    """Wait until a child has begun."""
    assert os.read(pipe, 1) == b"!"


def undisturbed(to: Path) -> tuple[float, dict[str, int]]:
    """Let a harvest run to its end; return its duration in seconds, and its calls."""
    pid, pipe = child(to, to.with_suffix(".notes"))
    begun(pipe)
    start = time.perf_counter()
    _, told = ended(pid, pipe)
    return time.perf_counter() - start, json.loads(told)


class Tally:
    """The number of kills, stores and leftover files."""

    def __init__(self) -> None:
        self.timed = self.aimed = self.stores = self.fruitful = self.spared = self.orphans = self.hidden = self.lost = 0

    @property
    def kills(self) -> int:
        """The number of harvests that were killed while they ran."""
        return self.timed + self.aimed


def one_attempt(to: Path, seconds: float, calls: dict[str, int], chance: random.Random, tally: Tally) -> bool:
    """Start a harvest, try to kill it, and check what it left; return True if it ended before it was killed."""
    before = harvests.committed(to)
    notes = to.with_suffix(".notes")
    notes.unlink(missing_ok=True)
    is_aimed = chance.random() < 0.5
    part = chance.choice([0.3, 0.6, 1.0])  # Of a whole run. Short ones give stores that were killed many times.
    aim = None
    if is_aimed:  # All functions have the same chance, because the rare ones matter most.
        function = chance.choice(sorted(calls))
        aim = Aim(function, chance.randint(1, max(int(calls[function] * part), 1)), chance.random() < 0.5)
    pid, pipe = child(to, notes, aim)
    begun(pipe)
    if not is_aimed:
        time.sleep(chance.uniform(0, seconds * part))
        os.kill(pid, signal.SIGKILL)  # Nobody else has this pid: a child that ended keeps it until `waitpid`.
    killed, _ = ended(pid, pipe)
    after = harvests.committed(to)
    assert before <= after, "a finished unit is lost"
    if notes.exists():
        loaded = {*harvests.loaded(notes)}
        assert not before & loaded, "a finished unit was done again"
        assert after - before <= loaded, "a unit was finished without loading its samples"
        tally.lost = max(tally.lost, len(loaded - after))
    tally.timed += killed and not is_aimed
    tally.aimed += killed and is_aimed
    tally.fruitful += killed and after > before
    tally.spared += not killed
    return not killed


def files_of(to: Path) -> int:
    """Return the number of data files."""
    return sum(1 for path in (to / "data").rglob("*") if path.is_file()) if (to / "data").is_dir() else 0


def sweep_hidden(to: Path) -> int:
    """Make a store's hidden files old, resume, and check that none is left; return how many there were."""
    hidden = list(to.rglob(".*"))
    for path in hidden:
        os.utime(path, (0, 0))
    if hidden:
        resume(to)
    assert not list(to.rglob(".*")), list(to.rglob(".*"))
    return len(hidden)


def main(number: int, seed: int) -> None:
    """Kill harvests as often as asked, and compare every finished store with the undisturbed one."""
    chance, tally, start = random.Random(seed), Tally(), time.perf_counter()
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        harvests.harvest(Path(folder, "first"))  # So that no child has anything left to import.
        whole = Path(folder, "undisturbed")
        seconds, calls = undisturbed(whole)
        expected = harvests.contents(whole)
        while tally.kills < number:
            to = Path(folder, f"store-{tally.stores}")
            while not one_attempt(to, seconds, calls, chance, tally):
                per_unit = len([name for name in expected if name.startswith("data/")]) // len(
                    harvests.committed(whole)
                )
                tally.orphans += files_of(to) > per_unit * len(harvests.committed(to))
            found = harvests.contents(to)
            tally.hidden += sweep_hidden(to)
            assert found.keys() == expected.keys(), sorted(found.keys() ^ expected.keys())
            different = [name for name in found if found[name] != expected[name]]
            assert not different, f"store {tally.stores} differs in {different}"
            tally.stores += 1
    json.dump({**vars(tally), "calls": calls, "run": seconds, "seconds": time.perf_counter() - start}, sys.stdout)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
