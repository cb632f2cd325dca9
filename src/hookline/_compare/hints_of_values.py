"""Reasons that show in values: a simple relation of two outputs, or what a module or a function inside gets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hookline._compare.apart import OtherShape, apart
from hookline._compare.compared_attention import find_pattern, how_masks_differ, how_patterns_differ, result_with
from hookline._compare.filled_inputs import Filled
from hookline._compare.hints_of_settings import NUMBERS
from hookline._compare.paired_values import Paired, tensors_of
from hookline._compare.relations import relation
from hookline._compare.rounding import Limit
from hookline._compare.suspect import Hint, Suspect

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu (exact)": F.gelu,
    "gelu (tanh)": lambda x: F.gelu(x, approximate="tanh"),
    "gelu (quick, x * sigmoid(1.702 x))": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": F.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "relu squared": lambda x: F.relu(x).square(),
    "identity": lambda x: x,
}


def other_activation(suspect: Suspect) -> str | None:
    """Find out which activation each of two modules without weights computes."""
    if any(True for _ in suspect.a.parameters()):
        return None
    inputs = tensors_of(suspect.inputs)
    outputs = [tensors_of(one) for one in suspect.convert(suspect.of_b)]
    names = [_name_of_activation(inputs[0], output[0], suspect.main_limit) for output in outputs]
    return f"a computes {names[0]}, and b {names[1]}" if all(names) and names[0] != names[1] else None


def _name_of_activation(given: Tensor, output: Tensor, limit: Limit) -> str:
    for name, function in ACTIVATIONS.items():
        if output.shape == given.shape and limit.covers(apart(output, function(given))):
            return name
    return ""


def other_output(suspect: Suspect) -> str | None:
    """Look for a simple relation between the outputs, in the part that is off."""
    paired = Paired(*suspect.convert(suspect.of_b)).pairs
    off = [place for place, pair in paired.items() if not torch.equal(pair.a, pair.b.to(pair.a))]
    if len(off) != 1 or off[0] not in suspect.limits:
        return None
    norm = [getattr(suspect.a, name, None) for name in ("weight", "bias")]
    others: dict[str, Any] = {"the input": suspect.inputs}
    with suppress(Exception):
        others |= suspect.passing_in_a
        others |= {site: one for site, one in suspect.passing_in_b.items() if site not in suspect.passing_in_a}
    vectors = [one for one in norm if isinstance(one, Tensor)]
    text = relation(*paired[off[0]], others, vectors, suspect.limits[off[0]])
    return f"a's output{off[0]} is {text}" if text else None


def other_inputs(suspect: Suspect) -> Hint | None:
    """Say in which way the first module inside that gets something else gets it.

    Tested by giving it what it gets in a.
    """
    found = _first_other_inputs(suspect)
    if found is None:
        return None
    site, pair, before = found
    text = _activation_between(suspect, *pair)
    if text:
        return Hint(text, suspect.as_in_b(site))
    name = site.removesuffix(":inputs")
    text = _only_in_a(suspect, pair[0]) or relation(*pair, before, (), suspect.near(pair[0]))
    if text:
        return Hint(f"what {name!r} gets in a is {text}", suspect.as_in_b(site))
    text = _only_in_b(suspect, pair[1])
    return Hint(f"what {name!r} gets in b is {text}", suspect.as_in_b(site)) if text else None


def other_inputs_somehow(suspect: Suspect) -> Hint | None:
    """Name the first module inside that gets something else."""
    found = _first_other_inputs(suspect)
    if found is None:
        return None
    return Hint(f"{found[0].removesuffix(':inputs')!r} gets something else", suspect.as_in_b(found[0]))


def _first_other_inputs(suspect: Suspect) -> tuple[str, tuple[Tensor, Tensor], dict[str, Any]] | None:
    """Return the first module inside that gets something else, though those before it returned the same.

    That is the site of its inputs, what it gets in a and b, and all that passed in a before. None if another place is
    the first that differs, or if the module returns something else on a's inputs too.
    """
    in_b = suspect.passing_in_b
    before: dict[str, Any] = {"the input": suspect.inputs}
    for site, from_a in suspect.passing_in_a.items():
        if site in in_b and not _is_same(suspect, from_a, in_b[site], len(before)):
            pairs = zip(tensors_of(from_a), tensors_of(in_b[site]), strict=False)
            pair = next(pair for pair in pairs if not torch.equal(*pair))
            is_why = site.endswith(":inputs") and _explained_before(suspect, site, from_a, pair, in_b)
            return (site, pair, before) if is_why else None
        before[site] = from_a
    return None


def _is_same(suspect: Suspect, from_a: Any, from_b: Any, places_before: int) -> bool:
    """Return True if two values are equal, up to the rounding that adds up over so many places."""
    try:
        near = suspect.near(from_a).times(places_before**0.5)
        return not tensors_of(from_b) or near.covers(apart(from_a, from_b))
    except OtherShape:
        return False


def _activation_between(suspect: Suspect, in_a: Tensor, in_b: Tensor) -> str:
    """Say that b computes another activation, by a function, where a has a module."""
    given = tensors_of(suspect.inputs_of(suspect.innermost(in_a)))[:1]
    names = [_name_of_activation(one, value, suspect.near(value)) for one in given for value in (in_a, in_b)]
    are_known = len(set(names) - {"", "identity"}) == 2  # If b computes nothing there, the module is missing.
    return f"a computes {names[0]}, and b {names[1]}" if are_known else ""


def _only_in_a(suspect: Suspect, given: Tensor) -> str:
    """Say that a tensor is the output of a module of a that b does not have."""
    site = suspect.innermost(given)
    return f"the output of {site!r}, which b does not have" if site and not suspect.has(site) else ""


def _only_in_b(suspect: Suspect, given: Tensor) -> str:
    """Say that a tensor is the output of a module of b that a does not have."""
    site = _returned_by(given, suspect.passing_in_b)
    a_has = {*suspect.passing_in_a, *suspect.names}
    return f"the output of {site!r}, which a does not have" if site and site not in a_has else ""


def _explained_before(
    suspect: Suspect, site: str, inputs: Any, pair: tuple[Tensor, Tensor], in_b: Mapping[str, Any]
) -> bool:
    """Return True if it explains the error that a module inside gets something else."""
    if suspect.explained_at(suspect.as_in_b(site), Filled(inputs, in_b[site], None).inputs):
        return True
    # What the module gets may go elsewhere too, as into a residual connection: then its source has to be replaced.
    for source, value in in_b.items():
        whole, tensors = isinstance(value, Tensor), tensors_of(value)[:1]
        if not source.endswith(":inputs") and tensors and torch.equal(tensors[0], pair[1]):
            place = suspect.as_in_b(source)
            return suspect.explained_at(place if whole else f"{place}[0]", pair[0])
    for function, result in suspect.results_in_b.items():
        if isinstance(result.get("output"), Tensor) and torch.equal(result["output"], pair[1]):
            return suspect.explained_at(function, pair[0])
    return False


def other_attention(suspect: Suspect, must_know: bool = True) -> Hint | None:
    """Compare the attention patterns of two modules, which may use other functions to compute them.

    Tested by putting a's pattern into b's module.
    """
    in_b = suspect.results_in_b
    found = [find_pattern(one) for one in (suspect.results_in_a, in_b)]
    if found[0] is None or found[1] is None:
        return None
    (_, from_a), (site, from_b) = found[0], found[1]
    if not must_know and from_a.shape == from_b.shape and torch.equal(from_a, from_b):
        return None
    text = how_patterns_differ(from_a, from_b, suspect.near(from_a).largest)
    text = text or ("" if must_know else "the patterns of attention differ, and with a's the error is gone")
    if not text or not suspect.explained_at(site, result_with(from_a, in_b[site])):
        return None
    return Hint(f"in {site}, {text}", site)


def other_pattern(suspect: Suspect) -> Hint | None:
    return other_attention(suspect, must_know=False)


def other_function(suspect: Suspect) -> Hint | None:
    """Find the first function inside the module's own forward whose results part, though those before are equal.

    Tested by putting a's result into b's module.
    """
    in_a, in_b = suspect.results_in_a, suspect.results_in_b
    for name, from_a in in_a.items():
        if name not in in_b:
            return None
        try:
            error = apart(from_a["output"], in_b[name]["output"])
        except OtherShape:
            return None
        if suspect.near(from_a["output"]).covers(error):
            continue
        if not suspect.explained_at(name, from_a["output"]):
            return None
        sources = _sources(suspect, from_a["inputs"], in_b[name]["inputs"])
        if sources is not None and sources[0] == sources[1]:
            return None  # That module inside is why.
        if sources is not None:
            return Hint(f"{name} gets the output of {sources[0]!r} in a, and that of {sources[1]!r} in b", name)
        return Hint(_words(name, from_a, in_b[name], suspect.near(from_a["output"])), name)
    return None


def _sources(suspect: Suspect, from_a: Mapping[str, Any], from_b: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the modules inside a and b that gave a function an argument which differs."""
    for key, value in from_a.items():
        other = from_b.get(key)
        if isinstance(value, Tensor) and isinstance(other, Tensor) and not _are_near(value, other, suspect.near(value)):
            sources = _returned_by(value, suspect.passing_in_a), _returned_by(other, suspect.passing_in_b)
            if all(sources):
                return sources
    return None


