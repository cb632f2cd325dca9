"""Say why a module of b disagrees with its counterpart in a.

`REASONS` is a table of likely faults, each with a correction. A correction is tried on a copy of b's module, with the
inputs that a's module got. Its sentence becomes the hint if the copy then returns what a's module returned.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hookline import Site
from hookline._compare.apart import OtherShape, apart, difference, largest_element, where_apart
from hookline._compare.filled_inputs import Filled
from hookline._compare.paired_values import tensors_of
from hookline._compare.recording import ModuleCall
from hookline._compare.report import ComparedPlace
from hookline._compare.rounding import Limit, cast, copied, run_alone, run_in, uncovered
from hookline._compare.runs import Runs
from hookline._compare.weight_differences import EQUAL, ROUNDED, difference_of
from hookline._kernel import is_container, leaves, map_tensors, short_form, unwrap
from hookline._scan.restore_modules import buffers_as_found, left_as_found
from hookline._torch import AnyDropout
from hookline.errors import HooklineWarning, NeverFired

_LEFT = 0.6  # A correction has to lower the error to this share of it.
_NEAR = 16  # Results of one function agree up to this many units in the last place of their largest element,
_NEAR_SHARE = 4  # and up to this many as a share of the whole.
_UNKNOWN = " gets something else"
_NO_FACTOR = 1e-6  # A factor this near to 0 or 1 explains nothing.
_NUMBERS = (bool, int, float, str, type(None))
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
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


def explain(place: ComparedPlace, runs: Runs, moved: Mapping[str, str]) -> None:
    """Note at a place which element differs most, and the hint if there is one.

    Args:
        place: The first place that disagrees.
        runs: The runs of both models.
        moved: The weights of a whose numbers are at another place in b, and where.
    """
    given = runs.given(place.site, place.call)
    if given is None or place.local_values is None or place.local is None or place.local.is_none:
        return
    place.worst = where_apart(*place.local_values, place.part)
    suspect = Suspect(place, runs, given, moved)
    for reason in REASONS:
        found = suspect.first_that_explains(reason)
        if found is not None:
            place.hint = reason.sentence(suspect, found)
            place.function = suspect.site_in_model(getattr(found, "shown", ""))
            return


class Suspect:
    """A module of b that returns something else than its counterpart in a, given the same inputs."""

    def __init__(self, place: ComparedPlace, runs: Runs, given: Mapping[str, Any], moved: Mapping[str, str]) -> None:
        assert place.local_values is not None
        call = runs.of_a.calls[place.site][place.call]
        self.a, self.b = call.module, runs.of_b.calls[place.other][0].module
        self.inputs, self.given, self.random = call.inputs, given, call.random  # `given` is `inputs` in b's form.
        self.of_a, self.of_b = place.local_values
        self._place, self._runs, self._output = place, runs, call.output
        self.names = self._inside(runs.matching.pairs)  # Modules inside a's, and their counterparts inside b's.
        self.moved = self._inside(moved)

    def _inside(self, names: Mapping[str, str]) -> dict[str, str]:
        """Return the pairs of names that are inside both modules, as seen from there."""
        in_a, in_b = (f"{path}." if path else "" for path in (self._place.site, self._place.other))
        return {
            name.removeprefix(in_a): other.removeprefix(in_b)
            for name, other in names.items()
            if name and other and name.startswith(in_a) and other.startswith(in_b)
        }

    def site_in_model(self, site: str) -> str:
        """Return the site in b of a site inside b's module."""
        dot = "." if self._place.other and site and site[0] != "/" else ""
        return f"{self._place.other}{dot}{site}" if site else ""

    @cached_property
    def copy(self) -> nn.Module:
        """A copy of b's module, which is changed, run and changed back."""
        return copied(self.b)

    @cached_property
    def can_run(self) -> bool:
        """Whether b's module returns the same when it runs by itself. If not, no change of it can be tried."""
        try:
            return self._agrees(self.of_b, self._in_layout(self.run(self.copy)))
        except Exception:
            return False

    def run(self, module: nn.Module) -> Any:
        """Run a changed copy of b's module on a's inputs."""
        dtypes = {one.dtype for one in module.parameters() if one.is_floating_point()}
        given = cast(self.given, *dtypes) if len(dtypes) == 1 else map_tensors(torch.clone, self.given, in_objects=True)
        with left_as_found(module), buffers_as_found(module):
            return run_alone(module, given, random=self.random)

    def run_with(self, site: str, value: Any) -> Any:
        """Run a copy of b's module in which a value is put in at a site inside."""
        hooks = short_form(module := copied(self.b))
        hooks.patch({site: value})
        return _run_under(hooks, module, self.given, self.random)

    def first_that_explains(self, reason: Reason) -> Any:
        """Return the first case of a reason whose correction makes b's module agree; None if none does."""
        if reason.runs and not self.can_run:
            return None
        with suppress(Exception):  # A correction is a run that nobody asked for: it may fail.
            for case in reason.cases(self):
                with suppress(Exception):
                    if self._explains(reason.corrected(self, case)):
                        return case
        return None

    def _in_layout(self, output: Any) -> Any:
        return self._runs.in_one_layout(self._output, output)[1]

    def _agrees(self, value: Any, other: Any) -> bool:
        limits = self._place.limits
        try:
            parts = difference(value, other).parts
        except OtherShape:
            return False
        return uncovered({name: part for name, part in parts.items() if name in limits}, limits) is None

    def _explains(self, output: Any) -> bool:
        """Return True if an output agrees with a's, and is clearly nearer to it than b's own."""
        value, other = self._runs.in_one_layout(self._output, output)
        if not self._agrees(value, other):
            return False
        limits, parts = self._place.limits, difference(value, other).parts
        before = difference(self.of_a, self.of_b).parts
        return all(
            parts[name].error.relative <= _LEFT * part.error.relative
            for name, part in before.items()
            if name in parts and name in limits and not limits[name].covers(part.error)
        )

    def near(self, value: Any) -> Limit:
        """Return how far two results of one function may be from each other."""
        eps = [torch.finfo(one.dtype).eps for one in tensors_of((self.of_a, self.of_b)) if one.is_floating_point()]
        unit = max(eps, default=1e-7)
        return Limit(_NEAR * unit * largest_element(value), _NEAR_SHARE * unit)

    def are_near(self, value: Any, other: Any, times: float = 1) -> bool:
        """Return True if two values inside the modules agree."""
        try:
            return not tensors_of(value) or self.near(value).times(times).covers(apart(value, other))
        except OtherShape:
            return False

    @cached_property
    def passing_in_a(self) -> dict[str, Any]:
        """What the modules inside a's get and return, by site."""
        return _passing(self.a, self.inputs, self.names, self.random)

    @cached_property
    def passing_in_b(self) -> dict[str, Any]:
        """What the modules inside b's get and return, by the site of their counterpart in a."""
        in_a = {other: name for name, other in self.names.items()}
        found = {}
        for site, value in _passing(self.b, self.given, self.names.values(), self.random).items():
            name, colon, port = site.partition(":")
            own = f"{name} of b" if name in self.names else name
            found[f"{in_a.get(name, own)}{colon}{port}"] = value
        return found

    def in_b(self, site: str) -> str:
        """Return what a site is called in b."""
        name, colon, port = site.partition(":")
        return f"{self.names.get(name, name).removesuffix(' of b')}{colon}{port}"

    @cached_property
    def functions_in_a(self) -> dict[str, dict[str, Any]]:
        """What the functions get and return that a's module calls itself, by site."""
        return _functions(self.a, self.inputs, self.random)

    @cached_property
    def functions_in_b(self) -> dict[str, dict[str, Any]]:
        """What the functions get and return that b's module calls itself, by site."""
        return _functions(self.b, self.given, self.random)

    def owner(self, tensor: Tensor) -> str:
        """Return the name of the weight of a that has these numbers; "" if none has."""
        model = unwrap(self._runs.a)
        held = (*model.named_parameters(), *model.named_buffers())
        return next(
            (name for name, one in held if one.shape == tensor.shape and torch.equal(one.to(tensor), tensor)), ""
        )

    def innermost(self, tensor: Tensor) -> str:
        """Return the innermost module inside a's that returned a tensor; "" if none did."""
        start = f"{self._place.site}." if self._place.site else ""
        found = [
            path
            for path, calls in self._runs.of_a.calls.items()
            if path and path.startswith(start) and any(_holds(call.output, tensor) for call in calls)
        ]
        return max(found, key=lambda path: path.count("."), default="").removeprefix(start)

    def inputs_inside(self, path: str) -> list[Tensor]:
        """Return the tensors that a module inside a's got in its first call."""
        calls = self._runs.of_a.calls.get(".".join(filter(None, (self._place.site, path)))) if path else None
        return tensors_of(calls[0].inputs) if calls else []


