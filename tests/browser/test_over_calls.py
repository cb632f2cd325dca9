"""Sites that pass in several calls: the page says which call it shows, and how the calls differ."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hookline as hl
from tests.support.explorer_pages import data_of, site_of


class Denoiser(nn.Module):
    """Runs its block at each of several times, as a sampler does."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Linear(8, 8)

    def forward(self, x):
        for time in range(5):
            x = x + (time + 1) * self.block(x)
        return x


@pytest.fixture(scope="module")
def sampler(tmp_path_factory):
    torch.manual_seed(0)
    model = Denoiser()
    with hl.capture(model, "block", "", keep="all") as acts:
        model(torch.randn(3, 8))
    return acts, hl.explore(acts, to=tmp_path_factory.mktemp("sampler") / "sampler.html")


@pytest.fixture(scope="module")
def generation(tmp_path_factory):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 4, "n_head": 2, "vocab_size": 50, "bos_token_id": 0, "eos_token_id": None}
    config = transformers.GPT2Config(**sizes, initializer_range=0.2, attn_implementation="eager")
    model, ids = transformers.GPT2LMHeadModel(config).eval(), torch.randint(50, (2, 6))
    with hl.capture(model, "transformer.h.*", "transformer.h.*.attn", keep="all") as acts:
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=9, do_sample=False, pad_token_id=0)
    page = hl.explore(acts, model=model, to=tmp_path_factory.mktemp("generation") / "generation.html")
    return acts, page


def test_the_page_says_that_it_shows_the_latest_of_several_calls(look, sampler):
    acts, page = sampler
    window = look(page)
    assert window.page.text_content(".several-calls") == "of 1 site with several calls the latest is shown;"
    window = look(page, site="block")
    assert "5, of which the latest is shown" in window.page.text_content(".facts")
    assert site_of(data_of(page), "block")["stats"][0]["norm"] == pytest.approx(acts["block"].norm().item())


def test_a_statistic_is_drawn_over_the_calls(look, sampler):
    acts, page = sampler
    over = site_of(data_of(page), "block")["over"][0]
    assert (over["along"], over["numbers"], over["of"], over["joined"]) == ("call", [0, 1, 2, 3, 4], 5, False)
    assert over["stats"]["std"] == pytest.approx(
        [one.std(correction=0).item() for one in acts.calls("block")], rel=1e-4
    )
    window = look(page, site="block", statistic="rms")
    assert window.page.text_content(".over-calls h3") == "Over calls"
    assert window.page.locator(".over-calls circle").count() == 5
    assert window.page.input_value(".over-calls select") == "rms"
    window.page.select_option(".over-calls select", "max")
    window.wait_for_state(statistic="max")
    assert window.page.get_attribute(".over-calls svg", "aria-label") == "max of block over calls"
    assert look(page, site="").page.locator(".over-calls").count() == 0  # The model itself ran once.


def test_a_generation_is_shown_as_one_sequence(look, generation):
    acts, page = generation
    site = site_of(data_of(page), "transformer.h.1")
    assert (site["shape"], site["calls"], site["over"][0]["joined"]) == ([2, 14, 16], [9], True)
    assert site["stats"][0]["norm"] == pytest.approx(acts.tokens("transformer.h.1").norm().item())
    assert site["over"][0]["along"] == "step"
    attention = site_of(data_of(page), "transformer.h.1.attn[1]")
    assert attention["over"][0]["joined"] is False  # Its keys grow, so its calls are no tensor.
    window = look(page)
    assert window.page.text_content(".several-calls") == "the calls of 4 sites are joined to one sequence;"
    assert "Tokens × layers" in window.page.text_content(".overview")
    window = look(page, site="transformer.h.1")
    assert "9, joined to one sequence" in window.page.text_content(".facts")
    assert window.page.text_content(".over-calls h3") == "Over steps"
    assert window.page.locator(".over-calls circle").count() == 9
