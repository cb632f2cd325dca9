"""patch and edit: which values replace a passing one, which are refused, and that nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hookline as hl
from tests.errors.wording import says
from tests.support.models import GPT, Nested, mlp, tokens


@pytest.mark.parametrize(
    "value",
    [0.0, 3, torch.ones(2, 8), torch.ones(8), torch.ones(2, 1), torch.tensor(2.0), torch.ones(1, 1, 8)[0]],
)
def test_a_patch_is_broadcast_onto_what_passes(value: Any) -> None:
    model, x = mlp(), torch.ones(2, 4)
    expected = torch.broadcast_to(torch.as_tensor(value, dtype=torch.float32), (2, 8))
    output, acts = hl.run(model, x, capture="0", patch={"0": value})
    assert torch.equal(acts["0"], expected)
    assert torch.equal(output, model[2](expected.relu()))


def test_an_input_is_patched_before_the_module_runs() -> None:
    model, x = GPT(), tokens()
    output = hl.run(model, x, patch={"h.0:input": torch.zeros_like(x), 'h.1:inputs["scale"]': 0.25})
    expected = model.h[2](model.h[1](model.h[0](torch.zeros_like(x), scale=0.5), scale=0.25), scale=0.5)
    assert torch.equal(output, model.head(expected))


def test_a_patch_comes_from_another_run() -> None:
    model, clean, corrupted = GPT(), tokens(), tokens()
    clean_output, acts = hl.run(model, clean, capture=["h.1", "h.2"])
    assert torch.equal(hl.run(model, corrupted, patch=acts), clean_output)
    last = hl.run(model, corrupted, patch=acts.select("h.2[:, -1]"))
    assert torch.equal(last[:, -1], clean_output[:, -1])
    assert torch.equal(last[:, :-1], model(corrupted)[:, :-1])


def test_a_patch_takes_any_place_for_a_key() -> None:
    model, x = GPT(), tokens()
    for where in ("h.*.mlp", nn.Sequential, hl.Site("h.0.mlp"), model.h[0].mlp, (nn.Sequential, "[0]")):
        with hl.patch(model, {where: 0.0}), hl.capture(model, "h.0.mlp") as acts:
            model(x)
        assert acts["h.0.mlp"][0].count_nonzero() == 0


BAD_VALUES: dict[str, tuple[Any, str]] = {
    "a shape": (torch.ones(3, 8), says("shape does not fit where passes", "(3, 8)", "(2, 8)")),
    "too many dimensions": (torch.ones(1, 2, 8), says("shape does not fit where passes", 2)),
    "a dtype": (
        torch.ones(8, dtype=torch.float64),
        says("torch float64 torch float32 passes"),
    ),
    "an integer dtype": (torch.ones(8, dtype=torch.long), says("int64 given where torch")),
    "a device": (torch.ones(8, device="meta"), says("on cpu passes", "cpu")),
    "a structure": ((torch.ones(2, 8),), says("tuple of given where float32 passes", "(2, 8)", 1)),
    "text": ("zero", says("str given where float32", "(2, 8)")),
    "nothing": (None, says("None given where float32", "(2, 8)")),
    "a complex number": (1j, "complex"),
    "a list of numbers": ([0.0] * 8, says("given where float32 passes", "(2, 8)", 8)),
}


@pytest.mark.parametrize("what", BAD_VALUES)
@pytest.mark.parametrize("site", ["0", "0[:, :]"])
def test_a_value_that_cannot_fit_is_refused_with_both_sides(what: str, site: str) -> None:
    value, message = BAD_VALUES[what]
    model = mlp()
    with pytest.raises(hl.EditError, match=message) as said, hl.patch(model, {site: value}):
        model(torch.ones(2, 4))
    assert str(said.value).startswith(f"'{site}': ")


def test_a_number_must_fit_the_dtype() -> None:
    model = nn.Sequential(nn.Identity())
    whole = torch.arange(3)
    assert hl.run(model, whole, patch={"0": 2.0}).tolist() == [2, 2, 2]
    assert hl.run(model, whole, patch={"0": 2.0}).dtype == torch.long
    with pytest.raises(hl.EditError, match=says("given where int64 passes", "(3,)", "0", "0.5")):
        hl.run(model, whole, patch={"0": 0.5})
    with pytest.raises(hl.EditError, match=says("given where passes", "0[0]", "nan", "int64")):
        hl.run(model, whole, patch={"0[0]": float("nan")})
    with pytest.raises(hl.EditError, match=says("given where passes", "0", 300, "uint8")):
        hl.run(model, whole.to(torch.uint8), patch={"0": 300})


LONG = torch.ones(1, 3, 4)
OF_THE_PROMPT: dict[str, Callable[[nn.Module], hl.Hooks]] = {
    "0#0": lambda model: hl.patch(model, {"0": LONG}),
    "0#0[0]": lambda model: hl.patch(model, {"0[0]": LONG[0]}),
    "0#0:input": lambda model: hl.edit(model, "0:input", lambda _: LONG),
    "0[:, @:3]": lambda model: hl.edit(model, "0[:, :3]", lambda _: LONG),
}


@pytest.mark.parametrize("named", OF_THE_PROMPT)
def test_a_value_for_the_prompt_that_meets_one_token_is_refused_with_the_name_of_the_prompts_call(named: str) -> None:
    model = nn.Sequential(nn.Identity())
    with pytest.raises(hl.EditError, match="shape") as raised, OF_THE_PROMPT[named](model):
        model(2 * LONG)
        model(LONG[:, :1])
    hint = (
        "; a model that generates with a cache is given one token a call after the prompt: "
        f"'{named}' {'counts tokens in the whole sequence' if '@' in named else 'is only the prompt'}"
    )
    assert hint in str(raised.value)


@pytest.mark.parametrize(
    ("given", "passing"),
    [((1, 3, 4), [(1, 1, 4)]), ((1, 1, 5), [(1, 1, 5), (1, 1, 4)]), ((1, 5, 4), [(1, 5, 4), (1, 3, 4)])],
    ids=["the first call", "another width", "several tokens"],
)
def test_any_other_shape_is_refused_without_a_word_about_tokens(
    given: tuple[int, ...], passing: list[tuple[int, ...]]
) -> None:
    model = nn.Sequential(nn.Identity())
    with (
        pytest.raises(hl.EditError, match=says("shape does not fit where")),
        hl.patch(model, {"0": torch.ones(given)}),
    ):
        for shape in passing:
            model(torch.ones(shape))


class Packs(nn.Module):
    """A recurrent layer that takes a tensor or a PackedSequence of the same values."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 3, batch_first=True)

    def forward(self, x: Tensor, pack: bool) -> Any:
        return self.lstm(nn.utils.rnn.pack_padded_sequence(x, [3, 2], batch_first=True) if pack else x)


