"""Which mask applies to which site, on batches as transformers' processors return them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookline as hl
from tests.errors.wording import says
from tests.support.real_models import prepared

LEFT = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
RIGHT = torch.tensor([[1, 1, 0], [1, 1, 1]])


class Passes(nn.Module):
    """A module that returns its first argument."""

    def forward(self, *given: Tensor, **named: Tensor) -> Tensor:
        return next(iter((*given, *named.values())))


class Tree(nn.Module):
    """A model at one of whose sites a value passes: a module at a path, an argument of it, or a part of the output."""

    def __init__(self, site: str, value: Any, encoder_decoder: bool | None) -> None:
        super().__init__()
        self.place, self.value = hl.Site.parse(site), value
        if encoder_decoder is not None:
            self.config = SimpleNamespace(is_encoder_decoder=encoder_decoder)
        holder: nn.Module = self
        for name in filter(None, self.place.path.split(".")):
            holder.add_module(name, Passes())
            holder = getattr(holder, name)

    def forward(self, **batch: Any) -> Any:
        value, place = self.value, self.place
        if place.is_gradient:
            value = value.clone().requires_grad_()
        if not place.path:
            return {"logits": value, "encoder_last_hidden_state": value, "decoder_hidden_states": [value, value]}
        module = self.get_submodule(place.path)
        return module(key_value_states=value) if "key_value_states" in str(place) else module(value)


def stored(to: Path, site: str, batch: dict[str, Any], value: Any, is_of_both: bool | None, **options: Any) -> hl.Store:
    """Harvest a value at a site in a run of one batch, with a model that says whether it is an encoder-decoder."""
    given = {"sample": torch.arange(len(value if isinstance(value, Tensor) else value[0])), **batch}
    if hl.Site.parse(site).is_gradient:
        options["loss"] = lambda output: (output * value).sum()
    return hl.harvest(Tree(site, value, is_of_both).eval(), [given], site, to=to, **options)


@pytest.fixture
def mask(tmp_path):
    """Return a function that says which positions of a value of this shape are stored of each sample."""

    def mask_of(site: str, batch: dict[str, Any], shape: tuple[int, int], is_of_both: bool | None = None) -> Tensor:
        value = 1 + torch.arange(float(shape[0] * shape[1])).view(*shape, 1)
        to = tmp_path / f"acts-{len(list(tmp_path.iterdir()))}"
        store = stored(to, site, batch, value, is_of_both, rows="tokens")
        found = torch.isin(value[..., 0], store[site][:].flatten())
        for row in range(shape[0]):
            assert store.rows(site, sample=row).flatten().tolist() == value[row, found[row], 0].tolist()
        return found

    return mask_of


def translation(**more: Any) -> dict[str, Any]:
    return {"input_ids": torch.ones(2, 4), "attention_mask": LEFT, **more}


@pytest.mark.parametrize(
    "given", [LEFT, LEFT.bool(), LEFT.float(), LEFT.numpy()], ids=["int", "bool", "float", "numpy"]
)
def test_the_mask_of_a_batch_is_that_of_its_tokens_whatever_its_dtype(mask, given):
    assert mask("h.0", {"attention_mask": given}, (2, 4)).equal(LEFT.bool())


@pytest.mark.parametrize("batch", [{}, {"input_ids": torch.ones(2, 4)}, {"attention_mask": None}], ids=range(3))
def test_of_a_batch_without_a_mask_every_position_is_stored(mask, batch):
    assert mask("h.0", batch, (2, 4)).all()


def test_a_mask_of_another_shape_is_refused_with_both_shapes_and_what_to_do(mask):
    with pytest.raises(hl.HooklineError, match=says("and attention_mask is", "(2, 9)", "(2, 4)", "h.0")):
        mask("h.0", {"attention_mask": LEFT}, (2, 9))
    with pytest.raises(hl.HooklineError, match=says("attention_mask is", 1, 1)):
        mask("h.0", {"attention_mask": LEFT[:, None, None]}, (2, 4))


@pytest.mark.parametrize(
    "site",
    ["encoder.block.0", "model.encoder.layers.1:input", '["encoder_last_hidden_state"]',
     "decoder.block.0.layer.1.EncDecAttention.k", "model.decoder.layers.0.encoder_attn.v_proj:input",
     "decoder.bert.encoder.layer.0.crossattention.self.key",
     'model.decoder.layers.0.encoder_attn:inputs["key_value_states"]'],
)  # fmt: skip
def test_sites_of_the_encoder_and_what_cross_attention_reads_have_the_encoders_mask(mask, site):
    assert mask(site, translation(decoder_attention_mask=RIGHT), (2, 4)).equal(LEFT.bool())


@pytest.mark.parametrize(
    "site",
    ["decoder.block.0", "model.decoder.layers.1:grad_output", "lm_head", '["logits"]', '["decoder_hidden_states"][1]',
     "decoder.block.0.layer.1.EncDecAttention.q", "decoder.bert.encoder.layer.0"],
)  # fmt: skip
def test_sites_of_the_decoder_and_after_it_have_the_decoders_mask(mask, site):
    assert mask(site, translation(decoder_attention_mask=RIGHT), (2, 3)).equal(RIGHT.bool())


def test_the_side_is_told_by_the_name_even_where_both_lengths_are_equal(mask):
    batch = translation(decoder_attention_mask=LEFT.flip(1))
    assert mask("decoder.block.0", batch, (2, 4)).equal(LEFT.flip(1).bool())
    assert mask("encoder.block.0", batch, (2, 4)).equal(LEFT.bool())


def test_labels_are_the_decoders_mask_where_the_model_makes_its_input_of_them(mask):
    labels = torch.tensor([[5, 6, -100], [5, 6, 7]])
    assert mask("decoder.block.0", translation(labels=labels), (2, 3), is_of_both=True).equal(RIGHT.bool())


def test_the_decoder_of_a_model_without_encoder_has_the_only_mask_there_is(mask):
    labels = torch.full((2, 4), -100)
    assert mask("model.decoder.layers.0", translation(labels=labels), (2, 4), is_of_both=False).equal(LEFT.bool())


def test_a_decoder_without_its_mask_is_refused_and_one_position_needs_none(mask):
    batch = translation(decoder_input_ids=torch.ones(2, 3))
    with pytest.raises(hl.HooklineError, match=says("is in the decoder", "(2, 3)", "lm_head")):
        mask("lm_head", batch, (2, 3))
    assert mask("lm_head", batch, (2, 1)).all()
    assert mask("lm_head", {"input_ids": torch.ones(2, 4), "decoder_input_ids": torch.ones(2, 3)}, (2, 3)).all()


def test_every_patch_is_real_and_the_text_beside_it_has_its_mask(mask):
    batch = translation(pixel_values=torch.zeros(2, 3, 8, 8))
    assert mask("vision_model.encoder.layers.0", batch, (2, 17)).all()
    assert mask("text_model.encoder.layers.0", batch, (2, 4)).equal(LEFT.bool())
    assert mask("encoder.layer.0", {"pixel_values": torch.zeros(2, 3, 8, 8)}, (2, 17)).all()


def test_a_caption_of_an_image_has_the_decoders_mask(mask):
    batch = {"pixel_values": torch.zeros(2, 3, 8, 8), "decoder_attention_mask": RIGHT}
    assert mask("decoder.layers.0", batch, (2, 3)).equal(RIGHT.bool())
    assert mask("encoder.layers.0", batch, (2, 17)).all()


def test_images_that_were_filled_up_are_refused(mask):
    batch = {"pixel_values": torch.zeros(2, 3, 8, 8), "pixel_mask": torch.ones(2, 8, 8)}
    with pytest.raises(hl.HooklineError, match=says("a mask for pixels", 8)):
        mask("encoder.layers.0", batch, (2, 17))


def test_a_mask_of_frames_is_read_at_the_stride_of_the_model(mask):
    frames = torch.tensor([[1, 1, 1, 0, 0, 0, 0, 0]])
    batch = {"input_features": torch.zeros(1, 80, 8), "attention_mask": frames}
    assert mask("model.encoder.layers.0", batch, (1, 4)).tolist() == [[True, True, False, False]]


def test_a_mask_that_covers_the_past_is_read_at_its_end(mask):
    batch = {"attention_mask": LEFT, "past_key_values": object()}
    assert mask("h.0", batch, (2, 2)).equal(LEFT[:, 2:].bool())


def test_positions_count_from_the_first_real_token(tmp_path):
    batch, value = {"attention_mask": LEFT}, torch.ones(2, 4, 1)
    store = stored(tmp_path / "a", "h.0", batch, value, None, rows="tokens")
    assert store["h.0"].positions[:].tolist() == [0, 1, 0, 1, 2, 3]
    last = torch.tensor([[False, False, False, True]] * 2)
    store = stored(tmp_path / "b", "h.0", batch, value, None, rows=lambda batch: last)
    assert store["h.0"].positions[:].tolist() == [1, 3]
    store = stored(tmp_path / "c", "h.0", {}, value, None, rows=lambda batch: last)
    assert store["h.0"].positions[:].tolist() == [3, 3]


@pytest.mark.parametrize(
    ("name", "source", "where"),
    [
        ("T5", "input_ids", ["encoder.**", "decoder.**", "lm_head"]),
        ("Whisper", "input_features", ["model.*.layers.**", "model.*.layer_norm", "proj_out"]),
    ],
)
def test_every_module_of_a_real_encoder_decoder_gets_a_mask_that_fits(tmp_path, name, source, where):
    """The encoder's and the decoder's lengths differ, so the mask of the wrong one can't fit."""
    model, inputs, _ = prepared(name)
    source_mask = torch.ones(1, inputs[source].shape[-1], dtype=torch.long)
    source_mask[0, -2:] = 0
    target_mask = torch.tensor([[1, 1, 1, 0]])
    batch = {**inputs, "attention_mask": source_mask, "decoder_attention_mask": target_mask, "use_cache": False}
    with hl.capture(model, *where, keep="all") as acts, torch.no_grad():
        model(**batch)
    values = {site: acts.calls(site) for site in acts}
    sites = [
        site for site, (value, *more) in values.items()
        if not more and isinstance(value, torch.Tensor) and value.ndim == 3 and len(value) == 1
    ]  # fmt: skip
    assert len(sites) > 40
    del batch["use_cache"]
    store = hl.harvest(model, [batch], *sites, to=tmp_path / "acts", rows="tokens", stop=False)
    for site in sites:
        length = values[site][0].shape[1]
        real = target_mask if length == 4 else source_mask[:, :: source_mask.shape[1] // length]
        assert len(store[site]) == real.sum(), site


PADDED = {"attention_mask": LEFT}, {"attention_mask": RIGHT}


@pytest.mark.parametrize(
    ("site", "batch", "told"),
    [
        ("h.0[:, 0]", PADDED[0], says("is padding in of", "h.0[:, 0]", 1, 2)),
        ("h.0[0][:, -2:]", PADDED[1], says("is padding in", "h.0[0][:, -2:]", 1)),
        (
            "decoder.block.0[:, -1]",
            translation(decoder_attention_mask=RIGHT),
            says("is padding in", "decoder.block.0[:, -1]"),
        ),
    ],
    ids=["first", "last two", "decoder"],
)
def test_a_position_that_is_padding_is_refused_with_the_side_to_pad(tmp_path, site, batch, told):
    value = torch.ones(2, 3 if "decoder" in site else batch["attention_mask"].shape[1], 8)
    with pytest.raises(hl.HooklineError, match=told):
        stored(tmp_path / "acts", site, batch, (value, value) if "[0]" in site[:6] else value, None)


@pytest.mark.parametrize(
    ("site", "batch"),
    [
        ("h.0[:, -1]", PADDED[0]),
        ("h.0", PADDED[0]),
        ("h.0[0]", PADDED[0]),
        ("attn[:, 0]", PADDED[0]),  # Of four dimensions: a head, not a token.
        ("h.0[:, 0]", {}),
    ],
)
def test_a_position_that_is_a_token_or_none_is_stored(tmp_path, site, batch):
    value = torch.ones(2, 3, 4, 4) if "attn" in site else torch.ones(2, 4, 8)
    store = stored(tmp_path / "acts", site, batch, (value, value) if site == "h.0[0]" else value, None)
    assert len(store[site]) == 2
