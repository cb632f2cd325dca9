"""The data of a page: right to the last digit in its statistics, and within what it says in its pictures."""

from __future__ import annotations

import json
import os
import re
import time

import pytest
import torch
from torch import nn

import hookline as hl
from hookline._explore import explore as explorer
from hookline._sites.language import Site
from tests.support.explorer_pages import data_of, module_of, pixels, shown, site_of, text_of


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(width, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))

    def forward(self, x):
        x = x + self.attn(x, x, x, average_attn_weights=False)[0]
        return x + self.mlp(x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.h = nn.ModuleList(Block(8) for _ in range(3))
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 20)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.h:
            x = block(x)
        return self.head(self.norm(x.transpose(1, 2)).transpose(1, 2))


@pytest.fixture
def model():
    return Net().eval()


@pytest.fixture
def ids():
    return torch.randint(20, (2, 5))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "report.html"


def loss(logits):
    return logits.logsumexp(-1).mean()


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
            *("gradient", "value", "calls", "stats", "histogram", "tokens", "picture"),
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
    with pytest.warns(hl.HooklineWarning, match="out_proj"):
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


def test_modules_come_as_a_tree_with_what_a_scan_tells(model, ids, path):
    page = data_of(hl.explore(model, run=(ids,), to=path))
    paths = [module["path"] for module in page["modules"]]
    assert paths == [name for name, _ in model.named_modules()]
    mlp = module_of(page, "h.0.mlp")
    assert (mlp["type"], mlp["parameters"], mlp["own"], mlp["calls"]) == ("Sequential", 280, 0, 1)
    assert mlp["shape"] == "(2, 5, 8)"
    assert module_of(page, "h")["calls"] is None
    order = [
        module["path"]
        for module in sorted(page["modules"], key=lambda one: one["order"] or 0)
        if module["order"] is not None
    ]
    assert order[:5] == ["", "embed", "h.0", "h.0.attn", "h.0.mlp"]
    silent = module_of(page, "h.0.attn.out_proj")
    assert silent["calls"] == 0
    assert silent["hazards"][0].startswith("never called: MultiheadAttention reads its weight directly")
    assert silent["order"] is None


def test_a_tied_module_stands_once_with_its_other_names(path):
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    model.append(model[0])
    page = data_of(hl.explore(model, run=(torch.ones(1, 2),), to=path))
    assert module_of(page, "0")["also"] == ["2"]
    assert site_of(page, "0")["calls"] == [2]
    assert module_of(page, "0")["calls"] == 2


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_left_as_it_was_found(model, ids, path, training):
    model.train(training)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    held = {name: dict(module.__dict__) for name, module in model.named_modules()}
    random = torch.get_rng_state()
    hl.explore(model, run=(ids,), against=(ids,), to=path, loss=loss)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model.training is training
    assert {name: dict(module.__dict__) for name, module in model.named_modules()} == held
    assert len(hl.attached(model)) == 0


def test_what_a_model_keeps_of_a_run_is_put_back(path):
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen = []
            self.register_buffer("steps", torch.zeros(()))

        def forward(self, x):
            self.seen.append(x)
            self.latest = x
            self.steps = self.steps + 1
            return 2 * x

    model = Counting()
    steps = model.steps
    hl.explore(model, run=(torch.ones(2),), against=(torch.ones(2),), to=path)
    assert model.seen == []
    assert not hasattr(model, "latest")
    assert model.steps is steps


def test_dropout_falls_alike_in_both_runs(path):
    model = nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5)).train()
    page = data_of(hl.explore(model, run=(torch.ones(2, 4),), against=(torch.ones(2, 4),), to=path))
    assert site_of(page, "1")["stats"][2]["norm"] == 0
    assert page["warnings"][-1]["text"] == "the two runs are equal at every site"


def test_hooks_that_are_there_act_and_stay(model, ids, path):
    with hl.capture(model, "h.1") as acts, hl.patch(model, {"h.0.mlp": 0.0}):
        page = data_of(hl.explore(model, run=(ids,), to=path))
        model(ids)
    assert site_of(page, "h.0.mlp")["stats"][0]["norm"] == 0
    assert site_of(page, "h.1")["stats"][0]["max"] == acts["h.1"].max().item()
    assert len(hl.attached(model)) == 0


def test_a_model_that_fails_is_left_as_it_was_too(model, path):
    with pytest.raises(IndexError):
        hl.explore(model, run=(torch.full((1, 3), 99),), to=path)
    assert len(hl.attached(model)) == 0
    assert not path.exists()


