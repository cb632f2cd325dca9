"""The report: a table with the worst first, a frame, errors for the explorer, a picture."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import hookline as hl
from tests.errors.wording import says

X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x):
        return x + self.up(self.norm(x))


@pytest.fixture(scope="module")
def report():
    torch.manual_seed(0)
    a = nn.Sequential(*(Block() for _ in range(12)))
    b = copy.deepcopy(a)
    b[3].norm.eps = 0.5
    return hl.compare(a, b, run=(X,))


def test_it_prints_the_worst_first_and_folds_repeated_blocks(report):
    lines = str(report).splitlines()
    assert lines[0].startswith("'3.norm' does something else on the same inputs")
    rows = [line for line in lines if line.endswith(("first", "off"))]
    assert rows[0].startswith("3.norm")
    assert len(rows) == 3
    assert len(lines) < 25
    assert len(f"{report:all}".splitlines()) > 36


def test_it_is_a_mapping(report):
    assert report["3.norm"] is report.first
    assert len(report) == 37
    assert list(report)[:3] == ["", "0", "0.norm"]
    with pytest.raises(hl.NotCaptured, match=says("did you mean", "3.norm")):
        report["3.nrom"]


def test_a_frame_has_a_row_for_each_place(report):
    pytest.importorskip("pandas")
    frame = report.to_frame()
    assert len(frame) == 37
    row = frame.set_index("site").loc["3.norm"]
    assert row["off"]
    assert row["local_relative"] > row["rounding_relative"]


def test_errors_go_into_the_explorer_page(report, tmp_path):
    assert set(report.errors()) == {"seen error", "local error"}
    assert report.errors("local")["3.norm"] == report.first.local.relative
    with pytest.raises(hl.HooklineError, match="'seen' or 'local'"):
        report.errors("other")
    model = nn.Sequential(*(Block() for _ in range(12)))
    page = hl.explore(model, run=(X,), to=tmp_path / "page.html", measured=report.errors())
    assert "local error" in (tmp_path / "page.html").read_text()
    assert page


def test_the_explorer_page_shows_both_side_by_side(report, tmp_path):
    page = report.explore(tmp_path / "page.html")
    assert page.sites == 37
    text = Path(page).read_text()
    assert '"name":"b"' in text
    assert "'3.norm' does something else on the same inputs\"" in text
    assert "local error" in text
    with pytest.raises(hl.HooklineError, match=says("compares only weights")):
        hl.compare(nn.Linear(2, 2), nn.Linear(2, 2)).explore(tmp_path / "none.html")


def test_both_errors_are_drawn_over_the_places(report):
    pytest.importorskip("matplotlib").use("Agg")
    axes = report.plot().axes
    assert {line.get_label() for one in axes for line in one.get_lines()} >= {"seen", "local"}
