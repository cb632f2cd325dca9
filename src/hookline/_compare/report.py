"""The result of `hl.compare`: the places at which two models were compared, and the first at which they part."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from hookline import Site
from hookline._compare.apart import SMALL, Apart, MeasuredPart
from hookline._compare.matching import Matching
from hookline._compare.rounding import NO_ERROR, Limit
from hookline._compare.weight_differences import EXTRA, MISSING, ROUNDED
from hookline._compare.weights import Weight
from hookline._kernel import refuse_texts
from hookline._plot.plot import plot_curves
from hookline._tables import Table, Tabular, count, table_of
from hookline.errors import Diverged, HooklineError, NotCaptured, did_you_mean

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


KINDS = ("seen", "local")
Pair = tuple[Any, Any]  # A value of a, and that of b in the same layout.


@dataclass
class ComparedPlace:
    """One module of a and its counterpart in b.

    `seen` is how far b's output is from a's in a run of its own, `local` how far it is if b's module gets a's inputs.
    `rounding` is the largest that rounding explains, and `is_off` says whether `local` is larger. A difference
    that the module around makes good is not counted: `is_made_good`.
    """

    site: str
    other: str
    kind: str
    seen: Apart | None = None
    local: Apart | None = None
    rounding: Limit = NO_ERROR
    is_off: bool = False
    is_made_good: bool = False
    call: int = 0  # The call of the module in which its error is largest.
    note: str = ""
    hint: str = ""
    function: str = ""  # The site inside b's module at which the error begins, if it was found.
    worst: str = ""  # The element that differs most, and what it is in both.
    part: str = ""  # The part of the output that is off most, as in "[0]".
    parts: Mapping[str, MeasuredPart] = field(default_factory=dict, repr=False)  # The local error of each part,
    seen_parts: Mapping[str, MeasuredPart] = field(default_factory=dict, repr=False)  # and the seen error.
    limits: Mapping[str, Limit] = field(default_factory=dict, repr=False)  # `rounding` for each.
    odd: Sequence[str] = ()  # What is returned there and has no counterpart, or one of another shape, in words,
    besides: Sequence[str] = ()  # and what of that is not counted, such as all hidden states.
    seen_values: Pair | None = field(default=None, repr=False)  # The outputs of a and b, each in its own run.
    local_values: Pair | None = field(default=None, repr=False)  # Those of both on a's inputs, if they are off.

    def __str__(self) -> str:
        return self.site or "the model"

    @property
    def is_seen_equal(self) -> bool:
        """Whether the two models return the same here, each in its own run, up to rounding."""
        return self.seen is not None and self.rounding.covers(self.seen)

    def clear(self, around: str) -> None:
        """Do not count the difference, since the module around makes it good."""
        self.is_off, self.is_made_good, self.local_values = False, True, None
        self.note = f"made good in {around}"


class Comparison(Tabular, Mapping[str, ComparedPlace]):
    """Where two models part: a mapping from site in a to `ComparedPlace`, which prints as a table, the worst first.

    `first` is the first place that is off, `weights` are the parameters and buffers that differ, `matching` is the
    table of pairs, and `gradients` a comparison of gradients, if `backward=` was given.
    """

    def __init__(
        self,
        places: Mapping[str, ComparedPlace],
        weights: Sequence[Weight],
        matching: Matching | None,
        first: ComparedPlace | None,
        notes: Sequence[str] = (),
        gradients: Comparison | None = None,
        tolerance: float | None = None,
    ) -> None:
        self._places = dict(places)
        self.weights = list(weights)
        self.matching = matching
        self._is_of_values = bool(notes)  # And not of a model.
        self.gradients = gradients
        self._what_is_allowed = "up to rounding" if tolerance is None else f"up to tolerance={tolerance:g}"
        self.first: ComparedPlace | None = first if first is not None or gradients is None else gradients.first
        self.notes = (*notes, *(matching.left_over() if matching is not None else ()))

    @property
    def ok(self) -> bool:
        """Whether everything that differs is explained by rounding."""
        return self.first is None and not (self._places == {} and self._wrong_weights())

    def check(self) -> None:
        """Raise `Diverged` unless all is explained by rounding."""
        if not self.ok:
            raise Diverged(self.verdict)

    @property
    def verdict(self) -> str:
        """The result in one or two sentences."""
        if self.first is not None:
            return self._of_first(self.first)
        wrong = self._wrong_weights()
        if not self._places:
            one = wrong[0] if wrong else None
            return f"{one.name or one.other}: {one.what}" if one else "ok: the weights are equal; nothing was run"
        compared = sum(place.seen is not None and not place.is_made_good for place in self._places.values())
        same = f"ok: at {count(compared, 'place')} the models do the same, {self._what_is_allowed}"
        return "; ".join((same, *self._also(wrong)))

    def _also(self, wrong: Sequence[Weight]) -> Iterator[str]:
        """Say what else is to know if all is ok."""
        changed = sum(place.is_made_good for place in self._places.values())
        if changed:
            yield f"{count(changed, 'more place')} {_verb('differ', changed)}, and the modules around agree"
        alone = [one for one in wrong if one.kind in (MISSING, EXTRA)]
        unequal = len(wrong) - len(alone)
        if unequal:
            yield f"{count(unequal, 'weight')} {_verb('be', unequal)} not equal: see report.weights"
        if alone:
            yield f"{count(len(alone), 'weight')} {_verb('have', len(alone))} no counterpart: see report.weights"
        if self.gradients is not None:
            yield "so do the gradients"
        missing = [place for place in self._places.values() if place.seen is None and place.site]
        if missing:
            yield f"at {count(len(missing), 'place')} nothing could be compared, as at {missing[0].site!r}"
        if "" in self._places:
            yield from self._places[""].besides[:2]
        yield from self._remarks()

    def _of_first(self, first: ComparedPlace) -> str:
        where = f"'{first.site}'" if first.site else "the model itself"
        if first.other != first.site:
            where += f" ('{first.other}' in b)"
        error = first.local if first.local is not None else first.seen
        note = first.note
        if self.gradients is not None and first is self.gradients.first:
            module = first.site.removesuffix(":grad_output").removesuffix(":grad")
            where = "the gradient of" if first.kind == "parameter" else "the backward of"
            where += f" {module!r}" if module else " the model itself"
            what = "differs" if first.kind == "parameter" else "gives other gradients"
        elif first.odd:
            what, error, note = "returns something else: " + "; ".join(first.odd[:3]), None, ""
        elif first.local is None:
            what = "is the first place with another value"
        elif first.local.is_none:
            what, note = first.note, ""
        elif self._holds_compared(first.site):
            what = "does something else, though the modules inside do the same"
        else:
            what = "does something else on the same inputs"
        said = [f"{where} {what}", f"Hint: {first.hint}" if first.hint else ""]
        if error is not None and not error.is_none:
            said.append(f"{_size(error, first)}{f': {first.worst}' if first.worst else ''}")
        said.append(_capital(note))
        said += map(_capital, self._remarks())
        return ". ".join(filter(None, said))

    def _holds_compared(self, site: str) -> bool:
        start = f"{site}." if site else ""
        return any(path != site and path.startswith(start) and self._places[path].local for path in self._places)

    def errors(self, kind: str | None = None) -> dict[str, Any]:
        """Return the relative error of each place: "seen" or "local"; by default both, for `hl.explore(measured=)`."""
        if kind is None:
            return {f"{one} error": self.errors(one) for one in KINDS if self.errors(one)}
        refuse_texts(kind=kind)
        if kind not in KINDS:
            raise HooklineError(f"errors are 'seen' or 'local', not {kind!r}")
        errors = {site: getattr(place, kind) for site, place in self._places.items()}
        return {site: error.relative for site, error in errors.items() if error is not None}

    def _wrong_weights(self) -> list[Weight]:
        return [one for one in self.weights if one.kind != ROUNDED]

    def __getitem__(self, site: str | Site) -> ComparedPlace:
        if str(site) not in self._places:
            raise NotCaptured(f"'{site}' was not compared{did_you_mean(str(site), self._places)}")
        return self._places[str(site)]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def to_frame(self) -> Any:
        """Return a row for each place, as a pandas DataFrame."""
        try:
            import pandas
        except ImportError:
            raise HooklineError("to_frame() needs pandas: pip install pandas") from None
        rows = []
        for place in self._places.values():
            row: dict[str, Any] = {"site": place.site, "other": place.other, "kind": place.kind}
            row |= {"off": place.is_off, "made_good": place.is_made_good, "note": place.note}
            for name, error in (("seen", place.seen), ("local", place.local)):
                row |= {f"{name}_{key}": value for key, value in (error._asdict() if error else {}).items()}
            row |= {f"rounding_{key}": value for key, value in place.rounding._asdict().items()}
            rows.append(row)
        return pandas.DataFrame(rows)

    def plot(self, *, ax: Axes | None = None, title: str | None = None) -> Figure | Axes:
        """Plot both errors of the places that hold no others or are off, in the order in which they run."""
        if title is not None:
            refuse_texts(title=title)
        if not self._places:
            raise HooklineError("there are no errors to plot: hl.compare without run= compares only weights")
        shown = [site for site, place in self._places.items() if place.is_off or not self._holds_others(site)]
        found = {kind: self.errors(kind) for kind in KINDS}
        errors = {kind: [one.get(site, math.nan) for site in shown] for kind, one in found.items() if one}
        longest = max(map(len, errors.values()))
        return plot_curves(
            errors, "place", range(longest), ax=ax, log=True, title=title or "error of each place", label=None
        )

    def _holds_others(self, site: str) -> bool:
        return not site or any(one.startswith(f"{site}.") for one in self._places)

    def explore(self, to: str | os.PathLike[str] = "report.html", **options: Any) -> Any:
        """Write a page that shows the values of a and b side by side, and both errors; options are of `hl.explore`."""
        from hookline import explore

        pairs = {site: place.seen_values for site, place in self._places.items() if place.seen_values is not None}
        if not pairs:
            raise HooklineError("there are no values to explore: hl.compare without run= compares only weights")
        first, second = ({site: pair[side] for site, pair in pairs.items()} for side in (0, 1))
        named = {
            "names": ("a", "b"),
            "title": re.split("[.:;] ", self.verdict)[0],
            "measured": self.errors(),
            **options,
        }
        return explore(first, to=to, against=second, **named)

    def _table(self) -> Table:
        if self.ok:
            return Table((), [], empty=self.verdict)
        places = sorted(self._places.values(), key=self._rank)
        rows = [
            (place.site or '""', place.kind, _relative(place.seen), _local(place), self._remark(place))
            for place in places
        ]
        header = ("site", "module", "seen", "local", "")
        if not rows:
            return Table(
                ("weight", "in b", ""), [(one.name, one.other, one.what) for one in self.weights], self.verdict
            )
        if self.gradients is not None and self.gradients.first is self.first and not self.gradients.ok:
            return replace(table_of(self.gradients), title=self.verdict)
        return Table(header, rows, self.verdict, every='f"{report:all}"')

    def _remarks(self) -> list[str]:
        """Return the notes for above the table, without lists of names."""
        left = [*self.matching.only_a, *self.matching.only_b] if self.matching is not None else []
        kind, has = ("place" if self._is_of_values else "module"), "has" if len(left) == 1 else "have"
        which = ""
        if self.matching is not None and self.matching.with_weights:
            held = self.matching.with_weights
            holds = "which holds weights" if len(held) == 1 else f"and {len(held)} in all hold weights"
            which = f", {'as' if len(held) > 1 else 'among them'} {held[0]}, {holds}"
        more = [f"{count(len(left), kind)} {has} no counterpart{which}: see report.matching"] if left else []
        return [*(note for note in self.notes if not note.startswith("only in")), *more]

    def _remark(self, place: ComparedPlace) -> str:
        return "first" if place is self.first else "off" if place.is_off else place.note

    def _rank(self, place: ComparedPlace) -> tuple[bool, bool, float]:
        """Return a key to sort by: the first, then what is off, the worst first, then all others in their order."""
        error = place.local if place.local is not None else place.seen
        return place is not self.first, not place.is_off, -error.relative if place.is_off and error is not None else 0.0


def _relative(error: Apart | None) -> str:
    return "" if error is None else f"{error.relative:.2g}"


def _local(place: ComparedPlace) -> str:
    """Return the local error of a place in text; "ok" if it is rounding."""
    return _relative(place.local) if place.local is None or place.is_off else "ok"


def _size(error: Apart, place: ComparedPlace) -> str:
    """Say how large an error is, and what would be allowed."""
    part = place.part.removesuffix(SMALL)
    what = "gradients" if ":grad" in place.site else f"outputs at {part}" if part else "outputs"
    what += " without their largest elements" if part != place.part else ""
    limit = place.rounding
    if math.isinf(limit.relative):
        return f"The {what} differ by at most {error.largest:.3g}, and {limit.largest:.2g} is allowed"
    if limit.largest == 0 < limit.relative:
        return f"{100 * (1 - error.exact):.3g} % of the integers in the {what} differ"
    explained = ["", ""]
    if limit != NO_ERROR:
        explained = [f" (rounding: {one})" for one in (_percent(limit.relative), f"{limit.largest:.2g}")]
    differ = f"The {what} differ by {_percent(error.relative)}{explained[0]}"
    return f"{differ}, and by at most {error.largest:.2g}{explained[1]}"


def _percent(share: float) -> str:
    return f"{100 * share:.{3 if share >= 1 else 2}g} %" if share < 10 else f"{share:.3g} times a's"


def _verb(verb: str, number: int) -> str:
    """Return a verb in the form for a number."""
    one, several = {"be": ("is", "are"), "have": ("has", "have"), "differ": ("differs", "differ")}[verb]
    return one if number == 1 else several


def _capital(text: str) -> str:
    """Return a text with a capital, unless it begins with the model a or b."""
    return text[:1].upper() + text[1:] if text[:1] not in ("a", "b") or text[1:2] != " " else text