# Running modules by themselves.


def _passing(module: nn.Module, inputs: Mapping[str, Any], paths: Iterable[str], random: Any) -> dict[str, Any]:
    """Return what the modules directly inside another, and those at some paths, get and return in their first calls."""
    module = copied(module)
    names = [name for name, child in module.named_children() if not is_container(child)]
    names += [
        f"{name}.{inner}"
        for name, child in module.named_children()
        if is_container(child)
        for inner, _ in child.named_children()
    ]
    names = list(dict.fromkeys((*names, *paths)))
    if not names:
        return {}
    hooks = short_form(module)
    kept = hooks.capture([Site(name, port=port) for name in names for port in ("inputs", "output")], keep="all")
    with suppress(NeverFired):
        _run_under(hooks, module, inputs, random)
    return {site: kept.calls(site)[0] for site in kept}


def _functions(module: nn.Module, inputs: Mapping[str, Any], random: Any) -> dict[str, dict[str, Any]]:
    """Return what the functions that a module's own forward calls get and return, in order."""
    hooks = short_form(module := copied(module))
    kept = hooks.capture("/*", "/*:inputs", keep="all")
    _run_under(hooks, module, inputs, random)
    found: dict[str, dict[str, Any]] = {}
    for site in kept:
        place = Site.parse(str(site))
        found.setdefault(str(place._replace(port="output")), {"inputs": {}})[place.port] = kept[site]
    return found


