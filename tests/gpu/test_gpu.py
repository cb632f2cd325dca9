"""On a CUDA device: copy-on-write, autograd's threads, streams, CUDA graphs, inductor's kernels, and memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hookline as hl
from hookline._kernel import leaves, map_tensors
from tests.errors.wording import says
from tests.support.gpu import DEVICE, is_right_or_told, small_gpt, stages_of
from tests.support.models import GPT, WritesThenReads, tokens

pytestmark = [
    pytest.mark.gpu,
    # Dynamo asks every tensor that enters a graph for its `.grad`.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
    # Torch records an empty graph to create the memory pool of others, and warms modules up on a separate stream.
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning"),
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match:UserWarning"),
]


@pytest.mark.parametrize("way", ["capture", "patch", "skip", "edit"])
def test_on_a_stream_of_its_own_a_model_that_overwrites_its_values_computes_the_same(way: str) -> None:
    """Torch copies a shared value on the default stream, which does not wait for others."""
    model = nn.Sequential(nn.Linear(2048, 2048), nn.ReLU(inplace=True), nn.Linear(2048, 2048)).to(DEVICE)
    x = torch.randn(2048, 2048, device=DEVICE)
    given = torch.randn(2048, 2048, device=DEVICE)
    hooked: dict[str, Callable[[], hl.Hooks]] = {
        "capture": lambda: hl.capture(model, "0"),
        "patch": lambda: hl.patch(model, {"0": given}),
        "skip": lambda: hl.skip(model, "0", given),
        "edit": lambda: hl.edit(model, "0", lambda value: value.mul_(2)),
    }
    with torch.no_grad():
        expected = model[0](x)
        with hooked[way]():
            plain = model(x)
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        for _ in range(5):
            with torch.cuda.stream(stream), hooked[way]() as acts:
                torch.cuda._sleep(20_000_000)
                output = model(x)
            stream.synchronize()
            torch.cuda.synchronize()
            assert torch.equal(output, plain)
            if way == "capture":
                assert torch.equal(acts["0"], expected)


def gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=64, n_positions=32, n_embd=64, n_layer=2, n_head=2)
    return transformers.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=64, num_key_value_heads=1, max_position_embeddings=32, **sizes)
    return transformers.LlamaForCausalLM(config)


def clones_of(model: nn.Module, **inputs: Tensor) -> tuple[Any, dict[str, Any]]:
    """Run a model with plain torch hooks that copy every output immediately."""
    seen: dict[str, Any] = {}

    def hook(name: str) -> Callable[..., None]:
        def keep(_module: nn.Module, _args: object, output: Any) -> None:
            seen[name] = map_tensors(lambda tensor: tensor.detach().clone(), output)

        return keep

    handles = [module.register_forward_hook(hook(name)) for name, module in model.named_modules()]
    output = model(**inputs)
    for handle in handles:
        handle.remove()
    return output, seen


@pytest.mark.parametrize("build", [gpt2, llama])
@pytest.mark.parametrize("kind", ["bfloat16", "float16", "autocast bfloat16", "autocast float16"])
def test_every_value_of_a_language_model_equals_a_real_copy_and_its_output_is_bit_identical(
    build: Callable[[], nn.Module], kind: str
) -> None:
    dtype = getattr(torch, kind.split()[-1])
    autocast = kind.startswith("autocast")
    model = build().eval().to(DEVICE, torch.float32 if autocast else dtype)
    ids = torch.arange(1, 17, device=DEVICE)[None]
    with torch.no_grad(), torch.autocast(DEVICE, dtype, enabled=autocast):
        plain, expected = clones_of(model, input_ids=ids)
        with hl.capture(model, *expected) as acts:
            output = model(input_ids=ids)
    assert torch.equal(output.logits, plain.logits)
    assert set(acts) == set(expected)
    for site, value in expected.items():
        for one, other in zip(leaves(acts[site]), leaves(value), strict=True):
            assert one.dtype == other.dtype
            assert one.device == other.device
            assert torch.equal(one, other), site


def test_observing_a_training_step_leaves_every_gradient_bit_identical() -> None:
    model = llama().to(DEVICE)
    ids = torch.arange(1, 17, device=DEVICE)[None]

    def step() -> list[Tensor]:
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        return list(torch.autograd.grad(loss, list(model.parameters())))

    plain = step()
    with hl.capture(model, "model.layers.*", "model.layers.*:grad_output", "lm_head:grad_input"):
        observed = step()
    assert all(torch.equal(*pair) for pair in zip(plain, observed, strict=True))


def test_a_value_of_inference_mode_is_used_with_autograd_later() -> None:
    model, x = small_gpt()
    with torch.inference_mode(), hl.capture(model, "h.0", "h.1[:, -1]") as acts:
        model(x)
    assert not acts["h.0"].is_inference()
    assert not acts["h.1[:, -1]"].is_inference()
    model.h[1](acts["h.0"], scale=0.5).sum().backward()
    assert model.h[1].attn.weight.grad is not None
    acts["h.0"].add_(1)


def test_captured_values_can_be_kept_elsewhere_and_in_another_dtype(tmp_path: Path) -> None:
    model, x = small_gpt()
    with torch.no_grad():
        expected = stages_of(model, x)
        with hl.capture(model, "h.*", device="cpu", dtype=torch.float64) as acts:
            model(x)
        with hl.capture(model, "h.*") as here:
            model(x)
    for number, value in enumerate(expected):
        assert acts[f"h.{number}"].device.type == "cpu"
        assert torch.equal(acts[f"h.{number}"], value.cpu().double())
        assert torch.equal(here.to("cpu")[f"h.{number}"], value.cpu())
    here.save(tmp_path / "acts.safetensors")
    loaded = hl.Cache.load(tmp_path / "acts.safetensors")
    assert all(torch.equal(loaded[site], here[site].cpu()) for site in here)
    assert torch.equal(here.stack("h.*"), torch.stack(expected))


@pytest.mark.parametrize("site", ["h.1", "h.1[:, -1]", "h.1:input", "h.1:grad_output"])
def test_a_patch_on_another_device_is_refused_naming_both(site: str) -> None:
    model, x = small_gpt()
    value = torch.zeros(2, 8) if "[" in site else torch.zeros(2, 5, 8)
    message = r"'h.1.*': a value on cpu given where one on cuda:0 passes; move it with .to\('cuda:0'\)"
    with pytest.raises(hl.EditError, match=message), hl.patch(model, {site: value}):
        model(x).sum().backward()
    with pytest.raises(hl.EditError, match=says("cpu given where one on")), hl.edit(model, site, lambda v: v.cpu()):
        model(x).sum().backward()


def test_gradients_arrive_on_autograds_own_thread_and_are_edited_there() -> None:
    model, x = small_gpt()
    x.requires_grad_()
    hidden = model.h[0](x, scale=0.5)
    loss = model.head(model.h[1](hidden, scale=0.5)).square().sum()
    expected, at_input = torch.autograd.grad(loss, [hidden, x])
    threads = []

    def double(gradient: Tensor) -> Tensor:
        threads.append(threading.get_ident())
        return gradient * 2

    with hl.capture(model, "h.0:grad_output", "h.1:grad_input", "h.0.mlp:grad_input") as acts:
        model(x).square().sum().backward()
    torch.testing.assert_close(acts["h.0:grad_output"], expected)
    torch.testing.assert_close(acts["h.1:grad_input"], expected)
    torch.testing.assert_close(x.grad, at_input)
    x.grad = None
    with hl.edit(model, "h.0:grad_output", double):
        model(x).square().sum().backward()
    torch.testing.assert_close(x.grad, at_input * 2)
    assert threads[0] != threading.get_ident()


def test_a_gradient_that_comes_in_two_parts_is_their_sum() -> None:
    model, x = nn.Sequential(nn.Identity(), WritesThenReads()), torch.ones(2, device=DEVICE, requires_grad=True)
    with hl.capture(model, "1:grad_input") as acts:
        model(x * 2).sum().backward()
    assert acts["1:grad_input"].tolist() == [8.0, 8.0]


def test_an_error_in_a_gradient_edit_comes_from_backward_with_the_site() -> None:
    model, x = small_gpt()
    with hl.edit(model, "h.0:grad_output", lambda gradient: gradient[:1]):
        output = model(x)
        with pytest.raises(hl.EditError, match="'h.0:grad_output': shape"):
            output.sum().backward()


class Checkpointed(GPT):
    """Runs each block in a checkpointed segment."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__(depth=2)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in self.h:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


