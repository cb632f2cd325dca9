"""How hooks on parameters could go wrong: strange tensors left behind, classes not restored, copies."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import hookline as hl
from tests.support.copies import COPIES
from tests.support.gradients import loss_of
from tests.support.models import Autoencoder, Uses
from tests.support.states import state_of

EVERY_KIND: dict[str, Callable[[nn.Module], hl.Hooks]] = {
    "operations": lambda model: hl.capture(model, "W_enc/*", "W_dec/matmul", "b_dec/*", "scale/*"),
    "gradients": lambda model: hl.capture(model, "W_enc/matmul:grad_output"),
    "an operation changed": lambda model: hl.patch(model, {"W_enc/matmul": -1.0}),
    "reads": lambda model: hl.capture(model, "*:param", keep="all"),
    "a read changed": lambda model: hl.patch(model, {"W_enc:param": 0.0, "scale:param": 0.0}),
    "a read edited": lambda model: hl.edit(model, "W_dec:param", lambda value: value * 2),
}


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_an_open_block_leaves_the_model_what_it_was_to_all_others(kind: str) -> None:
    model, x = Autoencoder(), torch.randn(3, 4)

    def seen_from_outside() -> list[object]:
        return [
            repr(model), str(type(model)), type(model).__name__, type(model).__qualname__, type(model).__module__,
            model.__doc__, list(model.state_dict()), [id(one) for one in model.parameters()],
            [(name, id(one)) for name, one in model.named_buffers()], isinstance(model, Autoencoder),
            [(name, type(one)) for name, one in model.named_parameters()], list(model.named_modules()),
        ]  # fmt: skip

    before, state, namespace = seen_from_outside(), state_of(model), dict(vars(Autoencoder))
    with EVERY_KIND[kind](model):
        assert seen_from_outside() == before
        model(x)
        assert isinstance(model.W_enc, nn.Parameter) or kind == "a read changed"
        assert isinstance(model.scale, Tensor)
        assert model.W_enc.shape == (4, 8)
        assert model.W_enc.requires_grad or kind == "a read changed"
        assert type(model)().W_enc.shape == (4, 8), "a new one of the same type"
        assert type(Autoencoder()) is Autoencoder
        assert seen_from_outside() == before
    assert type(model) is Autoencoder
    assert dict(vars(Autoencoder)) == namespace
    assert state_of(model) == state


@pytest.mark.parametrize("kind", EVERY_KIND)
@pytest.mark.parametrize("how", COPIES)
def test_a_copy_made_inside_a_block_is_an_unhooked_model_of_the_same_class(how: str, kind: str) -> None:
    model, x = Autoencoder(), torch.randn(3, 4)
    plain = model(x)
    with EVERY_KIND[kind](model) as acts:
        twin = COPIES[how](model)
        assert type(twin) is Autoencoder
        assert set(vars(twin)) <= {*vars(Autoencoder()), "forward"}
        assert type(twin.W_enc) is nn.Parameter
        assert torch.equal(twin(x), plain)
        assert len(acts) == len(hl.attached(twin)) == 0
        assert b"hookline" not in pickle.dumps(model)
        twin.W_enc.data.zero_()
        model(x).sum().backward()
    assert torch.equal(model(x), plain)


def test_a_checkpoint_is_saved_and_loaded_inside_a_block() -> None:
    model, other, x = Autoencoder(), Autoencoder(), torch.randn(3, 4)
    with hl.capture(model, "W_enc/*", "W_dec:param"), hl.patch(model, {"b_dec:param": 0.0}):
        saved = {name: value.clone() for name, value in model.state_dict().items()}
        assert all(type(value) is Tensor for value in saved.values())
        model.load_state_dict(other.state_dict())
    assert torch.equal(model(x), other(x))
    model.load_state_dict(saved)


def is_ordinary(value: Any) -> bool:
    return type(value) in (Tensor, nn.Parameter)


RETURNED: dict[str, Callable[[Tensor], Any]] = {
    "itself": lambda w: w,
    "T": lambda w: w.T,
    "a part": lambda w: w[0],
    "clone": lambda w: w.clone(),
    "a cast": lambda w: w.to(torch.float64),
    "a result": lambda w: w * 2,
    "a tuple": lambda w: (w, [w.T]),
    "detached": lambda w: w.detach(),
    "data": lambda w: w.data,
    "chunks": lambda w: w.chunk(2),
}


@pytest.mark.parametrize("what", RETURNED)
@pytest.mark.parametrize("where", ["W/*", "W:param"])
def test_a_forward_that_returns_its_parameter_returns_an_ordinary_tensor(where: str, what: str) -> None:
    model, x = Uses(lambda w, x: (x @ w, RETURNED[what](w))), torch.randn(4, 4)
    found: list[Tensor] = []
    edit = hl.edit(model, "", lambda value: found.extend(tree_leaves(value)))
    with hl.capture(model, where):
        assert all(is_ordinary(value) for value in tree_leaves(model(x)))
    with hl.capture(model, where), edit, hl.capture(model, "") as acts:
        found += tree_leaves(model(x))
        found += tree_leaves(acts[""])
        assert all(is_ordinary(value) for value in found), "also inside the block"
    assert all(is_ordinary(value) for value in found)
    if found[1].requires_grad:
        found[1].double().sum().backward()
        assert model.W.grad is not None


def test_a_view_that_the_model_keeps_is_an_ordinary_tensor_after_the_block() -> None:
    class Keeps(Autoencoder):
        kept: Any = None

        def encode(self, x: Tensor) -> Tensor:
            self.kept = self.W_enc.T
            self.seen = [self.W_enc]
            return super().encode(x)

    model, x = Keeps(), torch.randn(3, 4)
    with hl.capture(model, "W_enc/*") as acts:
        model(x)
    assert "W_enc/matmul#0" in acts
    seen = len(acts)
    result = x @ model.kept.T
    assert is_ordinary(result)
    assert is_ordinary(model.kept)
    assert is_ordinary(model.seen[0])
    assert len(acts) == seen
    assert b"hookline" not in pickle.dumps(model.kept.detach())


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "in place": lambda w: w.mul_(0.5),
    "data": lambda w: w.data.mul_(0.5),
    "new data": lambda w: setattr(w, "data", w.data * 0.5),
    "a part": lambda w: w[0].zero_(),
    "setitem": lambda w: w.__setitem__(0, 1.0),
    "copy_": lambda w: w.copy_(torch.ones(4, 4)),
    "out": lambda w: torch.mul(w, 0.5, out=w),
    "a function": lambda w: nn.init.constant_(w, 3.0),
}


@pytest.mark.parametrize("how", WRITES)
def test_a_forward_that_writes_into_its_parameter_writes_into_the_real_one(how: str) -> None:
    @torch.no_grad()
    def write(w: Tensor, x: Tensor) -> Tensor:
        WRITES[how](w)
        return x @ w

    model, x = Uses(write), torch.randn(3, 4)
    twin = copy.deepcopy(model)
    for where in ("W/matmul", "W:param"):
        with hl.capture(model, where):
            assert torch.equal(model(x), twin(x))
        assert torch.equal(model.W, twin.W)
    assert type(model.W) is nn.Parameter


def test_a_parameter_that_is_replaced_inside_a_block_is_read_anew() -> None:
    model, x = Autoencoder(), torch.randn(3, 4)
    capture = hl.capture(model, "W_enc/matmul", "W_enc:param", keep="all")
    with capture as acts, hl.edit(model, "scale:param", lambda value: value * 2):
        model.W_enc = nn.Parameter(torch.zeros(4, 8))
        model.scale = torch.tensor(5.0)
        output = model(x)
    assert acts["W_enc:param"].count_nonzero() == acts["W_enc/matmul"].count_nonzero() == 0
    assert len(acts.calls("W_enc:param")) == 1, "setting is not reading"
    assert torch.allclose(output, F.relu(model.b_enc) @ model.W_dec * 10 + model.b_dec)
    assert model.W_enc.count_nonzero() == 0
    assert model.scale == 5
    assert type(model) is Autoencoder


def test_another_module_that_shares_its_attributes_is_not_hooked_by_it() -> None:
    model = Autoencoder()
    with hl.patch(model, {"W_enc:param": 0.0, "b_dec/*": 0.0}):
        other = object.__new__(type(model))
        other.__dict__ = dict(vars(model))
        assert torch.equal(other.W_enc, model._parameters["W_enc"])
        assert is_ordinary(other.b_dec)
    assert torch.equal(other.W_enc, model.W_enc)


class Scaled(torch.autograd.Function):
    """Takes the parameter into a function of the user's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight.T, x.T @ gradient


