"""TorchHook on hookline: its README and its API, name by name."""

from __future__ import annotations

import gc
import importlib
import inspect

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hookline as hl
from hookline.compat import torchhook
from hookline.compat.torchhook import (
    HookManager,
    count_parameters,
    format_parameter_count,
    get_layerwise_parameter_count,
    model_summary,
)
from tests.support.compat_models import ResNet, image
from tests.support.models import GPT, Returns, mlp

RULE = "-" * 80
THICK = "=" * 80

# Many managers here are dropped before a forward runs. Another test checks the warning about it.
pytestmark = pytest.mark.filterwarnings("ignore:a HookManager is dropped:hookline.HooklineWarning")


@pytest.fixture
def resnet() -> ResNet:
    return ResNet().eval()


# The README.


def test_the_quick_start_prints_what_the_readme_shows(capsys):
    model = ResNet((64, 128, 256, 512), classes=1000)
    model.eval()
    hook_manager = HookManager(model, max_size=1)
    hook_manager.register_forward_hook(layer_name="conv1")
    hook_manager.add(layer_name="layer4.1.relu")  # The text before the example calls it `layer4.2.relu`.
    target_layer = model.fc
    hook_manager.add(layer_name="fully_connected", layer=target_layer)
    dummy_input = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        output = model(dummy_input)
    features_conv1 = hook_manager.get_features("conv1")
    features_relu = hook_manager.get_features("layer4.1.relu")
    all_features = hook_manager.get_all()
    print(f"Conv1 feature shape: {features_conv1[0].shape}")  # noqa: T201
    print(f"Layer 4.1 ReLU feature shape: {features_relu[0].shape}")  # noqa: T201
    hook_manager.summary()
    hook_manager.clear_hooks()
    shown = f"""\
Conv1 feature shape: torch.Size([1, 64, 112, 112])
Layer 4.1 ReLU feature shape: torch.Size([1, 512, 7, 7])
Model: ResNet | Total Parameters: 11.69 M
Registered Hooks: 3 (max_size=1)
{RULE}
Captured Features Summary:
Layer Key                     Feature Count       Feature Shape
{RULE}
conv1                         1                   (1, 64, 112, 112)
layer4.1.relu                 1                   (1, 512, 7, 7)
fully_connected               1                   (1, 1000)
{RULE}
"""
    printed = capsys.readouterr().out
    assert "\n".join(line.rstrip() for line in printed.split("\n")) == shown  # The README has no trailing blanks.
    assert all_features["fully_connected"][0].equal(output)


def test_a_custom_hook_keeps_what_it_returns(resnet):
    def my_custom_hook(module, input, output):
        if isinstance(output, torch.Tensor):
            positive_mean = output[output > 0].mean()
            return torch.tensor([positive_mean])
        return None

    hook_manager = HookManager(resnet)
    hook_manager.add(layer_name="layer1.0.conv1", custom_hook=my_custom_hook)
    with torch.no_grad():
        resnet(image())
    custom_features = hook_manager.get_features("layer1.0.conv1")
    assert custom_features[0].shape == (1,)
    assert custom_features[0].item() > 0


def test_an_output_transform_keeps_what_it_makes(resnet):
    def apply_softmax(output_tensor):
        return torch.softmax(output_tensor, dim=-1).detach().cpu()

    hook_manager = HookManager(resnet)
    hook_manager.add(layer_name="fc", output_transform=apply_softmax)
    output = resnet(image())
    softmax_output = hook_manager.get_features("fc")
    assert softmax_output[0].shape == (1, 10)
    assert softmax_output[0].equal(output.softmax(-1))
    assert not softmax_output[0].requires_grad


# The rest of the API, name by name.


