"""What every test is held to: no hook outlives it."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator

import pytest
import torch

from hookline._blocks import not_left, open_blocks
from hookline._hooks import lifecycle

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell lets what it starts in the background ignore Ctrl-C, and so would the programs that the tests start.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _hooked() -> list[str]:
    return [str(tap.site) for one in lifecycle.lifecycles() for tap in one.taps if tap.watch is not None]


@pytest.fixture(autouse=True)
def models_are_left_as_found() -> Iterator[None]:
    """Fail when a test leaves a hook on a model, a block open, or a random seed behind that others would see."""
    torch.manual_seed(0)
    yield
    gc.collect() if _hooked() else None  # A Hooks that an exception's traceback still holds.
    left = _hooked()
    still_open = not_left()
    for one in lifecycle.lifecycles():
        one.detach_all()
    open_blocks.set(frozenset())  # So that one failure stays one.
    assert not left, f"hooks were left on {left}"
    assert still_open == frozenset(), "a block was left open"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs an accelerator where there is none."""
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
