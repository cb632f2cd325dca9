"""Tokens as a subscript: what a text names, what `hl.tokens` makes, and the columns of one value."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookline as hl
from tests.errors.wording import says
from tests.support.models import mlp

X = torch.arange(24.0).reshape(2, 6, 2)
COLUMNS = torch.tensor([[1, 4], [0, 5]])


@pytest.mark.parametrize(
    ("text", "written", "expected"),
    [
        ("@7", "@7", 7),
        ("@-1", "@-1", 11),
        ("@3:9", "@3:9", [3, 4, 5, 6, 7, 8]),
        ("@0:2", "@:2", [0, 1]),
        ("@:", "@:", [*range(12)]),
        ("@::5", "@::5", [0, 5, 10]),
        ("@1:9:3", "@1:9:3", [1, 4, 7]),
        ("@ prompt", "@prompt", [*range(8)]),
        ("@prompt[-1]", "@prompt[-1]", 7),
        ("@prompt[:-6]", "@prompt[:-6]", [0, 1]),
        ("@prompt[-3:7:1]", "@prompt[-3:7]", [5, 6]),
        ("@new", "@new", [8, 9, 10, 11]),
        ("@new[1]", "@new[1]", 9),
        ("@new[0:8]", "@new[:8]", [8, 9, 10, 11]),
        ("@(3, 5)", "@(3, 5)", (3, 5)),
        ("@((3,4),(5,9))", "@((3, 4), (5, 9))", ([3, 4], [5, 9])),
    ],
)
def test_a_text_names_tokens(text: str, written: str, expected: Any) -> None:
    model, site = nn.Sequential(nn.Identity()), f"0[:, {written}]"
    hl.tell_tokens(model, lambda value: (value[..., 0].long() % 100, 8))
    value = torch.arange(12.0).expand(2, 12)[..., None] + torch.tensor([0.0, 100]).view(2, 1, 1)
    with hl.capture(model, f"0[:, {text}]") as acts:
        model(value[:, :8])
        model(value[:, 8:])
    assert list(acts) == [site]
    rows = expected if isinstance(expected, tuple) else (expected, expected)
    assert acts[site].equal(torch.stack([value[row, columns] for row, columns in enumerate(rows)]))


def test_a_mask_names_columns_of_each_row() -> None:
    _, acts = hl.run(nn.Identity(), X, capture="[:, @mask(0:3,5|)]")
    assert acts["[:, @mask(0:3,5|)]"].equal(X[0, [0, 1, 2, 5]])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("@", "'@' names tokens: '@17', '@3:9'"),
        ("@prompt[]", "'@' names tokens"),
        ("@-2", says("a sequence may still grow", "@prompt[-3:]")),
        ("@new[-2]", says("a sequence may still grow")),
        ("@3:-1", says("a sequence may still grow")),
        ("@5:3", says("no token is in there")),
        ("@:0", says("no token is in there")),
        ("@prompt[-1:-3]", says("no token is in there")),
        ("@prompt[-2:0]", says("no token is in there")),
        ("@prompt[::-1]", says("tokens are counted forwards")),
        ("@3:9:0", says("tokens are counted forwards")),
        ("@()", says("tokens of each row are", "@(3, 5)")),
        ("@((2, 1))", says("tokens of each row are")),
        ("@((1, 2), (3))", says("tokens of each row are")),
        ("@mask(a)", "'@' names tokens"),
        ("@mask(1:2:3)", "a mask is written '@mask\\(0:3,5|2:4\\)'"),
    ],
)
def test_a_text_that_names_no_tokens_says_why(text, problem):
    with pytest.raises(hl.SiteError, match=problem):
        hl.capture(mlp(), f"0[:, {text}]").__enter__()


def test_tokens_are_named_once_and_not_of_a_parameter():
    for site in ("0[:, @1][:, @2]", "0[@1, @2]"):
        with pytest.raises(hl.SiteError, match=says("a site names its tokens")):
            hl.Hooks(mlp()).capture(site)
    with pytest.raises(hl.SiteError, match=says("a parameter has no tokens")):
        hl.Hooks(mlp()).capture("0.weight:param[:, @2]")


def test_positions_are_integers_for_each_row_or_a_mask():
    assert hl.tokens([3, 5]) == "[:, @(3, 5)]"
    assert hl.tokens(torch.tensor([[1, 2]]), dim=2) == "[:, :, @((1, 2))]"
    assert hl.tokens([[True, False, True]]) == "[:, @mask(0,2)]"


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        ([1.5], says("integers of shape batch", "(1,)")),
        ([], says("tokens are integers of shape")),
        (torch.zeros(1, 1, 1, dtype=torch.long), r"not int64 \(1, 1, 1\)"),
        (torch.tensor([True]), says("a mask of tokens has", "(1,)")),
        ([-1], says("counted from the first one", 0, "@prompt[-1]")),
        ([[2, 1]], says("named once each")),
        ([[1, 1]], says("named once each")),
        ("abc", says("abc are no positions of")),
        (None, says("None are no positions of")),
    ],
)
def test_other_positions_are_refused(positions, message):
    with pytest.raises(hl.SiteError, match=message):
        hl.tokens(positions)


@pytest.mark.parametrize("dim", [-1, 64, 1.0, True, "1"])
def test_the_dimension_of_tokens_is_one_of_a_value(dim):
    with pytest.raises(hl.SiteError, match=says("is not a dimension of")):
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
    with pytest.raises(hl.SiteError, match=says("a site names its tokens")):
        hl.Hooks(model).capture(("1[:, @2]", hl.tokens([1])))


@pytest.mark.parametrize(
    ("text", "is_last_known"),
    [
        *[("@7", True), ("@3:9", True), ("@1:8:3", True), ("@new[0:3]", True), ("@(3, 5)", True)],
        *[("@:", False), ("@-1", False), ("@prompt[2:5]", True), ("@3:", False)],
    ],
)
def test_a_forward_is_stopped_behind_tokens_unless_more_may_come(text: str, is_last_known: bool) -> None:
    model = nn.Sequential(nn.Identity(), nn.Identity())
    hl.tell_tokens(model, lambda value: (torch.arange(12).expand(2, 12), 8))
    value = torch.randn(2, 12, 3)
    if not is_last_known:
        with pytest.raises(hl.SiteError, match=says("more of it may always")):
            hl.run(model, value, capture=f"0[:, {text}]", stop=True)
        return
    output, acts = hl.run(model, value, capture=f"0[:, {text}]", stop=True)
    assert output is None
    assert len(acts) == 1


def captured(value: Tensor, subscripts: str) -> Tensor:
    """Return a part of a value of a model that tells no tokens: they are the columns of the value."""
    _, acts = hl.run(nn.Identity(), value, capture=subscripts)
    (part,) = acts.values()
    return part


def test_columns_of_each_row_are_taken_and_put() -> None:
    subscripts = f"[:, @({', '.join(str(tuple(row)) for row in COLUMNS.tolist())}), 1]"
    assert captured(X, subscripts).tolist() == [[3, 9], [13, 23]]
    new = hl.run(nn.Identity(), X, patch={subscripts: torch.tensor([[-1.0, -2], [-3, -4]])})
    assert new[..., 1].tolist() == [[1, -1, 5, 7, -2, 11], [-3, 15, 17, 19, 21, -4]]
    assert new[..., 0].equal(X[..., 0])


@pytest.mark.parametrize(
    ("value", "expected"), [(0.0, [0, 0]), (torch.tensor([5.0, 6]), [5, 6]), (torch.tensor([[7.0, 8]] * 2), [7, 8])]
)
def test_one_column_of_each_row_is_taken_and_put(value: Any, expected: list[int]) -> None:
    site = hl.tokens([0, 2])
    assert captured(X, site).tolist() == [[0, 1], [16, 17]]
    new = hl.run(nn.Identity(), X, patch={site: value})
    assert [new[0, 0].tolist(), new[1, 2].tolist()] == [expected] * 2
    new[0, 0], new[1, 2] = X[0, 0], X[1, 2]
    assert new.equal(X)


def test_columns_stand_behind_an_ellipsis_or_none() -> None:
    four = X[:, None].expand(2, 3, 6, 2)
    found = captured(four, "[..., @((1, 4), (0, 5)), :]")
    assert found.equal(torch.stack([four[0][:, [1, 4]], four[1][:, [0, 5]]]))
