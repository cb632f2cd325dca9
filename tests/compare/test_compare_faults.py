"""Planted faults: the module is named and the hint is right. Pairs without a fault raise no alarm.

This is a sample of what benchmarks/compare.py runs.
"""

from __future__ import annotations

import pytest

import hookline as hl
from tests.support import planted_faults
from tests.support.planted_faults import FAULTS, SAME, judged, planted, unfaulted

SECOND_ROUND = len(FAULTS)  # Numbers of other architectures than those from 0 on.
WITHOUT_A_HINT = ("soft_cap",)


@pytest.mark.parametrize("number", range(len(FAULTS)), ids=list(FAULTS))
def test_a_fault_of_each_kind_is_found_and_explained(number):
    fault = planted(SECOND_ROUND + number)
    report = hl.compare(fault.a, fault.b, run=fault.run)
    is_found, is_explained = judged(fault, report)
    assert is_found, report.verdict
    assert is_explained or fault.kind in WITHOUT_A_HINT, report.verdict


@pytest.mark.parametrize("number", range(2 * len(SAME)))
def test_a_pair_without_a_fault_raises_no_alarm(number):
    pair = unfaulted(number)
    report = hl.compare(pair.a, pair.b, **pair.options)
    assert report.ok, (pair.kind, report.verdict)
    assert sum(place.local is not None for place in report.values()) > 3


def test_a_fault_has_an_effect():
    fault = planted(0)
    assert planted_faults.has_effect(fault.a, fault.b, fault.run)
    assert not planted_faults.has_effect(fault.a, fault.a, fault.run)
