"""Likely reasons why a module of b does something else than that of a. Each is tested before it is given.

A reason is a change of b's module, such as another epsilon or a weight of a's in it. It is given if the module, with
that change and the same inputs, returns what a's module returns, up to rounding.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hookline import Hooks, Site
from hookline._compare.apart import MeasuredPart, OtherShape, apart, difference, largest_element
from hookline._compare.compared_attention import find_pattern, how_masks_differ, how_patterns_differ, result_with
from hookline._compare.filled_inputs import Filled
from hookline._compare.paired_values import Paired, tensors_of
from hookline._compare.random_numbers import RandomState
from hookline._compare.recording import ModuleCall
from hookline._compare.relations import LEFT, relation
from hookline._compare.rounding import Limit, cast, copied, run_alone, run_in, uncovered
from hookline._compare.weights import EQUAL, ROUNDED, difference_of
from hookline._kernel import is_container, leaves, map_tensors, short_form
from hookline._scan.restore_modules import buffers_as_found, left_as_found
from hookline._torch import AnyDropout
from hookline.errors import HooklineWarning, NeverFired

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
Results = dict[str, dict[str, Any]]  # The inputs and the output of each function, by site.
_NUMBERS = (bool, int, float, str)
_NEAR = 16  # The results of a function are the same if elements are so many units in the last place apart,
_NEAR_SHARE = 4  # and if all of them are so many apart, as a share.


@dataclass
class Suspect:
    """A module of b that returns something else than its counterpart in a, given the same inputs."""

    a: nn.Module
    b: nn.Module
    inputs: Mapping[str, Any]  # What a's module got.
    given: Mapping[str, Any]  # The same, as b's module takes it.
    of_a: Any  # What a's module returned,
    of_b: Any  # and what b's did.
    limits: Mapping[str, Limit]  # The largest errors that rounding may make, of each part of the output.
    convert: Callable[[Any], tuple[Any, Any]]  # Returns a's output and an output of b in the same layout.
    owner: Callable[[Tensor], str] = lambda _: ""  # Returns the name of a's parameter that has these numbers.
    random: RandomState | None = None  # The random numbers with which a's module began.
    innermost: Callable[[Tensor], str] = lambda _: ""  # Returns the innermost module inside a's that returned a tensor.
    names: Mapping[str, str] = field(default_factory=dict)  # The paths of modules inside a's, and those of their pairs.

    moved: Mapping[str, str] = field(default_factory=dict)  # Weights of a that are elsewhere in b: where they are.

    @cached_property
    def changeable(self) -> nn.Module:
        """A copy of b's module, which is changed, run and changed back."""
        return copied(self.b)

    @cached_property
    def can_run_alone(self) -> bool:
        """Whether b's module returns what it did if it runs by itself. If not, no change of it can be tested."""
        return self.are_same(self.of_b, self.convert(self._run(self.changeable))[1])

    @cached_property
    def passing_in_a(self) -> dict[str, Any]:
        """What passes inside a's module, by site."""
        return passing_inside(self.a, self.inputs, self.names, self.random)

    @cached_property
    def passing_in_b(self) -> dict[str, Any]:
        """What passes inside b's module on the same inputs. Modules that are paired have the names of a."""
        inside = passing_inside(self.b, self.given, self.names.values(), self.random)
        return {self.as_in_a(site): value for site, value in inside.items()}

    def has(self, name: str) -> bool:
        """Return True if b has a module that stands for one inside a's."""
        return name in self.names or any(True for path in self.names if path.startswith(f"{name}."))

    def as_in_a(self, site: str) -> str:
        """Return what a site inside b's module is called in a; where a has none, its name and "of b" if a has that."""
        name, colon, port = site.partition(":")
        of_a = next((path for path, other in self.names.items() if other == name), None)
        if of_a is None:
            of_a = f"{name} of b" if name in self.names else name
        return f"{of_a}{colon}{port}"

    def as_in_b(self, site: str) -> str:
        """Return what a site is called in b."""
        name, colon, port = site.partition(":")
        return f"{self.names.get(name, name).removesuffix(' of b')}{colon}{port}"

    @cached_property
    def results_in_a(self) -> Results:
        """What the functions get and return that a's module calls itself."""
        return _results(self.a, self.inputs, self.random)

    @cached_property
    def results_in_b(self) -> Results:
        """What the functions get and return that b's module calls itself."""
        return _results(self.b, self.given, self.random)

    @property
    def main_limit(self) -> Limit:
        """The largest error of the first tensor of the output."""
        return next(iter(self.limits.values()))

    def near(self, value: Any) -> Limit:
        """How far the results of one function may be apart."""
        eps = [torch.finfo(one.dtype).eps for one in tensors_of((self.of_a, self.of_b)) if one.is_floating_point()]
        unit = max(eps, default=1e-7)
        return Limit(_NEAR * unit * largest_element(value), _NEAR_SHARE * unit)

    def are_same(self, value: Any, other: Any) -> bool:
        """Return True if two outputs are equal, up to rounding."""
        try:
            parts = difference(value, other).parts
        except OtherShape:
            return False
        return uncovered({name: part for name, part in parts.items() if name in self.limits}, self.limits) is None

    def explains(self, output: Any) -> bool:
        """Return True if an output is what a's module returns, up to rounding, and clearly nearer than that of b."""
        value, other = self.convert(output)
        if not self.are_same(value, other):
            return False
        parts = difference(value, other).parts
        before = {name: part.error.relative for name, part in self.parts.items() if name in parts}
        return all(parts[name].error.relative <= LEFT * error for name, error in before.items() if self.is_off(name))

    @cached_property
    def parts(self) -> Mapping[str, MeasuredPart]:
        """How far the parts of b's output are from a's."""
        return difference(*self.convert(self.of_b)).parts

    def is_off(self, part: str) -> bool:
        """Return True if rounding does not explain the error of a part of the output."""
        return part in self.limits and not self.limits[part].covers(self.parts[part].error)

    def explained_by(self, module: nn.Module) -> bool:
        """Return True if a changed copy of b's module returns what a's module does."""
        try:
            return self.explains(self._run(module))
        except Exception:
            return False

    def _run(self, module: nn.Module) -> Any:
        dtypes = {one.dtype for one in module.parameters() if one.is_floating_point()}
        given = cast(self.given, *dtypes) if len(dtypes) == 1 else map_tensors(torch.clone, self.given, in_objects=True)
        with left_as_found(module), buffers_as_found(module):
            return run_alone(module, given, random=self.random)


