"""Only the requested values change; a new value of another shape, structure or kind is refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import hookline as hl
from tests.errors.wording import says
from tests.support.models import Gives, Pair, Result, Returns
from tests.support.states import bits

STRUCTURES: list[tuple[Callable[[Tensor], Any], Any, str]] = [
    (lambda x: (x, x), torch.zeros(2), says("given where tuple of passes", "''", "float32 (2,)", "tuple of 2")),
    (lambda x: (x, x), (torch.zeros(2),), says("given where tuple of passes", "''", "tuple of 1", "tuple of 2")),
    (lambda x: {"a": x}, {"b": torch.zeros(2)}, says("given where passes", "''", "dict of b", "dict of a")),
    (lambda x: {"a": x}, [torch.zeros(2)], says("given where passes", "''", "list of 1", "dict of a")),
    (lambda x: Result(x), Pair(torch.zeros(2), ()), "''.*Pair.*Result"),
    (lambda x: x, (torch.zeros(2),), says("given where passes", "''", "tuple of 1", "float32 (2,)")),
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
        (torch.zeros(2, 3, dtype=torch.float64), says("torch float64 torch float32 passes", "0")),
        (torch.zeros(2, 3, device="meta"), says("on cpu passes", "'0'", "'cpu'")),
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
    """Writes into its child's output and returns the child's input: right only if the two are one tensor."""

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
        pytest.raises(hl.EditError, match=says("the function wrote into its", "0")),
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


class Options:
    """An object that modules may pass to each other."""

    def __init__(self, size: int = 1) -> None:
        self.size = size


class MoreOptions(Options):
    """A subclass of Options."""


def changed(passing: Any, new: Any, how: str, check: bool = True) -> Any:
    """Return the output of a model in which `new` replaces the value `passing`."""
    model = nn.Sequential(Gives(passing))
    block = {
        "patch": lambda: hl.patch(model, {"0": new}, check=check),
        "edit": lambda: hl.edit(model, "0", lambda _: new, check=check),
    }[how]()
    with block:
        return model(torch.ones(1))


ARRAY = np.arange(6, dtype=np.float32).reshape(2, 3)
HOWS = ("patch", "edit")

OTHER = {
    "text for an integer": (3, "hello", says("str given where the int", 3)),
    "text for None in a tuple": ((1, 2), (1, "two"), says("str given where the int", 2)),
    "a boolean for an integer": (3, True, says("True given where the int", 3)),
    "an integer for a boolean": (True, 1, says("given where the bool True", 1)),
    "a complex number for a float": (0.5, 1j, says("j given where the float", "0.5")),
    "a tensor for a boolean": (True, torch.ones(()), says("float32 given where the bool")),
    "a number for text": ("gelu", 1, says("given where the str", 1, "gelu")),
    "None for an integer": ((1, 2), (1, None), says("None given where the int", 2)),
    "another class": (Options(), 3, says("given where Options passes", 3)),
    "a class above": (MoreOptions(), Options(), says("Options given where MoreOptions passes")),
    "an array of another dtype": (
        ARRAY,
        ARRAY.astype(np.float64),
        says("an array of float64", "(2, 3)"),
    ),
    "a tensor for an array": (ARRAY, torch.ones(2, 3), "given where"),
    "text for an array": (ARRAY, "hello", says("given where passes", "str")),
}


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("name", OTHER)
def test_a_value_of_another_kind_is_refused(name: str, how: str) -> None:
    passing, new, message = OTHER[name]
    with pytest.raises(hl.EditError, match=message):
        changed(passing, new, how)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("name", OTHER)
def test_a_value_of_another_kind_passes_unchecked_if_that_is_said(name: str, how: str) -> None:
    passing, new, _ = OTHER[name]
    assert type(changed(passing, new, how, check=False)) is type(new)


ALIKE = {
    "an integer": (3, 4),
    "an integer for a float": (0.5, 2),
    "a float for an integer": (3, 0.5),
    "a float for a complex number": (1j, 0.5),
    "a number of numpy's": (0.5, np.float32(2)),
    "a tensor for a number": (2, torch.ones(())),
    "a boolean": (True, False),
    "text": ("gelu", "relu"),
    "a value for None": (None, "hello"),
    "a class below": (Options(), MoreOptions()),
    "a tuple": ((1, "a", None), (2, "b", 3)),
    "an array": (ARRAY, ARRAY + 1),
}


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("name", ALIKE)
def test_a_value_of_the_same_kind_takes_its_place(name: str, how: str) -> None:
    passing, new = ALIKE[name]
    result = changed(passing, new, how)
    assert type(result) is type(new)
    if isinstance(new, np.ndarray):
        assert result is not passing
        assert (result == new).all()
    elif not isinstance(new, Options):
        assert result == new


def test_a_number_or_a_row_is_broadcast_onto_an_array_and_what_passed_is_left_alone() -> None:
    before = ARRAY.copy()
    assert (changed(ARRAY, 2, "patch") == np.full((2, 3), 2, np.float32)).all()
    assert (changed(ARRAY, ARRAY[1], "patch") == ARRAY[1]).all()
    assert (before == ARRAY).all()


@pytest.mark.parametrize("new", [ARRAY[:, :2], 1e60, 1j, True], ids=repr)
def test_what_an_array_can_not_hold_is_refused(new: Any) -> None:
    with pytest.raises(hl.EditError, match="'0'"):
        changed(ARRAY, new, "patch")


@pytest.mark.parametrize("new", [torch.ones(2, 3), "text"], ids=["tensor", "text"])
def test_what_is_neither_a_number_nor_an_array_is_told_to_be_one(new: Any) -> None:
    with pytest.raises(hl.EditError, match=says("give a number or an")):
        changed(ARRAY, new, "patch")


def test_an_array_of_text_takes_such_arrays_only() -> None:
    words = np.array(["a", "b"])
    assert list(changed(words, np.array(["c", "d"]), "patch")) == ["c", "d"]
    with pytest.raises(hl.EditError, match=says("give such an array")):
        changed(words, 1, "patch")


def test_an_edit_of_an_array_keeps_its_shape() -> None:
    with pytest.raises(hl.EditError, match=says("given where an array of", "(3,)", "(2, 3)")):
        changed(ARRAY, ARRAY[0], "edit")


def test_a_boolean_is_no_number_for_a_tensor_of_numbers() -> None:
    with pytest.raises(hl.EditError, match=says("True given where float32")):
        changed(torch.ones(2), True, "patch")
    assert changed(torch.ones(2).bool(), False, "patch").equal(torch.zeros(2).bool())


@pytest.mark.parametrize("number", [np.float32(2), np.float64(2), np.int64(2)], ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("site", ["0", "0[1:]"])
def test_a_number_of_numpys_fills_a_tensor_as_one_of_pythons_does(number: Any, site: str) -> None:
    model = nn.Sequential(Gives(torch.zeros(3)))
    assert hl.run(model, torch.ones(1), patch={site: number}).equal(hl.run(model, torch.ones(1), patch={site: 2}))


def test_a_number_of_numpys_that_does_not_fit_is_shown() -> None:
    with pytest.raises(hl.EditError, match=says("given where int64 passes", "(3,)", "2.5")):
        changed(torch.zeros(3, dtype=torch.int64), np.float32(2.5), "patch")


@pytest.mark.parametrize("value", [None, 3, 0.5, True, len], ids=repr)
def test_a_module_can_be_skipped_with_what_a_cache_has_of_it(value: Any) -> None:
    model, x = nn.Sequential(Gives(value)), torch.ones(1)
    with hl.capture(model, "0") as acts:
        model(x)
    with hl.skip(model, "0", acts):
        assert model(x) is value


LAYERS: dict[str, tuple[nn.Module, Tensor]] = {
    "Conv2d": (nn.Conv2d(3, 4, 3, stride=2, padding=1), torch.ones(2, 3, 9, 9)),
    "ConvTranspose1d": (nn.ConvTranspose1d(3, 4, 3, stride=2), torch.ones(2, 3, 5)),
    "MaxPool2d": (nn.MaxPool2d(2), torch.ones(2, 3, 8, 8)),
    "AdaptiveAvgPool2d": (nn.AdaptiveAvgPool2d(1), torch.ones(2, 3, 8, 8)),
    "Flatten": (nn.Flatten(), torch.ones(2, 3, 4)),
    "Unflatten": (nn.Unflatten(1, (2, 3)), torch.ones(2, 6)),
    "Upsample": (nn.Upsample(scale_factor=2), torch.ones(2, 3, 4)),
    "GLU": (nn.GLU(), torch.ones(2, 6)),
    "Embedding": (nn.Embedding(5, 3), torch.tensor([[1, 2, 3]])),
    "BatchNorm1d": (nn.BatchNorm1d(4), torch.ones(2, 4)),
    "several": (nn.Sequential(nn.Conv1d(3, 4, 2), nn.Flatten(), nn.Linear(16, 7)), torch.ones(2, 3, 5)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_the_value_of_a_skip_has_the_shape_that_a_layer_of_torch_would_return(name: str) -> None:
    layer, x = LAYERS[name]
    model = nn.Sequential(layer)
    with torch.no_grad():
        output = model.eval()(x)
        assert hl.run(model, x, skip={"0": output + 1}).equal(output + 1)
        assert hl.run(model, x, skip={"0": 0.5}).equal(torch.full_like(output, 0.5))
        with pytest.raises(hl.EditError, match=says("shape does not fit where", "0")):
            hl.run(model, x, skip={"0": torch.cat([output, output], -1)})


def test_to_know_the_shape_that_a_layer_would_return_nothing_is_run() -> None:
    """Running statistics, random numbers, hooks and other modes must not notice anything."""
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 4)).train()
    x, seen, state = torch.randn(3, 4), [], torch.get_rng_state()
    handle = model[2].register_forward_hook(lambda *_: seen.append("called"))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with FlopCounterMode(display=False) as flops, hl.capture(model, "/*").when_missing("ignore") as acts:
        hl.run(model, x, skip={str(number): torch.zeros(3, 4) for number in range(3)})
    handle.remove()
    assert seen == ["called"]  # By the model: a skipped layer is called, but its forward does not run.
    assert flops.get_total_flops() == 0
    assert torch.equal(torch.get_rng_state(), state)
    assert all(tensor.equal(before[name]) for name, tensor in model.state_dict().items())
    assert list(acts) == []


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float64, torch.complex64])
def test_a_number_given_for_a_layer_takes_the_dtype_that_it_would_return(dtype: torch.dtype) -> None:
    x = torch.ones(2, 3, 4, dtype=dtype)
    assert hl.run(nn.Sequential(nn.Flatten()), x, skip={"0": 0 if dtype != torch.bool else False}).dtype == dtype
    if dtype.is_complex:
        assert hl.run(nn.Sequential(nn.Linear(4, 2, dtype=dtype)), x, skip={"0": 0.5}).dtype == dtype


class Decoder(nn.Module):
    """Passes the shape that a layer shall return as a second argument."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv1d(2, 2, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose1d(2, 2, 3, stride=2, padding=1)

    def forward(self, x: Tensor) -> Any:
        return self.up(self.down(x), output_size=x.shape[2:])


