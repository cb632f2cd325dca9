"""Bugs that users reported: arguments that change later, transforms that return nothing, pickled caches."""

from __future__ import annotations

import pickle
import threading
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookline as hl
from tests.errors.wording import says
from tests.support.models import mlp


class Given(nn.Module):
    """Returns its arguments."""

    def forward(self, x: Any, y: Any = 0, z: Any = 0) -> tuple[Any, ...]:
        return x, y, z


class Split(nn.Module):
    """Returns two tensors; the model overwrites the first."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = nn.Linear(2, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.pair(x)[:, :2] * 1, self.pair(x)[:, 2:] * 1


class Overwrites(nn.Module):
    """Overwrites one of two values, in a way that torch counts, or through `.data`, which it does not."""

    def __init__(self, by_data: bool) -> None:
        super().__init__()
        self.split = Split()
        self.by_data = by_data

    def forward(self, x: Tensor) -> Tensor:
        one, two = self.split(x)
        if self.by_data:
            one.data.zero_()
        else:
            one = one.relu_()
        return one.sum() + two.sum()


@pytest.mark.parametrize("by_data", [True, False])
def test_of_a_nested_value_of_the_graph_only_what_is_overwritten_is_a_copy(by_data: bool) -> None:
    model, x = Overwrites(by_data), torch.randn(3, 2)
    before = model.split(x)
    with hl.capture(model, "split", detach=False) as acts:
        loss = model(x)
    one, two = acts["split"]
    assert torch.equal(one, before[0])
    assert torch.equal(two, before[1])
    assert torch.equal(torch.autograd.grad(loss, two)[0], torch.ones(3, 2))


def test_a_value_that_was_only_read_stays_the_graphs_own() -> None:
    model, x = mlp(), torch.ones(2, 4)
    with hl.capture(model, "0"), hl.capture(model, "0", detach=False) as acts:
        output = model(x)
    acts["0"].detach().numpy()  # numpy() may move the memory of a copy-on-write tensor.
    assert torch.autograd.grad(output.sum(), acts["0"])[0].shape == (2, 8)


def test_a_transform_may_read_the_graphs_own_value_in_any_way() -> None:
    model = mlp()
    with (
        hl.capture(model, "0"),
        hl.capture(model, "0", detach=False, transform=lambda v: v.detach().numpy().sum()) as a,
    ):
        model(torch.ones(2, 4))
    assert isinstance(float(a["0"]), float)


def test_a_transform_in_inference_mode_can_not_write_into_the_model() -> None:
    model, x = mlp(), torch.ones(2, 4)
    with torch.inference_mode():
        bare = model(x)
        with hl.capture(model, "0", detach=False, transform=lambda value: value.mul_(0)):
            assert torch.equal(model(x), bare)


def test_a_parameter_of_the_graph_is_not_copied() -> None:
    model = nn.Embedding(10, 4)
    with hl.capture(model, "weight:param", detach=False) as acts:
        model(torch.tensor([1]))
    assert acts["weight:param"].data_ptr() == model.weight.data_ptr()


def test_arguments_may_be_changed_in_the_dict_itself() -> None:
    model = Given()

    def change(bound: dict[str, Any]) -> dict[str, Any]:
        bound["x"] = 5
        return bound

    with hl.edit(model, ":inputs", change, clone=False, check=False):
        assert model(1, z=2) == (5, 0, 2)


def test_arguments_that_are_left_out_move_no_others() -> None:
    class Only(nn.Module):
        def forward(self, x: Any, y: Any = 0, z: Any = 0, /) -> tuple[Any, ...]:
            return x, y, z

    model, only = Given(), Only()
    without = lambda bound: {name: value for name, value in bound.items() if name != "y"}  # noqa: E731
    with hl.edit(model, ":inputs", without, check=False):
        assert model(1, 2, 3) == (1, 0, 3)
    with hl.edit(only, ":inputs", without, check=False):
        with pytest.raises(hl.EditError, match=says("is left out", "y")):
            only(1, 2, 3)


def test_a_transform_that_keeps_nothing_in_a_later_block_hides_the_earlier_value() -> None:
    model = nn.Sequential(nn.Identity())
    hooks = hl.Hooks(model, active=False)
    acts = hooks.capture("0", transform=lambda value: value if value.sum() > 0 else None)
    with hooks:
        model(torch.ones(1))
    with hooks:
        model(-torch.ones(1))
        with pytest.raises(hl.NotCaptured, match=says("the transform has kept nothing", "0")):
            acts["0"]
    with pytest.raises(hl.NotCaptured, match=says("the transform has kept nothing", "0")):
        acts["0"]


def test_a_transform_of_a_gradient_that_keeps_nothing_says_so() -> None:
    layer = nn.Linear(2, 2)
    with hl.capture(layer, ":grad_output", transform=lambda value: None) as acts:
        layer(torch.ones(1, 2)).sum().backward()
    with pytest.raises(hl.NotCaptured, match=says("the transform has kept nothing", ":grad_output")):
        acts[":grad_output"]


@pytest.mark.parametrize("options", [{}, {"detach": False}, {"clone": False}])
def test_a_cache_may_be_pickled_however_it_was_filled(options: dict[str, Any]) -> None:
    model, x = mlp(), torch.ones(2, 4)
    with torch.no_grad(), hl.capture(model, "0", **options) as acts:
        model(x)
    assert torch.equal(pickle.loads(pickle.dumps(acts))["0"], model[0](x))


def test_functions_that_differ_in_their_defaults_are_not_the_same() -> None:
    hooks = hl.Hooks(mlp())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in (2.0, 3.0):
            hooks.edit("0", lambda value, by=number: value * by)
    hooks.remove()


def test_what_may_be_missing_is_said_of_hooks_that_are_there() -> None:
    with pytest.raises(hl.HooklineError, match=says("when_missing applies to existing hooks")):
        hl.Hooks(mlp()).when_missing("ignore")


def test_an_exact_function_that_may_be_missing_warns_though_another_ran() -> None:
    class Soft(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.softmax(-1)

    model = nn.Sequential(Soft(), nn.Identity())
    with pytest.warns(hl.HooklineWarning, match=says("did not fire", "1/softmax")):
        with hl.capture(model, "0/softmax", "1/softmax").when_missing("warn"):
            model(torch.ones(2))


def test_the_reason_why_a_gradient_is_lost_can_be_read() -> None:
    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part, self.linear = nn.Identity(), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            self.part(y[:, :3])[:, :1].mul_(2)
            return y

    model = Part()
    with hl.capture(model, "part:grad_output").when_missing("ignore") as acts:
        model(torch.randn(2, 4)).sum().backward()
    with pytest.raises(hl.NotCaptured, match=says("a part of it is")):
        acts["part:grad_output"]


def test_an_edit_takes_no_other_clone() -> None:
    with pytest.raises(hl.HooklineError, match=says("is not None, True or False", "clone=", "no")):
        hl.edit(mlp(), "0", torch.relu, clone="no")  # type: ignore[arg-type]


def test_a_hooked_class_of_ones_own_may_take_more() -> None:
    class Mine(hl.HookedModel):
        def __init__(self, model: nn.Module, title: str) -> None:
            super().__init__(model)
            self.title = title

    assert Mine(mlp(), "mine").title == "mine"


def test_the_hessian_of_a_model_goes_through_a_followed_container() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Tanh()))
    outer, inner = hl.Hooks(model[0]), hl.Hooks(model[0][1])
    outer.edit(":grad_output", lambda gradient: None)
    inner.edit(":grad_output", lambda gradient: None)
    x = torch.randn(2)
    assert torch.func.hessian(lambda v: model(v).sum())(x).shape == (2, 2)
    outer.remove()
    inner.remove()


def test_a_value_that_can_not_be_copied_is_refused_once_it_is_overwritten() -> None:
    class Holder:
        def __init__(self, value: Tensor) -> None:
            self.value, self.lines = value, iter(())

    class Gives(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return Holder(x * 1)

    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gives = Gives()

        def forward(self, x: Tensor) -> Tensor:
            held = self.gives(x)
            held.value.zero_()
            return held.value

    model = Writes()
    with hl.capture(model, "gives", detach=False) as acts:
        model(torch.ones(2))
    with pytest.raises(hl.StaleValue, match=says("was overwritten in place", "gives")):
        acts["gives"]


def test_a_run_on_another_thread_is_not_taken_for_a_pause_of_the_hooks() -> None:
    model, other = mlp(), mlp()
    with hl.capture(model, "0"):  # No forward runs on this thread.
        worker = threading.Thread(
            target=lambda: hl.run(other, torch.ones(2, 4), edit={"0": lambda v: model(v[:, :4]) is None or None})
        )
        worker.start()
        worker.join()


def test_a_list_of_places_narrows_as_its_parts_do() -> None:
    hooks = hl.Hooks(mlp())
    hooks.edit("0", torch.relu)
    hooks.edit("0:input", torch.relu)
    assert len(hooks.at(["0:output"])) == 1
    assert len(hooks.at(["0"])) == 2
    hooks.remove()
