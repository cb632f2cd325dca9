"""Python in a process of its own, which can import hookline and the tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def environment(**more: str) -> dict[str, str]:
    """Return the environment of such a process, with `more` in it."""
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, **more}


def python(*arguments: object, fails: bool = False, **more: str) -> str:
    """Run Python with `more` in its environment, and return what it prints; what it says too if it is to fail."""
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, env=environment(**more), cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert (done.returncode != 0) == fails, done.stderr
    return done.stdout + (done.stderr if fails else "")


def start(code: str, *arguments: object) -> subprocess.Popen[str]:
    """Start Python with some code, and do not wait for it."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment(), cwd=ROOT, stdout=pipe, stderr=pipe, text=True)
