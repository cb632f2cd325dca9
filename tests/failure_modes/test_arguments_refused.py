"""Arguments that would be ignored or misread are refused, and the error says what to write instead."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookline as hl
from tests.errors.wording import says
from tests.support.models import mlp

X = torch.ones(3, 4)
FLAGS: dict[str, Callable[[nn.Module], Any]] = {
    "detach": lambda model: hl.capture(model, "0", detach="no"),
    "gather": lambda model: hl.capture(model, "0", gather="no"),
    "stop": lambda model: hl.capture(model, "0", stop="0"),
    "with_call": lambda model: hl.edit(model, "0", torch.relu, with_call="yes"),
    "check": lambda model: hl.patch(model, {"0": 0.0}, check=None),
    "active": lambda model: hl.Hooks(model, active="no"),
    "again": lambda model: hl.watch(model, again="no"),
    "clone": lambda model: hl.capture(model, "0", clone=1),
}


@pytest.mark.parametrize("name", FLAGS)
def test_an_option_that_is_on_or_off_takes_nothing_else(name: str) -> None:
    with pytest.raises(hl.HooklineError, match=says("True or False", f"{name}=")):
        FLAGS[name](mlp())


def test_every_verb_checks_each_of_its_flags() -> None:
    model = mlp()
    for refused in (
        lambda: hl.edit(model, "0", torch.relu, check="no"),
        lambda: hl.edit(model, "0", torch.relu, gather=0),
        lambda: hl.skip(model, "0", X, check="no"),
        lambda: hl.capture(model, "0", transform=torch.relu, with_call=1),
        lambda: hl.run(model, X, capture="0", stop="no"),
    ):
        with pytest.raises(hl.HooklineError, match=says("is not True or False")):
            refused()


def test_hooks_that_run_their_model_are_not_given_it_nor_a_method_of_it() -> None:
    class Model(nn.Sequential):
        def encode(self, x: Tensor) -> Tensor:
            return self(x)

    model = Model(nn.Linear(4, 4))
    for wrapped in (model, nn.DataParallel(model)):
        hooks = hl.Hooks(wrapped)
        hooks.patch({"0": 0.0})
        with pytest.raises(hl.HooklineError, match=says("leave it out as")):
            hooks.run(wrapped, X)
        with pytest.raises(hl.HooklineError, match=says("write with hooks")):
            hooks.run(model.encode, X)
        hooks.remove()


def test_a_model_may_be_given_a_function_or_a_method_of_something_else_under_hooks() -> None:
    class Applies(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, function: Callable[..., Tensor], x: Tensor) -> Tensor:
            return function(self.linear(x))

    hooks = hl.Hooks(Applies())
    hooks.patch({"linear": 1.0})
    for function in (torch.relu, nn.Identity(), nn.Identity().forward, X.mul):
        assert hooks.run(function, X).eq(1).all()


EMPTY: dict[str, Callable[[nn.Module], Any]] = {
    "hl.patch": lambda model: hl.patch(model, {}),
    "hooks.patch": lambda model: hl.Hooks(model).patch(hl.Cache()),
    "patch": lambda model: hl.run(model, X, patch={}),
    "edit": lambda model: hl.run(model, X, edit={}),
    "skip": lambda model: hl.run(model, X, skip={}),
    "capture": lambda model: hl.run(model, X, capture=[]),
    "a list": lambda model: hl.edit(model, [], torch.relu),
}


@pytest.mark.parametrize("name", EMPTY)
def test_nothing_to_do_is_an_error_however_it_is_said(name: str) -> None:
    with pytest.raises((hl.EditError, hl.SiteError), match="empty"):
        EMPTY[name](mlp())


def test_functions_in_a_dict_of_places_to_capture_are_not_ignored() -> None:
    for refused in (
        lambda: hl.run(mlp(), X, capture={"0": torch.sum}),
        lambda: hl.capture(mlp(), {"0": torch.sum}),
        lambda: hl.capture(mlp(), ["1", {"0": torch.sum}]),
    ):
        with pytest.raises(hl.SiteError, match=says("a dict names no places")):
            refused()
    with hl.capture(mlp(), hl.Cache({"0": X})) as acts:  # A cache stands for its sites.
        pass
    assert not len(acts)


def test_an_edit_of_a_mapping_says_how_edits_are_written() -> None:
    with pytest.raises(hl.EditError, match=says("run takes several", "h.0")):
        hl.edit(mlp(), {"0": torch.relu})
    with pytest.raises(hl.EditError, match=says("run takes several")):
        hl.Hooks(mlp()).edit("0")
    with pytest.raises(hl.EditError, match=says("edit= takes a mapping")):
        hl.run(mlp(), X, edit=[])


class TestFunctionsOfAnotherSignature:
    def test_an_edit_that_wants_the_call_is_told_how_to_get_it(self) -> None:
        with pytest.raises(hl.EditError, match=says("the function takes value", "0")):
            hl.run(mlp(), X, edit={"0": lambda value, call: value})

    def test_one_that_does_not_want_it_is_told_so_too(self) -> None:
        with pytest.raises(hl.EditError, match=says("value and is called with")):
            with hl.edit(model := mlp(), "0", lambda value: value, with_call=True):
                model(X)

    def test_a_transform_is_told_the_same(self) -> None:
        with (
            pytest.raises(hl.EditError, match=says("with_call=True")),
            hl.capture(model := mlp(), "0", transform=divmod_),
        ):
            model(X)

    def test_a_function_that_can_be_called_neither_way_says_what_it_takes(self) -> None:
        with pytest.raises(hl.EditError, match=says("takes and is called with")):
            hl.run(mlp(), X, edit={"0": lambda: None})

    def test_a_type_error_of_the_function_itself_comes_through(self) -> None:
        with pytest.raises(TypeError, match="NoneType") as caught:
            hl.run(mlp(), X, edit={"0": lambda value: value + None})
        assert not isinstance(caught.value, hl.HooklineError)
        with pytest.raises(TypeError) as caught:
            hl.run(mlp(), X, edit={"0": torch.matmul})
        assert not isinstance(caught.value, hl.HooklineError)


def divmod_(value: Any, call: Any) -> Any:
    return value


class Block(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, :2]


class TestSkipping:
    @pytest.mark.parametrize("site", ["0", "1", "2", ""])
    def test_a_value_that_the_layer_would_not_return_is_refused(self, site: str) -> None:
        with pytest.raises(hl.EditError, match=says("shape does not fit where", "(3, 3)")):
            hl.run(mlp(), X, skip={site: torch.zeros(3, 3)})

    def test_its_dtype_is_checked_too(self) -> None:
        with pytest.raises(hl.EditError, match=says("torch float64 torch float32 passes")):
            hl.run(mlp(), X, skip={"0": torch.zeros(3, 8).double()})

    def test_a_number_or_a_row_is_broadcast_as_in_a_patch(self) -> None:
        model = mlp()
        for value in (0.5, torch.full((8,), 0.5)):
            _, acts = hl.run(model, X, skip={"0": value}, capture="0")
            assert acts["0"].equal(torch.full((3, 8), 0.5))

    def test_an_embedding_gives_vectors(self) -> None:
        model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 2))
        words = torch.tensor([[1, 2, 3]])
        hl.run(model, words, skip={"0": torch.zeros(1, 3, 4)})
        with pytest.raises(hl.EditError, match=says("shape does not fit where", "(1, 3)", "(1, 3, 4)")):
            hl.run(model, words, skip={"0": torch.zeros(1, 3)})

    def test_what_is_not_known_is_let_through_but_for_numbers(self) -> None:
        model = nn.Sequential(Block(), nn.LSTM(2, 2))
        output, _ = hl.run(model, X, skip={"0": torch.zeros(5, 2)})
        assert output.shape == (5, 2)
        with pytest.raises(hl.EditError, match=says("given as the output of", "0", "0.0")):
            hl.run(model, X, skip={"0": 0.0})

    def test_under_autocast_the_dtype_is_up_to_the_caller(self) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert hl.run(mlp(), X, skip={"": torch.zeros(3, 2).bfloat16()}).dtype is torch.bfloat16

    @pytest.mark.parametrize(
        "norm", [nn.LayerNorm(4), nn.BatchNorm1d(4), nn.RMSNorm(4)], ids=lambda norm: norm._get_name()
    )
    def test_a_norm_in_float32_gives_the_dtype_of_its_input_or_its_own(self, norm: nn.Module) -> None:
        model, x = nn.Sequential(norm).eval(), X.bfloat16()
        for value in (torch.ones(3, 4).bfloat16(), torch.ones(3, 4)):
            assert hl.run(model, x, skip={"0": value}).dtype is value.dtype
        with pytest.raises(hl.EditError, match=says("float16 given where torch")):
            hl.run(model, x, skip={"0": torch.ones(3, 4).half()})

    def test_a_layer_whose_weights_are_not_loaded_gives_what_fits_its_input(self) -> None:
        model = mlp()
        model[0].to("meta")
        for value in (torch.zeros(3, 8), 0.0):
            assert hl.run(model, X, skip={"0": value}).equal(model[2](torch.zeros(3, 8)))
        with pytest.raises(hl.EditError, match=says("shape does not fit where", "(3, 3)")):
            hl.run(model, X, skip={"0": torch.zeros(3, 3)})

    def test_on_the_meta_device_it_is_checked_as_elsewhere(self) -> None:
        model, x = mlp().to("meta"), X.to("meta")
        assert hl.run(model, x, skip={"0": torch.zeros(3, 8, device="meta")}).is_meta
        with pytest.raises(hl.EditError, match=says("torch float64 torch float32 passes")):
            hl.run(model, x, skip={"0": torch.zeros(3, 8, device="meta").double()})

    @pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
    def test_nested_and_sparse_values_are_not_checked(self) -> None:
        model = nn.Sequential(nn.ReLU())
        nested = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)])
        assert hl.run(model, nested, skip={"0": nested}).is_nested
        assert hl.run(model, X.to_sparse(), skip={"0": X.to_sparse()}).is_sparse

    def test_unchecked_anything_goes(self) -> None:
        model = mlp()
        with hl.skip(model, "", "hello", check=False):
            assert model(X) == "hello"
        hooks = hl.Hooks(model, active=False)
        hooks.skip("2", torch.zeros(1), check=False)
        assert hooks.run(X).shape == (1,)


@pytest.mark.parametrize("text", ["0#1,2", "0#1-3", "0#-2", "0#x"])
def test_calls_that_cannot_be_read_say_how_several_calls_are_named(text: str) -> None:
    with pytest.raises(hl.SiteError, match=says("takes the number of", "#", "#1:", "#:3", "#{0,2}", "#*")):
        hl.sites(mlp(), text)


class TestOptionsOfCapture:
    def test_a_dtype_may_be_given_by_its_name(self) -> None:
        model = mlp()
        hooks = hl.Hooks(model)
        hooks.capture("0", dtype="torch.bfloat16")
        with hl.capture(model, "0", dtype="float16") as acts:
            model(X)
        assert acts["0"].dtype is torch.float16
        assert hooks.cache["0"].dtype is torch.bfloat16
        hooks.remove()

    @pytest.mark.parametrize(
        ("dtype", "message"),
        [("float17", says("is not a dtype did", "float17", "'float1…")), (3, says("is not a dtype write", 3))],
    )
    def test_what_is_not_a_dtype_is_refused(self, dtype: Any, message: str) -> None:
        with pytest.raises(hl.HooklineError, match=message):
            hl.capture(mlp(), "0", dtype=dtype)

    @pytest.mark.parametrize("device", ["cuda:99", torch.device("cuda:99")])
    def test_a_device_that_is_not_here_is_refused_before_the_model_runs(self, device: Any) -> None:
        with pytest.raises(hl.HooklineError, match=says("can't be used here", "cuda:99")):
            hl.capture(mlp(), "0", device=device)

    def test_a_harvest_says_that_its_device_is_not_here(self, tmp_path: Path) -> None:
        plan = hl.Harvest(mlp(), [X], "0", to=tmp_path / "acts", device="cuda:99")  # A plan may run elsewhere.
        with pytest.raises(hl.HooklineError, match=says("can't be used here", "cuda:99")):
            plan.run()


class TestTheModelGivenAgain:
    @pytest.mark.parametrize(
        "add",
        [
            lambda hooks, model: hooks.capture(model, "0"),
            lambda hooks, model: hooks.patch(model, {"0": 0.0}),
            lambda hooks, model: hooks.edit(model, "0", torch.relu),
            lambda hooks, model: hooks.skip(model, "0"),
            lambda hooks, model: hooks.stop_after(model, "0"),
        ],
        ids=["capture", "patch", "edit", "skip", "stop_after"],
    )
    def test_hooks_say_that_they_know_it(self, add: Callable[[hl.Hooks, nn.Module], Any]) -> None:
        model = mlp()
        hooks = hl.Hooks(model)
        with pytest.raises(hl.SiteError, match=says("these hooks know their model")):
            add(hooks, model)
        assert len(hooks) == 0

    def test_as_a_place_it_is_still_its_own_output(self) -> None:
        model = mlp()
        hooks = hl.Hooks(model)
        hooks.capture(model)
        with hl.capture(model, model, "0") as acts:
            output = model(X)
        assert hooks.cache[""].equal(output)
        assert [*acts] == ["0", ""]
        hooks.remove()
