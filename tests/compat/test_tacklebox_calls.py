"""tacklebox: the arguments of its hooks, what they may return, and backward hooks compared with torch's own."""

from __future__ import annotations

import contextlib
import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hookline.compat.tacklebox.hook_management import HookManager
from tests.errors.wording import says
from tests.support.compat_models import Log

pytestmark = pytest.mark.filterwarnings("ignore:a HookManager is dropped:hookline.HooklineWarning")


# The arguments and results of forward hooks and pre-hooks


class Two(nn.Module):
    def forward(self, x, y=1.0, *rest, scale=1.0, **more):
        return x * scale, y


def test_inputs_are_those_given_by_position_and_outputs_all_outputs(x):
    manager, log, module = HookManager(), Log(), Two()
    manager.register_forward_hook(log.hook(), module)
    manager.register_forward_pre_hook(log.hook(count=2), module)
    module(x, 2.0, 3.0, scale=4.0, other=5.0)
    module(x=x)
    assert [given for _, given, *_ in log.seen] == [(x, 2.0, 3.0)] * 2 + [()] * 2
    assert log.seen[0][1][0] is x
    assert [len(outputs) for _, _, *outputs in log.seen if outputs for outputs in outputs] == [2, 2]


@pytest.mark.parametrize(
    ("args", "kwargs", "new"),
    [
        ((1.0,), {}, (7.0,)),
        ((1.0, 2.0), {}, (7.0, 8.0)),
        ((1.0,), {"scale": 2.0}, (7.0,)),
        ((1.0,), {"scale": 2.0}, (7.0, 8.0)),
        ((), {"scale": 2.0, "x": 1.0}, ()),
        ((1.0, 2.0, 3.0), {"scale": 4.0}, (7.0, 8.0, 9.0)),
        ((1.0, 2.0, 3.0, 4.0), {}, (7.0, 8.0, 9.0, 3.0)),
    ],
)
def test_what_a_pre_hook_returns_goes_to_the_same_arguments(args, kwargs, new):
    class Echo(nn.Module):
        def forward(self, x, y=0.0, *rest, scale=0.0):
            return x, y, *rest, scale

    manager, module = HookManager(), Echo()
    manager.register_forward_pre_hook(lambda module, inputs: new, module)
    assert module(*args, **kwargs) == Echo()(*new, **kwargs)


def test_a_pre_hook_of_a_module_that_takes_anything(x):
    class Anything(nn.Module):
        def forward(self, *args):
            return args

    manager, module = HookManager(), Anything()
    manager.register_forward_pre_hook(lambda module, inputs: tuple(2 * one for one in inputs), module)
    assert module() == ()
    assert module(1) == (2,)
    assert module((1,)) == ((1, 1),)
    assert module(1, 2) == (2, 4)


class Optional(nn.Module):
    def forward(self, x, y=0.0, z=0.0, /, *, scale=1.0):
        return (x + 10 * y + 100 * z) * scale


@pytest.mark.parametrize(
    ("args", "new"), [((1.0,), (1.0, 2.0)), ((1.0,), (1.0, 2.0, 3.0)), ((1.0, 2.0), (5.0,)), ((1.0, 2.0, 3.0), (4.0,))]
)
def test_a_pre_hook_may_add_an_input_or_leave_one_out(args, new):
    manager, module = HookManager(), Optional()
    manager.register_forward_pre_hook(lambda module, inputs: new, module)
    assert module(*args) == Optional()(*new)


@pytest.mark.parametrize("new", [(), (7.0,), (7.0, 8.0), (7.0, 8.0, 9.0, 3.0)])
def test_a_pre_hook_may_give_any_number_to_a_module_that_takes_any(new):
    class Echo(nn.Module):
        def forward(self, x=0.0, *rest):
            return x, rest

    for args in ((), (1.0,), (1.0, 2.0, 3.0)):
        manager, module = HookManager(), Echo()
        manager.register_forward_pre_hook(lambda module, inputs: new, module)
        assert module(*args) == Echo()(*new)


def test_a_pre_hook_that_gives_too_many_inputs_is_told_how_many_there_are():
    manager, module = HookManager(), Optional()
    manager.register_forward_pre_hook(lambda module, inputs: inputs * 4, module)
    with pytest.raises(TypeError, match="too many positional arguments"):
        module(1.0)


