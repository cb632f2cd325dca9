"""Values at tokens that come piece by piece: one tensor when they are read, and cut up when they are patched."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookline as hl
from hookline.errors import EditError, HooklineError
from tests.errors.wording import says


class Told(nn.Module):
    """A model that is given the index of each token beside the values at the tokens, and returns the values."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.Identity()
        hl.tell_tokens(self, lambda indices, value: torch.as_tensor(indices))

    def forward(self, indices: Any, value: Tensor) -> Tensor:
        return self.h(value)


def value(rows: int, columns: int, start: int = 0) -> Tensor:
    return (torch.arange(columns) + start).expand(rows, columns)[..., None] + torch.arange(rows)[:, None, None] * 10.0


def of_indices(*indices: list[int]) -> Tensor:
    """Return a value whose elements tell their row and the index of their token."""
    return torch.tensor(indices)[..., None] + torch.arange(len(indices))[:, None, None] * 10.0


def pieces(site: str, *calls: list[list[int]]) -> hl.Cache:
    """Capture a site of a model that is given its tokens in several calls, each with the indices of each row."""
    model = Told()
    with hl.capture(model, site) as acts:
        for indices in calls:
            model(indices, of_indices(*indices))
    return acts


def test_pieces_are_joined_in_their_order():
    acts = pieces("h[:, @:4]", [[0, 1, 2]] * 2, [[3]] * 2)
    assert acts["h[:, @:4]"][..., 0].tolist() == [[0, 1, 2, 3], [10, 11, 12, 13]]
    assert "(2, 4, 1)" in repr(acts)


def test_a_token_that_comes_again_has_its_last_value():
    model, ids = nn.Sequential(nn.Embedding(9, 4), nn.Identity()), torch.arange(8).view(2, 4)
    added = torch.zeros(())
    with hl.edit(model, "0", lambda output: output + added), hl.capture(model, "1[:, @1:4]") as acts:
        model(ids[:, :2])
        added.add_(100)
        model(ids[:, :3])
        added.add_(100)
        output = model(ids)
    assert acts["1[:, @1:4]"].equal(output[:, 1:])


def test_a_loop_without_a_cache_holds_each_token_once():
    model, ids = nn.Sequential(nn.Embedding(9, 4), nn.Identity()), torch.arange(8).expand(2, 8)
    with torch.no_grad(), hl.capture(model, "1[:, @1:9]"):
        held = []
        for width in range(2, 9):
            model(ids[:, :width])
            held.append(sum(isinstance(one, Tensor) for one in gc.get_objects()))
    assert held[-1] <= held[1]


def test_rows_that_have_their_tokens_in_different_calls_are_put_together():
    calls = [[-1, 0], [0, 1]], [[1], [2]]
    assert pieces("h[:, @:2]", *calls)["h[:, @:2]"][..., 0].tolist() == [[0, 1], [10, 11]]
    site = f"h{hl.tokens([1, 0])}"
    assert pieces(site, *calls)[site].tolist() == [[1], [10]]


@pytest.mark.parametrize("row", [0, 1])
def test_rows_with_different_numbers_of_tokens_make_no_tensor(row):
    indices = [[-1, -1], [-1, -1]]
    indices[row] = [0, 1]
    acts = pieces("h[:, @:4]", indices)
    message = r"'h\[:, @:4\]': the rows have [02], [02] of these tokens, .* as in '@prompt\[-1\]'"
    for one in (acts, pickle.loads(pickle.dumps(acts))):
        with pytest.raises(HooklineError, match=message):
            one["h[:, @:4]"]
        assert "(1, 2, 1)" in repr(one)


def test_a_mask_is_one_list_of_tokens_row_by_row():
    site = "h[:, @mask(0,3|1)]"
    assert pieces(site, [[0, 1, 2]] * 2, [[3]] * 2)[site].tolist() == [[0], [3], [11]]


def test_pieces_are_pickled_as_what_they_hold():
    acts = pieces("h[:, @:4]", [[0, 1]] * 2, [[2]] * 2)
    for one in (pickle.loads(pickle.dumps(acts)), copy.deepcopy(acts)):
        assert one["h[:, @:4]"].equal(acts["h[:, @:4]"])


