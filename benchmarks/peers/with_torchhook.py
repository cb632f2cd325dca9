"""TorchHook: `HookManager(model, max_size=1)`, and `add` with the layer itself so that no name is looked up."""

from __future__ import annotations

from typing import Any

from tasks import Contender, Job, Peer, main
from torchhook import HookManager


def manager_on(job: Job) -> HookManager:
    """Return a manager with a hook on every place."""
    manager = HookManager(job.model, max_size=1)
    for name, module in job.model.named_modules():
        if isinstance(module, job.kind):
            manager.add(layer_name=name, layer=module)
    return manager


def latest(manager: HookManager) -> Any:
    """Return a function that returns the last value of each layer."""
    features = manager.get_all().copy()
    return lambda: {name: values[-1] for name, values in features.items()}


def one_shot(job: Job) -> Contender:
    def run() -> Any:
        manager = manager_on(job)
        job.model(job.inputs)
        values = latest(manager)
        manager.clear_hooks()
        return values

    return run


def attached(job: Job) -> Contender:
    manager = manager_on(job)

    def run() -> Any:
        job.model(job.inputs)
        return latest(manager)

    return run


def one(job: Job) -> Contender:
    def run() -> Any:
        manager = HookManager(job.model, max_size=1)
        manager.add(layer_name=job.middle, layer=job.model.get_submodule(job.middle))
        job.model(job.inputs)
        values = latest(manager)
        manager.clear_hooks()
        return values

    return run


def set_up(job: Job) -> Contender:
    def run() -> None:
        manager_on(job).clear_hooks()

    return run


PEER = Peer(
    name="TorchHook",
    package="torchhook",
    tasks={
        "one shot": one_shot,
        "attached": attached,
        "one": one,
        "patch": "a hook's result is kept, and never given to the model",
        "set-up": set_up,
        "gradients": "forward hooks only",
        "stop": "no early stop",
    },
)

if __name__ == "__main__":
    main(PEER)
