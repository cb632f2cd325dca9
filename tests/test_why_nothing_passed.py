"""Sentences that explain why a site has no value. tests/failure_modes shows when each one is used."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from hookline import Site, StopForward
from hookline import _why_nothing_passed as why
from hookline._open_blocks import Session

SITE = Site("h.0")


def session(**noted: object) -> Session:
    """Return a session with these attributes."""
    found = Session()
    for name, value in noted.items():
        setattr(found, name, value)
    return found


def elsewhere() -> Session:
    found = Session()
    found.others.ran = True
    return found


@pytest.mark.parametrize(
    ("ran", "facts", "said"),
    [
        (session(), {}, "nothing has passed 'h.0' yet: run the model first"),
        (session(forwards=1), {}, "though the model ran: hl.scan"),
        (session(forwards=1), {"has_value": True}, "in the latest forward, which failed before it"),
        (session(over=why.BLOCK_OVER), {}, "'h.0': its block is over, and the model did not run in it"),
        (session(over=why.BLOCK_OVER, forwards=1), {}, "'h.0': its block is over$"),
        (session(), {"is_inactive": True}, "its hook is not active"),
        (session(forked=True), {"reason": why.NOT_YET}, "this process was forked"),
        (session(), {"reason": why.NOT_YET}, "nothing passed 'h.0' in this block"),
        (elsewhere(), {}, "contextvars.copy_context"),
    ],
)
def test_a_site_without_a_value_says_the_reason_that_is_known(ran, facts, said):
    text = why.why_empty(SITE, ran, **{"reason": "", "has_value": False, "is_inactive": False, **facts})
    assert re.search(said, text)


def test_modules_that_met_the_same_fate_are_named_in_one_sentence():
    lost = [why.LostModule(Site(f"h.{number}"), nn.ReLU(), "") for number in range(3)]
    lost += [why.LostModule(Site("head"), None, ""), why.LostModule(Site("ln"), nn.Identity(), "ln.0")]
    assert list(why.hooks_left_behind(lost)) == [
        "'h.0' and 2 more were replaced by other modules while hooked, and their hooks no longer act; "
        "make the hooks again",
        "'head' was taken out of the model while hooked, and its hooks no longer act; make the hooks again",
        "'ln' was replaced by another Identity while hooked, and its hooks still act on the old module, now 'ln.0'; "
        "make the hooks again",
    ]


def test_a_gradient_that_can_not_come_has_a_reason():
    model = nn.Sequential(nn.Embedding(3, 2))
    assert why.why_no_gradient([], model) == "no tensor passes here"
    assert why.why_no_gradient([torch.ones(2, dtype=torch.int64)], model) == "torch.int64 values have none"
    assert "hl.edit(model, '0', torch.Tensor.requires_grad_)" in why.why_no_gradient([torch.ones(2)], model)
    with torch.no_grad():
        assert why.why_no_gradient([torch.ones(2)], model) == "torch.no_grad is on; run the model outside it"


def test_a_block_that_failed_is_named_by_its_error():
    assert why.why_failed(SITE, StopForward) == "nothing passed 'h.0' before StopForward"
    assert why.why_failed(SITE, None) == "nothing passed 'h.0' before the forward failed"


def test_a_module_that_is_not_called_has_a_reason_where_the_model_shows_one():
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(4, 2), "layer": nn.Linear(2, 2)})
    attention = model["attention"]
    assert "reads its weight directly" in why.why_not_called("attention.out_proj", attention.out_proj, model)
    assert "replaced by another Linear while hooked. Make the hooks again." in why.why_not_called(
        "layer", nn.Linear(2, 2), model
    )
    assert "taken out of the model while hooked" in why.why_not_called("gone", nn.Linear(2, 2), model)
    assert why.why_not_called("layer", model["layer"], model) == ""
