"""A watch stops at the first bad value, forward or backward, says what made it, and leaves nothing behind."""

from __future__ import annotations

import contextvars
import pickle
import re
import threading

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils.checkpoint import checkpoint

import hookline as hl
from hookline._watch.watcher import Watcher
from tests.models import GPT, mlp, tokens

NAN, INF = float("nan"), float("inf")


class Root(nn.Module):
    """A module that makes NaN of what is negative, in its own forward, after a child that is fine."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)

    def forward(self, x):
        return torch.sqrt(self.first(x)) * 2


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.root = Root()
        self.b = nn.Linear(4, 2)

    def forward(self, x, between=False):
        x = self.a(x)
        return self.b(torch.log(x) if between else self.root(x))


class Gives(nn.Module):
    """Gives what it is told to."""

    def __init__(self, value):
        super().__init__()
        self.value = value

    def forward(self, x):
        return self.value


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def bad(model: nn.Module, *args, **options) -> hl.BadValue:
    with pytest.raises(hl.BadValue) as raised:
        with hl.watch(model, **options):
            model(*args)
    assert all("forward" not in vars(module) for module in model.modules())
    return raised.value


X = torch.linspace(-1, 1, 12).reshape(3, 4)


def test_a_forward_without_bad_values_passes_and_gives_the_same_bits():
    model, x = GPT(), tokens()
    expected = model(x)
    with hl.watch(model):
        found = model(x)
    assert found.equal(expected)
    found.sum().backward()


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
        r"'root/sqrt#0' made it, test_watcher.py:\d+  return torch.sqrt\(self.first\(x\)\) \* 2\n.*min -", str(error)
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


# What changes something, whether its block is the inner one, and what is said.
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
    told = "If it is meant, as in masked scores: hl.watch(..., inf=False) allows Inf, ignore='0' leaves this out."
    assert str(bad(model, X)).endswith(told)
    for options in ({"inf": False}, {"ignore": "0"}):
        with hl.watch(model, **options):
            model(X)
    model = nn.Sequential(Bursts())
    with pytest.raises(hl.BadValue, match=r"ignore='0/div' leaves this out\.$"), hl.watch(model, "**/div"):
        model(X)


def test_only_infinity_that_is_given_is_told_with_ways_to_allow_it():
    model = nn.Sequential(Gives(torch.tensor([NAN, -INF])), nn.Linear(4, 4))
    assert "inf=False" not in str(bad(model, X))
    assert "inf=False" not in str(bad(model[1:], X + INF))
    assert "inf=False" not in str(bad(model[1:], X * 1e9, limit=10.0))


def test_infinity_is_bad_unless_it_is_allowed_and_then_nan_still_is():
    model = nn.Sequential(Gives(torch.tensor([1.0, -INF])), nn.Identity())
    assert "gave Inf: 1 of 2" in str(bad(model, X))
    with hl.watch(model, inf=False):
        model(X)
    model[0].value = torch.tensor([NAN, -INF])
    assert "gave NaN: 1 of 2" in str(bad(model, X, inf=False))


def test_places_that_are_ignored_are_not_looked_at():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.mask, self.b = Gives(torch.tensor([-INF])), nn.Identity()

        def forward(self, x):
            return self.b(x.where(self.mask(x) == 0, 0.0))

    model = Masked()
    with hl.watch(model, ignore="mask"):
        model(X)
    with pytest.raises(hl.HooklineError, match="nothing is left to watch"):
        hl.watch(model, "mask", ignore="mask")
    with pytest.raises(hl.SiteError, match="matches nothing"):
        hl.watch(model, ignore="msk")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64])
def test_a_limit_holds_for_every_dtype(dtype):
    model = nn.Sequential(Gives(torch.tensor([1.0, 90.0, -101.0]).to(dtype)))
    with hl.watch(model, limit=102):
        model(X)
    error = bad(model, X, limit=100)
    assert "over the limit: 1 of" in str(error)
    assert "(-101)" in str(error)


def test_a_sum_that_overflows_where_no_element_does_is_fine():
    half = nn.Sequential(Gives(torch.full((1000,), 6e4, dtype=torch.float16)))
    single = nn.Sequential(Gives(torch.full((1000,), 3e38)))
    with hl.watch(half):
        half(X)
    with hl.watch(single):
        single(X)


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(3, dtype=torch.int64),
        torch.ones(3, dtype=torch.bool),
        torch.zeros(0),
        torch.zeros(3, device="meta"),
        torch.ones(3).to(torch.float8_e4m3fn),
        None,
        "text",
        torch.eye(3).to_sparse(),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        (torch.ones(2), {"a": [torch.ones(3), None]}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_any_kind_of_value_passes(value):
    model = nn.Sequential(Gives(value))
    with hl.watch(model):
        model(X)


@pytest.mark.parametrize(
    ("value", "site"),
    [
        ((torch.ones(2), {"a": [torch.tensor([NAN]), None]}), '0[1]["a"][0]'),
        (torch.tensor([[1.0, NAN]]).to_sparse(), "0"),
        (torch.tensor([NAN]).to(torch.float8_e4m3fn), "0"),
        (torch.nested.nested_tensor([torch.ones(2), torch.tensor([NAN])]), "0"),
        (torch.tensor(complex(1, NAN)), "0"),
    ],
    ids=["nested value", "sparse", "float8", "nested tensor", "complex"],
)
def test_a_bad_tensor_is_found_in_any_kind_of_value(value, site):
    assert str(bad(nn.Sequential(Gives(value)), X).site) == site


def test_the_call_is_counted_within_a_forward_and_the_step_by_the_optimizer():
    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.Linear(4, 4)

        def forward(self, x, times):
            for number in range(times):
                x = self.cell(x / (0 if number == 2 and times == 4 else 1)).tanh()
            return x

    model = Loop()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(hl.BadValue) as raised:
        with hl.watch(model) as watch:
            for times in (3, 3, 4):
                for _ in range(2):  # Gradients of two forwards for each step.
                    model(X, times).sum().backward()
                optimizer.step()
    assert watch.steps == 2
    assert (raised.value.step, raised.value.forward, raised.value.call) == (2, 4, 2)
    assert "forward, step 2 (forward 4), call #2" in str(raised.value)


def test_a_bad_gradient_names_the_place_and_the_one_before_it():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.b(torch.sqrt(self.a(x) * 0))

    model = Net()
    with pytest.raises(hl.BadValue) as raised:
        with hl.watch(model):
            model(X).sum().backward()
    error = raised.value
    assert (str(error.site), error.backward) == ("a:grad_output", True)
    assert "The gradient before it, 'b:grad_output', was fine" in str(error)
    assert "set_detect_anomaly" in str(error)
    with hl.watch(model, backward=False):
        model(X).sum().backward()


def test_a_bad_gradient_of_the_output_is_told_as_coming_from_outside():
    model = mlp()
    with pytest.raises(hl.BadValue, match="It came from outside the model"):
        with hl.watch(model):
            (model(X) * 0).sqrt().sum().backward()


def test_a_bad_gradient_of_a_parameter_alone_is_found_before_the_optimizer_takes_it():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model[0].weight.clone()
    with pytest.raises(hl.BadValue) as raised:
        with hl.watch(model, limit=1e30):
            (model(X * 1e20).sum() * 1e15).backward()
            optimizer.step()
    assert raised.value.backward
    assert "over the limit" in str(raised.value) or "Inf" in str(raised.value)
    assert model[0].weight.equal(before)


def test_only_the_parameter_is_bad():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))
            self.scale.register_hook(lambda gradient: gradient * NAN)

        def forward(self, x):
            return x * self.scale

    model = nn.Sequential(Scale())
    with pytest.raises(hl.BadValue, match="'0.scale:param' has a gradient with NaN: 4 of 4"):
        with hl.watch(model):
            model(X).sum().backward()


def test_a_scaler_may_overflow_while_it_can_lower_its_scale():
    model = nn.Linear(4, 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hl.watch(model, scaler=scaler) as watch:
        for _ in range(8):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(X * 100).float().sum()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    assert 0 < watch.steps < 8  # Those it left out are none.
    with pytest.raises(hl.BadValue, match="give it, hl.watch"):
        with hl.watch(model):
            (model(X * 100).sum() * 2.0**127).backward()


def test_a_limit_means_gradients_as_they_are_without_the_scale():
    model = nn.Linear(4, 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with hl.watch(model, limit=100, scaler=scaler):
        scaler.scale(model(X).sum()).backward()
    with pytest.raises(hl.BadValue, match="over the limit"):
        with hl.watch(model, limit=100):
            scaler.scale(model(X).sum()).backward()


def test_places_may_be_anything_that_names_one():
    model = net()
    assert str(bad(model, X, True).site) == 'b:inputs["input"]'
    with pytest.raises(hl.BadValue) as raised:
        with hl.watch(model, "root/sqrt", "root:grad_input"):
            model(X)
    assert str(raised.value.site) == "root/sqrt"
    assert list(raised.value.inputs) == ['root/sqrt:inputs["0"]']


def test_an_explicit_gradient_is_looked_at():
    class Root(nn.Module):
        def forward(self, x):
            return (x * 0).sqrt()

    model = nn.Sequential(nn.Linear(4, 4), Root(), nn.Linear(4, 4))
    for site in ("0:grad_output", "1:grad_input"):
        with pytest.raises(hl.BadValue, match=f"'{site}' got NaN"):
            with hl.watch(model, site):
                model(X).sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_modules_are_looked_at_once_and_their_gradients_too(reentrant):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU())

        def forward(self, x, factor=1.0):
            return checkpoint(self.b, self.a(x) * factor, use_reentrant=reentrant)

    model = Net()
    with hl.watch(model):
        model(X).sum().backward()
    with pytest.raises(hl.BadValue, match="'b.0:inputs"):
        with hl.watch(model):
            model(X, NAN)
    with pytest.raises(hl.BadValue) as raised:
        with hl.watch(model):
            (model(X).relu() * INF).sum().backward()
    assert raised.value.backward


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inference_is_watched_and_a_step_is_a_forward(mode):
    model = mlp().eval()
    with mode(), hl.watch(model) as watch:
        for _ in range(3):
            model(X)
    assert watch.steps == 3
    with mode(), pytest.raises(hl.BadValue, match="step 0"):
        with hl.watch(model):
            model(X * NAN)


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


def test_other_threads_are_not_watched_but_those_that_take_the_context():
    model, found = mlp(), []

    def run():
        try:
            model(X * NAN)
        except hl.BadValue as error:
            found.append(error)

    with hl.watch(model):
        context = contextvars.copy_context()
        for target in (run, lambda: context.run(run)):
            thread = threading.Thread(target=target)
            thread.start()
            thread.join()
            found.append(None)
    assert [error is None for error in found] == [True, False, True]


def test_everything_is_off_after_the_block_also_when_something_raised():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = hl.watch(model)
    with pytest.raises(ZeroDivisionError):
        with watch:
            loss = model(X).sum()
            raise ZeroDivisionError
    assert not hl.attached(model)
    assert not _global_optimizer_pre_hooks
    assert not _global_optimizer_post_hooks
    (loss * INF).backward()  # Its graph has our hooks, which are over.
    optimizer.step()
    assert watch.latest is None
    bad(mlp(), X * NAN)
    assert not _global_optimizer_post_hooks


def test_a_watch_can_be_entered_again():
    model = mlp()
    watch = hl.watch(model)
    for _ in range(2):
        with pytest.raises(hl.BadValue, match="step 0"):
            with watch:
                model(X * NAN)


def test_other_hooks_go_on_and_a_second_look_does_not_show_in_them():
    model = net()
    with pytest.raises(hl.BadValue):
        with hl.capture(model, "root.first", keep="all") as acts, hl.watch(model):
            model(X)
    assert len(acts.calls("root.first")) == 1


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
    assert "made here or came in: ReLU has overwritten what it was given" in str(error)
    assert "'/div#0' made it" in str(error)


def test_a_module_is_not_run_again_if_that_is_not_wanted():
    class Counts(nn.Module):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return x.log()

    model = nn.Sequential(Counts())
    assert str(bad(model, X, again=True).function) == "0/log#0"
    assert model[0].calls == 1  # What the second run leaves on a module is put back.
    assert bad(model, X, again=False).function is None
    assert model[0].calls == 2


def test_an_error_can_be_sent_to_another_process():
    error = pickle.loads(pickle.dumps(bad(net(), X)))
    assert str(error.site) == "root"
    assert error.stats["root"].nan > 0


def test_a_bad_value_inside_grad_is_found():
    model = mlp()
    with hl.watch(model):
        torch.func.grad(lambda x: model(x).sum())(X)
    with pytest.raises(hl.BadValue, match="':inputs' got NaN"), hl.watch(model):
        torch.func.grad(lambda x: model(x).sum())(X * NAN)


def test_values_inside_vmap_are_passed_over_and_that_is_said_once():
    model = mlp()
    said = "passes inside a torch.func transform: a watch keeps no statistics there, and inside vmap it does not notice"
    with pytest.warns(hl.HooklineWarning, match=said) as warned, hl.watch(model):
        torch.func.vmap(model)(X * NAN)
        torch.func.vmap(torch.func.grad(lambda x: model(x).sum()))(X * NAN)
    assert len(warned) == 1


def test_statistics_leave_out_what_passes_inside_a_transform():
    model = mlp().eval()
    with pytest.warns(hl.HooklineWarning, match="keeps no statistics there"), hl.watch(model, every=1) as watch:
        torch.func.vmap(model)(X)
        model(X)
    assert watch.log['["rms"]'] > 0


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"limit": 0}, "limit=0 is not a size"),
        ({"limit": NAN}, "is not a size"),
        ({"every": 0}, "every=0 is not a number of steps"),
        ({"every": 1.5}, "every=1.5 is not a number of steps"),
        ({"limit": "1e4"}, "limit='1e4' is not a size"),
        ({"scaler": True}, "scaler= takes a GradScaler, not True"),
        ({"optimizer": torch.optim.SGD}, "optimizer= takes optimizers of torch's, not .*SGD"),
        ({"to": print}, "every= says how often"),
        ({"every": 1, "to": 3}, "to=3 is not a place for statistics"),
    ],
)
def test_options_that_mean_nothing_are_refused(options, problem):
    with pytest.raises(hl.HooklineError, match=problem):
        with hl.watch(mlp(), **options):
            pass


class TestWaiting:
    """What is done on a device, tried on the CPU: values are noted, and read together after the pass."""

    @pytest.fixture(autouse=True)
    def device(self, monkeypatch):
        monkeypatch.setattr(Watcher, "waits", lambda watcher, tensor: not watcher.at_once)

    def test_a_bad_forward_is_seen_again_with_all_that_went_in(self):
        with torch.no_grad():
            error = bad(net(), X)
        assert (str(error.site), str(error.function)) == ("root", "root/sqrt#0")
        assert list(error.inputs) == ['root:inputs["x"]']

    def test_a_bad_forward_before_a_backward_is_seen_after_it_and_before_the_optimizer(self):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(hl.BadValue) as raised:
            with hl.watch(model):
                for parameter in model.parameters():
                    parameter.data.abs_()
                model(X.abs()).sum().backward()
                optimizer.step()
                loss = model(-X.abs() * 9).sum()
                with pytest.raises(hl.BadValue):
                    loss.backward()
                loss = model(-X.abs() * 9).sum()
                loss.backward()
        assert (str(raised.value.function), raised.value.step, raised.value.forward) == ("root/sqrt#0", 1, 2)
        assert all(parameter.isfinite().all() for parameter in model.parameters())

    def test_a_second_run_draws_the_same_random_numbers_and_leaves_buffers_alone(self):
        class Chance(nn.Module):
            def forward(self, x):
                return x / (torch.rand(()) > 0.5)

        model, outcomes = nn.Sequential(nn.BatchNorm1d(4), Chance()), set()
        for seed in range(6):
            torch.manual_seed(seed)
            is_fine = bool(torch.rand(()) > 0.5)
            torch.manual_seed(seed)
            with torch.no_grad():
                if is_fine:
                    with hl.watch(model):
                        model(X)
                else:
                    error = bad(model, X)
                    assert (str(error.site), len(error.inputs)) == ("1", 1)
            outcomes.add(is_fine)
            assert model[0].num_batches_tracked == seed + 1
        assert outcomes == {True, False}

    def test_a_forward_that_no_backward_comes_after_is_read_when_the_next_begins(self):
        model = net()
        with pytest.raises(hl.BadValue) as raised:
            with hl.watch(model):
                model(X)
                model(X.abs())
        assert str(raised.value.function) == "root/sqrt#0"
        assert raised.value.forward == 0

    def test_without_a_second_run_the_place_is_told_and_how_to_see_more(self):
        with torch.no_grad():
            error = bad(net(), X, again=False)
        assert str(error).startswith("'root' gave NaN: float32 (3, 4); forward, step 0, call #0")
        assert "at_once=True" in str(error)
        assert list(error.inputs) == []

    def test_a_bad_gradient_is_the_first_in_the_order_of_the_backward(self):
        model = mlp()
        with pytest.raises(hl.BadValue, match="'2:grad_output' got NaN: float32"):
            with hl.watch(model):
                (model(X) * 0).sqrt().sum().backward()

    def test_limits_and_allowed_infinities_hold(self):
        model = nn.Sequential(Gives(torch.tensor([1.0, -INF])), Gives(torch.tensor([50.0])))
        with torch.no_grad():
            with hl.watch(model, inf=False, limit=51):
                model(X)
            assert str(bad(model, X).site) == "0"
            assert str(bad(model, X, inf=False, limit=49).site) == "1"
            model = nn.Sequential(Gives(torch.tensor([50.0, -INF, INF])))
            assert str(bad(model, X, inf=False, limit=49).site) == "0"
            with hl.watch(model, inf=False, limit=51):
                model(X)

    def test_a_part_of_the_model_that_runs_alone_is_read_at_the_end(self):
        model = net()
        with pytest.raises(hl.BadValue, match="'root' gave NaN"):
            with hl.watch(model):
                model.root(X)

    def test_more_values_than_there_is_room_for_are_read_meanwhile(self, monkeypatch):
        from hookline._watch import bad_values

        monkeypatch.setattr(bad_values, "ROOM", 4)
        model = nn.Sequential(*(nn.Identity() for _ in range(5)), net())
        with torch.no_grad():
            assert str(bad(model, X).function) == "5.root/sqrt#0"
            model[5] = mlp()
            with hl.watch(model):
                model(X)

    def test_statistics_are_the_same(self):
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with hl.watch(model, every=1) as watch:
            model(X).sum().backward()
            optimizer.step()
        assert {'0["rms"]', '0["gradient"]', '0["update"]'} <= set(watch.log)


class TestCompiled:
    @pytest.fixture(autouse=True)
    def fresh(self):
        torch._dynamo.reset()
        yield
        torch._dynamo.reset()

    def test_a_compiled_model_stays_one_graph_and_is_seen_again_uncompiled(self):
        model = net()
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        graphs = torch._dynamo.utils.counters["stats"]
        graphs.clear()  # Other tests of this process have compiled, too.
        with torch.no_grad(), pytest.raises(hl.BadValue) as raised:
            with hl.watch(compiled.eval()) as watch:
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.abs_()
                for _ in range(3):
                    compiled(X.abs())
                before = graphs["unique_graphs"]
                compiled(-X.abs() * 9)
        assert (before, graphs["unique_graphs"]) == (1, 1)
        assert watch.steps == 3 == raised.value.step
        assert str(raised.value.function) == "root/sqrt#0"

    def test_a_compiled_training_step_is_seen_before_the_optimizer_takes_it(self):
        model = mlp()
        compiled = torch.compile(model, backend="aot_eager")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(hl.BadValue, match="step 1"):
            with hl.watch(compiled):
                for factor in (1, NAN):
                    compiled(X * factor).sum().backward()
                    optimizer.step()
        assert model[0].weight.isfinite().all()

    @pytest.mark.parametrize("make", [lambda x: (x, (None, x.log())), lambda x: {"a": [x, 1], "b": x.log()}])
    def test_any_kind_of_value_leaves_a_graph_whole(self, make):
        class Inner(nn.Module):
            def forward(self, given, *, more):
                return make(given["x"] + more[0])

        class Outer(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = Inner()

            def forward(self, given):
                return leaf_of(self.inner(given, more=(1.0, None)))

        def leaf_of(value):
            return value[0] if isinstance(value, tuple) else value["a"][0]

        compiled = torch.compile(Outer(), fullgraph=True, backend="aot_eager")
        with torch.no_grad():
            with hl.watch(compiled):
                compiled({"x": X.abs()})
            with pytest.raises(hl.BadValue, match="'inner"):
                with hl.watch(compiled):
                    compiled({"x": X.abs() - 9})

    def test_an_infinity_that_is_allowed_hides_nothing_over_the_limit(self):
        model = nn.Sequential(nn.Threshold(0, -INF))
        compiled = torch.compile(model, backend="aot_eager")
        with torch.no_grad():
            with hl.watch(compiled, inf=False, limit=100):
                compiled(X)
            with pytest.raises(hl.BadValue, match="over the limit"):
                with hl.watch(compiled, inf=False, limit=100):
                    compiled(X * 1000)

    @pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
    @pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
    def test_a_compiled_part_is_blamed_and_not_the_module_after_it(self, mode):
        class Log(nn.Module):
            def forward(self, x):
                return x.log()

        model = nn.Sequential(nn.Linear(4, 4), torch.compile(Log(), backend="aot_eager"), nn.Linear(4, 2))
        with mode(), pytest.raises(hl.BadValue, match="'1' gave NaN: in a compiled graph"):
            with hl.watch(model):
                model(X)

    def test_a_model_compiled_in_place_is_read_at_the_end_or_when_asked(self):
        model = net()
        model.compile(backend="aot_eager")
        with pytest.raises(hl.BadValue, match="'root' gave NaN: in a compiled graph"):
            with hl.watch(model) as watch:
                model(X)
                watch.check()

    def test_a_model_compiled_in_place_is_read_before_the_optimizer_steps(self):
        model = mlp()
        model.compile(backend="aot_eager")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = model[0].weight.clone()
        with pytest.raises(hl.BadValue, match="'0' gave .*: in a compiled graph"):
            with hl.watch(model, limit=100):
                (model(X * 1e3).sum() * 1e-6).backward()
                optimizer.step()
        assert model[0].weight.equal(before)


class Halved(nn.Module):
    """What it holds makes the Inf; what it does itself passes it on. A mask of -Inf on the way is not a mistake."""

    def __init__(self):
        super().__init__()
        self.inner = Bursts()

    def forward(self, x):
        masked = x.masked_fill(x > 1, -INF).softmax(-1)
        return self.inner(x) + masked


class Bursts(nn.Module):
    def forward(self, x):
        return x / (x - x)


def test_of_chosen_places_the_function_is_found_in_what_they_hold_and_no_mask_is_blamed():
    model = nn.Sequential(Halved(), Halved())
    with pytest.raises(hl.BadValue) as raised, hl.watch(model, "*"):
        model(torch.tensor([[1.0, 2.0], [3.0, 1.0]]))
    error = raised.value
    assert (str(error.site), str(error.function)) == ("0", "0.inner/div#0")


def test_a_place_that_is_named_and_never_called_is_warned_of():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.spare = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            return self.used(x)

    model = Two()
    with pytest.warns(hl.HooklineWarning, match="'spare' was not called in 1 forward of Two"), hl.watch(model, "spare"):
        model(torch.ones(1, 3))
    with hl.watch(model, "*"):
        model(torch.ones(1, 3))  # A pattern may mean more than what runs.
    with hl.watch(model, "spare"):
        pass  # Nothing ran at all.


def test_a_compiled_place_that_is_named_is_not_said_to_be_missing():
    model = mlp()
    compiled = torch.compile(model, backend="eager")
    with hl.watch(compiled, "0"):
        compiled(torch.ones(1, *model[0].weight.shape[1:]))


def test_the_log_of_a_watch_without_statistics_says_how_to_have_some():
    with hl.watch(mlp()) as watch:
        pass
    with pytest.raises(hl.HooklineError, match=r"this watch keeps no statistics: hl.watch\(model, every=100\)"):
        watch.log.plot()
    assert watch.logged == []
    assert "0 steps" in repr(watch)
