"""hookline.compat.auto_hookpoint: the API of Auto_HookPoint, without its bugs."""

from __future__ import annotations

import copy
import io
import operator
import pickle
import sys
import weakref

import pytest
import torch
from torch import nn

import hookline as hl
from hookline.compat import auto_hookpoint
from hookline.compat.auto_hookpoint import (
    BUILT_IN_MODULES,
    HookedClass,
    HookedModule,
    HookedParameter,
    auto_hook,
    check,
    check_auto_hook,
    hook,
    utils,
)
from tests.errors.wording import says
from tests.points.conftest import kind_of_points  # noqa: F401  # Each test runs with both kinds of points.
from tests.support.compat_models import Decorated, Mixed
from tests.support.models import GPT, Returns
from tests.support.points_models import add_one


class AutoEncoder(nn.Module):
    """The autoencoder of the README."""

    def __init__(self, cfg):
        super().__init__()
        d_hidden = cfg["d_mlp"] * cfg["dict_mult"]
        d_mlp = cfg["d_mlp"]
        dtype = torch.float32
        torch.manual_seed(cfg["seed"])
        self.W_enc = nn.Parameter(torch.nn.init.kaiming_uniform_(torch.empty(d_mlp, d_hidden, dtype=dtype)))
        self.W_dec = nn.Parameter(torch.nn.init.kaiming_uniform_(torch.empty(d_hidden, d_mlp, dtype=dtype)))
        self.b_enc = nn.Parameter(torch.zeros(d_hidden, dtype=dtype))
        self.b_dec = nn.Parameter(torch.zeros(d_mlp, dtype=dtype))

    def forward(self, x):
        x_cent = x - self.b_dec
        acts = torch.relu(x_cent @ self.W_enc + self.b_enc)
        x_reconstruct = acts @ self.W_dec + self.b_dec
        return x_reconstruct  # noqa: RET504


class Manual(nn.Module):
    """The README's manual version: a hook point for each module and parameter."""

    def __init__(self, raw):
        super().__init__()
        self.raw = raw
        self.W_enc, self.W_dec, self.b_enc, self.b_dec = (hl.HookPoint() for _ in range(4))

    def forward(self, x):
        raw = self.raw
        x_cent = self.b_dec(x - raw.b_dec)
        acts = torch.relu(self.b_enc(self.W_enc(x_cent @ raw.W_enc) + raw.b_enc))
        return self.b_dec(self.W_dec(acts @ raw.W_dec) + raw.b_dec)


CONFIG = {"d_mlp": 10, "dict_mult": 10, "l1_coeff": 10, "seed": 1}


def add_noise(tensor, hook):
    return tensor + torch.arange(tensor.numel()).reshape(tensor.shape)


@pytest.fixture
def x():
    return torch.randn(2, 4)


# The README.


