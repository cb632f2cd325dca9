"""Hooks for the tests of tacklebox: those of its README, and some that note what they see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from hookline.compat.tacklebox.hook_management import (
    HookManager,
)


class Log:
    """Hooks that note what they see, as functions of their own."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def hook(self, name: str = "", count: int = 3) -> Callable[..., None]:
        if count == 2:
            return lambda module, inputs: self.seen.append((name, inputs))
        return lambda module, first, second: self.seen.append((name, first, second))

    @property
    def names(self) -> list[str]:
        names = [one[0] for one in self.seen]
        self.seen.clear()
        return names


def my_forward_hook(module, inputs, outputs):
    print("Finished forward pass for module %s" % module.name)  # noqa: T201, UP031
    return outputs


def my_forward_pre_hook(module, inputs):
    print("Beginning forward pass for module %s" % module.name)  # noqa: T201, UP031
    return inputs


def my_backward_hook(module, grad_in, grad_out):
    print("Finished backward pass for module %s" % module.name)  # noqa: T201, UP031


def registered(net: nn.Sequential, activate: bool = True) -> HookManager:
    """The manager of the README's quickstart."""
    my_module, other_module, third = net
    more_named_modules = {"third": third}
    hookmngr = HookManager()
    for register, function in (
        (hookmngr.register_forward_hook, my_forward_hook),
        (hookmngr.register_forward_pre_hook, my_forward_pre_hook),
        (hookmngr.register_backward_hook, my_backward_hook),
    ):
        register(
            function, my_module_name=my_module, other_module_name=other_module, activate=activate, **more_named_modules
        )
    return hookmngr