def test_a_pre_hook_of_a_module_that_takes_a_tuple_of_one():
    class First(nn.Module):
        def forward(self, pair):
            return pair[0]

    manager, module = HookManager(), First()
    manager.register_forward_pre_hook(lambda module, inputs: ((inputs[0][0] * 2,),), module)
    assert module((3,)) == 6


def test_a_pre_hook_leaves_what_is_given_by_keyword(x):
    manager, module = HookManager(), Two()
    manager.register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,), module)
    assert module(x, scale=2.0)[0].equal((x + 1) * 2)


def test_hooks_that_read_their_inputs_as_tensors_work_on_an_attention_with_a_cache(x):
    class Attention(nn.Module):
        def forward(self, x, mask, cache=None):
            return x * mask

    manager, module, seen = HookManager(), Attention(), []
    manager.register_forward_pre_hook(lambda module, inputs: tuple(one.to(torch.float64) for one in inputs), module)
    manager.register_forward_hook(lambda module, inputs, outputs: seen.append([one.dtype for one in inputs]), module)
    keep = {"retain_forward_cache": True}
    manager.register_backward_hook(lambda module, *given: seen.append(list(map(len, given))), module, **keep)
    module(x.requires_grad_(), torch.ones(3, 2), cache={}).sum().backward()
    assert seen == [[torch.float64] * 2, [2, 1, 2, 1]]


def test_hooks_are_chained_in_the_order_of_registration_also_after_being_switched(x):
    manager, module = HookManager(), nn.Identity()
    add = {"hook_fn_name": "add"}
    manager.register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,), a=module, **add)
    manager.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 2,), a=module)
    manager.register_forward_hook(lambda module, inputs, outputs: (outputs[0] + inputs[0],), a=module)
    manager.register_forward_hook(lambda module, inputs, outputs: None, a=module)
    manager.register_forward_hook(lambda module, inputs, outputs: (outputs[0] * 10,), a=module)
    expected = (x + 1) * 2 * 2 * 10
    assert module(x).equal(expected)
    manager.deactivate_hook_by_name("add[a]")
    manager.activate_hook_by_name("add[a]")
    assert module(x).equal(expected)
    manager.cleanup()
    manager.register_forward_hook(lambda module, inputs, outputs: (outputs[0] + 1,), a=module, activate=False, **add)
    manager.register_forward_hook(lambda module, inputs, outputs: (outputs[0] * 2,), a=module)
    manager.activate_hook_by_name("add[a]")
    assert module(x).equal((x + 1) * 2)


def test_what_is_no_tuple_is_refused(x):
    for register, message in (
        ("register_forward_pre_hook", says("when altering module inputs")),
        ("register_forward_hook", says("when altering module outputs")),
    ):
        manager, module = HookManager(), nn.Identity()
        getattr(manager, register)(lambda module, inputs, *outputs: list(inputs), module)
        with pytest.raises(AssertionError, match=message):
            module(x)


def test_a_tuple_of_another_length_is_refused_where_one_value_is_given(x):
    manager, module = HookManager(), nn.Identity()
    manager.register_forward_hook(lambda module, inputs, outputs: outputs * 2, module)
    with pytest.raises(ValueError, match=says("outputs returned for", 2, 1)):
        module(x)


class Pair(NamedTuple):
    one: Any
    two: Any


@pytest.mark.parametrize("output", [[1, 2], {"a": 1}, None, 3, "text"])
def test_outputs_of_any_kind_are_in_a_tuple(output):
    class Gives(nn.Module):
        def forward(self):
            return output

    manager, log, module = HookManager(), Log(), Gives()
    manager.register_forward_hook(log.hook("f"), module)
    manager.register_backward_hook(log.hook("b"), module)
    assert module() is output
    assert log.seen == [("f", (), (output,))]
    manager.register_forward_hook(lambda module, inputs, outputs: ("new",), module)
    assert module() == "new"


