"""The axes of a sweep: the names of a value's dimensions, and the grid that places in a model form.

`dimension_names` says what the dimensions of one value are. `find_grid` reads the sites of a sweep and finds what
varies: the layer, the module, the call, and the positions, heads or neurons that subscripts choose. `SweepGrid` is a
tensor with these axes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, NamedTuple

from torch import Tensor

from hookline import Site
from hookline._kernel import Tokens, write_subscripts
from hookline._plot.plot_data import DIMENSIONS
from hookline._tables import Table, Tabular, count
from hookline.errors import HooklineError

Label = int | str

_INDEX = re.compile(r"(?<![\w#])(\d+)(?!\w)")  # A number between separators, as in "h.0".
_NUMBER = re.compile(r"(\d+)")  # Any number, as in "conv1".
_SEGMENT = re.compile(r"[./:]?[^./:]+")  # A name in the text of a site, with the mark before it.
_MOST_COLUMNS = 12  # A wider grid is printed without the columns in its middle.


def dimension_names(site: Site, shape: Sequence[int], tokens: int | None) -> tuple[str, ...]:
    """Name the dimensions of a value of this shape at a site, in a run of so many tokens, or of None that is known of.

    >>> dimension_names(Site.parse("h.0.attn/softmax"), (2, 12, 9, 9), None)
    ('sample', 'head', 'query', 'key')
    >>> dimension_names(Site.parse("h.0"), (2, 9, 768), 9)
    ('sample', 'position', 'neuron')
    """
    sizes = tuple(shape)
    if len(sizes) == 4:
        return _names_of_four(site, sizes, tokens)
    if len(sizes) == 3:
        if site.function == "softmax" and sizes[1] == sizes[2]:  # MultiheadAttention averages the heads.
            return ("sample", "query", "key")
        is_turned = tokens is not None and sizes[1] != tokens == sizes[0]  # Positions come first.
        return ("position", "sample", "neuron") if is_turned else ("sample", "position", "neuron")
    if len(sizes) == 2:
        return ("sample", "neuron")
    return tuple(f"dim {number}" for number in range(len(sizes)))


def _names_of_four(site: Site, sizes: tuple[int, ...], tokens: int | None) -> tuple[str, ...]:
    if site.function == "softmax" or (tokens is not None and sizes[2:] == (tokens, tokens)):
        return DIMENSIONS["attention"]
    if site.function == "scaled_dot_product_attention":  # It returns what heads read, not where they look.
        return ("sample", "head", "position", "neuron")
    if tokens is not None and sizes[1] == tokens:
        return ("sample", "position", "head", "neuron")
    if tokens is not None and sizes[2] == tokens:
        return ("sample", "head", "position", "neuron")
    return DIMENSIONS["maps"]


@dataclass(frozen=True, eq=False, repr=False)
class SweepGrid(Tabular):
    """Numbers along named axes: `values` has a dimension for each entry of `axes`, which lists its labels.

    Places that were not measured are NaN. Up to two axes print as a table.
    """

    values: Tensor
    axes: dict[str, list[Label]]

    def _table(self) -> Table:
        names = list(self.axes)
        title = " × ".join(count(len(labels), name) for name, labels in self.axes.items())
        if len(names) > 2:
            return Table((), [], empty=f"grid of {title}; grid.values is a tensor, and grid.axes has the labels")
        rows = self.axes[names[0]]
        matrix = self.values.reshape(len(rows), -1)
        columns: list[Label] = list(self.axes[names[1]]) if len(names) == 2 else [""]
        chosen = list(range(len(columns)))
        if len(chosen) > _MOST_COLUMNS:
            chosen = [*chosen[: _MOST_COLUMNS // 2], -1, *chosen[1 - _MOST_COLUMNS // 2 :]]
        head = ["…" if column < 0 else str(columns[column]) for column in chosen]
        cells = [["…" if column < 0 else f"{row[column].item():.3g}" for column in chosen] for row in matrix]
        lines = [(str(label), *texts) for label, texts in zip(rows, cells, strict=True)]
        return Table((names[0], *head), lines, f"grid of {title}", names=names[0], every="grid.values")


class Located(NamedTuple):
    """The axes of a grid by name, the cell of each site in it, and the pattern of the sites if they have one."""

    axes: dict[str, list[Label]]
    cells: dict[str, tuple[int, ...]]
    pattern: str


class _Column(NamedTuple):
    """What varies from site to site: the name of the axis, and a label for each site."""

    name: str
    labels: list[Label]


class _Place(NamedTuple):
    """A site whose text is read: the words and numbers of its name, and the items of its subscripts."""

    site: Site
    words: tuple[str, ...]
    numbers: tuple[str, ...]
    items: tuple[tuple[Any, ...], ...]

    @property
    def pattern(self) -> str:
        """The site with a `*` for each number."""
        return "*".join(self.words) + self.starred_index

    @property
    def starred_index(self) -> str:
        """The subscripts of the site with a `*` for each number."""
        return re.sub(r"(?<![\w@:\-])\d+(?![\w:])", "*", self.site.index)


def find_grid(texts: Sequence[str], dimensions: Mapping[str, Sequence[str]]) -> Located:
    """Find the grid that sites form. Raises if they form none, and names a site that does not fit the others.

    >>> found = find_grid(["h.0[:, 3]", "h.0[:, 4]", "h.1[:, 3]"], {"h.0[:, 3]": ("sample", "position", "neuron")})
    >>> found.axes, found.cells["h.0[:, 4]"]
    ({'layer': [0, 1], 'position': [3, 4]}, (0, 1))
    """
    if not texts:
        raise HooklineError("there are no places in this sweep, and so there is no grid")
    places = _read([Site.parse(text) for text in texts])
    templates, columns = _of_names(places)
    columns += [*_of_calls(places), *_of_subscripts(places, dimensions)]
    columns = columns or [_Column("site", list(texts))]
    axes: dict[str, list[Label]] = {}
    cells: list[list[int]] = [[] for _ in texts]
    for name, labels in columns:
        alone = _name_alone(name, axes)
        axes[alone] = _in_order(labels)
        numbers = {label: number for number, label in enumerate(axes[alone])}
        for cell, label in zip(cells, labels, strict=True):
            cell.append(numbers[label])
    patterns = {template + place.starred_index for template, place in zip(templates, places, strict=True)}
    pattern = patterns.pop() if len(patterns) == 1 else ""
    return Located(axes, {text: tuple(cell) for text, cell in zip(texts, cells, strict=True)}, pattern)


def _read(sites: Sequence[Site]) -> list[_Place]:
    """Split the names of sites into words and numbers: numbers between dots, or digits if all else is alike."""
    # Calls that vary are an axis of their own.
    calls: dict[str, Any] = {
        name: None for name in ("call", "within") if len({getattr(site, name) for site in sites}) > 1
    }
    names = [str(site._replace(index="", **calls)) for site in sites]
    split = [_INDEX.split(name) for name in names]
    if all(len(pieces) == 1 for pieces in split):
        by_digits = [_NUMBER.split(name) for name in names]
        split = by_digits if len({tuple(pieces[::2]) for pieces in by_digits}) == 1 else split
    places = []
    for site, pieces in zip(sites, split, strict=True):
        items = tuple(one if isinstance(one, tuple) else (one,) for one in site.subscripts)
        places.append(_Place(site, tuple(pieces[::2]), tuple(pieces[1::2]), items))
    return places


def _of_names(places: Sequence[_Place]) -> tuple[list[str], list[_Column]]:
    """Return the names of the sites with a `*` for each number that varies; and what varies: numbers, and words."""
    _refuse_odd(places, lambda place: len(place.numbers), lambda place: _how_many(len(place.numbers), "in its name"))
    varying = [len({*column}) > 1 for column in zip(*(place.numbers for place in places), strict=True)]
    columns: list[_Column] = []
    for number in (number for number, varies in enumerate(varying) if varies):
        words = re.findall(r"[^\W\d]\w*", places[0].words[number])
        name = "layer" if number == 0 else words[-1] if words else "number"
        columns.append(_Column(name, [int(place.numbers[number]) for place in places]))
    templates = [_template(place, varying) for place in places]
    if len({*templates}) > 1:
        modules = _modules(list(dict.fromkeys(templates)))
        columns.append(_Column("module", [modules[template] for template in templates]))
    return templates, columns


def _how_many(numbers: int, where: str) -> str:
    return f"{count(numbers, 'number') if numbers else 'no number'} {where}"


def _template(place: _Place, varying: Sequence[bool]) -> str:
    """Return the name of a site with a `*` for each number that varies."""
    marks = ["*" if varies else number for number, varies in zip(place.numbers, varying, strict=True)]
    return "".join(word + mark for word, mark in zip(place.words, [*marks, ""], strict=True))


def _modules(templates: Sequence[str]) -> dict[str, Label]:
    """Return for each template the part of it in which it differs from the others; all of it if there is none.

    >>> _modules(["h.*.attn/softmax", "h.*.mlp"]), _modules(["encoder.*", "decoder.*"])
    ({'h.*.attn/softmax': 'attn/softmax', 'h.*.mlp': 'mlp'}, {'encoder.*': 'encoder', 'decoder.*': 'decoder'})
    """
    split = [_SEGMENT.findall(template) for template in templates]
    start = _shared(split)
    rest = [segments[start:] for segments in split]
    end = _shared([segments[::-1] for segments in rest])
    short = ["".join(segments[: len(segments) - end]).lstrip("./") for segments in rest]
    return {template: text or template or '""' for template, text in zip(templates, short, strict=True)}


def _shared(lists: Sequence[Sequence[str]]) -> int:
    """Return how many items all lists begin with."""
    return len(list(takewhile(lambda items: len({*items}) == 1, zip(*lists, strict=False))))


def _of_calls(places: Sequence[_Place]) -> list[_Column]:
    found = []
    for name, calls in (
        ("outer call", [place.site.within for place in places]),
        ("call", [place.site.call for place in places]),
    ):
        labels: list[Label] = [one if isinstance(one, int) else "all" if one is None else str(one) for one in calls]
        found += [_Column(name, labels)] if len({*labels}) > 1 else []
    return found


def _of_subscripts(places: Sequence[_Place], dimensions: Mapping[str, Sequence[str]]) -> list[_Column]:
    """Return what varies in the subscripts of the sites, named by the dimensions that they choose from."""
    _refuse_odd(
        places,
        lambda place: tuple(len(items) for items in place.items),
        lambda place: f"the subscript {place.site.index}" if place.site.index else "no subscript",
    )
    columns = []
    for subscript, items in enumerate(places[0].items):
        for item in range(len(items)):
            labels = [_label(place.items[subscript][item]) for place in places]
            if len({*labels}) > 1:
                columns.append(_Column(_agreed(places, (subscript, item), dimensions), labels))
    return columns


def _agreed(places: Sequence[_Place], where: tuple[int, int], dimensions: Mapping[str, Sequence[str]]) -> str:
    """Return the name of the dimension that an item of a subscript chooses from, the same for all places."""
    names = {place.site: _dimension(place, where, dimensions.get(str(place.site))) for place in places}
    known = [place for place in places if names[place.site] is not None]
    _refuse_odd(known, lambda place: names[place.site], lambda place: f"a subscript for its {names[place.site]}")
    return (names[known[0].site] if known else None) or f"dim {where[1]}"


def _dimension(place: _Place, where: tuple[int, int], names: Sequence[str] | None) -> str | None:
    """Return the name of the dimension that an item of a subscript chooses from; None if nobody knows."""
    subscript, item = where
    items = place.items[subscript]
    if isinstance(items[item], Tokens):
        return "position"
    if subscript < len(place.items) - 1 or isinstance(items[item], str):
        return "part"  # It chooses one of several values.
    if names is None and place.site.function == "softmax":
        names = DIMENSIONS["attention"]
    if names is None:
        return None
    number = sum(one is not None for one in items[:item])
    if Ellipsis in items[:item]:
        number = len(names) - sum(one is not None for one in items[item:])
    return names[number] if number < len(names) else None


def _label(item: Any) -> Label:
    """Return what an item of a subscript is called on an axis."""
    if isinstance(item, int):
        return item
    if isinstance(item, Tokens):
        return item.index if item.index is not None and not item.part else str(item).removeprefix("@")
    return item if isinstance(item, str) else write_subscripts((item,))[1:-1]


def _in_order(labels: Sequence[Label]) -> list[Label]:
    """Return each label once: numbers in their order, those that count from the end last; words as they come."""
    once = list(dict.fromkeys(labels))
    numbers = [label for label in once if isinstance(label, int)]
    if len(numbers) < len(once):
        return once
    return [*sorted(numbers, key=lambda number: (number < 0, number))]


def _name_alone(name: str, taken: Mapping[str, Any]) -> str:
    """Return a name that no other axis has."""
    names = (name, *(f"{name} {number}" for number in range(2, len(taken) + 3)))
    return next(one for one in names if one not in taken)


def _refuse_odd(places: Sequence[_Place], kind: Callable[[_Place], Hashable], words: Callable[[_Place], str]) -> None:
    """Raise if places differ in kind: name one that is not like most, and say how to select the others."""
    kinds = Counter(map(kind, places))
    if len(kinds) < 2:
        return
    most = kinds.most_common(1)[0][0]
    usual = next(place for place in places if kind(place) == most)
    odd = next(place for place in places if kind(place) != most)
    raise HooklineError(
        f"these places form no grid: {str(odd.site)!r} has {words(odd)}, and {str(usual.site)!r} has {words(usual)}; "
        f"select places of one kind first, as in found.select({usual.pattern!r})"
    )
