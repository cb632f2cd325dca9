"""In a real terminal, tables fit the width, rich draws them where it is installed, and nothing else is printed."""

from __future__ import annotations

import sys

import pytest

from hookline._tables.terminal import width

if sys.platform == "win32":
    pytest.skip("needs a pty", allow_module_level=True)

from tests.support.terminal import ESCAPES, plain, session

MODEL = [
    "import fcntl, os, struct, sys, termios, torch, hookline as hl; from tests.support.models import GPT, tokens",
    "resize = lambda columns: fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack('HHHH', 40, columns, 0, 0)) and None",
    "gpt, x = GPT(depth=12), tokens(); _, acts = hl.run(gpt, x, capture='**')",
    "scanned = hl.scan(gpt, x); hooks = hl.Hooks(gpt); _ = hooks.capture('**')",
]
SHOWN = ["acts", "acts.stats()", "scanned", "hl.sites(gpt)", "hooks"]
EVIL = "hl.Cache({'h\\x1b]0;title\\x07': torch.ones(2)})"


@pytest.fixture(scope="module")
def seen() -> dict[str, str]:
    """What one session shows, first as if rich were not installed, in a narrow terminal, and then with rich."""
    without_rich, narrower = "import sys; sys.modules['rich'] = None", "os.environ['COLUMNS'] = '40'"
    plainly = [without_rich, *MODEL, "resize(72)", *SHOWN, "print(f'{acts:all}')", narrower, "(acts)"]
    with_rich = "del sys.modules['rich'], os.environ['COLUMNS']; resize(120)"
    no_colour, dumb = "os.environ['NO_COLOR'] = ''", "del os.environ['NO_COLOR']; os.environ['TERM'] = 'dumb'"
    richly = [with_rich, *map(by_rich, SHOWN), "print(acts)", EVIL, no_colour, "[acts][0]", dumb, "(acts,)[0]"]
    return session([*plainly, *richly], columns=100)


def by_rich(line: str) -> str:
    """Return a line that does the same, by another text: a session tells lines apart by their text."""
    return f"{line}  # with rich"


def test_in_a_terminal_rich_draws_what_fits_and_who_wants_no_colours_gets_none(seen: dict[str, str]) -> None:
    pytest.importorskip("rich")
    for what in map(by_rich, SHOWN):
        lines = plain(seen[what]).splitlines()
        assert 8 < len(lines) < 40, what
        assert max(map(width, lines)) <= 120, what
        assert "h.{0…11}.mlp" in plain(seen[what]), what
        assert "\x1b[36mh.{0…11}" in seen[what], what
    assert not ESCAPES.search(seen["print(acts)"])
    assert seen["[acts][0]"] == seen["(acts,)[0]"] == seen["print(acts)"] == plain(seen[by_rich("acts")])
    assert r"h\x1b\]0;title\x07" in plain(seen[EVIL])
    assert not {"\x1b]", "\x07"} & {seen[EVIL][index : index + 2] for index in range(len(seen[EVIL]))}


def test_without_rich_the_same_is_plain_text_that_fits_a_narrow_terminal(seen: dict[str, str]) -> None:
    for what in SHOWN:
        lines = seen[what].splitlines()
        assert 8 < len(lines) < 40, what
        assert max(map(width, lines)) <= 72, what
        assert "h.{0…11}.mlp" in seen[what], what
        assert not ESCAPES.search(seen[what]), what
    assert "\nh.11.mlp.2 " in seen["print(f'{acts:all}')"]
    assert len(seen["print(f'{acts:all}')"].splitlines()) > 12 * 5
    assert max(map(width, seen["(acts)"].splitlines())) <= 40
