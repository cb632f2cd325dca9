"""TorchHook 0.2.7 (import name `torchhook`) on hookline: one import line changes, the rest of the code stays.

`hookmanager` has the manager, `features` what it keeps of one layer, `gradient` the `.grad` of it, `utils` the counts
of parameters. What differs:

| original | here | why |
|---|---|---|
| a feature changes when a later layer overwrites it | it stays what it was | it is copied when somebody writes |
| the `.grad` of a kept output is then that of the new value | that of the value that is kept | [1] |
| recomputing a checkpoint adds a feature again | it adds nothing | the layer gave one value |
| a manager that nobody holds goes on hooking | its hooks go with it | a warning, if no layer ran |
| `get_features`, `get_all`, `features`: the manager's own lists | new ones each time | values are checked when read |
| these can be emptied, `features` and `hooks` assigned | `clear_features()` and `clear_hooks()` do it | |
| `get_features` before the layer ran: an empty list | and a warning | nothing would come to that list |
| `output_transform` gets the first of a tuple | the whole, and a warning, once | its own warning advises this |
| `output_transform` is not called for a dict | it is | |
| a feature that is not a tensor breaks `summary()` | its type stands for the shape | |
| `custom_hook` and `output_transform` may write into the output | they raise `EditError` | looking changes nothing |
| a layer with two names has one of them | it has both | |
| a container that is never called is hooked | and a warning | it has no forward |
| a layer that `torch.jit` traced has features, a scripted one is an error | none, and a warning | it can't be seen |
| `layer.forward(x)` passes the hook by | it is seen | the forward is what is watched |
| `add(layer=...)` after `remove` may find its key taken | the next free number | |
| `handle.remove()` leaves the key taken | the features stay, the key is free | the hook is gone |
| no context manager | `with HookManager(model) as manager:` | at the end hooks go, features stay |
| deepcopy of the model hooks the copy, pickle fails | both give a model without hooks | |
| a handle is torch's `RemovableHandle` | has its `remove()`, for `with` too | the hook is not one of torch's |
| `max_size` is read at every call | when a layer is added; a warning if it is set later | |
| a refused argument also warns of a failed cleanup | it only raises | |
| `from torchhook import *` brings torch, warnings, typing | only the names below | |

[1] Where nothing overwrites it, it is the output itself. Else it is a copy with its history: `retain_grad()` works on
it, `torch.autograd.grad(loss, it)` does not.
"""

from hookline.compat.torchhook.hookmanager import HookManager
from hookline.compat.torchhook.utils import (
    count_parameters,
    format_parameter_count,
    get_layerwise_parameter_count,
    model_summary,
)

__version__ = "0.2.7"

__all__ = [
    "HookManager",
    "count_parameters",
    "format_parameter_count",
    "get_layerwise_parameter_count",
    "model_summary",
]
