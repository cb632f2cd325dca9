"""The names of the kernel that clients may use besides hookline's public names, with a sentence for each.

A client is a folder such as `_watch/` or `_harvest/`. From the kernel it imports only these names, so that the kernel
can change inside. A client that needs another name adds it here. Besides this list clients may import the foundations,
which know nothing about hooks: `errors`, `parallel`, `_torch`, `_tables`, `_stats`, `_progress`, `_plot` and
`_untrusted_files`.
"""

# ruff: noqa: I001 (imports are grouped by topic; `as` marks a name as exported)

# Nested values: tensors in tuples, dicts, dataclasses and the like.
from hookline._values.nested import (
    Arguments as Arguments,  # The arguments of a call: by position, and by name.
    ATOMS as ATOMS,  # The types that have no parts and are never copied.
    DEEPEST as DEEPEST,  # How many levels of nesting hookline looks into.
    WRITTEN_BITS as WRITTEN_BITS,  # The most bits of an integer that is still written in decimal.
    children as children,  # The parts of a container by key; None for any other value.
    describe as describe,  # A value in one short line of text.
    fields as fields,  # The names of a namedtuple's items.
    get_part as get_part,  # The part of a value at some subscripts.
    leaf_places as leaf_places,  # The subscripts of each tensor in a value.
    leaves as leaves,  # The tensors of a value, in their order.
    map_tensors as map_tensors,  # A value with a function applied to each of its tensors.
    object_parts as object_parts,  # The attributes of an object that holds tensors, as a KV cache; None for any other.
    put_part as put_part,  # A value with another part at some subscripts.
    rebuild as rebuild,  # A container of the same kind with other parts.
    split as split,  # A value's tensor that subscripts lead to through containers, and the subscripts left for it.
    shape_of as shape_of,  # The shape of a value in text.
)
from hookline._values.tokens import (
    Tokens as Tokens,  # Tokens that a subscript names, such as `@prompt[-1]`.
    tokens_in as tokens_in,  # The tokens that subscripts name, or None.
)
from hookline._values.fit import same_values as same_values  # True if two values have the same structure and numbers.

# Copies of tensors.
from hookline._values.copy_or_share import (
    address as address,  # The address of a tensor's memory. Unlike `data_ptr`, it copies no lazy clone.
    share as share,  # A value whose tensors are copied when somebody writes into them.
    share_detached as share_detached,  # A tensor copied on write and detached from the graph.
    share_for_now as share_for_now,  # A tensor copied on write, for this run only.
    share_tensor as share_tensor,  # A tensor copied on write.
)

# Options of public functions.
from hookline._option_checks import (
    bytes_of as bytes_of,  # A number of bytes from a number or text such as "2 GB".
    device_here as device_here,  # A device from its name, if it can be used in this process.
    device_of as device_of,  # A device from its name.
    dtype_of as dtype_of,  # A dtype from its name.
    refuse_flags as refuse_flags,  # Raise for an option that is not True or False.
    refuse_flags_or_none as refuse_flags_or_none,  # Raise for an option that is not True, False or None.
    refuse_numbers as refuse_numbers,  # Raise for an option that is not a whole number.
    refuse_texts as refuse_texts,  # Raise for an option that is not text.
    refuse_unknown as refuse_unknown,  # Raise for an option that is none of the known words.
    short_text as short_text,  # An argument in one short line of text.
)

# Sites and the models they are in.
from hookline._sites.resolve import (
    Found as Found,  # A place in a model that a pattern was resolved to.
    Where as Where,  # The types that name places: text, a module, a type, a function, a list of these.
    find_places as find_places,  # The places in a model that several `Where`s mean: it takes a list of them.
)
from hookline._sites.tree import (
    Names as Names,  # The modules of a model by name.
    is_container as is_container,  # True if a module only holds others and is never called.
    is_scripted as is_scripted,  # True if a module is compiled by torch.jit.
    parameter_count as parameter_count,  # How many elements the parameters of a module have.
    unwrap as unwrap,  # The model inside DDP, FSDP, torch.compile and other wrappers.
    wrapped_model as wrapped_model,  # The model inside one such wrapper.
)
from hookline._sites.calls import is_wanted as is_wanted  # True if a site means the call of this number.
from hookline._sites.language import (
    matches_name as matches_name,  # True if a name matches a pattern.
    parse as parse,  # Read a site, or a pattern of sites, from text.
    write_subscripts as write_subscripts,  # Subscripts as they are written in a site.
)
from hookline._sites.members import method_names as method_names  # The methods of a module that can be hooked.
from hookline._hooks.short_forms import model_of as model_of  # The model that a callable runs.