def test_the_names_are_those_of_the_original():
    assert torchhook.__version__ == "0.2.7"
    for module, names in {
        "hookmanager": ["HookManager", "count_parameters", "format_parameter_count"],
        "utils": ["count_parameters", "format_parameter_count", "get_layerwise_parameter_count", "model_summary"],
    }.items():
        found = importlib.import_module(f"hookline.compat.torchhook.{module}")
        assert all(getattr(found, name) is getattr(torchhook, name) for name in names)
    names: dict[str, object] = {}
    exec("from hookline.compat.torchhook import *", names)
    own = {"count_parameters", "format_parameter_count", "get_layerwise_parameter_count", "model_summary"}
    assert set(names) - {"__builtins__"} == {"HookManager", *own}  # The original also exports torch, warnings, typing.


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("register_forward_hook", ["layer_name", "layer", "custom_hook", "output_transform"]),
        ("add", ["layer_name", "layer", "custom_hook", "output_transform"]),
        ("get_features", ["key"]),
        ("get", ["key"]),
        ("get_all", []),
        ("get_keys", []),
        ("remove", ["key"]),
        ("clear_hooks", []),
        ("clear_features", []),
        ("summary", []),
    ],
)
def test_a_method_takes_what_the_original_took(name, parameters):
    assert list(inspect.signature(getattr(HookManager, name)).parameters) == ["self", *parameters]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((3,), TypeError, "'model' must be an instance of torch.nn.Module."),
        ((nn.ReLU(), "x"), TypeError, "'max_size' must be an integer."),
        ((nn.ReLU(), 1.0), TypeError, "'max_size' must be an integer."),
        ((nn.ReLU(), None), TypeError, "'max_size' must be an integer."),
        ((nn.ReLU(), -2), ValueError, "'max_size' cannot be less than -1."),
    ],
)
def test_a_manager_refuses_what_is_not_a_model_or_a_size(arguments, error, message):
    with pytest.raises(error) as caught:
        HookManager(*arguments)
    assert str(caught.value) == message
    del caught
    gc.collect()  # The original warns here that its cleanup failed; warnings are errors here.


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"layer_name": 3}, TypeError, "'layer_name' must be a string or None."),
        ({"layer": 3}, TypeError, "'layer' must be an instance of torch.nn.Module or None."),
        ({"layer_name": "0", "custom_hook": 3}, TypeError, "'custom_hook' must be a callable or None."),
        ({"layer_name": "0", "output_transform": 3}, TypeError, "'output_transform' must be a callable or None."),
        ({}, ValueError, "Either 'layer_name' or 'layer' must be specified."),
        ({"layer_name": "nope"}, ValueError, "Layer 'nope' not found in the model."),
        ({"layer_name": "*"}, ValueError, "Layer '*' not found in the model."),
        ({"layer_name": "0:input"}, ValueError, "Layer '0:input' not found in the model."),
        ({"layer_name": "0.weight"}, ValueError, "Layer '0.weight' not found in the model."),
        ({"layer_name": "1"}, ValueError, "Hook for key '1' already exists."),
    ],
)
def test_add_refuses_as_the_original_did(arguments, error, message):
    manager = HookManager(mlp())
    manager.add("1")
    with pytest.raises(error) as caught:
        manager.add(**arguments)
    assert str(caught.value) == message
    assert manager.get_keys() == ["1"]


def test_an_unknown_layer_says_which_are_near():
    with pytest.raises(ValueError, match="'h.0.mpl' not found") as caught:
        HookManager(GPT()).add("h.0.mpl")
    assert "did you mean 'h.0.mlp'" in str(caught.value.__cause__)


@pytest.mark.parametrize(
    ("name", "key", "error", "message"),
    [
        ("get_features", 3, TypeError, "'key' must be a string."),
        ("get", None, TypeError, "'key' must be a string."),
        ("remove", 3, TypeError, "'key' must be a string."),
        ("get_features", "x", ValueError, "No hook registered with key 'x'."),
        ("get", "x", ValueError, "No hook registered with key 'x'."),
        ("remove", "x", ValueError, "No hook or features found for key 'x'."),
    ],
)
def test_an_unknown_key_is_refused_as_by_the_original(name, key, error, message):
    with pytest.raises(error) as caught:
        getattr(HookManager(mlp()), name)(key)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("size", "expected", "shown"),
    [
        (-1, [0.0, 1.0, 2.0, 3.0], "unlimited"),
        (0, [0.0, 1.0, 2.0, 3.0], "unlimited"),  # As in the original: no limit.
        (1, [3.0], "1"),
        (2, [2.0, 3.0], "2"),
        (True, [3.0], "True"),
    ],
)
def test_the_newest_are_kept_oldest_first(size, expected, shown):
    model = nn.Sequential(nn.ReLU())
    manager = HookManager(model, size)
    manager.add("0")
    for number in range(4):
        model(torch.tensor(float(number)))
    assert [feature.item() for feature in manager.get_features("0")] == expected
    assert manager.max_size is size
    assert f"(max_size={shown})" in str(manager)


def test_what_is_not_kept_pushes_nothing_out():
    model = Returns(lambda x: x)
    manager = HookManager(model, max_size=2)
    manager.add("", custom_hook=lambda module, inputs, output: output if output > 0 else None)
    manager.add("transformed", model, output_transform=lambda output: output if output > 0 else None)
    for number in (1.0, 2.0, -1.0, -2.0, -3.0):
        model(torch.tensor(number))
    assert manager.get("") == manager.get("transformed") == [torch.tensor(1.0), torch.tensor(2.0)]


def test_a_key_is_the_name_or_the_kind_of_layer_with_a_number():
    model = mlp()
    manager = HookManager(model)
    manager.add("0")
    manager.add("")
    manager.add("free text", model[0])
    manager.add(layer=model[1])
    manager.add(layer=model[1])
    assert manager.get_keys() == ["0", "", "free text", "ReLU_0", "ReLU_1"]
    output = model(torch.ones(1, 4))
    assert manager.get("")[0].equal(output)
    assert manager.get("0")[0].equal(manager.get("free text")[0])
    assert manager.get("ReLU_0")[0].equal(manager.get("ReLU_1")[0])


