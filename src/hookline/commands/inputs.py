"""What goes into a model for one call: tensors of a file, texts, images, or numbers of a shape."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hookline.commands.names import dtype_of, is_function, named
from hookline.commands.output import note
from hookline.commands.processors import processor_of, samples_of, tokenizer_of
from hookline.errors import HooklineError, did_you_mean
from hookline.harvesting.images import SUFFIXES, Images
from hookline.harvesting.texts import Texts
from hookline.tables import count
from hookline.values import leaves, map_tensors

_MOST = 64  # Samples that go through as one batch, unless more are asked for.
_TEXTS = (".txt", ".text", ".jsonl", ".ndjson", ".parquet", ".csv")
_SHAPE = re.compile(r"(?:(?P<name>[^\W\d]\w*)=)?(?P<sizes>\d+(?:,\d+)*)(?::(?P<dtype>[\w.]+))?")
_ACCEPTED = (
    "a .safetensors, .npy or .npz file, texts (.txt, .jsonl, .parquet, .csv), an image, a folder of images, "
    "or module:function"
)


TENSORS = (".safetensors", ".npy", ".npz")  # Files of them.


@dataclass(frozen=True)
class Wanted:
    """What was asked to go into a model."""

    model: str
    input: str | None = None
    text: Sequence[str] = ()
    shape: Sequence[str] = ()
    processor: str | None = None
    column: str | None = None
    samples: int | None = None
    max_length: int | None = None
    left: bool = False  # Whether texts are to end together.
    trusted: bool = False  # Whether the code that a processor brings along may run.

    @property
    def name(self) -> str:
        """What to call a run on it."""
        return " / ".join(self.text) or (Path(self.input).name if self.input is not None else ", ".join(self.shape))

    def __bool__(self) -> bool:
        return self.input is not None or bool(self.text) or bool(self.shape)


@dataclass(frozen=True)
class Given:
    """What a model is called with: arguments or keywords; of texts, the tokens too, a list for each."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None
    tokens: list[list[str]] | None = None
    is_processed: bool = False  # Whether the model's own processor made it.

    @property
    def run(self) -> Any:
        """The arguments as a tuple, or the keywords as a mapping."""
        return self.args if self.kwargs is None else dict(self.kwargs)

    def call(self, model: nn.Module) -> Any:
        """Run the model."""
        return model(*self.args, **(self.kwargs or {}))

    def without_cache(self, model: nn.Module) -> Given:
        """Return the same for one forward, after which nothing is written: no keys and values need be kept."""
        if self.kwargs is None or not hasattr(model, "config") or "use_cache" not in arguments_of(model).names:
            return self
        return replace(self, kwargs={"use_cache": False, **self.kwargs})

    def fitted(self, model: nn.Module) -> Given:
        """Return the same where the model is, its floats in the model's dtype."""
        weights = next((one for one in model.parameters() if one.is_floating_point()), None)
        if weights is None:
            return self
        cast = {
            str(one.dtype).removeprefix("torch.")
            for one in leaves(self.run)
            if one.is_floating_point() and one.dtype != weights.dtype
        }
        if cast and not self.is_processed:
            to = str(weights.dtype).removeprefix("torch.")
            note(f"the input is {', '.join(sorted(cast))}; it is given as {to}, as the model's weights are")
        device = "cpu" if weights.is_meta else weights.device
        args, kwargs = map_tensors(
            lambda one: one.to(device, weights.dtype if one.is_floating_point() else one.dtype),
            (self.args, self.kwargs),
        )
        return replace(self, args=args, kwargs=kwargs)


def given(wanted: Wanted, model: nn.Module) -> Given:
    """Return what was asked for, where the model is."""
    kinds = [wanted.input is not None or bool(wanted.text), bool(wanted.shape)]
    if all(kinds):
        raise HooklineError("--shape stands alone: without --input and --text")
    if wanted.column is not None and wanted.text and wanted.input is None:
        raise HooklineError("--column is for a file, and --text has no columns; leave it out")
    if wanted.shape:
        _refuse_for_tensors(wanted, ", ".join(wanted.shape))
        found = _shaped(wanted.shape)
    elif wanted.text:
        found = _written(wanted, model)
    else:
        found = _of_name(wanted, str(wanted.input), model)
    return found.without_cache(model).fitted(model)


