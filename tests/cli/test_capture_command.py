"""`hookline capture`."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import hookline as hl
from tests.support.command_line import refused, run, said, told
from tests.support.real_models import SENTENCES, gpt2, numbers, of

ONE = ("capture", "gpt2", "--text", "the cat sat", "--to", "x.safetensors")


def test_what_is_kept_is_what_the_library_captures(folder):
    text = said(*ONE, "--at", "transformer.h.*", "--at", "lm_head[:, -1]")
    _, expected = hl.run(
        of(gpt2), torch.tensor([numbers("the cat sat")]), capture=["transformer.h.*", "lm_head[:, -1]"]
    )
    acts = hl.Cache.load("x.safetensors")
    assert list(acts) == list(expected)
    assert all(acts[site].equal(expected[site]) for site in acts)
    assert text == f"{acts}\n"


def test_the_summary_for_a_script_is_all_of_stdout(folder):
    found = told("capture", "mine:net", "--at", "blocks.*", "--input", "batch.safetensors", "--to", "x.safetensors")
    assert found == {
        "file": "x.safetensors",
        "sites": [
            {"site": f"blocks.{number}", "calls": 1, "dtype": "float32", "shape": [2, 8, 32, 32]} for number in (0, 1)
        ],
    }
    result = run("capture", "mine:net", "--at", "stem", "--shape", "1,3,8,8", "--to", "y.safetensors", "--json")
    assert "making a net" in result.stderr


def test_a_file_that_is_there_is_left_alone_and_nothing_is_run(folder):
    (folder / "x.safetensors").write_text("mine")
    line = refused("capture", "nowhere:model", "--at", "0", "--shape", "1", "--to", "x.safetensors")
    assert line == "'x.safetensors' exists already; --overwrite replaces it"
    said(*ONE, "--at", "lm_head", "--overwrite")
    assert list(hl.Cache.load("x.safetensors")) == ["lm_head"]


def test_gradients_are_those_of_the_loss_of_a_language_model(folder):
    said("capture", "gpt2", "--at", "transformer.h.0:grad_output", "--loss", "lm", "--input", "texts.txt",
         "--to", "x.safetensors")  # fmt: skip
    model, total = of(gpt2), 0.0
    loss = torch.zeros(())
    for text in SENTENCES:  # By hand, without padding: the mean over all tokens but the last.
        ids = torch.tensor(numbers(text))
        loss = loss + F.cross_entropy(model(ids[None]).logits[0, :-1], ids[1:], reduction="sum")
        total += len(ids) - 1
    with hl.capture(model, "transformer.h.0:grad_output", keep="all") as expected:
        for text in SENTENCES:
            model(torch.tensor([numbers(text)]))
    found = hl.Cache.load("x.safetensors")["transformer.h.0:grad_output"]
    assert found.shape == (5, 12, 16)
    first = torch.tensor(numbers(SENTENCES[0]))
    with hl.capture(model, "transformer.h.0:grad_output") as expected:
        (F.cross_entropy(model(first[None]).logits[0, :-1], first[1:], reduction="sum") / total).backward()
    torch.testing.assert_close(found[0, :6], expected["transformer.h.0:grad_output"][0], atol=1e-6, rtol=1e-4)
    assert found[0, 6:].count_nonzero() == 0


def test_other_losses(folder):
    asked = ("capture", "mine:net", "--at", "head:grad_output", "--input", "batch.npy", "--to")
    said(*asked, "sum.safetensors", "--loss", "sum")
    assert hl.Cache.load("sum.safetensors")["head:grad_output"].equal(torch.ones(2, 10))
    said(*asked, "own.safetensors", "--loss", "mine:loss")
    torch.testing.assert_close(hl.Cache.load("own.safetensors")["head:grad_output"].sum(1), torch.ones(2))
    assert refused(*asked, "x.safetensors").startswith("'head:grad_output' needs a loss, and the output has none")
    assert refused(*asked, "x.safetensors", "--loss", "mean") == "--loss mean: give lm, sum, or module:function"
    assert refused(*asked, "x.safetensors", "--loss", "lm").startswith("--loss lm is for texts")


def test_a_second_input_is_kept_beside_the_first(folder):
    found = told(*ONE, "--at", "lm_head", "--against-text", "the dog sat")
    assert found["against"]["file"] == "x.against.safetensors"
    clean, other = hl.Cache.load("x.safetensors"), hl.Cache.load("x.against.safetensors")
    assert (clean - other)["lm_head"][0, 0].count_nonzero() == 0  # The word before the changed one is the same.
    assert (clean - other)["lm_head"][0, 1].count_nonzero() > 0
    assert "'x.safetensors' exists already" in refused(*ONE, "--at", "lm_head")


@pytest.mark.parametrize("at", ["transformer.h.*.attn/softmax", "transformer.h.1.attn/softmax"])
def test_the_attention_pattern_needs_the_eager_implementation_and_an_error_says_so(at, folder):
    line = refused(*ONE, "--at", at)
    assert (
        "scaled_dot_product_attention computes attention in one kernel, without this function. Choose --attention eager"
        in line
    )
    assert not (folder / "x.safetensors").exists()
    said(*ONE, "--at", at, "--attention", "eager")
    assert hl.Cache.load("x.safetensors")["transformer.h.1.attn/softmax"].shape == (1, 2, 3, 3)


def test_a_pattern_of_which_some_places_fire_warns_in_one_line(folder, monkeypatch):
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("default", hl.HooklineWarning)
        result = run(*ONE, "--at", "**")
    assert result.exit_code == 0, result.stderr
    (line,) = [line for line in result.stderr.splitlines() if "warning" in line]
    assert line.startswith("hookline: warning: 'transformer.h.0.attn.attn_dropout' was not called")


def test_a_wrong_name_says_what_is_near(folder):
    assert "did you mean 'transformer.h.0.mlp' or" in refused(*ONE, "--at", "transformer.h.1.mpl")


def test_nothing_to_go_in_and_a_wrong_number_of_calls_are_refused(folder):
    assert refused("capture", "gpt2", "--at", "lm_head", "--to", "x").startswith("the model needs an input: give --in")
    assert refused(*ONE, "--at", "lm_head", "--keep", "some") == "--keep some: give last, all, or a number"


def test_every_call_may_be_kept(folder):
    (folder / "mine.py").write_text(
        "from torch import nn\n\nclass Twice(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.one = nn.Linear(2, 2)\n\n    def forward(self, x):\n        return self.one(self.one(x))\n"
    )
    said("capture", "mine:Twice", "--at", "one", "--shape", "1,2", "--keep", "all", "--to", "x.safetensors")
    assert len(hl.Cache.load("x.safetensors").calls("one")) == 2
    assert told("show", "x.safetensors")["sites"][0]["calls"] == 2


@pytest.mark.parametrize(
    ("to", "why"),
    [("nowhere/x.safetensors", "can't be written: there is no folder 'nowhere'"), ("gpt2", "is a folder")],
)
def test_a_place_that_can_not_be_written_is_told_before_anything_runs(to, why, folder):
    line = refused("capture", "nowhere:model", "--at", "0", "--shape", "1", "--to", to, "--overwrite")
    assert line == f"'{to}' {why}; give another --to"


def test_a_folder_without_a_tokenizer_is_not_given_an_empty_one(folder):
    of(gpt2).save_pretrained("bare")
    line = refused("capture", "bare", "--at", "lm_head", "--text", "the cat sat", "--to", "x.safetensors")
    assert line == "'bare' has no tokenizer with a vocabulary; name one with --processor"
    assert said(
        "capture", "bare", "--at", "lm_head", "--text", "the cat", "--to", "x.safetensors", "--processor", "gpt2"
    )


def test_what_a_program_of_the_model_prints_is_not_part_of_the_result(folder, capfd):
    (folder / "loud.py").write_text(
        "import os\nfrom torch import nn\ndef net():\n    os.system('echo loud')\n    return nn.ReLU()\n"
    )
    run("scan", "loud:net", "--shape", "2,3", "--json")
    out, err = capfd.readouterr()
    assert ("loud" in out, "loud" in err) == (False, True)


def test_a_loss_without_a_gradient_to_keep_is_refused(folder):
    asked = ("capture", "mine:net", "--input", "batch.npy", "--to", "x.safetensors", "--loss", "sum")
    assert refused(*asked, "--at", "stem", "--at", "head") == (
        "--loss is for gradients, and no --at names one; add --at 'stem:grad_output', or leave --loss out"
    )


def test_calls_and_tokens_can_be_named(folder):
    two = ("capture", "gpt2", "--text", SENTENCES[0], "--text", SENTENCES[1], "--overwrite", "--to", "x.safetensors")
    places = [f"transformer.h.1{part}" for part in ("[:, @prompt[-1]]", "#-1", "[:, @(0, 1)]", "#:3")]
    said(*two, *[word for place in places for word in ("--at", place)])
    acts = hl.Cache.load("x.safetensors")
    assert sorted(acts) == sorted(places)
    ends = [len(numbers(text)) - 1 for text in SENTENCES[:2]]
    assert acts[places[0]].equal(acts[places[1]][[0, 1], ends])
    assert acts[places[2]].equal(acts[places[1]][[0, 1], [0, 1]])
    said(*two, "--at", places[0], "--at", "transformer.h.1#0", "--keep", "all")
    assert hl.Cache.load("x.safetensors")[places[0]].equal(acts[places[0]])
    assert "no such token passed" in refused(*two, "--at", "transformer.h.1[:, @new]")
    assert "leave --keep out, or '#-1'" in refused(*two, "--at", "transformer.h.1#-1", "--keep", "all")
    assert "which make no tensor" in refused(*two, "--at", "transformer.h.1[:, @prompt]")
