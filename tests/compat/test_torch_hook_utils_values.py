"""hookline.compat.torch_hook_utils: the dict of values that a block returns."""

from __future__ import annotations

import copy
import io
import pickle
import time
from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn

from hookline.compat.torch_hook_utils import (
    Lambda,
    get_layer_inputs,
    get_layer_outputs,
    replace_layer_outputs,
    save_maxpool_indices,
)
from tests.errors.wording import says
from tests.support.compat_models import SQUARE, encoder
from tests.support.models import mlp


class Chunks(nn.Module):
    """A forward that calls itself on chunks of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > 2:
            return torch.cat([self(chunk) for chunk in x.split(2)])
        return self.layer(x)


def test_a_layer_that_fails_leaves_the_values_of_before():
    model, x = mlp(), torch.ones(2, 4)
    with get_layer_outputs(model.named_modules()) as outputs:
        result = model(x)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(torch.ones(2, 3))
        assert outputs[""] is result
    assert list(outputs) == ["0", "1", "2", ""]
    assert outputs[""] is outputs["2"] is result
    assert list(dict(outputs)) == ["0", "1", "2", ""]


def ring() -> nn.Sequential:
    """Return a chain whose only layer calls the whole chain on chunks of the batch."""
    chain = nn.Sequential(nn.Identity())
    chain[0].forward = lambda x: torch.cat([chain(chunk) for chunk in x.split(2)]) if len(x) > 2 else x + 1
    return chain


def of_instance() -> nn.ReLU:
    """Return a torch layer with a forward of its own on the instance."""
    layer = nn.ReLU()
    layer.forward = lambda x: torch.cat([layer(chunk) for chunk in x.split(2)]) if len(x) > 2 else x + 1
    return layer


@pytest.mark.parametrize("make", [Chunks, ring, of_instance, lambda: Lambda(Chunks())])
def test_of_any_layer_that_may_call_itself_the_call_that_ended_last_is_shown(make):
    layer, x = make(), torch.randn(6, 4)
    with get_layer_outputs([("layer", layer)]) as outputs:
        result = layer(x)
    assert outputs["layer"] is result
    with get_layer_outputs([("layer", layer)]) as outputs:
        layer(x)
        outputs["layer"] = 5
        assert outputs["layer"] == 5


def test_of_two_layers_with_one_name_the_one_that_ended_last_is_shown():
    model, x = mlp(), torch.ones(2, 4)
    with get_layer_outputs([("same", model[2]), ("same", model[0]), ("other", model[0])]) as outputs:
        model(x)
        first = model[0](x)
        assert outputs["same"] is outputs["other"] is first
        last = model[2](first)
    assert outputs["same"] is last
    assert outputs["other"] is first


def test_what_a_block_gives_is_up_to_date_whatever_is_done_first():
    layer, x = nn.Linear(2, 2), torch.randn(3, 2)
    with (
        get_layer_outputs([("layer", layer)]) as changed,
        get_layer_outputs([("layer", layer)]) as one,
        get_layer_outputs([("layer", layer)]) as other,
    ):
        result = layer(x)
        changed["more"] = 1
        assert one == other
        assert changed == {"layer": result, "more": 1}


def test_names_may_be_those_of_other_layers_inside():
    outer, inner = nn.Sequential(OrderedDict(b=nn.ReLU())), nn.Tanh()
    with get_layer_outputs({"a": outer, "a.b": inner, "": outer.b, 3: inner, "3": outer}) as outputs:
        inner(outer(torch.ones(1)))
    assert {name: round(value.item(), 2) for name, value in outputs.items()} == {
        "": 1.0, "a": 1.0, "3": 1.0, "a.b": 0.76, 3: 0.76,
    }  # fmt: skip


def test_what_a_block_gives_can_be_read_by_what_reads_dicts_in_c():
    layer, x = nn.Linear(2, 2), torch.randn(3, 2)
    with get_layer_outputs([("layer", layer)]) as values:
        result = layer(x)
    assert dict.__getitem__(values, "layer") is result
    assert dict.__repr__(values) == repr({"layer": result})
    assert "{layer}".format_map(values) == str(result)


@pytest.mark.parametrize("block", [get_layer_outputs, save_maxpool_indices])
def test_what_a_block_gives_can_be_saved_and_loaded_and_made_of_other_values(block):
    model = encoder()
    with block({"pool": model.pool}) as values:
        model(SQUARE)
        file = io.BytesIO()
        torch.save(values, file)
    file.seek(0)
    assert torch.load(file)["pool"].equal(values["pool"])
    assert torch.load(io.BytesIO(file.getvalue()), weights_only=True) == copy.deepcopy(values)
    assert pickle.loads(pickle.dumps(values)) == values
    moved = type(values)({name: value.double() for name, value in values.items()})
    assert moved["pool"].dtype is torch.float64
    assert repr(type(values)(pool=1)) == "{'pool': 1}"


def test_many_values_are_read_one_by_one_in_no_time():
    model = nn.Sequential(*(nn.Identity() for _ in range(1000)))
    with get_layer_inputs(model.named_children()) as inputs:
        model(1)
        start = time.perf_counter()
        assert all(inputs[name] == 1 for name in inputs)
        for name in list(inputs):
            inputs[name] = inputs.pop(name) + 1
    assert time.perf_counter() - start < 5


def test_a_layer_without_a_value_to_put_in_is_named() -> None:
    layer = nn.Linear(2, 2)
    with pytest.raises(KeyError, match=says("no value was given for", "a", "b")):
        with replace_layer_outputs([("a", layer)], {"b": torch.zeros(2)}):
            layer(torch.ones(2))
