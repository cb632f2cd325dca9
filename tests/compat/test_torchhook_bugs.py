"""TorchHook on hookline: the bugs of the original, fixed."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hookline as hl
from hookline.compat.torchhook import (
    HookManager,
)
from tests.errors.wording import says
from tests.support.compat_models import ResNet, image
from tests.support.models import GPT, Returns, mlp, tokens
from tests.support.quick_python import run_forked

# Many managers here are dropped before a forward runs. Another test checks the warning about it.
pytestmark = pytest.mark.filterwarnings("ignore:a HookManager is dropped:hookline.HooklineWarning")


@pytest.fixture
def resnet() -> ResNet:
    return ResNet().eval()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_a_feature_stays_right_when_a_later_layer_overwrites_it(resnet, mode, device):
    x = image().to(device)
    resnet.to(device)
    bn1 = F.batch_norm(resnet.conv1(x), resnet.bn1.running_mean, resnet.bn1.running_var)
    assert bn1.min() < 0  # The in-place ReLU that follows changes these values.
    manager = HookManager(resnet)
    manager.add("bn1")
    manager.add("detached", resnet.bn1, output_transform=lambda output: output.detach())
    manager.add("own", resnet.bn1, custom_hook=lambda module, inputs, output: output)
    with mode():
        resnet(x)
    for key in ("bn1", "detached", "own"):
        (feature,) = manager.get(key)
        assert feature.device.type == ("cpu" if key == "bn1" else device)
        torch.testing.assert_close(feature.to(device), bn1)


def test_a_tensor_that_was_overwritten_keeps_its_history():
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True))
    manager = HookManager(model)
    manager.add("0", custom_hook=lambda module, inputs, output: output)
    x = torch.randn(2, 3)
    model(x)
    (kept,) = manager.get("0")
    assert kept.equal(F.linear(x, model[0].weight, model[0].bias))
    kept.sum().backward()
    assert model[0].bias.grad.equal(torch.full((3,), 2.0))


def test_a_checkpoint_that_is_recomputed_adds_no_feature():
    class Saving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp()

        def forward(self, x):
            return checkpoint(self.body, x, use_reentrant=False)

    model, calls = Saving(), []
    manager = HookManager(model)
    manager.add("body.0")
    manager.add("body.1", custom_hook=lambda module, inputs, output: calls.append(1) or output)
    model(torch.ones(1, 4)).sum().backward()
    assert len(manager.get("body.0")) == len(manager.get("body.1")) == len(calls) == 1


def test_a_layer_that_runs_twice_in_a_forward_has_two_features():
    layer = nn.Linear(3, 3)
    model = nn.Sequential(layer, nn.ReLU(), layer)
    manager = HookManager(model)
    manager.add("0")
    manager.add("2")  # The original did not find the second name of a layer.
    output = model(torch.ones(1, 3))
    assert len(manager.get("0")) == 2
    assert manager.get("0")[1].equal(manager.get("2")[1])
    assert manager.get("0")[1].equal(output)


@pytest.mark.parametrize("custom_hook", [None, lambda module, inputs, output: output])
def test_a_dropped_manager_takes_its_hooks_and_features_along(custom_hook):
    model = mlp()
    manager = HookManager(model)
    manager.add("0", custom_hook=custom_hook)
    model(torch.ones(1, 4))
    gone, kept = weakref.ref(manager), weakref.ref(manager.get("0")[0])
    gc.disable()
    try:
        del manager
        assert gone() is None
        assert kept() is None
        assert len(hl.attached(model)) == 0
    finally:
        gc.enable()


def test_hooks_go_at_the_end_of_a_block_and_features_stay():
    model = mlp()
    with pytest.raises(ZeroDivisionError), HookManager(model, max_size=1) as manager:
        manager.add("0")
        manager.add("2")
        model(torch.ones(1, 4))
        1 / 0
    assert len(hl.attached(model)) == 0
    assert manager.get_keys() == []
    assert manager.get("2")[0].shape == (1, 2)
    assert "Registered Hooks: 0 (max_size=1)" in str(manager)
    manager.clear_hooks()
    assert str(manager).endswith("No hooks have been registered.")


def test_an_output_transform_gets_the_whole_output():
    """The original's warning advises this, but there the transform gets the first element, or is not called."""
    lstm = nn.LSTM(3, 4)
    manager = HookManager(lstm)
    manager.add("all", lstm, output_transform=lambda output: output)
    _, (_, cell) = lstm(torch.ones(5, 3))
    assert manager.get("all")[0][1][1].equal(cell)
    assert "all                           1                   tuple " in str(manager)  # A type instead of a shape.
    nested = Returns(lambda x: {"logits": x})
    others = HookManager(nested)
    others.add("", output_transform=lambda output: output["logits"])
    nested(torch.ones(2))
    assert others.get("")[0].equal(torch.ones(2))


