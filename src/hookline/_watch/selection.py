"""Which places and parameters of a model are watched, and at which module its forward begins and ends."""

from __future__ import annotations

from torch import nn

from hookline import Site
from hookline._kernel import Found, Where, find_places, unwrap, wrapped_model
from hookline._watch.logs import Parameters
from hookline.errors import HooklineError, SiteError


def outermost(model: nn.Module) -> nn.Module:
    """Return the module whose forward is that of the model, outside of any compiled graph."""
    within: nn.Module | None = model
    while within is not None:
        if type(within).__name__ == "OptimizedModule":
            return within
        within = wrapped_model(within)
    return unwrap(model)


def in_order_of_calls(sites: list[Site]) -> list[Site]:
    """Return sites in the order in which modules are mostly called: each after those in it."""
    found: list[Site] = []
    waiting: list[Site] = []
    for site in sites:
        while waiting and not f"{site.path}.".startswith(f"{waiting[-1].path}.".lstrip(".")):
            found.append(waiting.pop())
        waiting.append(site)
    return found + waiting[::-1]


def places_of(model: nn.Module, where: tuple[Where, ...], ignore: Where | None) -> list[Found]:
    """Return the places to watch: those in `where`, or the outputs of all modules, without those in `ignore`."""
    found = find_places(model, where or (lambda _name, _module: True,))
    ignored = find_places(model, (ignore,)) if ignore is not None else []
    held = {id(module) for module in model.modules()} if ignored else set()
    stranger = next((place.module for place in ignored if id(place.module) not in held), None)
    if stranger is not None:
        raise SiteError(f"ignore= has a {type(stranger).__name__} that is not in the model, and leaves nothing out")
    left_out = {place.site for place in ignored}
    kept = [place for place in found if place.site not in left_out]
    if not kept:
        raise HooklineError(f"nothing is left to watch: ignore={ignore!r} means all of it")
    return kept


def parameters_of(model: nn.Module, places: list[Found], ignore: Where | None) -> Parameters:
    """Return the parameters in each watched module, those of modules inside it too, but for what is ignored."""
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
