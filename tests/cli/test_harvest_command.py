"""`hookline harvest`, as a real command on models in a folder."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch

import hookline as hl
from tests.errors.wording import says
from tests.support import command_line
from tests.support.needs import needs
from tests.support.quick_python import quick_python
from tests.support.real_models import SENTENCES, alone, gpt2, near, numbers, of, t5, tokenizer, vit

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a model, its tokenizer and some texts."""
    path = tmp_path_factory.mktemp("work")
    of(gpt2).save_pretrained(path / "gpt2")
    tokenizer().save_pretrained(path / "gpt2")
    (path / "corpus.txt").write_text("\n".join(SENTENCES))
    return path


def words(folder: Path, to: Path, at: str = "transformer.h.1", **options: object) -> list[str]:
    """Return the words of a command that harvests the texts of a folder."""
    given = {"data": str(folder / "corpus.txt"), "at": at, "to": str(to), **options}
    line = ["harvest", str(given.pop("model", folder / "gpt2"))]
    for name, value in given.items():
        for one in value if isinstance(value, list) else [value]:
            line += [f"--{name.replace('_', '-')}", *([] if one is True else [str(one)])]
    return line


def said_by(folder: Path, to: Path, at: str = "transformer.h.1", **options: object) -> str:
    """Run a harvest, and return its output: the estimate, then the store."""
    return command_line.said(*words(folder, to, at, **options))


def refused_by(folder: Path, to: Path, at: str = "transformer.h.1", **options: object) -> str:
    """Run a harvest that must be refused, and return its error line."""
    return command_line.refused(*words(folder, to, at, **options))


def harvested_in_part(folder: Path, to: Path) -> None:
    """Leave a store of which only the second of three units is done."""
    said_by(folder, to, unit=2)
    for unit in (0, 2):
        (to / f"units/{unit:08d}.json").unlink()


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    source = str(Path(hl.__file__).parent.parent)
    environment = {**os.environ, "PYTHONPATH": source, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    line = [*quick_python(), "-m", "hookline", "harvest", *arguments]
    return subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.process
def test_the_command_says_how_much_it_will_be_and_shows_the_store(folder, tmp_path, monkeypatch):
    acts = str(tmp_path / "acts")
    line = ["gpt2", "--data", "corpus.txt", "--at", "transformer.h.*", "--at", "lm_head", "--to", acts]
    line += ["--rows", "tokens", "--dtype", "bfloat16", "--also", "input_ids", "--batch-size", "3"]
    done = run(folder, *line)
    assert done.returncode == 0, done.stderr
    first, *table = done.stdout.splitlines()
    assert first.startswith("5 samples, about ")
    assert [row.split()[0] for row in table[-4:]] == ["transformer.h.0", "transformer.h.1", "lm_head", "input_ids"]
    assert "5 of 5 samples" in done.stderr
    store = hl.Store(acts)
    near(store.rows("transformer.h.1", sample=3), alone(of(gpt2), "transformer.h.1", SENTENCES[3]).bfloat16())

    monkeypatch.chdir(folder)
    again = command_line.run("harvest", *line)
    assert (again.exit_code, again.stdout) == (1, "")
    assert again.stderr == f"hookline: {acts!r} has a store already; --resume continues it, --append adds to it\n"


def test_a_store_is_gone_on_with_only_when_asked(folder, tmp_path):
    to = tmp_path / "acts"
    harvested_in_part(folder, to)
    assert "has a store already; --resume continues it" in refused_by(folder, to, unit=2)
    said_by(folder, to, resume=True)
    near(hl.Store(to).rows("transformer.h.1", sample=4), alone(of(gpt2), "transformer.h.1", SENTENCES[4]))
    other = command_line.run(*words(folder, to, resume=True, dtype="float16"))
    assert (other.exit_code, "holds another harvest" in other.stderr) == (1, True)
    (tmp_path / "more.txt").write_text("a cat ran")
    said_by(folder, to, append=True, data=tmp_path / "more.txt")
    assert hl.Store(to).samples == 6


def test_of_several_ranks_one_speaks_and_none_is_refused(folder, tmp_path, monkeypatch):
    harvested_in_part(folder, tmp_path / "acts")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert said_by(folder, tmp_path / "acts", resume=True) == ""
    assert len(hl.Store(tmp_path / "acts")["transformer.h.1"]) == sum(len(text.split()) for text in SENTENCES)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "."}, says("AutoTokenizer can't load", ".")),
        ({"data": "corpus.text"}, says("is not a file or", "corpus.text", "module:function")),
        ({"dtype": "bfloat61"}, "--dtype bfloat61 is not a dtype; did you mean .*'bfloat16'"),
        (
            {"at": "transformer.h.1.mpl"},
            says("matches nothing did you mean", "transformer.h.1.mpl", "transformer.h.1.mlp"),
        ),
        ({"rows": "words"}, "--rows is"),
        ({"at": "transformer.h.1:grad_output"}, says("gradients need a loss data")),
        ({"model": "nomodule:make"}, says("No module named", "nomodule:make", "nomodule")),
        ({"model": "math:floo"}, says("has no did you mean", "math:floo", "math", "floo", "floor")),
        ({"model": "math:pi"}, says("not a function to call", "math:pi")),
        ({"model": "time:time"}, says("not a model", "time:time")),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_what_can_not_be_done_is_refused_in_words(folder, tmp_path, change, message, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if ":" in change.get("model", ""):
        change["processor"] = str(folder / "gpt2")
    assert re.search(message, refused_by(folder, tmp_path / "acts", **change))
    assert not list(tmp_path.iterdir())


def test_a_factory_without_a_processor_is_asked_for_one(folder, tmp_path):
    line = refused_by(folder, tmp_path / "acts", model="math:floor")
    assert "'math:floor' has none; name one with --processor" in line


def test_a_folder_that_is_no_store_is_left_alone(folder, tmp_path):
    (tmp_path / "letters.txt").write_text("dear reader")
    assert "is neither empty nor a store; give another --to" in refused_by(folder, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["letters.txt"]


def test_a_dry_run_stores_nothing(folder, tmp_path):
    (line,) = said_by(folder, tmp_path / "acts", dry_run=True).splitlines()
    assert line.startswith("5 samples, about ")
    assert not (tmp_path / "acts").exists()


@pytest.mark.process
def test_a_model_and_data_may_be_made_by_functions_of_a_file(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import torch\nfrom torch import nn\n\n"
        "def model():\n    return nn.Sequential(nn.Linear(4, 8), nn.ReLU())\n\n"
        "def data():\n    return torch.arange(40.0).reshape(10, 4)\n"
    )
    done = run(tmp_path, "mine:model", "--data", "mine:data", "--at", "0", "--to", "acts")
    assert done.returncode == 0, done.stderr
    assert hl.Store(tmp_path / "acts")["0"].shape == (10, 8)


def test_of_texts_a_row_is_a_token_unless_a_place_names_a_position(folder, tmp_path):
    said_by(folder, tmp_path / "acts", "transformer.h.1[:, -1]")
    expected = torch.stack([alone(of(gpt2), "transformer.h.1", text)[-1] for text in SENTENCES])
    near(hl.Store(tmp_path / "acts")["transformer.h.1[:, -1]"][:], expected)
    said_by(folder, tmp_path / "tokens", also="input_ids")
    store = hl.Store(tmp_path / "tokens")
    for sample, text in enumerate(SENTENCES):
        near(store.rows("transformer.h.1", sample=sample), alone(of(gpt2), "transformer.h.1", text))
        assert store.rows("input_ids", sample=sample).tolist() == numbers(text)


def test_generation_from_the_command_line(folder, tmp_path):
    assert "transformer.h.1" in said_by(folder, tmp_path / "acts", generate=4, also="input_ids")
    store = hl.Store(tmp_path / "acts")
    assert store.rows("input_ids", sample=1).tolist()[:3] == numbers(SENTENCES[1])
    assert len(store["input_ids"]) == len(store["transformer.h.1"])
    lengths = [len(text.split()) + 3 for text in SENTENCES]
    assert [len(store.rows("transformer.h.1", sample=sample)) for sample in range(5)] == lengths


def test_json_with_targets_for_an_encoder_decoder(tmp_path):
    of(t5).save_pretrained(tmp_path / "t5")
    tokenizer().save_pretrained(tmp_path / "t5")
    lines = [json.dumps({"de": text, "en": "the cat"}) for text in SENTENCES]
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines))
    asked = {"model": tmp_path / "t5", "data": tmp_path / "pairs.jsonl", "column": "de", "targets": "en"}
    assert "name the part" in refused_by(tmp_path, tmp_path / "acts", "decoder.block.1", **asked)  # It is a tuple.
    said_by(tmp_path, tmp_path / "acts", "decoder.block.1[0]", **asked)
    assert hl.Store(tmp_path / "acts")["decoder.block.1[0]"].shape == (10, 16)


