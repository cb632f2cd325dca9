"""hookline.compat.torch_hook_utils: the README's examples, the API name by name, and the original's bugs gone."""

from __future__ import annotations

import contextvars
import copy
import gc
import io
import operator
import pickle
import threading
import time
import weakref
from collections import OrderedDict
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hookline as hl
from hookline.compat import torch_hook_utils
from hookline.compat.torch_hook_utils import (
    Lambda,
    Module,
    Sample,
    Sequential,
    get_layer_inputs,
    get_layer_outputs,
    named_modules_of_type,
    replace_layer_inputs,
    replace_layer_output,
    replace_layer_outputs,
    save_maxpool_indices,
    use_indices_in_maxunpool,
)
from hookline.compat.torch_hook_utils.input_output_hooks import replace_layer_input_arguments
from tests.models import GPT, mlp, tokens

POOLS = [
    (nn.MaxPool1d(2), (1, 2, 4)),
    (nn.MaxPool2d(2), (1, 2, 4, 4)),
    (nn.MaxPool3d(2), (1, 2, 4, 4, 4)),
    (nn.AdaptiveMaxPool1d(2), (1, 2, 4)),
    (nn.AdaptiveMaxPool2d(2), (1, 2, 4, 4)),
    (nn.AdaptiveMaxPool3d(2), (1, 2, 4, 4, 4)),
    (nn.FractionalMaxPool2d(2, output_size=2), (1, 2, 4, 4)),
    (nn.FractionalMaxPool3d(2, output_size=2), (1, 2, 4, 4, 4)),
]
SQUARE = torch.tensor([[[1.0, 2.0], [3.0, 4.0]]])


class Scaled(nn.Module):
    """Two inputs and a keyword."""

    def forward(self, x: Tensor, scale: Tensor | float = 1.0, *, shift: float = 0.0) -> Tensor:
        return x * scale + shift


class Levels(nn.Module):
    """An encoder, or a decoder, that uses one layer at several depths."""

    def __init__(self, depth: int = 2, kind: type[nn.Module] = nn.MaxPool2d, **options: int) -> None:
        super().__init__()
        self.depth = depth
        self.pool = kind(**(options or {"kernel_size": 2}))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.depth):
            x = self.pool(x)
        return x


class Branches(nn.Module):
    """An encoder that uses one of two pools."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.MaxPool2d(2), nn.MaxPool2d(2)

    def forward(self, x: Tensor, branch: str) -> Tensor:
        if branch == "none":
            raise ValueError("no such branch")
        return getattr(self, branch)(x)


class Chunks(nn.Module):
    """A forward that calls itself on chunks of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > 2:
            return torch.cat([self(chunk) for chunk in x.split(2)])
        return self.layer(x)


class Options(nn.Module):
    """Everything has a default."""

    def forward(self, input_ids: Any = None, inputs_embeds: Any = None) -> Any:
        return input_ids, inputs_embeds


class Keywords(nn.Module):
    """Everything is given by keyword."""

    def forward(self, *, x: Any, y: Any = 2.0) -> Any:
        return x, y


def encoder() -> nn.Sequential:
    return nn.Sequential(OrderedDict(pool=nn.MaxPool2d(kernel_size=2)))


def decoder() -> nn.Sequential:
    return nn.Sequential(OrderedDict(pool=nn.MaxUnpool2d(kernel_size=2)))


# The examples of the README.


def test_the_first_example_of_the_readme_gives_the_distribution_that_a_layer_got(capsys):
    model = nn.Sequential(
        nn.Flatten(),
        nn.LazyLinear(out_features=1),
        Lambda(Normal, scale=0.1),
        Sample(),
    )
    input = torch.rand(1, 4)
    sample_layers = named_modules_of_type(model, Sample)
    with get_layer_inputs(sample_layers) as layer_inputs:
        output = model(input)
    print(layer_inputs)  # noqa: T201
    loc = model[1](input).item()
    printed = f"{{'3': Normal(loc: tensor([[{loc:.4f}]], grad_fn=<AddmmBackward0>), scale: tensor([[0.1000]]))}}\n"
    assert capsys.readouterr().out == printed
    assert (output - loc).abs() < 1


def test_the_second_example_of_the_readme_prints_what_it_says(capsys):
    # As printed there it lacks its imports: torch, nn, OrderedDict and the two functions.
    encoder = nn.Sequential(
        OrderedDict(pool=nn.MaxPool2d(kernel_size=2)),
    )
    with save_maxpool_indices(encoder) as maxpool_indices:
        encoder_output = encoder(
            torch.as_tensor(
                [
                    [
                        [1.0, 2.0],
                        [3.0, 4.0],
                    ]
                ]
            )
        )
    print(maxpool_indices)  # noqa: T201
    print(encoder_output)  # noqa: T201

    decoder = nn.Sequential(
        OrderedDict(pool=nn.MaxUnpool2d(kernel_size=2)),
    )
    with use_indices_in_maxunpool(decoder, maxpool_indices):
        decoder_output = decoder(encoder_output)

    print(decoder_output)  # noqa: T201
    assert capsys.readouterr().out == (
        "{'pool': tensor([[[3]]])}\ntensor([[[4.]]])\ntensor([[[0., 0.],\n         [0., 4.]]])\n"
    )


def test_every_name_of_the_original_is_there_and_the_one_that_its_readme_promised():
    assert {*torch_hook_utils.__all__} == {
        "get_layer_inputs", "get_layer_outputs", "replace_layer_inputs", "replace_layer_outputs",
        "save_maxpool_indices", "use_indices_in_maxunpool", "Sample", "Sequential", "Module", "Lambda",
        "named_modules_of_type", "replace_layer_output",
    }  # fmt: skip
    assert replace_layer_output is replace_layer_outputs
    for module, names in {
        "input_output_hooks": ("get_layer_inputs", "replace_layer_outputs", "replace_layer_input_arguments"),
        "maxpool_hooks": ("save_maxpool_indices", "use_indices_in_maxunpool"),
        "layers": ("Lambda", "Sample", "Sequential"),
        "types": ("Module",),
    }.items():
        assert all(hasattr(getattr(torch_hook_utils, module), name) for name in names)


# Inputs and outputs.


@pytest.mark.parametrize(
    "layers",
    [
        lambda model: model.named_children(),
        lambda model: list(model.named_children()),
        lambda model: dict(model.named_children()).items(),
        lambda model: dict(model.named_children()),
        lambda model: nn.ModuleDict(dict(model.named_children())),
    ],
    ids=["generator", "list", "items", "dict", "ModuleDict"],
)
def test_layers_may_be_given_in_any_way_that_names_them(layers):
    model, x = mlp(), torch.ones(2, 4)
    with get_layer_outputs(layers(model)) as outputs, get_layer_inputs(layers(model)) as inputs:
        result = model(x)
    assert list(outputs) == list(inputs) == ["0", "1", "2"]
    assert outputs["2"].equal(result)
    assert inputs["0"] is x
    assert inputs["1"] is outputs["0"]


