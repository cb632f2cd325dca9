"""tacklebox 1.0.3 on hookline: change one import line, and the rest of the code stays.

`hook_management` has the manager and its tables, `hook_handles` has the hooks and how they are called, `helpers` has
contexts, settings and a pass over a loader, and `hooks.model_tracking` has the tracker. These are the differences:

| original | here | why |
|---|---|---|
| two forwards before a backward, a module called twice, an unused parameter: errors | each call has its own backward | |
| `grad_in` is the gradient from all users of a tensor | only the part that came through the module | as in torch's full backward hooks |
| a second backward gives no gradient, nor does a dict output | both give one | |
| if inputs get no gradients, the hooks of children run before those of parents | parents first | they run when the outputs' gradients have arrived |
| the backward hook of a layer that returns its input, or a view of it, before an in-place layer is called | it is not called | torch routes the gradient past the layer |
| after `cleanup()`, a backward calls hooks, or raises | it calls no hooks | they are off |
| `torch.autograd.grad` of a module's output calls no hook | it calls them; `grad_in` contains None | a gradient arrived |
| gradients, cached inputs and outputs are lists | they are tuples | as in the README |
| cached values change when they are overwritten | they keep the values from before | |
| an output that is not a tensor or tuple raises AssertionError | it is passed in a tuple | |
| creating or leaving a context switches hooks off | leaving it restores the previous state | contexts can be nested |
| summed contexts are left in the order of entering | in reverse order, even if one fails | |
| `handle.activate()` alone does nothing | it activates the hook | |
| an unknown category is ignored | AssertionError | |
| a third module or function with the same name replaces the second | it gets a name of its own | |
| `module.name` is overwritten and stays afterwards | it is set only if there is none, by the first manager, and only while hooked | hooks read it |
| a function can be one kind of hook | it can be several | |
| a name given to a registered function is not used | it replaces the function's repr; if the function has a name, there is a warning | as in the README |
| a refused registration leaves names behind | it leaves nothing behind | |
| a manager with active hooks is never freed | it is freed with its hooks | |
| `remove_hook_function_by_name` fails; removed hooks stay in the tables | it works; they are removed from the tables | |
| `HookManager(wrap_calls, recursion_depth)`, `register_to_module` | these options do not exist: hooks are always called with tuples | |
| a hook on a container is never called | the same, with a warning | a container has no forward |
| hooks on modules traced by `torch.jit` are called; on scripted modules they raise | they are never called, with a warning | hookline can't see such calls |
| `module.forward(x)` bypasses hooks | it calls them | hookline watches the forward |
| a hook that calls its own module recurses forever | hooks on that module and the modules inside it are paused until the hook returns | |
| `input_cache`, `output_hooks` and similar attributes, `base_forward_hook_fn` | do not exist | each call keeps its own values |
| the tracker prints, sets `module.tracker`, and its values change when they are overwritten | it does none of this | |
| a tracked module that runs twice raises AssertionError | `record_every` counts per module | |
| `gather_var("zz")` and `protocol.zz` raise KeyError | AssertionError and AttributeError | |
| `device=0` is the default | the default is the device of the network | there may be no GPU |
| `data_pass` takes one batch more than `early_stop`, and needs tqdm | it stops at `early_stop`; without tqdm there is no progress bar | |
| `Protocol(b=3)` ignores `b` | it sets `b` | |
"""  # noqa: E501  # A table has one line for each row.