def test_features_are_detached_and_the_output_is_left_alone():
    model = mlp()
    x = torch.ones(1, 4)
    expected = model(x)
    manager = HookManager(model)
    for name in ("0", "1", "2"):
        manager.add(name)
    output = model(x)
    assert output.equal(expected)
    assert output.requires_grad
    assert not manager.get("2")[0].requires_grad
    manager.get("2")[0].zero_()
    assert output.equal(expected)


def test_a_custom_hook_gets_the_module_the_inputs_and_the_output():
    model, seen = Returns(lambda x: x), []
    manager = HookManager(model)
    manager.add("", custom_hook=lambda *given: seen.append(given))
    x = torch.ones(2)
    model(x)
    model(x=x)  # As with torch's own hooks, keyword arguments are not among the inputs.
    assert [(module, len(inputs)) for module, inputs, _ in seen] == [(model, 1), (model, 0)]
    assert seen[0][1][0] is x
    assert seen[0][2] is x
    assert manager.get("") == []


def test_a_custom_hook_beats_an_output_transform():
    model = Returns(lambda x: x)
    manager = HookManager(model)
    manager.add("", custom_hook=lambda *_: torch.ones(1), output_transform=lambda output: output * 7)
    model(torch.zeros(1))
    assert manager.get("") == [torch.ones(1)]


def test_a_custom_hook_that_returns_no_tensor_is_warned_of():
    model = Returns(lambda x: x)
    manager = HookManager(model)
    manager.add("k", model, custom_hook=lambda module, inputs, output: "text")
    message = "custom_hook for key 'k' returned a non-Tensor value (<class 'str'>). Ignoring."
    with pytest.warns(hl.HooklineWarning) as said:
        model(torch.ones(1))
    assert [str(one.message) for one in said] == [message]
    assert said[0].filename == __file__
    assert manager.get("k") == []


def test_an_error_in_a_hook_comes_through_and_leaves_what_was_kept():
    model = Returns(lambda x: x)
    manager = HookManager(model)
    manager.add("", custom_hook=lambda module, inputs, output: output if output > 0 else output.nope)
    model(torch.tensor(1.0))
    with pytest.raises(AttributeError, match="nope"):
        model(torch.tensor(-1.0))
    assert manager.get("") == [torch.tensor(1.0)]


def test_the_gradient_of_a_kept_output_can_be_read(resnet):
    """Grad-CAM needs this: the custom hook returns the output, which is kept unchanged, with its autograd history."""

    def keep(module, inputs, output):
        output.retain_grad()
        return output

    manager = HookManager(resnet, max_size=1)
    manager.add("layer4", custom_hook=keep)
    manager.add("transformed", resnet.layer4, output_transform=lambda output: output)
    logits = resnet(image())
    activations = manager.get("layer4")[0]
    logits[0, 3].backward(retain_graph=True)
    gradient = activations.grad.clone()
    assert torch.autograd.grad(logits[0, 3], activations)[0].equal(gradient)
    assert manager.get("transformed")[0] is activations
    cam = F.relu((gradient.mean((2, 3), keepdim=True) * activations).sum(1))
    assert cam.shape == (1, 1, 1)


def test_a_custom_hook_may_let_a_frozen_model_have_gradients():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)).requires_grad_(False)
    manager = HookManager(model)
    manager.add("0", custom_hook=lambda module, inputs, output: output.requires_grad_())
    model(torch.ones(1, 2)).sum().backward()
    assert manager.get("0")[0].grad.equal(model[1].weight)


def test_clear_features_keeps_the_keys_and_goes_on():
    model = mlp()
    manager = HookManager(model)
    manager.add("0")
    manager.add("1")
    model(torch.ones(1, 4))
    manager.clear_features()
    assert manager.get_all() == manager.features == {"0": [], "1": []}
    assert manager.get("0") == []  # The layer has run: no warning that there is nothing.
    model(torch.ones(1, 4))
    assert [len(kept) for kept in manager.get_all().values()] == [1, 1]


def test_remove_takes_one_key_away_and_clear_hooks_all():
    model = mlp()
    manager = HookManager(model)
    for name in ("0", "1", "2"):
        manager.add(name)
    model(torch.ones(1, 4))
    manager.remove("1")
    assert manager.get_keys() == list(manager.hooks) == list(manager.features) == ["0", "2"]
    assert len(hl.attached(model)) == 2
    manager.clear_hooks()
    manager.clear_hooks()
    assert manager.get_keys() == []
    assert manager.features == {}
    assert len(hl.attached(model)) == 0
    assert "forward" not in vars(model[0])


