"""Changes of a part of a value: they are broadcast into the part, and the rest stays the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import hookline as hl
from tests.errors.wording import says
from tests.support.models import GPT, tokens


class Pair(nn.Module):
    """Takes several tensors, and returns some of them nested."""

    def forward(self, x: Tensor, pair: tuple[Tensor, Tensor], scale: float = 1.0) -> tuple[Tensor, dict[str, Tensor]]:
        return x * scale, {"sum": x + pair[0], "other": pair[1] * 2}


def test_a_patch_is_broadcast_into_the_part_that_the_subscripts_name() -> None:
    model, x = GPT(), tokens()
    plain = model.h[0](x, scale=0.5)
    _, acts = hl.run(model, x, capture="h.0", patch={"h.0[:, 3:5]": 0.0, "h.0[0, 0]": torch.arange(8.0)})
    assert acts["h.0"][:, 3:5].count_nonzero() == 0
    assert torch.equal(acts["h.0"][0, 0], torch.arange(8.0))
    assert torch.equal(acts["h.0"][1, :3], plain[1, :3])


def test_what_a_model_is_given_is_not_written_to_by_an_edit_of_a_part() -> None:
    model = nn.Sequential(nn.Identity())
    x = torch.ones(2, 4)
    assert hl.run(model, x, patch={"0[0]": 0.0}).sum() == 4
    assert hl.run(model, x, edit={"0:input[0]": lambda value: value.mul_(0)}).sum() == 4
    given = {"logits": x}
    with hl.patch(keyed := nn.Identity(), {'["logits"]': 0.0}):
        assert keyed(given)["logits"].count_nonzero() == 0
    assert given["logits"] is x
    assert x.eq(1).all()


def test_the_result_of_an_edit_of_a_part_is_broadcast_into_it() -> None:
    model, x = nn.Sequential(nn.Identity()), torch.arange(8.0).reshape(2, 4)
    assert torch.equal(hl.run(model, x, edit={"0[1:]": lambda value: value.mean()})[1], torch.full((4,), 5.5))
    assert hl.run(model, x, edit={"0[1:]": lambda value: 0})[1].count_nonzero() == 0
    with pytest.raises(hl.EditError, match=says("shape does not fit where passes", "(3,)", "(1, 4)", "0[1:]")):
        hl.run(model, x, edit={"0[1:]": lambda value: torch.ones(3)})


def test_a_star_tells_the_function_which_place_it_is_at() -> None:
    layer, found = nn.Linear(2, 3), []
    with hl.edit(layer, "[:, *]", lambda value, call: found.append((str(call.site), value.shape)), with_call=True):
        layer(torch.ones(4, 2))
    assert found == [(f"[:, {i}]", (4,)) for i in range(3)]


def test_the_gradients_of_a_nested_value_tell_where_each_belongs() -> None:
    model = Pair()
    values = [torch.ones(2, requires_grad=True) for _ in range(3)]
    found: dict[str, Tensor] = {}
    hooks = hl.Hooks(model)
    for port in ("grad_inputs", "grad_output"):
        hooks.edit(
            hl.Site("", port), lambda gradient, call: found.update({str(call.site): gradient.clone()}), with_call=True
        )
    first, rest = model(values[0], (values[1], values[2]), scale=3.0)
    (first.sum() + 5 * rest["sum"].sum() + 7 * rest["other"].sum()).backward()
    hooks.remove()
    assert {site: gradient[0].item() for site, gradient in found.items()} == {
        ":grad_output[0]": 1,
        ':grad_output[1]["sum"]': 5,
        ':grad_output[1]["other"]': 7,
        ':grad_inputs["x"]': 8,
        ':grad_inputs["pair"][0]': 5,
        ':grad_inputs["pair"][1]': 14,
    }
