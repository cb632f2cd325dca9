"""Torch's layers for the oracle: their forwards are written out with seams, so that it sees every function in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from tests.properties import composites, modules, scripts
from tests.properties.seams import call, read
from tests.properties.seams import function as do

# The test modules that do everything through the seams.
TRANSPARENT = (
    composites.Root,
    composites.Residual,
    composites.Chain,
    composites.Branches,
    composites.Repeat,
    composites.Recursive,
    composites.ByName,
    composites.Direct,
    composites.Segment,
    modules.Tripwire,
    scripts.Script,
    nn.Identity,
    nn.ParameterList,
)


def forward_of(module: nn.Module, run: Callable[..., Any]) -> Callable[..., Any]:
    """Return the written-out forward of a module if there is one, otherwise `run`."""
    written_out = FORWARDS.get(type(module)) if is_bare(module) else None
    return run if written_out is None else lambda *args, **kwargs: written_out(module, *args, **kwargs)


def is_transparent(module: nn.Module) -> bool:
    """Return True if the oracle sees every function in the module's forward."""
    return type(module) in TRANSPARENT or (type(module) in FORWARDS and is_bare(module))


def is_bare(module: nn.Module) -> bool:
    """Return True if the instance has no replaced forward and no hooks."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return "forward" not in module.__dict__ and not any(hooks)


def _sequential(module: nn.Sequential, input: Any) -> Any:
    for step in module:
        input = call(step, input)
    return input


def _linear(module: nn.Linear, input: Tensor) -> Tensor:
    return do("linear", F.linear, input, read(module, "weight"), read(module, "bias"))


def _conv(module: nn.Conv1d, input: Tensor) -> Tensor:
    options = module.stride, module.padding, module.dilation, module.groups
    return do("conv1d", F.conv1d, input, read(module, "weight"), read(module, "bias"), *options)


def _layer_norm(module: nn.LayerNorm, input: Tensor) -> Tensor:
    affine = read(module, "weight"), read(module, "bias")
    return do("layer_norm", F.layer_norm, input, module.normalized_shape, *affine, module.eps)


def _embedding(module: nn.Embedding, input: Tensor) -> Tensor:
    return do("embedding", F.embedding, input, read(module, "weight"))


def _relu(module: nn.ReLU, input: Tensor) -> Tensor:
    return do("relu", F.relu, input, inplace=module.inplace)


def _gelu(module: nn.GELU, input: Tensor) -> Tensor:
    return do("gelu", F.gelu, input, approximate=module.approximate)


def _dropout(module: nn.Dropout, input: Tensor) -> Tensor:
    return do("dropout", F.dropout, input, module.p, module.training, module.inplace)


FORWARDS: dict[type[nn.Module], Callable[..., Any]] = {
    nn.Sequential: _sequential,
    nn.Linear: _linear,
    nn.Conv1d: _conv,
    nn.LayerNorm: _layer_norm,
    nn.Embedding: _embedding,
    nn.ReLU: _relu,
    nn.GELU: _gelu,
    nn.Dropout: _dropout,
}