def test_a_model_output_and_a_named_tuple_keep_their_kind(x):
    transformers = pytest.importorskip("transformers")
    given = transformers.modeling_outputs.BaseModelOutput(last_hidden_state=x)
    for output, kind in ((given, type(given)), (Pair(x, x), Pair), (torch.max(x, 0), torch.return_types.max)):

        class Gives(nn.Module):
            def forward(self, output):
                return output

        manager, log, module = HookManager(), Log(), Gives()
        manager.register_forward_hook(log.hook(), module)
        manager.register_forward_hook(lambda module, inputs, outputs: tuple(outputs), module)
        assert type(module(output)) is kind
        assert len(log.seen[0][2]) == (1 if kind is type(given) else 2)


def test_a_hook_may_change_the_shape_and_may_write_in_place(x):
    manager, module = HookManager(), nn.Identity()
    manager.register_forward_hook(lambda module, inputs, outputs: (outputs[0][:1],), module, hook_fn_name="cut")
    assert module(x).shape == (1, 2)
    manager.remove_hook_function_by_name("cut")

    def zero(module, inputs, outputs):
        outputs[0].zero_()

    manager.register_forward_hook(zero, module)
    assert not module(x.clone()).any()


def test_an_exception_in_a_hook_comes_through_and_leaves_the_manager_usable(net, x):
    manager = HookManager()

    def fails(module, inputs, outputs):
        raise LookupError("mine")

    manager.register_forward_hook(fails, a=net[0], activate=False)
    with pytest.raises(LookupError, match="mine"), manager.hook_all_context():
        net(x)
    assert not manager.is_module_hooked(net[0])
    net(x)


# Backward hooks


def gradients(module: nn.Module, run: Callable[[], Tensor]) -> tuple[list[Any], list[Any]]:
    """Return the gradients that torch's own hook and the manager's hook get, in one backward pass each."""
    torchs: list[Any] = []
    handle = module.register_full_backward_hook(lambda module, grad_in, grad_out: torchs.append((grad_in, grad_out)))
    run().backward()
    handle.remove()
    manager, log = HookManager(), Log()
    manager.register_backward_hook(log.hook(), module)
    run().backward()
    manager.cleanup()
    return torchs, [tuple(one[1:]) for one in log.seen]


def same(torchs: list[Any], ours: list[Any]) -> bool:
    pairs = [pair for (a, b), (c, d) in zip(torchs, ours, strict=True) for pair in zip((*a, *b), (*c, *d), strict=True)]
    return all(one is other is None or one.equal(other) for one, other in pairs)


def test_gradients_are_tuples_that_match_the_inputs_and_outputs(x):
    manager, log, module = HookManager(), Log(), Two()
    manager.register_backward_hook(log.hook(), module)
    other = torch.randn(3, 2, requires_grad=True)
    module(x.requires_grad_(), 2.0, None, other, scale=torch.tensor(3.0, requires_grad=True))[0].sum().backward()
    ((_, grad_in, grad_out),) = log.seen
    assert type(grad_in) is type(grad_out) is tuple
    assert [None if one is None else tuple(one.shape) for one in grad_in] == [(3, 2), None, None, None]
    assert grad_out[0].equal(torch.ones(3, 2))
    assert grad_out[1] is None


def test_grad_in_is_the_part_that_came_through_the_module():
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def forward(self, x):
            x = x * 1
            return (x + self.inner(x)).sum()

    net, x = Residual(), torch.randn(3, 2, requires_grad=True)
    torchs, ours = gradients(net.inner, lambda: net(x))
    assert same(torchs, ours)
    assert ours[0][0][0].allclose(net.inner.weight.sum(0).expand(3, 2))


def test_several_forwards_without_a_backward_are_fine(net, x):
    manager, log = HookManager(), Log()
    manager.register_forward_hook(log.hook("forward"), a=net[0])
    manager.register_backward_hook(log.hook("backward"), a=net[0])
    losses = [net(x).sum() for _ in range(3)]
    assert log.names == ["forward"] * 3
    torch.stack(losses[1:]).sum().backward()
    assert log.names == ["backward"] * 2


def test_a_module_that_is_called_twice_fires_once_for_each_call(x):
    layer = nn.Linear(2, 2)
    torchs, ours = gradients(layer, lambda: layer(layer(x.requires_grad_()).relu()).sum())
    assert len(ours) == 2
    assert same(torchs, ours)


