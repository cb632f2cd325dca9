"""What a row is: a token that is not padding, a sample, or a position that a function of the batch chooses."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import hookline as hl
from tests.errors.wording import says
from tests.support.harvest_models import Tagger, Texts, X, net

IDS = torch.randint(20, (6, 5), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("by_length", [False, True])
def test_tokens_are_rows_without_padding_in_the_order_of_the_samples(left, by_length, to):
    model, texts = Tagger().eval(), Texts(left=left)
    store = hl.harvest(model, texts, "embed", "mix", to=to, batch_size=4, unit=8, rows="tokens",
                       columns=["input_ids"], sort_by_length=by_length)  # fmt: skip
    samples = [texts[index] for index in range(len(texts))]
    assert torch.equal(store["input_ids"][:], torch.cat(samples))
    assert torch.equal(store["embed"][:], model.embed.weight.detach()[torch.cat(samples)])
    assert torch.equal(store.rows("input_ids", sample=9), samples[9])
    assert store["mix"].samples[:].tolist() == [index for index, one in enumerate(samples) for _ in one]
    assert store["mix"].positions[:].tolist() == [position for one in samples for position in range(len(one))]


def test_a_function_of_the_batch_may_choose_the_rows(to):
    model, texts = Tagger().eval(), Texts(left=True)
    store = hl.harvest(model, texts, "embed", to=to, batch_size=4, unit=8, columns=["input_ids"],
                       rows=lambda batch: (batch["input_ids"] % 3 == 1) & batch["attention_mask"].bool())  # fmt: skip
    chosen = [(texts[index] % 3 == 1).nonzero().flatten().tolist() for index in range(len(texts))]
    assert store["embed"].positions[:].tolist() == [position for one in chosen for position in one]
    assert store["embed"].samples[:].tolist() == [index for index, one in enumerate(chosen) for _ in one]
    assert bool((store["input_ids"][:] % 3 == 1).all())


def test_each_place_may_have_rows_of_its_own(to):
    model, texts = Tagger().eval(), Texts()
    rows = {"embed": "tokens", "input_ids": "tokens"}
    store = hl.harvest(model, texts, "embed", "mix[:, 0]", to=to, batch_size=4, rows=rows, columns=["input_ids"])
    assert len(store["mix[:, 0]"]) == len(texts)
    assert len(store["embed"]) == len(store["input_ids"]) == sum(len(texts[index]) for index in range(len(texts)))


def test_sequences_of_several_lengths_need_tokens_as_rows(to):
    with pytest.raises(hl.HooklineError, match=says("need rows= tokens")):
        hl.harvest(Tagger().eval(), Texts(), "mix", to=to, batch_size=4)


def test_a_value_without_the_batch_in_front_is_refused(to):
    with pytest.raises(hl.HooklineError, match=says("if the data are single")):
        hl.harvest(net(), X, "0", to=to, batch_size=8, transform=lambda value: value.T)
    with pytest.raises(hl.HooklineError, match=says("is dict of logits", '["logits"]')):
        hl.harvest(Tagger().eval(), Texts(), "", to=to, batch_size=4)
    with pytest.raises(hl.HooklineError, match=says("not a tensor", "0", 3)):
        hl.harvest(net(), X, "0", to=to, batch_size=8, transform=lambda _value: 3)


def test_a_mask_to_be_added_is_refused(to):
    batches = [
        {"input_ids": torch.ones(2, 3).long(), "attention_mask": torch.tensor([[0.0, 0.0, -1e9], [0.0, 0.0, 0.0]])}
    ]
    with pytest.raises(hl.HooklineError, match=says("attention_mask is an additive mask")):
        hl.harvest(Tagger().eval(), batches, "mix", to=to, rows="tokens")


def test_one_position_of_each_sample_is_a_row_for_each_sample(to):
    ids = torch.randint(0, 20, (6, 6))
    store = hl.harvest(Tagger().eval(), {"input_ids": ids}, "mix", "mix[:, -1]", to=to, batch_size=3, rows="tokens")
    assert store["mix"].shape == (36, 6)
    assert torch.equal(store["mix[:, -1]"][:], store["mix"][:].view(6, 6, 6)[:, -1])


class BothSides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(is_encoder_decoder=True)
        self.encoder = nn.Embedding(9, 3)
        self.decoder = nn.Embedding(9, 3)

    def forward(self, input_ids, attention_mask, decoder_input_ids, decoder_attention_mask):
        return self.encoder(input_ids).sum() + self.decoder(decoder_input_ids)


def test_a_column_is_masked_as_its_side_of_the_model(to):
    mask, other = torch.tensor([[1, 1, 0], [1, 0, 0]]), torch.tensor([[1, 1, 1], [1, 1, 0]])
    ids = torch.arange(6).view(2, 3)
    batch = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": ids, "decoder_attention_mask": other}
    store = hl.harvest(BothSides().eval(), [batch], "encoder", "decoder", to=to, rows="tokens",
                       columns=["input_ids", "decoder_input_ids"])  # fmt: skip
    assert store["input_ids"][:].tolist() == ids[mask.bool()].tolist()
    assert store["decoder_input_ids"][:].tolist() == ids[other.bool()].tolist()
    assert (len(store["encoder"]), len(store["decoder"])) == (3, 5)


def test_a_rule_is_asked_once_for_all_places_that_share_a_mask(to):
    asked = []

    def odd(batch):
        asked.append(1)
        return batch["input_ids"] % 2 == 1

    store = hl.harvest(Tagger().eval(), {"input_ids": torch.arange(12).view(4, 3)}, "embed", "mix", to=to, batch_size=4,
                       rows=odd)  # fmt: skip
    assert len(asked) == 1
    assert len(list(to.glob("data/positions/*"))) == 1
    assert store["mix"].positions[:].tolist() == [1, 0, 2, 1, 0, 2]


def test_a_name_wins_over_a_pattern(to):
    data = {"input_ids": torch.ones(4, 3).long()}
    store = hl.harvest(Tagger().eval(), data, "embed", "mix", to=to, batch_size=2, rows={"*": "tokens", "mix": "batch"})
    assert (len(store["embed"]), len(store["mix"])) == (12, 4)


def test_a_row_rule_for_a_place_that_is_not_kept_is_refused(to):
    model = Tagger().eval()
    with pytest.raises(hl.HooklineError, match=says("which this harvest does not", "mix", "embed")):
        hl.harvest(model, IDS, "embed", to=to, batch_size=4, rows={"mix": "tokens"})
    with pytest.raises(hl.SiteError, match=says("matches nothing did you mean", "mux")):
        hl.harvest(model, IDS, "embed", to=to, batch_size=4, rows={"mux": "tokens"})
    store = hl.harvest(model, IDS, "embed", to=to, batch_size=4, rows={"*": "tokens", "side": "batch"},
                       columns={"side": lambda batch: batch})  # fmt: skip
    assert len(store["embed"]) == IDS.numel()


@pytest.mark.parametrize("site", ["0[:, 20:]", "{0,1}[:, 20:]"])
def test_a_harvest_whose_subscripts_select_nothing_is_refused(to, site):
    with pytest.raises(hl.HooklineError, match=says("captured nothing selects nothing of float32", "(4, 8)", 20)):
        hl.harvest(net(), X, site, to=to, batch_size=4)


def test_rows_by_token_of_values_without_positions_are_refused(to):
    with pytest.raises(hl.HooklineError, match=says("nothing in the batch", "(4, 8)", "0")):
        hl.harvest(net(), X, "0", to=to, batch_size=4, rows="tokens")


def test_one_number_for_each_token_is_kept_by_token(to):
    store = hl.harvest(Tagger().eval(), {"input_ids": IDS}, "mix", "mix[:, :, 0]", to=to, batch_size=3, rows="tokens",
                       transform=lambda value: value if value.dim() == 2 else value.norm(dim=-1))  # fmt: skip
    assert store["mix"].shape == store["mix[:, :, 0]"].shape == (30,)
    model = nn.Sequential(nn.Embedding(20, 1), nn.Flatten(1))
    store = hl.harvest(model.eval(), IDS, "1", to=to / "flat", batch_size=3, rows="tokens")
    assert store["1"].shape == (30,)


def test_a_batch_that_is_too_short_for_the_positions_gives_no_rows_and_is_told_of_once(to):
    batches = [{"input_ids": IDS[:2]}, {"input_ids": IDS[2:4, :3]}, {"input_ids": IDS[4:, :2]}]
    with pytest.warns(hl.HooklineWarning, match=says("a batch without rows", "mix[:, 3:]")) as found:
        store = hl.harvest(Tagger().eval(), batches, "mix[:, 3:]", to=to, rows="tokens")
    assert len(found) == 1
    assert store.samples == 6
    assert store["mix[:, 3:]"].shape == (4, 6)
    with pytest.raises(hl.HooklineError, match=says("captured nothing selects nothing", 7)):
        hl.harvest(Tagger().eval(), batches, "mix[:, :, 7:]", to=to / "features", rows="tokens")
    with pytest.raises(hl.HooklineError, match=says("captured nothing and selects nothing", 3)):
        hl.harvest(Tagger().eval(), batches, "mix[:, 3:]", to=to / "batch")
