"""Where the memory of a tensor comes from: the forward that runs now made it, or it came in from outside.

A tensor that is copied on write moves to other memory when somebody writes into it. That is safe for memory that this
forward made: nobody else knows its address. A numpy array, DLPack, ctypes or a CUDA graph may hold the address of
anything older, and would go on with memory that is freed, or that a captured value still needs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar, Token
from sys import getrefcount
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from hookline.references import references_in_call
from hookline.values import ATOMS, attributes_of, held_by

_is_cow: Callable[[Tensor], bool] = getattr(torch._C, "_is_cow_tensor", lambda _: False)
_count_uses: Callable[[Tensor], int] = getattr(Tensor, "_use_count", lambda _: 1)
_saving_hooks: Callable[[bool], object] = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", bool)
count_holders: Callable[[int], int] = getattr(torch._C, "_storage_Use_Count", lambda _: 0)  # Since torch 2.1.


class RunningForward:
    """A forward of a model that runs now: what it was given, and what the model holds."""

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.model = model
        self.given = args, kwargs
        self.outer = running.get()
        self._outside: set[int] | None = None

    def made(self, tensor: Tensor) -> bool:
        """Return True if neither an argument nor the model has the memory of a tensor, nor anybody an array of it."""
        memory = memory_of(tensor)
        if memory == 0 or tensor.nbytes < _SMALL or is_parameter(tensor):  # A copy is cheaper than looking closer.
            return False
        is_given_away = not tensor.requires_grad and _count_uses(tensor) > 1  # As DLPack does, and autograd.
        if is_given_away or not _is_alone_in_memory(tensor):
            return False
        if self._outside is None:
            self._outside = _memory_of_all(self.model, self.given)
        is_new = memory not in self._outside and _TOO_MUCH not in self._outside
        return is_new and (self.outer is None or self.outer.made(tensor))


running: ContextVar[RunningForward | None] = ContextVar("running", default=None)


def begin(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Token[RunningForward | None]:
    """Note that a forward of a model begins here; `running.reset` ends it."""
    return running.set(RunningForward(model, args, kwargs))


def may_move(tensor: Tensor) -> bool:
    """Return True if a tensor may move to other memory when somebody writes: nobody outside torch has its address.

    What is copied on write already has given its address to nobody: torch copies it before it gives it away.
    """
    if is_copied_on_write(tensor):
        return True
    run = running.get()
    return run is not None and run.made(tensor)


def is_copied_on_write(tensor: Tensor) -> bool:
    """Return True if torch copies a tensor's memory when somebody writes into it."""
    try:
        return _is_cow(tensor)
    except (NotImplementedError, RuntimeError):  # Sparse, nested, inside vmap.
        return False


def is_private(tensor: Tensor) -> bool:
    """Return True if nobody but the caller's one variable holds a tensor and its memory. Never true without proof."""
    if getrefcount(tensor) != references_in_call() or not is_result(tensor):
        return False
    return tensor.untyped_storage().resizable()  # Memory that an array or a buffer owns is not.


def is_result(tensor: Tensor) -> bool:
    """Return True if torch has just made the memory of a tensor, given that one variable alone holds the tensor."""
    if not _is_alone_in_memory(tensor):
        return False
    base = None if tensor.is_inference() else tensor._base
    return base is None or getrefcount(base) == _ALONE_AS_BASE


def _is_alone_in_memory(tensor: Tensor) -> bool:
    """Return True if no other tensor has the memory of this one, but for its base and what autograd keeps of it.

    An array of numpy holds a tensor of its own.
    """
    try:
        others = count_holders(tensor.untyped_storage()._cdata) - ALONE_IN_MEMORY
    except (NotImplementedError, RuntimeError):  # Sparse, nested.
        return False
    if others != 1 or tensor.is_inference():
        return others == 0
    if tensor._is_view():  # A linear layer, for one, returns a view of what nobody else holds.
        return True
    # Asked of the class: to ask the node itself would unpack what it saved. Hooks that pack keep something else.
    made_by: Any = type(tensor.grad_fn)
    if tensor._version != 0 or issubclass(made_by, BackwardCFunction) or _saving_hooks(True) is not None:
        return False
    return hasattr(made_by, "_saved_result") or hasattr(made_by, "_saved_output")


def is_parameter(tensor: Tensor) -> bool:
    """Whether a tensor is a parameter, or a view of one.

    CUDA graphs and FSDP hold the address of their memory.
    """
    root: Tensor | None = tensor
    if tensor._is_view() and not tensor.is_inference():
        root = tensor._base
    if type(root) is Tensor:  # Else torch asks the tensor for an attribute, which takes longer than all the rest.
        return root.requires_grad and root.is_leaf
    return isinstance(root, nn.Parameter) or (root is not None and root.requires_grad and root.is_leaf)


def memory_of(tensor: Tensor) -> int:
    """Return what identifies a tensor's memory, the same for all its views; 0 if there is no such thing."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # Sparse, nested, a subclass that wraps others.
        return 0


def _memory_of_all(model: nn.Module, given: Any) -> set[int]:
    """Return the memory of every tensor that a forward was given, or that the modules hold in any attribute."""
    found: set[int] = set()
    seen: set[int] = set()
    waiting: list[Any] = [given]
    for module in model.modules():
        waiting += [*module.__dict__["_parameters"].values(), *module.__dict__["_buffers"].values()]
        waiting += attributes_of(module)
    while waiting:
        one = waiting.pop()
        if isinstance(one, Tensor):
            found.add(memory_of(one))
        elif not isinstance(one, (nn.Module, *ATOMS)) and id(one) not in seen:
            seen.add(id(one))
            parts = held_by(one) or {}
            if len(seen) + len(parts) > _MOST_OBJECTS:  # A vocabulary, say. Then nothing is known, and all is copied.
                return {_TOO_MUCH}
            waiting += parts.values()
    return found


def _calibrate() -> tuple[int, int, int]:
    """Count the references to a tensor that one variable holds, and to the base of a view, as they are counted here."""
    tensor = torch.empty(1, device="cpu")
    if type(tensor) is not Tensor:  # Imported under a mode that makes tensors of its own: then nothing is proved.
        return -1, -1, -1
    view = torch.empty(1, device="cpu").view(1)
    base = view._base
    holders = count_holders(tensor.untyped_storage()._cdata)
    found = getrefcount(tensor), getrefcount(base), holders
    capsule = torch._C._to_dlpack(tensor)
    is_seen = getrefcount(tensor) > found[0] or count_holders(tensor.untyped_storage()._cdata) > holders
    del capsule
    return found if is_seen and holders else (-1, -1, -1)


ALONE, _ALONE_AS_BASE, ALONE_IN_MEMORY = _calibrate()
_SMALL = 1 << 20  # Bytes.
_MOST_OBJECTS = 20_000
_TOO_MUCH = -1  # Among memory: there is more than was looked at.
