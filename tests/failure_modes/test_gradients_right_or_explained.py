"""Captured gradients are right, and an error explains each gradient that does not arrive."""

from __future__ import annotations

import dataclasses
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hookline as hl
from tests.errors.wording import says
from tests.support.models import Returns, loss_of, mlp
from tests.support.quick_python import quick_python
from tests.support.running import python


@dataclasses.dataclass
class Output:
    logits: Tensor
    hidden: list[Tensor]
    loss: Tensor | None = None


class Residual(nn.Module):
    """Calls its layers by keyword, overwrites a value in place, and has a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(input=x)
        hidden.relu_()
        return hidden + self.second(input=hidden)


def test_an_activation_in_place_after_the_module_is_no_obstacle() -> None:
    """D01"""
    model, x = Residual(), torch.randn(2, 3)
    first = model.first(x)
    hidden = torch.relu(first)
    second = model.second(hidden)
    expected = torch.autograd.grad(loss_of(hidden + second), [first, second])
    with hl.capture(model, "first:grad_output", "second:grad_output") as acts:
        loss_of(model(x)).backward()
    torch.testing.assert_close(acts["first:grad_output"], expected[0])
    torch.testing.assert_close(acts["second:grad_output"], expected[1])


def test_following_a_gradient_does_not_change_the_graph() -> None:
    """D02"""
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), torch.randn(2, 3)
    seen: list[Tensor] = []
    handle = model[0].register_forward_hook(lambda module, args, output: seen.append(output))
    plain = model(x)
    with hl.capture(model, "0:grad_output", ":grad_output"):
        watched = model(x)
    handle.remove()
    assert [type(tensor.grad_fn) for tensor in (seen[1], watched)] == [
        type(tensor.grad_fn) for tensor in (seen[0], plain)
    ]
    assert watched.equal(plain)
    assert not watched._is_view()


def test_gradients_are_listed_by_forward_call_and_sites_in_the_order_they_fired() -> None:
    """D03"""
    model, x = mlp(), torch.randn(2, 4)
    with hl.capture(model, "0:grad_output", "2:grad_output", keep="all") as acts:
        (model(x).sum() + 10 * model(x * 2).sum()).backward()
    assert list(acts) == ["2:grad_output", "0:grad_output"]
    assert [gradient[0, 0].item() for gradient in acts.calls("2:grad_output")] == [1.0, 10.0]
    assert acts["2:grad_output"][0, 0].item() == 10.0


class Mixed(nn.Module):
    def forward(self, indices: Tensor, *, values: Tensor, frozen: Tensor, scale: float) -> Tensor:
        return values[indices] * frozen * scale


def test_inputs_without_a_gradient_are_told_apart_from_those_with_one() -> None:
    """D04"""
    model = nn.ModuleList([Mixed()])
    values = torch.ones(3, requires_grad=True) * 1
    call = {"values": values, "frozen": torch.full((2,), 2.0), "scale": 3.0}
    with hl.capture(model, "0:grad_inputs", '0:grad_inputs["values"]') as acts:
        model[0](torch.tensor([0, 2]), **call).sum().backward()
    gradients = acts["0:grad_inputs"]
    assert gradients["values"].tolist() == [6.0, 0.0, 6.0]
    assert (gradients["indices"], gradients["frozen"]) == (None, None)
    for site, why in (
        ("0:grad_input", "torch.int64"),
        ('0:grad_inputs["frozen"]', "requires grad"),
        ('0:grad_inputs["scale"]', "tensor"),
    ):
        with hl.capture(model, site), pytest.raises(hl.NeverFired, match=says("can get no gradient because", why)):
            model[0](torch.tensor([0, 2]), **call)


@pytest.mark.parametrize(
    ("make", "read"),
    [
        (lambda y: {"a": {"b": y}}, lambda value: value["a"]["b"]),
        (lambda y: Output(y, [y * 2]), lambda value: value.logits),
        (lambda y: [[y], "text"], lambda value: value[0][0]),
        (lambda y: (None, y), lambda value: value[1]),
    ],
    ids=["dict", "dataclass", "list", "tuple"],
)
def test_the_gradient_of_a_nested_output_arrives_in_its_structure(
    make: Callable[[Tensor], Any], read: Callable[[Any], Tensor]
) -> None:
    """D05"""
    model = nn.Sequential(nn.Linear(3, 3), Returns(make), Returns(lambda value: read(value) * 3))
    with hl.capture(model, "1:grad_output") as acts:
        model(torch.randn(2, 3)).sum().backward()
    assert read(acts["1:grad_output"]).equal(torch.full((2, 3), 3.0))
    assert type(acts["1:grad_output"]) is type(make(torch.ones(1)))
    assert "(2, 3)" in repr(acts)
    assert "(0,)" not in repr(acts)


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda x: x.argmax(-1), "torch.int64"),
        (lambda x: x.detach(), "requires grad"),
        (lambda x: None, "no tensor"),
    ],
    ids=["argmax", "detached", "nothing"],
)
def test_an_output_without_gradient_is_named_in_the_forward(function: Callable[[Tensor], Any], why: str) -> None:
    """D06"""
    model, x = nn.Sequential(nn.Linear(3, 3), Returns(function)), torch.randn(2, 3)
    with (
        hl.capture(model, "1:grad_output"),
        pytest.raises(hl.NeverFired, match=says("can get no gradient because", "1:grad_output", why)),
    ):
        model(x)
    with (
        hl.capture(model, "*:grad_output") as acts,
        pytest.warns(hl.HooklineWarning, match=says("can get no gradient because", "1:grad_output")),
    ):
        model(x)
    with pytest.raises(hl.NotCaptured, match=why):
        acts["1:grad_output"]


def test_a_frozen_model_is_named_in_the_forward() -> None:
    """D06"""
    model = mlp().requires_grad_(False)
    with (
        hl.capture(model, "0:grad_output"),
        pytest.raises(hl.NeverFired, match=says("can get no gradient", "requires_grad_()")),
    ):
        model(torch.randn(2, 4))


def test_a_second_order_pass_does_not_overwrite_the_first() -> None:
    """D07"""
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), torch.randn(2, 3, requires_grad=True)
    with hl.capture(model, "0:grad_output", keep="all") as acts:
        gradient = torch.autograd.grad(loss_of(model(x)), x, create_graph=True)[0]
        first = acts["0:grad_output"].clone()
        loss_of(gradient).backward()
    kept = acts.calls("0:grad_output")
    assert len(kept) == 2
    assert kept[0].equal(first)
    assert not kept[1].equal(first)
    assert not any(gradient.requires_grad for gradient in kept)


def test_each_backward_pass_over_one_graph_is_a_call_of_its_own() -> None:
    """D08"""
    model = mlp()
    with hl.capture(model, "2:grad_output", keep="all") as acts:
        output = model(torch.randn(2, 4)).sum()
        for factor in (1, 2, 3):
            (output * factor).backward(retain_graph=True)
    assert [gradient[0, 0].item() for gradient in acts.calls("2:grad_output")] == [1.0, 2.0, 3.0]
    assert acts["2:grad_output"][0, 0].item() == 3.0


def test_gradients_and_their_edits_still_act_when_the_block_is_over() -> None:
    """D09"""
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)), torch.randn(2, 3)
    with hl.capture(model, "1:grad_output") as acts, hl.edit(model, "1:grad_output", lambda gradient: gradient * 5):
        output = model(x)
    with pytest.raises(hl.NotCaptured, match=says("no gradient has reached", "1:grad_output")):
        acts["1:grad_output"]
    output.sum().backward()
    assert acts["1:grad_output"].tolist() == [[1.0], [1.0]]
    assert model[1].bias.grad is not None
    assert model[1].bias.grad.item() == 10.0
    assert len(hl.attached(model)) == 0


def test_a_gradient_asked_for_between_forward_and_backward_is_said_to_be_missing() -> None:
    """D09"""
    model = mlp()
    output = model(torch.randn(2, 4)).sum()
    with pytest.raises(hl.NeverFired, match=says("run the forward inside the", "0:grad_output")):
        with hl.capture(model, "0:grad_output") as acts:
            output.backward()
    with pytest.raises(hl.NotCaptured, match=says("run the forward inside the", "0:grad_output")):
        acts["0:grad_output"]


@pytest.mark.process
def test_a_missing_gradient_is_reported_also_if_the_gradients_of_the_step_before_are_freed_first() -> None:
    """D09"""
    code = """