def _returned_by(value: Any, inside: Mapping[str, Any]) -> str:
    """Return the site of a module inside that returned a tensor; "" if none did."""
    if not isinstance(value, Tensor):
        return ""
    sites = [site for site in inside if not site.endswith(":inputs")]
    return next((site for site in sites if any(torch.equal(value, one) for one in tensors_of(inside[site]))), "")


def _words(name: str, in_a: Mapping[str, Any], in_b: Mapping[str, Any], limit: Limit) -> str:
    """Say how the results of a function differ."""
    from_a, from_b = tensors_of(in_a["output"]), tensors_of(in_b["output"])
    masks = [tensors_of(one) for one in (in_a["inputs"], in_b["inputs"])]
    text = how_masks_differ(from_a[0], from_b[0]) or next(filter(None, map(how_masks_differ, *masks)), "")
    if text:
        return f"in {name}, {text}"
    text = relation(from_a[0], from_b[0], {"the input": in_a["inputs"]}, (), limit)
    if text:
        return f"in {name}, a's result is {text}"
    texts = [
        f"{key} is {given!r} in a and {in_b['inputs'][key]!r} in b"
        for key, given in in_a["inputs"].items()
        if isinstance(given, (*NUMBERS, type(None))) and in_b["inputs"].get(key, given) != given
    ]
    text = "; ".join(texts)
    given = tensors_of(in_a["inputs"])
    if not text and given:
        names = [_name_of_activation(given[0], one[0], limit) for one in (from_a, from_b)]
        text = f"a computes {names[0]}, and b {names[1]}" if all(names) and names[0] != names[1] else ""
    if text:
        return f"in {name}, {text}"
    other = [key for key, given in in_a["inputs"].items() if not _are_near(given, in_b["inputs"].get(key), limit)]
    if other:
        return f"{name} gets another {other[0]!r} in b, and with a's result the error is gone"
    return f"{name} returns something else on the same inputs, and with a's result the error is gone"


def _are_near(value: Any, other: Any, limit: Limit) -> bool:
    try:
        return not tensors_of(value) or limit.covers(apart(value, other))
    except OtherShape:
        return False
