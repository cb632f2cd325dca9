"""Taps on parameters and buffers: on the tensor that is read from a module, and on the operations that take it.

While a module has such taps, its class is replaced by a subclass. The subclass has a property for each hooked name,
which reads the current tensor. A tap with the port `param` acts on that tensor. For a tap at an operation, the property
returns an `Operand`: an alias that notices when an operation takes it.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from hookline._engine import compiled, parameter_operations
from hookline._engine.action import Call
from hookline._engine.activation_checkpoint import is_only_backward, is_replaying
from hookline._engine.apply_to_part import act
from hookline._engine.call_event import event_of
from hookline._engine.functions import (
    Function,
    gives_tensors,
    is_followed,
    may_be_fused,
    name_of,
    operate,
    refuse_in_autograd_function,
)
from hookline._engine.parameter_operations import Role, as_operands, operand_of
from hookline._engine.run_call import run_event
from hookline._engine.tap import Tap
from hookline._engine.unsupported_tracing import refuse_fx, refuse_tracing
from hookline._open_blocks import open_blocks
from hookline._sites.tree import refuse_data_parallel
from hookline._torch import FUSED_MODULES, REPLICATE, frame_at, uncompiled
from hookline.errors import HooklineError

KEY = "_hookline_reads"
_REGISTERING = (nn.Module.register_buffer.__code__, nn.Module.register_parameter.__code__)
_FUSING = frozenset(id(kind.forward.__code__) for kind in FUSED_MODULES)
_made: WeakValueDictionary[tuple[type[nn.Module], tuple[str, ...]], type[nn.Module]] = WeakValueDictionary()
_KIND = "_hookline_kind"  # An attribute of hookline's subclasses: the class that the module had before.


class _Silent(nn.Module):
    """A base that hides our subclass from a class that keeps a list of its subclasses, or checks them."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        pass


class Reads:
    """The taps on the parameters of one module, by name, and the class that the module had before."""

    method = None  # The module's `__dict__` holds no shadow: its class reads the parameters.

    def __init__(self, module: nn.Module) -> None:
        self.module: nn.Module | None = module
        self.kind: type[nn.Module] = vars(type(module)).get(_KIND, type(module))
        self.taps: dict[str, tuple[Tap, ...]] = {}  # Taps that act on the tensor that is read.
        self.operations: dict[str, tuple[Tap, ...]] = {}  # Taps that act on the operations that take it.
        self.untraceable: set[str] = set()  # The names whose taps dynamo can't trace.

    def read(self, name: str, value: Tensor) -> Tensor:
        """Return the value that is read in place of a parameter."""
        # Each attribute is read once: another thread may detach the last tap.
        module, taps, operations = self.module, self.taps.get(name, ()), self.operations.get(name, ())
        if module is None or not (taps or operations):
            return value
        opened = open_blocks.get()
        refuse_tracing()
        refuse_fx((taps or operations)[0].site)
        event = event_of((module, name), taps, opened)
        for tap, number in event.taps:
            call = Call(
                tap.site, module, (), {}, number, event.notes, tap.session.model(), event.passing_for(tap.session)
            )
            value = act(tap, value, call, event)
        if operations and (is_replaying() or any(tap.acts(opened) for tap in operations)):
            return value if self._is_fused(operations) else operand_of(value, ((self, name),), on_operation)
        return value

    def _is_fused(self, operations: tuple[Tap, ...]) -> bool:
        """Return True if torch's attention may read the parameter on its fast path, and the taps only observe.

        An `Operand` would turn the fast path off.

        `read` calls this directly, and the property calls `read`: frame 3 is the code that reads the property.
        """
        return id(frame_at(3).f_code) in _FUSING and may_be_fused() and not any(tap.changes for tap in operations)

    def put(self, taps: tuple[Tap, ...], name: str) -> None:
        """Set the taps on one name, in their order. Each table changes in one step: another thread may read it."""
        ordered = sorted(taps, key=lambda tap: tap.order)
        is_traceable = all(compiled.is_traceable(tap) and tap.site.port in ("output", "param") for tap in taps)
        self.untraceable = (self.untraceable - {name}) | (set() if is_traceable else {name})
        for held, chosen in (
            (self.taps, tuple(tap for tap in ordered if not tap.function)),
            (self.operations, tuple(tap for tap in ordered if tap.function)),
        ):
            if chosen:
                held[name] = chosen
            else:
                held.pop(name, None)

    def __deepcopy__(self, _memo: Any) -> None:
        return None  # A copy of a module has no taps.

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

    def of(self, name: str) -> tuple[Tap, ...]:
        """Return the taps on one name."""
        return self.taps.get(name, ()) + self.operations.get(name, ())


