"""Taps on functions inside a forward: a `TorchFunctionMode` that is entered for the calls of a module with such taps.

A function call belongs to the module whose forward is running, the innermost one if there are several. Calls in the
module's helper functions and methods belong to it, calls in its children belong to the children. While no forward of
the model is running, a call belongs to the module whose method is running, again the innermost.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable
from functools import lru_cache
from types import AsyncGeneratorType, CoroutineType, FrameType, FunctionType, GeneratorType
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.overrides import TorchFunctionMode

from hookline import _why_nothing_passed as why
from hookline._engine import call_arguments, gradients
from hookline._engine.action import Observer, Skip
from hookline._engine.apply_to_part import act
from hookline._engine.call_event import Called, Choices, Event, event_of
from hookline._engine.tap import Tap
from hookline._engine.unsupported_tracing import refuse_fx
from hookline._open_blocks import call_user, open_blocks
from hookline._sites.calls import is_wanted
from hookline._sites.language import Site
from hookline._sites.tree import Names
from hookline._torch import (
    FUSED_MODULES,
    MODULE_CALL,
    MODULE_CALLS,
    TRACING_MODULES,
    autograd_function_around,
    base_of,
    caller_of,
    current_function_mode,
    first_argument,
    frame_at,
    frames,
    function_mode_stack,
    is_view,
    known_version,
    operator_schemas,
    pop_function_mode,
    push_function_mode,
)
from hookline._values.nested import Arguments, leaves, map_tensors
from hookline.errors import HooklineError

# Torch's name for each of Python's operators, where it differs from Python's.
_OPERATORS = {
    "rsub": "sub", "rdiv": "div", "rtruediv": "div", "truediv": "div", "itruediv": "div_", "idiv": "div_",
    "floordiv": "floor_divide", "rfloordiv": "floor_divide", "ifloordiv": "floor_divide_", "mod": "remainder",
    "rmod": "remainder", "imod": "remainder_", "rpow": "pow", "ipow": "pow_", "radd": "add", "iadd": "add_",
    "rmul": "mul", "imul": "mul_", "isub": "sub_", "rmatmul": "matmul", "and": "bitwise_and", "rand": "bitwise_and",
    "iand": "bitwise_and_", "or": "bitwise_or", "ror": "bitwise_or", "ior": "bitwise_or_", "xor": "bitwise_xor",
    "rxor": "bitwise_xor", "ixor": "bitwise_xor_", "invert": "bitwise_not", "lshift": "bitwise_left_shift",
    "rshift": "bitwise_right_shift", "rlshift": "bitwise_left_shift", "rrshift": "bitwise_right_shift",
    "ilshift": "bitwise_left_shift_", "irshift": "bitwise_right_shift_", "pos": "positive",
}  # fmt: skip
_REFLECTED = (
    "__rsub__", "__rdiv__", "__rtruediv__", "__rpow__", "__rfloordiv__", "__rmod__", "__rlshift__", "__rrshift__",
)  # fmt: skip
_ITEMS = {"getitem": ("input", "index"), "setitem": ("input", "index", "value"), "einsum": ("equation",)}
_NAMESPACES = ("linalg_", "fft_", "special_")
_TENSORS = ("T", "H", "mT", "mH", "data", "real", "imag")  # The properties of a tensor that are tensors.

# Functions whose result has only elements of their argument: a view, a copy, another order or another dtype.
FOLLOWED = frozenset((
    "T", "H", "mT", "mH", "data", "real", "imag", "t", "adjoint", "transpose", "permute", "swapaxes", "swapdims",
    "movedim", "moveaxis", "view", "view_as", "reshape", "reshape_as", "expand", "expand_as", "broadcast_to",
    "squeeze", "unsqueeze", "flatten", "unflatten", "ravel", "narrow", "select", "chunk", "split",
    "split_with_sizes", "tensor_split", "hsplit", "vsplit", "dsplit", "unbind", "diagonal", "as_strided", "unfold",
    "detach", "detach_", "alias", "contiguous", "clone", "to", "type", "type_as", "float", "double", "half",
    "bfloat16", "cfloat", "cdouble", "chalf", "int", "long", "short", "char", "byte", "bool", "cpu", "cuda",
    "requires_grad_", "retain_grad", "pin_memory", "rename", "refine_names", "align_to", "align_as", "as_subclass",
    "unsafe_chunk", "unsafe_split", "view_as_real", "view_as_complex", "resolve_conj", "resolve_neg", "t_",
    "transpose_", "squeeze_", "unsqueeze_", "atleast_1d", "atleast_2d", "atleast_3d",
))  # fmt: skip

# Functions that return no tensor. Patterns of functions do not match them.
_TELLING = frozenset((
    "size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "element_size", "data_ptr", "item",
    "tolist", "numpy", "is_contiguous", "is_floating_point", "is_complex", "is_signed", "is_conj", "is_neg",
    "is_nonzero", "is_inference", "is_pinned", "is_same_size", "is_set_to", "is_shared", "is_coalesced",
    "get_device", "storage", "untyped_storage", "backward", "register_hook", "register_post_accumulate_grad_hook",
    "allclose", "equal", "result_type", "can_cast", "promote_types", "is_tensor", "is_storage",
    "is_autocast_enabled", "set_grad_enabled", "_set_grad_enabled", "is_grad_enabled", "dim_order", "__len__",
    "__bool__", "__int__", "__long__", "__float__", "__complex__", "__index__", "__repr__", "__format__", "__hash__",
    "__contains__", "__array__", "__deepcopy__", "__reduce_ex__", "__setstate__", "__dlpack__", "__dlpack_device__",
    "__set__",
))  # fmt: skip


def is_reflected(function: Any) -> bool:
    """Return True for an operator that Python calls on its right operand, with the arguments in reverse order."""
    return getattr(function, "__name__", "") in _REFLECTED


def read_name(function: Any) -> str:
    """Return the name of a torch function, tensor method, operator or property, as a user would write it."""
    name = str(getattr(function, "__name__", "") or type(function).__name__)
    if name in ("__get__", "__set__"):  # A property, such as `.T`.
        return str(getattr(getattr(function, "__self__", None), "__name__", name))
    name = name.partition(".")[0]  # The overload of an operator in torch.ops.
    if name.startswith("__") and name.endswith("__"):
        name = name.strip("_")
        return _OPERATORS.get(name, name)
    return next((name.removeprefix(space) for space in _NAMESPACES if name.startswith(space)), name)


def may_give_tensors(function: Any) -> bool:
    """Return True if a function may return a tensor, and not just a fact about one."""
    name = str(getattr(function, "__name__", ""))
    return read_name(function) in _TENSORS if name == "__get__" else name not in _TELLING


name_of = lru_cache(maxsize=8192)(read_name)
gives_tensors = lru_cache(maxsize=8192)(may_give_tensors)  # compiled.py uses neither: dynamo warns about caches.


def is_followed(name: str, args: tuple[Any, ...]) -> bool:
    """Return True if the result of an operation has only elements of its first argument: a view, a cast, a copy."""
    return name in FOLLOWED or (name == "getitem" and not any(map(_gathers, args[1:])))


def _gathers(index: Any) -> bool:
    if isinstance(index, tuple):
        return any(map(_gathers, index))
    return isinstance(index, (Tensor, list)) or type(index).__module__ == "numpy"


def written_by(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the argument that a function of that name is known to write into: `out=` or the first; None if none."""
    if kwargs.get("out") is not None:
        return kwargs["out"]
    writes = name == "setitem" or (name.endswith("_") and not name.endswith("__")) or kwargs.get("inplace")
    return args[0] if writes and args else None


