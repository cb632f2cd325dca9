"""The inputs of one model's module given to another's."""

from __future__ import annotations

import torch

from hookline._compare.filled_inputs import Filled

A, B = torch.ones(2, 3), torch.zeros(2, 3)


def test_arguments_of_the_same_name_and_the_first_ones_correspond():
    filled = Filled({"x": A, "mask": A}, {"hidden_states": B, "mask": B, "flag": True}, None)
    assert torch.equal(filled.inputs["hidden_states"], A)
    assert torch.equal(filled.inputs["mask"], A)
    assert filled.inputs["flag"] is True
    assert list(filled.inputs) == ["hidden_states", "mask", "flag"]
    assert filled.kept == []


def test_tensors_inside_tuples_are_filled():
    filled = Filled({"pair": (A, A)}, {"pair": (B, B)}, None)
    assert torch.equal(filled.inputs["pair"][1], A)
    assert Filled({"pair": (A,)}, {"pair": (B, B)}, None).kept == ["pair"]


def test_what_does_not_fit_stays_and_is_said():
    filled = Filled({"x": A}, {"x": B[:1], "more": B}, None)
    assert torch.equal(filled.inputs["x"], B[:1])
    assert filled.kept == ["x", "more"]
    assert torch.equal(Filled({"x": A}, {"x": B[:1]}, lambda tensor: tensor[:1]).inputs["x"], A[:1])


def test_a_mask_stays_finite_in_a_smaller_dtype():
    mask = torch.tensor([0.0, torch.finfo(torch.float32).min, -torch.inf])
    filled = Filled({"mask": mask}, {"mask": torch.zeros(3, dtype=torch.float16)}, None).inputs["mask"]
    assert filled.tolist() == [0.0, torch.finfo(torch.float16).min, -torch.inf]
