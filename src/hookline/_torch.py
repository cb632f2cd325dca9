"""The only file that names private parts of torch, and the only one that walks Python frames.

Each entry says what it is for, and what happens where the installed torch does not have it: "always there" means that
every torch from 2.4 on has it. This file imports nothing of hookline. `tests/test_private_torch.py` keeps private
names and frames out of every other file. There are three exceptions:

- `_parameters`, `_buffers` and `_modules` of a module. They are private by name only: every subclass of `nn.Module`
  that stores its own tensors relies on them.
- The names under which wrappers such as `OptimizedModule` hold their model, in `_sites/tree.py`. They are part of the
  names of the modules inside.
- `_version` and `_cdata` in `hot_path`, in `_engine/shadowed_forward.py`. An attribute is faster there than a call.

Names such as `graph_task` are bound to torch's own C function, so that using them adds no Python call to a forward.
"""

from __future__ import annotations

import dis
import os
import sys
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from operator import attrgetter
from types import CellType, CodeType, FrameType
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn, overrides
from torch._C import _functorch
from torch._compile import _disable_dynamo
from torch._subclasses import fake_tensor
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling
from torch.fx import _symbolic_trace
from torch.nn.modules import batchnorm, conv, dropout, pooling
from torch.utils import _python_dispatch, checkpoint

# Python frames.

# Return a frame of this thread: frame_at(0) is the caller's, frame_at(1) that of its caller.
frame_at: Callable[[int], FrameType] = sys._getframe
# Return the frame that called a frame; None for the outermost.
caller_of: Callable[[FrameType], FrameType | None] = attrgetter("f_back")
# Return the variables of a frame by name. Up to Python 3.12 reading them keeps their values alive until the frame ends.
variables: Callable[[FrameType], dict[str, Any]] = attrgetter("f_locals")


def frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and those that called it, innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def frames_of(code: CodeType) -> list[FrameType]:
    """Return the running frames of one function, innermost first.

    This is a plain loop, because every call with an edit looks through the whole stack.
    """
    found = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is code:
            found.append(frame)
        frame = frame.f_back
    return found


def variables_of(name: str, frame: FrameType | None) -> Iterator[dict[str, Any]]:
    """Yield the variables of each running function of this name, innermost first."""
    return (variables(one) for one in frames(frame) if one.f_code.co_name == name)


def outside(packages: Collection[str], frame: FrameType) -> tuple[FrameType | None, int]:
    """Return the nearest frame around `frame` whose module is not in these packages, and how many steps away it is."""
    steps = 0
    for one in frames(frame):
        if one.f_globals.get("__name__", "").split(".")[0] not in packages:
            return one, steps
        steps += 1
    return None, steps


def first_argument(frame: FrameType) -> Any:
    """Return the first argument of the function that a frame runs, such as a method's `self`; None without one."""
    return frame.f_locals.get(frame.f_code.co_varnames[0]) if frame.f_code.co_argcount else None


def cell_content(cell: CellType) -> Any:
    """Return the value of a closure's variable; None if it has none yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


# The user's code.

# The packages whose frames are not the user's. A warning points outside them.
_NOT_THE_USERS = ("hookline", "torch", "contextlib", "functools", "_collections_abc", "copy")
Line = tuple[CodeType, int]  # A line of a program, by its code and number.


def user_frame() -> tuple[FrameType | None, int]:
    """Return the nearest frame of the user's code, and the stacklevel with which the caller's warning points there."""
    frame, steps = outside(_NOT_THE_USERS, frame_at(2))
    return frame, 2 + steps


def user_line() -> Line | None:
    """Return the line of the user's code that is running."""
    frame = user_frame()[0]
    return None if frame is None else (frame.f_code, frame.f_lineno)


def calling_line() -> Line:
    """Return the line that called the caller of this function."""
    frame = frame_at(2)
    return frame.f_code, frame.f_lineno


def line_text(line: Line) -> str:
    """Return a line as its file's name and its number."""
    return f"{os.path.basename(line[0].co_filename)}:{line[1]}"


def is_thrown_away(line: Line | None) -> bool:
    """Return True if the statement on this line is running and throws its result away, without changing a variable."""
    frame = user_frame()[0]
    if frame is None or line is None or frame.f_code is not line[0] or frame.f_lineno != line[1]:
        return False  # Code is compared by identity: a notebook cell that runs again has new, equal code.
    return not _gives_up_variable(frame)


