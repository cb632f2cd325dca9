"""What a random case shows to a user of hookline, as lines of text that two processes can compare.

The cases are those of the properties, with a few events added that the oracle can't predict: sites with mistakes in
them, a hook removed on its own, `hl.clear` while a block is open. Only public names of hookline are used.
"""

from __future__ import annotations

import copy
import copyreg
import dataclasses
import hashlib
import random
import re
import warnings
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

import hookline as hl
from tests.properties import properties
from tests.properties.cases import random_case, random_families, surveyed
from tests.properties.checks import anatomy, changes
from tests.properties.members import random_member
from tests.properties.modules import Tripwire, blend
from tests.properties.places import random_place
from tests.properties.programs import VALUES, Program, double
from tests.properties.structures import copied, flat, parts
from tests.properties.survey import Survey
from tests.properties.under_hookline import HooklineRun
from tests.properties.worlds import Case

TESTS = Path(__file__).parents[1]
Lines = list[str]
# What a site may end with, right or wrong.
NUMBERS = ("",) * 12 + ("#0", "#0", "#1", "#-1", "#1:", "#7")
PORTS = ("",) * 6 + (":input", ":inputs", ':inputs["x"]', ":grad_output", ":grad_input", ":param", ":inptu")
PARTS = ("",) * 6 + ("[0]", "[..., 0]", "[*]", '["hidden"]', "[99]", "[:, 1:]")


def told(value: Any, call: Any) -> list[Any]:
    """Return what a call tells about itself and the calls around it."""
    around = [call]
    while around[-1].parent is not None:
        around.append(around[-1].parent)
    return [
        [str(one.site), type(one.module).__name__, len(one.args), list(one.kwargs), one.number, one.step, one.tokens]
        for one in around
    ]


OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"keep": "all"},
    {"clone": True},
    {"detach": False},
    {"stop": True},
    {"dtype": torch.float16},
    {"device": "cpu"},
    {"limit": 150},
    {"limit": 150, "spill": True, "keep": "all"},
    {"transform": told, "with_call": True, "keep": "all"},
    {"transform": told, "with_call": True, "keep": "all"},
    {"keep": "lots"},
)


def observe(seed: int) -> Lines:
    """Draw the case of a seed, play it, and return what it shows."""
    drawn = _drawn(random.Random(seed))
    return observe_contexts(random.Random(seed)) if drawn is None else observe_case(*drawn)


def case_of(seed: int) -> Case | None:
    """Return the case of a seed, or None if it is two cases at once."""
    drawn = _drawn(random.Random(seed))
    return drawn and drawn[0]


def _drawn(source: random.Random) -> tuple[Case, Survey] | None:
    """Draw a case as `fuzz` does, and add events; None if `fuzz` plays two at once."""
    drawn = properties.drawn_property(source)
    if drawn is properties.contexts_do_not_see_each_other:
        return None
    members = drawn in (properties.members_agree_with_the_oracle, properties.sites_are_listed_as_they_run)
    case, survey = random_case(source, members, drawn is properties.containers_agree_with_the_oracle)
    events = list(case.program.events)
    for _ in range(source.choice((0, 1, 1, 2, 3))):
        events.insert(source.randrange(len(events)), random_event(source, case, survey))
    return dataclasses.replace(case, program=Program(case.program.blocks, tuple(events))), survey


def random_event(source: random.Random, case: Case, survey: Survey) -> tuple[Any, ...]:
    """Draw an event that `ObservedRun` adds to those of the oracle."""
    kinds = {
        "wild": 12,
        "itself": 4,
        "narrow": 4,
        "trim": 4,
        "under": 4,
        "attached": 2,
        "clear": 2,
        "twin": 2,
        "sites": 1,
    }
    (kind,) = source.choices(list(kinds), list(kinds.values()))
    block = source.randrange(len(case.program.blocks))
    if kind == "wild":
        verb = source.choice(("capture", "capture", "capture", "capture", "patch", "edit", "skip", "stop_after"))
        unending = case.model.has(
            "recursive", "recursive_method"
        )  # A call with the same arguments again would never end.
        verb = "capture" if unending else verb
        text = _valid_text(source, survey) if source.random() < 0.5 else _random_text(source, survey)
        return kind, verb, text, source.choice(OPTIONS) if verb == "capture" else {}
    if kind in ("sites", "itself", "twin"):
        return kind, _valid_text(source, survey)
    if kind in ("attached", "clear"):
        return (kind,)
    return (kind, block) if kind == "under" else (kind, block, source.randrange(4))


