"""Why nothing passed: what is said when a block ends, when hooks go unused, and about modules that are not called.

`never_fired` and the functions beside it look at the hooks of a block that ends, and return `Message`s; `speak` raises
or warns. The rest explains one site: `why_never_fired` from what its tap has seen, `why_not_called` from the model.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hookline._cache.record import Session
from hookline._engine.action import Skip, Stop
from hookline._engine.attach import attached_to
from hookline._engine.functions import FAST
from hookline._engine.model_forward import departed
from hookline._engine.tap import IGNORE, RAISE, TOGETHER, Tap
from hookline._sites.members import has_method
from hookline._sites.resolve import Where, find_places
from hookline._sites.tree import Names, is_container, is_scripted
from hookline._tables import count
from hookline._torch import MODULE_CALLS, most_graphs, version_of
from hookline.errors import HooklineError, Line, NeverFired, did_you_mean, is_given_up, is_thrown_away, line_text, warn

# What computes attention in one kernel, and what of it can't be seen then.
_FUSED = (
    "scaled_dot_product_attention", "multi_head_attention_forward", "flex_attention", "flash_attn_func",
    "flash_attn_varlen_func", "_native_multi_head_attention", "_transformer_encoder_layer_fwd",
)  # fmt: skip
_FAST_PATH = (
    "takes a fused fast path in eval mode without gradients. "
    "Turn it off with torch.backends.mha.set_fastpath_enabled(False)."
)
_LEADS_TO_FORWARD = {"forward", "__call__", "super", *(code.co_name for code in MODULE_CALLS)}
_INSIDE_FUSED = ("softmax", "_softmax", "matmul", "bmm", "baddbmm", "einsum", "dropout", "masked_fill", "mul", "div")
_ADOPT = "start it there with contextvars.copy_context().run(...), or open a block there"
RESTED = (
    "was passed over: it ran inside a function of a hook on the same model, whose hooks rest meanwhile; "
    "open the block inside that function"
)
RECOMPUTED = (
    "was passed over: it ran in a backward, where a forward is taken for a recomputation; run it after backward(), or "
    "in a function of a hook at a gradient"
)

Gradients = dict[int, tuple[Callable[[], Any], int]]  # By the id of each: the tensor, held weakly, and its version.


class Message(NamedTuple):
    """What is said at the end of a block: as an error if it is certain, else as a warning."""

    is_certain: bool
    text: str
    has_remedy: bool = False  # It is said before the others, which only count.


def speak(messages: list[Message]) -> None:
    """Raise for the first message that is certain, or else warn with the first; the others are counted."""
    messages.sort(key=lambda message: not message.has_remedy)
    certain = [message.text for message in messages if message.is_certain]
    if certain:
        more = f" (and {len(certain) - 1} more)" if len(certain) > 1 else ""
        raise NeverFired(certain[0] + more)
    if messages:
        more = f" (and {len(messages) - 1} more that the pattern matches)" if len(messages) > 1 else ""
        warn(messages[0].text + more)


def never_fired(
    taps: list[Tap],
    session: Session,
    model: nn.Module,
    has_stops: bool,
    failed: type[BaseException] | None,
    skipped: frozenset[int],
) -> list[Message]:
    """Note why sites did not fire; return what to say, unless the model never ran or something failed."""
    missing = [tap for tap in taps if not tap.fired]
    called = [not tap.is_hot and (tap.count or tap.ran is not None) for tap in missing]
    was_called = len(missing) < len(taps) or any(called)
    ran = session.any_forward or (not session.failed and was_called)
    messages = []
    if not ran and failed is None and not session.failed:
        if session.rested or session.recomputed:
            return _passed_over(missing, RESTED if session.rested else RECOMPUTED)
        # The model did not run, so there is nothing to complain about.
        return _passed_over(missing, f"was passed over: {ran_elsewhere(model)}") if session.others.ran else []
    if has_stops and ran and not session.since:
        advice = "hl.run(model.method, ...) can stop a method"
        text = f"nothing was stopped: {type(model).__name__} itself was not called; {advice}"
        messages.append(Message(False, text))
    fired = {tap.group for tap in taps if tap.fired and tap.group is not None} if missing else set()
    for tap in missing:
        if tap.function == "*" and tap.is_inside and tap.ran is not None:
            continue  # It called no function itself.
        if failed is not None or session.failed:
            text = f"nothing passed '{tap.site}' before {failed.__name__ if failed else 'the forward failed'}"
        elif ran:
            text = _skipped_above(tap, model, skipped) or why_never_fired(tap, model)
        else:
            continue
        if tap.record is not None:
            tap.record.explain(text)
        is_certain = tap.missing == RAISE or (tap.missing == TOGETHER and tap.group not in fired)
        has_warned = tap.has_warned and not is_certain
        if not (tap.missing == IGNORE or has_warned or _need_not_be_said(tap, missing) or _ran_in_another(tap, taps)):
            messages.append(Message(is_certain, text, fused_instead(tap) != ""))
    return messages if ran else []


def _passed_over(missing: list[Tap], why: str) -> list[Message]:
    """Note and say why these hooks were passed over."""
    for tap in missing:
        if tap.record is not None:
            tap.record.explain(f"'{tap.site}' {why}")
    said = [tap for tap in missing if tap.missing != IGNORE]
    return [Message(tap.missing in (RAISE, TOGETHER), f"'{tap.site}' {why}") for tap in said]


def _need_not_be_said(tap: Tap, missing: list[Tap]) -> bool:
    """Whether nothing is said about a stop: those of a pattern may be missed, and a capture at its site says it."""
    if not isinstance(tap.action, Stop):
        return False
    return tap.missing != RAISE or any(one.site == tap.site for one in missing if not isinstance(one.action, Stop))


def _ran_in_another(tap: Tap, taps: list[Tap]) -> bool:
    """Whether a function did not run here, but in another module that the same pattern means: `**/softmax`."""
    if tap.exact or not tap.is_inside:
        return False
    return any(one.fired and one.action is tap.action and one.function == tap.function for one in taps)


def _skipped_above(tap: Tap, model: nn.Module, skipped: frozenset[int]) -> str:
    """Say that a module was not called because one that holds it is skipped, or was in this block."""
    names = Names(model)
    parts = tap.path.split(".")
    last = len(parts) + (tap.is_inside or tap.site.method != "")  # The module itself, for what runs inside it.
    for above in (".".join(parts[:length]) for length in range(1, last)):
        module = names.find(above)
        if module is None:
            continue
        skips = [one for one in attached_to(module) if isinstance(one.action, Skip) and not one.site.member]
        if skips or id(module) in skipped:
            return f"'{tap.site}' was not called: {above!r}, which holds it, is skipped"
    return ""


def gradients_of(model: nn.Module) -> Gradients:
    """Return the gradients of a model's parameters, without holding them."""
    grads = [parameter.grad for parameter in model.parameters() if parameter.is_leaf]
    return {id(grad): (weakref.ref(grad), version_of(grad)) for grad in grads if grad is not None}