def test_a_container_that_is_never_called_is_warned_of():
    model = GPT(depth=1)
    manager = HookManager(model)
    with pytest.warns(hl.HooklineWarning, match=says("this function will never be called", "ModuleList")) as said:
        manager.add("h")
    assert said[0].filename == __file__
    manager.add("head")
    model(tokens())
    assert manager.get_keys() == ["head"]
    assert manager.get_all()["h"] == []


def test_without_a_transform_the_first_of_a_sequence_is_kept_with_a_warning():
    model = nn.Sequential(nn.GRU(3, 4))
    manager = HookManager(model)
    manager.add("0")
    with pytest.warns(hl.HooklineWarning) as said:
        output, _ = model(torch.ones(5, 3))
    assert [str(one.message) for one in said] == [
        "Output for key '0' is a sequence; processing the first element. Use 'output_transform' for custom handling."
    ]
    assert said[0].filename == __file__
    assert manager.get("0")[0].equal(output)


@pytest.mark.parametrize(
    ("value", "transform"),
    [
        ({"a": torch.ones(1)}, None),
        (None, None),
        ((), None),
        ((None, torch.ones(1)), None),
        (3, None),
        (None, lambda output: pytest.fail("there is nothing to transform")),
    ],
)
def test_what_holds_no_tensor_first_is_warned_of(value, transform):
    model = Returns(lambda _: value)
    manager = HookManager(model)
    manager.add("k", model, output_transform=transform)
    with pytest.warns(hl.HooklineWarning) as said:
        model(torch.ones(1))
    assert [str(one.message) for one in said] == [
        f"Output for key 'k' is not a Tensor or a sequence starting with a Tensor ({type(value)}). Cannot store."
    ]
    assert manager.get("k") == []


def test_a_key_is_free_again_after_it_was_removed():
    model = mlp()
    manager = HookManager(model)
    for _ in range(3):
        manager.add(layer=model[1])
    manager.remove("ReLU_0")
    manager.add(layer=model[1])  # The original found `ReLU_2` taken.
    assert manager.get_keys() == ["ReLU_1", "ReLU_2", "ReLU_3"]


def test_a_handle_that_is_removed_frees_its_key_and_leaves_the_features():
    model = mlp()
    manager = HookManager(model)
    handle = manager.add("0")
    assert manager.hooks["0"] is handle
    model(torch.ones(1, 4))
    handle.remove()
    handle.remove()
    model(torch.ones(1, 4))
    assert manager.get_keys() == []
    assert len(manager.get("0")) == len(manager.features["0"]) == 1
    manager.remove("0")
    assert manager.features == {}


def test_hooks_that_hookline_clears_are_gone_for_the_manager_too():
    model = mlp()
    manager = HookManager(model)
    manager.add("0")
    assert hl.clear(model) == 1
    assert manager.get_keys() == []
    manager.add("0")
    assert manager.get_keys() == ["0"]


