"""A watch on compiled models."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hookline as hl
from tests.errors.wording import says
from tests.support.models import mlp
from tests.support.watch_models import INF, NAN, X, net


class TestCompiled:
    @pytest.fixture(autouse=True)
    def fresh(self):
        torch._dynamo.reset()
        yield
        torch._dynamo.reset()

    def test_a_compiled_model_stays_one_graph_and_is_seen_again_uncompiled(self):
        model = net()
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        graphs = torch._dynamo.utils.counters["stats"]
        graphs.clear()  # Other tests in this process have compiled models too.
        with torch.no_grad(), pytest.raises(hl.BadValue) as raised:
            with hl.watch(compiled.eval()) as watch:
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.abs_()
                for _ in range(3):
                    compiled(X.abs())
                before = graphs["unique_graphs"]
                compiled(-X.abs() * 9)
        assert (before, graphs["unique_graphs"]) == (1, 1)
        assert watch.steps == 3 == raised.value.step
        assert str(raised.value.function) == "root/sqrt#0"

    def test_a_compiled_training_step_is_seen_before_the_optimizer_takes_it(self):
        model = mlp()
        compiled = torch.compile(model, backend="aot_eager")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(hl.BadValue, match="step 1"):
            with hl.watch(compiled):
                for factor in (1, NAN):
                    compiled(X * factor).sum().backward()
                    optimizer.step()
        assert model[0].weight.isfinite().all()

    @pytest.mark.parametrize("make", [lambda x: (x, (None, x.log())), lambda x: {"a": [x, 1], "b": x.log()}])
    def test_any_kind_of_value_leaves_a_graph_whole(self, make):
        class Inner(nn.Module):
            def forward(self, given, *, more):
                return make(given["x"] + more[0])

        class Outer(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = Inner()

            def forward(self, given):
                return leaf_of(self.inner(given, more=(1.0, None)))

        def leaf_of(value):
            return value[0] if isinstance(value, tuple) else value["a"][0]

        compiled = torch.compile(Outer(), fullgraph=True, backend="aot_eager")
        with torch.no_grad():
            with hl.watch(compiled):
                compiled({"x": X.abs()})
            with pytest.raises(hl.BadValue, match="'inner"):
                with hl.watch(compiled):
                    compiled({"x": X.abs() - 9})

    def test_an_infinity_that_is_allowed_hides_nothing_over_the_limit(self):
        model = nn.Sequential(nn.Threshold(0, -INF))
        compiled = torch.compile(model, backend="aot_eager")
        with torch.no_grad():
            with hl.watch(compiled, inf=False, limit=100):
                compiled(X)
            with pytest.raises(hl.BadValue, match=says("over the limit")):
                with hl.watch(compiled, inf=False, limit=100):
                    compiled(X * 1000)

    @pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
    @pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
    def test_a_compiled_part_is_blamed_and_not_the_module_after_it(self, mode):
        class Log(nn.Module):
            def forward(self, x):
                return x.log()

        model = nn.Sequential(nn.Linear(4, 4), torch.compile(Log(), backend="aot_eager"), nn.Linear(4, 2))
        with mode(), pytest.raises(hl.BadValue, match=says("gave NaN in a compiled graph", "1")):
            with hl.watch(model):
                model(X)

    def test_a_model_compiled_in_place_is_read_at_the_end_or_when_asked(self):
        model = net()
        model.compile(backend="aot_eager")
        with pytest.raises(hl.BadValue, match=says("gave NaN in a compiled graph", "root")):
            with hl.watch(model) as watch:
                model(X)
                watch.check()

    def test_a_model_compiled_in_place_is_read_before_the_optimizer_steps(self):
        model = mlp()
        model.compile(backend="aot_eager")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = model[0].weight.clone()
        with pytest.raises(hl.BadValue, match=says("in a compiled graph", "0")):
            with hl.watch(model, limit=100):
                (model(X * 1e3).sum() * 1e-6).backward()
                optimizer.step()
        assert model[0].weight.equal(before)


def test_a_compiled_place_that_is_named_is_not_said_to_be_missing():
    model = mlp()
    compiled = torch.compile(model, backend="eager")
    with hl.watch(compiled, "0"):
        compiled(torch.ones(1, *model[0].weight.shape[1:]))
