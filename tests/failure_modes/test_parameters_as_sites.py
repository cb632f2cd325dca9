"""Parameters as sites: no special tensor or class leaks; unusual kinds of parameters work, or an error explains why."""

from __future__ import annotations

import copy
import itertools
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils._pytree import tree_leaves

import hookline as hl
from tests.errors.wording import says
from tests.support.models import COPIES, Autoencoder, Uses, loss_of, tokens
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
        assert type(model)().W_enc.shape == (4, 8), "type(model) can't be instantiated"
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
        assert all(is_ordinary(value) for value in found), "a special tensor leaked inside the block"
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
    assert len(acts.calls("W_enc:param")) == 1, "setting the parameter counted as a read"
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
    """A user's autograd function that takes the parameter."""

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
        assert {site: len(acts.calls(site)) for site in acts} == seen, "operations of its backward were captured"
    assert type(output) is Tensor
    assert torch.equal(output, plain)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    refused = pytest.raises(hl.HooklineError, match=says("runs inside Scaled", "W/matmul"))
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


def or_refusal(function: Callable[[], Any]) -> tuple[Any, str]:
    """Return a function's result and the message of hookline's error, or "" if there is none."""
    try:
        return function(), ""
    except hl.HooklineError as error:
        return None, str(error)


def parametrized() -> nn.Module:
    class Symmetric(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.triu() + x.triu(1).T

    model = nn.Sequential(nn.Linear(4, 4))
    parametrize.register_parametrization(model[0], "weight", Symmetric())
    return model


def old_weight_norm() -> nn.Module:
    with pytest.warns(FutureWarning):
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 4)))


COMPUTED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "parametrized": (parametrized, r"'0\.parametrizations\.weight'"),
    "weight norm": (lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4))), r"'0\.parametrizations\.wei"),
    "old weight norm": (old_weight_norm, r"0\.weight_[gv]"),
}


@pytest.mark.parametrize("kind", COMPUTED)
@pytest.mark.parametrize("rest", ["/*", "/linear", ":param"])
def test_a_weight_that_is_computed_is_refused_with_the_name_to_use(rest: str, kind: str) -> None:
    make, message = COMPUTED[kind]
    model = make()
    with pytest.raises(hl.SiteError, match=message):
        hl.capture(model, f"0.weight{rest}")


def test_the_name_to_use_for_a_parametrized_weight_works() -> None:
    model, x = parametrized(), torch.randn(3, 4)
    with hl.capture(model, "0.parametrizations.weight", "0.parametrizations.weight.original:param") as acts:
        output = model(x)
    assert torch.equal(acts["0.parametrizations.weight"], model[0].weight)
    assert torch.equal(output, F.linear(x, acts["0.parametrizations.weight"], model[0].bias))
    assert torch.equal(hl.run(model, x, patch={"0.parametrizations.weight": 0.0}), model[0].bias.expand(3, 4))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("site", ["0.weight_ih_l0/*", "0.weight_hh_l0:param", "0.weight_ih_l0/matmul"])
def test_weights_that_a_fused_layer_holds_in_a_list_of_its_own_are_explained(site: str, kind: type[nn.RNNBase]) -> None:
    model, x = nn.Sequential(kind(4, 4)), torch.randn(2, 3, 4)
    before, plain = state_of(model), model(x)
    with pytest.raises(hl.HooklineError, match=rf"'0\.weight_.*{kind.__name__}"), hl.patch(model, {site: 0.0}):
        model(x)
    assert state_of(model) == before
    assert torch.equal(model(x)[0], plain[0])


