"""`hookline harvest`, as a real command on models in a folder."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import hookline as hl
from hookline._cli import harvest_command
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


def task(folder: Path, to: Path, at: str = "transformer.h.1", **options: object) -> harvest_command.Task:
    values = {"model": str(folder / "gpt2"), "data": str(folder / "corpus.txt"), "at": [at], "to": str(to), **options}
    return harvest_command.Task(**values)  # type: ignore[arg-type]


def said_by(asked: harvest_command.Task) -> Iterator[str]:
    """Run a harvest, and return its output: the estimate, then the store."""
    return map(str, harvest_command.harvest_results(asked))


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    source = str(Path(hl.__file__).parent.parent)
    environment = {**os.environ, "PYTHONPATH": source, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    line = [*quick_python(), "-m", "hookline", "harvest", *arguments]
    return subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False)


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
    harvest_command.plan_of(task(folder, to, unit=2)).run_unit(1)
    with pytest.raises(hl.StoreError, match="has a store already; --resume continues it"):
        list(said_by(task(folder, to, unit=2)))
    list(said_by(task(folder, to, resume=True)))
    near(hl.Store(to).rows("transformer.h.1", sample=4), alone(of(gpt2), "transformer.h.1", SENTENCES[4]))
    with pytest.raises(hl.StoreError, match="holds another harvest"):
        list(said_by(task(folder, to, resume=True, dtype="float16")))
    (tmp_path / "more.txt").write_text("a cat ran")
    list(said_by(task(folder, to, append=True, data=str(tmp_path / "more.txt"))))
    assert hl.Store(to).samples == 6


def test_of_several_ranks_one_speaks_and_none_is_refused(folder, tmp_path, monkeypatch):
    harvest_command.plan_of(task(folder, tmp_path / "acts", unit=2)).run_unit(1)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert list(said_by(task(folder, tmp_path / "acts"))) == []
    assert len(hl.Store(tmp_path / "acts")["transformer.h.1"]) == sum(len(text.split()) for text in SENTENCES)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "."}, "AutoTokenizer can't load '.': "),
        ({"data": "corpus.text"}, "'corpus.text' is not a file or folder, nor 'module:function'"),
        ({"dtype": "bfloat61"}, "'bfloat61' is not a dtype; did you mean .*'bfloat16'"),
        ({"at": "transformer.h.1.mpl"}, "'transformer.h.1.mpl' matches nothing.*did you mean .*'transformer.h.1.mlp'"),
        ({"rows": "words"}, "rows= is"),
        ({"at": "transformer.h.1:grad_output"}, "gradients need a loss, .*--data module:function.*, with hl.harvest"),
        ({"model": "nomodule:make"}, "'nomodule:make': No module named 'nomodule'"),
        ({"model": "math:floo"}, r"'math:floo': 'math' \(.*\) has no 'floo'; did you mean 'floor'"),
        ({"model": "math:pi"}, "'math:pi' is float, not a function to call"),
        ({"model": "time:time"}, "'time:time' gives float, not a model"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_what_can_not_be_done_is_refused_in_words(folder, tmp_path, change, message, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if ":" in change.get("model", ""):
        change["processor"] = str(folder / "gpt2")
    with pytest.raises(hl.HooklineError, match=message) as raised:
        list(said_by(task(folder, tmp_path / "acts", **change)))
    assert "\n" not in str(raised.value)
    assert not list(tmp_path.iterdir())


def test_a_factory_without_a_processor_is_asked_for_one(folder, tmp_path):
    with pytest.raises(hl.HooklineError, match="'math:floor' has none; name one with --processor"):
        list(said_by(task(folder, tmp_path / "acts", model="math:floor")))


def test_a_folder_that_is_no_store_is_left_alone(folder, tmp_path):
    (tmp_path / "letters.txt").write_text("dear reader")
    with pytest.raises(hl.StoreError, match="is neither empty nor a store; give another --to"):
        list(said_by(task(folder, tmp_path)))
    assert [path.name for path in tmp_path.iterdir()] == ["letters.txt"]


def test_a_dry_run_stores_nothing(folder, tmp_path):
    (said,) = said_by(task(folder, tmp_path / "acts", dry_run=True))
    assert said.startswith("5 samples, about ")
    assert not (tmp_path / "acts").exists()


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
    plan = harvest_command.plan_of(task(folder, tmp_path / "acts", at="transformer.h.1[:, -1]"))
    assert plan._job.options.rows == {"transformer.h.1[:, -1]": "batch"}
    assert plan.data.tokenizer.padding_side == "left"
    list(said_by(task(folder, tmp_path / "acts", at="transformer.h.1[:, -1]")))
    expected = torch.stack([alone(of(gpt2), "transformer.h.1", text)[-1] for text in SENTENCES])
    near(hl.Store(tmp_path / "acts")["transformer.h.1[:, -1]"][:], expected)
    tokens = harvest_command.plan_of(task(folder, tmp_path / "acts", at="transformer.h.1", also=["input_ids"]))
    assert tokens._job.options.rows == {"transformer.h.1": "tokens", "input_ids": "tokens"}
    assert tokens.data.tokenizer.padding_side == "right"


def test_a_plan_travels_without_weights(folder, tmp_path):
    plan = harvest_command.plan_of(task(folder, tmp_path / "acts"))
    plan.estimate()
    assert len(pickle.dumps(plan)) < 20_000
    assert pickle.loads(pickle.dumps(plan)).run_unit(0)


def test_generation_from_the_command_line(folder, tmp_path):
    *_, shown = said_by(task(folder, tmp_path / "acts", generate=4, also=["input_ids"]))
    assert "transformer.h.1" in shown
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
    asked = harvest_command.Task(
        str(tmp_path / "t5"), str(tmp_path / "pairs.jsonl"), ["decoder.block.1"], str(tmp_path / "acts"),
        column="de", targets="en",
    )  # fmt: skip
    with pytest.raises(hl.HooklineError, match="name the part"):  # A block of T5 returns a tuple.
        list(said_by(asked))
    list(said_by(task(tmp_path, tmp_path / "acts", "decoder.block.1[0]", model=asked.model, data=asked.data,
                          column="de", targets="en")))  # fmt: skip
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
        list(said_by(task(tmp_path, to, "layers.1", model=str(tmp_path / "vit"), data=str(tmp_path / data))))
        found.append(hl.Store(to)["layers.1"][:])
    assert found[0].shape == (3, 17, 16)
    assert found[0].equal(found[1])


def test_parquet_files_are_read_with_datasets(folder, tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": SENTENCES}).to_parquet(str(tmp_path / "corpus.parquet"))
    list(said_by(task(folder, tmp_path / "acts", data=str(tmp_path / "corpus.parquet"))))
    assert len(hl.Store(tmp_path / "acts")["transformer.h.1"]) == sum(len(text.split()) for text in SENTENCES)


def test_arrays_are_no_texts_and_go_in_through_a_function(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("batch.npy").write_bytes(b"")
    with pytest.raises(hl.HooklineError, match=r"'batch.npy' holds no texts or images; .* --data module:function"):
        list(said_by(task(folder, tmp_path / "acts", data="batch.npy")))
