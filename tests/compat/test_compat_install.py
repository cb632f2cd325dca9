"""Installing hookline under another library's name. Each test runs in a new process."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

import hookline as hl
from hookline.compat import NAMES, install
from tests.errors.wording import says
from tests.support.quick_python import run_forked

INSTALLED = {name: importlib.util.find_spec(name) is not None for name in NAMES}  # The original libraries.

SCRIPT = """\
import torch
from torch import nn
from torchhook import HookManager
from torchhook.utils import count_parameters

model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True))
manager = HookManager(model, max_size=1)
manager.add(layer_name="0")
if __name__ == "__main__":
    model(torch.ones(2, 4))
    print(manager.get_features("0")[0].shape, count_parameters(model), HookManager.__module__)
    manager.clear_hooks()
"""

ORIGINAL = {
    "torchhook/__init__.py": "from torchhook.utils import whose\n",
    "torchhook/utils.py": "whose = 'theirs'\n",
    "torchhook/other.py": "",
    "tacklebox.py": "",
}

IMPORTS = {
    "torch_hook_utils": """\
import torch_hook_utils.maxpool_hooks
import torch_hook_utils.types
from torch_hook_utils import Sequential, get_layer_outputs
from torch_hook_utils.input_output_hooks import replace_layer_input_arguments
from torch_hook_utils.layers import Lambda
ours = [torch_hook_utils, torch_hook_utils.maxpool_hooks, torch_hook_utils.types, torch_hook_utils.layers]
""",
    "tacklebox": """\
import tacklebox.hooks.model_tracking
import tacklebox.hooks.model_tracking as tracking
from tacklebox.helpers import data_pass
from tacklebox.hook_management import HookFunction, HookHandle, HookManager
ours = [tacklebox, tacklebox.hooks, tacklebox.hooks.model_tracking, tracking, tacklebox.helpers]
""",
    "nice_hooks": """\
import nice_hooks.nice_hooks
import nice_hooks.nice_hooks as inner
from nice_hooks import ModulePath, register_forward_hook, run
assert inner.run is run
ours = [nice_hooks, nice_hooks.nice_hooks, inner]
""",
    "torchhook": """\
import torchhook.hookmanager
import torchhook.utils as utils
from torchhook import *
from torchhook.utils import model_summary
assert torchhook.__version__ == "0.2.7"
assert model_summary is utils.model_summary
ours = [torchhook, torchhook.hookmanager, utils]
""",
    "Auto_HookPoint": """\
import Auto_HookPoint.hook
import Auto_HookPoint.check as check
import Auto_HookPoint.utils
from Auto_HookPoint import auto_hook, check_auto_hook
from Auto_HookPoint.hook import BUILT_IN_MODULES, HookedClass, HookedModule, HookedParameter
ours = [Auto_HookPoint, Auto_HookPoint.hook, check, Auto_HookPoint.utils]
""",
}


def printed(code: str, folder: Path) -> list[str]:
    """Run code in a new process, in a folder that comes first in its search for modules; return the lines it prints."""
    done = run_forked(code, folder, strict=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture
def original(tmp_path: Path) -> Path:
    """A folder with other libraries of these names."""
    (tmp_path / "torchhook").mkdir()
    for name, code in ORIGINAL.items():
        (tmp_path / name).write_text(code, encoding="utf-8")
    return tmp_path


@pytest.mark.process
def test_a_script_runs_as_it_is(tmp_path):
    (tmp_path / "their_script.py").write_text(SCRIPT, encoding="utf-8")
    code = f"""
import runpy, sys
import hookline.compat
hookline.compat.install("torchhook", over={INSTALLED["torchhook"]})
hookline.compat.install("torchhook", "nice_hooks")
hookline.compat.install("torchhook")
print(len([finder for finder in sys.meta_path if type(finder).__module__ == "hookline.compat"]))
runpy.run_path("their_script.py", run_name="__main__")
"""
    shown = "torch.Size([2, 8]) 40 hookline.compat.torchhook.hookmanager"
    assert printed(code, tmp_path) == ["1", shown]


@pytest.mark.process
def test_without_the_call_nothing_happens(tmp_path):
    code = """
import importlib.util, sys
before = importlib.util.find_spec("torchhook")
import hookline
print("hookline.compat" in sys.modules)
finders = list(sys.meta_path)
import hookline.compat
print([name for name in sys.modules if name.startswith("hookline.compat.")])
import hookline.compat.torchhook
print(sys.meta_path == finders, "torchhook" in sys.modules, importlib.util.find_spec("torchhook") == before)
"""
    assert printed(code, tmp_path) == ["False", "[]", "True False True"]


@pytest.mark.process
@pytest.mark.parametrize("name", NAMES)
def test_a_library_and_what_is_below_it_is_hooklines(name, tmp_path):
    code = f"""
