"""Changes without effect: subscripts that select nothing, patterns of which no site fires."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hookline as hl
from tests.errors.wording import says
from tests.support.models import mlp
from tests.support.running import said

X = torch.ones(2, 4)


def wide() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 8))


CHANGES: dict[str, Callable[[nn.Module, str], Any]] = {
    "patch": lambda model, site: hl.patch(model, {site: 0.0}),
    "edit": lambda model, site: hl.edit(model, site, torch.zeros_like),
}


class TestSubscripts:
    @pytest.mark.parametrize("verb", CHANGES)
    @pytest.mark.parametrize(
        "site", ["0[:, 7:9]", "0:input[:, 7:9]", "0[5:]", "{0,1}[:, 7:9]", "0[*, 7:9]", "0/linear[:, 7:]"]
    )
    def test_a_change_that_never_selects_anything_raises(self, verb: str, site: str) -> None:
        model = wide()
        with pytest.raises(hl.NeverFired, match=says("selects nothing of float32", "(2, 4)")):
            with CHANGES[verb](model, site):
                model(X)

    @pytest.mark.parametrize("verb", CHANGES)
    def test_a_change_of_a_gradient_that_selects_nothing_raises(self, verb: str) -> None:
        model = wide()
        with pytest.raises(
            hl.NeverFired,
            match=says("selects nothing of float32", "[:, 7:9]", "(2, 4)"),
        ):
            with CHANGES[verb](model, "0:grad_output[:, 7:9]"):
                model(X).sum().backward()

    def test_an_edit_function_is_not_called_with_nothing(self) -> None:
        seen: list[Tensor] = []
        model = wide()
        with pytest.raises(hl.NeverFired), hl.edit(model, "0[:, 7:9]", seen.append):
            model(X)
        assert seen == []

    def test_a_part_of_a_tuple_may_be_nothing_too(self) -> None:
        model = nn.Sequential(nn.LSTM(4, 4))
        with pytest.raises(hl.NeverFired, match=says("selects nothing of tuple of", 2)):
            with hl.edit(model, "0[2:]", lambda value: value):
                model(X)

    @pytest.mark.parametrize("verb", CHANGES)
    def test_a_change_that_misses_some_calls_warns_once(self, verb: str) -> None:
        model = nn.Sequential(nn.Identity())

        def generate() -> None:
            with CHANGES[verb](model, "0[:, 3:]"):
                assert not model(torch.ones(1, 5))[:, 3:].any()
                for _ in range(3):
                    assert model(torch.ones(1, 1)).all()

        (message,) = said(generate)
        assert message.startswith(
            "'0[:, 3:]' changed nothing: [:, 3:] selects nothing of float32 (1, 1), in 3 calls; a model that generates "
            "with a cache is given one token a call after the prompt: '0[:, @3:]' counts tokens in the whole sequence"
        )

    def test_a_change_that_misses_longer_calls_points_at_their_numbers(self) -> None:
        model = nn.Sequential(nn.Identity())

        def run() -> None:
            with hl.patch(model, {"0[:, 3:]": 0.0}):
                model(torch.ones(1, 5))
                model(torch.ones(1, 2))

        (message,) = said(run)
        assert "in 1 call; '#n' names the calls that are meant" in message

    def test_a_change_that_is_said_to_miss_says_nothing(self) -> None:
        model = nn.Sequential(nn.Identity())

        def generate() -> None:
            with hl.patch(model, {"0[:, 3:]": 0.0}).when_missing("ignore"):
                model(torch.ones(1, 5))
                model(torch.ones(1, 1))
            with hl.patch(model, {"0[:, 3:]": 0.0}).when_missing("ignore"):
                model(torch.ones(1, 1))

        assert said(generate) == []

    def test_the_calls_that_are_meant_can_be_named(self) -> None:
        model = nn.Sequential(nn.Identity())

        def generate() -> None:
            with hl.patch(model, {"0#0[:, 3:]": 0.0}):
                model(torch.ones(1, 5))
                model(torch.ones(1, 1))

        assert said(generate) == []

    def test_a_hook_that_stays_warns_once(self) -> None:
        model = wide()
        hooks = hl.Hooks(model)
        hooks.patch({"0[:, 7:9]": 0.0})
        assert said(lambda: [model(X), model(X)]) == [
            "'0[:, 7:9]' changed nothing: [:, 7:9] selects nothing of float32 (2, 4)"
        ]
        hooks.remove()

    @pytest.mark.parametrize("site", ["0[:]", "0[:, 1:2]", "0[:1]", "0[*]", "0:input[:, 1:]"])
    def test_a_value_that_is_empty_itself_is_no_mistake(self, site: str) -> None:
        model = wide()

        def run() -> None:
            with hl.patch(model, {site: 0.0}):
                model(torch.ones(0, 4))

        assert said(run) == []

    def test_a_second_block_starts_from_nothing(self) -> None:
        model = nn.Sequential(nn.Identity(), nn.Identity())
        hooks = hl.Hooks(model, active=False).patch({"0[:, 3:]": 0.0})
        with pytest.raises(hl.NeverFired), hooks:
            model(torch.ones(1, 1))

        def run() -> None:
            with hooks:
                model(torch.ones(1, 5))

        assert said(run) == []

    @pytest.mark.parametrize("site", ["0[:, 7:9]", "0:input[:, 7:9]", "0[5:]", "0[*, 7:9]", "0/linear[:, 7:]"])
    def test_a_capture_that_never_selects_anything_warns_once(self, site: str) -> None:
        model = wide()

        def run() -> None:
            with hl.capture(model, site) as acts:
                model(X)
                model(X)
            assert not any(tensor.numel() for tensor in acts.values())

        (message,) = said(run)
        assert re.match(r".* captured nothing: .* selects nothing of float32 \(2, 4\), in 2 calls; hl.scan", message)

    def test_a_captured_gradient_of_nothing_warns(self) -> None:
        model = wide()

        def run() -> None:
            with hl.capture(model, "0:grad_output[:, 7:9]"):
                model(X).sum().backward()

        (message,) = said(run)
        assert message.startswith("'0:grad_output[:, 7:9]' captured nothing: [:, 7:9] selects nothing")

    def test_a_capture_that_stays_warns_once(self) -> None:
        model = wide()
        hooks = hl.Hooks(model)
        hooks.capture("0[:, 7:9]")
        assert said(lambda: [model(X), model(X)]) == [
            "'0[:, 7:9]' captured nothing: [:, 7:9] selects nothing of float32 (2, 4)"
        ]
        hooks.remove()

    @pytest.mark.parametrize("site", ["0[:]", "0[:, 1:2]", "0[:1]", "0[*]", "0:input[:, 1:]", "0[*, 1:]"])
    def test_a_capture_of_what_is_empty_itself_says_nothing(self, site: str) -> None:
        model = wide()
        assert said(lambda: hl.run(model, torch.ones(0, 4), capture=site)) == []

    @pytest.mark.parametrize("site", ["0[:, 4]", "0:input[:, 4]", "0/linear[:, 4]"])
    def test_a_position_that_a_decode_step_lacks_points_at_the_token(self, site: str) -> None:
        model = nn.Sequential(nn.Linear(2, 2))
        named = site.replace("4", "@4")
        with pytest.raises(hl.SiteError, match=says("out of bounds cache", f"'{named}'")):
            with hl.capture(model, site, keep="all"):
                model(torch.ones(1, 5, 2))
                model(torch.ones(1, 1, 2))
        with hl.capture(model, named) as acts:
            model(torch.ones(1, 5, 2))
            model(torch.ones(1, 1, 2))
        assert [tensor.shape for tensor in acts.values()] == [(1, 2)]

    def test_a_position_that_the_first_call_lacks_is_no_matter_of_a_cache(self) -> None:
        with pytest.raises(hl.SiteError, match=says("dimension with size", 1)) as raised:
            hl.run(nn.Sequential(nn.Identity()), torch.ones(1, 1, 2), capture="0[:, 4]")
        assert "cache" not in str(raised.value)


class Branches(nn.Module):
    """Calls only one of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.spare = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x: Tensor) -> Tensor:
        return self.used[0](x)


