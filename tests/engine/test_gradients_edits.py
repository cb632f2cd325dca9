"""Edits of gradients work like edits of values: whole or part, a function or a value, in the order of the hooks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hookline as hl
from hookline._kernel import Call
from tests.errors.wording import says
from tests.support.models import Scaled, loss_of


def model_and_input() -> tuple[nn.Sequential, Tensor]:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(3, 4)


def halved(gradient: Tensor) -> Tensor:
    return gradient / 2


@pytest.mark.parametrize("site", ["0:grad_output", "1:grad_input", '1:grad_inputs["input"]'])
def test_an_edited_gradient_is_what_flows_on(site: str) -> None:
    model, x = model_and_input()
    hidden = Scaled.apply(model[0](x), halved)
    expected = torch.autograd.grad(loss_of(model[2](torch.tanh(hidden))), list(model.parameters()))
    with hl.edit(model, site, halved):
        loss_of(model(x)).backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_a_gradient_is_patched_whole_and_in_part() -> None:
    model, x = model_and_input()
    given = torch.randn(3, 4)
    with hl.patch(model, {"0:grad_output": given, "0:grad_output[0]": 0.0, "0:grad_output[:, 1:3]": torch.ones(2)}):
        loss_of(model(x)).backward()
    kept = given.clone()
    kept[0] = 0
    kept[:, 1:3] = 1
    torch.testing.assert_close(model[0].weight.grad, kept.T @ x)


def test_a_part_of_a_gradient_is_captured_and_its_rows_by_a_star() -> None:
    model, x = model_and_input()
    with hl.capture(model, "0:grad_output", "0:grad_output[:, -1]", "1:grad_output[*]") as acts:
        loss_of(model(x)).backward()
    assert acts["0:grad_output[:, -1]"].equal(acts["0:grad_output"][:, -1])
    hidden = torch.tanh(model[0](x)).detach().requires_grad_()
    expected = torch.autograd.grad(loss_of(model[2](hidden)), hidden)[0]
    for row in range(3):
        torch.testing.assert_close(acts[f"1:grad_output[{row}]"], expected[row])


def test_every_row_of_a_star_is_followed_where_an_alias_takes_the_place_of_the_value() -> None:
    model, x = nn.Sequential(nn.Identity(), nn.ReLU()), torch.rand(3, 2, requires_grad=True)
    for port in ("grad_input", 'grad_inputs["input"]', "grad_output"):
        with hl.capture(model, f"0:{port}[*]") as acts:
            (model(x) * torch.arange(1, 4)[:, None]).sum().backward()
        assert [acts[f"0:{port}[{row}]"].tolist() for row in range(3)] == [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]


def test_a_star_edits_each_row_of_a_gradient() -> None:
    model, x = model_and_input()
    with hl.edit(model, "2:grad_output[*]", lambda row: row / row.norm()), hl.capture(model, "2:grad_output") as acts:
        loss_of(model(x)).backward()
    torch.testing.assert_close(acts["2:grad_output"].norm(dim=1), torch.ones(3))


@pytest.mark.parametrize("site", ["1:grad_output", "1:grad_input", '1:grad_inputs["input"]'])
def test_hooks_on_one_gradient_act_in_the_order_they_were_added(site: str) -> None:
    model, x = model_and_input()
    with hl.capture(model, site) as before, hl.edit(model, site, halved), hl.capture(model, site) as after:
        loss_of(model(x)).backward()
    torch.testing.assert_close(after[site], before[site] / 2)


@pytest.mark.parametrize("inplace", [False, True], ids=["out of place", "in place"])
@pytest.mark.parametrize(
    "between", [nn.Identity(), nn.Flatten(), nn.LayerNorm(4)], ids=lambda module: type(module).__name__
)
def test_an_edit_downstream_is_seen_upstream(between: nn.Module, inplace: bool) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), between, nn.ReLU(inplace=inplace)), torch.randn(3, 2, 4)
    sites = ["0:grad_output", "1:grad_input", "1:grad_output", "2:grad_input"]
    with hl.capture(model, *sites) as plain:
        loss_of(model(x)).backward()
    for number, site in enumerate(sites):
        with (
            hl.capture(model, *sites) as before,
            hl.edit(model, site, torch.ones_like),
            hl.capture(model, *sites) as after,
        ):
            loss_of(model(x)).backward()
        for downstream in sites[number + 1 :]:
            torch.testing.assert_close(before[downstream], plain[downstream])
        torch.testing.assert_close(before[site], plain[site])
        assert after[site].equal(torch.ones_like(after[site]))
        for upstream in sites[:number]:
            assert not torch.allclose(before[upstream], plain[upstream]), f"{upstream} did not see the edit at {site}"


@pytest.mark.parametrize("port", ["grad_output", "grad_input"])
def test_a_parent_that_passes_its_childs_value_on_is_downstream_of_its_outputs_and_upstream_of_its_inputs(
    port: str,
) -> None:
    model, x = nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Tanh()), torch.randn(3, 4, requires_grad=True)
    down, up = ("0", "0.0") if port == "grad_output" else ("0.0", "0")
    with hl.capture(model, f"{down}:{port}", f"{up}:{port}") as plain:
        loss_of(model(x)).backward()
    with hl.edit(model, f"{up}:{port}", halved), hl.capture(model, f"{down}:{port}") as acts:
        loss_of(model(x)).backward()
    torch.testing.assert_close(acts[f"{down}:{port}"], plain[f"{down}:{port}"])
    with hl.edit(model, f"{down}:{port}", halved), hl.capture(model, f"{up}:{port}") as acts:
        loss_of(model(x)).backward()
    torch.testing.assert_close(acts[f"{up}:{port}"], plain[f"{up}:{port}"] / 2)


def test_the_function_gets_the_call_to_which_the_gradient_belongs() -> None:
    model, x = model_and_input()
    seen = []

    def note(gradient: Tensor, call: Call) -> None:
        seen.append((str(call.site), call.module, call.number))

    with hl.edit(model, "1:grad_output", note, with_call=True):
        (loss_of(model(x)) + loss_of(model(x))).backward()
    assert sorted(seen, key=lambda one: one[2]) == [("1:grad_output", model[1], 0), ("1:grad_output", model[1], 1)]


def test_the_options_of_a_capture_hold_for_gradients() -> None:
    model, x = model_and_input()
    with (
        hl.capture(model, "0:grad_output") as plain,
        hl.capture(model, "0:grad_output", dtype=torch.float64) as doubles,
        hl.capture(model, "0:grad_output", transform=lambda gradient: gradient.norm()) as norms,
    ):
        loss_of(model(x)).backward()
    assert doubles["0:grad_output"].dtype is torch.float64
    assert doubles["0:grad_output"].equal(plain["0:grad_output"].double())
    assert norms["0:grad_output"].equal(plain["0:grad_output"].norm())


def test_a_gradient_kept_by_reference_is_refused_once_it_was_overwritten() -> None:
    model, x = model_and_input()
    upstream = torch.ones(3, 2)
    with hl.capture(model, "2:grad_output", clone=False) as acts:
        model(x).backward(upstream)
    assert acts["2:grad_output"].equal(torch.ones(3, 2))
    upstream.zero_()
    with pytest.raises(hl.StaleValue, match=says("was overwritten in place", "2:grad_output")):
        acts["2:grad_output"]


def test_a_function_that_raises_in_the_backward_says_where() -> None:
    model, x = model_and_input()

    def fails(gradient: Tensor) -> Tensor:
        raise ZeroDivisionError("mine")

    with hl.edit(model, "1:grad_output", fails), pytest.raises(ZeroDivisionError, match="mine") as raised:
        loss_of(model(x)).backward()
    assert any("'1:grad_output'" in note for note in getattr(raised.value, "__notes__", ["'1:grad_output'"]))


def test_a_gradient_that_the_function_writes_into_is_nobody_elses() -> None:
    model, x = model_and_input()
    upstream = torch.ones(3, 2)
    with hl.edit(model, "2:grad_output", lambda gradient: gradient.zero_()):
        model(x).backward(upstream)
    assert upstream.equal(torch.ones(3, 2))
    assert model[0].weight.grad is not None
    assert model[0].weight.grad.count_nonzero() == 0


def test_a_captured_gradient_that_is_written_to_changes_nothing_that_flows() -> None:
    model, x = model_and_input()
    expected = torch.autograd.grad(loss_of(model(x)), model[0].weight)[0]
    upstream = torch.ones(3, 2)
    with hl.capture(model, "2:grad_output", "1:grad_input", "0:grad_output") as acts:
        loss_of(model(x)).backward()
        for gradient in acts.values():
            gradient.data.zero_()
    torch.testing.assert_close(model[0].weight.grad, expected)
    with hl.capture(model, "2:grad_output") as acts:
        model(x).backward(upstream)
    acts["2:grad_output"].zero_()
    assert upstream.equal(torch.ones(3, 2))


def test_a_module_that_returns_its_parameter_has_the_gradient_of_this_use_alone() -> None:
    class Bias(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.ones(2))

        def forward(self) -> Tensor:
            return self.bias

    class Uses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = Bias()

        def forward(self, x: Tensor) -> Tensor:
            return x * self.bias() + 10 * self.bias.bias

    model = Uses()
    with hl.capture(model, "bias:grad_output") as acts:
        model(torch.full((2,), 3.0)).sum().backward()
    assert acts["bias:grad_output"].tolist() == [3.0, 3.0]
    assert model.bias.bias.grad is not None
    assert model.bias.bias.grad.tolist() == [13.0, 13.0]


def test_a_gradient_reaches_the_graphs_own_tensor_too() -> None:
    model, x = model_and_input()
    with hl.capture(model, "1", "1:grad_output", detach=False) as acts:
        loss = loss_of(model(x))
    expected = torch.autograd.grad(loss, acts["1"], retain_graph=True)[0]
    loss.backward()
    assert acts["1:grad_output"].equal(expected)


def test_a_gradient_edit_by_a_pattern_without_gradients_raises_once_and_warns_of_nothing_before() -> None:
    model, x = model_and_input()
    with pytest.raises(hl.NeverFired, match=says("can get no gradient torch", "torch.no_grad")):
        with hl.edit(model, "*:grad_output", torch.zeros_like), torch.no_grad():
            model(x)


def test_a_gradient_edit_by_a_pattern_warns_at_the_end_of_the_forwards_that_had_no_gradients() -> None:
    model, x = model_and_input()
    with pytest.warns(hl.HooklineWarning, match=says("can get no gradient torch", "torch.no_grad", 1)) as said:
        with hl.edit(model, "*:grad_output", torch.zeros_like):
            with torch.no_grad():
                model(x)
            loss_of(model(x)).backward()
    assert len(said) == 1


def test_a_gradient_edit_that_stays_warns_at_once() -> None:
    model, x = model_and_input()
    hooks = hl.Hooks(model)
    hooks.edit("*:grad_output", torch.zeros_like)
    with pytest.warns(hl.HooklineWarning, match=says("can get no gradient torch", "torch.no_grad")), torch.no_grad():
        model(x)
    hooks.remove()


@pytest.mark.parametrize("opened", ["around the backward", "in the function"])
def test_a_model_that_a_gradients_function_calls_is_captured(opened: str) -> None:
    model, x = model_and_input()
    other, _ = model_and_input()
    seen = []

    def correct(gradient: Tensor) -> Tensor:
        if opened == "in the function":
            _, acts = hl.run(other, x, capture="0")
            seen.append(acts["0"])
        else:
            other(x)
        return gradient

    with hl.capture(other, "0", keep="all") as acts, hl.edit(model, "0:grad_output", correct):
        loss_of(model(x)).backward()
    assert torch.equal(acts["0"], other[0](x))
    assert len(acts.calls("0")) == 1
    assert [value.tolist() for value in seen] == [acts["0"].tolist()] * len(seen)


def test_a_checkpointed_model_in_a_gradients_function_is_captured_once() -> None:
    model, x = model_and_input()
    other = nn.Sequential(nn.Linear(4, 4))

    def correct(gradient: Tensor) -> Tensor:
        with torch.enable_grad():
            checkpoint(other, x, use_reentrant=False).sin().sum().backward()
        return gradient

    with hl.capture(other, "0", keep="all") as acts, hl.edit(model, "0:grad_output", correct):
        loss_of(model(x)).backward()
    assert len(acts.calls("0")) == 1


def test_a_model_that_runs_only_in_a_backward_says_that_nothing_was_captured() -> None:
    model, x = model_and_input()
    other, _ = model_and_input()
    loss = loss_of(model(x))
    loss.register_hook(lambda _: other(x).sum() * 0)
    with pytest.raises(hl.NeverFired, match=says("was passed over it", "0")):
        with hl.capture(other, "0"):
            loss.backward()
