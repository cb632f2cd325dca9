"""The tree of modules that a page shows, built from a model, or from the names of sites alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from hookline import Site
from hookline._explore.run_or_load import Run, SiteValue
from hookline._kernel import Names, is_container, is_scripted, parameter_count, unwrap, why_not_called
from hookline._scan.scan import Scan


@dataclass
class Node:
    """One module of the tree, with the fields that the page reads."""

    path: str
    type: str = ""
    parameters: int | None = None
    own: int | None = None
    calls: int | None = None
    order: int | None = None
    shape: str = ""
    dtype: str = ""
    hazards: list[str] = field(default_factory=list)
    also: list[str] = field(default_factory=list)
    sites: list[int] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return the module for JSON."""
        return asdict(self)


def tree(sites: Sequence[SiteValue], runs: Sequence[Run], model: nn.Module | None, scan: Scan | None) -> list[Node]:
    """Return the modules in the order of the tree, parents first, with the numbers of their sites."""
    nodes = {node.path: node for node in (_of_model(model) if model is not None else [Node("")])}
    names = {name: node for node in nodes.values() for name in (node.path, *node.also)}
    for number, entry in enumerate(sites):
        node = names.get(_module_of(entry.site, names))
        if node is None:
            node = _add(_module_of(entry.site, names), nodes)
            names = {**names, **nodes}
        node.sites.append(number)
        _note(node, entry)
    for run in runs:
        _note_silent(run, names, model)
    if scan is not None:
        _note_scan(scan, names)
    else:
        _number(nodes.values(), sites)
    return list(_in_order(nodes))


def _of_model(model: nn.Module) -> Iterator[Node]:
    bare = unwrap(model)
    aliases: dict[int, list[str]] = {}
    for name, module, _ in Names(bare).walk():
        aliases.setdefault(id(module), []).append(name)
    for name, module in Names(bare).once():
        own = [parameter for parameter in module.parameters(recurse=False) if not is_lazy(parameter)]  # type: ignore[redundant-expr]
        node = Node(name, type(module).__name__, parameter_count(module), sum(one.numel() for one in own))
        node.also = aliases[id(module)][1:]
        yield node


def _module_of(site: Site, names: Mapping[str, Node]) -> str:
    """Return the path of the module that a site belongs to: for a parameter, the module that holds it."""
    if site.path in names or site.port != "param":
        return site.path
    return site.path.rpartition(".")[0]


def _add(path: str, nodes: dict[str, Node]) -> Node:
    """Add a module that is known by name only, and the modules above it."""
    above = path.rpartition(".")[0]
    if above not in nodes:
        _add(above, nodes)
    nodes[path] = Node(path)
    return nodes[path]


def _note(node: Node, entry: SiteValue) -> None:
    """Copy calls, shape and dtype from the value at a module's output."""
    if entry.site.port != "output" or entry.site.member or entry.site.call is not None:
        return
    node.calls = entry.calls if node.calls is None else node.calls
    if not node.shape:
        node.dtype, node.shape = entry.dtype, str(entry.shape) if entry.dtype else ""


def _note_silent(run: Run, names: Mapping[str, Node], model: nn.Module | None) -> None:
    """Mark modules that were captured but not called."""
    for site in run.silent:
        node = names.get(site.path)
        if (
            node is None
            or node.calls
            or site.is_gradient
            or site.member
            or site.call is not None
            or site.port == "param"
        ):
            continue
        module = None if model is None else Names(model).find(site.path)
        if module is not None and is_container(module) and not is_scripted(module):
            continue
        node.calls = 0
        why = "" if module is None or model is None else why_not_called(site.path, module, unwrap(model))
        node.hazards = [f"never called{why}"]


def _note_scan(scan: Scan, names: Mapping[str, Node]) -> None:
    """Copy the results of a scan: the order in which modules begin, calls, hazards."""
    for position, row in enumerate(scan):
        node = names.get(Site.parse(row.site).path)
        if node is None:
            continue
        node.calls = row.calls if node.calls is None else node.calls
        node.order = position if node.calls else None
        node.dtype, node.shape = node.dtype or row.dtype, row.shape or node.shape
        known = [hazard for hazard in row.hazards.split("; ") if hazard]
        node.hazards += [hazard for hazard in known if hazard not in node.hazards]


def _number(nodes: Any, sites: Sequence[SiteValue]) -> None:
    """Number modules in the order of their first value."""
    first = {
        node.path: min((number for number in node.sites if not sites[number].site.is_gradient), default=None)
        for node in nodes
    }
    ordered = sorted((number, path) for path, number in first.items() if number is not None)
    places = {path: place for place, (_, path) in enumerate(ordered)}
    for node in nodes:
        node.order = places.get(node.path)


def _in_order(nodes: Mapping[str, Node]) -> Iterator[Node]:
    """Yield the modules depth first."""
    below: dict[str, list[str]] = {}
    for path in nodes:
        if path:
            below.setdefault(path.rpartition(".")[0], []).append(path)
    waiting = [""]
    while waiting:
        path = waiting.pop()
        yield nodes[path]
        waiting += reversed(below.get(path, []))
