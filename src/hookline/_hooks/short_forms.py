"""The short forms `capture`, `patch`, `edit` and `skip`, and `run`, which does all of them in one line."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Concatenate, ParamSpec, cast, overload

import torch  # noqa: F401  # For the examples.
from torch import nn

from hookline import _why_nothing_passed as why
from hookline._cache.cache import Cache
from hookline._engine.action import NOTHING
from hookline._engine.shadowed_forward import is_shadow
from hookline._engine.stop import STOPPED, run_until
from hookline._hooks.hooks import Hooks
from hookline._hooks.lifecycle import look_at_exit
from hookline._open_blocks import open_blocks
from hookline._option_checks import refuse_flags
from hookline._sites.resolve import Where
from hookline._sites.tree import Names
from hookline._torch import Line, calling_line, is_running, reshard_after_stop
from hookline._values.nested import describe
from hookline.errors import EditError, HooklineError, NeverFired, SiteError, did_you_mean

KEYWORDS = ("capture", "patch", "edit", "skip", "stop", "model")
Options = ParamSpec("Options")


def _with_options_of(
    method: Callable[Concatenate[Hooks, Options], Any],
) -> Callable[[Callable[..., Hooks]], Callable[Concatenate[nn.Module, Options], Hooks]]:
    """Give a short form the parameters of a method of `Hooks`, with `model` in place of `self`."""

    def declare(function: Callable[..., Hooks]) -> Callable[Concatenate[nn.Module, Options], Hooks]:
        own, taken = inspect.signature(function), inspect.signature(method)
        model, *_ = own.parameters.values()
        _, *options = taken.parameters.values()
        vars(function)["__signature__"] = own.replace(parameters=[model, *options])
        return function

    return declare


@_with_options_of(Hooks.capture)
def capture(model: nn.Module, *where: Any, **options: Any) -> Hooks:
    """Capture the values that pass at these places. The options are those of `Hooks.capture`.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> with capture(model, "*", "2:input") as acts:
    ...     output = model(torch.ones(3, 4))
    >>> acts
    4 sites, 216 bytes
    site     calls  dtype    shape
    ───────  ─────  ───────  ──────
    0            1  float32  (3, 8)
    1            1  float32  (3, 8)
    2:input      1  float32  (3, 8)
    2            1  float32  (3, 2)
    """
    hooks = short_form(model)
    if options or not hooks._capture_plainly(where):
        hooks.capture(*where, **options)
    warn_unless_entered(hooks, "capture", calling_line())
    return hooks


def patch(model: nn.Module, values: Mapping[Any, Any], check: bool = True) -> Hooks:
    """Replace the values that pass with given ones: numbers, tensors, any object, or a cache from another run.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
    >>> with patch(model, {"0": 0.0, "1[:, 0]": 7.0}):
    ...     model(torch.ones(1, 4))
    tensor([[7., 0., 0., 0., 0., 0., 0., 0.]])
    """
    hooks = short_form(model)
    hooks._patch(values, check=check)
    warn_unless_entered(hooks, "patch", calling_line())
    return hooks


def edit(
    model: nn.Module,
    where: Where,
    function: Callable[..., Any] = NOTHING,
    with_call: bool = False,
    check: bool = True,
    clone: bool | None = None,
    gather: bool = True,
) -> Hooks:
    """Replace each value that passes with `function(value)`. The options are those of `Hooks.edit`.

    >>> model = nn.Sequential(nn.Identity(), nn.Identity())
    >>> with edit(model, "0", lambda value: value + 1):
    ...     model(torch.zeros(2))
    tensor([1., 1.])
    """
    hooks = short_form(model)
    hooks._edit(where, function, with_call=with_call, check=check, clone=clone, gather=gather)
    warn_unless_entered(hooks, "edit", calling_line())
    return hooks


def skip(model: nn.Module, where: Where, value: Any = NOTHING, check: bool = True) -> Hooks:
    """Don't run these modules: each returns its first argument, or `value`. `check` is as in `Hooks.skip`.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Softmax(-1))
    >>> with skip(model, "0"):
    ...     model(torch.zeros(2))
    tensor([0.5000, 0.5000])
    """
    hooks = short_form(model)
    hooks.skip(where, value, check=check)
    warn_unless_entered(hooks, "skip", calling_line())
    return hooks


@overload
def run(
    call: Callable[..., Any],
    /,
    *args: Any,
    capture: None = None,
    patch: Mapping[Any, Any] | None = None,
    edit: Mapping[Any, Callable[..., Any]] | None = None,
    skip: Where | Mapping[Any, Any] | None = None,
    stop: bool = False,
    model: nn.Module | None = None,
    **kwargs: Any,
) -> Any: ...
@overload
def run(
    call: Callable[..., Any],
    /,
    *args: Any,
    capture: Where,
    patch: Mapping[Any, Any] | None = None,
    edit: Mapping[Any, Callable[..., Any]] | None = None,
    skip: Where | Mapping[Any, Any] | None = None,
    stop: bool = False,
    model: nn.Module | None = None,
    **kwargs: Any,
) -> tuple[Any, Cache]: ...
def run(
    call: Callable[..., Any],
    /,
    *args: Any,
    capture: Where | None = None,
    patch: Mapping[Any, Any] | None = None,
    edit: Mapping[Any, Callable[..., Any]] | None = None,
    skip: Where | Mapping[Any, Any] | None = None,
    stop: bool = False,
    model: nn.Module | None = None,
    **kwargs: Any,
) -> Any:
    """Call a model, or a bound method of one, once; return its output, or (output, cache) when `capture` is given.

    With `model=`, `call` is any function that runs that model: `run(lambda x: model.encode(x) + 1, x, model=model)`.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> output, acts = run(model, torch.ones(3, 4), capture="1", stop=True)
    >>> output, acts["1"].shape
    (None, torch.Size([3, 8]))
    """
    owner = model_of("run", call, model)
    refuse_flags(stop=stop)
    if stop and capture is None:
        raise SiteError("stop=True ends the forward when every captured site has fired; give capture= too")
    _refuse_options(call, kwargs, model, "capture" if edit is None or capture is not None else "edit")
    hooks = short_form(owner)
    if patch is not None:
        hooks.patch(patch)
    if edit is not None and not isinstance(edit, Mapping):
        raise EditError(f"edit= takes a mapping of site to function, not {type(edit).__name__}")
    for name, given in (("edit", edit), ("skip", skip)):
        if isinstance(given, Mapping) and not given:
            raise EditError(f"{name}= is empty; give places, as in {name}={{site: ...}}, or leave it out")
    for where, function in (edit or {}).items():
        hooks.edit(where, function)
    if skip is not None:
        for where, value in skip.items() if isinstance(skip, Mapping) else [(skip, NOTHING)]:
            hooks.skip(where, skip if isinstance(skip, Cache) else value)
    if capture is not None:
        hooks.capture(capture, stop=stop)
    if not len(hooks):
        return call(*args, **kwargs)
    with hooks as cache:
        output = call_under(hooks, call, args, kwargs)
    return output if capture is None else (output, cache)


def model_of(name: str, call: Any, model: Any) -> nn.Module:
    """Return the model that `call` runs: `model` if given, else `call` itself or the model it is a method of."""
    if isinstance(model, nn.Module):
        return model
    if model is not None:
        raise SiteError(f"model= takes the model that is run, a torch.nn.Module, not {describe(model)}")
    owner = call if isinstance(call, nn.Module) else getattr(call, "__self__", None)
    if isinstance(owner, nn.Module):
        return owner
    what = getattr(call, "__name__", None) or describe(call)
    hint = f"; a function that runs one takes it as model=: {name}({what}, ..., model=model)"
    is_function = callable(call) and not isinstance(call, type)
    raise SiteError(f"{name} takes a model or a method of one, not {what}{hint if is_function else ''}")


def _refuse_options(call: Callable[..., Any], kwargs: Mapping[str, Any], model: nn.Module | None, verb: str) -> None:
    """Raise for keywords meant for hookline that would go to the model: options of `capture`, and misspelt keywords."""
    function = call.forward if isinstance(call, nn.Module) else call
    try:
        taken = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return
    if model is not None and "model" in taken and isinstance(getattr(function, "__self__", None), nn.Module):
        raise HooklineError("model= is the model that run calls; pass the call's own argument of that name by position")
    for name in [name for name in kwargs if name not in taken]:
        if name in {*inspect.signature(Hooks.capture).parameters} - {"self", "where", "name", "stop"}:
            raise HooklineError(f"run has no option {name!r}; write `with hl.{verb}(model, ..., {name}=...):`")
        near = did_you_mean(name, KEYWORDS)
        if near and name[:4] in [keyword[:4] for keyword in KEYWORDS]:
            raise HooklineError(f"run has no option {name!r}{near}")


def call_under(hooks: Hooks, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a model, or a function that runs it, inside the block of `hooks`. An early stop ends it, with None."""
    if call is hooks._model:
        return call(*args, **kwargs)
    lifecycle, owner = hooks._lifecycle, getattr(call, "__self__", None)
    is_method = isinstance(owner, nn.Module)
    shadow = vars(owner).get(getattr(call, "__name__", "")) if is_method else None
    if is_shadow(shadow):  # `call` is the method from before the block, without the shadow.
        call = cast(Callable[..., Any], shadow)
    output = run_until(lifecycle.left(open_blocks.get()), lambda: call(*args, **kwargs), lifecycle.module)
    if output is STOPPED and is_running():
        reshard_after_stop(lifecycle.module, is_over=True)
    if not lifecycle.session.since and not is_method and not any(hook.fired for hook in hooks):
        raise NeverFired(why.did_not_run(call, lifecycle.module))
    if not lifecycle.session.since:
        lifecycle.session.forwards += 1  # A method that does not call the model's forward counts as a run of the model.
        path = Names(lifecycle.module).of(owner)[0] if isinstance(owner, nn.Module) else ""
        lifecycle.session.called = f"{path}.{getattr(call, '__name__', type(call).__name__)}()".lstrip(".")
    return None if output is STOPPED else output


def short_form(model: nn.Module) -> Hooks:
    """Make hooks that are attached when their block is entered and detached when it is left."""
    look_at_exit()
    hooks = Hooks(model, active=False)
    hooks._brief = True
    return hooks


def warn_unless_entered(hooks: Hooks, verb: str, line: Line | None = None) -> None:
    """Warn if these hooks, which the user made by `hl.<verb>` on that line, are freed without being entered.

    An empty verb cancels the warning.
    """
    hooks._lifecycle.verb, hooks._lifecycle.added_at = verb, line
