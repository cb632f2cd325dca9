"""The tables of a run: short tables in Markdown, each task with quartiles, where a peer is ahead, and the answers."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

MODELS = {
    "mlp": "200 × (Linear(16, 16), ReLU), batch 1",
    "gpt2": "GPT-2, 12 layers of width 768, 1 × 32 tokens; the 12 blocks",
}
TASKS = {
    "one shot": "attach, capture all, detach",
    "attached": "capture all, set up before",
    "one": "attach, capture 1, detach",
    "patch": "attach, patch 1 by zeros, detach",
    "set-up": "attach to all and detach, no forward; ratio to raw",
    "gradients": "attach, gradients of all, detach; ratio to forward and backward",
    "stop": "attach, capture 1 at half depth, stop there",
}
QUESTIONS = {
    "in place": "Linear, then ReLU(inplace=True): the value kept is the Linear's own",
    "compiled": "hooked after the model was compiled and run: the value arrives",
    "as found": "after a capture, hooks, attributes and requires_grad are as before",
    "as found, error": "the same after an exception in the forward",
    "others": "a hook of somebody else, there before, still fires",
    "bare after": "bare forward of another model after the peer was used, ratio to before",
}

Results = Sequence[Mapping[str, Any]]


def text_of(results: Results) -> str:
    """Return all results of a run as text."""
    parts = [heading(results)]
    parts += [short(results, which) for which in MODELS]
    parts += ["the short table of the README\n" + for_readme(results)]
    parts += [task_table(results, which, task) for which in MODELS for task in TASKS if has(results, which, task)]
    parts += [behind(results), questions(results), notes(results)]
    return "\n".join(parts)


def sweeps_of(results: Results) -> str:
    """Return the tables of the sweeps, one for each peer."""
    method = (
        "A sweep over a GPT-2 of 12 layers and width 768: each cell patches the residual stream before one layer at\n"
        "one of 15 positions, from a clean prompt into a corrupted one, and measures a logit difference. Each peer\n"
        "runs in an environment and a process of its own, in turn with a loop with torch's hooks and with hookline.\n"
        "Ratios are to that loop in the same round, medians; processor time. The peers' clean run is not timed;\n"
        "that of hookline is.\n"
    )
    parts = [result["sweep"] if "sweep" in result else f"{result['peer']}: {result['failed']}\n" for result in results]
    return "\n".join([machine(results) + method, *parts, notes(results)])


def heading(results: Results) -> str:
    """Return the peers, the machine, the date and the method of a run."""
    return (
        f"{machine(results)}"
        "Ratios to the bare forward of the same model in the same process, medians; no_grad but for gradients;\n"
        "processor time, so that what else the machine does is not counted. Each peer runs in an environment and a\n"
        "process of its own, in turn with bare, bare again, torch's own hooks and hookline. Values are checked\n"
        "against torch's own hooks first; `in place` below says whose values later writes can change.\n"
    )


def machine(results: Results) -> str:
    """Return the peers, the machine and the date of a run."""
    versions = ", ".join([f"{result['peer']} {result['version']}".strip() for result in results])
    revisions = sorted({result["revision"] for result in results if "revision" in result}) or ["an unknown revision"]
    ran_on = next((result["machine"] for result in results if "machine" in result), "")
    return (
        f"hookline beside its peers, {datetime.date.today()}; {ran_on}, {processor()}, {os.cpu_count()} cores\n"
        f"{versions}; hookline at {', '.join(revisions)}\n\n"
    )


def processor() -> str:
    """Return the name of the CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def has(results: Results, which: str, task: str) -> bool:
    """Return True if any peer did the task on the model."""
    return any([task in result["cells"].get(which, {}) for result in results])


def cells(results: Results, which: str, task: str) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Yield each peer's result with its cell for one task."""
    for result in results:
        cell = result["cells"].get(which, {}).get(task)
        if cell is not None:
            yield result, cell


def over_all(results: Results, which: str, task: str, contender: str) -> float:
    """Return the median of one contender over the processes of all peers."""
    return median([cell["ratios"][contender][0] for _, cell in cells(results, which, task)])


def shown(ratio: float) -> str:
    """Return a ratio with its significant digits."""
    return f"{ratio:.2f}" if ratio < 10 else f"{ratio:.0f}"


