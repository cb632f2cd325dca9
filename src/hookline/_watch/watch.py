"""`hl.watch`: its options, the `Watcher` that it returns, and the `ValueCheck` that looks at each value.

A check changes no value. On the hot path it gets only the value; the other details of an error are looked up when the
error is raised. Reading a value from a GPU waits for the GPU. So a check stores a note there, the value's largest
element, and the watcher reads all notes together at the end of a forward or backward.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator
from functools import partial
from numbers import Integral, Real
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from hookline import Cache, Site
from hookline._kernel import (
    Call,
    Found,
    OutputObserver,
    Where,
    add_observers,
    children,
    describe,
    find_places,
    leaf_places,
    leaves,
    refuse_flags,
    running_calls,
    short_form,
    unwrap,
    warn_unless_entered,
    wrapped_model,
    write_subscripts,
)
from hookline._scan.list_sites import every_module
from hookline._tables import count
from hookline._torch import (
    calling_line,
    current_transform,
    graph_task,
    is_dynamo_loaded,
    is_running,
    known_version,
    when_backward_ends,
)
from hookline._watch import reports, rerun
from hookline._watch.bad_values import (
    Finding,
    Flags,
    Note,
    Rule,
    bad_gradients,
    examine,
    is_bad,
    is_plain,
    is_suspicious,
    judged,
    numbers_in,
)
from hookline._watch.reports import warn_if_by_itself, warn_if_missed, warn_of_no_steps, warn_of_transform
from hookline._watch.steps_and_statistics import Parameters, Statistics, Steps, span, targets_of
from hookline.errors import BadValue, HooklineError, SiteError


def watch(
    model: nn.Module,
    *where: Where,
    limit: float | None = None,
    inf: bool = True,
    ignore: Where | None = None,
    backward: bool = True,
    every: int | None = None,
    to: Any = None,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
    scaler: Any = None,
    at_once: bool = False,
    again: bool = True,
) -> Watcher:
    """Stop at the first NaN, Inf or value over a limit, forward or backward, and say where it came from.

    >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    >>> with torch.no_grad():
    ...     _ = model[2].weight.fill_(float("nan"))
    >>> with watch(model):
    ...     model(torch.ones(3, 4))
    Traceback (most recent call last):
        ...
    hookline.BadValue: '2' gave NaN: 6 of 6 elements (100%), the first at [0, 0]; forward, step 0, call #0
                 dtype    shape       min      max     mean  nan  inf
    ───────────  ───────  ──────  ───────  ───────  ───────  ───  ───
    output       float32  (3, 2)        -        -        -    1    0
    input input  float32  (3, 4)        0   0.6281    0.157    0    0
    weight       float32  (2, 4)        -        -        -    1    0
    bias         float32  (2,)    -0.3148  -0.1266  -0.2207    0    0
    'weight' of Linear is bad already: an earlier update did it, or it was loaded so.

    Args:
        where: The places to check; by default, the output of every module.
        limit: The largest magnitude that a value or a gradient may have.
        inf: Whether Inf is bad, as NaN always is.
        ignore: Places to leave out, such as a module that returns masks of -Inf.
        backward: Whether to check gradients too: those at these places, and those of the parameters there.
        every: Keep statistics of each place every `every` steps: see `Watcher.log`.
        to: Where statistics go: a folder or SummaryWriter (TensorBoard), a wandb run, a function of (step, numbers).
        optimizer: The optimizer whose steps count; by default, any that holds parameters of the model.
        scaler: A GradScaler. Gradients that overflow are not an error while it can lower its scale.
        at_once: Read each value on a GPU as it passes, which waits for the GPU each time, instead of once after a pass.
        again: Whether the module that gave a bad value may run again to find the function that made it; for values on a
            GPU, the whole model runs again.
    """
    if not _is_a(nn.Module, model):
        raise SiteError(f"a model is a torch.nn.Module, not {type(model).__name__}")
    if limit is not None and not (_is_a(Real, limit) and limit > 0 and math.isfinite(limit)):
        raise HooklineError(f"limit={limit!r} is not a size limit; give a positive number")
    if every is not None and (not _is_a(Integral, every) or every < 1):
        raise HooklineError(f"every={every!r} is not a number of steps; every=100 keeps statistics of each hundredth")
    if to is not None and every is None:
        raise HooklineError("to= says where statistics go, and every= says how often: give every= too")
    refuse_flags(inf=inf, backward=backward, at_once=at_once, again=again)
    optimizers = _optimizers(optimizer)
    if scaler is not None and not hasattr(scaler, "get_scale"):
        raise HooklineError(f"scaler= takes a GradScaler, not {scaler!r}")
    rule = Rule(limit, inf)
    watcher = Watcher(model, where, rule, ignore, backward, at_once, again, every, to, optimizers, scaler)
    warn_unless_entered(watcher._hooks, "watch", calling_line())
    return watcher


def _is_a(kind: type, given: Any) -> bool:
    """Return True if `given` is an instance of `kind` and not a bool, which Python counts as a number."""
    return isinstance(given, kind) and not isinstance(given, bool)


def _optimizers(optimizer: Any) -> list[torch.optim.Optimizer]:
    """Return the optimizers in `optimizer=` as a list: none, one or several."""
    is_several = isinstance(optimizer, Iterable) and not isinstance(optimizer, str)
    given = [] if optimizer is None else list(optimizer) if is_several else [optimizer]
    for one in given:
        if not isinstance(one, torch.optim.Optimizer):
            raise HooklineError(f"optimizer= takes torch optimizers, not {one!r}; watch.step() counts by hand")
    return given


def outermost(model: nn.Module) -> nn.Module:
    """Return the wrapper that `torch.compile` made, or the model itself if it is not compiled."""
    within: nn.Module | None = model
    while within is not None:
        if type(within).__name__ == "OptimizedModule":
            return within
        within = wrapped_model(within)
    return unwrap(model)


def in_order_of_calls(sites: list[Site]) -> list[Site]:
    """Return sites in the order in which modules usually return: each after the modules inside it."""
    found: list[Site] = []
    waiting: list[Site] = []
    for site in sites:
        while waiting and not f"{site.path}.".startswith(f"{waiting[-1].path}.".lstrip(".")):
            found.append(waiting.pop())
        waiting.append(site)
    return found + waiting[::-1]


def places_of(model: nn.Module, where: tuple[Where, ...], ignore: Where | None) -> list[Found]:
    """Return the places to watch: those in `where`, or the outputs of all modules, except those in `ignore`."""
    found = find_places(model, where or (every_module,))
    ignored = find_places(model, (ignore,)) if ignore is not None else []
    held = {id(module) for module in model.modules()} if ignored else set()
    stranger = next((place.module for place in ignored if id(place.module) not in held), None)
    if stranger is not None:
        raise SiteError(f"ignore= has a {type(stranger).__name__} that is not in the model, and leaves nothing out")
    left_out = {place.site for place in ignored}
    kept = [place for place in found if place.site not in left_out]
    if not kept:
        raise HooklineError(f"nothing is left to watch: ignore={ignore!r} leaves out every place")
    latest = next((place.site for place in kept if "-1" in (str(place.site.call), str(place.site.within))), None)
    if latest is not None:
        raise SiteError(
            f"'{latest}': a watch looks at each call as it comes, and which is the latest is known only afterwards; "
            "name it by its number, as in '#2', or all from one on, as in '#1:'"
        )
    return kept


def parameters_of(model: nn.Module, places: list[Found], ignore: Where | None) -> Parameters:
    """Return the parameters of each watched module and of the modules inside it, except ignored ones."""
    modules = [place.module for place in places]
    ignored = [place.module for place in find_places(model, (ignore,))] if ignore is not None else []
    watched = {id(one) for module in modules for one in module.parameters(recurse=False)}
    left_out = {id(one) for module in ignored for one in module.parameters()} - watched
    found: Parameters = {}
    for place in places:
        held = [one for one in place.module.parameters() if id(one) not in left_out]
        if held and not place.site.member:
            found[place.site.path] = held
    return found


_BEGIN = Site("", "inputs")


class ValueCheck(OutputObserver):
    """Check the values that pass one site, and their gradients."""

    kind = "watch"
    is_traceable = True
    # True if the site's module is from torch.nn. If such a module returns the tensor that was checked last, that tensor
    # needs no new check. A user's module may have modified it through `.data` or numpy, which don't raise its version.
    is_torchs = False

    def __init__(self, site: Site, watcher: Watcher, rule: Rule, backward: bool, forward: bool = True) -> None:
        self.site = site
        self.watcher = watcher
        self.rule = rule
        self.backward = backward  # True if gradients are checked.
        self.forward = forward  # True if values are checked.
        self.is_root = site == Site("")
        self.bounds = True  # True if the forward of the model begins or ends at this site.
        self.seen = -1  # The number of the model's forward in which `calls` are counted.
        self.calls = 0
        self.extreme: Tensor | None = None  # The largest elements, as a compiled graph computed them.

    def __call__(self, value: Any, call: Call | None, _is_whole: bool) -> Any:
        """Check a value outside the hot path, and note where the model's forward begins and ends."""
        if is_dynamo_compiling():
            return self._trace(value)
        assert call is not None
        if call.site.is_gradient:
            self.arrive(call.number, value, call.site)
            return value
        if self.bounds and self.site == _BEGIN:
            self.watcher.begin_forward(call)
        self.keep(value, call)
        if self.bounds and self.is_root:
            self.watcher.end_forward(value)
        return value

    def keep(self, value: Any, call: Call | None = None, is_new: bool = False) -> None:
        """Check a value as it passes."""
        watcher = self.watcher
        if self.seen != watcher.forwards:
            self.seen = watcher.forwards
            self.calls = 0
            if not self.seen:
                watcher.begin_part()
        number = self.calls
        self.calls = number + 1
        if not is_plain(value):
            self._look_at_each(value, number, call)
            return
        # A container usually returns its last module's output, which was checked already.
        is_latest = value is watcher.latest and known_version(value) == watcher.version != -1
        requires_grad = value.requires_grad
        if self.forward and is_latest and self.is_torchs:
            if watcher.statistics.row is not None:
                watcher.note(self.site if call is None else call.site, value.detach())
        elif self.forward:
            self._look(value.detach() if requires_grad else value, value, number, call)
        if is_latest:
            if self.is_root:
                watcher.last = watcher.latest_at
            return
        watcher.latest, watcher.version, watcher.latest_at = value, known_version(value), (self, number)
        if requires_grad and self.backward and value.grad_fn is not None:
            value.register_hook(partial(self.arrive, number))

    def _look_at_each(self, value: Any, number: int, call: Call | None) -> None:
        """Check a value that is not one plain tensor."""
        for tensor in [value] if isinstance(value, Tensor) else leaves(value):
            plain = numbers_in(tensor)
            is_latest = tensor is self.watcher.latest and known_version(tensor) == self.watcher.version != -1
            if plain is not None and self.forward and not (is_latest and self.is_torchs):
                self._look(plain, value, number, call)
            if plain is None or is_latest:
                continue
            self.watcher.latest, self.watcher.version, self.watcher.latest_at = (
                tensor,
                known_version(tensor),
                (self, number),
            )
            if tensor.requires_grad and self.backward and tensor.grad_fn is not None:
                tensor.register_hook(partial(self.arrive, number))

    def _look(self, plain: Tensor, value: Any, number: int, call: Call | None) -> None:
        """Check plain numbers now, or store their largest element on their device, to be read later."""
        watcher = self.watcher
        if watcher.statistics.row is not None and (call is None or call.site.port == "output"):
            if current_transform() is None:
                watcher.note(self.site if call is None else call.site, plain)
            else:
                watcher.pass_over(self.site)
        if watcher.reads_later(plain):
            site = self.site if call is None else call.site
            note = Note(site, number, self.rule, False, describe(plain))
            if watcher.flags.add(plain, note):
                watcher.check()
            return
        if not self._is_suspicious(plain):
            return
        finding = examine(plain, self.rule)
        if finding is None:
            return
        watcher.check_graphs()  # Values inside a compiled module came before this one.
        calls = running_calls()
        call = call or calls[0]
        site = call.site._replace(index=call.site.index + _index(value, plain))
        raise watcher.error_for(site, finding, value, call._replace(number=number), calls)

    def _is_suspicious(self, plain: Tensor) -> bool:
        """Return True if a value may be bad. Inside vmap a value can't be read, which the watch warns about once."""
        try:
            return is_suspicious(plain, self.rule.limit)
        except RuntimeError:
            if current_transform() is None:
                raise
            self.watcher.pass_over(self.site)
            return False

    def arrive(self, number: int, gradient: Tensor | None, site: Site | None = None) -> None:
        """Check a gradient as it arrives."""
        watcher = self.watcher
        if watcher.is_closed or gradient is None:
            return
        if graph_task() != watcher.task:
            watcher.begin_backward(graph_task())
        plain = gradient if is_plain(gradient) and not gradient.requires_grad else numbers_in(gradient)
        if plain is None:
            return
        if watcher.reads_later(plain):
            site = site or self.site._replace(port="grad_output")
            if watcher.flags.add(plain, Note(site, number, self.rule, True, describe(plain))):
                watcher.check()
            return
        if self._is_suspicious(plain):
            self._judge_gradient(plain, gradient, number, site or self.site._replace(port="grad_output"))
        watcher.arrived = (self, number)

    def _judge_gradient(self, plain: Tensor, gradient: Tensor, number: int, site: Site) -> None:
        watcher = self.watcher
        scale = watcher.scale()
        finding = examine(plain / scale if scale != 1 else plain, self.rule)
        if finding is not None and not watcher.is_lowering(scale):
            raise watcher.error_for_gradient(site, finding, gradient, number)

    def _trace(self, value: Any) -> Any:
        """Compute the largest element inside a compiled graph; it becomes one more output of the graph."""
        found: list[Tensor] = []
        for tensor in _traced(value):
            if tensor.is_floating_point() and tensor.numel():
                plain = judged(tensor.detach(), self.rule)
                # Inductor fuses this with the kernel that computes the value.
                largest = plain.abs().amax() if self.rule.below else plain.amax()
                found.append(largest.to(torch.float32))
        if self.forward and found:
            self.extreme = torch.stack([one.to(found[0].device) for one in found])
        return value

    def __repr__(self) -> str:
        return "watch"


