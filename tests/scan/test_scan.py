"""hl.scan: it predicts what a forward does without running the model, and leaves it unchanged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookline as hl
from tests.errors.wording import says
from tests.support.models import GPT, Block, Nested, mlp, tokens
from tests.support.scan_models import FAKE, REAL, Stateful

ROOT = Path(__file__).parents[2]


class Hazards(nn.Module):
    """A model with one module of every kind at which a capture can go wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(8, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.before = nn.Linear(8, 8)
        self.rectify = nn.ReLU(inplace=True)
        self.unused = nn.Linear(8, 8)
        self.branches = nn.ModuleList([nn.Linear(8, 8)])

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.cell(x)
        x, _ = self.attention(x, x, x)
        return self.rectify(self.before(x))


def test_every_module_is_listed_in_the_order_it_begins_with_its_shape_and_parameters() -> None:
    model, x = GPT(depth=2), tokens()
    scan = hl.scan(model, x)
    assert [row.site for row in scan] == [
        "", "h.0", "h.0.norm", "h.0.attn", "h.0.mlp", "h.0.mlp.0", "h.0.mlp.1", "h.0.mlp.2",
        "h.1", "h.1.norm", "h.1.attn", "h.1.mlp", "h.1.mlp.0", "h.1.mlp.1", "h.1.mlp.2", "head",
    ]  # fmt: skip
    assert scan["h.1"]._asdict() == {
        "site": "h.1", "module": "Block", "calls": 1, "dtype": "float32", "shape": "(2, 5, 8)",
        "parameters": sum(parameter.numel() for parameter in model.h[1].parameters()), "hazards": "",
    }  # fmt: skip
    assert scan["head"].shape == "(2, 5, 4)"
    assert scan.note.startswith(FAKE)
    assert len(scan) == len(hl.sites(model))
    assert [row.site for row in scan[:2]] == ["", "h.0"]


def test_keywords_nested_outputs_and_several_dtypes_are_shown() -> None:
    assert hl.scan(Block(), x=tokens(), scale=2.0)[""].calls == 1
    row = hl.scan(Nested(), torch.randn(2, 4))[""]
    assert row.shape == "(2, 4), (2, 4), (2, 4)"
    assert hl.scan(nn.Embedding(4, 8), torch.tensor([[1, 2]]))[""].shape == "(1, 2, 8)"
    assert hl.scan(mlp().to(torch.bfloat16), torch.ones(3, 4, dtype=torch.bfloat16))["2"].dtype == "bfloat16"


def test_hazards_say_what_goes_wrong_and_what_to_do() -> None:
    model = Hazards()
    scan = hl.scan(model, tokens())
    assert scan["cell"].calls == 3
    assert "keep='all'" in scan["cell"].hazards
    assert "#n" in scan["cell"].hazards
    assert "overwritten in place" in scan["before"].hazards
    assert "MultiheadAttention reads its weight directly" in scan["attention.out_proj"].hazards
    assert "Capture 'attention'" in scan["attention.out_proj"].hazards
    assert "never called" in scan["unused"].hazards
    assert "never called" in scan["branches.0"].hazards
    assert not scan["rectify"].hazards
    assert not any("hl.scan" in row.hazards for row in scan), "a scan advises the user to scan"
    uncalled = [row.site for row in scan if not row.calls]
    assert uncalled == ["attention.out_proj", "unused", "branches.0"], "last, in the order of the model"


def test_a_fast_path_is_a_hazard_only_where_it_is_taken() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
    assert not hl.scan(layer, tokens())["linear1"].hazards
    layer.eval()
    with torch.no_grad():
        assert "fast path" in hl.scan(layer, tokens())["linear1"].hazards


def test_hazards_are_true() -> None:
    """A value is overwritten if and only if the scan says so."""
    model, x = GPT(depth=2), tokens()
    scan = hl.scan(model, x)
    kept: dict[str, tuple[Tensor, Tensor]] = {}
    for name, module in model.named_modules():
        if type(module) is not nn.ModuleList:
            module.register_forward_hook(lambda _, __, y, name=name: kept.update({name: (y, y.clone())}))
    model(x)
    overwritten = {name for name, (now, then) in kept.items() if not torch.equal(now, then)}
    assert overwritten == {row.site for row in scan if "overwritten" in row.hazards}


@pytest.mark.parametrize("look", [False, True], ids=["fake", "real"])
def test_a_scan_inside_a_block_or_under_hooks_adds_nothing_to_their_caches(look: bool) -> None:
    model, x = Stateful(look), tokens()
    hooks = hl.Hooks(model)
    kept = hooks.capture("body")
    with hl.capture(model, "norm") as acts:
        scan = hl.scan(model, x)
        assert len(acts) == len(kept) == 0
    hooks.remove()
    assert scan.note.startswith(REAL if look else FAKE)
    assert len(scan) == 4


def test_compiled_and_wrapped_models_are_scanned_by_the_names_inside() -> None:
    model, x = GPT(depth=2), tokens()
    expected = [row.site for row in hl.scan(model, x)]
    torch._dynamo.reset()
    assert [row.site for row in hl.scan(torch.compile(model, backend="eager"), x)] == expected
    assert [row.site for row in hl.scan(nn.DataParallel(model), x)] == expected


LARGE = """
import json, resource, sys, time
import torch, transformers
import hookline as hl
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
config = transformers.LlamaConfig(
    vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=8, max_position_embeddings=8192,
)
with torch.device("meta"):
    model = transformers.LlamaForCausalLM(config).eval()
before, began = peak(), time.perf_counter()
scan = hl.scan(model, torch.zeros(1, 2048, dtype=torch.long))
took, after_meta = time.perf_counter() - began, peak()
wide = torch.nn.Sequential(*(torch.nn.Linear(4096, 4096) for _ in range(6)))  # 400 MB of real weights
held = peak()
real = hl.scan(wide, torch.zeros(8, 4096))
print(json.dumps({
    "parameters": scan[""].parameters, "rows": len(scan), "shape": scan["lm_head"].shape, "note": scan.note,
    "seconds": took,
    "grown": after_meta - before, "real": real.note, "real grown": peak() - held,
    "meta": all(parameter.is_meta for parameter in model.parameters()),
}))
"""


@pytest.mark.process
def test_an_8b_model_is_scanned_in_seconds_without_memory_for_its_weights() -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("resource")
    ran = subprocess.run(
        [sys.executable, "-c", LARGE], cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, text=True, check=False,
        capture_output=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    assert found["parameters"] > 8e9
    assert found["rows"] > 400
    assert found["shape"] == "(1, 2048, 128256)"
    assert found["note"].startswith(FAKE)
    assert found["real"].startswith(FAKE)
    assert found["meta"]
    assert found["seconds"] < 30
    assert found["grown"] < 300, "more MB than expected; the weights alone would be 32,000"
    assert found["real grown"] < 100, "more MB than expected; the weights are 400"


def test_a_scan_inside_a_block_leaves_the_hooks_of_the_block_as_they_are():
    model = mlp()
    with hl.capture(model, "0", "1") as acts:
        hl.scan(model, torch.ones(3, 4))
        hl.sites(model, "0/*", run=(torch.ones(3, 4),))
        model(torch.ones(3, 4))
    assert list(acts) == ["0", "1"]
    assert not hl.attached(model)
    assert all("forward" not in vars(module) for module in model.modules())


def test_a_scan_answers_to_any_spelling_of_a_site_and_tells_whether_it_has_one() -> None:
    found = hl.scan(mlp(), torch.ones(2, 4))
    assert found["0:output"] == found[hl.Site("0")] == found["0"]
    assert "0" in found
    assert found[0] in found
    assert "7" not in found
    with pytest.raises(hl.SiteError, match=says("is not in this scan", "0:input")):
        found["0:input"]
