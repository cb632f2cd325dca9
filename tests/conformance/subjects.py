"""The results of hookline's functions: how to make a small one of each, and what each offers.

A new type of result joins every test of this folder by one entry in `SUBJECTS`.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookline as hl
from hookline._stats import Stats

LONG = "encoder.activation_between_both_of_the_layers"
NAMES = ("<b>", LONG, "head")
STRANGE = (3.5, None, (1, 2), object())  # What nothing is read by.
X = torch.linspace(-1, 1, 12).reshape(3, 4)

# What a result may offer. `offers` in offers.py finds out whether it does.
FRAME = "to_frame"
NAMES_EXTRA = "without pandas, to_frame names the extra to install"
PLOT = "plot"
SAVE = "save and load"
REFUSES_LOAD = "load refuses to be called on a result"
COPIES = "a copy or a pickle is equal, or prints the same"
EQUALITY = "results of the same content are equal, and others are not"
NO_MAPPING = "a plain dict or list of the same content is not equal"
BY_NAME = "an entry is read by its name"
SPELLINGS = "an entry is read by a Site, and by any spelling of it"
ODD_KEYS = "a key of the wrong kind is refused in words"
STRANGERS = "anything may be looked for with `in`"
FEATURES = (FRAME, NAMES_EXTRA, PLOT, SAVE, REFUSES_LOAD, COPIES, EQUALITY, NO_MAPPING)
FEATURES += (BY_NAME, SPELLINGS, ODD_KEYS, STRANGERS)
# What only a result can offer that offers another feature.
NEEDS = {NAMES_EXTRA: FRAME, REFUSES_LOAD: SAVE, SPELLINGS: BY_NAME, ODD_KEYS: BY_NAME}


class Net(nn.Module):
    """A model with a name that is HTML, and one that is wider than a narrow terminal."""

    def __init__(self) -> None:
        super().__init__()
        self.add_module("<b>", nn.Linear(4, 8))
        self.encoder = nn.ModuleDict({LONG.partition(".")[2]: nn.ReLU()})
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        for name in NAMES:
            x = self.get_submodule(name)(x)
        return x


def net() -> Net:
    torch.default_generator.manual_seed(0)
    return Net().eval()


@dataclass(frozen=True)
class Subject:
    """A type of result.

    Args:
        make: Returns a small result, given an empty folder and the number of a variant: 0, or 1 for other content.
        kind: The class of the result.
        header: The header of its table.
        names: What its entries are called, in the order in which it yields them.
        name_of: The name of what it yields.
        error: What is raised if nothing has the name that is asked for.
        columns: The columns of its frame.
        parts: Attributes that do not print, and that copies and files have too.
        lacks: What it does not offer and why, of `FEATURES`. Remove an entry when the result has learned it.
        close: What ends the result after a test; without it, all tests share one.
    """

    label: str
    make: Callable[[Path, int], Any]
    kind: type
    header: tuple[str, ...]
    names: tuple[str, ...] = NAMES
    name_of: Callable[[Any], str] = str
    error: type[hl.HooklineError] = hl.NotCaptured
    columns: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    lacks: dict[str, str] = field(default_factory=dict)
    close: Callable[[Any], None] | None = None

    def __str__(self) -> str:
        return self.label

    def why_not(self, feature: str) -> str:
        """Return why the result does not offer a feature; "" if it does."""
        return self.lacks.get(feature) or (self.why_not(NEEDS[feature]) if feature in NEEDS else "")

    @contextmanager
    def example(self, folder: Path, variant: int = 0) -> Iterator[Any]:
        """Yield the result that all tests share, or one of their own if it has to be closed."""
        if self.close is None:
            yield _shared(self.label, folder, variant)
            return
        result = self.again(folder, variant)
        try:
            yield result
        finally:
            self.close(result)

    def again(self, folder: Path, variant: int = 0) -> Any:
        """Make a result anew."""
        return self.make(_new(folder), variant)


@functools.cache
def _shared(label: str, folder: Path, variant: int) -> Any:
    return next(subject for subject in SUBJECTS if subject.label == label).again(folder, variant)


def _new(folder: Path) -> Path:
    """Return a new folder in a folder."""
    made = folder / str(len(list(folder.iterdir())))
    made.mkdir()
    return made


def each(*features: str, of: type = object) -> pytest.MarkDecorator:
    """Run a test for each subject of a kind, such as `Mapping`, that offers all of these features."""
    chosen = [one for one in SUBJECTS if issubclass(one.kind, of) and not any(map(one.why_not, features))]
    return pytest.mark.parametrize("subject", chosen, ids=str)


def cache(_folder: Path, variant: int) -> hl.Cache:
    return hl.run(net(), X + variant, capture=list(NAMES))[1]


def store(folder: Path, variant: int) -> hl.Store:
    return hl.harvest(net(), [X + variant, X], *NAMES, to=folder / "store")


def sweep(_folder: Path, variant: int) -> hl.Sweep:
    return hl.sweep(net(), list(NAMES), lambda output: output.sum(), run=(X + variant,))


def sweep_of_pairs(_folder: Path, variant: int) -> hl.Sweep:
    return hl.sweep(net(), list(NAMES), lambda output: output.sum(1), run=(X + variant,))


def comparison(_folder: Path, variant: int) -> hl.Comparison:
    a = net()
    b = copy.deepcopy(a)
    b.head.weight.data += 0.5 + variant
    return hl.compare(a, b, run=(X,))


# The classes of results that have no public name.
Scan, Sites, Attached = (type(one) for one in (hl.scan(nn.ReLU(), X), hl.sites(nn.ReLU()), hl.attached(nn.ReLU())))


def scan(_folder: Path, variant: int) -> Any:
    return hl.scan(net(), X[: 3 - variant])


def sites(_folder: Path, variant: int) -> Any:
    return hl.sites(net(), *NAMES[variant:])


def hooks(_folder: Path, variant: int) -> hl.Hooks:
    made = hl.Hooks(net())
    for name in NAMES[variant:]:
        made.edit(name, torch.relu, name=name)
    return made


def stats(folder: Path, variant: int) -> Stats:
    return cache(folder, variant).stats()


def attached(folder: Path, variant: int) -> Any:
    made = hooks(folder, variant)
    found = hl.attached(made.model)
    made.remove()
    return found


APART = ("largest", "mean", "relative", "cosine", "sqnr", "exact")
NOT_A_TABLE_OF_VALUES = "it lists what a model has, and there is nothing to draw"
BY_IDENTITY = "two of the same content are not equal: it has no __eq__, and the one of Sequence compares identity"
OF_A_MAPPING = "its == is that of Mapping, which compares the entries with those of any other mapping"

SUBJECTS = [
    Subject(
        "Cache",
        cache,
        hl.Cache,
        ("site", "calls", "dtype", "shape"),
        lacks={FRAME: "its values are tensors of any shape; stats() has numbers"},
    ),
    Subject(
        "Store",
        store,
        hl.Store,
        ("site", "dtype", "shape", "rows", "bytes"),
        parts=("samples", "skipped", "spec", "nbytes"),
        lacks={
            FRAME: "to_parquet writes the rows, which may not fit into memory",
            SAVE: "it is on disk already: harvest(to=path) writes it, and Store(path) reads it",
        },
    ),
    Subject(
        "Sweep",
        sweep,
        hl.Sweep,
        ("site", "measured", "change", ""),
        parts=("base", "notes"),
        columns=("site", "module", "measured", "change"),
        lacks={
            REFUSES_LOAD: "found.load(path) returns another sweep, and leaves `found` as it is without a word",
            EQUALITY: f"{OF_A_MAPPING}, and not the bases",
            NO_MAPPING: OF_A_MAPPING,
        },
    ),
    Subject(
        "Sweep of pairs",
        sweep_of_pairs,
        hl.Sweep,
        ("site", "measured", "change", "spread", ""),
        parts=("base", "notes"),
        columns=("site", "module", "measured", "change", "spread"),
        lacks={
            REFUSES_LOAD: "as of any sweep",
            EQUALITY: "the == of Mapping asks whether a tensor of several numbers is true, which raises",
            NO_MAPPING: "the same",
        },
    ),
    Subject(
        "Comparison",
        comparison,
        hl.Comparison,
        ("site", "module", "seen", "local", ""),
        parts=("verdict", "ok", "notes"),
        names=("", *NAMES),
        columns=(
            *("site", "other", "kind", "off", "made_good", "note"),
            *(f"{kind}_{error}" for kind in ("seen", "local") for error in APART),
            *("rounding_largest", "rounding_relative"),
        ),
        lacks={
            NAMES_EXTRA: "it says: pip install pandas",
            SAVE: "it has no save; a pickle holds all of it",
            EQUALITY: "the == of ComparedPlace asks whether the tensors of both outputs are true, which raises",
            NO_MAPPING: OF_A_MAPPING,
            SPELLINGS: "it compares the text of a site with the names of modules, so 'head:output' is not found",
        },
    ),
    Subject(
        "scan",
        scan,
        Scan,
        ("site", "module", "calls", "dtype", "shape", "parameters", "hazards"),
        names=("", *NAMES),
        name_of=lambda row: row.site,
        parts=("rows", "note"),
        error=hl.SiteError,
        lacks={
            FRAME: "it has no to_frame, though pandas.DataFrame(list(scan)) makes one",
            PLOT: NOT_A_TABLE_OF_VALUES,
            SAVE: "it has no save",
            EQUALITY: BY_IDENTITY,
            ODD_KEYS: "scan[3.5] raises the TypeError of a list",
        },
    ),
    Subject(
        "sites",
        sites,
        Sites,
        ("site", "module", "parameters", "also named"),
        lacks={
            FRAME: "it has no to_frame",
            PLOT: NOT_A_TABLE_OF_VALUES,
            SAVE: "it has no save",
            EQUALITY: BY_IDENTITY,
            BY_NAME: "sites['head'] raises the TypeError of a list, though 'head' in sites is True",
        },
    ),
    Subject(
        "Hooks",
        hooks,
        hl.Hooks,
        ("name", "kind", "site", "action", "active"),
        name_of=lambda hook: str(hook.site),
        error=hl.SiteError,
        close=hl.Hooks.remove,
        lacks={
            FRAME: "it holds hooks, no values",
            PLOT: "it holds hooks, no values",
            SAVE: "hooks belong to a model",
            COPIES: "a copy has none of its hooks, and says so in a warning",
            EQUALITY: "two sets of hooks are equal only if they are one: each acts by itself",
            SPELLINGS: "hooks are read by the name that they were given; at() takes sites",
        },
    ),
    Subject(
        "stats",
        stats,
        Stats,
        ("site", "mean", "std", "min", "max", "norm", "zeros", "nan", "inf"),
        lacks={
            FRAME: "it has no to_frame",
            PLOT: "it has no plot; that of the cache draws statistics",
            SAVE: "it has no save",
            NO_MAPPING: OF_A_MAPPING,
            SPELLINGS: "it knows the text of its sites only; a Site raises the TypeError of difflib",
            ODD_KEYS: "stats[3.5] raises the TypeError of difflib",
            STRANGERS: "3.5 in stats raises the same",
        },
    ),
    Subject(
        "attached",
        attached,
        Attached,
        ("site", "kind", "owner", "action"),
        name_of=lambda attachment: attachment.site,
        lacks={
            FRAME: "it has no to_frame",
            PLOT: NOT_A_TABLE_OF_VALUES,
            SAVE: "it has no save",
            EQUALITY: BY_IDENTITY,
            BY_NAME: "attached(model)['head'] raises the TypeError of a list",
        },
    ),
]

# Tables that are no subjects: parts of a result, or a list of checks instead of places.
PARTS = {
    "Matching": "report.matching: pairs of names",
    "SweepGrid": "sweep.grid(): a tensor and its labels",
    "Report": "hl.check(): a verdict with a row for each check",
}
