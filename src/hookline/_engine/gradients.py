"""Taps at gradients: tensor hooks on inputs and outputs. In-place operations, keyword arguments and nesting all work.

For `:grad_input` the module gets an alias of its input, so that the gradient comes from this use of the tensor alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from sys import getrefcount
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from hookline import _why_nothing_passed as why
from hookline._cache.record import EMPTY, StoredValue, read_value
from hookline._engine import call_arguments
from hookline._engine.action import NOTHING, Action, Apply, Call
from hookline._engine.apply_to_part import blame, change_part, places
from hookline._engine.call_event import Event
from hookline._engine.capture_action import Save
from hookline._engine.tap import IGNORE, RAISE, TOGETHER, HotGradientTap, Tap
from hookline._engine.unsupported_tracing import refuse_tracers
from hookline._sites.language import Site, write_subscripts
from hookline._torch import (
    add_first_gradient_hook,
    base_of,
    current_transform,
    gradient_hooks,
    graph_task,
    is_in_reentrant_checkpoint,
    is_view,
    outside_all_modes,
    version_of,
)
from hookline._values.containers import Exchange, mutable_containers
from hookline._values.copy_or_share import Alias, alias_of, copy_arrived
from hookline._values.fit import check_same_structure
from hookline._values.nested import Arguments, held_by, leaf_places, leaves, map_tensors, split, take_part
from hookline.errors import EditError, HooklineError, NeverFired, warn

TensorHook = Callable[[Tensor], Tensor | None]
Aliases = dict[int, tuple[Tensor, Tensor]]  # A tensor and its alias, by the id of the tensor.
_SOME_TENSOR = outside_all_modes(lambda: torch.empty(0))  # Stands for each tensor in the structure of a value.


class View(NamedTuple):
    """A view whose gradient is followed. If it is written in place later, the gradient bypasses its hooks."""

    tensor: Tensor
    version: int
    before: Any  # The `grad_fn` of its base when the hook was registered.
    hook: TensorHook
    tap: Tap
    stamp: int


_views: ContextVar[list[View] | None] = ContextVar("views", default=None)


def tensors_in(passed: Arguments) -> list[Tensor]:
    """Return the tensors among the arguments."""
    found: list[Any] = [*passed[0], *passed[1].values()]
    return leaves(found) if any([type(one) is not Tensor for one in found]) else found


def given(passed: Arguments, event: Event) -> list[Tensor]:
    """Return the tensors among the arguments, and those that this call has replaced in containers."""
    found = tensors_in(passed)
    return found if event.exchanged is None else found + leaves(event.exchanged.replaced)


def follow_output(tap: Tap, value: Any, call: Call, event: Event, given: list[Tensor]) -> Any:
    """Follow the gradient of a module's output, as seen from outside the module. Return the output to pass on.

    Args:
        given: The tensors among the module's arguments before it ran.
    """
    came: dict[int, Any] = {}
    fixed: set[int] = set()
    if not isinstance(value, Tensor):
        came = mutable_containers((call.args, dict(call.kwargs)))
        fixed = _fixed(value, given, came, event)

    def alias(tensor: Tensor) -> Tensor | None:
        # An alias is needed for a tensor that has other consumers: an input that is passed through, a leaf, or one that
        # has hooks already, such as the output of a child.
        entered = any([one is tensor for one in given]) and not any([one is tensor for one in event.written])
        if not (tensor.is_leaf or entered or gradient_hooks(tensor)):
            return tensor
        if id(tensor) in fixed:
            return None
        if tensor.is_leaf or entered or is_view(tensor):
            return alias_of(tensor)
        return Alias.apply(tensor)  # type: ignore[no-untyped-call, no-any-return]

    aliases = _hook_gradients(tap, value, call, event, alias)
    return _with_aliases(value, aliases, Exchange({**event.own, **came})) if aliases else value


def follow_new(tap: HotGradientTap, output: Tensor, module: nn.Module, passed: Arguments, stamp: int) -> None:
    """Follow the gradient of a tensor that a module has just made and that nobody else holds: the usual case.

    Such a tensor needs no alias. `follow_output` handles all others.
    """
    tap.fired = True
    if not is_view(output):
        add_first_gradient_hook(output, _arrival(tap, stamp))
        return
    base = _private_base(output, module, passed)
    if base is not None and gradient_hooks(base) is None:
        add_first_gradient_hook(base, _arrival(tap, stamp, output.shape))
        return
    hook = _arrival(tap, stamp)
    add_first_gradient_hook(output, hook)
    base, views = base_of(output), _views.get()
    if views is not None and base is not None:
        views.append(View(output, version_of(output), base.grad_fn, hook, tap, stamp))


def _arrival(tap: HotGradientTap, stamp: int, shape: torch.Size | None = None) -> TensorHook:
    """Return the tensor hook that keeps the gradient of one tensor: the short form of an `Arrival`.

    Args:
        shape: The shape of the gradient, if the hook is on the base of a view.
    """
    action = tap.action
    held = weakref.ref(tap.record)  # Weak, as in `Arrival`.

    def arrived(gradient: Tensor | None) -> None:
        record = held()
        if gradient is None or record is None:  # A custom autograd.Function has returned None, or nobody can read it.
            return
        task = graph_task()
        try:
            is_plain = type(gradient) is Tensor and gradient.layout is torch.strided and current_transform() is None
            if is_plain and action.copies_on_device and gradient.is_contiguous():
                references = getrefcount(gradient)  # Read first: a call holds its arguments too.
                kept: Any = copy_arrived(gradient, references, shape)
            else:
                whole = gradient if shape is None else gradient.reshape(shape)
                kept = action.keep_gradient(whole, (), _no_call, record.site)
            if record.stamp == (task, stamp):  # The second part: the value was used and then overwritten in place.
                record.value = read_value(record.value, record.site) + read_value(kept, record.site)
            elif record.seen <= task and record.order:  # Backwards are numbered from 0, forwards from 1.
                record.value = kept
                record.stamp = task, stamp
                record.seen = task + 1
                record.count += 1
            else:
                record.put(kept, (task, stamp), task + 1)
        except Exception as error:
            blame(record.site, error)

    return arrived


def _no_call() -> NoReturn:
    raise AssertionError("only a transform needs the call")


def _fixed(value: Any, given: list[Tensor], came: dict[int, Any], event: Event) -> set[int]:
    """Return the ids of output tensors that can't be replaced by an alias, as others hold their list, dict or object.

    Tensors that this call has written into a container among its arguments can be replaced.
    """
    entered = {id(one) for one in given}
    found: set[int] = set()
    for key, container in mutable_containers(value).items():
        if key not in event.own:
            tensors = [one for one in (held_by(container) or {}).values() if isinstance(one, Tensor)]
            found |= {id(one) for one in tensors if key not in came or id(one) in entered or one.is_leaf}
    return found


def follow_input(
    tap: Tap, passed: Arguments, parameters: call_arguments.Parameters, call: Call, event: Event
) -> Arguments:
    """Follow the gradient of a module's input, through this use of it alone. Return the arguments with aliases.

    A tensor that occurs twice gets one alias: the module may check whether two arguments are the same object.
    """
    value = call_arguments.take(passed, parameters, tap.site.port)
    if value is NOTHING:
        return passed
    event.aliases |= _hook_gradients(tap, value, call, event, alias_of)
    if not event.aliases:
        return passed
    exchange = event.exchange(tap.site.port)
    args, kwargs = passed
    exchanged = [_with_aliases(one, event.aliases, exchange) for one in (*args, *kwargs.values())]
    return tuple(exchanged[: len(args)]), dict(zip(kwargs, exchanged[len(args) :], strict=True))


def _with_aliases(value: Any, aliases: Aliases, exchange: Exchange) -> Any:
    """Return a value with the aliases of its tensors, in the same containers."""

    def replace(tensor: Tensor) -> Tensor:
        return aliases[id(tensor)][1] if id(tensor) in aliases else tensor

    return replace(value) if isinstance(value, Tensor) else map_tensors(replace, value, rebuild=exchange.rebuild)


@contextmanager
def following_gradients() -> Iterator[None]:
    """Follow gradients through one forward. At its end, move hooks off views that were overwritten in place.

    A nested context leaves this to the outermost one: code around a module may write into the module's output.
    """
    views: list[View] = []
    before = _views.get()
    if before is not None:
        yield
        return
    try:
        _views.set(views)
        yield
        # Downstream views first: later calls before earlier ones, and the output of a call before its input.
        for view in sorted(views, key=lambda view: (-view.stamp, view.tap.site.port != "grad_output")):
            _rehook_view(view)
    finally:
        _views.set(before)


def is_outermost() -> bool:
    """Return True if no `following_gradients` context is open here."""
    return _views.get() is None


def _hook_gradients(
    tap: Tap, value: Any, call: Call, event: Event, alias: Callable[[Tensor], Tensor | None]
) -> Aliases:
    """Hook the tensors whose gradients a tap follows. Return the aliases that have to replace them."""
    if tap.action.observes and not tap.tokens:
        tap.fired = True
    try:
        refuse_tracers(value)
        aliases: Aliases = {}
        parts = list(places(tap, value, event))
        if len(parts) > 1 and tap.tokens and not tap.star and isinstance(tap.action, Save):
            raise HooklineError(
                "the rows have different numbers of these tokens, so their gradients make no tensor; capture the "
                "gradient of the whole value"
            )
        if tap.tokens and any([place.is_later_piece for place in parts]) and not isinstance(tap.action, Apply):
            raise HooklineError(
                "these tokens pass in several calls, whose gradients don't join; give the model the whole sequence at "
                "once, or name tokens of one call"
            )
        for place in parts:
            _hook_part(tap, value, place.subscripts, place.named, call, event, alias, aliases)
        return aliases
    except HooklineError as error:
        blame(tap.site, error)


def _hook_part(
    tap: Tap,
    value: Any,
    subscripts: tuple[Any, ...],
    named: tuple[Any, ...],
    call: Call,
    event: Event,
    alias: Callable[[Tensor], Tensor | None],
    aliases: Aliases,
) -> None:
    """Hook the tensors of one part of a value, and note their aliases. A tensor in several parts gets one alias."""
    part, rest = split(value, subscripts) if subscripts else (value, ())
    tensors = leaves(part)
    if rest and not take_part(part, rest)[1]:
        tap.miss(value)
        if not tap.action.observes:
            return
    if not torch.is_grad_enabled() or not any([tensor.requires_grad for tensor in tensors]):
        _say_why_not(tap, tensors, call.site, named)
        return
    arrival = Arrival(tap, part, named, rest, call, event)
    followed: set[int] = set()  # A tensor that occurs twice is followed once.
    is_whole = True

    # The tensors and aliases that earlier taps of this call have hooked. This tap hooks the same objects instead of new
    # aliases, so that the taps act in their order.
    own = event.followed.setdefault(tap.site.port == "grad_output", [])
    for tensor in tensors:
        if not tensor.requires_grad or id(tensor) in followed:
            continue
        hook = arrival.hook([number for number, other in enumerate(tensors) if other is tensor])
        base = _private_base_of_call(tensor, call) if is_view(tensor) else None
        passed = tensor
        if event.written and is_view(tensor) and any([tensor is one for one in event.written]):
            _hook_written(tensor, hook, tap)
        elif base is not None:
            base.register_hook(_reshaped(hook, tensor.shape))
        else:
            known = aliases[id(tensor)][1] if tap.star and id(tensor) in aliases else tensor
            taken = known if any([known is other for other in own]) else alias(tensor)
            if taken is None:
                is_whole = False
                continue
            passed = taken
            passed.register_hook(hook)
            views = _views.get()
            base = base_of(passed) if views is not None and is_view(passed) else None
            if views is not None and base is not None:
                views.append(View(passed, version_of(passed), base.grad_fn, hook, tap, event.stamp))
        followed.add(id(tensor))
        own.append(passed)
        if passed is not tensor:
            aliases[id(tensor)] = tensor, passed
    if not followed:
        _say_problem(tap, call.site, named, why.HELD_BY_OTHERS)
        return
    tap.fired = True
    if not (is_whole or tap.action.observes or tap.has_warned or tap.missing == IGNORE):
        tap.has_warned = True
        warn(f"'{call.site}' {why.CHANGED_IN_PART}")


def _private_base_of_call(tensor: Tensor, call: Call) -> Tensor | None:
    if call.site.port != "grad_output" or call.site.member:
        return None
    return _private_base(tensor, call.module, (call.args, dict(call.kwargs)))


def _private_base(tensor: Tensor, layer: nn.Module, passed: Arguments) -> Tensor | None:
    """Return the base of a view that a layer of torch.nn returns, if the layer made the base and nobody else uses it.

    A linear layer returns a view for inputs of three dimensions. The gradient of its base is the same, and reaches the
    base even if the view is written in place later.
    """
    if layer._modules or not _is_of_torch(type(layer).forward):
        return None
    if gradient_hooks(tensor):  # A hook from inside the layer has to run after this one in backward.
        return None
    base = base_of(tensor)
    if base is None or base.is_leaf or base.numel() != tensor.numel():
        return None
    if any([other is base or base_of(other) is base for other in tensors_in(passed)]):
        return None
    return base if base.is_contiguous() and tensor.is_contiguous() else None


@lru_cache(maxsize=256)
def _is_of_torch(forward: Any) -> bool:
    return str(getattr(forward, "__module__", "")).startswith("torch.nn.modules")


def _hook_written(tensor: Tensor, hook: TensorHook, tap: Tap) -> None:
    """Follow a view that a function wrote into, with a hook on its base: the gradient goes there, not to the view."""
    base = base_of(tensor)
    if base is None or not base.is_contiguous():
        raise NeverFired(f"'{tap.site}' {why.OTHER_MEMORY_ORDER}")
    place = tensor.shape, tensor.stride(), tensor.storage_offset() - base.storage_offset()

    def arrived(gradient: Tensor | None) -> Tensor | None:
        if gradient is None:
            return None
        gradient = gradient.contiguous()
        new = hook(gradient.as_strided(*place))
        if new is None:
            return None
        gradient = gradient.clone()
        gradient.as_strided(*place).copy_(new)
        return gradient

    base.register_hook(arrived)


def _reshaped(hook: TensorHook, shape: torch.Size) -> TensorHook:
    def arrived(gradient: Tensor | None) -> Tensor | None:
        new = None if gradient is None else hook(gradient.reshape(shape))
        return None if gradient is None or new is None else new.reshape(gradient.shape)

    return arrived


class Arrival:
    """The gradients of one value of one call. They arrive tensor by tensor, once for each backward pass."""

    def __init__(
        self, tap: Tap, part: Any, subscripts: tuple[Any, ...], rest: tuple[Any, ...], call: Call, event: Event
    ) -> None:
        self.action = tap.action
        self.site = call.site
        self.number = call.number
        self.notes = call.notes
        self.passing = call.passing
        self.model = tap.session.model
        self.module = weakref.ref(call.module)  # A graph that lives longer must not keep the module alive.
        self.tap = weakref.ref(tap)
        # Weak: a gradient that keeps its graph would otherwise keep itself alive, through the hooks of that graph.
        self.record = weakref.ref(tap.record_at(call.site, subscripts)) if tap.record is not None else lambda: None
        self.rest = rest
        self.stamp = event.stamp
        self.task = event.task
        self.passes: dict[int, weakref.ref[Gradient]] = {}
        self.template = map_tensors(lambda _: _SOME_TENSOR, part)
        self.subscripts = subscripts
        self.came: set[tuple[int, int]] = set()

    def hook(self, numbers: list[int]) -> TensorHook:
        """Return the tensor hook for the tensor at these positions in the value."""

        def arrived(gradient: Tensor | None) -> Tensor | None:
            if gradient is None:  # A custom autograd.Function has returned None.
                return None
            try:
                self._refuse_second_part(numbers[0])
                if isinstance(self.action, Save):
                    self._save(self.action, numbers, gradient)
                    return None
                if (tap := self.tap()) is not None:
                    tap.reached = True
                change = self._change(self.action, self._call(numbers[0]))
                new, _ = change_part(gradient, self.rest, change, Exchange(), self.action.gathering, self.site)
                return None if new is gradient else new
            except Exception as error:
                blame(self.site, error)

        return arrived

    def _change(self, action: Action, call: Call) -> Callable[[Tensor, bool], Tensor]:
        """Return the function that lets the action change the gradient of one tensor, or a part of it."""

        def change(part: Tensor, is_whole: bool) -> Any:
            new = action(part, call, is_whole)
            if new is not part and is_whole:
                _check_gradient(new, part)
            return new

        return change

    def _call(self, number: int) -> Call:
        """Return the call for the user's function, without its arguments: they would keep the graph alive."""
        site = self.site
        if "*" in site.index or not isinstance(self.template, Tensor):
            site = site._replace(index=write_subscripts((*self.subscripts, *leaf_places(self.template)[number])))
        module: Any = self.module()
        return Call(site, module, (), {}, self.number, self.notes, self.model(), self.passing)

    def _refuse_second_part(self, number: int) -> None:
        """Raise if an edit or a transform gets the second part of a gradient. Only a plain capture can add the two.

        Torch delivers a gradient in two parts if the value was used and then overwritten in place.
        """
        part = (graph_task(), number)
        if part in self.came and not (self.action.observes and self.action.transform is None):
            raise HooklineError(
                "the gradient comes in two parts, since the value is used and then overwritten in place; it can be "
                "captured whole, without a transform; to change it, hook the module that the value comes from"
            )
        self.came.add(part)

    def _save(self, action: Save, numbers: list[int], gradient: Tensor) -> None:
        record = self.record()
        if record is None:
            return
        kept = action.keep_gradient(gradient, self.rest, lambda: self._call(numbers[0]), self.site)
        if kept is NOTHING:
            if record.value is EMPTY:
                record.explain(why.NOTHING_KEPT)
            return
        task = self.task if self.task is not None else graph_task()
        found = self.passes.get(task)
        so_far = found() if found is not None else None
        if so_far is None:
            so_far, stamp = Gradient(self.template), (task, self.stamp)
            kept = kept if action.budget is None else action.budget.hold(kept, record, stamp)
            self.passes[task] = weakref.ref(so_far)
            record.put(so_far, stamp, task + 1)  # Backwards are numbered from 0, forwards from 1.
        else:
            earlier = so_far.arrived.get(numbers[0])
            if earlier is not None:  # The gradient comes in two parts.
                kept = read_value(earlier, record.site) + read_value(kept, record.site)
            kept = kept if action.budget is None else action.budget.hold_part(kept, record.site, earlier)
        so_far.arrived |= dict.fromkeys(numbers, kept)


