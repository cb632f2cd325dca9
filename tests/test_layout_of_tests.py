"""The tests mirror the source: `tests/<package>/test_<file>.py`. Shared helpers are in tests/support."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TESTS = ROOT / "tests"
SOURCE = ROOT / "src" / "hookline"
MOST_LINES = 800

# Folders that mirror no package: each tests a promise, or uses hookline from outside. They hold their own helpers.
SUITES = {"browser", "conformance", "failure_modes", "gpu", "odd_arguments", "properties"}
# Test files whose name begins with no file of their package. Keep this empty: name a test file after what it tests.
EXCEPTIONS: set[str] = set()

# Source files without a test file of their name, and the file that tests them through their callers.
TESTED_IN = {
    "__main__": "cli/test_main.py",
    "_cli/loss": "cli/test_capture_command.py",
    "_cli/options": "cli/test_capture_command.py",
    "_cli/output": "cli/test_main.py",
    "_engine/attach": "failure_modes/test_blocks_ended_in_any_way.py",
    "_engine/call_event": "engine/test_run_call.py",
    "_engine/generate_call": "engine/test_sequences_generate.py",
    "_engine/model_forward": "failure_modes/test_model_changed_while_hooked.py",
    "_engine/padding": "engine/test_sequences.py",
    "_engine/passing": "engine/test_sequences.py",
    "_engine/parameter_operations": "engine/test_parameters.py",
    "_engine/tap": "failure_modes/test_call_numbers_of_second_sequences.py",
    "_engine/unsupported_tracing": "failure_modes/test_models_scripted_or_traced.py",
    "_hooks/calls_and_tokens": "engine/test_sequences_generate.py",
    "_jobs/compare_specs": "harvest/test_resume.py",
    "_jobs/ray_pool": "harvest/test_ray.py",
    "_kernel": "test_architecture.py",
    "_open_blocks": "failure_modes/test_threads_tasks_and_forks.py",
    "_sites/members": "failure_modes/test_methods_as_sites.py",
    "_store/row_index": "store/test_rows.py",
    "_sweep/first_run": "sweep/test_packs.py",
    "_sweep/job": "sweep/test_share.py",
    "_sweep/portions": "sweep/test_share.py",
    "_sweep/sweeper": "sweep/test_packs.py",
    "_sweep/task": "sweep/test_packs.py",
    "_torch": "test_private_torch.py",
    "_untrusted_files": "failure_modes/test_files_hostile.py",
    "_values/containers": "failure_modes/test_containers_kept_intact.py",
    "compat/shared": "compat/test_nice_hooks.py",
    "errors": "test_error_page.py",
}
SMALL_HELPER = 5  # Lines: a helper this short may be written in several test files.

FILES = sorted(TESTS.rglob("*.py"))
TEST_FILES = [path for path in FILES if path.name.startswith("test_")]
PACKAGES = sorted({path.parent.name for path in TEST_FILES} - SUITES - {"tests"})


def source_of(package: str) -> Path:
    """Return the folder that a folder of tests mirrors: of the same name, or with an underscore in front."""
    found = [SOURCE / name for name in (package, f"_{package}") if (SOURCE / name).is_dir()]
    assert found, f"tests/{package} mirrors no package of hookline, and is not in SUITES"
    return found[0]


def is_about(name: str, subjects: set[str]) -> bool:
    """Return True if a test file has the name of a subject, or a subject and a topic: `cache`, `cache_slices`."""
    return any(name == subject or name.startswith(f"{subject}_") for subject in subjects)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_test_file_begins_with_the_name_of_a_file_of_its_package(package):
    # The package's name is for tests of the whole package.
    subjects = {path.stem for path in subjects_of(source_of(package))} | {package}
    names = {path.stem.removeprefix("test_") for path in TEST_FILES if path.parent.name == package}
    strange = {name for name in names if not is_about(name, subjects) and f"{package}/test_{name}.py" not in EXCEPTIONS}
    assert not strange, f"{strange} begin with none of {sorted(subjects)}"


def subjects_of(folder: Path) -> list[Path]:
    """Return the files of a package, and its subpackages."""
    inside = [path for path in folder.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()]
    return [path for path in inside if path.stem != "__init__"]


def test_every_source_file_has_a_test_file_of_its_name():
    """Other source files are in TESTED_IN, which has no unneeded entry."""
    without = set()
    for folder in [SOURCE, *(path for path in subjects_of(SOURCE) if path.is_dir())]:
        tests = TESTS if folder == SOURCE else TESTS / folder.name.removeprefix("_")
        names = {path.stem.removeprefix("test_") for path in tests.glob("test_*.py")}
        for path in subjects_of(folder):
            is_package = folder == SOURCE and path.is_dir()
            if not is_package and not any(is_about(name, {path.stem.removeprefix("_")}) for name in names):
                without.add(path.relative_to(SOURCE).with_suffix("").as_posix())
    assert without == {*TESTED_IN}
    assert all((TESTS / name).is_file() for name in TESTED_IN.values())


def test_a_name_is_about_a_file_or_a_topic_of_it():
    subjects = {"cache", "file"}
    assert [is_about(name, subjects) for name in ("cache", "cache_slices", "caches", "slices")] == [
        True,
        True,
        False,
        False,
    ]


def test_every_exception_is_a_test_file():
    assert all((TESTS / name).is_file() for name in EXCEPTIONS)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_folder_that_mirrors_a_package_holds_tests_alone(package):
    """Their helpers are in tests/support, or are fixtures in their conftest.py."""
    names = {path.name for path in FILES if path.parent.name == package} - {"__init__.py", "conftest.py"}
    assert not {name for name in names if not name.startswith("test_")}


def test_no_two_files_have_one_name():
    names = [path.name for path in FILES if path.name not in ("__init__.py", "conftest.py")]
    assert sorted(names) == sorted(set(names))


def test_no_file_is_long():
    lines = {str(path.relative_to(TESTS)): len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
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
