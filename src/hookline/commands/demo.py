"""`hookline demo`: the worked example."""

from __future__ import annotations

from typing import Annotated

import typer

from hookline.demo import EPOCHS, PAGE, main

EXAMPLES = """
hookline demo --epochs 1 --to digits.html
"""


def demo(
    epochs: Annotated[
        int, typer.Option(metavar="N", min=1, help="How many times the net sees the training digits.")
    ] = EPOCHS,
    to: Annotated[str, typer.Option(metavar="PAGE", help="Where to write the page to browse.")] = PAGE,
) -> None:
    """Train a small net on digits and look inside it.

    On handwritten digits, offline, on the CPU, under a minute.
    """
    main(epochs, to)