BY_PATTERN = {**CHANGES, "skip": lambda model, site: hl.skip(model, site)}


class TestPatterns:
    @pytest.mark.parametrize("verb", BY_PATTERN)
    def test_a_change_by_a_pattern_of_which_no_place_fires_raises(self, verb: str) -> None:
        model = Branches()
        with pytest.raises(hl.NeverFired, match=says("was not called in forward and", "spare.0", 1, 1)):
            with BY_PATTERN[verb](model, "spare.*"):
                model(X)

    @pytest.mark.parametrize("verb", BY_PATTERN)
    def test_a_change_by_a_pattern_of_which_some_places_fire_warns_of_the_others(self, verb: str) -> None:
        model = Branches()
        with (
            pytest.warns(hl.HooklineWarning, match=says("was not called", "used.1")),
            BY_PATTERN[verb](model, "used.*"),
        ):
            model(X)

    def test_each_key_of_a_patch_is_a_pattern_of_its_own(self) -> None:
        model = Branches()
        with pytest.raises(hl.NeverFired, match="'spare.0'"):
            with hl.patch(model, {"used.*": 0.0, "spare.*": 0.0}):
                model(X)

    def test_skipping_with_the_values_of_a_cache_is_one_pattern(self) -> None:
        model = Branches()
        values = hl.Cache({f"used.{i}": torch.zeros(2, 4) for i in range(2)})
        with pytest.warns(hl.HooklineWarning, match=says("was not called", "used.1")), hl.skip(model, "used.*", values):
            model(X)

    def test_it_can_be_said_that_a_warning_will_do(self) -> None:
        model = Branches()
        with pytest.warns(hl.HooklineWarning, match="'spare.0'"):
            with hl.patch(model, {"spare.*": 0.0}).when_missing("warn"):
                model(X)

    def test_a_capture_by_a_pattern_still_warns(self) -> None:
        model = Branches()
        with pytest.warns(hl.HooklineWarning, match="'spare.0'"), hl.capture(model, "spare.*"):
            model(X)

    def test_a_block_without_a_forward_says_nothing(self) -> None:
        with hl.patch(Branches(), {"spare.*": 0.0}):
            pass


