"""`Images`: a folder, a list or a `datasets` object, through the model's own processor, as a dataset to harvest."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hookline._harvest.datafiles import DataColumn, column_of
from hookline.errors import HooklineError

Sample = dict[str, Tensor]
SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")


class Images:
    """Images as a model takes them, for `hl.harvest`: numbered samples, of one size in a batch.

    Args:
        source: a folder (its images in the order of their names, those of folders in it too), a list of paths or of
            images, or a `datasets.Dataset`.
        processor: the model's own image processor, or a processor that has one.
        column: the column with the images; "image" unless it is named.
    """

    def __init__(self, source: Any, processor: Any, *, column: str | None = None) -> None:
        self.processor = getattr(processor, "image_processor", processor)
        if not callable(self.processor):
            raise HooklineError(f"an image processor of transformers is needed, not {type(processor).__name__}")
        self._images: DataColumn = ImageFolder(source) if _is_path(source) else column_of(source, column, "image")

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> Sample:
        found = self.processor(images=[_opened(self._images[index])], return_tensors="pt")
        return {name: value[0] for name, value in found.items()}

    def collate(self, samples: Sequence[Sample]) -> dict[str, Tensor]:
        """Return samples as one batch of keywords."""
        try:
            return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
        except RuntimeError:
            shapes = sorted({tuple(value.shape) for sample in samples for value in sample.values()})
            raise HooklineError(
                f"images of the shapes {', '.join(map(str, shapes))} don't go into one batch; let the processor bring "
                "them to one size, or take batch_size=1"
            ) from None

    def opened(self) -> list[Any]:
        """Return the images as they are, for a processor that takes texts beside them."""
        return [_opened(self._images[index]) for index in range(len(self))]

    def fingerprint(self) -> str:
        """Return a text that other images, or the same through another processor, would not have."""
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
            raise HooklineError(f"{str(path)!r} is not a folder of images; a single one is given as a list")
        found = (one.relative_to(self.path) for one in self.path.rglob("*") if one.suffix.lower() in SUFFIXES)
        self.names = sorted(one.as_posix() for one in found)
        if not self.names:
            raise HooklineError(f"{str(path)!r} has no images ({', '.join(SUFFIXES)})")

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> Path:
        return self.path / self.names[index]

    def fingerprint(self) -> str:
        """Return a text of the names and sizes: to read all images would take as long as the harvest's own reading."""
        known = [(name, (self.path / name).stat().st_size) for name in self.names]
        return hashlib.sha256(json.dumps(known).encode()).hexdigest()


def _is_path(value: Any) -> bool:
    return isinstance(value, (str, os.PathLike))


def _opened(image: Any) -> Any:
    """Return an image in three colours; of a file, read whole."""
    if _is_path(image):
        try:
            from PIL import Image
        except ImportError:
            raise HooklineError("image files are read with pillow: pip install 'hookline[transformers]'") from None
        with Image.open(image) as file:
            return file.convert("RGB")
    return image.convert("RGB") if hasattr(image, "convert") else image
