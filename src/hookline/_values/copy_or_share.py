"""Decide which tensors are copied, when and how: on write where torch does that correctly, else now.

The caller says what the copy is for:

copy_captured       a value that a capture keeps
copy_arrived        a gradient that a capture keeps
share, share_tensor a value that other code may write into: a transform's argument, a skipped module's output
share_detached      the same, detached from the graph
share_for_now       a value that belongs to hookline, or a copy that lasts only for this run
Loan                an argument of a user's function, which may return it
copy_all            a value from the user, who may write into it at any time
copy_tensor         a value that is certain to be overwritten, or a part that would keep the whole alive

`lazy_clone` shares the memory of a tensor until somebody writes to it, and then the writer gets the copy. It is a
private function of torch. Where torch lacks it, everything is copied at once.

No other file decides whether a passing value is copied. Two files copy without asking: `hot_path` in
shadowed_forward.py handles the usual case of `copy_captured`, which saves a call for each module, and compiled.py
clones, since dynamo can't trace a lazy clone. A plain `clone()` elsewhere has other reasons: it makes memory to write
into, or lets a larger tensor be freed.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from functools import cache
from sys import getrefcount
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from hookline._torch import (
    add_first_gradient_hook,
    base_of,
    count_holders,
    count_uses,
    current_transform,
    is_lazy_clone,
    is_view,
    known_version,
    lazy_clone,
    may_be_of_cuda_graph,
    outside_all_modes,
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

    It is measured every time: after dynamo has compiled something, Python may hold one more reference to arguments.
    """
    held: list[Any] = []
    return _count(held)


def _count(value: Any) -> int:
    return getrefcount(value)


class RunningForward:
    """A running forward of a model: its arguments, and the memory that existed before it."""

    passing: Mapping[Any, Any] = {}  # The tokens that pass in it, for each session that asks; replaced.

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.model = model
        self.given = args, kwargs
        self.outer = current_forward.get()
        self._outside: set[int] | None = None

    def made(self, tensor: Tensor) -> bool:
        """Return True if this forward allocated a tensor: no argument, attribute or numpy array uses its memory."""
        memory = memory_of(tensor)
        if memory == 0 or tensor.nbytes < _SMALL or is_parameter(tensor):  # Copying is cheaper than checking further.
            return False
        is_given_away = not tensor.requires_grad and count_uses(tensor) > 1  # To DLPack or autograd.
        if is_given_away or not _is_alone_in_memory(tensor):
            return False
        if self._outside is None:
            self._outside = _memory_of_all(self.model, self.given)
        is_new = memory not in self._outside and _TOO_MUCH not in self._outside
        return is_new and (self.outer is None or self.outer.made(tensor))


current_forward: ContextVar[RunningForward | None] = ContextVar("current_forward", default=None)


def may_move(tensor: Tensor) -> bool:
    """Return True if torch may move the tensor to new memory on a later write: nothing else knows its address.

    This is always true of a copy-on-write tensor: torch copies it before it gives its address away.
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
    """Return True if only one variable of the caller holds a tensor and its memory; False if that is not certain."""
    if getrefcount(tensor) != references_in_call() or not is_result(tensor):
        return False
    return tensor.untyped_storage().resizable()  # Memory that an array or a buffer owns is not resizable.


def is_result(tensor: Tensor) -> bool:
    """Return True if nothing else uses the tensor's memory. The caller has checked that one variable holds it."""
    if not _is_alone_in_memory(tensor):
        return False
    base = None if tensor.is_inference() else base_of(tensor)
    return base is None or getrefcount(base) == _ALONE_AS_BASE


def _is_alone_in_memory(tensor: Tensor) -> bool:
    """Return True if no other tensor uses this tensor's memory, except its base and the one that autograd saved.

    A numpy array counts as another tensor, because it holds one.
    """
    try:
        others = count_holders(storage_id(tensor.untyped_storage())) - ALONE_IN_MEMORY
    except (NotImplementedError, RuntimeError):  # Sparse, nested.
        return False
    if others != 1 or tensor.is_inference():
        return others == 0
    if is_view(tensor):  # For example, a linear layer returns a view of a tensor that nobody else holds.
        return True
    # `saved_tensors_hooks` may store something other than the tensor.
    made_by: Any = type(tensor.grad_fn)
    if version_of(tensor) != 0 or issubclass(made_by, BackwardCFunction) or saving_hooks(True) is not None:
        return False
    return saves_its_output(made_by)


def is_parameter(tensor: Tensor) -> bool:
    """Return True if a tensor is a parameter, or a view of one.

    CUDA graphs and FSDP hold the addresses of parameters.
    """
    root: Tensor | None = tensor
    if is_view(tensor) and not tensor.is_inference():
        root = base_of(tensor)
    if type(root) is Tensor:  # The isinstance below reads an attribute of the tensor, which takes longer than the rest.
        return root.requires_grad and root.is_leaf
    return isinstance(root, nn.Parameter) or (root is not None and root.requires_grad and root.is_leaf)


