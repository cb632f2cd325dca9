"""How hook functions are called: by the conventions of a manager, or by torch's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

import hookline as hl
from hookline.compat.backward import Pass, add_backward
from hookline.compat.tacklebox.naming import named


class Caller:
    """Calls the function of one handle.

    A manager gives all inputs and all outputs as tuples, and takes tuples back. As torch does it (`as_torch`),
    inputs are those given by position, the output is as it is, and so is what is returned.
    """

    def __init__(
        self, function: Callable[..., Any], module: nn.Module, name: str | None, as_torch: bool, keeps_values: bool
    ) -> None:
        self.function = function
        self.module = module
        self.name = name
        self.as_torch = as_torch
        self.keeps_values = keeps_values
        self.is_active = False  # A gradient may come when the hook is switched off or gone.

    def add_to(self, hooks: hl.Hooks, kind: str) -> None:
        """Add the hooks that let the function take part in the calls of the module."""
        if kind == "backward_hook":
            add_backward(hooks, "", self.backward, kind, self.keeps_values, changes=self.as_torch)
            return
        site, function = (hl.Site(""), self.forward) if kind == "forward_hook" else (hl.Site("", "inputs"), self.before)
        added = hooks.edit(site, function, kind, with_call=True, check=False, clone=False)
        added.when_missing("ignore")

    def before(self, bound: dict[str, Any], call: Any) -> dict[str, Any] | None:
        """Call it with what the module is given; put in its place what comes back."""
        inputs = self._inputs(call)
        new = self._call(inputs)
        if new is None or new is inputs:
            return None
        if not isinstance(new, tuple):
            if not self.as_torch:
                raise AssertionError("when altering module inputs, must return result as a tuple")
            new = (new,)
        if len(new) == len(call.args):  # Those given by position alone.
            new = (*new, *call.kwargs.values())
        if len(new) != len(call.args) + len(call.kwargs):
            raise ValueError(f"{len(new)} inputs returned for {len(inputs)}")
        return _bind(new, bound, call)

    def forward(self, output: Any, call: Any) -> Any:
        """Call it with what the module was given and gives; put in its place what comes back."""
        if self.as_torch:
            return self._call(self._inputs(call), output)
        outputs = output if isinstance(output, tuple) else (output,)
        new = self._call(self._inputs(call), outputs)
        if new is None or new is outputs:
            return None
        if not isinstance(new, tuple):
            raise AssertionError("when altering module outputs, must return result as a tuple")
        if isinstance(output, tuple):
            kind: Any = type(output)  # A named tuple stays one.
            return new if type(new) is kind else getattr(kind, "_make", kind)(new)
        if len(new) != 1:
            raise ValueError(f"{len(new)} outputs returned for 1")
        return new[0]

    def backward(self, come: Pass) -> Sequence[Any] | None:
        """Call it with the gradients of a call; only torch's own hooks change them."""
        if not self.is_active:
            return None
        kept = (come.inputs, come.outputs) if self.keeps_values else ()
        if not self.as_torch:
            self._call(come.grad_inputs, come.grad_outputs, *kept)
            return None
        new = self._call(come.grad_inputs[: come.positional], come.grad_outputs, *kept)
        if new is None:
            return None
        return (*(new if isinstance(new, tuple) else (new,)), *come.grad_inputs[come.positional :])

    def _inputs(self, call: Any) -> tuple[Any, ...]:
        return tuple(call.args) if self.as_torch else (*call.args, *call.kwargs.values())

    def _call(self, *values: Any) -> Any:
        if self.name is None:
            return self.function(self.module, *values)
        with named(self.module, self.name):
            return self.function(self.module, *values)


def _bind(values: tuple[Any, ...], bound: dict[str, Any], call: Any) -> dict[str, Any]:
    """Return values, positional ones first, under the names of the arguments; those of `*args` are a tuple."""
    count = len(call.args)
    names = [name for name in bound if name not in call.kwargs]
    new = dict(zip(names, values, strict=False))
    if names and (len(names) < count or _is_rest(bound[names[-1]], call.args[-1])):
        new[names[-1]] = values[len(names) - 1 : count]
    return {**new, **dict(zip(call.kwargs, values[count:], strict=True))}


def _is_rest(value: Any, last: Any) -> bool:
    """Whether a value is the last argument in a tuple, as the only one of `*args`, and not that argument itself."""
    return type(value) is tuple and len(value) == 1 and value is not last