def is_given_up() -> bool:
    """Return True if the user's running statement drops the value of a variable on purpose, by `del` or `=`."""
    frame = user_frame()[0]
    return frame is not None and _gives_up_variable(frame)


def _gives_up_variable(frame: FrameType) -> bool:
    """Return True if the instruction that a frame runs assigns or deletes a variable."""
    return dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith(("STORE", "DELETE"))


# Calls of modules and functions.

MODULE_CALL = nn.Module._call_impl.__code__  # Runs between `model(x)` and `forward`. Always there.
MODULE_CALLS = (MODULE_CALL, nn.Module._wrapped_call_impl.__code__)
_FUNCTION_APPLY: CodeType = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]
# `DataParallel` copies a module by the method of this name. Without the method there is nothing to refuse.
REPLICATE = "_replicate_for_data_parallel"
# Modules of torch that call torch functions themselves while they trace a model. If this torch lacks one of them, no
# frame belongs to it.
TRACING_MODULES = ("torch._dynamo.convert_frame", "torch._subclasses.fake_tensor")

# The files of torch that call functions on behalf of the model. A listing skips their lines and shows the model's line.
# A file that does not exist matches nothing: then the listing shows a line of torch.
_CALLING = ("overrides", "functional", "_tensor", "_ops", "nn/functional", "nn/modules/module", "nn/utils/stateless",
            "_functorch/functional_call", "utils/_contextlib")  # fmt: skip
CALLING_FILES = tuple(os.path.join(os.path.dirname(torch.__file__), *f"{file}.py".split("/")) for file in _CALLING)


def autograd_function_around(frame: FrameType | None) -> type | None:
    """Return the `autograd.Function` that runs between a frame and the nearest module's call; None if there is none.

    Reentrant checkpointing is such a function too. It does not count, because it runs its segment again.
    """
    for one in frames(frame):
        if one.f_code is MODULE_CALL:
            return None
        if one.f_code is _FUNCTION_APPLY and one.f_locals.get("cls") is not checkpoint.CheckpointFunction:
            found: type | None = one.f_locals.get("cls")
            return found
    return None


def operator_schemas(function: Any) -> tuple[Any, ...]:
    """Return the signatures of an operator's overloads; () if torch has no such operator. Always there."""
    if isinstance(function, torch._ops.OpOverload):
        return (function._schema,)
    name = str(getattr(function, "__name__", "")).partition(".")[0]
    return tuple(torch._C._jit_get_schemas_for_operator(f"aten::{name}")) if name else ()


# Function modes: the stack of `TorchFunctionMode`s that see every torch function. All are always there.

current_function_mode: Callable[[], Any] = overrides._get_current_function_mode
function_mode_stack: Callable[[], list[Any]] = overrides._get_current_function_mode_stack
push_function_mode: Callable[[Any], None] = overrides._push_mode
pop_function_mode: Callable[[], Any] = overrides._pop_mode
# Context managers that hide functions from modes and tensor subclasses, or only from subclasses.
unseen_by_modes_and_subclasses = torch._C.DisableTorchFunction
unseen_by_subclasses = torch._C.DisableTorchFunctionSubclass
# A context manager that hides operations from every `TorchDispatchMode`, such as one that makes all tensors fake.
unseen_by_dispatch_modes = _python_dispatch._disable_current_modes
Made = TypeVar("Made")  # The type of what a function makes.


def outside_all_modes(make: Callable[[], Made]) -> Made:
    """Return what a function makes in a new thread, which no mode and no transform of the user reaches.

    This is for tensors that a file makes when it is imported. `hl.capture` imports the engine on its first use, which
    may be inside inference mode, a fake tensor mode, `torch.device("meta")` or a transform of torch.func.
    """
    try:
        with ThreadPoolExecutor(1) as threads:
            return threads.submit(make).result()
    except RuntimeError:  # No thread can be started while Python shuts down, or where the system has no threads.
        return make()


# Tracing and transforms. All are always there, except the flag for torch.export.

FakeTensor = fake_tensor.FakeTensor  # A tensor with a shape and no data.
FakeTensorMode = fake_tensor.FakeTensorMode
FAKE_TENSOR_LOGGER = "torch._subclasses.fake_tensor"  # Logs what a fake tensor can't do.
# Return the innermost transform of torch.func that runs here; None outside all of them.
current_transform: Callable[[], Any] = _functorch.peek_interpreter_stack
# Return True for a tensor that belongs to such a transform, and has no meaning after it.
is_transformed: Callable[[Tensor], bool] = _functorch.is_functorch_wrapped_tensor


