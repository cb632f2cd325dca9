"""`hookline demo`: the worked example."""

from __future__ import annotations

import re

import pytest
import torch

from tests.support.command_line import run
from tests.support.explorer_pages import data_of, site_of
from tests.support.needs import needs

needs("typer")
needs("sklearn")


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """What the demo says after one epoch, and its page."""
    path = tmp_path_factory.mktemp("demo") / "digits.html"
    before = torch.get_rng_state()
    result = run("demo", "--epochs", "1", "--to", path)
    torch.set_rng_state(before)
    assert result.exit_code == 0, result.output
    return result.stdout, path


def test_the_whole_demo_tells_what_it_measured(demo):
    output, path = demo
    assert re.search(r"1,347 digits for 1 epoch; test accuracy [789]\d\.\d%", output)
    assert re.search(r"the captured inputs go down to -\d\.\d", output)
    assert "return hl.sweep(model, " in output
    assert re.search(r"^head +10\.\d +-\d\d\.\d", output, flags=re.MULTILINE)
    assert "5 of 20 modules ran to their end: stem, h.0.norm, h.0.relu, h.0.conv, h.0.\nThe value is the same" in output
    assert output.splitlines()[-3] == f"Open {path.as_uri()} in a browser."
    assert re.search(r"10 sites in \d+\.\d MiB, read back equal", output)


def test_the_page_has_the_ablation_the_gradients_and_what_was_measured(demo):
    output, path = demo
    page = data_of(path)
    left = {row["name"]: row["value"] for row in page["measured"][0]["rows"]}
    worst = min((site for site in left if site.startswith("h.")), key=left.__getitem__)
    assert [run["name"] for run in page["runs"]] == ["as it is", f"{worst} zeroed"]
    assert re.search(rf"^{re.escape(worst)} +{100 * left[worst]:.1f} ", output, flags=re.MULTILINE)
    zeroed = site_of(page, worst)
    assert zeroed["stats"][0]["norm"] > zeroed["stats"][1]["norm"] == 0
    assert site_of(page, "h.0:grad_output")["stats"][2] is not None
    assert page["sites"][site_of(page, "stem")["gradient"]]["name"] == "stem:grad_output"
    assert path.stat().st_size < 4_500_000
    assert f"'{worst}' is 0 everywhere" in [warning["text"] for warning in page["warnings"]]


def test_the_same_demo_gives_the_same_model(demo, tmp_path):
    again = run("demo", "--epochs", "1", "--to", tmp_path / "again.html").stdout

    def accuracy(output):
        return re.search(r"test accuracy \S+", output).group()

    assert accuracy(again) == accuracy(demo[0])
