"""Hooks by hand in the style of baukit: a context that finds layers by name, keeps outputs and unhooks at its end.

PyPI does not have baukit. This follows the documentation of its Trace and TraceDict, and uses none of its code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tasks import Contender, Job, Peer, main, output_of
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


class StopHere(Exception):
    """Raised to end a forward at the last traced layer."""


def find(model: nn.Module, name: str) -> nn.Module:
    """Return the layer with this name."""
    for found, module in model.named_modules():
        if found == name:
            return module
    raise LookupError(name)


class Traced:
    """A context that stores the outputs of the layers with these names."""

    def __init__(
        self,
        model: nn.Module,
        names: list[str],
        edit: Callable[[Any, str], Any] | None = None,
        retain_grad: bool = False,
        stop: bool = False,
    ) -> None:
        self.outputs: dict[str, Any] = {}
        self.edit, self.retain_grad, self.stop = edit, retain_grad, stop
        self.last = names[-1]
        self.handles: list[RemovableHandle] = [
            find(model, name).register_forward_hook(self.hook(name)) for name in names
        ]

    def hook(self, name: str) -> Callable[..., Any]:
        """Return the hook of one layer."""

        def keep(_module: nn.Module, _args: object, output: Any) -> Any:
            if self.edit is not None:
                output = self.edit(output, name)
            if self.retain_grad:
                output.retain_grad()
            self.outputs[name] = output
            if self.stop and name == self.last:
                raise StopHere
            return output

        return keep

    def __enter__(self) -> Traced:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        self.close()
        return self.stop and kind is not None and issubclass(kind, StopHere)

    def close(self) -> None:
        """Remove every hook."""
        for handle in self.handles:
            handle.remove()


def one_shot(job: Job) -> Contender:
    def run() -> dict[str, Tensor]:
        with Traced(job.model, job.names) as traced:
            job.model(job.inputs)
        return traced.outputs

    return run


def attached(job: Job) -> Contender:
    traced = Traced(job.model, job.names)

    def run() -> dict[str, Tensor]:
        job.model(job.inputs)
        return traced.outputs

    return run


def one(job: Job) -> Contender:
    def run() -> dict[str, Tensor]:
        with Traced(job.model, [job.middle]) as traced:
            job.model(job.inputs)
        return traced.outputs

    return run


def patch(job: Job) -> Contender:
    def run() -> Tensor:
        with Traced(job.model, [job.middle], edit=lambda output, name: torch.zeros_like(output)):
            return output_of(job.model(job.inputs))

    return run


def set_up(job: Job) -> Contender:
    def run() -> None:
        with Traced(job.model, job.names):
            pass

    return run


def gradients(job: Job) -> Contender:
    def run() -> Any:
        with Traced(job.model, job.names, retain_grad=True) as traced:
            job.loss(job.model(job.inputs)).backward()
        return lambda: {name: output.grad for name, output in traced.outputs.items()}

    return run


def stop(job: Job) -> Contender:
    def run() -> dict[str, Tensor]:
        with Traced(job.model, [job.middle], stop=True) as traced:
            job.model(job.inputs)
        return traced.outputs

    return run


PEER = Peer(
    name="baukit-style, by hand",
    package="",
    tasks={
        "one shot": one_shot,
        "attached": attached,
        "one": one,
        "patch": patch,
        "set-up": set_up,
        "gradients": gradients,
        "stop": stop,
    },
)

if __name__ == "__main__":
    main(PEER)
