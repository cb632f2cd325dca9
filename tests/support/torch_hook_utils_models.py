"""Models for the tests of torch_hook_utils."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import nn

SQUARE = torch.tensor([[[1.0, 2.0], [3.0, 4.0]]])


def encoder() -> nn.Sequential:
    return nn.Sequential(OrderedDict(pool=nn.MaxPool2d(kernel_size=2)))


def decoder() -> nn.Sequential:
    return nn.Sequential(OrderedDict(pool=nn.MaxUnpool2d(kernel_size=2)))
