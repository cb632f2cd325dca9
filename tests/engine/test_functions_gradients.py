"""Gradients at functions, compared with autograd on a forward by hand; and functions in checkpointed segments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hookline as hl
from tests.errors.wording import says
from tests.support.models import Attention, Returns, Transformer, loss_of, stages_of_attention, words
from tests.support.states import same

REENTRANT = pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
CLOSED = pytest.mark.parametrize("closed", [False, True], ids=["block open", "block closed"])


def test_the_gradient_of_every_result_equals_the_oracle() -> None:
    attention, x = Attention(), words()
    stages = stages_of_attention(attention, x)
    names = [name for name in stages if name]
    expected = torch.autograd.grad(loss_of(stages[""]), [stages[name] for name in names])
    with hl.capture(attention, "/*:grad_output", "/softmax:grad_output") as acts:
        loss_of(attention(x)).backward()
    for name, gradient in zip(names, expected, strict=True):
        torch.testing.assert_close(acts[f"/{name}:grad_output"], gradient, msg=name)
    assert acts["/softmax:grad_output"].equal(acts["/softmax#0:grad_output"])


def test_arguments_have_their_gradients_by_name_and_none_where_there_is_none() -> None:
    attention, x = Attention(), words()
    stages = stages_of_attention(attention, x)
    scores, pattern, value = torch.autograd.grad(
        loss_of(stages[""]), [stages[name] for name in ("div#0", "softmax#0", "transpose#2")]
    )
    where = ["/softmax:grad_input", "/matmul#1:grad_inputs", '/matmul#1:grad_inputs["other"]', "/div:grad_inputs"]
    with hl.capture(attention, *where) as acts:
        loss_of(attention(x)).backward()
    torch.testing.assert_close(acts["/softmax:grad_input"], scores)
    torch.testing.assert_close(acts["/matmul#1:grad_inputs"], {"input": pattern, "other": value})
    torch.testing.assert_close(acts['/matmul#1:grad_inputs["other"]'], value)
    torch.testing.assert_close(acts["/div:grad_inputs"]["input"], scores / 2)


def test_the_gradient_of_an_argument_is_of_this_use_alone() -> None:
    model, x = Returns(lambda x: torch.exp(y := x * 1) + y * 3), torch.randn(3, requires_grad=True)
    with hl.capture(model, "/exp:grad_input", "/mul#1:grad_input", "/mul#0:grad_output") as acts:
        model(x).sum().backward()
    torch.testing.assert_close(acts["/exp:grad_input"], x.exp().detach())
    assert acts["/mul#1:grad_input"].tolist() == [3.0, 3.0, 3.0]
    torch.testing.assert_close(acts["/mul#0:grad_output"], x.exp().detach() + 3)


def test_observing_gradients_of_every_function_leaves_all_others_bit_identical() -> None:
    model, x = Transformer(), words().requires_grad_()
    wanted = [x, *model.parameters()]
    plain = torch.autograd.grad(loss_of(model(x)), wanted)
    with hl.capture(model, "**/*", "**/*:grad_output", "**/*:grad_inputs", "/mean:grad_input") as acts:
        watched = torch.autograd.grad(loss_of(model(x)), wanted)
    assert same(list(watched), list(plain))
    assert x.grad is None
    assert acts["h.1.attn/softmax#0:grad_output"].shape == acts["h.1.attn/softmax#0"].shape


def test_an_edited_gradient_flows_on_and_no_other() -> None:
    attention, x = Attention(), words()
    stages = stages_of_attention(attention, x)
    _, key, value = stages["transpose#0"], stages["transpose#1"], stages["transpose#2"]
    expected = torch.autograd.grad(loss_of(stages[""]), [value, key, attention.out.weight])
    sites = ["/transpose#2:grad_output", "/transpose#1:grad_output"]
    with hl.capture(attention, *sites) as acts, hl.edit(attention, "/softmax:grad_output", lambda grad: grad * 2):
        loss_of(attention(x)).backward()
    torch.testing.assert_close(acts[sites[0]], expected[0])
    torch.testing.assert_close(acts[sites[1]], expected[1] * 2)
    torch.testing.assert_close(attention.out.weight.grad, expected[2])
    attention.zero_grad()
    with hl.patch(attention, {"/softmax:grad_input": 0.0}):
        loss_of(attention(x)).backward()
    query_key, values = attention.qkv.weight.grad[:16], attention.qkv.weight.grad[16:]
    assert query_key.count_nonzero() == 0
    assert values.count_nonzero() > 0


def test_gradients_flow_through_edits_and_into_patched_values() -> None:
    attention, x = Attention(), words()
    stages = stages_of_attention(attention, x)
    scale = torch.tensor(0.5, requires_grad=True)

    def by_hand(pattern: Tensor) -> Tensor:
        return attention.out((pattern @ stages["transpose#2"]).transpose(1, 2).flatten(2))

    wanted = [scale, attention.qkv.weight]
    expected = torch.autograd.grad(loss_of(by_hand(stages["softmax#0"] * scale)), wanted, retain_graph=True)
    with hl.edit(attention, "/softmax", lambda value: value * scale):
        found = torch.autograd.grad(loss_of(attention(x)), wanted)
    torch.testing.assert_close(found, expected)
    pattern = torch.softmax(torch.randn(2, 2, 5, 5), -1).requires_grad_()
    expected = torch.autograd.grad(loss_of(by_hand(pattern)), pattern)
    with hl.patch(attention, {"/softmax": pattern}):
        torch.testing.assert_close(torch.autograd.grad(loss_of(attention(x)), pattern), expected)


def test_a_captured_value_that_keeps_its_graph_is_the_graphs_own() -> None:
    attention, x = Attention(), words()
    with hl.capture(attention, "/softmax", "/softmax:grad_output", detach=False) as acts:
        loss = loss_of(attention(x))
        (gradient,) = torch.autograd.grad(loss, acts["/softmax"], retain_graph=True)
        loss.backward()
    assert gradient.equal(acts["/softmax:grad_output"])


def test_a_skipped_function_passes_the_gradient_straight_through() -> None:
    model, x = Returns(lambda x: torch.tanh(x * 2) * 3), torch.randn(3, requires_grad=True)
    hl.run(model, x, skip="/tanh").sum().backward()
    assert x.grad.tolist() == [6.0, 6.0, 6.0]


def test_calls_of_one_function_and_their_gradients_come_in_the_same_order() -> None:
    class Steps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.step = Returns(lambda x: torch.tanh(torch.tanh(x)))

        def forward(self, x: Tensor) -> Tensor:
            return self.step(self.step(x))

    model, x = Steps(), torch.randn(3, requires_grad=True)
    values = [torch.tanh(x)]
    for _ in range(3):
        values.append(torch.tanh(values[-1]))
    expected = torch.autograd.grad(values[-1].sum(), values)
    sites = ["step/tanh:grad_output", "step#1/tanh#0:grad_output", "step/tanh#1:grad_output"]
    with hl.capture(model, "step/tanh", *sites, keep="all") as acts:
        model(x).sum().backward()
    assert same(acts.calls("step/tanh"), values)
    torch.testing.assert_close(acts.calls(sites[0]), list(expected))
    torch.testing.assert_close(acts.calls(sites[1]), [expected[2]])
    torch.testing.assert_close(acts.calls(sites[2]), [expected[1], expected[3]])


VIEWS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "view": ("/view", lambda x: x.view(3, 2)),
    "transpose": ("/transpose", lambda x: x.transpose(0, 1)),
    "T": ("/T", lambda x: x.T),
    "getitem": ("/getitem", lambda x: x[1:]),
    "one of several": ("/chunk[1]", lambda x: x.chunk(2)[1]),
    "itself": ("/contiguous", lambda x: x.contiguous()),
}


@pytest.mark.parametrize("overwritten", [False, True], ids=["read", "overwritten later"])
@pytest.mark.parametrize("view", VIEWS)
def test_the_gradient_of_a_view_is_that_of_its_value_or_is_refused_where_it_is_overwritten(
    view: str, overwritten: bool
) -> None:
    site, look = VIEWS[view]
    if overwritten and view == "one of several":
        return  # Torch forbids writing into one of several views.
    after: Callable[[Tensor], Tensor] = (lambda y: y.exp_()) if overwritten else (lambda y: y.exp())
    model, x = Returns(lambda x: after(look(x * 1)) * 2), torch.randn(2, 3, requires_grad=True)
    function, _, part = site.partition("[")
    port = f"{function}:grad_output{'[' + part if part else ''}"
    refusal = ""
    try:
        with hl.capture(model, port, site) as acts:
            model(x).sum().backward()
    except hl.NeverFired as error:  # Autograd rebases the history of an overwritten view on its base.
        refusal = str(error)
    if refusal:
        assert overwritten
        assert f"'{port}' can get no gradient: a part of it is written in place later" in refusal
        return
    expected = look(x.detach())
    assert acts[site].equal(expected)
    torch.testing.assert_close(acts[port], 2 * expected.exp())


IN_PLACE: dict[str, tuple[str, Callable[[Tensor], Any], Callable[[Tensor], Tensor]]] = {
    "method": ("tanh_", lambda y: y.tanh_(), torch.tanh),
    "operator": ("mul_", lambda y: y.__imul__(3), lambda y: y * 3),
    "inplace=True": ("relu", lambda y: F.relu(y, inplace=True), torch.relu),
    "setitem": ("setitem", lambda y: y.__setitem__(0, 2.0), lambda y: torch.cat([torch.full_like(y[:1], 2.0), y[1:]])),
}


@pytest.mark.parametrize("form", IN_PLACE)
def test_functions_that_write_have_gradients_and_are_edited_like_any_other(form: str) -> None:
    name, write, pure = IN_PLACE[form]

    def forward(x: Tensor) -> Tensor:
        y = x * 1
        alias = y.view(-1)
        write(y)
        return alias * 2

    model, x = Returns(forward), torch.randn(2, 3, requires_grad=True)
    before = x * 1
    entered = before.view_as(before)
    after = pure(entered)
    after_edit = after * 5
    wanted = [x, entered, after]
    ports = [f"/{name}:grad_input", f"/{name}:grad_output"]
    for edited, expected in (
        (False, torch.autograd.grad(loss_of(after * 2), wanted, retain_graph=True)),
        (True, torch.autograd.grad(loss_of(after_edit * 2), wanted)),
    ):
        x.grad = None
        with hl.capture(model, *ports) as acts:
            if edited:
                with hl.edit(model, f"/{name}", lambda value: value * 5):
                    loss_of(model(x)).backward()
            else:
                loss_of(model(x)).backward()
        torch.testing.assert_close(x.grad, expected[0])
        torch.testing.assert_close(acts[ports[0]], expected[1])
        torch.testing.assert_close(acts[ports[1]], expected[2])


def test_an_edited_argument_of_a_function_that_writes_reaches_everyone_who_holds_the_tensor() -> None:
    def forward(x: Tensor) -> Tensor:
        y = x * 1
        alias = y.view(-1)
        y.mul_(3)
        return alias

    model, x = Returns(forward), torch.randn(2, 3, requires_grad=True)
    output = hl.run(model, x, edit={"/mul_:input": lambda value: value * 5})
    torch.testing.assert_close(output, 15 * x.view(-1))
    output.sum().backward()
    assert x.grad.unique().tolist() == [15.0]


def test_a_gradient_that_cannot_exist_says_so() -> None:
    attention, x = Attention(), words()
    with pytest.raises(hl.NeverFired, match=r"'/softmax:grad_output'"), torch.no_grad():
        with hl.capture(attention, "/softmax:grad_output"):
            attention(x)
    comparing = Returns(lambda x: x * (x > 0))
    with (
        pytest.raises(hl.NeverFired, match=says("can get no gradient", "/gt:grad_output")),
        hl.capture(comparing, "/gt:grad_output"),
    ):
        comparing(torch.randn(3, requires_grad=True)).sum().backward()


class Checkpointed(nn.Module):
    """Runs a module, or a part of its own forward, in a checkpointed segment."""

    def __init__(self, reentrant: bool, own: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.body = Returns(lambda x: torch.sin(torch.tanh(x) * 2))
        self.reentrant = reentrant
        self.own = own

    def forward(self, x: Tensor) -> Tensor:
        part = (lambda value: torch.sin(torch.tanh(value) * 2)) if self.own else self.body
        for _ in range(2):
            x = checkpoint(part, self.layer(x), use_reentrant=self.reentrant)
        return x

    def by_hand(self, x: Tensor, change: Callable[[Tensor, int], Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Run without checkpoints and with `change` at the tanh; return the output and the changed values."""
        seen = []
        for number in range(2):
            seen.append(change(torch.tanh(self.layer(x)), number))
            x = torch.sin(seen[-1] * 2)
        return x, seen


