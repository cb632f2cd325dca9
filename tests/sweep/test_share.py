"""A sweep among several processes, and resumed in a folder: the result is that of one process."""

from __future__ import annotations

import builtins
import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import hookline as hl
from tests.errors.wording import says
from tests.support.models import GPT, mlp
from tests.support.prepared_processes import prepared_processes
from tests.support.ranks import on_two_ranks

X = torch.linspace(-1, 1, 80).reshape(2, 5, 8)
WHERE = ["h.*", "h.*.mlp[:, *]", "head"]  # 3 + 15 + 1 places.


def gpt() -> GPT:
    """Return the same model in each process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return GPT().eval()


def norm(output: Tensor) -> Tensor:
    return output.norm()


def each(output: Tensor) -> Tensor:
    """Return a number for each row."""
    return output.flatten(1).norm(dim=1)


class Counted:
    """A metric that counts its calls. How often it was called is not a part of what it is."""

    def __init__(self, metric: Callable[[Tensor], Tensor] = norm) -> None:
        self.metric = metric
        self.calls = 0

    def __call__(self, output: Tensor) -> Tensor:
        self.calls += 1
        return self.metric(output)

    def fingerprint(self) -> str:
        return "counted"


class Dying(Counted):
    """A metric that kills its process once, when the folder has so many units."""

    def __init__(self, folder: Path, units: int) -> None:
        super().__init__()
        self.folder = folder
        self.units = units

    def __call__(self, output: Tensor) -> Tensor:
        if not (self.folder / "died").exists() and len(done(self.folder / "to")) >= self.units:
            (self.folder / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(output)


def done(to: Path) -> list[str]:
    """Return the files of the units that are done."""
    return sorted(path.name for path in (to / "units").glob("*.safetensors"))


def swept(metric: Any = norm, model: nn.Module | None = None, where: Any = WHERE, **options: Any) -> Any:
    return hl.sweep(model or gpt(), where, metric, **{"run": (X,), "progress": False, **options})


def check_same(found: Any, expected: Any) -> None:
    """Compare two sweeps. Batches of different sizes round differently."""
    assert list(found) == list(expected)
    for site in expected:
        assert type(found[site]) is type(expected[site])
        torch.testing.assert_close(found[site], expected[site], rtol=1e-5, atol=1e-6, msg=site)
    torch.testing.assert_close(found.base, expected.base)
    assert str(found).partition("\n")[0] == str(expected).partition("\n")[0]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"batch": 1},
        {"batch": 4, "skip": True, "where": ["h.*", "h.*.mlp"]},
        {"metric": each, "run": [(X,), (X.flip(0),)], "against": [(X + 1,), (X - 1,)]},
        {"metric": lambda output: output[0, 0], "patch": "mean"},
        {"metric_at": "h.2", "edit": torch.tanh, "where": "h.*[:, *]"},
        {"run": {"x": X}, "patch": "resample"},
        {"where": {"h.*": 1.0, "head": torch.ones(4)}},
    ],
)
def test_a_folder_holds_what_a_sweep_without_one_returns_and_it_is_not_measured_again(tmp_path, options):
    metric = Counted(options.pop("metric", norm))
    expected = swept(metric, **options)
    check_same(swept(metric, to=tmp_path / "to", **options), expected)
    assert done(tmp_path / "to")
    metric.calls = 0
    again = swept(metric, to=tmp_path / "to", **options)
    assert metric.calls == 1  # The first run, which finds the places.
    check_same(again, expected)


def test_the_notes_of_units_are_added_up(tmp_path):
    swept(to=tmp_path / "to")
    (note,) = swept(to=tmp_path / "to").notes
    assert note.startswith("19 places in ")
    alone = gpt().train()
    alone.h[0].register_module("drop", nn.BatchNorm1d(5))
    alone.h[0].register_forward_hook(lambda module, args, output: module.drop(output))
    with pytest.warns(hl.HooklineWarning, match=says("it changes its buffers")):
        found = swept(model=alone, to=tmp_path / "alone")
    assert found.notes == ("each place was run alone: it changes its buffers, as BatchNorm does in train mode",)


def test_a_metric_that_runs_the_model_is_resumed_too(tmp_path):
    model = gpt()
    model.calls = 0
    model.register_forward_hook(lambda module, args, output: setattr(module, "calls", module.calls + 1))
    expected = hl.sweep(model, "h.*", model_norm(model))
    for _ in range(2):
        check_same(hl.sweep(model, "h.*", model_norm(model), to=tmp_path), expected)


def model_norm(model: nn.Module) -> Callable[[], Tensor]:
    def measure() -> Tensor:
        model.zero_grad()
        model(X.clone().requires_grad_()).sum().backward()
        return model.head.weight.grad.norm()

    return measure


def _in_a_process(function: Callable[..., Any], *args: Any) -> int | None:
    process = prepared_processes().Process(target=function, args=args)
    process.start()
    process.join()
    return process.exitcode


def _sweep_until_it_dies(folder: str, units: int) -> None:
    swept(Dying(Path(folder), units), to=Path(folder) / "to", batch=1)


@pytest.mark.process
def test_what_a_killed_process_has_measured_is_not_measured_again(tmp_path):
    assert _in_a_process(_sweep_until_it_dies, str(tmp_path), 2) == -signal.SIGKILL
    assert len(done(tmp_path / "to")) == 2
    metric = Dying(tmp_path, 2)
    found = swept(metric, to=tmp_path / "to", batch=1)
    assert 1 < metric.calls < 20 - 2
    check_same(found, swept(batch=1))


def _with_other_weights() -> GPT:
    model = gpt()
    with torch.no_grad():
        model.head.weight[0, 0] += 1e-3
    return model


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": _with_other_weights()}, says("a sweep of other weights")),
        ({"where": [*WHERE, "h.0.norm"]}, says("a sweep without this place", "h.0.norm")),
        ({"where": WHERE[:-1]}, says("a sweep with another place", "head")),
        ({"patch": 1.0}, says("a sweep with another change", "set to 0.0", "set to 1.0")),
        ({"run": (X + 1,)}, says("a sweep of other inputs")),
        ({"run": [(X,), (X,)]}, says("a sweep of other inputs")),
        ({"against": (X + 1,)}, says("the values that it puts")),
        ({"metric": lambda output: output.norm()}, says("a sweep with another metric")),
        ({"metric_at": "head"}, says("a sweep measured elsewhere", "head")),
    ],
)
def test_a_folder_of_another_sweep_is_refused_with_what_differs(tmp_path, options, message):
    swept(to=tmp_path / "to")
    with pytest.raises(hl.StoreError, match=message):
        swept(to=tmp_path / "to", **options)


def test_values_and_edits_that_differ_are_refused(tmp_path):
    scale = 2.0

    def scaled(value: Tensor) -> Tensor:
        return value * scale

    swept(edit=scaled, to=tmp_path / "edit")
    swept(edit=scaled, to=tmp_path / "edit")
    scale = 3.0
    with pytest.raises(hl.StoreError, match=says("its edit differs")):
        swept(edit=scaled, to=tmp_path / "edit")
    swept(where={"h.*": 1.0, "head": 1.0}, to=tmp_path / "order")
    with pytest.raises(hl.StoreError, match=says("its places come in another")):
        swept(where={"head": 1.0, "h.*": 1.0}, to=tmp_path / "order")
    _, cache = hl.run(gpt(), X, capture="h.*")
    swept(where=cache, to=tmp_path / "cache")
    with pytest.raises(hl.StoreError, match=says("the values that it puts")):
        swept(where=cache.map(torch.neg), to=tmp_path / "cache")


def test_a_folder_of_something_else_or_damaged_is_refused(tmp_path):
    hl.harvest(gpt(), X, "h.0", to=tmp_path / "store", batch_size=2, progress=False)
    with pytest.raises(hl.StoreError, match=says("holds a harvest")):
        swept(to=tmp_path / "store")
    with pytest.raises(hl.HooklineError, match=says("to= is not a folder")):
        swept(to="")
    swept(to=tmp_path / "to")
    unit = tmp_path / "to/units" / done(tmp_path / "to")[0]
    unit.write_bytes(unit.read_bytes()[:-5])
    with pytest.raises(hl.StoreError, match=says("safetensors' is damaged", "00000000")):
        swept(to=tmp_path / "to")
    unit.unlink()
    check_same(swept(to=tmp_path / "to"), swept())
    plan = tmp_path / "to/sweep.json"
    whole = plan.read_text()
    twice, without_model = whole.replace('"units": [', '"units": [[0, [0]],'), whole.replace('"model": {', '"other": {')
    for text in ("", "[]", "{}", twice, without_model):
        plan.write_text(text)
        with pytest.raises(hl.StoreError, match=says("json' is damaged")):
            swept(to=tmp_path / "to")


def test_a_folder_may_be_remote():
    pytest.importorskip("fsspec")
    metric = Counted()
    check_same(swept(metric, to="memory://swept"), swept(metric))
    metric.calls = 0
    swept(metric, to="memory://swept")
    assert metric.calls == 1


def test_an_edit_that_returns_nothing_anywhere_is_refused_also_in_a_folder(tmp_path):
    for _ in range(2):
        with pytest.raises(hl.EditError, match=says("returned None at every place")):
            swept(edit=lambda value: None, to=tmp_path / "to")


def test_batches_of_other_places_are_refused(tmp_path):
    with pytest.raises(hl.HooklineError, match=says("is not a place in", "h.0[:, 4]")):
        swept(each, where="h.0[:, *]", run=[(X,), (X[:, :4],)], to=tmp_path / "to")


def test_a_sweep_of_one_process_takes_no_fingerprints(tmp_path):
    class Asked(Counted):
        asked = 0

        def fingerprint(self) -> str:
            self.asked += 1
            return super().fingerprint()

    metric = Asked()
    swept(metric)
    assert metric.asked == 0
    swept(metric, to=tmp_path / "to")
    assert metric.asked > 0


def test_one_rank_does_the_share_of_one_that_never_comes(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    check_same(swept(to=tmp_path / "to"), swept(share=False))


def test_ranks_that_are_not_connected_are_told_of_it(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.warns(hl.HooklineWarning, match=says("each of the", 2)):
        swept()
    with pytest.raises(hl.HooklineError, match=says("share=True can't be")):
        swept(share=True)


@pytest.mark.process
@on_two_ranks
def test_ranks_measure_their_share_and_return_the_whole(rank: int) -> None:
    for options in ({}, {"batch": 1}, {"metric": each, "run": [(X,), (X + 1,)]}):
        metric = Counted(options.pop("metric", norm))
        expected = swept(metric, share=False, **options)
        whole, metric.calls = metric.calls, 0
        check_same(swept(metric, **options), expected)
        assert metric.calls < 0.8 * whole


@pytest.mark.process
@on_two_ranks
def test_ranks_share_a_folder(rank: int) -> None:
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    metric = Counted()
    found = swept(metric, to=Path(folder[0]) / "to", batch=1)
    assert metric.calls < 20
    check_same(found, swept(share=False, batch=1))


@pytest.mark.process
@on_two_ranks
def test_ranks_share_a_metric_that_runs_the_model(rank: int) -> None:
    model = gpt()
    found = hl.sweep(model, WHERE[:2], model_norm(model))
    check_same(found, hl.sweep(model, WHERE[:2], model_norm(model), share=False))


@pytest.mark.process
@on_two_ranks
def test_ranks_with_different_sweeps_are_told_what_differs(rank: int) -> None:
    with pytest.raises(hl.HooklineError, match=says("has another sweep than rank", 1, 0)):
        swept(run=(X + rank,))
    assert swept(run=(X + rank,), share=False).base == norm(gpt()(X + rank)).item()


@pytest.mark.process
@on_two_ranks
def test_an_error_on_one_rank_is_raised_on_all(rank: int) -> None:
    def failing(output: Tensor) -> Tensor:
        if dist.get_rank() == 1:
            raise ValueError("no such thing")
        return output.norm()

    expected = ValueError if rank else hl.HooklineError
    with pytest.raises(expected, match="no such thing" if rank else "failed on rank 1: ValueError: no such thing"):
        swept(failing)


@pytest.mark.process
@on_two_ranks
def test_a_model_that_ranks_run_together_is_not_shared(rank: int) -> None:
    ddp = nn.parallel.DistributedDataParallel(gpt())
    check_same(swept(model=ddp), swept(share=False))
    with pytest.raises(hl.HooklineError, match=says("share=True can't be a")):
        swept(model=ddp, share=True)


def test_options_that_can_not_be_are_refused(tmp_path):
    with pytest.raises(hl.HooklineError, match=says("is for engine= ray", 2)):
        swept(workers=2)
    with pytest.raises(hl.HooklineError, match=says("engine= is one of None", "ray", "spark")):
        swept(engine="spark")
    with pytest.raises(hl.HooklineError, match=says("is not None, True or False", "share=", "yes")):
        swept(share="yes")
    with pytest.raises(hl.HooklineError, match=says("metric runs the model")):
        hl.sweep(gpt, "h.*", lambda: 1.0, engine="ray")
    with pytest.raises(hl.SiteError, match=says("sweep takes a model or")):
        hl.sweep(gpt, "h.*", norm, run=(X,))


@pytest.mark.parametrize(
    "metric",
    [
        lambda output: output[0].half(),
        lambda output: torch.stack([output[0, 0, 0] > 0, output[1, 0, 0] > 0]),
        lambda output: float("inf") if output[0, 0, 0] > 0 else float("nan"),
    ],
    ids=["half", "bool", "not finite"],
)
def test_measurements_survive_a_file(tmp_path, metric):
    counted = Counted(metric)
    first = swept(counted, where="head[:, *]", to=tmp_path / "to")
    counted.calls = 0
    again = swept(counted, where="head[:, *]", to=tmp_path / "to")
    assert counted.calls == 1
    assert len(again) == 5
    for found in (again, swept(metric, where="head[:, *]")):
        for one, two in zip((found.base, *found.values()), (first.base, *first.values()), strict=True):
            assert type(one) is type(two)
            torch.testing.assert_close(torch.as_tensor(one), torch.as_tensor(two), equal_nan=True)


@pytest.fixture(scope="module")
def _cluster():
    """A Ray cluster that the user has started. Ray replaces `print` in builtins, which is undone."""
    ray = pytest.importorskip("ray")
    own = builtins.print
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    yield
    ray.shutdown()
    builtins.print = own


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.usefixtures("_cluster")
def test_ray_measures_what_one_process_does_though_a_worker_dies(tmp_path):
    metric = Dying(tmp_path, 1)
    found = swept(metric, to=tmp_path / "to", batch=1, engine="ray", workers=1)
    assert (tmp_path / "died").exists()
    assert metric.calls == 0
    check_same(found, swept(batch=1))
    assert swept(metric, to=tmp_path / "to", batch=1).base == found.base
    assert metric.calls == 1  # The first run, for the base value.


@pytest.mark.process
@pytest.mark.deep
@pytest.mark.slow
@pytest.mark.usefixtures("_cluster")
def test_ray_gets_a_function_that_makes_the_model_or_a_metric_that_holds_it():
    found = hl.sweep(gpt, "h.*", each, run=[(X,), (X + 1,)], engine="ray", workers=1, progress=False)
    check_same(found, swept(each, where="h.*", run=[(X,), (X + 1,)]))
    model = mlp().train()
    model.append(nn.Dropout())
    with pytest.warns(hl.HooklineWarning, match=says("drops different elements")):
        hl.sweep(model, "0", lambda: model(X[0, :, :4]).sum(), engine="ray", workers=1, progress=False)
