"""The model's input: texts, images and tensors, as the command line takes them."""

from __future__ import annotations

import numpy
import pytest
import safetensors.torch
import torch

import hookline as hl
from tests.support.command_line import refused, run, said
from tests.support.explorer_pages import data_of
from tests.support.real_models import SENTENCES, alone, gpt2, near, numbers, of, t5, tokenizer


def options(asked: dict[str, object]) -> list[str]:
    """Return the words of a command line."""
    given = [(name, one) for name, value in asked.items() for one in (value if isinstance(value, list) else [value])]
    return [word for name, one in given for word in (f"--{name.replace('_', '-')}", str(one))]


def taken(name: str, **asked: object) -> dict[str, torch.Tensor]:
    """Return what a model is called with."""
    said("capture", name, "--at", ":inputs", *options(asked), "--to", "inputs.safetensors", "--overwrite")
    return hl.Cache.load("inputs.safetensors")[":inputs"]


def tokens_of(name: str, **asked: object) -> list[list[str]]:
    """Return the tokens of a page."""
    said("explore", name, "--no-open", *options(asked), "--to", "tokens.html")
    return data_of("tokens.html")["tokens"]


def test_tensors_of_a_file_are_arguments_by_name(folder):
    found = taken("mine:net", input="batch.safetensors")
    assert found["images"].equal(safetensors.torch.load_file("batch.safetensors")["images"])
    safetensors.torch.save_file({"0": torch.zeros(1, 3, 8, 8)}, "numbered.safetensors")
    assert taken("mine:net", input="numbered.safetensors")["images"].shape == (1, 3, 8, 8)
    safetensors.torch.save_file({"x": torch.zeros(1, 3, 8, 8)}, "only.safetensors")
    assert taken("mine:net", input="only.safetensors")["images"].shape == (1, 3, 8, 8)
    numpy.savez("named.npz", images=numpy.zeros((1, 3, 8, 8), dtype="float32"))
    assert taken("mine:net", input="named.npz")["images"].shape == (1, 3, 8, 8)


def test_tensors_that_are_no_arguments_are_refused_with_what_is_near(folder):
    both = {"image": torch.zeros(1, 3, 8, 8), "mask": torch.zeros(1)}
    safetensors.torch.save_file(both, "wrong.safetensors")
    line = refused("scan", "mine:net", "--input", "wrong.safetensors")
    assert line == "'wrong.safetensors' has 'image', and Net.forward takes 'images'; did you mean 'images'?"


def test_an_array_is_the_first_argument_and_floats_become_the_models(folder):
    result = run("capture", "mine:net", "--at", "stem:input", "--input", "batch.npy", "--to", "x.safetensors")
    assert "the input is float64; it is cast to float32, the dtype of the model's weights" in result.stderr
    assert hl.Cache.load("x.safetensors")["stem:input"].equal(torch.from_numpy(numpy.load("batch.npy")).float())


def test_a_function_gives_arguments(folder):
    assert taken("mine:net", input="mine:images")["images"].shape == (6, 3, 32, 32)
    assert taken("mine:net", input="mine:both")["images"].shape == (2, 3, 32, 32)
    assert "gives Net; a tensor, a tuple or a dict" in refused("scan", "mine:net", "--input", "mine:net")


def test_texts_go_through_the_models_own_tokenizer(folder):
    assert taken("gpt2", text=["the cat sat"])["input_ids"].tolist() == [numbers("the cat sat")]
    assert tokens_of("gpt2", text=["the cat sat"]) == [["the", "cat", "sat"]]
    file = taken("gpt2", input="texts.txt")
    assert file["attention_mask"].sum(1).tolist() == [len(text.split()) for text in SENTENCES]
    named = taken("gpt2", input="pairs.jsonl", column="question")
    assert named["input_ids"].equal(file["input_ids"])
    assert taken("gpt2", input="texts.txt", samples=2, max_length=3)["input_ids"].shape == (2, 3)


def test_values_of_padded_texts_are_those_they_have_alone_also_at_the_last_position(folder):
    said("capture", "gpt2", "--at", "transformer.h.1[:, -1]", "--input", "texts.txt", "--to", "last.safetensors")
    found = hl.Cache.load("last.safetensors")["transformer.h.1[:, -1]"]
    near(found, torch.stack([alone(of(gpt2), "transformer.h.1", text)[-1] for text in SENTENCES]))


def test_images_go_through_the_models_own_processor(folder):
    every = taken("vit", input="pictures")["pixel_values"]
    assert every.shape == (3, 3, 16, 16)
    assert taken("vit", input="pictures/1.png")["pixel_values"].equal(every[1:2])
    said("capture", "vit", "--at", "layers.1", "--input", "pictures", "--to", "x.safetensors", "--dtype", "bfloat16")
    assert hl.Cache.load("x.safetensors")["layers.1"].shape == (3, 17, 16)


def test_an_encoder_decoder_begins_to_write_where_nothing_is_given_to_its_decoder(folder):
    of(t5).save_pretrained("t5")
    tokenizer().save_pretrained("t5")
    said("capture", "t5", "--at", "lm_head", "--text", "the cat sat", "--to", "x.safetensors")
    expected = of(t5)(input_ids=torch.tensor([numbers("the cat sat")]), decoder_input_ids=torch.zeros(1, 1).long())
    near(hl.Cache.load("x.safetensors")["lm_head"], expected.logits.detach())