import sys
from hookline.compat import install
install({name!r}, over={INSTALLED[name]})
print([one for one in sys.modules if one.startswith("hookline.compat.")])
{IMPORTS[name]}
assert all(one.__name__ == one.__spec__.name for one in ours)
print(all(one.__name__.startswith("hookline.compat.{NAMES[name]}") for one in ours))
print(all(sys.modules[one.__name__] is one for one in ours))
try:
    import {name}.nothing
except ModuleNotFoundError as error:
    print(error)
"""
    assert printed(code, tmp_path) == ["[]", "True", "True", f"No module named '{name}.nothing'"]


@pytest.mark.process
def test_the_modules_are_the_same_under_both_names(tmp_path):
    code = f"""
import importlib, pickle
from hookline.compat import install
from hookline.compat.torchhook import hookmanager
install("torchhook", over={INSTALLED["torchhook"]})
import torchhook, torchhook.hookmanager as alias
print(torchhook.HookManager is hookmanager.HookManager, alias is hookmanager)
old = pickle.dumps(hookmanager.HookManager, protocol=0).replace(b"hookline.compat.torchhook", b"torchhook")
print(b"hookline" in old, pickle.loads(old) is hookmanager.HookManager)
print(importlib.reload(alias) is hookmanager)
"""
    assert printed(code, tmp_path) == ["True True", "False True", "True"]


@pytest.mark.process
def test_an_original_that_is_installed_is_not_replaced_unless_told(original):
    code = """
import hookline
from hookline.compat import install
for names in (["nice_hooks", "torchhook"], ["tacklebox"]):
    try:
        install(*names)
    except hookline.HooklineError as error:
        print(error)
try:
    import nice_hooks
except ImportError as error:
    print(error)
import torchhook
print(torchhook.whose)
"""
    found = printed(code, original)
    where = original / "torchhook" / "__init__.py"
    rest = "uninstall it, or pass over=True to get hookline's version in this process"
    assert found[0] == f"'torchhook' is installed ({where}); {rest}"
    assert found[1].startswith("'tacklebox' is installed (")
    assert found[2:] == ["No module named 'nice_hooks'", "theirs"]  # If one name is refused, none is installed.


@pytest.mark.process
@pytest.mark.skipif(not INSTALLED["tacklebox"], reason="needs tacklebox")
def test_the_original_itself_is_not_replaced_unless_told(tmp_path):
    code = """
import hookline
from hookline.compat import install
try:
    install("tacklebox")
except hookline.HooklineError as error:
    print(str(error).split(" (")[0])
install("tacklebox", over=True)
from tacklebox.hook_management import HookManager
print(HookManager.__module__.partition(".")[0])
"""
    assert printed(code, tmp_path) == ["'tacklebox' is installed", "hookline"]


@pytest.mark.process
def test_an_original_that_is_imported_is_not_replaced_unless_told(original):
    code = """
import sys
import hookline
from hookline.compat import install
import torchhook as theirs
import torchhook.other
try:
    install("torchhook")
except hookline.HooklineError as error:
    print(error)
install("torchhook", over=True)
import torchhook, torchhook.utils
print(theirs.whose, hasattr(torchhook, "whose"), torchhook.utils.__name__)
try:
    import torchhook.other
except ImportError as error:
    print(error)
"""
    assert printed(code, original) == [
        "'torchhook' is already imported; call install before that import, or pass over=True to get hookline's version "
        "from now on",
        "theirs False hookline.compat.torchhook.utils",
        "No module named 'torchhook.other'",
    ]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("TorchHook", "did you mean 'torchhook'?"),
        ("torch-hook-utils", "did you mean 'torch_hook_utils'?"),
        ("auto_hookpoint", "did you mean 'Auto_HookPoint'?"),
        ("nice_hook", "did you mean 'nice_hooks'?"),
        ("baukit", "there are torch_hook_utils, tacklebox, nice_hooks, torchhook, Auto_HookPoint"),
    ],
)
def test_an_unknown_name_says_which_is_meant(name, hint):
    before = list(sys.meta_path)
    with pytest.raises(hl.HooklineError) as caught:
        install("nice_hooks", name)
    assert str(caught.value) == f"{name!r} is not one of the libraries in hookline.compat; {hint}"
    assert sys.meta_path == before


def test_no_name_at_all_is_refused():
    with pytest.raises(
        hl.HooklineError, match=says("needs the names of", "torch_hook_utils", "tacklebox", "nice_hooks", "torchhook")
    ):
        install()
