"""Functions as sites in company: modes of others, tensor subclasses, transforms, threads, copies, compilers."""

from __future__ import annotations

import asyncio
import copy
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, vmap
from torch.overrides import TorchFunctionMode

import hookline as hl
from tests.support.models import Returns
from tests.support.running import elsewhere
from tests.support.transformer import Attention, Transformer, stages_of_attention, words

pytestmark = pytest.mark.usefixtures("no_mode_is_left")


class Log(TorchFunctionMode):
    """A mode of somebody else, which notes what it sees and changes it."""

    def __init__(self, change: Callable[[Any], Any] = lambda value: value) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.change = change

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(getattr(function, "__name__", str(function)))
        result = function(*args, **(kwargs or {}))
        return self.change(result) if self.seen[-1] == "softmax" else result


def inside(mode: TorchFunctionMode) -> nn.Module:
    """A module that enters a mode of its own around a softmax."""

    def forward(x: Tensor) -> Tensor:
        with mode:
            y = torch.softmax(x, -1)
        return torch.softmax(y, 0)

    return Returns(forward)


def test_modes_of_others_see_what_they_saw_before_and_what_they_change_is_captured() -> None:
    """E23"""
    model, x = Attention(), words()
    plain = Log()
    with plain:
        model(x)
    watched = Log(lambda value: value * 2)
    hooks = hl.Hooks(model)
    acts = hooks.capture("/*")
    with watched:
        output = model(x)
    seen = iter(watched.seen)
    assert all(name in seen for name in plain.seen)  # In this order, among what hookline does itself.
    assert acts["/softmax"].sum(-1).allclose(torch.full((2, 2, 5), 2.0))
    hooks.remove()
    with hl.patch(model, {"/softmax": acts["/softmax"]}):
        assert model(x).equal(output)


def test_a_mode_that_the_forward_enters_itself_works_under_hooks() -> None:
    """E23"""
    mode, x = Log(lambda value: value * 2), torch.randn(2, 3)
    model = inside(mode)
    with hl.capture(model, "/softmax", keep="all") as acts:
        output = model(x)
    assert mode.seen == ["softmax"]
    doubled = torch.softmax(x, -1)
    assert len(acts.calls("/softmax")) == 2
    assert acts.calls("/softmax")[0].equal(doubled)  # What torch gave; the inner mode doubles it afterwards.
    assert output.equal(torch.softmax(doubled * 2, 0))
    with hl.patch(model, {"/softmax#0": 0.0}):
        assert model(x).equal(torch.softmax(torch.zeros(2, 3), 0))


class Logged(Tensor):
    """A tensor subclass that sees the functions it passes through."""

    seen: list[str] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(function.__name__)
        return super().__torch_function__(function, types, args, kwargs or {})


def test_tensor_subclasses_keep_their_class_and_see_their_functions() -> None:
    """E23"""
    model, x = Returns(lambda x: torch.softmax(x @ x, -1) + 1), torch.randn(3, 3).as_subclass(Logged)
    Logged.seen.clear()
    plain = model(x)
    before = list(Logged.seen)
    Logged.seen.clear()
    with hl.capture(model, "/*") as acts:
        output = model(x)
    seen = iter(Logged.seen)
    assert all(name in seen for name in before)
    assert type(output) is type(plain) is Logged
    assert list(acts) == ["/matmul#0", "/softmax#0", "/add#0"]
    assert type(acts["/softmax"]) is Logged
    assert torch.equal(acts["/add"].as_subclass(Tensor), plain.as_subclass(Tensor))
    assert type(hl.run(model, x, edit={"/softmax": lambda value: value * 2})) is Logged


