"""On a CUDA device: copy-on-write, autograd's own threads, streams, graphs, kernels made by inductor, and memory."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hookline as hl
from hookline._values.nested import leaves, map_tensors
from tests.models import GPT, tokens

pytestmark = [
    pytest.mark.gpu,
    # Dynamo asks every tensor that enters a graph for its `.grad`.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
    # Torch records an empty graph to make the memory of others, and warms modules up on a stream of their own.
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning"),
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match:UserWarning"),
]

DEVICE = "cuda"


class Overwrites(nn.Module):
    """Passes its first layer's output to a function that writes into it, then on to its second layer."""

    def __init__(self, write: Callable[[Tensor], object], width: int = 8) -> None:
        super().__init__()
        self.write = write
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        self.write(y)
        return self.second(y)


def small_gpt(depth: int = 2) -> tuple[GPT, Tensor]:
    return GPT(depth=depth).to(DEVICE), tokens().to(DEVICE)


def stages_of(model: GPT, x: Tensor) -> list[Tensor]:
    """The output of each block, by hand."""
    stages = []
    for block in model.h:
        x = block(x, scale=0.5)
        stages.append(x)
    return stages


def is_right_or_told(read: Callable[[], Tensor], expected: Tensor, told: str) -> bool:
    """Whether what is read is right, or reading it raises with these words."""
    try:
        value = read()
    except RuntimeError as error:
        return told in str(error)
    return torch.allclose(value, expected, rtol=1e-5, atol=1e-5)


def rows(y: Tensor) -> Tensor:
    """An index for the rows of a matrix."""
    return torch.zeros(y.shape[0], dtype=torch.long, device=y.device)


def through_a_view_made_before(y: Tensor) -> object:
    return y.view(-1)[::2].neg_()


