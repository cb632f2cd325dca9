"""The warnings of a page: each names the right place, once, and the most serious one comes first."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hookline as hl
from tests.support.explorer_pages import data_of


@pytest.fixture
def warnings_of(tmp_path):
    def warnings(what, **options):
        return data_of(hl.explore(what, to=tmp_path / "report.html", **options))["warnings"]

    return warnings


def layers(**sizes):
    return {name.replace("_", "."): size * torch.randn(8, 10) for name, size in sizes.items()}


def test_usual_values_are_not_warned_of(warnings_of):
    assert warnings_of({f"h.{layer}": torch.randn(8, 10) * (1 + layer) for layer in range(12)}) == []


def test_nan_is_told_where_it_began_and_comes_first(warnings_of):
    values = {f"h.{layer}": torch.randn(8, 10) for layer in range(6)}
    for layer in (2, 3, 4, 5):
        values[f"h.{layer}"][0] = float("nan")
    values["h.0"] = torch.zeros(8, 10)
    first, second = warnings_of(values)
    text = "NaN first in 'h.2': 12 % of it; 3 later sites too"
    assert first == {"level": "error", "what": "nan", "site": 2, "module": "h.2", "run": 0, "text": text}
    assert (second["what"], second["text"]) == ("constant", "'h.0' is 0 everywhere")


def test_inf_is_an_error_and_a_mask_is_not(warnings_of):
    mask = torch.full((4, 4), float("-inf")).triu(1)
    scores = torch.tensor([1.0, float("inf"), 2.0])
    bad, note = warnings_of({"attn/masked_fill": mask, "attn": scores})
    assert (bad["level"], bad["what"], bad["site"]) == ("error", "inf", 1)
    assert (note["level"], note["what"], note["site"]) == ("note", "inf", 0)
    assert "as in a mask" in note["text"]


def test_what_is_only_a_note_comes_last_whatever_it_is_of(warnings_of):
    values = {"mask": torch.full((4, 4), float("-inf")).triu(1), "h.0": torch.full((3, 3), 2.0)}
    assert [one["what"] for one in warnings_of(values)] == ["constant", "inf"]


def test_exploding_and_vanishing_sizes_are_told_with_the_layer_where_they_jump(warnings_of):
    (found,) = warnings_of(layers(h_0=1, h_1=2, h_2=3e3, h_3=6e3))
    assert (found["level"], found["what"], found["module"]) == ("warning", "exploding", "h.2")
    assert found["text"].startswith("the size (rms) grows ")
    assert "most at 'h.2'" in found["text"]
    (found,) = warnings_of(layers(h_0=1, h_1=0.1, h_2=0.01, h_3=0.0001, h_4=0.00001))
    assert (found["what"], found["module"]) == ("vanishing", "h.3")
    assert warnings_of(layers(h_0=1, stem=1e6, head=1e-6)) == []


def test_a_gradient_vanishes_from_the_last_layer_to_the_first(warnings_of):
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Sigmoid()) for _ in range(10)))
    found = warnings_of(model, run=(torch.randn(4, 16),), loss=torch.sum, at="*")
    (gradient,) = [one for one in found if one["what"] == "vanishing"]
    assert "the gradient's size (rms) shrinks" in gradient["text"]
    assert "from '9:grad_output'" in gradient["text"]
    assert "to '0:grad_output'" in gradient["text"]


def test_half_precision_near_its_end_is_told(warnings_of):
    (found,) = warnings_of({"h.0": torch.tensor([1.0, 3e4]).half(), "h.1": torch.tensor([1.0, 3e4])})
    assert (found["what"], found["site"]) == ("exploding", 0)
    assert found["text"] == "'h.0' up to 3e+04: float16 ends at 65504"


def test_dead_units_of_many_layers_are_one_warning_at_the_worst(warnings_of):
    values = {}
    for layer, dead in enumerate((1, 3, 8)):
        values[f"h.{layer}.act"] = torch.rand(4, 8, 10) + 0.1
        values[f"h.{layer}.act"][..., :dead] = 0
    values["seen.once"] = torch.rand(1, 10).round()
    (found,) = warnings_of(values)
    assert (found["level"], found["what"], found["module"]) == ("warning", "dead", "h.2.act")
    expected = "3 sites, 'h.0.act' … 'h.2.act': 10 % to 80 % of the units are zero wherever they were seen"
    assert found["text"] == expected


def test_a_share_that_is_the_same_everywhere_is_said_once(warnings_of):
    values = {f"h.{layer}.act": torch.rand(4, 8, 8) + 0.1 for layer in range(3)}
    for value in values.values():
        value[..., :2] = 0
    (found,) = warnings_of(values)
    assert found["text"] == "3 sites, 'h.0.act' … 'h.2.act': 25 % of the units are zero wherever they were seen"


def test_each_run_is_warned_of(warnings_of):
    good, bad = {"h.0": torch.randn(3, 4)}, {"h.0": torch.zeros(3, 4)}
    (found,) = warnings_of(good, against=bad)
    assert (found["run"], found["text"]) == (1, "'h.0' is 0 everywhere")


def test_a_container_whose_parts_are_called_one_by_one_is_no_news(warnings_of):
    class Stages(nn.Module):
        def __init__(self):
            super().__init__()
            self.used = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
            self.unused = nn.Sequential(nn.Linear(4, 4))

        def forward(self, x):
            for one in self.used:
                x = one(x)
            return x

    found = warnings_of(Stages(), run=(torch.randn(3, 4),))
    assert {one["module"] for one in found} == {"unused", "unused.0"}


def test_a_share_that_is_all_of_it_is_100_percent_and_no_other_is(warnings_of):
    nearly = torch.full((1000,), float("nan"))
    (found,) = warnings_of({"a": nearly})
    assert found["text"] == "NaN first in 'a': 100 % of it"
    nearly[0] = 1
    (found,) = warnings_of({"a": nearly})
    assert found["text"] == "NaN first in 'a': over 99 % of it"


def test_the_same_gradient_everywhere_is_usual_and_none_at_all_is_not(warnings_of):
    model = nn.Sequential(nn.Linear(4, 4), nn.Identity(), nn.Linear(4, 4))
    assert warnings_of(model, run=(torch.randn(3, 4),), loss=torch.sum) == []
    found = warnings_of(model, run=(torch.randn(3, 4),), loss=lambda output: 0 * output.sum())
    assert {one["what"] for one in found} == {"constant"}
    assert found[0]["text"] == "':grad_output' is 0 everywhere"


class Scaled(nn.Module):
    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = by

    def forward(self, x):
        return x * self.by


def test_layers_are_held_against_their_like_and_not_against_others_of_a_block(warnings_of):
    class Back(Scaled):
        pass

    model = nn.Sequential(*(nn.Sequential(nn.Identity(), Scaled(1e4), Back(1e-4)) for _ in range(4)))
    x = torch.randn(8, 10, requires_grad=True)
    assert warnings_of(model, run=(x,), loss=lambda output: output.square().sum()) == []
    with hl.capture(model, "**") as acts:
        model(x)
    assert warnings_of(acts) == []  # The same without the model, where module types are unknown.


def test_blocks_inside_of_another_container_are_layers_too(warnings_of):
    blocks = nn.Sequential(*(Scaled(20) for _ in range(4)))
    (found,) = warnings_of(nn.Sequential(nn.Sequential(nn.Linear(10, 10)), blocks), run=(torch.randn(8, 10),))
    assert "from '1.0' (" in found["text"]
    assert "to '1.3' (" in found["text"]


def test_what_is_said_of_a_jump_has_the_direction_of_the_numbers_in_it(warnings_of):
    values = {f"h.{layer}": torch.full((4,), size) for layer, size in enumerate((1.0, 1e-2, 5.0, 1e-2))}
    values = {name: value * torch.tensor([1, -1, 1, -1]) for name, value in values.items()}
    (found,) = warnings_of(values)
    assert (found["what"], found["module"]) == ("exploding", "h.2")
    assert found["text"] == "the size (rms) grows 500 times at once, from 'h.1' (0.01) to 'h.2' (5)"
    values["h.3"] = values["h.0"] * 1e-4
    (found,) = warnings_of(values)
    assert (found["what"], found["module"]) == ("vanishing", "h.3")
    assert found["text"] == (
        "the size (rms) shrinks 1e+04 times from 'h.0' (1) to 'h.3' (0.0001), most at 'h.3' (5e+04 times)"
    )
