"""Replace one value by another: `fit` converts the new value or raises, `check_same_structure` only checks it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from numbers import Number
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from hookline._torch import (
    AnyAvgPool,
    AnyConvolution,
    AnyMaxPool,
    unseen_by_dispatch_modes,
    unseen_by_modes_and_subclasses,
)
from hookline._values.copy_or_share import copy_all
from hookline._values.nested import (
    Arguments,
    check_fits,
    check_kind,
    check_number,
    children,
    describe,
    fields,
    map_tensors,
    other_shape,
    rebuild,
    subscript_text,
)
from hookline.errors import EditError


def same_values(one: Any, other: Any) -> bool:
    """Return True if two values have the same structure and numbers. A NaN equals a NaN; devices may differ."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one is other or _same_tensors(one.detach(), other.detach())
    if type(one) is not type(other):
        return False
    parts, others = children(one), children(other)
    if parts is None or others is None:
        return one is other or bool(one == other) or bool(one != one and other != other)
    return list(parts) == list(others) and all(same_values(part, others[key]) for key, part in parts.items())


def _same_tensors(one: Tensor, other: Tensor) -> bool:
    if one.is_nested and other.is_nested:
        return same_values(list(one.unbind()), list(other.unbind()))
    if (one.dtype, one.layout, one.shape) != (other.dtype, other.layout, other.shape):
        return False
    if one.layout is not torch.strided:
        one, other = one.to_dense(), other.to_dense()
    other = other.to(one.device)
    equal = one == other
    if one.is_floating_point() or one.is_complex():
        equal |= one.isnan() & other.isnan()
    return bool(equal.all())


# The modules of torch.nn whose layers return the shape of their input, and the layers in them that don't.
_SAME_SHAPE = [
    f"torch.nn.modules.{name}" for name in ("activation", "batchnorm", "dropout", "instancenorm", "normalization")
]
_OTHER_SHAPE = (nn.MultiheadAttention, nn.GLU)


def fit(new: Any, old: Any, call: Any = None, keys: tuple[Any, ...] = ()) -> Any:
    """Return `new` as a value that can replace `old`: of its type, broadcast to its shape, with every tensor copied.

    Args:
        call: The call in which `old` passes, for errors.
        keys: The subscripts that lead to `old`, for errors.
    """
    if isinstance(old, Tensor):
        return _fit_tensor(new, old)
    parts = children(old)
    if parts is None:
        return copy_all(_fit_array(new, old) if _is_array(old) else _of_its_kind(new, old))
    new_parts = children(new)
    if new_parts is None or len(new_parts) != len(parts) or isinstance(new, Mapping) != isinstance(old, Mapping):
        raise EditError(f"{describe(new)} given where {describe(old)} passes{_name_part(old, call, keys)}")
    if isinstance(old, Mapping) and new_parts.keys() != parts.keys():
        raise EditError(f"{describe(new)} given where {describe(old)} passes: the keys differ")
    if not isinstance(old, Mapping):
        new_parts = dict(zip(parts, new_parts.values(), strict=True))  # A value read from a file may have other keys.
    return rebuild(old, {key: fit(new_parts[key], part, call, (*keys, key)) for key, part in parts.items()})


def check_same_structure(new: Any, old: Any, call: Any = None, keys: tuple[Any, ...] = ()) -> None:
    """Raise unless `new` has the structure, types, shapes, dtypes and devices of `old`. Arguments as in `fit`."""
    if isinstance(old, Tensor):
        if not isinstance(new, Tensor):
            raise EditError(f"{describe(new)} given where {describe(old)} passes")
        if new.shape != old.shape:
            raise other_shape(new, old, "given")
        check_kind(new, old)
        return
    parts, new_parts = children(old), children(new)
    if parts is None:
        if not _is_array(old):
            _of_its_kind(new, old)
        elif not (_is_array(new) and (new.shape, new.dtype) == (old.shape, old.dtype)):
            raise EditError(f"{_described(new)} given where {_described(old)} passes")
        return
    if new_parts is None or type(new) is not type(old) or parts.keys() != new_parts.keys():
        hint = _name_part(old, call, keys)
        either = ", or return all of it" if hint else ""
        raise EditError(f"{describe(new)} given where {describe(old)} passes{hint}{either}")
    for key, part in parts.items():
        check_same_structure(new_parts[key], part, call, (*keys, key))