def _valid_text(source: random.Random, survey: Survey) -> str:
    """Draw a site at which something passes."""
    if source.random() < 0.5:
        place = random_member(source, survey, VALUES, random_families(source))
    else:
        place = random_place(source, survey, VALUES)
    return place.text + place.suffix


def _random_text(source: random.Random, survey: Survey) -> str:
    """Draw a site from parts that may not go together, perhaps with a letter missing."""
    spot = source.choice(list(survey.calls))
    name = source.choice([name for name, owner in survey.owners().items() if owner == spot.owner])
    member = spot.member if source.random() < 0.8 else source.choice(("", "/*", "*", "/nope"))
    dot = "." if name and member.endswith((")", "*")) and member != "/*" else ""
    text = name + dot + member + source.choice(NUMBERS) + source.choice(PORTS) + source.choice(PARTS)
    if text and source.random() < 0.1:
        index = source.randrange(len(text))
        text = text[:index] + text[index + 1 :]
    return text


class ObservedRun(HooklineRun):
    """A program under hookline, with more events. After each event, it notes what the hooks say about themselves."""

    def happen(self, event: tuple[Any, ...]) -> None:
        try:
            super().happen(event)
        except Exception as error:
            self.note(f"{event[0]} failed", type(error).__name__)
        for block in sorted(self.caches.keys() & self.hooks.keys()):
            self.note(f"hooks of block {block} after {event[0]}", _listed(self.hooks[block]))
        if event[0] == "open":
            named = [name for name, _ in self.model.named_modules()]
            self.note("the model", [named, list(self.model.state_dict()), str(self.model)])

    def attempt(self, label: str, act: Callable[[], Any]) -> None:
        """Note the result of a call, or the type of its error."""
        try:
            self.note(label, copied(act()))
        except Exception as error:
            self.note(label, type(error).__name__)

    def wild(self, verb: str, text: str, options: dict[str, Any]) -> None:
        """Run the model under a hook that may make no sense, with a backward."""
        values = {"patch": [{text: 0.5}], "edit": [text, double]}.get(verb, [text])

        def run() -> Any:
            args, kwargs = self.case.arguments(7)
            hooks = hl.Hooks(self.model, active=False) if verb == "stop_after" else getattr(hl, verb)
            with hooks.stop_after(text) if verb == "stop_after" else hooks(self.model, *values, **options) as acts:
                output = self.callable(*args, **kwargs)
                total = blend(output).sum() if output is not None else torch.zeros(())
                if total.requires_grad:
                    total.backward()
            return [output, [[name, acts.calls(name)] for name in _ordered(acts)]]

        self.attempt(f"{verb} {text!r} with {', '.join(options) or 'no options'}", run)
        for parameter in self.model.parameters():
            parameter.grad = None

    def sites(self, text: str) -> None:
        """List the sites that match."""
        args, kwargs = self.case.arguments(0)
        self.attempt(f"sites {text!r}", lambda: [str(site) for site in hl.sites(self.model, text, run=kwargs or args)])

    def itself(self, text: str) -> None:
        """Patch the model with values captured from it."""

        def run() -> Any:
            args, kwargs = self.case.arguments(0)
            _, cache = hl.run(self.callable, *args, capture=text, **kwargs)
            return hl.run(self.callable, *args, patch=cache, **kwargs)

        self.attempt(f"patched with itself at {text!r}", run)

    def twin(self, text: str) -> None:
        """Hook a copy of the model, which may have hooks at this moment, and run both."""

        def run() -> Any:
            (args, kwargs), twin = self.case.arguments(3), copy.deepcopy(self.model)
            with hl.capture(twin, text, keep="all") as acts:
                outputs = [self.model(*args, **kwargs), twin(*args, **kwargs)]
            return [outputs, [[name, acts.calls(name)] for name in _ordered(acts)]]

        self.attempt(f"beside a copy with hooks at {text!r}", run)

    def narrow(self, block: int, number: int) -> None:
        """Look at some of the hooks of a block, and pause them."""
        action = self.case.program.blocks[block].actions[0]
        for what, choose in (
            ("at", lambda hooks: hooks.at(action.places[0].where(self.model))),
            ("of", lambda hooks: hooks.of(("capture", "patch", "edit", "stop")[number])),
            ("named", lambda hooks: hooks[f"a{number}"]),
        ):
            if block in self.caches and block in self.hooks:
                self.attempt(f"hooks {what} {number}", lambda choose=choose: _listed(choose(self.hooks[block])))
                self.attempt("paused", lambda choose=choose: choose(self.hooks[block]).deactivate())

    def trim(self, block: int, number: int) -> None:
        """Remove one hook of a block."""
        hooks = list(self.hooks[block]) if block in self.caches and block in self.hooks else []
        if hooks:
            self.attempt("removed", hooks[number % len(hooks)].remove)

    def under(self, block: int) -> None:
        """Run the model by the `run` of a `Hooks`."""
        args, kwargs = self.case.arguments(5)
        if block in self.caches and block in self.hooks:
            self.attempt("run", lambda: self.hooks[block].run(*args, **kwargs))

    def attached(self) -> None:
        """List what is attached to the model."""
        self.attempt("attached", lambda: [one[:3] for one in hl.attached(self.model)])

    def clear(self) -> None:
        """Remove every hook, also those of blocks that are open."""
        self.attempt("cleared", lambda: hl.clear(self.model))


