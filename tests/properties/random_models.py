"""Random models as plain data: a `Node` describes a module, and `build` builds it, always the same from one seed."""

from __future__ import annotations

import dataclasses
import itertools
import random
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from tests.properties import composites, containers, memories, modules, scripts
from tests.properties.steps import STEPS, WRITING

# Leaves whose output is not needed in backward, so that it may be overwritten in place.
FRESH = ("linear", "linear", "linear", "frozen", "conv", "layernorm", "batchnorm", "lazy", "parametrized", "foreign")
PLAIN = (*FRESH, "dropout", "dropout", "relu", "gelu", "identity", "tripwire", "watched")
LEAVES = (*PLAIN, "embedding", "lstm", "attention")
UNSAFE_IN_CHECKPOINT = ("batchnorm", "lazy", "keeper", "buffer_written", "buffer_replaced")
FORMS = ("tuple", "list", "dict", "ordered", "dataclass", "named", "nested")
CALLERS = ("options", "keyword_only", "variadic", "by_name", "direct")
WRAPPERS = ("residual", "repeat", "recursive", "pack", "pack", *CALLERS)
WRITERS = ("in_place", "in_place", "mutated", "reusing")
MEMORIES = ("remembering", "remembering", "remembering", "writer", "writer", "twice", "twice", "striding", "keeper")
# Modules that are in a reference cycle even without hooks.
CYCLIC = ("parametrized", "foreign")


@dataclasses.dataclass(frozen=True)
class Node:
    """One module of a model."""

    kind: str
    children: tuple[Node, ...] = ()
    option: Any = None

    def __repr__(self) -> str:
        shown = "+".join(self.option[0]) + " tied" * self.option[1] if self.kind == "script" else self.option
        option = "" if self.option is None else f":{shown}"
        inside = f"({', '.join(map(repr, self.children))})" if self.children else ""
        return f"{self.kind}{option}{inside}"

    def kinds(self) -> set[str]:
        """Return every kind in this node and below, including the steps of a script."""
        steps = self.option[0] if self.kind == "script" else ()
        return {self.kind, *steps}.union(*(child.kinds() for child in self.children))


@dataclasses.dataclass(frozen=True)
class Model:
    """A whole model, as plain data."""

    body: Node
    packed: bool
    train: bool
    double: bool
    seed: int

    def build(self) -> composites.Root:
        """Build the model, the same each time, without changing the global random generator's state."""
        state = torch.get_rng_state()
        torch.default_generator.manual_seed(self.seed)
        root = composites.Root(_build(self.body, []), self.packed).train(self.train)
        torch.set_rng_state(state)
        return root.double() if self.double else root

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.double else torch.float32

    def has(self, *kinds: str) -> bool:
        return not self.body.kinds().isdisjoint(kinds)


def random_model(source: random.Random, scripts: bool = False, memories: bool = False) -> Model:
    """Draw a model, with scripts in it or not, and with modules that depend on the identity of values or not."""
    body = Growth(source, source.choice((1, 2, 3, 4, 6, 8)), scripts, memories).node(safe=False)
    while memories and not body.kinds().intersection(MEMORIES):
        body = Growth(source, source.choice((1, 2, 3, 4, 6, 8)), scripts, memories).node(safe=False)
    while scripts and "script" not in body.kinds():
        body = Growth(source, source.choice((1, 2, 3, 4)), scripts).node(safe=False)
    return Model(body, source.random() < 0.3, source.random() < 0.5, source.random() < 0.5, source.randrange(10**6))


