"""`hookline compare`: where two models part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

import hookline as hl
from hookline._cli.inputs import InputRequest, ModelInput, model_input
from hookline._cli.models import ModelOptions, model_of
from hookline._cli.output import say, say_json, working
from hookline._compare.matching import Matching
from hookline._compare.report import ComparedPlace
from hookline._tables import table_of
from hookline.errors import HooklineError

DIVERGED = 1


def run_compare(
    a: str,
    wanted: InputRequest,
    options: tuple[ModelOptions, ModelOptions],
    match: Sequence[str],
    tolerance: float | None,
    *,
    whole: bool,
    json: bool,
) -> None:
    """Compare two models, or saved values with a model, and leave with status 1 if they part."""
    with working():
        report = compare_named(a, wanted, options, match, tolerance)
    if json:
        say_json(as_json(report))
    else:
        table = table_of(report)
        say(replace(table, title=_in_shell(table.title), empty=_in_shell(table.empty)), whole=whole)
    if not report.ok:
        raise typer.Exit(DIVERGED)


def compare_named(
    a: str,
    wanted: InputRequest,
    options: tuple[ModelOptions, ModelOptions],
    match: Sequence[str],
    tolerance: float | None,
) -> hl.Comparison:
    """Load and compare. The request names b."""
    pairs = pairs_of(match)
    theirs = model_of(wanted.model, options[1])()
    entry = model_input(wanted, theirs) if wanted else None
    if _is_saved(a):
        if entry is None:
            raise HooklineError(f"{a!r} has saved values: give the input that they are for, with --input or --text")
        return hl.compare(a, theirs, run=entry.run, match=pairs, tolerance=tolerance)
    ours = model_of(a, options[0])()
    if entry is None:
        return hl.compare(ours, theirs, match=pairs, tolerance=tolerance)
    first: ModelInput = model_input(replace(wanted, model=a), ours)
    return hl.compare(ours, theirs, run=first.run, run_b=entry.run, match=pairs, tolerance=tolerance)


def pairs_of(texts: Sequence[str]) -> dict[str, str | None] | None:
    """Return what stands for what; "extra=" leaves a module out.

    >>> pairs_of(["h.*=layers.*", "extra="])
    {'h.*': 'layers.*', 'extra': None}
    """
    for text in texts:
        if "=" not in text:
            raise HooklineError(f"--match takes A=B, as in --match 'h.*=layers.*', not {text!r}")
    return {name: other or None for name, _, other in (text.partition("=") for text in texts)} or None


def _in_shell(text: str) -> str:
    """Return a verdict with what a shell has in place of attributes of the report."""
    return text.replace("see report.matching", "see --json").replace("see report.weights", "see --json")


def _is_saved(name: str) -> bool:
    path = Path(name)
    return path.suffix == ".safetensors" or (path / "harvest.json").is_file()


def as_json(report: hl.Comparison) -> dict[str, Any]:
    """Return a report for JSON."""
    return {
        "ok": report.ok,
        "verdict": report.verdict,
        "first": None if report.first is None else _entry(report.first),
        "places": [_entry(place) for place in report.values()],
        "weights": [one._asdict() for one in report.weights],
        "notes": list(report.notes),
        "matching": None if report.matching is None else _matching(report.matching),
        "gradients": None if report.gradients is None else as_json(report.gradients),
    }


def _matching(matching: Matching) -> dict[str, Any]:
    pairs = [{"a": path, "b": other, "found_by": matching.how[path]} for path, other in matching.pairs.items()]
    return {"pairs": pairs, "only_a": matching.only_a, "only_b": matching.only_b}


def _entry(place: ComparedPlace) -> dict[str, Any]:
    errors = {kind: getattr(place, kind) for kind in ("seen", "local")}
    return {
        "site": place.site,
        "other": place.other,
        "module": place.kind,
        **{kind: None if error is None else error._asdict() for kind, error in errors.items()},
        "rounding": place.rounding._asdict(),
        "off": place.is_off,
        "made_good": place.is_made_good,
        "note": place.note,
        "hint": place.hint,
        "function": place.function,
    }
