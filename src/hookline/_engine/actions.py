"""WHAT is done to a passing value: Save, Set, Apply, Skip, Stop.

An action is called with the value (or the part of it that the site's subscripts name) and the call it belongs to, and
returns what passes on: the very same object, if it leaves the value alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from numbers import Number
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hookline._blocks import call_user
from hookline._cache.budget import Budget
from hookline._cache.record import Guarded, Shared, Source
from hookline._engine import offload
from hookline._engine.guards import refuse_recording, refuse_tangent, refuse_tracers, refuse_transforms
from hookline._engine.operands import Operand, plain
from hookline._sites.language import Site
from hookline._torch import current_transform, may_be_of_cuda_graph, raw_stream, version_of
from hookline._values.copies import (
    Loan,
    copy_all,
    copy_tensor,
    is_parameter,
    is_private,
    may_move,
    share,
    share_detached,
    share_on_any_device,
    share_tensor,
    versions,
)
from hookline._values.fit import Passed, agree, as_returned, fit, put_number, returns_another_structure, takes_tensor
from hookline._values.nested import children, describe, leaves, map_tensors
from hookline.errors import EditError, HooklineError
from hookline.parallel.gather import Gathering, arrived, replicate, share_part, whole
from hookline.parallel.ranks import is_cut

NOTHING: Any = object()


class Call(NamedTuple):
    """The call of a module that an edit takes part in."""

    site: Site
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    number: int
    notes: dict[Any, Any]  # Of this call alone: its hooks share it, those of its gradients too.
    model: nn.Module | None = None  # The model that the hook is on.


class Save:
    """Keep what passes. The model goes on with its own value."""

    kind = "capture"
    observes = True  # Whether the value passes on as it is.

    def __init__(
        self,
        detach: bool = True,
        clone: bool | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        transform: Callable[..., Any] | None = None,
        with_call: bool = False,
        budget: Budget | None = None,
        gathering: Gathering | None = None,
    ) -> None:
        self.detach = detach
        self.clone = clone
        self.device = device
        self.dtype = dtype
        self.transform = transform
        self.with_call = with_call
        self.budget = budget
        # A value of the graph itself can't be a copy: autograd.grad(loss, copy) would not find it.
        self.keeps_own = not detach and clone is not True
        self.quick = detach and clone is not True and (device, dtype, transform) == (None, None, None)
        self.offloads = detach and device is not None and torch.device(device).type == "cpu"
        stays = detach and (device is None or self.offloads)  # What is on the CPU, that is: see the hot path.
        self._is_usual = stays and (clone, dtype, transform) == (None, None, None)
        self.gathering = gathering  # In a process that is one of several: see `whole`.
        self._settle()

    def _settle(self) -> None:
        """Take the hot path if no value can be a part of one."""
        is_alone = self.gathering is None or self.gathering.is_alone
        self.copies_on_write = self._is_usual and is_alone
        self.refers = self.quick and self.clone is False and is_alone
        self.is_traceable = self.detach and (self.gathering is None or not self.gathering.alike)

    def whole(self, value: Any, site: Site) -> Any:
        """Return a value whole, gathered from all ranks, where it is in parts; see parallel/gather.py."""
        if self.gathering is None:
            return value
        found = self.gathering.whole(value, site)
        self._settle()
        if self.keeps_own and found is not value:
            raise HooklineError("detach=False gives the graph's own tensor, which is in parts here; add gather=False")
        return found

    def keep(self, value: Any, call: Call | None = None, is_new: bool = False) -> Any:
        """Return what to keep of a whole value. On the CPU the hot path in shadow.py does the usual case.

        Args:
            is_new: Whether the forward is known to have made it, and nobody else to hold it.
        """
        if not self.quick or type(value) is not Tensor:
            sends = self.offloads and self.transform is None and type(value) is Tensor and value.is_cuda
            sent = offload.send(value.detach(), self.dtype) if sends else None
            return self.keep_part(value, False, call) if sent is None else sent
        moves = is_new or (self.clone is None and may_move(value))  # Before there is a second tensor with its memory.
        source = value.detach()  # Always: an autograd function may make its output a part of the graph later.
        try:
            version = version_of(source)
        except RuntimeError:  # Torch counts no writes in inference mode.
            return self.keep_part(value, False, call)
        if self.clone is False:
            return Shared(source, source, version)
        if value.is_quantized or current_transform() is not None:
            return self.keep_part(value, False, call)
        if value.is_cuda:
            if not _may_share_on_cuda(value) or not moves:  # The first refuses to keep what a graph records.
                return copy_tensor(source)
            return Shared(share_on_any_device(source), source, version)  # Foreach functions write through it.
        if value.is_cpu:
            return copy_tensor(source) if is_parameter(value) else share_tensor(source, moves)
        return self.keep_part(value, False, call)

    def keep_part(self, value: Any, is_part: bool, call: Call | None = None) -> Any:
        """Return what to keep of any value. A part of a tensor is copied, or it would hold the whole."""
        if torch.compiler.is_dynamo_compiling():
            return self._keep_compiled(value)
        refuse_tracers(value)
        refuse_transforms(value)
        if self.transform is not None:
            value = self._transformed(value, call)
            if value is None:
                return NOTHING
        sources: list[Source] = []
        sent: dict[int, offload.Copy] = {}
        for tensor in leaves(value) if not self.detach else ():
            refuse_tangent(tensor)
        try:
            kept = map_tensors(lambda tensor: self._keep_tensor(tensor, is_part, sources, sent), value)
        except HooklineError:
            if not self.keeps_own:
                raise
            # It can't be copied: then it is the model's own, as was asked.
            return Guarded(value, [(one, version_of(one), None) for one in leaves(value) if not one.is_inference()])
        if sources and self.keeps_own and self.clone is not False:
            return Guarded(kept, sources, {id(own): _spare(own) for own, _, _ in sources if not is_parameter(own)})
        return offload.together(Guarded(kept, sources) if sources else kept, sent)

    def _keep_compiled(self, value: Any) -> Any:
        """Keep a value from inside a compiled graph, where a copy fuses with what made it."""
        value = map_tensors(Tensor.detach, value)
        if self.transform is not None:
            value = self.transform(value)
            if value is None:
                return NOTHING
        return map_tensors(lambda tensor: tensor.to(self.device, self.dtype or tensor.dtype, copy=True), value)

    def _transformed(self, value: Any, call: Call | None) -> Any:
        """Run the user's transform on the value; it may not touch the model's tensors nor its random numbers."""
        value = plain(value)
        if not self.keeps_own or any(tensor.is_inference() for tensor in leaves(value)):  # No writes are counted there.
            value = map_tensors(share_detached if self.detach else share_tensor, value)
        devices = sorted({tensor.device.index for tensor in leaves(value) if tensor.is_cuda})
        forked = torch.random.fork_rng(devices) if devices else _kept_random_state()  # The first takes 5 µs.
        before = versions(value) if self.keeps_own else None
        with forked:
            kept = _ask(self.transform, self.with_call, value, call)
        if self.keeps_own and versions(value) != before:
            raise EditError("the transform wrote into the model's own value, which it gets with detach=False; copy it")
        return kept

    def _keep_tensor(
        self, tensor: Tensor, is_part: bool, sources: list[Source], sent: dict[int, offload.Copy]
    ) -> Tensor:
        tensor = tensor.plain if isinstance(tensor, Operand) else tensor
        moves = self.clone is None and not is_part and not self.keeps_own and may_move(tensor)
        source = tensor.detach() if self.detach else tensor
        if type(source) is not Tensor and not self.keeps_own:
            if is_cut(source):
                return share_part(source, self.device, self.dtype)
            source = arrived(source)
        if self.offloads and source.is_cuda and (copy := offload.send(source, self.dtype)) is not None:
            stand_in = torch.empty(0, device="cpu")
            sent[id(stand_in)] = copy
            return stand_in
        if source.is_quantized and self.dtype is not None:
            source = source.dequantize()
        if self.device is not None or self.dtype is not None:
            with torch.inference_mode(False) if tensor.is_inference() else nullcontext():
                moved = source.to(self.device, self.dtype or source.dtype)
            if moved is not source:
                return moved
        if tensor.is_inference():
            return self._keep_inference(source, moves, is_part)
        if (self.keeps_own or self.clone is False) and not is_part:
            sources.append((source, version_of(source), None))
            return source
        if self.clone or is_part or is_parameter(tensor):
            return copy_tensor(source)
        return _shared(source, tensor, moves, sources)

    def _keep_inference(self, source: Tensor, moves: bool, is_part: bool) -> Tensor:
        """Copy a tensor made in inference mode into one that autograd can use later."""
        if self.clone is False and self.detach:
            raise HooklineError(
                "clone=False can't tell in inference mode whether a value is overwritten; use clone=None"
            )
        with torch.inference_mode(False):
            return copy_tensor(source) if self.clone or is_part else share_tensor(source, moves)

    def __repr__(self) -> str:
        options = {"detach": True, "clone": None, "device": None, "dtype": None, "transform": None, "with_call": False}
        given = [f"{name}={getattr(self, name)}" for name, usual in options.items() if getattr(self, name) != usual]
        return f"save({', '.join(given + ([repr(self.budget)] if self.budget is not None else []))})"


class Set:
    """Put a given value in the place of what passes."""

    kind = "patch"
    observes = False

    def __init__(
        self, value: Any, check: bool = True, number: Tensor | None = None, gathering: Gathering | None = None
    ) -> None:
        self.value = value
        self.check = check
        self.number = number  # The value as a tensor, for compiled graphs.
        self.gathering = gathering

    def __call__(self, value: Any, call: Call | None, _is_whole: bool) -> Any:
        refuse_tracers(value)
        if self.check and self.number is not None and takes_tensor(value):
            return put_number(self.number, value)  # Dynamo would make a graph for each `self.value` that it sees.
        if self.check:
            return fit(self.value if self.gathering is None else whole(self.value), value, call)
        holds = isinstance(self.value, Tensor) or children(self.value) is not None
        return copy_all(self.value) if holds else self.value

    def __repr__(self) -> str:
        return f"set to {describe(self.value)}"


class Apply:
    """Put `function(value)` in the place of what passes; None leaves it alone."""

    kind = "edit"
    observes = False

    def __init__(
        self,
        function: Callable[..., Any],
        with_call: bool = False,
        check: bool = True,
        clone: bool | None = None,
        gathering: Gathering | None = None,
    ) -> None:
        self.function = function
        self.with_call = with_call
        self.check = check
        self.clone = clone
        self.gathering = gathering

    def __call__(self, value: Any, call: Call | None, whole: bool) -> Any:
        refuse_tracers(value)
        if torch.compiler.is_dynamo_compiling():
            return self._in_graph(value, whole)
        if self.clone is False:
            return self._on_own(value, call, whole)
        loan = Loan(value)  # The function may write into its argument: nobody else sees that.
        result = _ask(self.function, self.with_call, loan.given, call)
        if result is None:
            if loan.is_written():
                raise EditError("the function wrote into its argument but returned None; return the changed value")
            return value
        if self.check and whole:
            agree(result, value, call)
        if self.check and not whole:
            return value if result is loan.given and loan.take_back(result) is value else fit(result, value, call)
        if isinstance(result, Tensor):
            return result if is_private(result) else loan.take_back(result)
        return map_tensors(loan.take_back, result, _in_object=True)

    def _in_graph(self, value: Any, whole: bool) -> Any:
        """The same while dynamo traces, to which neither versions nor the identity of a tuple mean anything."""
        result = self.function(value if self.clone is False else share(value, objects=True))
        if result is None:
            return value
        if self.check and not whole:
            return fit(result, value)
        if self.check:
            agree(result, value)
        return result if self.clone is False else share(result)

    def _on_own(self, value: Any, call: Call | None, whole: bool) -> Any:
        """Give the function the model's own value, as torch's own hooks do: what it writes there, the model sees."""
        result = _ask(self.function, self.with_call, value, call)
        if result is None or result is value:
            return value
        if self.check and whole:
            agree(result, value, call)
        return fit(result, value, call) if self.check and not whole else result

    def __repr__(self) -> str:
        return getattr(self.function, "__name__", None) or repr(self.function)


class Skip:
    """Don't run the module: pass its first argument on, or the given value."""

    kind = "skip"
    observes = False
    gathering = None

    def __init__(self, value: Any = NOTHING, check: bool = True) -> None:
        self.value = value
        self.check = check

    @property
    def is_traceable(self) -> bool:
        """Whether dynamo can trace it: the shape that a number fills is not known there."""
        return not (self.check and isinstance(self.value, Number))

    def output(self, module: nn.Module | None, first: Any, passed: Passed = ((), {})) -> Any:
        """Return what is given instead of running; a module is asked whether its input can stand for its output."""
        refuse_tracers(first)
        if self.value is not NOTHING:
            plain = isinstance(first, Tensor) and is_cut(first) and type(self.value) is Tensor
            if plain or not self.check or torch.compiler.is_dynamo_compiling():
                return replicate(copy_all(self.value), first) if plain else copy_all(self.value)
            return as_returned(self.value, module, first, passed)
        if first is NOTHING:
            raise EditError(
                "called without an argument to pass on; give the value to return, as in skip(model, site, value)"
            )
        other = returns_another_structure(module, first) if module is not None else ""
        if other:
            raise EditError(f"{other}; give the value to return, as in skip(model, site, value)")
        return share(first)  # As an output it may be overwritten; the model's input may not.

    def __repr__(self) -> str:
        return "pass the input on" if self.value is NOTHING else f"give {describe(self.value)}"