def test_values_come_in_the_order_in_which_the_layers_run():
    model = GPT(depth=1)
    with get_layer_inputs(model.named_modules()) as inputs, get_layer_outputs(model.named_modules()) as outputs:
        model(tokens())
    assert [*inputs][:3] == ["", "h.0", "h.0.norm"]
    assert [*outputs][-2:] == ["head", ""]
    assert "h" not in inputs  # A ModuleList is never called, and nothing is said of it.


def test_values_are_of_the_graph_itself():
    model, x = mlp(), torch.ones(2, 4)
    with get_layer_outputs(model.named_children()) as outputs:
        loss = model(x).sum()
    (gradient,) = torch.autograd.grad(loss, outputs["1"])
    assert gradient.shape == (2, 8)
    assert outputs["1"] is outputs["1"]


def test_a_value_that_is_overwritten_in_place_is_the_one_that_passed():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 2))
    x = torch.randn(2, 4)
    with get_layer_outputs(model.named_children()) as outputs, get_layer_inputs(model.named_children()) as inputs:
        result = model(x)
        result.zero_()
    linear = F.linear(x, model[0].weight, model[0].bias)
    assert outputs["0"].equal(linear)
    assert inputs["1"].equal(linear)
    assert outputs["1"].equal(linear.relu())
    assert outputs["2"].equal(model[2](linear.relu()))
    assert outputs["2"].requires_grad


def test_any_object_is_collected_whole():
    class Many(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Any]:
            return {"pair": (x, None), "distribution": Normal(x, 1.0)}

    layers, x = [("many", Many()), ("none", Lambda(lambda _: None))], torch.ones(1)
    with get_layer_outputs(layers) as outputs:
        for _, layer in layers:
            layer(x)
    assert outputs["many"]["pair"][0] is x
    assert outputs["many"]["distribution"].loc is x
    assert outputs["none"] is None
    assert "none" in outputs


@pytest.mark.parametrize(
    "value",
    [(one for one in "ab"), {torch.ones(1)}, threading.Lock(), [threading.Lock(), torch.ones(1)]],
    ids=["generator", "set", "lock", "list"],
)
def test_what_can_not_be_copied_is_collected_and_handed_over_as_it_is(value):
    layers = {"first": Lambda(lambda _: value), "last": nn.Identity()}
    with get_layer_outputs(layers) as outputs, get_layer_inputs(layers) as inputs:
        layers["last"](layers["first"](None))
    assert type(outputs["first"]) is type(outputs["last"]) is type(inputs["last"]) is type(value)
    if not isinstance(value, list):
        assert outputs["first"] is outputs["last"] is inputs["last"] is value
    with replace_layer_inputs([("last", layers["last"])], {"last": value}):
        given = layers["last"](0)
    assert given is value if not isinstance(value, list) else given[0] is value[0]


def test_an_object_that_is_put_in_is_the_very_one_which_the_layer_may_fill():
    class Memory:
        def __init__(self) -> None:
            self.seen: list[Tensor] = [torch.zeros(1)]

    memory, layer = Memory(), Lambda(lambda memory, x: memory.seen.append(x))
    with replace_layer_inputs([("layer", layer)], {"layer": memory}):
        layer(None, torch.ones(1))
        layer(None, torch.ones(1))
    assert len(memory.seen) == 3


def test_an_error_of_hookline_names_the_layer():
    model = nn.Sequential(OrderedDict({"block": nn.Sequential(nn.Linear(2, 2)), "pool": nn.MaxPool1d(2)}))
    x = torch.ones(3, 2, 2)
    with pytest.raises(hl.HooklineError, match=r"'block\.0': a value inside vmap"):
        with get_layer_outputs([("block.0", model.block[0])]):
            torch.func.vmap(model)(x)
    with pytest.raises(hl.HooklineError, match="'pool/max_pool1d': a value inside vmap"), save_maxpool_indices(model):
        torch.func.vmap(model)(x)
    unpool = nn.MaxUnpool1d(2)
    with pytest.raises(hl.EditError, match=r"'up:inputs': no indices for 'up' have the shape \(3, 2, 2\) of its input"):
        with use_indices_in_maxunpool({"up": unpool}, {"up": []}):
            unpool(x)


def test_the_collected_values_are_live_and_stay_after_the_block():
    layer = nn.Linear(1, 1)
    with get_layer_outputs([("layer", layer)]) as outputs:
        assert outputs == {}
        first = layer(torch.ones(1))
        assert outputs == {"layer": first}
        second = layer(torch.zeros(1))
    assert outputs == {"layer": second}
    assert len(outputs) == 1


def test_the_collected_values_can_be_used_as_a_dict():
    layer = nn.Linear(1, 1)
    with get_layer_outputs([("layer", layer)]) as outputs:
        result = layer(torch.ones(1))
    assert pickle.loads(pickle.dumps(outputs)) == {"layer": result}
    assert {**outputs} == dict(outputs) == copy.copy(outputs) == {"layer": result}
    assert repr(outputs) == f"{{'layer': {result!r}}}"
    outputs["more"] = 1
    assert outputs.pop("layer") is result
    assert list(outputs.items()) == [("more", 1)]
    assert outputs.calls("layer") == []
    with get_layer_outputs([("layer", layer)]) as outputs:
        layer(torch.ones(1))
        outputs.clear()  # It ran all the same: nothing is said.
        assert outputs == {}
        layer(torch.zeros(1))
    assert list(outputs) == ["layer"]
    with pytest.raises(KeyError, match="other"):
        outputs["other"]


def test_of_a_layer_that_runs_several_times_the_last_call_is_shown_and_all_can_be_kept():
    layer = nn.Linear(3, 3)
    model, x = nn.Sequential(layer, layer, layer), torch.ones(1, 3)
    with get_layer_outputs([("layer", layer)]) as last, get_layer_inputs([("layer", layer)], keep="all") as every:
        result = model(x)
    assert last["layer"].equal(result)
    assert len(last.calls("layer")) == 1
    assert [value.equal(wanted) for value, wanted in zip(every.calls("layer"), [x, layer(x)], strict=False)] == [
        True
    ] * 2
    assert len(every.calls("layer")) == 3
    assert every["layer"].equal(layer(layer(x)))


def test_of_two_layers_with_one_name_the_last_that_ran_is_shown():
    model, x = mlp(), torch.ones(2, 4)
    with get_layer_outputs([("same", model[2]), ("same", model[0])]) as outputs:
        result = model(x)
    assert outputs["same"].equal(result)


def test_one_layer_may_have_several_names():
    layer, x = nn.Linear(1, 1), torch.ones(1)
    with get_layer_inputs([("one", layer), ("other", layer)]) as inputs:
        layer(x)
    assert inputs["one"] is inputs["other"] is x


