"""Compiled models: hooks act in the graph, a block entered again reuses its graph, and the values are right."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

import hookline as hl
from tests.errors.wording import says
from tests.support.models import GPT, Nested, tokens

# Dynamo asks every tensor that enters a graph for its `.grad`.
pytestmark = [
    pytest.mark.skipif(torch.__version__ < "2.8", reason="needs torch 2.8, whose dynamo can trace hooks"),
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]

TIMES = 100


class Counted:
    """A model, its compiled version, and the number of graphs that dynamo has made of it."""

    def __init__(self, model: nn.Module, x: Any, **options: Any) -> None:
        self.model, self.x = model, x
        self.backend = CompileCounterWithBackend("eager")
        self.compiled: Any = torch.compile(model, backend=self.backend, **{"fullgraph": True, **options})

    @property
    def graphs(self) -> int:
        return self.backend.frame_count


class Slim(nn.Module):
    """A block that dynamo traces in half the time that a block of GPT takes."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Linear(8, 8)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return x + self.mlp(x) * scale


def compiled_gpt(depth: int = 3, **options: Any) -> Counted:
    model = GPT(depth=0)
    model.h.extend(Slim() for _ in range(depth))
    return Counted(model, tokens(), **options)


def assert_same(found: Any, expected: Any, **tolerance: float) -> None:
    """Compare two values of any structure."""
    torch.testing.assert_close(found, expected, **(tolerance or {"rtol": 0, "atol": 0}))


def double(value: Tensor) -> Tensor:
    return value * 2


def adder(shift: Tensor | float) -> Callable[[Tensor], Tensor]:
    return lambda value: value + shift


SHAPE = (2, 5, 8)
Block = Callable[[nn.Module, int], hl.Hooks]
BLOCKS: dict[str, Block] = {
    "a capture": lambda model, _: hl.capture(model, "h.*", "h.0:input", 'h.1:inputs["scale"]', "h.2[:, -1]"),
    "a capture that transforms": lambda model, _: hl.capture(model, "h.1", transform=lambda value: value.mean(-1)),
    "a patch with a number": lambda model, time: hl.patch(model, {"h.1": time * 0.25}),
    "a patch with a whole number": lambda model, time: hl.patch(model, {"h.1[:, 0]": time}),
    "a patch with a tensor": lambda model, _: hl.patch(model, {"h.1": torch.randn(SHAPE)}),
    "a patch of a part": lambda model, _: hl.patch(model, {"h.1[:, -1]": torch.randn(2, 8)}),
    "an edit": lambda model, _: hl.edit(model, "h.*", double),
    "an edit with a new tensor": lambda model, _: hl.edit(model, "h.1", adder(torch.randn(8))),
    "a skip": lambda model, _: hl.skip(model, "h.1"),
    "a skip with a tensor": lambda model, _: hl.skip(model, "h.1", torch.randn(SHAPE)),
}


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_block_entered_a_hundred_times_costs_one_graph_and_leaving_goes_back_to_the_first(kind: str) -> None:
    case = compiled_gpt()
    plain = case.compiled(case.x)
    assert case.graphs == 1
    for time in range(TIMES):
        torch.manual_seed(time)
        with BLOCKS[kind](case.compiled, time) as acts:
            output = case.compiled(case.x + time)
        if time % 25 == 0:
            torch.manual_seed(time)
            with BLOCKS[kind](case.model, time) as expected:
                assert_same(output, case.model(case.x + time))
            assert set(acts) == set(expected)
            for site in expected:
                assert_same(acts[site], expected[site])
        assert_same(case.compiled(case.x), plain)
    assert case.graphs == 2
    assert not counters["graph_break"]


def test_hooks_that_stay_cost_one_graph_however_often_they_are_switched() -> None:
    case = compiled_gpt()
    hooks = hl.Hooks(case.compiled)
    acts = hooks.capture("h.*")
    hooks.patch({"h.0[:, 0]": 0.5}, name="patched")
    seen = None
    for time in range(TIMES):
        case.compiled(case.x * time)
        seen = acts["h.2"]
        hooks.deactivate()
        case.compiled(case.x)
        assert acts["h.2"] is seen
        hooks.activate()
    assert case.graphs == 2
    hooks["patched"].deactivate()
    case.compiled(case.x)
    hooks["patched"].activate()
    case.compiled(case.x)
    assert case.graphs == 3
    hooks.remove()
    case.compiled(case.x)
    assert case.graphs == 3


