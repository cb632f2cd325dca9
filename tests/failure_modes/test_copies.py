"""Copies, pickles and checkpoints of a hooked model: unhooked models with their own weights."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import hookline as hl
from tests.failure_modes.states import state_of
from tests.models import GPT, tokens


def through_torch_save(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    return torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": through_torch_save,
}
EVERY_KIND: dict[str, Callable[[nn.Module], hl.Hooks]] = {
    "capture": lambda model: hl.capture(model, "**", "h.1:input", "h.1:grad_output"),
    "patch": lambda model: hl.patch(model, {"h.1": 0.0}),
    "edit": lambda model: hl.edit(model, "h.1", lambda value: value * 2),
    "skip": lambda model: hl.skip(model, "h.1"),
    "stop": lambda model: hl.capture(model, "h.0", stop=True),
}


def halve(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)


@pytest.mark.parametrize("kind", EVERY_KIND)
@pytest.mark.parametrize("how", COPIES)
def test_a_copy_made_inside_a_block_is_an_unhooked_model(how: str, kind: str) -> None:
    """E14, E15"""
    model, x = GPT(depth=2), tokens()
    plain = model(x)
    with EVERY_KIND[kind](model) as acts:
        twin = COPIES[how](model)
        assert torch.equal(twin(x), plain)
        assert len(acts) == 0
        assert len(hl.attached(twin)) == 0
        model(x)
    assert torch.equal(twin(x), plain)
    assert torch.equal(model(x), plain)


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_computes_with_its_own_weights_during_the_block_and_after(how: str) -> None:
    """E14"""
    model, x = GPT(depth=2), tokens()
    with hl.capture(model, "**"):
        twin = COPIES[how](model)
        halve(twin)
        during = twin(x)
        model(x)
    reference = copy.deepcopy(model)
    halve(reference)
    assert torch.equal(during, reference(x))
    assert torch.equal(twin(x), reference(x))
    assert not torch.allclose(twin(x), model(x))


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_can_be_hooked_itself_while_the_original_is(how: str) -> None:
    """E14"""
    model, x = GPT(depth=2), tokens()
    with hl.capture(model, "h.1") as outer:
        model(x)
        twin = COPIES[how](model)
        halve(twin)
        with hl.capture(twin, "h.1") as inner, hl.edit(twin, "h.0", lambda value: value + 1):
            twin(x)
    expected = twin.h[1](twin.h[0](x, scale=0.5) + 1, scale=0.5)
    assert torch.equal(inner["h.1"], expected)
    assert torch.equal(outer["h.1"], model.h[1](model.h[0](x, scale=0.5), scale=0.5))


def test_a_copy_follows_a_change_of_its_class_as_any_module_does() -> None:
    """E14"""

    class Other(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return x * 0

    model, x = nn.Sequential(nn.Linear(4, 4)), torch.ones(2, 4)
    with hl.capture(model, "0"):
        twin = copy.deepcopy(model)
    twin[0].__class__ = Other
    assert torch.equal(twin(x), torch.zeros(2, 4))


def test_a_deep_copy_of_a_block_or_its_hooks_is_refused_or_inert() -> None:
    """E14"""
    model, x = GPT(depth=2), tokens()
    hooks = hl.Hooks(model)
    acts = hooks.capture("h.1")
    model(x)
    snapshot = copy.deepcopy(acts)
    seen = snapshot["h.1"].clone()
    model(x * 2)
    assert torch.equal(snapshot["h.1"], seen)
    assert not torch.equal(acts["h.1"], seen)
    hooks.remove()


def test_a_pickle_of_a_hooked_model_does_not_need_hookline() -> None:
    """E15"""
    model = GPT(depth=2)
    with hl.capture(model, "**", "h.1:grad_output"), hl.edit(model, "h.1", lambda value: value * 2):
        data = pickle.dumps(model)
        buffer = io.BytesIO()
        torch.save(model, buffer)
    assert b"hookline" not in data
    assert b"hookline" not in buffer.getvalue()


def test_a_checkpoint_is_the_same_inside_a_block() -> None:
    """E15"""
    model = GPT(depth=2)
    outside, inside = io.BytesIO(), io.BytesIO()
    torch.save(model.state_dict(), outside)
    with hl.capture(model, "**"), hl.patch(model, {"h.1": 0.0}):
        torch.save(model.state_dict(), inside)
        other = GPT(depth=2)
        model.load_state_dict(other.state_dict())
    assert inside.getvalue() == outside.getvalue()
    x = tokens()
    assert torch.equal(model(x), other(x))


def test_an_open_block_leaves_the_tree_its_names_and_its_parameters_alone() -> None:
    """E24"""
    model = GPT(depth=2)

    def shape_of() -> list[object]:
        return [
            list(model.state_dict()),
            [(name, id(module), type(module)) for name, module in model.named_modules()],
            [(name, id(parameter)) for name, parameter in model.named_parameters()],
            list(model.children()),
            repr(model),
            model.h[1].extra_repr(),
        ]

    before, state = shape_of(), state_of(model)
    with hl.capture(model, "h.*", "h.*:grad_output"), hl.edit(model, "h.0", lambda value: value), hl.skip(model, "h.1"):
        assert shape_of() == before
        assert isinstance(model.h[0].attn, nn.Linear)
        model(tokens())
        assert shape_of() == before
    assert shape_of() == before
    assert state_of(model) == state