REENTRANT = pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
INSIDE = pytest.mark.parametrize("inside", [True, False], ids=["backward inside", "backward after the block"])


@REENTRANT
@INSIDE
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_edits_act_on_the_recomputation_of_a_checkpoint_too(reentrant: bool, inside: bool, dropout: float) -> None:
    """The recomputation runs on a thread of autograd's, where no block is open."""
    model, x = Checkpointed(reentrant).to(DEVICE), tokens().to(DEVICE).requires_grad_()
    for block in model.h:
        block.mlp[1] = nn.Sequential(nn.Tanh(), nn.Dropout(dropout))

    def by_hand() -> list[Tensor]:
        torch.manual_seed(1)
        hidden = x
        for block in model.h:
            middle = hidden + block.attn(block.norm(hidden))
            hidden = middle + block.mlp[2](block.mlp[1](block.mlp[0](middle) * 3))
        return list(torch.autograd.grad(model.head(hidden).square().sum(), [x, *model.parameters()]))

    expected = by_hand()
    seen = []
    torch.manual_seed(1)
    with (
        hl.edit(model, "h.*.mlp.0", lambda value: value * 3),
        hl.capture(model, "h.*.mlp.0", "h.*.mlp.0:grad_output", keep="all") as acts,
    ):
        loss = model(x).square().sum()
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    found = [x.grad, *(parameter.grad for parameter in model.parameters())]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    for site in ("h.0.mlp.0", "h.1.mlp.0", "h.0.mlp.0:grad_output", "h.1.mlp.0:grad_output"):
        seen.append(len(acts.calls(site)))
    assert seen == [1, 1, 1, 1]


