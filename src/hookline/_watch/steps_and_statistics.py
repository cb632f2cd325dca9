"""Count steps, and keep statistics of each layer every few steps.

A step of an optimizer that holds the model's parameters counts; without training, each forward is a step. The
statistics are gathered on the device and read together.

targets_of       where `to=` writes statistics: TensorBoard, Weights & Biases, a function
StepStatistics   the numbers of one step, still on their devices
Log              the numbers of all steps, which `Watcher.log` returns as a cache
Statistics       the statistics of the current step, and the log
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

Parameters = dict[str, list[nn.Parameter]]  # The parameters of each module, including those of its submodules.
Numbers = Mapping[str, float]
SAMPLED = 1 << 16  # The number of elements of a parameter that are compared before and after a step.
STEP = "watch/step"  # The x axis in Weights & Biases, whose own steps are the user's.


class Steps:
    """Counts the steps of a model's optimizers, and reports when a step begins and ends.

    It uses torch's global optimizer hooks, so the user need not name the optimizer. The first optimizer that steps
    after a pass counts as a step; optimizers after it belong to the same step, until the next pass begins.
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
        # For each optimizer: how many parameters it holds, and whether any of them belongs to the model.
        self._known: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, bool]] = weakref.WeakKeyDictionary()
        self._stepped: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # Since the last pass.
        self._handles: list[Any] = []
        self.done = 0  # The number of finished steps.
        self.trains = False  # True if the model is trained: then a forward alone is not a step.

    def has_stepped(self, optimizer: torch.optim.Optimizer | None = None) -> bool:
        """Return True if `optimizer` has stepped since the last pass; with None, if any optimizer has."""
        return bool(self._stepped) if optimizer is None else optimizer in self._stepped

    def begin_pass(self) -> None:
        """Note that a forward or a backward begins: an optimizer that steps after it begins another step."""
        self._stepped.clear()

    def open(self) -> None:
        """Start counting."""
        self._handles = [
            register_optimizer_step_pre_hook(self._on_step_begun),
            register_optimizer_step_post_hook(self._on_step_done),
        ]

    def close(self) -> None:
        """Stop counting."""
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
    """Return step numbers as text; from five on, only the first two and the last."""
    return ", ".join(map(str, steps)) if len(steps) < 5 else f"{steps[0]}, {steps[1]} … {steps[-1]}"


class Target(NamedTuple):
    """A place to write statistics to: a function that writes one step, and one that closes the place."""

    write: Callable[[int, Numbers], object]
    close: Callable[[], object]


def targets_of(to: Any) -> list[Target]:
    """Return the targets of `to=`: none, one or several."""
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
        f"to={to!r} is not a place for statistics; give a folder for TensorBoard, a SummaryWriter, a wandb run or a "
        "function of (step, {name: number})"
    )


def _folder(path: str | os.PathLike[str]) -> Target:
    """Return a target that writes TensorBoard files into a folder."""
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


class StepStatistics:
    """The numbers of one step, still on their devices."""

    def __init__(self, step: int) -> None:
        self.step = step
        self._before: dict[nn.Parameter, Tensor] = {}  # Samples of the parameters from before the optimizers step.
        self._values: list[tuple[str, int]] = []  # The site of each value, and how many elements it has.
        self._of_values: list[Tensor] = []  # Three for each value: norm, count of nonzero elements, largest magnitude.
        # The norms of each parameter, which is read once even if it belongs to several sites.
        self._gradients: dict[nn.Parameter, Tensor] = {}
        self._weights: dict[nn.Parameter, Tensor] = {}
        self._moves: dict[nn.Parameter, Tensor] = {}  # The norm of the change of each sample.
        self._sizes: dict[nn.Parameter, Tensor] = {}  # The norm of each sample before the step.

    @torch.no_grad()
    def add(self, site: str, plain: Tensor) -> None:
        """Add the value of one call."""
        self._values.append((site, plain.numel()))
        self._of_values += (*_norms([plain]), plain.count_nonzero(), extreme(plain))

    @torch.no_grad()
    def add_gradients(self, held: Iterable[nn.Parameter], scale: float, keep: bool) -> None:
        """Add the norms of the gradients. They replace earlier ones, unless `keep` is True."""
        found = {one: one.grad for one in held if one.grad is not None}
        self._gradients = {**_norms_of(found, 1 / scale), **(self._gradients if keep else {})}

    @torch.no_grad()
    def add_weights(self, held: Iterable[nn.Parameter]) -> None:
        """Add the norms of the parameters."""
        self._weights = _norms_of({one: one for one in held})

    def sample(self, held: Iterable[nn.Parameter]) -> None:
        """Sample parameters before the first optimizer of the step."""
        self._before = {one: sample(one) for one in held if one not in self._before} | self._before

    @torch.no_grad()
    def add_updates(self, held: Iterable[nn.Parameter]) -> None:
        """Add the norm of each sampled parameter's change, and the norm it had before."""
        before = {one: self._before[one] for one in held if one in self._before}
        self._moves = _norms_of({one: sample(one) - old for one, old in before.items()})
        self._sizes = _norms_of(before)

    def read(self, parameters: Parameters) -> dict[str, dict[str, float]]:
        """Read the numbers, waiting once for each device; return {quantity: {site: number}}."""
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
            # Parameters that are all zero have no relative update.
            "update": {site: moves[site] / size for site, size in sizes.items() if size},
        }
        return {quantity: found for quantity, found in read.items() if found}


