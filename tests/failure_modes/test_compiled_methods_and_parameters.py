"""Methods and parameters of compiled models: hooks act in the graph, and entering a block again adds no graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import hookline as hl
from tests.support.models import Autoencoder, Shares
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


class Gate(nn.Module):
    """Calls one method twice and another once."""

    def half(self, x: Tensor) -> Tensor:
        return x / 2

    def open(self, x: Tensor) -> Tensor:
        return x.sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        return self.half(x) * self.open(self.half(x + 1))


class Compiled(nn.Module):
    """Has methods, static methods, callables on the instance, bare parameters, views of them, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate()
        self.W = nn.Parameter(torch.randn(4, 4))
        self.b = nn.Parameter(torch.randn(4))
        self.register_buffer("scale", torch.tensor(2.0))
        self.head = nn.Linear(4, 2)
        self.act = F.gelu

    @staticmethod
    def centred(x: Tensor) -> Tensor:
        return x - 1

    def project(self, x: Tensor, gain: float = 1.0) -> Tensor:
        return (x @ self.W.T + self.b) * self.scale * gain

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.act(self.project(self.centred(self.gate(x)), gain=0.5)))


EVERYWHERE = (
    "gate.open()", "gate.open():input", "gate.open()[:, 0]", "project()", 'project():inputs["gain"]', "centred()",
    "act()", "act():input", "W/matmul", "W:param", "b/add", "b:param[0]", "scale/mul", "scale:param",
    "head.weight:param", "head.weight/linear", "gate", "",
)  # fmt: skip


@IN_GRAPHS
@pytest.mark.parametrize("hooked_first", [True, False])
def test_members_are_captured_in_the_graph(hooked_first: bool) -> None:
    model, x = Compiled(), torch.randn(3, 4)
    with hl.capture(model, *EVERYWHERE) as expected:
        plain = model(x)
    compiled = torch.compile(model, backend="aot_eager" if hooked_first else "eager", fullgraph=True)
    before = state_of(model)
    if not hooked_first:
        compiled(x)
    with hl.capture(compiled, *EVERYWHERE) as acts:
        output = compiled(x)
        compiled(x * 2)
        doubled = acts["project()"].clone()
        compiled(x)
    assert torch.equal(output, plain)
    assert set(acts) == set(expected)
    for site, value in expected.items():
        assert acts[site] == value if site.endswith('"gain"]') else torch.equal(acts[site], value), site
    assert not torch.equal(doubled, expected["project()"]), "the value is from the traced call"
    assert torch.equal(compiled(x), plain)
    assert state_of(model) == before


def double(value: Tensor) -> Tensor:
    return value * 2


PATCHES = {
    "gate.open()": 0.2, "project()[:, 0]": 0.0, "W:param": torch.eye(4), "b:param": 0.5, "head.weight:param[0]": 0.0,
    "W/matmul[0]": 1.0,
}  # fmt: skip
EDITED = [
    "gate.open()", "project():input", "centred()", "act()", "W/matmul", "b/add", "scale/mul", "W:param", "scale:param",
    "head.weight:param", "head.weight/linear",
]  # fmt: skip
ALSO = ["act()", "head.weight:param", "head.weight/linear"]
CHANGES: dict[str, Callable[[nn.Module], hl.Hooks]] = {
    "patched": lambda model: hl.patch(model, PATCHES),
    "edited": lambda model: hl.edit(model, EDITED, double),
    "a method skipped": lambda model: hl.skip(model, "project()"),
    "an operation skipped": lambda model: hl.skip(model, "W/matmul"),
}


@IN_GRAPHS
@pytest.mark.parametrize("kind", CHANGES)
def test_members_are_changed_in_the_graph_and_gradients_follow(kind: str) -> None:
    model, x = Compiled(), torch.randn(3, 4)
    with CHANGES[kind](model), hl.edit(model, ALSO, double):
        expected = model(x)
        expected.sum().backward()
    gradients = [None if one.grad is None else one.grad.clone() for one in model.parameters()]
    model.zero_grad()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    plain, before = compiled(x), state_of(model)
    with CHANGES[kind](compiled), hl.edit(compiled, ALSO, double):
        output = compiled(x)
        output.sum().backward()
    assert torch.allclose(output, expected, atol=1e-6)
    assert not torch.allclose(output, plain)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        zero = torch.zeros_like(parameter)
        found = zero if parameter.grad is None else parameter.grad
        assert torch.allclose(found, zero if gradient is None else gradient, atol=1e-5)
    model.zero_grad()
    assert torch.equal(compiled(x), plain)
    assert state_of(model) == before


