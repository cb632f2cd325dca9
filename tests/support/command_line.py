"""A user's folder of models, texts, pictures, tensors and captures; and functions that run commands in it."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import numpy
import safetensors.torch
import torch

import hookline as hl
from tests.support.needs import needs
from tests.support.real_models import SENTENCES, gpt2, of, tokenizer, vit

needs("typer")
from typer.testing import CliRunner, Result  # noqa: E402

from hookline._cli import main as cli  # noqa: E402

MINE = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
        self.head = nn.Linear(width, 10)

    def forward(self, images):
        value = self.stem(images)
        for block in self.blocks:
            value = value + block(value).relu()
        return self.head(value.mean(dim=(2, 3)))


class Wide(Net):
    def __init__(self, width):
        super().__init__(width)


def net():
    print("making a net")
    return Net()


def images():
    return torch.rand(6, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def both():
    return {"images": images()[:2]}


def loss(logits):
    return logits.logsumexp(1).sum()


model = Net()
"""


def made(path: Path) -> Path:
    """Fill a folder with models, texts and tensors, and return it."""
    of(gpt2).save_pretrained(path / "gpt2")
    tokenizer().save_pretrained(path / "gpt2")
    tokenizer().save_pretrained(path / "plain")
    shutil.copy(path / "gpt2" / "config.json", path / "plain")
    (path / "mine.py").write_text(MINE)
    (path / "texts.txt").write_text("\n".join(SENTENCES))
    (path / "pairs.jsonl").write_text("\n".join(json.dumps({"question": text}) for text in SENTENCES))
    images = torch.rand(2, 3, 32, 32)
    numpy.save(path / "batch.npy", images.double().numpy())
    safetensors.torch.save_file({"images": images}, path / "batch.safetensors")
    model = of(gpt2)
    for name, word in (("acts", 3), ("other", 9)):
        _, acts = hl.run(model, torch.tensor([[2, word, 4]]), capture="transformer.h.*")
        acts.save(path / f"{name}.safetensors")
    return path


def with_pictures(path: Path) -> Path:
    """Add a model of images, its processor, and pictures."""
    image = needs("PIL.Image")
    from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

    of(vit).save_pretrained(path / "vit")
    ViTImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(path / "vit")
    (path / "pictures").mkdir()
    for number in range(3):
        image.new("RGB", (8 + number, 8), (number, 9, 9)).save(path / "pictures" / f"{number}.png")
    return path


def run(*arguments: str | Path, input: str | None = None) -> Result:
    """Run a command in this process, with `input` on stdin."""
    words = [str(argument) for argument in arguments]
    return CliRunner().invoke(cli.application(), words, prog_name="hookline", catch_exceptions=False, input=input)


def said(*arguments: str | Path) -> str:
    """Run a command that must succeed, and return what it writes to stdout."""
    result = run(*arguments)
    assert result.exit_code == 0, result.stderr
    return result.stdout


def told(*arguments: str | Path) -> Any:
    """Run a command with --json, and return the parsed output."""
    return json.loads(said(*arguments, "--json"), parse_constant=_refuse)


def refused(*arguments: str | Path, status: int = 1) -> str:
    """Run a command that must be refused, and return its error line."""
    result = run(*arguments)
    assert result.exit_code == status, result.output
    assert result.stdout == ""
    lines = [line for line in result.stderr.splitlines() if line.startswith("hookline: ")]
    assert "Traceback" not in result.stderr
    return lines[-1].removeprefix("hookline: ")


def lines_of(text: str) -> list[list[str]]:
    """Return the commands in a block of shell code, each as a list of words; continued lines are joined."""
    whole = [line.strip() for line in text.replace("\\\n", " ").splitlines()]
    return [shlex.split(line, comments=True) for line in whole if line and not line.startswith("#")]


def _refuse(word: str) -> Any:
    raise AssertionError(f"{word} is no JSON")
