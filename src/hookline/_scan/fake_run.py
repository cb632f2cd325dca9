"""Run a model to see what it would do: on fake tensors or, if it can't run on those, for real. Nothing changes.

On fake tensors, shapes and dtypes are those of a real run, but nothing is computed and no weights are read. The model,
its buffers and the random state are left as they were, and nothing outside of the model keeps a tensor of the run.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import copy_context
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy

from hookline._kernel import (
    Found,
    Names,
    Observer,
    map_tensors,
    observing,
    resting,
    share_for_now,
    unwrap,
)
from hookline._scan.restore_modules import left_as_found
from hookline._scan.restore_surroundings import Surroundings
from hookline._torch import FAKE_TENSOR_LOGGER, FakeTensor, FakeTensorMode, unseen_by_subclasses
from hookline.errors import HooklineError

T = TypeVar("T")
Places = Sequence[tuple[Found, Observer]]
MakeObservers = Callable[[], tuple[Places, Callable[[], T]]]  # Returns the observers, and a function that reads them.


def call_arguments_of(run: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments in `run=`: a tuple of arguments, a mapping of keywords, or a single argument."""
    if isinstance(run, Mapping):
        return (), dict(run)
    return (run if isinstance(run, tuple) else (run,)), {}


def refuse_lazy(model: nn.Module, then: str) -> None:
    """Raise if a model has lazy parameters, which only get a shape in its first run."""
    if any(map(is_lazy, model.parameters())):
        raise HooklineError(
            f"{type(model).__name__} has parameters without a shape yet: run the model once, then {then}"
        )


def try_out(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], make_observers: MakeObservers[T]
) -> tuple[T, str]:
    """Run a model under new observers for each attempt; return what they saw, and how the model was run."""
    model = unwrap(model)
    around = Surroundings(model)

    def attempt(run: FakeRun | RealRun) -> T:
        places, read = make_observers()
        try:
            with observed(model, places):
                run(model, args, kwargs)
            return read()
        except BaseException:
            around.put_back(run)  # Its result is ignored: the traceback holds tensors of the run as well.
            raise

    fake, real = FakeRun(), RealRun()
    try:
        found = copy_context().run(attempt, fake)  # In a copy, so that the run sets no context variable here.
    except Exception as error:
        if any(parameter.is_meta for parameter in model.parameters()):
            raise
        why = _first_line(error)
    else:
        return found, "on fake tensors: nothing was computed" + _freed(around.free(fake))
    found = copy_context().run(attempt, real)
    note = f"on a real run, since fake tensors don't suffice for this model: {why}"
    return found, note + _freed(around.free(real))


def _freed(places: list[str]) -> str:
    return f"; put back what the run had left in {', '.join(places)}" if places else ""


@contextmanager
def observed(model: nn.Module, places: Places) -> Iterator[None]:
    """Let observers see the values, pause all hooks, and undo the changes of the run on the modules."""
    with undisturbed(), left_as_found(model), observing(places):
        yield


@contextmanager
def undisturbed() -> Iterator[None]:
    """Pause all hooks, run compiled modules uncompiled, and restore the random state."""
    with resting(), torch.random.fork_rng(), _eagerly():
        yield


class FakeRun:
    """A run in which all tensors of a model are fake: parameters, buffers, and plain attributes."""

    def __init__(self) -> None:
        self._mode: Callable[[], FakeTensorMode | None] = lambda: None

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run the model."""
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._mode = weakref.ref(mode)
        state = {name: mode.from_tensor(tensor) for name, tensor in _state(model)}
        on_meta = any(parameter.is_meta for parameter in model.parameters())
        fake_args, fake_kwargs = map_tensors(
            lambda tensor: mode.from_tensor(tensor.to("meta") if on_meta else tensor), (args, kwargs)
        )
        _replace_attributes(model, mode.from_tensor)
        with mode, _quiet():
            functional_call(model, dict[str, Tensor](state), fake_args, fake_kwargs)

    def lives(self) -> bool:
        """Return True if something still holds a fake tensor of this run. Each of them holds the mode."""
        return self._mode() is not None

    def kept(self) -> list[Tensor]:
        """Return the fake tensors that something still holds."""
        mode = self._mode()
        return [one for one in _living_tensors() if isinstance(one, FakeTensor) and one.fake_mode is mode]


class RealRun:
    """A run on copy-on-write copies of a model's tensors, so that its own are not written to."""

    def __init__(self) -> None:
        self._copies: list[StorageWeakRef] = []

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run the model."""
        state = {
            name: self._copy(tensor.detach()).requires_grad_(tensor.requires_grad) for name, tensor in _state(model)
        }
        _replace_attributes(model, self._copy)
        functional_call(model, state, *map_tensors(self._copy, (args, kwargs)))

    def _copy(self, tensor: Tensor) -> Tensor:
        copied = share_for_now(tensor)
        self._copies += _storage(copied)
        return copied

    def lives(self) -> bool:
        """Return True if something still holds the memory of a copy."""
        return not all(storage.expired() for storage in self._copies)

    def kept(self) -> list[Tensor]:
        """Return the copies that something still holds, and views of them."""
        living = {storage for storage in self._copies if not storage.expired()}
        return [one for one in _living_tensors() if not living.isdisjoint(_storage(one))]


def _living_tensors() -> list[Tensor]:
    # A lookup in a set takes a third of the time of `issubclass`. The set holds ids, because some metaclasses make
    # their classes unhashable.
    kinds = {id(kind) for kind in (Tensor, *_subclasses(Tensor))}
    return [one for one in gc.get_objects() if id(type(one)) in kinds]


def _subclasses(kind: type) -> Iterator[type]:
    found: list[type] = type.__subclasses__(kind)
    for one in found:
        yield one
        yield from _subclasses(one)


def _storage(tensor: Tensor) -> list[StorageWeakRef]:
    """Return a weak reference to a tensor's memory, if it has any. Methods of subclasses are not called."""
    try:
        with unseen_by_subclasses():
            return [StorageWeakRef(tensor.untyped_storage())]
    except Exception:
        return []


def _replace_attributes(model: nn.Module, replace: Callable[[Tensor], Tensor]) -> None:
    for _, module in Names(model).once():
        names = module.__dict__
        names.update({name: replace(held) for name, held in names.items() if isinstance(held, Tensor)})


def _eagerly() -> AbstractContextManager[Any]:
    """Run compiled modules uncompiled, where torch can (since 2.6)."""
    return torch.compiler.set_stance("force_eager") if hasattr(torch.compiler, "set_stance") else nullcontext()


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch from printing a traceback if a fake tensor can't do something: the real run follows."""
    logger = logging.getLogger(FAKE_TENSOR_LOGGER)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:160]
