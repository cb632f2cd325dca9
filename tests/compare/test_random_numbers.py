"""Runs with known random numbers."""

from __future__ import annotations

import pytest
import torch

from hookline._compare.random_numbers import random_numbers, random_state


def test_the_same_numbers_come_again_and_those_of_the_process_go_on():
    torch.manual_seed(7)
    expected = torch.rand(2)
    torch.manual_seed(7)
    with random_numbers():
        first = torch.rand(3)
        state = random_state()
        second = torch.rand(3)
    with random_numbers():
        assert torch.equal(torch.rand(3), first)
    with random_numbers(state):
        assert torch.equal(torch.rand(3), second)
    assert torch.equal(torch.rand(2), expected)


def test_they_go_on_after_an_error_too():
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match="no"), random_numbers():
        torch.rand(3)
        raise ValueError("no")
    assert torch.equal(torch.get_rng_state(), before)
