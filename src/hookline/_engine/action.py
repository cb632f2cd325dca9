"""Actions on a passing value: the `Action` protocol, Set, SetByCall, Apply, Skip and Stop.

`Save` is in capture_action.py.

An action is called with the value (or the part of it that the site's subscripts select) and the call it belongs to. It
returns the value that the model continues with: the same object, if it leaves the value unchanged.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from numbers import Number
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from hookline._cache.record import read_value
from hookline._engine.generate_call import is_in_encoder
from hookline._engine.unsupported_tracing import refuse_tracers
from hookline._open_blocks import call_user
from hookline._sites.calls import Calls
from hookline._sites.language import Site
from hookline._values.copy_or_share import Loan, copy_all, is_private, share
from hookline._values.fit import as_returned, check_same_structure, fit, returns_another_structure
from hookline._values.nested import Arguments, children, describe, leaves, map_tensors
from hookline.errors import EditError, HooklineError
from hookline.parallel.gather import Gathering, replicate, whole
from hookline.parallel.ranks import is_cut

NOTHING: Any = object()


class Call(NamedTuple):
    """The call that a value belongs to, for functions that are called with `with_call=True`."""

    site: Site
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    number: int
    notes: dict[Any, Any]  # Shared by all hooks of this one call, including those at its gradients.
    model: nn.Module | None = None  # The model that the hook is on.
    passing: Any = None  # The tokens that pass in this forward of the model: a `Passing`.
    rows: tuple[int, ...] | None = None  # The rows of the batch that the value has; None for all.

    def __repr__(self) -> str:
        return f"<call {self.number} of '{self.site}'>"

    @property
    def step(self) -> int:
        """Forwards of the model since its sequence began: 0 for the prompt, and for the encoder before it."""
        if self.passing is None and is_in_encoder(self.model, self.module):
            return 0
        return int(self._known().step)

    @property
    def tokens(self) -> Tensor | None:
        """The index of each token that passes, (batch, tokens), with -1 for padding; None if it is unknown."""
        if is_in_encoder(self.model, self.module):
            passing = None if self.passing is None else self.passing.encoder
        else:
            passing = self._known()
        table = None if passing is None else passing.table()
        return None if table is None else torch.tensor(table)

    @property
    def parent(self) -> Call | None:
        """The call of the module around this one, None for the outermost. Known only while it runs.

        Its number is -1 if that module has no hook.
        """
        return Around.find(self)

    def _known(self) -> Any:
        if self.passing is None:
            raise HooklineError(
                "call.step and call.tokens belong to a forward of the hooked model, and none was running; add the "
                "hooks to the module that you call"
            )
        return self.passing


class Around:
    """How to find the call around another one. `find` is set in attach.py, which imports this file."""

    find: Callable[[Call], Call | None]


class Action(Protocol):
    """The interface of anything that acts at a site."""

    kind: str  # The name shown by `Hook.kind` and in messages.
    observes: bool  # Whether it leaves every value unchanged.
    gathering: Gathering | None  # Gathers sharded values, if this process is one of several.
    with_call: bool  # Whether the user's function is also called with the `Call`.
    is_traceable: bool  # Whether dynamo can trace it.

    @property
    def function(self) -> Callable[..., Any] | None:
        """The user's function whose result replaces the value."""

    @property
    def transform(self) -> Callable[..., Any] | None:
        """The user's function whose result is kept."""

    def __call__(self, value: Any, call: Any, is_whole: bool, /) -> Any:
        """Return the value that the model continues with. `is_whole` is False if `value` is a part of a tensor."""


