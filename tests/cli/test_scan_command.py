"""`hookline scan`."""

from __future__ import annotations

import pytest
import torch

import hookline as hl
from tests.support.command_line import refused, run, said, told
from tests.support.real_models import gpt2, of, resnet, t5, vit, whisper


def test_a_scan_is_that_of_the_library(folder):
    from tests.support.command_line import MINE

    names: dict[str, object] = {}
    exec(MINE, names)
    expected = hl.scan(names["model"], torch.zeros(1, 3, 8, 8))
    assert said("scan", "mine:net", "--shape", "1,3,8,8") == f"{expected}\n"
    found = told("scan", "mine:net", "--shape", "1,3,8,8")
    assert [one["site"] for one in found["modules"]] == [row.site for row in expected]
    assert [one["parameters"] for one in found["modules"]] == [row.parameters for row in expected]
    assert found["modules"][1]["shape"] == [[1, 8, 8, 8]]
    assert found["model"] == "Net"


def test_a_checkpoint_is_scanned_without_its_weights(folder):
    (folder / "gpt2" / "model.safetensors").write_bytes(b"")
    found = told("scan", "gpt2")
    assert found["modules"][0]["parameters"] == sum(one.numel() for one in of(gpt2).parameters())
    assert {one["shape"][0][0] for one in found["modules"] if one["calls"]} == {1}
    never = [one["site"] for one in found["modules"] if one["hazards"].startswith("never called")]
    assert never == ["transformer.h.0.attn.attn_dropout", "transformer.h.1.attn.attn_dropout"]


@pytest.mark.parametrize("build", [gpt2, vit, resnet, t5, whisper])
def test_models_of_transformers_need_no_input(build, tmp_path):
    config = of(build).config
    config.architectures = [type(of(build)).__name__]
    config.save_pretrained(tmp_path)
    assert told("scan", f"{tmp_path}/config.json")["modules"][0]["calls"] == 1


def test_another_model_is_told_what_to_be_given(folder):
    line = refused("scan", "mine:net")
    assert line == "Net.forward takes 'images': give --input FILE, or --shape 1,3,224,224 for the first"


def test_places_are_listed_functions_among_them(folder):
    found = told("scan", "gpt2", "--attention", "eager", "--at", "transformer.h.0.attn/softmax", "--at", "lm_head")
    assert [one["site"] for one in found["sites"]] == ["transformer.h.0.attn/softmax", "lm_head"]
    assert (found["sites"][0]["calls"], found["sites"][0]["value"]) == (1, "float32 (1, 2, 8, 8)")
    assert told("scan", "gpt2", "--at", "")["sites"][0]["site"] == ""
    assert "softmax" in said("scan", "gpt2", "--attention", "eager", "--at", "transformer.h.0.attn/*")
    assert "did you mean 'lm_head'" in refused("scan", "gpt2", "--at", "lm_haed")


def test_what_fake_tensors_can_not_do_is_run_for_real(folder):
    (folder / "mine.py").write_text(
        "from torch import nn\n\nclass Net(nn.Module):\n    def forward(self, x):\n"
        "        return x * 2 if x.sum().item() > 0 else x\n"
    )
    assert told("scan", "mine:Net", "--shape", "2,3")["note"].startswith("on a real run")


def test_a_forward_that_fails_is_one_line_and_a_traceback_only_on_demand(folder):
    line = refused("scan", "mine:net", "--shape", "1,4,8,8")
    assert line.startswith("RuntimeError: ")
    assert line.endswith("(--debug shows where)")
    with pytest.raises(RuntimeError, match="channels"):
        run("scan", "mine:net", "--shape", "1,4,8,8", "--debug")


def test_a_dtype_is_that_of_the_scan_too(folder):
    rows = told("scan", "gpt2", "--dtype", "float16")["modules"]
    assert {row["dtype"] for row in rows if row["site"].endswith("mlp")} == {"float16"}
    assert refused("scan", "gpt2", "--dtype", "float17").startswith("--dtype float17 is not a dtype")
