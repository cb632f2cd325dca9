"""Random cases: a model, a program for it, and the order in which its blocks open, run and close."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import torch

from tests.properties.modules import Boom
from tests.properties.programs import Block, Drawing, Program
from tests.properties.random_models import random_model
from tests.properties.steps import STEPS
from tests.properties.survey import Survey
from tests.properties.worlds import Case

# Kinds of nodes that torch recomputes in backward, when a functional_call's parameters are gone.
RECOMPUTED = ("segment", *(name for name in STEPS if name.startswith("checkpointed")))


def random_case(source: random.Random, members: bool = False, containers: bool = False) -> tuple[Case, Survey]:
    """Draw a case, with hooks on modules alone or also on their members, and survey its model.

    Args:
        containers: Whether to draw modules that depend on the identity of their arguments.
    """
    model = random_model(source, scripts=members, memories=containers)
    bare = Case(model, Program((), ()), source.randrange(10**6), source.random() < 0.6, _style(source))
    if members and source.random() < 0.05:
        return _by_method(source, dataclasses.replace(bare, method="encode"))
    survey = surveyed(bare)
    gradients = source.random() < 0.5
    drawing = Drawing(source, survey, gradients, random_families(source) if members else (), containers)
    blocks = tuple(drawing.block() for _ in range(source.choice((1, 1, 2, 2, 3))))
    # functional_call does not restore all parameters of a shared module.
    functional = members and not model.has("lazy", "shared", *RECOMPUTED)
    can_fail = model.has("tripwire", "fragile_method")
    events = Schedule(source, blocks, gradients, can_fail, functional).events()
    return Case(model, Program(blocks, events), bare.seed, bare.input_needs_grad, bare.style), survey


def _by_method(source: random.Random, case: Case) -> tuple[Case, Survey]:
    """Draw a case in which a method is called instead of the model, in one line."""
    survey = surveyed(case)
    gradients = source.random() < 0.5
    block = Drawing(source, survey, gradients, random_families(source)).line()
    program = Program((block,), (("line", 0, 0), ("backward", 0, False), ("read",)))
    return dataclasses.replace(case, program=program), survey


def random_families(source: random.Random) -> tuple[str, ...]:
    """Draw families of members for a program; not both functions and uses, whose order at one call is unspecified."""
    return ("methods", source.choice(("functions", "uses")), "parameters")


def surveyed(case: Case) -> Survey:
    """Run the case's model once, and record everything."""
    survey = Survey(case.model.build())
    torch.default_generator.manual_seed(case.seed)
    args, kwargs = case.arguments(0)
    survey.forward(survey.model, case.method, *args, **kwargs)
    return survey


def _style(source: random.Random) -> str:
    return source.choice(("positional", "positional", "keyword", "bias", "memory", "memory by keyword"))


class Schedule:
    """Draws the events: blocks open and close in any order, with forwards, backwards and copies in between."""

    def __init__(
        self, source: random.Random, blocks: tuple[Block, ...], gradients: bool, can_fail: bool, functional: bool
    ) -> None:
        self.source, self.blocks, self.gradients = source, blocks, gradients
        self.can_fail, self.functional = can_fail, functional
        self.drawn: list[tuple[Any, ...]] = []
        self.forwards = 0
        self.unfinished: list[int] = []  # Forwards without a backward so far.
        self.open: list[int] = []
        self.entered: list[int] = []

    def events(self) -> tuple[tuple[Any, ...], ...]:
        """Draw all events."""
        for block, spec in enumerate(self.blocks):
            if spec.line:
                self._line(block)
                continue
            self.drawn.append(("open", block))
            self.open.append(block)
            self._some(self.source.choice((0, 1, 1, 2)))
        self._some(self.source.choice((1, 2)))
        if not self.forwards:
            self._forward()
        while self.open:
            self._close(self.source.choice(self.open))
            self._some(self.source.choice((0, 0, 1)))
        for number in self.unfinished[-1:]:
            self.drawn.append(("backward", number, False))
        self.drawn.append(("read",))
        return tuple(self.drawn)

    def _some(self, count: int) -> None:
        for _ in range(count):
            draw = self.source.random()
            kept = [block for block in self.open if self.blocks[block].kept]
            if draw < 0.5 or not self.forwards:
                self._forward()
            elif draw < 0.75 and self.unfinished:
                self._backward()
            elif draw < 0.82:
                self.drawn.append(("copy", self.source.choice(("deepcopy", "pickle")), 0))
            elif kept:
                self._manage(self.source.choice(kept))
            elif self.open and draw < 0.9:
                self._close(self.source.choice(self.open))

    def _line(self, block: int) -> None:
        self.drawn.append(("line", block, self.forwards))
        self.unfinished.append(self.forwards)
        self.forwards += 1

    def _forward(self) -> None:
        by_reference = any(action.clone is False for block in self.blocks for action in block.actions)
        modes = ("grad", "grad", "no_grad", "no_grad" if by_reference else "inference")
        mode = "grad" if self.gradients and self.source.random() < 0.95 else self.source.choice(modes)
        if self.functional and mode == "grad" and self.source.random() < 0.15:
            mode = "functional"
        failure = None
        if self.can_fail and self.source.random() < 0.3:
            failure = self.source.choice((Boom, KeyboardInterrupt))
        self.drawn.append(("forward", self.forwards, mode, failure))
        if mode in ("grad", "functional") and failure is None:
            self.unfinished.append(self.forwards)
        self.forwards += 1

    def _backward(self) -> None:
        number = self.unfinished.pop()
        if self.source.random() < 0.35:
            self.drawn.append(("backward", number, True))
        self.drawn.append(("backward", number, False))

    def _manage(self, block: int) -> None:
        draw = self.source.random()
        if block in self.entered and draw < 0.6:
            self._leave(block)
        elif draw < 0.8:
            self.entered.append(block)
            self.drawn.append(("enter", block))
            self._forward()
        else:
            action = self.source.randrange(len(self.blocks[block].actions))
            self.drawn.append(("switch", block, action, self.source.random() < 0.4))

    def _leave(self, block: int) -> None:
        self.entered.remove(block)
        self.drawn.append(("leave", block, self.source.random() < 0.15))

    def _close(self, block: int) -> None:
        while block in self.entered:
            self._leave(block)
        self.open.remove(block)
        self.drawn.append(("close", block, self.source.random() < 0.15))
