"""Random cases: a model, a program for it, and the order in which its blocks open, run and close."""

from __future__ import annotations

import random
from typing import Any

import torch

from tests.properties.models import random_model
from tests.properties.modules import Boom
from tests.properties.places import Survey
from tests.properties.programs import Block, Drawing, Program
from tests.properties.worlds import Case


def random_case(source: random.Random) -> tuple[Case, Survey]:
    """Draw a case, and survey its model."""
    model = random_model(source)
    bare = Case(model, Program((), ()), source.randrange(10**6), source.random() < 0.6, _style(source))
    survey = surveyed(bare)
    gradients = source.random() < 0.5
    drawing = Drawing(source, survey, gradients)
    blocks = tuple(drawing.block() for _ in range(source.choice((1, 1, 2, 2, 3))))
    events = Schedule(source, blocks, gradients, model.has("tripwire")).events()
    return Case(model, Program(blocks, events), bare.seed, bare.input_needs_grad, bare.style), survey


def surveyed(case: Case) -> Survey:
    """Run the case's model once, noting everything."""
    survey = Survey(case.model.build())
    torch.manual_seed(case.seed)
    args, kwargs = case.arguments(0)
    survey.forward(*args, **kwargs)
    return survey


def _style(source: random.Random) -> str:
    return source.choice(("positional", "positional", "keyword", "bias"))


class Schedule:
    """Draws the events: blocks open and close in any order, with forwards, backwards and copies between."""

    def __init__(self, source: random.Random, blocks: tuple[Block, ...], gradients: bool, can_fail: bool) -> None:
        self.source, self.blocks, self.gradients, self.can_fail = source, blocks, gradients, can_fail
        self.drawn: list[tuple[Any, ...]] = []
        self.forwards = 0
        self.unfinished: list[int] = []  # Forwards that no backward has followed.
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
        failure = None
        if self.can_fail and self.source.random() < 0.3:
            failure = self.source.choice((Boom, KeyboardInterrupt))
        self.drawn.append(("forward", self.forwards, mode, failure))
        if mode == "grad" and failure is None:
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