def observe_case(case: Case, survey: Survey | None = None) -> Lines:
    """Play a case, and return what it shows and what it leaves."""
    Tripwire.armed = None
    run = ObservedRun(case, survey or surveyed(case))
    before, copies = anatomy(run.model), set(copyreg.dispatch_table)
    found: list[tuple[str, Any]] = []
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            run.play()
        except BaseException as error:
            found.append(("the run failed", type(error).__name__))
        found += _kept(run)
    found += [("warned", _warning(one, _texts(run))) for one in warned]
    found += [("left on the model", sorted(changes(before, anatomy(run.model)).items()))]
    found += [(f"tensor {name}", _state(tensor)) for name, tensor in _tensors(run.model)]
    found += [("left in torch", [torch._C._len_torch_function_stack(), torch.is_grad_enabled()])]
    found += [("still copied in another way", [kind.__name__ for kind in copyreg.dispatch_table if kind not in copies])]
    lines = [f"{label}: {plain(_without_wording(label, value))}" for label, value in run.trace + found]
    caches = dict(run.caches)
    things = {f"hooks {block}": weakref.ref(hooks) for block, hooks in run.hooks.items()}
    things |= {f"cache {block}": weakref.ref(cache) for block, cache in caches.items()}
    things |= {"the model": weakref.ref(run.model)}
    del run, before, found
    lines.append(f"alive with the caches: {[name for name, thing in things.items() if thing() is not None]}")
    caches.clear()
    return [*lines, f"alive without: {[name for name, thing in things.items() if thing() is not None]}"]


def observe_contexts(source: random.Random) -> Lines:
    """Play two programs on one model at once, on threads or in tasks, and return what each shows."""
    runs, _ = properties.two_runs(source)
    before = anatomy(runs[0].model)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        if source.random() < 0.1:
            properties.play_on_threads(runs)
        else:
            properties.play_in_tasks(source, runs)
        found = [(f"run {number}, {label}", value) for number, run in enumerate(runs) for label, value in run.trace]
        found += [one for run in runs for one in _kept(run)]
    found += [("warned", sorted(_warning(one, {*_texts(runs[0]), *_texts(runs[1])}) for one in warned))]
    found += [("left on the model", sorted(changes(before, anatomy(runs[0].model)).items()))]
    return [f"{label}: {plain(_without_wording(label, value))}" for label, value in found]


