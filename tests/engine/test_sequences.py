"""Which tokens pass in a forward, where a user runs the model: loops, masks, positions, models that tell nothing."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookline as hl
from tests.errors.wording import says
from tests.support.real_models import gpt2, near, of, transformers

LAYER = "transformer.h.0"
IDS = torch.arange(3, 13).reshape(2, 5)
LEFT = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
RIGHT = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])


@pytest.fixture
def model() -> Any:
    return of(gpt2).requires_grad_(False)


def marked(value: Tensor) -> Tensor:
    return value + 100


def columns(value: Tensor) -> list[list[int]]:
    """Return the columns of each row that `marked` has changed."""
    return [[at for at, one in enumerate(row) if one.mean() > 50] for row in value]


def changed(acts: hl.Cache, site: str = LAYER) -> list[list[list[int]]]:
    """Return the changed columns of each call."""
    return [columns(value) for value in acts.calls(site)]


def looking(model: Any, selector: str) -> hl.Hooks:
    """Return hooks that mark tokens and keep what passes then."""
    hooks = hl.Hooks(model, active=False)
    hooks.edit(f"{LAYER}[:, {selector}]", marked)
    hooks.capture(LAYER, keep="all")
    return hooks


def in_steps(model: Any, ids: Tensor, widths: list[int], cache: Any = None, **more: Any) -> Any:
    """Give the model its columns piece by piece, with a cache."""
    at = 0
    cache = transformers.DynamicCache() if cache is None else cache
    for width in widths:
        given = {name: value[:, : at + width] for name, value in more.items()}
        model(ids[:, at : at + width], past_key_values=cache, **given)
        at += width
    return cache


def test_a_loop_with_a_cache_has_new_tokens_after_its_prompt(model):
    with looking(model, "@new") as acts:
        in_steps(model, IDS, [3, 1, 1])
    assert changed(acts) == [[[], []], [[0], [0]], [[0], [0]]]


def test_a_prompt_that_comes_in_pieces_is_one_prompt(model):
    with looking(model, "@prompt") as acts:
        in_steps(model, IDS, [2, 2, 1])
    assert changed(acts) == [[[0, 1], [0, 1]], [[0, 1], [0, 1]], [[], []]]


def test_a_change_that_counts_from_the_end_of_a_prompt_in_pieces_is_refused(model):
    for selector in ("@prompt[-1]", "@prompt[:-3]"):
        with (
            pytest.raises(hl.HooklineError, match=says("the prompt goes on after tokens", 2)),
            looking(model, selector),
        ):
            in_steps(model, IDS, [2, 2])


def test_a_capture_that_counts_from_the_end_of_a_prompt_in_pieces_is_refused_unless_of_its_last_token(model):
    with pytest.raises(hl.HooklineError, match=says("the prompt goes on after tokens", 2)):
        with hl.capture(model, f"{LAYER}[:, @prompt[-2:]]"):
            in_steps(model, IDS, [2, 2])
    with hl.capture(model, f"{LAYER}[:, @prompt[-1]]", LAYER) as acts:
        in_steps(model, IDS, [2, 2])
    near(acts[f"{LAYER}[:, @prompt[-1]]"], acts[LAYER][:, -1])


def test_several_tokens_after_single_ones_make_the_prompt_unknown(model):
    hooks = looking(model, "@prompt")
    with pytest.raises(hl.HooklineError, match=says("several tokens passed at once")), hooks:
        in_steps(model, IDS, [2, 1, 2])
    with looking(model, "@3") as acts:
        in_steps(model, IDS, [2, 1, 2])
    assert changed(acts) == [[[], []], [[], []], [[0], [0]]]


def test_a_loop_without_a_cache_changes_the_same_tokens_in_every_step(model):
    with looking(model, "@new[0]") as acts:
        for end in (3, 4, 5):
            model(IDS[:, :end], use_cache=False)
    assert changed(acts) == [[[], []], [[3], [3]], [[3], [3]]]
    assert acts.tokens(LAYER).shape == (2, 5, 16)


def test_a_loop_without_a_cache_over_embeddings_goes_on_too(model):
    embedded = model.transformer.wte(IDS)
    with looking(model, "@prompt") as acts:
        for rows, end in ((2, 3), (2, 4), (1, 5)):
            model(inputs_embeds=embedded[:rows, :end], use_cache=False)
        model(inputs_embeds=embedded[:, 1:], use_cache=False)
    assert changed(acts) == [[[0, 1, 2]] * 2, [[0, 1, 2]] * 2, [[0, 1, 2]], [[0, 1, 2, 3]] * 2]


def test_more_rows_or_another_form_of_the_tokens_begin_another_sequence(model):
    embedded = model.transformer.wte(IDS)
    with looking(model, "@new") as acts:
        for given in (
            {"input_ids": IDS[:1, :3]}, {"input_ids": IDS[[0, 0], :4]},
            {"inputs_embeds": embedded[:, :3]}, {"input_ids": IDS[:1, :4]},
            {"input_ids": IDS[:, :3]}, {"inputs_embeds": embedded[:1, :4]}, {"inputs_embeds": embedded[:1]},
        ):  # fmt: skip
            model(**given, use_cache=False)
    assert changed(acts) == [[[]] * len(value) for value in acts.calls(LAYER)[:-1]] + [[[4]]]


def test_other_ids_of_one_more_token_are_another_sequence(model):
    with looking(model, "@new") as acts:
        model(IDS[:, :3])
        model(IDS[:, 1:])
        with pytest.raises(hl.HooklineError, match=says("and there is no number", 2, 2)):
            acts.tokens(LAYER, sequence=2)
        assert [acts.tokens(LAYER, sequence=number).shape[1] for number in (0, 1, -1)] == [3, 4, 4]
        in_steps(model, IDS, [2, 1])


def test_a_loop_that_drops_finished_rows_goes_on_where_it_was(model):
    with looking(model, "@new") as acts:
        cache = in_steps(model, IDS, [3, 1])
        cache.batch_select_indices(torch.tensor([1]))
        model(IDS[1:, 4:5], past_key_values=cache)
        with pytest.raises(hl.HooklineError, match=says("the number of rows changed")):
            acts.tokens(LAYER)
    assert changed(acts) == [[[], []], [[0], [0]], [[0]]]


def test_a_loop_without_a_cache_that_drops_rows_goes_on_where_it_was(model):
    with looking(model, "@new") as acts:
        model(IDS[:, :3], use_cache=False)
        model(IDS[:, :4], use_cache=False)
        model(IDS[1:], use_cache=False)
    assert changed(acts) == [[[], []], [[3], [3]], [[3, 4]]]


def test_which_row_is_which_is_unknown_once_rows_with_padding_are_dropped(model):
    with pytest.raises(hl.HooklineError, match=says("the mask has", 2, 1)), looking(model, "@4"):
        cache = in_steps(model, IDS, [4], attention_mask=LEFT)
        cache.batch_select_indices(torch.tensor([1]))
        model(IDS[1:, 4:], past_key_values=cache)


def test_new_tokens_are_known_where_rows_with_padding_in_the_prompt_are_dropped(model):
    with looking(model, "@new[0]") as acts:
        cache = in_steps(model, IDS, [3], attention_mask=LEFT)
        cache.batch_select_indices(torch.tensor([1]))
        for at in (3, 4):
            model(IDS[1:, at : at + 1], past_key_values=cache)
    assert changed(acts) == [[[], []], [[0]], [[]]]


def test_padding_among_the_new_tokens_does_not_count(model):
    mask = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 0, 1]])  # The second row waits for a step.
    with looking(model, "@new[0]") as acts:
        in_steps(model, IDS, [3, 1, 1], attention_mask=mask)
    assert changed(acts) == [[[], []], [[0], []], [[], [0]]]


@pytest.mark.parametrize(
    ("mask", "expected"), [(LEFT, [[[0, 2], [2, 4]]]), (RIGHT, [[[0, 2], [0, 2]]])], ids=["left", "right"]
)
def test_padding_does_not_count(model, mask, expected):
    with looking(model, "@:4:2") as acts:
        model(IDS, attention_mask=mask)
    assert changed(acts) == expected
    with looking(model, "@:4:2") as acts:
        in_steps(model, IDS, [2, 3], attention_mask=mask)
    found = [[[*first, *(one + 2 for one in second)] for first, second in zip(*changed(acts), strict=True)]]
    assert found == expected


def causal(mask: Tensor, first: int = 0) -> Tensor:
    """Return a mask of four dimensions for the columns from `first` on."""
    seen = torch.ones(mask.shape[1], mask.shape[1], dtype=torch.bool).tril()[None, None] & (mask[:, None, None] != 0)
    seen = (seen | torch.eye(mask.shape[1], dtype=torch.bool))[:, :, first:]
    return torch.where(seen, 0.0, torch.finfo().min)


@pytest.mark.parametrize(
    ("mask", "padded"),
    [(LEFT, 0), (LEFT, 1), (RIGHT, 0), (RIGHT, 1), (RIGHT, None)],
    ids=["left-0", "left-1", "right-0", "right-1", "right-repeated"],
)
def test_position_ids_tell_padding_where_the_mask_has_four_dimensions(model, mask, padded):
    positions = mask.cumsum(1) - 1
    positions = positions if padded is None else positions.masked_fill(mask == 0, padded)
    with looking(model, "@prompt[-1]") as acts:
        model(IDS, attention_mask=causal(mask), position_ids=positions)
    assert changed(acts) == [[[4], [4 if mask is LEFT else 2]]]
    with looking(model, "@1:3") as acts:
        cache = transformers.DynamicCache()
        model(IDS[:, :3], attention_mask=causal(mask[:, :3]), position_ids=positions[:, :3], past_key_values=cache)
        model(IDS[:, 3:], attention_mask=causal(mask, 3), position_ids=positions[:, 3:], past_key_values=cache)
    assert changed(acts) == [[[1, 2], [] if mask is LEFT else [1, 2]], [[], [0, 1] if mask is LEFT else []]]


def test_a_step_with_a_mask_of_four_dimensions_needs_no_position_ids_once_the_prompt_is_known(model):
    mask = LEFT[:, :4]
    with looking(model, "@4") as acts:
        cache = transformers.DynamicCache()
        model(
            IDS[:, :4], attention_mask=causal(mask), position_ids=(mask.cumsum(1) - 1).clamp(0), past_key_values=cache
        )
        model(IDS[:, 4:], attention_mask=torch.zeros(2, 1, 1, 5), past_key_values=cache)
    assert changed(acts) == [[[], []], [[0], []]]
    with (
        pytest.raises(hl.HooklineError, match=says("does not tell which tokens")),
        looking(model, "@4"),
    ):
        model(IDS[:, 4:], attention_mask=torch.zeros(2, 1, 1, 6), past_key_values=cache)


def test_every_second_token_is_found_in_any_piece(model):
    for widths in ([3, 1, 1], [1, 3, 1], [2, 2, 1]):
        with looking(model, "@::2") as acts:
            in_steps(model, IDS, widths)
        starts = [0, widths[0], widths[0] + widths[1]]
        whole = [start + at for start, call in zip(starts, changed(acts), strict=True) for at in call[0]]
        assert whole == [0, 2, 4]


def test_a_result_for_all_tokens_is_put_in_like_one_for_some(model):
    for selector in ("@:", "@:4"):
        with hl.edit(model, f"{LAYER}[:, {selector}]", lambda value: value[:, :1], check=False):
            with hl.capture(model, LAYER) as acts:
                model(IDS)
        assert acts[LAYER].shape == (2, 5, 16)
        near(acts[LAYER][:, 3], acts[LAYER][:, 0])


def test_a_mask_of_four_dimensions_alone_does_not_tell_padding(model):
    with (
        pytest.raises(hl.HooklineError, match=says("does not tell which tokens")),
        looking(model, "@2"),
    ):
        model(IDS, attention_mask=causal(LEFT))


def test_position_ids_without_a_mask_hide_no_token(model):
    positions = torch.tensor([[0, 1, 2, 3, 4], [0, 0, 0, 1, 2]])
    with looking(model, "@3") as acts:
        model(IDS, position_ids=positions)
    assert changed(acts) == [[[3], [3]]]


def test_hooks_that_are_added_after_the_prompt_know_indices_but_no_prompt(model):
    cache = in_steps(model, IDS, [3])
    with looking(model, "@4") as acts:
        model(IDS[:, 3:4], past_key_values=cache)
        model(IDS[:, 4:], past_key_values=cache)
    assert changed(acts) == [[[], []], [[0], [0]]]
    with (
        pytest.raises(hl.HooklineError, match=says("the prompt passed before these")),
        looking(model, "@prompt[-1]"),
    ):
        model(IDS[:, :1], past_key_values=cache)


def test_tokens_taken_back_from_the_cache_are_refused(model):
    with (
        pytest.raises(hl.HooklineError, match=says("tokens were taken back from")),
        looking(model, "@2"),
    ):
        cache = in_steps(model, IDS, [4])
        cache.crop(-2)
        model(IDS[:, 3:], past_key_values=cache)


def test_embeddings_are_tokens_too(model):
    embedded = model.transformer.wte(IDS)
    with looking(model, "@3") as acts:
        model(inputs_embeds=embedded, attention_mask=LEFT)
    assert changed(acts) == [[[3], []]]


class Odd(nn.Module):
    """A model whose argument tells nothing about tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, state: dict[str, Tensor]) -> Tensor:
        return self.layer(state["x"])


