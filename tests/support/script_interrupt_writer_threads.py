"""Press Ctrl-C at every moment of the writer threads' work. A script, because it hangs if a lock stays held.

A signal can't be timed exactly. Instead, KeyboardInterrupt is raised at each place where Python checks for signals
(after a call, at the start of a function and of each round of a loop), one place per run: in
`writer_threads.py` and in the standard library's `threading.py`, which it calls.

    python -m tests.support.script_interrupt_writer_threads
"""

from __future__ import annotations

import faulthandler
import opcode
import sys
import threading
from types import FrameType
from typing import Any

import torch

from hookline._harvest import writer_threads

FILES = (writer_threads.__file__, threading.__file__)
LOOKS = ("CALL", "RESUME", "JUMP_BACKWARD")  # Instructions after which Python checks for signals.
SECONDS = 60  # After this time the script prints the stack of each thread, and fails.


class Interrupt:
    """A trace function that raises KeyboardInterrupt at one moment of this thread."""

    def __init__(self, at: int) -> None:
        self.left = at
        self.came = False
        self.before: dict[FrameType, str] = {}  # The last instruction of each frame.

    def __call__(self, frame: FrameType, event: str, _argument: Any) -> Interrupt | None:
        if frame.f_code.co_filename not in FILES:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "return":
            self.before.pop(frame, None)
        if event == "opcode" and not self.came:
            before = self.before.get(frame, "")
            self.before[frame] = opcode.opname[frame.f_code.co_code[frame.f_lasti]]
            self.left -= before.startswith(LOOKS)
            if self.left < 0:
                self.came = True
                raise KeyboardInterrupt
        return self


def work() -> None:
    """Give two writer threads more than they may hold, and wait until they have written all."""
    buffers = writer_threads.BufferPool()
    with writer_threads.WriterThreads(2, limit=40) as threads:
        for number in range(6):
            threads.put(number, buffers.copy(torch.ones(4)).give_back, 16)
        threads.finish()


def interrupted(at: int) -> bool:
    """Run the work and interrupt it; return False if it ended before the interrupt."""
    interrupt = Interrupt(at)
    sys.settrace(interrupt)
    try:
        work()
    except (KeyboardInterrupt, RuntimeError):  # "release unlocked lock", if `Thread.start` is interrupted.
        pass
    finally:
        sys.settrace(None)
    return interrupt.came


def main() -> None:
    """Interrupt one run at each moment, until a run ends without an interrupt."""
    at = 0
    while True:
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        if not interrupted(at):
            break
        at += 1
    faulthandler.cancel_dump_traceback_later()
    sys.stdout.write(f"{at} interrupts\n")


if __name__ == "__main__":
    main()
