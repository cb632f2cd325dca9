"""Nested values: parts are found and replaced in any structure, and nothing the caller holds is modified."""

from __future__ import annotations

from collections import UserDict, deque
from collections.abc import Callable
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import hookline as hl
from hookline._kernel import describe, get_part, leaves, map_tensors, put_part, share, split
from hookline.errors import EditError, HooklineError, SiteError
from tests.errors.wording import says
from tests.support.nested_values import Frozen, Holder, Pair, Result, photo, tensors, trees


def draw_subscript(data: st.DataObject, tensor: Tensor) -> Any:
    """Draw a subscript that a tensor can take."""
    items: list[Any] = []
    for size in tensor.shape[: data.draw(st.integers(0, tensor.dim()))]:
        if size == 0:
            break
        start = data.draw(st.integers(0, size - 1))
        step = data.draw(st.integers(1, 2))
        items.append(
            data.draw(st.sampled_from([start, start - size, slice(None), slice(start, None, step), slice(None, -1)]))
        )
    if data.draw(st.booleans()):
        items.append(Ellipsis)
    if data.draw(st.booleans()):
        items.insert(data.draw(st.integers(0, len(items))), None)
    return items[0] if len(items) == 1 else tuple(items)


def draw_path(data: st.DataObject, value: Any) -> tuple[Any, ...]:
    """Draw subscripts that lead somewhere into a value."""
    path: list[Any] = []
    while data.draw(st.booleans()) and len(path) < 5:
        if isinstance(value, Tensor):
            path.append(draw_subscript(data, value))
        elif isinstance(value, dict) and value:
            path.append(data.draw(st.sampled_from(list(value))))
        elif isinstance(value, Pair) and data.draw(st.booleans()):
            path.append(data.draw(st.sampled_from(["left", "right"])))
        elif isinstance(value, (tuple, list)) and value:
            path.append(data.draw(st.integers(-len(value), len(value) - 1)))
        elif isinstance(value, (Result, Frozen)):
            path.append("first")
        elif isinstance(value, Holder):
            path.append("inside")
        else:
            break
        value = get_part(value, path[-1:])
    return tuple(path)


@settings(deadline=None)
@given(trees(), st.data())
def test_putting_back_what_was_got_is_the_identity(value: Any, data: st.DataObject) -> None:
    path = draw_path(data, value)
    before = photo(value)
    assert photo(put_part(value, path, get_part(value, path))) == before
    assert photo(value) == before


@settings(deadline=None)
@given(trees(), st.data())
def test_what_was_put_is_what_is_got_and_the_old_value_is_as_it_was(value: Any, data: st.DataObject) -> None:
    path = draw_path(data, value)
    before, old = photo(value), get_part(value, path)
    new = old.logical_not() if isinstance(old, Tensor) else "new"
    if isinstance(old, Tensor):
        new = new.to(old.dtype)
    result = put_part(value, path, new)
    assert photo(get_part(result, path)) == photo(new)
    assert photo(value) == before


@settings(deadline=None)
@given(trees())
def test_mapping_keeps_the_structure_and_meets_every_tensor_in_order(value: Any) -> None:
    before, found = photo(value), leaves(value)
    seen: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        seen.append(tensor)
        return tensor.clone()

    assert photo(map_tensors(note, value)) == before
    assert [id(tensor) for tensor in seen] == [id(tensor) for tensor in found]
    assert leaves(map_tensors(lambda _: None, value)) == []
    assert photo(value) == before


@settings(deadline=None)
@given(trees())
def test_a_value_agrees_with_itself_and_not_with_one_of_another_shape(value: Any) -> None:
    hl.run(nn.Identity(), value, edit={"": lambda passed: map_tensors(torch.clone, passed)})
    if not leaves(value) or any(isinstance(part, Holder) for part in _parts(value)):
        return
    with pytest.raises(EditError, match="shape"):
        hl.run(nn.Identity(), value, edit={"": lambda passed: map_tensors(lambda one: one.unsqueeze(0), passed)})


def _parts(value: Any) -> list[Any]:
    inside = vars(value).values() if isinstance(value, (Holder, Result)) else ()
    inside = [value.first] if isinstance(value, Frozen) else inside
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else inside
    return [value, *(part for one in inside for part in _parts(one))]


def parts(value: Any, *texts: str) -> dict[str, Any]:
    """Return the parts of a value at subscripts with stars, by the subscripts of each."""
    chosen = hl.Cache({"h": value}).select(*[f"h{text}" for text in texts])
    return {site.removeprefix("h"): part for site, part in chosen.items()}


