"""The cost of hookline's work, counted in bytecodes, calls of Python functions and calls of C functions. No clock.

    python -m tests.support.cost            prints today's counts beside the bounds

Counts do not depend on the machine, on its load, or on the run, so `tests/test_cost.py` can hold the library to them.
After a change that makes something cheaper, copy the printed bounds to `BOUNDS`.
"""

from __future__ import annotations

import dis
import gc
import math
import re
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import nn

import hookline as hl
from hookline._kernel import short_form

Run = Callable[[], object]

# The bounds for each piece of work, in bytecodes and calls of C functions: today's counts times SLACK. Python 3.10 to
# 3.13 differ by less than a tenth, and 3.11 needs the most.
SLACK = 1.12
BOUNDS: dict[str, tuple[int, int]] = {
    "capture in a block": (171, 8),
    "capture": (171, 8),
    "capture, clone=False": (149, 5),
    "capture, clone=True": (444, 16),
    "capture, detach=False": (776, 29),
    'capture, keep="all"': (367, 13),
    "capture an input": (1187, 36),
    "patch": (282, 22),
    "edit": (693, 40),
    "find, attach and detach, by name": (418, 8),
    "attach and detach": (279, 2),
    "attach and detach, one by one": (818, 16),
    "find, by name": (217, 8),
    "find, by name and port": (1218, 45),
    "find, a parameter by name": (1757, 78),
    "find, a module": (686, 26),
    "read": (279, 13),
    "capture, autograd on": (175, 10),
    "a gradient": (401, 20),
    "find, attach and detach, by type": (391, 6),
    "find by pattern, one of two matches": (228, 10),
    'find by "*", two match': (372, 13),
    'find by "**", two match': (372, 13),
    "a forward with any hooks": (349, 12),
    "patch, for every frame above it": (2, 0),
    "a forward stopped early, over its part": (937, 32),
    "a block with one capture": (2150, 48),
}


class Counts(NamedTuple):
    """The bytecodes and function calls that ran, counted."""

    bytecodes: Counter[tuple[CodeType, str]]  # By code and by the name of the instruction.
    python: Counter[CodeType]
    c: Counter[str]

    @property
    def total(self) -> int:
        """The number of all bytecodes."""
        return self.bytecodes.total()

    def __sub__(self, other: Counts) -> Counts:
        """Return the counts by which this exceeds `other`."""
        return Counts(*(Counter(mine) - Counter(theirs) for mine, theirs in zip(self, other, strict=True)))


def is_of_hookline(code: CodeType) -> bool:
    """Return True if a function is hookline's."""
    return "/hookline/" in code.co_filename.replace("\\", "/")


def count(run: Run) -> Counts:
    """Run a function several times, and count the bytecodes and calls of one run."""
    run()
    gc.disable()  # Freeing objects of earlier runs, and warnings about them, would be counted.
    try:
        bytecodes = _count_bytecodes(run)
        python, c = _count_calls(run)
    finally:
        gc.enable()
    return Counts(bytecodes, python, c)


def _count_bytecodes(run: Run) -> Counter[tuple[CodeType, str]]:
    seen: Counter[tuple[CodeType, int]] = Counter()

    def at_bytecode(frame: FrameType, event: str, _argument: Any) -> Any:
        if event == "opcode":
            seen[frame.f_code, frame.f_lasti] += 1
        return at_bytecode

    def at_call(frame: FrameType, _event: str, _argument: Any) -> Any:
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        return at_bytecode

    # Python 3.12 sends these events only from the second settrace on, 3.13 only from the second run of a function on.
    before = sys.gettrace()
    for _ in range(2):
        sys.settrace(at_call)
        try:
            run()
            seen.clear()
            run()
        finally:
            sys.settrace(before)
    found: Counter[tuple[CodeType, str]] = Counter()
    codes = {code: code.co_code for code, _ in seen}
    for (code, offset), times in seen.items():
        found[code, dis.opname[codes[code][offset]]] += times
    return found


