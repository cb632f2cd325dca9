"""One batch through the model: dtypes, gradients, calls, columns."""

from __future__ import annotations

import operator
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.utils.data import (
    TensorDataset,
)

import hookline as hl
from tests.errors.wording import says
from tests.support.harvest_models import Tagger, Texts, X, expected, net


def test_floats_are_cast_and_other_numbers_are_not(to):
    store = hl.harvest(Tagger().eval(), Texts(), "mix", to=to, batch_size=4, rows="tokens", dtype=torch.bfloat16,
                       columns=["input_ids"])  # fmt: skip
    assert (store["mix"].dtype, store["input_ids"].dtype) == (torch.bfloat16, torch.int64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float64])
def test_every_dtype_is_kept_to_the_bit(dtype, to):
    model = net()
    store = hl.harvest(model, X, "1", to=to, batch_size=8, dtype=dtype)
    assert torch.equal(store["1"][:].view(torch.uint8), expected(model, 2).to(dtype).view(torch.uint8))


def test_whole_numbers_and_truth_values_are_kept_too(to):
    model = net()
    store = hl.harvest(model, X, "1", to=to, batch_size=8, transform=lambda value: value > 0)
    assert torch.equal(store["1"][:], expected(model, 2) > 0)
    store = hl.harvest(model, X, "1", to=to / "b", batch_size=8, transform=lambda value: (value * 9).to(torch.int8))
    assert torch.equal(store["1"][:], (expected(model, 2) * 9).to(torch.int8))


def test_gradients_are_harvested_and_the_model_s_own_stay_as_they_were(to):
    model = net()
    before = torch.ones_like(model[0].weight)
    model[0].weight.grad = before
    store = hl.harvest(
        model, X, "0", "0:grad_output", to=to, batch_size=8, loss=lambda output, batch: output.pow(2).sum()
    )
    x = X.clone()
    hidden = model[0](x)
    hidden.retain_grad()
    model[1:](hidden).pow(2).sum().backward()
    assert torch.allclose(store["0:grad_output"][:], hidden.grad, atol=1e-6)
    model[0].weight.grad = before
    hl.harvest(model, X, "0:grad_output", to=to / "b", batch_size=8, loss=lambda output, batch: output.sum())
    assert model[0].weight.grad is before
    assert model[2].weight.grad is not None  # From the backward above, not from the harvest.
    with pytest.raises(hl.HooklineError, match=says("gradients need a loss")):
        hl.harvest(model, X, "0:grad_output", to=to / "c", batch_size=8)
    with pytest.raises(hl.SiteError, match=says("before any gradient")):
        hl.harvest(
            model, X, "0:grad_output", to=to / "d", batch_size=8, stop=True, loss=lambda output, batch: output.sum()
        )


def test_nothing_after_the_last_place_is_computed(to):
    model, seen = net(), []
    model[2].register_forward_hook(lambda *_: seen.append(1))
    hl.harvest(model, X, "0", to=to, batch_size=10)
    assert len(seen) == 1  # The trial of the first batch runs to the end, to count the calls of each place.
    hl.harvest(model, X, "0", to=to / "b", batch_size=10, stop=False)
    assert len(seen) == 1 + 5


def test_a_module_that_is_called_twice_is_no_row_twice(to):
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(4, 4)

        def forward(self, x):
            return self.one(self.one(x))

    model = Twice().eval()
    told = says("times for one batch", "one", 2, "one#0", "one[:, None]")
    with pytest.raises(hl.HooklineError, match=told):
        hl.harvest(model, X, "one", to=to, batch_size=8)
    store = hl.harvest(model, X, "one[:, None]", to=to / "c", batch_size=8, calls="sequence")
    with torch.no_grad():
        assert torch.allclose(store["one[:, None]"][:], torch.stack([model.one(X), model(X)], 1))
    store = hl.harvest(model, X, "one#1", to=to, batch_size=8)
    with torch.no_grad():
        assert torch.allclose(store["one#1"][:], model(X))
    with pytest.raises(hl.HooklineError, match=says("without a sequence to join", "(8, 4)")):
        hl.harvest(model, X, "one", to=to / "b", batch_size=8, calls="sequence")
    x = X.reshape(10, 5, 4)
    store = hl.harvest(model, x, "one", to=to / "b", batch_size=8, calls="sequence")
    with torch.no_grad():
        once = model.one(x)
        assert torch.allclose(store["one"][:], torch.cat([once, model.one(once)], 1))


@pytest.mark.parametrize("kind", ["tensor", "tuple"])
def test_calls_that_do_not_join_are_refused_as_such_and_not_as_a_failure_of_the_model(to, kind):
    class Gives(nn.Module):
        def forward(self, x):
            return x if kind == "tensor" else (x, x)

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = Gives()

        def forward(self, x):
            self.one(x), self.one(x[..., :2])

    problem = {
        "tensor": says("but dimension join is float32", 1, "one", 1, 0, 1, 1),
        "tuple": says("is tuple of in call", "one", 2, 0, "one[0]"),
    }
    with pytest.raises(hl.HooklineError, match=problem[kind]):
        hl.harvest(Twice().eval(), X[:, None], "one", to=to, batch_size=8, calls="sequence")


