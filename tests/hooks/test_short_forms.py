"""capture, patch, edit, skip, stop and run: their effect on a model, and the arguments they refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Normal

import hookline as hl
from tests.errors.wording import says
from tests.support.models import GPT, Encoder, Nested, mlp, tokens


def test_run_returns_the_output_and_with_capture_the_cache_too() -> None:
    model, x = mlp(), torch.ones(2, 4)
    assert torch.equal(hl.run(model, x), model(x))
    output, acts = hl.run(model, x, capture="*")
    assert torch.equal(output, model(x))
    assert list(acts) == ["0", "1", "2"]
    assert torch.equal(hl.run(model, input=x), model(x))


def test_run_does_everything_at_once_and_captures_what_was_changed() -> None:
    model, x = GPT(), tokens()
    output, acts = hl.run(
        model,
        x=x,
        capture=["h.0", "h.1:input", "h.2", "head"],
        patch={"h.0": 1.0},
        edit={"h.1": lambda value: value * 2},
        skip="h.2",
    )
    ones = torch.ones_like(x)
    assert torch.equal(acts["h.0"], ones)
    assert torch.equal(acts["h.1:input"], ones)
    assert torch.equal(acts["h.2"], model.h[1](ones, scale=0.5) * 2)
    assert torch.equal(output, model.head(acts["h.2"]))


def test_run_skips_several_each_with_its_value() -> None:
    model, x = GPT(), tokens()
    output = hl.run(model, x, skip={"h.{0,1}": torch.ones_like(x), "h.2.mlp": 0.0})
    last = model.h[2]
    ones = torch.ones_like(x)
    assert torch.equal(output, model.head(ones + last.attn(last.norm(ones)) * 0.5))
    assert torch.equal(hl.run(model, x, skip=["h.0", "h.2"]), model.head(model.h[1](x, scale=0.5)))


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"capture": "9"}, "'9' matches nothing"),
        ({"capture": []}, "nothing"),
        ({"capture": "0", "patch": 0.0}, says("patch takes a mapping as", "h.0", "0.0")),
        ({"edit": [("0", F.relu)]}, says("edit= takes a mapping", "list")),
        ({"edit": {"0": 1.0}}, says("edit takes a function of")),
        ({"stop": True}, says("stop=True capture=")),
    ],
)
def test_run_refuses_what_it_cannot_do_before_the_model_runs(keywords: dict[str, Any], message: str) -> None:
    def never(_value: Tensor) -> Tensor:
        raise AssertionError("the model ran")

    model = nn.Sequential(nn.Identity())
    model[0].register_forward_hook(never)
    with pytest.raises(hl.HooklineError, match=message):
        hl.run(model, torch.ones(2), **keywords)


def test_run_takes_a_model_or_a_method_of_one() -> None:
    for thing in (F.relu, 3, [mlp()], nn.Linear):
        with pytest.raises(hl.SiteError, match=says("run takes a model or")):
            hl.run(thing, torch.ones(2), capture="0")


def test_run_takes_any_function_that_runs_the_model_that_is_given() -> None:
    model, x = GPT(), tokens()
    output, acts = hl.run(lambda x: model(x) + 1, x, capture=["h.0", ""], patch={"h.1": 0.0}, model=model)
    assert torch.equal(output, acts[""] + 1)
    assert torch.equal(acts["h.0"], model.h[0](x, scale=0.5))
    output, acts = hl.run(lambda x: model(x) + 1, x, capture="h.0", stop=True, model=model)
    assert output is None
    assert list(acts) == ["h.0"]
    _, acts = hl.run(model.h[0].forward, x, capture="h.0", model=model)
    assert list(acts) == ["h.0"]
    _, acts = hl.run(nn.Sequential(model, nn.ReLU()), x, capture="h.0", model=model)
    assert list(acts) == ["h.0"]
    _, acts = hl.run(lambda x: model.h[0](x), x, capture="h.0", model=model)  # It may run a part of the model.
    assert list(acts) == ["h.0"]
    assert hl.run(lambda model, x: x, model, x, model=model) is x


def test_run_refuses_a_function_that_does_not_run_the_model_and_one_without_a_model() -> None:
    model, x = GPT(), tokens()
    with pytest.raises(hl.NeverFired, match=says("lambda did not run GPT")):
        hl.run(lambda x: x + 1, x, patch={"h.0": 0.0}, model=model)
    with pytest.raises(hl.SiteError, match=says("takes it as model=")):
        hl.run(lambda x: model(x), x, capture="h.0")
    with pytest.raises(hl.SiteError, match=says("model= takes the model that is")):
        hl.run(lambda x: model(x), x, capture="h.0", model="GPT")  # type: ignore[call-overload]

    class Judge(nn.Module):
        def forward(self, x: Tensor, model: nn.Module) -> Tensor:
            return model(x)

    with pytest.raises(hl.HooklineError, match=says("model= is the model that")):
        hl.run(Judge(), x, model=model)


def test_run_takes_a_method_that_goes_around_forward() -> None:
    model, x = Encoder(), torch.ones(2, 4)
    output, acts = hl.run(model.encode, x, capture="h.1")
    assert torch.equal(output, model.encode(x))
    assert torch.equal(acts["h.1"], output)
    with pytest.raises(hl.NeverFired, match=says("was not called ran", "h.2")):
        hl.run(model.encode, x, capture="h.2")


def test_run_takes_a_method_that_calls_the_model_many_times() -> None:
    model, x = Encoder(), torch.ones(2, 4)
    output, acts = hl.run(model.generate, x, steps=3, capture=["h.2", "h.2#0"], patch={"h.1#0": 0.0})
    first = model.h[2](torch.zeros(2, 4))
    assert torch.equal(acts["h.2#0"], first)
    assert torch.equal(output, model(model(first)))
    assert torch.equal(acts["h.2"], output)


def test_skip_passes_the_first_argument_on_without_running_the_module() -> None:
    class Counting(nn.Module):
        calls = 0

        def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
            self.calls += 1
            return hidden * 2

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Counting()

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(mask=x * 9, hidden=x)

    model, x = Model(), torch.ones(2)
    with hl.skip(model, "layer"), hl.capture(model, "layer", "layer:input") as acts:
        assert model(x).tolist() == [1.0, 1.0]
    assert model.layer.calls == 0
    assert torch.equal(acts["layer"], acts["layer:input"])
    assert hl.run(model, x, skip={"layer": torch.zeros(2)}).tolist() == [0.0, 0.0]
    assert hl.run(model, x, skip="layer", patch={"layer:input": 5.0}).tolist() == [5.0, 5.0]


def test_skip_gives_each_module_its_own_value_from_a_cache() -> None:
    model, x = GPT(), tokens()
    clean, acts = hl.run(model, x, capture="h.*")
    with hl.skip(model, "h.*", acts):
        assert torch.equal(model(torch.zeros_like(x)), clean)
    assert torch.equal(hl.run(model, torch.zeros_like(x), skip={"h.2": acts["h.2"]}), clean)


def test_a_skipped_value_is_not_the_callers_own_tensor() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))
    value = torch.full((2, 4), -1.0)
    hl.run(model, torch.ones(2, 4), skip={"0": value})
    assert value.eq(-1).all()
    x = torch.full((2, 4), -1.0)
    assert hl.run(model, x, skip="0").eq(0).all()
    assert x.eq(-1).all(), "the in-place ReLU wrote into the model's input, not into a copy"


@pytest.mark.parametrize(
    ("layer", "x", "message"),
    [
        (nn.LSTM(4, 4), torch.ones(1, 2, 4), "LSTM returns a tuple"),
        (nn.Embedding(4, 4), torch.ones(2, dtype=torch.long), "Embedding returns vectors"),
        (nn.Linear(4, 3), torch.ones(2, 4), "Linear takes 4 features and returns 3"),
    ],
)
def test_skip_without_a_value_refuses_modules_that_return_something_else(
    layer: nn.Module, x: Tensor, message: str
) -> None:
    with pytest.raises(hl.EditError, match=says("give the value to return", "0", message)):
        hl.run(nn.Sequential(layer), x, skip="0")
    model = nn.Sequential(layer)
    with hl.skip(model, "0", "anything", check=False):
        assert model(x) == "anything"


@pytest.mark.parametrize("site", ["0:input", "0[0]", "0:grad_output"])
def test_only_a_whole_module_can_be_skipped(site: str) -> None:
    with pytest.raises(hl.SiteError, match=says("a module is skipped as")):
        hl.skip(mlp(), site)


class Twice(nn.Module):
    """Calls one layer twice and another never."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.BatchNorm1d(4)
        self.dead = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(self.used(x))