_NOWHERE: tuple[ValueCheck | None, int] = (None, 0)


class Watcher:
    """A watch on one model, as in `with hl.watch(model) as watch:`."""

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
        self.rule, self.backward, self.at_once, self._may_rerun = rule, backward, at_once, again
        self._scaler, self._to = scaler, to
        self._hooks = short_form(model)
        ignore = list(ignore) if isinstance(ignore, Iterator) else ignore  # It is read twice.
        self._places = places_of(model, where, ignore)
        self._checks: list[ValueCheck] = []
        self._parameters = parameters_of(model, self._places, ignore)
        self._backwards = list(dict.fromkeys(one for held in self._parameters.values() for one in held))[::-1]
        self.flags = Flags()
        self.steps_taken = Steps(self._inner, optimizers, self._before_step, self._after_step)
        self.statistics = Statistics(every, self._parameters)
        self._rerun_of: tuple[int, int] | None = None  # The step and forward that a second run repeats.
        self._closes_on_error = False  # See `follow_trainer`.
        self._forget()
        add_observers(self._hooks, self._observed())

    def _forget(self) -> None:
        self.is_closed = True
        self.forwards = 0
        self.latest: Tensor | None = None  # The value checked last: the module around may return it again.
        self.version = -1
        self.task = -1  # The id of the current or latest backward.
        # The check and the call number at which the latest value, the model's output and the latest gradient were seen.
        self.latest_at = self.last = self.arrived = _NOWHERE
        self._began: rerun.Arguments | None = None
        self._has_looked = False  # True if the parameters' gradients were checked since the last backward.
        self._is_announced = False  # True if `begin_pass` was called, and no forward has followed yet.
        self._passes_over = False  # True after the warning about torch.func transforms.
        self._is_training = False  # True if the current pass began with gradients enabled.
        self._is_waiting = False  # True after a forward that counts as a step unless the model turns out to be trained.
        self._is_trained = False  # True if some forward ran in training mode with gradients.
        self._steps_before = self.steps
        self._methods: dict[Site, None] = {}  # Methods that called a part of the model before its first forward.

    @property
    def steps(self) -> int:
        """The number of finished steps."""
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
        """The numbers of the steps whose statistics were kept."""
        self.settle()
        return list(self.statistics.log.steps)

    def __repr__(self) -> str:
        kept = self.logged
        log = f"; statistics of {count(len(kept), 'step')}, {span(kept)}, in its log" if kept else ""
        return f"a watch on {type(self._inner).__name__}: {count(self.steps, 'step')}{log}"

    def step(self) -> None:
        """Count a step by hand, for training without a torch optimizer."""
        self.check()
        if not self._has_looked:
            self._check_parameters()
        self.steps_taken.trains = True
        self._count()

    def settle(self) -> None:
        """Write the statistics of the finished step. Later optimizer steps are not included."""
        self.statistics.settle()

    def check(self) -> None:
        """Read the notes on all devices now, and raise if a value was bad."""
        self.latest = None
        bad = self.flags.read(self.scale() if len(self.flags) and self._scaler is not None else 1.0)
        for note, number in bad:
            if note.is_gradient and self.is_lowering(self.scale()):
                continue
            raise self._error_for_note(note.site, number, note.what, note.number, note.is_gradient)
        self.check_graphs()

    def __enter__(self) -> Watcher:
        warn_unless_entered(self._hooks, "")  # No warning is needed from here on: the block is entered, or this raises.
        self._forget()
        self.is_closed = False
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
        if self.is_closed:
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
        """End the watch, as leaving its block does, but without checking the notes on devices."""
        if not self.is_closed:
            self._hooks.__exit__(BadValue, None, None)
            self._close()

    def _close(self) -> None:
        self.is_closed = True
        self.steps_taken.close()
        self.flags.forget()
        self.latest = self._began = None
        for check in self._checks:
            check.extreme = None
        self.statistics.end()

    # Called by the checks.

    def reads_later(self, tensor: Tensor) -> bool:
        """Return True if a tensor is to be read later, together with others: reading it now waits for its device."""
        return not tensor.is_cpu and not self.at_once

    def follow_trainer(self, trains: bool, close_on_error: bool = False) -> None:
        """Set whether a trainer trains the model: if so, a forward alone does not count as a step.

        With `close_on_error` the watch ends at the first bad value, for a trainer that does not report exceptions.
        """
        self.steps_taken.trains = trains
        self._closes_on_error = close_on_error

    def begin_pass(self) -> None:
        """Begin a pass in which parts of the model may be called without the model itself."""
        self._begin_pass()
        self._is_announced = True

    def _begin_pass(self) -> None:
        self._end_step()
        self.latest = None
        self.forwards += 1
        self._is_training = torch.is_grad_enabled()

    def begin_part(self) -> None:
        """Note that a part of the model is called before any forward of the model."""
        method = reports.method_around(self._inner)
        if method is not None:
            self._methods[method] = None

    def begin_forward(self, call: Call) -> None:
        """Note that a forward of the model begins."""
        if len(self.flags):  # These notes are from a forward without a backward.
            self.check()
        self._count_waiting()
        if not self._is_announced:
            self._begin_pass()
        self._is_announced = False
        if torch.is_grad_enabled() and call.module.training:
            self.steps_taken.trains = self._is_trained = True
        given = leaves((call.args, dict(call.kwargs)))
        if (
            self._may_rerun
            and not self.at_once
            and (self._outer is not self._inner or any(map(self.reads_later, given)))
        ):
            self._began = rerun.Arguments.of(call)

    def end_forward(self, output: Any) -> None:
        """Note that a forward of the model is over. If a backward can follow, the notes of both are read after it."""
        self.latest = None
        self._is_training = False
        self._is_waiting = not self.steps_taken.trains
        if any(tensor.requires_grad for tensor in leaves(output)):
            return
        self.check()
        self._began = None
        self._count_waiting()

    def begin_backward(self, task: int) -> None:
        """Note that a backward begins. Its notes are read when it ends, before any optimizer uses its gradients."""
        self._end_step()
        self.task, self.arrived = task, _NOWHERE
        when_backward_ends(self._end_backward)

    def _end_backward(self) -> None:
        if self.is_closed:
            return
        self.check()
        self._check_parameters()
        self._has_looked = not is_running()  # FSDP sets gradients after this callback, so they are checked again later.
        self._began = None

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.check_graphs()
        if self.steps_taken.has_stepped(optimizer):  # A pass ran in between, unseen, in a compiled graph.
            self._end_step()
        held = [one for group in optimizer.param_groups for one in group["params"]]
        if not self._has_looked:
            self._check_parameters(held)  # The watch did not see the backward, or it is still running.
        self.statistics.sample(held, self.steps_taken.has_stepped())

    def _after_step(self) -> None:
        self._is_waiting = False
        self.statistics.close(self.steps)

    def _end_step(self) -> None:
        """End the previous step: another pass begins, so no further optimizer can belong to that step."""
        self.steps_taken.begin_pass()
        self._has_looked = False
        self.settle()

    def _count(self) -> None:
        """Count a step without an optimizer."""
        self.steps_taken.done += 1
        self.statistics.close(self.steps)
        self._end_step()

    def _count_waiting(self) -> None:
        """Count the previous forward as a step, unless the model is being trained."""
        is_waiting, self._is_waiting = self._is_waiting, False
        if is_waiting and not self.steps_taken.trains:
            self._count()

    def pass_over(self, site: Site) -> None:
        """Warn once about a value inside a torch.func transform: inside vmap its numbers can't be read."""
        if not self._passes_over:
            self._passes_over = True
            warn_of_transform(site)

    # Errors about bad values.

    def error_for(self, site: Site, finding: Finding, value: Any, call: Call, calls: list[Call]) -> BadValue:
        """Return the error about a bad value; a second run of the module may show which function made it."""
        model = self._inner
        origin = reports.origin(model, call, calls)
        made_in = call if origin is None else origin.around
        if origin is None and call.site.method:  # A function in a method counts as one of the forward.
            forwards = [one for one in calls if one.module is call.module and not one.site.member]
            made_in = forwards[0]._replace(site=Site(call.site.path)) if forwards else call
        inside: rerun.BadFunction | None = None
        if self._may_rerun and made_in is not None and not (made_in is call and call.site.function):
            is_here = any(made_in.module is module for module in model.modules())
            inside = rerun.bad_function(model, made_in, self.rule, finding) if is_here else None
        when = self._when(call.number)
        return self._dated(reports.of_forward(site, finding, value, call, model, origin, inside, when))

    def error_for_gradient(self, site: Site, finding: Finding, gradient: Tensor, number: int) -> BadValue:
        """Return the error about a bad gradient."""
        before, last = self.arrived, self.last
        is_output = last[0] is not None and last[0].site == site._replace(port="output") and last[1] == number
        report = reports.of_gradient(site, finding, gradient, number, before, is_output, self._when(number))
        return self._dated(report)

    def _error_for_note(self, site: Site, number: float, what: str, call: int, backward: bool) -> BadValue:
        """Return the error about a value that was read late, with details from a second run if one is possible."""
        began = self._began
        if not backward and began is not None:
            seen = rerun.again(self._inner, began, self._second)
            if seen is not None:
                return self._dated(seen)
        return self._dated(reports.of_note(site, number, what, call, backward, self._when(call)))

    def _second(self) -> Watcher:
        """Return a watch for a second run of the same forward."""
        where = tuple(place.site for place in self._places)
        second = Watcher(self._inner, where, self.rule, None, False, True, True, None, None, (), None)
        second._rerun_of = self._now()
        return second

    def _now(self) -> tuple[int, int]:
        """Return the number of the current step and forward."""
        return self._rerun_of or (self.steps, max(self.forwards - 1, 0))

    def _dated(self, error: BadValue) -> BadValue:
        error.step, error.forward = self._now()
        if self._closes_on_error:
            self.close()
        return error

    def _when(self, number: int) -> str:
        step, forward = self._now()
        return f"step {step}{f' (forward {forward})' if forward != step else ''}, call #{number}"

    # Gradients of parameters, and compiled graphs.

    def scale(self) -> float:
        """Return the factor by which the scaler multiplies gradients."""
        scaler = self._scaler
        return float(scaler.get_scale()) if scaler is not None and scaler.is_enabled() else 1.0

    def is_lowering(self, scale: float) -> bool:
        """Return True if the scaler can still lower its scale: then it skips a step with bad gradients."""
        return self._scaler is not None and scale > 1

    def _check_parameters(self, held: Iterable[Tensor] | None = None) -> None:
        """Check the gradients of the parameters, in the order of the backward: the last in the model first."""
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
        for parameter, plain in bad_gradients(found, self.rule, scale, self.reads_later):
            finding = examine(plain / scale if scale != 1 else plain, self.rule)
            if finding is not None and not self.is_lowering(scale):
                raise self._dated(self._error_for_parameter(parameter, finding))

    def _error_for_parameter(self, parameter: nn.Parameter, finding: Finding) -> BadValue:
        name = next((name for name, one in self._inner.named_parameters() if one is parameter), "")
        gradient = parameter.grad
        assert gradient is not None
        when = self._when(0).rpartition(", ")[0]
        return reports.of_parameter(Site(name, "param"), finding, parameter, gradient, when)

    def check_graphs(self) -> None:
        """Check the largest elements that compiled graphs have computed."""
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
                    raise self._error_for_note(check.site, number, reports.COMPILED, 0, False)

    def note(self, site: Site, plain: Tensor) -> None:
        """Add a value to the statistics, unless it is from an evaluation between training steps."""
        row = self.statistics.row
        if row is not None and (self._is_training or torch.is_grad_enabled() or not self.steps_taken.trains):
            row.add(str(site), plain)

    def _observed(self) -> Iterator[tuple[Found, ValueCheck]]:
        """Yield a check for each place, and two at the model itself, where a forward begins and ends."""
        # -Inf in the arguments is allowed, since it may be a mask, and limit= does not apply to the input data.
        first = ValueCheck(_BEGIN, self, Rule(None, self.rule.inf, below=False), False)
        last = ValueCheck(Site(""), self, self.rule, self.backward, Site("") in [place.site for place in self._places])
        self._checks = [last, first]
        ends = [(self._inner, first), (self._inner, last)]
        first.bounds = last.bounds = self._outer is self._inner
        if not first.bounds:  # The forward of a compiled model begins and ends outside of its graph.
            begin = ValueCheck(first.site, self, first.rule, False, forward=False)
            end = ValueCheck(last.site, self, self.rule, self.backward, forward=False)
            ends += [(self._outer, begin), (self._outer, end)]
        yield from ((Found(check.site, module), check) for module, check in ends)
        for place in [one for one in self._places if one.site != Site("")]:
            check = ValueCheck(place.site, self, self.rule, self.backward)
            check.is_torchs = type(place.module).__module__.startswith("torch.nn.")
            self._checks.append(check)
            yield place, check


def _traced(value: Any) -> list[Tensor]:
    """Return the tensors of a value while a graph is traced. `leaves` uses ids, which break a graph in torch 2.11."""
    if isinstance(value, Tensor):
        return [value]
    parts = value if isinstance(value, (tuple, list)) else (children(value) or {}).values()
    return [tensor for part in parts for tensor in _traced(part)]


def _index(value: Any, plain: Tensor) -> str:
    """Return the subscripts of the tensor that these numbers are from, as text; empty if the value is a tensor."""
    if isinstance(value, Tensor) or current_transform() is not None:  # Tensors inside a transform have no address.
        return ""
    for subscripts, tensor in zip(leaf_places(value), leaves(value), strict=True):
        found = numbers_in(tensor)
        if found is not None and found.data_ptr() == plain.data_ptr() and found.shape == plain.shape:
            return write_subscripts(subscripts)
    return ""
