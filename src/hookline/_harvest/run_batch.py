"""Run one batch: return the rows of the values at the sites, or find the samples that make the model fail."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hookline import Cache, Hooks, Site
from hookline._harvest.data import Batch, to_device
from hookline._harvest.rows_and_padding import Choice, RowChooser, Rule, cast, refuse_padding, takes_output, token_mask
from hookline._kernel import (
    Found,
    Miss,
    Where,
    device_here,
    find_places,
    is_cut,
    leaves,
    map_tensors,
    offload,
    rebuild,
    share_tensor,
    take_misses,
    tokens_in,
    unwrap,
)
from hookline._store.disk_format import Array
from hookline.errors import BadSample, HooklineError, SiteError, warn
from hookline.parallel import arrived, placement

ON_ERROR = ("raise", "skip")
_FATAL = (HooklineError, torch.cuda.OutOfMemoryError, MemoryError)
Rows = TypeVar("Rows")
# The dimension along which a site's calls in one batch are joined; for "tokens", each token counts once.
CALLS = {"one": None, "sequence": 1, "batch": 0, "tokens": 1}
_ROOT = Site("")
Column = Callable[..., Any]  # A function of the batch, or of the batch and the output.


@dataclass(frozen=True)
class RowOptions:
    """The options of a harvest that say how a batch is run and which of its values become rows."""

    rows: Rule | Mapping[str, Rule] = "batch"
    dtype: torch.dtype | None = None
    transform: Callable[[Any], Any] | None = None
    stop: bool | None = None
    columns: Mapping[str, Column] | None = None
    call: Callable[[nn.Module, Any], Any] | None = None
    calls: str = "one"
    loss: Callable[..., Tensor] | None = None
    device: torch.device | None = None
    gather: bool = True
    default_call: Callable[[nn.Module, Any], Any] | None = None  # The dataset's way to run a model, if `call` is None.


class BatchRunner:
    """Runs batches through a model with captures at some places. All batches use the same hooks.

    Args:
        ran: The sample numbers and the rows of a batch that ran before. If the first batch is that one, it is not run
            again.
    """

    def __init__(
        self,
        model: nn.Module,
        where: Sequence[Where],
        options: RowOptions,
        *,
        stop: bool,
        ran: tuple[list[int], dict[str, BatchRows]] | None = None,
    ) -> None:
        self.model = model
        self.options = options
        self.places = find_places(model, where)
        _refuse_calls_and_tokens(self.places)
        if options.transform is None:
            _refuse_parameters(self.places)
        self.has_gradients = any(place.site.is_gradient for place in self.places)
        if stop and self.has_gradients:
            raise SiteError("stop=True ends the forward before any gradient can come; harvest gradients without it")
        self.hooks = Hooks(model, active=False)
        self.hooks.capture(list(where), keep="all", stop=stop, gather=options.gather)
        self.device = _device_of_weights(model) if options.device is None else device_here(options.device)
        self._both = getattr(getattr(unwrap(model), "config", None), "is_encoder_decoder", None)
        self._rules: dict[str, Rule] = {}
        self._sites: dict[str, Site] = {}
        self._ran = ran
        self._warned_of = set[Site]()  # Sites that had no rows in some batch.

    def close(self) -> None:
        """Remove the hooks."""
        self.hooks.remove()

    def run(self, batch: Batch) -> dict[str, BatchRows]:
        """Run a batch; return its rows for each array, by name."""
        ran, self._ran = self._ran, None
        if ran is not None and ran[0] == list(batch.samples):
            return ran[1]
        options, found = self.options, {}
        near = _with_masks_on_host(batch.value, options.rows)
        with self.hooks as cache:
            output = self._forward(to_device(batch.value, self.device))
            self._refuse_misses()
        values = {name: self._joined(name, cache) for name in cache}
        cache.clear()
        rows = RowChooser(near, len(batch.samples), output, self._mask)
        with torch.no_grad():
            for name in list(values):
                value, where = _local_part(name, values.pop(name))
                self._refuse_padding(name, near, value, output)
                if options.transform is None:
                    self._refuse_flat(name, near, value)
                else:  # A transform may return memory that it uses again for the next batch.
                    value = map_tensors(share_tensor, options.transform(value))
                found[name] = replace(self._part(rows, name, self._site(name), value), placement=where)
            for name, column in (options.columns or {}).items():
                kept = _column(name, column, near, output).clone()  # The loader may fill the same memory again.
                found[name] = self._part(rows, name, None, kept, _site_for_mask(column))
        offload.flush()
        return found

    def _forward(self, value: Any) -> Any:
        """Run the model on a batch, with a backward if gradients are harvested. Parameters keep their `grad`."""
        call = self.options.call or self.options.default_call or call_model
        if not self.has_gradients:
            with torch.no_grad():
                return call(self.model, value)
        with torch.enable_grad(), _gradients_restored(self.model):
            output = call(self.model, value)
            loss = _loss(self.options.loss, output, value)
            if not isinstance(loss, Tensor):
                raise HooklineError(
                    "gradients need a loss, and the model gives none; give loss=, a function of (output, batch)"
                )
            loss.backward()
            return output

    def _refuse_misses(self) -> None:
        """Refuse places whose subscripts select nothing in this batch: the rows would have no elements.

        Where rows are positions, only warn: this batch may have short samples, and others may have rows.
        """
        for miss in take_misses(self.hooks):
            if not self._is_short(miss):
                raise HooklineError(f"'{miss.site}' {miss.problem}{miss.hint}")
            if miss.site not in self._warned_of:
                self._warned_of.add(miss.site)
                warn(f"'{miss.site}' {miss.problem}; a batch without rows is not reported again")

    def _is_short(self, miss: Miss) -> bool:
        """Return True if the captured value is [samples, 0 positions, ...] and rows are positions."""
        part = miss.part
        if not isinstance(part, Tensor) or part.dim() < 3 or self._rule(str(miss.site)) == "batch":
            return False
        return part.shape[1] == 0 and 0 not in (part.shape[0], *part.shape[2:])

    def _joined(self, name: str, cache: Cache) -> Any:
        """Return the value of a site. If it was called several times, join its values as `calls=` says."""
        along, calls = CALLS[self.options.calls], cache.calls(name)
        tokens = tokens_in(self._site(name).subscripts) if self.options.calls == "tokens" else None
        if tokens is not None and tokens.is_latest:
            raise HooklineError(
                f"{name!r} is the token that came last, which may be behind the end of a sample; '@prompt[-1]', "
                "'@prompt' and '@new' name tokens of each sample"
            )
        if len(calls) == 1:
            return calls[0]
        if self.options.calls == "tokens":
            return cache.tokens(name)
        if along is None:
            is_state = isinstance(calls[0], Tensor) and calls[0].dim() == 2
            site = self._site(name)
            one = site._replace(call=getattr(site.call, "numbers", [0])[0])
            positions = f"'{name}[:, None]' with calls=\"sequence\"" if is_state else 'calls="sequence"'
            raise HooklineError(
                f"{name!r} was called {len(calls)} times for one batch; name one, as in '{one}', or join them: "
                f'{positions} if each call is a position, calls="batch" if each is a part of the batch'
            )
        tensors = [one for one in calls if isinstance(one, Tensor)]
        if along == 1 and any(one.dim() < 3 and one.is_floating_point() for one in tensors):
            raise HooklineError(f"the calls of {name!r} have shape {tuple(calls[0].shape)}, without a sequence to join "
                                "them along; name one, or capture where there is one")  # fmt: skip
        return cache.cat(name, along)

    def _refuse_padding(self, name: str, batch: Any, value: Any, output: Any) -> None:
        """Refuse a position that is padding in some samples. With a user's `call`, positions may mean anything."""
        if isinstance(batch, Mapping) and isinstance(value, Tensor) and self.options.call is None:
            refuse_padding(self._site(name), batch, value, encoder_decoder=self._both)
        own = getattr(self.options.call, "refuse_after_the_end", None)
        if own is not None and self._rule(name) == "batch":
            own(self._site(name), batch, output)

    def _refuse_flat(self, name: str, batch: Any, value: Any) -> None:
        """Refuse rows="tokens" for values [samples, features]: each number would become a row."""
        is_flat = isinstance(value, Tensor) and value.dim() == 2 and value.is_floating_point()
        if not is_flat or self._rule(name) != "tokens" or hasattr(self.options.call, "token_mask"):
            return
        if any(isinstance(one, tuple) for one in self._site(name).subscripts):
            return  # Subscripts took this part from a value with more dimensions.
        same = [one for one in leaves(batch) if one.shape[:2] == value.shape]
        if not any(one.dim() > 2 or not one.is_floating_point() for one in same):
            raise HooklineError(
                f'{name!r} has shape {tuple(value.shape)}, and rows="tokens" is for [samples, positions, ...]: nothing '
                'in the batch has these positions; rows="batch" keeps a row for each sample'
            )

    def _part(self, rows: RowChooser, name: str, site: Site | None, value: Any, side: Site = _ROOT) -> BatchRows:
        chosen, choice = rows.choose(name, site, side if site is None else site, value, self._rule(name))
        return BatchRows.of(chosen.detach() if site is None else cast(chosen.detach(), self.options.dtype), choice)

    def _mask(self, site: Site, batch: Any, output: Any, shape: tuple[int, int]) -> Tensor | None:
        """Return where the real tokens are, from the `token_mask` of the user's `call` if it has one."""
        own = getattr(self.options.call, "token_mask", None)
        if own is not None:
            found: Tensor | None = own(site, batch, output, shape)
            return found
        return token_mask(site, batch if isinstance(batch, Mapping) else None, shape, encoder_decoder=self._both)

    def _site(self, name: str) -> Site:
        if name not in self._sites:
            self._sites[name] = Site.parse(name)
        return self._sites[name]

    def _rule(self, name: str) -> Rule:
        """Return the row rule of an array: from a mapping, the rule of its name or else the first that matches."""
        rules = self.options.rows
        if not isinstance(rules, Mapping):
            return rules
        if name not in self._rules:
            means = [rule for where, rule in rules.items() if name in self._names(where)]
            self._rules[name] = rules[name] if name in rules else (means[0] if means else "batch")
        return self._rules[name]

    def refuse_idle_options(self) -> None:
        """Refuse a loss or a row rule that applies to none of the places."""
        if self.options.loss is not None and not self.has_gradients:
            near = self.places[0].site._replace(port="grad_output", index="")
            raise HooklineError(
                f"loss= is for gradients, and none is kept; name some, as in '{near}', or leave loss= out"
            )
        if not isinstance(self.options.rows, Mapping):
            return
        kept = [str(place.site) for place in self.places]
        for where in self.options.rows:
            if where not in (self.options.columns or {}) and not self._names(where).intersection(kept):
                named = ", ".join(map(repr, kept[:3])) + (", …" if len(kept) > 3 else "")
                raise HooklineError(f"rows= names {where!r}, which this harvest does not keep; it keeps {named}")

    def _names(self, where: str) -> set[str]:
        if where in (self.options.columns or {}):
            return set()
        return {str(place.site) for place in find_places(self.model, [where])}


