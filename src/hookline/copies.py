"""Copies of tensors: on write where torch does that right, else now.

`torch._lazy_clone` shares the memory of a tensor until somebody writes, and then the writer gets the copy. It is not a
public function: where there is none, everything is copied at once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import peek_interpreter_stack

from hookline.origins import is_copied_on_write, is_parameter, may_move
from hookline.values import children, leaves, map_tensors, members

lazy_clone: Callable[[Tensor], Tensor] = getattr(torch, "_lazy_clone", torch.clone)


def share(value: Any, objects: bool = False) -> Any:
    """Return `value` with every tensor copied on write, and with `objects` also those that hold no tensor."""
    return map_tensors(share_tensor, value, _in_object=objects)


def copy_all(value: Any) -> Any:
    """Return `value` with every tensor copied now: what a user gives may be written to at any time."""
    return map_tensors(copy_tensor, value)


def share_tensor(tensor: Tensor, moves: bool | None = None) -> Tensor:
    """Copy a tensor on write where that is right, else now. Autograd flows through.

    Args:
        moves: Whether its memory may move, if the caller knows: a tensor that was detached from it holds it too.
    """
    if torch.compiler.is_dynamo_compiling():
        return tensor.clone()  # Dynamo can't trace a lazy clone, and a real one fuses.
    moves = tensor.is_cpu and (may_move(tensor) if moves is None else moves)
    return share_for_now(tensor) if moves else copy_tensor(tensor)


def share_detached(tensor: Tensor) -> Tensor:
    """The same, detached from the graph."""
    moves = not torch.compiler.is_dynamo_compiling() and may_move(tensor)
    return share_tensor(tensor.detach(), moves)


def share_for_now(tensor: Tensor) -> Tensor:
    """Copy a tensor on write, wherever its memory comes from: it is hookline's own, or the copy is gone after a run."""
    # On CUDA torch makes the late copy on the default stream, and its foreach functions make none: see Save.
    if not tensor.is_cpu or tensor.is_quantized or peek_interpreter_stack() is not None or is_parameter(tensor):
        return copy_tensor(tensor)
    if not tensor.numel():  # As an `out=` it may be given memory, which fails where an empty one is shared.
        return copy_tensor(tensor)
    return share_on_any_device(tensor)


def share_on_any_device(tensor: Tensor) -> Tensor:
    """Copy a tensor on write wherever torch can; the caller knows that it is right there."""
    try:
        return lazy_clone(tensor)
    except RuntimeError:  # Sparse, nested, shared-memory and numpy-owned tensors.
        return copy_tensor(tensor)


def copy_tensor(tensor: Tensor) -> Tensor:
    """Copy a tensor now; dimensions of stride 0 stay expanded."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.numel() == 0 or tensor.is_quantized:
        return tensor.clone()
    if peek_interpreter_stack() is not None or 0 not in tensor.stride():
        return tensor.clone()
    return unexpanded(tensor).clone().expand(tensor.shape)


def unexpanded(tensor: Tensor) -> Tensor:
    """Return what a tensor is expanded from: its dimensions of stride 0 have the size 1, and all there is, is there."""
    if 0 not in tensor.stride():
        return tensor
    return tensor[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())]


def is_replayed_over(tensor: Tensor) -> bool:
    """Whether a CUDA graph of torch.compile made this tensor, and its memory has been given to another run since.

    Torch raises when one reads such a tensor while graphs are being recorded, and says nothing when they are replayed.
    """
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is None or not tensor.is_cuda:
        return False
    try:
        manager = trees.get_manager(tensor.get_device(), create_if_none_exists=False)
        memory = tensor.untyped_storage()._cdata
    except (AssertionError, RuntimeError):  # Another thread has the graphs; torch knows of it.
        return False
    if manager is None or torch._C._has_Standard_Deleter(memory):
        return False
    latest = manager.current_node  # What ran last, and what ran before it in the same forward.
    return latest is None or memory not in [held() for held in latest.path_live_weakrefs()]


def address(tensor: Tensor) -> int:
    """Return where a tensor's memory is, without making a copy-on-write tensor copy itself, as data_ptr() would."""
    try:
        return int(torch._C._data_address(tensor))  # type: ignore[attr-defined]
    except RuntimeError:  # No memory of its own: sparse, nested, a subclass that wraps others.
        return 0


