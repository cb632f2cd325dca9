"""The writer threads: bounded memory, and errors that reach the caller."""

from __future__ import annotations

import threading

import pytest
import torch

import hookline as hl
from tests.support.harvest_models import X, expected, net
from tests.support.quick_python import run_forked

FEW_FILES = """
import resource, sys
import torch
import hookline as hl

model = torch.nn.Sequential(*[torch.nn.Linear(2, 2) for _ in range(48)]).eval()
resource.setrlimit(resource.RLIMIT_NOFILE, (120, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
store = hl.harvest(model, torch.ones(20, 2), "*", to="acts", batch_size=1, unit=1, progress=False)
print(len(store["47"]))
"""

SLOW_DISK = """
import time, zlib
import torch
import hookline as hl

def most() -> int:
    for line in open("/proc/self/status"):
        if line.startswith("VmHWM"):
            return int(line.split()[1]) >> 10

crc32 = zlib.crc32
zlib.crc32 = lambda *given: (time.sleep(0.2), crc32(*given))[1]  # The checksum of what is written.
before = most()
model, size = torch.nn.Sequential(torch.nn.Identity()), 1 << 24  # 64 MiB for each sample.
hl.harvest(model, torch.ones(40, 1), "0", to="acts", batch_size=1, unit=8, progress=False,
           transform=lambda value: value.expand(1, size).contiguous())
print(most() - before)
"""


@pytest.mark.process
@pytest.mark.skipif(not hasattr(__import__("os"), "fork"), reason="needs fork, to limit what a process may open")
def test_many_sites_do_not_use_up_the_files_of_a_process(tmp_path):
    done = run_forked(FEW_FILES, tmp_path)
    assert done.stdout == "20\n", done.stderr


@pytest.mark.process
@pytest.mark.deep
def test_a_slow_disk_holds_the_model_back_so_that_memory_stays_bounded(tmp_path):
    done = run_forked(SLOW_DISK, tmp_path)
    assert int(done.stdout) < 1200, done.stderr  # MiB, of 2560 that pass.


def test_an_interrupted_run_leaves_no_threads_and_no_unfinished_files(to):
    model = net()
    handle = model[0].register_forward_hook(
        lambda _module, args, _output: stop() if args[0][0, 0] == X[30, 0] else None
    )

    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hl.harvest(model, X, "0", "1", to=to, batch_size=10, unit=10)
    assert not [thread for thread in threading.enumerate() if thread.name == "hookline.harvest"]
    handle.remove()
    partial = hl.Store(to, partial=True)
    assert len(list(to.glob("data/*/*"))) == 2 * len(list(to.glob("units/*")))
    assert torch.equal(partial["0"][:], expected(model, 1, batch=10)[: len(partial["0"])])