def test_running_with_a_new_cache_each_time_costs_one_graph_for_each_of_the_two_blocks() -> None:
    case = compiled_gpt()
    for time in range(TIMES):
        _, clean = hl.run(case.compiled, case.x + time, capture=["h.0", "h.1"])
        output = hl.run(case.compiled, case.x, patch=clean)
    assert case.graphs == 2
    assert_same(output, hl.run(case.model, case.x, patch=clean))


def test_hooks_added_before_compiling_are_in_the_first_graph() -> None:
    case = compiled_gpt()
    hooks = hl.Hooks(case.model)
    acts = hooks.capture("h.1")
    case.compiled(case.x)
    assert case.graphs == 1
    assert_same(acts["h.1"], hl.run(case.model, case.x, capture="h.1")[1]["h.1"])
    hooks.deactivate()
    case.compiled(case.x)
    assert case.graphs == 2
    hooks.activate()
    case.compiled(case.x)
    hooks.remove()
    case.compiled(case.x)
    assert case.graphs == 2


def test_a_number_that_an_edit_closes_over_costs_two_graphs_at_most() -> None:
    """Dynamo makes the first graph for that number and the second for any number."""
    case = compiled_gpt()
    case.compiled(case.x)
    for time in range(20):
        with hl.edit(case.compiled, "h.1", adder(time / 4)):
            output = case.compiled(case.x)
        with hl.edit(case.model, "h.1", adder(time / 4)):
            assert_same(output, case.model(case.x))
    assert case.graphs <= 3


def test_what_was_hooked_before_makes_no_difference_to_the_graph() -> None:
    case = compiled_gpt()
    hooks = hl.Hooks(case.compiled)
    hooks.capture("h.1")
    case.compiled(case.x)
    with hl.patch(case.model, {"h.1": 0.0, "h.2": 0.0}):
        pass
    case.compiled(case.x)
    assert case.graphs == 1
    hooks.remove()


def test_two_sets_of_hooks_see_the_same_run_and_each_state_has_one_graph() -> None:
    case = compiled_gpt()
    first, second = hl.Hooks(case.compiled), hl.Hooks(case.compiled)
    values, others = first.capture("h.1"), second.capture("h.0", "h.2")
    for _ in range(3):
        case.compiled(case.x)
    assert case.graphs == 1
    values, others = dict(values), dict(others)
    first.deactivate()
    expected = dict(hl.run(case.model, case.x, capture=["h.0", "h.1", "h.2"])[1])
    assert_same({**values, **others}, expected)
    first.activate()
    second.deactivate()
    case.compiled(case.x)
    second.activate()
    case.compiled(case.x)
    assert case.graphs == 2
    first.remove()
    second.remove()


