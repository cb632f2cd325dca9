"""Methods that run without a forward of the model: what did not fire then, and what is said of it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookline as hl
from tests.support.states import state_of


class Coder(nn.Module):
    """Encodes and decodes, by methods of every kind."""

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
    """Calls a method of its part, and not its forward."""

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
        with pytest.raises(hl.NeverFired, match=r"'coder.decode\(\)' was not called: 'coder.encode\(\)' ran, and did"):
            with CHANGES[verb](model, "coder.decode()"):
                model.coder.encode(X)
        assert state_of(model) == before

    def test_the_forward_of_the_module_is_one_of_them(self) -> None:
        model = Holder()
        with pytest.raises(hl.NeverFired, match=r"'coder.rectify\(\)' was not called: 'coder' and 'coder.encode"):
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
        with pytest.raises(
            hl.NeverFired, match=r"^'decode\(\)' was not called: 'encode\(\)' ran, and did not call it$"
        ):
            hl.run(Coder().encode, X, patch={"decode()": 0.0})


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have no notes before Python 3.11")
class TestSkips:
    @pytest.mark.parametrize(
        ("skip", "what"), [("encode()", "its first argument"), ({"encode()": torch.zeros(2, 3)}, "the given value")]
    )
    def test_an_error_after_a_skip_names_the_skip(self, skip: Any, what: str) -> None:
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as raised:
            hl.run(Coder(), X, skip=skip)
        (note,) = raised.value.__notes__
        assert note.startswith(f"hookline: 'encode()' was skipped, and {what} stood for its result; if that does not")

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
        with pytest.raises(
            hl.NeverFired, match=rf"'coder/relu' did not fire: '{method}\(\)' gives a {kind}, which runs"
        ):
            with hl.patch(model, {"coder/relu": 7.0}):
                result = getattr(model.coder, method)(X)
                assert (next(result) if method == "steps" else asyncio.run(result)).equal(X)

    def test_the_forward_that_called_a_method_is_named_as_the_place(self) -> None:
        model = Holder()
        with pytest.raises(
            hl.NeverFired,
            match=r"^'coder/relu' did not fire: 'coder.encode\(\)' was called by the model's own forward, .*: '/relu'$",
        ):
            hl.run(model, X, patch={"coder/relu": 7.0})
        assert hl.run(model, X, patch={"/relu": 7.0}).eq(7).all()
        whole = nn.Sequential(model)
        with pytest.raises(hl.NeverFired, match=r"was called by the forward of '0', .*: '0/relu'$"):
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

        def rectify(module: nn.Module, x: Tensor) -> Tensor:  # A plain function: what it calls is its caller's.
            return torch.relu(x)

        model = Outer()
        with hl.capture(model, "/relu", keep="all") as acts:
            model.encode(X)
        assert [value.mean().item() for value in acts.calls("/relu")] == [1.0, 2.0]
