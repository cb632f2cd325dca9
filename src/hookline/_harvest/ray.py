"""Run a harvest on Ray: a pool of Ray Data actors, each with the model, runs the units that are left.

Only the job (with the function that makes the model) and unit numbers are sent, never weights or activations. If an
actor dies, Ray replaces it and gives its unit to another one.
"""

from __future__ import annotations

import logging
import os
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from torch import nn

from hookline._harvest.run_harvest import Job, run_unit
from hookline._harvest.run_units import Progress
from hookline._store.writer import remove_leftovers
from hookline.errors import HooklineError

TRIES = 4  # A unit that was begun this often without being finished is assumed to kill its workers.


def on_ray(job: Job, workers: int | None = None) -> None:
    """Run the remaining units of a harvest on the running Ray cluster, or else on a new one on this machine."""
    if isinstance(job.model, nn.Module):
        raise HooklineError(
            'engine="ray" sends a function that makes the model, not its weights; give one instead of the '
            f"{type(job.model).__name__}, as in harvest(lambda: AutoModel.from_pretrained(...), ...)"
        )
    if workers is not None and (type(workers) is not int or workers < 1):
        raise HooklineError(f"workers= is a number of processes from 1 on, not {workers!r}")
    ray = _ray()
    with _cluster(ray, workers), _quiet():
        gpus = _gpus(ray, job)
        held = ray.put(job)  # Sent once, however many workers read it.
        # A worker begins the store, so that this machine needs neither a GPU nor the model.
        left, samples, done = _unpacked(ray.get(ray.remote(num_gpus=gpus)(begin).remote(held)))
        if left:
            number = min(workers or int(ray.cluster_resources().get("GPU" if gpus else "CPU", 1)), len(left))
            with Progress(samples, done, job.progress) as progress:
                for counts in _over_actors(ray, held, left, max(number, 1), gpus):
                    progress.wrote(counts["rows"], counts["nbytes"])
                    progress.passed(counts["samples"])
    remove_leftovers(job.storage)  # Some workers may have died.


def begin(job: Job) -> bytes:
    """Begin or resume the store; return the units left, the number of samples, and how many are done, pickled."""

    def found() -> tuple[list[int], int | None, int]:
        left = job.pending()
        _, manifest = job.prepare()
        samples, size = job.source.samples, manifest.plan["unit"]
        return left, samples, max((samples or 0) - len(left) * size, 0)

    return _packed(found)


def _counter_of_tries(ray: ModuleType) -> Any:
    """Start an actor that counts how often each unit was begun. It outlives the workers."""

    # Ray pickles a class that is defined inside a function by value, so this actor imports neither hookline nor torch.
    class Tries:
        def __init__(self) -> None:
            self.begun: dict[int, int] = {}

        def begin(self, unit: int) -> int:
            """Count a try, and return its number."""
            self.begun[unit] = self.begun.get(unit, 0) + 1
            return self.begun[unit]

    return ray.remote(num_cpus=0)(Tries).remote()


class Worker:
    """One actor. It makes the model when it runs its first unit, and keeps it."""

    def __init__(self, held: list[Any], tries: Any, most: int) -> None:
        import ray

        self.job: Job = ray.get(held[0])
        self.tries = tries
        self.most = most

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[bytes]]:
        """Run the unit that a batch of Ray Data names, and return its counts, pickled."""
        return {"done": [_packed(self.run, int(batch["unit"][0]))]}

    def run(self, unit: int) -> dict[str, int]:
        """Run a unit, unless it has killed too many workers: Ray would restart them forever."""
        import ray

        if ray.get(self.tries.begin.remote(unit)) > self.most:
            raise HooklineError(f"unit {unit} has killed its worker {self.most} times; is there enough memory for it?")
        counts = run_unit(self.job, unit)
        return {"unit": unit, "samples": counts.samples, "rows": counts.rows, "nbytes": counts.nbytes}


def _over_actors(ray: ModuleType, held: Any, units: list[int], workers: int, gpus: float) -> Iterator[dict[str, int]]:
    """Yield the counts of each unit when it is done."""
    tries = _counter_of_tries(ray)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Ray uses its own deprecated settings.
        data = ray.data.from_items([{"unit": unit} for unit in units], override_num_blocks=len(units))
    data.context.enable_progress_bars = False
    data.context.print_on_execution_start = False
    pool = ray.data.ActorPoolStrategy(size=workers, max_tasks_in_flight_per_actor=1)
    done = data.map_batches(
        Worker, fn_constructor_args=([held], tries, TRIES), batch_size=1, compute=pool, num_gpus=gpus or None
    )
    try:
        for row in done.iter_rows():
            yield _unpacked(row["done"])
    except ray.exceptions.RayError as error:
        raise HooklineError(
            f"Ray gave up: {str(error).strip().partition(chr(10))[0]}; finished units stay, and the same call goes on"
        ) from error


def _packed(function: Callable[..., Any], *args: Any) -> bytes:
    """Return the pickled result or exception of a function. Ray would wrap, log and print an exception."""
    try:
        return pickle.dumps((function(*args), None))
    except Exception as error:
        try:
            data = pickle.dumps((None, error))
            pickle.loads(data)
        except Exception:  # Not every exception survives pickling.
            return pickle.dumps((None, HooklineError(f"{type(error).__name__}: {error}")))
        return data


def _unpacked(data: bytes) -> Any:
    value, error = pickle.loads(data)
    if error is not None:
        raise error
    return value


def _gpus(ray: ModuleType, job: Job) -> float:
    """Return how many GPUs a worker gets: one if the cluster has any, unless device= is another device."""
    device, found = job.options.device, ray.cluster_resources().get("GPU", 0)
    if device is not None and device.type == "cuda" and not found:
        raise HooklineError(
            f"device={str(device)!r}, but Ray knows of no GPU; give its nodes some, or leave device= out"
        )
    return 1.0 if found and (device is None or device.type == "cuda") else 0.0


def _ray() -> ModuleType:
    """Import Ray and Ray Data."""
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise HooklineError('engine="ray" needs Ray Data: pip install "hookline[ray]"') from error
    return ray


@contextmanager
def _cluster(ray: ModuleType, workers: int | None) -> Iterator[None]:
    """Use the running cluster, or start one on this machine and stop it at the end."""
    if ray.is_initialized():
        yield
        return
    settings: dict[str, Any] = {}
    if not os.environ.get("RAY_ADDRESS"):
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Otherwise Ray contacts a server on the internet.
        processors = max(workers or 1, os.cpu_count() or 1)
        settings = {"address": "local", "num_cpus": processors, "include_dashboard": False}
    ray.init(log_to_driver=False, logging_level=logging.ERROR, **settings)
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def _quiet() -> Iterator[None]:
    """Make Ray Data log errors only."""
    logger = logging.getLogger("ray.data")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