def test_keywords_can_be_given_as_a_mapping_and_places_be_chosen(model, ids, path):
    page = data_of(hl.explore(model, run={"ids": ids}, to=path, at=["h.*", "h.0.mlp.1:input", "head.weight:param"]))
    assert [site["name"] for site in page["sites"]] == ["h.0.mlp.1:input", "h.0", "h.1", "h.2", "head.weight:param"]
    assert [page["sites"][number]["name"] for number in module_of(page, "head")["sites"]] == ["head.weight:param"]


def test_a_cache_alone_gives_a_tree_by_its_names(model, ids, path):
    _, acts = hl.run(model, ids, capture=["h.*.mlp", "head"])
    page = data_of(hl.explore(acts, to=path))
    assert [module["path"] for module in page["modules"]] == [
        "",
        "h",
        "h.0",
        "h.0.mlp",
        "h.1",
        "h.1.mlp",
        "h.2",
        "h.2.mlp",
        "head",
    ]
    unknown = {"type": "", "parameters": None, "own": None, "hazards": [], "also": []}
    known = {"path": "h.1.mlp", "calls": 1, "order": 1, "shape": "(2, 5, 8)", "dtype": "float32", "sites": [1]}
    assert module_of(page, "h.1.mlp") == {**unknown, **known}
    assert module_of(page, "h.1")["calls"] is None


def test_a_cache_with_its_model_tells_types_and_what_was_never_called(model, ids, path):
    with pytest.warns(hl.HooklineWarning, match="out_proj"), hl.capture(model, "**") as acts:
        model(ids)
    page = data_of(hl.explore(acts, model=model, to=path))
    assert module_of(page, "h.2.mlp.1")["type"] == "ReLU"
    assert module_of(page, "h.0.attn.out_proj")["calls"] == 0
    (never,) = [warning for warning in page["warnings"] if warning["what"] == "never"]
    assert never["module"] == "h.0.attn.out_proj"
    assert "and 2 more: never called: MultiheadAttention reads its weight directly" in never["text"]


def test_an_ablated_run_is_held_against_a_models_own(model, ids, path):
    with hl.patch(model, {"h.1.mlp": 0.0}), hl.capture(model, "h.*") as ablated:
        model(ids)
    page = data_of(hl.explore(model, run=(ids,), against=ablated, to=path))
    assert site_of(page, "h.0")["stats"][2]["norm"] == 0
    assert site_of(page, "h.1")["stats"][2]["norm"] > 0
    assert site_of(page, "head")["stats"][1:] == [None, None]
    assert site_of(page, "head")["calls"] == [1, 0]
    assert any(note.startswith("second does not have 22 of the sites: 'embed'") for note in page["notes"])


def test_the_latest_of_several_calls_is_shown_and_how_many_there_were(path):
    layer = nn.Linear(2, 2)
    with hl.capture(layer, "", keep="all") as acts:
        for _ in range(3):
            last = layer(torch.randn(4, 2))
    site = site_of(data_of(hl.explore(acts, to=path)), "")
    assert site["calls"] == [3]
    assert site["stats"][0]["max"] == last.max().item()


def test_a_file_and_a_store_are_read_by_their_paths(model, ids, path, tmp_path):
    _, acts = hl.run(model, ids, capture="h.*")
    acts.save(tmp_path / "acts.safetensors")
    page = data_of(hl.explore(tmp_path / "acts.safetensors", to=path))
    assert page["title"] == "acts.safetensors"
    assert len(page["sites"]) == 3
    hl.harvest(model, torch.randint(20, (40, 5)), "h.0", to=tmp_path / "store", batch_size=8, progress=False)
    page = data_of(hl.explore(str(tmp_path / "store"), to=path, most=3000 + len(explorer.template())))
    site, expected = site_of(page, "h.0"), hl.Store(tmp_path / "store").stats()["h.0"]
    assert site["stats"][0]["mean"] == expected.mean
    assert site["stats"][0]["elements"] == 40 * 5 * 8
    assert site["picture"][0]["of"] == [40, 5, 8]
    assert re.fullmatch(r"\d+ of 40 samples", site["picture"][0]["left_out"])
    rows = hl.Store(tmp_path / "store")["h.0"][:].double()
    assert (pixels(site["picture"][0]) - shown(rows, site["picture"][0])).abs().max() <= site["picture"][0]["error"]


def test_two_stores_have_a_difference_too(model, path, tmp_path):
    for name, data in (("one", torch.zeros(6, 5, dtype=torch.long)), ("other", torch.ones(6, 5, dtype=torch.long))):
        hl.harvest(model, data, "h.0", to=tmp_path / name, batch_size=4, progress=False)
    page = data_of(hl.explore(tmp_path / "one", against=tmp_path / "other", to=path))
    one, other = (hl.Store(tmp_path / name)["h.0"][:].double() for name in ("one", "other"))
    assert site_of(page, "h.0")["stats"][2]["norm"] == pytest.approx((other - one).norm().item(), rel=1e-12)


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


