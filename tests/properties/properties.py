"""The invariants. Each property draws a case from a random source and returns what is wrong with it, or ""."""

from __future__ import annotations

import contextvars
import dataclasses
import random
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import hookline as hl
from tests.properties.cases import RECOMPUTED, random_case, random_families, surveyed
from tests.properties.checks import Anatomy, anatomy, changes, divergence, is_nothing, may_be_stale
from tests.properties.members import random_member
from tests.properties.memories import Twice, Writer
from tests.properties.places import Place, random_place
from tests.properties.programs import VALUES, Block, Drawing, Program
from tests.properties.random_models import CYCLIC, random_model
from tests.properties.steps import WRITING
from tests.properties.structures import copied, difference
from tests.properties.survey import Survey
from tests.properties.under_hookline import HooklineRun
from tests.properties.under_oracle import OracleRun
from tests.properties.watches import Spot
from tests.properties.worlds import Case, Run, value_of


def agrees_with_the_oracle(source: random.Random, members: bool = False, containers: bool = False) -> str:
    """Check that a program of hooks gives the oracle's results and leaves nothing behind."""
    case, survey = random_case(source, members, containers)
    found = check(case, survey)
    return f"{found}\n    {show(case)}" if found else ""


def members_agree_with_the_oracle(source: random.Random) -> str:
    """Check agreement with the oracle for hooks on methods, functions and parameters."""
    return agrees_with_the_oracle(source, members=True)


def containers_agree_with_the_oracle(source: random.Random) -> str:
    """Check agreement with the oracle for modules that depend on the identity of their arguments."""
    return agrees_with_the_oracle(source, containers=True)


def patched_with_itself_nothing_changes(source: random.Random) -> str:
    """Check that patching with the values captured in an earlier run changes nothing."""
    members = source.random() < 0.5
    case, survey = random_case(source, members)
    while case.method:
        case, survey = random_case(source, members)
    places = _own_places(source, survey, members)
    sites = [place.text + place.suffix for place in places]
    output, cache = _seeded(case, lambda model, args, kwargs: hl.run(model, *args, capture=sites, **kwargs))
    patched = _seeded(case, lambda model, args, kwargs: hl.run(model, *args, patch=cache, **kwargs))
    # Attention takes another path if query, key and value are not one tensor. The kernel of an LSTM rounds differently
    # if its memory is aligned differently.
    tolerance = _tolerance(case) if case.model.has("lstm", "attention") else 0.0
    problem = difference(copied(patched), copied(output), tolerance)
    return problem and f"patching {sites} with itself changed the output: {problem}\n    {show(case)}"


def contexts_do_not_see_each_other(source: random.Random) -> str:
    """Check that two blocks on one model, open at once on two threads or tasks, each get the results they get alone."""
    runs, expected = two_runs(source)
    before = anatomy(runs[0].model)
    allowed = changes(before, before)
    play_on_threads(runs) if source.random() < 0.1 else play_in_tasks(source, runs)
    for run, trace in zip(runs, expected, strict=True):
        problem = divergence(*_readable(run.case, trace, run.trace), exact=False, tolerance=_tolerance(run.case))
        if problem:
            return f"beside another: {problem}\n    {show(runs[0].case)}\n    {show(runs[1].case)}"
    problem = _left_behind(runs[0], before, allowed)
    return problem and f"{problem}\n    {show(runs[0].case)}\n    {show(runs[1].case)}"


def sites_are_listed_as_they_run(source: random.Random) -> str:
    """Check that hl.sites with `run=` lists a pattern's matches in the order of the run and leaves nothing behind."""
    case, survey = random_case(source, members=True)
    while case.model.has("lazy") or case.method:
        case, survey = random_case(source, members=True)
    place = random_member(source, survey, ("output", "input"), random_families(source))
    place = dataclasses.replace(place, indices=())
    model, (args, kwargs) = case.model.build(), case.arguments(0)
    before, state = anatomy(model), torch.get_rng_state()
    listed = [str(site) for site in hl.sites(model, place.where(model), run=kwargs or args)]
    expected = _as_listed(place, survey)
    if listed != expected:
        return f"sites({place.text + place.suffix!r}) lists {listed}, not {expected}\n    {show(case)}"
    extra = changes(before, anatomy(model))
    problem = f"the model is not as it was found: {extra}" if extra else ""
    if difference(copied((args, kwargs)), copied(case.arguments(0))):
        return f"the arguments were written to\n    {show(case)}"
    return problem or ("" if torch.equal(state, torch.get_rng_state()) else "random numbers were drawn")


PROPERTIES: dict[str, tuple[Callable[[random.Random], str], float]] = {
    "oracle": (agrees_with_the_oracle, 0.33),
    "members": (members_agree_with_the_oracle, 0.36),
    "containers": (containers_agree_with_the_oracle, 0.15),
    "listing": (sites_are_listed_as_they_run, 0.02),
    "itself": (patched_with_itself_nothing_changes, 0.07),
    "contexts": (contexts_do_not_see_each_other, 0.07),
}


