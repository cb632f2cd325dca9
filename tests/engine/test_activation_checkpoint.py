"""Activation checkpointing: a call is captured once, and its recomputation gets exactly the same edits."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import hookline as hl
from tests.support.models import Scaled, loss_of

REENTRANT = pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
NESTED = pytest.mark.parametrize("depth", [1, 2, 3], ids=["plain", "nested", "nested twice"])
SEGMENTS = pytest.mark.parametrize("segments", [1, 2], ids=["one segment", "a segment for each call"])


class Checkpointed(nn.Module):
    """Calls its body twice, in one checkpointed segment or in two, each nested `depth` deep."""

    def __init__(self, reentrant: bool, depth: int = 1, segments: int = 1) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Dropout(0.25), nn.Linear(3, 3))
        self.reentrant = reentrant
        self.depth = depth
        self.segments = segments

    def forward(self, x: Tensor) -> Tensor:
        if self.segments == 1:
            return self.recomputed(lambda value: self.body(self.body(value)), x, self.depth)
        return self.recomputed(self.body, self.recomputed(self.body, x, self.depth), self.depth)

    def recomputed(self, function: Callable[[Tensor], Tensor], x: Tensor, depth: int) -> Tensor:
        if depth == 0:
            return function(x)
        inner = lambda value: self.recomputed(function, value, depth - 1)  # noqa: E731
        return checkpoint(inner, x, use_reentrant=self.reentrant)

    def by_hand(self, x: Tensor, change: Callable[[Tensor, int], Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Run without checkpoints and with `change` at the Tanh; return the output and the changed values."""
        seen = []
        for number in range(2):
            seen.append(change(torch.tanh(self.body[0](x)), number))
            x = self.body[3](self.body[2](seen[-1]))
        return x, seen


def gradients_of(model: nn.Module, x: Tensor) -> list[Tensor | None]:
    return [x.grad, *(parameter.grad for parameter in model.parameters())]


def expected_of(model: Checkpointed, x: Tensor, change: Callable[[Tensor, int], Tensor]) -> list[Tensor]:
    torch.manual_seed(7)
    return list(torch.autograd.grad(loss_of(model.by_hand(x, change)[0]), [x, *model.parameters()]))


def input_of() -> Tensor:
    return torch.randn(2, 3, requires_grad=True)


def tripled(value: Tensor) -> Tensor:
    return value * 3


@REENTRANT
@NESTED
@SEGMENTS
def test_each_call_is_captured_once_and_observing_changes_no_gradient(
    reentrant: bool, depth: int, segments: int
) -> None:
    model, x = Checkpointed(reentrant, depth, segments), input_of()
    torch.manual_seed(7)
    _, seen = model.by_hand(x, lambda value, _: value)
    expected = expected_of(model, x, lambda value, _: value)
    torch.manual_seed(7)
    with hl.capture(model, "body.1", "body.1:input", "body.1[0]", keep="all") as acts:
        loss_of(model(x)).backward()
    assert [len(acts.calls(site)) for site in acts] == [2, 2, 2]
    torch.testing.assert_close(torch.stack(acts.calls("body.1")), torch.stack(seen).detach())
    torch.testing.assert_close(gradients_of(model, x), expected)


CHANGES: dict[str, Callable[[Tensor, int], Tensor]] = {
    "body.1": lambda value, _: value * 3,
    "body.1#0": lambda value, number: value * 3 if number == 0 else value,
    "body.1#1": lambda value, number: value * 3 if number == 1 else value,
}


@REENTRANT
@NESTED
@SEGMENTS
@pytest.mark.parametrize("site", CHANGES)
@pytest.mark.parametrize("closed", [False, True], ids=["block open", "block closed"])
def test_an_edit_is_replayed_on_the_recomputation(
    site: str, closed: bool, reentrant: bool, depth: int, segments: int
) -> None:
    model, x = Checkpointed(reentrant, depth, segments), input_of()
    expected = expected_of(model, x, CHANGES[site])
    torch.manual_seed(7)
    with hl.edit(model, site, tripled):
        loss = loss_of(model(x))
        if not closed:
            loss.backward()
    if closed:
        loss.backward()
    torch.testing.assert_close(gradients_of(model, x), expected)