class _NoFlag:
    _is_exporting_flag = False  # Before torch 2.6 there is no such flag.


# `is_traced` reads these to see whether torch.export, torch.jit.trace or make_fx runs here.
_exporting = cast("type[_NoFlag]", torch.compiler if hasattr(torch.compiler, "_is_exporting_flag") else _NoFlag)
_tracing_state = torch._C._get_tracing_state
_dispatch_mode = torch._C._get_dispatch_mode
_MAKE_FX = torch._C._TorchDispatchModeKey.PROXY


def is_traced() -> bool:
    """Return True if torch.jit.trace, torch.export or make_fx runs the model to make a graph of it."""
    if is_dynamo_compiling():  # Dynamo can't trace the call for the dispatch mode.
        return _tracing_state() is not None or _exporting._is_exporting_flag
    return is_traced_now()


def is_traced_now() -> bool:
    """Return what `is_traced` does, in code that dynamo does not trace."""
    # Reads the flag itself: before torch 2.13, is_exporting() is always True while dynamo traces.
    return _tracing_state() is not None or _dispatch_mode(_MAKE_FX) is not None or _exporting._is_exporting_flag


def is_traced_by_fx() -> bool:
    """Return True while torch.fx traces a model."""
    return _symbolic_trace._is_fx_tracing_flag


def is_in_forward_ad() -> bool:
    """Return True inside a level of forward-mode AD, where a tensor may have a tangent."""
    return forward_ad._current_level >= 0


# Dynamo and its graphs. Its modules are read from `sys.modules`, since importing them takes a second.

DYNAMO = "torch._dynamo"
_EVAL_FRAME = f"{DYNAMO}.eval_frame"
# Whether dynamo can trace hooks. Before torch 2.8 it can't read the slots of a tap, or not those of a base class, and
# without slots torch 2.4 makes a wrong graph of some edits. There a compiled model runs uncompiled while it has hooks.
TRACES_HOOKS = torch.__version__ >= "2.8"
# Return True if something in this process may have been compiled.
is_dynamo_loaded: Callable[[], bool] = partial(sys.modules.__contains__, _EVAL_FRAME)
uncompiled: Callable[[Any], Any] = (
    _disable_dynamo  # Wrap a function so that dynamo runs it without tracing it. Always there.
)


def has_compiled() -> bool:
    """Return True if dynamo has compiled something, or if it is loaded and this torch does not count compilations."""
    dynamo = sys.modules.get(f"{DYNAMO}.convert_frame")
    return dynamo is not None and bool(getattr(dynamo, "FRAME_COUNTER", 1))


def keep_out_of_graphs(code: CodeType) -> None:
    """Keep dynamo from compiling a function when it is called from Python, and from warning about it."""
    sys.modules[_EVAL_FRAME].skip_code(code)


def has_given_up() -> bool:
    """Return True if dynamo runs a model uncompiled because it has made as many graphs as it may.

    Before torch 2.6 dynamo does not say so, and hookline does not warn.
    """
    return getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", lambda: None)() is False


def most_graphs() -> int:
    """Return how many graphs dynamo makes of one function at most."""
    return int(sys.modules[f"{DYNAMO}.config"].cache_size_limit)


def is_any_compiled(model: nn.Module) -> bool:
    """Return True if torch.compile has wrapped a module of the model, and its graphs are in use."""
    dynamo = sys.modules.get(_EVAL_FRAME)
    stance = getattr(dynamo, "_stance", None)  # Since torch 2.6; before that, graphs can't be turned off.
    if dynamo is None or getattr(stance, "stance", "") == "force_eager":
        return False
    return any(
        module.__dict__.get("_compiled_call_impl") is not None
        or hasattr(type(module).forward, "_torchdynamo_orig_callable")
        or type(module).__name__ == "OptimizedModule"
        for module in model.modules()
    )


_TREES = "torch._inductor.cudagraph_trees"  # The module that makes CUDA graphs for torch.compile.
# Return True if torch.compile may have made CUDA graphs in this process.
has_cuda_graphs: Callable[[], bool] = partial(sys.modules.__contains__, _TREES)