WRITES: dict[str, Callable[[Tensor], object]] = {
    "relu_": lambda y: y.relu_(),
    "add_": lambda y: y.add_(1),
    "copy_": lambda y: y.copy_(torch.ones_like(y)),
    "copy_ from the CPU": lambda y: y.copy_(torch.ones(y.shape)),
    "zero_": lambda y: y.zero_(),
    "fill_": lambda y: y.fill_(3),
    "a random fill": lambda y: y.normal_(),
    "in-place dropout": lambda y: F.dropout(y, 0.5, inplace=True),
    "setitem": lambda y: y.__setitem__((slice(None), 0), 7.0),
    "a slice": lambda y: y[1:].mul_(2),
    "a strided view": through_a_view_made_before,
    ".data": lambda y: y.data.mul_(2),
    "detach()": lambda y: y.detach().mul_(2),
    "index_add_": lambda y: y.index_add_(0, rows(y), torch.ones_like(y)),
    "index_put_": lambda y: y.index_put_((rows(y),), torch.ones_like(y), accumulate=True),
    "index_copy_": lambda y: y.index_copy_(0, rows(y)[:1], torch.ones_like(y[:1])),
    "scatter_": lambda y: y.scatter_(0, rows(y)[None].expand(1, -1)[:, :1], 9.0),
    "masked_fill_": lambda y: y.masked_fill_(y > 0, 9.0),
    "masked_scatter_": lambda y: y.masked_scatter_(y > 0, torch.ones_like(y)),
    "cumsum_": lambda y: y.cumsum_(0),
    "triu_": lambda y: y.triu_(),
    "addmm_": lambda y: y.addmm_(y[:, :3], torch.ones(3, y.shape[1], device=y.device)),
    "add(out=)": lambda y: torch.add(y, 1, out=y),
    "mm(out=)": lambda y: torch.mm(torch.ones(y.shape[0], 2, device=y.device), torch.ones_like(y[:2]), out=y),
    "sort(out=)": lambda y: torch.sort(y.clone(), out=(y, torch.empty_like(y, dtype=torch.long))),
    "cumsum(out=)": lambda y: torch.cumsum(y.clone(), 0, out=y),
    "softmax(out=)": lambda y: torch.softmax(y.clone(), -1, out=y),
    "cat(out=)": lambda y: torch.cat([torch.ones_like(y[:1]), y[1:].clone()], out=y),
    "resize_": lambda y: y.resize_(y.shape[0], y.shape[1]).mul_(2),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_captured_value_stays_what_it_was_whatever_writes_into_it_later(write: str, mode: Callable[[], Any]) -> None:
    model = Overwrites(WRITES[write]).to(DEVICE)
    x = torch.randn(5, 8, device=DEVICE)
    with mode():
        expected = model.first(x)
        torch.manual_seed(1)
        plain = model(x)
        with hl.capture(model, "first", "second:input") as acts:
            torch.manual_seed(1)
            output = model(x)
        assert torch.equal(acts["first"], expected)
        assert torch.equal(model.second(acts["second:input"]), plain)
        assert not torch.equal(acts["first"], acts["second:input"])
        assert torch.equal(output, plain)


def foreach_add(y: Tensor) -> None:
    torch._foreach_add_([y], 1.0)


def foreach_copy(y: Tensor) -> None:
    torch._foreach_copy_([y], [torch.ones_like(y)])


FOREACH = pytest.mark.parametrize("write", [foreach_add, foreach_copy])


@FOREACH
def test_a_foreach_function_that_writes_through_is_told_when_the_value_is_read(write: Callable[[Tensor], None]) -> None:
    model, x = Overwrites(write).to(DEVICE), torch.randn(5, 8, device=DEVICE)
    with torch.no_grad():
        expected = model.first(x)
        with hl.capture(model, "first") as acts:
            model(x)
        with hl.capture(model, "first", clone=True) as copied:
            model(x)
    with pytest.raises(hl.StaleValue, match="'first' may have been overwritten .* foreach function.* clone=True"):
        acts["first"]
    assert torch.equal(copied["first"], expected)


@pytest.mark.parametrize("count", [lambda y: y.copy_(y), lambda y: y.t_().t_()], ids=["copy_", "t_"])
def test_a_write_that_changes_nothing_is_not_called_an_overwrite(count: Callable[[Tensor], object]) -> None:
    model, x = Overwrites(count).to(DEVICE), torch.randn(5, 8, device=DEVICE)
    with torch.no_grad():
        expected = model.first(x)
        with hl.capture(model, "first") as acts:
            model(x)
        with hl.capture(model, "first", clone=True) as copied:
            model(x)
    with pytest.raises(hl.StaleValue, match=r"'first' may have been overwritten .* x.copy_\(x\).* clone=True"):
        acts["first"]
    assert torch.equal(copied["first"], expected)


def test_torch_shows_nothing_by_which_a_foreach_write_differs_from_a_copy_onto_itself() -> None:
    """If this fails, torch tells the two apart by now: then StaleValue need not be raised for the second."""

    def left_by(write: Callable[[Tensor], object]) -> tuple[Any, ...]:
        own = torch.ones(5, 8, device=DEVICE)
        kept = torch._lazy_clone(own)
        write(own)
        shares = torch._C._data_address(own) == torch._C._data_address(kept)
        is_cow = torch._C._is_cow_tensor(own), torch._C._is_cow_tensor(kept)
        uses = torch._C._storage_Use_Count(own.untyped_storage()._cdata), own._use_count()
        return own._version, kept._version, shares, is_cow, uses, own.grad_fn, own.shape, own.stride()

    writes, copies = left_by(foreach_add), left_by(lambda y: y.copy_(y))
    assert writes == copies
    assert writes[2]


def test_a_buffer_copied_onto_itself_can_be_read() -> None:
    """What the model holds from before the forward is copied when it is captured."""

    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("buffer", torch.arange(64.0 * 1024).reshape(64, 1024))
            self.reads = nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            y = self.reads(self.buffer)
            self.buffer.copy_(self.buffer)
            return x + y

    model = Reads().to(DEVICE)
    with torch.no_grad(), hl.capture(model, "reads") as acts:
        model(torch.ones(64, 1024, device=DEVICE))
    assert torch.equal(acts["reads"], model.buffer)


def test_a_real_copy_stays_what_it_was_also_where_torch_counts_no_write() -> None:
    """Of the foreach functions `_foreach_zero_` moves no version, so that nothing can tell the write."""
    model, x = Overwrites(lambda y: torch._foreach_zero_([y])).to(DEVICE), torch.randn(5, 8, device=DEVICE)
    with torch.no_grad():
        expected = model.first(x)
        with hl.capture(model, "first", "first[:2]", clone=True) as acts:
            model(x)
    assert torch.equal(acts["first"], expected)
    assert torch.equal(acts["first[:2]"], expected[:2])


class ReturnsParameter(nn.Module):
    """Gives a part of a parameter, as learned positions are."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(5, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.positions[: x.shape[0]]


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("kind", ["foreach", "fused", "plain"])
def test_a_captured_part_of_a_parameter_stays_what_it_was_when_an_optimizer_steps(kind: str, grad: bool) -> None:
    """The fused optimizers write through a copy-on-write tensor and count no write."""
    model = nn.Sequential(ReturnsParameter()).to(DEVICE)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, foreach=kind == "foreach", fused=kind == "fused")
    x = torch.randn(3, 8, device=DEVICE)
    with torch.set_grad_enabled(grad), hl.capture(model, "0") as acts:
        model(x)
    expected = model[0].positions[:3].detach().clone()
    model(x).sum().backward()
    optimizer.step()
    assert not torch.equal(model[0].positions[:3], expected)
    assert is_right_or_told(lambda: acts["0"], expected, "clone=True")


def test_a_foreach_function_in_inference_mode_does_not_change_a_captured_value_in_silence() -> None:
    """There is no version to tell the write by."""
    model, x = Overwrites(foreach_add).to(DEVICE), torch.randn(5, 8, device=DEVICE)
    with torch.inference_mode():
        expected = model.first(x)
        with hl.capture(model, "first") as acts:
            model(x)
        assert is_right_or_told(lambda: acts["first"], expected, "clone=True")


def test_a_foreach_function_does_not_write_into_what_the_caller_holds() -> None:
    model, x = Overwrites(foreach_add).to(DEVICE), torch.randn(5, 8, device=DEVICE)
    given, before = torch.randn(5, 8, device=DEVICE), x.clone()
    kept = given.clone()
    with torch.no_grad():
        with hl.patch(model, {"first": given}):
            model(x)
        assert torch.equal(given, kept)
        with hl.skip(model, "first", given):
            model(x)
        assert torch.equal(given, kept)
        with hl.edit(model, "first", lambda value: given):
            model(x)
        assert torch.equal(given, kept)
        with hl.skip(model, "first"):
            model(x)
        assert torch.equal(x, before)


class Residual(nn.Module):
    """Gives its first layer's input to both sides of a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + x


def double_data(value: Tensor) -> Tensor:
    value.data.mul_(2)
    return value


def double_foreach(value: Tensor) -> Tensor:
    torch._foreach_mul_([value], 2.0)
    return value


IN_PLACE: dict[str, Callable[[Tensor], Tensor]] = {
    "mul_": lambda value: value.mul_(2),
    ".data": double_data,
    "foreach": double_foreach,
}


@pytest.mark.parametrize("way", IN_PLACE)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("streams", [False, True], ids=["default stream", "another stream"])
def test_an_edit_in_place_takes_effect_and_reaches_nobody_else(
    way: str, mode: Callable[[], Any], streams: bool
) -> None:
    model, x = Residual().to(DEVICE), torch.randn(5, 8, device=DEVICE)
    stream = torch.cuda.Stream() if streams else torch.cuda.current_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with mode():
        expected = model.inner(x * 2) + x
        torch.cuda.synchronize()
        try:
            with torch.cuda.stream(stream), hl.edit(model, "inner:input", IN_PLACE[way]):
                output = model(x)
        except hl.EditError:
            assert way == "foreach"
            return
        torch.cuda.synchronize()
        torch.testing.assert_close(output, expected)


def test_a_value_inside_a_transform_of_torch_func_is_refused() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8)).to(DEVICE), torch.randn(5, 8, device=DEVICE)
    with pytest.raises(hl.HooklineError, match="'0': a value inside vmap"), hl.capture(model, "0"):
        torch.func.vmap(model)(x)


