"""Hints that lie in weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import hookline as hl
from tests.support.compared_blocks import pair

X = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))


def test_weights_that_were_swapped_are_named():
    a, b = pair()
    with torch.no_grad():
        b.attn.weight.copy_(a.mlp.weight)
        b.mlp.weight.copy_(a.attn.weight)
    assert hl.compare(a, b, run=(X,)).first.hint == "weight: it is that of 'mlp.weight' in a"


def test_a_missing_bias_is_named():
    a, b = pair()
    with torch.no_grad():
        a.mlp.bias.add_(1.0)
    b.mlp.bias = None
    assert hl.compare(a, b, run=(X,)).first.hint == "b has no bias"


def test_the_base_of_a_rotary_embedding_is_only_named_if_it_is_one():
    class Rotary(nn.Module):
        def __init__(self, base: float, factor: float = 1.0) -> None:
            super().__init__()
            self.register_buffer("inv_freq", factor * base ** (-torch.arange(8) / 8))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.inv_freq.cos()

    first = hl.compare(Rotary(1e4), Rotary(5e5), run=(X,)).first
    assert first.hint == "inv_freq: the base of the rotary embedding is 10000 in a and 500000 in b"
    first = hl.compare(Rotary(1e4), Rotary(1e4, 0.5), run=(X,)).first
    assert first.hint == "inv_freq: a's is 2 times b's"


def test_a_weight_that_was_never_copied_is_not_said_to_be_another():
    a, b = pair()
    with torch.no_grad():
        a.norm.weight.add_(torch.rand(8))
    assert hl.compare(a, b, run=(X,)).first.hint == "weight: all ones in b"
