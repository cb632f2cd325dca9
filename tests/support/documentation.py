"""Running the examples of a page. `python -m tests.support.documentation PAGE` runs those of one page."""

from __future__ import annotations

import doctest
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A fenced block of a page: the language, the code, and the line it begins on."""

    language: str
    code: str
    line: int


def blocks(text: str) -> list[Block]:
    """Return the fenced blocks of a Markdown text."""
    return [Block(found[1], found[2], text.count("\n", 0, found.start(2))) for found in _BLOCK.finditer(text)]


def run_examples(test: doctest.DocTest) -> None:
    """Run a doctest; all its failures together are one."""
    failures: list[str] = []
    doctest.DocTestRunner(verbose=False).run(test, out=failures.append, clear_globs=False)
    if failures:
        pytest.fail("".join(failures), pytrace=False)


def run_page(path: Path, text: str) -> None:
    """Run the Python blocks of a page, one after the other."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for _, code, line in (block for block in blocks(text) if block.language == "python"):
        if ">>>" in code:
            test = doctest.DocTestParser().get_doctest(code, names, path.name, str(path), line)
            run_examples(test)
            names = test.globs
        else:
            exec(compile("\n" * line + code, str(path), "exec"), names)


if __name__ == "__main__":
    run_page(Path(sys.argv[1]), Path(sys.argv[1]).read_text(encoding="utf-8"))