def _run_under(hooks: Any, module: nn.Module, inputs: Mapping[str, Any], random: Any) -> Any:
    with warnings.catch_warnings(), hooks:
        warnings.simplefilter("ignore", HooklineWarning)  # Not every module calls functions itself.
        return run_alone(module, map_tensors(torch.clone, inputs, in_objects=True), random=random, rests=False)


def _holds(value: Any, tensor: Tensor) -> bool:
    return any(one.shape == tensor.shape and torch.equal(one, tensor) for one in tensors_of(value))


# Corrections of settings.


class _Setting(NamedTuple):
    """An attribute of a module, or of its config, with another value in a and b."""

    path: str
    name: str
    in_a: Any
    name_in_b: str
    in_b: Any


def _modes(suspect: Suspect) -> Iterator[str]:
    modes = [{path: one.training for path, one in module.named_modules()} for module in (suspect.a, suspect.b)]
    differing = [path for path in modes[0] if modes[1].get(path, modes[0][path]) != modes[0][path]]
    if differing:
        yield "a" if modes[0][differing[0]] else "b"


def _in_the_mode_of_a(suspect: Suspect, _: str) -> Any:
    changed = copied(suspect.b)
    modes = {path: one.training for path, one in suspect.a.named_modules()}
    for path, one in changed.named_modules():
        one.training = modes.get(path, suspect.a.training)
    return suspect.run(changed)


