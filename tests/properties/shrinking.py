"""Reduce a failing case, so that a person can read it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from tests.properties.cases import surveyed
from tests.properties.programs import Action, Block, Program
from tests.properties.properties import check
from tests.properties.random_models import Node
from tests.properties.worlds import Case

PAIRED = ("open", "close", "enter", "leave", "line")


def shrunk(case: Case, rounds: int = 400, check: Callable[[Case], str] | None = None) -> tuple[Case, str]:
    """Return the smallest case found that fails in the same way, and its problem. `check` returns a problem, or ""."""
    problem_of = check or _problem
    problem = problem_of(case)
    kind = _kind(problem)
    for _ in range(rounds):
        for smaller in _smaller(case):
            found = problem_of(smaller)
            if found and _kind(found) == kind:
                case, problem = smaller, found
                break
        else:
            break
    return case, problem


def _problem(case: Case) -> str:
    try:
        survey = surveyed(case)
        if any(place.member and not place.seen(survey) for place in case.program.places):
            return ""
        return check(case, survey)
    except Exception:
        return ""  # The case is invalid: the smaller model lacks one of its places.


def _kind(problem: str) -> str:
    return " ".join(word for word in problem.split(":")[0].split() if word.isalpha())[:30]


def _smaller(case: Case) -> Iterator[Case]:
    for body in _smaller_nodes(case.model.body):
        yield dataclasses.replace(case, model=dataclasses.replace(case.model, body=body))
    for program in _smaller_programs(case.program):
        yield dataclasses.replace(case, program=program)
    if case.model.packed:
        yield dataclasses.replace(case, model=dataclasses.replace(case.model, packed=False))
    if case.style != "positional":
        yield dataclasses.replace(case, style="positional")


def _smaller_nodes(node: Node) -> Iterator[Node]:
    if "shared" in node.kinds():
        return  # A "shared" node refers to an earlier module by its number.
    yield from node.children
    if node.kind != "linear" and not node.children:
        yield Node("linear")
    if node.kind in ("chain", "branches", "sequential") and len(node.children) > 1:
        for index in range(len(node.children)):
            yield dataclasses.replace(node, children=node.children[:index] + node.children[index + 1 :])
    if node.kind == "script":
        yield from _smaller_scripts(node)
    for index, child in enumerate(node.children):
        for smaller in _smaller_nodes(child):
            yield dataclasses.replace(node, children=(*node.children[:index], smaller, *node.children[index + 1 :]))


def _smaller_scripts(node: Node) -> Iterator[Node]:
    steps, tied = node.option
    for index in range(len(steps) if len(steps) > 1 else 0):
        yield dataclasses.replace(node, option=(steps[:index] + steps[index + 1 :], tied))
    if tied:
        yield dataclasses.replace(node, option=(steps, False))
    for index in range(len(node.children)):
        yield dataclasses.replace(node, children=node.children[:index] + node.children[index + 1 :])


def _smaller_programs(program: Program) -> Iterator[Program]:
    for number in range(len(program.blocks)):
        events = tuple(event for event in program.events if not (_belongs(event) and event[1] == number))
        if events != program.events:
            yield Program(program.blocks, events)
    for index, event in enumerate(program.events):
        if event[0] not in (*PAIRED, "forward", "read"):
            yield Program(program.blocks, program.events[:index] + program.events[index + 1 :])
        if event[0] == "forward":
            yield Program(program.blocks, _without_forward(program.events, index))
    for number in {event[1] for event in program.events if event[0] == "enter"}:
        outside = [event for event in program.events if event[0] not in ("enter", "leave") or event[1] != number]
        yield Program(program.blocks, tuple(outside))
    for number, block in enumerate(program.blocks):
        for smaller in _smaller_blocks(block):
            yield Program((*program.blocks[:number], smaller, *program.blocks[number + 1 :]), program.events)


def _belongs(event: tuple[Any, ...]) -> bool:
    return event[0] in (*PAIRED, "switch")


def _without_forward(events: tuple[tuple[Any, ...], ...], index: int) -> tuple[tuple[Any, ...], ...]:
    """Leave out a forward and its backwards, and renumber the later backwards."""
    order = [at for at, event in enumerate(events) if event[0] in ("forward", "line")].index(index)
    kept = []
    for at, event in enumerate(events):
        if at == index or (event[0] == "backward" and event[1] == order):
            continue
        if event[0] == "backward" and event[1] > order:
            event = ("backward", event[1] - 1, event[2])
        kept.append(event)
    return tuple(kept)


def _smaller_blocks(block: Block) -> Iterator[Block]:
    if len(block.actions) > 1:
        for index in range(len(block.actions)):
            yield dataclasses.replace(block, actions=block.actions[:index] + block.actions[index + 1 :])
    for index, action in enumerate(block.actions):
        for smaller in _smaller_actions(action):
            yield dataclasses.replace(block, actions=(*block.actions[:index], smaller, *block.actions[index + 1 :]))


def _smaller_actions(action: Action) -> Iterator[Action]:
    if len(action.places) > 1:
        for index in range(len(action.places)):
            yield dataclasses.replace(action, places=action.places[:index] + action.places[index + 1 :])
    if action.kind == "capture":
        for option, usual in (("option", None), ("clone", None), ("detach", True), ("stop", False), ("keep", "last")):
            if getattr(action, option) != usual:
                yield dataclasses.replace(action, **{option: usual})
