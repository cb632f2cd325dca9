"""Functions as sites together with modes, tensor subclasses, transforms, threads and compilers; and failures."""

from __future__ import annotations

import asyncio
import copy
import pickle
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, vmap
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import hookline as hl
from tests.errors.wording import says
from tests.support.models import Attention, Returns, Transformer, stages_of_attention, words
from tests.support.running import elsewhere, without_garbage_collection
from tests.support.states import modes_left, state_of

pytestmark = pytest.mark.usefixtures("no_mode_is_left")


class Log(TorchFunctionMode):
    """A user's mode, which records the functions it sees and changes the result of softmax."""

    def __init__(self, change: Callable[[Any], Any] = lambda value: value) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.change = change

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(getattr(function, "__name__", str(function)))
        result = function(*args, **(kwargs or {}))
        return self.change(result) if self.seen[-1] == "softmax" else result


def inside(mode: TorchFunctionMode) -> nn.Module:
    """Return a module that enters a mode around a softmax in its forward."""

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
    assert all(name in seen for name in plain.seen)  # In this order, among hookline's own calls.
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
    assert acts.calls("/softmax")[0].equal(doubled)  # Torch's result; the inner mode doubles it afterwards.
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
        pytest.raises(hl.HooklineError, match=says("traced or exported", "/softmax")),
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
        lambda: torch.export.export(inside, (x,), strict=False),
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
    """B15: torch leaves its fast path if any mode is active."""

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
        hint = says("fused fast path")
        with pytest.warns(hl.HooklineWarning, match=hint), hl.capture(attention, "/*"):
            assert attention(x, x, x)[0].equal(plain)
        with pytest.raises(hl.NeverFired, match=hint), hl.capture(attention, "/multi_head_attention_forward"):
            attention(x, x, x)
        changed = hl.run(attention, x, x, x, patch={"/multi_head_attention_forward[0]": 7.0})[0]
        assert changed.unique().tolist() == [7.0]
    _, acts = hl.run(attention, x, x, x, capture="/*")  # With gradients there is no fast path and no warning.
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
    assert list(acts) == ["/ones#0", "/cat#1"]  # The first `cat` raised.
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
    with pytest.raises(hl.NeverFired, match=says("did not fire did", "h.0.attn/sofmax", "softmax")):
        hl.run(model, x, capture="h.0.attn/sofmax")
    with pytest.raises(hl.NeverFired, match=says("chunk matmul softmax", "h.0.attn/relu")):
        hl.run(model, x, capture="h.0.attn/relu")
    with pytest.raises(hl.NeverFired, match=says("did not fire counts", "h.0.attn/softmax#1", 1, 0)):
        hl.run(model, x, capture="h.0.attn/softmax#1")
    with pytest.raises(hl.NeverFired, match=says("was not reached was", "h.0.attn#3/softmax", 1)):
        hl.run(model, x, capture="h.0.attn#3/softmax")
    with pytest.raises(hl.NeverFired, match=r"'h.0/softmax'"):
        hl.run(model, x, patch={"h.0/softmax": 0.0})
    with (
        pytest.raises(hl.NeverFired, match=says("was not called which", "h.0.attn/softmax")),
        hl.skip(model, "h.0.attn"),
    ):
        hl.run(model, x, capture="h.0.attn/softmax")
    with (
        pytest.warns(hl.HooklineWarning, match=says("did not fire", "h.0/matmul", "1 more")),
        hl.capture(model, "h.*/matmul") as acts,
    ):
        model(x)
    with pytest.raises(hl.NotCaptured, match=says("in that of a module", "h.1/matmul", "h.1.**/matmul")):
        acts["h.1/matmul"]


def test_a_function_that_a_method_called_directly_does_not_run_says_so() -> None:
    """H01"""
    with pytest.raises(hl.NeverFired, match=says("did not run in the", "/softmax")):
        hl.run(Attention().split, words(), capture="/softmax")


def test_a_module_that_computes_nothing_itself_is_no_miss_of_a_wildcard() -> None:
    """H01"""
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8)), nn.Identity())
    _, acts = hl.run(model, words(), capture=["**/*", "/*"])
    assert list(acts) == ["0.0/linear#0"]


def test_a_wildcard_under_which_no_function_ran_at_all_says_so() -> None:
    """H01"""
    model, x = nn.Sequential(nn.Sequential(nn.Linear(8, 8)), nn.Sequential(nn.ReLU())), words()
    told = says("did not fire no", "'0/*'", "'0' itself", "'0.**/*'")
    with pytest.warns(hl.HooklineWarning, match=told):
        hl.run(model, x, capture="*/*")
    with pytest.raises(hl.NeverFired, match=told):
        hl.run(model, x, patch={"*/*": 0.0})
    with pytest.raises(hl.NeverFired, match=told):
        hl.run(model, x, edit={"0/*": torch.relu})


def test_names_that_can_be_no_function_are_refused_at_once() -> None:
    """H01"""
    model = Transformer()
    for text in ("h.0.attn/", "h.0.attn/a.b", "h.0.attn/softmax()", "h.0.attn/softmax/exp"):
        with pytest.raises(hl.SiteError):
            hl.capture(model, text)
    with pytest.raises(hl.SiteError, match=says("matches nothing did you mean", "h.0.atn", "h.0.attn")):
        hl.capture(model, "h.0.atn/softmax")
    with pytest.raises(hl.SiteError, match=says("is a ModuleList")):
        hl.capture(model, "h/softmax")
    with pytest.raises(hl.SiteError, match=says("skipped as a whole")):
        hl.skip(model, "h.0.attn/softmax:input")


def test_fused_and_hidden_attention_says_what_to_do_instead() -> None:
    """H01"""
    fused, x = Returns(lambda x: F.scaled_dot_product_attention(x, x, x)), words()
    with pytest.raises(hl.NeverFired, match=says("did not fire scaled_dot_product_attention", "/softmax")):
        hl.run(fused, x, capture="/softmax")
    hidden = nn.MultiheadAttention(8, 2, batch_first=True)
    for training in (True, False):
        with pytest.raises(hl.NeverFired, match=says("capture what it returns", "/softmax", "[1]")):
            hl.run(hidden.train(training), x, x, x, capture="/softmax")
    _, acts = hl.run(hidden, x, x, x, average_attn_weights=False, capture="[1]")  # The remedy in the error message.
    assert acts["[1]"].sum(-1).allclose(torch.ones(2, 2, 5))


class Squared(torch.autograd.Function):
    """A user's autograd function."""

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
        with pytest.raises(hl.HooklineError, match=says("runs inside Squared", "/mul")), hooked:
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
    reason = says("did not fire scaled_dot_product_attention", "attn/softmax")
    with pytest.warns(hl.HooklineWarning, match=reason):
        hl.run(model, x, capture="**/softmax")
    with pytest.raises(hl.NeverFired, match=reason):
        hl.run(model, x, patch={"**/softmax": 0.0})


def test_a_method_that_was_not_called_that_often_is_missed_also_without_a_forward() -> None:
    class Encodes(nn.Module):
        def encode(self, x: Tensor) -> Tensor:
            return x * 2

    model, x = Encodes(), torch.randn(3)
    with (
        pytest.raises(hl.NeverFired, match=says("was not reached was", "encode()#1")),
        hl.patch(model, {"encode()#1": 0.0}),
    ):
        model.encode(x)