@REENTRANT
@NESTED
@SEGMENTS
@pytest.mark.parametrize("port", ["grad_output", "grad_input"])
@pytest.mark.parametrize("closed", [False, True], ids=["block open", "block closed"])
def test_gradients_are_captured_once_and_paired_with_their_calls(
    port: str, closed: bool, reentrant: bool, depth: int, segments: int
) -> None:
    model, x = Checkpointed(reentrant, depth, segments).eval(), input_of()
    output, seen = model.by_hand(x, lambda value, _: value)
    expected = list(torch.autograd.grad(loss_of(output), seen))
    if port == "grad_input":
        expected = [gradient * (1 - value**2) for gradient, value in zip(expected, seen, strict=True)]
    site = f"body.1:{port}"
    with hl.capture(model, "body.1", site, f"body.1#0:{port}", keep="all") as acts:
        loss = loss_of(model(x))
        if not closed:
            loss.backward()
    if closed:
        loss.backward()
    assert (len(acts.calls("body.1")), len(acts.calls(site))) == (2, 2)
    torch.testing.assert_close(torch.stack(acts.calls(site)), torch.stack(expected))
    torch.testing.assert_close(acts[site], expected[1])
    torch.testing.assert_close(acts[f"body.1#0:{port}"], expected[0])


@REENTRANT
@pytest.mark.parametrize("site", ["body.0:grad_output", "body.1:grad_input"])
def test_the_gradient_of_a_view_that_is_overwritten_in_a_recomputed_segment_arrives(site: str, reentrant: bool) -> None:
    model, x = Checkpointed(reentrant), torch.randn(2, 2, 3, requires_grad=True)
    model.body = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 3))
    first, second, third = model.body
    hidden = first(third(torch.relu(first(x))))
    expected = torch.autograd.grad(loss_of(third(torch.relu(hidden))), hidden)[0]
    with hl.capture(model, site, keep="all") as acts:
        loss_of(model(x)).backward()
    assert len(acts.calls(site)) == 2
    torch.testing.assert_close(acts[site], expected)
    assert second.inplace


@REENTRANT
def test_two_backward_passes_over_recomputed_segments_are_listed_pass_by_pass(reentrant: bool) -> None:
    model, x = Checkpointed(reentrant, segments=2).eval(), input_of()
    with hl.capture(model, "body.1:grad_output", keep="all") as acts:
        loss = loss_of(model(x))
        loss.backward(retain_graph=True)
        (loss * 10).backward()
    first, second, third, fourth = acts.calls("body.1:grad_output")
    torch.testing.assert_close([third, fourth], [first * 10, second * 10])


@REENTRANT
@NESTED
@pytest.mark.parametrize("closed", [False, True], ids=["block open", "block closed"])
def test_a_gradient_is_edited_once(closed: bool, reentrant: bool, depth: int) -> None:
    model, x = Checkpointed(reentrant, depth, segments=2).eval(), input_of()
    expected = expected_of(model, x, lambda value, number: Scaled.apply(value, tripled) if number == 1 else value)
    with hl.edit(model, "body.1#1:grad_output", tripled):
        loss = loss_of(model(x))
        if not closed:
            loss.backward()
    if closed:
        loss.backward()
    torch.testing.assert_close(gradients_of(model, x), expected)


