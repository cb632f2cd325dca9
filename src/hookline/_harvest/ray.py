"""Run a harvest on Ray. Workers get the job, with the function that makes the model: no weights and no activations."""

from __future__ import annotations

from torch import nn

from hookline._harvest.run_harvest import Job, run_unit
from hookline._harvest.run_units import Progress
from hookline._jobs.ray_pool import ray_pool
from hookline._store.writer import remove_leftovers
from hookline.errors import HooklineError


def on_ray(job: Job, workers: int | None = None) -> None:
    """Run the remaining units of a harvest on Ray."""
    if isinstance(job.model, nn.Module):
        raise HooklineError(
            'engine="ray" sends a function that makes the model, not its weights; give one instead of the '
            f"{type(job.model).__name__}, as in harvest(lambda: AutoModel.from_pretrained(...), ...)"
        )
    with ray_pool(job, workers, job.options.device) as pool:
        # A worker begins the store, so that this machine needs neither a GPU nor the model.
        left, samples, done = pool.call(begin)
        if left:
            with Progress(samples, done, job.progress) as progress:
                for counts in pool.each(run_counted, left):
                    progress.wrote(counts["rows"], counts["nbytes"])
                    progress.passed(counts["samples"])
    remove_leftovers(job.storage)  # Some workers may have died.


def begin(job: Job) -> tuple[list[int], int | None, int]:
    """Begin or resume the store; return the units left, the number of samples, and how many are done."""
    left = job.pending()
    _, manifest = job.prepare()
    samples, size = job.source.samples, manifest.plan["unit"]
    return left, samples, max((samples or 0) - len(left) * size, 0)


def run_counted(job: Job, unit: int) -> dict[str, int]:
    """Run a unit, and return its counts."""
    counts = run_unit(job, unit)
    return {"samples": counts.samples, "rows": counts.rows, "nbytes": counts.nbytes}
