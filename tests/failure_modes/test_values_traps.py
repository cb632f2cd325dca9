"""What passes through a model is captured as it was, whatever overwrites it later and however it is nested."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookline as hl
from tests.support.models import Overwrites, Pair, Result, Returns


class Slotted:
    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def test_an_activation_in_place_leaves_the_captured_value_alone() -> None:
    """C01"""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))
    x = torch.randn(3, 4)
    with hl.capture(model, "0", "1:input") as acts:
        model(x)
    assert acts["0"].equal(nn.functional.linear(x, model[0].weight, model[0].bias))
    assert acts["1:input"].equal(acts["0"])
    assert acts["0"].min() < 0


@pytest.mark.parametrize("clone", [None, True])
@pytest.mark.parametrize(
    "write",
    [
        lambda y: y.add_(1),
        lambda y: torch.mul(y, 2, out=y),
        lambda y: y.data.zero_(),
        lambda y: y.numpy().fill(0),
        lambda y: y[0].zero_(),
        lambda y: y.view(-1).t().zero_(),
        lambda y: torch._foreach_zero_([y]),
    ],
    ids=["add_", "out=", ".data", "numpy", "part", "view", "foreach"],
)
def test_whatever_overwrites_a_value_later_does_not_reach_the_capture(
    write: Callable[[Any], Any], clone: bool | None
) -> None:
    """C02"""
    model = Overwrites(lambda x: x * 2, write)
    x = torch.ones(2, 3)
    with hl.capture(model, "source", clone=clone) as acts:
        assert not model(x).equal(x * 2)
    assert acts["source"].equal(x * 2)


def test_a_module_that_returns_the_same_buffer_each_time_gives_every_call_its_own_value() -> None:
    """C02"""
    buffer = torch.empty(2)
    model = Returns(lambda x: torch.mul(x, 10, out=buffer))
    with hl.capture(model, "", keep="all") as acts:
        for number in range(3):
            model(torch.full((2,), float(number)))
    assert [value[0].item() for value in acts.calls("")] == [0.0, 10.0, 20.0]


def test_a_reference_that_was_overwritten_is_refused_when_read() -> None:
    """C01, C02"""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))
    with hl.capture(model, "0", clone=False) as acts:
        model(torch.randn(3, 4))
    with pytest.raises(hl.StaleValue, match=r"'0' was overwritten in place .*clone=True"):
        acts["0"]


def test_a_captured_part_neither_holds_the_whole_nor_changes_with_it() -> None:
    """C03"""
    model = Overwrites(lambda x: x * 2, Tensor.zero_)
    with hl.capture(model, "source[:, -1]") as acts:
        model(torch.ones(2, 1000))
    assert acts["source[:, -1]"].tolist() == [2.0, 2.0]
    assert acts["source[:, -1]"].untyped_storage().nbytes() == 8
    assert "8 bytes" in repr(acts)


def test_an_input_is_captured_as_it_entered() -> None:
    """C04"""
    model = Returns(lambda x: x.mul_(3))
    with hl.capture(model, ":input", "") as acts:
        model(torch.ones(2))
    assert acts[":input"].tolist() == [1.0, 1.0]
    assert acts[""].tolist() == [3.0, 3.0]


def test_an_input_is_captured_as_the_forward_gets_it_whenever_a_pre_hook_was_registered() -> None:
    """C04"""
    model = nn.Sequential(nn.Identity())
    with hl.capture(model, "0:input") as acts:
        handle = model[0].register_forward_pre_hook(lambda module, args: (args[0] + 5,))
        model(torch.zeros(2))
        handle.remove()
    assert acts["0:input"].tolist() == [5.0, 5.0]


CONTAINERS: dict[str, Callable[[Tensor], Any]] = {
    "tuple": lambda x: (x * 1, (x * 2, "text", None)),
    "list": lambda x: [x * 1, [x * 2]],
    "dict": lambda x: {"a": x * 1, 3: {"b": x * 2}},
    "OrderedDict": lambda x: OrderedDict(b=x * 1, a=x * 2),
    "namedtuple": lambda x: Pair(x * 1, [x * 2]),
    "return type": lambda x: torch.max(x, 0),
    "dataclass": lambda x: Result(x * 1, (x * 2,)),
    "deque": lambda x: deque([x * 1, x * 2]),
    "read-only mapping": lambda x: MappingProxyType({"a": x * 1}),
    "slots": lambda x: Slotted(x * 1),
    "distribution": lambda x: torch.distributions.Normal(x * 1, torch.ones_like(x)),
}


def tensors_in(value: Any) -> list[Tensor]:
    """Find tensors without hookline's own walk."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (str, int, type(None))):
        return []
    if hasattr(value, "values") and callable(value.values):
        value = list(value.values())
    if isinstance(value, (tuple, list, deque)):
        return [tensor for part in value for tensor in tensors_in(part)]
    if isinstance(value, Slotted):
        return [value.tensor]
    return [tensor for part in vars(value).values() for tensor in tensors_in(part)]


@pytest.mark.parametrize("kind", CONTAINERS)
def test_every_tensor_of_a_nested_value_is_captured_in_its_own_type_and_none_is_shared(kind: str) -> None:
    """C05"""
    make, x = CONTAINERS[kind], torch.ones(2, 2)
    model = Overwrites(make, lambda value: [tensor.zero_() for tensor in tensors_in(value)])
    with hl.capture(model, "source") as acts:
        output = model(x)
    expected = make(x)
    assert type(acts["source"]) is type(output)
    kept = tensors_in(acts["source"])
    assert len(kept) == len(tensors_in(expected)) > 0
    assert all(one.equal(other) for one, other in zip(kept, tensors_in(expected), strict=True))


def test_a_container_that_cannot_be_rebuilt_is_refused_by_name() -> None:
    """C05"""
    model = Returns(lambda x: {x})
    with hl.capture(model, ""), pytest.raises(hl.HooklineError, match="set"):
        model(torch.ones(2))


def test_a_value_without_tensors_is_kept_as_it_is() -> None:
    """C05"""
    model = Returns(lambda x: (None, "text", 3))
    _, acts = hl.run(model, torch.ones(2), capture="")
    assert acts[""] == (None, "text", 3)


class Attention(nn.Module):
    def forward(self, hidden: Tensor, mask: Tensor | None = None, *rest: Tensor, scale: float = 1.0) -> Tensor:
        return hidden * scale


@pytest.mark.parametrize("positional", [0, 1, 2])
def test_arguments_are_found_by_name_however_they_were_passed(positional: int) -> None:
    """C09"""
    model, hidden, mask = Attention(), torch.ones(2), torch.zeros(2)
    args = (hidden, mask)[:positional]
    kwargs = dict(list({"hidden": hidden, "mask": mask}.items())[positional:])
    with hl.capture(model, ":input", ':inputs["hidden"]', ':inputs["mask"]', ":inputs") as acts:
        model(*args, **kwargs, scale=2.0)
    assert acts[":input"].equal(hidden)
    assert acts[':inputs["hidden"]'].equal(hidden)
    assert acts[':inputs["mask"]'].equal(mask)
    assert acts[":inputs"]["scale"] == 2.0
    with hl.patch(model, {':inputs["hidden"]': 7.0}):
        assert model(*args, **kwargs).tolist() == [7.0, 7.0]
