"""Methods called outside any forward of the model: the functions inside belong to the method's module."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hookline as hl
from tests.errors.wording import says
from tests.support.states import state_of


class Encoder(nn.Module):
    """Has methods besides forward."""

    def __init__(self) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.randn(4, 4))
        self.act = F.relu

    def prepare(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x)

    def encode(self, x: Tensor) -> Tensor:
        return torch.relu(self.prepare(x) @ self.W)

    @torch.no_grad()
    def encode_quietly(self, x: Tensor) -> Tensor:
        return torch.relu(x)

    def descend(self, x: Tensor, depth: int) -> Tensor:
        x = torch.relu(x + 1)
        return x if depth == 0 else self.descend(x, depth - 1)

    def encode_and_call(self, x: Tensor) -> Tensor:
        return torch.relu(self(x) - 1)

    def encode_and_forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.forward(x) - 1)

    @property
    def norm(self) -> Tensor:
        return torch.relu(self.W).sum()

    def train(self, mode: bool = True) -> Encoder:
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        return self.encode(x) * 2


class Coder(nn.Module):
    """Holds two encoders, and has methods of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.enc = Encoder()
        self.other = Encoder()

    def encode(self, x: Tensor) -> Tensor:
        return torch.tanh(self.enc.encode(x))

    def encode_both(self, x: Tensor) -> Tensor:
        return self.other.encode(self.enc.encode(x))

    def back_and_forth(self, x: Tensor, call: Callable[[Tensor], Tensor]) -> Tensor:
        return torch.relu(call(x))

    def finish(self, x: Tensor) -> Tensor:
        return torch.cos(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.enc.encode(x) + torch.tanh(x)


@pytest.fixture
def model() -> Coder:
    return Coder()


X = torch.linspace(-1, 1, 8).reshape(2, 4)


def expected(model: Coder, x: Tensor = X) -> Tensor:
    return torch.relu(torch.sigmoid(x) @ model.enc.W)


def test_a_method_called_by_itself_has_its_functions_captured(model: Coder) -> None:
    with hl.capture(model, "enc/relu", "enc/*", "**/sigmoid") as acts:
        model.enc.encode(X)
    assert acts["enc/relu"].equal(expected(model))
    assert [site for site in acts if "#" in site] == ["enc/sigmoid#0", "enc/matmul#0", "enc/relu#0"]


def test_a_method_called_by_itself_has_its_functions_changed(model: Coder) -> None:
    with hl.patch(model, {"enc/relu[:, 0]": 7.0}), hl.edit(model, "enc/sigmoid", torch.neg):
        output = model.enc.encode(X)
    wanted = torch.relu(-torch.sigmoid(X) @ model.enc.W)
    wanted[:, 0] = 7.0
    assert output.equal(wanted)
    with hl.skip(model, "enc/relu"):
        assert model.enc.encode(X).equal(torch.sigmoid(X) @ model.enc.W)


def test_a_method_of_the_model_itself_does_so_too(model: Coder) -> None:
    with hl.capture(model, "/tanh", "enc/relu") as acts:
        output = model.encode(X)
    assert acts["/tanh"].equal(output)
    assert acts["enc/relu"].equal(expected(model))
    output, acts = hl.run(model.encode, X, capture=["/tanh", "enc/relu"], patch={"enc/relu": 0.5})
    assert output.equal(torch.full((2, 4), 0.5).tanh())
    output, acts = hl.run(model.encode, X, capture="enc/matmul", stop=True)
    assert output is None
    assert list(acts) == ["enc/matmul"]


def test_gradients_of_functions_in_a_method_come(model: Coder) -> None:
    with hl.capture(model, "enc/relu:grad_output", "enc/relu:grad_input") as acts:
        model.enc.encode(X).sum().backward()
    assert acts["enc/relu:grad_output"].equal(torch.ones(2, 4))
    assert acts["enc/relu:grad_input"].equal((expected(model) > 0).float())


def test_hooks_that_act_everywhere_act_in_methods_on_every_thread(model: Coder) -> None:
    hooks = hl.Hooks(model)
    hooks.patch({"enc/relu": 3.0})
    found: list[Tensor] = []
    thread = threading.Thread(target=lambda: found.append(model.enc.encode(X)))
    thread.start()
    thread.join()
    assert found[0].equal(torch.full((2, 4), 3.0))
    hooks.deactivate()
    assert model.enc.encode(X).equal(expected(model))
    hooks.remove()


def test_methods_that_a_method_calls_belong_to_the_same_call(model: Coder) -> None:
    with hl.capture(model, "enc/*", keep="all") as acts:
        model.enc.descend(X, 2)
    assert [site for site in acts if "relu" in site] == ["enc/relu#0", "enc/relu#1", "enc/relu#2"]
    assert [len(acts.calls(site)) for site in acts] == [1] * 6


def test_each_module_has_what_its_own_methods_call(model: Coder) -> None:
    with hl.capture(model, "enc/*", "/*", keep="all") as acts:
        model.encode_both(X)
    assert list(acts) == ["enc/sigmoid#0", "enc/matmul#0", "enc/relu#0"]
    with hl.capture(model, "other/relu", "enc/relu", keep="all") as acts:
        output = model.encode_both(X)
    assert acts["enc/relu"].equal(expected(model))
    assert acts["other/relu"].equal(output)
    assert [len(acts.calls(site)) for site in acts] == [1, 1]


def test_a_method_that_another_module_calls_back_is_still_its_modules_own(model: Coder) -> None:
    model.other.call_back = lambda x: model.finish(x)  # type: ignore[assignment]
    type(model.other).relay = lambda self, x: self.call_back(x)  # type: ignore[attr-defined]
    try:
        with hl.capture(model, "/cos", "/relu") as acts:
            model.back_and_forth(X, model.other.relay)
    finally:
        del type(model.other).relay  # type: ignore[attr-defined]
    assert list(acts) == ["/cos", "/relu"]


@pytest.mark.parametrize("method", ["encode_and_call", "encode_and_forward"])
def test_a_forward_that_a_method_calls_is_a_call_of_its_own(model: Coder, method: str) -> None:
    with hl.capture(model, "enc/relu", "enc/mul", "enc#0/relu", "enc/sub", keep="all") as acts:
        output = getattr(model.enc, method)(X)
    assert len(acts.calls("enc/relu")) == 2
    assert acts.calls("enc/relu")[0].equal(expected(model))
    assert acts.calls("enc/relu")[1].equal(output)
    assert acts.calls("enc#0/relu")[0].equal(expected(model))  # Only forwards are numbered.
    assert len(acts.calls("enc#0/relu")) == 1
    assert acts["enc/mul"].equal(expected(model) * 2)


def test_while_a_forward_of_the_model_runs_methods_are_that_forwards(model: Coder) -> None:
    with hl.capture(model, "/relu") as acts:
        with pytest.raises(hl.NeverFired, match=says("did not fire was", "enc.encode()", "/relu")):
            hl.run(model, X, capture="enc/relu")
    assert acts["/relu"].equal(expected(model))


def test_the_forward_of_a_module_outside_the_model_does_not_count(model: Coder) -> None:
    class Outer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return model.enc.encode(x)

    with hl.capture(model, "enc/relu") as acts, hl.capture(model.enc, "/relu") as own:
        output = Outer()(X)
    assert acts["enc/relu"].equal(output)
    assert own["/relu"].equal(output)


def test_a_block_inside_an_edit_function_sees_methods_too(model: Coder) -> None:
    found = []

    def look(value: Tensor) -> None:
        with hl.capture(model, "other/relu") as acts:
            model.other.encode(value)
        found.append(acts["other/relu"])

    hl.run(model, X, edit={"": look})
    assert found[0].equal(model.other.encode(model(X)))


def test_a_decorated_method_is_seen(model: Coder) -> None:
    with hl.patch(model, {"enc/relu": 1.0}):
        assert model.enc.encode_quietly(X).equal(torch.ones(2, 4))


def test_a_function_that_did_not_run_in_a_method_says_what_did(model: Coder) -> None:
    with pytest.raises(hl.NeverFired, match=says("in the methods that were", "enc", "relu")):
        with hl.capture(model, "enc/rleu"):
            model.enc.encode(X)
    with pytest.raises(hl.NeverFired, match=says("did not run", "relu", "**/relu")):
        with hl.capture(model, "/relu"):
            model.encode(X)


def test_nothing_is_left_and_nothing_of_torch_or_of_the_instance_is_touched(model: Coder) -> None:
    before = state_of(model)
    with hl.capture(model, "enc/relu"):
        shadowed = set(vars(model.enc)) & set(dir(type(model.enc)))
        assert model.enc.act is F.relu
        assert {name for name in shadowed if hasattr(nn.Module, name)} == {"forward", "_replicate_for_data_parallel"}
        assert "norm" not in vars(model.enc)
        assert "encode" not in vars(model.other)
        model.enc.encode(X)
        assert len(hl.attached(model)) == 1
    assert state_of(model) == before


def test_a_model_is_freed_when_only_what_was_captured_is_left() -> None:
    model = Coder()
    with hl.capture(model, "enc/relu", "enc.encode()") as acts:
        model.enc.encode(X)
    alive = weakref.ref(model)
    gc.disable()
    try:
        del model
        assert alive() is None
    finally:
        gc.enable()
    assert list(acts) == ["enc/relu", "enc.encode()"]


def test_a_copy_made_in_the_block_runs_its_methods_without_hooks(model: Coder) -> None:
    with hl.patch(model, {"enc/relu": 3.0}):
        twin = copy.deepcopy(model)
        assert twin.enc.encode(X).equal(expected(model))
    assert twin.enc.encode(X).equal(expected(model))


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_method_that_is_checkpointed_is_changed_again(model: Coder, reentrant: bool) -> None:
    def grads(run: Callable[[Tensor], Tensor]) -> Any:
        x = X.clone().requires_grad_()
        with hl.edit(model, "enc/sigmoid", lambda value: value * 2):
            run(x).sum().backward()
        return x.grad

    plain = grads(model.enc.encode)
    assert grads(lambda x: checkpoint(model.enc.encode, x, use_reentrant=reentrant)).equal(plain)


def test_a_function_in_a_method_runs_uncompiled() -> None:
    model = Coder()
    compiled = torch.compile(lambda x: model.enc.encode(x) + 1, backend="eager")
    assert compiled(X).equal(expected(model) + 1)
    with hl.patch(model, {"enc/relu": 3.0}):
        if torch.__version__ < "2.8":  # Torch 2.4 does not notice that the method is another one now.
            torch._dynamo.reset()
        assert compiled(X).equal(torch.full((2, 4), 4.0))
    assert compiled(X).equal(expected(model) + 1)


def test_a_method_that_another_forward_calls_keeps_nothing_of_that_forward() -> None:
    class Helps(nn.Module):
        def helper(self) -> int:
            return 1

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(x)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sub = Helps()

        def forward(self, x: Tensor) -> Tensor:
            large = x + 1
            kept.append(weakref.ref(large))
            self.sub.helper()
            del large
            kept.append(kept.pop()())
            return self.sub(x)

    kept: list[Any] = []
    model = Outer()
    with hl.capture(model, "sub/relu"):
        model(torch.ones(2))
    assert kept == [None]