# Custom actions at a site.
from hookline._engine.action import (
    Apply as Apply,  # Replaces a value, or a part of one, by a function of it, as an edit does.
    NOTHING as NOTHING,  # Stands for an argument that was not given.
    Call as Call,  # One call of a module: its site, arguments, number and notes.
    Observer as Observer,  # The base class of a client's actions: it is called with each value, and changes none.
    OutputObserver as OutputObserver,  # An observer of whole outputs with the least cost: its `keep` is called.
    Set as Set,  # Replaces a value, or a part of one, by a given value, as a patch does.
)
from hookline._engine.passing import choose as choose  # Where the tokens that subscripts name are in a value.
from hookline._hooks.calls_and_tokens import (
    is_open_ended as is_open_ended,  # True if more calls or tokens of a site may always come.
)
from hookline._hooks.for_clients import (
    add_observers as add_observers,  # Add observers to hooks.
    arguments_by_name as arguments_by_name,  # The arguments of a call by the names of its parameters.
    changes_in as changes_in,  # The hooks that have changed something in some modules.
    observing as observing,  # Let observers see the values that pass in a block.
)
from hookline._engine.shadowed_forward import (
    is_of_hookline as is_of_hookline,  # True if hookline put this attribute on an instance.
)
from hookline._engine.running_calls import (
    running_calls as running_calls,  # The calls of modules that are running now, innermost first.
)

# Hooks, blocks and caches.
from hookline._cache.cache import (
    along_calls as along_calls,  # What the calls kept of a site are, such as "step", and the number of each.
    cache_of_calls as cache_of_calls,  # A cache with several calls of each site.
    latest_value as latest_value,  # The latest value of a site, and its number of calls; never warns.
    refuse_several_calls as refuse_several_calls,  # Raise if a site has several calls: a patch takes one value.
    sites_without_values as sites_without_values,  # The sites of a cache at which nothing passed, though the model ran.
)
from hookline._cache.file import (
    read_file as read_file,  # What `write_file` wrote.
    write_file as write_file,  # Write values to one safetensors file, completely or not at all.
)
from hookline._hooks.for_clients import (
    Miss as Miss,  # A hook whose subscripts selected nothing in a block.
    put_first as put_first,  # Let hooks act before all others at their places.
    raise_if_all_miss as raise_if_all_miss,  # Raise if nothing passes at any place of some hooks.
    take_misses as take_misses,  # The hooks whose subscripts selected nothing; the block's end won't warn.
    what_ran as what_ran,  # What ran in the block of some hooks: the model, a compiled graph, or the model elsewhere.
)
from hookline._open_blocks import resting as resting  # Pause all hooks while hookline itself runs the model.
from hookline._hooks.short_forms import (
    call_under as call_under,  # Call a model, or a function that runs it, inside the block of some hooks.
    short_form as short_form,  # Hooks that are attached on entering and detached on leaving.
    warn_unless_entered as warn_unless_entered,  # Warn if nobody enters some hooks, and name the call that made them.
)
from hookline._why_nothing_passed import (
    why_not_called as why_not_called,  # The reason why a module of a model is not called.
)

# Several devices and ranks; `hookline.parallel` has the rest.
from hookline.parallel.ranks import (
    is_cut as is_cut,  # True if a tensor is a DTensor: this rank's part of a value.
    rank_and_world as rank_and_world,  # The rank of this process, and how many there are.
)
from hookline._engine import (
    offload as offload,  # Copies from a GPU to the host while the model runs: `send`, `flush`, `Copy`.
)
