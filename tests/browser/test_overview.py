"""The overview, the warnings and the list of names: they name the run and the layers, and cover the whole model."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

import hookline as hl


class Stages(nn.Module):
    """Like a U-Net: stages of three layers each, none of which dominates; the spare layers are never called."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = [f"d{number}" for number in range(6)]
        for name in self.stages:
            self.add_module(name, nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU()))
        self.spare = nn.ModuleList(nn.ModuleList([nn.Linear(3, 3)]) for _ in range(4))

    def forward(self, x):
        for name in self.stages:
            x = self.get_submodule(name)(x)
        return x


@pytest.fixture(scope="module")
def stages(tmp_path_factory):
    torch.manual_seed(0)
    to = tmp_path_factory.mktemp("stages") / "stages.html"
    return hl.explore(Stages(), run=(torch.randn(2, 3, 32, 32),), to=to)


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    """The page of two runs: both have a constant value, and only the second has a NaN."""
    torch.manual_seed(0)
    runs = [{"": torch.zeros(2, 4, 8), "tok": torch.randn(2, 4, 8), "last": torch.randn(2, 4, 8)} for _ in range(2)]
    runs[1]["tok"][0, 0, 0] = float("nan")
    to = tmp_path_factory.mktemp("broken") / "broken.html"
    return hl.explore(runs[0], against=runs[1], to=to, names=["clean", "corrupted"])


CUT = """names => names.filter(name => name.scrollWidth > name.clientWidth).map(name => {
const text = document.createTreeWalker(name, NodeFilter.SHOW_TEXT).nextNode(), range = document.createRange();
range.setStart(text, text.length - 1);
range.setEnd(text, text.length);
const [last, box] = [range.getBoundingClientRect(), name.getBoundingClientRect()];
return [name.textContent, last.width > 0 && last.left >= box.left - 1 && last.right <= box.right + 1];
})"""
CHARTS = """charts => charts.map(chart => [chart, ...chart.querySelectorAll('text.name')].map(one => {
const {left, right} = one.getBoundingClientRect();
return [left, right];
}))"""


def charts_of(window) -> list[list[tuple[float, float]]]:
    """Return the left and right edge of each line chart, and those of each name along it."""
    return window.page.eval_on_selector_all(".line-chart", CHARTS)


@pytest.mark.parametrize("width", [1000, 1440])
def test_names_too_long_for_the_list_keep_their_end(look, gpt2, width):
    window = look(gpt2, size=(width, 900), order="calls")
    cut = window.page.eval_on_selector_all(".tree .row .name", CUT)
    assert cut
    assert [name for name, has_its_end in cut if not has_its_end] == []


def test_a_site_says_of_which_run_a_warning_is(look, broken):
    window = look(broken, site="tok")
    assert window.texts(".warnings.here li .run-name") == ["corrupted"]


def test_what_both_runs_have_is_said_once_and_the_model_is_named(look, broken):
    window = look(broken)
    constant = [text for text in window.texts(".warnings li") if "everywhere" in text]
    assert len(constant) == 1
    assert constant[0].endswith("both runs")
    assert "'model'" in constant[0]


def test_the_badge_counts_warnings_and_not_notes(look, broken, stages, tmp_path):
    assert look(broken).page.text_content(".badge") == "1 error and 1 warning"
    window = look(stages)
    assert window.page.text_content(".badge").endswith("note")
    assert "warning" not in window.page.text_content(".badge")


def test_a_warning_for_many_layers_marks_and_finds_each_of_them(look, stages):
    window = look(stages)
    window.page.click("text=open all")
    dotted = window.page.locator(".row:has(.dot.note)").evaluate_all("all => all.map(one => one.dataset.name)")
    assert [f"spare.{layer}.0" for layer in range(4)] == [name for name in dotted if name.endswith(".0")]
    window.page.locator(".warnings li", has_text="spare.0.0").locator(".others").click()
    assert window.page.input_value("#search") == "spare.*.*"
    assert window.page.locator(".row:not(.faded)").count() == 4


def test_what_was_never_called_is_said_once_on_its_own_page(look, stages):
    assert len(look(stages, module="spare.0.0").texts(".warnings.here li")) == 1
    assert len(look(stages, module="spare.1.0").texts(".warnings.here li")) == 1


def test_a_model_of_many_stages_is_shown_as_a_whole(look, stages):
    window = look(stages)
    assert window.page.locator(".families h3").text_content() == "18 sites in the order they ran"
    assert window.page.locator(".line-chart").first.locator("circle").count() == 18


def test_integers_are_left_out_of_the_lines_over_depth(look, tmp_path):
    values = {f"h.{layer}": (torch.randn(3, 4), torch.arange(5)) for layer in range(4)}
    window = look(hl.explore(values, to=tmp_path / "packed.html"), search="h.*")
    assert window.page.locator(".families h3").text_content() == "8 sites that match"
    assert window.page.locator(".line-chart").first.locator("circle").count() == 4
    window.search("h.*[1]")
    assert window.page.locator(".line-chart").first.locator("circle").count() == 4


