"""The data of a page, as one dict for JSON: sites with statistics and pictures, modules, warnings, measurements."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import torch
from torch import Tensor, nn

from hookline import Site
from hookline._explore.alarms import Alarm, SiteSummary, alarms
from hookline._explore.excerpts import (
    DIGITS,
    WEIGHTS,
    FullValue,
    Pick,
    Summary,
    cost,
    excerpt,
    kind_of_source,
    least_cost,
    left_out,
    levels_for,
    number,
    of_tokens,
    quantise,
    share,
)
from hookline._explore.module_tree import Node, tree
from hookline._explore.run_or_load import OverCalls, Run, SiteValue
from hookline._plot.plot_data import DIMENSIONS
from hookline._scan.scan import Scan
from hookline.errors import HooklineError

FORMAT = ["hookline page", 1]
FEWEST_BYTES = 400  # A smaller picture is not worth showing.
_UNSAFE = re.compile("[<>&\u2028\u2029\ud800-\udfff]")  # A lone surrogate can't be encoded as UTF-8.
_PARTNERS = {"output": "grad_output", "input": "grad_input", "inputs": "grad_inputs"}


class PageSite:
    """One site of a page: its value in each run, and the difference."""

    def __init__(self, number: int, entries: Sequence[SiteValue | None], notes: list[str]) -> None:
        self.number = number
        self.entries = entries
        self.entry = next(entry for entry in entries if entry is not None)
        self.kind = self._kind()
        self.values: list[FullValue | None] = [self._full(entry) for entry in entries]
        if len(entries) == 2:
            self.values.append(self._difference(notes))
        self.summaries = [None if value is None else Summary(value) for value in self.values]

    def _kind(self) -> str:
        sources = [entry.source for entry in self.entries if entry is not None and entry.source is not None]
        kinds = [kind_of_source(source) for source in sources]
        return max(kinds, key=lambda kind: len(DIMENSIONS[kind]), default="number")

    def _full(self, entry: SiteValue | None) -> FullValue | None:
        return None if entry is None or entry.source is None else FullValue(entry.source, self.kind)

    def _difference(self, notes: list[str]) -> FullValue | None:
        """Return the second run minus the first, if both have a value of the same shape."""
        one, other = self.entries
        if one is None or other is None or one.source is None or other.source is None:
            return None
        if one.shape != other.shape:
            notes.append(f"'{one.site}' has shape {one.shape} in one run and {other.shape} in the other: no difference")
            return None
        return FullValue(other.source, self.kind, minus=one.source)

    @property
    def drawn(self) -> list[FullValue]:
        """The values that have a picture: those with elements."""
        return [value for value in self.values if value is not None and value.elements]

    def as_json(self, gradient: int | None, value: int | None) -> dict[str, Any]:
        """Return everything for JSON except the pictures."""
        site = self.entry.site
        return {
            "name": str(site),
            **{name: getattr(site, name) for name in ("path", "port", "member", "index")},
            "call": _calls_as_json(site.call),
            "within": _calls_as_json(site.within),
            "parts": self.entry.parts,
            "order": self.number,
            "kind": self.kind,
            "dtype": self.entry.dtype,
            "shape": list(self.entry.shape),
            "describe": self.entry.describe,
            "gradient": gradient,
            "value": value,
            "calls": [0 if entry is None else entry.calls for entry in self.entries],
            "over": [
                None if entry is None or entry.over is None else _over_as_json(entry.over) for entry in self.entries
            ],
            "stats": [None if summary is None else summary.stats() for summary in self.summaries],
            "histogram": [None if summary is None else summary.histogram() for summary in self.summaries],
        }

    def pictures(self, bytes: float) -> dict[str, Any]:
        """Return the pictures for JSON, each of at most `bytes` bytes."""
        pairs = [_excerpt(value, bytes) for value in self.values]
        tokens = [None if pair is None else of_tokens(*pair) for pair in pairs] if self.kind == "tokens" else None
        return {"tokens": tokens, "picture": [None if pair is None else _picture(*pair, bytes) for pair in pairs]}


def _over_as_json(over: OverCalls | None) -> dict[str, Any] | None:
    if over is None:
        return None
    stats = {name: [number(float(f"{one:.{DIGITS}g}")) for one in each] for name, each in over.stats.items()}
    return {**over._asdict(), "stats": stats}


def _calls_as_json(wanted: Any) -> int | str | None:
    """Return the calls of a site: a number, or several as they are written."""
    return wanted if wanted is None or isinstance(wanted, int) else str(wanted)


def _excerpt(value: FullValue | None, bytes: float) -> tuple[FullValue, list[Pick]] | None:
    """Return a value and the part of it to show; None if even the smallest picture is too large."""
    if value is None or not value.elements:
        return None
    picks = excerpt(value.kind, value.shape, bytes)
    return (value, picks) if least_cost(value.kind, [pick.length for pick in picks]) <= bytes else None


def _picture(value: FullValue, picks: list[Pick], bytes: float) -> dict[str, Any]:
    part = value.part(picks)
    return {
        "shape": list(part.shape),
        "of": list(value.shape),
        "pick": [list(pick) for pick in picks],
        "left_out": left_out(value.kind, value.shape, picks),
        **quantise(part, levels_for(value.kind, part.shape, bytes)).as_json(),
    }


@torch.no_grad()
def contents(
    runs: Sequence[Run],
    *,
    title: str,
    bytes: int,
    model: nn.Module | None = None,
    scan: Scan | None = None,
    tokens: Sequence[Sequence[str]] | None = None,
    measured: Any = None,
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the data of a page with one or two runs, which takes about `bytes` bytes as JSON."""
    said = [*notes, *(note for run in runs for note in run.notes)]
    places = _places(runs, said)
    said += _unused(tokens, places)
    modules = tree([place.entry for place in places], runs, model, scan)
    numbers = {place.entry.site: place.number for place in places}
    page: dict[str, Any] = {
        "format": FORMAT,
        "title": title,
        "made": datetime.now().strftime("%Y-%m-%d %H:%M"),
        "version": _version(),
        "notes": list(dict.fromkeys(said)),
        "runs": [{"name": run.name} for run in runs],
        "modules": [node.as_json() for node in modules],
        "sites": [place.as_json(*_partners(place.entry.site, numbers)) for place in places],
        "tokens": None if tokens is None else [list(map(str, sample)) for sample in tokens],
        "warnings": [alarm.as_json() for alarm in _warnings(runs, places, modules)],
        "measured": measurements(measured, numbers, {node.path for node in modules}),
    }
    page["notes"] += _unknown(page["measured"])
    _add_pictures(page, places, bytes)
    return page


