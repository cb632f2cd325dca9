"""A call's arguments as one value: seen and changed together, by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookline as hl
from tests.errors.wording import says
from tests.support.models import GPT, tokens


def test_an_input_edit_sees_the_arguments_as_earlier_edits_left_them() -> None:
    model, x = nn.Sequential(nn.Identity()), torch.ones(2)
    found: list[Tensor] = []
    hooks = hl.Hooks(model)
    hooks.edit("0:input", lambda value: value + 1)
    hooks.edit("0:input", lambda value, call: found.append(call.args[0]), with_call=True)
    hooks.edit("0", lambda value, call: found.append(call.args[0]), with_call=True)
    model(x)
    hooks.remove()
    assert [value.tolist() for value in found] == [[2.0, 2.0], [2.0, 2.0]]


def test_all_arguments_can_be_changed_together_by_name() -> None:
    model, x = GPT(depth=1), tokens()

    def change(arguments: dict[str, Any]) -> dict[str, Any]:
        return {**arguments, "x": arguments["x"] * 0, "scale": 2.0}

    assert torch.equal(hl.run(model, x, edit={"h.0:inputs": change}), model.head(model.h[0](x * 0, scale=2.0)))
    with pytest.raises(hl.EditError, match=says("dict of x given where", "h.0:inputs")):
        hl.run(model, x, edit={"h.0:inputs": lambda arguments: {"x": arguments["x"]}})


def test_an_edit_of_the_inputs_may_add_arguments_that_go_by_position_alone() -> None:
    class Only(nn.Module):
        def forward(self, x: int, y: int = 0, /) -> tuple[int, int]:
            return x, y

    class Rest(nn.Module):
        def forward(self, x: int, scale: int = 1, *rest: int, last: int = 0) -> tuple[Any, ...]:
            return x, scale, rest, last

    only, rest = Only(), Rest()
    with hl.edit(only, ":inputs", lambda bound: {**bound, "y": 5}, check=False):
        assert only(1) == (1, 5)
    with hl.edit(rest, ":inputs", lambda bound: {**bound, "scale": 9, "rest": (8, 7), "last": 6}, check=False):
        assert rest(1) == (1, 9, (8, 7), 6)
        assert rest(1, last=2) == (1, 9, (8, 7), 6)