def _together(norms: Mapping[nn.Parameter, float], parameters: Parameters) -> dict[str, float]:
    """Return the joint norm of each site's parameters, for sites that have any."""
    found = {site: [norms[one] for one in held if one in norms] for site, held in parameters.items()}
    return {site: math.hypot(*some) for site, some in found.items() if some}


def _norms_of(found: Mapping[nn.Parameter, Tensor], factor: float = 1.0) -> dict[nn.Parameter, Tensor]:
    """Return the norm of each parameter's tensor; parameters without numbers are left out."""
    plain = {one: numbers for one, tensor in found.items() if (numbers := numbers_in(tensor)) is not None}
    return dict(zip(plain, _norms(list(plain.values()), factor), strict=True))


def _norms(tensors: list[Tensor], factor: float = 1.0) -> list[Tensor]:
    """Return the norm of each tensor in at least single precision, since half precision would overflow."""
    norms: list[Tensor] = [torch.linalg.vector_norm(one, 2, dtype=_wide(one)) for one in tensors]
    return norms if factor == 1 else [norm * factor for norm in norms]


def _read(tensors: list[Tensor]) -> list[float]:
    """Read tensors of one element, waiting once for each device."""
    found = [0.0] * len(tensors)
    for device in {tensor.device for tensor in tensors}:
        numbers = [number for number, tensor in enumerate(tensors) if tensor.device == device]
        read: list[float] = torch.stack([tensors[number].to(torch.float64) for number in numbers]).tolist()
        for number, one in zip(numbers, read, strict=True):
            found[number] = one
    return found


class Log:
    """The numbers of all rows: one array for each quantity of each site."""

    def __init__(self) -> None:
        self.steps = array("q")
        self._numbers: dict[Site, array[float]] = {}

    def add(self, step: int, read: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
        """Add a row; return its numbers by the names that targets use, such as "rms/h.0.mlp"."""
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
                numbers.append(math.nan)  # So that position n of every array belongs to `steps[n]`.
        return named

    def cache(self) -> Cache:
        """Return all numbers as a cache, with one call for each row, as in `h.0["rms"]`."""
        values = {
            site: list(torch.tensor(numbers, dtype=torch.float64).unbind()) for site, numbers in self._numbers.items()
        }
        return cache_of_calls(values, "step", list(self.steps))


class Statistics:
    """The statistics of the current step, of the previous step while optimizers may still join it, and the log."""

    def __init__(self, every: int | None, parameters: Parameters) -> None:
        self.every, self._parameters = every, parameters
        self.log = Log()
        self.row: StepStatistics | None = None
        self._closing: StepStatistics | None = None
        self.targets: list[Target] = []

    def begin(self, step: int) -> None:
        """Begin a row if this step's statistics are to be kept."""
        self.row = StepStatistics(step) if self.every is not None and step % self.every == 0 else None

    def sample(self, held: Iterable[nn.Parameter], is_further: bool) -> None:
        """Sample parameters before an optimizer steps. `is_further` means that it is not the first of its step."""
        row = self._closing if is_further else self.row
        if row is not None:
            row.sample(held)

    def close(self, step: int) -> None:
        """End a step: its row waits for further optimizers, and the next row begins."""
        self.settle()
        self._closing = self.row
        self.begin(step)

    def settle(self) -> None:
        """Write the row of the previous step."""
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
        """Stop keeping statistics, and close the targets."""
        self.row = self._closing = None
        for target in self.targets:
            target.close()


@torch.no_grad()
def sample(parameter: nn.Parameter) -> Tensor:
    """Return a copy of a parameter, or of about `SAMPLED` elements spread over it."""
    plain = numbers_in(parameter)
    if plain is None:
        return torch.zeros(1)
    flat = plain.reshape(-1)
    stride = max(1, len(flat) // SAMPLED)
    width = plain.shape[-1] if plain.dim() else 1
    while stride > 1 and math.gcd(stride, width) > 1:  # Otherwise the sample would be a few columns of a matrix.
        stride += 1
    return flat[::stride].to(_wide(flat), copy=True)


def _wide(plain: Tensor) -> Any:
    return torch.float64 if plain.dtype is torch.float64 else torch.float32
