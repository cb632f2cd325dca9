"""Steps of a `Script`: each runs some torch functions as real forwards do, and keeps the shape.

`h` is the value so far, and `x` the script's argument. A step writes only into tensors that it made.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.properties.modules import SHAPE
from tests.properties.seams import function as do
from tests.properties.seams import segment

Step = Callable[[Any, Tensor, Tensor], Tensor]
STEPS: dict[str, Step] = {}


# Steps that write into a tensor that may have been captured by reference.
WRITING = (
    "in_place",
    "in_place_by_option",
    "writing_a_part",
    "writing_out",
    "writing_under_a_view",
    "writing_through_a_view",
    "buffer_written",
)


def step(run: Step) -> Step:
    """Register a step under its name."""
    STEPS[run.__name__] = run
    return run


def reflected(run: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return a commutative operator with the tensor on its right side, which torch takes as its first argument."""
    return lambda input, other: run(other, input)


@step
def softmax(script: Any, h: Tensor, x: Tensor) -> Tensor:
    return do("softmax", F.softmax, h, dim=-1)


@step
def operators(script: Any, h: Tensor, x: Tensor) -> Tensor:
    h = do("mul", reflected(operator.mul), h, 2)
    h = do("sub", operator.sub, 1.0, h)
    h = do("div", operator.truediv, h, 3.0)
    return do("add", operator.add, do("neg", operator.neg, h), x)


@step
def powers(script: Any, h: Tensor, x: Tensor) -> Tensor:
    h = do("pow", operator.pow, do("tanh", Tensor.tanh, h), 2)
    return do("abs", abs, do("sub", operator.sub, h, x))


@step
def attention(script: Any, h: Tensor, x: Tensor) -> Tensor:
    scores = do("matmul", operator.matmul, h, do("transpose", Tensor.transpose, x, -1, -2))
    weights = do("softmax", Tensor.softmax, scores, -1)
    return do("matmul", torch.matmul, weights, h)


@step
def fused_attention(script: Any, h: Tensor, x: Tensor) -> Tensor:
    return do("scaled_dot_product_attention", F.scaled_dot_product_attention, h, x, h)


@step
def adding_thrice(script: Any, h: Tensor, x: Tensor) -> Tensor:
    h = do("add", operator.add, h, x)
    h = do("add", torch.add, h, 0.5)
    return do("add", Tensor.add, h, do("mul", operator.mul, x, 0.1))


@step
def masking(script: Any, h: Tensor, x: Tensor) -> Tensor:
    return do("where", torch.where, do("gt", operator.gt, h, 0), h, do("mul", operator.mul, x, 0.1))


@step
def swapping_halves(script: Any, h: Tensor, x: Tensor) -> Tensor:
    left, right = do("chunk", Tensor.chunk, h, 2, -1)
    return do("cat", torch.cat, [right, left], dim=-1)


@step
def stacking(script: Any, h: Tensor, x: Tensor) -> Tensor:
    return do("mean", Tensor.mean, do("stack", torch.stack, (h, x)), 0)


@step
def peak(script: Any, h: Tensor, x: Tensor) -> Tensor:
    values, _ = do("max", torch.max, h, dim=-1, keepdim=True)
    return do("sub", operator.sub, h, values)


@step
def rows(script: Any, h: Tensor, x: Tensor) -> Tensor:
    first = do("getitem", operator.getitem, h, (slice(None), slice(0, 1)))
    order = do("tensor", torch.tensor, [2, 0, 1])
    return do("add", operator.add, do("getitem", operator.getitem, x, (slice(None), order)), first)


@step
def norm(script: Any, h: Tensor, x: Tensor) -> Tensor:
    length = do("norm", torch.linalg.norm, h)
    h = do("div", operator.truediv, h, do("add", operator.add, length, 1.0))
    return do("layer_norm", F.layer_norm, h, (4,))


@step
def dropping(script: Any, h: Tensor, x: Tensor) -> Tensor:
    return do("dropout", F.dropout, h, 0.5, script.training)


@step
def contraction(script: Any, h: Tensor, x: Tensor) -> Tensor:
    return do("matmul", operator.matmul, do("einsum", torch.einsum, "bij,bkj->bik", h, x), x)


