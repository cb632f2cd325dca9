"""One column of whatever holds data: a file, a list, a `datasets` object; by number, and known again by a text."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from hookline.errors import HooklineError, did_you_mean
from hookline.harvesting.digests import digest
from hookline.harvesting.lines import Lines


class Column(Protocol):
    """Numbered values, known again by a text."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...

    def fingerprint(self) -> str:
        """Return a text that other values would not have."""


class Listed:
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


class Arrow:
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


def column_of(source: Any, name: str | None, usual: str) -> Column:
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
        return Arrow(source, name or usual)
    return Listed(source, name or usual)