def test_the_same_value_at_any_size_of_page_keeps_its_statistics(path):
    values = {f"h.{layer}": torch.randn(4, 30, 100) for layer in range(6)}
    bytes = 40_000 + len(explorer.template().encode())
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


def test_a_page_of_many_sites_keeps_to_its_bytes(path):
    values = {f"h.{layer}": torch.randn(4, 30) for layer in range(300)}
    least = len(explorer.template()) + 320_000
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
    assert notes == ["tokens= are not shown: there are 2 of a sample, and values have 5"]
    assert data_of(hl.explore({"a": torch.randn(1, 2, 4)}, to=path, tokens=["a", "b"]))["notes"] == []


def test_a_model_is_not_run_for_a_page_that_can_not_be_written(model, ids, tmp_path):
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    with pytest.raises(hl.StoreError, match="there is no folder '.*nowhere'; make it first"):
        hl.explore(model, run=(ids,), to=tmp_path / "nowhere" / "report.html")
    assert calls == []


def test_a_model_is_held_against_a_file_by_its_path_as_text(model, ids, path, tmp_path):
    with hl.capture(model, "h.*") as acts:
        model(ids)
    acts.save(tmp_path / "acts.safetensors")
    page = data_of(hl.explore(model, run=(ids,), at="h.*", against=str(tmp_path / "acts.safetensors"), to=path))
    assert "the two runs are equal at every site" in [one["text"] for one in page["warnings"]]


def test_a_run_in_training_mode_is_told(model, ids, path):
    assert data_of(hl.explore(model, run=(ids,), to=path))["notes"] == []
    assert "training mode" in data_of(hl.explore(model.train(), run=(ids,), to=path))["notes"][0]


def test_where_nothing_passed_there_is_no_page(path):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with (
        pytest.warns(hl.HooklineWarning, match="softmax"),
        pytest.raises(hl.NeverFired, match=r"nothing passed at any place of at='\*/softmax', so there is no page"),
    ):
        hl.explore(model, run=(torch.ones(1, 2),), at="*/softmax", to=path)
    assert not path.exists()


def test_a_measured_place_that_is_not_on_the_page_is_told(model, ids, path):
    page = data_of(hl.explore(model, run=(ids,), to=path, measured={"rise": {"nosuch": 1.0, "head": 0.5}}))
    assert page["notes"] == ["measured= names what is not on this page: 'nosuch'"]


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


def test_a_page_is_a_path_and_shows_itself_in_a_notebook(path, monkeypatch):
    page = hl.explore({"h.0": torch.ones(2, 2)}, to=path)
    assert os.fspath(page) == str(page) == str(path)
    assert page.path == path
    assert re.fullmatch(r"Page\('.*report.html', 1 site\)", repr(page))
    assert "<iframe src=" in page._repr_html_()
    odd = hl.explore({"h.0": torch.ones(2, 2)}, to=path.with_name('<b>"#1.html'))
    assert "%3Cb%3E%22%231.html" in odd._repr_html_()
    opened = []
    monkeypatch.setattr(explorer.webbrowser, "open", opened.append)
    page.open()
    assert opened == [path.resolve().as_uri()]