def versions(value: Any) -> list[Any]:
    """Return what changes when somebody writes into the tensors of a value."""
    return [0 if tensor.is_inference() else tensor._version for tensor in leaves(value)]


def state_of(value: Any, _inside: tuple[int, ...] = ()) -> Any:
    """Return what changes when somebody writes into a value: its parts, and its tensors' versions."""
    if isinstance(value, Tensor):
        return id(value), 0 if value.is_inference() else value._version, value.requires_grad
    parts = children(value)
    if parts is None:
        parts = members(value)
    if parts is None or id(value) in _inside:
        return id(value)
    inside = (*_inside, id(value))
    return [(key, state_of(part, inside)) for key, part in parts.items()]


class Loan:
    """A value lent to a user's function: copies of its tensors, of which it can be told whether the function wrote."""

    def __init__(self, value: Any) -> None:
        self._copies: dict[int, tuple[Tensor, Tensor, Any]] = {}  # A copy, what it is a copy of, and its state.
        self.given = self._lend(value) if isinstance(value, Tensor) else map_tensors(self._lend, value, _in_object=True)
        self._before = state_of(self.given)

    def _lend(self, tensor: Tensor) -> Tensor:
        copy = share_tensor(tensor)
        self._copies[id(copy)] = copy, tensor, state_of(copy)
        return copy

    def is_written(self) -> bool:
        """Return True if the function is known to have written into what it was given."""
        if state_of(self.given) != self._before:
            return True
        return any([copy.is_cpu and not _is_untouched(copy, own) for copy, own, _ in self._copies.values()])

    def take_back(self, tensor: Tensor) -> Tensor:
        """Return what passes on for a tensor of the function's result: what it left alone is the model's own again."""
        copy, own, before = self._copies.get(id(tensor), (None, None, None))
        if copy is None or own is None:  # What the user holds is not the model's to overwrite.
            return share_for_now(tensor) if is_copied_on_write(tensor) else copy_tensor(tensor)
        return own if state_of(copy) == before and _is_untouched(copy, own) else copy


def _is_untouched(copy: Tensor, own: Tensor) -> bool:
    """Return True if a copy is certain to be as it was lent: a write through `.data` or numpy moves no version.

    It moves copy-on-write memory. Reading through numpy does so too, and what was copied at once was never there.
    """
    if not own.is_cpu:
        return False
    if address(copy) == address(own) != 0:
        return True
    is_odd = (
        own.is_quantized or own.layout is not torch.strided or own.is_nested or peek_interpreter_stack() is not None
    )
    if is_odd or type(own) not in (Tensor, nn.Parameter):
        return True  # Its memory can't be written to past torch's own functions.
    return torch.equal(copy, own) or torch.equal(copy.nan_to_num(), own.nan_to_num())


def alias_of(tensor: Tensor) -> Tensor:
    """Return a view of a whole tensor. Unlike `view_as` it keeps the stride of a dimension of size 1.

    By that stride torch chooses between kernels, whose results differ in the last bits.
    """
    return tensor.view_as(tensor) if tensor.is_nested else tensor[...]  # Nested tensors know the first alone.


class Alias(torch.autograd.Function):
    """An alias of a tensor that is not a view of it: it keeps its hooks when somebody writes into it."""

    generate_vmap_rule = True

    @staticmethod
    def forward(tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:
        return gradient

    @staticmethod
    def jvp(_ctx: Any, tangent: Tensor) -> Tensor:
        return tangent
