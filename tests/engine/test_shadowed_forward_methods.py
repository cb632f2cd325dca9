"""Methods as sites: `h.0.attn.split_heads()`. Every kind of method, and every action at one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hookline as hl
from tests.errors.wording import says
from tests.support.models import AttentionInMethods, ModelInMethods, loss_of, tokens
from tests.support.states import state_of


def names(model: nn.Module, *where: Any) -> list[str]:
    return [str(site) for site in hl.sites(model, *where)]


def values_by_hand(attn: AttentionInMethods, x: Tensor) -> dict[str, Any]:
    """Return the values at the methods of one attention, from a forward by hand."""
    query, key = attn.split_heads(attn.proj(x)), attn.split_heads(x, scale=0.5)
    pattern = attn.pattern(query, key)
    return {
        "split_heads()#0": query,
        "split_heads()#1": key,
        "split_heads()#1:input": x,
        'split_heads()#1:inputs["scale"]': 0.5,
        "pattern()": pattern,
        "pattern():input": query,
        'pattern():inputs["key"]': key,
        "pattern()[:, 0, -1]": pattern[:, 0, -1],
        "merge_heads():input": pattern @ key,
        "merge_heads()": attn(x),
    }


def test_a_method_is_seen_at_every_port_with_subscripts_and_numbers() -> None:
    model, x = ModelInMethods(), tokens()
    expected = {f"h.0.attn.{site}": value for site, value in values_by_hand(model.h[0].attn, x).items()}
    before, plain = state_of(model), model(x)
    with hl.capture(model, *expected, "h.0.attn.pattern():inputs") as acts:
        assert torch.equal(model(x), plain)
    assert set(acts) == {*expected, "h.0.attn.pattern():inputs"}
    for site, value in expected.items():
        assert torch.equal(torch.as_tensor(acts[site]), torch.as_tensor(value)), site
    assert list(acts["h.0.attn.pattern():inputs"]) == ["query", "key"], "a default is recorded as an argument"
    assert state_of(model) == before


def test_a_method_of_the_model_itself_has_no_path() -> None:
    model, x = ModelInMethods(), tokens()
    output, acts = hl.run(model, x, capture=["encode()", "encode():input"])
    assert torch.equal(model.head(acts["encode()"]), output)
    assert torch.equal(acts["encode():input"], x)
    assert names(model, "encode()") == ["encode()"]
    assert hl.Site.parse("encode()") == hl.Site("", member="encode()")
    assert hl.Site.parse("h.0.attn.split_heads()#1:input[0]") == hl.Site("h.0.attn", "input", "[0]", 1, "split_heads()")


def test_the_gradients_of_a_method_equal_the_oracle() -> None:
    model, x = AttentionInMethods(), tokens()
    query, key = model.split_heads(model.proj(x)), model.split_heads(x, scale=0.5).requires_grad_()
    pattern = model.pattern(query, key)
    mixed = pattern @ key
    of_pattern, of_mixed, of_query = torch.autograd.grad(loss_of(model.merge_heads(mixed)), [pattern, mixed, query])
    sites = ("pattern():grad_output", "merge_heads():grad_input", 'pattern():grad_inputs["query"]')
    plain = torch.autograd.grad(loss_of(model(x)), list(model.parameters()))
    with hl.capture(model, *sites) as acts:
        loss_of(model(x)).backward()
    for site, expected in zip(sites, (of_pattern, of_mixed, of_query), strict=True):
        torch.testing.assert_close(acts[site], expected, msg=site)
    assert all(torch.equal(*pair) for pair in zip(plain, (one.grad for one in model.parameters()), strict=True))
    model.zero_grad()
    with hl.edit(model, "pattern():grad_output", lambda gradient: gradient * 0):
        loss_of(model(x)).backward()
    assert model.proj.weight.grad.count_nonzero() == 0


def test_a_method_is_patched_edited_skipped_and_stopped_at() -> None:
    model, x = AttentionInMethods(), tokens()
    key = model.split_heads(x, scale=0.5)
    uniform = model.merge_heads(torch.full((2, 2, 5, 5), 0.2) @ key)
    assert torch.equal(hl.run(model, x, patch={"pattern()": 0.2}), uniform)
    assert torch.equal(hl.run(model, x, edit={"merge_heads()": lambda value: value * 2}), model(x) * 2)
    assert torch.equal(hl.run(model, x, patch={"merge_heads()[:, 0]": 0.0})[:, 0], torch.zeros(2, 8))
    assert torch.equal(
        hl.run(model, x, edit={'pattern():inputs["key"]': torch.zeros_like}),
        model.merge_heads(model.pattern(model.split_heads(model.proj(x)), torch.zeros_like(key)) @ key),
    )
    mixed = model.pattern(model.split_heads(model.proj(x)), key) @ key
    assert torch.equal(hl.run(model, x, skip="merge_heads()"), mixed)
    assert torch.equal(hl.run(model, x, skip={"pattern()": torch.full((2, 2, 5, 5), 0.2)}), uniform)
    output, acts = hl.run(model, x, capture="pattern()", stop=True)
    assert output is None
    assert torch.equal(acts["pattern()"] @ key, mixed)


def test_a_skipped_method_is_not_computed() -> None:
    class Failing(AttentionInMethods):
        def merge_heads(self, x: Tensor) -> Tensor:
            raise AssertionError("computed")

    model, x = Failing(), tokens()
    with hl.skip(model, "merge_heads()"), hl.capture(model, "merge_heads()", "merge_heads():input") as acts:
        model(x)
    assert torch.equal(acts["merge_heads()"], acts["merge_heads():input"])
    for site in ("merge_heads():input", "merge_heads()[0]"):
        with pytest.raises(hl.SiteError, match=says("skipped as a whole")):
            hl.skip(model, site)


def test_the_number_counts_calls_of_the_method_since_the_block_was_entered() -> None:
    model, x = AttentionInMethods(), tokens()
    hooks = hl.Hooks(model)
    hooks.edit("split_heads()#1", torch.zeros_like)
    dead = model(x)
    assert dead.count_nonzero() == 0
    assert torch.equal(model(x), AttentionInMethods.forward(model, x))
    for _ in range(2):
        with hooks:
            assert torch.equal(model(x), dead)
    hooks.remove()
    with hl.capture(model, "split_heads()#2", "split_heads()", keep="all") as acts:
        model(x), model(x * 2)
    assert len(acts.calls("split_heads()")) == 4
    assert torch.equal(acts["split_heads()#2"], model.split_heads(model.proj(x * 2)))


def test_a_method_called_several_times_in_one_forward_warns_when_only_the_last_is_kept() -> None:
    model, x = AttentionInMethods(), tokens()
    _, acts = hl.run(model, x, capture="split_heads()")
    with pytest.warns(hl.HooklineWarning, match=r"'split_heads\(\)'.*keep=.all.*#n"):
        assert torch.equal(acts["split_heads()"], model.split_heads(x, scale=0.5))


def test_wildcards_in_the_path_and_in_the_name() -> None:
    model = ModelInMethods()
    assert names(model, "h.*.attn.pattern()") == ["h.0.attn.pattern()", "h.1.attn.pattern()"]
    assert names(model, "**.pattern()") == ["h.0.attn.pattern()", "h.1.attn.pattern()"]
    assert names(model, "**.encode()") == ["encode()"]
    assert names(model, ("h.0.attn.pattern()", ":input[0]")) == ["h.0.attn.pattern():input[0]"]
    assert names(model, "h.1.attn.*_heads()") == ["h.1.attn.split_heads()", "h.1.attn.merge_heads()"]
    assert len(names(model, "h.1.attn.{pattern,merge_heads}()#0:input[0]")) == 2
    every = ["split_heads()", "merge_heads()", "pattern()", "unused()"]
    assert names(AttentionInMethods(), "*()") == every
    assert names(model, "h.0.attn.*()") == [f"h.0.attn.{name}" for name in every]
    assert names(model, "*()") == ["encode()"]
    with pytest.warns(hl.HooklineWarning, match=says("was not called more", "h.0.attn.unused()", 1)):
        _, acts = hl.run(model, tokens(), capture="h.*.attn.*()")
    assert len(acts) == 6
    assert "h.1.attn.pattern()" in acts


def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def inner(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return inner


class Adder:
    """An object that can be called."""

    def __call__(self, x: Tensor) -> Tensor:
        return x + 1


class Parent(nn.Module):
    """The base class of Kinds, with methods to inherit and to override."""

    shift = 3.0

    def inherited(self, x: Tensor) -> Tensor:
        return x + 1

    def overridden(self, x: Tensor) -> Tensor:
        return x + 2


class Kinds(Parent):
    """Has a method of every kind; forward calls the one named `kind`."""

    def __init__(self) -> None:
        super().__init__()
        self.function = F.gelu
        self.anonymous = lambda x: x * 3
        self.partial = functools.partial(torch.mul, other=4.0)
        self.builtin = torch.relu
        self.callable = Adder()

    def forward(self, x: Tensor, kind: str) -> Tensor:
        return getattr(self, kind)(x)

    def plain(self, x: Tensor) -> Tensor:
        return x + 5

    def overridden(self, x: Tensor) -> Tensor:
        return super().overridden(x) * 2

    @staticmethod
    def static(x: Tensor) -> Tensor:
        return x + 6

    @classmethod
    def of_the_class(cls, x: Tensor) -> Tensor:
        return x + cls.shift

    @decorated
    def wrapped(self, x: Tensor) -> Tensor:
        return x + 7

    @functools.lru_cache(maxsize=2)  # noqa: B019
    def cached(self, x: Tensor) -> Tensor:
        return x + 8

    @torch.no_grad()
    def without_gradients(self, x: Tensor) -> Tensor:
        return x + 9

    expression = lambda self, x: x + 10  # noqa: E731
    from_outside = functools.partialmethod(plain)

    def _private(self, x: Tensor) -> Tensor:
        return x + 11


ON_THE_INSTANCE = ["function", "anonymous", "partial", "builtin", "callable"]
IN_THE_CLASS = [
    "plain", "inherited", "overridden", "static", "of_the_class", "wrapped", "cached", "without_gradients",
    "expression", "from_outside", "_private",
]  # fmt: skip


@pytest.mark.parametrize("kind", [*IN_THE_CLASS, *ON_THE_INSTANCE])
def test_every_kind_of_method_is_seen_and_changed_and_left_as_found(kind: str) -> None:
    model, x = Kinds(), torch.randn(3, 4)
    before, plain = state_of(model), model(x, kind)
    with hl.capture(model, f"{kind}()", f"{kind}():input", f"{kind}():inputs", keep="all") as acts:
        assert torch.equal(model(x, kind), plain)
    assert torch.equal(acts[f"{kind}()"], plain)
    assert len(acts.calls(f"{kind}()")) == 1, "an overridden method is one call, with the output of the override"
    assert torch.equal(acts[f"{kind}():input"], x)
    (first,) = acts[f"{kind}():inputs"].values()
    assert first is not model, "self was recorded as an argument"
    if kind in IN_THE_CLASS:
        assert list(acts[f"{kind}():inputs"]) == ["x"]
    assert hl.run(model, x, kind, patch={f"{kind}()": 0.0}).count_nonzero() == 0
    assert torch.equal(hl.run(model, x, kind, edit={f"{kind}()": lambda value: value * 2}), plain * 2)
    assert torch.equal(hl.run(model, x, kind, edit={f"{kind}():input": lambda value: value}), plain)
    assert torch.equal(hl.run(model, x, kind, skip=f"{kind}()"), x)
    assert state_of(model) == before
    assert torch.equal(model(x, kind), plain)


def test_a_star_means_what_classes_below_module_define_and_the_functions_that_the_instance_holds() -> None:
    found = set(names(Kinds(), "*()"))
    assert found - {"callable()"} == {f"{kind}()" for kind in [*IN_THE_CLASS, *ON_THE_INSTANCE] if kind != "callable"}


def test_a_method_is_seen_when_the_user_calls_it_outside_any_forward() -> None:
    model, x = ModelInMethods(), tokens()
    plain = model.encode(x)
    with hl.capture(model, "encode()", "h.0.attn.pattern()") as acts:
        output = model.encode(x)
    assert torch.equal(output, plain)
    assert torch.equal(acts["encode()"], plain)
    assert acts["h.0.attn.pattern()"].shape == (2, 2, 5, 5)
    with hl.edit(model, "encode()", lambda value: value * 2):
        assert torch.equal(model.encode(x), plain * 2)
    hooks = hl.Hooks(model)
    hooks.patch({"encode()": 0.0})
    assert model.encode(x).count_nonzero() == 0
    hooks.remove()
    assert torch.equal(model.encode(x), plain)


def test_run_sees_the_very_method_that_it_calls() -> None:
    model, x = ModelInMethods(), tokens()
    plain = model.encode(x)
    output, acts = hl.run(model.encode, x, capture=["encode()", "encode():input", "h.1"])
    assert torch.equal(output, plain)
    assert torch.equal(acts["encode()"], plain)
    assert torch.equal(acts["encode():input"], x)
    assert torch.equal(hl.run(model.encode, x, edit={"encode()": lambda value: value * 2}), plain * 2)
    assert torch.equal(hl.run(model.encode, x, skip="encode()"), x)
    output, acts = hl.run(model.encode, x, capture="h.0.attn.pattern()", stop=True)
    assert output is None
    assert acts["h.0.attn.pattern()"].shape == (2, 2, 5, 5)


def test_hooks_on_methods_are_kept_named_narrowed_rested_and_removed() -> None:
    model, x = ModelInMethods(), tokens()
    plain, before = model(x), state_of(model)
    hooks = hl.Hooks(model)
    acts = hooks.capture("h.*.attn.pattern()", "h.0.attn")
    hooks.edit("encode()", lambda value: value * 0, name="zero")
    assert torch.equal(model(x), model.head(torch.zeros(2, 5, 8)))
    assert [str(hook.site) for hook in hooks.at("h.0.attn.pattern()")] == ["h.0.attn.pattern()"]
    assert "encode()" in hooks
    assert "<edit 'zero' at 'encode()'" in repr(next(iter(hooks["zero"])))
    hooks["zero"].deactivate()
    assert torch.equal(model(x), plain)
    assert "encode" not in vars(model)
    hooks.deactivate()
    assert state_of(model) == before
    with hooks as inside:
        assert model(x).equal(model.head(torch.zeros(2, 5, 8)))
    assert inside["h.1.attn.pattern()"].equal(acts["h.1.attn.pattern()"])
    hooks.remove()
    assert state_of(model) == before


def test_hooks_on_a_module_and_on_its_methods_act_together() -> None:
    model, x = AttentionInMethods(), tokens()
    doubled = lambda value: value * 2  # noqa: E731
    plain = model(x)
    with hl.edit(model, "", doubled), hl.edit(model, "merge_heads()", doubled):
        with hl.capture(model, "", "merge_heads()", ":input", "split_heads()#1:input") as acts:
            assert torch.equal(model(x), plain * 4)
    assert torch.equal(acts["merge_heads()"], plain * 2)
    assert torch.equal(acts[""], plain * 4)
    assert torch.equal(acts[":input"], acts["split_heads()#1:input"])


def test_attached_lists_methods_and_clear_takes_them_away() -> None:
    model, x = ModelInMethods(), tokens()
    plain, before = model(x), state_of(model)
    hooks = hl.Hooks(model)
    hooks.capture("h.0.attn.pattern():input", "h.0.attn")
    hooks.edit("encode()", F.relu)
    assert {(row.site, row.kind, row.owner) for row in hl.attached(model)} == {
        ("h.0.attn.pattern():input", "capture", "hookline"),
        ("h.0.attn", "capture", "hookline"),
        ("encode()", "edit", "hookline"),
    }
    assert hl.clear(model) == 3
    assert len(hl.attached(model)) == 0
    assert state_of(model) == before
    assert torch.equal(model(x), plain)