class TestGradients:
    def test_a_pattern_of_gradients_that_can_not_come_is_said_once_with_what_to_do(self) -> None:
        model = nn.Sequential(nn.Embedding(5, 4), *(nn.Linear(4, 4) for _ in range(4))).requires_grad_(False)
        messages = said(lambda: hl.run(model, torch.tensor([1]), capture="*:grad_output"))
        assert len(messages) == 1
        assert "requires_grad_() on the input" in messages[0]
        assert "hl.edit(model, '0', torch.Tensor.requires_grad_)" in messages[0]
        with hl.edit(model, "0", torch.Tensor.requires_grad_), hl.capture(model, "{1,2,3,4}:grad_output") as acts:
            model(torch.tensor([1])).sum().backward()
        assert len(acts) == 4

    def test_changing_gradients_that_can_not_come_raises_at_the_end(self) -> None:
        model = wide().requires_grad_(False)
        with pytest.raises(hl.NeverFired, match=says("can get no gradient and", "0:grad_output", 2)):
            with hl.edit(model, "*:grad_output", torch.zeros_like):
                model(X)

    @pytest.mark.parametrize("reentrant", [False, True])
    def test_a_gradient_that_is_changed_on_the_recomputation_has_fired(self, reentrant: bool) -> None:
        model = wide()
        with hl.edit(model, "*:grad_output", torch.zeros_like):
            output = checkpoint(model, X.clone().requires_grad_(), use_reentrant=reentrant)
        output.sum().backward()
        assert not model[0].weight.grad.any()


@pytest.mark.parametrize("verb", ["edit", "patch", "capture"])
def test_a_block_around_the_backward_alone_says_that_the_forward_has_to_be_inside(verb: str) -> None:
    model, x = mlp(), torch.randn(2, 4)
    loss = model(x).sum()
    blocks = {
        "edit": hl.edit(model, "0:grad_output", torch.zeros_like),
        "patch": hl.patch(model, {"0:grad_output": 0.0}),
        "capture": hl.capture(model, "0:grad_output"),
    }
    with pytest.raises(hl.NeverFired, match=says("backward() ran in this block", "0:grad_output")):
        with blocks.pop(verb):
            loss.backward()
    for block in blocks.values():
        with block:
            pass


def test_a_pattern_of_gradients_around_the_backward_alone_warns() -> None:
    model, x = mlp(), torch.randn(2, 4)
    model(x).sum().backward()
    loss = model(x).sum()
    with pytest.warns(hl.HooklineWarning, match=says("got no gradient")):
        with hl.capture(model, "*:grad_output"):
            loss.backward()


def test_gradients_that_are_followed_since_an_earlier_forward_may_come_in_another_block() -> None:
    model, x = mlp(), torch.randn(2, 4)
    hooks = hl.Hooks(model)
    hooks.edit("0:grad_output", torch.zeros_like)
    loss = model(x).sum()
    with hooks:
        loss.backward()
    hooks.remove()
    assert not model[0].weight.grad.any()
    model.zero_grad()
    block = hl.edit(model, "0:grad_output", torch.zeros_like)
    with block:
        loss = model(x).sum()
    with block:
        loss.backward()
    assert not model[0].weight.grad.any()
    with hl.edit(model, "0:grad_output", torch.zeros_like):
        model.zero_grad()  # No backward.
