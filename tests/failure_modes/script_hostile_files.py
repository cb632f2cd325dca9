"""Read store and cache files that an attacker might make. The program prints one line for each attempt.

    python -m tests.failure_modes.script_hostile_files FOLDER

A line is the JSON of [group, case, file, outcome]. An outcome is "read" or the message of a HooklineError. Any other
error, and an attempt that takes too long, is a bug.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import operator
import os
import resource
import signal
import sys
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
import torch

import hookline as hl
from hookline._kernel import write_file
from hookline._store.disk_format import Array
from hookline.errors import HooklineError
from tests.support.cache_files import forge, forge_text
from tests.support.stores import Writing

SECONDS = 20  # Limit for one attempt. Most take milliseconds; a loaded machine is slow.
MEMORY = 1 << 30  # Limit in bytes, beyond the program's memory at the start.
WRONG = [
    *(None, True, -1, 1.5, 10**12, 1 << 47, 1 << 63, 10**400, "", "../../../x", "7" * 5000),
    *([], {}, [[]], [-1], [1 << 62] * 3, {"a": 1}, {"-1": "x"}),
]
RAW = {  # Values that json.dumps can't write.
    "an integer of 5,000 digits": b"9" * 5000,
    "NaN": b"NaN",
    "Infinity": b"-Infinity",
    "a number that overflows": b"1e999",
    "bytes that are not UTF-8": b'"\xff\xfe"',
    "a key twice": b'{"a":1,"a":2}',
    "many levels": b"[" * 100_000 + b"]" * 100_000,
    "some levels": b"[" * 400 + b"]" * 400,
}
HUGE = {  # Short texts that need a lot of memory once parsed.
    "megabytes of lists": b"[" + b"[]," * 12_000_000 + b"[]]",
    "megabytes of dicts": b"[" + b'{"a":0},' * 4_000_000 + b"0]",
}
ARRAYS = (Array("h.0", torch.float32, (3,)), Array("h.1", torch.int8, ()), Array("h.2", torch.int8, (0,)))


running = [""]  # The name of the running group.


class Late(BaseException):
    """An attempt that takes too long."""


def attempt(case: str, file: object, act: Callable[[], object]) -> None:
    """Try to read something, and print the outcome."""
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        act()
        outcome = "read"
    except HooklineError as error:
        outcome = str(error)
    except Late:
        outcome = f"TOO LATE: {SECONDS} seconds"
    except BaseException as error:
        outcome = f"FOREIGN {type(error).__name__}: {str(error)[:200]}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    sys.stdout.write(json.dumps([running[0], case, str(file), outcome]) + "\n")


def write_store(path: str | Path) -> None:
    """Write a store with every kind of file: two units of unknown number, samples out of order, a part appended."""
    store = Writing(path, ARRAYS, None, data=0)
    for number in range(2):
        write_unit(store, number)
    store.end(2)
    write_unit(Writing(path, ARRAYS, 1, part=True, data=1), 0)


def write_unit(store: Writing, number: int) -> None:
    """Write a unit of four samples, of which one is skipped."""
    unit = store.unit(number)
    for array, one in enumerate(ARRAYS):
        unit.append(array, torch.ones(5, *one.shape).to(one.dtype))
    unit.positions(0, torch.tensor([0, 1, 2, 0, 4]))
    skipped = {number * 4 + 3: "broken"}
    unit.commit(first=number * 4, samples=4, lengths=[[1, 2, 2]] * 3, order=[2, 0, 1], skipped=skipped)


def use_store(path: str | Path) -> None:
    """Read everything in a store."""
    store = hl.Store(path)
    repr(store), store.samples, store.skipped, store.stats()
    for rows in store.values():
        rows[:], rows[[0]], rows.samples[:], rows.positions[:], rows.sample(0), list(rows.scan())
    store.verify()


def use_cache(path: Path) -> None:
    """Read everything in a cache."""
    cache = hl.Cache.load(path)
    repr(cache), cache.stats(), [cache.calls(site) for site in cache]


def replacements(path: Path, whole: bytes) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield replacements for a file, each with its name."""
    yield "a pipe", lambda: os.mkfifo(path)
    yield "a link to a device", lambda: path.symlink_to("/dev/zero")
    yield "a link to a pipe", lambda: (os.mkfifo(f"{path}.pipe"), path.symlink_to(f"{path}.pipe"))
    yield "a link to itself", lambda: path.symlink_to(path)
    yield "a link to nothing", lambda: path.symlink_to(path.with_name("nothing"))
    yield "a folder", path.mkdir
    yield "nothing", lambda: None
    yield "an empty file", path.touch
    yield "half of it", lambda: path.write_bytes(whole[: len(whole) // 2])
    yield "one byte more", lambda: path.write_bytes(whole + b" x")
    yield "gigabytes of holes", lambda: (path.touch(), os.truncate(path, 8 << 30))
    yield "the file, and gigabytes of holes", lambda: (path.write_bytes(whole), os.truncate(path, 8 << 30))
    yield "bytes that are not UTF-8", lambda: path.write_bytes(b"\xff" * 5000)


def replace_each(root: Path, paths: list[Path], use: Callable[[], object]) -> None:
    """Replace each file with each replacement, and read."""
    for path in paths:
        whole = path.read_bytes()
        for case, put in replacements(path, whole):
            path.unlink()
            put()
            attempt(case, path.relative_to(root), use)
            with suppress(FileNotFoundError):
                path.rmdir() if path.is_dir() else path.unlink()
            Path(f"{path}.pipe").unlink(missing_ok=True)
            path.write_bytes(whole)
    attempt("as it was", "", use)


def wrongs(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield copies of a value with one part replaced by a wrong value. Deeper parts get fewer wrong values."""
    inner = functools.reduce(operator.getitem, path, value)
    for key in inner if isinstance(inner, dict) else range(len(inner)) if isinstance(inner, list) else ():
        for new in WRONG[:: max(1, 2 * len(path))]:
            yield f"{(*path, key)} is {str(new)[:20]!r}", changed(value, (*path, key), new)
        yield from wrongs(value, (*path, key))


def changed(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """Return a copy of `value` with `new` at `path`."""
    result = copy.deepcopy(value)
    inner = result
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = new
    return result


def canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def sealed(value: Any) -> bytes:
    """Return a value as JSON with a correct checksum and hash, whatever it contains."""
    value = {key: part for key, part in value.items() if key != "checksum"}
    if {"hash", "spec", "arrays"} <= value.keys():
        told = canonical({"spec": value["spec"], "arrays": value["arrays"]})
        value["hash"] = hashlib.sha256(told).hexdigest()
    return canonical({**value, "checksum": f"{zlib.crc32(canonical(value)):08x}"})


def forge_store(put: Callable[[str, bytes], object], get: Callable[[str], bytes], use: Callable[[], object]) -> None:
    """Replace each value in the JSON files of a store with something wrong, and read."""
    for name in ("harvest.json", "end.json", "units/00000000.json", "more/0001/harvest.json"):
        whole = get(name)
        value = json.loads(whole)
        for case, forged in wrongs(value):
            put(name, sealed(forged))
            attempt(case, name, use)
        for case, raw in (RAW | HUGE if name.startswith("units") else RAW).items():
            key = "samples" if "samples" in value else "units"
            put(name, sealed({**value, key: "HERE"}).replace(b'"HERE"', raw))
            attempt(f"{key} is {case}", name, use)
            put(name, raw)
            attempt(f"it is {case}", name, use)
        put(name, whole)
    record = json.loads(get("units/00000000.json"))
    for case, change in COUNTS.items():
        put("units/00000000.json", sealed({**record, **change(record)}))
        attempt(case, "units/00000000.json", use)
    put("units/00000000.json", sealed(record))
    attempt("as it was", "", use)


def without_rows(record: Any, samples: int) -> Any:
    """Return the entries of a record for samples without rows. The numbers agree with each other."""
    files = [{**file, "rows": 0, "bytes": 4096} for file in record["files"]]
    told = {"files": files, "lengths": [0], "uses": [0] * len(files), "groups": [None] * len(files)}
    return {**told, "samples": samples, "skipped": {}, "order": None, "positions": {}}


COUNTS: dict[str, Callable[[Any], Any]] = {
    "an order of one for many samples": lambda record: {"samples": 1 << 46, "order": [0], "skipped": {}},
    "many samples without rows": lambda record: without_rows(record, 1 << 46),
    "billions of samples without rows": lambda record: without_rows(record, 4 << 30),
}


def write_cache(path: Path) -> None:
    """Write a cache with every kind of value."""
    record = torch.ones(2, 3).max(0)
    values = [torch.ones(2), 1.5, 1 << 70, "text", None, True, torch.Size([2]), torch.float32, torch.device("cpu"), 1j]
    write_file(path, {"h.0": [(*values, [1], {"a": 1, 2: None}, record), torch.zeros(3)], "h.1:input": [5]})


def with_length(header: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header


def forge_cache(path: Path) -> None:
    """Replace each value in the manifest of a cache with something wrong, and read."""
    whole, use = path.read_bytes(), lambda: use_cache(path)
    start = 8 + int.from_bytes(whole[:8], "little")
    value = json.loads(json.loads(whole[8:start])["__metadata__"]["hookline"])
    for case, forged in wrongs(value):
        forge_text(path, json.dumps(forged, separators=(",", ":")), whole[start:])
        attempt(case, path.name, use)
    for case, raw in (RAW | HUGE).items():
        for key in ("sites",) if case in HUGE else ("sites", "tensors"):
            text = json.dumps({**value, key: "HERE"}, separators=(",", ":"))
            forge_text(path, text.replace('"HERE"', raw.decode("latin-1")), whole[start:])
            attempt(f"{key} is {case}", path.name, use)
        path.write_bytes(with_length(raw) + whole[start:])
        attempt(f"its header is {case}", path.name, use)
    for case, sites in MANIFESTS.items():
        forge(path, [], sites)
        attempt(case, path.name, use)
    note = ["00000000", "torch.uint8", [64 << 30]]
    forge(path, [note], [["h", [["tensor", 0, 0]]]])
    os.truncate(path, path.stat().st_size + (64 << 30))
    attempt("gigabytes of holes that are declared", path.name, use)
    path.write_bytes(whole)
    attempt("as it was", "", use)


MANIFESTS: dict[str, list[Any]] = {
    "a name with ..": [["../../x", [1]]],
    "a name that is not a site": [["h[", [1]]],
    "a name of megabytes": [["h" * 5_000_000, [1]]],
    "an index of thousands of digits": [[f"h[{'9' * 4000}]", [1]]],
    "one site spelled twice": [["h.0", [1]], ["h.0:output", [2]]],
    "an integer of a million digits": [["h", [["int", "0x" + "f" * 1_000_000]]]],
    "a list in which it is": [["h", [["list", ["int", "0x" + "f" * 1_000_000]]]]],
    "many kinds of records": [["h", [["record", f"R{number}", ["tuple"], "a", 1] for number in range(200_000)]]],
}


def store(folder: Path) -> None:
    """Replace each file of a store."""
    write_store(folder)
    replace_each(folder, sorted(path for path in folder.rglob("*") if path.is_file()), lambda: use_store(folder))


def forged(folder: Path) -> None:
    """Change the contents of a store's JSON files."""
    write_store(folder)
    put, get = (lambda name, data: (folder / name).write_bytes(data)), (lambda name: (folder / name).read_bytes())
    forge_store(put, get, lambda: use_store(folder))


def elsewhere(folder: Path) -> None:
    """Change the contents of the JSON files of a store that is read through fsspec."""
    system, url = fsspec.filesystem("memory"), f"memory://{folder.name}"
    write_store(url)
    WRONG[:] = WRONG[::6]
    HUGE.popitem()
    put, get = (lambda name, data: system.pipe_file(f"{url}/{name}", data)), (lambda n: system.cat_file(f"{url}/{n}"))
    forge_store(put, get, lambda: use_store(url))


def cache(folder: Path) -> None:
    """Replace the file of a cache, and change its contents."""
    folder.mkdir()
    path = folder / "acts.safetensors"
    write_cache(path)
    replace_each(folder, [path], lambda: use_cache(path))
    forge_cache(path)


def spilled(folder: Path) -> None:
    """Replace a file that a capture has moved to disk."""
    folder.mkdir()
    model = torch.nn.Identity()
    with hl.capture(model, "", limit=0, spill=folder) as acts:
        model(torch.ones(4, 3))
    (path,) = folder.glob("*/*")
    replace_each(path.parent, [path], lambda: acts[""])
    for values in (
        {"": [torch.ones(3, 5)]},
        {"": [torch.ones(4, 3).int()]},
        {"": [1]},
        {"": []},
        {"h": [torch.ones(4, 3)]},
    ):
        write_file(path, values, overwrite=True)
        attempt(f"it holds {values}", path.name, lambda: acts[""])


GROUPS = (store, forged, cache, spilled, elsewhere)


def main(folder: Path) -> None:
    """Run all groups within the limits."""
    warnings.simplefilter("error")
    signal.signal(signal.SIGALRM, too_late)
    use_warm_up(folder)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    for group in GROUPS:
        running[0] = group.__name__
        group(folder / group.__name__)


def too_late(*_: object) -> None:
    raise Late


def use_warm_up(folder: Path) -> None:
    """Make torch and fsspec load their lazy modules, whose memory must not count against the files."""
    write_store(folder / "first")
    use_store(folder / "first")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