def test_a_gradient_that_clipping_writes_into_later_is_right_or_told() -> None:
    """Clipping is a foreach function, and a leaf's gradient may share memory with the one that was captured."""
    model, x = nn.Linear(8, 8, device=DEVICE), torch.randn(5, 8, device=DEVICE, requires_grad=True)
    with hl.capture(model, ":grad_input") as acts:
        model(x).square().sum().backward()
    assert x.grad is not None
    expected = x.grad.clone()
    torch.nn.utils.clip_grad_norm_([x], 1e-3, foreach=True)
    assert is_right_or_told(lambda: acts[":grad_input"], expected, "clone=True")


def test_an_empty_value_is_never_stale() -> None:
    """As an expert that no token was sent to."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True)).to(DEVICE)
    with torch.no_grad(), hl.capture(model, "0") as acts:
        model(torch.empty(0, 8, device=DEVICE))
    assert acts["0"].shape == (0, 8)


def test_a_sparse_value_that_is_overwritten_later_stays_what_it_was() -> None:
    model = nn.Sequential(nn.Identity())
    x = torch.eye(3, device=DEVICE).to_sparse()
    with torch.no_grad(), hl.capture(model, "0") as acts:
        model(x)
    x.mul_(2)
    assert torch.equal(acts["0"].to_dense(), torch.eye(3, device=DEVICE))


def test_a_kernel_that_inductor_made_writes_into_the_models_value_and_not_the_captured_one() -> None:
    double = torch.compile(lambda y: y.mul_(2))
    model, x = Overwrites(double).to(DEVICE), torch.randn(5, 8, device=DEVICE)
    with torch.no_grad():
        expected = model.first(x)
        plain = model(x)
        with hl.capture(model, "first") as acts:
            output = model(x)
    assert torch.equal(acts["first"], expected)
    assert torch.equal(output, plain)


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
    """Run a model under torch's own hooks, which copy every output at once."""
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
    with pytest.raises(hl.EditError, match="cpu given where one on cuda:0"), hl.edit(model, site, lambda v: v.cpu()):
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


