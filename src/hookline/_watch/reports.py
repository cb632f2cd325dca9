"""The texts of a watch: the error about a bad value, and the warnings at the end of a block."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hookline import Cache, Hooks, Site
from hookline._kernel import (
    Call,
    Found,
    address,
    arguments_by_name,
    changes_in,
    leaf_places,
    leaves,
    method_names,
    shape_of,
    share,
    unwrap,
    what_ran,
    write_subscripts,
)
from hookline._stats import Numbers, Stats, numbers_of_pieces
from hookline._tables import Table, count
from hookline._tables.terminal import clean
from hookline._torch import first_argument, frame_at, frames, known_version, version_of
from hookline._watch.bad_values import Finding, Rule, checkable, examine, numbers_in, pieces
from hookline._watch.rerun import BadFunction
from hookline.errors import BadValue, warn

COMPILED = "in a compiled graph"
_LARGEST_HALF = 65504.0
_FOR_ARGUMENTS = Rule(below=False)  # An argument may contain -Inf: attention masks do.


class Origin(NamedTuple):
    """Where a module's bad argument was computed, according to the calls that are running."""

    entered: Call  # The outermost call that received the bad value.
    around: Call | None  # The call around `entered`, which computed the value; None if no module is around it.
    is_sure: bool = True  # False if `around` has bad arguments too: they may have been bad when it was called.


def origin(model: nn.Module, call: Call, calls: list[Call]) -> Origin | None:
    """Return where the bad arguments of a call were computed; None if no argument is bad."""
    if not _bad_arguments(call):
        return None
    paths = {id(module): name for name, module in model.named_modules()}
    entered = call
    for one in calls:
        is_wrapper = id(one.module) not in paths and unwrap(one.module) is model
        if is_wrapper or (one.module is entered.module and one.site.member == entered.site.member):
            continue
        one = one._replace(site=Site(paths.get(id(one.module), ""), member=one.site.member))
        given = _bad_arguments(one)
        if all(map(_was_written, given)):
            return Origin(entered, one, not given)
        entered = one
    return Origin(entered, None)


def changes(call: Call, origin: Origin | None) -> list[str]:
    """Name the hooks that changed a value where the bad value was computed."""
    came_in = origin is not None and origin.around is None  # Then only a hook on the arguments can be the cause.
    made_in = call if origin is None else origin.around or origin.entered
    modules = [made_in.module] if came_in else list(made_in.module.modules())
    ports = ("input", "inputs") if came_in else ("input", "inputs", "output", "param")
    return list(
        dict.fromkeys(f"{hook.kind} at '{hook.site}'" for hook in changes_in(modules) if hook.site.port in ports)
    )


def _bad_arguments(call: Call) -> list[Tensor]:
    """Return the arguments of a call that are bad now."""
    given = leaves((call.args, dict(call.kwargs)))
    return [one for one in given if any(examine(plain, _FOR_ARGUMENTS) is not None for plain in checkable(one))]


def _was_written(tensor: Tensor) -> bool:
    """Return True if a tensor was modified in place: it may have been fine when it was passed as an argument."""
    return known_version(tensor) > 0


def method_around(model: nn.Module) -> Site | None:
    """Return the outermost running method of the model's modules; None if it is a forward, or none is running."""
    paths = {id(module): name for name, module in model.named_modules()}
    found: Site | None = None
    for frame in frames(frame_at(1)):
        code, owner = frame.f_code, first_argument(frame)
        if isinstance(owner, nn.Module) and id(owner) in paths:
            is_method = code.co_name in method_names(owner)
            found = Site(paths[id(owner)], member=f"{code.co_name}()") if is_method else None
    return found