class Records(Nested):
    """Nested outputs inside a model."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Nested()

    def forward(self, x: Tensor) -> Tensor:
        given = self.inner(x)
        return self.body(given["hidden"][1] + given["logits"])


NESTED = (
    "inner", 'inner["hidden"][1]', 'inner["logits"][..., 1:3]', 'inner["steps"]', "inner.body:inputs", "body:input",
)  # fmt: skip
NESTED_CHANGES: dict[str, Callable[[nn.Module], hl.Hooks]] = {
    "patched": lambda model: hl.patch(model, {'inner["hidden"][1][:, 0]': 1.0, 'inner["logits"]': torch.ones(3, 4)}),
    "edited": lambda model: hl.edit(model, 'inner["hidden"]', lambda pair: (pair[0], pair[1] * 2)),
    "edited in place": lambda model: hl.edit(model, 'inner["hidden"][1]', lambda value: value.mul_(2)),
    "edited as a whole": lambda model: hl.edit(model, "inner", lambda given: {**given, "logits": given["logits"] + 1}),
    "left alone": lambda model: hl.edit(model, 'inner["hidden"]', lambda pair: None),
    "given back": lambda model: hl.edit(model, "inner", lambda given: given),
    "the model's own": lambda model: hl.edit(model, "inner", lambda given: dict(given), clone=False),
    "inputs": lambda model: hl.edit(model, "inner.body:inputs", lambda given: {"input": given["input"] * 2}),
}


def test_parts_of_nested_values_are_captured_in_the_graph() -> None:
    model, x = Records(), torch.randn(3, 4)
    compiled: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
    _, expected = hl.run(model, x, capture=NESTED)
    _, acts = hl.run(compiled, x, capture=NESTED)
    assert set(acts) == set(expected)
    for site in expected:
        assert_same(acts[site], expected[site])


@pytest.mark.parametrize("kind", NESTED_CHANGES)
def test_parts_of_nested_values_are_changed_in_the_graph(kind: str) -> None:
    model, x = Records(), torch.randn(3, 4)
    compiled: Any = torch.compile(model, backend="eager", fullgraph=True)
    with NESTED_CHANGES[kind](model):
        changed = model(x)
    with NESTED_CHANGES[kind](compiled):
        assert_same(compiled(x), changed)
    assert_same(compiled(x), model(x))


OPTIONS: dict[str, dict[str, Any]] = {
    "clone": {"clone": True},
    "reference": {"clone": False},
    "dtype": {"dtype": torch.float64},
    "device": {"device": "cpu"},
    "transform": {"transform": lambda value: (value.amax(-1), value.argmax(-1))},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options_of_a_capture_mean_the_same_in_a_graph(options: dict[str, Any]) -> None:
    case = compiled_gpt()
    with hl.capture(case.model, "h.1", **options) as expected:
        case.model(case.x)
    with hl.capture(case.compiled, "h.1", **options) as acts:
        output = case.compiled(case.x)
    assert_same(acts["h.1"], expected["h.1"])
    output.zero_()
    assert_same(acts["h.1"], expected["h.1"])


def test_a_reference_of_an_uncompiled_run_does_not_make_a_later_value_stale() -> None:
    model: nn.Module = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8))
    compiled: Any = torch.compile(model, backend="eager", fullgraph=True)
    hooks = hl.Hooks(compiled)
    acts = hooks.capture("1", clone=False)
    model(torch.ones(2, 8))
    compiled(torch.zeros(2, 8))
    found = acts["1"]
    hooks.remove()
    assert_same(found, model[0].bias.relu().expand(2, 8).detach())  # type: ignore[union-attr, operator, index]


NUMBERS: dict[str, Any] = {"fraction": 0.1, "whole": 7, "negative zero": -0.0, "infinite": float("inf")}


@pytest.mark.parametrize("number", NUMBERS.values(), ids=NUMBERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_number_is_put_in_as_exactly_as_without_a_graph(number: float, dtype: torch.dtype) -> None:
    model: nn.Module = nn.Sequential(nn.Identity(), nn.Identity())
    x = torch.randn(2, 3, dtype=dtype).t()
    compiled: Any = torch.compile(model, backend="eager", fullgraph=True)
    with hl.patch(model, {"0": number}):
        expected = model(x)
    with hl.patch(compiled, {"0": number}):
        output = compiled(x)
    assert output.dtype == dtype
    assert output.stride() == expected.stride()
    assert_same(output, expected)
    assert_same(output.signbit(), expected.signbit())


class Words(nn.Module):
    """Takes integers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.embed(ids)


def test_a_number_among_integers_is_put_in_or_refused_as_without_a_graph() -> None:
    case = Counted(Words(), torch.tensor([1, 2]))
    with hl.patch(case.compiled, {"embed:input": 3}):
        assert_same(case.compiled(case.x), case.model.embed.weight[[3, 3]])  # type: ignore[union-attr, index]
    with hl.patch(case.compiled, {"embed": 2.5}, check=False):
        assert case.compiled(case.x) == 2.5
    torch._dynamo.reset()
    with pytest.raises(Exception, match=says("given where int64 can't", "0.5")):
        hl.run(case.compiled, case.x, patch={"embed:input": 0.5})


