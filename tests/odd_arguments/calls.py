"""A usual call of every public function and method, in which one argument can be replaced by an odd one.

Each call uses its result as a user would, because some mistakes show only then.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hookline as hl
from tests.support.models import mlp

X = torch.linspace(-1, 1, 8).reshape(2, 4)


class World:
    """The objects that the calls need: a model, a cache, hooks, and a folder for files."""

    def __init__(self, folder: Path) -> None:
        torch.default_generator.manual_seed(0)
        self.folder = folder
        self.model = mlp().eval()

    @functools.cached_property
    def cache(self) -> hl.Cache:
        return hl.run(self.model, X, capture=["0", "1", "2"])[1]

    @functools.cached_property
    def sweep(self) -> hl.Sweep:
        return hl.Sweep(0.5, {"0": 0.1, "2": 0.3})

    @functools.cached_property
    def comparison(self) -> hl.Comparison:
        return hl.compare(self.model, copy.deepcopy(self.model), run=(X,))

    @property
    def store(self) -> hl.Store:
        shutil.copytree(Path(_harvested().name) / "store", self.folder / "store")
        return hl.Store(self.folder / "store")

    @contextlib.contextmanager
    def hooks(self) -> Iterator[hl.Hooks]:
        hooks = hl.Hooks(self.model)
        hooks.capture("0", "2", name="both")
        hooks.edit("1", lambda value: value + 1, name="more")
        try:
            yield hooks
        finally:
            hooks.remove()

    @property
    def hooked(self) -> Any:
        return hl.auto_hook(mlp().eval())


@functools.cache
def _harvested() -> tempfile.TemporaryDirectory[str]:
    """Harvest once, since every test of a store needs one."""
    folder = tempfile.TemporaryDirectory()
    world = World(Path(folder.name))
    hl.harvest(world.model, X, "0", "2", to=world.folder / "store", batch_size=2, progress=False)
    return folder


class Given:
    """The odd argument, by name. All other arguments keep their usual value."""

    def __init__(self, **odd: Any) -> None:
        self.odd = odd

    def __call__(self, name: str, usual: Any) -> Any:
        return self.odd.pop(name, usual)

    def star(self, name: str, *usual: Any) -> tuple[Any, ...]:
        return (self.odd.pop(name),) if name in self.odd else usual

    def rest(self) -> dict[str, Any]:
        return self.odd


def block(hooks: hl.Hooks, model: nn.Module) -> None:
    """Enter a short form, run the model, and read what was captured."""
    with hooks as acts:
        model(X)
    for site in acts:
        acts[site]


def enter(made: Any) -> None:
    with made:
        pass


def _in_hooks(act: Callable[[hl.Hooks, Given], Any]) -> Callable[[World, Given], Any]:
    def call(world: World, given: Given) -> None:
        with world.hooks() as hooks:
            act(hooks, given)
            with hooks:
                world.model(X)

    return call


def _hooks(world: World, given: Given) -> None:
    hooks = hl.Hooks(given("model", world.model), **given.rest())
    hooks.capture("0")
    hooks.remove()


def _with_gradients(world: World) -> None:
    with hl.capture(world.model, "0", "0:grad_output") as acts:
        world.model(X).sum().backward()
    acts.with_gradients()


def _cache_tokens(world: World, given: Given) -> None:
    model, ids = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 2)), torch.zeros(2, 3, dtype=torch.long)
    with hl.capture(model, "1", keep="all") as acts:
        model(ids)
    acts.tokens(given("key", "1"), **given.rest())


def _same(value: Any, *_: Any, **__: Any) -> Any:
    return value


def _harvest(world: World, given: Given, run: Callable[..., Any]) -> Any:
    to = given("to", world.folder / "harvest")
    model, data = given("model", world.model), given("data", X)
    return run(model, data, *given.star("where", "0"), to=to, **{"progress": False, "batch_size": 2, **given.rest()})


def _plan(act: Callable[[hl.Harvest, Given], Any]) -> Callable[[World, Given], Any]:
    return lambda w, g: act(hl.Harvest(w.model, X, "0", to=w.folder / "harvest", batch_size=2, progress=False), g)


def _point(act: Callable[[Any, Given], Any]) -> Callable[[World, Given], Any]:
    def call(world: World, given: Given) -> None:
        hooked = world.hooked
        act(
            hooked.hook_dict["hook_point"] if "hook_point" in hooked.hook_dict else next(iter(hooked.hook_points())),
            given,
        )
        hooked(X)

    return call


def _hooked(act: Callable[[Any, Given], Any]) -> Callable[[World, Given], Any]:
    def call(world: World, given: Given) -> None:
        hooked = world.hooked
        result = act(hooked, given)
        if hasattr(result, "__enter__"):
            with result:
                hooked(X)
        hooked(X)
        hooked.reset_hooks()

    return call


def _name(hooked: Any) -> str:
    return next(iter(hooked.hook_dict))


def _watch(world: World, given: Given) -> None:
    with hl.watch(given("model", world.model), *given.star("where"), **given.rest()):
        world.model(X)


CALLS: dict[str, Callable[[World, Given], Any]] = {
    "attached": lambda w, g: str(hl.attached(g("model", w.model))),
    "clear": lambda w, g: hl.clear(g("model", w.model)),
    "capture": lambda w, g: block(hl.capture(g("model", w.model), *g.star("where", "0"), **g.rest()), w.model),
    "patch": lambda w, g: block(hl.patch(g("model", w.model), g("values", {"0": 0.0}), **g.rest()), w.model),
    "edit": lambda w, g: block(
        hl.edit(g("model", w.model), g("where", "0"), g("function", torch.neg), **g.rest()), w.model
    ),
    "skip": lambda w, g: block(hl.skip(g("model", w.model), g("where", "1"), **g.rest()), w.model),
    "run": lambda w, g: hl.run(g("call", w.model), *g.star("args", X), **g.rest()),
    "sites": lambda w, g: str(hl.sites(g("model", w.model), *g.star("where", "0"), **g.rest())),
    "scan": lambda w, g: str(hl.scan(g("model", w.model), *g.star("args", X), **g.rest())),
    "tell_tokens": lambda w, g: hl.tell_tokens(g("model", w.model), g("function", lambda x: torch.zeros(2, 4).long())),
    "tokens": lambda w, g: str(hl.tokens(g("positions", [0, 1]), **g.rest())),
    "sweep": lambda w, g: str(
        hl.sweep(
            g("model", w.model),
            g("where", "*"),
            g("metric", lambda output: output.sum()),
            **{"run": (X,), "progress": False, **g.rest()},
        )
    ),
    "compare": lambda w, g: str(
        hl.compare(g("a", w.model), g("b", copy.deepcopy(w.model)), **{"run": (X,), **g.rest()})
    ),
    "Comparison.check": lambda w, g: w.comparison.check(),
    "Comparison.explore": lambda w, g: w.comparison.explore(**{"to": w.folder / "compared.html", **g.rest()}),
    "Comparison.errors": lambda w, g: w.comparison.errors(**g.rest()),
    "Comparison.plot": lambda w, g: w.comparison.plot(**g.rest()),
    "Comparison.to_frame": lambda w, g: str(w.comparison.to_frame()),
    "explore": lambda w, g: hl.explore(g("what", w.cache), to=g("to", w.folder / "page.html"), **g.rest()),
    "watch": _watch,
    "harvest": lambda w, g: _harvest(w, g, hl.harvest)["0"][:],
    "auto_hook": lambda w, g: hl.auto_hook(g("model", w.model))(X),
    "check": lambda w, g: hl.check(g("model", mlp()), g("input_kwargs", {"input": X}), **g.rest()),
    "Cache": lambda w, g: str(hl.Cache(g("values", {"0": X}))),
    "Cache.calls": lambda w, g: w.cache.calls(g("key", "0")),
    "Cache.cat": lambda w, g: w.cache.cat(g("site", "0"), **g.rest()),
    "Cache.clear": lambda w, g: w.cache.clear(),
    "Cache.load": lambda w, g: (w.cache.save(w.folder / "c"), hl.Cache.load(g("path", w.folder / "c"))),
    "Cache.map": lambda w, g: w.cache.map(g("function", torch.neg))["0"],
    "Cache.plot": lambda w, g: w.cache.plot(g("where", "0"), g("kind", None), **g.rest()),
    "Cache.save": lambda w, g: w.cache.save(g("path", w.folder / "cache"), **g.rest()),
    "Cache.select": lambda w, g: str(w.cache.select(*g.star("where", "0"))),
    "Cache.tokens": _cache_tokens,
    "Cache.stack": lambda w, g: w.cache.stack(*g.star("where", "0"), **g.rest()),
    "Cache.stats": lambda w, g: str(w.cache.stats()),
    "Cache.to": lambda w, g: w.cache.to(g("target", "cpu"))["0"],
    "Cache.with_gradients": lambda w, g: _with_gradients(w),
    "Hooks": _hooks,
    "Hooks.activate": _in_hooks(lambda hooks, g: hooks.activate()),
    "Hooks.activated": _in_hooks(lambda hooks, g: enter(hooks.activated())),
    "Hooks.at": _in_hooks(lambda hooks, g: str(hooks.at(*g.star("where", "0")))),
    "Hooks.capture": _in_hooks(lambda hooks, g: hooks.capture(*g.star("where", "1"), **g.rest())),
    "Hooks.deactivate": _in_hooks(lambda hooks, g: hooks.of("edit").deactivate()),
    "Hooks.edit": _in_hooks(lambda hooks, g: hooks.edit(g("where", "0"), g("function", torch.neg), **g.rest())),
    "Hooks.of": _in_hooks(lambda hooks, g: str(hooks.of(g("kind", "edit")))),
    "Hooks.patch": _in_hooks(lambda hooks, g: hooks.patch(g("values", {"0": 0.0}), **g.rest())),
    "Hooks.remove": _in_hooks(lambda hooks, g: hooks.of("edit").remove()),
    "Hooks.run": _in_hooks(lambda hooks, g: hooks.run(*g.star("args", X), **g.rest())),
    "Hooks.skip": _in_hooks(lambda hooks, g: hooks.skip(g("where", "1"), **g.rest())),
    "Hooks.stop_after": _in_hooks(lambda hooks, g: hooks.stop_after(*g.star("where", "2"), **g.rest())),
    "Hooks.when_missing": _in_hooks(lambda hooks, g: hooks.when_missing(g("what", "warn"))),
    "Hook.activate": _in_hooks(lambda hooks, g: next(iter(hooks)).activate()),
    "Hook.deactivate": _in_hooks(lambda hooks, g: next(iter(hooks.of("edit"))).deactivate()),
    "Hook.remove": _in_hooks(lambda hooks, g: next(iter(hooks.of("edit"))).remove()),
    "Site.parse": lambda w, g: str(hl.Site.parse(g("text", "0:input[0]"))),
    "Store": lambda w, g: str((w.store, hl.Store(g("path", w.folder / "store"), **g.rest()))[1]),
    "Store.dataset": lambda w, g: next(iter(w.store.dataset(*g.star("sites", "0"), **g.rest()))),
    "Store.plot": lambda w, g: w.store.plot(g("where", "0"), g("kind", None), **g.rest()),
    "Store.rows": lambda w, g: w.store.rows(g("site", "0"), **g.rest())[:],
    "Store.stats": lambda w, g: str(w.store.stats()),
    "Store.verify": lambda w, g: w.store.verify(),
    "Sweep": lambda w, g: str(hl.Sweep(g("base", 0.5), g("measured", {"0": 0.1}), **g.rest())),
    "Sweep.grid": lambda w, g: str(w.sweep.grid()),
    "Sweep.load": lambda w, g: (w.sweep.save(w.folder / "s"), hl.Sweep.load(g("path", w.folder / "s"))),
    "Sweep.normalised": lambda w, g: str(
        w.sweep.normalised(clean=g("clean", 1.0), corrupted=g("corrupted", 0.0), **g.rest())
    ),
    "Sweep.plot": lambda w, g: w.sweep.plot(**g.rest()),
    "Sweep.save": lambda w, g: w.sweep.save(g("path", w.folder / "sweep"), **g.rest()),
    "Sweep.select": lambda w, g: str(w.sweep.select(*g.star("where", "0"))),
    "Sweep.to_frame": lambda w, g: str(w.sweep.to_frame()),
    "Sweep.top": lambda w, g: str(w.sweep.top(g("n", 1), **g.rest())),
    "Harvest": lambda w, g: _harvest(w, g, hl.Harvest).run()["0"][:],
    "Harvest.estimate": _plan(lambda plan, g: plan.estimate()),
    "Harvest.pending": _plan(lambda plan, g: plan.pending()),
    "Harvest.renew": _plan(lambda plan, g: plan.renew()),
    "Harvest.run": _plan(lambda plan, g: plan.run(**g.rest())),
    "Harvest.run_unit": _plan(lambda plan, g: plan.run_unit(g("unit", 0))),
    "Harvest.status": _plan(lambda plan, g: plan.status()),
    "Generation": lambda w, g: hl.Generation(**g.rest()),
    "HookPoint": lambda w, g: hl.HookPoint()(X),
    "HookPoint.add_hook": _point(lambda point, g: point.add_hook(g("hook", _same), **g.rest())),
    "HookPoint.add_perma_hook": _point(lambda point, g: point.add_perma_hook(g("hook", _same), **g.rest())),
    "HookPoint.clear_context": _point(lambda point, g: point.clear_context()),
    "HookPoint.handles": _point(lambda point, g: point.handles(g("dir", "fwd"))),
    "HookPoint.has_hooks": _point(lambda point, g: point.has_hooks(**g.rest())),
    "HookPoint.layer": lambda w, g: hl.auto_hook(nn.ModuleDict({"h": nn.ModuleList([mlp()])})) and None,
    "HookPoint.remove_hooks": _point(lambda point, g: point.remove_hooks(**g.rest())),
    "HookedModel": lambda w, g: hl.HookedModel(g("model", w.model))(X),
    "HookedModel.add_caching_hooks": _hooked(lambda m, g: m.add_caching_hooks(**g.rest())),
    "HookedModel.add_hook": _hooked(lambda m, g: m.add_hook(g("name", _name(m)), g("hook", _same), **g.rest())),
    "HookedModel.add_perma_hook": _hooked(
        lambda m, g: m.add_perma_hook(g("name", _name(m)), g("hook", _same), **g.rest())
    ),
    "HookedModel.clear_contexts": _hooked(lambda m, g: m.clear_contexts()),
    "HookedModel.get_caching_hooks": _hooked(
        lambda m, g: m.run_with_hooks(X, fwd_hooks=m.get_caching_hooks(**g.rest())[1])
    ),
    "HookedModel.hook_points": _hooked(lambda m, g: m.hook_points()),
    "HookedModel.hooks": _hooked(lambda m, g: m.hooks(**g.rest())),
    "HookedModel.remove_all_hook_fns": _hooked(lambda m, g: m.remove_all_hook_fns(**g.rest())),
    "HookedModel.reset_hooks": _hooked(lambda m, g: m.reset_hooks(**g.rest())),
    "HookedModel.run_with_cache": _hooked(lambda m, g: m.run_with_cache(*g.star("args", X), **g.rest())),
    "HookedModel.run_with_hooks": _hooked(lambda m, g: m.run_with_hooks(*g.star("args", X), **g.rest())),
    "HookedModel.setup": _hooked(lambda m, g: m.setup()),
    "HookedModel.unwrap": lambda w, g: w.hooked.unwrap()(X),
}

# Functions that users don't call, or that need more than World provides; each has tests elsewhere.
LEFT_OUT = {
    "Texts": "needs a tokenizer: tests/harvest/test_texts_and_images.py",
    "Images": "needs a processor: tests/harvest/test_texts_and_images.py",
    "Generation": "called by harvest: tests/harvest/test_generation.py",
    "Store.to_datasets": "needs datasets: tests/store/test_exports.py",
    "Store.to_parquet": "needs pyarrow: tests/store/test_exports.py",
    "HookPoint.forward": "called by torch",
    "Harvest.live": "called by an engine",
    "Harvest.place": "called by an engine",
    "Harvest.source": "called by an engine",
}
# Arguments that are passed unchanged to the model or to another library.
PASSED_ON = {"args", "kwargs", "_args", "_kwargs", "options", "ax", "optimizer", "scaler"}


def public() -> dict[str, Any]:
    """Return every public function and method by its name."""
    found: dict[str, Any] = {}
    for name in hl.__all__:
        thing = getattr(hl, name)
        if not callable(thing):  # hl.pinned is an object with one setting.
            continue
        if not inspect.isclass(thing):
            found[name] = thing
        elif not issubclass(thing, BaseException):
            found[name] = thing
            own = [base for base in thing.__mro__ if base.__module__.startswith("hookline")]
            names = {key for base in own for key in vars(base) if not key.startswith("_")}
            methods = {key: getattr(thing, key) for key in sorted(names)}
            found |= {f"{name}.{key}": one for key, one in methods.items() if inspect.isroutine(one)}
    return {name: one for name, one in found.items() if name not in LEFT_OUT and not _is_left_out(name)}


def _is_left_out(name: str) -> bool:
    above, _, method = name.partition(".")
    return name in ("Comparison", "Hook", "Site") or bool(method and above in LEFT_OUT)


def parameters(name: str) -> dict[str, str]:
    """Return the annotations of the parameters of a public function that are tested with odd arguments."""
    taken = inspect.signature(public()[name]).parameters
    return {one: str(given.annotation) for one, given in taken.items() if one not in PASSED_ON and one != "self"}
