"""Cost of attaching and detaching hooks with hookline and with torch, of the import, and of starting the command line.

python benchmarks/setup.py            prints the tables and writes them to benchmarks/setup.txt
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
from baseline import DEPTH, model_of, raw_hooks, sample, shadow, unshadow
from harness import compare, measure, publish, ratios, report, usual
from torch import nn

import hookline as hl

SOURCE = Path(hl.__file__).parent.parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(SOURCE), "PYTHONDONTWRITEBYTECODE": ""}  # Bytecode is cached.
BLOCKS = usual(1250, quick=20)  # Each has eight modules: 10,000 in all, of which 1,250 are hooked.


def set_up(model: nn.Sequential) -> dict[str, list[float]]:
    """Compare attaching and detaching without a forward."""

    def raw() -> None:
        for handle in raw_hooks(model, {}):
            handle.remove()

    def by_hand() -> None:
        unshadow(shadow(model, {}))

    def hookline() -> None:
        with hl.capture(model, nn.Linear):
            pass

    def hooks() -> None:
        hooks = hl.Hooks(model)
        hooks.capture(nn.Linear)
        hooks.remove()

    resting = hl.Hooks(model, active=False)
    resting.capture(nn.Linear)

    def switch() -> None:
        resting.activate()
        resting.deactivate()

    return compare(
        {
            "raw register and remove": raw,
            "forwards shadowed by hand": by_hand,
            "hookline, with hl.capture(...)": hookline,
            "hookline, Hooks, capture, remove": hooks,
            "hookline, activate and deactivate": switch,
        }
    )


def one_shot(model: nn.Sequential) -> dict[str, list[float]]:
    """Compare attaching, running and detaching."""
    x = sample()

    def with_raw(attach: Callable[[], list[torch.utils.hooks.RemovableHandle]]) -> Callable[[], None]:
        def run() -> None:
            handles = attach()
            model(x)
            for handle in handles:
                handle.remove()

        return run

    def by_hand() -> None:
        shadowed = shadow(model, {})
        model(x)
        unshadow(shadowed)

    def within(block: Callable[[], hl.Hooks]) -> Callable[[], None]:
        def run() -> None:
            with block():
                model(x)

        return run

    middle = str(DEPTH)
    return compare(
        {
            "bare": lambda: model(x),
            f"raw torch hooks, all {DEPTH}, detached": with_raw(lambda: raw_hooks(model, {})),
            f"raw torch hooks, all {DEPTH}, live": with_raw(lambda: raw_hooks(model, {}, detach=False)),
            f"forwards shadowed by hand, all {DEPTH}": by_hand,
            f"hookline, all {DEPTH}": within(lambda: hl.capture(model, nn.Linear)),
            "raw torch hooks, 1": with_raw(lambda: [model[DEPTH].register_forward_hook(lambda *_: None)]),
            "hookline, 1": within(lambda: hl.capture(model, middle)),
            "hookline, patch 1": within(lambda: hl.patch(model, {middle: 0.0})),
        }
    )


class Block(nn.Module):
    """Eight modules, including the block itself."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(2)
        self.attn = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
        self.mlp = nn.Sequential(nn.Linear(2, 2), nn.ReLU())


def large_model() -> dict[str, list[float]]:
    """Return the seconds of attaching and detaching by pattern on a model with many modules."""
    model = nn.Module()
    model.h = nn.ModuleList(Block() for _ in range(BLOCKS))

    def raw() -> None:
        chosen = [(name, module) for name, module in model.named_modules() if name.endswith(".mlp")]
        for handle in [module.register_forward_hook(lambda *_: None) for _, module in chosen]:
            handle.remove()

    def hookline(*where: hl.hooks.Where) -> Callable[[], None]:
        def run() -> None:
            with hl.capture(model, *where):
                pass

        return run

    exact = [f"h.{number}.mlp" for number in range(BLOCKS)]
    return measure(
        {
            "raw: named_modules, register and remove": raw,
            "named_modules alone": lambda: list(model.named_modules()),
            'hookline, "h.*.mlp"': hookline("h.*.mlp"),
            'hookline, "**.mlp"': hookline("**.mlp"),
            f"hookline, {BLOCKS:,} exact names": hookline(exact),
            'hookline, "h.7.mlp"': hookline("h.7.mlp"),
            'hookline, sites("h.*.mlp")': lambda: hl.sites(model, "h.*.mlp"),
        },
        rounds=20,
        repeat=2,
    )


IMPORT = """
import json, sys, time
def took(name, part=None):
    start = time.process_time(), time.perf_counter()
    module = __import__(name)
    if part is not None:
        getattr(module, part)
    return time.process_time() - start[0], time.perf_counter() - start[1]
times = [took("torch")]
before = set(sys.modules)
times += [took("hookline"), took("hookline", "capture")]
new = {name.partition(".")[0] for name in set(sys.modules) - before} - sys.stdlib_module_names - {"hookline"}
print(json.dumps([times, sorted(new)]))
"""


def importing() -> str:
    """Time `import hookline` and its first use after `import torch`, each time in a new interpreter."""
    found = []
    for _ in range(usual(15, quick=1) + 1):  # The first run may have to compile bytecode.
        done = subprocess.run([sys.executable, "-c", IMPORT], env=ENVIRONMENT, capture_output=True, check=True)
        found.append(json.loads(done.stdout))
    lines = ["import, in a new interpreter; milliseconds", f"{'':44s} {'processor':>9s} {'wall':>9s}"]
    for position, name in enumerate(("import torch", "import hookline, after torch", "first use of hookline.capture")):
        processor, wall = (1000 * statistics.median(one[0][position][kind] for one in found[1:]) for kind in (0, 1))
        lines.append(f"{name:44s} {processor:9.1f} {wall:9.1f}")
    lines.append(f"packages that come with it, besides torch's own: {', '.join(found[0][1]) or 'none'}")
    return "\n".join(lines) + "\n"


def starting() -> dict[str, list[float]]:
    """Return the seconds of processor time that Python and the command line take to start and to end."""
    asked = {"_HOOKLINE_COMPLETE": "complete_bash", "COMP_WORDS": "hookline show --st", "COMP_CWORD": "2"}

    def python(*arguments: str, **variables: str) -> Callable[[], object]:
        command, environment = [sys.executable, *arguments], {**ENVIRONMENT, **variables}
        return lambda: subprocess.run(command, env=environment, capture_output=True, check=True)

    def of_children() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    return measure(
        {
            "python -c pass": python("-c", "pass"),
            "python -c 'import typer'": python("-c", "import typer"),
            "hookline --help": python("-m", "hookline", "--help"),
            "hookline harvest --help": python("-m", "hookline", "harvest", "--help"),
            "hookline show --st, and TAB": python("-m", "hookline", **asked),
        },
        rounds=15,
        repeat=1,
        clock=of_children,
    )


def tables() -> Iterator[str]:
    """Measure everything."""
    model = model_of(DEPTH)
    with torch.no_grad():
        yield report(f"attach and detach {DEPTH}, ratio to torch's own", set_up(model))
        yield report("one shot: attach, run, detach, no_grad; ratio to the bare forward", one_shot(model))
    seconds = large_model()
    title = f"attach and detach {BLOCKS:,} of {8 * BLOCKS:,} modules, ratio to raw hooks"
    yield report(title, ratios(seconds), seconds)
    yield importing()
    seconds = starting()
    yield report("start of the command line, ratio to Python's own", ratios(seconds), seconds)


if __name__ == "__main__":
    publish(__file__, tables)