@step
def aten(script: Any, h: Tensor, x: Tensor) -> Tensor:
    h = do("relu", torch.ops.aten.relu, do("sigmoid", torch.sigmoid, h))
    return do("softmax", torch.ops.aten.softmax.int, h, -1)


@step
def comparisons(script: Any, h: Tensor, x: Tensor) -> Tensor:
    rest = do("remainder", operator.mod, h, 2.0)
    whole = do("floor_divide", operator.floordiv, do("long", Tensor.long, do("mul", operator.mul, x, 3.0)), 2)
    both = do("bitwise_and", operator.and_, do("gt", operator.gt, rest, 1.0), do("eq", operator.eq, whole, 0))
    return do("where", torch.where, both, rest, do("add", reflected(operator.add), whole, 0.1))


@step
def spectrum(script: Any, h: Tensor, x: Tensor) -> Tensor:
    return do("sub", operator.sub, do("real", lambda tensor: tensor.real, do("fft", torch.fft.fft, h)), x)


@step
def detaching(script: Any, h: Tensor, x: Tensor) -> Tensor:
    return do("add", operator.add, do("mul", operator.mul, do("detach", Tensor.detach, h), 0.5), x)


@step
def without_gradients(script: Any, h: Tensor, x: Tensor) -> Tensor:
    with torch.no_grad():
        mean = do("mean", Tensor.mean, h)
    return do("sub", operator.sub, h, mean)


@step
def reshaping(script: Any, h: Tensor, x: Tensor) -> Tensor:
    flat = do("reshape", Tensor.reshape, h, h.shape[0], -1)
    return do("mul", operator.mul, do("view", Tensor.view, flat, h.size()), 1.0 / h.dim())


def gate(h: Tensor, x: Tensor) -> Tensor:
    """Stand in for a helper function that a forward calls."""
    return do("mul", operator.mul, h, do("sigmoid", Tensor.sigmoid, x))


@step
def helper_function(script: Any, h: Tensor, x: Tensor) -> Tensor:
    return gate(gate(h, x), h)


@step
def in_place(script: Any, h: Tensor, x: Tensor) -> Tensor:
    own = do("mul", operator.mul, h, 1.5)
    own = do("add_", operator.iadd, own, x)
    do("relu_", Tensor.relu_, own)
    return own


@step
def in_place_by_option(script: Any, h: Tensor, x: Tensor) -> Tensor:
    own = do("add", operator.add, h, 0.1)
    do("relu", F.relu, own, inplace=True)
    return own


@step
def writing_a_part(script: Any, h: Tensor, x: Tensor) -> Tensor:
    own = do("mul", operator.mul, h, 0.9)
    do("setitem", operator.setitem, own, (slice(None), 0), do("getitem", operator.getitem, x, (slice(None), 1)))
    do("setitem", operator.setitem, own, (0, -1), 0.25)
    return own


@step
def writing_out(script: Any, h: Tensor, x: Tensor) -> Tensor:
    memory = do("zeros", torch.zeros, SHAPE, dtype=h.dtype)
    do("mul", torch.mul, do("detach", Tensor.detach, h), 2.0, out=memory)
    return do("add", operator.add, x, memory)


@step
def writing_under_a_view(script: Any, h: Tensor, x: Tensor) -> Tensor:
    own = do("add", operator.add, h, 0.5)
    view = do("getitem", operator.getitem, own, (slice(None), slice(0, 1)))
    do("mul_", Tensor.mul_, own, 0.5)
    return do("add", operator.add, own, view)


@step
def writing_through_a_view(script: Any, h: Tensor, x: Tensor) -> Tensor:
    own = do("add", operator.add, h, 0.5)
    do("mul_", Tensor.mul_, do("getitem", operator.getitem, own, 0), 0.5)
    return own


def _segment(reentrant: bool) -> Step:
    def run(script: Any, h: Tensor, x: Tensor) -> Tensor:
        def inside(y: Tensor) -> Tensor:
            y = do("softmax", F.softmax, y, dim=-1)
            return do("add", operator.add, do("mul", operator.mul, y, 2.0), gate(y, y))

        return segment(inside, h, reentrant)

    return run


STEPS |= {"checkpointed": _segment(False), "checkpointed_reentrant": _segment(True)}