@dataclass(frozen=True)
class BatchRows:
    """The rows of one batch for one array. The copy from a GPU to the host may still be running."""

    rows: Tensor | offload.Copy
    choice: Choice
    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int
    placement: str = "null"  # Which part of a value this process has, if several processes share the value.

    @classmethod
    def of(cls, rows: Tensor, choice: Choice) -> BatchRows:
        """Start to copy rows to the host."""
        return cls(_send_to_host(rows), choice, rows.dtype, tuple(rows.shape), rows.nbytes)

    def arrived(self) -> Tensor:
        """Wait until the rows are in host memory, and return them."""
        return self.rows.wait() if isinstance(self.rows, offload.Copy) else self.rows

    def array(self, name: str) -> Array:
        """Return the array that these rows fit."""
        return Array(name, self.dtype, self.shape[1:])


@dataclass(frozen=True)
class BatchEntry:
    """A function that returns one entry of a batch."""

    key: Any

    def __call__(self, batch: Any) -> Any:
        return batch[self.key]


def call_model(model: nn.Module, batch: Any) -> Any:
    """Call a model with a batch: a mapping holds keyword arguments, a tuple or list of tensors positional ones."""
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, (tuple, list)) and leaves(batch):
        return model(*batch)
    return model(batch)


def needs_output(options: RowOptions) -> bool:
    """Return True if a row rule, a column or the call uses the model's output."""
    rules = options.rows.values() if isinstance(options.rows, Mapping) else [options.rows]
    functions = [*rules, *(options.columns or {}).values()]
    return options.call is not None or any(callable(one) and takes_output(one) for one in functions)


