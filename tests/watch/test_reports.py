"""A watch's report of a bad value: the module, function or hook that produced it, or where it came from."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import hookline as hl
from tests.errors.wording import says
from tests.support.models import Gives, mlp, tokens
from tests.support.watch_models import INF, NAN, Bursts, X, bad, net


def test_what_a_module_makes_itself_is_blamed_on_it_and_on_the_function():
    error = bad(net(), X)
    assert isinstance(error, ArithmeticError)
    assert (str(error.site), str(error.function), error.step, error.call, error.backward) == (
        "root",
        "root/sqrt#0",
        0,
        0,
        False,
    )
    assert list(error.inputs) == ['root:inputs["x"]']
    assert error.stats["root"].nan > 0 == error.stats['root:inputs["x"]'].nan
    assert re.match(
        r"'root' gave NaN: \d of 12 elements \(.*%\), the first at \[\d, \d\]; forward, step 0, call #0\n", str(error)
    )
    assert "It was made here: nothing that went into Root is bad." in str(error)
    assert re.search(
        r"'root/sqrt#0' made it, watch_models.py:\d+  return torch.sqrt\(self.first\(x\)\) \* 2\n.*min -", str(error)
    )
    assert 'hl.sites(model, "root/*", run=(...))' in str(error)


def test_the_first_bad_element_is_where_it_is_said_to_be():
    value = torch.zeros(2, 3, 4)
    value[1, 2, 1] = value[1, 2, 3] = NAN
    value[1, 2, 2] = -INF
    error = bad(nn.Sequential(Gives(value)), X)
    assert "NaN and Inf: 3 of 24 elements (12.5%), the first at [1, 2, 1]" in str(error)


def test_what_is_made_between_modules_is_told_as_coming_in():
    error = bad(net(), X, True)
    assert str(error.site) == 'b:inputs["input"]'
    assert str(error.function) == "/log#0"
    assert "made between modules, in the forward of Net itself" in str(error)


def burst(value):
    return value / 0


# The hook, True if its block is inside the watch, and the expected text.
BY_HOOKS = [
    (lambda m: hl.edit(m, "a", burst), True, "in the forward of Net itself or by a hook (edit at 'a')."),
    (lambda m: hl.edit(m, "a", burst), False, "made here or by a hook (edit at 'a'): nothing that went into Linear"),
    (lambda m: hl.patch(m, {"a[0]": NAN}), False, "made here or by a hook (patch at 'a[0]'): nothing that went into"),
    (lambda m: hl.patch(m, {"b:input": NAN}), False, "of Net itself or by a hook (patch at 'b:input')."),
    (lambda m: hl.patch(m, {"a.weight:param": NAN}), False, "made here or by a hook (patch at 'a.weight:param'):"),
    (lambda m: hl.patch(m, {":input": NAN}), False, "the arguments of Net or by a hook (patch at ':input')."),
    (lambda m: hl.edit(m, "*", lambda v: v * INF), True, "or by hooks (edit at 'a', edit at 'root')."),
]


@pytest.mark.parametrize(("change", "is_inner", "told"), BY_HOOKS, ids=[told for _, _, told in BY_HOOKS])
def test_a_hook_that_changes_something_where_a_bad_value_was_made_is_named(change, is_inner, told):
    model = net()
    model.root = nn.Identity()
    blocks = [change(model), hl.watch(model, "a", "b", "")]
    with pytest.raises(hl.BadValue) as raised, blocks[is_inner], blocks[not is_inner]:
        model(X)
    assert told in str(raised.value)


@pytest.mark.parametrize(
    ("between", "told"),
    [(False, "It was made here: nothing that went into Root is bad."), (True, "in the forward of Net itself.")],
)
def test_a_hook_is_not_named_where_a_function_of_the_model_made_the_bad_value(between, told):
    model = net()
    with pytest.raises(hl.BadValue) as raised, hl.edit(model, "**", torch.clone), hl.watch(model):
        model(X, between)
    assert told in str(raised.value)


def test_a_hook_of_another_place_is_not_named():
    model = nn.Sequential(nn.Linear(4, 4), Gives(torch.tensor([NAN])))
    with pytest.raises(hl.BadValue) as raised, hl.edit(model, "0", torch.clone), hl.watch(model, again=False):
        model(X)
    assert "It was made here: nothing" in str(raised.value)


def test_a_bad_input_of_the_model_is_told_as_such():
    error = bad(net(), X * NAN)
    assert str(error.site) == ':inputs["x"]'
    assert "It came in with the arguments of Net: look at the data." in str(error)


def test_a_mask_of_minus_infinity_is_a_fine_input_and_plus_infinity_is_not():
    model = nn.TransformerEncoderLayer(8, 2, batch_first=True)
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    with hl.watch(model):
        model(tokens(), src_mask=mask)
    assert 'src_mask"' in str(bad(model, tokens(), -mask).site)


def test_a_weight_that_is_bad_already_is_named():
    model = mlp()
    model[2].weight.data[0, 0] = NAN
    error = bad(model, X)
    assert str(error.site) == "2"
    assert "'weight' of Linear is bad already" in str(error)
    assert error.stats["2.weight:param"].nan > 0


def test_a_name_does_nothing_to_the_terminal():
    model = nn.Sequential()
    model.add_module("x\x1b[31m", Gives(torch.tensor([NAN])))
    assert str(bad(model, X)).startswith("'x\\x1b\\[31m' gave NaN")


def test_the_innermost_module_is_blamed_and_what_returns_the_same_tensor_is_not_looked_at_twice():
    model = nn.Sequential(nn.Sequential(nn.Identity(), nn.Sequential(Gives(torch.tensor([1.0, NAN])))))
    assert str(bad(model, X).site) == "0.1.0"


def test_masked_scores_are_told_with_both_ways_to_allow_them():
    model = nn.Sequential(Gives(torch.tensor([1.0, -INF])), nn.Softmax(-1))
    told = "If it is intended, as in masked scores: hl.watch(..., inf=False) allows Inf, ignore='0' leaves this out."
    assert str(bad(model, X)).endswith(told)
    for options in ({"inf": False}, {"ignore": "0"}):
        with hl.watch(model, **options):
            model(X)
    model = nn.Sequential(Bursts())
    with pytest.raises(hl.BadValue, match=says("leaves this out", "0/div")), hl.watch(model, "**/div"):
        model(X)


def test_only_infinity_that_is_given_is_told_with_ways_to_allow_it():
    model = nn.Sequential(Gives(torch.tensor([NAN, -INF])), nn.Linear(4, 4))
    assert "inf=False" not in str(bad(model, X))
    assert "inf=False" not in str(bad(model[1:], X + INF))
    assert "inf=False" not in str(bad(model[1:], X * 1e9, limit=10.0))


def test_an_in_place_activation_is_said_to_have_overwritten_its_input():
    class Poison(nn.Module):
        def forward(self, x):
            return x.mul_(INF).mul_(0)

    error = bad(nn.Sequential(nn.Linear(4, 4), Poison()), X)
    assert str(error.site) == "1"
    assert "overwritten by the output" in str(error)
    assert "It was made here" in str(error)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("write", [lambda x: x.data.fill_(NAN), lambda x: x.detach().numpy().fill(NAN)])
@pytest.mark.parametrize("wraps", [lambda x: x, lambda x: {"x": x}])
def test_what_is_written_where_no_version_tells_is_found_at_the_module_that_returns_its_input(write, wraps, grad):
    class Writes(nn.Module):
        def forward(self, x):
            write(x)
            return wraps(x)

    for model in (nn.Sequential(nn.Linear(4, 4), Writes()), nn.Sequential(Writes(), nn.Identity())):
        with torch.set_grad_enabled(grad):
            error = bad(model, X.clone())
        assert error.site.path == str([type(part) for part in model].index(Writes))


def test_what_is_written_after_the_last_module_is_found_at_the_output_of_the_model():
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.inside = nn.Sequential(nn.Linear(4, 4), nn.Identity())

        def forward(self, x):
            x = self.inside(x)
            x.data[0] = NAN
            return x

    assert str(bad(Writes(), X).site) == ""
    hooked = nn.Sequential(nn.Linear(4, 4))
    hooked[0].register_forward_hook(lambda _module, _args, output: output.data.fill_(NAN))
    assert str(bad(hooked, X).site) == ""


def test_an_edit_that_makes_it_is_found():
    model = mlp()
    with pytest.raises(hl.BadValue, match="'1' gave NaN|'1:inputs|'0' gave NaN"):
        with hl.edit(model, "0", lambda value: value * NAN), hl.watch(model):
            model(X)


class Divides(nn.Module):
    def __init__(self, passes):
        super().__init__()
        self.a, self.passes, self.c = nn.Linear(4, 4), passes, nn.Linear(4, 4)

    def forward(self, x):
        return self.c(self.passes(self.a(x) / 0))


class Pair(nn.Module):
    def forward(self, x):
        return (x, x * 2)[0]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("passes", [nn.Identity(), nn.Flatten(), nn.Dropout().eval(), Pair()], ids=repr)
def test_what_a_module_only_passes_on_is_told_as_coming_in(mode, passes):
    with mode():
        error = bad(Divides(passes), X)
    assert (str(error.site), str(error.function)) == (
        f'passes:inputs["{"x" if isinstance(passes, Pair) else "input"}"]',
        "/div#0",
    )
    assert "made between modules" in str(error)
    assert "overwritten" not in str(error)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_a_module_has_overwritten_may_have_been_bad_already(mode):
    with mode():
        error = bad(Divides(nn.ReLU(inplace=True)), X.abs() + 9)
    assert "made here or came in: ReLU has overwritten its arguments" in str(error)
    assert "'/div#0' made it" in str(error)
