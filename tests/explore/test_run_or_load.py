"""The source of a page's values: a run that leaves the model unchanged, a cache, a file or a store."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import hookline as hl
from tests.errors.wording import says
from tests.support.explorer_pages import Net, data_of, loss, module_of, pixels, shown, site_of


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


def test_a_file_and_a_store_are_read_by_their_paths(model, ids, path, tmp_path, size_of_page):
    _, acts = hl.run(model, ids, capture="h.*")
    acts.save(tmp_path / "acts.safetensors")
    page = data_of(hl.explore(tmp_path / "acts.safetensors", to=path))
    assert page["title"] == "acts.safetensors"
    assert len(page["sites"]) == 3
    hl.harvest(model, torch.randint(20, (40, 5)), "h.0", to=tmp_path / "store", batch_size=8, progress=False)
    page = data_of(hl.explore(str(tmp_path / "store"), to=path, most=3000 + size_of_page))
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


def test_a_model_is_held_against_a_file_by_its_path_as_text(model, ids, path, tmp_path):
    with hl.capture(model, "h.*") as acts:
        model(ids)
    acts.save(tmp_path / "acts.safetensors")
    page = data_of(hl.explore(model, run=(ids,), at="h.*", against=str(tmp_path / "acts.safetensors"), to=path))
    assert "the two runs are equal at every site" in [one["text"] for one in page["warnings"]]


def test_a_run_in_training_mode_is_told(model, ids, path):
    assert data_of(hl.explore(model, run=(ids,), to=path))["notes"] == []
    assert "training mode" in data_of(hl.explore(model.train(), run=(ids,), to=path))["notes"][0]


def test_a_loss_in_inference_mode_is_refused_with_the_reason(path):
    with torch.inference_mode(), pytest.raises(hl.HooklineError, match=says("inference_mode is on")):
        hl.explore(nn.Linear(2, 2), run=(torch.ones(2),), loss=torch.sum, to=path)


def test_a_value_that_was_overwritten_is_said_to_be(path):
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True))
    with hl.capture(model, "0", clone=False) as acts:
        model(torch.randn(3, 2))
    site = site_of(data_of(hl.explore(acts, to=path)), "0")
    assert site["stats"] == [None]
    assert "was overwritten in place after it was captured" in site["describe"]


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
    with pytest.raises(hl.SiteError, match=says("takes it as model= explore")):
        hl.explore(lambda ids: model(ids), run=(ids,), to=path)
    with pytest.raises(hl.NeverFired, match=says("lambda did not run Net")):
        hl.explore(lambda ids: ids, run=(ids,), model=model, to=path)
    with pytest.raises(hl.HooklineError, match=says("needs its arguments")):
        hl.explore(writer.write, to=path)