class Growth:
    """Draws nodes until the budget of modules is spent."""

    def __init__(self, source: random.Random, budget: int, scripts: bool, memories: bool = False) -> None:
        self.source, self.budget, self.scripts, self.memories = source, budget, scripts, memories
        self.finished: list[Node] = []

    def node(self, safe: bool) -> Node:
        """Draw a node with its children; `safe` means inside a checkpointed segment."""
        self.budget -= 1
        if self.scripts and self.source.random() < 0.4:
            if not safe and self.source.random() < 0.2:
                inner = self._finish(self._script(safe=True))
                return self._finish(Node("segment", (inner,), self.source.random() < 0.5))
            return self._finish(self._script(safe))
        if self.memories and self.source.random() < 0.4:
            return self._finish(self._memory(safe))
        return self._finish(self._draw(safe))

    def _script(self, safe: bool) -> Node:
        steps = [name for name in STEPS if not (safe and (name in UNSAFE_IN_CHECKPOINT or "checkpointed" in name))]
        weights = [2 if name in WRITING else 1 for name in steps]
        drawn = self.source.choices(steps, weights, k=self.source.choice((1, 2, 3, 5)))
        children = tuple(self.node(safe) for _ in range(self.source.choice((0, 0, 1, 2))) if self.budget > 0)
        if children and self.source.random() < 0.8:
            drawn.insert(self.source.randrange(len(drawn) + 1), "children")
        return Node("script", children, (tuple(drawn), self.source.random() < 0.3))

    def _draw(self, safe: bool) -> Node:
        draw = self.source.random()
        if self.budget <= 0 or draw < 0.15:
            return self._leaf(safe)
        if draw < 0.25 and not safe and self.finished:
            return self._shared()
        if draw < 0.40:
            return Node("chain", self._several(safe))
        if draw < 0.50:
            return Node("sequential", self._steps(safe))
        if draw < 0.56:
            return Node("branches", self._several(safe))
        if draw < 0.62 and not safe:
            return Node("segment", (self.node(safe=True),), self.source.random() < 0.5)
        if draw < 0.65:
            return Node("unused", (self.node(safe),))
        if draw < 0.76:
            return self._memory(safe)
        if draw < 0.86:
            return self._writer(safe)
        return self._wrapper(safe)

    def _finish(self, node: Node) -> Node:
        if node.kind != "shared":
            self.finished.append(node)
        return node

    def _leaf(self, safe: bool, kinds: tuple[str, ...] = LEAVES) -> Node:
        return Node(self.source.choice([kind for kind in kinds if not (safe and kind in UNSAFE_IN_CHECKPOINT)]))

    def _shared(self) -> Node:
        writers = ("mutator", "reuser", "relu_inplace", "stride")
        usable = [index for index, node in enumerate(self.finished) if node.kind not in writers]
        return Node("shared", option=self.source.choice(usable)) if usable else self._leaf(safe=False)

    def _several(self, safe: bool) -> tuple[Node, ...]:
        return tuple(self.node(safe) for _ in range(self.source.choice((1, 2, 2, 3))))

    def _steps(self, safe: bool) -> tuple[Node, ...]:
        steps: list[Node] = []
        for _ in range(self.source.choice((1, 2, 3))):
            self.budget -= 1
            if self.source.random() < 0.4:
                steps += [self._finish(self._leaf(safe, FRESH)), self._finish(Node("relu_inplace"))]
            elif self.source.random() < 0.2 and self.budget > 0:
                steps.append(self._finish(Node("residual", (self.node(safe),))))
            else:
                steps.append(self._finish(self._leaf(safe, PLAIN)))
        return tuple(steps)

    def _writer(self, safe: bool) -> Node:
        kind = self.source.choice(WRITERS)
        self.budget -= 1
        if kind == "mutated":
            silent, rereads = self.source.choice(((False, False), (False, True), (True, True)))
            return Node("mutated", (self._finish(Node("mutator", option=silent)),), rereads)
        if kind == "reusing" and not safe:
            return Node("reusing", (self._finish(Node("reuser")),))
        target = self._finish(self._leaf(safe, FRESH))
        if self.source.random() < 0.3:
            form = self.source.choice(("transpose", "slice", "view"))
            target = self._finish(Node("viewing", (target,), form))
        return Node("in_place", (target,), self.source.choice(list(composites.OVERWRITE)))

    def _memory(self, safe: bool, kinds: tuple[str, ...] = MEMORIES) -> Node:
        """Draw a module that depends on the identity of its arguments."""
        kind = self.source.choice([kind for kind in kinds if not (safe and kind in UNSAFE_IN_CHECKPOINT)])
        self.budget -= 1
        if kind == "remembering":
            option = self.source.choice(containers.KINDS), self.source.random() < 0.3
            return Node(kind, tuple(self._layer(safe) for _ in range(self.source.choice((1, 2, 2, 3)))), option)
        if kind == "writer":
            how, what = self.source.choice(list(containers.WRITES)), self.source.choice(("new", "given", "returned"))
            given = self.source.choice(containers.KINDS), how, what
            return Node(kind, option=(*given, self.source.random() < 0.4, self.source.random() < 0.3))
        if kind == "twice":
            return Node(kind, option=self.source.choice(("positional", "keyword", "list")))
        return Node(kind, (self._finish(Node("stride")),)) if kind == "striding" else Node(kind)

    def _layer(self, safe: bool) -> Node:
        """Draw a child for a module that passes on a container."""
        if self.budget > 0 and self.source.random() < 0.3:
            return self.node(safe)
        return self._finish(self._memory(safe, ("writer", "writer", "writer", "writer", "remembering")))

    def _wrapper(self, safe: bool) -> Node:
        kind = self.source.choice(WRAPPERS)
        options = {
            "repeat": self.source.choice((2, 3)),
            "pack": self.source.choice(FORMS),
            "options": self.source.random() < 0.5,
        }
        return Node(kind, (self.node(safe),), options.get(kind))