def memory_of(tensor: Tensor) -> int:
    """Return an id of a tensor's memory, the same for all its views; 0 for a tensor without a storage of its own."""
    try:
        return storage_id(tensor.untyped_storage())
    except (NotImplementedError, RuntimeError):  # Sparse, nested, a subclass that wraps others.
        return 0


def _memory_of_all(model: nn.Module, given: Any) -> set[int]:
    """Return the memory ids of all tensors in a forward's arguments, or in any attribute of the modules."""
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
            if len(seen) + len(parts) > _MOST_OBJECTS:  # For example a vocabulary. Copy everything instead.
                return {_TOO_MUCH}
            waiting += parts.values()
    return found


def _calibrate() -> tuple[int, int, int]:
    """Measure the counts for a tensor that is held once: its references, those of a view's base, its memory's users."""
    tensor = torch.empty(1, device="cpu")
    if type(tensor) is not Tensor:  # A mode made another kind of tensor during the import: no count proves anything.
        return -1, -1, -1
    view = torch.empty(1, device="cpu").view(1)
    base = base_of(view)
    holders = count_holders(storage_id(tensor.untyped_storage()))
    found = getrefcount(tensor), getrefcount(base), holders
    capsule = to_dlpack(tensor)
    is_seen = getrefcount(tensor) > found[0] or count_holders(storage_id(tensor.untyped_storage())) > holders
    del capsule
    return found if is_seen and holders else (-1, -1, -1)


ALONE, _ALONE_AS_BASE, ALONE_IN_MEMORY = outside_all_modes(_calibrate)
_SMALL = 1 << 20  # Bytes.
_LARGE_COUNT = 1 << 14  # Elements. It takes longer to find out who holds a smaller gradient than to copy it.
_MOST_OBJECTS = 20_000
_TOO_MUCH = -1  # In a set of memory ids: there were too many objects to search.


def share(value: Any, objects: bool = False) -> Any:
    """Return `value` with every tensor copied on write; with `objects`, objects without tensors are copied too."""
    return map_tensors(share_tensor, value, in_objects=objects)


def copy_all(value: Any) -> Any:
    """Return `value` with every tensor copied now: the user may write into the originals at any time."""
    return map_tensors(copy_tensor, value)


def share_tensor(tensor: Tensor, moves: bool | None = None) -> Tensor:
    """Copy a tensor on write where that is safe, else now. Gradients flow through the copy.

    Args:
        moves: Whether its memory may move, if the caller knows. `may_move` can't tell for a detached tensor: the
            original holds the memory too.
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
    """Copy a tensor on write without asking `may_move`: for memory of hookline, or a copy that lasts for this run."""
    # On CUDA torch makes the copy on the default stream, and its foreach functions make none: see `copy_captured`.
    if not tensor.is_cpu or tensor.is_quantized or current_transform() is not None or is_parameter(tensor):
        return copy_tensor(tensor)
    if not tensor.numel():  # An `out=` tensor may be resized, which fails if it is empty and shared.
        return copy_tensor(tensor)
    return _lazy_copy(tensor)


def copy_captured(source: Tensor, tensor: Tensor, moves: bool) -> tuple[Tensor, bool]:
    """Copy a captured tensor, on write where that is safe, on CUDA too.

    The second result says whether a read of the copy has to check the version of `source`: on CUDA, torch's foreach
    functions write into the shared memory without copying it first.

    Args:
        source: The tensor, detached unless its graph is kept.
        tensor: The tensor that passed.
        moves: Whether its memory may move: see `may_move`.
    """
    if source.is_cuda:
        is_shared = _may_share_on_cuda(tensor) and moves  # Called first: it raises while a CUDA graph records.
        return (_lazy_copy(source) if is_shared else copy_tensor(source)), is_shared
    return (copy_tensor(source) if is_parameter(tensor) else share_tensor(source, moves)), False


def copy_arrived(gradient: Tensor, references: int, shape: torch.Size | None = None) -> Tensor:
    """Copy a contiguous gradient in a tensor hook: on write if it is large and only autograd holds it, else now.

    On a GPU it is copied now. That takes less time than finding out whether it may be shared, and a shared gradient
    would keep autograd from adding others to it in place. It is also copied now at the base of a view, as for a linear
    layer that gets three dimensions: autograd holds such a gradient twice.

    Args:
        references: The number of references to the gradient that the hook sees.
        shape: The shape of the copy, if not that of the gradient.
    """
    source = gradient.detach() if gradient.requires_grad else gradient
    if gradient.is_cpu and gradient.numel() >= _LARGE_COUNT and source is gradient and shape is None:
        memory = gradient.untyped_storage()
        holders = references, count_uses(gradient), count_holders(storage_id(memory))
        if holders == _holders_in_hook() and memory.nbytes() == gradient.nbytes:
            return _lazy_copy(gradient)
    return (source if shape is None else source.view(shape)).clone()


@cache
def _holders_in_hook() -> tuple[int, int, int]:
    """Return what a tensor hook counts for a gradient that only autograd holds.

    These are Python's references, those of C++ (DLPack has one), and the users of its memory. They are measured in a
    small backward, which may run inside another one.
    """
    counts: list[tuple[int, int, int]] = []

    def arrived(gradient: Tensor) -> None:
        references = getrefcount(gradient)
        counts.append((references, count_uses(gradient), count_holders(storage_id(gradient.untyped_storage()))))

    def measure() -> None:
        with torch.enable_grad():
            made = torch.empty(2, device="cpu", requires_grad=True) * 2
            add_first_gradient_hook(made, arrived)
            torch.autograd.backward((made * 2).sum(), inputs=[made])

    outside_all_modes(measure)
    return counts[0] if counts and ALONE > 0 else (-1, -1, -1)


def _may_share_on_cuda(tensor: Tensor) -> bool:
    """Return True if torch copies this CUDA tensor correctly when somebody writes to it."""
    if raw_stream(tensor.get_device()) != 0:  # Torch makes the copy on the default stream, not in order with this one.
        refuse_recording()
        return False
    if is_parameter(tensor):  # Fused optimizers write into the shared memory, and leave the version as it is.
        return False
    return not may_be_of_cuda_graph(tensor)  # The memory of compiled CUDA graphs can't be shared.


def refuse_recording() -> None:
    """Raise while a CUDA graph is recorded on the current stream."""
    if torch.cuda.is_current_stream_capturing():
        raise HooklineError("a CUDA graph is being recorded, and each replay would overwrite what was captured")


def _lazy_copy(tensor: Tensor) -> Tensor:
    """Copy a tensor on write if torch can, else now. The caller has checked that this is safe."""
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
    """Return the address of a tensor's memory. Unlike data_ptr(), this makes no copy of a copy-on-write tensor."""
    try:
        return int(storage_address(tensor))
    except RuntimeError:  # No memory of its own: sparse, nested, a subclass that wraps others.
        return 0


