"""Every test of hook points runs twice: with hookline's own classes, and with those of transformer_lens."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from hookline.points import hook_points

KINDS = ("own", "lens") if importlib.util.find_spec("transformer_lens") else ("own",)


@pytest.fixture(params=KINDS, autouse=True)
def kind_of_points(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Choose whose hook points `auto_hook` creates. `test_hook_points_transformer_lens.py` overrides this fixture."""
    if request.param == "own":
        monkeypatch.setattr(hook_points, "lens", lambda: None)
    hook_points.as_point.cache_clear()
    hook_points.as_root.cache_clear()
    yield request.param
    hook_points.as_point.cache_clear()
    hook_points.as_root.cache_clear()
