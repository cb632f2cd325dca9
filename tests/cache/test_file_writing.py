"""Writing a file is all or nothing, whatever the disk, the process and other writers do."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch

from hookline._kernel import read_file, write_file
from hookline.errors import StoreError
from tests.errors.wording import says
from tests.support.cache_files import leftovers
from tests.support.deep import IS_DEEP
from tests.support.quick_python import quick_python

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf")

ALONE = [sys.executable]  # A process that can be killed, as no server has forked it.


def child(code: str, *arguments: object, python: list[str]) -> list[str]:
    """Return the command that runs `code` in a new process, where `path` is the first argument."""
    start = (
        "import os, sys, torch\nfrom hookline._kernel import read_file, write_file\nfrom hookline import StoreError\n"
    )
    return [*python, "-c", start + "path = sys.argv[1]\n" + textwrap.dedent(code), *map(str, arguments)]


def run(code: str, *arguments: object) -> str:
    command = child(code, *arguments, python=quick_python())
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_existing_file_is_replaced_only_when_asked(path: Path, tmp_path: Path) -> None:
    write_file(path, {"h": [1]})
    with pytest.raises(StoreError, match=says("acts safetensors exists overwrite=True")):
        write_file(path, {"h": [2]})
    assert read_file(path) == {"h": [1]}
    write_file(path, {"h": [2]}, overwrite=True)
    assert read_file(path) == {"h": [2]}
    assert os.listdir(tmp_path) == [path.name]


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_or_pipe_is_never_replaced(path: Path, tmp_path: Path, overwrite: bool) -> None:
    os.mkfifo(path)  # A stand-in for /dev/null, which a test run as root could replace.
    for target in (tmp_path, path):
        with pytest.raises(StoreError, match=says("only files are replaced")):
            write_file(target, {"h": [2]}, overwrite=overwrite)
    assert path.is_fifo()


def test_a_link_is_followed_and_stays_a_link(path: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    real = tmp_path / "elsewhere" / "real.safetensors"
    path.symlink_to(real)
    for number in (1, 2):
        write_file(path, {"h": [number]}, overwrite=number == 2)
        assert path.is_symlink()
        assert read_file(real) == read_file(path) == {"h": [number]}


def test_a_plain_name_and_a_name_of_full_length_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("acts", "x" * 255, "é" * 127):
        write_file(name, {"h": [1]})
        assert read_file(name) == {"h": [1]}


def test_the_file_has_the_rights_of_any_new_file(path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_file(path, {"h": [1]})
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_missing_folder_is_said_with_path_and_size(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=says("nowhere acts' was not written")):
        write_file(tmp_path / "nowhere" / "acts", {"h": [torch.zeros(1000)]})


@pytest.mark.process
def test_a_folder_without_the_right_to_write_is_said(tmp_path: Path) -> None:
    folder = tmp_path / "closed"
    folder.mkdir(mode=0o500)
    if os.getuid() == 0:
        for place in (tmp_path, *tmp_path.parents[:2]):
            place.chmod(0o755)
    said = run(
        """
        if os.getuid() == 0:
            os.setuid(65534)
        try:
            write_file(path + "/acts", {"h": [1]})
        except StoreError as error:
            print(error)
        """,
        folder,
    )
    assert "Permission denied" in said
    assert "may be written to" in said


def limited(path: Path, value: str) -> str:
    """Save over a file in a process that may write 9 MB; check that only the old file is left; return the output."""
    write_file(path, {"h": [1]})
    said = run(
        f"""
        import resource
        resource.setrlimit(resource.RLIMIT_FSIZE, (9_000_000, 9_000_000))
        try:
            write_file(path, {{"h": [{value}]}}, overwrite=True)
        except StoreError as error:
            print(error)
        """,
        path,
    )
    assert read_file(path) == {"h": [1]}
    assert os.listdir(path.parent) == [path.name]
    return said


@pytest.mark.process
def test_more_than_the_disk_has_room_for_is_refused_before_writing(path: Path) -> None:
    said = limited(path, "torch.zeros(1).expand(1 << 48)")
    assert re.search(r"\(1,125,899,9\d\d,\d\d\d,\d\d\d bytes\): No space left.*cache\.select", said)


@pytest.mark.process
def test_a_limit_on_file_sizes_leaves_the_old_file_and_nothing_else(path: Path) -> None:
    said = limited(path, "torch.zeros(5_000_000)")
    assert re.search(r"acts\.safetensors' was not written \(20,000,\d\d\d bytes\): File too large", said)


@pytest.mark.process
def test_a_disk_that_fills_up_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    """The disk has free bytes but no free inode: the check for space passes, and the write fails."""
    code = """
        write_file(path + "/acts", {"h": [1]})
        import itertools
        try:
            for number in itertools.count():
                open(f"{path}/{number}", "w").close()
        except OSError:
            pass
        try:
            write_file(path + "/acts", {"h": [2]}, overwrite=True)
        except StoreError as error:
            print(error)
        assert read_file(path + "/acts") == {"h": [1]}
        assert not [name for name in os.listdir(path) if "hookline" in name]
        """
    command = ["unshare", "-rm", "sh", "-c", 'mount -t tmpfs -o nr_inodes=20 tmpfs "$0" && exec "$@"', str(tmp_path)]
    if subprocess.run([*command, "true"], capture_output=True).returncode:
        pytest.skip("needs the right to mount a file system in a namespace of its own")
    done = subprocess.run([*command, *child(code, tmp_path, python=ALONE)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "No space left on device" in done.stdout


def test_a_full_disk_that_is_noticed_when_the_file_is_written_out_is_said_and_cleaned_up(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_file(path, {"h": [1]})

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(StoreError, match=says("No space left on device")):
        write_file(path, {"h": [torch.zeros(3_000_000)]}, overwrite=True)
    assert read_file(path) == {"h": [1]}
    assert os.listdir(path.parent) == [path.name]


# An interrupt after a file is opened, but before its `with`, leaves the file to the garbage collector, which warns.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_in_the_midst_of_a_write_leaves_the_old_file_and_nothing_else(path: Path) -> None:
    write_file(path, {"h": [1]})

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for delay in (0.001, 0.005, 0.02):
            with pytest.raises(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_REAL, delay)
                write_file(path, {"h": [torch.zeros(1).expand(1 << 26)]}, overwrite=True)
            assert read_file(path) == {"h": [1]}
            assert os.listdir(path.parent) == [path.name]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def stopped_in_the_middle(writer: subprocess.Popen[bytes], path: Path) -> bool:
    """Pause a writer; resume it unless it has a temporary file. A delay alone can't hit a write on a busy machine."""
    writer.send_signal(signal.SIGSTOP)
    os.waitpid(writer.pid, os.WUNTRACED)
    is_writing = bool(leftovers(path))
    if not is_writing:
        writer.send_signal(signal.SIGCONT)
    return is_writing


