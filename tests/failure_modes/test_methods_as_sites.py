"""Methods as sites: refused names, calls that bypass the instance, copies, early stops, calls without a forward."""

from __future__ import annotations

import asyncio
import functools
import inspect
import itertools
import pickle
import re
import sys
import types
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookline as hl
from tests.errors.wording import says
from tests.support.models import COPIES, AttentionInMethods, LayerInMethods, ModelInMethods, tokens
from tests.support.states import state_of


class Awkward(nn.Module):
    """Has attributes that look like methods."""

    constant = 3

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.size = 4
        self.weights = nn.Parameter(torch.ones(4))

    @property
    def scale(self) -> Callable[[Tensor], Tensor]:
        raise AssertionError("a property was run")

    @functools.cached_property
    def mask(self) -> Callable[[Tensor], Tensor]:
        raise AssertionError("a cached property was run")

    def split_heads(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.split_heads(self.body(x))

    def __len__(self) -> int:
        return 1


REFUSED = {
    "0.scale()": says("is a property"),
    "0.mask()": says("is a cached property"),
    "0.forward()": r"forward.*'0'",
    "0.__len__()": "__len__",
    "0.__call__()": "__call__",
    "0.body()": r"'0\.body'.*(module|Linear)|(module|Linear).*'0\.body'",
    "0.size()": r"'0\.size\(\)'.*int",
    "0.constant()": r"'0\.constant\(\)'.*int",
    "0.weights()": r"'0\.weights\(\)'",
    "0.split_haeds()": says("did you mean", "0.split_heads()"),
    "0.nothing_like_it()": r"'0\.nothing_like_it\(\)'.*Awkward",
    "9.split_heads()": r"'9",
    "0.split_heads": says("is a method", "0.split_heads", "0.split_heads()"),
    "0#1.split_heads()": r"counted behind it, as in '0\.split_heads\(\)#0'|unexpected",
    "split_heads()": r"'split_heads\(\)'",
    "*.zzz*()": r"'\*\.zzz\*\(\)' matches no",
    "0.split_heads(x)": r"\(\)|unexpected",
    "0.split_heads(": r"\(\)|unexpected|closed",
    "0.split_heads().T": "unexpected|'T'",
    "0.()": r"\(\)|unexpected|name",
}


@pytest.mark.parametrize("where", REFUSED)
def test_what_is_no_method_is_refused_with_the_reason(where: str) -> None:
    model = nn.Sequential(Awkward())
    before = state_of(model)
    with pytest.raises(hl.SiteError, match=REFUSED[where]):
        hl.capture(model, where)
    with pytest.raises(hl.SiteError, match=REFUSED[where]):
        hl.sites(model, where)
    assert state_of(model) == before


def test_a_star_passes_over_properties_without_running_them() -> None:
    assert [str(site) for site in hl.sites(Awkward(), "*()")] == ["split_heads()"]
    _, acts = hl.run(Awkward(), torch.ones(2, 4), capture="*()")
    assert list(acts) == ["split_heads()"]


def test_a_class_that_hands_out_attributes_of_its_own_is_not_probed() -> None:
    asked = []

    class Asking(AttentionInMethods):
        def __getattr__(self, name: str) -> Any:
            asked.append(name)
            return super().__getattr__(name)

    model, x = Asking(), tokens()
    model(x)
    usual, asked[:] = list(asked), []
    hl.sites(model, "*()")
    with hl.capture(model, "pattern()"):
        model(x)
    assert set(asked) <= set(usual)


class Above(nn.Module):
    """Its subclass calls its methods in ways that bypass the instance."""

    def step(self, x: Tensor) -> Tensor:
        return x + 1

    @staticmethod
    def static(x: Tensor) -> Tensor:
        return x + 2


class Around(Above):
    """Calls inherited methods through super() or the class."""

    def forward(self, x: Tensor, way: str) -> Tensor:
        if way == "super":
            return super().step(x)
        return Above.step(self, x) if way == "class" else Around.static(x)


@pytest.mark.parametrize(("way", "site"), [("super", "step()"), ("class", "step()"), ("static", "static()")])
def test_a_call_that_goes_around_the_instance_is_not_passed_over_in_silence(way: str, site: str) -> None:
    model, x = Around(), torch.ones(2)
    text = re.escape(f"'{site}'")
    with pytest.raises(hl.NeverFired, match=says("was not called in forward of", f"'{site}'", 1)):
        hl.run(model, x, way, capture=site)
    for change in (hl.patch(model, {site: 0.0}), hl.edit(model, site, torch.zeros_like), hl.skip(model, site)):
        with pytest.raises(hl.NeverFired, match=text), change:
            model(x, way)
    with pytest.raises(hl.NotCaptured, match=text), pytest.warns(hl.HooklineWarning, match=says("was not called")):
        with hl.capture(model, "*()") as acts:
            model(x, way)
        acts[site]


def test_a_number_that_was_not_reached_is_counted_for_the_user() -> None:
    with pytest.raises(hl.NeverFired, match=says("was not reached was", "pattern()#2", "pattern()", 1)):
        hl.run(AttentionInMethods(), tokens(), capture="pattern()#2")


def test_a_method_that_takes_nothing_has_no_input() -> None:
    class Table(nn.Module):
        def table(self) -> Tensor:
            return torch.ones(2)

        def forward(self, x: Tensor) -> Tensor:
            return x * self.table()

    _, acts = hl.run(Table(), torch.ones(2), capture=["table()", "table():inputs"])
    assert acts["table():inputs"] == {}
    with pytest.raises(hl.NeverFired, match=says("did not fire called", "table():input")):
        hl.run(Table(), torch.ones(2), capture="table():input")
    with pytest.raises(hl.EditError, match=says("called without an argument to", "table()")):
        hl.run(Table(), torch.ones(2), skip="table()")


def test_no_other_instance_of_the_class_is_touched() -> None:
    model, other, x = ModelInMethods(), ModelInMethods(), tokens()
    namespaces = [dict(vars(kind)) for kind in (ModelInMethods, LayerInMethods, AttentionInMethods, nn.Module)]
    plain, before = other(x), state_of(other)
    with hl.patch(model, {"**.pattern()": 0.0, "encode()": 0.0}):
        assert model(x).equal(model.head(torch.zeros(2, 5, 8)))
        assert torch.equal(other(x), plain)
        assert state_of(other) == before
        assert other.h[0].attn.pattern.__func__ is AttentionInMethods.pattern
        assert ModelInMethods()(x).shape == (2, 5, 4)
        assert [
            dict(vars(kind)) for kind in (ModelInMethods, LayerInMethods, AttentionInMethods, nn.Module)
        ] == namespaces


def test_an_open_block_leaves_all_else_of_the_model_alone() -> None:
    model = ModelInMethods()

    def seen_from_outside() -> list[object]:
        return [
            repr(model), list(model.state_dict()), [id(one) for one in model.parameters()], list(model.named_modules()),
            type(model), model.training, [type(module) for module in model.modules()],
        ]  # fmt: skip

    before, signature = seen_from_outside(), inspect.signature(model.h[0].attn.pattern)
    with hl.capture(
        model,
        "encode()",
        "**.attn.{split_heads,merge_heads,pattern}():input",
        "**.attn.{pattern,merge_heads}():grad_output",
    ):
        assert seen_from_outside() == before
        model.eval().to(torch.float64)
        assert model.h[0].attn.pattern.__name__ == "pattern"
        assert inspect.signature(model.h[0].attn.pattern) == signature
        assert model(tokens().double()).dtype == torch.float64
        model.to(torch.float32).train()
        assert seen_from_outside() == before


OTHERS: dict[str, Callable[[AttentionInMethods], Any]] = {
    "function": lambda model: lambda query, key: torch.full((2, 2, 5, 5), 0.2),
    "bound method": lambda model: types.MethodType(AttentionInMethods.pattern, model),
    "partial": lambda model: functools.partial(AttentionInMethods.pattern, model, temperature=1.0),
}


@pytest.mark.parametrize("what", OTHERS)
def test_what_somebody_put_on_the_instance_is_called_and_put_back(what: str) -> None:
    model, x = AttentionInMethods(), tokens()
    model.pattern = theirs = OTHERS[what](model)  # type: ignore[method-assign]
    before, plain = state_of(model), model(x)
    with hl.capture(model, "pattern()", "pattern():input") as acts:
        assert torch.equal(model(x), plain)
    assert torch.equal(acts["pattern()"], theirs(acts["pattern():input"], key=model.split_heads(x, scale=0.5)))
    assert hl.run(model, x, patch={"pattern()": 0.0}).count_nonzero() == 0
    assert vars(model)["pattern"] is theirs
    assert state_of(model) == before


def test_what_somebody_puts_on_the_instance_meanwhile_stays() -> None:
    model, x = AttentionInMethods(), tokens()
    plain = model(x)
    with hl.edit(model, "merge_heads()", lambda value: value + 1):
        inside = model.merge_heads
        model.merge_heads = lambda value: inside(value) * 10  # type: ignore[method-assign]
        assert torch.allclose(model(x), (plain + 1) * 10)
    assert torch.equal(model(x), plain * 10)
    assert len(hl.attached(model)) in (0, 1)
    del model.merge_heads
    assert torch.equal(model(x), plain)


def test_a_bound_method_that_was_taken_inside_a_block_is_inert_after_it() -> None:
    model, x = AttentionInMethods(), tokens()
    with hl.edit(model, "pattern()", torch.zeros_like), hl.capture(model, "pattern()", keep="all") as acts:
        kept = model.pattern
        model(x)
    query, key = model.split_heads(x), model.split_heads(x)
    assert torch.equal(kept(query, key), model.pattern(query, key))
    assert torch.equal(kept(query, key=key, temperature=1.0), model.pattern(query, key, 1.0))
    assert len(acts.calls("pattern()")) == 1


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_blocks_on_one_method_may_be_left_in_any_order(order: tuple[int, ...]) -> None:
    model, x = AttentionInMethods(), tokens()
    plain, before = model(x), state_of(model)
    blocks = [
        hl.edit(model, "merge_heads()", lambda value: value + 1),
        hl.edit(model, "", lambda value: value + 10),
        hl.edit(model, "merge_heads()", lambda value: value + 100),
    ]
    for block in blocks:
        block.__enter__()
    left = [1, 10, 100]
    for position in order:
        assert torch.allclose(model(x), plain + sum(left), atol=1e-4)
        blocks[position].__exit__(None, None, None)
        left[position] = 0
    assert torch.equal(model(x), plain)
    assert state_of(model) == before


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_made_inside_a_block_is_an_unhooked_model_with_its_own_weights(how: str) -> None:
    model, x = ModelInMethods(), tokens()
    model.head.act = torch.relu
    plain = model(x)
    with hl.patch(model, {"**.pattern()": 0.0, "encode()": 0.0}), hl.edit(model, "head.act()", torch.zeros_like):
        twin = COPIES[how](model)
        assert twin.head.act is torch.relu
        assert torch.equal(twin(x), plain)
        assert torch.equal(twin.encode(x), ModelInMethods.encode(twin, x))
        assert len(hl.attached(twin)) == 0
        with torch.no_grad():
            twin.h[0].attn.proj.weight.mul_(0.5)
        with hl.capture(twin, "h.0.attn.split_heads()#0") as of_twin:
            twin(x)
        assert b"hookline" not in pickle.dumps(model)
    attn = twin.h[0].attn
    assert torch.equal(of_twin["h.0.attn.split_heads()#0"], attn.split_heads(attn.proj(x)))
    assert torch.equal(model(x), plain)
    assert not torch.equal(twin(x), plain)


class Bound(nn.Linear):
    """Its methods are not plain functions; reading one from the instance binds it."""

    @functools.lru_cache(maxsize=2)  # noqa: B019
    def cached(self, x: Tensor) -> Tensor:
        return x @ self.weight

    through = functools.partialmethod(nn.Linear.forward)


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("name", ["cached", "through"])
def test_a_method_that_is_no_plain_function_runs_with_the_weights_of_the_copy(name: str, how: str) -> None:
    model, x = Bound(4, 4), torch.ones(2, 4)
    with hl.edit(model, f"{name}()", torch.zeros_like):
        twin = COPIES[how](model)
        with torch.no_grad():
            twin.weight.zero_(), twin.bias.zero_()
        assert getattr(twin, name)(x).count_nonzero() == 0
    assert getattr(model, name)(x).count_nonzero() > 0
    assert getattr(twin, name)(x).count_nonzero() == 0


def test_tied_modules_have_their_methods_under_every_name() -> None:
    model, x = ModelInMethods(), tokens()
    model.again = model.h[0]
    for site in ("h.0.attn.pattern()", "again.attn.pattern()"):
        _, acts = hl.run(model, x, capture=site)
        assert acts[site].shape == (2, 2, 5, 5)
    assert len(hl.sites(model, "**.pattern()")) == 2
    hooks = hl.Hooks(model)
    hooks.edit("h.0.attn.pattern()", torch.zeros_like)
    assert len(hooks.at("again.attn.pattern()")) == 1
    hooks.remove()


class Strange(nn.Module):
    """Has methods that do not run when they are called, or that run several times."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)

    def steps(self, x: Tensor) -> Iterator[Tensor]:
        for number in range(3):
            yield self.body(x) * number

    async def later(self, x: Tensor) -> Tensor:
        await asyncio.sleep(0)
        return self.body(x)

    async def stream(self, x: Tensor) -> AsyncIterator[Tensor]:
        yield self.body(x)

    def deeper(self, x: Tensor, depth: int) -> Tensor:
        return x if depth == 0 else self.deeper(self.body(x), depth - 1)

    def forward(self, x: Tensor, depth: int = 3) -> Tensor:
        return sum(self.steps(x), self.deeper(x, depth))


def test_a_generator_is_handed_on_and_not_used_up() -> None:
    model, x = Strange(), torch.ones(2, 4)
    plain, before = model(x), state_of(model)
    with hl.capture(model, "steps():input") as acts:
        assert torch.equal(model(x), plain)
    with pytest.raises(hl.HooklineError, match=says("a generator passes here", "steps()")):
        hl.run(model, x, capture="steps()")
    assert torch.equal(acts["steps():input"], x)
    with hl.edit(model, "steps():input", torch.zeros_like):
        assert torch.equal(model(x, 0), x + model.body(torch.zeros_like(x)) * 3)
    assert state_of(model) == before


def test_coroutines_are_handed_on_and_run_when_they_are_awaited() -> None:
    model, x = Strange(), torch.ones(2, 4)

    async def use(call: Callable[[Tensor], Awaitable[Tensor]]) -> tuple[Tensor, list[Tensor]]:
        return await call(x), [part async for part in model.stream(x)]

    with hl.capture(model, "later():input", "stream():input", "body", keep="all") as acts:
        output, parts = asyncio.run(use(model.later))
    assert torch.equal(output, model.body(x))
    assert torch.equal(parts[0], output)
    assert torch.equal(acts["later():input"], x)
    assert len(acts.calls("body")) == 2
    with hl.edit(model, "later():input", torch.zeros_like):
        output, _ = asyncio.run(use(model.later))
    assert torch.equal(output, model.body(torch.zeros_like(x)))


def test_every_call_of_a_method_that_calls_itself_is_seen() -> None:
    model, x = Strange(), torch.ones(2, 4)
    values = [x]
    for _ in range(3):
        values.append(model.body(values[-1]))
    with hl.capture(model, "deeper():input", "deeper()", "deeper()#2:input", keep="all") as acts:
        model(x)
    assert all(torch.equal(*pair) for pair in zip(acts.calls("deeper():input"), values, strict=True))
    assert all(torch.equal(value, values[-1]) for value in acts.calls("deeper()"))
    assert len(acts.calls("deeper()")) == 4
    assert torch.equal(acts["deeper()#2:input"], values[2])
    assert torch.equal(hl.run(model.deeper, x, 2, patch={"deeper()": 7.0}), torch.full((2, 4), 7.0))


class Coder(nn.Module):
    """Encodes and decodes, with methods of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.W = nn.Parameter(torch.ones(8, 4))

    def encode(self, x: Tensor) -> Tensor:
        return torch.relu(self.up(x))

    def decode(self, x: Tensor) -> Tensor:
        return x @ self.W

    def steps(self, x: Tensor) -> Iterator[Tensor]:
        yield torch.relu(x)

    async def later(self, x: Tensor) -> Tensor:
        return torch.relu(x)

    @staticmethod
    def rectify(x: Tensor) -> Tensor:
        return torch.relu(x)

    @classmethod
    def rectify_by_class(cls, x: Tensor) -> Tensor:
        return torch.relu(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x))


