"""check: it passes where hook points work, lists the points that can't fire, and each check fails where it should."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hookline as hl
from hookline.points.check import CHECKS, EDITS, FIRES, GRADIENTS, RESTORED, VALUES
from tests.errors.wording import says
from tests.support.models import GPT, mlp, tokens
from tests.support.points_models import AutoEncoder, Decorated

numbers = itertools.count(1)


class Fed(nn.Module):
    """One linear layer."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return self.fc(x)


class Lossy(Fed):
    """Calls a layer whose result is not used."""

    def __init__(self):
        super().__init__()
        self.lost = nn.Linear(4, 4)

    def forward(self, x):
        self.lost(x)
        return self.fc(x)


class Shy(Fed):
    """Returns a different output when it is hooked."""

    def forward(self, x):
        return self.fc(x) + ("forward" in self.fc.__dict__)


class Marked(Fed):
    """Sets an attribute when it is hooked."""

    def forward(self, x):
        if "forward" in self.fc.__dict__:
            self.was_hooked = True
        return self.fc(x)


class Drawing(Fed):
    """Draws a random number only when it is hooked."""

    def forward(self, x):
        if "forward" in self.fc.__dict__:
            torch.rand(1)
        return self.fc(x)


class Registering(Fed):
    """Registers one of torch's hooks when it is hooked."""

    def forward(self, x):
        if "forward" in self.fc.__dict__:
            self.fc.register_forward_hook(lambda *_: None)
        return self.fc(x)


class Changing(Fed):
    """Changes its class when it is hooked."""

    def forward(self, x):
        if "forward" in self.fc.__dict__:
            self.__class__ = Fed
        return self.fc(x)


class Stubborn(Fed):
    """Restores its layer's original forward before it calls the layer."""

    def forward(self, x):
        self.fc.forward = nn.Linear.forward.__get__(self.fc)
        return self.fc(x)


class Uncertain(Fed):
    """Returns a different output each time."""

    def forward(self, x):
        return self.fc(x) * next(numbers)


class Generating(Fed):
    """Returns a generator, which can be read only once."""

    def forward(self, x):
        return (row for row in self.fc(x))


