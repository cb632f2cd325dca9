"""What `hookline harvest` does, without the command line: names and files become a model and data, then a plan runs.

A model is a name or folder of transformers, or `module:function`; data is a file, a folder, or `module:function`.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hookline.errors import HooklineError, StoreError, did_you_mean
from hookline.harvesting.generation import Generation
from hookline.harvesting.images import Images
from hookline.harvesting.masks import named_positions
from hookline.harvesting.plan import Harvest
from hookline.harvesting.ranks import ranks
from hookline.harvesting.rows import Rule
from hookline.harvesting.texts import Texts
from hookline.nodes import DTYPES
from hookline.sites import parse
from hookline.store.places import place
from hookline.store.records import MANIFEST

_FUNCTION = re.compile(r"[^\W\d]\w*(\.\w+)*:[^\W\d]\w*(\.\w+)*")  # And no "C:\data" or "s3://bucket".
_SAVED = ("state.json", "dataset_dict.json")  # What `datasets` leaves in a folder.


@dataclass(frozen=True)
class Task:
    """What was asked on the command line."""

    model: str
    data: str
    at: Sequence[str]
    to: str
    rows: str | None = None
    dtype: str | None = None
    batch_size: int = 8
    processor: str | None = None
    column: str | None = None
    targets: str | None = None
    also: Sequence[str] = ()
    max_length: int | None = None
    generate: int | None = None
    sort_by_length: bool = False
    unit: int | None = None
    device: str | None = None
    skip_errors: bool = False
    engine: str | None = None
    workers: int | None = None
    resume: bool = False
    append: bool = False
    dry_run: bool = False


def run(task: Task) -> Iterator[str]:
    """Harvest, and give what is to be said of it, piece by piece: the estimate, then the store."""
    _check_target(task)
    plan = plan_of(task)
    speaks = ranks()[0] == 0  # Of several processes, the first.
    if speaks and (task.engine is None or task.dry_run):  # Another engine needs no model here.
        yield str(plan.estimate())
    if task.dry_run:
        return
    store = plan.run()
    if speaks:
        yield repr(store)


def show_progress() -> None:
    """Send the lines about progress to stderr, where no bar shows it; and no bar of others into a file."""
    with contextlib.suppress(HooklineError):
        if not sys.stderr.isatty():
            _transformers().utils.logging.disable_progress_bar()
    log = logging.getLogger("hookline")
    if not log.handlers:
        log.addHandler(logging.StreamHandler())
        log.setLevel(logging.INFO)


def plan_of(task: Task) -> Harvest:
    """Return the plan for a task. It holds names and no weights, so that it can travel."""
    call = None if task.generate is None else Generation(max_new_tokens=task.generate)
    data = data_of(task)
    return Harvest(
        model_of(task),
        data,
        *task.at,
        to=task.to,
        rows=task.rows or rows_of(task, data),
        dtype=None if task.dtype is None else dtype_of(task.dtype),
        columns={name: _column(name, call) for name in task.also} or None,
        call=call,
        batch_size=task.batch_size,
        sort_by_length=task.sort_by_length,
        unit=task.unit,
        device=task.device,
        on_error="skip" if task.skip_errors else "raise",
        append=task.append,
        engine=task.engine,
        workers=task.workers,
    )


def _column(name: str, call: Generation | None) -> Any:
    """Return what gives a column of the batch; where the model writes, its tokens are part of the input."""
    return call.tokens if call is not None and name == "input_ids" else name


def rows_of(task: Task, data: Any) -> Rule | dict[str, Rule]:
    """Return what a row is where nobody said: of texts a token, unless the place names one position of them."""
    if not isinstance(data, Texts):
        return "batch"
    rules: dict[str, Rule] = {where: "tokens" if _position(where) is None else "batch" for where in task.at}
    return {**rules, **dict.fromkeys(task.also, "tokens")}


@dataclass(frozen=True)
class Pretrained:
    """A model of transformers, loaded where it is to run: the class it was saved as, so that names are those it has."""

    name: str
    device: str | None

    def __call__(self) -> nn.Module:
        transformers = _transformers()
        config = _loaded(transformers.AutoConfig, self.name)
        saved = next(iter(getattr(config, "architectures", None) or []), None)
        kind = getattr(transformers, saved or "AutoModel", transformers.AutoModel)
        return _placed(_loaded(kind, self.name), self.device)


@dataclass(frozen=True)
class Made:
    """A model that a function of the user makes."""

    name: str
    device: str | None

    def __call__(self) -> nn.Module:
        found = named(self.name)()
        if not isinstance(found, nn.Module):
            raise HooklineError(f"{self.name!r} gives {type(found).__name__}, no model")
        return _placed(found, self.device)


def model_of(task: Task) -> Callable[[], nn.Module]:
    """Return what makes the model."""
    if _FUNCTION.fullmatch(task.model):
        return Made(task.model, task.device)
    folder = Path(task.model)  # Another process may have another working folder.
    return Pretrained(str(folder.absolute()) if folder.is_dir() else task.model, task.device)


def data_of(task: Task) -> Any:
    """Return the data: through the model's own processor, if it is text or images."""
    if _FUNCTION.fullmatch(task.data):
        return named(task.data)()
    path = Path(task.data)
    if not path.exists():
        raise HooklineError(f"{task.data!r} is no file or folder, nor 'module:function'")
    source = _table(path)
    features = getattr(source, "features", None) or {}
    name = task.column or "image"
    if (source is None and path.is_dir()) or type(features.get(name)).__name__ == "Image":
        return Images(path if source is None else source, _processor(task, "AutoImageProcessor"), column=task.column)
    tokenizer = _processor(task, "AutoTokenizer")
    last = any(isinstance(at, int) and at < 0 for at in map(_position, task.at))
    if task.generate is not None or last:
        tokenizer.padding_side = "left"  # What is written follows the text, and the last position is its last token.
    return Texts(
        path if source is None else source,
        tokenizer,
        column=task.column,
        targets=task.targets,
        max_length=task.max_length,
    )