class WritesThenReads(nn.Module):
    """Uses its input, overwrites it, and uses it again, so that its gradient comes in two parts."""

    def forward(self, x: Tensor) -> Tensor:
        before = x * 3
        x.mul_(5)
        return before + x


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
    """The recomputation runs on autograd's own thread, where no block is open."""
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
    """A checkpoint that is not torch's own, as training frameworks have."""

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
    """Runs each block in a checkpoint of its own kind."""

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


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


MODES = pytest.mark.parametrize("mode", ["default", "reduce-overhead"])


@MODES
@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_model_is_captured_and_patched_call_after_call(mode: str) -> None:
    """With CUDA graphs every call after the second is a replay into the same memory."""
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
        # When a replay has taken its memory, torch says so.
        assert is_right_or_told(lambda value=value: value + 0, right, "overwritten by a subsequent run")


@MODES
@pytest.mark.usefixtures("fresh_compiler")
def test_every_call_of_a_compiled_model_is_kept_apart(mode: str) -> None:
    """To keep all calls a module runs uncompiled, between graphs whose memory is used again."""
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
    """What was captured while a graph is recorded lies in the graph's memory, which every replay writes."""
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
    with pytest.raises(hl.NeverFired, match="'h.0' was not called"), hl.capture(graphed, "h.0"):
        graphed(x)
    with hl.capture(graphed, "", clone=True) as acts:  # What a graph gives is overwritten by its next replay.
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


def held() -> float:
    """Return the mebibytes that tensors hold on the device."""
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated() / 2**20


def about(mebibytes: float) -> Any:
    """Allow for what the allocator leaves unused of a block."""
    return pytest.approx(mebibytes, abs=1)