def parameter_names(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, ...] | None:
    """Return the names of a builtin's parameters, for these arguments; None if torch knows none."""
    if name_of(function) in _ITEMS:
        return _ITEMS[name_of(function)]
    for schema in _schemas(function):
        positional = [one for one in schema.arguments if not one.kwarg_only]
        names = {one.name for one in schema.arguments} | {"out", "input"}
        if len(args) <= len(positional) and set(kwargs) <= names and all(map(_takes, positional, args)):
            return tuple("input" if one.name == "self" else str(one.name) for one in positional)
    return ("input",) if args and isinstance(args[0], Tensor) else None


def _takes(parameter: Any, value: Any) -> bool:
    """Return True if a parameter in one of torch's schemas takes a value, judging by the parameter's type."""
    kind = str(parameter.type)
    if isinstance(value, torch.dtype):
        return bool(parameter.name == "dtype")
    for type_of_value, words in _KINDS.items():
        if isinstance(value, type_of_value):
            return any(word in kind for word in words)
    return True


# For each type of value, the words in the type of a parameter that show that it takes such a value.
_KINDS: dict[type, tuple[str, ...]] = {
    Tensor: ("Tensor",),
    type(None): ("Optional",),
    bool: ("bool", "number"),
    int: ("int", "number", "float"),
    float: ("float", "number"),
    str: ("str",),
    torch.device: ("Device",),
    tuple: ("List",),
    list: ("List",),
}


