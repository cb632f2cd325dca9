"""Models that are scripted, traced or exported: with hooks added afterwards, and with hooks open meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import hookline as hl
from tests.errors.wording import says
from tests.support.models import GPT, mlp, tokens
from tests.support.states import state_of

# Before torch 2.6 nothing says that torch.export runs: its strict mode ends in an error of dynamo.
SAYS_IT_EXPORTS = hasattr(torch.compiler, "_is_exporting_flag")
SIDE_EFFECTS = pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects:UserWarning")


def double(value: Tensor) -> Tensor:
    return value * 2


CHANGES: dict[str, Callable[[nn.Module], hl.Hooks]] = {
    "patch": lambda model: hl.patch(model, {"h.1": 0.0}),
    "patch a part": lambda model: hl.patch(model, {"h.1[:, 0]": 0.0}),
    "edit": lambda model: hl.edit(model, "h.1", double),
    "skip": lambda model: hl.skip(model, "h.1"),
}
ALL_KINDS: dict[str, Callable[[nn.Module], hl.Hooks]] = {
    **CHANGES,
    "capture": lambda model: hl.capture(model, "h.1"),
    "capture a part": lambda model: hl.capture(model, "h.1[:, 0]"),
    "gradient": lambda model: hl.capture(model, "h.1:grad_output"),
}
JIT: dict[str, Callable[[nn.Module], nn.Module]] = {
    "script": torch.jit.script,
    "trace": lambda module: torch.jit.trace(module, torch.randn(2, 4)),
}


def with_a_jit_child(kind: str) -> nn.Sequential:
    """Return a model whose middle layer is scripted or traced by torch.jit."""
    inside = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    return nn.Sequential(nn.Linear(4, 4), JIT[kind](inside), nn.Linear(4, 2))


@pytest.mark.parametrize("kind", JIT)
@pytest.mark.parametrize("where", ["1", "1.0", "1:input"])
def test_a_module_inside_torch_jit_is_refused_before_anything_is_placed(kind: str, where: str) -> None:
    """E06"""
    model = with_a_jit_child(kind)
    with pytest.raises(hl.SiteError, match=says("is compiled by torch")):
        hl.capture(model, "0", where, "2")
    with pytest.raises(hl.SiteError, match="torch.jit"):
        hl.patch(model, {"0": 0.0, where: 0.0})
    assert not any(row.owner == "hookline" for row in hl.attached(model))


@pytest.mark.parametrize("kind", JIT)
def test_the_eager_modules_around_a_jit_child_work_and_patterns_pass_over_it(kind: str) -> None:
    """E06"""
    model, x = with_a_jit_child(kind), torch.randn(2, 4)
    plain = model(x)
    with hl.capture(model, "*", "2:input", "") as acts:
        assert torch.equal(model(x), plain)
    assert list(acts) == ["0", "2:input", "2", ""]
    assert torch.equal(acts["2:input"], model[1](model[0](x)))
    assert [str(site) for site in hl.sites(model, nn.Linear)] == ["0", "2"]
    with hl.patch(model, {"2:input": 0.0}):
        assert torch.equal(model(x), model[2](torch.zeros(2, 4)))


@pytest.mark.parametrize("kind", JIT)
def test_a_model_that_is_a_jit_graph_itself_is_refused(kind: str) -> None:
    """E06"""
    model = JIT[kind](mlp())
    for where in ("", "0", "**", lambda name, module: True):
        with pytest.raises(hl.SiteError, match="torch.jit"):
            hl.capture(model, where)
    with pytest.raises(hl.SiteError, match=says("matches nothing", "Linear")):
        hl.capture(model, nn.Linear)


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_tracing_with_torch_jit_under_hooks_is_refused(kind: str) -> None:
    """E07: the trace would contain the hooks forever."""
    model, x = GPT(depth=2), tokens()
    before = state_of(model)
    with pytest.raises(hl.HooklineError, match=says("traced leave the block first")), ALL_KINDS[kind](model):
        torch.jit.trace(model, x)
    assert state_of(model) == before
    assert torch.equal(torch.jit.trace(model, x)(x), model(x))


@pytest.mark.parametrize("kind", CHANGES)
def test_tracing_a_part_of_a_model_under_hooks_that_change_it_is_refused(kind: str) -> None:
    """E07"""
    model, x = GPT(depth=2), tokens()
    with pytest.raises(hl.HooklineError, match=says("traced leave the block first")), CHANGES[kind](model):
        torch.jit.trace(model.h[1], x)
    assert torch.equal(torch.jit.trace(model.h[1], x)(x), model.h[1](x))


def test_tracing_a_part_of_a_model_under_a_capture_adds_nothing_to_the_trace() -> None:
    """E07"""
    model, x = GPT(depth=2), tokens()
    plain = torch.jit.trace(model.h[1], x)
    with hl.capture(model, "h.1", "h.1.mlp"):
        traced = torch.jit.trace(model.h[1], x)
    operations = [[node.kind() for node in graph.inlined_graph.nodes()] for graph in (plain, traced)]
    assert operations[0] == operations[1]
    assert torch.equal(traced(x), plain(x))


class Rectifier(nn.Module):
    """Used only here: torch.jit caches compiled classes, and other tests must not share the cache entry."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x)