def aliasing(root: nn.Module) -> set[nn.Module]:
    """Return the modules that write into their argument, and whose parent then uses that argument."""
    return {module.writer for module in root.modules() if isinstance(module, composites.Mutated) and module.rereads}


def inside_reentrant(root: nn.Module) -> set[nn.Module]:
    """Return the modules inside a reentrant checkpointed segment."""
    segments = [module for module in root.modules() if isinstance(module, composites.Segment) and module.reentrant]
    return {module for segment in segments for module in segment.inner.modules()}


def overwritten(root: nn.Module) -> set[nn.Module]:
    """Return the modules whose result is overwritten."""
    found: set[nn.Module] = set()
    for module in root.modules():
        if isinstance(module, composites.InPlace):
            found.update(module.target.modules())
        if type(module) is nn.Sequential:
            steps = list(module)
            found.update(one for one, after in itertools.pairwise(steps) if getattr(after, "inplace", False))
    return found


def _build(node: Node, finished: list[nn.Module]) -> nn.Module:
    if node.kind == "shared":
        return finished[node.option]
    children = [_build(child, finished) for child in node.children]
    module = LEAF[node.kind]() if node.kind in LEAF else _composite(node, children)
    finished.append(module)
    return module


def _composite(node: Node, children: list[nn.Module]) -> nn.Module:
    if node.kind == "script":
        return scripts.Script(*children, steps=node.option[0], tied=node.option[1])
    if node.option is not None:
        return COMPOSITE[node.kind](*children, node.option)
    return COMPOSITE[node.kind](*children)


def _frozen() -> nn.Module:
    return nn.Linear(4, 4).requires_grad_(False)


def _parametrized() -> nn.Module:
    linear = nn.Linear(4, 4)
    parametrize.register_parametrization(linear, "weight", modules.Scale())
    return linear


def foreign_forward(self: nn.Linear, input: Tensor) -> Tensor:
    """Stand in for a forward that another library put on an instance."""
    return type(self).forward(self, input) * 0.5


def _foreign() -> nn.Module:
    linear = nn.Linear(4, 4)
    linear.forward = types.MethodType(foreign_forward, linear)
    return linear


def foreign_hook(module: nn.Module, args: Any, output: Any) -> None:
    """Stand in for another library's forward hook, which changes nothing."""


def foreign_pre_hook(module: nn.Module, args: Any) -> None:
    """Stand in for another library's forward pre-hook, which changes nothing."""


def foreign_backward_hook(module: nn.Module, grad_output: Any) -> None:
    """Stand in for another library's backward hook, which changes nothing."""


def _watched() -> nn.Module:
    linear = nn.Linear(4, 4)
    linear.register_forward_hook(foreign_hook)
    linear.register_forward_pre_hook(foreign_pre_hook)
    linear.register_full_backward_pre_hook(foreign_backward_hook)
    return linear


LEAF: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(4, 4),
    "frozen": _frozen,
    "conv": lambda: nn.Conv1d(3, 3, 1),
    "layernorm": lambda: nn.LayerNorm(4),
    "batchnorm": lambda: nn.BatchNorm1d(3),
    "dropout": lambda: nn.Dropout(0.5),
    "relu": nn.ReLU,
    "relu_inplace": lambda: nn.ReLU(inplace=True),
    "gelu": nn.GELU,
    "identity": nn.Identity,
    "tripwire": modules.Tripwire,
    "embedding": lambda: nn.Embedding(5, 4),
    "lstm": lambda: nn.LSTM(4, 4, batch_first=True),
    "attention": lambda: nn.MultiheadAttention(4, 2, batch_first=True),
    "lazy": lambda: nn.LazyLinear(4),
    "parametrized": _parametrized,
    "foreign": _foreign,
    "watched": _watched,
    "reuser": modules.Reuser,
    "stride": memories.Stride,
    "keeper": memories.Keeper,
}
COMPOSITE: dict[str, Callable[..., nn.Module]] = {
    "mutator": modules.Mutator,
    "writer": memories.Writer,
    "remembering": memories.Remembering,
    "twice": memories.Twice,
    "striding": memories.Striding,
    "residual": composites.Residual,
    "chain": composites.Chain,
    "sequential": nn.Sequential,
    "branches": composites.Branches,
    "repeat": composites.Repeat,
    "recursive": composites.Recursive,
    "pack": composites.Pack,
    "options": composites.Options,
    "keyword_only": composites.KeywordOnly,
    "variadic": composites.Variadic,
    "by_name": composites.ByName,
    "direct": composites.Direct,
    "viewing": composites.Viewing,
    "in_place": composites.InPlace,
    "mutated": composites.Mutated,
    "reusing": composites.Reusing,
    "segment": composites.Segment,
    "unused": composites.Unused,
}
