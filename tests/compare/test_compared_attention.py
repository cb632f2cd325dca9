"""Attention patterns of different code: scale, mask and heads."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hookline as hl

X = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(0))


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(2, 6, 3, 4, 4).permute(2, 0, 3, 1, 4)
        return self.out(self.mixed(q, k, v).transpose(1, 2).reshape(2, 6, 16))

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class ByHand(Fused):
    scale, ahead, flip = 0.5, 1, False

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = self.scale * q @ k.transpose(-1, -2)
        pattern = scores.masked_fill(torch.ones(6, 6, dtype=torch.bool).triu(self.ahead), -math.inf).softmax(-1)
        return (pattern.flip(1) if self.flip else pattern) @ v


class WrongScale(ByHand):
    scale = 0.25


class WrongMask(ByHand):
    ahead = 2


def compared(a: type[Fused], b: type[Fused]) -> hl.Comparison:
    torch.manual_seed(0)
    one, two = a(), b()
    two.load_state_dict(one.state_dict())
    return hl.compare(nn.Sequential(one), nn.Sequential(two), run=(X,))


def test_two_kernels_that_compute_the_same_are_ok():
    assert compared(Fused, ByHand).ok


@pytest.mark.parametrize(
    ("a", "b", "hint"),
    [
        (Fused, WrongScale, "in /softmax#0, a's scores are 2 times b's"),
        (WrongScale, Fused, "in /scaled_dot_product_attention#0, a's scores are 0.5 times b's"),
        (
            Fused,
            WrongMask,
            "in /softmax#0, of later positions, a position sees none in a and the next 1 in b: the mask is off by 1",
        ),
    ],
)
def test_a_difference_between_two_kernels_is_named(a, b, hint):
    first = compared(a, b).first
    assert (first.site, first.hint) == ("0", hint)


class Masked(ByHand):
    """Attention whose mask is given to a function, as booleans or numbers."""

    add, seen = False, torch.ones(6, 6).tril().bool()

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.zeros(6, 6).masked_fill(~self.seen, torch.finfo(q.dtype).min) if self.add else self.seen
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class Added(Masked):
    add = True


class FurtherAhead(Added):
    seen = torch.ones(6, 6).tril(1).bool()


class WithoutOne(Masked):
    seen = torch.ones(6, 6).tril().bool() & (torch.arange(6) != 1)


class Open(Added):
    seen = torch.ones(6, 6, dtype=torch.bool)


def test_masks_of_every_kind_that_are_equal_are_ok():
    assert compared(Masked, Added).ok
    assert compared(Added, ByHand).ok


@pytest.mark.parametrize(
    ("b", "words"),
    [
        (FurtherAhead, "off by 1"),
        (WithoutOne, "other positions"),
        (Open, "b has no causal mask, and a has one"),
    ],
)
@pytest.mark.parametrize("a", [Masked, Added])
def test_masks_of_every_kind_are_read(a, b, words):
    assert words in compared(a, b).first.hint