def _said_of_modes(suspect: Suspect, side: str) -> str:
    module = suspect.a if side == "a" else suspect.b
    drops = any(
        isinstance(one, AnyDropout)
        or any("drop" in name and isinstance(held, float) for name, held in vars(one).items())
        for one in module.modules()
    )
    who = f"dropout is on in {side}, which" if drops else side
    return f"{who} is in train mode: call {side}.eval()"


def _settings(suspect: Suspect) -> Iterator[list[_Setting]]:
    """Yield settings that differ: each by itself, then all of a module together."""
    for path, one in suspect.a.named_modules():
        with suppress(AttributeError):
            found = list(_differing(path, one, suspect.copy.get_submodule(path)))
            yield from ([setting] for setting in found)
            yield found
    with suppress(AttributeError):
        yield from ([setting] for setting in _differing("config", suspect.a.config, suspect.copy.config))


def _differing(path: str, one: Any, two: Any) -> Iterator[_Setting]:
    in_a, in_b = (
        {
            name: held
            for name, held in vars(holder).items()
            if name != "training"
            and (isinstance(held, _NUMBERS) or (isinstance(held, tuple) and all(isinstance(n, int) for n in held)))
        }
        for holder in (one, two)
    )
    for name, value in in_a.items():
        if name in in_b and in_b[name] != value:
            yield _Setting(path, name, value, name, in_b[name])
    for word in ("eps", "scal"):  # One may call it eps, the other variance_epsilon.
        names = [[name for name, held in held.items() if word in name and type(held) is float] for held in (in_a, in_b)]
        if len(names[0]) == len(names[1]) == 1 and names[0] != names[1] and in_a[names[0][0]] != in_b[names[1][0]]:
            yield _Setting(path, names[0][0], in_a[names[0][0]], names[1][0], in_b[names[1][0]])


def _with_settings(suspect: Suspect, settings: list[_Setting]) -> Any:
    is_config = settings[0].path == "config" and hasattr(suspect.copy, "config")
    holder = suspect.copy.config if is_config else suspect.copy.get_submodule(settings[0].path)
    try:
        for one in settings:
            setattr(holder, one.name_in_b, one.in_a)
        return suspect.run(suspect.copy)
    finally:
        for one in settings:
            setattr(holder, one.name_in_b, one.in_b)


def _said_of_settings(_: Suspect, settings: list[_Setting]) -> str:
    shown = [one for one in settings if one.name[0] != "_"] or settings
    return "; ".join(f"{_join(one.path, one.name)} is {one.in_a!r} in a and {one.in_b!r} in b" for one in shown)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _tensor_cores(suspect: Suspect) -> Iterator[list[str]]:
    flags: dict[str, Any] = {"cuda.matmul": torch.backends.cuda.matmul, "cudnn": torch.backends.cudnn}
    names = [name for name, one in flags.items() if one.allow_tf32]
    if names and any(one.is_cuda for one in leaves(suspect.given)):
        yield [f"torch.backends.{name}.allow_tf32" for name in names]


def _without_tensor_cores(suspect: Suspect, _: list[str]) -> Any:
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        return suspect.run(suspect.copy)
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def _dtypes(suspect: Suspect) -> Iterator[torch.dtype]:
    own = {one.dtype for one in suspect.a.parameters()}
    if isinstance(suspect.of_a, Tensor) and isinstance(suspect.of_b, Tensor):
        yield from (one for one in (torch.bfloat16, torch.float16, torch.float32) if own != {one})


def _with_the_rounding_of(suspect: Suspect, dtype: torch.dtype) -> Any:
    """Take from b's output what a's module loses when it computes in a dtype."""
    again = run_in(ModuleCall(0, suspect.a, suspect.inputs, random=suspect.random), dtype)
    return suspect.of_b.double() + suspect.of_a.double() - again.double()


# Corrections of weights.