def test_in_a_model_that_tells_nothing_a_tokens_index_is_its_index_in_the_value():
    model, x = Odd(), torch.randn(2, 5, 4)
    _, acts = hl.run(model, {"x": x}, capture=["layer[:, @3]", "layer[:, @prompt]"])
    assert acts["layer[:, @3]"].equal(model.layer(x)[:, 3])
    assert acts["layer[:, @prompt]"].equal(model.layer(x))
    with pytest.raises(hl.NeverFired, match=says("no such token passed its")):
        hl.run(model, {"x": x}, edit={"layer[:, @7]": marked})
    with hl.capture(model, "layer", keep="all") as acts:
        model({"x": x})
    with pytest.raises(hl.HooklineError, match=says("not given its tokens in")):
        acts.tokens("layer")


def test_a_function_tells_the_tokens_of_a_model_and_where_its_prompt_ends():
    model, x = Odd(), torch.randn(2, 5, 4)

    def tell(state: dict[str, Any]) -> Any:
        at = state["at"]
        return torch.tensor([[*range(at, at + state["x"].shape[1])], [-1] * state["x"].shape[1]]), 3

    hl.tell_tokens(model, tell)
    with hl.edit(model, "layer[:, @new]", marked), hl.capture(model, "layer", keep="all") as acts:
        model({"x": x[:, :2], "at": 0})
        model({"x": x[:, 2:], "at": 2})
    assert changed(acts, "layer") == [[[], []], [[1, 2], []]]
    assert acts.tokens("layer").shape == (2, 5, 4)
    hl.tell_tokens(model, None)
    with pytest.raises(hl.NeverFired), hl.edit(model, "layer[:, @new]", marked):
        model({"x": x, "at": 0})


