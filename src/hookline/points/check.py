"""`check`: run a user's model to test that its hook points work, and report the results as a table."""

from __future__ import annotations

import random
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor, nn

from hookline import Hooks, Site
from hookline._kernel import (
    ATOMS,
    Names,
    describe,
    is_of_hookline,
    is_scripted,
    leaves,
    map_tensors,
    refuse_flags,
    resting,
    share_for_now,
    unwrap,
    why_not_called,
)
from hookline._scan.fake_run import refuse_lazy
from hookline._scan.restore_modules import module_restorer
from hookline._tables import Table, Tabular, count
from hookline.errors import HooklineError, SiteError
from hookline.points.caching import CacheOptions, captures, collect
from hookline.points.hook_points import SILENT, HookPoint, HookToAdd
from hookline.points.hooked_model import HookedRoot, auto_hook, points_of

Key = tuple[str, str]  # The path of a module, and the name of a part of its state.


FIRES = "every point fires"
EDITS = "an edit changes the output"
GRADIENTS = "backward hooks fire"
VALUES = "values are those of the bare model"
RESTORED = "everything is restored"
CHECKS = (FIRES, EDITS, GRADIENTS, VALUES, RESTORED)


class PointRow(NamedTuple):
    """The result of one check, or of a check at one point: "passed", "failed", or "listed" with the reason."""

    check: str
    point: str
    result: str
    detail: str


class Report(Tabular, Sequence[PointRow]):
    """The results of `check`; true if nothing failed. Prints as a table."""

    def __init__(self, model: str, points: int, found: list[PointRow]) -> None:
        self.rows: list[PointRow] = []
        for name in CHECKS:
            rows = [row for row in found if row.check == name]
            failed = any(row.result == "failed" for row in rows)
            listed = sum(row.result == "listed" for row in rows)
            detail = f"{listed} of {count(points, 'point')} listed" if listed else ""
            self.rows += rows if failed else [PointRow(name, "", "passed", detail), *rows]
        self.title = f"{model}, {count(points, 'hook point')}: {'all is well' if self.ok else 'something failed'}"

    @property
    def ok(self) -> bool:
        """True if nothing failed."""
        return not self.failures

    @property
    def failures(self) -> list[PointRow]:
        """The rows that failed."""
        return [row for row in self.rows if row.result == "failed"]

    def __bool__(self) -> bool:
        return self.ok

    @overload
    def __getitem__(self, index: int) -> PointRow: ...
    @overload
    def __getitem__(self, index: slice) -> list[PointRow]: ...
    def __getitem__(self, index: int | slice) -> PointRow | list[PointRow]:
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    def _table(self) -> Table:
        return Table(PointRow._fields, self.rows, self.title, names="")


def check(
    model: nn.Module | type[nn.Module],
    input_kwargs: Mapping[str, Any],
    init_kwargs: Mapping[str, Any] | None = None,
    strict: bool = False,
) -> Report:
    """Run a model, or an instance of a class, to test that its hook points work. The model's state is restored.

    >>> check(nn.Linear(4, 2), {"input": torch.ones(3, 4)})
    Linear, 1 hook point: all is well
    check                               point  result  detail
    ──────────────────────────────────  ─────  ──────  ──────
    every point fires                          passed
    an edit changes the output                 passed
    backward hooks fire                        passed
    values are those of the bare model         passed
    everything is restored                     passed

    Args:
        input_kwargs: The keyword arguments of the model.
        init_kwargs: The keyword arguments of the class, if `model` is one.
        strict: Raise if anything fails.
    """
    refuse_flags(strict=strict)
    if not isinstance(input_kwargs, Mapping):
        raise HooklineError(f"check calls model(**input_kwargs): give a dict, not {describe(input_kwargs)}")
    if init_kwargs is not None and not isinstance(init_kwargs, Mapping):
        raise HooklineError(f"check calls the class with **init_kwargs: give a dict, not {describe(init_kwargs)}")
    if isinstance(model, nn.Module) and init_kwargs:
        raise HooklineError("init_kwargs is for a class, and this is a model")
    given: Any = model
    if not callable(given):
        raise SiteError(f"check takes a torch.nn.Module, or a class of them, not {describe(given)}")
    with kept_random_numbers():
        instance: Any = model if isinstance(model, nn.Module) else model(**init_kwargs or {})
        if not isinstance(instance, nn.Module):
            raise SiteError(f"check takes a torch.nn.Module, or a class of them; {model!r} gave {describe(instance)}")
        refuse_lazy(instance, "check")
        report = _report(instance, input_kwargs)
    if strict and not report:
        failures = [f"{row.check}: {' '.join(filter(None, (row.point, row.detail)))}" for row in report.failures]
        raise HooklineError("\n  ".join([report.title, *failures]))
    return report