def _weights(suspect: Suspect) -> Iterator[dict[str, tuple[Tensor, str]]]:
    """Yield weights of a for b's module, with the sentence for each: one that differs, then all that do."""
    in_a, in_b = (
        {**dict(module.named_parameters()), **dict(module.named_buffers())} for module in (suspect.a, suspect.b)
    )
    # The weights of a, in their order, belong to the places in b, in theirs, that now hold each other's numbers.
    places = [other for other in in_b if other in suspect.moved.values()]
    names = [name for name in in_a if name in suspect.moved]
    if len(names) == len(places) > 1:
        yield {
            place: (in_a[name], f"the numbers of {name!r} are in {suspect.moved[name]!r} of b")
            for place, name in zip(places, names, strict=True)
        }
    pairs = [name for name in in_a if name in in_b]
    differing = {}
    for name in pairs:
        kind, what = difference_of(in_a[name], in_b[name])
        if kind not in (EQUAL, ROUNDED):
            differing[name] = in_a[name], f"{name}: {_said_of_weight(suspect, name, in_a[name], in_b[name], what)}"
    yield from ({name: one} for name, one in differing.items())
    yield differing
    for name in pairs:
        if "." not in name and in_a[name].dim() == 2:  # Another class may hold the same weight transposed.
            yield {name: (in_a[name].T, f"{name}: transposed")}


def _said_of_weight(suspect: Suspect, name: str, in_a: Tensor, in_b: Tensor, what: str) -> str:
    other = suspect.owner(in_b.detach()) if "%" in what and in_b.min() != in_b.max() else ""
    if other:
        return f"it is that of {other!r} in a"
    bases = [_rotary_base(one) for one in (in_a, in_b)] if "inv_freq" in name else []
    if all(bases) and len(bases) == 2:
        return f"the base of the rotary embedding is {bases[0]:.6g} in a and {bases[1]:.6g} in b"
    return what


def _rotary_base(tensor: Tensor) -> float:
    """Return the base of rotary frequencies; 0 if they are no powers of one."""
    size, numbers = len(tensor), tensor.double().cpu()
    base: float = (numbers[0] / numbers[-1]).item() ** (size / max(size - 1, 1))
    powers = base ** -(torch.arange(size, dtype=torch.float64) / size)
    return base if size > 1 and torch.allclose(numbers, powers, rtol=1e-2) else 0.0


def _with_weights(suspect: Suspect, weights: Mapping[str, tuple[Tensor, str]]) -> Any:
    with _put(suspect.copy, {name: tensor for name, (tensor, _) in weights.items()}):
        return suspect.run(suspect.copy)


