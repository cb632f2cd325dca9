"""The structure of the code: imports point one way, few files write to models, importing has no side effects."""

from __future__ import annotations

import ast
import functools
import inspect
import os
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

import hookline as hl
from hookline import _kernel

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "hookline"
MOST_LINES = 800

# Each package, or file of the root, may import those above it. Those from `_kernel` on are clients of the kernel.
KERNEL = [
    "_torch",
    "errors",
    "_tables",
    "_stats",
    "_progress",
    "_untrusted_files",
    "_values",
    "_option_checks",
    "_sites",
    "_plot",
]
KERNEL += ["parallel", "_open_blocks", "_why_nothing_passed", "_cache", "_engine", "_hooks", "_kernel"]
CLIENTS = ["_scan", "_jobs", "_store", "_sweep", "_compare", "_watch", "callbacks", "_explore", "_harvest", "points"]
CLIENTS += ["compat", "_cli"]
ORDER = [*KERNEL, *CLIENTS, "__main__"]
# Packages that a client may import beside hookline's public names and the clients above it. `_plot` is among them and
# not a client: `Cache` and `Store` can be plotted, and it knows sites and values, but no engine, cache or hooks.
FOUNDATIONS = {"errors", "_tables", "_stats", "_progress", "_untrusted_files", "_plot", "_kernel", "_torch"}

NAMES = {
    *("Cache", "Comparison", "Diverged", "Hook", "HookPoint", "HookedModel", "Hooks", "Site"),
    *(
        "attached",
        "auto_hook",
        "capture",
        "check",
        "clear",
        "compare",
        "edit",
        "explore",
        "patch",
        "run",
        "scan",
        "sites",
        "skip",
    ),
    *("EditError", "HooklineError", "NeverFired", "NotCaptured", "SiteError", "StaleValue", "StoreError"),
    *("BadSample", "CacheFull", "Harvest", "Store", "harvest"),
    *("Generation", "Images", "Texts"),
    *("HooklineWarning", "StopForward"),
    *("BadValue", "pinned", "Sweep", "sweep", "watch"),
    *("tell_tokens", "tokens"),
}

# These may write to a module: the engine shadows forwards, and a run on fake tensors undoes its own changes.
MAY_WRITE = ("_engine.", "_scan.fake_run")

# Assembled from pieces, so that the search does not find this file.
ELSEWHERE = [
    *(f"/{folder}/" for folder in ("ho" + "me", "Us" + "ers", "ro" + "ot", "wo" + "rk", "t" + "mp", "mn" + "t")),
    *("py" + "pi.", "python" + "hosted", "art" + "ifactory", "dev" + "pi", "ne" + "xus", "--index" + "-url"),
]


# The names that the kernel lists for its clients.
LISTED = {name for name in vars(_kernel) if not name.startswith("__")}


def module_of(path: Path) -> str:
    """Return the name of a source file, below hookline: "_engine.tap", and "" for hookline itself."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


ALL = {module_of(path): path for path in sorted(SOURCE.rglob("*.py"))}
COMPAT = {name: path for name, path in ALL.items() if name.partition(".")[0] == "compat"}
FILES = {name: path for name, path in ALL.items() if name not in COMPAT}


@functools.cache
def tree_of(path: Path) -> ast.Module:
    """Parse a source file."""
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@pytest.fixture(autouse=True, scope="module")
def trees() -> Iterator[None]:
    """Forget the parsed files at the end: half a million objects would slow down the garbage collector."""
    yield
    tree_of.cache_clear()


def imports(tree: ast.Module) -> Iterator[str]:
    """Return the parts of hookline that a module imports, including imports inside functions and for types only."""
    for statement in ast.walk(tree):
        if isinstance(statement, ast.Import):
            found = [alias.name for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom) and statement.module is not None:
            found = [f"{statement.module}.{alias.name}" for alias in statement.names]
        else:
            continue
        for name in found:
            package, _, rest = name.partition(".")
            if package == "hookline":
                yield rest if rest in ALL else rest.rpartition(".")[0]


def hidden_imports(tree: ast.Module) -> Iterator[str]:
    """Return the parts of hookline that a module uses without an import: `hl._hooks`, "hookline._hooks.hooks"."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("hl", "hookline"):
            yield from [node.attr] if re.match(r"_[a-z]", node.attr) else []
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module") and node.args:
            text = ast.unparse(node.args[0])
            yield from [] if "hookline" not in text else [text]