@pytest.mark.parametrize("train", [True, False])
def test_hooks_on_the_weights_of_attention_change_no_bit_of_it(train: bool) -> None:
    model, x = nn.MultiheadAttention(8, 2, batch_first=True).train(train), tokens()
    with torch.set_grad_enabled(train):
        plain, _ = model(x, x, x)
        with hl.capture(model, "in_proj_weight:param", "out_proj.weight:param") as acts:
            output, _ = model(x, x, x)
        assert torch.equal(output, plain)
        assert torch.equal(acts["in_proj_weight:param"], model.in_proj_weight)
        if train:
            assert torch.equal(hl.run(model, x, x, x, capture="in_proj_weight/*")[0][0], plain)
        doubled = copy.deepcopy(model)
        with torch.no_grad():
            doubled.in_proj_weight.mul_(2)
        edited = hl.run(model, x, x, x, edit={"in_proj_weight:param": lambda w: w * 2})[0]
        assert torch.allclose(edited, doubled(x, x, x)[0], atol=1e-6)


ATTENTION = ["in_proj_weight/*", "out_proj.weight/*"]
LAYER = ["self_attn.in_proj_weight/*", "self_attn.out_proj.bias/*", "linear1.weight/*", "norm1.bias/*"]


@pytest.mark.parametrize(
    ("kind", "site"), [*(("attention", one) for one in ATTENTION), *(("layer", one) for one in LAYER)]
)
def test_hooks_on_weights_do_not_turn_a_fused_fast_path_off_in_silence(kind: str, site: str) -> None:
    x = tokens()
    if kind == "attention":
        model: nn.Module = nn.MultiheadAttention(8, 2, batch_first=True).eval()
        run = lambda: model(x, x, x, need_weights=False)[0]  # noqa: E731
    else:
        model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
        run = lambda: model(x)  # noqa: E731
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", hl.HooklineWarning)  # For sites that did not fire.
        plain = run()
        with hl.capture(model, site):
            assert torch.equal(run(), plain)


class Registry(nn.Module):
    """Requires an argument of its subclasses, and records them."""

    known: list[type] = []  # noqa: RUF012
    __slots__ = ("scratch",)

    def __init_subclass__(cls, *, kind: str) -> None:
        Registry.known.append(cls)


class Registered(Registry, kind="one"):
    """Refuses to set attributes after `__init__`."""

    def __init__(self) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.randn(4, 4))
        self.locked = True

    def __setattr__(self, name: str, value: object) -> None:
        if self.__dict__.get("locked"):
            raise AttributeError(f"{name} was set")
        super().__setattr__(name, value)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.W


def test_a_class_that_asks_something_of_its_subclasses_is_hooked_or_refused_in_words() -> None:
    model, x = nn.Sequential(Registered()), torch.randn(3, 4)
    before, known = state_of(model), list(Registry.known)
    with hl.capture(model, "0.W/matmul", "0.W:param") as acts:
        model(x)
    assert torch.equal(acts["0.W/matmul"], x @ model[0].W)
    assert Registry.known == known
    assert state_of(model) == before


class Final(type(nn.Module)):  # type: ignore[misc]
    """A metaclass of classes that can't be subclassed."""

    def __new__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> type:
        if any(isinstance(base, Final) for base in bases):
            raise TypeError("nobody inherits from this")
        return super().__new__(cls, name, bases, namespace)


class Alone(nn.Linear, metaclass=Final):
    """A class that can't be subclassed."""


def test_a_class_that_lets_nobody_inherit_from_it_is_hooked_all_the_same_and_nothing_is_left_behind() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), Alone(4, 4)), torch.randn(2, 4)
    before, plain = state_of(model), model(x)
    for where in ("1.weight:param", "1.weight/*", "**:param"):
        output, acts = hl.run(model, x, capture=["0", where])
        assert torch.equal(output, plain)
        assert len(acts) >= 2
        assert state_of(model) == before


def test_a_hooked_parameter_is_not_tied_to_another_in_a_block() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    before = state_of(model)
    with (
        torch.no_grad(),
        hl.capture(model, "0.weight/*"),
        pytest.raises(hl.HooklineError, match=r"'0\.weight/\*'.*outside"),
    ):
        model[1].weight = model[0].weight
    assert state_of(model) == before


