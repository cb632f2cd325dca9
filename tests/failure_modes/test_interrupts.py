"""Ctrl-C at every moment of attaching, running and detaching: the model is left unchanged.

By default the tests interrupt at every call of a hookline function, and at some of the other moments at which Python
may raise KeyboardInterrupt. `make fuzz` tries all of them.
"""

from __future__ import annotations

import contextlib
import dis
import gc
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn, overrides

import hookline as hl
from tests.support.deep import IS_DEEP
from tests.support.states import left_in_process, state_of

SOURCE = str(Path(hl.__file__).parent)
CALLED = (contextlib.__file__, overrides.__file__)  # Modules that hookline calls and that are interrupted too.
STEP = 1 if IS_DEEP else 7

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # A block left open by the interrupt warns when freed.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),  # An interrupt in `__del__`.
]


class Part(nn.Module):
    """Has a child, a parameter, a method and a function."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.weight = nn.Parameter(torch.randn(3, 3))

    def mix(self, x: Tensor) -> Tensor:
        return x @ self.weight

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.mix(self.inner(x)), -1)


class Net(nn.Module):
    """Two parts with one tied parameter, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.a = Part()
        self.b = Part()
        self.head = nn.Linear(3, 2)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.b(self.a(x)))


Program = Callable[[nn.Module, Tensor], None]


def in_block(make: Callable[[nn.Module], hl.Hooks]) -> Program:
    def program(model: nn.Module, x: Tensor) -> None:
        with make(model):
            model(x).sum().backward()

    return program


def twice(value: Any) -> Any:
    return value * 2


def nested(model: nn.Module, x: Tensor) -> None:
    with hl.capture(model, "a", "head"):
        with hl.patch(model, {"a": 0.0, "a.weight:param": 1.0}), hl.edit(model, "a.weight:param", twice):
            model(x)
        model(x)


def entered_twice(model: nn.Module, x: Tensor) -> None:
    hooks = hl.Hooks(model, active=False)
    hooks.patch({"a": 0.0, "b.weight:param": 1.0})
    with hooks:
        with hooks:
            model(x)
        model(x)


def run(model: nn.Module, x: Tensor) -> None:
    hl.run(model, x, capture="a", patch={"b.weight:param": 0.0})


def activated(model: nn.Module, x: Tensor) -> None:
    hooks = hl.Hooks(model, active=False)
    hooks.patch({"a": 0.0})
    with hooks.activated():
        model(x)


def stopped(model: nn.Module, x: Tensor) -> None:
    with hl.capture(model, "a", stop=True):
        model(x)


def kept(model: nn.Module, x: Tensor) -> None:
    hooks = hl.Hooks(model)
    hooks.capture("a")
    hooks.patch({"a": 0.0, "a.weight:param": 1.0}, name="patch")
    model(x)
    hooks["patch"].deactivate()
    hooks.deactivate()
    hooks.activate()
    with hooks:
        model(x)
    hooks.remove()


def dropped(model: nn.Module, x: Tensor) -> None:
    hooks = hl.Hooks(model)
    hooks.edit("a", twice)
    hooks.edit("head.weight/*", twice)
    model(x)


def in_exit_stack(model: nn.Module, x: Tensor) -> None:
    with ExitStack() as stack:
        stack.enter_context(hl.patch(model, {"a": 0.0, "head.bias:param": 1.0}))
        model(x)