def test_an_unused_parameter_changes_nothing(x):
    layer = nn.Linear(2, 2)
    layer.unused = nn.Parameter(torch.ones(1))
    torchs, ours = gradients(layer, lambda: layer(x.requires_grad_()).sum())
    assert len(ours) == 1
    assert same(torchs, ours)


def test_without_gradients_of_inputs_those_of_outputs_come(x):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Full backward hook is firing")  # A warning of torch's own hook.
        torchs, ours = gradients(layer := nn.Linear(2, 2), lambda: layer(x).sum())
    assert ours[0][0] == (None,)
    assert same(torchs, ours)
    assert layer.weight.grad is not None


def test_a_second_backward_fires_again(net, x):
    manager, log = HookManager(), Log()
    manager.register_backward_hook(log.hook("b"), a=net[0])
    loss = net(x).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert log.names == ["b", "b"]


def test_modules_that_write_in_place_are_fine(x):
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True))
    manager, log = HookManager(), Log()
    manager.register_backward_hook(log.hook(), net[1], net[0])
    net(x.requires_grad_()).sum().backward()
    (_, grad_in, grad_out), (_, _, below) = log.seen
    assert grad_out[0].equal(torch.ones(3, 2))
    assert grad_in[0].equal((net(x) > 0).float())
    assert below[0].equal(grad_in[0])


@pytest.mark.parametrize("requires_grad", [True, False])
def test_a_container_and_its_last_child_have_their_gradients_before_a_module_that_writes_in_place(x, requires_grad):
    net = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), nn.ReLU(inplace=True))
    manager, seen = HookManager(), {}
    manager.register_backward_hook(
        lambda module, grad_in, grad_out: seen.update({module.name: grad_out[0]}), **dict(net.named_modules())
    )
    output = net(x.requires_grad_(requires_grad))
    output.sum().backward()
    assert set(seen) == {"", "0", "0.0", "0.1", "1"}
    assert seen["0"].equal(seen["0.1"])
    assert seen["0"].equal((output > 0).float())


def test_the_forward_cache_comes_with_the_gradients(net, x):
    manager, seen = HookManager(), []

    def hook(module, grad_in, grad_out, inputs, outputs):
        seen.append((grad_in, grad_out, inputs, outputs))

    manager.register_backward_hook(hook, net[0], retain_forward_cache=True)
    manager.register_hook("backward_hook", hook, net[2], retain_forward_cache=True)
    output = net(x.requires_grad_())
    output.sum().backward()
    (_, _, _, (last,)), (grad_in, grad_out, inputs, outputs) = seen
    assert last.equal(output)
    assert (len(grad_in), len(grad_out)) == (1, 1)
    assert inputs[0].equal(x)
    assert outputs[0].equal(net[0](x))


def test_the_forward_cache_is_from_before_anything_was_overwritten(x):
    class Nested(nn.Module):
        def forward(self, pair):
            return {"sum": [pair[0] + pair["b"]], "text": ("a", pair["b"] * 1)}

    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True))
    manager, seen, nested = HookManager(), [], Nested()

    def hook(module, grad_in, grad_out, inputs, outputs):
        seen.append((inputs[0], outputs[0]))

    manager.register_backward_hook(hook, net[0], nested, retain_forward_cache=True)
    expected = nn.functional.linear(x, net[0].weight, net[0].bias)
    assert expected.min() < 0
    net(x).sum().backward()
    assert seen[0][1].equal(expected)
    given = {0: torch.ones(2), "b": torch.ones(2, requires_grad=True) * 3}
    output = nested(given)
    output["sum"][0].zero_()
    output["text"][1].mul_(2).sum().backward()
    inputs, outputs = seen[1]
    assert inputs["b"].tolist() == [3, 3]
    assert outputs["sum"][0].tolist() == [4, 4]
    assert outputs["text"][0] == "a"
    assert outputs["text"][1].tolist() == [3, 3]
    assert not any(one.requires_grad for one in (inputs["b"], outputs["sum"][0], outputs["text"][1]))


