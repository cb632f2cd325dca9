"""The data of a page: exact statistics, and pictures within their stated error."""

from __future__ import annotations

import json
import os
import re

import pytest
import torch
from torch import nn

import hookline as hl
from hookline import Site
from tests.errors.wording import says
from tests.support.explorer_pages import data_of, loss, module_of, pixels, shown, site_of, text_of


def test_every_field_of_a_page_is_as_the_front_end_expects_it(model, ids, path):
    page = data_of(hl.explore(model, run=(ids,), against=(ids + 0,), to=path, loss=loss, tokens=[["a"] * 5] * 2))
    assert list(page) == [
        *("format", "title", "made", "version", "notes", "runs", "modules", "sites", "tokens", "warnings", "measured"),
    ]
    assert page["format"] == ["hookline page", 1]
    assert page["version"] == hl.__version__
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d", page["made"])
    for site in page["sites"]:
        assert list(site) == [
            *(
                "name",
                "path",
                "port",
                "member",
                "index",
                "call",
                "within",
                "parts",
                "order",
                "kind",
                "dtype",
                "shape",
                "describe",
            ),
            *("gradient", "value", "calls", "over", "stats", "histogram", "tokens", "picture"),
        ]
        assert Site.parse(site["name"]) == Site(**{name: site[name] for name in Site._fields})
        assert len(site["stats"]) == len(site["histogram"]) == len(site["picture"]) == 3
        assert (site["tokens"] is None) == (site["kind"] != "tokens")
        assert all(len(found["counts"]) == 64 for found in site["histogram"])
        assert all(sum(found["counts"]) == site["stats"][0]["elements"] for found in site["histogram"])
        assert list(site["stats"][0]) == [
            *("mean", "std", "min", "max", "norm", "zeros", "nan", "inf", "rms", "abs", "dead", "elements"),
        ]
        assert list(site["picture"][0]) == ["shape", "of", "pick", "left_out", "levels", "codes", "error"]
    assert list(page["modules"][0]) == [
        *("path", "type", "parameters", "own", "calls", "order", "shape", "dtype", "hazards", "also", "sites"),
    ]


def test_pictures_and_statistics_are_those_of_the_values(model, ids, path):
    page = data_of(hl.explore(model, run=(ids,), to=path))
    with pytest.warns(hl.HooklineWarning, match=says("was not called")):
        _, acts = hl.run(model, ids, capture="**")
    for site in page["sites"]:
        if not site["path"]:
            continue
        value = acts.select(site["name"])[site["name"]].double()
        (picture,), (stats,) = site["picture"], site["stats"]
        assert (pixels(picture) - shown(value, picture)).abs().max() <= picture["error"] + 1e-15
        assert picture["left_out"] == ""
        assert stats["mean"] == pytest.approx(value.mean().item(), rel=1e-12, abs=1e-15)
        assert stats["max"] == value.max().item()


def test_two_runs_stand_side_by_side_with_their_difference(model, ids, path):
    other = ids.clone()
    other[:, 2] = 0
    page = data_of(hl.explore(model, run=(ids,), against=(other,), to=path, names=["clean", "corrupted"]))
    assert page["runs"] == [{"name": "clean"}, {"name": "corrupted"}]
    _, clean = hl.run(model, ids, capture="h.1")
    _, corrupted = hl.run(model, other, capture="h.1")
    site = site_of(page, "h.1")
    difference = corrupted["h.1"].double() - clean["h.1"].double()
    assert site["stats"][2]["norm"] == pytest.approx(difference.norm().item(), rel=1e-12)
    assert (pixels(site["picture"][2]) - difference).abs().max() <= site["picture"][2]["error"]
    assert site["tokens"][2]["norm"][0][2] == pytest.approx(difference[0, 2].norm().item(), rel=1e-5)


def test_gradients_stand_beside_their_values(model, ids, path):
    page = data_of(hl.explore(model, run=(ids,), to=path, loss=loss))
    with hl.capture(model, "h.1:grad_output") as grads:
        loss(model(ids)).backward()
    value = site_of(page, "h.1")
    gradient = page["sites"][value["gradient"]]
    assert gradient["name"] == "h.1:grad_output"
    assert page["sites"][gradient["value"]]["name"] == "h.1"
    assert value["value"] is gradient["gradient"] is None
    assert gradient["stats"][0]["norm"] == pytest.approx(grads["h.1:grad_output"].double().norm().item(), rel=1e-6)


