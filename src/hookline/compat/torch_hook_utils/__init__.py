"""torch-hook-utils on hookline: read and replace layer inputs and outputs, and carry max-pooling indices, in a block.

| original | here | why |
|---|---|---|
| an exception leaves hooks and `return_indices=True` behind | all is undone; no flag is ever set | it broke the model |
| `replace_layer_outputs` raises TypeError | works, also as the README's `replace_layer_output` | was intended |
| `replace_layer_input_arguments` raises TypeError | binds its arguments over those of the call | was intended |
| AssertionError unless a layer has one positional input | takes the first declared input | real layers have more |
| a value changes when overwritten in place | after the block, a copy from before the write | never stale |
| `autograd.grad(loss, value)` works for an overwritten value | raises; `.grad` stays None | the value is a copy |
| a layer gets the given tensor itself | gets a copy on write; other objects as they are | layers overwrite inputs |
| a pool that runs twice raises AssertionError | gives the latest forward's indices, or a list | loops, shared pools |
| | of the indices that fit, the last pooled is unpooled first | decoders mirror encoders |
| skips FractionalMaxPool | saves its indices | it has indices |
| `unpool(x, output_size=...)` raises KeyError | works, as does `unpool(x, size)` | was intended |
| `named_modules_of_type` returns a generator | returns a list | the second loop got nothing |
| silent about no layers, none that ran, unused values | HooklineWarning | shows the mistake at once |
| a dict of layers raises ValueError | is accepted | easier to write |
| ScriptModules raise RuntimeError | are skipped, as containers are | `named_modules()` includes them |
| acts on every thread, after torch's hooks | on the block's thread or task, before torch's hooks | as in hookline |
| `layer.forward(x)` is not seen | is seen | as in hookline |
| works in torch.func, torch.jit.trace, torch.export, `fullgraph=True` | raises | docs/limits.md |
| an empty Sequential, or a None between steps: AssertionError | returns its input, or passes None on | as in torch |
| Sequential refuses a dict, or functions in a dict | accepts them | its signature promised it |
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
