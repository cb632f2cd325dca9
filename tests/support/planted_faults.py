"""Pairs of models for `hl.compare`: with one known fault, of a kind that ports and conversions have, or with none.

`planted(number)` returns a pair with a fault, `unfaulted(number)` one that differs only by rounding. Both are drawn
from all kinds and all architectures, and a number always gives the same pair.
"""

from __future__ import annotations

import copy
import inspect
import random
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from tests.support import architectures

ARCHITECTURES = (
    *("gpt2", "llama", "gemma", "gemma2", "gpt_neox", "opt", "bert", "distilbert", "t5", "mistral", "qwen2", "phi"),
    *("bloom", "roberta", "vit", "falcon", "electra", "stablelm", "plain_convnet", "residual_convnet"),
)
LEAST = 1e-4  # A fault changes the output of the model by at least this share, and more than rounding can.
HEAD = architectures.WIDTH // architectures.HEADS


class Fault(NamedTuple):
    """Two models, what both are called with, the module of b with the fault, and a pattern that the right hint has."""

    kind: str
    architecture: str
    a: nn.Module
    b: nn.Module
    run: dict[str, Any]
    site: str
    words: str


class Same(NamedTuple):
    """Two models that do the same, how they differ, and the options of `hl.compare`."""

    kind: str
    architecture: str
    a: nn.Module
    b: nn.Module
    options: dict[str, Any]


Planted = tuple[str, str] | None  # The module and the words of the hint, if the fault could be planted.


def planted(number: int) -> Fault:
    """Return a pair with a fault that has an effect."""
    draw = random.Random(number)
    kinds = list(FAULTS)
    kind = kinds[number % len(kinds)]
    while True:
        name = draw.choice(ARCHITECTURES)
        a, run = model_and_inputs(name)
        b = copy.deepcopy(a)
        if hasattr(b, "get_output_embeddings") and b.get_output_embeddings() is not None:  # Tied: two modules at fault.
            a.get_output_embeddings().weight = nn.Parameter(a.get_output_embeddings().weight.detach().clone())
            b = copy.deepcopy(a)
        with torch.no_grad():
            found = FAULTS[kind](b, draw)
        if found is not None and has_effect(a, b, run):
            return Fault(kind, name, a, b, run, *found)


def has_effect(a: nn.Module, b: nn.Module, run: dict[str, Any]) -> bool:
    """Return True if two models do not return the same."""
    outputs = []
    for model in (a, b):
        torch.manual_seed(0)
        with torch.no_grad():
            outputs.append(main_tensor(model(**run)))
    return bool((outputs[0] - outputs[1]).norm() > LEAST * outputs[0].norm())


def main_tensor(output: Any) -> Tensor:
    """Return the main tensor of an output."""
    return output if isinstance(output, Tensor) else next(iter(output.values()))


def model_and_inputs(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """Return a model whose vectors, such as biases and weights of norms, are random, and what it is called with."""
    torch.manual_seed(0)
    if name in CONVNETS:
        model, run = CONVNETS[name]().eval(), {"input": torch.randn(2, 3, 12, 12)}
    else:
        model = architectures.model_of(name)
        run = {key: value for key, value in architectures.inputs_of(model).items() if key != "use_cache"}
        if "input_ids" in run:
            run["use_cache"] = False
    with torch.no_grad():
        for path, one in (*model.named_parameters(), *model.named_buffers()):
            if one.dim() == 1 and one.is_floating_point() and "inv_freq" not in path:
                one.add_(0.2 * torch.rand_like(one))
    return model, run


# Convolutional nets.


class ConvBlock(nn.Module):
    """Two convolutions, with a residual connection around them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
        self.norm1, self.norm2 = (nn.BatchNorm2d(width) for _ in range(2))
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Return the output."""
        hidden = self.act(self.norm1(self.conv1(x)))
        return self.act(x + self.norm2(self.conv2(hidden)))


class ResidualConvnet(nn.Module):
    """A stem, blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.blocks = nn.Sequential(ConvBlock(16), ConvBlock(16))
        self.pool, self.drop, self.head = nn.AdaptiveAvgPool2d(1), nn.Dropout(0.1), nn.Linear(16, 10)

    def forward(self, input: Tensor) -> Tensor:
        """Return the logits."""
        return self.head(self.drop(self.pool(self.blocks(self.stem(input))).flatten(1)))


def plain_convnet() -> nn.Module:
    """Return convolutions one after the other."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.GELU(),
        nn.Conv2d(16, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 16, 3, padding=1), nn.LeakyReLU(), nn.Flatten(), nn.Dropout(0.1),
        nn.Linear(16 * 36, 32), nn.LayerNorm(32), nn.Tanh(), nn.Linear(32, 10),
    )  # fmt: skip