def test_what_another_cache_keeps_gets_no_further_tokens():
    model = Told()
    with hl.capture(model, "h[:, @:4]") as acts:
        model([[0, 1]], value(1, 2))
        kept = acts | {}
        model([[2]], value(1, 1))
    assert [len(one["h[:, @:4]"][0]) for one in (kept, acts)] == [2, 3]


def test_tokens_that_differ_in_another_dimension_do_not_join():
    model = Told()
    with hl.capture(model, "h[:, @:4]") as acts:
        model([[0, 1, 2]] * 2, torch.zeros(2, 3, 5))
        model([[3]] * 2, torch.zeros(2, 1, 6))
    with pytest.raises(HooklineError, match=says("has the shapes", "h[:, @:4]", 3, 1)):
        acts["h[:, @:4]"]


def patched(given: Tensor, *calls: list[list[int]], site: str = "h[:, @:4]") -> list[Tensor]:
    """Return what a model returns in several calls while tokens of a layer are replaced."""
    model = Told()
    with hl.patch(model, {site: given}):
        return [model(indices, torch.zeros(len(indices), len(indices[0]), 5)) for indices in calls]


def test_a_value_for_all_tokens_is_cut_for_those_that_pass():
    calls, given = ([[0, 1]] * 2, [[2, 3]] * 2), torch.randn(2, 4, 5)
    for one in (given, given[0], given[0, 0], given[:, :1]):
        assert torch.cat(patched(one, *calls), 1).equal(one.expand(2, 4, 5))
    for wrong in (given[:, :3], torch.randn(2, 5, 5)):
        with pytest.raises(EditError, match=says("the value is for", wrong.shape[1], 4)):
            patched(wrong, *calls)


def test_a_transform_gets_one_token_whole_and_several_only_call_by_call():
    model, ids = nn.Sequential(nn.Embedding(9, 2)), torch.arange(4)[None]
    with hl.capture(model, "0[:, @prompt[-1]]", transform=torch.neg) as acts:
        output = model(ids)
    assert acts["0[:, @prompt[-1]]"].equal(-output[:, -1])
    with pytest.raises(HooklineError, match=says("transform= gets the tokens of", "0[:, @prompt]")):
        hl.capture(model, "0[:, @prompt]", transform=torch.neg)


def test_a_value_for_each_row_is_cut_for_the_rows_that_have_tokens():
    given = torch.randn(2, 4, 5)
    for one in (given, given[0]):
        first, second = patched(one, [[-1, -1], [0, 1]], [[0, 1], [2, 3]], [[2], [4]])[:2]
        expected = one.expand(2, 4, 5)
        assert first.equal(torch.stack([torch.zeros(2, 5), expected[1, :2]]))
        assert second.equal(torch.stack([expected[0, :2], expected[1, 2:]]))
    rows = hl.tokens([[1, 2], [0, 3]])
    (output,) = patched(given[:, :2], [[0, 1, 2, 3]] * 2, site=f"h{rows}")
    assert output[[0, 0, 1, 1], [1, 2, 0, 3]].equal(given[:, :2].flatten(0, 1))
    assert not output[[0, 0, 1, 1], [0, 3, 1, 2]].any()


class Loop(nn.Module):
    """A model that is given ids, and whose layer may run twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 4)
        self.layer = nn.Linear(4, 4)

    def forward(self, ids: Tensor, times: int = 1) -> Tensor:
        x = self.embed(ids)
        for _ in range(times):
            x = self.layer(x)
        return x


def test_a_site_that_passes_several_times_in_one_forward_is_no_sequence():
    model, ids = Loop(), torch.zeros(2, 3, dtype=torch.long)
    with hl.capture(model, "layer", keep="all") as acts:
        model(ids, times=2)
    with pytest.raises(HooklineError, match=says("or threads ran at the", "layer")):
        acts.tokens("layer")
    with hl.capture(model, "layer", keep="all") as acts:
        model(ids)
    assert acts.tokens("layer").shape == (2, 3, 4)
    with pytest.raises(HooklineError, match=says("is float32 and tokens passed", "layer", 3, 3)):
        acts.tokens("layer", dim=2)


def test_each_sequence_has_pieces_of_its_own():
    model = Loop()
    with hl.capture(model, "layer[:, @1:]", keep="all") as acts:
        model(torch.zeros(2, 3, dtype=torch.long))
        model(torch.ones(2, 5, dtype=torch.long))
    assert [len(one[0]) for one in acts.calls("layer[:, @1:]")] == [2, 4]