@settings(deadline=None)
@given(tensors(), st.data())
def test_a_star_stands_for_every_index_of_its_dimension(tensor: Tensor, data: st.DataObject) -> None:
    if tensor.dim() == 0:
        return
    dimension = data.draw(st.integers(0, tensor.dim() - 1))
    if not tensor.shape[dimension]:
        return
    found = parts({"a": tensor}, f'["a"][{", ".join([":"] * dimension + ["*"])}]')
    assert torch.stack([*found.values()], dimension).equal(tensor)
    from_the_end = f"[{', '.join(['...', '*', *[':'] * (tensor.dim() - 1 - dimension)])}]"
    expected = [part.tolist() for part in tensor.unbind(dimension)]
    assert [part.tolist() for part in parts(tensor, from_the_end).values()] == expected


def test_stars_go_into_containers_and_stand_in_several_places() -> None:
    value = {"a": (torch.zeros(2), torch.zeros(3)), "b": [torch.zeros(1)]}
    assert list(parts(value, "[*]")) == ['["a"]', '["b"]']
    assert list(parts(value, "[*][*][*]")) == [
        '["a"][0][0]', '["a"][0][1]', '["a"][1][0]', '["a"][1][1]', '["a"][1][2]', '["b"][0][0]',
    ]  # fmt: skip
    assert list(parts(torch.zeros(2, 2), "[*, *]")) == ["[0, 0]", "[0, 1]", "[1, 0]", "[1, 1]"]
    assert list(parts(torch.zeros(2, 3), "[None, *]")) == ["[None, 0]", "[None, 1]"]
    assert list(parts(torch.zeros(2), "[0]")) == ["[0]"]
    with pytest.raises(SiteError, match=says("indices for float32", "(2,)", 2)):
        parts(torch.zeros(2), "[*, *]")


def test_subscripts_are_split_where_a_tensor_begins() -> None:
    tensor = torch.zeros(2, 2)
    part, rest = split({"a": [tensor]}, ("a", 0, slice(1), 0))
    assert part is tensor
    assert rest == (slice(1), 0)
    assert split({"a": 3}, ("a",)) == (3, ())


@pytest.mark.parametrize(
    ("value", "subscripts", "message"),
    [
        ({"logits": 1}, ("logit",), says("dict of logits", "logit", "logits")),
        ((1, 2), (2,), "2.*tuple of 2"),
        (torch.zeros(2, 3), ((0, 3),), r"float32 \(2, 3\).*out of (bounds|range)"),
        (torch.zeros(2, 3, 4), ((..., 16),), says("is out of bounds for", 16, 2, 4)),
        (torch.zeros(2, 3, 4), ((None, ..., -5, 0),), says("is out of bounds for", "-5", 1, 3)),
        (torch.zeros(2, 3, 4), (7,), says("is out of bounds for", 7, 0, 2)),
        (torch.zeros(2), ((0, 0),), says("float32 too many", "(2,)")),
        (torch.zeros(2), ("key",), r"'key'.*float32 \(2,\)"),
        (torch.zeros(2), (slice(None, None, -1),), r"float32 \(2,\).*step"),
        (None, (0,), "None"),
        (Result(1), ("frst",), says("Result did you mean", "frst", "first")),
        (Pair(1, 2), ("count",), "'count'.*Pair"),
        (torch.distributions.Normal(0.0, 1.0), ("mean",), "'mean'.*Normal"),
    ],
)
def test_a_part_that_is_not_there_says_what_is(value: Any, subscripts: tuple[Any, ...], message: str) -> None:
    for look in (lambda: get_part(value, subscripts), lambda: put_part(value, subscripts, 0)):
        with pytest.raises(SiteError, match=message):
            look()


