"""Opening, joining, checking and printing a store; every problem with one is reported."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import subprocess
import textwrap
import zlib

import pytest
import torch

from hookline import Cache, EditError, HooklineError, NotCaptured, Site, Store, StoreError
from hookline._store.disk_format import Array
from tests.errors.wording import says
from tests.support.quick_python import quick_python
from tests.support.stores import ARRAYS, Plan, Writing, bits, made, many, plans, same, write, write_unit


def test_any_spelling_of_a_site_finds_it(acts):
    store = Store(acts)
    for site in ("h.1:input[:, -1]", "h.1:input[:,-1]", Site.parse("h.1:input[:, -1]"), "h.1:input[ : , -1 ]"):
        assert store[site].name == "h.1:input[:, -1]"
        assert site in store
    assert "h.0:output" in store
    assert list(store) == ["h.0", "h.1:input[:, -1]"]


def test_a_site_that_is_not_there_says_what_is_near(acts):
    with pytest.raises(NotCaptured, match=says("is not in this store", "h.2", "h.0")):
        Store(acts)["h.2"]
    assert "h.*" not in Store(acts)
    assert 3 not in Store(acts)
    with pytest.raises(NotCaptured, match=says("not by Linear")):
        Store(acts)[torch.nn.Linear(1, 1)]


def test_a_store_prints_as_a_table(acts):
    assert repr(Store(acts)) == textwrap.dedent("""\
        2 arrays of 4 samples, 40 bytes
        site              dtype     shape  rows  bytes
        ────────────────  ────────  ─────  ────  ─────
        h.0               bfloat16  (3,)      6     36
        h.1:input[:, -1]  int8      ()        4      4""")
    assert "<span>bfloat16</span>" in Store(acts)._repr_html_()
    assert repr(Store(acts)["h.0"]) == "Rows('h.0', bfloat16, (6, 3))"


def test_statistics_are_those_of_all_rows_together(tmp_path):
    rows = torch.randn(300, 7) * 3 + 1
    rows[5, 2], rows[6, 0], rows[7, :3] = float("nan"), float("-inf"), 0
    write(tmp_path, (Array("h", torch.float32, (7,)),), [Plan(300, [dict(enumerate(rows.split(1)))])])
    found, wanted = Store(tmp_path).stats(), Cache({"h": rows}).stats()
    assert found["h"] == pytest.approx(wanted["h"], rel=1e-9)
    assert repr(found) == repr(wanted)


@pytest.mark.parametrize("pieces", [1, 100])
def test_statistics_of_pieces_are_those_of_the_whole(pieces):
    from hookline._stats import numbers, numbers_of_pieces

    for whole in (torch.randn(1000) + 1e6, torch.zeros(0), torch.full((9,), float("nan")), torch.arange(1000) % 2 == 0):
        found = numbers_of_pieces(whole.chunk(pieces))
        assert found == pytest.approx(numbers([whole]), rel=1e-9, nan_ok=True)


def test_a_skipped_sample_is_listed_and_has_no_rows(tmp_path):
    plan = Plan(3, [{0: torch.ones(2, 3), 2: torch.zeros(1, 3)}], skipped={1: "too long"})
    write(tmp_path, (Array("h", torch.float32, (3,)),), [plan, plan])
    store = Store(tmp_path)
    assert store.skipped == {1: "too long", 4: "too long"}
    assert store["h"].samples[:].tolist() == [0, 0, 2, 3, 3, 5]
    assert "6 samples, 2 of them skipped" in repr(store)
    with pytest.raises(IndexError, match="sample 4 was skipped: too long"):
        store.rows("h", sample=4)
    with pytest.raises(IndexError, match=says("has no rows in", 6, "h")):
        store.rows("h", sample=6)


def test_a_partial_store_opens_only_when_asked(tmp_path):
    writing, every = Writing(tmp_path / "acts", ARRAYS, 3), plans(3)
    for unit in (0, 2):
        write_unit(writing, unit, 2 * unit, every[unit])
    with pytest.raises(StoreError, match=says("run its harvest again to", "2 of 3")):
        Store(tmp_path / "acts")
    store = Store(tmp_path / "acts", partial=True)
    assert store["h.0"].samples[:].tolist() == [0, 1, 1, 4, 5, 5]
    assert same(store.rows("h.0", sample=5), every[2].rows[0][1])
    write_unit(writing, 1, 2, every[1])
    assert store.samples == 4
    assert Store(tmp_path / "acts").samples == 6


def test_a_store_of_unknown_length_is_complete_when_its_end_is_told(tmp_path):
    writing = Writing(tmp_path / "acts", ARRAYS, None)
    write_unit(writing, 0, 0, plans(1)[0])
    with pytest.raises(StoreError, match=says("and its data had not", 1)):
        Store(writing.path)
    assert writing.end(1)
    assert not writing.end(1)
    with pytest.raises(StoreError, match=says("units in another run", 1, 2)):
        writing.end(2)
    assert Store(writing.path).samples == 2


def test_stores_of_the_same_arrays_are_joined(tmp_path, acts):
    write(
        tmp_path / "other",
        ARRAYS[::-1],
        [Plan(1, [{0: bits(1, (), torch.int8, 9)}, {0: bits(2, (3,), torch.bfloat16, 9)}])],
    )
    first, second = Store(acts), Store(tmp_path / "other")
    both = first + second + first
    assert both.samples == 9
    assert same(both["h.0"][:], torch.cat([first["h.0"][:], second["h.0"][:], first["h.0"][:]]))
    assert both["h.0"].samples[:].tolist() == [0, 1, 1, 2, 3, 3, 4, 4, 5, 6, 6, 7, 8, 8]
    assert same(both.rows("h.0", sample=4), second["h.0"][:])
    assert both["h.0"].positions[:].tolist() == [5, 5, 6, 5, 5, 6, 0, 1, 5, 5, 6, 5, 5, 6]
    assert both.verify().units == 5


def test_stores_of_other_arrays_are_not_joined(tmp_path, acts):
    write(tmp_path / "other", (Array("h.0", torch.float16, (3,)), ARRAYS[1]), [])
    with pytest.raises(StoreError, match=says("same arrays can be joined", "h.0", "h.0")):
        Store(acts) + Store(tmp_path / "other")
    write(tmp_path / "fewer", ARRAYS[:1], [])
    with pytest.raises(StoreError, match=says("has no h")):
        Store(acts) + Store(tmp_path / "fewer")


def test_what_is_appended_comes_after(acts):
    more, part = plans(1, seed=50), Writing(acts, ARRAYS, 1, part=True, data="more")
    with pytest.raises(StoreError, match=r"more.0001' has 0 of 1 units"):
        Store(acts)
    write_unit(part, 0, 0, more[0])
    store = Store(acts)
    assert store.samples == 6
    assert same(store.rows("h.0", sample=5), more[0].rows[0][1])
    assert store["h.0"].samples[-3:].tolist() == [4, 5, 5]
    assert store.verify().files == 9
    assert Writing(acts, ARRAYS, 0, part=True, data="last").path.endswith("0002")


@pytest.mark.parametrize(
    ("arrays", "model", "message"),
    [
        (ARRAYS[:1], "tiny", says("it has h")),
        ((Array("h.0", torch.float16, (3,)), ARRAYS[1]), "tiny", "it has 'h.0'.*bfloat16.*this run 'h.0' .float16"),
        (ARRAYS, "other", says("its model is", "tiny", "other")),
        (ARRAYS[::-1], "tiny", says("its arrays come in another")),
    ],
)
def test_something_else_is_not_appended(acts, arrays, model, message):
    with pytest.raises(StoreError, match=message):
        Writing(acts, arrays, 1, part=True, model=model, data="more")
    assert not (acts / "more").exists()


def test_what_lies_beside_the_records_says_nothing_of_the_rows(tmp_path):
    """Earlier versions kept an index derived from the records, which could assign rows to the wrong samples."""
    values, acts = torch.arange(80.0).view(40, 2, 1), tmp_path / "acts"
    array = Array("h", torch.float32, (1,))
    write(acts, (array,), [Plan(2, [{0: rows[:1], 1: rows[1:]}]) for rows in values])
    records = sorted((acts / "units").iterdir())
    sizes = [(int(path.stem), path.stat().st_size) for path in records]
    told = json.dumps([["hookline index", 1], json.loads((acts / "harvest.json").read_bytes())["hash"], sizes])
    table = []
    for unit, record in enumerate(json.loads(path.read_bytes()) for path in records):
        attempt, (file,) = int(record["attempt"], 16), record["files"]
        signed = attempt - (1 << 64) if attempt >> 63 else attempt
        row = [unit, signed, 2 * unit, 2, 0, 0]  # Points to the order [1, 0], at the start of the pool.
        table.append([*row, file["rows"], file["bytes"], int(file["crc32"], 16), -2, -1])
    data = torch.tensor(table).numpy().tobytes() + torch.tensor([1, 0]).numpy().tobytes()
    head = json.dumps({"format": ["hookline index", 1], "shapes": [[40, 11], [2], [0, 5]], "skipped": []}).encode()
    head += b" " * (-(len(head) + 17) % 8)
    name = f"index-{hashlib.sha256(told.encode()).hexdigest()[:16]}"
    (acts / name).write_bytes(f"{zlib.crc32(head + data):08x}{len(head):08x}\n".encode() + head + data)
    store = Store(acts)
    assert store.rows("h", sample=0).tolist() == [[0.0]]
    assert same(store["h"][:], values.view(80, 1))
    assert store.verify().units == 40


def test_a_store_is_read_where_nothing_can_be_written(tmp_path, monkeypatch):
    values = many(tmp_path)

    def refuse(*arguments):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(os, "rename", refuse)
    assert same(Store(tmp_path)["h"][:], values)


def test_a_folder_or_file_that_is_no_store_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    for name in ("nothing", "file", "."):
        with pytest.raises(StoreError, match=says("is not a store it")):
            Store(tmp_path / name)


@pytest.mark.process
def test_a_reader_during_writing_sees_whole_units_only(tmp_path):
    writing = Writing(tmp_path / "acts", [Array("h", torch.int64, (64,))], 8)
    command = [*quick_python(), "-c", READER, writing.path]
    reader = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    for number in range(8):
        unit = writing.unit(number)
        for _ in range(20):
            unit.append(0, torch.full((50, 64), number))
        assert unit.commit(first=1000 * number, samples=1000, lengths=[1])
    seen = reader.communicate(timeout=300)[0].split()
    assert reader.returncode == 0
    assert seen[-1] == "8"


READER = """
import sys
from hookline import Store
seen = -1
while seen < 8:
    store = Store(sys.argv[1], partial=True)
    units = store.samples // 1000
    assert units >= seen and store.samples % 1000 == 0
    if units > seen:
        rows = store["h"]
        assert rows[:].view(-1, 1000, 64).amin((1, 2)).tolist() == list(range(units))
        assert rows[:].view(-1, 1000, 64).amax((1, 2)).tolist() == list(range(units))
        store.verify()
        print(units)
    seen = units
