"""Cost of capturing values and their gradients in a forward and backward, compared with torch's hooks.

python benchmarks/gradients.py            prints the tables and writes them to benchmarks/gradients.txt
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from baseline import DEPTH, linear_layers, model_of, raw_hooks, sample
from harness import compare, publish, report
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

import hookline as hl

Run = Callable[[], object]
Attach = Callable[[nn.Module], list[RemovableHandle]]

BOTH = (nn.Linear, (nn.Linear, ":grad_output"))

_kept: list[object] = []  # Hooks are removed when they are garbage-collected.


def step(model: nn.Module) -> Run:
    """Return a function that runs a forward and backward of a model."""
    x = sample().requires_grad_()  # Every module then gets a gradient for its input.

    def run() -> None:
        model(x).sum().backward()
        model.zero_grad(set_to_none=True)

    return run


def tensor_hooks(model: nn.Module) -> list[RemovableHandle]:
    """Store each output, and its gradient with a hook on the tensor."""
    values: dict[str, Tensor] = {}
    gradients: dict[str, Tensor] = {}

    def keeper(name: str) -> Callable[..., None]:
        def keep_gradient(gradient: Tensor) -> None:
            gradients[name] = gradient

        def keep(_module: nn.Module, _args: object, output: Tensor) -> None:
            values[name] = output.detach()
            output.register_hook(keep_gradient)

        return keep

    return [module.register_forward_hook(keeper(name)) for name, module in linear_layers(model)]


def backward_hooks(model: nn.Module) -> list[RemovableHandle]:
    """Store each output, and its gradient with torch's full backward hook on the module."""
    gradients: dict[str, Tensor] = {}

    def keeper(name: str) -> Callable[..., None]:
        def keep(_module: nn.Module, _grad_input: object, grad_output: tuple[Tensor, ...]) -> None:
            gradients[name] = grad_output[0]

        return keep

    handles = [module.register_full_backward_hook(keeper(name)) for name, module in linear_layers(model)]
    return raw_hooks(model, {}) + handles


def retained(model: nn.Module) -> list[RemovableHandle]:
    """Store each output with its graph, and keep its gradient with `retain_grad`."""
    values: dict[str, Tensor] = {}

    def keeper(name: str) -> Callable[..., None]:
        def keep(_module: nn.Module, _args: object, output: Tensor) -> None:
            output.retain_grad()
            values[name] = output

        return keep

    return [module.register_forward_hook(keeper(name)) for name, module in linear_layers(model)]


def with_raw(attach: Attach) -> Run:
    model = model_of(DEPTH)
    attach(model)
    return step(model)


def with_hookline(*where: object) -> Run:
    hooks = hl.Hooks(model_of(DEPTH))
    hooks.capture(*where)
    _kept.append(hooks)
    return step(hooks.model)


def attached() -> dict[str, list[float]]:
    """Compare hooks that stay attached."""
    return compare(
        {
            "bare": step(model_of(DEPTH)),
            "bare again": step(model_of(DEPTH)),
            "raw forward hooks, values alone": with_raw(lambda model: raw_hooks(model, {})),
            "hookline, values alone": with_hookline(nn.Linear),
            "raw tensor hooks": with_raw(tensor_hooks),
            "raw full backward hooks": with_raw(backward_hooks),
            "raw retain_grad, graph held": with_raw(retained),
            "hookline, values and :grad_output": with_hookline(*BOTH),
            "hookline, :grad_output alone": with_hookline((nn.Linear, ":grad_output")),
            "hookline, :grad_input alone": with_hookline((nn.Linear, ":grad_input")),
        },
        rounds=40,
    )


def one_shot() -> dict[str, list[float]]:
    """Compare attaching, running forward and backward, and detaching."""
    model = model_of(DEPTH)
    run = step(model)

    def raw(attach: Attach) -> Run:
        def once() -> None:
            handles = attach(model)
            run()
            for handle in handles:
                handle.remove()

        return once

    def hookline() -> None:
        with hl.capture(model, *BOTH):
            run()

    return compare(
        {
            "bare": run,
            "raw tensor hooks": raw(tensor_hooks),
            "raw full backward hooks": raw(backward_hooks),
            "hookline, values and :grad_output": hookline,
        },
        rounds=40,
    )


def tables() -> Iterator[str]:
    """Measure everything."""
    subject = f"values and gradients of {DEPTH} linear layers, forward and backward"
    yield report(f"attached: {subject}; ratio to bare", attached())
    yield report("one shot: the same, attached and detached each time; ratio to bare", one_shot())


if __name__ == "__main__":
    publish(__file__, tables)
