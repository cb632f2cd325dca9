"""`hookline compare`."""

from __future__ import annotations

import pytest
import torch

from tests.support.command_line import refused, run, said, told
from tests.support.needs import needs

needs("typer")

TEXT = ("--text", "the cat sat")
FAULTY = """

def faulty():
    torch.manual_seed(0)
    net = Net()
    net.blocks[1].bias = None
    return net


def right():
    torch.manual_seed(0)
    return Net()


class Renamed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = right()

    def forward(self, images):
        return self.inner(images)
"""


@pytest.fixture
def nets(folder):
    with (folder / "mine.py").open("a") as file:
        file.write(FAULTY)


def test_models_that_do_the_same_are_one_line(folder):
    line = said("compare", "gpt2", "gpt2", "--attention-b", "sdpa", *TEXT)
    assert line.startswith("ok: at ")
    assert len(line.splitlines()) == 1
    assert told("compare", "gpt2", "gpt2", "--dtype-b", "bfloat16", *TEXT)["ok"]


def test_models_that_part_are_a_table_and_exit_status_1(folder, nets):
    done = run("compare", "mine:right", "mine:faulty", "--input", "batch.safetensors")
    assert done.exit_code == 1
    assert done.stdout.startswith("'blocks.1' does something else on the same inputs")
    assert "Hint: b has no bias" in done.stdout
    done = run("compare", "mine:right", "mine:faulty", "--input", "batch.safetensors", "--json")
    assert done.exit_code == 1
    assert '"site": "blocks.1"' in done.stdout


def test_names_are_matched(folder, nets):
    found = told("compare", "mine:right", "mine:Renamed", "--input", "batch.safetensors", "--match", "stem=inner.stem")
    assert found["ok"]
    assert {one["site"]: one["other"] for one in found["places"]}["stem"] == "inner.stem"
    assert {"a": "stem", "b": "inner.stem", "found_by": "match="} in found["matching"]["pairs"]
    assert "--match takes A=B" in refused("compare", "mine:right", "mine:Renamed", "--match", "stem", status=2)
    found = told("compare", "mine:right", "mine:net", "--input", "batch.safetensors", "--match", "head=")
    assert "head" not in {one["site"] for one in found["places"]}


def test_saved_values_are_compared_with_a_model(folder):
    said("capture", "gpt2", "--at", "transformer.h.*", *TEXT, "--to", "seen.safetensors")
    found = told("compare", "seen.safetensors", "gpt2", *TEXT)
    assert found["ok"]
    assert found["places"][0]["local"] is None
    assert "give the input that they are for" in refused("compare", "seen.safetensors", "gpt2", status=2)


def test_weights_are_compared_without_an_input(folder, nets):
    done = run("compare", "mine:right", "mine:faulty")
    assert done.exit_code == 1
    assert "b has no blocks.1.bias, which is (8,) in a" in done.stdout
    assert torch.get_default_dtype() == torch.float32
