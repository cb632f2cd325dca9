"""Watcher: a watch on one model. It holds what the checks at all places share, and sees to what waits."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from hookline.actions import Call
from hookline.cache import Cache
from hookline.errors import BadValue
from hookline.hooks import PLAIN
from hookline.ranks import is_running
from hookline.sites import Site
from hookline.tree import unwrap
from hookline.values import leaves
from hookline.verbs import brief
from hookline.watching import looks, reports
from hookline.watching.checks import Finding, Rule, examine, is_bad, numbers_in
from hookline.watching.flags import Flags
from hookline.watching.logs import Log, Row, sample
from hookline.watching.places import Check
from hookline.watching.scope import in_order_of_calls, outermost, parameters_of, places_of, suspects
from hookline.watching.steps import Steps
from hookline.watching.targets import targets_of
from hookline.where import Where
from hookline.wiring.taps import Tap, plain_taps

_NOWHERE: tuple[Check | None, int] = (None, 0)


class Watcher:
    """A watch on one model: what `with hl.watch(model) as watch:` gives."""

    def __init__(
        self,
        model: nn.Module,
        where: tuple[Where, ...],
        rule: Rule,
        ignore: Where | None,
        backward: bool,
        at_once: bool,
        again: bool,
        every: int | None,
        to: Any,
        optimizers: Iterable[torch.optim.Optimizer],
        scaler: Any,
    ) -> None:
        self._model = weakref.ref(model)
        self._inner = unwrap(model)
        self._outer = outermost(model)
        self.rule, self.backward, self.at_once, self._again = rule, backward, at_once, again
        self._scaler, self._every, self._to = scaler, every, to
        self._hooks = brief(model)
        self._places = places_of(model, where, ignore)
        self._checks: list[Check] = []
        self._parameters = parameters_of(self._places)
        self._backwards = [one for held in reversed(list(self._parameters.values())) for one in reversed(held)]
        self.flags = Flags()
        self.steps_taken = Steps(self._inner, optimizers, self._before_step, self._after_step)
        self._log = Log()
        self.row: Row | None = None  # Of the step that is running, if it is one of which statistics are kept.
        self._before: dict[nn.Parameter, Tensor] = {}  # Samples of the parameters, while an optimizer steps.
        self._date: tuple[int, int] | None = None  # Of the forward that this is a second look at.
        self.closes = False  # Whether it ends with the first bad value: see the callback for transformers.
        self._forget()
        self._hooks._add(self._taps())
        self._hooks.when_missing("ignore")

    def _forget(self) -> None:
        self.is_over = True
        self.forwards = 0
        self.latest: Tensor | None = None  # What was looked at last: it may come again, from the next module out.
        self.version = -1
        self.task = -1  # The backward that runs, or ran last.
        self.latest_at = self.last = self.arrived = _NOWHERE  # That; what the model returned; the last gradient.
        self._began: looks.Arguments | None = None
        self._has_looked = False  # Whether the gradients of the parameters were looked at since the last step.

    @property
    def steps(self) -> int:
        """How many steps are over."""
        return self.steps_taken.done

    @property
    def log(self) -> Cache:
        """The statistics so far: `watch.log['h.0["rms"]']` is the latest, `.calls(...)` all of them."""
        return self._log.cache()

    @property
    def logged(self) -> list[int]:
        """The steps of which statistics were kept."""
        return list(self._log.steps)

    def step(self) -> None:
        """Say that a step is over, where no optimizer of torch's says so."""
        self.check()
        if not self._has_looked:
            self._check_parameters()
        self.steps_taken.by_hand += 1
        self._has_looked = False
        self._end_row()

    def check(self) -> None:
        """Look now at all that waits on a device, and raise if something is bad."""
        self.latest = None
        bad = self.flags.read(self.scale() if len(self.flags) and self._scaler is not None else 1.0)
        for note, number in bad:
            if note.is_gradient and self.is_lowering(self.scale()):
                continue
            raise self._blame_note(note.site, number, note.what, note.number, note.is_gradient)
        self._check_graphs()

    def __enter__(self) -> Watcher:
        self._forget()
        self.is_over = False
        self.targets = targets_of(self._to)
        self.steps_taken.open()
        try:
            self._begin_row()
            self._hooks.__enter__()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.is_over:
            return
        try:
            if kind is None:
                self.check()
        except BaseException as found:
            self._hooks.__exit__(type(found), found, None)
            raise
        else:
            self._hooks.__exit__(kind, error, trace)
        finally:
            self._close()

    def close(self) -> None:
        """End the watch, as the end of its block does; nothing more is looked at."""
        if not self.is_over:
            self._hooks.__exit__(BadValue, None, None)
            self._close()

    def _close(self) -> None:
        self.is_over = True
        self.steps_taken.close()
        self.flags.forget()
        self.row, self.latest, self._began, self._before = None, None, None, {}
        for check in self._checks:
            check.extreme = None
        for target in self.targets:
            target.close()

    # What the checks ask and say.

    def waits(self, tensor: Tensor) -> bool:
        """Whether a tensor is read later, together with others, since reading it would wait for its device."""
        return not tensor.is_cpu and not self.at_once

    def begin_pass(self) -> None:
        """Count calls anew, where parts of the model are called and not the model itself."""
        self.latest = None
        self.forwards += 1

    def begin_forward(self, call: Call) -> None:
        """A forward of the model begins."""
        if len(self.flags):  # Of a forward that no backward came after.
            self.check()
        self.begin_pass()
        if torch.is_grad_enabled() and call.module.training:
            self.steps_taken.trains = True
        given = leaves((call.args, dict(call.kwargs)))
        if self._again and not self.at_once and (self._outer is not self._inner or any(map(self.waits, given))):
            self._began = looks.Arguments.of(call)

    def end_forward(self, output: Any) -> None:
        """A forward of the model is over. If a backward follows, what waits is read after that: once for both."""
        self.latest = None
        if any(tensor.requires_grad for tensor in leaves(output)):
            return
        self.check()
        self._began = None
        if not self.steps_taken.trains:
            self.steps_taken.forwards += 1
            self._end_row()

    def begin_backward(self, task: int) -> None:
        """A backward begins: see to it when it is over, before any optimizer takes its gradients."""
        self.task, self.arrived = task, _NOWHERE
        Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        if self.is_over:
            return
        self.check()
        self._check_parameters()
        self._began = None

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._check_graphs()
        if not self._has_looked:
            self._check_parameters(at_step=True)  # Nothing was seen of the backward: it ran in a compiled graph.
        if self.row is not None:
            held = [one for group in optimizer.param_groups for one in group["params"]]
            self._before |= {one: sample(one) for one in held}

    def _after_step(self, _optimizer: torch.optim.Optimizer) -> None:
        self._has_looked = False
        if self.steps_taken.are_level:
            self._end_row()

    # What is bad.

    def blame(self, site: Site, finding: Finding, value: Any, call: Call, calls: list[Call]) -> BadValue:
        """Say what is known of a value that is bad, from a second run of the module that made it too."""
        model = self._inner
        came_in = any(
            (plain := numbers_in(tensor)) is not None and examine(plain, Rule(below=False)) is not None
            for tensor in leaves((call.args, dict(call.kwargs)))
        )
        around = next((one for one in calls if one.module is not call.module), None) if came_in else call
        inside = looks.inside(model, around, self.rule) if self._again and around is not None else None
        return self._dated(reports.of_forward(site, finding, value, call, model, inside, self._when(call.number)))

    def blame_gradient(self, site: Site, finding: Finding, gradient: Tensor, number: int) -> BadValue:
        """Say what is known of a gradient that is bad."""
        before, last = self.arrived, self.last
        is_output = last[0] is not None and last[0].site == site._replace(port="output") and last[1] == number
        report = reports.of_gradient(site, finding, gradient, number, before, is_output, self._when(number))
        return self._dated(report)

    def _blame_note(self, site: Site, number: float, what: str, call: int, backward: bool) -> BadValue:
        """Say what is known of a value that was read too late; a second run that waits for each knows more."""
        began = self._began
        if not backward and began is not None:
            seen = looks.again(self._inner, began, self._second)
            if seen is not None:
                return self._dated(seen)
        return self._dated(reports.of_note(site, number, what, call, backward, self._when(call)))

    def _second(self) -> Watcher:
        """Return a watch for a second look at the same forward."""
        where = tuple(place.site for place in self._places)
        second = Watcher(self._inner, where, self.rule, None, False, True, True, None, None, (), None)
        second._date = self._now()
        return second

    def _now(self) -> tuple[int, int]:
        """Return how many steps and forwards came before this one."""
        return self._date or (self.steps, max(self.forwards - 1, 0))

    def _dated(self, error: BadValue) -> BadValue:
        error.step, error.forward = self._now()
        if self.closes:
            self.close()
        return error

    def _when(self, number: int) -> str:
        step, forward = self._now()
        return f"step {step}{f' (forward {forward})' if forward != step else ''}, call #{number}"

    # Gradients of parameters, and compiled graphs.

    def scale(self) -> float:
        """Return what gradients are multiplied by."""
        scaler = self._scaler
        return float(scaler.get_scale()) if scaler is not None and scaler.is_enabled() else 1.0

    def is_lowering(self, scale: float) -> bool:
        """Whether a scaler still has a way to go down, and leaves out a step whose gradients are bad."""
        return self._scaler is not None and scale > 1

    def _check_parameters(self, at_step: bool = False) -> None:
        """Look at the gradients of the parameters, those last in the model first: so they were made."""
        found = [(one, gradient) for one in self._backwards if (gradient := one.grad) is not None]
        self._has_looked = not is_running()  # FSDP puts them there when everybody else is done: so look again then.
        scale = self.scale()
        if self.row is not None:
            self.row.add_gradients(self._parameters, scale, keep=at_step)
        if not self.backward:
            return
        for parameter, plain in suspects(found, self.rule, scale, self.waits):
            finding = examine(plain / scale if scale != 1 else plain, self.rule)
            if finding is not None and not self.is_lowering(scale):
                raise self._dated(self._blame_parameter(parameter, finding))

    def _blame_parameter(self, parameter: nn.Parameter, finding: Finding) -> BadValue:
        name = next((name for name, one in self._inner.named_parameters() if one is parameter), "")
        gradient = parameter.grad
        assert gradient is not None
        when = self._when(0).rpartition(", ")[0]
        return reports.of_parameter(Site(name, "param"), finding, parameter, gradient, when)

    def _check_graphs(self) -> None:
        """Look at what compiled graphs have noted."""
        if "torch._dynamo" not in sys.modules or all(check.extreme is None for check in self._checks):
            return
        order = {site: number for number, site in enumerate(in_order_of_calls([one.site for one in self._checks]))}
        checks = sorted(self._checks, key=lambda check: order[check.site])
        seen = [(check, check.extreme) for check in checks if check.extreme is not None]
        by_device: dict[torch.device, list[Tensor]] = {}
        for check, noted in seen:
            check.extreme = None
            by_device.setdefault(noted.device, []).append(noted)
        read = {device: iter(torch.cat(all_).tolist()) for device, all_ in by_device.items()}
        for check, noted in seen:
            for _ in range(len(noted)):
                number = next(read[noted.device])
                if is_bad(number, check.rule):
                    raise self._blame_note(check.site, number, reports.COMPILED, 0, False)

    # Statistics.

    def _begin_row(self) -> None:
        self.row = Row() if self._every is not None and self.steps % self._every == 0 else None

    def _end_row(self) -> None:
        row = self.row
        if row is not None:
            row.add_weights(self._parameters)
            row.add_updates(self._parameters, self._before)
            numbers = self._log.add(self.steps - 1, row.read())
            for target in self.targets:
                target.write(self.steps - 1, numbers)
        self._before = {}
        self._begin_row()

    def _taps(self) -> list[Tap]:
        """Make a check for each place, and those at the model itself, where a forward begins and ends."""
        session = self._hooks._ledger.session
        # A mask of -Inf that the model is given is no mistake, and sizes are those of the data.
        first = Check(Site("", "inputs"), self, Rule(None, self.rule.inf, below=False), False)
        last = Check(Site(""), self, self.rule, self.backward, Site("") in [place.site for place in self._places])
        self._checks = [last, first]
        taps: list[Tap] = []
        for place in self._places:
            check = last if place.site == Site("") else Check(place.site, self, self.rule, self.backward)
            self._checks += [check] if check is not last else []
            if place.site[1:] == PLAIN and check is not last:
                named = [(place.site.path, place.module, place.siblings)]
                taps += plain_taps(named, False, check, session, "")  # type: ignore[arg-type]
            elif check is not last:
                taps.append(self._hooks._tap(place, check, ""))  # type: ignore[arg-type]
        ends = [Tap(one.site, self._inner, one, session, False, "") for one in (first, last)]  # type: ignore[arg-type]
        first.bounds = last.bounds = self._outer is self._inner
        if not first.bounds:  # What is compiled begins and ends outside of its graph.
            begin = Check(first.site, self, first.rule, False, forward=False)
            end = Check(last.site, self, self.rule, self.backward, forward=False)
            ends += [Tap(one.site, self._outer, one, session, False, "") for one in (begin, end)]  # type: ignore[arg-type]
        return [*ends, *taps]