def test_the_shape_that_a_skipped_layer_would_return_depends_on_all_its_arguments() -> None:
    model, x = Decoder(), torch.ones(1, 2, 4)
    output = model(x)
    assert hl.run(model, x, skip={"up": output.detach()}).equal(output)
    assert hl.run(model, x, skip={"up": 1.0}).equal(torch.ones_like(output))


def test_a_layer_whose_forward_somebody_replaced_may_return_any_shape() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 3)))
    x, value = torch.ones(2, 4), torch.ones(2)
    linear = model[0][0]
    linear.forward = lambda x: F.linear(x, linear.weight).sum(-1)
    for site in ("0", "0.0"):
        assert hl.run(model, x, skip={site: value}).equal(value)
        with pytest.raises(hl.EditError, match=says("whose shape is not known")):
            hl.run(model, x, skip={site: 0.0})
    del linear.forward
    linear.forward = functools.wraps(linear.forward)(functools.partial(type(linear).forward, linear))
    for site in ("0", "0.0"):  # Like accelerate: the wrapped forward tells the shape.
        assert hl.run(model, x, skip={site: 0.0}).equal(torch.zeros(2, 3))
    del linear.forward


def test_a_number_given_for_a_layer_of_a_compiled_model_fills_its_shape() -> None:
    model, x = nn.Sequential(nn.Linear(4, 3), nn.Flatten()), torch.ones(2, 4)
    compiled = torch.compile(model, backend="eager")
    compiled(x)
    with hl.skip(model, "0", 0.5):
        assert compiled(x).equal(torch.full((2, 3), 0.5))


def test_the_shape_that_a_usual_layer_returns_is_known_without_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run on meta tensors takes longer than the layer, and the first such run takes a second."""
    usual = [nn.Linear(4, 4), nn.LayerNorm(4), nn.BatchNorm1d(4, momentum=None), nn.GELU(), nn.Dropout()]
    model, x = nn.Sequential(*usual), torch.ones(2, 4)
    for layer in usual:
        monkeypatch.setattr(type(layer), "forward", pytest.fail)
    assert hl.run(model, x, skip={str(number): 0.0 for number in range(5)}).equal(torch.zeros(2, 4))
