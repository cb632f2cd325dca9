"""`hl.compare` of two models: the first place that is off, what it inherits, levels, options, and what it costs."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hookline as hl
from tests.errors.wording import says
from tests.support.compared_blocks import counted_calls
from tests.support.planted_faults import ResidualConvnet, cast, model_and_inputs

X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))


def stack() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Sequential(nn.Linear(8, 8), nn.GELU()), nn.Linear(8, 3))


def test_two_models_that_do_the_same_are_ok_in_one_line():
    model = stack()
    report = hl.compare(model, copy.deepcopy(model), run=(X,))
    assert report.ok
    assert report.first is None
    assert str(report) == "ok: at 7 places the models do the same, up to rounding"
    report.check()


def test_the_first_place_is_the_one_that_makes_the_error_and_those_behind_it_inherit():
    a = stack()
    b = copy.deepcopy(a)
    b[1].eps = 0.1
    report = hl.compare(a, b, run=(X,))
    assert report.first.site == "1"
    assert report.first.hint == "eps is 1e-05 in a and 0.1 in b"
    assert report["3"].seen.largest > 0
    assert report["3"].local.is_none
    assert not report["3"].is_off
    assert [site for site, place in report.items() if place.is_off] == ["", "1"]


def test_the_values_of_both_at_the_first_place_are_kept():
    a = stack()
    b = copy.deepcopy(a)
    b[1].eps = 0.1
    first = hl.compare(a, b, run=(X,)).first
    given = a[0](X)
    torch.testing.assert_close(first.local_values[0], a[1](given))
    torch.testing.assert_close(first.local_values[1], b[1](given))
    assert first.worst.startswith("at [")


def test_the_call_in_which_a_module_is_off_most_is_shown_and_explained():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act = nn.Hardtanh(-1, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.act(self.act(x / 100).abs() * 300)

    a, b = Twice(), Twice()
    b.act.min_val, b.act.max_val = -2, 1.5  # Nothing is so low.
    first = hl.compare(a, b, run=(X,)).first
    assert (first.site, first.call) == ("act", 1)
    assert first.hint == "max_val is 1 in a and 1.5 in b"
    assert first.local_values[1].max() == 1.5


def test_calls_that_only_one_model_makes_are_noted():
    class Times(nn.Module):
        def __init__(self, times: int) -> None:
            super().__init__()
            self.times, self.linear = times, nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(self.times):
                x = self.linear(x)
            return x

    a, b = Times(2), Times(3)
    b.load_state_dict(a.state_dict())
    report = hl.compare(a, b, run=(X,))
    assert report.first.site == ""
    assert report["linear"].note == "2 calls in a, 3 in b"


def test_check_and_strict_raise():
    a = stack()
    b = copy.deepcopy(a)
    b[1].eps = 0.1
    with pytest.raises(hl.Diverged, match=says("does something else on the", "1")):
        hl.compare(a, b, run=(X,)).check()
    with pytest.raises(AssertionError):
        hl.compare(a, b, run=(X,), strict=True)


def test_both_models_are_left_as_they_were():
    a = ResidualConvnet().train()
    b = copy.deepcopy(a)
    before = copy.deepcopy(b.state_dict())
    image = torch.randn(2, 3, 8, 8)
    assert hl.compare(a, b, run=(image,)).ok
    assert all(torch.equal(one, before[name]) for name, one in b.state_dict().items())
    assert b.training


def test_tolerance_stands_in_for_measured_rounding():
    a = stack()
    b = copy.deepcopy(a)
    with torch.no_grad():
        b[0].weight.mul_(1.001)
    assert hl.compare(a, b, run=(X,)).first.site == "0"
    assert hl.compare(a, b, run=(X,), tolerance=0.02).ok


def test_a_model_in_another_dtype_is_ok_and_a_fault_in_it_is_found():
    a, run = model_and_inputs("llama")
    b = copy.deepcopy(a).bfloat16()
    assert hl.compare(a, b, run=run).ok
    b.model.layers[1].input_layernorm.variance_epsilon = 1e-2
    report = hl.compare(a, b, run=run)
    assert report.first.site == "model.layers.1.input_layernorm"
    assert "eps" in report.first.hint


def test_a_compiled_model_is_ok_and_a_fault_in_it_is_found():
    a = stack()
    assert hl.compare(a, torch.compile(copy.deepcopy(a), backend="aot_eager"), run=(X,)).ok
    b = copy.deepcopy(a)
    b[2][1] = nn.ReLU()
    report = hl.compare(a, torch.compile(b, backend="aot_eager"), run=(X,))
    assert (report.first.site, report.first.hint) == ("2.1", "a computes gelu (exact), and b relu")


def test_other_arguments_and_layouts_are_mapped():
    class Last(nn.Module):
        def __init__(self, conv: nn.Conv2d) -> None:
            super().__init__()
            self.conv = conv

        def forward(self, image: Tensor) -> Tensor:
            return self.conv(image.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)

    class First(nn.Module):
        def __init__(self, conv: nn.Conv2d) -> None:
            super().__init__()
            self.conv = conv

        def forward(self, image: Tensor) -> Tensor:
            return self.conv(image)

    conv = nn.Conv2d(3, 5, 3)
    image = torch.randn(2, 3, 6, 8)
    a, b = First(conv), Last(copy.deepcopy(conv))

    def to_last(tensor: Tensor) -> Tensor:
        return tensor.permute(0, 2, 3, 1)

    report = hl.compare(a, b, run=(image,), run_b=(to_last(image),), to_b=to_last)
    assert report.ok
    assert report["conv"].local is not None


def test_a_single_row_is_compared_with_a_batch():
    model, row = stack(), X[:1]
    report = hl.compare(model, copy.deepcopy(model), run=(X,), run_b=(row,), to_b=lambda tensor: tensor[:1])
    assert report.ok
    assert all(place.local is not None for place in report.values())


def test_nothing_to_compare_is_an_error_and_another_shape_is_not_ok():
    with pytest.raises(hl.HooklineError, match=says("none returned tensors")):
        hl.compare(Returns(lambda y: None), Returns(lambda y: None), run=(X,), match={"linear": None})
    report = hl.compare(nn.Linear(4, 3), nn.Linear(4, 5), run=(X,))
    assert report.verdict == "the model itself returns something else: output is (2, 3) in a, (2, 5) in b"
    report = hl.compare(nn.Linear(4, 1), nn.Sequential(nn.Linear(4, 1), nn.Flatten(0)), run=(X,))
    assert report.verdict.startswith("the model itself returns something else: output is (2, 1) in a, (2,) in b")


def test_another_shape_of_one_class_on_the_same_inputs_is_off():
    class Best(nn.Module):
        def __init__(self, count: int) -> None:
            super().__init__()
            self.count = count

        def forward(self, x: Tensor) -> Tensor:
            return x.topk(self.count).values

    class Model(nn.Module):
        def __init__(self, count: int) -> None:
            super().__init__()
            self.best, self.sum = Best(count), nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            return self.sum(self.best(x).sum(-1))

    first = hl.compare(Model(2), Model(1), run=(X,)).first
    assert first.site == "best"
    assert first.odd == ["output is (2, 2) in a, (2, 1) in b"]


def test_a_model_that_calls_other_modules_on_other_inputs_is_compared():
    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.experts = nn.Linear(4, 8), nn.ModuleList(nn.Linear(4, 4) for _ in range(8))

        def forward(self, x: Tensor) -> Tensor:
            which, y = self.gate(x).argmax(-1), x.clone()
            for expert in which.unique().tolist():
                y[which == expert] += self.experts[expert](x[which == expert])
            return y

    for seed in range(4):
        torch.manual_seed(seed)
        a = nn.Sequential(nn.Linear(4, 4), Routed())
        b = copy.deepcopy(a)
        with torch.no_grad():
            b[0].bias.add_(1)
        assert hl.compare(a, b, run=(torch.randn(6, 4),)).first.site == "0"


def test_random_numbers_of_python_and_numpy_are_the_same_in_both():
    a = Returns(lambda y: y * random.random() * np.random.rand())
    before = random.getstate()
    assert hl.compare(a, copy.deepcopy(a), run=(X,)).ok
    assert random.getstate() == before


def test_weights_alone_are_compared_without_a_run():
    a = stack()
    b = copy.deepcopy(a)
    assert hl.compare(a, b).verdict == "ok: the weights are equal; nothing was run"
    with torch.no_grad():
        b[2][0].weight.copy_(b[2][0].weight.T.clone())
    report = hl.compare(a, b)
    assert not report.ok
    assert report.verdict == "2.0.weight: transposed"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["llama", "bert", "residual_convnet"])
def test_it_costs_at_most_a_forward_for_each_level_and_two(name, dtype):
    a, run = model_and_inputs(name)
    b = copy.deepcopy(a).to(dtype)
    with counted_calls() as calls, torch.no_grad():
        a(**run)
    one = calls["without others"]
    levels = max(path.count(".") + 1 for path, module in a.named_modules() if path)
    with counted_calls() as calls:
        assert hl.compare(a, b, run=run, run_b=cast(run, dtype)).ok
    assert calls["without others"] <= (levels + 2) * one


class Returns(nn.Module):
    """A linear layer, and a function of its output."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.function = nn.Linear(4, 8), function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.linear(x))