class Plain(nn.Module):
    """One softmax."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x, -1)


def test_values_of_a_trace_or_a_transform_are_refused_and_edits_act_inside_vmap() -> None:
    """E11, E08"""
    model, x = Attention(), words()
    with (
        pytest.raises(hl.HooklineError, match="'/softmax'.*traced or exported"),
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        hl.run(copy.deepcopy(model), torch.empty(2, 5, 8), capture="/softmax")
    with pytest.raises(hl.HooklineError, match="'/softmax'.*vmap"), hl.capture(model, "/softmax"):
        vmap(model)(x[None])
    with hl.edit(model, "/softmax", lambda value: value * 2):
        torch.testing.assert_close(vmap(model)(x[None])[0], model(x))
    inside = nn.Sequential(Plain())
    for trace in (
        lambda: torch.jit.trace(inside, x),
        lambda: torch.export.export(inside, (x,)),
        lambda: torch.fx.symbolic_trace(inside),
    ):
        with pytest.raises(hl.HooklineError, match="traced"), hl.edit(inside, "0/softmax", lambda value: value * 2):
            trace()


def test_a_functional_call_is_seen_with_the_weights_it_was_given() -> None:
    """E10"""
    model, x = Attention(), words()
    other = Attention()
    with hl.capture(model, "/softmax") as acts:
        functional_call(model, dict(other.named_parameters()), (x,))
    torch.testing.assert_close(acts["/softmax"], stages_of_attention(other, x)["softmax#0"])


CONTEXTS: dict[str, Callable[[], Any]] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "no_grad": torch.no_grad,
    "inference mode": torch.inference_mode,
}


@pytest.mark.parametrize("context", CONTEXTS)
def test_capturing_changes_no_bit_under_any_context(context: str) -> None:
    """C20"""
    model, x = Transformer(), words()
    with CONTEXTS[context]():
        plain = model(x)
        with hl.capture(model, "**/*") as acts:
            output = model(x)
    assert output.equal(plain)
    assert acts["h.0.attn/matmul#0"].dtype is (torch.bfloat16 if context == "autocast" else torch.float32)
    assert not acts["h.0.attn/softmax"].is_inference()
    (acts["h.0.attn/softmax"].requires_grad_() * 2).sum().backward()
    with CONTEXTS[context](), hl.patch(model, {"h.1/add#1": 0.0}):
        assert model(x).count_nonzero() == 0


@pytest.mark.parametrize("child", ["layer", "stack", "attention"])
def test_children_with_a_fast_path_keep_it_while_functions_of_their_parent_are_hooked(child: str) -> None:
    """B15: torch computes otherwise where any mode is on."""

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
            self.stack = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            inside = self.attention(x, x, x)[0] if child == "attention" else getattr(self, child)(x)
            return torch.relu(inside) + 1

    model, x = Encoder().eval(), words()
    with torch.no_grad():
        plain = model(x)
        output, acts = hl.run(model, x, capture="/*")
        assert output.equal(plain)
        assert list(acts) == ["/relu#0", "/add#0"]
        assert hl.run(model, x, patch={"/add": 7.0}).unique().tolist() == [7.0]
        assert model(x).equal(plain)


def test_to_look_inside_a_module_does_not_turn_its_fast_path_off_and_the_reason_says_how() -> None:
    """B15"""
    attention, x = nn.MultiheadAttention(8, 2, batch_first=True).eval(), words()
    with torch.no_grad():
        plain = attention(x, x, x)[0]
        hint = "fused fast path.*set_fastpath_enabled"
        with pytest.warns(hl.HooklineWarning, match=hint), hl.capture(attention, "/*"):
            assert attention(x, x, x)[0].equal(plain)
        with pytest.raises(hl.NeverFired, match=hint), hl.capture(attention, "/multi_head_attention_forward"):
            attention(x, x, x)
        changed = hl.run(attention, x, x, x, patch={"/multi_head_attention_forward[0]": 7.0})[0]
        assert changed.unique().tolist() == [7.0]
    _, acts = hl.run(attention, x, x, x, capture="/*")  # With gradients there is no fast path, and nothing to say.
    assert "/multi_head_attention_forward#0" in acts


def test_two_threads_with_blocks_on_one_model_see_their_own_functions() -> None:
    """F01"""
    model, x = Attention(), words()
    both_open = threading.Barrier(2)

    def work(scale: float) -> bool:
        with hl.capture(model, "/softmax") as acts, hl.edit(model, "/div", lambda value: value * scale):
            both_open.wait(10)
            for _ in range(20):
                model(x)
            both_open.wait(10)
        expected = torch.softmax(stages_of_attention(model, x)["div#0"] * scale, -1)
        return acts["/softmax"].allclose(expected, atol=1e-6)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(work, (1.0, 2.0))) == [True, True]


def test_a_block_acts_neither_on_another_thread_nor_on_another_task() -> None:
    """F01, F02"""
    model, x = Attention(), words()
    plain = model(x)

    async def work(scale: float) -> Tensor:
        with hl.edit(model, "/softmax", lambda value: value * scale):
            await asyncio.sleep(0)
            output = model(x)
            await asyncio.sleep(0)
        return output

    async def main() -> list[Tensor]:
        return await asyncio.gather(work(1.0), work(2.0), work(3.0))

    outputs = asyncio.run(main())
    assert outputs[0].equal(plain)
    torch.testing.assert_close(outputs[2] - plain, 2 * (outputs[1] - plain))
    with hl.patch(model, {"/softmax": 0.0}):
        assert elsewhere(model, x).equal(plain)
        assert not model(x).equal(plain)
    hooks = hl.Hooks(model)
    hooks.patch({"/softmax": 0.0})
    assert not elsewhere(model, x).equal(plain)  # Hooks that are kept act on every thread.
    hooks.remove()


@pytest.mark.parametrize(
    "how", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_a_copy_made_inside_a_block_is_an_unhooked_model(how: Callable[[nn.Module], nn.Module]) -> None:
    """E14, E15"""
    model, x = Transformer(), words()
    plain = model(x)
    with hl.capture(model, "**/*") as acts, hl.patch(model, {"h.0.attn/softmax": 0.0}):
        twin = how(model)
        assert twin(x).equal(plain)
        assert len(acts) == 0
        assert len(hl.attached(twin)) == 0
        assert not model(x).equal(plain)
    assert twin(x).equal(plain)
    assert b"hookline" not in pickle.dumps(twin)


# Dynamo asks every tensor that enters a graph for its `.grad`.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.usefixtures("fresh_compiler")
class TestCompiled:
    """E01: functions make that module's forward run uncompiled; the rest stays in the graph."""

    @pytest.mark.parametrize("compiled_before", [True, False])
    def test_functions_of_a_compiled_model_are_seen_and_changed(self, compiled_before: bool) -> None:
        model, x = Transformer(), words()
        compiled = torch.compile(model, backend="aot_eager")
        plain = compiled(x) if compiled_before else model(x)
        with hl.capture(compiled, "h.*.attn/softmax", "h.0.attn/*", "h.1.attn/softmax:grad_output") as acts:
            output = compiled(x)
            output.sum().backward()
        assert torch.allclose(output, plain, atol=1e-6)
        with hl.capture(model, "h.*.attn/softmax", "h.0.attn/*", "h.1.attn/softmax:grad_output") as expected:
            model(x).sum().backward()
        assert set(acts) == set(expected)
        for site in ("h.0.attn/softmax", "h.1.attn/softmax", "h.0.attn/matmul#1", "h.1.attn/softmax:grad_output"):
            torch.testing.assert_close(acts[site], expected[site])
        with hl.patch(compiled, {"h.1.attn/softmax": 0.0}):
            changed = compiled(x)
        with hl.patch(model, {"h.1.attn/softmax": 0.0}):
            assert torch.allclose(changed, model(x), atol=1e-6)
        assert torch.allclose(compiled(x), plain, atol=1e-6)

    @pytest.mark.parametrize("what", ["child", "helper"])
    def test_what_is_compiled_inside_a_forward_with_hooked_functions_stays_right_and_silent(self, what: str) -> None:
        model, x = Transformer(), words()
        if what == "child":
            model.h[0].attn.compile(backend="eager")
        else:
            model.h[0].attn = Returns(torch.compile(lambda x: torch.softmax(x @ x.mT, -1) @ x, backend="eager"))
        plain = model(x)
        with hl.capture(model, "h.0/*", "h.1.attn/softmax") as acts:
            for _ in range(2):
                assert torch.allclose(model(x), plain, atol=1e-6)
        assert list(acts) == ["h.0/add#0", "h.0/gelu#0", "h.0/add#1", "h.1.attn/softmax"]
        assert torch.allclose(acts["h.0/add#0"], x + model.h[0].attn(x), atol=1e-6)
        with hl.patch(model, {"h.1/add#1": 0.0}):
            assert model(x).count_nonzero() == 0
        assert torch.allclose(model(x), plain, atol=1e-6)

    def test_entering_again_compiles_nothing_anew(self) -> None:
        model, x = Transformer(), words()
        graphs = CompileCounterWithBackend("eager")
        compiled = torch.compile(model, backend=graphs)
        compiled(x)
        counts = []
        for number in range(6):
            with hl.capture(compiled, "h.0.attn/softmax") as acts:
                compiled(x + number)
                compiled(x - number)
            assert acts["h.0.attn/softmax"].allclose(
                stages_of_attention(model.h[0].attn, x - number)["softmax#0"], atol=1e-6
            )
            compiled(x)
            counts.append(graphs.frame_count)
        assert counts == counts[:1] * 6
