"""Look before you leap: what a model would do with an input, module by module.

It runs on fake tensors: shapes and dtypes are real, nothing is computed, no weights are read. Where a model can't run
on them, it runs for real, and the report says so. The model, its buffers and the random numbers are left as they were.
"""

from __future__ import annotations

import copy
import logging
import operator
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call

from hookline.actions import Call
from hookline.context import open_block, resting
from hookline.errors import HooklineError, SiteError, did_you_mean
from hookline.reasons import why_not_called
from hookline.records import Session
from hookline.sites import Site
from hookline.tables import html_table, table
from hookline.tree import Names, is_container, is_scripted, parameter_count, unwrap
from hookline.values import ATOMS, leaves, map_tensors, share_tensor
from hookline.wiring.modules import attached
from hookline.wiring.taps import Tap


class Row(NamedTuple):
    """What one module would do."""

    site: str
    module: str
    calls: int
    dtype: str
    shape: str
    parameters: int
    hazards: str


class Scan(Sequence[Row]):
    """What each module of a model would do, in the order they begin; prints as a table."""

    def __init__(self, rows: list[Row], note: str) -> None:
        self.rows = rows
        self.note = note

    @overload
    def __getitem__(self, index: int | str) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice | str) -> Row | list[Row]:
        if isinstance(index, str):
            found = next((row for row in self.rows if row.site == index), None)
            if found is None:
                raise SiteError(f"{index!r} is not in this scan{did_you_mean(index, (row.site for row in self.rows))}")
            return found
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    def _cells(self) -> list[tuple[object, ...]]:
        return [(row.site or '""', *row[1:5], f"{row.parameters:,}", row.hazards) for row in self.rows]

    def __repr__(self) -> str:
        return table(Row._fields, self._cells(), self.note)

    def _repr_html_(self) -> str:
        return html_table(Row._fields, self._cells(), self.note)


class Observe:
    """Note what passes, and which tensors, so that a later write to them can be told."""

    kind = "scan"

    def __init__(self) -> None:
        self.began: dict[Site, int] = {}
        self.calls: dict[str, int] = {}
        self.latest: dict[str, list[Tensor]] = {}
        self.seen: dict[str, list[tuple[Tensor, int]]] = {}

    def __call__(self, value: Any, call: Call, _whole: bool) -> Any:
        """Note a value: at the inputs that a call has begun, at the output what it gave."""
        path = call.site.path
        if call.site.port == "inputs":
            self.began.setdefault(call.site._replace(port="output"), len(self.began))
            return value
        self.calls[path] = self.calls.get(path, 0) + 1
        self.latest[path] = leaves(value)
        versions = [(tensor, -1 if tensor.is_inference() else tensor._version) for tensor in leaves(value)]
        self.seen.setdefault(path, []).extend(versions)
        return value


def scan(model: nn.Module, *args: Any, **kwargs: Any) -> Scan:
    """Show what every module of a model would do with this input: calls, shapes, dtypes, parameters and hazards.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 2))
    >>> scan(model, torch.ones(3, 4))
    on fake tensors: nothing was computed
    site  module      calls  dtype    shape   parameters  hazards
    ────  ──────────  ─────  ───────  ──────  ──────────  ──────────────────────────
    ""    Sequential      1  float32  (3, 2)          58
    0     Linear          1  float32  (3, 8)          40  overwritten in place later
    1     ReLU            1  float32  (3, 8)           0
    2     Linear          1  float32  (3, 2)          18
    """
    if not isinstance(model, nn.Module):
        raise HooklineError(f"scan takes a model and its input, not {type(model).__name__}")
    bare = unwrap(model)
    observe = Observe()
    try:
        with _observed(bare, observe):
            _run_on_fakes(bare, args, kwargs)
        note = "on fake tensors: nothing was computed"
    except Exception as error:
        if any(parameter.is_meta for parameter in bare.parameters()):
            raise
        observe = Observe()
        with _observed(bare, observe):
            _run_for_real(bare, args, kwargs)
        note = f"on a real run, since fake tensors don't suffice for this model: {_first_line(error)}"
    return Scan(_rows(bare, observe), note)


@contextmanager
def _observed(model: nn.Module, observe: Observe) -> Iterator[None]:
    """Watch every module, while all other hooks rest, and put back whatever the run leaves on them."""
    session = Session()
    block = object()
    taps, found, seen = [], [], set[int]()
    for name, module in Names(model).once():
        found.append(_snapshot(module, seen))
        if is_scripted(module) or is_container(module):
            continue
        for port in ("inputs", "output"):
            tap = Tap(Site(name, port), module, observe, session, False, "")  # type: ignore[arg-type]
            tap.blocks = frozenset((block,))
            taps.append(tap)
    try:
        with attached(taps), resting(), torch.random.fork_rng(), _eagerly():
            open_block(block)
            yield
    finally:
        for put_back in found:
            put_back()


