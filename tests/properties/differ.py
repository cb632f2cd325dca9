"""Compare hookline here with another one: `python -m tests.properties.differ HEAD~1 2000`.

The other is a commit, or a folder with its source. Random cases run on both, each in a process of its own. Every
difference that a user could see is printed, apart from the wording of messages. To repeat one case and reduce it:
`... differ HEAD~1 --seed 123`. `make diff BASE=HEAD~1 SEED=123` does the same.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import difflib
import gc
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import hookline as hl
from tests.properties.fuzz import COLLECT_EVERY, quiet, say
from tests.properties.observations import Lines, case_of, observe, observe_case
from tests.properties.properties import show
from tests.properties.shrinking import shrunk
from tests.properties.worlds import Case

ROOT = Path(__file__).parents[2]
AHEAD = 20  # How many cases a process may be ahead of the comparison.
STARTING = 300.0  # Seconds in which a process must have imported torch and hookline.
MANY = 25  # After this many differences, the run ends.
INVALID = "the case itself failed"


class Dead(Exception):
    """A process that can't start, has ended, or takes too long."""


class Worker:
    """A process that runs cases on one source of hookline. If a case ends it, another takes its place."""

    def __init__(self, source: Path, limit: float = 60.0, leave_out: str = "") -> None:
        self.source, self.limit, self.leave_out = source.resolve(), limit, leave_out
        self.waiting: collections.deque[int | Case] = collections.deque()
        self.start()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start the process."""
        self.pipe, theirs = Pipe()
        paths = [str(self.source), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", f"from tests.properties.differ import serve; serve({theirs.fileno()})"],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C reaches only the process that a person has started.
            )
        self.is_ready = False

    def wait_until_ready(self) -> None:
        """Wait for a process that was just started; raise Dead if it did not import hookline from the source."""
        if not self.is_ready:
            imported = self._receive(STARTING)
            if not Path(imported).is_relative_to(self.source):
                self.stop()
                raise Dead(f"hookline was imported from {imported}")
            self.is_ready = True

    def ask(self, what: int | Case) -> None:
        """Start on a case, or on the case of a seed."""
        if self.process.returncode is not None:
            self.start()
        self.waiting.append(what)
        with contextlib.suppress(OSError):  # If the process is dead, `answer` notices.
            self.pipe.send(what)

    def answer(self) -> Lines:
        """Return what the first case asked for shows, or how it ended the process."""
        self.wait_until_ready()
        self.waiting.popleft()
        try:
            lines = self._receive(self.limit)
            return [line for line in lines if not (self.leave_out and re.match(self.leave_out, line))]
        except Dead as death:
            if self.waiting:
                self.start()
            for what in self.waiting:
                self.pipe.send(what)
            return [f"the process {death}"]

    def stop(self) -> int:
        """End the process, and return its exit status."""
        self.pipe.close()  # The process ends by itself when it is not busy.
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(1)
        self.process.kill()
        return self.process.wait()

    def _receive(self, limit: float) -> Any:
        try:
            if self.pipe.poll(limit):
                return self.pipe.recv()
        except (EOFError, OSError):
            raise Dead(f"died with exit status {self.stop()}") from None
        self.stop()
        raise Dead(f"took longer than {limit:g} s")


def serve(descriptor: int) -> None:
    """Answer for a worker, in its process."""
    torch.set_warn_always(True)  # Torch would give some warnings only once.
    with quiet(), Connection(descriptor) as pipe, contextlib.suppress(EOFError, OSError):
        pipe.send(hl.__file__)
        for count in itertools.count():
            what = pipe.recv()
            if count % COLLECT_EVERY == 0:
                gc.collect()
            try:
                pipe.send(observe(what) if isinstance(what, int) else observe_case(what))
            except Exception:
                pipe.send([f"{INVALID}: {traceback.format_exc()}"])


def observed(workers: Iterable[Worker], cases: Iterable[int | Case]) -> Iterator[tuple[Any, list[Lines]]]:
    """Yield each case with what it shows in each worker."""
    cases, coming = itertools.tee(cases)
    ahead = itertools.chain(coming, itertools.repeat(None))
    for what in itertools.chain(itertools.repeat(None, AHEAD), cases):
        following = next(ahead)
        for worker in workers:
            if following is not None:
                worker.ask(following)
        if what is not None:
            yield what, [worker.answer() for worker in workers]


def first_difference(base: Lines, here: Lines) -> str:
    """Return the first line that differs, from where it differs; "" if all are equal."""
    for one, other in itertools.zip_longest(base, here, fillvalue="(nothing more)"):
        if one != other or one.startswith(INVALID):
            same = next((index for index, pair in enumerate(zip(one, other, strict=False)) if len({*pair}) > 1), 0)
            start = max(0, same - 40)
            cut = [("..." if start else "") + line[start : start + 160] for line in (one, other)]
            return f"{one.split(': ')[0]}\n    base: {cut[0]}\n    here: {cut[1]}"
    return ""


def run(workers: list[Worker], base: str, seeds: range) -> int:
    """Compare the cases of seeds and print the progress; return the number of differences."""
    began = last = time.perf_counter()
    found = 0
    for done, (seed, (theirs, ours)) in enumerate(observed(workers, seeds), 1):
        problem = first_difference(theirs, ours)
        found += bool(problem)
        if problem:
            say(f"seed {seed}: {problem}\n    again: make diff BASE={base} SEED={seed}")
        if time.perf_counter() - last > 5 or done == len(seeds) or found == MANY:
            last = time.perf_counter()
            say(f"{done} of {len(seeds)} cases, {found} differences, {done / (last - began):.0f} cases/s")
        if found == MANY:
            break
    return found


def replay(workers: list[Worker], seed: int) -> int:
    """Compare the case of a seed, and show every line that differs and the smallest case that differs so."""

    def problem_of(what: int | Case) -> str:
        [(_, (theirs, ours))] = observed(workers, [what])
        return first_difference(theirs, ours)

    [(_, (theirs, ours))] = observed(workers, [seed])
    case = case_of(seed)
    say(
        "\n".join(difflib.unified_diff(theirs, ours, "base", "here", n=0, lineterm="")) or f"seed {seed}: no difference"
    )
    if theirs != ours and case is not None:
        smallest, problem = shrunk(case, check=lambda one: "" if INVALID in (found := problem_of(one)) else found)
        say(f"\nthe smallest case found that differs so: {problem}\n    {show(smallest)}")
    return int(theirs != ours)


@contextlib.contextmanager
def source_of(base: str) -> Iterator[Path]:
    """Return the folder with the source of a commit, which exists for the time of the block, or the one given."""
    if Path(base).is_dir():
        yield Path(base, "src") if Path(base, "src").is_dir() else Path(base)
        return
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder, "source.tar")
        if subprocess.run(["git", "archive", "--output", archive, base, "src"], cwd=ROOT).returncode:
            raise Dead("it is neither a folder nor a commit with a source")
        shutil.unpack_archive(archive, folder)
        yield Path(folder, "src")


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.properties.differ", description=__doc__)
    parser.add_argument("base", help="a commit, or a folder with the source of hookline")
    parser.add_argument("count", type=int, nargs="?", default=2000, help="how many cases")
    parser.add_argument("--start", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="run the case of this seed again, and make it smaller")
    parser.add_argument("--limit", type=float, default=60.0, help="how many seconds a case may take")
    parser.add_argument(
        "--leave-out", default="", metavar="REGEX", help="leave out lines that begin so: 'warned|order'"
    )
    given = parser.parse_args()
    with contextlib.ExitStack() as stack:
        try:
            sources = [stack.enter_context(source_of(given.base)), ROOT / "src"]
            workers = [stack.enter_context(Worker(source, given.limit, given.leave_out)) for source in sources]
            for worker in workers:
                worker.wait_until_ready()
        except Dead as problem:
            parser.error(f"{given.base} can't be compared: {problem}")
        if given.seed is not None:
            return replay(workers, given.seed)
        return 1 if run(workers, given.base, range(given.start, given.start + given.count)) else 0


if __name__ == "__main__":
    sys.exit(main())
