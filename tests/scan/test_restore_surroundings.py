"""Trial runs of models that keep tensors outside their modules: no tensor of the run may stay there."""

from __future__ import annotations

import dataclasses
import functools
import gc
import importlib
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

import hookline as hl
from tests.errors.wording import says

COUNTS: dict[int, Tensor] = {}
SLOTS: dict[str, Tensor | None] = {"table": None}
ROWS: list[Tensor] = []
LATEST: Tensor | None = None
LATEST_SIZE = 0
SEEN: set[int] = set()
BY_MODULE: weakref.WeakKeyDictionary[nn.Module, Tensor] = weakref.WeakKeyDictionary()
RECENT: OrderedDict[int, tuple[Tensor, str]] = OrderedDict()
HELPER = SimpleNamespace(table=None, size=0)
CONTEXT: ContextVar[Tensor | None] = ContextVar("table", default=None)
LOCAL = threading.local()
TOTAL = torch.zeros(4)


def table(size: int) -> Tensor:
    return torch.arange(size, dtype=torch.float32) + 1


@functools.lru_cache(maxsize=4)
def bounded(size: int) -> Tensor:
    return table(size)


@functools.cache
def unbounded(size: int) -> dict[str, tuple[Tensor]]:
    return {"table": (table(size),)}


def in_a_bounded_cache(_module: nn.Module, size: int) -> Tensor:
    return bounded(size)


def in_an_unbounded_cache(_module: nn.Module, size: int) -> Tensor:
    return unbounded(size)["table"][0]


def in_a_dict(_module: nn.Module, size: int) -> Tensor:
    if size not in COUNTS:
        COUNTS[size] = table(size)
    return COUNTS[size]


def in_a_slot_of_a_dict(_module: nn.Module, size: int) -> Tensor:
    if SLOTS["table"] is None:
        SLOTS["table"] = table(size)
    return SLOTS["table"]


def in_a_list(_module: nn.Module, size: int) -> Tensor:
    if not ROWS:
        ROWS.append(table(size))
    return ROWS[0]


def in_a_global_variable(_module: nn.Module, size: int) -> Tensor:
    global LATEST, LATEST_SIZE
    if size != LATEST_SIZE:
        LATEST, LATEST_SIZE = table(size), size
    assert LATEST is not None
    return LATEST


def in_one_place_with_a_flag_in_another(_module: nn.Module, size: int) -> Tensor:
    if size not in SEEN:
        SEEN.add(size)
        COUNTS[-size] = table(size)
    return COUNTS[-size]


def under_the_module(module: nn.Module, size: int) -> Tensor:
    if module not in BY_MODULE:
        BY_MODULE[module] = table(size)
    return BY_MODULE[module]


def in_an_ordered_dict(_module: nn.Module, size: int) -> Tensor:
    if size not in RECENT:
        RECENT[size] = (table(size), "made")
    return RECENT[size][0]


def on_an_object(_module: nn.Module, size: int) -> Tensor:
    if HELPER.size != size:
        HELPER.table, HELPER.size = table(size), size
    return HELPER.table  # type: ignore[no-any-return]


@dataclasses.dataclass
class Slotted:
    """An object without a `__dict__`."""

    __slots__ = ("size", "table")
    size: int
    table: Tensor


SLOTTED = Slotted.__new__(Slotted)


def in_slots(_module: nn.Module, size: int) -> Tensor:
    if getattr(SLOTTED, "size", 0) != size:
        SLOTTED.table, SLOTTED.size = table(size), size
    return SLOTTED.table


def on_a_thread_local(_module: nn.Module, size: int) -> Tensor:
    if not hasattr(LOCAL, "table"):
        LOCAL.table = table(size)
    return LOCAL.table  # type: ignore[no-any-return]


class Tables(OrderedDict[int, Tensor]):
    """A dict subclass from which nothing can be removed, and which counts its reads."""

    reads = 0

    def __getitem__(self, key: int) -> Tensor:
        self.reads += 1
        return super().__getitem__(key)

    def __delitem__(self, key: int) -> None:
        raise NotImplementedError


TABLES = Tables()


def in_a_dict_of_its_own_kind(_module: nn.Module, size: int) -> Tensor:
    if size not in TABLES:
        TABLES[size] = table(size)
    return TABLES[size]


class Rotary:
    """A callable helper that is not a module."""

    tables: ClassVar[dict[int, Tensor]] = {}
    shared: ClassVar[Tensor | None] = None

    def __init__(self) -> None:
        self.own: Tensor | None = None

    def __call__(self, size: int) -> Tensor:
        if self.own is None:
            self.own = table(size)
        return self.own

    @functools.lru_cache(maxsize=2)  # noqa: B019
    def cached(self, size: int) -> Tensor:
        return table(size)

    @functools.cached_property
    def four(self) -> Tensor:
        return table(4)


