"""Copies, pickles and checkpoints of a hooked model: unhooked models with their own weights."""

from __future__ import annotations

import copy
import copyreg
import gc
import io
import pickle
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hookline as hl
from tests.errors.wording import says
from tests.support.models import COPIES, GPT, mlp, tokens
from tests.support.states import state_of

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


class Heads(nn.Module):
    """Has a method, a function, a parameter and a child, each of which can be hooked."""

    def __init__(self) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.eye(4))
        self.child = nn.Linear(4, 4)

    def project(self, x: Tensor) -> Tensor:
        return x @ self.W

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.project(x))


SITES = ("", ":input", ":inputs", "[0]", "#0", ".project()", ".project():input", "/relu", "/*", ".W/matmul", ".W:param")
GRADIENTS = (":grad_output", ":grad_input", "/relu:grad_output", ".W/matmul:grad_output", ".project():grad_output")


@pytest.mark.parametrize("site", SITES + GRADIENTS)
def test_a_shallow_copy_made_inside_a_block_is_an_unhooked_module_with_its_own_weights(site: str) -> None:
    """E14"""
    model, x = nn.Sequential(Heads()), torch.ones(2, 4, requires_grad=True)
    with hl.capture(model, f"0{site}", keep="all") as acts:
        twin = copy.copy(model[0])
        assert vars(twin).keys() == vars(Heads()).keys()
        assert type(twin) is Heads
        assert twin.W is model[0]._parameters["W"]
        twin._parameters = {"W": nn.Parameter(torch.zeros(4, 4))}
        assert torch.equal(twin(x), torch.zeros(2, 4))
        twin.forward(x)
        twin.project(x).sum().backward()
        assert len(hl.attached(twin)) == 0
        assert not any(acts.calls(one) for one in acts)
        model(x).sum().backward()
    assert all(len(acts.calls(one)) == 1 for one in acts)
    assert torch.equal(model(x), torch.ones(2, 4))


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_a_shallow_copy_of_a_model_runs_the_hooks_of_the_children_that_it_shares(kind: str) -> None:
    """E14"""
    model, x = GPT(depth=2), tokens()
    plain = model(x)
    with EVERY_KIND[kind](model):
        changed = model(x)
        twin = copy.copy(model)
        assert torch.equal(twin(x), plain if kind == "stop" else changed)  # A stop does not act on a copy.
        alone = copy.copy(model.h[1])
        assert torch.equal(alone(x, scale=0.5), copy.deepcopy(model).h[1](x, scale=0.5))
    assert torch.equal(twin(x), plain)


def test_a_shallow_copy_of_a_module_with_a_forward_of_its_own_has_that_forward() -> None:
    """E14"""
    model, x = nn.Sequential(nn.Linear(4, 4)), torch.ones(2, 4)
    model[0].forward = lambda x: x + 1  # type: ignore[method-assign]
    with hl.capture(model, "0"):
        twin = copy.copy(model[0])
        assert vars(twin)["forward"] is not vars(model[0])["forward"]
        assert torch.equal(twin(x), x + 1)


def test_modules_are_copied_as_before_once_no_hooks_are_left() -> None:
    """E14"""

    class Counted(nn.Linear):
        def __reduce_ex__(self, protocol: object) -> object:
            copied.append(protocol)
            return super().__reduce_ex__(protocol)  # type: ignore[arg-type]

    copied: list[object] = []
    before = dict(copyreg.dispatch_table)
    model = nn.Sequential(Counted(4, 4))
    copyreg.pickle(nn.Sequential, lambda one: (nn.Sequential, tuple(one)))  # type: ignore[arg-type, return-value]
    try:
        with hl.capture(model, "0", "0.weight:param"):
            with hl.capture(model, ""):
                assert type(copy.copy(model)) is nn.Sequential
            copy.copy(model[0])
            assert len(copied) == 1
        assert copyreg.dispatch_table[nn.Sequential] is not before.get(nn.Sequential)
    finally:
        del copyreg.dispatch_table[nn.Sequential]
    assert copyreg.dispatch_table == before


def test_how_somebody_lets_modules_be_copied_while_they_are_hooked_stays() -> None:
    def reduce(one: nn.Linear) -> tuple[object, ...]:
        return nn.Linear, (one.in_features, one.out_features)

    hooks = hl.Hooks(mlp())
    hooks.capture("0")
    copyreg.pickle(nn.Linear, reduce)  # type: ignore[arg-type]
    try:
        hooks.remove()
        assert copyreg.dispatch_table[nn.Linear] is reduce
    finally:
        del copyreg.dispatch_table[nn.Linear]


