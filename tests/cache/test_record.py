"""The record of one site: how many calls it holds, in which order, and whether they are still valid."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import hookline as hl
from hookline._cache.record import EMPTY, Guarded, Lost, Record
from hookline._open_blocks import Session
from hookline._sites.language import Site

SITE = Site("h.0")


def filled(keep: int | None, stamps: list[int], forward: int = 0) -> Record:
    record = Record(SITE, keep)
    for stamp in stamps:
        record.put(f"call {stamp}", stamp, forward)
    return record


@settings(deadline=None)
@given(st.lists(st.integers(0, 1000), unique=True, min_size=1), st.none() | st.integers(1, 5))
def test_the_latest_calls_are_kept_in_the_order_in_which_they_began(stamps: list[int], keep: int | None) -> None:
    record = filled(keep, stamps)
    expected = [f"call {stamp}" for stamp in sorted(stamps)]
    assert list(record.each()) == (expected if keep is None else expected[-keep:])
    assert record.latest() == expected[-1]
    assert record.count == len(stamps)


def test_a_recursive_call_that_ends_first_does_not_become_the_latest() -> None:
    record = Record(SITE)
    record.put("inner", 5, 0)
    record.put("outer", 3, 0)
    assert record.latest() == "inner"


def test_calls_that_began_together_can_be_dropped_without_comparing_their_tensors() -> None:
    record = Record(SITE, 2)
    for _ in range(4):
        record.put(torch.ones(2), (1, 1), 0)
    assert len(list(record.each())) == 2


def test_an_empty_record_has_no_calls() -> None:
    record = Record(SITE)
    assert record.value is EMPTY
    assert list(record.each()) == []


@pytest.mark.parametrize(("forwards", "warns"), [([1, 1], True), ([1, 2], False), ([0, 0], False)])
def test_several_calls_in_one_forward_warn_when_only_the_latest_is_kept(forwards: list[int], warns: bool) -> None:
    record = Record(SITE)
    for stamp, forward in enumerate(forwards):
        record.put(stamp, stamp, forward)
    if warns:
        with pytest.warns(hl.HooklineWarning, match="'h.0' fired several times in one forward"):
            record.latest()
    assert record.latest() == 1


def test_several_calls_in_one_forward_are_nothing_to_warn_of_when_all_are_kept() -> None:
    assert filled(None, [1, 2, 3], forward=1).latest() == "call 3"
    assert list(filled(2, [1, 2, 3], forward=1).each()) == ["call 2", "call 3"]


@pytest.mark.parametrize("keep", [1, 3, None])
def test_a_cleared_record_is_like_a_new_one(keep: int | None) -> None:
    record = filled(keep, [5, 6], forward=1)
    record.clear()
    assert list(record.each()) == []
    assert (record.count, record.order, record.value is EMPTY) == (0, 0, True)
    record.put("again", 1, 1)
    assert record.latest() == "again"


def test_records_do_not_share_their_calls() -> None:
    one, other = filled(None, [1]), Record(SITE, None)
    assert list(other.each()) == []
    assert list(one.each()) == ["call 1"]


def test_a_reference_is_read_until_somebody_writes_to_it() -> None:
    source = torch.ones(2)
    guarded = Guarded(source, [(source, source._version, None)])
    assert guarded.read(SITE) is source
    source.add_(1)
    with pytest.raises(hl.StaleValue, match=r"'h.0' was overwritten in place .*\(version 0, now 1\); .*clone=True"):
        guarded.read(SITE)


def test_a_copy_on_write_is_stale_only_while_it_still_shares_its_memory() -> None:
    source = torch.ones(2)
    apart = torch._lazy_clone(source)
    guarded = Guarded(apart, [(source, source._version, apart)])
    source.add_(1)  # The write moves `source` to new memory; the captured value is unchanged.
    assert guarded.read(SITE).tolist() == [1.0, 1.0]
    together = source.detach()
    guarded = Guarded(together, [(source, source._version, together)])
    source.add_(1)
    with pytest.raises(hl.StaleValue, match=r"'h.0'"):
        guarded.read(SITE)


@pytest.mark.parametrize("count", [lambda x: x.copy_(x), lambda x: x.unsqueeze_(0)], ids=["copy_", "unsqueeze_"])
def test_a_counted_write_that_made_no_copy_is_not_called_an_overwrite(count: Callable[[Tensor], object]) -> None:
    source = torch.ones(2)
    kept = torch._lazy_clone(source)
    held = Guarded(kept, [(source.detach(), source._version, kept)])
    count(source)  # Looks the same as a foreach function on CUDA, which does write.
    with pytest.raises(hl.StaleValue, match=r"'h.0' may have been overwritten .*x.copy_\(x\).*clone=True"):
        held.read(SITE)


def test_a_guarded_value_is_checked_in_every_call_that_is_listed() -> None:
    source = torch.ones(2)
    record = Record(SITE, None)
    record.put(Guarded(source, [(source, source._version, None)]), 1, 0)
    record.put("later", 2, 0)
    assert len(list(record.each())) == 2
    source.zero_()
    with pytest.raises(hl.StaleValue):
        list(record.each())
    assert record.latest() == "later"


def test_a_value_that_is_lost_keeps_its_shape_and_says_why_it_can_not_be_read() -> None:
    record = Record(SITE)
    record.put(Lost((torch.ones(2, 3), "kept")), 0, 0)
    for read in (record.latest, lambda: list(record.each())):
        with pytest.raises(hl.StaleValue, match="'h.0' is gone: it was in the memory of a CUDA graph"):
            read()
    shape, text = record.peek()
    assert shape.shape == (2, 3)
    assert shape.is_meta
    assert text == "kept"


def test_a_session_counts_the_forwards_that_ran_to_their_end_since_it_was_restarted() -> None:
    session = Session()
    assert not session.any_forward
    session.forwards += 1
    assert session.any_forward
    session.fail(ValueError())
    assert not session.any_forward
    session.forwards += 1
    assert session.any_forward
    session.restart()
    assert not session.any_forward


def test_hooks_can_not_be_added_to_a_short_form_that_is_open() -> None:
    block = hl.capture(nn.Sequential(nn.Identity()), "0")
    with block, pytest.raises(hl.HooklineError, match="open already"):
        block.edit("0", torch.relu)


def test_a_short_form_is_read_through_its_cache() -> None:
    block = hl.capture(nn.Sequential(nn.Identity()), "0")
    with pytest.raises(hl.SiteError, match="with hl.capture"):
        block["0"]


def test_after_a_failed_forward_the_cache_lists_what_can_be_read_and_nothing_else() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.sum() > 4:
                raise ValueError("too much")
            return x

    model = nn.Sequential(nn.Identity(), Fails(), nn.Identity())
    with hl.capture(model, "0", "2") as acts:
        model(torch.ones(2))
        with pytest.raises(ValueError, match="too much"):
            model(torch.ones(9))
        assert list(acts) == ["0"]
        assert "2" not in acts
        assert dict(acts).keys() == {"0"}


def test_caches_of_several_calls_are_combined_call_by_call() -> None:
    model = nn.Sequential(nn.Identity())
    with hl.capture(model, "0", keep="all") as one:
        model(torch.ones(2))
        model(torch.ones(2) * 3)
    with hl.capture(model, "0", keep="all") as other:
        model(torch.zeros(2))
        model(torch.ones(2))
    assert [value.tolist() for value in (one - other).calls("0")] == [[1.0, 1.0], [2.0, 2.0]]
    with pytest.raises(hl.HooklineError, match="2 calls in one cache and 1"):
        one - hl.Cache({"0": torch.ones(2)})


def test_a_star_selects_every_index_of_a_whole_value() -> None:
    _, acts = hl.run(nn.Sequential(nn.Identity()), torch.arange(6.0).view(2, 3), capture="0")
    chosen = acts.select("0[:, *]")
    assert list(chosen) == ["0[:, 0]", "0[:, 1]", "0[:, 2]"]
    assert chosen.stack().tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
