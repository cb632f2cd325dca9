"""Read one column of a text or .jsonl file, a list or a `datasets` object: values by number, and a fingerprint."""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, overload

from hookline._harvest.fingerprints import digest
from hookline.errors import HooklineError, did_you_mean

_CHUNK = 1 << 24
_PACKED = (".gz", ".bz2", ".xz", ".zst", ".zip")


class Lines(Sequence[str]):
    """The texts of a file: a line each, or a field of each line of JSON. Blank lines are none.

    Where the lines begin is found once in each process, and does not travel with a pickle.
    """

    def __init__(self, path: str | os.PathLike[str], field: str | None = None) -> None:
        self.path = Path(path).absolute()  # Another process may have another working folder.
        if not self.path.is_file():
            raise HooklineError(f"{str(path)!r} is not a file with texts")
        if self.path.suffix.lower() in _PACKED:
            raise HooklineError(
                f"the lines of {self.path.name!r} can't be found one by one while it is packed; unpack it"
            )
        self.is_json = self.path.suffix.lower() in (".jsonl", ".ndjson")
        if field is not None and not self.is_json:
            raise HooklineError(f"{self.path.name!r} has lines and no columns; columns are those of .jsonl files")
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
        """Return what a line says."""
        try:
            text = line.decode("utf-8").rstrip("\r\n")
            found: Any = json.loads(text)[self.field] if self.is_json else text
        except UnicodeDecodeError as error:
            raise HooklineError(f"text {index} of {self.path.name!r} is not UTF-8: {error}") from None
        except (ValueError, TypeError, LookupError) as error:
            problem = f"text {index} of {self.path.name!r}: no JSON with a field {self.field!r}: {line[:60]!r}"
            raise HooklineError(f"{problem}; column= names the field") from error
        if not isinstance(found, str):
            raise HooklineError(f"text {index} of {self.path.name!r}: field {self.field!r} is {found!r:.60}, no text")
        return found

    def _begins(self) -> array[int]:
        """Return where each line begins that is not blank."""
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
        """Return a text that a file with other contents would not have."""
        found = hashlib.sha256()
        with open(self.path, "rb") as file:
            while chunk := file.read(_CHUNK):
                found.update(chunk)
        return f"{found.hexdigest()} {self.field if self.is_json else ''}".strip()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_starts": None}


class DataColumn(Protocol):
    """Numbered values, known again by a text."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...

    def fingerprint(self) -> str:
        """Return a text that other values would not have."""


class ListColumn:
    """The items of a list, or one field of each."""

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
        """Return a digest of everything."""
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
        """Return the dataset's own."""
        return f"{self._dataset._fingerprint} {self._name}"


def column_of(source: Any, name: str | None, usual: str) -> DataColumn:
    """Return a column of a source; the usual one where none is named."""
    if isinstance(source, (str, os.PathLike)):
        return Lines(source, name)
    if isinstance(source, Mapping):  # A DatasetDict, or columns as such.
        names = ", ".join(map(repr, source))
        raise HooklineError(f"one list or dataset is needed, and this has {names}; give one of them")
    if not (hasattr(source, "__getitem__") and hasattr(source, "__len__")):
        kind = type(source).__name__
        raise HooklineError(f"{kind} has no numbered samples; give a dataset that is not streamed, a list or a file")
    if hasattr(source, "column_names") and hasattr(source, "select_columns"):
        return DatasetColumn(source, name or usual)
    return ListColumn(source, name or usual)