@pytest.mark.parametrize(
    "call",
    [
        lambda layer, x: layer(x, 2.0, shift=1.0),
        lambda layer, x: layer(x=x, scale=2.0),
        lambda layer, x: layer(scale=2.0, x=x),
        lambda layer, x: layer(x),
    ],
    ids=["several", "keywords", "other order", "one"],
)
def test_the_first_input_is_collected_and_replaced_however_it_is_passed(call):
    layer, x = Scaled(), torch.ones(2)
    with get_layer_inputs([("layer", layer)]) as inputs:
        call(layer, x)
    assert inputs["layer"] is x
    with replace_layer_inputs([("layer", layer)], {"layer": x * 3}):
        replaced = call(layer, x)
    assert replaced.equal(call(layer, x * 3))


def test_the_first_input_is_the_first_that_the_forward_declares():
    layers = {"options": Options(), "keywords": Keywords(), "any": Lambda(lambda *args, **kwargs: (args, kwargs))}

    def run() -> list[Any]:
        options, keywords, anything = layers.values()
        return [options(inputs_embeds="E"), keywords(y=3, x="X"), anything(b=1, a=2)]

    with get_layer_inputs(layers) as inputs:
        run()
        assert inputs == {"options": "E", "keywords": "X", "any": 1}
        layers["options"](inputs_embeds="E", input_ids="I")
        assert inputs["options"] == "I"
        layers["options"]("J", inputs_embeds="E")
        assert inputs["options"] == "J"
        layers["any"](3, b=1)
        assert inputs["any"] == 3
    with replace_layer_inputs(layers, dict.fromkeys(layers, "new")):
        assert run() == [("new", "E"), ("new", 3), ((), {"b": "new", "a": 2})]
        assert layers["options"]() == ("new", None)
        assert layers["any"]() == (("new",), {})
        assert layers["any"](1, 2) == (("new", 2), {})


@pytest.mark.parametrize("forward", [lambda self: 1, lambda self, **options: 1], ids=["nothing", "keywords"])
def test_an_input_that_a_layer_does_not_take_can_not_be_replaced(forward):
    layer = type("Layer", (nn.Module,), {"forward": forward})()
    with replace_layer_inputs([("layer", layer)], {"layer": 1}):
        with pytest.raises(hl.EditError, match="^'layer' takes no input that could be replaced"):
            layer()


def test_an_input_may_be_replaced_by_any_object_even_none():
    layer = nn.Identity()
    for value in (Normal(0.0, 1.0), None, torch.ones(3, 3), "text"):
        with replace_layer_inputs([("layer", layer)], {"layer": value, "unused": 1}):
            result = layer(torch.ones(1))
        assert type(result) is type(value)


def test_what_is_given_is_not_the_models_to_overwrite():
    layer, value = nn.ReLU(inplace=True), -torch.ones(2)
    with replace_layer_inputs([("layer", layer)], {"layer": value}):
        assert layer(torch.ones(2)).equal(torch.zeros(2))
    assert value.equal(-torch.ones(2))


def test_an_output_is_replaced_and_the_layer_runs_all_the_same():
    ran = []
    layer = Lambda(lambda x, **options: ran.append((x, options)))
    with replace_layer_outputs([("layer", layer)], {"layer": "new"}):
        assert layer(1, option=2) == "new"
    assert ran == [(1, {"option": 2})]
    assert layer(1) is None


def test_gradients_flow_into_what_is_put_in():
    model, value = mlp(), torch.ones(2, 8, requires_grad=True)
    with replace_layer_output([("1", model[1])], {"1": value}):
        model(torch.ones(2, 4)).sum().backward()
    assert value.grad is not None
    assert model[0].weight.grad is None


def test_values_are_looked_up_on_entering_and_a_missing_one_is_a_key_error():
    model, values = mlp(), {"0": torch.ones(2, 4)}
    with pytest.raises(KeyError, match="1"), replace_layer_inputs(model.named_children(), values):
        pass
    with replace_layer_inputs([("0", model[0])], values):
        values["0"] = torch.zeros(2, 4)
        result = model(torch.zeros(2, 4))
    assert result.equal(model(torch.ones(2, 4)))


@pytest.mark.parametrize(
    ("args", "kwargs", "wanted"),
    [
        ((), {"shift": 5.0}, 6.0),
        ((), {"scale": 2.0, "shift": 5.0}, 7.0),
        ((torch.ones(1) * 3,), {}, 3.0),
        ((torch.ones(1) * 3, 2.0), {"shift": 1.0}, 7.0),
    ],
    ids=["keyword", "keywords", "positional", "all"],
)
@pytest.mark.parametrize("by_keyword", [False, True], ids=["called with x", "called with x=x"])
def test_arguments_are_bound_over_those_of_the_call(args, kwargs, wanted, by_keyword):
    layer, x = Scaled(), torch.ones(1)
    with replace_layer_input_arguments([("layer", layer)], *args, **kwargs):
        result = layer(x=x) if by_keyword else layer(x)
    assert result.item() == wanted
    assert layer(x).item() == 1.0


def test_arguments_are_bound_in_a_layer_that_takes_any():
    layer = Lambda(lambda *args, **kwargs: (args, kwargs))
    with replace_layer_input_arguments([("layer", layer)], "a", option=1):
        assert layer(0, 2, other=3) == (("a", 2), {"other": 3, "option": 1})
        assert layer() == (("a",), {"option": 1})


def test_arguments_that_the_forward_does_not_have_are_refused_on_entering():
    with pytest.raises(TypeError, match="unexpected keyword argument 'sclae'"):
        with replace_layer_input_arguments([("layer", Scaled())], sclae=2.0):
            pass


def test_blocks_nest_on_one_layer_and_see_what_those_around_them_did():
    layer, x = nn.Linear(1, 1, bias=False), torch.ones(1)
    named = {"layer": layer}
    with (
        get_layer_inputs(named) as before,
        replace_layer_inputs(named, {"layer": x * 2}),
        get_layer_inputs(named) as after,
        get_layer_outputs(named) as made,
        replace_layer_outputs(named, {"layer": x * 7}),
        get_layer_outputs(named) as given,
    ):
        assert layer(x).item() == 7.0
    assert [before["layer"].item(), after["layer"].item(), given["layer"].item()] == [1.0, 2.0, 7.0]
    assert made["layer"].equal(layer(x * 2))


def test_every_block_is_undone_when_an_exception_leaves_it():
    model = nn.Sequential(nn.Linear(1, 1), nn.MaxPool1d(1))
    for block in (
        get_layer_inputs(model.named_children()),
        get_layer_outputs(model.named_children()),
        replace_layer_inputs([("0", model[0])], {"0": "no tensor"}),
        replace_layer_outputs([("0", model[0])], {"0": "no tensor"}),
        replace_layer_input_arguments([("0", model[0])], "no tensor"),
        save_maxpool_indices(model),
    ):
        with pytest.raises((TypeError, ZeroDivisionError)), block:
            model(torch.ones(1, 1))
            1 / 0
        assert not hl.attached(model)
        assert model[1].return_indices is False
    assert type(model(torch.ones(1, 1))) is Tensor


def test_a_block_that_is_dropped_takes_its_hooks_along():
    model = mlp()
    block = get_layer_inputs(model.named_children())
    values = weakref.ref(block.__enter__())
    assert hl.attached(model)
    gc.disable()
    try:
        del block
        assert not hl.attached(model)
    finally:
        gc.enable()
    gc.collect()  # Python 3.10 leaves a traceback that holds its own frame.
    assert values() is None