def any_property(source: random.Random) -> str:
    """Check one randomly drawn property."""
    return drawn_property(source)(source)


def drawn_property(source: random.Random) -> Callable[[random.Random], str]:
    """Draw a property."""
    functions, shares = zip(*PROPERTIES.values(), strict=True)
    return source.choices(functions, shares)[0]


def show(case: Case) -> str:
    """Show a case as text."""
    lines = [str(case.model), f"called {case.style}, seed {case.seed}, input needs grad: {case.input_needs_grad}"]
    for number, block in enumerate(case.program.blocks):
        lines.append(f"block {number}{' kept' * block.kept}{' in one line' * block.line}: {block.actions}")
    return "\n    ".join([*lines, *map(str, case.program.events)])


def check(case: Case, survey: Survey) -> str:
    """Run a case in every world and compare."""
    tolerance = _tolerance(case)
    oracle = OracleRun(case, survey)
    before = anatomy(oracle.model)
    expected = oracle.play()
    allowed = changes(before, anatomy(oracle.model))
    run = HooklineRun(case, survey)
    before = anatomy(run.model)
    found = run.play()
    # Without gradients, as in the first pass of a segment, torch uses other kernels for these, with other last bits.
    exact = case.program.observes and not (case.model.has("lstm", "attention") and case.model.has("segment"))
    problem = (
        divergence(*_readable(case, expected, found), exact=exact, tolerance=tolerance)
        or _left_behind(run, before, allowed)
        or _written_to(run)
        or _disturbed(case, found, tolerance)
    )
    before.clear()
    problem = problem or _held_by_cache(run)
    caches, model = run.caches, weakref.ref(run.model)
    things = _things(run)
    del run
    if not case.program.keeps_graphs and not case.model.has(*CYCLIC) and model() is not None:
        return problem or "the model is alive though only caches are left"
    caches.clear()
    return problem or _alive(things)


def _tolerance(case: Case) -> float:
    return 1e-9 if case.model.double else 2e-4


def _readable(case: Case, expected: list[Any], found: list[Any]) -> tuple[list[Any], list[Any]]:
    """Leave out captures by reference that are stale, whether torch notices or not, and empty gradients."""
    stale = may_be_stale(case.program)
    written = case.model.has("in_place", "mutated", "reusing", "relu_inplace", *WRITING)
    out = {label for label, _ in found if label in stale} if written else set()
    out |= _empty_gradients(expected, found, recomputed=case.model.has(*RECOMPUTED))
    return [one for one in expected if one[0] not in out], [one for one in found if one[0] not in out]


def _empty_gradients(expected: list[Any], found: list[Any], recomputed: bool) -> set[str]:
    """Return the labels of gradients that are zero in one world and missing in the other."""
    empty = [{label for label, value in one if ":grad_" in label and is_nothing(value)} for one in (expected, found)]
    return empty[0] | empty[1] if recomputed else empty[0] & empty[1]  # A reentrant segment turns missing into zero.


def _left_behind(run: HooklineRun, before: Anatomy, allowed: Any) -> str:
    """Return how the model differs from before, apart from changes by its own forward."""
    now = changes(before, anatomy(run.model))
    extra = {key: change for key, change in now.items() if allowed.get(key) != change}
    missing = {key: change for key, change in allowed.items() if key not in now}
    return f"the model is not as it was found: {extra or missing}" if extra or missing else ""


def _written_to(run: HooklineRun) -> str:
    """Return a message if a value that the caller passed to a patch was written to."""
    for (block, number, place), value in run.leaves.items():
        problem = difference(value, value_of(run.case.program.blocks[block].actions[number], run.survey, place))
        if problem:
            return f"the value given to a patch was written to: {problem}"
    return ""


def _disturbed(case: Case, found: list[Any], tolerance: float) -> str:
    """Return how a run with captures only differs from one without hooks."""
    if not case.program.observes or any(isinstance(value, str) and value == "NeverFired" for _, value in found):
        return ""
    bare = Run(case).play()
    labels = {label for label, _ in bare}
    aliased = any(place.is_gradient for place in case.program.places)
    seen = [one for one in found if one[0] in labels]
    problem = divergence(bare, seen, exact=True, tolerance=tolerance if aliased else 0.0)
    return problem and f"observing changed the run: {problem}"


def _held_by_cache(run: HooklineRun) -> str:
    """Return a message if a graph is alive although only the caches could hold it."""
    run.outputs.clear()
    run.inputs.clear()
    if run.case.model.has("buffer_replaced"):
        return ""  # The buffer may be computed from a patched parameter, and hold its graph.
    if not run.case.program.keeps_graphs and any(graph() is not None for graph in run.graphs):
        return "a graph is still alive after its output is gone"
    return ""


