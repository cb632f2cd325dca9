"""A watch stops at the first bad value, forward or backward, says what made it, and leaves nothing behind."""

from __future__ import annotations

import contextvars
import pickle
import threading

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils.checkpoint import checkpoint

import hookline as hl
from tests.errors.wording import says
from tests.support.models import GPT, Gives, mlp, tokens
from tests.support.watch_models import INF, NAN, X, bad, net


def test_a_forward_without_bad_values_passes_and_gives_the_same_bits():
    model, x = GPT(), tokens()
    expected = model(x)
    with hl.watch(model):
        found = model(x)
    assert found.equal(expected)
    found.sum().backward()


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
    with pytest.raises(hl.HooklineError, match=says("nothing is left to watch")):
        hl.watch(model, "mask", ignore="mask")
    with pytest.raises(hl.SiteError, match="matches nothing"):
        hl.watch(model, ignore="msk")


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
                for _ in range(2):  # Two forwards and backwards for each step.
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
    with pytest.raises(hl.BadValue, match=says("It came from outside the")):
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
    with pytest.raises(hl.BadValue, match=says("has a gradient with NaN of", "0.scale:param", 4, 4)):
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
    assert 0 < watch.steps < 8  # Steps that the scaler skipped do not count.
    with pytest.raises(hl.BadValue, match=says("A GradScaler causes this")):
        with hl.watch(model):
            (model(X * 100).sum() * 2.0**127).backward()


def test_a_limit_means_gradients_as_they_are_without_the_scale():
    model = nn.Linear(4, 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with hl.watch(model, limit=100, scaler=scaler):
        scaler.scale(model(X).sum()).backward()
    with pytest.raises(hl.BadValue, match=says("over the limit")):
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


@pytest.mark.parametrize("where", ["0#-1", "/linear#-1", "#-1/linear"])
def test_the_latest_call_can_not_be_watched(where):
    with pytest.raises(hl.SiteError, match=says("a watch looks at each", where)):
        hl.watch(nn.Sequential(nn.Linear(2, 2)), where)


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
    (loss * INF).backward()  # The graph still has the watch's hooks, which no longer act.
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
    said = says("passes inside a torch")
    with pytest.warns(hl.HooklineWarning, match=said) as warned, hl.watch(model):
        torch.func.vmap(model)(X * NAN)
        torch.func.vmap(torch.func.grad(lambda x: model(x).sum()))(X * NAN)
    assert len(warned) == 1


def test_statistics_leave_out_what_passes_inside_a_transform():
    model = mlp().eval()
    with pytest.warns(hl.HooklineWarning, match=says("passes inside a torch")), hl.watch(model, every=1) as watch:
        torch.func.vmap(model)(X)
        model(X)
    assert watch.log['["rms"]'] > 0


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"limit": 0}, says("is not a size", 0)),
        ({"limit": NAN}, says("is not a size")),
        ({"every": 0}, says("is not a number of steps", 0)),
        ({"every": 1.5}, says("is not a number of steps", "1.5")),
        ({"limit": "1e4"}, says("is not a size", "1e4")),
        ({"scaler": True}, says("scaler= takes a GradScaler")),
        ({"optimizer": torch.optim.SGD}, says("optimizer= takes torch optimizers")),
        ({"to": print}, says("every= says how often")),
        ({"every": 1, "to": 3}, says("is not a place for", 3)),
    ],
)
def test_options_that_mean_nothing_are_refused(options, problem):
    with pytest.raises(hl.HooklineError, match=problem):
        with hl.watch(mlp(), **options):
            pass


def test_a_place_that_is_named_and_never_called_is_warned_of():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.spare = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            return self.used(x)

    model = Two()
    with (
        pytest.warns(hl.HooklineWarning, match=says("was not called in forward", "spare", 1)),
        hl.watch(model, "spare"),
    ):
        model(torch.ones(1, 3))
    with hl.watch(model, "*"):
        model(torch.ones(1, 3))  # A pattern may match modules that do not run: no warning.
    with hl.watch(model, "spare"):
        pass  # Nothing ran: no warning.


def test_the_log_of_a_watch_without_statistics_says_how_to_have_some():
    with hl.watch(mlp()) as watch:
        pass
    with pytest.raises(hl.HooklineError, match=says("this watch keeps no statistics")):
        watch.log.plot()
    assert watch.logged == []
    assert "0 steps" in repr(watch)