SETS: dict[str, tuple[str, ...]] = {
    "methods and reads": ("gate.open()", "project():input", "act()", "W:param", "head.weight:param", "scale:param"),
    "operations": ("W/matmul", "b/add", "scale/mul"),
}


@IN_GRAPHS
@pytest.mark.parametrize("kind", SETS)
def test_entering_a_block_again_compiles_nothing_again(kind: str) -> None:
    model, x = Compiled(), torch.randn(3, 4)
    graphs = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, backend=graphs, fullgraph=True)
    plain = compiled(x)
    assert graphs.frame_count == 1
    for scale in range(4):
        with hl.capture(compiled, *SETS[kind]) as acts:
            compiled(x + scale)
            compiled(x - scale)
        assert len(acts) == len(SETS[kind])
        compiled(x * scale)
    assert graphs.frame_count == 2
    assert torch.equal(compiled(x), plain)
    hooks = hl.Hooks(compiled)
    hooks.capture(SETS[kind][0])
    for _ in range(3):
        compiled(x)
    hooks.remove()
    assert graphs.frame_count <= 3


@IN_GRAPHS
@pytest.mark.parametrize("site", ["project()", "W/matmul", "W:param"])
def test_an_edit_with_another_number_costs_at_most_one_graph_more(site: str) -> None:
    model, x = Compiled(), torch.randn(3, 4)
    graphs = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, backend=graphs, fullgraph=True)
    compiled(x)
    for factor in (2.0, 3.0, 2.0):
        with hl.edit(compiled, site, lambda value, factor=factor: value * factor):
            output = compiled(x)
        with hl.edit(model, site, lambda value, factor=factor: value * factor):
            assert torch.equal(output, model(x))
    assert graphs.frame_count <= 4


COUNTED = ("gate.half()#1", "gate.half()", "project()[*]", "W:param", "b/add", "W/*", "W/matmul#0")
NOT_IN_A_GRAPH: dict[str, Callable[[nn.Module], hl.Hooks]] = {
    "captures": lambda model: hl.capture(model, *COUNTED, keep="all"),
    "a call": lambda model: hl.edit(model, "project()", lambda value, call: value * 2, with_call=True),
    "stars": lambda model: hl.edit(model, ["W/*", "b/*"], double),
}


@pytest.mark.parametrize("kind", NOT_IN_A_GRAPH)
def test_what_a_graph_cannot_count_is_right_all_the_same(kind: str) -> None:
    model, x = Compiled(), torch.randn(3, 4)
    with NOT_IN_A_GRAPH[kind](model) as expected:
        changed = model(x)
    compiled = torch.compile(model, backend="eager")
    plain = compiled(x)
    with NOT_IN_A_GRAPH[kind](compiled) as acts:
        assert torch.equal(compiled(x), changed)
    assert list(acts) == list(expected)
    for site in expected:
        for found, value in zip(acts.calls(site), expected.calls(site), strict=True):
            assert torch.equal(found, value), site
    assert torch.equal(compiled(x), plain)


GRADIENTS = ["project():grad_output", "W/matmul:grad_output"]


@STANCES
@pytest.mark.parametrize("site", GRADIENTS)
def test_a_gradient_in_a_compiled_model_is_right_or_refused(site: str) -> None:
    model, x = Compiled(), torch.randn(3, 4)
    with hl.capture(model, site) as eager:
        model(x).sum().backward()
    compiled = torch.compile(model, backend="aot_eager")
    compiled(x)
    refused = ""
    try:
        with hl.capture(compiled, site) as acts:
            compiled(x).sum().backward()
    except hl.HooklineError as error:
        refused = str(error)
    assert (f"'{site}'" in refused and "force_eager" in refused) or torch.allclose(acts[site], eager[site])
    with torch.compiler.set_stance("force_eager"), hl.capture(compiled, site) as acts:
        compiled(x).sum().backward()
    assert torch.equal(acts[site], eager[site])


