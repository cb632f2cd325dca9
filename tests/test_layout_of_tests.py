"""The tests are a net under the source: they go through public names and written contracts, and share their helpers."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from hookline import _kernel

ROOT = Path(__file__).parent.parent
TESTS = ROOT / "tests"
MOST_LINES = 800
SMALL_HELPER = 5  # Lines: a helper this short may be written in several test files.

FILES = sorted(TESTS.rglob("*.py"))

# The parts of hookline that a test may import besides public names. Each is written down for others to build on.
CONTRACTS = {
    "_kernel": "the names for clients, with a sentence for each",
    "_tables": "`Table` and `Tabular`, which draw every table",
    "_plot": "charts from plain numbers, for all that has a method `plot`",
    "_stats": "the numbers that describe a tensor",
    "_progress": "the bar that long work shows",
    "_cli.main": "the entry of the command line",
    "_store.disk_format": "the files of a store",
    "_jobs.turns": "which units each process does, for every client that divides its work",
}
# These look inside on purpose, and say why at their top.
INSIDE = {
    "support/states.py": "what is left behind in this process",
    "support/stores.py": "stores as an earlier or interrupted run would have left them",
    "watch/test_rerun.py": "the way a watch works on a GPU, tried on the CPU",
}


def private_names(tree: ast.Module) -> Iterator[str]:
    """Return the private parts of hookline that a file imports, reaches through `hl`, or replaces by their name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "hookline":
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.startswith("hookline.")]
        elif (
            isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("hl", "hookline")
        ):
            names = [f"hookline.{node.attr}"]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("setattr", "import_module", "patch")):
            texts = [one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
            names = [text for text in texts if text.startswith("hookline.")]
        else:
            continue
        for name in names:
            inside = name.split(".")[1:]
            if any(part.startswith("_") and not part.startswith("__") for part in inside):
                yield ".".join(inside)


def is_contract(name: str) -> bool:
    """Return True if a private part of hookline is written down as a contract."""
    return any(name == contract or name.startswith(f"{contract}.") for contract in CONTRACTS)


def test_tests_go_through_public_names_and_written_contracts():
    names = {path: path.relative_to(TESTS).as_posix() for path in FILES}
    found = {
        name: [one for one in private_names(ast.parse(path.read_text(encoding="utf-8"))) if not is_contract(one)]
        for path, name in names.items()
        if name not in INSIDE
    }
    assert not {name: private for name, private in found.items() if private}


@pytest.mark.parametrize(
    "code",
    [
        "from hookline._engine.tap import Tap",
        "from hookline import _engine",
        "import hookline._cache.record",
        "from hookline.compat.registrar import _names",
        "hl._torch",
        "monkeypatch.setattr('hookline._engine.tap.Tap', None)",
        "importlib.import_module('hookline._engine')",
    ],
)
def test_a_reach_behind_the_public_names_is_found(code):
    assert [name for name in private_names(ast.parse(code)) if not is_contract(name)]


@pytest.mark.parametrize(
    "code", ["from hookline._kernel import leaves", "hl.__version__", "from hookline.points import HookPoint"]
)
def test_what_is_public_or_written_down_is_not_found(code):
    assert not [name for name in private_names(ast.parse(code)) if not is_contract(name)]


def test_what_tests_import_from_the_kernel_is_on_its_list():
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
            if isinstance(node, ast.ImportFrom) and node.module == "hookline._kernel":
                assert {alias.name for alias in node.names} <= {*vars(_kernel)}, path


def test_no_file_is_long():
    lines = {path.relative_to(TESTS).as_posix(): len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    lines.pop("errors/wording.py")  # A table.
    assert not {name: number for name, number in lines.items() if number > MOST_LINES}


def test_no_file_imports_from_a_test_file():
    found = []
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found += [f"{path.relative_to(TESTS)}: {name}" for name in names if ".test_" in f".{name}"]
    assert not found, "what two test files need belongs in tests/support"


def reasons(tree: ast.Module) -> list[str]:
    """Return the reasons of the skips in a file; of a text with names in it, its beginning."""
    found = []
    for node in ast.walk(tree):
        name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        if name in ("pytest.skip", "pytest.importorskip", "pytest.mark.skip", "pytest.mark.skipif"):
            texts = [word.value for word in node.keywords if word.arg == "reason"]
            texts += node.args[:1] if name == "pytest.skip" else []
            texts = [text.values[0] if isinstance(text, ast.JoinedStr) else text for text in texts]
            found += [text.value for text in texts if isinstance(text, ast.Constant)]
    return found


def test_every_skip_says_what_it_needs():
    trees = {path: ast.parse(path.read_text(encoding="utf-8"), str(path)) for path in FILES}
    found = [(str(path.relative_to(TESTS)), reason) for path, tree in trees.items() for reason in reasons(tree)]
    assert len(found) > 20
    assert not [one for one in found if not one[1].startswith("needs ")]


def shape_of(node: ast.FunctionDef | ast.ClassDef) -> str:
    """Return the code of a helper without its name, docstrings and annotations."""
    tree = ast.parse(ast.unparse(node))
    tree.body[0].name = ""
    for part in ast.walk(tree):
        if isinstance(part, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(part) is not None:
            part.body = part.body[1:]
        if isinstance(part, ast.FunctionDef):
            part.returns = None
        if isinstance(part, ast.arg):
            part.annotation = None
    return ast.dump(tree)


def test_no_helper_is_written_twice():
    found: dict[str, list[str]] = {}
    for path in FILES:
        for node in ast.parse(path.read_text(encoding="utf-8"), str(path)).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.end_lineno - node.lineno >= SMALL_HELPER:
                found.setdefault(shape_of(node), []).append(f"{path.relative_to(TESTS)}: {node.name}")
    twice = [places for places in found.values() if len(places) > 1]
    assert not twice, "what two test files need belongs in tests/support"


def test_the_shape_of_a_helper_does_not_depend_on_its_name_and_types():
    one, other, third = ast.parse(
        "def double(x: Tensor) -> Tensor:\n    'Twice.'\n    return 2 * x\n"
        "def twice(x):\n    return 2 * x\n"
        "def thrice(x):\n    return 3 * x\n"
    ).body
    assert shape_of(one) == shape_of(other) != shape_of(third)
