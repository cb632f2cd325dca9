"""torch-hook-utils: what goes into layers and comes out of them, and the indices of max-pooling layers, for a block.

| original | here | why |
|---|---|---|
| an exception leaves hooks and `return_indices=True` | all is undone; no flag is set at all | it broke the model |
| `replace_layer_outputs` raises TypeError | works, by the README's `replace_layer_output` too | meant so |
| `replace_layer_input_arguments` raises TypeError | binds its arguments over those of the call | meant so |
| a layer has one positional input, or AssertionError | its first input, however passed | real layers have more |
| a value changes when it is overwritten in place | the graph's own tensor, or a copy from before | never stale |
| a dict of the values | a dict that reads them when asked | each is what passed |
| of several calls the last | so too, or `keep="all"` and `values.calls(name)` | recurrent layers |
| a pool that runs twice: AssertionError | a list of indices; an unpool takes the next that fits | pools are shared |
| FractionalMaxPool is passed over | its indices are saved | it has some |
| `unpool(x, output_size=...)` raises KeyError | works, and `unpool(x, size)` too | meant so |
| `named_modules_of_type` can be iterated once | again and again; `next()` works too | the second block got nothing |
| no layers, no indices, layers that did not run: silence | HooklineWarning | found at once |
| a dict of layers raises ValueError | is taken; containers, never called, are passed over | easier to give |
| acts on every thread, after torch's own hooks | on the block's thread, before torch's forward hooks | as hookline |
| an empty Sequential, or a None in it: AssertionError | gives its input, or None | nn.Sequential does |
| Sequential refuses a dict, or functions in one | takes them | it was declared |
"""

from hookline.compat.torch_hook_utils.input_output_hooks import (
    get_layer_inputs,
    get_layer_outputs,
    named_modules_of_type,
    replace_layer_inputs,
    replace_layer_outputs,
)
from hookline.compat.torch_hook_utils.layers import Lambda, Sample, Sequential
from hookline.compat.torch_hook_utils.maxpool_hooks import save_maxpool_indices, use_indices_in_maxunpool
from hookline.compat.torch_hook_utils.types import Module

replace_layer_output = replace_layer_outputs

__all__ = [
    "Lambda",
    "Module",
    "Sample",
    "Sequential",
    "get_layer_inputs",
    "get_layer_outputs",
    "named_modules_of_type",
    "replace_layer_inputs",
    "replace_layer_output",
    "replace_layer_outputs",
    "save_maxpool_indices",
    "use_indices_in_maxunpool",
]