def _loss(function: Callable[..., Any] | None, output: Any, batch: Any) -> Any:
    """Return the loss of the user's function, which may take the output alone, or else the model's `output.loss`."""
    if function is None:
        return getattr(output, "loss", None)
    try:
        inspect.signature(function).bind(output, batch)
    except TypeError:
        return function(output)
    except ValueError:  # A function in C has no signature.
        pass
    return function(output, batch)


def _column(name: str, column: Column, batch: Any, output: Any) -> Tensor:
    """Return a column of a batch as a tensor."""
    try:
        value = column(batch, output) if takes_output(column) else column(batch)
        return torch.as_tensor(value)
    except (TypeError, ValueError, LookupError, RuntimeError) as error:
        has = f"; it has {', '.join(map(repr, batch))}" if isinstance(batch, Mapping) else ""
        raise HooklineError(f"column {name!r} can't be read from the batch as a tensor: {error!r}{has}") from error


def _site_for_mask(column: Column) -> Site:
    """Return a site whose padding mask fits a column. In an encoder-decoder model, a batch has two masks."""
    key = str(column.key) if isinstance(column, BatchEntry) else "labels"
    return _ROOT if key.startswith("decoder") or key == "labels" else Site("encoder")


def _refuse_parameters(places: Sequence[Found]) -> None:
    """Refuse parameters: their first dimension is never a batch, even if it is as large."""
    for place in places:
        if place.site.port == "param":
            raise HooklineError(f"'{place.site}' has no samples; harvest it with transform=, or read it from the model")


