"""`hookline show`."""

from __future__ import annotations

import math
import re
import sys
from contextlib import suppress

import pytest
import torch
from torch import nn

import hookline as hl
from hookline._cli import main as cli
from tests.support.command_line import refused, said, told


@pytest.fixture
def store(folder):
    said("harvest", "gpt2", "--data", "texts.txt", "--at", "transformer.h.*", "--also", "input_ids", "--to", "store")
    return hl.Store("store")


def test_a_cache_is_shown_as_it_prints(folder):
    acts = hl.Cache.load("acts.safetensors")
    assert said("show", "acts.safetensors") == f"{acts}\n"
    assert said("show", "acts.safetensors", "--stats") == f"{acts.stats()}\n"
    part = acts.select("transformer.h.1[0, -1]")
    assert said("show", "acts.safetensors", "--at", "transformer.h.1[0, -1]", "--stats") == f"{part.stats()}\n"
    values = said("show", "acts.safetensors", "--at", "transformer.h.1[0, -1]", "--values")
    assert values == f"transformer.h.1[0, -1]: float32 (16,)\n{part['transformer.h.1[0, -1]']}\n\n"


def test_numbers_for_a_script_are_exact(folder):
    acts = hl.Cache.load("acts.safetensors")
    found = told("show", "acts.safetensors", "--stats", "--values")
    assert (found["file"], found["kind"]) == ("acts.safetensors", "cache")
    for one in found["sites"]:
        assert torch.tensor(one["values"][0]).equal(acts[one["site"]])
        assert tuple(one["stats"].values()) == tuple(acts.stats()[one["site"]])
        assert one["shape"] == [1, 3, 16]


def test_what_json_has_no_word_for_is_a_text(folder):
    odd = torch.tensor([math.nan, math.inf, -math.inf, 1.5])
    hl.Cache({"odd": odd, "whole": torch.tensor([1 + 2j]), "pair": (torch.ones(2).bool(), None, "x")}).save(
        "odd.safetensors"
    )
    sites = told("show", "odd.safetensors", "--values", "--stats")["sites"]
    assert sites[0]["values"] == [["nan", "inf", "-inf", 1.5]]
    assert sites[1]["values"] == [[[1.0, 2.0]]]
    assert sites[2]["values"] == [[[True, True], None, "x"]]
    assert (sites[2]["dtype"], sites[2]["shape"]) == (["bool"], [[2]])
    hl.Cache({"nothing": torch.zeros(0)}).save("empty.safetensors")
    assert told("show", "empty.safetensors", "--stats")["sites"][0]["stats"]["mean"] == "nan"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.int8])
def test_every_dtype_comes_back_bit_for_bit(dtype, empty):
    value = torch.tensor([0.1, -2.0, 3.0]).to(dtype)
    hl.Cache({"h": value}).save("some.safetensors")
    (found,) = told("show", "some.safetensors", "--values")["sites"][0]["values"]
    again = torch.tensor(found, dtype=torch.float64).to(dtype)
    assert again.view(torch.uint8).equal(value.view(torch.uint8))


def test_a_store_is_shown_as_it_prints(store):
    assert said("show", "store") == f"{store}\n"
    assert said("show", "store/", "--stats") == f"{store.stats()}\n"
    chosen = said("show", "store", "--at", "**.h.1", "--at", "input_ids").splitlines()
    assert [line.split()[0] for line in chosen[2:]] == ["transformer.h.1", "input_ids"]
    values = said("show", "store", "--at", "transformer.h.1", "--values", "--rows", "2")
    assert values == f"transformer.h.1: 2 of 25 rows\n{store['transformer.h.1'][:2]}\n\n"


def test_a_store_for_a_script(store):
    found = told("show", "store", "--stats", "--values", "--rows", "3", "--at", "transformer.h.*")
    assert (found["kind"], found["samples"]) == ("store", 5)
    one = found["sites"][1]
    assert (one["site"], one["rows"], one["shape"], one["bytes"]) == ("transformer.h.1", 25, [16], 1600)
    assert torch.tensor(one["values"]).equal(store["transformer.h.1"][:3])
    assert tuple(one["stats"].values()) == tuple(store.stats()["transformer.h.1"])


