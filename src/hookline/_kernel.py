"""What the clients of the kernel may use beyond hookline's public names.

A client is a folder such as `_watch/` or `_harvest/`. It imports nothing else from the kernel, so that the kernel can
change inside without breaking one. A client that needs more adds a name here, with a sentence that says what it is.
"""

from hookline._cache.cache import cache_of_calls, latest_value, refuse_several_calls, sites_without_values
from hookline._engine import call_arguments, offload
from hookline._engine.action import NOTHING, Call, Observer, OutputObserver
from hookline._engine.shadowed_forward import is_shadow, running
from hookline._engine.tap import Tap
from hookline._hooks.diagnose import ran_elsewhere, why_not_called
from hookline._hooks.for_clients import (
    add_observers,
    changes_in,
    observing,
    put_first,
    raise_if_all_miss,
    session_of,
    warn_unless_entered,
)
from hookline._hooks.hooks import take_misses
from hookline._hooks.short_forms import model_of, short_form
from hookline._open_blocks import must_enter, resting
from hookline._option_checks import (
    bytes_of,
    device_here,
    device_of,
    dtype_of,
    refuse_flags,
    refuse_flags_or_none,
    refuse_numbers,
    refuse_texts,
    short_text,
)
from hookline._sites.language import Pattern, matches_name, parse, write_subscripts
from hookline._sites.members import method_names
from hookline._sites.resolve import Found, Where, find_places
from hookline._sites.tree import Names, is_container, is_scripted, parameter_count, unwrap, wrapped_model
from hookline._torch import is_running, may_be_a_stage
from hookline._values.copies import address, share, share_detached, share_for_now, share_tensor
from hookline._values.fit import same_values
from hookline._values.nested import (
    ATOMS,
    DEEPEST,
    WRITTEN_BITS,
    children,
    describe,
    fields,
    get_part,
    leaf_places,
    leaves,
    map_tensors,
    rebuild,
    shape_of,
)
from hookline.parallel.ranks import is_cut

__all__ = [  # noqa: RUF022 (in groups, each with its sentences)
    # Nested values: tensors in tuples, dicts, dataclasses and the like.
    "ATOMS",  # The types that have no parts and are never copied.
    "DEEPEST",  # How many levels of nesting hookline looks into.
    "WRITTEN_BITS",  # How large an integer may be that Python still writes in decimal.
    "children",  # The parts of a container by key.
    "describe",  # A value in one short line of text.
    "fields",  # The names of a namedtuple's items.
    "get_part",  # The part of a value at some subscripts.
    "leaf_places",  # The subscripts at which each tensor of a value is.
    "leaves",  # The tensors of a value, in their order.
    "map_tensors",  # A value with a function applied to each tensor of it.
    "rebuild",  # A container of the same kind with other parts.
    "same_values",  # Whether two values have the same structure and numbers.
    "shape_of",  # The shape of a value in text.
    # Copies of tensors.
    "address",  # Where a tensor's memory is; asking does not make a lazy copy copy.
    "share",  # A value whose tensors are copied when somebody writes into them.
    "share_detached",  # A tensor copied on write and cut off the graph.
    "share_for_now",  # A tensor copied on write, for the time of one run.
    "share_tensor",  # A tensor copied on write.
    # Options of public functions.
    "bytes_of",  # A number of bytes from a number or text such as "2 GB".
    "device_here",  # A device from its name, if it can be used in this process.
    "device_of",  # A device from its name.
    "dtype_of",  # A dtype from its name.
    "refuse_flags",  # Raise for an option that is not True or False.
    "refuse_flags_or_none",  # The same, where None is allowed.
    "refuse_numbers",  # Raise for an option that is not a whole number.
    "refuse_texts",  # Raise for an option that is not text.
    "short_text",  # What was given, in one short line.
    # Sites and the models they are in.
    "Found",  # A place in a model that a pattern was resolved to.
    "Names",  # The modules of a model by name.
    "Pattern",  # A site with wildcards.
    "Where",  # What a user may give to say where: text, a module, a type, a function, a list of these.
    "find_places",  # The places in a model that a user means.
    "is_container",  # Whether a module only holds others and is not called itself.
    "is_scripted",  # Whether a module is compiled by torch.jit.
    "matches_name",  # Whether a name matches a pattern.
    "method_names",  # The methods of a module that can be hooked.
    "model_of",  # The model that a callable runs.
    "parameter_count",  # How many elements the parameters of a module have.
    "parse",  # Read a site from text.
    "unwrap",  # The model inside DDP, FSDP, torch.compile and other wrappers.
    "wrapped_model",  # The model inside one such wrapper.
    "write_subscripts",  # Subscripts as they are written in a site.
    # Actions of one's own at a site.
    "NOTHING",  # Stands for an argument that was not given.
    "Call",  # One call of a module: its site, arguments, number and notes.
    "Observer",  # The base of actions of one's own, which are called with what passes and leave it alone.
    "OutputObserver",  # The same for whole outputs, which it gets on the hot path by `keep`.
    "Tap",  # One action at one site.
    "add_observers",  # Add observers to hooks.
    "call_arguments",  # The arguments of a call by name.
    "changes_in",  # The hooks that have changed something in some modules.
    "is_shadow",  # Whether what an instance holds is hookline's own.
    "observing",  # Let observers see what passes for the time of a block.
    "running",  # The calls of modules that are running now, innermost first.
    # Hooks, blocks and caches.
    "cache_of_calls",  # A cache with several calls of each site.
    "latest_value",  # The latest value of a site, without a warning that there were others, and the number of calls.
    "must_enter",  # Make a `with` block of a generator, and warn if it is never entered.
    "put_first",  # Let hooks act before all others at their places.
    "raise_if_all_miss",  # Raise if nothing passes at any place of some hooks.
    "ran_elsewhere",  # Say that a model ran where a block does not act.
    "refuse_several_calls",  # Raise if a cache has several calls of a site, which can't all be put in.
    "resting",  # Let all hooks rest while hookline itself runs the model.
    "session_of",  # What is known of the runs that fill a cache.
    "short_form",  # Hooks that are attached on entering and detached on leaving.
    "sites_without_values",  # The sites of a cache that nothing passed, though the model ran.
    "warn_unless_entered",  # Warn if nobody enters some hooks, and name the call that made them.
    "take_misses",  # The hooks whose subscripts selected nothing in this block; its end then says nothing of them.
    "why_not_called",  # Say why a module of a model is not called.
    # Several devices and ranks; `hookline.parallel` has the rest.
    "is_cut",  # Whether a tensor is one rank's part of a DTensor.
    "is_running",  # Whether torch.distributed is running.
    "may_be_a_stage",  # Whether a model may be a stage of a pipeline.
    "offload",  # Copies from a GPU to the host that run beside the model.
]