@dataclass
class Hint:
    """A reason in words, and the function inside the module at which it was found, if it was."""

    text: str
    function: str = ""


def hint_for(suspect: Suspect) -> Hint | None:
    """Return the first reason that holds when it is tested."""
    can_run = False
    with suppress(Exception):
        can_run = suspect.can_run_alone
    for find in _REASONS:
        if not can_run and find not in _WITHOUT_A_RUN:
            continue
        with suppress(Exception):  # A test of a reason is a run that nobody asked for.
            found = find(suspect)
            if found is not None:
                return found if isinstance(found, Hint) else Hint(found)
    return None


def _training(suspect: Suspect) -> str | None:
    for name, module in (("b", suspect.b), ("a", suspect.a)):
        active = [one for one in module.modules() if isinstance(one, AnyDropout) and one.training and one.p > 0]
        if not active and not (module.training and _drops(module)):
            continue
        if name == "b" and suspect.explained_by(copied(module).eval()):
            return "dropout is on in b, which is in train mode: call b.eval()"
        if name == "a":
            output = run_alone(copied(module).eval(), map_tensors(torch.clone, suspect.inputs, in_objects=True))
            if suspect.are_same(output, suspect.convert(suspect.of_b)[1]):
                return "dropout is on in a, which is in train mode: call a.eval()"
    if suspect.a.training != suspect.b.training:
        changed = copied(suspect.b).train(suspect.a.training)
        if suspect.explained_by(changed):
            return f"b is in {'train' if suspect.b.training else 'eval'} mode, and a is not"
    return None


def _drops(module: nn.Module) -> bool:
    rates = [held for name, held in vars(module).items() if "drop" in name and isinstance(held, float)]
    return any(0 < rate < 1 for rate in rates)


def _weights(suspect: Suspect) -> str | None:
    """Put weights of a into a copy of b's module."""
    in_a = {**dict(suspect.a.named_parameters()), **dict(suspect.a.named_buffers())}
    in_b = {**dict(suspect.b.named_parameters()), **dict(suspect.b.named_buffers())}
    pairs = [name for name in in_a if name in in_b]
    differing = {}
    for name in pairs:
        kind, what = difference_of(in_a[name], in_b[name])
        if kind not in (EQUAL, ROUNDED):
            differing[name] = what
    for names in [*([name] for name in differing), list(differing)]:
        if names and _explained_with(suspect, {name: in_a[name] for name in names}):
            said = {name: _in_words(suspect, name, in_a[name], in_b[name], differing[name]) for name in names[:4]}
            return "; ".join(f"{name}: {words}" for name, words in said.items())
    for name in pairs:  # Another class may hold the same weight transposed.
        is_own = "." not in name and in_a[name].dim() == 2
        if is_own and _explained_with(suspect, {name: in_a[name].T}):
            return f"{name}: transposed"
    return None