PROGRAMS: dict[str, Program] = {
    "a capture": in_block(lambda model: hl.capture(model, "a", "head")),
    "a pattern": in_block(lambda model: hl.capture(model, "**")),
    "several on one module": in_block(lambda model: hl.capture(model, "a", "a:input", "a:inputs")),
    "the model itself": in_block(lambda model: hl.capture(model, "", "head:input")),
    "a patch": in_block(lambda model: hl.patch(model, {"a": 0.0, "b.inner": 1.0})),
    "an edit": in_block(lambda model: hl.edit(model, "a.inner", twice)),
    "a skip": in_block(lambda model: hl.skip(model, "a.inner")),
    "gradients": in_block(lambda model: hl.capture(model, "a:grad_output", "b:grad_input")),
    "functions": in_block(lambda model: hl.patch(model, {"a/softmax": 0.0, "b/*": 0.0})),
    "methods": in_block(lambda model: hl.patch(model, {"a.mix()": 0.0})),
    "parameters": in_block(lambda model: hl.patch(model, {"a.weight:param": 0.0, "head.bias:param": 9.0})),
    "operations": in_block(lambda model: hl.edit(model, ["a.weight/matmul", "head.weight/*"], twice)),
    "a stop": stopped,
    "nested blocks": nested,
    "a block entered twice": entered_twice,
    "run": run,
    "activated": activated,
    "kept hooks": kept,
    "dropped hooks": dropped,
    "an exit stack": in_exit_stack,
}
# An ExitStack calls `__exit__` from its own function: after a Ctrl-C there, a kept traceback keeps the block open.
MAY_STAY_OPEN = ("an exit stack", "kept hooks", "dropped hooks")


@contextmanager
def interrupted(number: int, seen: list[str] | None = None) -> Iterator[list[int]]:
    """Raise KeyboardInterrupt at moment `number`: when a function begins or a builtin has returned, as Python may."""
    moments = [0]

    def watch(frame: FrameType, event: str, _argument: Any) -> None:
        code = frame.f_code
        if event not in ("call", "c_return") or (event == "call" and code.co_flags & inspect.CO_GENERATOR):
            return  # Python closes a generator when it is freed, and ignores exceptions raised then.
        is_called = code.co_filename in CALLED and frame.f_back and frame.f_back.f_code.co_filename.startswith(SOURCE)
        if not code.co_filename.startswith(SOURCE) and not is_called:
            return
        moments[0] += 1
        if seen is not None:
            seen.append(event)
        if moments[0] == number:
            sys.setprofile(None)
            raise KeyboardInterrupt

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        yield moments
    finally:
        sys.setprofile(before)


def moments_of(program: Program, model: nn.Module, x: Tensor) -> list[int]:
    """Return the moments of a program at which to interrupt it: every call, and one in STEP of the others."""
    program(model, x)  # Fill caches that are made on first use.
    seen: list[str] = []
    with interrupted(0, seen):
        program(model, x)
    model.zero_grad()
    return [number for number, event in enumerate(seen, 1) if event == "call" or number % STEP == 0]


def damage(model: nn.Module, before: dict[str, Any]) -> str:
    """Return the names of the things that an interrupt left changed, or ""."""
    now = state_of(model)
    found = [key for key in before | now if before.get(key) != now.get(key)]
    return ", ".join([*found, *left_in_process()])


def interrupt(program: Program, model: nn.Module, x: Tensor, number: int) -> BaseException | None:
    """Interrupt a program, and return the exception, whose traceback keeps every frame alive."""
    try:
        with interrupted(number):
            program(model, x)
    except KeyboardInterrupt as error:
        return error
    finally:
        model.zero_grad()
    return None


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_an_interrupt_at_any_moment_leaves_the_model_as_it_was_found(name: str) -> None:
    """A17, A18"""
    program, model, x = PROGRAMS[name], Net(), torch.randn(2, 3)
    before = state_of(model)
    for number in moments_of(program, model, x):
        interrupt(program, model, x, number)
        if damage(model, before):
            gc.collect()
            assert not damage(model, before), f"after Ctrl-C at moment {number}"


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_interrupt_whose_traceback_is_kept_leaves_no_change_on_and_clear_mends_the_rest(name: str) -> None:
    """A17, A18"""
    program, model, x = PROGRAMS[name], Net(), torch.randn(2, 3)
    before, output = state_of(model), model(x)
    for number in moments_of(program, model, x):
        error = interrupt(program, model, x, number)  # Notebooks and debuggers keep it too.
        if name not in MAY_STAY_OPEN:
            assert torch.equal(model(x), output), f"after Ctrl-C at moment {number}"
        hl.clear(model)
        assert not damage(model, before), f"after Ctrl-C at moment {number}"
        assert torch.equal(model(x), output)
        del error


