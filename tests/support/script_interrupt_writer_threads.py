"""Press Ctrl-C at many moments of a harvest. A script, because it hangs if a lock stays held.

A signal can't be timed exactly. Instead, KeyboardInterrupt is raised at a place where Python checks for signals
(after a call, at the start of a function and of each round of a loop), one place per run: in the files of hookline's
harvest, and in the standard library's `threading.py`, which they call.

    python -m tests.support.script_interrupt_writer_threads 50     # every 50th moment
"""

from __future__ import annotations

import faulthandler
import opcode
import os
import shutil
import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import hookline as hl

FOLDER = os.path.join(os.path.dirname(hl.__file__), "_harvest")
LOOKS = ("CALL", "RESUME", "JUMP_BACKWARD")  # Instructions after which Python checks for signals.
SECONDS = 60  # After this time the script prints the stack of each thread, and fails.
X = torch.ones(12, 4)


class Interrupt:
    """A trace function that raises KeyboardInterrupt at one moment of this thread, once a thread writes."""

    def __init__(self, at: int) -> None:
        self.left = at
        self.came = False
        self.before: dict[FrameType, str] = {}  # The last instruction of each frame.

    def __call__(self, frame: FrameType, event: str, _argument: Any) -> Interrupt | None:
        path = frame.f_code.co_filename
        if path != threading.__file__ and not path.startswith(FOLDER):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "return":
            self.before.pop(frame, None)
        if event == "opcode" and not self.came:
            before = self.before.get(frame, "")
            self.before[frame] = opcode.opname[frame.f_code.co_code[frame.f_lasti]]
            self.left -= before.startswith(LOOKS) and self.is_writing
            if self.left < 0:
                self.came = True
                raise KeyboardInterrupt
        return self

    is_writing = False

    def begin(self) -> None:
        """Count moments from here on."""
        self.is_writing = True


def work(to: Path, begin: Any) -> None:
    """Harvest some batches, and call `begin` where the first is through the model."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).eval()
    model[1].register_forward_hook(lambda *_: begin())
    hl.harvest(model, X, "*", to=to, batch_size=2, unit=4, progress=False)


def interrupted(to: Path, at: int) -> bool:
    """Interrupt one harvest; return False if it ended before."""
    interrupt = Interrupt(at)
    sys.settrace(interrupt)
    try:
        work(to, interrupt.begin)
    except (KeyboardInterrupt, RuntimeError):  # "release unlocked lock", if `Thread.start` is interrupted.
        pass
    finally:
        sys.settrace(None)
    return interrupt.came


def main(step: int) -> None:
    """Interrupt one harvest at each of these moments, until one ends without an interrupt."""
    number = 0
    with tempfile.TemporaryDirectory() as folder:
        while True:
            faulthandler.dump_traceback_later(SECONDS, exit=True)
            to = Path(folder, "acts")
            if not interrupted(to, number * step):
                break
            number += 1
            shutil.rmtree(to, ignore_errors=True)
        faulthandler.cancel_dump_traceback_later()
    sys.stdout.write(f"{number} interrupts\n")


if __name__ == "__main__":
    main(int(sys.argv[1]))
