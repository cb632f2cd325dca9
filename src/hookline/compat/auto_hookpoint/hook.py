"""Hook points on models, classes and bare parameters: `auto_hook`, and the three kinds of objects that it returns."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import hookline as hl
from hookline._torch import frame_at

# Layers whose parameters have no hook points in the original. Here no layer of torch has hook points on its parameters.
BUILT_IN_MODULES: list[type[nn.Module]] = [
    *(nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.LayerNorm),
    *(nn.RNN, nn.LSTM, nn.GRU, nn.RNNCell, nn.LSTMCell, nn.GRUCell),
]
OPERATORS = ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow")

_with_points: Any = hl.HookedModel.__base__  # The common base of a HookedModel and of instances of a decorated class.


def auto_hook(module_or_class: Any) -> Any:
    """Add hook points to a model, a model class (also as a decorator) or a parameter.

    >>> model = auto_hook(nn.Sequential(nn.Linear(4, 8), nn.ReLU()))
    >>> print(model.hook_dict.items())
    dict_items([('hook_point', HookPoint()), ('0.hook_point', HookPoint()), ('1.hook_point', HookPoint())])
    """
    given = module_or_class
    if isinstance(given, (HookedClass, HookedModule, HookedParameter)):
        kind = HookedClass if isinstance(given, type) else type(_model_of(given))
        text = f"auto_hook is called with a {kind.__name__} instance, returning the original"
        warnings.warn(text, hl.HooklineWarning, stacklevel=2)
        return given
    if isinstance(given, type) and issubclass(given, (nn.Module, Tensor)):
        is_the_callers = frame_at(1).f_globals.get("__name__") == given.__module__
        return _decorated(given) if is_the_callers and issubclass(given, nn.Module) else HookedClass(given)
    if isinstance(given, nn.Module):
        return HookedModule(given)
    if isinstance(given, Tensor):
        return HookedParameter(given)
    found = given if isinstance(given, type) else type(given)
    raise ValueError(f"Module type {found} is not supported should, be one of nn.Module or nn.Parameter/torch.Tensor")


def _decorated(kind: type[nn.Module]) -> Any:
    try:
        return hl.auto_hook(kind)
    except hl.HooklineError:  # The class uses the same names, or accepts no further base class: hook its instances.
        return HookedClass(kind)


class _Modules(type):
    """Makes isinstance(x, HookedModule) true for instances of decorated classes."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return super().__instancecheck__(instance) or (cls is HookedModule and isinstance(instance, _with_points))


class HookedModule(hl.HookedModel, metaclass=_Modules):
    """A model with hook points. All other attributes are the model's; `model` is the model itself."""

    model: Any = None

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.model = model

    @property
    def _module(self) -> Any:
        """The model itself, under its name in Auto_HookPoint 0.3.0."""
        return self.model

    @property
    def hook_point(self) -> hl.HookPoint:
        """The hook point at the model's output."""
        return self.hook_dict["hook_point"]

    def list_all_hooks(self) -> list[tuple[str, hl.HookPoint]]:
        """Return every hook point with its name."""
        return list(self.hook_dict.items())

    def maybe_hook_params(self, module: nn.Module, name: str) -> None:
        """Do nothing: parameters have hook points without being replaced."""

    def __repr__(self) -> str:
        return repr(self.model)


def _model_of(hooked: Any) -> Any:
    return (
        hooked.model if HookedModule in type(hooked).__mro__ else hooked
    )  # An instance of a decorated class is the model.


class _Classes(type):
    """Makes isinstance(x, HookedClass) true for decorated classes."""

    def __instancecheck__(cls, instance: Any) -> bool:
        is_decorated = isinstance(instance, type) and issubclass(instance, _with_points)
        return is_decorated or super().__instancecheck__(instance)


