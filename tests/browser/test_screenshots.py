"""The screenshots in docs/images: taken here, and compared roughly with the committed ones.

HOOKLINE_IMAGES=1 rewrites them. Fonts and their smoothing differ between machines, so the comparison uses a small grey
version of each: a blank, broken or differently laid out page differs from it, another font hardly does.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.needs import needs

IMAGES = Path(__file__).parents[2] / "docs" / "images"
REWRITE = bool(os.environ.get("HOOKLINE_IMAGES"))
SMALL = (72, 45)
SOFTMAX = "transformer.h.6.attn/softmax"

# The page, the state in its address, light or dark, and the position of the mouse: an element and a point in it.
SHOTS = {
    "overview-light": ("gpt2", {}, "light", None),
    "overview-dark": ("digits", {}, "dark", None),
    "attention-light": ("gpt2", {"site": SOFTMAX, "gradient": "false"}, "light", None),
    "attention-dark": (
        "gpt2",
        {"site": SOFTMAX, "tile": "3", "gradient": "false"},
        "dark",
        (".panels canvas", 190, 230),
    ),
    "maps-light": ("digits", {"site": "h.1.conv"}, "light", (".panels canvas", 70, 34)),
    "maps-dark": ("digits", {"site": "h.1.conv", "view": "a"}, "dark", None),
    "tokens-dark": ("gpt2", {"site": "transformer.h.6.mlp", "search": "transformer.h.*.mlp"}, "dark", None),
    "tokens-light": ("gpt2", {"site": "transformer.h.6.mlp", "view": "difference"}, "light", None),
}


@pytest.mark.parametrize("name", SHOTS)
def test_the_page_looks_as_in_the_docs(look, request, tmp_path, name):
    page, state, scheme, mouse = SHOTS[name]
    window = look(request.getfixturevalue(page), scheme=scheme, size=(1440, 900), **state)
    if mouse is not None:
        window.hover(*mouse)
    committed = IMAGES / f"explorer-{name}.png"
    shot = committed if REWRITE else tmp_path / committed.name
    window.page.evaluate("document.querySelector('.made').textContent = ''")  # The page's date changes.
    window.page.screenshot(path=shot)
    if REWRITE:
        shrink(shot)
    assert difference(shot, committed) < 0.05


def shrink(path: Path) -> None:
    """Reduce a screenshot to 256 colours: a third of the bytes, with no visible change."""
    from PIL import Image

    few = Image.open(path).convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, kmeans=2, dither=Image.Dither.NONE)
    few.save(path, optimize=True)


def difference(one: Path, other: Path) -> float:
    """Return the mean difference of two screenshots, after stretching the lightness of each to 0 to 1."""
    import numpy

    needs("PIL")
    from PIL import Image, ImageOps

    small = []
    for path in (one, other):
        image = Image.open(path).convert("L")
        assert image.size == (1440, 900)
        assert len(image.getcolors(256) or range(256)) > 40, f"{path.name} is blank"
        small.append(numpy.asarray(ImageOps.autocontrast(image.resize(SMALL, Image.Resampling.BOX)), dtype=float) / 255)
    return float(numpy.abs(small[0] - small[1]).mean())


@pytest.mark.skipif(REWRITE, reason="needs HOOKLINE_IMAGES to be unset: it rewrites the screenshots")
def test_the_comparison_sees_a_page_that_is_empty_or_another(tmp_path):
    needs("PIL")
    from PIL import Image

    committed = {name: IMAGES / f"explorer-{name}.png" for name in SHOTS}
    for name, path in committed.items():
        others = [difference(path, other) for other in committed.values() if other != path]
        assert min(others) > 0.05, name
    half = Image.open(committed["overview-light"]).convert("RGB")
    half.paste((251, 250, 247), (450, 48, 1440, 900))
    half.save(tmp_path / "half.png")
    assert difference(tmp_path / "half.png", committed["overview-light"]) > 0.05
