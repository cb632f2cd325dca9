"""Architectures from transformers, with their caches on: capturing at every port changes nothing."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator

import pytest

from tests.failure_modes.every_port import differences
from tests.support.architectures import inputs_of, model_of

# The quick architectures of every family; `make fuzz` tests all that can be built small.
NAMES = [
    "albert", "apertus", "arcee", "aria_text", "bart", "beit", "bert", "big_bird", "bigbird_pegasus", "biogpt",
    "blenderbot", "bloom", "canine", "clip_vision_model", "cohere2", "convbert", "ctrl", "data2vec-vision",
    "deberta-v2", "deepseek_v4", "dinov2", "distilbert", "electra", "ernie4_5_moe", "exaone4", "falcon", "fnet",
    "gemma2", "gemma3_text", "glm4", "gpt2", "gpt_neox", "gpt_oss", "granitemoe", "helium", "idefics3", "lfm2",
    "llama", "llama4_text", "longt5", "m2m_100", "mamba", "mbart", "mistral", "mixtral", "mobilenet_v2", "modernbert",
    "mpt", "mt5", "nystromformer", "olmo2", "opt", "phi3", "phimoe", "qwen2_moe", "qwen3", "qwen3_next",
    "recurrent_gemma", "resnet", "roformer", "segformer", "squeezebert", "stablelm", "swiftformer",
    "switch_transformers", "t5", "vit", "wav2vec2", "whisper", "xglm", "yolos",
]  # fmt: skip


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Hide transformers' warnings about configs that are too small and kernels that are not installed."""
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("name", NAMES)
def test_every_port_of_every_module_can_be_open_and_nothing_differs(name: str) -> None:
    model = model_of(name)
    assert differences(model, inputs_of(model)) == []
