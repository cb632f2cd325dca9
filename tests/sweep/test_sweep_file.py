"""The file of a sweep: it comes back as it was, and what is no such file is refused."""

from __future__ import annotations

import pytest
import safetensors
import safetensors.torch
import torch

import hookline as hl
from hookline._kernel import write_file
from tests.errors.wording import says
from tests.support.cache_files import leftovers


def by_token(**options) -> hl.Sweep:
    sites = [f"h.{layer}[:, {place}]" for layer in range(3) for place in range(4)]
    names = dict.fromkeys(sites, ("sample", "position", "neuron"))
    return hl.Sweep(0.1, {site: n / 3 for n, site in enumerate(sites)}, "set to 0.0", dimensions=names, **options)


def test_a_sweep_comes_back_bit_for_bit_with_its_axes_and_notes(tmp_path):
    found = by_token(notes=["12 places in 1 run"])
    found.save(tmp_path / "sweep")
    back = hl.Sweep.load(tmp_path / "sweep")
    assert list(back.items()) == list(found.items())
    assert (back.base, back.notes, str(back), back.grid().axes) == (
        found.base, found.notes, str(found), found.grid().axes,
    )  # fmt: skip
    assert leftovers(tmp_path) == []


def test_numbers_that_json_does_not_have_and_tensors_come_back(tmp_path):
    hl.Sweep(float("inf"), {"h.0": float("nan"), "h.1": -0.0}).save(tmp_path / "odd")
    back = hl.Sweep.load(tmp_path / "odd")
    assert (back.base, back["h.0"] != back["h.0"], str(back["h.1"])) == (float("inf"), True, "-0.0")
    pairs = hl.Sweep(torch.ones(2, dtype=torch.bfloat16), {"h.0": torch.arange(2), "h.1": 1.5})
    pairs.save(tmp_path / "pairs")
    back = hl.Sweep.load(tmp_path / "pairs")
    assert (back.base.dtype, back["h.0"].tolist(), back["h.1"]) == (torch.bfloat16, [0, 1], 1.5)
    hl.Sweep(1.0, {}).save(tmp_path / "empty")
    assert dict(hl.Sweep.load(tmp_path / "empty")) == {}


def test_any_reader_of_safetensors_gets_the_measurements(tmp_path):
    found = by_token()
    found.save(tmp_path / "sweep")
    (values,) = safetensors.torch.load_file(tmp_path / "sweep").values()
    assert values.tolist() == list(found.values())


def test_a_damaged_file_is_refused_wherever_it_is_damaged(tmp_path):
    path = tmp_path / "sweep"
    by_token().save(path)
    whole = path.read_bytes()
    for place in range(0, len(whole), 97):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(hl.StoreError):
            hl.Sweep.load(path)
        path.write_bytes(whole[:place])
        with pytest.raises(hl.StoreError):
            hl.Sweep.load(path)


ENTRY = {
    "base": 1.0, "sites": ["h.0"], "values": torch.ones(1), "change": "skipped", "names": [("sample",)],
    "dimensions": {"h.0": 0}, "notes": (),
}  # fmt: skip


@pytest.mark.parametrize(
    "parts",
    [
        {"base": None}, {"base": "high"}, {"sites": ["h.0", "h.1"]}, {"sites": [3]}, {"sites": None},
        {"sites": ["h.["]}, {"values": "ab"}, {"values": ["high"]}, {"values": torch.ones(1, 2)}, {"change": 3},
        {"names": []},
        {"names": None}, {"names": [3]}, {"dimensions": []}, {"notes": None}, {"notes": 3}, {"notes": (1,)},
    ],
    ids=str,
)  # fmt: skip
def test_a_file_with_whole_checksums_and_wrong_parts_is_refused(parts, tmp_path):
    write_file(tmp_path / "right", {"sweep": [ENTRY]}, kind="sweep")
    assert dict(hl.Sweep.load(tmp_path / "right")) == {"h.0": 1.0}
    write_file(tmp_path / "wrong", {"sweep": [{**ENTRY, **parts}]}, kind="sweep")
    with pytest.raises(hl.StoreError, match=says("wrong' is damaged")):
        hl.Sweep.load(tmp_path / "wrong")


@pytest.mark.parametrize("entries", [{}, {"other": [ENTRY]}, {"sweep": []}, {"sweep": [ENTRY, ENTRY]}, {"sweep": [3]}])
def test_a_file_without_one_sweep_is_refused(entries, tmp_path):
    write_file(tmp_path / "wrong", entries, kind="sweep")
    with pytest.raises(hl.StoreError, match=says("its parts don't make a")):
        hl.Sweep.load(tmp_path / "wrong")