@contextmanager
def _put(module: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Write weights into a module, for a while. Raises unless they have the shapes of those there."""
    own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    held = {name: own[name] for name in weights}
    if not weights or any(held[name].shape != one.shape for name, one in weights.items()):
        raise ValueError("no weights of these shapes")
    before = {name: one.detach().clone() for name, one in held.items()}
    with torch.no_grad():
        try:
            for name, weight in weights.items():
                held[name].copy_(weight)
            yield
        finally:
            for name, one in before.items():
                held[name].copy_(one)


def _said_of_weights(_: Suspect, weights: Mapping[str, tuple[Tensor, str]]) -> str:
    return "; ".join(said for _, said in list(weights.values())[:4])


def _biases(suspect: Suspect) -> Iterator[tuple[Tensor, str]]:
    in_a, in_b = (getattr(module, "bias", None) for module in (suspect.a, suspect.b))
    if isinstance(in_a, Tensor) and in_b is None:
        yield in_a.detach(), "b has no bias"
    if isinstance(in_b, Tensor) and in_a is None:
        yield -in_b.detach(), "b has a bias, and a has none"


def _with_bias(suspect: Suspect, case: tuple[Tensor, str]) -> Any:
    bias, output = case[0], suspect.of_b
    in_channels = output.dim() > 2 and output.shape[1] == len(bias) != output.shape[-1]
    return output + bias.reshape((-1, *[1] * (output.dim() - 2)) if in_channels else (-1,)).to(output)


# Corrections of what b's module computes.


def _activations(suspect: Suspect) -> Iterator[tuple[str, str]]:
    if not any(True for _ in suspect.a.parameters()):
        given = tensors_of(suspect.inputs)[0]
        yield from _other_activation(suspect, given, suspect.of_a, suspect.of_b)


def _other_activation(suspect: Suspect, given: Tensor, in_a: Tensor, in_b: Tensor) -> Iterator[tuple[str, str]]:
    names = [_activation(suspect, given, value) for value in (in_a, in_b)]
    if all(names) and names[0] != names[1]:
        yield names[0], names[1]


def _activation(suspect: Suspect, given: Tensor, value: Tensor) -> str:
    """Return the name of the activation that makes a value of another; "" if none does."""
    fitting = (
        name for name, one in _ACTIVATIONS.items() if given.shape == value.shape and suspect.are_near(value, one(given))
    )
    return next(fitting, "")


class _Relation(NamedTuple):
    """How a value of a follows from that of b, in words, and the result."""

    words: str
    value: Tensor


def _relations(in_a: Any, in_b: Any, inputs: Any) -> Iterator[_Relation]:
    """Yield simple ways to make a value of a from that of b: with the input, by a factor, transposed."""
    if not all(isinstance(one, Tensor) and one.is_floating_point() for one in (in_a, in_b)):
        return
    if in_a.shape != in_b.shape:
        return
    one, two = in_a.double(), in_b.double().to(in_a.device)
    for tensor in tensors_of(inputs):
        if tensor.shape == one.shape and tensor.is_floating_point():
            given = tensor.to(one)
            yield _Relation("b's plus the input: b leaves out the residual connection", two + given)
            yield _Relation("b's minus the input: b adds it, and a does not", two - given)
    scale = ((one * two).sum() / (two * two).sum()).item() if one.numel() > 3 else 0.0
    if math.isfinite(scale) and abs(scale) > _NO_FACTOR and abs(scale - 1) > _NO_FACTOR:
        yield _Relation(f"{_factor(scale)} times b's", scale * two)
    if one.dim() > 1 and one.shape[-1] == one.shape[-2] > 1:
        yield _Relation("b's transposed", two.mT)


def _factor(scale: float) -> str:
    """Write a factor, and the root that it is."""
    for words, square in (("√{}", scale**2), ("1/√{}", scale**-2)):
        number = round(square)
        if scale > 0 and 1 < number < 1 << 16 and math.isclose(square, number, rel_tol=1e-5):
            is_small_and_whole = number <= 16 and math.isqrt(number) ** 2 == number
            return f"{scale:.6g}" if is_small_and_whole else f"{scale:.6g} (= {words.format(number)})"
    return f"{scale:.6g}"


def _of_output(suspect: Suspect) -> Iterator[_Relation]:
    yield from _relations(suspect.of_a, suspect.of_b, suspect.inputs)
    weight, bias = (getattr(suspect.b, name, None) for name in ("weight", "bias"))
    if isinstance(weight, Tensor) and weight.dim() == 1:
        weight, shift = weight.detach().double(), 0 if bias is None else bias.detach().double()
        plain = suspect.of_b.double() - shift
        words = "that with 1 + weight: b leaves out the offset of the norm", plain / weight * (1 + weight) + shift
        yield _Relation(*words)
        words = "that without 1 + weight: b adds an offset to the norm", plain / (1 + weight) * weight + shift
        yield _Relation(*words)


class _Inside(NamedTuple):
    """A value inside b's module that explains the error: with a's value there, the module agrees."""

    site: str  # In b, where a's value is put in.
    value: Any
    words: str
    shown: str  # The site that the report names.


def _inputs_inside(suspect: Suspect) -> Iterator[_Inside]:
    """Yield the first module inside that gets something else, though all that passed before is the same."""
    in_b = suspect.passing_in_b
    before: list[Any] = [suspect.inputs]
    for site, from_a in suspect.passing_in_a.items():
        if site in in_b and not (
            not tensors_of(in_b[site]) or suspect.are_near(from_a, in_b[site], len(before) ** 0.5)
        ):
            if site.endswith(":inputs"):
                both = zip(tensors_of(from_a), tensors_of(in_b[site]), strict=False)
                one, two = next(pair for pair in both if not torch.equal(*pair))
                words = _said_of_inputs(suspect, site.removesuffix(":inputs"), one, two, before)
                shown = suspect.in_b(site)
                yield _Inside(shown, Filled(from_a, in_b[site], None).inputs, words, shown)
                # The value may go elsewhere too, as into a residual connection: then its source is replaced.
                for source, value in in_b.items():
                    if not source.endswith(":inputs") and any(torch.equal(two, part) for part in tensors_of(value)[:1]):
                        place = suspect.in_b(source)
                        yield _Inside(place if isinstance(value, Tensor) else f"{place}[0]", one, words, shown)
                for function, result in suspect.functions_in_b.items():
                    if isinstance(result.get("output"), Tensor) and torch.equal(result["output"], two):
                        yield _Inside(function, one, words, shown)
            return
        before.append(from_a)


def _known_inputs_inside(suspect: Suspect) -> Iterator[_Inside]:
    yield from (one for one in _inputs_inside(suspect) if not one.words.endswith(_UNKNOWN))


def _said_of_inputs(suspect: Suspect, name: str, one: Tensor, two: Tensor, before: list[Any]) -> str:
    """Say how the tensors that a module inside gets in a and b differ."""
    source = suspect.innermost(one)
    for given in suspect.inputs_inside(source)[:1]:
        for names in _other_activation(suspect, given, one, two):
            if "identity" not in names:
                return _said_of_activations(suspect, names)
    if source and source not in suspect.names and not any(path.startswith(f"{source}.") for path in suspect.names):
        return f"what {name!r} gets in a is the output of {source!r}, which b does not have"
    for relation in _relations(one, two, before):
        if suspect.are_near(one, relation.value):
            return f"what {name!r} gets in a is {relation.words}"
    sources = [site for site, value in suspect.passing_in_b.items() if ":inputs" not in site and _holds(value, two)]
    if sources and sources[0] not in suspect.passing_in_a and sources[0] not in suspect.names:
        return f"what {name!r} gets in b is the output of {sources[0]!r}, which a does not have"
    return f"{name!r}{_UNKNOWN}"


def _other_functions(suspect: Suspect) -> Iterator[_Inside]:
    """Yield the first function of the module's own forward that returns something else."""
    for site, in_a in suspect.functions_in_a.items():
        in_b = suspect.functions_in_b.get(site)
        if in_b is None:
            return
        if not suspect.are_near(in_a["output"], in_b["output"]):
            words = _said_of_function(suspect, site, in_a, in_b)
            if words:
                yield _Inside(site, in_a["output"], words, site)
            return


def _said_of_function(suspect: Suspect, site: str, in_a: Mapping[str, Any], in_b: Mapping[str, Any]) -> str:
    """Say how the results of a function differ; "" if a module inside returned what differs."""
    one, two, given = in_a["output"], in_b["output"], in_a["inputs"]
    other = {name: value for name, value in given.items() if not suspect.are_near(value, in_b["inputs"].get(name))}
    for name, value in other.items():
        sources = [_source(value, suspect.passing_in_a), _source(in_b["inputs"].get(name), suspect.passing_in_b)]
        if all(sources):
            if sources[0] == sources[1]:
                return ""
            return f"{site} gets the output of {sources[0]!r} in a, and that of {sources[1]!r} in b"
    numbers = [
        f"{name} is {value!r} in a and {in_b['inputs'][name]!r} in b"
        for name, value in given.items()
        if isinstance(value, _NUMBERS) and in_b["inputs"].get(name, value) != value
    ]
    if numbers:
        return f"in {site}, {'; '.join(numbers)}"
    for name, value in other.items():
        what = "mask" if "mask" in name or _is_mask(value) else repr(name)
        return f"{site} gets another {what} in b, and with a's result the error is gone"
    for names in _other_activation(suspect, tensors_of(given)[0], one, two):
        return f"in {site}, {_said_of_activations(suspect, names)}"
    for relation in _relations(one, two, given):
        if suspect.are_near(one, relation.value):
            return f"in {site}, a's result is {relation.words}"
    return f"{site} returns something else on the same inputs, and with a's result the error is gone"


def _source(value: Any, inside: Mapping[str, Any]) -> str:
    """Return the site of a module inside that returned a tensor; "" if none did."""
    sites = [site for site in inside if not site.endswith(":inputs") and isinstance(value, Tensor)]
    return next((site for site in sites if _holds(inside[site], value)), "")


def _is_mask(value: Any) -> bool:
    if not isinstance(value, Tensor) or not value.numel():
        return False
    return value.dtype == torch.bool or bool(value.min() < -1e4)


def _classes(suspect: Suspect) -> Iterator[str]:
    """Yield the class of a if both modules hold no others."""
    is_leaf = not any(True for module in (suspect.a, suspect.b) for _ in module.children())
    names = [type(module).__name__ for module in (suspect.a, suspect.b)]
    if is_leaf and names[0] != names[1]:
        yield f"a is a {names[0]}, and b a {names[1]} with the same weights"


def _in_the_class_of_a(suspect: Suspect, _: str) -> Any:
    changed = copied(suspect.a)
    changed.load_state_dict(suspect.b.state_dict())
    return run_alone(changed, map_tensors(torch.clone, suspect.inputs, in_objects=True), random=suspect.random)


# The table.


class Reason(NamedTuple):
    """A likely fault.

    `cases` yields what may be wrong, `corrected` returns the output of b's module with that put right, and `sentence`
    is the hint. `runs` says whether the correction runs b's module.
    """

    cases: Callable[[Suspect], Iterator[Any]]
    corrected: Callable[[Suspect, Any], Any]
    sentence: Callable[[Suspect, Any], str]
    runs: bool = True


def _said_of_activations(_: Suspect, names: tuple[str, str]) -> str:
    return f"a computes {names[0]}, and b {names[1]}"


def _as_is(_: Suspect, words: str) -> str:
    return words


def _with_value(suspect: Suspect, inside: _Inside) -> Any:
    return suspect.run_with(inside.site, inside.value)


def _words(_: Suspect, inside: _Inside) -> str:
    return inside.words


REASONS = (
    Reason(_modes, _in_the_mode_of_a, _said_of_modes),
    Reason(_weights, _with_weights, _said_of_weights),
    Reason(_biases, _with_bias, lambda _, case: case[1], runs=False),
    Reason(_settings, _with_settings, _said_of_settings),
    Reason(
        _tensor_cores,
        _without_tensor_cores,
        lambda _, names: f"b multiplies in TF32 on its GPU, since {' and '.join(names)} is True",
    ),
    Reason(
        _dtypes, _with_the_rounding_of, lambda _, dtype: f"b computes in {str(dtype)[6:]}, and a does not", runs=False
    ),
    Reason(
        _activations,
        lambda suspect, names: _ACTIVATIONS[names[0]](tensors_of(suspect.inputs)[0]),
        _said_of_activations,
        runs=False,
    ),
    Reason(_of_output, lambda _, case: case.value, lambda _, case: f"a's output is {case.words}", runs=False),
    Reason(_known_inputs_inside, _with_value, _words),
    Reason(_other_functions, _with_value, _words),
    Reason(_inputs_inside, _with_value, _words),
    Reason(_classes, _in_the_class_of_a, _as_is),
)