ROTARY = Rotary()


def in_a_cached_method(_module: nn.Module, size: int) -> Tensor:
    return ROTARY.cached(size)


def in_a_cached_property(_module: nn.Module, _size: int) -> Tensor:
    return ROTARY.four


def in_a_callable_object(_module: nn.Module, size: int) -> Tensor:
    return ROTARY(size)


def in_a_dict_of_a_class(_module: nn.Module, size: int) -> Tensor:
    if size not in Rotary.tables:
        Rotary.tables[size] = table(size)
    return Rotary.tables[size]


def in_a_class_attribute(_module: nn.Module, size: int) -> Tensor:
    if Rotary.shared is None:
        Rotary.shared = table(size)
    return Rotary.shared


def on_a_function(_module: nn.Module, size: int) -> Tensor:
    if not hasattr(table, "made"):
        table.made = table(size)  # type: ignore[attr-defined]
    return table.made  # type: ignore[attr-defined,no-any-return]


def on_a_class_of_torch(_module: nn.Module, size: int) -> Tensor:
    if not hasattr(nn.Bilinear, "made"):
        nn.Bilinear.made = table(size)  # type: ignore[assignment]
    return nn.Bilinear.made  # type: ignore[return-value]


def in_a_module_of_torch(_module: nn.Module, size: int) -> Tensor:
    if not hasattr(torch, "made_in_a_test"):
        torch.made_in_a_test = table(size)  # type: ignore[attr-defined]
    return torch.made_in_a_test  # type: ignore[attr-defined,no-any-return]


class Private:
    """An object whose only slot has a name that Python mangles."""

    __slots__ = ("__made",)

    def __call__(self, size: int) -> Tensor:
        if not hasattr(self, "_Private__made"):
            self.__made = table(size)
        return self.__made


PRIVATE = Private()


def in_a_private_slot(_module: nn.Module, size: int) -> Tensor:
    return PRIVATE(size)


def in_a_context_variable(_module: nn.Module, size: int) -> Tensor:
    if CONTEXT.get() is None:
        CONTEXT.set(table(size))
    found = CONTEXT.get()
    assert found is not None
    return found


def in_a_new_entry_of_sys_modules(_module: nn.Module, size: int) -> Tensor:
    module = sys.modules.setdefault("made_in_a_test", ModuleType("made_in_a_test"))
    if not hasattr(module, "table"):
        module.table = table(size)
    return module.table  # type: ignore[no-any-return]


def closed_over() -> Callable[[nn.Module, int], Tensor]:
    helper = Rotary()
    kept: Tensor | None = None

    def in_a_closure(_module: nn.Module, size: int) -> Tensor:
        nonlocal kept
        if kept is None:
            kept = helper(size)
        return kept

    return in_a_closure


WAYS = [
    in_a_bounded_cache, in_an_unbounded_cache, in_a_dict, in_a_slot_of_a_dict, in_a_list, in_a_global_variable,
    in_one_place_with_a_flag_in_another, under_the_module, in_an_ordered_dict, on_an_object, in_slots,
    on_a_thread_local, in_a_cached_method, in_a_cached_property, in_a_callable_object, in_a_dict_of_a_class,
    in_a_class_attribute, in_a_dict_of_its_own_kind, closed_over(), on_a_function, on_a_class_of_torch,
    in_a_module_of_torch, in_a_private_slot, in_a_context_variable, in_a_new_entry_of_sys_modules,
]  # fmt: skip