def _report(model: nn.Module, given: Mapping[str, Any]) -> Report:
    is_own = isinstance(model, HookedRoot)
    hooked: HookedRoot = model if is_own else auto_hook(model)  # type: ignore[assignment]
    try:
        with resting():
            compared = BothRuns(hooked, given)
            return Report(type(unwrap(model)).__name__, len(compared.names), list(compared.found()))
    finally:
        if not is_own:
            hooked.unwrap()


class BothRuns:
    """Runs of one model, each from the same state: bare, with torch's own hooks, and with hook points."""

    def __init__(self, hooked: HookedRoot, given: Mapping[str, Any]) -> None:
        self.points = points_of(hooked)
        self.model = self.points.model
        self.given = given
        self.names = dict(self.points.read())
        self.state = State(self.model)
        self.reasons: dict[str, str] = {}
        self.sites = {name: self.points.site(point) for name, point in self.names.items() if _is_own(point)}

    def found(self) -> Iterator[PointRow]:
        """Run all checks, and yield a row for each."""
        bare = self.run()  # An error in a run without hooks is the model's, so it is not caught.
        try:
            left = self.state.read()
            yield from self._compare(bare, self.run(), VALUES, "two runs of the bare model differ")
            seen, called = self._watched(bare)
            calls, passed, output = self._observed()
            yield from self._fires(calls, called)
            yield from self._compare(bare, output, VALUES, "the output differs from that of the bare model")
            yield from self._values(passed, seen)
            yield from self._left_behind(left)
            fired = [name for name in self.names if calls.get(name)]
            yield from self._edits(bare, fired)
            yield from self._gradients(fired)
        except HooklineError as error:
            yield PointRow(FIRES, "", "failed", str(error))
        except Exception as error:
            yield PointRow(FIRES, "", "failed", f"the model fails while it is hooked: {type(error).__name__}: {error}")
        finally:
            self.state.close()
        yield from self._left_behind(None)

    def run(self, *wanted: HookToAdd, block: Hooks | None = None) -> Any:
        """Run the model once with hook functions, inside a block."""
        self.state.restore()  # This comes before hooks are attached, since it would remove them.
        with block or nullcontext(), self.points.opened(list(wanted)):
            return self.model(**map_tensors(_fresh, dict(self.given), in_objects=True))

    def _compare(self, one: Any, other: Any, check: str, problem: str) -> Iterator[PointRow]:
        if not is_same(one, other):
            yield PointRow(check, "", "failed", problem)

    def _watched(self, bare: Any) -> tuple[dict[str, Any], set[str]]:
        """Return the values that torch's own hooks see, and the names of the points; nothing if the output changes."""
        seen: dict[str, Any] = {}
        modules = dict(Names(self.model).once())
        paths = {name: site.path for name, site in self.sites.items() if not site.member}
        handles = [
            modules[path].register_forward_hook(_keeping(seen, name)) for name, path in paths.items() if path in modules
        ]
        try:
            output = self.run()
        finally:
            for handle in handles:
                handle.remove()
        return (seen, set(seen)) if is_same(bare, output) else ({}, set())

    def _observed(self) -> tuple[dict[str, int], dict[str, Any], Any]:
        """Run with hooks that change nothing; return how often each point fired, the values, and the output."""
        calls: dict[str, int] = {}

        def observe(_tensor: Tensor, hook: HookPoint) -> None:
            calls[hook.name or ""] = calls.get(hook.name or "", 0) + 1

        block = captures(self.model, self.sites, CacheOptions(), SILENT)
        output = self.run(*(HookToAdd(point, observe, "fwd", SILENT) for point in self.names.values()), block=block)
        passed = collect(block.cache, self.sites)
        self.reasons = passed.reasons
        for name in passed:
            calls.setdefault(name, 0)
        return calls, passed, output

    def _left_behind(self, bare: Any) -> Iterator[PointRow]:
        for place, change in self.state.leftovers(bare):
            yield PointRow(RESTORED, "", "failed", f"{change} of {place!r}" if place else change)

    def _fires(self, calls: dict[str, int], called: set[str]) -> Iterator[PointRow]:
        for name in self.names:
            if calls.get(name):
                continue
            if name in calls:
                yield PointRow(FIRES, name, "listed", "no tensor passes here")
            elif name in called and not self._is_known(self.sites[name]):
                yield PointRow(FIRES, name, "failed", "torch's own hook was called, this point was not")
            else:
                yield PointRow(FIRES, name, "listed", self.reasons.get(name, "not called"))

    def _is_known(self, site: Site) -> bool:
        """Return True if hookline knows why a module is not called. torch's own hooks may cause it to be called."""
        return why_not_called(site.path, dict(Names(self.model).once())[site.path], self.model) != ""

    def _values(self, passed: dict[str, Any], seen: dict[str, Any]) -> Iterator[PointRow]:
        for name in passed:
            if name in seen and not is_same(passed[name], seen[name]):
                yield PointRow(VALUES, name, "failed", "what passed is not what torch's own hook saw")

    def _edits(self, bare: Any, fired: list[str]) -> Iterator[PointRow]:
        if not leaves(bare):
            yield PointRow(EDITS, "", "listed", f"the output holds no tensor: {describe(bare)}")
            return
        for name in fired:
            edited: list[str] = []
            try:
                output = self.run(HookToAdd(self.names[name], _noising(edited), "fwd", SILENT))
            except HooklineError as error:
                yield PointRow(EDITS, name, "failed", str(error))
                continue
            except Exception:  # The model fails on the changed value, so the change had an effect.
                continue
            if not edited:
                yield PointRow(EDITS, name, "listed", "only numbers that are not continuous pass here")
            elif is_same(bare, output):
                yield PointRow(EDITS, name, "failed", "the output stays the same under this change")

    def _gradients(self, fired: list[str]) -> Iterator[PointRow]:
        arrived: set[str | None] = set()

        def observe(_gradient: Tensor, hook: HookPoint) -> None:
            arrived.add(hook.name)

        bare = self._backward()
        if bare is None:
            yield PointRow(GRADIENTS, "", "listed", "the output does not require grad")
            return
        sites = {name: site._replace(port="grad_output") for name, site in self.sites.items() if name in fired}
        block = captures(self.model, sites, CacheOptions(), SILENT)
        wanted = [HookToAdd(self.names[name], observe, "bwd", SILENT) for name in fired]
        hooked = self._backward(*wanted, block=block)
        reasons = collect(block.cache, sites).reasons
        for name in fired:
            if name not in arrived:
                reason = reasons.get(name, "")
                impossible = "can get no gradient" in reason
                reason = reason if impossible else "no gradient arrives: nothing in the output depends on this value"
                yield PointRow(GRADIENTS, name, "listed" if impossible else "failed", reason)
        yield from self._compare(bare, hooked, VALUES, "the gradients of the parameters differ")

    def _backward(self, *wanted: HookToAdd, block: Hooks | None = None) -> dict[str, Tensor | None] | None:
        """Run forward and backward, and return the gradients of the parameters."""
        with torch.enable_grad():
            output = self.run(*wanted, block=block)
            losses = [tensor.abs().sum() for tensor in leaves(output) if tensor.requires_grad]
            if not losses:
                return None
            torch.stack([loss.double() for loss in losses]).sum().backward()
        return {name: parameter.grad for name, parameter in self.model.named_parameters()}


