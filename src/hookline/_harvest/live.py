"""A harvest in this process: the model with its hooks, and what a first batch told of what is to come."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from hookline._harvest.data import SPREAD, Batch
from hookline._harvest.fingerprints import agreed, function_text, model_digest, steady, written
from hookline._harvest.passes import Manner, Part, Pass, needs_output
from hookline._harvest.units import Runner, Told, bad_sample
from hookline._store.manifest import MANIFEST, Manifest
from hookline._store.places import Place
from hookline._store.writer import begin, begin_part, read_manifest
from hookline.errors import HooklineError, NeverFired, StoreError, warn
from hookline.parallel import replica

if TYPE_CHECKING:
    from hookline._harvest.plan import Harvest

_LARGEST, _SMALLEST, _PARTS = 128 << 20, 8 << 20, 64  # Bytes of an array in one unit; into how many a harvest is cut.
_LONGEST = 60.0  # Seconds that one unit may take.
_DIGESTS = [2, "Python {}.{}".format(*sys.version_info)]  # How digests are made: code is known by its bytecode.

_UNSEEN = (  # Nobody can compare these.
    "files and environment variables that code reads",
    "compiled code",
    "hooks and patches on the model",
    "autocast and torch's other settings",
)


class Live:
    """A harvest in this process: the model with its hooks, and what a first batch gave. This part is not pickled."""

    def __init__(self, plan: Harvest) -> None:
        self.plan = plan
        self.model = plan.model if isinstance(plan.model, nn.Module) or not callable(plan.model) else plan.model()
        if not isinstance(self.model, nn.Module):
            raise HooklineError(f"harvest takes a model or a function that makes one, not {type(plan.model).__name__}")
        if isinstance(self.model, nn.parallel.DistributedDataParallel):
            self.model = self.model.module  # It would wait for the other ranks, which may have no batch.
        self.together = replica(self.model)
        self.opaque: set[str] = set()
        # Before anything runs: a forward may write into buffers.
        self.digest = model_digest(self.model, self.opaque)
        manner = _with_defaults(plan.manner)
        batch = plan.source.first()
        began = time.perf_counter()
        batch, self.first = self._try(batch, manner)
        self.note()
        if any(module.training for module in self.model.modules()):
            warn("the model is in training mode: dropout and batch statistics go into what is kept; call model.eval()")
        self.seconds = time.perf_counter() - began
        self.first_samples = len(batch.samples)
        self.manner = manner
        self.manifest = self._manifest()
        self._begun: tuple[Place, Manifest] | None = None
        self.busy = threading.RLock()  # The hooks of one plan serve one thread at a time.

    def _try(self, batch: Batch, manner: Manner) -> tuple[Batch, dict[str, Part]]:
        """Run the first batch to its end: which sites there are, how often they are called, and what their rows are."""
        trial = Pass(self.model, self.plan.where, manner, stop=False)
        try:
            trial.refuse_idle_options()
            batch, found = self._first_good(trial, batch)
        finally:
            trial.close()
        for part in found.values():
            part.arrived()  # What goes wrong on the way goes wrong now.
        taken = [name for name in manner.columns or {} if name in {str(place.site) for place in trial.places}]
        if taken:
            raise HooklineError(f"column {taken[0]!r} has the name of a site; give it another")
        if trial.has_gradients and self.plan.on_error == "skip":
            raise HooklineError('on_error="skip" is not for gradients: those of a batch change with who is in it, for '
                                "most losses are means; leave the bad samples out of the data")  # fmt: skip
        if found.keys() <= (manner.columns or {}).keys():
            where = ", ".join(map(repr, self.plan.where))
            raise NeverFired(f"nothing passed at any place of {where}, so there is nothing to keep; a warning says why")
        self.stops = self._stops(manner, trial)
        return batch, {name: replace(part, rows=torch.empty(0)) for name, part in found.items()}  # Without the rows.

    def _first_good(self, trial: Pass, batch: Batch) -> tuple[Batch, dict[str, Part]]:
        """Return what a batch gives; if the model fails on it, what the first of its samples gives that can be run."""
        try:
            return batch, trial.run(batch)
        except HooklineError:
            raise
        except Exception as error:
            bad: list[tuple[int, Exception]] = []
            for single in self.plan.source.singles(batch):
                try:
                    found = single, trial.run(single)
                except HooklineError:
                    raise
                except Exception as failure:
                    bad.append((single.samples[0], failure))
                    continue
                if bad and self.plan.on_error == "raise":
                    raise bad_sample(*bad[0]) from bad[0][1]
                if self.plan.on_error == "skip":
                    return found
            if bad and len(bad) < len(batch.samples):
                raise bad_sample(*bad[0]) from bad[0][1]
            told = f"the model failed on the first batch: {type(error).__name__}: {error}"
            raise HooklineError(told + _hint(batch.value)) from error

    def _stops(self, manner: Manner, trial: Pass) -> bool:
        if manner.stop is not None:
            return manner.stop
        return not (trial.has_gradients or manner.calls != "one" or needs_output(manner))

    def _manifest(self) -> Manifest:
        plan, manner = self.plan, self.manner
        arrays = tuple(part.array(name) for name, part in self.first.items())
        rows = manner.rows if isinstance(manner.rows, Mapping) else {"": manner.rows}
        spec = {
            "digests": _DIGESTS,
            "model": self.digest,
            "data": plan.source.known(),
            "batches": {"batch_size": plan.source.batch_size, "sort_by_length": plan.sorts},
            "rows": {str(name): function_text(rule, self.opaque) for name, rule in rows.items()},
            "dtype": None if manner.dtype is None else str(manner.dtype),
            "transform": function_text(manner.transform, self.opaque),
            "columns": {name: function_text(column, self.opaque) for name, column in (manner.columns or {}).items()},
            "call": function_text(manner.call, self.opaque),
            "calls": manner.calls,
            "loss": function_text(manner.loss, self.opaque),
        }
        if not manner.gather and self.together is not None:
            cut = {name: part.placement for name, part in self.first.items() if part.placement != "null"}
            spec["part"] = {"rank": dist.get_rank(), "of": list(self.together.ranks), "placements": cut}
        unit = plan.unit or self._unit()
        return Manifest(spec, arrays, plan.source.units(unit), {"unit": unit, "batch_size": plan.source.batch_size})

    def _unit(self) -> int:
        """Return how many samples (or batches) make a unit that is worth a file, and not too long to be lost."""
        source = self.plan.source
        per_batch = max((part.nbytes for part in self.first.values()), default=1) or 1
        count = source.units(1) if source.samples is None else source.samples / self.first_samples
        largest = _LARGEST if count is None else min(max(int(per_batch * count) // _PARTS, _SMALLEST), _LARGEST)
        batches = max(1, min(largest // per_batch, int(_LONGEST / max(self.seconds, 1e-6))))
        return batches if source.batch_size is None else batches * source.batch_size

    def begun(self) -> tuple[Place, Manifest]:
        """Begin the store, or go on with it: return where, and what it says of itself."""
        if self._begun is None:
            plan, manifest = self.plan, self._agreed()
            where, found = begin_part(plan.place, manifest) if plan.append else (
                plan.place, begin(plan.place, manifest))  # fmt: skip
            if plan.unit is not None and found.plan["unit"] != plan.unit:
                raise StoreError(
                    f"{str(plan.to)!r} has units of {found.plan['unit']}, not {plan.unit}; leave unit= out"
                )
            self.manifest = found
            self._begun = where, found
        return self._begun

    def _agreed(self) -> Manifest:
        """Return the manifest; what the model writes as it runs is not compared with that of a store that is there."""
        if MANIFEST not in self.plan.place.names(""):
            return self.manifest
        told = agreed(self.digest, read_manifest(self.plan.place).spec.get("model", {}))
        return replace(self.manifest, spec={**self.manifest.spec, "model": told})

    def forget(self) -> None:
        """Begin the store anew when it is needed next."""
        self._begun = None

    @cached_property
    def passing(self) -> Pass:
        """The hooks of the run: now at the sites that fired, by name, so that a batch that misses one is told of."""
        names = [name for name in self.first if name not in (self.manner.columns or {})]
        return Pass(self.model, names, self.manner, stop=self.stops)

    def runner(self, told: Told) -> Runner:
        """Return what runs units."""
        place, manifest = self.begun()
        threads = min(4, os.cpu_count() or 1)
        return Runner(
            self.passing, self.plan.source, place, manifest, on_error=self.plan.on_error, told=told, threads=threads
        )

    def note(self) -> None:
        """Note what the model has written as it ran: the same process may go on with it."""
        self.digest = steady(self.digest, self.model)

    def known_data(self) -> str:
        """Return by what the data are known again."""
        known, size = self.manifest.spec["data"], self.plan.source.batch_size
        if "batches" in known:
            return "every batch that is passed over"
        by = "fingerprint()" if "fingerprint" in known else f"{SPREAD} samples from all over them"
        return f"their number, {by}, batches of {size}"

    def unknown(self) -> list[str]:
        """Return what a run that goes on does not compare."""
        some = ["the other samples"] if "digest" in self.manifest.spec["data"] else []
        wrote = ["what the forward writes: " + ", ".join(names)] if (names := written(self.digest)) else []
        inside = ["what is inside of " + ", ".join(sorted(self.opaque))] if self.opaque else []
        return [*some, *wrote, *inside, *_UNSEEN]

    def close(self) -> None:
        """Take the hooks away; the next run puts them on again."""
        if "passing" in vars(self):
            self.passing.close()
            del self.passing


def _with_defaults(manner: Manner) -> Manner:
    """Return a manner with what a call says of itself."""
    return replace(manner, stop=getattr(manner.call, "stop", None)) if manner.stop is None else manner


def _hint(batch: object) -> str:
    """Return what is often wrong with data that a model does not take."""
    if isinstance(batch, (tuple, list)) and batch and all(isinstance(one, str) for one in batch):
        return "; the samples are texts: to put them through a tokenizer give hl.Texts(texts, tokenizer)"
    if isinstance(batch, (tuple, list)) and len(batch) > 1:
        return (
            f"; the batch, a {type(batch).__name__} of {len(batch)}, was given as {len(batch)} arguments: "
            "call=lambda model, batch: model(batch[0]) gives only the first"
        )
    return ""
