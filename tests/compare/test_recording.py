"""What passes in a run of a model."""

from __future__ import annotations

import torch
from torch import nn

from hookline._compare.recording import paths_of, record

X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.unused = nn.ModuleList([nn.Linear(4, 4)])

    def forward(self, x):
        return self.layer(self.layer(x)).add_(1)


def test_every_call_is_recorded_in_order():
    model = Twice()
    recording = record(model, ((X,), {}), paths_of(model))
    assert list(recording.calls) == ["", "layer"]
    first, second = recording.calls["layer"]
    assert torch.equal(second.inputs["input"], first.output)
    assert torch.equal(second.output, model.layer(first.output))  # Not what `add_` wrote there.
    assert torch.equal(recording.outputs("")[0], recording.output)
    assert recording.starts() == {"": 0, "layer": 1}
    assert not hasattr(model.layer, "_forward_hooks_with_kwargs") or not model.layer._forward_hooks


def test_containers_are_no_paths():
    assert paths_of(Twice()) == ["", "layer", "unused.0"]