@pytest.mark.parametrize("cache", [True, False])
def test_the_graph_of_several_inputs_holds_neither_itself_nor_the_module(cache):
    class Both(nn.Module):
        def forward(self, a, b):
            return a * b, a + b

    gc.disable()
    try:
        manager, module = HookManager(), Both()
        manager.register_backward_hook(lambda *_: None, a=module, retain_forward_cache=cache)
        one = torch.ones(2, requires_grad=True) * 2
        product, total = module(one, one)
        gone = [weakref.ref(product), weakref.ref(module)]
        (product + total).sum().backward(retain_graph=True)
        manager.cleanup()
        del module
        assert gone[1]() is None
        del product, total, one
        assert gone[0]() is None
    finally:
        gc.enable()


def test_a_backward_hook_may_write_into_the_gradients_it_is_given(x):
    """The original also passes clones. The gradient of a sum is one number, expanded, and can't be written into."""

    class Nested(nn.Module):
        def forward(self, pair):
            return {"sum": pair[0] * 2 + pair[1], "all": (pair[0] * 3,)}

    manager, seen, module = HookManager(), [], Nested()

    def hook(module, grad_in, grad_out):
        grad_out[0]["sum"].mul_(10)
        grad_out[0]["all"][0].zero_()
        grad_in[0][0].neg_()
        seen.append((grad_in[0][0], grad_out[0]["sum"]))

    manager.register_backward_hook(hook, module)
    output = module([x.requires_grad_(), torch.ones(3, 2, requires_grad=True)])
    (output["sum"].sum() + output["all"][0].sum()).backward()
    assert seen[0][0].mean().item() == -5
    assert seen[0][1].mean().item() == 10
    assert x.grad.mean().item() == 5


def test_gradients_are_those_of_what_other_hooks_made_of_inputs_and_outputs(x):
    manager, seen, module = HookManager(), [], nn.Identity()
    manager.register_backward_hook(
        lambda module, *values: seen.extend(value[0] for value in values), a=module, retain_forward_cache=True
    )
    manager.register_forward_hook(lambda module, inputs, outputs: (outputs[0] * 2,), a=module)
    manager.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 5,), a=module)
    (module(x.requires_grad_()) * 7).sum().backward()
    assert [one.mean().item() for one in seen[:2]] == pytest.approx([14, 7])
    assert seen[2].equal(x * 5)
    assert seen[3].equal(x * 5 * 2)
    assert x.grad.mean().item() == pytest.approx(70)


def test_gradients_are_those_of_what_hooks_made_that_were_added_while_it_rested(x):
    manager, seen, module = HookManager(), [], nn.Identity()
    manager.register_backward_hook(
        lambda module, grad_in, grad_out: seen.append(grad_out[0].mean().item()), a=module, activate=False
    )
    manager.register_forward_hook(lambda module, inputs, outputs: (outputs[0] * 2,), a=module)
    with manager.hook_all_context(category="backward_hook"):
        (module(x.requires_grad_()) * 7).sum().backward()
    manager.activate_all_hooks()
    (module(x) * 7).sum().backward()
    assert seen == [7, 7]


def test_lists_and_dicts_have_gradients(x):
    class Nested(nn.Module):
        def forward(self, pair):
            return {"sum": pair[0] + pair[1], "text": "a"}

    manager, log, module = HookManager(), Log(), Nested()
    manager.register_backward_hook(log.hook(), module)
    module([x.requires_grad_(), torch.randn(3, 2, requires_grad=True)])["sum"].sum().backward()
    ((_, grad_in, grad_out),) = log.seen
    assert grad_in[0][0].equal(torch.ones(3, 2))
    assert grad_out[0]["sum"].equal(torch.ones(3, 2))


def test_without_grad_mode_nothing_comes(net, x):
    manager, log = HookManager(), Log()
    manager.register_backward_hook(log.hook(), net[0])
    with torch.no_grad():
        net(x)
    with torch.inference_mode():
        net(x)
    assert not log.seen


