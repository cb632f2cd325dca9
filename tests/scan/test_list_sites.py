"""hl.sites: the places that a pattern matches, as a sequence and as a table."""

from __future__ import annotations

from torch import nn

import hookline as hl
from tests.support.models import GPT, mlp


def test_the_table_shows_module_parameters_and_other_names() -> None:
    assert repr(hl.sites(mlp(), nn.Linear, "1:input")) == (
        "site     module  parameters  also named\n"
        "───────  ──────  ──────────  ──────────\n"
        "0        Linear          40\n"
        "2        Linear          18\n"
        "1:input  ReLU             0"
    )


def test_sites_are_a_sequence() -> None:
    found = hl.sites(mlp(), "*")
    assert len(found) == 3
    assert found[0] == hl.Site("0")
    assert found[-2:] == [hl.Site("1"), hl.Site("2")]
    assert hl.Site("1") in found


def test_sites_tell_whether_a_place_is_among_them_by_its_text_too() -> None:
    found = hl.sites(GPT(), "h.*")
    assert "h.0" in found
    assert "h.0:output" in found
    assert hl.Site("h.0") in found
    assert "head" not in found