def _refuse_calls_and_tokens(places: Sequence[Found]) -> None:
    """Refuse the latest call, as every call is kept, and tokens of each row, as there are many batches."""
    for place in places:
        site, tokens = place.site, tokens_in(place.site.subscripts)
        if "-1" in (str(site.call), str(site.within)):
            raise SiteError(
                f"'{site}': a harvest keeps every call of a batch; name the last one by its number, as in '#2'"
            )
        if tokens is not None and tokens.rows:
            raise SiteError(
                f"'{site}' names the tokens of each row of one batch, and a harvest has many batches; name them "
                "for all rows, as in '[:, @prompt[-1]]', or give rows=, a function of the batch"
            )


def _with_masks_on_host(value: Any, rows: Any) -> Any:
    """Return a batch with its masks on the host. Copying them after the forward would wait for the GPU."""
    if rows == "batch" or not isinstance(value, Mapping):
        return value
    masks = {key: map_tensors(lambda tensor: tensor.cpu(), one) for key, one in value.items() if "mask" in str(key)}
    return rebuild(value, {**value, **masks}) if masks else value


def _device_of_weights(model: nn.Module) -> torch.device | None:
    """Return the device of the weights, or None if they are on several: such a model moves its inputs itself."""
    devices = {tensor.device for tensor in [*model.parameters(), *model.buffers()]}
    return devices.pop() if len(devices) == 1 and not any(device.type == "meta" for device in devices) else None


