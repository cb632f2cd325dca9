"""Arguments and options that several commands share: MODEL, --input, --text, --dtype, --json and others."""

from __future__ import annotations

from typing import Annotated

import typer

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="module:name (a function, class or model), or a folder, name or config.json of transformers.",
    ),
]
Input = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="What goes in: .safetensors (tensors by argument), .npy, texts (.txt, .jsonl), an image or a folder of "
        "them, or module:function.",
    ),
]
Text = Annotated[list[str] | None, typer.Option(metavar="WORDS", help="A text to go in. May be given several times.")]
Shape = Annotated[
    list[str] | None,
    typer.Option(
        metavar="SIZES", help="Numbers of this shape go in: 1,3,224,224 or ids=2,6:int64. Once for each argument."
    ),
]
Processor = Annotated[
    str | None, typer.Option(metavar="NAME", help="The tokenizer or image processor, if not the model's.")
]
Column = Annotated[str | None, typer.Option(metavar="NAME", help="The column or JSON field of the data.")]
Samples = Annotated[int | None, typer.Option(metavar="N", min=1, help="Take so many texts or images, the first ones.")]
MaxLength = Annotated[int | None, typer.Option(metavar="N", min=1, help="Cut texts after so many tokens.")]
Attention = Annotated[
    str | None, typer.Option(metavar="KIND", help="eager, sdpa, ...: eager makes the pattern, at '**/softmax'.")
]
Dtype = Annotated[str | None, typer.Option(metavar="DTYPE", help="Run the model in this: bfloat16, float64, ...")]
Device = Annotated[str | None, typer.Option(metavar="DEVICE", help="Where the model runs; a GPU if there is one.")]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run the Python code that a checkpoint brings along.")
]
Loss = Annotated[
    str | None,
    typer.Option(
        metavar="LOSS",
        help="Run backward, too, from: lm (each token predicts the next), sum (of the output), or module:function of "
        "the output.",
    ),
]
All = Annotated[bool, typer.Option("--all", help="Every row of a table: no blocks shown as one, none left out.")]
Json = Annotated[bool, typer.Option("--json", help="Write JSON for a script, and nothing else.")]
