"""Models and hooks for the tests of `hookline.compat`, library by library."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hookline as hl
from hookline.compat.auto_hookpoint import (
    auto_hook,
)
from hookline.compat.nice_hooks import expand_module_path
from hookline.compat.tacklebox.hook_management import (
    HookManager,
)

# auto_hookpoint.


class Mixed(nn.Module):
    """A model with parameters, a container, a hook point of its author, and a buffer."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.relu_hook = hl.HookPoint()
        self.W = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("steps", torch.zeros(1))

    def forward(self, x):
        return F.dropout(self.relu_hook(self.layers(self.fc(x))) @ self.W, training=self.training)


@auto_hook
class Decorated(nn.Module):
    """What it is for."""

    def __init__(self, width=4):
        super(Decorated, self).__init__()  # noqa: UP008  # Fails if auto_hook replaces the class.
        self.fc1 = nn.Linear(width, width)
        self.W = nn.Parameter(torch.eye(width))

    def forward(self, x):
        return self.fc1(x) @ self.W


# nice_hooks.


class Model(nn.Module):
    """A model with the child names of the README. The ReLU writes in place, and `unused` never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.mod1 = nn.Sequential(nn.Linear(4, 5), nn.ReLU(inplace=True))
        self.mod2 = nn.Linear(5, 5)
        self.blocks = nn.ModuleList([nn.Linear(5, 5)])
        self.unused = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.blocks[0](self.mod2(self.mod1(x))) * scale  # type: ignore[no-any-return]


X = torch.linspace(-1, 1, 8).reshape(2, 4)


def paths(model: nn.Module, path: Any) -> list[str]:
    return [str(found) for found, _ in expand_module_path(model, path)]


# tacklebox.


class Log:
    """A log, and hook functions that write their arguments to it."""

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


# torch_hook_utils.

SQUARE = torch.tensor([[[1.0, 2.0], [3.0, 4.0]]])


def encoder() -> nn.Sequential:
    return nn.Sequential(OrderedDict(pool=nn.MaxPool2d(kernel_size=2)))


def decoder() -> nn.Sequential:
    return nn.Sequential(OrderedDict(pool=nn.MaxUnpool2d(kernel_size=2)))


# torchhook.


class BasicBlock(nn.Module):
    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = None
        if stride > 1:
            self.downsample = nn.Sequential(nn.Conv2d(width_in, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(y + (x if self.downsample is None else self.downsample(x)))


class ResNet(nn.Module):
    """The layers of torchvision's resnet18, by the same names; `widths` make it small."""

    def __init__(self, widths: tuple[int, ...] = (4, 4, 8, 8), classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, widths[0], 7, 2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(widths[0])
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, padding=1)
        before = widths[0]
        for number, width in enumerate(widths, 1):
            stride = 1 if number == 1 else 2
            blocks = BasicBlock(before, width, stride), BasicBlock(width, width, 1)
            setattr(self, f"layer{number}", nn.Sequential(*blocks))
            before = width
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(before, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


def image(size: int = 32) -> Tensor:
    return torch.randn(1, 3, size, size)