def _cuda_graphs(tensor: Tensor) -> Any:
    """Return the manager of torch.compile's CUDA graphs on a tensor's device; None if there are no graphs.

    It raises an AssertionError on a thread other than the one that owns the graphs.
    """
    trees = sys.modules.get(_TREES)
    return None if trees is None else trees.get_manager(tensor.get_device(), create_if_none_exists=False)


def may_be_of_cuda_graph(tensor: Tensor) -> bool:
    """Return True if a CUDA graph of torch.compile may own the memory of a tensor."""
    try:
        return _cuda_graphs(tensor) is not None
    except AssertionError:
        return True


def is_replayed_over(tensor: Tensor) -> bool:
    """Return True if a CUDA graph of torch.compile made this tensor, and a later run uses its memory.

    Torch raises if such a tensor is read while graphs are being recorded, but not while they are replayed.
    """
    if not tensor.is_cuda:
        return False
    try:
        manager = _cuda_graphs(tensor)
        memory = storage_id(tensor.untyped_storage())
    except (AssertionError, RuntimeError):  # Another thread owns the graphs, or torch refuses the read itself.
        return False
    if manager is None or torch._C._has_Standard_Deleter(memory):
        return False
    latest = manager.current_node  # The graph that ran last, and those before it in the same forward.
    return latest is None or memory not in [held() for held in latest.path_live_weakrefs()]


# Tensors: versions, views and hooks. All are always there.

version_of: Callable[[Tensor], int] = attrgetter("_version")  # How often a tensor was written to.
is_view: Callable[[Tensor], bool] = Tensor._is_view
base_of: Callable[[Tensor], Tensor | None] = attrgetter("_base")  # The base of a view; None for any other tensor.


def add_first_gradient_hook(tensor: Tensor, hook: Callable[[Tensor], Any]) -> None:
    """Add the first hook of a tensor that has a `grad_fn`: `register_hook` without a handle, in a third of the time."""
    tensor._backward_hooks = OrderedDict({_FIRST: hook})
    tensor.grad_fn._register_hook_dict(tensor)  # type: ignore[union-attr]


_FIRST = -1  # The key of that hook. Handles of torch's hooks count from 0.
gradient_hooks: Callable[[Tensor], Any] = attrgetter("_backward_hooks")  # None if there never was a hook.
make_subclass: Callable[..., Any] = Tensor._make_subclass  # Make a tensor of a class with the memory of another one.
norms_together: Callable[..., tuple[Tensor, ...]] = torch._foreach_norm  # The norms of many tensors at once.
# Return True for a tensor that wraps others, such as a DTensor. Then `__tensor_flatten__` names them.
wraps_tensors: Callable[[object], bool] = _python_dispatch.is_traceable_wrapper_subclass
# The parts of a sparse COO tensor as they are stored. `indices()` and `values()` refuse one that is not coalesced.
stored_indices: Callable[[Tensor], Tensor] = Tensor._indices
stored_values: Callable[[Tensor], Tensor] = Tensor._values


def known_version(tensor: Tensor) -> int:
    """Return how often a tensor was written to; -1 for an inference tensor, for which `version_of` raises."""
    return -1 if tensor.is_inference() else tensor._version


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor without communication or autograd, and any other tensor as it is."""
    part: Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


# The memory of tensors. Where torch lacks one of these, hookline copies more than it has to.

# Copy a tensor when somebody writes to it or to the copy. Without this function the copy is made at once.
lazy_clone: Callable[[Tensor], Tensor] = getattr(torch, "_lazy_clone", torch.clone)
# Return True for a tensor whose memory is copied on write. Without this function there is no such tensor.
is_lazy_clone: Callable[[Tensor], bool] = getattr(torch._C, "_is_cow_tensor", lambda _: False)
# Count the holders of a tensor in C++: Python, autograd, a DLPack capsule. The fallback counts only Python.
count_uses: Callable[[Tensor], int] = getattr(Tensor, "_use_count", lambda _: 1)
# Return the id of a storage, and so of the memory of a tensor and all its views. Always there.
storage_id: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")
# Count the tensors that hold a storage, by its `storage_id`. The fallback 0 proves nothing, so everything is copied.
count_holders: Callable[[int], int] = getattr(torch._C, "_storage_Use_Count", lambda _: 0)
# Return the hooks that pack the tensors autograd saves, or None. Before torch 2.5, always True: there may be some.
saving_hooks: Callable[[bool], object] = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", bool)
# Return the number of a device's current CUDA stream, 0 for the default one. Only called with CUDA.
raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 1)
# Free unused pinned memory. Without this function torch keeps it.
empty_pinned_cache: Callable[[], None] = getattr(torch._C, "_host_emptyCache", lambda: None)
to_dlpack: Callable[[Tensor], object] = torch._C._to_dlpack  # Lend a tensor's memory to another library. Always there.
# Return the address of a tensor's storage. `data_ptr`, the fallback, makes a lazy clone copy itself.
storage_address: Callable[[Tensor], int] = getattr(torch._C, "_data_address", Tensor.data_ptr)


def first_element(tensor: Tensor) -> int:
    """Return the address of a tensor's first element, without making a lazy clone copy itself if possible."""
    if storage_address is Tensor.data_ptr:
        return tensor.data_ptr()
    return storage_address(tensor) + int(tensor.storage_offset()) * tensor.itemsize


