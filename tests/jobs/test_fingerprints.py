"""The fingerprints by which a harvest recognizes models, functions and data."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import hookline as hl
from tests.errors.wording import says
from tests.support.harvest_models import X, changed, expected, net


def begin(to: Path, model: nn.Module, data: Any = X, **options: Any) -> None:
    """Run the first unit of a harvest."""
    hl.Harvest(model, data, "0", to=to, **{"batch_size": 8, "unit": 8, **options}).run_unit(0)


def is_known(to: Path, model: nn.Module, data: Any = X, **options: Any) -> bool:
    """Return True if the same harvest goes on. It is not run to its end."""
    try:
        hl.Harvest(model, data, "0", to=to, **{"batch_size": 8, "unit": 8, **options}).run_unit(1)
    except hl.StoreError:
        return False
    return True


def nudged(model: nn.Module) -> None:
    """Change one weight by the least that a float can change."""
    model[0].weight[41, 43] = torch.nextafter(model[0].weight[41, 43], torch.tensor(9.0))


def swapped(model: nn.Module) -> None:
    model[0].weight[:, [1, 2]] = model[0].weight[:, [2, 1]]


def other_layer(model: nn.Module) -> None:
    model[2] = nn.GELU().eval()


@pytest.mark.parametrize("change", [nudged, swapped, other_layer, lambda model: model[1].running_mean[3].add_(1)])
@torch.no_grad()
def test_a_model_is_known_by_every_bit_of_its_weights_and_its_layers(to, change):
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(128, 128), nn.BatchNorm1d(128), nn.ReLU()).eval()

    x, other = torch.randn(24, 128, generator=torch.Generator().manual_seed(0)), model()
    change(other)
    begin(to, model(), x)
    assert not is_known(to, other, x)
    assert is_known(to, model(), x)


def test_a_model_with_tensors_of_many_sizes_and_dtypes_is_known_by_each(to):
    def model(at: int = -1) -> nn.Module:
        tensors = [
            torch.arange(number, dtype=dtype)
            for number in (0, 3, 5_000, 150_001)
            for dtype in (torch.int16, torch.double)
        ]
        tensors += [torch.eye(300).to_sparse(), torch.arange(9.0).view(3, 3).t(), torch.ones(())]
        made = net()
        for number, tensor in enumerate(tensors):
            made.register_buffer(f"b{number}", tensor * 2 if number == at else tensor)
        return made

    begin(to, model())
    assert [at for at in range(11) if is_known(to, model(at))] == [0, 1]  # Those have no elements.
    assert is_known(to, model())


class Data:
    """Samples that say themselves by what they are known, and hold anything besides."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input": X[index], "held": self.held}

    def collate(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        return {"input": torch.stack([one["input"] for one in samples]), "held": samples[0]["held"]}


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


def times(by: Any) -> Callable[..., Any]:
    return lambda value: value * by


MADE: dict[str, Callable[[float], Callable[..., Any]]] = {
    "partial": lambda by: functools.partial(scaled, by=by),
    "keyword": lambda by: functools.partial(scaled, plus=by),
    "module": Scale,
    "object": Held,
    "method": lambda by: Held(by).method,
    "number": times,
    "tensor": lambda by: times(torch.full((8,), by)),
    "closure": lambda by: closed(Scale(by)),
    "nested": lambda by: closed(functools.partial(scaled, by=by)),
    "default": lambda by: lambda value, k=by: value * k,
    "keyword default": lambda by: lambda value, *, k=by: value * k,
    "code": lambda by: (lambda value: value + 1) if by > 2 else (lambda value: value + 2),
    "method called": lambda by: (lambda value: value.abs()) if by > 2 else (lambda value: value.neg()),
    "code inside": (
        lambda by: (lambda value: (lambda x: x + 1)(value)) if by > 2 else (lambda value: (lambda x: x + 2)(value))
    ),
    "path": lambda by: functools.partial(ignoring, Path(str(by))),
    "namespace": lambda by: functools.partial(ignoring, SimpleNamespace(a=by)),
    "container": lambda by: functools.partial(ignoring, {"a": [1, str(by), torch.ones(2)]}),
    "order": lambda by: functools.partial(ignoring, [torch.ones(2), torch.ones(1)][:: 1 if by > 2 else -1]),
    "dtype": lambda by: functools.partial(ignoring, torch.ones(2, dtype=torch.float64 if by > 2 else torch.float32)),
    "set": lambda by: functools.partial(ignoring, {"x", "y", str(by)}),
}


def ignoring(_held: Any, value: torch.Tensor) -> torch.Tensor:
    return value


@pytest.mark.parametrize("made", MADE.values(), ids=MADE)
def test_a_function_with_other_values_is_another_one(made, to):
    begin(to, net(), transform=made(2.0))
    with pytest.raises(hl.StoreError, match=says("holds another harvest")):
        hl.harvest(net(), X, "0", to=to, batch_size=8, transform=made(3.0))
    assert is_known(to, net(), transform=made(2.0))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([1, "x"], [1, "y"]),
        (torch.ones(2), torch.ones(2, dtype=torch.float64)),
        ([torch.ones(2), torch.ones(1)], [torch.ones(1), torch.ones(2)]),
        (Held(1.0), Held(2.0)),
    ],
    ids=["texts", "dtype", "order", "object"],
)
def test_data_are_known_by_all_that_is_in_them(one, other, to):
    begin(to, net(), Data(one), call=lambda model, batch: model(batch["input"]))
    assert not is_known(to, net(), Data(other), call=lambda model, batch: model(batch["input"]))
    assert is_known(to, net(), Data(one), call=lambda model, batch: model(batch["input"]))


def test_a_model_whose_weights_are_elsewhere_is_harvested_and_known_by_them(to):
    accelerate = pytest.importorskip("accelerate")

    def offloaded(model: nn.Module) -> nn.Module:
        return accelerate.cpu_offload(model, execution_device=torch.device("cpu"))

    store = hl.harvest(offloaded(net()), X, "0", "1", to=to, batch_size=8)
    assert torch.equal(store["1"][:], expected(net(), 2))
    assert len(hl.harvest(net(), X, "0", "1", to=to, batch_size=8)["1"]) == 50  # The same model, not offloaded.
    with pytest.raises(hl.StoreError, match=says("holds another harvest")):
        hl.harvest(offloaded(changed(net())), X, "0", "1", to=to, batch_size=8)
