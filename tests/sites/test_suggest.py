"""Names that match nothing: the error suggests a name that the user may have meant."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

import hookline as hl
from tests.errors.wording import says


class Attention(nn.Module):
    """Attention that takes its arguments by name, as in transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn = nn.Linear(4, 4)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.c_attn(hidden_states)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention()
        self.mlp = nn.Sequential(nn.Linear(4, 4))
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(x + self.mlp(self.relu(self.attn(x))))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(4, 4)
        self.h = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.h:
            x = block(x)
        return x


class Language(nn.Module):
    """A model inside another, under a prefix that is easily forgotten."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = Transformer()
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.flatten(self.transformer(x), 1))


MEANT = {
    # A prefix is missing, or there is one too many.
    "h.1.mlp": "transformer.h.1.mlp",
    "h.1.mlp:input": "transformer.h.1.mlp",
    "h.*.mlp": "transformer.h.*.mlp",
    "h.{0,1}.attn:input": "transformer.h.{0,1}.attn:input",
    "mlp": "**.mlp",
    "h.1/relu": "transformer.h.1",
    "h.1.attn.c_attn.weight:param": "transformer.h.1.attn.c_attn.weight",
    "wte.weight": "transformer.wte.weight:param",
    "model.transformer.h.1.mlp": "transformer.h.1.mlp",
    "module.head": "head",
    "h.1.atnn": "transformer.h.1.attn",
    # A number that is too large, and a ModuleList, which is never called.
    "transformer.h.3": "transformer.h.2",
    "transformer.h.-1": "transformer.h.2",
    "transformer.h.12.mlp": "transformer.h.2.mlp",
    "transformer.h.3.*": "transformer.h.2.*",
    "transformer.h.3/relu": "transformer.h.2",
    "transfomer.h": "transformer.h.*",
    "h": "transformer.h.*",
    # Names as in TransformerLens and torchvision.
    "blocks.0.hook_resid_post": "transformer.h.0",
    "blocks.2.hook_resid_pre": "transformer.h.2:input",
    "blocks.1.hook_mlp_out": "transformer.h.1.mlp",
    "blocks.1.attn.hook_pattern": "transformer.h.1.attn",
    "blocks.*.hook_resid_post": "transformer.h.*",
    "transformer.h.1.hook_attn_out": "transformer.h.1.attn",
    "blocks.1.mlp": "transformer.h.1.mlp",
    "transformer.h.0.relu_1": "transformer.h.0.relu#1",
    "transformer.h.0.add": "transformer.h.0/add",
    "flatten": "/flatten",
    # Names as in Python code.
    "transformer.h[1]": "transformer.h.1",
    "transformer.h[-1]": "transformer.h.2",
    "transformer.h[1:]": "transformer.h.{1,2}",
    "transformer.h[1][0]": "transformer.h.1[0]",
    "transformer.h[1].mlp": "transformer.h.1.mlp",
    "transformer.h[1].mlp[0]": "transformer.h.1.mlp[0]",
    "transformer.h[7]": "transformer.h.*",
    # Ports.
    "transformer.h.1.mlp.output": "transformer.h.1.mlp:output",
    "transformer.h.0.attn[0]:input": "transformer.h.0.attn:input[0]",
    "transformer.h.0.attn:hidden_states": ':inputs["hidden_states"]',
    "transformer.h.0.attn:inputs[hidden_states]": '["hidden_states"]',
    "head:weight": "head.weight:param",
    "head.weight.param": "head.weight:param",
    "head.weight:parm": "param",
    "head.wieght:param": "head.weight",
}


@pytest.mark.parametrize("text", MEANT)
def test_what_was_meant_is_suggested(text: str) -> None:
    with pytest.raises(hl.SiteError) as error:
        hl.capture(Language(), text)
    suggested = re.findall(
        r"(?:did you mean|as in|subscripts:|name is|quoted:) (?:'([^']*)'|(\[.*?\]))", str(error.value)
    )
    assert MEANT[text] in [one or other for one, other in suggested], str(error.value)


@pytest.mark.parametrize("name", ["norm_1", "linear_1"])
def test_a_module_that_is_written_almost_the_same_is_suggested_before_a_function(name: str) -> None:
    model = nn.Sequential(nn.TransformerEncoderLayer(4, 1))
    with pytest.raises(hl.SiteError, match=says("did you mean", f"0.{name.replace('_', '')}")):
        hl.capture(model, f"0.{name}")


@pytest.mark.parametrize(
    "text", [text for text, meant in MEANT.items() if meant.startswith(("transformer", "head", "/"))]
)
def test_what_is_suggested_is_there(text: str) -> None:
    assert hl.sites(Language(), MEANT[text] + (":param" if text.endswith(":param") and ":" not in MEANT[text] else ""))


def test_a_name_of_a_class_says_to_give_the_class() -> None:
    with pytest.raises(hl.SiteError, match=says("Block is the class of", "transformer.h.0")):
        hl.capture(Language(), "Block")


def test_the_nearest_number_is_suggested_before_any_other_name() -> None:
    with pytest.raises(
        hl.SiteError, match=says("matches nothing did you mean", "Language", "transformer.h.2", "transformer.h.3")
    ):
        hl.capture(Language(), "transformer.h.3")


@pytest.mark.filterwarnings("ignore:.*nothing there is named '9'")
@pytest.mark.parametrize("text", ["h.*", ".*", "*.*", "h.{0,9}", "h.{7,9}", "blocks.**", "h.0", "h.4", "4", "0.*"])
@pytest.mark.parametrize("make", [nn.Sequential, nn.ModuleList, lambda layers: nn.ModuleDict({"h": layers[0]})])
def test_no_suggestion_is_what_was_written_or_matches_nothing(text: str, make: type[nn.Module]) -> None:
    layers = [nn.Linear(2, 2), nn.ReLU()]
    model = make(*layers) if make is nn.Sequential else make(layers)
    with pytest.raises(hl.SiteError) as error:
        hl.sites(model, text)
    for suggested in re.findall(r"(?:mean|or) '([^']*)'", str(error.value)):
        assert suggested != text
        assert hl.sites(model, suggested)


@pytest.mark.parametrize(
    "text", ["nothing.like.it", "9", "x.9", "*.*.*.*.*.*", "hook_x", "blocks.99.hook_resid_post", "é"]
)
def test_a_name_that_is_like_none_says_how_to_list_them(text: str) -> None:
    with pytest.raises(hl.SiteError, match=says("matches nothing hl sites", "Language")):
        hl.capture(Language(), text)