def test_a_value_of_several_tensors_has_a_site_for_each(model, ids, path):
    page = data_of(hl.explore(model, run=(ids,), to=path))
    assert [page["sites"][number]["name"] for number in module_of(page, "h.0.attn")["sites"]] == [
        "h.0.attn[0]",
        "h.0.attn[1]",
    ]
    weights = site_of(page, "h.0.attn[1]")
    assert weights["kind"] == "attention"
    assert weights["shape"] == [2, 2, 5, 5]
    assert weights["describe"] == "float32 (2, 2, 5, 5), of tuple of 2: float32 (2, 5, 8), (2, 2, 5, 5)"


def test_runs_of_different_shapes_have_no_difference_and_a_note_says_why(path):
    page = data_of(hl.explore({"a": torch.ones(2, 3), "b": torch.ones(2)}, against={"a": torch.ones(4, 3)}, to=path))
    assert site_of(page, "a")["stats"][2] is site_of(page, "a")["picture"][2] is None
    assert site_of(page, "a")["picture"][1]["of"] == [4, 3]
    assert "'a' has shape (2, 3) in one run and (4, 3) in the other: no difference" in page["notes"]


VALUES = {
    "none": None,
    "text": "words",
    "number": 7,
    "scalar": torch.tensor(2.5),
    "empty": torch.zeros(0, 3),
    "nothing": torch.full((3,), float("nan")),
    "infinite": torch.tensor([[float("inf"), float("-inf"), 1.0]]),
    "half": torch.randn(2, 3).half(),
    "brain": torch.randn(2, 3).bfloat16(),
    "integers": torch.arange(6).reshape(2, 3),
    "booleans": torch.tensor([True, False]),
    "complex": torch.tensor([3 + 4j]),
    "sparse": torch.eye(3).to_sparse(),
    "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "quantised": torch.quantize_per_tensor(torch.randn(4), 0.1, 0, torch.qint8),
    "six": torch.randn(2, 2, 2, 2, 2, 2),
    "meta": torch.empty(2, 3, device="meta"),
    "tree": {"a": [torch.ones(2), None], "b": (torch.zeros(1, 2), 3)},
    "learned": nn.Parameter(torch.randn(3)),
}


def test_any_value_has_its_place(path):
    page = data_of(hl.explore(VALUES, against=VALUES, to=path))
    kinds = {site["name"]: site["kind"] for site in page["sites"]}
    assert set(VALUES) - set(kinds) == {"tree"}
    assert 'tree["a"][0]' in kinds
    assert 'tree["b"][0]' in kinds
    assert site_of(page, "none")["describe"] == "None"
    assert site_of(page, "none")["stats"] == [None, None, None]
    assert site_of(page, "empty")["picture"] == [None] * 3
    assert site_of(page, "nothing")["stats"][0]["mean"] == "nan"
    assert pixels(site_of(page, "infinite")["picture"][0]).tolist() == [[float("inf"), float("-inf"), 1.0]]
    assert site_of(page, "six")["picture"][0]["of"] == [8, 2, 2, 2]
    assert pixels(site_of(page, "complex")["picture"][0]).tolist() == [5.0]
    assert site_of(page, "nested")["shape"] == [5]
    assert site_of(page, "scalar")["picture"][0]["shape"] == []
    assert pixels(site_of(page, "scalar")["picture"][0]).item() == 2.5
    assert site_of(page, "meta")["describe"] == "float32 (2, 3) without data"


def test_the_same_value_at_any_size_of_page_keeps_its_statistics(path, size_of_page):
    values = {f"h.{layer}": torch.randn(4, 30, 100) for layer in range(6)}
    bytes = 40_000 + size_of_page
    large, small = (data_of(hl.explore(values, to=path, most=most)) for most in ("2 MB", bytes))
    assert os.path.getsize(path) < bytes
    for one, other in zip(large["sites"], small["sites"], strict=True):
        assert one["stats"] == other["stats"]
        assert one["picture"][0]["left_out"] == ""
        assert other["picture"][0]["left_out"] != ""
    assert small["notes"] == []
    assert "larger than most=, and has no pictures" in data_of(hl.explore(values, to=path, most=100))["notes"][0]


def test_small_values_are_exact_where_there_is_room(path):
    values = {"logits": torch.randn(3, 10), "lstm": torch.randn(2, 6, 20), "bias": torch.randn(252)}
    page = data_of(hl.explore(values, to=path))
    for site in page["sites"]:
        assert site["picture"][0]["error"] == 0
        assert torch.equal(
            pixels(site["picture"][0]).reshape(values[site["name"]].shape), values[site["name"]].double()
        )