@pytest.mark.parametrize(
    "value",
    [
        deque([torch.ones(2), 3]),
        MappingProxyType({"a": torch.ones(2)}),
        UserDict({"a": torch.ones(2)}),
        torch.max(torch.eye(2), 0),
        torch.nn.utils.rnn.pack_sequence([torch.ones(2)]),
        type("Rows", (list,), {})([torch.ones(2)]),
        type("Text", (), {"__slots__": "inside", "__init__": lambda self: setattr(self, "inside", torch.ones(2))})(),
        torch.distributions.Categorical(torch.ones(2)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_less_usual_containers_are_rebuilt_in_their_own_type(value: Any) -> None:
    found = leaves(value)
    assert found
    result = share(value)
    assert type(result) is type(value)
    assert [tensor.tolist() for tensor in leaves(result)] == [tensor.tolist() for tensor in found]
    assert not any(one is other for one, other in zip(leaves(result), found, strict=True))


class Boxes(tuple):
    """A tuple whose constructor does not take its items."""

    def __new__(cls, left: Any, right: Any) -> Boxes:
        return super().__new__(cls, (left, right))


def test_what_cannot_be_rebuilt_is_refused_by_its_name() -> None:
    for value in (
        {torch.ones(1)},
        iter([torch.ones(1)]),
        (tensor for tensor in [torch.ones(1)]),
        Boxes(torch.ones(1), 2),
    ):
        with pytest.raises(HooklineError, match=type(value).__name__):
            map_tensors(torch.clone, value)


def test_a_value_that_holds_itself_is_not_followed_forever() -> None:
    value: list[Any] = [torch.ones(2)]
    value.append(value)
    assert len(leaves(value)) == 1
    assert map_tensors(torch.clone, value)[0].tolist() == [1.0, 1.0]


def test_modules_and_functions_inside_a_value_are_left_alone() -> None:
    layer = nn.Linear(2, 2)
    value = share({"layer": layer, "function": len, "tensor": torch.ones(1)})
    assert value["layer"] is layer
    assert value["function"] is len


def test_a_part_of_a_part_of_a_tensor_is_put() -> None:
    old = torch.zeros(2, 2, 2)
    assert put_part(old, (1, slice(None), 0), torch.ones(2)).tolist() == [[[0, 0], [0, 0]], [[1, 1], [0, 0]]]
    assert not old.any()


def test_autograd_flows_through_a_part_that_was_put() -> None:
    old, new = torch.ones(2, 2, requires_grad=True), torch.full((2,), 3.0, requires_grad=True)
    (put_part((old * 2,), (0, 0), new)[0] ** 2).sum().backward()
    assert old.grad is not None
    assert new.grad is not None
    assert old.grad.tolist() == [[0.0, 0.0], [8.0, 8.0]]
    assert new.grad.tolist() == [6.0, 6.0]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (torch.zeros(2, 3), "float32 (2, 3)"),
        ((1, 2), "tuple of 2"),
        ({"a": 1, "b": 2}, "dict of a, b"),
        (None, "None"),
        (0.5, "0.5"),
        (Holder(1), "Holder"),
    ],
)
def test_values_are_described_in_a_few_words(value: Any, text: str) -> None:
    assert describe(value) == text


@pytest.mark.parametrize(
    "function", [lambda value: put_part(value, (0,), 1), lambda value: put_part(value, (slice(0, 2),), (1, 2))]
)
def test_tuples_are_rebuilt_when_an_item_or_a_slice_is_put(function: Callable[[Any], Any]) -> None:
    assert function((0, 0, 0))[0] == 1
    assert type(function([0, 0, 0])) is list
    with pytest.raises(EditError, match=says("given where tuple of", 1, 2)):
        put_part((0, 0, 0), (slice(0, 2),), (1,))


def test_an_edit_of_a_whole_tensor_inside_a_tuple_must_have_its_shape() -> None:
    model, x = nn.Sequential(nn.LSTM(3, 3)), torch.ones(2, 3)
    with pytest.raises(EditError, match=says("a shape given where another passes", "(1, 3)", "(2, 3)")):
        hl.run(model, x, edit={"0[0]": lambda value: value[:1]})


def test_an_edit_writes_into_no_object_of_the_model() -> None:
    class Configured(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.settings = SimpleNamespace(scale=2.0)

        def forward(self, x: Tensor) -> Any:
            return self.settings

    def rescale(settings: Any) -> Any:
        settings.scale = 5.0
        return settings

    model = Configured()
    assert hl.run(model, torch.ones(1), edit={"": rescale}).scale == 5.0
    assert model.settings.scale == 2.0


def test_a_part_of_an_item_of_a_tuple_is_suggested() -> None:
    value = (None, torch.ones(2, 3), {"z": torch.ones(2)})
    with pytest.raises(SiteError, match=says("is not a part of tuple of did", 3)):
        get_part(value, ((slice(None), -1),))
    with pytest.raises(SiteError, match=says("is not a part of tuple of did you", "z", 3, "z")):
        get_part(value, ("z",))
    with pytest.raises(SiteError, match=says("is not a part of tuple of", "y", 3)):
        get_part(value, ("y",))


def test_an_output_of_transformers_is_rebuilt_with_its_attributes_and_items() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")
    old = outputs.CausalLMOutputWithPast(logits=torch.ones(2), hidden_states=(torch.ones(1),))
    new = map_tensors(torch.neg, old)
    assert type(new) is type(old)
    assert list(new) == ["logits", "hidden_states"]
    assert new.logits is new["logits"] is new[0]
    assert (new.logits.tolist(), new.hidden_states[0].tolist(), new.loss) == ([-1, -1], [-1], None)
    assert old.logits.tolist() == old["logits"].tolist() == [1, 1]