def test_the_values_of_a_block_hold_no_hooks_and_are_in_no_cycle():
    model = nn.Sequential(nn.MaxPool1d(1), nn.Linear(1, 1))
    gc.disable()
    try:
        with get_layer_outputs(model.named_children()) as outputs, save_maxpool_indices(model) as indices:
            model(torch.ones(1, 1))
        references = [weakref.ref(outputs), weakref.ref(indices), weakref.ref(outputs["1"])]
        del outputs, indices
        assert [reference() for reference in references] == [None] * 3
    finally:
        gc.enable()


def test_a_block_acts_on_the_thread_that_opened_it():
    layer, x = nn.Linear(1, 1, bias=False), torch.ones(1)
    found = {}

    def collect(number: int, barrier: threading.Barrier) -> None:
        with get_layer_inputs([("layer", layer)], keep="all") as inputs:
            barrier.wait()
            layer(x * number)
            barrier.wait()
        found[number] = [value.item() for value in inputs.calls("layer")]

    barrier = threading.Barrier(2)
    threads = [threading.Thread(target=collect, args=(number, barrier)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {1: [1.0], 2: [2.0]}


# Warnings, where the original said nothing.


def test_layers_that_did_not_run_are_passed_over_and_reading_them_says_why():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.ModuleList([nn.Linear(8, 2)]))
    with get_layer_inputs(model.named_modules()) as inputs:
        model[2][0](torch.ones(8))
        with pytest.raises(hl.NotCaptured, match="'0' has no value: not called in this block"):
            inputs["0"]
    assert list(inputs) == ["2.0"]
    assert "0" not in inputs
    assert inputs.get("0") is None
    with pytest.raises(hl.NotCaptured, match="'0' has no value: not called in this block"):
        inputs["0"]
    with pytest.raises(hl.NotCaptured, match="'2' has no value: a ModuleList is never called"):
        inputs["2"]
    with pytest.raises(KeyError, match="'other'"):
        inputs["other"]


def test_when_no_layer_ran_at_all_they_are_named():
    layers = [(number, nn.ReLU()) for number in range(5)]
    with pytest.warns(hl.HooklineWarning, match="nothing passed 0, 1, 2 and 2 more: not called in this block") as said:
        with get_layer_outputs(layers):
            pass
    assert said[0].filename == __file__


def test_nothing_is_said_of_the_layers_of_a_real_model_that_it_does_not_call():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=4, vocab_size=5, n_positions=4)
    model = transformers.GPT2LMHeadModel(config).eval()
    with get_layer_outputs(model.named_modules()) as outputs:
        logits = model(torch.tensor([[1, 2]])).logits
    assert outputs["lm_head"] is logits
    assert outputs[""].logits is logits
    assert "transformer.h" not in outputs


def test_a_layer_that_is_called_without_an_input_is_said_to_be():
    layer = Lambda(lambda: 1)
    with pytest.warns(hl.HooklineWarning, match="nothing passed 'layer': .* or without an input"):
        with get_layer_inputs({"layer": layer}) as inputs:
            layer()
    with pytest.raises(hl.NotCaptured, match="'layer' has no value: .* without an input"):
        inputs["layer"]


def test_a_layer_that_ran_on_another_thread_is_said_to_have_done_so():
    layer = nn.Linear(1, 1)
    with pytest.warns(hl.HooklineWarning, match="on another thread or task than the block's"):
        with get_layer_inputs({"layer": layer}) as inputs:
            thread = threading.Thread(target=layer, args=(torch.ones(1),))
            thread.start()
            thread.join()
    with pytest.raises(hl.NotCaptured, match="on another thread or task"):
        inputs["layer"]


def test_a_block_acts_in_the_task_that_opened_it():
    layer = nn.Linear(1, 1)
    with pytest.warns(hl.HooklineWarning, match="on another thread or task than the block's"):
        with get_layer_inputs({"layer": layer}) as inputs:
            contextvars.Context().run(layer, torch.ones(1))
            assert inputs == {}
    with get_layer_inputs({"layer": layer}) as inputs:
        contextvars.copy_context().run(layer, torch.ones(1))
    assert list(inputs) == ["layer"]


def test_a_replacement_for_one_of_several_layers_that_did_not_run_is_named():
    layers = {"ran": nn.ReLU(), "not": nn.ReLU()}
    with pytest.warns(hl.HooklineWarning, match="nothing passed 'not': not called"):
        with replace_layer_outputs(layers, {"ran": 1, "not": 2}):
            assert layers["ran"](torch.ones(1)) == 1


def test_a_replacement_for_what_is_never_called_is_said_to_be():
    layers = {"list": nn.ModuleList(), "layer": nn.ReLU()}
    with replace_layer_outputs(layers, {"layer": 2}):
        assert layers["layer"](torch.ones(1)) == 2
    with pytest.warns(hl.HooklineWarning, match="the value for 'list' is not used: a ModuleList is never called"):
        with replace_layer_outputs(layers, {"list": 1, "layer": 2}):
            assert layers["layer"](torch.ones(1)) == 2


@pytest.mark.parametrize(
    "block",
    [
        lambda layers: replace_layer_inputs(layers, {"layer": 1}),
        lambda layers: replace_layer_outputs(layers, {"layer": 1}),
        lambda layers: replace_layer_input_arguments(layers, 1),
    ],
    ids=["inputs", "outputs", "arguments"],
)
def test_a_replacement_that_was_never_used_is_said_to_be(block):
    with pytest.warns(hl.HooklineWarning, match="nothing passed 'layer': not called in this block") as said:
        with block([("layer", nn.ReLU())]):
            pass
    assert said[0].filename == __file__


def test_nothing_is_said_of_layers_that_did_not_run_when_the_block_fails():
    with pytest.raises(ZeroDivisionError), get_layer_inputs([("layer", nn.ReLU())]):
        1 / 0


def test_a_generator_that_is_used_up_is_said_to_be_empty():
    model, x = mlp(), torch.ones(2, 4)
    layers = model.named_children()
    with get_layer_inputs(layers):
        model(x)
    with pytest.warns(hl.HooklineWarning, match="a generator that was iterated before is empty") as said:
        with get_layer_inputs(layers) as inputs:
            model(x)
    assert said[0].filename == __file__
    assert inputs == {}


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (lambda model: model, TypeError, "not a Sequential"),
        (lambda model: model[0], TypeError, "not a Linear"),
        (lambda model: [model[0]], TypeError, "not Linear alone"),
        (lambda model: [model], TypeError, "not Sequential alone"),
        (lambda model: ["0"], ValueError, "not '0'"),
        (lambda model: ["ab"], ValueError, "not 'ab'"),
        (lambda model: [("0", model[0], 1)], ValueError, "not \\('0', Linear"),
    ],
    ids=["model", "layer", "layers", "models", "name", "two letters", "three"],
)
def test_what_is_given_as_no_pair_of_name_and_layer_is_refused_with_what_to_give(given, error, message):
    wanted = (
        r"layers are \(name, layer\) pairs, as of model.named_modules\(\) or named_modules_of_type\(model, kind\), "
    )
    with pytest.raises(error, match=wanted + message), get_layer_inputs(given(mlp())):
        pass