_schemas = lru_cache(maxsize=1024)(operator_schemas)
_LATER = (GeneratorType, CoroutineType, AsyncGeneratorType)
Numbered = list[tuple[Tap, int]]
RunFunction = Callable[["Function", nn.Module, Arguments, Event], Any]  # `pass_through` or `run_event`.


def run_seeing_functions(
    called: Called,
    module: nn.Module,
    passed: Arguments,
    taps: Numbered,
    event: Event,
    run_function: RunFunction,
) -> Any:
    """Run a module's forward, or a method that is called directly, with taps on the functions that it calls."""
    refuse_fx(taps[0][0].site)
    if isinstance(module, FUSED_MODULES) and not module.training and may_be_fused() and not event.changes:
        # A capture must not turn off the fast path. diagnose.py tells the user how to turn it off.
        return called.forward(module, *passed)
    inside = FunctionMode(called, module, taps, event, run_function)
    inside.home = frame_at(0)  # The frame of this function: `_is_own` looks at the frames inside it.
    output = None
    try:
        with inside:
            output = called.forward(module, *passed)
        return output
    finally:
        if current_function_mode() is inside:  # Ctrl-C interrupted torch's `__enter__` or `__exit__`.
            pop_function_mode()
        inside.home = None  # A reference to a frame keeps all its variables alive.
        for tap in inside.waiting:
            if not tap.fired:
                tap.ran = (tap.ran or {}) | dict.fromkeys(map(name_of, inside.seen))
                if isinstance(output, _LATER):
                    method = called.found.__name__ if called.is_method and called.found else ""
                    tap.problem = why.runs_later(method, output)


class Pause(Observer):
    """Remove our function modes while a fused-attention child runs, which computes differently under any mode."""

    kind = "pause"


def pauses_below(tap: Tap) -> list[Tap]:
    """Return the `Pause` taps for a tap on functions: torch's attention has a fast path, but only without modes."""
    below = [
        module for module in tap.module.modules() if module is not tap.module and isinstance(module, FUSED_MODULES)
    ]
    return [Tap(tap.site, module, Pause(), tap.session, False, "") for module in below]


class MethodEntry(Observer):
    """Watch a module's methods: functions inside a method count as the module's own if no forward is running.

    For a tap that changes the value of one method, it watches the other methods, and notes which of them ran instead.
    """

    kind = "entry"

    def __init__(self, tap: Tap) -> None:
        self.tap = tap


class EntryTap(Tap):
    """The tap of a `MethodEntry`, on one method."""

    __slots__ = ()

    action: MethodEntry


def entries_of(tap: Tap, names: Iterable[str]) -> list[Tap]:
    """Return an `EntryTap` for each of these methods of a tap's module."""
    sites = [Site(tap.path, member=f"{name}()") for name in names]
    return [EntryTap(site, tap.module, MethodEntry(tap), tap.session, False, "") for site in sites]


def entering(entries: Iterable[EntryTap], name: str, module: nn.Module) -> Event | None:
    """Return the event for a method that is called directly, with its taps on functions; None if it has none."""
    mode, opened, taps = current_function_mode(), open_blocks.get(), []
    is_running = isinstance(mode, FunctionMode) and mode.module is module  # Its forward or another of its methods runs.
    for entry in entries:
        tap = entry.action.tap
        if not tap.is_inside:
            if not tap.fired and tap.acts(opened):
                ran = str(Site(entry.path) if name == "forward" else entry.site)
                tap.ran = {**(tap.ran or {}), ran: None}
        elif not is_running:
            caller = _caller(entry.session.model())
            if caller is None:
                taps.append(tap)
            elif caller is not module and not (tap.fired or tap.problem) and tap.acts(opened):
                model = tap.session.model()
                path = Names(model).of(caller)[0] if model is not None else ""
                tap.problem = why.counts_elsewhere(entry.site, path, tap.function)
    event = event_of((module, name, "/"), taps, opened, lambda _: (0, True)) if taps else None
    return event if event is not None and event.taps else None


