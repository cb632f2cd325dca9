"""A model's modules by name, including the modules of a wrapped model."""

from __future__ import annotations

from torch import nn

import hookline as hl


def test_a_name_with_marks_is_a_name_in_a_wrapped_model_too() -> None:
    inner = nn.Sequential(nn.Linear(4, 4))
    inner.add_module("b:c", nn.ReLU())
    model = nn.DataParallel(inner)
    assert [str(hook.site.path) for hook in hl.capture(model, "b:c")] == ["b:c"]
