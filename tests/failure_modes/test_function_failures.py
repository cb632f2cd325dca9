"""Functions as sites when something fails: no mode is left, nothing is held, and a name that never ran says why."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hookline as hl
from tests.support.models import Returns
from tests.support.running import without_garbage_collection
from tests.support.states import modes_left, state_of
from tests.support.transformer import Attention, Transformer, words

pytestmark = pytest.mark.usefixtures("no_mode_is_left")

FAILURES: dict[str, type[BaseException]] = {"error": ValueError, "interrupt": KeyboardInterrupt}


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("where", ["function", "edit", "helper", "child"])
def test_a_failure_leaves_no_mode_and_nothing_on_the_model(where: str, failure: str) -> None:
    """A05"""

    def fail(*_: Any) -> Any:
        raise FAILURES[failure]("in the midst")

    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.child = Returns(fail if where == "child" else torch.relu)

        def forward(self, x: Tensor) -> Tensor:
            x = self.child(torch.softmax(x, -1))
            if where == "helper":
                fail()
            return torch.cat([x, x.new_ones(5)], 1) if where == "function" else x

    model, x = Fails(), torch.randn(2, 3)
    before = state_of(model)
    raised = RuntimeError if where == "function" else FAILURES[failure]
    with pytest.raises(raised), hl.capture(model, "/*", "child/*") as acts:
        with hl.edit(model, "/softmax", fail if where == "edit" else torch.neg):
            model(x)
    assert modes_left() == 0
    assert state_of(model) == before
    assert (where == "edit") or acts["/softmax#0"].shape == (2, 3)
    hooks = hl.Hooks(model)
    hooks.capture("/*")
    with pytest.raises(raised) if where != "edit" else hl.capture(model, "/softmax"):
        model(x)
    assert modes_left() == 0
    hooks.remove()
    assert state_of(model) == before


def test_a_failure_that_the_model_catches_does_not_confuse_the_count() -> None:
    """A05"""

    def forward(x: Tensor) -> Tensor:
        try:
            torch.cat([x, torch.ones(7, 7)])
        except RuntimeError:
            x = torch.cat([x, x])
        return x

    x = torch.randn(2, 3)
    output, acts = hl.run(Returns(forward), x, capture="/*")
    assert list(acts) == ["/ones#0", "/cat#1"]  # The first call gave nothing.
    assert acts["/cat#1"].equal(output)


def test_what_a_forward_lets_go_is_gone_though_its_functions_are_hooked() -> None:
    """G03"""
    gone: list[bool] = []

    class LetsGo(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            alive = weakref.ref(y)
            z = torch.softmax(y, -1)
            del y
            gone.append(alive() is None)
            return z

    model, x = LetsGo(), torch.randn(2, 3)
    hl.run(model, x, capture="/softmax")
    hl.run(model, x, patch={"/softmax": 0.0})
    hl.run(model, x, edit={"/*": torch.neg})
    hl.run(model, x, skip="/softmax")
    assert gone == [True, True, True, True]


def test_hooks_that_are_taken_off_inside_a_forward_act_no_more() -> None:
    """A07"""
    model, x = Returns(lambda x: torch.relu(torch.softmax(x * 2, -1)) * 3), torch.randn(2, 3)
    hooks = hl.Hooks(model)
    hooks.edit("/mul", torch.neg, name="negative")
    hooks.edit("/relu", torch.zeros_like)
    hooks.edit("/softmax", lambda _: hooks.remove())
    assert model(x).equal(torch.softmax(-(x * 2), -1) * 3)
    assert model(x).equal(torch.softmax(x * 2, -1) * 3)


def test_nothing_is_held_once_the_block_is_over() -> None:
    """G02"""

    def use(model: nn.Module) -> hl.Cache:
        with (
            hl.capture(model, "**/*", "/*", "h.0.attn/softmax:grad_output") as acts,
            hl.edit(model, "h.0/add", torch.neg),
        ):
            model(words()).sum().backward()
        hl.sites(model, "h.0.attn/*", run=(words(),))
        return acts

    use(Transformer())
    model = Transformer()
    alive = weakref.ref(model), weakref.ref(model.h[0].attn), weakref.ref(model.h[0].mlp.weight)
    with without_garbage_collection():
        acts = use(model)
        kept = weakref.ref(acts["h.0.attn/softmax"])
        del model
        assert [reference() for reference in alive] == [None, None, None]
        del acts
        assert kept() is None


def test_a_name_that_never_ran_says_what_did() -> None:
    """H01"""
    model, x = Transformer(), words()
    with pytest.raises(hl.NeverFired, match=r"'h.0.attn/sofmax'.*did you mean.*softmax"):
        hl.run(model, x, capture="h.0.attn/sofmax")
    with pytest.raises(hl.NeverFired, match=r"'h.0.attn/relu'.*chunk.*matmul.*softmax"):
        hl.run(model, x, capture="h.0.attn/relu")
    with pytest.raises(hl.NeverFired, match=r"'h.0.attn/softmax#1'.*ran 1 time.*counts from 0"):
        hl.run(model, x, capture="h.0.attn/softmax#1")
    with pytest.raises(hl.NeverFired, match=r"'h.0.attn#3/softmax'.*1 time"):
        hl.run(model, x, capture="h.0.attn#3/softmax")
    with pytest.raises(hl.NeverFired, match=r"'h.0/softmax'"):
        hl.run(model, x, patch={"h.0/softmax": 0.0})
    with pytest.raises(hl.NeverFired, match=r"'h.0.attn/softmax'.*skipped"), hl.skip(model, "h.0.attn"):
        hl.run(model, x, capture="h.0.attn/softmax")
    with pytest.warns(hl.HooklineWarning, match=r"'h.0/matmul'.*1 more"), hl.capture(model, "h.*/matmul") as acts:
        model(x)
    with pytest.raises(hl.NotCaptured, match=r"'h.1/matmul'.*in that of a module below: try 'h.1.\*\*/matmul'"):
        acts["h.1/matmul"]


def test_a_function_that_a_method_called_directly_does_not_run_says_so() -> None:
    """H01"""
    with pytest.raises(hl.NeverFired, match="'/softmax'.*did not run in the methods that were called of Attention"):
        hl.run(Attention().split, words(), capture="/softmax")


def test_a_module_that_computes_nothing_itself_is_no_miss_of_a_wildcard() -> None:
    """H01"""
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8)), nn.Identity())
    _, acts = hl.run(model, words(), capture=["**/*", "/*"])
    assert list(acts) == ["0.0/linear#0"]


def test_names_that_can_be_no_function_are_refused_at_once() -> None:
    """H01"""
    model = Transformer()
    for text in ("h.0.attn/", "h.0.attn/a.b", "h.0.attn/softmax()", "h.0.attn/softmax/exp"):
        with pytest.raises(hl.SiteError):
            hl.capture(model, text)
    with pytest.raises(hl.SiteError, match="'h.0.atn'.*did you mean 'h.0.attn'"):
        hl.capture(model, "h.0.atn/softmax")
    with pytest.raises(hl.SiteError, match="never called"):
        hl.capture(model, "h/softmax")
    with pytest.raises(hl.SiteError, match="skipped as a whole"):
        hl.skip(model, "h.0.attn/softmax:input")


def test_fused_and_hidden_attention_says_what_to_do_instead() -> None:
    """H01"""
    fused, x = Returns(lambda x: F.scaled_dot_product_attention(x, x, x)), words()
    with pytest.raises(hl.NeverFired, match=r"'/softmax'.*scaled_dot_product_attention.*eager"):
        hl.run(fused, x, capture="/softmax")
    hidden = nn.MultiheadAttention(8, 2, batch_first=True)
    for training in (True, False):
        with pytest.raises(hl.NeverFired, match=r"'/softmax'.*need_weights=True.*capture what it returns: '\[1\]'"):
            hl.run(hidden.train(training), x, x, x, capture="/softmax")
    _, acts = hl.run(hidden, x, x, x, average_attn_weights=False, capture="[1]")  # What the message says to do.
    assert acts["[1]"].sum(-1).allclose(torch.ones(2, 2, 5))


class Squared(torch.autograd.Function):
    """A function of the user's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * gradient


