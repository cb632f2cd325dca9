"""The original libraries, where they are installed, against hookline's: one program prints the same with both."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.support.quick_python import run_forked

TORCHHOOK = """
import torch
from torch import nn
from {package} import HookManager, model_summary, get_layerwise_parameter_count
torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Sequential(nn.ReLU(), nn.Conv2d(4, 2, 3)), nn.Flatten())
manager = HookManager(model, max_size=2)
print(manager)
manager.add("0")
manager.add("last", layer=model[2][1])
manager.add(layer=model[3], output_transform=lambda output: output.mean(-1))
manager.add("2.0", custom_hook=lambda module, inputs, output: output[output > 0].mean())
print(manager)
for _ in range(3):
    model(torch.randn(1, 3, 8, 8))
manager.summary()
print({{key: [round(value.sum().item(), 4) for value in kept] for key, kept in manager.get_all().items()}})
for call, key in ((manager.add, "nope"), (manager.get, "nope"), (manager.add, "0"), (manager.remove, "x")):
    try:
        call(key)
    except Exception as error:
        print(type(error).__name__, error)
manager.remove("0")
print(manager.get_keys())
manager.clear_hooks()
print(manager)
model_summary(model)
print(get_layerwise_parameter_count(model, max_depth=0))
"""

TACKLEBOX = """
import torch
from torch import nn
from {package}.hook_management import HookManager
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
x = torch.randn(4, 2, requires_grad=True)
manager = HookManager()
def before(module, inputs):
    print("before", module.name, [tuple(one.shape) for one in inputs])
def after(module, inputs, outputs):
    print("after", module.name, [round(one.sum().item(), 4) for one in outputs])
    return tuple(one * 2 for one in outputs)
def back(module, grad_in, grad_out):
    print("back", module.name, [round(one.sum().item(), 4) for one in (*grad_in, *grad_out)])
manager.register_forward_pre_hook(before, hook_fn_name="before", first=net[0], last=net[2])
manager.register_forward_hook(after, hook_fn_name="after", first=net[0], last=net[2], activate=False)
manager.register_backward_hook(back, hook_fn_name="back", first=net[0], last=net[2])
print(sorted(manager.name_to_hookhandle))
net(x).sum().backward()
manager.activate_module_hooks(net[2], category="forward_hook")
net(x).sum().backward()
manager.deactivate_all_hooks()
with manager.hook_all_context(hook_types=[before]) + torch.no_grad():
    print(net(x).requires_grad)
manager.remove_hook_by_name("after[last]")
manager.activate_all_hooks()
net(x).sum().backward()
print(sorted(manager.name_to_hookhandle))
manager.cleanup()
class Attention(nn.Linear):
    def forward(self, x, mask, cache=None, scale=1.0):
        return super().forward(x) * mask * scale
attention = Attention(2, 2)
manager.register_forward_pre_hook(lambda module, inputs: tuple(one * 2 for one in inputs), attention=attention)
manager.register_forward_hook(lambda module, inputs, outputs: print(len(inputs), len(outputs)), attention=attention)
def shapes(module, *values):
    print([[None if one is None else tuple(one.shape) for one in value] for value in values])
manager.register_backward_hook(shapes, attention=attention, retain_forward_cache=True)
total = attention(x, torch.ones(4, 2), cache={{}}, scale=torch.ones(1)).sum()
print(round(total.item(), 4))
total.backward()
manager.cleanup()
"""


@pytest.mark.process
@pytest.mark.parametrize(
    ("name", "program"), [("torchhook", TORCHHOOK), ("tacklebox", TACKLEBOX)], ids=["torchhook", "tacklebox"]
)
def test_a_program_prints_what_it_prints_under_the_original(name, program, tmp_path):
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"needs {name}")
    theirs, ours = (printed(program.format(package=package), tmp_path) for package in (name, f"hookline.compat.{name}"))
    assert ours == theirs
    assert len(ours.splitlines()) > 10


def printed(code: str, folder: Path) -> str:
    """Run code in a new process, and return its output."""
    done = run_forked(code, folder)
    assert done.returncode == 0, done.stderr
    return done.stdout
