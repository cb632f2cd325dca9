"""Fixtures shared by several of these tests."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
import torch.distributed as dist


@pytest.fixture
def listening_to_ctrl_c() -> Iterator[None]:
    """Make Ctrl-C raise KeyboardInterrupt."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # Background jobs ignore SIGINT.
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Start a process group of one process."""
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()
