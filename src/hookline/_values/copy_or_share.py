"""Which tensors are copied, when and how: on write where torch does that right, else now.

The caller says what the copy is for:

copy_captured       a value that a capture keeps
share, share_tensor a value that somebody else may write into: what a transform is given, a skipped module's output
share_detached      the same, cut off the graph
share_for_now       a value that is hookline's own, or a copy that ends with this run
Loan                a value that a user's function is given, and may return
copy_all            a value that a user has given, and may write into at any time
copy_tensor         a value that is certain to be overwritten, or a part that would hold the whole

`lazy_clone` shares the memory of a tensor until somebody writes, and then the writer gets the copy. It is not a public
function of torch: where there is none, everything is copied at once.

No other file decides whether a value that passes is copied. Two copy by themselves: `hot_path` in shadowed_forward.py
does the usual case of `copy_captured`, which saves a call for each module, and compiled.py clones, since dynamo can't
trace a lazy clone. A plain `clone()` elsewhere decides nothing: it makes memory to write into, or frees a larger one.
"""

from __future__ import annotations

from contextvars import ContextVar
from sys import getrefcount
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from hookline._torch import (
    base_of,
    count_holders,
    count_uses,
    current_transform,
    is_lazy_clone,
    is_view,
    known_version,
    lazy_clone,
    may_be_of_cuda_graph,
    raw_stream,
    saves_its_output,
    saving_hooks,
    storage_address,
    storage_id,
    to_dlpack,
    version_of,
)
from hookline._values.nested import ATOMS, attributes_of, held_by, leaves, map_tensors, parts_of
from hookline.errors import HooklineError


def references_in_call() -> int:
    """Return the refcount that a callee sees for an object which one local variable of its caller holds.

    It is measured every time: after dynamo has compiled something, Python may hold arguments once more.
    """
    held: list[Any] = []
    return _count(held)


def _count(value: Any) -> int:
    return getrefcount(value)


class RunningForward:
    """A forward of a model that runs now: what it was given, and what the model holds."""

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.model = model
        self.given = args, kwargs
        self.outer = current_forward.get()
        self._outside: set[int] | None = None

    def made(self, tensor: Tensor) -> bool:
        """Return True if this forward allocated a tensor: no argument, attribute or numpy array has its memory."""
        memory = memory_of(tensor)
        if memory == 0 or tensor.nbytes < _SMALL or is_parameter(tensor):  # Copying is cheaper than checking further.
            return False
        is_given_away = not tensor.requires_grad and count_uses(tensor) > 1  # As DLPack does, and autograd.
        if is_given_away or not _is_alone_in_memory(tensor):
            return False
        if self._outside is None:
            self._outside = _memory_of_all(self.model, self.given)
        is_new = memory not in self._outside and _TOO_MUCH not in self._outside
        return is_new and (self.outer is None or self.outer.made(tensor))


current_forward: ContextVar[RunningForward | None] = ContextVar("current_forward", default=None)


def may_move(tensor: Tensor) -> bool:
    """Return True if a later write may move the tensor to new memory, because only torch knows its address.

    That is always so for a copy-on-write tensor: torch copies it before it gives its address away.
    """
    if is_copied_on_write(tensor):
        return True
    run = current_forward.get()
    return run is not None and run.made(tensor)


def is_copied_on_write(tensor: Tensor) -> bool:
    """Return True if torch copies a tensor's memory when somebody writes into it."""
    try:
        return is_lazy_clone(tensor)
    except (NotImplementedError, RuntimeError):  # Sparse, nested, inside vmap.
        return False


def is_private(tensor: Tensor) -> bool:
    """Return True if nobody but the caller's one variable holds a tensor and its memory. Never true without proof."""
    if getrefcount(tensor) != references_in_call() or not is_result(tensor):
        return False
    return tensor.untyped_storage().resizable()  # Memory that an array or a buffer owns is not.


def is_result(tensor: Tensor) -> bool:
    """Return True if nothing else uses the tensor's memory. The caller has checked that one variable holds it."""
    if not _is_alone_in_memory(tensor):
        return False
    base = None if tensor.is_inference() else base_of(tensor)
    return base is None or getrefcount(base) == _ALONE_AS_BASE


def _is_alone_in_memory(tensor: Tensor) -> bool:
    """Return True if no other tensor has the memory of this one, but for its base and what autograd keeps of it.

    An array of numpy holds a tensor of its own.
    """
    try:
        others = count_holders(storage_id(tensor.untyped_storage())) - ALONE_IN_MEMORY
    except (NotImplementedError, RuntimeError):  # Sparse, nested.
        return False
    if others != 1 or tensor.is_inference():
        return others == 0
    if is_view(tensor):  # A linear layer, for one, returns a view of what nobody else holds.
        return True
    # `saved_tensors_hooks` may store something other than the tensor.
    made_by: Any = type(tensor.grad_fn)
    if version_of(tensor) != 0 or issubclass(made_by, BackwardCFunction) or saving_hooks(True) is not None:
        return False
    return saves_its_output(made_by)


def is_parameter(tensor: Tensor) -> bool:
    """Return True if a tensor is a parameter, or a view of one.

    CUDA graphs and FSDP hold the address of their memory.
    """
    root: Tensor | None = tensor
    if is_view(tensor) and not tensor.is_inference():
        root = base_of(tensor)
    if type(root) is Tensor:  # Else torch asks the tensor for an attribute, which takes longer than all the rest.
        return root.requires_grad and root.is_leaf
    return isinstance(root, nn.Parameter) or (root is not None and root.requires_grad and root.is_leaf)


