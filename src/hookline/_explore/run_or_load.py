"""Get the values of a page: run the model, or load a cache, a store, a mapping or a file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hookline import Cache, Hooks, Site
from hookline._kernel import (
    DEEPEST,
    Where,
    along_calls,
    children,
    describe,
    fields,
    find_places,
    get_part,
    latest_value,
    leaf_places,
    leaves,
    short_form,
    sites_without_values,
    unwrap,
    write_subscripts,
)
from hookline._plot.plot_data import dense, measure
from hookline._scan.fake_run import call_arguments_of, refuse_lazy
from hookline._scan.list_sites import dtypes_and_shapes, every_module
from hookline._scan.restore_modules import buffers_as_found, left_as_found
from hookline._scan.scan import Scan, scan
from hookline._store.rows import Rows
from hookline._store.store import Store
from hookline._tables import count
from hookline.errors import HooklineError, NeverFired, SiteError, StaleValue

Loss = Callable[[Any], Tensor]
OF_CALLS = ("norm", "rms", "mean", "std", "abs", "min", "max")
MOST_CALLS = 64  # The most calls of a site whose statistics are on a page.
MOST_PARTS = 8  # The most tensors of one value that are shown: a key-value cache has two for each layer.


class OverCalls(NamedTuple):
    """Statistics of a site in several calls."""

    along: str  # "step" if the calls are the steps of a generation, else "call".
    numbers: list[int]  # The calls that are listed, and how many there are.
    of: int
    joined: bool  # Whether the value shown is that of all calls, joined to one sequence; else it is the latest.
    stats: dict[str, list[float]]


class SiteValue(NamedTuple):
    """One tensor that passed a site, or the description of a value without tensors."""

    site: Site
    source: Tensor | Rows | None
    describe: str
    dtype: str
    shape: tuple[int, ...]
    calls: int
    # For each subscript that selects the tensor in its value, all ways to write it.
    parts: tuple[tuple[int | str, ...], ...] = ()
    over: OverCalls | None = None  # If several calls were kept.


@dataclass
class Run:
    """The values of one run, in order, and the captured sites at which nothing passed."""

    name: str
    entries: dict[Site, SiteValue] = field(default_factory=dict)
    silent: list[Site] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def captured(model: nn.Module, run: Any, at: Any, loss: Loss | None, call: Callable[..., Any] | None = None) -> Cache:
    """Run a model, or a function that runs it, once; return the values, and the gradients of `loss` if given."""
    refuse_lazy(model, "explore")
    if loss is not None and not callable(loss):
        raise HooklineError(f"loss= takes a function from the output to one number, not {loss!r}")
    if loss is not None and torch.is_inference_mode_enabled():
        raise HooklineError("this loss gives no gradient: torch.inference_mode is on; explore outside it")
    args, kwargs = call_arguments_of(run)
    where = (every_module,) if at is None else tuple(at) if isinstance(at, (list, tuple)) else (at,)
    hooks = short_form(model)
    if loss is not None:
        _capture_gradients(hooks, model, where)
    hooks.capture(*where)
    if at is None:
        hooks.when_missing("ignore")  # The page lists the modules that are never called.
    with put_back(model), hooks as acts, torch.set_grad_enabled(loss is not None or torch.is_grad_enabled()):
        output = (model if call is None else call)(*args, **kwargs)
        if loss is not None:
            _backward(model, loss(output), (args, kwargs))
    if not acts and call is not None and at is None:
        name = getattr(call, "__name__", type(call).__name__)
        raise NeverFired(f"{name} did not run {type(model).__name__}, nor a part of it, so there is no page to write")
    if not acts:
        raise NeverFired(
            f"nothing passed at any place of at={at!r}, so there is no page to write; the warning says why"
        )
    return acts


def scanned(model: nn.Module, run: Any) -> Scan | None:
    """Return a scan of the model with these arguments; None if it can't be scanned."""
    args, kwargs = call_arguments_of(run)
    try:
        return scan(model, *args, **kwargs)
    except Exception:  # The real run worked; a missing scan is not worth an error.
        return None


