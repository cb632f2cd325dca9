"""Count steps, and keep statistics of each layer every few steps.

Optimizers that hold the model's parameters count steps; without training, each forward is one. The statistics are
gathered on the device and read together.

targets_of       where `to=` writes them: TensorBoard, Weights & Biases, a function
StepStatistics   the numbers of one step, still on their devices
Log              the numbers of all steps, which `Watcher.log` returns as a cache
Statistics       the statistics of the step that runs, and the log
"""

from __future__ import annotations

import math
import os
import weakref
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hookline import Cache, Site
from hookline._kernel import cache_of_calls, write_subscripts
from hookline._watch.bad_values import extreme, numbers_in
from hookline.errors import HooklineError


class Steps:
    """Counts the steps of the optimizers of a model, however many there are, and says when one begins and ends.

    Torch's hooks on all optimizers are used, so that nobody has to say which one trains the model. The first that steps
    after a pass counts; others, until the next pass begins, belong to the same step.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Iterable[torch.optim.Optimizer],
        before: Callable[[torch.optim.Optimizer], object],
        after: Callable[[], object],
    ) -> None:
        self._model = weakref.ref(model)
        self._before, self._after = before, after
        self._given = {id(one): one for one in optimizers}
        # How many parameters an optimizer holds, and whether they are of the model.
        self._known: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, bool]] = weakref.WeakKeyDictionary()
        self._stepped: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # Since the last pass.
        self._handles: list[Any] = []
        self.done = 0  # How many steps are over.
        self.trains = False  # Whether the model is trained, so that a forward is not a step by itself.

    def has_stepped(self, optimizer: torch.optim.Optimizer | None = None) -> bool:
        """Whether this optimizer, or any, has stepped since the last pass."""
        return bool(self._stepped) if optimizer is None else optimizer in self._stepped

    def begin_pass(self) -> None:
        """Say that a forward or a backward begins: what optimizers do after it is another step."""
        self._stepped.clear()

    def open(self) -> None:
        """Begin to count."""
        self._handles = [
            register_optimizer_step_pre_hook(self._on_step_begun),
            register_optimizer_step_post_hook(self._on_step_done),
        ]

    def close(self) -> None:
        """Leave all optimizers alone."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _is_ours(self, optimizer: torch.optim.Optimizer) -> bool:
        if self._given:
            return id(optimizer) in self._given
        held = [one for group in optimizer.param_groups for one in group["params"]]
        known = self._known.get(optimizer)
        if known is None or known[0] != len(held):
            model = self._model()
            own = {id(parameter) for parameter in model.parameters()} if model is not None else set()
            known = self._known[optimizer] = len(held), any(id(one) in own for one in held)
        return known[1]

    def _on_step_begun(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if self._is_ours(optimizer):
            self._before(optimizer)

    def _on_step_done(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if not self._is_ours(optimizer):
            return
        is_first = not self._stepped
        self._stepped.add(optimizer)
        if is_first:
            self.trains = True
            self.done += 1
            self._after()


def span(steps: Sequence[int]) -> str:
    """Return the numbers of some steps as text, the first and the last of many."""
    return ", ".join(map(str, steps)) if len(steps) < 5 else f"{steps[0]}, {steps[1]} … {steps[-1]}"


Numbers = Mapping[str, float]
STEP = "watch/step"  # What Weights & Biases draws them over: its own steps are the user's.


class Target(NamedTuple):
    """Somewhere to write to, and how to end that."""

    write: Callable[[int, Numbers], object]
    close: Callable[[], object]


def targets_of(to: Any) -> list[Target]:
    """Return what `to=` means: nothing, one place or several."""
    if to is None:
        return []
    if isinstance(to, Iterable) and not isinstance(to, (str, os.PathLike)) and not callable(to):
        return [target for one in to for target in targets_of(one)]
    if isinstance(to, (str, os.PathLike)):
        return [_folder(to)]
    if hasattr(to, "add_scalar"):
        return [Target(_tensorboard(to), to.flush)]
    if hasattr(to, "log") and hasattr(to, "define_metric"):
        return [Target(_wandb(to), _nothing)]
    if callable(to):
        return [Target(to, _nothing)]
    raise HooklineError(
        f"to={to!r} is not a place for statistics; a folder for TensorBoard, a SummaryWriter, a run of wandb or a "
        "function of (step, {name: number}) is"
    )


def _folder(path: str | os.PathLike[str]) -> Target:
    """Write TensorBoard's files into a folder of our own."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise HooklineError("to= a folder writes for TensorBoard: pip install 'hookline[tensorboard]'") from None
    writer = SummaryWriter(os.fspath(path))
    return Target(_tensorboard(writer), writer.close)


def _tensorboard(writer: Any) -> Callable[[int, Numbers], object]:
    def write(step: int, numbers: Numbers) -> None:
        for name, number in numbers.items():
            writer.add_scalar(name, number, step)

    return write


def _wandb(run: Any) -> Callable[[int, Numbers], object]:
    defined = set[str]()

    def write(step: int, numbers: Numbers) -> None:
        for quantity in {name.partition("/")[0] for name in numbers} - defined:
            run.define_metric(f"{quantity}/*", step_metric=STEP)
            defined.add(quantity)
        run.log({**numbers, STEP: step})

    return write


def _nothing() -> None: ...


SAMPLED = 1 << 16  # Elements of a parameter that are compared before and after a step.

Parameters = dict[str, list[nn.Parameter]]  # Those in each module, and in the modules inside it.


class StepStatistics:
    """The numbers of one step, which are still on their devices."""

    def __init__(self, step: int) -> None:
        self.step = step
        self._before: dict[nn.Parameter, Tensor] = {}  # Samples of the parameters, before optimizers step.
        self._values: list[tuple[str, int]] = []  # The site and the elements of each value, and three numbers of it:
        self._of_values: list[Tensor] = []  # norm, elements that are not zero, largest.
        self._gradients: dict[nn.Parameter, Tensor] = {}  # Norms. Each is read once, though it counts at many sites.
        self._weights: dict[nn.Parameter, Tensor] = {}
        self._moves: dict[nn.Parameter, Tensor] = {}  # How far each has moved, and how large it was before.
        self._sizes: dict[nn.Parameter, Tensor] = {}

    @torch.no_grad()
    def add(self, site: str, plain: Tensor) -> None:
        """Note the plain numbers of one call."""
        self._values.append((site, plain.numel()))
        self._of_values += (*_norms([plain]), plain.count_nonzero(), extreme(plain))

    @torch.no_grad()
    def add_gradients(self, held: Iterable[nn.Parameter], scale: float, keep: bool) -> None:
        """Note the norms of the gradients that are there, in the place of earlier ones unless these are kept."""
        found = {one: one.grad for one in held if one.grad is not None}
        self._gradients = {**_norms_of(found, 1 / scale), **(self._gradients if keep else {})}

    @torch.no_grad()
    def add_weights(self, held: Iterable[nn.Parameter]) -> None:
        """Note the norms of the parameters."""
        self._weights = _norms_of({one: one for one in held})

    def sample(self, held: Iterable[nn.Parameter]) -> None:
        """Note what parameters are before the first optimizer that steps."""
        self._before = {one: sample(one) for one in held if one not in self._before} | self._before

    @torch.no_grad()
    def add_updates(self, held: Iterable[nn.Parameter]) -> None:
        """Note how far the parameters of which samples were taken have moved, and how large they were."""
        before = {one: self._before[one] for one in held if one in self._before}
        self._moves = _norms_of({one: sample(one) - old for one, old in before.items()})
        self._sizes = _norms_of(before)

    def read(self, parameters: Parameters) -> dict[str, dict[str, float]]:
        """Wait for the devices, once for each; return {quantity: {site: number}}."""
        held = (self._gradients, self._weights, self._moves, self._sizes)
        numbers = iter(_read([*self._of_values, *(norm for norms in held for norm in norms.values())]))
        sums: dict[str, list[float]] = {}
        for site, count in self._values:
            norm, others, largest = next(numbers), next(numbers), next(numbers)
            before = sums.get(site, [0.0, 0.0, 0.0, 0.0])
            sums[site] = [before[0] + norm**2, before[1] + others, max(before[2], largest), before[3] + count]
        gradients, weights, moves, sizes = (
            _together({one: next(numbers) for one in norms}, parameters) for norms in held
        )
        read = {
            "rms": {site: math.sqrt(squares / count) for site, (squares, _, _, count) in sums.items()},
            "zeros": {site: 1 - others / count for site, (_, others, _, count) in sums.items()},
            "largest": {site: largest for site, (_, _, largest, _) in sums.items()},
            "gradient": gradients,
            "weight": weights,
            "update": {site: moves[site] / size for site, size in sizes.items() if size},  # All zeros have no share.
        }
        return {quantity: found for quantity, found in read.items() if found}


def _together(norms: Mapping[nn.Parameter, float], parameters: Parameters) -> dict[str, float]:
    """Return the norm of all parameters at each site together, where there are any."""
    found = {site: [norms[one] for one in held if one in norms] for site, held in parameters.items()}
    return {site: math.hypot(*some) for site, some in found.items() if some}


def _norms_of(found: Mapping[nn.Parameter, Tensor], factor: float = 1.0) -> dict[nn.Parameter, Tensor]:
    """Return the norm of a tensor for each parameter, without those that have no numbers."""
    plain = {one: numbers for one, tensor in found.items() if (numbers := numbers_in(tensor)) is not None}
    return dict(zip(plain, _norms(list(plain.values()), factor), strict=True))


def _norms(tensors: list[Tensor], factor: float = 1.0) -> list[Tensor]:
    """Return the norm of each tensor, in at least single precision: half would overflow."""
    norms: list[Tensor] = [torch.linalg.vector_norm(one, 2, dtype=_wide(one)) for one in tensors]
    return norms if factor == 1 else [norm * factor for norm in norms]


def _read(tensors: list[Tensor]) -> list[float]:
    """Return the numbers of tensors of one element, with one wait for each device."""
    found = [0.0] * len(tensors)
    for device in {tensor.device for tensor in tensors}:
        numbers = [number for number, tensor in enumerate(tensors) if tensor.device == device]
        read: list[float] = torch.stack([tensors[number].to(torch.float64) for number in numbers]).tolist()
        for number, one in zip(numbers, read, strict=True):
            found[number] = one
    return found


class Log:
    """The numbers of all rows: one list of plain numbers for each quantity of each site."""

    def __init__(self) -> None:
        self.steps = array("q")
        self._numbers: dict[Site, array[float]] = {}

    def add(self, step: int, read: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
        """Take a row in; return its numbers by the names that others know them by: "rms/h.0.mlp"."""
        self.steps.append(step)
        named: dict[str, float] = {}
        for quantity, found in read.items():
            for site, number in found.items():
                key = Site.parse(site)
                key = key._replace(index=key.index + write_subscripts((quantity,)))
                self._numbers.setdefault(key, array("d", [math.nan] * (len(self.steps) - 1))).append(number)
                named[f"{quantity}/{site or 'model'}"] = number
        for numbers in self._numbers.values():
            if len(numbers) < len(self.steps):
                numbers.append(math.nan)  # So that the number at any place is of the step at that place.
        return named

    def cache(self) -> Cache:
        """Return all numbers as a cache: `h.0["rms"]`, one call for each row."""
        values = {
            site: list(torch.tensor(numbers, dtype=torch.float64).unbind()) for site, numbers in self._numbers.items()
        }
        return cache_of_calls(values, "step", list(self.steps))


class Statistics:
    """The row of the step that runs, that of the step before while optimizers may still belong to it, and the log."""

    def __init__(self, every: int | None, parameters: Parameters) -> None:
        self.every, self._parameters = every, parameters
        self.log = Log()
        self.row: StepStatistics | None = None
        self._closing: StepStatistics | None = None
        self.targets: list[Target] = []

    def begin(self, step: int) -> None:
        """Begin a row, if this is a step of which one is kept."""
        self.row = StepStatistics(step) if self.every is not None and step % self.every == 0 else None

    def sample(self, held: Iterable[nn.Parameter], is_further: bool) -> None:
        """Note what parameters are before an optimizer steps: the first of a step, or a further one."""
        row = self._closing if is_further else self.row
        if row is not None:
            row.sample(held)

    def close(self, step: int) -> None:
        """Let the row of the step that is over wait for further optimizers, and begin the next."""
        self.settle()
        self._closing = self.row
        self.begin(step)

    def settle(self) -> None:
        """Write the row that waits."""
        row, self._closing = self._closing, None
        if row is None:
            return
        held = list(dict.fromkeys(one for held in self._parameters.values() for one in held))
        row.add_weights(held)
        row.add_updates(held)
        numbers = self.log.add(row.step, row.read(self._parameters))
        for target in self.targets:
            target.write(row.step, numbers)

    def end(self) -> None:
        """Keep no more."""
        self.row = self._closing = None
        for target in self.targets:
            target.close()


@torch.no_grad()
def sample(parameter: nn.Parameter) -> Tensor:
    """Return a copy of a parameter, or of some thousand elements all over it."""
    plain = numbers_in(parameter)
    if plain is None:
        return torch.zeros(1)
    flat = plain.reshape(-1)
    stride = max(1, len(flat) // SAMPLED)
    width = plain.shape[-1] if plain.dim() else 1
    while stride > 1 and math.gcd(stride, width) > 1:  # Else it would be the same few columns of a matrix.
        stride += 1
    return flat[::stride].to(_wide(flat), copy=True)


def _wide(plain: Tensor) -> Any:
    return torch.float64 if plain.dtype is torch.float64 else torch.float32
