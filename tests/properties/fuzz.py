"""The long run: `python -m tests.properties.fuzz 20000`. To repeat one case and reduce it: `... fuzz --seed 123`.

`--only members` runs only that property.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import random
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator

import torch

from tests.properties.cases import random_case
from tests.properties.properties import (
    PROPERTIES,
    agrees_with_the_oracle,
    any_property,
    containers_agree_with_the_oracle,
    drawn_property,
    members_agree_with_the_oracle,
    show,
)
from tests.properties.shrinking import shrunk

COLLECT_EVERY = 64
Check = Callable[[random.Random], str]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Use one thread, and no warnings. Garbage collection is off, so that tests see leaked reference cycles."""
    threads = torch.get_num_threads()
    state = torch.get_rng_state()
    torch.set_num_threads(1)
    gc.collect()
    gc.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        gc.enable()
        torch.set_rng_state(state)
        torch.set_num_threads(threads)


def problem_of(seed: int, check: Check = any_property) -> str:
    """Return what is wrong with the case of a seed, or ""."""
    if seed % COLLECT_EVERY == 0:
        gc.collect()
    try:
        return check(random.Random(seed))
    except Exception:
        return f"the case itself failed: {traceback.format_exc()}"


def replay(seed: int, check: Check) -> str:
    """Repeat the case of a seed; return its problem and the smallest case that fails in the same way."""
    problem = problem_of(seed, check)
    source = random.Random(seed)
    if check is any_property:
        check = drawn_property(source)
    members, containers = check is members_agree_with_the_oracle, check is containers_agree_with_the_oracle
    if not problem or not (members or containers or check is agrees_with_the_oracle):
        return problem
    case, smallest = shrunk(random_case(source, members, containers)[0])
    return f"{problem}\n\nthe smallest case found that fails so:\n{smallest}\n    {show(case)}"


def run(count: int, start: int, check: Check) -> int:
    """Run the cases of consecutive seeds and print the progress; return the number of failures."""
    began = last = time.perf_counter()
    found = 0
    for done, seed in enumerate(range(start, start + count), 1):
        problem = problem_of(seed, check)
        found += bool(problem)
        if problem:
            only = "".join(f" --only {name}" for name, (one, _) in PROPERTIES.items() if one is check)
            say(f"seed {seed}: {problem}\n    again: python -m tests.properties.fuzz{only} --seed {seed}")
        if time.perf_counter() - last > 5 or done == count:
            last = time.perf_counter()
            say(f"{done} of {count} cases, {found} divergences, {done / (last - began):.0f} cases/s")
    return found


def say(text: str) -> None:
    """Print a line without buffering."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.properties.fuzz", description=__doc__)
    parser.add_argument("count", type=int, nargs="?", default=1000, help="how many cases")
    parser.add_argument("--start", type=int, default=0, help="the first seed")
    parser.add_argument("--only", choices=PROPERTIES, help="one property instead of any")
    parser.add_argument("--seed", type=int, help="run the case of this seed again, and make it smaller")
    given = parser.parse_args()
    check = PROPERTIES[given.only][0] if given.only else any_property
    with quiet():
        if given.seed is None:
            return 1 if run(given.count, given.start, check) else 0
        problem = replay(given.seed, check)
    say(problem or f"seed {given.seed}: no divergence")
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main())
