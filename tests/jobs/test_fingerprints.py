"""The fingerprints by which a harvest recognizes models, functions and data."""

from __future__ import annotations

import functools
from collections import OrderedDict
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import hookline as hl
from hookline._jobs.fingerprints import checksum, checksums, digest, function_text, model_digest
from tests.support.harvest_models import X, changed, expected, net
from tests.support.prepared_processes import prepared_processes


def test_a_model_is_known_by_every_bit_of_its_weights():
    model = nn.Sequential(OrderedDict(one=nn.Linear(100, 100), two=nn.BatchNorm1d(100)))
    before = model_digest(model)
    assert before == model_digest(model)
    with torch.no_grad():
        model.one.weight[41, 43] = torch.nextafter(model.one.weight[41, 43], torch.tensor(9.0))
    after = model_digest(model)
    assert after != before
    model.two.running_mean[3] += 1
    assert model_digest(model) != after
    assert model_digest(torch.compile(model)) ["weights"] == model_digest(model)["weights"]  # fmt: skip


def test_checksums_of_many_tensors_are_those_of_each():
    tensors = [
        torch.arange(number, dtype=dtype) for number in (0, 3, 5_000, 150_001) for dtype in (torch.int16, torch.double)
    ]
    tensors += [torch.eye(300).to_sparse(), torch.randn(300, 300).t(), torch.empty(3, device="meta"), torch.ones(())]
    named = [(str(number), tensor) for number, tensor in enumerate(tensors)]
    assert checksums(iter(named)) == [(name, checksum(tensor)) for name, tensor in named]
    assert len({one for _, one in checksums(named)}) == len(named)
    assert checksums([]) == []


def test_functions_are_known_by_their_code_and_what_they_close_over():
    def scaled(by):
        return lambda value: value * by

    assert function_text(scaled(2)) == function_text(scaled(2))
    assert function_text(scaled(2)) != function_text(scaled(3))
    assert function_text(lambda value: value + 1) != function_text(lambda value: value + 2)
    assert function_text(lambda value: value.abs()) != function_text(lambda value: value.neg())
    assert function_text(scaled(torch.ones(2))) != function_text(scaled(torch.zeros(2)))
    assert function_text("tokens") == "tokens"
    assert function_text(None) is None


def test_functions_are_known_by_the_functions_inside_them():
    one, other = (lambda value: (lambda x: x + 1)(value)), (lambda value: (lambda x: x + 2)(value))
    assert function_text(one) != function_text(other)


def kept(value):
    return value if "x" in {"a", "b", "c", "d", "e"} else -value


def known() -> tuple[int, str]:
    """Return the hash of a text, which differs between processes, and the text of a function, which must not."""
    return hash("text"), function_text(kept)


def test_a_function_is_known_again_in_another_process():
    with ProcessPoolExecutor(1, mp_context=prepared_processes()) as pool:
        other, there = pool.submit(known).result()
    own, here = known()
    assert other != own
    assert there == here


def test_data_are_known_by_all_that_is_in_them():
    assert digest({"a": [1, "x", torch.ones(2)]}) == digest({"a": [1, "x", torch.ones(2)]})
    assert digest({"a": [1, "x", torch.ones(2)]}) != digest({"a": [1, "y", torch.ones(2)]})
    assert digest([torch.ones(2), torch.ones(1)]) != digest([torch.ones(1), torch.ones(2)])
    assert digest(torch.ones(2)) != digest(torch.ones(2, dtype=torch.float64))
    assert digest(torch.ones(2), "before") != digest(torch.ones(2))


def scaled(value, by=1, *, plus=0):
    return value * by + plus


class Scale(nn.Module):
    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.tensor(by))

    def forward(self, value):
        return value * self.by


class Held:
    def __init__(self, by: float) -> None:
        self.by = by

    def __call__(self, value):
        return value * self.by

    def method(self, value):
        return value * self.by


def closed(over):
    return lambda value: over(value)


@pytest.mark.parametrize(
    "made",
    [
        lambda by: functools.partial(scaled, by=by),
        lambda by: functools.partial(scaled, plus=by),
        Scale,
        Held,
        lambda by: Held(by).method,
        lambda by: closed(Scale(by)),
        lambda by: closed(functools.partial(scaled, by=by)),
        lambda by: lambda value, k=by: value * k,
        lambda by: lambda value, *, k=by: value * k,
    ],
    ids=["partial", "keyword", "module", "object", "method", "closure", "nested", "default", "keyword default"],
)
def test_a_function_with_other_values_is_another_one(made, to):
    assert function_text(made(2.0)) == function_text(made(2.0))
    assert function_text(made(2.0)) != function_text(made(3.0))
    hl.Harvest(net(), X, "0", to=to, batch_size=8, unit=8, transform=made(2.0)).run_unit(0)
    with pytest.raises(hl.StoreError, match="its transform differs"):
        hl.harvest(net(), X, "0", to=to, batch_size=8, transform=made(3.0))


def test_swapped_weights_and_other_layers_make_another_model():
    model = nn.Sequential(nn.Linear(128, 128), nn.ReLU())
    before = model_digest(model)
    with torch.no_grad():
        model[0].weight[:, [1, 2]] = model[0].weight[:, [2, 1]]
    assert model_digest(model) != before
    with torch.no_grad():
        model[0].weight[:, [1, 2]] = model[0].weight[:, [2, 1]]
    assert model_digest(model) == before
    assert model_digest(nn.Sequential(model[0], nn.GELU())) != before


def test_objects_are_known_by_what_is_in_them():
    assert digest(Path("a")) != digest(Path("b"))
    assert digest(SimpleNamespace(a=1)) != digest(SimpleNamespace(a=2))
    assert digest(Held(1.0)) == digest(Held(1.0))
    assert digest(Held(1.0)) != digest(Held(2.0))
    assert digest({"x", "y", "z"}) == digest({"z", "y", "x"})


def test_a_model_whose_weights_are_elsewhere_is_harvested_and_known_by_them(to):
    accelerate = pytest.importorskip("accelerate")

    def offloaded(model: nn.Module) -> nn.Module:
        return accelerate.cpu_offload(model, execution_device=torch.device("cpu"))

    store = hl.harvest(offloaded(net()), X, "0", "1", to=to, batch_size=8)
    assert torch.equal(store["1"][:], expected(net(), 2))
    assert len(hl.harvest(net(), X, "0", "1", to=to, batch_size=8)["1"]) == 50  # The same model, not offloaded.
    with pytest.raises(hl.StoreError, match="model.weights"):
        hl.harvest(offloaded(changed(net())), X, "0", "1", to=to, batch_size=8)
