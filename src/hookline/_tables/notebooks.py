"""Tables for notebooks: HTML without scripts, nested like the modules, with a histogram in rows that have one."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from hookline._tables.terminal import is_number, width

MOST_ROWS = 5000
OPEN_ROWS = 40  # Modules are opened from the top until this many rows are visible.
_WIDEST = 40  # Longer texts are wrapped.
_DEEPEST = 40
_HEIGHT = 16
_SEGMENT = re.compile(r"(?:\\.|[^.:\[#/(\\])+")

# Most colours come from the notebook. The others are readable on dark and light pages.
_STYLE = """
.hookline-table{font-family:var(--jp-code-font-family,ui-monospace,Menlo,Consolas,monospace);font-size:12px;
line-height:1.5;overflow-x:auto;color:inherit;text-align:left}
.hookline-table .r{display:grid;column-gap:2ch;width:max-content;min-width:100%;box-sizing:border-box;
padding:0 .5em;border-bottom:1px solid rgba(128,128,128,.18);align-items:center;list-style:none}
.hookline-table .r>span{overflow-wrap:anywhere;white-space:pre-wrap}
.hookline-table .h{font-weight:bold;border-bottom-color:rgba(128,128,128,.7)}
.hookline-table .t{padding:0 .5em .4em;font-weight:bold}
.hookline-table .n{text-align:right}
.hookline-table i{font-style:normal;opacity:.6}
.hookline-table summary{cursor:pointer}
.hookline-table summary::-webkit-details-marker{display:none}
.hookline-table .r>span:first-child::before{content:"";display:inline-block;width:2ch}
.hookline-table summary>span:first-child::before{content:"\\25B8"!important;opacity:.7}
.hookline-table details[open]>summary>span:first-child::before{content:"\\25BE"!important}
.hookline-table .r:hover{background:rgba(128,128,128,.14)}
.hookline-table svg{display:block;width:96px;height:16px;overflow:visible}
.hookline-table .b{fill:#3b8ee0}
.hookline-table .z{stroke:currentColor;stroke-opacity:.45;stroke-width:1;vector-effect:non-scaling-stroke}
"""


class Picture(Protocol):
    """A histogram."""

    @property
    def low(self) -> float:
        """Where the first bin begins."""

    @property
    def high(self) -> float:
        """Where the last bin ends."""

    @property
    def counts(self) -> Sequence[int]:
        """How many elements are in each bin."""


class _Module:
    """One module in the tree: its rows, and the modules below it."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.rows: list[int] = []
        self.below: dict[str, _Module] = {}
        self.is_open = False

    @property
    def is_leaf(self) -> bool:
        return not self.below and len(self.rows) < 2

    def __len__(self) -> int:
        return len(self.rows) + sum(map(len, self.below.values()))


def render(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    title: str,
    name: int | None,
    pictures: Callable[[int], Picture | None] | None,
) -> str:
    """Return a table as HTML with all text escaped; `name` is the column by which rows are nested."""
    shown = rows[:MOST_ROWS]
    root = _tree([row[name] for row in shown]) if name is not None else _flat(len(shown))
    _open(root)
    page = _Page(header, shown, name, pictures)
    head = f'<div class="t">{html.escape(title)}</div>' if title else ""
    body = page.head() + "".join(page.below(root, 0)) if header else ""
    rest = f'<div class="t">… {len(rows) - len(shown):,} more</div>' if len(rows) > len(shown) else ""
    return f'<div class="hookline-table"><style>{_STYLE}</style>{head}{body}{rest}</div>'


class _Page:
    """The rows of one table as HTML."""

    def __init__(
        self,
        header: Sequence[str],
        rows: Sequence[Sequence[str]],
        name: int | None,
        pictures: Callable[[int], Picture | None] | None,
    ) -> None:
        self.rows = rows
        self.name = name
        self.pictures = pictures
        # The column of names comes first, since its cells open and close.
        self.order = sorted(range(len(header)), key=lambda column: (column != name, column))
        self.header = header
        self.right = [_is_right(column, name, rows) for column in self.order]
        widths = [_width([header[column], *(row[column] for row in rows)]) for column in self.order]
        deepest = min(max((row[name].count(".") for row in rows), default=0) + 1, _DEEPEST) if name is not None else 0
        names, *others = widths or [0]
        rooms = [f"{min(names, 2 * _WIDEST) + 2 * deepest + 6}ch", *(f"{min(room, _WIDEST)}ch" for room in others)]
        self.columns = " ".join(rooms) + (" 96px" if pictures is not None else "")

    def head(self) -> str:
        """Return the header."""
        cells = [
            self._cell(html.escape(self.header[column]), right)
            for column, right in zip(self.order, self.right, strict=True)
        ]
        return f'<div class="r h" style="grid-template-columns:{self.columns}">{" ".join(cells)}</div>'

    def below(self, module: _Module, depth: int, own: int | None = None) -> Iterator[str]:
        """Yield the rows of a module, and of the modules below it."""
        yield from (self._row(index, depth) for index in module.rows if index != own)
        for one in module.below.values():
            yield from self._module(one, depth)

    def _module(self, module: _Module, depth: int) -> Iterator[str]:
        if module.is_leaf:
            yield from self.below(module, depth)
            return
        own = next((index for index in module.rows if self.rows[index][self.name or 0] == module.path), None)
        first = self._row(own, depth, "summary") if own is not None else self._label(module, depth)
        yield f"<details{' open' if module.is_open else ''}>{first}"
        yield from self.below(module, depth + 1, own)
        yield "</details>"

    def _row(self, index: int, depth: int, tag: str = "div") -> str:
        row = self.rows[index]
        texts = [html.escape(row[column]) for column in self.order]
        if self.name is not None:
            texts[0] = _name(row[self.name])
        cells = [self._cell(text, right) for text, right in zip(texts, self.right, strict=True)]
        if self.pictures is not None:
            cells.append(_svg(self.pictures(index)))
        return self._line(tag, depth, cells)

    def _label(self, module: _Module, depth: int) -> str:
        return self._line("summary", depth, [f"<span>{_name(module.path)} <i>· {len(module):,}</i></span>"])

    def _line(self, tag: str, depth: int, cells: list[str]) -> str:
        cells[0] = cells[0].replace("<span", f'<span style="padding-left:{2 * depth}ch"', 1)
        return f'<{tag} class="r" style="grid-template-columns:{self.columns}">{" ".join(cells)}</{tag}>'

    def _cell(self, text: str, right: bool) -> str:
        return f'<span class="n">{text}</span>' if right else f"<span>{text}</span>"


def _tree(names: Sequence[str]) -> _Module:
    """Return rows by module, each module at the place of its first row."""
    root = _Module("")
    for index, name in enumerate(names):
        module = root
        for segment in _segments(name)[:_DEEPEST]:
            path = f"{module.path}.{segment}" if module.path else segment
            module = module.below.setdefault(segment, _Module(path))
        module.rows.append(index)
    root.below = {path: _without_chains(one) for path, one in root.below.items()}
    return root


def _without_chains(module: _Module) -> _Module:
    """Return the tree without modules that have no row and only one module below them."""
    module.below = {path: _without_chains(one) for path, one in module.below.items()}
    is_chain = not module.rows and len(module.below) == 1
    return next(iter(module.below.values())) if is_chain else module


def _segments(name: str) -> list[str]:
    r"""Return the module names in the path of a site: h and 0 for "h.0.encode():input[0]"."""
    found, position = [], 0
    while match := _SEGMENT.match(name, position):
        if name.startswith("(", match.end()):  # A method of the previous module.
            break
        found.append(match.group())
        if not name.startswith(".", match.end()):
            break
        position = match.end() + 1
    return found


def _flat(rows: int) -> _Module:
    root = _Module("")
    root.rows = list(range(rows))
    return root


def _open(root: _Module) -> None:
    """Open modules level by level, as long as the visible rows fit on a screen."""
    level, seen = [root], 0
    while level:
        seen += sum(len(module.rows) + len(module.below) for module in level)
        if seen > OPEN_ROWS and level[0] is not root:
            return
        for module in level:
            module.is_open = True
        level = [one for module in level for one in module.below.values()]


def _name(text: str) -> str:
    """Return a name as HTML, with the modules above it in a paler colour."""
    segments = _segments(text)
    above = ".".join(segments[:-1])
    if not above or not text.startswith(f"{above}."):
        return html.escape(text)
    return f"<i>{html.escape(above)}.</i>{html.escape(text[len(above) + 1 :])}"


def _svg(picture: Picture | None) -> str:
    """Draw a histogram. The height of a bin is the square root of its count; a line marks zero."""
    if picture is None or not any(picture.counts):
        return "<span></span>"
    most, bins = max(picture.counts), len(picture.counts)
    heights = [round(_HEIGHT * (counted / most) ** 0.5) or bool(counted) for counted in picture.counts]
    outline = "".join(f"V{_HEIGHT - height}h1" for height in heights)
    zero = ""
    if picture.low < 0 < picture.high:
        zero = f'<path class="z" d="M{-picture.low / (picture.high - picture.low) * bins:.2f} 0V{_HEIGHT}"/>'
    span = html.escape(f"from {picture.low:.4g} to {picture.high:.4g}")
    return (
        f'<svg viewBox="0 0 {bins} {_HEIGHT}" preserveAspectRatio="none" role="img" aria-label="{span}">'
        f'<title>{span}</title><path class="b" d="M0 {_HEIGHT}{outline}V{_HEIGHT}z"/>{zero}</svg>'
    )


def _is_right(column: int, name: int | None, rows: Sequence[Sequence[str]]) -> bool:
    return column != (name or 0) and bool(rows) and all(is_number(row[column]) for row in rows)


def _width(texts: Sequence[str]) -> int:
    return max(map(width, texts), default=0)
