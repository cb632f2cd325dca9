"""Which mask applies to which site, on batches as transformers' processors return them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hookline as hl
from hookline._harvest.rows_and_padding import refuse_padding, token_mask, token_positions
from tests.support.real_models import prepared

LEFT = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
RIGHT = torch.tensor([[1, 1, 0], [1, 1, 1]])


def mask(site: str, batch: dict[str, Any] | None, shape: tuple[int, int], **options: Any) -> torch.Tensor | None:
    return token_mask(hl.Site.parse(site), batch, shape, **options)


def translation(**more: Any) -> dict[str, Any]:
    return {"input_ids": torch.ones(2, 4), "attention_mask": LEFT, **more}


def test_the_mask_of_a_batch_is_that_of_its_tokens_whatever_its_dtype():
    for given in (LEFT, LEFT.bool(), LEFT.float(), LEFT.tolist()):
        found = mask("h.0", {"attention_mask": given}, (2, 4))
        assert found.dtype == torch.bool
        assert found.equal(LEFT.bool())


@pytest.mark.parametrize("batch", [None, {}, {"input_ids": torch.ones(2, 4)}, {"attention_mask": None}])
def test_a_batch_without_a_mask_has_none(batch):
    assert mask("h.0", batch, (2, 4)) is None


def test_a_mask_of_another_shape_is_refused_with_both_shapes_and_what_to_do():
    with pytest.raises(
        hl.HooklineError, match=r"'h.0' has .* \(2, 9\), and attention_mask is \(2, 4\).*rows= a function"
    ):
        mask("h.0", {"attention_mask": LEFT}, (2, 9))
    with pytest.raises(hl.HooklineError, match=r"attention_mask is \(2, 1, 1, 4\)"):
        mask("h.0", {"attention_mask": LEFT[:, None, None]}, (2, 4))


@pytest.mark.parametrize(
    "site",
    ["encoder.block.0", "model.encoder.layers.1:input", '["encoder_last_hidden_state"]',
     "decoder.block.0.layer.1.EncDecAttention.k", "model.decoder.layers.0.encoder_attn.v_proj:input",
     "decoder.bert.encoder.layer.0.crossattention.self.key",
     'model.decoder.layers.0.encoder_attn:inputs["key_value_states"]'],
)  # fmt: skip
def test_sites_of_the_encoder_and_what_cross_attention_reads_have_the_encoders_mask(site):
    assert mask(site, translation(decoder_attention_mask=RIGHT), (2, 4)).equal(LEFT.bool())


@pytest.mark.parametrize(
    "site",
    ["decoder.block.0", "model.decoder.layers.1:grad_output", "lm_head", '["logits"]', '["decoder_hidden_states"][1]',
     "decoder.block.0.layer.1.EncDecAttention.q", "decoder.bert.encoder.layer.0"],
)  # fmt: skip
def test_sites_of_the_decoder_and_after_it_have_the_decoders_mask(site):
    assert mask(site, translation(decoder_attention_mask=RIGHT), (2, 3)).equal(RIGHT.bool())


def test_the_side_is_told_by_the_name_even_where_both_lengths_are_equal():
    batch = translation(decoder_attention_mask=LEFT.flip(1))
    assert mask("decoder.block.0", batch, (2, 4)).equal(LEFT.flip(1).bool())
    assert mask("encoder.block.0", batch, (2, 4)).equal(LEFT.bool())


def test_labels_are_the_decoders_mask_where_the_model_makes_its_input_of_them():
    labels = torch.tensor([[5, 6, -100], [5, 6, 7]])
    assert mask("decoder.block.0", translation(labels=labels), (2, 3), encoder_decoder=True).equal(RIGHT.bool())


def test_the_decoder_of_a_model_without_encoder_has_the_only_mask_there_is():
    labels = torch.full((2, 4), -100)
    assert mask("model.decoder.layers.0", translation(labels=labels), (2, 4), encoder_decoder=False).equal(LEFT.bool())


def test_a_decoder_without_its_mask_is_refused_and_one_position_needs_none():
    batch = translation(decoder_input_ids=torch.ones(2, 3))
    with pytest.raises(hl.HooklineError, match=r"'lm_head' is in the decoder.*add decoder_attention_mask \(2, 3\)"):
        mask("lm_head", batch, (2, 3))
    assert mask("lm_head", batch, (2, 1)) is None
    assert mask("lm_head", {"input_ids": torch.ones(2, 4), "decoder_input_ids": torch.ones(2, 3)}, (2, 3)) is None


def test_every_patch_is_real_and_the_text_beside_it_has_its_mask():
    batch = translation(pixel_values=torch.zeros(2, 3, 8, 8))
    assert mask("vision_model.encoder.layers.0", batch, (2, 17)) is None
    assert mask("text_model.encoder.layers.0", batch, (2, 4)).equal(LEFT.bool())
    assert mask("encoder.layer.0", {"pixel_values": torch.zeros(2, 3, 8, 8)}, (2, 17)) is None


def test_a_caption_of_an_image_has_the_decoders_mask():
    batch = {"pixel_values": torch.zeros(2, 3, 8, 8), "decoder_attention_mask": RIGHT}
    assert mask("decoder.layers.0", batch, (2, 3)).equal(RIGHT.bool())
    assert mask("encoder.layers.0", batch, (2, 17)) is None


def test_images_that_were_filled_up_are_refused():
    batch = {"pixel_values": torch.zeros(2, 3, 8, 8), "pixel_mask": torch.ones(2, 8, 8)}
    with pytest.raises(hl.HooklineError, match=r"pixel_mask \(2, 8, 8\), a mask for pixels"):
        mask("encoder.layers.0", batch, (2, 17))


def test_a_mask_of_frames_is_read_at_the_stride_of_the_model():
    frames = torch.tensor([[1, 1, 1, 0, 0, 0, 0, 0]])
    batch = {"input_features": torch.zeros(1, 80, 8), "attention_mask": frames}
    assert mask("model.encoder.layers.0", batch, (1, 4)).tolist() == [[True, True, False, False]]


def test_a_mask_that_covers_the_past_is_read_at_its_end():
    batch = {"attention_mask": LEFT, "past_key_values": object()}
    assert mask("h.0", batch, (2, 2)).equal(LEFT[:, 2:].bool())


def test_positions_count_from_the_first_real_token():
    real = LEFT.bool()
    assert token_positions(real, real).tolist() == [0, 1, 0, 1, 2, 3]
    last = torch.tensor([[False, False, False, True]] * 2)
    assert token_positions(last, real).tolist() == [1, 3]
    assert token_positions(last).tolist() == [3, 3]


@pytest.mark.parametrize(
    ("name", "source", "where"),
    [
        ("T5", "input_ids", ["encoder.**", "decoder.**", "lm_head"]),
        ("Whisper", "input_features", ["model.*.layers.**", "model.*.layer_norm", "proj_out"]),
    ],
)
def test_every_module_of_a_real_encoder_decoder_gets_a_mask_that_fits(name, source, where):
    """The encoder's and the decoder's lengths differ, so the mask of the wrong one can't fit."""
    model, inputs, _ = prepared(name)
    source_mask = torch.ones(1, inputs[source].shape[-1])
    batch = {**inputs, "attention_mask": source_mask, "decoder_attention_mask": torch.ones(1, 4)}
    with hl.capture(model, *where, keep="all") as acts, torch.no_grad():
        model(**batch, use_cache=False)
    values = {site: value for site in acts for value in acts.calls(site) if isinstance(value, torch.Tensor)}
    values = {site: value for site, value in values.items() if value.ndim == 3 and len(value) == 1}
    assert len(values) > 40
    for site, value in values.items():
        assert mask(site, batch, tuple(value.shape[:2])).shape == value.shape[:2], site