def _name_part(old: Any, call: Any, keys: tuple[Any, ...]) -> str:
    """Return a hint that names the first part of a container as a site; "" for an empty one."""
    first = [*fields(old), *(children(old) or ())][:1]
    if not first:
        return ""
    site = "" if call is None else call.site
    return f"; name the part to change, as in '{site}{''.join(map(subscript_text, (*keys, *first)))}'"


def _of_its_kind(new: Any, old: Any) -> Any:
    """Return `new` if it can replace an object: same type, a number or tensor for a number, anything for None."""
    are_numbers = isinstance(new, (Number, Tensor)) and isinstance(old, Number)
    fits = are_numbers and (isinstance(old, complex) or not isinstance(new, complex))
    if isinstance(new, bool) or isinstance(old, bool) or not are_numbers:
        fits = old is None or (isinstance(new, type(old)) and isinstance(new, bool) == isinstance(old, bool))
    if not fits:
        raise EditError(f"{describe(new)} given where {_named(old)} passes; check=False allows any value")
    return new


def _named(value: Any) -> str:
    return f"the {type(value).__name__} {value!r}" if isinstance(value, (Number, str)) else describe(value)


def _is_array(value: Any) -> bool:
    return type(value).__name__ == "ndarray"


def _described(value: Any) -> str:
    return f"an array of {value.dtype} {value.shape}" if _is_array(value) else describe(value)


def _fit_array(new: Any, old: Any) -> Any:
    """Return a number, or an array of the same dtype that broadcasts, as a numpy array that can replace `old`."""
    if _is_array(new) and new.dtype != old.dtype:
        raise EditError(f"{_described(new)} given where {_described(old)} passes; cast it with .astype('{old.dtype}')")
    if not _is_array(new):
        try:
            like = torch.from_numpy(old)
        except TypeError:  # A dtype that torch does not have.
            raise EditError(f"{describe(new)} given where {_described(old)} passes; give such an array") from None
        check_number(new, like, "a number or an array")
    filled = old.copy()
    try:
        filled[...] = new
    except ValueError:
        raise EditError(f"shape {new.shape} does not fit where {old.shape} passes") from None
    return filled


def _fit_tensor(new: Any, old: Tensor) -> Tensor:
    if not isinstance(new, (Tensor, int, float)) and isinstance(new, Number) and hasattr(new, "item"):
        new = new.item()  # A numpy scalar.
    check_fits(new, old)
    if isinstance(new, Tensor):
        # Not `copy_tensor`, whose copy may stay expanded: the model may write into what it gets.
        return (new if new.shape == old.shape else new.expand(old.shape)).clone()
    try:
        return torch.full_like(old, new, requires_grad=False)
    except (TypeError, NotImplementedError) as error:  # A subclass that torch can't fill, such as a MaskedTensor.
        kind = type(old).__name__
        raise EditError(f"{new!r} given where a {kind} passes, which torch can't fill; give a {kind}") from error


def as_returned(value: Any, module: nn.Module | None, first: Any, passed: Arguments) -> Any:
    """Return a value in the shape, dtype and device that a skipped module would return, where they are known, or raise.

    Args:
        first: The first argument of the call.
        passed: All arguments of the call.
    """
    plain = type(first) is Tensor and first.layout is torch.strided and not first.is_nested
    shape = _shape_returned(module, first, passed) if plain else None
    if shape is not None and module is not None:
        dtype, device = _kind_returned(value, [first, *module.parameters()])
        return fit(value, torch.empty(shape, dtype=dtype, device=device))
    what = "this call" if module is None else type(module).__name__
    if isinstance(first, Tensor) and (value is None or callable(value)):
        raise EditError(
            f"{describe(value)} given as the output of {what}; leave it out to pass the input on, give a tensor, or "
            "check=False"
        )
    if isinstance(first, Tensor) and isinstance(value, Number):
        raise EditError(
            f"{value!r} given as the output of {what}, whose shape is not known before it runs; give a tensor, or "
            "check=False"
        )
    return copy_all(value)


def _kind_returned(value: Any, sources: list[Tensor]) -> tuple[torch.dtype, torch.device]:
    """Return the dtype and device of a layer's output: those of `value`, if the layer's input or a weight has them too.

    A norm may return the dtype of its input or of its weights. Code that moves layers between devices may leave the
    output on either device. Autocast, and layers that take integers, choose the dtype themselves.
    """
    devices = [source.device for source in sources]
    dtypes = [source.dtype for source in sources if _is_float_or_complex(source)]
    if not isinstance(value, Tensor):
        return (dtypes[0] if dtypes else sources[0].dtype), devices[0]
    device = value.device if value.device in devices else devices[0]
    casts = device.type != "meta" and torch.is_autocast_enabled(device.type)
    is_free = not dtypes or value.dtype in dtypes or casts
    return (value.dtype if is_free else dtypes[0]), device


