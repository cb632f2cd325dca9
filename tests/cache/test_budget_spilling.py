"""Values spilled to disk: they read the same, every failure is reported, and no file is left behind."""

from __future__ import annotations

import gc
import os
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributions import Normal
from torch.overrides import TorchFunctionMode

import hookline as hl
from hookline._kernel import leaves
from tests.errors.wording import says
from tests.support.cache_budgets import (
    VALUE,
    Echo,
    Step,
    agree,
    bytes_at,
    bytes_in,
    files,
    model_of,
    on_disk,
    same,
    x,
)
from tests.support.cache_files import DTYPES
from tests.support.running import python

pytestmark = [
    pytest.mark.usefixtures("nothing_stays_on_disk"),
    pytest.mark.filterwarnings("ignore:ComplexHalf"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


class TestSpilling:
    def test_the_oldest_go_to_disk_and_are_read_back(self):
        model = model_of()
        with hl.capture(model, "*", limit=2 * VALUE, spill=True) as acts:
            model(x)
        _, expected = hl.run(model, x, capture="*")
        assert on_disk(acts) == ["0", "1"]
        assert repr(acts).startswith("4 sites, 1,024 bytes, 1,024 bytes on disk\n")
        assert agree(acts, expected)
        assert len(files()) == 2

    def test_the_files_go_with_the_values(self, nothing_stays_on_disk):
        model = model_of()
        hooks = hl.Hooks(model)
        acts = hooks.capture("*", limit=VALUE, spill=True)
        model(x)
        (folder,) = nothing_stays_on_disk.iterdir()
        assert len(list(folder.iterdir())) == 3
        model(x)
        assert len(list(folder.iterdir())) == 3
        acts.clear()
        assert not list(folder.iterdir())
        hooks.remove()
        del hooks, acts
        assert not folder.exists()

    def test_a_named_folder_is_used_and_left_as_it_was(self, tmp_path):
        folder = tmp_path / "scratch"
        folder.mkdir()
        (folder / "mine").write_text("stays")
        model = model_of()
        for spill in (folder, str(folder)):
            with hl.capture(model, "*", limit=0, spill=spill) as acts:
                model(x)
            assert len(list(folder.glob("*/*.safetensors"))) == 4
            assert not files()
            del acts
            assert [path.name for path in folder.iterdir()] == ["mine"]

    def test_nothing_is_made_on_disk_before_it_is_needed(self, nothing_stays_on_disk):
        model = model_of()
        with hl.capture(model, "*", limit=4 * VALUE, spill=True) as acts:
            model(x)
        assert not list(nothing_stays_on_disk.iterdir())
        assert len(acts) == 4

    def test_a_value_larger_than_the_limit_goes_to_disk_itself(self):
        model = model_of()
        with hl.capture(model, "*", limit=VALUE - 1, spill=True) as acts:
            model(x)
        assert bytes_at(acts) == (0, 4 * VALUE)
        assert acts["3"].equal(model(x))

    def test_several_calls_functions_parts_and_parameters_are_read_back_alike(self):
        model = model_of()
        where = ("*", "1/*", "0[:, 3]", "2[*, 0]", "0.weight:param", "*:inputs")
        with hl.capture(model, *where, keep="all", limit=VALUE, spill=True) as acts:
            model(x)
            model(x + 1)
        with hl.capture(model, *where, keep="all") as expected:
            model(x)
            model(x + 1)
        assert agree(acts, expected)

    def test_gradients_are_read_back_alike(self):
        model = model_of()

        def gradients(**options: Any) -> hl.Cache:
            with hl.capture(model, "*:grad_output", "{1,2,3}:grad_input", keep="all", **options) as acts:
                for factor in (1, 2):
                    (model(x * factor) ** 2).sum().backward()
            return acts

        assert agree(gradients(limit=VALUE, spill=True), gradients())

    @pytest.mark.parametrize("options", [{"limit": 0, "spill": True}, {"limit": VALUE}], ids=str)
    def test_a_gradient_that_comes_in_two_parts_is_summed_and_counts_once(self, options):
        class Reused(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first = nn.Identity()

            def forward(self, value: Tensor) -> Tensor:
                hidden = self.first(value * 1)
                early = (hidden * 3).sum()
                hidden.mul_(2)
                return early + hidden.square().sum()

        model = Reused()
        with hl.capture(model, "first:grad_output", **options) as acts:
            model(x.clone().requires_grad_()).backward()
        assert acts["first:grad_output"].equal(3 + 8 * x)

    def test_the_gradient_of_a_nested_value_is_read_back_alike(self):
        class Pair(nn.Module):
            def forward(self, value: Tensor) -> dict[str, Tensor]:
                return {"a": value * 2, "b": value * 3}

        class Both(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.pair = Pair()

            def forward(self, value: Tensor) -> Tensor:
                found = self.pair(value)
                return (found["a"] * found["b"]).sum()

        caches = []
        for options in ({"limit": 0, "spill": True}, {"limit": VALUE, "spill": True}, {}):
            model, given = Both(), x.clone().requires_grad_()
            with hl.capture(model, "pair:grad_output", "pair", **options) as acts:
                model(given).backward()
            caches.append(acts)
        assert agree(caches[0], caches[2])
        assert agree(caches[1], caches[2])

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_every_dtype_comes_back_bit_for_bit(self, dtype):
        data = bytearray(os.urandom(4 * 3 * dtype.itemsize))
        value = torch.frombuffer(bytearray(byte & 1 for byte in data) if dtype is torch.bool else data, dtype=dtype)
        assert same(through_disk(value.clone().view(4, 3)), value.view(4, 3))

    @pytest.mark.parametrize(
        "value",
        [
            torch.tensor(3.0),
            torch.zeros(0, 3),
            torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
            torch.randn(3, 4).T,
            torch.randn(1, 4).expand(3, 4),
            torch.randn(2, 1, 4).expand(2, 5, 4).permute(2, 0, 1),
            torch.randn(10, 10)[::2, 1:5],
            torch.randn(4, dtype=torch.complex64).conj(),
            torch.randn(4, dtype=torch.complex64).conj().imag,
            torch.randn(1, 3, 1),
        ],
        ids=lambda value: f"{tuple(value.shape)} {value.stride()}",
    )
    def test_a_tensor_comes_back_with_its_shape_and_memory_order(self, value):
        back = through_disk(value)
        assert same(back, value)
        dense = value.clone(memory_format=torch.preserve_format) if 0 not in value.stride() else value
        assert [back.stride(d) for d in range(back.dim()) if back.size(d) > 1] == [
            dense.stride(d) for d in range(dense.dim()) if dense.size(d) > 1
        ]

    def test_an_expanded_tensor_is_written_once(self):
        with hl.capture(model := Echo(), "at.0", limit=0, spill=True) as acts:
            model(torch.randn(1, 4).expand(100_000, 4))
        assert files()[0].stat().st_size < 1000
        assert acts["at.0"].shape == (100_000, 4)

    def test_a_nested_value_comes_back_as_what_it_was(self):
        value = {
            "step": Step(torch.randn(2), "note"),
            "pair": (torch.ones(3), [torch.zeros(3), None, 7]),
            "max": torch.randn(3).max(0),
        }
        back = through_disk(value)
        assert [type(part) for part in back.values()] == [type(part) for part in value.values()]
        assert same(back, value)
        normal = through_disk(Normal(torch.zeros(2), torch.ones(2)))
        assert type(normal) is Normal
        assert normal.scale.equal(torch.ones(2))

    def test_what_is_read_is_a_value_of_its_own_each_time(self):
        with hl.capture(model := Echo(), "at.0", limit=0, spill=True) as acts:
            model(torch.zeros(3))
        acts["at.0"].add_(1)
        assert acts["at.0"].equal(torch.zeros(3))

    def test_what_is_kept_in_inference_mode_can_be_used_by_autograd(self):
        model = model_of()
        with torch.inference_mode(), hl.capture(model, "*", limit=VALUE, spill=True) as acts:
            model(x)
            inside = acts["0"]
        for value in (inside, acts["0"], acts["3"]):
            assert not value.is_inference()
            value.mul_(1)
            (value * nn.Parameter(torch.ones(16))).sum().backward()

    def test_transform_dtype_and_device_act_before_anything_counts(self):
        model = model_of()
        options: dict[str, Any] = {"transform": lambda value: value[:2], "dtype": torch.float16, "device": "cpu"}
        with hl.capture(model, "*", limit=2 * 2 * 16 * 2, spill=True, **options) as acts:
            model(x)
        with hl.capture(model, "*", **options) as expected:
            model(x)
        assert agree(acts, expected)
        assert on_disk(acts) == ["0", "1"]

    def test_what_the_model_overwrites_is_on_disk_as_it_was(self):
        model = model_of(6, inplace=True)
        with hl.capture(model, "*", keep="all", limit=0, spill=True) as acts:
            model(x)
        _, expected = hl.run(model, x, capture="*")
        assert agree(acts, expected)

    def test_a_function_inside_the_forward_does_not_see_the_writing(self):
        model = model_of()
        with hl.capture(model, "**/*", limit=0, spill=True) as acts:
            model(x)
        with hl.capture(model, "**/*") as expected:
            model(x)
        assert agree(acts, expected)

    def test_a_mode_of_the_user_does_not_see_the_writing(self):
        class Names(TorchFunctionMode):
            def __torch_function__(self, function, types, args=(), kwargs=None):
                seen.append(getattr(function, "__name__", ""))
                return function(*args, **(kwargs or {}))

        model, counts = model_of(), []
        for limit in ("1 GB", 0):
            seen: list[str] = []
            with hl.capture(model, "*", limit=limit, spill=True), Names():
                model(x)
            counts.append(len(seen))
        assert counts[0] == counts[1]

    def test_random_numbers_and_outputs_are_what_they_would_have_been(self):
        model = nn.Sequential(nn.Linear(16, 16), nn.Dropout(), nn.Linear(16, 16))
        torch.manual_seed(3)
        expected, state = model(x), torch.get_rng_state()
        torch.manual_seed(3)
        with hl.capture(model, "*", limit=VALUE, spill=True) as acts:
            assert model(x).equal(expected)
        assert torch.get_rng_state().equal(state)
        assert len(acts) == 3

    def test_compiled_modules_run_uncompiled_where_bytes_are_counted(self):
        model = model_of()
        compiled = torch.compile(model, backend="eager")
        with hl.capture(compiled, "*", limit=VALUE, spill=True) as acts:
            compiled(x)
        _, expected = hl.run(model, x, capture="*")
        assert agree(acts, expected)
        torch._dynamo.reset()

    def test_a_stopped_forward_keeps_what_it_has(self):
        model = model_of()
        with hl.capture(model, "{0,1}", limit=VALUE, spill=True, stop=True) as acts:
            assert model(x) is None
        assert acts["0"].equal(model[0](x))


def through_disk(value: Any) -> Any:
    """Return a value as it is read back after a spill to disk."""
    with hl.capture(model := Echo(), "at.0", limit=0, spill=True) as acts:
        model(value)
    assert bytes_at(acts)[0] == 0
    assert len(files()) == sum(tensor.nbytes > 0 for tensor in leaves(value)) or type(value) is Normal
    return acts["at.0"]


class TestWhatGoesWrong:
    @pytest.mark.parametrize(
        ("options", "problem"),
        [
            ({"limit": "2 G"}, says("is not a number of bytes nor", "2 G", 500, 2)),
            ({"limit": -1}, says("is not a number of bytes nor")),
            ({"limit": True}, says("is not a number of bytes nor", "limit=True")),
            ({"limit": 1.5}, says("is not a number of bytes nor", "1.5")),
            ({"limit": float("inf")}, says("is not a number of bytes nor", "limit=inf")),
            ({"limit": "many"}, says("is not a number of bytes nor", "many")),
            ({"limit": [1]}, says("is not a number of bytes nor", 1, "limit=list of")),
            ({"limit": ""}, says("is not a number of bytes nor", "limit=''")),
            ({"spill": True}, says("spill= says where to keep")),
            ({"limit": 1, "spill": "nowhere"}, says("is not a folder make", "nowhere")),
            ({"limit": 1, "spill": 3}, says("is not a folder", 3)),
            ({"limit": 1, "spill": ""}, says("spill= is not a folder")),
            ({"limit": 1, "spill": None}, says("spill=None is not a folder")),
            ({"limit": 1, "spill": True, "detach": False}, says("spill= can't move a value")),
        ],
        ids=str,
    )
    def test_options_that_mean_nothing_are_refused_before_the_model_runs(self, options, problem):
        with pytest.raises(hl.HooklineError, match=problem):
            hl.capture(model_of(), "*", **options)

    def test_run_says_where_the_options_belong(self):
        for name in ("limit", "spill"):
            with pytest.raises(hl.HooklineError, match=says("run has no option", name)):
                hl.run(model_of(), x, capture="0", **{name: 1})

    def test_a_folder_that_is_gone_is_told_and_nothing_is_lost(self, nothing_stays_on_disk):
        hooks = hl.Hooks(model := model_of())
        acts = hooks.capture("*", keep="all", limit=4 * VALUE, spill=True)
        model(x)
        nothing_stays_on_disk.rmdir()
        with pytest.raises(hl.StoreError, match=says("the oldest value", "0", 512, "0")):
            model(x)
        nothing_stays_on_disk.mkdir()
        assert [len(acts.calls(site)) for site in acts] == [1, 1, 1, 1]
        assert bytes_at(acts) == (4 * VALUE, 0)
        model(x)
        assert bytes_at(acts) == (4 * VALUE, 4 * VALUE)
        assert [len(acts.calls(site)) for site in acts] == [2, 2, 2, 2]
        assert all(value.equal(model[0](x)) for value in acts.calls("0"))
        hooks.remove()

    def test_a_disk_that_is_full_is_told_and_nothing_is_lost(self, monkeypatch):
        hooks = hl.Hooks(model := model_of())
        acts = hooks.capture("*", keep="all", limit=4 * VALUE, spill=True)
        model(x)
        with monkeypatch.context() as full:
            full.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=100))
            with pytest.raises(hl.StoreError, match=says("could not be moved to")):
                model(x)
        assert [len(acts.calls(site)) for site in acts] == [1, 1, 1, 1]
        model(x)
        assert [len(acts.calls(site)) for site in acts] == [2, 2, 2, 2]
        hooks.remove()

    @pytest.mark.process
    def test_a_disk_that_fills_up_in_the_midst_of_a_value_leaves_no_file(self, nothing_stays_on_disk):
        code = """
import resource, signal, torch, hookline as hl
from torch import nn
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
model = nn.Identity()
with hl.capture(model, "", keep="all", limit=0, spill=True) as acts:
    model(torch.zeros(10))
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
    try:
        model([torch.ones(10), torch.ones(10_000)])
    except hl.StoreError as error:
        print("File too large" in str(error), "40,040 bytes of ''" in str(error))
import glob, tempfile
print(len(glob.glob(tempfile.gettempdir() + "/hookline-*/*")), acts[""].sum().item())
"""
        said = python("-W", "ignore::DeprecationWarning", "-c", code, TMPDIR=str(nothing_stays_on_disk))
        assert said.splitlines() == ["True True", "1 0.0"]

    @pytest.mark.parametrize(("harm", "found"), [("gone", "No such file"), ("damaged", "damaged")])
    def test_a_file_that_somebody_took_or_changed_is_told(self, harm, found):
        with hl.capture(model := model_of(), "*", limit=VALUE, spill=True) as acts:
            model(x)
        path = files()[0]
        data = path.read_bytes()
        path.unlink() if harm == "gone" else path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        with pytest.raises(hl.StoreError, match=says("was moved to disk and can't be read back", "0", found)):
            acts["0"]
        assert acts["3"].equal(model(x))

    @pytest.mark.filterwarnings("ignore:torch.quantize")
    @pytest.mark.parametrize(
        ("value", "what"),
        [
            (torch.eye(16).to_sparse(), "a torch.sparse_coo tensor"),
            (torch.quantize_per_tensor(torch.ones(64), 1.0, 0, torch.qint8), "a tensor of torch.qint8 on cpu"),
            (torch.nested.nested_tensor([torch.ones(20), torch.ones(30)]), "a nested tensor"),
        ],
        ids=["sparse", "quantized", "nested"],
    )
    def test_what_can_not_be_on_disk_stays_in_memory_and_the_next_oldest_goes(self, value, what):
        room = bytes_in(value)
        with hl.capture(model := Echo(), "at.*", keep="all", limit=room + 40, spill=True).when_missing(
            "ignore"
        ) as acts:
            model([torch.ones(10), value])
            model(torch.ones(10), 1)
            assert on_disk(acts) == ["at.1"]
            with pytest.raises(hl.CacheFull, match=says("nothing is left to move", "at.0", what)):
                model([torch.ones(20), value.clone()], 2)
        assert acts["at.0"][0].equal(acts["at.1"])

    def test_what_was_overwritten_is_found_out_when_it_is_moved(self):
        class Overwrites(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)

            def forward(self, value: Tensor) -> Tensor:
                hidden = self.first(value)
                hidden.relu_()
                return self.last(hidden)

        model = Overwrites()
        with torch.no_grad(), hl.capture(model, "*", clone=False, limit=VALUE, spill=True) as acts:
            output = model(x)
        assert bytes_at(acts)[0] == VALUE
        for read in (lambda: acts["first"], lambda: acts.calls("first"), lambda: acts.select("first")["first"]):
            with pytest.raises(hl.StaleValue, match=says("was overwritten in place after", "first")):
                read()
        assert "first  " in repr(acts)
        assert acts["last"].equal(output)
        assert not files()

    def test_what_was_overwritten_and_could_not_be_on_disk_either_is_let_go(self):
        with hl.capture(model := Echo(), "at.{0,1}", clone=False, limit=200, spill=True) as acts:
            value = torch.eye(4).to_sparse()
            model(value)
            value.add_(value)
            model(torch.ones(50), 1)
        with pytest.raises(hl.StaleValue):
            acts["at.0"]
        assert acts["at.1"].equal(torch.ones(50))

    def test_what_is_overwritten_after_it_was_moved_is_what_it_was(self):
        model = nn.Sequential(nn.Linear(16, 16), nn.Identity())
        with torch.no_grad(), hl.capture(model, "*", clone=False, limit=0, spill=True) as acts:
            output = model(x)
            expected = output.clone()
            output.zero_()
        assert acts["0"].equal(expected)

    def test_a_forward_that_fails_leaves_what_was_kept_before_it(self):
        class Fails(nn.Module):
            def forward(self, value: Tensor) -> Tensor:
                raise RuntimeError("on purpose")

        model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), Fails())
        with pytest.raises(RuntimeError, match="on purpose"), hl.capture(model, "*", limit=0, spill=True) as acts:
            model(x)
        assert list(acts) == ["0", "1"]
        assert acts["0"].equal(model[0](x))

    def test_calls_of_earlier_forwards_are_there_after_one_was_refused(self, tmp_path):
        model = model_of()
        with pytest.raises(hl.CacheFull), hl.capture(model, "*", keep="all", limit=6 * VALUE) as acts:
            for _ in range(3):
                model(x)
        assert list(acts) == ["0", "1", "2", "3"]
        acts.save(tmp_path / "acts")
        assert [len(hl.Cache.load(tmp_path / "acts").calls(site)) for site in "0123"] == [2, 2, 1, 1]