def gradients_of(model: nn.Module, loss: Tensor) -> list[Tensor | None]:
    model.zero_grad()
    loss.backward()
    return [parameter.grad for parameter in model.parameters()]


CHANGES: dict[str, Callable[[Tensor, int], Tensor]] = {
    "body/tanh": lambda value, _: value * 3,
    "body#1/tanh": lambda value, number: value * 3 if number == 1 else value,
    "body#0/t*#0": lambda value, number: value * 3 if number == 0 else value,
}


@REENTRANT
def test_a_function_in_a_checkpointed_segment_is_captured_once(reentrant: bool) -> None:
    model, x = Checkpointed(reentrant), torch.randn(2, 3, requires_grad=True)
    output, seen = model.by_hand(x, lambda value, _: value)
    expected = gradients_of(model, loss_of(output))
    with hl.capture(model, "body/tanh", "body/*", keep="all") as acts:
        found = gradients_of(model, loss_of(model(x)))
    assert list(acts) == ["body/tanh", "body/tanh#0", "body/mul#0", "body/sin#0"]
    assert {len(acts.calls(site)) for site in acts} == {2}
    assert same(acts.calls("body/tanh"), seen)
    torch.testing.assert_close(found, expected)


@REENTRANT
@CLOSED
@pytest.mark.parametrize("site", CHANGES)
def test_an_edited_function_is_edited_on_the_recomputation_too(site: str, closed: bool, reentrant: bool) -> None:
    model, x = Checkpointed(reentrant), torch.randn(2, 3, requires_grad=True)
    expected = gradients_of(model, loss_of(model.by_hand(x, CHANGES[site])[0]))
    with hl.edit(model, site, lambda value: value * 3):
        loss = loss_of(model(x))
        found = gradients_of(model, loss) if not closed else []
    torch.testing.assert_close(found or gradients_of(model, loss), expected)
    assert torch._C._len_torch_function_stack() == 0


