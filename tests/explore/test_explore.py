"""`hl.explore`: the page that it writes, the arguments that it refuses, and the size of a page."""

from __future__ import annotations

import os
import re
import time
import webbrowser

import pytest
import torch
from torch import nn

import hookline as hl
from tests.errors.wording import says
from tests.support.explorer_pages import data_of, loss, site_of


def test_a_model_is_not_run_for_a_page_that_can_not_be_written(model, ids, tmp_path):
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    with pytest.raises(hl.StoreError, match=says("there is no folder nowhere'")):
        hl.explore(model, run=(ids,), to=tmp_path / "nowhere" / "report.html")
    assert calls == []


def test_where_nothing_passed_there_is_no_page(path):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with (
        pytest.warns(hl.HooklineWarning, match=says("did not fire")),
        pytest.raises(hl.NeverFired, match=says("nothing passed at any place", "*/softmax")),
    ):
        hl.explore(model, run=(torch.ones(1, 2),), at="*/softmax", to=path)
    assert not path.exists()


def test_a_page_is_a_path_and_shows_itself_in_a_notebook(path, monkeypatch):
    page = hl.explore({"h.0": torch.ones(2, 2)}, to=path)
    assert os.fspath(page) == str(page) == str(path)
    assert page.path == path
    assert re.fullmatch(r"Page\('.*report.html', 1 site\)", repr(page))
    assert "<iframe src=" in page._repr_html_()
    odd = hl.explore({"h.0": torch.ones(2, 2)}, to=path.with_name('<b>"#1.html'))
    assert "%3Cb%3E%22%231.html" in odd._repr_html_()
    opened = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    page.open()
    assert opened == [path.resolve().as_uri()]


def test_a_page_is_replaced_but_nothing_else_is(path, tmp_path):
    hl.explore({"a": torch.ones(2)}, to=path)
    hl.explore({"b": torch.ones(2)}, to=path)
    assert data_of(path)["sites"][0]["name"] == "b"
    path.write_text("my thesis")
    with pytest.raises(hl.StoreError, match=says("exists and is not a")):
        hl.explore({"a": torch.ones(2)}, to=path)
    assert path.read_text() == "my thesis"
    with pytest.raises(hl.StoreError, match=says("there is no folder")):
        hl.explore({"a": torch.ones(2)}, to=tmp_path / "no" / "page.html")
    assert sorted(os.listdir(tmp_path)) == ["report.html"]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"what": 3}, "not 3"),
        ({"what": nn.Linear(2, 2)}, says("needs its arguments")),
        ({"what": {}, "run": (1,)}, says("run= is for a page")),
        ({"what": {}, "loss": loss}, says("loss= is for a page")),
        ({"what": {}, "names": ["a", "b"]}, says("names= has names for run", 2, 1)),
        ({"what": {}, "model": 3}, says("model= takes the model that", 3)),
        (
            {"what": {"a": torch.ones(2)}, "at": "a"},
            says("at= chooses the places of"),
        ),
        ({"what": {}, "tokens": torch.ones(2)}, says("tokens= takes text")),
        ({"what": {}, "measured": {"a": "high"}}, says("a page shows one number")),
        ({"what": nn.LazyLinear(2), "run": (torch.ones(2),)}, says("has parameters without a shape")),
        ({"what": nn.Linear(2, 2), "run": (torch.ones(2),), "loss": lambda y: y}, says("it gave float32", "(2,)")),
        ({"what": nn.ReLU(), "run": (torch.ones(2),), "loss": torch.sum}, says("this loss gives no gradient")),
        (
            {"what": nn.Linear(2, 2), "run": (torch.ones(2),), "loss": lambda y: y.sum().detach()},
            says("this loss gives no gradient it"),
        ),
        ({"what": nn.Linear(2, 2), "run": (torch.ones(2),), "loss": "lm"}, says("loss= takes a function", "lm")),
        (
            {"what": nn.Linear(2, 2), "run": (torch.ones(2),), "against": nn.Linear(2, 2)},
            says("against= takes arguments"),
        ),
        ({"what": {}}, says("there is nothing to show")),
        ({"what": {"h.0": torch.ones(2)}, "model": nn.Linear(2, 2)}, says("model= is a Linear", "h.0")),
        ({"what": {"a": torch.ones(2)}, "most": "8 megs"}, says("is not a number of", "8 megs")),
    ],
)
def test_a_mistake_is_an_error_that_says_what_to_do(arguments, problem, path):
    with pytest.raises(hl.HooklineError, match=problem):
        hl.explore(arguments.pop("what"), to=path, **arguments)
    assert not path.exists()


@pytest.mark.slow
def test_gpt2_of_twelve_layers_is_under_ten_megabytes_and_takes_seconds(path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=192, n_head=12, vocab_size=5000, attn_implementation="eager")
    model = transformers.GPT2LMHeadModel(config).eval()
    ids = torch.randint(5000, (2, 24))
    at = ["**", "", "transformer.h.*.attn/softmax"]
    started = time.process_time()
    with pytest.warns(hl.HooklineWarning, match=says("was not called more")):
        page = hl.explore(model, run=(ids,), against=(ids.flip(1),), to=path, loss=lambda out: loss(out.logits), at=at)
    taken = time.process_time() - started
    data = data_of(page)
    assert len(data["sites"]) > 300
    assert 1_000_000 < page.bytes < 10_000_000
    assert taken < 20  # CPU seconds: two to three on an idle machine.
    assert site_of(data, "transformer.h.11.attn/softmax")["picture"][0]["left_out"] == ""