import torch, hookline as hl
from torch import nn

x, said = torch.randn(2, 4), 0
for _ in range(100):  # Python may give the new gradient the id of the one that was freed.
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    model(x).sum().backward()
    loss = model(x).sum()
    try:
        with hl.edit(model, "0:grad_output", torch.zeros_like):
            model.zero_grad()
            loss.backward()
    except hl.NeverFired:
        said += 1
print(said)
"""
    # In a separate process, as the fixtures here would keep the gradients alive.
    assert python("-c", code, command=quick_python()) == "100\n"


def test_a_backward_that_adds_to_gradients_is_warned_of_as_it_could_be_clipping() -> None:
    """D09"""
    model, x = mlp(), torch.randn(2, 4)
    model(x).sum().backward()
    loss = model(x).sum()
    with pytest.warns(hl.HooklineWarning, match=says("got no gradient", "0:grad_output")):
        with hl.edit(model, "0:grad_output", torch.zeros_like):
            loss.backward()
    with pytest.warns(hl.HooklineWarning, match=says("got no gradient")):
        with hl.capture(model, "0:grad_output"):
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)


class Recomputed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputed_forward_is_captured_once(reentrant: bool) -> None:
    """D10"""
    model, x = Recomputed(reentrant), torch.randn(2, 3, requires_grad=True)
    hooks = hl.Hooks(model)
    acts = hooks.capture("body.0", "body.0:grad_output", keep="all")
    for _ in range(2):
        loss_of(model(x)).backward()
    hooks.remove()
    assert (len(acts.calls("body.0")), len(acts.calls("body.0:grad_output"))) == (2, 2)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_patch_that_was_left_before_the_backward_still_holds_on_the_recomputation(reentrant: bool) -> None:
    """D11"""
    model, x = Recomputed(reentrant), torch.randn(2, 3, requires_grad=True)
    hidden = model.body[0](x) * 3
    expected = torch.autograd.grad(loss_of(torch.tanh(hidden)), [x, model.body[0].weight])
    with hl.edit(model, "body.0", lambda value: value * 3):
        loss = loss_of(model(x))
    loss.backward()
    torch.testing.assert_close([x.grad, model.body[0].weight.grad], list(expected))


@pytest.mark.parametrize("reentrant", [False, True])
def test_an_edit_of_one_call_is_replayed_at_that_call(reentrant: bool) -> None:
    """D12"""
    model, x = Recomputed(reentrant), torch.randn(2, 3, requires_grad=True)
    first = torch.tanh(model.body[0](x))
    second = torch.tanh(model.body[0](first) * 3)
    expected = torch.autograd.grad(loss_of(second), [x, model.body[0].weight])
    with hl.edit(model, "body.0#1", lambda value: value * 3):
        loss = loss_of(model(model(x)))
        loss.backward()
    torch.testing.assert_close([x.grad, model.body[0].weight.grad], list(expected))


@pytest.mark.parametrize(
    "write", [Tensor.zero_, lambda t: t.data.zero_(), lambda t: t.numpy().fill(0)], ids=["in place", ".data", "numpy"]
)
def test_writing_into_a_captured_value_does_not_reach_the_backward(write: Callable[[Tensor], Any]) -> None:
    """D14"""
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Sigmoid(), nn.Linear(3, 1)), torch.randn(2, 3)
    expected = torch.autograd.grad(loss_of(model(x)), list(model.parameters()))
    with hl.capture(model, "*", "*:input") as acts:
        loss = loss_of(model(x))
    for value in acts.values():
        write(value)
    loss.backward()
    torch.testing.assert_close([parameter.grad for parameter in model.parameters()], list(expected))


def test_a_patch_cuts_the_gradient_upstream_and_what_was_asked_there_says_so() -> None:
    """D15"""
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)), torch.randn(2, 3)
    given = torch.randn(2, 3, requires_grad=True)
    with hl.capture(model, "0:grad_output") as acts, hl.patch(model, {"1": given}):
        loss_of(model(x)).backward()
    assert model[0].weight.grad is None
    with pytest.raises(hl.NotCaptured, match=says("no gradient has reached", "0:grad_output")):
        acts["0:grad_output"]
    expected = torch.autograd.grad(loss_of(model[2](given)), given)[0]
    torch.testing.assert_close(given.grad, expected)


def test_a_patched_part_lets_the_gradient_of_the_rest_through() -> None:
    """D15"""
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), torch.randn(2, 3)
    with hl.capture(model, "0:grad_output") as acts, hl.patch(model, {"0[:, 0]": 0.0}):
        model(x).sum().backward()
    assert acts["0:grad_output"][:, 0].tolist() == [0.0, 0.0]
    assert acts["0:grad_output"][:, 1:].all()


def test_a_backward_for_some_inputs_gives_the_gradients_on_their_way_and_no_others() -> None:
    """D16"""
    model, x = mlp(), torch.randn(2, 4)
    with hl.capture(model, "0:grad_output", "2:grad_output") as acts:
        loss_of(model(x)).backward(inputs=[model[2].weight])
    assert acts["2:grad_output"].shape == (2, 2)
    with pytest.raises(hl.NotCaptured, match=says("no gradient has reached", "0:grad_output")):
        acts["0:grad_output"]
    with hl.capture(model, "0:grad_output") as acts:
        torch.autograd.grad(loss_of(model(x)), model[0].weight)
    assert acts["0:grad_output"].shape == (2, 8)


def test_a_gradient_belongs_to_the_value_as_it_passed_not_as_it_was_overwritten() -> None:
    """D17"""
    model = nn.Sequential(nn.Linear(3, 3), Returns(lambda y: y.mul_(4)), Returns(lambda y: y.mul_(5)))
    with hl.capture(model, "0:grad_output", "1:grad_output", "2:grad_output") as acts:
        model(torch.randn(2, 3)).sum().backward()
    assert [acts[site][0, 0].item() for site in ("0:grad_output", "1:grad_output", "2:grad_output")] == [20.0, 5.0, 1.0]


@pytest.mark.filterwarnings("ignore:Using a non-full backward hook:FutureWarning")
def test_a_legacy_backward_hook_of_somebody_else_changes_nothing_and_stays() -> None:
    """D18"""
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), torch.randn(2, 3, requires_grad=True)
    expected = torch.autograd.grad(loss_of(model(x)), x)[0]
    fired: list[int] = []
    handle = model.register_backward_hook(lambda module, grad_input, grad_output: fired.append(1))
    with hl.capture(model, ":grad_input") as acts:
        loss_of(model(x)).backward()
    assert acts[":grad_input"].equal(expected)
    assert (len(fired), len(model._backward_hooks)) == (1, 1)
    handle.remove()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.zeros(2, 4), r"\(2, 4\).*\(2, 3\)"),
        (torch.zeros(2, 3, dtype=torch.float64), "float64.*float32"),
        ((torch.zeros(2, 3),), "tuple of 1"),
        ("text", "str"),
    ],
    ids=["shape", "dtype", "structure", "text"],
)
def test_a_gradient_that_does_not_fit_is_refused_in_the_backward(value: Any, message: str) -> None:
    """D19"""
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), torch.randn(2, 3)
    for hooks in (hl.edit(model, "0:grad_output", lambda _: value), hl.patch(model, {"0:grad_output": value})):
        with hooks, pytest.raises(hl.EditError, match=f"'0:grad_output'.*{message}"):
            model(x).sum().backward()


def test_none_leaves_a_gradient_alone_and_nan_passes() -> None:
    """D19"""
    model, x = nn.Sequential(nn.Linear(3, 3)), torch.randn(2, 3)
    with hl.edit(model, "0:grad_output", lambda _: None):
        model(x).sum().backward()
    assert model[0].bias.grad.tolist() == [2.0, 2.0, 2.0]
    with hl.patch(model, {"0:grad_output": float("nan")}):
        model(x).sum().backward()
    assert model[0].bias.grad.isnan().all()


def test_each_use_of_a_shared_module_has_its_own_gradient_and_they_add_up() -> None:
    """D20"""
    model = nn.Sequential(shared := nn.Linear(3, 3, bias=False), nn.Tanh(), shared)
    x = torch.randn(2, 3)
    with hl.capture(model, "0:input", "0:grad_output", keep="all") as acts:
        loss_of(model(x)).backward()
        once = shared.weight.grad.clone()
        loss_of(model(x)).backward()
    gradients, inputs = acts.calls("0:grad_output"), acts.calls("0:input")
    assert len(gradients) == len(inputs) == 4
    uses = [gradient.T @ value for gradient, value in zip(gradients, inputs, strict=True)]
    torch.testing.assert_close(uses[0] + uses[1], once)
    torch.testing.assert_close(sum(uses), shared.weight.grad)


def test_asking_for_the_gradient_of_an_input_does_not_make_it_require_one() -> None:
    """D21"""
    model, x = nn.Sequential(nn.Linear(3, 3)), torch.randn(2, 3)
    with (
        hl.capture(model, "0:grad_input"),
        pytest.raises(hl.NeverFired, match=says("can get no gradient", "0:grad_input", "requires_grad_()")),
    ):
        model(x)
    assert not x.requires_grad
    assert x.grad is None
    x.requires_grad_()
    with hl.capture(model, "0:grad_input") as acts:
        model(x).sum().backward()
    assert acts["0:grad_input"].equal(x.grad)


def test_a_backward_on_another_thread_brings_the_gradients_home() -> None:
    """D22"""
    model, x = mlp(), torch.randn(2, 4)
    with hl.capture(model, "0:grad_output") as acts, hl.edit(model, "2:grad_output", lambda gradient: gradient * 2):
        output = model(x).sum()
        worker = threading.Thread(target=output.backward)
        worker.start()
        worker.join()
    assert acts["0:grad_output"].shape == (2, 8)
    assert model[2].bias.grad.tolist() == [4.0, 4.0]


def test_a_gradient_of_another_shape_is_refused_also_with_check_false() -> None:
    model = mlp()
    with hl.edit(model, "0:grad_output", lambda gradient: gradient[:1], check=False):
        with pytest.raises(hl.EditError, match=says("shape given where passes a", "(1, 8)", "(2, 8)", "0:grad_output")):
            model(torch.randn(2, 4)).sum().backward()


def test_a_gradient_that_no_backward_reached_says_what_may_have_cut_it_off() -> None:
    first, second, x = nn.Linear(3, 3), nn.Linear(3, 3), torch.randn(2, 3)
    model = nn.ModuleList([first, second])
    with hl.capture(model, "0:grad_output") as acts:
        second(first(x).detach()).sum().backward()
    with pytest.raises(hl.NotCaptured, match=says("no gradient has reached")):
        acts["0:grad_output"]


def test_a_gradient_without_a_forward_in_the_block_says_that_it_is_missing() -> None:
    model = mlp()
    with hl.capture(model, "0:grad_output") as acts:
        pass
    with pytest.raises(hl.NotCaptured, match=says("no gradient has reached")):
        acts["0:grad_output"]


X = torch.ones(3, 4)
CHANGES: dict[str, Callable[[nn.Module, str], Any]] = {
    "patch": lambda model, site: hl.patch(model, {site: 0.0}),
    "edit": lambda model, site: hl.edit(model, site, torch.zeros_like),
}
WARNED = r"'{}' changed nothing: a backward ran in this block, and no gradient came here"


class Detached(nn.Module):
    """Detaches the output of its first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).detach())


