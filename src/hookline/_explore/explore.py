"""`hl.explore`: write one HTML file for browsing the values of a model."""

from __future__ import annotations

import os
import webbrowser
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import quote

from torch import Tensor, nn

from hookline import Cache
from hookline._explore.page_data import FORMAT, contents, text_of
from hookline._explore.run_or_load import Loss, Run, captured, run_of, scanned
from hookline._kernel import bytes_of, describe, model_of, unwrap
from hookline._scan.scan import Scan
from hookline._store.store import Store
from hookline._tables import count
from hookline._torch import AnyDropout, AnyNorm
from hookline.errors import HooklineError, NotCaptured, StoreError

MARK = "/*HOOKLINE-DATA*/"
NAMES = ("first", "second")


@dataclass(frozen=True)
class Page(os.PathLike[str]):
    """A page on disk. It can be used as a path, and a notebook shows the page itself."""

    path: Path
    sites: int
    bytes: int

    def open(self) -> None:
        """Show the page in a browser."""
        webbrowser.open(self.path.resolve().as_uri())

    def __fspath__(self) -> str:
        return os.fspath(self.path)

    def __str__(self) -> str:
        return os.fspath(self.path)

    def __repr__(self) -> str:
        return f"Page({os.fspath(self.path)!r}, {count(self.sites, 'site')})"

    def _repr_html_(self) -> str:
        address = quote(os.path.relpath(self.path).replace(os.sep, "/"))
        frame = f'<iframe src="{address}" style="width: 100%; height: 640px; border: 1px solid #8884"></iframe>'
        size = f"{count(self.sites, 'site')}, {self.bytes / 1e6:.1f} MB"
        return f'<p><a href="{address}" target="_blank">{address}</a>, {size}</p>{frame}'


def explore(
    what: Any,
    *,
    to: str | os.PathLike[str] = "report.html",
    run: Any = None,
    against: Any = None,
    at: Any = None,
    loss: Loss | None = None,
    model: nn.Module | None = None,
    tokens: Sequence[str] | Sequence[Sequence[str]] | None = None,
    names: Sequence[str] | None = None,
    measured: Any = None,
    title: str | None = None,
    most: int | str = "8 MB",
) -> Page:
    """Write a page for browsing captured values: pictures, statistics, two runs side by side, gradients, warnings.

    `what` is a Cache, a Store, any mapping from site to value, the path of a capture file or of a store, or a model, as
    in `explore(model, run=(ids,))`. It may also be a method of a model or, with `model=`, any function that runs it. A
    page is one HTML file that needs no network. It replaces an existing page.

    Args:
        run: The arguments as a tuple, or keywords as a mapping. The model runs for real, and its state is restored.
        against: A second run, shown beside the first and as a difference. If `what` is a model: other arguments, a
            Cache, a Store, or the path of one. Otherwise anything that `what` may be.
        at: The places to capture in a model, by default every module's output; or the sites of a cache to show.
        loss: A function from the model's output to one number, whose gradients are shown too.
        model: With a cache, the model it was captured from: it adds types, parameters, and modules that were never
            called. With a function, the model that it runs.
        tokens: The tokens of each sample as text, for labels.
        names: The names of the runs.
        measured: A sweep, or {title: {site: number}}: a number measured with each place changed in turn; or a tensor,
            of which the page shows the mean.
        most: The most bytes the page may have; large values are thinned out, and the page says what it leaves out.
    """
    target, page = Path(to), template()
    refuse_to_replace(target)
    if title is not None and not isinstance(title, str):
        raise HooklineError(f"title= takes text, not {describe(title)}")
    called = _names(names, 1 if against is None else 2)
    scan: Scan | None = None
    if isinstance(what, nn.Module) or (callable(what) and not isinstance(what, type)):
        is_model = isinstance(what, nn.Module) and model is None
        model = model_of("explore", what, model)
        runs = _runs_of_model(model, run, against, at, loss, called, None if is_model else what)
        scan = scanned(model, run) if is_model else None
    else:
        _refuse_for_values(run, loss, model)
        runs = [run_of(_chosen(one, at), name) for one, name in zip((what, against), called, strict=False)]
        _refuse_another_model(model, runs)
    if len(runs) == 2 and runs[0].entries and not runs[1].entries:
        raise NotCaptured("against= has no values, so there is nothing to compare; run the model under the hooks first")
    title = title if title is not None else _title(what, model)
    given = {"model": model, "scan": scan, "tokens": _tokens(tokens), "measured": measured}
    notes = (
        ["the model ran in training mode: dropout is active, and batch norm uses the statistics of the batch"]
        if run is not None and _trains(model)
        else []
    )
    data = contents(runs, title=title, notes=notes, bytes=bytes_of(most, "most") - len(page.encode()), **given)
    if not data["sites"] and measured is None:
        raise NotCaptured("there is nothing to show: no site has a value; run the model under the hooks first")
    text = page.replace(MARK, text_of(data))
    _write(target, text)
    return Page(target, len(data["sites"]), len(text.encode()))


