"""`hookline explore`."""

from __future__ import annotations

import json
import sys
import webbrowser
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import hookline
from hookline._cli import main as cli
from tests.support.command_line import refused, said, told
from tests.support.real_models import gpt2, of


def data_of(page: str) -> Any:
    """Return the data of a page."""
    text = Path(page).read_text(encoding="utf-8")
    return json.loads(text.partition('id="hookline-data">')[2].partition("</script>")[0])


@pytest.fixture
def browser(monkeypatch):
    """A stand-in for the browser: the list of addresses that it was told to open."""
    asked: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda address: asked.append(address) or True)
    return asked


def test_a_cache_becomes_a_page_named_as_it_is(folder, browser):
    assert said("explore", "acts.safetensors") == "acts.html\n"
    assert [one["name"] for one in data_of("acts.html")["sites"]] == ["transformer.h.0", "transformer.h.1"]
    assert browser == []


def test_two_caches_and_the_model_beside_them(folder, browser):
    asked = ("explore", "acts.safetensors", "--against", "other.safetensors", "--model", "gpt2", "--to", "both.html")
    assert told(*asked) == {"page": "both.html", "opened": False}
    page = data_of("both.html")
    assert [run["name"] for run in page["runs"]] == ["acts", "other"]
    assert {one["path"]: one["type"] for one in page["modules"]}["transformer.h.1"] == "GPT2Block"
    assert page["modules"][0]["parameters"] == sum(one.numel() for one in of(gpt2).parameters())
    assert page["sites"][1]["stats"][0]["norm"] == pytest.approx(
        hookline.Cache.load("acts.safetensors").stats()["transformer.h.1"].norm
    )


def test_a_store_becomes_a_page(folder, browser):
    said("harvest", "gpt2", "--data", "texts.txt", "--at", "transformer.h.*", "--to", "store")
    assert said("explore", "store/", "--title", "All of it") == "store.html\n"
    assert data_of("store.html")["title"] == "All of it"


def test_a_model_is_run_once_or_twice_with_gradients(folder, browser):
    asked = ("explore", "gpt2", "--text", "the cat sat", "--against-text", "the dog sat", "--loss", "lm")
    assert said(*asked) == "report.html\n"
    page = data_of("report.html")
    assert [run["name"] for run in page["runs"]] == ["the cat sat", "the dog sat"]
    assert {"transformer.h.1", "transformer.h.1:grad_output"} < {one["name"] for one in page["sites"]}
    assert page["tokens"] == [["the", "cat", "sat"]]
    said("explore", "mine:net", "--input", "batch.npy", "--to", "net.html", "--at", "blocks.*")
    assert [one["name"] for one in data_of("net.html")["sites"]] == ["blocks.0", "blocks.1"]


SAME = "the cat sat on the mat and looked at the "


@pytest.mark.parametrize(
    ("one", "other", "names"),
    [
        ("cat " * 12, "dog", ["cat cat cat cat cat cat cat cat…", "dog"]),
        (SAME + "moon", SAME + "mouse", ["… moon", "… mouse"]),
        (SAME + "moon", SAME + "moon and the stars", ["… moon", "… moon and the stars"]),
        (SAME + "moon", SAME + "moon", ["the cat sat on the mat and look…"] * 2),
    ],
    ids=range(4),
)
def test_long_texts_are_cut_to_names_that_tell_the_runs_apart(folder, browser, one, other, names):
    said("explore", "gpt2", "--text", one, "--against-text", other, "--at", "transformer.h.0")
    assert [run["name"] for run in data_of("report.html")["runs"]] == names


def test_a_file_that_is_no_page_is_not_overwritten(folder, browser):
    Path("letter.html").write_text("dear reader")
    assert "letter.html" in refused("explore", "acts.safetensors", "--to", "letter.html")
    assert Path("letter.html").read_text() == "dear reader"


def test_a_page_is_opened_and_nothing_else_done(folder, browser):
    Path("some.html").write_text("<html>")
    assert told("explore", "some.html", "--open") == {"page": "some.html", "opened": True}
    assert browser == [Path("some.html").absolute().as_uri()]
    assert told("explore", "some.html")["opened"] is False
    assert refused("explore", "none.html") == "'none.html' is not a file"


@pytest.mark.parametrize(
    ("environment", "terminal", "watched"),
    [
        ({"DISPLAY": ":0"}, True, True),
        ({"WAYLAND_DISPLAY": "wayland-0"}, True, True),
        ({}, True, False),
        ({"DISPLAY": ":0"}, False, False),
        ({"DISPLAY": ":0", "CI": "true"}, True, False),
    ],
)
def test_a_browser_is_opened_only_where_somebody_sits_at_a_screen(
    folder, browser, environment, terminal, watched, monkeypatch
):
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "CI"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "platform", "linux")
    for stream in (sys.stdin, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: terminal, raising=False)
    Path("some.html").write_text("<html>")
    for more in ((), ("--no-open",), ("--json",)):
        monkeypatch.setattr(sys, "argv", ["hookline", "explore", "some.html", *more])
        with suppress(SystemExit):
            cli.main()
    assert len(browser) == watched


def test_a_browser_that_was_asked_for_and_is_not_there_is_an_error(folder, monkeypatch):
    Path("some.html").write_text("<html>")
    monkeypatch.setattr(webbrowser, "open", lambda address: False)
    assert refused("explore", "some.html", "--open") == "no browser was found; open 'some.html' in one"


def test_what_can_not_be_explored_is_refused_in_one_line(folder):
    assert refused("explore", "none.safetensors") == "'none.safetensors' is not a file or folder"
    assert refused("explore", "mine:net").startswith("'mine:net' is a model: give its input with --input")
    assert refused("explore", "gpt2").startswith("'gpt2' is a model: give its input")
    assert refused("explore", "acts.safetensors", "--text", "a").startswith(
        "'acts.safetensors' is not a model: --input,"
    )


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        (
            ("acts.safetensors", "--dtype", "float16"),
            "--dtype is for running a model",
        ),
        (("acts.safetensors", "--samples", "1"), "--samples is for running a model"),
        (("gpt2", "--text", "the cat", "--model", "gpt2"), "'gpt2' is a model itself; leave --model out"),
        (("page.html", "--to", "y.html"), "'page.html' is a page, which is opened as it is; leave --to out"),
    ],
)
def test_options_that_would_do_nothing_are_refused(folder, asked, problem):
    said("explore", "acts.safetensors", "--to", "page.html")
    assert refused("explore", *asked).endswith(problem)


def test_what_is_not_there_is_not_taken_for_a_model(folder, tmp_path):
    (tmp_path / "nothing").mkdir()
    assert "holds neither a store nor a model" in refused("explore", str(tmp_path / "nothing"), "--no-open")
    assert "there is no folder 'missing/'" in refused("explore", "missing/", "--no-open")
    assert "'missing' is not a file or folder" in refused("explore", "missing", "--no-open")
    assert "FILE is empty" in refused("explore", "", "--no-open")


def test_an_empty_page_is_not_opened(folder, tmp_path):
    page = tmp_path / "other.html"
    page.touch()
    assert "is empty" in refused("explore", str(page), "--no-open")


def test_a_second_run_without_values_is_not_compared_in_silence(folder, tmp_path):
    hookline.Cache({}).save(tmp_path / "none.safetensors")
    assert "--against has no values" in refused(
        "explore", "acts.safetensors", "--against", str(tmp_path / "none.safetensors"), "--no-open"
    )