def test_a_layer_that_is_no_module_is_refused():
    with pytest.raises(AssertionError, match="'layer' is a builtin_function_or_method, not an nn.Module"):
        with get_layer_inputs([("layer", torch.relu)]):
            pass


# named_modules_of_type.


def test_modules_of_a_type_can_be_iterated_again_and_again():
    model = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.ReLU(), nn.Tanh()))
    found = named_modules_of_type(model, (nn.ReLU, nn.Tanh))
    assert list(found) == list(found) == [("1.0", model[1][0]), ("1.1", model[1][1])]
    assert repr(found) == "[('1.0', ReLU()), ('1.1', Tanh())]"
    assert next(found) == ("1.0", model[1][0])
    assert next(found) == ("1.1", model[1][1])
    with pytest.raises(StopIteration):
        next(found)
    assert repr(found) == "[('1.0', ReLU()), ('1.1', Tanh())]"
    assert [name for name, _ in named_modules_of_type(model, nn.Sequential)] == ["", "1"]
    found = named_modules_of_type(model, (nn.ReLU, nn.Tanh))
    for _ in range(2):
        with get_layer_inputs(found) as inputs:
            model(torch.ones(1))
        assert list(inputs) == ["1.0", "1.1"]


def test_modules_of_a_type_go_on_where_next_left_off():
    found = named_modules_of_type(nn.Sequential(nn.ReLU(), nn.ReLU(), nn.ReLU()), nn.ReLU)
    assert next(found)[0] == "0"
    assert [name for name, _ in found] == ["1", "2"]
    assert list(found) == []


def test_a_module_with_several_names_is_found_once():
    layer = nn.ReLU()
    assert len(list(named_modules_of_type(nn.Sequential(layer, layer), nn.ReLU))) == 1


# Max-pooling and unpooling.


@pytest.mark.parametrize(("pool", "shape"), POOLS, ids=lambda one: type(one).__name__)
def test_the_indices_of_every_pool_are_saved_and_its_output_is_as_ever(pool, shape):
    x = torch.randn(shape, requires_grad=True)
    torch.manual_seed(1)
    wanted = pool(x)
    torch.manual_seed(1)
    with save_maxpool_indices({"pool": pool}) as indices:
        result = pool(x)
        assert pool.return_indices is False
    torch.manual_seed(1)
    again = copy.deepcopy(pool)
    again.return_indices = True
    assert indices["pool"].equal(again(x)[1])
    assert type(result) is Tensor
    assert result.equal(wanted)
    assert torch.autograd.grad(result.sum(), x)[0].equal(torch.autograd.grad(wanted.sum(), x)[0])


@pytest.mark.parametrize(("pool", "shape"), POOLS, ids=lambda one: type(one).__name__)
def test_a_pool_that_returns_its_indices_goes_on_doing_so(pool, shape):
    pool = copy.deepcopy(pool)
    pool.return_indices = True
    x = torch.randn(shape)
    with save_maxpool_indices(pool) as outer, save_maxpool_indices(pool) as inner:
        output, returned = pool(x)
    assert outer[""].equal(returned)
    assert inner[""].equal(returned)
    assert type(output) is Tensor


def test_what_a_pool_returns_is_seen_without_indices_by_every_other_block():
    model = encoder()
    with (
        get_layer_outputs(model.named_children()) as around,
        save_maxpool_indices(model) as outer,
        save_maxpool_indices(model) as inner,
        get_layer_outputs(model.named_children()) as within,
    ):
        result = model(SQUARE)
    assert around["pool"] is within["pool"] is result
    assert outer == inner == {"pool": torch.tensor([[[3]]])}


def test_a_pool_that_runs_several_times_in_a_forward_has_a_list_of_indices():
    model, x = Levels(depth=3), torch.randn(1, 1, 8, 8)
    pool = nn.MaxPool2d(2, return_indices=True)
    wanted, value = [], x
    for _ in range(3):
        value, one = pool(value)
        wanted.append(one)
    with save_maxpool_indices(model) as indices:
        for _ in range(2):
            model(x)
            assert [one.tolist() for one in indices["pool"]] == [one.tolist() for one in wanted]


def test_the_indices_are_those_of_the_latest_forward():
    model, back = encoder(), decoder()
    batches = [SQUARE, -SQUARE, SQUARE]
    wanted = [F.max_unpool2d(*F.max_pool2d(batch, 2, return_indices=True), 2) for batch in batches]
    with save_maxpool_indices(model) as indices:
        for batch, one in zip(batches, wanted, strict=True):
            code = model(batch)
            with use_indices_in_maxunpool(back, indices):
                assert back(code).equal(one)
                assert back(code).equal(one)
        for batch in batches[:2]:
            code = model(batch)
    with use_indices_in_maxunpool(back, indices):
        assert back(code).equal(wanted[1])


def test_the_indices_of_a_pool_that_the_latest_forward_did_not_run_are_gone():
    model = Branches()
    with save_maxpool_indices(model) as indices:
        model(SQUARE, "one")  # Nothing is said of the other, which does not run.
    assert list(indices) == ["one"]
    with pytest.raises(hl.NotCaptured, match="'two' has no value: not called in this block"):
        indices["two"]
    with save_maxpool_indices(model) as indices:
        model(SQUARE, "one")
        model(SQUARE, "two")
        assert list(indices) == ["two"]
        with pytest.raises(ValueError, match="no such branch"):
            model(SQUARE, "none")
        model(SQUARE, "one")
    assert list(indices) == ["one"]


def test_parts_of_a_model_that_are_called_by_themselves_have_forwards_of_their_own():
    model = nn.ModuleDict({"shared": Levels(), "other": encoder()})
    x = torch.randn(1, 1, 4, 4)
    with save_maxpool_indices(model) as indices:
        model["other"](x)
        for _ in range(2):
            model["shared"](x)
            assert {name: type(one) for name, one in indices.items()} == {"other.pool": Tensor, "shared.pool": list}
            assert len(indices["shared.pool"]) == 2


@pytest.mark.parametrize("calls", [lambda pool: pool, lambda pool: pool.forward], ids=["call", "forward"])
def test_of_pools_that_are_given_by_themselves_each_call_counts(calls):
    pools = {"one": nn.MaxPool2d(2), "two": nn.MaxPool2d(2)}
    with save_maxpool_indices({**pools, "same": pools["one"]}) as indices:
        calls(pools["two"])(SQUARE)
        calls(pools["one"])(SQUARE)
        calls(pools["one"])(-SQUARE)
    assert {name: one.item() for name, one in indices.items()} == {"two": 3, "one": 0, "same": 0}


