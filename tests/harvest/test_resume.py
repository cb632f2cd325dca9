"""A harvest resumes only if nothing that could change its rows has changed; it lists what it can't compare."""

from __future__ import annotations

import json
import random
import types
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import hookline as hl
from tests.errors.wording import says
from tests.support import harvests
from tests.support.prepared_processes import prepared_processes
from tests.support.stores import manifest_with

X = torch.randn(48, 80, generator=torch.Generator().manual_seed(1))
SCALE, SHIFTS = 2.0, [1.0, 2.0]


def begin(to: Path, model: nn.Module, where: str = "", **options: Any) -> None:
    """Run the first unit of a harvest."""
    hl.Harvest(model, X, where, to=to, **{"batch_size": 8, "unit": 16, **options}).run_unit(0)


def go_on(to: Path, model: nn.Module, where: str = "", **options: Any) -> hl.Store:
    """Resume the harvest with the same call."""
    return hl.harvest(model, X, where, to=to, **{"batch_size": 8, **options})


class Net(nn.Module):
    """A model with weights of every size and everything else that a forward can read."""

    bias = 0.5

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(80, 80)
        self.scale = 2.0
        self.table = torch.ones(80)
        self.steps = [{"by": 1.0}, {"by": 2.0}]
        self.settings = types.SimpleNamespace(gain=torch.ones(1))
        self.register_buffer("mask", torch.ones(80), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        gain = self.settings.gain * self.steps[1]["by"] * self.scale
        return self.helped(self.linear(x)) * self.table * self.mask * gain + self.bias

    def helped(self, x: Tensor) -> Tensor:
        return x


def net() -> Net:
    """Return a new model with the same weights each time."""
    return Net().eval()


def swapped(model: Net) -> None:
    """Change four weights so that the sum of each row and of each column stays the same."""
    bits = model.linear.weight.data.view(torch.int32)
    bits[0, 0] += 1
    bits[1, 1] += 1
    bits[0, 1] -= 1
    bits[1, 0] -= 1


def negated(model: Net) -> None:
    """Negate two weights that are in the same half of their 64-bit words."""
    model.linear.weight.data[3, [1, 3]] *= -1


CHANGES: dict[str, tuple[Callable[[Net], object], str]] = {
    "row and column sums": (swapped, "model.weights"),
    "two signs": (negated, "model.weights"),
    "a number": (lambda model: setattr(model, "scale", 3.0), says("that of this run", "2.0", "3.0")),
    "a tensor": (lambda model: model.table.add_(1), says("holds another harvest")),
    "a container": (lambda model: model.steps[1].update(by=9.0), says("holds another harvest")),
    "an object": (lambda model: model.settings.gain.add_(1), says("holds another harvest")),
    "a buffer that is not saved": (lambda model: model.mask.zero_(), says("holds another harvest")),
    "another attribute": (lambda model: setattr(model, "more", 1), says("holds another harvest")),
    "training mode of one module": (lambda model: model.linear.train(), "model.training"),
    "a forward of its own": (
        lambda model: setattr(model, "forward", types.MethodType(lambda self, x: self.linear(x), model)),
        says("holds another harvest"),
    ),
}


@pytest.mark.filterwarnings("ignore:the model is in training mode")
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_the_model_is_refused_by_name(change, to):
    begin(to, net())
    model = net()
    CHANGES[change][0](model)
    with pytest.raises(hl.StoreError, match=CHANGES[change][1]):
        go_on(to, model)
    assert len(go_on(to, net())[""]) == 48


@pytest.mark.parametrize("kind", ["coo", "csr", "per tensor", "per channel"])
def test_a_change_of_sparse_and_quantized_weights_is_refused(kind, to):
    made = {
        "coo": lambda dense: dense.to_sparse(),
        "csr": lambda dense: dense.to_sparse_csr(),
        "per tensor": lambda dense: torch.quantize_per_tensor(dense, 0.1, 0, torch.qint8),
        "per channel": lambda dense: torch.quantize_per_channel(
            dense, dense.diag() / 9, torch.zeros(80), 0, torch.qint8
        ),
    }

    def model(by: float) -> nn.Module:
        found = net()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about a beta state, and about torchao.
            found.register_buffer("kept", made[kind](torch.eye(80) * by))
        return found

    begin(to, model(1.0))
    with pytest.raises(hl.StoreError, match=says("holds another harvest")):
        go_on(to, model(2.0))
    assert len(go_on(to, model(1.0))[""]) == 48


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layer", [nn.Linear, nn.LSTM])
def test_a_change_of_dynamically_quantized_weights_is_refused(layer, to):
    def model(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return torch.ao.quantization.quantize_dynamic(nn.Sequential(layer(80, 8)).eval(), {layer})

    where, call = ("0", None) if layer is nn.Linear else ("0[0]", lambda model, batch: model(batch[:, None]))
    begin(to, model(0), where, call=call)
    with pytest.raises(hl.StoreError, match=says("holds another harvest")):
        go_on(to, model(1), where, call=call)
    assert len(go_on(to, model(0), where, call=call)[where]) == 48


def test_what_a_module_saves_beside_its_weights_is_compared(to):
    class Extra(Net):
        def __init__(self, seed: int) -> None:
            super().__init__()
            self.chance = random.Random(seed)  # Only get_extra_state shows its state.

        def get_extra_state(self) -> Any:
            return self.chance.getstate()

        def set_extra_state(self, _state: Any) -> None:
            pass

    begin(to, Extra(1).eval())
    with pytest.raises(hl.StoreError, match=says("holds another harvest")):
        go_on(to, Extra(2).eval())
    assert len(go_on(to, Extra(1).eval())[""]) == 48


def module_of(path: Path, text: str) -> Any:
    """Return a Python module with that source, as if it had been imported from a file."""
    found = types.ModuleType("mine")
    exec(compile(text, str(path / "mine.py"), "exec"), vars(found))
    return found


MINE = """
import torch
from torch import nn

FACTOR = 2.0

def halved(x):
    return x / 2

class Base(nn.Module):
    def shifted(self, x):
        return x + 1

class Mine(Base):
    limit = 6.0

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(80, 4)

    def forward(self, x):
        '''Run it.'''
        x = halved(self.shifted(self.linear(x))).clamp(max=self.limit)
        return sum([FACTOR * one for one in (x, x)])

class Called:
    def __call__(self, x):
        return x * 2
"""


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("(x, x)", "(x, -x)", says("holds another harvest")),
        ("x / 2", "x / 3", says("holds another harvest")),
        ("x + 1", "x - 1", says("holds another harvest")),
        ("FACTOR = 2.0", "FACTOR = 3.0", says("model variables FACTOR is that of this run", "2.0", "3.0")),
        ("limit = 6.0", "limit = 1.0", says("holds another harvest")),
    ],
    ids=["forward", "a function that it calls", "a base class", "a global in a comprehension", "a class attribute"],
)
def test_a_change_of_the_model_s_code_is_refused(old, new, told, to, tmp_path):
    begin(to, module_of(tmp_path, MINE).Mine().eval())
    with pytest.raises(hl.StoreError, match=told):
        go_on(to, module_of(tmp_path, MINE.replace(old, new)).Mine().eval())
    assert len(go_on(to, module_of(tmp_path, MINE.replace("'''Run it.'''", "'''Run.'''")).Mine().eval())[""]) == 48


