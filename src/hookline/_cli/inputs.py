"""The input of the model on a command line: --input, --text and --shape become its arguments.

`InputRequest` holds the options, `ModelInput` the arguments that `model_input` makes from them. Texts and images go
through the model's processor (`samples_of`). Without these options, `example_input` makes tensors of the shape that a
transformers model expects.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hookline._cli.models import import_name, is_function, load_pretrained, transformers
from hookline._cli.output import note
from hookline._harvest.rows_and_padding import NO_LABEL, named_positions
from hookline._harvest.texts_and_images import SUFFIXES, Images, Texts
from hookline._kernel import dtype_of, leaves, map_tensors, parse
from hookline._tables import count
from hookline._untrusted_files import dtype_name
from hookline.errors import HooklineError, did_you_mean

_SAVED = ("state.json", "dataset_dict.json")  # Files that `datasets` writes into a folder of a saved dataset.
_READERS = {".parquet": "from_parquet", ".csv": "from_csv"}


def processor_of(model: str, named: str | None, kind: str, data: str, *, trusted: bool = False) -> Any:
    """Return the processor of a model, or the one that was named."""
    if named is None and is_function(model):
        raise HooklineError(f"{data!r} needs a processor, and {model!r} has none; name one with --processor")
    path = Path(named or model)
    name = str(path.parent if path.is_file() else named or model)
    return load_pretrained(getattr(transformers(), kind), name, trusted=trusted)


def tokenizer_of(model: str, named: str | None, data: str, *, left: bool, trusted: bool = False) -> Any:
    """Return the tokenizer of a model, which pads on the left if `left` is True."""
    tokenizer = processor_of(model, named, "AutoTokenizer", data, trusted=trusted)
    if len(tokenizer) <= len(tokenizer.all_special_tokens):  # For a folder without one, it is empty.
        raise HooklineError(f"{named or model!r} has no tokenizer with a vocabulary; name one with --processor")
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
    """Return the samples of a file or folder, with the processor that prepares them for the model."""
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
    """Return True if a place counts a position from the end, as in "h.3[:, -1]": then padding must be on the left."""
    return any(isinstance(position, int) and position < 0 for position in map(position_of, at))


def position_of(where: str) -> int | slice | None:
    """Return the positions that a place like "h.3[:, -1]" selects from [batch, sequence, ...]; None for all."""
    return named_positions(parse(where).at(""))


def _table(path: Path) -> Any:
    """Return the dataset of a file or folder that `datasets` can read, or None."""
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


_MOST = 64  # The most samples in one batch, unless --samples gives another number.
_TEXTS = (".txt", ".text", ".jsonl", ".ndjson", ".parquet", ".csv")
_SHAPE = re.compile(r"(?:(?P<name>[^\W\d]\w*)=)?(?P<sizes>\d+(?:,\d+)*)(?::(?P<dtype>[\w.]+))?")
_ACCEPTED = (
    "a .safetensors, .npy or .npz file, texts (.txt, .jsonl, .parquet, .csv), an image, a folder of images, "
    "or module:function"
)


TENSORS = (".safetensors", ".npy", ".npz")  # Files that hold tensors.


@dataclass(frozen=True)
class InputRequest:
    """The options of the command line that choose a model's input."""

    model: str
    input: str | None = None
    text: Sequence[str] = ()
    shape: Sequence[str] = ()
    processor: str | None = None
    column: str | None = None
    samples: int | None = None
    max_length: int | None = None
    left: bool = False  # True to pad texts on the left, so that they end at the same position.
    trusted: bool = False  # True if the code that comes with a processor may run.

    @property
    def name(self) -> str:
        """The name of a run on this input."""
        return " / ".join(self.text) or (Path(self.input).name if self.input is not None else ", ".join(self.shape))

    def __bool__(self) -> bool:
        return self.input is not None or bool(self.text) or bool(self.shape)


