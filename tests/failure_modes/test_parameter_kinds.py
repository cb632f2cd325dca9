"""Modules whose parameters are not read as usual: computed, lazy, scripted and fused ones, classes with conditions."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import hookline as hl
from tests.support.models import tokens
from tests.support.states import state_of


def or_refusal(function: Callable[[], Any]) -> tuple[Any, str]:
    """Return what a function returns, and how hookline refused to do it, or nothing."""
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
        warnings.simplefilter("ignore", hl.HooklineWarning)  # Of what did not fire.
        plain = run()
        with hl.capture(model, site):
            assert torch.equal(run(), plain)


class Registry(nn.Module):
    """A class that asks something of its subclasses, and remembers them."""

    known: list[type] = []  # noqa: RUF012
    __slots__ = ("scratch",)

    def __init_subclass__(cls, *, kind: str) -> None:
        Registry.known.append(cls)


class Registered(Registry, kind="one"):
    """Sets no attribute once it is made, and answers for those it does not have."""

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
    """Makes classes that nobody can inherit from."""

    def __new__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> type:
        if any(isinstance(base, Final) for base in bases):
            raise TypeError("nobody inherits from this")
        return super().__new__(cls, name, bases, namespace)


class Alone(nn.Linear, metaclass=Final):
    """Such a class."""


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
        pytest.raises(hl.NeverFired, match="was replaced"),
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

    with pytest.raises(
        hl.NeverFired, match="'links/matmul'.*sparse tensor, whose operations can't be followed; ':param"
    ):
        hl.run(Sparse(), torch.ones(3, 2), capture="links/matmul")


def test_a_parameter_that_is_read_past_its_name_is_explained() -> None:
    class Past(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return x @ self._parameters["weight"].T

    with pytest.raises(hl.NeverFired, match="'weight:param'.*it was not read by its name, as in self.weight"):
        hl.run(Past(3, 3), torch.ones(2, 3), capture="weight:param")
    with pytest.raises(hl.NeverFired, match="no operation took it.*only those on what self.weight reads are seen"):
        hl.run(Past(3, 3), torch.ones(2, 3), capture="weight/matmul")
