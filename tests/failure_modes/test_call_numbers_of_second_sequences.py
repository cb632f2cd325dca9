"""`call.number` in a block that generates several sequences: comparing it with a range would mislead, so it raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookline as hl
from tests.errors.wording import says
from tests.support.models import mlp

transformers = pytest.importorskip("transformers")


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=8, n_positions=32, vocab_size=17)
    return transformers.GPT2LMHeadModel(config).eval()


def generate(model: Any, length: int = 5, **options: Any) -> None:
    model.generate(
        torch.ones(1, length, dtype=torch.long), max_new_tokens=3, do_sample=False, pad_token_id=0, **options
    )


COMPARED: dict[str, Callable[[Any], Any]] = {
    ">": lambda number: number > 0,
    ">=": lambda number: number >= 1,
    "<": lambda number: number < 1,
    "<=": lambda number: number <= 0,
    "chained": lambda number: 1 <= number < 4,
    "if": lambda number: 1 if number else 0,
    "not": lambda number: not number,
}


@pytest.mark.parametrize("compared", COMPARED)
def test_a_range_of_calls_is_refused_in_a_second_sequence(compared: str) -> None:
    model = gpt2()

    def steer(value: Tensor, call: hl.Call) -> Tensor | None:
        return value + 1 if COMPARED[compared](call.number) else None

    with hl.edit(model, "transformer.h.1[0]", steer, with_call=True):
        generate(model)
    with pytest.raises(hl.HooklineError, match=says("second sequence in it", 3)):
        with hl.edit(model, "transformer.h.1[0]", steer, with_call=True):
            generate(model)
            generate(model)


def test_it_is_refused_for_a_part_of_the_model_and_for_captures() -> None:
    model = gpt2()

    def first(value: Tensor, call: hl.Call) -> Tensor:
        return value if call.number < 1 else value[:, :0]

    with pytest.raises(hl.HooklineError, match=says("second sequence in it")):
        with hl.capture(model.transformer.h[1], "mlp", transform=first, with_call=True):
            generate(model)
            generate(model, length=2)


def test_the_number_itself_stays_a_number() -> None:
    model, numbers = gpt2(), []

    def note(_: Tensor, call: hl.Call) -> None:
        numbers.append(call.number)
        assert (call.number == 3) is (len(numbers) == 4)
        assert {call.number: "x"}[len(numbers) - 1] == "x"

    with hl.edit(model, "transformer.h.0.mlp", note, with_call=True):
        generate(model)
        generate(model)
    assert numbers == [0, 1, 2, 3, 4, 5]
    assert [str(number) for number in numbers] == list("012345")


def test_a_block_entered_again_counts_from_its_own_beginning() -> None:
    model, chosen = gpt2(), []
    hooks = hl.edit(model, "transformer.h.0.mlp", lambda _, call: chosen.append(call.number > 0), with_call=True)
    for _ in range(2):
        with hooks:
            generate(model)
    assert chosen == [False, True, True] * 2


@pytest.mark.parametrize("shapes", [[(4, 4)] * 5, [(4, 4), (1, 4), (4, 4)]], ids=["alike", "a short batch"])
def test_batches_of_data_are_not_sequences(shapes: list[tuple[int, int]]) -> None:
    model, chosen = mlp(), []
    with hl.edit(model, "0", lambda _, call: chosen.append(call.number > 1), with_call=True):
        for shape in shapes:
            model(torch.ones(shape))
    assert chosen == [number > 1 for number in range(len(shapes))]


def test_a_module_that_runs_several_times_in_a_forward_begins_no_sequence() -> None:
    layer, chosen = nn.Linear(3, 3), []
    model = nn.Sequential(layer, layer)
    with hl.edit(model, "0", lambda _, call: chosen.append(call.number > 0), with_call=True):
        for length in (4, 1, 1):
            model(torch.ones(2, length, 3))
    assert chosen == [False, True, True, True, True, True]


def test_a_last_batch_of_one_sample_begins_no_sequence_where_the_batch_is_the_second_dimension() -> None:
    model, chosen = nn.Sequential(nn.Linear(3, 3)), []
    with hl.edit(model, "0", lambda _, call: chosen.append(call.number > 2), with_call=True):
        for samples in (5, 1, 5, 1):
            model(torch.ones(7, samples, 3))
    assert chosen == [False, False, False, True]
