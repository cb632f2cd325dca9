"""Values of parallel models: gather them, shard them, and check that the ranks agree on them.

| here | |
|---|---|
| `whole(value)` | gather every `DTensor` in a value and wait for pending collectives; all ranks have to call it |
| `placement(tensor)` | how a `DTensor` is sharded, and over which ranks, as JSON text; "null" for any other tensor |
| `agree(ranks, value, what)` | raise, on every rank, unless these ranks hold the same value |
| `Gathering` | gathers values for the hooks of one action, and checks once at each site that the ranks agree |
| `replica(model)`, `meet(ranks, said)` | from ranks.py: which ranks hold a model together, and how they exchange text |
"""

from __future__ import annotations

import json
import math
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hookline._sites.language import Site
from hookline._torch import is_running
from hookline._values.copy_or_share import share_tensor
from hookline._values.nested import describe, leaves, map_tensors, parts_of, rebuild
from hookline.errors import EditError, HooklineError
from hookline.parallel.ranks import cut_apart, is_cut, meet, replica

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_ROW, _SKETCHES, _ALIKE = 4096, 8, 0.05
_CUT = (
    "tensor parallelism has cut it and left no mark (use_local_output=True), or the ranks were given different "
    "batches. Take it where it is marked, at the layer before or ':input' of the one after it; or use gather=False "
    "for this rank's part"
)


def whole(value: Any) -> Any:
    """Return a value with every DTensor gathered, and waited for. Gradients flow through; all ranks have to call it."""
    return map_tensors(lambda tensor: arrived(tensor.full_tensor() if is_cut(tensor) else tensor), value)


def arrived(tensor: Any) -> Tensor:
    """Return a plain tensor: wait for one that is the result of a pending collective."""
    waits = type(tensor).__name__ == "AsyncCollectiveTensor"
    plain: Tensor = tensor if not waits else tensor.clone() if tensor.requires_grad else tensor.trigger_wait()
    return plain


def share_part(tensor: DTensor, device: Any, dtype: torch.dtype | None) -> Tensor:
    """Copy this rank's shard on write. `DTensor.clone` would reduce a pending (Partial) sum."""
    mesh, local = tensor.device_mesh, arrived(tensor.to_local())
    if device is not None and torch.device(device).type != mesh.device_type:
        raise HooklineError(f"a part of a DTensor stays on the {mesh.device_type} of its mesh; leave device= out")
    copied = share_tensor(local.to(device, dtype or local.dtype))
    size: dict[str, Any] = {"shape": tensor.shape, "stride": tensor.stride()}
    return type(tensor).from_local(copied, mesh, tensor.placements, run_check=False, **size)


def cut(new: Any, old: Any, seen: Any) -> Any:
    """Shard `new` as `old` was; `seen` is the gathered `old`."""
    if new is seen:
        return old
    if isinstance(old, Tensor):
        is_plain = isinstance(new, Tensor) and not is_cut(new)
        return _cut_tensor(new, old) if is_plain and is_cut(old) else new
    parts, new_parts, seen_parts = (parts_of(one) or {} for one in (old, new, seen))
    if not parts or parts.keys() != new_parts.keys():
        return new
    return rebuild(new, {key: cut(new_parts[key], part, seen_parts[key]) for key, part in parts.items()})


def _cut_tensor(new: Tensor, old: DTensor) -> Tensor:
    """Shard a whole tensor as a DTensor is. A pending (Partial) sum becomes the finished sum."""
    same = replicate(new, old)
    placements = [here if one.is_partial() else one for one, here in zip(old.placements, same.placements, strict=True)]
    return same.redistribute(placements=placements)


def replicate(new: Tensor, like: DTensor) -> DTensor:
    """Return a whole tensor as a DTensor that is replicated over the mesh of another DTensor."""
    mesh = like.device_mesh
    same = sys.modules[type(like).__module__].Replicate()  # The module's name differs in torch 2.4.
    return type(like).from_local(new, mesh, [same] * mesh.ndim, run_check=False)


def placement(tensor: Any) -> str:
    """Return as JSON text how a DTensor is sharded, and over which ranks; "null" for any other value."""
    if not is_cut(tensor):
        return "null"
    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names
    told = {
        "shape": list(tensor.shape),
        "placements": [repr(one) for one in tensor.placements],
        "mesh": mesh.mesh.tolist(),
        "names": None if names is None else list(names),
    }
    return json.dumps(told)


def agree(ranks: Iterable[int], value: Any, what: str) -> None:
    """Raise, on every rank, unless these ranks hold the same value; each of them has to call it.

    Tensors are compared by their shape and a sketch of their numbers. The sketch of a shard or a pending sum differs
    from another rank's. A difference only in the last digits is ignored.

    Args:
        what: The name of the value, for the error: a site.
    """
    _compare(ranks, what, leaves(value), True, _CUT)