def _listed(hooks: hl.Hooks) -> list[Any]:
    return [[hook.kind, str(hook.site), hook.name, hook.active, hook.fired] for hook in hooks]


def _ordered(cache: hl.Cache) -> list[str]:
    """Return the names in a cache. Gradients come last and sorted: torch alone decides when each arrives."""
    return sorted(cache, key=lambda name: (":grad_" in name, name if ":grad_" in name else ""))


def _kept(run: HooklineRun) -> list[tuple[str, Any]]:
    """Return every captured value, with which of them share memory with each other, the outputs and the parameters."""
    memories: dict[int, int] = {}
    held: list[Any] = [run.outputs, [tensor for _, tensor in _tensors(run.model)]]
    found = []
    for block, cache in sorted(run.caches.items()):
        names = _ordered(cache)
        found.append((f"kept by block {block}", names))
        for name in names:
            try:
                calls = cache.calls(name)
            except hl.HooklineError as error:
                found.append((f"calls {block} {name}", type(error).__name__))
                continue
            held.append(calls)
            found.append((f"calls {block} {name}", [len(calls), copied(calls)]))
            tensors = [leaf for call in calls for leaf in flat(call) if isinstance(leaf, Tensor)]
            found.append((f"tensors {block} {name}", [[one.requires_grad, one.is_leaf] for one in tensors]))
    pointers = [leaf.untyped_storage().data_ptr() for one in held for leaf in flat(one) if isinstance(leaf, Tensor)]
    found.append(("memory", [memories.setdefault(pointer, len(memories)) for pointer in pointers]))
    return found


def _texts(run: HooklineRun) -> set[str]:
    """Return the names of all modules, and all sites of the program and its events."""
    places = run.case.program.places
    texts = {name for name, _ in run.model.named_modules()}
    texts |= {place.text + place.suffix for place in places}
    texts |= {part for event in run.case.program.events for part in event[1:] if isinstance(part, str)}
    return texts | {point.text for place in places for point in place.points()}


def _warning(one: warnings.WarningMessage, texts: Iterable[str]) -> list[Any]:
    """Return the category of a warning, the sites that it names, and the line of the tests that it points to."""
    named = {text for text in re.findall(r"'([^']*)'", str(one.message)) if text in texts}
    path = Path(one.filename)
    line = f"{path.name}:{one.lineno}" if path.is_relative_to(TESTS) else "a line outside the tests"
    return [one.category.__name__, sorted(named), line]


def _without_wording(label: str, value: Any) -> Any:
    return value.partition(":")[0] if label.startswith("open ") else value


def _tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    every = [*model.named_parameters(), *model.named_buffers()]
    return [(name, tensor) for name, tensor in every if not is_lazy(tensor)]


def _state(tensor: Tensor) -> list[Any]:
    version = None if tensor.is_inference() else tensor._version
    hooks = len(tensor._backward_hooks or ())
    return [type(tensor).__name__, tensor.requires_grad, version, hooks, tensor.grad is not None, tensor]


def plain(value: Any) -> str:
    """Return a nested value as text that is equal for equal bits: a tensor as its first numbers and a digest."""
    if isinstance(value, Tensor):
        return _digest(value)
    if type(value) in (list, tuple):
        return f"{'' if type(value) is list else 'tuple'}[{', '.join(map(plain, value))}]"
    inside = parts(value)
    if inside:
        return f"{type(value).__name__}({', '.join(f'{key}={plain(part)}' for key, part in inside)})"
    return repr(value) if isinstance(value, (str, int, float, type(None), dict)) else type(value).__name__


def _digest(tensor: Tensor) -> str:
    kind = f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)} by {tensor.stride()}"
    flattened = tensor.detach().contiguous().reshape(-1)
    data = flattened.view(torch.uint8).numpy().tobytes()
    first = ", ".join(f"{number:.4g}" for number in flattened[:3].tolist())
    return f"<{kind}: {first} {hashlib.blake2b(data, digest_size=6).hexdigest()}>"