@pytest.mark.parametrize("dynamic", [True, None])
def test_changing_sizes_cost_no_more_graphs_than_without_hooks(dynamic: bool | None) -> None:
    bare, hooked = (compiled_gpt(dynamic=dynamic) for _ in range(2))
    for length in range(2, 12):
        x = torch.randn(length + 1, length, 8)
        bare.compiled(x)
        torch.manual_seed(length)
        with hl.capture(hooked.compiled, "h.*"), hl.patch(hooked.compiled, {"h.1": torch.randn_like(x)}) as acts:
            output = hooked.compiled(x)
        torch.manual_seed(length)
        with hl.capture(hooked.model, "h.*") as expected, hl.patch(hooked.model, {"h.1": torch.randn_like(x)}):
            assert_same(output, hooked.model(x))
        for site in acts:
            assert_same(acts[site], expected[site])
    assert hooked.graphs == bare.graphs <= 2


MODES: dict[str, Callable[[], Any]] = {
    "training": nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


@pytest.mark.parametrize("mode", MODES)
def test_values_and_gradients_are_those_of_the_model_in_every_mode(mode: str) -> None:
    model, x = GPT(depth=3), tokens()
    compiled: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
    results: list[tuple[Tensor, dict[str, Any], list[Tensor | None]]] = []
    for target in (model, compiled):
        with MODES[mode](), hl.patch(target, {"h.0[:, 0]": 0.5}), hl.capture(target, "h.*", "head:input") as acts:
            output = target(x)
        if output.requires_grad:
            output.sum().backward()
        results.append((output, dict(acts), [parameter.grad for parameter in model.parameters()]))
        model.zero_grad()
    assert_same(results[1], results[0], rtol=1e-5, atol=1e-6)
    assert not any(value.requires_grad for value in results[1][1].values())


def test_values_that_are_put_in_call_by_call_are_those_of_each_call_of_a_compiled_model() -> None:
    counted = compiled_gpt(fullgraph=False)
    with hl.capture(counted.model, "h.*", keep="all") as acts:
        outputs = [counted.model(tokens()) for _ in range(3)]
    with hl.patch(counted.compiled, acts):
        assert_same([counted.compiled(counted.x) for _ in range(3)], outputs)
        with pytest.raises(hl.EditError, match=says("has no value the", "h.0", 3, 3)):
            counted.compiled(counted.x)


def test_a_patched_tensor_gets_its_gradient_through_the_graph() -> None:
    model, x = GPT(depth=2), tokens()
    compiled: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
    gradients = []
    for target in (model, compiled):
        given = torch.ones(SHAPE, requires_grad=True)
        with hl.patch(target, {"h.0": given}):
            target(x).sum().backward()
        gradients.append(given.grad)
    assert_same(gradients[1], gradients[0])


def compile_in_place(module: nn.Module, backend: Any) -> nn.Module:
    module.compile(backend=backend, fullgraph=True)
    return module


HOW: dict[str, Callable[[nn.Module, Any], Any]] = {
    "in place": compile_in_place,
    "wrapped": lambda module, backend: torch.compile(module, backend=backend, fullgraph=True),
}


@pytest.mark.parametrize("how", HOW)
def test_where_the_blocks_are_compiled_one_graph_serves_the_same_hook_on_each(how: str) -> None:
    """Each kind of hook needs two graphs, as a run without hooks does: the first block's input needs no gradient."""
    model, x, backend = GPT(depth=0), tokens(), CompileCounterWithBackend("eager")
    model.h.extend(Slim() for _ in range(12))
    _, expected = hl.run(model, x, capture="h.*")
    for number, block in enumerate(model.h):
        model.h[number] = HOW[how](block, backend)
    plain = model(x)
    bare = backend.frame_count
    for number in range(12):
        _, acts = hl.run(model, x, capture=f"h.{number}")
        assert_same(acts[f"h.{number}"], expected[f"h.{number}"])
    assert backend.frame_count == bare * 2
    for number in range(12):
        output = hl.run(model, x, patch={f"h.{number}": expected[f"h.{number}"] * number})
    assert backend.frame_count <= bare * 3
    assert_same(output, model.head(expected["h.11"] * 11))
    assert_same(model(x), plain)
    assert backend.frame_count <= bare * 3


class Other(GPT):
    """A subclass that dynamo compiles separately."""


def test_models_of_different_classes_do_not_use_up_each_others_graphs() -> None:
    with torch._dynamo.config.patch(recompile_limit=2):
        for kind in (GPT, Other):
            case = Counted(kind(depth=2), tokens())
            for site in ("h.0", "h.1"):
                hl.run(case.compiled, case.x, capture=site)
            assert case.graphs == 2


def test_more_sets_of_hooks_than_torch_makes_graphs_for_are_told_and_right() -> None:
    case = compiled_gpt(fullgraph=False)
    advice = says("GPT ran uncompiled", 2)
    with torch._dynamo.config.patch(recompile_limit=2):
        plain = case.compiled(case.x)
        for site in ("h.0", "h.1"):
            hl.run(case.compiled, case.x, capture=site)
        with pytest.warns(hl.HooklineWarning, match=advice):
            _, acts = hl.run(case.compiled, case.x, capture="h.2")
        assert_same(acts["h.2"], hl.run(case.model, case.x, capture="h.2")[1]["h.2"])
        hl.run(case.compiled, case.x, capture="h.1")  # Dynamo still has the graph for this hook.
        assert_same(case.compiled(case.x), plain)
        assert case.graphs == 3


@pytest.mark.parametrize("hooked", ["the model", "what was compiled"])
def test_a_model_of_torchs_own_that_ran_uncompiled_is_told_too(hooked: str) -> None:
    model: nn.Module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    compiled: Any = torch.compile(model, backend="eager")
    x, on = torch.ones(1, 2), model if hooked == "the model" else compiled
    with torch._dynamo.config.patch(recompile_limit=2), torch.no_grad():
        for site in ("0", "1"):
            with hl.capture(on, site):
                compiled(x)
        with pytest.warns(hl.HooklineWarning, match=says("Sequential ran uncompiled")), hl.capture(on, "2") as acts:
            compiled(x)
    assert_same(acts["2"], model(x))


def test_more_sets_of_hooks_than_torch_makes_whole_graphs_for_raise() -> None:
    case = compiled_gpt()
    with torch._dynamo.config.patch(recompile_limit=1):
        hl.run(case.compiled, case.x, capture="h.0")
        with pytest.raises(Exception, match="fullgraph=True"):
            hl.run(case.compiled, case.x, capture="h.1")


@pytest.mark.slow
def test_inductor_with_cuda_graphs_asked_for_and_sizes_that_change_is_right_on_a_cpu() -> None:
    model: nn.Module = nn.Sequential(nn.Linear(8, 8), nn.GELU())
    compiled: Any = torch.compile(model, mode="reduce-overhead", dynamic=True, fullgraph=True)
    hooks = hl.Hooks(compiled)
    acts = hooks.capture("*")
    hooks.patch({"0[:, 0]": 0.25})
    for length in (3, 4, 5):
        x = torch.randn(length, 8)
        output = compiled(x)
        output.sum().backward()
        found = [parameter.grad for parameter in model.parameters()]
        model.zero_grad()
        with torch.compiler.set_stance("force_eager"):
            seen = dict(acts)
            expected = compiled(x)
            expected.sum().backward()
            assert_same(seen, dict(acts), rtol=1e-4, atol=1e-5)
        assert_same(output, expected, rtol=1e-4, atol=1e-5)
        assert_same(found, [parameter.grad for parameter in model.parameters()], rtol=1e-4, atol=1e-5)
        model.zero_grad()
    hooks.remove()


def test_a_transform_that_writes_into_its_argument_leaves_the_model_alone():
    counted = Counted(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), torch.ones(1, 4))
    expected = counted.model(counted.x)
    with hl.capture(counted.model, "0", transform=lambda value: value.zero_().sum()) as acts:
        found = counted.compiled(counted.x)
    assert_same(found, expected)
    assert acts["0"] == 0