class BadValueReport:
    """The text of an error: a sentence, a table of statistics, and advice."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.stats: dict[str, Numbers] = {}
        self.rows: list[tuple[str, ...]] = []
        self.then: list[str] = []

    def add(self, label: str, site: Site, tensor: Tensor, note: str = "") -> None:
        """Add the statistics of a tensor, if it has numbers."""
        plain = numbers_in(tensor)
        if plain is None:
            return
        numbers = numbers_of_pieces(pieces(plain))
        self.stats[str(site)] = numbers
        shown = (numbers.min, numbers.max, numbers.mean, numbers.nan, numbers.inf)
        dtype = str(tensor.dtype).removeprefix("torch.")
        numbers_as_text = ("-" if math.isnan(number) else f"{number:.4g}" for number in shown)
        self.rows.append((label, dtype, shape_of(tensor), *numbers_as_text, note))

    def text(self) -> str:
        """Return the message."""
        header = ("", "dtype", "shape", "min", "max", "mean", "nan", "inf", "")
        width = len(header) if any(row[-1] for row in self.rows) else len(header) - 1
        lines = Table(header[:width], [row[:width] for row in self.rows]).text(whole=True) if self.rows else ""
        return "\n".join([clean(self.what), *([lines] if lines else []), *map(clean, self.then)])


def of_forward(
    site: Site,
    finding: Finding,
    value: Any,
    call: Call,
    model: nn.Module,
    origin: Origin | None,
    inside: BadFunction | None,
    when: str,
) -> BadValue:
    """Return the error about a bad value of a forward."""
    report = BadValueReport("")
    is_input = site.port in ("input", "inputs")
    for where, tensor in () if is_input else _tensors(value):
        report.add(f"output{where}", call.site._replace(index=call.site.index + where), tensor)
    came, inputs = _add_inputs(report, call, value)
    weights = _add_parameters(report, call.module, call.site.path)
    if came and not is_input and not finding.over:
        site, finding, is_input = *came[0], True
    report.what = f"'{site}' {'got' if is_input else 'gave'} {_found(finding)}; forward, {when}"
    origin = origin if came else None
    hooks = changes(call, origin) if inside is None else []  # `inside` comes from a run without the user's hooks.
    report.then = _verdict(finding, origin, weights, call, model, inside, value, hooks)
    if not (is_input or weights or finding.nan or finding.over):
        report.then.append(_allowing(call.site))
    error = _error(report, site, finding, value, inputs, call.number)
    is_function = bool(call.site.function) and not is_input
    error.function = inside.site if inside is not None else call.site if is_function else None
    return error


def of_gradient(
    site: Site, finding: Finding, gradient: Tensor, number: int, before: Any, is_output: bool, when: str
) -> BadValue:
    """Return the error about a bad gradient."""
    report = BadValueReport(f"'{site}' got {_found(finding)}; backward, {when}")
    report.add("gradient", site, gradient)
    if is_output or not (site.path or site.member):
        report.then = ["It came from outside the model: from the loss, or from code between the output and the loss."]
    elif before[0] is None:
        report.then = ["It is the first gradient seen: the loss, or other code that uses this output, made it."]
    else:
        seen = f"'{before[0].site._replace(port='grad_output')}'" + (f" (call #{before[1]})" if before[1] else "")
        report.then = [f"The gradient before it, {seen}, was fine: the backward of code that uses this output made it."]
    report.then += _scaler_hint(finding, gradient.dtype)
    if finding.nan:
        report.then.append("To name the operation, run this step under torch.autograd.set_detect_anomaly(True).")
    error = _error(report, site, finding, gradient, Cache(), number)
    error.backward = True
    return error


def of_parameter(site: Site, finding: Finding, parameter: nn.Parameter, gradient: Tensor, when: str) -> BadValue:
    """Return the error about the bad gradient of a parameter."""
    report = BadValueReport(f"'{site}' has a gradient with {_found(finding)}; backward, {when}")
    report.add("gradient", site._replace(port="grad_output"), gradient)
    report.add("parameter", site, parameter.detach())
    if finding.over and not finding.nan and not finding.inf:
        report.then = ["Clip the gradients (torch.nn.utils.clip_grad_norm_), or lower the learning rate."]
    else:
        report.then = [
            "No gradient that passed a watched output was bad: an operation that uses the parameter made it, or an "
            "earlier backward that was not watched."
        ]
        report.then += _scaler_hint(finding, gradient.dtype)
    error = _error(report, site, finding, gradient, Cache({site: parameter.detach().clone()}), 0)
    error.backward = True
    return error


def of_note(site: Site, number: float, what: str, call: int, backward: bool, when: str) -> BadValue:
    """Return the error about a bad value that was read after the pass, and that no second run reproduced."""
    largest = "NaN" if number != number else "Inf" if abs(number) == float("inf") else f"{number:.4g}"
    kind = "backward" if backward else "forward"
    is_input = site.port in ("input", "inputs")
    report = BadValueReport(f"'{site}' {'got' if backward or is_input else 'gave'} {largest}: {what}; {kind}, {when}")
    report.then = [
        "It was read after the pass, and no second run reproduced it: the module's inputs are gone. "
        "To see where it comes from, "
        + (
            "run the model uncompiled, under torch.compiler.set_stance('force_eager')."
            if what == COMPILED
            else "hl.watch(model, at_once=True) looks at each value as it passes, and waits for the device each time."
        )
    ]
    if largest == "Inf" and not (backward or is_input):
        report.then.append(_allowing(site))
    error = BadValue(report.text())
    error.site, error.call, error.backward, error.inputs = site, call, backward, Cache()
    error.stats = Stats({})
    return error


def _error(report: BadValueReport, site: Site, finding: Finding, value: Any, inputs: Cache, number: int) -> BadValue:
    error = BadValue(report.text())
    error.site, error.call, error.inputs = site, number, inputs
    error.value = share(value)
    error.stats = Stats.of(report.stats)
    return error


def _found(finding: Finding) -> str:
    """Say how many elements are bad, in which way, and where the first one is."""
    kinds = {"NaN": finding.nan, "Inf": finding.inf, "over the limit": finding.over}
    names = " and ".join(name for name, number in kinds.items() if number)
    share = finding.bad / finding.elements
    place = f"[{', '.join(map(str, finding.first))}]" if finding.first else "its only element"
    value = f" ({finding.value:.4g})" if finding.over else ""
    amount = f"{finding.bad:,} of {count(finding.elements, 'element')} ({100 * share:.3g}%)"
    return f"{names}: {amount}, the first at {place}{value}"


def _tensors(value: Any) -> Iterator[tuple[str, Tensor]]:
    for subscripts, tensor in zip(leaf_places(value), leaves(value), strict=True):
        yield write_subscripts(subscripts) if subscripts else "", tensor


def _add_inputs(report: BadValueReport, call: Call, value: Any) -> tuple[list[tuple[Site, Finding]], Cache]:
    """Add the arguments of a call to the report; return the bad ones, and all of them as a cache."""
    if call.site.function:
        bound = {str(number): one for number, one in enumerate(call.args)} | dict(call.kwargs)
    else:
        bound = arguments_by_name(call)
    written = {address(tensor) for tensor in leaves(value)} - {0}
    came: list[tuple[Site, Finding]] = []
    kept: dict[Site, Any] = {}
    for name, one in bound.items():
        for where, tensor in _tensors(one):
            site = call.site._replace(port="inputs", index=write_subscripts((name,)) + where)
            shares = address(tensor) in written and call.site.port not in ("input", "inputs")
            overwritten = shares and _is_written(tensor, call.module)
            report.add(f"input {name}{where}", site, tensor, "overwritten by the output" if overwritten else "")
            kept[site] = share(tensor.detach())
            plain = numbers_in(tensor)
            found = examine(plain, _FOR_ARGUMENTS) if plain is not None and not overwritten else None
            if found is not None:
                came.append((site, found))
    return came, Cache(kept)


def _is_written(tensor: Tensor, module: nn.Module) -> bool:
    """Return True if a module whose output shares memory with this argument may have modified it in place."""
    return bool(getattr(module, "inplace", False) if tensor.is_inference() else version_of(tensor))


def _add_parameters(report: BadValueReport, module: nn.Module, path: str) -> list[str]:
    """Add the module's direct parameters and buffers to the report; return the names of the bad ones."""
    bad = []
    for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
        report.add(name, Site(f"{path}.{name}".lstrip("."), "param"), tensor.detach())
        plain = numbers_in(tensor)
        if plain is not None and examine(plain, Rule()) is not None:
            bad.append(name)
    return bad