def packages_of(name: str) -> set[str]:
    """Return the other packages that a package imports; "" for hookline's public names."""
    files = [path for module, path in ALL.items() if module.partition(".")[0] == name]
    found = {imported.partition(".")[0] for path in files for imported in imports(tree_of(path))}
    return found - {name}


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the groups of modules that import each other, directly or through others."""
    reached: dict[str, set[str]] = {}
    for start in graph:
        reached[start] = set()
        waiting = [start]
        while waiting:
            new = graph[waiting.pop()] - reached[start]
            reached[start] |= new
            waiting += new
    return sorted({tuple(sorted(o for o in reached[n] if n in reached[o])) for n in graph if n in reached[n]})


def writes_to_modules(tree: ast.Module) -> Iterator[int]:
    """Return the lines that set a `forward` of an object other than self, or anything in a `__dict__`."""
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, (ast.Assign, ast.Delete)):
            targets = node.targets
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
            targets = [node.target]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            changes = node.func.attr in ("update", "pop", "clear", "setdefault", "__setitem__", "__delitem__")
            targets = [ast.Subscript(node.func.value)] if changes else []
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("setattr", "delattr"):
            targets = [ast.Attribute(node.args[0], str(getattr(node.args[1], "value", "")))]
        for target in targets:
            held = target.value if isinstance(target, ast.Subscript) else None
            is_forward = isinstance(target, ast.Attribute) and target.attr == "forward" and not _is_self(target.value)
            if is_forward or (isinstance(held, ast.Attribute) and held.attr == "__dict__"):
                yield node.lineno


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def tracked_files() -> list[Path]:
    """Return the text files of the project, as a clone would have them."""
    try:
        listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs a clone of the repository")
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]


# Names that look like files of hookline, but are files of users or of the standard library.
NOT_OURS = {"folder/file.py", "mine.py", "their_script.py", "threading.py", "typing.py"}
_FILE_NAME = re.compile(r"(?<![\w<>*.-])(?:[\w-]+/)*[\w-]+\.(?:py|ts)\b")


def prose_of(path: Path) -> str:
    """Return the comments and docstrings of a Python file; all of any other file."""
    if path.suffix != ".py":
        return path.read_text(encoding="utf-8")
    with path.open("rb") as file:
        comments = [token.string for token in tokenize.tokenize(file.readline) if token.type == tokenize.COMMENT]
    holders = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = [ast.get_docstring(node) or "" for node in ast.walk(tree_of(path)) if isinstance(node, holders)]
    return "\n".join([*comments, *docstrings])


def files_named_in(text: str) -> set[str]:
    """Return the Python and TypeScript files that a text names, with as much of their paths as it gives."""
    return {*_FILE_NAME.findall(text)} - NOT_OURS


def python(code: str) -> str:
    """Run code in a new interpreter, and return its output."""
    command = [sys.executable, "-c", code]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE.parent)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_package_has_its_place_in_the_order():
    assert {name.partition(".")[0] for name in ALL} - {""} == {*ORDER}


@pytest.mark.parametrize("name", KERNEL)
def test_a_package_of_the_kernel_imports_only_those_above_it(name):
    assert packages_of(name) <= {*ORDER[: ORDER.index(name)]}


@pytest.mark.parametrize("name", CLIENTS)
def test_a_client_reaches_no_further_than_the_kernel_s_list(name):
    assert packages_of(name) <= {"", "parallel", *FOUNDATIONS, *CLIENTS[: CLIENTS.index(name)]}


# These load files of their own package by name: a callback, an older library.
LOAD_THEIR_OWN = {"callbacks": "hookline.callbacks.", "compat": "hookline.compat."}


@pytest.mark.parametrize("name", [*CLIENTS, "__main__"])
def test_a_client_reaches_nothing_past_its_imports(name):
    for module, path in ALL.items():
        if module.partition(".")[0] == name:
            own = LOAD_THEIR_OWN.get(module, " ")
            assert not [text for text in hidden_imports(tree_of(path)) if own not in text], module


def test_a_reach_past_the_imports_is_found():
    code = "hl._hooks.hooks\nimportlib.import_module('hookline._engine')\nhl.capture\nimport_module('rich')"
    assert {*hidden_imports(ast.parse(code))} == {"_hooks", "'hookline._engine'"}


def test_the_command_line_starts_by_a_client():
    assert packages_of("__main__") <= {"", *CLIENTS}


@pytest.mark.parametrize("name", [*CLIENTS, *sorted(FOUNDATIONS)])
def test_a_client_takes_only_public_names_from_hookline_itself(name):
    for module, path in ALL.items():
        if module.partition(".")[0] == name:
            for node in ast.walk(tree_of(path)):
                if isinstance(node, ast.ImportFrom) and node.module == "hookline":
                    assert {alias.name for alias in node.names} <= NAMES | {"__version__"}, module


def test_every_name_on_the_kernel_s_list_has_a_sentence_and_a_client():
    text = ALL["_kernel"].read_text(encoding="utf-8")
    listed = dict(re.findall(r"^(?:from .* import|   ) (\w+) as \1(?:,|)  # (\S.*\.)$", text, flags=re.MULTILINE))
    used = set()
    for module, path in ALL.items():
        for node in ast.walk(tree_of(path)) if module.partition(".")[0] in {*CLIENTS, *FOUNDATIONS} else ():
            if isinstance(node, ast.ImportFrom) and node.module == "hookline._kernel":
                used |= {alias.name for alias in node.names}
    assert {*listed} == {*LISTED} == used


def test_no_files_import_each_other():
    graph = {name: set(imports(tree_of(path))) - {name, ""} for name, path in ALL.items() if name}
    assert cycles(graph) == []


def test_imports_and_cycles_are_found():
    tree = ast.parse(
        "if TYPE_CHECKING:\n    from hookline import _cli\ndef f():\n    from hookline.errors import HooklineError"
    )
    assert list(imports(tree)) == ["_cli", "errors"]
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [("b", "c")]


def test_contributing_lists_every_package_in_its_order():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("The kernel, in this order:")[2]
    found = re.findall(r"`([^`]+)`", text.partition("\n\n")[0])
    assert found == [name for name in ORDER if name != "__main__"]


def test_the_exported_names_are_these():
    assert set(hl.__all__) == NAMES
    assert all(hasattr(hl, name) for name in NAMES)
    assert {*dir(hl)} == NAMES | {"callbacks", "compat", "parallel", "points", "__version__"}


@pytest.mark.parametrize("name", ["callbacks", "compat", "parallel", "points"])
def test_tab_completion_shows_the_public_names_of_a_package(name):
    package = getattr(hl, name)
    facades = {*package.NAMES.values()} if name == "compat" else set()
    assert {*dir(package)} == {*package.__all__} | facades
    assert all(hasattr(package, one) for one in facades)


@pytest.mark.parametrize("name", ALL, ids=lambda name: name or "hookline")
def test_a_file_stays_small(name):
    assert len(ALL[name].read_text(encoding="utf-8").splitlines()) <= MOST_LINES


def reaches_behind_the_public_names(tree: ast.Module, name: str) -> Iterator[str]:
    """Return the names that a module of `compat` uses that are neither public nor of its own package."""
    own = ("_torch", "compat.registrar", ".".join(name.split(".")[:2]))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "hookline":
            yield from (alias.name for alias in node.names if alias.name not in NAMES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hookline."):
            rest = (node.module or "").partition(".")[2]
            if not (rest.startswith(own) or (name == "compat" and rest.startswith("compat"))):
                yield rest
        elif isinstance(node, ast.Import):
            found = [alias.name.partition(".")[2] for alias in node.names if alias.name.startswith("hookline.")]
            yield from (rest for rest in found if not rest.startswith(own))
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "hl":
            yield from [] if node.attr in NAMES else [f"hl.{node.attr}"]
        elif isinstance(node, ast.Attribute) and node.attr in PRIVATE and not _is_self(node.value):
            yield node.attr


# The private attributes of hookline's public objects: those that begin with an underscore.
OBJECTS = (hl.Hooks, hl.Hook, hl.Cache, hl.HookedModel, hl.HookPoint)
HOLDERS = [holder for kind in OBJECTS for holder in kind.__mro__ if holder.__module__.startswith("hookline")]
PRIVATE = {
    name
    for holder in HOLDERS
    for name in (*vars(holder), *re.findall(r"\bself\.(_\w+)", Path(inspect.getfile(holder)).read_text("utf-8")))
    if re.match(r"_[a-z]", name)
} - {"_replace", "_make", "_asdict", "_fields", "_repr_html_"}  # These are public on named tuples.


# The private attributes of the objects that the kernel gives to clients.
PRIVATE_TO_KERNEL = {
    name
    for holder in (hl.Hooks, hl.Hook, hl.Cache)
    for name in (*vars(holder), *re.findall(r"\bself\.(_\w+)", inspect.getsource(holder)))
    if re.match(r"_[a-z]", name)
} - {"_repr_html_", "_table"}


def touches_the_kernel(tree: ast.Module) -> Iterator[str]:
    """Return the attributes, private to the kernel, that a client reads on objects other than self."""
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    own |= {target.attr for target in ast.walk(tree) if isinstance(target, ast.Attribute) and _is_self(target.value)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in PRIVATE_TO_KERNEL - own and not _is_self(node.value):
            yield f"line {node.lineno}: {node.attr}"


@pytest.mark.parametrize("name", CLIENTS)
def test_a_client_touches_no_private_attribute_of_hooks_and_caches(name):
    files = {module: path for module, path in ALL.items() if module.partition(".")[0] == name}
    found = {module: list(touches_the_kernel(tree_of(path))) for module, path in files.items()}
    assert not {module: lines for module, lines in found.items() if lines}


def test_a_touch_of_the_kernel_is_found():
    assert list(touches_the_kernel(ast.parse("hooks._lifecycle.verb = ''"))) == ["line 1: _lifecycle"]
    assert list(touches_the_kernel(ast.parse("cache._keep(site, [])"))) == ["line 1: _keep"]


@pytest.mark.parametrize("name", COMPAT)
def test_compat_uses_only_what_is_public(name):
    assert not list(reaches_behind_the_public_names(tree_of(COMPAT[name]), name))


@pytest.mark.parametrize(
    "code",
    [
        "from hookline.errors import warn",
        "import hookline._hooks",
        "from hookline import _sites",
        "from hookline.compat.torchhook import HookManager",
        "hl.errors",
        "hooks._lifecycle.remove(taps)",
        "hook._tap",
    ],
)
def test_what_is_not_public_is_found(code):
    assert list(reaches_behind_the_public_names(ast.parse(code), "compat.nice_hooks.hooks"))


@pytest.mark.parametrize("name", [name for name in FILES if not name.startswith(MAY_WRITE)])
def test_only_the_engine_writes_to_a_module(name):
    assert not list(writes_to_modules(tree_of(FILES[name])))


@pytest.mark.parametrize(
    "code",
    [
        "module.forward = new",
        "del module.forward",
        "module.__dict__['forward'] = new",
        "module.__dict__.update(names)",
        "setattr(module, 'forward', new)",
    ],
)
def test_a_write_to_a_module_is_found(code):
    assert list(writes_to_modules(ast.parse(code))) == [1]


@pytest.mark.process
def test_importing_hookline_imports_nobody_but_torch_and_safetensors():
    code = """
