"""In a real terminal, tables fit the width, rich draws them where it is installed, and nothing else is printed."""

from __future__ import annotations

import sys

import pytest

from hookline._tables.terminal import width

if sys.platform == "win32":
    pytest.skip("needs a pty", allow_module_level=True)

from tests.support.terminal import ESCAPES, plain, session

MODEL = [
    "import os, sys, torch, hookline as hl; from tests.support.models import GPT, tokens",
    "gpt, x = GPT(depth=12), tokens(); _, acts = hl.run(gpt, x, capture='**')",
    "hooks = hl.Hooks(gpt); _ = hooks.capture('**')",
]
SHOWN = ["acts", "acts.stats()", "hl.scan(gpt, x)", "hl.sites(gpt)", "hooks"]


def test_in_a_terminal_rich_draws_what_fits_and_who_wants_no_colours_gets_none() -> None:
    pytest.importorskip("rich")
    evil = "hl.Cache({'h\\x1b]0;title\\x07': torch.ones(2)})"
    no_colour, dumb = "os.environ['NO_COLOR'] = ''", "del os.environ['NO_COLOR']; os.environ['TERM'] = 'dumb'"
    seen = session([*MODEL, *SHOWN, "print(acts)", evil, no_colour, "(acts)", dumb, "((acts))"], columns=120)
    for what in SHOWN:
        lines = plain(seen[what]).splitlines()
        assert 8 < len(lines) < 40, what
        assert max(map(width, lines)) <= 120, what
        assert "h.{0…11}.mlp" in plain(seen[what]), what
        assert "\x1b[36mh.{0…11}" in seen[what], what
    assert not ESCAPES.search(seen["print(acts)"])
    assert seen["(acts)"] == seen["((acts))"] == seen["print(acts)"] == plain(seen["acts"])
    assert r"h\x1b\]0;title\x07" in plain(seen[evil])
    assert not {"\x1b]", "\x07"} & {seen[evil][index : index + 2] for index in range(len(seen[evil]))}


def test_without_rich_the_same_is_plain_text_that_fits_a_narrow_terminal() -> None:
    without_rich, narrower = "import sys; sys.modules['rich'] = None", "os.environ['COLUMNS'] = '40'"
    seen = session([without_rich, *MODEL, *SHOWN, "print(f'{acts:all}')", narrower, "(acts)"], columns=72)
    for what in SHOWN:
        lines = seen[what].splitlines()
        assert 8 < len(lines) < 40, what
        assert max(map(width, lines)) <= 72, what
        assert "h.{0…11}.mlp" in seen[what], what
        assert not ESCAPES.search(seen[what]), what
    assert "\nh.11.mlp.2 " in seen["print(f'{acts:all}')"]
    assert len(seen["print(f'{acts:all}')"].splitlines()) > 12 * 5
    assert max(map(width, seen["(acts)"].splitlines())) <= 40
