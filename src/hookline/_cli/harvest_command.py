"""`hookline harvest`: load a model and data from names and files, and run the harvest."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from hookline._cli.inputs import TENSORS, names_the_last, position_of, samples_of
from hookline._cli.loss import asks_for_gradients
from hookline._cli.models import ModelOptions, import_name, is_function, model_of
from hookline._cli.output import say, say_json, working
from hookline._cli.show_command import array_of
from hookline._harvest.generation import Generation
from hookline._harvest.harvest import Harvest
from hookline._harvest.rows_and_padding import Rule
from hookline._harvest.run_harvest import Estimate
from hookline._harvest.texts_and_images import Texts
from hookline._kernel import rank_and_world
from hookline._store.storage import open_storage
from hookline._store.store import Store, is_store
from hookline.errors import HooklineError, StoreError


def run_harvest(task: Task, *, json: bool) -> None:
    """Harvest, and write the estimate and the store."""
    show_progress()
    found: dict[str, Any] = {}
    results = harvest_results(task)
    while True:
        with working():
            part = next(results, None)
        if part is None:
            break
        found |= as_json(part)
        if not json:
            say(part)
    if json:
        say_json(found)


@dataclass(frozen=True)
class Task:
    """The arguments of the command line."""

    model: str
    data: str
    at: Sequence[str]
    to: str
    rows: str | None = None
    dtype: str | None = None
    batch_size: int = 8
    processor: str | None = None
    column: str | None = None
    targets: str | None = None
    also: Sequence[str] = ()
    max_length: int | None = None
    generate: int | None = None
    sort_by_length: bool = False
    unit: int | None = None
    device: str | None = None
    attention: str | None = None
    trust_remote_code: bool = False
    skip_errors: bool = False
    engine: str | None = None
    workers: int | None = None
    resume: bool = False
    append: bool = False
    dry_run: bool = False


def harvest_results(task: Task) -> Iterator[Estimate | Store]:
    """Harvest, and yield the estimate, then the store."""
    _check_target(task)
    plan = plan_of(task)
    speaks = rank_and_world()[0] == 0  # Only the first of several processes prints.
    if speaks and (task.engine is None or task.dry_run):  # Another engine needs no model here.
        yield plan.estimate()
    if task.dry_run:
        return
    store = plan.run()
    if speaks:
        yield store


def as_json(part: Estimate | Store) -> dict[str, Any]:
    """Return an estimate or a store for JSON."""
    if isinstance(part, Estimate):
        return {"estimate": asdict(part)}
    arrays = [array_of(part, name) for name in part]
    return {"samples": part.samples, "skipped": part.skipped, "sites": arrays}


def show_progress() -> None:
    """Send the progress log to stderr, unless it has a handler. (A harvest logs progress only if it shows no bar.)"""
    log = logging.getLogger("hookline")
    if not log.handlers:
        log.addHandler(logging.StreamHandler())
        log.setLevel(logging.INFO)


def plan_of(task: Task) -> Harvest:
    """Return the plan for a task. It holds names instead of weights, so that it can be sent to other machines."""
    call = None if task.generate is None else Generation(max_new_tokens=task.generate)
    data = data_of(task)
    return Harvest(
        model_of(task.model, ModelOptions(task.device, attention=task.attention, trusted=task.trust_remote_code)),
        data,
        *task.at,
        to=task.to,
        rows=task.rows or rows_of(task, data),
        dtype=task.dtype,
        columns={name: _column(name, call) for name in task.also} or None,
        call=call,
        loss=_own_loss if asks_for_gradients(task.at) else None,
        batch_size=task.batch_size,
        sort_by_length=task.sort_by_length,
        unit=task.unit,
        device=task.device,
        on_error="skip" if task.skip_errors else "raise",
        append=task.append,
        engine=task.engine,
        workers=task.workers,
    )


def _own_loss(output: Any) -> Tensor:
    """Return the loss that a transformers model computes from labels: the command takes no other."""
    found = getattr(output, "loss", None)
    if not isinstance(found, Tensor):
        raise HooklineError(
            "gradients need a loss, and the model gives none; let --data module:function give batches with labels, or "
            "harvest in Python, with hl.harvest(..., loss=...)"
        )
    return found


def _column(name: str, call: Generation | None) -> Any:
    """Return a column of the batch; with --generate, "input_ids" includes the generated tokens."""
    return call.tokens if call is not None and name == "input_ids" else name


def rows_of(task: Task, data: Any) -> Rule | dict[str, Rule]:
    """Return the default of --rows: for texts a row is a token, unless the place selects positions."""
    if not isinstance(data, Texts):
        return "batch"
    rules: dict[str, Rule] = {where: "tokens" if position_of(where) is None else "batch" for where in task.at}
    return {**rules, **dict.fromkeys(task.also, "tokens")}


def data_of(task: Task) -> Any:
    """Return the data; texts and images go through the model's own processor."""
    if is_function(task.data):
        return import_name(task.data)()
    path = Path(task.data)
    if not path.exists():
        raise HooklineError(f"{task.data!r} is not a file or folder, nor 'module:function'")
    if path.suffix.lower() in TENSORS:
        raise HooklineError(
            f"{task.data!r} holds no texts or images; to harvest tensors, name a function that returns them: "
            "--data module:function"
        )
    return samples_of(
        path,
        task.model,
        task.processor,
        column=task.column,
        targets=task.targets,
        max_length=task.max_length,
        # Generated tokens follow the text, and the last position has to be its last token.
        left=task.generate is not None or names_the_last(task.at),
        trusted=task.trust_remote_code,
    )


def _check_target(task: Task) -> None:
    """Raise if a target exists without --resume or --append. With several ranks, another may have just created it."""
    if task.resume or task.append or rank_and_world()[1] > 1:
        return
    if is_store(task.to):
        raise StoreError(f"{task.to!r} has a store already; --resume continues it, --append adds to it")
    if open_storage(task.to).names(""):
        raise StoreError(f"{task.to!r} is neither empty nor a store; give another --to")