@contextmanager
def put_back(model: nn.Module) -> Iterator[None]:
    """Restore what a run changes: attributes, buffers such as a BatchNorm's, and the state of random generators."""
    devices = {tensor.device.index or 0 for tensor in (*model.parameters(), *model.buffers()) if tensor.is_cuda}
    with (
        buffers_as_found(model),
        left_as_found(unwrap(model)),
        torch.random.fork_rng(devices=sorted(devices)),
    ):
        yield


def _capture_gradients(hooks: Hooks, model: nn.Module, where: tuple[Where, ...]) -> None:
    """Capture the gradient wherever a value is captured."""
    values = [
        place.site for place in find_places(model, where) if not place.site.is_gradient and place.site.port != "param"
    ]
    gradients = [site._replace(port=f"grad_{site.port}") for site in values]
    if gradients:
        hooks.capture(*gradients)
        hooks.when_missing("ignore")  # Some values have no gradient: integers, and values that depend on no parameter.


def _backward(model: nn.Module, loss: Any, given: Any) -> None:
    """Run the backward of the loss without changing the parameters' `grad`."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise HooklineError(
            f"loss= takes a function from the output to one number as a tensor; it gave {describe(loss)}"
        )
    ends = [tensor for tensor in (*model.parameters(), *leaves(given)) if tensor.requires_grad]
    if not ends:
        raise HooklineError("this loss gives no gradient: no parameter and no input of the model requires one")
    if not loss.requires_grad:
        raise HooklineError(
            "this loss gives no gradient: it does not depend on the model; leave out .detach() and no_grad"
        )
    torch.autograd.grad(loss, ends, allow_unused=True)


def run_of(what: Any, name: str) -> Run:
    """Return the values of a cache, a store, any mapping from site to value, or the path of one."""
    if isinstance(what, (str, os.PathLike)):
        what = Store(what) if os.path.isdir(what) or "://" in os.fspath(what) else Cache.load(what)
    if not isinstance(what, Mapping):
        raise HooklineError(
            f"a page shows a Cache, a Store, a mapping from site to value, the path of one, or a model with run=(...), "
            f"not {describe(what)}"
        )
    run = Run(name)
    for site, values, calls in _each(what):
        for entry in _entries(site, values, calls, run.notes):
            run.entries[entry.site] = _over_calls(what, site, entry) if isinstance(what, Cache) else entry
    if isinstance(what, Cache):
        run.silent = sites_without_values(what)
        run.notes += _notes_of_calls(run)
    if isinstance(what, Store):
        run.notes.append(
            f"{name}: a store of {count(what.samples, 'sample')}; statistics are of all, pictures of the first"
        )
    return run


def _notes_of_calls(run: Run) -> list[str]:
    """Return a note if only the latest of several calls is shown."""
    latest = [one for one in run.entries.values() if one.calls > 1 and not (one.over and one.over.joined)]
    hint = "" if all(one.over for one in latest) else "; capture with keep='all' to see how they change"
    found = f"{run.name}: {count(len(latest), 'site')} passed in several calls, of which the latest is shown{hint}"
    return [found] if latest else []


def _each(what: Mapping[Any, Any]) -> Iterator[tuple[Site, Any, int]]:
    """Yield each site with its latest value and the number of calls."""
    for key in what:
        site = key if isinstance(key, Site) else Site.parse(key)
        if not isinstance(what, Cache):
            yield site, what[key], 1
            continue
        yield site, *latest_value(what, site)


def _entries(site: Site, value: Any, calls: int, notes: list[str]) -> Iterator[SiteValue]:
    """Yield an entry for each tensor of a value; for a value without tensors, one that describes it."""
    if isinstance(value, Rows):
        dtype, shape = _dtype_name(value.dtype), tuple(value.shape)
        yield SiteValue(site, value, f"{dtype} {shape}", dtype, shape, calls)
        return
    tensors, text = leaves(value), _describe(value)
    found = list(zip(leaf_places(value), tensors, strict=True))
    held = _in_containers(value)
    if 0 < len(held) < len(found):
        notes.append(f"'{site}' has {len(found) - len(held)} more tensors inside of objects, such as a key-value cache")
        found = [(place, tensor) for place, tensor in found if id(tensor) in held]
    if len(found) > MOST_PARTS:
        notes.append(f"'{site}' has {len(found)} tensors, of which the first {MOST_PARTS} are shown")
    if not found:
        yield SiteValue(site, None, text, "", (), calls)
    for place, tensor in found[:MOST_PARTS]:
        named = site._replace(index=site.index + write_subscripts(place))
        entry = _entry(named, tensor, text if not place else f"{describe(tensor)}, of {text}", calls)
        yield entry._replace(parts=_ways(value, place))


def _over_calls(cache: Cache, site: Site, entry: SiteValue) -> SiteValue:
    """Add what is known of the other calls: statistics of each, and the whole sequence if they are steps of one."""
    try:
        calls = cache.calls(site)
        place = entry.site.subscripts[len(site.subscripts) :]
        parts = [get_part(value, place) for value in calls]
    except HooklineError:  # A value was overwritten, or a part is not in every call.
        return entry
    if len(parts) < 2 or entry.source is None or not all(isinstance(part, Tensor) for part in parts):
        return entry
    along, numbers = along_calls(cache, site)
    chosen = range(0, len(parts), -(-len(parts) // MOST_CALLS))
    stats = {name: [measure(dense(parts[at]), name) for at in chosen] for name in OF_CALLS}
    whole = _sequence(cache, entry.site) if along == "step" else None
    over = OverCalls(along, [numbers[at] for at in chosen], len(parts), whole is not None, stats)
    if whole is None:
        return entry._replace(over=over)
    return _entry(entry.site, whole, describe(whole), entry.calls)._replace(over=over, parts=entry.parts)


def _sequence(cache: Cache, site: Site) -> Tensor | None:
    """Return the tokens of a whole generation as one value; None if the calls are no such tokens."""
    try:
        return cache.select(str(site)).tokens(str(site))
    except HooklineError:
        return None


def _ways(value: Any, place: tuple[Any, ...]) -> tuple[tuple[int | str, ...], ...]:
    """Return all ways to write each subscript of `place`: an index, an index from the end, the name of a field."""
    found = []
    for key in place:
        part, parts = get_part(value, (key,)), list(children(value) or ())
        at = parts.index(key) if key in parts else 0
        named = fields(value)[at : at + 1]
        found.append(
            tuple(way for way in dict.fromkeys((key, at, at - len(parts), *named)) if _leads_to(value, way, part))
        )
        value = part
    return tuple(found)


def _leads_to(value: Any, way: Any, part: Any) -> bool:
    try:
        return isinstance(way, (int, str)) and get_part(value, (way,)) is part
    except SiteError:
        return False


def _in_containers(value: Any, depth: int = 0) -> set[int]:
    """Return the ids of tensors in tuples, dicts and other containers, without those inside other objects."""
    if isinstance(value, Tensor):
        return {id(value)}
    parts = (children(value) or {}) if depth < DEEPEST else {}
    return {one for part in parts.values() for one in _in_containers(part, depth + 1)}


def _entry(site: Site, tensor: Tensor, text: str, calls: int) -> SiteValue:
    if tensor.is_meta:
        return SiteValue(site, None, f"{text} without data", _dtype_name(tensor.dtype), tuple(tensor.shape), calls)
    try:
        source = dense(tensor, complex_as_size=False)
    except (RuntimeError, NotImplementedError) as error:
        return SiteValue(site, None, f"{text}, which can't be read: {error}", _dtype_name(tensor.dtype), (), calls)
    if source.is_complex():
        text += ", shown by size"
    return SiteValue(site, source, text, _dtype_name(tensor.dtype), tuple(source.shape), calls)


def _describe(value: Any) -> str:
    if isinstance(value, StaleValue):
        return str(value)
    tensors = leaves(value)
    if isinstance(value, Tensor) or not tensors:
        return describe(value)
    return f"{describe(value)}: {dtypes_and_shapes(tensors)}"


def _dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
