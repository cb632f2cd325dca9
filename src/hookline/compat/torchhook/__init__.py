"""TorchHook 0.2.7 (import name `torchhook`) on hookline: change one import line, and the rest of the code stays.

`hookmanager` has the manager and its features, and `utils` has the parameter counts. These are the differences:

| original | here | why |
|---|---|---|
| a feature changes when a later layer overwrites it | it does not change | hookline copies it before the write |
| after that, the `.grad` of a kept output is the gradient of the new value | it is None | [1] |
| recomputing a checkpoint adds a feature again | it adds nothing | the layer gave one value |
| a manager that is no longer referenced keeps hooking | it is freed with its hooks | |
| `get_features`, `get_all` and `features` return the manager's own lists | they return new lists | values are checked when they are read |
| the lists can be emptied; `features` and `hooks` can be assigned | use `clear_features()` and `clear_hooks()` | |
| `output_transform` gets the first element of a tuple | it gets the whole tuple | TorchHook's own warning recommends this |
| `output_transform` is not called for a dict | it is called | |
| a feature that is not a tensor breaks `summary()` | the summary shows its type instead of a shape | |
| a layer with two names can be found by one of them | by both | |
| a container, which is never called, is hooked | the same, with a warning | it has no forward |
| a layer traced by `torch.jit` has features; a scripted layer raises | neither has features, with a warning | hookline can't see such calls |
| `layer.forward(x)` bypasses the hook | the hook sees it | hookline watches the forward |
| `add(layer=...)` after `remove` may find its key taken | it uses the next free number | |
| `handle.remove()` leaves the key taken | the key is free, and the features stay | the hook is gone |
| no context manager | `with HookManager(model) as manager:` | at the end the hooks are removed and the features stay |
| a deepcopy of the model is hooked; pickling fails | copies and pickles have no hooks | |
| a handle is torch's `RemovableHandle` | it is `hl.Hooks`, which also has `remove()` | it is not a torch hook |
| `max_size` is read at every call | when a layer is added | |
| a refused argument also warns about a failed cleanup | it only raises | |
| `from torchhook import *` imports torch, warnings and typing | only the names below | |

[1] If nothing overwrites the output, the feature is the output itself. Otherwise it is a copy with autograd history. For
the gradient of the value itself, use `hl.capture(model, "bn1:grad_output")`.
"""  # noqa: E501  # A table has one line for each row.

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
