"""What passes through a model is changed only where and how it was asked; what does not fit is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookline as hl
from tests.support.models import Pair, Result, Returns
from tests.support.states import bits

STRUCTURES: list[tuple[Callable[[Tensor], Any], Any, str]] = [
    (lambda x: (x, x), torch.zeros(2), r"''.*float32 \(2,\).*tuple of 2"),
    (lambda x: (x, x), (torch.zeros(2),), "''.*tuple of 1.*tuple of 2"),
    (lambda x: {"a": x}, {"b": torch.zeros(2)}, "''.*dict of b.*dict of a"),
    (lambda x: {"a": x}, [torch.zeros(2)], "''.*list of 1.*dict of a"),
    (lambda x: Result(x), Pair(torch.zeros(2), ()), "''.*Pair.*Result"),
    (lambda x: x, (torch.zeros(2),), r"''.*tuple of 1.*float32 \(2,\)"),
    (lambda x: x, "text", r"''.*str.*float32 \(2,\)"),
]


@pytest.mark.parametrize(("make", "value", "message"), STRUCTURES)
def test_another_structure_is_refused_with_both_sides_named(
    make: Callable[[Tensor], Any], value: Any, message: str
) -> None:
    """C06"""
    model, x = Returns(make), torch.ones(2)
    with hl.patch(model, {"": value}), pytest.raises(hl.EditError, match=message):
        model(x)
    with hl.edit(model, "", lambda _: value), pytest.raises(hl.EditError, match=message):
        model(x)


def test_a_mapping_in_another_order_is_put_in_by_its_keys() -> None:
    """C06"""
    model = Returns(lambda x: {"a": x, "b": x})
    output = hl.run(model, torch.zeros(1), patch={"": {"b": torch.full((1,), 2.0), "a": torch.ones(1)}})
    assert (output["a"].item(), output["b"].item()) == (1.0, 2.0)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.zeros(2, 4), r"'0'.*\(2, 4\).*\(2, 3\)"),
        (torch.zeros(2, 3, 1), r"'0'.*\(2, 3, 1\).*\(2, 3\)"),
        (torch.zeros(2, 3, dtype=torch.float64), r"'0'.*float64.*float32.*\.to\(torch\.float32\)"),
        (torch.zeros(2, 3, device="meta"), r"'0'.*meta.*cpu.*\.to\('cpu'\)"),
        (torch.zeros(2, 3).to_sparse(), "'0'.*sparse"),
    ],
    ids=["shape", "rank", "dtype", "device", "layout"],
)
def test_a_value_of_another_shape_dtype_device_or_layout_is_refused(value: Tensor, message: str) -> None:
    """C07"""
    model, x = nn.Sequential(nn.Identity(), nn.ReLU()), torch.ones(2, 3)
    with hl.patch(model, {"0": value}), pytest.raises(hl.EditError, match=message):
        model(x)
    with hl.edit(model, "0", lambda _: value), pytest.raises(hl.EditError, match=message):
        model(x)
    part = value[:1] if value.layout is torch.strided else value
    with hl.patch(model, {"0[:1]": part}), pytest.raises(hl.EditError, match=r"'0\[:1\]'"):
        model(x)


def test_what_an_observer_returns_never_reaches_the_model() -> None:
    """C08"""
    seen: dict[str, Tensor] = {}
    model, x = nn.Sequential(nn.Identity(), nn.Identity()), torch.ones(2)
    with hl.capture(model, "0", transform=lambda value: seen.setdefault("first", value * 0)) as acts:
        assert model(x).equal(x)
    assert acts["0"].tolist() == [0.0, 0.0]


def test_a_first_argument_that_is_a_tuple_is_not_spread_over_the_parameters() -> None:
    """C10"""
    model = Returns(lambda pair: pair[0] + pair[1])
    with hl.edit(model, ":input", lambda pair: (pair[1], pair[1])):
        assert model((torch.ones(1), torch.full((1,), 5.0))).item() == 10.0
    with hl.patch(model, {":input": (torch.full((1,), 2.0), torch.full((1,), 3.0))}):
        assert model((torch.ones(1), torch.ones(1))).item() == 5.0


class WritesThroughAnAlias(nn.Module):
    """Returns its input, into which its child's output was written: right only if the two are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.alias = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = x + 1
        self.alias(x).mul_(10)
        return x


@pytest.mark.parametrize("where", ["alias", "alias:input", "alias:inputs", "alias:grad_output", "alias:grad_input"])
def test_observing_keeps_the_aliases_a_model_relies_on(where: str) -> None:
    """C17"""
    model = WritesThroughAnAlias()
    with hl.capture(model, where):
        assert model(torch.ones(2, requires_grad=True)).tolist() == [20.0, 20.0]


@pytest.mark.parametrize("function", [lambda value: None, lambda value: value])
def test_an_edit_that_leaves_the_value_alone_passes_on_the_very_same_object(function: Callable[[Tensor], Any]) -> None:
    """C17"""
    model = WritesThroughAnAlias()
    assert hl.run(model, torch.ones(2), edit={"alias": function}).tolist() == [20.0, 20.0]


