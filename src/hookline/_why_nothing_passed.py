"""Why nothing passed: all messages about a site without a value.

The functions turn facts into text, and neither raise nor warn.

| asked by | when |
|---|---|
| `_cache/cache.py` | somebody reads a site that has no value |
| `_engine/` | a module was replaced, no gradient can come, or subscripts select nothing |
| `_hooks/diagnose.py` | a block ends and nothing passed at some of its sites, or hooks go unused |

`why_never_fired` explains why a site did not fire, at the end of a block. `why_not_called` explains why a module is not
called, judging by the model alone.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator
from types import CodeType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from hookline._open_blocks import Session
from hookline._sites.calls import Wanted, is_wanted
from hookline._sites.language import Site
from hookline._sites.members import Holders, has_method
from hookline._sites.tree import Names, is_container, is_scripted
from hookline._tables import count
from hookline._torch import FUSED_MODULES, MODULE_CALLS
from hookline._values.nested import describe, leaves
from hookline.errors import did_you_mean

# Phrases that several messages share.
_AGAIN = "make the hooks again"
_ADOPT = "start it there with contextvars.copy_context().run(...), or open a block there"
_SCAN = "hl.scan(model, ...) shows what is called"
_FAST_PATH = (
    "takes a fused fast path in eval mode without gradients. "
    "Turn it off with torch.backends.mha.set_fastpath_enabled(False)."
)

# Reasons that a record keeps until it is read; the site is filled in then.
NOT_YET = "nothing passed '{site}' in this block; the stored value is from an earlier one"
REMOVED = "nothing passed '{site}' before its hook was removed"
NOTHING_KEPT = "the transform has kept nothing of '{site}'"

# Why no more values will come.
BLOCK_OVER = "its block is over"
HOOKS_GONE = "the Hooks that filled this cache is gone; keep it in a variable"

# Texts that follow "'site' ".
RESTED = (
    "was passed over: it ran inside a function of a hook on the same model, where hooks are paused; "
    "open the block inside that function"
)
RECOMPUTED = (
    "was passed over: it ran in a backward, where a forward is taken for a recomputation; run it after backward(), or "
    "in a function of a hook at a gradient"
)
HELD_BY_OTHERS = "others hold the list, dict or object that contains it, so its gradient can't be followed"
CHANGED_IN_PART = f"is changed only in part. One of its tensors is left out: {HELD_BY_OTHERS}; name the other parts"
OTHER_MEMORY_ORDER = "can get no gradient: it writes into a view of a tensor in another memory order"
_FOLLOWED = "gradients are followed from the forward on; run the forward inside the block too"
FORWARD_BEFORE = f"was passed over: backward() ran in this block, but the forward ran before the block; {_FOLLOWED}"
GRADIENTS_WRITTEN = (
    "got no gradient, though gradients of parameters were written in this block. If backward() wrote them: " + _FOLLOWED
)
CUT_OFF = (
    "changed nothing: a backward ran in this block, and no gradient came here: the loss may not depend on this value, "
    "detach() may cut it off, or torch.autograd.grad() was asked only for gradients that don't pass here"
)
ADDED = f"was added after the hooks were made, and has none; {_AGAIN}"
WRITTEN_LATER = "can get no gradient: a part of it is written in place later"

# The functions that compute attention in one kernel, and the functions that can't be seen inside them.
_FUSED = (
    "scaled_dot_product_attention", "multi_head_attention_forward", "flex_attention", "flash_attn_func",
    "flash_attn_varlen_func", "_native_multi_head_attention", "_transformer_encoder_layer_fwd",
)  # fmt: skip
_INSIDE_FUSED = ("softmax", "_softmax", "matmul", "bmm", "baddbmm", "einsum", "dropout", "masked_fill", "mul", "div")
_LEADS_TO_FORWARD = {"forward", "__call__", "super", *(code.co_name for code in MODULE_CALLS)}


class Waiting(Protocol):
    """The attributes of a `Tap` that these messages use."""

    path: str
    module: nn.Module
    session: Session
    count: int
    problem: str
    hint: str
    method: str
    function: str
    is_inside: bool
    holders: Holders
    ran: dict[str, None] | None
    often: int

    @property
    def site(self) -> Site:
        """The site at which it waits."""

    @property
    def is_covered(self) -> bool:
        """Whether something else has replaced its shadow."""

    @property
    def wanted_call(self) -> Wanted:
        """The calls that it waits for; None for all."""

    def wants(self, name: str) -> bool:
        """Return True if it waits for the function of that name."""


# Reading a site that has no value.


def why_empty(site: Site, session: Session, reason: str, has_value: bool, is_inactive: bool) -> str:
    """Say why a captured site can't be read.

    Args:
        reason: The reason that its record keeps, or "".
        has_value: Whether an earlier forward left a value there.
        is_inactive: Whether its hook is not active anywhere.
    """
    if session.forked:
        return f"'{site}' can't be read here: this process was forked from the one that placed the hooks"
    if reason:
        return reason.replace("{site}", str(site))
    if has_value:
        return f"nothing passed '{site}' in the latest forward, which failed before it"
    if session.others.ran and not session.any_forward:
        return (
            f"nothing has passed '{site}' on this thread, where the block was opened. If the model runs on another "
            f"thread or asyncio task, {_ADOPT}"
        )
    if site.is_gradient:
        return (
            f"no gradient has reached '{site}': run the forward inside the block, and call backward() after it; if you "
            "did, the loss does not depend on it"
        )
    if session.over:
        did_not_run = session.over == BLOCK_OVER and not session.any_forward and not session.failed
        return f"nothing passed '{site}': {session.over}{', and the model did not run in it' if did_not_run else ''}"
    if is_inactive:
        return f"nothing has passed '{site}': its hook is not active; activate it, or enter its Hooks"
    if session.any_forward:
        return f"nothing has passed '{site}', though the model ran: {_SCAN}"
    return f"nothing has passed '{site}' yet: run the model first"


def why_unmet(name: str, site: Site, reason: str) -> str:
    """Say that no site of a pattern has a value yet; `name` is the site that was read."""
    return reason.replace("{site}", str(site)) or f"{name} was not captured: nothing has passed '{site}' yet"


def same_as_before(site: Site) -> str:
    """Say that a value is from before the latest forward, in which nothing passed the site."""
    return (
        f"'{site}' is the value that was read before: the model has run since, and nothing passed here; "
        "if you call cache.clear() before each forward, reading it raises instead"
    )


def why_failed(site: Site, failed: type[BaseException] | None) -> str:
    """Say that a block or a forward failed before anything passed a site."""
    return f"nothing passed '{site}' before {failed.__name__ if failed else 'the forward failed'}"


def why_none_returned(model: str) -> str:
    """Say why the call of a model returned None: its forward was stopped."""
    return (
        f"the call of {model} returned None, since its forward was stopped. To stop the method that called it "
        "too, pass that method to hl.run: hl.run(model.generate, ..., capture=..., stop=True)"
    )


# Replaced modules and replaced forwards.


class LostModule(NamedTuple):
    """A hooked module that is no longer where it was found."""

    site: Site
    now: nn.Module | None  # The module that is there now.
    place: str  # The name under which the model holds it now, or "".


def why_replaced(site: Site, now: nn.Module | None) -> str:
    """Say that the module of a site was replaced or taken out; `now` is the module there."""
    return f"'{site}' was {_fate(now)}; {_AGAIN}"


def replaced_while_hooked(site: Site, now: nn.Module, places: list[str]) -> str:
    """Say that a module was replaced in a block; `places` are its names now."""
    hint = f"; the hooked module is now {places[0]!r}" if places else ""
    return f"'{site}' was replaced while hooked: it is another {type(now).__name__} now{hint}"


def hooks_left_behind(lost: Iterable[LostModule]) -> Iterator[str]:
    """Say what happened to hooks on modules that were replaced or taken out; similar cases share one sentence."""
    alike: dict[tuple[bool, bool], dict[str, LostModule]] = {}
    for one in lost:
        alike.setdefault((one.now is None, one.place != ""), {})[f"'{one.site}'"] = one
    for (is_gone, is_elsewhere), found in alike.items():
        name, first = next(iter(found.items()))
        them, where = f"{name} was {_fate(first.now)} while hooked, and its hooks", f"module, now {first.place!r}"
        if len(found) > 1:
            fate = _fate(None) if is_gone else "replaced by other modules"
            them = f"{name} and {len(found) - 1} more were {fate} while hooked, and their hooks"
            where = "modules, now elsewhere in the model"
        yield f"{them} {f'still act on the old {where}' if is_elsewhere else 'no longer act'}; {_AGAIN}"


def _fate(now: nn.Module | None) -> str:
    return "taken out of the model" if now is None else f"replaced by another {type(now).__name__}"


def why_covered(tap: Waiting) -> str:
    """Say that the forward in which a tap waits was replaced on the instance."""
    whose = f"{tap.method!r} of this {type(tap.module).__name__}"
    advice = f"{_AGAIN}, unless the new {tap.method!r} calls the old one"
    return f"{whose} was replaced on the instance after the hooks were made; {advice}"


# Gradients that can't come.


def why_no_gradient(tensors: list[Tensor], model: nn.Module | None) -> str:
    """Say why none of these tensors will get a gradient."""
    if not tensors:
        return "no tensor passes here"
    if torch.is_inference_mode_enabled() or not torch.is_grad_enabled():
        mode = "torch.inference_mode" if torch.is_inference_mode_enabled() else "torch.no_grad"
        return f"{mode} is on; run the model outside it"
    if not any(tensor.is_floating_point() or tensor.is_complex() for tensor in tensors):
        return f"{tensors[0].dtype} values have none"
    why = "nothing it depends on requires grad; call requires_grad_() on the input or on a parameter before it"
    for name, module in model.named_modules() if model is not None else ():
        if isinstance(module, nn.Embedding):
            return f"{why}; where the input is integers, hl.edit(model, '{name}', torch.Tensor.requires_grad_) does it"
    return why


def no_gradient_problem(why: str, stays: bool) -> str:
    """Say that no gradient can come. Hooks that stay attached also see runs without gradients, such as a validation."""
    return f"can get no gradient: {why}{', or deactivate the hook for such a run' if stays else ''}"


# Subscripts that select nothing, and functions that can't be seen.


def selects_nothing_problem(did: str, index: str, value: Any) -> str:
    """Say that subscripts select nothing of a value."""
    return f"{did} nothing: {index} selects nothing of {describe(value)}"


def selected_nothing(site: Site, problem: str, hint: str, misses: int, calls: int) -> str:
    """Say in how many calls of a block the subscripts of a site selected nothing."""
    some, every = "; '#n' names the calls that are meant", "; hl.scan(model, ...) shows the shapes"
    remedy = hint or (some if misses < calls else every)
    return f"'{site}' {problem}, in {count(misses, 'call')}{remedy}; when_missing('ignore') silences this"


def rows_left_out(site: Site, rows: list[int]) -> str:
    """Say that tokens which were named for each row did not pass in some rows."""
    named = ", ".join(map(str, rows[:8])) + (", …" if rows[8:] else "")
    what = f"row {named}" if len(rows) == 1 else f"rows {named}"
    return f"'{str(site)[:200]}' did not change all its tokens in {what}: their sequences have fewer tokens"


# Columns of the second dimension, counted from 0, at the start of subscripts.
_COLUMNS = re.compile(r"^((?:\[-?\d+\])?\[:, )(\d+|\d*:\d*)(?=[,\]])")


def why_short(tap: Waiting, value: Any) -> str:
    """Return a hint for generation with a cache, where each call after the prompt has one position; "" otherwise."""
    shapes = [tensor.shape for tensor in leaves(value)[:1] if not tensor.is_nested]
    if tap.count < 2 or tap.wanted_call is not None or not shapes or len(shapes[0]) < 2 or shapes[0][1] != 1:
        return ""
    given = "; a model that generates with a cache is given one token a call after the prompt: "
    by_token = _COLUMNS.sub(r"\1@\2", tap.site.index)
    if by_token != tap.site.index:
        return f"{given}'{tap.site._replace(index=by_token)}' counts tokens in the whole sequence"
    prompt = tap.site._replace(within=0) if tap.is_inside else tap.site._replace(call=0)
    return f"{given}'{prompt}' is only the prompt's call, and call.step tells an edit which step it is"


def none_passes(module: nn.Module) -> str:
    """Say that None passes instead of a value."""
    return f"None passes here: {type(module).__name__} did not make this value"


def runs_later(method: str, output: Any) -> str:
    """Say that a forward, or a method, returned a generator or a coroutine, and calls its functions later."""
    what = f"'{method}()'" if method else "the forward"
    return (
        f"did not fire: {what} returns a {type(output).__name__}, which runs after the call, and functions that it "
        "calls then can't be seen; hook the modules and methods it calls"
    )


def counts_elsewhere(method: Site, caller: str, function: str) -> str:
    """Say that another module's forward called a method, so that the functions in it count there."""
    whose = f"the forward of {caller!r}" if caller else "the model's own forward"
    return f"did not fire: '{method}' was called by {whose}, so its functions count there: '{caller}/{function}'"


