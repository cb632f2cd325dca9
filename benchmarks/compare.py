"""How often does `hl.compare` find a planted fault, does it raise false alarms, and how many forwards does it take?

The faults are those of tests/support/planted_faults.py. The hints were written while looking at those from 0 to 215;
the ones here come after them.
"""

from __future__ import annotations

import copy
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from harness import publish, usual
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent))

import hookline as hl
from hookline._tables import Table
from tests.support import planted_faults
from tests.support.planted_faults import FAULTS, SAME, judged, planted, unfaulted

FIRST = 216
WITH_OTHER_GRADIENTS = ("a_single_row", "merged_adapters")  # Other rows; adapters that are not used.


def faults(count: int) -> Table:
    """Count for each kind of fault how many were found, and how many had the right hint."""
    made, found, explained = Counter[str](), Counter[str](), Counter[str]()
    for number in range(FIRST, FIRST + count):
        fault = planted(number)
        is_found, is_explained = judged(fault, hl.compare(fault.a, fault.b, run=fault.run))
        made[fault.kind] += 1
        found[fault.kind] += is_found
        explained[fault.kind] += is_explained
    rows: list[tuple[object, ...]] = [(kind, made[kind], found[kind], explained[kind]) for kind in FAULTS]
    rows.append(("all", count, sum(found.values()), sum(explained.values())))
    return Table(("fault", "planted", "module named", "right hint"), rows, "planted faults", names="fault")


def faults_in_bfloat16(count: int) -> Table:
    """Count those that are found in a copy in bfloat16, if they change the output 4 times as much as rounding does."""
    made, found, explained = Counter[str](), Counter[str](), Counter[str]()
    for number in range(FIRST, FIRST + count):
        fault = planted(number)
        run_b = planted_faults.cast(fault.run, torch.bfloat16)
        right, faulty = (copy.deepcopy(model).bfloat16() for model in (fault.a, fault.b))
        outputs = [output_of(model, run) for model, run in ((fault.a, fault.run), (right, run_b), (fault.b, fault.run))]
        if (outputs[2] - outputs[0]).norm() < 4 * (outputs[1] - outputs[0]).norm():
            continue
        is_found, is_explained = judged(fault, hl.compare(fault.a, faulty, run=fault.run, run_b=run_b))
        made[fault.kind] += 1
        found[fault.kind] += is_found
        explained[fault.kind] += is_explained
    rows: list[tuple[object, ...]] = [(kind, made[kind], found[kind], explained[kind]) for kind in FAULTS if made[kind]]
    rows.append(("all", sum(made.values()), sum(found.values()), sum(explained.values())))
    return Table(("fault", "planted", "module named", "right hint"), rows, "planted faults in bfloat16", names="fault")


def output_of(model: nn.Module, run: dict[str, Any]) -> torch.Tensor:
    """Return the main tensor that a model returns."""
    torch.manual_seed(0)
    with torch.no_grad():
        return planted_faults.main_tensor(model(**run)).float()


def alarms(count: int) -> Table:
    """Count false alarms in each kind of pair without a fault."""
    made, wrong, in_gradients = Counter[str](), Counter[str](), Counter[str]()
    for number in range(count):
        pair = unfaulted(number)
        made[pair.kind] += 1
        wrong[pair.kind] += not hl.compare(pair.a, pair.b, **pair.options).ok
        if pair.kind not in WITH_OTHER_GRADIENTS:
            in_gradients[pair.kind] += not hl.compare(pair.a, pair.b, **pair.options, backward=squares).ok
    rows: list[tuple[object, ...]] = [
        (kind, made[kind], wrong[kind], "" if kind in WITH_OTHER_GRADIENTS else in_gradients[kind]) for kind in SAME
    ]
    rows.append(("all", count, sum(wrong.values()), sum(in_gradients.values())))
    header = ("pair", "pairs", "alarms", "alarms with gradients")
    return Table(header, rows, "pairs without a fault", names="pair")


def squares(output: Any) -> torch.Tensor:
    """Return a loss."""
    return planted_faults.main_tensor(output).float().square().mean()


def costs() -> Table:
    """Count the forwards of a comparison: calls of modules without children, as a multiple of those of one forward."""
    rows = []
    for name in ("llama", "bert", "t5", "residual_convnet")[-usual(4, 1) :]:
        a, run = planted_faults.model_and_inputs(name)
        one = calls(lambda a=a, run=run: a(**run))
        levels = max(path.count(".") + 1 for path, _ in a.named_modules() if path)
        half = {key: planted_faults.cast(run, torch.bfloat16)[key] for key in run}
        same, other = copy.deepcopy(a), copy.deepcopy(a).bfloat16()
        taken = [
            calls(lambda a=a, b=b, run=run, run_b=run_b: hl.compare(a, b, run=run, run_b=run_b)) / one
            for b, run_b in ((same, run), (other, half))
        ]
        rows.append((name, levels, *(f"{forwards:.1f}" for forwards in taken)))
    header = ("model", "nesting levels", "forwards, same dtype", "forwards, bfloat16")
    return Table(header, rows, "cost", names="model")


def times() -> Table:
    """Measure how long comparisons take, as multiples of a forward: the least of three, in turns."""
    torch.manual_seed(0)
    a = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=usual(12, 2), n_embd=usual(768, 48))).eval()
    ids = torch.randint(50257, (1, 64))
    b, half, odd = copy.deepcopy(a), copy.deepcopy(a).bfloat16(), copy.deepcopy(a)
    odd.__class__ = type("Odd", (type(a),), {"forward": with_other_logits})

    def forward() -> None:
        with torch.no_grad():
            a(ids)

    timed = {
        "a forward": forward,
        "the same weights": lambda: hl.compare(a, b, run=(ids,)),
        "bfloat16": lambda: hl.compare(a, half, run=(ids,)),
        "a fault between modules, with all hints tried": lambda: hl.compare(a, odd, run=(ids,)),
        "the same weights, with gradients": lambda: hl.compare(a, b, run=(ids,), backward=squares),
    }
    least = dict.fromkeys(timed, float("inf"))
    for _ in range(usual(3, 1)):
        for name, run in timed.items():
            start = time.process_time()
            run()
            least[name] = min(least[name], time.process_time() - start)
    rows = [(name, f"{taken / least['a forward']:.0f}") for name, taken in least.items()]
    return Table(("comparison", "forwards' time"), rows, f"time, GPT-2 of {usual(12, 2)} layers", names="comparison")


def with_other_logits(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Return what GPT-2 does, with a sine added to the logits."""
    output = transformers.GPT2LMHeadModel.forward(self, *args, **kwargs)
    output.logits = output.logits + output.logits.sin()
    return output


def calls(run: Any) -> int:
    """Return how many modules without children a function calls."""
    found = 0

    def count(module: nn.Module, inputs: Any) -> None:
        nonlocal found
        found += not any(True for _ in module.children())

    handle = nn.modules.module.register_module_forward_pre_hook(count)
    try:
        with torch.no_grad():
            run()
    finally:
        handle.remove()
    return found


def tables() -> Iterator[str]:
    """Measure everything."""
    number = usual(216, 6)
    for table in (faults(number), faults_in_bfloat16(number), alarms(usual(112, 3)), costs(), times()):
        yield f"{table.text(whole=True)}\n"


if __name__ == "__main__":
    publish(__file__, tables)