HOOKED: dict[str, Callable[[nn.Module], hl.Hooks]] = {
    "patch": lambda model: hl.patch(model, {"1": 0.0}),
    "edit": lambda model: hl.edit(model, "1", double),
    "capture": lambda model: hl.capture(model, "0", "1"),
    "the model itself": lambda model: hl.capture(model, ""),
    "function": lambda model: hl.patch(model, {"1/relu": 0.0}),
    "parameter": lambda model: hl.patch(model, {"0.weight:param": 0.0}),
}


@pytest.mark.parametrize("kind", HOOKED)
def test_scripting_under_hooks_is_refused(kind: str) -> None:
    """E07: the script would contain the hooks forever, and torch can't read the source of hookline's forward."""
    model, x = nn.Sequential(nn.Linear(4, 4), Rectifier(), nn.Linear(4, 4)), torch.randn(2, 4)
    plain, before = model(x), state_of(model)
    for whole in (model, nn.Sequential(model)):
        with pytest.raises(hl.HooklineError, match=says("scripted leave the block first")), HOOKED[kind](model):
            torch.jit.script(whole)
    assert state_of(model) == before
    assert torch.equal(torch.jit.script(model)(x), plain)


def test_a_part_that_is_changed_is_not_scripted_and_one_that_is_not_hooked_any_more_is() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), Rectifier()), torch.randn(2, 4)
    with hl.capture(model, "1"):
        with pytest.raises(hl.HooklineError, match=says("scripted leave the block first")), hl.patch(model, {"1": 0.0}):
            torch.jit.script(model[1])
        with hl.capture(model[1], ""):
            pass
        assert list(vars(model[1]))[-2:] == ["_replicate_for_data_parallel", "forward"]
    assert torch.equal(torch.jit.script(model[1])(x), torch.relu(x))


@SIDE_EFFECTS
@pytest.mark.parametrize("strict", [False, True], ids=["plain", "strict"])
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_exporting_under_hooks_is_refused(kind: str, strict: bool) -> None:
    """E08: the exported program would contain the hooks, and the cache would keep fake tensors."""
    model, x = GPT(depth=2), tokens()
    names = [set(vars(module)) for module in model.modules()]
    raised = Exception if strict else hl.HooklineError  # Dynamo wraps exceptions raised while it traces.
    message = says("leave the block first") if SAYS_IT_EXPORTS or not strict else "run_(model_)?traced"
    with pytest.raises(raised, match=message), ALL_KINDS[kind](model) as acts:
        torch.export.export(model, (x,), strict=strict)
    assert len(acts) == 0
    assert [set(vars(module)) for module in model.modules()] == names