@pytest.mark.parametrize("where", ["W/*", "W:param"])
def test_a_function_of_the_users_own_gets_the_parameter_and_its_gradient_arrives(where: str) -> None:
    model, x = Uses(lambda w, x: Scaled.apply(x, w) + w.sum()), torch.randn(4, 4, requires_grad=True)
    plain = model(x)
    expected = torch.autograd.grad(loss_of(plain), [x, model.W])
    with hl.capture(model, where, keep="all") as acts:
        output = model(x)
        seen = {site: len(acts.calls(site)) for site in acts}
        found = torch.autograd.grad(loss_of(output), [x, model._parameters["W"]])
        assert {site: len(acts.calls(site)) for site in acts} == seen, "its backward is not seen"
    assert type(output) is Tensor
    assert torch.equal(output, plain)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    refused = pytest.raises(hl.HooklineError, match="'W/matmul' runs inside Scaled.*backward would not know")
    with refused, hl.edit(model, "W/matmul", lambda value: value + 1):
        model(x)


def test_a_scan_inside_a_block_is_not_seen_and_counts_nothing() -> None:
    model, x = Autoencoder(), torch.randn(3, 4)
    with hl.capture(model, "W_enc/*", "W_dec:param") as acts, hl.patch(model, {"b_dec:param": 0.0}):
        assert hl.scan(model, x)[""].shape == "(3, 4)"
        assert len(acts) == 0
        model(x)
    assert list(acts) == ["W_enc/matmul#0", "W_dec:param"]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_blocks_on_one_parameter_may_be_left_in_any_order(order: tuple[int, ...]) -> None:
    model, x = Autoencoder(), torch.randn(3, 4)
    plain, before = model(x), state_of(model)
    blocks = [
        hl.edit(model, "scale:param", lambda value: value * 2),
        hl.edit(model, "scale/mul", lambda value: value * 3),
        hl.edit(model, "scale:param", lambda value: value * 5),
    ]
    for block in blocks:
        block.__enter__()
    left = [2, 3, 5]
    for position in order:
        factor = left[0] * left[1] * left[2]
        assert torch.allclose(model(x), (plain - model.b_dec) * factor + model.b_dec, atol=1e-4)
        blocks[position].__exit__(None, None, None)
        left[position] = 1
    assert torch.equal(model(x), plain)
    assert state_of(model) == before
