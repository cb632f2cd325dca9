"""What a sweep runs and measures: a function that does both, or a model, its arguments and a metric of the output."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from hookline import Hooks, Site
from hookline._kernel import call_under, describe, find_places
from hookline._sweep.batch_rows import Arguments, repeat_arguments
from hookline._sweep.start_state import StartState
from hookline._torch import AnyDropout
from hookline.errors import HooklineError, SiteError, warn


class FunctionTask:
    """Runs the model and measures it: the metric itself runs the model."""

    def __init__(self, model: nn.Module, metric: Callable[..., Any]) -> None:
        self.model = model
        self.metric = metric
        _refuse_metric(metric, ())

    def measure(self, hooks: Hooks) -> Any:
        """Measure the model under some hooks."""
        with hooks:
            return checked(self.metric())


class ModelTask(FunctionTask):
    """Runs the model with given arguments, and gives the output, or the value at a site, to the metric."""

    def __init__(
        self, model: nn.Module, call: Callable[..., Any], arguments: Arguments, metric: Callable[..., Any], at: Any
    ) -> None:
        self.model = model
        self.call = call
        self.arguments = arguments
        self.metric = metric
        self.metric_at = None if at is None else _one_site(model, at)
        self.start = StartState(model)
        self.changes_state: bool | None = None  # Whether runs change what is put back after them, as the first shows.
        _refuse_metric(metric, (None,))

    @property
    def runs_forward(self) -> bool:
        """Whether a run is one forward of the model, and no other method of it."""
        return self.call is self.model

    def measure(self, hooks: Hooks) -> Any:
        """Run the model under some hooks, and measure the output."""
        return checked(self.metric(self.run(hooks)))

    def run(self, hooks: Hooks, arguments: Arguments | None = None) -> Any:
        """Run the model under some hooks, and return what the metric gets."""
        arguments = repeat_arguments(self.arguments, 1) if arguments is None else arguments
        if self.metric_at is None:
            return self.run_model(hooks, arguments)
        acts = hooks.capture(self.metric_at, stop=True)
        self.run_model(hooks, arguments)
        return acts[self.metric_at]

    def run_model(self, hooks: Hooks, arguments: Arguments) -> Any:
        """Run the model under some hooks, and return its output."""
        try:
            with torch.no_grad(), hooks if len(hooks) else nullcontext():
                return call_under(hooks, self.call, *arguments)
        finally:
            # What the first run does not change, one with a changed value may: both are looked at quickly.
            has_changed = self.start.put_back_random() or self.start.has_other_numbers()
            if has_changed or self.changes_state is not False:
                self.changes_state = self.start.put_back() or has_changed or bool(self.changes_state)


def checked(value: Any) -> Any:
    """Return a measurement: a number, or a detached tensor, which may still be computed on a device."""
    if isinstance(value, Tensor) and not value.is_complex() and value.numel():
        return value.detach().clone()
    is_array = getattr(value, "size", 1) != 1
    if isinstance(value, (Tensor, complex, str)) or not hasattr(value, "__float__") or is_array:
        raise HooklineError(f"metric returns a number or a tensor, not {describe(value)}")
    return float(value)


def settled(values: list[Any]) -> list[Any]:
    """Return measurements as floats or as tensors of several elements. All are read from their device at once."""
    single = [number for number, value in enumerate(values) if isinstance(value, Tensor) and value.numel() == 1]
    found = list(values)
    if single:
        numbers = torch.cat([values[number].reshape(1) for number in single]).double().tolist()
        for number, value in zip(single, numbers, strict=True):
            found[number] = value
    return found


def _one_site(model: nn.Module, at: Any) -> Site:
    places = find_places(model, [at])
    if len(places) != 1 or places[0].site.is_gradient:
        raise SiteError(f"metric_at={at!r} is one site at which a value passes, and {len(places)} are named")
    return places[0].site


def _refuse_metric(metric: Any, given: tuple[Any, ...]) -> None:
    """Raise if `metric` can't be called as it will be, before the model runs."""
    if given:
        what = "with run=, metric is a function of the output of the model, as in `lambda output: output.mean()`"
    else:
        what = "without run=, metric is a function that runs the model, as in `lambda: loss(model(x))`"
    if not callable(metric):
        raise HooklineError(f"{what}, not {describe(metric)}")
    try:
        signature = inspect.signature(metric)
    except (TypeError, ValueError):  # A builtin may have no signature.
        return
    try:
        signature.bind(*given)
    except TypeError as error:
        name = getattr(metric, "__name__", type(metric).__name__)
        raise HooklineError(f"{what}; {name}{signature} can't be: {error}") from None


def warn_of_dropout(model: nn.Module) -> None:
    """Warn if dropout is on, since measurements then vary by chance."""
    name = dropout_in(model)
    if name is not None:
        warn(
            f"'{name}' is in train mode, and drops different elements in each run of the sweep, so "
            "measurements vary by chance too; call model.eval() first"
        )


def dropout_in(model: nn.Module) -> Site | None:
    """Return a dropout that is on, if there is one."""
    for name, module in model.named_modules():
        if isinstance(module, AnyDropout) and module.training and module.p > 0:
            return Site(name)
    return None