@pytest.mark.parametrize(
    ("change", "pack", "named"),
    [
        ({"patch": {"lstm": 0.0}}, False, "'lstm[0]'"),
        ({"patch": {"lstm": (0.0, 0.0)}}, False, "'lstm[1][0]'"),
        ({"patch": {"lstm[0]": 0.0}}, True, "'lstm[0][\"data\"]'"),
        ({"patch": {'lstm:inputs["input"]': 0.0}}, True, '\'lstm:inputs["input"]["data"]\''),
        ({"edit": {"lstm": lambda value: value * 0}}, False, "'lstm[0]', or return all of it"),
        ({"edit": {"lstm": lambda value: (value[0], 0.0)}}, False, "'lstm[1][0]', or return all of it"),
        ({"edit": {"lstm[0]": lambda value: value.data}}, True, "'lstm[0][\"data\"]', or return all of it"),
    ],
)
def test_a_value_of_another_structure_is_refused_with_the_name_of_a_part(
    change: dict[str, Any], pack: bool, named: str
) -> None:
    with pytest.raises(hl.EditError, match=says("given where passes")) as raised:
        hl.run(Packs(), torch.ones(2, 3, 4), pack, **change)
    assert str(raised.value).endswith(f"; name the part to change, as in {named}")


def test_a_nested_patch_must_have_the_structure_of_what_passes() -> None:
    model, x = Nested(), torch.ones(2, 4)
    output = hl.run(model, x, patch={'["hidden"]': (0.0, torch.ones(2, 4))})
    assert output["hidden"][0].count_nonzero() == 0
    for value, message in {
        0.0: says("given where tuple of passes", "0.0", 2),
        (0.0,): says("given where tuple of", 1, 2),
        (0.0, torch.ones(3)): says("shape does not fit where passes", "(3,)", "(2, 4)"),
    }.items():
        with pytest.raises(hl.EditError, match=message):
            hl.run(model, x, patch={'["hidden"]': value})
    with pytest.raises(hl.EditError, match=says("a dict with other keys given")):
        hl.run(model, x, patch={"": {"logit": 0.0, "hidden": (0.0, 0.0), "loss": None, "steps": 3}})


