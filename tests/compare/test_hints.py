"""Hints are tested before they are given."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

import hookline as hl

X = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attn, self.mlp = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.scale = 0.5

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm(x)) * self.scale
        return x + self.mlp(x)


class WithoutResidual(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = self.attn(self.norm(x)) * self.scale
        return x + self.mlp(x)


class AddsNoise(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0.1 * torch.sin(1000 * x)


def pair(other: type[Block] = Block) -> tuple[Block, Block]:
    torch.manual_seed(0)
    a, b = Block(), other()
    b.load_state_dict(a.state_dict())
    return a, b


def test_a_missing_residual_connection_inside_is_named():
    first = hl.compare(*pair(WithoutResidual), run=(X,)).first
    assert first.site == ""
    assert first.hint == "what 'mlp' gets in a is b's plus the input: b leaves out the residual connection"
    assert first.function == "mlp:inputs"


def test_the_function_at_which_the_error_begins_is_named():
    class Softer(Block):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.softmax(self.mlp(x), -1)

    class Harder(Block):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.softmax(self.mlp(x), -2)

    a = Softer()
    b = Harder()
    b.load_state_dict(a.state_dict())
    first = hl.compare(nn.Sequential(a), nn.Sequential(b), run=(X,)).first
    assert first.function == "0/softmax#0"
    assert first.hint == "in /softmax#0, dim is -1 in a and -2 in b"


def test_a_reason_that_does_not_explain_the_whole_error_is_not_given():
    a, b = pair(AddsNoise)
    b.scale = 0.25
    first = hl.compare(a, b, run=(X,)).first
    assert "scale" not in first.hint


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


def test_weights_that_were_swapped_are_named():
    a, b = pair()
    with torch.no_grad():
        b.attn.weight.copy_(a.mlp.weight)
        b.mlp.weight.copy_(a.attn.weight)
    assert hl.compare(a, b, run=(X,)).first.hint == "weight: it is that of 'mlp.weight' in a"


class WithoutNorm(Block):
    def __init__(self) -> None:
        super().__init__()
        del self.norm

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x) * self.scale
        return x + self.mlp(x)


def test_a_module_that_one_of_them_does_not_have_is_named():
    torch.manual_seed(0)
    a, b = Block(), WithoutNorm()
    b.load_state_dict(a.state_dict(), strict=False)
    assert (
        hl.compare(a, b, run=(X,)).first.hint == "what 'attn' gets in a is the output of 'norm', which b does not have"
    )
    hint = hl.compare(b, a, run=(X,)).first.hint
    assert hint == "what 'attn' gets in b is the output of 'norm', which a does not have"
