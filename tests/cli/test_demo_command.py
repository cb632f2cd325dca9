"""The demo prints figures of a real run: a short training on real data, step by step."""

from __future__ import annotations

import re

import pytest
import torch

import hookline as hl
from tests.support.explorer_pages import data_of, site_of
from tests.support.needs import needs

needs("typer")
from hookline._cli import demo_command  # noqa: E402

CHANCE = 0.1
LAYERS = ["stem", "h.0", "h.1", "h.2", "h.3", "head"]


@pytest.fixture(scope="module")
def data():
    needs("sklearn")
    return demo_command.digits()


@pytest.fixture(scope="module")
def model(data):
    return demo_command.trained(data, epochs=3)


def test_a_short_training_already_reads_most_digits(model, data):
    assert demo_command.accuracy(model, data) > 0.9


def test_training_is_the_same_each_time_and_leaves_the_random_state_alone(data):
    before = torch.get_rng_state()
    first, second = demo_command.trained(data, epochs=1), demo_command.trained(data, epochs=1)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(one, other) for one, other in zip(first.parameters(), second.parameters(), strict=True))


def test_see_captures_each_layer_and_what_the_in_place_relu_overwrote(model, data):
    acts = demo_command.see(model, data)
    assert [site for site in acts if ":" not in site] == LAYERS
    assert torch.equal(acts["head"], model(data.test_images))
    assert torch.equal(acts["h.1.relu:input"], model.h[1].norm(acts["h.0"]))
    assert acts["h.1.relu:input"].min() < 0


def test_zeroing_the_first_or_last_layer_leaves_chance_and_the_deepest_block_matters_least(model, data):
    left = demo_command.zero_each_layer(model, data)
    assert list(left) == ["stem", "h.0.conv", "h.1.conv", "h.2.conv", "h.3.conv", "head"]
    assert left["head"] == pytest.approx(CHANCE, abs=0.03)
    assert left["stem"] == pytest.approx(CHANCE, abs=0.03)
    assert left["h.3.conv"] > left["h.0.conv"] + 0.3
    assert demo_command.accuracy(model, data) > 0.9


def test_the_accuracy_without_a_layer_is_what_a_hand_written_forward_gives(model, data):
    value = model.h[:2](model.stem(data.test_images))
    logits = model.head(model.h[3](value).amax(dim=(2, 3)))
    by_hand = (logits.argmax(dim=1) == data.test_labels).float().mean().item()
    without_branch = demo_command.zero_each_layer(model, data)["h.2.conv"]
    assert without_branch == pytest.approx(by_hand)


def test_gradients_are_those_of_autograd(model, data):
    grads = demo_command.follow_gradients(model, data)
    model.zero_grad()
    values = [model.stem(data.test_images)]
    for block in model.h:
        values.append(block(values[-1]))
    values.append(model.head(values[-1].amax(dim=(2, 3))))
    loss = torch.nn.functional.cross_entropy(values[-1], data.test_labels)
    for layer, expected in zip(LAYERS, torch.autograd.grad(loss, values), strict=True):
        assert torch.equal(grads[f"{layer}:grad_output"], expected)


def test_stopping_early_runs_nothing_after(model, data):
    acts, ran = demo_command.stop_early(model, data)
    assert ran == ["stem", "h.0.norm", "h.0.relu", "h.0.conv", "h.0"]
    assert list(acts) == ["h.0"]
    assert len(hl.attached(model)) == 0


def test_a_stopped_forward_takes_less_time(model, data):
    assert 0 < demo_command.time_ratio(model, data, repeats=5) < 0.8


def test_a_cache_kept_on_disk_comes_back_equal(model, data, tmp_path):
    acts = demo_command.see(model, data)
    again = demo_command.keep(acts, tmp_path / "acts.safetensors")
    assert list(again) == list(acts)
    assert all(torch.equal(again[site], acts[site]) for site in acts)


def test_the_page_has_the_ablation_the_gradients_and_what_was_measured(model, data, tmp_path):
    left = demo_command.zero_each_layer(model, data)
    page = data_of(demo_command.browse(model, data, left, tmp_path / "digits.html"))
    worst = min((site for site in left if site.startswith("h.")), key=left.__getitem__)
    assert [run["name"] for run in page["runs"]] == ["as it is", f"{worst} zeroed"]
    assert {row["name"]: row["value"] for row in page["measured"][0]["rows"]} == left
    zeroed = site_of(page, worst)
    assert zeroed["stats"][0]["norm"] > zeroed["stats"][1]["norm"] == 0
    assert site_of(page, "h.0:grad_output")["stats"][2] is not None
    assert page["sites"][site_of(page, "stem")["gradient"]]["name"] == "stem:grad_output"
    assert (tmp_path / "digits.html").stat().st_size < 4_500_000
    texts = [warning["text"] for warning in page["warnings"]]
    assert f"'{worst}' is 0 everywhere" in texts


def test_the_whole_demo_tells_what_it_measured(data, capsys, tmp_path):
    demo_command.main(epochs=1, to=tmp_path / "digits.html")
    output = capsys.readouterr().out
    assert re.search(r"1,347 digits for 1 epoch; test accuracy [789]\d\.\d%", output)
    assert re.search(r"the captured inputs go down to -\d\.\d", output)
    assert "return hl.sweep(model, " in output
    assert re.search(r"^head +10\.\d +-\d\d\.\d", output, flags=re.MULTILINE)
    assert "5 of 20 modules ran to their end: stem, h.0.norm, h.0.relu, h.0.conv, h.0.\nThe value is the same" in output
    assert output.splitlines()[-3] == f"Open {(tmp_path / 'digits.html').as_uri()} in a browser."
    assert re.search(r"10 sites in \d+\.\d MiB, read back equal", output)


def test_a_bar_is_as_long_as_the_share():
    assert demo_command.bar(0.0) == ""
    assert len(demo_command.bar(0.5)) == demo_command.BAR_WIDTH // 2
    assert len(demo_command.bar(1.0)) == demo_command.BAR_WIDTH