@pytest.mark.parametrize("as_mapping", [False, True])
def test_what_was_pooled_last_is_unpooled_first(as_mapping):
    back, x = Levels(depth=3, kind=nn.MaxUnpool1d, kernel_size=1), torch.tensor([[[1.0, 2.0, 3.0]]])
    orders = [torch.tensor([[order]]) for order in ([1, 0, 2], [0, 2, 1], [1, 2, 0])]
    wanted = x
    for order in reversed(orders):
        wanted = F.max_unpool1d(wanted, order, 1)
    with use_indices_in_maxunpool({"pool": back.pool} if as_mapping else back, {"pool": orders}):
        assert back(x).equal(wanted)
        assert back(x).equal(wanted)
        if not as_mapping:
            back.depth = 2
            back(x)  # It leaves one out, and the next forward begins with the last all the same.
            back.depth = 3
            assert back(x).equal(wanted)


def test_pools_of_one_shape_are_undone_by_a_decoder_that_mirrors_them():
    shape = {"kernel_size": 3, "stride": 1, "padding": 1}
    model, back = Levels(depth=3, **shape), Levels(depth=3, kind=nn.MaxUnpool2d, **shape)
    x = torch.randn(1, 1, 6, 6)
    wanted, levels = x, []
    for _ in range(3):
        wanted, one = F.max_pool2d(wanted, 3, 1, 1, return_indices=True)
        levels.append(one)
    for one in reversed(levels):
        wanted = F.max_unpool2d(wanted, one, 3, 1, 1)
    with save_maxpool_indices(model) as indices:
        code = model(x)
    with use_indices_in_maxunpool(back, indices):
        assert back(code).equal(wanted)


def test_a_decoder_that_goes_back_through_the_levels_gets_the_indices_that_fit():
    model, back, x = Levels(), nn.MaxUnpool2d(2), torch.randn(1, 1, 8, 8)
    pool = nn.MaxPool2d(2, return_indices=True)
    one, first = pool(x)
    two, second = pool(one)
    with save_maxpool_indices(model) as indices:
        result = model(x)
    with use_indices_in_maxunpool({"pool": back}, indices):
        found = back(back(result))
    assert found.equal(back(back(two, second), first))
    with use_indices_in_maxunpool({"pool": back}, indices), pytest.raises(hl.EditError, match=r"\(1, 1, 3, 3\) of its"):
        back(torch.ones(1, 1, 3, 3))


@pytest.mark.parametrize(
    "call",
    [
        lambda unpool, x: unpool(x, output_size=[3, 3]),
        lambda unpool, x: unpool(x, [3, 3]),
        lambda unpool, x: unpool(x, None, [3, 3]),
        lambda unpool, x: unpool(input=x, output_size=[3, 3]),
        lambda unpool, x: unpool(x, (1, 3, 3), output_size=[3, 3]),
    ],
    ids=["keyword", "position", "third", "all keywords", "twice"],
)
def test_an_unpool_takes_a_size_however_it_is_passed(call):
    x, indices = torch.tensor([[[4.0]]]), torch.tensor([[[3]]])
    unpool = nn.MaxUnpool2d(2)
    with use_indices_in_maxunpool(unpool, {"": indices}):
        assert call(unpool, x).equal(unpool(x, output_size=[3, 3]))
        assert unpool(x).shape == (1, 2, 2)
    assert unpool(x, indices).shape == (1, 2, 2)


@pytest.mark.parametrize("by_keyword", [False, True])
def test_indices_that_are_passed_too_are_refused(by_keyword):
    x, indices, unpool = torch.tensor([[[4.0]]]), torch.tensor([[[3]]]), nn.MaxUnpool2d(2)
    with use_indices_in_maxunpool({"up": unpool}, {"up": indices}):
        with pytest.raises(AssertionError, match="'up' was called with indices, but gets those of the block"):
            unpool(x, indices=indices) if by_keyword else unpool(x, indices)


def test_of_two_blocks_on_one_unpool_the_inner_one_counts():
    unpool, x = nn.MaxUnpool2d(2), torch.tensor([[[4.0]]])
    outer, inner = ({"": torch.tensor([[[place]]])} for place in (0, 3))
    with use_indices_in_maxunpool(unpool, outer), use_indices_in_maxunpool(unpool, inner):
        assert unpool(x).tolist() == [[[0.0, 0.0], [0.0, 4.0]]]


def test_indices_are_consumed_on_entering_only_if_asked_for():
    back, pooled = decoder(), torch.tensor([[[4.0]]])
    indices = {"pool": torch.tensor([[[3]]]), "other": torch.tensor([0])}
    with use_indices_in_maxunpool(back, indices):
        back(pooled)
    assert list(indices) == ["pool", "other"]
    with use_indices_in_maxunpool(back, indices, consume_indices=True):
        assert list(indices) == ["other"]
        assert back(pooled).equal(back(pooled))
    model = encoder()
    with save_maxpool_indices(model) as saved:
        model(SQUARE)
    with use_indices_in_maxunpool(back, saved, consume_indices=True):
        assert saved == {}
        assert back(pooled).tolist() == [[[0.0, 0.0], [0.0, 4.0]]]


def test_the_keys_may_be_renamed_for_a_decoder_with_other_names():
    model, x = Levels(), torch.randn(1, 1, 4, 4)
    back = nn.Sequential(OrderedDict(up1=nn.MaxUnpool2d(2), up2=nn.MaxUnpool2d(2)))
    with save_maxpool_indices(model) as indices:
        result = model(x)
    with use_indices_in_maxunpool(back, {f"up{number}": indices["pool"] for number in (1, 2)}):
        assert back(result).max() == x.max()


def test_an_unpool_without_indices_is_named_beside_those_there_are():
    back = decoder()
    with pytest.warns(
        hl.HooklineWarning, match="no indices were given for 'pool'; those given are for 'enc.pool'"
    ) as said:
        with use_indices_in_maxunpool(back, {"enc.pool": torch.tensor([[[3]]])}):
            with pytest.raises(TypeError, match="missing 1 required positional argument: 'indices'"):
                back(torch.tensor([[[4.0]]]))
    assert said[0].filename == __file__


def test_models_without_pools_and_pools_that_did_not_run_are_said_to_be():
    with pytest.warns(hl.HooklineWarning, match="Linear has none of MaxPool1d"), save_maxpool_indices(nn.Linear(1, 1)):
        pass
    with pytest.warns(hl.HooklineWarning, match="Linear has none of MaxUnpool1d"):
        with use_indices_in_maxunpool(nn.Linear(1, 1), {}):
            pass
    with pytest.warns(hl.HooklineWarning, match="nothing passed 'pool'"), save_maxpool_indices(encoder()) as indices:
        pass
    with pytest.raises(hl.NotCaptured, match="'pool' has no value"):
        indices["pool"]
    with pytest.raises(hl.HooklineError, match="'pool' is a AvgPool1d, not a max-pooling layer"):
        with save_maxpool_indices({"pool": nn.AvgPool1d(2)}):
            pass


def test_a_second_forward_after_a_failed_block_works():
    model = encoder()
    with pytest.raises(ZeroDivisionError), save_maxpool_indices(model):
        model(SQUARE)
        model(SQUARE)
        1 / 0
    assert model(SQUARE).tolist() == [[[4.0]]]