def test_a_stop_at_a_member_of_a_compiled_model_ends_its_forward() -> None:
    model, x = Compiled(), torch.randn(3, 4)
    compiled = torch.compile(model, backend="eager")
    plain = compiled(x)
    for site in ("gate.open()", "W/matmul"):
        expected = hl.run(model, x, capture=site)[1][site]
        output, acts = hl.run(compiled, x, capture=site, stop=True)
        assert output is None
        assert torch.equal(acts[site], expected)
        assert torch.equal(compiled(x), plain)


@IN_GRAPHS
def test_tied_parameters_are_changed_in_the_graph_under_every_name() -> None:
    model, ids = Shares(), torch.tensor([1, 2])
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    new = torch.randn(6, 4)
    compiled(ids)
    for name in ("emb.weight", "head.weight"):
        with hl.patch(compiled, {f"{name}:param": new}):
            assert torch.allclose(compiled(ids), 2 * F.linear(new[ids], new))


@IN_GRAPHS
def test_modules_and_methods_compiled_in_place_are_seen_through() -> None:
    class InPlace(Autoencoder):
        @torch.compile(backend="eager")
        def encode(self, x: Tensor) -> Tensor:
            return super().encode(x)

    x = torch.randn(3, 4)
    for model in (InPlace(), Autoencoder()):
        if type(model) is Autoencoder:
            model.compile(backend="eager")
        plain = model(x)
        with hl.capture(model, "encode()", "W_enc/matmul", "W_enc:param", "b_enc/add") as acts:
            assert torch.equal(model(x), plain)
        assert torch.equal(acts["encode()"], F.relu(acts["b_enc/add"]))
        assert torch.equal(acts["W_enc/matmul"], (x - model.b_dec) @ acts["W_enc:param"])
        with hl.patch(model, {"W_enc:param": 0.0}), hl.capture(model, "encode()") as acts:
            model(x)
        assert torch.equal(acts["encode()"], F.relu(model.b_enc).expand(3, 8))
        assert torch.equal(model(x), plain)


def test_a_second_instance_of_a_compiled_class_is_not_touched() -> None:
    first, second, x = Compiled(), Compiled(), torch.randn(3, 4)
    compiled = [torch.compile(one, backend="eager") for one in (first, second)]
    plain = [one(x) for one in compiled]
    with hl.patch(compiled[0], {"W:param": 0.0, "gate.open()": 0.0}):
        changed = compiled[0](x)
        assert torch.equal(compiled[1](x), plain[1])
    assert not torch.allclose(changed, plain[0])
    assert torch.equal(compiled[0](x), plain[0])


def test_a_second_threads_block_on_a_compiled_model_is_refused() -> None:
    model, x = Compiled(), torch.randn(3, 4)
    compiled = torch.compile(model, backend="eager")
    compiled(x)

    def second(site: str) -> None:
        with hl.capture(compiled, site):
            compiled(x * 2)

    sites = ("project()", "W:param", "W/matmul")
    with hl.capture(compiled, *sites) as acts:
        compiled(x)
        seen = {site: acts[site] for site in sites}
        for site in sites:
            error = elsewhere(second, site)
            assert isinstance(error, hl.HooklineError)
            assert "another thread has a block open" in str(error)
        assert all(torch.equal(acts[site], seen[site]) for site in sites)


def test_a_member_that_a_graph_does_not_reach_is_told_in_every_block() -> None:
    class Branch(Compiled):
        def unused(self, x: Tensor) -> Tensor:
            return x @ self.dead

        def forward(self, x: Tensor, take: bool = False) -> Tensor:
            return self.unused(x) if take else super().forward(x)

    model: Any = Branch()
    model.dead = nn.Parameter(torch.ones(4, 4))
    compiled, x = torch.compile(model, backend="eager"), torch.randn(3, 4)
    for site in ("unused()", "dead:param", "dead/matmul"):
        for _ in range(2):
            with pytest.raises(hl.NeverFired, match=f"'{site.replace('(', '.').replace(')', '.')}'"):
                hl.run(compiled, x, capture=site)
        assert len(hl.run(compiled, x, True, capture=site)[1]) == 1
