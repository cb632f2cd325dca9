"""Count the parameters of a model, in total and layer by layer."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

UNITS = ("", "K", "M", "G", "T")
WIDTH = 80


def count_parameters(model: nn.Module, trainable_only: bool = False) -> int:
    """Count the parameters of a model. Shared parameters count once."""
    _refuse_other(model)
    return _count(model, trainable_only, recurse=True)


def format_parameter_count(count: float, precision: int = 2) -> str:
    """Format a count with a unit.

    >>> format_parameter_count(11_689_512), format_parameter_count(999, precision=0)
    ('11.69 M', '999 ')
    """
    power = 0
    while count >= 1000 and power < len(UNITS) - 1:
        count /= 1000
        power += 1
    return f"{count:.{precision}f} {UNITS[power]}"


def get_layerwise_parameter_count(
    model: nn.Module, max_depth: int = -1, trainable_only: bool = False
) -> dict[str, int]:
    """Count the parameters of each layer, without those of the layers inside it.

    Args:
        max_depth: The number of levels below the top layers to include; -1 for all.
    """
    _refuse_other(model)
    return {name: _count(layer, trainable_only, recurse=False) for name, layer in _below(model, max_depth)}


def model_summary(model: nn.Module, max_depth: int = -1, show_zero_params: bool = True) -> None:
    """Print the parameters of a model layer by layer."""
    total, trainable = count_parameters(model), count_parameters(model, trainable_only=True)
    thick, thin = "=" * WIDTH, "-" * WIDTH
    lines = [
        *(thick, f"Model Summary: {type(model).__name__}", thin),
        f"Total Parameters: {format_parameter_count(total)}",
        f"Trainable Parameters: {format_parameter_count(trainable)}",
        f"Non-trainable Parameters: {format_parameter_count(total - trainable)}",
        *(thin, _row("Layer Name", "Total Params", "Trainable Params"), thick),
    ]
    of_trainable = get_layerwise_parameter_count(model, max_depth, trainable_only=True)
    for name, count in get_layerwise_parameter_count(model, max_depth).items():
        if count or show_zero_params:
            counts = format_parameter_count(count), format_parameter_count(of_trainable[name])
            lines.append(_row("  " * name.count(".") + name, *counts))
    print("\n".join([*lines, thick]))  # noqa: T201


def _row(name: str, total: str, trainable: str) -> str:
    return f"{name:<40} {total:<20} {trainable:<20}"


def _count(module: nn.Module, trainable_only: bool, recurse: bool) -> int:
    parameters = module.parameters(recurse)
    return sum(parameter.numel() for parameter in parameters if parameter.requires_grad or not trainable_only)


def _below(module: nn.Module, max_depth: int, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers inside a module, parents first. A shared layer comes once for each parent."""
    for name, child in module.named_children():
        path = prefix + name
        if max_depth != -1 and path.count(".") > max_depth:
            return
        yield path, child
        yield from _below(child, max_depth, path + ".")


def _refuse_other(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError("'model' must be an instance of torch.nn.Module.")
