"""A real terminal for tests: run a program in a pty of a given size, and return what it shows there."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

from tests.support.quick_python import quick_python

SOURCE = Path(__file__).parent.parent.parent / "src"
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def shown(command: list[str], typed: str = "", columns: int = 100, lines: int = 40, **environment: str) -> str:
    """Run a Python command in a terminal, type into it, and return all its output, including escape codes."""
    own, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    unset = ("NO_COLOR", "COLUMNS", "LINES", "FORCE_COLOR")
    around = {name: value for name, value in os.environ.items() if name not in unset}
    around |= {"PYTHONPATH": str(SOURCE), "TERM": "xterm-256color", "PYTHON_BASIC_REPL": "1", "PYTHONSTARTUP": ""}
    streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    python = quick_python() if command[0] in ("-c", "-m") else [sys.executable]
    process = subprocess.Popen([*python, *command], env=around | environment, start_new_session=True, **streams)
    os.close(theirs)
    os.write(own, typed.encode())
    try:
        return b"".join(iter(lambda: _read(own), b"")).decode().replace("\r\n", "\n")
    finally:
        os.close(own)
        process.wait(timeout=60)


def session(code: list[str], **options: object) -> dict[str, str]:
    """Type lines into an interactive session; return the output of each line, by the text of the line."""
    typed = "".join(f"{line}\nprint('mark', {number})\n" for number, line in enumerate(code))
    output = shown(["-q", "-i"], f"{typed}exit()\n", **options)  # type: ignore[arg-type]
    parts = re.split(r"mark \d+\n", output.replace("\x1b[?2004h", "").replace("\x1b[?2004l", "").replace("\r", ""))
    return {line: _without_echo(part, line) for line, part in zip(code, parts, strict=False)}


def plain(text: str) -> str:
    """Return text without colours."""
    return ESCAPES.sub("", text)


def _without_echo(part: str, line: str) -> str:
    """Remove the typed text, which a terminal echoes at once or when it is read."""
    echoed = (line, "print('mark'", "exit()")
    kept = [one for one in part.splitlines() if not plain(one).removeprefix(">>> ").startswith(echoed)]
    return "\n".join(one.removeprefix(">>> ") for one in kept)


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # The process has closed the other end.
        return b""