def test_an_exported_model_is_exact_once_the_block_is_left_and_names_what_it_lost() -> None:
    """E08"""
    model, x = GPT(depth=2), tokens()
    with hl.capture(model, "h.1"):
        model(x)
    exported = torch.export.export(model, (x,)).module()
    assert torch.allclose(exported(x), model(x))
    with pytest.raises(hl.SiteError, match="'h.1'"):
        hl.capture(exported, "h.1")
    output, acts = hl.run(exported, x, capture="")
    assert torch.equal(acts[""], output)


@pytest.mark.parametrize("jit", JIT)
def test_a_scan_says_which_modules_are_compiled_by_torch_jit(jit: str) -> None:
    scan = hl.scan(nn.Sequential(JIT[jit](mlp())), torch.ones(2, 4))
    assert "it is compiled by torch.jit, and can't be seen. Hook what calls it." in scan["0"].hazards


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_symbolic_tracing_under_hooks_is_refused(kind: str) -> None:
    """E09"""
    model, x = GPT(depth=2), tokens()
    before = state_of(model)
    with pytest.raises(hl.HooklineError, match=says("traced or exported", "'h.1")), ALL_KINDS[kind](model) as acts:
        torch.fx.symbolic_trace(model)
    assert len(acts) == 0
    assert state_of(model) == before
    assert torch.equal(torch.fx.symbolic_trace(model)(x), model(x))


@pytest.mark.parametrize("kind", ["patch", "edit", "capture"])
def test_tracing_of_operators_under_hooks_is_refused(kind: str) -> None:
    model, x = mlp(), torch.ones(2, 4)
    hooks = {"patch": {"0": 0.0}, "edit": {"0": torch.neg}, "capture": "0"}[kind]
    with pytest.raises(hl.HooklineError, match=says("being traced or exported")):
        hl.run(make_fx(model), x, model=model, **{kind: hooks})
    assert torch.equal(make_fx(model)(x)(x), model(x))


def test_a_traced_graph_module_is_a_model_like_any_other() -> None:
    """E09"""
    model, x = GPT(depth=2), tokens()
    graph = torch.fx.symbolic_trace(model)
    where: list[Any] = ["h.*.attn", "head", "h.*.mlp.0"]
    with hl.capture(model, *where) as expected:
        model(x)
    with hl.capture(graph, *where) as acts:
        graph(x)
    assert set(acts) == set(expected)
    assert all(torch.equal(acts[site], expected[site]) for site in expected)
    with hl.patch(graph, {"h.1.attn": 0.0}), hl.patch(model, {"h.1.attn": 0.0}):
        assert torch.equal(graph(x), model(x))


class OpensBlocks(nn.Module):
    """Uses hookline in its own forward."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.inner, self.way = mlp(), way

    def forward(self, x: Tensor) -> Any:
        if self.way == "run":
            return hl.run(self.inner, x, capture="0")[1]["0"]
        with hl.patch(self.inner, {"0": 0.0}):
            return self.inner(x)


@pytest.mark.parametrize("way", ["run", "a block"])
@pytest.mark.parametrize("how", ["trace", "export", "fx"])
def test_a_forward_that_opens_a_block_itself_is_told_what_it_can_do(way: str, how: str) -> None:
    model, x = OpensBlocks(way), torch.ones(2, 4)
    before = state_of(model)
    trace: dict[str, Callable[[], Any]] = {
        "trace": lambda: torch.jit.trace(model, (x,)),
        "export": lambda: torch.export.export(model, (x,), strict=False),
        "fx": lambda: torch.fx.symbolic_trace(model),
    }
    message = says("opened inside a forward that")
    if how == "export" and not SAYS_IT_EXPORTS:
        message = "traced or exported"
    with pytest.raises(hl.HooklineError, match=message):
        trace[how]()
    assert state_of(model) == before
    assert model(x).shape == (2, 8 if way == "run" else 2)
