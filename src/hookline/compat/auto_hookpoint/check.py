"""Check that the hook points of a model class work: `check_auto_hook`, built on `hl.check`."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import nn

import hookline as hl
from hookline.compat.auto_hookpoint.hook import HookedModule, auto_hook

FIRES = "every point fires"


class CheckFailed(hl.HooklineError, RuntimeError):
    """Raised for hook points that do not work."""


def check_auto_hook(
    model: Any, input_kwargs: Mapping[str, Any], init_kwargs: Mapping[str, Any] | None = None, strict: bool = False
) -> Any:
    """Run every check on instances of a class and return a hooked instance.

    A failed check gives a warning, or raises if `strict`.

    >>> check_auto_hook(nn.Linear, {"input": torch.ones(3, 4)}, {"in_features": 4, "out_features": 2}, strict=True)
    Linear(in_features=4, out_features=2, bias=True)
    """
    report = hl.check(model, input_kwargs, init_kwargs)
    failed = "\n".join(_failure_text(row) for row in report.failures)
    if failed and strict:
        raise CheckFailed(f"Tests failed: {failed}")
    if failed:
        warnings.warn(f"the following tests failed: {failed}", hl.HooklineWarning, stacklevel=2)
    idle = [f"  {row.point}: {row.detail}" for row in report if row.result == "listed" and row.check == FIRES]
    if idle:
        text = "\n".join(["these hook points never fire with this input:", *idle])
        warnings.warn(text, hl.HooklineWarning, stacklevel=2)
    made = model if isinstance(model, nn.Module) else model(**init_kwargs or {})
    return made if isinstance(made, HookedModule) else auto_hook(made)


def get_test_functions(module: ModuleType | None = None) -> list[Callable[..., Any]]:
    """Return the functions of a module that are named `test_...`. Without a module, return one function for each check.

    Such a function takes a model and its `input_kwargs`, and raises if its check fails.
    """
    if module is not None:
        found = inspect.getmembers(module, inspect.isfunction)
        return [function for name, function in found if name.startswith("test_")]
    return [_test(row.check) for row in hl.check(nn.Linear(1, 1), {"input": torch.ones(1, 1)})]


def _test(check: str) -> Callable[..., None]:
    def test(model: nn.Module, input_kwargs: Mapping[str, Any]) -> None:
        failed = [row for row in hl.check(model, input_kwargs).failures if row.check == check]
        if failed:
            raise CheckFailed("\n".join(_failure_text(row) for row in failed))

    test.__name__ = test.__qualname__ = _name(check)
    return test


def _failure_text(row: Any) -> str:
    return f"Test failed: {_name(row.check)} with error: {' '.join(filter(None, (row.point, row.detail)))}"


def _name(check: str) -> str:
    return "test_" + check.replace(" ", "_")
