"""Write results to stdout, as tables or as JSON, and notes to stderr."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hookline._kernel import WRITTEN_BITS, describe
from hookline._tables import Table, Tabular, table_of


@contextmanager
def working() -> Iterator[None]:
    """Send everything that models print, also from C code and subprocesses, to stderr: stdout is for the result."""
    with redirect_stdout(sys.stderr), _redirected_file():
        yield


@contextmanager
def _redirected_file() -> Iterator[None]:
    """Redirect the file descriptor of stdout to that of stderr, if both are files."""
    descriptors = _descriptors()
    if descriptors is None:
        yield
        return
    out, err, kept = descriptors
    try:
        os.dup2(err, out)
        yield
    finally:
        os.dup2(kept, out)
        os.close(kept)


def _descriptors() -> tuple[int, int, int] | None:
    """Return the file descriptors of stdout and stderr, and a duplicate of the first; None if one is not a file."""
    if sys.__stdout__ is None or sys.__stderr__ is None:
        return None
    try:
        out, err = sys.__stdout__.fileno(), sys.__stderr__.fileno()
        return out, err, os.dup(out)
    except (AttributeError, OSError, ValueError):
        return None


def say(result: Any, *, whole: bool = False) -> None:
    """Write a result: with rich if that is installed and stdout is a terminal, otherwise as plain text."""
    shown = replace(table_of(result), every="--all") if isinstance(result, Tabular) else result
    if whole and isinstance(shown, Table):
        shown = shown.text(whole=True)
    if isinstance(shown, Table) and sys.stdout.isatty() and importlib.util.find_spec("rich") is not None:
        from rich.console import Console

        Console().print(shown)
    else:
        sys.stdout.write(f"{shown}\n")


def say_json(result: Any) -> None:
    """Write a result for a script: one line of JSON."""
    sys.stdout.write(json.dumps(plain(result), ensure_ascii=False, allow_nan=False) + "\n")


def note(text: str) -> None:
    """Write a note to stderr."""
    sys.stderr.write(f"hookline: {text}\n")


def plain(value: Any) -> Any:
    """Return a value for JSON with exact numbers. NaN and Inf, which JSON lacks, become the texts nan, inf, -inf.

    Integers of thousands of digits, which Python refuses to write in decimal, become hexadecimal texts.

    >>> plain({"h.0": (torch.tensor([1.5, float("nan")]), 2)})
    {'h.0': [[1.5, 'nan'], 2]}
    """
    if isinstance(value, Tensor):
        return plain(_numbers(value))
    if isinstance(value, Mapping):
        return {str(name): plain(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(part) for part in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, complex):
        return [plain(value.real), plain(value.imag)]
    if isinstance(value, int) and value.bit_length() > WRITTEN_BITS:
        return hex(value)
    return value if value is None or isinstance(value, (bool, int, str)) else describe(value)


def _numbers(tensor: Tensor) -> Any:
    """Return the elements as nested lists."""
    dense = tensor.detach().cpu()
    dense = dense.to_dense() if dense.layout is not torch.strided else dense
    return (dense.dequantize() if dense.is_quantized else dense).tolist()
