"""Damage is noticed: missing, cut and changed files are named."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch

from hookline import Store, StoreError
from hookline._store.disk_format import Array
from tests.errors.wording import says
from tests.support.deep import IS_DEEP
from tests.support.stores import ARRAYS, Writing, many, plans, same, seal, write, write_unit

STEP = 1 if IS_DEEP else 4


def files(path):
    return sorted(found for found in Path(path).rglob("*") if found.is_file())


def test_verify_says_what_it_read(acts):
    assert Store(acts).verify() == (2, 6, sum(found.stat().st_size for found in files(acts / "data")))


def test_every_length_of_a_cut_file_is_noticed(acts):
    for found in files(acts):
        data = found.read_bytes()
        lengths = (
            range(len(data))
            if len(data) < 600
            else [0, 1, 7, 8, 100, 4095, 4096, *range(4097, len(data)), len(data) + 1]
        )
        for length in lengths[::STEP]:
            found.write_bytes(data[:length] if length <= len(data) else data + b" ")
            with pytest.raises(StoreError, match=re.escape(os.path.relpath(found, acts))):
                Store(acts)
        found.write_bytes(data)
    Store(acts).verify()


def test_every_changed_byte_is_noticed(tmp_path):
    acts = tmp_path
    write(acts, ARRAYS, plans(1))
    for found in files(acts):
        data = bytearray(found.read_bytes())
        padding = range(300, 4096) if found.suffix == ".safetensors" else range(0)
        for changed in sorted({*range(len(data))} - {*padding} | {*padding[::97]})[::STEP]:
            data[changed] ^= 1 << changed % 8
            found.write_bytes(data)
            with pytest.raises(StoreError, match=re.escape(os.path.relpath(found, acts))):
                Store(acts).verify()
            data[changed] ^= 1 << changed % 8
        found.write_bytes(data)
    Store(acts).verify()


def test_every_damaged_file_is_named_at_once(acts):
    data = files(acts / "data")
    store = Store(acts)
    for found in data[:3]:
        whole = bytearray(found.read_bytes())
        whole[-1] ^= 1
        found.write_bytes(whole)
    data[3].unlink()
    with pytest.raises(StoreError) as caught:
        store.verify()
    assert all(found.name in str(caught.value) for found in data[:4])
    assert not any(found.name in str(caught.value) for found in data[4:])
    assert "remove the record of its unit" in str(caught.value)
    with pytest.raises(StoreError, match=rf"{data[3].name}' is missing"):
        Store(acts)


def test_a_unit_made_anew_takes_the_place_of_a_damaged_one(acts):
    (acts / "units" / "00000001.json").unlink()
    write_unit(Writing(acts, ARRAYS, 2), 1, 2, plans(2)[1])
    assert Store(acts).samples == 4


def test_a_unit_that_was_made_again_is_read_and_verify_tells_a_store_that_was_open(tmp_path):
    acts = tmp_path / "acts"
    values = many(acts)
    store = Store(acts)
    assert same(store["h"][:], values)
    # The new record has the same size as the old one.
    record = acts / "units" / "00000007.json"
    size = record.stat().st_size
    record.unlink()
    with Writing(acts, [Array("h", torch.float32, (3,))], 40).unit(7) as unit:
        unit.append(0, torch.ones(1, 3))
        assert unit.commit(first=7, samples=1, lengths=[1])
    assert record.stat().st_size == size
    assert Store(acts)["h"][7].tolist() == [1, 1, 1]
    with pytest.raises(StoreError, match=says("units' has changed since the")):
        store.verify()


def test_a_unit_too_many_is_refused(acts):
    shutil.copy(acts / "units" / "00000001.json", acts / "units" / "00000002.json")
    with pytest.raises(StoreError, match=says("it is the record of", 1)):
        Store(acts)
    told = seal({**json.loads((acts / "units" / "00000001.json").read_bytes()), "unit": 2, "first": 4})
    (acts / "units" / "00000002.json").write_bytes(told)
    for found in files(acts / "data"):
        if found.name.startswith("00000001"):
            shutil.copy(found, found.with_name(found.name.replace("00000001", "00000002")))
    with pytest.raises(StoreError, match=says("has a unit", 2, 2)):
        Store(acts, partial=True)