class Stateful(nn.Module):
    """A model whose every run changes statistics, counters, lists and random numbers of three kinds."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout()
        self.attention = nn.MultiheadAttention(4, 2)
        self.unused = nn.Linear(4, 4)
        self.calls = 0
        self.history = []

    def forward(self, ids):
        self.calls += 1
        self.history.append(self.calls)
        self.latest = x = self.drop(self.norm(self.embed(ids))) * (1 + random.random())
        return self.attention(x, x, x)[0], {"best": x.argmax(-1)}


def rows(report, check):
    return [(row.point, row.result) for row in report if row.check == check]


def failed(report):
    return {row.check for row in report.failures}


def left_on(model):
    return {
        name: ({key: held for key, held in vars(module).items() if key != "history"}, type(module))
        for name, module in model.named_modules()
    }


def test_a_model_whose_points_work_passes():
    report = hl.check(AutoEncoder, {"x": torch.randn(2, 4)}, {"width": 4})
    assert report
    assert report.ok
    assert [tuple(row) for row in report] == [(name, "", "passed", "") for name in CHECKS]
    assert not report.failures
    assert len(report) == 5
    assert report[0].check == FIRES
    assert repr(report).startswith("AutoEncoder, 5 hook points: all is well\ncheck")
    assert "hookline-table" in report._repr_html_()


@pytest.mark.parametrize(
    "make",
    [mlp, Decorated, lambda: hl.auto_hook(mlp()), lambda: torch.compile(mlp(), backend="eager")],
    ids=["model", "decorated", "hooked", "compiled"],
)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_models_hooked_already_are_checked_and_stay_hooked(make):
    model, x = make(), torch.randn(2, 4)
    assert hl.check(model, {"input": x} if not isinstance(model, Decorated) else {"x": x})
    assert not hl.attached(model)
    if isinstance(model, hl.HookedModel):
        assert model.hook_dict
    elif not isinstance(model, Decorated):
        hl.auto_hook(model)


def test_a_larger_model_passes():
    assert hl.check(GPT(), {"x": tokens()}, strict=True)


def test_what_can_not_fire_is_listed_with_the_reason():
    torch.manual_seed(1)
    report = hl.check(Stateful(), {"ids": torch.tensor([0, 1, 2])})
    assert report.ok
    reasons = {row.point: row.detail for row in report if row.result == "listed"}
    assert "MultiheadAttention reads its weight directly" in reasons["attention.out_proj.hook_point"]
    assert "'unused' was not called in 1 forward" in reasons["unused.hook_point"]
    assert ("", "passed") in rows(report, FIRES)
    assert report[0].detail == "2 of 7 points listed"


def test_modules_that_a_fused_path_passes_by_are_listed():
    layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
    model = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
    with torch.no_grad():
        report = hl.check(model, {"src": torch.randn(1, 3, 8)})
    assert report.ok
    reasons = {row.point: row.detail for row in report if row.result == "listed"}
    assert "takes a fused fast path" in reasons["layers.0.linear1.hook_point"]


def test_a_model_that_makes_its_parameters_in_its_first_run_is_refused():
    with pytest.raises(hl.HooklineError, match=says("Sequential has parameters without a")):
        hl.check(nn.Sequential(nn.LazyLinear(4)), {"input": torch.randn(2, 3)})


def test_values_that_can_not_be_edited_or_have_no_gradient_are_listed():
    class Best(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.best = Argmax()

        def forward(self, x):
            x = self.fc(x)
            return x[self.best(x)]

    class Argmax(nn.Module):
        def forward(self, x):
            return x.argmax(-1)

    report = hl.check(Best(), {"x": torch.randn(4, 4)})
    assert report.ok
    assert ("best.hook_point", "listed") in rows(report, EDITS)
    assert ("best.hook_point", "listed") in rows(report, GRADIENTS)


def test_an_output_without_gradients_or_tensors_is_listed():
    class Count(nn.Module):
        def forward(self, x):
            return len(x)

    frozen = hl.check(mlp().requires_grad_(False), {"input": torch.randn(2, 4)})
    assert frozen.ok
    assert rows(frozen, GRADIENTS) == [("", "passed"), ("", "listed")]
    number = hl.check(Count(), {"x": torch.randn(2, 4)})
    assert number.ok
    assert rows(number, FIRES) == [("", "passed"), ("hook_point", "listed")]
    assert rows(number, EDITS) == [("", "passed"), ("", "listed")]


def test_the_model_is_left_as_it_was():
    model = Stateful()
    model.embed.weight.grad = gradient = torch.ones(5, 4)
    before, buffers = left_on(model), {name: held.clone() for name, held in model.named_buffers()}
    parameters = {name: held.clone() for name, held in model.named_parameters()}
    ids = torch.tensor([0, 1, 2])
    numbers = torch.get_rng_state(), random.getstate()
    hl.check(model, {"ids": ids})
    assert (torch.get_rng_state().equal(numbers[0]), random.getstate() == numbers[1]) == (True, True)
    assert left_on(model) == before
    assert model.history == []
    assert all(held.equal(buffers[name]) for name, held in model.named_buffers())
    assert all(held.equal(parameters[name]) for name, held in model.named_parameters())
    assert model.embed.weight.grad is gradient
    assert model.unused.weight.grad is None
    assert not hl.attached(model)
    hl.check(Stateful, {"ids": ids})
    assert torch.get_rng_state().equal(numbers[0])


def test_hooks_that_are_on_the_model_rest_meanwhile_and_stay():
    model, calls = hl.auto_hook(mlp()), []
    model.add_hook("0.hook_point", lambda tensor, hook: calls.append(1))
    assert hl.check(model, {"input": torch.randn(2, 4)})
    assert not calls
    model(torch.randn(2, 4))
    assert calls
    model.reset_hooks()


def test_inputs_are_left_as_they_were():
    class Writing(Fed):
        def forward(self, x):
            return self.fc(x.mul_(2) if not x.requires_grad else x)

    x, leaf = torch.ones(2, 4), torch.ones(2, 4, requires_grad=True)
    assert hl.check(Writing(), {"x": x})
    assert x.equal(torch.ones(2, 4))
    assert hl.check(Writing(), {"x": leaf})
    assert leaf.grad is None


@pytest.mark.parametrize(
    ("kind", "check", "point", "detail"),
    [
        (Stubborn, FIRES, "fc.hook_point", "torch's own hook was called, this point was not"),
        (Generating, FIRES, "", "generator passes here"),
        (Lossy, EDITS, "lost.hook_point", "the output stays the same"),
        (Lossy, GRADIENTS, "lost.hook_point", "no gradient arrives"),
        (Shy, VALUES, "", "the output differs from that of the bare model"),
        (Uncertain, VALUES, "", "two runs of the bare model differ"),
        (Marked, RESTORED, "", "'was_hooked'"),
        (Changing, RESTORED, "", "its class"),
        (Drawing, RESTORED, "", "the random numbers of torch"),
        (Registering, RESTORED, "", "'_forward_hooks' of 'fc'"),
    ],
)
def test_each_check_fails_where_it_should(kind, check, point, detail):
    report = hl.check(kind, {"x": torch.randn(2, 4)})
    assert not report
    assert not report.ok
    assert "something failed" in repr(report)
    found = [row for row in report.failures if row.check == check]
    assert found
    assert found[0].point == point
    assert detail in found[0].detail
    with pytest.raises(hl.HooklineError, match=says("hook points something failed", kind.__name__, check)):
        hl.check(kind, {"x": torch.randn(2, 4)}, strict=True)


def test_a_value_that_differs_from_what_torch_sees_fails():
    class Late(nn.Module):
        """Changes its layer's output in one of torch's hooks, which runs after the forward that `check` sees."""

        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.fc.register_forward_hook(lambda module, args, output: output + 1)

        def forward(self, x):
            return self.fc(x)

    report = hl.check(Late(), {"x": torch.randn(2, 4)})
    assert failed(report) == {VALUES}
    assert rows(report, VALUES) == [("fc.hook_point", "failed")]


def test_an_edit_that_the_model_can_not_go_on_with_counts_as_one():
    class Strict(Fed):
        def forward(self, x):
            x = self.fc(x).detach()
            if not x.equal(self.fc(self.given)):
                raise ValueError("not what I know")
            return x

    model = Strict()
    model.given = x = torch.randn(2, 4)
    assert hl.check(model, {"x": x})


def test_an_error_of_the_model_itself_passes_through():
    model = mlp()
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes") as held:
        hl.check(model, {"input": torch.randn(2, 5)})
    assert held.traceback
    assert hl.auto_hook(model).unwrap() is model


def test_what_is_not_a_number_is_equal_to_itself():
    class Undefined(Fed):
        def forward(self, x):
            return self.fc(x).log()

    assert hl.check(Undefined, {"x": torch.randn(8, 4)})


def test_wrong_arguments_are_refused():
    with pytest.raises(hl.HooklineError, match=says("check calls model input_kwargs", "(2, 4)")):
        hl.check(mlp(), torch.randn(2, 4))
    with pytest.raises(hl.HooklineError, match=says("init_kwargs is for a class")):
        hl.check(mlp(), {"input": torch.randn(2, 4)}, {"width": 4})


def test_functions_of_the_model_run_the_same_in_every_mode():
    class Noisy(Fed):
        def forward(self, x):
            return F.dropout(self.fc(x), training=self.training)

    for model in (Noisy(), Noisy().eval()):
        assert hl.check(model, {"x": torch.randn(2, 4)})