class HookedClass(metaclass=_Classes):
    """A class whose instances are hooked when they are created. The class itself does not change."""

    def __init__(self, module_class: type) -> None:
        self.module_class = module_class
        functools.update_wrapper(self, module_class, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return auto_hook(self.module_class(*args, **kwargs))

    def __getattr__(self, name: str) -> Any:
        if name in (
            "module_class",
            "__getstate__",
            "__setstate__",
            "__deepcopy__",
        ):  # copy and pickle look these up on this object, not on the class.
            raise AttributeError(name)
        return getattr(self.module_class, name)

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(_model_of(instance), self.module_class)

    def unwrap(self) -> type:
        """Return the class."""
        return self.module_class


class HookedParameter(nn.Parameter):
    """A parameter with a `hook_point` at the result of each operator it is an operand of: `x @ W`, `W + 1`, `-W`.

    A given parameter is changed in place; for a given tensor, a new parameter shares its memory. `unwrap` undoes this.

    >>> weight = HookedParameter(nn.Parameter(torch.eye(2)))
    >>> weight.add_hook("hook_point", lambda tensor, hook: tensor + 1)
    >>> (torch.zeros(1, 2) @ weight).tolist()
    [[1.0, 1.0]]
    >>> weight.reset_hooks()
    """

    _hooked: hl.HookedModel

    def __new__(cls, parameter: Tensor) -> HookedParameter:
        made: Any = parameter
        if type(parameter) is not nn.Parameter:
            made = nn.Parameter(parameter.detach(), parameter.requires_grad)
        made.__class__ = cls
        made._hooked = hl.auto_hook(nn.Identity())  # Results pass through it; its root is the hook point.
        hooked: HookedParameter = made
        return hooked

    @property
    def param(self) -> nn.Parameter:
        """The parameter itself, not a copy."""
        return self

    @property
    def hook_dict(self) -> dict[str, hl.HookPoint]:
        """The parameter's only hook point, by name."""
        return self._hooked.hook_dict

    @property
    def mod_dict(self) -> dict[str, Any]:
        """The parameter and its hook point, by name."""
        return {"param": self, **self.hook_dict}

    @property
    def hook_point(self) -> hl.HookPoint:
        """The hook point of the parameter."""
        return self.hook_dict["hook_point"]

    def add_hook(self, name: Any, hook: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Call `hook(tensor, hook=point)` on each result; see `hl.HookedModel.add_hook`."""
        self._hooked.add_hook(name, hook, *args, **kwargs)

    def hooks(self, *args: Any, **kwargs: Any) -> Any:
        """Return a context in which hooks act; see `hl.HookedModel.hooks`."""
        return self._hooked.hooks(*args, **kwargs)

    def reset_hooks(self, *args: Any, **kwargs: Any) -> None:
        """Remove the hooks; see `hl.HookedModel.reset_hooks`."""
        self._hooked.reset_hooks(*args, **kwargs)

    def setup(self) -> None:
        """Do nothing: there is nothing to set up."""

    def unwrap(self) -> nn.Parameter:
        """Remove every hook and return the plain parameter."""
        self._hooked.unwrap()
        del self._hooked
        self.__class__ = nn.Parameter  # type: ignore[assignment]
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> HookedParameter:
        tensor = self.detach().clone(memory_format=torch.preserve_format)
        copied = memo[id(self)] = HookedParameter(nn.Parameter(tensor, self.requires_grad))
        return copied

    def __reduce_ex__(self, _protocol: Any) -> tuple[Any, ...]:
        return HookedParameter, (nn.Parameter(self.detach(), self.requires_grad),)


def hook_factory(hook_point: Callable[[Any], Any]) -> Callable[[nn.Module, Any, Any], Any]:
    """Return a torch forward hook that passes the output of a module through a hook point."""
    return lambda module, args, output: hook_point(output)


def _operator(name: str, is_reflected: bool = False) -> Callable[..., Any]:
    """Return an operator whose result passes through the hook points of its operands."""
    plain = getattr(Tensor, f"__{name}__")
    reflected: Any = getattr(Tensor, f"__r{name}__", None)

    @functools.wraps(plain)
    def operate(self: HookedParameter, *others: Any) -> Any:
        if not is_reflected:
            result = plain(self, *others)
        elif isinstance(others[0], Tensor):
            result = plain(*others, self)  # In torch, x / W is not the same as W.__rtruediv__(x).
        else:
            result = reflected(self, *others)
        if result is NotImplemented:
            return result
        hooked = {id(one): one for one in (self, *others) if isinstance(one, HookedParameter)}
        for parameter in hooked.values():
            result = parameter._hooked(result)
        return result

    return operate


for _name in OPERATORS:
    setattr(HookedParameter, f"__{_name}__", _operator(_name))
    setattr(HookedParameter, f"__r{_name}__", _operator(_name, is_reflected=True))
for _name in ("neg", "abs"):
    setattr(HookedParameter, f"__{_name}__", _operator(_name))
