"""Repeated blocks collapse into one row, at any nesting, if their rows are the same."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hookline as hl
from hookline._tables import Table
from hookline._tables.terminal import collapse


def names(rows: list[list[str]], alike: tuple[int, ...] = (), enough: int = 1) -> list[str]:
    return [row[0] for row in collapse(rows, 0, alike, enough)]


def test_rows_that_differ_in_a_number_of_their_name_are_one_with_the_range_of_their_numbers() -> None:
    sizes = {"up": 1000, "down": 5}
    rows = [[f"h.{layer}.{part}", "Linear", f"{sizes[part] + layer:,}"] for layer in range(12) for part in sizes]
    assert collapse(rows, 0, (), 2) == [
        ["h.{0…11}.up", "Linear", "1,000…1,011"],
        ["h.{0…11}.down", "Linear", "5…16"],
    ]


def test_what_is_alike_in_every_number_is_collapsed_at_any_nesting() -> None:
    numbers = [(stage, block, expert) for stage in range(3) for block in range(4) for expert in range(8)]
    rows = [["stage.{}.block.{}.experts.{}.w".format(*three)] for three in numbers]
    assert names(rows) == ["stage.{0…2}.block.{0…3}.experts.{0…7}.w"]
    assert len(names(rows, enough=32)) == 32  # Collapses no more than it has to.


def test_other_types_shapes_and_numbers_that_have_to_agree_stay_apart() -> None:
    rows = [[f"h.{layer}", "Mamba" if layer % 2 else "Attention", "1"] for layer in range(8)]
    assert names(rows) == ["h.{0,2…6}", "h.{1,3…7}"]
    rows = [[f"h.{layer}", "Block", "2" if layer == 3 else "1"] for layer in range(8)]
    assert names(rows, alike=(2,)) == ["h.{0…2,4…7}", "h.3"]
    assert names(rows) == ["h.{0…7}"]


def test_a_nan_is_never_hidden_in_a_range() -> None:
    rows = [[f"h.{layer}", "nan" if layer == 5 else "0.5"] for layer in range(12)]
    assert collapse(rows, 0, (), 1) == [["h.{0…4,6…11}", "0.5"], ["h.5", "nan"]]
    values = {f"h.{layer}": torch.ones(4) for layer in range(30)} | {"h.7": torch.tensor([1.0, float("inf")])}
    assert "\nh.7 " in str(hl.Cache(values).stats())


def test_two_that_are_far_apart_are_no_block() -> None:
    assert names([["f.0", "Conv"], ["f.1", "ReLU"], ["f.2", "Conv"], ["f.3", "ReLU"]]) == ["f.0", "f.1", "f.2", "f.3"]


def test_a_block_that_has_more_than_the_others_keeps_it() -> None:
    rows = [[f"block.{block}.{part}"] for block in range(6) for part in ("q", "k")]
    assert names([*rows, ["block.0.bias"]], enough=3) == ["block.{0…5}.q", "block.{0…5}.k", "block.0.bias"]


def test_two_hooks_at_one_place_are_two_rows() -> None:
    assert names([[f"h.{layer}", "edit"] for layer in range(4) for _ in range(2)]) == ["h.{0…3}", "h.{0…3}"]


def test_numbers_count_wherever_they_are_in_a_name_but_not_with_zeros_before_them() -> None:
    assert names([[f"denselayer{layer}.conv"] for layer in range(1, 7)]) == ["denselayer{1…6}.conv"]
    assert names([[f"h.0.attn/softmax[:, {head}]"] for head in range(8)]) == ["h.0.attn/softmax[:, {0…7}]"]
    assert names([[f"h.0{layer}"] for layer in range(3)]) == ["h.00", "h.01", "h.02"]


def test_what_names_the_block_itself_does_not_keep_it_apart() -> None:
    row = ["h.{}.out", "never called. Capture 'h.{}.attn' instead", "tied.{}", "(1, 3)"]
    rows = [[cell.format(layer) for cell in row] for layer in range(5)]
    assert collapse(rows, 0, (), 1) == [[cell.replace("{}", "{0…4}") for cell in row]]


def test_tied_blocks_collapse_under_both_names() -> None:
    model = nn.Module()
    model.h = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(12))
    model.also = model.h
    shown = str(hl.sites(model))
    assert "h.{0…11}.0" in shown
    assert "also.{0…11}.0" in shown


def test_a_note_says_how_many_rows_there_are() -> None:
    table = Table(("site", "calls"), [(f"h.{layer}", 1) for layer in range(40)])
    assert table.text().splitlines()[2:] == ["h.{0…39}      1", '40 rows as 1; f"{x:all}" has each']
    assert len(table.text(whole=True).splitlines()) == 42


def test_ranges_have_fewer_digits_where_there_is_less_room() -> None:
    table = Table(("site", "mean"), [(f"h.{layer}", f"{0.123456 + layer:.6g}") for layer in range(40)])
    assert "0.123456…39.1235" in table.text(30)
    assert "0.123…39.1" in table.text(20)


@pytest.fixture(scope="module")
def tables() -> list[Table]:
    """The tables of a GPT-2 of twelve layers."""
    transformers = pytest.importorskip("transformers")
    sizes = {"n_embd": 24, "n_head": 4, "vocab_size": 50, "bos_token_id": 1, "eos_token_id": 1}
    gpt = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, attn_implementation="eager")).eval()
    ids = torch.zeros(2, 6, dtype=torch.long)
    hooks = hl.Hooks(gpt)
    acts = hooks.capture("**")
    gpt(ids)
    found = [thing._table() for thing in (acts, acts.stats(), hl.scan(gpt, ids), hl.sites(gpt), hooks)]
    hooks.remove()
    return found


@pytest.mark.parametrize("limit", [80, 100, 120, 200])
def test_a_gpt2_of_twelve_layers_fits_on_one_screen(limit: int, tables: list[Table]) -> None:
    assert len(tables) == 5
    for table in tables:
        lines = table.text(limit).splitlines()
        assert len(lines) < 40
        assert any("{0…11}.mlp" in line for line in lines)