def test_what_a_function_tells_is_checked():
    model = Odd()
    with pytest.raises(hl.HooklineError, match=says("does not tell tokens")):
        hl.tell_tokens(model, 3)
    for answer in (3, torch.zeros(2, 3), torch.zeros(3, dtype=torch.long)):
        hl.tell_tokens(model, lambda _state, answer=answer: answer)
        with pytest.raises(hl.HooklineError, match=says("integer tensor batch")):
            hl.run(model, {"x": torch.ones(1, 2, 4)}, capture="layer[:, @0]")


def test_the_call_of_an_edit_has_its_step_and_its_tokens(model):
    seen: list[tuple[int, list[list[int]]]] = []

    def note(value: Tensor, call: hl.Call) -> None:
        assert call.tokens is not None
        seen.append((call.step, call.tokens.tolist()))

    with hl.edit(model, LAYER, note, with_call=True):
        in_steps(model, IDS, [4, 1], attention_mask=LEFT)
        model(IDS[:, :2])
    assert seen == [
        (0, [[0, 1, 2, 3], [-1, -1, 0, 1]]), (1, [[4], [2]]), (0, [[0, 1], [0, 1]]),
    ]  # fmt: skip


def test_the_call_of_an_edit_has_the_rows_of_its_value_where_rows_have_different_tokens():
    chosen = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 1, 1]]).bool()
    seen: list[tuple[tuple[int, ...] | None, int]] = []
    model = nn.Identity()
    where = ("", hl.tokens(chosen))
    with hl.edit(model, where, lambda value, call: seen.append((call.rows, value.shape[1])), with_call=True):
        model(torch.randn(3, 3, 4))
    assert seen == [((0, 2), 2), ((1,), 1)]


