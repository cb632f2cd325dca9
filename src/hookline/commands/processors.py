"""Texts and images by name, through the model's own tokenizer or image processor."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hookline.commands.names import is_function, loaded, transformers
from hookline.errors import HooklineError
from hookline.harvesting.images import SUFFIXES, Images
from hookline.harvesting.masks import named_positions
from hookline.harvesting.texts import Texts
from hookline.sites import parse

_SAVED = ("state.json", "dataset_dict.json")  # What `datasets` leaves in a folder.
_READERS = {".parquet": "from_parquet", ".csv": "from_csv"}


def processor_of(model: str, named: str | None, kind: str, data: str, *, trusted: bool = False) -> Any:
    """Return the processor of a model, or the one that was named."""
    if named is None and is_function(model):
        raise HooklineError(f"{data!r} needs a processor, and {model!r} has none; name one with --processor")
    path = Path(named or model)
    name = str(path.parent if path.is_file() else named or model)
    return loaded(getattr(transformers(), kind), name, trusted=trusted)


def tokenizer_of(model: str, named: str | None, data: str, *, left: bool, trusted: bool = False) -> Any:
    """Return the tokenizer of a model; where padding is to be on the left, one that does so."""
    tokenizer = processor_of(model, named, "AutoTokenizer", data, trusted=trusted)
    if len(tokenizer) <= len(tokenizer.all_special_tokens):  # What transformers makes of a folder without one.
        raise HooklineError(f"{named or model!r} has no tokenizer that knows any word; name one with --processor")
    if left:
        tokenizer.padding_side = "left"
    return tokenizer


def samples_of(
    path: Path,
    model: str,
    processor: str | None,
    *,
    column: str | None = None,
    targets: str | None = None,
    max_length: int | None = None,
    left: bool = False,
    trusted: bool = False,
) -> Texts | Images:
    """Return the samples of a file or folder as the model takes them."""
    source = _table(path)
    features = getattr(source, "features", None) or {}
    is_image = path.suffix.lower() in SUFFIXES
    if (source is None and path.is_dir()) or is_image or type(features.get(column or "image")).__name__ == "Image":
        found = [path] if is_image else path if source is None else source
        maker = processor_of(model, processor, "AutoImageProcessor", str(path), trusted=trusted)
        return Images(found, maker, column=column)
    tokenizer = tokenizer_of(model, processor, str(path), left=left, trusted=trusted)
    texts = path if source is None else source
    return Texts(texts, tokenizer, column=column, targets=targets, max_length=max_length)


def names_the_last(at: Sequence[str]) -> bool:
    """Whether a place takes a position from the end, as "h.3[:, -1]" does: then texts must end together."""
    return any(isinstance(position, int) and position < 0 for position in map(position_of, at))


def position_of(where: str) -> int | slice | None:
    """Return which positions a place takes of [batch, sequence, ...], as "h.3[:, -1]" does; None takes all."""
    return named_positions(parse(where).at(""))


def _table(path: Path) -> Any:
    """Return a file or folder that `datasets` reads, or None."""
    is_saved = path.is_dir() and any((path / name).exists() for name in _SAVED)
    if not is_saved and path.suffix.lower() not in _READERS:
        return None
    try:
        import datasets
    except ImportError:
        raise HooklineError(f"{path.name!r} is read with datasets: pip install datasets") from None
    if is_saved:
        return datasets.load_from_disk(str(path))
    return getattr(datasets.Dataset, _READERS[path.suffix.lower()])(str(path))