def scaled(x: Tensor) -> Tensor:
    return torch.stack([x * SCALE + shift for shift in SHIFTS]).sum(0)


def test_a_global_in_a_comprehension_of_a_function_is_compared(to, monkeypatch):
    begin(to, net(), transform=scaled)
    monkeypatch.setattr("tests.harvest.test_resume.SCALE", 3.0)
    with pytest.raises(hl.StoreError, match=says("holds another harvest")):
        go_on(to, net(), transform=scaled)


@pytest.mark.parametrize("made", [lambda one: one, lambda one: one.__call__, lambda one: partial(one)])
def test_the_code_of_a_callable_object_is_compared(made, to, tmp_path):
    def called(text: str) -> Any:
        return made(module_of(tmp_path, text).Called())

    begin(to, net(), transform=called(MINE))
    with pytest.raises(hl.StoreError, match=says("holds another harvest")):
        go_on(to, net(), transform=called(MINE.replace("x * 2", "x * 3")))
    assert len(go_on(to, net(), transform=called(MINE))[""]) == 48


def test_a_function_behind_a_decorator_is_compared(to):
    def made(by: float) -> Any:
        return torch.no_grad()(lambda x: x * by)

    begin(to, net(), transform=made(2.0))
    with pytest.raises(hl.StoreError, match=says("holds another harvest")):
        go_on(to, net(), transform=made(3.0))


@pytest.mark.parametrize("sites", ["", "linear:grad_output"])
def test_another_batch_size_is_refused_since_rows_may_depend_on_it(sites, to):
    options = {"loss": lambda output, _batch: output.mean()} if "grad" in sites else {}
    begin(to, net(), sites, **options)
    told = says("its batches have", 8, 8, 4)
    with pytest.raises(hl.StoreError, match=told):
        go_on(to, net(), sites, batch_size=4, **options)
    with pytest.raises(hl.StoreError, match=says("holds another harvest")):
        go_on(to, net(), sites, sort_by_length=True, **options)
    assert len(go_on(to, net(), sites, **options)[sites]) == 48
    with pytest.raises(hl.StoreError, match=says("can't be appended to its", 8)):
        go_on(to, net(), sites, batch_size=4, append=True, **options)


