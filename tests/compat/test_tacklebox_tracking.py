"""tacklebox: its helpers, contexts and settings, and the tracker that runs a model over a loader."""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import sys
import weakref

import pytest
import torch
from torch import Tensor, nn

import hookline as hl
from hookline.compat.tacklebox.helpers import (
    CustomContext,
    Protocol,
    data_pass,
    find_network_modules_by_name,
    flatten_activations,
    get_named_modules_from_network,
    set_torchvision_network_module,
)
from hookline.compat.tacklebox.hook_management import HookManager
from hookline.compat.tacklebox.hooks.model_tracking import (
    ALL_VARS,
    BACKWARD_VARS,
    DEFAULT_TRACKING_PROTOCOL,
    FORWARD_VARS,
    GRAPH_VARS,
    ModuleTracker,
    TrackingProtocol,
    validate_vars,
)
from tests.errors.wording import says

INVALID = "Invalid var, zz, passed to tracker. Use a valid var key: inp, out, inp_grad, out_grad"

pytestmark = pytest.mark.filterwarnings("ignore:a HookManager is dropped:hookline.HooklineWarning")


@pytest.fixture
def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.ReLU(inplace=True), nn.Linear(3, 2))


@pytest.fixture
def loader() -> list[tuple[int, Tensor, Tensor]]:
    return [(i, torch.randn(4, 2), torch.tensor([0, 1, 1, 0])) for i in range(3)]


def sizes(tracker: ModuleTracker) -> dict[str, list[int]]:
    return {name: [len(values) for values in kept.values()] for name, kept in tracker.data_buffer.items()}


# Helpers


def test_modules_are_found_by_name_in_the_order_of_the_network(net):
    assert find_network_modules_by_name(net, ["2", "0", "2"]) == [net[0], net[2]]
    assert find_network_modules_by_name(net, "2") == [net[2]]
    with pytest.raises(AssertionError, match="Could not find the following modules in the passed network: zz, yy"):
        find_network_modules_by_name(net, ["0", "zz", "yy"])
    with pytest.raises(AssertionError, match=says("Could not find the following")):
        find_network_modules_by_name(net, [])


def test_modules_with_weights_are_named_without_batch_norm():
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Sequential(nn.ReLU(), nn.BatchNorm1d(2)))
    assert list(get_named_modules_from_network(net)) == ["0", "2.1"]
    assert list(get_named_modules_from_network(net, include_bn=True)) == ["0", "1", "2.1"]


def test_a_module_is_replaced_by_its_path():
    net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU()))
    new = nn.Tanh()
    assert set_torchvision_network_module(net, "1.0", new) is net
    assert net[1][0] is new
    with pytest.raises(AttributeError, match="zz"):
        set_torchvision_network_module(net, "zz.0", new)
    with pytest.raises(IndexError, match=says("is out of range", 9)):
        set_torchvision_network_module(net, "1.9", new)
    with pytest.warns(hl.HooklineWarning, match=says("matches nothing in", "laier")) as said:
        set_torchvision_network_module(net, "laier", new)
    assert said[0].filename == __file__


def test_a_module_is_put_where_none_was():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.downsample = None

        def forward(self, x):
            return x if self.downsample is None else self.downsample(x)

    block = set_torchvision_network_module(Block(), "downsample", nn.ReLU())  # The forward reads it: no warning.
    assert block(torch.tensor([-1.0])).item() == 0


def test_activations_are_flattened_by_channel():
    four = torch.arange(24.0).reshape(2, 3, 2, 2)
    assert flatten_activations(four).tolist()[0] == [0, 1, 2, 3, 12, 13, 14, 15]
    assert flatten_activations(torch.ones(2, 3)).shape == (3, 2)
    with pytest.raises(TypeError, match="Output type unknown for Tensor: \ntensor"):
        flatten_activations(torch.ones(2, 3, 4))