class KeepingAction(Action, Protocol):
    """The interface of actions at a module's whole output. `hot_path` uses its members and does not call it."""

    copies_on_write: bool  # The hot path keeps a copy-on-write clone of a CPU tensor that nobody else holds.
    copies_on_device: bool  # The same for a tensor on a GPU.
    refers: bool  # The hot path keeps a detached alias of any tensor.
    clone: bool | None  # If None, the caller of `keep` works out whether the value is new.

    def gathered(self, value: Any, site: Site) -> Any:
        """Return the whole value, gathered from all ranks if it is sharded."""

    def keep(self, value: Any, call: Call | None = None, is_new: bool = False) -> Any:
        """Return what the record stores for a whole value. `is_new` means that nobody else holds `value`."""


class Observer:
    """Base class of actions that leave every value unchanged."""

    kind = "observe"
    observes = True
    gathering: Gathering | None = None
    with_call = False
    is_traceable = False
    function: Callable[..., Any] | None = None
    transform: Callable[..., Any] | None = None

    def __call__(self, value: Any, _call: Any, _is_whole: bool, /) -> Any:
        """Return the value."""
        return value


class OutputObserver(Observer):
    """Base class of observers whose `keep` the hot path calls with a module's whole output."""

    copies_on_write = copies_on_device = False
    refers = False
    clone: bool | None = True

    def gathered(self, value: Any, _site: Site) -> Any:
        """Return the value as it is on this rank."""
        return value

    def keep(self, value: Any, call: Call | None = None, is_new: bool = False) -> Any:
        """Observe a value and return what the record stores for it. `is_new` means that nobody else holds `value`."""
        raise NotImplementedError


class Set:
    """Replace the passing value with a given one."""

    kind = "patch"
    observes = False
    with_call = False
    is_traceable = True
    function = transform = None

    def __init__(
        self, value: Any, check: bool = True, number: Tensor | None = None, gathering: Gathering | None = None
    ) -> None:
        self.value = value
        self.check = check
        self.number = number  # The value as a tensor, for compiled graphs: see `number_tensor` in compiled.py.
        self.gathering = gathering

    def __call__(self, value: Any, call: Call | None, _is_whole: bool, /) -> Any:
        if self.check:
            return fit(self.value if self.gathering is None else whole(self.value), value, call)
        holds = isinstance(self.value, Tensor) or children(self.value) is not None
        return copy_all(self.value) if holds else self.value

    def __repr__(self) -> str:
        return f"set to {describe(self.value)}"


class SetByCall:
    """Replace the passing value of each call with the value given for that call."""

    kind = "patch"
    observes = False
    with_call = False
    is_traceable = False  # A graph counts no calls.
    function = transform = None

    def __init__(self, values: list[Any], check: bool = True, gathering: Gathering | None = None) -> None:
        self.values = values  # As records keep them: they are checked and loaded by `read_value`.
        self.check = check
        self.gathering = gathering

    def __call__(self, value: Any, call: Call, is_whole: bool, /) -> Any:
        wanted, number = call.site.call, int(call.number)
        at = wanted.numbers.index(number) if isinstance(wanted, Calls) else number
        if at >= len(self.values):
            raise EditError(
                f"call {number} has no value: the cache has {len(self.values)}, for the first calls since the block "
                "began or the hooks were added; open a block for each run, or choose one value for every call"
            )
        given = read_value(self.values[at], call.site)
        for own, passing in zip(leaves(given), leaves(value), strict=False) if self.check else ():
            if own.shape != passing.shape:  # No broadcasting: one token would go into all of a longer call.
                raise EditError(
                    f"the value of call {number} has shape {tuple(own.shape)}, and {tuple(passing.shape)} passes; run "
                    "the same batch sizes and lengths as in the capture, and with a key-value cache if it had one there"
                )
        return Set(given, self.check, gathering=self.gathering)(value, call, is_whole)

    def __repr__(self) -> str:
        return f"set each of {len(self.values)} calls"