def forward_before_block(
    unfollowed: list[Tap], before: Gradients | None, session: Session, model: nn.Module
) -> list[Message]:
    """Say that a backward ran in a block, and the forward before the block: its gradients were not followed."""
    missing, before = [tap for tap in unfollowed if not tap.fired], before or {}
    if session.any_forward or session.failed or session.others.ran or session.rested:
        return []
    now = gradients_of(model) if missing else {}
    why = "gradients are followed from the forward on; run it inside the block too"
    if any([key not in before or before[key][0]() is None for key in now]):
        return _passed_over(missing, f"was passed over: backward() ran in this block, and the forward before it; {why}")
    if any([now[key][1] != before[key][1] for key in now]):  # By a backward that adds to them, or by clipping.
        problem = "got no gradient, though those of parameters were written in this block. If backward() did that:"
        return [Message(False, f"'{tap.site}' {problem} {why}") for tap in missing if tap.missing != IGNORE]
    return []


def cut_off(taps: list[Tap]) -> list[Message]:
    """Say which changes of gradients saw none, though a backward went through what the model returned."""
    changes = [tap for tap in taps if not (tap.is_hot or tap.action.observes) and tap.site.is_gradient]
    found = [tap for tap in changes if tap.fired and not tap.reached and tap.missing != IGNORE]
    why = "changed nothing: a backward ran in this block, and no gradient came here"
    reasons = "the loss may not depend on this value, detach() may cut it off, or torch.autograd.grad() was not asked"
    return [Message(False, f"'{tap.site}' {why}: {reasons} for anything before it") for tap in found]


