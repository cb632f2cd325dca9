"""The options that several commands share, and the loss function of `--loss`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
from torch import Tensor

from hookline._cli.models import import_name, is_function
from hookline._kernel import leaves, parse
from hookline.errors import HooklineError

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="module:name (a function, class or model), or a transformers folder, name or config.json.",
    ),
]
Input = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="The input: .safetensors (tensors by argument), .npy, texts (.txt, .jsonl), an image, a folder of images, "
        "or module:function.",
    ),
]
Text = Annotated[list[str] | None, typer.Option(metavar="WORDS", help="A text as input. May be repeated.")]
Shape = Annotated[
    list[str] | None,
    typer.Option(
        metavar="SIZES", help="Numbers of this shape as input: 1,3,224,224 or ids=2,6:int64. Repeat for each argument."
    ),
]
Processor = Annotated[
    str | None, typer.Option(metavar="NAME", help="The tokenizer or image processor, if not the model's.")
]
Column = Annotated[str | None, typer.Option(metavar="NAME", help="The column or JSON field of the data.")]
Samples = Annotated[int | None, typer.Option(metavar="N", min=1, help="Take only the first N texts or images.")]
MaxLength = Annotated[int | None, typer.Option(metavar="N", min=1, help="Cut texts after N tokens.")]
Attention = Annotated[
    str | None, typer.Option(metavar="KIND", help="eager, sdpa, ...: eager has the attention pattern, at '**/softmax'.")
]
Dtype = Annotated[str | None, typer.Option(metavar="DTYPE", help="Run the model in this: bfloat16, float64, ...")]
Device = Annotated[str | None, typer.Option(metavar="DEVICE", help="Where the model runs; a GPU if there is one.")]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run the Python code that comes with a checkpoint.")
]
Loss = Annotated[
    str | None,
    typer.Option(
        metavar="LOSS",
        help="Run backward too, from this loss: lm (each token predicts the next), sum (of the output), or a "
        "module:function of the output.",
    ),
]
All = Annotated[bool, typer.Option("--all", help="Show every row of a table: no merged or omitted rows.")]
Json = Annotated[bool, typer.Option("--json", help="Write JSON for a script, and nothing else.")]


LossFunction = Callable[[Any], Tensor]


def asks_for_gradients(at: Sequence[str]) -> list[str]:
    """Return the places that are gradients."""
    return [where for where in at if parse(where).at("").is_gradient]


def loss_of(name: str | None, at: Sequence[str]) -> LossFunction | None:
    """Return a function from the output to the loss, or None if nothing asks for gradients."""
    if name is None:
        wanted = asks_for_gradients(at)
        return _needed(wanted[0]) if wanted else None
    if name == "lm":
        return _needed("--loss lm")
    if name == "sum":
        return _sum
    if is_function(name):
        found: LossFunction = import_name(name)
        return found
    raise HooklineError(f"--loss {name}: give lm, sum, or module:function")


def _needed(why: str) -> LossFunction:
    def loss(output: Any) -> Tensor:
        """Return the loss that a transformers model computes from labels."""
        found = getattr(output, "loss", None)
        if not isinstance(found, Tensor):
            raise HooklineError(
                f"{why!r} needs a loss, and the output has none; give --loss lm, --loss sum or --loss module:function"
            )
        return found

    return loss


def _sum(output: Any) -> Tensor:
    """Return the sum of the first tensor of floats in the output."""
    found = next((one for one in leaves(output) if one.is_floating_point()), None)
    if found is None:
        raise HooklineError("--loss sum: the output holds no floats")
    return found.sum()
