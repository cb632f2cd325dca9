"""`hl.attached` lists every hook on a model, from hookline or not; `hl.clear` removes hookline's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, overload

from torch import nn

from hookline._engine.attach import strip, taps_on
from hookline._engine.model_forward import ModelTap
from hookline._engine.shadowed_forward import is_shadow
from hookline._engine.tap import NO_BLOCKS
from hookline._hooks.lifecycle import Lifecycle
from hookline._open_blocks import Token, close_block
from hookline._sites.tree import Names, is_scripted, refuse_other_model
from hookline._tables import Table, Tabular
from hookline._torch import MODULE_HOOKS, TENSOR_HOOKS


class Attachment(NamedTuple):
    """One hook on a model: its site, kind, owner and action."""

    site: str
    kind: str
    owner: str
    action: str


class Attached(Tabular, Sequence[Attachment]):
    """Every hook on a model; prints as a table."""

    def __init__(self, found: list[Attachment]) -> None:
        self._found = found

    @overload
    def __getitem__(self, index: int) -> Attachment: ...
    @overload
    def __getitem__(self, index: slice) -> list[Attachment]: ...
    def __getitem__(self, index: int | slice) -> Attachment | list[Attachment]:
        return self._found[index]

    def __len__(self) -> int:
        return len(self._found)

    def _table(self) -> Table:
        return Table(Attachment._fields, [(row.site or '""', *row[1:]) for row in self._found], empty="no hooks")


def attached(model: nn.Module) -> Attached:
    """List every hook on a model with its owner: hookline's, those in torch's hook tables, and replaced forwards.

    >>> model = nn.Sequential(nn.ReLU())
    >>> handle = model[0].register_forward_hook(print)
    >>> attached(model)
    site  kind          owner     action
    ────  ────────────  ────────  ──────
    0     forward hook  builtins  print
    """
    refuse_other_model(model)
    found: list[Attachment] = []
    listed = set[int]()  # A hook on a tied parameter is found at each module that holds it.
    for name, module in Names(model).once():
        for tap in taps_on(module):
            if not isinstance(tap, ModelTap) and id(tap) not in listed:
                listed.add(id(tap))
                found.append(Attachment(str(tap.site), tap.action.kind, "hookline", repr(tap.action)))
        found += _foreign(name, module)
    return Attached(found)


def clear(model: nn.Module) -> int:
    """Remove all of hookline's hooks from a model, no matter what code holds them, and return how many there were.

    This includes the remains of a hook that Ctrl-C interrupted while it was attached or detached.
    """
    refuse_other_model(model)
    removed = 0
    lifecycles = []
    for _, module in Names(model).once():
        for tap in taps_on(module):
            if isinstance(tap, Lifecycle) and tap.is_attached:
                lifecycles.append(tap)
            tap.active = False
            for block in tap.blocks:
                if isinstance(block, Token):
                    close_block(block)
            tap.blocks = NO_BLOCKS
            removed += not (isinstance(tap, ModelTap) or tap.removed)
            lifecycle = tap.session.lifecycle()
            if not isinstance(tap, ModelTap):
                tap.removed = True
                if lifecycle is not None:
                    lifecycle.forget(tap)
        strip(module)
    for lifecycle in lifecycles:
        lifecycle.detach_all()
    return removed


def _foreign(name: str, module: nn.Module) -> list[Attachment]:
    found: list[Attachment] = []
    if is_scripted(module):
        return found
    names = module.__dict__
    for attribute, kind in MODULE_HOOKS.items():
        for hook in list((names.get(attribute) or {}).values()):
            found.append(Attachment(name, kind, _owner(hook), _name(hook)))
    for key, parameter in module._parameters.items():
        for attribute, kind in TENSOR_HOOKS.items():
            for hook in list((getattr(parameter, attribute, None) or {}).values()):
                found.append(Attachment(f"{name}.{key}".lstrip("."), kind, _owner(hook), _name(hook)))
    forward = names.get("forward")
    if forward is not None and not is_shadow(forward) and not _is_own(forward, module):
        found.append(Attachment(name, "replaced forward", _owner(forward), _name(forward)))
    return found


def _is_own(forward: Any, module: nn.Module) -> bool:
    """Return True if `forward` is the class's own, bound to the module. Unpickling a hooked module leaves it there."""
    return getattr(forward, "__self__", None) is module and getattr(forward, "__name__", "") == "forward"


def _owner(hook: Any) -> str:
    function = getattr(hook, "func", hook)
    return str(getattr(function, "__module__", None) or type(function).__module__)


def _name(hook: Any) -> str:
    function = getattr(hook, "func", hook)
    return str(getattr(function, "__qualname__", None) or type(function).__name__)