def _check_gradient(new: Any, old: Tensor) -> None:
    """Raise if torch would not accept a gradient in place of another."""
    try:
        check_same_structure(new, old)
    except EditError as error:
        raise EditError(f"{error}; a gradient keeps its shape, dtype and device, also with check=False") from None


class Gradient:
    """The gradient of a value, as far as it has arrived: a backward delivers it tensor by tensor."""

    def __init__(self, template: Any) -> None:
        self.template = template
        self.arrived: dict[int, Any] = {}

    def build_gradient(self, read: Callable[[Any], Any]) -> Any:
        """Return the gradient in the structure of the value, with None where none came. `read` reads a stored part."""
        numbers = iter(range(len(leaves(self.template))))
        return map_tensors(lambda _: _plain(read(self.arrived.get(next(numbers)))), self.template)


def _plain(kept: Any) -> Any:
    return kept.peek() if isinstance(kept, StoredValue) else kept


def _rehook_view(view: View) -> None:
    """Hook the gradient of a view again if the view was written in place since.

    Torch records such a write as a CopySlices node of the view's base. The gradient that this node passes on is the
    gradient of the value that was there before the write.
    """
    tensor, base = view.tensor, base_of(view.tensor)
    if version_of(tensor) == view.version or base is None:
        return
    if base.grad_fn is view.before:  # The write bypassed autograd: the view has a new `grad_fn`, without the hook.
        tensor.register_hook(view.hook)
        return
    node = base.grad_fn
    while node is not None and node.next_functions and node.next_functions[0][0] is not view.before:
        node = node.next_functions[0][0]
    alike = base.shape == tensor.shape and base.stride() == tensor.stride()
    whole = alike or (base.numel() == tensor.numel() and base.is_contiguous() and tensor.is_contiguous())
    if node is None or not whole:
        problem = f"'{view.tap.site}' {why.WRITTEN_LATER}"
        if view.tap.missing == RAISE:
            raise NeverFired(problem)
        if view.tap.record is not None and view.tap.record.family is None:
            view.tap.record.explain(problem)
        if view.tap.missing != IGNORE:
            warn(problem)
        return

    hook = _reshaped(view.hook, tensor.shape)

    def arrived(gradients: tuple[Tensor | None, ...], _outer: Any) -> tuple[Tensor | None, ...] | None:
        new = None if gradients[0] is None else hook(gradients[0])
        return None if new is None else (new, *gradients[1:])

    node.register_hook(arrived)


def _say_why_not(tap: Tap, tensors: list[Tensor], site: Site, subscripts: tuple[Any, ...]) -> None:
    """Raise if no gradient can come; if a pattern found the site, warn instead."""
    if not torch.is_grad_enabled() and is_in_reentrant_checkpoint():
        tap.fired = True
        return
    _say_problem(tap, site, subscripts, why.why_no_gradient(tensors, tap.session.model()))


def _say_problem(tap: Tap, site: Site, subscripts: tuple[Any, ...], reason: str) -> None:
    tap.problem, tap.hint = why.no_gradient_problem(reason, stays=tap.active), ""
    problem = f"'{site}' {tap.problem}"
    if tap.missing == RAISE:
        raise NeverFired(problem)
    if tap.record is not None:
        tap.record_at(site, subscripts).explain(problem)
    # The end of the block reports this: as an error if no tap of the pattern fired, else as a warning.
    if tap.missing == TOGETHER and tap.blocks:
        tap.misses += 1
        tap.session.missed = True
        return
    if tap.has_warned or tap.missing == IGNORE:
        return
    tap.has_warned = True
    if reason not in tap.session.warned_of:  # Warn once for all the sites with this reason.
        tap.session.warned_of += (reason,)
        warn(problem)
