"""The state in which each run of a sweep begins: attributes, buffers and random generators are put back after a run."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hookline._kernel import ATOMS, Names
from hookline._scan.restore_modules import module_restorer


class StartState:
    """What runs may change, as it was before the first one."""

    def __init__(self, model: nn.Module) -> None:
        seen = set[int]()
        self._restorers = [module_restorer(module, seen) for _, module in Names(model).once()]
        self._numbers = [
            (vars(module), name, held)
            for _, module in Names(model).once()
            for name, held in vars(module).items()
            if isinstance(held, ATOMS)
        ]
        self._buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
        self._devices = sorted({one.device.index for one in model.parameters() if one.is_cuda})
        self._random = self._random_states()
        self.are_buffers_written = False  # Whether a run has written to a buffer, as a BatchNorm's does in train mode.

    def put_back(self) -> bool:
        """Put back what has changed since the first run. Return True if anything had."""
        buffers = [(buffer, content) for buffer, content in self._buffers if not torch.equal(buffer, content)]
        with torch.no_grad():
            for buffer, content in buffers:  # BatchNorm writes without raising the version.
                buffer.copy_(content)
        self.are_buffers_written |= bool(buffers)
        was_random = self.put_back_random()
        return self.put_back_modules() or bool(buffers) or was_random

    def has_other_numbers(self) -> bool:
        """Return True if an attribute of a module that is a number, a text or None is another object now."""
        return any(names.get(name) is not held for names, name, held in self._numbers)

    def put_back_random(self) -> bool:
        """Put back the state of random generators. Return True if it had changed."""
        was_random = any(not one.equal(two) for one, two in zip(self._random, self._random_states(), strict=True))
        if was_random:
            torch.set_rng_state(self._random[0])
            for device, state in zip(self._devices, self._random[1:], strict=True):
                torch.cuda.set_rng_state(state, device)
        return was_random

    def put_back_modules(self) -> bool:
        """Put back the attributes of modules. Return True if one had changed."""
        return any([put_back() for put_back in self._restorers])

    def _random_states(self) -> list[Tensor]:
        return [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in self._devices)]