def test_tokens_at_another_dimension_are_refused(model):
    with pytest.raises(hl.SiteError, match=says("stands at a dimension of", "@2", 16, 5)):
        hl.run(model, IDS, edit={f"{LAYER}[..., @2]": marked})
    with pytest.raises(hl.SiteError, match=says("has no dimension", 3)):
        hl.run(model, IDS, edit={f"{LAYER}[:, :, :, @2]": marked})
    with pytest.raises(hl.SiteError, match=says("names the tokens of", 3, 2)):
        hl.run(model, IDS, capture=(LAYER, hl.tokens([1, 2, 3])))
    with pytest.raises(hl.SiteError, match=says("rows have these tokens in", ":")):
        hl.run(model, IDS, attention_mask=LEFT, edit={f"{LAYER}[0, @2]": marked})
    with pytest.raises(hl.SiteError, match=says("tokens are a dimension of")):
        hl.run(model, IDS, edit={"[:, @2]": marked})


def test_the_head_gets_the_last_tokens_alone_where_the_model_is_told_so(model):
    _, acts = hl.run(model, IDS, logits_to_keep=2, capture=["lm_head[:, @4]", "lm_head[:, @3:]"])
    whole = model(IDS).logits
    near(acts["lm_head[:, @4]"], whole[:, 4])
    near(acts["lm_head[:, @3:]"], whole[:, 3:])


def test_a_token_that_never_passes_is_reported(model):
    with pytest.raises(hl.NeverFired, match=says("no such token passed", 5, 5)):
        hl.run(model, IDS, edit={f"{LAYER}[:, @7]": marked})
    with pytest.raises(hl.NeverFired, match=says("no such token passed", 5, 4)):
        with hl.edit(model, f"{LAYER}[:, @prompt[4]]", marked):
            in_steps(model, IDS, [4, 1])


def test_a_slice_that_selects_nothing_in_a_later_step_warns_once(model):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        with hl.edit(model, f"{LAYER}[:, 1:]", marked):
            in_steps(model, IDS, [3, 1, 1])
    assert len([one for one in found if "[:, 1:]" in str(one.message)]) == 1
