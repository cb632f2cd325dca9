"""Compiled models: hooks placed before or after compiling act in the graph; results are right or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import hookline as hl
from tests.errors.wording import says
from tests.support.models import GPT, tokens
from tests.support.running import elsewhere
from tests.support.states import state_of

# Dynamo asks every tensor that enters a graph for its `.grad`.
pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]
# Hooks are not in a graph where dynamo can't trace them: tests/engine/test_compiled_by_old_torch.py has those values.
IN_GRAPHS = pytest.mark.skipif(torch.__version__ < "2.8", reason="needs torch 2.8, whose dynamo can trace hooks")
STANCES = pytest.mark.skipif(not hasattr(torch.compiler, "set_stance"), reason="needs torch 2.6, for set_stance")

BACKENDS = ("eager", "aot_eager")


class Branch(nn.Module):
    """Calls one of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.b = nn.Linear(8, 8)

    def forward(self, x: Tensor, take_b: bool = False) -> Tensor:
        return self.b(x) if take_b else self.a(x)


class Decorated(Branch):
    """The forward of the class is compiled, so there is no wrapper by which to recognise it."""

    @torch.compile(backend="eager")
    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).relu_())


class CompiledMethod(Branch):
    """Its forward calls a compiled method."""

    @torch.compile(backend="eager")
    def body(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).relu_())

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class Broken(Branch):
    """Forces dynamo to break its graph in two."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        torch._dynamo.graph_break()
        return self.b(x)


def eager_values(model: nn.Module, x: Tensor, *where: Any) -> hl.Cache:
    with hl.capture(model, *where) as acts:
        model(x)
    return acts


EVERYWHERE = ("", "h.*", "h.*.mlp", "h.*.mlp.*", "h.0:input", 'h.1:inputs["scale"]', "head:input[:, -1]", nn.LayerNorm)


@IN_GRAPHS
@pytest.mark.parametrize("backend", BACKENDS)
def test_hooks_placed_before_the_first_compiled_call_see_every_value(backend: str) -> None:
    """E01"""
    model, x = GPT(depth=2), tokens()
    expected = eager_values(model, x, *EVERYWHERE)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with hl.capture(compiled, *EVERYWHERE) as acts:
        output = compiled(x)
    assert set(acts) == set(expected)
    for site, value in expected.items():
        assert acts[site] == value if site.endswith('"scale"]') else torch.equal(acts[site], value), site
    assert torch.equal(output, acts[""])


@IN_GRAPHS
@pytest.mark.parametrize("backend", BACKENDS)
def test_hooks_placed_after_compiling_act_and_leave_no_trace(backend: str) -> None:
    """E02"""
    model, x = GPT(depth=2), tokens()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    plain = compiled(x)
    before = state_of(model)
    with hl.capture(compiled, "h.1", "h.1.mlp.0") as acts:
        compiled(x)
    expected = eager_values(model, x, "h.1", "h.1.mlp.0")
    assert all(torch.equal(acts[site], expected[site]) for site in expected)
    for hooked in (
        lambda target: hl.patch(target, {"h.1": 0.0, "h.0:input[:, 0]": 2.0}),
        lambda target: hl.edit(target, "h.*", lambda value: value * 2),
        lambda target: hl.skip(target, "h.1"),
    ):
        with hooked(compiled):
            changed = compiled(x)
        with hooked(model):
            assert torch.allclose(changed, model(x), atol=1e-6)
        assert not torch.allclose(changed, plain)
        assert torch.equal(compiled(x), plain)
    assert state_of(model) == before


@IN_GRAPHS
def test_a_capture_in_a_graph_is_of_the_call_that_ran_and_not_of_the_one_that_compiled() -> None:
    """E02"""
    model, x = GPT(depth=2), tokens()
    compiled = torch.compile(model, backend="aot_eager")
    with hl.capture(compiled, "h.1") as acts:
        for scale in (1.0, 2.0, 3.0):
            compiled(x * scale)
            seen = acts["h.1"]
            assert torch.equal(seen, model.h[1](model.h[0](x * scale, scale=0.5), scale=0.5))
    hooks = hl.Hooks(compiled)
    acts = hooks.capture("h.1")
    compiled(x)
    first = acts["h.1"]
    hooks.deactivate()
    compiled(x * 2)
    assert acts["h.1"] is first
    hooks.remove()


@IN_GRAPHS
def test_hooks_cost_one_recompile_and_no_graph_break_however_often_they_come_and_go() -> None:
    """E03"""
    model, x = GPT(depth=2), tokens()
    graphs = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, backend=graphs, fullgraph=True)
    compiled(x)
    assert graphs.frame_count == 1
    for scale in range(4):
        with hl.capture(compiled, "h.*", "h.*.mlp:input"):
            compiled(x + scale)
            compiled(x - scale)
        compiled(x * scale)
    assert graphs.frame_count == 2
    for factor in (2.0, 3.0):
        with hl.edit(compiled, "h.1", lambda value, factor=factor: value * factor):
            compiled(x)
    assert graphs.frame_count <= 4
    hooks = hl.Hooks(compiled)
    hooks.capture("head")
    for _ in range(5):
        compiled(x)
    hooks.remove()
    assert graphs.frame_count <= 5


@IN_GRAPHS
@pytest.mark.filterwarnings("ignore:GPT ran uncompiled:hookline.HooklineWarning")
def test_a_sweep_over_more_layers_than_torch_compiles_graphs_for_stays_right() -> None:
    """E03: beyond its limit dynamo runs the model uncompiled, and a warning says so (test_compiled.py)."""
    model, x = GPT(depth=4), tokens()
    compiled = torch.compile(model, backend="eager")
    with torch._dynamo.config.patch(recompile_limit=2):
        plain = compiled(x)
        for layer in range(4):
            site = f"h.{layer}"
            with hl.patch(compiled, {site: 0.0}), hl.capture(compiled, "head:input") as acts:
                output = compiled(x)
            with hl.patch(model, {site: 0.0}), hl.capture(model, "head:input") as expected:
                assert torch.equal(output, model(x))
            assert torch.equal(acts["head:input"], expected["head:input"])
        assert torch.equal(compiled(x), plain)


def test_a_model_whose_graph_breaks_is_seen_on_both_sides_of_the_break() -> None:
    """E03"""
    model, x = Broken(), tokens()
    compiled = torch.compile(model, backend="eager")
    compiled(x)
    with hl.capture(compiled, "a", "b:input", "") as acts:
        output = compiled(x)
    assert torch.equal(acts["a"], model.a(x))
    assert torch.equal(acts["b:input"], acts["a"])
    assert torch.equal(acts[""], output)


IN_PLACE: dict[str, Callable[[], nn.Module]] = {"forward": Decorated, "method": CompiledMethod}


@pytest.mark.parametrize("kind", IN_PLACE)
def test_a_compiled_forward_or_method_without_a_wrapper_is_seen_through(kind: str) -> None:
    """E04"""
    model, x = IN_PLACE[kind](), tokens()
    plain = model(x)
    with hl.capture(model, "a", "b", "") as acts:
        model(x)
    assert torch.equal(acts["a"], nn.functional.linear(x, model.a.weight, model.a.bias))
    assert torch.equal(acts["b"], plain)
    assert torch.equal(acts[""], plain)
    with hl.patch(model, {"a": 0.0}):
        assert torch.equal(model(x), model.b(torch.zeros_like(x)))
    assert torch.equal(model(x), plain)


@pytest.mark.parametrize("which", ["model", "blocks"])
def test_modules_compiled_in_place_are_seen_through(which: str) -> None:
    """E04"""
    model, x = GPT(depth=2), tokens()
    expected = eager_values(model, x, "**")
    for module in [model] if which == "model" else model.h:
        module.compile(backend="eager")
    model(x)
    with hl.capture(model, "**") as acts:
        model(x)
    assert set(acts) == set(expected)
    assert all(torch.equal(acts[site], expected[site]) for site in expected)


def test_a_second_instance_of_a_compiled_class_has_its_own_values() -> None:
    """E04"""
    first, second, x = GPT(depth=2), GPT(depth=2), tokens()
    torch.compile(first, backend="eager")(x)
    compiled = torch.compile(second, backend="eager")
    with hl.capture(compiled, "h.*") as acts:
        compiled(x)
    expected = eager_values(second, x, "h.*")
    assert all(torch.equal(acts[site], expected[site]) for site in expected)


def forget_graphs_of_old_torch() -> None:
    """With torch 2.4, an nn.Sequential that was compiled and run does not notice new hooks: see docs/limits.md."""
    if torch.__version__ < (2, 5):
        torch._dynamo.reset()


def test_inductor_gives_values_within_its_tolerance_and_the_same_output() -> None:
    """E05"""
    if torch.__version__ < "2.8":
        pytest.importorskip("setuptools", reason="needs setuptools, for the inductor of an old torch")
    model, x = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), tokens()
    compiled = torch.compile(model)
    plain = compiled(x)
    with hl.capture(compiled, "*") as acts:
        forget_graphs_of_old_torch()
        output = compiled(x)
    expected = eager_values(model, x, "*")
    assert torch.allclose(output, plain, atol=1e-6)
    assert all(torch.allclose(acts[site], expected[site], atol=1e-6) for site in expected)
    with hl.patch(compiled, {"1": 0.0}):
        forget_graphs_of_old_torch()
        assert torch.allclose(compiled(x), model[2](torch.zeros_like(x)), atol=1e-6)


def test_a_branch_not_taken_in_a_graph_is_told_in_every_block() -> None:
    """E02"""
    compiled, x = torch.compile(Branch(), backend="eager"), tokens()
    hooks = hl.Hooks(compiled)
    hooks.capture("b")
    hooks.deactivate()
    with pytest.raises(hl.NeverFired, match=says("was not called", "b")), hooks:
        compiled(x)
    with hooks:
        compiled(x, take_b=True)
    with pytest.raises(hl.NeverFired, match=says("was not called", "b")), hooks:
        compiled(x)
    with pytest.warns(hl.HooklineWarning, match=says("was not called", "b")), hl.capture(compiled, "*"):
        compiled(x)


def test_a_second_threads_block_on_a_compiled_model_is_refused() -> None:
    """F01: a graph acts for every thread."""
    model, x = GPT(depth=2), tokens()
    compiled = torch.compile(model, backend="eager")
    compiled(x)

    def second() -> None:
        with hl.capture(compiled, "h.0"):
            compiled(x * 2)

    with hl.capture(compiled, "h.1") as acts:
        compiled(x)
        seen = acts["h.1"]
        error = elsewhere(second)
        assert torch.equal(acts["h.1"], seen)
    assert isinstance(error, hl.HooklineError)
    assert "another thread has a block open" in str(error)


@IN_GRAPHS
@pytest.mark.parametrize("site", ["0[:, 0]", "0:input[:, -1]", "0.a[1:, 0]", "1[0]"])
def test_a_part_is_patched_in_blocks_that_are_compiled_for_any_size(site: str) -> None:
    model = nn.Sequential(*[Branch() for _ in range(3)])
    expected = [hl.run(model, torch.ones(size, 8), patch={site: 2.0}) for size in (3, 5)]
    for block in model:
        block.compile(backend="aot_eager", dynamic=True, fullgraph=True)
    with hl.patch(model, {site: 2.0}):
        outputs = [model(torch.ones(size, 8)) for size in (3, 5)]
    assert all(map(torch.equal, outputs, expected))


def test_a_compiled_module_writes_into_the_list_that_it_was_given() -> None:
    class Writes(nn.Module):
        def forward(self, x: Tensor, memory: list[Tensor]) -> Tensor:
            memory.append(x * 2)
            return x * 3 + memory[0]

    class Calls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.writes = Writes()

        def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
            memory = [x]
            return self.writes(x, memory), memory

    model = Calls()
    model.compile(backend="eager")
    for change in ({"edit": {"writes:inputs": lambda passed: passed}}, {"patch": {'writes:inputs["x"]': 1.0}}):
        output, memory = hl.run(model, torch.ones(2), **change)
        assert len(memory) == 2
        assert output.tolist() == [4.0, 4.0]


def refusal(function: Callable[[], None]) -> str:
    """Return the message of hookline's error, or "" if there is none."""
    try:
        function()
    except hl.HooklineError as error:
        return str(error)
    return ""