class Keeping(nn.Module):
    """Keeps a table somewhere outside of itself; `look` makes it need the real run."""

    def __init__(self, way: Callable[[nn.Module, int], Tensor], look: bool = False) -> None:
        super().__init__()
        self.way = way
        self.look = look
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x) * self.way(self, x.shape[-1])
        if self.look and float(y.detach().sum()) > 1e9:
            return x
        return y


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Clear everything that a test keeps, and check that it left no fake tensor."""
    global LATEST, LATEST_SIZE, ROTARY, SLOTTED, PRIVATE
    before = [one for one in gc.get_objects() if type(one) is FakeTensor]  # Left by torch.compile in another test.
    known = {id(one) for one in before}
    yield
    assert [one for one in gc.get_objects() if type(one) is FakeTensor and id(one) not in known] == []
    for container in (COUNTS, ROWS, SEEN, BY_MODULE, RECENT, TABLES, Rotary.tables):
        container.clear()
    for cache in (bounded, unbounded, Rotary.cached):
        cache.cache_clear()
    SLOTS["table"] = LATEST = Rotary.shared = HELPER.table = None
    LATEST_SIZE = HELPER.size = 0
    vars(LOCAL).clear()
    ROTARY, SLOTTED, PRIVATE = Rotary(), Slotted.__new__(Slotted), Private()
    for holder, name in ((table, "made"), (nn.Bilinear, "made"), (torch, "made_in_a_test")):
        vars(holder).get(name) is None or delattr(holder, name)
    sys.modules.pop("made_in_a_test", None)
    CONTEXT.set(None)
    TOTAL.detach_().zero_()


@pytest.mark.parametrize("look", [False, True], ids=["fake", "real"])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_model_is_sound_after_a_trial_run_wherever_it_keeps_a_table(
    way: Callable[[nn.Module, int], Tensor], look: bool
) -> None:
    model, x = Keeping(way, look), torch.randn(2, 4)
    expected = model.layer(x) * table(4)
    assert hl.scan(model, x)["layer"].shape == "(2, 4)"
    found = model(x)
    assert type(found) is Tensor
    assert torch.equal(found, expected)


def test_a_cache_that_gc_freeze_hides_from_the_collector_is_emptied() -> None:
    gc.freeze()
    assert bounded not in gc.get_objects()
    assert "the cache of bounded" in hl.scan(Keeping(in_a_bounded_cache), torch.ones(2, 4)).note
    assert type(bounded(4)) is Tensor


def test_an_assert_in_the_code_of_a_model_does_not_lead_to_every_test() -> None:
    assert any("pytest" in name for name in in_a_global_variable.__code__.co_names)  # pytest puts them there.
    note = hl.scan(Keeping(in_a_global_variable), torch.ones(2, 4)).note
    assert "the globals of tests.scan.test_restore_surroundings" in note
    assert "pytest" not in note  # Nor anything else that the tests hold.


class WithoutHash(type):
    """A metaclass that defines equality, so that Python gives its classes no hash."""

    def __eq__(cls, other: object) -> bool:
        return cls is other


def test_objects_of_a_class_that_can_not_be_hashed_do_not_disturb_a_scan() -> None:
    there = WithoutHash("There", (), {})()
    with pytest.raises(TypeError, match="unhashable"):
        hash(type(there))
    assert "COUNTS" in hl.scan(Keeping(in_a_dict), torch.ones(2, 4)).note


def test_the_note_names_what_had_kept_a_tensor_of_the_run() -> None:
    assert "the cache of bounded" in hl.scan(Keeping(in_a_bounded_cache), torch.ones(2, 4)).note
    assert "test_restore_surroundings.COUNTS" in hl.scan(Keeping(in_a_dict), torch.ones(2, 4)).note
    assert "Rotary.tables" in hl.scan(Keeping(in_a_dict_of_a_class), torch.ones(2, 4)).note
    assert hl.scan(nn.Linear(4, 4), torch.ones(2, 4)).note == "on fake tensors: nothing was computed"


def test_what_a_real_run_has_kept_stays_there() -> None:
    model, x = Keeping(in_a_dict), torch.ones(2, 4)
    model(x)
    bounded(4)
    kept = COUNTS[4]
    hl.scan(model, x)
    assert COUNTS[4] is kept
    assert bounded.cache_info().currsize == 1


def test_looking_for_what_is_kept_runs_no_code_of_the_user() -> None:
    model, x = Keeping(in_a_dict_of_its_own_kind), torch.ones(2, 4)
    model(x)
    reads = TABLES.reads
    hl.scan(model, x)
    assert TABLES.reads == reads + 1, "only the forward may read the table"


def test_a_model_on_meta_and_a_model_that_fails_leave_nothing_behind() -> None:
    with torch.device("meta"):
        model = Keeping(in_a_dict)
    with pytest.raises(RuntimeError, match="meta and cpu"):  # The table is on the CPU.
        hl.scan(model, torch.ones(2, 4))
    assert COUNTS == {}
    broken = nn.Sequential(Keeping(in_a_dict), Keeping(in_a_bounded_cache), nn.Linear(3, 3))
    with pytest.raises(RuntimeError):
        hl.scan(broken, torch.ones(2, 4))
    assert [type(COUNTS[4]), type(bounded(4))] == [Tensor, Tensor], "not the real run's tables"


def test_other_peoples_hooks_keep_nothing_of_a_trial_run() -> None:
    model, seen = nn.Sequential(nn.Linear(4, 4)), list[Any]()
    handle = model[0].register_forward_hook(lambda _module, _inputs, output: seen.append(output))
    hl.scan(model, torch.ones(2, 4))
    handle.remove()
    assert seen == []


def test_tensors_of_any_kind_may_be_elsewhere_in_the_process() -> None:
    others = [
        nn.LazyLinear(2).weight,
        torch.eye(2).to_sparse(),
        torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8),
    ]

    def with_a_copy(module: nn.Module, size: int) -> Tensor:
        assert isinstance(module, Keeping)
        COUNTS[size] = module.layer.weight
        return table(size)

    hl.scan(Keeping(with_a_copy, look=True), torch.ones(2, 4))
    assert COUNTS == {}
    assert len(others) == 3


def test_a_cached_view_of_a_parameter_is_a_view_of_the_parameter_itself() -> None:
    """The real run uses copies of the parameters: a cached view of a copy would not follow the training."""

    class Tied(nn.Module):
        transposed: ClassVar[dict[str, Tensor]] = {}

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            if not self.transposed:
                self.transposed["view"] = self.layer.weight.t()
                self.transposed["detached"] = self.layer.weight.detach()
            y = self.layer(x) @ self.transposed["view"] + self.transposed["detached"][0]
            return y if float(y.detach().sum()) < 1e9 else x

    model, x = Tied(), torch.randn(2, 4)
    assert hl.scan(model, x).note.startswith("on a real run")
    assert Tied.transposed == {}
    model(x).sum().backward()
    address = model.layer.weight.data_ptr()
    assert Tied.transposed["view"].data_ptr() == Tied.transposed["detached"].data_ptr() == address


@pytest.mark.parametrize("look", [False, True], ids=["fake", "real"])
def test_a_tensor_that_the_model_adds_to_has_no_history_of_a_trial_run(look: bool) -> None:
    def in_a_sum(module: nn.Module, _size: int) -> Tensor:
        assert isinstance(module, Keeping)
        TOTAL.add_(module.layer.bias)
        return TOTAL.detach().clone()

    hl.scan(Keeping(in_a_sum, look), torch.ones(2, 4))
    assert TOTAL.grad_fn is None
    assert not TOTAL.requires_grad


def test_a_scan_under_autocast_and_in_inference_mode_is_no_cause_for_complaint() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.ones(2, 4)
    with torch.autocast("cpu", torch.bfloat16):
        assert hl.scan(model, x).note == "on fake tensors: nothing was computed"
    with torch.inference_mode():
        assert hl.scan(Keeping(in_a_dict), x)["layer"].calls == 1
    assert COUNTS == {}


def test_a_place_that_cannot_be_put_back_is_named() -> None:
    def tables() -> Iterator[Tensor]:
        made = table(4)
        while True:
            yield made

    waiting = tables()
    model = Keeping(lambda _module, _size: next(waiting))
    with pytest.raises(hl.HooklineError, match=says("held by the generator")):
        hl.scan(model, torch.ones(2, 4))


@pytest.mark.parametrize("is_there", [False, True], ids=["imported in the run", "imported before"])
@pytest.mark.parametrize(
    "statement",
    [
        "import kept_late.tables as tables",
        "from kept_late import tables",
        "from .tables import MADE",
        "from . import tables",
    ],
)
def test_a_module_that_forward_imports_keeps_nothing_of_a_trial_run(
    statement: str, is_there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = "MADE" if "MADE" in statement else "tables.MADE"
    package = tmp_path / "kept_late"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "tables.py").write_text("MADE = {}")
    (package / "layers.py").write_text(
        "import torch\n"
        "def way(module, size):\n"
        f"    {statement}\n"
        f"    if size not in {made}:\n"
        f"        {made}[size] = torch.arange(size) + 1.0\n"
        f"    return {made}[size]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    if is_there:
        importlib.import_module("kept_late.tables")
    model, x = Keeping(importlib.import_module("kept_late.layers").way), torch.randn(2, 4)
    try:
        assert "kept_late.tables" in hl.scan(model, x).note
        assert torch.equal(model(x), model.layer(x) * table(4))
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "kept_late"]:
            del sys.modules[name]


@pytest.mark.parametrize("name", ["Beit", "Data2VecVision"])
def test_transformers_that_cache_their_position_index_are_sound_after_a_scan(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    # A size that no other test uses: all models of the class share the cache.
    config = getattr(transformers, f"{name}Config")(
        **sizes, image_size=24, patch_size=8, use_relative_position_bias=True
    )
    model, x = getattr(transformers, f"{name}Model")(config).eval(), torch.randn(1, 3, 24, 24)
    assert "generate_relative_position_index" in hl.scan(model, x).note
    assert "generate_relative_position_index" in repr(hl.sites(model, run=(x,)))
    assert type(model(x).last_hidden_state) is Tensor


def test_a_property_over_a_slot_is_no_place_to_put_something_back() -> None:
    class Number:
        __slots__ = ("value",)

    class Constant(Number):
        @property
        def value(self) -> list[int]:  # type: ignore[override]
            return [1]

    global LATEST
    constant = Constant()
    LATEST = None

    class Uses(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            global LATEST
            LATEST = x * len(constant.value)
            return LATEST

    hl.scan(Uses(), torch.ones(2))
    assert LATEST is None
