"""`Texts` and `Images`: datasets for a harvest, from files or lists, through the model's tokenizer or processor."""

from __future__ import annotations

import copy
import hashlib
import inspect
import json
import os
from array import array
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, overload

import torch
from torch import Tensor, nn

from hookline._harvest.rows_and_padding import NO_LABEL
from hookline._jobs.fingerprints import digest
from hookline._kernel import unwrap
from hookline.errors import HooklineError, did_you_mean

_CHUNK = 1 << 24
_PACKED = (".gz", ".bz2", ".xz", ".zst", ".zip")
TextSample = dict[str, list[int]]
_ENDLESS = 1 << 40  # transformers says "no limit" with a larger number.
ImageSample = dict[str, Tensor]
SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")


class Texts:
    """Tokenized texts for `hl.harvest`: numbered samples, padded batch by batch.

    Args:
        source: A text file with a text on each line, a .jsonl file, a list of strings, or a `datasets.Dataset`.
            Samples may be lists of token numbers instead of text.
        tokenizer: The model's tokenizer, or a processor that has one. A copy of it is used.
        column: The column or JSON field with the texts; "text" by default.
        targets: For an encoder-decoder model, the texts for the decoder: another column, or a separate source.
        max_length: How many tokens of a text are kept. Without it, a text that is too long for the model is an error.
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
        self.tokenizer = copy.deepcopy(tokenizer)  # Calling a tokenizer changes how it truncates the next text.
        self.max_length = max_length
        self.add_special_tokens = add_special_tokens
        self._texts = column_of(source, column, "text")
        self._targets = None if targets is None else _targets(source, targets)
        if self._targets is not None and len(self._targets) != len(self._texts):
            raise HooklineError(f"there are {len(self._texts)} texts and {len(self._targets)} targets")

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, index: int) -> TextSample:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[TextSample]:
        samples = self._encode(self._texts, indices)
        if self._targets is not None:
            for sample, target in zip(samples, self._encode(self._targets, indices, target=True), strict=True):
                sample["labels"] = target["input_ids"]
        return samples

    def collate(self, samples: Sequence[TextSample]) -> dict[str, Tensor]:
        """Return samples as one batch of keyword arguments, padded on the tokenizer's side."""
        left = self.tokenizer.padding_side == "left"
        batch = {name: _padded([sample[name] for sample in samples], self._filler(name), left) for name in samples[0]}
        if "labels" in samples[0]:  # A decoder's input is padded on the right, wherever the encoder's padding is.
            batch["labels"] = _padded([sample["labels"] for sample in samples], NO_LABEL, left=False)
        return batch

    def give(self, model: nn.Module, batch: Mapping[str, Any]) -> Any:
        """Run the model on a batch."""
        return model(**self.keywords(model, batch))

    def keywords(self, model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return the model's keyword arguments. With padding on the left, positions count from the first real token."""
        if self.tokenizer.padding_side == "left" and takes_positions(model):
            return {**batch, "position_ids": (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)}
        return dict(batch)

    def length(self, sample: TextSample) -> int:
        """Return how many tokens a sample has."""
        return len(sample["input_ids"])

    def fingerprint(self) -> str:
        """Return a text that identifies the data and the tokenizer."""
        known = [self._texts, self._targets]
        parts = [None if one is None else one.fingerprint() for one in known]
        settings = [self.max_length, self.add_special_tokens, self.tokenizer.padding_side]
        text = json.dumps([*parts, *settings, _vocabulary(self.tokenizer)])
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def __repr__(self) -> str:
        return f"{len(self)} texts for {type(self.tokenizer).__name__}"

    def _encode(self, source: DataColumn, indices: Sequence[int], target: bool = False) -> list[TextSample]:
        """Return the tokens of some texts. Samples that are token numbers already are only checked."""
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

    def _checked(self, sample: TextSample, index: int) -> TextSample:
        """Return a sample with an attention mask; refuse one that is too long for the model."""
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
        """Return the padding value of an entry. The mask covers padding, so any valid token will do."""
        if name == "input_ids":
            return int(self.tokenizer.pad_token_id or 0)
        return int(getattr(self.tokenizer, "pad_token_type_id", 0)) if name == "token_type_ids" else 0


def takes_positions(model: nn.Module) -> bool:
    """Return True if a model needs `position_ids`: its forward takes them, and does not skip padding by itself."""
    model = unwrap(model)
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return False
    # RoBERTa and similar models skip padding by themselves: their position embedding has a row for padding.
    tables = [one for name, one in model.named_modules() if "position" in name and isinstance(one, nn.Embedding)]
    return all(table.padding_idx is None for table in tables)


def _targets(source: Any, targets: Any) -> DataColumn:
    """Return the texts for a decoder: another column, or another source."""
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
    """Return rows of several lengths as one padded tensor. If all rows are empty, it has one column of padding."""
    longest = max(1, *map(len, rows))
    fills = [[filler] * (longest - len(row)) for row in rows]
    return torch.tensor([fill + row if left else row + fill for row, fill in zip(rows, fills, strict=True)])


def _vocabulary(tokenizer: Any) -> str:
    """Return a text that identifies a tokenizer. The truncation and padding it was last used with don't count."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        known: Any = [type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())]
    else:
        known = {
            name: part for name, part in json.loads(backend.to_str()).items() if name not in ("truncation", "padding")
        }
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()


class Images:
    """Processed images for `hl.harvest`: numbered samples. All images of a batch have one size.

    Args:
        source: A folder (its images and those in its subfolders, in the order of their names), a list of paths or of
            images, or a `datasets.Dataset`.
        processor: The model's image processor, or a processor that has one.
        column: The column with the images; "image" by default.
    """

    def __init__(self, source: Any, processor: Any, *, column: str | None = None) -> None:
        self.processor = getattr(processor, "image_processor", processor)
        if not callable(self.processor):
            raise HooklineError(f"an image processor of transformers is needed, not {type(processor).__name__}")
        self._images: DataColumn = ImageFolder(source) if _is_path(source) else column_of(source, column, "image")

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> ImageSample:
        found = self.processor(images=[_opened(self._images[index])], return_tensors="pt")
        return {name: value[0] for name, value in found.items()}

    def collate(self, samples: Sequence[ImageSample]) -> dict[str, Tensor]:
        """Return samples as one batch of keyword arguments."""
        try:
            return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
        except RuntimeError:
            shapes = sorted({tuple(value.shape) for sample in samples for value in sample.values()})
            raise HooklineError(
                f"images of the shapes {', '.join(map(str, shapes))} don't go into one batch; let the processor bring "
                "them to one size, or take batch_size=1"
            ) from None

    def opened(self) -> list[Any]:
        """Return the unprocessed images, for a processor that takes texts as well."""
        return [_opened(self._images[index]) for index in range(len(self))]

    def fingerprint(self) -> str:
        """Return a text that identifies the images and the processor."""
        settings = (
            self.processor.to_json_string() if hasattr(self.processor, "to_json_string") else repr(self.processor)
        )
        return hashlib.sha256(json.dumps([self._images.fingerprint(), settings]).encode()).hexdigest()[:32]

    def __repr__(self) -> str:
        return f"{len(self)} images for {type(self.processor).__name__}"


class ImageFolder:
    """The image files of a folder, in the order of their names."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()  # Another process may have another working folder.
        if not self.path.is_dir():
            raise HooklineError(f"{str(path)!r} is not a folder of images; give a single image in a list")
        found = (one.relative_to(self.path) for one in self.path.rglob("*") if one.suffix.lower() in SUFFIXES)
        self.names = sorted(one.as_posix() for one in found)
        if not self.names:
            raise HooklineError(f"{str(path)!r} has no images ({', '.join(SUFFIXES)})")

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> Path:
        return self.path / self.names[index]

    def fingerprint(self) -> str:
        """Return a hash of names and file sizes. Reading all images would take as long as the harvest."""
        known = [(name, (self.path / name).stat().st_size) for name in self.names]
        return hashlib.sha256(json.dumps(known).encode()).hexdigest()


def _is_path(value: Any) -> bool:
    return isinstance(value, (str, os.PathLike))


def _opened(image: Any) -> Any:
    """Return an image in RGB, from a path or an image object."""
    if _is_path(image):
        try:
            from PIL import Image
        except ImportError:
            raise HooklineError("image files are read with pillow: pip install 'hookline[transformers]'") from None
        with Image.open(image) as file:
            return file.convert("RGB")
    return image.convert("RGB") if hasattr(image, "convert") else image


class DataColumn(Protocol):
    """Numbered values with a fingerprint."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...

    def fingerprint(self) -> str:
        """Return a text that identifies the values."""


def column_of(source: Any, name: str | None, usual: str) -> DataColumn:
    """Return a column of a source: `name`, or `usual` if `name` is None."""
    if _is_path(source):
        return Lines(source, name)
    if isinstance(source, Mapping):  # A DatasetDict, or a mapping of columns.
        names = ", ".join(map(repr, source))
        raise HooklineError(f"one list or dataset is needed, and this has {names}; give one of them")
    if not (hasattr(source, "__getitem__") and hasattr(source, "__len__")):
        kind = type(source).__name__
        raise HooklineError(f"{kind} has no numbered samples; give a dataset that is not streamed, a list or a file")
    if hasattr(source, "column_names") and hasattr(source, "select_columns"):
        return DatasetColumn(source, name or usual)
    return ListColumn(source, name or usual)


class Lines(Sequence[str]):
    """The texts of a file: one per line, or a field of each JSON line. Blank lines do not count.

    Each process finds the starts of the lines once. They are not pickled.
    """

    def __init__(self, path: str | os.PathLike[str], field: str | None = None) -> None:
        self.path = Path(path).absolute()  # Another process may have another working folder.
        if not self.path.is_file():
            raise HooklineError(f"{str(path)!r} is not a file with texts")
        if self.path.suffix.lower() in _PACKED:
            raise HooklineError(
                f"the lines of {self.path.name!r} can't be read one by one while it is compressed; decompress it"
            )
        self.is_json = self.path.suffix.lower() in (".jsonl", ".ndjson")
        if field is not None and not self.is_json:
            raise HooklineError(f"{self.path.name!r} has lines, not columns; only .jsonl files have columns")
        self.field = field if field is not None else "text"
        self._starts: array[int] | None = None
        self._size = 0

    def __len__(self) -> int:
        return len(self._begins())

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> list[str]: ...

    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[number] for number in range(len(self))[index]]
        starts = self._begins()
        if not -len(starts) <= index < len(starts):
            raise IndexError(f"{self.path.name!r} has {len(starts)} texts, and no number {index}")
        with open(self.path, "rb") as file:
            if os.fstat(file.fileno()).st_size < self._size:
                raise HooklineError(f"{self.path.name!r} has become shorter since its lines were counted")
            file.seek(starts[index])
            return self._text(file.readline(), index)

    def _text(self, line: bytes, index: int) -> str:
        """Return the text of a line."""
        try:
            text = line.decode("utf-8").rstrip("\r\n")
            found: Any = json.loads(text)[self.field] if self.is_json else text
        except UnicodeDecodeError as error:
            raise HooklineError(f"text {index} of {self.path.name!r} is not UTF-8: {error}") from None
        except (ValueError, TypeError, LookupError) as error:
            problem = f"text {index} of {self.path.name!r}: not JSON with a field {self.field!r}: {line[:60]!r}"
            raise HooklineError(f"{problem}; column= names the field") from error
        if not isinstance(found, str):
            raise HooklineError(f"text {index} of {self.path.name!r}: field {self.field!r} is {found!r:.60}, not text")
        return found

    def _begins(self) -> array[int]:
        """Return the offset of each line that is not blank."""
        if self._starts is None:
            starts, offset = array("Q"), 0
            with open(self.path, "rb") as file:
                for line in file:
                    if not line.isspace():
                        starts.append(offset)
                    offset += len(line)
            self._starts, self._size = starts, offset
        return self._starts

    def fingerprint(self) -> str:
        """Return a text that identifies the contents of the file."""
        found = hashlib.sha256()
        with open(self.path, "rb") as file:
            while chunk := file.read(_CHUNK):
                found.update(chunk)
        return f"{found.hexdigest()} {self.field if self.is_json else ''}".strip()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_starts": None}


class ListColumn:
    """The items of a list; of items that are mappings, one field."""

    def __init__(self, items: Sequence[Any], name: str | None) -> None:
        self._items = items
        self._name = name

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Any:
        item = self._items[index]
        if self._name is None or not isinstance(item, Mapping):
            return item
        if self._name not in item:
            raise HooklineError(
                f"sample {index} has no {self._name!r}, but {', '.join(map(repr, item))}; name the column="
            )
        return item[self._name]

    def fingerprint(self) -> str:
        """Return a digest of all values."""
        return digest([self[index] for index in range(len(self))])


class DatasetColumn:
    """One column of a `datasets.Dataset`."""

    def __init__(self, dataset: Any, name: str) -> None:
        if name not in dataset.column_names:
            has = ", ".join(map(repr, dataset.column_names))
            near = did_you_mean(name, dataset.column_names)
            raise HooklineError(f"the dataset has no column {name!r}, but {has}{near or '; name the column='}")
        self._dataset = dataset.select_columns([name])
        self._name = name

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[index][self._name]

    def fingerprint(self) -> str:
        """Return the dataset's fingerprint and the name of the column."""
        return f"{self._dataset._fingerprint} {self._name}"