def _refuse_for_tensors(wanted: Wanted, name: str) -> None:
    """Refuse options about texts and images for tensors, which go in as they are."""
    options = {
        "--samples": wanted.samples,
        "--max-length": wanted.max_length,
        "--column": wanted.column,
        "--processor": wanted.processor,
    }
    for option, value in options.items():
        if value is not None:
            raise HooklineError(f"{option} is for texts and images, and {name!r} goes in as it is; leave it out")


def _of_name(wanted: Wanted, name: str, model: nn.Module) -> Given:
    """Read an input by the kind of its file."""
    path, suffix = Path(name), Path(name).suffix.lower()
    if is_function(name) or suffix in TENSORS:
        _refuse_for_tensors(wanted, name)
    if is_function(name):
        return _of_value(name, named(name)())
    if not path.exists():
        raise HooklineError(f"{name!r} is not a file or folder; give {_ACCEPTED}, or words with --text")
    if suffix == ".safetensors":
        return _of_tensors(name, _safetensors(path), model)
    if suffix in (".npy", ".npz"):
        arrays = _arrays(path)
        return Given((arrays,)) if isinstance(arrays, Tensor) else _of_tensors(name, arrays, model)
    if not path.is_dir() and suffix not in (*_TEXTS, *SUFFIXES):
        raise HooklineError(f"{name!r} is not an input that hookline reads; give {_ACCEPTED}")
    data = samples_of(
        path,
        wanted.model,
        wanted.processor,
        column=wanted.column,
        max_length=wanted.max_length,
        left=wanted.left,
        trusted=wanted.trusted,
    )
    return _of_samples(wanted, name, data, model)


def _of_value(name: str, value: Any) -> Given:
    """Return what a function gave: the keywords as a mapping, the arguments as a tuple, or the only one."""
    if isinstance(value, Mapping):
        return Given(kwargs=dict(value))
    if isinstance(value, (tuple, Tensor)):
        return Given(value if isinstance(value, tuple) else (value,))
    raise HooklineError(f"{name!r} gives {type(value).__name__}; a tensor, a tuple or a dict of arguments is needed")


def _safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), "pt") as file:
            if "hookline" in (file.metadata() or {}):
                raise HooklineError(f"{str(path)!r} is a cache of hookline, and no input; `hookline show` shows it")
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise HooklineError(f"{str(path)!r} can't be read: {error}") from error


def _arrays(path: Path) -> Tensor | dict[str, Tensor]:
    try:
        import numpy
    except ImportError:
        raise HooklineError(f"{path.name!r} is read with numpy: pip install numpy") from None
    try:
        found = numpy.load(path, allow_pickle=False)
        if isinstance(found, numpy.ndarray):
            return torch.from_numpy(found)
        return {name: torch.from_numpy(found[name]) for name in found.files}
    except (ValueError, TypeError, EOFError, OSError) as error:
        first = str(error).partition("\n")[0]
        raise HooklineError(f"{str(path)!r} holds no array that torch has: {first}") from error


def _of_tensors(name: str, tensors: dict[str, Tensor], model: nn.Module) -> Given:
    """Return tensors as the arguments that their names mean."""
    takes = arguments_of(model)
    strange = [one for one in tensors if one not in takes.names]
    some_fit = len(strange) < len(tensors) or not takes.names
    if not strange or (takes.any_keyword and some_fit):
        return Given(kwargs=tensors)
    if tensors and all(one.isdecimal() for one in tensors):
        return Given(tuple(tensors[one] for one in sorted(tensors, key=int)))
    if len(tensors) == 1 and takes.needs <= 1:
        return Given(tuple(tensors.values()))
    near = did_you_mean(strange[0], takes.names)
    raise HooklineError(f"{name!r} has {strange[0]!r}, and {takes}{near}")