class Recomputes(torch.autograd.Function):
    """A checkpoint that is not torch's, as some training frameworks have."""

    @staticmethod
    def forward(ctx: Any, module: nn.Module, x: Tensor) -> Tensor:
        ctx.module = module
        ctx.save_for_backward(x)
        with torch.no_grad():
            return module(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            output = ctx.module(x)
        torch.autograd.backward(output, gradient)
        return None, x.grad


class OwnCheckpoint(GPT):
    """Runs each block in a `Recomputes` checkpoint."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.h:
            x = Recomputes.apply(block, x)
        return self.head(x)


def test_an_edit_acts_in_a_checkpoint_that_is_not_torchs_own_or_backward_says_so() -> None:
    model, x = OwnCheckpoint(depth=2).to(DEVICE), tokens().to(DEVICE).requires_grad_()
    hidden = x
    for block in model.h:
        hidden = block(hidden) * 3
    expected = torch.autograd.grad(model.head(hidden).square().sum(), x)[0]
    try:
        with hl.edit(model, "h.*", lambda value: value * 3):
            model(x).square().sum().backward()
    except hl.HooklineError:
        return
    torch.testing.assert_close(x.grad, expected)


MODES = pytest.mark.parametrize("mode", ["default", "reduce-overhead"])


@MODES
@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_model_is_captured_and_patched_call_after_call(mode: str) -> None:
    """With CUDA graphs, every call after the second is a replay into the same memory."""
    model, x = small_gpt()
    compiled = torch.compile(model, mode=mode)
    batches = [x * scale for scale in (1.0, 2.0, 3.0, 4.0, 5.0)]
    with torch.no_grad():
        expected = [stages_of(model, batch) for batch in batches]
        compiled(x)
        with hl.capture(compiled, "h.*", "h.1.mlp.0", "head:input[:, -1]") as acts:
            for batch, stages in zip(batches, expected, strict=True):
                output = compiled(batch)
                for number, value in enumerate(stages):
                    torch.testing.assert_close(acts[f"h.{number}"], value)
                torch.testing.assert_close(acts["head:input[:, -1]"], stages[-1][:, -1])
                torch.testing.assert_close(output, model(batch))
        torch.testing.assert_close(acts["h.0"], expected[-1][0])
        for value in (0.0, torch.ones_like(x), torch.zeros_like(x)):
            with hl.patch(compiled, {"h.0": value}):
                for batch in batches[:3]:
                    patched = compiled(batch).clone()
            with hl.patch(model, {"h.0": value}):
                torch.testing.assert_close(patched, model(batch))
        with hl.edit(compiled, "h.1", lambda value: value * 2):
            edited = compiled(x).clone()
        torch.testing.assert_close(edited, model.head(expected[0][1] * 2))
        torch.testing.assert_close(compiled(x).clone(), model(x))


@MODES
@pytest.mark.usefixtures("fresh_compiler")
def test_a_value_that_was_read_is_not_overwritten_in_silence_by_the_next_call(mode: str) -> None:
    model, x = small_gpt()
    compiled = torch.compile(model, mode=mode)
    with torch.no_grad():
        expected = [stages_of(model, x * scale)[0] for scale in (1.0, 2.0, 3.0, 4.0, 5.0)]
        with hl.capture(compiled, "h.0") as acts:
            read = []
            for scale in (1.0, 2.0, 3.0, 4.0, 5.0):
                compiled(x * scale)
                read.append(acts["h.0"])
    for value, right in zip(read, expected, strict=True):
        # If a replay has overwritten the value, torch raises.
        assert is_right_or_told(lambda value=value: value + 0, right, "overwritten by a subsequent run")


@MODES
@pytest.mark.usefixtures("fresh_compiler")
def test_every_call_of_a_compiled_model_is_kept_apart(mode: str) -> None:
    """With keep="all" the module runs uncompiled, between graphs that reuse their memory."""
    model, x = small_gpt(depth=3)
    compiled = torch.compile(model, mode=mode)
    scales = (1.0, 2.0, 3.0, 4.0, 5.0)
    with torch.no_grad():
        expected = [stages_of(model, x * scale) for scale in scales]
        with hl.capture(compiled, "h.1", "h.1:input", "h.2:input", "head", keep="all") as acts:
            for scale in scales:
                compiled(x * scale)
    for number, stages in enumerate(expected):
        torch.testing.assert_close(acts.calls("h.1:input")[number], stages[0])
        torch.testing.assert_close(acts.calls("h.1")[number], stages[1])
        torch.testing.assert_close(acts.calls("h.2:input")[number], stages[1])
        torch.testing.assert_close(acts.calls("head")[number], model.head(stages[2]))


@pytest.mark.usefixtures("fresh_compiler")
def test_what_a_block_compiled_into_a_cuda_graph_gives_an_eager_one_is_kept_apart() -> None:
    model, x = small_gpt(depth=3)
    model.h[0].compile(mode="reduce-overhead")
    scales = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0)
    kept = []
    with torch.no_grad():
        expected = [stages_of(model, x * scale)[0].clone() for scale in scales]
        with hl.capture(model, "h.1:input", keep="all") as acts:
            for scale in scales:
                model(x * scale)
        for scale in scales:
            with hl.capture(model, "h.1:input") as latest:
                model(x * scale)
            kept.append(latest)
    for number, value in enumerate(expected):
        torch.testing.assert_close(acts.calls("h.1:input")[number], value)
        torch.testing.assert_close(kept[number]["h.1:input"], value)


@MODES
@pytest.mark.usefixtures("fresh_compiler")
def test_gradients_of_a_compiled_model_are_captured_and_edited(mode: str) -> None:
    model, x = small_gpt()
    compiled = torch.compile(model, mode=mode)
    hidden = model.h[0](x, scale=0.5)
    expected = torch.autograd.grad(model.head(model.h[1](hidden, scale=0.5)).square().sum(), hidden)[0]
    for _ in range(3):
        with hl.capture(compiled, "h.0:grad_output") as acts:
            compiled(x).square().sum().backward()
        torch.testing.assert_close(acts["h.0:grad_output"], expected)
        model.zero_grad(set_to_none=True)  # With CUDA graphs a gradient lives only until the next step.
    with hl.edit(compiled, "h.0:grad_output", lambda gradient: gradient * 0):
        compiled(x).square().sum().backward()
    assert model.h[0].attn.weight.grad.count_nonzero() == 0


def test_a_recorded_graph_of_the_model_gives_right_values_or_says_that_it_cannot() -> None:
    """Values captured while a graph is recorded are in the graph's memory, and every replay overwrites them."""
    model, x = small_gpt()
    stream = torch.cuda.Stream()
    with torch.no_grad():
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            model(x)
        torch.cuda.current_stream().wait_stream(stream)
        expected = stages_of(model, x)[0]
        graph = torch.cuda.CUDAGraph()
        try:
            with hl.capture(model, "h.0") as acts, torch.cuda.graph(graph):
                model(x)
        except hl.HooklineError:
            return
        graph.replay()
        read = acts["h.0"]
        torch.testing.assert_close(read, expected)
        x.mul_(2)
        graph.replay()
        torch.testing.assert_close(read, expected)


def test_a_module_whose_forward_replays_a_graph_is_told_to_have_no_inside() -> None:
    model, x = small_gpt()
    with torch.no_grad():
        plain = model(x)
    graphed = torch.cuda.make_graphed_callables(model, (x,))
    with pytest.raises(hl.NeverFired, match=says("was not called", "h.0")), hl.capture(graphed, "h.0"):
        graphed(x)
    with hl.capture(graphed, "", clone=True) as acts:  # The next replay overwrites the output of a graph.
        graphed(x)
    graphed(x * 2)
    torch.testing.assert_close(acts[""], plain)


def test_two_threads_with_blocks_on_one_model_get_their_own_values_and_gradients() -> None:
    model, x = small_gpt()
    both_open = threading.Barrier(2)

    def work(scale: float) -> tuple[Tensor, Tensor, Tensor]:
        batch = (x * scale).requires_grad_()
        with hl.edit(model, "h.0", lambda value: value * scale), hl.capture(model, "h.1", "h.1:grad_output") as acts:
            both_open.wait(10)
            for _ in range(20):
                output = model(batch)
            torch.autograd.grad(output.square().sum(), batch)
            both_open.wait(10)
        hidden = model.h[1](model.h[0](batch, scale=0.5) * scale, scale=0.5)
        gradient = torch.autograd.grad(model.head(hidden).square().sum(), hidden)[0]
        return acts["h.1"] - hidden, acts["h.1:grad_output"], gradient

    with ThreadPoolExecutor(2) as pool:
        for difference, found, expected in pool.map(work, (1.0, 2.0)):
            assert difference.count_nonzero() == 0
            torch.testing.assert_close(found, expected)


def test_a_transform_that_draws_random_numbers_leaves_those_of_the_model_alone() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).to(DEVICE)
    x = torch.randn(5, 8, device=DEVICE)
    torch.manual_seed(1)
    plain = model(x)
    torch.manual_seed(1)
    with hl.capture(model, "0", transform=lambda value: value + torch.rand_like(value)):
        assert torch.equal(model(x), plain)


def test_a_scan_computes_nothing_and_leaves_the_random_numbers_alone() -> None:
    model, x = small_gpt()
    before = torch.cuda.get_rng_state()
    scan = hl.scan(model, x)
    assert "h.1.mlp" in repr(scan)
    assert torch.equal(torch.cuda.get_rng_state(), before)