@dataclass(frozen=True)
class ModelInput:
    """The arguments of a model, positional or keyword; for texts also the list of tokens of each text."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None
    tokens: list[list[str]] | None = None
    is_processed: bool = False  # True if the model's processor made the arguments.

    @property
    def run(self) -> Any:
        """The arguments as a tuple, or the keywords as a mapping."""
        return self.args if self.kwargs is None else dict(self.kwargs)

    def call(self, model: nn.Module) -> Any:
        """Run the model."""
        return model(*self.args, **(self.kwargs or {}))

    def without_cache(self, model: nn.Module) -> ModelInput:
        """Return the input with use_cache=False: nothing is generated after the forward, so a cache is not needed."""
        if self.kwargs is None or not hasattr(model, "config") or "use_cache" not in arguments_of(model).names:
            return self
        return replace(self, kwargs={"use_cache": False, **self.kwargs})

    def fitted(self, model: nn.Module) -> ModelInput:
        """Return the input on the model's device, its floats in the model's dtype."""
        weights = next((one for one in model.parameters() if one.is_floating_point()), None)
        if weights is None:
            return self
        cast = {
            dtype_name(one.dtype) for one in leaves(self.run) if one.is_floating_point() and one.dtype != weights.dtype
        }
        if cast and not self.is_processed:
            to = dtype_name(weights.dtype)
            note(f"the input is {', '.join(sorted(cast))}; it is cast to {to}, the dtype of the model's weights")
        device = "cpu" if weights.is_meta else weights.device
        args, kwargs = map_tensors(
            lambda one: one.to(device, weights.dtype if one.is_floating_point() else one.dtype),
            (self.args, self.kwargs),
        )
        return replace(self, args=args, kwargs=kwargs)


def model_input(wanted: InputRequest, model: nn.Module) -> ModelInput:
    """Return the input that the options describe, on the model's device."""
    kinds = [wanted.input is not None or bool(wanted.text), bool(wanted.shape)]
    if all(kinds):
        raise HooklineError("--shape can't be combined with --input or --text; give one of them")
    if wanted.column is not None and wanted.text and wanted.input is None:
        raise HooklineError("--column is for a file, and --text has no columns; leave it out")
    if wanted.shape:
        _refuse_for_tensors(wanted, ", ".join(wanted.shape))
        found = _of_shapes(wanted.shape)
    elif wanted.text:
        found = _of_texts(wanted, model)
    else:
        found = _of_name(wanted, str(wanted.input), model)
    return found.without_cache(model).fitted(model)


def add_labels(entry: ModelInput, loss: str | None) -> ModelInput:
    """Return an input with labels for --loss lm: the input's tokens, without padding."""
    if loss != "lm" or "labels" in (entry.kwargs or {}):
        return entry
    if entry.kwargs is None or "input_ids" not in entry.kwargs:
        raise HooklineError("--loss lm is for texts: the labels are the tokens that go in")
    labels = entry.kwargs["input_ids"]
    if "attention_mask" in entry.kwargs:
        labels = labels.masked_fill(entry.kwargs["attention_mask"] == 0, NO_LABEL)
    return replace(entry, kwargs={**entry.kwargs, "labels": labels})


def _refuse_for_tensors(wanted: InputRequest, name: str) -> None:
    """Raise for options about texts and images if the input is tensors, which are not processed."""
    options = {
        "--samples": wanted.samples,
        "--max-length": wanted.max_length,
        "--column": wanted.column,
        "--processor": wanted.processor,
    }
    for option, value in options.items():
        if value is not None:
            raise HooklineError(f"{option} is for texts and images, and {name!r} goes in as it is; leave it out")


def _of_name(wanted: InputRequest, name: str, model: nn.Module) -> ModelInput:
    """Read the input of --input, depending on the kind of its file."""
    path, suffix = Path(name), Path(name).suffix.lower()
    if is_function(name) or suffix in TENSORS:
        _refuse_for_tensors(wanted, name)
    if is_function(name):
        return _of_value(name, import_name(name)())
    if not path.exists():
        raise HooklineError(f"{name!r} is not a file or folder; give {_ACCEPTED}, or words with --text")
    if suffix == ".safetensors":
        return _of_tensors(name, _safetensors(path), model)
    if suffix in (".npy", ".npz"):
        arrays = _arrays(path)
        return ModelInput((arrays,)) if isinstance(arrays, Tensor) else _of_tensors(name, arrays, model)
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


