"""Hints that lie in settings: attributes, modes and dtypes."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

import hookline as hl
from tests.support.compared_blocks import Block, pair

X = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))


def test_two_settings_are_found_together():
    a, b = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=2, dilation=2)
    b.load_state_dict(a.state_dict())
    hint = hl.compare(a, b, run=(torch.randn(1, 3, 8, 8),)).first.hint
    assert hint == "padding is (1, 1) in a and (2, 2) in b; dilation is (1, 1) in a and (2, 2) in b"


def test_a_model_in_train_mode_is_named():
    a = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).eval()
    b = copy.deepcopy(a).train()
    first = hl.compare(a, b, run=(X,)).first
    assert (first.site, first.hint) == ("1", "dropout is on in b, which is in train mode: call b.eval()")


def test_a_config_that_differs_is_named():
    class Config:
        def __init__(self, scale: float) -> None:
            self.scale = scale

    class Configured(Block):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.config = Config(scale)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.config.scale

    torch.manual_seed(0)
    a, b = Configured(1.0), Configured(3.0)
    b.load_state_dict(a.state_dict())
    assert hl.compare(a, b, run=(X,)).first.hint == "config.scale is 1.0 in a and 3.0 in b"
    assert b.config.scale == 3.0


def test_a_module_that_computes_in_another_dtype_is_named():
    class Coarse(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x.bfloat16(), self.weight.bfloat16(), self.bias.bfloat16()).float()

    a, b = pair()
    b.mlp.__class__ = Coarse
    first = hl.compare(a, b, run=(X,)).first
    assert (first.site, first.hint) == ("mlp", "b computes in bfloat16, and a does not")
