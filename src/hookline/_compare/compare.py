"""`hl.compare`: where two models part.

Two models run on the same inputs. Their outputs differ at each place behind the first fault, so a second measurement
tells which place makes an error from which inherits it: each module of b also runs on the inputs that its counterpart
in a had. All modules of one nesting level are measured in one run of b, in which the inputs of each are replaced.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from torch import nn

from hookline._compare.apart import Convert, has_nothing_finite
from hookline._compare.compared_gradients import Loss, compare_gradients
from hookline._compare.hints import explain
from hookline._compare.judging import clear_what_is_made_good, first_off, judge
from hookline._compare.matching import refuse_unused
from hookline._compare.recording import paths_of
from hookline._compare.references import Reference, compare_with_reference, reference_of
from hookline._compare.refused_arguments import refuse_odd, refuse_same, refuse_without_use
from hookline._compare.report import ComparedPlace, Comparison
from hookline._compare.runs import Runs
from hookline._compare.weight_differences import MOVED, ROUNDED
from hookline._compare.weights import Weight, compare_weights, pair_weights
from hookline._kernel import unwrap
from hookline._scan.fake_run import call_arguments_of
from hookline._tables import count
from hookline.errors import HooklineError


def compare(
    a: nn.Module | Reference,
    b: nn.Module,
    *,
    run: Any = None,
    run_b: Any = None,
    match: Mapping[str, str | None] | None = None,
    tolerance: float | None = None,
    to_b: Convert | None = None,
    to_a: Convert | None = None,
    backward: Loss | None = None,
    strict: bool = False,
) -> Comparison:
    """Find where two models part: the first module that does something else on the same inputs, and why.

    >>> import copy
    >>> import torch
    >>> import hookline as hl
    >>> a = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    >>> b = copy.deepcopy(a)
    >>> b[1].eps = 0.1
    >>> report = hl.compare(a, b, run=(torch.ones(2, 4),))
    >>> report.first.site, report.first.hint
    ('1', 'eps is 1e-05 in a and 0.1 in b')

    Args:
        a: The model that is right; or values that it returned, by site: a Cache, a Store, a dict, or a file's path.
        b: The model to look at; or the same model, compiled or on another device.
        run: What both are called with: a tuple of arguments, or a dict of keywords. Without it, weights are compared.
        run_b: What b is called with, if it takes something else.
        match: The modules of a and what stands for them in b, as in `{"h.*": "layers.*"}`; None leaves a module out.
        tolerance: The largest difference that counts as rounding, as a share of the largest element. By default,
            hookline measures what the dtypes explain.
        to_b: A function that changes the layout of a tensor of a into that of b, as from channels last to first.
        to_a: The reverse, for outputs of b.
        backward: A function from the output of a model to a loss, whose gradients are compared too.
        strict: Raise `Diverged` if the models part.
    """
    functions = {"to_b": to_b, "to_a": to_a, "backward": backward}
    refuse_odd(a, b, match, tolerance, functions, strict)
    if not isinstance(a, nn.Module):
        if run is None and run_b is None:
            raise HooklineError(
                "hl.compare with saved values needs run=(...): what b is called with; "
                "to compare weights, load them into a model"
            )
        refuse_without_use("a is saved values and not a model", to_b=to_b, backward=backward)
        report = compare_with_reference(reference_of(a), b, run if run_b is None else run_b, match, tolerance, to_a)
    elif run is None:
        refuse_same(a, b, to_b or run_b)
        refuse_without_use("without run=, only weights are compared", run_b=run_b, tolerance=tolerance, **functions)
        refuse_unused([*paths_of(a), *unwrap(a).state_dict()], match)
        report = Comparison({}, compare_weights(a, b, match=match), None, None)
    else:
        refuse_same(a, b, to_b or run_b)
        runs = _runs(a, b, run, run if run_b is None else run_b, match, to_b, to_a, tolerance)
        report = _compare_runs(runs, match, backward)
    if strict:
        report.check()
    return report


def _runs(
    a: nn.Module,
    b: nn.Module,
    run: Any,
    run_b: Any,
    match: Mapping[str, str | None] | None,
    to_b: Convert | None,
    to_a: Convert | None,
    tolerance: float | None,
) -> Runs:
    """Run both models. If that fails, say which of their weights differ, since that may be why."""
    weights: list[Weight] = []
    try:
        return Runs((a, b), (call_arguments_of(run), call_arguments_of(run_b)), match, to_b, to_a, tolerance)
    except (HooklineError, ImportError):
        raise
    except Exception as error:
        with suppress(HooklineError):
            weights = [one for one in compare_weights(a, b, match=match) if one.kind != ROUNDED]
        if not weights:
            raise
        some = "; ".join(f"{one.name or one.other}: {one.what}" for one in weights[:4])
        more = f"; and {len(weights) - 4} more" if len(weights) > 4 else ""
        raise HooklineError(
            f"a model failed with {type(error).__name__}: {str(error).rstrip('.')}. Weights differ: {some}{more}"
        ) from error


def _compare_runs(runs: Runs, match: Mapping[str, str | None] | None, backward: Loss | None) -> Comparison:
    """Measure each pair of modules, and look for the first that does something else."""
    weights = compare_weights(runs.a, runs.b, runs.matching.pairs, match)
    elsewhere = {one.name: one.other for one in weights if one.kind == MOVED}
    places = {path: runs.seen(path, other) for path, other in runs.matching.pairs.items()}
    for pairs in runs.levels():
        runs.measure_local(pairs, places)
    if not any(place.local for place in places.values()) and not any(place.odd for place in places.values()):
        raise HooklineError(
            f"{count(len(places), 'pair')} of modules, and none returned tensors: name pairs with match="
        )
    judge(places, runs)
    clear_what_is_made_good(places, runs)
    first = first_off(places, runs) or _all_nan(places, runs)
    if first is not None:
        explain(first, runs, elsewhere)
    gradients = None
    if backward is not None:
        named = pair_weights(runs.a, runs.b, runs.matching.pairs, match)
        gradients = compare_gradients(runs, places, named, backward)
    return Comparison(places, weights, runs.matching, first, gradients=gradients, tolerance=runs.rounding.tolerance)


def _all_nan(places: Mapping[str, ComparedPlace], runs: Runs) -> ComparedPlace | None:
    """Return the first place at which nothing is finite, if that is so of a tensor that the model returns."""
    found = [path for path, one in places.items() if one.seen_values and has_nothing_finite(one.seen_values[0])]
    if "" not in found:
        return None
    starts = runs.of_a.starts()
    ends = [
        path for path in found if not any(one != path and one.startswith(f"{path}." if path else "") for one in found)
    ]
    first = places[min(ends, key=lambda path: starts[path])]
    first.is_off, first.note = (
        True,
        "returns nothing finite in both models, so there is nothing to compare from here on",
    )
    return first