# Hooks that did nothing in a block, or were never used.


def ran_elsewhere(model: nn.Module) -> str:
    """Say that a model ran where a block does not act."""
    return f"{type(model).__name__} ran on another thread or asyncio task, where this block does not act; {_ADOPT}"


def nothing_stopped(model: nn.Module) -> str:
    """Say that the forward to stop was not called."""
    advice = "hl.run(model.method, ...) can stop a method"
    return f"nothing was stopped: {type(model).__name__} itself was not called; {advice}"


def did_not_run(call: Any, model: nn.Module) -> str:
    """Say that the callable given to hl.run did not run the model given with it."""
    what = getattr(call, "__name__", None) or type(call).__name__
    return f"{what} did not run {type(model).__name__}, the model that was given with it, nor any part of it"


def why_skipped(site: Site, above: str) -> str:
    """Say that a module was not called because the module that holds it is skipped."""
    return f"'{site}' was not called: {above!r}, which holds it, is skipped"


def never_entered(where: str, verb: str, made_at: str) -> str:
    """Say that a short form such as hl.capture was never entered."""
    made = f", made in {made_at}," if made_at else ""
    stays = f"; hooks = hl.Hooks(model), then hooks.{verb}(...) acts at once" if verb != "watch" else ""
    return f"hl.{verb} at {where}{made} was never entered and did nothing; write `with hl.{verb}(...):`{stays}"