def test_gradients_flow_through_a_patch() -> None:
    model, x = mlp(), torch.ones(2, 4)
    value = torch.ones(8, requires_grad=True)
    hl.run(model, x, patch={"0[0]": value}).sum().backward()
    with torch.no_grad():
        expected = model[2].weight.sum(0)
    assert torch.allclose(value.grad, expected)
    assert model[0].weight.grad is not None
    assert model[0].bias.grad.count_nonzero() > 0


def test_nothing_that_the_caller_holds_is_written_to() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))
    x, value = torch.ones(2, 4), torch.full((2, 4), -1.0)
    part = torch.full((4,), -1.0)
    hl.run(model, x, patch={"0": value})
    hl.run(model, x, patch={"0[0]": part})
    hl.run(model, x, patch={"0:input": value})
    hl.run(model, x, edit={"0": lambda _: value})
    assert value.eq(-1).all()
    assert part.eq(-1).all()
    structure = {"logits": -1.0, "hidden": (value, value), "loss": None, "steps": 3}
    hl.run(Nested(), x, patch={"": structure})["hidden"][0].fill_(5)
    assert value.eq(-1).all()


def test_an_edit_puts_in_what_its_function_returns_and_none_leaves_the_value_alone() -> None:
    model, x = mlp(), torch.ones(2, 4)
    seen: list[Tensor] = []
    assert torch.equal(hl.run(model, x, edit={"2": lambda value: value * 2}), model(x) * 2)
    assert torch.equal(hl.run(model, x, edit={"2": seen.append}), model(x))
    assert torch.equal(seen[0], model(x))
    output = hl.run(model, x, edit={"2[:, 0]": lambda value: value + 1, "0:input": torch.zeros_like})
    assert torch.equal(output, model(torch.zeros(2, 4)) + torch.tensor([1.0, 0.0]))


def test_an_edit_may_write_into_its_argument_if_it_returns_it() -> None:
    model, x = nn.Sequential(nn.Identity()), torch.ones(2, 4)

    def write(value: Tensor) -> Tensor:
        value[:, 0] = 0
        return value

    assert hl.run(model, x, edit={"0": write}).sum() == 6
    assert x.eq(1).all()
    with pytest.raises(hl.EditError, match=says("the function wrote into its", "0")):
        hl.run(model, x, edit={"0": lambda value: value.__setitem__(0, 0)})
    assert x.eq(1).all()


def test_an_edit_may_write_into_a_container_if_it_returns_it() -> None:
    x = torch.ones(2, 4)

    def write(value: dict[str, Any]) -> dict[str, Any]:
        value["logits"] = value["logits"] * 0
        return value

    def count(value: dict[str, Any]) -> dict[str, Any]:
        value["steps"] = 7
        return value

    assert hl.run(Nested(), x, edit={"": write})["logits"].count_nonzero() == 0
    assert hl.run(Nested(), x, edit={"": count})["steps"] == 7
    for function in (write, count):
        with pytest.raises(hl.EditError, match=says("the function wrote into its")):
            hl.run(Nested(), x, edit={"": lambda value, function=function: function(value) and None})


BAD_RESULTS: dict[str, tuple[Any, str]] = {
    "a shape": (lambda value: value[:1], says("a shape given where another passes", "(1, 8)", "(2, 8)")),
    "a dtype": (
        lambda value: value.double(),
        r"torch\.float64 given where torch\.float32 passes; .*\.to\(torch\.float32\)",
    ),
    "a number": (lambda value: 0.0, says("a value given where another passes", "0.0", "(2, 8)")),
    "a structure": (lambda value: (value,), says("tuple of given where float32 passes", "(2, 8)", 1)),
    "a device": (lambda value: value.to("meta"), says("a tensor of another device given", "meta", "cpu")),
}