def named(name: str) -> Any:
    """Return what `module:function` means; modules of the current folder are found too."""
    module, _, path = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module)
    except ImportError as error:
        raise HooklineError(f"{name!r}: {error}") from error
    for part in path.split("."):
        if not hasattr(found, part):
            raise HooklineError(f"{name!r}: {module!r} has no {path!r}{did_you_mean(part, vars(found))}")
        found = getattr(found, part)
    if not callable(found):
        raise HooklineError(f"{name!r} is {type(found).__name__}, and no function to call")
    return found


def dtype_of(name: str) -> torch.dtype:
    """Return a dtype by its name, with or without "torch." before it."""
    known = {text.removeprefix("torch."): dtype for text, dtype in DTYPES.items()}
    wanted = name.removeprefix("torch.")
    if wanted not in known:
        raise HooklineError(f"{name!r} is no dtype{did_you_mean(wanted, known)}")
    return known[wanted]


def _position(where: str) -> int | slice | None:
    """Return which positions a place takes of [batch, sequence, ...], as "h.3[:, -1]" does; None takes all."""
    return named_positions(parse(where).at(""))


def _table(path: Path) -> Any:
    """Return a file or folder that `datasets` reads, or None."""
    is_saved = path.is_dir() and any((path / name).exists() for name in _SAVED)
    readers = {".parquet": "from_parquet", ".csv": "from_csv"}
    if not is_saved and path.suffix.lower() not in readers:
        return None
    try:
        import datasets
    except ImportError:
        raise HooklineError(f"{path.name!r} is read with datasets: pip install datasets") from None
    if is_saved:
        return datasets.load_from_disk(str(path))
    return getattr(datasets.Dataset, readers[path.suffix.lower()])(str(path))


def _processor(task: Task, kind: str) -> Any:
    """Return the processor of the model, or the one that was named."""
    name = task.processor
    if name is None and _FUNCTION.fullmatch(task.model):
        raise HooklineError(f"{task.data!r} needs a processor, and {task.model!r} has none; name one with --processor")
    return _loaded(getattr(_transformers(), kind), name or task.model)


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise HooklineError("models by name need transformers: pip install 'hookline[transformers]'") from None
    return transformers


def _loaded(kind: Any, name: str) -> Any:
    """Load something of transformers; what it has to say of a failure is many lines."""
    try:
        return kind.from_pretrained(name)
    except (OSError, ValueError, KeyError, ImportError) as error:
        first = str(error).strip().partition("\n")[0]
        raise HooklineError(f"{kind.__name__} can't load {name!r}: {first}") from error


def _placed(model: nn.Module, device: str | None) -> nn.Module:
    """Return a model ready to run: on a GPU if there is any, and each process of a launcher on another."""
    if device is None and torch.cuda.is_available():
        local = int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", 0)))
        device = f"cuda:{local % torch.cuda.device_count()}"
    try:
        return model.eval().to(device or "cpu")
    except (RuntimeError, AssertionError) as error:
        raise HooklineError(f"the model can't be put on {device!r}: {str(error).partition(chr(10))[0]}") from error


def _check_target(task: Task) -> None:
    """Refuse to go on with a store unasked. Ranks of one launch all come here, and whoever is first begins it."""
    if task.resume or task.append or ranks()[1] > 1:
        return
    names = place(task.to).names("")
    if MANIFEST in names:
        raise StoreError(f"{task.to!r} has a store already; --resume goes on with it, --append adds to it")
    if names:
        raise StoreError(f"{task.to!r} is not empty and no store; give another --to")
