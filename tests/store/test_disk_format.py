"""Invalid manifests and records are refused, and the error says what to do."""

from __future__ import annotations

import json

import pytest

from hookline import Store, StoreError
from tests.errors.wording import says
from tests.support.stores import seal


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attempt": "../../../../secret"}, "its attempt"),
        ({"attempt": "0123456789ABCDEF"}, "its attempt"),
        ({"attempt": 5}, "its attempt"),
        ({"unit": 1}, says("it is the record of", 1)),
        ({"first": -1}, "a number"),
        ({"first": 1}, says("begins at sample", 1)),
        ({"samples": 1 << 60}, "a number"),
        ({"samples": 3}, says("lengths for samples", 2, 3)),
        ({"lengths": [[1, 2.0], 1]}, "a length"),
        ({"lengths": []}, "without lengths"),
        ({"lengths": [[1, 1], 1]}, says("has rows its samples", "h.0", 3, 2)),
        ({"uses": [0, -1]}, "without lengths"),
        ({"uses": [0]}, says("not a file for each")),
        ({"order": [0, 0]}, "its order"),
        ({"order": [1, True]}, "its order"),
        ({"skipped": {"9": "x"}}, "skipped sample"),
        ({"positions": {"-1": {"rows": 3, "bytes": 4120, "crc32": "00000000"}}}, "positions|group"),
        ({"groups": ["../x", None]}, "damaged"),
        ({"files": 5}, "damaged"),
        ({"files": [{"rows": 3, "bytes": 1 << 70, "crc32": "00000000"}] * 2}, says("the size of a file")),
        ({"files": [{"rows": 3, "bytes": 4114, "crc32": "zz"}] * 2}, "a checksum"),
        ({"format": ["hookline unit", 2]}, says("but this hookline reads")),
        ({"format": "tar"}, says("give a path that was")),
    ],
    ids=str,
)
def test_a_record_that_can_not_be_is_refused(acts, change, message):
    record = acts / "units" / "00000000.json"
    record.write_bytes(seal({**json.loads(record.read_bytes()), **change}))
    with pytest.raises(StoreError, match=message):
        Store(acts)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "damaged, or not from hookline"),
        (b"\xff\xfe", "damaged, or not from hookline"),
        (b"[" * 100_000, "damaged, or not from hookline"),
        (b'{"format": ["hookline store", 1], "a": NaN}', "NaN is not JSON"),
        (b"[1]", "damaged, or not from hookline"),
        (b'{"format": ["hookline store", 2]}', "update hookline"),
        (seal({"format": ["hookline store", 1]}), "damaged"),
        (
            seal({"format": ["hookline store", 1], "arrays": [{"name": "h", "dtype": "os.system", "shape": []}]}),
            "damaged",
        ),
    ],
    ids=lambda one: str(one)[:30],
)
def test_a_manifest_that_can_not_be_is_refused(acts, data, message):
    (acts / "harvest.json").write_bytes(data)
    with pytest.raises(StoreError, match=says("harvest json' is", message)):
        Store(acts)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [("harvest.json", "restore it, or harvest into another"), ("units/00000000.json", "remove it and run the harvest")],
)
def test_a_changed_format_is_damage_and_no_newer_version(acts, name, remedy):
    data = (acts / name).read_bytes()
    for old, new in ((b'"hookline ', b'"hookmine '), (b",1]", b",3]")):
        changed = data.replace(old, new, 1)
        assert changed != data
        (acts / name).write_bytes(changed)
        with pytest.raises(StoreError, match=says("it does not fit its", name, remedy)):
            Store(acts)


def test_a_record_that_is_no_json_says_how_to_get_it_back(acts):
    (acts / "units" / "00000001.json").write_bytes(b"{")
    with pytest.raises(StoreError, match=says("json' is damaged remove", "00000001")):
        Store(acts)


def test_names_that_are_no_records_are_passed_over(acts):
    for name in ("000000000.json", "0.json", "00000002.json.tmp", "notes.txt", "٠٠٠٠٠٠٠٢.json", "-0000002.json"):
        (acts / "units" / name).write_text("{}")
    (acts / "more").mkdir()
    (acts / "more" / "0001").mkdir()
    (acts / "more" / "notes").mkdir()
    assert Store(acts).samples == 4


def test_a_record_may_be_laid_out_in_another_way(acts):
    expected = Store(acts).samples
    record = acts / "units" / "00000000.json"
    record.write_text(json.dumps(dict(reversed(json.loads(record.read_bytes()).items())), indent=2))
    assert Store(acts).samples == expected
    assert Store(acts).verify().units == 2
