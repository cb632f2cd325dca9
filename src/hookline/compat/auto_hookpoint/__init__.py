"""Auto_HookPoint on hookline: hook points on any model, class or parameter, and a check that they work.

Names, results, warnings and errors are the original's. Where its versions differ, the keys are those of its README and
their order is that of 0.6.0: the model, its parameters, then module by module. These are the differences:

| original | here | why |
|---|---|---|
| parameters are replaced by `HookedParameter`s, which are always trainable | parameters are not replaced | optimizers, frozen and tied weights, `state_dict` and copies keep working |
| `W.hook_point` fires for operators only | in a model it fires for each operation that takes `W`, including `F.linear` and `einsum` | a point that never fires is useless |
| parameters of layers that are not in `BUILT_IN_MODULES` (`GroupNorm`, ...) have points that never fire | parameters of torch's layers have no points | a point that never fires is useless |
| the key `hook_point.hook_point` exists; a point that you define has the key `relu_hook.hook_point` | the first key does not exist; the second is `relu_hook` | the original's tests expect this |
| only the first tensor of a tuple is hooked; dicts, lists and model outputs are skipped | every tensor in a value is hooked, one after the other | nothing is skipped silently |
| a decorated class becomes a `HookedClass` object | it stays the same class; its instances are the models themselves, without `.model`, `.hook_point` and `list_all_hooks()` | `isinstance`, `super()`, subclasses and pickles work |
| `auto_hook` on a class from another module does the same | it returns a `HookedClass` and does not change that class | other code's models don't change |
| `auto_hook(parameter)` returns a copy that shares its memory | it returns the same object, hooked until `unwrap()` | the same optimizer trains it |
| hooking a model twice raises a torch error, or hooks it twice | raises `hl.HooklineError` | the error says what to do |
| the points are printed as children of the model | the model prints as before | points are not modules of the model |
| `unwrap()` leaves forward hooks and new parameters behind | it returns the model in its original state | the model can be hooked again |
| `check_auto_hook` prints, runs the package's tests, and expects each point to fire once | it prints nothing and runs `hl.check`; `strict` raises a `RuntimeError`; a point that never fires gives a warning | a bias may be used twice |
| a model that fails in `check_auto_hook` for its own reasons is a failed test | the model's error is raised | the failure has nothing to do with hook points |
| an unknown name raises `KeyError`; a name that never fires does nothing | `hl.SiteError` and `hl.NeverFired` | they give the nearest names and the reason |
| `HookedTransformerAdapter` and its two configs | not included | see docs/coming-from/TransformerLens.md |
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
