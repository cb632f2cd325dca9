"""docs/errors.md quotes every warning, and quotes no text that is not in hookline."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
SOURCE = ROOT / "src" / "hookline"
PROSE = re.sub(r"```.*?```|`[^`]*`", "", " ".join((ROOT / "docs" / "errors.md").read_text().split()))
QUOTED = re.findall(r'"([^"]+)"', PROSE)


@pytest.fixture(scope="module")
def code() -> dict[Path, ast.Module]:
    """The parsed source files. They are half a million objects, which must not outlive these tests."""
    return {path: ast.parse(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}


def literals(node: ast.AST) -> str:
    """Return the string literals in a piece of code, one per line."""
    return "\n".join(
        one.value for one in ast.walk(node) if isinstance(one, ast.Constant) and isinstance(one.value, str)
    )


def text_of(call: ast.Call, sentences: Mapping[str, ast.AST]) -> str:
    """Return the text of a warning, with the sentences it takes from `_why_nothing_passed.py`."""
    asked = {node.attr for node in ast.walk(call) if isinstance(node, ast.Attribute)}
    return "\n".join([literals(call), *(literals(node) for name, node in sentences.items() if name in asked)])


def test_every_warning_can_be_found_on_the_page(code: dict[Path, ast.Module]) -> None:
    why = code[SOURCE / "_why_nothing_passed.py"].body
    sentences = {node.name: node for node in why if isinstance(node, ast.FunctionDef)}
    calls = [
        (path.name, node.lineno, text_of(node, sentences))
        for path, tree in code.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "warn" and "compat" not in path.parts
    ]
    said = [call for call in calls if len(call[2].split()) > 4]  # The others get their text from a variable.
    assert len(said) > 20
    assert [call for call in said if not any(quoted in call[2] for quoted in QUOTED)] == []


def test_the_page_quotes_what_hookline_says(code: dict[Path, ast.Module]) -> None:
    said = "\n".join(map(literals, code.values()))
    assert len(QUOTED) > 50
    assert [quoted for quoted in QUOTED if quoted not in said] == []
