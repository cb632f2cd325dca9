"""The options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

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

EPOCHS = 12  # How long `demo` trains, unless --epochs says otherwise.
PAGE = "hookline-demo.html"  # The page that `demo` writes, unless --to says otherwise.