@pytest.mark.parametrize("end", ["cleanup", "deactivate_all_hooks", "drop", "context"])
def test_a_hook_that_is_off_or_gone_when_the_gradient_comes_is_not_called(net, x, end):
    manager, log = HookManager(), Log()
    manager.register_backward_hook(log.hook(), a=net[0], activate=end != "context")
    with manager.hook_all_context() if end == "context" else contextlib.nullcontext():
        loss = net(x.requires_grad_()).sum()
    if end == "drop":
        del manager
    elif end != "context":
        getattr(manager, end)()
    loss.backward()
    assert not log.seen
    assert net[0].weight.grad is not None
    x.grad = None
    (x * 2).sum().backward()  # No hook is left on a leaf.
    assert x.grad.equal(torch.full((3, 2), 2.0))


def test_what_a_backward_hook_returns_changes_nothing(net, x):
    net(x).sum().backward()
    expected = net[0].weight.grad.clone()
    net.zero_grad()
    manager = HookManager()
    manager.register_backward_hook(lambda module, grad_in, grad_out: (torch.zeros(3, 2),), net[2])
    net(x).sum().backward()
    assert net[0].weight.grad.equal(expected)


def test_parameters_and_optimizers_are_untouched(net, x):
    net[0].weight.requires_grad_(False)
    parameters = dict(net.named_parameters())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    manager = HookManager()
    manager.register_forward_pre_hook(lambda module, inputs: inputs, *net)
    manager.register_backward_hook(Log().hook(), *net)
    net(x).sum().backward()
    optimizer.step()
    assert net[0].weight.grad is None
    assert all(one is parameters[name] for name, one in net.named_parameters())
    assert list(net.state_dict()) == list(parameters)
    manager.cleanup()


def test_a_checkpointed_module_gives_its_gradients_once(x):
    layer = nn.Linear(2, 2)
    manager, log = HookManager(), Log()
    manager.register_backward_hook(log.hook("b"), layer)
    checkpoint(layer, x.requires_grad_(), use_reentrant=False).sum().backward()
    assert log.names == ["b"]


def test_a_hook_on_one_module_may_call_another_that_is_hooked(x):
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    manager = HookManager()
    manager.register_forward_hook(lambda module, inputs, outputs: (other(inputs[0]),), one=one)
    manager.register_forward_hook(lambda module, inputs, outputs: (outputs[0] * 0,), other=other)
    assert not one(x).any()


def test_a_hook_may_call_its_own_module(x):
    module, log, manager = nn.Linear(2, 2), Log(), HookManager()
    manager.register_forward_hook(lambda module, inputs, outputs: (module(module(inputs[0])),), a=module)
    manager.register_forward_hook(log.hook("f"), a=module)
    assert module(x).allclose(type(module).forward(module, type(module).forward(module, x)))
    assert log.names == ["f"]


def test_a_forward_that_is_called_by_itself_calls_hooks_too(x):
    module, log, manager = nn.ReLU(), Log(), HookManager()
    manager.register_forward_hook(log.hook("f"), a=module)
    module.forward(x)  # Bypasses the hooks of the original, and torch's own.
    assert log.names == ["f"]


def test_a_gradient_that_stops_at_the_output_of_a_module_is_seen(x):
    module, log, manager = nn.Linear(2, 2), Log(), HookManager()
    manager.register_backward_hook(log.hook(), a=module)
    output = module(x.requires_grad_())
    torch.autograd.grad(output.sum(), output)
    assert [(grad_in, grad_out[0].mean().item()) for _, grad_in, grad_out in log.seen] == [((None,), 1)]


def test_one_tensor_given_twice_has_a_gradient_for_each_place(x):
    class Uses(nn.Module):
        def forward(self, a, b):
            return a * 2 + b * 3

    manager, log, module = HookManager(), Log(), Uses()
    manager.register_backward_hook(log.hook(), module)
    module(x.requires_grad_(), x).sum().backward()
    assert [one.mean().item() for one in log.seen[0][1]] == [2, 3]  # The original gives 5 and 5, the gradient of x.


@pytest.mark.gpu
def test_on_a_gpu_a_context_lets_backward_hooks_act_on_the_threads_of_autograd(net, x):
    net, x = net.cuda(), x.cuda().requires_grad_()
    manager, log = HookManager(), Log()
    manager.register_backward_hook(log.hook("b"), *net, activate=False)
    with manager.hook_all_context():
        net(x).sum().backward()
    net(x).sum().backward()
    assert log.names == ["b"] * 3