@pytest.mark.process
@pytest.mark.slow
def test_a_writer_killed_at_any_moment_leaves_the_old_file_or_the_new_one(path: Path) -> None:
    code = """
        print("ready", flush=True)
        for number in range(int(sys.argv[2]), 10**9):
            write_file(path, {"h": [number, torch.full((3_000_000,), number)]}, overwrite=True)
        """
    write_file(path, {"h": [0, torch.zeros(3)]})
    last, kills = 0, 0
    delays = (0.0, 0.01, 0.03, 0.08, 0.13) if IS_DEEP else (0.0, 0.03)
    for delay in delays:
        writer = subprocess.Popen(child(code, path, last + 1, python=ALONE), stdout=subprocess.PIPE)
        assert writer.stdout is not None
        writer.stdout.readline()
        time.sleep(delay)
        while delay and not stopped_in_the_middle(writer, path):
            time.sleep(0.001)
        writer.kill()
        writer.wait()
        writer.stdout.close()
        for name in leftovers(path):
            kills += 1
            (path.parent / name).unlink()
        number, tensor = read_file(path)["h"]
        assert number >= last
        assert bool((tensor == number).all())
        last = number
    assert kills >= len(delays) - 1, "too few writers were killed in the middle of a write"


@pytest.mark.process
def test_what_a_killed_writer_left_is_removed_by_a_later_save(path: Path) -> None:
    writer = subprocess.Popen(
        child(
            "print('ready', flush=True); write_file(path, {'h': [torch.zeros(1).expand(1 << 30)]})", path, python=ALONE
        ),
        stdout=subprocess.PIPE,
    )
    assert writer.stdout is not None
    writer.stdout.readline()
    while not leftovers(path):
        time.sleep(0.001)
    writer.kill()
    writer.wait()
    writer.stdout.close()
    (stale,) = leftovers(path)
    write_file(path, {"h": [1]})
    assert leftovers(path) == [stale], "a new temporary file was removed, though its writer could be alive"
    long_ago = time.time() - 24 * 3600
    os.utime(path.parent / stale, (long_ago, long_ago))
    (path.parent / "mine").touch()
    os.utime(path.parent / "mine", (long_ago, long_ago))
    write_file(path, {"h": [2]}, overwrite=True)
    assert sorted(os.listdir(path.parent)) == [path.name, "mine"]


def test_of_many_writers_at_once_exactly_one_wins(path: Path) -> None:
    barrier = threading.Barrier(8)
    won: list[int] = []
    lost: list[str] = []

    def save(number: int) -> None:
        value = torch.full((100_000,), number)
        barrier.wait()
        try:
            write_file(path, {"h": [value]})
        except StoreError as error:
            lost.append(str(error))
        else:
            won.append(number)

    threads = [threading.Thread(target=save, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert all("exists" in message for message in lost)
    assert bool((read_file(path)["h"][0] == won[0]).all())
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.process
def test_writing_a_large_view_needs_little_memory(path: Path) -> None:
    said = run(
        """
        def peak():
            with open("/proc/self/status") as status:
                return int(next(line for line in status if line.startswith("VmHWM")).split()[1])

        value = torch.zeros(2048, 1).expand(2048, 40_000).t()  # 320 MB if it were copied.
        write_file(path, {"h": [torch.zeros(3_000_000)]})
        before = peak()
        write_file(path, {"h": [value]}, overwrite=True)
        print(peak() - before)
        """,
        path,
    )
    path.unlink()
    assert int(said) < 60_000