def test_the_summary_is_the_originals_to_the_last_blank(capsys):
    model = mlp()
    manager = HookManager(model)
    head = "Model: Sequential | Total Parameters: 58.00 "
    assert str(manager) == f"{head}\nNo hooks have been registered."
    manager.add("0")
    manager.add("tanh", nn.Tanh())
    assert repr(manager) == f"{head}\n2 hooks registered (0, tanh), but no features have been captured yet."
    model(torch.ones(1, 4))
    model(torch.ones(3, 4))
    manager.summary()
    expected = [
        head,
        "Registered Hooks: 2 (max_size=unlimited)",
        RULE,
        "Captured Features Summary:",
        "Layer Key                     Feature Count       Feature Shape                 ",
        RULE,
        "0                             2                   (1, 8)                        ",  # Of the oldest feature.
        RULE,
        "Hooks Registered but Not Triggered Yet:",
        "- tanh",
        RULE,
        "",
    ]
    assert capsys.readouterr().out.split("\n") == expected


@pytest.mark.parametrize(
    ("count", "precision", "text"),
    [
        (0, 2, "0.00 "),
        (999, 2, "999.00 "),
        (999, 0, "999 "),
        (1000, 2, "1.00 K"),
        (999_999, 2, "1000.00 K"),
        (11_689_512, 2, "11.69 M"),
        (11_689_512, 3, "11.690 M"),
        (10**9, 2, "1.00 G"),
        (10**12, 2, "1.00 T"),
        (10**15, 2, "1000.00 T"),
        (-5000, 2, "-5000.00 "),
    ],
)
def test_a_count_is_written_with_its_unit(count, precision, text):
    assert format_parameter_count(count, precision) == text


class Partly(nn.Module):
    """A model with a bare parameter, a frozen head and nested layers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Sequential(nn.ReLU(), nn.Linear(5, 5)))
        self.head = nn.Linear(4, 2000).requires_grad_(False)
        self.drop = nn.Dropout()


def test_parameters_are_counted_in_all_and_by_layer():
    model = Partly()
    assert count_parameters(model) == 3 + 112 + 30 + 10_000
    assert count_parameters(model, trainable_only=True) == 3 + 112 + 30
    every = {"body": 0, "body.0": 112, "body.1": 0, "body.1.0": 0, "body.1.1": 30, "head": 10_000, "drop": 0}
    assert get_layerwise_parameter_count(model) == every
    assert list(get_layerwise_parameter_count(model)) == list(every)
    assert get_layerwise_parameter_count(model, max_depth=0) == {"body": 0, "head": 10_000, "drop": 0}
    assert list(get_layerwise_parameter_count(model, 1)) == ["body", "body.0", "body.1", "head", "drop"]
    assert get_layerwise_parameter_count(model, trainable_only=True) == {**every, "head": 0}


def test_a_shared_layer_is_counted_once_and_shown_with_each_that_holds_it():
    layer = nn.Linear(2, 2)
    assert count_parameters(nn.Sequential(nn.Sequential(layer), layer)) == 6
    assert get_layerwise_parameter_count(nn.Sequential(layer, nn.ReLU(), layer)) == {"0": 6, "1": 0}
    assert get_layerwise_parameter_count(nn.Sequential(nn.Sequential(layer), layer)) == {"0": 0, "0.0": 6, "1": 6}


@pytest.mark.parametrize("function", [count_parameters, get_layerwise_parameter_count, model_summary])
def test_what_is_not_a_model_is_refused(function):
    with pytest.raises(TypeError) as caught:
        function("x")
    assert str(caught.value) == "'model' must be an instance of torch.nn.Module."


def test_model_summary_prints_the_table_of_the_original(capsys):
    assert model_summary(Partly()) is None
    head = [
        THICK,
        "Model Summary: Partly",
        RULE,
        "Total Parameters: 10.14 K",
        "Trainable Parameters: 145.00 ",
        "Non-trainable Parameters: 10.00 K",
        RULE,
        "Layer Name                               Total Params         Trainable Params    ",
        THICK,
    ]
    rows = [
        "body                                     0.00                 0.00                ",
        "  body.0                                 112.00               112.00              ",
        "  body.1                                 0.00                 0.00                ",
        "    body.1.0                             0.00                 0.00                ",
        "    body.1.1                             30.00                30.00               ",
        "head                                     10.00 K              0.00                ",
        "drop                                     0.00                 0.00                ",
    ]
    assert capsys.readouterr().out.split("\n") == [*head, *rows, THICK, ""]
    model_summary(Partly(), max_depth=1, show_zero_params=False)
    assert capsys.readouterr().out.split("\n") == [*head, rows[1], rows[5], THICK, ""]