_read_uncompiled: Callable[[Reads, str, Tensor], Tensor] = uncompiled(Reads.read)


def attach(tap: Tap) -> None:
    """Attach a tap to every module that holds its parameter."""
    for module, name in tap.holders:
        reads = _reads_of(module) or Reads(module)
        tap.shadow = reads  # Before anything can fail, so that detaching leaves the module as it was.
        module.__dict__[KEY] = reads
        if tap.function:
            parameter_operations.in_use.add(id(tap))
        reads.put((*reads.of(name), tap), name)
        _set_class(module, reads)


def detach(tap: Tap) -> None:
    """Detach a tap. The last tap of a module leaves the module as it was found.

    Every step can be repeated, so that a second attempt continues where Ctrl-C interrupted the first.
    """
    for module, name in tap.holders:
        reads = _reads_of(module)
        if reads is not None:
            reads.put(tuple(one for one in reads.of(name) if one is not tap), name)
            _set_class(module, reads)
    _release()
    parameter_operations.in_use.discard(id(tap))


def strip(module: nn.Module) -> None:
    """Give a module its own class back, whatever state it is in."""
    if KEY not in module.__dict__ and _KIND not in vars(type(module)):
        return
    reads = _reads_of(module) or Reads(module)
    reads.taps, reads.operations = {}, {}
    _set_class(module, reads)
    _release()


def _reads_of(module: nn.Module) -> Reads | None:
    """Return the taps on a module's parameters; None for a copy of the module, which only refers to them."""
    reads: Reads | None = module.__dict__.get(KEY)
    return reads if reads is not None and reads.module is module else None


def _release() -> None:
    """Turn operands that no tap needs any more into plain tensors: the model may have kept them."""
    with parameter_operations.changing:
        living = list(parameter_operations.living.items())
    for number, one in living:
        if not any(name in reads.operations for reads, name in one.role.origins):
            parameter_operations.living.pop(number, None)
            one.__class__ = Tensor  # type: ignore[assignment]
            one.__dict__.clear()  # Last: an operation on another thread may be reading it.


def parameter_taps_on(module: nn.Module) -> tuple[Tap, ...]:
    """Return the taps on the parameters of a module."""
    reads = module.__dict__.get(KEY)
    if reads is None:
        return ()
    return tuple(tap for name in reads.taps | reads.operations for tap in reads.of(name))


def _set_class(module: nn.Module, reads: Reads) -> None:
    """Give a module the class that reads its hooked names, or its own class back if no name is hooked."""
    names = tuple(sorted(reads.taps | reads.operations))
    kind = _class_with(reads.kind, names) if names else reads.kind
    now = type(module)
    if now is reads.kind or vars(now).get(_KIND) is reads.kind:
        object.__setattr__(module, "__class__", kind)  # Bypasses a `__setattr__` of the class.
    elif names:
        raise HooklineError(f"{now.__name__} has changed its class while its parameters were hooked")
    else:  # Somebody has subclassed our class since, as parametrizing does: remove ours from the bases.
        now.__bases__ = tuple(reads.kind if vars(base).get(_KIND) is reads.kind else base for base in now.__bases__)
    if not names:
        module.__dict__.pop(KEY, None)
        reads.module = None


