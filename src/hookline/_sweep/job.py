"""The arguments of a sweep, in the form in which other processes get them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from hookline._kernel import Where, map_tensors, model_of
from hookline._scan.fake_run import call_arguments_of
from hookline._sweep.changes import Change
from hookline._sweep.sweeper import Sweeper
from hookline._sweep.task import FunctionTask, ModelTask, warn_of_dropout
from hookline.errors import HooklineError


class SweepJob:
    """The arguments of a sweep. Workers on Ray get them pickled."""

    def __init__(
        self,
        model: Any,
        metric: Callable[..., Any] | list[Callable[..., Any]],
        runs: list[Any],
        changes: list[Change],
        metric_at: Where | None,
        batch: int | None,
        may_make: bool,
    ) -> None:
        self.model = model
        self.metrics = list(metric) if isinstance(metric, list) else [metric] * len(runs)
        if len(self.metrics) != len(runs):
            raise HooklineError(f"run= has {len(runs)} batches, and metric is a list of {len(self.metrics)} functions")
        self.runs = runs
        self.changes = changes
        self.metric_at = metric_at
        self.batch = batch
        is_of_model = isinstance(model, nn.Module) or isinstance(getattr(model, "__self__", None), nn.Module)
        self.makes_model = may_make and not is_of_model and callable(model)
        if runs[0] is None and self.makes_model:
            raise HooklineError("without run=, metric runs the model; give the model, not a function that makes one")
        if runs[0] is None:
            warn_of_dropout(self.owner)

    @cached_property
    def call(self) -> Any:
        """What is called: the model, or a method of it."""
        return self.model() if self.makes_model else self.model

    @property
    def owner(self) -> nn.Module:
        """The model."""
        return self.call if isinstance(self.call, nn.Module) else model_of("sweep", self.call, None)

    def sweeper(self, number: int) -> Sweeper:
        """Return what measures the batch of this number."""
        run, change = self.runs[number], self.changes[number]
        if run is None:
            return Sweeper(self.owner, FunctionTask(self.owner, self.metrics[0]), change, None)
        arguments = call_arguments_of(run)
        if self.makes_model:  # The arguments come from a machine that may have no GPU.
            device = next((one.device for one in self.owner.parameters()), torch.device("cpu"))
            arguments = map_tensors(lambda tensor: tensor.to(device), arguments)
            if isinstance(change.against, (tuple, dict, Tensor)):
                change.against = map_tensors(lambda tensor: tensor.to(device), change.against)
        task = ModelTask(self.owner, self.call, arguments, self.metrics[number], self.metric_at)
        return Sweeper(self.owner, task, change, self.batch)
