"""Look for the reason why a place is off: see hints.py. Here is what a hint may know of the two models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hookline._compare.apart import where_apart
from hookline._compare.hints import hint_for
from hookline._compare.paired_values import tensors_of
from hookline._compare.report import ComparedPlace
from hookline._compare.runs import Runs
from hookline._compare.suspect import Suspect
from hookline._kernel import unwrap


def explain(place: ComparedPlace, runs: Runs, elsewhere: Mapping[str, str]) -> None:
    """Note the element that differs most at a place, and the reason if there is one.

    Args:
        place: The place.
        runs: The runs of both models.
        elsewhere: The weights of a whose numbers are elsewhere in b, and where.
    """
    of_a, of_b = runs.of_a.calls[place.site][place.call], runs.of_b.calls[place.other][0]
    given = runs.given(place.site, place.call)
    if given is None or place.local_values is None or place.local is None or place.local.is_none:
        return
    place.worst = where_apart(*place.local_values, place.part)
    inside = _Inside(place, runs)
    hint = hint_for(
        Suspect(
            of_a.module,
            of_b.module,
            of_a.inputs,
            given,
            *place.local_values,
            place.limits,
            convert=lambda output: runs.in_one_layout(of_a.output, output),
            owner=inside.owner,
            random=of_a.random,
            innermost=inside.innermost,
            inputs_of=inside.inputs_of,
            names=inside.paired(runs.matching.pairs),
            moved=inside.paired(elsewhere),
        )
    )
    if hint is not None:
        place.hint = hint.text
        function = hint.function if hint.function[:1] in ("", "/") or not place.other else f".{hint.function}"
        place.function = f"{place.other}{function}" if function else ""


class _Inside:
    """What is inside two modules, with names as seen from them."""

    def __init__(self, place: ComparedPlace, runs: Runs) -> None:
        self._runs = runs
        self._starts = [f"{path}." if path else "" for path in (place.site, place.other)]

    def paired(self, names: Mapping[str, str]) -> dict[str, str]:
        """Return the pairs of names that are inside both."""
        in_a, in_b = self._starts
        return {
            name.removeprefix(in_a): other.removeprefix(in_b)
            for name, other in names.items()
            if name and other and name.startswith(in_a) and other.startswith(in_b)
        }

    def owner(self, tensor: Tensor) -> str:
        """Return the name of a weight of a that has these numbers; "" if none has."""
        model = unwrap(self._runs.a)
        for name, one in (*model.named_parameters(), *model.named_buffers()):
            if one.shape == tensor.shape and torch.equal(one.to(tensor), tensor):
                return name
        return ""

    def inputs_of(self, path: str) -> Any:
        """Return what a module inside a's got in its first call; None if there is no such module."""
        calls = self._runs.of_a.calls.get(f"{self._starts[0]}{path}") if path else None
        return calls[0].inputs if calls else None

    def innermost(self, tensor: Tensor) -> str:
        """Return the innermost module inside a's that returned a tensor; "" if none did."""
        start = self._starts[0]
        found = [
            path
            for path, calls in self._runs.of_a.calls.items()
            if path and path.startswith(start) and any(_is_in(tensor, call.output) for call in calls)
        ]
        return max(found, key=lambda path: path.count("."), default="").removeprefix(start)


def _is_in(tensor: Tensor, output: Any) -> bool:
    return any(one.shape == tensor.shape and torch.equal(one, tensor) for one in tensors_of(output))
