"""nice_hooks on hookline: hooks by patterns of module names, and runs with activations recorded or replaced.

These are the differences from the original:

| original | here | why |
|---|---|---|
| a path that matches nothing does nothing | it warns and lists the nearest names | a typo looked like a result |
| a module that never ran is left out | if its name was written out, `run` warns and says why | the branch may not have been taken |
| `a[::2]` loses its step; `a[0, 1]` and `a[...]` are names | all are indices; an invalid index is a ValueError | as in Python |
| values in the cache change with in-place operations | they do not change | the cached values were wrong |
| such values get the gradient of the value that overwrote them | they get none: `autograd.grad` raises and `.grad` is None | that gradient was wrong, too |
| `with register_*(...)` raises at its end | it removes the hooks, as does `.remove()` | the hooks stayed on the model |
| an error while registering leaves hooks behind | it leaves none behind | the hooks stayed on the model |
| a hook that is never removed is freed with the model | it is freed at the next cyclic garbage collection | the hooks and the model hold each other |
| both pre-hook functions always raise | they work | |
| a backward hook with an index raises TypeError in backward | it raises ValueError when registered, as do pre-hooks | a part of a value is not a call |
| an index into a tuple raises TypeError | `m[0]` is its first item; `[*]` of a dict is refused | no path could name a key |
| an index out of range raises IndexError | `hookline.SiteError`, which names the place | |
| a tied module is found only by its first name | a path without wildcards finds it by any name; a cache has it once | no name should be missed silently |
| a run's hooks act on all threads | all but backward hooks act only on the thread and in the task of the run | two runs on one model got mixed up |
| torch's hooks and these run in the order of registration | torch's hooks run after these | these run inside the forward |
| `module.forward(x)` bypasses hooks | it calls them | hookline replaces `forward` on the instance |
| hooks on a compiled or wrapped model get the wrapper | they get the model inside | the model inside is the one that runs |
| works under torch.func, jit.trace, export and fullgraph | an error says what is not possible | docs/limits.md |
| `a + b` and `a - b` have keys in any order; `a.copy()` is a dict | keys in the order of `a`; an ActivationCache | |
| no `a * 2` and `a / 2` | both work | |
| `patch_method_to_module` rewrites the class | it rewrites nothing, and works for existing instances | it broke repr and train |
| hooks on such a method get a module made for the method | they get the module that owns the method; it takes no backward hooks | no other module exists |
| `to_paths` does not exist, so `import *` fails | it exists | |
| `python -m nice_hooks.nice_hooks` runs a demo | it prints nothing | |
"""  # noqa: E501  # A table has one line for each row.

from hookline.compat.nice_hooks.nice_hooks import *  # noqa: F403
from hookline.compat.nice_hooks.nice_hooks import __all__ as __all__
