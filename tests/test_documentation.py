"""Every example of the README, the docs and the docstrings is executed, and its output compared.

In Markdown a `python` block is either a doctest, with `>>>` and the output below, or plain code. The blocks of one file
share their names. A page that needs another package says so in a comment. It runs in a new interpreter, and is skipped
if the package is not installed. Examples run in a temporary folder, so that they may write files.
"""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import hookline
from tests.support.documentation import SKIPPED, blocks, broken_links, links, run_examples, run_page
from tests.support.needs import PACKAGES, skipping_what_is_missing

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MODULES = sorted(module.name for module in pkgutil.walk_packages(hookline.__path__, "hookline."))
FOR_CONTRIBUTORS = [
    ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md", "explorer/README.md")
]
LANGUAGES = {"python", "sh", "text"}
_NEEDS = re.compile(r"^<!-- needs: ([\w, ]+) -->$", re.MULTILINE)


def run_page_by_itself(path: Path) -> None:
    """Run a page in a new interpreter: some packages change torch for the whole process when they are imported."""
    paths = [str(Path(hookline.__file__).parent.parent), str(ROOT)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.documentation", str(path)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )
    if done.returncode == SKIPPED:
        pytest.skip(done.stdout)
    if done.returncode:
        pytest.fail(done.stdout + done.stderr, pytrace=False)


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("path", PAGES[1:], ids=lambda path: str(path.relative_to(ROOT)))
def test_every_example_of_a_page_gives_what_it_shows(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = path.read_text(encoding="utf-8")
    needs = [name for names in _NEEDS.findall(text) for name in names.split(", ")]
    missing = [PACKAGES.get(name, name) for name in needs if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    if needs:
        run_page_by_itself(path)
    else:
        run_page(path, text)


def test_every_example_of_the_readme_gives_what_it_shows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_page(PAGES[0], PAGES[0].read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", ["hookline", *MODULES])
def test_every_example_of_a_docstring_gives_what_it_shows(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with skipping_what_is_missing():
        module = importlib.import_module(name)
    for test in doctest.DocTestFinder(exclude_empty=True).find(module, name):
        torch.manual_seed(0)
        run_examples(test)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_example_of_a_page_is_passed_over(path):
    text = path.read_text(encoding="utf-8")
    found = blocks(text)
    assert text.count("```") == 2 * len(found), "a fence is not closed, or not at the start of its line"
    assert {block.language for block in found} <= LANGUAGES
    assert not [block.line for block in found if block.language != "python" and ">>>" in block.code]


@pytest.mark.parametrize("path", [*PAGES, *FOR_CONTRIBUTORS], ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_a_heading_of_it(path):
    assert not broken_links(path)


def test_the_index_of_the_docs_lists_every_page():
    docs = ROOT / "docs"
    listed = links((docs / "README.md").read_text(encoding="utf-8"))
    assert {page.name for page in docs.glob("*.md")} - {"README.md"} <= set(listed)


@pytest.mark.parametrize(
    ("link", "broken"),
    [
        ("other.md", False),
        ("other.md#stop-early", False),
        ("other.md#generate-1", False),
        ("#torchcompile", False),
        ("https://example.com/#nothing", False),
        ("missing.md", True),
        ("other.md#stop", True),
        ("other.md#a-comment", True),
        ("#stop-early", True),
        ("picture.png#stop-early", True),
    ],
)
def test_a_link_to_a_missing_file_or_heading_is_found(link, broken, tmp_path):
    (tmp_path / "picture.png").touch()
    code = "```sh\n# a comment\n```\n"
    (tmp_path / "other.md").write_text(f"## [Stop](other.md) early\n\n## generate\n\n## `generate`\n\n{code}")
    page = tmp_path / "page.md"
    page.write_text(f"# torch.compile\n\n[text]({link})\n")
    assert broken_links(page) == ([link] if broken else [])


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("```python\n>>> 1 + 1\n3\n```\n", "Expected:\n    3\nGot:\n    2"),
        ("```python\nnumber = 1\n```\n\n```python\n>>> number\n2\n```\n", "Got:\n    1"),
        ("```python\n>>> import warnings\n>>> warnings.warn('old')\n```\n", "UserWarning: old"),
    ],
    ids=["output", "names", "warning"],
)
def test_a_wrong_example_is_found(code, problem):
    with pytest.raises(pytest.fail.Exception, match=problem):
        run_page(Path("page.md"), code)


def test_plain_code_that_fails_is_found():
    with pytest.raises(ZeroDivisionError):
        run_page(Path("page.md"), "```python\n1 / 0\n```\n")