def _of_value(name: str, value: Any) -> ModelInput:
    """Return the result of a function as an input: a mapping of keywords, a tuple of arguments, or one tensor."""
    if isinstance(value, Mapping):
        return ModelInput(kwargs=dict(value))
    if isinstance(value, (tuple, Tensor)):
        return ModelInput(value if isinstance(value, tuple) else (value,))
    raise HooklineError(f"{name!r} gives {type(value).__name__}; a tensor, a tuple or a dict of arguments is needed")


def _safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), "pt") as file:
            if "hookline" in (file.metadata() or {}):
                raise HooklineError(f"{str(path)!r} is a hookline cache, not an input; `hookline show` shows it")
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
        raise HooklineError(f"{str(path)!r} holds no array that torch can read: {first}") from error


def _of_tensors(name: str, tensors: dict[str, Tensor], model: nn.Module) -> ModelInput:
    """Return tensors as the arguments that they are named after."""
    takes = arguments_of(model)
    strange = [one for one in tensors if one not in takes.names]
    some_fit = len(strange) < len(tensors) or not takes.names
    if not strange or (takes.any_keyword and some_fit):
        return ModelInput(kwargs=tensors)
    if tensors and all(one.isdecimal() for one in tensors):
        return ModelInput(tuple(tensors[one] for one in sorted(tensors, key=int)))
    if len(tensors) == 1 and takes.needs <= 1:
        return ModelInput(tuple(tensors.values()))
    near = did_you_mean(strange[0], takes.names)
    raise HooklineError(f"{name!r} has {strange[0]!r}, and {takes}{near}")


def _of_samples(wanted: InputRequest, name: str, data: Texts | Images, model: nn.Module) -> ModelInput:
    """Return all samples, or the first --samples of them, as one batch."""
    taken = len(data) if wanted.samples is None else min(wanted.samples, len(data))
    if wanted.samples is None and taken > _MOST:
        raise HooklineError(
            f"{name!r} has {count(taken, 'sample')}, and all would be one batch; --samples 8 takes the first, "
            "`hookline harvest` runs all of them batch by batch"
        )
    if not taken:
        raise HooklineError(f"{name!r} is empty")
    if isinstance(data, Images):
        return ModelInput(kwargs=data.collate([data[index] for index in range(taken)]), is_processed=True)
    batch = data.collate(data.__getitems__(range(taken)))
    words = [[data.tokenizer.decode([number]) for number in row] for row in batch["input_ids"].tolist()]
    return ModelInput(kwargs=_with_decoder_start(data.keywords(model, batch), model), tokens=words, is_processed=True)


def _of_texts(wanted: InputRequest, model: nn.Module) -> ModelInput:
    """Return the texts of --text as an input, with the images of --input if there are any."""
    texts, shown = list(wanted.text), f"--text {wanted.text[0]}"
    if wanted.input is None:
        tokenizer = tokenizer_of(wanted.model, wanted.processor, shown, left=wanted.left, trusted=wanted.trusted)
        return _of_samples(wanted, shown, Texts(texts, tokenizer, max_length=wanted.max_length), model)
    path = Path(wanted.input)
    if not path.is_dir() and path.suffix.lower() not in SUFFIXES:
        raise HooklineError(f"--text goes with images, and {wanted.input!r} is not one; give --text or --input")
    processor = processor_of(wanted.model, wanted.processor, "AutoProcessor", shown, trusted=wanted.trusted)
    images = Images(path if path.is_dir() else [path], processor).opened()
    found = dict(processor(text=texts, images=images, return_tensors="pt", padding=True))
    tokenizer = getattr(processor, "tokenizer", processor)
    words = [[tokenizer.decode([number]) for number in row] for row in found["input_ids"].tolist()]
    return ModelInput(kwargs=found, tokens=words, is_processed=True)