def test_of_values_with_several_tensors_the_first_is_drawn_and_the_page_says_so(look, gpt2):
    window = look(gpt2, search="transformer.h.*.attn")
    assert window.page.locator(".families h3").text_content() == "24 sites that match"
    assert window.texts(".families .hint")[0].startswith("12 are drawn")
    assert window.page.locator(".line-chart").first.locator("circle.run-a").count() == 12
    window.search("transformer.h.*.attn[1]")
    assert window.page.locator(".line-chart").first.locator("circle.run-a").count() == 12
    assert not window.texts(".families .hint")[0].startswith("12 are drawn")


def test_names_along_a_chart_are_whole(look, gpt2):
    window = look(gpt2)
    charts = charts_of(window)
    assert charts
    for frame, *names in charts:
        assert names
        for left, right in names:
            assert frame[0] <= left
            assert right <= frame[1] + 1


def test_attention_that_is_nearly_even_looks_even(look, tmp_path):
    value = (torch.randn(1, 2, 16, 16) * 0.01).softmax(-1)
    window = look(hl.explore({"att": value}, to=tmp_path / "even.html"), site="att")
    assert window.texts(".legend .end")[0] == "0"


def test_maps_are_as_large_as_there_is_room(look, tmp_path):
    torch.manual_seed(0)
    values = [{"maps": torch.randn(1, 12, 32, 32)} for _ in range(2)]
    page = hl.explore(values[0], against=values[1], to=tmp_path / "maps.html")
    window = look(page, site="maps", size=(1000, 800))
    frame = window.page.locator(".panels canvas").first.bounding_box()
    points = [(x, 30) for x in range(int(frame["width"]))]
    assert len(window.sweep(".panels canvas", points)) > 0.75 * len(points)


@pytest.mark.parametrize("width", [420, 500, 780])
def test_a_narrow_window_has_the_list_above_and_nothing_beyond_its_edge(look, gpt2, broken, width):
    for path, state in ((gpt2, {}), (gpt2, {"site": "transformer.h.3.mlp"}), (broken, {})):
        window = look(path, size=(width, 900), **state)
        side, main = (window.page.locator(one).bounding_box() for one in (".side", "main"))
        assert side["y"] + side["height"] <= main["y"] + 1
        assert main["width"] == width
        assert all(0 < box["width"] <= width - box["x"] for box in window.boxes(".top button"))
        assert all(box["width"] > 150 for box in window.boxes(".warnings li > .link"))
        for _, *names in charts_of(window):
            assert all(before[1] < after[0] for before, after in pairwise(names))


@pytest.mark.parametrize("width", [600, 900, 1440])
def test_long_names_of_runs_and_pages_leave_the_header_in_the_window(look, tmp_path, width):
    values = {f"h.{layer}": torch.randn(2, 4) for layer in range(3)}
    names = [f"when {who} went to the store and gave a drink to all the others who were there" for who in ("she", "he")]
    to, title = tmp_path / "long.html", "a title that is much too long for the header of a page, and goes on"
    window = look(hl.explore(values, against=values, to=to, names=names, title=title), size=(width, 700))
    assert window.page.evaluate("document.documentElement.scrollWidth") <= width
    edges = window.page.eval_on_selector_all(".top > *", "all => all.map(one => one.getBoundingClientRect().right)")
    assert max(edges) <= width
    assert [name.strip() for name in window.texts(".runs > span")] == names
    cut = window.page.locator(".runs > span").first
    assert cut.get_attribute("title") == names[0]
    assert cut.evaluate("one => one.querySelector('.cut').scrollWidth > one.querySelector('.cut').clientWidth")
    assert window.page.locator(".top h1").get_attribute("title") == title


@pytest.mark.parametrize(
    ("name", "layers", "width", "all_fit"), [("h", 12, 1440, True), ("blocks", 12, 900, False), ("h", 48, 1000, False)]
)
def test_names_along_the_depth_stand_at_even_steps_and_apart(look, tmp_path, name, layers, width, all_fit):
    values = {f"{name}.{layer}": torch.randn(2, 4) for layer in range(layers)}
    window = look(hl.explore(values, to=tmp_path / "deep.html"), size=(width, 800))
    chart = window.page.locator(".line-chart").first
    shown = [int(text.split(".")[-1]) for text in chart.locator("text.name").all_text_contents()]
    steps = {after - before for before, after in pairwise(shown)}
    assert len(shown) > 2
    assert len(steps) == 1
    assert (len(shown) == layers) == all_fit
    frame, *names = charts_of(window)[0]
    assert all(before[1] < after[0] for before, after in pairwise(names))
    assert frame[0] <= names[0][0]
    assert names[-1][1] <= frame[1]
