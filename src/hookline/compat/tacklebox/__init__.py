"""tacklebox 1.0.3 on hookline: one import line changes, the rest of the code stays.

`hook_management` has the manager and its tables, `hook_handles` the hooks and how they are called, `helpers` what goes
with them, `hooks.model_tracking` the tracker. What differs:

| original | here | why |
|---|---|---|
| two forwards before a backward, a module called twice, an unused parameter: errors | each call has its backward | |
| `grad_in` is that of all users of a tensor | the part that came through the module | as torch's own full hook |
| a second backward, a dict has no gradient | it has | |
| without gradients of inputs, children come before parents | parents first | when the outputs' have come |
| a layer that returns its input, or a view, before an in-place layer: called | not called | torch leads it past |
| a hook is called in a backward after `cleanup()`, or an error is | it is not | it is off |
| `torch.autograd.grad` of a module's output calls no hook | it does; `grad_in` has None | a gradient came |
| gradients, cached inputs and outputs are lists | tuples | its README |
| cached values change when they are overwritten | they are from before | |
| an output that is not a tensor or tuple: AssertionError | it is in a tuple | |
| making a context switches hooks off; leaving it too | leaving it restores what was before | contexts nest |
| contexts of a sum are left in the order of entering | in reverse order, also if one fails | |
| `handle.activate()` alone does nothing | it activates | |
| an unknown category is passed over | AssertionError | |
| a function in `hook_types` that is not registered is passed over | and a warning | |
| a third module or function of one name replaces the second | it has a name of its own | |
| `module.name` is written over, stays, is copied | only where there is none, while hooked, in no copy | hooks read it |
| a function is a hook of one kind | of any number | |
| a name given to a known function is not used | it replaces its repr, else a warning | its README |
| of a registration that is refused, names stay | nothing stays | |
| a manager with active hooks is never freed | its hooks go with it | a warning, if none was called |
| `remove_hook_function_by_name` fails, removed ones stay in tables | it works, they go | |
| `HookManager(model)`, a function that is forgotten: taken | TypeError | |
| a hook on a container is never called | and a warning | it has no forward |
| on what `torch.jit` traced hooks are called, on what it scripted errors | never, and a warning | it can't be seen |
| `module.forward(x)` passes hooks by | it calls them | the forward is what is watched |
| a hook may call its own module for ever | hooks on it, and on those in it, rest until it returns | |
| `wrap_calls=False`: 3 gradients for a Linear, of torch's deprecated hooks | those of its inputs and outputs | [1] |
| `wrap_calls=False`: 3 arguments with `retain_forward_cache` | 5 | |
| `input_cache`, `output_hooks` and the like, `base_forward_hook_fn` | not there | each call keeps its own |
| the tracker prints, sets `module.tracker`, keeps what is overwritten later | none of it | |
| a tracked module that runs twice: AssertionError | `record_every` counts by module | |
| `gather_var("zz")`, `protocol.zz`: KeyError | AssertionError, AttributeError | |
| `device=0` by default | the device of the network | it may have no GPU |
| `data_pass` takes a batch more than `early_stop`, and needs tqdm | it takes no more; without tqdm there is no bar | |
| `Protocol(b=3)` takes no notice of `b` | it sets it | |

[1] As of torch's full hooks: a module that writes into one of several inputs raises. The gradient of an output that the
module uses itself includes that use, which with torch's it does not.
"""