def block_that_misses_a_site(model: nn.Module, x: Tensor) -> None:
    with hl.capture(model, "*"):
        model(x)


def hooks_made_twice(model: nn.Module, _x: Tensor) -> None:
    first, second = hl.Hooks(model), hl.Hooks(model)
    first.capture("used")
    second.capture("used")
    first.remove()
    second.remove()


REASONS_TO_WARN: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "a block": block_that_misses_a_site,
    "a run": lambda model, x: hl.run(model, x, capture="*"),
    "several calls": lambda model, x: hl.run(model, x, capture="used")[1]["used"],
    "twins": hooks_made_twice,
    "statistics": lambda model, x: hl.run(model, x, capture="used", stop=True),
    "no gradient": torch.no_grad()(lambda model, x: hl.run(model, x, capture=(nn.BatchNorm1d, ":grad_output"))),
}


@pytest.mark.parametrize("reason", REASONS_TO_WARN)
def test_warnings_point_at_the_line_of_the_user(reason: str) -> None:
    with pytest.warns(hl.HooklineWarning) as said:
        REASONS_TO_WARN[reason](Twice(), torch.ones(2, 4))
    assert {warning.filename for warning in said} == {__file__}


def test_a_value_may_be_any_object() -> None:
    class Policy(nn.Module):
        def forward(self, x: Tensor) -> Normal:
            return Normal(x, 1.0)

    class Agent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.policy = Policy()

        def forward(self, x: Tensor) -> Tensor:
            return self.policy(x).mean

    model, x = Agent(), torch.ones(2)
    output, acts = hl.run(model, x, capture=["policy", 'policy["loc"]'], patch={"policy": Normal(x * 3, 1.0)})
    assert output.tolist() == [3.0, 3.0]
    assert isinstance(acts["policy"], Normal)
    assert acts['policy["loc"]'].tolist() == [3.0, 3.0]
    assert hl.run(model, x, patch={'policy["loc"]': 7.0}).tolist() == [7.0, 7.0]


