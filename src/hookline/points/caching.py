"""The values at hook points as a plain dict: the caching functions of TransformerLens, built on hookline's captures."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, MutableMapping, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hookline import Cache, Hooks, Site
from hookline._kernel import describe, device_of, leaves, map_tensors, refuse_flags, share_detached, short_form
from hookline.errors import EditError, HooklineError, NotCaptured, SiteError, did_you_mean
from hookline.points.hook_points import RAISES, SILENT, WARNS, HookPoint, HookToAdd, Points

NamesFilter = str | Collection[str] | Callable[[str], bool] | None
HEADS = ("hook_q", "hook_k", "hook_v", "hook_z", "hook_result")  # Shape: (batch, position, head, width).


class Activations(dict[str, Any]):
    """The value at each point, by name, in the order in which points fired. A missing name raises with the reason."""

    def __init__(self) -> None:
        super().__init__()
        self.reasons: dict[str, str] = {}

    def __missing__(self, name: str) -> Any:
        point = f"{name}.hook_point"
        near = f"; did you mean {point!r}?" if point in self else did_you_mean(str(name), self)
        raise NotCaptured(self.reasons.get(name) or f"{name!r} was not cached{near}")


class CacheOptions(NamedTuple):
    """The options for storing values: the device, and which part of each value."""

    device: torch.device | str | None = None
    remove_batch_dim: bool = False
    pos_slice: Any = None

    def refuse(self) -> None:
        """Raise for an invalid option."""
        refuse_flags(remove_batch_dim=self.remove_batch_dim)
        if self.device is not None:
            device_of(self.device)

    @property
    def cuts(self) -> bool:
        """True if only a part of each value is kept."""
        return self.remove_batch_dim or self.pos_slice is not None

    def cut(self, tensor: Tensor, name: str) -> Tensor:
        """Return the part of a tensor that is kept."""
        if self.remove_batch_dim and tensor.dim() and tensor.shape[0] == 1:
            tensor = tensor[0]
        dimension = 3 if name.removesuffix("_grad").endswith(HEADS) else 2
        if self.pos_slice is None or tensor.dim() < dimension:
            return tensor
        chosen = getattr(self.pos_slice, "slice", self.pos_slice)  # transformer_lens's Slice holds a slice.
        where = slice(*chosen) if isinstance(chosen, tuple) else chosen
        if isinstance(self.pos_slice, int):
            where = [chosen]  # A list keeps the dimension.
        index = (..., where, *(slice(None),) * (dimension - 1))
        try:
            return tensor[index].clone()  # A view would keep the whole tensor in memory.
        except (IndexError, TypeError) as error:
            shape = tuple(tensor.shape)
            raise EditError(f"pos_slice={self.pos_slice!r} can't index the shape {shape}: {error}") from None


class Saver:
    """A hook function that stores values in a dict, by the name of the point. It keeps the latest value."""

    takes_whole = True  # HookCall passes the whole value, not tensor by tensor.

    def __init__(self, cache: dict[str, Any], options: CacheOptions, suffix: str, when_missing: str) -> None:
        self.cache = cache
        self.options = options
        self.suffix = suffix
        self.when_missing = when_missing

    def __call__(self, value: Any, hook: Any) -> None:
        """Store a value."""
        name = hook.name + self.suffix
        kept = map_tensors(lambda tensor: share_detached(tensor).to(self.options.device), value)
        self.cache[name] = _single(map_tensors(lambda tensor: self.options.cut(tensor, name), kept))


def caching_hooks(
    points: Points, names: NamesFilter, incl_bwd: bool, options: CacheOptions, cache: dict[str, Any] | None
) -> tuple[dict[str, Any], list[tuple[str, Saver]], list[tuple[str, Saver]]]:
    """Return a dict, and for each direction the (name, hook function) pairs that fill it."""
    refuse_flags(incl_bwd=incl_bwd)
    options.refuse()
    if cache is not None and not isinstance(cache, MutableMapping):
        raise EditError(f"cache= takes the dict to fill, not {describe(cache)}")
    kept = Activations() if cache is None else cache
    chosen, when_missing = _choose(points, names)
    forward, backward = (Saver(kept, options, suffix, when_missing) for suffix in ("", "_grad"))
    return kept, [(name, forward) for name in chosen], [(name, backward) for name in chosen if incl_bwd]


def run_with_cache(
    points: Points,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    names: NamesFilter,
    incl_bwd: bool,
    options: CacheOptions,
    clear_contexts: bool,
) -> tuple[Any, Activations]:
    """Run the model once, and return its output and the values at the chosen points."""
    if options.remove_batch_dim:
        _refuse_batch((args, kwargs))
    chosen, when_missing = _choose(points, names)
    model = points.model
    foreign = Activations()
    wanted = [
        HookToAdd(point, Saver(foreign, options, suffix, when_missing), dir, when_missing)
        for point in chosen.values()
        if not isinstance(point, HookPoint)  # A transformer_lens point calls its hooks itself.
        for dir, suffix in (("fwd", ""), ("bwd", "_grad"))[: 1 + incl_bwd]
    ]
    own = {name: points.site(point) for name, point in chosen.items() if isinstance(point, HookPoint)}
    own |= {name + "_grad": site._replace(port="grad_output") for name, site in own.items() if incl_bwd}
    block = captures(model, own, options, when_missing)
    with points.opened(wanted, clear_contexts=clear_contexts):
        output = _run(model, args, kwargs, incl_bwd, block) if own else model(*args, **kwargs)
        if incl_bwd and not own:
            loss_of(output).backward()
    result = collect(block.cache, own)
    result.update(foreign)
    return output, result


def captures(model: nn.Module, sites: dict[str, Site], options: CacheOptions, when_missing: str) -> Hooks:
    """Return a block that captures these sites."""
    block = short_form(model)
    groups: dict[bool, list[tuple[str, Site]]] = {}
    for name, site in sites.items():
        groups.setdefault(name.removesuffix("_grad").endswith(HEADS) and options.cuts, []).append((name, site))
    for group in groups.values():
        first = group[0][0]
        transform = _cutting(options, first) if options.cuts else None
        block.capture(*(site for _, site in group), device=options.device, transform=transform)
    return block.when_missing(when_missing) if sites else block


def _cutting(options: CacheOptions, name: str) -> Callable[[Any], Any]:
    return lambda value: map_tensors(lambda tensor: options.cut(tensor, name), value)


def _run(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], incl_bwd: bool, block: Hooks) -> Any:
    with block:
        output = model(*args, **kwargs)
        if incl_bwd:
            loss_of(output).backward()
    return output


def collect(acts: Cache, sites: dict[str, Site]) -> Activations:
    """Return captured values by the names of their points; of several operations on a parameter, only the latest."""
    result = Activations()
    names = {(site.path, site.port, bool(site.member)): name for name, site in sites.items()}
    for text in acts:
        site = Site.parse(text)
        name = names[site.path, site.port, bool(site.member)]
        result.pop(name, None)
        result[name] = _single(acts.calls(text)[-1])
    for name, site in sites.items():
        if name not in result:
            try:
                acts[site]
            except NotCaptured as error:
                result.reasons[name] = str(error)
    return result


def _single(value: Any) -> Any:
    """Return the tensor if a value holds exactly one, otherwise the value."""
    tensors = leaves(value)
    return tensors[0] if len(tensors) == 1 else value


def _choose(points: Points, names: NamesFilter) -> tuple[dict[str, Any], str]:
    """Return the points that `names` selects, by name, and the `when_missing` to use at them."""
    found: dict[str, Any] = dict(points.read())
    if names is None:
        return found, SILENT
    if callable(names):
        return {point.name or "": point for point in points.choose(names)}, WARNS
    wanted = _names_in(names)
    for name in wanted - set(found):
        points.choose(name)  # Raises, and suggests similar names.
    return {name: point for name, point in found.items() if name in wanted}, RAISES


def _names_in(names: Any) -> set[Any]:
    """Return the names in a names_filter; raise for a mapping or an empty iterator."""
    is_list = isinstance(names, (Sequence, Set, Iterator))
    listed = {names} if isinstance(names, str) else set(names) if is_list else {None}
    if not all(isinstance(name, str) for name in listed) or (isinstance(names, Iterator) and not listed):
        raise SiteError(f"names_filter is a name, a list of names or a function of one, not {describe(names)}")
    return listed


def _refuse_batch(given: Any) -> None:
    first = next(iter(leaves(given)), None)
    if first is not None and first.dim() and first.shape[0] != 1:
        raise HooklineError(f"remove_batch_dim=True is for a batch of one, and the input is {describe(first)}")


def loss_of(output: Any) -> Tensor:
    """Return the output, or raise if backward() can't be called on it."""
    if not isinstance(output, Tensor) or output.numel() != 1:
        raise EditError(f"incl_bwd=True calls backward() on the output, which is {describe(output)}, not one number")
    return output