@REENTRANT
@CLOSED
def test_gradients_of_functions_in_a_checkpointed_segment_are_captured_once(closed: bool, reentrant: bool) -> None:
    model, x = Checkpointed(reentrant), torch.randn(2, 3, requires_grad=True)
    output, seen = model.by_hand(x, lambda value, _: value)
    expected = list(torch.autograd.grad(loss_of(output), seen))
    with hl.capture(model, "body/tanh:grad_output", "body#0/tanh:grad_output", keep="all") as acts:
        loss = loss_of(model(x))
        if not closed:
            loss.backward()
    if closed:
        loss.backward()
    torch.testing.assert_close(acts.calls("body/tanh:grad_output"), expected)
    torch.testing.assert_close(acts.calls("body#0/tanh:grad_output"), expected[:1])


@REENTRANT
@CLOSED
def test_a_checkpointed_part_of_a_modules_own_forward_is_edited_alike_or_refused(closed: bool, reentrant: bool) -> None:
    model, x = Checkpointed(reentrant, own=True), torch.randn(2, 3, requires_grad=True)
    expected = gradients_of(model, loss_of(model.by_hand(x, lambda value, _: value * 3)[0]))
    with hl.capture(model, "/tanh", keep="all") as acts:
        gradients_of(model, loss_of(model(x)))
    assert same(acts.calls("/tanh"), model.by_hand(x, lambda value, _: value)[1])
    refusal = ""
    try:
        with hl.edit(model, "/tanh", lambda value: value * 3):
            loss = loss_of(model(x))
            found = gradients_of(model, loss) if not closed else []
        found = found or gradients_of(model, loss)
    except hl.HooklineError as error:
        refusal = str(error)
    if refusal:
        assert refusal.startswith("'/tanh'")
    else:
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dimensions", [2, 3])
def test_the_gradient_of_a_layers_output_is_that_from_before_an_edit_inside_the_layer(dimensions: int) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 3, 4)[(0,) * (3 - dimensions)]
    hooks = hl.Hooks(model)
    hooks.edit("0/linear:grad_output", lambda gradient: gradient * 5)
    acts = hooks.capture("0:grad_output", "0.bias/linear:grad_input")
    model(x.requires_grad_()).sum().backward()
    assert acts["0:grad_output"].unique().tolist() == [1.0]
    torch.testing.assert_close(x.grad, torch.full_like(x, 5.0) @ model[0].weight)
    hooks.remove()
