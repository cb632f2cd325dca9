"""`hl.sweep(run=)` on a GPU: packs are right in each precision, and fit into the memory that there is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookline as hl

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.gpu


def gpt2(dtype: torch.dtype) -> tuple[Any, Tensor, Tensor]:
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=3, n_embd=256, n_head=4, vocab_size=500, bos_token_id=0, eos_token_id=0)
    model = transformers.GPT2LMHeadModel(config).eval().to("cuda", dtype)
    ids, others = torch.randint(500, (2, 2, 12), device="cuda")
    return model, ids, others


def logits(output: Any) -> Tensor:
    return output.logits[:, -1].float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("where", ["transformer.h.*[:, *]", "transformer.h.*.mlp", "transformer.h.1.ln_1:input[:, *]"])
def test_a_packed_sweep_is_that_of_single_runs_to_the_precision_of_the_type(dtype, where) -> None:
    model, ids, others = gpt2(dtype)
    packed = hl.sweep(model, where, logits, run=(ids,), against=(others,))
    alone = hl.sweep(model, where, logits, run=(ids,), against=(others,), batch=1)
    assert any("an unchanged copy" in note for note in packed.notes), packed.notes
    scale = packed.base.abs().max()
    changes = torch.stack([alone[site] - alone.base for site in alone])
    assert changes.abs().max() > 0.05 * scale  # Else the comparison below says nothing.
    for site in alone:
        apart = (packed[site] - alone[site]).abs().max()
        assert apart <= 32 * torch.finfo(dtype).eps * scale, (site, float(apart), float(scale))


def test_a_sweep_that_needs_more_memory_than_there_is_goes_on_with_smaller_runs() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            spread = y.repeat(1, 1, 4096)  # No module returns this.
            return self.second(y + spread.view(*y.shape, 4096).mean(-1))

    torch.manual_seed(0)
    model, x = Wide().cuda(), torch.randn(2, 64, 64, device="cuda")
    free, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction(min(1.0, (total - free + (3 << 30)) / total))
    try:
        packed = hl.sweep(model, "first[:, *]", lambda output: output.norm(), run=(x,))
        alone = hl.sweep(model, "first[:, *]", lambda output: output.norm(), run=(x,), batch=1)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert any("an unchanged copy" in note for note in packed.notes), packed.notes
    assert dict(packed) == pytest.approx(dict(alone), rel=1e-5)


def test_random_numbers_of_the_device_are_the_same_in_each_run() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)).cuda()
    x = torch.randn(4, 8, device="cuda")
    state = torch.cuda.get_rng_state()
    with pytest.warns(hl.HooklineWarning, match="run alone"):
        found = hl.sweep(model, "0[..., *]", lambda output: output.norm(), run=(x,))
    assert state.equal(torch.cuda.get_rng_state())
    again = hl.sweep(model, "0[..., *]", lambda output: output.norm(), run=(x,), batch=1)
    assert dict(again) == dict(found)