# Autograd.

# Return the number of the backward that runs on this thread, -1 outside a backward. Always there.
graph_task: Callable[[], int] = torch._C._current_graph_task_id


def saves_its_output(node: type) -> bool:
    """Return True if nodes of this class keep the output of their forward.

    This checks the class, because reading the attribute of a node would unpack the output.
    """
    return hasattr(node, "_saved_result") or hasattr(node, "_saved_output")


def when_backward_ends(function: Callable[[], Any]) -> None:
    """Call a function when the backward that runs now has computed all its gradients. Always there."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


# Activation checkpointing. Torch keeps the function that recomputes a segment in local variables.

_is_forward_ad_enabled: Callable[[], bool] = getattr(torch._C, "_is_fwd_grad_enabled", bool)
_reentrant_code = checkpoint.CheckpointFunction.forward.__code__
_checkpoint_file = checkpoint.__file__


def is_in_reentrant_checkpoint() -> bool:
    """Return True during the first pass of a reentrant checkpoint: it has no gradients, but its recomputation has."""
    return not _is_forward_ad_enabled() and bool(frames_of(_reentrant_code))


def is_in_checkpoint() -> bool:
    """Return True if a function of torch's checkpointing runs here."""
    return any(frame.f_code.co_filename == _checkpoint_file for frame in frames(sys._getframe(1)))


def recomputations() -> list[tuple[Any, str]]:
    """Return, for each checkpointed segment that runs for the first time, the object and attribute that recompute it.

    If torch renames these variables, a non-reentrant segment is not found, and a reentrant one raises a KeyError.
    """
    if not torch.is_grad_enabled():  # Only a reentrant one runs without gradients, and runs again with them.
        if _is_forward_ad_enabled():
            return []  # A reentrant one is an autograd.Function, in which forward-mode AD is off.
        return [(frame.f_locals["ctx"], "run_function") for frame in frames_of(_reentrant_code)]
    if saving_hooks(True) is None:
        return []  # A checkpoint that is not reentrant packs the tensors that autograd saves.
    found: list[tuple[Any, str]] = []
    for frame in frames(sys._getframe(1)):
        if frame.f_code is _reentrant_code:
            found.append((frame.f_locals["ctx"], "run_function"))
        elif frame.f_code.co_filename == _checkpoint_file and "gen" in frame.f_locals:
            suspended = frame.f_locals["gen"].gi_frame
            segment = suspended.f_locals.get("new_frame") if suspended is not None else None
            if segment is not None:
                found.append((segment, "recompute_fn"))
    return found


# Modules. All are always there.

# Return the names of a module's buffers that are not in its state_dict.
non_persistent_buffers: Callable[[nn.Module], set[str]] = attrgetter("_non_persistent_buffers_set")


def saved_by_itself(module: nn.Module) -> dict[str, Any]:
    """Return the state_dict entries of a module without its children, if its class overrides how it saves; else {}."""
    base, kind = nn.Module, type(module)
    found: dict[str, Any] = {}
    if kind._save_to_state_dict is not base._save_to_state_dict or kind.get_extra_state is not base.get_extra_state:
        module._save_to_state_dict(found, "", keep_vars=True)
    return found


# Layers of torch.nn, by the classes that their variants share. All are always there.

AnyNorm = batchnorm._NormBase
AnyBatchNorm = batchnorm._BatchNorm
AnyConvolution = conv._ConvNd
AnyDropout = dropout._DropoutNd
AnyMaxPool = pooling._MaxPoolNd
AnyAvgPool = pooling._AvgPoolNd

# Classes that may compute in one kernel, without calling their children or any function. Several files need them.
FUSED_MODULES = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)

