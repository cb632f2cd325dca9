"""Values at tokens that come piece by piece: one tensor when they are read, and cut up when they are patched."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

import hookline as hl
from hookline._cache.token_pieces import Piece, Pieces, given_tokens
from hookline._values.tokens import Chosen, Tokens
from hookline.errors import EditError, HooklineError

SITE = hl.Site("h")
SOME = Tokens("", None, (0, 4, None))


def value(rows: int, columns: int, start: int = 0) -> Tensor:
    return (torch.arange(columns) + start).expand(rows, columns)[..., None] + torch.arange(rows)[:, None, None] * 10.0


def test_pieces_are_joined_in_their_order():
    pieces = Pieces(1, SOME, 1, [Piece(value(2, 3), None, range(3))])
    pieces.add(Piece(value(2, 1, 3), None, range(3, 4)))
    assert pieces.read(SITE)[..., 0].tolist() == [[0, 1, 2, 3], [10, 11, 12, 13]]
    assert pieces.peek().equal(pieces.read(SITE))


def test_a_token_that_comes_again_has_its_last_value():
    pieces = Pieces(1, SOME, 1, [Piece(value(2, 2), None, range(2))])
    pieces.add(Piece(value(2, 3, 5), None, range(3)))
    assert len(pieces.pieces) == 1
    assert pieces.read(SITE)[..., 0].tolist() == [[5, 6, 7], [15, 16, 17]]
    pieces.add(Piece(value(2, 2, 8), None, range(2, 4)))
    assert pieces.read(SITE)[..., 0].tolist() == [[5, 6, 8, 9], [15, 16, 18, 19]]


def test_rows_that_have_their_tokens_in_different_calls_are_put_together():
    first = Piece(value(1, 2), (1,), ((0, 1),), 2)
    second = Piece(value(1, 2, 4), (0,), ((0, 1),), 2)
    assert Pieces(1, SOME, 1, [first, second]).read(SITE)[..., 0].tolist() == [[4, 5], [0, 1]]
    one = Tokens("rows", 0, rows=((7,), (3,)))
    pieces = Pieces(
        1, one, 1, [Piece(torch.tensor([[3.0]]), (1,), ((0,),), 2), Piece(torch.tensor([[7.0]]), (0,), ((0,),), 2)]
    )
    assert pieces.read(SITE).tolist() == [[7], [3]]


@pytest.mark.parametrize("row", [0, 1])
def test_rows_with_different_numbers_of_tokens_make_no_tensor(row):
    pieces = Pieces(1, SOME, 1, [Piece(value(1, 2), (row,), ((0, 1),), 2)])
    with pytest.raises(HooklineError, match=r"'h': the rows have [02], [02] of these tokens, .* as in '@prompt\[-1\]'"):
        pieces.read(SITE)
    assert [tensor.shape for tensor in pieces.peek()] == [(1, 2, 1)]
    copied = pickle.loads(pickle.dumps(pieces))
    assert [tensor.shape for tensor in copied.peek()] == [(1, 2, 1)]


def test_a_mask_is_one_list_of_tokens_row_by_row():
    mask = Tokens("mask", rows=((0, 3), (1,)))
    pieces = Pieces(1, mask, 1, [
        Piece(torch.tensor([[[0.0]], [[11.0]]]), (0, 1), ((0,), (0,)), 2),
        Piece(torch.tensor([[[3.0]]]), (0,), ((1,),), 2),
    ])  # fmt: skip
    assert pieces.read(SITE).tolist() == [[0], [3], [11]]


def test_pieces_are_pickled_as_what_they_hold():
    pieces = Pieces(1, SOME, 1, [Piece(value(2, 2), None, range(2)), Piece(value(2, 1, 2), None, range(2, 3))])
    for one in (pickle.loads(pickle.dumps(pieces)), copy.deepcopy(pieces)):
        assert one.read(SITE).equal(pieces.read(SITE))


def test_what_another_cache_keeps_gets_no_further_tokens():
    pieces = Pieces(1, SOME, 1, [Piece(value(2, 2), None, range(2))])
    kept = pieces.kept()
    pieces.add(Piece(value(2, 1, 2), None, range(2, 3)))
    assert [len(one.read(SITE)[0]) for one in (kept, pieces)] == [2, 3]


def test_tokens_that_differ_in_another_dimension_do_not_join():
    pieces = Pieces(1, SOME, 1, [Piece(torch.zeros(2, 3, 5), None, range(3))])
    pieces.add(Piece(torch.zeros(2, 1, 6), None, range(3, 4)))
    with pytest.raises(HooklineError, match=r"'h' has the shapes \(2, 3, 5\) and \(2, 1, 6\) in two calls"):
        pieces.read(SITE)


def test_a_value_for_all_tokens_is_cut_for_those_that_pass():
    part, given = torch.zeros(2, 2, 5), torch.randn(2, 4, 5)
    chosen = Chosen(slice(0, 2), None, range(2, 4))
    assert given_tokens(given, part, SOME, chosen, 1).equal(given[:, 2:4])
    assert given_tokens(given[0], part, SOME, chosen, 1).equal(given[0, 2:4])
    assert given_tokens(given[0, 0], part, SOME, chosen, 1).equal(given[0, 0])
    assert given_tokens(given[:, :1], part, SOME, chosen, 1).equal(given[:, :1])
    with pytest.raises(EditError, match="the value is for 3 tokens, and 4 are named"):
        given_tokens(given[:, :3], part, SOME, chosen, 1)
    with pytest.raises(EditError, match="the value is for 5 tokens, and 4 are named"):
        given_tokens(torch.randn(2, 5, 5), part, SOME, chosen, 1)


def test_a_transform_gets_one_token_whole_and_several_only_call_by_call():
    model, ids = nn.Sequential(nn.Embedding(9, 2)), torch.arange(4)[None]
    with hl.capture(model, "0[:, @prompt[-1]]", transform=torch.neg) as acts:
        output = model(ids)
    assert acts["0[:, @prompt[-1]]"].equal(-output[:, -1])
    with pytest.raises(HooklineError, match=r"'0\[:, @prompt\]': transform= gets the tokens of each call"):
        hl.capture(model, "0[:, @prompt]", transform=torch.neg)


def test_a_value_for_each_row_is_cut_for_the_rows_that_have_tokens():
    part, given = torch.zeros(1, 2, 5), torch.randn(2, 4, 5)
    chosen = Chosen(0, (1,), ((0, 3),), 2)
    assert given_tokens(given, part, SOME, chosen, 1).equal(given[1:, [0, 3]])
    assert given_tokens(given[0], part, SOME, chosen, 1).equal(given[:1, [0, 3]])


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
    with pytest.raises(HooklineError, match="'layer' passes several times in one forward"):
        acts.tokens("layer")
    with hl.capture(model, "layer", keep="all") as acts:
        model(ids)
    assert acts.tokens("layer").shape == (2, 3, 4)
    with pytest.raises(HooklineError, match=r"'layer' is float32 \(2, 3, 4\), and 3 tokens passed .* another dim="):
        acts.tokens("layer", dim=2)


def test_each_sequence_has_pieces_of_its_own():
    model = Loop()
    with hl.capture(model, "layer[:, @1:]", keep="all") as acts:
        model(torch.zeros(2, 3, dtype=torch.long))
        model(torch.ones(2, 5, dtype=torch.long))
    assert [len(one[0]) for one in acts.calls("layer[:, @1:]")] == [2, 4]
