"""Fixtures for the tests of a page's data, which run without the front end."""

from __future__ import annotations

from importlib.resources import files

import pytest
import torch

from hookline._explore import explore as explorer
from tests.support.explorer_pages import Net

STUB = '<!doctype html><title>hookline</title><script type="application/json" id="hookline-data">{}</script>'


@pytest.fixture(autouse=True)
def a_template(monkeypatch):
    if not files("hookline._explore").joinpath("explorer.html").is_file():
        monkeypatch.setattr(explorer, "template", lambda: STUB.format(explorer.MARK))


@pytest.fixture
def model():
    return Net().eval()


@pytest.fixture
def ids():
    return torch.randint(20, (2, 5))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "report.html"