def test_a_position_that_is_padding_is_refused_with_the_side_to_pad():
    def refuse(site, given, value, **options):
        refuse_padding(hl.Site.parse(site), {"attention_mask": given}, value, **options)

    with pytest.raises(hl.HooklineError, match=r"'h.0\[:, 0\]' is padding in 1 of 2 samples; pad on the right"):
        refuse("h.0[:, 0]", LEFT, torch.ones(2, 8))
    with pytest.raises(hl.HooklineError, match=r"'h.0\[0\]\[:, -2:\]' is padding in 1 .* pad on the left"):
        refuse("h.0[0][:, -2:]", RIGHT, torch.ones(2, 2, 8))
    with pytest.raises(hl.HooklineError, match=r"'decoder.block.0\[:, -1\]' is padding"):
        batch = translation(decoder_attention_mask=RIGHT)
        refuse_padding(hl.Site.parse("decoder.block.0[:, -1]"), batch, torch.ones(2, 8))
    refuse("h.0[:, -1]", LEFT, torch.ones(2, 8))
    refuse("h.0", LEFT, torch.ones(2, 4, 8))
    refuse("h.0[0]", LEFT, torch.ones(2, 4, 8))
    refuse("attn/softmax[:, 0]", LEFT, torch.ones(2, 4, 4))  # `[:, 0]` is a head, not a token.
    refuse("h.0[0, 0]", LEFT, torch.ones(8))
    refuse_padding(hl.Site.parse("h.0[:, 0]"), None, torch.ones(2, 8))