@pytest.mark.parametrize("use", ["block", "scan", "checkpoint"])
def test_a_class_whose_hooks_are_gone_is_not_kept_while_others_are_hooked(use: str) -> None:
    """E14"""

    def held() -> set[type]:
        return {kind for kind in copyreg.dispatch_table if issubclass(kind, nn.Module)}

    before = held()
    other = nn.Sequential(nn.ReLU())
    hooks = hl.Hooks(other)
    hooks.capture("0")
    with_hooks = held()

    def passing() -> weakref.ref[type]:
        class Passing(nn.Linear):
            pass

        model = Passing(4, 4)
        if use == "scan":
            hl.scan(model, torch.ones(1, 4))
            return weakref.ref(Passing)
        with hl.edit(model, "", torch.neg):
            x = torch.ones(1, 4, requires_grad=True)
            output = checkpoint(model, x, use_reentrant=False) if use == "checkpoint" else model(x)
        output.sum().backward()
        return weakref.ref(Passing)

    gone = passing()
    assert held() == with_hooks
    gc.collect()
    assert gone() is None
    assert vars(copy.copy(other[0])).keys().isdisjoint(("forward", "_replicate_for_data_parallel"))
    hooks.remove()
    assert held() == before


@pytest.mark.parametrize("site", ["", "/relu", ":input", ".W:param", ".W/matmul"])
def test_replicas_for_data_parallel_are_refused_while_hooked(site: str) -> None:
    """E14"""
    model, x = nn.Sequential(Heads()), torch.ones(2, 4)
    hooks = hl.Hooks(model)
    hooks.capture(f"0{site}")
    for module in (model, model[0]):
        with pytest.raises(hl.HooklineError, match=says("DataParallel runs copies of")):
            module._replicate_for_data_parallel()
    assert type(model[0].child._replicate_for_data_parallel()) is nn.Linear
    model(x)
    hooks.deactivate()
    replica = model[0]._replicate_for_data_parallel()
    replica.W = torch.zeros(4, 4)
    assert torch.equal(replica(x), torch.zeros(2, 4))
    hooks.remove()


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


def pickled(value):
    return pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickled])
def test_a_copy_of_hooks_has_none_and_says_so(duplicate):
    model, x = mlp(), torch.randn(2, 4)
    hooks = hl.Hooks(model)
    acts = hooks.capture("0")
    hooks.edit("1", torch.zeros_like)
    with pytest.warns(hl.HooklineWarning, match=says("a copy of a Hooks", 2)) as all_:
        other = duplicate(hooks)
    assert all_[0].filename == __file__
    assert len(other) == 0
    assert len(hl.attached(other.model)) == (2 if duplicate is copy.copy else 0)
    other.capture("2")
    output = other.run(x)
    assert other.cache["2"].equal(output)
    other.remove()
    model(x)
    assert acts["0"].shape == (2, 8)
    hooks.remove()


@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickled])
def test_a_model_that_holds_its_own_hooks_is_copied_without_them(duplicate):
    model = mlp()
    model.seen = hl.Hooks(model)
    model.seen.capture("0")
    with pytest.warns(hl.HooklineWarning, match=says("a copy of a Hooks")):
        other = duplicate(model)
    assert other.seen.model is other
    assert len(other.seen) == 0
    other(torch.randn(2, 4))
    assert len(model.seen.cache) == 0
    del model.seen


def test_hooks_without_any_are_copied_without_a_word():
    assert len(copy.deepcopy(hl.Hooks(mlp()))) == 0


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("kind", ["a stop beside a capture", "a capture beside a gradient"])
def test_a_copy_has_no_hooks_when_the_first_of_two_that_shared_a_shadow_is_gone(how: str, kind: str) -> None:
    model = mlp()
    first, second = hl.Hooks(model), hl.Hooks(model)
    if kind == "a stop beside a capture":
        first.capture("0", keep="all")
        second.stop_after("0")
    else:
        second.capture("0")
        second.deactivate()
        first.capture("0:grad_output")
        second.activate()
    first.remove()
    copied = COPIES[how](model)
    assert "forward" not in vars(copied[0])
    second.remove()
    assert "forward" not in vars(model[0])