class Apply:
    """Replace the passing value with `function(value)`. A result of None leaves the value unchanged."""

    kind = "edit"
    observes = False
    transform = None

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
        self.is_traceable = not with_call

    def __call__(self, value: Any, call: Call | None, is_whole: bool, is_new: bool = False, /) -> Any:
        """Return the value that the model continues with.

        Args:
            is_new: Whether the forward is known to have made the value, and nobody else holds it.
        """
        if self.clone is False:
            return self._on_own(value, call, is_whole)
        loan = Loan(value, is_new)  # The function may write into its argument. Nobody else sees these writes.
        result = ask(self.function, self.with_call, loan.given, call)
        if result is None:
            if loan.is_written():
                raise EditError("the function wrote into its argument but returned None; return the changed value")
            return value
        if self.check and is_whole:
            check_same_structure(result, value, call)
        if self.check and not is_whole:
            return value if result is loan.given and loan.take_back(result) is value else fit(result, value, call)
        if isinstance(result, Tensor):  # `is_private` counts references: no other variable may hold the result here.
            return result if is_private(result) else loan.take_back(result)
        return map_tensors(loan.take_back, result, in_objects=True)

    def _on_own(self, value: Any, call: Call | None, is_whole: bool) -> Any:
        """Call the function with the model's own value, as torch's hooks do. The model sees the function's writes."""
        result = ask(self.function, self.with_call, value, call)
        if result is None or result is value:
            return value
        if self.check and is_whole:
            check_same_structure(result, value, call)
        return fit(result, value, call) if self.check and not is_whole else result

    def __repr__(self) -> str:
        return getattr(self.function, "__name__", None) or repr(self.function)


class Skip(Observer):
    """Return the module's first argument, or a given value, instead of running the module."""

    kind = "skip"
    observes = False

    def __init__(self, value: Any = NOTHING, check: bool = True) -> None:
        self.value = value
        self.check = check
        self.is_traceable = not (check and isinstance(value, Number))  # Dynamo does not know the shape to fill.

    def output(self, module: nn.Module | None, first: Any, passed: Arguments = ((), {})) -> Any:
        """Return the result of the skipped call. Raise if it can't replace the output that `module` is known to return.

        `module` is None if nothing is known about the output: for a method, a function, or a replaced forward.
        """
        refuse_tracers(first)
        if self.value is NOTHING:
            self.check_input(module, first)
            return share(first)  # The model may write into this output. That must not change the input.
        if self.check and not self._is_replicated(first):
            return as_returned(self.value, module, first, passed)
        return self.given_output(first)

    def given_output(self, first: Any) -> Any:
        """Return a copy of the given value, unchecked. It is a DTensor if the input is one."""
        given = copy_all(self.value)
        return replicate(given, first) if self._is_replicated(first) else given

    def _is_replicated(self, first: Any) -> bool:
        return isinstance(first, Tensor) and is_cut(first) and type(self.value) is Tensor

    def check_input(self, module: nn.Module | None, first: Any) -> None:
        """Raise if the first argument cannot replace the output."""
        if first is NOTHING:
            raise EditError(
                "called without an argument to pass on; give the value to return, as in skip(model, site, value)"
            )
        other = returns_another_structure(module, first) if module is not None else ""
        if other:
            raise EditError(f"{other}; give the value to return, as in skip(model, site, value)")

    def __repr__(self) -> str:
        return "pass the input on" if self.value is NOTHING else f"give {describe(self.value)}"


class Stop(Observer):
    """End the forward once the sites of all its stops have fired: see stop.py."""

    kind = "stop"

    def __repr__(self) -> str:
        return "stop"


def ask(function: Any, with_call: bool, value: Any, call: Call | None) -> Any:
    """Call a user's function with a value, and the call if `with_call`. Hooks on the model are paused meanwhile."""
    try:
        return call_user(call and call.model, function, *((value, call) if with_call else (value,)))
    except TypeError as error:
        _refuse_arguments(function, with_call, error)
        raise


def _refuse_arguments(function: Any, with_call: bool, error: TypeError) -> None:
    """Raise an `EditError` if a user's function cannot take the arguments that it is called with."""
    try:
        takes = inspect.signature(function)
    except (TypeError, ValueError):  # A builtin may have no signature.
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
