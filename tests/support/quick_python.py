"""Run Python programs in new processes that have torch and hookline imported already: importing them takes seconds."""

from __future__ import annotations

import atexit
import functools
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.running import environment

SCRIPT = str(Path(__file__).with_name("script_quick_python.py"))


@functools.cache
def quick_python() -> list[str]:
    """Return what stands for `python` before `-m module` or `-c code`. The first call starts the server."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):  # An old Python or system, or a container that forbids it.
        return [sys.executable]
    folder = tempfile.TemporaryDirectory()
    address = str(Path(folder.name) / "socket")
    pipe = subprocess.PIPE
    command = [sys.executable, SCRIPT, "serve", address]
    server = subprocess.Popen(command, env=environment(), stdin=pipe, stdout=pipe, start_new_session=True)
    assert server.stdout is not None
    assert server.stdout.readline() == b"ready\n"

    def end() -> None:
        os.killpg(server.pid, signal.SIGKILL)  # With the programs that failed tests left running.
        server.communicate()
        folder.cleanup()

    atexit.register(end)
    return [sys.executable, "-IS", SCRIPT, address]


def run_forked(
    code: str, folder: Path | str = ".", *, path: tuple[Path | str, ...] = (), strict: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run code in a folder, with `path` first in its search for modules; a warning is an error if `strict`."""
    start = "import warnings; warnings.simplefilter('error')\n" if strict else ""
    paths = os.pathsep.join([*map(str, path), environment()["PYTHONPATH"]])
    return subprocess.run(
        [*quick_python(), "-c", start + code],
        cwd=folder,
        env=environment(PYTHONPATH=paths),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
