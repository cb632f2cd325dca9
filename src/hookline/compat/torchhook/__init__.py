"""TorchHook 0.2.7 (import name `torchhook`) on hookline: one import line changes, the rest of the code stays.

`hookmanager` has the manager, `features` what it keeps of one layer, `utils` the counts of parameters. What differs:

| original | here | why |
|---|---|---|
| a feature changes when a later layer overwrites it | it stays what it was | it is copied when somebody writes |
| recomputing a checkpoint adds a feature again | it adds nothing | the layer gave one value |
| a manager that nobody holds goes on hooking | its hooks go with it | nothing refers back to the manager |
| `get_features`, `get_all`, `features`: the manager's own lists | new ones each time | values are checked when read |
| `get_features` before the layer ran: an empty list | and a warning | nothing would come to that list |
| `output_transform` gets the first of a tuple, and no dict at all | the whole output | its warning advises this |
| a feature that is no tensor breaks `summary()` | its type stands for the shape | |
| `custom_hook` may write into the output | it raises `EditError` | looking changes nothing |
| a layer with two names has one of them | it has both | |
| a container that is never called is hooked | and a warning | no feature can come |
| `add(layer=...)` after `remove` may find its key taken | the next free number | |
| `handle.remove()` leaves the key taken | the features stay, the key is free | the hook is gone |
| no context manager | `with HookManager(model) as manager:` | at the end hooks go, features stay |
| deepcopy of the model hooks the copy, pickle fails | both give a model without hooks | |
| a handle is torch's `RemovableHandle` | has its `remove()`, for `with` too | the hook is not one of torch's |
| `max_size` is read at every call | when a layer is added | |
| a refused argument also warns of a failed cleanup | it only raises | |
| `from torchhook import *` brings torch, warnings, typing | only the names below | |
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
