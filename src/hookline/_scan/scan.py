"""`hl.scan`: what each module of a model would do with an input, and its hazards, without computing anything."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, overload

from torch import Tensor, nn

from hookline import Site
from hookline._kernel import (
    Call,
    Found,
    Names,
    Observer,
    is_container,
    is_scripted,
    leaves,
    parameter_count,
    unwrap,
    why_not_called,
)
from hookline._scan.fake_run import Places, try_out
from hookline._tables import Table, Tabular
from hookline._torch import known_version
from hookline.errors import HooklineError, SiteError, did_you_mean


class Row(NamedTuple):
    """What one module would do."""

    site: str
    module: str
    calls: int
    dtype: str
    shape: str
    parameters: int
    hazards: str


class Scan(Tabular, Sequence[Row]):
    """What each module of a model would do, in the order in which they are called; prints as a table."""

    def __init__(self, rows: list[Row], note: str) -> None:
        self.rows = rows
        self.note = note

    @overload
    def __getitem__(self, index: int | str | Site) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice | str | Site) -> Row | list[Row]:
        if isinstance(index, (str, Site)):
            name = str(Site.parse(index)) if isinstance(index, str) else str(index)
            found = next((row for row in self.rows if row.site == name), None)
            if found is None:
                near = did_you_mean(name, (row.site for row in self.rows))
                raise SiteError(f"{name!r} is not in this scan, which has outputs of modules{near}")
            return found
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    def __contains__(self, item: object) -> bool:
        if isinstance(item, (str, Site)):
            return str(Site.parse(item) if isinstance(item, str) else item) in [row.site for row in self.rows]
        return item in self.rows

    def _table(self) -> Table:
        rows = [(row.site or '""', *row[1:5], f"{row.parameters:,}", row.hazards) for row in self.rows]
        return Table(Row._fields, rows, self.note, spare=("dtype", "parameters", "shape", "module"))


class ScanObserver(Observer):
    """Notes each output and the versions of its tensors, so that later writes are noticed."""

    kind = "scan"

    def __init__(self) -> None:
        self.began: dict[Site, int] = {}
        self.calls: dict[str, int] = {}
        self.latest: dict[str, list[Tensor]] = {}
        self.seen: dict[str, list[tuple[Tensor, int]]] = {}

    def __call__(self, value: Any, call: Call, _is_whole: bool, /) -> Any:
        """Record the start of a call (at its inputs) or its result (at its output)."""
        path = call.site.path
        if call.site.port == "inputs":
            self.began.setdefault(call.site._replace(port="output"), len(self.began))
            return value
        self.calls[path] = self.calls.get(path, 0) + 1
        self.latest[path] = leaves(value)
        versions = [(tensor, known_version(tensor)) for tensor in leaves(value)]
        self.seen.setdefault(path, []).extend(versions)
        return value


def scan(model: nn.Module, *args: Any, **kwargs: Any) -> Scan:
    """Show what every module of a model would do with this input: calls, shapes, dtypes, parameters and hazards.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 2))
    >>> scan(model, Tensor(3, 4))
    on fake tensors: nothing was computed
    site  module      calls  dtype    shape   parameters  hazards
    ────  ──────────  ─────  ───────  ──────  ──────────  ──────────────────────────
    ""    Sequential      1  float32  (3, 2)          58
    0     Linear          1  float32  (3, 8)          40  overwritten in place later
    1     ReLU            1  float32  (3, 8)           0
    2     Linear          1  float32  (3, 2)          18
    """
    if not isinstance(model, nn.Module):
        raise HooklineError(f"scan takes a model and its input, not {type(model).__name__}")
    bare = unwrap(model)

    def make_observers() -> tuple[Places, Callable[[], list[Row]]]:
        observer = ScanObserver()
        return _places(bare, observer), lambda: _rows(bare, observer)

    return Scan(*try_out(bare, args, kwargs, make_observers))


def _places(model: nn.Module, observer: ScanObserver) -> Places:
    """Return the places to observe: the inputs and the output of every module."""
    modules = [(name, one) for name, one in Names(model).once() if not (is_scripted(one) or is_container(one))]
    places = [Found(Site(name, port), module) for name, module in modules for port in ("inputs", "output")]
    return [(place, observer) for place in places]


def _rows(model: nn.Module, observer: ScanObserver) -> list[Row]:
    rows = []
    for name, module in Names(model).once():
        if not is_scripted(module) and is_container(module):
            continue
        tensors = observer.latest.get(name, [])
        rows.append(
            Row(
                str(Site(name)),
                type(module).__name__,
                observer.calls.get(name, 0),
                ", ".join(dict.fromkeys(str(tensor.dtype).removeprefix("torch.") for tensor in tensors)),
                ", ".join(str(tuple(tensor.shape)) for tensor in tensors[:4]) + (", …" if len(tensors) > 4 else ""),
                parameter_count(module),
                "; ".join(_hazards(name, module, model, observer)),
            )
        )
    order = {str(site): position for site, position in observer.began.items()}
    return sorted(rows, key=lambda row: order.get(row.site, len(order)))


def _hazards(name: str, module: nn.Module, model: nn.Module, observer: ScanObserver) -> Iterator[str]:
    calls = observer.calls.get(name, 0)
    if not calls:
        yield "never called" + why_not_called(name, module, model)
    if calls > 1:
        yield "called several times: keep='all' or '#n'"
    if any(version >= 0 and known_version(tensor) != version for tensor, version in observer.seen.get(name, [])):
        yield "overwritten in place later"
