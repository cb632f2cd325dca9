"""TransformerLens: an MLP written with `HookPoint`s, as it requires, and its bridge around GPT-2."""

from __future__ import annotations

import tempfile
from typing import Any

import pandas
import torch
from sweeping import SweepJob, Way
from tasks import Contender, Job, Peer, main, output_of
from torch import Tensor, nn
from transformer_lens import HookedRootModule, TransformerBridge, patching
from transformer_lens.hook_points import HookPoint

FOLDER = tempfile.TemporaryDirectory()  # The bridge loads the tokenizer again from here.


class HookedChain(HookedRootModule):
    """The layers of a Sequential, with a hook point after each linear layer."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = layers
        named = list(layers.named_children())
        points = {name: HookPoint() for name, layer in named if isinstance(layer, nn.Linear)}
        self.points = nn.ModuleDict(points)
        self.steps = [(layer, points.get(name)) for name, layer in named]
        self.setup()

    def forward(self, value: Tensor) -> Tensor:
        for layer, point in self.steps:
            value = layer(value)
            if point is not None:
                value = point(value)
        return value


def adopt(model: nn.Module) -> Any:
    """Return the model in TransformerLens's form."""
    if isinstance(model, nn.Sequential):
        return HookedChain(model)
    return TransformerBridge.boot_transformers("gpt2", hf_model=model, tokenizer=tokenizer()).eval()


def tokenizer() -> Any:
    """Return a tokenizer that needs no download. The bridge requires one, but the tasks don't use it."""
    from tokenizers import Tokenizer, models
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<end>": 0, "word": 1}, unk_token="<end>"))
    special = {"eos_token": "<end>", "bos_token": "<end>", "pad_token": "<end>", "unk_token": "<end>"}
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(FOLDER.name)
    return AutoTokenizer.from_pretrained(FOLDER.name)


def point_of(job: Job, name: str) -> str:
    """Return the hook point at a module's output."""
    if isinstance(job.model, HookedChain):
        return f"points.{name}"
    return f"blocks.{name.split('.')[-1]}.hook_out"


def points_of(job: Job) -> dict[str, str]:
    """Return the hook point of each module by the module's name."""
    return {name: point_of(job, name) for name in job.names}


def one_shot(job: Job) -> Contender:
    points = points_of(job)
    wanted = set(points.values())

    def run() -> Any:
        _, cache = job.model.run_with_cache(job.inputs, names_filter=wanted.__contains__)
        return lambda: {name: cache[point] for name, point in points.items()}

    return run


def attached(job: Job) -> Contender:
    points = points_of(job)
    wanted = set(points.values())
    cache = job.model.add_caching_hooks(names_filter=wanted.__contains__)

    def run() -> Any:
        job.model(job.inputs)
        return lambda: {name: cache[point] for name, point in points.items()}

    return run


def one(job: Job) -> Contender:
    point = point_of(job, job.middle)

    def run() -> Any:
        _, cache = job.model.run_with_cache(job.inputs, names_filter=point)
        return {job.middle: cache[point]}

    return run


def patch(job: Job) -> Contender:
    point = point_of(job, job.middle)

    def zeros(value: Tensor, hook: HookPoint) -> Tensor:
        return torch.zeros_like(value)

    def run() -> Tensor:
        return output_of(job.model.run_with_hooks(job.inputs, fwd_hooks=[(point, zeros)]))

    return run


def set_up(job: Job) -> Contender:
    wanted = set(points_of(job).values())

    def keep(value: Tensor, hook: HookPoint) -> None:
        pass

    def run() -> None:
        with job.model.hooks(fwd_hooks=[(wanted.__contains__, keep)]):
            pass

    return run


def gradients(job: Job) -> Contender:
    points = points_of(job)
    wanted = set(points.values())

    def run() -> Any:
        kept: dict[str, Tensor] = {}

        def keep(value: Tensor, hook: HookPoint) -> None:
            kept[hook.name] = value

        with job.model.hooks(bwd_hooks=[(wanted.__contains__, keep)]):
            job.loss(job.model(job.inputs)).backward()
        return lambda: {name: kept[point] for name, point in points.items()}

    return run


def stop(job: Job) -> Contender | str:
    if isinstance(job.model, HookedChain):
        return "stop_at_layer is for transformers; a HookedRootModule has no early stop"
    point, layer = point_of(job, job.middle), int(job.middle.split(".")[-1])

    def run() -> Any:
        _, cache = job.model.run_with_cache(job.inputs, names_filter=point, stop_at_layer=layer + 1)
        return {job.middle: cache[point]}

    return run


def patch_grid(job: SweepJob) -> Way:
    """Use `get_act_patch_resid_pre`. By default it runs all cells; a frame says which."""
    _, cache = job.model.run_with_cache(job.clean)

    def metric(logits: Tensor) -> Tensor:
        return job.metric(logits)[0]

    def run(cells: Any) -> list[float]:
        some = {"index_axis_names": None, "index_df": pandas.DataFrame(cells, columns=["layer", "pos"])}
        found = patching.get_act_patch_resid_pre(job.model, job.corrupted, cache, metric, **some)
        return found.tolist()  # type: ignore[no-any-return]

    return Way(run, packs=False)


PEER = Peer(
    name="TransformerLens",
    package="transformer-lens",
    adopt=adopt,
    tasks={
        "one shot": one_shot,
        "attached": attached,
        "one": one,
        "patch": patch,
        "set-up": set_up,
        "gradients": gradients,
        "stop": stop,
    },
    sweeps={"get_act_patch_resid_pre": patch_grid},
    adopt_to_sweep=adopt,
    note="the model is one of its own, written with hook points or bridged, before; not timed",
)

if __name__ == "__main__":
    main(PEER)
