"""Short paths: one plain hook on a module does the same as on the general path, which a second hook forces."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import hookline as hl
from tests.errors.wording import says


class Odd(nn.Module):
    """Returns what its `kind` says: a new tensor, a view, its input, a tuple, a dict, or something it writes into."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Any:
        made = x * self.scale
        kinds = {
            "view": lambda: made.view(-1)[: made.numel()].view(made.shape),
            "same": lambda: x,
            "tuple": lambda: (made, made + 1),
            "dict": lambda: {"a": made, "b": [made * 2]},
        }
        return kinds[self.kind]() if self.kind in kinds else made


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.odd = Odd(kind)
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        value = self.odd(self.first(x))
        while not isinstance(value, Tensor):
            value = value["a"] + value["b"][0] if isinstance(value, dict) else value[0] + value[1]
        if value.requires_grad and not value.is_leaf and self.odd.kind not in ("same", "view"):
            value = value.mul_(2)  # An in-place write, behind the captured value.
        result: Tensor = self.last(value)
        return result


KINDS = ["new", "view", "same", "tuple", "dict"]
X = torch.randn(3, 4)


def forced(net: nn.Module) -> Any:
    """Return a block with one more hook on `odd`, which changes nothing: all hooks there take the general path."""
    return hl.edit(net, "odd", lambda value, call: None, with_call=True)


def described(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: described(one) for key, one in value.items()}
    return [described(one) for one in value] if isinstance(value, (list, tuple)) else value


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", ["values", "gradients", "both", "all", "patch", "edit"])
def test_a_hook_alone_does_what_it_does_beside_another(kind: str, what: str) -> None:
    torch.manual_seed(0)
    net = Net(kind)
    sites = {"values": ["odd"], "gradients": ["odd:grad_output"], "both": ["odd", "odd:grad_output"], "all": ["odd"]}
    found = []
    for block in (nullcontext, lambda: forced(net)):
        net.zero_grad()
        if what in sites:
            hooks = hl.capture(net, sites[what], keep="all" if what == "all" else "last")
        elif what == "patch":
            part = {"tuple": "odd[1]", "dict": "odd['b'][0]"}.get(kind, "odd")
            hooks = hl.patch(net, {part: 0.5})
        else:
            part = {"tuple": "odd[1]", "dict": "odd['b'][0]"}.get(kind, "odd")
            hooks = hl.edit(net, part, lambda value: value * 3)
        with hooks as acts, block():
            outputs = [net(X), net(X * 2)]
            sum(outputs).sum().backward()
        grads = [one.grad.tolist() for one in net.parameters() if one.grad is not None]
        kept = {site: [described(one) for one in acts.calls(site)] for site in acts}
        found.append((described(outputs), grads, kept))
    assert found[0] == found[1]


def test_a_stop_shares_the_shadow_of_its_capture() -> None:
    net = Net("new")
    with hl.capture(net, "odd", stop=True) as acts:
        assert net(X) is None
        assert torch.equal(acts["odd"], net.odd(net.first(X)))
    assert "forward" not in vars(net.odd)


@pytest.mark.parametrize("first", ["capture", "stop"])
def test_hooks_that_share_a_shadow_are_removed_in_any_order(first: str) -> None:
    net = Net("new")
    hooks = hl.Hooks(net)
    acts = hooks.capture("odd", stop=True)
    assert net(X) is None
    hooks.of(first).remove()
    assert (net(X) is None) == (first == "capture")
    assert ("odd" in acts) or first == "capture"
    hooks.remove()
    assert "forward" not in vars(net.odd)
    assert "forward" not in vars(net)


@pytest.mark.parametrize("first", ["odd", "odd:grad_output"])
def test_values_and_gradients_that_share_a_shadow_are_removed_in_any_order(first: str) -> None:
    net = Net("new")
    hooks = hl.Hooks(net)
    acts = hooks.capture("odd", "odd:grad_output")
    net(X).sum().backward()
    next(hook for hook in hooks if str(hook.site) == first).remove()
    (net(X * 2) * 2).sum().backward()
    hooks.remove()
    values = {"odd": net.odd(net.first(X * 2)), "odd:grad_output": 4 * net.last.weight.sum(0).expand(3, 4)}
    left = next(site for site in values if site != first)
    assert not torch.allclose(acts[first], values[first])
    assert torch.allclose(acts[left], values[left])
    assert "forward" not in vars(net.odd)


