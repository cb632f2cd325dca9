"""Read the contents of a figure; and a cache to draw."""

from __future__ import annotations

import torch

import hookline as hl
from tests.support.models import GPT, tokens
from tests.support.needs import needs

matplotlib = needs("matplotlib")
from matplotlib.figure import Figure  # noqa: E402

__all__ = ["INF", "NAN", "Figure", "captured", "drawn", "labels_of", "text_of"]

NAN, INF = float("nan"), float("inf")


def drawn(figure):
    """Lay out and draw a figure without a file, so that any warning or error appears here. Return the figure."""
    figure.draw_without_rendering()
    return figure


def text_of(figure):
    """Return all text of a figure."""
    drawn(figure)
    return "\n".join(text.get_text() for text in figure.findobj(matplotlib.text.Text))


def labels_of(axis):
    return [label.get_text() for label in axis.get_ticklabels()]


def captured():
    torch.manual_seed(0)
    model = GPT()
    with hl.capture(model, "h.*", "h.*.mlp.1", "head", "h.*:grad_output") as acts:
        model(tokens()).square().mean().backward()
    return acts