def test_a_call_may_give_the_batch_in_its_own_way(to):
    model, labels = net(), torch.arange(50)
    store = hl.harvest(model, TensorDataset(X, labels), "1", to=to, batch_size=8, columns={"label": lambda one: one[1]},
                       call=lambda model, batch: model(batch[0]))  # fmt: skip
    assert torch.equal(store["label"][:], labels)
    assert torch.equal(store["1"][:], expected(model, 2))


def test_the_model_is_left_as_it_was_and_so_are_random_numbers(to):
    model = net()
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    state = torch.get_rng_state()
    hl.harvest(model, X, "*", to=to, batch_size=8)
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    assert not len(hl.attached(model))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_columns_may_be_functions_of_any_kind(to):
    data = [{"input": batch, "y": batch[:, 0].double()} for batch in X.split(8)]
    columns = {name: lambda batch, name=name: batch[name] for name in ("input", "y")}
    store = hl.harvest(net(), data, "0", to=to, columns={**columns, "again": operator.itemgetter("y")},
                       call=lambda model, batch: model(batch["input"]), dtype=torch.float16)  # fmt: skip
    assert torch.equal(store["y"][:], X[:, 0].double())  # Columns are not cast.
    assert torch.equal(store["again"][:], store["y"][:])
    assert store["0"].dtype is torch.float16


def test_a_parameter_is_no_sample(to):
    with pytest.raises(hl.HooklineError, match=says("has no samples")):
        hl.harvest(net(), X[:16], "0.weight:param", to=to, batch_size=8)


def test_sparse_and_nested_batches_go_in_but_sparse_values_are_refused(to):
    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(4, 2)

        def forward(self, edges, x):
            return self.one(edges @ x)

    batches = [{"edges": torch.eye(5).to_sparse(), "x": X[:5]}, {"edges": torch.eye(5).to_sparse(), "x": X[5:10]}]
    model = Graph().eval()
    store = hl.harvest(model, batches, "one", to=to)
    with torch.no_grad():
        assert torch.allclose(store["one"][:], model.one(X[:10]), atol=1e-6)
    with pytest.raises(hl.HooklineError, match=says("make it dense with transform=")):
        hl.harvest(model, batches, "one", to=to / "b", transform=lambda value: value.to_sparse())


def test_nested_tensors_that_a_function_holds_are_compared(to):
    def adding(by):
        nested = torch.nested.nested_tensor([torch.ones(2), by * torch.ones(3)])
        return lambda value: value + nested.unbind()[1].sum()

    hl.Harvest(net(), X, "0", to=to, batch_size=8, unit=8, transform=adding(1)).run_unit(0)
    with pytest.raises(hl.StoreError, match=says("holds another harvest")):
        hl.harvest(net(), X, "0", to=to, batch_size=8, transform=adding(2))
    assert len(hl.harvest(net(), X, "0", to=to, batch_size=8, transform=adding(1))["0"]) == 50


def test_a_loss_without_a_gradient_to_keep_is_refused(to):
    with pytest.raises(hl.HooklineError, match=says("loss= is for gradients", "0:grad_output")):
        hl.harvest(net(), X, "0", to=to, batch_size=8, loss=lambda output, batch: output.sum())


def test_a_loss_may_be_a_function_of_the_output_alone(to):
    model = net()
    of_both = hl.harvest(model, X, "0:grad_output", to=to / "a", batch_size=8, loss=lambda output, batch: output.sum())
    alone = hl.harvest(model, X, "0:grad_output", to=to / "b", batch_size=8, loss=lambda output: output.sum())
    module = hl.harvest(model, X, "0:grad_output", to=to / "c", batch_size=8, loss=Sum())
    assert of_both["0:grad_output"][:].equal(alone["0:grad_output"][:])
    assert of_both["0:grad_output"][:].equal(module["0:grad_output"][:])


class Sum(nn.Module):
    """A loss that is a module: its `__call__` takes any arguments."""

    def forward(self, output, _batch):
        return output.sum()


@pytest.mark.parametrize("column", [torch.arange(50), torch.arange(50).numpy(), list(range(50))])
def test_a_column_of_all_samples_is_refused_with_the_way_to_give_it(to, column):
    with pytest.raises(hl.HooklineError, match=says("an entry of the batch", "label")):
        hl.harvest(net(), X, "0", to=to, batch_size=50, columns={"label": column})


def test_a_harvest_at_which_nothing_passes_keeps_nothing_and_says_so(to):
    model = nn.Sequential(OrderedDict(used=nn.Linear(4, 4), spare=nn.ModuleDict({"a": nn.ReLU()}))).eval()
    model.forward = model.used.forward
    with (
        pytest.warns(hl.HooklineWarning, match="'spare.a'"),
        pytest.raises(hl.NeverFired, match=says("nothing passed at any place of", "spare.*")),
    ):
        hl.harvest(model, X, "spare.*", to=to, batch_size=8)
    assert not to.exists()
