"""What a step is: one of an optimizer that holds the model's parameters; of a model that is not trained, a forward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


class Steps:
    """Counts the steps of the optimizers of a model, however many there are, and says when one begins and ends.

    Torch's hooks on all optimizers are used, so that nobody has to say which one trains the model.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Iterable[torch.optim.Optimizer],
        before: Callable[[torch.optim.Optimizer], object],
        after: Callable[[torch.optim.Optimizer], object],
    ) -> None:
        self._model = weakref.ref(model)
        self._before, self._after = before, after
        self._counts: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        self._given = {id(one): one for one in optimizers}
        for one in optimizers:
            self._counts[one] = 0
        # How many parameters an optimizer holds, and whether they are of the model.
        self._known: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, bool]] = weakref.WeakKeyDictionary()
        self._most = 0  # Of one optimizer, which may be gone by now.
        self._handles: list[Any] = []
        self.by_hand = 0
        self.forwards = 0  # Those without gradients.
        self.trains = False  # Whether any forward was one with gradients, so that steps are not forwards.

    @property
    def done(self) -> int:
        """How many steps are over."""
        stepped = self._most + self.by_hand
        return stepped if stepped or self.trains else self.forwards

    @property
    def are_level(self) -> bool:
        """Whether all optimizers that are known have done as many steps."""
        return len(set(self._counts.values())) <= 1

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
            self._counts.setdefault(optimizer, self._most)
            self._before(optimizer)

    def _on_step_done(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if optimizer in self._counts and self._is_ours(optimizer):
            self._counts[optimizer] += 1
            self._most = max(self._most, self._counts[optimizer])
            self._after(optimizer)