class Stop:
    """End the forward when every site that waits for it has fired: see stop.py."""

    kind = "stop"
    observes = True
    gathering = None

    def __repr__(self) -> str:
        return "stop"


Action = Save | Set | Apply | Skip | Stop


@contextmanager
def _kept_random_state() -> Iterator[None]:
    state = torch.default_generator.get_state()
    try:
        yield
    finally:
        torch.default_generator.set_state(state)


def _ask(function: Any, with_call: bool, value: Any, call: Call | None) -> Any:
    """Call a user's function with a value, and the call if it asks for it; the hooks on the model rest meanwhile."""
    try:
        return call_user(call and call.model, function, *((value, call) if with_call else (value,)))
    except TypeError as error:
        _refuse_arguments(function, with_call, error)
        raise


def _refuse_arguments(function: Any, with_call: bool, error: TypeError) -> None:
    """Raise if a user's function does not take what it is called with, and say what it is."""
    try:
        takes = inspect.signature(function)
    except (TypeError, ValueError):  # Of a builtin.
        return
    given, other = ("value, call", "value") if with_call else ("value", "value, call")
    if _takes(takes, given):
        return
    advice = f"; with_call={not with_call} calls it with ({other})" if _takes(takes, other) else ""
    raise EditError(f"the function takes {takes} and is called with ({given}){advice}") from error


def _takes(signature: inspect.Signature, names: str) -> bool:
    try:
        signature.bind(*names.split(", "))
    except TypeError:
        return False
    return True


def _spare(own: Tensor) -> Guarded:
    """Return a copy on write of a tensor of the graph, for when the model overwrites it."""
    sources: list[Source] = []
    return Guarded(_shared(own, own, may_move(own), sources), sources)


def _shared(source: Tensor, tensor: Tensor, moves: bool, sources: list[Source]) -> Tensor:
    """Copy a tensor on write, on CUDA too; what has to be checked on reading is added to the sources."""
    if not source.is_cuda or not _may_share_on_cuda(tensor) or not moves:
        return share_tensor(source, moves)
    kept = share_on_any_device(source)
    sources.append((source, version_of(source), kept))
    return kept


def _may_share_on_cuda(tensor: Tensor) -> bool:
    """Whether torch copies this CUDA tensor right when somebody writes."""
    if raw_stream(tensor.get_device()) != 0:  # The late copy is made on the default stream, unordered with others.
        refuse_recording()
        return False
    if is_parameter(tensor):  # Fused optimizers write into parameters unseen.
        return False
    return not may_be_of_cuda_graph(tensor)  # The memory of compiled CUDA graphs can't be shared.