def short(results: Results, which: str) -> str:
    """Return one Markdown table with a row for each task and a column for each peer."""
    named = [result["peer"] for result in results]
    lines = [
        f"| {MODELS[which]} | bare | raw hooks | hookline | {' | '.join(named)} |",
        "|---|" + "--:|" * (3 + len(named)),
    ]
    for task, title in TASKS.items():
        if not has(results, which, task):
            continue
        raw, ours = [shown(over_all(results, which, task, name)) for name in ("raw torch hooks", "hookline")]
        theirs = [figure(result["cells"].get(which, {}).get(task)) for result in results]
        lines.append(f"| {title} | {'' if task == 'set-up' else 1} | {raw} | {ours} | {' | '.join(theirs)} |")
    return "\n".join(lines) + "\n"


def for_readme(results: Results) -> str:
    """Return a table of the tasks on the small modules, with the fastest peer and the best-known peers."""
    known = ["nnsight", "TransformerLens", "Captum", "baukit-style, by hand", "torchlens"]
    lines = [
        f"| | bare | raw hooks | hookline | fastest peer | {' | '.join(known)} |",
        "|---|" + "--:|" * (4 + len(known)),
    ]
    for task, title in TASKS.items():
        if not has(results, "mlp", task):
            continue
        raw, ours = [shown(over_all(results, "mlp", task, name)) for name in ("raw torch hooks", "hookline")]
        found = {result["peer"]: cell for result, cell in cells(results, "mlp", task)}
        did = [(cell["ratios"]["peer"][0], name) for name, cell in found.items() if "peer" in cell["ratios"]]
        fastest = f"{shown(min(did)[0])} ({min(did)[1]})" if did else "–"
        theirs = [figure(found.get(name)) for name in known]
        first = "" if task == "set-up" else "1"
        lines.append(f"| {title} | {first} | {raw} | {ours} | {fastest} | {' | '.join(theirs)} |")
    return "\n".join(lines) + "\n"


def figure(cell: Mapping[str, Any] | None) -> str:
    """Return a peer's ratio, with a star if its value was wrong, or a dash if there is none."""
    if cell is None or "peer" not in cell["ratios"]:
        return "–"
    return shown(cell["ratios"]["peer"][0]) + ("*" if cell["wrong"] else "")


def task_table(results: Results, which: str, task: str) -> str:
    """Return one task in full: each peer's ratio next to those of hookline and raw hooks in the same process."""
    lines = [
        f"{TASKS[task]}: {MODELS[which]}",
        f"{'':24s}{'peer':>20s}{'hookline':>20s}{'raw hooks':>20s}{'bare again':>12s}",
    ]
    for result, cell in cells(results, which, task):
        ratios = cell["ratios"]
        theirs = spread(ratios["peer"]) if "peer" in ratios else "–"
        reason = cell.get("cannot") or cell.get("failed") or (f"wrong: {cell['wrong']}" if cell.get("wrong") else "")
        lines.append(
            f"{result['peer']:24s}{theirs:>20s}{spread(ratios['hookline']):>20s}"
            f"{spread(ratios['raw torch hooks']):>20s}{ratios['bare again'][0]:>12.2f}{'  ' + reason if reason else ''}"
        )
    lines += [f"{result['peer']:24s}{'–':>20s}  {result['failed']}" for result in results if "failed" in result]
    return "\n".join(lines) + "\n"


def spread(ratio: Sequence[float]) -> str:
    """Return a median and its quartiles."""
    middle, low, high = ratio
    return f"{shown(middle)} ({shown(low)}–{shown(high)})"


def behind(results: Results) -> str:
    """List every task in which a peer was faster than hookline in the same process."""
    lines = []
    for which in MODELS:
        for task in TASKS:
            for result, cell in cells(results, which, task):
                theirs, ours = cell["ratios"].get("peer"), cell["ratios"]["hookline"]
                if theirs and theirs[0] < ours[0]:
                    sure = "" if theirs[2] < ours[1] else "; the quartiles overlap"
                    lines.append(
                        f"{which}, {TASKS[task]}: {result['peer']} {shown(theirs[0])}, hookline {shown(ours[0])}{sure}"
                    )
    return "where a peer is ahead of hookline, in the same process\n" + ("\n".join(lines) or "nowhere") + "\n"


def questions(results: Results) -> str:
    """Return all answers by question."""
    found = next((result["yardsticks"] for result in results if result.get("yardsticks")), {})
    answered = {**found, **{result["peer"]: result["answers"] for result in results if result["answers"]}}
    lines = []
    for question, title in QUESTIONS.items():
        lines.append(title)
        lines += [f"  {name:24s}{said[question]}" for name, said in answered.items() if question in said]
    return "\n".join(lines) + "\n"


def notes(results: Results) -> str:
    """Return the notes that explain a peer's row."""
    return "".join([f"{result['peer']}: {result['note']}\n" for result in results if result["note"]])
