"""MODEL on a command line: `module:name`, a checkpoint or config of transformers.

Each is a small object that makes the model where it is called, and can travel to another process.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hookline.commands.names import dtype_of, is_function, loaded, named, transformers
from hookline.commands.output import note
from hookline.errors import HooklineError

_WEIGHTS = ("*.safetensors", "*.bin", "*.safetensors.index.json", "*.bin.index.json")
_SEED = 0


@dataclass(frozen=True)
class Manner:
    """How a model is to run: where, in which dtype, and which of its kinds of attention it takes."""

    device: str | None = None
    dtype: str | None = None
    attention: str | None = None
    trusted: bool = False  # Whether the code that a checkpoint brings along may run.

    @property
    def options(self) -> dict[str, Any]:
        """What transformers is told."""
        attention = {} if self.attention is None else {"attn_implementation": self.attention}
        return {"trusted": self.trusted, **attention}

    def placed(self, model: nn.Module) -> nn.Module:
        """Return a model ready to run: on a GPU if there is any, and each process of a launcher on another."""
        device = self.device
        if device is None and torch.cuda.is_available():
            local = int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", 0)))
            device = f"cuda:{local % torch.cuda.device_count()}"
        try:
            model = model.eval().to(device or "cpu")
        except (RuntimeError, AssertionError) as error:
            first = str(error).partition("\n")[0]
            raise HooklineError(f"the model can't be put on {device!r}: {first}") from error
        return self.cast(model)

    def cast(self, model: nn.Module) -> nn.Module:
        """Return a model in the dtype that was asked for."""
        return model if self.dtype is None else model.to(dtype_of(self.dtype))


@dataclass(frozen=True)
class Pretrained:
    """A model of transformers, loaded where it is to run: the class it was saved as, so that names are those it has."""

    name: str
    manner: Manner

    def __call__(self) -> nn.Module:
        kind = _kind(_config(self.name, self.manner))
        return self.manner.placed(loaded(kind, self.name, **self.manner.options))

    def empty(self) -> nn.Module:
        """Return the model without any numbers: enough to see what it would do."""
        with torch.device("meta"):
            return self.manner.cast(_built(_config(self.name, self.manner), self.manner.trusted).eval())


@dataclass(frozen=True)
class Configured:
    """A model of a config of transformers, with random weights: the same ones each time."""

    name: str
    manner: Manner

    def __call__(self) -> nn.Module:
        note(f"{Path(self.name).name!r} is a config without weights: random ones are made, with seed {_SEED}")
        with _seeded():
            return self.manner.placed(_built(_config(self.name, self.manner), self.manner.trusted))

    def empty(self) -> nn.Module:
        """Return the model without any numbers: enough to see what it would do."""
        return Pretrained(self.name, self.manner).empty()


@dataclass(frozen=True)
class Made:
    """A model that a function or a class of the user makes, or that is there already."""

    name: str
    manner: Manner

    def __call__(self) -> nn.Module:
        with _seeded():  # A module may make a model as it is imported.
            found = named(self.name)
        if not isinstance(found, nn.Module):
            _refuse_arguments(self.name, found)
            with _seeded():
                found = found()
        if not isinstance(found, nn.Module):
            raise HooklineError(f"{self.name!r} gives {type(found).__name__}, no model")
        if self.manner.attention is not None:
            _choose_attention(self.name, found, self.manner.attention)
        return self.manner.placed(found)


Model = Pretrained | Configured | Made


def model_of(name: str, manner: Manner) -> Model:
    """Return what makes the model."""
    if is_function(name):
        return Made(name, manner)
    path = Path(name)
    known = str(path.absolute()) if path.exists() else name  # Another process may have another working folder.
    return Configured(known, manner) if _has_no_weights(path) else Pretrained(known, manner)


def _has_no_weights(path: Path) -> bool:
    """Whether a path is a config.json, or a folder with one and with no weights beside it."""
    if path.is_file():
        return path.suffix == ".json"
    is_config = path.is_dir() and (path / "config.json").is_file()
    return is_config and not any(any(path.glob(weights)) for weights in _WEIGHTS)


def _config(name: str, manner: Manner) -> Any:
    return loaded(transformers().AutoConfig, name, **manner.options)


def _kind(config: Any) -> Any:
    """Return the class that a model was saved as."""
    package = transformers()
    saved = next(iter(getattr(config, "architectures", None) or []), None)
    own = getattr(config, "auto_map", None) or {}  # Classes that the checkpoint brings along, by who makes them.
    maker = next((auto for auto, path in own.items() if str(path).rpartition(".")[2] == saved), "AutoModel")
    return getattr(package, saved or maker, getattr(package, maker, package.AutoModel))


def _built(config: Any, trusted: bool) -> nn.Module:
    """Return a model of a config, as the class it was saved as."""
    kind = _kind(config)
    try:
        is_auto = hasattr(kind, "from_config")
        model: nn.Module = kind.from_config(config, trust_remote_code=trusted) if is_auto else kind(config)
    except (ValueError, ImportError) as error:
        first = str(error).strip().partition("\n")[0]
        raise HooklineError(f"{type(config).__name__} makes no model: {first}") from error
    return model


def _refuse_arguments(name: str, maker: Callable[..., Any]) -> None:
    """Refuse what can't be called without arguments."""
    try:
        signature = inspect.signature(maker)
    except (TypeError, ValueError):  # Of a builtin.
        return
    try:
        signature.bind()
    except TypeError as error:
        raise HooklineError(f"{name!r}: {error}; name a function that needs none and returns the model") from None


def _choose_attention(name: str, model: nn.Module, attention: str) -> None:
    choose = getattr(model, "set_attn_implementation", None)
    if choose is None:
        raise HooklineError(f"--attention is for models of transformers, and {name!r} gives {type(model).__name__}")
    choose(attention)


@contextmanager
def _seeded() -> Iterator[None]:
    """Make random weights the same each time, and leave the random numbers outside as they are."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        yield