@REENTRANT
@pytest.mark.parametrize(
    ("change", "by_hand"),
    [
        (lambda model: hl.patch(model, {"body.1": torch.full((2, 3), 0.5)}), lambda value, _: torch.full((2, 3), 0.5)),
        (lambda model: hl.patch(model, {"body.1[:, 0]": 0.0}), lambda value, _: value * torch.tensor([0.0, 1.0, 1.0])),
        (lambda model: hl.edit(model, "body.2:input", tripled), lambda value, _: value * 3),
        (lambda model: hl.skip(model, "body.2"), None),
    ],
    ids=["patch", "part", "input", "skip"],
)
def test_every_kind_of_change_is_replayed(
    change: Callable[[nn.Module], hl.Hooks], by_hand: Callable[[Tensor, int], Tensor] | None, reentrant: bool
) -> None:
    model, x = Checkpointed(reentrant, segments=2), input_of()
    if by_hand is None:
        bare = copy.deepcopy(model).eval()
        expected = list(
            torch.autograd.grad(loss_of(bare.by_hand(x, lambda value, _: value)[0]), [x, *bare.parameters()])
        )
    else:
        torch.manual_seed(7)
        loss = loss_of(model.by_hand(x, by_hand)[0])
        found = torch.autograd.grad(loss, [x, *model.parameters()], allow_unused=True)
        expected = [None if one is None or not one.count_nonzero() else one for one in found]
    torch.manual_seed(7)
    with change(model):
        loss = loss_of(model(x))
    loss.backward()
    got = [None if one is None or not one.count_nonzero() else one for one in gradients_of(model, x)]
    torch.testing.assert_close(got, expected)


@REENTRANT
def test_hooks_that_came_after_the_forward_do_not_act_on_its_recomputation(reentrant: bool) -> None:
    model, x = Checkpointed(reentrant, segments=2).eval(), input_of()
    expected = expected_of(model, x, lambda value, _: value)
    loss = loss_of(model(x))
    with hl.edit(model, "body.1", tripled), hl.capture(model, "body.1") as acts:
        loss.backward()
    torch.testing.assert_close(gradients_of(model, x), expected)
    assert len(acts) == 0


@REENTRANT
def test_hooks_removed_or_deactivated_after_the_forward_act_on_its_recomputation(reentrant: bool) -> None:
    for end in (hl.Hooks.remove, hl.Hooks.deactivate):
        model, x = Checkpointed(reentrant, segments=2).eval(), input_of()
        expected = expected_of(model, x, CHANGES["body.1"])
        hooks = hl.Hooks(model)
        hooks.edit("body.1", tripled)
        loss = loss_of(model(x))
        end(hooks)
        loss.backward()
        torch.testing.assert_close(gradients_of(model, x), expected)
        assert model(x).equal(model.by_hand(x, lambda value, _: value)[0])


@REENTRANT
def test_a_graph_that_is_kept_is_recomputed_in_the_same_way_again(reentrant: bool) -> None:
    model, x = Checkpointed(reentrant).eval(), input_of()
    expected = expected_of(model, x, CHANGES["body.1#1"])
    with hl.edit(model, "body.1#1", tripled):
        loss = loss_of(model(x))
    loss.backward(retain_graph=True)
    loss.backward()
    torch.testing.assert_close(gradients_of(model, x), [2 * gradient for gradient in expected])


def backward_or_refusal(loss: Tensor) -> str:
    """Run the backward; return hookline's error message, or "" if there was none."""
    try:
        loss.backward()
    except hl.HooklineError as error:
        return str(error)
    return ""


@REENTRANT
@pytest.mark.parametrize("factors", [[2, 3, 4, 5], [1, 1, 1, -1], [1, 2, 2, 1]], ids=["new", "negative", "exchanged"])
def test_an_edit_that_depends_on_its_own_state_is_replayed_or_refused_but_never_wrong(
    factors: list[int], reentrant: bool
) -> None:
    model, x = Checkpointed(reentrant).eval(), input_of()
    expected = expected_of(model, x, lambda value, number: value * factors[number])
    left = iter(factors)
    with hl.edit(model, "body.1", lambda value: value * next(left)):
        refusal = backward_or_refusal(loss_of(model(x)))
    if refusal:
        assert refusal.startswith("'body.1'")
    else:
        torch.testing.assert_close(gradients_of(model, x), expected)


