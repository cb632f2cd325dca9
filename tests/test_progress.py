"""Long work shows its progress, rate and time left in a terminal, and nothing elsewhere."""

from __future__ import annotations

import io
import re
import sys

import pytest

from hookline._progress import Bar, clock, pace, track

WITHOUT_RICH = "sys.modules['rich'] = sys.modules['rich.progress'] = None"
SLOW = """
import sys, time
{setup}
from hookline._progress import Bar, track
for step in track(range(4), "working [h.0]"):
    time.sleep(0.11)
print("done")
"""


def test_steps_come_as_they_are_and_nothing_is_written_where_nobody_looks(capsys) -> None:
    assert list(track(range(3), "counting")) == [0, 1, 2]
    assert list(track(iter("ab"), "counting", progress=False)) == ["a", "b"]
    with Bar("reading", total=3) as bar:
        bar.advance()
    assert bar.done == 1
    assert capsys.readouterr() == ("", "")


def test_who_asks_for_it_gets_the_last_of_it_in_a_file_too(capsys, monkeypatch) -> None:
    for _ in range(2):
        assert list(track("abc", "reading", progress=True)) == ["a", "b", "c"]
        with Bar("harvest", total=2, progress=True, stays=True, unit="samples") as bar:
            bar.advance(2, "7 rows")
        shown = capsys.readouterr()
        assert re.search(r"harvest .*2 of 2 samples, \S+/s, 0:00 left +7 rows", shown.err)
        assert not shown.out
        monkeypatch.setitem(sys.modules, "rich.progress", None)  # The second round is without rich.


def test_figures_have_rate_and_time_left_as_far_as_they_can_be_known(monkeypatch) -> None:
    now = [100.0]
    monkeypatch.setattr("hookline._progress.time.monotonic", lambda: now[0])
    bar = Bar("reading", total=1000, done=200, progress=False)
    assert bar.figures() == "200 of 1,000"
    now[0] += 10
    bar.advance(100)
    assert bar.figures() == "300 of 1,000, 10/s, 1:10 left"
    bar.total = None
    assert bar.figures() == "300, 10/s"
    assert pace(0.5) == "2.0 s each"
    assert clock(59.9) == "0:59"


def test_a_bar_inside_another_stays_silent(monkeypatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    for _ in track("ab", "outer", progress=True):
        list(track("cd", "inner", progress=True))
    assert "outer" in stream.getvalue()
    assert "inner" not in stream.getvalue()


def test_what_raises_or_is_left_takes_its_bar_along(capsys) -> None:
    with pytest.raises(ZeroDivisionError):
        with Bar("first", progress=True):
            1 / 0
    steps = iter(track("ab", "second", progress=True))
    next(steps)
    steps.close()  # type: ignore[attr-defined]
    list(track("ab", "third", progress=True))
    shown = capsys.readouterr().err
    assert all(word in shown for word in ("first", "second", "third"))


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pty")
@pytest.mark.parametrize("setup", ["", WITHOUT_RICH], ids=["rich", "plain"])
def test_in_a_terminal_the_bar_has_rate_and_time_left_and_goes_at_the_end(setup: str) -> None:
    from tests.support.terminal import plain, shown

    if not setup:
        pytest.importorskip("rich")
    raw = shown(["-c", SLOW.format(setup=setup)], columns=100)
    text = plain(raw)
    assert "working [h.0]" in text
    assert re.search(r"[23] of 4, \d\.\d(/s| s each), \d:\d\d left", text)  # A busy machine takes longer.
    assert text.rstrip().endswith("done")
    if setup:
        assert re.search(r"\r +\rdone\s*$", text)
    else:
        assert "\x1b[2K" in raw  # Clears the line.


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pty")
@pytest.mark.parametrize("setup", ["", WITHOUT_RICH], ids=["rich", "plain"])
def test_where_there_is_little_room_what_stands_last_makes_way_for_the_bar(setup: str) -> None:
    from tests.support.terminal import plain, shown

    if not setup:
        pytest.importorskip("rich")
    code = f"""
import sys, time
{setup}
from hookline._progress import Bar
with Bar("harvest", total=600, stays=True, unit="samples") as bar:
    time.sleep(0.11)
    bar.advance(404, "1,612 rows, 2.79 MB, 2.14 MB/s")
"""
    narrow, wide = (plain(shown(["-c", code], columns=columns)) for columns in (80, 160))
    assert "MB/s" in wide
    assert "rows" in narrow
    assert "MB/s" not in narrow


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pty")
def test_a_bar_never_breaks_its_line() -> None:
    from tests.support.terminal import shown

    lines = shown(["-c", SLOW.format(setup=WITHOUT_RICH)], columns=30).splitlines()
    assert max(len(part) for line in lines for part in line.split("\r")) < 30