def ran_uncompiled(session: Session, model: nn.Module) -> list[Message]:
    """Say that a compiled model ran uncompiled, since torch makes no further graph of it."""
    if not session.gave_up:
        return []
    why = f"torch makes at most {most_graphs()} graphs of one function, and each set of hooks takes one"
    advice = "raise torch._dynamo.config.recompile_limit, or compile the blocks of the model instead of the whole"
    return [Message(False, f"{type(model).__name__} ran uncompiled: {why}; {advice}")]


def selected_nothing(taps: list[Tap]) -> list[Message]:
    """Say which hooks had nothing to change or to capture in some calls, where their subscripts select nothing."""
    found = [tap for tap in taps if tap.fired and tap.misses and tap.missing != IGNORE]
    some, every = "; '#n' names the calls that are meant", "; hl.scan(model, ...) shows the shapes"
    hints = [tap.hint or (some if tap.misses < tap.count else every) for tap in found]
    texts = [f"'{tap.site}' {tap.problem}, in {count(tap.misses, 'call')}" for tap in found]
    silence = "; when_missing('ignore') leaves this unsaid"
    return [Message(False, text + hint + silence) for text, hint in zip(texts, hints, strict=True)]


def replaced(taps: list[Tap], model: nn.Module) -> list[Message]:
    """Say of which taps the module was replaced, or wrapped in another, while they were open."""
    # What holds the module of a capture may be replaced: what was captured is right.
    doubtful = [tap for tap in taps if not tap.action.observes or _is_elsewhere(tap)]
    if not doubtful:
        return []
    messages, names = [], Names(model)
    for tap in departed(doubtful, model):
        now = names.find(tap.path)
        if now is not None and tap.missing != IGNORE:
            found = [name for name in names.of(tap.module) if not name.startswith("<")]
            hint = f"; what was hooked is now {found[0]!r}" if found else ""
            text = f"'{tap.site}' was replaced while hooked: it is another {type(now).__name__} now{hint}"
            messages.append(Message(tap.missing == RAISE, text))
    return messages


def _is_elsewhere(tap: Tap) -> bool:
    """Whether the module of a tap is not where it was found."""
    return tap.siblings is not None and tap.siblings.get(tap.path.rpartition(".")[2]) is not tap.module


def added_since(asked: list[Where], hooked: set[int], model: nn.Module) -> list[Message]:
    """Say which modules a pattern matches now that were not there when its hooks were made."""
    try:
        new = [place.site for place in find_places(model, asked) if id(place.module) not in hooked]
    except HooklineError:  # What was asked for is not there any more.
        return []
    why = "was added after the hooks were made, and has none; make the hooks again"
    return [Message(False, f"'{site}' {why}") for site in new]


def warn_of_unentered(taps: list[Tap], verb: str, made_at: Line | None) -> None:
    """Warn about a short form that was never entered."""
    made = f", made in {line_text(made_at)}," if made_at is not None else ""
    stays = f"; hooks = hl.Hooks(model), then hooks.{verb}(...) acts at once" if verb != "watch" else ""
    advice = f"write `with hl.{verb}(...):`{stays}"
    warn(f"hl.{verb} at {_where(taps)}{made} was never entered and did nothing; {advice}")


