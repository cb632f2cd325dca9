"""Auto_HookPoint on hookline: hook points on any model, class or parameter, and a check that they work.

Names, results, warnings and errors are the original's. Where versions differ, keys are those of its README, and their
order is that of 0.6.0: the model, its parameters, then module by module. What is different, and why:

| original | here | why |
|---|---|---|
| parameters are replaced by `HookedParameter`s, always trainable | stay what they are | optimizers, frozen and tied weights, `state_dict` and copies go on working |
| `W.hook_point` fires for operators only | in a model, for each operation that takes `W`, `F.linear` and `einsum` too | a point that never fires is of no use |
| layers that are not in `BUILT_IN_MODULES` (`GroupNorm`, ...) have points for parameters that never fire | none of torch's own layers has | the same |
| a key `hook_point.hook_point`; a point of your own is `relu_hook.hook_point` | no such key; `relu_hook` | the original's own tests want that |
| of a tuple, the first tensor is hooked; dicts, lists and model outputs are passed over | every tensor in it is hooked, one after the other | nothing is skipped without a word |
| a decorated class becomes a `HookedClass` object | is the same class; its instances are the models themselves, without `.model`, `.hook_point` and `list_all_hooks()` | `isinstance`, `super()`, subclasses and pickles work |
| `auto_hook` of a class of another module: the same | a `HookedClass`, and that class is left alone | nobody else's models change |
| `auto_hook(parameter)` is a copy that shares its memory | is the same object, until `unwrap()` | the same optimizer trains it |
| hooking one model twice: an error of torch's, or hooks twice | `hl.HooklineError` | it says what to do |
| the points are printed as children of the model | the model is printed as it is | they are none of its modules |
| `unwrap()` leaves forward hooks and new parameters behind | returns the model as it was | it may be hooked again, or not |
| `check_auto_hook` prints, runs the tests of the package, and wants each point to fire once | prints nothing, runs `hl.check`; strict raises a `RuntimeError`; a point that never fires is a warning | a bias may be used twice |
| a model that fails by itself in `check_auto_hook` is a failed test | its own error comes through | it is not about hook points |
| unknown names: `KeyError`; a name that never fires: nothing | `hl.SiteError` and `hl.NeverFired` | with the nearest names, and the reason |
| `HookedTransformerAdapter`, its two configs | not here | see docs/coming-from/TransformerLens.md |
"""  # noqa: E501  # A table has one line for each row.

from hookline.compat.auto_hookpoint.check import check_auto_hook
from hookline.compat.auto_hookpoint.hook import (
    BUILT_IN_MODULES,
    HookedClass,
    HookedModule,
    HookedParameter,
    auto_hook,
)

LEFT_OUT = ("HookedTransformerAdapter", "HookedTransformerAdapterCfg", "HookedTransformerConfig_From_AutoConfig")


def __getattr__(name: str) -> object:
    if name in LEFT_OUT:
        raise ImportError(f"{name} is not in hookline.compat: hl.auto_hook(model) hooks a transformers model as it is")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["BUILT_IN_MODULES", "HookedClass", "HookedModule", "HookedParameter", "auto_hook", "check_auto_hook"]
