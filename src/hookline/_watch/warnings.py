"""Warnings at the end of a watch's block: nothing was seen, a method ran by itself, no step was counted."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from hookline import Hooks, Site
from hookline._kernel import Found, method_names, ran_elsewhere, session_of
from hookline._tables import count
from hookline.errors import warn


def warn_if_missed(hooks: Hooks, model: nn.Module, places: list[Found]) -> None:
    """Warn if nothing was watched: the model ran on another thread, or called none of the places of a pattern."""
    session, sites = session_of(hooks.cache), {place.site: None for place in places}
    fired = {hook.site for hook in hooks if hook.fired}
    if session.others.ran and not fired:
        warn(f"nothing was watched: {ran_elsewhere(model)}")
    elif session.any_forward and not session.failed and not fired.intersection(sites) and not places[0].exact:
        named = ", ".join(f"'{site}'" for site in list(sites)[:3])
        warn(f"nothing was watched: {type(model).__name__} ran, and did not call {named}; hl.scan shows what it calls")


def warn_if_by_itself(hooks: Hooks, model: nn.Module, methods: Iterable[Site]) -> None:
    """Warn of methods that ran in a block without a forward or backward of the model: what they return is not seen."""
    session, kind = session_of(hooks.cache), type(model).__name__
    unseen = [site for site in methods if site not in {hook.site for hook in hooks}]
    if unseen:
        warn(
            f"'{unseen[0]}' was called by itself, not in a forward of {kind}: the modules that it calls were watched, "
            f'and what it makes of their outputs was not; name it too: hl.watch(model, "**", "{unseen[0]}")'
        )
    elif session.ran or session.others.ran or any(hook.fired for hook in hooks):
        return
    elif any(not name.startswith("_") for module in model.modules() for name in method_names(module)):
        warn(
            f"nothing was watched: no watched module of {kind} was called in this block; "
            'a method that is called by itself is watched if it is named, as in hl.watch(model, "name()")'
        )


def warn_of_no_steps(hooks: Hooks, model: nn.Module, forwards: int, is_trained: bool, has_backward: bool) -> None:
    """Say why there are no statistics, where some were asked for, something ran and no step was counted."""
    kind, remedy = type(model).__name__, "call watch.step() after each step"
    if is_trained:
        why = f"in {count(forwards, 'forward')} no optimizer of torch has stepped that holds the model's parameters"
        if not has_backward:
            remedy += f". {kind} is in training mode with gradients: model.eval() or torch.no_grad() counts them all"
    elif not forwards and any(hook.fired for hook in hooks):
        why = f"parts of {kind} ran, and not {kind} itself, whose forwards count"
    else:
        return
    warn(f"no statistics were kept: {why}; {remedy}")


def warn_of_transform(site: Site) -> None:
    """Warn of a value that passes inside a torch.func transform."""
    warn(
        f"'{site}' passes inside a torch.func transform: a watch keeps no statistics there, and inside vmap it does "
        "not notice a bad value; watch a run without the transform"
    )
