"""Why nothing passed at a site: what is known of models whose modules are there but are not called."""

from __future__ import annotations

import inspect
from types import CodeType

import torch
from torch import Tensor, nn

from hookline._engine.functions import FAST
from hookline._engine.taps import Tap
from hookline._sites.members import has_method
from hookline._sites.tree import Names, is_container, is_scripted
from hookline._tables import count
from hookline._torch import MODULE_CALLS
from hookline.errors import did_you_mean

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
