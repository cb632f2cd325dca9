"""Models for the tests of torchhook."""

from __future__ import annotations

import torch
from torch import Tensor, nn


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


class Returns(nn.Module):
    """Gives what a function makes of its input."""

    def __init__(self, function=lambda x: x) -> None:
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def image(size: int = 32) -> Tensor:
    return torch.randn(1, 3, size, size)