def _moved(suspect: Suspect) -> str | None:
    """Let the weights of b that hold numbers of other weights of a change places."""
    in_a = dict(suspect.a.named_parameters())
    in_b = dict(suspect.b.named_parameters())
    # Where one is, another one belongs: that which the order of a's weights in b gives.
    places = [other for other in in_b if other in suspect.moved.values()]
    names = [name for name in in_a if name in suspect.moved]
    if (
        len(names) < 2
        or len(names) != len(places)
        or not _explained_with(suspect, {place: in_a[name] for place, name in zip(places, names, strict=True)})
    ):
        return None
    return "; ".join(f"the numbers of {name!r} are in {suspect.moved[name]!r} of b" for name in names[:4])


def _explained_with(suspect: Suspect, weights: Mapping[str, Tensor]) -> bool:
    """Return True if b's module does what a's does with these weights, in its own dtype or in theirs."""
    module = suspect.changeable
    if any(weight.shape != _held(module, name).shape for name, weight in weights.items()):
        return False
    with _put(module, weights):
        if suspect.explained_by(module):
            return True
    own = {_held(module, name).dtype for name in weights}
    for dtype in {one.dtype for one in weights.values()} - own:
        changed = copied(suspect.b, dtype)
        with _put(changed, weights):
            if suspect.explained_by(changed):
                return True
    return False


def _in_words(suspect: Suspect, name: str, in_a: Tensor, in_b: Tensor, what: str) -> str:
    """Say how a weight differs."""
    is_constant = bool(in_b.min() == in_b.max())
    other = suspect.owner(in_b.detach()) if "%" in what and not is_constant else ""
    return _base(name, in_a, in_b) or (f"it is that of {other!r} in a" if other else what)


def _held(module: nn.Module, name: str) -> Tensor:
    path, _, own = name.rpartition(".")
    held: Tensor = getattr(module.get_submodule(path), own)
    return held


