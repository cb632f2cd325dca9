"""torch-hook-utils: what goes into layers and comes out of them, and the indices of max-pooling layers, for a block.

| original | here | why |
|---|---|---|
| an exception leaves hooks and `return_indices=True` | all is undone; no flag is set at all | it broke the model |
| `replace_layer_outputs` raises TypeError | works, by the README's `replace_layer_output` too | meant so |
| `replace_layer_input_arguments` raises TypeError | binds its arguments over those of the call | meant so |
| a layer has one positional input, or AssertionError | the first that its forward declares | real layers have more |
| a value changes when it is overwritten in place | the graph's own tensor, or a copy from before | never stale |
| `autograd.grad(loss, value)` of one of these | an error, and `.grad` stays None | no loss is made of the copy |
| any object is kept as it is | a copy of that moment, if it holds tensors | never stale |
| a layer gets the very tensor that is put in | a copy on write of it; other objects as they are | layers overwrite |
| a plain dict | a subclass, up to date when read; `tree_map` wants `dict(values)` | each is what passed |
| of several calls the last | so too, or `keep="all"` and `values.calls(name)` | recurrent layers |
| a pool that runs twice: AssertionError | the latest forward's indices, or a list of them | loops, shared pools |
| | of those that fit, the last pooled is the first unpooled | decoders mirror |
| FractionalMaxPool is passed over | its indices are saved | it has some |
| `unpool(x, output_size=...)` raises KeyError | works, and `unpool(x, size)` too | meant so |
| `named_modules_of_type` can be iterated once | again and again, until `next()` is called | the second got nothing |
| no layers, none that ran, a value not used: silence | HooklineWarning | found at once |
| a dict of layers raises ValueError | is taken | easier to give |
| ScriptModules raise RuntimeError | are passed over, as containers are | they are in `named_modules()` |
| acts on every thread, after torch's own hooks | on the block's thread or task, before torch's hooks | as hookline |
| `layer.forward(x)` is not seen | is seen | as hookline |
| works in torch.func, torch.jit.trace, torch.export, `fullgraph=True` | an error | docs/limits.md |
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