def warn_of_unkept(taps: list[Tap], session: Session, made_at: Line) -> None:
    """Warn about hooks that act everywhere and are gone before the model ran, since no variable held them."""
    if all([tap.fired or tap.missing == IGNORE for tap in taps]):
        return
    if is_thrown_away(made_at):
        warn(
            f"the hooks at {_where(taps)} are gone before the model ran: nothing holds them; keep them in a variable, "
            "as in hooks = hl.Hooks(model)"
        )
        return
    changes = any([tap.active and not tap.action.observes for tap in taps])
    has_run = session.forwards or any([tap.fired for tap in taps])
    if changes and not has_run and not is_given_up() and sys.exc_info()[1] is None:
        warn(
            f"the hooks at {_where(taps)}, made in {line_text(made_at)}, are gone before the model ran, and changed "
            "nothing: hooks go with the last variable that holds them. If a function makes them, let it return them, "
            "and keep them while the model runs"
        )


def _where(taps: list[Tap]) -> str:
    first, *others = taps
    return f"'{first.site}' and {len(others)} more" if others else f"'{first.site}'"


def ran_elsewhere(model: nn.Module) -> str:
    """Say that a model ran where a block does not act."""
    return f"{type(model).__name__} ran on another thread or asyncio task, where this block does not act; {_ADOPT}"


def why_never_fired(tap: Tap, model: nn.Module) -> str:
    """Say that a site did not fire, why, and what to hook instead."""
    why = f"'{tap.site}' {tap.problem}{tap.hint}" if tap.problem else _why_never_fired(tap, model)
    return f"{why.rstrip('.')}. Also, {ran_elsewhere(model)}" if tap.session.others.ran else why


def _why_never_fired(tap: Tap, model: nn.Module) -> str:
    site, session, name = tap.site, tap.session, type(model).__name__
    if tap.holders:
        return f"'{site}' did not fire: {_why_not_taken(tap, model)}"
    if tap.is_covered and not tap.count and Names(model).find(tap.path) is tap.module:
        return f"'{site}' did not fire: {tap.why_covered}"
    has_run = tap.ran is not None or (tap.count and (site.within is None or tap.count > site.within))
    if tap.is_inside and has_run:
        return f"'{site}' did not fire: {_why_not_run(tap, model)}"
    called = f"{site.path}.{site.member}".lstrip(".") if site.method else site.path
    if tap.wanted_call is not None and tap.count:
        return f"'{site}' was not reached: '{called}' was called {count(tap.count, 'time')}, and '#' counts from 0"
    if tap.count and site.port.endswith("input"):
        return f"'{site}' did not fire: '{called}' was called without arguments"
    if tap.count:
        return (
            f"'{site}' did not fire: '{called}' was called and did not return. A stop inside it ended its forward, or "
            "the model caught an exception there."
        )
    if session.stopped:
        return f"'{site}' was not reached: the forward was ended early, by a stop at another site"
    ran = [session.called] if session.called else list(tap.ran or ()) if not session.since else []
    if ran and not tap.is_inside:
        known = why_not_called(site.path, tap.module, model).rstrip(".")
        return f"'{site}' was not called: {' and '.join(map(repr, ran[:3]))} ran, and did not call it{known}"
    times = _times(tap, model)
    if not session.since and not session.ran:
        return f"'{site}' was not called, nor {name} itself: a part of it ran"
    if tap.is_inside:
        where = f"that of {site.path!r}" if site.path else "the model's own"
        why = why_not_called(site.path, tap.module, model)
        return f"'{site}' did not fire: the forward in which it would run, {where}, was not called{why}"
    if site.method:
        return (
            f"'{site}' was not called in {times}. A call through super() or through the class itself "
            "passes the instance by, and can't be seen."
        )
    return f"'{site}' was not called in {times}{_advised(site.path, tap.module, model)}"