def _verdict(
    finding: Finding,
    origin: Origin | None,
    weights: list[str],
    call: Call,
    model: nn.Module,
    inside: BadFunction | None,
    value: Any,
    hooks: list[str],
) -> list[str]:
    """Say whether the value came in or was made here, which function made it, and where to look next."""
    path, own = call.site.path, call.site._replace(port="output", index="")
    kind = f"'{own}'" if own.member else type(call.module).__name__
    if finding.over and not (finding.nan or finding.inf):
        return [*_seen_inside(inside, "reached it first"), _advice(path)]
    if origin is not None:
        return _coming_in(origin, model, inside, hooks)
    if weights:
        are = "is" if len(weights) == 1 else "are"
        return [f"{_quoted(weights)} of {kind} {are} bad already: an earlier update did it, or it was loaded so."]
    is_here = inside is None or not path or f"{inside.site.path}.".startswith(f"{path}.")
    lines = [f"It was made here{_or_by(hooks)}: nothing that went into {kind} is bad."]
    if not is_here:
        lines = [f"It was made here or came in: {kind} has overwritten its arguments."]
        path = inside.site.path if inside is not None else path
    tensors = leaves(value)
    if finding.inf and any(tensor.dtype is torch.float16 for tensor in tensors):
        lines.append(f"float16 ends at {_LARGEST_HALF:,.0f}: compute this in bfloat16 or float32, or scale it down.")
    if type(call.module).__module__.startswith("torch.nn") and inside is None:
        return lines
    return [*lines, *_seen_inside(inside, "made it"), _advice(path)]


def _or_by(hooks: list[str]) -> str:
    """Name the hooks that may have made the value instead."""
    several = len(hooks) > 1
    more = f" and {len(hooks) - 3} more" if len(hooks) > 3 else ""
    return f" or by {'hooks' if several else 'a hook'} ({', '.join(hooks[:3])}{more})" if hooks else ""