# Torch's hooks: the attributes that hold them, and a name for each. An attribute that torch lacks counts as empty.

MODULE_HOOKS = {
    "_forward_pre_hooks": "forward pre-hook",
    "_forward_hooks": "forward hook",
    "_backward_hooks": "backward hook",
    "_backward_pre_hooks": "backward pre-hook",
    "_state_dict_pre_hooks": "state_dict pre-hook",
    "_state_dict_hooks": "state_dict hook",
    "_load_state_dict_pre_hooks": "load_state_dict pre-hook",
    "_load_state_dict_post_hooks": "load_state_dict post-hook",
}
forward_hooks: Callable[[nn.Module], dict[int, Any]] = attrgetter("_forward_hooks")
TENSOR_HOOKS = {"_backward_hooks": "gradient hook", "_post_accumulate_grad_hooks": "accumulated gradient hook"}


# Distributed processes.

_STAGES = "torch.distributed.pipelining.stage"
# Return True if this process may run a stage of a pipeline.
is_pipelining_loaded: Callable[[], bool] = partial(sys.modules.__contains__, _STAGES)
REHEARSAL = -1  # Stands for a microbatch's number when a stage runs without data to find out its shapes.


# The process groups of this process. Every block asks for them: `dist.is_initialized()` takes four calls to tell.
_world: Any = dist.distributed_c10d._world if dist.is_available() else None


def is_running() -> bool:
    """Return True if this process belongs to a torch.distributed process group."""
    return _world is not None and _world._default_pg is not None


def default_store() -> Any:
    """Return the key-value store through which the processes met. Always there."""
    return dist.distributed_c10d._get_default_store()


def is_fsdp1(module: nn.Module) -> bool:
    """Return True for a module that FSDP1 wraps."""
    return hasattr(module, "_fsdp_wrapped_module")


def fsdp_states(model: nn.Module) -> Iterator[Any]:
    """Return the states that FSDP2 keeps for the modules of a model, each once; none if torch has no FSDP2."""
    seen: dict[int, Any] = {}
    for module in model.modules():
        find = getattr(module, "_get_fsdp_state", None)
        if find is not None:
            state = find()
            seen.setdefault(id(state), state)
    return iter(seen.values())


def fsdp_groups(state: Any) -> list[Any]:
    """Return the groups of parameters that FSDP2 gathers and shards together."""
    several = getattr(state, "_fsdp_param_groups", None)  # Before torch 2.11 there is only one.
    groups = several if several is not None else [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def reshard_after_stop(model: nn.Module, is_over: bool) -> None:
    """Reshard the parameters that FSDP2 gathered for modules whose forward was ended early.

    Otherwise they would stay whole, and the next forward would use these old values, even after an optimizer has
    changed the shards.

    Args:
        is_over: Whether the call of the model was ended too. If not, it runs to its end, and FSDP2 reshards it there.
    """
    own = None if is_over else getattr(model, "_get_fsdp_state", lambda: None)()
    for state in fsdp_states(model):
        groups, now = fsdp_groups(state), state._training_state
        for group in groups:
            if getattr(group, "_all_gather_result", None) is not None:  # Prefetched, and never used.
                group.wait_for_unshard()
                group.reshard()
        if now.name != "FORWARD":
            continue
        for group in groups:
            group._training_state = type(now).IDLE
            group.reshard()
        if state is own:
            continue
        state._training_state = type(now).IDLE
        getattr(state, "_modules_to_run_forward", set()).clear()
        if state._state_ctx.iter_forward_root is state:
            state._state_ctx.iter_forward_root = None


def microbatch() -> int | None:
    """Return the number of the microbatch that a pipeline stage is running, or REHEARSAL; None outside a stage."""
    if not may_be_a_stage():
        return None
    for frame in frames(sys._getframe(1)):
        if frame.f_globals.get("__name__") == _STAGES:
            if frame.f_code.co_name == "forward_one_chunk":
                return int(frame.f_locals["fwd_chunk_id"])
            if frame.f_code.co_name == "_prepare_forward_infra":
                return REHEARSAL
    return None


def is_rehearsal() -> bool:
    """Return True if a pipeline stage runs without data, as it does in its first step to find out its shapes."""
    return is_pipelining_loaded() and microbatch() == REHEARSAL


def may_be_a_stage() -> bool:
    """Return True if this process may hold one stage of a pipeline, so that other processes hold other modules."""
    return is_pipelining_loaded() and is_running()