def test_what_is_not_there_is_refused_in_one_line(store, folder):
    assert refused("show", "none.safetensors").startswith("'none.safetensors' can't be read: No such file")
    assert refused("show", "batch.safetensors").startswith("'batch.safetensors' is not from hookline")
    assert refused("show", "gpt2") == "'gpt2' is a folder, and a model: `hookline scan` shows it"
    assert refused("show", "pictures") == "'pictures' is a folder that holds neither a store nor a model"
    assert refused("show", "report.html") == "'report.html' is a page: `hookline explore report.html` opens it"
    near = refused("show", "acts.safetensors", "--at", "transformer.h.3")
    assert near.startswith("'transformer.h.3' matches nothing in this cache; did you mean 'transformer.h.0'")
    assert "matches nothing in this store; did you mean 'transformer.h.0'" in refused(
        "show", "store", "--at", "transformer.h.7"
    )


def test_a_store_that_is_not_finished_is_shown_when_asked(folder):
    asked = ("gpt2", "--data", "texts.txt", "--at", "transformer.h.1", "--to", "part", "--unit", "2")
    said("harvest", *asked)
    for unit in (0, 2):
        (folder / f"part/units/{unit:08d}.json").unlink()
    assert refused("show", "part").endswith(
        "has 1 of 3 units; run its harvest again to finish it, or open it with --partial"
    )
    assert told("show", "part", "--partial")["sites"][0]["site"] == "transformer.h.1"


def test_an_integer_that_python_does_not_write_in_decimal_is_shown_too(folder):
    hl.Cache({"h.0": 1 << 20_000, "h.1": [1 << 20_000]}).save("large.safetensors")
    assert "int of 20,001 bits" in said("show", "large.safetensors")
    assert "not shown: Exceeds the limit" in said("show", "large.safetensors", "--values")
    assert told("show", "large.safetensors", "--values")["sites"][0]["values"] == [hex(1 << 20_000)]


def test_repeated_blocks_are_one_row_unless_every_row_is_asked_for(folder):
    hl.Cache({f"h.{number}": torch.ones(2) for number in range(40)}).save("many.safetensors")
    assert said("show", "many.safetensors").endswith("40 rows as 1; --all has each\n")
    assert len(said("show", "many.safetensors", "--all").splitlines()) == 3 + 40
    assert len(said("show", "many.safetensors", "--all", "--stats").splitlines()) == 2 + 40
    assert len(said("scan", "gpt2", "--all").splitlines()) > len(said("scan", "gpt2").splitlines())


def test_in_a_terminal_rich_draws_the_table(folder, monkeypatch, capsys):
    pytest.importorskip("rich")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys, "argv", ["hookline", "show", "acts.safetensors", "--stats"])
    with suppress(SystemExit):
        cli.main()
    drawn = capsys.readouterr().out
    assert "\x1b[36mtransformer.h.0" in drawn
    plain_text = re.sub(r"\x1b\[[\d;]*m", "", drawn)
    assert max(map(len, plain_text.splitlines())) <= 60


def test_a_part_of_a_stores_array_is_refused(folder):
    hl.harvest(nn.Linear(2, 2).eval(), torch.ones(3, 2), "", to="acts", batch_size=3, progress=False)
    for where in ("[0]", "[:, 0]"):
        assert refused("show", "acts", "--at", where) == (
            f"'{where}': the arrays of a store are shown whole; leave the subscripts out"
        )


def test_options_of_show_that_would_do_nothing_are_refused(folder, store):
    assert "--rows is for --values" in refused("show", "store", "--rows", "2")
    assert "--rows is for the folder of a harvest" in refused("show", "acts.safetensors", "--rows", "2", "--values")
    assert "--partial is for the folder of a harvest" in refused("show", "acts.safetensors", "--partial")


def test_values_are_shown_with_their_statistics(folder):
    shown = said("show", "acts.safetensors", "--stats", "--values")
    assert shown.startswith(f"{hl.Cache.load('acts.safetensors').stats()}\n")
    assert "tensor(" in shown


def test_a_cache_without_values_says_so(folder):
    hl.Cache({}).save("none.safetensors")
    assert "0 sites" in said("show", "none.safetensors", "--values")


def test_a_folder_or_a_name_that_is_nothing_is_not_taken_for_another_thing(folder, tmp_path):
    (tmp_path / "nothing").mkdir()
    assert "is a folder that holds neither a store nor a model" in refused("show", str(tmp_path / "nothing"))
