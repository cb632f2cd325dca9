"""Run the examples of a page. `python -m tests.support.documentation PAGE` runs those of one page."""

from __future__ import annotations

import doctest
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.needs import skip_if_missing, skipping_what_is_missing

SKIPPED = 77  # The status of a page that is skipped; it writes the reason.
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^#{1,6} (.+)$", re.MULTILINE)
_LINK = re.compile(r"\]\(([^)\s]+)\)")


class Block(NamedTuple):
    """A fenced block of a page: the language, the code, and the line it begins on."""

    language: str
    code: str
    line: int


def blocks(text: str) -> list[Block]:
    """Return the fenced blocks of a Markdown text."""
    return [Block(found[1], found[2], text.count("\n", 0, found.start(2))) for found in _BLOCK.finditer(text)]


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a Markdown text."""
    found: Counter[str] = Counter()
    result = set()
    for heading in _HEADING.findall(_BLOCK.sub("", text)):
        title = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading.strip())  # Of a link, only the text counts.
        anchor = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        result.add(f"{anchor}-{found[anchor]}" if found[anchor] else anchor)
        found[anchor] += 1
    return result


def links(text: str) -> list[str]:
    """Return the targets of the links in a Markdown text, outside of its fenced blocks."""
    return _LINK.findall(_BLOCK.sub("", text))


def broken_links(path: Path) -> list[str]:
    """Return the relative links of a page whose file, or whose heading in a Markdown file, does not exist."""
    broken = []
    for link in links(path.read_text(encoding="utf-8")):
        name, _, anchor = link.partition("#")
        target = path.parent / name if name else path
        if "://" in link or (target.exists() and not anchor):
            continue
        if target.suffix != ".md" or not target.exists() or anchor not in anchors(target.read_text(encoding="utf-8")):
            broken.append(link)
    return broken


class Runner(doctest.DocTestRunner):
    """A runner that skips when an example needs a package that is not installed."""

    def report_unexpected_exception(self, out: Any, test: Any, example: Any, exc_info: Any) -> None:
        skip_if_missing(exc_info[1])
        super().report_unexpected_exception(out, test, example, exc_info)


def run_examples(test: doctest.DocTest) -> None:
    """Run a doctest, and report all its failures in one."""
    failures: list[str] = []
    Runner(verbose=False).run(test, out=failures.append, clear_globs=False)
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
            with skipping_what_is_missing():
                exec(compile("\n" * line + code, str(path), "exec"), names)


if __name__ == "__main__":
    try:
        run_page(Path(sys.argv[1]), Path(sys.argv[1]).read_text(encoding="utf-8"))
    except pytest.skip.Exception as skipped:
        sys.stdout.write(str(skipped))
        sys.exit(SKIPPED)