def _snapshot(module: nn.Module, seen: set[int]) -> Callable[[], None]:
    """Return a function that gives a module back its attributes, and their contents at any depth."""
    held = list(_containers(module.__dict__, seen))
    before = [copy.copy(container) for container in held]

    def put_back() -> None:
        for container, content in zip(held, before, strict=True):
            if not _is_same(container, content):
                container.clear()
                container.extend(content) if isinstance(container, (list, deque)) else container.update(content)

    return put_back


def _containers(held: Any, seen: set[int]) -> Iterator[Any]:
    """Yield the plain containers that a run could change, among them the attributes of objects, but of no module."""
    waiting = [held]
    while waiting:
        one = waiting.pop()
        if id(one) in seen or isinstance(one, (Tensor, nn.Module, type, *ATOMS)):
            continue
        seen.add(id(one))
        if type(one) in (list, dict, set, deque):
            yield one
            waiting += one.values() if isinstance(one, dict) else one
        elif isinstance(one, tuple):
            waiting += one
        elif type(getattr(one, "__dict__", None)) is dict and not callable(one):
            waiting.append(one.__dict__)


def _is_same(container: Any, content: Any) -> bool:
    if len(container) != len(content):
        return False
    if isinstance(container, dict):
        return all(key in content and container[key] is content[key] for key in container)
    return container == content if isinstance(container, set) else all(map(operator.is_, container, content))


def _run_on_fakes(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Run a model whose tensors are all fakes: parameters, buffers, and those that are plain attributes."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    state = {name: mode.from_tensor(tensor) for name, tensor in _state(model)}
    on_meta = any(parameter.is_meta for parameter in model.parameters())
    fake_args, fake_kwargs = map_tensors(
        lambda tensor: mode.from_tensor(tensor.to("meta") if on_meta else tensor), (args, kwargs)
    )
    _replace_attributes(model, mode.from_tensor)
    with mode, _quiet():
        functional_call(model, dict[str, Tensor](state), fake_args, fake_kwargs)


def _run_for_real(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Run a model on copy-on-write tensors, so that its own are not written to."""
    state = {name: share_tensor(tensor.detach()).requires_grad_(tensor.requires_grad) for name, tensor in _state(model)}
    _replace_attributes(model, share_tensor)
    functional_call(model, state, *map_tensors(share_tensor, (args, kwargs)))


def _replace_attributes(model: nn.Module, replace: Callable[[Tensor], Tensor]) -> None:
    for _, module in Names(model).once():
        names = module.__dict__
        names.update({name: replace(held) for name, held in names.items() if isinstance(held, Tensor)})


def _eagerly() -> AbstractContextManager[Any]:
    """Run what is compiled uncompiled, where torch can (since 2.6)."""
    return torch.compiler.set_stance("force_eager") if hasattr(torch.compiler, "set_stance") else nullcontext()


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch from printing a traceback for what a fake tensor can't do: the real run follows."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _rows(model: nn.Module, observe: Observe) -> list[Row]:
    rows = []
    for name, module in Names(model).once():
        if not is_scripted(module) and is_container(module):
            continue
        tensors = observe.latest.get(name, [])
        rows.append(
            Row(
                str(Site(name)),
                type(module).__name__,
                observe.calls.get(name, 0),
                ", ".join(dict.fromkeys(str(tensor.dtype).removeprefix("torch.") for tensor in tensors)),
                ", ".join(str(tuple(tensor.shape)) for tensor in tensors[:4]) + (", …" if len(tensors) > 4 else ""),
                parameter_count(module),
                "; ".join(_hazards(name, module, model, observe)),
            )
        )
    order = {str(site): position for site, position in observe.began.items()}
    return sorted(rows, key=lambda row: order.get(row.site, len(order)))


def _hazards(name: str, module: nn.Module, model: nn.Module, observe: Observe) -> Iterator[str]:
    calls = observe.calls.get(name, 0)
    if not calls:
        yield "never called" + why_not_called(name, module, model)
    if calls > 1:
        yield "called several times: keep='all' or '#n'"
    if any(version >= 0 and tensor._version != version for tensor, version in observe.seen.get(name, [])):
        yield "overwritten in place later"


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:160]
