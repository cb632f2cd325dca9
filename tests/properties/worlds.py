"""A case, and its run without hooks; `under_oracle` and `under_hookline` add hooks. A run records a trace."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parameter import is_lazy

from tests.properties.containers import KINDS, container, recall
from tests.properties.modules import SHAPE, Tripwire, blend
from tests.properties.programs import Action, Program, chosen, patch_value
from tests.properties.random_models import Model
from tests.properties.structures import copied
from tests.properties.survey import Survey

MODES = {
    "grad": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "functional": contextlib.nullcontext,  # Called with other parameters by functional_call.
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, how it is called, and a program of hooks for it."""

    model: Model
    program: Program
    seed: int
    input_needs_grad: bool
    style: str
    method: str = ""  # The method to call instead of the model.

    def arguments(self, number: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of forward `number`."""
        generator = torch.Generator().manual_seed(self.seed + number)
        x = torch.randn(SHAPE, generator=generator, dtype=self.model.dtype).requires_grad_(self.input_needs_grad)
        if self.style == "keyword":
            return (), {"x": x, "scale": 0.5}
        if self.style.startswith("memory"):
            held = torch.randn(SHAPE, generator=generator, dtype=self.model.dtype).requires_grad_(self.input_needs_grad)
            memory = container(KINDS[self.seed % len(KINDS)], *([held] if self.seed % 3 else []))
            return ((), {"x": x, "memory": memory}) if "keyword" in self.style else ((x, None, memory), {})
        return ((x, torch.ones(4, dtype=x.dtype)), {}) if self.style == "bias" else ((x,), {})


class Token:
    """Lives as long as the graph it is put into."""


class Sentinel(torch.autograd.Function):
    """An identity that holds a token."""

    @staticmethod
    def forward(context: Any, tensor: Tensor, token: Token) -> Tensor:
        context.token = token
        return tensor.view_as(tensor)

    @staticmethod
    def backward(context: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class Run:
    """Plays the events of a case on a model, without hooks; the subclasses add them."""

    def __init__(self, case: Case, model: nn.Module | None = None) -> None:
        self.case = case
        self.model = case.model.build() if model is None else model
        self.trace: list[tuple[str, Any]] = []
        self.outputs: list[Any] = []
        self.inputs: list[Any] = []
        self.leaves: dict[Any, Any] = {}  # The values of patches, by block, action and place.
        self.graphs: list[weakref.ref[Token]] = []
        self.is_functional = False

    def play(self) -> list[tuple[str, Any]]:
        """Run everything; return the trace."""
        torch.default_generator.manual_seed(self.case.seed)
        self.play_quietly()
        self.note("random state", torch.get_rng_state())
        self.note("buffers", {name: copied(buffer) for name, buffer in self.model.named_buffers()})
        return self.trace

    def play_quietly(self) -> list[tuple[str, Any]]:
        """Run only the events; leave the process-wide random state alone."""
        for event in self.case.program.events:
            self.happen(event)
        return self.trace

    def happen(self, event: tuple[Any, ...]) -> None:
        """Run one event."""
        getattr(self, event[0])(*event[1:])

    def note(self, label: str, value: Any) -> None:
        self.trace.append((label, value))

    def call(self, *args: Any, **kwargs: Any) -> Any:
        return self.callable(*args, **kwargs)

    @property
    def callable(self) -> Callable[..., Any]:
        """The model, a method of it, or a functional_call of the model with other parameters."""
        if self.case.method:
            return getattr(self.model, self.case.method)
        if not self.is_functional:
            return self.model
        halves = {name: value * 0.5 for name, value in self.model.named_parameters()}
        return lambda *args, **kwargs: functional_call(self.model, halves, args, kwargs)

    def forward(self, number: int, mode: str, failure: type[BaseException] | None) -> None:
        """Run the model once."""
        Tripwire.armed = failure
        self.is_functional = mode == "functional"
        with MODES[mode]():
            self._run(number, self.call)
        Tripwire.armed = None
        self.is_functional = False

    def line(self, block: int, number: int) -> None:
        """Run the model once, with `hl.run`."""
        self._run(number, lambda *args, **kwargs: self.run_line(block, args, kwargs))

    def run_line(self, block: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.call(*args, **kwargs)

    def _run(self, number: int, call: Callable[..., Any]) -> None:
        args, kwargs = self.case.arguments(number)
        self.inputs.append(args[0] if args else kwargs["x"])
        memory = args[2] if len(args) > 2 else kwargs.get("memory")
        held = [] if memory is None else recall(memory)
        self.inputs += held
        output = None
        try:
            output = call(*self._with_token(args), **kwargs)
            self.note(f"output of forward {len(self.outputs)}", copied(output))
        except (Exception, KeyboardInterrupt) as error:
            self.note(f"output of forward {len(self.outputs)}", type(error).__name__)
        if memory is not None:
            self.note("memory", copied(memory))
            self.note("of that was there before", [any(one is old for old in held) for one in recall(memory)])
        self.outputs.append(output)

    def _with_token(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if not (args and args[0].requires_grad):
            return args
        token = Token()
        self.graphs.append(weakref.ref(token))
        return (Sentinel.apply(args[0], token), *args[1:])

    def backward(self, number: int, retain: bool) -> None:
        """Run one backward pass and record every gradient."""
        output = self.outputs[number]
        total = None if output is None else blend(output)
        if total is None or not total.requires_grad:
            self.note("backward", "nothing to do")
            return
        weights = torch.linspace(-1, 1, total.numel(), dtype=total.dtype).view(total.shape)
        try:
            self.run_backward((total * weights).sum(), retain)
            self.note("backward", "done")
        except Exception as error:
            self.note("backward", describe_failure(error))
        holders = {f"parameter {name}": value for name, value in self.model.named_parameters()}
        holders |= {f"input {index}": value for index, value in enumerate(self.inputs)}
        holders |= {f"patch {key}": value for key, value in self.leaves.items() if isinstance(value, Tensor)}
        # Torch returns zeros for some missing gradients, so zero and missing count as the same.
        grads = {name: holder.grad for name, holder in holders.items() if holder.grad is not None and holder.grad.any()}
        self.note("gradients", copied(grads))
        for holder in holders.values():
            if holder.grad is not None:
                holder.grad = None

    def run_backward(self, loss: Tensor, retain: bool) -> None:
        loss.backward(retain_graph=retain)

    def copy(self, how: str, number: int) -> None:
        """Copy the model and run the copy, which must be an unhooked model with its own weights."""
        if any(map(is_lazy, self.model.parameters())):
            return  # Torch copies an uninitialized parameter with another dtype.
        if self.case.model.has("foreign"):
            how = "deepcopy"  # The replaced forward can't be pickled.
        try:
            twin = copy.deepcopy(self.model) if how == "deepcopy" else pickle.loads(pickle.dumps(self.model))
        except Exception as error:
            self.note("copy", type(error).__name__)
            return
        args, kwargs = self.case.arguments(number)
        with torch.no_grad():
            self.note("output of a copy", copied(twin(*args, **kwargs)))
            for parameter in twin.parameters():
                parameter.zero_()
            self.note("output of a zeroed copy", copied(twin(*args, **kwargs)))

    def open(self, block: int) -> None:
        """Enter a short form, or make a `Hooks`."""

    def close(self, block: int, failing: bool) -> None:
        """Leave a short form, or remove a `Hooks`."""

    def enter(self, block: int) -> None:
        """Enter a `Hooks`."""

    def leave(self, block: int, failing: bool) -> None:
        """Leave a `Hooks`."""

    def switch(self, block: int, action: int, on: bool) -> None:
        """Activate or deactivate one action of a `Hooks`."""

    def read(self) -> None:
        """Record every captured value."""


def describe_failure(error: BaseException) -> str:
    """Return the name of an error, or that torch refused a reentrant segment in which nothing needs a gradient."""
    return "refused by torch" if "none of output has requires_grad" in str(error) else type(error).__name__


def value_of(action: Action, survey: Survey, place: int) -> Any:
    """Return the value of a patch or a skip."""
    kind, seed = action.option
    return patch_value(kind, seed + place, chosen(survey, action.places[place]))
