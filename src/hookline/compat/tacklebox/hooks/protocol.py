"""TrackingProtocol: which variables a tracker keeps, how often, and how many."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any, TypeVar

from hookline.compat.tacklebox.helpers import Protocol

FORWARD_VARS = ["inp", "out"]
BACKWARD_VARS = ["inp_grad", "out_grad"]
ALL_VARS = FORWARD_VARS + BACKWARD_VARS
GRAPH_VARS = list(ALL_VARS)
DEFAULT_TRACKING_PROTOCOL: dict[str, Any] = {
    **{f"track_{var}": True for var in ALL_VARS},
    **{f"record_every_{var}": 1 for var in ALL_VARS},
    **{f"buffer_len_{var}": 1 for var in ALL_VARS},
    "save": False,
    "save_protocol": "npz",
    "save_file_base": "",
    **{f"suffix_{var}": var for var in ALL_VARS},
}
T = TypeVar("T")


def check_vars(given: Iterable[str], valid_vars: Sequence[str] = ALL_VARS) -> None:
    """Raise for a variable that there is not."""
    for var in given:
        if var not in valid_vars:
            raise AssertionError(f"Invalid var, {var}, passed to tracker. Use a valid var key: {', '.join(valid_vars)}")


def validate_vars(
    var_idx: int = 0, multiple: bool = False, keyword: str | None = None, valid_vars: Sequence[str] = ALL_VARS
) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Let a function check its variables first: one argument, all from there on (`multiple`), or a keyword's."""

    def wrap(fn: Callable[..., T]) -> Callable[..., T]:
        @wraps(fn)
        def validated(*args: Any, **kwargs: Any) -> T:
            given = args[var_idx:] if multiple else args[var_idx : var_idx + 1]
            if keyword is not None:
                named = kwargs.get(keyword) or ()
                given = (named,) if isinstance(named, str) else tuple(named)
            check_vars(given, valid_vars)
            return fn(*args, **kwargs)

        return validated

    return wrap


class TrackingProtocol(Protocol):
    """What a tracker keeps: these variables, of every n-th pass (`record_every`), the latest few (`buffer_len`)."""

    DEFAULT_PROTOCOL = DEFAULT_TRACKING_PROTOCOL

    @validate_vars(var_idx=1, multiple=True)
    def __init__(
        self,
        *vars_: str,
        record_every: int | None = None,
        buffer_len: int | None = None,
        protocol_json: str | None = None,
        namespace: object | None = None,
        **overwrite_protocol: Any,
    ) -> None:
        super().__init__()
        if protocol_json is not None:
            self.add_from_json(protocol_json)
        if namespace is not None:
            self.add_from_namespace(namespace)
        for var in ALL_VARS:
            self[f"track_{var}"] = self[f"track_{var}"] and (not vars_ or var in vars_)
            if record_every:  # 0 is none, as in the original.
                self[f"record_every_{var}"] = record_every
            if buffer_len:
                self[f"buffer_len_{var}"] = buffer_len
        self.overwrite_protocol(**overwrite_protocol)
        self["track_forward"] = True
        self["track_backward"] = any(self[f"track_{var}"] for var in BACKWARD_VARS)