def held_by_nothing(where: str) -> str:
    """Say that the statement that made hooks dropped them at once."""
    return (
        f"the hooks at {where} were gone before the model ran: nothing holds them; keep them in a variable, "
        "as in hooks = hl.Hooks(model)"
    )


def gone_too_early(where: str, made_at: str) -> str:
    """Say that no variable held the hooks any more when the model ran."""
    return (
        f"the hooks at {where}, made in {made_at}, were gone before the model ran, and changed "
        "nothing: hooks go with the last variable that holds them. If a function makes them, let it return them, "
        "and keep them while the model runs"
    )


def why_never_fired(tap: Waiting, model: nn.Module) -> str:
    """Say that a site did not fire, why, and what to hook instead."""
    why = f"'{tap.site}' {tap.problem}{tap.hint}" if tap.problem else _why_never_fired(tap, model)
    return f"{why.rstrip('.')}. Also, {ran_elsewhere(model)}" if tap.session.others.ran else why


def _why_never_fired(tap: Waiting, model: nn.Module) -> str:
    site, session, name = tap.site, tap.session, type(model).__name__
    if tap.holders:
        return f"'{site}' did not fire: {_why_not_taken(tap, model)}"
    if tap.is_covered and not tap.count and Names(model).find(tap.path) is tap.module:
        return f"'{site}' did not fire: {why_covered(tap)}"
    has_run = tap.ran is not None or any(is_wanted(site.within, number) for number in range(tap.count))
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
            "bypasses the instance, and can't be seen."
        )
    return f"'{site}' was not called in {times}{_advised(site.path, tap.module, model)}"


