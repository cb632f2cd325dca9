"""Files that are damaged, hostile, or written by another program: each is refused."""

from __future__ import annotations

import io
import json
import os
import pickle
import time
import zlib
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch

import hookline as hl
from hookline._kernel import read_file, write_file
from hookline.errors import StoreError
from tests.errors.wording import says
from tests.support.cache_files import FORMAT, forge, same

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf")


@pytest.fixture
def small(path: Path) -> bytes:
    write_file(path, {"h.3": [(torch.arange(5.0), None)], "h.4:input": [torch.zeros(2, 2, dtype=torch.bool), 1.5]})
    return path.read_bytes()


def test_a_file_cut_short_anywhere_is_refused(path: Path, small: bytes) -> None:
    for length in range(len(small)):
        path.write_bytes(small[:length])
        with pytest.raises(StoreError, match=r"acts\.safetensors"):
            read_file(path)


@pytest.mark.parametrize("mask", [0x01, 0x02, 0x20, 0x80, 0xFF])
def test_a_file_with_any_byte_changed_is_refused(path: Path, small: bytes, mask: int) -> None:
    for position in range(len(small)):
        path.write_bytes(small[:position] + bytes([small[position] ^ mask]) + small[position + 1 :])
        with pytest.raises(StoreError, match=r"acts\.safetensors"):
            read_file(path)


def test_a_file_with_bytes_added_or_swapped_is_refused(path: Path, small: bytes) -> None:
    for changed in (small + b"\0", b"\0" + small, small + small, small[:-4] + small[-2:] + small[-4:-2] + b"\1"):
        path.write_bytes(changed)
        with pytest.raises(StoreError, match=r"acts\.safetensors"):
            read_file(path)


def test_another_programs_safetensors_file_says_how_to_read_it(path: Path) -> None:
    for metadata in (None, {"format": "pt"}):
        safetensors.torch.save_file({"x": torch.ones(2)}, path, metadata=metadata)
        with pytest.raises(StoreError, match=says("not from hookline")):
            read_file(path)


def test_a_file_rewritten_by_another_program_is_refused(path: Path) -> None:
    write_file(path, {"h": [torch.ones(2), torch.zeros(3)]})
    with safetensors.safe_open(path, framework="pt") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) + 1 for name in file.keys()}  # noqa: SIM118
    safetensors.torch.save_file(tensors, path, metadata=metadata)
    with pytest.raises(StoreError, match="damaged"):
        read_file(path)


class Bomb:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.target),))


def test_a_pickle_is_never_executed(path: Path, tmp_path: Path) -> None:
    bomb = Bomb(tmp_path / "executed")
    archive = io.BytesIO()
    torch.save(bomb, archive)
    legacy = io.BytesIO()
    torch.save(bomb, legacy, _use_new_zipfile_serialization=False)
    pickles = [pickle.dumps(bomb, protocol) for protocol in range(6)]
    for content in (archive.getvalue(), legacy.getvalue(), *pickles):
        path.write_bytes(content)
        with pytest.raises(StoreError, match=says("no pickle is ever opened")):
            read_file(path)
    assert not bomb.target.exists()
    pickle.loads(pickles[-1])
    assert bomb.target.exists(), "loading the pickle ran no code, so the test shows nothing"


def test_what_is_no_file_is_said(path: Path, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=says("No such file")):
        read_file(path)
    with pytest.raises(StoreError, match=says("not a regular file")):
        read_file(tmp_path)
    with pytest.raises(StoreError, match=says("not a regular file")):
        read_file("/dev/zero")
    os.mkfifo(path)
    with pytest.raises(StoreError, match=says("not a regular file")):
        read_file(path)