def test_two_reads_of_one_weight_are_one_object_also_under_both_names_of_a_tie() -> None:
    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
            self.b.weight = self.a.weight

        def forward(self, x: Tensor) -> Tensor:
            assert self.a.weight is self.a.weight
            return self.a(x) if self.a.weight is self.b.weight else self.b(x)

    model, x = Asks(), torch.randn(2, 4)
    output, acts = hl.run(model, x, capture="a.weight/*")
    assert torch.equal(output, model(x))
    assert list(acts) == ["a.weight/linear#0"]


def test_a_copy_of_a_parametrized_module_has_no_hooks_and_parametrizing_in_a_block_leaves_no_class_behind() -> None:
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)))
    hooks = hl.Hooks(model)
    hooks.edit("0.bias:param", lambda bias: bias * 0 + 7)
    copied = copy.deepcopy(model)
    hooks.remove()
    assert type(copied[0]) is type(model[0])
    assert torch.equal(copied(torch.zeros(1, 2)), model(torch.zeros(1, 2)))
    plain = nn.Sequential(nn.Linear(2, 2))
    with hl.capture(plain, "0.bias:param"):
        nn.utils.parametrizations.weight_norm(plain[0])
        plain(torch.zeros(1, 2))
    nn.utils.parametrize.remove_parametrizations(plain[0], "weight")
    assert type(plain[0]) is nn.Linear


def test_a_module_that_is_replaced_in_a_block_takes_the_hooks_of_its_parameters_along_and_that_is_said() -> None:
    model, x = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), torch.randn(1, 2)
    with (
        pytest.raises(hl.NeverFired, match=says("was replaced while hooked")),
        hl.edit(model, "0.weight:param", lambda weight: weight * 0),
    ):
        model(x)
        model[0] = nn.Linear(2, 2)
        model(x)


def test_the_parameters_of_a_scripted_module_are_passed_over_or_refused() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 4))), torch.randn(2, 4)
    assert [str(site) for site in hl.sites(model, "**:param")] == ["0.weight:param", "0.bias:param"]
    assert len(hl.run(model, x, capture=["0.weight:param", "0.weight/*"])[1]) == 2
    for where in ("1.weight:param", "1.weight/*"):
        with pytest.raises(hl.SiteError, match="torch.jit"):
            hl.capture(model, where)


@pytest.mark.parametrize("where", ["0.weight:param", "0.weight/linear", "0.weight/*"])
def test_a_lazy_module_is_seen_on_its_first_call_or_says_why_not_and_becomes_what_it_becomes(where: str) -> None:
    model, x = nn.Sequential(nn.LazyLinear(3)), torch.randn(2, 4)
    first, refused = or_refusal(lambda: hl.run(model, x, capture=where))
    assert "'0.weight" in refused or len(first[1]) == 1
    model(x)
    assert type(model[0]) is nn.Linear
    with hl.capture(model, where) as acts:
        model(x)
    assert len(acts) == 1
    assert type(model[0]) is nn.Linear


def test_an_operation_on_a_sparse_buffer_is_said_to_be_out_of_sight() -> None:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("links", torch.eye(3).to_sparse())

        def forward(self, x: Tensor) -> Tensor:
            return self.links @ x

    with pytest.raises(hl.NeverFired, match=says("whose operations can't be followed", "links/matmul")):
        hl.run(Sparse(), torch.ones(3, 2), capture="links/matmul")


def test_a_parameter_that_is_read_past_its_name_is_explained() -> None:
    class Past(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return x @ self._parameters["weight"].T

    with pytest.raises(hl.NeverFired, match=says("it was not read by", "weight:param")):
        hl.run(Past(3, 3), torch.ones(2, 3), capture="weight:param")
    with pytest.raises(hl.NeverFired, match=says("no operation took it")):
        hl.run(Past(3, 3), torch.ones(2, 3), capture="weight/matmul")