@pytest.mark.parametrize("what", BAD_RESULTS)
def test_an_edit_that_returns_something_else_is_refused_with_both_sides(what: str) -> None:
    function, message = BAD_RESULTS[what]
    with pytest.raises(hl.EditError, match=message) as raised:
        hl.run(mlp(), torch.ones(2, 4), edit={"0": function})
    assert str(raised.value).startswith("'0': ")


def test_without_the_check_an_edit_may_return_anything() -> None:
    model, x = mlp(), torch.ones(2, 4)
    with hl.edit(model, "2", lambda value: {"logits": value[:1].double()}, check=False):
        output = model(x)
    assert output["logits"].shape == (1, 2)
    assert output["logits"].dtype == torch.float64
    hooks = hl.Hooks(model)
    hooks.edit("0", lambda value: value[:1], check=False)
    assert model(x).shape == (1, 2)
    hooks.remove()


def test_an_edit_may_ask_for_the_call_it_takes_part_in() -> None:
    model, x = GPT(depth=2), tokens()
    calls: list[Any] = []

    def note(value: Tensor, call: Any) -> Tensor:
        calls.append(call)
        return value * call.number

    with hl.edit(model, "h.*", note, with_call=True):
        model(x)
        second = model(x)
    assert [(str(call.site), call.number) for call in calls] == [("h.0", 0), ("h.1", 0), ("h.0", 1), ("h.1", 1)]
    assert calls[1].module is model.h[1]
    assert torch.equal(calls[0].args[0], x)
    assert calls[0].kwargs == {"scale": 0.5}
    assert torch.equal(second, model(x))


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_a_call_in_an_encoder_knows_the_tokens_of_the_encoder(name: str) -> None:
    models = pytest.importorskip("tests.support.generating_models", exc_type=ImportError)
    model, (ids, mask) = models.generating(name), models.prompt("left", (4, 3))
    encoder, decoder = (site.format(0) for site in models.ENCODER_DECODERS[name])
    seen: dict[str, list[Any]] = {encoder: [], decoder: []}

    def look(_: Tensor, call: Any) -> None:
        seen[str(call.site)].append((call.step, None if call.tokens is None else call.tokens.tolist()))

    with hl.edit(model, [encoder, decoder], look, with_call=True):
        model(input_ids=ids, attention_mask=mask, decoder_input_ids=ids[:, :2])
        model(input_ids=ids, decoder_input_ids=ids[:, :2])
        model.generate(ids, attention_mask=mask, max_new_tokens=2, do_sample=False)  # It runs the encoder first.
    assert seen[encoder] == [(0, [[0, 1, 2, 3], [-1, 0, 1, 2]]), (0, None), (0, None)]
    assert seen[decoder][0] == (0, [[0, 1], [0, 1]])
    assert seen[decoder][2:] == [(0, [[0], [0]]), (1, [[1], [1]])]


def test_gradients_flow_through_an_edit() -> None:
    model, x = mlp(), torch.ones(2, 4)
    direction = torch.ones(8, requires_grad=True)
    hl.run(model, x, edit={"1": lambda value: value + direction}).sum().backward()
    assert direction.grad.count_nonzero() > 0
    assert model[0].weight.grad.count_nonzero() > 0


def test_hooks_of_each_kind_at_one_site_act_in_the_order_they_were_added() -> None:
    model, x = nn.Sequential(nn.Identity()), torch.ones(1)
    hooks = hl.Hooks(model)
    hooks.patch({"0": 5.0})
    hooks.edit("0", lambda value: value * 2)
    hooks.capture("0")
    hooks.patch({"0": 7.0})
    hooks.skip("0", torch.full((1,), 3.0))
    hooks.edit("0:input", F.relu)
    assert model(x).item() == 7
    assert hooks.cache["0"].item() == 10
    hooks.remove()


@pytest.mark.parametrize("function", [3, None, "relu", torch.ones(2)])
def test_an_edit_takes_a_function(function: Any) -> None:
    with pytest.raises(hl.EditError, match=says("edit takes a function of")):
        hl.edit(mlp(), "0", function)


@pytest.mark.parametrize("values", [3, [("0", 1.0)], "0", None])
def test_a_patch_takes_a_mapping(values: Any) -> None:
    with pytest.raises(hl.EditError, match=says("patch takes a mapping", "h.0", "0.0")):
        hl.patch(mlp(), values)