@pytest.mark.parametrize("keep", ["last", "all"])
def test_an_interrupt_after_a_call_that_makes_an_object_leaves_the_model_as_it_was_found(keep: str) -> None:
    """The moments above don't include the end of a call that makes an object, which a profile function does not see."""
    model, x = Net(), torch.randn(2, 3)
    before = state_of(model)
    calls: dict[CodeType, dict[int, bool]] = {}

    def attempt(number: int) -> int:
        seen, was_call = 0, False

        def trace(frame: FrameType, event: str, _argument: Any) -> Any:
            nonlocal seen, was_call
            code = frame.f_code
            if not code.co_filename.startswith(SOURCE) or code.co_flags & inspect.CO_GENERATOR:
                return None
            frame.f_trace_opcodes = True
            if event == "opcode":
                if code not in calls:
                    calls[code] = {one.offset: one.opname.startswith("CALL") for one in dis.get_instructions(code)}
                seen += was_call
                if was_call and seen == number:
                    sys.settrace(None)
                    raise KeyboardInterrupt
                was_call = calls[code].get(frame.f_lasti, False)
            return trace

        old = sys.gettrace()
        sys.settrace(trace)
        try:
            with hl.capture(model, "**", keep=keep):
                model(x)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(old)
        return seen

    attempt(0)
    count = attempt(0)
    assert count > 100
    for number in range(1, count + 1, STEP):
        attempt(number)
        if damage(model, before):
            gc.collect()
            assert not damage(model, before), f"after Ctrl-C at call {number} of {count}"


SITES = {"a": 0.0, "a/softmax": 0.0, "a.mix()": 0.0, "b.weight:param": 0.0, "head.weight/*": 1.0, "": 2.0}


@pytest.mark.parametrize("verb", ["activate", "deactivate", "remove"])
def test_what_was_interrupted_can_be_done_again(verb: str) -> None:
    model, x = Net(), torch.randn(2, 3)
    before, output = state_of(model), model(x)

    def program(number: int = 0) -> None:
        hooks = hl.Hooks(model, active=verb != "activate")
        hooks.capture("a", "b:input")
        hooks.patch(SITES)
        with contextlib.suppress(KeyboardInterrupt), interrupted(number) as moments:
            getattr(hooks, verb)()
        seen.append(moments[0])
        getattr(hooks, verb)() if len(hooks) else None
        if verb == "activate":
            assert len(hl.attached(model)) == len(hooks) == 8
            assert torch.equal(model(x), torch.full_like(output, 2.0))
            hooks.remove()
        assert not damage(model, before), f"{verb} after Ctrl-C at moment {number}"

    seen: list[int] = []
    program()
    program()
    for number in range(1, seen[-1] + 1):
        program(number)
    assert torch.equal(model(x), output)


def test_hooks_that_act_before_a_block_act_after_it_though_leaving_it_was_interrupted() -> None:
    model, x = Net(), torch.randn(2, 3)
    hooks = hl.Hooks(model)
    hooks.patch({"head": 0.0, "head.bias:param": 1.0})
    hooks.capture("a")

    def program(number: int = 0) -> int:
        block = hooks.__exit__
        hooks.__enter__()
        model(x)
        hooks.deactivate()
        with contextlib.suppress(KeyboardInterrupt), interrupted(number) as moments:
            block(None, None, None)
        del block
        assert [hook.active for hook in hooks] == [True] * 3
        assert not model(x).any(), f"after Ctrl-C at moment {number}"
        return moments[0]

    program()
    for number in range(1, program() + 1):
        program(number)
    hooks.remove()
