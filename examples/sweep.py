"""Train a small transformer to repeat what it has read, and find the two attention heads that do it with a sweep.

    python examples/sweep.py               # less than a minute on two CPU cores, offline
    python examples/sweep.py heads.html    # writes the page with the result there

The model reads random letters that begin again after a while, as in "c a t s c a t s". From the second time on, the
next letter is known: look for the last time that this letter came, and take the one that followed. Models do this with
two heads. In the first layer, one notes at each letter which letter came before it (a previous-token head). In the
second, one looks for the letter whose note is the current letter, and passes it on (an induction head).
"""

from __future__ import annotations

import string
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hookline as hl

LETTERS = string.ascii_lowercase
LENGTH, WIDTH, HEADS, LAYERS = 24, 64, 4, 2
PERIOD = 14  # After so many letters, those that the heads are examined on begin again.
FIRST = LENGTH - 1 - PERIOD  # Where the last letter came before. The letter after it is the right answer.

PATTERNS = "h.*.attn/softmax"
OUTPUTS = "h.*.attn/matmul#1"  # What each head passes on: (sample, head, position, neuron).


class Attention(nn.Module):
    """Attention to earlier positions. What is passed on does not say where it was: only queries and keys do."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return what the heads read, added up."""
        query, key, value = (
            one.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for one in (self.query(x + positions), self.key(x + positions), self.value(x))
        )
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        scores = (query @ key.mT / query.shape[-1] ** 0.5).masked_fill(later, float("-inf"))
        return self.out((F.softmax(scores, dim=-1) @ value).transpose(1, 2).flatten(2))

    def sizes(self) -> Tensor:
        """Return how large the weights are that each head writes with."""
        value, out = self.value.weight.unflatten(0, (HEADS, -1)), self.out.weight.unflatten(1, (HEADS, -1))
        return (value.square().sum((1, 2)) + out.square().sum((0, 2))).sqrt()


class Block(nn.Module):
    """A layer: attention, added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attn = Attention()

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return the input with what the heads add."""
        return x + self.attn(self.norm(x), positions)


class Transformer(nn.Module):
    """A language model of letters, without MLPs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(len(LETTERS), WIDTH)
        self.positions = nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.h = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(LETTERS)))

    def forward(self, ids: Tensor) -> Tensor:
        """Return the scores of the next letter at each position."""
        x = self.embed(ids)
        for block in self.h:
            x = block(x, self.positions[: ids.shape[1]])
        return self.head(x)


def repeated(samples: int, periods: Tensor | int) -> Tensor:
    """Return random letters that begin again after a number of letters."""
    letters = torch.rand(samples, len(LETTERS)).argsort(1)[:, :LENGTH]  # No letter comes twice within a period.
    places = torch.arange(LENGTH).expand(samples, -1) % torch.as_tensor(periods).reshape(-1, 1)
    return letters.gather(1, places)


def train(model: Transformer, steps: int = 600) -> float:
    """Train on letters with repeats after any number of letters; return the share of known letters that is right."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    right = 0.0
    for _ in range(steps):
        periods = torch.randint(5, LENGTH - 4, (64, 1))
        ids = repeated(64, periods)
        is_known = torch.arange(LENGTH - 1) >= periods
        scores, wanted = model(ids)[:, :-1][is_known], ids[:, 1:][is_known]
        price = sum(block.attn.sizes().sum() for block in model.h)  # So that no more heads than needed do the work.
        loss = F.cross_entropy(scores, wanted) + 0.02 * price
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        right = 0.95 * right + 0.05 * (scores.argmax(-1) == wanted).float().mean().item()
    return right


def main(page: str | Path) -> None:
    """Train the model, find the two heads, see where they look, and write the page."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # The matrices are too small to share the work.
    model = Transformer()
    print(f"{train(model):.0%} of the letters that can be known are right")
    model.eval()
    ids = repeated(32, PERIOD)
    answer = ids[:, FIRST + 1]

    def metric(scores: Tensor) -> Tensor:
        """Return the log-probability of the right answer after the last letter, for each sample."""
        return scores[:, -1].log_softmax(-1).gather(1, answer[:, None])[:, 0]

    print("\nZero each head at each position")
    zeroed = hl.sweep(model, f"{OUTPUTS}[:, *, *]", metric, run=(ids,))
    print(zeroed)

    print("\nPut each head back as it was before the letter to look for was replaced")
    corrupted = ids.clone()
    corrupted[:, FIRST] = (ids[:, FIRST] + 1) % len(LETTERS)
    patched = hl.sweep(model, f"{OUTPUTS}[:, *]", metric, run=(corrupted,), against=(ids,))
    restored = patched.normalised(clean=zeroed.base, corrupted=patched.base)
    print(restored)

    first, second = restored.grid().values.argmax(1).tolist()
    acts = hl.run(model, ids, capture=PATTERNS)[1]
    previous = acts["h.0.attn/softmax"][:, first, FIRST + 1, FIRST].mean().item()
    induction = acts["h.1.attn/softmax"][:, second, -1, FIRST + 1].mean().item()
    print(f"\nHead {first} of layer 0 gives {previous:.2f} of its attention to the letter before")
    print(f"Head {second} of layer 1 gives {induction:.2f} of its attention to the letter after the same letter")

    words = [[LETTERS[letter] for letter in sample] for sample in ids[:4]]
    measured = {"zeroed": zeroed, "put back": restored}
    hl.explore(model, run=(ids[:4],), at=PATTERNS, to=page, tokens=words, measured=measured, title="Two heads")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(Path(temporary, "heads.html"))