def test_a_pass_over_a_loader_makes_no_graph_and_keeps_gradients(net, loader):
    net(loader[0][1]).sum().backward()
    gradient = net[0].weight.grad.clone()
    seen = []
    handle = net.register_forward_hook(lambda module, inputs, output: seen.append(output.requires_grad))
    data_pass(loader, net)
    data_pass([batch[1:] for batch in loader], net, device="cpu", early_stop=2)  # Pairs are accepted too.
    handle.remove()
    assert seen == [False] * 5
    assert net[0].weight.grad.equal(gradient)


def test_a_pass_over_a_loader_goes_backward_from_a_loss(net, loader):
    log = []

    def loss(output, y):
        log.append("loss")
        return nn.functional.cross_entropy(output, y)

    data_pass(
        loader,
        net,
        backward_fn=loss,
        early_stop=2,
        pre_backward_hooks=[lambda: log.append("before")],
        pre_zero_grad_hooks=[lambda: log.append(net[0].weight.grad is not None)],
    )
    assert log == ["before", "loss", True] * 2
    assert net[0].weight.grad is None
    log.clear()
    hooks = {"pre_backward_hooks": [lambda: log.append("before")], "pre_zero_grad_hooks": [lambda: log.append("zero")]}
    data_pass(loader, net, **hooks)
    assert log == ["before"] * 3  # Without a loss, gradients are not set to zero.


STOPS = pytest.mark.parametrize(("early_stop", "expected"), [(1, 1), (2, 2), (9, 3), (0, 3), (None, 3)])


@STOPS
def test_a_pass_over_a_loader_takes_no_more_batches_than_it_needs(net, loader, early_stop, expected):
    taken = []
    data_pass((taken.append(1) or batch for batch in loader), net, early_stop=early_stop)
    assert len(taken) == expected


@STOPS
def test_a_bar_shows_how_many_batches_are_done(net, loader, early_stop, expected, capsys):
    pytest.importorskip("tqdm")
    data_pass(loader, net, early_stop=early_stop)
    assert f"{expected}/3" in capsys.readouterr().err.split("\r")[-1]


