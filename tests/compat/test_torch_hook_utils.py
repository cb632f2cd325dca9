"""hookline.compat.torch_hook_utils: the README's examples, the API name by name, the original's bugs, fixed."""

from __future__ import annotations

import contextvars
import gc
import operator
import threading
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal
from torch.nn import functional as F

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
from tests.errors.wording import says
from tests.support.models import GPT, mlp, tokens


class Scaled(nn.Module):
    """A module with two inputs and a keyword argument."""

    def forward(self, x: Tensor, scale: Tensor | float = 1.0, *, shift: float = 0.0) -> Tensor:
        return x * scale + shift


class Options(nn.Module):
    """A module whose arguments all have defaults."""

    def forward(self, input_ids: Any = None, inputs_embeds: Any = None) -> Any:
        return input_ids, inputs_embeds


class Keywords(nn.Module):
    """A module whose arguments are all keyword-only."""

    def forward(self, *, x: Any, y: Any = 2.0) -> Any:
        return x, y


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
    # The README leaves out the imports: torch, nn, OrderedDict and the two functions.
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
    assert "h" not in inputs  # A ModuleList is never called; there is no warning about it.


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
        linear = F.linear(x, model[0].weight, model[0].bias)
        assert outputs["0"].equal(linear)
        assert dict(outputs.items())["0"].equal(outputs.get("0"))
        assert [value.shape for value in outputs.values()] == [(2, 8), (2, 8), (2, 2)]
        assert outputs.get("3") is None
        result.zero_()
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


def test_the_collected_values_are_live_and_stay_after_the_block():
    layer = nn.Linear(1, 1)
    with get_layer_outputs([("layer", layer)]) as outputs:
        assert outputs == {}
        first = layer(torch.ones(1))
        assert outputs == {"layer": first}
        second = layer(torch.zeros(1))
    assert outputs == {"layer": second}
    assert len(outputs) == 1


def test_of_a_layer_that_runs_several_times_the_last_call_is_shown():
    layer = nn.Linear(3, 3)
    model, x = nn.Sequential(layer, layer, layer), torch.ones(1, 3)
    with get_layer_outputs([("layer", layer)]) as outputs, get_layer_inputs([("layer", layer)]) as inputs:
        result = model(x)
    assert isinstance(outputs, dict)
    assert outputs["layer"].equal(result)
    assert inputs["layer"].equal(layer(layer(x)))


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
    block.__enter__()
    assert hl.attached(model)
    gc.disable()
    try:
        del block
        assert not hl.attached(model)
    finally:
        gc.enable()


def test_a_block_acts_on_the_thread_that_opened_it():
    layer, x = nn.Linear(1, 1, bias=False), torch.ones(1)
    found = {}

    def collect(number: int, barrier: threading.Barrier) -> None:
        with get_layer_inputs([("layer", layer)]) as inputs:
            barrier.wait()
            layer(x * number)
            barrier.wait()
        found[number] = inputs["layer"].item()

    barrier = threading.Barrier(2)
    threads = [threading.Thread(target=collect, args=(number, barrier)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {1: 1.0, 2: 2.0}


# Warnings, where the original said nothing.


def test_layers_that_did_not_run_are_left_out():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.ModuleList([nn.Linear(8, 2)]))
    with get_layer_inputs(model.named_modules()) as inputs:
        model[2][0](torch.ones(8))
    assert list(inputs) == ["2.0"]


def test_when_no_layer_ran_at_all_they_are_named():
    layers = [(number, nn.ReLU()) for number in range(5)]
    with pytest.warns(
        hl.HooklineWarning, match=says("nothing passed and more not called in this block", "0, 1, 2 and 2 more")
    ) as said:
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


def test_a_layer_that_ran_on_another_thread_is_said_to_have_done_so():
    layer = nn.Linear(1, 1)
    with pytest.warns(hl.HooklineWarning, match=says("on another thread or task")):
        with get_layer_inputs({"layer": layer}) as inputs:
            thread = threading.Thread(target=layer, args=(torch.ones(1),))
            thread.start()
            thread.join()
    assert inputs == {}


def test_a_block_acts_in_the_task_that_opened_it():
    layer = nn.Linear(1, 1)
    with pytest.warns(hl.HooklineWarning, match=says("on another thread or task")):
        with get_layer_inputs({"layer": layer}) as inputs:
            contextvars.Context().run(layer, torch.ones(1))
            assert inputs == {}
    with get_layer_inputs({"layer": layer}) as inputs:
        contextvars.copy_context().run(layer, torch.ones(1))
    assert list(inputs) == ["layer"]


def test_a_replacement_for_one_of_several_layers_that_did_not_run_is_named():
    layers = {"ran": nn.ReLU(), "not": nn.ReLU()}
    with pytest.warns(hl.HooklineWarning, match=says("nothing passed not called", "not")):
        with replace_layer_outputs(layers, {"ran": 1, "not": 2}):
            assert layers["ran"](torch.ones(1)) == 1


def test_a_replacement_for_what_is_never_called_is_said_to_be():
    layers = {"list": nn.ModuleList(), "layer": nn.ReLU()}
    with replace_layer_outputs(layers, {"layer": 2}):
        assert layers["layer"](torch.ones(1)) == 2
    with pytest.warns(hl.HooklineWarning, match=says("the value for", "list")):
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
    with pytest.warns(hl.HooklineWarning, match=says("not called in this block", "layer")) as said:
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
    with pytest.warns(hl.HooklineWarning, match=says("a generator that was already")) as said:
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
        r"layers are \(name, layer\) pairs, as from model.named_modules\(\) or named_modules_of_type\(model, kind\), "
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
    assert [name for name, _ in named_modules_of_type(model, nn.Sequential)] == ["", "1"]
    found = named_modules_of_type(model, (nn.ReLU, nn.Tanh))
    for _ in range(2):
        with get_layer_inputs(found) as inputs:
            model(torch.ones(1))
        assert list(inputs) == ["1.0", "1.1"]


def test_a_module_with_several_names_is_found_once():
    layer = nn.ReLU()
    assert len(list(named_modules_of_type(nn.Sequential(layer, layer), nn.ReLU))) == 1


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
    with pytest.raises(AssertionError, match=says("can only use args or")):
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
