"""`hl.compare` with a GPU: of models in other precisions, kernels and on other devices, and of large values."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import hookline as hl
from hookline._kernel import leaves

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def llama() -> tuple[Any, Tensor]:
    """Return a Llama of 0.3 billion parameters in float32, whose norms are not all ones, and ids."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=8000, hidden_size=1024, intermediate_size=4096, num_hidden_layers=16, num_attention_heads=16,
        num_key_value_heads=4,
    )  # fmt: skip
    with torch.device("cuda"):
        model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for one in model.parameters():
            if one.dim() == 1:
                one.add_(0.2 * torch.rand_like(one))
    return model, torch.randint(8000, (2, 256), device="cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_float32_up_to_rounding(llama, dtype) -> None:
    model, ids = llama
    report = hl.compare(model, copy.deepcopy(model).to(dtype), run=(ids,))
    assert report.ok, report.verdict
    assert 1e-4 < report["lm_head"].seen.relative < 0.1
    assert len(report) > 16 * 10


@pytest.mark.parametrize(
    ("site", "change", "hint"),
    [
        ("model.layers.9.post_attention_layernorm", {"variance_epsilon": 0.2}, "is 1e-06 in a and 0.2 in b"),
        ("model.layers.3.self_attn", {"scaling": 0.1}, "scaling is 0.125 in a and 0.1 in b"),
        ("model.layers.12.mlp.act_fn", {}, "a computes silu, and b gelu (exact)"),
    ],
)  # fmt: skip
def test_a_fault_in_bfloat16_is_found_and_explained(llama, site, change, hint) -> None:
    model, ids = llama
    other = copy.deepcopy(model).bfloat16()
    for name, value in change.items():
        setattr(other.get_submodule(site), name, value)
    if not change:
        other.get_submodule(site.rpartition(".")[0]).act_fn = nn.GELU()
    first = hl.compare(model, other, run=(ids,)).first
    assert first.site == site
    assert hint in first.hint


def test_the_processor_and_the_gpu_do_the_same(llama) -> None:
    model, ids = llama
    on_processor = copy.deepcopy(model).cpu()
    on_processor.model.layers = on_processor.model.layers[:3]
    on_gpu = copy.deepcopy(on_processor).cuda()
    few = ids[:, :32]
    report = hl.compare(on_processor, on_gpu, run=(few.cpu(),), run_b=(few,))
    assert report.ok, report.verdict
    on_gpu.model.layers[1].input_layernorm.variance_epsilon = 1e-2
    report = hl.compare(on_processor, on_gpu, run=(few.cpu(),), run_b=(few,))
    assert report.first.site == "model.layers.1.input_layernorm"


@pytest.mark.parametrize("backend", [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])
def test_the_kernels_of_attention_do_the_same(llama, backend) -> None:
    model, ids = llama

    class With(nn.Module):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, ids: Tensor) -> Any:
            with sdpa_kernel(backend):
                return self.inner(ids)

    eager = copy.deepcopy(model).bfloat16()
    eager.set_attn_implementation("eager")
    report = hl.compare(eager, With(copy.deepcopy(model).bfloat16()), run=(ids,))
    assert report.ok, report.verdict


def test_a_compiled_model_does_the_same(llama) -> None:
    model, ids = llama
    small = copy.deepcopy(model)
    small.model.layers = small.model.layers[:2]
    report = hl.compare(small, torch.compile(copy.deepcopy(small)), run=(ids,))
    assert report.ok, report.verdict


def test_a_convolution_in_tf32_is_named() -> None:
    torch.manual_seed(0)
    a = nn.Sequential(nn.Conv2d(64, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 3)).cuda()
    x = torch.randn(4, 64, 32, 32)
    before = torch.backends.cudnn.allow_tf32
    try:
        torch.backends.cudnn.allow_tf32 = True
        on_processor = copy.deepcopy(a).cpu()
        first = hl.compare(on_processor, a, run=(x,), run_b=(x.cuda(),)).first
        assert first.site == "0"
        assert "TF32" in first.hint
        torch.backends.cudnn.allow_tf32 = False
        assert hl.compare(on_processor, a, run=(x,), run_b=(x.cuda(),)).ok
    finally:
        torch.backends.cudnn.allow_tf32 = before


def test_it_takes_little_more_memory_than_the_values_of_both_runs(llama) -> None:
    model, ids = llama
    other = copy.deepcopy(model).bfloat16()
    with hl.capture(model, "", "**", keep="all") as acts, torch.no_grad():
        model(ids)
    outputs = [acts.calls(site) for site in acts]
    held = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in leaves(outputs)}
    values = sum(held.values())
    del outputs, acts
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    report = hl.compare(model, other, run=(ids,))
    peak = torch.cuda.max_memory_allocated() - before
    assert report.ok
    in_bfloat16 = sum(one.numel() for one in model.parameters()) * 2  # A copy of a, to see what the dtype explains.
    assert peak < in_bfloat16 + 3 * values, (peak / 1e9, in_bfloat16 / 1e9, values / 1e9)
