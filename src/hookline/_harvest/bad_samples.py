"""What a harvest does when the model fails on a batch: find the samples at fault, then raise or skip them.

Running out of memory is no fault of a sample, so it always ends the harvest, and so do hookline's own errors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from hookline._harvest.data import Batch
from hookline.errors import BadSample, HooklineError

ON_ERROR = ("raise", "skip")
_FATAL = (HooklineError, torch.cuda.OutOfMemoryError, MemoryError)
Found = TypeVar("Found")


def is_fatal(error: Exception) -> bool:
    """Return True for an error that no sample caused. torch raises at any line when a DataLoader worker has died."""
    return isinstance(error, _FATAL) or str(error).startswith("DataLoader worker")


def bad_sample(sample: int, failure: Exception) -> BadSample:
    """Return the error to raise because of a sample."""
    error = BadSample(
        f'sample {sample} failed: {type(failure).__name__}: {failure}; on_error="skip" goes on without such samples, '
        "and lists them in store.skipped"
    )
    error.sample = sample
    return error


def run_singly(
    batch: Batch,
    singles: Sequence[Batch],
    run: Callable[[Batch], Found],
    refuse: Callable[[int, Exception], None],
    error: Exception,
) -> list[tuple[Batch, Found]]:
    """Run the samples of a batch that failed one by one. `refuse` is called with each sample that fails."""
    found, bad = [], 0
    for single in singles:
        try:
            found.append((single, run(single)))
        except Exception as failure:
            if is_fatal(failure):
                raise
            bad += 1
            for sample in single.samples:
                refuse(sample, failure)
    if not bad:
        raise HooklineError(
            f"the model failed on samples {batch.samples[0]} to {batch.samples[-1]} together, though on none "
            f"of them alone: {type(error).__name__}: {error}"
        ) from error
    return found


def run_first(
    batch: Batch, singles: Callable[[Batch], Sequence[Batch]], run: Callable[[Batch], Found], on_error: str
) -> tuple[Batch, Found]:
    """Run the first batch of a harvest. If the model fails on it, run the first of its samples that works alone."""
    try:
        return batch, run(batch)
    except HooklineError:
        raise
    except Exception as error:
        bad: list[tuple[int, Exception]] = []
        for single in singles(batch):
            try:
                found = single, run(single)
            except HooklineError:
                raise
            except Exception as failure:
                bad.append((single.samples[0], failure))
                continue
            if bad and on_error == "raise":
                raise bad_sample(*bad[0]) from bad[0][1]
            if on_error == "skip":
                return found
        if bad and len(bad) < len(batch.samples):
            raise bad_sample(*bad[0]) from bad[0][1]
        message = f"the model failed on the first batch: {type(error).__name__}: {error}"
        raise HooklineError(message + _hint(batch.value)) from error


def _hint(batch: Any) -> str:
    """Return what is often wrong with data that a model does not take."""
    if isinstance(batch, (tuple, list)) and batch and all(isinstance(one, str) for one in batch):
        return "; the samples are texts: to put them through a tokenizer give hl.Texts(texts, tokenizer)"
    if isinstance(batch, (tuple, list)) and len(batch) > 1:
        return (
            f"; the batch, a {type(batch).__name__} of {len(batch)}, was given as {len(batch)} arguments: "
            "call=lambda model, batch: model(batch[0]) gives only the first"
        )
    return ""