def _times(tap: Waiting, model: nn.Module) -> str:
    """Say how often the model ran, or which function was called instead."""
    session = tap.session
    if session.called:
        return f"a call of {session.called!r}"
    times = count(session.since, "forward") if session.since else "a compiled forward"
    return f"{times} of {type(model).__name__}"


def _why_not_run(tap: Waiting, model: nn.Module) -> str:
    """Say what ran in the forward of a module instead of a function."""
    ran, path, function = list(tap.ran or {}), tap.path, tap.function
    if isinstance(tap.module, FUSED_MODULES) and tap.ran is None:
        return f"{type(tap.module).__name__} {_FAST_PATH}"
    what = "the forward" if tap.count else "the methods that were called"
    where = f"in {what} of {path!r}" if path else f"in {what} of {type(model).__name__}"
    if tap.often:
        return f"{function!r} ran {count(tap.often, 'time')} {where}, and '#' counts from 0, within one call"
    if any(map(tap.wants, ran)):
        below = f"{path}.**/{function}".lstrip(".")
        what = "no function ran" if function == "*" else f"{function!r} did not run"
        return f"{what} {where} itself, but in that of a module below: try {below!r}"
    fused = fused_instead(tap)
    if fused:
        advice = _eager_instead(tap.module, path, model)
        return f"{fused} computes attention in one kernel, without this function. {advice}"
    if has_method(tap.module, function):
        return f"{function!r} is a method; did you mean '{path}.{function}()'?".replace("'.", "'")
    names = ", ".join(ran[:12]) + (", …" if len(ran) > 12 else "")
    others = f"; what ran, there or below: {names}" if ran else ", which calls none itself"
    near = did_you_mean(function, ran) or others
    return f"{function!r} did not run {where}{near}"


