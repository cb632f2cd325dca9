"""Why nothing passed at a site: what is known of models whose modules are there but are not called."""

from __future__ import annotations

from torch import nn

from hookline.records import Session
from hookline.sites import Site
from hookline.tables import count
from hookline.tree import Names, is_container, is_scripted


def why_never_fired(site: Site, module: nn.Module, model: nn.Module, session: Session, calls: int) -> str:
    """Say that a site did not fire, why, and what to hook instead."""
    name = type(model).__name__
    if site.call is not None and calls:
        return f"'{site}' was not reached: '{site.path}' was called {count(calls, 'time')}, and '#' counts from 0"
    if calls:
        return f"'{site}' did not fire: '{site.path}' was called without arguments"
    if session.stopped:
        return f"'{site}' was not reached: the forward was ended early, by a stop at another site"
    times = count(session.since, "forward") if session.since else "a compiled forward"
    return f"'{site}' was not called in {times} of {name}{_advised(site.path, module, model)}"


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
    names = Names(model)
    now = names.find(path)
    if now is not None and now is not module:
        return f": it was replaced by another {type(now).__name__} while hooked. Make the hooks anew."
    parent_path = path.rpartition(".")[0]
    parent = names.find(parent_path) if path else None
    if isinstance(parent, nn.MultiheadAttention):
        return f": MultiheadAttention reads its weight directly. Capture '{parent_path}' instead."
    above = [(name, names.find(name)) for name in _prefixes(path)]
    for name, found in above:
        if found is not None and is_scripted(found):
            return (
                f": '{name}' is compiled by torch.jit, and nothing inside its graph can be seen. Hook '{name}' itself."
            )
        if isinstance(found, (nn.TransformerEncoderLayer, nn.TransformerEncoder)) and found is not module:
            return (
                f": {type(found).__name__} takes a fused fast path in eval mode without gradients. "
                "Turn it off with torch.backends.mha.set_fastpath_enabled(False)."
            )
    if type(module).__call__ is not nn.Module.__call__:
        return f": {type(module).__name__} has a __call__ of its own, which does not call forward."
    return ""


def _prefixes(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[:length]) for length in range(len(parts))]
