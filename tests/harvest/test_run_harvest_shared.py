"""Several torchrun processes on one store: any number of them share its units, die, and are restarted."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import harvests
from tests.support.quick_python import quick_python
from tests.support.running import python
from tests.support.script_harvest_on_ranks import Dying

UNITS = 24


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> dict:
    """The contents of a store that one process wrote."""
    folder = tmp_path_factory.mktemp("alone")
    harvests.harvest(folder / "store", Dying(folder, seconds=0))
    assert len(harvests.committed(folder / "store")) == UNITS
    return harvests.contents(folder / "store")


def torchrun(number: int, folder: Path, units: int, restarts: int = 0, fails: bool = False) -> str:
    """Harvest on so many ranks, of which one dies after so many units; return what torchrun says."""
    settings = ("--standalone", "--nproc-per-node", number, "--max-restarts", restarts, "--no-python")
    script = (*quick_python(), "-m", "tests.support.script_harvest_on_ranks", folder, units)
    return python("-m", "torch.distributed.run", *settings, *script, fails=fails, command=quick_python())


@pytest.mark.process
@pytest.mark.slow
def test_two_ranks_of_which_one_dies_write_what_one_process_does(tmp_path, expected):
    torchrun(2, tmp_path, 6, restarts=2)
    assert (tmp_path / "died").exists()
    assert harvests.contents(tmp_path / "store") == expected
    # Each rank did its share. A unit was done twice only if torchrun stopped the ranks in the middle of it or, at the
    # end, if the other rank had already begun it. On a slow disk these may be several units.
    first, second = harvests.loaded(tmp_path / "notes-0"), harvests.loaded(tmp_path / "notes-1")
    assert len({*first} - {*second}) > 4
    assert len({*second} - {*first}) > 4
    assert len(first) + len(second) < 2 * UNITS


@pytest.mark.process
@pytest.mark.deep
def test_what_two_ranks_began_three_go_on_with_and_one_process_ends(tmp_path, expected):
    failed = torchrun(2, tmp_path, 4, fails=True)
    assert "SIGKILL" in failed
    begun = harvests.committed(tmp_path / "store")
    assert 4 <= len(begun) < UNITS
    (tmp_path / "died").unlink()
    torchrun(3, tmp_path, len(begun) + 1, fails=True)
    more = harvests.committed(tmp_path / "store")
    assert begun < more < {*range(UNITS)}
    harvests.harvest(tmp_path / "store", Dying(tmp_path, seconds=0))
    assert harvests.contents(tmp_path / "store") == expected