@pytest.mark.parametrize(
    ("of_a", "of_b", "verdict"),
    [
        (lambda y: y, lambda y: y[:, :4], "output is (2, 8) in a, (2, 4) in b"),
        (lambda y: y, lambda y: None, "output is float32 (2, 8) in a, None in b"),
        (lambda y: (y, y.sum()), lambda y: (y,), "output[1] is only in a"),
        (lambda y: "yes", lambda y: "no", "output is 'yes' in a, 'no' in b"),
        (lambda y: 3, lambda y: 4, "100 % of the integers in the outputs differ"),
        (
            lambda y: y.argmax(-1) * 4000,
            lambda y: y.argmax(-1) * 4000 + 1,
            "100 % of the integers in the outputs differ",
        ),
        (lambda y: y.sum().item(), lambda y: y.sum().item() + 0.1, "does something else"),
        (lambda y: {"p": y, "q": 2 * y}, lambda y: {"p": 2 * y, "q": y}, 'The outputs at ["p"] differ by'),
        (lambda y: y * torch.nan, lambda y: y * torch.nan, "returns nothing finite in both models"),
    ],
    ids=range(9),
)
def test_outputs_that_are_not_the_same_are_not_ok(of_a, of_b, verdict):
    report = hl.compare(Returns(of_a), Returns(of_b), run=(X,))
    assert not report.ok
    assert verdict in report.verdict
    with pytest.raises(hl.Diverged):
        report.check()