def test_a_folder_of_images_and_a_saved_dataset(tmp_path):
    image = needs("PIL.Image")
    datasets = pytest.importorskip("datasets")
    module = pytest.importorskip("transformers.models.vit.image_processing_pil_vit")
    of(vit).save_pretrained(tmp_path / "vit")
    module.ViTImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(tmp_path / "vit")
    (tmp_path / "pictures").mkdir()
    for at in range(3):
        image.new("RGB", (8 + at, 8), (at, 9, 9)).save(tmp_path / "pictures" / f"{at}.png")
    paths = sorted(map(str, (tmp_path / "pictures").iterdir()))
    table = datasets.Dataset.from_dict({"image": paths}).cast_column("image", datasets.Image())
    table.save_to_disk(str(tmp_path / "table"))
    found = []
    for data in ("pictures", "table"):
        to = tmp_path / f"acts-{data}"
        said_by(tmp_path, to, "layers.1", model=tmp_path / "vit", data=tmp_path / data)
        found.append(hl.Store(to)["layers.1"][:])
    assert found[0].shape == (3, 17, 16)
    assert found[0].equal(found[1])


def test_parquet_files_are_read_with_datasets(folder, tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": SENTENCES}).to_parquet(str(tmp_path / "corpus.parquet"))
    said_by(folder, tmp_path / "acts", data=tmp_path / "corpus.parquet")
    assert len(hl.Store(tmp_path / "acts")["transformer.h.1"]) == sum(len(text.split()) for text in SENTENCES)


def test_arrays_are_no_texts_and_go_in_through_a_function(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("batch.npy").write_bytes(b"")
    line = refused_by(folder, tmp_path / "acts", data="batch.npy")
    assert re.search(r"'batch.npy' holds no texts or images; .* --data module:function", line)