def _caller(model: nn.Module | None) -> nn.Module | None:
    """Return the module whose forward is running, the innermost one; None if no forward of the model is running."""
    for frame in frames(frame_at(1)):
        if frame.f_code is call_user.__code__:
            return None
        if frame.f_code is MODULE_CALL or (frame.f_code.co_name.endswith("forward") and _is_called_directly(frame)):
            owner = first_argument(frame)
            if isinstance(owner, nn.Module) and (model is None or any(part is owner for part in model.modules())):
                return owner
    return None


def _is_called_directly(frame: FrameType) -> bool:
    """Return True if a forward is called without `__call__`. Otherwise the frame of `__call__` shows the module.

    Up to Python 3.12 reading a frame's variables keeps them alive; those of `__call__` are alive anyway.
    """
    caller = caller_of(frame)
    return caller is None or (
        caller.f_code is not MODULE_CALL and caller.f_globals.get("__name__", "").split(".")[0] != "hookline"
    )


def without_modes(run: Callable[[], Any]) -> Any:
    """Call `run` without the function modes of hookline that are on top of the stack, above any other mode."""
    taken = []
    try:
        while isinstance(mode := current_function_mode(), FunctionMode):
            taken.append(mode)
            pop_function_mode()
        return run()
    finally:
        for mode in reversed(taken):
            if mode not in function_mode_stack():  # Ctrl-C may have come before it was popped.
                push_function_mode(mode)


def may_be_fused() -> bool:
    """Return True if torch's attention may take its fast path, which any function mode turns off."""
    return not torch.is_grad_enabled() and bool(torch.backends.mha.get_fastpath_enabled())


class FunctionMode(TorchFunctionMode):
    """A mode that sees every torch function while one call of a module runs."""

    home: FrameType | None = None  # The frame in which the call began.

    def __init__(
        self, called: Called, module: nn.Module, taps: Numbered, event: Event, run_function: RunFunction
    ) -> None:
        super().__init__()
        self.called = called
        self.taps, self.choices = called.choices
        self.module = module
        self.event = event
        self.run_function = run_function
        self.acting = {tap for tap, _ in taps}
        self.waiting = [tap for tap in self.acting if not tap.fired]
        self.seen: dict[Any, None] = {}  # Functions on which no tap acted, to explain why a tap did not fire.
        self.counts: dict[str, int] = {}

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function, with the taps that are meant for it."""
        if is_dynamo_compiling():  # A child is being compiled, under this mode.
            return function(*args, **(kwargs or {}))
        taps = self.choices.get(function)
        if taps == () and not self.waiting:  # The case for most functions.
            return function(*args, **kwargs) if kwargs else function(*args)
        if taps is None:
            taps = self.choices[function] = _meant_for(function, self.taps)
        if not taps or not self._is_own(frame_at(1)):
            if self.waiting:
                self.seen[function] = None
            return function(*args, **kwargs) if kwargs else function(*args)
        name = name_of(function)
        number = self.counts.get(name, 0)
        self.counts[name] = number + 1
        acting = [(tap, number) for tap in taps if tap in self.acting]
        for tap, _ in acting:
            tap.often = max(tap.often, number + 1)
        acting = [(tap, number) for tap, _ in acting if is_wanted(tap.site.call, number)]
        if not acting:
            return function(*args, **kwargs) if kwargs else function(*args)
        event = self.event.inside(acting, name, number)
        refuse_in_autograd_function(event)
        return operate(Function(function, name, args, kwargs or {}, event), self.module, self.run_function)

    def _is_own(self, caller: FrameType) -> bool:
        """Return True if the module's own forward or method called the function, not that of another module."""
        forwards, is_method = [], self.called.is_method
        for frame in frames(caller):
            if frame is self.home:
                break
            if id(frame.f_code) in _FOREIGN or frame.f_globals.get("__name__") in TRACING_MODULES:
                return False
            if frame.f_code is self.called.code or (is_method and _is_method(frame)):
                forwards.append(frame)
            elif frame.f_code.co_name.endswith("forward") and self._is_of_another(frame):
                return False
        else:
            return False
        # The outermost frame is the module's. An inner one may be of a child whose forward was called directly.
        if is_method:
            owners = (first_argument(one) for one in forwards[:-1])
            return next((one is self.module for one in owners if isinstance(one, nn.Module)), True)
        return not any(map(self._is_of_another, forwards[:-1]))

    def _is_of_another(self, frame: FrameType) -> bool:
        """Return True if this is the forward of another module, called without its `__call__`.

        Up to Python 3.12 reading a frame's variables keeps them alive, so `_is_own` skips the module's own forward.
        """
        owner = first_argument(frame)
        return isinstance(owner, nn.Module) and owner is not self.module