@pytest.mark.parametrize("verb", CHANGES)
@pytest.mark.parametrize("site", ["first:grad_output", "first:grad_output[:, 0]", "first/linear:grad_output"])
def test_a_gradient_that_is_cut_off_is_told_of(verb: str, site: str) -> None:
    model = Detached()
    with pytest.warns(hl.HooklineWarning, match=WARNED.format(site.replace("[", r"\[").replace("]", r"\]"))):
        with CHANGES[verb](model, site):
            model(X).sum().backward()


@pytest.mark.parametrize("verb", CHANGES)
def test_so_is_one_that_autograd_was_not_asked_for(verb: str) -> None:
    model = mlp()
    with pytest.warns(hl.HooklineWarning, match=WARNED.format("0:grad_output")):
        with CHANGES[verb](model, "0:grad_output"):
            torch.autograd.grad(model(X).sum(), model[2].weight)


def test_so_is_one_in_a_model_whose_parameters_get_no_gradient() -> None:
    model = Detached().requires_grad_(False)
    model.last.bias.requires_grad_()
    with pytest.warns(hl.HooklineWarning, match=WARNED.format("first:grad_output")):
        with hl.patch(model, {"first:grad_output": 0.0}):
            torch.autograd.grad(model(X.clone().requires_grad_()).sum(), model.last.bias)


