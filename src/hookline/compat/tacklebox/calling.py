"""How hook functions are called: by the conventions of a manager, or by torch's own."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

import hookline as hl
from hookline.compat.backward import Pass, add_backward
from hookline.compat.tacklebox.naming import named, shows

ARGUMENTS = {
    "forward_hook": ("module", "inputs", "outputs"),
    "backward_hook": ("module", "grad_in", "grad_out"),
    "forward_pre_hook": ("module", "inputs"),
}


class TypedFunction:
    """A function, and the kind of hook that it is. It knows nothing of the modules that it is on."""

    HOOK_TYPES: ClassVar[list[str]] = list(ARGUMENTS)

    def __init__(
        self,
        hook_fn: Callable[..., Any],
        hook_type: str,
        name: str | None,
        pass_by_pos: bool,
        retain_forward_cache: bool,
    ) -> None:
        if hook_type not in ARGUMENTS:
            raise AssertionError(f"invalid hook type: {hook_type}")
        if retain_forward_cache and hook_type != "backward_hook":
            raise AssertionError("retain_forward_cache option is exclusively for backward hooks")
        if not callable(hook_fn):
            raise TypeError(f"a hook is a function, not {type(hook_fn).__name__}")
        self.function = hook_fn
        self.hook_type = hook_type
        self.name = repr(hook_fn) if name is None else name
        self.pass_by_pos = pass_by_pos
        self.retain_forward_cache = retain_forward_cache
        self._names = ARGUMENTS[hook_type] + (("inputs", "outputs") if retain_forward_cache else ())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        names = self._names
        if self.pass_by_pos and len(args) == len(names) and not kwargs:
            return self.function(*args)
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if len(args) + len(kwargs) != len(names) or set(given) != set(names):
            raise TypeError(
                f"invalid number of positional args passed to {self.hook_type} {self.name!r}. "
                f"Call signature should be ({', '.join(names)}) but got {len(args)} positional args."
            )
        if self.pass_by_pos:
            return self.function(*(given[name] for name in names))
        return self.function(**self._wanted(given))

    def _wanted(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return those arguments that the function names."""
        parameters = inspect.signature(self.function).parameters.values()
        if any(one.kind is one.VAR_KEYWORD for one in parameters):
            return dict(given)
        for one in parameters:
            if one.name not in given and one.default is one.empty and one.kind is not one.VAR_POSITIONAL:
                raise TypeError(
                    f"hook method {self.name!r} requested parameter {one.name!r} that is unavailable. "
                    f"Available parameters are [{', '.join(given)}]."
                )
        return {one.name: given[one.name] for one in parameters if one.name in given}