def test_a_value_patched_with_itself_changes_nothing() -> None:
    """C17"""
    model, x = (
        nn.Sequential(nn.Linear(4, 4), nn.Flatten(0), nn.ReLU(inplace=True), nn.Unflatten(0, (3, 4))),
        torch.randn(3, 4),
    )
    output, acts = hl.run(model, x, capture=["**", "**:input"])
    for site in acts:
        assert bits(hl.run(model, x, patch={site: acts[site]})) == bits(output), site


def test_foreign_hooks_act_outside_the_captured_output_and_the_next_input_shows_what_they_did() -> None:
    """C18"""
    model, x = nn.Sequential(nn.Identity(), nn.Identity()), torch.ones(2)
    early = model[0].register_forward_hook(lambda module, args, output: output + 1)
    with hl.capture(model, "0", "1:input") as acts:
        late = model[0].register_forward_hook(lambda module, args, output: output * 10)
        model(x)
        owners = {row.kind for row in hl.attached(model) if row.owner != "hookline"}
    early.remove()
    late.remove()
    assert acts["0"].tolist() == [1.0, 1.0]
    assert acts["1:input"].tolist() == [20.0, 20.0]
    assert owners == {"forward hook"}


def zero_first(value: Tensor) -> Tensor:
    value[:, 0] = 0
    return value


def zero_data(value: Tensor) -> Tensor:
    value.data[:, 0] = 0
    return value


def zero_numpy(value: Tensor) -> Tensor:
    value.numpy()[:, 0] = 0
    return value


@pytest.mark.parametrize("inference", [False, True], ids=["eager", "inference mode"])
@pytest.mark.parametrize("function", [zero_first, zero_data, zero_numpy])
def test_an_edit_in_place_changes_the_output_and_nothing_that_shares_its_memory(
    function: Callable[[Tensor], Tensor], inference: bool
) -> None:
    """C23"""
    model = nn.Sequential(nn.Identity(), nn.Identity())
    x = torch.ones(2, 2)
    with torch.inference_mode(inference):
        output = hl.run(model, x, edit={"0": function})
    assert output.tolist() == [[0.0, 1.0], [0.0, 1.0]]
    assert x.tolist() == [[1.0, 1.0], [1.0, 1.0]]


@pytest.mark.parametrize("inference", [False, True], ids=["eager", "inference mode"])
@pytest.mark.parametrize("function", [zero_first, zero_data, zero_numpy])
def test_an_edit_in_place_that_returns_nothing_is_not_dropped_in_silence(
    function: Callable[[Tensor], Tensor], inference: bool
) -> None:
    """C23"""
    model = nn.Sequential(nn.Identity(), nn.Identity())
    with (
        torch.inference_mode(inference),
        hl.edit(model, "0", lambda value: [function(value), None][1]),
        pytest.raises(hl.EditError, match="'0'.*return the changed value"),
    ):
        model(torch.ones(2, 2))


def test_an_edit_in_place_has_the_gradient_of_what_it_left() -> None:
    """C23"""
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), torch.randn(2, 3)
    model(x)[:, 1:].sum().backward()
    expected = model[0].weight.grad.clone()
    model.zero_grad()
    hl.run(model, x, edit={"0": zero_first}).sum().backward()
    assert model[0].weight.grad.equal(expected)


def test_a_container_changed_by_an_edit_counts_and_the_models_own_stays() -> None:
    """C23"""
    model = nn.Sequential(Returns(lambda x: {"logits": x, "rows": [x]}), nn.Identity())

    def change(value: dict[str, Any]) -> dict[str, Any]:
        value["logits"] = value["logits"] * 0
        value["rows"][0] = value["rows"][0] + 1
        return value

    output = hl.run(model, torch.ones(2), edit={"0": change})
    assert output["logits"].tolist() == [0.0, 0.0]
    assert output["rows"][0].tolist() == [2.0, 2.0]
    with (
        hl.edit(model, "0", lambda value: value.update(logits=value["rows"][0] * 0)),
        pytest.raises(hl.EditError, match="'0'"),
    ):
        model(torch.ones(2))


def test_an_observer_that_writes_into_what_it_sees_does_not_reach_the_model() -> None:
    """C23"""
    model, x = nn.Sequential(nn.Identity(), nn.Identity()), torch.ones(2, 2)
    for function in (zero_first, zero_data, zero_numpy):
        with hl.capture(model, "0", transform=function) as acts:
            assert model(x).equal(torch.ones(2, 2))
        assert acts["0"][:, 0].tolist() == [0.0, 0.0]


def test_what_a_caller_gives_is_never_written_to() -> None:
    """C23"""
    model, x = nn.Sequential(nn.Identity(), nn.ReLU(inplace=True)), torch.ones(2)
    given = -torch.ones(2)
    hl.run(model, x.clone(), patch={"0": given})
    hl.run(model, x.clone(), edit={"0": lambda _: given})
    hl.run(model, x.clone(), skip={"0": given})
    with hl.edit(model, "0", lambda _: given, check=False):
        model(x.clone())
    assert given.tolist() == [-1.0, -1.0]