def _times(tap: Tap, model: nn.Module) -> str:
    """Say how often the model ran, or what of it did."""
    session = tap.session
    if session.called:
        return f"a call of {session.called!r}"
    times = count(session.since, "forward") if session.since else "a compiled forward"
    return f"{times} of {type(model).__name__}"


def _why_not_run(tap: Tap, model: nn.Module) -> str:
    """Say what ran in the forward of a module instead of a function."""
    ran, path, function = list(tap.ran or {}), tap.path, tap.function
    if isinstance(tap.module, FAST) and tap.ran is None:
        return f"{type(tap.module).__name__} {_FAST_PATH}"
    what = "the forward" if tap.count else "the methods that were called"
    where = f"in {what} of {path!r}" if path else f"in {what} of {type(model).__name__}"
    if tap.often:
        return f"{function!r} ran {count(tap.often, 'time')} {where}, and '#' counts from 0, within one call"
    if any(map(tap.wants, ran)):
        below = f"{path}.**/{function}".lstrip(".")
        return f"{function!r} did not run {where} itself, but in that of a module below: try {below!r}"
    fused = fused_instead(tap)
    if fused:
        return f"{fused} computes it in one kernel, and never makes it. {_eager_instead(tap.module, path, model)}"
    if has_method(tap.module, function):
        return f"{function!r} is a method; did you mean '{path}.{function}()'?".replace("'.", "'")
    names = ", ".join(ran[:12]) + (", …" if len(ran) > 12 else "")
    near = did_you_mean(function, ran) or (f"; what ran: {names}" if ran else ", which calls none itself")
    return f"{function!r} did not run {where}{near}"


def fused_instead(tap: Tap) -> str:
    """Return the name of the fused kernel that ran where the tap waited for a function of attention, or nothing."""
    ran = tap.ran or {}
    if tap.function not in _INSIDE_FUSED or tap.holders or tap.often or any(map(tap.wants, ran)):
        return ""
    return next((name for name in ran if name in _FUSED), "")


def _eager_instead(module: nn.Module, path: str, model: nn.Module) -> str:
    """Name the implementation of attention that makes what a fused kernel does not."""
    if isinstance(module, nn.MultiheadAttention):
        return f"Call it with need_weights=True, average_attn_weights=False, and capture what it returns: '{path}[1]'"
    if hasattr(module, "fused_attn"):
        return f"Choose the eager implementation: set fused_attn = False on {path!r}"
    if hasattr(model, "set_attn_implementation"):
        eager = 'model.set_attn_implementation("eager")'
        return f'Choose the eager implementation: {eager}, or attn_implementation="eager" when the model is made'
    return f"Choose an eager implementation of attention for {path!r}, which calls softmax itself"


def _why_not_taken(tap: Tap, model: nn.Module) -> str:
    """Say why a parameter was not read, or no operation took it."""
    name = type(model).__name__
    holder, key = tap.holders[0]
    tensor = holder._parameters.get(key, holder._buffers.get(key))  # Not by its name, which would be a read of it.
    times = _times(tap, model)
    if isinstance(tap.module, nn.RNNBase):
        return f"{type(tap.module).__name__} keeps its weights in a list of its own, and does not read them by name"
    why = why_not_called(tap.path, tap.module, model)
    if not tap.function:
        return f"it was not read by its name, as in self.{key}, in {times}{why}"
    ran = list(tap.ran or {})
    if tap.often:
        return (
            f"{tap.function!r} took it {count(tap.often, 'time')}, and '#' counts from 0, within one forward of {name}"
        )
    if not ran and isinstance(tap.module, (*FAST, nn.modules.linear.NonDynamicallyQuantizableLinear)):
        return f"attention {_FAST_PATH}"
    if ran:
        return f"{tap.function!r} did not take it{did_you_mean(tap.function, ran) or '; what did: ' + ', '.join(ran)}"
    if tensor is not None and type(tensor) not in (Tensor, nn.Parameter):
        return f"it is a {type(tensor).__name__}, whose operations can't be followed; ':param' works"
    if tensor is not None and tensor.layout is not torch.strided:
        return "it is a sparse tensor, whose operations can't be followed; ':param' works"
    seen = f"; only those on what self.{key} reads are seen, and none inside a scripted function"
    return f"no operation took it in {times}{why or seen}"


