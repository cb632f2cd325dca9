"""`hookline explore`: write the values of a model as one page for the browser."""

from __future__ import annotations

import os
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hookline as hl
from hookline._cli.inputs import InputRequest, add_labels, model_input
from hookline._cli.loss import loss_of
from hookline._cli.models import ModelOptions, UserModel, is_function, model_of
from hookline._cli.output import say, say_json, working
from hookline._cli.show_command import names_store
from hookline.errors import HooklineError

_PAGES = (".html", ".htm")
_LONGEST_NAME = 32


def run_explore(
    wanted: InputRequest,
    second: InputRequest,
    model_options: ModelOptions,
    *,
    to: Path | None,
    model: str | None,
    at: Sequence[str] | None,
    loss: str | None,
    title: str | None,
    is_opened: bool | None,
    json: bool,
) -> None:
    """Write the page of a file, a store or a model, or take a page that is there, and open it in the browser."""
    file, against = wanted.model, second.input
    options: dict[str, Any] = {"at": at or None, "title": title}
    with working():
        if Path(file).suffix.lower() in _PAGES:
            page = _there(file)
            also = {"--to": to, "--against": against, "--model": model, "--at": at, "--title": title}
            for option in (name for name, value in also.items() if value is not None):
                raise HooklineError(f"{file!r} is a page, which is opened as it is; leave {option} out")
        elif is_model(file):
            if model is not None:
                raise HooklineError(f"{file!r} is a model itself; leave --model out")
            page = run_page(wanted, second, model_options, loss, to or Path("report.html"), options)
        else:
            _refuse_runs(file, wanted, second, loss)
            if model is None:
                _refuse_idle(file, {"--attention": model_options.attention, "--dtype": model_options.dtype,
                                    "--device": model_options.device})  # fmt: skip
            _refuse_idle(file, {"--processor": wanted.processor, "--column": wanted.column, "--samples": wanted.samples,
                                "--max-length": wanted.max_length})  # fmt: skip
            page = file_page(file, against, model, model_options, to or Path(f"{_stem(file)}.html"), options)
        opened = open_in_browser(page, False if json and is_opened is None else is_opened)
    if json:
        say_json({"page": str(page), "opened": opened})
    else:
        say(page)


def is_model(file: str) -> bool:
    """Return True if `file` names a model, and not a file or a store of captured values."""
    if is_function(file):
        return True
    path = Path(file)
    if path.is_dir():
        return not names_store(file)
    return path.suffix == ".json" or not (path.exists() or path.suffix or "://" in file)


def run_page(
    wanted: InputRequest,
    second: InputRequest,
    model_options: ModelOptions,
    loss: str | None,
    to: Path,
    options: dict[str, Any],
) -> Path:
    """Run a model once or twice, and write the page."""
    if not wanted:
        raise HooklineError(_what_is_missing(wanted.model))
    net = model_of(wanted.model, model_options)()
    first = add_labels(model_input(wanted, net), loss)
    other = add_labels(model_input(second, net), loss) if second else None
    backward = loss_of(loss, options["at"] or ())
    return Path(
        hl.explore(
            net,
            to=to,
            run=first.run,
            against=None if other is None else other.run,
            loss=backward,
            tokens=first.tokens,
            names=None if other is None else short_names(wanted.name, second.name),
            **options,
        )
    )


def _what_is_missing(file: str) -> str:
    """Say that a model needs an input, or that there is no such model."""
    remedy, path = "give its input with --input, --text or --shape", Path(file)
    if not file:
        return "FILE is empty; give a file of `capture`, a folder of `harvest`, or a model"
    if is_function(file) or (path / "config.json").exists() or path.is_file():
        return f"{file!r} is a model: {remedy}"
    if path.is_dir():
        return f"{file!r} is a folder that holds neither a store nor a model"
    if file.endswith("/"):
        return f"there is no folder {file!r}"
    return f"{file!r} is not a file or folder; if it is the name of a model elsewhere, {remedy}"


def short_names(*names: str) -> list[str]:
    """Return names for the runs of a page. Long texts are cut, so that they begin at the word where they differ.

    >>> short_names("the cat sat", "the dog sat")
    ['the cat sat', 'the dog sat']
    >>> short_names("when Mary and John went to the store, John", "when Mary and John went to the store, Mary")
    ['… John', '… Mary']
    """
    cut = [_cut(name) for name in names]
    if len(set(cut)) < len(set(names)):
        differ = (at for at, letters in enumerate(zip(*names, strict=False)) if len(set(letters)) > 1)
        begin = names[0].rfind(" ", 0, next(differ, min(map(len, names))))  # Start of the word that differs.
        cut = [_cut(f"…{name[max(0, begin) :]}") for name in names]
    return cut


def _cut(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1].rstrip()}…"


def file_page(
    file: str, against: str | None, model: str | None, model_options: ModelOptions, to: Path, options: dict[str, Any]
) -> Path:
    """Write the page of a file or a store."""
    if not (Path(file).exists() or "://" in file):
        raise HooklineError(f"{file!r} is not a file or folder")
    net = None
    if model is not None:
        maker = model_of(model, model_options)
        net = maker() if isinstance(maker, UserModel) else maker.empty()
    names = None if against is None else [_stem(file), _stem(against)]
    return Path(hl.explore(file, to=to, against=against, model=net, names=names, **options))


def open_in_browser(page: Path, wanted: bool | None) -> bool:
    """Open a page in the browser if `wanted`, or if it is None and somebody is there to look. Return True if opened."""
    if wanted is False or (wanted is None and not is_watched()):
        return False
    opened = webbrowser.open(page.absolute().as_uri())
    if wanted and not opened:
        raise HooklineError(f"no browser was found; open {str(page)!r} in one")
    return opened


def is_watched() -> bool:
    """Return True if somebody is probably at this machine: there is a terminal and a screen."""
    has_screen = sys.platform in ("darwin", "win32") or any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY")))
    return has_screen and sys.stdin.isatty() and sys.stderr.isatty() and not os.environ.get("CI")


def _refuse_runs(file: str, wanted: InputRequest, second: InputRequest, loss: str | None) -> None:
    """Raise for options that only a model takes."""
    if wanted or second.text or loss:
        raise HooklineError(f"{file!r} is not a model: --input, --text, --shape and --loss are for running a model")


def _refuse_idle(file: str, options: dict[str, Any]) -> None:
    """Raise for options that say how a model runs, if no model runs."""
    for option in (name for name, value in options.items() if value is not None):
        raise HooklineError(f"{file!r} is not a model: {option} is for running a model")


def _there(file: str) -> Path:
    if not Path(file).is_file():
        raise HooklineError(f"{file!r} is not a file")
    if not Path(file).stat().st_size:
        raise HooklineError(f"{file!r} is empty; give a page that `hookline explore` wrote")
    return Path(file)


def _stem(file: str) -> str:
    return Path(file.rstrip("/").rpartition("/")[2]).stem
