"""tacklebox 1.0.3 on hookline: one import line changes, the rest of the code stays.

`hook_management` has the manager, `helpers` what goes with it, `hooks.model_tracking` the tracker. Inside, `tables` has
what a manager knows, `handles` the hooks, `calling` how they are called, `naming` the names. What differs:

| original | here | why |
|---|---|---|
| two forwards before a backward, a module called twice, an unused parameter: errors | each call has its backward | |
| `grad_in` is that of all users of a tensor | the part that came through the module | as torch's own full hook |
| a second backward, a keyword argument, a dict has no gradient | it has | |
| a hook is called in a backward after `cleanup()`, or an error is | it is not | it is off |
| gradients, cached inputs and outputs are lists | tuples, from before anything was overwritten | its README |
| `inputs` are those given by position | then those by keyword | its README: all |
| an output that is no tensor or tuple: AssertionError | it is in a tuple | |
| making a context switches hooks off; leaving it too | leaving it restores what was before | contexts nest |
| contexts of a sum are left in the order of entering | in reverse order, also if one fails | |
| `handle.activate()` alone does nothing | it activates | |
| an unknown category, function or name is passed over | AssertionError; a warning | |
| a third module or function of one name replaces the second | it has a name of its own | |
| `module.name` is written over, and stays | only where there is none, while hooked | hooks read it |
| a function is a hook of one kind | of any number | |
| a name given to a known function is not used | it replaces its repr, else a warning | its README |
| a manager with active hooks is never freed | it takes its hooks along | nothing refers back to it |
| `remove_hook_function_by_name` fails, removed ones stay in tables | it works, they go | |
| `wrap_calls=False`: torch's deprecated backward hooks | gradients as of its full ones | 3 for a Linear |
| a hook may call its own module for ever | hooks rest while one runs | |
| `input_cache`, `output_hooks` and the like, `base_forward_hook_fn` | not there | each call keeps its own |
| the tracker prints, sets `module.tracker`, keeps what is overwritten later | none of it | |
| a tracked module that runs twice: AssertionError | `record_every` counts by module | |
| `device=0` by default | the device of the network | it may have no GPU |
| `Protocol(b=3)` takes no notice of `b` | it sets it | |
"""