class OwnCheckpoint(torch.autograd.Function):
    """Recompute without torch's checkpoint, as reversible networks and other frameworks do."""

    @staticmethod
    def forward(ctx: Any, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(x)
        return function(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor | None]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            output = ctx.function(x)
        torch.autograd.backward(output, gradient)
        return None, x.grad


@pytest.mark.parametrize("site", CHANGES)
def test_a_recomputation_by_other_means_is_edited_alike_or_refused(site: str) -> None:
    model, x = Checkpointed(False).eval(), input_of()
    expected = expected_of(model, x, CHANGES[site])
    model.recomputed = lambda function, x, depth: OwnCheckpoint.apply(function, x)  # type: ignore[method-assign]
    with hl.edit(model, site, tripled):
        refusal = backward_or_refusal(loss_of(model(x)))
    if refusal:
        assert refusal.startswith(f"'{site}'")
    else:
        torch.testing.assert_close(gradients_of(model, x), expected)


@REENTRANT
def test_the_number_of_the_call_is_the_same_on_the_recomputation(reentrant: bool) -> None:
    model, x = Checkpointed(reentrant, segments=2).eval(), input_of()
    expected = expected_of(model, x, lambda value, number: value * (number + 2))
    with hl.edit(model, "body.1", lambda value, call: value * (call.number + 2), with_call=True):
        loss_of(model(x)).backward()
    torch.testing.assert_close(gradients_of(model, x), expected)


@REENTRANT
@SEGMENTS
def test_the_recomputation_of_a_call_gets_the_value_that_a_cache_has_for_this_call(
    reentrant: bool, segments: int
) -> None:
    model, x = Checkpointed(reentrant, segments=segments).eval(), input_of()
    with hl.capture(model, "body.1", keep="all", transform=lambda value: value + 1) as acts:
        model(input_of())
    first, second = acts.calls("body.1")
    expected = expected_of(model, x, lambda value, number: value * 0 + (second if number else first))
    with hl.patch(model, acts):
        loss = loss_of(model(x))
    loss.backward()
    found = [torch.zeros_like(one) if one.grad is None else one.grad for one in (x, *model.parameters())]
    torch.testing.assert_close(found, expected)


def test_by_other_means_than_torchs_it_is_unknown_which_call_is_recomputed() -> None:
    model, x = Checkpointed(False, segments=2).eval(), input_of()
    with hl.capture(model, "body.1", keep="all") as acts:
        model(x)
    model.recomputed = lambda function, x, depth: OwnCheckpoint.apply(function, x)  # type: ignore[method-assign]
    with hl.patch(model, acts):
        refusal = backward_or_refusal(loss_of(model(x)))
    assert refusal.startswith("'body.1': backward runs the forward again, and hookline can't tell which of its calls")


@REENTRANT
def test_modules_run_through_checkpoint_sequential_are_seen_once_and_edited_twice(reentrant: bool) -> None:
    model, x = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4))), input_of()
    value = x
    for number, layer in enumerate(model):
        value = layer(value) * 3 if number == 1 else layer(value)
    expected = torch.autograd.grad(loss_of(value), [x, *model.parameters()])

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model

        def forward(self, x: Tensor) -> Any:
            return checkpoint_sequential(self.layers, 2, x, use_reentrant=reentrant)

    with hl.edit(outer := Outer(), "layers.1", tripled), hl.capture(outer, "layers.*", keep="all") as acts:
        loss_of(outer(x)).backward()
    torch.testing.assert_close(gradients_of(model, x), list(expected))
    assert [len(acts.calls(site)) for site in acts] == [1, 1, 1, 1]


@REENTRANT
def test_the_replay_lives_no_longer_than_the_graph(reentrant: bool) -> None:
    model, x = Checkpointed(reentrant).eval(), input_of()

    def triple(value: Tensor) -> Tensor:
        return value * 3

    alive = weakref.ref(triple)
    with hl.edit(model, "body.1", triple):
        loss = loss_of(model(x))
    del triple
    assert alive() is not None
    loss.backward()
    del loss
    assert alive() is None
