"""Count steps: those of the optimizers that hold a model's parameters; without training, each forward is one."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


class Steps:
    """Counts the steps of the optimizers of a model, however many there are, and says when one begins and ends.

    Torch's hooks on all optimizers are used, so that nobody has to say which one trains the model. The first that steps
    after a pass counts; others, until the next pass begins, belong to the same step.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Iterable[torch.optim.Optimizer],
        before: Callable[[torch.optim.Optimizer], object],
        after: Callable[[], object],
    ) -> None:
        self._model = weakref.ref(model)
        self._before, self._after = before, after
        self._given = {id(one): one for one in optimizers}
        # How many parameters an optimizer holds, and whether they are of the model.
        self._known: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, bool]] = weakref.WeakKeyDictionary()
        self._stepped: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # Since the last pass.
        self._handles: list[Any] = []
        self.done = 0  # How many steps are over.
        self.trains = False  # Whether the model is trained, so that a forward is not a step by itself.

    def has_stepped(self, optimizer: torch.optim.Optimizer | None = None) -> bool:
        """Whether this optimizer, or any, has stepped since the last pass."""
        return bool(self._stepped) if optimizer is None else optimizer in self._stepped

    def begin_pass(self) -> None:
        """Say that a forward or a backward begins: what optimizers do after it is another step."""
        self._stepped.clear()

    def open(self) -> None:
        """Begin to count."""
        self._handles = [
            register_optimizer_step_pre_hook(self._on_step_begun),
            register_optimizer_step_post_hook(self._on_step_done),
        ]

    def close(self) -> None:
        """Leave all optimizers alone."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _is_ours(self, optimizer: torch.optim.Optimizer) -> bool:
        if self._given:
            return id(optimizer) in self._given
        held = [one for group in optimizer.param_groups for one in group["params"]]
        known = self._known.get(optimizer)
        if known is None or known[0] != len(held):
            model = self._model()
            own = {id(parameter) for parameter in model.parameters()} if model is not None else set()
            known = self._known[optimizer] = len(held), any(id(one) in own for one in held)
        return known[1]

    def _on_step_begun(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if self._is_ours(optimizer):
            self._before(optimizer)

    def _on_step_done(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if not self._is_ours(optimizer):
            return
        is_first = not self._stepped
        self._stepped.add(optimizer)
        if is_first:
            self.trains = True
            self.done += 1
            self._after()


def span(steps: Sequence[int]) -> str:
    """Return the numbers of some steps as text, the first and the last of many."""
    return ", ".join(map(str, steps)) if len(steps) < 5 else f"{steps[0]}, {steps[1]} … {steps[-1]}"
