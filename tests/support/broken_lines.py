"""Break lines of hookline one at a time, and see whether the tests notice.

    python -m tests.support.broken_lines _sweep -n 5 -- tests/sweep

Each broken line is in a copy of the source, and the tests run on the copy. What no test notices is printed at the end:
a line that nobody needs, a behaviour without a test, or a change that makes no difference.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent.parent
LONGEST = 600  # Seconds that the tests may take: a broken line may make them wait forever.


class Break(NamedTuple):
    """One way to break a file: what stands between two places in a line is written otherwise."""

    path: Path
    line: int
    start: int
    end: int
    text: str

    def broken(self, source: str) -> str:
        """Return the file's text with the line broken."""
        lines = source.splitlines(keepends=True)
        line = lines[self.line - 1].encode()  # The parser counts bytes.
        lines[self.line - 1] = (line[: self.start] + self.text.encode() + line[self.end :]).decode()
        return "".join(lines)


def breaks_of(path: Path) -> Iterator[Break]:
    """Return the ways to break a file's functions: leave a statement out, turn a condition round, return nothing."""
    functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
    nodes = {id(inner): inner for function in functions for one in function.body for inner in ast.walk(one)}
    for node in nodes.values():
        if getattr(node, "lineno", 0) != getattr(node, "end_lineno", None):
            continue
        place = (path, node.lineno, node.col_offset, node.end_col_offset)
        is_statement = isinstance(node, (ast.Assign, ast.AugAssign, ast.Delete, ast.Raise))
        if is_statement or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
            yield Break(*place, "pass")
        elif isinstance(node, ast.Return) and node.value is not None and ast.unparse(node.value) != "None":
            yield Break(*place, "return None")
        elif isinstance(node, (ast.Compare, ast.BoolOp)):
            yield Break(*place, f"(not ({ast.unparse(node)}))")


def is_noticed(broken: Break, tests: list[str]) -> bool:
    """Return True if the tests fail on a copy of the source with this line broken."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "src"
        shutil.copytree(ROOT / "src", copy, ignore=shutil.ignore_patterns("__pycache__"))
        file = copy / broken.path.relative_to(ROOT / "src")
        file.write_text(broken.broken(file.read_text()))
        command = [sys.executable, "-m", "pytest", "-qx", "-p", "no:cacheprovider", *tests]
        environment = {**os.environ, "PYTHONPATH": str(copy)}
        try:
            done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LONGEST)
        except subprocess.TimeoutExpired:
            return True
    assert done.returncode != 4, f"pytest was not called correctly: {done.stderr}"
    return done.returncode != 0


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.broken_lines", description=__doc__)
    parser.add_argument("package", help="a package or file of src/hookline, such as _engine or _cache/file.py")
    parser.add_argument("-n", type=int, default=5, help="how many lines to break")
    parser.add_argument("--seed", type=int, default=0, help="which lines")
    parser.add_argument("tests", nargs="+", help="what pytest is given, after --")
    given = parser.parse_args()
    place = ROOT / "src" / "hookline" / given.package
    files = [place] if place.is_file() else sorted(place.rglob("*.py"))
    every = [one for path in files for one in breaks_of(path)]
    for broken in random.Random(given.seed).sample(every, min(given.n, len(every))):
        noticed = is_noticed(broken, given.tests)
        line = broken.broken(broken.path.read_text()).splitlines()[broken.line - 1].strip()
        word = "noticed" if noticed else "NOT NOTICED"
        sys.stdout.write(f"{word}: {broken.path.relative_to(ROOT / 'src')}:{broken.line}: {line}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
