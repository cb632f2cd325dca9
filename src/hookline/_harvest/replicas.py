"""Models that several processes hold together: these run in step, and one of those that see the same rows writes them.

With FSDP every process has batches of its own, and all need as many forwards: those that are done first run their first
batch again, and keep nothing of it. With tensor parallelism all have the same batch, and the first one writes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist

from hookline._harvest.units import Told
from hookline._store.writer import committed, how_many
from hookline.errors import HooklineError
from hookline.parallel import Replica, meet

if TYPE_CHECKING:
    from hookline._harvest.plan import Harvest


def run_together(plan: Harvest, together: Replica, told: Told) -> None:
    """Run what is left of a harvest on a model that is spread over these ranks."""
    if plan.on_error != "raise":
        raise HooklineError('on_error="skip" is not for a model that several processes hold together: they would no '
                            "longer run it as often as each other; leave the bad samples out of the data")  # fmt: skip
    mine = _share(plan, together, first=True)
    while mine:
        _run(plan, together, mine, told)
        mine = _share(plan, together, first=False)


def _share(plan: Harvest, together: Replica, first: bool) -> list[list[int]]:
    """Return the units of each process that has batches of its own; all agree on what is left for any of them."""
    place, manifest = plan.live.begun()
    units = how_many(place, manifest)
    assert units is not None
    left = sorted(set(range(units)) - committed(place))
    if first:  # Of several replicas, each begins with a share of its own.
        number = dist.get_world_size() // len(together.ranks)
        index = together.ranks[0] * number // dist.get_world_size()
        left = left[len(left) * index // number : len(left) * (index + 1) // number] or left
    heard = meet(together.ranks, json.dumps([left, together.alike[:1] or [dist.get_rank()]]), "the units of a harvest")
    agreed = sorted({unit for said in heard.values() for unit in json.loads(said)[0]})
    leaders = sorted({json.loads(said)[1][0] for said in heard.values()})
    own = leaders.index((together.alike or (dist.get_rank(),))[0])
    shares = [agreed[start :: len(leaders)] for start in range(len(leaders))]
    return [shares[own], *shares] if agreed else []


def _run(plan: Harvest, together: Replica, shares: Sequence[list[int]], told: Told) -> None:
    """Run this process's share, and then as many more batches as another one has."""
    live = plan.live
    _, manifest = live.begun()
    size, (own, *every) = manifest.plan["unit"], shares
    if not together.alike or dist.get_rank() == together.alike[0] or not live.manner.gather:
        live.runner(told).run(own, size, lambda *_: None)
    else:
        for _, batch in plan.source.batches(own, size, lambda *_: None):
            live.passing.run(batch)
    counts = [sum(plan.source.count(unit, size) for unit in units) for units in every]
    for _ in range(max(counts) - sum(plan.source.count(unit, size) for unit in own)):
        live.passing.run(plan.source.first())