def memory_of(tensor: Tensor) -> int:
    """Return what identifies a tensor's memory, the same for all its views; 0 if there is no such thing."""
    try:
        return storage_id(tensor.untyped_storage())
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
    base = base_of(view)
    holders = count_holders(storage_id(tensor.untyped_storage()))
    found = getrefcount(tensor), getrefcount(base), holders
    capsule = to_dlpack(tensor)
    is_seen = getrefcount(tensor) > found[0] or count_holders(storage_id(tensor.untyped_storage())) > holders
    del capsule
    return found if is_seen and holders else (-1, -1, -1)


ALONE, _ALONE_AS_BASE, ALONE_IN_MEMORY = _calibrate()
_SMALL = 1 << 20  # Bytes.
_MOST_OBJECTS = 20_000
_TOO_MUCH = -1  # Among memory: there is more than was looked at.


def share(value: Any, objects: bool = False) -> Any:
    """Return `value` with every tensor copied on write, and with `objects` also those that hold no tensor."""
    return map_tensors(share_tensor, value, in_objects=objects)


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
    """Copy a tensor on write, detached from the graph."""
    moves = not torch.compiler.is_dynamo_compiling() and may_move(tensor)
    return share_tensor(tensor.detach(), moves)


def share_for_now(tensor: Tensor) -> Tensor:
    """Copy a tensor on write without asking `may_move`: for hookline's own memory, or a copy for this run."""
    # On CUDA torch makes the late copy on the default stream, and its foreach functions make none: see `copy_captured`.
    if not tensor.is_cpu or tensor.is_quantized or current_transform() is not None or is_parameter(tensor):
        return copy_tensor(tensor)
    if not tensor.numel():  # As an `out=` it may be given memory, which fails where an empty one is shared.
        return copy_tensor(tensor)
    return _lazy_copy(tensor)


def copy_captured(source: Tensor, tensor: Tensor, moves: bool) -> tuple[Tensor, bool]:
    """Copy a captured tensor, on write where that is right, also on CUDA.

    Also return whether reading the copy has to check the version of `source`: on CUDA torch's foreach functions write
    through a copy on write.

    Args:
        source: The tensor, detached unless its graph is kept.
        tensor: The tensor that passed.
        moves: Whether its memory may move: see `may_move`.
    """
    if source.is_cuda:
        is_shared = _may_share_on_cuda(tensor) and moves  # The first refuses what a CUDA graph records.
        return (_lazy_copy(source) if is_shared else copy_tensor(source)), is_shared
    return (copy_tensor(source) if is_parameter(tensor) else share_tensor(source, moves)), False


def _may_share_on_cuda(tensor: Tensor) -> bool:
    """Return True if torch copies this CUDA tensor right when somebody writes."""
    if raw_stream(tensor.get_device()) != 0:  # The late copy is made on the default stream, unordered with others.
        refuse_recording()
        return False
    if is_parameter(tensor):  # Fused optimizers write into parameters unseen.
        return False
    return not may_be_of_cuda_graph(tensor)  # The memory of compiled CUDA graphs can't be shared.


def refuse_recording() -> None:
    """Raise while a CUDA graph is recorded on the current stream."""
    if torch.cuda.is_current_stream_capturing():
        raise HooklineError("a CUDA graph is being recorded, and each replay would overwrite what was captured")


def _lazy_copy(tensor: Tensor) -> Tensor:
    """Copy a tensor on write wherever torch can; the caller knows that it is right there."""
    try:
        return lazy_clone(tensor)
    except RuntimeError:  # Sparse, nested, shared-memory and numpy-owned tensors.
        return copy_tensor(tensor)


def copy_tensor(tensor: Tensor) -> Tensor:
    """Copy a tensor now; dimensions of stride 0 stay expanded."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.numel() == 0 or tensor.is_quantized:
        return tensor.clone()
    if current_transform() is not None or 0 not in tensor.stride():
        return tensor.clone()
    return unexpanded(tensor).clone().expand(tensor.shape)


def unexpanded(tensor: Tensor) -> Tensor:
    """Return the tensor with its expanded (stride 0) dimensions cut to size 1; no element is lost."""
    if 0 not in tensor.stride():
        return tensor
    return tensor[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())]


def address(tensor: Tensor) -> int:
    """Return where a tensor's memory is, without making a copy-on-write tensor copy itself, as data_ptr() would."""
    try:
        return int(storage_address(tensor))
    except RuntimeError:  # No memory of its own: sparse, nested, a subclass that wraps others.
        return 0


def versions(value: Any) -> list[Any]:
    """Return what changes when somebody writes into the tensors of a value."""
    return [known_version(tensor) for tensor in leaves(value)]


def state_of(value: Any, _inside: tuple[int, ...] = ()) -> Any:
    """Return what changes when somebody writes into a value: its parts, and its tensors' versions."""
    if isinstance(value, Tensor):
        return id(value), known_version(value), value.requires_grad
    parts = parts_of(value)
    if parts is None or id(value) in _inside:
        return id(value)
    inside = (*_inside, id(value))
    return [(key, state_of(part, inside)) for key, part in parts.items()]


class Loan:
    """A value lent to a user's function: copies of its tensors, which show whether the function wrote into them."""

    def __init__(self, value: Any) -> None:
        self._copies: dict[int, tuple[Tensor, Tensor, Any]] = {}  # A copy, what it is a copy of, and its state.
        self.given = self._lend(value) if isinstance(value, Tensor) else map_tensors(self._lend, value, in_objects=True)
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
    """Return True if a copy surely has its original numbers.

    Versions miss writes through `.data` or numpy, so compare addresses, and then the numbers: reading through numpy
    moves a copy on write too, and a real copy is elsewhere from the start.
    """
    if not own.is_cpu:
        return False
    if address(copy) == address(own) != 0:
        return True
    is_odd = own.is_quantized or own.layout is not torch.strided or own.is_nested or current_transform() is not None
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
