"""Every test of hook points runs twice: with hookline's own classes, and with those of transformer_lens."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from hookline.points import transformer_lens as lens

KINDS = ("own", "lens") if importlib.util.find_spec("transformer_lens") else ("own",)


@pytest.fixture(params=KINDS, autouse=True)
def kind_of_points(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Whose hook points `auto_hook` makes; `test_transformer_lens.py` has a fixture of this name of its own."""
    if request.param == "own":
        monkeypatch.setattr(lens, "lens", lambda: None)
    lens.as_point.cache_clear()
    lens.as_root.cache_clear()
    yield request.param
    lens.as_point.cache_clear()
    lens.as_root.cache_clear()