def _coming_in(origin: Origin, model: nn.Module, inside: BadFunction | None, hooks: list[str]) -> list[str]:
    """Say which code passed a bad value to a module."""
    entered, around, is_sure = origin
    site = entered.site._replace(port="output", index="")
    name = f"'{site}'" if str(site) else type(model).__name__
    text = f"It came in with the arguments of {name}"
    if around is None and hooks:
        return [f"{text}{_or_by(hooks)}."]
    if around is None:
        by_itself = f", which was called by itself, not in a forward of {type(model).__name__}: look at its caller."
        return [text + (by_itself if str(site) else ": look at the data.")]
    kind, path = type(around.module).__name__, around.site.path
    if not path and around.module is not model:
        return [
            f"{text}, from the forward of {kind} around it, which is not watched: watch {kind} to see what made it."
        ]
    what = f"{around.site.method!r}" if around.site.method else "the forward"
    where = f"{what} of {path!r}" if path else f"{what} of {kind} itself"
    text = f"It came in, and no watched place gave it: it was made between modules, in {where}"
    text += _or_by(hooks)
    text += "." if is_sure else ", or came in there: its arguments were modified in place."
    return [text, *_seen_inside(inside, "made it"), _advice(path)]


def _seen_inside(inside: BadFunction | None, did: str) -> list[str]:
    if inside is None:
        return []
    line = f", {inside.line}" if inside.line else ""
    return [f"A second run shows the function: '{inside.site}' {did}{line}", *(f"    {one}" for one in inside.inputs)]


def _allowing(site: Site) -> str:
    """Say how to allow Inf if it is intended."""
    place = str(site._replace(index="", call=None))
    return (
        "If it is intended, as in masked scores: hl.watch(..., inf=False) allows Inf, "
        f"ignore={place!r} leaves this out."
    )


def _advice(path: str) -> str:
    return f'To see everything that runs there: hl.sites(model, "{path}/*", run=(...))'


def _quoted(names: list[str]) -> str:
    return ", ".join(map(repr, names[:3])) + (" …" if len(names) > 3 else "")


def _scaler_hint(finding: Finding, dtype: torch.dtype) -> list[str]:
    if dtype is not torch.float16 and not finding.inf:
        return []
    return ["A GradScaler causes this while it looks for its scale; if you use one: hl.watch(..., scaler=scaler)."]


def warn_if_missed(hooks: Hooks, model: nn.Module, places: list[Found]) -> None:
    """Warn if nothing was watched: the model ran on another thread, or called no module that the pattern matches."""
    ran, sites = what_ran(hooks), {place.site: None for place in places}
    fired = {hook.site for hook in hooks if hook.fired}
    if ran.elsewhere and not fired:
        warn(f"nothing was watched: {ran.elsewhere}")
    elif ran.forward and not ran.failed and not fired.intersection(sites) and not places[0].exact:
        named = ", ".join(f"'{site}'" for site in list(sites)[:3])
        warn(f"nothing was watched: {type(model).__name__} ran, and did not call {named}; hl.scan shows what it calls")


def warn_if_by_itself(hooks: Hooks, model: nn.Module, methods: Iterable[Site]) -> None:
    """Warn about methods that ran without a forward of the model: their results were not checked."""
    ran, kind = what_ran(hooks), type(model).__name__
    unseen = [site for site in methods if site not in {hook.site for hook in hooks}]
    if unseen:
        warn(
            f"'{unseen[0]}' was called by itself, not in a forward of {kind}: the modules that it calls were watched, "
            f'but not what it computes from their outputs; name it too: hl.watch(model, "**", "{unseen[0]}")'
        )
    elif ran.compiled or ran.elsewhere or any(hook.fired for hook in hooks):
        return
    elif any(not name.startswith("_") for module in model.modules() for name in method_names(module)):
        warn(
            f"nothing was watched: no watched module of {kind} was called in this block; "
            'to watch a method that is called by itself, name it, as in hl.watch(model, "name()")'
        )


def warn_of_no_steps(hooks: Hooks, model: nn.Module, forwards: int, is_trained: bool, has_backward: bool) -> None:
    """Warn, with the reason, if statistics were asked for and something ran, but no step was counted."""
    kind, remedy = type(model).__name__, "call watch.step() after each step"
    if is_trained:
        why = f"in {count(forwards, 'forward')} no optimizer of torch has stepped that holds the model's parameters"
        if not has_backward:
            remedy += f". {kind} is in training mode with gradients: model.eval() or torch.no_grad() counts them all"
    elif not forwards and any(hook.fired for hook in hooks):
        why = f"parts of {kind} ran, but not {kind} itself, whose forwards count as steps"
    else:
        return
    warn(f"no statistics were kept: {why}; {remedy}")


def warn_of_transform(site: Site) -> None:
    """Warn about a value inside a torch.func transform."""
    warn(
        f"'{site}' passes inside a torch.func transform: a watch keeps no statistics there, and inside vmap it does "
        "not notice a bad value; watch a run without the transform"
    )