import sys
import torch, safetensors, safetensors.torch, warnings
before = set(sys.modules)
warnings.simplefilter("error")
from hookline import Cache, Hooks, Site, attached, capture, pinned
new = {name.partition(".")[0] for name in set(sys.modules) - before}
print(*sorted(new - {"hookline"} - sys.stdlib_module_names))
print("torch._dynamo" in sys.modules, "hookline.compat" in sys.modules)
"""
    assert python(code).splitlines() == ["", "False False"]


@pytest.mark.process
def test_importing_hookline_changes_nothing_in_torch_or_in_python():
    code = """
import atexit, copyreg, gc, sys, threading, warnings
import torch, safetensors.torch
from torch import nn

def state():
    modules = vars(torch.nn.modules.module)
    tables = {name: list(table) for name, table in modules.items() if name.endswith("_hooks")}
    flags = [torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype()]
    flags += [torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), torch.get_rng_state().tolist()]
    flags += [torch.backends.mha.get_fastpath_enabled(), torch.autograd.is_multithreading_enabled()]
    classes = [dict(vars(kind)) for kind in (nn.Module, nn.Linear, torch.Tensor, torch.autograd.Function)]
    python = [list(gc.callbacks), gc.get_threshold(), dict(copyreg.dispatch_table), list(warnings.filters)]
    python += [sys.excepthook, sys.unraisablehook, sys.gettrace(), atexit._ncallbacks(), threading.active_count()]
    return tables, flags, classes, set(vars(torch)), set(vars(nn)), python