def test_a_change_inside_an_autograd_function_is_refused_and_a_look_is_not() -> None:
    model, x = Returns(Squared.apply), torch.randn(3, requires_grad=True)
    assert hl.run(model, x, capture="/mul")[1]["/mul"].equal((x * x).detach())
    for hooked in (hl.edit(model, "/mul", lambda value: value * 0), hl.patch(model, {"/mul": 0.0})):
        with pytest.raises(hl.HooklineError, match="'/mul' runs inside Squared.*edit what goes in"), hooked:
            model(x)


@torch.jit.script
def scripted(x: Tensor) -> Tensor:
    return x.sigmoid() + 1


def test_what_a_trial_run_does_inside_a_scripted_function_is_not_listed() -> None:
    model, x = Returns(lambda x: scripted(x) + x * 2), torch.randn(3)
    assert [str(site) for site in hl.sites(model, "/*", run=(x,))] == ["/mul", "/add"]


def test_a_pattern_that_ran_nowhere_says_so_in_a_listing_and_gives_the_reason_that_helps() -> None:
    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.implementation = nn.Linear(4, 4)
            self.attn = Returns(lambda x: F.scaled_dot_product_attention(x, x, x))

        def forward(self, x: Tensor) -> Tensor:
            return self.attn(self.implementation(x))

    model, x = Fused(), torch.randn(1, 3, 4)
    assert "none of these ran" in repr(hl.sites(model, "**/softmax", run=(x,)))
    reason = "^'attn/softmax'.*scaled_dot_product_attention.*eager implementation"
    with pytest.warns(hl.HooklineWarning, match=reason):
        hl.run(model, x, capture="**/softmax")
    with pytest.raises(hl.NeverFired, match=reason):
        hl.run(model, x, patch={"**/softmax": 0.0})


def test_a_method_that_was_not_called_that_often_is_missed_also_without_a_forward() -> None:
    class Encodes(nn.Module):
        def encode(self, x: Tensor) -> Tensor:
            return x * 2

    model, x = Encodes(), torch.randn(3)
    with pytest.raises(hl.NeverFired, match=r"'encode\(\)#1' was not reached"), hl.patch(model, {"encode()#1": 0.0}):
        model.encode(x)