@contextmanager
def _gradients_restored(model: nn.Module) -> Iterator[None]:
    """Clear the gradients of the parameters, and restore them at the end."""
    before = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in before:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in before:
            parameter.grad = gradient


def _local_part(name: str, value: Any) -> tuple[Any, str]:
    """Return this process's part of a value that several processes share, and the placement of that part."""
    if not is_cut(value):
        return value, "null"
    if any(one.is_partial() for one in value.placements):
        raise HooklineError(
            f"{name!r} is a sum that the ranks have yet to make, not a part of a value; harvest it with gather=True"
        )
    return arrived(value.to_local()), placement(value)


def _send_to_host(rows: Tensor) -> Tensor | offload.Copy:
    """Copy rows to the host, without waiting for a GPU."""
    if rows.is_cuda:
        copy = offload.send(rows)
        return rows.cpu() if copy is None else copy
    return rows.cpu()


def run_first(
    batch: Batch, singles: Callable[[Batch], Sequence[Batch]], run: Callable[[Batch], Rows], on_error: str
) -> tuple[Batch, Rows]:
    """Run the first batch of a harvest. If the model fails on it, run its samples alone to find the bad ones.

    With on_error="skip", the first sample that works alone takes the place of the batch.
    """
    try:
        return batch, run(batch)
    except HooklineError:
        raise
    except Exception as error:
        bad: list[tuple[int, Exception]] = []
        for single in singles(batch):
            try:
                found = single, run(single)
            except HooklineError:
                raise
            except Exception as failure:
                bad.append((single.samples[0], failure))
                continue
            if bad and on_error == "raise":
                raise bad_sample(*bad[0]) from bad[0][1]
            if on_error == "skip":
                return found
        if bad and len(bad) < len(batch.samples):
            raise bad_sample(*bad[0]) from bad[0][1]
        message = f"the model failed on the first batch: {type(error).__name__}: {error}"
        raise HooklineError(message + _hint(batch.value)) from error


def run_singly(
    batch: Batch,
    singles: Sequence[Batch],
    run: Callable[[Batch], Rows],
    refuse: Callable[[int, Exception], None],
    error: Exception,
) -> list[tuple[Batch, Rows]]:
    """Run a failed batch sample by sample. `refuse` is called with each sample that fails."""
    found, bad = [], 0
    for single in singles:
        try:
            found.append((single, run(single)))
        except Exception as failure:
            if is_fatal(failure):
                raise
            bad += 1
            for sample in single.samples:
                refuse(sample, failure)
    if not bad:
        raise HooklineError(
            f"the model failed on samples {batch.samples[0]} to {batch.samples[-1]} together, though on none "
            f"of them alone: {type(error).__name__}: {error}"
        ) from error
    return found


def is_fatal(error: Exception) -> bool:
    """Return True for an error that no sample caused. If a DataLoader worker dies, torch raises at any line."""
    return isinstance(error, _FATAL) or str(error).startswith("DataLoader worker")


def bad_sample(sample: int, failure: Exception) -> BadSample:
    """Return the error for a sample that failed."""
    error = BadSample(
        f'sample {sample} failed: {type(failure).__name__}: {failure}; on_error="skip" goes on without such samples, '
        "and lists them in store.skipped"
    )
    error.sample = sample
    return error


def _hint(batch: Any) -> str:
    """Return a hint at a common mistake, if the batch looks like one."""
    if isinstance(batch, (tuple, list)) and batch and all(isinstance(one, str) for one in batch):
        return "; the samples are texts: to put them through a tokenizer give hl.Texts(texts, tokenizer)"
    if isinstance(batch, (tuple, list)) and len(batch) > 1:
        return (
            f"; the batch, a {type(batch).__name__} of {len(batch)}, was given as {len(batch)} arguments: "
            "call=lambda model, batch: model(batch[0]) gives only the first"
        )
    return ""
