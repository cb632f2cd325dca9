"""Run programs in new processes that have torch already: one process imports it, and forks for each program."""

from __future__ import annotations

import atexit
import functools
import json
import select
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.running import environment

# A child runs the program as `python -c` does, in `__main__`, and ends as Python ends.
SERVER = """
import json, os, sys, warnings
import torch

def next_program():
    for line in sys.stdin:
        child = os.fork()
        if not child:
            return json.loads(line)
        os.write(1, b"%d\\n" % os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    sys.exit()

given = next_program()
for number, name in enumerate((os.devnull, given["stdout"], given["stderr"])):
    os.dup2(os.open(name, os.O_RDWR), number)
os.chdir(given["folder"])
sys.path[1:1] = given["path"]
warnings.simplefilter("error") if given["strict"] else None
exec(compile(given["code"], "<string>", "exec"))
"""


def run_forked(
    code: str, folder: Path | str = ".", *, path: tuple[Path | str, ...] = (), strict: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run code in a folder, with `path` first in its search for modules; a warning is an error if `strict`."""
    with tempfile.NamedTemporaryFile() as stdout, tempfile.NamedTemporaryFile() as stderr:
        files = {"stdout": stdout.name, "stderr": stderr.name}
        given = {"code": code, "folder": str(folder), "path": [*map(str, path)], "strict": strict, **files}
        server = _server()
        assert server.stdin
        assert server.stdout
        server.stdin.write(json.dumps(given) + "\n")
        server.stdin.flush()
        if not select.select([server.stdout], [], [], 300)[0]:
            _end(server)
            raise TimeoutError(f"this did not end: {code}")
        texts = [Path(file.name).read_text(encoding="utf-8") for file in (stdout, stderr)]
        return subprocess.CompletedProcess(code, int(server.stdout.readline()), *texts)


@functools.cache
def _server() -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    server = subprocess.Popen([sys.executable, "-c", SERVER], env=environment(), stdin=pipe, stdout=pipe, text=True)
    atexit.register(_end, server)
    return server


def _end(server: subprocess.Popen[str]) -> None:
    with server:  # Closes its pipes and waits for it.
        server.kill()
    _server.cache_clear()
