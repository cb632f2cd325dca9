"""HookFunction and how it is called, and HookHandle, the registration of a function on one module."""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, ClassVar

from torch import Tensor, nn

import hookline as hl
from hookline.compat.backward_hooks import BackwardCall, add_backward
from hookline.compat.shared import warn, weakly

GETSTATE = "__getstate__"

_claims: weakref.WeakKeyDictionary[nn.Module, list[str]] = weakref.WeakKeyDictionary()


def increment_name(name: str) -> str:
    """Return the next name in a numbered series: "conv_1" after "conv", "conv_10" after "conv_9"."""
    base, mark, number = name.rpartition("_")
    return f"{base}_{int(number) + 1}" if mark and number.isdecimal() else f"{name}_1"


def unique(name: str, taken: Container[str], latest: dict[str, str] | None = None) -> str:
    """Return a name that is not taken: this one, or the first free one of its numbered series.

    Args:
        latest: The last name used in each series, so that the search continues from there.
    """
    found = name
    while found in taken:
        start = found if latest is None or found != name else latest.get(name, name)
        found = increment_name(start)
    if latest is not None:
        latest[name] = found
    return found


def claim(module: nn.Module, name: str) -> bool:
    """Set `module.name` for one hook, unless the module has its own `name`. Return True if it is set."""
    if module in _claims:
        _claims[module].append(name)
        return True
    if hasattr(module, "name"):
        return False
    _claims[module] = [name]
    module.__dict__["name"] = name
    module.__dict__[GETSTATE] = partial(_state_without_name, module)  # copy and pickle call this.
    return True


def release(module: nn.Module, name: str) -> None:
    """Undo `claim`: `module.name` becomes the name of the next claim, or is deleted."""
    names = _claims.get(module)
    if names is None:  # The module is being garbage-collected together with the hook.
        return
    is_shown = module.__dict__.get("name") in names  # Otherwise other code has renamed it since.
    names.remove(name)
    if not names:
        del _claims[module]
        module.__dict__.pop(GETSTATE, None)
    if is_shown and names:
        module.__dict__["name"] = names[0]
    elif is_shown:
        del module.__dict__["name"]


def shows(module: nn.Module, name: str) -> bool:
    """Return True if `module.name` is this name now."""
    return module.__dict__.get("name") == name


@contextmanager
def named(module: nn.Module, name: str) -> Iterator[None]:
    """Set `module.name` to this manager's name for the module while a hook runs."""
    if module.__dict__.get("name") not in _claims.get(module, ()):
        yield
        return
    module.__dict__["name"] = name
    try:
        yield
    finally:
        if module in _claims and shows(module, name):
            module.__dict__["name"] = _claims[module][0]


def _state_without_name(module: nn.Module) -> Any:
    """Return the module's state for copy and pickle, without the entries that `claim` added."""
    own = getattr(type(module), GETSTATE, None)  # Every class has one since Python 3.11.
    state = module.__dict__ if own is None else own(module)
    if not isinstance(state, dict):  # A class may define its state as any object.
        return state
    given = "name" if state.get("name") in _claims.get(module, ()) else None
    return {key: value for key, value in state.items() if key not in (GETSTATE, given)}


ARGUMENTS = {
    "forward_hook": ("module", "inputs", "outputs"),
    "backward_hook": ("module", "grad_in", "grad_out"),
    "forward_pre_hook": ("module", "inputs"),
}


class TypedFunction:
    """A function and its kind of hook, without the modules it is registered on."""

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
        """Return the arguments that the function has parameters for."""
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

    The function gets the positional inputs. By default it gets the outputs as a tuple and must return tuples. With
    `as_torch` it gets and returns the output unchanged, as a torch hook does.
    """

    def __init__(self, hook_fn: TypedFunction, module: nn.Module, name: str | None, id_: str, as_torch: bool) -> None:
        self.hook_fn = hook_fn
        self.module = module
        self.name = name  # The manager's name for the module; None without a manager.
        self.id = id_
        self.as_torch = as_torch
        self.is_active = False  # A gradient may arrive after the hook was switched off or removed.
        self.was_called = False

    def add_to(self, hooks: hl.Hooks) -> None:
        """Add the hookline hooks that call the function.

        The module must not keep a manager alive: the function may be a method of the object that owns the manager.
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
        """Call the function with the inputs; its result replaces them."""
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
        """Call the function with inputs and output; its result replaces the output."""
        if self.as_torch:
            return self._call(tuple(call.args), output)
        outputs = output if isinstance(output, tuple) else (output,)
        new = self._call(tuple(call.args), outputs)
        if new is None or new is outputs:
            return None
        if not isinstance(new, tuple):
            raise AssertionError("when altering module outputs, must return result as a tuple")
        if isinstance(output, tuple):
            kind: Any = type(output)  # A named tuple stays a named tuple.
            return new if type(new) is kind else getattr(kind, "_make", kind)(new)
        if len(new) != 1:
            raise ValueError(f"{len(new)} outputs returned for 1")
        return new[0]

    def backward(self, come: BackwardCall) -> Sequence[Any] | None:
        """Call the function with the gradients of a call. Only an `as_torch` hook may change them."""
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