def fused_instead(tap: Waiting) -> str:
    """Return the name of the fused kernel that ran where the tap waited for a function of attention, or ""."""
    ran = tap.ran or {}
    if tap.function not in _INSIDE_FUSED or tap.holders or tap.often or any(map(tap.wants, ran)):
        return ""
    return next((name for name in ran if name in _FUSED), "")


def _eager_instead(module: nn.Module, path: str, model: nn.Module) -> str:
    """Say how to get an attention implementation that calls the functions a fused kernel replaces."""
    if isinstance(module, nn.MultiheadAttention):
        return f"Call it with need_weights=True, average_attn_weights=False, and capture what it returns: '{path}[1]'"
    if hasattr(module, "fused_attn"):
        return f"Choose the eager implementation: set fused_attn = False on {path!r}"
    if hasattr(model, "set_attn_implementation"):
        eager = 'model.set_attn_implementation("eager")'
        return f'Choose the eager implementation: {eager}, or attn_implementation="eager" when the model is made'
    return f"Choose an eager implementation of attention for {path!r}, which calls softmax itself"


def _why_not_taken(tap: Waiting, model: nn.Module) -> str:
    """Say why a parameter was not read, or no operation took it."""
    name = type(model).__name__
    holder, key = tap.holders[0]
    tensor = holder._parameters.get(key, holder._buffers.get(key))  # Reading it by name would count as a read.
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
    if not ran and isinstance(tap.module, (*FUSED_MODULES, nn.modules.linear.NonDynamicallyQuantizableLinear)):
        return f"attention {_FAST_PATH}"
    if ran:
        return f"{tap.function!r} did not take it{did_you_mean(tap.function, ran) or '; what did: ' + ', '.join(ran)}"
    if tensor is not None and type(tensor) not in (Tensor, nn.Parameter):
        return f"it is a {type(tensor).__name__}, whose operations can't be followed; ':param' works"
    if tensor is not None and tensor.layout is not torch.strided:
        return "it is a sparse tensor, whose operations can't be followed; ':param' works"
    seen = f"; hookline sees only operations on the tensor that self.{key} reads, and none in a scripted function"
    return f"no operation took it in {times}{why or seen}"


def _advised(path: str, module: nn.Module, model: nn.Module) -> str:
    if path.startswith("<"):
        return f": it is not in the module tree of {type(model).__name__}."
    known = why_not_called(path, module, model)
    if known:
        return known
    parent = Names(model).find(path.rpartition(".")[0])
    if parent is None or is_container(parent) or not list(module.parameters(recurse=False)):
        return f". {_SCAN}."
    return f": {type(parent).__name__} may read its weights directly, or not have taken the branch it is on. {_SCAN}."


def why_not_called(path: str, module: nn.Module, model: nn.Module) -> str:
    """Say why a module of this model is not called, if that can be known, or ""."""
    if is_scripted(module):
        return ": it is compiled by torch.jit, and can't be seen. Hook what calls it."
    names = Names(model)
    now = names.find(path)
    if now is not None and now is not module:
        return f": it was {_fate(now)} while hooked. {_AGAIN.capitalize()}."
    if now is None and all(one is not module for one in model.modules()) and not path.startswith("<"):
        return f": it was {_fate(now)} while hooked. {_AGAIN.capitalize()}."
    parent_path = path.rpartition(".")[0]
    parent = names.find(parent_path) if path else None
    if isinstance(parent, nn.MultiheadAttention):
        whole = f"'{parent_path}'" if parent_path else "the model itself, ''"
        return f": MultiheadAttention reads its weight directly. Capture {whole} instead."
    above = [(name, names.find(name)) for name in _prefixes(path)]
    for name, found in above:
        if isinstance(found, (nn.TransformerEncoderLayer, nn.TransformerEncoder)) and found is not module:
            return f": {type(found).__name__} {_FAST_PATH}"
        unused = _why_adapter_unused(path.rpartition(".")[2], found) if isinstance(parent, nn.ModuleDict) else ""
        if unused:
            return f": {unused} at '{name}'. Hook '{name}' itself, or run the model with this adapter."
    if _calls_no_forward(type(module)):
        return f": {type(module).__name__} has a __call__ of its own, which does not call forward."
    return ""


def _calls_no_forward(kind: type[nn.Module]) -> bool:
    """Return True if `__call__` of a class can't call forward: neither it nor a method it calls names forward."""
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
    """Return the names that a function and its inner functions use."""
    return set(code.co_names).union(*[_names_in(one) for one in code.co_consts if isinstance(one, CodeType)])


def _why_adapter_unused(adapter: str, layer: nn.Module | None) -> str:
    """Say why a layer with adapters, such as one of peft, does not call this adapter, or ""."""
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
