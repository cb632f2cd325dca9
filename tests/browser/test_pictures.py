"""The pictures: the value under the cursor is the captured one, within the error that the page states."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict

import pytest
import torch

import hookline as hl

SOFTMAX = "transformer.h.3.attn/softmax"


def error_of(window) -> float:
    """Return the largest error that the page states for any run."""
    texts = [text.removeprefix(" ± ").replace("e−", "e-") for text in window.texts(".tip .error")]
    return max(map(float, texts), default=0.0)


@pytest.fixture(scope="module")
def values(tmp_path_factory):
    """Two runs with values of all kinds, and their page."""
    torch.manual_seed(0)
    shapes = {"maps": (2, 6, 5, 7), "tokens": (2, 4, 1500), "units": (3, 10), "line": (9,), "number": ()}
    runs = [{name: torch.randn(shape) ** 3 for name, shape in shapes.items()} for _ in range(2)]
    for run in runs:
        run["attention"] = torch.randn(2, 3, 4, 4).softmax(-1)
    runs[0]["maps"][0, 1, 2, 3] = float("nan")
    runs[0]["maps"][0, 1, 2, 4] = float("inf")
    words = [[" The", " cat", " sat", " down"], [" A", " dog", " ran", " off"]]
    to = tmp_path_factory.mktemp("kinds") / "kinds.html"
    page = hl.explore(runs[0], against=runs[1], to=to, names=["one", "other"], tokens=words)
    return runs, page


def test_the_weight_under_the_cursor_names_its_words(look, values):
    runs, page = values
    window = look(page, site="attention", tile=2)
    window.page.locator(".panels canvas").first.focus()
    window.press("ArrowDown", "ArrowDown", "ArrowDown", "ArrowRight")
    place, found = window.tip()
    assert place == "sample 0 · head 2 · query 2 “ sat” · key 1 “ cat”"
    one, other = (float(run["attention"][0, 2, 2, 1]) for run in runs)
    assert found == pytest.approx([one, other, other - one], abs=error_of(window) * 1.05 + 1e-6)


def test_the_mouse_finds_every_cell_of_a_grid(look, values):
    runs, page = values
    window = look(page, site="maps", view="a")
    frame = window.page.locator(".panels canvas").first.bounding_box()
    points = [(x, y) for y in range(4, int(frame["height"]), 9) for x in range(4, int(frame["width"]), 9)]
    seen = defaultdict(list)
    for place, *what in window.sweep(".panels canvas", points):
        seen[place].append(what)
    assert len(seen) == 6 * 5 * 7
    for place, whats in seen.items():
        found, red, error = whats[0][0], statistics.median(what[1] for what in whats), whats[0][2]
        index = tuple(int(part.split()[1]) for part in place.split(" · "))
        true = float(runs[0]["maps"][index])
        assert (found is None) if math.isnan(true) else (found == pytest.approx(true, abs=error * 1.05 + 1e-9))
        if math.isfinite(true) and abs(true) > 2:
            assert (red > 0) == (true > 0), f"{place} is {true}, but has the colour of the other sign"


def test_not_a_number_and_infinities_are_said_under_the_cursor(look, values):
    window = look(values[1], site="maps", tile=1)
    window.page.locator(".panels canvas").first.focus()
    window.press("ArrowDown", "ArrowDown", "ArrowDown", *["ArrowRight"] * 3)
    assert window.texts(".tip b")[0] == "NaN"
    window.press("ArrowRight")
    assert window.texts(".tip b")[0] == "∞"
    assert window.texts(".legend .strange") == ["NaN", "Inf", "NaN", "Inf"]  # For the runs and their difference.
    assert look(values[1], site="tokens").texts(".legend .strange") == []


def test_the_bars_of_any_sample_of_a_batch_can_be_seen(look, values):
    runs, page = values
    window = look(page, site="units", view="a")
    window.page.select_option("select[aria-label=Sample]", "2")
    window.page.locator(".bars-place svg").first.focus()
    window.press("ArrowRight", "ArrowRight")
    place, found = window.tip()
    assert place == "unit 1"
    assert found[0] == pytest.approx(float(runs[0]["units"][2, 1]), abs=error_of(window) * 1.05 + 1e-6)


def test_of_columns_that_share_a_pixel_the_strongest_is_seen_and_said(look, values):
    runs, page = values
    window = look(page, site="tokens", view="b", size=(900, 800))
    value = runs[1]["tokens"][0]
    strongest = value.abs().argmax()
    row, column = divmod(int(strongest), value.shape[1])
    frame = window.page.locator(".panels canvas").first.bounding_box()
    said = {
        place
        for place, *_ in window.sweep(".panels canvas", [(x, 12 + 22 * row) for x in range(30, int(frame["width"]))])
    }
    assert f"sample 0 · token {row} “{[' The', ' cat', ' sat', ' down'][row]}” · unit {column}" in said


@pytest.mark.parametrize(("kind", "canvases", "charts"), [("units", 3, 3), ("line", 0, 3), ("number", 0, 0)])
def test_vectors_are_bars_and_a_number_is_a_number(look, values, kind, canvases, charts):
    runs, page = values
    window = look(page, site=kind)
    assert window.page.locator(".panels canvas").count() == canvases
    assert window.page.locator(".panels .bars-place svg").count() == charts
    if kind == "number":
        shown = window.page.locator(".number").first.text_content().replace("−", "-")
        assert float(shown) == pytest.approx(float(runs[0][kind]), rel=1e-5)
    else:
        window.page.locator(".bars-place svg").first.focus()
        window.press("ArrowRight", "ArrowRight", "ArrowRight")
        place, found = window.tip()
        assert place == "unit 2"
        assert found[0] == pytest.approx(float(runs[0][kind].reshape(-1)[2]), abs=error_of(window) * 1.05 + 1e-6)


def test_statistics_are_exact_and_all_digits_are_there(look, values):
    runs, page = values
    window = look(page, site="tokens")
    cells = window.page.eval_on_selector_all(
        ".statistics td[data-exact]", "all => all.map(one => Number(one.dataset.exact))"
    )
    one, other = (run["tokens"].double() for run in runs)
    assert cells[:3] == pytest.approx([float(one.mean()), float(other.mean()), float((other - one).mean())], rel=1e-9)
    assert window.texts(".statistics tbody th")[0] == "mean"


def test_a_click_enlarges_a_head_and_escape_goes_back(look, gpt2):
    window = look(gpt2, site=SOFTMAX)
    frame = window.page.locator(".panels canvas").first.bounding_box()
    window.page.mouse.click(frame["x"] + 20, frame["y"] + 30)
    window.wait_for_state(tile="0")
    assert "head 0" in window.texts(".stepper span")
    window.page.click("[aria-label='Next head'] >> nth=0")
    window.wait_for_state(tile="1")
    window.press("Escape")
    window.wait_for_state(tile=None)
    assert window.heading == SOFTMAX


def test_the_clip_changes_the_colours_and_the_legend(look, values):
    window = look(values[1], site="tokens", view="a")
    picture = "() => document.querySelector('.panels canvas').toDataURL()"
    before, legend = window.page.evaluate(picture), window.texts(".legend .end")
    window.page.locator(".clip input").first.focus()
    window.press("ArrowLeft", "ArrowLeft", "ArrowLeft")
    assert window.page.text_content(".clip output") != "99.5 %"
    assert window.texts(".legend .end") != legend
    assert window.page.evaluate(picture) != before


def test_a_sample_can_be_chosen(look, values):
    window = look(values[1], site="maps", view="a")
    window.page.select_option("select[aria-label=Sample]", "1")
    window.page.locator(".panels canvas").first.focus()
    window.press("ArrowDown")
    assert window.tip()[0] == "sample 1 · channel 0 · row 0 · column 0"
    window.wait_for_state(sample="1")


def test_pictures_are_described_to_those_who_do_not_see_them(look, gpt2):
    window = look(gpt2, site=SOFTMAX)
    labels = window.page.eval_on_selector_all(
        "canvas, svg[role=img]", "all => all.map(one => one.getAttribute('aria-label'))"
    )
    assert labels
    assert all(labels)
    assert f"{SOFTMAX}, clean: attention of 2 by 12 by 16 by 16" in labels[0]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    """Two runs with prompts of different lengths, and their page."""
    torch.manual_seed(0)
    runs = [
        {
            "att": torch.randn(2, heads, length, length).softmax(-1),
            "tokens": torch.randn(2, length, 6),
            "units": torch.randn(length, length + 2),
            "line": torch.randn(length),
        }
        for heads, length in ((3, 5), (4, 7))
    ]
    return runs, hl.explore(runs[0], against=runs[1], to=tmp_path_factory.mktemp("prompts") / "prompts.html")


@pytest.mark.parametrize("site", ["att", "tokens", "units"])
@pytest.mark.parametrize("run", [0, 1])
def test_of_runs_with_different_shapes_each_number_is_of_the_place_that_is_named(look, prompts, site, run):
    values, page = prompts
    window = look(page, site=site, sample=1)
    canvas = window.page.locator(".panels canvas").nth(run)
    canvas.focus()
    window.press("ArrowDown", "PageDown", *["ArrowDown"] * 3, *["ArrowRight"] * 4)
    for _ in range(3):  # Only the longer run has the last rows and columns.
        place, _ = window.tip()
        index = tuple(int(part.split()[1]) for part in place.split(" · "))
        texts = window.texts(".tip b")
        for one, text, other in zip((0, 1), texts, values, strict=True):
            inside = all(at < size for at, size in zip(index, other[site].shape, strict=True))
            assert (text != "none") == inside
            marks = window.page.locator(".picture-frame >> .cell-mark:visible")
            if inside:
                found = window.page.eval_on_selector(f'.tip b[data-run="{one}"]', "one => Number(one.dataset.value)")
                assert found == pytest.approx(float(other[site][index]), abs=error_of(window) * 1.05 + 1e-6)
            assert marks.count() == sum(text != "none" for text in texts)
        window.press("ArrowDown", "ArrowRight")


@pytest.mark.parametrize("run", [0, 1])
def test_bars_of_runs_with_different_lengths_name_what_each_run_has(look, prompts, run):
    values, page = prompts
    window = look(page, site="line")
    window.page.locator(".bars-place svg").nth(run).focus()
    window.press(*["ArrowRight"] * (5 + 2 * run))
    unit = 4 + 2 * run
    assert window.tip()[0] == f"unit {unit}"
    expected = [float(one["line"][unit]) for one in values if unit < len(one["line"])]
    assert window.tip()[1] == pytest.approx(expected, abs=error_of(window) * 1.05 + 1e-6)
    assert window.texts(".tip b")[0] == "none" or run == 0


def test_in_a_grid_the_strongest_of_the_columns_that_share_a_pixel_is_that_of_its_own_tile(look, tmp_path):
    value = torch.zeros(1, 3, 60, 900)
    for channel, column in enumerate((103, 403, 703)):
        value[0, channel, :, column] = 3.0
    window = look(hl.explore({"maps": value}, to=tmp_path / "wide.html"), site="maps", size=(1000, 800))
    frame = window.page.locator(".panels canvas").bounding_box()
    points = [(x, y) for x in range(1, int(frame["width"])) for y in range(2, int(frame["height"]), 13)]
    strong = {
        tuple(place.split(" · ")[1::2]) for place, found, *_ in window.sweep(".panels canvas", points) if found == 3
    }
    assert strong == {("channel 0", "column 103"), ("channel 1", "column 403"), ("channel 2", "column 703")}