def _is_float_or_complex(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _shape_returned(module: nn.Module | None, first: Tensor, passed: Arguments) -> tuple[int, ...] | None:
    """Return the shape of the output of a layer of torch.nn for these arguments; None if only a real run can tell."""
    shape = tuple(first.shape)
    if type(module) is nn.Sequential:
        for child in module:
            between = torch.empty(shape, dtype=first.dtype, device="meta")
            is_known = wraps_own(child.__dict__.get("forward"), child)
            found = _shape_returned(child, between, ((between,), {})) if is_known else None
            if found is None:
                return None
            shape = found
        return shape
    kind = type(module)
    if module is None or not kind.__module__.startswith("torch.nn.modules.") or module._modules:
        return None
    # The layers that are skipped most often need no run: a run on meta tensors takes longer than the layer itself.
    if kind is nn.Linear:
        return (*shape[:-1], module.out_features)  # type: ignore[arg-type]
    if kind is nn.Embedding:
        return (*shape, module.embedding_dim)  # type: ignore[arg-type]
    if kind.__module__ in _SAME_SHAPE and kind not in _OTHER_SHAPE:
        return shape
    with torch.no_grad(), unseen_by_modes_and_subclasses(), unseen_by_dispatch_modes():
        try:
            args, kwargs = map_tensors(lambda tensor: _without_numbers(module, tensor), passed)
            output = type(module).forward(_without_data(module), *args, **kwargs)
        except Exception:  # For example, the layer does not take these arguments.
            return None
    return tuple(output.shape) if isinstance(output, Tensor) else None


def wraps_own(forward: Any, module: nn.Module) -> bool:
    """Return True if `forward`, from the instance's `__dict__`, is None or a wrapper of the class's forward."""
    own = type(module).forward
    held = own if forward is None else inspect.unwrap(forward)
    return getattr(held, "__func__", held) in (own, inspect.unwrap(own))


def _without_data(module: nn.Module) -> nn.Module:
    """Return an unhooked copy of a layer with meta tensors, which have no data: running it computes only shapes."""
    bare = object.__new__(type(module))
    names = {name: held for name, held in module.__dict__.items() if not isinstance(held, MethodType)}
    for table in ("_parameters", "_buffers"):
        names[table] = {
            name: None if held is None else torch.empty_like(held, device="meta") for name, held in names[table].items()
        }
    bare.__setstate__(names)
    return bare


def _without_numbers(module: nn.Module, given: Tensor) -> Tensor:
    """Return a meta tensor of the same shape, in the dtype that the layer computes in."""
    dtypes = [one.dtype for one in module.parameters() if _is_float_or_complex(one)]
    dtype = dtypes[0] if dtypes and _is_float_or_complex(given) else given.dtype
    return torch.empty(tuple(given.shape), dtype=dtype, device="meta")


def returns_another_structure(module: nn.Module, first: Any) -> str:
    """Say how the module's output is known to differ in structure from its input; return "" if it is not known to."""
    name = type(module).__name__
    if isinstance(module, (nn.RNNBase, nn.MultiheadAttention)):
        return f"{name} returns a tuple, not a tensor like its input"
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return f"{name} returns vectors, not the indices it takes"
    if isinstance(module, nn.Linear) and module.in_features != module.out_features:
        return f"{name} takes {module.in_features} features and returns {module.out_features}"
    if isinstance(module, AnyConvolution):
        strided = any(step != 1 for step in module.stride)
        if strided or module.in_channels != module.out_channels:
            return (
                f"{name} takes {module.in_channels} channels and returns {module.out_channels}, stride {module.stride}"
            )
    if isinstance(module, (nn.Flatten, nn.Unflatten, AnyMaxPool, AnyAvgPool)):
        return f"{name} returns another shape than that of its input"
    annotation = str(getattr(type(module).forward, "__annotations__", {}).get("return", ""))
    if annotation.lower().removeprefix("typing.").startswith("tuple") and not isinstance(first, tuple):
        return f"{name}.forward is declared to return {annotation}, and takes {describe(first)}"
    return ""