def zero(gradient: Tensor) -> Tensor:
    return gradient * 0


COUNTING = {
    "every call": {"keep": "all"},
    "some calls": {"keep": 3},
    "stop": {"stop": True},
}


@pytest.mark.parametrize("options", COUNTING.values(), ids=COUNTING)
def test_what_a_graph_cannot_count_is_right_all_the_same(options: dict[str, Any]) -> None:
    """E03"""
    model, x = GPT(depth=2), tokens()
    with hl.capture(model, "h.1", **options) as expected:
        model(x), model(x * 2)
    compiled = torch.compile(model, backend="eager")
    plain = compiled(x)
    with hl.capture(compiled, "h.1", **options) as acts:
        outputs = [compiled(x), compiled(x * 2)]
    assert all((output is None) == ("stop" in options) for output in outputs)
    assert len(acts.calls("h.1")) == len(expected.calls("h.1")) > 0
    assert all(torch.equal(*pair) for pair in zip(acts.calls("h.1"), expected.calls("h.1"), strict=True))
    assert torch.equal(compiled(x), plain)


@pytest.mark.parametrize("where", ["h.1#1", "h.1[*]", "h.1[0, *]"])
def test_call_numbers_and_stars_are_right_on_a_compiled_model(where: str) -> None:
    """E03"""
    model, x = GPT(depth=2), tokens()
    with hl.capture(model, where) as expected:
        model(x), model(x * 2)
    compiled = torch.compile(model, backend="eager")
    with hl.capture(compiled, where) as acts:
        compiled(x), compiled(x * 2)
    assert list(acts) == list(expected)
    assert all(torch.equal(acts[site], expected[site]) for site in expected)


