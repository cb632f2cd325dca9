"""Cost of hooks on a compiled model, and what makes torch recompile.

python benchmarks/compile.py            prints the tables and writes them to benchmarks/compile.txt
"""

from __future__ import annotations

import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.nn.functional as F
from harness import QUICK, compare, publish, report, usual
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

import hookline as hl

DEPTH = 6
TIMES = usual(100, 10)
uncompiled: list[str] = []  # One entry for each block that ran in Python instead of in a graph.


class Block(nn.Module):
    """Attention and an MLP, each behind a norm, as in GPT-2."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            uncompiled.append("block")
        parts = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*parts.unbind(), is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.mlp(x)


class Transformer(nn.Module):
    """A small language model."""

    def __init__(self, width: int, depth: int, words: int = 256) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.h = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, words)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.h:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def transformer(width: int, depth: int) -> Transformer:
    """Return a model with its own class and code: torch caches graphs per code object, so models would share them."""
    code = Transformer.forward.__code__
    own = FunctionType(code.replace(co_filename=f"{code.co_filename}.{next(_numbers)}"), globals())
    torch.manual_seed(0)
    return type("Transformer", (Transformer,), {"forward": own})(width, depth).eval()  # type: ignore[no-any-return]


_numbers = iter(range(1000))
Setting = Callable[[Transformer], object]


def raw_capture(copies: bool) -> Setting:
    """Store the output of every block with torch hooks, registered before compiling: torch ignores later hooks."""

    def register(model: Transformer) -> dict[int, Tensor]:
        kept: dict[int, Tensor] = {}
        for number, block in enumerate(model.h):

            def keep(_module: nn.Module, _args: object, output: Tensor, number: int = number) -> None:
                kept[number] = output.detach().clone() if copies else output.detach()

            block.register_forward_hook(keep)
        return kept

    return register


def raw_patch(model: Transformer) -> None:
    """Replace one word by zeros after one block."""

    def put(_module: nn.Module, _args: object, output: Tensor) -> Tensor:
        output = output.clone()
        output[:, -1] = 0.0
        return output

    model.h[2].register_forward_hook(put)


def hooks(hook: Callable[[hl.Hooks], object]) -> Setting:
    """Return a setting that adds hooks and leaves them on."""

    def add(model: Transformer) -> hl.Hooks:
        made = hl.Hooks(model)
        hook(made)
        return made

    return add


def costs(width: int, words: int) -> str:
    """Time forwards of a compiled model after warm-up, each contender on its own model."""
    ids = torch.randint(256, (1, words))
    settings: dict[str, Setting] = {
        "compiled, bare": lambda model: None,
        "raw torch hooks, every block, references": raw_capture(copies=False),
        "raw torch hooks, every block, copies": raw_capture(copies=True),
        "raw torch hook, patch 1 word": raw_patch,
        "hookline, capture 1 block": hooks(lambda made: made.capture("h.2")),
        "hookline, capture every block": hooks(lambda made: made.capture("h.*")),
        "hookline, patch 1 word": hooks(lambda made: made.patch({"h.2[:, -1]": 0.0})),
    }
    alive, runs = [], {}
    for name, setting in settings.items():
        model = transformer(width, DEPTH)
        compiled = torch.compile(model, fullgraph=True)
        alive.append((setting(model), compiled))
        runs[name] = lambda compiled=compiled: compiled(ids)
    bare = alive[0][1]
    eager = transformer(width, DEPTH)

    def one_shot(*where: str) -> Callable[[], object]:
        def run() -> None:
            with hl.capture(bare, *where):
                bare(ids)

        return run

    runs["attach, capture 1 block, detach"] = one_shot("h.2")
    runs["attach, capture every block, detach"] = one_shot("h.*")
    runs["not compiled, bare"] = lambda: eager(ids)
    with torch.no_grad():
        ratios = compare(runs, rounds=60, repeat=5)
    return report(
        f"a {DEPTH}-layer transformer of width {width} on {words} words, inductor, no_grad; ratio to compiled", ratios
    )


class Trial:
    """A small compiled model that counts how often torch compiles it."""

    def __init__(self, depth: int = 4, blocks_only: bool = False, **options: Any) -> None:
        torch._dynamo.reset()
        self.model: Any = transformer(16, depth)
        self.ids = torch.randint(256, (1, 8))
        self.backend = CompileCounterWithBackend("eager")
        if blocks_only:
            for block in self.model.h:
                block.compile(backend=self.backend, **options)
            self.call: Any = self.model
        else:
            self.call = torch.compile(self.model, backend=self.backend, **options)
        counters.clear()

    def count(self, event: Callable[[Trial], object]) -> tuple[int, int, int]:
        """Return how many graphs and graph breaks an event caused, and how many blocks ran in Python."""
        before = self.backend.frame_count
        counters["graph_break"].clear()
        uncompiled.clear()
        event(self)
        return self.backend.frame_count - before, sum(counters["graph_break"].values()), len(uncompiled)


def again(block: Callable[[Trial, int], hl.Hooks], times: int = TIMES) -> Callable[[Trial], None]:
    """Return an event that enters a block, calls the model, leaves the block and calls the model, many times."""

    def event(trial: Trial) -> None:
        for time in range(times):
            with block(trial, time):
                trial.call(trial.ids)
            trial.call(trial.ids)

    return event


def switch(trial: Trial) -> None:
    made = hl.Hooks(trial.call)
    made.capture("h.*")
    for _ in range(TIMES):
        trial.call(trial.ids)
        made.deactivate()
        trial.call(trial.ids)
        made.activate()
    made.remove()


def lengths(trial: Trial) -> None:
    for length in range(2, 12):
        hl.run(trial.call, torch.randint(256, (13, length)), capture="h.*")


def lengths_bare(trial: Trial) -> None:
    for length in range(2, 12):
        trial.call(torch.randint(256, (13, length)))


def caches(trial: Trial) -> None:
    for _ in range(TIMES):
        _, clean = hl.run(trial.call, trial.ids, capture="h.1")
        hl.run(trial.call, trial.ids, patch=clean)


def new_direction(trial: Trial, _time: int) -> hl.Hooks:
    direction = torch.randn(16)
    return hl.edit(trial.call, "h.1", lambda value: value + direction)


def new_factor(trial: Trial, time: int) -> hl.Hooks:
    factor = time / 4
    return hl.edit(trial.call, "h.1", lambda value: value * factor)


def new_count(trial: Trial, time: int) -> hl.Hooks:
    return hl.edit(trial.call, "h.1", lambda value: value * time)


def every_block(trial: Trial, _time: int) -> hl.Hooks:
    return hl.capture(trial.call, "h.*")


def hooked_first(trial: Trial) -> None:
    with hl.capture(trial.model, "h.*"):
        trial.call(trial.ids)


def capture(**options: Any) -> Callable[[Trial], None]:
    return again(lambda trial, _: hl.capture(trial.call, "h.1", **options), 1)


EVENTS: list[tuple[str, Callable[[Trial], None], dict[str, Any]]] = [
    ("the first call of the model, bare", lambda trial: trial.call(trial.ids), {"called": False}),
    ("the first call, hooks on it already", hooked_first, {"called": False}),
    ("a block that captures, first time", again(every_block, 1), {}),
    ("the same, 100 times", again(every_block), {}),
    ("hooks that stay, off and on 100 times", switch, {}),
    ("patch: 100 numbers", again(lambda trial, time: hl.patch(trial.call, {"h.1": time / 4})), {}),
    ("patch: 100 tensors", again(lambda trial, _: hl.patch(trial.call, {"h.1": torch.randn(1, 8, 16)})), {}),
    ("capture, patch what was captured, 100 times", caches, {}),
    ("edit: 100 closures over tensors", again(new_direction), {}),
    ("edit: 100 closures over floats", again(new_factor), {}),
    ("edit: 100 closures over integers", again(new_count), {}),
    ("skip, 100 times", again(lambda trial, _: hl.skip(trial.call, "h.1")), {}),
    ("each of 4 blocks in turn", again(lambda trial, time: hl.capture(trial.call, f"h.{time}"), 4), {}),
    ("each of 12 blocks in turn", again(lambda trial, time: hl.capture(trial.call, f"h.{time}"), 12), {"depth": 12}),
    (
        "the same, blocks compiled, not the model",
        again(lambda trial, time: hl.capture(trial.call, f"h.{time}"), 12),
        {"depth": 12, "blocks_only": True},
    ),
    ("10 lengths, bare", lengths_bare, {"called": False}),
    ("10 lengths, captured", lengths, {"called": False}),
    ("10 lengths, captured, dynamic=True", lengths, {"called": False, "dynamic": True}),
    ('capture(keep="all")', capture(keep="all"), {}),
    ("capture(detach=False)", capture(detach=False), {}),
    ("capture(transform=..., with_call=True)", capture(transform=lambda value, call: value, with_call=True), {}),
    ("a call number, h.1#0", again(lambda trial, _: hl.capture(trial.call, "h.1#0"), 1), {}),
    ("a function, h.1/scaled_dot_…", again(lambda trial, _: hl.capture(trial.call, "h.1/scaled_dot_*"), 1), {}),
    ("capture(stop=True)", capture(stop=True), {}),
]


def recompiles() -> str:
    """Return a table of the events that make dynamo compile again."""
    columns = ("", "graphs made", "graph breaks", "blocks run uncompiled")
    title = "what torch compiles, and when; where the model had run bare before, that graph is not counted"
    lines = [title, "{:44s} {:>11s} {:>12s} {:>21s}".format(*columns)]
    for name, event, options in EVENTS[:: usual(1, 8)]:
        called = options.get("called", True)
        trial = Trial(**{key: value for key, value in options.items() if key != "called"})
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            if called:
                trial.call(trial.ids)
            lines.append("{:44s} {:11d} {:12d} {:21d}".format(name, *trial.count(event)))
    return "\n".join(lines) + "\n"


def tables() -> Iterator[str]:
    """Count, then measure."""
    yield recompiles()
    torch._dynamo.reset()
    if not any(map(shutil.which, ("gcc", "c++", "clang"))):
        yield "costs: not measured, inductor found no C++ compiler here\n"
    elif not QUICK:  # Compiling takes a minute or more.
        for width, words in ((128, 64), (384, 128)):
            yield costs(width, words)


if __name__ == "__main__":
    publish(__file__, tables)
