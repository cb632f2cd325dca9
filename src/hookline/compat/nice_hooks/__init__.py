"""nice_hooks on hookline: hooks by patterns of module names, and runs with activations recorded or replaced.

What differs from the original, and why:

| original | here | why |
|---|---|---|
| a path that matches nothing does nothing | it warns, with the nearest names | a typo passed for a result |
| a module that never ran is left out | if it was named, `run` and `with` warn, and say why | a branch not taken |
| `a[::2]` loses its step; `a[0, 1]`, `a[...]` are names | all are indices; what is none, a ValueError | as in Python |
| values in the cache change with in-place operations | they stay as they passed | they were wrong |
| ... and get the gradient of what overwrote them | none: `autograd.grad` raises, `.grad` is None | so was that |
| `with register_*(...)` raises at its end | it removes the hooks; so does `.remove()` | they stayed on the model |
| a hook that is registered twice runs twice | it does, and warns if it is still there | a notebook cell run again |
| an error while registering leaves hooks behind | it leaves none | the same |
| a hook that nobody removes goes with the model | it does, once Python looks for cycles | each holds the other |
| both pre-hook functions always raise | they work | |
| a backward hook with an index: TypeError in backward | ValueError at once, on pre-hooks too | no part has a call |
| a backward hook's None cuts a gradient | it does: it is zero, of one of several inputs none | torch has no other way |
| its gradient for an input that needs none is lost | `hookline.EditError` | a silent miss |
| an index into a tuple: TypeError | `m[0]` is its first item; `[*]` of a dict is refused | no path could name a key |
| an index out of range: IndexError | `hookline.SiteError`, which names the place | |
| only the first name of a tied module | written out, any of them | no silent miss |
| a run's hooks act on all threads | on the thread and in the task of the run | two runs on one model mixed |
| torch's own hooks act as they were registered | after these, and a patch under one warns | these are inside |
| `module.forward(x)` passes hooks by | they act | hookline stands in for `forward` |
| hooks on a compiled or wrapped model get the wrapper | the model inside; its '' comes first | there it runs |
| works under torch.func, jit.trace, export, fullgraph | an error says what can't be | docs/limits.md |
| `a + b`, `a - b`: keys in any order; `a.copy()`: a dict | the left's order; an ActivationCache | |
| no `a * 2`, `a / 2` | there are | |
| `patch_method_to_module` rewrites the class | nothing, and older instances work too | it broke repr and train |
| its hooks get a module made for the method | they get the module that owns it | there is no other |
| `to_paths` does not exist, and `import *` fails | it does | |
| `python -m nice_hooks.nice_hooks` is a demo | it prints nothing | |
"""

from hookline.compat.nice_hooks.nice_hooks import *  # noqa: F403
from hookline.compat.nice_hooks.nice_hooks import __all__ as __all__