class TestNothingIsSaid:
    @pytest.fixture(autouse=True)
    def _as_errors(self) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            yield

    def test_where_the_backward_comes_after_the_block(self) -> None:
        model = mlp()
        with hl.patch(model, {"0:grad_output": 0.0}):
            loss = model(X).sum()
        loss.backward()
        assert not model[0].weight.grad.any()  # type: ignore[union-attr]

    def test_where_a_later_backward_reaches_it(self) -> None:
        model = mlp()
        with hl.patch(model, {"0:grad_output": 0.0}):
            loss = model(X).sum()
            torch.autograd.grad(loss, model[2].weight, retain_graph=True)
            loss.backward()

    def test_where_no_backward_runs(self) -> None:
        model = mlp()
        with hl.patch(model, {"0:grad_output": 0.0}):
            model(X)

    def test_of_a_backward_of_an_earlier_block(self) -> None:
        model = mlp()
        hooks = hl.Hooks(model, active=False).patch({"0:grad_output": 0.0})
        with hooks:
            earlier = model(X).sum()
        with hooks:
            loss = model(X).sum()
            torch.autograd.grad(earlier, model[2].weight)
        loss.backward()

    def test_when_missing_leaves_it_unsaid(self) -> None:
        model = Detached()
        with hl.patch(model, {"first:grad_output": 0.0}).when_missing("ignore"):
            model(X).sum().backward()


def test_a_part_that_the_loss_does_not_depend_on_is_told_of_as_such() -> None:
    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 1)
            self.second = nn.Linear(4, 1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.first(x), self.second(x)

    model = TwoHeads()
    with pytest.warns(hl.HooklineWarning, match=says("the loss may not depend", "second:grad_output")):
        with hl.patch(model, {"*:grad_output": 0.0}):
            model(X)[0].sum().backward()