def test_a_whole_graph_that_cannot_be_kept_whole_is_an_error() -> None:
    """E03"""
    model, x = GPT(depth=2), tokens()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    plain = compiled(x)
    with pytest.raises(Exception, match="hookline"), hl.capture(compiled, "h.1", keep="all"):
        compiled(x)
    assert torch.equal(compiled(x), plain)


@pytest.mark.parametrize("options", COUNTING.values(), ids=COUNTING)
def test_counting_in_a_function_compiled_around_the_model_is_right_or_loud(options: dict[str, Any]) -> None:
    """E03: the model does not know that it runs in a graph."""
    model, x = GPT(depth=2), tokens()
    step = torch.compile(lambda value: model(value), backend="eager")

    def count() -> None:
        with hl.capture(model, "h.1", **options) as acts:
            outputs = [step(x), step(x * 2)]
        assert all((output is None) == ("stop" in options) for output in outputs)
        assert len(acts.calls("h.1")) == (1 if "stop" in options else 2)

    refused = refusal(count)
    assert not refused or ("'h.1'" in refused and "compiled" in refused)


def test_an_edit_that_wants_its_call_works_in_a_graph_or_is_refused_in_words() -> None:
    """E03"""
    model, x = GPT(depth=2), tokens()
    compiled = torch.compile(model, backend="eager")

    def scale(value: Tensor, call: Any) -> Tensor:
        return value * (2.0 if isinstance(call.module, nn.Linear) else 3.0)

    with hl.edit(model, "head", scale, with_call=True):
        expected = model(x)

    def edit() -> None:
        with hl.edit(compiled, "head", scale, with_call=True):
            assert torch.equal(compiled(x), expected)

    refused = refusal(edit)
    assert not refused or "compiled" in refused