@pytest.mark.parametrize("content", [b"", b"\0" * 100, b"\xff" * 100, b"{}", b"\x02" + b"\0" * 7 + b"{}", b"x" * 5000])
def test_content_of_another_kind_is_refused(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(StoreError, match=r"acts\.safetensors"):
        read_file(path)


@pytest.mark.parametrize(
    "text", [b"[" * 100_000, b'{"a":' * 100_000, b"1" * 100_000, b'["hookline"]', b'"hookline"', b"null"]
)
def test_an_absurd_header_is_refused(path: Path, text: bytes) -> None:
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(StoreError, match=r"acts\.safetensors"):
        read_file(path)


NOTE = [f"{zlib.crc32(bytes(4)):08x}", "torch.float32", [1]]
TENSOR = ["tensor", 0, 0]


@pytest.mark.parametrize(
    ("tensors", "sites", "data"),
    [
        ([NOTE], [], bytes(4)),  # A tensor that belongs to no site.
        ([], [["h", [TENSOR]]], b""),  # A tensor that is missing.
        ([NOTE], [["h", [["tensor", -1, 0]]]], bytes(4)),
        ([NOTE], [["h", [["tensor", "0", 0]]]], bytes(4)),
        ([NOTE], [["h", [TENSOR, ["tensor", 0]]]], bytes(4)),
        ([NOTE], [["h", [TENSOR]], ["h", []]], bytes(4)),  # A site twice.
        ([NOTE], [["h", [TENSOR]]], bytes(8)),
        ([[*NOTE[:2], [1 << 40]]], [["h", [TENSOR]]], bytes(4)),
        ([[*NOTE[:2], [-1]]], [["h", [TENSOR]]], bytes(4)),
        ([[*NOTE[:2], [True]]], [["h", [TENSOR]]], bytes(4)),
        ([["00000000", "torch.float32", [1 << 62, 1 << 62, 0]]], [["h", [TENSOR]]], b""),
        ([[*NOTE[:2], [1] * 1000]], [["h", [TENSOR]]], bytes(4)),
        ([[NOTE[0], "torch.qint32", [1]]], [["h", [TENSOR]]], bytes(4)),
        ([[NOTE[0], "os.system", [1]]], [["h", [TENSOR]]], bytes(4)),
        ([], [["h", [["eval", "1"]]]], b""),
        ([], [["h", [["record", "x", []]]]], b""),
        ([], [["h", [["dict", 1]]]], b""),
        ([], [["h", [["dict", 1, 2, 1, 3]]]], b""),
        ([], [["h", [["dict", ["list"], 2]]]], b""),
        ([], [["h", [["device", "nowhere"]]]], b""),
        ([], [["h", [["float", "00"]]]], b""),
        ([], [["h", [1.5]]], b""),
        ([], [["h", [{"tuple": 1}]]], b""),
        ([], [["h", [[]]]], b""),
        ([], [["h", 5]], b""),
        ([], 5, b""),
        (5, [], b""),
        ([], [["h", [json.loads("[" * 500 + "]" * 500)]]], b""),
    ],
)  # fmt: skip
def test_a_hostile_manifest_is_refused(path: Path, tensors: Any, sites: Any, data: bytes) -> None:
    forge(path, tensors, sites, data)
    with pytest.raises(StoreError, match=r"acts\.safetensors.*(damaged|too long)"):
        read_file(path)


@pytest.mark.parametrize("gaps", [{"h": 1}, "h", [1], ["i"], [["h"]], 5], ids=str)
def test_a_hostile_list_of_sites_with_gaps_is_refused(path: Path, gaps: Any) -> None:
    forge(path, [NOTE], [["h", [TENSOR]]], bytes(4), gaps=gaps)
    with pytest.raises(StoreError, match=says("acts safetensors damaged")):
        hl.Cache.load(path)
    forge(path, [NOTE], [["h", [TENSOR]]], bytes(4), gaps=["h"])
    with pytest.raises(hl.HooklineError, match=says("has one call here and", "h")):
        hl.Cache.load(path).cat("h")


def test_the_forger_of_these_tests_can_forge(path: Path) -> None:
    forge(path, [NOTE], [["h", [TENSOR]]], bytes(4))
    assert same(read_file(path), {"h": [torch.zeros(1)]})


def test_names_in_a_hostile_record_reach_nothing(path: Path) -> None:
    names = ["__class__", "_fields", "x y", "class", "x=print(1)", "ﬁ", "fi", "", "a"]
    forge(path, [], [["h", [["record", "R", ["tuple", "__new__"], "a", 1], ["record", "R;", ["tuple"], "b", 2]]]])
    assert read_file(path) == {"h": [{"a": 1}, {"b": 2}]}
    parts = [part for name in names for part in (name, 1)]
    forge(path, [], [["h", [["record", "R", ["tuple"], *parts], ["record", "R", ["tuple"], "ﬁ", 1, "fi", 2]]]])
    assert read_file(path) == {"h": [dict.fromkeys(names, 1), {"ﬁ": 1, "fi": 2}]}


def test_a_header_with_overlapping_tensors_is_refused(path: Path) -> None:
    write_file(path, {"h": [torch.zeros(2), torch.ones(2)]})
    content = path.read_bytes()
    changed = content.replace(b'"data_offsets":[8,16]', b'"data_offsets":[0,8] ')
    assert changed != content
    path.write_bytes(changed)
    with pytest.raises(StoreError, match="damaged"):
        read_file(path)


def test_a_file_of_a_later_version_says_to_update(path: Path) -> None:
    forge(path, [], [], format=[FORMAT[0], 2])
    with pytest.raises(StoreError, match=r"\['hookline cache', 2\].*update hookline"):
        read_file(path)


def test_a_changed_version_is_damage_and_no_later_one(path: Path) -> None:
    write_file(path, {"h": [torch.zeros(2)]})
    content = path.read_bytes()
    changed = content.replace(b'cache\\",1]', b'cache\\",3]')
    assert changed != content
    path.write_bytes(changed)
    with pytest.raises(StoreError, match=says("its header does not fit")):
        read_file(path)


def test_a_huge_claim_is_refused_before_anything_is_allocated(path: Path) -> None:
    forge(path, [["00000000", "torch.float32", [1 << 40]]], [["h", [TENSOR]]])
    started = time.perf_counter()
    with pytest.raises(StoreError, match="cut short"):
        read_file(path)
    path.write_bytes((1 << 40).to_bytes(8, "little") + b"{" * 100)
    with pytest.raises(StoreError, match="cut short"):
        read_file(path)
    assert time.perf_counter() - started < 5


def test_a_cache_of_a_hundred_thousand_sites_is_read_and_one_of_millions_of_values_is_refused(path: Path) -> None:
    name = "a_name_that_makes_the_text_of_all_the_sites_longer_than_some_limit_would_be"
    forge(path, [], [[f"transformer.h.{number % 96}.attn.{name}.part_{number}", [number]] for number in range(100_000)])
    assert path.stat().st_size > 10_000_000
    assert len(read_file(path)) == 100_000
    with pytest.raises(StoreError, match=says("too many values for one")):
        write_file(path, {"h": [[0] * 4_000_000]}, overwrite=True)