def template() -> str:
    """Return the page without its data."""
    try:
        return files("hookline._explore").joinpath("explorer.html").read_text(encoding="utf-8")
    except FileNotFoundError:
        raise HooklineError(
            "this hookline has no explorer.html: install it again, or build it with `make page`"
        ) from None


def refuse_to_replace(target: Path) -> None:
    """Raise before anything runs if the target exists and is not a page, or if its folder is missing."""
    if not target.parent.is_dir():
        raise StoreError(f"'{target}' can't be written: there is no folder '{target.parent}'; make it first")
    if not target.exists():
        return
    if not target.is_file() or f'"{FORMAT[0]}"'.encode() not in target.read_bytes():
        raise StoreError(f"'{target}' exists and is not a hookline page; remove it, or give another path as to=")


def _runs_of_model(
    model: nn.Module, run: Any, against: Any, at: Any, loss: Loss | None, names: list[str], call: Any
) -> list[Run]:
    """Return the first run, and the second if there is one: another run of the model, or an earlier capture."""
    if run is None:
        raise HooklineError(
            "a page of a model needs its arguments: explore(model, run=(ids,)), or a mapping of keywords"
        )
    runs = [run_of(captured(model, run, at, loss, call), names[0])]
    if isinstance(against, (Cache, Store, str, os.PathLike)):
        runs.append(run_of(against, names[1]))
    elif isinstance(against, nn.Module):
        raise HooklineError(
            "against= takes arguments for this model, or a cache; for another model, give a cache of its values: "
            "hl.run(other, *args, capture='**')[1]"
        )
    elif against is not None:
        runs.append(run_of(captured(model, against, at, loss, call), names[1]))
    return runs


def _refuse_for_values(run: Any, loss: Any, model: Any) -> None:
    for name, given in (("run", run), ("loss", loss)):
        if given is not None:
            raise HooklineError(f"{name}= is for a page of a model; captured values are from a run that is over")
    if model is not None and not isinstance(model, nn.Module):
        raise HooklineError(f"model= takes the model that the values come from, not {describe(model)}")


def _refuse_another_model(model: nn.Module | None, runs: Sequence[Run]) -> None:
    """Raise if a model has none of the modules that the values come from."""
    if model is None:
        return
    inside = unwrap(model)
    names = {name for name, _ in (*inside.named_modules(remove_duplicate=False), *inside.named_parameters())}
    sites = [site for run in runs for site in run.entries if site.port != "param" or site.path in names]
    if sites and names.isdisjoint(site.path for site in sites):
        raise HooklineError(
            f"model= is a {type(inside).__name__}, which has no '{sites[0]}': give the model that the values come from"
        )


def _chosen(what: Any, at: Any) -> Any:
    """Return a cache with only the sites in `at`."""
    if at is None:
        return what
    if isinstance(what, (str, os.PathLike)) and not os.path.isdir(what):
        what = Cache.load(what)
    if not isinstance(what, Cache):
        raise HooklineError(f"at= chooses the places of a model or of a cache, not of {describe(what)}")
    if at in ([], ()):
        raise HooklineError("at=[] chooses nothing; without at= every place is shown")
    return what.select(*(at if isinstance(at, (list, tuple)) else (at,)))


def _trains(what: Any) -> bool:
    """Return True if a model has dropout or a norm layer in training mode."""
    modules = what.modules() if isinstance(what, nn.Module) else ()
    return any(module.training for module in modules if isinstance(module, (AnyDropout, AnyNorm)))


def _names(names: Sequence[str] | None, wanted: int) -> list[str]:
    """Return the names of the runs."""
    if names is None:
        return list(NAMES) if wanted == 2 else ["run"]
    if isinstance(names, Mapping):
        raise HooklineError(f"names= takes a list of names for the runs, not {describe(names)}")
    found = [names] if isinstance(names, str) else list(map(str, names))
    if len(found) != wanted:
        raise HooklineError(f"names= has {count(len(found), 'name')} for {count(wanted, 'run')}")
    return found


def _tokens(tokens: Any) -> list[list[str]] | None:
    """Return the tokens of each sample."""
    if tokens is None:
        return None
    if isinstance(tokens, (Tensor, str, Mapping)):
        raise HooklineError("tokens= takes text: [tokenizer.convert_ids_to_tokens(one) for one in ids]")
    samples = [tokens] if all(isinstance(one, str) for one in tokens) else tokens
    return [[str(token) for token in sample] for sample in samples]


def _title(what: Any, model: nn.Module | None) -> str:
    if isinstance(what, (str, os.PathLike)):
        return Path(what).name
    return "What passed" if model is None else type(model).__name__


def _write(target: Path, text: str) -> None:
    """Write a file whole or not at all."""
    temporary = target.with_name(f".{os.urandom(8).hex()}.hookline-temporary")
    try:
        try:
            temporary.write_text(text, encoding="utf-8")
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        remedy = "see that its folder exists, may be written to and has room"
        raise StoreError(f"'{target}' was not written: {error.strerror or error}; {remedy}") from error