def _places(runs: Sequence[Run], notes: list[str]) -> list[PageSite]:
    """Return every site of the runs, in order; add a note about sites that only one run has."""
    sites = list(dict.fromkeys(site for run in runs for site in run.entries))
    for run in runs:
        missing = [site for site in sites if site not in run.entries]
        if missing:
            more = ", …" if len(missing) > 3 else ""
            named = ", ".join(f"'{site}'" for site in missing[:3])
            notes.append(f"{run.name} does not have {len(missing)} of the sites: {named}{more}")
    return [PageSite(number, [run.entries.get(site) for run in runs], notes) for number, site in enumerate(sites)]


def _unused(tokens: Sequence[Sequence[str]] | None, places: Sequence[PageSite]) -> list[str]:
    """Return a note if no value has as many tokens as `tokens`."""
    if tokens is None:
        return []
    dimensions = {"tokens": (1,), "attention": (2, 3)}
    sizes = {value.shape[dim] for place in places for value in place.drawn for dim in dimensions.get(place.kind, ())}
    given = sorted({len(sample) for sample in tokens})
    if sizes.intersection(given):
        return []
    return [f"tokens= are not shown: a sample has {_any_of(given)} of them, and values have {_any_of(sorted(sizes))}"]


def _any_of(numbers: Sequence[int]) -> str:
    return " or ".join(map(str, numbers)) or "none"


