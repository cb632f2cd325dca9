"""Watcher: a watch on one model. It holds what the checks at all places share, and sees to what waits."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from hookline import Cache, Site
from hookline._kernel import PLAIN, WARN, Call, Tap, Where, is_running, leaves, plain_taps, short_form, unwrap
from hookline._tables import count
from hookline._torch import is_dynamo_loaded, when_backward_ends
from hookline._watch import reports
from hookline._watch.bad_values import Finding, Flags, Rule, examine, is_bad
from hookline._watch.logs import Statistics, targets_of
from hookline._watch.places import Check
from hookline._watch.scope import in_order_of_calls, outermost, parameters_of, places_of, suspects
from hookline._watch.silence import warn_if_by_itself, warn_if_missed, warn_of_no_steps, warn_of_transform
from hookline._watch.steps import Steps, span
from hookline.errors import BadValue, HooklineError

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
        self._inner, self._outer = unwrap(model), outermost(model)
        self.rule, self.backward, self.at_once, self._again = rule, backward, at_once, again
        self._scaler, self._to = scaler, to
        self._hooks = short_form(model)
        ignore = list(ignore) if isinstance(ignore, Iterator) else ignore  # It is looked at twice.
        self._places = places_of(model, where, ignore)
        self._checks: list[Check] = []
        self._parameters = parameters_of(model, self._places, ignore)
        self._backwards = list(dict.fromkeys(one for held in self._parameters.values() for one in held))[::-1]
        self.flags = Flags()
        self.steps_taken = Steps(self._inner, optimizers, self._before_step, self._after_step)
        self.statistics = Statistics(every, self._parameters)
        self._date: tuple[int, int] | None = None  # Of the forward that this is a second look at.
        self.closes = False  # Whether it ends with the first bad value: see the callback for transformers.
        self._forget()
        self._hooks._add(self._taps())
        self._hooks.when_missing("ignore")
        named = {place.site for place in self._places if place.exact}
        for tap in self._hooks._taps:
            if tap.site in named and tap.site != Site(""):
                tap.missing = WARN

    def _forget(self) -> None:
        self.is_over = True
        self.forwards = 0
        self.latest: Tensor | None = None  # What was looked at last: it may come again, from the next module out.
        self.version = -1
        self.task = -1  # The backward that runs, or ran last.
        self.latest_at = self.last = self.arrived = _NOWHERE  # That; what the model returned; the last gradient.
        self._began: reports.Arguments | None = None
        self._has_looked = False  # Whether the gradients of the parameters were looked at after the last backward.
        self._is_announced = False  # Whether a pass has begun, in which the model itself may be called or not.
        self._is_training = False  # Whether the pass that runs began with gradients.
        self._passes_over = False  # Whether it has warned of a torch.func transform.
        self._is_waiting = False  # Whether a forward that may yet be trained with is to be counted.
        self._is_trained = False  # Whether forwards have begun as those of training do.
        self._steps_before = self.steps
        self._methods: dict[Site, None] = {}  # Those that called a part of the model before any forward of it.

    @property
    def steps(self) -> int:
        """How many steps are over."""
        return self.steps_taken.done

    @property
    def log(self) -> Cache:
        """The statistics so far: `watch.log['h.0["rms"]']` is the latest, `.calls(...)` all of them."""
        if not self.statistics.every:
            raise HooklineError(
                "this watch keeps no statistics: hl.watch(model, every=100) keeps those of each hundredth step"
            )
        self.settle()
        return self.statistics.log.cache()

    @property
    def logged(self) -> list[int]:
        """The steps of which statistics were kept."""
        self.settle()
        return list(self.statistics.log.steps)

    def __repr__(self) -> str:
        kept = self.logged
        told = f"; statistics of {count(len(kept), 'step')}, {span(kept)}, in its log" if kept else ""
        return f"a watch on {type(self._inner).__name__}: {count(self.steps, 'step')}{told}"

    def step(self) -> None:
        """Say that a step is over, where no optimizer of torch's says so."""
        self.check()
        if not self._has_looked:
            self._check_parameters()
        self.steps_taken.trains = True
        self._count()

    def settle(self) -> None:
        """Hand on the statistics of the step that is over; an optimizer that steps yet does not show in them."""
        self.statistics.settle()

    def check(self) -> None:
        """Look now at all that waits on a device, and raise if something is bad."""
        self.latest = None
        bad = self.flags.read(self.scale() if len(self.flags) and self._scaler is not None else 1.0)
        for note, number in bad:
            if note.is_gradient and self.is_lowering(self.scale()):
                continue
            raise self._blame_note(note.site, number, note.what, note.number, note.is_gradient)
        self.check_graphs()

    def __enter__(self) -> Watcher:
        self._hooks._ledger.verb = ""  # It is entered, or an error says why not.
        self._forget()
        self.is_over = False
        self.statistics.targets = targets_of(self._to)
        self.steps_taken.open()
        try:
            self.statistics.begin(self.steps)
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
                self._count_waiting()
                warn_if_missed(self._hooks, self._inner, self._places)
                if not (self.forwards or self.steps_taken.done or self.task != -1):
                    warn_if_by_itself(self._hooks, self._inner, self._methods)
                if self.statistics.every and self.steps == self._steps_before:
                    warn_of_no_steps(self._hooks, self._inner, self.forwards, self._is_trained, self.task != -1)
            self.settle()
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
        self.latest = self._began = None
        for check in self._checks:
            check.extreme = None
        self.statistics.end()

    # What the checks ask and say.

    def waits(self, tensor: Tensor) -> bool:
        """Whether a tensor is read later, together with others, since reading it would wait for its device."""
        return not tensor.is_cpu and not self.at_once

    def begin_pass(self) -> None:
        """Say that a pass begins, in which parts of the model may be called and not the model itself."""
        self._begin_pass()
        self._is_announced = True

    def _begin_pass(self) -> None:
        self._end_step()
        self.latest = None
        self.forwards += 1
        self._is_training = torch.is_grad_enabled()

    def begin_part(self) -> None:
        """Say that a part of the model is called, and no forward of the model came before."""
        method = reports.method_around(self._inner)
        if method is not None:
            self._methods[method] = None

    def begin_forward(self, call: Call) -> None:
        """A forward of the model begins."""
        if len(self.flags):  # Of a forward that no backward came after.
            self.check()
        self._count_waiting()
        if not self._is_announced:
            self._begin_pass()
        self._is_announced = False
        if torch.is_grad_enabled() and call.module.training:
            self.steps_taken.trains = self._is_trained = True
        given = leaves((call.args, dict(call.kwargs)))
        if self._again and not self.at_once and (self._outer is not self._inner or any(map(self.waits, given))):
            self._began = reports.Arguments.of(call)

    def end_forward(self, output: Any) -> None:
        """A forward of the model is over. If a backward follows, what waits is read after that: once for both."""
        self.latest = None
        self._is_training = False
        self._is_waiting = not self.steps_taken.trains
        if any(tensor.requires_grad for tensor in leaves(output)):
            return
        self.check()
        self._began = None
        self._count_waiting()

    def begin_backward(self, task: int) -> None:
        """A backward begins: see to it when it is over, before any optimizer takes its gradients."""
        self._end_step()
        self.task, self.arrived = task, _NOWHERE
        when_backward_ends(self._end_backward)

    def _end_backward(self) -> None:
        if self.is_over:
            return
        self.check()
        self._check_parameters()
        self._has_looked = not is_running()  # FSDP puts gradients there when everybody else is done: so look again.
        self._began = None

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.check_graphs()
        if self.steps_taken.has_stepped(optimizer):  # No pass was seen to begin: it was a compiled graph's.
            self._end_step()
        held = [one for group in optimizer.param_groups for one in group["params"]]
        if not self._has_looked:
            self._check_parameters(held)  # Nothing was seen of the backward, or it still runs.
        self.statistics.sample(held, self.steps_taken.has_stepped())

    def _after_step(self) -> None:
        self._is_waiting = False
        self.statistics.close(self.steps)

    def _end_step(self) -> None:
        """No further optimizer belongs to the step before: something else begins."""
        self.steps_taken.begin_pass()
        self._has_looked = False
        self.settle()

    def _count(self) -> None:
        """Count a step that no optimizer has told of."""
        self.steps_taken.done += 1
        self.statistics.close(self.steps)
        self._end_step()

    def _count_waiting(self) -> None:
        """Count the forward before, unless it is one of training: then it is a part of a step."""
        is_waiting, self._is_waiting = self._is_waiting, False
        if is_waiting and not self.steps_taken.trains:
            self._count()

    def pass_over(self, site: Site) -> None:
        """Warn, once, of a value of a torch.func transform: inside vmap it has no numbers that can be read."""
        if not self._passes_over:
            self._passes_over = True
            warn_of_transform(site)

    # What is bad.

    def blame(self, site: Site, finding: Finding, value: Any, call: Call, calls: list[Call]) -> BadValue:
        """Say what is known of a value that is bad, from a second run of the module that made it too."""
        model = self._inner
        origin = reports.origin(model, call, calls)
        made_in = call if origin is None else origin.around
        if origin is None and call.site.method:  # Inside a forward, functions are seen as that of the forward.
            forwards = [one for one in calls if one.module is call.module and not one.site.member]
            made_in = forwards[0]._replace(site=Site(call.site.path)) if forwards else call
        is_here = made_in is not None and any(made_in.module is module for module in model.modules())
        can_run = is_here and not (made_in is call and call.site.function)
        inside = reports.inside(model, made_in, self.rule, finding) if self._again and can_run else None  # type: ignore[arg-type]
        when = self._when(call.number)
        return self._dated(reports.of_forward(site, finding, value, call, model, origin, inside, when))

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
            seen = reports.again(self._inner, began, self._second)
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

    def _check_parameters(self, held: Iterable[Tensor] | None = None) -> None:
        """Look at the gradients of the parameters, those last in the model first: so they were made."""
        chosen = self._backwards
        if held is not None:
            ids = {id(one) for one in held}
            chosen = [one for one in chosen if id(one) in ids]
        found = [(one, gradient) for one in chosen if (gradient := one.grad) is not None]
        scale = self.scale()
        if self.statistics.row is not None:
            self.statistics.row.add_gradients(self._backwards, scale, keep=held is not None)
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

    def check_graphs(self) -> None:
        """Look at what compiled graphs have noted."""
        if not is_dynamo_loaded() or all(check.extreme is None for check in self._checks):
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

    def note(self, site: Site, plain: Tensor) -> None:
        """Take a value into the statistics, unless it is one of an evaluation amid training."""
        row = self.statistics.row
        if row is not None and (self._is_training or torch.is_grad_enabled() or not self.steps_taken.trains):
            row.add(str(site), plain)

    def _taps(self) -> list[Tap]:
        """Make a check for each place, and those at the model itself, where a forward begins and ends."""
        session = self._hooks._ledger.session
        # A mask of -Inf that the model is given is not a mistake, and sizes are those of the data.
        first = Check(Site("", "inputs"), self, Rule(None, self.rule.inf, below=False), False)
        last = Check(Site(""), self, self.rule, self.backward, Site("") in [place.site for place in self._places])
        self._checks = [last, first]
        taps: list[Tap] = []
        for place in [one for one in self._places if one.site != Site("")]:
            check = Check(place.site, self, self.rule, self.backward)
            check.is_torchs = type(place.module).__module__.startswith("torch.nn.")
            self._checks.append(check)
            if place.site[1:] == PLAIN:
                named = [(place.site.path, place.module, place.siblings)]
                taps += plain_taps(named, False, check, session, "")  # type: ignore[arg-type]
            else:
                taps.append(self._hooks._tap(place, check, ""))  # type: ignore[arg-type]
        ends = [Tap(one.site, self._inner, one, session, False, "") for one in (first, last)]  # type: ignore[arg-type]
        first.bounds = last.bounds = self._outer is self._inner
        if not first.bounds:  # What is compiled begins and ends outside of its graph.
            begin = Check(first.site, self, first.rule, False, forward=False)
            end = Check(last.site, self, self.rule, self.backward, forward=False)
            ends += [Tap(one.site, self._outer, one, session, False, "") for one in (begin, end)]  # type: ignore[arg-type]
        return [*ends, *taps]
