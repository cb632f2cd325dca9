"""Captures: the options of `capture`, and `Save`, which keeps passing values according to them.

How a tensor is copied is decided in `_values/copy_or_share.py`. `hot_path` in shadowed_forward.py does the usual case
of `Save.keep` inline: a plain tensor on the CPU that nobody else holds. That saves a call for each captured module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hookline._cache.budget import Budget
from hookline._cache.record import Guarded, Source
from hookline._engine import offload
from hookline._engine.action import NOTHING, Call, OutputObserver, ask
from hookline._engine.parameter_operations import Operand, plain
from hookline._engine.unsupported_tracing import refuse_tangent, refuse_tracers, refuse_transforms
from hookline._sites.language import Site
from hookline._torch import (
    current_transform,
    has_cuda_graphs,
    lazy_clone,
    may_be_of_cuda_graph,
    raw_stream,
    version_of,
)
from hookline._values.copy_or_share import (
    copy_captured,
    copy_tensor,
    is_parameter,
    may_move,
    share_detached,
    share_tensor,
    versions,
)
from hookline._values.nested import get_part, leaves, map_tensors
from hookline.errors import EditError, HooklineError
from hookline.parallel.gather import Gathering, arrived, share_part
from hookline.parallel.ranks import is_cut


class CaptureOptions(NamedTuple):
    """The options of a capture. `Hooks.capture` says what each one means, and has the same defaults."""

    detach: bool = True
    clone: bool | None = None
    device: torch.device | str | None = None
    dtype: torch.dtype | None = None
    transform: Callable[..., Any] | None = None
    with_call: bool = False

    @property
    def offloads(self) -> bool:
        """Whether values on a GPU are copied to the host while the model keeps running."""
        return self.detach and self.device is not None and torch.device(self.device).type == "cpu"

    def __repr__(self) -> str:
        options = zip(self._fields, self, USUAL, strict=True)
        return ", ".join([f"{name}={value}" for name, value, usual in options if value != usual])


USUAL = CaptureOptions()


class Save(OutputObserver):
    """Keep the values that pass. The model continues with its own."""

    kind = "capture"

    def __init__(
        self, options: CaptureOptions = USUAL, budget: Budget | None = None, gathering: Gathering | None = None
    ) -> None:
        detach, clone, device, dtype, transform, with_call = options
        self.options = options
        self.clone = clone
        self.transform = transform
        self.with_call = with_call
        self.budget = budget
        self.gathering = gathering
        self.is_plain = transform is None and budget is None  # Whether the record holds every value as it passed.
        # With detach=False the graph's own tensor is kept. A loss does not depend on a copy: autograd.grad would fail.
        self.keeps_own = not detach and clone is not True
        self.is_quick = detach and clone is not True and (device, dtype, transform) == (None, None, None)
        self.offloads = device is not None and options.offloads
        stays = detach and (device is None or self.offloads)  # Whether a tensor on the CPU stays there.
        self._is_usual = stays and (clone, dtype, transform) == (None, None, None)
        self._choose_path()

    def _choose_path(self) -> None:
        """Work out whether the hot path may be used: only if no value is sharded over ranks."""
        is_alone = self.gathering is None or self.gathering.is_alone
        self.copies_on_write = self._is_usual and is_alone
        self.copies_on_device = self._is_usual and self.options.device is None and is_alone
        self.refers = self.is_quick and self.clone is False and is_alone
        self.is_traceable = self.options.detach and (self.gathering is None or not self.gathering.alike)

    def gathered(self, value: Any, site: Site) -> Any:
        """Return the whole value, gathered from all ranks if it is sharded."""
        if self.gathering is None:
            return value
        found = self.gathering.whole(value, site)
        self._choose_path()
        if self.keeps_own and found is not value:
            raise HooklineError("detach=False gives the graph's own tensor, which is sharded here; add gather=False")
        return found

    def keep(self, value: Any, call: Call | None = None, is_new: bool = False) -> Any:
        """Return what to keep of a whole value.

        Args:
            is_new: Whether the forward is known to have made the value, and nobody else holds it.
        """
        if is_new and self.copies_on_write and type(value) is Tensor and not value.is_quantized:
            if value.is_cpu and not value.is_inference():
                return lazy_clone(value.detach() if value.requires_grad else value)
            copied = copy_new_on_cuda(value) if self.copies_on_device and value.is_cuda else None
            if copied is not None:
                return copied
        if not self.is_quick or type(value) is not Tensor:
            sends = self.offloads and self.transform is None and type(value) is Tensor and value.is_cuda
            sent = offload.send(value.detach(), self.options.dtype) if sends else None
            return self.keep_part(value, False, call) if sent is None else sent
        # `may_move` is asked before `detach` makes a second tensor with this memory.
        moves = is_new or (self.clone is None and may_move(value))
        source = value.detach()  # Even without a graph: an autograd.Function attaches its output later.
        try:
            version = version_of(source)
        except RuntimeError:  # Torch counts no writes in inference mode.
            return self.keep_part(value, False, call)
        if self.clone is False:
            return Guarded(source, [(source, version, None)])
        if value.is_quantized or current_transform() is not None:
            return self.keep_part(value, False, call)
        kept, is_shared = copy_captured(source, value, moves)
        return Guarded(kept, [(source, version, kept)]) if is_shared else kept

    def keep_part(self, value: Any, is_part: bool, call: Call | None = None) -> Any:
        """Return what to keep of any value. A part of a tensor is copied: a view would keep the whole tensor alive."""
        refuse_tracers(value)
        refuse_transforms(value)
        if self.transform is not None:
            value = self._transformed(value, call)
            if value is None:
                return NOTHING
        sources: list[Source] = []
        sent: dict[int, offload.Copy] = {}
        for tensor in leaves(value) if not self.options.detach else ():
            refuse_tangent(tensor)
        try:
            kept = map_tensors(lambda tensor: self._keep_tensor(tensor, is_part, sources, sent), value)
        except HooklineError:
            if not self.keeps_own:
                raise
            # The value can't be copied. Keep the model's own, which detach=False asks for.
            return Guarded(value, [(one, version_of(one), None) for one in leaves(value) if not one.is_inference()])
        if sources and self.keeps_own and self.clone is not False:
            return Guarded(kept, sources, {id(own): _spare(own) for own, _, _ in sources if not is_parameter(own)})
        return offload.together(Guarded(kept, sources) if sources else kept, sent)

    def keep_gradient(self, gradient: Tensor, subscripts: tuple[Any, ...], call: Callable[[], Call], site: Site) -> Any:
        """Return what to keep of the part of a gradient at these subscripts."""
        if self.copies_on_device and type(gradient) is Tensor and not subscripts and current_transform() is None:
            return copy_tensor(gradient.detach())
        part = get_part(self.gathered(gradient, site), subscripts)
        # On CUDA torch's foreach functions clip gradients in place, and no version counter shows it: copy them now.
        copies = bool(subscripts) or (part.is_cuda and self.clone is not False and not self.keeps_own)
        if copies or self.transform is not None:
            return self.keep_part(part, copies, call() if self.transform is not None else None)
        return self.keep(part)

    def _transformed(self, value: Any, call: Call | None) -> Any:
        """Run the user's transform on the value. It must not change the model's tensors or its random numbers."""
        value = plain(value)
        # Torch counts no writes into inference tensors, so the transform never gets the model's own.
        if not self.keeps_own or any(tensor.is_inference() for tensor in leaves(value)):
            value = map_tensors(share_detached if self.options.detach else share_tensor, value)
        devices = sorted({tensor.device.index for tensor in leaves(value) if tensor.is_cuda})
        forked = torch.random.fork_rng(devices) if devices else _kept_random_state()  # `fork_rng` takes 5 µs.
        before = versions(value) if self.keeps_own else None
        with forked:
            kept = ask(self.transform, self.with_call, value, call)
        if self.keeps_own and versions(value) != before:
            raise EditError("the transform wrote into the model's own value, which it gets with detach=False; copy it")
        return kept

    def _keep_tensor(
        self, tensor: Tensor, is_part: bool, sources: list[Source], sent: dict[int, offload.Copy]
    ) -> Tensor:
        """Return what to keep of one tensor. If its version has to be checked on reading, it is added to `sources`."""
        tensor = tensor.plain if isinstance(tensor, Operand) else tensor
        moves = self.clone is None and not is_part and not self.keeps_own and may_move(tensor)
        source = tensor.detach() if self.options.detach else tensor
        device, dtype = self.options.device, self.options.dtype
        if type(source) is not Tensor and not self.keeps_own:
            if is_cut(source):
                return share_part(source, device, dtype)
            source = arrived(source)
        if self.offloads and source.is_cuda and (copy := offload.send(source, dtype)) is not None:
            stand_in = torch.empty(0, device="cpu")
            sent[id(stand_in)] = copy
            return stand_in
        if source.is_quantized and dtype is not None:
            source = source.dequantize()
        if device is not None or dtype is not None:
            with torch.inference_mode(False) if tensor.is_inference() else nullcontext():
                moved = source.to(device, dtype or source.dtype)
            if moved is not source:
                return moved
        if tensor.is_inference():
            if self.clone is False and self.options.detach:
                raise HooklineError(
                    "clone=False can't tell in inference mode whether a value is overwritten; use clone=None"
                )
            with torch.inference_mode(False):  # Autograd can use only a copy made outside inference mode.
                return copy_tensor(source) if self.clone or is_part else share_tensor(source, moves)
        if (self.keeps_own or self.clone is False) and not is_part:
            sources.append((source, version_of(source), None))
            return source
        if self.clone or is_part:
            return copy_tensor(source)
        kept, is_shared = copy_captured(source, tensor, moves)
        if is_shared:
            sources.append((source, version_of(source), kept))
        return kept

    def __repr__(self) -> str:
        return f"save({', '.join(filter(None, [repr(self.options), repr(self.budget) if self.budget else '']))})"


USUAL_SAVE = Save()  # For captures without options. It keeps no state, so they can share it.


def copy_new_on_cuda(tensor: Tensor) -> Guarded | None:
    """Copy a tensor on write that a module has just made on a GPU; None if it has to be done in another way.

    This is the usual case of `copy_captured`: a GPU that waits for Python waits for each step of this.
    """
    if (
        raw_stream(tensor.get_device()) != 0
        or tensor.is_inference()
        or (has_cuda_graphs() and may_be_of_cuda_graph(tensor))
    ):
        return None
    source = tensor.detach()
    try:
        kept = lazy_clone(source)
    except RuntimeError:  # Memory that torch can't copy on write.
        return None
    return Guarded(kept, [(source, version_of(source), kept)])


@contextmanager
def _kept_random_state() -> Iterator[None]:
    state = torch.default_generator.get_state()
    try:
        yield
    finally:
        torch.default_generator.set_state(state)


def _spare(own: Tensor) -> Guarded:
    """Return a copy-on-write clone of a tensor of the graph, in case the model overwrites the tensor."""
    kept, is_shared = copy_captured(own, own, may_move(own))
    return Guarded(kept, [(own, version_of(own), kept)] if is_shared else [])
