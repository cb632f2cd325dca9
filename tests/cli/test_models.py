"""The MODEL argument: a folder, a file or a Python object, given by name."""

from __future__ import annotations

import importlib
import json
import sys
import typing

import pytest
import torch

import hookline as hl
from tests.support.command_line import refused, run, said, told
from tests.support.real_models import gpt2, of

SHAPE = ("--shape", "1,3,8,8")


def captured(name: str, at: str, *more: str) -> torch.Tensor:
    """Return a value of a run."""
    said("capture", name, "--at", at, *more, "--to", "x.safetensors", "--overwrite")
    return hl.Cache.load("x.safetensors")[at]


@pytest.mark.parametrize("name", ["mine:net", "mine:Net", "mine:model", "mine.py:net", "./mine.py:Net"])
def test_a_function_a_class_a_model_and_a_file_are_models(name, folder):
    assert told("scan", name, *SHAPE)["model"] == "Net"


def test_a_model_is_not_in_training_mode(folder):
    (folder / "mode.py").write_text(
        "import torch\nfrom torch import nn\n\nclass Mode(nn.Module):\n    def forward(self, x):\n"
        "        return torch.tensor([float(self.training)])\n"
    )
    assert captured("mode:Mode", "", *SHAPE).item() == 0


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("mine:net", ("stem.weight:param", *SHAPE)),
        ("plain/", ("lm_head.weight:param", "--text", "the cat")),
        ("plain/config.json", ("lm_head.weight:param", "--text", "the cat")),
    ],
)
def test_random_weights_are_the_same_each_time_and_the_seed_outside_is_left_alone(folder, name, asked):
    one = captured(name, *asked)
    torch.manual_seed(7)
    before, other = torch.get_rng_state(), captured(name, *asked)
    assert torch.equal(torch.get_rng_state(), before)
    assert one.equal(other)
    assert one.std() > 0


def test_a_config_is_a_model_of_the_class_it_names_and_says_that_its_weights_are_random(folder):
    result = run("capture", "plain/config.json", "--at", "lm_head", "--text", "the cat", "--to", "x.safetensors")
    assert result.exit_code == 0, result.stderr
    assert "is a config without weights: they are random, with seed 0" in result.stderr
    assert told("scan", "plain")["model"] == told("scan", "gpt2")["model"] == "GPT2LMHeadModel"


def test_a_checkpoint_has_its_own_weights_and_runs_as_asked(folder):
    weight, text = "transformer.wpe.weight:param", ("--text", "the cat")
    saved = captured("gpt2", weight, *text)
    assert saved.equal(of(gpt2).transformer.wpe.weight)
    assert captured("gpt2", weight, *text, "--dtype", "bfloat16").equal(saved.bfloat16())
    for name in ("gpt2", "plain"):
        pattern = captured(name, "transformer.h.0.attn/softmax", *text, "--attention", "eager")
        assert pattern.shape == (1, 2, 2, 2)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mine:nett", "'mine:nett': 'mine' has no 'nett'; did you mean 'net'?"),
        ("mine:Wide", "'mine:Wide': missing a required argument: 'width'; name a function that needs none"),
        ("mine:images", "'mine:images' gives Tensor, not a model"),
        ("other.py:net", "'other.py:net': [Errno 2] No such file or directory"),
        ("nowhere:net", "'nowhere:net': No module named 'nowhere'"),
        ("pictures", "AutoConfig can't load "),
    ],
)
def test_what_is_no_model_is_refused_in_one_line(name, message, folder):
    assert refused("scan", name, "--shape", "1,3,8,8").startswith(message)


def test_a_config_that_names_no_model_is_refused(folder):
    (folder / "bad.json").write_text(json.dumps({"sizes": 3}))
    assert "AutoConfig can't load" in refused("scan", "bad.json")


def test_attention_is_for_models_that_have_a_choice(folder):
    line = refused("scan", "mine:net", "--shape", "1,3,8,8", "--attention", "eager")
    assert line == "--attention is for transformers models, and 'mine:net' gives Net"


def test_a_device_and_a_dtype_that_are_not_there_are_refused(folder):
    asked = ("capture", "mine:net", "--at", "stem", "--shape", "1,3,8,8", "--to", "x.safetensors")
    assert (
        refused(*asked, "--dtype", "bfloat61")
        == "--dtype bfloat61 is not a dtype; did you mean 'float16' or 'float64' or 'bfloat16'?"
    )
    assert refused(*asked, "--device", "cuda:99").startswith("the model can't be put on 'cuda:99': ")
    assert not (folder / "x.safetensors").exists()


def test_a_dtype_is_that_of_the_run(folder):
    found = told(
        "capture", "mine:net", "--at", "stem", "--shape", "1,3,8,8", "--to", "x.safetensors", "--dtype", "float64"
    )
    assert found["sites"][0]["dtype"] == "float64"
    assert hl.Cache.load("x.safetensors")["stem"].dtype is torch.float64