def test_pools_and_unpools_in_checkpoints_count_once():
    model, back, x = encoder(), decoder(), SQUARE.clone().requires_grad_()
    with save_maxpool_indices(model) as indices, get_layer_outputs(model.named_children(), keep="all") as outputs:
        pooled = [checkpoint(model, batch, use_reentrant=False) for batch in (x, -x)]
        sum(pooled).sum().backward()
    assert indices["pool"].tolist() == [[[0]]]
    assert len(outputs.calls("pool")) == 2
    inputs = [torch.ones(1, 1, 1, requires_grad=True) for _ in range(2)]
    with use_indices_in_maxunpool({"pool": back.pool}, {"pool": [torch.tensor([[[place]]]) for place in (0, 3)]}):
        found = [checkpoint(back, value, use_reentrant=False) for value in inputs]
    for one in reversed(found):
        (one * torch.arange(4.0).view(2, 2)).sum().backward()
    assert [one.nonzero().tolist() for one in found] == [[[0, 1, 1]], [[0, 0, 0]]]
    assert [value.grad.item() for value in inputs] == [3.0, 0.0]  # Computed again, with the same indices.


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("wrap", [lambda layer: torch.compile(layer, backend="eager"), nn.DataParallel], ids=["c", "d"])
def test_a_layer_in_a_wrapper_is_a_layer(wrap):
    if wrap is nn.DataParallel and torch.cuda.is_available():
        pytest.skip("it moves the input to a CUDA device")
    model, x = mlp(), torch.ones(2, 4)
    inner, model[0] = model[0], wrap(model[0])
    with get_layer_outputs(model.named_modules()) as outputs, get_layer_inputs(model.named_modules()) as inputs:
        result = model(x)
    inside = next(name for name in outputs if name.startswith("0."))
    assert {*outputs} == {*inputs} == {"0", inside, "1", "2", ""}
    assert outputs["0"] is outputs[inside]
    assert outputs["0"].equal(inner(x))
    assert outputs[""] is result
    assert inputs["0"] is inputs[inside] is x
    with replace_layer_outputs([("0", model[0])], {"0": torch.full((2, 8), 7.0)}):
        assert model[0](x).eq(7).all()
    with replace_layer_inputs([("0", model[0])], {"0": 2 * x}):
        assert model[0](x).equal(inner(2 * x))
    with get_layer_outputs([("model", wrap(model))]) as outputs:
        result = model(x)
    assert outputs["model"] is result
    torch.compiler.reset()


def test_a_forward_of_the_instance_is_a_forward():
    model = nn.Sequential(nn.Module(), nn.Linear(1, 1))
    model[0].forward = lambda x: x + 1
    model[1].forward = torch.neg
    with get_layer_outputs(model.named_children()) as outputs, get_layer_inputs(model.named_children()) as inputs:
        model(torch.ones(1))
    assert {name: value.item() for name, value in outputs.items()} == {"0": 2.0, "1": -2.0}
    assert {name: value.item() for name, value in inputs.items()} == {"0": 1.0, "1": 2.0}
    with replace_layer_inputs(model.named_children(), {"0": torch.ones(1) * 4, "1": torch.ones(1) * 8}):
        assert model(torch.ones(1)).item() == -8


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated", "ignore:.*torch.jit")
def test_a_part_that_is_compiled_by_torch_jit_is_passed_over():
    model = nn.Sequential(torch.jit.script(nn.Linear(4, 4)), nn.ReLU())
    with get_layer_outputs(model.named_modules()) as outputs:
        model(torch.ones(2, 4))
    assert list(outputs) == ["1", ""]
    with pytest.raises(hl.NotCaptured, match="'0' has no value: a RecursiveScriptModule is never called where it"):
        outputs["0"]


def test_a_forward_that_is_called_directly_is_seen():
    layer = nn.Linear(1, 1)
    with get_layer_outputs([("layer", layer)]) as outputs:
        result = layer.forward(torch.ones(1))
    assert outputs["layer"] is result


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo reads it itself.
def test_everything_works_on_a_compiled_model():
    model = nn.Sequential(nn.Conv1d(1, 2, 1), nn.MaxPool1d(2), nn.ReLU(inplace=True))
    compiled, x = torch.compile(model, backend="eager"), torch.randn(1, 1, 4)
    wanted = compiled(x)
    with get_layer_outputs(model.named_children()) as outputs, save_maxpool_indices(model) as indices:
        assert compiled(x).equal(wanted)
    assert outputs["1"].relu().equal(wanted)
    assert indices["1"].shape == (1, 2, 2)
    with replace_layer_outputs([("1", model[1])], {"1": -torch.ones(1, 2, 2)}):
        assert not compiled(x).any()
    torch.compiler.reset()


# Layers.


def test_a_lambda_binds_arguments_before_its_input_and_shows_its_function():
    assert Lambda(torch.sub, 5)(torch.tensor(2)).item() == 3
    assert Lambda(torch.clamp, min=0)(torch.tensor(-1)).item() == 0
    assert Lambda(f=max)(1, 2) == 2
    assert repr(Lambda(torch.relu)) == "Lambda(f=torch.relu)"
    assert repr(Lambda(torch.clamp, min=0)) == "Lambda(f=functools.partial(torch.clamp, min=0))"
    assert repr(Lambda(torch.sub, 5, alpha=2)) == "Lambda(f=functools.partial(torch.sub, 5, alpha=2))"
    assert repr(Lambda(lambda x: x)) == f"Lambda(f={__name__}.<lambda>)"
    assert repr(Lambda(Normal)) == "Lambda(f=torch.distributions.normal.Normal)"
    assert repr(Lambda(operator.methodcaller("sum"))) == "Lambda(f=operator.methodcaller('sum'))"
    assert repr(Lambda(nn.ReLU())) == "Lambda(\n  (f): ReLU()\n)"


def test_a_sample_draws_with_or_without_gradients():
    distribution = Normal(torch.zeros(1, requires_grad=True), 1.0)
    assert not Sample()(distribution).requires_grad
    assert Sample(differentiable=True)(distribution).requires_grad
    assert repr(Sample()) == "Sample(differentiable=False)"
    assert repr(Sample(differentiable=True)) == "Sample(differentiable=True)"
    assert isinstance(Sample(), Lambda)


def test_a_sequential_takes_modules_and_functions_in_any_form():
    x = torch.tensor([-1.0, 2.0])
    for model in (
        Sequential(nn.ReLU(), torch.neg),
        Sequential(act=nn.ReLU(), negate=torch.neg),
        Sequential(OrderedDict(act=nn.ReLU(), negate=torch.neg)),
        Sequential({"act": nn.ReLU(), "negate": torch.neg}),
    ):
        assert model(x).tolist() == [0.0, -2.0]
        assert isinstance(model[1], Lambda)
        assert type(model[:1]) is Sequential
        assert model[:1](x).tolist() == [0.0, 2.0]
    assert repr(Sequential(negate=torch.neg)) == "Sequential(\n  (negate): Lambda(f=torch.neg)\n)"


