"""How much of a value a picture shows: the bytes are shared out fairly, and no picture exceeds its share."""

from __future__ import annotations

from math import prod

from hypothesis import given
from hypothesis import strategies as st

from hookline._explore.excerpts import cost, excerpt, least_cost, left_out, levels_for, share
from hookline._plot.plot_data import DIMENSIONS


@given(st.sampled_from([*DIMENSIONS]), st.lists(st.integers(1, 5000), min_size=4, max_size=4), st.integers(0, 10**6))
def test_a_picture_keeps_to_its_bytes_if_anything_does_and_stays_inside(kind, sizes, bytes):
    shape = sizes[: len(DIMENSIONS[kind])]
    picks = excerpt(kind, shape, bytes)
    counts = [pick.length for pick in picks]
    assert least_cost(kind, counts) <= bytes or counts == [1] * len(shape)
    few, whole = (levels_for(kind, counts, room) for room in (bytes, cost(kind, counts)))
    assert whole == min(252, prod(counts)) >= few
    for pick, size in zip(picks, shape, strict=True):
        assert pick.length >= 1
        assert pick.start + (pick.length - 1) * pick.step < size
        assert pick.step == 1 or pick.start + pick.length * pick.step >= size - pick.step  # Covers the dimension.


@given(st.lists(st.tuples(st.integers(1, 10**6), st.sampled_from([1, 3, 6])), min_size=1), st.integers(1, 10**7))
def test_all_shares_together_are_no_more_than_there_is(wanted, bytes):
    each = share([cost for cost, _ in wanted], [weight for _, weight in wanted], bytes)
    taken = sum(min(cost, each * weight) for cost, weight in wanted)
    assert taken <= bytes * (1 + 1e-9)
    assert taken >= min(bytes, sum(cost for cost, _ in wanted)) * (1 - 1e-9)


def test_samples_go_first_then_units_evenly():
    picks = excerpt("tokens", (4, 16, 768), 6000)
    assert picks[0] == (0, 1, 1)
    assert picks[1] == (0, 16, 1)
    assert picks[2].step > 1
    assert picks[2].length * picks[2].step >= 768


def test_units_are_thinned_out_no_more_than_they_have_to_be():
    _, tokens, units = excerpt("tokens", (1, 400, 768), 12_000)
    assert tokens.length == 48
    assert units.step == 7  # Was 6 before the tokens were thinned out: one more, not doubled.
    assert least_cost("tokens", [1, 48, 128]) > 12_000


def test_a_small_value_is_whole():
    assert [pick.length for pick in excerpt("maps", (2, 8, 5, 5), 10_000)] == [2, 8, 5, 5]


def test_what_is_left_out_is_said():
    shape = (2, 12, 100, 100)
    picks = excerpt("attention", shape, 4000)
    assert left_out("attention", shape, picks) == "1 of 2 samples, 11 of 12 heads, 58 of 100 queries, 58 of 100 keys"
    assert left_out("units", (2, 3), excerpt("units", (2, 3), 1000)) == ""