def test_without_transformers_one_line_says_what_to_install(folder, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    assert refused("scan", "gpt2/") == "models by name need transformers: pip install 'hookline[transformers]'"
    assert told("scan", "mine:net", *SHAPE)["model"] == "Net"


FOREIGN = """
import pathlib

import torch
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

pathlib.Path({mark!r}).touch()


class Settings(PretrainedConfig):
    model_type = "foreign"


class Foreign(PreTrainedModel):
    config_class = Settings

    def __init__(self, config):
        super().__init__(config)
        self.head = torch.nn.Linear(3, 2)

    def forward(self, values):
        return self.head(values)


class Words(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def foreign(folder, monkeypatch):
    """A checkpoint with its own code, and the path of a file that exists once that code has run."""
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(folder / "modules"))
    mark = folder / "it-ran"
    own = {"AutoConfig": "code.Settings", "AutoModelForCausalLM": "code.Foreign"}
    for name, more in (("foreign", {}), ("words", {})):
        (folder / name).mkdir()
        (folder / name / "code.py").write_text(FOREIGN.format(mark=str(mark)))
        config = {"model_type": "foreign", "architectures": ["Foreign"], "auto_map": own, **more}
        (folder / name / "config.json").write_text(json.dumps(config))
    (folder / "words" / "tokenizer_config.json").write_text(
        json.dumps({"auto_map": {"AutoTokenizer": [None, "code.Words"]}})
    )
    return mark


@pytest.mark.parametrize(
    "line",
    [
        "scan foreign --shape 1,3",
        "scan foreign/config.json --shape 1,3",
        "capture foreign --at head --shape 1,3 --to x.safetensors",
        "explore foreign --shape 1,3 --no-open",
        "explore acts.safetensors --model foreign --no-open",
        "harvest foreign --data mine:images --at head --to x",
        "capture gpt2 --processor words --at lm_head --text the --to x.safetensors",
        "harvest gpt2 --processor words --data texts.txt --at lm_head --to x",
    ],
)
def test_code_of_a_checkpoint_does_not_run_unless_it_is_asked_for(line, foreign):
    result = run(*line.split(), input="y\n" * 5)
    assert not foreign.exists()
    assert result.exit_code == 1
    assert "comes with Python code; read it, and give --trust-remote-code to run it" in result.stderr


def test_code_of_a_checkpoint_runs_where_it_is_trusted(foreign):
    assert "Linear" in said("scan", "foreign", "--shape", "1,3", "--trust-remote-code")
    assert foreign.exists()
    line = ("capture", "foreign", "--at", "head", "--shape", "1,3", "--to", "x.safetensors", "--trust-remote-code")
    assert "float32  (1, 2)" in said(*line)


def test_a_file_does_not_take_the_place_of_another_module(empty):
    models = empty / "models"
    models.mkdir()
    (models / "typing.py").write_text("import colorsys\nfrom part import Part\n\n\ndef net():\n    return Part(2, 2)\n")
    (models / "part.py").write_text("from torch.nn import Linear as Part\n")
    (models / "colorsys.py").write_text("raise AssertionError('this is not Python's own')\n")
    (models / "other").mkdir()
    (models / "other" / "part.py").write_text(
        "from torch.nn import Bilinear\n\n\ndef net():\n    return Bilinear(1, 1, 1)\n"
    )
    both = ("--shape", "input1=1,1", "--shape", "input2=1,1")
    own = sys.modules.pop("colorsys", None)
    try:
        assert told("scan", "models/typing.py:net", "--shape", "1,2")["model"] == "Linear"
        assert importlib.import_module("typing") is typing
        assert importlib.import_module("colorsys").rgb_to_hls
        assert told("scan", "models/other/part.py:net", *both)["model"] == "Bilinear"
        assert sys.modules["part"].__file__ == str(models / "part.py")
    finally:
        sys.modules.pop("part", None)
        sys.modules.update({"colorsys": own} if own else {})


def test_a_wrong_target_says_where_its_module_was_found(folder):
    assert "'typing' (" in refused("scan", "typing:net")
    assert "typing.py) has no 'net'" in refused("scan", "typing:net")
    (folder / "typing.py").write_text("def net(): ...")
    assert refused("scan", "typing:net").endswith("for the file here, write typing.py:net")
    assert "or in a file, as in folder/mine.py:net" in refused("scan", "nothing_here:net")


def test_a_message_names_the_command_and_not_the_function(folder):
    line = refused("capture", "mine:net", "--input", "batch.npy", "--at", "qqqq", "--to", "x.safetensors")
    assert line == "'qqqq' matches nothing in Net; `hookline scan MODEL` lists every name"
    line = refused("capture", "mine:net", "--input", "batch.npy", "--at", "head.qqqq()", "--to", "x.safetensors")
    assert "`hookline scan MODEL --at 'head.*()'` lists them" in line