def test_a_sequential_passes_everything_to_its_first_module():
    model = Sequential(Scaled(), lambda x: x + 1)
    assert model(torch.ones(1), 2.0, shift=3.0).item() == 6.0


def test_a_sequential_may_be_empty_or_give_none():
    assert Sequential()(3) == 3
    assert Sequential(lambda x: None)(3) is None
    assert Sequential(lambda x: None, lambda x: x is None)(3) is True


def test_a_sequential_refuses_both_forms_at_once_and_what_is_no_layer():
    with pytest.raises(AssertionError, match=r"can only use \*args or \*\*kwargs, not both"):
        Sequential(nn.ReLU(), other=nn.ReLU())
    with pytest.raises(TypeError, match="is not a Module subclass"):
        Sequential("no layer")


def test_module_is_a_protocol_for_annotations_alone():
    def apply(layer: Module[[Tensor], Tensor], x: Tensor) -> Tensor:
        return layer(x)

    assert apply(nn.ReLU(), -torch.ones(1)).item() == 0
    assert Module[[Tensor], Tensor]
    with pytest.raises(TypeError, match="runtime"):
        isinstance(nn.ReLU(), Module)


# The dict that a block gives.


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
    """A chain of which a part calls the whole."""
    chain = nn.Sequential(nn.Identity())
    chain[0].forward = lambda x: torch.cat([chain(chunk) for chunk in x.split(2)]) if len(x) > 2 else x + 1
    return chain


def of_instance() -> nn.ReLU:
    """A layer of torch with another forward."""
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


def test_of_a_layer_that_calls_itself_the_call_that_ended_last_is_shown():
    model, x = nn.Sequential(Chunks(), nn.ReLU(inplace=True)), torch.randn(6, 4)
    whole = model[0](x)
    with (
        get_layer_outputs(model.named_modules()) as outputs,
        get_layer_outputs(model.named_modules(), keep="all") as every,
        get_layer_inputs(model.named_modules()) as inputs,
    ):
        for _ in range(2):
            result = model(x)
            assert outputs[""].equal(result)
            assert outputs["0"].equal(every["0"])
            assert outputs["0"].equal(whole)
            assert outputs["0"].grad_fn is not None
            assert inputs["0"].equal(x[4:])
        model[0](x[:1])
        assert outputs["0"].equal(whole[:1])
        model[0](x[:4])
    assert outputs["0"].equal(whole[:4])
    assert [len(one) for one in every.calls("0")] == [6, 2, 2, 2, 6, 2, 2, 2, 1, 4, 2, 2]


def test_of_two_layers_with_one_name_the_one_that_ended_last_is_shown():
    model, x = mlp(), torch.ones(2, 4)
    with get_layer_outputs([("same", model[2]), ("same", model[0]), ("other", model[0])]) as outputs:
        model(x)
        first = model[0](x)
        assert outputs["same"] is outputs["other"] is first
        last = model[2](first)
    assert outputs["same"] is last
    assert outputs["other"] is first


@pytest.mark.parametrize("when", ["in the block", "after it"])
def test_what_a_block_gives_behaves_as_a_dict(when):
    layer, x = nn.Linear(2, 2), torch.randn(3, 2)
    with ExitStack() as stack:
        values = stack.enter_context(get_layer_outputs([("a", layer), ("b", layer)]))
        result = layer(x)
        wanted = {"a": result, "b": result}
        stack.pop_all().close() if when == "after it" else None
        assert values == wanted == values
        assert (values != wanted, values != {}) == (False, True)
        assert len(values) == 2
        assert bool(values)
        assert list(reversed(values)) == ["b", "a"]
        assert list(reversed(values.items())) == [("b", result), ("a", result)]
        assert list(values.keys()) == ["a", "b"]
        assert values | {"b": 1} == {"a": result, "b": 1}
        assert {"b": 1} | values == {"b": result, "a": result}
        assert type(values | {}) is type({} | values) is type(values.copy()) is dict
        assert list(OrderedDict(values)) == ["a", "b"]
        assert [*values.values()] == [result, result]
        assert values.setdefault("a", 1) is result
        values |= {"b": 5}
        assert values["b"] == 5
        assert values.popitem() == ("b", 5)
        values["a"] = 6
        values.update({"c": 7}, d=8)
        assert values.setdefault("e", 9) == 9
        assert values == {"a": 6, "c": 7, "d": 8, "e": 9}
        del values["c"]
        assert values.pop("d") == 8
        assert values.pop("d", None) is None
        with pytest.raises(KeyError, match="'d'"):
            values.pop("d")
        with pytest.raises(KeyError, match="'b'") as raised:
            values["b"]
        assert raised.type is KeyError  # And nothing is said of layers that did not run.
        if when == "in the block":
            result = layer(x)  # What passes then is shown again.
            assert values == {"a": result, "e": 9, "b": result}
            assert values.calls("a") == [result]
        values.clear()
        assert values == {}
        stack.close()
    assert values == {}


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


def test_a_value_that_is_overwritten_after_the_block_is_the_one_that_passed():
    layer, x = nn.Linear(2, 2), torch.randn(3, 2)
    with get_layer_outputs([("layer", layer)]) as values:
        result = layer(x)
        wanted = result.detach().clone()
    assert values["layer"] is result
    result.data.zero_()
    result.zero_()
    for read in (values["layer"], values.get("layer"), dict(values)["layer"], values.copy()["layer"], *values.values()):
        assert read.equal(wanted)


def test_many_values_are_read_one_by_one_in_no_time():
    model = nn.Sequential(*(nn.Identity() for _ in range(1000)))
    with get_layer_inputs(model.named_children()) as inputs:
        model(1)
        start = time.perf_counter()
        assert all(inputs[name] == 1 for name in inputs)
        for name in list(inputs):
            inputs[name] = inputs.pop(name) + 1
    assert time.perf_counter() - start < 5


def test_what_a_block_gives_is_a_dict_of_what_passed():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True))
    x = torch.randn(3, 2)
    before = model[0](x)
    with get_layer_outputs([("first", model[0])]) as outputs:
        model(x)
        inside = outputs["first"]
    assert isinstance(outputs, dict)
    for read in (dict(outputs), {**outputs}, outputs.copy(), outputs | {}, {} | outputs, dict(outputs.items())):
        assert type(read) is dict
        assert read["first"].equal(before)
    assert inside.equal(before)
    assert outputs.get("first").equal(before)
    assert next(iter(outputs.values())).equal(before)
    outputs["second"] = 2
    assert list(outputs) == ["first", "second"]
    assert outputs.pop("first").equal(before)
    assert outputs == {"second": 2}


def test_a_layer_without_a_value_to_put_in_is_named() -> None:
    layer = nn.Linear(2, 2)
    with pytest.raises(KeyError, match=r"no value is given for the layer 'a'; there are values for \['b'\]"):
        with replace_layer_outputs([("a", layer)], {"b": torch.zeros(2)}):
            layer(torch.ones(2))