class TestProcessesAndThreads:
    @pytest.mark.process
    @pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
    def test_a_forked_process_leaves_the_files_and_nothing_is_left_when_the_interpreter_ends(
        self, nothing_stays_on_disk
    ):
        code = """
import glob, os, sys, tempfile, torch, hookline as hl
from torch import nn
model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
with hl.capture(model, "*", limit=0, spill=True) as acts:
    output = model(torch.ones(2, 4))
hooks = hl.Hooks(model)
keep = [hooks.capture("*", limit=0, spill=True)]
keep.append(keep)
model(torch.ones(2, 4))
child = os.fork()
if child == 0:
    print(acts["1"].equal(output), flush=True)
    acts.clear()
    sys.exit()
os.waitpid(child, 0)
print(acts["1"].equal(output), len(glob.glob(tempfile.gettempdir() + "/hookline-*/*")))
"""
        said = python("-W", "ignore::DeprecationWarning", "-c", code, TMPDIR=str(nothing_stays_on_disk))
        assert said == "True\nTrue 4\n"
        assert not list(nothing_stays_on_disk.iterdir())

    def test_threads_that_fill_one_cache_share_its_limit(self):
        model = Echo(8)
        hooks = hl.Hooks(model)
        acts = hooks.capture("at.*", keep="all", limit=100, spill=True)
        problems: list[BaseException] = []

        def fill(place: int) -> None:
            try:
                for number in range(30):
                    model(torch.full((10,), float(number)), place)
                    assert acts.calls(f"at.{place}")[-1][0] == number
                    repr(acts)
            except BaseException as error:
                problems.append(error)

        threads = [threading.Thread(target=fill, args=(place,)) for place in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not problems
        assert bytes_at(acts)[0] <= 100
        for place in range(8):
            assert [value.tolist() for value in acts.calls(f"at.{place}")] == [[float(n)] * 10 for n in range(30)]
        hooks.remove()

    def test_values_in_a_cycle_are_counted_until_they_are_collected(self):
        with hl.capture(model := model_of(), "0", limit=2 * VALUE) as acts:
            model(x)
            cycle: list[Any] = [acts.select("0")]
            cycle.append(cycle)
            model(x)
            second = acts.select("0")
            model(x)
            with pytest.raises(hl.CacheFull):
                model(x)
            del cycle
            gc.collect()
            model(x)
        assert len(second) == 1


shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
tensors = st.builds(
    lambda shape, dtype, turn: torch.randn(shape).to(dtype).permute(tuple(range(len(shape)))[::turn]),
    shapes,
    st.sampled_from([torch.float32, torch.float16, torch.int64, torch.bool, torch.complex64]),
    st.sampled_from([1, -1]),
)
values = st.recursive(
    tensors | st.none() | st.text(max_size=3),
    lambda parts: (
        st.lists(parts, max_size=3) | st.dictionaries(st.text(max_size=2), parts, max_size=2) | st.tuples(parts)
    ),
    max_leaves=4,
)
programs = st.lists(st.tuples(st.integers(0, 2), values | st.just("clear")), max_size=15)


@pytest.mark.filterwarnings("ignore:.*is the value that was read before")  # Every site is read after each forward.
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    program=programs,
    keep=st.sampled_from(["last", "all", 1, 2, 3]),
    limit=st.integers(0, 300),
    clone=st.sampled_from([None, True, False]),
)
def test_a_cache_with_a_limit_reads_the_same_as_one_without(program, keep, limit, clone):
    model = Echo()
    limited, free = hl.Hooks(model), hl.Hooks(model)
    acts = limited.capture("at.*", keep=keep, clone=clone, limit=limit, spill=True)
    expected = free.capture("at.*", keep=keep, clone=clone)
    for place, value in program:
        if isinstance(value, str) and value == "clear":
            acts.clear()
            expected.clear()
        else:
            model(value, place)
        gc.collect(0)
        assert bytes_at(acts)[0] <= limit
        assert agree(acts, expected)
    assert str(acts.stats()) == str(expected.stats())
    acts.clear()  # Now all of the limit is free again.
    model(torch.zeros(limit, dtype=torch.uint8))
    assert bytes_at(acts) == (limit, 0)
    limited.remove()
    free.remove()


@pytest.mark.gpu
def test_what_was_on_a_gpu_comes_back_to_it():
    model, value = model_of().cuda(), x.cuda()
    with torch.no_grad(), hl.capture(model, "*", keep="all", limit=2 * VALUE, spill=True) as acts:
        before = torch.cuda.memory_allocated()
        for _ in range(5):
            model(value)
        assert torch.cuda.memory_allocated() - before <= 3 * VALUE
    with hl.capture(model, "*", keep="all") as expected:
        for _ in range(5):
            model(value)
    assert acts["0"].is_cuda
    assert bytes_at(acts) == (2 * VALUE, 18 * VALUE)
    assert agree(acts, expected)


def test_a_file_of_a_spilled_value_is_one_that_any_reader_opens():
    with hl.capture(model := Echo(), "at.0", limit=0, spill=True) as acts:
        model(torch.arange(3.0))
    (found,) = safetensors.torch.load_file(*files()).values()
    assert found.equal(acts["at.0"])
