"""The baseline for hookline: a model that is almost all overhead, and hooks on it written without hookline."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from harness import usual
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

DEPTH = usual(200, quick=10)


def model_of(depth: int) -> nn.Sequential:
    """Return `depth` small linear layers with a ReLU after each: almost all overhead, little computation."""
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(16, 16), nn.ReLU()]
    return nn.Sequential(*layers).eval()


def linear_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]


def raw_hooks(model: nn.Module, kept: dict[str, Tensor], detach: bool = True) -> list[RemovableHandle]:
    """Store the output of every linear layer with torch's hooks, as tutorials do. Without `detach`, keep its graph."""

    def keeper(name: str) -> Callable[..., None]:
        def keep(_module: nn.Module, _args: object, output: Tensor) -> None:
            kept[name] = output.detach()

        def keep_live(_module: nn.Module, _args: object, output: Tensor) -> None:
            kept[name] = output

        return keep if detach else keep_live

    return [module.register_forward_hook(keeper(name)) for name, module in linear_layers(model)]


def shadow(model: nn.Module, kept: dict[str, Tensor]) -> list[nn.Module]:
    """Store the output of every linear layer by replacing `forward` on the instance.

    This is the least work that Python allows. It ignores threads, errors, copies, compiled graphs and call numbers.
    """

    def forward_of(name: str, own: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
            output = own(self, *args, **kwargs)
            kept[name] = output.detach() if output.requires_grad else output
            return output

        return forward

    layers = linear_layers(model)
    for name, module in layers:
        module.__dict__["forward"] = MethodType(forward_of(name, type(module).forward), module)
    return [module for _, module in layers]


def unshadow(modules: list[nn.Module]) -> None:
    for module in modules:
        del module.__dict__["forward"]


def gpt(width: int) -> nn.Module:
    """Return a GPT-2 with 12 layers whose attention computes its pattern explicitly."""
    from transformers import GPT2Config, GPT2Model

    config = GPT2Config(n_embd=width, n_head=width // 16, n_layer=12, vocab_size=100, bos_token_id=0, eos_token_id=0)
    config._attn_implementation = "eager"
    return GPT2Model(config).eval()  # type: ignore[no-any-return]


class Enough(BaseException):
    """Raised by a raw hook to end a forward."""


def stop_raw(module: nn.Module) -> RemovableHandle:
    """End the forward at a module with a torch hook. The caller catches `Enough`."""

    def leave(*_: object) -> None:
        raise Enough

    return module.register_forward_hook(leave)


def sample() -> Tensor:
    """Return one row, the smallest batch."""
    return torch.randn(1, 16)
