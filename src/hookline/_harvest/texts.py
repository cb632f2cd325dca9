"""`Texts`: a text file, a list or a `datasets` object, through the model's own tokenizer, as a dataset to harvest.

A sample is what the tokenizer gives for one text, unpadded; `collate` fills a batch up on the tokenizer's own side and
says so in the mask. Nothing is cut unless `max_length` asks for it.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hookline._harvest.datafiles import DataColumn, column_of
from hookline._harvest.padding import NO_LABEL
from hookline._kernel import unwrap
from hookline.errors import HooklineError

Sample = dict[str, list[int]]
_ENDLESS = 1 << 40  # transformers' word for "no longest text" is larger than any.


class Texts:
    """Texts as a model takes them, for `hl.harvest`: numbered samples, padded batch by batch.

    Args:
        source: a text file with a text on each line, a .jsonl file, a list of strings, or a `datasets.Dataset`;
            token numbers will do as well as text.
        tokenizer: the model's own, or a processor that has one. It is copied, and stays as it is.
        column: the column or JSON field with the texts; "text" unless it is named.
        targets: for an encoder-decoder model, what the decoder is given: another column, or a source of its own.
        max_length: how many tokens of a text are kept. Without it, a text that is too long for the model is an error.
    """

    def __init__(
        self,
        source: Any,
        tokenizer: Any,
        *,
        column: str | None = None,
        targets: Any = None,
        max_length: int | None = None,
        add_special_tokens: bool = True,
    ) -> None:
        tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
        if not callable(tokenizer) or not hasattr(tokenizer, "padding_side"):
            raise HooklineError(f"a tokenizer of transformers is needed, not {type(tokenizer).__name__}")
        self.tokenizer = copy.deepcopy(tokenizer)  # A call of it changes how it cuts the next text.
        self.max_length = max_length
        self.add_special_tokens = add_special_tokens
        self._texts = column_of(source, column, "text")
        self._targets = None if targets is None else _targets(source, targets)
        if self._targets is not None and len(self._targets) != len(self._texts):
            raise HooklineError(f"there are {len(self._texts)} texts and {len(self._targets)} targets")

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, index: int) -> Sample:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Sample]:
        samples = self._encode(self._texts, indices)
        if self._targets is not None:
            for sample, target in zip(samples, self._encode(self._targets, indices, target=True), strict=True):
                sample["labels"] = target["input_ids"]
        return samples

    def collate(self, samples: Sequence[Sample]) -> dict[str, Tensor]:
        """Return samples as one batch of keywords, filled up on the tokenizer's side."""
        left = self.tokenizer.padding_side == "left"
        batch = {name: _padded([sample[name] for sample in samples], self._filler(name), left) for name in samples[0]}
        if "labels" in samples[0]:  # A decoder begins with its first token, wherever the encoder's padding is.
            batch["labels"] = _padded([sample["labels"] for sample in samples], NO_LABEL, left=False)
        return batch

    def give(self, model: nn.Module, batch: Mapping[str, Any]) -> Any:
        """Run the model on a batch."""
        return model(**self.keywords(model, batch))

    def keywords(self, model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return a batch as the model takes it. Where padding is on the left, positions are counted without it."""
        if self.tokenizer.padding_side == "left" and takes_positions(model):
            return {**batch, "position_ids": (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)}
        return dict(batch)

    def length(self, sample: Sample) -> int:
        """Return how many tokens a sample has."""
        return len(sample["input_ids"])

    def fingerprint(self) -> str:
        """Return a text that other data, or the same through another tokenizer, would not have."""
        known = [self._texts, self._targets]
        parts = [None if one is None else one.fingerprint() for one in known]
        settings = [self.max_length, self.add_special_tokens, self.tokenizer.padding_side]
        text = json.dumps([*parts, *settings, _vocabulary(self.tokenizer)])
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def __repr__(self) -> str:
        return f"{len(self)} texts for {type(self.tokenizer).__name__}"

    def _encode(self, source: DataColumn, indices: Sequence[int], target: bool = False) -> list[Sample]:
        """Return what the tokenizer makes of some texts. Token numbers stay what they are."""
        given = [source[index] for index in indices]
        if any(not isinstance(one, str) for one in given):
            return [
                self._checked({"input_ids": _numbers(one, index)}, index)
                for one, index in zip(given, indices, strict=True)
            ]
        options: dict[str, Any] = {"add_special_tokens": self.add_special_tokens, "verbose": False}
        if self.max_length is not None:
            options |= {"truncation": True, "max_length": self.max_length}
        found = self.tokenizer(text_target=given, **options) if target else self.tokenizer(given, **options)
        samples = [{name: list(column[at]) for name, column in found.items()} for at in range(len(given))]
        return [self._checked(sample, index) for sample, index in zip(samples, indices, strict=True)]

    def _checked(self, sample: Sample, index: int) -> Sample:
        """Return a sample with a mask, or refuse one that the model can't take."""
        if self.max_length is not None and len(sample["input_ids"]) > self.max_length:
            sample = {name: numbers[: self.max_length] for name, numbers in sample.items()}
        length, longest = len(sample["input_ids"]), self.tokenizer.model_max_length
        if longest < min(length, _ENDLESS):
            raise HooklineError(
                f"text {index} has {length} tokens, and the model takes {longest}; max_length={longest} keeps the first"
            )
        sample.setdefault("attention_mask", [1] * length)
        return sample

    def _filler(self, name: str) -> int:
        """Return what stands where there is no token. A mask covers it, so any number that is one will do."""
        if name == "input_ids":
            return int(self.tokenizer.pad_token_id or 0)
        return int(getattr(self.tokenizer, "pad_token_type_id", 0)) if name == "token_type_ids" else 0


def takes_positions(model: nn.Module) -> bool:
    """Whether a model is to be told the positions of its tokens: it takes them, and does not count by itself."""
    model = unwrap(model)
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return False
    # RoBERTa and its kin pass over padding, and count from another number: their table of positions has a row for it.
    tables = [one for name, one in model.named_modules() if "position" in name and isinstance(one, nn.Embedding)]
    return all(table.padding_idx is None for table in tables)


def _targets(source: Any, targets: Any) -> DataColumn:
    """Return the texts for a decoder: of another column, or of another source."""
    if isinstance(targets, str) and not os.path.exists(targets):
        return column_of(source, targets, targets)
    return column_of(targets, None, "text")


def _numbers(value: Any, index: int) -> list[int]:
    """Return token numbers as a list."""
    numbers = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(numbers, Iterable) or isinstance(numbers, str) or not all(type(one) is int for one in numbers):
        raise HooklineError(f"sample {index} is {value!r:.60}, neither text nor a list of token numbers")
    return list(numbers)


def _padded(rows: list[list[int]], filler: int, left: bool) -> Tensor:
    """Return rows of several lengths as one tensor; of nothing but empty ones, with a column of padding."""
    longest = max(1, *map(len, rows))
    fills = [[filler] * (longest - len(row)) for row in rows]
    return torch.tensor([fill + row if left else row + fill for row, fill in zip(rows, fills, strict=True)])


def _vocabulary(tokenizer: Any) -> str:
    """Return a text of what a tokenizer does with text, whatever it was last asked to cut or fill up."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        known: Any = [type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())]
    else:
        known = {
            name: part for name, part in json.loads(backend.to_str()).items() if name not in ("truncation", "padding")
        }
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()
