"""Sites with tokens and with several calls in a harvest: the tokens of each sample, without padding."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hookline as hl
from tests.errors.wording import says
from tests.support.real_models import SENTENCES, alone, llama, near, of, tokenizer


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("rows", ["batch", "tokens"])
@pytest.mark.parametrize(
    ("tokens", "part"),
    [
        ("@prompt[-1]", slice(-1, None)),
        ("@prompt[-1:]", slice(-1, None)),
        ("@prompt[:1]", slice(0, 1)),
        ("@0", slice(0, 1)),
        ("@-1", slice(-1, None)),
    ],
)
def test_a_site_with_tokens_has_those_of_each_sample(tokens, part, rows, side, tmp_path):
    model = of(llama)
    data = hl.Texts(SENTENCES, tokenizer(side))
    site = f"model.layers.1[:, {tokens}]"
    store = hl.harvest(model, data, site, to=tmp_path / "acts", rows=rows, batch_size=2)
    for sample, text in enumerate(SENTENCES):
        near(store.rows(site, sample=sample).flatten(0, -2), alone(model, "model.layers.1", text)[part])


def test_tokens_that_samples_have_in_different_numbers_are_refused(tmp_path):
    data = hl.Texts(SENTENCES, tokenizer("left"))
    with pytest.raises(hl.HooklineError, match=says("the rows have", 6, 3)):
        hl.harvest(of(llama), data, "model.layers.1[:, @prompt]", to=tmp_path, rows="tokens", batch_size=2)


def test_tokens_that_are_named_for_the_rows_of_one_batch_are_refused(tmp_path):
    data = hl.Texts(SENTENCES, tokenizer("left"))
    for named in ([0, 0], torch.ones(2, 3, dtype=torch.bool)):
        with pytest.raises(hl.SiteError, match=says("of each row of one")):
            hl.harvest(of(llama), data, ("model.layers.1", hl.tokens(named)), to=tmp_path, batch_size=2)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(4, 4)

    def forward(self, x):
        return self.cell(self.cell(self.cell(x)))


def test_several_calls_that_a_site_names_are_joined_or_refused(tmp_path):
    model, data = Twice().eval(), torch.randn(6, 4)
    with torch.no_grad():
        first, second = model.cell(data), model.cell(model.cell(data))
        third = model.cell(second)
    with pytest.raises(hl.HooklineError, match=says("times for one batch", "cell#1:", 2, "cell#1")):
        hl.harvest(model, data, "cell#1:", to=tmp_path / "a", batch_size=3)
    with pytest.raises(hl.SiteError, match=says("a harvest keeps every call", "cell#-1")):
        hl.harvest(model, data, "cell#-1", to=tmp_path / "a", batch_size=3)
    joined = hl.harvest(model, data, "cell[:, None]#1:", to=tmp_path / "b", batch_size=3, calls="sequence")
    near(joined["cell#1:[:, None]"][:], torch.stack([second, third], 1))
    each = hl.harvest(model, data, "cell#*", to=tmp_path / "c", batch_size=3)
    assert list(each) == ["cell#0", "cell#1", "cell#2"]
    near(each["cell#0"][:], first)
    near(each["cell#2"][:], third)
    one = hl.harvest(model, data, "cell#2:", to=tmp_path / "d", batch_size=3)
    near(one["cell#2:"][:], third)
