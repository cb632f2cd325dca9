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
from hookline._watch.watch import Watcher
from tests.support.models import GPT, mlp, tokens
from tests.support.watched import INF, NAN, Gives, X, bad, net


def test_a_forward_without_bad_values_passes_and_gives_the_same_bits():
    model, x = GPT(), tokens()
    expected = model(x)
    with hl.watch(model):
        found = model(x)
    assert found.equal(expected)
    found.sum().backward()


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
        monkeypatch.setattr(Watcher, "reads_later", lambda watcher, tensor: not watcher.at_once)

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


def test_the_log_of_a_watch_without_statistics_says_how_to_have_some():
    with hl.watch(mlp()) as watch:
        pass
    with pytest.raises(hl.HooklineError, match=r"this watch keeps no statistics: hl.watch\(model, every=100\)"):
        watch.log.plot()
    assert watch.logged == []
    assert "0 steps" in repr(watch)