def test_a_copy_of_the_model_has_no_hooks():
    model = mlp()
    manager = HookManager(model)
    manager.add("0")
    manager.add("1", custom_hook=lambda module, inputs, output: output)
    stored = pickle.loads(pickle.dumps(model))
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    x = torch.ones(1, 4)
    outputs = [other(x) for other in (copy.deepcopy(model), stored, loaded)]
    assert manager.get_all() == {"0": [], "1": []}
    assert all(output.equal(model(x)) for output in outputs)
    assert len(hl.attached(loaded)) == 0
    assert len(manager.get("0")) == 3


@pytest.mark.process
def test_a_manager_that_lives_to_the_end_of_the_program_goes_quietly():
    code = """
from torch import nn
from hookline.compat.torchhook import HookManager
model = nn.Sequential(nn.Linear(2, 2))
manager = HookManager(model)
manager.add('0')
nn.manager = manager  # So that it is among the last to go.
"""
    done = run_forked(code, strict=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_manager_whose_custom_hook_is_a_method_of_its_owner_goes_with_the_owner():
    class Probe:
        def __init__(self, model):
            self.manager = HookManager(model)
            self.manager.add("0", custom_hook=self.keep)
            self.manager.add("transformed", model[1], output_transform=self.transform)

        def keep(self, module, inputs, output):
            return output

        def transform(self, output):
            return output

    model = mlp()
    probe = Probe(model)
    model(torch.ones(1, 4))
    assert [len(kept) for kept in probe.manager.features.values()] == [1, 1]
    gone = weakref.ref(probe)
    del probe
    gc.collect()
    assert gone() is None
    assert len(hl.attached(model)) == 0


def test_a_custom_hook_may_call_another_model_that_is_hooked():
    first, second = mlp(), mlp()
    managers = HookManager(first), HookManager(second)
    managers[0].add("", custom_hook=lambda module, inputs, output: second(inputs[0]))
    managers[1].add("0")
    first(torch.ones(1, 4))
    assert len(managers[1].get("0")) == 1


def test_a_forward_that_is_called_by_itself_is_seen_too():
    model = mlp()
    manager = HookManager(model)
    manager.add("")
    output = model.forward(torch.ones(1, 4))  # Bypasses the hook of the original.
    assert manager.get("")[0].equal(output)


def test_lists_are_new_at_every_reading():
    model = mlp()
    manager = HookManager(model)
    manager.add("0")
    model(torch.ones(1, 4))
    manager.get("0").clear()
    manager.features["0"].clear()
    manager.get_all().clear()
    assert len(manager.get("0")) == 1


def test_a_forward_that_fails_leaves_the_features_before():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(4, 4))
    manager = HookManager(model)
    manager.add("0")
    manager.add("1")
    with pytest.raises(RuntimeError, match="shape"):
        model(torch.ones(1, 3))
    assert [len(kept) for kept in manager.features.values()] == [1, 0]


def test_every_thread_adds_to_the_features():
    model = mlp()
    manager = HookManager(model)
    manager.add("2")
    threads = [threading.Thread(target=model, args=(torch.ones(1, 4),)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(manager.get("2")) == 8


def test_managers_on_one_model_do_not_meet():
    model = mlp()
    first, second = HookManager(model), HookManager(model, max_size=1)
    first.add("0")
    second.add("0")
    model(torch.ones(1, 4))
    model(torch.ones(1, 4))
    first.clear_hooks()
    model(torch.ones(1, 4))
    assert len(second.get("0")) == 1
    assert first.get_keys() == []


def test_torchs_own_hooks_stay():
    model, seen = mlp(), []
    handle = model[0].register_forward_hook(lambda *_: seen.append(1))
    manager = HookManager(model)
    manager.add("0")
    model(torch.ones(1, 4))
    manager.clear_hooks()
    model(torch.ones(1, 4))
    handle.remove()
    assert len(seen) == 2


def test_a_compiled_model_is_seen():
    model = mlp()
    manager = HookManager(model)
    manager.add("1")
    with torch.no_grad():  # With gradients, torch's own code warns at a graph break.
        output = torch.compile(model, backend="eager")(torch.ones(1, 4))
    assert model[2](manager.get("1")[0]).equal(output)