def wide_model(*layers: nn.Module) -> tuple[nn.Sequential, Tensor]:
    """A model whose activations are 16 MiB each, and an input."""
    linear = [nn.Linear(1024, 1024, bias=False) for _ in range(2)]
    model = nn.Sequential(linear[0], *layers, linear[1]).to(DEVICE)
    x = torch.randn(4096, 1024, device=DEVICE)
    # Libraries allocate their workspaces once for each thread: this one and autograd's.
    with torch.enable_grad():
        model(x).sum().backward()
    model.zero_grad(set_to_none=True)
    return model, x


@torch.no_grad()
def test_ten_captures_of_one_activation_hold_it_once() -> None:
    model, x = wide_model(*(nn.Identity() for _ in range(9)))
    before = held()
    with hl.capture(model, *(str(number) for number in range(10))) as acts:
        model(x)
    assert held() - before == about(16)
    del acts
    assert held() == before


@torch.no_grad()
def test_an_activation_that_is_overwritten_later_is_held_once() -> None:
    model, x = wide_model(nn.ReLU(inplace=True))
    before = held()
    with hl.capture(model, "0") as acts:
        model(x)
    assert acts["0"].min() < 0
    assert held() - before == about(16)


@torch.no_grad()
def test_a_part_holds_only_its_part() -> None:
    model, x = wide_model()
    before = held()
    with hl.capture(model, "0[:256]", "1:input[:, :256]") as acts:
        model(x)
    assert held() - before == about(5)
    assert acts["0[:256]"].shape == (256, 1024)


@torch.no_grad()
def test_what_is_kept_on_the_cpu_holds_nothing_on_the_device() -> None:
    model, x = wide_model()
    before = held()
    with hl.capture(model, "0", "1", device="cpu"):
        model(x)
    assert held() == before


@torch.no_grad()
def test_a_stop_computes_and_frees_the_rest() -> None:
    model, x = wide_model(*(nn.Linear(1024, 1024, bias=False) for _ in range(6)))
    before = held()
    torch.cuda.reset_peak_memory_stats()
    with hl.capture(model, "2", stop=True) as acts:
        assert model(x) is None
    assert held() - before == about(16)
    assert torch.cuda.max_memory_allocated() / 2**20 - before == about(32)
    assert acts["2"].shape == (4096, 1024)


def test_the_graph_is_not_held_and_the_model_is_freed_by_counting_alone() -> None:
    model, x = wide_model(nn.GELU(), nn.Linear(1024, 1024, bias=False))
    before = held()
    with hl.capture(model, "0", "0:grad_output") as acts:
        model(x).sum().backward()
    model.zero_grad(set_to_none=True)
    assert held() - before == about(32)
    gone = weakref.ref(model)
    del model
    assert gone() is None
    assert acts["0"].shape == acts["0:grad_output"].shape


def test_memory_that_came_in_from_outside_does_not_move() -> None:
    model = nn.Sequential(nn.Identity(), nn.Linear(1 << 10, 1 << 10, device=DEVICE), nn.Identity())
    x = torch.ones(1 << 10, 1 << 10, device=DEVICE)
    alias = torch.from_dlpack(torch.utils.dlpack.to_dlpack(x))
    before = x.data_ptr()
    with hl.capture(model, "0", "0:input", "1:input") as acts:
        model(x)
    x.add_(1)
    assert x.data_ptr() == before
    assert alias[0, 0] == 2
    assert all(acts[site][0, 0] == 1 for site in ("0", "0:input", "1:input"))


def test_what_the_forward_made_is_shared_there_too() -> None:
    model = nn.Sequential(nn.Linear(1 << 10, 1 << 10), nn.ReLU(), nn.Linear(1 << 10, 1 << 10)).to(DEVICE)
    x = torch.ones(2, 1 << 10, 1 << 10, device=DEVICE)
    for mode in (torch.enable_grad, torch.no_grad):
        with mode(), hl.capture(model, "*") as acts:
            model(x)
        shared = [torch._C._is_cow_tensor(acts[site]) for site in acts]
        assert shared == [True, True, True]