def test_a_pass_over_a_loader_shows_nothing_without_tqdm(net, loader, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    seen = []
    handle = net.register_forward_hook(lambda *_: seen.append(1))
    data_pass(loader, net)
    handle.remove()
    assert len(seen) == 3
    assert capsys.readouterr().err == ""


# CustomContext


class Noted:
    def __init__(self, log, name):
        self.log, self.name = log, name

    def __enter__(self):
        self.log.append(f"enter {self.name}")

    def __exit__(self, *error):
        self.log.append(f"exit {self.name}")


def test_a_context_calls_its_functions_around_the_block_and_nothing_when_made():
    log = []
    context = CustomContext([lambda: log.append("in")], [lambda: log.append("out"), lambda: log.append("out 2")])
    assert log == []
    with context:
        log.append("body")
        with context:
            pass
    assert log == ["in", "body", "in", "out", "out 2", "out", "out 2"]


def test_contexts_are_left_in_reverse_order():
    log = []
    one = CustomContext([lambda: log.append("in")], [lambda: log.append("out")])
    with one + Noted(log, "a") + Noted(log, "b"):
        log.append("body")
    assert log == ["in", "enter a", "enter b", "body", "exit b", "exit a", "out"]
    log.clear()
    assert one.merge_context(Noted(log, "a")) is not one
    assert one.merge_context(Noted(log, "b"), inplace=True) is one
    with Noted(log, "c") + one:
        pass
    assert log == ["enter c", "in", "enter b", "exit b", "out", "exit c"]


def test_exit_functions_may_get_the_exception_and_all_of_them_run():
    log = []

    def fails(*error):
        raise LookupError

    context = CustomContext([], [fails, lambda *error: log.append(error[0])], handle_exc_vars=True)
    with pytest.raises(LookupError), context:
        raise ValueError
    assert log == [LookupError]


def test_an_exit_function_can_be_wrapped_by_hand():
    log = []
    leave = CustomContext.wrap_exit_fn(lambda: log.append("out") or 3)
    assert (leave(), leave(None, None, None)) == (3, 3)
    with contextlib.suppress(LookupError), CustomContext([], [lambda: True]):  # Returning True hides no exception.
        log.append("in")
        raise LookupError
    assert log == ["out", "out", "in"]
    with pytest.raises(LookupError), CustomContext([], [lambda *error: True], handle_exc_vars=True):
        raise LookupError


# Settings


class Settings(Protocol):
    DEFAULT_PROTOCOL = {"a": 1, "b": 2}  # noqa: RUF012


def test_settings_are_read_and_set_as_keys_and_as_attributes():
    settings = Settings(b=3)  # The original ignores b.
    assert dict(**settings) == dict(settings.items()) == {"a": 1, "b": 3}
    assert (list(settings), list(settings.keys()), list(settings.values())) == (["a", "b"], ["a", "b"], [1, 3])
    settings.a = 9
    settings["b"] = 8
    settings.other = 7
    assert (settings["a"], settings.b, settings.other, list(settings)) == (9, 8, 7, ["a", "b"])
    settings.overwrite_protocol(a=4)
    assert settings.a == 4
    with pytest.raises(AssertionError, match=says("cannot overwrite protocol", "zz", "zz")):
        settings.overwrite_protocol(zz=4)
    with pytest.raises(KeyError):
        settings["zz"]
    with pytest.raises(AttributeError, match="Settings has no setting 'zz'"):
        settings.zz
    with pytest.raises(TypeError, match=says("cannot create object of abstract", "Protocol")):
        Protocol()
    assert Settings.DEFAULT_PROTOCOL == {"a": 1, "b": 2}


def test_a_tracking_protocol_says_what_is_kept(tmp_path):
    assert ALL_VARS == GRAPH_VARS == FORWARD_VARS + BACKWARD_VARS == ["inp", "out", "inp_grad", "out_grad"]
    everything = dict(TrackingProtocol().items())
    assert everything == {**DEFAULT_TRACKING_PROTOCOL, "track_forward": True, "track_backward": True}
    some = TrackingProtocol("inp", "out", record_every=3, buffer_len=4, buffer_len_out=9)
    assert [some[f"track_{var}"] for var in ALL_VARS] == [True, True, False, False]
    assert [some[f"record_every_{var}"] for var in ALL_VARS] == [3] * 4
    assert [some[f"buffer_len_{var}"] for var in ALL_VARS] == [4, 9, 4, 4]
    assert (some.track_forward, some.track_backward) == (True, False)
    assert dict(TrackingProtocol(record_every=0, buffer_len=0).items()) == everything  # 0 means the default.
    with pytest.raises(AssertionError, match=INVALID):
        TrackingProtocol("zz")
    with pytest.raises(AssertionError, match=says("cannot overwrite protocol", "zz")):
        TrackingProtocol(zz=3)
    path = tmp_path / "protocol.json"
    path.write_text(json.dumps({"track_inp": False, "buffer_len_out": 7}))
    arguments = argparse.Namespace(buffer_len_inp=5, other=4)
    read = TrackingProtocol("inp", "out", protocol_json=str(path), namespace=arguments)
    assert (read.track_inp, read.track_out, read.buffer_len_inp, read.buffer_len_out) == (False, True, 5, 7)
    path.write_text(json.dumps({"trak_inp": False}))
    with pytest.warns(hl.HooklineWarning, match=says("has settings that are not")):
        TrackingProtocol(protocol_json=str(path))


def test_variables_are_validated():
    assert validate_vars()(lambda var: var)("inp") == "inp"
    assert validate_vars(keyword="var")(lambda var: var)(var="out") == "out"  # The original checked every letter.
    for call in (
        lambda: validate_vars()(print)("zz"),
        lambda: validate_vars(var_idx=1)(print)("a", "zz"),
        lambda: validate_vars(multiple=True)(print)("inp", "zz"),
        lambda: validate_vars(keyword="vars_")(print)("a", vars_=["zz"]),
    ):
        with pytest.raises(AssertionError, match=INVALID):
            call()
    with pytest.raises(AssertionError, match="Use a valid var key: a, b"):
        validate_vars(valid_vars=["a", "b"])(print)("inp")


# ModuleTracker


def test_a_tracker_keeps_the_variables_of_its_modules(net, capsys):
    tracker = ModuleTracker(a=net[0], b=net[2])
    x = torch.randn(4, 2, requires_grad=True)
    first = net[0](x)
    assert sizes(tracker) == {"a": [0] * 4, "b": [0] * 4}
    with tracker.track():
        output = net(x)
        output.sum().backward()
        kept = tracker.gather()
        assert list(kept) == tracker.module_names == ["a", "b"]
        assert list(kept["a"]) == ALL_VARS
        assert kept["a"]["inp"].equal(x)
        assert kept["a"]["out"].equal(first)  # The value before the in-place ReLU.
        assert kept["a"]["inp_grad"].equal(x.grad)
        assert kept["b"]["out"].equal(output)
        assert kept["b"]["out_grad"].equal(torch.ones(4, 2))
        assert not any(value.requires_grad for values in kept.values() for value in values.values())
        assert tracker.gather_module("a")["out"].equal(kept["a"]["out"])
        assert tracker.gather_var("out")["b"].equal(kept["b"]["out"])
        assert tracker.gather_module_var("b", "out").equal(kept["b"]["out"])
        assert tracker.gather_module_var(module_name="b", var="out").equal(kept["b"]["out"])
    assert sizes(tracker) == {"a": [0] * 4, "b": [0] * 4}
    assert not capsys.readouterr().out


def test_reading_what_a_tracker_has_not_kept(net):
    tracker = ModuleTracker(a=net[0], protocol=TrackingProtocol("inp"))
    assert tracker.gather()["a"]["inp"].numel() == 0
    with pytest.raises(ValueError, match=says("no values of", "inp", "a")):
        tracker.gather_module_var("a", "inp")
    with pytest.raises(ValueError, match=says("no values of")):
        tracker.gather_var("inp")
    for call in (
        lambda: tracker.gather_module_var("zz", "inp"),
        lambda: tracker.gather_module_var("a", "out"),
        lambda: tracker.gather_module("zz"),
        lambda: tracker.gather_var("zz"),
        lambda: tracker.clear_data_buffer_module("zz"),
    ):
        with pytest.raises((KeyError, AssertionError)):
            call()
    for call in (lambda: tracker.gather_module_var("a", "zz"), lambda: tracker.gather_module_var("a", var="zz")):
        with pytest.raises(AssertionError, match=INVALID):
            call()
    with pytest.raises(AssertionError, match=INVALID):
        tracker.clear_data_buffer_all(["zz"])


def test_making_a_tracking_context_keeps_what_there_is(net):
    tracker = ModuleTracker(a=net[0], protocol=TrackingProtocol("inp", "out", buffer_len=5))
    with tracker.track(clear_on_exit=False):
        net(torch.randn(4, 2))
    context = tracker.track()
    assert sizes(tracker) == {"a": [1, 1]}
    with context:
        net(torch.randn(4, 2))
        assert sizes(tracker) == {"a": [1, 1]}
    assert sizes(tracker) == {"a": [0, 0]}


def test_a_buffer_drops_the_earliest_with_a_warning(net):
    tracker = ModuleTracker(a=net[0], protocol=TrackingProtocol("inp", buffer_len=2))
    given = [torch.full((1, 2), float(i)) for i in range(3)]
    with tracker.track(clear_on_exit=False):
        with pytest.warns(
            UserWarning,
            match=says("Cached inp data for module", 2),
        ) as said:
            for x in given:
                net(x)
    assert len(said) == 1
    assert said[0].filename == __file__
    assert tracker.gather_module_var("a", "inp").equal(torch.cat(given[1:]))


def test_every_nth_pass_is_kept(net):
    protocol = TrackingProtocol(buffer_len=10, record_every_inp=2, record_every_out_grad=3)
    tracker = ModuleTracker(a=net[0], b=net[2], protocol=protocol)
    for _ in range(2):
        with tracker.track(clear_on_exit=False):
            for i in range(5):
                net(torch.full((1, 2), float(i), requires_grad=True)).sum().backward()
            assert tracker.pass_count == 5
        assert tracker.pass_count == 0
        assert tracker.data_buffer["a"]["inp"][-1][0, 0] == 4
    assert sizes(tracker) == {"a": [6, 10, 10, 4], "b": [6, 10, 10, 4]}


def test_a_module_that_runs_several_times_is_kept_each_time(net):
    tracker = ModuleTracker(a=net[0], b=net[2], protocol=TrackingProtocol("inp", buffer_len=9))
    with tracker.track(clear_on_exit=False), torch.no_grad():
        net[0](net[0](torch.ones(1, 2))[:, :2])  # The original raised here.
        assert (tracker.pass_count, tracker.modules_passed) == (0, {"a": True, "b": False})
    assert sizes(tracker) == {"a": [2], "b": [0]}


def test_buffers_are_cleared_by_module_and_variable(net):
    tracker = ModuleTracker(a=net[0], b=net[2])
    with tracker.track(clear_on_exit=False):
        net(torch.ones(1, 2, requires_grad=True)).sum().backward()
    tracker.clear_data_buffer_module("a", vars_=["inp"])
    assert sizes(tracker) == {"a": [0, 1, 1, 1], "b": [1, 1, 1, 1]}
    tracker.clear_data_buffer_all(["out"])
    assert sizes(tracker) == {"a": [0, 0, 1, 1], "b": [1, 0, 1, 1]}
    tracker.clear_data_buffer_all("inp")
    assert sizes(tracker) == {"a": [0, 0, 1, 1], "b": [0, 0, 1, 1]}
    tracker.clear_data_buffer_module("b")
    assert sizes(tracker) == {"a": [0, 0, 1, 1], "b": [0] * 4}
    tracker = ModuleTracker(a=net[0], protocol=TrackingProtocol("out"))
    tracker.clear_data_buffer_all(vars_=["inp"])  # "inp" is not tracked: nothing to clear.
    tracker.clear_data_buffer_module("a", vars_="inp_grad")


def test_the_variables_of_a_loader_are_collected_and_gathered(net, loader):
    protocol = TrackingProtocol("inp", "out", buffer_len=10)
    tracker = ModuleTracker(a=net[0], b=net[2], network=net, protocol=protocol)
    assert tracker.collect_vars(loader) is None
    assert sizes(tracker) == {"a": [3, 3], "b": [3, 3]}
    gathered = tracker.aggregate_vars(loader, device="cpu")
    assert gathered["a"]["inp"].equal(torch.cat([x for _, x, _ in loader] * 2))
    assert sizes(tracker) == {"a": [0, 0], "b": [0, 0]}
    tracker.aggregate_vars(loader, net, clear=False)
    assert sizes(tracker) == {"a": [3, 3], "b": [3, 3]}
    assert not any(handle.active for handle in tracker.hook_manager.name_to_hookhandle.values())
    with pytest.raises(AssertionError, match=says("network must be passed to")):
        ModuleTracker(net[0]).collect_vars(loader)


def test_gradients_over_a_loader_are_those_of_the_cross_entropy(net, loader):
    tracker = ModuleTracker(b=net[2], network=net, protocol=TrackingProtocol("out_grad", buffer_len=5))
    gathered = tracker.aggregate_vars(loader)["b"]["out_grad"]
    expected = []
    for _, x, y in loader:
        output = net(x)
        expected += torch.autograd.grad(nn.functional.cross_entropy(output, y), output)
    assert gathered.equal(torch.cat(expected))
    assert net[0].weight.grad is None


def test_trackers_may_share_a_manager_and_a_module(net):
    manager = HookManager()
    first = ModuleTracker(a=net[0], hook_manager=manager)
    second = ModuleTracker(net[2], b=net[0], hook_manager=manager)
    third = ModuleTracker(a=net[0])
    assert list(manager.name_to_hookfn) == [
        "ModuleTracker.forward_hook",
        "ModuleTracker.backward_hook",
        "ModuleTracker.forward_hook_1",
        "ModuleTracker.backward_hook_1",
    ]
    with first.track(clear_on_exit=False), second.track(clear_on_exit=False), third.track(clear_on_exit=False):
        net(torch.ones(1, 2, requires_grad=True)).sum().backward()
    assert sizes(first) == sizes(third) == {"a": [1] * 4}
    assert sizes(second) == {repr(net[2]): [1] * 4, "b": [1] * 4}
    with pytest.raises(AssertionError, match=r"ModuleTracker.forward_hook was already registered with module a"):
        third.register_all()


def test_modules_with_a_name_come_first(net):
    tracker = ModuleTracker(net[0], net[1], b=net[2], a=nn.ReLU())
    expected = ["b", "a", repr(net[0]), repr(net[1])]
    assert list(tracker.modules) == list(tracker.gather()) == tracker.module_names == expected
    assert list(tracker.hook_manager.name_to_module) == expected
    with pytest.raises(AssertionError, match="ModuleTracker.forward_hook was already registered with module"):
        ModuleTracker(a=net[0], b=net[0])


def test_a_tracker_that_is_dropped_leaves_a_shared_manager_with_hooks_that_do_nothing(net):
    manager = HookManager()
    tracker = ModuleTracker(a=net[0], hook_manager=manager)
    gone = weakref.ref(tracker)
    del tracker
    assert gone() is None
    manager.activate_all_hooks()
    net(torch.ones(1, 2, requires_grad=True)).sum().backward()
    assert len(manager.name_to_hookhandle) == 2


def test_the_names_of_the_original_can_be_imported_from_where_they_were():
    from hookline.compat.tacklebox import helpers
    from hookline.compat.tacklebox.hooks import model_tracking

    names = ("CustomContext", "Protocol", "data_pass", "find_network_modules_by_name", "get_named_modules_from_network")
    assert all(getattr(model_tracking, name) is getattr(helpers, name) for name in names)
    assert model_tracking.HookManager is HookManager


def test_what_is_no_tensor_is_told_of():
    class Gives(nn.Module):
        def forward(self, x):
            return {"x": x}

    module = Gives()
    tracker = ModuleTracker(a=module, protocol=TrackingProtocol("inp", "out"))
    with tracker.track():
        with pytest.warns(hl.HooklineWarning, match=says("out of module a is")):
            module(torch.ones(1))
        assert sizes(tracker) == {"a": [1, 0]}


def test_nothing_of_a_tracker_stays_on_the_modules(net):
    gc.disable()
    try:
        before = [dict(vars(module)) for module in net]
        tracker = ModuleTracker(*net)
        with contextlib.suppress(LookupError), tracker.track():
            net(torch.ones(1, 2, requires_grad=True)).sum().backward()
            raise LookupError
        dead = weakref.ref(tracker)
        del tracker
        assert dead() is None
        assert [dict(vars(module)) for module in net] == before
    finally:
        gc.enable()


@pytest.mark.gpu
def test_on_a_gpu_batches_are_moved_to_the_network(net, loader):
    tracker = ModuleTracker(b=net[2], network=net.cuda(), protocol=TrackingProtocol(buffer_len=10))
    for device in (None, 0, "cuda"):
        kept = tracker.aggregate_vars(loader, device=device)["b"]
        assert [(str(value.device), len(value)) for value in kept.values()] == [("cpu", 12)] * 4