def _class_with(kind: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """Return the subclass that reads these names through their taps. It is always the same, for dynamo's guards."""
    made = _made.get((kind, names))
    if made is None:
        made = _made[kind, names] = _make_class(kind, names)
        compiled.keep_class(made)
    return made


def _make_class(kind: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    members: dict[str, Any] = {name: _reader(name) for name in names}
    members |= {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    members |= {"__reduce_ex__": _reducer(kind), REPLICATE: refuse_data_parallel, _KIND: kind}
    if hasattr(kind, "__deepcopy__"):
        members["__deepcopy__"] = _copier(kind)
    try:
        # Does not call the metaclass, which may keep a list of its classes.
        made: type[nn.Module] = type.__new__(type(kind), kind.__name__, (_Silent, kind), members)
    except Exception as error:
        raise HooklineError(
            f"parameters of a {kind.__name__} can't be hooked, since it can't be subclassed: {error}"
        ) from None
    return made


def _reader(name: str) -> property:
    """Make the property that reads a parameter or buffer."""

    def read(self: nn.Module) -> Any:
        held = self.__dict__
        reads = held.get(KEY)
        tensors = held["_parameters"] if name in held["_parameters"] else held["_buffers"]
        if name not in tensors:
            if name not in held:
                raise AttributeError(name)  # nn.Module then raises its usual error.
            return held[name]
        value = tensors[name]
        if value is None or reads is None or reads.module is not self:
            return value
        if is_dynamo_compiling():
            return compiled.read_traced(reads, name, value, _on_operation_traced, _read_uncompiled)
        if frame_at(1).f_code in _REGISTERING:  # register_buffer and register_parameter only check the name.
            return value
        try:
            return reads.read(name, value)
        except AttributeError as error:  # Python would take it for a missing attribute, and bypass the hook.
            raise HooklineError(f"reading '{name}' raised {type(error).__name__}: {error}") from error

    def write(self: nn.Module, value: Any) -> None:
        self.__dict__[name] = value  # Not a parameter or buffer: nn.Module sets those itself.

    return property(read, write)


def _reducer(kind: type[nn.Module]) -> Callable[..., Any]:
    """Make a `__reduce_ex__` that copies and pickles a module without taps, as an instance of its original class."""

    def reduce(self: nn.Module, protocol: Any) -> Any:
        reduced: Any = kind.__reduce_ex__(self, protocol)
        function, args, *rest = reduced
        function, args = (kind if one is type(self) else one for one in (function, args))
        if rest and isinstance(rest[0], dict):
            rest[0] = {name: held for name, held in rest[0].items() if name != KEY}
        if function is copyreg.__newobj__ and args == (type(self),):  # type: ignore[attr-defined]
            # With `__newobj__` pickle insists on the class of the object, but the copy must have the original class.
            function, args = copyreg._reconstructor, (kind, object, None)  # type: ignore[attr-defined]
        return function, args, *rest

    return reduce


def _copier(kind: Any) -> Callable[..., Any]:
    """Make a `__deepcopy__` that copies a module without taps, for a class that defines one."""

    def deepcopy(self: nn.Module, memo: dict[int, Any]) -> Any:
        copied = kind.__deepcopy__(self, memo)
        if vars(type(copied)).get(_KIND) is kind:
            object.__setattr__(copied, "__class__", kind)
            copied.__dict__.pop(KEY, None)
        return copied

    return deepcopy


def on_operation(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], found: list[Role]) -> Any:
    """Run an operation that takes operands. A view or cast of one is an operand again. Taps act on all other results.

    `Operand.__torch_function__` calls this directly: frame 2 is the code that runs the operation.
    """
    name = name_of(function)
    origins = tuple(dict.fromkeys(origin for one in found for origin in one.origins))
    if name == "grad_fn" and frame_at(2).f_code in _REGISTERING and (taps := origins[0][0].of(origins[0][1])):
        site = taps[0].site
        raise HooklineError(f"'{site}' can't be assigned to another name while it is hooked: tie it outside the block")
    if not gives_tensors(function) or is_only_backward():
        return function(*args, **kwargs)
    if is_followed(name, args):
        return as_operands(function(*args, **kwargs), lambda one: operand_of(one, origins, on_operation))
    return _tapped(function, name, args, kwargs, origins)


def _tapped(
    function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], origins: tuple[tuple[Reads, str], ...]
) -> Any:
    opened = open_blocks.get()
    chosen = {tap: None for reads, key in origins for tap in reads.operations.get(key, ())}
    for tap in chosen:
        if not tap.fired and tap.acts(opened):
            tap.ran = tap.ran or {}
            tap.ran[name] = None
    wanted = sorted((tap for tap in chosen if tap.wants(name)), key=lambda tap: tap.order)
    if not wanted:
        return function(*args, **kwargs)
    # The event's key is from a tap that acts again in a recomputation. Only taps that change something do.
    first = next((tap for tap in wanted if tap.changes), wanted[0])
    event = event_of((first.holders[0], name), wanted, opened, lambda tap: tap.next_operation(name))
    if not event.taps:
        return function(*args, **kwargs)
    refuse_in_autograd_function(event)
    return operate(Function(function, name, args, kwargs, event), first.module, run_event)


def _on_operation_traced(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], found: list[Role]) -> Any:
    return compiled.operate_traced(function, args, kwargs, found, _tapped_uncompiled)


_tapped_uncompiled = uncompiled(_tapped)
