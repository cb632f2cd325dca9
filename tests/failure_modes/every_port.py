"""Compare a model with hooks at every port of every module with the same model without hookline: nothing may differ."""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import hookline as hl
from hookline._kernel import leaves
from tests.support.architectures import again, inputs_of, model_of, names

PORTS = ("output", "input", "inputs", "grad_output", "grad_input", "grad_inputs")


def outcome(model: nn.Module, inputs: dict[str, Any], generates: bool) -> dict[str, Any]:
    """Run a model, and again for the next token with the cache it returned; return everything that a caller can see."""
    torch.manual_seed(0)
    model.zero_grad()
    output = model(**inputs)
    cache = output.get("past_key_values") if isinstance(output, dict) else None
    if generates and cache is not None and "decoder_input_ids" not in inputs and "input_ids" in inputs:
        later = model(**{**inputs, "input_ids": inputs["input_ids"][:, -1:], "past_key_values": cache})
        output = {"first": output, "later": later, "is_same_cache": later.get("past_key_values") is cache}
    _loss(output).backward()
    return {
        "outputs": output,
        "arguments": inputs,
        "random numbers": torch.get_rng_state(),
        "buffers": dict(model.named_buffers()),
        "gradients": {name: one.grad for name, one in model.named_parameters()},
    }


def open_every_port(hooks: hl.Hooks) -> None:
    """Capture every value and every gradient at every module, and at the model itself."""
    hooks.capture(*[place for port in PORTS for place in (f"**:{port}", f":{port}")], keep="all")


def differences(
    model: nn.Module, inputs: dict[str, Any], add: Callable[[hl.Hooks], object] = open_every_port
) -> list[str]:
    """Return the differences between a run with the hooks that `add` adds and a run without hookline."""
    generates = _can_generate(model, inputs)
    bare = _snapshot(outcome(copy.deepcopy(model), again(inputs), generates))
    model = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hl.HooklineWarning)  # For modules never called, and for integers.
        hooks = hl.Hooks(model, active=False)
        add(hooks)
        with hooks.when_missing("ignore"):
            seen = _snapshot(outcome(model, again(inputs), generates))
        hooks.remove()
    return [f"{part}: {why}" for part in bare for why in _compare(bare[part], seen[part], part == "gradients")]


def _can_generate(model: nn.Module, inputs: dict[str, Any]) -> bool:
    """Return True if a backward through two forwards with one cache works; some models overwrite the cache."""
    try:
        outcome(copy.deepcopy(model), again(inputs), generates=True)
        return True
    except (RuntimeError, ValueError):
        return False


def _snapshot(result: dict[str, Any]) -> dict[str, Any]:
    return {part: (_shape(value), [numbers_in(one) for one in leaves(value)]) for part, value in result.items()}


def numbers_in(tensor: Tensor) -> Tensor:
    """Return the numbers of a tensor of any kind as a plain one."""
    tensor = tensor.detach()
    if type(tensor).__name__ == "MaskedTensor":
        return tensor.get_data() * tensor.get_mask()  # type: ignore[attr-defined, no-any-return]
    if tensor.is_nested:
        return tensor.values().clone()
    if tensor.layout is not torch.strided:
        return tensor.to_dense()
    return tensor.dequantize() if tensor.is_quantized else tensor.clone()


def _shape(value: Any) -> Any:
    """Return the structure of a value: types, keys and numbers, without the contents of its tensors."""
    if isinstance(value, Tensor):
        return "tensor"
    if isinstance(value, dict):
        return type(value).__name__, {key: _shape(part) for key, part in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value).__name__, [_shape(part) for part in value]
    return value if isinstance(value, (bool, int, float, str)) else type(value).__name__


def _compare(bare: Any, seen: Any, roughly: bool) -> list[str]:
    if bare[0] != seen[0]:
        return [f"another structure: {bare[0]} and {seen[0]}"]
    if len(bare[1]) != len(seen[1]):
        return [f"{len(bare[1])} tensors and {len(seen[1])}"]
    found = []
    for number, (one, other) in enumerate(zip(bare[1], seen[1], strict=True)):
        if one.shape != other.shape or one.dtype != other.dtype or one.stride() != other.stride():
            found.append(
                f"tensor {number}: {tuple(one.shape)} and {tuple(other.shape)}, {one.stride()} {other.stride()}"
            )
        elif roughly and not torch.allclose(one, other, rtol=1e-3, atol=1e-6, equal_nan=True):
            found.append(f"tensor {number} differs by {(one - other).abs().max():.1e}")
        elif not roughly and not torch.equal(one.nan_to_num(), other.nan_to_num()):
            found.append(f"tensor {number} differs by {(one.double() - other.double()).abs().max():.1e}")
    return found


def main() -> None:
    """Test the named architectures, or every one that can be built small."""
    wanted = sys.argv[1:] or names()
    right = built = 0
    for name in wanted:
        try:
            model = model_of(name)
            inputs = inputs_of(model)
            outcome(copy.deepcopy(model), again(inputs), generates=False)
        except Exception:  # The config does not allow small sizes.
            continue
        built += 1
        found = differences(model, inputs)
        right += not found
        for one in found[:3]:
            print(f"{name}: {one}")  # noqa: T201
    print(f"{right} of {built} architectures are right with every port open")  # noqa: T201
    sys.exit(right != built)


def _loss(value: Any) -> Tensor:
    plain = [one for one in leaves(value) if one.requires_grad and type(one).__name__ != "MaskedTensor"]
    plain = [one.values() if one.is_nested else one for one in plain]
    plain = [one.to_dense() if one.layout is not torch.strided else one for one in plain]
    terms = [(one.abs() if one.is_complex() else one).float().nan_to_num().square().mean() for one in plain]
    return torch.stack(terms).sum() if terms else torch.zeros((), requires_grad=True)


if __name__ == "__main__":
    main()