def _advised(path: str, module: nn.Module, model: nn.Module) -> str:
    if path.startswith("<"):
        return f": it is not in the module tree of {type(model).__name__}."
    known = why_not_called(path, module, model)
    if known:
        return known
    parent = Names(model).find(path.rpartition(".")[0])
    if parent is None or is_container(parent) or not list(module.parameters(recurse=False)):
        return ". hl.scan(model, ...) shows what is called."
    return (
        f": {type(parent).__name__} may read its weights directly, or not have taken the branch it is on. "
        "hl.scan(model, ...) shows what is called."
    )


def why_not_called(path: str, module: nn.Module, model: nn.Module) -> str:
    """Say why a module of this model is not called, as far as it can be known, or nothing."""
    if is_scripted(module):
        return ": it is compiled by torch.jit, and can't be seen. Hook what calls it."
    names = Names(model)
    now = names.find(path)
    if now is not None and now is not module:
        return f": it was replaced by another {type(now).__name__} while hooked. Make the hooks again."
    if now is None and all(one is not module for one in model.modules()) and not path.startswith("<"):
        return ": it was taken out of the model while hooked. Make the hooks again."
    parent_path = path.rpartition(".")[0]
    parent = names.find(parent_path) if path else None
    if isinstance(parent, nn.MultiheadAttention):
        whole = f"'{parent_path}'" if parent_path else "the model itself, ''"
        return f": MultiheadAttention reads its weight directly. Capture {whole} instead."
    above = [(name, names.find(name)) for name in _prefixes(path)]
    for name, found in above:
        if isinstance(found, (nn.TransformerEncoderLayer, nn.TransformerEncoder)) and found is not module:
            return f": {type(found).__name__} {_FAST_PATH}"
        resting = _why_adapter_rests(path.rpartition(".")[2], found) if isinstance(parent, nn.ModuleDict) else ""
        if resting:
            return f": {resting} at '{name}'. Hook '{name}' itself, or run the model with this adapter."
    if _calls_no_forward(type(module)):
        return f": {type(module).__name__} has a __call__ of its own, which does not call forward."
    return ""


def _calls_no_forward(kind: type[nn.Module]) -> bool:
    """Whether `__call__` of a class is known to leave forward out: no name in its code leads there, by any method."""
    known = {"__call__"}
    waiting = [kind.__call__]
    while waiting:
        code = getattr(inspect.unwrap(waiting.pop()), "__code__", None)
        if code is None or (names := _names_in(code)) & _LEADS_TO_FORWARD:
            return False
        found = [getattr(kind, name, None) for name in names - known]
        waiting += [one for one in found if inspect.isroutine(one)]
        known |= names
    return True


def _names_in(code: CodeType) -> set[str]:
    """Return the names that a function and those inside it use."""
    return set(code.co_names).union(*[_names_in(one) for one in code.co_consts if isinstance(one, CodeType)])


def _why_adapter_rests(adapter: str, layer: nn.Module | None) -> str:
    """Say why a layer that holds adapters, as those of peft do, does not call this one, or nothing."""
    active = getattr(layer, "active_adapters", None)
    if getattr(layer, "disable_adapters", None) is True:
        return "the adapters are disabled"
    if not isinstance(active, list):
        return ""
    if getattr(layer, "merged", None) is True:
        return "the adapters are merged into the weight"
    return f"the adapter {adapter!r} is not active" if adapter not in active else ""


def _prefixes(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[:length]) for length in range(len(parts))]