@pytest.mark.parametrize(
    "function",
    [
        lambda y: y.sum().item(),
        lambda y: {"p": y, "q": 2 * y},
        lambda y: (y, None, "text", 3),
        lambda y: y.argmax(-1),
        lambda y: y.masked_fill(y > 0, torch.nan),
    ],
    ids=range(5),
)
def test_outputs_of_every_kind_may_be_the_same(function):
    assert hl.compare(Returns(function), Returns(function), run=(X,)).ok


def test_what_is_not_compared_is_said():
    report = hl.compare(Returns(lambda y: (y, y.sum())), Returns(lambda y: y), run=(X,))
    assert report.ok
    assert "; output[1] is only in a" in report.verdict
    a = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    b = nn.Sequential(*copy.deepcopy(a), nn.Identity())
    assert "; 1 module has no counterpart: see report.matching" in hl.compare(a, b, run=(X,)).verdict


def test_a_module_with_weights_that_one_model_lacks_is_named():
    a = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    with torch.no_grad():
        a[1].weight.add_(torch.rand(4))
    b = nn.Sequential(copy.deepcopy(a[0]), copy.deepcopy(a[2]))
    report = hl.compare(a, b, run=(X,), match={"2": "1"})
    assert not report.ok
    assert "1 module has no counterpart, among them '1' of a, which holds weights" in str(report)


@pytest.mark.parametrize("large", [-1e9, 3e4])
def test_a_fault_beside_elements_that_dwarf_it_is_found(large):
    def with_large(y: Tensor) -> Tensor:
        return torch.cat([torch.full((len(y), 1), large), y], 1)

    a, b = Returns(with_large), Returns(lambda y: with_large(y + 1e-3 * y.cos()))
    assert hl.compare(a, Returns(with_large), run=(X,)).ok
    assert not hl.compare(a, b, run=(X,)).ok


def test_weights_are_named_if_a_model_fails():
    a, b = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), nn.Sequential(nn.Linear(4, 6), nn.Linear(8, 2))
    with pytest.raises(hl.HooklineError, match=says("failed with RuntimeError", "(8, 4)", "(6, 4)", 0)):
        hl.compare(a, b, run=(X,))
    with pytest.raises(TypeError):
        hl.compare(a, copy.deepcopy(a), run=("text",))


def test_random_numbers_are_the_same_in_both_and_stay_those_of_the_process():
    a = nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5), nn.Linear(64, 4)).train()
    b = copy.deepcopy(a)
    before = torch.get_rng_state()
    assert hl.compare(a, b, run=(X,)).ok
    assert hl.compare(a, copy.deepcopy(b).bfloat16(), run=(X,), run_b=(X.bfloat16(),)).ok
    with torch.no_grad():
        b[2].bias.add_(1e-3)
    assert hl.compare(a, b, run=(X,)).first.hint.startswith("bias: ")
    b[1].eval()
    assert "dropout is on in a" in hl.compare(a, b, run=(X,)).first.hint
    assert torch.equal(torch.get_rng_state(), before)
