"""Rows as Parquet and as `datasets`: they come back bit for bit as they were stored."""

from __future__ import annotations

import json
import math
import os
import sys

import pytest
import torch

import hookline as hl
from tests.errors.wording import says
from tests.support.stores import made, tokens

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
LENGTHS = [5, 1, 0, 7, 3, 2, 9, 4, 6, 1, 8]
PLAIN = [torch.float16, torch.float32, torch.float64, torch.int8, torch.int64, torch.uint8, torch.bool]
ODD = [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.complex128]


def back(table, name: str, told=None) -> torch.Tensor:
    """Return a column as the original tensor, with the code that the docs show."""
    told = told or json.loads(table.schema.metadata[b"hookline"])[name]
    dtype = getattr(torch, told["dtype"].removeprefix("torch."))
    column = table[name].combine_chunks()
    numbers = column.flatten() if hasattr(column, "flatten") else column
    if dtype is torch.bool:
        return torch.from_numpy(numbers.to_numpy(False).copy()).view(len(table), *told["shape"])
    size, start = len(table) * math.prod(told["shape"]) * dtype.itemsize, numbers.offset * numbers.type.bit_width // 8
    memory = bytearray(numbers.buffers()[-1])[start : start + size]
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(len(table), *told["shape"])


def values(dtype: torch.dtype, shape: tuple[int, ...] = (6,)) -> torch.Tensor:
    numbers = torch.randn(sum(LENGTHS), *shape, dtype=torch.float64) * 5
    return (numbers + 1j * numbers.flip(0) if dtype.is_complex else numbers).to(dtype)


def store_of(path, **arrays: torch.Tensor):
    return made(path, {name: list(value.split(LENGTHS)) for name, value in arrays.items()})


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    words = [value.contiguous().view(torch.uint8) if value.dim() else value for value in (one, other)]
    return one.dtype is other.dtype and one.shape == other.shape and words[0].equal(words[1])


@pytest.mark.parametrize("dtype", PLAIN, ids=str)
def test_numbers_that_arrow_has_stay_what_they_are(tmp_path, dtype):
    rows = values(dtype, (2, 3))
    store = store_of(tmp_path / "acts", h=rows, n=values(dtype, ()))
    store.to_parquet(tmp_path / "table")
    table = parquet.read_table(tmp_path / "table")
    assert table.column_names == ["sample", "position", "h", "n"]
    assert same_bits(back(table, "h"), rows)
    assert same_bits(back(table, "n"), store["n"][:])
    assert table["sample"].to_pylist() == store["h"].samples[:].tolist()
    assert table["position"].to_pylist() == store["h"].positions[:].tolist()
    assert table.schema.field("h").type.list_size == 6


@pytest.mark.parametrize("dtype", ODD, ids=str)
def test_numbers_that_arrow_does_not_have_are_refused_or_kept_bit_by_bit(tmp_path, dtype):
    pytest.importorskip("datasets")
    rows = values(dtype)
    store = store_of(tmp_path / "acts", h=rows)
    with pytest.raises(
        hl.StoreError, match=says("give bits=True to keep", f"'h' is {str(dtype).removeprefix('torch.')}")
    ):
        store.to_parquet(tmp_path / "table")
    with pytest.raises(hl.StoreError, match=says("give bits=True")):
        store.to_datasets(tmp_path / "table")
    assert os.listdir(tmp_path) == ["acts"]
    store.to_parquet(tmp_path / "table", bits=True)
    table = parquet.read_table(tmp_path / "table")
    assert same_bits(back(table, "h"), rows)
    assert table.nbytes < 1.3 * (rows.nbytes + 16 * len(rows))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e5m2, torch.int8, torch.int16, torch.float16], ids=str)
def test_parquet_takes_no_more_room_than_the_rows(tmp_path, dtype):
    rows = (torch.randn(4096, 200) * 20).to(dtype)
    made(tmp_path / "acts", {"h": [rows]}).to_parquet(tmp_path / "table", bits=True)
    size = sum(os.path.getsize(tmp_path / "table" / name) for name in os.listdir(tmp_path / "table"))
    assert size < 1.1 * (rows.nbytes + 16 * len(rows))
    assert same_bits(back(parquet.read_table(tmp_path / "table"), "h"), rows)