before = state()
from hookline import Cache, Hooks, Site, attached, capture, pinned
print(state() == before)
"""
    assert python(code) == "True\n"


@pytest.mark.process
def test_importing_hookline_imports_torch_only_when_a_name_is_used():
    code = """
import sys
import hookline, hookline.errors
from hookline import HooklineError
print("capture" in dir(hookline), "torch" in sys.modules)
hookline.capture
print("capture" in vars(hookline), "torch" in sys.modules)
"""
    assert python(code).splitlines() == ["True False", "True True"]


@pytest.mark.process
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that start with torch imported")
def test_every_public_name_can_be_the_first_that_is_used():
    firsts = {getattr(hl, name).__module__: name for name in sorted(NAMES)}  # Names of one file are alike.
    code = f"""
import os
import torch, hookline

for name in {[*firsts.values()]}:
    child = os.fork()
    if child == 0:
        getattr(hookline, name)
        os._exit(0)
    print(name if os.waitpid(child, 0)[1] else "", end="")
"""
    assert python(code) == ""


@pytest.mark.process
def test_the_first_use_may_be_inside_any_mode():
    code = """
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
import hookline as hl

def first_use(value):
    with torch.inference_mode(), torch.device("meta"), FakeTensorMode():
        hl.capture
    return value.sum()