def _things(run: HooklineRun) -> list[tuple[str, weakref.ref[Any]]]:
    """Return weak references to everything that must be freed with the run."""
    things: list[tuple[str, Any]] = [("hooks", hooks) for hooks in run.hooks.values()]
    things += [("a cache", cache) for cache in run.caches.values()]
    if not run.case.model.has(*CYCLIC):
        things.append(("the model", run.model))
        things += [("a captured tensor", tensor) for tensor in run.captured_tensors()]
    return [(name, weakref.ref(thing)) for name, thing in things]


def _alive(things: list[tuple[str, weakref.ref[Any]]]) -> str:
    found = sorted({name for name, thing in things if thing() is not None})
    return f"still alive: {', '.join(found)}" if found else ""


def _own_places(source: random.Random, survey: Survey, members: bool) -> list[Place]:
    """Draw places where patching each call with its captured value can have no effect."""
    places: dict[str, Place] = {}
    families = random_families(source)
    for _ in range(source.choice((1, 2, 4))):
        if members:
            place = random_member(source, survey, VALUES, families)
        else:
            place = random_place(source, survey, VALUES, several=False)
        spot = place.spots(survey)[0]
        unfit = (
            survey.aliasing | survey.segmented | (survey.views & survey.overwritten)
        )  # A patched value is not a view.
        unfit |= {spot for spot in survey.calls if spot.member == "offset()"}  # Nor is it the parameter.
        unfit |= survey.strided | {spot for spot in survey.calls if _asks_for_identity(spot, place.port)}
        if spot not in survey.calls or spot in unfit or "*" in place.suffix or not place.exact:
            continue
        number = source.randrange(len(survey.calls[spot]))
        seen = survey.calls[spot][number]
        if spot.member.startswith("/"):
            within = seen.within if isinstance(spot.owner, nn.Module) else None
            place = dataclasses.replace(place, form="text", number=seen.number, within=within)
        elif spot.member != ":param":
            place = dataclasses.replace(place, form="text", number=number)
        places.setdefault(f"{spot} {place.port}", place)
    return list(places.values()) or [Place("text", "", ("",))]


def _asks_for_identity(spot: Spot, port: str) -> bool:
    """Return True if a value must be the same object, not an equal one."""
    if port == "output":
        return isinstance(spot.owner, Writer) and spot.owner.beside
    return isinstance(spot.owner, Twice)


def _as_listed(place: Place, survey: Survey) -> list[str]:
    """Return the sites of a place in the order of their first value; an exact site even if there was none."""
    found: dict[str, int] = {}
    for point in place.points():
        one = dataclasses.replace(place, names=(point.name,), meant=((point.name, point.member, point.number),))
        calls = [seen for seen in one.seen(survey) if seen.inputs or place.port != "input"]
        passed = [seen.began if place.port == "input" else seen.ended for seen in calls]
        if passed:
            found[point.text] = min(passed)
    if not found and place.exact:
        return [place.text + place.suffix]
    only = {meant[0]: short for short, meant in place.short_names().items() if len(meant) == 1}
    return [only.get(text, text) for text in sorted(found, key=lambda text: found[text])]


def _seeded(case: Case, run: Callable[..., Any]) -> Any:
    torch.default_generator.manual_seed(case.seed)
    args, kwargs = case.arguments(0)
    return run(case.model.build(), args, kwargs)


def two_runs(source: random.Random) -> tuple[list[HooklineRun], list[list[Any]]]:
    """Draw two programs for one model, and compute the trace of each alone."""
    members = source.random() < 0.5
    model = random_model(source, members)
    while model.has("reusing", "keeper", "lazy", "buffer_written", "buffer_replaced"):
        model = random_model(source, members)
    model = dataclasses.replace(model, train=False)
    runs, expected = [], []
    shared = model.build()
    for number in range(2):
        bare = Case(model, Program((), ()), 1000 * number, source.random() < 0.5, "positional")
        survey = surveyed(bare)
        drawing = Drawing(source, survey, False, random_families(source) if members else ())
        action = drawing.action()
        while action.option in ("noise", "noisy"):  # The process has one random generator.
            action = drawing.action()
        forwards = ("forward", 0, "grad", None), ("forward", 1, "no_grad", None)
        events = (("open", 0), *forwards, ("close", 0, False), ("read",))
        case = dataclasses.replace(bare, program=Program((Block((action,)),), events))
        expected.append(OracleRun(case, survey).play_quietly())
        runs.append(HooklineRun(case, survey, shared))
    return runs, expected


def play_on_threads(runs: list[HooklineRun]) -> None:
    meeting = threading.Barrier(len(runs), timeout=20)

    def play(run: HooklineRun) -> None:
        for event in run.case.program.events:
            meeting.wait()
            run.happen(event)

    threads = [threading.Thread(target=play, args=(run,)) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def play_in_tasks(source: random.Random, runs: list[HooklineRun]) -> None:
    """Interleave the runs as asyncio does: each in its own context, on one thread."""
    left = [(run, contextvars.copy_context(), list(run.case.program.events)) for run in runs]
    while left:
        task = source.choice(left)
        run, context, events = task
        context.run(run.happen, events.pop(0))
        if not events:
            left.remove(task)