def _count_calls(run: Run) -> tuple[Counter[CodeType], Counter[str]]:
    python: Counter[CodeType] = Counter()
    c: Counter[str] = Counter()

    def at_event(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            python[frame.f_code] += 1
        elif event == "c_call":
            c[argument.__qualname__] += 1

    before = sys.getprofile()
    sys.setprofile(at_event)
    try:
        run()
    finally:
        sys.setprofile(before)
    c.subtract(["setprofile"])  # The call below that ends the count.
    return python, +c


FEW, MANY = 4, 8
X = torch.ones(1, 2)


def model_of(depth: int) -> nn.Sequential:
    """Return a model of `depth` linear layers with an Identity after each."""
    return nn.Sequential(*[one for _ in range(depth) for one in (nn.Linear(2, 2), nn.Identity())]).eval()


class Subject(NamedTuple):
    """The subject of a piece of work: a model, names of some linear layers, and a stack of what to undo at the end."""

    model: nn.Sequential
    names: list[str]
    stack: ExitStack

    def hooks(self) -> hl.Hooks:
        """Return hooks on the model, to be removed at the end."""
        hooks = hl.Hooks(self.model)
        self.stack.callback(hooks.remove)
        return hooks


Prepare = Callable[[Subject], Run]


def counted(prepare: Prepare, size: int, depth: int = MANY, grad: bool = False) -> Counts:
    """Count a piece of work on `size` of the `depth` linear layers of a model."""

    def work() -> Counts:
        model, names = model_of(depth), [str(2 * number) for number in range(size)]
        with ExitStack() as stack, torch.set_grad_enabled(grad):
            return count(prepare(Subject(model, names, stack)))

    with ThreadPoolExecutor(1) as thread:  # Some work walks the stack, which is short in a new thread.
        return thread.submit(work).result()


def of_one_more(few: Counts, many: Counts) -> tuple[float, float]:
    """Return the bytecodes and C calls of one more item."""
    items = MANY - FEW
    return (many.total - few.total) / items, (many.c.total() - few.c.total()) / items


def forward(add: Callable[[hl.Hooks, list[str]], object]) -> Prepare:
    """Prepare a forward with hooks that are already attached."""

    def prepare(subject: Subject) -> Run:
        add(subject.hooks(), subject.names)
        return lambda: subject.model(X)

    return prepare


def deep(frames: int) -> Prepare:
    """Prepare a forward with patched values, called `frames` frames deep."""

    def prepare(subject: Subject) -> Run:
        run = FORWARD["patch"](subject)

        def descend(left: int) -> object:
            return descend(left - 1) if left else run()

        return lambda: descend(frames)

    return prepare


def bare(subject: Subject) -> Run:
    """Prepare a forward without hooks."""
    return lambda: subject.model(X)


def in_a_block(subject: Subject) -> Run:
    """Prepare a forward inside a block."""
    subject.stack.enter_context(hl.capture(subject.model, subject.names))
    return lambda: subject.model(X)


def stopped(subject: Subject) -> Run:
    """Prepare a forward that stops at the last of the named layers."""
    hooks = subject.hooks()
    hooks.capture(subject.names[-1], stop=True)
    return lambda: subject.model(X)


def bare_part(subject: Subject) -> Run:
    """Prepare a forward, without hooks, of the part that runs in `stopped`."""
    part = subject.model[: 2 * len(subject.names) - 1]
    return lambda: part(X)


def backward(subject: Subject) -> Run:
    """Prepare a forward and backward with gradients captured."""
    subject.hooks().capture((subject.names, ":grad_output"))
    return lambda: subject.model(X).sum().backward()


def block(where: Callable[[Subject], Any]) -> Prepare:
    """Prepare a block that is entered and left."""

    def prepare(subject: Subject) -> Run:
        chosen = where(subject)

        def run() -> None:
            with hl.capture(subject.model, chosen):
                pass

        return run

    return prepare


def switch(subject: Subject) -> Run:
    """Prepare hooks that are activated and deactivated together."""
    hooks = subject.hooks()
    hooks.capture(subject.names)

    def run() -> None:
        hooks.activate()
        hooks.deactivate()

    return run


def one_by_one(subject: Subject) -> Run:
    """Prepare hooks that are deactivated and activated one by one."""
    hooks = subject.hooks()
    hooks.capture(subject.names)

    def run() -> None:
        for hook in hooks:
            hook.deactivate()
        for hook in hooks:
            hook.activate()

    return run


def find(where: Callable[[Subject], Any]) -> Prepare:
    """Prepare a short form that is created but not entered."""
    return lambda subject: lambda: short_form(subject.model).capture(where(subject))


def read(subject: Subject) -> Run:
    """Prepare reading the captured values."""
    _, acts = hl.run(subject.model, X, capture=subject.names)
    return lambda: [acts[name] for name in subject.names]


# The cost of one more hook in a forward, ...
FORWARD: dict[str, Prepare] = {
    "capture in a block": in_a_block,
    "capture": forward(lambda hooks, names: hooks.capture(names)),
    "capture, clone=False": forward(lambda hooks, names: hooks.capture(names, clone=False)),
    "capture, clone=True": forward(lambda hooks, names: hooks.capture(names, clone=True)),
    "capture, detach=False": forward(lambda hooks, names: hooks.capture(names, detach=False)),
    'capture, keep="all"': forward(lambda hooks, names: hooks.capture(names, keep="all")),
    "capture an input": forward(lambda hooks, names: hooks.capture((names, ":input"))),
    "patch": forward(lambda hooks, names: hooks.patch(dict.fromkeys(names, 0.0))),
    "edit": forward(lambda hooks, names: hooks.edit(names, torch.abs)),
}
# ... of one more in other work, in a model of the same size, ...
ELSEWHERE: dict[str, Prepare] = {
    "find, attach and detach, by name": block(lambda subject: subject.names),
    "attach and detach": switch,
    "attach and detach, one by one": one_by_one,
    "find, by name": find(lambda subject: subject.names),
    "find, by name and port": find(lambda subject: [f"{name}:input[0]" for name in subject.names]),
    "find, a parameter by name": find(lambda subject: [f"{name}.weight:param" for name in subject.names]),
    "find, a module": find(lambda subject: list(subject.model)[: len(subject.names)]),
    "read": read,
}
# ... and of one more pair of modules, a Linear and an Identity, in the model.
LARGER: dict[str, Prepare] = {
    "find, attach and detach, by type": block(lambda subject: nn.Linear),
    "find by pattern, one of two matches": find(lambda subject: re.compile(r"\d*[02468]")),
    'find by "*", two match': find(lambda subject: "*"),
    'find by "**", two match': find(lambda subject: "**"),
}


def measure() -> dict[str, tuple[float, float]]:
    """Return the bytecodes and C calls of every piece of work, for one more item."""
    found = {name: of_one_more(counted(one, FEW), counted(one, MANY)) for name, one in {**FORWARD, **ELSEWHERE}.items()}
    found["capture, autograd on"] = of_one_more(*(counted(FORWARD["capture"], size, grad=True) for size in (FEW, MANY)))
    found["a gradient"] = of_one_more(*(counted(backward, size, grad=True) for size in (FEW, MANY)))
    found |= {name: of_one_more(*(counted(one, 1, size) for size in (FEW, MANY))) for name, one in LARGER.items()}
    one, none = counted(FORWARD["capture"], 1), counted(bare, 1)
    each = found["capture"]
    found["a forward with any hooks"] = (one.total - none.total - each[0], one.c.total() - none.c.total() - each[1])
    few, many = (counted(deep(frames), MANY) for frames in (FEW, MANY))
    found["patch, for every frame above it"] = (many.total - few.total) / (MANY - FEW) / MANY, 0
    over = counted(stopped, FEW), counted(bare_part, FEW)
    found["a forward stopped early, over its part"] = (over[0].total - over[1].total, (over[0].c - over[1].c).total())
    empty = counted(block(lambda subject: "0"), 1)
    found["a block with one capture"] = (empty.total, empty.c.total())
    return found


def main() -> None:
    """Print today's counts beside the bounds, and the new bounds for today's counts."""
    lines = [f"{'each':40s} {'bytecodes':>10s} {'bound':>6s} {'C calls':>8s} {'bound':>6s}"]
    today = measure()
    for name, (bytecodes, calls) in today.items():
        most = BOUNDS.get(name, (0, 0))
        lines.append(f"{name:40s} {bytecodes:10.1f} {most[0]:6d} {calls:8.1f} {most[1]:6d}")
    lines += ["", "BOUNDS: dict[str, tuple[int, int]] = {"]
    for name, (bytecodes, calls) in today.items():
        text = repr(name) if '"' in name else f'"{name}"'
        lines.append(f"    {text}: ({math.ceil(SLACK * bytecodes)}, {int(SLACK * calls)}),")
    sys.stdout.write("\n".join([*lines, "}", ""]))


if __name__ == "__main__":
    main()