def test_a_page_of_many_sites_keeps_to_its_bytes(path, size_of_page):
    values = {f"h.{layer}": torch.randn(4, 30) for layer in range(300)}
    least = size_of_page + 320_000
    page = hl.explore(values, to=path, most=least)
    assert page.bytes <= least
    assert "too small for pictures" in data_of(page)["notes"][0]
    page = hl.explore(values, to=path, most=100)
    assert "larger than most=" in data_of(page)["notes"][0]
    assert {one for site in data_of(page)["sites"] for one in site["picture"]} == {None}


def test_averaged_attention_has_samples_and_no_heads(path):
    model, x = nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(3, 5, 8)
    site = site_of(data_of(hl.explore(model, run=(x, x, x), to=path)), "[1]")
    assert (site["kind"], site["picture"][0]["shape"]) == ("attention", [3, 1, 5, 5])
    expected = model(x, x, x)[1].detach().double()
    assert (pixels(site["picture"][0])[:, 0] - expected).abs().max() <= site["picture"][0]["error"]


def test_a_value_without_a_finite_element_has_no_norm(path):
    (site,) = data_of(hl.explore({"a": torch.full((3, 4), float("nan"))}, to=path))["sites"]
    assert (site["stats"][0]["norm"], site["stats"][0]["rms"]) == ("nan", "nan")


def test_tokens_that_are_as_many_as_no_value_has_are_told(path):
    notes = data_of(hl.explore({"a": torch.randn(2, 5, 4)}, to=path, tokens=["a", "b"]))["notes"]
    assert notes == ["tokens= are not shown: a sample has 2 of them, and values have 5"]
    assert data_of(hl.explore({"a": torch.randn(1, 2, 4)}, to=path, tokens=["a", "b"]))["notes"] == []


def test_a_measured_place_that_is_not_on_the_page_is_told(model, ids, path):
    page = data_of(hl.explore(model, run=(ids,), to=path, measured={"rise": {"nosuch": 1.0, "head": 0.5}}))
    assert page["notes"] == ["measured= names places that are not on this page: 'nosuch'"]


def test_half_of_a_letter_can_be_a_token(path):
    page = data_of(hl.explore({"a": torch.randn(1, 2, 4)}, to=path, tokens=["a\ud83d", "b"], title="\udc80"))
    assert (page["tokens"], page["title"]) == ([["a\ud83d", "b"]], "\udc80")


def test_a_name_that_would_end_the_script_is_inert(path):
    hostile = "</script><script>alert(1)</script>\u2028&amp;<!--"
    model = nn.Sequential()
    model.add_module(hostile, nn.Linear(2, 2))
    page = hl.explore(model, run=(torch.ones(1, 2),), to=path, title=hostile, names=[hostile], tokens=[[hostile]])
    assert hostile in data_of(page)["modules"][1]["path"]
    data = text_of(page).partition('id="hookline-data">')[2].partition("</script>")[0]
    assert not set("<>&\u2028\u2029") & set(data)
    assert json.loads(data)["title"] == hostile


def test_what_was_measured_is_in_it(model, ids, path):
    class Sweep(dict):
        base = 0.9

    measured = {"left": Sweep({"h.0": 0.5, "h.0.mlp[:, 0]": torch.tensor(0.25)}), "other": {"head": float("nan")}}
    page = data_of(hl.explore(model, run=(ids,), to=path, measured=measured))
    left, other = page["measured"]
    number = [site["name"] for site in page["sites"]].index("h.0")
    assert left["base"] == 0.9
    assert left["rows"][0] == {"name": "h.0", "value": 0.5, "site": number, "module": "h.0"}
    assert left["rows"][1] == {"name": "h.0.mlp[:, 0]", "value": 0.25, "site": None, "module": "h.0.mlp"}
    assert (other["title"], other["base"], other["rows"][0]["value"]) == ("other", None, "nan")


def test_several_calls_and_tokens_of_a_site_stand_on_the_page_as_they_are_written(path):
    names = ["h.0#1:", "h.0#{0,2}/softmax#-1", "h.0#3", "h.0[:, @prompt[-1]]", "h.0[:, @(3, 5)]"]
    sites = data_of(hl.explore({name: torch.ones(2, 3) for name in names}, to=path))["sites"]
    assert [site["name"] for site in sites] == names
    assert [(site["call"], site["within"]) for site in sites[:3]] == [("1:", None), ("-1", "{0,2}"), (3, None)]
