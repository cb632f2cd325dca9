"""The processes that run one model together: which they are, and how they exchange text.

Nothing here is a collective. Ranks exchange text through the key-value store with which torch connected them. An error
can therefore name a rank that does not come, and no rank gets into a collective from another place.
"""

from __future__ import annotations

import datetime
import os
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import torch.distributed as dist
from torch import nn

from hookline._sites.tree import unwrap
from hookline._torch import default_store, fsdp_groups, fsdp_states, is_fsdp1, is_running
from hookline.errors import HooklineError, warn

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

# The variables in which torchrun (and launchers like it), srun and Open MPI put the rank and the number of processes. A
# batch script of Slurm has SLURM_PROCID and SLURM_NTASKS too, though it runs once; only srun sets SLURM_STEP_NUM_TASKS.
_VARIABLES = (
    ("RANK", "WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
)
PATIENCE = 20.0  # Seconds after which a rank warns, and names the ranks it waits for.
_changing = threading.Lock()
_meetings: Counter[tuple[int, ...]] = Counter()  # The number of meetings with these ranks so far.


def rank_and_world(environment: Mapping[str, str] | None = None) -> tuple[int, int]:
    """Return the rank of this process and the number of processes: from torch.distributed, or from the launcher.

    >>> rank_and_world({"RANK": "1", "WORLD_SIZE": "4"}), rank_and_world({})
    ((1, 4), (0, 1))
    """
    if environment is None and is_running():
        return dist.get_rank(), dist.get_world_size()
    variables = os.environ if environment is None else environment
    for rank, world in _VARIABLES:
        if rank not in variables or world not in variables:
            continue
        try:
            found = int(variables[rank]), int(variables[world])
        except ValueError:
            found = -1, -1
        if not 0 <= found[0] < found[1]:
            raise HooklineError(
                f"{rank}={variables[rank]} and {world}={variables[world]} are not a rank and a number of processes"
            )
        return found
    return 0, 1


class Replica(NamedTuple):
    """The ranks that hold one model together, this one among them.

    All `ranks` have to run the same number of forwards. Those in `alike` see the same batch, since tensor parallelism
    shards the values of one forward among them. With sharded data parallelism alone, `alike` is empty.
    """

    ranks: tuple[int, ...]
    alike: tuple[int, ...] = ()

    @property
    def is_first(self) -> bool:
        """True in the first of these processes, which decides and writes."""
        return dist.get_rank() == self.ranks[0]


def replica(model: nn.Module) -> Replica | None:
    """Return the ranks that hold one model together; None if this process holds all of it, as with DDP."""
    if not is_running():
        return None
    ranks: set[int] = set()
    alike: set[int] = set()
    managed: set[int] = set()
    for state in fsdp_states(model):
        for group in fsdp_groups(state):
            ranks |= _shared_by(group)
            for one in group.fsdp_params:
                managed.add(id(one.sharded_param))
                if one.is_dtensor:  # Already sharded by tensor parallelism.
                    ranks |= cut_apart(one.sharded_param)
                    alike |= cut_apart(one.sharded_param, set(group.mesh_info.mesh.mesh.flatten().tolist()))
    for module in model.modules():
        wrapper: Any = module
        if is_fsdp1(module) and wrapper.sharding_strategy.name != "NO_SHARD":
            ranks |= set(dist.get_process_group_ranks(wrapper.process_group))
    for parameter in unwrap(model).parameters():
        if is_cut(parameter) and id(parameter) not in managed:
            alike |= cut_apart(parameter)
    ranks |= alike
    if len(ranks) < 2:
        return None
    return Replica(tuple(sorted(ranks)), tuple(sorted(alike)) if len(alike) > 1 else ())


def _shared_by(group: Any) -> set[int]:
    """Return the ranks over which FSDP2 shards a group of parameters, not those of a mesh dimension that replicates."""
    process_group = getattr(group.mesh_info, "shard_process_group", None)
    return set() if process_group is None else set(dist.get_process_group_ranks(process_group))


def cut_apart(tensor: Any, but: Iterable[int] = ()) -> set[int]:
    """Return the ranks that hold shards of a DTensor. Mesh dimensions that lie entirely inside `but` are ignored."""
    mesh = tensor.device_mesh
    here = mesh.get_coordinate()
    if here is None:
        return set()
    along: list[Any] = list(here)
    for dimension, one in enumerate(tensor.placements):
        line = mesh.mesh[tuple(slice(None) if other == dimension else at for other, at in enumerate(here))]
        if not one.is_replicate() and not set(line.tolist()) <= set(but):
            along[dimension] = slice(None)
    return set(mesh.mesh[tuple(along)].flatten().tolist())


def is_sharded(model: nn.Module) -> bool:
    """Return True if FSDP2 shards parameters of the model."""
    return is_running() and any(fsdp_groups(state) for state in fsdp_states(model))


def meet(ranks: Iterable[int], said: str, what: str = "this") -> dict[int, str]:
    """Send a text to all these ranks, and return the text of each, by rank. Every rank has to call this.

    Args:
        what: The thing to agree on, such as a site, for the error about a rank that does not come.
    """
    ranks, me = tuple(sorted(ranks)), dist.get_rank()
    if len(ranks) < 2 or dist.get_backend() == "fake":
        return {me: said}
    store: Any = default_store()
    with _changing:
        number = _meetings[ranks]
        _meetings[ranks] += 1
    keys = {rank: f"hookline/{'-'.join(map(str, ranks))}/{number}/{rank}" for rank in ranks}
    store.set(keys[me], said)
    missing = _wait(store, keys, what)
    if missing:
        _meetings[ranks] -= 1
        store.delete_key(keys[me])
        raise HooklineError(f"{_waited(missing, what)} for {store.timeout.total_seconds():.0f} s")
    heard = {rank: store.get(key).decode() for rank, key in keys.items()}
    if number:  # All ranks have come, so nobody reads the texts of the previous meeting any more.
        store.delete_key(f"hookline/{'-'.join(map(str, ranks))}/{number - 1}/{me}")
    return heard


def _wait(store: Any, keys: dict[int, str], what: str) -> list[int]:
    """Wait until every key is set, or the store's timeout is over. Return the ranks whose keys are missing."""
    end = time.monotonic() + store.timeout.total_seconds()
    for seconds in (PATIENCE, None):
        left = end - time.monotonic()
        if left <= 0:
            break
        try:
            store.wait(list(keys.values()), datetime.timedelta(seconds=min(seconds or left, left)))
            return []
        except RuntimeError:
            missing = [rank for rank, key in keys.items() if not store.check([key])]
            if seconds is not None and missing:
                warn(_waited(missing, what))
    return [rank for rank, key in keys.items() if not store.check([key])]


def _waited(missing: list[int], what: str) -> str:
    who = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
    return (
        f"{what}: waited for {who}; every rank of a parallel model has to have the same hooks, and to run it as often"
    )


def is_cut(tensor: Any) -> TypeGuard[DTensor]:
    """Return True if a tensor is a DTensor: this rank's part of a value, with its placement."""
    return type(tensor).__name__ == "DTensor"
