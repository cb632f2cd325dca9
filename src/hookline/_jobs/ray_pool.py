"""Run a job on Ray: a pool of Ray Data actors, each with a copy of the job, runs the units that are left.

The job is sent once, then unit numbers only. If an actor dies, Ray replaces it and gives its unit to another one.
"""

from __future__ import annotations

import logging
import os
import pickle
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

from hookline._kernel import refuse_unknown
from hookline.errors import HooklineError, first_line

TRIES = 4  # A unit that was begun this often without being finished is assumed to kill its workers.


def check_engine(engine: str | None, workers: int | None) -> None:
    """Raise if `engine=` or `workers=` is not an option of a job."""
    refuse_unknown((None, "ray"), engine=engine)
    if engine is None and workers is not None:
        raise HooklineError(
            f'workers={workers!r} is for engine="ray"; processes of a launcher share the units by themselves'
        )
    if workers is not None and (type(workers) is not int or workers < 1):
        raise HooklineError(f"workers= is a number of processes from 1 on, not {workers!r}")


class RayPool:
    """A job on a Ray cluster, and the workers that may run it. See `ray_pool`."""

    def __init__(self, ray: ModuleType, job: Any, workers: int | None, device: torch.device | None) -> None:
        self._ray = ray
        self._held = ray.put(job)  # Sent once, however many workers read it.
        self._gpus = _gpus(ray, device)
        self.workers = workers or max(int(ray.cluster_resources().get("GPU" if self._gpus else "CPU", 1)), 1)

    def call(self, function: Callable[[Any], Any]) -> Any:
        """Return `function(job)`, called on a worker."""
        remote = self._ray.remote(num_gpus=self._gpus)(_packed)
        return _unpacked(self._ray.get(remote.remote(function, self._held)))

    def each(self, function: Callable[[Any, int], Any], units: Sequence[int]) -> Iterator[Any]:
        """Yield `function(job, unit)` of each unit when it is done, in any order."""
        ray = self._ray
        tries = _counter_of_tries(ray)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Ray uses its own deprecated settings.
            data = ray.data.from_items([{"unit": unit} for unit in units], override_num_blocks=len(units))
        data.context.enable_progress_bars = False
        data.context.print_on_execution_start = False
        size = min(self.workers, len(units))
        pool = ray.data.ActorPoolStrategy(size=size, max_tasks_in_flight_per_actor=1)
        done = data.map_batches(
            RayWorker,
            fn_constructor_args=([self._held], function, tries, TRIES),
            batch_size=1,
            compute=pool,
            num_gpus=self._gpus or None,
        )
        try:
            for row in done.iter_rows():
                yield _unpacked(row["done"])
        except ray.exceptions.RayError as error:
            raise HooklineError(
                f"Ray gave up: {first_line(error)}; finished units stay, and the same call goes on"
            ) from error


@contextmanager
def ray_pool(job: Any, workers: int | None, device: torch.device | None = None) -> Iterator[RayPool]:
    """Send a job to the running Ray cluster, or else to a new one on this machine, which is stopped at the end.

    Args:
        workers: How many processes run it. None is one for each GPU or, if there are none, each CPU.
        device: Where the job runs, if that is known. Workers get a GPU each unless it is none.
    """
    ray = _ray()
    with _cluster(ray, workers), _quiet():
        yield RayPool(ray, job, workers, device)


class RayWorker:
    """One actor. It keeps its copy of the job, and what the job makes when its first unit runs, such as the model."""

    def __init__(self, held: list[Any], function: Callable[[Any, int], Any], tries: Any, most: int) -> None:
        import ray

        self.job = ray.get(held[0])
        self.function = function
        self.tries = tries
        self.most = most

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[bytes]]:
        """Run the unit that a batch of Ray Data names, and return its result, pickled."""
        return {"done": [_packed(self.run, int(batch["unit"][0]))]}

    def run(self, unit: int) -> Any:
        """Run a unit, unless it has killed too many workers: Ray would restart them forever."""
        import ray

        if ray.get(self.tries.begin.remote(unit)) > self.most:
            raise HooklineError(f"unit {unit} has killed its worker {self.most} times; is there enough memory for it?")
        return self.function(self.job, unit)


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


def _gpus(ray: ModuleType, device: torch.device | None) -> float:
    """Return how many GPUs a worker gets: one if the cluster has any, unless the job runs on another device."""
    found = ray.cluster_resources().get("GPU", 0)
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
