"""Series of tests that take long: `make test` runs one of each kind, and `make fuzz` all of them."""

from __future__ import annotations

import os

import pytest

IS_LONG = bool(os.environ.get("HOOKLINE_ALL_MOMENTS"))
in_a_long_series = pytest.mark.skipif(not IS_LONG, reason="runs with HOOKLINE_ALL_MOMENTS=1, as in make fuzz")
