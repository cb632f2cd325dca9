"""A module as annotations see it: what its forward takes, and what it gives."""

from __future__ import annotations

from typing import ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
OutT_co = TypeVar("OutT_co", covariant=True)


class Module(Protocol[P, OutT_co]):
    """Stands for an `nn.Module` in annotations: `Module[[Tensor], Normal]`. isinstance does not take it."""

    def forward(self, *args: P.args, **kwargs: P.kwargs) -> OutT_co: ...
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> OutT_co: ...