class Remembering(nn.Module):
    """A model whose forward writes state: a count, the last shape, a growing buffer, a cache on the class."""

    seen: ClassVar[dict[int, int]] = {}

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(80, 4)
        self.calls, self.last = 0, None
        self.register_buffer("longest", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.last = x.shape
        self.longest = torch.maximum(self.longest, x[:, 0].max())
        self.seen[int(x.sum() * 1000)] = self.calls
        return self.linear(x)


@pytest.mark.parametrize("is_new", [True, False])
def test_what_a_forward_writes_is_not_compared_and_the_plan_says_so(is_new, to):
    Remembering.seen.clear()
    model = Remembering().eval()
    model(X)  # A trial run before the harvest.
    plan = hl.Harvest(model, X, "linear", to=to, batch_size=8, unit=16)
    plan.run_unit(0)
    assert "what the forward writes: Remembering.seen, calls, last" in repr(plan)
    store = go_on(to, Remembering().eval() if is_new else model, "linear")
    assert len(store["linear"]) == 48
    assert len(go_on(to, model, "linear")["linear"]) == 48


class Growing(nn.Module):
    """A model whose forward writes state from the second batch on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(80, 4)
        self.top = 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.top = max(self.top, 0.0 if torch.equal(x, X[:8]) else float(x.max()))
        return self.linear(x)


def test_a_run_that_was_interrupted_goes_on_in_the_same_process_though_the_model_has_written(to):
    def stop(_module: nn.Module, args: tuple[Tensor]) -> None:
        if torch.equal(args[0], X[32:40]):
            raise KeyboardInterrupt

    model = Growing().eval()
    handle = model.register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        hl.harvest(model, X, "linear", to=to, batch_size=8, unit=8)
    handle.remove()
    assert len(harvests.committed(to)) < 6
    assert model.top
    assert len(go_on(to, model, "linear")["linear"]) == 48


def test_a_module_may_say_itself_by_what_it_is_known(to):
    class Own(Net):
        def fingerprint(self) -> str:
            return f"scaled by {self.scale}"

    model = Own().eval()
    begin(to, model)
    model.more = "a note"
    assert len(go_on(to, model)[""]) == 48
    model.scale = 3.0
    with pytest.raises(hl.StoreError, match=says("holds another harvest")):
        go_on(to, model)


def test_where_a_model_runs_and_came_from_is_not_compared(to):
    model = net()
    model.device, model.place, model.name_or_path = torch.device("cpu"), "cuda:1", "here"
    begin(to, model)
    model.device, model.place, model.name_or_path = torch.device("cuda"), "cuda:0", "there"
    assert len(go_on(to, model)[""]) == 48


def test_hooks_on_the_model_are_named_as_not_compared(to):
    plan = hl.Harvest(net(), X, "", to=to, batch_size=8)
    assert "\n" not in repr(plan)
    plan.estimate()
    told = repr(plan)
    for one in ("hooks and patches on the model", "the other samples", "files and environment variables"):
        assert one in told
    assert "32 samples spread over them, batches of 8" in told
    with hl.capture(net(), "linear"), hl.patch(plan.model, {"linear.bias:param": torch.zeros(80)}):
        begin(to, plan.model)
    assert len(go_on(to, net())[""]) == 48


def test_an_object_that_nobody_can_look_into_is_named(to):
    model = net()
    model.chance = torch.Generator()
    plan = hl.Harvest(model, X, "", to=to, batch_size=8)
    plan.estimate()
    assert "the contents of torch._C.Generator" in repr(plan)


def test_a_store_of_another_version_is_not_taken_for_another_model(to):
    begin(to, net())
    path = to / "harvest.json"
    spec = json.loads(path.read_bytes())["spec"]
    spec = {name: value for name, value in spec.items() if name not in ("digests", "batches")}
    path.write_bytes(manifest_with(path.read_bytes(), {**spec, "model": {"class": "Net", "weights": "0" * 32}}))
    with pytest.raises(hl.StoreError, match=says("another version of hookline or")):
        go_on(to, net())
    assert len(hl.Store(to, partial=True)[""]) == 16


class Named(Net):
    """A model that holds sets, whose order differs between processes."""

    def __init__(self) -> None:
        super().__init__()
        self.names = {"a", "b", "c", "d", "e"}
        self.config = types.SimpleNamespace(heads={"x": {1, 2}, "y": {"one", "two", "three"}})


def kept(value: Tensor) -> Tensor:
    return value if "x" in {"a", "b", "c", "d", "e"} else -value


def begin_there(to: Path) -> int:
    """Begin a harvest; return the hash of a text, which differs between processes."""
    begin(to, Named().eval(), transform=kept)
    return hash("text")


@pytest.mark.process
def test_a_model_and_a_function_are_known_again_in_another_process(to):
    with ProcessPoolExecutor(1, mp_context=prepared_processes()) as pool:
        assert pool.submit(begin_there, to).result() != hash("text")
    assert len(go_on(to, Named().eval(), transform=kept)[""]) == 48
