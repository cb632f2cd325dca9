"""What every test is held to: no hook outlives it."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator

# Set before torch is imported, and inherited by the processes that tests start.
# Inductor compiles in this process: its pool of compile workers outlives the test that starts it.
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
# Inductor writes plain C++, and its vectorised code is not tested. Otherwise it would first compile ten programs, to
# find out which vector instructions there are.
os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "0"
# Some virtual machines report AMX and can't run it: there oneDNN fails, or crashes Python, at a bfloat16 linear.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

import pytest
import torch

from tests.support.deep import IS_DEEP
from tests.support.states import classes_left, hooks_left, left_in_process, modes_left, take_off_everything

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A process that a script starts with `&` ignores Ctrl-C, and the programs that the tests start would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def models_are_left_as_found() -> Iterator[None]:
    """Fail when a test leaves a hook on a model, a block open, or a random seed behind that others would see."""
    # Without a GPU, torch.manual_seed stores a stack trace, which takes longer than many tests.
    (torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed)(0)
    yield
    gc.collect() if hooks_left() else None  # A Hooks that an exception's traceback still holds.
    left, also = hooks_left(), left_in_process()
    take_off_everything()
    assert not classes_left(), "modules of these classes are still copied in hookline's way"
    assert not left, f"hooks were left on {left}"
    assert not also


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """What torch compiled before, or counted, is forgotten, and so is what the test compiles."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def no_mode_is_left() -> Iterator[None]:
    """A mode that outlives its forward would see everything that runs later."""
    yield
    assert modes_left() == 0


@pytest.fixture(autouse=True, scope="module")
def nothing_is_compiled() -> None:
    """Forget what earlier files compiled: torch counts the graphs of a function over the whole process."""
    if "torch._dynamo.eval_frame" in sys.modules:
        torch._dynamo.reset()


@pytest.fixture(autouse=True, scope="module")
def few_objects_to_collect() -> None:
    """Keep the garbage collector away from everything that exists by now: each collection would take a second.

    `gc.get_objects()` does not list these objects any more, and cycles among them are never freed.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect tests without collecting garbage: importing the test files makes hardly any."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put files with slow tests first, so that no worker ends with one; leave out what only `make fuzz` runs."""
    if not IS_DEEP:
        deep = [item for item in items if "deep" in item.keywords]
        config.hook.pytest_deselected(items=deep) if deep else None
        items[:] = [item for item in items if "deep" not in item.keywords]
    slow = {item.path for item in items if "slow" in item.keywords}
    items.sort(key=lambda item: item.path not in slow)
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
