"""A compiled model under any torch. One that can't trace hooks runs the model uncompiled while it has hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookline as hl
from tests.support.models import GPT, tokens

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def double(value: Tensor) -> Tensor:
    return value * 2


BLOCKS: dict[str, Callable[[nn.Module], hl.Hooks]] = {
    "a capture": lambda model: hl.capture(model, "h.*"),
    "a capture of several kinds": lambda model: hl.capture(model, "", "h.0:input", 'h.1:inputs["scale"]', "h.2[:, -1]"),
    "a patch": lambda model: hl.patch(model, {"h.1": 0.25}),
    "an edit": lambda model: hl.edit(model, "h.*", double),
    "a skip": lambda model: hl.skip(model, "h.1"),
    "an edit of a parameter": lambda model: hl.edit(model, "h.1.attn.weight:param", double),
    "an edit of an operation on a parameter": lambda model: hl.edit(model, "h.1.attn.weight/linear", double),
}


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("is_compiled_before", [True, False])
def test_hooks_act_as_without_compiling_and_leave_no_trace(kind: str, is_compiled_before: bool) -> None:
    model, x = GPT(depth=3), tokens()
    fast: Any = torch.compile(model, backend="eager")
    plain = model(x)
    if is_compiled_before:
        assert fast(x).equal(plain)
    with BLOCKS[kind](model) as expected:
        changed = model(x)
    for _ in range(2):
        with BLOCKS[kind](fast) as acts:
            assert fast(x).equal(changed)
        torch.testing.assert_close(dict(acts), dict(expected), rtol=0, atol=0)
        assert fast(x).equal(plain)


@pytest.mark.skipif(torch.__version__ >= "2.8", reason="needs torch before 2.8, whose dynamo can't trace hooks")
@pytest.mark.parametrize("kind", BLOCKS)
def test_a_hooked_model_is_not_compiled(kind: str) -> None:
    model, x = GPT(depth=3), tokens()
    fast = torch.compile(model, backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported), BLOCKS[kind](fast):
        fast(x)


def test_a_value_is_of_the_latest_of_several_forwards() -> None:
    fast = torch.compile(GPT(depth=2), backend="eager")
    with hl.capture(fast, "h.*") as acts:
        fast(tokens())
        first = acts["h.1"].clone()
        fast(tokens() * 0)
        assert not acts["h.1"].equal(first)