def test_widening_is_asked_for(tmp_path):
    rows = values(torch.bfloat16)
    with pytest.raises(hl.StoreError, match=says("float32 to widen them")):
        store_of(tmp_path / "acts", h=rows).to_parquet(tmp_path / "table")
    hl.Store(tmp_path / "acts").to_parquet(tmp_path / "table", "h", dtype=torch.float32)
    assert back(parquet.read_table(tmp_path / "table"), "h").equal(rows.float())


@pytest.mark.parametrize("files", [1, pytest.param(2, marks=pytest.mark.deep)])
def test_tables_are_streamed_in_groups_of_rows_and_into_several_files(tmp_path, files):
    count = 24 * (256 if files == 1 else 5888)  # Rows of 4 KiB: 24 MiB or 552 MiB.
    rows = torch.arange(count).view(-1, 1).expand(count, 512)
    store = made(tmp_path / "acts", {"h": list(rows.split(count // 24))})
    store.to_parquet(tmp_path / "table", compression="zstd")
    names = sorted(os.listdir(tmp_path / "table"))
    assert names == ["000000.parquet", "000001.parquet"][:files]
    first = parquet.ParquetFile(tmp_path / "table" / names[0])
    assert first.metadata.num_row_groups > 1
    assert first.metadata.row_group(0).column(2).compression == "ZSTD"
    assert back(parquet.read_table(tmp_path / "table"), "h").equal(rows)


def test_a_dataset_of_hugging_face_is_the_store_and_stays(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows, other = values(torch.bfloat16), values(torch.float32, ())
    store = store_of(tmp_path / "acts", h=rows, n=other)
    found = store.to_datasets(tmp_path / "table", bits=True)
    assert isinstance(found, datasets.Dataset)
    assert len(found) == len(rows)
    assert found[7]["sample"] == int(store["h"].samples[7])
    assert found.with_format("torch")[7]["n"] == other[7]
    again = datasets.load_from_disk(str(tmp_path / "table"))
    table = again.with_format("arrow")[:]
    assert table.schema.field("h").type.value_type == arrow.uint16()
    told = json.loads(again.info.description)["hookline"]["h"]
    assert same_bits(back(table, "h", told), rows)
    assert again.features == found.features
    widened = store.to_datasets(tmp_path / "wide", "h", dtype=torch.float32)
    assert widened.with_format("torch")["h"][:].equal(rows.float())


def test_an_empty_store_is_an_empty_table(tmp_path):
    made(tmp_path / "acts", {"h": [torch.zeros(0, 3)] * 5}).to_parquet(tmp_path / "table")
    assert parquet.read_table(tmp_path / "table").num_rows == 0


def test_what_cannot_be_one_table_is_refused(tmp_path):
    arrays = {"h": tokens(LENGTHS), "label": [torch.tensor([0.5])] * len(LENGTHS), "sample": tokens(LENGTHS)}
    store = made(tmp_path / "acts", arrays)
    with pytest.raises(hl.StoreError, match=says("are not of the same samples", "h", "label")):
        store.to_parquet(tmp_path / "table", "h", "label", bits=True)
    with pytest.raises(hl.StoreError, match=says("an array named", "sample")):
        store.to_parquet(tmp_path / "table", "sample", bits=True)
    with pytest.raises(hl.StoreError, match=says("give a new path")):
        store.to_parquet(tmp_path / "acts", "label")


def test_an_export_that_fails_leaves_nothing(tmp_path):
    store = store_of(tmp_path / "acts", h=values(torch.float32))
    for path in (tmp_path / "acts/data").rglob("*.safetensors"):
        path.unlink()
    with pytest.raises(hl.StoreError, match="safetensors"):
        store.to_parquet(tmp_path / "table")
    assert os.listdir(tmp_path) == ["acts"]


@pytest.mark.parametrize(("name", "extra"), [("pyarrow", "parquet"), ("datasets", "datasets")])
def test_a_package_that_is_missing_is_named(tmp_path, monkeypatch, name, extra):
    store = store_of(tmp_path / "acts", h=values(torch.float32))
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(hl.HooklineError, match=rf"pip install 'hookline\[{extra}\]'"):
        (store.to_parquet if extra == "parquet" else store.to_datasets)(tmp_path / "table")
