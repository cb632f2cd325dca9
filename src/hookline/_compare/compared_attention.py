"""Attention patterns, as `softmax` returns them or `scaled_dot_product_attention` computes them, and how two differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hookline._compare.relations import number_in_words
from hookline._compare.weight_differences import order_of_rows

Result = Mapping[str, Any]  # The inputs and the output of a function.
_FUSED = "scaled_dot_product_attention"


def find_pattern(results: Mapping[str, Result]) -> tuple[str, Tensor] | None:
    """Return the first attention pattern among the results of functions, and the site of its function."""
    for site, result in results.items():
        name, output = site.rpartition("/")[2].partition("#")[0], result.get("output")
        if name == "softmax" and isinstance(output, Tensor) and output.dim() >= 3:
            return site, output
        if name == _FUSED:
            return site, _computed(result["inputs"])
    return None


def _computed(inputs: Mapping[str, Any]) -> Tensor:
    """Return the pattern that the fused function computes inside."""
    query: Tensor = inputs["query"]
    key, mask = _repeated(inputs["key"], query), inputs.get("attn_mask")
    scale = inputs.get("scale")
    scores: Tensor = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if inputs.get("is_causal"):
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return scores.softmax(-1)


def _repeated(shared: Tensor, query: Tensor) -> Tensor:
    """Return keys or values for each head, where several heads share one."""
    return shared.repeat_interleave(query.shape[-3] // shared.shape[-3], -3) if query.dim() > 3 else shared


def result_with(pattern: Tensor, result: Result) -> Tensor:
    """Return what a function would return if it had this pattern."""
    if result["inputs"].get("query") is None:
        return pattern.to(result["output"])
    query, value = result["inputs"]["query"], result["inputs"]["value"]
    return pattern.to(value) @ _repeated(value, query)


def how_patterns_differ(in_a: Tensor, in_b: Tensor, near: float) -> str:
    """Say how two attention patterns differ: in their mask, their heads or their scale; "" if in another way."""
    if in_a.shape != in_b.shape:
        return ""
    one, two = in_a.to("cpu", torch.float64), in_b.to("cpu", torch.float64)
    text = how_masks_differ(in_a, in_b)
    if text:
        return text
    order = order_of_rows(one.movedim(-3, 0).flatten(1), two.movedim(-3, 0).flatten(1), near)
    if order is not None:
        return "the heads are in another order"
    scale = _scale(one, two)
    return "" if scale is None or abs(scale - 1) < 1e-4 else f"a's scores are {number_in_words(scale)} times b's"


def _scale(one: Tensor, two: Tensor) -> float | None:
    """Return the factor between the scores of two patterns, which are known up to a constant for each row."""
    seen = (one > 0) & (two > 0)
    scores = []
    for pattern in (one, two):
        logs = pattern.log().masked_fill(~seen, 0.0)
        mean = logs.sum(-1, keepdim=True) / seen.sum(-1, keepdim=True).clamp(min=1)
        scores.append((logs - mean).masked_fill(~seen, 0.0))
    from_a, from_b = scores
    if not from_b.any():
        return None
    scale = ((from_a * from_b).sum() / from_b.square().sum()).item()
    return scale if (from_a - scale * from_b).norm() <= 1e-2 * from_a.norm() else None


def how_masks_differ(in_a: Tensor, in_b: Tensor) -> str:
    """Say how far positions attend ahead, if these are masks, or attention patterns with other masks."""
    if (
        in_a.dim() < 2 + (in_a.shape[-2] != in_a.shape[-1])
        or in_a.shape != in_b.shape
        or in_a.shape[-2] < 2
        or in_a.shape[-1] < 2
    ):
        return ""
    seen = [_seen(one) for one in (in_a, in_b)]
    if seen[0] is None or seen[1] is None or torch.equal(seen[0], seen[1]):
        return ""
    ahead = [_ahead(one) for one in seen if one is not None]
    if ahead[0] == ahead[1]:
        return "the masks differ: other positions are seen in a and in b"
    last = in_a.shape[-1] - 1
    for side, other, (mine, one) in (("a", "b", ahead), ("b", "a", ahead[::-1])):
        if mine == last and one == 0:
            return f"{side} has no causal mask, and {other} has one"
    seen_ahead = ["none" if one <= 0 else f"the next {one}" for one in ahead]
    off = abs(ahead[0] - ahead[1])
    return (
        f"of later positions, a position sees {seen_ahead[0]} in a and {seen_ahead[1]} in b: the mask is off by {off}"
    )


def _seen(value: Tensor) -> Tensor | None:
    """Return which positions see which: in a mask, in scores to which a mask was added, or in an attention pattern."""
    if value.dtype == torch.bool:
        return value
    if not value.is_floating_point():
        return None
    hidden = value <= torch.finfo(value.dtype).min / 2
    if hidden.any():
        return ~hidden
    is_pattern = value.min() >= 0 and torch.allclose(value.sum(-1), torch.ones(()).to(value), atol=1e-2)
    return value > 0 if is_pattern else None


def _ahead(seen: Tensor) -> int:
    places = seen.reshape(-1, *seen.shape[-2:]).any(0).nonzero()
    return int((places[:, 1] - places[:, 0]).max()) if len(places) else 0
