"""Each message is worded in one place, `wording.py`, so that a better sentence costs one line."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.errors.wording import WORDING, says

TESTS = Path(__file__).parent.parent
FILES = [path for path in sorted(TESTS.rglob("*.py")) if path != Path(__file__)]
PROSE = re.compile(r"[a-z]{2,}[,;:]? [a-z]{2,}[,;:]? [a-z]{2,}")  # Three words in a row are a piece of a sentence.
OF_HOOKLINE = re.compile(r"^(hl\.|Site|Edit|Store|Stale|Never|NotCaptured|CacheFull|Bad|Hookline)")


def calls(tree: ast.Module, name: str) -> Iterator[ast.Call]:
    """Return the calls of a function of this name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == name:
            yield node


def worded_elsewhere(tree: ast.Module) -> Iterator[str]:
    """Return the sentences that `match=` compares with errors of hookline, or that `says` is told to find."""
    named = [call.args[0] for call in calls(tree, "says")]
    told = [argument for call in calls(tree, "says") for argument in call.args[1:]]
    for node in [*calls(tree, "raises"), *calls(tree, "warns")]:
        if node.args and OF_HOOKLINE.match(ast.unparse(node.args[0])):
            told += [keyword.value for keyword in node.keywords if keyword.arg == "match"]
    names = {id(one) for argument in named for one in ast.walk(argument)}
    texts = {id(one): one for argument in told for one in ast.walk(argument) if isinstance(one, ast.Constant)}
    yield from (str(one.value) for key, one in texts.items() if key not in names and PROSE.search(str(one.value)))


def test_no_test_words_a_message_itself():
    found = {str(path.relative_to(TESTS)): list(worded_elsewhere(ast.parse(path.read_text("utf-8")))) for path in FILES}
    assert not {name: sentences for name, sentences in found.items() if sentences}


def test_a_message_that_a_test_words_itself_is_found():
    code = "with pytest.raises(hl.SiteError, match='no such thing here'): pass"
    assert list(worded_elsewhere(ast.parse(code))) == ["no such thing here"]
    assert not list(
        worded_elsewhere(ast.parse(code.replace("'no such thing here'", "says('no such thing here', 'h.0')")))
    )
    assert not list(worded_elsewhere(ast.parse(code.replace("hl.SiteError", "ValueError"))))
    assert list(worded_elsewhere(ast.parse("says('a name', 'but more is told')"))) == ["but more is told"]


def test_every_message_is_expected_by_a_test_and_worded_once():
    named: set[str] = set()
    for path in FILES:
        for call in calls(ast.parse(path.read_text(encoding="utf-8"), str(path)), "says"):
            named |= {one.value for one in ast.walk(call.args[0]) if isinstance(one, ast.Constant)}
    assert {*WORDING} - named == set()
    assert len({*WORDING.values()}) == len(WORDING)


def test_a_message_is_known_by_its_words_and_by_what_it_shows():
    message = "'h.3' has shape (4, 8), and (3, 8) does not fit 14 rows"
    name = next(iter(WORDING))
    text = WORDING[name].replace("…", "what may vary")
    assert re.search(says(name, "h.3", 14), f"{message}: {text}")
    assert not re.search(says(name, "h.3", 14), message)
    assert not re.search(says(name, "h.31"), f"{message}: {text}")
    assert not re.search(says(name, 4, 1), f"{message}: {text}")
