"""auto_hook on models and on classes: the model works as before, and has a hook point everywhere."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hookline as hl
from tests.errors.wording import says
from tests.support.models import mlp
from tests.support.points_models import AutoEncoder, Base, Decorated, add_one, double
from tests.support.quick_python import run_forked


class Derived(Decorated):
    def __init__(self):
        super().__init__()
        self.fc2 = nn.Linear(4, 4)

    def forward(self, x):
        return self.fc2(super().forward(x))


@pytest.fixture
def x():
    return torch.randn(2, 4)


def test_points_print_as_they_should():
    assert repr(hl.auto_hook(AutoEncoder()).hook_dict.items()) == (
        "dict_items([('hook_point', HookPoint()), ('W_enc.hook_point', HookPoint()), "
        "('W_dec.hook_point', HookPoint()), ('b_enc.hook_point', HookPoint()), ('b_dec.hook_point', HookPoint())])"
    )


def test_an_optimizer_made_before_goes_on_training(x):
    raw = AutoEncoder()
    optimizer = torch.optim.SGD(raw.parameters(), lr=0.1)
    before = raw.W_enc.detach().clone()
    hooked = hl.auto_hook(raw)
    hooked.run_with_hooks(x, fwd_hooks=[("W_enc.hook_point", add_one)]).sum().backward()
    optimizer.step()
    assert list(map(id, hooked.parameters())) == list(map(id, raw.parameters()))
    assert not raw.W_enc.equal(before)


def test_frozen_stays_frozen_and_ties_stay_tied(x):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.W_in = nn.Parameter(torch.randn(4, 4), requires_grad=False)
            self.W_out = self.W_in
            self.embed = nn.Embedding(4, 4)
            self.head = nn.Linear(4, 4)
            self.head.weight = self.embed.weight

        def forward(self, x):
            return self.head(x @ self.W_in @ self.W_out)

    raw = Tied()
    hooked, seen = hl.auto_hook(raw), []
    assert list(hooked.hook_dict) == ["hook_point", "W_in.hook_point", "embed.hook_point", "head.hook_point"]
    hooked.run_with_hooks(x, fwd_hooks=[("W_in.hook_point", lambda tensor, hook: seen.append(tensor))])
    assert len(seen) == 2
    assert not raw.W_in.requires_grad
    assert raw.W_in is raw.W_out
    assert raw.head.weight is raw.embed.weight
    assert len(list(hooked.parameters())) == len(list(raw.parameters())) == 3


def test_buffers_flags_and_state_are_the_models_own():
    class Model(AutoEncoder):
        def forward(self, x):
            return F.dropout(super().forward(x), training=self.training)

    raw = Model()
    hooked = hl.auto_hook(raw)
    assert list(hooked.state_dict()) == list(raw.state_dict()) == ["W_enc", "W_dec", "b_enc", "b_dec", "steps"]
    assert [name for name, _ in hooked.named_buffers()] == ["steps"]
    assert [name for name, _ in hooked.named_modules()] == [name for name, _ in raw.named_modules()]
    hooked.eval()
    assert not raw.training
    assert not hooked.training
    x = torch.randn(2, 4)
    assert hooked(x).equal(hooked(x))
    hooked.training = True
    assert raw.training
    hooked.double()
    assert raw.steps.dtype == hooked.W_enc.dtype == torch.float64
    hooked.to("meta")
    assert raw.steps.is_meta
    hooked.to_empty(device="cpu").load_state_dict(Model().double().state_dict())
    hooked.requires_grad_(False)
    assert not raw.W_enc.requires_grad
    hooked.W_enc = nn.Parameter(torch.zeros(4, 8).double())
    assert raw.W_enc.equal(torch.zeros(4, 8).double())
    del hooked.steps
    assert not list(raw.buffers())


def test_a_hooked_model_answers_as_the_model_does():
    raw = mlp()
    raw.note = "mine"
    hooked = hl.auto_hook(raw)
    assert (len(hooked), hooked.note, hooked[0], list(hooked)) == (3, "mine", raw[0], list(raw))
    assert isinstance(hooked, nn.Module)
    assert isinstance(hooked, hl.HookedModel)
    assert bool(hl.auto_hook(AutoEncoder()))
    assert "note" in dir(hooked)
    assert "run_with_cache" in dir(hooked)
    assert repr(hooked) == f"HookedModel({raw!r})"
    hooked[1] = nn.Tanh()
    assert isinstance(raw[1], nn.Tanh)
    with pytest.raises(AttributeError, match=says("object has no attribute", "Sequential", "absent")):
        hooked.absent
    with pytest.raises(TypeError, match="has no len"):
        len(hl.auto_hook(AutoEncoder()))


def test_hooks_of_others_on_the_model_are_called(x):
    raw = mlp()
    calls = []
    raw.register_forward_pre_hook(lambda module, args: calls.append("before"))
    raw.register_forward_hook(lambda module, args, output: calls.append("after"))
    hooked = hl.auto_hook(raw)
    hooked(x)
    hooked.run_with_cache(x)
    hooked.run_with_hooks(x, fwd_hooks=[("0.hook_point", add_one)])
    assert calls == ["before", "after"] * 3
    assert len(hl.attached(hooked)) == 2


def test_hookline_itself_works_on_a_hooked_model(x):
    hooked = hl.auto_hook(mlp())
    with hl.capture(hooked, "0", "", "2:input") as acts:
        output = hooked(x)
    assert acts[""].equal(output)
    assert acts["0"].equal(hooked[0](x))
    assert hl.run(hooked, x, patch={"1": 0.0}).equal(hooked[2].bias.expand(2, 2))
    assert str(hl.sites(hooked, "0")[0]) == "0"
    holder = nn.Sequential(hooked)
    assert [name for name, _ in holder.named_parameters()] == ["0.0.weight", "0.0.bias", "0.2.weight", "0.2.bias"]
    with hl.capture(holder, "0.1") as acts:
        assert holder(x).equal(output)
    assert "0.1" in acts


def test_unwrap_gives_the_untouched_model_back(x):
    raw = AutoEncoder()
    names, kind = dict(raw.__dict__), type(raw)
    parameters = dict(raw._parameters)
    expected = raw(x)
    hooked = hl.auto_hook(raw)
    hooked.add_hook(lambda name: True, add_one)
    hooked.add_perma_hook("W_enc.hook_point", add_one)
    assert not hooked(x).equal(expected)
    assert hooked.unwrap() is raw
    assert (raw.__dict__, type(raw)) == (names, kind)
    assert all(raw._parameters[name] is parameter for name, parameter in parameters.items())
    assert raw(x).equal(expected)
    assert not hl.attached(raw)
    assert hooked.unwrap() is raw
    with pytest.raises(hl.HooklineError, match=says("or is gone")):
        hooked.add_hook("W_enc.hook_point", add_one)
    assert hl.auto_hook(raw).hook_dict.keys() == {"hook_point", *(f"{name}.hook_point" for name in parameters)}


def test_hooking_twice_is_refused(x):
    raw = mlp()
    hooked = hl.auto_hook(raw)
    for again in (raw, hooked, torch.compile(raw, backend="eager"), Decorated()):
        with pytest.raises(hl.HooklineError, match=says("has hook points already")):
            hl.auto_hook(again)
    for again in (Decorated, Derived):
        with pytest.raises(hl.HooklineError, match=says("has hook points already its")):
            hl.auto_hook(again)
    hooked.unwrap()
    hl.auto_hook(raw)


@pytest.mark.parametrize("given", [3, int, torch.zeros(2), None], ids=["number", "class", "tensor", "nothing"])
def test_what_is_no_model_is_refused(given):
    with pytest.raises(hl.HooklineError, match=says("auto_hook takes a torch")):
        hl.auto_hook(given)


def test_a_scripted_model_is_refused_and_a_scripted_module_has_no_point():
    with pytest.raises(hl.HooklineError, match=says("compiled by torch")):
        hl.auto_hook(torch.jit.script(nn.ReLU()))
    model = hl.auto_hook(nn.Sequential(torch.jit.script(nn.Linear(4, 4)), nn.ReLU()))
    assert list(model.hook_dict) == ["hook_point", "1.hook_point"]


def test_copies_have_points_of_their_own_and_no_hooks(x):
    hooked = hl.auto_hook(AutoEncoder())
    expected = hooked(x)
    hooked.add_hook("W_enc.hook_point", add_one)
    stream = io.BytesIO()
    torch.save(hooked, stream)
    stream.seek(0)
    copies = [copy.deepcopy(hooked), pickle.loads(pickle.dumps(hooked)), torch.load(stream, weights_only=False)]
    hooked.reset_hooks()
    for copied in copies:
        assert copied(x).equal(expected)
        assert copied.W_enc is not hooked.W_enc
        assert not any(point.has_hooks() for point in copied.hook_points())
        assert copied.run_with_hooks(x, fwd_hooks=[("W_enc.hook_point", double)]).ne(expected).any()
    assert copy.copy(hooked).W_enc is hooked.W_enc

    class Copying(AutoEncoder):
        def __deepcopy__(self, memo):
            return Copying()

    assert isinstance(copy.deepcopy(hl.auto_hook(Copying())), hl.HookedModel)


def test_a_decorated_class_is_the_same_class(x):
    assert isinstance(Decorated, type)
    assert (Decorated.__name__, Decorated.__doc__, Decorated.scale) == ("Decorated", "What it is for.", 2)
    model = Decorated()
    assert isinstance(model, Decorated)
    assert isinstance(model, Base)
    assert model.describe() == "decorated base"
    assert list(model.hook_dict) == ["hook_point", "W.hook_point", "fc1.hook_point"]
    expected = model(x)
    assert list(model.state_dict()) == ["W", "fc1.weight", "fc1.bias"]
    assert model.run_with_hooks(x, fwd_hooks=[("W.hook_point", add_one)]).equal(expected + 1)
    output, cache = model.run_with_cache(x)
    assert output.equal(expected)
    assert cache["fc1.hook_point"].equal(model.fc1(x))
    model.add_hook("fc1.hook_point", add_one)
    assert not model(x).equal(expected)
    assert not Decorated().hook_dict["fc1.hook_point"].has_hooks()
    assert model.unwrap() is model
    assert model(x).equal(expected)
    assert not hl.attached(model)


def test_a_class_derived_from_a_decorated_one_has_points_of_its_own(x):
    model = Derived()
    assert list(model.hook_dict) == ["hook_point", "W.hook_point", "fc1.hook_point", "fc2.hook_point"]
    expected = model.fc2(model.fc1(x) @ model.W)
    assert model.run_with_hooks(x, fwd_hooks=[("hook_point", add_one)]).equal(expected + 1)


def test_copies_of_an_instance_have_points_of_their_own(x):
    model = Decorated()
    expected = model(x)
    point = model.hook_dict["fc1.hook_point"]
    model.add_hook("fc1.hook_point", add_one)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.copy(model)):
        assert type(copied) is Decorated
        assert copied.hook_dict["fc1.hook_point"] is not point
        assert not copied.hook_dict["fc1.hook_point"].has_hooks()
    assert copy.deepcopy(model)(x).equal(expected)
    model.reset_hooks()


def test_a_class_with_such_names_of_its_own_is_refused():
    class Busy(nn.Module):
        def hooks(self):
            return []

    class Busier(Busy):
        hook_dict = ()

    with pytest.raises(hl.HooklineError, match=says("of its own", "hook_dict", "hooks")):
        hl.auto_hook(Busier)
    model = Busy()
    assert model.hooks() == []
    with hl.auto_hook(model).hooks():
        pass


def test_an_instance_made_before_its_class_was_decorated_is_hooked_too(x):
    class Late(nn.Sequential):
        pass

    model = Late(nn.Linear(4, 4))
    assert hl.auto_hook(Late) is Late
    assert model.run_with_hooks(x, fwd_hooks=[("0.hook_point", add_one)]).equal(model(x) + 1)


def test_a_decorated_class_can_be_scripted():
    @hl.auto_hook
    class Plain(nn.Module):
        def forward(self, x):
            return x + 1

    assert torch.jit.script(Plain())(torch.zeros(1)) == 1


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_models_are_hooked(x):
    raw = AutoEncoder()
    expected = raw(x)
    compiled = torch.compile(raw, backend="eager")
    hooked = hl.auto_hook(compiled)
    assert hooked(x).equal(expected)
    for name in hooked.hook_dict:
        assert not hooked.run_with_hooks(x, fwd_hooks=[(name, add_one)]).equal(expected)
    _, cache = hooked.run_with_cache(x)
    assert set(cache) == set(hooked.hook_dict)
    assert hooked(x).equal(expected)
    assert hooked.unwrap() is compiled


@pytest.mark.process
def test_importing_hookline_imports_no_transformer_lens():
    code = "import sys, hookline; hookline.HookPoint(); print('transformer_lens' in sys.modules)"
    assert run_forked(code).stdout == "False\n"


def test_a_chain_of_methods_keeps_the_hook_points() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    hooked = hl.auto_hook(model)
    assert hooked.eval().double().requires_grad_(False).to(torch.float32).apply(lambda module: None) is hooked
    assert not model.training
    assert not model[0].weight.requires_grad
    assert list(hooked.eval().hook_dict) == ["hook_point", "0.hook_point", "1.hook_point"]


def test_a_class_of_ones_own_is_made_from_the_hooked_model() -> None:
    class Mine(hl.HookedModel):
        def count(self) -> int:
            return len(self.hook_dict)

    model = nn.Sequential(nn.Linear(2, 2))
    hooked = Mine(model)
    assert (hooked.count(), len(hooked), isinstance(hooked, Mine)) == (2, 1, True)
    assert isinstance(copy.deepcopy(hooked), Mine)
    with pytest.raises(hl.HooklineError, match=says("has hook points already")):
        hl.HookedModel(model)
    assert hooked.unwrap() is model
    with pytest.raises(hl.HooklineError, match=says("Mine takes a torch")):
        Mine(3)  # type: ignore[arg-type]


def test_the_classes_of_torch_are_left_alone() -> None:
    with pytest.raises(hl.HooklineError, match=says("Tanh is a torch class")):
        hl.auto_hook(nn.Tanh)


def test_a_block_of_hooks_that_is_never_entered_warns():
    model = hl.auto_hook(mlp())
    with pytest.warns(hl.HooklineWarning, match=says("hooks was never entered and")):
        model.hooks(fwd_hooks=[("0.hook_point", lambda tensor, hook: tensor * 0)])
    block = model.hooks(fwd_hooks=[("0.hook_point", lambda tensor, hook: tensor * 0)])
    with block:
        model(torch.ones(1, 4))
    del block

    @model.hooks(fwd_hooks=[("2.hook_point", lambda tensor, hook: tensor * 0)])
    def run():
        return model(torch.ones(1, 4))

    assert not run().any()
    assert not run().any()


@pytest.mark.parametrize("hook", [lambda tensor: tensor * 2, lambda tensor, point: tensor * 2])
def test_a_hook_function_that_can_not_be_called_says_how_it_is_called(hook):
    model = hl.auto_hook(mlp())
    with pytest.raises(hl.EditError, match=says("called with tensor", "0")):
        model.run_with_hooks(torch.ones(1, 4), fwd_hooks=[("0.hook_point", hook)])


def test_an_error_inside_a_hook_function_comes_through_as_it_is():
    def add(tensor, hook):
        return tensor + "a"

    model = hl.auto_hook(mlp())
    with pytest.raises(TypeError, match="unsupported|must be Tensor"):
        model.run_with_hooks(torch.ones(1, 4), fwd_hooks=[("0.hook_point", add)])


def test_a_name_and_a_function_in_the_wrong_order_are_refused():
    model = hl.auto_hook(mlp())
    with pytest.raises(hl.EditError, match=says("a hook is a function")):
        model.run_with_hooks(torch.ones(1, 4), fwd_hooks=[(lambda tensor, hook: None, "0.hook_point")])
    with pytest.raises(hl.EditError, match=says("a hook is a function")):
        model.add_hook(lambda tensor, hook: None, "0.hook_point")