def _of_samples(wanted: Wanted, name: str, data: Texts | Images, model: nn.Module) -> Given:
    """Return all samples as one batch, or so many as were asked for."""
    taken = len(data) if wanted.samples is None else min(wanted.samples, len(data))
    if wanted.samples is None and taken > _MOST:
        raise HooklineError(
            f"{name!r} has {count(taken, 'sample')}, and all would be one batch; --samples 8 takes the first, "
            "`hookline harvest` runs all of them batch by batch"
        )
    if not taken:
        raise HooklineError(f"{name!r} is empty")
    if isinstance(data, Images):
        return Given(kwargs=data.collate([data[index] for index in range(taken)]), is_processed=True)
    batch = data.collate(data.__getitems__(range(taken)))
    words = [[data.tokenizer.decode([number]) for number in row] for row in batch["input_ids"].tolist()]
    return Given(kwargs=_begun(data.keywords(model, batch), model), tokens=words, is_processed=True)


def _written(wanted: Wanted, model: nn.Module) -> Given:
    """Return texts of the command line, with images beside them if there are any."""
    texts, shown = list(wanted.text), f"--text {wanted.text[0]}"
    if wanted.input is None:
        tokenizer = tokenizer_of(wanted.model, wanted.processor, shown, left=wanted.left, trusted=wanted.trusted)
        return _of_samples(wanted, shown, Texts(texts, tokenizer, max_length=wanted.max_length), model)
    path = Path(wanted.input)
    if not path.is_dir() and path.suffix.lower() not in SUFFIXES:
        raise HooklineError(f"--text goes with images, and {wanted.input!r} is none; give one of the two")
    processor = processor_of(wanted.model, wanted.processor, "AutoProcessor", shown, trusted=wanted.trusted)
    images = Images(path if path.is_dir() else [path], processor).opened()
    found = dict(processor(text=texts, images=images, return_tensors="pt", padding=True))
    tokenizer = getattr(processor, "tokenizer", processor)
    words = [[tokenizer.decode([number]) for number in row] for row in found["input_ids"].tolist()]
    return Given(kwargs=found, tokens=words, is_processed=True)


def _begun(keywords: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """Return keywords that begin the decoder, where there is one and nothing was given to it."""
    config = getattr(model, "config", None)
    start = getattr(config, "decoder_start_token_id", None)
    if not getattr(config, "is_encoder_decoder", False) or start is None or "labels" in keywords:
        return dict(keywords)
    return {**keywords, "decoder_input_ids": torch.full((len(keywords["input_ids"]), 1), start)}


def _shaped(shapes: Sequence[str]) -> Given:
    """Return numbers of some shapes: floats from a normal distribution, always the same ones; integers are zeros."""
    numbers = torch.Generator().manual_seed(0)
    found: dict[str, Tensor] = {}
    for text in shapes:
        read = _SHAPE.fullmatch(text.replace(" ", ""))
        if read is None:
            raise HooklineError(f"--shape {text}: write 1,3,224,224 or ids=2,6:int64")
        sizes = [int(size) for size in read["sizes"].split(",")]
        dtype = dtype_of(read["dtype"] or "float32")
        is_float = dtype.is_floating_point
        made = torch.randn(sizes, generator=numbers).to(dtype) if is_float else torch.zeros(sizes, dtype=dtype)
        found[read["name"] or str(len(found))] = made
    unnamed = [one.isdecimal() for one in found]
    if any(unnamed) and not all(unnamed):
        raise HooklineError("--shape: give all of them a name, or none")
    return Given(tuple(found.values())) if all(unnamed) else Given(kwargs=found)


@dataclass(frozen=True)
class Arguments:
    """What the forward of a model takes."""

    owner: str
    names: tuple[str, ...]
    needs: int
    any_keyword: bool

    def __str__(self) -> str:
        return f"{self.owner}.forward takes {', '.join(map(repr, self.names)) or 'no argument by name'}"


def arguments_of(model: nn.Module) -> Arguments:
    """Return what the forward of a model takes."""
    parameters = inspect.signature(model.forward).parameters.values()
    by_name = [one for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    needs = [one for one in parameters if one.default is one.empty and one.kind not in (one.VAR_KEYWORD,)]
    return Arguments(
        type(model).__name__,
        tuple(one.name for one in by_name),
        len(needs),
        any(one.kind is one.VAR_KEYWORD for one in parameters),
    )
