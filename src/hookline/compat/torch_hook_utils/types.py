"""A module type for annotations, with the parameters and the result of its forward."""

from __future__ import annotations

from typing import ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
OutT_co = TypeVar("OutT_co", covariant=True)


class Module(Protocol[P, OutT_co]):
    """An `nn.Module` in annotations: `Module[[Tensor], Normal]`. It can't be used with isinstance."""

    def forward(self, *args: P.args, **kwargs: P.kwargs) -> OutT_co: ...
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> OutT_co: ...