def _compare(ranks: Iterable[int], what: str, tensors: Sequence[Tensor], sketches: bool, why: str) -> None:
    told = [(_described(one), _sketch(one) if sketches and not is_cut(one) else None) for one in tensors]
    heard = meet(ranks, json.dumps([what, told]), what)
    me = dist.get_rank()
    for rank, said in heard.items():
        other, values = json.loads(said)
        if other != what:
            raise HooklineError(
                f"rank {rank} is at {other} while rank {me} is here; every rank of a parallel model has to have the "
                "same hooks, in the same order"
            )
        for mine, theirs in zip(told, values, strict=False):
            if mine[0] != theirs[0]:
                raise HooklineError(f"{mine[0]} passes on rank {me}, and {theirs[0]} on rank {rank}: {why}")
            if not _is_alike(mine[1], theirs[1]):
                raise HooklineError(f"a {mine[0]} passes that is not the same on ranks {me} and {rank}: {why}")
        if len(told) != len(values):
            raise HooklineError(f"{len(told)} tensors pass on rank {me}, and {len(values)} on rank {rank}: {why}")


def _described(tensor: Tensor) -> str:
    placements: Sequence[Any] = getattr(tensor, "placements", ())
    return " ".join([describe(tensor), *map(repr, placements)])


def _sketch(tensor: Tensor) -> list[float] | None:
    """Return a sketch of a tensor: its norm, and sums of its numbers with fixed random signs, divided by the norm.

    The sums of another tensor of the same shape differ, however large it is. Those of the same tensor, rounded in
    another way, are nearly the same.
    """
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested or tensor.is_meta:
        return None
    with torch.no_grad():
        numbers = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
        flat = arrived(numbers.detach()).flatten().to(torch.float64 if tensor.is_cpu else torch.float32)
        flat = torch.nn.functional.pad(flat, (0, -flat.numel() % _ROW)).view(-1, _ROW)
        generator = torch.Generator().manual_seed(0)  # The user's random state does not change.
        columns = torch.randint(0, 2, (_ROW, _SKETCHES), generator=generator).to(flat).mul_(2).sub_(1)
        rows = torch.randint(0, 2, (flat.shape[0], _SKETCHES), generator=generator).to(flat).mul_(2).sub_(1)
        size = flat.norm()
        sums = ((flat @ columns) * rows).sum(0) / (size if size > 0 else 1)
        return [float(size), *sums.tolist()]


def _is_alike(mine: list[float] | None, theirs: list[float] | None) -> bool:
    if mine is None or theirs is None:
        return mine is theirs
    if not all(map(math.isfinite, (*mine, *theirs))):
        return [*map(str, mine)] == [*map(str, theirs)]
    if abs(mine[0] - theirs[0]) > _ALIKE * max(mine[0], theirs[0]):
        return False
    return all(abs(one - other) <= _ALIKE for one, other in zip(mine[1:], theirs[1:], strict=True))


class Gathering:
    """Gathers values for the hooks of one action, after all ranks have confirmed that they are at the same site.

    The model is inspected when the hooks are made, and again when the first value passes: it may have been made
    parallel in between.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._agreed: set[Site] = set()
        self._has_looked = False
        self.alike: tuple[int, ...] = ()  # The ranks that may hold unmarked shards of a value.
        self._look()

    def _look(self) -> None:
        model = self._model()
        found = replica(model) if model is not None else None
        self.alike = found.alike if found is not None else ()

    @property
    def is_alone(self) -> bool:
        """Whether no value of the model, except a DTensor, is one rank's part."""
        return self._has_looked and not self.alike

    def whole(self, value: Any, site: Site) -> Any:
        """Return the whole value, unchanged if it is whole already; raise if it may be an unmarked part."""
        return self._whole(value, site)[0]

    def _whole(self, value: Any, site: Site) -> tuple[Any, tuple[int, ...]]:
        """Return the whole value, and the ranks that have just compared it."""
        if not self._has_looked:
            self._has_looked = True
            self._look()
        if type(value) is Tensor and not self.alike:
            return value, ()
        tensors = leaves(value)
        parts = [tensor for tensor in tensors if is_cut(tensor)]
        met: tuple[int, ...] = ()
        if site not in self._agreed and (parts or self.alike):
            met = tuple({*self.alike, *(rank for part in parts for rank in cut_apart(part))})
            _compare(met, f"'{site}'", tensors, bool(self.alike), _CUT)
            self._agreed.add(site)
        return whole(value) if parts else value, met

    def change(self, value: Any, site: Site, function: Callable[[Any], Any]) -> Any:
        """Apply a function to the whole value, and return the result sharded as the value was."""
        seen, met = self._whole(value, site)
        new = function(seen)
        if met:
            self._check_result(met, site, new)
        return value if new is seen else cut(new, value, seen)

    def _check_result(self, ranks: tuple[int, ...], site: Site, new: Any) -> None:
        why = "a new value has to be the same on every rank; seed random numbers, and give all ranks the same tensors"
        try:
            _compare(ranks, f"'{site}', changed", leaves(new), True, why)
        except HooklineError as error:
            raise EditError(str(error)) from None


def gathering_of(model: nn.Module, gather: bool) -> Gathering | None:
    """Return a `Gathering` for the hooks of one action; None in a single process, or if `gather` is False."""
    return Gathering(model) if gather and is_running() else None
