"""Check: the action that a watch puts at every place. It looks, and changes nothing.

On the hot path it is given nothing but the value: what else an error tells of the call is looked up when there is one.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from hookline import Site
from hookline._kernel import Call, children, describe, leaf_places, leaves, running, write_subscripts
from hookline._torch import current_transform, graph_task, known_version
from hookline._watch.bad_values import Note, Rule, examine, is_plain, is_suspicious, judged, numbers_in

if TYPE_CHECKING:
    from hookline._watch.watcher import Watcher

_BEGIN = Site("", "inputs")


class Check:
    """Look at what passes one site, and at the gradient of it."""

    kind = "watch"
    observes = True
    gathering = None
    transform = None
    copies_on_write = refers = False  # The hot path leaves it to `keep`.
    clone = True  # It shares nothing with the model.
    is_traceable = True
    # Whether it is at a module of torch's own inside the model. If that returns what was looked at last, it has not
    # written there by `.data` or numpy, which no version tells of. Other modules may have.
    is_torchs = False

    def __init__(self, site: Site, watcher: Watcher, rule: Rule, backward: bool, forward: bool = True) -> None:
        self.site = site
        self.watcher = watcher
        self.rule = rule
        self.backward = backward  # Whether the gradient is looked at too.
        self.forward = forward  # Whether the value is.
        self.is_root = site == Site("")
        self.bounds = True  # Whether the forward of the model begins or ends where its values are looked at.
        self.seen = -1  # The forward of the model that its calls are counted in.
        self.calls = 0
        self.extreme: Tensor | None = None  # Of a compiled graph, where nothing else can be done.

    def __call__(self, value: Any, call: Call | None, _is_whole: bool) -> Any:
        """Look at a value that did not come on the hot path; at the end of the model's forward, see to what waits."""
        if is_dynamo_compiling():
            return self._trace(value)
        assert call is not None
        if call.site.is_gradient:
            self.arrive(call.number, value, call.site)
            return value
        if self.bounds and self.site == _BEGIN:
            self.watcher.begin_forward(call)
        self.keep(value, call)
        if self.bounds and self.is_root:
            self.watcher.end_forward(value)
        return value

    def keep(self, value: Any, call: Call | None = None, _is_new: bool = False) -> None:
        """Look at a value as it passes."""
        watcher = self.watcher
        if self.seen != watcher.forwards:
            self.seen = watcher.forwards
            self.calls = 0
            if not self.seen:
                watcher.begin_part()
        number = self.calls
        self.calls = number + 1
        if not is_plain(value):
            self._look_at_each(value, number, call)
            return
        # What a container returns is mostly what its last module has returned.
        is_latest = value is watcher.latest and known_version(value) == watcher.version != -1
        requires_grad = value.requires_grad
        if self.forward and is_latest and self.is_torchs:
            if watcher.statistics.row is not None:
                watcher.note(self.site if call is None else call.site, value.detach())
        elif self.forward:
            self._look(value.detach() if requires_grad else value, value, number, call)
        if is_latest:
            if self.is_root:
                watcher.last = watcher.latest_at
            return
        watcher.latest, watcher.version, watcher.latest_at = value, known_version(value), (self, number)
        if requires_grad and self.backward and value.grad_fn is not None:
            value.register_hook(partial(self.arrive, number))

    def _look_at_each(self, value: Any, number: int, call: Call | None) -> None:
        """Look at a value that is not one plain tensor."""
        for tensor in [value] if isinstance(value, Tensor) else leaves(value):
            plain = numbers_in(tensor)
            is_latest = tensor is self.watcher.latest and known_version(tensor) == self.watcher.version != -1
            if plain is not None and self.forward and not (is_latest and self.is_torchs):
                self._look(plain, value, number, call)
            if plain is None or is_latest:
                continue
            self.watcher.latest, self.watcher.version = tensor, known_version(tensor)
            self.watcher.latest_at = self, number
            if tensor.requires_grad and self.backward and tensor.grad_fn is not None:
                tensor.register_hook(partial(self.arrive, number))

    def _look(self, plain: Tensor, value: Any, number: int, call: Call | None) -> None:
        """Look at plain numbers now, or note on their device what is to be read later."""
        watcher = self.watcher
        if watcher.statistics.row is not None and (call is None or call.site.port == "output"):
            if current_transform() is None:
                watcher.note(self.site if call is None else call.site, plain)
            else:
                watcher.pass_over(self.site)
        if watcher.waits(plain):
            site = self.site if call is None else call.site
            note = Note(site, number, self.rule, False, describe(plain))
            if watcher.flags.add(plain, note):
                watcher.check()
            return
        try:
            is_fine = not is_suspicious(plain, self.rule.limit)
        except RuntimeError:
            if current_transform() is None:
                raise
            watcher.pass_over(self.site)
            return
        if is_fine:
            return
        finding = examine(plain, self.rule)
        if finding is None:
            return
        watcher.check_graphs()  # What a compiled module has noted came before.
        calls = running()
        call = call or calls[0]
        site = call.site._replace(index=call.site.index + _index(value, plain))
        raise watcher.blame(site, finding, value, call._replace(number=number), calls)

    def arrive(self, number: int, gradient: Tensor | None, site: Site | None = None) -> None:
        """Look at a gradient as it arrives."""
        watcher = self.watcher
        if watcher.is_over or gradient is None:
            return
        if graph_task() != watcher.task:
            watcher.begin_backward(graph_task())
        plain = gradient if is_plain(gradient) and not gradient.requires_grad else numbers_in(gradient)
        if plain is None:
            return
        if watcher.waits(plain):
            site = site or self.site._replace(port="grad_output")
            if watcher.flags.add(plain, Note(site, number, self.rule, True, describe(plain))):
                watcher.check()
            return
        try:
            is_fine = not is_suspicious(plain, self.rule.limit)
        except RuntimeError:
            if current_transform() is None:
                raise
            watcher.pass_over(self.site)
            return
        if not is_fine:
            self._judge_gradient(plain, gradient, number, site or self.site._replace(port="grad_output"))
        watcher.arrived = (self, number)

    def _judge_gradient(self, plain: Tensor, gradient: Tensor, number: int, site: Site) -> None:
        watcher = self.watcher
        scale = watcher.scale()
        finding = examine(plain / scale if scale != 1 else plain, self.rule)
        if finding is not None and not watcher.is_lowering(scale):
            raise watcher.blame_gradient(site, finding, gradient, number)

    def _trace(self, value: Any) -> Any:
        """Note the largest element inside a compiled graph, which makes it one more output of that."""
        found: list[Tensor] = []
        for tensor in _traced(value):
            if tensor.is_floating_point() and tensor.numel():
                plain = judged(tensor.detach(), self.rule)
                largest = plain.abs().amax() if self.rule.below else plain.amax()  # They fuse with what made it.
                found.append(largest.to(torch.float32))
        if self.forward and found:
            self.extreme = torch.stack([one.to(found[0].device) for one in found])
        return value

    def __repr__(self) -> str:
        return "watch"


def _traced(value: Any) -> list[Tensor]:
    """Return the tensors of a value inside a graph: `leaves` asks for ids, which breaks it in torch 2.11."""
    if isinstance(value, Tensor):
        return [value]
    parts = value if isinstance(value, (tuple, list)) else (children(value) or {}).values()
    return [tensor for part in parts for tensor in _traced(part)]


def _index(value: Any, plain: Tensor) -> str:
    """Return which tensor of a value these numbers are of, as a subscript; nothing if the value is one."""
    if isinstance(value, Tensor) or current_transform() is not None:  # Inside a transform nothing has an address.
        return ""
    for subscripts, tensor in zip(leaf_places(value), leaves(value), strict=True):
        found = numbers_in(tensor)
        if found is not None and found.data_ptr() == plain.data_ptr() and found.shape == plain.shape:
            return write_subscripts(subscripts)
    return ""
