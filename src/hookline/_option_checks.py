"""Checks of options that many functions have: flags, numbers, text, sizes, devices, dtypes. Errors name the option."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterable
from decimal import Decimal
from typing import Any

import torch

from hookline._values.nested import describe
from hookline.errors import HooklineError, did_you_mean


def refuse_flags(**flags: Any) -> None:
    """Raise for an option that is neither True nor False: "no" would count as True."""
    for name, given in flags.items():
        if given is not True and given is not False:
            raise HooklineError(f"{name}={short_text(given)} is not True or False")


def refuse_flags_or_none(**flags: Any) -> None:
    """Raise for an option that is neither True nor False, nor None, which leaves the choice to hookline."""
    for name, given in flags.items():
        if given is not None and given is not True and given is not False:
            raise HooklineError(f"{name}={short_text(given)} is not None, True or False")


def refuse_texts(**texts: Any) -> None:
    """Raise for an option that is not text."""
    for name, given in texts.items():
        if not isinstance(given, str):
            raise HooklineError(f"{name}={short_text(given)} is not text; write {name}='...'")


def refuse_unknown(known: Iterable[str | None], **given: Any) -> None:
    """Raise for an option that is none of the known words."""
    for name, one in given.items():
        if not isinstance(one, (str, type(None))) or one not in known:
            raise HooklineError(f"{name}= is one of {', '.join(map(repr, known))}, not {short_text(one)}")


def refuse_numbers(least: int | None = None, /, **numbers: Any) -> None:
    """Raise for an option that is not a whole number, or is less than `least`."""
    for name, given in numbers.items():
        if not is_whole(given) or (least is not None and given < least):
            wanted = "a whole number" if least is None else f"a whole number from {least} on"
            raise HooklineError(f"{name}={short_text(given)} is not {wanted}")


def is_whole(given: Any) -> bool:
    """Return True for a whole number, including numpy's and torch's, but not for a bool."""
    try:
        operator.index(given)
    except (TypeError, ValueError, RuntimeError):  # For a tensor with several elements torch may raise any.
        return False
    return not isinstance(given, bool)


def bytes_of(limit: Any, name: str = "limit") -> int:
    """Return a number of bytes from a number, or from text such as "500 MB" or "2 GiB"."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kKMGT]?)(i?)B", limit) if isinstance(limit, str) else None
    if found is not None:
        size = Decimal(found[1]) * (1024 if found[3] else 1000) ** " KMGT".index(found[2].upper() or " ")
    elif isinstance(limit, (int, float)) and not isinstance(limit, bool) and math.isfinite(limit):
        size = Decimal(limit)
    else:
        size = Decimal(-1)
    if size < 0 or size != int(size):
        raise HooklineError(
            f'{name}={short_text(limit)} is not a number of bytes, nor text such as "500 MB" or "2 GiB"'
        )
    return int(size)


def device_of(device: Any, name: str = "device") -> torch.device:
    """Return a device from its name, its number or a torch.device."""
    try:
        if isinstance(device, (str, torch.device)) or is_whole(device):
            return torch.device(device)
        why = "write 'cpu', 'cuda:0' or a torch.device"
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
        why = str(error).splitlines()[0]
    raise HooklineError(f"{name}={short_text(device)} is not a device: {why}")


def device_here(device: Any, name: str = "device") -> torch.device:
    """Return a device as `device_of` does; raise if it can't be used in this process."""
    found = device_of(device, name)
    try:
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # AssertionError: no CUDA.
        raise HooklineError(f"{name}='{found}' can't be used here: {str(error).splitlines()[0]}") from None
    return found


def dtype_of(dtype: Any, name: str = "dtype") -> torch.dtype:
    """Return a dtype from its name or a torch.dtype."""
    text = dtype.removeprefix("torch.") if isinstance(dtype, str) else ""
    found = getattr(torch, text, None) if text else dtype
    if isinstance(found, torch.dtype):
        return found
    near = did_you_mean(text, [known for known, one in vars(torch).items() if isinstance(one, torch.dtype)])
    raise HooklineError(f"{name}={short_text(dtype)} is not a dtype{near or '; write torch.float16 or its name'}")


def short_text(given: Any) -> str:
    """Return an argument in one short line of text."""
    return repr(given) if isinstance(given, str) and len(given) < 60 else describe(given)