@pytest.mark.parametrize("is_reentrant", [False, True])
@pytest.mark.parametrize("hook", ["patch", "edit"])
def test_a_change_alone_on_a_module_is_made_again_when_a_checkpoint_runs_it_again(
    hook: str, is_reentrant: bool
) -> None:
    torch.manual_seed(0)
    net = Net("new")
    x = X.clone().requires_grad_()
    value = torch.randn(3, 4)
    grads = []
    for run in (net, lambda given: checkpoint(net, given, use_reentrant=is_reentrant)):
        x.grad = None
        hooks = hl.patch(net, {"first": value}) if hook == "patch" else hl.edit(net, "first", lambda one: one.tanh())
        with hooks:
            output = run(x)
        output.sum().backward()
        grads.append([described(one.grad) for one in (*net.parameters(), x) if one.grad is not None])
        net.zero_grad()
    assert grads[0] == grads[1]


def test_an_error_in_an_edit_leaves_no_cycle_that_keeps_the_model_alive() -> None:
    net = Net("new")

    def fail(_value: Tensor) -> Tensor:
        raise ValueError("no")

    gc.disable()
    try:
        with pytest.raises(ValueError, match="no"), hl.edit(net, "odd", fail):
            net(X)
        alive = weakref.ref(net)
        del net
        assert alive() is None
    finally:
        gc.enable()


def test_a_short_form_that_is_activated_after_its_block_is_taken_off_when_it_is_freed() -> None:
    net = Net("new")
    hooks = hl.capture(net, "odd")
    with hooks:
        net(X)
    hooks.activate()
    net(X)
    assert [one.site for one in hl.attached(net)] == ["odd"]
    del hooks
    assert "forward" not in vars(net.odd)
    assert "forward" not in vars(net)


def test_a_model_refuses_to_be_scripted_after_a_nested_block_too() -> None:
    net = nn.Sequential(nn.Linear(4, 4))
    with hl.capture(net, "0"):
        with hl.capture(net, ""):
            net(X)
        with pytest.raises(hl.HooklineError, match=says("scripted leave the block first")):
            torch.jit.script(net)


HOOKS: dict[str, Any] = {
    "edit": lambda net: hl.edit(net, "first", torch.relu),
    "patch": lambda net: hl.patch(net, {"first": 0.0}),
    "all": lambda net: hl.capture(net, "first", keep="all"),
    "gradient": lambda net: hl.capture(net, "first:grad_output"),
    "stop": lambda net: hl.capture(net, "first", stop=True),
}


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hooked_layer_is_not_scripted_or_traced(hook: str) -> None:
    net = Net("new")
    with HOOKS[hook](net):
        net(X)
        with pytest.raises(hl.HooklineError, match=says("scripted leave the block first")):
            torch.jit.script(net.first)
        with pytest.raises(hl.HooklineError, match="traced"):
            make_fx(net.first)(X)
    assert vars(net.first).keys().isdisjoint(("forward", "__prepare_scriptable__"))


def test_a_stop_that_is_inside_an_edits_function_captures_first() -> None:
    net = Net("new")
    seen = []

    def look(value: Tensor) -> Tensor:
        with hl.capture(net, "first", stop=True) as acts:
            net(X)
        seen.append(acts["first"])
        return value

    with hl.edit(net, "last", look):
        net(X)
    assert torch.equal(seen[0], net.first(X))


class Writing(nn.Module):
    """Writes into the view that its child returns."""

    def __init__(self) -> None:
        super().__init__()
        self.child = Odd("view")

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.child(x).mul_(3)
        return result


def test_a_layer_that_is_called_by_itself_follows_views_that_are_written_later() -> None:
    net = nn.Sequential(Writing())
    with hl.capture(net, "0:grad_output", "0.child:grad_output") as acts:
        net[0](X).sum().backward()
    assert torch.equal(acts["0.child:grad_output"], torch.full_like(X, 3))


@pytest.mark.parametrize("stays", ["odd", "odd:grad_output"])
def test_of_two_hooks_that_share_a_shadow_one_is_removed_while_the_module_runs(stays: str) -> None:
    net = Net("new")
    hooks = hl.Hooks(net)
    acts = hooks.capture("odd", "odd:grad_output")
    leaving = next(hook for hook in hooks if str(hook.site) != stays)

    def forward(self: Odd, x: Tensor) -> Tensor:
        leaving.remove()
        return x * self.scale

    original = Odd.forward
    try:
        Odd.forward = forward  # type: ignore[method-assign]
        net(X).sum().backward()
    finally:
        Odd.forward = original  # type: ignore[method-assign]
    hooks.remove()
    assert list(acts) == [stays]


class UsedAndWritten(Writing):
    """Uses the view that its child returns, and then writes into it."""

    def forward(self, x: Tensor) -> Tensor:
        value = self.child(x)
        before = value * 2
        result: Tensor = before + value.mul_(3)
        return result


def test_a_view_that_is_used_and_then_written_gets_both_parts_of_its_gradient() -> None:
    net = nn.Sequential(UsedAndWritten())
    with hl.capture(net, "0.child:grad_output") as acts:
        net(X).sum().backward()
    assert torch.equal(acts["0.child:grad_output"], torch.full_like(X, 5))