def _is_method(frame: FrameType) -> bool:
    """Return True if a frame runs a method, whatever the method's first parameter is called."""
    code = frame.f_code
    if code.co_varnames[:1] == ("self",):
        return True
    owner = first_argument(frame)
    own: Any = inspect.getattr_static(type(owner), code.co_name, None) if isinstance(owner, nn.Module) else None
    return getattr(inspect.unwrap(own), "__code__", None) is code


# Code whose torch calls don't count as the module's own: calls of children, and functions of hookline that call torch
# or a user's function. Every such function of hookline that can run inside a `FunctionMode` must be here.
_FOREIGN = frozenset(
    id(code)  # Code that dynamo made can't be hashed.
    for code in (
        *MODULE_CALLS,
        *(
            one.__code__
            for one in (call_user, act, gradients._hook_gradients, Event.check, Skip.output, run_seeing_functions)
        ),
    )
)


def refuse_in_autograd_function(event: Event) -> None:
    """Raise for a change inside a torch.autograd.Function, whose backward would not know about it.

    Frame 2 is the caller of the function that calls this one.
    """
    changing = next((tap for tap, _ in event.taps if tap.changes), None)
    around = autograd_function_around(frame_at(2)) if changing is not None else None
    if changing is not None and around is not None:
        raise HooklineError(
            f"'{changing.site}' runs inside {around.__name__}, a torch.autograd.Function, whose backward would not "
            f"know about the change; edit the input or the output of {around.__name__}"
        )


def _meant_for(function: Any, taps: Iterable[Tap]) -> tuple[Tap, ...]:
    """Return the taps at a function, in their order. Patterns match only functions that may return a tensor."""
    name, is_telling = name_of(function), not gives_tensors(function)
    return tuple(tap for tap in taps if tap.is_inside and tap.wants(name) and not (tap.is_family and is_telling))