CONVNETS: dict[str, Callable[[], nn.Module]] = {"plain_convnet": plain_convnet, "residual_convnet": ResidualConvnet}


# Faults. Each changes a copy of a model, and returns the module and what the hint is to say.


def _some(b: nn.Module, draw: random.Random, fits: Callable[[str, nn.Module], Any]) -> tuple[str, Any]:
    """Return one of the modules that fit, by name; ("", None) if none does."""
    found = [(path, module) for path, module in b.named_modules() if path and fits(path, module)]
    return draw.choice(found) if found else ("", None)


def _become(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Let a module compute something else: `forward` gets the module, its own forward and its arguments."""
    own = type(module)

    def changed(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(self, own.forward.__get__(self), *args, **kwargs)

    changed.__signature__ = inspect.signature(own.forward)  # type: ignore[attr-defined]
    module.__class__ = type(own.__name__, (own,), {"forward": changed})


def _is_norm(path: str, module: nn.Module) -> bool:
    return bool(re.search("Norm", type(module).__name__)) and getattr(module, "weight", None) is not None


def _is_linear(path: str, module: nn.Module) -> bool:
    return type(module).__name__ in ("Linear", "Conv1D", "FalconLinear")


def epsilon(b: nn.Module, draw: random.Random) -> Planted:
    path, norm = _some(b, draw, lambda p, m: _is_norm(p, m) and any("eps" in name for name in vars(m)))
    if norm is None:
        return None
    name = next(name for name in vars(norm) if "eps" in name)
    setattr(norm, name, getattr(norm, name) * draw.choice([100, 1000, 10000]))
    return path, "eps"


def rotary_base(b: nn.Module, draw: random.Random) -> Planted:
    path, rotary = _some(b, draw, lambda p, m: "inv_freq" in dict(m.named_buffers(recurse=False)))
    if rotary is None:
        return None
    size = len(rotary.inv_freq)
    rotary.inv_freq.copy_(draw.choice([5e3, 1e5, 1e6]) ** (-torch.arange(size) / size))
    return path, "base of the rotary"


def transposed(b: nn.Module, draw: random.Random) -> Planted:
    path, linear = _some(b, draw, lambda p, m: _is_linear(p, m) and m.weight.shape[0] == m.weight.shape[1])
    if linear is None:
        return None
    linear.weight.copy_(linear.weight.T.clone())
    return path, "transposed"


def swapped(b: nn.Module, draw: random.Random) -> Planted:
    path, linear = _some(b, draw, _is_linear)
    if linear is None:
        return None
    others = [
        (p, m) for p, m in b.named_modules() if _is_linear(p, m) and p != path and m.weight.shape == linear.weight.shape
    ]
    others = [one for one in others if one[1].weight is not linear.weight]
    if not others:
        return None
    other_path, other = draw.choice(others)
    kept = linear.weight.clone()
    linear.weight.copy_(other.weight)
    other.weight.copy_(kept)
    return f"{path}|{other_path}", "weight: .*(that of|is a's)"


def missing_bias(b: nn.Module, draw: random.Random) -> Planted:
    def may_miss_it(path: str, module: nn.Module) -> bool:
        needs_it = type(module).__name__ in ("BatchNorm2d", "Conv1D")
        return isinstance(getattr(module, "bias", None), Tensor) and not needs_it

    path, module = _some(b, draw, may_miss_it)
    if module is None:
        return None
    module.bias = None
    return path, "bias"


_ACTIVATIONS = "GELU|Gelu|SiLU|ReLU|Tanh"


def activation(b: nn.Module, draw: random.Random) -> Planted:
    path, module = _some(b, draw, lambda p, m: re.search(_ACTIVATIONS, type(m).__name__) and not list(m.children()))
    if module is None:
        return None
    others = [nn.GELU(), nn.GELU(approximate="tanh"), nn.SiLU(), nn.ReLU()]
    holder, _, name = path.rpartition(".")
    setattr(b.get_submodule(holder), name, draw.choice(others))
    return path, "computes"


def mask(b: nn.Module, draw: random.Random) -> Planted:
    path, attention = _some(b, draw, lambda p, m: re.search("Attention$", type(m).__name__))
    if attention is None or re.search("ViT|Bert|Electra|Roberta|T5", type(attention).__name__):
        return None

    def later(self: nn.Module, own: Any, *args: Any, **kwargs: Any) -> Any:
        args = tuple(_one_further(one) for one in args)
        return own(
            *args, **{name: _one_further(one) if name == "attention_mask" else one for name, one in kwargs.items()}
        )

    _become(attention, later)
    return path, "mask"


def _one_further(given: Any) -> Any:
    """Return an attention mask in which each position also sees the next one."""
    if not isinstance(given, Tensor) or given.dim() != 4 or given.shape[-1] != given.shape[-2]:
        return given
    shut = torch.ones(given.shape[-2:], dtype=torch.bool).triu(2)
    if given.dtype == torch.bool:
        return (~shut).expand_as(given)
    return torch.zeros_like(given).masked_fill(shut, torch.finfo(given.dtype).min)


_OF_HEADS = r"(^|\.|_)(q|k|v|query|key|value|q_proj|k_proj|v_proj|q_lin|k_lin|v_lin|query_key_value|c_attn)$"


def head_order(b: nn.Module, draw: random.Random) -> Planted:
    path, linear = _some(b, draw, lambda p, m: _is_linear(p, m) and re.search(_OF_HEADS, p))
    if linear is None:
        return None
    dim = 1 if type(linear).__name__ == "Conv1D" else 0
    heads = linear.weight.shape[dim] // HEAD
    if heads < 2:
        return None
    order = torch.arange(heads * HEAD).reshape(heads, HEAD).flip(0).flatten()
    linear.weight.copy_(linear.weight.index_select(dim, order))
    if linear.bias is not None and draw.random() < 0.5:
        linear.bias.copy_(linear.bias[order])
    return path, "another order"


def rotary_layout(b: nn.Module, draw: random.Random) -> Planted:
    path, attention = _some(b, draw, lambda p, m: hasattr(m, "q_proj") and not hasattr(m, "out_proj"))
    if attention is None:
        return None
    for linear in (attention.q_proj, attention.k_proj):
        order = torch.arange(len(linear.weight)).reshape(-1, 2, HEAD // 2).transpose(1, 2).flatten()
        linear.weight.copy_(linear.weight[order])
    return f"{path}.q_proj", "interleaved|another order"


_SCALES = (
    "scaling",
    "scale",
    "inv_norm_factor",
    "scale_attn",
    "norm_factor",
    "scalar_embed_scale",
    "layernorm_num_groups",
)


def scale(b: nn.Module, draw: random.Random) -> Planted:
    path, module = _some(b, draw, lambda p, m: any(isinstance(vars(m).get(name), float) for name in _SCALES))
    if module is None or draw.random() < 0.3:
        path, module = _some(b, draw, lambda p, m: isinstance(m, nn.Embedding) or _is_linear(p, m))
        factor = draw.choice([0.5, 4.0, 0.125])
        _become(module, lambda self, own, *args: factor * own(*args))
        return path, "times b's"
    for name in _SCALES:
        if isinstance(vars(module).get(name), float):
            setattr(module, name, getattr(module, name) * draw.choice([0.5, 2.0, 8**-0.5]))
    return path, "scal|factor|times"


_ADDS = r"(Output|DecoderLayer|Block|NeoXLayer|ViTLayer|LayerFF|LayerSelfAttention|LayerCrossAttention)$"


class _WithoutAdding(TorchFunctionMode):
    """Leaves out the first addition of a tensor to another."""

    def __init__(self, residual: Tensor) -> None:
        super().__init__()
        self.residual: Tensor | None = residual

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (
            getattr(function, "__name__", "") in ("add", "__add__", "__radd__", "add_", "__iadd__")
            and self.residual is not None
        ):
            others = [one for one in args if one is not self.residual]
            if len(others) < len(args) and isinstance(others[0], Tensor) and others[0].shape == self.residual.shape:
                self.residual = None
                return others[0]
        return function(*args, **(kwargs or {}))


def residual(b: nn.Module, draw: random.Random) -> Planted:
    named = dict(b.named_modules())
    adding = [path for path, module in named.items() if re.search(_ADDS, type(module).__name__)]
    adding = [path for path in adding if not any(one.startswith(f"{path}.") for one in adding)]
    if not adding:
        return None
    path = draw.choice(adding)

    def leave_out(self: nn.Module, own: Any, *args: Any, **kwargs: Any) -> Any:
        given = [*args, *kwargs.values()]
        of_output = "Output" in type(self).__name__
        with _WithoutAdding(given[1] if of_output else given[0]):
            return own(*args, **kwargs)

    _become(named[path], leave_out)
    return path, "residual"


def dtype(b: nn.Module, draw: random.Random) -> Planted:
    path, linear = _some(b, draw, _is_linear)
    if linear is None:
        return None
    if draw.random() < 0.5:
        linear.weight.copy_(linear.weight.bfloat16().to(linear.weight))
        return path, "bfloat16"
    if type(linear).__name__ == "Conv1D":
        return None

    def in_half(self: Any, own: Any, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.bfloat16()
        return F.linear(x.bfloat16(), self.weight.bfloat16(), bias).to(x)

    _become(linear, in_half)
    return path, "bfloat16"


def stale_buffer(b: nn.Module, draw: random.Random) -> Planted:
    path, norm = _some(b, draw, lambda p, m: isinstance(m, nn.BatchNorm2d))
    if norm is None:
        return None
    name = draw.choice(["running_mean", "running_var"])
    getattr(norm, name).fill_(float(name == "running_var"))
    return path, name


def norm_offset(b: nn.Module, draw: random.Random) -> Planted:
    path, norm = _some(
        b, draw, lambda p, m: re.search("RMSNorm|T5LayerNorm|^LayerNorm", type(m).__name__) and _is_norm(p, m)
    )
    if norm is None or not isinstance(getattr(norm, "weight", None), Tensor):
        return None
    has_offset = "Gemma" in type(norm).__name__
    bias = getattr(norm, "bias", None)

    def other(self: Any, own: Any, x: Tensor) -> Tensor:
        shift = 0 if bias is None else self.bias
        plain = own(x) - shift
        return (
            plain / (1 + self.weight) * self.weight + shift
            if has_offset
            else plain / self.weight * (1 + self.weight) + shift
        )

    _become(norm, other)
    return path, "offset"


def dropout(b: nn.Module, draw: random.Random) -> Planted:
    path, module = _some(b, draw, lambda p, m: isinstance(m, nn.Dropout))
    if module is None:
        return None
    module.p = 0.3
    module.train()
    return path, "dropout"


def soft_cap(b: nn.Module, draw: random.Random) -> Planted:
    path, module = _some(b, draw, lambda p, m: getattr(m, "attn_logit_softcapping", None))
    if module is None:
        path, module = _some(b, draw, lambda p, m: p in ("lm_head", "embed_out", "pooler", "14", "head"))
        if module is None:
            return None
        _become(module, lambda self, own, *args: 0.5 * torch.tanh(own(*args) / 0.5))
        return path, "soft cap"
    module.attn_logit_softcapping = draw.choice([0.01, 0.02])
    return path, "cap"


def convolution(b: nn.Module, draw: random.Random) -> Planted:
    path, conv = _some(b, draw, lambda p, m: type(m) is nn.Conv2d and m.kernel_size == (3, 3))
    if conv is None:
        return None
    kind = draw.choice(["flip", "mode", "dilation"])
    if kind == "flip":
        conv.weight.copy_(conv.weight.flip(-1).clone())
        return path, "revers|order"
    if kind == "mode":
        conv.padding_mode = "reflect"
        return path, "padding_mode"
    conv.dilation, conv.padding = (2, 2), (2, 2)
    return path, "dilation"


def stale_weight(b: nn.Module, draw: random.Random) -> Planted:
    path, module = _some(b, draw, lambda p, m: isinstance(getattr(m, "weight", None), nn.Parameter))
    if module is None:
        return None
    if draw.random() < 0.5:
        module.weight = nn.Parameter(torch.randn_like(module.weight) * module.weight.std())
    else:
        module.weight.mul_(draw.choice([0.5, 2.0, -1.0]))
    return path, "weight"


FAULTS: dict[str, Callable[[nn.Module, random.Random], Planted]] = {
    one.__name__: one
    for one in (
        epsilon, rotary_base, transposed, swapped, missing_bias, activation, mask, head_order, rotary_layout, scale,
        residual, dtype, stale_buffer, norm_offset, dropout, soft_cap, convolution, stale_weight,
    )
}  # fmt: skip


# Pairs that do the same.


def unfaulted(number: int) -> Same:
    """Return a pair that differs in nothing but rounding."""
    draw = random.Random(number)
    kinds = list(SAME)
    kind = kinds[number % len(kinds)]
    while True:
        name = draw.choice(ARCHITECTURES)
        a, run = model_and_inputs(name)
        found = SAME[kind](a, run)
        if found is not None:
            return Same(kind, name, *found)


Alike = tuple[nn.Module, nn.Module, dict[str, Any]] | None


def copied(a: nn.Module, run: dict[str, Any]) -> Alike:
    return a, copy.deepcopy(a), {"run": run}


def cast(run: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Return arguments with the numbers in a dtype."""
    return {
        name: one.to(dtype) if isinstance(one, Tensor) and one.is_floating_point() else one for name, one in run.items()
    }


def in_bfloat16(a: nn.Module, run: dict[str, Any]) -> Alike:
    return a, copy.deepcopy(a).bfloat16(), {"run": run, "run_b": cast(run, torch.bfloat16)}


def in_half(a: nn.Module, run: dict[str, Any]) -> Alike:
    return a, copy.deepcopy(a).half(), {"run": run, "run_b": cast(run, torch.half)}


def in_float64(a: nn.Module, run: dict[str, Any]) -> Alike:
    return a, copy.deepcopy(a).double(), {"run": run, "run_b": cast(run, torch.double)}


def other_attention(a: nn.Module, run: dict[str, Any]) -> Alike:
    b = copy.deepcopy(a)
    if not hasattr(b, "set_attn_implementation") or not getattr(type(b), "_supports_sdpa", False):
        return None
    b.set_attn_implementation("sdpa")
    return a, b, {"run": run}


def a_single_row(a: nn.Module, run: dict[str, Any]) -> Alike:
    rows = [one for one in run.values() if isinstance(one, Tensor)]
    if any(len(one) < 2 for one in rows):
        return None
    single = {name: one[:1] if isinstance(one, Tensor) else one for name, one in run.items()}
    return a, copy.deepcopy(a), {"run": run, "run_b": single, "to_b": lambda tensor: tensor[:1]}


class Wrapped(nn.Module):
    """A model under another name."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, **kwargs: Any) -> Any:
        """Return what the model returns."""
        return self.inner(**kwargs)


def renamed(a: nn.Module, run: dict[str, Any]) -> Alike:
    return a, Wrapped(copy.deepcopy(a)), {"run": run}


def channels_last(a: nn.Module, run: dict[str, Any]) -> Alike:
    if not any(isinstance(one, nn.Conv2d) for one in a.modules()):
        return None
    return a, copy.deepcopy(a).to(memory_format=torch.channels_last), {"run": run}


def compiled(a: nn.Module, run: dict[str, Any]) -> Alike:
    if hasattr(a, "config"):  # Transformers take long to compile.
        return None
    return a, torch.compile(copy.deepcopy(a), backend="aot_eager"), {"run": run}


def other_order_of_sums(a: nn.Module, run: dict[str, Any]) -> Alike:
    b = copy.deepcopy(a)
    for module in list(b.modules()):
        if type(module) is nn.Linear:
            _become(module, lambda self, own, x: _by_parts(x, self.weight, self.bias))
    return a, b, {"run": run}


def _by_parts(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    half = weight.shape[1] // 2
    output = x[..., half:] @ weight[:, half:].T + x[..., :half] @ weight[:, :half].T
    return output if bias is None else output + bias


class Adapted(nn.Module):
    """A linear layer with a low-rank adapter, which may be merged into its weight."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.is_merged = base, False
        self.down, self.up = (
            nn.Linear(*sizes, bias=False) for sizes in ((base.in_features, 4), (4, base.out_features))
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the output."""
        return self.base(x) if self.is_merged else self.base(x) + 0.5 * self.up(self.down(x))

    def merge(self) -> None:
        """Add the adapter to the weight."""
        self.base.weight += 0.5 * self.up.weight @ self.down.weight
        self.is_merged = True


def merged_adapters(a: nn.Module, run: dict[str, Any]) -> Alike:
    a = copy.deepcopy(a)
    linear = [
        path for path, one in a.named_modules() if type(one) is nn.Linear and re.search(r"q|query|value|fc", path)
    ]
    for path in linear:
        holder, _, name = path.rpartition(".")
        setattr(a.get_submodule(holder), name, Adapted(a.get_submodule(path)))
    b = copy.deepcopy(a)
    with torch.no_grad():
        for one in b.modules():
            if isinstance(one, Adapted):
                one.merge()
    return (a, b, {"run": run}) if linear else None


def hold_the_same(a: nn.Module, b: nn.Module) -> bool:
    """Return True if two models hold the same numbers."""
    return all(torch.equal(one, two) for one, two in zip(a.parameters(), b.parameters(), strict=True))


@torch.no_grad()
def folded_norms(a: nn.Module, run: dict[str, Any]) -> Alike:
    b = copy.deepcopy(a)
    for layer in b.modules():
        if not {"input_layernorm", "self_attn"} <= dict(layer.named_children()).keys():
            continue
        norm, attention = layer.input_layernorm, layer.self_attn
        if "Gemma" in type(norm).__name__ or getattr(norm, "bias", None) is not None:
            return None
        if not hasattr(attention, "q_proj"):
            return None
        for linear in (attention.q_proj, attention.k_proj, attention.v_proj):
            linear.weight.mul_(norm.weight)
        norm.weight.fill_(1.0)
    return (a, b, {"run": run}) if not hold_the_same(a, b) else None


@torch.no_grad()
def fused_norms(a: nn.Module, run: dict[str, Any]) -> Alike:
    b = copy.deepcopy(a)
    for block in b.modules():
        if isinstance(block, ConvBlock):
            for number in "12":
                conv, norm = getattr(block, f"conv{number}"), getattr(block, f"norm{number}")
                setattr(block, f"conv{number}", torch.nn.utils.fuse_conv_bn_eval(conv, norm))
                setattr(block, f"norm{number}", nn.Identity())
    return (a, b, {"run": run}) if any(isinstance(one, ConvBlock) for one in b.modules()) else None


_MLPS = (
    ("gate_proj up_proj", "down_proj"), ("fc1", "fc2"), ("lin1", "lin2"), ("dense_h_to_4h", "dense_4h_to_h"),
)  # fmt: skip


@torch.no_grad()
def reordered_units(a: nn.Module, run: dict[str, Any]) -> Alike:
    b = copy.deepcopy(a)
    for layer in b.modules():
        for into, out in _MLPS:
            if all(isinstance(getattr(layer, name, None), nn.Linear) for name in (*into.split(), out)):
                for name in into.split():
                    for one in getattr(layer, name).parameters():
                        one.copy_(one.flip(0).clone())
                last = getattr(layer, out)
                last.weight.copy_(last.weight.flip(1).clone())
    return (a, b, {"run": run}) if not hold_the_same(a, b) else None


SAME: dict[str, Callable[[nn.Module, dict[str, Any]], Alike]] = {
    one.__name__: one
    for one in (
        copied, in_bfloat16, in_half, in_float64, other_attention, a_single_row, renamed, channels_last,
        compiled, other_order_of_sums, merged_adapters, folded_norms, fused_norms, reordered_units,
    )
}  # fmt: skip


def judged(fault: Fault, report: Any) -> tuple[bool, bool]:
    """Return whether a report names the module with the fault, and whether its hint is right."""
    sites = fault.site.split("|")
    first = report.first
    if first is None:
        return False, False
    is_found = first.site in sites
    return is_found, is_found and re.search(fault.words, first.hint) is not None