def versions(value: Any) -> list[Any]:
    """Return the versions of the tensors in a value, which change when somebody writes into them."""
    return [known_version(tensor) for tensor in leaves(value)]


def state_of(value: Any, _inside: tuple[int, ...] = ()) -> Any:
    """Return a state that changes when somebody writes into a value: its parts, and its tensors' versions."""
    if isinstance(value, Tensor):
        return id(value), known_version(value), value.requires_grad
    parts = parts_of(value)
    if parts is None or id(value) in _inside:
        return id(value)
    inside = (*_inside, id(value))
    return [(key, state_of(part, inside)) for key, part in parts.items()]


class Loan:
    """A value lent to a user's function: copies of its tensors, which show whether the function wrote into them."""

    def __init__(self, value: Any, is_new: bool = False) -> None:
        """Lend a value. `is_new` is True for a tensor that nobody else holds: see `is_result`."""
        self._copies: dict[int, tuple[Tensor, Tensor, Any]] = {}  # Copy, original, the copy's state.
        if isinstance(value, Tensor):
            self.given: Any = share_tensor(value, True if is_new else None)
            self._before = state_of(self.given)
            self._copies[id(self.given)] = self.given, value, self._before
        else:
            self.given = map_tensors(self._lend, value, in_objects=True)
            self._before = state_of(self.given)

    def _lend(self, tensor: Tensor) -> Tensor:
        copy = share_tensor(tensor)
        self._copies[id(copy)] = copy, tensor, state_of(copy)
        return copy

    def is_written(self) -> bool:
        """Return True if the function is known to have written into its argument."""
        if state_of(self.given) != self._before:
            return True
        return any([copy.is_cpu and not _is_untouched(copy, own) for copy, own, _ in self._copies.values()])

    def take_back(self, tensor: Tensor) -> Tensor:
        """Return the tensor to pass on for one that the function returned: the original if its copy is unchanged."""
        copy, own, before = self._copies.get(id(tensor), (None, None, None))
        if copy is None or own is None:  # The user may hold it, so the model must not overwrite it.
            return share_for_now(tensor) if is_copied_on_write(tensor) else copy_tensor(tensor)
        return own if state_of(copy) == before and _is_untouched(copy, own) else copy


def _is_untouched(copy: Tensor, own: Tensor) -> bool:
    """Return True if a copy certainly has its original numbers.

    Versions miss writes through `.data` or numpy, so addresses are compared. If they differ, the numbers are compared:
    reading through numpy moves a copy-on-write tensor too, and a real copy has another address from the start.
    """
    if not own.is_cpu:
        return False
    if address(copy) == address(own) != 0:
        return True
    is_odd = own.is_quantized or own.layout is not torch.strided or own.is_nested or current_transform() is not None
    if is_odd or type(own) not in (Tensor, nn.Parameter):
        return True  # Only torch's functions can write to its memory, and they change its version.
    return torch.equal(copy, own) or torch.equal(copy.nan_to_num(), own.nan_to_num())


def alias_of(tensor: Tensor) -> Tensor:
    """Return a view of a whole tensor. Unlike `view_as` it keeps the stride of a dimension of size 1.

    Torch chooses kernels by that stride, and their results differ in the last bits.
    """
    return tensor.view_as(tensor) if tensor.is_nested else tensor[...]  # Nested tensors support only `view_as`.


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