def test_texts_and_images_go_into_a_model_of_both(folder):
    transformers = pytest.importorskip("transformers")
    pil = pytest.importorskip("transformers.models.clip.image_processing_pil_clip")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.CLIPConfig(
        text_config={**sizes, "vocab_size": 64, "max_position_embeddings": 16, "eos_token_id": 2},
        vision_config={**sizes, "image_size": 16, "patch_size": 8},
        projection_dim=8,
    )
    transformers.CLIPModel(config).save_pretrained("clip")
    pictures = pil.CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    transformers.CLIPProcessor(pictures, tokenizer()).save_pretrained("clip")
    found = taken("clip", input="pictures", text=["a cat", "a dog ran"])
    assert found["pixel_values"].shape == (3, 3, 16, 16)
    assert found["input_ids"].shape == (2, 3)
    said(
        "capture",
        "clip",
        "--at",
        "visual_projection",
        "--input",
        "pictures",
        "--text",
        "a cat",
        "--to",
        "x.safetensors",
    )
    assert hl.Cache.load("x.safetensors")["visual_projection"].shape == (3, 8)
    assert "CLIPModel" in said("scan", "clip")


def test_numbers_of_a_shape(folder):
    one = taken("mine:net", shape=["1,3,8,8"])["images"]
    assert one.equal(taken("mine:net", shape=["images=1,3,8,8"])["images"])
    assert one.std() > 0.5
    ids = taken("gpt2", shape=["input_ids=2,6:int64"])["input_ids"]
    assert ids.dtype is torch.int64
    assert ids.shape == (2, 6)
    asked = ("scan", "mine:net", "--shape")
    assert refused(*asked, "1,3,x") == "--shape 1,3,x: write 1,3,224,224 or ids=2,6:int64"
    assert refused(*asked, "1,3", "--shape", "a=2") == "--shape: name all of the shapes, or none"
    assert refused(*asked, "1,3", "--text", "a") == "--shape can't be combined with --input or --text; give one of them"
    assert refused(*asked, "1,3:int46").startswith("--shape int46 is not a dtype; did you mean")


@pytest.mark.parametrize(
    ("model", "arguments", "message"),
    [
        ("gpt2", ("--input", "none.txt"), "'none.txt' is not a file or folder; give a .safetensors, .npy"),
        ("gpt2", ("--input", "mine.py"), "'mine.py' is not an input that hookline reads; give a .safetensors, .npy"),
        ("gpt2", ("--input", "acts.safetensors"), "'acts.safetensors' is a hookline cache, not an input"),
        ("gpt2", ("--input", "texts.txt", "--text", "a"), "--text goes with images, and 'texts.txt' is not one"),
        ("mine:net", ("--input", "texts.txt"), "'texts.txt' needs a processor, and 'mine:net' has none; name one with"),
        ("mine:net", ("--text", "a cat"), "'--text a cat' needs a processor, and 'mine:net' has none; name one with"),
        ("gpt2", ("--input", "pairs.jsonl", "--column", "answer"), "not JSON with a field 'answer'"),
    ],
)
def test_what_can_not_go_in_is_refused_in_one_line(model, arguments, message, folder):
    assert message in refused("scan", model, *arguments)


def test_damaged_files_and_empty_ones_are_refused(folder):
    (folder / "bad.safetensors").write_bytes(b"not tensors at all")
    (folder / "bad.npy").write_bytes(b"no array")
    (folder / "none.txt").write_text("\n\n")
    numpy.save("words.npy", numpy.array(["a", "b"]))
    assert "'bad.safetensors' can't be read" in refused("scan", "mine:net", "--input", "bad.safetensors")
    assert "'bad.npy' holds no array that torch can read" in refused("scan", "mine:net", "--input", "bad.npy")
    assert "'words.npy' holds no array that torch can read" in refused("scan", "mine:net", "--input", "words.npy")
    assert refused("scan", "gpt2", "--input", "none.txt") == "'none.txt' is empty"


def test_more_samples_than_a_batch_should_have_are_asked_for(folder):
    (folder / "long.txt").write_text("a cat\n" * 65)
    line = refused("scan", "gpt2", "--input", "long.txt")
    assert line.startswith("'long.txt' has 65 samples, and all would be one batch; --samples 8 takes the first")
    assert taken("gpt2", input="long.txt", samples=65)["input_ids"].shape == (65, 2)


def test_an_error_names_the_option_as_it_is_written_here(folder):
    assert refused("scan", "gpt2", "--input", "pairs.jsonl").endswith("; --column names the field")


@pytest.mark.parametrize(
    "option", [("--samples", "1"), ("--max-length", "3"), ("--column", "x"), ("--processor", "gpt2")]
)
@pytest.mark.parametrize("given", [("--input", "batch.npy"), ("--input", "batch.safetensors"), ("--shape", "1,3,8,8")])
def test_options_for_texts_and_images_are_refused_for_tensors(folder, option, given):
    asked = ("capture", "mine:net", "--at", "stem", "--to", "x.safetensors", *given, *option)
    assert refused(*asked) == f"{option[0]} is for texts and images, and '{given[1]}' goes in as it is; leave it out"


def test_words_on_the_command_line_have_no_columns(folder):
    asked = ("capture", "gpt2", "--at", "lm_head", "--to", "x.safetensors", "--text", "the cat", "--column", "text")
    assert refused(*asked) == "--column is for a file, and --text has no columns; leave it out"