class Caller:
    """Calls the function of one handle.

    The inputs are those given by position. A manager gives the outputs as a tuple, and takes tuples back. As torch does
    it (`as_torch`), the output is as it is, and so is what is returned.
    """

    def __init__(self, hook_fn: TypedFunction, module: nn.Module, name: str | None, id_: str, as_torch: bool) -> None:
        self.hook_fn = hook_fn
        self.module = module
        self.name = name  # Of the module, by its manager if it has one.
        self.id = id_
        self.as_torch = as_torch
        self.is_active = False  # A gradient may come when the hook is switched off or gone.
        self.was_called = False

    def add_to(self, hooks: hl.Hooks) -> None:
        """Add the hooks that let the function take part in the calls of the module.

        They hang on the module, which is not to hold a manager: a function may be a method of the object that has it.
        """
        bound = (lambda method: method) if self.name is None else weakly
        kind = self.hook_fn.hook_type
        if kind == "backward_hook":
            keeps = self.hook_fn.retain_forward_cache
            add_backward(hooks, "", bound(self.backward), kind, keeps, changes=self.as_torch)
            return
        site, method = (hl.Site(""), self.forward) if kind == "forward_hook" else (hl.Site("", "inputs"), self.before)
        hooks.edit(site, bound(method), kind, with_call=True, check=False, clone=False).when_missing("ignore")

    def before(self, bound: dict[str, Any], call: Any) -> dict[str, Any] | None:
        """Call it with what the module is given; put in its place what comes back."""
        inputs = tuple(call.args)
        new = self._call(inputs)
        if new is None or new is inputs:
            return None
        if not isinstance(new, tuple):
            if not self.as_torch:
                raise AssertionError("when altering module inputs, must return result as a tuple")
            new = (new,)
        return {**_bind(new, bound, call), **call.kwargs}

    def forward(self, output: Any, call: Any) -> Any:
        """Call it with what the module was given and gives; put in its place what comes back."""
        if self.as_torch:
            return self._call(tuple(call.args), output)
        outputs = output if isinstance(output, tuple) else (output,)
        new = self._call(tuple(call.args), outputs)
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
        """Call it with the gradients of a call; only torch's own hooks change them, others may write into copies."""
        if not self.is_active:
            return None
        kept = (come.inputs[: come.positional], come.outputs) if self.hook_fn.retain_forward_cache else ()
        grad_inputs = come.grad_inputs[: come.positional]
        if not self.as_torch:
            self._call(_cloned(grad_inputs), _cloned(come.grad_outputs), *kept)
            return None
        new = self._call(grad_inputs, come.grad_outputs, *kept)
        if new is None:
            return None
        return (*(new if isinstance(new, tuple) else (new,)), *come.grad_inputs[come.positional :])

    def _call(self, *values: Any) -> Any:
        self.was_called = True
        try:
            if self.name is None or shows(self.module, self.name):
                return self.hook_fn(self.module, *values)
            with named(self.module, self.name):
                return self.hook_fn(self.module, *values)
        except Exception as error:
            if hasattr(error, "add_note"):  # Python 3.11.
                error.add_note(f"hookline: raised by {self.id}")
            raise


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls a method as long as its object is there, and does not hold it."""
    found = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        here = found()
        return None if here is None else here(*args)

    return call


def _cloned(gradients: Any) -> Any:
    """Return gradients that a hook may write into."""
    if isinstance(gradients, Tensor):
        return gradients.clone()
    if isinstance(gradients, Mapping):
        return {key: _cloned(part) for key, part in gradients.items()}
    return tuple(map(_cloned, gradients)) if isinstance(gradients, tuple) else gradients


def _bind(values: tuple[Any, ...], bound: dict[str, Any], call: Any) -> dict[str, Any]:
    """Return what is to be given by position under the names of the arguments; those of `*args` are a tuple."""
    count = len(call.args)
    names = [name for name in bound if name not in call.kwargs]
    rest = ""
    if names and (len(names) < count or _is_rest(bound[names[-1]], call.args[-1])):
        rest = names.pop()
    elif len(values) > count:
        more, rest = _positional(call.module)
        names += more[len(names) :]
    if len(values) > len(names) and not rest:
        kind = type(call.module).__name__
        raise TypeError(f"{len(values)} inputs returned for a {kind}, which takes {len(names)} by position")
    new = dict(zip(names, values, strict=False))
    return {**new, rest: values[len(names) :]} if len(values) > len(names) else new


def _is_rest(value: Any, last: Any) -> bool:
    """Whether a value is the last argument in a tuple, as the only one of `*args`, and not that argument itself."""
    return type(value) is tuple and len(value) == 1 and value is not last


def _positional(module: nn.Module) -> tuple[list[str], str]:
    """Return the names of what a module's forward takes by position, and of its `*args`."""
    parameters = inspect.signature(module.forward).parameters.values()
    names = [one.name for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    return names, next((one.name for one in parameters if one.kind is one.VAR_POSITIONAL), "")


def detach_hook(module: nn.Module, input: tuple[Any, ...], output: Tensor) -> Tensor:
    """Cut the output off the graph: a forward hook of torch's own kind."""
    return output.detach()