def test_a_patch_puts_parts_of_nested_values_in() -> None:
    x = torch.ones(2, 4)
    model = Nested()
    output = hl.run(model, x, patch={'["hidden"][0][:, 1:3]': 0.0, '["steps"]': 5, '["loss"]': torch.tensor(0.5)})
    assert output["hidden"][0].tolist() == [[1, 0, 0, 1], [1, 0, 0, 1]]
    assert (output["steps"], output["loss"].item()) == (5, 0.5)
    assert isinstance(output["hidden"], tuple)
    assert x.eq(1).all()


def test_a_patch_that_would_replace_another_value_at_a_place_that_was_named_is_refused() -> None:
    model = GPT()
    with pytest.raises(hl.EditError, match=says("is given two values", "h.0", "h.0", "h.0:output")):
        hl.patch(model, {"h.0": 0.0, "h.0:output": 1.0})
    with pytest.raises(hl.EditError, match=says("is given two values", "h.0")):
        hl.patch(model, {"h.0": 0.0, model.h[0]: 1.0})
    with pytest.raises(hl.EditError, match=says("is given two values", "h.*", "h.0")):
        hl.patch(model, {"h.0": 0.0, "h.*": 1.0})
    with pytest.raises(hl.EditError, match=says("are one module", "0", "1", "#n")):
        hl.patch(nn.Sequential(layer := nn.ReLU(), layer), {"0": 0.0, "1": 1.0})


def test_a_patch_may_make_an_exception_of_a_pattern_and_name_several_parts_and_calls() -> None:
    model, x = GPT(), tokens()
    _, acts = hl.run(model, x, patch={"h.*": 0.0, "h.1": 1.0}, capture="h.*")
    assert [acts[f"h.{layer}"].mean().item() for layer in range(3)] == [0, 1, 0]
    hl.run(model, x, patch={"h.0[:, 0]": 0.0, "h.0[:, 1]": 1.0, "h.0:input": 0.0, "h.1#0": 0.0})
    hl.run(model, x, patch={"h.0.attn.weight:param": 0.0, "h.0.attn.bias:param": 1.0})


@pytest.mark.parametrize("value", [None, torch.zeros_like])
def test_what_no_module_returns_is_refused_as_the_value_of_a_skip(value) -> None:
    model, x = GPT(), tokens()
    with pytest.raises(hl.EditError, match=says("given as the output of Block")):
        hl.run(model, x, skip={"h.0": value})


def test_run_describes_a_tensor_that_is_given_in_place_of_a_model() -> None:
    with pytest.raises(hl.SiteError, match=says("run takes a model or", "not float32 (2, 4)")):
        hl.run(torch.ones(2, 4), capture="0")


@pytest.mark.parametrize("option", ["keep", "transform", "captures", "patches"])
def test_run_does_not_hand_the_model_what_was_meant_for_hookline(option: str) -> None:
    class Open(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Identity()

        def forward(self, x: torch.Tensor, device: str = "", **kwargs: Any) -> torch.Tensor:
            return self.body(x)

    model, x = Open(), torch.ones(2)
    hl.run(model, x, capture="body", device="here")  # An argument of the model, not an option.
    with pytest.raises(hl.HooklineError, match=f"no option '{option}'"):
        hl.run(model, x, capture="body", **{option: "all"})