def test_a_page_is_replaced_but_nothing_else_is(path, tmp_path):
    hl.explore({"a": torch.ones(2)}, to=path)
    hl.explore({"b": torch.ones(2)}, to=path)
    assert data_of(path)["sites"][0]["name"] == "b"
    path.write_text("my thesis")
    with pytest.raises(
        hl.StoreError, match="exists and is not a page of hookline's; remove it, or give another path as to="
    ):
        hl.explore({"a": torch.ones(2)}, to=path)
    assert path.read_text() == "my thesis"
    with pytest.raises(hl.StoreError, match="there is no folder .*; make it first"):
        hl.explore({"a": torch.ones(2)}, to=tmp_path / "no" / "page.html")
    assert sorted(os.listdir(tmp_path)) == ["report.html"]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"what": 3}, "not 3"),
        ({"what": nn.Linear(2, 2)}, r"needs its arguments: explore\(model, run=\(ids,\)\)"),
        ({"what": {}, "run": (1,)}, "run= is for a page of a model"),
        ({"what": {}, "loss": loss}, "loss= is for a page of a model"),
        ({"what": {}, "names": ["a", "b"]}, "names= has 2 names for 1 run"),
        ({"what": {}, "model": 3}, "model= takes the model that the values are of, not 3"),
        (
            {"what": {"a": torch.ones(2)}, "at": "a"},
            "at= chooses the places of a model or of a cache, not of dict of a",
        ),
        ({"what": {}, "tokens": torch.ones(2)}, "tokens= takes text"),
        ({"what": {}, "measured": {"a": "high"}}, "a page shows one number for each place, not str"),
        ({"what": nn.LazyLinear(2), "run": (torch.ones(2),)}, "has parameters without a shape yet"),
        ({"what": nn.Linear(2, 2), "run": (torch.ones(2),), "loss": lambda y: y}, r"it gave float32 \(2,\)"),
        ({"what": nn.ReLU(), "run": (torch.ones(2),), "loss": torch.sum}, "no gradient can come of this loss"),
        (
            {"what": nn.Linear(2, 2), "run": (torch.ones(2),), "loss": lambda y: y.sum().detach()},
            r"can come of this loss: it does not depend on the model; leave out \.detach\(\)",
        ),
        ({"what": nn.Linear(2, 2), "run": (torch.ones(2),), "loss": "lm"}, "loss= takes a function .*, not 'lm'"),
        (
            {"what": nn.Linear(2, 2), "run": (torch.ones(2),), "against": nn.Linear(2, 2)},
            r"against= takes arguments .*; for another model, give what passed there: hl\.run\(other, .*capture=",
        ),
        ({"what": {}}, "there is nothing to show: no site has a value"),
        ({"what": {"h.0": torch.ones(2)}, "model": nn.Linear(2, 2)}, "model= is a Linear, which has no 'h.0'"),
        ({"what": {"a": torch.ones(2)}, "most": "8 megs"}, "most='8 megs' is not a number of bytes"),
    ],
)
def test_a_mistake_is_an_error_that_says_what_to_do(arguments, problem, path):
    with pytest.raises(hl.HooklineError, match=problem):
        hl.explore(arguments.pop("what"), to=path, **arguments)
    assert not path.exists()


def test_a_loss_in_inference_mode_is_refused_with_the_reason(path):
    with torch.inference_mode(), pytest.raises(hl.HooklineError, match="inference_mode is on; explore outside it"):
        hl.explore(nn.Linear(2, 2), run=(torch.ones(2),), loss=torch.sum, to=path)


def test_a_value_that_was_overwritten_is_said_to_be(path):
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True))
    with hl.capture(model, "0", clone=False) as acts:
        model(torch.randn(3, 2))
    site = site_of(data_of(hl.explore(acts, to=path)), "0")
    assert site["stats"] == [None]
    assert "was overwritten in place after it was captured" in site["describe"]


@pytest.mark.slow
def test_gpt2_of_twelve_layers_is_under_ten_megabytes_and_takes_seconds(path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=192, n_head=12, vocab_size=5000, attn_implementation="eager")
    model = transformers.GPT2LMHeadModel(config).eval()
    ids = torch.randint(5000, (2, 24))
    at = ["**", "", "transformer.h.*.attn/softmax"]
    started = time.process_time()
    with pytest.warns(hl.HooklineWarning, match="attn_dropout"):
        page = hl.explore(model, run=(ids,), against=(ids.flip(1),), to=path, loss=lambda out: loss(out.logits), at=at)
    taken = time.process_time() - started
    data = data_of(page)
    assert len(data["sites"]) > 300
    assert 1_000_000 < page.bytes < 10_000_000
    assert taken < 20  # Seconds of work: two to three where nothing else runs.
    assert site_of(data, "transformer.h.11.attn/softmax")["picture"][0]["left_out"] == ""


def test_a_page_of_a_method_or_of_a_function_that_runs_the_model(model, ids, path):
    class Writer(Net):
        def write(self, ids, steps):
            for _ in range(steps):
                ids = torch.cat([ids, self(ids)[:, -1:].argmax(-1)], 1)
            return ids

    writer = Writer().eval()
    written = hl.explore(writer.write, run={"ids": ids, "steps": 2}, to=path)
    assert site_of(data_of(written), "head")["shape"] == [2, 6, 20]
    assert data_of(written)["title"] == "Writer"
    written = hl.explore(
        lambda ids: model(ids).sum(), run=(ids,), model=model, at="h.*", loss=lambda total: total, to=path
    )
    assert site_of(data_of(written), "h.0")["shape"] == site_of(data_of(written), "h.0:grad_output")["shape"]
    with pytest.raises(hl.SiteError, match=r"takes it as model=: explore\(<lambda>, \.\.\., model=model\)"):
        hl.explore(lambda ids: model(ids), run=(ids,), to=path)
    with pytest.raises(hl.NeverFired, match="<lambda> did not run Net, nor a part of it"):
        hl.explore(lambda ids: ids, run=(ids,), model=model, to=path)
    with pytest.raises(hl.HooklineError, match="a page of a model needs its arguments"):
        hl.explore(writer.write, to=path)