class Function:
    """One call of a function, as run_call.py runs it: like the forward of a hooked module."""

    is_function = True
    is_method = False
    found: Callable[..., Any] | None = None
    code = None
    choices: Choices = (), {}

    def __init__(self, function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], event: Event) -> None:
        self.function = function
        self.name = name
        if is_reflected(function):  # `1 - x` is sub(1, x), but Python calls x.__rsub__(1).
            self.function, args = _swapped(function), args[::-1]
        self.args = args
        self.kwargs = kwargs
        self.event = event
        self.targets: dict[int, Tensor] = {}  # Arguments it wrote into, by place in the result.

    @property
    def parameters(self) -> call_arguments.Parameters:
        """The names of its parameters, as far as torch knows them. The first one of a method is `input`."""
        found = call_arguments.NO_PARAMETERS
        if type(self.function) is FunctionType:
            found = call_arguments.parameters_of_function(self.function)
        if found.positional:
            first, *rest = found.positional
            return found._replace(positional=("input", *rest)) if first == "self" else found
        names = parameter_names(self.function, self.args, self.kwargs)
        return call_arguments.Parameters(names or (), "operands" if self.name == "einsum" else "args")

    def forward(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the function on these arguments, which may differ from those that it was called with."""
        if not self.event.changes:  # No tap changes a value, so the function may write into its arguments.
            result = self.function(*args, **kwargs)
            return args[0] if self.name == "setitem" else result
        args, kwargs = self._apart(args, kwargs)
        versions = [(old, new, known_version(new)) for old, new in self._pairs(args, kwargs)]
        result = self.function(*args, **kwargs)
        result = args[0] if self.name == "setitem" else result
        results = leaves(result)
        for old, new, version in versions:
            if known_version(new) == version and not self._is_known_to_write(new, args, kwargs):
                continue
            self.event.written += [old, new]
            position = next((number for number, one in enumerate(results) if one is new), None)
            if position is not None:
                self.targets[position] = old
                results[position] = old if _shares(old, new) else new  # `new` may be a view of `old`.
            elif not _shares(old, new):
                old.copy_(new)
        left = iter(results)
        return map_tensors(lambda _: next(left), result) if self.targets else result

    def _pairs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[Tensor, Tensor]]:
        """Return pairs: a tensor that the function was called with, and the tensor that is passed in its place."""
        given = [*self.args, *self.kwargs.values()]
        taken = [*args, *(kwargs[name] for name in self.kwargs)]
        leaf_pairs = [(leaves(old), leaves(new)) for old, new in zip(given, taken, strict=True)]
        return [pair for old, new in leaf_pairs if len(old) == len(new) for pair in zip(old, new, strict=True)]

    def _apart(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Let a function write into a copy if a tap changes its result: autograd may need the unchanged result."""
        changed = any(tap.site.port == "output" and not tap.action.observes for tap, _ in self.event.taps)
        target = self._target(args, kwargs) if changed else None
        if target is None:
            return args, kwargs
        apart = {id(one): one.clone() for one in leaves(target)}  # Not a lazy clone: torch may resize an `out=`.
        given: Arguments = map_tensors(lambda one: apart.get(id(one), one), (args, kwargs))
        return given

    def finish(self, output: Any) -> Any:
        """Write the changed result into the arguments that the function wrote into, where others will read it."""
        numbers = itertools.count()

        def write(new: Tensor) -> Tensor:
            old = self.targets.get(next(numbers), new)
            return new if _shares(old, new) else _write(old, new)

        output = map_tensors(write, output) if self.targets else output
        return None if self.name == "setitem" else output

    def stand_in(self, value: Any, is_given: bool, passed: Arguments) -> Any:
        """Return the result of a skipped function: the argument that it would have written into, if there is one."""
        target = self._target(self.args, self.kwargs)
        if not isinstance(target, Tensor):
            return value
        # If a tap follows the gradient, the target must become a new node of the graph, and not stay the earlier value.
        # Writing into it makes a new node.
        follows = any(tap.site.is_gradient for tap, _ in self.event.taps)
        if is_given or follows or target is not call_arguments.first(passed, self.parameters):
            _write(target, value)
        self.targets[0] = target
        self.event.written.append(target)
        return target

    def _is_known_to_write(self, tensor: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return True if the function writes into an inference tensor, for which torch counts no writes."""
        return tensor.is_inference() and any(one is tensor for one in leaves(self._target(args, kwargs)))

    def _target(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the argument that the function is known to write into, or None."""
        if type(self.function) is not FunctionType:
            return written_by(self.name, args, kwargs)
        return written_by(self.name, args, call_arguments.bind((args, kwargs), self.parameters))


def _swapped(function: Any) -> Callable[..., Any]:
    def swapped(input: Any, other: Any) -> Any:
        return function(other, input)

    return swapped


def operate(function: Function, module: nn.Module, run_function: RunFunction) -> Any:
    """Run a function with its taps."""
    return function.finish(run_function(function, module, (function.args, function.kwargs), function.event))


def _write(target: Tensor, value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        return target.fill_(value)
    if target.shape != value.shape and not target.numel():  # An empty `out=`, which torch would resize.
        target.resize_(value.shape)
    return target.copy_(value)


def _shares(one: Tensor, other: Tensor) -> bool:
    """Return True if one tensor is a view of the other, or both of a third."""
    base = base_of(one) if is_view(one) else one
    return base is (base_of(other) if is_view(other) else other)