def _partners(site: Site, numbers: Mapping[Site, int]) -> tuple[int | None, int | None]:
    """Return the number of the site that holds this one's gradient, and of the site whose gradient this is."""
    gradient = site._replace(port=_PARTNERS.get(site.port, ""))
    value = site._replace(port=site.port.removeprefix("grad_")) if site.is_gradient else None
    return numbers.get(gradient), None if value is None else numbers.get(value)


def _warnings(runs: Sequence[Run], places: Sequence[PageSite], modules: Sequence[Node]) -> list[Alarm]:
    seen: list[list[SiteSummary]] = [[] for _ in runs]
    for place in places:
        for run, (entry, summary) in enumerate(zip(place.entries, place.summaries, strict=False)):
            if entry is not None and summary is not None:
                seen[run].append(SiteSummary(place.number, entry, summary))
    found = alarms(seen, modules)
    differences = [place.summaries[2] for place in places if len(place.summaries) == 3]
    if differences and all(
        one is not None and one.elements == one.finite and not one.numbers.norm > 0 for one in differences
    ):
        found.append(Alarm("note", "same", None, None, 1, "the two runs are equal at every site"))
    return found


def _add_pictures(page: dict[str, Any], places: Sequence[PageSite], bytes: int) -> None:
    """Add pictures to the sites, within the bytes that the other data leaves."""
    pictures = [(place, value) for place in places for value in place.drawn]
    costs = [cost(place.kind, value.shape) for place, value in pictures]
    weights = [WEIGHTS.get(place.kind, 1) for place, _ in pictures]
    left = bytes - len(text_of(page).encode())
    each = share(costs, weights, left)
    if left < FEWEST_BYTES * len(pictures):
        what = "larger than most=, and has no pictures" if left <= 0 else "too small for pictures"
        page["notes"].append(f"the page is {what}: give it more bytes with most=, or fewer sites with at=")
    for place, entry in zip(places, page["sites"], strict=True):
        entry |= place.pictures(each * WEIGHTS.get(place.kind, 1))


def measurements(measured: Any, numbers: Mapping[Site, int], modules: set[str]) -> list[dict[str, Any]]:
    """Return the measurements of a sweep, or of several by title, for JSON."""
    if measured is None:
        return []
    if not isinstance(measured, Mapping):
        raise HooklineError(f"measured= takes a sweep, or a mapping from title to one, not {type(measured).__name__}")
    titled = (
        measured if measured and all(isinstance(one, Mapping) for one in measured.values()) else {"measured": measured}
    )
    return [_measurement(str(title), one, numbers, modules) for title, one in titled.items()]


def _unknown(measured: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a note about measured places that are not on the page; their names may be misspelt."""
    rows = [row for one in measured for row in one["rows"]]
    names = dict.fromkeys(row["name"] for row in rows if row["site"] is None and row["module"] is None)
    return [f"measured= names places that are not on this page: {', '.join(map(repr, names))}"] if names else []


def _measurement(title: str, one: Mapping[Any, Any], numbers: Mapping[Site, int], modules: set[str]) -> dict[str, Any]:
    rows = []
    for key, value in one.items():
        site = key if isinstance(key, Site) else Site.parse(key)
        module = site.path if site.path in modules else None
        rows.append({"name": str(site), "value": _scalar(value, title), "site": numbers.get(site), "module": module})
    base = getattr(one, "base", None)
    return {"title": title, "base": None if base is None else _scalar(base, title), "rows": rows}


def _scalar(value: Any, title: str) -> float | str:
    if isinstance(value, Tensor) and value.numel() and not value.is_complex():
        value = value.double().mean().item()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise HooklineError(f"measured={title!r}: a page shows one number for each place, not {type(value).__name__}")
    return number(float(value))


def text_of(page: Mapping[str, Any]) -> str:
    """Return a page's data as JSON that is safe inside HTML."""
    text = json.dumps(page, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return _UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)  # They occur only inside JSON strings.


def _version() -> str:
    return str(sys.modules["hookline"].__version__)  # The package is a layer above this file.