class Holder(nn.Module):
    """Calls a method of its coder, but not the coder's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.coder = nn.Linear(4, 4), Coder()

    def forward(self, x: Tensor) -> Tensor:
        return self.coder.encode(self.body(x))


X, H = torch.ones(2, 4), torch.ones(2, 8)
CHANGES: dict[str, Callable[[nn.Module, str], hl.Hooks]] = {
    "patch": lambda model, site: hl.patch(model, {site: 0.0}),
    "edit": lambda model, site: hl.edit(model, site, torch.zeros_like),
    "skip": lambda model, site: hl.skip(model, site),
}


class TestOtherMethods:
    @pytest.mark.parametrize("verb", CHANGES)
    def test_a_change_of_a_method_says_which_other_method_of_the_module_ran(self, verb: str) -> None:
        model = Holder()
        before = state_of(model)
        with pytest.raises(hl.NeverFired, match=says("was not called ran", "coder.decode()", "coder.encode()")):
            with CHANGES[verb](model, "coder.decode()"):
                model.coder.encode(X)
        assert state_of(model) == before

    def test_the_forward_of_the_module_is_one_of_them(self) -> None:
        model = Holder()
        with pytest.raises(
            hl.NeverFired, match=says("was not called ran", "coder.rectify()", "'coder' and 'coder.encode…")
        ):
            with hl.patch(model, {"coder.rectify()": 0.0}):
                model.coder(X)

    def test_a_method_that_is_called_among_others_says_nothing(self) -> None:
        model = Holder()
        with hl.patch(model, {"coder.decode()": 0.0}):
            assert not model.coder.decode(model.coder.encode(X)).any()
        with hl.patch(model, {"coder.encode()": 0.0}):
            assert not model(X).any()

    def test_a_block_in_which_nothing_runs_says_nothing_also_after_one_in_which_another_ran(self) -> None:
        model = Holder()
        hooks = hl.Hooks(model, active=False)
        hooks.patch({"coder.decode()": 0.0, "coder/relu": 0.0})
        with pytest.raises(hl.NeverFired), hooks:
            model.coder.encode(X)
        with hooks:
            pass

    def test_methods_of_other_models_do_not_count(self) -> None:
        model, other = Holder(), Holder()
        with hl.patch(model, {"coder.decode()": 0.0}):
            other.coder.encode(X)


class TestRun:
    @pytest.mark.parametrize("site", ["coder.decode()", "body", "coder.W:param"])
    def test_a_method_that_is_run_by_name_is_what_ran(self, site: str) -> None:
        model = Holder()
        with pytest.raises(hl.NeverFired, match=r"'coder.encode\(\)'") as raised:
            hl.run(model.coder.encode, X, model=model, patch={site: 0.0})
        assert not any(word in str(raised.value) for word in ("forward", "super()"))

    def test_a_method_of_the_model_itself_is_named_too(self) -> None:
        with pytest.raises(hl.NeverFired, match=says("was not called ran", "decode()", "encode()")):
            hl.run(Coder().encode, X, patch={"decode()": 0.0})


@pytest.mark.skipif(sys.version_info < (3, 11), reason="needs Python 3.11, whose exceptions have notes")
class TestSkips:
    @pytest.mark.parametrize(
        ("skip", "what"), [("encode()", "its first argument"), ({"encode()": torch.zeros(2, 3)}, "the given value")]
    )
    def test_an_error_after_a_skip_names_the_skip(self, skip: Any, what: str) -> None:
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as raised:
            hl.run(Coder(), X, skip=skip)
        (note,) = raised.value.__notes__
        assert note.startswith(f"hookline: 'encode()' was skipped, and {what} was used as its result; if that does not")

    def test_an_error_before_the_skip_or_of_another_kind_has_no_note(self) -> None:
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as raised:
            hl.run(Coder(), torch.ones(2, 5), skip={"decode()": torch.zeros(2, 4)})
        assert not hasattr(raised.value, "__notes__")
        with pytest.raises(hl.EditError) as refused:
            hl.run(Holder(), X, skip={"coder.encode()": H}, edit={"": lambda value: value[:1]})
        assert not hasattr(refused.value, "__notes__")

    def test_a_skip_of_an_earlier_forward_is_not_named(self) -> None:
        model = Coder()
        hooks = hl.Hooks(model)
        hooks.skip("decode()", torch.zeros(2, 4))
        model(X)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as raised:
            model(torch.ones(2, 5))
        assert not hasattr(raised.value, "__notes__")
        hooks.remove()


class TestFunctions:
    @pytest.mark.parametrize("method", ["rectify", "rectify_by_class"])
    def test_static_and_class_methods_have_functions_too(self, method: str) -> None:
        model = Holder()
        before = state_of(model)
        with hl.patch(model, {"coder/relu": 7.0}), hl.capture(model, "coder/*") as acts:
            assert getattr(model.coder, method)(X).eq(7).all()
        assert list(acts) == ["coder/relu#0"]
        assert state_of(model) == before

    @pytest.mark.parametrize("method", ["steps", "later"])
    def test_a_method_that_runs_later_is_given_as_the_reason(self, method: str) -> None:
        model = Holder()
        kind = "generator" if method == "steps" else "coroutine"
        with pytest.raises(hl.NeverFired, match=says("did not fire returns", "coder/relu", f"{method}()", kind)):
            with hl.patch(model, {"coder/relu": 7.0}):
                result = getattr(model.coder, method)(X)
                assert (next(result) if method == "steps" else asyncio.run(result)).equal(X)

    def test_the_forward_that_called_a_method_is_named_as_the_place(self) -> None:
        model = Holder()
        with pytest.raises(
            hl.NeverFired,
            match=says("did not fire was", "coder/relu", "coder.encode()", "'/relu'"),
        ):
            hl.run(model, X, patch={"coder/relu": 7.0})
        assert hl.run(model, X, patch={"/relu": 7.0}).eq(7).all()
        whole = nn.Sequential(model)
        with pytest.raises(hl.NeverFired, match=says("was called by the forward", "'0',", "'0/relu'")):
            hl.run(whole, X, patch={"0.coder/relu": 7.0})

    def test_the_first_parameter_of_a_method_may_have_any_name(self) -> None:
        class Inner(nn.Module):
            def help(this, x: Tensor) -> Tensor:  # noqa: N805
                return torch.relu(x)

        class Outer(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = Inner()

            def encode(module, x: Tensor) -> Tensor:  # noqa: N805
                return torch.relu(module.inner.help(x) + rectify(module.inner, x))

            def forward(self, x: Tensor) -> Tensor:
                return self.encode(x)

        def rectify(module: nn.Module, x: Tensor) -> Tensor:  # The calls in a plain function belong to its caller.
            return torch.relu(x)

        model = Outer()
        with hl.capture(model, "/relu", keep="all") as acts:
            model.encode(X)
        assert [value.mean().item() for value in acts.calls("/relu")] == [1.0, 2.0]