def _with_decoder_start(keywords: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """Return keywords with a first token for the decoder, if the model has a decoder and there are no labels."""
    config = getattr(model, "config", None)
    start = getattr(config, "decoder_start_token_id", None)
    if not getattr(config, "is_encoder_decoder", False) or start is None or "labels" in keywords:
        return dict(keywords)
    return {**keywords, "decoder_input_ids": torch.full((len(keywords["input_ids"]), 1), start)}


def _of_shapes(shapes: Sequence[str]) -> ModelInput:
    """Return tensors of these shapes: normally distributed floats with a fixed seed, or zeros for other dtypes."""
    numbers = torch.Generator().manual_seed(0)
    found: dict[str, Tensor] = {}
    for text in shapes:
        read = _SHAPE.fullmatch(text.replace(" ", ""))
        if read is None:
            raise HooklineError(f"--shape {text}: write 1,3,224,224 or ids=2,6:int64")
        sizes = [int(size) for size in read["sizes"].split(",")]
        dtype = dtype_of(read["dtype"] or "float32", "shape")
        is_float = dtype.is_floating_point
        made = torch.randn(sizes, generator=numbers).to(dtype) if is_float else torch.zeros(sizes, dtype=dtype)
        found[read["name"] or str(len(found))] = made
    unnamed = [one.isdecimal() for one in found]
    if any(unnamed) and not all(unnamed):
        raise HooklineError("--shape: name all of the shapes, or none")
    return ModelInput(tuple(found.values())) if all(unnamed) else ModelInput(kwargs=found)


@dataclass(frozen=True)
class ForwardArguments:
    """The arguments that the forward of a model takes."""

    owner: str
    names: tuple[str, ...]
    needs: int
    any_keyword: bool

    def __str__(self) -> str:
        return f"{self.owner}.forward takes {', '.join(map(repr, self.names)) or 'no argument by name'}"


def arguments_of(model: nn.Module) -> ForwardArguments:
    """Return the arguments that the forward of a model takes."""
    parameters = inspect.signature(model.forward).parameters.values()
    by_name = [one for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    needs = [one for one in parameters if one.default is one.empty and one.kind not in (one.VAR_KEYWORD,)]
    return ForwardArguments(
        type(model).__name__,
        tuple(one.name for one in by_name),
        len(needs),
        any(one.kind is one.VAR_KEYWORD for one in parameters),
    )


_TOKENS = 8


def example_input(model: nn.Module) -> ModelInput:
    """Return an input that fits the config of a model, or raise and say which option to give."""
    config = getattr(model, "config", None)
    main = getattr(model, "main_input_name", None)
    makers = {"input_ids": _tokens, "pixel_values": _pixels, "input_features": _features, "input_values": _sound}
    made = makers[main](config) if main in makers and config is not None else {}
    if not made:
        raise HooklineError(f"{arguments_of(model)}: give --input FILE, or --shape 1,3,224,224 for the first")
    return ModelInput(kwargs=_with_example_decoder(made, config), is_processed=True).without_cache(model)


def _tokens(config: Any) -> dict[str, Tensor]:
    """Return some token numbers; for a model of texts and images also an image."""
    texts = config if hasattr(config, "vocab_size") else getattr(config, "text_config", config)
    ids = torch.arange(1, _TOKENS + 1)[None] % getattr(texts, "vocab_size", 2)
    return {"input_ids": ids, **(_pixels(config) if hasattr(config, "vision_config") else {})}


def _pixels(config: Any) -> dict[str, Tensor]:
    pictures = getattr(config, "vision_config", config)
    size = getattr(pictures, "image_size", None) or 224
    sizes = (size, size) if isinstance(size, int) else tuple(size)
    return {"pixel_values": torch.zeros(1, getattr(pictures, "num_channels", 3), *sizes)}


def _features(config: Any) -> dict[str, Tensor]:
    if not (hasattr(config, "num_mel_bins") and hasattr(config, "max_source_positions")):
        return {}
    return {"input_features": torch.zeros(1, config.num_mel_bins, 2 * config.max_source_positions)}


def _sound(_config: Any) -> dict[str, Tensor]:
    return {"input_values": torch.zeros(1, 16_000)}


def _with_example_decoder(made: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    if not getattr(config, "is_encoder_decoder", False):
        return made
    start = getattr(config, "decoder_start_token_id", None) or 0
    return {**made, "decoder_input_ids": torch.full((1, 1), start)}