def _is_own(point: Any) -> bool:
    return isinstance(point, HookPoint)


def _fresh(tensor: Tensor) -> Tensor:
    return share_for_now(tensor.detach()).requires_grad_(tensor.requires_grad)


def _keeping(seen: dict[str, Any], name: str) -> Callable[..., None]:
    def keep(_module: nn.Module, _args: Any, output: Any) -> None:
        seen[name] = map_tensors(lambda tensor: tensor.detach().clone(), output)

    return keep


def _noising(edited: list[str]) -> Callable[..., Tensor | None]:
    """Return a hook that adds different noise to each element, so that no normalisation can remove it."""
    generator = torch.Generator().manual_seed(0)

    def noise(tensor: Tensor, hook: Any) -> Tensor | None:
        if not (tensor.is_floating_point() or tensor.is_complex()):
            return None
        edited.append(hook.name)
        noise = torch.rand(tensor.shape, generator=generator).to(tensor.device, tensor.dtype)
        return tensor + noise * (1 + tensor.detach().abs())

    return noise


class State:
    """The state of a model before a check. `restore` puts it back, `leftovers` yields the differences."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = [(path, module) for path, module in Names(model).once() if not is_scripted(module)]
        seen: set[int] = set()
        self._restorers = [module_restorer(module, seen) for _, module in self._modules]
        # Keeps all objects alive, so that no id is reused.
        self._held = [dict(module.__dict__) for _, module in self._modules]
        self._gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
        self._tensors = [(tensor, share_for_now(tensor.detach())) for _, tensor in self._named_tensors()]
        self._random = _random_numbers()
        self._before = self.read()

    def restore(self) -> None:
        """Put everything back; gradients stay None until `close`."""
        for put_back in self._restorers:
            put_back()
        with torch.no_grad():
            for tensor, before in self._tensors:
                if not is_same(tensor, before):
                    tensor.copy_(before)
        for parameter, _ in self._gradients:
            parameter.grad = None
        _set_random_numbers(self._random)

    def close(self) -> None:
        """Put everything back, including gradients."""
        self.restore()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient

    def read(self) -> dict[Key, Any]:
        """Return the state in a form that can be compared: tensors by their numbers, other objects by identity."""
        found: dict[Key, Any] = {}
        for path, module in self._modules:
            found[path, "its class"] = type(module)
            names = module.__dict__
            # A hook that was there before may get a new shadow, if another one came and went.
            found |= {(path, f"{key!r}"): "" if is_of_hookline(one) else _token(one) for key, one in names.items()}
        for (path, name), tensor in self._named_tensors():
            found[path, f"the numbers of {name!r}"] = share_for_now(tensor.detach())
            found[path, f"the gradient of {name!r}"] = id(tensor.grad) if tensor.is_leaf else 0
        return found | {("", f"the random numbers {kind}"): state for kind, state in _random_numbers().items()}

    def leftovers(self, bare: Mapping[Key, Any] | None = None) -> Iterator[Key]:
        """Yield the keys that differ from the state before, or from `bare`, the state after a run without hooks."""
        before, now = self._before, self.read()
        reference = before if bare is None else bare
        for key in {**reference, **now}:
            mine, other = now.get(key), reference.get(key)
            if _is_equal(mine, other):
                continue
            changes_by_itself = not isinstance(mine, Tensor) and not _is_equal(other, before.get(key))
            if bare is None or not changes_by_itself:
                yield key

    def _named_tensors(self) -> Iterator[tuple[Key, Tensor]]:
        seen: set[int] = set()
        for path, module in self._modules:
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield (path, name), tensor


@contextmanager
def kept_random_numbers() -> Iterator[None]:
    """Restore the state of all random number generators at the end of a block."""
    before = _random_numbers()
    try:
        yield
    finally:
        _set_random_numbers(before)


def is_same(one: Any, other: Any) -> bool:
    """Return True if two values hold equal tensors, bit by bit."""
    ones, others = leaves(one), leaves(other)
    return len(ones) == len(others) and all(map(_are_same, ones, others))


def _are_same(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype or one.device != other.device:
        return False
    if torch.equal(one, other):
        return True
    has_nan = one.is_floating_point() or one.is_complex()
    return has_nan and torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True)


def _token(value: Any) -> Any:
    if isinstance(value, (dict, OrderedDict)):
        return tuple((key, id(part)) for key, part in value.items())
    if isinstance(value, (list, tuple, set, deque)):
        return tuple(map(id, value))
    return value if isinstance(value, ATOMS) else id(value)


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and is_same(one, other)
    return type(one) is type(other) and bool(one == other)


def _random_numbers() -> dict[str, Any]:
    found: dict[str, Any] = {"of torch": torch.get_rng_state(), "of Python": random.getstate()}
    if torch.cuda.is_initialized():
        found |= {f"of cuda:{index}": state for index, state in enumerate(torch.cuda.get_rng_state_all())}
    if "numpy" in sys.modules:
        name, numbers, *rest = sys.modules["numpy"].random.get_state()
        found["of numpy"] = (name, tuple(numbers.tolist()), *rest)  # A tuple, since arrays can't be compared with ==.
    return found


def _set_random_numbers(states: Mapping[str, Any]) -> None:
    torch.set_rng_state(states["of torch"])
    random.setstate(states["of Python"])
    if "of numpy" in states:
        sys.modules["numpy"].random.set_state(states["of numpy"])
    for kind, state in states.items():
        if kind.startswith("of cuda:"):
            torch.cuda.set_rng_state(state, int(kind.partition(":")[2]))