@contextmanager
def _put(module: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Write weights of a into a module of b, for a while."""
    held = {name: _held(module, name) for name in weights}
    before = {name: one.detach().clone() for name, one in held.items()}
    with torch.no_grad():
        try:
            for name, weight in weights.items():
                held[name].copy_(weight)
            yield
        finally:
            for name, one in before.items():
                held[name].copy_(one)


@contextmanager
def _set(module: Any, settings: Mapping[str, Any]) -> Iterator[None]:
    """Set attributes of a module, for a while."""
    before = {name: getattr(module, name) for name in settings}
    try:
        for name, value in settings.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


def _base(name: str, in_a: Tensor, in_b: Tensor) -> str:
    """Name the base of rotary frequencies."""
    if "inv_freq" not in name or in_a.numel() < 2 or in_a.shape != in_b.shape:
        return ""
    places = torch.arange(len(in_a), dtype=torch.float64) / len(in_a)
    bases = []
    for tensor in (in_a.double().cpu(), in_b.double().cpu()):
        base = (tensor[0] / tensor[-1]).item() ** (len(tensor) / (len(tensor) - 1))
        if not torch.allclose(tensor, base**-places, rtol=1e-2):
            return ""
        bases.append(base)
    return f"the base of the rotary embedding is {bases[0]:.6g} in a and {bases[1]:.6g} in b"


def _biases(suspect: Suspect) -> str | None:
    from_a, from_b = getattr(suspect.a, "bias", None), getattr(suspect.b, "bias", None)
    outputs = tensors_of(suspect.of_b)
    if isinstance(from_a, Tensor) and from_b is None and outputs and suspect.explains(_with_bias(outputs[0], from_a)):
        return "b has no bias"
    if isinstance(from_b, Tensor) and from_a is None and outputs and suspect.explains(_with_bias(outputs[0], -from_b)):
        return "b has a bias, and a has none"
    return None


def _with_bias(output: Tensor, bias: Tensor) -> Tensor:
    shape = (
        (-1, *[1] * (output.dim() - 2))
        if output.dim() > 2 and output.shape[1] == len(bias) != output.shape[-1]
        else (-1,)
    )
    return output + bias.detach().reshape(shape).to(output)


def _settings(suspect: Suspect) -> str | None:
    """Give a copy of b's module the numbers that a's module has as attributes."""
    for path, one in suspect.a.named_modules():
        try:
            two = suspect.changeable.get_submodule(path)
        except AttributeError:
            continue
        differing = list(_differing_settings(one, two))
        for name, from_a, other, from_b in differing:
            with _set(two, {other: from_a}):
                if suspect.explained_by(suspect.changeable):
                    full = f"{path}.{name}" if path else name
                    return f"{full} is {from_a!r} in a and {from_b!r} in b"
        if len(differing) > 1:
            with _set(two, {other: from_a for _, from_a, other, _ in differing}):
                if suspect.explained_by(suspect.changeable):
                    return "; ".join(
                        f"{name} is {from_a!r} in a and {from_b!r} in b"
                        for name, from_a, _, from_b in differing
                        if name[0] != "_"
                    )
    return None


def _config(suspect: Suspect) -> str | None:
    """Give a copy of b's module the numbers of a's config, if both have one."""
    for name, from_a, other, from_b in _differing_settings(suspect.a, suspect.changeable, "config"):
        with _set(suspect.changeable.config, {other: from_a}):
            if suspect.explained_by(suspect.changeable):
                return f"config.{name} is {from_a!r} in a and {from_b!r} in b"
    return None


def _precision(suspect: Suspect) -> str | None:
    """Find out whether a's module in another dtype returns what b's does."""
    own = {one.dtype for one in suspect.a.parameters()}
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        if own != {dtype}:
            output = run_in(ModuleCall(0, suspect.a, suspect.inputs, random=suspect.random), dtype)
            if output is not None and suspect.are_same(output, suspect.convert(suspect.of_b)[1]):
                return f"b computes in {str(dtype)[6:]}, and a does not"
    return None


def _tensor_cores(suspect: Suspect) -> str | None:
    """Find out whether b's module returns what a's does if its GPU multiplies all 24 bits of a float32."""
    on = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    if not any(one.is_cuda for one in leaves(suspect.given)) or not any(on):
        return None
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        explains = suspect.explained_by(suspect.changeable)
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = on
    names = [
        f"torch.backends.{name}.allow_tf32" for name, is_on in zip(("cuda.matmul", "cudnn"), on, strict=True) if is_on
    ]
    return f"b multiplies in TF32 on its GPU, since {' and '.join(names)} is True" if explains else None


def _differing_settings(one: nn.Module, two: nn.Module, of: str = "") -> Iterator[tuple[str, Any, str, Any]]:
    """Yield the names and values of numbers that differ in two modules, or in an object that both hold."""
    held = [getattr(module, of, None) if of else module for module in (one, two)]
    in_a, in_b = (dict(_numbers(vars(each))) if hasattr(each, "__dict__") else {} for each in held)
    for name, from_a in in_a.items():
        if name in in_b and in_b[name] != from_a:
            yield name, from_a, name, in_b[name]
    eps = [[name for name in numbers if "eps" in name] for numbers in (in_a, in_b)]
    if len(eps[0]) == len(eps[1]) == 1 and eps[0] != eps[1] and in_a[eps[0][0]] != in_b[eps[1][0]]:
        yield eps[0][0], in_a[eps[0][0]], eps[1][0], in_b[eps[1][0]]


def _numbers(attributes: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, held in attributes.items():
        is_tuple = isinstance(held, tuple) and all(isinstance(one, int) for one in held)
        if (isinstance(held, _NUMBERS) or is_tuple or held is None) and name != "training":
            yield name, held


def _output(suspect: Suspect) -> str | None:
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


def _between(suspect: Suspect, must_know: bool = True) -> Hint | None:
    """Find the first module inside that gets something else, though those before it returned the same.

    Tested by giving it what it gets in a.
    """
    in_b = suspect.passing_in_b
    before: dict[str, Any] = {"the input": suspect.inputs}
    for site, from_a in suspect.passing_in_a.items():
        if site not in in_b:
            before[site] = from_a
            continue
        tensors, others = tensors_of(from_a), tensors_of(in_b[site])
        try:
            near = suspect.near(from_a).times(len(before) ** 0.5)  # Rounding adds up.
            is_same = not others or near.covers(apart(from_a, in_b[site]))
        except OtherShape:
            return None
        if is_same:
            before[site] = from_a
            continue
        pair = next(pair for pair in zip(tensors, others, strict=False) if not torch.equal(*pair))
        if not site.endswith(":inputs") or not _explained_before(suspect, site, from_a, pair, in_b):
            return None
        name = site.removesuffix(":inputs")
        text = _other_activation(suspect, *pair) or _only_in_a(suspect, pair[0])
        if text.startswith("a computes"):
            return Hint(text, suspect.as_in_b(site))
        text = text or relation(*pair, before, (), suspect.near(pair[0]))
        extra = _only_in_b(suspect, pair[1])
        if extra and not text:
            return Hint(f"what {name!r} gets in b is {extra}", suspect.as_in_b(site))
        if must_know and not text:
            return None
        words = f"what {name!r} gets in a is {text}" if text else f"{name!r} gets something else"
        return Hint(words, suspect.as_in_b(site))
    return None


def _other_activation(suspect: Suspect, in_a: Tensor, in_b: Tensor) -> str:
    """Say that b computes another activation, by a function, where a has a module."""
    given = tensors_of(suspect.passing_in_a.get(f"{suspect.innermost(in_a)}:inputs"))[:1]
    names = [_name_of_activation(one, value, suspect.near(value)) for one in given for value in (in_a, in_b)]
    return f"a computes {names[0]}, and b {names[1]}" if all(names) and len(set(names)) == 2 else ""


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
    if _explained_at(suspect, suspect.as_in_b(site), Filled(inputs, in_b[site], None).inputs):
        return True
    # What the module gets may go elsewhere too, as into a residual connection: then its source has to be replaced.
    for source, value in in_b.items():
        whole, tensors = isinstance(value, Tensor), tensors_of(value)[:1]
        if not source.endswith(":inputs") and tensors and torch.equal(tensors[0], pair[1]):
            place = suspect.as_in_b(source)
            return _explained_at(suspect, place if whole else f"{place}[0]", pair[0])
    for function, result in suspect.results_in_b.items():
        if isinstance(result.get("output"), Tensor) and torch.equal(result["output"], pair[1]):
            return _explained_at(suspect, function, pair[0])
    return False


def _reaching(suspect: Suspect) -> Hint | None:
    return _between(suspect, must_know=False)


def passing_inside(
    module: nn.Module, inputs: Mapping[str, Any], paths: Iterable[str] = (), random: RandomState | None = None
) -> dict[str, Any]:
    """Return what the modules directly inside another, and at some paths, get and return in their first calls."""
    module = copied(module)
    hooks = short_form(module)
    names = [name for name, child in module.named_children() if not is_container(child)]
    names += [
        f"{name}.{one}"
        for name, child in module.named_children()
        if is_container(child)
        for one, _ in child.named_children()
    ]
    names = list(dict.fromkeys((*names, *paths)))
    if not names:
        return {}
    kept = hooks.capture([Site(name, port=port) for name in names for port in ("inputs", "output")], keep="all")
    with suppress(NeverFired):
        _run_under(hooks, module, inputs, random)
    return {site: kept.calls(site)[0] for site in kept}


def _activation(suspect: Suspect) -> str | None:
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


def _attention(suspect: Suspect, must_know: bool = True) -> Hint | None:
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
    if not text or not _explained_at(suspect, site, result_with(from_a, in_b[site])):
        return None
    return Hint(f"in {site}, {text}", site)


def _other_pattern(suspect: Suspect) -> Hint | None:
    return _attention(suspect, must_know=False)


def _functions(suspect: Suspect) -> Hint | None:
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
        if not _explained_at(suspect, name, from_a["output"]):
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


def _results(module: nn.Module, inputs: Mapping[str, Any], random: RandomState | None) -> Results:
    """Return what the functions that a module's own forward calls get and return, in order."""
    module = copied(module)
    hooks = short_form(module)
    kept = hooks.capture("/*", "/*:inputs", keep="all")
    _run_under(hooks, module, inputs, random)
    found: dict[str, dict[str, Any]] = {}
    for site in kept:
        place = Site.parse(str(site))
        found.setdefault(str(place._replace(port="output")), {"inputs": {}})[place.port] = kept[site]
    return found


def _explained_at(suspect: Suspect, name: str, value: Any) -> bool:
    module = copied(suspect.b)
    hooks = short_form(module)
    hooks.patch({name: value})
    return suspect.explains(_run_under(hooks, module, suspect.given, suspect.random))


def _run_under(hooks: Hooks, module: nn.Module, inputs: Mapping[str, Any], random: RandomState | None) -> Any:
    with warnings.catch_warnings(), hooks:
        warnings.simplefilter("ignore", HooklineWarning)  # Not every module calls functions itself.
        return run_alone(module, map_tensors(torch.clone, inputs, in_objects=True), random=random, rests=False)


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
        if isinstance(given, (*_NUMBERS, type(None))) and in_b["inputs"].get(key, given) != given
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


_REASONS: tuple[Callable[[Suspect], str | Hint | None], ...] = (
    _training,
    _moved,
    _weights,
    _biases,
    _settings,
    _config,
    _tensor_cores,
    _precision,
    _activation,
    _output,
    _between,
    _attention,
    _functions,
    _other_pattern,
    _reaching,
)
_WITHOUT_A_RUN = (_biases, _precision, _activation, _output)  # These do not run b's module.