def test_a_value_kept_with_its_graph_can_be_differentiated_on_a_compiled_model_or_is_refused() -> None:
    """E03"""
    model, x = GPT(depth=2), tokens()
    with hl.capture(model, "h.1", detach=False) as eager:
        (expected,) = torch.autograd.grad(model(x).sum(), eager["h.1"])
    compiled = torch.compile(model, backend="aot_eager")

    def differentiate() -> None:
        with hl.capture(compiled, "h.1", detach=False) as acts:
            loss = compiled(x).sum()
        assert torch.allclose(torch.autograd.grad(loss, acts["h.1"])[0], expected)

    refused = refusal(differentiate)
    assert not refused or ("'h.1'" in refused and "compiled" in refused)


def test_a_value_captured_in_a_graph_in_inference_mode_can_be_used_with_autograd_later() -> None:
    """E03"""
    model, x = GPT(depth=2), tokens()
    compiled = torch.compile(model, backend="eager")
    with torch.inference_mode(), hl.capture(compiled, "h.1") as acts:
        compiled(x)
    model.head(acts["h.1"]).sum().backward()
    assert model.head.weight.grad is not None


def test_a_value_that_does_not_fit_in_a_graph_names_the_site() -> None:
    """E03"""
    model, x = GPT(depth=2), tokens()
    compiled = torch.compile(model, backend="eager")
    with pytest.raises(hl.EditError, match="'h.1'.*5, 2"), hl.edit(compiled, "h.1", lambda value: value[..., :2]):
        compiled(x)
    assert torch.equal(compiled(x), model(x))


