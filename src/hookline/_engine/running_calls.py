"""The calls of modules that are running on this thread, read from Python's frames."""

from __future__ import annotations

from hookline._engine.action import Call
from hookline._engine.model_forward import ModelTap
from hookline._engine.run_call import pass_through
from hookline._engine.shadowed_forward import HOT_CODES
from hookline._engine.tap import ChangingTap
from hookline._sites.language import Site
from hookline._sites.tree import Names
from hookline._torch import MODULE_CALL, frame_at, frames, variables
from hookline.errors import HooklineError

_PASSING = pass_through.__code__


def running_calls() -> list[Call]:
    """Return the module calls that are running on this thread, innermost first, read from their frames.

    The hot path passes only the value to an action. To report an error, the action finds the rest of the call here. The
    call of a module without hooks has the site ''. Variables of `hot_path` and `pass_through` are read by their names.
    """
    found = []
    for frame in frames(frame_at(1)):
        held = variables(frame) if frame.f_code in HOT_CODES or frame.f_code is _PASSING else {}
        tap = held.get("tap")
        if "self" in held and tap is not None and not isinstance(tap, ModelTap):
            number = tap.record.count if tap.record is not None else tap.count - isinstance(tap, ChangingTap)
            found.append(Call(Site(tap.path), held["self"], held["args"], held["kwargs"], number, {}))
        elif "event" in held and held["event"].taps and not held["called"].is_function:
            tap, number = held["event"].taps[0]
            args, kwargs = held["passed"]
            name = held["called"].name
            site = Site(tap.path, member="" if name == "forward" else f"{name}()")
            found.append(Call(site, held["module"], args, kwargs, number, {}))
        elif frame.f_code is MODULE_CALL:
            held = variables(frame)
            if not found or found[-1].module is not held["self"] or found[-1].site.member:
                found.append(Call(Site(""), held["self"], held["args"], held["kwargs"], 0, {}))
    return found


def call_around(call: Call) -> Call | None:
    """Return the call of the module around another call, while it runs."""
    running = running_calls()
    inside = [number for number, one in enumerate(running) if one.module is call.module]
    if not inside:
        raise HooklineError("the call around this one is known only while it runs: read call.parent in the function")
    around = next((one for one in running[inside[0] :] if one.module is not call.module), None)
    if around is None:
        return None
    around = around._replace(model=call.model, passing=call.passing)
    if around.site.path or call.model is None:
        return around
    path = next(iter(Names(call.model).of(around.module)), "")
    return around._replace(site=around.site._replace(path=path), number=-1)