torch.func.grad(first_use)(torch.ones(2))

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True), nn.Linear(2, 2))
x = torch.ones(3, 2, requires_grad=True)
with hl.capture(model, "0", "1", "0:grad_output", "2:grad_input", "0.weight/*") as acts:
    model(x).sum().backward()
first = x @ model[0].weight.T + model[0].bias
print(torch.allclose(acts["0"], first), torch.allclose(acts["1"], first.relu()))
print(torch.equal(acts["0"], acts["0.weight/linear"]))
print(torch.allclose(acts["2:grad_input"], model[2].weight.sum(0).expand(3, 2)))
print(torch.allclose(acts["0:grad_output"], acts["2:grad_input"] * (first > 0)))
print({type(value).__name__ + str(value.is_inference()) for value in acts.values()})
"""
    assert python(code).splitlines() == ["True True", "True", "True", "True", "{'TensorFalse'}"]


@pytest.mark.process
def test_no_file_names_a_path_of_one_machine_or_the_host_of_a_package_registry():
    found = []
    for path in tracked_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found += [f"{path.relative_to(ROOT)}: {word}" for word in ELSEWHERE if word in text.lower().replace("~", "")]
    assert not found


@pytest.mark.process
def test_every_source_file_that_is_named_is_there():
    """In comments and docstrings, in CONTRIBUTING.md and the docs, and in the sources of the explorer page."""
    files = tracked_files()
    endings = {
        "/".join(path.parts[-count:]) for path in files for count in range(1, len(path.relative_to(ROOT).parts) + 1)
    }
    folders = ("src", "tests", "benchmarks", "docs", "explorer")
    texts = [path for path in files if path.relative_to(ROOT).parts[0] in folders]
    texts = [path for path in texts if path.suffix in (".py", ".ts", ".md") or path.name == "package.json"]
    stale = []
    for path in [*texts, ROOT / "CONTRIBUTING.md"]:
        if files_named_in(path.read_text(encoding="utf-8")) <= endings:
            continue  # To tell comments from code takes long.
        stale += [f"{path.relative_to(ROOT)}: {name}" for name in sorted(files_named_in(prose_of(path)) - endings)]
    assert not stale, "\n".join(stale)


def test_a_named_file_is_found_with_its_folder():
    text = "As `_kernel.py`, tree.ts and test_<file>.py say (see mine.py, v1.pyc)."
    assert files_named_in(text) == {"_kernel.py", "tree.ts"}
