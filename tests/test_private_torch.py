"""Only `_torch.py` names private things of torch, and only it walks Python frames."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

SOURCE = Path(__file__).parent.parent / "src" / "hookline"
OWNER = SOURCE / "_torch.py"
OTHERS = sorted(path for path in SOURCE.rglob("*.py") if path != OWNER)

# Torch's private attributes of tensors, storages and modules. Subclasses may use these three.
FOR_SUBCLASSES = {"_parameters", "_buffers", "_modules"}
HOLDERS = (Tensor, torch.UntypedStorage, nn.Module, torch.autograd.Function)
ON_OBJECTS = {
    name
    for names in (*map(dir, HOLDERS), vars(nn.Module()), ("_use_count", "_schema", "_local_tensor"))
    for name in names
    if re.match(r"_[a-z]", name)
} - FOR_SUBCLASSES
OF_FRAMES = {"_getframe", "_current_frames", "currentframe", "f_locals", "f_back"}

# The hot path may read these attributes: it runs at every call of a captured module, and a function call is slower.
HOT = ("hot_path", {"_version", "_cdata"})


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def names_of_torch(tree: ast.Module) -> set[str]:
    """Return the names that a file imports from torch, `torch` itself among them."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {one.asname or "torch" for one in node.names if one.name.split(".")[0] == "torch"}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            found |= {one.asname or one.name for one in node.names}
    return found


def chain(node: ast.expr) -> list[str]:
    """Return the names in an expression like `torch.nn.Module` as a list; an empty list for other expressions."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.insert(0, node.attr)
        node = node.value
    return [node.id, *names] if isinstance(node, ast.Name) else []


def without_hot_path(node: ast.AST, allowed: frozenset[str] = frozenset()) -> Iterator[ast.AST]:
    """Return every node of a file except the attributes that the hot path may read."""
    for child in ast.iter_child_nodes(node):
        here = frozenset(HOT[1]) if isinstance(child, ast.FunctionDef) and child.name == HOT[0] else allowed
        if not (isinstance(child, ast.Attribute) and child.attr in here):
            yield child
        yield from without_hot_path(child, here)


def private_torch(tree: ast.Module) -> Iterator[str]:
    """Return the private things of torch that a file names."""
    roots = names_of_torch(tree)
    for node in without_hot_path(tree):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names if re.match(r"torch\b.*\._", one.name))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            paths = [f"{node.module}.{one.name}" for one in node.names]
            yield from (path for path in paths if any(map(is_private, path.split("."))))
        elif isinstance(node, ast.Attribute):
            names = chain(node)
            if names and names[0] in roots and any(map(is_private, names[1:])):
                yield ".".join(names)
            elif node.attr in ON_OBJECTS and names[:1] not in (["self"], ["cls"]):
                yield f".{node.attr}"
        elif isinstance(node, ast.Call) and chain(node.func)[-1:] in (["getattr"], ["hasattr"], ["attrgetter"]):
            given = [one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
            is_of_torch = bool(chain(node.args[0])) and chain(node.args[0])[0] in roots
            yield from (name for name in given if name in ON_OBJECTS or (is_of_torch and is_private(name)))
        elif isinstance(node, ast.Constant) and re.fullmatch(r"torch(\.\w+)*\._\w+(\.\w+)*", str(node.value)):
            yield node.value  # The name of a module, for sys.modules.


def walked_frames(text: str) -> list[str]:
    """Return the words in a file that give access to Python frames."""
    return [word for word in OF_FRAMES if re.search(rf"\b{word}\b", text)]


@pytest.mark.parametrize("path", OTHERS, ids=lambda path: str(path.relative_to(SOURCE)))
def test_only_one_file_names_private_torch_and_walks_frames(path):
    text = path.read_text(encoding="utf-8")
    assert not list(private_torch(ast.parse(text)))
    assert not walked_frames(text)


def test_that_file_imports_nothing_of_hookline():
    tree = ast.parse(OWNER.read_text(encoding="utf-8"))
    modules = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    modules += [one.name for node in ast.walk(tree) if isinstance(node, ast.Import) for one in node.names]
    assert not [name for name in modules if name.startswith("hookline")]


def test_every_entry_of_that_file_says_what_it_is_for():
    text = OWNER.read_text(encoding="utf-8")
    lines = text.splitlines()
    silent = []
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef):
            silent += [node.name] if ast.get_docstring(node) is None else []
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            first = node.lineno - 1
            while lines[first - 1].strip() and not lines[first - 1].startswith("#"):
                first -= 1  # Entries below one comment share it.
            heading = lines[first - 1] or lines[first - 2]  # A group's comment is one empty line above it.
            silent += [lines[node.lineno - 1]] if not heading.startswith("#") and "# " not in lines[first] else []
    assert not silent


@pytest.mark.parametrize(
    "code",
    [
        "import torch._dynamo",
        "from torch._C import _functorch",
        "from torch.fx import _symbolic_trace",
        "from torch._subclasses.fake_tensor import FakeTensor",
        "import torch\ntorch._C._current_graph_task_id()",
        "from torch import nn\nisinstance(module, nn.modules.dropout._DropoutNd)",
        "import torch.distributed as dist\ndist.distributed_c10d._get_default_store()",
        "import torch\ngetattr(torch, '_lazy_clone', None)",
        "from torch import Tensor\nhasattr(Tensor, '_use_count')",
        "tensor._version",
        "view.tensor._base",
        "tensor._is_view()",
        "tensor.untyped_storage()._cdata",
        "tensor._backward_hooks",
        "module._forward_hooks",
        "getattr(tensor, '_local_tensor', tensor)",
        "attrgetter('_version')",
        "'torch._dynamo.eval_frame' in sys.modules",
        "def cold_path(held):\n    held._version",
    ],
)
def test_a_private_name_of_torch_is_found(code):
    assert list(private_torch(ast.parse(code)))


@pytest.mark.parametrize(
    "code",
    [
        "import torch\ntorch.nn.Module.__call__",
        "self._version",
        "module._parameters",
        "import torch\n'raise torch._dynamo.config.recompile_limit'",
        "from torch import nn\ngetattr(module, '_hookline_reads', None)",
        "def hot_path(held):\n    def forward(self):\n        return held._version",
    ],
)
def test_what_is_public_or_hooklines_own_is_not_found(code):
    assert not list(private_torch(ast.parse(code)))


@pytest.mark.parametrize(
    "code",
    ["sys._getframe(1)", "frame.f_locals['self']", "frame = frame.f_back", "inspect.currentframe()",
     "sys._current_frames()"],
)  # fmt: skip
def test_a_walk_through_frames_is_found(code):
    assert walked_frames(code)


def test_code_without_a_frame_walk_is_passed():
    assert not walked_frames("for frame in frames(frame_at(1)):\n    variables(frame)")