def _cloned(gradients: Any) -> Any:
    """Return copies of gradients, which a hook may write into."""
    if isinstance(gradients, Tensor):
        return gradients.clone()
    if isinstance(gradients, Mapping):
        return {key: _cloned(part) for key, part in gradients.items()}
    return tuple(map(_cloned, gradients)) if isinstance(gradients, tuple) else gradients


def _bind(values: tuple[Any, ...], bound: dict[str, Any], call: Any) -> dict[str, Any]:
    """Return new positional inputs by parameter name. Those of `*args` are one tuple."""
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
    """Return True if `value` is a tuple that holds the last argument: the only one in `*args`."""
    return type(value) is tuple and len(value) == 1 and value is not last


def _positional(module: nn.Module) -> tuple[list[str], str]:
    """Return the names of the positional parameters of a module's forward, and the name of its `*args`."""
    parameters = inspect.signature(module.forward).parameters.values()
    names = [one.name for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    return names, next((one.name for one in parameters if one.kind is one.VAR_POSITIONAL), "")


def detach_hook(module: nn.Module, input: tuple[Any, ...], output: Tensor) -> Tensor:
    """Detach the output from the graph. This is a plain torch forward hook."""
    return output.detach()


NO_FORWARD = "there is no forward to call; register the modules inside"

_switching = threading.RLock()


class HookFunction(TypedFunction):
    """A function, its kind of hook, and its handle for each module."""

    def __init__(
        self,
        hook_fn: Callable[..., Any],
        hook_type: str,
        name: str | None = None,
        modules: Iterable[nn.Module] | None = None,
        pass_by_pos: bool = True,
        retain_forward_cache: bool = False,
    ) -> None:
        super().__init__(hook_fn, hook_type, name, pass_by_pos, retain_forward_cache)
        self.module_to_handle: dict[nn.Module, HookHandle] = {}
        self.register(*modules or ())

    @property
    def handles(self) -> list[HookHandle]:
        """The handles of this function, in the order of registration."""
        return list(self.module_to_handle.values())

    def register(self, *modules: nn.Module, activate: bool = True, register_to_module: bool = True) -> list[HookHandle]:
        """Hook modules that have a `name`, without a manager.

        Args:
            register_to_module: Call the function as torch would, instead of with tuples of all inputs and outputs.
        """
        for module in modules:
            if not hasattr(module, "name"):
                raise AssertionError("Module must be given name before hook registration")
        self.refuse_again((module, module.name) for module in modules)
        handles = [
            HookHandle(self, module, f"{self.name}[{module.name}]", activate, register_to_module) for module in modules
        ]
        warn_of_never_called(handles)
        return handles

    def deactivate_all_handles(self) -> None:
        """Deactivate the function on every module."""
        for handle in self.handles:
            handle.deactivate()

    def refuse_again(self, named: Iterable[tuple[nn.Module, object]]) -> None:
        """Raise if this function is already on one of these modules, or if a module is listed twice."""
        names: dict[nn.Module, object] = {}
        for module, name in named:
            if module in self.module_to_handle or module in names:
                first = names.get(module, name)
                raise AssertionError(f"Hook function {self.name} was already registered with module {first}")
            names[module] = name


class HookHandle:
    """One hook function on one module. It has its own hookline hooks, which it switches on and off and removes."""

    def __init__(
        self,
        hook_fn: HookFunction,
        module: nn.Module,
        name: str,
        activate: bool = True,
        register_to_module: bool = True,
    ) -> None:
        self._put_on(hook_fn, module, name, None, register_to_module)
        if activate:
            self.activate()

    @classmethod
    def of_manager(cls, hook_fn: HookFunction, module: nn.Module, module_name: str, as_torch: bool) -> HookHandle:
        """Return an inactive handle for a manager. The module does not keep it alive."""
        handle = object.__new__(cls)
        handle._put_on(hook_fn, module, f"{hook_fn.name}[{module_name}]", module_name, as_torch)
        return handle

    def _put_on(
        self, hook_fn: HookFunction, module: nn.Module, name: str, module_name: str | None, as_torch: bool
    ) -> None:
        self.hook_fn = hook_fn
        self.module = module
        self.name = name
        self.handle = hl.Hooks(module, active=False)
        self.when_removed: list[Callable[[HookHandle], None]] = []
        self.module_name = str(getattr(module, "name", "")) if module_name is None else module_name
        self.why_never_called = ""
        hook_fn.refuse_again([(module, self.module_name)])
        self._caller = Caller(hook_fn, module, module_name, name, as_torch)
        self._on = False
        self._open: set[object] = set()  # All open contexts.
        self._held: set[object] = set()  # The open contexts that keep the hook active.
        self._is_removed = False
        self._is_to_be_renewed = False
        self._hook()
        self._is_named = module_name is not None and claim(module, module_name)
        hook_fn.module_to_handle[module] = self

    @property
    def active(self) -> bool:
        """True while the hook is active."""
        return self._on or bool(self._held)

    @property
    def was_called(self) -> bool:
        """True once the function has been called."""
        return self._caller.was_called

    def is_active(self) -> bool:
        """Return True if the hook is active."""
        return self.active

    def activate(self, raise_on_active: bool = False) -> None:
        """Activate the hook."""
        if self.active and raise_on_active:
            raise AssertionError("Cannot activate hook: Hook is already active")
        if self._is_removed:
            warn(f"{self.name} was removed, and can't be activated; register the function again")
        self._switch(True, self._held)

    def deactivate(self, raise_on_inactive: bool = False) -> None:
        """Deactivate the hook, even inside open contexts."""
        if not self.active and raise_on_inactive:
            raise AssertionError("Cannot deactivate hook: Hook is already inactive")
        self._switch(False, set())

    def hold(self) -> Callable[[], None]:
        """Activate the hook and return a function that restores its previous state."""
        context = object()
        with _switching:
            was_on, held = self._on, self._held
            self._open.add(context)
            self._switch(was_on, held | {context})

        def restore() -> None:
            with _switching:
                self._open.remove(context)
                self._switch(was_on, (held | self._held) & self._open)

        return restore

    def remove(self) -> None:
        """Remove the hook from its module permanently."""
        if self._is_removed:
            return
        self.deactivate()
        self._is_removed = True
        self.handle.remove()
        del self.hook_fn.module_to_handle[self.module]
        if self._is_named:
            release(self.module, self.module_name)
        for forget in self.when_removed:
            forget(self)

    def renew(self) -> None:
        """Move the hook behind the hooks that were registered later."""
        if self.handle:
            self._is_to_be_renewed = True
            self._switch(self._on, self._held)

    def set_name(self, name: str) -> None:
        """Change the id of the handle."""
        self.name = self._caller.id = name

    def __repr__(self) -> str:
        state = "active" if self.active else "inactive"
        return f"<{self.name} {type(self)} registered to {self.module_name} ({state})>"

    def _hook(self) -> None:
        try:
            self._caller.add_to(self.handle)
        except hl.SiteError as error:  # For example at a ModuleList, or a module made by torch.jit.
            has_forward = inspect.getattr_static(type(self.module), "forward") is not nn.Module.forward
            self.why_never_called = str(error).replace("''", "it", 1) if has_forward else NO_FORWARD

    def _switch(self, on: bool, held: set[object]) -> None:
        with _switching:
            self._on, self._held = (False, set()) if self._is_removed else (on, held)
            self._caller.is_active = self.active
            if not self.handle:
                return
            if not self.active:
                self.handle.deactivate()
                return
            if self._is_to_be_renewed:
                self.handle.remove()
                self._hook()
                self._is_to_be_renewed = False
            self.handle.activate()


class Holding:
    """A context in which some handles are active. Leaving it restores their previous state. It can be entered again."""

    def __init__(self, handles: Callable[[], Iterable[HookHandle]]) -> None:
        self._handles = handles
        self._entered: list[ExitStack] = []

    def __enter__(self) -> None:
        with ExitStack() as stack:
            for handle in self._handles():
                stack.callback(handle.hold())
            self._entered.append(stack.pop_all())

    def __exit__(self, *_: object) -> None:
        self._entered.pop().close()


def warn_of_never_called(handles: Sequence[HookHandle]) -> None:
    """Warn about hooks that can never be called, except on containers whose inner modules were hooked as well."""
    hooked = {handle.module for handle in handles if not handle.why_never_called}
    reasons: dict[str, list[HookHandle]] = {}
    for handle in handles:
        why = handle.why_never_called
        if why and not (why == NO_FORWARD and hooked.intersection(handle.module.modules())):
            reasons.setdefault(why, []).append(handle)
    for why, those in reasons.items():
        hook_fn = those[0].hook_fn
        is_named = hook_fn.name != repr(hook_fn.function)
        label = hook_fn.name if is_named else getattr(hook_fn.function, "__name__", hook_fn.name)
        modules = ", ".join(f"{handle.module_name!r} ({type(handle.module).__name__})" for handle in those)
        warn(f"{label} will never be called for {modules}: {why}")