"""


def test_stores_are_equal_if_they_hold_the_same_rows_of_the_same_samples(tmp_path):
    samples = [torch.tensor([[float(number), float("nan")]]) for number in range(6)]
    store = made(tmp_path / "a", {"h": samples})
    assert store == Store(tmp_path / "a")
    assert store == made(tmp_path / "b", {"h": samples}, unit=2)
    assert store != made(tmp_path / "c", {"h": samples[:5]})
    assert store != made(tmp_path / "d", {"h": [sample.half() for sample in samples]})
    assert store != made(tmp_path / "e", {"h": [*samples[:5], samples[0]]})
    assert store != made(tmp_path / "f", {"h": samples, "i": samples})


def test_rows_are_compared_when_they_are_read(tmp_path):
    rows = made(tmp_path / "a", {"label": [torch.tensor([number % 2]) for number in range(6)]})["label"]
    assert int((rows[:] == 1).sum()) == 3
    for other in (1, torch.ones(6), rows[:]):
        with pytest.raises(TypeError, match=says("rows of a store are")):
            rows == other  # noqa: B015
    assert rows == rows


def test_the_wrong_reader_says_which_is_the_right_one(tmp_path):
    made(tmp_path / "store", {"h": [torch.ones(1, 2)]})
    Cache({"h": torch.ones(2)}).save(tmp_path / "cache.safetensors")
    with pytest.raises(StoreError, match=says("is not a store a")):
        Store(tmp_path / "cache.safetensors")
    with pytest.raises(StoreError, match=says("can't be read a")):
        Cache.load(tmp_path / "store")


def test_sizes_and_dtypes_of_the_wrong_kind_are_refused_in_words(tmp_path):
    store = made(tmp_path / "store", {"h": [torch.ones(1, 2)]})
    with pytest.raises(HooklineError, match=says("is not a number of bytes as", "bytes='1 MB'", "64 << 20")):
        list(store["h"].scan(bytes="1 MB"))
    with pytest.raises(HooklineError, match=says("is not a number of bytes", "1 MB")):
        store.dataset("h", shuffle=True, window="1 MB")
    pytest.importorskip("pyarrow")
    with pytest.raises(HooklineError, match=says("is not a dtype did", "float33", "float32")):
        store.to_parquet(tmp_path / "table", "h", dtype="float33")
    assert not (tmp_path / "table").exists()


def test_an_export_takes_the_name_of_a_dtype(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    store = made(tmp_path / "store", {"h": [torch.ones(1, 2, dtype=torch.bfloat16)]})
    store.to_parquet(tmp_path / "table", "h", dtype="float32")
    assert "float" in str(parquet.read_table(tmp_path / "table").schema.field("h").type)


def test_a_cache_of_a_store_says_how_to_read_the_rows(tmp_path):
    store = made(tmp_path / "store", {"h": [torch.ones(1, 2)]})
    with pytest.raises(EditError, match=says("write a cache of the rows")):
        Cache(store)
    assert torch.equal(Cache({site: rows[:] for site, rows in store.items()})["h"], torch.ones(1, 2))