def test_the_table_of_a_compiled_capture_does_not_say_that_nothing_was_called() -> None:
    """E03"""
    model, x = GPT(depth=2), tokens()
    compiled = torch.compile(model, backend="eager")
    _, acts = hl.run(compiled, x, capture="h.1")
    row = repr(acts).splitlines()[-1].split()
    assert row[0] == "h.1"
    assert row[1] != "0"


GRADIENTS: dict[str, Callable[[Any], hl.Hooks]] = {
    "capture": lambda model: hl.capture(model, "h.1:grad_output"),
    "edit": lambda model: hl.edit(model, "h.1:grad_output", zero),
}


@pytest.mark.parametrize("kind", GRADIENTS)
@pytest.mark.parametrize("around", ["model", "function"])
def test_a_gradient_hook_on_a_compiled_model_is_right_or_refused(kind: str, around: str) -> None:
    """E23"""
    model, x = GPT(depth=2), tokens()
    with hl.capture(model, "h.1:grad_output") as eager:
        model(x).sum().backward()
    model.zero_grad()
    compiled = torch.compile(model if around == "model" else lambda value: model(value), backend="aot_eager")
    compiled(x)
    target = compiled if around == "model" else model

    def hook() -> None:
        with GRADIENTS[kind](target) as acts:
            compiled(x).sum().backward()
        if kind == "capture":
            assert torch.allclose(acts["h.1:grad_output"], eager["h.1:grad_output"])
        else:
            assert model.h[0].attn.weight.grad.count_nonzero() == 0

    refused = refusal(hook)
    assert not refused or ("'h.1:grad_output'" in refused and "force_eager" in refused)


@STANCES
def test_the_way_round_a_refused_gradient_works() -> None:
    """E23"""
    model, x = GPT(depth=2), tokens()
    with hl.capture(model, "h.1:grad_output") as eager:
        model(x).sum().backward()
    compiled = torch.compile(model, backend="aot_eager")
    compiled(x)
    with torch.compiler.set_stance("force_eager"), hl.capture(compiled, "h.1:grad_output") as acts:
        compiled(x).sum().backward()
    assert torch.equal(acts["h.1:grad_output"], eager["h.1:grad_output"])


def test_a_kept_gradient_edit_is_not_dropped_by_a_function_compiled_around_the_model() -> None:
    """E23"""
    model, x = GPT(depth=2), tokens()
    step = torch.compile(lambda value: model(value), backend="eager")

    def hook() -> None:
        hooks = hl.Hooks(model)
        hooks.edit("h.1:grad_output", zero)
        step(x).sum().backward()
        hooks.remove()
        assert model.h[0].attn.weight.grad.count_nonzero() == 0

    refused = refusal(hook)
    assert not refused or "'h.1:grad_output'" in refused