def test_the_readme_as_a_decorator(capsys):
    @auto_hook
    class MyModel(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1 = nn.Linear(10, 10)

        def forward(self, x):
            return self.fc1(x)

    model = MyModel()
    print(model.hook_dict.items())  # noqa: T201
    assert capsys.readouterr().out == "dict_items([('hook_point', HookPoint()), ('fc1.hook_point', HookPoint())])\n"


def test_the_readme_on_an_instance(capsys):
    autoencoder = auto_hook(AutoEncoder({"d_mlp": 10, "dict_mult": 10, "l1_coeff": 10, "seed": 1}))
    print(autoencoder.hook_dict.items())  # noqa: T201
    assert capsys.readouterr().out == (
        "dict_items([('hook_point', HookPoint()), ('W_enc.hook_point', HookPoint()), "
        "('W_dec.hook_point', HookPoint()), ('b_enc.hook_point', HookPoint()), ('b_dec.hook_point', HookPoint())])\n"
    )


def test_the_readme_written_by_hand_sees_the_same():
    raw, x = AutoEncoder(CONFIG), torch.randn(3, 10)
    by_hand = Manual(raw)
    expected: dict[str, list[torch.Tensor]] = {}
    found: dict[str, list[torch.Tensor]] = {}
    for name in ("W_enc", "W_dec", "b_enc", "b_dec"):
        getattr(by_hand, name).add_hook(lambda tensor, hook, name=name: expected.setdefault(name, []).append(tensor))
    output = by_hand(x)
    for name in expected:
        getattr(by_hand, name).remove_hooks()

    def keep(tensor, hook):
        found.setdefault(hook.name.removesuffix(".hook_point"), []).append(tensor)

    hooked = auto_hook(raw)
    assert hooked.run_with_hooks(x, fwd_hooks=[(lambda name: "_" in name[:2], keep)]).equal(output)
    assert {name: len(values) for name, values in found.items()} == {"W_enc": 1, "W_dec": 1, "b_enc": 1, "b_dec": 2}
    for name, values in expected.items():
        assert all(map(torch.equal, values, found[name]))


def test_the_readme_checks_the_autoencoder(capsys):
    # The README does not import `auto_hook`, and passes it the decorated model: that is returned with a warning.
    model = Decorated()
    with pytest.warns(UserWarning, match=says("returning the original")):
        hooked_model = auto_hook(model)
    assert hooked_model is model
    input_kwargs = {"x": torch.randn(10, 10)}
    init_kwargs = {"cfg": {"d_mlp": 10, "dict_mult": 10, "l1_coeff": 10, "seed": 1}}
    hooked = check_auto_hook(AutoEncoder, input_kwargs, init_kwargs)
    assert isinstance(hooked, HookedModule)
    assert type(check_auto_hook(AutoEncoder, input_kwargs, init_kwargs, strict=True).unwrap()) is AutoEncoder
    assert capsys.readouterr() == ("", "")


def test_backward_hooks_work_where_modules_return_no_tensors():
    # The README advises against backward hooks on such modules.
    model = auto_hook(nn.Sequential(nn.LSTM(4, 4), Returns(lambda out: {"out": out[0], "none": None}), Returns(dict)))
    shapes = []
    output = model.run_with_hooks(
        torch.randn(2, 4), bwd_hooks=[("1.hook_point", lambda gradient, hook: shapes.append(gradient.shape))]
    )
    output["out"].sum().backward()
    assert shapes == [(2, 4)]


# auto_hook and the model it returns.


def test_the_keys_are_all_there_and_no_others():
    model = auto_hook(Mixed())
    assert list(model.hook_dict) == [
        "hook_point",
        "W.hook_point",
        "fc.hook_point",
        "layers.0.hook_point",
        "layers.1.hook_point",
        "relu_hook",
    ]
    assert all(point.name == name for name, point in model.hook_dict.items())
    assert model.hook_dict["relu_hook"] is model.relu_hook
    assert model.list_all_hooks() == list(model.hook_dict.items())
    assert model.hook_point is model.hook_dict["hook_point"]
    assert set(model.hook_dict) < set(model.mod_dict)
    assert model.mod_dict["fc"] is model.fc
    assert model.setup() is None
    assert model.maybe_hook_params(model.fc, "fc") is None


@pytest.mark.parametrize("kind", [nn.GroupNorm, nn.PReLU, nn.MultiheadAttention], ids=lambda kind: kind.__name__)
def test_no_point_is_made_that_never_fires(kind):
    model = kind(*([2, 4] if kind is nn.GroupNorm else [4, 2] if kind is nn.MultiheadAttention else []))
    assert "hook_point" in auto_hook(model).hook_dict
    assert not [name for name in auto_hook(nn.Sequential(copy.deepcopy(model))).hook_dict if "weight" in name]


def test_built_in_modules_are_these():
    names = "Linear Embedding Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d ConvTranspose3d BatchNorm1d"
    names += " BatchNorm2d BatchNorm3d LayerNorm RNN LSTM GRU RNNCell LSTMCell GRUCell"
    assert [kind.__name__ for kind in BUILT_IN_MODULES] == names.split()


def test_what_is_hooked_already_comes_back_with_a_warning():
    raw = Mixed()
    model, weight, kind = auto_hook(raw), auto_hook(nn.Parameter(torch.ones(2))), HookedClass(Mixed)
    names = {"Mixed": model, "HookedParameter": weight, "Decorated": Decorated(), "HookedClass": kind}
    for name, hooked in [*names.items(), ("HookedClass", Decorated)]:
        with pytest.warns(UserWarning, match=says("auto_hook is called")) as said:
            assert auto_hook(hooked) is hooked
        assert str(said[0].message) == f"auto_hook is called with a {name} instance, returning the original"
        assert said[0].filename == __file__


@pytest.mark.parametrize("given", [3, "fc", None, [nn.ReLU()]], ids=["number", "text", "none", "list"])
def test_anything_else_is_refused(given):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        auto_hook(given)
    assert str(caught.value) == (
        f"Module type {type(given)} is not supported should, be one of nn.Module or nn.Parameter/torch.Tensor"
    )


def test_a_class_of_something_else_is_refused():
    with pytest.raises(ValueError, match="Module type <class 'int'> is not supported"):
        auto_hook(int)


def test_the_modules_of_the_original_are_there():
    assert auto_hookpoint.hook is hook
    assert (hook.auto_hook, hook.HookedClass, hook.HookedModule) == (auto_hook, HookedClass, HookedModule)
    assert (hook.HookedParameter, hook.BUILT_IN_MODULES) == (HookedParameter, BUILT_IN_MODULES)
    assert check.check_auto_hook is check_auto_hook


def test_a_hooked_model_is_one_and_knows_its_model(x):
    raw = Mixed().eval()
    expected = raw(x)
    model = HookedModule(raw)
    assert isinstance(model, HookedModule)
    assert isinstance(model, hl.HookedModel)
    assert isinstance(model, nn.Module)
    assert not isinstance(raw, HookedModule)
    assert issubclass(type(model), HookedModule)
    assert model.model is model._module is raw
    assert repr(model) == repr(raw)
    assert model.fc is raw.fc
    assert model(x).equal(expected)
    assert model.run_with_hooks(x, fwd_hooks=[("hook_point", add_one)]).equal(expected + 1)


def test_a_model_with_a_model_of_its_own_is_told_apart(x):
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = nn.Linear(4, 4)

        def forward(self, x):
            return self.model(x)

    raw = Outer()
    hooked = auto_hook(raw)
    assert hooked.model is raw
    assert list(hooked.hook_dict) == ["hook_point", "model.hook_point"]
    assert hooked(x).equal(raw.model(x))


def test_names_that_mean_nothing_are_errors(x):
    model = auto_hook(Mixed())
    with pytest.raises(hl.SiteError, match=says("is not a hook point", "Mixed", "fc", "fc.hook_point")):
        model.add_hook("fc", add_one)
    with pytest.raises(hl.SiteError, match=says("is not a hook point", "Mixed", "W.hook_pint")):
        model.run_with_hooks(x, fwd_hooks=[("W.hook_pint", add_one)])
    assert not hl.attached(model)


def test_all_of_the_interface_works_on_it(x):
    model = auto_hook(Mixed()).eval()
    expected, calls = model(x), []
    model.add_hook(lambda name: name.endswith("hook_point"), lambda tensor, hook: calls.append(hook.name))
    assert model(x).equal(expected)
    assert calls == ["fc.hook_point", "layers.0.hook_point", "layers.1.hook_point", "W.hook_point", "hook_point"]
    model.reset_hooks()
    output, cache = model.run_with_cache(x)
    assert list(cache) == [*calls[:3], "relu_hook", *calls[3:]]
    assert cache["hook_point"].equal(output)
    with pytest.raises(ZeroDivisionError), model.hooks(fwd_hooks=[("fc.hook_point", lambda tensor, hook: 1 / 0)]):
        model(x)
    assert model(x).equal(expected)
    assert not hl.attached(model)


def test_unwrap_gives_the_model_back_as_it_was(x):
    raw = Mixed().eval()
    before, parameters, expected = dict(raw.__dict__), dict(raw.named_parameters()), raw(x)
    model = auto_hook(raw)
    model.add_hook("W.hook_point", add_one)
    model.add_perma_hook("fc.hook_point", add_one)
    assert not model(x).equal(expected)
    assert model.unwrap() is raw
    assert raw.__dict__ == before
    assert type(raw) is Mixed
    assert all(parameter is parameters[name] for name, parameter in raw.named_parameters())
    assert [name for name, _ in raw.named_modules()] == ["", "fc", "layers", "layers.0", "layers.1", "relu_hook"]
    assert raw(x).equal(expected)
    assert not hl.attached(raw)
    assert auto_hook(raw).unwrap() is raw


def test_hook_factory_lets_outputs_pass_through_a_point(x):
    point, layer = hl.HookPoint(), nn.LSTM(4, 4)
    expected = layer(x)
    handle = layer.register_forward_hook(hook.hook_factory(point))
    point.add_hook(add_one)
    output, (hidden, cell) = layer(x)
    assert output.equal(expected[0] + 1)
    assert hidden.equal(expected[1][0] + 1)
    assert cell.equal(expected[1][1] + 1)
    handle.remove()
    point.remove_hooks()


# Classes.


def test_a_decorated_class_stays_one(x):
    model = Decorated()
    assert isinstance(Decorated, type)
    assert isinstance(Decorated, HookedClass)
    assert isinstance(model, Decorated)
    assert isinstance(model, HookedModule)
    assert (Decorated.__name__, Decorated.__doc__) == ("Decorated", "What it is for.")
    assert model.run_with_hooks(x, fwd_hooks=[("W.hook_point", add_one)]).equal(model(x) + 1)
    assert model.unwrap() is model

    class Further(Decorated):
        def forward(self, x):
            return super().forward(x) + 1

    assert Further()(x).shape == (2, 4)
    assert list(Further().hook_dict) == ["hook_point", "W.hook_point", "fc1.hook_point"]
    with pytest.warns(UserWarning, match=says("auto_hook is called with a")):
        assert auto_hook(Further) is Further


def test_a_class_of_torch_is_left_alone():
    bases = nn.Tanh.__bases__
    kind = auto_hook(nn.Tanh)
    assert type(kind) is HookedClass
    assert isinstance(kind, HookedClass)
    assert nn.Tanh.__bases__ == bases
    assert kind.unwrap() is nn.Tanh
    model = kind()
    assert list(model.hook_dict) == ["hook_point"]
    assert isinstance(model, HookedModule)
    assert isinstance(model, kind)
    assert isinstance(nn.Tanh(), kind)
    assert not isinstance(auto_hook(nn.ReLU()), kind)
    assert issubclass(kind, nn.Module)
    assert (kind.__name__, kind.__doc__, kind.forward) == ("Tanh", nn.Tanh.__doc__, nn.Tanh.forward)
    assert not hasattr(nn.Tanh(), "hook_dict")
    assert copy.deepcopy(kind).unwrap() is nn.Tanh


def test_a_class_of_another_module_is_left_alone():
    kind = auto_hook(GPT)
    assert type(kind) is HookedClass
    assert isinstance(kind(depth=1), kind)
    assert not hasattr(GPT(depth=1), "hook_dict")
    assert list(kind(depth=1).hook_dict)[:3] == ["hook_point", "h.0.hook_point", "h.0.norm.hook_point"]


def test_a_class_of_parameters_is_hooked_too():
    kind = auto_hook(nn.Parameter)
    assert isinstance(kind(torch.ones(2)), HookedParameter)


def test_a_class_that_needs_the_names_itself_is_hooked_instance_by_instance(x):
    class Busy(nn.Linear):
        def hooks(self):
            return "mine"

    kind = auto_hook(Busy)
    assert type(kind) is HookedClass
    model = kind(4, 4)
    assert model.run_with_hooks(x, fwd_hooks=[("hook_point", add_one)]).equal(model(x) + 1)
    assert model.model.hooks() == "mine"


# Bare parameters.

BINARY = ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow")


@pytest.mark.parametrize("name", BINARY)
def test_the_result_of_each_operator_passes_its_point(name):
    operate = getattr(operator, name)
    plain = nn.Parameter(torch.rand(3, 3) + 1)
    other, seen = torch.rand(3, 3) + 1, []
    others = [other, nn.Parameter(other)] if name == "matmul" else [other, nn.Parameter(other), 2, 0.5]
    expected = [result for one in others for result in (operate(plain, one), operate(one, plain))]
    weight = auto_hook(nn.Parameter(plain.detach().clone()))
    weight.add_hook("hook_point", lambda tensor, hook: seen.append(tensor))
    found = [result for one in others for result in (operate(weight, one), operate(one, weight))]
    assert all(map(torch.equal, expected, found))
    assert all(map(torch.equal, seen, found))
    assert len(seen) == len(found)
    assert not any(isinstance(result, HookedParameter) for result in found)
    weight.reset_hooks()
    operate(weight, other)
    assert len(seen) == len(found)


def test_signs_are_operators_too():
    weight = auto_hook(nn.Parameter(torch.tensor([-1.0, 2.0])))
    with weight.hooks(fwd_hooks=[("hook_point", add_one)]):
        assert (-weight).tolist() == [2.0, -1.0]
        assert abs(weight).tolist() == [2.0, 3.0]
    assert (-weight).tolist() == [1.0, -2.0]


def test_an_operator_that_does_not_fit_is_pythons_own_error():
    weight = auto_hook(nn.Parameter(torch.ones(2)))
    with pytest.raises(TypeError, match="unsupported operand"):
        weight + "a"
    with pytest.raises(TypeError, match="unsupported operand"):
        "a" - weight


def test_each_parameter_of_an_operation_sees_it_once():
    one, other, seen = auto_hook(nn.Parameter(torch.ones(2))), auto_hook(nn.Parameter(torch.ones(2))), []
    one.hook_point.add_hook(lambda tensor, hook: seen.append("one"))
    other.hook_point.add_hook(lambda tensor, hook: seen.append("other"))
    one + other
    one * one
    assert seen == ["one", "other", "one"]
    one.unwrap()
    other.unwrap()


def test_a_hooked_parameter_has_the_interface():
    parameter = nn.Parameter(torch.ones(2))
    weight = HookedParameter(parameter)
    assert weight is parameter
    assert weight.param is parameter
    assert isinstance(weight, HookedParameter)
    assert isinstance(weight, nn.Parameter)
    assert repr(weight.hook_dict) == "{'hook_point': HookPoint()}"
    assert list(weight.mod_dict) == ["param", "hook_point"]
    assert weight.mod_dict["param"] is parameter
    assert weight.hook_point is weight.hook_dict["hook_point"]
    assert weight.hook_point.name == "hook_point"
    assert weight.setup() is None
    gradients = []
    weight.add_hook("hook_point", lambda gradient, hook: gradients.append(gradient), dir="bwd")
    (weight * 3).sum().backward()
    assert gradients[0].tolist() == [1.0, 1.0]
    assert weight.grad.tolist() == [3.0, 3.0]
    weight.add_hook("hook_point", add_one)
    point = weight.hook_point
    assert weight.unwrap() is parameter
    assert not point.has_hooks()
    assert type(parameter) is nn.Parameter
    assert not vars(parameter)
    assert (parameter * 3).tolist() == [3.0, 3.0]


def test_a_tensor_becomes_a_parameter_of_the_same_memory():
    tensor = torch.ones(2)
    weight = auto_hook(tensor)
    assert isinstance(weight, HookedParameter)
    assert weight.data_ptr() == tensor.data_ptr()
    assert not weight.requires_grad
    assert auto_hook(torch.ones(2, requires_grad=True)).requires_grad
    assert auto_hook(torch.arange(3)).dtype == torch.int64
    assert type(tensor) is torch.Tensor


def test_a_frozen_parameter_stays_frozen_and_an_optimizer_goes_on():
    frozen = auto_hook(nn.Parameter(torch.ones(2), requires_grad=False))
    assert not frozen.requires_grad
    assert not frozen.unwrap().requires_grad
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([parameter], lr=0.1)
    weight = auto_hook(parameter)
    (weight * 2).sum().backward()
    optimizer.step()
    assert weight.tolist() == parameter.tolist() != [1.0, 1.0]


def test_copies_of_a_hooked_parameter_have_a_point_of_their_own():
    weight = auto_hook(nn.Parameter(torch.ones(2), requires_grad=False))
    weight.add_hook("hook_point", add_one)
    stream = io.BytesIO()
    torch.save(weight, stream)
    stream.seek(0)
    loaded = torch.load(stream, weights_only=False)
    for copied in (copy.deepcopy(weight), pickle.loads(pickle.dumps(weight)), loaded):
        assert isinstance(copied, HookedParameter)
        assert not copied.requires_grad
        assert (copied * 1).tolist() == [1.0, 1.0]
        assert copied.data_ptr() != weight.data_ptr()
    assert (weight * 1).tolist() == [2.0, 2.0]
    weight.unwrap()


def test_a_hooked_parameter_may_be_part_of_a_model(x):
    class Holds(nn.Module):
        def __init__(self):
            super().__init__()
            self.W = auto_hook(nn.Parameter(torch.eye(4)))

        def forward(self, x):
            return x @ self.W

    model = Holds()
    assert list(model.state_dict()) == ["W"]
    assert type(model.state_dict()["W"]) is torch.Tensor
    with model.W.hooks(fwd_hooks=[("hook_point", add_one)]):
        assert model(x).equal(x + 1)
    hooked = auto_hook(model)
    with pytest.raises(hl.NeverFired, match=says("it is a HookedParameter")):
        hooked.run_with_hooks(x, fwd_hooks=[("W.hook_point", add_one)])
    assert isinstance(copy.deepcopy(hooked).W, HookedParameter)
    assert model.double().W.dtype == torch.float64
    assert isinstance(model.W, HookedParameter)


def test_a_hooked_parameter_is_freed_with_its_hooks():
    weight = auto_hook(nn.Parameter(torch.ones(2)))
    weight.add_hook("hook_point", add_one)
    gone = weakref.ref(weight)
    del weight
    assert gone() is None


# check_auto_hook.


class Broken(nn.Module):
    """A model that does not use the output of its layer `fc`, and never calls `unused`."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.unused = nn.Linear(4, 4)

    def forward(self, x):
        self.fc(x)  # The result is not used.
        return x * self.fc.bias.sum()


def test_what_fails_is_a_warning_at_the_line_of_the_caller():
    with pytest.warns(hl.HooklineWarning) as said:
        hooked = check_auto_hook(Broken, {"x": torch.randn(2, 4)})
    failed, idle = said
    assert (failed.filename, idle.filename) == (__file__, __file__)
    assert str(failed.message).startswith(
        "the following tests failed: Test failed: test_an_edit_changes_the_output with error: fc.hook_point the output"
    )
    assert str(idle.message).startswith("these hook points never fire with this input:\n  unused.hook_point: ")
    assert isinstance(hooked, HookedModule)
    assert type(hooked.unwrap()) is Broken


def test_what_fails_raises_if_strict():
    with pytest.raises(RuntimeError, match="^Tests failed: Test failed: test_an_edit_changes_the_output with error: "):
        check_auto_hook(Broken, {"x": torch.randn(2, 4)}, {}, strict=True)
    with pytest.raises(hl.HooklineError, match=says("Test failed", "test_backward_hooks_fire", "fc.hook_point")):
        check_auto_hook(Broken, {"x": torch.randn(2, 4)}, {}, True)


def test_classes_of_every_kind_can_be_checked():
    arguments = {"x": torch.randn(2, 4)}
    assert isinstance(check_auto_hook(Decorated, arguments, strict=True), Decorated)
    hooked = check_auto_hook(HookedClass(nn.Tanh), {"input": arguments["x"]}, strict=True)
    assert type(hooked.unwrap()) is nn.Tanh
    raw = nn.Tanh()
    assert check_auto_hook(raw, {"input": arguments["x"]}).unwrap() is raw


def test_a_model_that_fails_by_itself_raises_its_own_error():
    with pytest.raises(TypeError, match="unexpected keyword argument 'y'"):
        check_auto_hook(Decorated, {"y": torch.randn(2, 4)})


def test_checks_leave_random_numbers_alone():
    torch.manual_seed(3)
    expected = Mixed().W
    torch.manual_seed(3)
    hooked = check_auto_hook(Mixed, {"x": torch.randn(2, 4, generator=torch.Generator())}, {})
    assert hooked.W.equal(expected)


def test_the_checks_can_be_had_one_by_one():
    tests = {test.__name__: test for test in check.get_test_functions()}
    assert list(tests) == [
        "test_every_point_fires",
        "test_an_edit_changes_the_output",
        "test_backward_hooks_fire",
        "test_values_are_those_of_the_bare_model",
        "test_everything_is_restored",
    ]
    arguments = {"x": torch.randn(2, 4)}
    for test in tests.values():
        test(Mixed(), arguments)
    tests["test_everything_is_restored"](Broken(), arguments)
    with pytest.raises(RuntimeError, match="fc.hook_point the output stays the same under this change"):
        tests["test_an_edit_changes_the_output"](Broken(), arguments)
    assert test_the_readme_as_a_decorator in check.get_test_functions(sys.modules[__name__])


# utils.


def test_there_is_a_device():
    assert torch.zeros(1, device=utils.get_device()).device.type == utils.get_device()


def test_containers_are_iterated_and_made_anew():
    relu = nn.ReLU()
    listed, named = nn.ModuleList([relu, relu]), nn.ModuleDict({"a": relu})
    sequence = nn.Sequential()
    sequence.add_module("first", relu)
    assert list(utils.iterate_module(listed)) == [(0, relu), (1, relu)]
    assert list(utils.iterate_module(sequence)) == [(0, relu)]
    assert list(utils.iterate_module(named)) == [("a", relu)]
    for container, names in ((listed, ["0", "1"]), (sequence, ["first"]), (named, ["a"])):
        made = utils.process_container_module(container, lambda module: nn.Tanh())
        assert type(made) is type(container)
        assert list(made._modules) == names
        assert all(isinstance(module, nn.Tanh) for module in made._modules.values())
        assert relu in container._modules.values()
    for function in (utils.iterate_module, lambda given: utils.process_container_module(given, nn.Identity)):
        with pytest.raises(TypeError, match="ReLU is not a ModuleList, Sequential or ModuleDict"):
            function(relu)
