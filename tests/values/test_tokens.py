"""Tokens as a subscript: what a text names, what `hl.tokens` makes, and the columns of one value."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hookline as hl
from hookline._values.tokens import Columns, Tokens, put_columns, read_tokens, take_columns
from tests.support.models import mlp

X = torch.arange(24.0).reshape(2, 6, 2)
COLUMNS = torch.tensor([[1, 4], [0, 5]])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("@17", Tokens("", 17)),
        ("@-1", Tokens("", -1)),
        ("@3:9", Tokens("", None, (3, 9, None))),
        ("@:", Tokens()),
        ("@::2", Tokens("", None, (None, None, 2))),
        ("@prompt", Tokens("prompt")),
        ("@prompt[-1]", Tokens("prompt", -1)),
        ("@prompt[:-1]", Tokens("prompt", None, (None, -1, None))),
        ("@prompt[-3:5]", Tokens("prompt", None, (-3, 5, None))),
        ("@new[0:8]", Tokens("new", None, (None, 8, None))),
        ("@(3, 5)", Tokens("rows", 0, rows=((3,), (5,)))),
        ("@((3, 4), (5, 6))", Tokens("rows", rows=((3, 4), (5, 6)))),
        ("@mask(0:3,5|)", Tokens("mask", rows=((0, 1, 2, 5), ()))),
    ],
)
def test_a_text_names_tokens(text, expected):
    assert read_tokens(text, 0) == (expected, len(text), "")
    assert read_tokens(f"[:, {expected}]", 4)[0] == expected


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("@", "'@' names tokens: '@17', '@3:9'"),
        ("@prompt[]", "'@' names tokens"),
        ("@-2", "a sequence may still grow, .* '@prompt\\[-3:\\]'"),
        ("@new[-2]", "a sequence may still grow"),
        ("@3:-1", "a sequence may still grow"),
        ("@5:3", "no token is in there"),
        ("@:0", "no token is in there"),
        ("@prompt[-1:-3]", "no token is in there"),
        ("@prompt[-2:0]", "no token is in there"),
        ("@prompt[::-1]", "tokens are counted forwards"),
        ("@3:9:0", "tokens are counted forwards"),
        ("@()", "tokens of each row are written '@\\(3, 5\\)'"),
        ("@((2, 1))", "in their order"),
        ("@((1, 2), (3))", "tokens of each row are written"),
        ("@mask(a)", "'@' names tokens"),
        ("@mask(1:2:3)", "a mask is written '@mask\\(0:3,5|2:4\\)'"),
    ],
)
def test_a_text_that_names_no_tokens_says_why(text, problem):
    with pytest.raises(hl.SiteError, match=problem):
        hl.capture(mlp(), f"0[:, {text}]").__enter__()


def test_tokens_are_named_once_and_not_of_a_parameter():
    for site in ("0[:, @1][:, @2]", "0[@1, @2]"):
        with pytest.raises(hl.SiteError, match="a site names its tokens once"):
            hl.Hooks(mlp()).capture(site)
    with pytest.raises(hl.SiteError, match="a parameter has no tokens"):
        hl.Hooks(mlp()).capture("0.weight:param[:, @2]")


def test_positions_are_integers_for_each_row_or_a_mask():
    assert hl.tokens([3, 5]) == "[:, @(3, 5)]"
    assert hl.tokens(torch.tensor([[1, 2]]), dim=2) == "[:, :, @((1, 2))]"
    assert hl.tokens([[True, False, True]]) == "[:, @mask(0,2)]"


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        ([1.5], r"integers of shape \(batch,\) or \(batch, k\), or a mask \(batch, tokens\), not float32 \(1,\)"),
        ([], "tokens are integers of shape"),
        (torch.zeros(1, 1, 1, dtype=torch.long), r"not int64 \(1, 1, 1\)"),
        (torch.tensor([True]), r"a mask of tokens has the shape \(batch, tokens\), not \(1,\)"),
        ([-1], r"counted from the first one, 0; '@prompt\[-1\]' is the last of each prompt"),
        ([[2, 1]], "named once each, in their order"),
        ([[1, 1]], "named once each, in their order"),
        ("abc", "abc are no positions of tokens"),
        (None, "None are no positions of tokens"),
    ],
)
def test_other_positions_are_refused(positions, message):
    with pytest.raises(hl.SiteError, match=message):
        hl.tokens(positions)


@pytest.mark.parametrize("dim", [-1, 64, 1.0, True, "1"])
def test_the_dimension_of_tokens_is_one_of_a_value(dim):
    with pytest.raises(hl.SiteError, match="is not a dimension of a value"):
        hl.tokens([1], dim=dim)


def test_many_tokens_of_a_large_batch_are_read():
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4))
    ids = torch.zeros(64, 300, dtype=torch.long)
    mask = torch.rand(64, 300) > 0.5
    positions = torch.arange(0, 300, 3).repeat(64, 1)
    _, acts = hl.run(model, ids, capture=[("1", hl.tokens(mask)), ("1", hl.tokens(positions))])
    assert [value.shape for value in acts.values()] == [(int(mask.sum()), 4), (64, 100, 4)]


def test_a_pair_may_have_a_port_and_subscripts_before_its_tokens():
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4))
    ids = torch.arange(8).reshape(2, 4)
    _, acts = hl.run(model, ids, capture=[("1:input", hl.tokens([1, 2])), "1:input"])
    assert acts["1:input[:, @(1, 2)]"].equal(acts["1:input"][[0, 1], [1, 2]])
    with pytest.raises(hl.SiteError, match="a site names its tokens once"):
        hl.Hooks(model).capture(("1[:, @2]", hl.tokens([1])))


def test_the_last_of_some_tokens_is_known_unless_more_may_come():
    lasts = {"@17": 17, "@3:9": 8, "@1:8:3": 7, "@:": None, "@-1": None, "@prompt[-1]": None, "@prompt[2:5]": 4,
             "@new[0:8]": 7, "@(3, 5)": 5, "@mask(0:3|7)": 7, "@prompt[-3:5]": None}  # fmt: skip
    assert {text: tokens.last for text in lasts if (tokens := read_tokens(text, 0)[0])} == lasts


def test_columns_of_each_row_are_taken_and_put():
    subscript = (slice(None), Columns(None, COLUMNS, False), 1)
    assert take_columns(X, subscript, 1).tolist() == [[3, 9], [13, 23]]
    new = X.clone()
    put_columns(new, subscript, 1, torch.tensor([[-1.0, -2], [-3, -4]]))
    assert new[..., 1].tolist() == [[1, -1, 5, 7, -2, 11], [-3, 15, 17, 19, 21, -4]]
    assert new[..., 0].equal(X[..., 0])


def test_columns_of_some_rows_are_taken_and_put():
    one = Columns((1,), torch.tensor([[2]]), True)
    assert take_columns(X, (slice(None), one), 1).tolist() == [[16, 17]]
    for value, expected in ((0.0, [0, 0]), (torch.tensor([5.0, 6]), [5, 6]), (torch.tensor([[7.0, 8]]), [7, 8])):
        new = X.clone()
        put_columns(new, (slice(None), one), 1, value)
        assert new[1, 2].tolist() == expected
        new[1, 2] = X[1, 2]
        assert new.equal(X)


def test_columns_stand_behind_an_ellipsis_or_none():
    four = X[:, None].expand(2, 3, 6, 2)
    found = take_columns(four, (..., Columns(None, COLUMNS, False), slice(None)), 1)
    assert found.equal(torch.stack([four[0][:, [1, 4]], four[1][:, [0, 5]]]))
