"""docs/errors.md quotes every warning, and quotes nothing that hookline does not say."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PROSE = re.sub(r"```.*?```|`[^`]*`", "", " ".join((ROOT / "docs" / "errors.md").read_text().split()))
QUOTED = re.findall(r'"([^"]+)"', PROSE)
CODE = {path: ast.parse(path.read_text()) for path in sorted((ROOT / "src" / "hookline").rglob("*.py"))}
WHY = CODE[ROOT / "src" / "hookline" / "_why_nothing_passed.py"]
SENTENCES = {node.name: node for node in WHY.body if isinstance(node, ast.FunctionDef)}


def literals(node: ast.AST) -> str:
    """Return the text that stands in a piece of code, on a new line wherever something is put into it."""
    return "\n".join(
        one.value for one in ast.walk(node) if isinstance(one, ast.Constant) and isinstance(one.value, str)
    )


def text_of(call: ast.Call) -> str:
    """Return the text of a warning, with that of the sentences it asks `_why_nothing_passed.py` for."""
    asked = {node.attr for node in ast.walk(call) if isinstance(node, ast.Attribute)}
    return "\n".join([literals(call), *(literals(node) for name, node in SENTENCES.items() if name in asked)])


def test_every_warning_can_be_found_on_the_page() -> None:
    calls = [
        (path.name, node.lineno, text_of(node))
        for path, tree in CODE.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "warn" and "compat" not in path.parts
    ]
    said = [call for call in calls if len(call[2].split()) > 4]  # Others are given a text that is made elsewhere.
    assert len(said) > 20
    assert [call for call in said if not any(quoted in call[2] for quoted in QUOTED)] == []


def test_the_page_quotes_what_hookline_says() -> None:
    said = "\n".join(map(literals, CODE.values()))
    assert len(QUOTED) > 50
    assert [quoted for quoted in QUOTED if quoted not in said] == []
